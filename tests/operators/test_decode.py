"""The operators of a decoded token's layer against plain torch in fp64."""

import pytest
import torch
import torch.nn.functional as F
from common import CUDA_DTYPES

from gla_ext import reference
from gla_ext.layers.gate_projection import gate_projection

ops = torch.ops.gla_ext
EPS = 1e-5
# Of results whose operands were rounded once before: twice a rounding's relative error and more.
TOLERANCE = {
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
    torch.float32: 2e-6,
    torch.float64: 1e-14,
}
DTYPES = [*CUDA_DTYPES, torch.float64]
# D, N: columns that make one warp's share, several, none of whole 128s, and turns of 24 warps; and
# rows of weights that are no multiple of a tile's.
SIZES = {"one": (128, 16), "part": (96, 21), "odd": (40, 9), "many": (416, 40), "turns": (3136, 8)}
by_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
by_rows = pytest.mark.parametrize("rows", [1, 8, 13, 32, 33])
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Draw:
    """Normal numbers, rounded to a dtype."""

    def __init__(self, device, dtype, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def __call__(self, *shape, scale=1.0, dtype=None):
        x = scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.device, dtype or self.dtype)

    def weight(self, N, D):
        return self(N, D, scale=D**-0.5)


def norm(x, weight=None):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return y if weight is None else y * weight


def exact(function, *tensors):
    """A function of the same numbers in fp64 on the CPU."""
    return function(*(None if t is None else t.detach().cpu().double() for t in tensors))


def require_close(actual, expected, tolerance=None):
    assert actual.isfinite().all() and actual.shape == expected.shape
    error = (actual.cpu().double() - expected).square().mean().sqrt()
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    assert error <= tolerance * expected.square().mean().sqrt(), error


@by_dtype
@by_rows
@by_size
def test_norm_linear(device, dtype, rows, size):
    D, N = size
    draw = Draw(device, dtype)
    x, w = draw(rows, 1, D, scale=3), draw(D, dtype=torch.float32)
    weights = [draw.weight(n, D) for n in (N, 16, N + 3)]
    results = ops.norm_linear(x, w, EPS, weights)
    assert [y.shape for y in results] == [(rows, 1, n) for n in (N, 16, N + 3)]
    for y, weight in zip(results, weights, strict=True):
        require_close(y, exact(lambda x, w, m: norm(x, w) @ m.T, x, w, weight))


@by_dtype
@by_rows
@by_size
def test_norm_swiglu(device, dtype, rows, size):
    D, N = size
    draw = Draw(device, dtype)
    x, gate, up = draw(rows, D), draw.weight(N, D), draw.weight(N, D)
    y = ops.norm_swiglu(x, None, EPS, gate, up)
    expected = exact(lambda x, g, u: F.silu(norm(x) @ g.T) * (norm(x) @ u.T), x, gate, up)
    require_close(y, expected, 2 * TOLERANCE[dtype])


@by_dtype
@by_rows
@by_size
def test_linear_residual(device, dtype, rows, size):
    D, N = size
    draw = Draw(device, dtype)
    x, weight, residual = draw(rows, 1, D), draw.weight(N, D), draw(rows, 1, N)
    y = ops.linear_residual(x, weight, residual)
    require_close(y, exact(lambda x, w, r: r + x @ w.T, x, weight, residual))


@by_dtype
@by_rows
@pytest.mark.parametrize("H, V", [(2, 64), (4, 32), (1, 160), (3, 20), (2, 256), (1, 12288)])
def test_norm_gate_linear_residual(device, dtype, rows, H, V):
    draw = Draw(device, dtype)
    o, gate, w = draw(rows, 1, H, V, scale=0.1), draw(rows, 1, H * V), draw(V)
    weight, residual = draw.weight(24, H * V), draw(rows, 1, 24)
    y = ops.norm_gate_linear_residual(o, w, EPS, gate, weight, residual)

    def expected(o, gate, w, weight, residual):
        return residual + (norm(o, w).flatten(-2) * F.silu(gate)) @ weight.T

    require_close(y, exact(expected, o, gate, w, weight, residual))


