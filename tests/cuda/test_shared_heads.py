"""k, v and gates of fewer heads than q on CUDA: on every path the bits of repeats, less memory."""

import dataclasses

import pytest
import torch
from common import (
    CUDA_DTYPES,
    PACKED_LENGTHS,
    Inputs,
    assert_same_bits,
    make_inputs,
    outputs_and_gradients,
)
from cuda_tools import peak_bytes
from fused import plan_of
from large import large_inputs
from recurrence import (
    GATINGS,
    assert_chunked_close,
    assert_results_close,
    chunked,
    exact,
    make_recurrence,
    ours,
    repeated,
)

from gla_ext import (
    batch_invariant,
    chunk_gla,
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)

pytestmark = pytest.mark.cuda
by_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])
by_heads = pytest.mark.parametrize("H, HK", [(4, 2), (6, 2), (3, 1), (14, 2)])
by_gating = pytest.mark.parametrize("gating", GATINGS)
# K and V of each kernel of the fused path: 64, 128 and 256 keys, and some that fill no tile.
FUSED = [(64, 64), (64, 128), (40, 72), (128, 256), (96, 136), (256, 512)]


def inputs(H, HK, K, V, lengths=None, **options):
    B, T = (2, 130) if lengths is None else (1, 165)
    return make_recurrence(B, T, H, K, V, lengths=lengths, device="cuda", **options).sharing(HK)


@pytest.mark.usefixtures("path", "nan_in_fresh_memory")
@by_heads
@by_packing
@by_gating
@by_dtype
def test_chunk_gla(dtype, gating, lengths, H, HK, head):
    x = inputs(H, HK, *head, lengths, gating=gating, dtype=dtype)
    assert_same_bits(chunked(x), chunked(x, repeat=True))


@pytest.mark.usefixtures("nan_in_fresh_memory")
@by_heads
@by_packing
@by_gating
@by_dtype
def test_recurrent(dtype, gating, lengths, H, HK):
    x = inputs(H, HK, 20, 28, lengths, gating=gating, dtype=dtype)
    assert_same_bits(ours(x), ours(x, repeat=True))


@pytest.mark.sanitizer
@by_dtype
@pytest.mark.parametrize("operator", [chunked, ours], ids=["chunk", "recurrent"])
def test_the_truth(operator, dtype):
    x = inputs(6, 2, 24, 40, dtype=dtype)
    close = assert_chunked_close if operator is chunked else assert_results_close
    close(operator(x), exact(x), x)


@pytest.mark.usefixtures("hopper")
@by_packing
@pytest.mark.parametrize("gate", [0.1, "reset"])
@pytest.mark.parametrize("K, V", FUSED)
def test_every_kernel_of_the_fused_path(K, V, gate, lengths, monkeypatch):
    """Chunks in tier 1 and outside it; `reset` has all that is made for the latter at work."""
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    x = inputs(6, 3, K, V, lengths, gating="gk", gate=gate, dtype=torch.bfloat16)
    results = chunked(x)
    assert_same_bits(results, chunked(x, repeat=True))
    assert_chunked_close(results, exact(x), x)


@by_dtype
@pytest.mark.parametrize("state_v_first", [False, True])
def test_pool(state_v_first, dtype):
    x = inputs(6, 2, 64, 128, dtype=dtype)
    x = x.v_first() if state_v_first else x
    tokens = {
        n: t if t is None else t[:, :5] for n, t in x.leaves().items() if n != "initial_state"
    }
    slots, accepted = (torch.tensor(n, device="cuda") for n in ([1, 0], [3, 0]))
    where = {"slots": slots, "state_v_first": state_v_first}
    pools = []
    for own in (tokens, repeated(tokens)):
        pool = x.initial_state.clone()
        verified = recurrent_gla_verify(**own, state=pool, **where)
        q = own.pop("q")
        recurrent_gla_commit_(**own, state=pool, accepted=accepted, **where)
        committed = pool.clone()
        one = {n: t if t is None else t[:, :1] for n, t in own.items()}
        stepped = recurrent_gla_step_(q[:, :1], **one, state=pool, **where)
        pools.append((verified, committed, stepped, pool))
    for mine, of_repeats in zip(*pools, strict=True):
        assert torch.equal(mine, of_repeats)


def shared(x: Inputs, HK: int) -> Inputs:
    parts = {name: getattr(x, name)[:, :, :HK].contiguous() for name in ("k", "v", "g")}
    return dataclasses.replace(x, **parts)


def forward(x: Inputs, repeat: bool):
    k, v, g = (t.repeat_interleave(2, 2) if repeat else t for t in (x.k, x.v, x.g))
    return chunk_gla(x.q, k, v, g, output_final_state=True)


def results(x: Inputs, repeat: bool):
    def function(q, k, v, g, initial_state):
        return forward(dataclasses.replace(x, q=q, k=k, v=v, g=g), repeat)

    return outputs_and_gradients(function, x)


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


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("H, K, V", [(4, 64, 64), (4, 128, 256), (2, 256, 512)])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_segments(gate_dtype, invariant, H, K, V):
    x = make_inputs(1, 4101, H, K, V, torch.bfloat16, 1 / 64, gate_dtype, device="cuda")
    x = shared(x, H // 2)
    assert plan_of(x)["path"] == "fused"
    assert (plan_of(x, batch_invariant=invariant)["segments"] > 0) != invariant
    with batch_invariant(invariant):
        assert_same_bits(results(x, False), results(x, True))


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
