"""Small seeded layers and language models, their inputs, and the layer in plain torch."""

import math

import torch
from torch.nn.functional import logsigmoid
from torch.utils._python_dispatch import TorchDispatchMode

from gla_ext import GatedLinearAttention, reference
from gla_ext.model import GLAForCausalLM
from gla_ext.model.config import GLAConfig

SMALL = {"hidden_size": 24, "num_heads": 3, "gate_low_rank_dim": 4}
# Options that the layer has beside the operator, away from their defaults.
EVERY = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "use_short_conv": True,
    "conv_bias": True,
    "feature_map": "silu",
    "gate_fn": "sigmoid",
    "clamp_min": -0.05,
}


def make_layer(dtype=torch.float64, seed=0, **options) -> GatedLinearAttention:
    torch.manual_seed(seed)
    layer = GatedLinearAttention(**(SMALL | options))
    for parameter in layer.parameters():  # norm weights and gate biases that do something
        torch.nn.init.normal_(parameter, mean=0.2, std=0.5)
    return layer.to(dtype)


def make_x(B=2, T=70, dtype=torch.float64, seed=1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, 24, generator=generator, dtype=torch.float64).to(dtype)


# By their definitions.
FUNCTIONS = {
    "relu": lambda x: torch.where(x > 0, x, 0),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "logsigmoid": lambda x: -(1 + (-x).exp()).log(),
    "silu": lambda x: x / (1 + (-x).exp()),
    "swish": lambda x: x / (1 + (-x).exp()),
    "sqrelu": lambda x: torch.where(x > 0, x * x, 0),
    "gelu": lambda x: x / 2 * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()),
}


def composed(layer, x, state=None, feature_map=None, gate_fn="swish"):
    """The layer in plain torch on the recurrence, of a layer with that feature_map and gate_fn.

    Returns the output and the final state [N, H, K, V]; `state` is the initial one, of a layer
    without convolutions.
    """
    w = {name: parameter.to(x.dtype) for name, parameter in layer.named_parameters()}

    def heads(y, count=layer.num_heads):
        """Head h of the result is number h * count // num_heads of y's."""
        y = y.unflatten(-1, (count, y.shape[-1] // count))
        return y[..., torch.arange(layer.num_heads) * count // layer.num_heads, :]

    def convolved(y, name):
        """Token by token: the last conv_size inputs times the weights, and SiLU."""
        if not layer.use_short_conv:
            return y
        weight, bias = w[f"{name}_conv1d.weight"][:, 0], w.get(f"{name}_conv1d.bias", 0)
        rows = []
        for t in range(y.shape[1]):
            recent = y[:, max(0, t + 1 - layer.conv_size) : t + 1]
            row = bias + (recent * weight.T[-recent.shape[1] :]).sum(1)
            rows.append(row / (1 + (-row).exp()))
        return torch.stack(rows, 1) if rows else y

    q, k, v = (convolved(x @ w[f"{name}_proj.weight"].T, name) for name in "qkv")
    q, k, v = heads(q), heads(k, layer.num_kv_heads), heads(v, layer.num_kv_heads)
    if feature_map is not None:
        q, k = FUNCTIONS[feature_map](q), FUNCTIONS[feature_map](k)
    low_rank = x @ w["gk_proj.0.weight"].T
    gk = logsigmoid(low_rank @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"])
    gk = heads(gk, layer.num_kv_heads) / layer.gate_logit_normalizer
    if layer.clamp_min is not None:
        gk = torch.where(gk < layer.clamp_min, layer.clamp_min, gk)
    o, state = reference.recurrence(q, k, v, gk, initial_state=state)
    norm = layer.norm
    o = o / (o.pow(2).sum(-1, keepdim=True) / layer.head_v_dim + norm.eps).sqrt()
    if norm.weight is not None:
        o = o * norm.weight.to(x.dtype)
    if layer.use_output_gate:
        o = o * FUNCTIONS[gate_fn](heads(x @ w["g_proj.weight"].T))
    return o.flatten(2) @ w["o_proj.weight"].T, state


def composed_with(options, layer, x):
    """`composed`, given what of the options the layer keeps as a function alone."""
    named = {name: options[name] for name in ("feature_map", "gate_fn") if name in options}
    return composed(layer, x, **named)


# Of a model, what its layers have beside the operator.
MODEL_EVERY = {"num_kv_heads": 1, "use_short_conv": True, "feature_map": "relu", "clamp_min": -0.1}
TINY = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 31}


def make_model(dtype=torch.float32, seed=0, **options) -> GLAForCausalLM:
    torch.manual_seed(seed)
    options = TINY | {"initializer_range": 0.3, "intermediate_size": 24} | options
    return GLAForCausalLM(GLAConfig(**options)).to(dtype).eval()


def make_ids(B=2, T=70, seed=1) -> torch.Tensor:
    return torch.randint(31, (B, T), generator=torch.Generator().manual_seed(seed))


def products(call, side=-1):
    """The shapes of the right-hand matrices, or with -2 the left ones, of a call's products."""
    shapes = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                shapes.append(tuple(args[side].shape))
            if function is torch.ops.aten.linear.default:  # below autograd it is one operator
                matrices = (args[0].flatten(0, -2), args[1].T)
                shapes.append(tuple(matrices[side].shape))
            return function(*args, **(kwargs or {}))

    with Record():
        call()
    return sorted(shapes)


# Which argument of either operator batch_invariant is.
BATCH_INVARIANT_ARGUMENT = {"fwd": 10, "bwd": 11}


class RecordModes(TorchDispatchMode):
    """Inside, notes every call of the chunkwise operators: `calls` has name and batch_invariant."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().startswith("gla_ext::chunk_gla_"):
            name = function.name().removeprefix("gla_ext::chunk_gla_")
            self.calls.append((name, args[BATCH_INVARIANT_ARGUMENT[name]]))
        return function(*args, **(kwargs or {}))
