"""CUDA's plans, with or without a GPU and on any build: pure functions of the call and the GPU."""

import pytest
from plans import (
    TIERS,
    by_pass,
    cluster_items,
    cuda_plan,
    full_plan,
    prepared_bytes,
    reads_prepared,
    state_bytes,
    steps_plan,
    sweeps_gradients,
)


@by_pass
@pytest.mark.parametrize("change", [{"B": 1}, {"B": 4096}, {"T": 1}, {"T": 1 << 20}, {"H": 1}])
def test_cuda_steps_depend_on_neither_batch_nor_tokens_in_the_mode(change, backward):
    names = ("path", "kernels", "segments", "segment_chunks")
    chosen = [
        {name: plan[name] for name in names}
        for plan in (
            steps_plan(backward=backward, batch_invariant=True, **shape) for shape in ({}, change)
        )
    ]
    assert chosen[0] == chosen[1]
    assert chosen[0]["path"] == "steps"
    assert (chosen[0]["segments"], chosen[0]["segment_chunks"]) == (0, 0)


@pytest.mark.parametrize(
    "dtype, each, cumsums", [("bfloat16", 2, 1), ("float16", 4, 1), ("float32", 4, 2)]
)
def test_cuda_steps_workspace(dtype, each, cumsums):
    heads = 4 * 2048 * 4
    keys, scores, tiers = heads * 64 * 4, heads * 64 * each, heads // 64 * TIERS
    states = heads // 64 * 64 * 128 * each
    whole = {"dtype": dtype, "processors": 4}  # too few for segments
    forward = steps_plan(**whole)
    assert forward["state_bytes"] == states
    assert forward["workspace_bytes"] == cumsums * keys + scores + states + tiers
    one, packed = steps_plan(**whole, B=1), steps_plan(**whole, B=1, N=8)
    assert packed["state_bytes"] == (32 + 8) * 4 * 64 * 128 * each
    assert packed["workspace_bytes"] > one["workspace_bytes"]
    backward = steps_plan(**whole, backward=True)
    assert backward["state_bytes"] == 2 * states
    # dS, and three gradients where their outputs are not fp32; dA takes the place of A.
    gradients = 0 if dtype == "float32" else 3 * keys
    assert backward["workspace_bytes"] == forward["workspace_bytes"] + states + gradients


def test_cuda_fp32_gates_need_no_workspace_for_their_gradient():
    sizes = [
        steps_plan(backward=True, gate_dtype=dtype)["workspace_bytes"]
        for dtype in ("bfloat16", "float16", "float32")
    ]
    assert sizes[0] == sizes[1] == sizes[2] + 4 * 2048 * 4 * 64 * 4


def test_cuda_fused_forward_has_no_states_in_memory():
    plan = full_plan()
    assert (plan["state_bytes"], len(plan["kernels"])) == (0, 2)
    assert plan["workspace_bytes"] == 32 * 32 * 4 * TIERS
    packed = full_plan(B=1, T=32 * 2048, N=32, batch_invariant=True)
    assert len(packed["kernels"]) == len(plan["kernels"]) + 2
    assert packed["workspace_bytes"] > plan["workspace_bytes"]


@pytest.mark.parametrize("K, V", [(72, 256), (128, 256), (136, 200), (192, 512), (256, 8)])
def test_cuda_states_over_operands_lie_in_tiles(K, V):
    plan = full_plan(K=K, V=V, backward=True)
    states = 1 if sweeps_gradients(plan) else 2
    chunks = 16 if "gradients.chunk_pair" in plan["kernels"] else 32
    assert reads_prepared(plan)
    assert plan["state_bytes"] == states * 32 * chunks * 4 * state_bytes(K, V)


@pytest.mark.parametrize("K", [128, 256])
def test_cuda_fused_forward_over_operands_in_memory(K):
    plan = full_plan(K=K, gate_dtype="float32")
    assert (plan["kernels"], plan["state_bytes"]) == (["prepare", "forward.prepared"], 0)
    assert plan["workspace_bytes"] == 32 * 32 * 4 * TIERS + prepared_bytes(32 * 32 * 4, K)


@pytest.mark.parametrize(
    "change, pieces",
    [
        ({}, 2),  # 128 heads of 256 values, 66 clusters at once
        ({"B": 16}, 1),
        ({"B": 17}, 2),  # none waits for a place alone
        ({"B": 60}, 4),
        ({"B": 100, "H": 3}, 1),  # 300: five rounds one by one, six of two
        ({"V": 512}, 4),
        ({"V": 136}, 2),
        ({"V": 384}, 0),  # three blocks of 128
        ({"V": 128}, 0),
        ({"K": 72}, 2),
        ({"K": 64}, 0),
        ({"K": 136}, 0),  # by operands in memory
        ({"gate_dtype": "float32"}, 0),
        ({"B": 1, "T": 65536, "N": 40, "batch_invariant": True}, 1),  # packed: of any length
        ({"B": 1, "T": 65536, "N": 400, "batch_invariant": True}, 4),  # most of them short
        ({"B": 0}, 4),
        ({"backward": True}, 2),
        ({"backward": True, "B": 16}, 1),
        ({"backward": True, "B": 60}, 4),
        ({"backward": True, "B": 17}, 0),  # operands and states one after the other
        ({"capability": "8.0"}, 0),
        ({"processors": 1}, 4),
    ],
    ids=str,
)
def test_cuda_pairs_of_blocks(change, pieces):
    assert cluster_items(full_plan(**change)) == pieces


