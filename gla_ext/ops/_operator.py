"""The declaration of an operator: what Python knows of it besides the function that calls it."""

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
    """Registers what is said of an operator, and returns it.

    Args:
        name: without its namespace.
        plain: its function in torch's operations, which exported programs may take in its place.
        flops: from the shapes of its arguments, the operations that torch's counter counts.
        vmap: its rule under `torch.vmap`, of `gla_ext.ops._vmap`, given the operator too.
        shards: which shards of DTensors it computes alone, of `gla_ext.ops._sharding`.
        made_of: for DTensors, its function in operators that have `shards`.
        instead: what a program calls with DTensors, if neither is given. It is part of the error.
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
