"""Contexts, layers and models of FLA and transformers, and what is refused.

Equal bits (see common.py): own sums.
"""

import re
from importlib.util import find_spec
from unittest import mock

import fla_context
import pytest
import torch
import torch.distributed as dist
from common import assert_close
from models import make_ids, make_layer, make_model, make_x
from ranks import local, tokens_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gla_ext import chunk_gla
from gla_ext.distributed import build_cp_context
from gla_ext.ops._collectives import all_sum


def run_flas_context_in_graphs(group):
    """Known from one call in eager mode it is one graph's; a new one is refused by name."""
    x = torch.randn(1, 32, 2, 5, dtype=torch.float64)

    def function(q, g, context):
        return 2 * chunk_gla(q, q, q, g, cp_context=context)[0]

    context, new = (fla_context.context_of(dist.get_rank(group), group) for _ in range(2))
    expected = function(x, -x.abs(), context)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, -x.abs(), context), expected, 1e-13)
    with pytest.raises(Exception, match="to be known from a call in eager mode before a graph"):
        compiled(x, -x.abs(), new)


def test_flas_own_context_in_graphs(pool):
    pool(run_flas_context_in_graphs)


def run_flas_context_in_fsdp(group):
    """A policy that casts copies the object at every call; ranks are compared once all the same."""
    mesh, policy = DeviceMesh.from_group(group, "cpu"), MixedPrecisionPolicy(torch.bfloat16)
    model = make_model(use_short_conv=True).train()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    context = fla_context.context_of(dist.get_rank(group), group)
    ids = local(make_ids(B=1, T=128), tokens_of((32,) * 4, dist.get_rank(group)))
    losses, comparisons, gather = [], [], dist.all_gather_object

    def counted(*args, **kwargs):
        comparisons.append(len(losses))
        return gather(*args, **kwargs)

    with mock.patch.object(dist, "all_gather_object", counted):
        for _ in range(2):
            loss = model(ids, labels=ids, cp_context=context).loss
            loss.backward()
            losses.append(loss.item())
    return losses, comparisons


def test_flas_own_context_under_a_policy_that_casts(pool):
    ids = make_ids(B=1, T=128)
    model = make_model(torch.bfloat16, use_short_conv=True)
    offsets = torch.tensor(fla_context.OFFSETS)
    expected = model(ids, labels=ids, cu_seqlens=offsets).loss.item()
    for losses, comparisons in pool(run_flas_context_in_fsdp):
        assert losses == pytest.approx([expected] * 2, rel=1e-2)
        assert comparisons == [0, 0]  # convolutions and attention, in the first call


def run_flas_layers(group):
    """FLA's layer, with its gradients, and the logits of its model."""
    import gla_ext.fla

    gla_ext.fla.accelerate_fla()
    try:
        from fla.layers import GatedLinearAttention
        from fla.models import GLAConfig, GLAForCausalLM

        context = build_cp_context(None, group)
        torch.manual_seed(0)
        layer = GatedLinearAttention(hidden_size=32, num_heads=2, use_short_conv=True).double()
        x = torch.cat([make_x(B=2, T=160)] * 2, -1)[..., :32].contiguous()
        # FLA's own forward computes its norm in fp32.
        whole = layer(x)[0]
        parameters = list(layer.parameters())
        expected = torch.autograd.grad(whole.square().sum(), parameters)
        found = layer(x.chunk(context.size, 1)[context.rank], cp_context=context)[0]
        assert_close(found, whole.chunk(context.size, 1)[context.rank], 1e-6)
        own = torch.autograd.grad(found.square().sum(), parameters)
        for mine, theirs in zip(own, expected, strict=True):
            assert_close(all_sum(mine, context.group_name), theirs, 1e-5)
        sizes = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 31}
        config = GLAConfig(**sizes, use_short_conv=True, intermediate_size=24)
        model, ids = GLAForCausalLM(config).double(), make_ids(B=2, T=160)
        logits = model(ids.chunk(context.size, 1)[context.rank], cp_context=context).logits
        expected = model(ids).logits.chunk(context.size, 1)[context.rank]
        assert_close(logits, expected, 1e-5)
    finally:
        gla_ext.fla.restore_fla()


@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_flas_layers_under_accelerate_fla(pool):
    pool(run_flas_layers, ranks=2)


