"""The MLP of a language model's block: SwiGLU between its projections."""

import pytest
import torch
import torch.nn.functional as F
from common import assert_close
from cuda_tools import requested_bytes
from norm_inputs import BOUND, normal
from swiglu_inputs import Calls, by_dtype, errors, kept
from torch import nn
from torch.nn.utils import parametrize

from gla_ext.model import GLAMLP, fuse_projections


def make_mlp(dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    return GLAMLP(24, 40).to(device, dtype)


def composed(mlp, x):
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


@by_dtype
@pytest.mark.parametrize("fused", [False, True])
def test_an_mlp_is_what_it_was(device, fused, dtype):
    mlp = make_mlp(dtype, device)
    x = normal(2, 9, 24, seed=1, device=device, dtype=dtype)
    double = make_mlp(torch.float64, device)
    with torch.no_grad():
        for wide, own in zip(double.parameters(), mlp.parameters(), strict=True):
            wide.copy_(own)
        truth, before = composed(double, x.double()), composed(mlp, x)
        found = (fuse_projections(mlp) if fused else mlp)(x)
    ours, torchs = errors([found, before], [truth] * 2)
    assert ours <= max(1.05 * torchs, BOUND[torch.float64])


def test_an_mlp_keeps_its_input_gate_and_up_alone():
    mlp, x = make_mlp(), torch.randn(2, 9, 24, requires_grad=True)
    y, saved = kept(lambda: mlp(x))
    parameters = {p.data_ptr() for p in mlp.parameters()}
    activations = sorted(t.numel() for at, t in saved.items() if at not in parameters)
    assert activations == [2 * 9 * 24, 2 * 9 * 40, 2 * 9 * 40]
    y.sum().backward()


@pytest.mark.parametrize("fused", [False, True])
def test_a_decoded_token_has_one_operator_between_its_products(fused):
    mlp, x = make_mlp(), torch.randn(3, 1, 24)
    if fused:
        fuse_projections(mlp)
    with torch.no_grad(), Calls() as calls:
        mlp(x)
    assert calls.made.count("swiglu_fwd") == 1 and calls.made.count("mm") == 3 - fused
    views = {"t", "view", "_unsafe_view", "split_with_sizes", "split", "as_strided", "slice"}
    assert set(calls.made) - views <= {"mm", "swiglu_fwd", "detach"}


def with_a_hook(mlp, seen):
    mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))


def with_a_module_in_place(mlp, seen):
    class Adapted(nn.Linear):
        def forward(self, x):
            seen.append(1)
            return super().forward(x)

    adapted = Adapted(40, 24, bias=False)
    adapted.weight = mlp.down_proj.weight
    mlp.down_proj = adapted


def with_a_forward_of_its_own(mlp, seen):
    forward = mlp.down_proj.forward
    mlp.down_proj.forward = lambda x: seen.append(1) or forward(x)


def with_a_parametrization(mlp, seen):
    class Seen(nn.Module):
        def forward(self, weight):
            seen.append(1)
            return weight

    parametrize.register_parametrization(mlp.down_proj, "weight", Seen())
    seen.clear()


@pytest.mark.parametrize(
    "change",
    [with_a_hook, with_a_module_in_place, with_a_forward_of_its_own, with_a_parametrization],
)
def test_a_down_projection_that_is_more_than_its_weight_is_called(change):
    mlp, x, seen = make_mlp(), torch.randn(2, 9, 24), []
    expected = mlp(x)
    change(mlp, seen)
    assert_close(mlp(x), expected, 1e-6)
    assert seen == [1]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_down_projection_with_a_sparse_weight():
    mlp, x = make_mlp(torch.float64), torch.randn(9, 24, dtype=torch.float64)
    with torch.no_grad():
        expected = mlp(x)
        weight = mlp.down_proj.weight.detach().to_sparse_csr()
        mlp.down_proj.weight = nn.Parameter(weight, requires_grad=False)
        assert_close(mlp(x), expected, 1e-12)


def test_a_down_projection_with_a_bias_adds_it():
    mlp, x = make_mlp(), torch.randn(2, 9, 24)
    without = mlp(x)
    biased = nn.Linear(40, 24)
    biased.weight = mlp.down_proj.weight
    mlp.down_proj = biased
    assert_close(mlp(x), without + biased.bias, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_mlp_under_autocast(device, dtype):
    mlp, x = make_mlp(device=device), normal(2, 9, 24, seed=1, device=device, dtype=torch.float32)
    with torch.autocast(device, dtype):
        y = mlp(x)
    assert y.dtype == dtype
    assert_close(y.float(), mlp(x), 1e-2)
    gradients = torch.autograd.grad(y.sum(), list(mlp.parameters()))
    assert all(g.dtype == torch.float32 for g in gradients)


@pytest.mark.cuda
def test_what_an_mlp_keeps_on_cuda():
    """Gate and up, beside its output."""
    mlp = GLAMLP(1024, 2816).to("cuda", torch.bfloat16)
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mlp(x).sum().backward()
    torch.cuda.synchronize()
    before = requested_bytes()
    y = mlp(x)
    kept_bytes = requested_bytes() - before - y.nbytes
    assert kept_bytes <= 2 * 4096 * 2816 * 2 + 4096
