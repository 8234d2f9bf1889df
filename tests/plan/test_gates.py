"""Plans on CUDA of calls with gates on values, or without gates on keys."""

import pytest
from plans import TIERS, by_pass, cuda_plan, steps_plan


def gated_plan(**change):
    return cuda_plan(dtype=change.pop("dtype", "bfloat16"), value_gated=True, **change)


@pytest.mark.parametrize("dtype, each, cumsums", [("bfloat16", 2, 1), ("float32", 4, 2)])
def test_cuda_value_gates_take_workspace(dtype, each, cumsums):
    heads = 4 * 2048 * 4
    values, tiers = heads * 128, heads // 64 * TIERS
    added = [
        gated_plan(dtype=dtype, backward=b)["workspace_bytes"]
        - steps_plan(dtype=dtype, backward=b, processors=4)["workspace_bytes"]  # no segments
        for b in (False, True)
    ]
    assert added[0] == cumsums * values * 4 + values * each  # bv, v
    # do, tiers, dA apart from A, o inside chunks; dv and dgv where they are not fp32.
    gradients = 0 if dtype == "float32" else 2 * values * 4
    scores = heads * 64 * each
    assert added[1] == added[0] + values * each + tiers + scores + values * 4 + gradients


@by_pass
def test_cuda_fp16_becomes_fp32_beside_value_gates(backward):
    half, single = (
        gated_plan(dtype=dtype, gate_dtype="bfloat16", backward=backward)
        for dtype in ("float16", "float32")
    )
    assert half == single


@by_pass
def test_cuda_without_gates_on_keys(backward):
    gated, free = (steps_plan(backward=backward, key_gated=g) for g in (True, False))
    assert len(free["kernels"]) == len(gated["kernels"]) - 1
    sums = 4 * 2048 * 4 * 64 * 4 * (2 if backward else 1)  # b, and dg before it is rounded
    assert gated["workspace_bytes"] - free["workspace_bytes"] == sums - 256
