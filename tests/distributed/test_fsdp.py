"""FSDP2 with a policy that casts inputs, for every module: the results of a module in bf16.

Equal bits (see common.py): the same calls.
"""

import copy

import torch
from common import assert_close
from models import EVERY, make_ids, make_layer, make_model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gla_ext import MultiheadGLA
from gla_ext.layers.attention import Attention
from gla_ext.layers.norms import GatedRMSNorm, RMSNorm
from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.model.blocks import GLAMLP

BF16 = torch.bfloat16


X = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(0))
# In fp32, with its inputs.
MODULES = {
    "GatedLinearAttention": lambda: (make_layer(torch.float32), (X,)),
    "every option": lambda: (make_layer(torch.float32, **EVERY), (X,)),
    "Attention": lambda: (Attention(24, 4, 2, qkv_bias=True), (X,)),
    "MultiheadGLA": lambda: (MultiheadGLA(24, 4, batch_first=True), (X, X, X)),
    "GLAMLP": lambda: (GLAMLP(24, 32), (X,)),
    "ShortConvolution": lambda: (ShortConvolution(24, 4, bias=True), (X,)),
    "RMSNorm": lambda: (RMSNorm(24), (X, X, True)),
    "GatedRMSNorm": lambda: (GatedRMSNorm(24), (X, -X)),
    "GLAForCausalLM": lambda: (make_model(tie_word_embeddings=True), (make_ids(T=12),)),
    "hybrid": lambda: (make_model(attn={"layers": [1], "num_heads": 2}), (make_ids(T=12),)),
}


def call(module, inputs):
    options = {"is_causal": True} if isinstance(module, MultiheadGLA) else {}
    out = module(*inputs, **options)
    out = out if isinstance(out, torch.Tensor) else getattr(out, "logits", out[0])
    out.float().square().sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return out.detach(), [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]


def run_modules(group):
    mesh, policy = DeviceMesh.from_group(group, "cpu"), MixedPrecisionPolicy(BF16, torch.float32)
    for name, make in MODULES.items():
        torch.manual_seed(0)
        module, inputs = make()
        tensors = {id(t): t for t in inputs if torch.is_tensor(t) and t.is_floating_point()}
        short = {i: t.to(BF16) for i, t in tensors.items()}  # one that stands twice is one
        cast = [short.get(id(t), t) for t in inputs]
        expected, gradients = call(copy.deepcopy(module).to(BF16), cast)
        try:
            found, own = call(fully_shard(module, mesh=mesh, mp_policy=policy), inputs)
        except Exception as error:
            raise AssertionError(name) from error
        assert found.dtype == expected.dtype == BF16, name
        assert torch.equal(found, expected), name
        for mine, theirs in zip(own, gradients, strict=True):
            assert mine.dtype == torch.float32, name
            assert_close(mine, theirs.float(), 1e-2, 1e-5, name=name)


def test_every_module_under_a_policy_that_casts(pool):
    pool(run_modules, ranks=2)
