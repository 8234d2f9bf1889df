"""When graphs of `decode._capture` are destroyed, with a stand-in for torch's on the CPU."""

import contextlib
import gc
import subprocess
import sys
import threading
import types
import weakref

import pytest
import torch

from gla_ext.decode import _capture
from gla_ext.train.graph import GraphedStep

BROKEN = "operation failed due to a previous error during capture"
TWICE = "operation not permitted when stream is capturing"
NOT_BEGUN = "operation not permitted when stream is not capturing"
DRAWS = f"{_capture._NOT_THE_GRAPHS}."


class Device:
    """Graphs of a device that breaks a capture where one is destroyed during it."""

    def __init__(self):
        self.capturing = set()  # ids of graphs
        self.destroyed = 0
        self.broken = False
        self.on_begin = self.on_destroy = nothing
        device = self

        class CUDAGraph:
            def capture_begin(self, pool=None):
                device.on_begin()
                if id(self) in device.capturing:
                    raise RuntimeError(TWICE)
                device.capturing.add(id(self))

            def capture_end(self):
                if id(self) not in device.capturing:
                    raise RuntimeError(NOT_BEGUN)
                device.capturing.remove(id(self))
                if device.broken:
                    raise RuntimeError(BROKEN)

            def reset(self):
                """Forgets what was captured, which ends no capture."""

            def __del__(self):
                device.broken |= len(device.capturing) > 0
                device.on_destroy()
                device.destroyed += 1

        _capture.know_captures(CUDAGraph)
        self.graph_class = CUDAGraph


@pytest.fixture
def gpu(monkeypatch):
    found = Device()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", found.graph_class)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(_capture, "_begin", lambda graph, pool: graph.capture_begin(pool))
    return found


def nothing():
    pass


