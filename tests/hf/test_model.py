"""`gla_ext.hf` in the hands of transformers: files, generate, checkpointing, Trainer, padding.

Equal bits (see common.py): tokens, and the same calls on weights that were saved.
"""

import sys

import pytest
import torch
from common import assert_close
from models import RecordModes, make_ids
from source_tree import run

pytest.importorskip("transformers")

import transformers
from hf_models import HYBRID, MAJOR, PADDED, TINY, make_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from gla_ext import batch_invariant, hf
from gla_ext.cache import GLACache
from gla_ext.model import GLAForCausalLM, blocks, checkpoint

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
DTYPE = "dtype" if MAJOR >= 5 else "torch_dtype"


def core(tmp_path, of: hf.GLAForCausalLM) -> GLAForCausalLM:
    """The model as gla_ext's own class reads its files."""
    of.save_pretrained(tmp_path)
    return checkpoint.load_model(tmp_path)


@pytest.mark.slow
def test_import_without_transformers_says_what_to_install():
    code = "import sys; sys.modules['transformers'] = None; import gla_ext.hf"
    last = run(sys.executable, "-c", code).stderr.splitlines()[-1]
    assert last.startswith("ImportError: gla_ext.hf needs transformers 4.55 or newer: pip install")


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, HYBRID], ids=str)
def test_files(tmp_path, options):
    ours, tied = make_model(**options), "tie_word_embeddings" in options
    own = core(tmp_path, ours)
    assert {x.name for x in tmp_path.glob("*.safetensors")} == {"model.safetensors"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is hf.GLAForCausalLM
    assert (again.lm_head.weight is again.model.embeddings.weight) == tied
    logits = ours(make_ids()).logits
    assert torch.equal(again(make_ids()).logits, logits)
    assert torch.equal(own(make_ids()).logits, logits)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is hf.GLAConfig and config.attn == ours.config.attn
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is hf.GLAModel
    assert torch.equal(again.lm_head(body(make_ids()).last_hidden_state), logits)
    own.save_pretrained(tmp_path / "own")
    back = hf.GLAForCausalLM.from_pretrained(tmp_path / "own")
    assert torch.equal(back(make_ids()).logits, logits)
    ours.resize_token_embeddings(40)
    assert ours.config.vocab_size == 40
    assert ours(make_ids()).logits.shape == (2, 70, 40)
    assert (ours.lm_head.weight is ours.model.embeddings.weight) == tied
    ours.bfloat16().save_pretrained(tmp_path)
    again = hf.GLAForCausalLM.from_pretrained(tmp_path, **{DTYPE: torch.bfloat16})
    assert {x.dtype for x in again.parameters()} == {torch.bfloat16}
    assert again(make_ids()).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"use_gv": True},
        {"use_gk": False},
        {"hidden_act": "powlu"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_are_not_built_pass_through_files_and_are_refused_by_name(tmp_path, options):
    hf.GLAConfig(**TINY | options).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    ((name, value),) = options.items()
    assert getattr(config, name) == value
    for build in (hf.GLAModel, hf.GLAForCausalLM):
        with pytest.raises(NotImplementedError, match=f"GLAConfig: {name} = .* not implemented"):
            build(config)


def test_initial_weights():
    weights = make_model(hidden_size=64, vocab_size=500, initializer_range=0.02).state_dict()
    for name, weight in weights.items():
        if weight.ndim == 1:
            assert (weight == (0 if name.endswith("bias") else 1)).all(), name
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.15), name


def test_forward_is_that_of_the_core_model(tmp_path):
    ours, ids = make_model(), make_ids()
    own = core(tmp_path, ours)
    labels = ids.clone()
    labels[0, :40] = -100
    expected = own(ids, labels=labels)
    out = ours(ids, labels=labels, output_hidden_states=True)
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(ours.lm_head(out.hidden_states[-1]), out.logits)
    assert torch.equal(out.hidden_states[0], ours.model.embeddings(ids))
    assert len(out.hidden_states) == 3
    embedded = ours(inputs_embeds=ours.get_input_embeddings()(ids))
    assert torch.equal(embedded.logits, out.logits)
    counted = (labels[:, 1:] != -100).sum()
    assert_close(ours(ids, labels=labels, num_items_in_batch=counted).loss, out.loss, 1e-6)
    assert_close(ours(ids, labels=labels, num_items_in_batch=7).loss, out.loss * counted / 7, 1e-6)
    loss, logits, cache = ours(ids, labels=labels, return_dict=False)
    assert torch.equal(loss, out.loss)
    assert isinstance(cache, GLACache)
    assert_close(ours(ids, logits_to_keep=3).logits, logits[:, -3:], 1e-6)
    with pytest.raises(ValueError, match="logits_to_keep to be at least 0, got -2"):
        ours(ids, logits_to_keep=-2)
    kept = torch.tensor([0, 5])
    assert_close(ours(ids, logits_to_keep=kept).logits, logits[:, kept], 1e-6)


def test_cache_follows_the_mode_and_the_configuration():
    ours, ids = make_model(), make_ids()
    assert ours(ids).past_key_values.get_seq_length() == 70
    assert ours(ids, use_cache=False).past_key_values is None
    assert ours.train()(ids).past_key_values is None
    assert make_model(use_cache=False)(ids).past_key_values is None


def test_errors():
    ours, ids = make_model(), make_ids()
    with pytest.raises(ValueError, match="one of input_ids and inputs_embeds, got none"):
        ours()
    with pytest.raises(ValueError, match="one of input_ids and inputs_embeds, got both"):
        ours(ids, inputs_embeds=torch.zeros(2, 70, 16))
    with pytest.raises(NotImplementedError, match="output_attentions"):
        ours(ids, output_attentions=True)
    with pytest.raises(ValueError, match="past_key_values of 3 sequences, got 2"):
        ours(make_ids(B=3, T=4), past_key_values=ours(ids).past_key_values)


