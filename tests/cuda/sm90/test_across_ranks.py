"""chunk_gla over several ranks on the fused path, the ranks one after the other on one GPU."""

from types import SimpleNamespace

import pytest
import torch
from common import assert_results_close, assert_same_bits, exact_by_chunks, make_inputs
from fused import BF16, call_plan, draw, for_this_gpu, mixed_gates
from ranks import across_ranks, named, text_of

from gla_ext import batch_invariant

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")
SHAPES = {  # B, T, H, K, V, the gates' dtype
    "a long sequence": (1, 640, 1, 128, 256, BF16),
    "clusters": (12, 195, 10, 72, 200, BF16),  # the batch for an H200
    "prepared": (2, 520, 2, 136, 72, BF16),
    "prepared, fp32 gates": (1, 520, 1, 96, 80, torch.float32),
    "fused": (1, 640, 2, 64, 128, BF16),
    "small heads": (2, 640, 2, 32, 64, BF16),
    "fills the GPU": (24, 200, 12, 72, 72, BF16),
}


def in_halves(x, lengths):
    """The plan of the first rank."""
    return call_plan(x.map(lambda t: t[:, : lengths[0]]), for_backward=True, in_halves=True)


@in_nan
@pytest.mark.parametrize("gates", [0.1, "every other chunk", "reset"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_results_are_one_gpu_s(shape, gates):
    *sizes, gate_dtype = shape
    sizes[0] = for_this_gpu(sizes[0]) if sizes[0] > 2 else sizes[0]
    x, T = draw(*sizes, gates, gate_dtype), sizes[1]
    lengths = (T // 2, T // 8, T - T // 2 - T // 8)
    plan = in_halves(x, lengths)
    assert plan["path"] == "fused"
    for name in ("forward", "backward"):
        summary = plan[name]["kernels"][: plan[name]["summary_kernels"]]
        assert summary[-1].startswith("fold")
    if shape == SHAPES["clusters"]:
        assert summary[0] == "states.cluster.summaries"
    found = named(across_ranks(text_of(x), lengths, uneven=True))
    assert_results_close(found, exact_by_chunks(x), x)


@pytest.mark.parametrize("gates", [0.1, "every other chunk"])
def test_segments_of_clusters(gates):
    """What a long sequence on a GPU takes, whose prepared chunks backward reads."""
    x = draw(1, 16384, for_this_gpu(16), 128, 256, gates)
    plan = in_halves(x, (8192, 8192))
    for name in ("forward", "backward"):
        assert plan[name]["segments"] > 1
    assert plan["forward"]["kernels"][1] == "fold.and_strong_A" and plan["for_backward_bytes"] > 0
    assert_results_close(named(across_ranks(text_of(x), (8192, 8192))), exact_by_chunks(x), x)


@pytest.mark.sanitizer
@pytest.mark.parametrize("H, K, V", [(1, 72, 136), (1, 136, 72), (1, 64, 64), (60, 72, 200)])
def test_every_kernel(H, K, V):
    """Strong chunks among others, over prepared chunks, of small heads, and by clusters."""
    x = make_inputs(1, 140, for_this_gpu(H), K, V, BF16, 0.1)
    x = mixed_gates(x, "every other chunk")
    found = named(across_ranks(text_of(x.map(torch.Tensor.cuda)), (75, 65), uneven=True))
    assert_results_close({name: t.cpu() for name, t in found.items()}, exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(
    "sizes, lengths",
    [
        ((2, 768, 1, 128, 256), None),
        ((1, 510, 2, 72, 40), (5, 300, 1, 0, 200)),
        ((1, 510, 2, 72, 40), (510,)),
    ],
    ids=str,
)
def test_rows_and_packed_sequences(sizes, lengths, v_first):
    x = draw(*sizes, lengths=lengths)
    text = text_of(x)
    if v_first:
        text |= {name: text[name].mT.contiguous() for name in ("h0", "dht")}
    found = named(across_ranks(text, (sizes[1] // 3,) * 3, state_v_first=v_first))
    if v_first:
        found |= {name: found[name].mT for name in ("final_state", "dh0")}
    assert_results_close(found, exact_by_chunks(x), x)


@in_nan
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_the_step_path_and_gates_on_values(dtype):
    x = make_inputs(2, 200, 2, 20, 28, dtype, 0.5, device="cuda")
    assert_results_close(named(across_ranks(text_of(x), (100, 100))), exact_by_chunks(x), x)
    gv = make_inputs(2, 200, 2, 28, 28, dtype, 0.5, device="cuda", seed=3).g
    one = named(across_ranks(text_of(x, gv), (200,), uneven=True))
    found = named(across_ranks(text_of(x, gv), (120, 80), uneven=True))
    inputs = SimpleNamespace(**vars(x), gv=gv)
    assert_results_close(found, {name: value.double() for name, value in one.items()}, inputs)


@pytest.mark.parametrize("invariant", [False, True])
def test_the_same_bits_from_run_to_run(invariant):
    text = text_of(draw(1, 640, 1, 128, 256))
    with batch_invariant(invariant):
        once, again = (named(across_ranks(text, (320, 320))) for _ in range(2))
    assert_same_bits(once, again)


def test_other_tokens_than_the_plan_was_made_for():
    """Without what forward prepared, as in graphs of symbolic sizes, everything is made again."""
    x = draw(1, 640, 1, 128, 256)
    operands = (x.q, x.k, x.v, x.g, None)
    ops = torch.ops.gla_ext
    summary, none = ops.chunk_gla_summary(*operands, x.initial_state, None, False, False, True, 0)
    assert none.numel() == 0
    o, state, entering = ops.chunk_gla_apply(
        *operands, x.initial_state, None, True, False, False, True, none, 0
    )
    grad, nothing = ops.chunk_gla_summary_bwd(x.do, x.dht, *operands, None, False, False, none, 0)
    gradients = ops.chunk_gla_apply_bwd(
        x.do, x.dht, *operands, x.initial_state, None, False, False, none, entering, nothing
    )
    names = ("dq", "dk", "dv", "dg", "dgv", "dh0")
    found = {"o": o, "final_state": state} | dict(zip(names, gradients, strict=True))
    del found["dgv"]
    expected = exact_by_chunks(x)
    assert_results_close(found, expected, x)
    states = {"final_state": summary[: state.numel()].view_as(state), "dh0": grad}
    assert_results_close(states, {name: expected[name] for name in states}, x)
