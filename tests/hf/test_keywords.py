"""Every keyword that transformers 5.24 and FLA 0.6.0 know: used, without effect, or refused."""

import inspect

import pytest
import torch
from common import assert_close
from models import make_ids

pytest.importorskip("transformers")

import transformers
from hf_models import make_model
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import TransformersKwargs

from gla_ext.layers._options import OF_MODELS

KINDS = ("GLAModel", "GLAForCausalLM")
# Keywords of transformers' and FLA's models, with what they may hold in a call of 2 rows of 12.
VALUES = {
    "num_items_in_batch": 22,
    "output_hidden_states": False,
    "output_attentions": False,
    "output_router_logits": False,
    "cu_seq_lens_q": None,
    "cu_seq_lens_k": None,
    "max_length_q": 12,
    "max_length_k": 12,
    "position_ids": torch.arange(12)[None],
    "is_causal": True,
    "seq_idx": torch.zeros(1, 12, dtype=torch.int32),
    "cache_position": torch.arange(12),
    "token_type_ids": torch.zeros(2, 12, dtype=torch.int64),
    "logits_to_keep": 0,
    "return_dict": True,
    "use_cache": False,
    "past_key_values": None,
    "cache": None,
    "attention_mask": torch.ones(2, 12, dtype=torch.int64),
    "cu_seqlens": None,
}


def names_elsewhere():
    """What the forward of transformers' Llama and of FLA's model name, and TransformersKwargs."""
    names = set(getattr(TransformersKwargs, "__annotations__", ()))
    for forward in (transformers.LlamaForCausalLM.forward, transformers.LlamaModel.forward):
        names |= set(inspect.signature(forward).parameters)
    try:
        from fla.models.modeling_utils import FLAForCausalLM
    except ImportError:
        pass
    else:
        names |= set(inspect.signature(FLAForCausalLM.forward).parameters)
    names -= {"cumulative_seqlens_q", "cumulative_seqlens_k"}  # of the engine in 4.55
    return names - {"self", "input_ids", "inputs_embeds", "labels", "kwargs"}


def test_all_of_them_are_here():
    assert names_elsewhere() <= VALUES.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VALUES)
@torch.no_grad()
def test_a_known_one_changes_nothing_where_it_says_nothing(kind, name):
    model, ids = make_model(kind=kind), make_ids(T=12)
    assert_close(model(ids, **{name: VALUES[name]})[0], model(ids)[0], 1e-6)


@pytest.mark.parametrize("kind", [*KINDS, "GLAForSequenceClassification"])
def test_others_are_refused_by_name(kind):
    model = make_model(kind=kind, pad_token_id=0)
    for name in ("lables", "head_mask", "encoder_hidden_states", "ignore_index"):
        with pytest.raises(TypeError, match=f"expected keywords that are known, got '{name}'"):
            model(make_ids(T=12), **{name: torch.ones(2)})
    with pytest.raises(NotImplementedError, match="expected is_causal to be True, got False"):
        model(make_ids(T=12), is_causal=False)


@pytest.mark.parametrize("layers", [None, [0, 1]], ids=["GLA", "attention"])
def test_layers_refuse_by_name_too(layers):
    attn = layers and {"layers": layers, "num_heads": 2}
    layer, x = make_model(attn=attn).model.layers[0].attn, torch.randn(1, 5, 16)
    with torch.no_grad():
        expected = layer(x)[0]
        assert torch.equal(layer(x, **dict.fromkeys(OF_MODELS, 5), cache=None)[0], expected)
    for name in ("cu_seq_lens_q", "seq_idx", "cache", "mask"):
        with pytest.raises(TypeError, match=f"expected keywords that are known, got '{name}'"):
            layer(x, **{name: torch.ones(2)})


def test_generate_refuses_what_forward_does():
    with pytest.raises(ValueError, match="not used by the model"):
        make_model().generate(make_ids(T=4), lables=make_ids(T=4), max_new_tokens=2)


LOSSES = {
    "fused": {},
    "by torch": {"fuse_cross_entropy": False},
    "linear": {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True},
}


@pytest.mark.parametrize("count", [None, 7])
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_shifted_labels(options, count):
    model, ids = make_model(**options), make_ids(T=12)
    shifted = ids.roll(-1, 1)
    shifted[0, 3] = -100
    out = model(ids, shift_labels=shifted, labels=ids, num_items_in_batch=count)
    assert (out.logits is None) == ("fuse_linear_cross_entropy" in options)
    logits = model(ids).logits
    expected = ForCausalLMLoss(logits, None, 31, num_items_in_batch=count, shift_labels=shifted)
    assert_close(out.loss, expected, 1e-6)
    assert torch.equal(model(ids, shift_labels=shifted, num_items_in_batch=count).loss, out.loss)
    assert model(ids, labels=ids, shift_labels=torch.full_like(ids, -100)).loss.isnan()
    positions = (torch.arange(12) % 6)[None]  # packed rows too: they show where sequences start
    packed = model(ids, shift_labels=shifted, position_ids=positions).loss
    logits = model(ids, position_ids=positions).logits
    assert_close(packed, ForCausalLMLoss(logits, None, 31, shift_labels=shifted), 1e-6)
    with pytest.raises(ValueError, match=r"labels to have shape \[2, 12\], got \[2, 11\]"):
        model(ids, shift_labels=ids[:, 1:])


def test_a_loss_function_is_called_as_by_transformers():
    seen = []

    def loss(*args, **kwargs):
        seen.append((args, kwargs))
        return kwargs["logits"].sum()

    calls = [{"labels": make_ids(T=12)}]
    calls.append(calls[0] | {"num_items_in_batch": 5, "shift_labels": make_ids(T=12), "weights": 3})
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16,
            num_attention_heads=2,
            num_hidden_layers=1,
            vocab_size=31,
            intermediate_size=24,
        )
    )
    for call in calls:
        for model in (make_model(fuse_linear_cross_entropy=True, fuse_cross_entropy=False), llama):
            model.loss_function = loss
            out = model(make_ids(T=12), **call)
            assert torch.equal(out.loss, out.logits.sum())
        (args, ours), (theirs_args, theirs) = seen
        assert args == theirs_args == () and ours.keys() == theirs.keys()
        assert ours["vocab_size"] == theirs["vocab_size"] == 31
        assert all(ours[name] is theirs[name] for name in ours.keys() - {"logits"} if name in call)
        seen.clear()
    assert model(make_ids(T=12)).loss is None and not seen
    ours = make_model()
    ours.loss_function = loss
    with pytest.raises(NotImplementedError, match="expected is_causal to be True"):
        ours(make_ids(T=12), labels=make_ids(T=12), is_causal=False)
    with pytest.raises(NotImplementedError, match="expected no loss_function beside cp_context"):
        ours(make_ids(T=12), labels=make_ids(T=12), cp_context=object())


def test_a_loss_type_and_where_no_loss_is_computed():
    """Keywords are refused then as ever, and shift_labels alone where the loss needs labels."""
    model, ids = make_model(), make_ids(T=12)
    model.loss_type = "ForMaskedLM"
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
    assert_close(model(ids, labels=ids).loss, expected, 1e-6)
    with pytest.raises(ValueError, match="'ForMaskedLM' to have labels, got shift_labels al"):
        model(ids, shift_labels=ids)
    other = make_model()
    other.loss_function = len
    for one in (model, other):
        with pytest.raises(TypeError, match="expected keywords that are known, got 'lables'"):
            one(ids, lables=ids)
