"""Every CUDA kernel, tier and path at small shapes, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m pytest -m sanitizer -p no:cacheprovider

and so with racecheck, synccheck and initcheck; `python benchmarks/check_gpu.py --sanitizer` runs
all four. PYTORCH_NO_CUDA_MEMORY_CACHING=1 makes every tensor a cudaMalloc of its own. Torch's
caching allocator cuts tensors out of blocks of megabytes, in which memcheck takes an access beyond
a tensor for one inside the block, and initcheck takes what an earlier tensor wrote there for
initialised. For the same reason nothing here uses `nan_in_fresh_memory`, which writes everything
first. The tools slow kernels down 10 to 50 times, so the truth is computed on the CPU, and torch's
own kernels are left out where possible.
"""

import dataclasses
import functools
import types

import pytest
import torch
from common import (
    BAD_OFFSETS,
    CUDA_DTYPES,
    PACKED_LENGTHS,
    assert_close,
    assert_results_close,
    exact_by_chunks,
    make_inputs,
    ours,
)
from conv_inputs import make as make_convolution
from fused import for_this_gpu, mixed_gates, plan_of
from norm_inputs import EPS, make
from plans import has_cluster_summaries, reads_prepared, sweeps_gradients
from steps import STEPS, as_tuple, assert_step_close, step_case

pytestmark = [pytest.mark.cuda, pytest.mark.sanitizer]

by_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)

SHAPES = {  # B, T, H, K, V, lengths, layout
    "aligned": (1, 80, 1, 64, 128, None, "contiguous"),
    "wide": (1, 66, 1, 128, 256, None, "contiguous"),
    "odd": (1, 81, 2, 33, 65, None, "contiguous"),
    "widest": (1, 17, 1, 512, 512, None, "contiguous"),
    "misaligned": (1, 70, 1, 64, 64, None, "misaligned"),
    "strided": (1, 70, 2, 20, 28, None, "sliced"),
    "packed": (1, 165, 1, 20, 28, PACKED_LENGTHS, "contiguous"),
    "one channel": (2, 65, 1, 1, 1, None, "contiguous"),
}
FUSED_SHAPES = {  # the batch for an H200, see `for_this_gpu`
    "packed": (1, 165, 1, 72, 24, PACKED_LENGTHS, "contiguous"),
    "widest": (1, 66, 1, 136, 72, None, "contiguous"),
    "operands of several chunks a block": (5, 70, 30, 136, 8, None, "contiguous"),
    "pairs of blocks": (2, 260, 17, 72, 136, None, "contiguous"),
    "pairs of blocks, one after the other": (5, 130, 17, 72, 136, None, "contiguous"),
    "pairs of blocks, packed": (1, 165, 1, 72, 136, PACKED_LENGTHS, "contiguous"),
    "gradients in a sweep": (11, 130, 6, 72, 72, None, "contiguous"),
    "gradients in a sweep, many values": (11, 330, 6, 72, 200, None, "contiguous"),
    "gradients in a sweep, several heads a cluster": (22, 190, 6, 72, 200, None, "contiguous"),
    "gradients in a sweep, few values": (17, 430, 6, 104, 104, None, "contiguous"),
    "gradients in a sweep, narrow": (22, 200, 9, 40, 64, None, "contiguous"),
    "pairs of chunks": (2, 170, 1, 200, 200, None, "contiguous"),
    "pairs of chunks, packed": (1, 430, 1, 136, 136, (64, 1, 200, 0, 130), "contiguous"),
    "pairs of chunks, three tiles of keys": (1, 530, 1, 192, 136, None, "contiguous"),
    "in segments": (1, 530, 1, 64, 64, None, "contiguous"),
    "in segments, three tiles of keys": (1, 530, 1, 136, 72, None, "contiguous"),
    "segments that sum the one before": (22, 390, 3, 72, 40, None, "contiguous"),
    "segments that sum the one before, many keys": (22, 390, 3, 136, 40, None, "contiguous"),
    "segments that sum the one before, few keys": (22, 390, 3, 40, 72, None, "contiguous"),
    "few keys, many values": (1, 150, 2, 40, 136, None, "contiguous"),
    "few keys and values": (1, 150, 2, 64, 24, None, "contiguous"),
    "packed, in segments": (1, 430, 1, 128, 64, (0, 330, 70, 3), "contiguous"),
    "packed, small heads in segments": (1, 430, 1, 64, 64, (0, 330, 70, 3), "contiguous"),
    "packed, in segments, three tiles of keys": (1, 430, 1, 160, 64, (0, 330, 70, 3), "contiguous"),
}
FP32_GATES = [
    *("widest", "gradients in a sweep", "few keys, many values", "few keys and values"),
    *("in segments", "packed, small heads in segments", "pairs of chunks, three tiles of keys"),
    "segments that sum the one before, few keys",
]


