"""The losses of gla_ext.hf's language model, by FLA's flags."""

import pytest
import torch
from common import assert_close
from models import make_ids

pytest.importorskip("transformers")
from hf_models import make_model


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("num_items_in_batch", [None, 7])
def test_no_logits_beside_the_linear_loss(num_items_in_batch, training):
    model, ids = make_model().train(training), make_ids()
    linear = make_model(fuse_cross_entropy=False, fuse_linear_cross_entropy=True).train(training)
    linear.load_state_dict(model.state_dict())
    found, expected = (
        m(ids, labels=ids, num_items_in_batch=num_items_in_batch) for m in (linear, model)
    )
    assert found.logits is None and expected.logits is not None
    torch.testing.assert_close(found.loss, expected.loss)
    assert linear(ids).logits is not None
    gradients = (
        torch.autograd.grad(y.loss, list(m.parameters()))
        for y, m in ((found, linear), (expected, model))
    )
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_loss_by_torch_leaves_the_logits():
    model, ids = make_model(fuse_cross_entropy=False).train(), make_ids()
    output = model(ids, labels=ids)
    before = output.logits.detach().clone()
    output.loss.backward()
    assert torch.equal(output.logits, before)


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


def test_metrics_beside_the_linear_loss(tmp_path):
    """As the page says: evaluation has logits if config has no linear loss by then."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    rows = [{"input_ids": torch.arange(3, 19), "labels": torch.arange(3, 19)}] * 2
    model = make_model(fuse_cross_entropy=False, fuse_linear_cross_entropy=True)
    model.config.fuse_linear_cross_entropy = False
    options = transformers.TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    trainer = transformers.Trainer(
        model,
        options,
        eval_dataset=rows,
        compute_metrics=lambda p: {"rows": len(p.predictions.argmax(-1))},
    )
    assert trainer.evaluate()["eval_rows"] == 2
