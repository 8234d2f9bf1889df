"""Decoding in fixed buffers: `Decoder`, the static cache, its memory and its numbers.

Equal bits (see common.py): tokens; of states, own sums and the same products.
"""

import functools
import gc

import pytest
import torch
from common import assert_close
from models import make_ids, make_layer, make_model, make_x
from torch.nn.functional import logsigmoid

from gla_ext import chunk_gla, reference
from gla_ext.cache import GLACache, StaticGLACache
from gla_ext.decode import Decoder
from gla_ext.ops import batch_invariant
from gla_ext.ops.recurrent import recurrent_gla_step_
from gla_ext.selftest import relative_error, tolerance

PROMPTS = [make_ids(B=1, T=T, seed=T)[0] for T in (5, 1, 70, 12)]


def drawn(decoder, steps, *prompts, **options) -> torch.Tensor:
    """Tokens `[B, 1 + steps]`."""
    first = decoder.prefill(*prompts, **options)
    return torch.stack([first, *(decoder.step().clone() for _ in range(steps))], 1)


def test_decoder_is_generate():
    model = make_model(torch.float64)
    tokens = drawn(Decoder(model, 4, temperature=0), 19, PROMPTS)
    expected = model.generate(PROMPTS, 20, temperature=0)
    for row, prompt, full in zip(tokens, PROMPTS, expected, strict=True):
        assert torch.equal(row, full[len(prompt) :])


def test_decoder_starts_again():
    model, ids = make_model(torch.float64), make_ids(B=4, T=9)
    decoder = Decoder(model, 4, temperature=0)
    before = drawn(decoder, 10, PROMPTS)
    drawn(decoder, 3, ids)
    assert torch.equal(drawn(decoder, 10, PROMPTS), before)


@pytest.mark.parametrize("rows", [[2], [3, 0], torch.tensor([1], dtype=torch.int32)])
def test_new_sequences_in_some_rows(rows):
    model = make_model(torch.float64)
    alone = [drawn(Decoder(model, 1, temperature=0), 11, prompt[None])[0] for prompt in PROMPTS]
    decoder = Decoder(model, 4, temperature=0)
    before = drawn(decoder, 5, PROMPTS)
    new = [PROMPTS[(row + 1) % 4] for row in rows]
    first = decoder.prefill(new, rows=rows)
    after = torch.stack([decoder.step().clone() for _ in range(5)], 1)
    for n, row in enumerate(rows):
        assert first[n] == alone[(row + 1) % 4][0]
        assert torch.equal(after[row], alone[(row + 1) % 4][1:6])
    for row in set(range(4)) - {int(row) for row in rows}:
        assert torch.equal(torch.cat([before[row], after[row]]), alone[row][:11])


def test_rows_that_are_done():
    model = make_model(torch.float64)
    greedy = drawn(Decoder(model, 4, temperature=0), 10, PROMPTS)
    eos = greedy[0, 2].item()
    decoder = Decoder(model, 4, temperature=0, eos_token_id=eos)
    tokens = drawn(decoder, 10, PROMPTS)
    is_over = (greedy == eos).cumsum(1) > 0
    assert torch.equal(tokens, greedy.masked_fill(is_over, eos))
    assert torch.equal(decoder.done, is_over[:, -1])
    decoder.prefill([PROMPTS[1]], rows=[0])
    assert decoder.done[0] == (decoder.tokens[0] == eos)


def test_prefill_starts_from_nothing_and_keeps_its_buffers():
    model = make_model(torch.float64)
    decoder = Decoder(model, 4)
    decoder.prefill(PROMPTS)
    places = [x.data_ptr() for x in decoder._loop.cache.tensors()]
    assert len(places) == 2  # layers
    for _ in range(5):
        decoder.step()
    decoder.prefill(PROMPTS[::-1])
    assert [x.data_ptr() for x in decoder._loop.cache.tensors()] == places


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


def test_decoding_in_inference_mode_and_out_of_it():
    model = make_model(torch.float64)
    expected = drawn(Decoder(model, 4, temperature=0), 10, PROMPTS)
    decoder = Decoder(model, 4, temperature=0)
    with torch.inference_mode():
        first = drawn(decoder, 4, PROMPTS)
    rest = [decoder.step().clone() for _ in range(6)]
    assert torch.equal(torch.cat([first, torch.stack(rest, 1)], 1), expected)


HYBRID = {"attn": {"layers": [1], "num_heads": 2}}
RECURRENT = {"use_short_conv": True, "attn_mode": "fused_recurrent"}


@pytest.mark.parametrize("prompts", [[1, 1, 1, 1], [1, 70, 1, 12]], ids=str)
@pytest.mark.parametrize("rows", [None, [3, 0, 2, 1], [2]], ids=str)
@pytest.mark.parametrize("options", [{}, {"use_short_conv": True}, RECURRENT, HYBRID], ids=str)
def test_rows_that_others_have_used(device, options, rows, prompts):
    """A sequence that starts in a used row finds nothing of its last owner; one token too."""
    model = make_model(torch.float32, **options).to(device)
    used, fresh = (Decoder(model, 4, temperature=0) for _ in range(2))
    drawn(used, 3, PROMPTS)
    drawn(fresh, 0, PROMPTS)
    for x in used._loop.cache.tensors():
        if x.is_floating_point():
            x.fill_(torch.nan)
    given = [make_ids(1, T, seed=n)[0] for n, T in enumerate(prompts)][: len(rows or prompts)]
    for decoder in (used, fresh):
        decoder.prefill(given, rows=rows, segment_tokens=64)
    chosen = slice(None) if rows is None else rows
    for _ in range(10):
        assert torch.equal(used.tokens[chosen], fresh.tokens[chosen])
        used.step(), fresh.step()


