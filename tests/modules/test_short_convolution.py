"""The short convolution against fp64 torch: sequences, packed ones, segments, caches and errors.

Equal bits (see common.py): own sums.
"""

import itertools

import pytest
import torch
from common import BAD_OFFSETS, CUDA_DTYPES, DTYPES, assert_close
from conv_inputs import BOUND, LAYOUTS, check, exact, laid_out, make, module, normal, results

from gla_ext.layers.short_convolution import ShortConvolution

ops = torch.ops.gla_ext
TAPS = (1, 2, 3, 4, 5, 12)  # on CUDA a kernel for each up to 4, and one for more
LENGTHS = (5, 0, 1, 2, 1, 9, 3)  # and a tail of 4
OFFSETS = [0, *itertools.accumulate(LENGTHS)]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_index = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)


@by_dtype
@pytest.mark.parametrize("cached", [False, True], ids=["", "cache"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("W", TAPS)
def test_values_and_gradients(device, W, bias, cached, dtype):
    x, weight, b, cache, dy, dstate = make(2, 37, 40, W, device, dtype, bias=bias)
    check(x, weight, b, cache if cached else None, dy, dstate)


@by_dtype
@pytest.mark.parametrize("D", [1, 5, 8, 72, 136, 264, 1030])
@pytest.mark.parametrize("W", [4, 6])
def test_channels(device, W, D, dtype):
    # Of one channel there are few values, whose rounding does not average.
    check(*make(2, 11, D, W, device, dtype), factor=2.0 if D == 1 else 1.0)


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("W", [3, 5])
def test_layouts(device, W, layout, dtype):
    x, *others, dy, dstate = make(2, 21, 24, W, device, dtype, layout=layout)
    check(x, *others, dy, dstate)
    check(x.contiguous(), *others, dy, dstate)
    check(x, *others, dy.contiguous(), dstate)


@by_dtype
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_parameters_of_another_dtype(device, weight_dtype, dtype):
    x, weight, bias, *others = make(2, 21, 24, 4, device, dtype, weight_dtype=weight_dtype)
    check(x, weight.to(torch.float32).to(weight_dtype), bias.float().to(weight_dtype), *others)


@by_dtype
@pytest.mark.parametrize("W", [2, 4, 7])
@pytest.mark.parametrize("B, T", [(3, 3000), (700, 3), (1, 1), (2, 4), (1, 260)])
def test_batches_and_lengths(device, B, T, W, dtype):
    """More tokens than the blocks, and the tasks, have at once; shorter than W."""
    check(*make(B, T, 16, W, device, dtype), factor=2.0)


@by_dtype
@by_index
@pytest.mark.parametrize("cached", [False, True], ids=["", "cache"])
@pytest.mark.parametrize("W", TAPS)
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


@by_dtype
@pytest.mark.parametrize("W", [4, 6])
def test_the_same_bits_in_every_run_and_for_every_row(device, W, dtype):
    inputs = make(5, 150, 72, W, device, dtype)
    whole, again = results(*inputs), results(*inputs)
    assert all(torch.equal(t, again[name]) for name, t in whole.items())
    x, weight, bias, cache, dy, dstate = inputs
    row = slice(3, 4)
    alone = results(x[row], weight, bias, cache[row], dy[row], dstate[row])
    for name in ("y", "state", "dx", "dcache"):
        assert torch.equal(alone[name], whole[name][row]), name


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(threads):
    inputs, before, found = make(2, 300, 1100, 4, "cpu", torch.float32), torch.get_num_threads(), []
    for count in (2, threads):
        torch.set_num_threads(count)
        found.append(results(*inputs))
    torch.set_num_threads(before)
    assert all(torch.equal(t, found[1][name]) for name, t in found[0].items())


@by_dtype
def test_autocast_changes_nothing(device, dtype):
    x, weight, bias, *_ = make(2, 9, 24, 4, device, dtype)
    conv = module(weight, bias)
    y, _ = conv(x)
    with torch.autocast(device, torch.bfloat16 if dtype == torch.float32 else torch.float16):
        assert torch.equal(conv(x)[0], y)


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


@pytest.mark.parametrize("W", [4, 6])
def test_an_expanded_gradient(device, W):
    """As inductor hands it over, with strides of 0."""
    x, weight, bias, cache, dy, dstate = make(2, 9, 40, W, device, torch.float32)
    ones = x.new_ones(())
    check(x, weight, bias, cache, ones.expand(dy.shape), ones.expand(dstate.shape))


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


@pytest.mark.parametrize("W", [1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(packed, W):
    N, offsets = (3, torch.tensor([0, 2, 2, 5])) if packed else (1, None)
    x, weight, bias, cache, *_ = make(1, 7, 3, W, "cpu", torch.float64, N=N)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, cache)]
    assert torch.autograd.gradcheck(lambda x, w, b, c: module(w, b)(x, c, True, offsets), leaves)


@pytest.mark.parametrize("W", [4, 5])
@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 9], [0, 9, 9]])
def test_packed_edges(device, offsets, W):
    x, weight, bias, cache, dy, dstate = make(
        1, 9, 24, W, device, torch.float32, N=len(offsets) - 1
    )
    check(x, weight, bias, cache, dy, dstate, offsets)
    check(x[:, :0], weight, bias, cache, dy[:, :0], dstate, [0] * len(offsets))


