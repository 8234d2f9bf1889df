"""Small models for engines, ways in which they change, and their tokens."""

import copy

import pytest
import torch
from engines import SMALL, greedy, prompt, run
from models import make_model
from torch import nn

from gla_ext.serve import Limits, Request
from gla_ext.train.optimizer import optimizer_of

LIMITS = Limits(**SMALL, cache_bytes=1 << 20)


def make(seed=0, device="cpu", **options):
    torch.manual_seed(seed)
    model = make_model(torch.float64, eos_token_id=None, seed=seed, **options)
    return model.to(device, torch.float64 if device == "cpu" else torch.float32)


def tokens_of(engine, *lengths, count=8):
    requests = (Request(prompt(n), count, temperature=0) for n in lengths)
    return [tokens for tokens, _, _ in run(engine, *requests)]


def expected(model, *lengths, count=8):
    return [greedy(model, prompt(n), count) for n in lengths]


def fused_step(model):
    optimizer_step(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))


def own_optimizer(model):
    optimizer_step(model, optimizer_of(model.parameters(), lr=0.1, weight_decay=0.0))


def optimizer_step(model, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()
    model(torch.tensor([prompt(50)])).logits.square().mean().backward()
    optimizer.step()
    model.eval()
    model.zero_grad()


def load(model):
    model.load_state_dict(make(seed=5).state_dict())


def assign(model):
    model.load_state_dict(make(seed=5).state_dict(), assign=True)


def replace_parameter(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0))


def replace_module(model):
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[0].mlp)


def move(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0)


def rescale(model):
    for layer in model.model.layers:
        layer.attn.gate_logit_normalizer = 1.0


def write_data(model):
    for parameter, new in zip(model.parameters(), make(seed=5).parameters(), strict=True):
        parameter.data.copy_(new)


def adapted(device="cpu"):
    peft = pytest.importorskip("peft")
    model = make(device=device, hidden_size=64)
    targets = ["q_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(target_modules=targets, r=8, init_lora_weights=False)
    adapters = peft.get_peft_model(model, config)
    adapters.add_adapter("other", config)
    return adapters.eval(), model


def set_scale(adapters):
    for module in adapters.modules():
        if hasattr(module, "scaling"):
            module.scaling["default"] *= 5


ADAPTERS = {  # changes, and the attribute by which `Stamp` sees them
    "off": (lambda p: p.base_model.disable_adapter_layers(), "_disable_adapters"),
    "set": (lambda p: p.set_adapter("other"), "_active_adapter"),
    "scale": (set_scale, None),
    "merged": (lambda p: p.merge_adapter(), "merged_adapters"),
    "normalizer": (lambda p: rescale(p.base_model.model), None),
}
