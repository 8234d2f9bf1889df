"""The short convolution against fp64 torch: sequences, packed ones, segments, caches and errors.

Equal bits (see common.py): own sums.
"""

import itertools

import pytest
import torch
from common import BAD_OFFSETS, CUDA_DTYPES, DTYPES, assert_close
from conv_inputs import LAYOUTS, check, exact, make, module, results
from norm_inputs import BOUND, laid_out, normal

from gla_ext.layers.short_convolution import ShortConvolution

ops = torch.ops.gla_ext
TAPS = (1, 2, 3, 4, 5, 12)  # on CUDA a kernel for each up to 4, and one for more
LENGTHS = (5, 0, 1, 2, 1, 9, 3)  # and a tail of 4
OFFSETS = [0, *itertools.accumulate(LENGTHS)]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_index = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)


LENGTH = (2, 37, 40)
# B, T, D, W and options: widths, biases and caches in fp32; each dtype with few and many taps.
WIDE = [
    (*LENGTH, W, {"bias": bias, "cached": cached})
    for W, bias, cached in itertools.product(TAPS, (False, True), (False, True))
]
CASES = [(*LENGTH, W, {}) for W in (4, 5)]
CASES += [(2, 11, D, W, {}) for D in (1, 5, 8, 72, 136, 264, 1030) for W in (4, 6)]
CASES += [(2, 21, 24, W, {"layout": layout}) for W in (3, 5) for layout in LAYOUTS[1:]]
CASES += [(2, 21, 24, 4, {"weight_dtype": weight}) for weight in DTYPES]
# More tokens than the blocks, and the tasks, have at once; shorter than W.
CASES += [(B, T, 16, 4, {}) for B, T in ((3, 3000), (700, 3), (1, 1), (2, 4), (1, 260))]
CASES += [(3, 3000, 16, 7, {}), (2, 4, 16, 7, {}), (3, 3000, 16, 2, {})]
CASES = [(*case, dtype) for case in CASES for dtype in DTYPES]
CASES += [(*case, torch.float32) for case in WIDE]
CASES += [(B, T, 24, 4, {}, torch.float32) for B, T in ((0, 3), (0, 0), (2, 0))]


@pytest.mark.parametrize(("B", "T", "D", "W", "options", "dtype"), CASES, ids=str)
def test_values_and_gradients(device, B, T, D, W, options, dtype):
    options = dict(options)
    cached = options.pop("cached", True)
    x, weight, bias, cache, dy, dstate = make(B, T, D, W, device, dtype, **options)
    if "weight_dtype" in options:
        weight, bias = (t.float().to(options["weight_dtype"]) for t in (weight, bias))
    inputs = x, weight, bias, cache if cached else None
    # Of one channel there are few values, whose rounding does not average.
    factor = 2.0 if D in (1, 16) else 1.0
    check(*inputs, dy, dstate, factor=factor)
    if "layout" in options:
        check(x.contiguous(), *inputs[1:], dy, dstate)
        check(*inputs, dy.contiguous(), dstate)


PACKED = [(W, cached, torch.int64, torch.float32) for W in TAPS for cached in (False, True)]
PACKED += [(W, True, torch.int32, dtype) for W in (4, 5) for dtype in DTYPES]


@pytest.mark.parametrize(("W", "cached", "index", "dtype"), PACKED, ids=str)
def test_packed(device, W, cached, index, dtype):
    x, *parameters, cache, dy, dstate = make(1, 25, 24, W, device, dtype, N=len(LENGTHS))
    # Gradients of 24 channels' biases are few values, whose rounding does not average.
    check(x, *parameters, cache if cached else None, dy, dstate, OFFSETS, index, factor=1.5)


@by_dtype
@pytest.mark.parametrize("W", TAPS)
def test_packed_has_the_bits_of_each_alone(device, W, dtype):
    x, weight, bias, cache, dy, dstate = make(1, 25, 24, W, device, dtype, N=len(LENGTHS))
    packed = results(x, weight, bias, cache, dy, dstate, torch.tensor(OFFSETS, device=device))
    for n, (start, end) in enumerate(itertools.pairwise(OFFSETS)):
        tokens, own = slice(start, end), slice(n, n + 1)
        alone = results(x[:, tokens], weight, bias, cache[own], dy[:, tokens], dstate[own])
        for name in ("y", "dx"):
            assert torch.equal(packed[name][:, tokens], alone[name]), name
        for name in ("state", "dcache"):
            assert torch.equal(packed[name][own], alone[name]), name


@by_dtype
@pytest.mark.parametrize("W", TAPS)
def test_segments_have_the_bits_of_the_whole(device, W, dtype):
    """Each goes on from the state of the last, and hands the state's gradient back."""
    x, weight, bias, cache, dy, dstate = make(2, 20, 24, W, device, dtype)

    def in_segments(x, weight, bias, cache):
        conv, pieces = module(weight, bias), []
        for start, end in itertools.pairwise((0, 3, 3, 4, 5, 11, 20)):
            y, cache = conv(x[:, start:end], cache, output_final_state=True)
            pieces.append(y)
        return torch.cat(pieces, 1), cache

    whole = results(x, weight, bias, cache, dy, dstate)
    parts = results(x, weight, bias, cache, dy, dstate, apply=in_segments)
    for name in ("y", "state"):
        assert torch.equal(whole[name], parts[name])
    for name in ("dx", "dweight", "dbias", "dcache"):  # rounded at every cut
        assert_close(parts[name], whole[name], 4 * BOUND[dtype], name=name)


