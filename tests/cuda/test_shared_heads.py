"""k, v and gates of fewer heads than q on CUDA: on every path the bits of repeats, less memory."""

import dataclasses

import pytest
import torch
from common import (
    CUDA_DTYPES,
    PACKED_LENGTHS,
    Inputs,
    assert_same_bits,
    outputs_and_gradients,
)
from cuda_tools import peak_bytes
from fused import draw, facts_of, for_this_gpu
from large import large_inputs
from recurrence import (
    GATINGS,
    assert_chunked_close,
    assert_results_close,
    chunked,
    exact,
    make_recurrence,
    ours,
)

from gla_ext import batch_invariant, chunk_gla, fused_recurrent_gla

pytestmark = pytest.mark.cuda
by_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])
by_heads = pytest.mark.parametrize("H, HK", [(6, 2), (3, 1), (14, 2)])
by_gating = pytest.mark.parametrize("gating", GATINGS)
CLOSE = {chunked: assert_chunked_close, ours: assert_results_close}


def inputs(H, HK, K, V, lengths=None, **options):
    B, T = (2, 130) if lengths is None else (1, 165)
    return make_recurrence(B, T, H, K, V, lengths=lengths, device="cuda", **options).sharing(HK)


@pytest.mark.usefixtures("path", "nan_in_fresh_memory")
@by_heads
@by_packing
@by_gating
@by_dtype
@pytest.mark.parametrize("operator", CLOSE)
def test_bits_of_repeats(operator, dtype, gating, lengths, H, HK, head):
    x = inputs(H, HK, *head, lengths, gating=gating, dtype=dtype)
    assert_same_bits(operator(x), operator(x, repeat=True))


@pytest.mark.sanitizer
@by_dtype
@pytest.mark.parametrize("operator", CLOSE)
def test_the_truth(operator, dtype):
    x = inputs(6, 2, 24, 40, dtype=dtype)
    CLOSE[operator](operator(x), exact(x), x)


def shared(x: Inputs, HK: int) -> Inputs:
    parts = {name: getattr(x, name)[:, :, :HK].contiguous() for name in ("k", "v", "g")}
    return dataclasses.replace(x, **parts)


def forward(x: Inputs, repeat: bool):
    k, v, g = x.k, x.v, x.g
    if repeat:
        k, v, g = (t.repeat_interleave(x.q.shape[2] // t.shape[2], 2) for t in (k, v, g))
    return chunk_gla(
        *(x.q, k, v, g), initial_state=x.initial_state, output_final_state=True,
        cu_seqlens=x.cu_seqlens,
    )  # fmt: skip


def results(x: Inputs, repeat: bool):
    def function(q, k, v, g, initial_state):
        return forward(Inputs(q, k, v, g, x.do, initial_state, x.dht, x.cu_seqlens), repeat)

    return outputs_and_gradients(function, x)


FEW = (1, 4101)  # rows and tokens of what is cut into segments
WAYS = [  # B, those for an H200, T, H, K, V; heads of k
    # Each kernel: 64, 128 and 256 keys, and some that fill no tile.
    *[((2, 130, 6, K, V), 3) for K, V in ((64, 64), (64, 128), (40, 72), (96, 136), (128, 256))],
    ((2, 130, 6, 256, 512), 3),
    *[((*FEW, 4, 64, 64), 2), ((*FEW, 4, 128, 256), 2), ((*FEW, 2, 256, 512), 1)],
    # Swept gradients, with operands that forward keeps.
    *[((16, 200, 4, 128, 256), HK) for HK in (1, 2)],
    *[((50, 130, 4, 64, 64), HK) for HK in (1, 2)],
    *[((49, 190, 4, 104, 200), 2), ((1, 2100, 2, 128, 256), 1)],
    *[((1, 16448, 8, 128, 128), 4), ((1, 16448, 8, 104, 256), 4)],
]


@pytest.mark.usefixtures("hopper", "operands", "nan_in_fresh_memory")
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gate", [1 / 64, "reset"])
@pytest.mark.parametrize("sizes, HK", WAYS)
def test_bits_of_repeats_on_the_fused_path(sizes, HK, gate, gate_dtype):
    """Chunks in tier 1 and outside it, packed too; segments, and sequences whole in the mode."""
    B, T, *rest = sizes
    for lengths in (None, PACKED_LENGTHS) if T == 130 else (None,):
        rows = (for_this_gpu(B), T) if lengths is None else (1, 165)
        x = shared(draw(*rows, *rest, gate, gate_dtype, lengths), HK)
        assert "fused" in facts_of(x)
        assert_same_bits(results(x, False), results(x, True))
    if sizes[:2] == FEW:
        assert "backward in segments" in facts_of(x)
        with batch_invariant():
            assert "backward whole" in facts_of(x, batch_invariant=True)
            assert_same_bits(results(x, False), results(x, True))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("shape", [(8, 2048, 4, 128, 256), (4, 2048, 16, 64, 64)], ids=str)
def test_bits_and_memory_at_full_load(shape):
    x = shared(large_inputs(*shape), shape[2] // 2)
    mine, of_repeats = (results(x, repeat) for repeat in (False, True))
    assert_same_bits(mine, of_repeats)
    del mine, of_repeats
    repeats = 2 * (x.k.nbytes + x.v.nbytes + x.g.nbytes)
    with torch.no_grad():
        shared_peak, repeated_peak = (peak_bytes(lambda r=r: forward(x, r)) for r in (False, True))
    assert shared_peak <= repeated_peak - repeats
    # Backward has the sums of dk, dv and dg in their place.
    shared_peak, repeated_peak = (peak_bytes(lambda r=r: results(x, r)) for r in (False, True))
    assert shared_peak <= repeated_peak - repeats // 2


def test_more_heads_than_the_reciprocal_is_exact_for():
    """Two heads that 2^17 share: H * (H / HK) is 2^33."""
    H = 2**17
    q = torch.zeros(1, 1, H, 1, device="cuda")
    k = torch.zeros(1, 1, 2, 1, device="cuda")
    for call in (chunk_gla, fused_recurrent_gla):
        with pytest.raises(NotImplementedError, match=r"H \* \(H / HK\) to be at most 4294967296"):
            call(q, k, k, k)
        call(q, k[:, :, :1], k[:, :, :1], k[:, :, :1])  # one head has no stride
        call(q[:, :, : 2**15], k, k, k)


def test_many_heads_find_their_own():
    """Every head's number, up to the largest groups and those that are no power of two."""
    for H, HK in ((2**16, 2), (3 * 7001, 3), (65535, 13107), (46341 * 2, 46341)):
        v = torch.arange(HK, device="cuda", dtype=torch.float32).view(1, 1, HK, 1)
        q = torch.ones(1, 1, H, 1, device="cuda")
        expected = v.repeat_interleave(H // HK, 2)
        for call in (chunk_gla, fused_recurrent_gla):
            assert torch.equal(call(q, torch.ones_like(v), v, None, scale=1.0)[0], expected)