def step_inputs(device, dtype, rows, H, HK, K, V, R, v_first, seed=0):
    draw = Draw(device, dtype, seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = draw(rows, 1, H, K), draw(rows, 1, HK, K, scale=K**-0.5), draw(rows, 1, HK, V)
    h, w, b = draw(rows, 1, R), draw.weight(HK * K, R), draw(HK * K)
    pool = draw(rows + 2, H, *((V, K) if v_first else (K, V)), dtype=wide)
    slots = torch.arange(rows, device=device).flip(0) + 1
    return q, k, v, h, w, b, pool, slots


def low_rank_step(q, k, v, h, w, b, pool, slots, v_first, **options):
    args = (q, k, v, h, w, b, 16.0, -0.4, pool, slots, None, v_first)
    return ops.recurrent_gla_low_rank_step_(*args, **options)


@by_dtype
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(
    "H, HK, K, V, R",
    [
        *[(2, 2, 128, 64, 16), (2, 1, 64, 130, 8), (1, 1, 20, 24, 24), (1, 1, 300, 16, 5)],
        *[(1, 1, 1000, 1016, 8), (2, 1, 1024, 40, 16)],
    ],
)
def test_low_rank_step(device, dtype, v_first, H, HK, K, V, R):
    rows = 3
    *inputs, pool, slots = step_inputs(device, dtype, rows, H, HK, K, V, R, v_first)
    q, k, v, h, w, b = inputs
    slots[1] = -1
    before = pool.clone()
    o = low_rank_step(*inputs, pool, slots, v_first, overlaps=v_first)

    wide = torch.promote_types(dtype, torch.float32)
    gk = gate_projection(*(x.cpu().to(wide) for x in (h, w, b)), 16.0, -0.4).to(dtype).double()
    state = before[slots.clamp_min(0)].cpu().double()
    expected, after = reference.recurrence(
        *(x.cpu().double() for x in (q, k, v)),
        gk.unflatten(-1, (HK, K)),
        initial_state=state.transpose(2, 3) if v_first else state,
    )
    after = after.transpose(2, 3) if v_first else after
    there = slots >= 0
    require_close(o[there], expected[there.cpu()])
    assert not o[~there].any()
    tolerance = 2e-3 if dtype == torch.bfloat16 else 2e-4  # of gates that were rounded
    require_close(pool[slots[there]], after[there.cpu()], tolerance)
    untouched = torch.ones(len(pool), dtype=torch.bool, device=device)
    untouched[slots[there]] = False
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.cuda
@pytest.mark.parametrize("v_first", [False, True])
def test_a_step_has_the_same_bits_in_every_batch(v_first):
    """And leaves the same bits in the pool."""
    rows = 32
    q, k, v, h, w, b, pool, slots = step_inputs(
        "cuda", torch.bfloat16, rows, 4, 2, 128, 200, 16, v_first
    )
    slots[7] = -1
    other = pool.clone()
    o = low_rank_step(q, k, v, h, w, b, pool, slots, v_first, overlaps=True)
    for n in range(rows):
        row = slice(n, n + 1)
        alone = (q[row], k[row], v[row], h[row], w, b, other, slots[row])
        assert torch.equal(low_rank_step(*alone, v_first), o[row])
    assert torch.equal(other, pool)


def calls(device, dtype, rows, overlaps=False):
    """The products, as functions of so many of the rows."""
    draw = Draw(device, dtype)
    x, r, o, g = draw(rows, 1, 416), draw(rows, 1, 40), draw(rows, 1, 4, 64), draw(rows, 1, 256)
    a, b, c, w = draw.weight(40, 416), draw.weight(40, 416), draw.weight(40, 256), draw(416)
    return {
        "norm_linear": lambda n: torch.cat(ops.norm_linear(x[n], w, EPS, [a, b], overlaps), -1),
        "norm_swiglu": lambda n: ops.norm_swiglu(x[n], w, EPS, a, b, overlaps),
        "linear_residual": lambda n: ops.linear_residual(x[n], a, r[n], overlaps),
        "norm_gate_linear_residual": lambda n: ops.norm_gate_linear_residual(
            o[n], None, EPS, g[n], c, r[n], overlaps
        ),
    }


PRODUCTS = tuple(calls("cpu", torch.float32, 1))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(name, dtype, overlaps):
    whole = calls("cuda", dtype, 32)[name](slice(0, 32))
    assert whole.isfinite().all()
    call = calls("cuda", dtype, 32, overlaps)[name]
    for start, count in ((0, 1), (5, 1), (31, 1), (3, 8), (16, 9), (2, 16), (7, 20)):
        assert torch.equal(call(slice(start, start + count)), whole[start : start + count])


@pytest.mark.cuda
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 9, 27])
def test_rows_that_start_anywhere(name, rows):
    """As narrow parts of wider tensors, whose rows start at no multiple of 16 bytes."""
    wide = Draw("cuda", torch.bfloat16)(rows, 1, 500)
    x, r = wide[..., 3:419], wide[..., 7:47]
    draw = Draw("cuda", torch.bfloat16, 1)
    a, b = draw.weight(41, 417)[1:, 1:], draw.weight(40, 416)
    if name == "norm_gate_linear_residual":
        o = x.unflatten(-1, (13, 32))
        found = ops.norm_gate_linear_residual(o, None, EPS, x, a, r)
        same = ops.norm_gate_linear_residual(
            o.contiguous(), None, EPS, x.contiguous(), a.contiguous(), r.contiguous()
        )
    elif name == "linear_residual":
        found = ops.linear_residual(x, a, r)
        same = ops.linear_residual(x.contiguous(), a.contiguous(), r.contiguous())
    elif name == "norm_swiglu":
        found = ops.norm_swiglu(x, None, EPS, a, b)
        same = ops.norm_swiglu(x.contiguous(), None, EPS, a.contiguous(), b)
    else:
        found = torch.cat(ops.norm_linear(x, None, EPS, [a, b]))
        same = torch.cat(ops.norm_linear(x.contiguous(), None, EPS, [a.contiguous(), b]))
    assert found.isfinite().all() and torch.equal(found, same)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_a_chain_that_overlaps_has_the_same_bits_in_a_graph(rows):
    """Each kernel starts before the one before has ended, and waits for what it writes."""
    draw = Draw("cuda", torch.bfloat16)
    D, N = 1024, 2816
    x, w = draw(rows, 1, D), draw(D)
    maps = [draw.weight(N, D), draw.weight(N, D), draw.weight(D, N)]

    def chain(y, overlaps):
        for _ in range(6):
            z = ops.norm_swiglu(y, w, EPS, maps[0], maps[1], overlaps)
            y = ops.linear_residual(z, maps[2], y, overlaps)
        return y

    expected = torch.cat([chain(eight, False) for eight in x.split(8)])
    assert expected.isfinite().all()
    assert torch.equal(chain(x, True), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(x, True)
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


def errors():
    x, w, r = torch.randn(2, 1, 8), torch.randn(4, 8), torch.randn(2, 1, 4)
    o, g = torch.randn(2, 1, 2, 4), torch.randn(2, 1, 8)
    q, k, v, h, u, b, pool, slots = step_inputs("cpu", torch.float32, 2, 2, 2, 4, 4, 8, True)
    step = (16.0, None, pool, slots, None, True)
    linear, swiglu = ops.norm_linear, ops.norm_swiglu
    residual, heads = ops.linear_residual, ops.norm_gate_linear_residual
    pooled = ops.recurrent_gla_low_rank_step_
    value, kind = ValueError, TypeError
    return {
        "no weight": (linear, (x, None, EPS, []), value, "at least 1 weight"),
        "weight": (linear, (x, None, EPS, [w, w[:, 1:]]), value, r"weights\[1\] to have shape"),
        "norm": (linear, (x, w[0, 1:], EPS, [w]), value, "norm_weight to have shape"),
        "dtype": (linear, (x, None, EPS, [w.half()]), kind, r"weights\[0\] to be torch.float32"),
        "integers": (linear, (x.int(), None, EPS, [w]), kind, "expected x to be torch.bfloat16"),
        "up": (swiglu, (x, None, EPS, w, w[1:]), value, "up_weight to have shape"),
        "vector": (swiglu, (x, None, EPS, w[0], w), value, "gate_weight to have 2 dimensions"),
        "residual": (residual, (x, w, r[:1]), value, "residual to have shape"),
        "width": (residual, (x, w, x), value, "residual to have shape"),
        "wide residual": (residual, (x, w, r.double()), kind, "residual to be torch.float32"),
        "gate": (heads, (o, None, EPS, g[..., 1:], w, r), value, "gate to have shape"),
        "heads": (heads, (o[0, 0, 0], None, EPS, g, w, r), value, "at least 2 dimensions"),
        "tokens": (
            pooled,
            (*(torch.cat([t, t], 1) for t in (q, k, v)), h, u, b, *step),
            value,
            "one token a row, got T = 2",
        ),
        "rank": (pooled, (q, k, v, h[..., 1:], u, b, *step), value, "gate_weight to have shape"),
        "bias": (pooled, (q, k, v, h, u, b[1:], *step), value, "gate_bias to have shape"),
        "normalizer": (pooled, (q, k, v, h, u, b, 0.0, *step[1:]), value, "normalizer to be above"),
        "pool": (pooled, (q, k, v, h, u, b, *step[:2], pool[:, :1], *step[3:]), value, "state to"),
    }


@pytest.mark.parametrize("name", errors())
def test_errors(name):
    op, args, error, message = errors()[name]
    with pytest.raises(error, match=f"{op.__name__}.*{message}"):
        op(*args)
