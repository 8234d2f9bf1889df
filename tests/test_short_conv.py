"""The short convolution against torch's, over sequences, packed ones, segments and caches."""

import itertools

import pytest
import torch
from common import BAD_OFFSETS, assert_close
from torch.nn.functional import conv1d, silu

from gla_ext.short_conv import ShortConvolution, token_positions

D = 5


def make_conv(W=4, bias=True, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    return ShortConvolution(D, W, bias).to(device, dtype)


def make_x(B=2, T=9, dtype=torch.float64, device="cpu", seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, D, generator=generator, dtype=torch.float64).to(device, dtype)


def expected(conv, x):
    """torch's convolution in fp64, behind zeros."""
    W = conv.kernel_size[0]
    weight, bias = (p if p is None else p.double() for p in (conv.weight, conv.bias))
    return silu(conv1d(x.double().mT, weight, bias, padding=W - 1, groups=D)[..., : x.shape[1]]).mT


@pytest.mark.parametrize("W", [1, 2, 4, 12])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_torch_with_gradients(device, W, bias):
    conv = make_conv(W, bias, device=device)
    x = make_x(device=device).requires_grad_()
    y, state = conv(x)
    assert state is None
    leaves = [x, *conv.parameters()]
    do = make_x(seed=2, device=device)
    results = [[z, *torch.autograd.grad(z, leaves, do)] for z in (y, expected(conv, x))]
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3), (torch.float16, 4e-4)]
)
def test_rounds_once(device, dtype, bound):
    conv, x = make_conv(dtype=dtype, device=device), make_x(T=300, dtype=dtype, device=device)
    y, state = conv(x, output_final_state=True)
    assert y.dtype == state.dtype == dtype
    assert_close(y, expected(conv, x), bound)
    with torch.autocast(device, torch.bfloat16 if dtype == torch.float32 else dtype):
        assert torch.equal(conv(x)[0], y)


@pytest.mark.parametrize("T", [0, 1, 3, 9])
def test_state_is_the_last_inputs(device, T):
    conv, x = make_conv(device=device), make_x(T=T, device=device)
    _, state = conv(x, output_final_state=True)
    padded = torch.cat([x.new_zeros(2, 4, D), x], 1)
    assert torch.equal(state, padded[:, -4:].mT)
    assert state.is_contiguous()


@pytest.mark.parametrize("W", [1, 4, 12])
def test_segments_equal_the_whole_with_gradients(device, W):
    conv, x = make_conv(W, device=device), make_x(T=20, device=device).requires_grad_()
    pieces, cache = [], None
    for start, end in itertools.pairwise((0, 3, 3, 4, 5, 11, 20)):
        y, cache = conv(x[:, start:end], cache, output_final_state=True)
        pieces.append(y)
    _, last = conv(x, output_final_state=True)
    assert torch.equal(cache, last)
    leaves, do = [x, *conv.parameters()], make_x(T=20, seed=2, device=device)
    ys = (torch.cat(pieces, 1), expected(conv, x))
    results = [[y, *torch.autograd.grad(y, leaves, do)] for y in ys]
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted, 1e-12)


LENGTHS = (5, 0, 1, 2, 1, 9, 3)  # and a tail of 4


def packed_inputs(device, W, requires_grad=True):
    offsets = torch.tensor([0, *itertools.accumulate(LENGTHS)], device=device)
    x = make_x(1, sum(LENGTHS) + 4, device=device)
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(len(LENGTHS), D, W, generator=generator, dtype=torch.float64).to(device)
    return x.requires_grad_(requires_grad), cache.requires_grad_(requires_grad), offsets


