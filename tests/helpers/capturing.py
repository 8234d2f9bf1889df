"""A stand-in on the CPU for a device whose graphs `decode._capture` records and destroys."""

import contextlib
import threading

import pytest

from gla_ext.decode import _capture

BROKEN = "operation failed due to a previous error during capture"
TWICE = "operation not permitted when stream is capturing"
NOT_BEGUN = "operation not permitted when stream is not capturing"
DRAWS = f"{_capture._NOT_THE_GRAPHS[0]}."


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


by_any_thread = pytest.mark.parametrize(
    "run", [lambda call: call(), in_thread], ids=["this", "another"]
)
