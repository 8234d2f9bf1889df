"""The norm with its gate: values, gradients, layouts and errors, against fp64 plain torch.

Equal bits (see common.py): own sums.
"""

import functools
import math
import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from common import CUDA_DTYPES, DTYPES, assert_close
from models import FUNCTIONS
from norm_inputs import BOUND, EPS, LAYOUTS, check, exact, laid_out, make, normal
from wrapped import Wrapped

from gla_ext.layers.norms import GatedRMSNorm, RMSNorm, plain_rms_norm, rms_norm

ops = torch.ops.gla_ext
# On CUDA a row has 8, 16, 32, 64, 128 or 256 threads, or is read in a loop.
WIDTHS = (1, 7, 64, 128, 256, 512, 1000, 1024, 2048, 2500)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@by_dtype
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "alone"])
@pytest.mark.parametrize("V", WIDTHS)
def test_values_and_gradients(device, V, gated, dtype):
    x, weight, gate, dy = make((2, 9, 3, V), device, dtype)
    # Of one column there are few values, whose rounding does not average.
    check(x, weight, gate if gated else None, dy, factor=2.0 if V == 1 else 1.0)


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("V", [64, 72])
def test_layouts(device, V, layout, dtype):
    x, weight, gate, dy = make((2, 9, 3, V), device, dtype, layout)
    check(x, weight, gate, dy)
    check(x.contiguous(), weight, gate, laid_out(dy, layout))


@by_dtype
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activations(device, activation, dtype):
    x, weight, gate, dy = make((2, 9, 3, 40), device, dtype)
    check(x, weight, 3 * gate, dy, activation)


@by_dtype
@pytest.mark.parametrize("weight_dtype", [None, *CUDA_DTYPES], ids=str)
def test_weights(device, weight_dtype, dtype):
    """Of another dtype, or absent."""
    x, weight, gate, dy = make((2, 9, 3, 40), device, dtype, weight_dtype=weight_dtype)
    check(x, None if weight_dtype is None else weight, gate, dy)


@pytest.mark.parametrize("of_x, of_gate", [(torch.bfloat16, torch.float32), (torch.float16,) * 2])
def test_a_gate_of_another_dtype_is_not_rounded(device, of_x, of_gate):
    x, weight, gate, _ = make((1, 50, 2, 40), device, of_x)
    gate = gate.to(of_gate) * (1 if of_gate == of_x else 1.001)
    found = rms_norm(x, weight, EPS, gate.requires_grad_())
    assert found.dtype == of_x
    expected = exact(x.double(), weight.double(), gate.double())
    assert torch.equal(found, rms_norm(x.float(), weight, EPS, gate.float()).to(of_x))
    assert (found.double() - expected).norm() < BOUND[of_x] * expected.norm()
    assert torch.autograd.grad(found.sum(), gate)[0].dtype == of_gate


@by_dtype
def test_many_rows(device, dtype):
    """More than the blocks, and the tasks, have at once; dweight is a sum over all of them."""
    x, weight, gate, dy = make((4, 1100, 4, 64), device, dtype)
    check(x, weight, gate, dy, factor=2.0)


@by_dtype
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "alone"])
@pytest.mark.parametrize("V", WIDTHS)
def test_backward_gives_the_output_again(device, V, gated, dtype):
    """With the bits of forward; the rest is as without it, but for the order of dweight's sum."""
    x, weight, gate, dy = make((4, 150, 4, V), device, dtype)
    gate = gate if gated else None
    y, rstd = ops.rms_norm_gate_fwd(x, weight, gate, "swish", EPS)
    call = functools.partial(ops.rms_norm_gate_bwd, dy, x, weight, gate, rstd, "swish")
    dx, dweight, dgate, again = call(True)
    assert torch.equal(again, y)
    expected = call(False)
    assert torch.equal(dx, expected[0]) and torch.equal(dgate, expected[2])
    assert_close(dweight, expected[1], max(BOUND[dtype], BOUND[torch.float32]))
    assert expected[3].numel() == 0


@by_dtype
@pytest.mark.parametrize("weighted", [True, False], ids=["", "no weight"])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_every_activation_is_made_again(device, activation, weighted, dtype):
    x, weight, gate, dy = make((2, 9, 3, 40), device, dtype)
    weight = weight if weighted else None
    y, rstd = ops.rms_norm_gate_fwd(x, weight, 3 * gate, activation, EPS)
    again = ops.rms_norm_gate_bwd(dy, x, weight, 3 * gate, rstd, activation, True)[3]
    assert torch.equal(again, y)


