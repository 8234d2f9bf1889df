"""The plot of a training run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gla_ext.model.files import replacing

if TYPE_CHECKING:
    from gla_ext.train.trainer import Trainer


def plot_losses(path: str | Path, trainer: Trainer, bits_per_byte: dict[str, float]) -> None:
    """Draws a PNG, all in bits per byte: the training loss up to a run's step, the held-out
    evaluations, and a horizontal line for each entry of `bits_per_byte` except 'this model'.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bits = trainer.corpus.tokens_per_byte / math.log(2)
    losses = trainer.losses[: trainer.step].double().cpu() * bits
    span = max(1, len(losses) // 50)
    smooth = losses.unfold(0, span, 1).mean(-1) if len(losses) else losses
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(torch.arange(1, len(losses) + 1), losses, color="tab:blue", alpha=0.25, lw=0.8)
    axes.plot(
        torch.arange(span, span + len(smooth)),
        smooth,
        color="tab:blue",
        label=f"training, mean of {span}",
    )
    evaluations = torch.tensor(trainer.evaluations).reshape(-1, 2).unbind(1)
    axes.plot(*evaluations, "o-", color="tab:red", label="held out")
    others = {name: bits for name, bits in bits_per_byte.items() if name != "this model"}
    for (name, bits), style in zip(others.items(), ("--", ":", "-."), strict=False):
        axes.axhline(bits, color="gray", ls=style, label=f"{name}, {bits:.2f}")
    axes.set(xlabel="step", ylabel="bits a byte", ylim=(0, 8.2))
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, dpi=120)
    plt.close(figure)
