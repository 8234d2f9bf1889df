"""The loss of language models: values, gradients, and what autograd keeps for it."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import assert_close
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from gla_ext.model import next_token_loss

IGNORED = -100


def draw(dtype=torch.float32, device="cpu", B=3, T=9, vocab=17):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(B, T, vocab, generator=generator)).to(device, dtype)
    labels = torch.randint(vocab, (B, T), generator=generator).to(device)
    labels[0, 2], labels[1, 4:], labels[2, 0] = IGNORED, IGNORED, IGNORED
    return logits, labels


def in_one_row(logits, labels):
    return logits.flatten(0, 1)[None], labels.flatten()[None]


def by_torch(logits, labels, count=None):
    targets = labels[:, 1:].flatten()
    logits = logits[:, :-1].flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits, targets, reduction="sum")
    return total / ((targets != IGNORED).sum() if count is None else count)


def both(loss, logits, labels, *args):
    logits = logits.clone().requires_grad_()
    value = loss(logits, labels, *args)
    return value, torch.autograd.grad(value, logits, torch.tensor(0.7, device=logits.device))[0]


@pytest.mark.parametrize("count", [None, 5, torch.tensor(5)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_value_and_gradient_are_torchs(fused, dtype, count, device):
    logits, labels = draw(dtype, device)
    ours = partial(next_token_loss, fuse_cross_entropy=fused)
    (value, gradient), (expected, of_torch) = (
        both(loss, logits, labels, count) for loss in (ours, by_torch)
    )
    assert value.dtype == torch.promote_types(dtype, torch.float32) and gradient.dtype == dtype
    assert_close(value, expected, 1e-14 if dtype == torch.float64 else 1e-6)
    rounding = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float64: 1e-14}.get(dtype, 1e-6)
    assert_close(gradient, of_torch, rounding)
    assert not gradient[:, -1].any() and not gradient[1, 3:].any()  # what nobody asks for


def test_nothing_counts():
    logits, labels = draw()
    assert next_token_loss(logits[:, :1], labels[:, :1]).isnan()
    for count, isnan in ((None, True), (4, False)):
        value, gradient = both(next_token_loss, logits, torch.full_like(labels, IGNORED), count)
        assert (value.isnan() if isnan else value == 0) and not gradient.any()


def test_nan_is_not_silent():
    logits, labels = draw()
    logits[0, 4, 3] = torch.nan
    value, gradient = both(next_token_loss, logits, labels)
    assert value.isnan()
    assert gradient[0, 4].isnan().all() and not gradient[1:].isnan().any()


def test_the_gradient_can_be_differentiated():
    results = []
    for loss in (next_token_loss, by_torch):
        logits, labels = draw(torch.float64)
        logits.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(logits, labels), logits, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), logits)[0])
    assert_close(*results, 1e-6)


@pytest.mark.parametrize("create_graph", [False, True])
def test_batched_gradients(create_graph, device):
    results = []
    for loss in (next_token_loss, by_torch):
        logits, labels = draw(device=device)
        value, factors = loss(logits.requires_grad_(), labels), torch.tensor([0.7, 0.0, -2.0])
        options = {"is_grads_batched": True, "create_graph": create_graph}
        results.append(torch.autograd.grad(value, logits, factors.to(device), **options)[0])
    assert_close(*results, 1e-6)


def test_forward_mode():
    logits, labels = draw()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits, logits.cos())
        tangent = forward_ad.unpack_dual(next_token_loss(dual, labels)).tangent
    gradient = both(by_torch, logits, labels)[1] / 0.7
    assert_close(tangent, (gradient * logits.cos()).sum(), 1e-5)


def test_gradients_of_samples():
    logits, labels = draw()
    each = torch.func.vmap(torch.func.grad(lambda x, y: next_token_loss(x[None], y[None])))
    expected = torch.stack(
        [both(by_torch, logits[i : i + 1], labels[i : i + 1])[1][0] / 0.7 for i in range(3)]
    )
    assert_close(each(logits, labels), expected, 1e-5)


# Of 27 tokens: every one, some empty sequences, and some tokens of none.
OFFSETS = {"all": [0, 4, 5, 20, 27], "empty": [0, 0, 4, 4, 4, 26, 27, 27], "tail": [0, 4, 20, 20]}


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [None, 5], ids=["mean", "int"])
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
def test_packed_is_each_alone(offsets, count, index, device):
    logits, labels = in_one_row(*draw(device=device))
    labels[0, 4] = 5  # that nothing predicts
    parts = list(itertools.starmap(slice, itertools.pairwise(offsets)))
    counted = count or sum((labels[:, part][:, 1:] != IGNORED).sum() for part in parts)

    def alone(logits, labels):
        total = sum(next_token_loss(logits[:, part], labels[:, part], 1) for part in parts)
        return total / counted

    cu_seqlens = torch.tensor(offsets, dtype=index, device=device)
    value, gradient = both(next_token_loss, logits, labels, count, cu_seqlens)
    expected, of_each = both(alone, logits, labels)
    assert_close(value, expected, 1e-6)
    assert_close(gradient, of_each, 1e-6)


@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 20]], ids=["batch", "packed"])
def test_compiled_whole(offsets):
    logits, labels = draw()
    expected, arguments = by_torch(logits, labels), {}
    if offsets is not None:
        logits, labels = in_one_row(logits, labels)
        arguments["cu_seqlens"] = torch.tensor(offsets)
        expected = next_token_loss(logits, labels, **arguments)
    compiled = torch.compile(next_token_loss, backend="aot_eager", fullgraph=True)
    assert_close(compiled(logits, labels, **arguments), expected, 1e-6)


def test_no_fp32_logits_are_kept():
    logits, labels = draw(torch.bfloat16)
    leaf = logits.requires_grad_()
    saved = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss = next_token_loss(leaf, labels)
    large = [x for x in saved if x.numel() >= leaf.numel()]
    assert [x.data_ptr() for x in large] == [leaf.data_ptr()]
    loss.backward()
    assert leaf.grad is not None


@pytest.mark.cuda
@pytest.mark.parametrize("inplace_backward", [False, True])
def test_memory_is_that_of_the_logits(inplace_backward):
    leaf = torch.randn(2, 2048, 32000, device="cuda").bfloat16().requires_grad_()
    labels = torch.randint(32000, (2, 2048), device="cuda")
    logits = leaf * 1  # not a leaf, which nothing may write over
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = next_token_loss(logits, labels, inplace_backward=inplace_backward)
    torch.autograd.grad(loss, logits)
    more = 0 if inplace_backward else logits.nbytes
    assert torch.cuda.max_memory_allocated() - before < more + (1 << 20)
