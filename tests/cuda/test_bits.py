"""CUDA gives the same bits every time: at full load, in dirty memory, in any batch."""

import dataclasses

import pytest
import recurrence
import torch
from common import (
    CUDA_DTYPES,
    PACKED_LENGTHS,
    assert_results_close,
    assert_same_bits,
    count_differences,
    exact_by_chunks,
    make_inputs,
    ours,
)
from cuda_tools import gpu_of
from fused import draw, for_this_gpu
from large import large_inputs
from recurrence import chunked, make_recurrence
from simple_inputs import simple

from gla_ext import batch_invariant
from gla_ext.ops import chunk_simple_gla

pytestmark = pytest.mark.cuda
by_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
on_both_paths = pytest.mark.usefixtures("path")


def with_a_constant_gate(q, k, v, g, **options):
    return chunk_simple_gla(q, k, v, g.detach(), **options)


def full_load(*shape, dtype=BF16):
    return large_inputs(*shape, dtype, gate=0.3, states=True)


def head_gated(*shape):
    x = full_load(*shape)
    return dataclasses.replace(x, g=x.g[..., 0].float())


def value_gated(*shape):
    return make_recurrence(*shape, dtype=BF16, gate=0.3, device="cuda")


def assert_same_bits_again(x, repeats, call=ours):
    expected = call(x)
    assert all(t.isfinite().all() for t in expected.values())
    differences = sum(count_differences(call(x), expected) for _ in range(repeats))
    assert differences.item() == 0


BIG, WIDE, MANY = (32, 2048, 4, 128, 256), (8, 2048, 4, 256, 512), (32, 2048, 16, 64, 64)
FULL_LOADS = {  # the call, its inputs, their dtype, and how often
    "K 128": (ours, lambda dtype: full_load(*BIG), BF16, 1000),
    "K 256": (ours, lambda dtype: full_load(*WIDE), BF16, 1000),
    "many heads": (ours, lambda dtype: full_load(*MANY), BF16, 1000),
    "few keys": (ours, lambda dtype: full_load(32, 2048, 16, 32, 64), BF16, 1000),
    "fp32": (ours, lambda dtype: full_load(8, 1024, 4, 128, 128, dtype=dtype), FP32, 200),
    "fp16": (ours, lambda dtype: full_load(8, 1024, 4, 100, 60, dtype=dtype), FP16, 200),
    "gates on values": (chunked, lambda dtype: value_gated(8, 1024, 4, 128, 256), BF16, 200),
    **{
        f"{name}, {operator.__name__}": (
            lambda x, operator=operator: simple(x, operator),
            lambda dtype, shape=shape: head_gated(*shape),
            BF16,
            1000,
        )
        for name, shape in (("a gate a head", BIG), ("a gate of many heads", MANY))
        for operator in (chunk_simple_gla, with_a_constant_gate)
    },
}


@on_both_paths
@pytest.mark.parametrize("call, make, dtype, repeats", FULL_LOADS.values(), ids=FULL_LOADS)
def test_many_times_at_full_load(call, make, dtype, repeats):
    assert_same_bits_again(make(dtype), repeats, call)


LONG, STRONG = (20_000, 0, 3, *[100] * 100), "every other chunk"
PACKED = (*LONG, 15_000, 12_345)
FUSED = {  # B, T, H, K, V; gates, lengths, how often
    "full load": (BIG, 0.3, None, 1000),
    "full load, K 256": (WIDE, 0.3, None, 1000),
    "K 128, V 256": ((8, 2048, 4, 128, 256), 0.3, None, 200),  # the second segment sums the first
    "K 160, V 320": ((8, 2048, 4, 160, 320), 0.3, None, 200),
    "K 136, V 128": ((8, 2048, 4, 136, 128), 0.3, None, 200),
    "many heads": ((32, 1024, 16, 64, 64), 0.3, None, 200),
    "segments": ((1, 32768, 4, 128, 256), 0.3, None, 200),
    "segments of small heads": ((1, 65536, 1, 64, 64), 0.3, None, 200),
    # A of these comes beside the scan.
    "strong chunks in segments": ((1, 32768, 4, 128, 256), STRONG, None, 200),
    "strong chunks, K 192": ((1, 32768, 4, 192, 384), STRONG, None, 200),
    # Gates so weak that a segment's decay is not 0: it is a sum, taken in one order only.
    "segments that remember": ((1, 32768, 4, 128, 256), 1e-3, None, 50),
    "segments that remember, K 192": ((1, 32768, 4, 192, 384), 1e-3, None, 50),
    "packed": ((1, 32768, 4, 128, 128), 0.3, (*LONG, 2000), 200),
    **{
        f"packed sweep, {H} heads, gates {gates}": ((1, 65536, H, K, V), gates, PACKED, 100)
        for H, K, V in ((4, 128, 256), (8, 128, 128), (16, 64, 64))
        for gates in (0.3, STRONG)
    },
    # Roles of a block that do not wait for one another would show, or hang.
    **{
        f"sweep, {H} heads, V {V}, gates {gates}": ((B, 700, H, K, V), gates, None, 40)
        for B, H, K, V in ((33, 4, 128, 128), (33, 4, 128, 256), (53, 8, 64, 64))
        for gates in (0.1, "reset")
    },
}


