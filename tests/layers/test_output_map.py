"""The layer's norm and output map: in training backward makes the norm again."""

import io

import pytest
import torch
from common import assert_close
from dispatch import Calls
from models import make_layer, make_x
from modules import made_again
from torch import nn

from gla_ext.model import GLABlock, GLAConfig


def gradients(layer, x, call):
    """The output and its gradients, and whether backward has made the norm again."""
    leaves = [x.requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    leaves = [t for t in leaves if t.layout == torch.strided]
    with Calls() as calls:
        y = call(x)
        found = torch.autograd.grad(y.float().sin().sum(), leaves)
    return [y, *found], any(made_again(calls))


def a_hook_of_the_map(layer):
    layer.o_proj.register_forward_hook(lambda module, args, y: 2 * y)


def a_hook_of_the_norm(layer):
    layer.norm.register_forward_hook(lambda module, args, y: 2 * y)


def a_sparse_map(layer):
    weight = layer.o_proj.weight.detach().to_sparse_csr()
    layer.o_proj.weight = nn.Parameter(weight, requires_grad=False)


def a_bias(layer):
    layer.o_proj.bias = nn.Parameter(torch.ones(24, dtype=torch.float64))


# dtype, what autocast casts to, options of the layer and what is changed; whether it is made again.
CASES = {
    "fp64": (torch.float64, None, {}, None, True),
    "fp32": (torch.float32, None, {}, None, True),
    "bf16": (torch.bfloat16, None, {}, None, True),
    "no weight": (torch.float64, None, {"elementwise_affine": False}, None, True),
    "sigmoid": (torch.float64, None, {"gate_fn": "sigmoid"}, None, True),
    "unfused": (torch.float64, None, {"fuse_norm": False}, None, False),
    "no gate": (torch.float64, None, {"use_output_gate": False}, None, False),
    "autocast": (torch.float32, torch.bfloat16, {}, None, True),
    "autocast of bf16": (torch.bfloat16, torch.bfloat16, {}, None, True),
    # tests/layers/test_plain_modules.py has what else a module may be.
    "a hook of the map": (torch.float64, None, {}, a_hook_of_the_map, False),
    "a hook of the norm": (torch.float64, None, {}, a_hook_of_the_norm, False),
    "a sparse map": (torch.float64, None, {}, a_sparse_map, False),
    "a bias": (torch.float64, None, {}, a_bias, False),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("dtype, autocast, options, change, again", CASES.values(), ids=list(CASES))
def test_training_gives_what_evaluation_does(device, dtype, autocast, options, change, again):
    """In evaluation mode the norm and o_proj are called one after the other."""
    layer = make_layer(dtype, **options).to(device)
    x = make_x(dtype=dtype if autocast is None else torch.float32).to(device)

    def call(x):
        with torch.autocast(device, autocast, enabled=autocast is not None):
            return layer(x)[0]

    before = call(x)
    if change is not None:
        change(layer)
        assert change is a_sparse_map or not torch.allclose(call(x), before)
    trained, made = gradients(layer, x, call)
    assert made == again
    layer.eval()
    expected, made = gradients(layer, x, call)
    assert not made
    bound = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype if not autocast else None, 0.03)
    for got, wanted in zip(trained, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert_close(got, wanted, bound)


class Output(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)[0]


def test_a_traced_block():
    """Keeps the operators, of the layer and of its MLP, where it is stored and loaded."""
    config = GLAConfig(hidden_size=24, num_heads=2, intermediate_size=16)
    block, x, file = Output(GLABlock(config, 0)), make_x(dtype=torch.float32), io.BytesIO()
    torch.jit.save(torch.jit.trace(block, x), file)  # which checks the trace without gradients
    file.seek(0)
    traced = torch.jit.load(file)
    graph = str(traced.inlined_graph)
    for operator in ("norm_gate_linear", "swiglu_linear"):
        assert f"gla_ext::{operator}" in graph
    assert_close(traced(x), block(x), 1e-6)
