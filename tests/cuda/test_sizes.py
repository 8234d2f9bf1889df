"""CUDA at the ends of its range: head sizes, counts beyond a grid's 65,535 and int32."""

import dataclasses

import pytest
import recurrence
import torch
from common import (
    CUDA_DTYPES,
    assert_results_close,
    assert_same_bits,
    exact,
    exact_by_chunks,
    make_inputs,
    ours,
)
from large import large_inputs
from recurrence import assert_chunked_close, chunked, make_recurrence

from gla_ext import batch_invariant

pytestmark = pytest.mark.cuda

HEAD_SIZES = [
    *[(1, 1), (1, 512), (512, 1), (2, 3), (7, 17), (16, 8), (31, 33), (33, 31), (60, 72)],
    *[(64, 64), (63, 65), (65, 129), (72, 100), (96, 160), (100, 200), (128, 128), (129, 64)],
    *[(127, 255), (128, 256), (257, 96), (256, 512), (384, 384), (511, 509)],
    *[(509, 40), (512, 512), (320, 192), (512, 1024), (1000, 1016), (1024, 40)],
]


@pytest.mark.usefixtures("nan_in_fresh_memory", "path")
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("gate", [0.1, "reset"])
@pytest.mark.parametrize("K, V", HEAD_SIZES)
def test_head_sizes(K, V, gate, dtype):
    x = make_inputs(1, 130, 2, K, V, dtype, gate, device="cuda")
    assert_results_close(ours(x), exact_by_chunks(x), x)


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
@pytest.mark.parametrize("K, V", [*HEAD_SIZES[::2], (136, 72), (257, 96), (1000, 1016)])
def test_head_sizes_of_gates_on_values(K, V, gate, dtype):
    """And of the recurrence, with both layouts of the states."""
    B = 64 if K == V == 1 else 1  # enough numbers for their RMS to say something
    x = make_recurrence(B, 82, 2, K, V, dtype=dtype, gate=gate, device="cuda")
    expected = recurrence.exact(x)
    assert_chunked_close(chunked(x), expected, x)
    if gate == 0.1:
        recurrence.assert_results_close(recurrence.ours(x), expected, x)
        turned = expected | {name: expected[name].mT for name in ("final_state", "dh0")}
        results = recurrence.ours(x.v_first(), state_v_first=True)
        recurrence.assert_results_close(results, turned, x)


@pytest.mark.usefixtures("nan_in_fresh_memory", "path")
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["transposed", "misaligned"])
@pytest.mark.parametrize("K, V", [(64, 128), (128, 256), (63, 129)])
def test_layouts_of_large_heads(K, V, layout, dtype):
    x = make_inputs(2, 130, 3, K, V, dtype, 0.5, layout=layout, device="cuda")
    assert_results_close(ours(x), exact_by_chunks(x), x)


@pytest.mark.parametrize("K, V", [(5, 4), (8, 8)])
@pytest.mark.parametrize("B, H", [(66_000, 1), (3, 22_000), (257, 256)])
def test_many_heads(B, H, K, V):
    """B * H beyond 65,535, two chunks each."""
    x = large_inputs(B, 65, H, K, V, gate=1.0, states=True)
    assert_results_close(ours(x), exact(x), x)


@pytest.mark.parametrize("K, V", [(5, 4), (8, 8)])
def test_many_sequences(K, V):
    """70,000 packed sequences get the bits they have in a batch."""
    N, T = 70_000, 20
    with batch_invariant():
        batch = large_inputs(N, T, 1, K, V, gate=1.0, states=True)
        expected = ours(batch)
        tokens = {x: getattr(batch, x).view(1, N * T, 1, -1) for x in ("q", "k", "v", "g", "do")}
        offsets = torch.arange(N + 1, dtype=torch.int32, device="cuda") * T
        packed = ours(dataclasses.replace(batch, **tokens, cu_seqlens=offsets))
    assert_results_close(expected, exact(batch), batch)
    assert_same_bits(packed, {x: y.view(packed[x].shape) for x, y in expected.items()})


@pytest.mark.parametrize(
    "call, close, sizes",
    [
        (chunked, assert_chunked_close, (200, 67, 4, 24, 40)),
        (recurrence.ours, recurrence.assert_results_close, (1000, 3, 70, 5, 4)),
    ],
    ids=["gates on values", "recurrent"],
)
def test_many_sequences_of_gates_on_values(call, close, sizes):
    B, T, H, *_ = sizes
    x = make_recurrence(*sizes, dtype=torch.bfloat16, device="cuda")
    packed = x.map(lambda t: t if t.shape[1] == H else t.flatten(0, 1)[None])
    offsets = torch.arange(B + 1, dtype=torch.int32, device="cuda") * T
    batch, packed = call(x), call(dataclasses.replace(packed, cu_seqlens=offsets))
    close(batch, recurrence.exact(x), x)
    assert_same_bits({name: t.view(batch[name].shape) for name, t in packed.items()}, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_many_chunks(packed, dtype):
    """70,000 chunks in one sequence. A reset cuts off the end, so that its truth is known."""
    T, tail = 70_000 * 64, 1000
    x = large_inputs(*(1, T, 1, 16, 24, dtype), gate=0.25, lengths=(T,) if packed else None)
    x.g[:, -tail] = -torch.inf
    results, names = ours(x), ("q", "k", "v", "g", "do")
    end = dataclasses.replace(
        x, **{name: getattr(x, name)[:, -tail:] for name in names}, cu_seqlens=None
    )
    expected = exact_by_chunks(end)
    for name in ("o", "dq", "dk", "dv", "dg"):
        results[name] = results[name][:, -tail:]
    assert_results_close(results, expected, end)


# A tensor of more than 2^31 elements, the memory that takes, GiB, and the path: q, k and g; the
# chunk states.
HUGE = {
    "q": ((130, 32768, 4, 128, 16), 100, "plan"),
    "q, steps": ((130, 32768, 4, 128, 16), 100, "steps"),
    "states": ((260, 1024, 4, 256, 512), 60, "plan"),
    "states, steps": ((130, 1024, 4, 512, 512), 60, "steps"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("what", HUGE)
def test_more_than_int32_elements(what, packed, monkeypatch):
    """The first and the last sequence have the bits of the same sequence alone."""
    (B, T, H, K, V), gibibytes, path = HUGE[what]
    if path == "steps":
        monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    assert max(B * T * H * K, B * T // 64 * H * K * V) > 2**31
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of GPU memory, {free / 2**30:.0f} are free")
    x = large_inputs(B, T, H, K, V)
    if packed:
        x = x.map(lambda t: t.view(1, B * T, H, -1))
        x = dataclasses.replace(x, cu_seqlens=torch.arange(B + 1, device="cuda") * T)
    with batch_invariant():
        results = ours(x)
        del results["final_state"]  # where there is no dht it says nothing new
        for n in (0, B - 1):
            part = x.select(n)
            alone = ours(part)
            if packed:
                own = {name: y[:, n * T : (n + 1) * T] for name, y in results.items()}
            else:
                own = {name: y[n : n + 1] for name, y in results.items()}
            assert_same_bits(own, alone)
    alone_truth = exact_by_chunks(part)
    assert_results_close(alone, alone_truth, part)
    del x, results, alone, own, part
    torch.cuda.empty_cache()
