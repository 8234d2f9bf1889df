"""Prompts that pass in segments, and sequences that go on from the states they left.

Equal bits (see common.py): tokens; of states, own sums beside products of one row.
"""

import pytest
import torch
from common import assert_close
from hypothesis import given
from hypothesis import strategies as st
from models import MODEL_EVERY, make_ids, make_model

from gla_ext.cache import GLACache, StaticGLACache
from gla_ext.decode import Decoder
from gla_ext.decode._prompts import Prompts
from gla_ext.ops import batch_invariant

LENGTHS = (5, 200, 64, 1, 129, 70)
PROMPTS = [make_ids(B=1, T=T, seed=T)[0] for T in LENGTHS]
OPTIONS = {"default": {}, "all": MODEL_EVERY, "recurrent": {"attn_mode": "fused_recurrent"}}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def states(cache) -> list[torch.Tensor]:
    found = []
    for entry in cache:
        found += [entry["recurrent_state"], *(entry["conv_state"] or ())]
    return found


def passed(model, ids, count=1) -> list[torch.Tensor]:
    """The states after tokens `[B, T]`, or a list of them."""
    cache = GLACache()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return states(cache)


def assert_states(cache, model, sequences, bound=1e-12):
    """They are those after the sequences, one a row."""
    found = states(cache)
    for row, sequence in enumerate(sequences):
        for x, expected in zip(found, passed(model, sequence[None]), strict=True):
            assert_close(x[row : row + 1], expected, bound)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=9), st.integers(1, 5))
def test_how_prompts_are_cut(lengths, chunks):
    tokens = torch.arange(sum(lengths))
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    found, ended = [[] for _ in lengths], 0
    for segment in Prompts(tokens, lengths).segments(64 * chunks):
        assert segment.input_ids.numel() <= 64 * chunks
        if segment.cu_seqlens is None:
            pieces = list(segment.input_ids)
            assert len(pieces) == len(segment.prompts) and segment.last == 1
        else:
            pieces = segment.input_ids[0].split(segment.cu_seqlens.diff().tolist())
            assert torch.equal(segment.last, segment.cu_seqlens[1:] - 1)
        assert segment.goes_on == bool(found[segment.prompts[0]])
        for prompt, piece in zip(segment.prompts, pieces, strict=True):
            assert (piece[0].item() - starts[prompt]) % 64 == 0
            found[prompt] += piece.tolist()
        ended += segment.ended
        assert all(len(found[n]) == lengths[n] for n in range(ended))
    assert [token for prompt in found for token in prompt] == tokens.tolist()
    assert ended == len(lengths)


def counting(model) -> list[int]:
    """The list of the tokens of each call."""
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append(args[0].numel()))
    return calls


SEGMENTS = [(OPTIONS["default"], segment) for segment in (64, 128, 192)]
SEGMENTS += [(OPTIONS["all"], 64), (OPTIONS["recurrent"], 128)]