def move(t):
    """To the GPU, copied, not computed: initcheck sees copies write. Strides and alignment stay."""
    if t is None:
        return None
    extent = 1 + sum(s * (n - 1) for n, s in zip(t.shape, t.stride(), strict=True))
    start = t.storage_offset() if t.numel() else 0
    flat = t.as_strided((start + extent,), (1,), 0) if t.numel() else t.flatten()
    return flat.to("cuda").as_strided(t.shape, t.stride(), start)


def on_gpu(x):
    return dataclasses.replace(x, **{name: move(t) for name, t in vars(x).items()})


def on_cpu(results):
    return {name: t.cpu() for name, t in results.items()}


@pytest.mark.usefixtures("path")
@by_dtype
@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
@pytest.mark.parametrize("B, T, H, K, V, lengths, layout", SHAPES.values(), ids=SHAPES)
def test_forward_and_gradients(B, T, H, K, V, lengths, layout, gate, dtype):
    x = make_inputs(B, T, H, K, V, dtype, gate, lengths=lengths, layout=layout)
    assert_results_close(on_cpu(ours(on_gpu(x))), exact_by_chunks(x), x)


@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
@pytest.mark.parametrize("B, T, H, K, V, lengths, layout", FUSED_SHAPES.values(), ids=FUSED_SHAPES)
def test_fused(B, T, H, K, V, lengths, layout, gate):
    x = make_inputs(
        for_this_gpu(B), T, H, K, V, torch.bfloat16, gate, lengths=lengths, layout=layout
    )
    assert_results_close(on_cpu(ours(on_gpu(x))), exact_by_chunks(x), x)


@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
@pytest.mark.parametrize("kind", ["many values", "several heads a cluster", "few values"])
def test_operands_that_backward_makes_again(kind, gate, hopper, keep_nothing):
    """Where forward leaves its own, as `test_fused` does."""
    B, *sizes, _, _ = FUSED_SHAPES[f"gradients in a sweep, {kind}"]
    x = make_inputs(for_this_gpu(B), *sizes, torch.bfloat16, gate)
    assert (
        not reads_prepared(plan_of(x, False))
        and plan_of(x, for_backward=True)["for_backward_bytes"] > 0
    )
    keep_nothing()
    assert_results_close(on_cpu(ours(on_gpu(x))), exact_by_chunks(x), x)


@pytest.mark.usefixtures("hopper")
def test_segments_in_pairs_of_blocks(keep_nothing):
    """About the shortest that are made in one pass with their operands, in forward without A and in
    backward with it; minutes under the tools.
    """
    H = for_this_gpu(8)
    for T in range(2049, 100_000, 512):
        x = make_inputs(1, T, H, 72, 200, torch.bfloat16, 0.1)
        if has_cluster_summaries(plan_of(x)):
            break
    x = mixed_gates(x, "every other chunk")
    assert "states.cluster.summaries" in plan_of(x)["kernels"]
    assert "states.cluster.summaries_without_A" in plan_of(x, False)["kernels"]
    keep_nothing()
    assert_results_close(on_cpu(ours(on_gpu(x))), exact_by_chunks(x), x)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "H, K, V, T, lengths",
    [
        # About as few tokens as are swept for; minutes under the tools. The tail is two segments.
        (16, 72, 72, 8500, (0, 1, 2500, 64, 0, 1755, 15, 0)),
        (16, 72, 200, 8500, (0, 1, 2500, 64, 0, 1755, 15, 0)),
        (64, 8, 16, 8500, (0, 1, 2500, 64, 0, 1755, 15, 0)),
        (8, 72, 72, 16600, (*[1000] * 7, 2500, *[1000] * 7)),  # one of two segments, in eight parts
    ],
)
def test_gradients_of_packed_sequences_in_a_sweep(H, K, V, T, lengths):
    x = make_inputs(
        1, T, for_this_gpu(H), K, V, torch.bfloat16, 0.1, states=K == 72, lengths=lengths
    )
    plan = plan_of(x)
    assert sweeps_gradients(plan) and (
        "states.cluster.packed_summaries" in plan_of(x, False)["kernels"]
    ) == (K == 72)
    x = mixed_gates(x, "every other chunk")
    assert_results_close(on_cpu(ours(on_gpu(x))), exact_by_chunks(x), x)


