"""Generation from several threads of one process, beside others that train, draw and capture.

Equal bits (see common.py): tokens, and the same calls in graphs.
"""

import contextlib
import functools
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import make_ids, make_model

from gla_ext.decode import Decoder, _capture
from gla_ext.decode._loop import DecodeLoop

pytestmark = pytest.mark.cuda

THREADS = 4
LENGTHS = (5, 1, 70, 12)


def model_on_gpu(**options):
    return make_model(torch.float32, hidden_size=64, **options).cuda()


def prompts_of(thread):
    """Of each thread other ones, and another number of them."""
    return [make_ids(B=1, T=T, seed=T + thread)[0].cuda() for T in LENGTHS[: thread % 2 + 3]]


@functools.cache
def streams():
    """One for each thread, one for what is beside them, one for its captures: all different."""
    return [torch.cuda.Stream() for _ in range(THREADS + 2)]


def continued(model, thread, **options) -> list[list[int]]:
    """What a thread's prompts become, on a stream of its own."""
    with torch.cuda.stream(streams()[thread]):
        prompts = prompts_of(thread)
        return [x.tolist() for x in model.generate(prompts, 40, **options)]


@contextlib.contextmanager
def beside(work):
    """Inside, another thread repeats `work` on a stream of its own; raises what it raised."""
    over, started = threading.Event(), threading.Event()
    torch.cuda.synchronize()  # what `work` reads was made on this thread's stream

    def repeat():
        with torch.cuda.stream(streams()[THREADS]):
            try:
                while not over.is_set():
                    work()
                    started.set()
            finally:
                started.set()

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(repeat)
        started.wait()
        try:
            yield
        finally:
            over.set()
            result.result()


def training():
    """A step of training another model, with dropout, on the default generator."""
    torch.manual_seed(3)
    model = make_model(torch.float32, hidden_size=64).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = make_ids(T=70).cuda()

    def step():
        x = torch.nn.functional.dropout(model.model(ids).last_hidden_state, 0.1)
        loss = torch.nn.functional.cross_entropy(model.lm_head(x).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.isfinite().item()

    return step


def capturing():
    """A capture of something else, by torch's own means, but for its wait for the device."""
    x = torch.ones(64, 64, device="cuda")

    def capture():
        with torch.cuda.stream(streams()[-1]):
            x @ x
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            y = x @ x
            graph.capture_end()
            graph.replay()
            assert y[0, 0].item() == 64

    return capture


def sampled(model, thread, **options):
    generator = torch.Generator("cuda").manual_seed(thread)
    return continued(model, thread, generator=generator, top_p=0.9, **options)


def decoded(model, thread, cuda_graph=None):
    """By a decoder of the thread."""
    with torch.cuda.stream(streams()[thread]):
        decoder = Decoder(model, 2, temperature=0, cuda_graph=cuda_graph)
        tokens = [decoder.prefill(prompts_of(thread)[:2])]
        tokens += [decoder.step().clone() for _ in range(30)]
        return torch.stack(tokens, 1).tolist()


WORK = {
    "greedy": functools.partial(continued, temperature=0),
    "greedy, top_k": functools.partial(continued, temperature=0, top_k=5),
    "sampled": sampled,
    "decoders": decoded,
}


@pytest.mark.parametrize(
    "other, work",
    [*[(training, work) for work in WORK], (capturing, "greedy"), (capturing, "greedy, top_k")],
)
def test_threads_give_what_one_gives(other, work):
    """Every thread captures at once; five times over."""
    model, work = model_on_gpu(), WORK[work]
    expected = [work(model, thread, cuda_graph=False) for thread in range(THREADS)]
    with beside(other()), ThreadPoolExecutor(THREADS) as pool:
        for _ in range(5):
            start = threading.Barrier(THREADS)

            def run(thread, start=start):
                start.wait()
                return [work(model, thread) for _ in range(3)]

            for thread, results in enumerate(pool.map(run, range(THREADS))):
                assert results == [expected[thread]] * 3


def test_threads_that_sample_with_the_default_generator():
    model = model_on_gpu()
    with beside(training()), ThreadPoolExecutor(THREADS) as pool:
        for _ in range(5):
            results = list(pool.map(lambda thread: continued(model, thread), range(THREADS)))
            assert all(0 <= token < 31 for result in results for row in result for token in row)


def test_many_captures_share_no_stream():
    """And side by side all give the same."""
    model = model_on_gpu()
    decoders = [Decoder(model, 1, temperature=0) for _ in range(12)]
    for decoder in decoders:
        decoder.prefill(prompts_of(0)[:1])
    expected = [decoders[0].step().item() for _ in range(20)]
    graphs = [decoder._loop.graph._owned[0] for decoder in decoders]
    assert len({_capture._streams[graph] for graph in graphs}) == len(decoders)
    found = []
    for n, decoder in enumerate(decoders[1:]):
        stream = streams()[n % THREADS]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append([decoder.step().clone() for _ in range(20)])
    torch.cuda.synchronize()
    assert all([x.item() for x in tokens] == expected for tokens in found)


def circular(decoder):
    """A list that refers to itself and to the decoder, which only the collector then frees."""
    owners = [decoder]
    owners.append(owners)
    return owners


@pytest.mark.parametrize("by", ["this thread", "another thread"])
@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_graphs_that_are_collected_during_a_capture(monkeypatch, whose, by):
    """CUDA would break the capture, were they destroyed there."""
    model, seen = model_on_gpu(), []
    expected = continued(model, 0, temperature=0, cuda_graph=False)
    x = torch.ones(64, device="cuda")
    assert (x + 1).sum().item() == 128  # warms up
    gc.collect()  # no graph that others have left is destroyed in the capture
    owners = [circular(Decoder(model, 2))]
    dropped = weakref.ref(owners[0][0])
    graph = weakref.ref(owners[0][0]._loop.graph._owned[0])
    advance = DecodeLoop.advance

    def collect():
        owners.clear()
        with ThreadPoolExecutor(1) as pool:
            gc.collect() if by == "this thread" else pool.submit(gc.collect).result()
        seen.append((dropped(), graph() is None))

    def spy(self, stepping):
        if torch.cuda.is_current_stream_capturing():
            collect()
        advance(self, stepping)

    if whose == "ours":
        monkeypatch.setattr(DecodeLoop, "advance", spy)
        assert continued(model, 0, temperature=0) == expected
    else:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):  # in its default mode
            collect()
            y = x + 1
        captured.replay()
        assert y.sum().item() == 128
    assert seen == [(None, False)]
    assert graph() is None


