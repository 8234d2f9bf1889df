"""A residual stream and its norm: values, gradients, layouts and errors, against fp64.

Equal bits (see common.py): own sums.
"""

import re

import pytest
import torch
from common import CUDA_DTYPES, DTYPES
from models import make_ids, make_model
from norm_inputs import BOUND, EPS, LAYOUTS, exact, laid_out, normal
from torch import nn

from gla_ext.layers.norms import RMSNorm, rms_norm, rms_norm_residual

ops = torch.ops.gla_ext
# On CUDA a row has 32, 128 or 256 threads, or is read in a loop.
WIDTHS = (1, 7, 64, 256, 264, 1000, 1024, 2048, 2500)
KINDS = [(dtype, dtype) for dtype in DTYPES]
KINDS += [(dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16)]
by_kind = pytest.mark.parametrize("dtype, stream", KINDS, ids=str)


def make(shape, device, dtype, stream, layout="contiguous"):
    x, residual = (
        normal(*shape, seed=i, device=device, dtype=d) for i, d in ((1, dtype), (2, stream))
    )
    if layout != "contiguous":
        x, residual = laid_out(x, layout), laid_out(residual, layout)
    dy, dstream = (
        normal(*shape, seed=i, device=device, dtype=d) for i, d in ((4, dtype), (5, stream))
    )
    return x, residual, normal(shape[-1], seed=3, device=device, dtype=dtype), dy, dstream


def results(function, leaves, dy, dstream):
    y, stream = function(*leaves)
    outputs, gradients = [], []
    for t, g in ((y, dy), (stream, dstream)):
        if g is not None:
            outputs.append(t)
            gradients.append(g)
    there = [t for t in leaves if t is not None]
    found = torch.autograd.grad(outputs, there, gradients, allow_unused=True)
    return [y, stream, *found]


def by_definition(x, residual, weight=None):
    stream = x + residual
    return exact(stream, weight, None), stream


def check(x, residual, weight, dy, dstream, factor=1.0):
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, residual, weight)]
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in leaves]
    found = results(lambda *a: rms_norm_residual(*a, EPS), leaves, dy, dstream)
    wide = [None if t is None else t.double() for t in (dy, dstream)]
    expected = results(by_definition, doubles, *wide)
    kinds = [x, residual, *(t for t in leaves if t is not None)]
    for i, (of, got, want) in enumerate(zip(kinds, found, expected, strict=True)):
        if want is None:
            assert got is None
            continue
        assert got.dtype == of.dtype and got.shape == of.shape
        # What is normed is the stream as it is rounded.
        bound = max(BOUND[of.dtype], BOUND[residual.dtype]) * (1 if i == 1 else 2)
        assert (got.double() - want).norm() < factor * bound * want.norm().clamp_min(1e-9), i


@by_kind
@pytest.mark.parametrize("V", WIDTHS)
def test_values_and_gradients(device, V, dtype, stream):
    x, residual, weight, dy, dstream = make((2, 9, V), device, dtype, stream)
    check(x, residual, weight, dy, dstream, factor=3.0 if V == 1 else 1.0)
    check(x, residual, None, dy, None, factor=3.0 if V == 1 else 1.0)


@by_kind
def test_only_the_stream_has_a_gradient(device, dtype, stream):
    x, residual, weight, _, dstream = make((2, 9, 64), device, dtype, stream)
    check(x, residual, weight, None, dstream)


@by_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, dtype, stream):
    x, residual, weight, dy, dstream = make((2, 9, 3, 72), device, dtype, stream, layout)
    check(x, residual, weight, dy, dstream)
    check(x, residual.contiguous(), weight, laid_out(dy, layout), laid_out(dstream, layout))


@by_kind
def test_is_the_sum_and_then_the_norm(device, dtype, stream):
    """The same bits."""
    x, residual, weight, _, _ = make((2, 90, 264), device, dtype, stream)
    y, total = rms_norm_residual(x, residual, weight, EPS)
    assert torch.equal(total, residual + x)
    assert torch.equal(y, rms_norm(total, weight, EPS).to(dtype))


