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