def run_refusals(group):
    """What a rank is refused, one after the other."""
    q, x, rank = torch.randn(2, 8, 2, 4), torch.randn(2, 8, 24), group.rank()
    offsets = torch.tensor([0, 10])
    packed = build_cp_context(offsets, group)

    def call(*operands, lengths=None, **options):
        """With a context that has compared nothing yet."""
        context = build_cp_context(None, group, lengths=lengths)
        return chunk_gla(*operands, **{"cp_context": context} | options)

    def layer(*mask, **options):
        options["use_short_conv"] = True
        return make_layer(torch.float32, **options)(
            x, *mask, cp_context=build_cp_context(None, group)
        )

    refusals = {
        r"ValueError: chunk_gla: expected the same q on all ranks of cp_context's group, got "
        r"\[2, T, 2, 4\] torch.float32 on rank 0 and \[2, T, 2, 4\] torch.float64 on rank 1": (
            lambda: call(q.double() if rank else q, q, q, q)
        ),
        r"same q .* got \[2, T, 2, 4\] .* rank 0 and \[2, T, 2, 3\] .* on rank 1": (
            lambda: call(*[q[..., : 4 - rank]] * 4)
        ),
        r"expected the same scale on all ranks .*, got 1.0 on rank 0 and 2.0 on rank 1": (
            lambda: call(q, q, q, q, scale=1.0 + rank)
        ),
        "ValueError: chunk_gla: expected cu_seqlens to be None beside cp_context": (
            lambda: call(q, q, q, q, cu_seqlens=offsets)
        ),
        "ValueError: chunk_gla: expected a batch of one beside .* got B = 2": (
            lambda: call(q, q, q, q, cp_context=packed)
        ),
        f"expected {8 + rank} tokens on rank {rank}, as lengths says, got 7": (
            lambda: call(*[q[:, :7]] * 4, lengths=(8, 9))
        ),
        "ValueError: cp_context: expected cu_seqlens to end at most at the 8 tokens of all ranks, "
        "got 10": lambda: call(*[q[:1, :4]] * 4, cp_context=packed),
        "ValueError: chunk_gla: expected initial_state to have a row for each of the 2 rows": (
            lambda: call(q, q, q, q, initial_state=torch.zeros(3, 2, 4, 4))
        ),
        "TypeError: cp_context: expected what gla_ext.distributed.build_cp_context": (
            lambda: call(q, q, q, q, cp_context=group)
        ),
        "ValueError: ShortConvolution: expected the same kernel_size on all ranks of cp_context's "
        "group, got 4 on rank 0 and 3 on rank 1": lambda: layer(conv_size=4 - rank),
        r"same channels on all .* got \(12, 12, 24\) on rank 0 and .* 48\) on rank 1": (
            lambda: layer(expand_v=1.0 + rank)
        ),
        "NotImplementedError: GatedLinearAttention: expected no attention_mask beside": (
            lambda: layer(torch.ones(2, 8))
        ),
        "expected the same tokens on all ranks .* got 8 on rank 0 and 7 on rank 1": (
            lambda: call(*[q[:, : 8 - rank]] * 4)
        ),
        r"expected the same lengths on all .* got \(8, 8\) .* \(9, 8\) on rank 1": (
            lambda: call(q, q, q, q, lengths=(8 + rank, 8))
        ),
    }
    for sentence, refused in refusals.items():
        with pytest.raises((NotImplementedError, ValueError, TypeError)) as caught:
            refused()
        found = f"{caught.type.__name__}: {caught.value}"
        assert re.search(sentence, found), (sentence, found)


def test_what_is_refused(pool):
    pool(run_refusals, ranks=2)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"layout": "ring"}, "build_cp_context: expected layout to be 'contiguous', got 'ring'"),
        ({"layout": "zigzag"}, "to be 'contiguous', got 'zigzag', which balances attention; here"),
        ({"use_tf32x3_affine_chain": False}, "expected use_tf32x3_affine_chain=True, got False"),
        ({"cu_seqlens": torch.tensor([1, 4])}, "to start with 0, got 1"),
        ({"cu_seqlens": torch.tensor([0, 4, 3])}, "non-decreasing"),
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "int32 or int64"),
        ({"lengths": (3, 4)}, "one for each rank"),
        ({"cu_seqlens": [0, 4]}, "to be a tensor"),
    ],
)
def test_contexts_that_are_refused(one_rank, kwargs, sentence):
    given = {"cu_seqlens": None, "group": one_rank.get_group()} | kwargs
    error = (
        TypeError if isinstance(given["cu_seqlens"], list) else (ValueError, NotImplementedError)
    )
    with pytest.raises(error, match=re.escape(sentence)):
        build_cp_context(**given)


def test_a_context_needs_a_group():
    with pytest.raises(ValueError, match="expected a process group, got None"):
        build_cp_context()


def test_flas_context_of_another_layout_is_refused(one_rank):
    q, theirs = torch.randn(1, 32, 2, 4), fla_context.context_of(0, one_rank.get_group())
    theirs.layout = "zigzag"
    message = "cp_context: expected layout to be 'contiguous', got 'zig"
    with pytest.raises(ValueError, match=message):
        chunk_gla(q, q, q, q, cp_context=theirs)
