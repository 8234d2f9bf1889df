"""Generation on a GPU: steps in CUDA graphs, end tokens, sequences that go on, and memory.

Equal bits (see common.py): tokens, and the same calls in graphs.
"""

import contextlib
import gc

import pytest
import torch
from cuda_tools import peak_bytes, waits_for_nothing
from models import MODEL_EVERY, make_ids, make_model

from gla_ext.cache import GLACache
from gla_ext.decode import Decoder
from gla_ext.model import fuse_projections
from gla_ext.ops import batch_invariant

pytestmark = pytest.mark.cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where all of this is skipped
PROMPTS, LONGER = (
    [make_ids(B=1, T=T, seed=T)[0].to(DEVICE) for T in lengths]
    for lengths in ((5, 1, 70, 12), (5, 200, 64, 1, 129, 70))
)
OPTIONS = {
    "greedy": {"temperature": 0},
    "plain": {},
    "top_k": {"top_k": 5, "temperature": 0.7},
    "top_p": {"top_p": 0.9},
    "both": {"top_k": 9, "top_p": 0.8, "eos_token_id": 3},
    "end tokens": {"temperature": 0, "eos_token_id": [3, 4, 5]},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def model_on_gpu(dtype=torch.float32, **options):
    return make_model(dtype, hidden_size=64, **options).cuda()


def seeded(seed=0) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@by_options
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graph_is_eager(dtype, options, captures):
    model = model_on_gpu(dtype)
    # A prompt of one token is a chunk in eager and a step on a graph's states: other roundings.
    prompts = PROMPTS if dtype is torch.float32 else [PROMPTS[0], PROMPTS[0][:2], *PROMPTS[2:]]
    eager = model.generate(prompts, 40, generator=seeded(), cuda_graph=False, **options)
    assert not captures
    graphed = model.generate(prompts, 40, generator=seeded(), **options)
    assert captures == [4]
    assert_same(graphed, eager)
    stream = list(model.generate_stream(prompts, 40, generator=seeded(), **options))
    assert captures == [4, 4]
    for b, prompt in enumerate(prompts):
        new = graphed[b][len(prompt) :].cpu()
        assert torch.equal(torch.stack(stream)[: len(new), b], new)


@by_options
@pytest.mark.parametrize("default", [False, True])
def test_generator(default, options):
    model, found = model_on_gpu(), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        generator = None if default else seeded(seed)
        found.append(model.generate(PROMPTS, 40, generator=generator, **options))
    first, again, other = found
    assert_same(first, again)
    differs = any(a.shape != b.shape or not a.equal(b) for a, b in zip(first, other, strict=True))
    assert differs == (options.get("temperature") != 0)


MODES = {
    "train": contextlib.nullcontext,
    "batch_invariant": batch_invariant,
    "fused_recurrent": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cuda", torch.bfloat16),
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
def test_graph_is_eager_in_other_modes(mode):
    """And afterwards."""
    model = model_on_gpu(attn_mode="fused_recurrent" if mode == "fused_recurrent" else "chunk")
    model.train(mode == "train")
    plain = model.generate(PROMPTS, 30, temperature=0, cuda_graph=False)
    with MODES[mode]():
        eager = model.generate(PROMPTS, 30, temperature=0, cuda_graph=False)
        for _ in range(2):
            assert_same(model.generate(PROMPTS, 30, temperature=0), eager)
    assert_same(model.generate(PROMPTS, 30, temperature=0), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_projections(dtype, captures):
    model = model_on_gpu(dtype)
    decoder = Decoder(model, 4, temperature=0)
    fuse_projections(model)  # the graph reads where the weights were
    decoder.refresh()
    graphed = model.generate(PROMPTS, 40, decoder=decoder)
    assert_same(graphed, model.generate(PROMPTS, 40, temperature=0, cuda_graph=False))
    assert captures == [4, 4]
    if dtype == torch.float32:
        assert_same(graphed, model_on_gpu().generate(PROMPTS, 40, temperature=0))


def test_streams_side_by_side():
    model = model_on_gpu()
    expected = [model.generate(p[None], 20, temperature=0)[0, -20:].tolist() for p in PROMPTS]
    streams = [model.generate_stream(p[None], 20, temperature=0) for p in PROMPTS]
    together = [[x.item() for x in tokens] for tokens in zip(*streams, strict=True)]
    assert torch.tensor(together).T.tolist() == expected


def test_a_decoders_graph_on_another_stream():
    model, stream = model_on_gpu(), torch.cuda.Stream()
    decoder = Decoder(model, 4, temperature=0)
    expected = model.generate(PROMPTS, 200, temperature=0)
    for _ in range(5):
        here = model.generate(PROMPTS, 200, decoder=decoder)
        with torch.cuda.stream(stream):
            there = model.generate(PROMPTS, 200, decoder=decoder)
        assert_same(here, expected)
        stream.synchronize()
        assert_same(there, expected)


def test_a_call_leaves_nothing():
    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    model = model_on_gpu()
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")  # cuBLAS's workspace
    model.generate(PROMPTS, 2)
    before = allocated()
    states = 4 * 4 * 2 * 2 * 16 * 32  # fp32, B, layers, H, K, V
    for _ in range(3):
        model.generate(PROMPTS, 2)
    assert allocated() < before + states


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"top_k": 5}, {"top_k": 5, "eos_token_id": [3, 4, 5]}], ids=str
)
@pytest.mark.parametrize("cuda_graph", [None, False])
def test_steps_wait_for_nothing(cuda_graph, options):
    decoder = Decoder(model_on_gpu(torch.bfloat16), 4, cuda_graph=cuda_graph, **options)
    decoder.prefill(PROMPTS)
    with waits_for_nothing():
        for _ in range(5):
            decoder.step()


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_memory_does_not_grow_with_tokens(cuda_graph):
    model = model_on_gpu(torch.bfloat16)
    decoder = Decoder(model, 4, top_k=5, cuda_graph=cuda_graph)
    decoder.prefill(PROMPTS)
    peaks = []
    for steps in (20, 2000):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            decoder.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    "options, rows, more",
    [
        ({}, [PROMPTS[2], PROMPTS[0]], {"rows": [3, 1]}),
        ({"eos_token_id": [3, 4]}, [PROMPTS[1], [], [5]], {"rows": [2, 0, 3], "keep": True}),
    ],
    ids=["new sequences", "some go on"],
)
def test_rows_are_taken_up_again(options, rows, more):
    model, found = model_on_gpu(), []
    for cuda_graph in (True, False):
        decoder = Decoder(model, 4, temperature=0, cuda_graph=cuda_graph, **options)
        tokens = [decoder.prefill(PROMPTS)]
        tokens += [decoder.step().clone() for _ in range(9)]
        tokens.append(decoder.prefill(rows, **more))
        tokens += [decoder.step().clone() for _ in range(9)]
        found.append(torch.cat(tokens))
    assert torch.equal(*found)