@pytest.mark.parametrize("T", [0, 1])
def test_no_and_one_row(device, T):
    x, weight, gate, dy = make((1, T, 1, 24), device, torch.float32)
    check(x, weight, gate, dy)
    if T == 0:
        leaf = weight.requires_grad_()
        assert not torch.autograd.grad(rms_norm(x, leaf, EPS, gate).sum(), leaf)[0].any()


def test_a_vector(device):
    x, weight, gate = (normal(24, seed=i, device=device, dtype=torch.float32) for i in range(3))
    expected = exact(*(t.double() for t in (x, weight, gate)))
    assert (rms_norm(x, weight, EPS, gate) - expected).norm() < 1e-6 * expected.norm()
    _, rstd = ops.rms_norm_gate_fwd(x, weight, gate, "swish", EPS)
    assert rstd.shape == ()
    assert abs(rstd.item() - 1 / math.sqrt(x.double().square().mean() + EPS)) < 1e-6


def test_an_expanded_gradient(device):
    """As inductor hands it over, with strides of 0."""
    x, weight, gate, _ = make((2, 9, 3, 40), device, torch.float32)
    check(x, weight, gate, x.new_ones(()).expand(x.shape))


@by_dtype
@pytest.mark.parametrize("V", [64, 100, 2500])
def test_the_same_bits_in_every_run_and_for_every_row(device, V, dtype):
    x, weight, gate, dy = make((2, 70, 4, V), device, dtype)

    def run(rows):
        leaves = [t.detach().requires_grad_() for t in (x[rows], weight, gate[rows])]
        y = rms_norm(*leaves[:2], EPS, leaves[2])
        return y, *torch.autograd.grad(y, leaves, dy[rows])

    whole = run(slice(None))
    for a, b in zip(whole, run(slice(None)), strict=True):
        assert torch.equal(a, b)
    for i, part in enumerate(run(slice(1, 2))):
        if i != 2:  # dweight
            assert torch.equal(part[0], whole[i][1])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads):
    x, weight, gate, dy = make((2, 300, 4, 64), "cpu", torch.float32)
    results, before = [], torch.get_num_threads()
    for count in (2, threads):
        torch.set_num_threads(count)
        leaves = [t.detach().requires_grad_() for t in (x, weight, gate)]
        y = rms_norm(*leaves[:2], EPS, leaves[2])
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [RMSNorm, GatedRMSNorm])
def test_nan_stays_in_its_row(device, kind):
    norm = kind(40, eps=EPS).to(device)
    x = normal(4, 40, seed=1, device=device, dtype=torch.float32)
    x[2, 7] = torch.nan
    with torch.no_grad():
        found = norm(*[x] * (1 + (kind is GatedRMSNorm)))
    assert found[2].isnan().all()
    assert found[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gates_far_out(device, activation, dtype):
    """What plain torch gives, NaN and infinite gates included."""
    far = [0.0, -0.0, 1e-3, 9.0, -9.0, 80.0, -80.0, 95.0, -95.0, 3e4, -3e4]
    gate = torch.tensor([*far, math.inf, -math.inf, math.nan] * 2, dtype=dtype, device=device)
    x = normal(28, seed=1, device=device, dtype=dtype)
    leaves = [gate.clone().requires_grad_() for _ in range(2)]
    found, plain = (
        norm(x, None, EPS, leaf, activation)
        for norm, leaf in zip((rms_norm, plain_rms_norm), leaves, strict=True)
    )
    bounds = {"rtol": 4 * BOUND[dtype], "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(found, plain, **bounds)
    gradients = (
        torch.autograd.grad(y.sum(), leaf) for y, leaf in ((found, leaves[0]), (plain, leaves[1]))
    )
    for got, wanted in zip(*gradients, strict=True):
        finite = gate.isfinite() & (gate.abs() < 1e3)
        torch.testing.assert_close(got[finite], wanted[finite], **bounds)
        assert torch.equal(got[gate.isnan()].isnan(), wanted[gate.isnan()].isnan())


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_gradcheck(activation):
    x, weight, gate, _ = make((2, 2, 2, 5), "cpu", torch.float64)
    gate = torch.where(gate.abs() < 0.01, 0.5, gate)  # not where relu has no slope
    leaves = [t.clone().requires_grad_() for t in (x, weight, gate)]
    assert torch.autograd.gradcheck(
        lambda x, weight, gate: rms_norm(x, weight, EPS, gate, activation), leaves
    )
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, EPS), leaves[:1])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("B", [2, 0])
def test_opcheck(device, B, requires_grad, gated, weighted):
    x, weight, gate, dy = make((B, 3, 2, 8), device, torch.float32, "heads of a projection")
    weight, gate = weight if weighted else None, gate if gated else None
    leaves = [None if t is None else t.requires_grad_(requires_grad) for t in (x, weight, gate)]
    torch.library.opcheck(ops.rms_norm_gate_fwd.default, (*leaves, "silu", EPS))
    if not requires_grad:
        _, rstd = ops.rms_norm_gate_fwd(*leaves, "silu", EPS)
        torch.library.opcheck(ops.rms_norm_gate_bwd.default, (dy, *leaves, rstd, "silu", True))


