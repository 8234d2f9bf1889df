"""Decoding in fixed buffers: `Decoder`, the static cache, its memory and its numbers.

Equal bits (see common.py): tokens; of states, own sums and the same products.
"""

import contextlib
import functools
import gc

import pytest
import torch
from changing import optimizer_step
from common import assert_close
from dispatch import Calls
from models import make_ids, make_layer, make_model, make_x

from gla_ext.cache import GLACache, StaticGLACache
from gla_ext.decode import ChangedError, Decoder
from gla_ext.ops import batch_invariant
from gla_ext.selftest import relative_error

PROMPTS = [make_ids(B=1, T=T, seed=T)[0] for T in (5, 1, 70, 12)]


def drawn(decoder, steps, *prompts, **options) -> torch.Tensor:
    """Tokens `[B, 1 + steps]`."""
    first = decoder.prefill(*prompts, **options)
    return torch.stack([first, *(decoder.step().clone() for _ in range(steps))], 1)


MODES = {"": contextlib.nullcontext, "inference": torch.inference_mode, "fixed": batch_invariant}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_decoder_is_generate(mode):
    """In a mode and out of it; batch invariant decoding copies into the buffers."""
    model = make_model(torch.float64)
    decoder = Decoder(model, 4, temperature=0)
    with mode():
        first = drawn(decoder, 9, PROMPTS)
    with mode() if mode is batch_invariant else contextlib.nullcontext():
        rest = [decoder.step().clone() for _ in range(10)]
    expected = model.generate(PROMPTS, 20, temperature=0)
    for row, prompt, full in zip(
        torch.cat([first, torch.stack(rest, 1)], 1), PROMPTS, expected, strict=True
    ):
        assert torch.equal(row, full[len(prompt) :])


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda d: d.prefill(PROMPTS), "expected 2 prompts, got 4"),
        (lambda d: d.prefill(PROMPTS, rows=[0]), "expected 1 prompts, got 4"),
        (lambda d: Decoder(d.model, 0), "batch_size to be at least 1, got 0"),
        (lambda d: d.step(), "expected prefill before step"),
        (lambda d: d.prefill([[1]], rows=[-1]), r"distinct, from 0 to 1, got \[-1\]"),
        (lambda d: d.prefill([[1]], rows=[2]), r"distinct, from 0 to 1, got \[2\]"),
        (lambda d: d.prefill([[1], [2]], rows=[1, 1]), r"distinct, from 0 to 1, got \[1, 1\]"),
        (lambda d: Decoder(d.model, 1, top_p=2.0), r"top_p to be in \(0, 1\], got 2.0"),
        (lambda d: Decoder(d.model, 1, cuda_graph=True), "Decoder: expected a model on .* got cpu"),
    ],
)
def test_decoder_errors(attempt, message):
    decoder = Decoder(make_model(), 2)
    with pytest.raises(ValueError, match=message):
        attempt(decoder)


HYBRID = {"attn": {"layers": [1], "num_heads": 2}}
RECURRENT = {"use_short_conv": True, "attn_mode": "fused_recurrent"}


USED = [({}, None), ({}, [3, 0, 2, 1]), ({"use_short_conv": True}, None), (RECURRENT, [2])]
USED += [({"use_short_conv": True}, [2]), (RECURRENT, None), (HYBRID, None), (HYBRID, [3, 0, 2, 1])]


@pytest.mark.parametrize(("options", "rows"), USED, ids=str)
def test_rows_that_others_have_used(device, options, rows):
    """A sequence that starts in a used row finds nothing of its last owner; one token too."""
    model = make_model(torch.float32, **options).to(device)
    used, fresh = (Decoder(model, 4, temperature=0) for _ in range(2))
    drawn(used, 3, PROMPTS)
    drawn(fresh, 0, PROMPTS)
    for x in used._loop.cache.tensors():
        if x.is_floating_point():
            x.fill_(torch.nan)
    places = [x.data_ptr() for x in used._loop.cache.tensors()]
    lengths = (1, 70, 1, 12) if rows is None else (1,) * len(rows)
    given = [make_ids(1, T, seed=n)[0] for n, T in enumerate(lengths)]
    for decoder in (used, fresh):
        decoder.prefill(given, rows=rows, segment_tokens=64)
    chosen = slice(None) if rows is None else rows
    for _ in range(10):
        assert torch.equal(used.tokens[chosen], fresh.tokens[chosen])
        used.step(), fresh.step()
    assert [x.data_ptr() for x in used._loop.cache.tensors()] == places


@pytest.mark.parametrize("what", ["step", "model"])
def test_a_compiled_step_is_compiled_once(monkeypatch, what):
    model = make_model(torch.float64)
    expected = drawn(Decoder(model, 4, temperature=0), 10, PROMPTS)
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    if what == "model":
        model.compile(fullgraph=True, backend="aot_eager")
    decoder = Decoder(model, 4, temperature=0, compiled=what == "step")
    first = drawn(decoder, 2, PROMPTS)
    with torch._dynamo.config.patch(error_on_recompile=True):
        rest = [decoder.step().clone() for _ in range(8)]
    assert torch.equal(torch.cat([first, torch.stack(rest, 1)], 1), expected)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == (1 if what == "step" else 2)  # the model's prompts are compiled too


