"""The blocks of a hybrid model that have attention: the option `attn`, read as FLA reads it."""

from __future__ import annotations

from typing import Any

from gla_ext.layers._options import check_sizes, typed

Spec = dict[str, Any]
_DEFAULTS: Spec = {
    "num_kv_heads": None,
    "qkv_bias": False,
    "window_size": None,
    "rope_theta": 10000.0,
}
ATTENTION_OPTIONS = {  # options of the layer, and their types
    "num_heads": "int",
    "num_kv_heads": "int | None",
    "qkv_bias": "bool",
    "window_size": "int | None",
    "rope_theta": "float",
}


def read_attn(attn: Any, num_hidden_layers: int) -> Spec | list[Spec] | None:
    """The option `attn` of a configuration with its defaults filled in.

    Args:
        attn: None, a dict or a list of dicts with `layers` (indices), `num_heads`, and optionally
            `num_kv_heads`, `qkv_bias`, `window_size` and `rope_theta`.
        num_hidden_layers: number of blocks.

    Raises:
        TypeError: for other types.
        ValueError: for a layer that does not exist or has two entries, and sizes out of range.
        NotImplementedError: for qk_norm and for unknown keys.
    """
    if attn is None:
        return None
    if isinstance(attn, dict):
        return _read(attn, num_hidden_layers, set())
    if not isinstance(attn, (list, tuple)) or not all(isinstance(spec, dict) for spec in attn):
        raise TypeError(f"GLAConfig: expected attn to be a dict or a list of dicts, got {attn!r}")
    taken: set[int] = set()
    return [_read(spec, num_hidden_layers, taken) for spec in attn]


def attention_of(attn: Spec | list[Spec] | None, layer_idx: int) -> Spec | None:
    """A block's entry in the result of `read_attn`; None for a block of GLA."""
    specs = [] if attn is None else [attn] if isinstance(attn, dict) else attn
    return next((spec for spec in specs if layer_idx in spec["layers"]), None)


def _read(given: Spec, num_hidden_layers: int, taken: set[int]) -> Spec:
    for name in ("layers", "num_heads"):
        if name not in given:
            raise ValueError(f"GLAConfig: expected attn to have {name!r}, got {given!r}")
    if given.get("qk_norm"):
        raise NotImplementedError(
            "GLAConfig: qk_norm of attn is not implemented: FLA does not pass it on to the layer"
        )
    if unknown := given.keys() - {"layers", "qk_norm", *ATTENTION_OPTIONS}:
        raise NotImplementedError(
            f"GLAConfig: expected attn of layers, {', '.join(ATTENTION_OPTIONS)}, got also "
            f"{', '.join(sorted(unknown))}"
        )
    layers = given["layers"]
    if not isinstance(layers, (list, tuple)) or any(type(index) is not int for index in layers):
        raise TypeError(
            f"GLAConfig: expected layers of attn to be a list of integers, got {layers!r}"
        )
    for index in layers:
        if not 0 <= index < num_hidden_layers:
            raise ValueError(
                f"GLAConfig: expected layers of attn from 0 to {num_hidden_layers - 1}, got {index}"
            )
        if index in taken:
            raise ValueError(f"GLAConfig: expected each layer once in attn, got {index} twice")
        taken.add(index)
    spec = {**given, "layers": list(layers)}
    spec |= {name: default for name, default in _DEFAULTS.items() if name not in spec}
    known = {name: spec[name] for name in ATTENTION_OPTIONS}
    spec |= typed("GLAConfig", known, ATTENTION_OPTIONS)
    if spec["num_kv_heads"] is None:
        spec["num_kv_heads"] = spec["num_heads"]
    sizes = {f"{name} of attn": spec[name] for name in ("num_heads", "num_kv_heads")}
    if spec["window_size"] is not None:
        sizes["window_size of attn"] = spec["window_size"]
    check_sizes("GLAConfig", **sizes)
    if not 0 < spec["rope_theta"] < float("inf"):
        raise ValueError(
            f"GLAConfig: expected rope_theta of attn to be above 0, got {spec['rope_theta']}"
        )
    return spec