def raises(error, message):
    return pytest.raises(error, match="^" + re.escape(message))


def call(x, weight=None, gate=None, activation="swish"):
    return ops.rms_norm_gate_fwd(x, weight, gate, activation, EPS)


NAME = "rms_norm_gate: "


def test_errors(device):
    x = torch.zeros(2, 3, 8, device=device)
    with raises(TypeError, NAME + "expected gate to be torch.float32 like x, got torch.float16"):
        call(x, gate=x.half())
    with raises(TypeError, NAME + "expected x to be torch.bfloat16, torch.float16, torch.float32"):
        call(x.int())
    with raises(TypeError, NAME + "expected weight to be torch.bfloat16, torch.float16, torch.fl"):
        call(x, x[0, 0].long())
    with raises(ValueError, NAME + "expected x to have at least 1 dimension [..., V], got 0"):
        call(x[0, 0, 0])
    with raises(ValueError, NAME + "expected the last dimension of x to be at least 1, got 0"):
        call(x[..., :0])
    expected = "expected gate to have shape [..., V] = [2, 3, 8], got [2, 3, 7]"
    with raises(ValueError, NAME + expected):
        call(x, gate=x[..., 1:])
    with raises(ValueError, NAME + "expected weight to have shape [V] = [8], got [7]"):
        call(x, x[0, 0, 1:])
    with raises(ValueError, NAME + "expected weight on the device of x, "):
        call(x, x[0, 0].to("meta"))
    known = "relu, sigmoid, logsigmoid, silu, swish, sqrelu, gelu"
    with raises(ValueError, NAME + f"expected activation to be one of {known}, got 'tanh'"):
        call(x, activation="tanh")
    with raises(NotImplementedError, NAME + "expected strided (dense) tensors, got layout Sparse"):
        call(x.to_sparse())
    backward = ops.rms_norm_gate_bwd
    with raises(ValueError, "rms_norm_gate_bwd: expected dy to have shape [..., V] = [2, 3, 8]"):
        backward(x[:1], x, None, None, x[..., 0], "swish")
    with raises(ValueError, "rms_norm_gate_bwd: expected rstd to have shape [...] = [2, 3], got"):
        backward(x, x, None, None, x[:, 1:, 0], "swish")


X = torch.ones(2, 3, 8)
WRONG = {
    "x of integers": {"x": X.long()},
    "a complex x": {"x": X.cfloat()},
    "a weight of integers": {"x": X, "weight": X[0, 0].long()},
    "a scalar": {"x": X[0, 0, 0]},
    "no column": {"x": X[..., :0]},
    "a weight of x's rank": {"x": X, "weight": X},
    "a weight that broadcasts": {"x": X, "weight": X[0, 0, :1]},
    "a weight elsewhere": {"x": X, "weight": X[0, 0].to("meta")},
    "an activation by no name": {"x": X, "activation": "tanh"},
}
WRONG_GATES = {
    "a gate that broadcasts": {"x": X, "gate": X[:1]},
    "a gate of another rank": {"x": X, "gate": X[0]},
    "a gate elsewhere": {"x": X, "gate": X.to("meta")},
    "a gate of integers": {"x": X, "gate": X.long()},
    "x of integers beside a gate": {"x": X.long(), "gate": X},
    "a gate of 8 bits": {"x": X, "gate": X.to(torch.float8_e4m3fn)},
}


