"""`generate` of FLA's models with transformers 5.24, which passes the cache as `cache`.

FLA's forwards ignore that keyword, and would go on from the last token alone, without a state.
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
    except (ImportError, AttributeError):  # fla-core alone has no models
        return []
    original = mixin.prepare_inputs_for_generation
    return [(mixin, "prepare_inputs_for_generation", _with_the_cache(original))]


def _with_the_cache(original: Callable) -> Callable:
    """`FLAGenerationMixin.prepare_inputs_for_generation`, which gives the cache by FLA's name."""

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
    """Whether it is an empty cache of transformers' own, such as `generate` starts FLA 0.5.2 with.
    FLA makes a cache of its own from it.
    """
    return type(cache).__module__.startswith("transformers.") and not cache.get_seq_length()
