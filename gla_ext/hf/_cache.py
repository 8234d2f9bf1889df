"""The cache argument, which has two names, and a cache for compiled token steps."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from gla_ext.cache import GLACache, StaticGLACache

# The name of the cache in outputs: `cache` from transformers 5.24 on, past_key_values before.
_FIELDS = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"


def one_cache(past_key_values: Any | None, cache: Any | None) -> Any | None:
    """The cache, given by either of its names."""
    if past_key_values is not None and cache is not None:
        raise ValueError("expected past_key_values or cache, which is the same, got both")
    return cache if past_key_values is None else past_key_values


def check_cache(cache: Any, N: int) -> None:
    """Raises TypeError for a cache that cannot store recurrent states, and ValueError for a cache
    whose number of sequences is not N.
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
    """The cache of `generate(cache_implementation="static")`, whose token steps transformers
    compiles. States never move, and there is room for all future keys and values.

    Args:
        batch_size: number of rows.
        max_length: most tokens of each row.
    """

    is_compileable = True
    counts = False

    def __init__(self, batch_size: int, max_length: int) -> None:
        super().__init__(batch_size)
        self.room = max_length
        self._seen, self._is_marked = 0, False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens that the model has processed, padding included."""
        return self._seen

    def expect(self, count: int) -> None:
        """Counts the tokens of the next call, as a compiled step does not count."""
        for kept in self.attention:
            kept.longest = self._seen
        if self.states and not self._is_marked:
            for x in self.tensors():
                torch._dynamo.mark_static_address(x)  # for CUDA graphs
            self._is_marked = True
        self._seen += count
