"""When graphs of `decode._capture` are destroyed, with a stand-in for torch's on the CPU."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest
from capturing import BROKEN, DRAWS, by_any_thread, captured, cycle, in_thread, nothing

from gla_ext.decode import _capture


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


@pytest.mark.parametrize("text", _capture._NOT_THE_GRAPHS)
def test_a_step_that_draws_has_no_graph(gpu, text):
    def draws():
        raise RuntimeError(f"{text}.")

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


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", RECORDS + ELSEWHERE], ids=["alone", "captures under way"])
def test_at_exit(more):
    """No graph is destroyed then, and nothing waits for a capture that is under way."""
    command = [sys.executable, "-c", AT_EXIT + more]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0\n", "")
