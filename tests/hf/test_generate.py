"""`generate` of transformers, and peft, on `gla_ext.hf`: chunks of a prompt, caches, adapters.

Equal bits (see common.py): tokens.
"""

import pytest
import torch
from common import assert_close
from models import make_ids

pytest.importorskip("transformers")

import transformers
from hf_models import PADDED, make_model

from gla_ext.hf._cache import CACHE

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("size", [1, 5, 12, 100])
def test_a_prompt_in_chunks_needs_no_cache(size, options):
    ours, ids = make_model(use_short_conv=True).double(), make_ids(T=12)
    options = GREEDY | options | {"attention_mask": PADDED}
    actual = ours.generate(ids, prefill_chunk_size=size, **options)
    assert torch.equal(actual, ours.generate(ids, **options))


def test_a_prompt_in_chunks_passes_in_chunks(monkeypatch):
    ours, lengths = make_model(), []
    embed = ours.model.embeddings.forward
    monkeypatch.setattr(
        ours.model.embeddings, "forward", lambda x: lengths.append(x.shape[1]) or embed(x)
    )
    ours.generate(make_ids(T=12), prefill_chunk_size=5, **GREEDY)
    assert max(lengths) == 5
    assert sum(lengths) == 12 + 5


def test_positions_of_a_prompt_change_nothing():
    ours, ids = make_model().double(), make_ids(T=12)
    expected = ours.generate(ids, attention_mask=PADDED, **GREEDY)
    positions = (PADDED.cumsum(1) - 1).clamp_min(0)
    options = GREEDY | {"attention_mask": PADDED, "position_ids": positions}
    assert torch.equal(ours.generate(ids, **options), expected)


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


def test_lora_on_a_convolution_is_on_its_weight_and_beside_one_it_runs():
    lora = {"kind": "LoraConfig", "r": 4, "init_lora_weights": False}
    with pytest.raises(TypeError, match="LoRA takes its weight, as target_parameters="):
        with_adapter(lora | {"target_modules": ["q_conv1d"], "r": 8}, use_short_conv=True)
    tuned = with_adapter(lora | {"target_modules": "all-linear"}, use_short_conv=True)
    ids = make_ids(T=12)
    logits = tuned(ids).logits
    assert not torch.equal(logits, make_model(use_short_conv=True)(ids).logits)
    assert_close(tuned.merge_and_unload()(ids).logits, logits, 1e-5)


STATIC = {
    "GLA": {"use_short_conv": True},
    "hybrid": {"attn": {"layers": [1], "num_heads": 2, "window_size": 9}},
    "attention": {"attn": {"layers": [0, 1], "num_heads": 2}},
}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}], ids=str)
@pytest.mark.parametrize("model", STATIC)
def test_a_static_cache(model, options):
    ours, ids = make_model(**STATIC[model]).double(), make_ids(T=12)
    options = GREEDY | options | {"attention_mask": PADDED}
    actual = ours.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(actual, ours.generate(ids, **options))


@pytest.mark.parametrize("model", STATIC)
def test_a_static_cache_has_its_step_compiled_once(model):
    config = transformers.CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager")
    config._compile_all_devices, config.mode = True, None
    ours, ids = make_model(**STATIC[model]).double(), make_ids(T=12)
    expected = ours.generate(ids, attention_mask=PADDED, **GREEDY)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = GREEDY | {"cache_implementation": "static", "compile_config": config}
    actual = ours.generate(ids, attention_mask=PADDED, **options)
    assert torch.equal(actual, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_static_cache_does_not_go_back():
    options = GREEDY | {"cache_implementation": "static", "prompt_lookup_num_tokens": 3}
    with pytest.raises(NotImplementedError, match="activate_past_recording is not implemented"):
        make_model().generate(make_ids(B=1, T=12), **options)


@pytest.mark.cuda
@pytest.mark.parametrize("model", STATIC)
def test_a_static_cache_on_cuda(model):
    """By inductor and CUDA graphs, as transformers compiles there by itself."""
    ours = make_model(hidden_size=64, intermediate_size=96, **STATIC[model]).cuda()
    ids, options = make_ids(T=12).cuda(), GREEDY | {"attention_mask": PADDED.cuda()}
    expected = ours.generate(ids, **options)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(ours.generate(ids, cache_implementation="static", **options), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("options", [{}, {"attn": {"layers": [1], "num_heads": 2}}], ids=str)
def test_embeddings_go_on_from_a_cache(options):
    """As in transformers: inputs_embeds hold all tokens so far, and the new ones pass."""
    ours, ids = make_model(**options), make_ids(T=12)
    expected = ours.generate(ids, **GREEDY)[:, 12:]
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