@pytest.mark.parametrize(("options", "segment"), SEGMENTS, ids=str)
def test_segments_are_one_piece(segment, options):
    model = make_model(torch.float64, **options)
    cache, whole = GLACache(), GLACache()
    expected = model.generate(PROMPTS, 10, temperature=0, past_key_values=whole)
    calls = counting(model)
    tokens = model.generate(
        PROMPTS, 10, temperature=0, past_key_values=cache, segment_tokens=segment
    )
    assert all(torch.equal(a, b) for a, b in zip(tokens, expected, strict=True))
    assert max(calls) <= segment
    assert len(calls) <= -(-sum(LENGTHS) // (segment - 63)) + 9
    for a, b in zip(states(cache), states(whole), strict=True):
        assert_close(a, b, 1e-12)
    assert_states(cache, model, [row[:-1] for row in tokens])


@with_options
def test_a_batch_passes_in_groups(options):
    model, ids = make_model(torch.float64, **options), make_ids(B=6, T=70)
    expected = model.generate(ids, 8, temperature=0)
    calls = counting(model)
    assert torch.equal(model.generate(ids, 8, 0, segment_tokens=192), expected)
    assert calls == [140, 140, 140, *[6] * 7]  # room for 52 more is no chunk
    stream = model.generate_stream(ids, 8, 0, segment_tokens=64)
    assert torch.equal(torch.stack(list(stream), 1), expected[:, 70:])


class RowByRow(torch.nn.Linear):
    """A BLAS may add up a row otherwise beside another number of rows."""

    def forward(self, x):
        rows = [super(RowByRow, self).forward(row) for row in x.flatten(0, -2).split(1)]
        return torch.cat(rows).view(*x.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@with_options
def test_segments_have_the_bits_of_one_piece(options, dtype, device):
    model = make_model(dtype, hidden_size=64, **options).to(device)
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = RowByRow
    found = []
    with batch_invariant():
        for segment in (2**14, 64, 192):
            cache = GLACache()
            tokens = model.generate(PROMPTS, 1, 0, past_key_values=cache, segment_tokens=segment)
            found.append([*tokens, *states(cache)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


# Sequences that go on.


def turns(model, run, first, second, count) -> list[list[torch.Tensor]]:
    """What is drawn after the first prompts, and after the second ones behind these."""
    cache = GLACache()
    return [run(model, prompts, count, cache) for prompts in (first, second)], cache


def by_generate(model, prompts, count, cache):
    rows = model.generate(prompts, count, temperature=0, past_key_values=cache)
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def by_stream(model, prompts, count, cache):
    stream = model.generate_stream(prompts, count, temperature=0, past_key_values=cache)
    return list(torch.stack(list(stream), 1))


@with_options
@pytest.mark.parametrize("run", [by_generate, by_stream])
def test_a_second_turn_goes_on(run, options):
    model, second = make_model(torch.float64, **options), [x.flip(0) for x in PROMPTS[::-1]]
    (one, two), cache = turns(model, run, PROMPTS, second, 7)
    for b, prompt in enumerate(PROMPTS):
        said = torch.cat([prompt, one[b], second[b]])
        assert torch.equal(two[b], model.generate(said[None], 7, 0)[0, len(said) :])
    assert torch.equal(cache.pending, torch.stack(two)[:, -1])
    longest = max(len(a) + len(b) for a, b in zip(PROMPTS, second, strict=True))
    assert cache.get_seq_length() >= longest + 13
    everything = zip(PROMPTS, one, second, two, strict=True)
    assert_states(cache, model, [torch.cat(x)[:-1] for x in everything])


@pytest.mark.parametrize(
    ("options", "training"),
    [(OPTIONS["default"], True), (OPTIONS["all"], False), (OPTIONS["recurrent"], False)],
)
def test_rows_that_ended_wait(training, options):
    """A row that drew an end token early goes on from there, whatever the others drew meanwhile."""
    model = make_model(torch.float64, **options).train(training)
    greedy = torch.stack(by_generate(model, PROMPTS, 12, None))
    ends = [greedy[0, 2].item(), greedy[3, 5].item()]
    cache = GLACache()
    one = model.generate(PROMPTS, 12, 0, eos_token_id=ends, past_key_values=cache)
    assert len({len(row) - len(prompt) for row, prompt in zip(one, PROMPTS, strict=True)}) > 1
    assert torch.equal(cache.pending, torch.stack([row[-1] for row in one]))
    assert_states(cache, model, [row[:-1] for row in one])
    two = model.generate([[7], *[[]] * 5], 6, 0, past_key_values=cache)
    for b, row in enumerate(one):
        said = torch.cat([row, row.new_tensor([7] if b == 0 else [])])
        assert (
            two[b][len(said) - len(row) :].tolist()
            == model.generate(said[None], 6, 0)[0, len(said) :].tolist()
        )


def test_a_stream_that_is_closed_leaves_what_came():
    model, cache = make_model(torch.float64), GLACache()
    stream = model.generate_stream(PROMPTS, 20, 0, past_key_values=cache)
    came = torch.stack([next(stream) for _ in range(4)], 1)
    assert len(cache) == 0
    stream.close()
    assert torch.equal(cache.pending, came[:, -1])
    assert_states(cache, model, [torch.cat([*x]) for x in zip(PROMPTS, came[:, :-1], strict=True)])


def test_prompts_alone_pass():
    model, cache = make_model(torch.float64), GLACache()
    given = model.generate(PROMPTS, 0, past_key_values=cache)
    assert all(torch.equal(a, b) for a, b in zip(given, PROMPTS, strict=True))
    assert cache.pending is None and cache.get_seq_length() == max(LENGTHS)
    assert_states(cache, model, PROMPTS)
    more = model.generate([[4]] * 6, 3, 0, past_key_values=cache)[2]
    said = torch.cat([PROMPTS[2], torch.tensor([4])])
    assert torch.equal(more[1:], model.generate(said[None], 3, 0)[0, len(said) :])


def test_pending_follows_the_cache():
    model, cache = make_model(torch.float64), GLACache()
    model.generate(make_ids(B=3, T=5), 4, past_key_values=cache)
    drawn = cache.pending
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(cache.pending, drawn[[2, 0]])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.pending, drawn[[2, 2, 0, 0]])
    model.generate(torch.zeros(4, 0, dtype=torch.long), 2, past_key_values=cache)
    with torch.no_grad():
        model(cache.pending[:, None], past_key_values=cache, use_cache=True)
    assert cache.pending is None  # it has passed
    cache.reset()
    assert cache.pending is None and len(cache) == 0


def test_a_cache_made_in_inference_mode_goes_on_outside():
    model, cache = make_model(torch.float64), GLACache()
    with torch.inference_mode():
        one = model.generate([PROMPTS[0]], 4, 0, past_key_values=cache)[0]
    assert not any(x.is_inference() for x in [cache.pending, *states(cache)])
    two = model.generate([[]], 4, 0, past_key_values=cache)[0]
    assert torch.equal(two, model.generate(one[None], 4, 0)[0, -4:])


def of_three_layers():
    cache = GLACache()
    make_model(num_hidden_layers=3).generate([[1, 2]], 2, past_key_values=cache)
    return cache


def of_two_sequences():
    cache = GLACache()
    make_model()(torch.tensor([[1], [2]]), past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"segment_tokens": 100}, ValueError, "a multiple of 64 above 0, got 100"),
        ({"segment_tokens": 0}, ValueError, "a multiple of 64 above 0, got 0"),
        ({"segment_tokens": 64.0}, TypeError, "segment_tokens to be an int, got 64.0"),
        ({"past_key_values": StaticGLACache(1)}, TypeError, "to be a GLACache, got .*Static"),
        ({"past_key_values": ()}, TypeError, "to be a GLACache, got <class 'tuple'>"),
        ({"past_key_values": of_two_sequences()}, ValueError, "each of 2 sequences, got 1"),
        ({"past_key_values": of_three_layers()}, ValueError, "num_hidden_layers = 2, got 3"),
        ({"input_ids": [[]]}, ValueError, r"prompt 0 to have shape \[at least 1\], got \[0\]"),
    ],
)
@pytest.mark.parametrize("function", ["generate", "generate_stream"])
def test_errors(function, options, kind, message):
    arguments = {"input_ids": [[1]], "max_new_tokens": 2} | options
    with pytest.raises(kind, match=message):
        getattr(make_model(), function)(**arguments)


def test_a_row_without_a_past_does_not_go_on():
    decoder = Decoder(make_model(), 3)
    with pytest.raises(ValueError, match=r"had a prompt with keep = True, got \[0, 1, 2\]"):
        decoder.prefill([[1], [2], [3]], keep=True)
    decoder.prefill([[1]], rows=[1])
    with pytest.raises(ValueError, match=r"had a prompt with keep = True, got \[0\]"):
        decoder.prefill([[1], [2]], rows=[0, 1], keep=True)
    with pytest.raises(ValueError, match="a multiple of 64 above 0, got 1"):
        decoder.prefill([[1]], rows=[1], segment_tokens=1)
