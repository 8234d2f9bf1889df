"""The declaration of an operator: the facts about it that Python has to register with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gla_ext import _C  # noqa: F401  loading it registers torch.ops.gla_ext
from gla_ext.ops import _flops, _sharding

PLAIN: dict[Any, Callable[..., Any]] = {}


def declare(
    name: str,
    *,
    plain: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
    vmap: Callable[..., Any] | None = None,
    shards: _sharding.Rule | None = None,
    made_of: Callable[..., Any] | None = None,
    instead: str | None = None,
) -> Any:
    """Registers the given facts about an operator, and returns the operator.

    Args:
        name: the operator's name without namespace.
        plain: the same function made of torch operations, which can replace it in exported
            programs.
        flops: returns the operations that torch's counter counts, from the arguments' shapes.
        vmap: the rule under `torch.vmap`, from `gla_ext.ops._vmap`; it also gets the operator.
        shards: the shards of DTensors that the operator can compute locally, from
            `gla_ext.ops._sharding`.
        made_of: for DTensors, the same function made of operators that have `shards`.
        instead: the function to call with DTensors if there is neither of these two; part of the
            error.
    """
    op = getattr(torch.ops.gla_ext, name).default
    if plain is not None:
        PLAIN[op] = plain
    if vmap is not None:
        torch.library.register_vmap(op, functools.partial(vmap, op))
    for table, value in (
        (_flops.FORMULAS, flops),
        (_sharding._RULES, shards),
        (_sharding._DECOMPOSED, made_of and (lambda cls, op, types, args, kwargs: made_of(*args))),
        (_sharding._INSTEAD, instead),
    ):
        if value is not None:
            table[name] = value
    return op
