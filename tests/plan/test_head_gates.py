"""Which calls take the kernels for one gate a head, or none, and which spread the gate."""

import pytest
from plans import BATCH, one_pass

from gla_ext import _C

SUMS = "head_gates.sums"
FORWARD = [SUMS, "head_gates.forward"]
BACKWARD = [SUMS, *(f"head_gates.{name}_grads" for name in ("query", "key", "value"))]
ONE_GATE = {"head_gated": True, "gate_dtype": "float32"}
CONSTANT = ONE_GATE | {"gate_gradient": False}


def planned(**change):
    return _C.plan(**BATCH | {"device": "cuda", "dtype": "bfloat16"} | change)


def kernels(backward=False, **change):
    return one_pass(planned(**change), backward)["kernels"]


NO_GATE = {"key_gated": False}
LONG, PACKED = {"B": 1, "T": 32768}, {"B": 1, "T": 65536, "N": 512}
WHOLE = {"batch_invariant": True}
DOTS = ("query_grads.and_dots", "key_grads.and_dots", "gate_grads", "value_grads")
WITH_GATE_GRADIENT = [SUMS, *(f"head_gates.{name}" for name in DOTS)]
SUMMARIES = [SUMS, "head_gates.summaries"]
KERNELS = {  # call, forward, backward; None: others' kernels, or not asked
    "a gate": (ONE_GATE, FORWARD, WITH_GATE_GRADIENT),
    "forward leaves nothing": (ONE_GATE | {"for_backward": True}, FORWARD, WITH_GATE_GRADIENT),
    "no gradient of the gate": (CONSTANT, FORWARD, BACKWARD),
    "no gate": (NO_GATE, FORWARD, BACKWARD),
    "fp16 gates": (CONSTANT | {"gate_dtype": "float16"}, FORWARD, None),
    # Values are the keys of backward's sweeps.
    "many values": (CONSTANT | {"V": 512}, FORWARD, None),
    # Few heads of long sequences are cut.
    "segments": (LONG | ONE_GATE, [*SUMMARIES, "scan", "head_gates.forward"], None),
    "segments, both": (
        LONG | CONSTANT,
        [*SUMMARIES, "scan", "head_gates.forward"],
        [*SUMMARIES, "head_gates.summaries.of_grads", "scan.both", *BACKWARD[1:]],
    ),
    "long, whole": (LONG | CONSTANT | WHOLE, FORWARD, BACKWARD),
    "short": ({"B": 1, "T": 128} | CONSTANT, FORWARD, BACKWARD),
    # Two segments would be one that replays the other.
    "two places": ({"B": 8} | ONE_GATE, FORWARD, None),
    "packed": (PACKED | WHOLE | ONE_GATE, ["map_sequences", "map_chunks", *FORWARD], None),
    "packed, cut": (
        PACKED | ONE_GATE,
        ["map_sequences", "map_chunks", *SUMMARIES, "scan", "head_gates.forward"],
        None,
    ),
}


@pytest.mark.parametrize("change, forward, backward", KERNELS.values(), ids=KERNELS)
def test_kernels(change, forward, backward):
    plan = planned(**change)
    assert plan["path"] == "fused" and plan["for_backward_bytes"] == 0
    assert plan["fused_expects"] is None or change["gate_dtype"] == "float16"
    assert kernels(**change) == forward
    if backward is None:
        assert "V" not in change or SUMS not in kernels(True, **change)
    else:
        assert kernels(True, **change) == backward


@pytest.mark.parametrize(
    "change",
    [{"capability": "8.0"}, {"dtype": "float16"}, {"K": 132}, {"aligned": False}, {"K": 264}],
)
def test_what_they_do_not_take(change):
    for backward in (False, True):
        assert SUMS not in kernels(backward, **CONSTANT | change)
