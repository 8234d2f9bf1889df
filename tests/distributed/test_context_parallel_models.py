"""Layers and language models on one rank's tokens: outputs, loss and gradients of one process."""

import pytest
import torch
from cuts import FLAS, Cut, assert_same_on_ranks, draw_cut
from hypothesis import given, settings
from hypothesis import strategies as st
from models import EVERY, make_ids, make_layer, make_model, make_x
from torch.nn.parallel import DistributedDataParallel

from gla_ext.cache import GLACache
from gla_ext.distributed.loss import next_labels
from gla_ext.model.loss import next_token_loss

CUTS = {
    "even": Cut((20, 20, 20), B=2, even=True),
    "packed": Cut((20, 20, 20), (3, 30, 1, 22)),
    "a sequence's end at a cut": Cut((20, 20, 20), (20, 25, 15)),
    "parts shorter than the halo": Cut((1, 2, 0, 57), (2, 50, 8)),
    "rows in short parts": Cut((3, 0, 56, 1), B=2),
    "FLA's own context": FLAS,
}


def layer_results(part, options):
    layer, cache = make_layer(**options), GLACache()
    x = part.own(make_x(B=part.B, T=part.T)).requires_grad_()
    o, *_ = layer(x, past_key_values=cache, use_cache=True, **part.options)
    o.backward(part.own(make_x(B=part.B, T=part.T, seed=2)))
    kept = {f"conv {i}": x for i, x in enumerate(cache[0]["conv_state"])}
    kept["state"] = cache[0]["recurrent_state"]
    return {"o": o, "dx": x.grad}, kept, gradients(layer, part.sum)


def gradients(module, over_ranks):
    return {name: over_ranks(p.grad) for name, p in module.named_parameters()}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_layer(pool, cut):
    options = EVERY | {"hidden_size": 24, "layer_idx": 0}
    assert_same_on_ranks(pool, layer_results, cut, options)


def make_hf_model():
    import gla_ext.hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 31}
    config = gla_ext.hf.GLAConfig(
        **sizes, use_short_conv=True, intermediate_size=24, initializer_range=0.3
    )
    return gla_ext.hf.GLAForCausalLM(config).double().train()


def make_core_model():
    model = make_model(torch.float64, use_short_conv=True).train()
    model.model.gradient_checkpointing = True
    return model


def model_results(part, make, unlabelled, ddp):
    """Logits, loss and gradients, and the loss of a micro-batch of a step of 100 labels."""
    model, ids = make(), make_ids(B=part.B, T=part.T)
    labels = ids.masked_fill(ids == 7, -100)
    labels[:, :unlabelled] = -100
    ids, labels = part.own(ids), part.own(labels)
    wrapped = (
        DistributedDataParallel(model, process_group=part.group) if ddp and part.group else model
    )
    output = wrapped(ids, labels=labels, **part.options)
    logits = output.logits.detach().clone()  # backward writes over them
    output.loss.backward()
    counted = next_token_loss(logits, labels, 100, **part.options)
    # DDP and FSDP2 average.
    means = gradients(model, (lambda x: x) if ddp else part.mean)
    return {"logits": logits}, {}, means | {"loss": output.loss, "counted": counted}


FEWER = ("even", "packed", "parts shorter than the halo")
MODELS = {name: (CUTS[name], make_core_model, 0, False) for name in FEWER}
MODELS |= {
    "a rank without labels": (Cut((10, 10), even=True), make_core_model, 11, False),
    "DDP": (Cut((6,) * 4, B=2, even=True), make_core_model, 0, True),
    "transformers": (Cut((12, 12), B=2, even=True), make_hf_model, 0, False),
}


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_language_model(pool, case):
    assert_same_on_ranks(pool, model_results, *case)


def label_results(part, labels, expected):
    if part.group is None:
        return {"labels": expected}, {}, {}
    return {"labels": next_labels(part.own(labels), part.options["cp_context"])}, {}, {}


@given(data=st.data())
@settings(max_examples=25)
def test_the_label_across_any_cut(pool, data):
    """Parts without tokens in between, sequences of one token, and some that end at a cut."""
    cut = draw_cut(data, 6, tail=False)
    labels = torch.arange(sum(cut.lengths)).repeat(cut.B, 1)
    expected = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    if cut.offsets is not None:
        ends = cut.offsets[1:] - 1
        expected[:, ends[ends >= 0]] = -100
    assert_same_on_ranks(pool, label_results, cut, labels, expected, rel=0)
