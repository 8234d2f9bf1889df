"""The plans: pure functions of the shape and, on CPU, the threads."""

import pytest

from gla_ext import _C

SHAPE = {"B": 4, "T": 2048, "H": 4, "K": 64, "V": 128}


def test_enough_sequences_sweep():
    plan = _C.plan(**SHAPE, threads=2)
    assert (plan["path"], plan["mode"]) == ("cpu", "sweep")
    assert (plan["tasks"], plan["threads"], plan["state_bytes"]) == (16, 2, 0)


def test_too_few_sequences_materialise():
    plan = _C.plan(**{**SHAPE, "B": 1}, threads=16)
    assert (plan["mode"], plan["tasks"], plan["threads"]) == ("materialised", 4 * 32, 16)
    assert plan["state_bytes"] == 4 * 32 * 64 * 128 * 4


def test_packed_sequences_share_the_tokens():
    plan = _C.plan(B=1, T=65536, H=4, K=64, V=64, N=32, threads=512)
    assert (plan["mode"], plan["tasks"]) == ("materialised", (65536 // 64 + 32) * 4)
    assert plan["state_bytes"] == plan["tasks"] * 64 * 64 * 4


@pytest.mark.parametrize("dtype, each", [("bfloat16", 2), ("float16", 4), ("float64", 8)])
def test_states_in_the_dtype_they_are_kept_in(dtype, each):
    plan = _C.plan(**{**SHAPE, "B": 1}, threads=16, dtype=dtype)
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
        _C.plan(**{**SHAPE, **change})


def test_packed_sequences_count():
    assert _C.plan(**{**SHAPE, "B": 1}, N=8, threads=16)["mode"] == "sweep"


def test_backward_states():
    forward = _C.plan(**SHAPE, threads=2)
    backward = _C.plan(**SHAPE, threads=2, backward=True)
    states = 32 * 64 * 128 * 4  # of one (sequence, head)
    assert backward["workspace_bytes"] - forward["workspace_bytes"] == 2 * states
    few = {**SHAPE, "B": 1}
    materialised = [_C.plan(**few, threads=16, backward=b)["state_bytes"] for b in (False, True)]
    assert materialised[1] == 2 * materialised[0]


@pytest.mark.parametrize("mode", ["sweep", "materialised"])
def test_environment_forces_a_mode(mode, monkeypatch):
    monkeypatch.setenv("GLA_EXT_CPU_MODE", mode)
    assert all(_C.plan(**SHAPE, threads=n)["mode"] == mode for n in (1, 2, 64))


def test_environment_with_an_unknown_mode(monkeypatch):
    monkeypatch.setenv("GLA_EXT_CPU_MODE", "fast")
    with pytest.raises(
        Exception, match="GLA_EXT_CPU_MODE: expected sweep or materialised, got fast"
    ):
        _C.plan(**SHAPE)


def test_memory_is_linear_in_T():
    sizes = [
        _C.plan(**{**SHAPE, "T": T}, threads=2, backward=True)["workspace_bytes"]
        for T in (4096, 8192, 16384)
    ]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


def test_unknown_device():
    with pytest.raises(ValueError, match="plan: expected device 'cpu' or 'cuda', got 'mps'"):
        _C.plan(**SHAPE, device="mps")


def test_zero_sizes():
    plan = _C.plan(B=0, T=0, H=4, K=8, V=8, threads=2)
    assert plan["tasks"] == 0 and plan["threads"] == 1


# CUDA, with or without a GPU and on any build


def cuda_plan(**change):
    return _C.plan(**SHAPE | {"device": "cuda", "dtype": "bfloat16"} | change)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("change", [{"B": 1}, {"B": 4096}, {"T": 1}, {"T": 1 << 20}, {"H": 1}])
def test_cuda_path_depends_on_neither_batch_nor_tokens(change, backward):
    chosen = [
        {name: plan[name] for name in ("path", "mode", "tiles", "launches")}
        for plan in (cuda_plan(backward=backward), cuda_plan(backward=backward, **change))
    ]
    assert chosen[0] == chosen[1]
    assert (chosen[0]["path"], chosen[0]["mode"]) == ("steps", "materialised")


@pytest.mark.parametrize(
    "dtype, each, cumsums", [("bfloat16", 2, 1), ("float16", 4, 1), ("float32", 4, 2)]
)
def test_cuda_workspace(dtype, each, cumsums):
    heads = 4 * 2048 * 4
    keys, scores, tiers = heads * 64 * 4, heads * 64 * each, heads // 64 * 8
    states = heads // 64 * 64 * 128 * each
    forward = cuda_plan(dtype=dtype)
    assert forward["state_bytes"] == states
    assert forward["workspace_bytes"] == cumsums * keys + scores + states + tiers
    backward = cuda_plan(dtype=dtype, backward=True)
    assert backward["state_bytes"] == 2 * states
    # dS, and three gradients where their outputs are not fp32; dA takes the place of A.
    gradients = 0 if dtype == "float32" else 3 * keys
    assert backward["workspace_bytes"] == forward["workspace_bytes"] + states + gradients


def test_cuda_fp32_gates_need_no_workspace_for_their_gradient():
    sizes = [
        cuda_plan(backward=True, gate_dtype=dtype)["workspace_bytes"]
        for dtype in ("bfloat16", "float16", "float32")
    ]
    assert sizes[0] == sizes[1] == sizes[2] + 4 * 2048 * 4 * 64 * 4


@pytest.mark.parametrize("backward", [False, True])
def test_cuda_saved_states_are_not_workspace(backward):
    plans = [cuda_plan(backward=backward, save_states=saved) for saved in (False, True)]
    states = 4 * 32 * 4 * 64 * 128 * 2
    assert plans[0]["workspace_bytes"] - plans[1]["workspace_bytes"] == states
    assert plans[0]["state_bytes"] == plans[1]["state_bytes"]
    assert plans[0]["launches"] == plans[1]["launches"]  # S comes with dS, side by side


def test_cuda_packed_sequences_need_a_map_of_the_chunks():
    one, packed = cuda_plan(B=1), cuda_plan(B=1, N=8)
    assert packed["launches"] > one["launches"]
    assert packed["state_bytes"] == (32 + 8) * 4 * 64 * 128 * 2
    assert packed["workspace_bytes"] > one["workspace_bytes"]


@pytest.mark.parametrize("change", [{"B": 0}, {"T": 0}, {"H": 0}, {"B": 1, "T": 0, "N": 0}])
def test_cuda_zero_sizes(change):
    assert cuda_plan(**change, backward=True)["state_bytes"] == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": "float64"}, "expected dtype bfloat16, float16 or float32 on cuda, got float64"),
        ({"K": 513}, "expected K and V to be at most 512 on cuda, got K = 513 and V = 128"),
        ({"T": -1}, "expected B, T, H, N >= 0 and K, V, threads >= 1"),
    ],
)
def test_cuda_bad_arguments(change, message):
    with pytest.raises(ValueError, match=f"plan: {message}"):
        cuda_plan(**change)