@by_kind
def test_many_rows(device, dtype, stream):
    x, residual, weight, dy, dstream = make((4, 4400, 64), device, dtype, stream)
    check(x, residual, weight, dy, dstream, factor=2.0)


@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (24,)])
def test_no_and_one_row(device, shape):
    x, residual, weight, dy, dstream = make(shape, device, torch.float32, torch.float32)
    check(x, residual, weight, dy, dstream)


def test_a_shorter_residual_is_cast(device):
    x, residual, weight, _, _ = make((3, 24), device, torch.float32, torch.bfloat16)
    y, stream = rms_norm_residual(x, residual, weight, EPS)
    assert y.dtype == stream.dtype == torch.float32
    assert torch.equal(stream, x + residual)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
def test_the_same_bits_in_every_run_and_for_every_row(device, dtype):
    x, residual, weight, dy, dstream = make((140, 264), device, dtype, dtype)

    def run(rows):
        leaves = [t.detach().requires_grad_() for t in (x[rows], residual[rows], weight)]
        return results(lambda *a: rms_norm_residual(*a, EPS), leaves, dy[rows], dstream[rows])

    whole = run(slice(None))
    assert all(torch.equal(a, b) for a, b in zip(whole, run(slice(None)), strict=True))
    for part, of_all in zip(run(slice(17, 40))[:4], whole[:4], strict=True):
        assert torch.equal(part, of_all[17:40])


def test_gradcheck():
    x, residual, weight, _, _ = make((2, 5), "cpu", torch.float64, torch.float64)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    assert torch.autograd.gradcheck(lambda *a: rms_norm_residual(*a, EPS), leaves)


@by_kind
@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck(device, requires_grad, dtype, stream):
    x, residual, weight, dy, dstream = make((2, 3, 8), device, dtype, stream)
    leaves = [t.requires_grad_(requires_grad) for t in (x, residual, weight)]
    torch.library.opcheck(ops.rms_norm_residual_fwd.default, (*leaves, EPS))
    if not requires_grad:
        _, total, rstd = ops.rms_norm_residual_fwd(*leaves, EPS)
        for d in (dstream, None):
            arguments = (dy, d, total, weight, rstd)
            torch.library.opcheck(ops.rms_norm_residual_bwd.default, arguments)


def test_module(device):
    x, residual, _, _, _ = make((3, 24), device, torch.float32, torch.float32)
    norm = RMSNorm(24, eps=EPS).to(device)
    y, stream = norm(x, residual, prenorm=True)
    assert torch.equal(norm(x, residual), y) and torch.equal(stream, residual + x)
    assert torch.equal(norm(x, prenorm=True)[0], norm(x)) and norm(x, prenorm=True)[1] is x


def test_compiled_whole(device):
    x, residual, weight, _, _ = make((3, 24), device, torch.float32, torch.float32)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]

    def both(*leaves):
        y, stream = rms_norm_residual(*leaves, EPS)
        y2, stream2, _ = ops.rms_norm_residual_fwd(y, stream, leaves[2], EPS)
        return (y2 * stream2).sum()

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    pairs = [(z, *torch.autograd.grad(z, leaves)) for z in (both(*leaves), compiled(*leaves))]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def raises(error, message):
    return pytest.raises(error, match="^rms_norm_residual: " + re.escape(message))


def test_errors():
    x = torch.zeros(2, 3, 8)
    call = ops.rms_norm_residual_fwd
    with raises(TypeError, "expected residual to be torch.bfloat16 like x, got torch.float16"):
        call(x.bfloat16(), x.half(), None, EPS)
    with raises(ValueError, "expected residual to have shape [..., V] = [2, 3, 8], got [2, 3, 7]"):
        call(x, x[..., 1:], None, EPS)
    with raises(ValueError, "expected weight to have shape [V] = [8], got [7]"):
        rms_norm_residual(x, x, x[0, 0, 1:])
    with raises(TypeError, "expected x to be torch.bfloat16, torch.float16, torch.float32"):
        call(x.int(), x, None, EPS)
    with pytest.raises(TypeError, match="expected dstream to be torch"):
        half = x.bfloat16()
        ops.rms_norm_residual_bwd(half, half, x, None, x[..., 0].contiguous())


