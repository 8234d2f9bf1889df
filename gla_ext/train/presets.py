"""The options of a training run, their values for each kind of device, and the flags."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from gla_ext.model.config import GLAConfig
from gla_ext.train.data import DOCUMENT_START, MAX_BYTES, VOCAB_SIZE
from gla_ext.train.flags import FlagParser, check_at_least, flag, flag_of, switch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCHEDULES = ("linear", "cosine", "warmup-stable-decay")
WATCHERS = ("tensorboard", "wandb")
PARALLEL = ("auto", "replicate", "shard", "hybrid")
_OUT = Path("runs/gla-bytes")


@dataclass
class Settings:
    """The options that determine a run's numbers; a checkpoint stores them, with a digest of the
    text.

    With segments, each starts from the states of the one before, without a gradient (truncated
    backpropagation): see `gla_ext.train.segments`. The learning rate rises linearly from `min_lr`
    over `warmup` steps, and falls to `min_lr`.
    """

    data: list[str] | None = flag(  # noqa: RUF009
        None,
        f"text file, or folder of text files, up to {MAX_BYTES >> 20} MiB; or folders that python "
        "-m gla_ext.train.prepare wrote, each as FOLDER or FOLDER:WEIGHT",
        "the source files of Python's standard library",
        type=str,
        nargs="+",
    )
    init_from: str | None = flag(
        None,
        "folder of the model to start from: of another run, or saved by gla_ext or FLA",
        "initial weights from the seed",
        type=str,
    )
    dtype: str = flag("float32", "of the products, bfloat16 by autocast", choices=list(DTYPES))
    steps: int = flag(2000, "updates in all")
    batch_size: int = flag(8, "windows that pass at once, in all processes together")
    tokens_per_update: int = flag(
        0, "tokens an update, in several passes whose gradients are summed", "those of one pass"
    )
    seq_len: int = flag(128, "tokens a window")
    hidden_size: int = flag(128, "model width")
    layers: int = flag(3, "number of blocks")
    heads: int = flag(2, "heads a layer")
    use_short_conv: bool = switch(False, "short convolutions on q, k and v")
    segments: int = flag(
        1, "updates a window: each starts from the state at the end of the one before"
    )
    packed: bool = switch(False, "each document starts from an empty state")
    lr: float = flag(3e-3, "peak learning rate")
    min_lr: float = flag(0.0, "learning rate that warm-up begins with and the schedule ends with")
    schedule: str = flag("linear", "how the learning rate falls", choices=SCHEDULES)
    warmup: int = flag(100, "updates of linear warm-up, at most half of the run")
    warmup_tokens: int = flag(0, "tokens of linear warm-up, in place of --warmup", "none")
    decay: int = flag(
        0, "updates at the end over which warmup-stable-decay falls", "a tenth of the run"
    )
    weight_decay: float = flag(0.1, "weight decay of the matrices")
    betas: list[float] = flag(  # noqa: RUF009
        (0.9, 0.95), "AdamW's two betas", "0.9 0.95", type=float, nargs=2
    )
    grad_clip: float = flag(1.0, "largest gradient norm, 0 for any")
    eval_every: int = flag(
        0, "updates between evaluations", "a quarter of the run, 250 at least; GPU: {eval_every}"
    )
    spike: float = flag(
        3.0, "nats above the mean of the last 100 losses that make an update bad, 0 for any"
    )
    seed: int = flag(0, "seed of weights, batches and sample")

    def __post_init__(self) -> None:
        check_at_least(self, steps=0, batch_size=1, seq_len=1, hidden_size=1, layers=1, heads=1)
        check_at_least(self, segments=1, tokens_per_update=0, warmup=0, warmup_tokens=0, decay=0)
        check_at_least(self, lr=0, min_lr=0, weight_decay=0, grad_clip=0, eval_every=0, spike=0)
        self.betas = list(self.betas)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"expected --betas to be from 0 to below 1, got {self.betas}")
        if self.min_lr > self.lr:
            raise ValueError(f"expected --min-lr to be at most --lr {self.lr}, got {self.min_lr}")
        at_once = self.batch_size * self.seq_len
        if self.tokens_per_update % at_once:
            raise ValueError(
                "expected --tokens-per-update to be a multiple of --batch-size times --seq-len, "
                f"{at_once}, got {self.tokens_per_update}"
            )
        if self.segments > 1 and self.passes > 1:
            raise ValueError(
                f"expected --segments 1 with several passes an update, got {self.segments}"
            )
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"expected --seed to have at most 64 bits, got {self.seed}")

    def model_config(
        self, vocab_size: int = VOCAB_SIZE, document_start: int = DOCUMENT_START
    ) -> GLAConfig:
        """The model for a corpus's tokens. Default: bytes."""
        return GLAConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_heads=self.heads,
            use_short_conv=self.use_short_conv,
            initializer_range=self.hidden_size**-0.5,
            vocab_size=vocab_size,
            bos_token_id=document_start,
            eos_token_id=document_start,
        )

    @property
    def passes(self) -> int:
        """Batches of `batch_size` windows whose gradients make one update."""
        return max(1, self.tokens_per_update // (self.batch_size * self.seq_len))

    @property
    def tokens(self) -> int:
        """Tokens of an update."""
        return self.passes * self.batch_size * self.seq_len

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warmup = -(-self.warmup_tokens // self.tokens) or self.warmup
        warmup, span = min(warmup, self.steps // 2), self.lr - self.min_lr
        if step < warmup:
            return self.min_lr + span * (step + 1) / warmup
        if self.schedule == "cosine":
            done = (step - warmup) / (self.steps - warmup)
            return self.min_lr + span * (1 + math.cos(math.pi * done)) / 2
        falls = self.steps - warmup
        if self.schedule == "warmup-stable-decay":
            falls = min(falls, self.decay or -(-self.steps // 10))
        return self.min_lr + span * min(falls, self.steps - step) / falls


@dataclass
class Options:
    """The options that a resumed run may change. On one device only `compile` and `cuda_graph`
    alter numbers, by rounding, and `skip_bad` where a run would stop.
    """

    out: Path = flag(_OUT, "folder that the run writes to; no other run may at the same time")  # noqa: RUF009
    resume: bool = switch(
        False,
        "continue from the checkpoint in --out; after the end of a run, with more --steps",
        action="store_true",
    )
    overwrite: bool = switch(False, "write over an earlier run in --out", action="store_true")
    device: str = flag("auto", "auto takes a GPU if gla_ext has CUDA operators")
    compile: bool = switch(False, "use torch.compile", "no; GPU: yes")
    cuda_graph: bool = switch(False, "make each update one CUDA graph, on a GPU")
    prompt: str = flag("def ", "text that the sample continues", "'def '")
    sample_bytes: int = flag(400, "longest sample, tokens")
    save_every: int = flag(200, "updates between checkpoints")
    save_minutes: float = flag(0.0, "minutes between checkpoints at most, 0 for any")
    keep: int = flag(1, "checkpoints to keep, the last ones")
    log_every: int = flag(10, "updates between lines of log.jsonl")
    log: list[str] = flag(  # noqa: RUF009
        (), "programs that get the numbers too", "none", type=str, nargs="+", choices=WATCHERS
    )
    evaluate: list[str] = flag(  # noqa: RUF009
        (), "tasks of lm-eval for the result", "none", type=str, nargs="+", metavar="TASK"
    )
    skip_bad: bool = switch(
        False, "leave out updates whose loss is not finite or a spike, and continue"
    )
    parallel: str = flag(
        "auto",
        "how several processes have the weights: each whole, each a part, or parts within a node "
        "and copies over nodes; auto is replicate where that fits",
        choices=PARALLEL,
    )
    tensor_parallel: int = flag(1, "processes that share each layer's heads and channels")
    context_parallel: int = flag(1, "processes that share each window's tokens")

    def __post_init__(self) -> None:
        check_at_least(self, sample_bytes=0, save_every=1, save_minutes=0, keep=1, log_every=1)
        check_at_least(self, tensor_parallel=1, context_parallel=1)
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
    # including compilation. That is four passes over the standard library. With 1,800 steps (six
    # passes) the model memorized it: 1.16 bits per held-out byte instead of 1.11.
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


# Of the GLA paper (arXiv 2312.06635), section 5: rates from and to 3e-5, in bf16 on GPUs.
_PAPER = {
    "layers": 24,
    "heads": 4,
    "seq_len": 2048,
    "lr": 3e-4,
    "min_lr": 3e-5,
    "schedule": "cosine",
    "weight_decay": 0.01,
    "grad_clip": 1.0,
    "eval_every": 1000,
    "save_every": 500,
}
# The values of --preset, which flags override.
RECIPES: dict[str, dict[str, Any]] = {
    # 15 B tokens.
    "gla-340m": _PAPER
    | {"hidden_size": 1024, "batch_size": 16, "tokens_per_update": 1 << 19, "steps": 28_610}
    | {"warmup_tokens": 500_000_000},
    # 100 B tokens.
    "gla-1.3b": _PAPER
    | {"hidden_size": 2048, "batch_size": 8, "tokens_per_update": 1 << 21, "steps": 47_684}
    | {"warmup_tokens": 1_000_000_000},
    # For a CPU: 4 M tokens.
    "gla-tiny": _PAPER
    | {"layers": 4, "hidden_size": 128, "heads": 2, "seq_len": 256, "batch_size": 8}
    | {"tokens_per_update": 1 << 12, "steps": 1000, "warmup": 50, "lr": 3e-3, "min_lr": 3e-4}
    | {"eval_every": 250, "save_every": 100},
}


def preset(device: str) -> Preset:
    """The preset for a torch device such as 'cpu' or 'cuda:1'."""
    return PRESETS[torch.device(device).type]


def describe(settings: Settings, options: Options) -> str:
    """One line: every default of the device's preset, then the values that differ in this run."""
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
    """The command line. Options that are not given are absent, so that presets can supply them."""
    parser = FlagParser(
        prog="python -m gla_ext.train",
        description="trains a byte-level GLA language model on text, from one command.",
        argument_default=argparse.SUPPRESS,
    )
    cpu, cuda = ({**vars(p.settings), **vars(p.options)} for p in PRESETS.values())
    told = "the GLA paper's sizes, batches and rates, or tiny ones for a CPU; flags override them"
    parser.add_argument("--preset", choices=list(RECIPES), help=f"{told} (default: the device's)")
    for option in (*fields(Settings), *fields(Options)):
        name, told = option.name, option.metadata
        default = cpu[name] if cpu[name] == cuda[name] else f"{cpu[name]}; GPU: {cuda[name]}"
        kind = {} if "action" in told["kwargs"] else {"type": type(cpu[name])}
        if told["shown"] is not None:
            default = told["shown"].format(**cuda)
        text = f"{told['text']} (default: {default})"
        parser.add_argument(flag_of(name), **{**kind, **told["kwargs"]}, help=text)
    return parser


def _values(settings: Settings, options: Options) -> dict[str, Any]:
    """The values that presets determine, under the names of the flags."""
    values = asdict(settings)
    del values["data"], values["init_from"]
    values |= {name: getattr(options, name) for name in ("compile", "cuda_graph", "save_every")}
    words = {False: "no", True: "yes"}
    return {
        name.replace("_", "-"): words[value] if isinstance(value, bool) else value
        for name, value in values.items()
    }
