"""Calls whose plans for a GPU are tested, with or without one."""

import pytest

from gla_ext import _C

SHAPE = {"B": 4, "T": 2048, "H": 4, "K": 64, "V": 128}
TIERS = 16  # bytes of a chunk and head
BATCH = {"B": 32, "T": 2048, "H": 4, "K": 128, "V": 256}  # enough to fill a GPU


def one_pass(plan: dict[str, object], backward: bool) -> dict[str, object]:
    """One pass of a plan, with what holds for both."""
    both = {name: value for name, value in plan.items() if name not in ("forward", "backward")}
    return plan["backward" if backward else "forward"] | both


def cpu_plan(*shape, backward=False, **change):
    return one_pass(_C.plan(*shape, **change), backward)


def cuda_plan(backward=False, **change):
    plan = _C.plan(**SHAPE | {"device": "cuda", "dtype": "bfloat16"} | change)
    return one_pass(plan, backward)


def steps_plan(**change):
    return cuda_plan(capability="8.0", **change)


def full_plan(**change):
    return cuda_plan(**BATCH | change)


def has_cluster_summaries(plan) -> bool:
    """One kernel makes prepared chunks and the segments' summaries."""
    return any(name.startswith("states.cluster.summaries") for name in plan["kernels"])


def reads_prepared(plan) -> bool:
    """Sweeps go over prepared chunks."""
    return any(".prepared" in name or name == "states.cluster" for name in plan["kernels"])


def sweeps_gradients(plan) -> bool:
    """One sweep makes all gradients."""
    return any(name in ("gradients.sweep", "gradients.small_sweep") for name in plan["kernels"])


def cluster_items(plan) -> int:
    """How many work items a cluster of two blocks takes; 0 without clusters that share gates."""
    one_each = "states.cluster.packed_summaries"  # a summary a cluster
    shares = any(".cluster" in name and name != one_each for name in plan["kernels"])
    return plan["items_each"] if shares else 0


by_pass = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def prepared_bytes(chunk_heads: int, K: int) -> int:
    """q^, k^ and four factors of each key channel, in groups of 128, and A and a flag."""
    return chunk_heads * (-(-K // 128) * 128 * (2 * 64 * 2 + 4 * 4) + 64 * 64 * 2 + 128)


def state_bytes(K: int, V: int) -> int:
    """S~ or dS~ of a chunk and head between the kernels of backward, in tiles of 64 x 64."""
    return -(-K // 64) * -(-V // 64) * 64 * 64 * 2
