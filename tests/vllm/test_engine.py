"""What an engine does with GLA models beside generating, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_engine import engine, greedy, make_prompts, save_random, short_of_best

from gla_ext.vllm import config

FP32 = 2e-4
HELPERS = Path(__file__).parents[1] / "helpers"
CONVOLUTIONS = {"use_short_conv": True}
HYBRID = {"attn": {"layers": [1], "num_heads": 2}}


@pytest.mark.parametrize(("options", "blocks"), [(CONVOLUTIONS, 5), (HYBRID, 12)])
def test_preemption(options, blocks, tmp_path, monkeypatch):
    preempted = []
    whole = Scheduler._preempt_request

    def counted(self, request, *args, **kwargs):
        preempted.append(request.request_id)
        return whole(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    model = save_random(tmp_path, **options)
    prompts = make_prompts(32, 300)
    cache = {"enable_prefix_caching": True, "block_size": 64, "max_model_len": 400}
    with engine(tmp_path, num_gpu_blocks_override=blocks, **cache) as llm:
        tokens, _ = greedy(llm, prompts, least=70)
    assert preempted
    assert max(short_of_best(model, prompts, tokens)) < FP32


@pytest.mark.parametrize("options", [CONVOLUTIONS, HYBRID], ids=["plain", "hybrid"])
def test_compiled(options, tmp_path):
    model = save_random(tmp_path, **options)
    prompts = make_prompts(24, 300)
    with engine(tmp_path, enforce_eager=False) as llm:
        tokens, _ = greedy(llm, prompts)
    assert max(short_of_best(model, prompts, tokens)) < FP32


def test_a_checkpoint_of_2024(tmp_path):
    """Before March 2024: other names, and gate and up in one matrix."""
    model = save_random(tmp_path)
    old = {}
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.up_proj.weight"):
            continue
        if name.endswith("mlp.gate_proj.weight"):
            tensor = torch.cat([tensor, tensors[name.replace("gate_proj", "up_proj")]])
        name = name.replace("embeddings", "embed_tokens").replace(".attn_norm.", ".gla_norm.")
        old[name.replace(".attn.", ".gla.")] = tensor
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    options = json.loads((tmp_path / "config.json").read_text())
    options["num_attention_heads"] = options.pop("num_heads")
    options["rms_norm_eps"] = options.pop("norm_eps")
    (tmp_path / "config.json").write_text(json.dumps(options))
    prompts = make_prompts(16, 200)
    with engine(tmp_path) as llm:
        tokens, _ = greedy(llm, prompts)
    assert max(short_of_best(model, prompts, tokens)) < FP32


def test_a_missing_tensor_is_named(tmp_path):
    save_random(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.attn.o_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    missing = r"to hold 'model\.layers\.0\.attn\.o_proj\.weight'"
    with pytest.raises(ValueError, match=missing), engine(tmp_path):
        pass


LINEARS = ["attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.g_proj", "attn.o_proj"]
LINEARS += ["attn.gk_proj.0", "attn.gk_proj.1", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def test_lora(tmp_path, monkeypatch):
    """An adapter on every linear map, as weights to which it is added. On a CPU vLLM is right only
    where all requests have one.
    """
    monkeypatch.setattr(config, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    model = save_random(tmp_path, expand_v=2.0)
    adapter, tensors = tmp_path / "adapter", {}
    adapter.mkdir()
    prompts = make_prompts(24, 300)
    generator = torch.Generator().manual_seed(0)
    for i in range(model.config.num_hidden_layers):
        for name in LINEARS:
            weight = model.get_submodule(f"model.layers.{i}.{name}").weight
            a, b = weight.new_empty(4, weight.shape[1]), weight.new_empty(weight.shape[0], 4)
            a.normal_(generator=generator), b.normal_(std=0.02, generator=generator)
            key = f"base_model.model.model.layers.{i}.{name}"
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    save_file(tensors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    settings["target_modules"] = [name.split(".")[-1] for name in LINEARS]
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with engine(tmp_path, enable_lora=True, max_lora_rank=8) as llm:
        tokens, _ = greedy(llm, prompts, lora_request=LoRARequest("a", 1, str(adapter)))
    assert max(short_of_best(model, prompts, tokens)) > 0.1
    with torch.no_grad():
        for key, b in tensors.items():
            if ".lora_B." in key:
                name = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
                a = tensors[key.replace("lora_B", "lora_A")]
                model.get_submodule(name).weight += 2 * b @ a
    assert max(short_of_best(model, prompts, tokens)) < FP32


def eight_bits(x):
    """Rows of x as integers up to 127, and their scales."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales).round(), scales


