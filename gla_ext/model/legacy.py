"""Conversion of checkpoints of FLA's GLA models of 2024 to today's names and shapes.

Before February 2025, FLA stored gate and up of an MLP in one matrix, `gate_proj` `[2 I, D]`, which
FLA 0.5.2 and 0.6.0 cannot read. Before March 2024, it had other names of modules and options.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

_OPTIONS = {
    "rms_norm_eps": "norm_eps",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
}
_MODULES = (
    (re.compile(r"^model\.embed_tokens\."), "model.embeddings."),
    (re.compile(r"^(model\.layers\.\d+)\.gla_norm\."), r"\1.attn_norm."),
    (re.compile(r"^(model\.layers\.\d+)\.gla\."), r"\1.attn."),
)
_GATE = re.compile(r"^(.*\.mlp)\.gate_proj\.weight$")


def modern_options(values: dict[str, Any]) -> dict[str, Any]:
    """The entries of a config.json under today's names; an entry with today's name takes
    precedence.

    Raises:
        NotImplementedError: share_conv_kernel together with use_short_conv.
    """
    if values.get("use_short_conv") and values.get("share_conv_kernel"):
        raise NotImplementedError(
            "GLAConfig: share_conv_kernel = True with use_short_conv = True is not implemented, a "
            "convolution before the maps to q, k and v that FLA had until July 2024"
        )
    if "num_heads" in values:  # peft and others may set num_attention_heads too
        return values
    old = {new: values[name] for name, new in _OPTIONS.items() if name in values}
    return old | values


def modern_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict under today's names; its tensors are views of the same memory."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in _MODULES:
            name = old.sub(new, name)
        found[name] = tensor
    for name in [name for name in found if _GATE.match(name)]:
        mlp = _GATE.match(name).group(1)
        down = found.get(f"{mlp}.down_proj.weight")
        joint = found[name]
        if f"{mlp}.up_proj.weight" in found or down is None:
            continue
        if joint.shape[0] == 2 * down.shape[1]:
            found[name], found[f"{mlp}.up_proj.weight"] = joint.chunk(2)
    return found
