"""The short convolution on a pool of caches, against the module that takes and returns them.

Equal bits (see common.py): own sums.
"""

import pytest
import torch
from common import DTYPES
from conv_inputs import LAYOUTS, make, module
from conv_pool import Pool, raises
from cuda_tools import peak_bytes
from views import view_like

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


@pytest.mark.cuda
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_write_into_it(packed):
    """An `out` with the strides of a fresh output saves memory of y's size: nothing is copied."""
    pool = Pool("cuda", torch.bfloat16, packed=packed)
    out = torch.empty_like(pool.x)
    pool.run(out=out)
    y_bytes = out.numel() * out.element_size()
    assert peak_bytes(pool.run) - peak_bytes(lambda: pool.run(out=out)) >= y_bytes


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


def test_out_in_one_buffer_with_x():
    """Halves of a buffer share nothing, though they are not dense; what meets is refused."""
    rows = torch.zeros(6, 4, 64)
    apart = [(rows[:, :2, :24], rows[:, :2, first : first + 24]) for first in (24, 40)]
    apart += [(rows[:, ::2, 8:32], rows[:, 1::2, 8:32]), (rows[:, 2:, 24:48], rows[:, :2, 30:54])]
    for x, out in apart:
        pool = Pool("cpu", T=2)
        expected = pool.run()
        pool.pool.copy_(pool.before)
        x.copy_(pool.x)
        pool.x = x
        assert torch.equal(pool.run(out=out), expected)
    meet = [(rows[:, :2, :24], rows[:, :2, first : first + 24]) for first in (1, 23)]
    meet += [(rows[:, :2, 40:], rows[:, 1:3, 40:]), (rows[:, :2, 8:32], rows[:, 1:3, 30:54])]
    for one, other in [*meet, *((b, a) for a, b in meet)]:
        pool = Pool("cpu", T=2)
        pool.x = one
        with raises(ValueError, "expected out to share no memory with x"):
            pool.run(out=other)
    layers = torch.zeros(7, 2, 24, 4)  # the usual pool: a layer's slice of it
    of_layer = [layers[:6, layer].flatten(1)[:, :48].unflatten(1, (2, 24)) for layer in (0, 1)]
    Pool("cpu", T=2).run(state=layers[:, 0], out=of_layer[1])
    with raises(ValueError, "expected out to share no memory with state"):
        Pool("cpu", T=2).run(state=layers[:, 0], out=of_layer[0])


def test_no_view_that_meets_x_is_taken():
    memory, accepted = torch.zeros(8000), 0
    generator = torch.Generator().manual_seed(0)

    def view():
        start, rows, tokens, more = torch.randint(6, (4,), generator=generator).tolist()
        token = 24 * (1 + tokens) + more % 2
        return memory.as_strided((6, 2, 24), (token * (1 + rows), token, 1), 29 * start)

    for _ in range(400):
        x, out = view(), view()
        places = [
            torch.arange(8000).as_strided(v.shape, v.stride(), v.storage_offset()) for v in (x, out)
        ]
        if len(places[1].unique()) < out.numel():
            continue
        pool = Pool("cpu", T=2)
        pool.x = x
        try:
            pool.run(out=out)
        except ValueError as error:
            assert "expected out to share no memory with x" in str(error)
            continue
        accepted += 1
        assert not torch.isin(*places).any()
    assert accepted > 10


def test_compiled_wants_a_contiguous_output():
    """Dynamo says so of every operator. When it no longer does, the docstrings must change too."""
    pool = Pool("cpu", T=2)
    out, _ = view_like(pool.x, "wider rows")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="non-contiguous `out=` tensor"):
        torch.compile(pool.run, fullgraph=True, backend="eager")(out=out)
