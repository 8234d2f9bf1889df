"""Captures of graphs that are not gla_ext's, with a stand-in for torch's on the CPU."""

import contextlib
import gc

import pytest
from capturing import (
    BROKEN,
    NOT_BEGUN,
    TWICE,
    by_any_thread,
    captured,
    cycle,
    nothing,
)

from gla_ext.decode import _capture


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
