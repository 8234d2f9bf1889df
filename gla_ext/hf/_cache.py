"""The cache that comes as an argument, under either of its names; one whose steps are compiled."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from gla_ext.cache import GLACache, StaticGLACache

# What transformers calls the cache in outputs: `cache` from 5.24 on, before it past_key_values.
_FIELDS = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"


def one_cache(past_key_values: Any | None, cache: Any | None) -> Any | None:
    """The cache by either of its names."""
    if past_key_values is not None and cache is not None:
        raise ValueError("expected past_key_values or cache, which is the same, got both")
    return cache if past_key_values is None else past_key_values


def check_cache(cache: Any, N: int) -> None:
    """Raises TypeError for a cache that keeps no recurrent states, ValueError for one of other than
    N sequences.
    """
    if not isinstance(cache, GLACache) and not _keeps_states(type(cache)):
        raise TypeError(
            "GLAModel: expected past_key_values to be a gla_ext.cache.GLACache, or a cache of its "
            f"kind, got {type(cache).__name__}: keys and values, as prefix tuning passes too, say "
            "nothing to a recurrence"
        )
    found = _num_sequences(cache)
    if found is not None and found != N:
        raise ValueError(
            f"GLAModel: expected past_key_values of {N} sequences, got {found}; "
            "past_key_values.batch_repeat_interleave(n) repeats each n times, for n beams or "
            "returned sequences of a prompt"
        )


def _num_sequences(cache: Any) -> int | None:
    if isinstance(cache, GLACache):
        return cache.num_sequences
    entry = cache[0] if len(cache) else None
    state = None if entry is None else entry["recurrent_state"]
    return None if state is None else state.shape[0]


@functools.cache
def _keeps_states(kind: type) -> bool:
    update = getattr(kind, "update", None)
    return inspect.isfunction(update) and "recurrent_state" in inspect.signature(update).parameters


class CompiledStepsCache(StaticGLACache):
    """The cache of `generate(cache_implementation="static")`, whose steps transformers compiles:
    states that never move, and room for all keys and values that there will be.

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
