"""A small model with adapters, and changes of what a step of it takes in: options, adapters,
methods, hooks and weights.
"""

import types

import torch
from models import make_model
from torch import nn


class Lora(nn.Module):
    """A linear map with adapters, as peft has them."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)
        self.scaling = {"default": 2.0}
        self.active_adapters = ["default"]
        self.disabled = False

    def forward(self, x):
        y = self.base(x)
        if self.disabled:
            return y
        return y + sum(self.b(self.a(x)) * self.scaling[name] for name in self.active_adapters)


def make(device):
    torch.manual_seed(0)
    model = make_model(hidden_size=32, feature_map="relu").to(device)
    for block in model.model.layers:
        block.attn.v_proj = Lora(block.attn.v_proj).to(device)
    return model


def plain_forward(x):
    return x * 0.5


def method_forward(self, x):
    return self.down_proj(self.up_proj(x))


def negated(module, args, output):
    return -output


CHANGES = {
    "adapter off": lambda m: setattr(m.model.layers[0].attn.v_proj, "disabled", True),
    "adapters": lambda m: m.model.layers[0].attn.v_proj.active_adapters.clear(),
    "rescaled": lambda m: m.model.layers[0].attn.v_proj.scaling.update(default=-20.0),
    "clamp_min": lambda m: setattr(m.model.layers[0].attn, "clamp_min", -1e-3),
    "normalizer": lambda m: setattr(m.model.layers[0].attn, "gate_logit_normalizer", 0.1),
    "activation": lambda m: setattr(m.model.layers[0].attn, "feature_map_fn", torch.sigmoid),
    "gate": lambda m: setattr(m.model.layers[0].attn.norm, "activation", "relu"),
    "eps": lambda m: setattr(m.model.layers[0].attn_norm, "eps", 100.0),
    "forward": lambda m: setattr(m.model.layers[1].mlp, "forward", plain_forward),
    "method": lambda m: setattr(
        m.model.layers[1].mlp, "forward", types.MethodType(method_forward, m.model.layers[1].mlp)
    ),
    "hook": lambda m: m.model.layers[0].register_forward_hook(negated),
    "module": lambda m: setattr(m.model.layers[0], "mlp_norm", nn.Identity()),
    "weights": lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.flip(0))),
}
