"""The kernels of the training step's operators for compute-sanitizer: see test_sanitizer.py."""

import pytest
import torch
from common import CUDA_DTYPES, assert_close
from loss_inputs import make as make_logits
from norm_inputs import EPS, laid_out, normal

pytestmark = [pytest.mark.cuda, pytest.mark.sanitizer]

by_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
ops = torch.ops.gla_ext


def move(t):
    return t.cuda() if isinstance(t, torch.Tensor) else t


def bound(dtype):
    return 1e-5 if dtype == torch.float32 else 1e-2


def both(call, *inputs):
    """Results of the CPU and of CUDA, in pairs."""
    with torch.no_grad():
        wanted, got = call(*inputs), call(*map(move, inputs))
    for a, b in zip(got, wanted, strict=True):
        assert_close(a.cpu(), b, bound(a.dtype))


@by_dtype
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "V, layout",
    [
        (64, "contiguous"),
        (65, "contiguous"),
        (1000, "contiguous"),
        (2501, "contiguous"),
        (72, "misaligned"),
    ],
)
def test_norms_of_a_residual_stream(V, layout, wide, dtype):
    stream = torch.float32 if wide else dtype
    x, residual, dy, dstream = (
        normal(1, 9, 1, V, seed=i, dtype=d) for i, d in enumerate((dtype, stream, dtype, stream))
    )

    if layout != "contiguous":
        x, residual = laid_out(x, layout), laid_out(residual, layout)

    def call(x, residual, weight, dy, dstream):
        y, stream, rstd = ops.rms_norm_residual_fwd(x, residual, weight, EPS)
        return y, stream, *ops.rms_norm_residual_bwd(dy, dstream, stream, weight, rstd)

    both(call, x, residual, normal(V, seed=5, dtype=dtype), dy, dstream)


@by_dtype
@pytest.mark.parametrize("V", [7, 2048, 2500])
@pytest.mark.parametrize("layout", ["contiguous", "a part of wider rows"])
def test_cross_entropy(V, layout, dtype):
    options = (-100, 0.1, 1.3, 3.0, 0.01)

    def call(logits, target, dloss):
        loss, z_loss, lse = ops.cross_entropy_fwd(logits, target, *options, False)
        gradient = ops.cross_entropy_bwd(dloss, logits, target, lse, *options)
        together = logits.clone()
        again = ops.cross_entropy_with_grad_(together, target, *options)
        return loss, z_loss, lse, gradient, together, again

    both(call, *make_logits(5, V, "cpu", dtype, layout))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("R, K", [(16, 512), (16, 72), (5, 33), (1, 1030)])
def test_gate_projection(R, K, dtype):
    h = normal(37, R + 8, seed=1, dtype=dtype)[:, 8:]
    weight, bias = normal(K, R, seed=2, dtype=dtype), normal(K, seed=3, dtype=dtype)

    def call(h, weight, bias, dg):
        g = ops.gate_projection_fwd(h, weight, bias, 16.0, -0.5)
        return g, *ops.gate_projection_bwd(dg, h, weight, bias, 16.0, -0.5)

    both(call, h, weight, bias, normal(37, K, seed=4, dtype=dtype))
