"""The optimizer of a training run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


def optimizer_of(
    parameters: Iterable[Tensor],
    lr: float,
    weight_decay: float,
    graph_on: torch.device | None = None,
    betas: Sequence[float] = (0.9, 0.95),
) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices, none on norms and biases.

    graph_on is the device on which the optimizer's step may be recorded in a CUDA graph; the
    learning rate is then a tensor there. Default: None (the rate is a number).
    """
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    decays = ((matrices, weight_decay), (vectors, 0.0))
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays]
    rate: float | Tensor = lr
    if graph_on is not None:
        rate = torch.tensor(lr, dtype=torch.float32, device=graph_on)
    optimizer = torch.optim.AdamW(
        groups, lr=rate, betas=tuple(betas), fused=True, capturable=graph_on is not None
    )
    optimizer.register_step_post_hook(_count_writes)
    return optimizer


def _count_writes(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Increases the version counters of parameters, by which `Engine` and `Decoder` notice a
    changed model. A fused step does not do that itself (torch 2.11).
    """
    every = (p for group in optimizer.param_groups for p in group["params"])
    increment_version([p for p in every if p.grad is not None])
