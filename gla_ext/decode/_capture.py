"""Capture of CUDA graphs while other threads go on working.

torch.cuda.graph first waits for the whole device, which CUDA forbids while another thread captures.
Up to 2.13 torch also puts the device's default generator into every capture. Until the capture
ends, no other thread may then draw from that generator, or replay a graph that uses it. Neither is
necessary: the captures here give the default generator another state for the moment in which it is
registered.

From the first capture here on, `know_captures` patches the methods of `torch.cuda.CUDAGraph` that
begin and end a capture, for two reasons:
- A graph that is freed during a capture, by any thread, breaks the capture, and Python's garbage
  collector may free one at any time. CUDA can tell whether a given stream is captured, but not
  whether any is, and torch has no list of captures. Only a method that every capture calls can tell
  when a dropped graph may be freed; never freeing them would leak their memory. A capture is not
  noticed if it began before the patch or does not use this class.
- Up to 2.13, `capture_begin` releases the GIL between registering the default generator and marking
  it. If another thread begins a capture there, that graph gets the state of ours: it could not be
  replayed before our capture ends, and would free the memory of our seed. Therefore captures in the
  whole process begin one at a time, under a lock that only a patched method can take for others.
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

from gla_ext import _C

# Held during a capture and its warm-up: the autotuning of a compiled step waits for the device too.
one_at_a_time = threading.RLock()

# Held while a graph registers the default generator, here or elsewhere.
_beginning = threading.RLock()

# The methods with which `know_captures` replaced methods of classes.
_known: set[Callable[..., Any]] = set()

WARMUPS = 2  # runs before a capture, since no library may initialize in it
STREAMS = 32  # number of streams that torch has for each priority, used in turn

Key = TypeVar("Key", bound=Hashable)

# Whether a captured step may draw from generators that were not registered with its graph.
DRAWS_ARE_RECORDED = torch.torch_version.TorchVersion(torch.__version__) >= (2, 14)

# torch's error if a captured step draws from a generator that is not registered with the graph: up
# to 2.12, and in 2.13.
_NOT_THE_GRAPHS = (
    "Attempt to increase offset for a CUDA generator not in capture mode",
    "RNG op during graph capture but generator is not registered with the capturing graph",
)


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

    @property
    def pool(self) -> tuple[int, int]:
        """The memory pool that it was recorded in."""
        return self._owned[0].pool()


# The streams on which graphs were recorded, until these are destroyed.
_streams: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, int] = weakref.WeakKeyDictionary()


@functools.cache
def _own_streams(device: int) -> tuple[torch.cuda.Stream, ...]:
    """All of torch's streams of a priority that nothing in torch asks for: FSDP2 asks for -1."""
    priority = max(-2, torch.cuda.Stream.priority_range()[1])
    return tuple(torch.cuda.Stream(device, priority=priority) for _ in range(STREAMS))


def own_stream() -> torch.cuda.Stream:
    """A stream of the current device to warm up and capture on: the first stream on which none of
    the existing graphs was recorded, or else the first.

    Other threads must not work on it, as their work would be captured. Streams of default priority
    are shared in torch, so these have a higher one. Graphs of one stream still share workspaces
    (see `record`) where the allocator is cudaMallocAsync.
    """
    streams, taken = _own_streams(torch.cuda.current_device()), set(_streams.values())
    return next((s for s in streams if s.cuda_stream not in taken), streams[0])


def wait_for_replays(device: torch.device) -> None:
    """Waits for the current stream. Call it before dropping graphs that may still run there: the
    next capture may free their memory.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class SharedMemory:
    """Memory for graphs that are replayed one after the other and leave no results in it: the first
    one's pool and stream, as torch gives freed memory only to the stream that had it.
    """

    def __init__(self) -> None:
        self.pool: tuple[int, int] | None = None
        self.stream: torch.cuda.Stream | None = None


def record(step: Callable[[], object], pool: tuple[int, int] | None = None) -> Graph | None:
    """A graph of the work that a step queues on the current stream, which must not be the default
    one.

    cuBLAS adds up in workspaces, 32 MiB each on Hopper. Up to 2.14 torch has one for each thread
    and stream, and runs the backward of all threads in one thread. A graph would share them with
    the next one of its stream: replayed at the same time, the two would mix their sums, or wait for
    each other for ever. And torch frees them when `torch.compile(mode="reduce-overhead")` records,
    from 2.12 on also when any graph of the stream is destroyed. So a graph gets its workspaces from
    its own memory here.

    Args:
        step: the function to record.
        pool: of its memory, see `SharedMemory`. Default: None (one of its own).

    Returns:
        The graph; None if the step draws random numbers itself, for example for dropout, and torch
        is older than 2.14, which records that.
    """
    stream = torch.cuda.current_stream().cuda_stream
    _C.drop_workspaces(stream)
    # During a capture the allocator cannot free its cached memory.
    torch.cuda.empty_cache()
    graph, draws = Graph(), False
    try:
        with graph.recording(pool):
            try:
                step()
            except RuntimeError as error:
                if not any(text in str(error) for text in _NOT_THE_GRAPHS):
                    raise
                draws = True  # the step was aborted at this point
    finally:
        _C.drop_workspaces(stream)
    return None if draws else graph


def capture(
    step: Callable[[], object], device: torch.device, shared: SharedMemory | None = None
) -> Graph | None:
    """`record` on a separate stream of the device, after steps that warm up the libraries it
    calls.
    """
    with apart(device, shared and shared.stream) as stream:
        for _ in range(WARMUPS):
            step()
        graph = record(step, shared and shared.pool)
        if graph is not None and shared is not None:
            shared.pool, shared.stream = graph.pool, stream
        return graph


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
    its graph is freed. Captures of subclasses are registered if their methods call these.
    """
    # Patch the end first: a capture that another thread registers meanwhile must also be removed.
    for name in ("capture_end", "capture_end_pre"):  # the second since torch 2.15
        if (end := getattr(kind, name, None)) is not None and end not in _known:
            patched = _ending(end)
            _known.add(patched)
            setattr(kind, name, patched)
    if (begin := kind.capture_begin) not in _known:

        @functools.wraps(begin)
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _beginning, _dropped.beginning(self):
                return begin(self, *args, **kwargs)

        _known.add(capture_begin)
        kind.capture_begin = capture_begin


def _ending(end: Callable[..., Any]) -> Callable[..., Any]:
    """A method that ends a capture, and removes it."""

    @functools.wraps(end)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _dropped.ended(self)

    return patched


def _begin(graph: torch.cuda.CUDAGraph, pool: tuple[int, int] | None = None) -> None:
    """Begins a capture with a new generator state instead of the default generator's, which torch
    puts into a graph only when that draws since 2.14.
    """
    know_captures(torch.cuda.CUDAGraph)
    if DRAWS_ARE_RECORDED:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        return
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    own = torch.Generator(default.device)
    own.seed()
    with _beginning:
        state, seed = default.graphsafe_get_state(), own.initial_seed()

        def restore() -> None:
            nonlocal seed
            default.graphsafe_set_state(state)
            if own.initial_seed() != seed:  # another thread has seeded the default generator
                seed = own.initial_seed()
                default.manual_seed(seed)

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