def in_thread(call):
    """Calls in another thread, and waits for it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


@contextlib.contextmanager
def captured(graph):
    """Inside, a graph is captured, as by `torch.cuda.graph`."""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def cycle():
    """A graph that refers to itself, which only the collector frees."""
    graph = _capture.record(nothing)
    graph.itself = graph
    return [graph]


def test_a_graph_dropped_beside_no_recording_is_destroyed_at_once(gpu):
    owners = [_capture.record(nothing)]
    assert list(_capture._streams.values()) == [7]
    owners.clear()
    assert gpu.destroyed == 1 and not _capture._streams
    owners = cycle()
    owners.clear()
    assert gpu.destroyed == 1
    gc.collect()
    assert gpu.destroyed == 2
    with _capture.one_at_a_time:  # a warm-up breaks by nothing
        owners.append(_capture.record(nothing))
        in_thread(owners.clear)
        assert gpu.destroyed == 3


by_any_thread = pytest.mark.parametrize(
    "run", [lambda call: call(), in_thread], ids=["this", "another"]
)


@by_any_thread
def test_a_graph_dropped_during_a_recording_is_destroyed_at_its_end(gpu, run):
    """Whichever thread drops it, by the last reference or by the collector."""
    owners, circular = [_capture.record(nothing)], cycle()

    def step():
        run(owners.clear)
        run(circular.clear)
        run(gc.collect)
        assert gpu.destroyed == 0
        assert list(_capture._streams.values()) == [7, 7]  # no other one is recorded there

    graph = _capture.record(step)
    assert gpu.destroyed == 2
    assert isinstance(graph, _capture.Graph) and not gpu.broken


def test_a_step_that_records_one_itself(gpu):
    """CUDA refuses it, where it was not replayed before; nothing waits for itself."""
    owners = [_capture.record(nothing)]

    def step():
        _capture.record(nothing)
        owners.clear()
        gc.collect()
        assert gpu.destroyed == 0

    in_thread(lambda: owners.append(_capture.record(step)))
    assert gpu.destroyed == 2 and not gpu.broken and len(owners) == 1


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_capture_waits_for_the_destruction_under_way(gpu, whose):
    owners, captured_meanwhile = [_capture.record(nothing)], []
    began = threading.Event()

    def capture():
        if whose == "ours":
            _capture.record(began.set)
        else:
            with captured(gpu.graph_class()):
                began.set()

    other = threading.Thread(target=capture)

    def on_destroy():
        gpu.on_destroy = nothing
        other.start()
        captured_meanwhile.append(began.wait(0.1))

    gpu.on_destroy = on_destroy
    owners.clear()
    other.join(10)
    assert captured_meanwhile == [False]
    assert began.is_set() and not gpu.broken


def test_every_graph_is_destroyed_at_last(gpu):
    """Those too that are dropped while a capture begins or ends, here or elsewhere."""
    over = threading.Event()
    theirs = [gpu.graph_class() for _ in range(2)]

    def drop():
        while not over.is_set():
            _capture.record(nothing)

    def capture(graph):
        while not over.is_set():
            with captured(graph):
                pass

    threads = [threading.Thread(target=drop) for _ in range(2)]
    threads += [threading.Thread(target=capture, args=(graph,)) for graph in theirs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        graphs = [_capture.record(nothing) for _ in range(300)]
        over.set()
        for thread in threads:
            thread.join()
    finally:
        over.set()
        sys.setswitchinterval(interval)
    assert not gpu.broken and not _capture._dropped._graphs
    assert len(_capture._streams) == len(graphs)
    graphs.clear()
    assert not _capture._streams


def test_a_graph_dropped_while_another_is_destroyed(gpu):
    """By another thread, which does not wait: whoever destroys the first one destroys it."""
    first, second = ([_capture.record(nothing)] for _ in range(2))

    def on_destroy():
        gpu.on_destroy = nothing
        in_thread(second.clear)
        assert gpu.destroyed == 0

    gpu.on_destroy = on_destroy
    first.clear()
    assert gpu.destroyed == 2


def test_a_capture_ends_while_another_thread_finds_it_under_way(gpu, monkeypatch):
    """Who drops has the lock and leaves the graph to the capture, which ends, finds the lock taken
    and leaves it to who drops.
    """
    owners, theirs = [_capture.record(nothing)], gpu.graph_class()
    steps = iter([theirs.capture_begin, theirs.capture_end])

    class Captured(weakref.WeakValueDictionary):
        def __len__(self):
            found = super().__len__()
            if threading.current_thread() is threading.main_thread():
                in_thread(next(steps, nothing))
            return found

    monkeypatch.setattr(_capture._dropped, "_captured", Captured())
    owners.clear()
    assert gpu.destroyed == 1 and not gpu.broken


@by_any_thread
def test_graphs_dropped_while_a_capture_becomes_known(gpu, monkeypatch, run):
    """The collector may interrupt who holds the lock; another thread does not wait for it."""
    owners, theirs = [_capture.record(nothing) for _ in range(2)], gpu.graph_class()

    class Captured(weakref.WeakValueDictionary):
        def __setitem__(self, key, graph):
            run(owners.pop)
            super().__setitem__(key, graph)
            before = gpu.destroyed
            run(owners.pop)
            assert gpu.destroyed == before

    monkeypatch.setattr(_capture._dropped, "_captured", Captured())
    with captured(theirs):
        pass
    assert gpu.destroyed == 2 and not gpu.broken


@by_any_thread
@pytest.mark.parametrize("broken", [False, True])
def test_a_graph_dropped_during_a_capture_elsewhere(gpu, broken, run):
    """It is destroyed at the end, also where that finds the capture broken by something else."""
    owners, circular, theirs = [_capture.record(nothing)], cycle(), gpu.graph_class()
    error = pytest.raises(RuntimeError, match=BROKEN) if broken else contextlib.nullcontext()
    with error, captured(theirs):
        run(owners.clear)
        run(circular.clear)
        run(gc.collect)
        assert gpu.destroyed == 0 and not gpu.broken
        gpu.broken = broken
    assert gpu.destroyed == 2 and gpu.broken == broken


def test_the_last_capture_that_ends(gpu):
    """An end too many ends no other capture."""
    owners = [_capture.record(nothing)]
    first, second = gpu.graph_class(), gpu.graph_class()
    first.capture_begin()
    second.capture_begin()
    owners.clear()
    first.capture_end()
    for graph in (first, gpu.graph_class()):
        with pytest.raises(RuntimeError, match=NOT_BEGUN):
            graph.capture_end()
    owners.append(_capture.record(nothing))
    owners.clear()
    assert len(_capture._dropped._graphs) == 2
    second.capture_end()
    assert not _capture._dropped._graphs


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_capture_that_does_not_begin(gpu, kind):
    owners, theirs = [_capture.record(nothing)], gpu.graph_class()

    def refuse():
        owners.clear()
        assert gpu.destroyed == 0
        raise kind(BROKEN)

    gpu.on_begin = refuse
    with pytest.raises(kind, match=BROKEN):
        theirs.capture_begin()
    assert gpu.destroyed == 1


def test_a_capture_that_begins_twice(gpu):
    """The first beginning holds."""
    owners, theirs = [_capture.record(nothing)], gpu.graph_class()
    with captured(theirs):
        with pytest.raises(RuntimeError, match=TWICE):
            theirs.capture_begin()
        owners.clear()
        assert gpu.destroyed == 0
    assert gpu.destroyed == 1 and not gpu.broken
    with captured(theirs):
        owners.append(_capture.record(nothing))
        owners.clear()
        assert gpu.destroyed == 1
    assert gpu.destroyed == 2 and not gpu.broken


def test_a_reset_ends_no_capture(gpu):
    owners, theirs = [_capture.record(nothing)], gpu.graph_class()
    with captured(theirs):
        theirs.reset()
        owners.clear()
        assert gpu.destroyed == 0
    assert gpu.destroyed == 1 and not gpu.broken


@pytest.mark.parametrize("circular", [False, True])
def test_a_capture_that_nobody_ends(gpu, circular):
    """It is over when its graph is freed; what waits is destroyed with the next one."""
    owners, theirs = [_capture.record(nothing) for _ in range(2)], gpu.graph_class()
    theirs.itself = theirs if circular else None
    theirs.capture_begin()
    owners.pop()
    assert gpu.destroyed == 0
    del theirs
    gc.collect()
    assert gpu.destroyed == 1
    owners.pop()
    assert gpu.destroyed == 3


def test_a_recording_that_is_interrupted_as_it_begins(gpu, monkeypatch):
    """Its graph does not wait for itself."""

    def begin(graph, pool):
        graph.capture_begin(pool)
        raise KeyboardInterrupt

    monkeypatch.setattr(_capture, "_begin", begin)
    with pytest.raises(KeyboardInterrupt):
        _capture.record(nothing)
    assert gpu.destroyed == 1 and not _capture._dropped._graphs


@pytest.mark.parametrize("known", [False, True])
def test_subclasses(gpu, known):
    """Their methods call those that are known, and may be known themselves."""
    owners = [_capture.record(nothing) for _ in range(2)]

    class Theirs(gpu.graph_class):
        fails = False

        def capture_begin(self, pool=None):
            super().capture_begin(pool)
            if self.fails:
                raise ValueError

        def capture_end(self):
            super().capture_end()

        def __eq__(self, other):  # nor has it a hash
            return True

    if known:
        _capture.know_captures(Theirs)
    first, second = Theirs(), Theirs()
    with captured(first):
        with captured(second):
            owners.pop()
        assert gpu.destroyed == 0
    assert gpu.destroyed == 1
    if not known:  # then what fails is none of what is known
        first.fails = True
        with pytest.raises(ValueError):
            first.capture_begin()
        owners.pop()
        assert gpu.destroyed == 1
        first.capture_end()
        assert gpu.destroyed == 2
    assert not gpu.broken


def test_methods_that_somebody_else_replaces(gpu, monkeypatch):
    """Those in place when a capture begins here are known then."""
    kind, begin = gpu.graph_class, gpu.graph_class.capture_begin
    with monkeypatch.context() as patch:
        patch.setattr(kind, "capture_begin", begin.__wrapped__)
        _capture.know_captures(kind)
        assert kind.capture_begin is not begin
    assert kind.capture_begin is begin
    _capture.know_captures(kind)
    assert kind.capture_begin is begin


def test_a_training_step_forgets_its_graph_while_another_thread_records(gpu):
    step = GraphedStep(lambda: torch.zeros(()), torch.device("cpu"))
    step._graph = _capture.record(nothing)

    def recorded():
        in_thread(step.reset)
        assert not step.recorded and gpu.destroyed == 0

    with _capture.one_at_a_time:
        _capture.record(recorded)
    assert gpu.destroyed == 2


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("broken", [False, True])
def test_the_error_of_a_step_is_what_the_caller_sees(gpu, kind, broken):
    """Not that of the capture which it has broken."""

    def step():
        gpu.broken = broken
        raise kind("operation not permitted when stream is capturing")

    with pytest.raises(kind, match="not permitted when stream is capturing"):
        _capture.record(step)
    assert not gpu.capturing
    gpu.broken = False
    assert _capture.record(nothing) is not None


def test_a_capture_that_breaks_without_an_error_of_the_step(gpu):
    def step():
        gpu.broken = True

    def draws():
        gpu.broken = True
        raise RuntimeError(DRAWS)

    for broken in (step, draws):
        with pytest.raises(RuntimeError, match=BROKEN):
            _capture.record(broken)


def test_a_step_that_draws_has_no_graph(gpu):
    def draws():
        raise RuntimeError(DRAWS)

    assert _capture.record(draws) is None
    assert not gpu.capturing and gpu.destroyed == 1


AT_EXIT = """
import atexit, gc, threading, types