def refusal(of) -> tuple[type, str]:
    """Of the operator, up to the name of a dtype: torch's C++ and Python have two for some."""
    with pytest.raises((TypeError, ValueError)) as caught:
        rms_norm(**of)
    return caught.type, str(caught.value).partition(", got torch.")[0]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("of", WRONG.values(), ids=WRONG)
def test_compiled_it_refuses_what_the_operator_refuses(of, dynamic):
    options = {"backend": "eager", "dynamic": dynamic}
    with raises(*refusal(of)):
        torch.compile(rms_norm, **options)(**of)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="rms_norm_gate"):
        torch.compile(rms_norm, fullgraph=True, **options)(**of)


@pytest.mark.parametrize("of", (WRONG | WRONG_GATES).values(), ids=WRONG | WRONG_GATES)
def test_sharded_tensors_are_refused_as_the_operator_refuses_others(of):
    with raises(*refusal(of)):
        rms_norm(**of | {"x": Wrapped(of["x"])})


def test_under_vmap_a_weight_of_every_row_is_refused():
    with raises(ValueError, NAME + "expected weight to have 1 dimension [V], got 2 with shape [3,"):
        torch.vmap(rms_norm)(X, X)


@pytest.mark.cuda
def test_fp64_on_cuda_is_refused_by_the_operator_and_plain_in_the_module():
    x = torch.randn(3, 40, dtype=torch.float64, device="cuda")
    with raises(NotImplementedError, NAME + "expected torch.bfloat16, torch.float16 or torch.fl"):
        call(x)
    norm = GatedRMSNorm(40).cuda()
    assert torch.equal(norm(x, x), plain_rms_norm(x, norm.weight, gate=x))


def test_what_is_not_differentiated():
    x = torch.randn(3, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with raises(NotImplementedError, NAME + "double backward is not supported"):
        dx.sum().backward()
    with raises(NotImplementedError, NAME + "torch.func transforms"):
        torch.func.grad(lambda x: rms_norm(x).sum())(x.detach())
    with fwAD.dual_level(), raises(NotImplementedError, NAME + "forward-mode AD"):
        rms_norm(fwAD.make_dual(x.detach(), x.detach()))


def test_vmap():
    x, gate = torch.randn(2, 3, 4, 8)
    norm = GatedRMSNorm(8)
    assert torch.equal(torch.vmap(norm)(x, gate), norm(x, gate))


def test_compiled_the_gated_norm_is_the_operator_and_the_other_plain():
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    norms = RMSNorm(8), GatedRMSNorm(8)
    for norm in norms:
        compiled = torch.compile(norm, fullgraph=True, dynamic=True, backend=backend)
        for T in (3, 5):
            inputs = torch.randn(2, T, 8)[: 1 + isinstance(norm, GatedRMSNorm)]
            torch.testing.assert_close(compiled(*inputs), norm(*inputs))
    assert len(graphs) == 2
    assert [ops.rms_norm_gate_fwd.default in targets for targets in graphs] == [False, True]


def test_checks_of_plain_operations_make_no_graph_for_a_size():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    options = {"fullgraph": True, "dynamic": True, "backend": backend}
    alone, mapped = (
        torch.compile(f, **options) for f in (rms_norm, torch.vmap(rms_norm, in_dims=(0, None)))
    )
    for B, T, V in ((2, 3, 8), (4, 5, 7), (3, 9, 12)):
        x, weight = torch.randn(B, T, V), torch.randn(V)
        for call in (alone, mapped):
            torch.testing.assert_close(call(x, weight), rms_norm(x, weight))
    assert len(graphs) == 2


def test_inductor(device):
    norm = GatedRMSNorm(40, activation="sigmoid").to(device)
    compiled = torch.compile(norm, fullgraph=True, dynamic=True)
    for T in (9, 12):
        leaves = [normal(T, 40, seed=i, device=device, dtype=torch.float32) for i in (1, 2)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        results = []
        for call in (compiled, norm):
            y = call(*leaves)
            gradients = torch.autograd.grad(y.square().sum(), [*leaves, norm.weight])
            results.append((y, *gradients))
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted)


def test_sharded_tensors_take_plain_operations():
    x = torch.randn(3, 8)
    found = rms_norm(Wrapped(x), None, EPS)
    assert torch.equal(found.inner, plain_rms_norm(x, None, EPS))