@pytest.mark.parametrize("work", ["draw", "replay"])
def test_others_draw_while_a_step_is_captured(monkeypatch, work):
    """Torch's capture would refuse both until its end."""
    model, results = model_on_gpu(), []
    ready = Decoder(model, 2)
    ready.prefill(prompts_of(0)[:2])
    advance = DecodeLoop.advance

    def spy(self, stepping):
        if torch.cuda.is_current_stream_capturing():
            with ThreadPoolExecutor(1) as pool:
                call = ready.step if work == "replay" else lambda: torch.rand(3, device="cuda")
                results.append(pool.submit(lambda: call().tolist()).result())
        advance(self, stepping)

    monkeypatch.setattr(DecodeLoop, "advance", spy)
    assert Decoder(model, 2)._loop.graph is not None
    assert len(results) == 1


def test_a_capture_leaves_the_default_generator_as_it_is():
    model = model_on_gpu()
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    torch.manual_seed(5)
    before = default.get_state()
    assert Decoder(model, 2)._loop.graph is not None
    assert torch.equal(default.get_state(), before)


@pytest.mark.skipif(_capture.DRAWS_ARE_RECORDED, reason="torch before 2.14 records no draws")
def test_a_step_with_dropout_has_no_graph():
    """Its random numbers are torch's own, which a graph would keep from other threads."""
    model = model_on_gpu().train()
    model.model.layers[0].mlp = torch.nn.Sequential(
        model.model.layers[0].mlp, torch.nn.Dropout(0.5)
    )
    draws = []
    for cuda_graph in (None, False):
        torch.manual_seed(1)
        model.generate(prompts_of(0), 2, temperature=0, cuda_graph=cuda_graph)  # warms up
        torch.manual_seed(1)
        decoder = Decoder(model, 3, temperature=0, cuda_graph=cuda_graph)
        assert decoder._loop.graph is None
        torch.manual_seed(1)
        tokens = [decoder.prefill(prompts_of(0))] + [decoder.step().clone() for _ in range(20)]
        draws.append(torch.stack(tokens, 1))
    assert torch.equal(*draws)
