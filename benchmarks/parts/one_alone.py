"""Training steps of one GPU alone: a plain model, without torch.distributed.

fp32 weights under autocast, as FSDP2's policy has them.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from gla_ext.model import GLAForCausalLM
from gla_ext.model.config import GLAConfig

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 4, "vocab_size": 32000}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 64}


class Sizes:
    """What is timed, and how often."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.cuda = not options.small
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.tokens = 131072 if self.cuda else 256
        self.model_tokens = 16384 if self.cuda else 64
        self.model = LARGE if self.cuda else SMALL
        self.repeats = options.repeats

    def once(self, step, at_once: int) -> float:
        """Seconds of a step, averaged over at_once steps in a row."""
        if self.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(at_once):
            step()
        if self.cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / at_once

    def median(self, step, at_once: int) -> float:
        """The median time of a step, after three that are not timed."""
        for _ in range(3):
            step()
        return statistics.median(self.once(step, at_once) for _ in range(self.repeats))

    def build(self, device: torch.device, checkpointing: bool = False) -> GLAForCausalLM:
        torch.manual_seed(0)
        model = GLAForCausalLM(GLAConfig(**self.model)).to(device).train()
        model.model.gradient_checkpointing = checkpointing
        return model

    def stepper(self, model, B: int, T: int, device: torch.device, context=None, autocast=False):
        """A training step of a model on B sequences of T tokens."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.cuda)
        ids = torch.randint(self.model["vocab_size"], (B, T), device=device)

        def step():
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast and self.cuda):
                loss = model(ids, labels=ids, cp_context=context).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


NAMES = ("eager", "compiled", "recomputed")


def measure(sizes: Sizes, name: str) -> dict[str, float]:
    """Tokens/s and peak memory of a plain model, in a process that knows no other GPU."""
    device = torch.device("cuda" if sizes.cuda else "cpu")
    if sizes.cuda:  # the peak is of this one alone
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
    model = sizes.build(device, checkpointing=name == "recomputed")
    if name == "compiled":
        for block in model.model.layers:
            block.compile(fullgraph=True, dynamic=False)
    B, T = (1, sizes.tokens) if name == "recomputed" else (8, sizes.model_tokens // 8)
    rate = B * T / sizes.median(sizes.stepper(model, B, T, device, autocast=True), 3)
    peak = torch.cuda.max_memory_allocated() if sizes.cuda else 0
    return {"tokens_per_s": rate, "peak_gib": round(peak / 2**30, 2)}


def run(names: Iterable[str], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """`measure` of each name; all run in one process of their own."""
    command = [sys.executable, str(Path(__file__).parents[1] / "bench_scale.py")]
    command += ["--repeats", str(options.repeats), *["--small"] * options.small]
    output = subprocess.check_output([*command, "--alone", *names], text=True)
    return json.loads(output.splitlines()[-1])
