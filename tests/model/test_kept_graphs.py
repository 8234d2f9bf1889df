"""Which graph `generate` may replay again: one that would be captured the same now.

On a CPU a copy of the model, made at the capture, stands for the graph: it sees as little of what
Python would do otherwise by now.
"""

import copy
import threading

import pytest
import torch
from models import make_ids, make_model
from torch import nn

from gla_ext.decode import Decoder, _capture
from gla_ext.decode import decoder as decode
from gla_ext.decode._loop import DecodeLoop

PROMPTS = [make_ids(B=1, T=T, seed=T)[0] for T in (5, 1, 70)]


class Copied:
    """In the place of a graph: the model as it was."""

    def __init__(self, loop, model):
        self.loop, self.model = loop, copy.deepcopy(model)

    def replay(self):
        self.loop.advance(self.model)


class Event:
    def record(self, stream):
        pass

    def wait(self, stream):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def captures(device, monkeypatch):
    """The loops that were captured."""
    found, capture = [], DecodeLoop.capture

    def spy(self, model, stepping):
        found.append(self)
        if device == "cuda":
            return capture(self, model, stepping)
        self.has_graphs = True
        self.keys.add(model)
        self.graphs[None] = Copied(self, model)

    monkeypatch.setattr(DecodeLoop, "capture", spy)
    if device == "cpu":
        monkeypatch.setattr(decode, "uses_graph", lambda model, graph, *_: graph is not False)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return found


def make(device):
    torch.manual_seed(0)
    return make_model(hidden_size=32, feature_map="relu").to(device)


def generate(model, **options):
    prompts = [prompt.to(model.lm_head.weight.device) for prompt in PROMPTS]
    return [x.tolist() for x in model.generate(prompts, 20, temperature=0, **options)]


def with_closure(scale):
    return lambda x: x * scale[0]


def negated(module, args, output):
    return -output


# A change that a key shows; test_graph_key.py has what a key shows.
CHANGES = {
    "hook": lambda m: m.model.layers[0].register_forward_hook(negated),
    "weights": lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.flip(0))),
}


def assert_follows(model, before, captures):
    """That the model, changed, gives what it gives without a graph, by a new graph, kept again."""
    now = generate(model, cuda_graph=False)
    assert now != before
    assert generate(model) == now
    assert generate(model) == now
    assert len(captures) == 2


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_kept_graph_is_that_of_the_model_now(device, captures, change):
    model = make(device)
    before = generate(model, cuda_graph=False)
    assert generate(model) == before
    assert generate(model) == before
    assert len(captures) == 1
    change(model)
    assert_follows(model, before, captures)


def drawn(decoder):
    prompts = [prompt.to(decoder.tokens.device) for prompt in PROMPTS]
    return torch.stack([decoder.prefill(prompts), *(decoder.step().clone() for _ in range(19))])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_decoder_that_is_refreshed(device, captures, change):
    model = make(device)
    decoder = Decoder(model, 3, temperature=0)
    before = drawn(decoder)
    change(model)
    decoder.refresh()
    now = drawn(Decoder(model, 3, temperature=0, cuda_graph=False))
    assert not torch.equal(now, before)
    for _ in range(2):
        assert torch.equal(drawn(decoder), now)
        decoder.refresh()
    assert len(captures) == 2


@pytest.mark.parametrize("keep_running", [False, True])
def test_a_decoder_keeps_its_graph_where_only_values_changed(device, captures, keep_running):
    model = make(device)
    graphed, eager = (Decoder(model, 3, temperature=0, cuda_graph=x) for x in (None, False))
    graph = graphed._loop.graph
    assert torch.equal(drawn(graphed), drawn(eager))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    graphed.refresh(keep_running)
    eager.refresh(keep_running)
    assert graphed._loop.graph is graph is not None
    assert len(captures) == 1
    if device == "cuda":  # where a graph reads the values
        if keep_running:
            assert torch.equal(graphed.step(), eager.step())
        assert torch.equal(drawn(graphed), drawn(eager))


def test_a_stream_whose_model_was_another_meanwhile_leaves_no_graph(device, captures):
    model = make(device)
    attn = model.model.layers[0].attn
    prompt = PROMPTS[0][None].to(device)
    stream = model.generate_stream(prompt, 20, temperature=0)
    next(stream)
    normalizer, attn.gate_logit_normalizer = attn.gate_logit_normalizer, 0.1
    captures[0].capture(model, model)  # as for a hybrid's longer rows
    attn.gate_logit_normalizer = normalizer
    stream.close()
    assert not decode._kept[model].loops


