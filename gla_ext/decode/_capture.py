"""CUDA graphs captured beside whatever other threads do.

torch.cuda.graph waits for the whole device first, which CUDA forbids while another thread captures,
and takes the device's default generator into every capture (torch 2.11), after which no other
thread may draw from it, nor replay a graph that has it, until the capture ends. Neither is needed:
the default generator has another state for the moment in which a capture here takes it.

From the first capture here on, `know_captures` patches `torch.cuda.CUDAGraph`'s `capture_begin` and
`capture_end`, for two reasons (torch 2.11):
- A graph that is freed during a capture breaks it, in any thread, and Python's collector may free
  one at any time. CUDA tells whether one stream is captured, not whether any is, and torch has no
  list of captures. Only a method that every capture calls can tell when a dropped graph may go; to
  keep dropped graphs for good would keep their memory. A capture that had begun before the patch
  is not known, nor one by other means than this class.
- `capture_begin` gives up Python's lock between taking the default generator and marking it. A
  graph of somebody else that begins there would take the state of ours: it could not be replayed
  before the capture here ends, and would free the memory of its seed with itself. Captures of the
  whole process therefore begin in turn, by a lock that only a patched method can take for others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Held through a capture and what warms it up: a compiled step's tuning waits for the device too.
one_at_a_time = threading.RLock()

# Held while a graph takes the default generator, here or elsewhere.
_beginning = threading.RLock()

# What `know_captures` has put in place of classes' methods.
_known: set[Callable[..., Any]] = set()

WARMUPS = 2  # before a capture, in which no library may start up
STREAMS = 32  # that torch has of a priority, in turn

Key = TypeVar("Key", bound=Hashable)

# What torch says where a step being captured draws from a generator that the graph does not have.
_NOT_THE_GRAPHS = "Attempt to increase offset for a CUDA generator not in capture mode"


def can_capture() -> bool:
    """Whether torch's allocator has pools, which graphs take their memory from."""
    # Each tensor is then a cudaMalloc, which CUDA forbids in a capture. Its presence counts.
    return "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ


class _Dropped:
    """Graphs that nobody has any more, until they are destroyed."""

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # Held while graphs are destroyed, or a capture becomes known.
        self._lock = threading.RLock()
        # Graphs being captured, by id: a class may compare its graphs as it likes. A capture that
        # nobody ends is over when its graph is freed, which nothing here prevents.
        self._captured: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def take(self, owned: list[torch.cuda.CUDAGraph]) -> None:
        """Destroys the graph in a list, now or when the captures under way have ended."""
        # Its own is over: nobody has it any more, and it would wait for itself.
        self._captured.pop(id(owned[0]), None)
        self._graphs.append(owned.pop())
        self._destroy()

    @contextlib.contextmanager
    def beginning(self, graph: Any) -> Iterator[None]:
        """Inside, a graph's capture begins: the destruction under way is over, and no other one
        begins until `ended`.
        """
        with self._lock:
            again = id(graph) in self._captured
            self._captured[id(graph)] = graph
        try:
            yield
        except BaseException:
            if not again:  # else the capture that began before is still under way
                self.ended(graph)
            raise

    def ended(self, graph: Any) -> None:
        """Destroys what was dropped during a graph's capture, unless another one is under way."""
        self._captured.pop(id(graph), None)
        self._destroy()

    def _destroy(self) -> None:
        # The collector calls this in any thread, so it waits for none. Who has the lock looks for
        # more graphs: this loop after giving it back, a capture that becomes known at its end.
        while self._graphs and not self._captured and self._lock.acquire(blocking=False):
            try:
                if not self._captured:  # still none, now that none can become known
                    self._graphs.clear()
            finally:
                self._lock.release()


_dropped = _Dropped()


class Graph:
    """A CUDA graph of a step, see `record`.

    It may be dropped at any time, in any thread: what CUDA has of it is destroyed once no capture
    that is known is under way.
    """

    def __init__(self) -> None:
        # In a list that is emptied at the end: another reference would destroy it at another time.
        self._owned = [torch.cuda.CUDAGraph()]
        weakref.finalize(self, _dropped.take, self._owned).atexit = False

    def replay(self) -> None:
        """Queues the step on the current stream."""
        self._owned[0].replay()

    @contextlib.contextmanager
    def recording(self, pool: tuple[int, int] | None) -> Iterator[None]:
        """Inside, what this thread queues on the current stream is recorded."""
        _begin(self._owned[0], pool)
        try:
            yield
        except BaseException:
            # The step's error is what went wrong. CUDA's, that the capture is broken, follows.
            with contextlib.suppress(RuntimeError):
                self._owned[0].capture_end()
            raise
        self._owned[0].capture_end()
        _streams[self._owned[0]] = torch.cuda.current_stream().cuda_stream


# Where graphs were recorded, until they are destroyed.
_streams: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, int] = weakref.WeakKeyDictionary()


@functools.cache
def _own_streams(device: int) -> tuple[torch.cuda.Stream, ...]:
    """All of torch's streams of high priority, which it has whether anybody uses them or not."""
    return tuple(torch.cuda.Stream(device, priority=-1) for _ in range(STREAMS))


