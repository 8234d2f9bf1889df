"""`Attention`, the layer of hybrid models, against its definition in fp64."""

import itertools

import pytest
import torch
from attention_inputs import composed_attention, make_attention
from common import assert_close
from models import make_x

from gla_ext import batch_invariant
from gla_ext.cache import GLACache, StaticGLACache
from gla_ext.layers.attention import Attention

OPTIONS = [
    {},
    {"num_heads": 4, "num_kv_heads": 2, "qkv_bias": True},
    {"window_size": 7},
    {"num_heads": 2, "num_kv_heads": 1, "window_size": 2, "rope_theta": 30.0},
    {"window_size": 600},
]
OFFSETS = torch.tensor([0, 5, 5, 66, 130])
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}


def with_gradients(call, x, *parameters):
    """The result, and its gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    o = call(x)
    do = torch.linspace(-0.5, 1, o.numel(), dtype=torch.float64).view_as(o).to(o)
    return [o, *torch.autograd.grad(o, [x, *parameters], do)]


def compare(layer, actual, expected, x, bound):
    names = ["o", "dx", *(f"d{name}" for name, _ in layer.named_parameters())]
    actual = with_gradients(actual, x, *layer.parameters())
    expected = with_gradients(expected, x.double(), *layer.parameters())
    for name, a, e in zip(names, actual, expected, strict=True):
        assert_close(a, e.to(a.dtype), bound, name=name)


def tensors_of(cache):
    kept = cache[0]["attn_state"]
    return [kept.keys, kept.values, kept.lengths]


def stacked(layer, pieces):
    return torch.cat([composed_attention(layer, piece) for piece in pieces])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows(options, dtype):
    layer, x = make_attention(dtype, **options), make_x(T=70, dtype=dtype)
    compare(
        layer,
        lambda x: layer(x)[0],
        lambda x: torch.stack([composed_attention(layer, row) for row in x]),
        x,
        BOUNDS[dtype],
    )


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_packed_sequences(options):
    layer, x = make_attention(**options), make_x(B=1, T=137)

    def expected(x):
        pieces = (x[0, a:b] for a, b in itertools.pairwise(OFFSETS))
        o = stacked(layer, pieces)
        return torch.cat([o, torch.zeros_like(x[0, 130:])]).unsqueeze(0)

    compare(layer, lambda x: layer(x, cu_seqlens=OFFSETS)[0], expected, x, 1e-12)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_padding(options):
    layer, x = make_attention(**options), make_x(T=20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = mask[1, 3] = mask[1, -2:] = 0
    x[mask == 0] = float("nan")

    def expected(x):
        rows = [torch.zeros_like(row) for row in x]
        for n, row in enumerate(rows):
            rows[n] = row.index_copy(
                0, mask[n].nonzero()[:, 0], composed_attention(layer, x[n][mask[n] == 1])
            )
        return torch.stack(rows)

    o = layer(x, attention_mask=mask)[0]
    assert_close(o, expected(x), 1e-12)
    (o * make_x(T=20)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("options", "cu_seqlens"), [(OPTIONS[1], OFFSETS), (OPTIONS[2], None)], ids=["packed", "rows"]
)
def test_compiled_whole(options, cu_seqlens):
    layer, x = make_attention(torch.float32, **options), make_x(B=1, T=137, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def call(layer):
        return lambda x: layer(x, cu_seqlens=cu_seqlens)[0]

    results = (with_gradients(call(f), x, *layer.parameters()) for f in (compiled, layer))
    for a, e in zip(*results, strict=True):
        assert_close(a, e, 1e-5)


WAYS = {"in place": (GLACache, True), "with gradients": (GLACache, False)}
WAYS |= {"static": (lambda: StaticGLACache(2), True)}


@pytest.mark.parametrize(("make_cache", "in_place"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pieces_of_a_sequence(options, make_cache, in_place):
    """In pieces of several tokens and of one, across powers of two and windows."""
    layer, x = make_attention(layer_idx=0, **options), make_x(T=300)
    expected, cache, parts = layer(x)[0], make_cache(), []
    with torch.set_grad_enabled(not in_place):
        for piece in x.split([100, 1, 3, 150, *[1] * 20, 26], 1):
            parts.append(layer(piece, past_key_values=cache, use_cache=True)[0])
            if make_cache is not GLACache and piece.shape[1] == 1:
                layer(piece, past_key_values=cache)  # which stores nothing
        before = [x.clone() for x in tensors_of(cache)]
        layer(x[:, :1], past_key_values=cache)
        layer(x[:, :4], past_key_values=cache)
    assert_close(torch.cat(parts, 1), expected, 1e-12)
    if make_cache is GLACache:
        for now, then in zip(tensors_of(cache), before, strict=True):
            assert torch.equal(now, then)
    if not in_place:
        weights = tuple(layer.parameters())
        got = torch.autograd.grad(torch.cat(parts, 1).square().sum(), weights)
        for a, e in zip(got, torch.autograd.grad(expected.square().sum(), weights), strict=True):
            assert_close(a, e, 1e-12)


def test_memory_follows_the_length():
    layer, cache = make_attention(layer_idx=0), GLACache()
    windowed, ring = make_attention(layer_idx=0, window_size=300), GLACache()
    with torch.no_grad():
        for _ in range(7):
            for one, own in ((layer, cache), (windowed, ring)):
                one(make_x(T=100), past_key_values=own, use_cache=True)
            kept = cache[0]["attn_state"]
            assert kept.longest <= kept.keys.shape[1] < max(2 * kept.longest, 257)
    assert ring[0]["attn_state"].keys.shape[1] == 300


MODES = {
    "inference": (torch.inference_mode, torch.float64, 1e-12),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), torch.float32, 0.02),
}


@pytest.mark.parametrize(("mode", "dtype", "bound"), MODES.values(), ids=MODES)
@torch.no_grad()
def test_a_mode_before_and_not_now(mode, dtype, bound):
    layer, x = make_attention(dtype, layer_idx=0, window_size=6), make_x(T=20, dtype=dtype)
    cache, expected = GLACache(), layer(x)[0]
    with mode():
        layer(x[:, :10], past_key_values=cache, use_cache=True)
    for start, end in ((10, 11), (11, 12), (12, 20)):
        o = layer(x[:, start:end], past_key_values=cache, use_cache=True)[0]
        assert o.dtype == dtype
        assert_close(o, expected[:, start:end], bound)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_heads": 0}, ValueError, "num_heads to be at least 1, got 0"),
        ({"num_kv_heads": 2}, ValueError, "num_kv_heads to divide num_heads = 3, got 2"),
        ({"num_heads": 5}, ValueError, "hidden_size to be an even multiple of num_heads = 5"),
        ({"num_heads": 8}, ValueError, "even multiple of num_heads = 8, got 24"),
        ({"window_size": 0}, ValueError, "window_size to be at least 1, got 0"),
        ({"rope_theta": 0.0}, ValueError, "rope_theta to be above 0, got 0.0"),
        ({"qkv_bias": 1}, TypeError, "qkv_bias to be True or False, got 1"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        Attention(**{"hidden_size": 24, "num_heads": 3} | options)


def test_wrong_calls():
    layer, x = make_attention(), make_x(T=4)
    with pytest.raises(ValueError, match="hidden_size = 24"):
        layer(x[0])
    with pytest.raises(ValueError, match="layer_idx to be given"):
        layer(x, past_key_values=GLACache(), use_cache=True)
    layer.layer_idx = 0
    with pytest.raises(TypeError, match=r"to be a gla_ext\.cache.GLACache, got list"):
        layer(x, past_key_values=[])
    with batch_invariant(), pytest.raises(NotImplementedError, match="batch_invariant is not"):
        layer(x)
    with pytest.raises(NotImplementedError, match="cp_context is not implemented for attention"):
        layer(x, cp_context=object())
    with pytest.raises(NotImplementedError, match="nested tensors are not supported"):
        layer(torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged))


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ([0, 5, 3], ValueError, r"not to decrease, from 0 to at most 8, got \[0, 5, 3\]"),
        ([0, 9], ValueError, "at most 8, got"),
        ([-1, 8], ValueError, "from 0 to at most 8"),
        ([[0, 8]], ValueError, r"cu_seqlens to have shape \[N \+ 1\], got \[1, 2\]"),
        ([0.0, 8.0], TypeError, "to be torch.int32 or torch.int64, got torch.float32"),
    ],
)
def test_wrong_offsets(offsets, error, message):
    with pytest.raises(error, match=message):
        make_attention()(make_x(B=1, T=8), cu_seqlens=torch.tensor(offsets))
    with pytest.raises(ValueError, match="a batch of one beside cu_seqlens, got B = 2"):
        make_attention()(make_x(T=8), cu_seqlens=torch.tensor([0, 8]))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cu_seqlens", [None, OFFSETS], ids=["rows", "packed"])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_cuda(options, cu_seqlens, dtype):
    """Flash kernels, and masks of fp32, forward and backward; unwritten memory reaches nothing."""
    options = options | {"hidden_size": 24 * 8}
    layer = make_attention(torch.float64, **options).to("cuda", dtype)
    exact = make_attention(torch.float64, **options)
    exact.load_state_dict({name: x.double().cpu() for name, x in layer.state_dict().items()})
    x = torch.cat([make_x(B=1, T=137, seed=seed) for seed in range(8)], -1).to(dtype)

    def call(layer, device):
        offsets = None if cu_seqlens is None else cu_seqlens.to(device)
        return lambda x: layer(x, cu_seqlens=offsets)[0]

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    actual = with_gradients(call(layer, "cuda"), x.cuda(), *layer.parameters())
    torch.use_deterministic_algorithms(False)
    expected = with_gradients(call(exact, "cpu"), x.double(), *exact.parameters())
    if dtype == torch.float32:
        for a, e in zip(actual, expected, strict=True):
            assert_close(a.cpu().double(), e, 1e-4)
        return
    # q, k and v are rounded before scores of tens, whose errors are those of the CPU's layer too.
    rounded = with_gradients(call(layer.cpu(), "cpu"), x, *layer.parameters())
    for a, r, e in zip(actual, rounded, expected, strict=True):
        unavoidable = (r.double() - e).square().mean().sqrt() / e.square().mean().sqrt()
        assert_close(a.cpu().double(), e, max(2 * unavoidable.item(), torch.finfo(dtype).eps))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1}, {"window_size": 1024}], ids=str)
@torch.no_grad()
def test_cuda_one_token_of_rows_of_several_lengths(options, dtype):
    """By splits of 1,024 keys in bf16."""
    from gla_ext.layers._attend import attend_last

    torch.manual_seed(0)
    q = torch.randn(3, 1, 4, 64, device="cuda", dtype=dtype)
    HK = options.get("num_kv_heads", 4)
    k, v = (torch.randn(3, 4096, HK, 64, device="cuda", dtype=dtype)[:, :3072] for _ in range(2))
    lengths = torch.tensor([1, 2500, 1024], device="cuda")
    actual = attend_last(q, k, v, lengths)
    for n, length in enumerate(lengths.tolist()):
        own = [x[n, :length].double().repeat_interleave(4 // HK, 1) for x in (k, v)]
        scores = torch.einsum("hd,lhd->hl", q[n, 0].double(), own[0]) / 8
        expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), own[1])
        assert_close(actual[n, 0].double(), expected, 1e-4 if dtype == torch.float32 else 0.01)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = attend_last(q, k, v, lengths)
    lengths.copy_(torch.tensor([700, 3, 3072]))
    graph.replay()
    assert_close(again.float(), attend_last(q, k, v, lengths).float(), 0.01)
