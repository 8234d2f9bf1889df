"""The rule of `--parallel auto`: replicas where a model fits."""

from __future__ import annotations

import os

import torch
from torch import nn

from gla_ext.model import count_parameters

SHARE = 0.9  # of a device's memory; the rest is for buffers of the network and of libraries
# Bytes that backward keeps, by the width of an element: of a block a token and channel, and of the
# logits a token. Measured at 374 M and 1.3 B parameters in bf16: 27 and 26 a channel.
BLOCK, LOGITS = 15, 7


def choose(
    model: nn.Module,
    bf16: bool,
    tokens: int,
    memory: int,
    ranks: dict[str, int],
    accumulates: bool = False,
) -> tuple[str, str]:
    """Of the kinds of `--parallel` the first that fits, else the last; and the reason in words.

    A replica takes, for each parameter, 4 bytes of weight, 4 of gradient and 8 of the optimizer, in
    bf16 also 2 of the weight that products take. Shards take the 16 bytes once in all, and each
    rank the gathered weight that products take; but before the last of several passes, gradients
    are whole on every rank.

    Args:
        bf16: whether products are in bf16.
        tokens: that pass through a rank's model at once.
        memory: bytes of a rank.
        ranks: over how many ranks each kind cuts the weights.
        accumulates: whether an update has several passes. Default: False.
    """
    size, config, parameters = 2 if bf16 else 4, model.config, count_parameters(model)
    channels = config.num_hidden_layers * config.hidden_size
    activations = size * tokens * (BLOCK * channels + LOGITS * config.vocab_size)
    taken = {
        kind: parameters
        * (12 / count + 4 / (1 if accumulates else count) + size * (bf16 or count > 1))
        for kind, count in ranks.items()
    }
    there = SHARE * memory
    kind = next((kind for kind, x in taken.items() if x + activations <= there), [*ranks][-1])
    reason = (
        f": weights, gradients and optimizer {taken[kind] / 1e9:.2f} GB a rank, activations of "
        f"{tokens:,} tokens some {activations / 1e9:.2f}, of {there / 1e9:.1f} usable"
    )
    return kind, reason


def memory_of(device: torch.device, local_size: int) -> int:
    """Bytes of a GPU, or each process's share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_size
