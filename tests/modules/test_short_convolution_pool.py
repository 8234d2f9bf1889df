"""The short convolution on a pool of caches, against the module that takes and returns them.

Equal bits (see common.py): own sums.
"""

import pytest
import torch
from common import DTYPES
from conv_inputs import LAYOUTS, make, module
from conv_pool import Pool, raises

from gla_ext import short_convolution_

OP = torch.ops.gla_ext.short_convolution_
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
    whole = pool.before.new_full((7, 3, *pool.before.shape[1:]), torch.nan)
    pool.pool = whole[:, 1]
    pool.pool.copy_(pool.before)
    pool.check()
    assert whole[:, ::2].isnan().all()


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


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(device, packed):
    pool = Pool(device, packed=packed)
    has = torch.tensor([True, False, True, True, True, False], device=device)
    arguments = (pool.slots, pool.write_slots, has, pool.offsets)
    call = (pool.x, pool.weight, pool.bias, pool.pool, *arguments)
    torch.library.opcheck(OP.default, call)
    torch.library.opcheck(OP.out, call, {"out": torch.empty_like(pool.x)})


@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
def test_compiled_code_copies_no_pool(device, given):
    """Inductor's code writes a layer of a pool, and an output, by one operator where they lie."""
    from torch._inductor.utils import run_and_get_code

    pool = Pool(device)
    y, after = pool.expected()
    whole, outs = torch.stack([pool.before] * 3, 1), y.new_full((8, 1, 24), torch.nan)

    def call(x, whole, outs):
        pool.x = x
        found = pool.run(state=whole[:, 1], out=outs[1:7] if given else None)
        return None if given else found

    arguments = pool.x, whole, outs
    found, (code,) = run_and_get_code(torch.compile(call, fullgraph=True), *arguments)
    assert code.count("short_convolution_." + ("out(" if given else "default(")) == 1
    assert "empty_strided" not in code.split("def call(")[1]
    assert torch.equal(outs[1:7] if given else found, y) and torch.equal(whole[:, 1], after)
    assert torch.equal(whole[:, ::2], torch.stack([pool.before] * 2, 1))
    assert outs[::7].isnan().all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
def test_compiled_with_other_operations(device, given, packed):
    pool = Pool(device, packed=packed)
    y, after = pool.expected()
    out, address = torch.full_like(y, torch.nan), pool.pool.data_ptr()

    def call(out):
        return pool.run(out=out if given else None) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(out), y * 2) and torch.equal(out, y) == given
    assert torch.equal(pool.pool, after) and pool.pool.data_ptr() == address


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


def test_no_gradient_is_lost():
    pool = Pool("cpu")
    pool.x.requires_grad_()
    with raises(NotImplementedError, "decoding on a pool has no gradient, call a"):
        pool.run()
    with torch.no_grad():
        version = pool.pool._version
        pool.run()
        assert pool.pool._version == version + 1


def test_vmap_over_a_write():
    pool = Pool("cpu")
    with raises(NotImplementedError, "torch.vmap is not supported, use more rows and slots"):
        torch.vmap(lambda state: pool.run(state=state))(pool.pool[None])
