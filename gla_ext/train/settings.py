"""What decides the numbers of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gla_ext.model.config import GLAConfig
from gla_ext.train.data import DOCUMENT_START, VOCAB_SIZE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCHEDULES = ("linear", "cosine")


def check_at_least(options: Any, **minima: float) -> None:
    """Raises ValueError for an option below its minimum, or NaN."""
    for name, minimum in minima.items():
        value = getattr(options, name)
        if not value >= minimum:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"expected {flag} to be at least {minimum}, got {value}")


@dataclass
class Settings:
    """What decides the numbers of a run; a checkpoint carries them, and the digest of its text.

    data: text file or folder; None is the standard library's source.
    dtype: of the products, 'float32' or 'bfloat16' (autocast).
    steps, batch_size, seq_len: each step takes batch_size windows of seq_len bytes.
    hidden_size, layers, heads: the model's.
    use_short_conv: whether its q, k and v pass short convolutions.
    segments: steps that follow each other in a window of segments * seq_len bytes, the states
        handed on: truncated backpropagation, see `gla_ext.train.segments`.
    packed: whether each document starts from no state, or from where the one before it ended.
    lr: peak learning rate; it rises linearly over `warmup` steps and falls to 0.
    schedule: how it falls, 'linear' or 'cosine' (half a period).
    weight_decay: of the matrices. grad_clip: largest gradient norm, 0 for any.
    eval_every: steps between evaluations; 0 is a quarter of the steps, 250 at least.
    seed: of the initial weights, the batches and the sample.
    """

    data: str | None = None
    dtype: str = "float32"
    steps: int = 2000
    batch_size: int = 8
    seq_len: int = 128
    hidden_size: int = 128
    layers: int = 3
    heads: int = 2
    use_short_conv: bool = False
    segments: int = 1
    packed: bool = False
    lr: float = 3e-3
    schedule: str = "linear"
    warmup: int = 100
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    eval_every: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, steps=0, batch_size=1, seq_len=1, hidden_size=1, layers=1, heads=1)
        check_at_least(self, segments=1)
        check_at_least(self, lr=0, warmup=0, weight_decay=0, grad_clip=0, eval_every=0)
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"expected --seed to have at most 64 bits, got {self.seed}")

    def model_config(self) -> GLAConfig:
        return GLAConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_heads=self.heads,
            use_short_conv=self.use_short_conv,
            initializer_range=self.hidden_size**-0.5,
            vocab_size=VOCAB_SIZE,
            bos_token_id=DOCUMENT_START,
            eos_token_id=DOCUMENT_START,
        )

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warmup = min(self.warmup, self.steps // 2)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.schedule == "cosine":
            done = (step - warmup) / (self.steps - warmup)
            return self.lr * (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.steps - step) / (self.steps - warmup)
