"""The CPU's plans: pure functions of the call and the threads."""

import pytest
from plans import cpu_plan

SHAPE = {"B": 4, "T": 2048, "H": 4, "K": 64, "V": 128}


STATE = 64 * 128  # numbers
PLANS = {  # change of the call: mode, tasks, threads, bytes of states
    "enough sequences": ({"threads": 2}, ("sweep", 16, 2, 0)),
    "too few": ({"B": 1, "threads": 16}, ("materialised", 4 * 32, 16, 4 * 32 * STATE * 4)),
    "enough packed ones": ({"B": 1, "N": 8, "threads": 16}, ("sweep", 32, 16, 0)),
    "packed ones share the tokens": (
        {"B": 1, "T": 65536, "N": 32, "threads": 512},
        ("materialised", 4 * (65536 // 64 + 32), 512, 4 * (65536 // 64 + 32) * STATE * 4),
    ),
    **{
        f"states in {dtype}": (
            {"B": 1, "threads": 16, "dtype": dtype},
            ("materialised", 4 * 32, 16, 4 * 32 * STATE * each),
        )
        for dtype, each in (("bfloat16", 2), ("float16", 4), ("float64", 8))
    },
    "nothing": ({"B": 0, "T": 0, "threads": 2}, ("sweep", 0, 1, 0)),
}


@pytest.mark.parametrize("change, expected", PLANS.values(), ids=PLANS)
def test_plans(change, expected):
    plan = cpu_plan(**SHAPE | change)
    assert plan["path"] == "cpu"
    assert tuple(plan[n] for n in ("mode", "tasks", "threads", "state_bytes")) == expected
    gated = cpu_plan(**SHAPE | change, value_gated=True)
    assert not expected[1] or gated["workspace_bytes"] > plan["workspace_bytes"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"T": -1}, "expected B, T, H, N >= 0 and K, V, threads >= 1"),
        ({"K": 0}, "expected B, T, H, N >= 0 and K, V, threads >= 1"),
        ({"N": 3}, "expected B = 1 with N packed sequences, got 4"),
        ({"device": "mps"}, "expected device 'cpu' or 'cuda', got 'mps'"),
        ({"dtype": "int8"}, "expected dtype bfloat16, float16, float32 or float64, got int8"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=f"plan: {message}"):
        cpu_plan(**{**SHAPE, **change})


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
