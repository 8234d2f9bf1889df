"""Hybrid models: training, packed and padded batches, and decoding from keys and values.

Equal bits (see common.py): tokens, and the same calls.
"""

import pytest
import torch
from attention_inputs import HYBRIDS, composed_attention, make_hybrid
from common import assert_close
from models import make_ids

from gla_ext.decode import Decoder
from gla_ext.model import GLAConfig

ALL = pytest.mark.parametrize("attn", HYBRIDS)


@torch.no_grad()
def greedily(model, ids, count):
    """From all tokens every time."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


@ALL
def test_logits_and_gradients_by_definition(attn):
    """With every attention layer by its definition in fp64."""
    model, ids = make_hybrid(attn, dtype=torch.float64), make_ids(T=40)

    def results():
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        return [out.logits, *(parameter.grad for parameter in model.parameters())]

    actual = results()
    for block in model.model.layers:
        if block.attn.__class__.__name__ == "Attention":
            block.attn.forward = lambda x, layer=block.attn, **_: (
                torch.stack([composed_attention(layer, row) for row in x]),
            )
    for a, e in zip(actual, results(), strict=True):
        assert_close(a, e, 1e-11)


@ALL
def test_generate(device, attn):
    dtype = torch.float64 if device == "cpu" else torch.float32
    model, ids = make_hybrid(attn, dtype=dtype), make_ids(T=30)
    model, ids = model.to(device), ids.to(device)
    found = model.generate([ids[0], ids[1, :4]], 20, temperature=0, segment_tokens=64)
    assert torch.equal(found[0], greedily(model, ids[:1], 20)[0])
    assert torch.equal(found[1], greedily(model, ids[1:, :4], 20)[0])


def test_room_follows_the_longest_row():
    model = make_hybrid("full, kv heads 1, bias")
    decoder = Decoder(model, 2, temperature=0)
    decoder.prefill([[1, 2, 3], [4]])
    room = [decoder._loop.cache.attention[0].keys.shape[1]]
    for _ in range(290):
        decoder.step()
        room.append(decoder._loop.cache.attention[0].keys.shape[1])
    assert room[:253] == [256] * 253
    assert set(room) == {256, 512}
    assert all(r <= max(256, 2 * (3 + n)) for n, r in enumerate(room))
    before = decoder.nbytes
    decoder.prefill([[1, 2, 3], [4]])
    assert decoder.nbytes == before


def test_defaults_are_filled_in_as_by_fla():
    given = {"layers": (1,), "num_heads": 2}
    config = GLAConfig(num_hidden_layers=2, attn=given)
    assert config.attn == {
        "layers": [1],
        "num_heads": 2,
        "num_kv_heads": 2,
        "qkv_bias": False,
        "window_size": None,
        "rope_theta": 10000.0,
    }
    assert given == {"layers": (1,), "num_heads": 2}
    assert config.attention_of(0) is None
    assert config.attention_of(1) == config.attn


@pytest.mark.cuda
@ALL
@torch.no_grad()
def test_cuda_graphs_follow_the_longest_row(attn):
    """Past 256 and 1,024 tokens, with a row that comes and one that goes on; the tokens are those
    of steps without a graph."""
    model, ids = make_hybrid(attn, hidden_size=256, dtype=torch.bfloat16).cuda(), make_ids(T=800)
    found = []
    for graph in (True, False):
        decoder = Decoder(model, 3, temperature=0, cuda_graph=graph)
        tokens = [decoder.prefill([ids[0, :250], ids[1, :5], ids[1, 100:110]]).clone()]
        tokens += [decoder.step().clone() for _ in range(20)]
        tokens.append(decoder.prefill([ids[1, :3]], rows=[1], keep=True))
        tokens += [decoder.step().clone() for _ in range(5)]
        tokens.append(decoder.prefill([ids[0]], rows=[2]))
        tokens += [decoder.step().clone() for _ in range(300)]
        tokens.append(decoder.prefill([[5, 6], [7], [8, 9]]))
        tokens += [decoder.step().clone() for _ in range(5)]
        found.append(torch.cat(tokens).tolist())
        if graph:
            lengths = {length for length, _ in decoder._loop.graphs}
            assert {256, 512, 1024, 2048} >= lengths >= {256, 2048}
    agree = sum(a == b for a, b in zip(*found, strict=True)) / len(found[0])
    assert agree > 0.9  # one token that another kernel rounds otherwise changes the row's next ones
