"""The short convolution on a pool of caches, against the module that takes and returns them.

Equal bits (see common.py): own sums.
"""

import pytest
import torch
from common import DTYPES
from conv_inputs import LAYOUTS, make, module
from conv_pool import Pool, raises
from views import assert_nothing_beside, pool_like

from gla_ext import short_convolution_

APART = (0, 1, -1, 3, 4, 9)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


CASES = [{"T": T, "W": W} for T in (0, 1, 3, 30) for W in (1, 2, 3, 4, 6)]
CASES += [{"packed": True, "W": W} for W in (1, 4, 6)]
CASES += [{"T": 2, "D": D, "bias": bias} for D in (1, 5, 72, 264) for bias in (False, True)]
CASES += [
    {"layout": layout, "packed": packed} for layout in LAYOUTS[1:] for packed in (False, True)
]


@by_dtype
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("options", CASES, ids=str)
def test_rows(device, options, dtype):
    Pool(device, dtype, **options).check()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_rows_that_start(device, index, packed):
    pool = Pool(device, T=2, packed=packed)
    pool.slots, pool.write_slots = pool.slots.to(index), pool.write_slots.to(index)
    has = torch.tensor([True, True, True, False, False, False], device=device)
    y, after = pool.expected(starts=(3, 4, 5))
    assert torch.equal(pool.run(has_initial_state=has), y)
    assert torch.equal(pool.pool, after)


@pytest.mark.parametrize("packed", [False, True])
def test_back_to_the_same_slots(device, packed):
    pool = Pool(device, T=3, packed=packed)
    pool.slots = torch.tensor(APART, device=device)
    y, after = pool.expected(APART, APART)
    assert torch.equal(pool.run(write_slots=None), y)
    assert torch.equal(pool.pool, after)


def test_a_layer_of_a_wider_pool(device):
    pool = Pool(device, torch.bfloat16)
    pool.pool, whole = pool_like(pool.before, "a layer of many")
    pool.check()
    assert_nothing_beside(pool.pool, whole)


def test_without_slots(device):
    pool = Pool(device, T=2)
    own, before = pool.pool[:6], pool.pool[:6].clone()
    y = short_convolution_(pool.x, pool.weight, pool.bias, state=own)
    expected, after = module(pool.weight, pool.bias)(pool.x, before, True)
    assert torch.equal(y, expected.detach()) and torch.equal(own, after.detach())


def test_steps_are_the_sequence(device):
    """Nine tokens one by one, and in pieces, have the bits of all at once."""
    x, weight, bias, cache, *_ = make(3, 9, 40, 4, device, torch.bfloat16)
    whole, after = module(weight, bias)(x, cache, True)
    for size in (1, 2, 9):
        pool = cache.clone()
        pieces = [short_convolution_(t, weight, bias, state=pool) for t in x.split(size, 1)]
        assert torch.equal(torch.cat(pieces, 1), whole.detach())
        assert torch.equal(pool, after.detach())


@pytest.mark.cuda
@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
@pytest.mark.parametrize("packed", [False, True])
def test_graph_replays_with_other_slots(packed, given):
    """With an output it writes where the caller reads."""
    pool = Pool("cuda", torch.bfloat16, packed=packed)
    out = torch.empty_like(pool.x) if given else None
    pool.run(out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = pool.run(out=out)
    for slots in ([1, 2, 3, 4, 5, 6], [6, -1, 3, 2, 1, 0]):
        pool.slots.copy_(torch.tensor(slots))
        pool.write_slots.copy_(torch.tensor(slots))
        pool.pool.copy_(pool.before)
        graph.replay()
        after = pool.pool.clone()
        pool.pool.copy_(pool.before)
        assert torch.equal(y, pool.run()) and torch.equal(pool.pool, after)


@pytest.mark.cuda
@pytest.mark.sanitizer
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("D", [8, 13])
def test_for_the_sanitizer(D, packed):
    assert Pool("cuda", torch.bfloat16, D=D, packed=packed).run().isfinite().all()


# What it refuses.


def test_wrong_inputs():
    pool = Pool("cpu")
    expected = "expected state to "
    with raises(ValueError, expected + "have shape [P, D, W] = [7, 24, 4], got [7, 24, 3]"):
        pool.run(state=pool.pool[..., :3])
    with raises(ValueError, expected + "have shape [P, D, W] = [6, 24, 4], got [7, 24, 4]"):
        pool.run(slots=None)
    with raises(TypeError, expected + "be torch.float32 like x, got torch.bfloat16"):
        pool.run(state=pool.pool.bfloat16())
    with raises(TypeError, expected + "be a tensor, got None"):
        pool.run(state=None)
    for name in ("slots", "write_slots"):
        with raises(ValueError, f"expected {name} to have shape [B] = [6], got [2]"):
            pool.run(**{name: torch.tensor([1, 2])})
        with raises(TypeError, f"expected {name} to be torch.int32 or torch.int64, got"):
            pool.run(**{name: torch.ones(6)})
    with raises(TypeError, "expected has_initial_state to be torch.bool, got torch.int64"):
        pool.run(has_initial_state=torch.ones(6, dtype=torch.int64))
    with raises(ValueError, "expected has_initial_state to have shape [B] = [6], got [1]"):
        pool.run(has_initial_state=torch.ones(1, dtype=torch.bool))
    rows = "expected each row of state to be contiguous and apart from the others, got sizes"
    for state in (pool.pool.mT.contiguous().mT, pool.pool[:1].expand(7, 24, 4)):
        with raises(ValueError, rows):
            pool.run(state=state)
    packed = Pool("cpu", packed=True)
    with raises(ValueError, "expected slots to have shape [N] = [5], got [6]"):
        packed.run(cu_seqlens=packed.offsets[:-1])
    with raises(ValueError, "expected cu_seqlens to start with 0, got 57"):
        packed.run(cu_seqlens=packed.offsets.flip(0))
