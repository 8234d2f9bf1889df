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
from test_context_parallel import assert_equals_one_process, make
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gla_ext import chunk_gla
from gla_ext.distributed import build_cp_context
from gla_ext.ops._collectives import all_sum


def run_with_flas(group, x):
    """A rank's results, its tokens and rows."""
    rank, lengths = dist.get_rank(group), (32,) * 4
    context = fla_context.context_of(rank, group)
    tokens = tokens_of(lengths, rank)
    ours = build_cp_context(x["cu_seqlens"], group)
    rows = list(ours.cut(lengths[rank], torch.device("cpu")).sequences)
    leaves = {n: local(x[n], tokens).requires_grad_() for n in "qkvg"}
    leaves["h0"] = x["h0"][rows].requires_grad_()
    o, state = chunk_gla(
        *[leaves[n] for n in "qkvg"], initial_state=leaves["h0"], output_final_state=True,
        cu_seqlens=context.cu_seqlens, cp_context=context,
    )  # fmt: skip
    upstream = (local(x["do"], tokens), x["dht"][rows])
    gradients = torch.autograd.grad((o, state), list(leaves.values()), upstream)
    results = {"o": o.detach(), "state": state.detach()}
    return results | dict(zip(leaves, gradients, strict=True)), tokens, rows


def test_flas_own_context(pool):
    x = make(1, 128, lengths=(5, 70, 1, 52))
    assert x["cu_seqlens"].tolist() == list(fla_context.OFFSETS)
    assert_equals_one_process(pool(run_with_flas, x), x)


def run_halo_of_flas(group, x):
    """The layer with convolutions; outputs, dx."""
    layer = make_layer(use_short_conv=True)
    rank = dist.get_rank(group)
    tokens = tokens_of((32,) * 4, rank)
    x = local(x, tokens).requires_grad_()
    o = layer(x, cp_context=fla_context.context_of(rank, group))[0]
    o.square().sum().backward()
    return o.detach(), x.grad, tokens


def test_the_layer_with_flas_own_context(pool):
    offsets = torch.tensor(fla_context.OFFSETS)
    x, layer = make_x(B=1, T=128).requires_grad_(), make_layer(use_short_conv=True)
    o = layer(x, cu_seqlens=offsets)[0]
    o.square().sum().backward()
    for mine, dx, tokens in pool(run_halo_of_flas, x.detach()):
        assert_close(mine, local(o, tokens), 1e-12)
        assert_close(dx, local(x.grad, tokens), 1e-12)


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


HF = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 31}
HF |= {"use_short_conv": True, "intermediate_size": 24, "initializer_range": 0.3}


def run_hf_model(group):
    import gla_ext.hf

    torch.manual_seed(0)
    model = gla_ext.hf.GLAForCausalLM(gla_ext.hf.GLAConfig(**HF)).double().train()
    ids = make_ids(B=2, T=24)
    whole = model(ids, labels=ids)
    logits = whole.logits.clone()  # backward writes over them
    expected = torch.autograd.grad(whole.loss, list(model.parameters()))
    context = build_cp_context(None, group)
    mine = ids.chunk(context.size, 1)[context.rank]
    output = model(mine, labels=mine, cp_context=context)
    assert_close(output.logits, logits.chunk(context.size, 1)[context.rank], 1e-12)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        mean = all_sum(parameter.grad, context.group_name) / context.size
        assert_close(mean, gradient, 1e-11)


def test_the_model_of_transformers(pool):
    pool(run_hf_model, ranks=2)


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
        x = make_x(B=2, T=160)[..., :32]
        x = torch.cat([x, x], -1)[..., :32].contiguous()
        # FLA's own forward computes its norm in fp32.
        whole = layer(x)[0]
        parameters = list(layer.parameters())
        expected = torch.autograd.grad(whole.square().sum(), parameters)
        found = layer(x.chunk(context.size, 1)[context.rank], cp_context=context)[0]
        assert_close(found, whole.chunk(context.size, 1)[context.rank], 1e-6)
        own = torch.autograd.grad(found.square().sum(), parameters)
        for mine, theirs in zip(own, expected, strict=True):
            assert_close(all_sum(mine, context.group_name), theirs, 1e-5)
        config = GLAConfig(**HF | {"use_short_conv": True})
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
    """The sentences of what a rank is refused, by name."""
    q = torch.randn(2, 8, 2, 4)
    offsets = torch.tensor([0, 10])
    packed = build_cp_context(offsets, group)
    uneven = build_cp_context(None, group, lengths=(8, 9))
    rank = packed.rank

    def anew():
        return build_cp_context(None, group)  # which has compared nothing yet

    layer = make_layer(torch.float32)
    x = torch.randn(2, 8, 24)
    calls = {
        "dtype": lambda: (
            chunk_gla(q.double(), q, q, q, cp_context=anew())
            if rank
            else chunk_gla(q, q, q, q, cp_context=anew())
        ),
        "width": lambda: chunk_gla(*[q[..., : 4 - rank]] * 4, cp_context=anew()),
        "scale": lambda: chunk_gla(q, q, q, q, scale=1.0 + rank, cp_context=anew()),
        "offsets beside": lambda: chunk_gla(q, q, q, q, cu_seqlens=offsets, cp_context=anew()),
        "batch": lambda: chunk_gla(q, q, q, q, cp_context=packed),
        "tokens": lambda: chunk_gla(q[:, :7], q[:, :7], q[:, :7], q[:, :7], cp_context=uneven),
        "beyond": lambda: chunk_gla(*[q[:1, :4]] * 4, cp_context=packed),
        "rows": lambda: chunk_gla(
            q, q, q, q, initial_state=torch.zeros(3, 2, 4, 4), cp_context=anew()
        ),
        "kind": lambda: chunk_gla(q, q, q, q, cp_context=group),
        "kernel_size": lambda: make_layer(torch.float32, use_short_conv=True, conv_size=4 - rank)(
            x, cp_context=anew()
        ),
        "channels": lambda: make_layer(torch.float32, use_short_conv=True, expand_v=1.0 + rank)(
            x, cp_context=anew()
        ),
        "mask": lambda: layer(x, torch.ones(2, 8), cp_context=anew()),
        "other tokens": lambda: chunk_gla(*[q[:, : 8 - rank]] * 4, cp_context=anew()),
        "other lengths": lambda: chunk_gla(
            q, q, q, q, cp_context=build_cp_context(None, group, lengths=(8 + rank, 8))
        ),
    }
    return {name: _sentence(call) for name, call in calls.items()}