def tensor_bytes() -> int:
    """Bytes of all tensors that Python knows."""
    while gc.collect():  # what other tests left may go in several passes
        pass
    found = {id(x): x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
    return sum(x.untyped_storage().nbytes() for x in found.values())


@pytest.mark.slow
def test_memory_does_not_grow_with_tokens():
    model = make_model()
    decoder = Decoder(model, 4)
    drawn(decoder, 3, PROMPTS)
    before = tensor_bytes()
    for _ in range(100):
        decoder.step()
    assert tensor_bytes() == before
    config = model.config
    assert decoder.nbytes == 4 * 4 * config.num_hidden_layers * 2 * 4 * 8  # B, fp32, H, K, V


# Static cache and layer.


@pytest.mark.parametrize("what", ["stored", "not stored", "masked"])
@torch.no_grad()
def test_a_layer_moves_a_static_state_on_in_place(what):
    """Where it stores it, and no token is padding."""
    layer, x = make_layer(layer_idx=0).eval(), make_x(T=9)
    cache, plain = StaticGLACache(2), GLACache()
    with cache.prefill(), Calls() as calls:
        layer(x[:, :5], past_key_values=cache, use_cache=True)
    assert not calls.count("recurrent_gla_step_")
    layer(x[:, :5], past_key_values=plain, use_cache=True)
    state, options = cache[0]["recurrent_state"], {"use_cache": what != "not stored"}
    if what == "masked":
        options["attention_mask"] = torch.tensor([[1], [0]])
    with Calls() as calls:
        found = [layer(t, past_key_values=cache, **options)[0] for t in x[:, 5:].split(1, 1)]
    in_place = [
        any(t.data_ptr() == state.data_ptr() for t in args if isinstance(t, torch.Tensor))
        for args in calls.arguments("recurrent_gla_step_")
    ]
    assert in_place == [True] * (4 if what == "stored" else 0)
    assert cache[0]["recurrent_state"] is state
    expected = [layer(t, past_key_values=plain, **options)[0] for t in x[:, 5:].split(1, 1)]
    for got, wanted in zip(found, expected, strict=True):
        assert_close(got, wanted, 1e-12)
    assert_close(state, plain[0]["recurrent_state"], 1e-12)


def entry(N, fill, conv=3) -> dict:
    """States of N sequences, with those of short convolutions of which one is absent."""
    return {
        "recurrent_state": torch.full((N, 2, 3, 4), float(fill)),
        "conv_state": (torch.full((N, 5, conv), float(fill)), None),
    }


def test_static_cache_holds_every_tensor_of_an_entry():
    cache = StaticGLACache(3)
    with cache.prefill():
        assert len(cache) == 0
        cache.update(layer_idx=1, **entry(3, 1.0), offset=7)
        assert len(cache) == 0
    assert len(cache) == 2
    assert cache[0] == {"recurrent_state": None, "conv_state": None}
    buffers = cache.tensors()
    assert [x.shape for x in buffers] == [(3, 2, 3, 4), (3, 5, 3)]
    cache.update(layer_idx=1, **entry(3, 2.0))
    assert all((x == 2).all() for x in buffers)
    with cache.prefill(torch.tensor([2, 0])):
        cache.update(layer_idx=1, **entry(2, 3.0))
    assert all((x[[0, 2]] == 3).all() and (x[1] == 2).all() for x in buffers)
    assert all(x is y for x, y in zip(cache.tensors(), buffers, strict=True))
    cache.batch_select_indices(torch.tensor([1, 1, 0]))
    assert all((x[:2] == 2).all() and (x[2] == 3).all() for x in buffers)
    cache.reset()
    assert not any(x.any() for x in buffers)


def test_static_cache_errors():
    cache = StaticGLACache(3)
    with pytest.raises(ValueError, match=r"state of shape \[3, 2, 3, 4\], got \[2, 2, 3, 4\]"):
        cache.update(layer_idx=0, **entry(2, 1.0))
    cache = StaticGLACache(3)
    cache.update(layer_idx=0, **entry(3, 1.0))
    with pytest.raises(ValueError, match=r"state of shape \[3, 5, 3\], got \[3, 5, 4\]"):
        cache.update(layer_idx=0, **entry(3, 1.0, conv=4))
    with pytest.raises(ValueError, match=r"state of shape None, got \[3, 5, 3\]"):
        cache.update(layer_idx=0, conv_state=(entry(3, 1.0)["conv_state"][0],) * 2)
    with pytest.raises(NotImplementedError, match="batch_repeat_interleave"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(NotImplementedError, match="get_seq_length"):
        cache.get_seq_length()


# Decoding token by token is the chunked forward.


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 0.02)]
)
def test_decoding_a_model_is_its_forward(device, dtype, bound):
    """In bf16 a model rounds a dozen times a block, in the chunked form and in this one alike."""
    model = make_model(dtype).to(device)
    ids = make_ids(T=90).to(device)
    cache = StaticGLACache(2)
    with torch.no_grad():
        with cache.prefill():
            pieces = [model(ids[:, :40], past_key_values=cache, use_cache=True).logits]
        pieces += [
            model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            for t in range(40, 90)
        ]
        decoded, chunked = torch.cat(pieces, 1), model(ids).logits
    assert relative_error(decoded[:, 40:], chunked[:, 40:]) < bound


