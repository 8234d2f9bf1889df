"""`benchmarks/bench_state_dtypes.py` with few tokens, and where states in 16 bits stop."""

import bench_state_dtypes
import pytest
import torch

from gla_ext import chunk_gla_, recurrent_gla_step_

CASES = {case.name: case for case in bench_state_dtypes.CASES}


@pytest.mark.parametrize("name", CASES)
def test_drift(name):
    """Errors are of the order that the page on numerics has after 100 and 1,000 tokens."""
    found = bench_state_dtypes.drift(CASES[name], 300, "cpu")
    assert [len(errors) for errors in found.values()] == [2, 2, 2]
    for fp32, bf16, fp16 in zip(*(found[dtype] for dtype in ("fp32", "bf16", "fp16")), strict=True):
        assert 0 < fp32 < 2e-5
        assert 3e-4 < fp16 < 6e-3
        assert 2e-3 < bf16 < 5e-2
        assert 3 < bf16 / fp16 < 16  # three bits fewer


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_where_a_state_stops(device, dtype, most):
    """With gates of 0 an element takes 1 from each token up to a number, and never again; tokens
    of one call are rounded once.
    """
    one = torch.ones(1, 1, 1, 1, device=device)
    pool = torch.full_like(one, most - 3).to(dtype)
    values = []
    for _ in range(6):
        recurrent_gla_step_(one, one, one, state=pool)
        values.append(pool.item())
    assert values == [most - 2, most - 1, most, most, most, most]
    tokens = one.expand(1, 64, 1, 1)
    chunk_gla_(tokens, tokens, tokens, None, state=pool)
    assert pool.item() == most + 64


def test_a_step_on_short_states_is_one_on_wide_ones_rounded(device):
    for dtype in (torch.bfloat16, torch.float16):
        for v_first in (False, True):
            inputs = bench_state_dtypes.step_inputs(dtype, v_first, (2, 1, 32, 64), device)
            bench_state_dtypes.check_step(inputs)
