"""Capture of CUDA graphs while other threads go on working.

torch.cuda.graph first waits for the whole device, which CUDA forbids while another thread captures.
It also puts the device's default generator into every capture (torch 2.11). Until the capture ends,
no other thread may then draw from that generator, or replay a graph that uses it. Neither is
necessary: the captures here give the default generator another state for the moment in which it is
registered.

From the first capture here on, `know_captures` patches `torch.cuda.CUDAGraph`'s `capture_begin` and
`capture_end`, for two reasons (torch 2.11):
- A graph that is freed during a capture, by any thread, breaks the capture, and Python's garbage
  collector may free one at any time. CUDA can tell whether a given stream is captured, but not
  whether any is, and torch has no list of captures. Only a method that every capture calls can tell
  when a dropped graph may be freed; never freeing them would leak their memory. A capture is not
  noticed if it began before the patch or does not use this class.
- `capture_begin` releases the GIL between registering the default generator and marking it. If
  another thread begins a capture there, that graph gets the state of ours: it could not be replayed
  before our capture ends, and would free the memory of our seed. Therefore captures in the whole
  process begin one at a time, under a lock that only a patched method can take for others.
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

# Held during a capture and its warm-up: the autotuning of a compiled step waits for the device too.
one_at_a_time = threading.RLock()

# Held while a graph registers the default generator, here or elsewhere.
_beginning = threading.RLock()

# The methods with which `know_captures` replaced methods of classes.
_known: set[Callable[..., Any]] = set()

WARMUPS = 2  # runs before a capture, since no library may initialize in it
STREAMS = 32  # number of streams that torch has for each priority, used in turn

Key = TypeVar("Key", bound=Hashable)

# torch's error if a captured step draws from a generator that is not registered with the graph.
_NOT_THE_GRAPHS = "Attempt to increase offset for a CUDA generator not in capture mode"


def can_capture() -> bool:
    """Whether torch's allocator has memory pools, which graphs need."""
    # Without them each tensor is a cudaMalloc, which CUDA forbids in a capture. Any value disables
    # them.
    return "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ


class _Dropped:
    """Graphs without a reference, until they are destroyed."""

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # Held while graphs are destroyed, or a capture is added.
        self._lock = threading.RLock()
        # Graphs being captured, by id, since a class may define its own comparison of graphs. If
        # nobody ends a capture, it ends when its graph is freed, which nothing here prevents.
        self._captured: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def take(self, owned: list[torch.cuda.CUDAGraph]) -> None:
        """Destroys the graph in a list, now or after the current captures have ended."""
        # A capture of this graph is over, as nobody has the graph. Kept here, it would wait for
        # itself.
        self._captured.pop(id(owned[0]), None)
        self._graphs.append(owned.pop())
        self._destroy()

    @contextlib.contextmanager
    def beginning(self, graph: Any) -> Iterator[None]:
        """While active, a graph's capture begins: a destruction in progress has ended, and no other
        one begins until `ended`.
        """
        with self._lock:
            again = id(graph) in self._captured
            self._captured[id(graph)] = graph
        try:
            yield
        except BaseException:
            if not again:  # otherwise the earlier capture continues
                self.ended(graph)
            raise

    def ended(self, graph: Any) -> None:
        """Destroys graphs that were dropped during a capture, unless another capture continues."""
        self._captured.pop(id(graph), None)
        self._destroy()

    def _destroy(self) -> None:
        # The garbage collector may call this in any thread, so it must not block: if another thread
        # holds the lock, it returns. The holder of the lock checks for dropped graphs afterwards:
        # this loop after it releases the lock, and a capture that was being added when it ends.
        while self._graphs and not self._captured and self._lock.acquire(blocking=False):
            try:
                if not self._captured:  # still none, and with the lock held none can be added
                    self._graphs.clear()
            finally:
                self._lock.release()


_dropped = _Dropped()


class Graph:
    """A CUDA graph of a step, see `record`.

    It may be dropped at any time, in any thread: CUDA's graph is destroyed when no known capture is
    in progress.
    """

    def __init__(self) -> None:
        # In a list, which `take` empties: another reference would delay the destruction.
        self._owned = [torch.cuda.CUDAGraph()]
        weakref.finalize(self, _dropped.take, self._owned).atexit = False

    def replay(self) -> None:
        """Queues the step on the current stream."""
        self._owned[0].replay()

    @contextlib.contextmanager
    def recording(self, pool: tuple[int, int] | None) -> Iterator[None]:
        """While active, all work that this thread queues on the current stream is recorded."""
        _begin(self._owned[0], pool)
        try:
            yield
        except BaseException:
            # Raise the step's error, not CUDA's later error that the capture is broken.
            with contextlib.suppress(RuntimeError):
                self._owned[0].capture_end()
            raise
        self._owned[0].capture_end()
        _streams[self._owned[0]] = torch.cuda.current_stream().cuda_stream


# The streams on which graphs were or will be recorded, by a graph or what keeps the stream for one,
# until that is freed.
_streams: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


