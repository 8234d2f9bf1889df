"""Generation on a GPU: steps in CUDA graphs, and their memory.

Equal bits (see common.py): tokens, and the same calls in graphs.
"""

import gc

import pytest
import torch
from cuda_tools import waits_for_nothing
from models import make_ids, make_model

from gla_ext.decode import Decoder
from gla_ext.model import fuse_projections
from gla_ext.ops import batch_invariant

pytestmark = pytest.mark.cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where all of this is skipped
PROMPTS = [make_ids(B=1, T=T, seed=T)[0].to(DEVICE) for T in (5, 1, 70, 12)]
OPTIONS = {
    "greedy": {"temperature": 0},
    "plain": {},
    "top_k": {"top_k": 5, "temperature": 0.7},
    "top_p": {"top_p": 0.9},
    "both": {"top_k": 9, "top_p": 0.8, "eos_token_id": 3},
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
def test_generator(options):
    model = model_on_gpu()
    first, again, other = (
        model.generate(PROMPTS, 40, generator=seeded(seed), **options) for seed in (0, 0, 1)
    )
    assert_same(first, again)
    differs = any(a.shape != b.shape or not a.equal(b) for a, b in zip(first, other, strict=True))
    assert differs == (options != OPTIONS["greedy"])


def test_the_default_generator_is_followed():
    model, draws = model_on_gpu(), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(model.generate(PROMPTS[2][None], 40))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("mode", ["train", "batch_invariant", "fused_recurrent", "autocast"])
def test_graph_is_eager_in_other_modes(mode):
    model = model_on_gpu(attn_mode="fused_recurrent" if mode == "fused_recurrent" else "chunk")
    model.train(mode == "train")
    with (
        batch_invariant(mode == "batch_invariant"),
        torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"),
    ):
        eager = model.generate(PROMPTS, 30, temperature=0, cuda_graph=False)
        assert_same(model.generate(PROMPTS, 30, temperature=0), eager)
    with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"):
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    with (
        batch_invariant(mode == "batch_invariant"),
        torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"),
    ):
        assert_same(model.generate(PROMPTS, 30, temperature=0), eager)


def test_a_decoder_serves_many_calls(captures):
    model, ids = model_on_gpu(), make_ids(T=7).cuda()
    decoder = Decoder(model, 2, temperature=0)
    for T in (7, 3, 5):
        graphed = model.generate(ids[:, :T], 20, decoder=decoder)
        eager = model.generate(ids[:, :T], 20, temperature=0, cuda_graph=False)
        assert torch.equal(graphed, eager)
    assert captures == [2]


def test_a_decoders_graph_follows_the_weights(captures):
    model = model_on_gpu()
    decoder = Decoder(model, 4, temperature=0)
    model.generate(PROMPTS, 20, decoder=decoder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=seeded(), device="cuda"))
    decoder.refresh()
    graphed = model.generate(PROMPTS, 20, decoder=decoder)
    assert captures == [4]
    assert_same(graphed, model.generate(PROMPTS, 20, temperature=0, cuda_graph=False))


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
    model.generate(PROMPTS, 2)  # and of the stream that graphs are captured on
    before = allocated()
    states = 4 * 4 * 2 * 2 * 16 * 32  # fp32, B, layers, H, K, V
    for _ in range(3):
        model.generate(PROMPTS, 2)
    assert allocated() < before + states


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 5}], ids=str)
def test_steps_wait_for_nothing(options):
    model = model_on_gpu(torch.bfloat16)
    decoder = Decoder(model, 4, **options)
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


def test_rows_taken_by_new_sequences():
    model = model_on_gpu()
    graphed, eager = (Decoder(model, 4, temperature=0, cuda_graph=x) for x in (True, False))
    found = []
    for decoder in (graphed, eager):
        tokens = [decoder.prefill(PROMPTS)]
        tokens += [decoder.step().clone() for _ in range(7)]
        tokens.append(decoder.prefill([PROMPTS[2], PROMPTS[0]], rows=[3, 1]))
        tokens += [decoder.step().clone() for _ in range(7)]
        found.append(torch.cat(tokens))
    assert torch.equal(*found)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_compiled_steps(cuda_graph):
    """They round otherwise, so what they draw is as probable as the most probable token."""
    model = model_on_gpu()
    decoder = Decoder(model, 4, temperature=0, cuda_graph=cuda_graph, compiled=True)
    tokens = [decoder.prefill(PROMPTS)] + [decoder.step().clone() for _ in range(20)]
    tokens = torch.stack(tokens, 1)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, row])[None]).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, row[:, None]).squeeze(1)
        assert (logits.amax(1) - chosen).max() < 1e-3


def test_inference_mode():
    model = model_on_gpu()
    expected = model.generate(PROMPTS, 20, temperature=0, cuda_graph=False)
    with torch.inference_mode():
        assert_same(model.generate(PROMPTS, 20, temperature=0), expected)
    assert_same(model.generate(PROMPTS, 20, temperature=0), expected)