def test_a_graph_of_another_autocast(device, captures):
    model = make(device)
    for enabled in (False, True, False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            assert generate(model) == generate(model, cuda_graph=False)
    assert len(captures) == 2


def test_what_cannot_be_compared_is_not_kept(device, captures):
    model, scale = make(device), [1.0]
    model.model.layers[1].mlp.forward = with_closure(scale)
    before = generate(model)
    assert generate(model) == before
    assert len(captures) == 2
    scale[0] = -3.0
    assert generate(model) == generate(model, cuda_graph=False) != before
    assert len(captures) == 3
    assert not decode._kept[model].loops


def test_calls_at_once_have_graphs_of_their_own(device, captures):
    model = make(device)
    expected = generate(model)[0][-20:]
    prompt = PROMPTS[0][None].to(device)
    for _ in range(2):
        streams = [model.generate_stream(prompt, 20, temperature=0) for _ in range(2)]
        pairs = [[x.item() for x in pair] for pair in zip(*streams, strict=True)]
        for stream in streams:
            stream.close()
        assert [list(row) for row in zip(*pairs, strict=True)] == [expected] * 2
    assert len(captures) == 3  # of three prompts, and of two streams, which are kept
    stream = model.generate_stream(prompt, 20, temperature=0)
    next(stream)
    kept = decode._kept[model]
    decode.free_decoders(model)
    assert model not in decode._kept
    stream.close()
    assert not kept.loops


def test_a_graph_needs_torchs_cache_of_memory(monkeypatch):
    monkeypatch.setattr(decode, "device_of", lambda model: torch.device("cuda"))
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    assert decode.uses_graph(None, None) and not decode.uses_graph(None, False)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")  # torch asks whether it is there
    assert not decode.uses_graph(None, None) and not decode.uses_graph(None, True)


class Generator:
    """A generator whose state may be lent, as those of CUDA may."""

    device = torch.device("cpu")

    def __init__(self):
        self.state = "own"

    def graphsafe_get_state(self):
        return self.state

    def graphsafe_set_state(self, state):
        self.state = state


@pytest.mark.parametrize("allocates", [True, False])
def test_the_default_generator_is_back_before_a_capture_has_begun(monkeypatch, allocates):
    """As torch 2.11 does it, which registers a generator, allocates for it and marks it, in this
    order; and as later versions do, which do none of it.
    """
    default, seen = Generator(), []

    class Graph:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            assert capture_error_mode == "thread_local"
            seen.append(default.state)
            if allocates:
                torch.empty(1)
                seen.append(default.state)

        def capture_end(self):
            pass

    monkeypatch.setattr(torch.cuda, "default_generators", [default])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    _capture._begin(Graph())
    assert isinstance(seen[0], torch.Generator)
    assert seen[1:] == ["own"] * allocates
    assert default.state == "own"


def test_captures_elsewhere_wait_while_the_default_generator_has_another_state(monkeypatch):
    """A graph that took that state could not be replayed before the capture here ends."""
    default, seen, began = Generator(), [], threading.Event()

    class Graph:
        """Of anybody, as `torch.cuda.CUDAGraph`."""

        def capture_begin(self, pool=None, capture_error_mode="global"):
            seen.append(default.state)
            began.set()

        def capture_end(self):
            pass

    class Ours:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            other.start()
            assert not began.wait(0.1)
            torch.empty(1)
            assert default.state == "own"

    other = threading.Thread(target=lambda: Graph().capture_begin(capture_error_mode="relaxed"))
    monkeypatch.setattr(torch.cuda, "default_generators", [default])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    _capture._begin(Ours())
    other.join()
    assert seen == ["own"]
    before = Graph.capture_begin, Graph.capture_end
    _capture.know_captures(Graph)
    assert (Graph.capture_begin, Graph.capture_end) == before


def test_graphs_on_demand():
    """The second request captures; one without a graph is not captured again."""
    made = []
    graphs = _capture.GraphsOnDemand(lambda key: made.append(key) or (key if key > 1 else None))
    assert [graphs.find(key) for key in (2, 2, 2, 1, 1, 1)] == [None, 2, 2, None, None, None]
    assert made == [2, 1]
    graphs.warm_up([3, 2])
    assert made == [2, 1, 3] and len(graphs) == 3
    assert graphs.find(3) == 3  # the first request
