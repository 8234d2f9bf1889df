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
import types

import pytest
import recurrence
import torch
from common import (
    BAD_OFFSETS,
    CUDA_DTYPES,
    PACKED_LENGTHS,
    assert_results_close,
    exact_by_chunks,
    make_inputs,
    ours,
)
from cuda_tools import move
from fused import for_this_gpu, mixed_gates, plan_of
from plans import has_cluster_summaries, reads_prepared, sweeps_gradients
from recurrence import assert_chunked_close, chunked, make_recurrence
from steps import STEPS, as_tuple, assert_step_close, step_case

from gla_ext import plan, recurrent_gla_commit_, recurrent_gla_step_, recurrent_gla_verify

pytestmark = [pytest.mark.cuda, pytest.mark.sanitizer]

by_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
ops = torch.ops.gla_ext

SHAPES = {  # B, T, H, K, V, lengths, layout
    "aligned": (1, 80, 1, 64, 128, None, "contiguous"),
    "wide": (1, 66, 1, 128, 256, None, "contiguous"),
    "odd": (1, 81, 2, 33, 65, None, "contiguous"),
    "widest": (1, 17, 1, 1000, 1016, None, "contiguous"),
    "misaligned": (1, 70, 1, 64, 64, None, "misaligned"),
    "strided": (1, 70, 2, 20, 28, None, "sliced"),
    "packed": (1, 165, 1, 20, 28, PACKED_LENGTHS, "contiguous"),
    "one channel": (2, 65, 1, 1, 1, None, "contiguous"),
}
FUSED_SHAPES = {  # the batch for an H200, see `for_this_gpu`
    "packed": (1, 165, 1, 72, 24, PACKED_LENGTHS),
    "widest": (1, 66, 1, 136, 72, None),
    "operands of several chunks a block": (5, 70, 30, 136, 8, None),
    "pairs of blocks": (2, 260, 17, 72, 136, None),
    "pairs of blocks, one after the other": (5, 130, 17, 72, 136, None),
    "pairs of blocks, packed": (1, 165, 1, 72, 136, PACKED_LENGTHS),
    "gradients in a sweep": (11, 130, 6, 72, 72, None),
    "gradients in a sweep, many values": (11, 330, 6, 72, 200, None),
    "gradients in a sweep, several heads a cluster": (22, 190, 6, 72, 200, None),
    "gradients in a sweep, few values": (17, 430, 6, 104, 104, None),
    "gradients in a sweep, narrow": (22, 200, 9, 40, 64, None),
    "pairs of chunks": (2, 170, 1, 200, 200, None),
    "pairs of chunks, packed": (1, 430, 1, 136, 136, (64, 1, 200, 0, 130)),
    "pairs of chunks, three tiles of keys": (1, 530, 1, 192, 136, None),
    "in segments": (1, 530, 1, 64, 64, None),
    "in segments, three tiles of keys": (1, 530, 1, 136, 72, None),
    "segments that sum the one before": (22, 390, 3, 72, 40, None),
    "segments that sum the one before, many keys": (22, 390, 3, 136, 40, None),
    "segments that sum the one before, few keys": (22, 390, 3, 40, 72, None),
    "few keys, many values": (1, 150, 2, 40, 136, None),
    "few keys and values": (1, 150, 2, 64, 24, None),
    "packed, in segments": (1, 430, 1, 128, 64, (0, 330, 70, 3)),
    "packed, small heads in segments": (1, 430, 1, 64, 64, (0, 330, 70, 3)),
    "packed, in segments, three tiles of keys": (1, 430, 1, 160, 64, (0, 330, 70, 3)),
}
FP32_GATES = [
    *("widest", "gradients in a sweep", "few keys, many values", "few keys and values"),
    *("in segments", "packed, small heads in segments", "pairs of chunks, three tiles of keys"),
    "segments that sum the one before, few keys",
]


def on_gpu(x):
    return dataclasses.replace(x, **{name: move(t) for name, t in vars(x).items()})


def on_cpu(results):
    return {name: t.cpu() for name, t in results.items()}


def assert_right(x):
    assert_results_close(on_cpu(ours(on_gpu(x))), exact_by_chunks(x), x)


def fused_inputs(name, gate, gate_dtype=torch.bfloat16):
    B, *sizes, lengths = FUSED_SHAPES[name]
    options = {"gate_dtype": gate_dtype, "lengths": lengths}
    return make_inputs(for_this_gpu(B), *sizes, torch.bfloat16, gate, **options)


by_gate = pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])


@pytest.mark.usefixtures("path")
@by_dtype
@by_gate
@pytest.mark.parametrize("B, T, H, K, V, lengths, layout", SHAPES.values(), ids=SHAPES)
def test_forward_and_gradients(B, T, H, K, V, lengths, layout, gate, dtype):
    assert_right(make_inputs(B, T, H, K, V, dtype, gate, lengths=lengths, layout=layout))


GATED_SHAPES = {name: (*row, "both") for name, row in SHAPES.items() if name != "one channel"} | {
    f"gates: {gating}": (2, 65, 1, 24, 40, None, "contiguous", gating) for gating in ("gv", "none")
}


