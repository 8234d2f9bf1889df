"""Truncated backpropagation and packed documents: `train.segments` and the trainer over it.

Equal bits (see common.py): the same calls.
"""

import pytest
import torch
from models import make_model
from torch.nn import functional as F
from trainers import CORPUS, TEXTS, make_trainer

from gla_ext.train.data import Batches, encode
from gla_ext.train.segments import SegmentedLoss, forward, pack_rows

STREAM = encode(CORPUS.train)


def most_documents(batch_size, seq_len):
    return batch_size * Batches(STREAM, batch_size, seq_len, seed=0).most_documents()


def nats(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_of_bytes(**options):
    return make_model(vocab_size=256, **options).double().train()


def test_the_steps_of_a_window_follow_each_other():
    whole = Batches(STREAM, batch_size=2, seq_len=48, seed=5)
    parts = Batches(STREAM, batch_size=2, seq_len=16, seed=5, segments=3)
    for step in (0, 1, 2):
        rows = [parts(3 * step + i) for i in range(3)]
        for x, expected in zip(zip(*rows, strict=True), whole(step), strict=True):
            assert torch.equal(torch.cat(x, 1), expected)
    with pytest.raises(
        ValueError, match=r"at least segments \* seq_len \+ 1 = 401 tokens, got 286"
    ):
        Batches(STREAM, batch_size=2, seq_len=100, seed=0, segments=4)


@pytest.mark.parametrize("use_short_conv", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_states_handed_on_equal_one_long_sequence(use_short_conv, packed):
    model = model_of_bytes(use_short_conv=use_short_conv)
    batch = Batches(STREAM, batch_size=3, seq_len=16, seed=0, segments=4)
    documents = most_documents(3, 16) if packed else 0
    loss = SegmentedLoss(model, nats, 4, documents)
    losses = torch.stack([loss(step, *batch(step)) for step in range(4)])
    inputs, targets = (torch.cat(x, 1) for x in zip(*map(batch, range(4)), strict=True))
    rows = pack_rows(inputs, most_documents(3, 64)) if packed else None
    whole = forward(model, inputs, None, rows)[0]
    expected = [nats(a, b) for a, b in zip(whole.split(16, 1), targets.split(16, 1), strict=True)]
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-12, atol=1e-12)
    # The next window starts from no state.
    first = forward(model, batch(4)[0], None, pack_rows(batch(4)[0], documents) if packed else None)
    assert torch.equal(loss(4, *batch(4)), nats(first[0], batch(4)[1]))


def test_packed_documents_are_as_each_alone():
    model = model_of_bytes()
    ids = STREAM[:64].long().view(2, 32)  # the second row starts inside a document
    rows = pack_rows(ids, capacity=9)
    assert rows.cu_seqlens.tolist() == [0, 8, 11, 32, 52, 64, 64, 64, 64, 64]
    assert rows.first.tolist() == [0, 3]
    assert rows.last.tolist() == [2, 4]
    assert rows.goes_on.tolist() == [False, True]
    logits = forward(model, ids, None, rows)[0].flatten(0, 1)
    pieces = [
        ids.flatten()[a:b] for a, b in zip(rows.cu_seqlens, rows.cu_seqlens[1:], strict=False)
    ]
    alone = [model(piece[None]).logits[0] for piece in pieces if len(piece)]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_most_documents_is_the_largest_of_all_windows():
    for seq_len in (1, 10, 64):
        windows = (STREAM == 0).unfold(0, seq_len, 1)
        assert most_documents(3, seq_len) == 3 * (1 + windows[:, 1:].sum(1).max().item())


def test_no_gradient_passes_the_end_of_a_segment():
    model = model_of_bytes()
    batch = Batches(STREAM, batch_size=2, seq_len=16, seed=0, segments=2)
    loss = SegmentedLoss(model, nats, 2)
    loss(0, *batch(0))
    states = [
        {"recurrent_state": s["recurrent_state"].clone(), "conv_state": None} for s in loss.states
    ]
    assert all(state["recurrent_state"].abs().max() > 0 for state in states)
    loss(1, *batch(1)).backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    inputs, targets = batch(1)
    nats(forward(model, inputs, states, None)[0], targets).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(got[name], parameter.grad), name
    model.zero_grad()
    whole_inputs, whole_targets = (torch.cat(x, 1) for x in zip(batch(0), batch(1), strict=True))
    nats(model(whole_inputs).logits[:, 16:], whole_targets[:, 16:]).backward()
    others = dict(model.named_parameters())
    assert any(not torch.allclose(got[name], others[name].grad) for name in got)


def test_a_packed_evaluation_is_that_of_each_document_alone(monkeypatch):
    run = make_trainer(packed=True, seq_len=16, layers=2)
    run.held_out = STREAM
    monkeypatch.setattr(run, "evaluation_segment", 50)
    bits = run.evaluate()
    total = 0.0
    for text in TEXTS:
        row = torch.tensor([0, *text])
        with torch.no_grad():
            logits = run.model(row[None, :-1]).logits
        total += F.cross_entropy(logits[0], row[1:], reduction="sum").item()
    size = sum(map(len, TEXTS))
    assert bits == pytest.approx(total / size / torch.tensor(2.0).log().item(), rel=1e-5)


def test_compiled_it_is_the_same(monkeypatch):
    batch = Batches(STREAM, batch_size=2, seq_len=16, seed=0, segments=3)
    model = make_model(vocab_size=256, num_hidden_layers=1).train()
    documents = most_documents(2, 16)
    compiled = torch.compile

    def graph(function, **options):
        return compiled(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", graph)
    runs = [SegmentedLoss(model, nats, 3, documents, compiled=flag) for flag in (True, False)]
    for step in range(3):
        a, b = (run(step, *batch(step)) for run in runs)
        torch.testing.assert_close(a, b)
