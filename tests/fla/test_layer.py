"""The layer beside FLA's own, every option: outputs, gradients and caches.

Needs flash-linear-attention. Without a GPU its kernels run in Triton's interpreter, which takes its
time over each token: the sequences are short then, and FLA's layer runs its recurrence.
"""

import pytest
import torch
from common import assert_close
from fla_kernels import LAYER_OPTIONS, LAYER_SIZES, import_fla
from fla_layer import layer_class

import gla_ext.fla
from gla_ext import GatedLinearAttention
from gla_ext.cache import GLACache

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHORT = 40 if ON_GPU else 8
BOUNDS = {SHORT: 3e-5} | ({130: 3e-3} if ON_GPU else {})  # beyond 64 FLA's products are tf32
KINDS = ["default", "short conv", "short conv, bias, 3", "all"] if ON_GPU else ["all"]
pytestmark = [pytest.mark.cuda] if ON_GPU else []


@pytest.fixture(autouse=True)
def kernels():
    """FLA, with no kernel tuned."""
    import_fla()
    with torch.compiler.set_stance("force_eager"):  # FLA compiles some of its activations
        yield


def make_pair(**options):
    """FLA's layer and ours with the same weights."""
    torch.manual_seed(0)
    options = LAYER_SIZES | options
    theirs = layer_class()(layer_idx=0, **options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
    ours = GatedLinearAttention(layer_idx=0, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(DEVICE), ours.to(DEVICE)


def make_x(B, T, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, 64, generator=generator).to(DEVICE)


def results_of(layer, x, cache=None, **arguments):
    """Outputs and their gradients by x and every parameter."""
    leaf = x.clone().requires_grad_()
    y = layer(leaf, past_key_values=cache, use_cache=cache is not None, **arguments)[0]
    do = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    leaves = {"x": leaf, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(y, leaves.values(), do)
    return {"y": y, **dict(zip(leaves, gradients, strict=True))}


def assert_same(pair, bound, x, caches=(None, None), calls=None, **arguments):
    """Both layers' results; with `calls` also those of FLA's under `accelerate_fla`."""
    theirs, *others = (
        results_of(layer, x, cache, **arguments) for layer, cache in zip(pair, caches, strict=True)
    )
    if calls is not None:
        calls.clear()
        gla_ext.fla.accelerate_fla()
        try:
            others.append(results_of(pair[0], x, **arguments))
        finally:
            gla_ext.fla.restore_fla()
        recurrent = x.shape[1] <= 64 or pair[0].mode == "fused_recurrent"
        assert calls == ["fused_recurrent_gla" if recurrent else "chunk_gla"]
    for found in others:
        assert found.keys() == theirs.keys()
        for name, expected in theirs.items():
            assert found[name].dtype == expected.dtype
            assert_close(found[name].double(), expected.double(), bound, name=name)


@pytest.mark.parametrize("options", LAYER_OPTIONS.values(), ids=LAYER_OPTIONS)
def test_initial_weights(options):
    """From one seed both draw the same numbers under the same names."""
    weights = []
    for layer in (layer_class(), GatedLinearAttention):
        torch.manual_seed(5)
        weights.append(layer(**(LAYER_SIZES | options)).state_dict())
    theirs, ours = weights
    assert [*ours] == [*theirs]
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype
        assert torch.equal(ours[name], expected), name


@pytest.mark.parametrize("T", BOUNDS)
@pytest.mark.parametrize("options", LAYER_OPTIONS.values(), ids=LAYER_OPTIONS)
def test_outputs_and_gradients(options, T, calls):
    assert_same(make_pair(**options), BOUNDS[T], make_x(2 if ON_GPU else 1, T), calls=calls)


@pytest.mark.parametrize("T", BOUNDS)
@pytest.mark.parametrize("name", KINDS)
def test_padding(name, T, calls):
    mask = (torch.arange(T) >= torch.tensor([[7], [0], [T - 2]])).long().to(DEVICE)
    pair, x = make_pair(**LAYER_OPTIONS[name]), make_x(3, T)
    assert_same(pair, BOUNDS[T], x, calls=calls, attention_mask=mask)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed(name, dtype):
    """With no tokens behind the last offset: what FLA returns for those is not defined."""
    offsets = torch.tensor([0, 1, 3, SHORT // 2, SHORT], dtype=dtype, device=DEVICE)
    x = make_x(1, SHORT)
    assert_same(make_pair(**LAYER_OPTIONS[name]), BOUNDS[SHORT], x, cu_seqlens=offsets)


def assert_same_caches(theirs, ours, bound):
    for a, b in zip(theirs[0]["conv_state"] or (), ours[0]["conv_state"] or (), strict=True):
        assert_close(b, a, bound, name="conv_state")
        assert b.is_contiguous()
    assert_close(ours[0]["recurrent_state"], theirs[0]["recurrent_state"], bound, name="state")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_segments_with_gradients(name):
    pair, caches = make_pair(**LAYER_OPTIONS[name]), (GLACache(), GLACache())
    for index, T in enumerate((SHORT - 3, 2, SHORT)):
        assert_same(pair, BOUNDS[SHORT], make_x(2, T, seed=index), caches)
        assert_same_caches(*caches, BOUNDS[SHORT])
        for cache in caches:
            cache.detach()


@torch.no_grad()
def assert_goes_on(pair, texts, swapped=False):
    """From each text to the next by the caches, one swapped for the other after the first."""
    caches = [GLACache(), GLACache()]
    for index, (x, arguments) in enumerate(texts):
        theirs, ours = (
            layer(x, past_key_values=cache, use_cache=True, **arguments)[0]
            for layer, cache in zip(pair, caches, strict=True)
        )
        assert_close(ours, theirs, BOUNDS[SHORT])
        assert_same_caches(*caches, BOUNDS[SHORT])
        if swapped and index == 0:
            caches.reverse()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("swapped", [False, True])
def test_decoding(name, swapped):
    pair = [layer.eval() for layer in make_pair(**LAYER_OPTIONS[name])]
    texts = [(make_x(2, T, seed=i), {}) for i, T in enumerate((5, 1, 1, 1))]
    assert_goes_on(pair, texts, swapped)


def test_packed_segments_go_on_from_the_cache():
    texts = []
    for i, offsets in enumerate(([0, 4, 5, 9], [0, 1, 3, SHORT], [0, 2, 7, 8])):
        cu_seqlens = torch.tensor(offsets, device=DEVICE)
        texts.append((make_x(1, offsets[-1], seed=i), {"cu_seqlens": cu_seqlens}))
    assert_goes_on(make_pair(**LAYER_OPTIONS["all"]), texts)
