"""Training steps of one GPU alone: a plain model, without torch.distributed.

fp32 weights under autocast, as shards have them, or bf16 weights.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from parts.training_rows import SIZES
from shared import models
from torch import nn

from gla_ext.distributed import CPContext, Shards
from gla_ext.model import GLAForCausalLM

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 64}


class Sizes:
    """What is timed, and how often."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.cuda = not options.small
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.tokens = 131072 if self.cuda else 256
        self.B, self.T = options.rows, 2048 if self.cuda else 8  # of the model
        self.model = SIZES[options.size] if self.cuda else SMALL
        self.repeats = options.repeats

    def once(self, step: Callable, at_once: int) -> float:
        """Seconds of a step, averaged over at_once steps in a row."""
        wait = torch.cuda.synchronize if self.cuda else lambda: None
        wait()
        start = time.perf_counter()
        for _ in range(at_once):
            step()
        wait()
        return (time.perf_counter() - start) / at_once

    def median(self, step: Callable, at_once: int) -> float:
        """The median time of a step, after three that are not timed."""
        for _ in range(3):
            step()
        return statistics.median(self.once(step, at_once) for _ in range(self.repeats))

    def build(
        self,
        checkpointing: bool = False,
        compiled: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> GLAForCausalLM:
        model = models.build(self.model, self.device.type, dtype).train()
        model.model.gradient_checkpointing = checkpointing
        for block in model.model.layers if compiled else ():
            block.compile(fullgraph=True, dynamic=False)
        return model

    def stepper(
        self,
        model: nn.Module,
        B: int,
        T: int,
        context: CPContext | None = None,
        autocast: bool = False,
        shards: Shards | None = None,
    ) -> Callable:
        """A training step of a model on B sequences of T tokens."""
        parameters = model.parameters() if shards is None else shards.parameters.values()
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        ids = torch.randint(self.model["vocab_size"], (B, T), device=self.device)

        def step():
            enabled = autocast and self.cuda
            with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
                loss = model(ids, labels=ids, cp_context=context).loss
            loss.backward()
            if shards is not None:
                shards.take_gradients()
            optimizer.step()
            optimizer.zero_grad()

        return step


NAMES = ("bf16", "autocast", "compiled", "recomputed")


def measure(sizes: Sizes, name: str) -> dict[str, float]:
    """Tokens/s and peak memory of a plain model, in a process that knows no other GPU."""
    if sizes.cuda:  # the peak is of this one alone
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    model = sizes.build(name == "recomputed", name == "compiled", dtype)
    B, T = (1, sizes.tokens) if name == "recomputed" else (sizes.B, sizes.T)
    rate = B * T / sizes.median(sizes.stepper(model, B, T, autocast=name != "bf16"), 3)
    peak = torch.cuda.max_memory_allocated() if sizes.cuda else 0
    return {"tokens_per_s": rate, "peak_gib": round(peak / 2**30, 2)}


def run(names: Iterable[str], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """`measure` of each name; all run in one process of their own."""
    command = [sys.executable, str(Path(__file__).parents[1] / "bench_scale.py")]
    command += ["--repeats", str(options.repeats), *["--small"] * options.small]
    command += ["--rows", str(options.rows), "--size", options.size]
    output = subprocess.check_output([*command, "--alone", *names], text=True)
    return json.loads(output.splitlines()[-1])