@pytest.mark.parametrize("gate", [0.1, "reset"])
@pytest.mark.parametrize("shape", FP32_GATES)
def test_fused_with_fp32_gates(shape, gate):
    B, *sizes, lengths, _ = FUSED_SHAPES[shape]
    x = make_inputs(for_this_gpu(B), *sizes, torch.bfloat16, gate, torch.float32, lengths=lengths)
    assert_results_close(on_cpu(ours(on_gpu(x))), exact_by_chunks(x), x)


@pytest.mark.usefixtures("path")
@by_dtype
@pytest.mark.parametrize("K", [64, 72, 136])
def test_without_states(K, dtype):
    """The operators themselves: no h0, no dht."""
    x = make_inputs(1, 80, 1, K, 128, dtype, states=False)
    there, op = on_gpu(x), torch.ops.gla_ext
    inputs = (there.q, there.k, there.v, there.g, None, None, None)
    with torch.no_grad():
        o, _, _ = op.chunk_gla_fwd(*inputs, None, False, True, False)
        gradients = op.chunk_gla_bwd(there.do, None, *inputs, None, True, False)
    names = ("o", "dq", "dk", "dv", "dg")
    results = dict(zip(names, (o, *gradients[:4]), strict=True))
    expected = exact_by_chunks(x)
    assert_results_close(on_cpu(results), {name: expected[name] for name in names}, x)


@by_dtype
@pytest.mark.parametrize("case", ["over two chunks, gate reset", "packed, gate 1.0", "v-first"])
@pytest.mark.parametrize("step", STEPS)
def test_steps(step, case, dtype):
    given, expected = step_case(case, dtype, "cpu")
    there = types.SimpleNamespace(
        **{name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in vars(given).items()}
    )
    call, names = STEPS[step]
    for name, result in zip(names, as_tuple(call(there)), strict=True):
        assert_step_close(name, result.cpu(), given, expected)


@pytest.mark.parametrize("K, V", [(20, 28), (24, 40)])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets(what, offsets_dtype, K, V):
    x = make_inputs(1, 165, 1, K, V, torch.bfloat16, lengths=PACKED_LENGTHS)
    offsets = torch.tensor(BAD_OFFSETS[what], dtype=offsets_dtype)
    ours(on_gpu(dataclasses.replace(x, cu_seqlens=offsets)))
    torch.cuda.synchronize()


NORM_SHAPES = {  # V, gated, layout
    "8 lanes": (64, True, "heads of a projection"),
    "16 lanes": (120, True, "contiguous"),
    "a warp": (256, True, "heads of a projection"),
    "2 warps": (512, False, "contiguous"),
    "4 warps": (1000, True, "contiguous"),
    "a block": (2048, True, "contiguous"),
    "a loop": (2504, True, "contiguous"),
    "a loop beyond shared memory": (8200, True, "contiguous"),
    "odd": (65, True, "contiguous"),
    "odd and wide": (2501, True, "contiguous"),
    "misaligned": (72, True, "misaligned"),
    "without a gate": (65, False, "contiguous"),
}


