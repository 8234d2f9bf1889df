"""The language model: names, loss, files, whole graphs.

Equal bits (see common.py): the same calls.
"""

import copy
import json
import threading

import pytest
import torch
from common import assert_close
from models import BATCH_INVARIANT_ARGUMENT, MODEL_EVERY, TINY, RecordModes, make_ids, make_model
from safetensors.torch import load_file, save_file
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from gla_ext import batch_invariant
from gla_ext.model import GLAForCausalLM, GLAModel, count_parameters
from gla_ext.model.checkpoint import load_model, read_tensors, write_tensors
from gla_ext.model.config import GLAConfig

LAYER_KEYS = [
    "attn_norm.weight",
    "attn.q_proj.weight",
    "attn.k_proj.weight",
    "attn.v_proj.weight",
    "attn.g_proj.weight",
    "attn.gk_proj.0.weight",
    "attn.gk_proj.1.weight",
    "attn.gk_proj.1.bias",
    "attn.o_proj.weight",
    "attn.g_norm_swish_gate.weight",
    "mlp_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
]


def test_parameter_names():
    names = {f"model.layers.{i}.{key}" for i in range(2) for key in LAYER_KEYS}
    names |= {"model.embeddings.weight", "model.norm.weight", "lm_head.weight"}
    assert make_model().state_dict().keys() == names


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 5632),
        ({"hidden_size": 192}, 512),
        ({"hidden_size": 256}, 768),
        ({"hidden_size": 384}, 1024),
        ({"hidden_size": 256, "hidden_ratio": 2}, 512),
        ({"hidden_size": 256, "hidden_ratio": None}, 768),
        ({"hidden_size": 256, "intermediate_size": 100}, 100),
    ],
)
def test_mlp_size(options, size):
    assert GLAConfig(**options).mlp_size == size


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


@pytest.mark.parametrize("options", [{}, MODEL_EVERY], ids=["default", "all"])
def test_initial_weights(options):
    torch.manual_seed(0)
    config = GLAConfig(hidden_size=512, num_hidden_layers=1, vocab_size=500, **options)
    model = GLAForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif parameter.ndim == 1:
            assert (parameter == 1).all()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.08 / parameter.numel() ** 0.5, name


def loss_and_gradients(model, ids, **arguments):
    model.zero_grad()
    loss = model(ids, labels=ids, **arguments).loss
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def test_loss_is_the_shifted_cross_entropy():
    model, ids = make_model(torch.float64), make_ids()
    labels = ids.clone()
    labels[0, :40] = labels[1, 20] = -100
    loss, logits, _ = model(ids, labels=labels)
    nats = [
        -logits[b, t].log_softmax(-1)[labels[b, t + 1]].item()
        for b in range(2)
        for t in range(69)
        if labels[b, t + 1] != -100
    ]
    assert len(nats) == 2 * 70 - 40 - 1 - 1
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(sum(nats) / len(nats), rel=1e-12)


def test_packed_sequences_train_as_a_batch_of_them():
    model, ids = make_model(torch.float64), make_ids(B=3, T=20)
    batched = loss_and_gradients(model, ids)
    offsets = torch.tensor([0, 20, 40, 60])
    packed = loss_and_gradients(model, ids.flatten()[None], cu_seqlens=offsets)
    for got, wanted in zip(packed, batched, strict=True):
        assert_close(got, wanted, 1e-6)


def test_loss_is_fp32_below_fp32():
    model, ids = make_model(torch.bfloat16), make_ids()
    loss, logits, _ = model(ids, labels=ids)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


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


def test_mask_and_packing_reach_every_layer():
    model, ids = make_model(torch.float64), make_ids()
    mask = (torch.arange(70) >= torch.tensor([[30], [0]])).long()
    logits = model(ids, attention_mask=mask).logits
    assert_close(logits[:1, 30:], model(ids[:1, 30:]).logits, 1e-12)
    assert_close(logits[1:], model(ids[1:]).logits, 1e-12)
    packed = model(ids[:1], cu_seqlens=torch.tensor([0, 20, 70])).logits
    assert_close(packed[:, 20:], model(ids[:1, 20:]).logits, 1e-12)


def test_a_mask_is_turned_into_packed_sequences_once(monkeypatch):
    model, ids = make_model(torch.float64), make_ids()
    mask = (torch.arange(70) >= torch.tensor([[30], [0]])).long()
    seen = []
    for layer in model.model.layers:
        monkeypatch.setattr(layer.attn, "forward", _noting(layer.attn.forward, seen))
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    assert [arguments["cu_seqlens"].tolist() for arguments in seen] == [[0, 40, 110]] * 2
    assert all(arguments.get("attention_mask") is None for arguments in seen)
    assert cache.lengths == [70, 70]
    alone = model(ids[:1, 30:], use_cache=True).past_key_values
    for padded, state in zip(cache, alone, strict=True):
        assert_close(padded["recurrent_state"][:1], state["recurrent_state"], 1e-12)


def _noting(forward, seen):
    return lambda x, **arguments: seen.append(arguments) or forward(x, **arguments)


