"""The losses of gla_ext.hf's language model, by FLA's flags."""

import pytest
import torch
from common import assert_close
from models import make_ids

pytest.importorskip("transformers")
from hf_models import make_model


def test_both_are_refused():
    with pytest.raises(ValueError, match="at most one of fuse_cross_entropy and fuse_linear_cross"):
        make_model(fuse_linear_cross_entropy=True)


def test_gradients_pass_hidden_states_beside_a_mask():
    model, ids = make_model().double(), make_ids(T=12)
    mask = (torch.arange(12) >= torch.tensor([[5], [0]])).long()
    out = model(ids, attention_mask=mask, labels=ids, output_hidden_states=True)
    for x in out.hidden_states:
        x.retain_grad()
    out.loss.backward()
    assert torch.equal(out.logits, model(ids, attention_mask=mask).logits)
    alone = model(ids[1:], output_hidden_states=True)
    for x in alone.hidden_states:
        x.retain_grad()
    targets = torch.nn.functional.pad(ids[1:, 1:], (0, 1), value=-100)
    loss = torch.nn.functional.cross_entropy(
        alone.logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    (loss / 22).backward()
    for x, y in zip(out.hidden_states, alone.hidden_states, strict=True):
        assert x.grad.any()
        assert_close(x.grad[1:], y.grad, 1e-9)


def test_metrics_beside_the_linear_loss(arguments):
    """As the page says: evaluation has logits if config has no linear loss by then."""
    transformers = pytest.importorskip("transformers")
    rows = [{"input_ids": torch.arange(3, 19), "labels": torch.arange(3, 19)}] * 2
    model = make_model(fuse_cross_entropy=False, fuse_linear_cross_entropy=True)
    model.config.fuse_linear_cross_entropy = False
    trainer = transformers.Trainer(
        model,
        arguments(),
        eval_dataset=rows,
        compute_metrics=lambda p: {"rows": len(p.predictions.argmax(-1))},
    )
    assert trainer.evaluate()["eval_rows"] == 2