@by_dtype
@pytest.mark.parametrize("V, gated, layout", NORM_SHAPES.values(), ids=NORM_SHAPES)
def test_norms(V, gated, layout, dtype):
    """Rows that fill neither a block nor what a thread has at once, against the CPU's results."""
    x, weight, gate, dy = make((1, 9, 3, V), "cpu", dtype, layout)
    here = [x, weight, gate if gated else None, dy]
    results = []
    for inputs in (here, map(move, here)):
        *inputs, dy = inputs
        with torch.no_grad():
            y, rstd = torch.ops.gla_ext.rms_norm_gate_fwd(*inputs, "swish", EPS)
            backward = functools.partial(torch.ops.gla_ext.rms_norm_gate_bwd, dy, *inputs, rstd)
            gradients = [*backward("swish", False)[:3], *backward("swish", True)]
        results.append([t.cpu() for t in (y, rstd, *gradients)])
    for wanted, got in zip(*results, strict=True):
        assert_close(got, wanted, 2e-6 if got.dtype == torch.float32 else 4e-3)


SWIGLU_SHAPES = {  # D, layout
    "whole packs": (72, "contiguous"),
    "a tail": (77, "contiguous"),
    "halves": (64, "heads of a projection"),
    "halves and a tail": (65, "heads of a projection"),
    "more than a block": (5000, "heads of a projection"),
    "misaligned": (72, "misaligned"),
}


@by_dtype
@pytest.mark.parametrize("D, layout", SWIGLU_SHAPES.values(), ids=SWIGLU_SHAPES)
def test_swiglu(D, layout, dtype):
    """Rows that end within what a thread has at once, against the CPU's results."""
    gate, _, up, dy = make((1, 9, 3, D), "cpu", dtype, layout)
    results = []
    for inputs in ((gate, up, dy), tuple(map(move, (gate, up, dy)))):
        *inputs, dy = inputs
        with torch.no_grad():
            y = torch.ops.gla_ext.swiglu_fwd(*inputs)
            gradients = torch.ops.gla_ext.swiglu_bwd(dy, *inputs, True)
        results.append([t.cpu() for t in (y, *gradients)])
    for wanted, got in zip(*results, strict=True):
        assert_close(got, wanted, 2e-6 if got.dtype == torch.float32 else 4e-3)


CONV_SHAPES = {  # B, T, D, offsets, layout
    "a slice": (2, 37, 72, None, "slice of a projection"),
    "a tile and more": (1, 9, 264, None, "contiguous"),
    "odd": (2, 21, 13, None, "contiguous"),
    "misaligned": (2, 21, 24, None, "misaligned"),
    "a token": (3, 1, 40, None, "contiguous"),
    "no token": (2, 0, 40, None, "contiguous"),
    "packed": (1, 40, 40, [0, 5, 5, 6, 8, 36], "slice of a projection"),
    "packed and odd": (1, 40, 13, [0, 5, 5, 6, 8, 36], "contiguous"),
}


def convolved(inputs, cu_seqlens):
    x, weight, bias, cache, dy, dstate = inputs
    leaves = (x, weight, bias, cache, cu_seqlens)
    with torch.no_grad():
        outputs = torch.ops.gla_ext.short_convolution_fwd(*leaves, True)
        return [*outputs, *torch.ops.gla_ext.short_convolution_bwd(dy, dstate, *leaves)]


@by_dtype
@pytest.mark.parametrize("W", [1, 3, 4, 6])
@pytest.mark.parametrize("B, T, D, offsets, layout", CONV_SHAPES.values(), ids=CONV_SHAPES)
def test_short_convolutions(B, T, D, offsets, layout, W, dtype):
    """Runs that end within what a thread loads at once, against the CPU's results."""
    N = B if offsets is None else len(offsets) - 1
    here = make_convolution(B, T, D, W, "cpu", dtype, layout=layout, N=N)
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    expected = convolved(here, cu_seqlens)
    results = convolved(list(map(move, here)), move(cu_seqlens))
    for wanted, got in zip(expected, results, strict=True):
        assert_close(got.cpu(), wanted, 2e-6 if got.dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("W", [4, 6])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_short_convolutions_with_bad_offsets(what, offsets_dtype, W):
    inputs = make_convolution(1, 165, 24, W, "cpu", torch.bfloat16, N=7)
    convolved(list(map(move, inputs)), torch.tensor(BAD_OFFSETS[what], dtype=offsets_dtype).cuda())
    torch.cuda.synchronize()
