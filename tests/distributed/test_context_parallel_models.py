"""Layers and language models on one rank's tokens: outputs, loss and gradients of one process."""

import pytest
import torch
from common import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from models import EVERY, make_ids, make_layer, make_model, make_x
from ranks import local, tokens_of
from torch.nn.parallel import DistributedDataParallel

from gla_ext.cache import GLACache
from gla_ext.distributed import build_cp_context
from gla_ext.distributed.loss import next_labels
from gla_ext.model.loss import next_token_loss
from gla_ext.ops._collectives import all_sum

CPU = torch.device("cpu")
CUTS = {
    "even": ((20, 20, 20), None),
    "packed": ((20, 20, 20), (3, 30, 1, 22)),
    "a sequence's end at a cut": ((20, 20, 20), (20, 25, 15)),
    "parts shorter than the halo": ((1, 2, 0, 57), (2, 50, 8)),
    "rows in short parts": ((3, 0, 56, 1), None),
}
each = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)


def context_of(group, cut):
    lengths, sequences = cut
    offsets = None if sequences is None else torch.tensor([0, *sequences]).cumsum(0)
    context = build_cp_context(offsets, group, lengths=lengths)
    return context, tokens_of(lengths, context.rank)


def offsets_of(cut):
    return None if cut[1] is None else torch.tensor([0, *cut[1]]).cumsum(0)


def run_layer(group, cut, options):
    context, tokens = context_of(group, cut)
    layer = make_layer(**options)
    x = local(make_x(B=1 if cut[1] else 2, T=60), tokens).requires_grad_()
    do = local(make_x(B=x.shape[0], T=60, seed=2), tokens)
    cache = GLACache()
    o, *_ = layer(x, cp_context=context, past_key_values=cache, use_cache=True)
    o.backward(do)
    gradients = [all_sum(p.grad, group.group_name) for p in layer.parameters()]
    rows = context.cut(x.shape[1], CPU).sequences
    return o.detach(), x.grad, tokens, gradients, rows, cache.states[0]


@each
def test_layer(pool, cut):
    options = EVERY | {"hidden_size": 24, "layer_idx": 0}
    layer, x = make_layer(**options), make_x(B=1 if cut[1] else 2, T=60).requires_grad_()
    cache = GLACache()
    o, *_ = layer(x, cu_seqlens=offsets_of(cut), past_key_values=cache, use_cache=True)
    o.backward(make_x(B=x.shape[0], T=60, seed=2))
    N = len(cut[1]) if cut[1] else 2
    state = torch.zeros_like(cache[0]["recurrent_state"])
    convolved = [torch.zeros_like(c) for c in cache[0]["conv_state"]]
    for found, dx, tokens, gradients, rows, entry in pool(
        run_layer, cut, options, ranks=len(cut[0])
    ):
        end = sum(cut[1] or (60,))  # after it are no sequences
        kept = range(tokens.start, min(tokens.stop, end))
        for mine, whole in ((found, o.detach()), (dx, x.grad)):
            assert_close(mine[:, : len(kept)], local(whole, kept), 1e-12, 1e-14)
        for gradient, parameter in zip(gradients, layer.parameters(), strict=True):
            assert_close(gradient, parameter.grad, 1e-11)
        index = torch.tensor(list(rows) if cut[1] else list(range(N)), dtype=torch.int64)
        state.index_add_(0, index, entry["recurrent_state"])
        for total, mine in zip(convolved, entry["conv_state"], strict=True):
            total.index_add_(0, index, mine)
    assert_close(state, cache[0]["recurrent_state"], 1e-12)
    for total, whole in zip(convolved, cache[0]["conv_state"], strict=True):
        assert_close(total, whole, 1e-12)


def run_model(group, cut, make, checkpointing):
    context, tokens = context_of(group, cut)
    model = make(torch.float64, use_short_conv=True).train()
    if checkpointing:
        model.model.gradient_checkpointing = True
    ids = local(make_ids(B=1 if cut[1] else 2, T=60), tokens)
    labels = ids.masked_fill(ids == 7, -100)
    output = model(ids, labels=labels, cp_context=context)
    own_logits = output.logits.detach().clone()  # backward writes over them
    output.loss.backward()
    size = context.size  # DDP and FSDP2 average
    gradients = [all_sum(p.grad, group.group_name) / size for p in model.parameters()]
    return output.loss.detach(), own_logits, tokens, gradients


