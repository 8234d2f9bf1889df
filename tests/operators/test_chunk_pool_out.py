"""`chunk_gla_` into an output that is given."""

import pytest
import torch
from pool_inputs import Prompts

by_packing = pytest.mark.parametrize("packed", [False, True])

LAYOUTS = ("contiguous", "tokens of more", "wider rows", "heads first", "misaligned")


def make_out(o, layout):
    """NaN in o's shape, and the tensor that it is in."""
    B, T, H, V = o.shape
    if layout == "misaligned":
        whole = o.new_full((o.numel() + 1,), torch.nan)
        return whole[1:].view(o.shape), whole
    if layout == "heads first":
        whole = o.new_full((B, H, T, V), torch.nan)
        return whole.transpose(1, 2), whole
    if layout == "contiguous":
        whole = torch.full_like(o, torch.nan)
        return whole, whole
    more = 3 if layout == "wider rows" else 0
    whole = o.new_full((B, T + 3, H, V + more), torch.nan)
    return whole[:, 1:-2, :, :V], whole


@by_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out(device, layout, dtype, packed):
    """Has the bits of a fresh output, zeros where there is no sequence, and nothing beside it."""
    prompts, plain = (Prompts(device, packed, dtype=dtype, sizes=(2, 24, 40)) for _ in range(2))
    expected = plain.run()
    out, whole = make_out(expected, layout)
    assert prompts.run(out=out) is out
    assert torch.equal(out, expected) and torch.equal(prompts.pool, plain.pool)
    assert whole.isnan().sum() == whole.numel() - out.numel()


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
