"""`generate` of FLA's models with transformers 5.24, which passes the cache as `cache`.

FLA's forwards ignore that keyword, so they would continue from only the last token, without a
state.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn


def replacements() -> list[tuple[Any, str, Any]]:
    """Owner, name and new value of each attribute to replace."""
    try:
        mixin = importlib.import_module("fla.models.utils").FLAGenerationMixin
    except (ImportError, AttributeError):  # the package fla-core has no models
        return []
    original = mixin.prepare_inputs_for_generation
    return [(mixin, "prepare_inputs_for_generation", _with_the_cache(original))]


def _with_the_cache(original: Callable) -> Callable:
    """`FLAGenerationMixin.prepare_inputs_for_generation` that passes the cache by FLA's name for
    it.
    """

    @functools.wraps(original)
    def prepare_inputs_for_generation(
        self: nn.Module, *args: Any, cache: Any | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        if cache is not None and not _is_new(cache):
            kwargs["past_key_values"] = cache
        inputs = original(self, *args, **kwargs)
        if "cache" in inputs:
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    return prepare_inputs_for_generation


def _is_new(cache: Any) -> bool:
    """Whether it is an empty cache of a transformers class, which `generate` makes at the start
    with FLA 0.5.2. FLA converts it to its own cache.
    """
    return type(cache).__module__.startswith("transformers.") and not cache.get_seq_length()
