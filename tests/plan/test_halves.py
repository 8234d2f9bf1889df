"""The plans of a pass that is cut at the scan, for several ranks."""

import pytest
import torch
from plans import BATCH, SHAPE

import gla_ext
from gla_ext import _C

LONG = {"B": 1, "T": 32768}
# What each half launches, forward and backward.
HALVES = {
    "segments, clusters": (
        LONG,
        (["states.cluster.summaries", "fold.and_strong_A"], ["scan", "forward.prepared.makes_A"]),
        (
            ["states.prepared.summaries_of_grads", "fold.grads"],
            [
                *("scan.grads", "states.prepared.without_grads", "strong.gradients.without_A"),
                "gradients.sweep",
            ],
        ),
    ),
    # One segment, which is summed up by itself; nothing is scanned.
    "a batch that fills the GPU": (
        {},
        (["states.cluster.summaries", "fold.and_strong_A"], ["forward.prepared.makes_A"]),
        (
            ["states.prepared.summaries_of_grads", "fold.grads"],
            ["states.prepared.without_grads", "strong.gradients.without_A", "gradients.sweep"],
        ),
    ),
    "small heads": (
        LONG | {"K": 64, "V": 64},
        (["states.fused.summaries", "fold"], ["scan", "forward.small", "strong.output"]),
        (
            ["states.fused.summaries_both", "fold.grads"],
            ["scan.both", "states.fused", "strong.gradients", "gradients.chunk"],
        ),
    ),
}


def planned(change, **options):
    return _C.plan(
        **BATCH | {"device": "cuda", "dtype": "bfloat16", "in_halves": True} | change | options
    )


def halves(plan):
    first = plan["summary_kernels"]
    return plan["kernels"][:first], plan["kernels"][first:]


@pytest.mark.parametrize("change, forward, backward", HALVES.values(), ids=HALVES)
def test_what_a_half_launches(change, forward, backward):
    plan = planned(change, for_backward=True)
    assert halves(plan["forward"]) == forward
    assert halves(plan["backward"]) == backward


def test_strong_gradients_are_the_second_half_s():
    """If forward has left nothing, backward's first half prepares the chunks; its second half makes
    the strong gradients.
    """
    summary, rest = halves(planned(LONG | {"V": 192})["backward"])
    assert summary[0] == "prepare.without_A" and "strong.gradients.without_A" in rest
    summary, rest = halves(planned(LONG)["backward"])
    assert summary[0] == "states.cluster.summaries" and summary[-1] == "fold.and_strong_A.grads"
    assert "strong.gradients.without_A" in rest


def test_every_segment_is_summed_up():
    """As many summaries as segments, and one where there would be none."""
    plan, alone = planned(LONG), planned(LONG, in_halves=False)
    assert plan["forward"]["segments"] == alone["forward"]["segments"] > 1
    assert plan["forward"]["segment_states"] == plan["forward"]["segments"]
    assert planned({})["forward"]["segments"] == 1
    assert planned({}, in_halves=False)["forward"]["segments"] == 0


def test_the_step_path_has_no_halves():
    plan = planned(LONG, capability="8.0")
    assert plan["path"] == "steps"
    assert [plan[name]["summary_kernels"] for name in ("forward", "backward")] == [0, 0]


def test_packed_sequences_are_refused():
    with pytest.raises(ValueError, match="expected no packed sequences in halves, got N = 4"):
        planned(LONG | {"N": 4})


def test_a_plan_across_ranks():
    options = {"gpu": ("9.0", 132), "across_ranks": True}
    plan = gla_ext.plan(1, 32768, 4, 128, 256, **options)
    assert plan.forward == (
        *("states.cluster.summaries", "fold.and_strong_A", "all-gather", "fold_ranks"),
        *("scan", "forward.prepared.makes_A"),
    )
    assert plan.backward[2:4] == ("all-gather", "fold_ranks")
    assert "fold.grads -> all-gather -> fold_ranks -> scan.grads" in str(plan)
    summaries = 16 * 4 * 128 * 256 * 4  # which wait for the other ranks
    assert plan.forward_workspace_bytes >= plan.for_backward_bytes >= summaries
    steps = gla_ext.plan(**SHAPE, dtype=torch.float32, **options)
    middle = steps.forward.index("all-gather")
    assert steps.forward[:middle] == steps.forward[middle + 2 :] != ()