class Sees:
    """What the norms of a model are called with."""

    def __init__(self, model):
        self.sums = 0
        for module in model.modules():
            if type(module) is RMSNorm:
                module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        self.sums += len(args) > 1


def counted(model, ids):
    calls = []
    original = ops.rms_norm_residual_fwd.default

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        loss = model(ids, labels=ids).loss
    return loss, calls.count(original)


@pytest.mark.parametrize("how", ["all", "a hook on a block", "hooks on norms", "fuse_norm=False"])
def test_a_model_adds_inside_its_norms(how):
    model, ids = make_model(torch.float64, fuse_norm=how != "fuse_norm=False"), make_ids(T=10)
    layers = len(model.model.layers)
    outputs = []
    if how == "a hook on a block":  # which sees one tensor
        model.model.layers[0].register_forward_hook(lambda *args: outputs.append(args[2]))
    if how == "hooks on norms":
        sees = Sees(model)
    expected = {"all": 2 * layers, "a hook on a block": layers}.get(how, 0)
    loss, count = counted(model, ids)
    assert count == expected
    assert all(isinstance(y, torch.Tensor) for y in outputs)
    if how == "hooks on norms":
        assert sees.sums == 0
    found = torch.autograd.grad(loss, list(model.parameters()))
    for block in model.model.layers:
        block.fuse_norm = False
    loss_apart, count = counted(model, ids)
    assert count == 0 and abs(loss_apart - loss) < 1e-12
    wanted = torch.autograd.grad(loss_apart, list(model.parameters()))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_norms_of_others_are_called():
    model, ids = make_model(torch.float64), make_ids(T=10)
    expected = model(ids).logits
    other = nn.RMSNorm(
        model.config.hidden_size, eps=model.model.layers[0].mlp_norm.eps, dtype=torch.float64
    )
    other.load_state_dict(model.model.layers[0].mlp_norm.state_dict())
    model.model.layers[0].mlp_norm = other
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_keeps_the_stream_in_fp32(recompute):
    model, ids = make_model(torch.float32).train(), make_ids(T=10)
    model.model.gradient_checkpointing = recompute
    seen = []
    for block in model.model.layers:
        block.attn.q_proj.register_forward_pre_hook(lambda m, x: seen.append(x[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    assert seen[0] == torch.float32 and set(seen[1:]) == {torch.bfloat16}
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("which", ["fuse_cross_entropy", "fuse_linear_cross_entropy", "neither"])
def test_losses_of_a_model(which):
    model, ids = make_model(torch.float64).train(), make_ids(T=10)
    parameters = list(model.parameters())
    model.config.fuse_cross_entropy = model.config.fuse_linear_cross_entropy = False
    expected = model(ids, labels=ids)
    wanted = torch.autograd.grad(expected.loss, parameters)
    if which != "neither":
        setattr(model.config, which, True)
    output = model(ids, labels=ids)
    assert (output.logits is None) == (which == "fuse_linear_cross_entropy")
    assert abs(output.loss - expected.loss) < 1e-12
    before = None if output.logits is None else output.logits.detach().clone()
    gradients = torch.autograd.grad(output.loss, parameters)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    if before is not None:  # which backward has written over
        assert torch.equal(output.logits, before) == (which == "neither")
    if which != "fuse_linear_cross_entropy":
        return
    assert model(ids).logits is not None
    model.lm_head.register_forward_hook(lambda m, x, y: 2 * y)  # whose call somebody changes
    assert model(ids, labels=ids).logits is None
    assert abs(model(ids, labels=ids).loss - expected.loss) > 1e-3


def test_both_losses_are_refused():
    with pytest.raises(ValueError, match="at most one of fuse_cross_entropy and fuse_linear_cross"):
        make_model(fuse_cross_entropy=True, fuse_linear_cross_entropy=True)
