"""The short convolution on a pool of caches, against the module that takes and returns them.

Equal bits (see common.py): own sums.
"""

import itertools
import re

import pytest
import torch
from common import CUDA_DTYPES, DTYPES
from conv_inputs import LAYOUTS, make, module
from conv_pool import OFFSETS, Pool

from gla_ext import chunk_gla, chunk_gla_, short_convolution_

OP = torch.ops.gla_ext.short_convolution_.default
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@by_dtype
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("W", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("T", [0, 1, 3, 30])
def test_rows(device, T, W, dtype):
    Pool(device, dtype, T, W=W).check()


@by_dtype
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("W", [1, 4, 6])
def test_packed(device, W, dtype):
    Pool(device, dtype, W=W, packed=True).check()


@pytest.mark.parametrize("D", [1, 5, 72, 264])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
def test_channels(device, dtype, bias, D):
    Pool(device, dtype, 2, D, bias=bias).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_layouts(device, packed, layout):
    Pool(device, torch.bfloat16, packed=packed, layout=layout).check()


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
    pool.slots = torch.tensor([0, 1, -1, 3, 4, 9], device=device)
    y, after = torch.zeros_like(pool.x), pool.before.clone()
    with torch.no_grad():
        for n in (0, 1, 3, 4):
            row, here = (n, slice(None)) if not packed else (0, slice(*OFFSETS[n : n + 2]))
            own = pool.x[row : row + 1, here]
            cache = pool.before[n : n + 1]
            y[row, here], after[n] = (
                t[0] for t in module(pool.weight, pool.bias)(own, cache, True)
            )
    assert torch.equal(pool.run(write_slots=None), y)
    assert torch.equal(pool.pool, after)


def test_a_layer_of_a_wider_pool(device):
    pool = Pool(device, torch.bfloat16)
    whole = pool.before.new_full((7, 3, *pool.before.shape[1:]), torch.nan)
    pool.pool = whole[:, 1]
    pool.pool.copy_(pool.before)
    pool.check()
    assert whole[:, ::2].isnan().all()


def test_a_layer_keeps_both_memories_under_one_slot(device):
    """Prompts and tokens, packed, whose inputs and states are in rows of two pools by the same
    slots: each is what it is alone, without any pool.
    """
    H, K, V, P = 2, 8, 12, 7
    lengths, new = (70, 1, 0, 130, 1), (True, False, False, True, True)
    slots, write_slots = (4, 0, 2, -1, 6), (4, 3, 2, 1, 6)
    inputs = make(1, sum(lengths), H * (2 * K + V), 4, device, torch.float32, N=P)
    x, weight, bias, cache, *_ = inputs
    states = torch.randn(P, H, K, V, generator=torch.Generator().manual_seed(1)).to(device)
    caches, pool = cache.contiguous().clone(), states.clone()
    rows = {
        "slots": torch.tensor(slots, device=device),
        "write_slots": torch.tensor(write_slots, device=device),
        "has_initial_state": ~torch.tensor(new, device=device),
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lengths)], device=device),
    }

    def heads(y):
        parts = y.unflatten(-1, (H, -1)).split([K, K, V], -1)
        return (*parts, torch.nn.functional.logsigmoid(parts[1]) / 16)

    y = short_convolution_(x, weight, bias, state=caches, **rows)
    o = chunk_gla_(*heads(y), state=pool, **rows)
    convolution, expected, expected_caches = module(weight, bias), states.clone(), cache.clone()
    for n, tokens in enumerate(x.split(lengths, 1)):
        slot, here = slots[n], slice(*rows["cu_seqlens"][n : n + 2].tolist())
        if slot < 0:
            assert not o[:, here].any()
            continue
        before = cache[slot][None] * (not new[n]), states[slot][None] * (not new[n])
        with torch.no_grad():
            own, expected_caches[write_slots[n]] = (
                t.squeeze(0) for t in convolution(tokens, before[0], True)
            )
        attended, state = chunk_gla(
            *heads(own[None]), initial_state=before[1], output_final_state=True
        )
        expected[write_slots[n]] = state[0]
        torch.testing.assert_close(o[:, here], attended, atol=1e-5, rtol=1e-4)
    assert torch.equal(caches, expected_caches)
    torch.testing.assert_close(pool, expected, atol=1e-5, rtol=1e-4)


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
def test_opcheck_and_compile(device, packed):
    pool = Pool(device, packed=packed)
    has = torch.tensor([True, False, True, True, True, False], device=device)
    arguments = (pool.slots, pool.write_slots, has, pool.offsets)
    torch.library.opcheck(OP, (pool.x, pool.weight, pool.bias, pool.pool, *arguments))
    pool.pool.copy_(pool.before)
    y, after = pool.expected()
    address = pool.pool.data_ptr()
    compiled = torch.compile(lambda: pool.run() * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), y * 2)
    assert torch.equal(pool.pool, after) and pool.pool.data_ptr() == address


def test_compiled_code_copies_no_pool(device):
    """Inductor's code writes a layer of a pool by one operator, without a clone of it."""
    from torch._inductor.utils import run_and_get_code

    pool = Pool(device)
    y, after = pool.expected()
    whole = torch.stack([pool.before] * 3, 1)

    def call(whole):
        return pool.run(state=whole[:, 1])

    found, (code,) = run_and_get_code(torch.compile(call, fullgraph=True), whole)
    assert code.count("short_convolution_.default(") == 1
    assert "empty_strided" not in code.split("def call(")[1]
    assert torch.equal(found, y) and torch.equal(whole[:, 1], after)
    assert torch.equal(whole[:, ::2], torch.stack([pool.before] * 2, 1))


@pytest.mark.cuda
@pytest.mark.parametrize("packed", [False, True])
def test_graph_replays_with_other_slots(packed):
    pool = Pool("cuda", torch.bfloat16, packed=packed)
    pool.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = pool.run()
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


def raises(error, message):
    return pytest.raises(error, match="^" + re.escape(f"short_convolution_: {message}"))


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