def test_prefill_of_rows_under_another_autocast():
    """Convolutions' states keep the dtype of their buffer."""
    model = make_model(torch.float32, use_short_conv=True)
    decoder = Decoder(model, 2, temperature=0)
    decoder.prefill([[1, 2], [3]])
    before = [t.dtype for t in decoder._loop.cache.tensors()]
    with torch.autocast("cpu", torch.bfloat16):
        decoder.prefill([[4, 5]], rows=[0])
    assert [t.dtype for t in decoder._loop.cache.tensors()] == before


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rows", [None, [2, 0]])
def test_prompts_pass_on_the_buffers(rows, keep, monkeypatch):
    """No layer gathers its states, or copies them back."""
    layer, cache = make_layer(torch.float32, layer_idx=0).eval(), StaticGLACache(3)
    x = make_x(3, 90).float()
    with torch.no_grad(), cache.prefill():  # makes the buffer
        layer(x[:, :20], past_key_values=cache, use_cache=True)
    buffer = cache.states[0]["recurrent_state"]
    before = buffer.clone()
    own = range(3) if rows is None else rows
    plain = GLACache()
    if keep:
        plain.update(recurrent_state=before[list(own)])
    named = None if rows is None else torch.tensor(rows)
    with torch.no_grad():
        expected = layer(x[: len(own), 20:], past_key_values=plain, use_cache=True)[0]
        with monkeypatch.context() as patched, cache.prefill(named, keep=keep):
            patched.setattr("gla_ext.layers.gated_linear_attention.chunk_gla", None)
            y = layer(x[: len(own), 20:], past_key_values=cache, use_cache=True)[0]
    assert torch.equal(y, expected)
    assert cache.states[0]["recurrent_state"] is buffer
    assert torch.equal(buffer[list(own)], plain[0]["recurrent_state"])
    others = [row for row in range(3) if row not in own]
    assert torch.equal(buffer[others], before[others])


# A decoder whose model changes; its graphs are in test_kept_graphs.py.


def test_a_decoder_whose_model_changed():
    """Prompts are refused until `refresh`; after it no row has had one."""
    model = make_model(torch.float64)
    optimizer_step(model)
    decoder = Decoder(model, 4, temperature=0)
    optimizer_step(model)  # before the first prompt there is no state of the model
    before = drawn(decoder, 9, PROMPTS)
    optimizer_step(model)
    for options in ({}, {"rows": [0, 1, 2, 3]}, {"keep": True}):
        with pytest.raises(ChangedError, match=r"Decoder: .* got model\.embeddings\.weight wri"):
            decoder.prefill(PROMPTS, **options)
    decoder.refresh()
    with pytest.raises(ValueError, match="prefill before step, got no prompt yet"):
        decoder.step()
    with pytest.raises(ValueError, match=r"have had a prompt with keep = True, got \[0, 1, 2, 3\]"):
        decoder.prefill(PROMPTS, keep=True)
    now = drawn(decoder, 9, PROMPTS)
    assert torch.equal(now, drawn(Decoder(model, 4, temperature=0), 9, PROMPTS))
    assert not torch.equal(now, before)
    model.config.vocab_size -= 1
    with pytest.raises(ValueError, match="Decoder: expected a model on cpu in torch"):
        decoder.refresh()
    with pytest.raises(ValueError, match="prefill before step, got no prompt yet"):
        decoder.step()


def test_rows_that_go_on_with_the_model_now():
    model = make_model(torch.float64)
    decoder = Decoder(model, 1, temperature=0)
    tokens = drawn(decoder, 3, PROMPTS[:1])[0].tolist()
    cache = GLACache()
    with torch.no_grad():
        before = torch.cat([PROMPTS[0], torch.tensor(tokens[:-1])])
        model(before[None], past_key_values=cache, use_cache=True)
    optimizer_step(model)
    decoder.refresh(keep_running=True)
    with torch.no_grad():
        for _ in range(5):
            last = torch.tensor([tokens[-1:]])
            logits = model(last, past_key_values=cache, use_cache=True).logits
            tokens.append(int(logits[0, -1].argmax()))
    assert [int(decoder.step()) for _ in range(5)] == tokens[4:]
