"""The rule of `--parallel auto`: replicas where a model fits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from gla_ext.model import count_parameters
from gla_ext.train.presets import Settings

if TYPE_CHECKING:
    from gla_ext.train.processes import Processes

SHARE = 0.9  # of a device's memory; the rest is for buffers of the network and of libraries
# Bytes that backward keeps, by the width of an element: of a block a token and channel, and of the
# logits a token. Measured at 374 M and 1.3 B parameters in bf16: 27 and 26 a channel.
BLOCK, LOGITS = 15, 7


def choose(processes: Processes, model: nn.Module, settings: Settings) -> tuple[str, str]:
    """The kind, and the reason in words.

    A replica takes, for each parameter, 4 bytes of weight, 4 of gradient and 8 of the optimizer, in
    bf16 also 2 of the weight that products take. Shards take the 16 bytes once in all. If a replica
    and a pass's activations fit, it is replicas; else shards, within a node if they fit there.
    """
    if processes.tp > 1:
        return "shard", ", because --tensor-parallel needs it"
    size = 2 if settings.dtype == "bfloat16" else 4
    tokens = settings.batch_size * settings.seq_len // (processes.dp * processes.cp)
    config, parameters = model.config, count_parameters(model)
    channels = config.num_hidden_layers * config.hidden_size
    activations = size * tokens * (BLOCK * channels + LOGITS * config.vocab_size)
    copies = 2 * parameters * (size == 2)
    kinds = {"replicate": 1, "hybrid": processes.local_size, "shard": processes.size}
    if processes.nodes == 1 or processes.local_size % processes.cp:
        del kinds["hybrid"]
    taken = {kind: 16 * parameters / ranks + copies for kind, ranks in kinds.items()}
    there = SHARE * memory_of(processes.device, processes.local_size)
    kind = next((kind for kind, x in taken.items() if x + activations <= there), "shard")
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
