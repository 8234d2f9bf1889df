"""Decoding with the newest tokens beside the states: the tokens and states of decoding without.

Equal bits (see common.py): tokens.
"""

import contextlib
import copy
import functools
import random

import pytest
import torch
from common import assert_close
from cuda_tools import waits_for_nothing
from dispatch import Calls
from models import MODEL_EVERY, make_ids, make_model

from gla_ext.cache import GLACache, _tokens
from gla_ext.cache._tokens import LENGTH, are_faster
from gla_ext.decode import Decoder
from gla_ext.model import step
from gla_ext.ops import batch_invariant
from gla_ext.selftest import relative_error

PROMPTS = [make_ids(B=1, T=T, seed=T)[0] for T in (5, 1, 70, 12)]
OPTIONS = {
    "plain": {},
    "convolutions, shared heads": MODEL_EVERY,
    "recurrent": {"attn_mode": "fused_recurrent"},
    "hybrid": {"attn": {"layers": [1], "num_heads": 2}},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
STEP, PLAIN_STEP = "recurrent_gla_buffered_step_", "recurrent_gla_step_"


def pair(model, B=4, **options):
    """A decoder with buffers, and one without."""
    options = {"temperature": 0, "cuda_graph": False} | options
    decoders = Decoder(model, B, **options), Decoder(model, B, **options | {"cuda_graph": False})
    cache = decoders[1]._loop.cache
    cache.buffers, cache.buffering = None, False
    return decoders


def assert_same_states(buffered, plain, bound=1e-12):
    """With its tokens, a copy of the one cache has the states of the other."""
    whole, expected = copy.deepcopy(buffered._loop.cache), plain._loop.cache
    whole.flush()
    for ours, theirs in zip(whole.states, expected.states, strict=True):
        if theirs["recurrent_state"] is not None:
            assert_close(ours["recurrent_state"], theirs["recurrent_state"], bound)


@pytest.mark.usefixtures("buffers")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@by_options
def test_tokens_and_states(options, dtype, bound, device):
    """A state is written once in LENGTH steps."""
    model = make_model(dtype, **options).to(device)
    decoders = pair(model)
    first = [decoder.prefill(PROMPTS) for decoder in decoders]
    assert torch.equal(*first)
    cache = decoders[0]._loop.cache
    states = [x for entry in cache if (x := entry["recurrent_state"]) is not None]
    layers, written, before = len(states), [], states[0].clone()
    with Calls() as calls:
        for n in range(1, 51):
            assert torch.equal(*(decoder.step() for decoder in decoders))
            if not torch.equal(states[0], before):
                written.append(n)
                before = states[0].clone()
            if n in (1, 15, 16, 17, 18, 50):
                assert_same_states(*decoders, bound)
    assert calls.count(STEP) == calls.count(PLAIN_STEP) == 50 * layers > 0
    assert written == [LENGTH + 1, 2 * LENGTH + 1, 3 * LENGTH + 1]
    assert cache.buffers.counts.tolist() == [50 - 3 * LENGTH] * 4


@pytest.mark.usefixtures("buffers")
@pytest.mark.parametrize("seed", range(8))
def test_rows_at_different_tokens(seed):
    """Rows that start, end, go on with more, and wait; steps that write the states; a model that
    changes; caches that take the states and give them back.
    """
    choose = random.Random(seed)
    options, end = choose.choice([*OPTIONS.values()]), choose.choice([None, 5, 9])
    model = make_model(torch.float64, seed=seed, **options)
    decoders = pair(model, eos_token_id=end)

    def prefill(rows, keep):
        prompts = [[choose.randrange(31) for _ in range(choose.choice([1, 2, 90]))] for _ in rows]
        options = {"rows": rows, "keep": keep, "segment_tokens": choose.choice([64, 16384])}
        assert torch.equal(*(decoder.prefill(prompts, **options) for decoder in decoders))

    prefill(None or range(4), keep=False)
    for _ in range(12):
        for _ in range(choose.choice([1, 5, 15, 20])):
            assert torch.equal(*(decoder.step() for decoder in decoders))
        assert torch.equal(decoders[0].done, decoders[1].done)
        kind = choose.choice(["rows", "keep", "mode", "refresh", "cache", "states"])
        if kind in ("rows", "keep"):
            prefill(choose.sample(range(4), choose.randint(1, 4)), kind == "keep")
        elif kind == "mode" and "attn" not in options:
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=choose.random() < 0.5)
            mode = contextlib.nullcontext() if autocast._enabled else batch_invariant()
            with mode, autocast:
                assert torch.equal(*(decoder.step() for decoder in decoders))
            assert not decoders[0]._loop.cache.buffering
        elif kind == "refresh":
            with torch.no_grad():
                model.model.layers[0].attn.gk_proj[1].bias.add_(0.1)
            for decoder in decoders:
                decoder.refresh(keep_running=True)
            assert not decoders[0]._loop.cache.buffers.counts.any()
        elif kind == "cache":
            for decoder in decoders:
                kept = GLACache()
                decoder.save(kept, 1)
                decoder.load(kept)
        else:
            assert_same_states(*decoders)
    assert_same_states(*decoders)
    assert decoders[0]._loop.cache.buffers.nbytes > 0


