"""The CPU's plans: pure functions of the call and the threads."""

import pytest
from plans import cpu_plan

SHAPE = {"B": 4, "T": 2048, "H": 4, "K": 64, "V": 128}


def test_enough_sequences_sweep():
    plan = cpu_plan(**SHAPE, threads=2)
    assert (plan["path"], plan["mode"]) == ("cpu", "sweep")
    assert (plan["tasks"], plan["threads"], plan["state_bytes"]) == (16, 2, 0)


def test_too_few_sequences_materialise():
    plan = cpu_plan(**{**SHAPE, "B": 1}, threads=16)
    assert (plan["mode"], plan["tasks"], plan["threads"]) == ("materialised", 4 * 32, 16)
    assert plan["state_bytes"] == 4 * 32 * 64 * 128 * 4


def test_packed_sequences_share_the_tokens():
    plan = cpu_plan(B=1, T=65536, H=4, K=64, V=64, N=32, threads=512)
    assert (plan["mode"], plan["tasks"]) == ("materialised", (65536 // 64 + 32) * 4)
    assert plan["state_bytes"] == plan["tasks"] * 64 * 64 * 4


@pytest.mark.parametrize("dtype, each", [("bfloat16", 2), ("float16", 4), ("float64", 8)])
def test_states_in_the_dtype_they_are_kept_in(dtype, each):
    plan = cpu_plan(**{**SHAPE, "B": 1}, threads=16, dtype=dtype)
    assert plan["state_bytes"] == 4 * 32 * 64 * 128 * each


@pytest.mark.parametrize(
    "change, message",
    [
        ({"T": -1}, "expected B, T, H, N >= 0 and K, V, threads >= 1"),
        ({"K": 0}, "expected B, T, H, N >= 0 and K, V, threads >= 1"),
        ({"N": 3}, "expected B = 1 with N packed sequences, got 4"),
        ({"dtype": "int8"}, "expected dtype bfloat16, float16, float32 or float64, got int8"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=f"plan: {message}"):
        cpu_plan(**{**SHAPE, **change})


def test_packed_sequences_count():
    assert cpu_plan(**{**SHAPE, "B": 1}, N=8, threads=16)["mode"] == "sweep"


def test_backward_states():
    forward = cpu_plan(**SHAPE, threads=2)
    backward = cpu_plan(**SHAPE, threads=2, backward=True)
    states = 32 * 64 * 128 * 4  # of one (sequence, head)
    assert backward["workspace_bytes"] - forward["workspace_bytes"] == 2 * states
    few = {**SHAPE, "B": 1}
    materialised = [cpu_plan(**few, threads=16, backward=b)["state_bytes"] for b in (False, True)]
    assert materialised[1] == 2 * materialised[0]


@pytest.mark.parametrize("mode", ["sweep", "materialised"])
def test_environment_forces_a_mode(mode, monkeypatch):
    monkeypatch.setenv("GLA_EXT_CPU_MODE", mode)
    assert all(cpu_plan(**SHAPE, threads=n)["mode"] == mode for n in (1, 2, 64))


def test_environment_with_an_unknown_mode(monkeypatch):
    monkeypatch.setenv("GLA_EXT_CPU_MODE", "fast")
    with pytest.raises(
        Exception, match="GLA_EXT_CPU_MODE: expected sweep or materialised, got fast"
    ):
        cpu_plan(**SHAPE)


def test_memory_is_linear_in_T():
    sizes = [
        cpu_plan(**{**SHAPE, "T": T}, threads=2, backward=True)["workspace_bytes"]
        for T in (4096, 8192, 16384)
    ]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


def test_unknown_device():
    with pytest.raises(ValueError, match="plan: expected device 'cpu' or 'cuda', got 'mps'"):
        cpu_plan(**SHAPE, device="mps")


def test_zero_sizes():
    plan = cpu_plan(B=0, T=0, H=4, K=8, V=8, threads=2)
    assert plan["tasks"] == 0 and plan["threads"] == 1