@pytest.mark.parametrize("B, T", [(0, 3), (0, 0), (2, 0)])
def test_nothing_to_convolve(device, B, T):
    check(*make(B, T, 24, 4, device, torch.float32))


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


@pytest.mark.parametrize("given", [True, False], ids=["all inputs", "least inputs"])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("W", [4, 5])
def test_opcheck(device, W, packed, requires_grad, given):
    x, weight, bias, cache, dy, dstate = make(
        1, 6, 8, W, device, torch.float32, layout="slice of a projection", N=2 if packed else 1
    )
    offsets = torch.tensor([0, 2, 5], device=device) if packed else None
    leaves = [x, weight, *((bias, cache) if given else (None, None))]
    leaves = [None if t is None else t.requires_grad_(requires_grad) for t in leaves]
    torch.library.opcheck(ops.short_convolution_fwd.default, (*leaves, offsets, given))
    if not requires_grad:
        inputs = (dy, dstate if given else None, *leaves, offsets)
        torch.library.opcheck(ops.short_convolution_bwd.default, inputs)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_it_is_the_operator_in_one_graph_for_many_lengths(packed):
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    conv = ShortConvolution(8, 4, True)
    compiled = torch.compile(conv, fullgraph=True, dynamic=True, backend=backend)
    for T in (7, 5, 12):
        x = normal(1, T, 8, seed=1, dtype=torch.float32)
        offsets = torch.tensor([0, 2, T - 1]) if packed else None
        cache = normal(2 if packed else 1, 8, 4, seed=2, dtype=torch.float32)
        for got, wanted in zip(
            compiled(x, cache, True, offsets), conv(x, cache, True, offsets), strict=True
        ):
            assert torch.equal(got, wanted)
    assert len(graphs) == 1
    assert ops.short_convolution_fwd.default in graphs[0]


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


def test_inductor(device):
    conv = ShortConvolution(40, 4, True).to(device)
    compiled = torch.compile(conv, fullgraph=True, dynamic=True)
    for T in (9, 12):
        found = []
        for function in (compiled, conv):
            wide = normal(2, T, 120, seed=1, device=device, dtype=torch.float32).requires_grad_()
            cache = normal(2, 40, 4, seed=2, device=device, dtype=torch.float32).requires_grad_()
            y, state = function(wide[..., 40:80], cache, True)
            loss = y.square().sum() + state.sin().sum()
            gradients = torch.autograd.grad(loss, [wide, cache, *conv.parameters()])
            found.append((y, state, *gradients))
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted)


def test_parameters_are_those_of_a_convolution():
    conv = ShortConvolution(24, 3, True)
    x = normal(2, 9, 24, seed=1, dtype=torch.float32)
    plain = torch.nn.Conv1d.forward(conv, x.mT)[..., :9].mT
    assert_close(conv(laid_out(x, "sliced"))[0], torch.nn.functional.silu(plain), 1e-6)