@each
def test_language_model(pool, cut):
    model = make_model(torch.float64, use_short_conv=True).train()
    ids = make_ids(B=1 if cut[1] else 2, T=60)
    labels = ids.masked_fill(ids == 7, -100)
    expected = model(ids, labels=labels, cu_seqlens=offsets_of(cut))
    whole_logits = expected.logits.detach().clone()
    expected.loss.backward()
    for loss, logits, tokens, gradients in pool(
        run_model, cut, make_model, True, ranks=len(cut[0])
    ):
        assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
        if cut[1] is None or sum(cut[1]) == 60:
            assert_close(logits, local(whole_logits, tokens), 1e-12)
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert_close(gradient, parameter.grad, 1e-11)


def run_without_labels(group):
    """A rank none of whose labels counts."""
    context = build_cp_context(None, group)
    model = make_model(torch.float64)
    ids = make_ids(B=1, T=20).split(10, 1)[context.rank]
    labels = ids if context.rank else torch.full_like(ids, -100)
    labels = labels.clone()
    labels[:, 0] = -100
    loss = model(ids, labels=labels, cp_context=context).loss
    loss.backward()
    return loss.item(), [p.grad.isfinite().all().item() for p in model.parameters()]


def test_a_rank_without_counted_labels(pool):
    model, ids = make_model(torch.float64), make_ids(B=1, T=20)
    labels = ids.clone()
    labels[:, :11] = -100
    expected = model(ids, labels=labels).loss.item()
    for loss, finite in pool(run_without_labels, ranks=2):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert all(finite)


def run_items(group):
    """The loss of a micro-batch of a step whose labels are counted beforehand, and under DDP."""
    context = build_cp_context(None, group)
    ids = make_ids(B=2, T=24)
    mine = ids.chunk(context.size, 1)[context.rank]
    model = make_model(torch.float64).train()
    logits = model(mine, cp_context=context).logits
    counted = next_token_loss(logits, mine, 100, cp_context=context)
    model = DistributedDataParallel(model, process_group=group)
    loss = model(mine, labels=mine, cp_context=context).loss
    loss.backward()
    return counted.item(), loss.item(), [p.grad for p in model.parameters()]


def test_counted_items_and_ddp(pool):
    ids, model = make_ids(B=2, T=24), make_model(torch.float64).train()
    counted = next_token_loss(model(ids).logits, ids, 100).item()
    loss = model(ids, labels=ids).loss
    loss.backward()
    for *found, gradients in pool(run_items):
        assert found == pytest.approx([counted, loss.item()], rel=1e-12)
        for mine, parameter in zip(gradients, model.parameters(), strict=True):
            assert_close(mine, parameter.grad, 1e-11)


def run_next_labels(group, labels, lengths, offsets):
    context = build_cp_context(offsets, group, lengths=lengths)
    tokens = tokens_of(lengths, context.rank)
    return next_labels(local(labels, tokens), context), tokens


@given(data=st.data())
@settings(max_examples=30)
def test_the_label_across_any_cut(pool, data):
    """Parts without tokens in between, sequences of one token, and some that end at a cut."""
    ranks, tokens = data.draw(st.integers(1, 4)), st.integers(0, 6)
    lengths = tuple(data.draw(st.lists(tokens, min_size=ranks, max_size=ranks)))
    lengths = lengths if sum(lengths) else (2, *lengths[1:])
    T, offsets = sum(lengths), None
    if data.draw(st.booleans()):
        cuts = data.draw(st.lists(st.integers(0, T), max_size=5))
        offsets = torch.tensor([0, *sorted(cuts), T])
    labels = torch.arange(T).repeat(1 if offsets is not None else 2, 1)
    expected = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    if offsets is not None:
        ends = offsets[1:] - 1
        expected[:, ends[ends >= 0]] = -100
    for found, tokens in pool(run_next_labels, labels, lengths, offsets, ranks=ranks):
        assert torch.equal(found, local(expected, tokens))
