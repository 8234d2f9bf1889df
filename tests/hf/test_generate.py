"""`generate` of transformers, and peft, on `gla_ext.hf`: chunks of a prompt, caches, adapters.

Equal bits (see common.py): tokens.
"""

import pytest
import torch
from common import assert_close
from models import make_ids

pytest.importorskip("transformers")

import transformers
from hf_models import HYBRID, MAJOR, PADDED, make_model

from gla_ext.hf._cache import CACHE

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


KINDS = {
    "GLA": {"use_short_conv": True},
    "hybrid": HYBRID,
    "attention": {"attn": {"layers": [0, 1], "num_heads": 2}},
}
BEAMS, STATIC = {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}
ALIKE = {  # ways of drawing, and what changes none of their tokens
    "greedy": (
        {},
        [
            {},
            *({"prefill_chunk_size": n} for n in (1, 5, 12, 100)),
            STATIC,
            STATIC | {"prefill_chunk_size": 5},
            {"position_ids": (PADDED.cumsum(1) - 1).clamp_min(0)},
        ],
    ),
    "beams": (BEAMS, [{}, {"prefill_chunk_size": 5}, STATIC]),
    "two beams": ({"num_beams": 2, "num_return_sequences": 2}, [{}]),
    "sampled": ({"do_sample": True, "top_k": 5, "num_return_sequences": 3}, [{}]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ALIKE)
def test_tokens_are_those_without_a_cache(kind, way):
    ours, (drawn, options) = make_model(**KINDS[kind]).double(), ALIKE[way]
    results = []
    for given in ({"use_cache": False}, *options):
        torch.manual_seed(3)
        given = GREEDY | drawn | given | {"attention_mask": PADDED}
        results.append(ours.generate(make_ids(T=12), **given))
        assert torch.equal(results[-1], results[0]), given


@pytest.mark.parametrize(("options", "most"), [({}, 12), ({"prefill_chunk_size": 5}, 5)])
def test_every_token_after_the_prompt_is_one_step(monkeypatch, options, most):
    ours, lengths = make_model(), []
    embed = ours.model.embeddings.forward
    monkeypatch.setattr(
        ours.model.embeddings, "forward", lambda x: lengths.append(x.shape[1]) or embed(x)
    )
    ours.generate(make_ids(T=12), attention_mask=PADDED, **GREEDY | options)
    assert (max(lengths), sum(lengths)) == (most, 12 + 5)
    assert lengths[-5:] == [1] * 5


def test_a_cache_of_fla_is_refused():
    cache_utils = pytest.importorskip("fla.models.cache_utils", exc_type=ImportError)
    with pytest.raises(TypeError, match=r"to be a gla_ext\.cache\.GLACache, got Cache"):
        make_model(**HYBRID)(make_ids(), past_key_values=cache_utils.Cache(), use_cache=True)


def test_a_cache_of_keys_and_values_is_refused():
    ours, ids = make_model().double(), make_ids(T=12)
    cache = transformers.DynamicCache()
    with pytest.raises(TypeError, match=r"past_key_values to be a .*GLACache.*got DynamicCache"):
        ours(ids, past_key_values=cache)
    with pytest.raises(TypeError, match="got DynamicCache"):
        ours.generate(ids, past_key_values=cache, **GREEDY)
    with pytest.raises(TypeError, match="got tuple"):
        ours(ids, past_key_values=((torch.zeros(2), torch.zeros(2)),))


def test_beams_from_a_cache_need_it_repeated():
    ours, ids = make_model().double(), make_ids(B=1, T=12)

    def cache():
        return ours(ids[:, :8]).past_key_values

    with pytest.raises(ValueError, match=r"past_key_values of 3 sequences, got 1; .*batch_repeat"):
        ours.generate(ids, past_key_values=cache(), num_beams=3, **GREEDY)
    repeated = cache()
    repeated.batch_repeat_interleave(3)
    actual = ours.generate(ids, past_key_values=repeated, num_beams=3, **GREEDY)
    assert torch.equal(actual, ours.generate(ids, num_beams=3, **GREEDY))


def with_adapter(config, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(
        make_model(**options), getattr(peft, config.pop("kind"))(task_type="CAUSAL_LM", **config)
    ).eval()


def test_prefix_tuning_is_refused():
    sizes = {"num_virtual_tokens": 4, "num_layers": 2, "token_dim": 16, "num_attention_heads": 2}
    tuned = with_adapter({"kind": "PrefixTuningConfig", **sizes})
    with pytest.raises(TypeError, match="got DynamicCache: keys and values, as prefix tuning"):
        tuned(make_ids(T=12))


def test_prompt_tuning_puts_tokens_before_the_prompt():
    sizes = {"num_virtual_tokens": 4, "num_layers": 2, "token_dim": 16, "num_attention_heads": 2}
    tuned, ids = with_adapter({"kind": "PromptTuningConfig", **sizes}), make_ids(T=12)
    before = tuned.get_prompt(batch_size=2)
    base = tuned.get_base_model()
    whole = torch.cat([before, base.model.embeddings(ids)], 1)
    assert_close(tuned(ids).logits, base(inputs_embeds=whole).logits, 1e-6)


def test_lora_on_a_convolution_is_on_its_weight():
    lora = {"kind": "LoraConfig", "r": 8, "target_modules": ["q_conv1d"]}
    with pytest.raises(TypeError, match="LoRA takes its weight, as target_parameters="):
        with_adapter(lora, use_short_conv=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_cache_has_its_step_compiled_once(kind):
    config = transformers.CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager")
    config._compile_all_devices, config.mode = True, None
    ours, ids = make_model(**KINDS[kind]).double(), make_ids(T=12)
    expected = ours.generate(ids, attention_mask=PADDED, **GREEDY)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = GREEDY | {"cache_implementation": "static", "compile_config": config}
    actual = ours.generate(ids, attention_mask=PADDED, **options)
    assert torch.equal(actual, expected)
    # transformers 4 says that it leaves it uncompiled: it does so with caches of its own alone.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == int(MAJOR >= 5)


def test_a_static_cache_does_not_go_back():
    options = GREEDY | {"cache_implementation": "static", "prompt_lookup_num_tokens": 3}
    refusal = NotImplementedError, "activate_past_recording is not implemented"
    if MAJOR < 5:  # it refuses before it asks the cache
        refusal = ValueError, "assisted generate is not supported with Static cache"
    with pytest.raises(refusal[0], match=refusal[1]):
        make_model().generate(make_ids(B=1, T=12), **options)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_a_static_cache_on_cuda(kind):
    """By inductor and CUDA graphs, as transformers compiles there by itself."""
    ours = make_model(hidden_size=64, intermediate_size=96, **KINDS[kind]).cuda()
    ids, options = make_ids(T=12).cuda(), GREEDY | {"attention_mask": PADDED.cuda()}
    expected = ours.generate(ids, **options)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(ours.generate(ids, cache_implementation="static", **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_embeddings_go_on_from_a_cache(kind):
    """As in transformers: inputs_embeds hold all tokens so far, and the new ones pass."""
    ours, ids = make_model(**KINDS[kind]).double(), make_ids(T=12)
    whole = ours.generate(ids, **GREEDY)
    first = ours.generate(ids, return_dict_in_generate=True, **GREEDY | {"max_new_tokens": 2})
    assert torch.equal(first.sequences, whole[:, :14])
    options = GREEDY | {"past_key_values": first[CACHE], "max_new_tokens": 4}
    assert torch.equal(ours.generate(first.sequences, **options), whole)
    expected = whole[:, 12:]
    x = ours.get_input_embeddings()(ids)
    options = GREEDY | {"return_dict_in_generate": True}
    first = ours.generate(inputs_embeds=x, **options | {"max_new_tokens": 2})
    assert torch.equal(first.sequences, expected[:, :2])
    cache = first[CACHE]
    assert cache.get_seq_length() == 13
    x = torch.cat([x, ours.get_input_embeddings()(first.sequences)], 1)
    again = ours.generate(inputs_embeds=x, past_key_values=cache, **options | {"max_new_tokens": 4})
    assert torch.equal(again.sequences, expected[:, 2:])
    with pytest.raises(ValueError, match="a prompt of more tokens than the cache has had, got"):
        ours.generate(inputs_embeds=x, past_key_values=cache, **GREEDY)


def test_embeddings_go_on_where_no_word_says_that_they_are_first():
    """transformers 4 passes no is_first_iteration, and no ids before one is drawn."""
    ours, ids = make_model(), make_ids(T=12)
    x, cache = ours.get_input_embeddings()(ids), ours(ids[:, :10], use_cache=True)[CACHE]
    given = {"past_key_values": cache, "inputs_embeds": x, "cache_position": torch.arange(10, 12)}
    inputs = ours.prepare_inputs_for_generation(ids[:, :0], **given)
    assert torch.equal(inputs["inputs_embeds"], x[:, 10:]) and "input_ids" not in inputs
    given["cache_position"] = torch.arange(12, 13)
    inputs = ours.prepare_inputs_for_generation(ids[:, :1], **given)
    assert torch.equal(inputs["input_ids"], ids[:, :1]) and "inputs_embeds" not in inputs