@by_dtype
@by_gate
@pytest.mark.parametrize("name", GATED_SHAPES)
def test_gates_on_values(name, gate, dtype):
    *sizes, lengths, layout, gating = GATED_SHAPES[name]
    options = {"gating": gating, "gate": gate, "dtype": dtype}
    x = make_recurrence(*sizes, lengths=lengths, layout=layout, **options)
    assert_chunked_close(on_cpu(chunked(on_gpu(x))), recurrence.exact(x), x)


RECURRENT_SHAPES = {  # (B, T, H, K, V), options
    "aligned": ((2, 35, 1, 64, 128), {}),
    "wide": ((1, 3, 1, 512, 512), {}),
    "widest": ((1, 3, 1, 1000, 1016), {}),
    "most keys": ((2, 1, 1, 1024, 40), {}),
    "odd": ((2, 34, 2, 33, 65), {}),
    "misaligned": ((1, 5, 2, 64, 64), {"layout": "misaligned"}),
    "strided": ((2, 5, 2, 20, 28), {"layout": "sliced"}),
    "packed": ((1, 165, 1, 20, 28), {"lengths": PACKED_LENGTHS}),
    "no gates": ((2, 3, 1, 130, 70), {"gating": "none"}),
}


@pytest.mark.parametrize("name", RECURRENT_SHAPES)
@pytest.mark.parametrize("v_first", [False, True])
def test_recurrent(v_first, name):
    """And on a pool: verification, a step, a commit."""
    sizes, options = RECURRENT_SHAPES[name]
    x = make_recurrence(*sizes, dtype=torch.bfloat16, **options)
    expected = recurrence.exact(x)
    there = on_gpu(x.v_first() if v_first else x)
    results = on_cpu(recurrence.ours(there, state_v_first=v_first))
    if v_first:
        results |= {name: results[name].mT for name in ("final_state", "dh0")}
    recurrence.assert_results_close(results, expected, x)
    if x.cu_seqlens is not None:
        return
    tokens = {name: getattr(there, name) for name in ("k", "v", "gk", "gv")}
    slots = torch.tensor([5, 0][: sizes[0]], device="cuda")
    pool = {"state": there.initial_state.contiguous(), "slots": slots, "state_v_first": v_first}
    recurrent_gla_verify(there.q, **tokens, **pool)
    o = recurrent_gla_step_(there.q, **tokens, **pool)
    recurrent_gla_commit_(**tokens, **pool, accepted=torch.ones_like(slots))
    assert o.isfinite().all()


@pytest.mark.parametrize(
    "name, gate, gate_dtype",
    [
        *[(name, gate, torch.bfloat16) for name in FUSED_SHAPES for gate in (0.1, 2.0, "reset")],
        *[(name, gate, torch.float32) for name in FP32_GATES for gate in (0.1, "reset")],
    ],
)
def test_fused(name, gate, gate_dtype):
    assert_right(fused_inputs(name, gate, gate_dtype))


@by_dtype
@by_gate
@pytest.mark.parametrize(
    "sizes, segments",
    [((1, 800, 1, 64, 136), 4), ((2, 835, 1, 33, 40), 4), ((1, 2600, 1, 20, 24), 11)],
    ids=str,
)
def test_segments_of_the_steps(sizes, segments, gate, dtype, monkeypatch):
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    x = make_inputs(*sizes, dtype, gate)
    calls = plan(*sizes, dtype=dtype)
    assert calls.path == "steps"
    assert calls.forward_segments == calls.backward_segments == segments
    assert_right(x)


@by_dtype
@pytest.mark.parametrize("gating", ["gk", "none"])
def test_segments_of_the_steps_that_remember(gating, dtype, monkeypatch):
    """What one segment adds counts in all others, and states are [V, K]."""
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    x = make_recurrence(1, 1100, 1, 20, 24, gating=gating, gate=1e-3, dtype=dtype)
    calls = plan(1, 1100, 1, 20, 24, dtype=dtype, g=gating == "gk")
    assert calls.forward_segments == calls.backward_segments == 5
    results = on_cpu(chunked(on_gpu(x.v_first()), state_v_first=True))
    results |= {name: results[name].mT for name in ("final_state", "dh0")}
    assert_chunked_close(results, recurrence.exact(x), x)


@by_gate
@pytest.mark.parametrize("kind", ["many values", "several heads a cluster", "few values"])
def test_operands_that_backward_makes_again(kind, gate, hopper, keep_nothing):
    """Where forward leaves its own, as `test_fused` does."""
    x = fused_inputs(f"gradients in a sweep, {kind}", gate)
    assert not reads_prepared(plan_of(x, False))
    assert plan_of(x, for_backward=True)["for_backward_bytes"] > 0
    keep_nothing()
    assert_right(x)


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
    assert_right(x)


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
    assert_right(x)


@pytest.mark.usefixtures("path")
@by_dtype
@pytest.mark.parametrize("K", [64, 72, 136])
def test_without_states(K, dtype):
    """The operators themselves: no h0, no dht."""
    x = make_inputs(1, 80, 1, K, 128, dtype, states=False)
    there = on_gpu(x)
    inputs = (there.q, there.k, there.v, there.g, None, None, None)
    with torch.no_grad():
        o, _, _ = ops.chunk_gla_fwd(*inputs, None, False, True, False)
        gradients = ops.chunk_gla_bwd(there.do, None, *inputs, None, True, False)
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