def test_a_cache_of_another_dtype(device):
    x, weight, bias, cache, *_ = make(2, 9, 24, 4, device, torch.bfloat16)
    y, state = module(weight, bias)(x, cache.float().requires_grad_(), True)
    assert state.dtype == torch.bfloat16
    assert torch.equal(y, module(weight, bias)(x, cache)[0])


@pytest.mark.parametrize("T", [0, 1, 3, 9])
@pytest.mark.parametrize("W", [1, 4, 12])
def test_without_an_output_or_its_gradient(device, T, W):
    x, weight, bias, cache, dy, dstate = make(2, T, 24, W, device, torch.float32)
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias, cache)]
    conv = module(*leaves[1:3])
    y, state = conv(leaves[0], leaves[3])
    assert state is None
    y, state = conv(leaves[0], leaves[3], True)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    wanted = exact(*doubles)
    for got, of, do in ((y, wanted[0], dy), (state, wanted[1], dstate)):
        gradients = torch.autograd.grad(got, leaves, do, retain_graph=True)
        expected = torch.autograd.grad(
            of, doubles, do.double(), retain_graph=True, materialize_grads=True
        )
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("W", [4, 12])
def test_nan_stays_in_its_sequence(device, W):
    x, weight, bias, cache, dy, dstate = make(1, 25, 24, W, device, torch.float32, N=len(LENGTHS))
    x[0, 4], cache[2] = torch.nan, torch.nan  # the last token of sequence 0; what comes before 2
    dy[0, 9] = torch.nan  # of sequence 5, which starts there
    found = results(x, weight, bias, cache, dy, dstate, torch.tensor(OFFSETS, device=device))
    rows = {name: t.isnan().flatten(2).any(2) for name, t in found.items() if t.ndim == 3}
    assert rows["y"][0].nonzero().flatten().tolist() == [4, 5]
    assert rows["state"].any(1).nonzero().flatten().tolist() == [0, 2]
    assert rows["dx"][0, 6:].nonzero().flatten().tolist() == [9 - 6]
    assert rows["dcache"][5].any()
    assert not rows["dcache"][[1, 3, 4, 6]].any()


def test_far_out(device):
    """SiLU and its slope where exponentials overflow."""
    values = [-3e4, -200.0, -95.0, -80.0, -9.0, 0.0, 9.0, 80.0, 95.0, 200.0, 3e4]
    for dtype in CUDA_DTYPES:
        x = torch.tensor(values * 8, dtype=dtype, device=device).view(1, -1, 8)
        one = torch.ones(8, 1, 1, dtype=dtype, device=device)
        leaf, plain = (x.clone().requires_grad_() for _ in range(2))
        y, wanted = module(one, None)(leaf)[0], torch.nn.functional.silu(plain.float()).to(dtype)
        bounds = {"rtol": 4 * BOUND[dtype], "atol": 1e-6}
        torch.testing.assert_close(y, wanted, **bounds)
        gradients = (torch.autograd.grad(t.sum(), s)[0] for t, s in ((y, leaf), (wanted, plain)))
        torch.testing.assert_close(*gradients, **bounds)


@pytest.mark.parametrize("W", [4, 5])
@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 9], [0, 9, 9]])
def test_packed_edges(device, offsets, W):
    x, weight, bias, cache, dy, dstate = make(
        1, 9, 24, W, device, torch.float32, N=len(offsets) - 1
    )
    check(x, weight, bias, cache, dy, dstate, offsets)
    check(x[:, :0], weight, bias, cache, dy[:, :0], dstate, [0] * len(offsets))


@by_index
@pytest.mark.parametrize("W", [4, 6])
@pytest.mark.parametrize("offsets", BAD_OFFSETS.values(), ids=BAD_OFFSETS.keys())
def test_bad_offsets(device, offsets, W, index):
    """CPU says so; on CUDA, where nobody looks at them, nothing is read or written outside."""
    inputs = make(1, 165, 24, W, device, torch.float32, N=len(offsets) - 1)
    offsets = torch.tensor(offsets, dtype=index, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"^ShortConvolution: expected cu_seqlens to "):
            results(*inputs, offsets)
        return
    found = results(*inputs, offsets)
    torch.cuda.synchronize()
    assert found["y"].shape == inputs[0].shape
    assert found["dcache"].shape == inputs[3].shape


@pytest.mark.cuda
@pytest.mark.parametrize("W", [4, 6])
def test_a_cuda_graph_replays_with_other_offsets(W):
    *inputs, dy, dstate = make(1, 25, 24, W, "cuda", torch.bfloat16, N=len(LENGTHS))
    offsets = torch.tensor(OFFSETS, device="cuda")
    others = torch.tensor([0, 1, 1, 12, 13, 20, 25, 25], device="cuda")

    def run():
        outputs = ops.short_convolution_fwd(*inputs, offsets, True)
        return [*outputs, *ops.short_convolution_bwd(dy, dstate, *inputs, offsets)]

    with torch.no_grad():
        run()  # outside of the capture first
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for replayed in (offsets.clone(), others):
            offsets.copy_(replayed)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


def test_parameters_are_those_of_a_convolution():
    conv = ShortConvolution(24, 3, True)
    x = normal(2, 9, 24, seed=1, dtype=torch.float32)
    plain = torch.nn.Conv1d.forward(conv, x.mT)[..., :9].mT
    assert_close(conv(laid_out(x, "sliced"))[0], torch.nn.functional.silu(plain), 1e-6)
