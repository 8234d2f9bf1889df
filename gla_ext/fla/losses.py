"""Replacements for FLA's losses, whose kernels do not run on a CPU.

Logits on other devices, or of a sharded vocabulary, still use FLA's own code.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext.losses import _reduced, plain_losses


def replacements() -> list[tuple[Any, str, Callable]]:
    """For FLA's two cross entropy modules: the class, 'forward', and the new forward."""
    modules = importlib.import_module("fla.modules")
    whole, linear = modules.FusedCrossEntropyLoss, modules.FusedLinearCrossEntropyLoss
    return [
        (whole, "forward", _forward(whole.forward)),
        (linear, "forward", _linear_forward(linear.forward)),
    ]


def _forward(original: Callable) -> Callable:
    """Replaces `FusedCrossEntropyLoss.forward`."""

    def forward(self: nn.Module, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if input.device.type != "cpu" or self.process_group is not None:
            return original(self, input, target)
        losses = plain_losses(input, target, self, self.lse_square_scale)
        return _reduced(losses, target, self)

    return forward


def _linear_forward(original: Callable) -> Callable:
    """Replaces `FusedLinearCrossEntropyLoss.forward`; all logits are computed at once, not in
    chunks.
    """

    def forward(
        self: nn.Module, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        # FLA 0.5.2 has no process_group here.
        if x.device.type != "cpu" or getattr(self, "process_group", None) is not None:
            return original(self, x, target, weight, bias)
        logits = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        target = target.reshape(-1)
        loss = plain_losses(logits, target, self)[0].sum()
        if self.reduction == "mean":
            loss = loss / (target != self.ignore_index).sum().clamp_min(1)
        if self.use_l2warp:
            l2_warp = importlib.import_module("fla.modules.l2warp").l2_warp
            loss = l2_warp(loss, logits.unsqueeze(0), self.l2_penalty_factor)
        return loss

    return forward
