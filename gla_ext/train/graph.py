"""An update as one CUDA graph: forward, backward, clipping and the optimizer's step.

The speed of small models is limited by the host, which launches hundreds of kernels per update. A
graph is one launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gla_ext.decode import _capture


def check_graph(device: torch.device) -> None:
    """Raises ValueError, which names the flag --cuda-graph, if updates on the device cannot be
    graphs.
    """
    if device.type != "cuda":
        raise ValueError(f"expected --device to be cuda with --cuda-graph, got {device}")
    if not _capture.can_capture():
        raise ValueError(
            "expected no PYTORCH_NO_CUDA_MEMORY_CACHING in the environment with --cuda-graph, "
            "got it; a graph's memory comes from the allocator's cache"
        )


class GraphedUpdate:
    """An update that is recorded at its third call and replayed from then on.

    The first calls run updates too, on the stream that is recorded later: they compile code,
    initialize libraries, and create the optimizer's state.

    Args:
        update: `update(*batch)` queues a whole update and returns its result, a tensor. All other
            tensors that it reads and writes (weights, the optimizer's state, a learning rate in a
            tensor) must keep their addresses; gradients must be None when it begins. A change of
            modules or attributes only takes effect after `reset`.
        device: a CUDA device.
    """

    def __init__(self, update: Callable[..., Tensor], device: torch.device) -> None:
        self._update, self._device = update, device
        self._stream: torch.cuda.Stream | None = None
        self.reset()

    def reset(self) -> None:
        """Drops the graph; needed if the optimizer's state has been replaced."""
        self._graph: _capture.Graph | None = None
        self._batch: tuple[Tensor, ...] = ()
        self._result = torch.empty(())
        self._warmups = _capture.WARMUPS

    @property
    def recorded(self) -> bool:
        """Whether the next call replays the graph."""
        return self._graph is not None

    def __call__(self, *batch: Tensor) -> Tensor:
        """Queues an update on a batch of tensors, of the same shapes in every call.

        Returns:
            The result, which the next call overwrites.

        Raises:
            ValueError: for a batch of other shapes than the first one's.
            NotImplementedError: for an update that draws random numbers, with torch before 2.14.
        """
        self._take(batch)
        if self._graph is None:
            self._first_calls()
        if self._graph is not None:
            self._graph.replay()
        return self._result

    def _take(self, batch: tuple[Tensor, ...]) -> None:
        """Copies a batch into the tensors that the graph reads."""
        if not self._batch:
            self._batch = tuple(torch.empty_like(x) for x in batch)
        for own, x in zip(self._batch, batch, strict=True):
            if own.shape != x.shape:
                raise ValueError(
                    "expected every batch of a run with --cuda-graph to be "
                    f"{tuple(own.shape)}, got {tuple(x.shape)}"
                )
            own.copy_(x)

    def _first_calls(self) -> None:
        """Runs an update without a graph, or records one, which does not yet run it."""

        def update() -> None:
            self._result = self._update(*self._batch)

        with _capture.apart(self._device, self._stream) as self._stream:
            if self._warmups > 0:
                self._warmups -= 1
                update()
                return
            self._graph = _capture.record(update)
        if self._graph is None:
            raise NotImplementedError(
                "expected a model without dropout with --cuda-graph and torch before 2.14, got a "
                "step that draws random numbers"
            )
