"""CUDA gives the same bits every time: at full load, in dirty memory, in any batch."""

import dataclasses

import pytest
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
from large import large_inputs
from simple_inputs import simple

from gla_ext import batch_invariant
from gla_ext.ops import chunk_simple_gla

pytestmark = pytest.mark.cuda
by_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
on_both_paths = pytest.mark.usefixtures("path")


@on_both_paths
@pytest.mark.parametrize(
    "shape, dtype, repeats",
    [
        ((32, 2048, 4, 128, 256), torch.bfloat16, 1000),
        ((8, 2048, 4, 256, 512), torch.bfloat16, 1000),
        ((32, 2048, 16, 64, 64), torch.bfloat16, 1000),
        ((32, 2048, 16, 32, 64), torch.bfloat16, 1000),
        ((8, 1024, 4, 128, 128), torch.float32, 200),
        ((8, 1024, 4, 100, 60), torch.float16, 200),
    ],
)
def test_a_thousand_times_at_full_load(shape, dtype, repeats):
    assert_same_bits_again(full_load(shape, dtype), repeats)


def with_a_constant_gate(q, k, v, g, **options):
    return chunk_simple_gla(q, k, v, g.detach(), **options)


@on_both_paths
@pytest.mark.parametrize("operator", [chunk_simple_gla, with_a_constant_gate])
@pytest.mark.parametrize("shape", [(32, 2048, 4, 128, 256), (32, 2048, 16, 64, 64)], ids=str)
def test_a_thousand_times_with_one_gate_a_head(shape, operator):
    x = full_load(shape)
    x = dataclasses.replace(x, g=x.g[..., 0].float())
    assert_same_bits_again(x, 1000, lambda x: simple(x, operator))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", [(32, 2048, 4, 128, 256), (8, 2048, 4, 256, 512)], ids=str)
def test_a_thousand_times_where_backward_makes_operands_again(shape, keep_nothing):
    keep_nothing()
    assert_same_bits_again(full_load(shape), 1000)


def full_load(shape, dtype=torch.bfloat16):
    return large_inputs(*shape, dtype, gate=0.3, states=True)


def assert_same_bits_again(x, repeats, results=ours):
    expected = results(x)
    assert all(t.isfinite().all() for t in expected.values())
    differences = sum(count_differences(results(x), expected) for _ in range(repeats))
    assert differences.item() == 0


@on_both_paths
@by_dtype
@pytest.mark.parametrize("gate", [0.1, "reset"])
@pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])
def test_beside_other_work(lengths, gate, dtype):
    """Another stream keeps part of the chip and of its memory busy, at changing times."""
    shape = (4, 330, 4, 64, 128) if lengths is None else (1, 165, 4, 64, 128)
    x = make_inputs(*shape, dtype, gate, lengths=lengths, device="cuda")
    expected = ours(x)
    noise, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    differences = 0
    for i in range(50):
        with torch.cuda.stream(stream):
            for _ in range(i % 4):
                noise = (noise @ noise).clamp(-1, 1)
        differences = differences + count_differences(ours(x), expected)
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
    # Of the dirt, 252 MiB, the allocator may leave as much as the largest piece unused.
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
