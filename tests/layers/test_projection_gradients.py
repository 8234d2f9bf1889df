"""Several linear maps of one input, as one product and apart: gradients, and what is saved.

Equal bits (see common.py): the same calls, made again by a checkpoint.
"""

import copy
import functools

import pytest
import torch
from common import assert_close
from dispatch import Calls
from models import make_layer, make_x, products
from modules import kept
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gla_ext.layers._route import project

SIZES = (4, 5, 6, 7)


def make_linears(dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    return [nn.Linear(24, size, bias=False, dtype=dtype).to(device) for size in SIZES]


def weights_of(linears):
    return [linear.weight for linear in linears]


def losses(ys):
    """A different loss for each result, so that no gradient can pass for another."""
    return sum((i + 1) * y.float().sin().sum() for i, y in enumerate(ys))


def with_gradients(linears, x, together, autocast=None, of=None, **options):
    """Results and gradients; by the modules, one after the other, where together is None."""
    leaves = of or [t for t in (x, *weights_of(linears)) if t.requires_grad]
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        modules = together is None
        ys = [m(x) for m in linears] if modules else project(x, linears, together)
    return [*ys, *torch.autograd.grad(losses(ys), leaves, **options)]


DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("T", [0, 1, 70])
@pytest.mark.parametrize("together", [True, False])
def test_gradients_equal_those_of_modules(device, dtype, bound, T, together):
    linears = make_linears(dtype, device)
    x = make_x(T=T, dtype=dtype).to(device).requires_grad_()
    pair = (with_gradients(linears, x, how) for how in (together, None))
    for got, wanted in zip(*pair, strict=True):
        assert got.dtype == dtype
        assert_close(got, wanted, bound)


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = [(FP32, FP32, BF16, 0.03), (FP32, FP32, FP16, 2e-3), (BF16, BF16, FP16, 0.03)]
KINDS += [(FP32, BF16, BF16, 0.03), (BF16, FP32, BF16, 0.03)]


@pytest.mark.parametrize(("x_dtype", "weight_dtype", "autocast", "bound"), KINDS)
@pytest.mark.parametrize("together", [True, False])
def test_autocast_equals_that_of_modules(device, weight_dtype, x_dtype, autocast, bound, together):
    linears = make_linears(weight_dtype, device)
    x = make_x(dtype=x_dtype).to(device).requires_grad_()
    pair = (with_gradients(linears, x, how, autocast) for how in (together, None))
    for got, wanted in zip(*pair, strict=True):
        assert got.dtype == wanted.dtype
        assert_close(got, wanted, bound)


def test_autocast_casts_weights_where_it_puts_them_together(device):
    """And their gradients where it takes them apart: no copy of the whole in between."""
    linears = make_linears(torch.float32, device)
    x = make_x(dtype=torch.float32).to(device).requires_grad_()
    with Calls() as calls:
        with_gradients(linears, x, True, torch.bfloat16)
    assert calls.count("_foreach_copy_") == 3
    assert calls.count("cat") == 1  # gradients of the results
    assert calls.count("_to_copy") == 10  # x, the results for losses(), and back


def test_gradients_of_gradients_under_autocast():
    linears = make_linears(torch.float32)
    x, results = make_x(T=3, dtype=torch.float32).requires_grad_(), []
    for together in (True, False, None):
        *_, dx = with_gradients(linears, x, together, torch.bfloat16, of=[x], create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), [x, *weights_of(linears)]))
    for *found, wanted in zip(*results, strict=True):
        for got in found:
            assert_close(got, wanted, 0.05)


def test_products_apart_add_up_the_gradient_of_their_input(device):
    linears = make_linears(torch.float32, device)
    x = make_x(dtype=torch.float32).to(device).requires_grad_()
    with Calls() as calls:
        with_gradients(linears, x, False)
    assert calls.count("addmm") == 3
    with Calls() as of_modules:
        with_gradients(linears, x, None)
    sums = [c.count("add") + c.count("add_") for c in (calls, of_modules)]
    assert sums[1] - sums[0] == 3


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype", "autocast"),
    [(torch.float32, torch.bfloat16, False), (torch.float32, torch.float64, True)],
)
@pytest.mark.parametrize("together", [True, False])
def test_dtypes_that_do_not_fit_are_an_error(x_dtype, weight_dtype, autocast, together):
    linears, x = make_linears(weight_dtype), make_x(dtype=x_dtype)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        pytest.raises(RuntimeError, match="dtype"),
    ):
        project(x, linears, together)


