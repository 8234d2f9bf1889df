"""The language model: names, loss, files, whole graphs.

Equal bits (see common.py): the same calls.
"""

import copy
import threading

import pytest
import torch
from common import assert_close
from dispatch import Calls
from models import BATCH_INVARIANT_ARGUMENT, MODEL_EVERY, TINY, RecordModes, make_ids, make_model
from safetensors.torch import load_file
from torch._dynamo.backends.common import aot_autograd

from gla_ext import batch_invariant
from gla_ext.layers.norms import RMSNorm
from gla_ext.model import GLAForCausalLM, GLAModel, count_parameters, next_token_loss
from gla_ext.model.checkpoint import read_tensors, write_tensors
from gla_ext.model.config import GLAConfig


def test_default_config_is_the_published_1_3b_size():
    with torch.device("meta"):
        model = GLAForCausalLM(GLAConfig())
    assert count_parameters(model) == 1_365_514_240


def test_forward_is_embeddings_blocks_and_norm():
    model, ids = make_model(torch.float64), make_ids()

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    x = model.model.embeddings.weight[ids]
    for layer in model.model.layers:
        x = x + layer.attn(norm(x, layer.attn_norm.weight))[0]
        y, mlp = norm(x, layer.mlp_norm.weight), layer.mlp
        gate = y @ mlp.gate_proj.weight.T
        x = x + (gate / (1 + (-gate).exp()) * (y @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    expected = norm(x, model.model.norm.weight) @ model.lm_head.weight.T
    loss, logits, cache = model(ids)
    assert loss is None
    assert cache is None
    assert_close(logits, expected, 1e-12)
    assert_close(model(ids, logits_to_keep=3).logits, expected[:, -3:], 1e-12)


def test_tied_embeddings():
    model = make_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embeddings.weight
    assert count_parameters(model) == count_parameters(make_model()) - 31 * 16


def test_padding_token_gets_no_gradient():
    model, ids = make_model(pad_token_id=3), make_ids()
    model(ids, labels=ids).loss.backward()
    gradient = model.model.embeddings.weight.grad
    assert (gradient[3] == 0).all()
    assert gradient[4].abs().sum() > 0


def test_mask_and_packing_reach_every_layer(monkeypatch):
    """A mask is turned into packed sequences once."""
    model, ids, seen = make_model(torch.float64), make_ids(), []
    packed = model(ids[:1], cu_seqlens=torch.tensor([0, 20, 70])).logits
    assert_close(packed[:, 20:], model(ids[:1, 20:]).logits, 1e-12)
    alone = model(ids[:1, 30:], use_cache=True)
    unpadded = model(ids[1:]).logits
    for layer in model.model.layers:
        forward = layer.attn.forward
        monkeypatch.setattr(
            layer.attn, "forward", lambda x, f=forward, **more: seen.append(more) or f(x, **more)
        )
    mask = (torch.arange(70) >= torch.tensor([[30], [0]])).long()
    output = model(ids, attention_mask=mask, use_cache=True)
    assert_close(output.logits[:1, 30:], alone.logits, 1e-12)
    assert_close(output.logits[1:], unpadded, 1e-12)
    assert [arguments["cu_seqlens"].tolist() for arguments in seen] == [[0, 40, 110]] * 2
    assert all(arguments.get("attention_mask") is None for arguments in seen)
    cache = output.past_key_values
    assert cache.lengths == [70, 70]
    for padded, state in zip(cache, alone.past_key_values, strict=True):
        assert_close(padded["recurrent_state"][:1], state["recurrent_state"], 1e-12)


HYBRID = {"attn": {"layers": [1], "num_heads": 2, "window_size": 5}}


@pytest.mark.parametrize("options", [{}, HYBRID], ids=["default", "hybrid"])
def test_activation_checkpointing_gives_the_same_gradients(options):
    model, ids = make_model(**options).train(), make_ids()
    other = copy.deepcopy(model)
    other.model.gradient_checkpointing = True
    for m in (model, other):
        m(ids, labels=ids).loss.backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("thread", [False, True], ids=["this thread", "another thread"])
@pytest.mark.parametrize("enabled", [False, True])
def test_activation_checkpointing_recomputes_in_the_mode_of_forward(enabled, thread, device):
    model, ids = make_model(num_hidden_layers=1).to(device).train(), make_ids(T=9).to(device)
    model.model.gradient_checkpointing = True
    record = RecordModes()
    with batch_invariant(enabled), record:
        loss = model(ids, labels=ids).loss

    def backward():
        with batch_invariant(not enabled), record:
            loss.backward()

    if thread:
        worker = threading.Thread(target=backward)
        worker.start()
        worker.join()
    else:
        backward()
    assert record.calls == [("fwd", enabled), ("fwd", enabled), ("bwd", enabled)]


def test_activation_checkpointing_compiles_whole_in_the_mode_of_forward():
    model, ids = make_model(num_hidden_layers=1).train(), make_ids(T=9)
    model.model.gradient_checkpointing = True
    calls = []

    def note(graph, _):
        targets = {getattr(torch.ops.gla_ext, f"chunk_gla_{x}").default: x for x in ("fwd", "bwd")}
        for n in graph.graph.nodes:
            if name := targets.get(n.target):
                calls.append((name, n.args[BATCH_INVARIANT_ARGUMENT[name]]))
        return graph.forward

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    with batch_invariant():
        loss = torch.compile(model, fullgraph=True, backend=backend)(ids, labels=ids).loss
    loss.backward()
    assert calls == [("fwd", True), ("fwd", True), ("bwd", True)]


@pytest.mark.parametrize("kind", ["plain", "masked", "packed"])
def test_compiles_whole_once_for_many_lengths(kind):
    model, graphs = make_model(torch.float64), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for T in (70, 9, 33):
        ids = make_ids(B=1 if kind == "packed" else 2, T=T)
        arguments = {"labels": ids}
        if kind == "masked":
            arguments["attention_mask"] = (torch.arange(T) >= torch.tensor([[2], [0]])).long()
        if kind == "packed":
            arguments["cu_seqlens"] = torch.tensor([0, 5, T])
        loss, logits, _ = compiled(ids, **arguments)
        expected = model(ids, **arguments)
        # Norms are plain operations in a graph, and one kernel outside.
        torch.testing.assert_close(logits, expected.logits)
        torch.testing.assert_close(loss, expected.loss)
    assert len(graphs) == 1


SAVED = [({}, False), ({}, True), (MODEL_EVERY, False), (HYBRID, True)]


@pytest.mark.parametrize(("options", "tied"), SAVED, ids=str)
def test_saved_model_comes_back(tmp_path, tied, options):
    model, ids = make_model(tie_word_embeddings=tied, **options), make_ids()
    model.save_pretrained(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    keys = model.state_dict().keys() - ({"lm_head.weight"} if tied else set())
    assert load_file(folder / "model.safetensors").keys() == keys
    other = GLAForCausalLM.from_pretrained(folder)
    assert not other.training
    assert other.config == model.config
    assert (other.lm_head.weight is other.model.embeddings.weight) == tied
    assert torch.equal(other(ids).logits, model(ids).logits)


def test_metadata_come_back(tmp_path):
    file = tmp_path / "x.safetensors"
    for metadata in ({"step": 1, "format": "pt"}, {"step": 2}):
        write_tensors(file, {"x": torch.ones(3)}, metadata)
        assert read_tensors(file)[1] == metadata


FUSED = ("fuse_cross_entropy", "fuse_linear_cross_entropy")
OFFSETS = torch.tensor([0, 4, 4, 20, 27])


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("which", [*FUSED, "neither"])
def test_losses_of_a_model(which, packed, training):
    """That of its logits: shifted, without ignored labels, each sequence by itself."""
    model, ids = make_model(torch.float64).train(training), make_ids(B=1, T=27)
    arguments = {"labels": ids.masked_fill(ids < 5, -100)}
    arguments |= {"cu_seqlens": OFFSETS} if packed else {}
    parameters = list(model.parameters())
    model.config.fuse_cross_entropy = model.config.fuse_linear_cross_entropy = False
    expected = model(ids, **arguments)
    by_hand = next_token_loss(expected.logits, **arguments, fuse_cross_entropy=False)
    assert_close(expected.loss, by_hand, 1e-12)
    wanted = torch.autograd.grad(expected.loss, parameters)
    if which != "neither":
        setattr(model.config, which, True)
    output = model(ids, **arguments)
    linear = which == "fuse_linear_cross_entropy"
    assert (output.logits is None) == linear
    assert abs(output.loss - expected.loss) < 1e-12
    before = None if linear else output.logits.detach().clone()
    for a, b in zip(torch.autograd.grad(output.loss, parameters), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    if not linear:  # backward writes over the logits in training
        assert torch.equal(output.logits, before) == (which == "neither" or not training)
        return
    assert model(ids).logits is not None
    with torch.no_grad():
        output = model(ids, **arguments)
    assert output.logits is None and not output.loss.requires_grad
    assert abs(output.loss - expected.loss) < 1e-12
    model.lm_head.register_forward_hook(lambda m, x, y: 2 * y)  # whose call somebody changes
    changed = model(ids, **arguments)
    assert changed.logits is None and abs(changed.loss - expected.loss) > 1e-3


def test_loss_is_fp32_below_fp32():
    model, ids = make_model(torch.bfloat16), make_ids()
    loss, logits, _ = model(ids, labels=ids)
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)


HOW = {
    "all": ({}, 4),
    "fuse_norm=False": ({"fuse_norm": False}, 0),
    "a hook on a block": ({}, 2),  # which sees one tensor
    "hooks on norms": ({}, 0),
    "a norm of others": ({}, 3),
}


@pytest.mark.parametrize("how", HOW)
def test_a_model_adds_inside_its_norms(how):
    options, count = HOW[how]
    model, ids, seen = make_model(torch.float64, **options), make_ids(T=10), []
    blocks = model.model.layers
    if how == "a hook on a block":
        blocks[0].register_forward_hook(lambda module, args, y: seen.append(y))
    if how == "hooks on norms":
        for norm in (m for m in model.modules() if type(m) is RMSNorm):
            norm.register_forward_pre_hook(lambda module, args: seen.extend(args))
    if how == "a norm of others":
        norm = torch.nn.RMSNorm(16, eps=blocks[0].mlp_norm.eps, dtype=torch.float64)
        norm.weight = blocks[0].mlp_norm.weight
        blocks[0].mlp_norm = norm
    results = []
    for fuse in (None, False):
        for block in blocks if fuse is not None else ():
            block.fuse_norm = fuse
        with Calls() as calls:
            loss = model(ids, labels=ids).loss
        assert calls.count("rms_norm_residual_fwd") == (count if fuse is None else 0)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(isinstance(x, torch.Tensor) for x in seen)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_keeps_the_stream_in_fp32(recompute):
    model, ids = make_model(torch.float32).train(), make_ids(T=10)
    model.model.gradient_checkpointing = recompute
    seen = []
    for block in model.model.layers:
        block.attn.q_proj.register_forward_pre_hook(lambda m, x: seen.append(x[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    assert seen[0] == torch.float32 and set(seen[1:]) == {torch.bfloat16}
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_model_alone_returns_states():
    model = GLAModel(GLAConfig(**TINY))
    x, cache = model(make_ids(), use_cache=True)
    assert x.shape == (2, 70, 16)
    assert cache[1]["recurrent_state"].shape == (2, 2, 8, 4)


def test_forward_refuses_what_it_does_not_know():
    model, ids = make_model(), make_ids()
    with pytest.raises(TypeError, match="attn_mask"):
        model(ids, attn_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match=r"expected tokens of shape \[B, T\], got \[9\]"):
        make_model()(torch.zeros(9, dtype=torch.int64))
    with pytest.raises(ValueError, match="logits_to_keep to be at least 0, got -2"):
        model(ids, logits_to_keep=-2)