destroyed = []
atexit.register(lambda: print(len(destroyed)))  # after what others register
gc.disable()

import torch
from gla_ext.decode import _capture

class CUDAGraph:
    def capture_begin(self, pool): pass
    def capture_end(self): pass
    def __del__(self, destroyed=destroyed): destroyed.append(self)

_capture.know_captures(CUDAGraph)
torch.cuda.CUDAGraph = CUDAGraph
torch.cuda.current_stream = lambda: types.SimpleNamespace(cuda_stream=7)
_capture._begin = lambda graph, pool: graph.capture_begin(pool)
kept, circular = (_capture.record(lambda: None) for _ in range(2))
circular.itself = circular
del circular
"""
RECORDS = """
began = threading.Event()
step = lambda: (began.set(), threading.Event().wait())
threading.Thread(target=_capture.record, args=(step,), daemon=True).start()
began.wait()
"""
ELSEWHERE = """
theirs = CUDAGraph()
theirs.capture_begin(None)
del kept
gc.collect()
"""


@pytest.mark.parametrize(
    "more", ["", RECORDS, ELSEWHERE], ids=["alone", "a thread records", "a capture elsewhere"]
)
def test_at_exit(more):
    """No graph is destroyed then, and nothing waits for a capture that is under way."""
    command = [sys.executable, "-c", AT_EXIT + more]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0\n", "")
