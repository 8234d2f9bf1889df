"""Which graph a decoder may replay again after `refresh`: one that would be captured the same now.

On a CPU a copy of the model, made at the capture, stands for the graph: it sees as little of what
Python would do otherwise by now.
"""

import copy
import threading
import types

import pytest
import torch
from models import make_ids
from stepped import CHANGES, make

from gla_ext.decode import ChangedError, Decoder, _capture
from gla_ext.decode import decoder as decode
from gla_ext.decode._loop import DecodeLoop
from gla_ext.model import GLAMLP

PROMPTS = [make_ids(B=1, T=T, seed=T)[0] for T in (5, 1, 70)]


class Copied:
    """In the place of a graph: the model as it was, with the forward that a class had."""

    def __init__(self, loop, model):
        self.loop, self.model = loop, copy.deepcopy(model)
        for module in self.model.modules():
            if type(module) is GLAMLP and "forward" not in vars(module):
                module.forward = types.MethodType(GLAMLP.forward, module)

    def replay(self):
        self.loop.advance(self.model)


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
        self.graphs[self._kind] = Copied(self, model)

    monkeypatch.setattr(DecodeLoop, "capture", spy)
    if device == "cpu":
        monkeypatch.setattr(decode, "uses_graph", lambda model, graph, *_: graph is not False)
    return found


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


def test_a_decoder_that_serves_generate(device, captures):
    """Its graph is captured once; a change is refused until `refresh`."""
    model = make(device)
    prompts = [prompt.to(device) for prompt in PROMPTS]
    decoder = Decoder(model, 3, temperature=0)

    def continued(**options):
        return [x.tolist() for x in model.generate(prompts, 20, **options)]

    for _ in range(2):
        assert continued(decoder=decoder) == continued(temperature=0, cuda_graph=False)
        stream = torch.stack([*model.generate_stream(prompts, 20, decoder=decoder)], 1)
        assert stream.tolist() == [row[-20:] for row in continued(decoder=decoder)]
    assert len(captures) == 1
    model.model.layers[0].attn.v_proj.disabled = True
    with pytest.raises(ChangedError, match=r"generate: .*disabled changed since; call refresh"):
        continued(decoder=decoder)
    decoder.refresh()
    assert continued(decoder=decoder) == continued(temperature=0, cuda_graph=False)
    assert len(captures) == 2
    with pytest.raises(ValueError, match="a decoder of this model, got one of another"):
        make(device).generate(prompts, 20, decoder=decoder)
    with pytest.raises(ValueError, match="a decoder of 1 rows, as there are prompts, got 3"):
        model.generate(prompts[:1], 20, decoder=decoder)
    with pytest.raises(ValueError, match=r"no temperature, .* beside decoder"):
        continued(decoder=decoder, top_k=3)


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
        self.state, self.seeds = "own", []

    def manual_seed(self, seed):
        self.seeds.append(seed)

    def graphsafe_get_state(self):
        return self.state

    def graphsafe_set_state(self, state):
        self.state = state


@pytest.fixture
def registering(monkeypatch):
    """Captures register the default generator, as up to torch 2.13."""
    monkeypatch.setattr(_capture, "DRAWS_ARE_RECORDED", False)


@pytest.mark.parametrize("allocates", [True, False])
def test_the_default_generator_is_back_before_a_capture_has_begun(
    monkeypatch, registering, allocates
):
    """As torch 2.11 does it, which registers a generator, allocates for it and marks it, in this
    order; and as other versions may, which allocate later.
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
    assert default.state == "own" and default.seeds == []


def test_a_seed_of_another_thread_is_kept_while_a_capture_begins(monkeypatch, registering):
    default = Generator()

    class Graph:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            default.state.manual_seed(5)  # what torch.manual_seed then seeds

    monkeypatch.setattr(torch.cuda, "default_generators", [default])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    _capture._begin(Graph())
    assert (default.state, default.seeds) == ("own", [5])


def test_newer_torch_is_left_the_default_generator(monkeypatch):
    default, seen = Generator(), []

    class Graph:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            seen.append((default.state, capture_error_mode))

    monkeypatch.setattr(_capture, "DRAWS_ARE_RECORDED", True)
    monkeypatch.setattr(torch.cuda, "default_generators", [default])
    _capture._begin(Graph())
    assert seen == [("own", "thread_local")]


def test_captures_elsewhere_wait_while_the_default_generator_has_another_state(
    monkeypatch, registering
):
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
