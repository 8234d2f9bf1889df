"""The losses of gla_ext.hf's language model, by FLA's flags."""

import pytest
import torch
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
