"""The allowed values of the options of layers, models and their configuration."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any

MODES = ("chunk", "fused_recurrent", "fused_chunk")

# Keywords that models of transformers and FLA pass to every layer and that a recurrence ignores.
OF_MODELS = (
    "cache_position",
    "is_first_iteration",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "max_seqlen",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "token_type_ids",
)


def check_keywords(
    owner: str, given: Mapping[str, Any], without_effect: Collection[str] = OF_MODELS
) -> None:
    """Raises TypeError, with its name, for a keyword argument that forward neither has nor can
    ignore, and NotImplementedError for is_causal = False. Any keyword may be None; those in
    `without_effect` may have any value.
    """
    for name, value in given.items():
        if name == "is_causal" and value is not None:
            if not value:
                raise NotImplementedError(f"{owner}: expected is_causal to be True, got {value}")
        elif value is not None and name not in without_effect:
            raise TypeError(f"{owner}: expected keywords that are known, got {name!r}")


def check_options(
    mode: str,
    num_heads: int,
    num_kv_heads: int,
    gate_logit_normalizer: float,
    clamp_min: float | None,
) -> None:
    """Raises the errors that the constructor documents for invalid options."""
    prefix = "GatedLinearAttention:"
    if mode not in MODES:
        raise ValueError(f"{prefix} expected mode to be one of {', '.join(MODES)}, got {mode!r}")
    check_heads("GatedLinearAttention", num_heads, num_kv_heads)
    # Either case would give log decays above 0, and so states that grow without bound.
    if not gate_logit_normalizer > 0:
        raise ValueError(
            f"{prefix} expected gate_logit_normalizer to be above 0, got {gate_logit_normalizer}"
        )
    if clamp_min is not None and not clamp_min <= 0:
        raise ValueError(
            f"{prefix} expected clamp_min, a bound of the log gate, to be at most 0, got "
            f"{clamp_min}"
        )


def check_sizes(owner: str, **sizes: int) -> None:
    """Raises ValueError, with its name, for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{owner}: expected {name} to be at least 1, got {size}")


def check_heads(owner: str, num_heads: int, num_kv_heads: int) -> None:
    check_sizes(owner, num_heads=num_heads)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{owner}: expected num_kv_heads to divide num_heads = {num_heads}, got {num_kv_heads}"
        )


def expanded_dim(name: str, hidden_size: int, ratio: float, num_heads: int) -> int:
    """hidden_size * ratio, which must be a positive integer that num_heads divides."""
    exact = hidden_size * ratio
    dim = round(exact) if math.isfinite(exact) else 0
    if dim < 1 or not math.isclose(exact, dim) or dim % num_heads:
        raise ValueError(
            f"GatedLinearAttention: expected hidden_size * {name} to be a positive multiple of "
            f"num_heads = {num_heads}, got {hidden_size} * {ratio} = {exact:g}"
        )
    return dim


def typed_options(constructor: Callable[..., None]) -> Callable[..., None]:
    """Makes a constructor check its arguments against their annotations.

    Only annotations made of the names in `_KINDS` (bool, int, float, str, list[int], None) are
    checked; other arguments pass unchecked. NumPy's numbers become Python's. A value of another
    type raises TypeError, such as a float or a bool for an int.
    """
    signature = inspect.signature(constructor)
    annotations = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        owner = constructor.__qualname__.split(".")[0]
        given.arguments |= typed(owner, given.arguments, annotations)
        constructor(*given.args, **given.kwargs)

    return construct


def typed(owner: str, values: Mapping[str, Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose annotations are known, converted to Python's types; raises as
    `typed_options`.
    """
    result = {}
    for name, value in values.items():
        kinds = str(annotations.get(name, "")).split(" | ")
        if not set(kinds) <= _KINDS.keys():
            continue
        found = (_KINDS[kind][0](value) for kind in kinds)
        converted = next((x for x in found if x is not _OTHER), _OTHER)
        if converted is _OTHER:
            expected = " or ".join(_KINDS[kind][1] for kind in kinds)
            raise TypeError(f"{owner}: expected {name} to be {expected}, got {value!r}")
        result[name] = converted
    return result


_OTHER = object()  # marks a value of another type


def _as_bool(value: Any) -> Any:
    # NumPy's bool has no base class to recognize it by, and has two names.
    kind = type(value)
    from_numpy = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    return bool(value) if kind is bool or from_numpy else _OTHER


def _as_int(value: Any) -> Any:
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return int(value) if is_int else _OTHER


def _as_float(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return _as_int(value)
    return float(value) if isinstance(value, numbers.Real) and value == value else _OTHER


def _as_ints(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return _OTHER
    converted = [_as_int(item) for item in value]
    return _OTHER if _OTHER in converted else converted


# For each annotation: the conversion, and the type as error messages name it.
_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bool": (_as_bool, "True or False"),
    "int": (_as_int, "an integer"),
    "float": (_as_float, "a number"),
    "str": (lambda value: value if isinstance(value, str) else _OTHER, "a string"),
    "list[int]": (_as_ints, "a list of integers"),
    "None": (lambda value: None if value is None else _OTHER, "None"),
}