def test_activation_checkpointing_gives_the_same_gradients():
    model, ids = make_model().train(), make_ids()
    other = copy.deepcopy(model)
    other.model.gradient_checkpointing = True
    for m in (model, other):
        m(ids, labels=ids).loss.backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_activation_checkpointing_recomputes():
    model, ids = make_model().train(), make_ids()
    model.model.gradient_checkpointing = True
    runs = []
    model.model.layers[0].attn.register_forward_hook(lambda *_: runs.append(1))
    loss = model(ids, labels=ids).loss
    assert len(runs) == 1
    loss.backward()
    assert len(runs) == 2


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


def test_inductor_trains_the_same():
    model, ids = make_model(num_hidden_layers=1), make_ids()
    mask = (torch.arange(70) >= torch.tensor([[30], [0]])).long()
    compiled = torch.compile(model, fullgraph=True)
    results = [loss_and_gradients(m, ids, attention_mask=mask) for m in (compiled, model)]
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted, 1e-4)


@pytest.mark.parametrize("options", [{}, MODEL_EVERY], ids=["default", "all"])
@pytest.mark.parametrize("tied", [False, True])
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


def test_config_file_of_fla_is_read(tmp_path):
    values = GLAConfig(**TINY).to_dict()
    assert (values["model_type"], values["architectures"]) == ("gla", ["GLAForCausalLM"])
    extras = {"attn": None, "use_gv": False, "fuse_swiglu": True, "transformers_version": "5.0"}
    (tmp_path / "config.json").write_text(json.dumps(values | extras))
    assert GLAConfig.load(tmp_path / "config.json") == GLAConfig(**TINY)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"model_type": "llama"}, ValueError, "model_type to be 'gla', got 'llama'"),
        ({"use_gv": True}, NotImplementedError, "use_gv = True is not implemented"),
        ({"use_gk": False}, NotImplementedError, "use_gk = False is not implemented"),
        ({"attn": {"layers": [0]}}, ValueError, "expected attn to have 'num_heads'"),
        ({"use_l2warp": True}, ValueError, "use_l2warp to be False, the only value .* got True"),
        ({"attnres_block_size": 2}, ValueError, "attnres_block_size to be None, .*, got 2"),
        ({"fuse_swiglu": False}, ValueError, "fuse_swiglu to be True, the only .*, got False"),
        ({"hidden_act": "powlu"}, NotImplementedError, "hidden_act = 'powlu' is not implemented"),
        ({"num_hidden_layers": 0}, ValueError, "num_hidden_layers to be at least 1, got 0"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size to be at least 1, got 0"),
        ({"intermediate_size": -1}, ValueError, "intermediate_size to be at least 1, got -1"),
        ({"num_heads": 0}, ValueError, "num_heads to be at least 1, got 0"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads to be at least 1, got 0"),
        ({"conv_size": 0}, ValueError, "conv_size to be at least 1, got 0"),
        ({"hidden_ratio": 0}, ValueError, "hidden_ratio to make the MLP at least 1 wide, got 0 wi"),
        ({"hidden_ratio": -1}, ValueError, "at least 1 wide, got -1 with hidden_size = 2048"),
        ({"pad_token_id": 32000}, ValueError, "one of vocab_size = 32000 tokens, got 32000"),
        ({"pad_token_id": -32001}, ValueError, "one of vocab_size = 32000 tokens, got -32001"),
    ],
)
def test_config_errors(values, error, message):
    with pytest.raises(error, match=message):
        GLAConfig.from_dict(values)


def test_unused_and_unusual_options_are_not_refused():
    assert GLAConfig(hidden_ratio=0, intermediate_size=100).mlp_size == 100
    assert GLAConfig(hidden_ratio=0.01, hidden_size=256).mlp_size == 256
    assert make_model(pad_token_id=-1).model.embeddings.padding_idx == TINY["vocab_size"] - 1


def test_wrong_tensors_are_named(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"expected the file to hold 'model\.norm\.weight'"):
        load_model(tmp_path)
    save_file(tensors | {"model.norm.weight": norm, "zzz": norm.clone()}, file)
    with pytest.raises(ValueError, match="expected the file not to hold 'zzz'"):
        load_model(tmp_path)
    save_file(tensors | {"model.norm.weight": norm[:7]}, file)
    with pytest.raises(ValueError, match=r"model\.norm\.weight to have shape \[16\], got \[7\]"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "nowhere")


def test_written_file_is_the_old_or_the_new_one(tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    write_tensors(file, {"x": torch.zeros(3)}, {"step": 1, "format": "pt"})

    def fails(source, target):
        assert load_file(source)["x"].sum() == 3
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fails)
        with pytest.raises(KeyboardInterrupt):
            write_tensors(file, {"x": torch.ones(3)}, {"step": 2})
    tensors, metadata = read_tensors(file)
    assert torch.equal(tensors["x"], torch.zeros(3))
    assert metadata == {"step": 1, "format": "pt"}
    write_tensors(file, {"x": torch.ones(3)}, {"step": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert read_tensors(file)[1] == {"step": 2}
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_model_alone_returns_states():
    model = GLAModel(GLAConfig(**TINY))
    x, cache = model(make_ids(), use_cache=True)
    assert x.shape == (2, 70, 16)
    assert cache[1]["recurrent_state"].shape == (2, 2, 8, 4)


def test_forward_refuses_what_it_does_not_know():
    model, ids = make_model(), make_ids()
    with pytest.raises(TypeError, match="attn_mask"):
        model(ids, attn_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="logits_to_keep to be at least 0, got -2"):
        model(ids, logits_to_keep=-2)
