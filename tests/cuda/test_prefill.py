"""Prompts in segments, end tokens, and sequences that go on, on a GPU.

Equal bits (see common.py): tokens, and the same calls in graphs.
"""

import pytest
import torch
from cuda_tools import waits_for_nothing
from models import MODEL_EVERY, make_ids, make_model

from gla_ext.cache import GLACache
from gla_ext.decode import Decoder

pytestmark = pytest.mark.cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where all of this is skipped
PROMPTS = [make_ids(B=1, T=T, seed=T)[0].to(DEVICE) for T in (5, 200, 64, 1, 129, 70)]
with_options = pytest.mark.parametrize("options", [{}, MODEL_EVERY], ids=["default", "all"])


def model_on_gpu(dtype=torch.float32, **options):
    return make_model(dtype, hidden_size=64, **options).cuda()


def states(cache) -> list[torch.Tensor]:
    return [x for entry in cache for x in (entry["recurrent_state"], *(entry["conv_state"] or ()))]


@with_options
@pytest.mark.parametrize("segment", [64, 192])
def test_segments_are_one_piece(segment, options):
    model, caches = model_on_gpu(**options), [GLACache(), GLACache()]
    runs = [
        model.generate(PROMPTS, 12, 0, past_key_values=cache, segment_tokens=tokens)
        for cache, tokens in zip(caches, (2**14, segment), strict=True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for a, b in zip(*map(states, caches), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_memory_of_a_prompt_is_that_of_a_segment():
    """Longer ones add their tokens, 8 bytes each and as many in copies, and nothing a layer."""
    model, peaks = model_on_gpu(torch.bfloat16), {}
    for T in (8192, 8192, 65536):  # the first starts libraries up
        ids = make_ids(B=1, T=T).cuda()
        decoder = Decoder(model, 1, cuda_graph=False)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        decoder.prefill(ids, segment_tokens=4096)
        peaks[T] = torch.cuda.max_memory_allocated() - before
        del decoder
    assert peaks[65536] <= peaks[8192] + 4 * 8 * (65536 - 8192)
    decoder = Decoder(model, 1, cuda_graph=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoder.prefill(ids, segment_tokens=65536)
    assert torch.cuda.max_memory_allocated() - before > 4 * peaks[65536]


@with_options
def test_a_second_turn_with_graphs(captures, options):
    model, second = model_on_gpu(**options), [x.flip(0) for x in PROMPTS]
    greedy = model.generate(PROMPTS, 9, 0, cuda_graph=False)
    ends = [greedy[0][-5].item(), greedy[3][-7].item()]
    found = []
    for cuda_graph in (False, True):
        cache = GLACache()
        options = {"eos_token_id": ends, "past_key_values": cache, "cuda_graph": cuda_graph}
        one = model.generate(PROMPTS, 40, 0, **options)
        pending = cache.pending
        assert torch.equal(pending, torch.stack([row[-1] for row in one]))
        two = model.generate(second, 40, 0, **options)
        found.append([*one, *two])
    assert captures == [6, 6]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for b in range(len(PROMPTS)):
        said = torch.cat([one[b], second[b]])
        alone = model.generate([said], 40, 0, eos_token_id=ends, cuda_graph=False)[0]
        assert torch.equal(two[b][len(second[b]) :], alone[len(said) :])


def test_graphs_with_end_tokens(captures):
    model = model_on_gpu()
    greedy = model.generate(PROMPTS, 30, 0, cuda_graph=False)
    for ends in (None, greedy[0][-20].item(), [greedy[1][-9].item(), greedy[2][-3].item()]):
        eager = model.generate(PROMPTS, 30, 0, eos_token_id=ends, cuda_graph=False)
        graphed = model.generate(PROMPTS, 30, 0, eos_token_id=ends)
        assert all(torch.equal(a, b) for a, b in zip(graphed, eager, strict=True))
    assert captures == [6, 6, 6]


def test_a_stream_that_is_closed_leaves_what_came():
    model, cache = model_on_gpu(), GLACache()
    stream = model.generate_stream(PROMPTS, 20, 0, past_key_values=cache)
    came = torch.stack([next(stream) for _ in range(4)], 1)
    stream.close()
    assert torch.equal(cache.pending.cpu(), came[:, -1])
    rest = model.generate([[]] * len(PROMPTS), 16, 0, past_key_values=cache)
    whole = model.generate(PROMPTS, 20, 0)
    for row, first, expected in zip(rest, came, whole, strict=True):
        assert torch.equal(torch.cat([first, row.cpu()]), expected[-20:].cpu())


def test_a_decoder_goes_on_with_graphs():
    model, found = model_on_gpu(), []
    for cuda_graph in (True, False):
        decoder = Decoder(model, 6, 0, eos_token_id=[3, 4], cuda_graph=cuda_graph)
        tokens = [decoder.prefill(PROMPTS)]
        tokens += [decoder.step().clone() for _ in range(9)]
        tokens += [decoder.prefill([PROMPTS[1], [], [5]], rows=[4, 0, 2], keep=True)]
        tokens += [decoder.step().clone() for _ in range(9)]
        found.append(torch.cat(tokens))
    assert torch.equal(*found)


def test_steps_with_end_tokens_wait_for_nothing():
    decoder = Decoder(model_on_gpu(torch.bfloat16), 6, top_k=5, eos_token_id=[3, 4, 5])
    eager = Decoder(decoder.model, 6, top_k=5, eos_token_id=[3, 4, 5], cuda_graph=False)
    for one in (decoder, eager):
        one.prefill(PROMPTS)
    with waits_for_nothing():
        for one in (decoder, eager):
            for _ in range(3):
                one.step()
