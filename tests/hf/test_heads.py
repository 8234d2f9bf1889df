"""The heads of `gla_ext.hf`: classes of sequences and of tokens, and spans of text.

Equal bits (see common.py): the same calls.
"""

import pytest
import torch
from common import assert_close
from models import make_ids
from torch.nn.functional import cross_entropy, linear

pytest.importorskip("transformers")

import transformers
from hf_models import PADDED, make_model

from gla_ext import hf

PAD = 30
AUTO = {
    "GLAForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "GLAForTokenClassification": transformers.AutoModelForTokenClassification,
    "GLAForQuestionAnswering": transformers.AutoModelForQuestionAnswering,
}
SIZES = {"num_labels": 4, "pad_token_id": PAD}


def states(model, ids, **arguments):
    return model.model(ids, **arguments).last_hidden_state


@pytest.mark.parametrize("name", AUTO)
def test_files(tmp_path, name):
    ours, ids = make_model(kind=name, **SIZES), make_ids(T=12)
    ours.save_pretrained(tmp_path / "own")
    again = AUTO[name].from_pretrained(tmp_path / "own")
    assert type(again) is getattr(hf, name)
    for actual, expected in zip(again(ids)[:1], ours(ids)[:1], strict=True):
        assert torch.equal(actual, expected)
    language = make_model(seed=1)
    language.save_pretrained(tmp_path / "language")
    body = AUTO[name].from_pretrained(tmp_path / "language", **SIZES)
    assert torch.equal(states(body, ids), states(language, ids))
    assert body.get_input_embeddings() is body.model.embeddings
    body.resize_token_embeddings(40)
    assert body.model.embeddings.weight.shape == (40, 16)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_is_classified_by_its_last_token(side):
    ours = make_model(kind="GLAForSequenceClassification", **SIZES)
    ids = make_ids(T=12).clamp_max(PAD - 1)
    mask = PADDED if side == "left" else PADDED.flip(1)
    padded = ids.masked_fill(mask == 0, PAD)
    labels = torch.tensor([3, 1])
    out = ours(padded, attention_mask=mask, labels=labels)
    ends = states(ours, ids[:1][mask[:1] == 1][None]), states(ours, ids[1:])
    expected = torch.cat([linear(x[:, -1], ours.score.weight) for x in ends])
    assert_close(out.logits, expected, 1e-5)
    assert_close(out.loss, cross_entropy(expected, labels), 1e-6)
    out.loss.backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in ours.parameters())
    loss, logits, *_ = ours(padded, attention_mask=mask, labels=labels, return_dict=False)
    assert torch.equal(loss, out.loss)
    assert torch.equal(logits, out.logits)


def test_several_sequences_need_a_pad_token():
    ours, ids = make_model(kind="GLAForSequenceClassification", num_labels=4), make_ids(T=12)
    assert ours.config.pad_token_id is None
    expected = linear(states(ours, ids[:1])[:, -1], ours.score.weight)
    assert_close(ours(ids[:1]).logits, expected, 1e-5)
    with pytest.raises(ValueError, match="no padding token"):
        ours(ids)


def test_tokens_are_classified_also_in_a_packed_row():
    ours, ids = make_model(kind="GLAForTokenClassification", **SIZES), make_ids(B=1, T=12)
    positions = torch.tensor([[*range(5), *range(7)]])
    labels = ids % 4
    labels[0, :2] = -100
    out = ours(ids, position_ids=positions, labels=labels)
    hidden = torch.cat([states(ours, ids[:, :5]), states(ours, ids[:, 5:])], 1)
    expected = linear(hidden, ours.score.weight, ours.score.bias)
    assert_close(out.logits, expected, 1e-5)
    assert_close(out.loss, cross_entropy(expected[0], labels[0]), 1e-6)


def test_spans():
    ours, ids = make_model(kind="GLAForQuestionAnswering", **SIZES), make_ids(T=12)
    starts, ends = torch.tensor([6, 2]), torch.tensor([9, 4])
    out = ours(ids, attention_mask=PADDED, start_positions=starts, end_positions=ends)
    weight, bias = ours.qa_outputs.weight, ours.qa_outputs.bias
    expected = linear(states(ours, ids, attention_mask=PADDED), weight, bias)
    assert_close(out.start_logits, expected[..., 0], 1e-5)
    assert_close(out.end_logits, expected[..., 1], 1e-5)
    losses = [cross_entropy(expected[..., i], x) for i, x in enumerate((starts, ends))]
    assert_close(out.loss, sum(losses) / 2, 1e-6)


@pytest.mark.parametrize("name", ["GLAForSequenceClassification", "GLAForQuestionAnswering"])
def test_heads_that_answer_once_a_row_refuse_packed_ones(name):
    ours, ids = make_model(kind=name, **SIZES), make_ids(B=1, T=12)
    for packed in (
        {"position_ids": torch.tensor([[*range(5), *range(7)]])},
        {"cu_seqlens": torch.tensor([0, 5, 12])},
    ):
        with pytest.raises(NotImplementedError, match=r"packed sequences .* a padded batch"):
            ours(ids, **packed)
    whole = ours(ids, position_ids=torch.arange(12)[None], return_dict=False)[0]
    assert torch.equal(whole, ours(ids, return_dict=False)[0])


def test_weights_of_a_new_head_are_initialised():
    for name in AUTO:
        ours = make_model(kind=name, hidden_size=256, num_labels=64, initializer_range=0.02)
        head = ours.qa_outputs if name == "GLAForQuestionAnswering" else ours.score
        assert head.weight.std().item() == pytest.approx(0.02, rel=0.15)
        assert head.bias is None or (head.bias == 0).all()