def test_wrong_attn_is_refused_when_it_is_set():
    with pytest.raises(ValueError, match="layers of attn from 0 to 1, got 2"):
        hf.GLAConfig(num_hidden_layers=2, attn={"layers": [2], "num_heads": 2})
    config = hf.GLAConfig(num_hidden_layers=3)
    with pytest.raises(TypeError, match="attn to be a dict or a list of dicts, got 5"):
        config.attn = 5
    config.attn = HYBRID["attn"]
    assert config.to_dict()["attn"][0]["num_kv_heads"] == 2


@pytest.mark.parametrize("options", [{}, {"use_short_conv": True, "num_kv_heads": 1}], ids=str)
def test_padding_is_packed_once_a_model_and_counts_as_no_token(monkeypatch, options):
    ours, ids = make_model(**options), make_ids(T=12)
    calls = []
    packed_slots = blocks.packed_slots
    monkeypatch.setattr(blocks, "packed_slots", lambda x: calls.append(x) or packed_slots(x))
    out = ours(ids, attention_mask=PADDED, output_hidden_states=True)
    assert len(calls) == 1
    alone = ours(ids[:1, 5:], output_hidden_states=True)
    assert_close(out.logits[:1, 5:], alone.logits, 1e-5)
    assert_close(out.logits[1:], ours(ids[1:]).logits, 1e-5)
    for padded, whole in zip(out.hidden_states, alone.hidden_states, strict=True):
        assert_close(padded[:1, 5:], whole, 1e-5)
    assert out.past_key_values.get_seq_length() == 12
    for layer, states in zip(alone.past_key_values, out.past_key_values, strict=True):
        assert_close(states["recurrent_state"][:1], layer["recurrent_state"], 1e-5)


@pytest.mark.slow
def test_compiles_whole_with_a_mask():
    ours, counter = make_model(num_hidden_layers=1), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for T in (12, 20, 31):
        ids, mask = make_ids(T=T), (torch.arange(T) >= torch.tensor([[5], [0]])).long()
        arguments = {"attention_mask": mask, "labels": ids, "use_cache": False}
        actual, expected = compiled(ids, **arguments), ours(ids, **arguments)
        assert_close(actual.logits, expected.logits, 1e-5)
        assert_close(actual.loss, expected.loss, 1e-5)
    assert counter.frame_count <= 2


def test_greedy_generation_is_that_of_the_core_model(tmp_path):
    ours, ids = make_model(), make_ids(T=12)
    own = core(tmp_path, ours)
    expected = own.generate(ids, 6, 0, attention_mask=PADDED)
    assert torch.equal(ours.generate(ids, attention_mask=PADDED, **GREEDY), expected)
    without = ours.generate(ids, attention_mask=PADDED, use_cache=False, **GREEDY)
    assert torch.equal(without, expected)
    alone = ours.generate(ids[:1, 5:], **GREEDY)
    assert torch.equal(alone[:, 7:], expected[:1, 12:])


CACHES = ("past_key_values", "cache")


def make_cache(model, ids):
    """After the first eight tokens."""
    return model(ids[:, :8]).past_key_values


def test_the_cache_has_two_names():
    """transformers calls past_key_values cache from 5.24 on."""
    ours, ids = make_model(), make_ids(B=1, T=12)
    later = {name: ours(ids[:, 8:], **{name: make_cache(ours, ids)}) for name in CACHES}
    assert torch.equal(later["cache"].logits, later["past_key_values"].logits)
    assert not torch.equal(later["cache"].logits, ours(ids[:, 8:]).logits)
    with pytest.raises(ValueError, match="expected past_key_values or cache, which is the same"):
        ours(ids[:, 8:], **{name: make_cache(ours, ids) for name in CACHES})


@pytest.mark.parametrize("options", [{}, HYBRID], ids=["GLA", "hybrid"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(use_reentrant, options):
    ours, ids = make_model(**options).train(), make_ids(T=12)

    def gradients():
        ours.zero_grad()
        ours(ids, attention_mask=PADDED, labels=ids).loss.backward()
        return {name: x.grad.clone() for name, x in ours.named_parameters()}

    expected = gradients()
    blocks, calls = ours.model.layers, []
    blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    ours.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for name, gradient in gradients().items():
        assert_close(gradient, expected[name], 1e-6, name=name)
    assert len(calls) == 2  # forward, and again in backward
    ours.gradient_checkpointing_disable()
    gradients()
    assert len(calls) == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_recomputes_in_the_mode_of_forward(use_reentrant):
    ours, ids = make_model(num_hidden_layers=1).train(), make_ids(T=12)
    ours.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    record = RecordModes()
    with record:
        with batch_invariant():
            loss = ours(ids, labels=ids).loss
        loss.backward()
    assert record.calls == [("fwd", True), ("fwd", True), ("bwd", True)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer(tmp_path, arguments, checkpointing):
    given = arguments(
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
    )
    ids = make_ids(B=4, T=12)
    labels = ids.clone()
    labels[:, 0] = -100  # Trainer counts it, and nothing predicts it
    rows = [
        {"input_ids": x, "labels": y, "attention_mask": PADDED[1]}
        for x, y in zip(ids, labels, strict=True)
    ]
    ours = make_model()
    before = ours(ids, labels=labels).loss
    trainer = transformers.Trainer(ours, given, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    # Two micro-batches make the step's mean, and not twice that.
    assert losses[0] == pytest.approx(before.item(), rel=1e-3)
    evaluated = next(x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x)
    assert evaluated < losses[1] < losses[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    trained = ours.eval().cpu()
    assert torch.equal(again(ids).logits, trained(ids).logits)