@pytest.mark.usefixtures("buffers")
@by_options
def test_a_dialogue(options, monkeypatch):
    """A cache has whole states after each call, and a decoder of before may serve the next."""
    model = make_model(torch.float64, **options)
    decoder = Decoder(model, 4, temperature=0)
    cache, found = GLACache(), []
    for count in (20, 7):
        found += model.generate(PROMPTS, count, past_key_values=cache, decoder=decoder)
        assert len(decoder._loop.cache.buffers.counts) == 4
    monkeypatch.undo()
    plain, expected = GLACache(), []
    for count in (20, 7):
        expected += model.generate(PROMPTS, count, temperature=0, past_key_values=plain)
    assert all(map(torch.equal, found, expected))
    for ours, theirs in zip(cache, plain, strict=True):
        if theirs["recurrent_state"] is not None:
            assert_close(ours["recurrent_state"], theirs["recurrent_state"], 1e-12)


@pytest.mark.usefixtures("buffers")
def test_a_state_in_16_bits_is_rounded_once_in_a_buffer(device):
    """So it drifts less where gates are near 0."""
    model = make_model(torch.float32, clamp_min=-1e-3).to(device)
    exact = pair(model)[1]
    decoders = pair(model)
    errors = []
    for decoder in (exact, *decoders):
        if decoder is not exact:
            decoder._loop.cache.state_dtype = torch.bfloat16
        decoder.prefill(PROMPTS)
    for _ in range(320):
        exact.step()
        for decoder in decoders:  # all of the same tokens
            decoder.step()
            decoder.tokens.copy_(exact.tokens)
    for decoder in decoders:
        decoder._loop.cache.flush()
        pairs = zip(decoder._loop.cache, exact._loop.cache, strict=True)
        errors.append(
            max(relative_error(x["recurrent_state"], y["recurrent_state"]) for x, y in pairs)
        )
    assert 0 < errors[0] < errors[1] / 2


@pytest.mark.usefixtures("buffers")
def test_a_prompt_under_autocast():
    """Its dtypes are not those of the buffers."""
    decoders = pair(make_model(torch.float32))
    for first in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=first):
            assert torch.equal(*(decoder.prefill(PROMPTS) for decoder in decoders))
        for _ in range(20):
            assert torch.equal(*(decoder.step() for decoder in decoders))
        assert_same_states(*decoders, 1e-5)


@pytest.mark.usefixtures("buffers")
@pytest.mark.parametrize("keep", [False, True])
def test_a_row_finds_nothing_of_its_last_owner(keep):
    """Also where the last owner left NaN; with keep, its own tokens are not lost."""
    model = make_model(torch.float64)
    used, fresh = pair(model)
    for decoder in (used, fresh):
        decoder.prefill(PROMPTS)
        for _ in range(7):
            decoder.step()
    if not keep:
        for buffers in used._loop.cache.buffers._layers.values():
            for x in buffers:
                x[[0, 2]] = torch.nan
    for decoder in (used, fresh):
        decoder.prefill([[3], [4, 5]], rows=[2, 0], keep=keep)
    assert used._loop.cache.buffers.counts.tolist() == [0, 7, 0, 7]
    for _ in range(20):
        assert torch.equal(used.step(), fresh.step())
    assert_same_states(used, fresh)


@pytest.mark.usefixtures("buffers")
def test_a_cache_in_the_middle_of_a_buffer():
    """Copied, reordered, emptied, and its memory."""
    model = make_model(torch.float64)
    decoders = pair(model)
    for decoder in decoders:
        decoder.prefill(PROMPTS)
        for _ in range(5):
            decoder.step()
    cache, plain = (decoder._loop.cache for decoder in decoders)
    copied = copy.deepcopy(cache)
    decoders[0].step()
    assert copied.buffers.counts.tolist() == [5] * 4
    copied.batch_select_indices(torch.tensor([3, 1, 1, 0]))
    plain.batch_select_indices(torch.tensor([3, 1, 1, 0]))
    for ours, theirs in zip(copied.tensors(), plain.tensors(), strict=True):
        assert_close(ours, theirs, 1e-12)
    cache.reset(torch.tensor([1, 2]))
    assert cache.buffers.counts.tolist() == [6, 0, 0, 6]
    # Per layer 16 tokens of 2 heads with 4 keys, 8 values and 4 gates, in fp64.
    assert cache.buffers.nbytes == 2 * 4 * LENGTH * 2 * (4 + 8 + 4) * 8
    assert decoders[0].nbytes == decoders[1].nbytes + cache.buffers.nbytes