@pytest.mark.parametrize("frozen", [(), (0,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("needs_dx", [True, False])
def test_frozen_weights_have_no_product(frozen, needs_dx):
    linears, x = make_linears(), make_x().requires_grad_(needs_dx)
    for i in frozen:
        linears[i].weight.requires_grad_(False)
    leaves = [t for t in (x, *weights_of(linears)) if t.requires_grad]
    if not leaves:
        assert not any(y.requires_grad for y in project(x, linears, True))
        return
    loss, gradients = losses(project(x, linears, True)), []
    lefts = products(lambda: gradients.extend(torch.autograd.grad(loss, leaves)), side=-2)
    trained = 22 - sum(SIZES[i] for i in frozen)
    tokens = x.shape[0] * x.shape[1]
    expected = [(tokens, 22)] if needs_dx else []
    expected += [(trained, tokens)] if trained else []
    assert lefts == sorted(expected)
    for got, wanted in zip(gradients, with_gradients(linears, x, None)[4:], strict=True):
        assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_gradients_have_storages_of_their_own(autocast):
    linears, x = make_linears(torch.float32), make_x(dtype=torch.float32)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        losses(project(x, linears, True)).backward()
    for weight in weights_of(linears):
        assert weight.grad.is_contiguous()
        assert weight.grad.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    assert len({w.grad.untyped_storage().data_ptr() for w in weights_of(linears)}) == 4


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_saves_the_weights_and_no_copy(autocast, together):
    linears = make_linears(torch.float32)
    x = make_x(dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        _, saved = kept(lambda: project(x, linears, together))
    weights = {w.data_ptr() for w in weights_of(linears)}
    assert weights < set(saved)
    assert [t.shape for address, t in saved.items() if address not in weights] == [x.shape]


def test_saves_what_the_gradients_need():
    linears, x = make_linears(), make_x()

    def saved():
        return [t.shape for t in kept(lambda: project(x, linears, True))[1].values()]

    assert saved() == [x.shape]
    for weight in weights_of(linears):
        weight.requires_grad_(False)
    x.requires_grad_()
    assert len(saved()) == 4
    with torch.no_grad():
        assert not saved()


def test_results_that_nobody_uses_have_a_gradient_of_zero():
    linears, x = make_linears(), make_x().requires_grad_()
    leaves = [x, linears[1].weight]
    together, apart = (
        torch.autograd.grad(project(x, linears, t)[1].sin().sum(), leaves) for t in (True, False)
    )
    for got, wanted in zip(together, apart, strict=True):
        assert_close(got, wanted, 1e-12)
    project(x, linears, True)[1].sum().backward()
    assert not linears[0].weight.grad.any()


class Projections(nn.Module):
    def __init__(self, together=True):
        super().__init__()
        self.linears, self.together = nn.ModuleList(make_linears()), together

    def forward(self, x):
        return project(x, self.linears, self.together)


def as_function(module, x, *weights):
    names = [name for name, _ in module.named_parameters()]
    return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,))


@pytest.mark.parametrize("together", [True, False])
def test_gradients_of_gradients(together):
    module, x = Projections(together), make_x(T=3).requires_grad_()
    leaves, call = [x, *module.parameters()], functools.partial(as_function, module)
    widths = [(24, 22)] if together else [(24, size) for size in SIZES]
    assert products(lambda: call(*leaves)) == widths
    torch.autograd.gradcheck(call, leaves)
    torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("together", [True, False])
def test_function_transforms(together):
    module = Projections(together)
    leaves = [make_x(T=3), *(p.detach() for p in module.parameters())]

    def loss(*leaves):
        return losses(as_function(module, *leaves))

    def loss_apart(x, *weights):
        return losses([x @ w.T for w in weights])

    for transform in (
        lambda f: torch.func.grad(f, tuple(range(5))),
        lambda f: torch.vmap(torch.func.grad(f, tuple(range(5))), (0, *4 * [None])),
        lambda f: torch.func.jacrev(torch.func.grad(f, 1)),
    ):
        got, wanted = (transform(f)(*leaves) for f in (loss, loss_apart))
        for a, b in zip(got, wanted, strict=True):
            assert_close(a, b, 1e-12)
    got, wanted = (torch.func.jvp(f, tuple(leaves), tuple(leaves)) for f in (loss, loss_apart))
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, 1e-12)


def test_sharded_weights_are_freed_between_forward_and_backward(one_rank):
    from torch.distributed.fsdp import fully_shard

    layer, x = make_layer(), make_x().requires_grad_()
    plain = copy.deepcopy(layer)
    fully_shard(layer, mesh=one_rank, reshard_after_forward=True)
    tensors = []
    with saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        y = layer(x)[0]
    assert not [t for t in tensors if t.shape in ((72, 24), (24, 72))]
    unsharded = [t for t in tensors if t.shape == layer.v_proj.weight.shape]
    assert unsharded and not any(t.untyped_storage().nbytes() for t in unsharded)
    y.square().sum().backward()
    plain(x)[0].square().sum().backward()
    for name, wanted in plain.named_parameters():
        got = layer.get_parameter(name).grad.full_tensor()
        assert_close(got, wanted.grad, 1e-12, name=name)


@pytest.mark.parametrize(
    ("dtype", "requires_grad", "together"),
    [(FP32, True, True), (BF16, True, False), (FP32, False, False), (BF16, False, True)],
)
def test_opcheck(device, dtype, requires_grad, together):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, device=device, dtype=dtype, requires_grad=requires_grad)
    weights = [torch.randn(n, 8, device=device, requires_grad=requires_grad) for n in (4, 6)]
    operator = torch.ops.gla_ext.joint_projection.default
    # A graph's products may round a gradient's sum once more or less than eager ones.
    bounds = {} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.05}
    torch.library.opcheck(operator, (x, weights, dtype, together), **bounds)
