"""`chunk_gla_` into an output that is given."""

import pytest
import torch
from pool_inputs import Prompts
from views import OUTPUTS, assert_nothing_beside, view_like

by_packing = pytest.mark.parametrize("packed", [False, True])


@by_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", OUTPUTS)
def test_out(device, layout, dtype, packed):
    """Has the bits of a fresh output, zeros where there is no sequence, and nothing beside it."""
    prompts, plain = (Prompts(device, packed, dtype=dtype, sizes=(2, 24, 40)) for _ in range(2))
    expected = plain.run()
    out, whole = view_like(expected, layout)
    assert prompts.run(out=out) is out
    assert torch.equal(out, expected) and torch.equal(prompts.pool, plain.pool)
    assert_nothing_beside(out, whole)


def test_out_with_gates_on_values(device):
    prompts, plain = (Prompts(device, True, gv=True) for _ in range(2))
    expected = plain.run()
    out = torch.full_like(expected, torch.nan)
    prompts.run(out=out)
    assert torch.equal(out, expected) and torch.equal(prompts.pool, plain.pool)


def test_out_without_rows(device):
    prompts = Prompts(device, True)
    out = torch.full_like(prompts.tokens["v"], torch.nan)
    prompts.run(state=prompts.pool[:0], out=out)
    assert not out.any()