def test_where_buffers_are_faster(monkeypatch):
    """With more rows than the kernels of a decoded token take, on CUDA."""
    assert _tokens.FEWEST_ROWS == step.MOST_ROWS + 1
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [are_faster(n, cuda) for n in (1, 32, 33, 256)] == [False, False, True, True]
    assert not are_faster(256, cpu)
    assert Decoder(make_model(), 40)._loop.cache.buffers is None
    monkeypatch.setattr(_tokens, "DEVICES", ("cpu",))
    assert Decoder(make_model(), 32)._loop.cache.buffers is None
    assert Decoder(make_model(), 33)._loop.cache.buffers is not None


@pytest.mark.usefixtures("buffers")
@pytest.mark.parametrize(("most", "step_of_layers"), [(4, STEP), (3, PLAIN_STEP)])
def test_heads_of_many_keys_have_no_buffers(most, step_of_layers, monkeypatch):
    monkeypatch.setattr(_tokens, "MOST_KEYS", most)
    decoders = pair(make_model(torch.float64))
    assert torch.equal(*(decoder.prefill(PROMPTS) for decoder in decoders))
    with Calls() as calls:
        for _ in range(20):
            decoders[0].step()
    assert calls.count(step_of_layers) == 20 * 2
    for _ in range(20):
        decoders[1].step()
    assert torch.equal(decoders[0].tokens, decoders[1].tokens)
    assert (decoders[0].nbytes > decoders[1].nbytes) == (most == 4)
    assert_same_states(*decoders)


@pytest.mark.usefixtures("buffers")
def test_a_compiled_step_is_compiled_once(monkeypatch):
    model = make_model(torch.float64)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled = Decoder(model, 4, temperature=0, compiled=True)
    plain = pair(model)[1]
    assert torch.equal(*(decoder.prefill(PROMPTS) for decoder in (compiled, plain)))
    assert torch.equal(compiled.step(), plain.step())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(20):
            assert torch.equal(compiled.step(), plain.step())
    assert_same_states(compiled, plain)


@pytest.mark.usefixtures("buffers")
def test_a_step_in_a_buffer_takes_no_kernel_that_writes_states(monkeypatch):
    monkeypatch.setattr(step, "DEVICES", ("cpu",))
    monkeypatch.setattr(step, "DTYPES", (torch.float64,))
    sizes = {"hidden_size": 64, "num_heads": 2}
    decoders = pair(make_model(torch.float64, **sizes))
    assert torch.equal(*(decoder.prefill(PROMPTS) for decoder in decoders))
    with Calls() as calls:
        for _ in range(20):
            assert torch.equal(*(decoder.step() for decoder in decoders))
    assert calls.count(STEP) == calls.count("recurrent_gla_low_rank_step_") == 20 * 2
    assert_same_states(*decoders)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [*OPTIONS.values(), {"hidden_size": 256}], ids=str)
def test_cuda_decoders_of_many_rows(options):
    """Graphs, replayed over steps that write states and rows that are replaced, give the tokens of
    eager steps and of a decoder without buffers.
    """
    model = make_model(torch.float32, **options).cuda()
    prompts = [make_ids(1, 1 + n % 7, seed=n)[0].tolist() for n in range(40)]
    graphed, plain = pair(model, 40, cuda_graph=True)
    decoders = graphed, Decoder(model, 40, temperature=0, cuda_graph=False), plain
    for decoder in decoders:
        decoder.prefill(prompts)
    for n in range(60):
        if n % 9 == 5:
            rows, keep = [n % 40, (n + 7) % 40], n % 2 == 0
            for decoder in decoders:
                decoder.prefill([[1, n % 31], [2]], rows=rows, keep=keep)
        expected = plain.step()
        for decoder in decoders[:2]:
            assert torch.equal(decoder.step(), expected)
    assert graphed._loop.graph is not None and graphed._loop.cache.buffering
    for decoder in decoders[:2]:
        assert_same_states(decoder, plain, 1e-4)
    with contextlib.nullcontext() if "attn" in options else batch_invariant():
        assert torch.equal(graphed.step(), plain.step())
    assert graphed._loop.cache.buffering == ("attn" in options)
    assert torch.equal(graphed.step(), plain.step()) and graphed._loop.cache.buffering


@pytest.mark.cuda
@pytest.mark.parametrize("cuda_graph", [None, False])
def test_cuda_steps_wait_for_nothing(cuda_graph):
    """Nor does making states whole."""
    decoder = Decoder(make_model(torch.bfloat16).cuda(), 40, cuda_graph=cuda_graph)
    decoder.prefill([[1, 2, 3]] * 40)
    with waits_for_nothing():
        for _ in range(LENGTH + 4):
            decoder.step()
        decoder._loop.cache.flush()
    assert not decoder._loop.cache.buffers.counts.any()
