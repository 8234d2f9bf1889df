"""What a training run may be told, what it does on each kind of device, and the flags."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gla_ext.model.config import GLAConfig
from gla_ext.train.data import DOCUMENT_START, MAX_BYTES, VOCAB_SIZE

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


@dataclass
class Options:
    """What a resumed run may change: on one device `compile` and `cuda_graph` alone alter numbers,
    by rounding.
    """

    out: Path = Path("runs/gla-bytes")
    resume: bool = False
    overwrite: bool = False
    device: str = "auto"
    compile: bool = False
    cuda_graph: bool = False
    prompt: str = "def "
    sample_bytes: int = 400
    save_every: int = 200
    tensor_parallel: int = 1
    context_parallel: int = 1

    def __post_init__(self) -> None:
        check_at_least(self, sample_bytes=0, save_every=1, tensor_parallel=1, context_parallel=1)
        if self.resume and self.overwrite:
            raise ValueError("expected --resume or --overwrite, got both")


@dataclass(frozen=True)
class Preset:
    """The defaults of one kind of device."""

    settings: Settings
    options: Options


PRESETS = {
    # 0.86 M parameters, 2 M bytes seen: two to three minutes on two cores.
    "cpu": Preset(Settings(), Options()),
    # 50 M parameters with K = 128 and V = 256 a head, 39 M bytes seen: a minute on an H200,
    # compiling included. That is four passes over the standard library; 1,800 steps, six passes,
    # learned it by heart: 1.16 bits per held-out byte in place of 1.11.
    "cuda": Preset(
        Settings(
            dtype="bfloat16",
            steps=1200,
            batch_size=32,
            seq_len=1024,
            hidden_size=768,
            layers=7,
            heads=3,
            lr=1e-3,
            schedule="cosine",
            warmup=150,
            eval_every=200,
        ),
        Options(compile=True, save_every=600),  # a checkpoint takes 600 MB
    ),
}


def preset(device: str) -> Preset:
    """The preset for a torch device such as 'cpu' or 'cuda:1'."""
    return PRESETS[torch.device(device).type]


def describe(settings: Settings, options: Options) -> str:
    """One line: every default of the device's preset, and after it what differs in this run."""
    kind = torch.device(options.device).type
    wanted = _values(PRESETS[kind].settings, PRESETS[kind].options)
    line = ", ".join(f"{name} {value}" for name, value in wanted.items())
    changed = {
        name: value for name, value in _values(settings, options).items() if value != wanted[name]
    }
    if changed:
        line += "; but " + ", ".join(f"{name} {value}" for name, value in changed.items())
    return f"Defaults for {kind}: {line}"


def command_line() -> argparse.ArgumentParser:
    """The command line. What is left out is absent from the result, so that presets can fill it."""
    parser = argparse.ArgumentParser(
        prog="python -m gla_ext.train",
        description="trains a byte-level GLA language model on text, from one command.",
        argument_default=argparse.SUPPRESS,
    )
    cpu, cuda = ({**vars(p.settings), **vars(p.options)} for p in PRESETS.values())

    def add(flag: str, text: str, default: Any = None, **kwargs: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        if default is None:
            default = cpu[name] if cpu[name] == cuda[name] else f"{cpu[name]}; GPU: {cuda[name]}"
        kind = {} if "action" in kwargs else {"type": type(cpu[name])}
        parser.add_argument(flag, **{**kind, **kwargs}, help=f"{text} (default: {default})")

    library = "the source files of Python's standard library"
    limit = f"{MAX_BYTES >> 20} MiB"
    add("--data", f"text file, or folder of text files; up to {limit}", library, type=str)
    add("--out", "folder for what the run writes, and for no other run meanwhile")
    resume = "go on from the checkpoint in --out, with more --steps also after the last"
    add("--resume", resume, "no", action="store_true")
    add("--overwrite", "write over an earlier run in --out", "no", action="store_true")
    add("--steps", "optimizer steps in all")
    add("--batch-size", "windows a step, of all processes")
    add("--seq-len", "bytes a window")
    add("--segments", "steps a window: each goes on from the state that the one before ended with")
    packed = "each document starts from no state"
    add("--packed", packed, "no", action=argparse.BooleanOptionalAction)
    add("--hidden-size", "model width")
    add("--layers", "number of blocks")
    add("--heads", "heads a layer")
    convolutions = "short convolutions on q, k and v"
    add("--use-short-conv", convolutions, "no", action=argparse.BooleanOptionalAction)
    add("--lr", "peak learning rate")
    add("--schedule", "how the learning rate falls", choices=SCHEDULES)
    add("--warmup", "steps of linear warm-up")
    add("--weight-decay", "weight decay of the matrices")
    add("--grad-clip", "largest gradient norm")
    add("--seed", "seed of weights, batches and sample")
    add("--dtype", "of the products", choices=list(DTYPES))
    add("--device", "auto takes a GPU if gla_ext has CUDA operators")
    compiled = "no; GPU: yes"
    add("--compile", "use torch.compile", compiled, action=argparse.BooleanOptionalAction)
    graph = "make each step one CUDA graph, on a GPU"
    add("--cuda-graph", graph, "no", action=argparse.BooleanOptionalAction)
    add("--prompt", "text that the sample continues", repr(cpu["prompt"]))
    add("--sample-bytes", "longest sample, bytes")
    quarter = f"a quarter of the steps, 250 at least; GPU: {cuda['eval_every']}"
    add("--eval-every", "steps between evaluations", quarter)
    add("--save-every", "steps between checkpoints")
    add("--tensor-parallel", "processes that share each layer's heads and channels")
    add("--context-parallel", "processes that share each window's bytes")
    return parser


def _values(settings: Settings, options: Options) -> dict[str, Any]:
    """What the table decides, under the names of the flags."""
    values = asdict(settings)
    del values["data"]
    values |= {name: getattr(options, name) for name in ("compile", "cuda_graph", "save_every")}
    words = {False: "no", True: "yes"}
    return {
        name.replace("_", "-"): words[value] if isinstance(value, bool) else value
        for name, value in values.items()
    }
