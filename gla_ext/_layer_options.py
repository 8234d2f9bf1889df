"""What the options of the layer must be."""

from __future__ import annotations

import math

MODES = ("chunk", "fused_recurrent", "fused_chunk")


def check_options(
    mode: str,
    num_heads: int,
    num_kv_heads: int,
    conv_size: int,
    gate_low_rank_dim: int,
    gate_logit_normalizer: int,
) -> None:
    """Raises what the constructor documents for options that are wrong."""
    prefix = "GatedLinearAttention:"
    if mode not in MODES:
        raise ValueError(f"{prefix} expected mode to be one of {', '.join(MODES)}, got {mode!r}")
    if num_heads < 1:
        raise ValueError(f"{prefix} expected num_heads to be at least 1, got {num_heads}")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{prefix} expected num_kv_heads to divide num_heads = {num_heads}, got {num_kv_heads}"
        )
    if conv_size < 1:
        raise ValueError(f"{prefix} expected conv_size to be at least 1, got {conv_size}")
    if gate_low_rank_dim < 1 or gate_logit_normalizer == 0:
        raise ValueError(
            f"{prefix} expected gate_low_rank_dim to be at least 1 and gate_logit_normalizer not "
            f"0, got {gate_low_rank_dim} and {gate_logit_normalizer}"
        )


def expanded_dim(name: str, hidden_size: int, ratio: float, num_heads: int) -> int:
    """hidden_size * ratio, which must be a positive integer that num_heads divides."""
    exact = hidden_size * ratio
    dim = round(exact)
    if dim < 1 or not math.isclose(exact, dim) or dim % num_heads:
        raise ValueError(
            f"GatedLinearAttention: expected hidden_size * {name} to be a positive multiple of "
            f"num_heads = {num_heads}, got {hidden_size} * {ratio} = {exact:g}"
        )
    return dim