@pytest.mark.parametrize("W", [1, 4, 12])
@pytest.mark.parametrize("with_cache", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_packed_equals_each_alone_with_gradients(device, W, with_cache, index):
    conv = make_conv(W, device=device)
    x, cache, offsets = packed_inputs(device, W)
    cache = cache if with_cache else None
    y, states = conv(x, cache, output_final_state=True, cu_seqlens=offsets.to(index))
    assert states.is_contiguous()
    ys, alone = [], []
    for n, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        before = None if cache is None else cache[n : n + 1]
        z, state = conv(x[:, start:end], before, output_final_state=True)
        ys.append(z)
        alone.append(state)
    leaves = [x, *conv.parameters(), *([cache] if with_cache else [])]
    results = []
    for z, state in ((y[:, : offsets[-1]], states), (torch.cat(ys, 1), torch.cat(alone))):
        loss = (z.sin() * (1 + torch.arange(D, device=device))).sum() + state.square().sum()
        results.append([z, state, *torch.autograd.grad(loss, leaves)])
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted, 1e-12)


def test_nan_stays_in_its_sequence(device):
    conv = make_conv(device=device)
    x, cache, offsets = packed_inputs(device, 4, requires_grad=False)
    x[0, 4], cache[2] = torch.nan, torch.nan  # the last token of sequence 0; what comes before 2
    x.requires_grad_()
    y, states = conv(x, cache, output_final_state=True, cu_seqlens=offsets)
    assert y[0].isnan().any(1).nonzero().flatten().tolist() == [4, 5]
    assert states.flatten(1).isnan().any(1).nonzero().flatten().tolist() == [0, 2]
    y.sum().backward()
    assert x.grad[0, 6:].isfinite().all()


def test_gradcheck():
    conv = make_conv()
    x, cache, offsets = packed_inputs("cpu", 4)

    def function(x, cache, weight, bias):
        parameters = {"weight": weight, "bias": bias}
        arguments = (x, cache, True, offsets)
        return torch.func.functional_call(conv, parameters, arguments)

    assert torch.autograd.gradcheck(function, (x, cache, conv.weight, conv.bias))


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 9], [0, 9, 9]])
def test_packed_edges(offsets):
    conv, x, offsets = make_conv(), make_x(1), torch.tensor(offsets)
    y, state = conv(x, output_final_state=True, cu_seqlens=offsets)
    assert_close(y, expected(conv, x), 1e-12)  # the tail counts as a sequence
    assert state.shape == (len(offsets) - 1, D, 4)
    cache = torch.ones_like(state)
    assert conv(x[:, :0], cache, True, offsets * 0)[0].shape == (1, 0, D)
    assert torch.equal(conv(x[:, :0], cache, True, offsets * 0)[1], cache)


@pytest.mark.parametrize("offsets", BAD_OFFSETS.values(), ids=BAD_OFFSETS.keys())
def test_bad_offsets_read_and_write_nothing_outside(device, offsets):
    """On CUDA nobody looks at them; on CPU chunk_gla does, after the convolutions."""
    conv, x = make_conv(device=device), make_x(1, 165, device=device)
    for dtype in (torch.int32, torch.int64):
        cu_seqlens = torch.tensor(offsets, dtype=dtype, device=device)
        cache = torch.ones(len(offsets) - 1, D, 4, dtype=torch.float64, device=device)
        y, state = conv(x, cache, True, cu_seqlens)
        assert (y.shape, state.shape) == (x.shape, cache.shape)
    if device == "cuda":
        torch.cuda.synchronize()


def test_positions():
    positions = token_positions(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 7)
    assert positions.tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert positions.dtype == torch.int32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache": torch.zeros(2, D, 3)}, r"cache .* \[N, D, W\] = \[2, 5, 4\], got \[2, 5, 3\]"),
        ({"cache": torch.zeros(3, D, 4)}, r"cache .* = \[2, 5, 4\], got \[3, 5, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "expected B to be 1 with cu_seqlens, got 2"),
        ({"cu_seqlens": torch.tensor(9)}, r"cu_seqlens to have shape \[N \+ 1\], got \[\]"),
    ],
)
def test_wrong_inputs(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_conv()(make_x(), **arguments)
