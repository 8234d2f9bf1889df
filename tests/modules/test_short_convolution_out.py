"""`short_convolution_` into an output that is given.

Equal bits (see common.py): own sums.
"""

import pytest
import torch
from common import DTYPES
from conv_pool import Pool, raises
from cuda_tools import peak_bytes
from views import OUTPUTS, assert_nothing_beside, view_like

by_packing = pytest.mark.parametrize("packed", [False, True])


@by_packing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", OUTPUTS)
@pytest.mark.parametrize(("T", "W"), [(2, 4), (30, 3), (3, 6), (0, 4)])
def test_out(device, T, W, layout, dtype, packed):
    """Has the bits of a fresh output, zeros where there is no sequence, and nothing beside it."""
    pool = Pool(device, dtype, T, W=W, packed=packed)
    y, after = pool.expected()
    out, whole = view_like(y, layout)
    assert pool.run(out=out) is out
    assert torch.equal(out, y) and torch.equal(pool.pool, after)
    assert_nothing_beside(out, whole)


def test_out_beside_an_empty_pool(device):
    pool = Pool(device, T=2)
    out = torch.full_like(pool.x, torch.nan)
    pool.run(state=pool.pool[:0], out=out)
    assert not out.any()


@pytest.mark.cuda
@by_packing
def test_kernels_write_into_it(packed):
    """An `out` with the strides of a fresh output saves memory of y's size: nothing is copied."""
    pool = Pool("cuda", torch.bfloat16, packed=packed)
    out = torch.empty_like(pool.x)
    pool.run(out=out)
    y_bytes = out.numel() * out.element_size()
    assert peak_bytes(pool.run) - peak_bytes(lambda: pool.run(out=out)) >= y_bytes


# What it refuses.


def test_wrong_outputs():
    """Checked as y is, and apart from every input."""
    pool = Pool("cpu", T=2)
    x = torch.zeros_like(pool.x)
    with raises(ValueError, "expected out to have shape [B, T, D] = [6, 2, 24], got [6, 2, 25]"):
        pool.run(out=x.new_zeros(6, 2, 25))
    with raises(ValueError, "expected out to have 3 dimensions [B, T, D], got 2 with shape"):
        pool.run(out=x[0])
    with raises(TypeError, "expected out to be torch.float32 like x, got torch.bfloat16"):
        pool.run(out=x.bfloat16())
    with raises(ValueError, "expected out on the device of x, cpu, got meta"):
        pool.run(out=x.to("meta"))
    message = "expected the last dimension of out to be contiguous and no two elements of it to be"
    for out in (x.mT.contiguous().mT, x[:1].expand(6, 2, 24)):
        with raises(ValueError, f"{message} the same, got strides {list(out.stride())}"):
            pool.run(out=out)
    memory = torch.zeros(2000)
    own = memory[: x.numel()].view_as(x)
    with raises(ValueError, "expected out to share no memory with x"):
        pool.run(out=pool.x)
    with raises(ValueError, "expected out to share no memory with state"):
        pool.run(state=memory[100:772].view(7, 24, 4), out=own)
    for name, t in (("weight", memory[20:116].view(24, 1, 4)), ("bias", memory[20:44])):
        other = Pool("cpu", T=2)
        setattr(other, name, t)
        with raises(ValueError, f"expected out to share no memory with {name}"):
            other.run(out=own)
    assert torch.equal(pool.pool, pool.before)


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
