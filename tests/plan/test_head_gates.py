"""Which calls take the kernels for one gate a head, or none, and which spread the gate."""

import pytest
from plans import BATCH, one_pass

import gla_ext
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


@pytest.mark.parametrize("gate", [ONE_GATE, CONSTANT, {"key_gated": False}])
def test_forward(gate):
    assert kernels(**gate) == FORWARD
    assert planned(**gate)["path"] == "fused" and planned(**gate)["fused_expects"] is None


@pytest.mark.parametrize("gate", [CONSTANT, {"key_gated": False}])
def test_backward_without_the_gradient_of_a_gate(gate):
    assert kernels(True, **gate) == BACKWARD


def test_backward_with_it():
    """Forward leaves nothing for it."""
    names = ("query_grads.and_dots", "key_grads.and_dots", "gate_grads", "value_grads")
    expected = [SUMS, *(f"head_gates.{name}" for name in names)]
    assert kernels(True, **ONE_GATE) == expected
    assert kernels(True, **ONE_GATE, for_backward=True) == expected
    assert planned(**ONE_GATE, for_backward=True)["for_backward_bytes"] == 0


@pytest.mark.parametrize(
    "change",
    [{"capability": "8.0"}, {"dtype": "float16"}, {"K": 132}, {"aligned": False}, {"K": 264}],
)
def test_what_they_do_not_take(change):
    for backward in (False, True):
        assert SUMS not in kernels(backward, **CONSTANT | change)


def test_many_values():
    """They are the keys of backward's sweeps."""
    assert kernels(V=512, **CONSTANT) == FORWARD
    assert SUMS not in kernels(True, V=512, **CONSTANT)


def test_any_dtype_of_the_gate():
    assert kernels(**CONSTANT | {"gate_dtype": "float16"}) == FORWARD


def test_few_heads_of_long_sequences_are_cut():
    long = {"B": 1, "T": 32768}
    cut = [SUMS, "head_gates.summaries", "scan", "head_gates.forward"]
    assert kernels(**long | ONE_GATE) == cut
    both = [SUMS, "head_gates.summaries", "head_gates.summaries.of_grads", "scan.both"]
    assert kernels(True, **long | CONSTANT) == [*both, *BACKWARD[1:]]
    for backward, sweeps in ((False, FORWARD), (True, BACKWARD)):
        assert kernels(backward, **long | CONSTANT | {"batch_invariant": True}) == sweeps
        assert kernels(backward, **BATCH | {"B": 1, "T": 128} | CONSTANT) == sweeps
    # Two segments would be one that replays the other.
    assert kernels(**{"B": 8} | ONE_GATE) == FORWARD
    assert "prepare" in kernels(B=8, gate_dtype="float32")


def test_packed_sequences():
    packed = {"B": 1, "T": 65536, "N": 512, "batch_invariant": True}
    assert kernels(**packed | ONE_GATE) == ["map_sequences", "map_chunks", *FORWARD]
    packed["batch_invariant"] = False
    assert kernels(**packed | ONE_GATE)[2:5] == [SUMS, "head_gates.summaries", "scan"]


def test_printed():
    plan = gla_ext.plan(*BATCH.values(), head_gates=True, gate_gradient=False, gpu=("9.0", 132))
    assert list(plan.forward) == FORWARD and list(plan.backward) == BACKWARD
    assert "head_gates.sums -> head_gates.forward" in str(plan)
