"""The path that is forced on CUDA, and what the paths take."""

import pytest
import torch
from common import (
    assert_results_close,
    assert_same_bits,
    exact_by_chunks,
    make_inputs,
    ours,
)
from fused import BF16, UNEVEN_LENGTHS, operators, plan_of

from gla_ext import chunk_gla

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


@in_nan
@pytest.mark.parametrize("gate_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [None, UNEVEN_LENGTHS], ids=["batch", "packed"])
@pytest.mark.parametrize("K", [64, 128, 192, 256])
@pytest.mark.parametrize("gate", [0.1, "reset"])
def test_fp32_gates(gate, K, lengths, gate_dtype):
    x = make_inputs(*(1, 695, 2, K, 72, BF16, gate, gate_dtype), lengths=lengths, device="cuda")
    forward, backward = (plan_of(x, way) for way in (False, True))
    assert forward["path"] == backward["path"] == "fused"
    assert backward["segments"] > 0
    assert_results_close(operators(x), exact_by_chunks(x), x)


def test_forcing_a_path(monkeypatch):
    x = make_inputs(1, 130, 2, 64, 72, BF16, 0.5, device="cuda")
    planned = ours(x)
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "")
    assert_same_bits(ours(x), planned)
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    assert_same_bits(ours(x), planned)
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    steps = ours(x)
    assert any(not torch.equal(steps[name], planned[name]) for name in planned)
    assert_results_close(steps, exact_by_chunks(x), x)


def test_an_unknown_path(monkeypatch):
    x = make_inputs(1, 20, 1, 8, 8, BF16, device="cuda")
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fast")
    with pytest.raises(ValueError, match="GLA_EXT_CUDA_PATH: expected fused or steps, got fast"):
        chunk_gla(x.q, x.k, x.v, x.g)


REFUSED = {  # K, V, dtype, gate_dtype, layout
    "q, k and v in torch.bfloat16": (64, 64, torch.float32, None, "contiguous"),
    "K and V to be multiples of 8": (64, 60, BF16, None, "contiguous"),
    "rows that start at multiples of 16 bytes": (64, 64, BF16, None, "misaligned"),
    "K to be at most 256": (264, 64, BF16, None, "contiguous"),
    "g in torch.bfloat16 or torch.float32": (64, 64, BF16, torch.float16, "contiguous"),
}


@pytest.mark.parametrize("missing", REFUSED)
def test_what_the_fused_forward_does_not_take(missing, monkeypatch):
    K, V, dtype, gate_dtype, layout = REFUSED[missing]
    x = make_inputs(*(1, 20, 2, K, V, dtype, 1.0, gate_dtype), layout=layout, device="cuda")
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    message = f"chunk_gla: GLA_EXT_CUDA_PATH=fused expected {missing}, got a call that only the st"
    with pytest.raises(NotImplementedError, match=message):
        chunk_gla(x.q, x.k, x.v, x.g)


@pytest.mark.parametrize(
    "K, gate_dtype, missing",
    [
        (264, BF16, "K to be at most 256"),
        (64, torch.float16, "g in torch.bfloat16 or torch.float32"),
    ],
)
def test_what_the_fused_backward_does_not_take(K, gate_dtype, missing, monkeypatch):
    x = make_inputs(1, 20, 2, K, 64, BF16, gate_dtype=gate_dtype, device="cuda")
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    arguments = (x.do, None, x.q, x.k, x.v, x.g, *[None] * 4, False, False)
    message = f"chunk_gla_bwd: GLA_EXT_CUDA_PATH=fused expected {missing}, got a call that only"
    with pytest.raises(NotImplementedError, match=message):
        torch.ops.gla_ext.chunk_gla_bwd(*arguments)