def test_int8(tmp_path):
    """Maps and their inputs in 8 bits, by compressed-tensors; gla_ext multiplies what they stand
    for.
    """
    model = save_random(tmp_path, use_short_conv=True, num_heads=4, num_kv_heads=2)
    tensors = load_file(tmp_path / "model.safetensors")
    small = [name for name in LINEARS if "gk_proj" not in name]
    for name, module in model.named_modules():
        if not name.endswith(tuple(small)):
            continue
        integers, scales = eight_bits(module.weight.detach())
        tensors |= {f"{name}.weight": integers.to(torch.int8), f"{name}.weight_scale": scales}
        module.weight.data = integers * scales
        module.register_forward_pre_hook(lambda _, args: torch.mul(*eight_bits(args[0])))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {"targets": ["Linear"], "weights": eight | {"strategy": "channel", "dynamic": False}}
    group["input_activations"] = eight | {"strategy": "token", "dynamic": True}
    options = json.loads((tmp_path / "config.json").read_text())
    options["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head", "re:.*gk_proj.*"],
        "config_groups": {"group_0": group},
    }
    (tmp_path / "config.json").write_text(json.dumps(options))
    prompts = make_prompts(24, 300)
    with engine(tmp_path) as llm:
        tokens, _ = greedy(llm, prompts)
    assert max(short_of_best(model, prompts, tokens)) < 2e-2
    unknown = "model.layers.0.mlp.down_proj.input_scale"
    save_file(tensors | {unknown: torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"expected no '{unknown}'"), engine(tmp_path):
        pass


RANKS = """
import json, sys
from vllm_engine import engine, greedy
if __name__ == "__main__":
    folder, prompts = sys.argv[1], json.load(open(sys.argv[2]))
    cache = {"enable_prefix_caching": True, "block_size": 64}
    with engine(folder, tensor_parallel_size=2, distributed_executor_backend="mp", **cache) as llm:
        json.dump([greedy(llm, prompts)[0] for _ in range(2)], open(sys.argv[3], "w"))
"""


@pytest.mark.parametrize("options", [CONVOLUTIONS, HYBRID], ids=["plain", "hybrid"])
def test_tensor_parallel_2(options, tmp_path):
    heads = {"num_heads": 4, "num_kv_heads": 2}
    model = save_random(tmp_path, **options, **heads)
    prompts = make_prompts(24, 300)
    script, asked, found = (tmp_path / name for name in ("ranks.py", "asked.json", "found.json"))
    script.write_text(RANKS)
    asked.write_text(json.dumps(prompts))
    environment = os.environ | {"PYTHONPATH": str(HELPERS), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, script, tmp_path, asked, found]
    subprocess.run(command, check=True, timeout=400, env=environment)
    for tokens in json.loads(found.read_text()):
        assert max(short_of_best(model, prompts, tokens)) < FP32


DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("options", "asked", "sentence"),
    [
        ({}, {"speculative_config": DRAFTS}, "speculative decoding is not implemented"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline parallelism is not implemented"),
        ({}, {"enable_lora": True}, "LoRA on a CPU is not implemented"),
        ({}, {"quantization": "fp8"}, "quantization = fp8 is not implemented"),
        ({}, {"runner": "pooling"}, "pooling is not implemented"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype = fp8 is not implemented"),
        ({}, {"enable_prompt_embeds": True}, "prompts of embeddings is not implemented"),
        ({"num_heads": 1}, {"tensor_parallel_size": 2}, "to divide num_heads = 1, got 2"),
        (
            {"num_hidden_layers": 2, "attn": [
                {"layers": [0], "num_heads": 1}, {"layers": [1], "num_heads": 2}]},
            {},
            "attention blocks of different heads or windows",
        ),
    ],
)  # fmt: skip
def test_refusals(options, asked, sentence, tmp_path):
    save_random(tmp_path, **options)
    with pytest.raises(Exception, match=sentence), engine(tmp_path, **asked):
        pass