@functools.cache
def _own_streams(device: int) -> tuple[torch.cuda.Stream, ...]:
    """All of torch's streams of high priority, the least high ones first: 96 on Hopper."""
    _, highest = torch.cuda.Stream.priority_range()
    return tuple(
        torch.cuda.Stream(device, priority=priority)
        for priority in range(-1, highest - 1, -1)
        for _ in range(STREAMS)
    )


def own_stream() -> torch.cuda.Stream:
    """A stream of the current device to warm up and capture on: the first stream on which none of
    the existing graphs was recorded, and that `keep_stream` keeps for none.

    Other threads must not work on it, as their work would be captured. Streams of default priority
    are shared in torch, so these have high priority. cuBLAS has a workspace for each thread and
    stream, 32 MiB on Hopper; backward of all threads runs in one, autograd's. A graph uses this
    workspace wherever it is replayed, so two graphs of one stream may not run at the same time:
    products that are added up there would mix, or wait for each other for ever. The workspace
    remains when the graph is destroyed. Always taking the first free stream avoids that 32 calls
    which each capture a graph leave 1 GiB.
    """
    streams, taken = _own_streams(torch.cuda.current_device()), set(_streams.values())
    return next((s for s in streams if s.cuda_stream not in taken), streams[0])


def keep_stream(owner: object, stream: torch.cuda.Stream) -> None:
    """Until its owner is freed, no other capture takes a stream, on which the owner warms up in one
    call of `apart` and records in a later one.
    """
    _streams[owner] = stream.cuda_stream


def wait_for_replays(device: torch.device) -> None:
    """Waits for the current stream. Call it before dropping graphs that may still run there: the
    next capture may free their memory.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def record(step: Callable[[], object], pool: tuple[int, int] | None = None) -> Graph | None:
    """A graph of the work that a step queues on the current stream, which must not be the default
    one.

    Args:
        step: the function to record.
        pool: memory pool for graphs that are replayed one after the other and leave no results in
            it, from `torch.cuda.graph_pool_handle()`. Default: None (a pool of its own).

    Returns:
        The graph; None if the step draws random numbers itself, for example for dropout.
    """
    # During a capture the allocator cannot free its cached memory.
    torch.cuda.empty_cache()
    graph, draws = Graph(), False
    with graph.recording(pool):
        try:
            step()
        except RuntimeError as error:
            if _NOT_THE_GRAPHS not in str(error):
                raise
            draws = True  # the step was aborted at this point
    return None if draws else graph


def capture(
    step: Callable[[], object], device: torch.device, pool: tuple[int, int] | None = None
) -> Graph | None:
    """`record` on a separate stream of the device, after steps that warm up the libraries it
    calls.
    """
    with apart(device):
        for _ in range(WARMUPS):
            step()
        return record(step, pool)


class GraphsOnDemand(Generic[Key]):
    """Graphs by key. The first request for a key returns None. The second one captures a graph and
    returns it, or None if none can be captured.
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
        """Drops the graphs; each is captured again at its next request."""
        self._graphs.clear()

    def warm_up(self, keys: Iterable[Key]) -> None:
        """Captures the missing graphs, in this order."""
        for key in keys:
            if key not in self._graphs:
                self._graphs[key] = self._capture(key)


@contextlib.contextmanager
def apart(
    device: torch.device, stream: torch.cuda.Stream | None = None
) -> Iterator[torch.cuda.Stream]:
    """While active, a step that is or will be recorded runs on a separate stream, in order with the
    current one: the given stream of an earlier call, or an `own_stream`. No other thread records.
    """
    with one_at_a_time, torch.cuda.device(device), _without_autocast_cache():
        stream = own_stream() if stream is None else stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield stream
        torch.cuda.current_stream().wait_stream(stream)


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """While active, autocast does not cache casts of weights: a graph would read them after
    autocast has freed them.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def know_captures(kind: type) -> None:
    """Makes captures with this class of graphs begin one at a time, and registers them. Graphs of
    this module that are dropped during such a capture are destroyed when it ends.

    A capture is registered from before `capture_begin` until `capture_end` returns or raises, or
    its graph is freed. Captures of subclasses are registered if their methods call these two.
    """
    begin, end = kind.capture_begin, kind.capture_end
    # Patch the end first: a capture that another thread registers meanwhile must also be removed.
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
    """Begins a capture with a new generator state instead of the default generator's."""
    know_captures(torch.cuda.CUDAGraph)
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    own = torch.Generator(default.device)
    own.seed()
    with _beginning:
        state = default.graphsafe_get_state()

        def restore() -> None:
            default.graphsafe_set_state(state)

        # A thread that draws before the state is restored gets numbers from the graph's state,
        # which are as good. No other graph gets that state: the capture may wait long for the GIL
        # at its first operation, but another capture waits until this one has begun.
        with _AtFirstOperation(restore):
            default.graphsafe_set_state(own)
            try:
                # Other threads may allocate meanwhile.
                graph.capture_begin(pool, capture_error_mode="thread_local")
            finally:
                restore()


class _AtFirstOperation(TorchDispatchMode):
    """While active, calls a function at the first operation of this thread.

    That operation allocates the graph's own seed. At that time the generator is registered, but not
    yet marked as captured; once marked, another thread's draw would raise an error.
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
