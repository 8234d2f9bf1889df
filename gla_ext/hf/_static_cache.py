"""The cache of `generate(cache_implementation="static")`, for which transformers compiles steps."""

from __future__ import annotations

import torch

from gla_ext.cache import StaticGLACache


class CompiledStepsCache(StaticGLACache):
    """States that never move, and room for all keys and values that there will be.

    Args:
        batch_size: number of rows.
        max_length: number of tokens of each, at most.
    """

    is_compileable = True
    counts = False

    def __init__(self, batch_size: int, max_length: int) -> None:
        super().__init__(batch_size)
        self.room = max_length
        self._seen, self._is_marked = 0, False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens that have passed, padding included."""
        return self._seen

    def expect(self, count: int) -> None:
        """Says that a call of so many tokens follows, which a compiled step would not count."""
        for kept in self.attention:
            kept.longest = self._seen
        if self.states and not self._is_marked:
            for x in self.tensors():
                torch._dynamo.mark_static_address(x)  # for CUDA graphs
            self._is_marked = True
        self._seen += count


__all__ = ["CompiledStepsCache"]
