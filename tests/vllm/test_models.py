"""Each kind of model: in fp32 the engine's greedy tokens are those of gla_ext."""

import pytest
import torch
from vllm_engine import VOCABULARY, engine, greedy, make_prompts, save_random, short_of_best

import gla_ext.hf

ATTENTION = {"layers": [1], "num_heads": 2}
# CPU attention takes heads of 32 channels and more.
MODELS = {
    "plain": {},
    "three layers": {"num_hidden_layers": 3},
    "convolutions": {"use_short_conv": True},
    "convolutions of 3": {"use_short_conv": True, "conv_size": 3},
    "shared heads": {"num_heads": 4, "num_kv_heads": 2},
    "one head of keys, convolutions": {"num_heads": 4, "num_kv_heads": 1, "use_short_conv": True},
    "odd heads": {"num_heads": 3, "hidden_size": 60, "expand_k": 1.0, "expand_v": 2.0},
    "no output gate": {"use_output_gate": False},
    "no output gate, convolutions": {"use_output_gate": False, "use_short_conv": True},
    "apart": {"fuse_norm": False},
    "silu": {"hidden_act": "silu"},
    "norms without weights": {"elementwise_affine": False},
    "relu": {"feature_map": "relu"},
    "sigmoid, shared heads": {"feature_map": "sigmoid", "num_heads": 4, "num_kv_heads": 2},
    "clamped": {"clamp_min": -0.02},
    "tied": {"tie_word_embeddings": True},
    "recurrent": {"attn_mode": "fused_recurrent"},
    "hybrid": {"attn": ATTENTION},
    "hybrid, window": {"attn": ATTENTION | {"window_size": 40}, "num_hidden_layers": 3},
    "hybrid, all": {
        "attn": {"layers": [0, 2], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True},
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "use_short_conv": True,
        "num_heads": 4,
        "num_kv_heads": 2,
        "tie_word_embeddings": True,
    },
}
FP32 = 2e-4


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_greedy_tokens_in_fp32(options, tmp_path):
    """Prompts of 1 to 3,000 tokens in pieces of 64 beside others that decode, then from the cache
    of prefixes.
    """
    model = save_random(tmp_path, **options)
    prompts = make_prompts(64, 3000)
    cached = {"enable_prefix_caching": True, "block_size": 32}
    if model.config.attn is not None:  # a block of keys is at least as large as one of states
        cached |= {"block_size": 64}
    with engine(tmp_path, **cached) as llm:
        first, _ = greedy(llm, prompts)
        again, hits = greedy(llm, prompts)
    assert hits > 5000
    for tokens in (first, again):
        assert max(short_of_best(model, prompts, tokens)) < FP32


@pytest.mark.parametrize("options", [{}, {"attn": ATTENTION}], ids=["plain", "hybrid"])
def test_generate_has_the_same_tokens(options, tmp_path):
    model = save_random(tmp_path, **options)
    prompts = make_prompts(24, 300)
    with engine(tmp_path) as llm:
        tokens, _ = greedy(llm, prompts)
    for prompt, found in zip(prompts, tokens, strict=True):
        expected = model.generate(torch.tensor([prompt]), len(found), temperature=0)
        assert expected[0].tolist()[-len(found) :] == found


@pytest.mark.parametrize("states", ["auto", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["convolutions", "shared heads", "hybrid"])
def test_bf16(name, states, tmp_path, monkeypatch):
    """Each token's logit is near the best that gla_ext has in bf16."""
    # With these instructions vLLM sets the states back to float32.
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    model = save_random(tmp_path, **MODELS[name], initializer_range=0.05).bfloat16()
    prompts = make_prompts(24, 300)
    with engine(tmp_path, dtype="bfloat16", mamba_ssm_cache_dtype=states) as llm:
        assert llm.llm_engine.vllm_config.cache_config.mamba_ssm_cache_dtype == states
        tokens, _ = greedy(llm, prompts)
    assert max(short_of_best(model, prompts, tokens)) < 2e-2


def test_fp16(tmp_path):
    model = save_random(tmp_path, **MODELS["convolutions"], initializer_range=0.05).half()
    prompts = make_prompts(24, 300)
    with engine(tmp_path, dtype="float16") as llm:
        tokens, _ = greedy(llm, prompts)
    assert max(short_of_best(model, prompts, tokens)) < 1e-2


def test_a_folder_that_transformers_wrote(tmp_path):
    sizes = {"hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = gla_ext.hf.GLAConfig(**sizes, initializer_range=0.2)
    model = gla_ext.hf.GLAForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompts = make_prompts(16, 200)
    with engine(tmp_path) as llm:
        tokens, _ = greedy(llm, prompts)
    assert max(short_of_best(model, prompts, tokens)) < FP32