@pytest.mark.parametrize("options", [{}, MODEL_EVERY], ids=["default", "all"])
def test_a_second_turn_with_graphs(captures, options):
    model, second = model_on_gpu(**options), [x.flip(0) for x in LONGER]
    greedy = model.generate(LONGER, 9, 0, cuda_graph=False)
    ends = [greedy[0][-5].item(), greedy[3][-7].item()]
    found = []
    for cuda_graph in (False, True):
        cache = GLACache()
        options = {"eos_token_id": ends, "past_key_values": cache, "cuda_graph": cuda_graph}
        one = model.generate(LONGER, 40, 0, **options)
        pending = cache.pending
        assert torch.equal(pending, torch.stack([row[-1] for row in one]))
        two = model.generate(second, 40, 0, **options)
        found.append([*one, *two])
    assert captures == [6, 6]
    assert_same(*found)
    for b in range(len(LONGER)):
        said = torch.cat([one[b], second[b]])
        alone = model.generate([said], 40, 0, eos_token_id=ends, cuda_graph=False)[0]
        assert torch.equal(two[b][len(second[b]) :], alone[len(said) :])


def test_memory_of_a_prompt_is_that_of_a_segment():
    """Longer ones add their tokens, 8 bytes each and as many in copies, and nothing a layer."""
    model, peaks = model_on_gpu(torch.bfloat16), {}

    def peak(ids, segment_tokens):
        decoder = Decoder(model, 1, cuda_graph=False)
        return peak_bytes(lambda: decoder.prefill(ids, segment_tokens=segment_tokens))

    for T in (8192, 8192, 65536):  # the first starts libraries up
        ids = make_ids(B=1, T=T).cuda()
        peaks[T] = peak(ids, 4096)
    assert peaks[65536] <= peaks[8192] + 4 * 8 * (65536 - 8192)
    assert peak(ids, 65536) > 4 * peaks[65536]