def own_stream() -> torch.cuda.Stream:
    """A stream of the current device to warm up and capture on: the first on which no graph that is
    there was recorded.

    It is none that other threads work on, whose work would be captured: of the default priority
    torch's streams are shared. And cuBLAS has a workspace for each thread and stream, 32 MiB on
    Hopper, which a graph goes on using wherever it is replayed and which stays when the graph goes:
    always the first, or 32 calls that each capture a graph would leave 1 GiB.
    """
    streams, taken = _own_streams(torch.cuda.current_device()), set(_streams.values())
    return next((s for s in streams if s.cuda_stream not in taken), streams[0])


def wait_for_replays(device: torch.device) -> None:
    """Waits for the current stream. Call it before giving up graphs that may still run there: the
    next capture may free their memory.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def record(step: Callable[[], object], pool: tuple[int, int] | None = None) -> Graph | None:
    """A graph of what a step queues on the current stream, which is not the device's default one.

    Args:
        step: what is recorded.
        pool: memory that graphs share which are replayed in turn and leave nothing in it, of
            `torch.cuda.graph_pool_handle()`. Default: None (its own).

    Returns:
        The graph; None of a step that draws random numbers itself, as one with dropout does.
    """
    # While a capture is under way the allocator cannot give back what it caches.
    torch.cuda.empty_cache()
    graph, draws = Graph(), False
    with graph.recording(pool):
        try:
            step()
        except RuntimeError as error:
            if _NOT_THE_GRAPHS not in str(error):
                raise
            draws = True  # and the step has stopped there
    return None if draws else graph


def capture(
    step: Callable[[], object], device: torch.device, pool: tuple[int, int] | None = None
) -> Graph | None:
    """`record` on a stream of its own of the device, after steps that warm up what it calls."""
    with apart(device):
        for _ in range(WARMUPS):
            step()
        return record(step, pool)


class GraphsOnDemand(Generic[Key]):
    """Graphs by a key: the first request finds none, the second one that is captured then, where
    there can be one.
    """

    def __init__(self, capture: Callable[[Key], Graph | None]) -> None:
        self._capture = capture
        self._seen: set[Key] = set()
        self._graphs: dict[Key, Graph | None] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: Key) -> Graph | None:
        """The key's graph, or None."""
        if key not in self._seen:
            self._seen.add(key)
        else:
            self.warm_up([key])
        return self._graphs.get(key)

    def clear(self) -> None:
        """Gives the graphs up; each is captured anew at the next request."""
        self._graphs.clear()

    def warm_up(self, keys: Iterable[Key]) -> None:
        """Captures those that are not there, in this order."""
        for key in keys:
            if key not in self._graphs:
                self._graphs[key] = self._capture(key)


@contextlib.contextmanager
def apart(
    device: torch.device, stream: torch.cuda.Stream | None = None
) -> Iterator[torch.cuda.Stream]:
    """Inside, a step that is or will be recorded runs on a stream of its own, in order with the
    current one: that of an earlier call, or another `own_stream`. No other thread records.
    """
    with one_at_a_time, torch.cuda.device(device), _without_autocast_cache():
        stream = own_stream() if stream is None else stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield stream
        torch.cuda.current_stream().wait_stream(stream)


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Inside, autocast keeps no casts of weights: a graph would go on reading them after autocast
    has freed them.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def know_captures(kind: type) -> None:
    """Makes captures of graphs of this class begin one after the other, and be known: graphs of
    here that are dropped during one are destroyed when it ends.

    It is known from before `capture_begin` until `capture_end` returns or raises, or its graph is
    freed. Subclasses are known by these methods too, where theirs call them.
    """
    begin, end = kind.capture_begin, kind.capture_end
    # The end first: what is known to begin in another thread must not end unknown.
    if end not in _known:

        @functools.wraps(end)
        def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return end(self, *args, **kwargs)
            finally:
                _dropped.ended(self)

        _known.add(capture_end)
        kind.capture_end = capture_end
    if begin not in _known:

        @functools.wraps(begin)
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _beginning, _dropped.beginning(self):
                return begin(self, *args, **kwargs)

        _known.add(capture_begin)
        kind.capture_begin = capture_begin


def _begin(graph: torch.cuda.CUDAGraph, pool: tuple[int, int] | None = None) -> None:
    """Begins the capture with a generator that no one else has in place of the default one."""
    know_captures(torch.cuda.CUDAGraph)
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    own = torch.Generator(default.device)
    own.seed()
    with _beginning:
        state = default.graphsafe_get_state()

        def restore() -> None:
            default.graphsafe_set_state(state)

        # Who draws before the state is back has numbers of the graph's generator, which are as
        # good. No other graph takes it: the capture's wait for Python, at its first operation, may
        # be long, but whoever begins another one waits for its end.
        with _AtFirstOperation(restore):
            default.graphsafe_set_state(own)
            try:
                # Other threads may allocate meanwhile.
                graph.capture_begin(pool, capture_error_mode="thread_local")
            finally:
                restore()


class _AtFirstOperation(TorchDispatchMode):
    """Inside, makes a call at the first operation of this thread.

    That is the allocation of the graph's own seed: the generator is registered then, and not yet
    marked as captured, from where on another thread's draw would raise.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._call()
        self._call = lambda: None
        return function(*args, **(kwargs or {}))
