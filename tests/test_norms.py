"""Root mean square norms, by torch's kernel and without it."""

import pytest
import torch
import torch.nn.functional as F
from common import DTYPES

from gla_ext.norms import GatedRMSNorm, RMSNorm

# Rounding a result once; fp32 and fp64 add up 40 squares before.
BOUND = {torch.float64: 1e-15, torch.float32: 5e-7, torch.bfloat16: 0.0025, torch.float16: 3e-4}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape, seed, device, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def make_norm(kind, affine, weight_dtype, device):
    norm = kind(40, affine, eps=1e-3).to(device, weight_dtype).eval()
    if affine:
        norm.weight.data = normal(40, seed=0, device=device, dtype=weight_dtype)
    return norm


@by_dtype
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", [RMSNorm, GatedRMSNorm])
def test_with_and_without_a_gradient(device, kind, affine, weight_dtype, dtype):
    norm = make_norm(kind, affine, weight_dtype or dtype, device)
    inputs = [normal(3, 5, 40, seed=i, device=device, dtype=dtype) for i in (1, 2)]
    inputs = inputs[: 1 + (kind is GatedRMSNorm)]
    x = inputs[0].double()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = expected * norm.weight.double() if affine else expected
    if kind is GatedRMSNorm:
        expected = expected * F.silu(inputs[1].double())
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            found = norm(*inputs)
        assert found.dtype == dtype
        error = (found.double() - expected).norm() / expected.norm()
        assert error < BOUND[torch.float32 if weight_dtype and dtype == torch.float64 else dtype]


@pytest.mark.parametrize("kind", [RMSNorm, GatedRMSNorm])
def test_torchs_kernel_is_taken_in_eager_inference_alone(monkeypatch, kind):
    calls, kernel = [], F.rms_norm

    def spy(*args):
        calls.append(args[0].dtype)
        return kernel(*args)

    monkeypatch.setattr(F, "rms_norm", spy)
    norm = make_norm(kind, True, torch.bfloat16, "cpu")
    inputs = [torch.ones(2, 40, dtype=torch.bfloat16)] * (1 + (kind is GatedRMSNorm))
    norm(*inputs)
    with torch.no_grad():
        norm.train()(*inputs)
        norm.eval()
        torch.compile(norm, backend="eager", fullgraph=True)(*inputs)
        assert not calls
        norm(*inputs)
    # The gated norm rounds after the gate.
    assert calls == [torch.float32 if kind is GatedRMSNorm else torch.bfloat16]


@pytest.mark.parametrize("kind", [RMSNorm, GatedRMSNorm])
def test_nan_stays_in_its_row(device, kind):
    norm = make_norm(kind, True, torch.float32, device)
    x = normal(4, 40, seed=1, device=device, dtype=torch.float32)
    x[2, 7] = torch.nan
    with torch.no_grad():
        found = norm(*[x] * (1 + (kind is GatedRMSNorm)))
    assert found[2].isnan().all()
    assert found[[0, 1, 3]].isfinite().all()