@by_pass
@pytest.mark.parametrize(
    "change, linear",
    [
        ({}, None),
        ({"K": 136}, True),
        ({"gate_dtype": "float32"}, True),
        ({"B": 1}, True),
        ({"B": 1, "batch_invariant": True}, None),
        ({"B": 1, "K": 64}, False),
        ({"K": 64, "gate_dtype": "float32"}, False),
        ({"capability": "8.0"}, False),
    ],
    ids=str,
)
def test_cuda_operands_are_made_once_where_several_kernels_read_them(change, linear, backward):
    """Backward's gradients read them too: None is backward alone."""
    assert reads_prepared(full_plan(**change, backward=backward)) == (
        backward if linear is None else linear
    )


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("gate_dtype, gates", [("bfloat16", 1), ("float32", 0)])
def test_cuda_fused_backward_workspace(gate_dtype, gates, swept):
    """Gradients in a sweep need no dS. The kernel that makes operands, A among them, also does what
    chunks outside tier 1 need."""
    plan = full_plan(backward=True, gate_dtype=gate_dtype, batch_invariant=not swept)
    heads = 32 * 2048 * 4
    keys, tiers = heads * 128 * 4, heads // 64 * TIERS
    states = heads // 64 * 128 * 256 * 2
    assert plan["state_bytes"] > 0
    assert plan["state_bytes"] == states * (1 if swept else 2)
    # dq, dk, dg of chunks outside tier 1.
    intra, operands = (2 + gates) * keys, prepared_bytes(heads // 64, 128)
    assert plan["workspace_bytes"] == tiers + plan["state_bytes"] + intra + operands
    assert len(plan["kernels"]) == 3


def test_cuda_fused_backward_without_operands():
    """Chunks outside tier 1 have a kernel of their own, and A between it and the gradients."""
    plan = full_plan(K=64, backward=True)
    heads = 32 * 2048 * 4
    keys, scores, tiers = heads * 64 * 4, heads * 64 * 2, heads // 64 * TIERS
    assert (plan["path"], reads_prepared(plan), len(plan["kernels"])) == ("fused", False, 3)
    assert plan["workspace_bytes"] == tiers + plan["state_bytes"] + scores + 3 * keys


@pytest.mark.parametrize("swept", [False, True])
def test_cuda_fused_backward_of_narrow_heads(swept):
    """S, and unless gradients are swept dS, as rows; A and dq, dk, dg of chunks outside tier 1."""
    plan = full_plan(B=66, K=64, V=56, backward=True, batch_invariant=not swept)
    heads = 66 * 2048 * 4
    states, keys = heads // 64 * 64 * 56 * 2, heads * 64 * 4
    assert (sweeps_gradients(plan), len(plan["kernels"])) == (swept, 3)
    assert plan["state_bytes"] == states * (1 if swept else 2)
    tiers, scores = heads // 64 * TIERS, heads * 64 * 2
    assert plan["workspace_bytes"] == tiers + plan["state_bytes"] + scores + 3 * keys


@pytest.mark.parametrize(
    "change, pieces",
    [
        ({"B": 66}, 1),  # 264 blocks at once
        ({"B": 67}, 2),
        ({"B": 128}, 2),
        ({"B": 500}, 4),
        ({"B": 1, "T": 65536}, 1),  # in segments
        ({"B": 1, "T": 65536, "N": 100}, 1),  # packed: of any length
        ({"B": 1, "T": 65536, "N": 400}, 1),  # most of them short, but few for each block
        ({"B": 1, "T": 65536, "N": 2000}, 4),
        ({"B": 128, "V": 72}, 1),
    ],
    ids=str,
)
def test_cuda_blocks_of_narrow_heads(change, pieces):
    assert full_plan(**{"K": 64, "V": 64} | change)["items_each"] == pieces


@by_pass
@pytest.mark.parametrize("shape", [(1, 1), (1, 131072), (4096, 64), (32, 2048)], ids=str)
@pytest.mark.parametrize("processors", [1, 78, 132, 1000])
def test_cuda_batch_invariant_plans(processors, shape, backward):
    """They depend on neither B, T nor the GPU."""
    B, T = shape
    plans = [
        full_plan(backward=backward, batch_invariant=True, **change)
        for change in ({}, {"B": B, "T": T, "processors": processors})
    ]
    names = ("path", "kernels", "segments", "segment_chunks")
    assert [plans[0][name] for name in names] == [plans[1][name] for name in names]
    assert plans[0]["path"] == "fused"
    assert (plans[0]["segments"], plans[0]["segment_chunks"]) == (0, 0)


@pytest.mark.parametrize("change", [{"B": 0}, {"T": 0}, {"H": 0}, {"B": 1, "T": 0, "N": 0}])
def test_cuda_zero_sizes(change):
    for capability in ("8.0", "9.0"):
        plan = cuda_plan(**change, backward=True, capability=capability)
        assert (plan["state_bytes"], plan["segments"]) == (0, 0)


def test_cuda_plan_does_not_ask_the_environment(monkeypatch):
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    assert cuda_plan()["path"] == "fused"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": "float64"}, "expected dtype bfloat16, float16 or float32 on cuda, got float64"),
        ({"K": 1025}, "expected K and V to be at most 1024 on cuda, got K = 1025 and V = 128"),
        ({"T": -1}, "expected B, T, H, N >= 0 and K, V, threads >= 1"),
        ({"processors": 0}, "expected B, T, H, N >= 0 and K, V, threads >= 1"),
    ],
)
def test_cuda_bad_arguments(change, message):
    with pytest.raises(ValueError, match=f"plan: {message}"):
        cuda_plan(**change)