def _sentence(call):
    try:
        call()
    except (NotImplementedError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


REFUSALS = {
    "dtype": r"ValueError: chunk_gla: expected the same q on all ranks of cp_context's group, got "
    r"\[2, T, 2, 4\] torch.float32 on rank 0 and \[2, T, 2, 4\] torch.float64 on rank 1",
    "width": r"expected the same q .* got \[2, T, 2, 4\] .* rank 0 and \[2, T, 2, 3\] .* on rank 1",
    "scale": r"expected the same scale on all ranks .*, got 1.0 on rank 0 and 2.0 on rank 1",
    "offsets beside": "ValueError: chunk_gla: expected cu_seqlens to be None beside cp_context",
    "batch": "ValueError: chunk_gla: expected a batch of one beside .* got B = 2",
    "beyond": "ValueError: cp_context: expected cu_seqlens to end at most at the 8 tokens of all "
    "ranks, got 10",
    "rows": r"ValueError: chunk_gla: expected initial_state to have a row for each of the 2 rows",
    "kind": "TypeError: cp_context: expected what gla_ext.distributed.build_cp_context",
    "kernel_size": "ValueError: ShortConvolution: expected the same kernel_size on all ranks of "
    "cp_context's group, got 4 on rank 0 and 3 on rank 1",
    "channels": r"same channels on all .* got \(12, 12, 24\) on rank 0 and .* 48\) on rank 1",
    "mask": "NotImplementedError: GatedLinearAttention: expected no attention_mask beside",
    "other lengths": r"expected the same lengths on all .* got \(8, 8\) .* \(9, 8\) on rank 1",
    "other tokens": "expected the same tokens on all ranks .* got 8 on rank 0 and 7 on rank 1",
}


def test_what_is_refused(pool):
    found = pool(run_refusals, ranks=2)
    for name, sentence in REFUSALS.items():
        for rank, sentences in enumerate(found):
            assert re.search(sentence, sentences[name]), (name, rank, sentences[name])
    assert "expected 9 tokens on rank 1, as lengths says, got 7" in found[1]["tokens"]


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"layout": "ring"}, "build_cp_context: expected layout to be 'contiguous', got 'ring'"),
        ({"layout": "zigzag"}, "to be 'contiguous', got 'zigzag', which balances attention; here"),
        ({"use_tf32x3_affine_chain": False}, "expected use_tf32x3_affine_chain=True, got False"),
        ({}, "expected a process group, got None"),
    ],
)
def test_contexts_that_are_refused(kwargs, sentence):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(sentence)):
        build_cp_context(None, **kwargs)


def test_flas_context_of_another_layout_is_refused(one_rank):
    q, theirs = torch.randn(1, 32, 2, 4), fla_context.context_of(0, one_rank.get_group())
    theirs.layout = "zigzag"
    with pytest.raises(
        ValueError, match="cp_context: expected layout to be 'contiguous', got 'zig"
    ):
        chunk_gla(q, q, q, q, cp_context=theirs)


def test_offsets_that_are_refused(one_rank):
    for offsets, sentence in (
        (torch.tensor([1, 4]), "to start with 0, got 1"),
        (torch.tensor([0, 4, 3]), "non-decreasing"),
        (torch.tensor([0.0, 4.0]), "int32 or int64"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build_cp_context(offsets, one_rank.get_group())
    with pytest.raises(ValueError, match="one for each rank"):
        build_cp_context(None, one_rank.get_group(), lengths=(3, 4))
    with pytest.raises(TypeError, match="to be a tensor"):
        build_cp_context([0, 4], one_rank.get_group())


def test_one_rank_is_one_process(one_rank):
    context = build_cp_context(None, one_rank.get_group())
    q = torch.randn(2, 9, 2, 4)
    g = -q.abs()
    found = chunk_gla(q, q, q, g, cp_context=context, output_final_state=True)
    for mine, theirs in zip(found, chunk_gla(q, q, q, g, output_final_state=True), strict=True):
        assert torch.equal(mine, theirs)