def test_batch_invariant_decoding_copies_into_the_buffers():
    model = make_model(torch.float64)
    expected = drawn(Decoder(model, 4, temperature=0), 10, PROMPTS)
    with batch_invariant():
        assert torch.equal(drawn(Decoder(model, 4, temperature=0), 10, PROMPTS), expected)


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


def test_memory_does_not_grow_with_tokens():
    model = make_model()
    decoder = Decoder(model, 4)
    drawn(decoder, 3, PROMPTS)
    before = tensor_bytes()
    for _ in range(500):
        decoder.step()
    assert tensor_bytes() == before
    config = model.config
    assert decoder.nbytes == 4 * 4 * config.num_hidden_layers * 2 * 4 * 8  # B, fp32, H, K, V


# Static cache and layer.


@pytest.fixture
def in_place_calls(monkeypatch):
    """How often a layer moved a state on in place."""
    calls = []

    def spy(*args, **kwargs):
        calls.append(kwargs["state"].data_ptr())
        return recurrent_gla_step_(*args, **kwargs)

    monkeypatch.setattr("gla_ext.layers.gated_linear_attention.recurrent_gla_step_", spy)
    return calls


@torch.no_grad()
def test_a_layer_moves_the_state_on_in_place(in_place_calls):
    layer, x = make_layer(layer_idx=0).eval(), make_x(T=9)
    cache = StaticGLACache(2)
    with cache.prefill():
        outputs = [layer(x[:, :5], past_key_values=cache, use_cache=True)[0]]
    assert not in_place_calls
    state = cache[0]["recurrent_state"]
    outputs += [
        layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in range(5, 9)
    ]
    assert in_place_calls == [state.data_ptr()] * 4
    assert cache[0]["recurrent_state"] is state
    plain = GLACache()
    assert_close(torch.cat(outputs, 1), layer(x, past_key_values=plain, use_cache=True)[0], 1e-12)
    assert_close(state, plain[0]["recurrent_state"], 1e-12)


@torch.no_grad()
def test_a_layer_that_stores_nothing_leaves_the_state(in_place_calls):
    layer, x = make_layer(layer_idx=0).eval(), make_x(T=3)
    cache = StaticGLACache(2)
    with cache.prefill():
        layer(x, past_key_values=cache, use_cache=True)
    before = cache[0]["recurrent_state"].clone()
    layer(x[:, :1], past_key_values=cache, use_cache=False)
    assert not in_place_calls
    assert torch.equal(cache[0]["recurrent_state"], before)


@torch.no_grad()
def test_masked_tokens_leave_a_static_state(in_place_calls):
    layer, x = make_layer(layer_idx=0).eval(), make_x(T=4)
    cache, plain = StaticGLACache(2), GLACache()
    with cache.prefill():
        layer(x[:, :3], past_key_values=cache, use_cache=True)
    layer(x[:, :3], past_key_values=plain, use_cache=True)
    mask = torch.tensor([[1], [0]])
    for one in (cache, plain):
        layer(x[:, 3:], attention_mask=mask, past_key_values=one, use_cache=True)
    assert not in_place_calls
    assert torch.equal(cache[0]["recurrent_state"], plain[0]["recurrent_state"])


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [65, 200])
def test_decoding_is_the_chunked_forward(device, T, dtype):
    """Each of the two is within the accuracy table, so that states and outputs of one can go on in
    the other.
    """
    generator, prompt = torch.Generator().manual_seed(0), 60
    q, k, v, g = (
        torch.randn(2, T, 2, D, generator=generator, dtype=torch.float64).to(device, dtype)
        for D in (64, 64, 128, 64)
    )
    g = logsigmoid(g.double()).to(dtype) / 4
    names = ("o", "final_state")
    exact = reference.recurrence(*(x.double() for x in (q, k, v, g)))[:2]
    chunked = chunk_gla(q, k, v, g, output_final_state=True, state_v_first=True)
    start = [x[:, :prompt] for x in (q, k, v, g)]
    o, state = chunk_gla(*start, output_final_state=True, state_v_first=True)
    pieces = [o]
    for t in range(prompt, T):
        token = [x[:, t : t + 1] for x in (q, k, v, g)]
        pieces.append(recurrent_gla_step_(*token, state=state, state_v_first=True))
    decoded = torch.cat(pieces, 1), state
    for name, a, b, c in zip(names, decoded, chunked, exact, strict=True):
        expected = c if name == "o" else c.transpose(-1, -2)
        assert relative_error(a, expected) < tolerance(name, dtype)
        assert relative_error(b, expected) < tolerance(name, dtype)
        assert relative_error(a, b) < tolerance(name, dtype) * (2 if dtype == torch.bfloat16 else 1)


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
        conv_state = cache.states[0]["conv_state"]
        if conv_state is not None:
            conv_state = tuple(c[list(own)].clone() for c in conv_state)
        plain.update(recurrent_state=before[list(own)], conv_state=conv_state)
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
