"""Calls whose plans for a GPU are tested, with or without one."""

import pytest

from gla_ext import _C

SHAPE = {"B": 4, "T": 2048, "H": 4, "K": 64, "V": 128}
BATCH = {"B": 32, "T": 2048, "H": 4, "K": 128, "V": 256}  # enough to fill a GPU


def cuda_plan(**change):
    return _C.plan(**SHAPE | {"device": "cuda", "dtype": "bfloat16"} | change)


def steps_plan(**change):
    return cuda_plan(capability="8.0", **change)


def full_plan(**change):
    return cuda_plan(**BATCH | change)


by_pass = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def operand_bytes(chunk_heads: int, K: int) -> int:
    """q^, k^ and four factors of each key channel, in groups of 128, and A and a flag."""
    return chunk_heads * (-(-K // 128) * 128 * (2 * 64 * 2 + 4 * 4) + 64 * 64 * 2 + 128)


def state_bytes(K: int, V: int) -> int:
    """S~ or dS~ of a chunk and head between the kernels of backward, in tiles of 64 x 64."""
    return -(-K // 64) * -(-V // 64) * 64 * 64 * 2