@pytest.mark.usefixtures("hopper", "operands")
@pytest.mark.parametrize("sizes, gates, lengths, repeats", FUSED.values(), ids=FUSED)
def test_many_times_on_the_fused_path(sizes, gates, lengths, repeats):
    B, *rest = sizes
    B = for_this_gpu(B) if rest[0] == 700 else B
    assert_same_bits_again(draw(B, *rest, gates, lengths=lengths), repeats)


BESIDE = {
    "chunk": (ours, make_inputs),
    "gates on values": (chunked, make_recurrence),
    "recurrent": (recurrence.ours, make_recurrence),
}


@on_both_paths
@by_dtype
@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
@pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])
@pytest.mark.parametrize("call, make", BESIDE.values(), ids=BESIDE)
def test_beside_other_work(call, make, lengths, gate, dtype):
    """Another stream keeps part of the chip and of its memory busy, at changing times."""
    B, T = (4, 330) if lengths is None else (1, 165)
    x = make(B, T, 4, 64, 128, dtype=dtype, gate=gate, lengths=lengths, device="cuda")
    expected = call(x)
    noise, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    differences = 0
    for i in range(30):
        with torch.cuda.stream(stream):
            for _ in range(i % 4):
                noise = (noise @ noise).clamp(-1, 1)
        differences = differences + count_differences(call(x), expected)
    assert differences.item() == 0


@on_both_paths
@by_dtype
def test_in_dirty_and_scarce_memory(dtype):
    """What torch hands out holds NaN or huge numbers, and little more is left than is needed."""
    torch.cuda.empty_cache()  # or inputs would lie scattered over what other tests have left
    x = large_inputs(8, 1000, 4, 64, 128, dtype, gate=1.0, states=True)
    torch.cuda.reset_peak_memory_stats()
    expected = ours(x)
    needed = torch.cuda.max_memory_allocated()
    differences = 0
    # The dirt is 252 MiB. The allocator may leave as much as its largest piece, 128 MiB, unused.
    with gpu_of(needed + needed // 4 + 2**28 + 2**27):
        for i in range(20):
            value = (torch.nan, 3e38, -1e30)[i % 3]
            sizes = [2 ** (20 + (i + j) % 6) for j in range(6)]
            dirt = [torch.full((n,), value, device="cuda") for n in sizes]
            del dirt
            if i % 4 == 0:
                torch.cuda.empty_cache()
            differences = differences + count_differences(ours(x), expected)
    assert differences.item() == 0


@on_both_paths
@by_dtype
@pytest.mark.parametrize("K, V", [(128, 256), (256, 64), (100, 60)])
@pytest.mark.parametrize("gate", [0.1, 2.0])
def test_batch_invariance_of_large_batches(gate, K, V, dtype):
    """Rows of 24 sequences alone, in the batch and packed; outside the mode only as close as any.

    Lengths that are no multiple of a chunk put packed sequences out of the batch's alignment.
    """
    B, T, H = 24, 1001, 4
    batch = large_inputs(1, B * T, H, K, V, dtype, gate)
    packed = dataclasses.replace(batch, cu_seqlens=torch.arange(B + 1, device="cuda") * T)
    batch = batch.map(lambda t: t.view(B, T, H, -1))
    with batch_invariant():
        in_batch, in_packed = ours(batch), ours(packed)
        for n in (0, 11, B - 1):
            alone = ours(batch.select(n))
            assert_same_bits(alone, {name: t[n : n + 1] for name, t in in_batch.items()})
        assert_same_bits(
            {name: t.view(in_batch[name].shape) for name, t in in_packed.items()}, in_batch
        )
    part = batch.select(11)
    free = {name: t[11:12] for name, t in ours(batch).items()}
    truth = exact_by_chunks(part)
    assert_results_close(free, truth, part)
    assert_results_close({name: t[11:12] for name, t in in_batch.items()}, truth, part)
