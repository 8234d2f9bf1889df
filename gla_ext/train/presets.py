"""The options of a training run, their values for each kind of device, and the flags."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from gla_ext.model.config import GLAConfig
from gla_ext.train.data import DOCUMENT_START, MAX_BYTES, VOCAB_SIZE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCHEDULES = ("linear", "cosine")
_OUT = Path("runs/gla-bytes")


def check_at_least(options: Any, **minima: float) -> None:
    """Raises ValueError for an option below its minimum, or NaN."""
    for name, minimum in minima.items():
        value = getattr(options, name)
        if not value >= minimum:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"expected {flag} to be at least {minimum}, got {value}")


def _flag(default: Any, text: str, shown: str | None = None, **kwargs: Any) -> Any:
    """A dataclass field with its flag. `text`: the words of --help. `shown`: the default in words,
    if no preset's value can be shown (`{name}` is a GPU's value of that name). The rest is for
    argparse.
    """
    return field(default=default, metadata={"text": text, "shown": shown, "kwargs": kwargs})


def _switch(default: bool, text: str, shown: str = "no", action: Any = None) -> Any:
    """A `_flag` with the two forms --NAME and --no-NAME."""
    return _flag(default, text, shown, action=action or argparse.BooleanOptionalAction)


@dataclass
class Settings:
    """The options that determine a run's numbers; a checkpoint stores them, with a digest of the
    text.

    With segments, each starts from the states of the one before, without a gradient (truncated
    backpropagation): see `gla_ext.train.segments`. The learning rate rises linearly over `warmup`
    steps and falls to 0.
    """

    data: list[str] | None = _flag(  # noqa: RUF009
        None,
        f"text file, or folder of text files, up to {MAX_BYTES >> 20} MiB; or folders that python "
        "-m gla_ext.train.prepare wrote, each as FOLDER or FOLDER:WEIGHT",
        "the source files of Python's standard library",
        type=str,
        nargs="+",
    )
    dtype: str = _flag("float32", "of the products, bfloat16 by autocast", choices=list(DTYPES))
    steps: int = _flag(2000, "optimizer steps in all")
    batch_size: int = _flag(8, "windows a step, of all processes")
    seq_len: int = _flag(128, "tokens a window")
    hidden_size: int = _flag(128, "model width")
    layers: int = _flag(3, "number of blocks")
    heads: int = _flag(2, "heads a layer")
    use_short_conv: bool = _switch(False, "short convolutions on q, k and v")
    segments: int = _flag(
        1, "steps a window: each goes on from the state that the one before ended with"
    )
    packed: bool = _switch(False, "each document starts from no state")
    lr: float = _flag(3e-3, "peak learning rate")
    schedule: str = _flag("linear", "how the learning rate falls", choices=SCHEDULES)
    warmup: int = _flag(100, "steps of linear warm-up")
    weight_decay: float = _flag(0.1, "weight decay of the matrices")
    grad_clip: float = _flag(1.0, "largest gradient norm, 0 for any")
    eval_every: int = _flag(
        0, "steps between evaluations", "a quarter of the steps, 250 at least; GPU: {eval_every}"
    )
    seed: int = _flag(0, "seed of weights, batches and sample")

    def __post_init__(self) -> None:
        check_at_least(self, steps=0, batch_size=1, seq_len=1, hidden_size=1, layers=1, heads=1)
        check_at_least(self, segments=1)
        check_at_least(self, lr=0, warmup=0, weight_decay=0, grad_clip=0, eval_every=0)
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
    """The options that a resumed run may change. On one device only `compile` and `cuda_graph`
    alter numbers, by rounding.
    """

    out: Path = _flag(_OUT, "folder for what the run writes, and for no other run meanwhile")  # noqa: RUF009
    resume: bool = _switch(
        False,
        "go on from the checkpoint in --out, with more --steps also after the last",
        action="store_true",
    )
    overwrite: bool = _switch(False, "write over an earlier run in --out", action="store_true")
    device: str = _flag("auto", "auto takes a GPU if gla_ext has CUDA operators")
    compile: bool = _switch(False, "use torch.compile", "no; GPU: yes")
    cuda_graph: bool = _switch(False, "make each step one CUDA graph, on a GPU")
    prompt: str = _flag("def ", "text that the sample continues", "'def '")
    sample_bytes: int = _flag(400, "longest sample, tokens")
    save_every: int = _flag(200, "steps between checkpoints")
    tensor_parallel: int = _flag(1, "processes that share each layer's heads and channels")
    context_parallel: int = _flag(1, "processes that share each window's tokens")

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
    parser = argparse.ArgumentParser(
        prog="python -m gla_ext.train",
        description="trains a byte-level GLA language model on text, from one command.",
        argument_default=argparse.SUPPRESS,
    )
    cpu, cuda = ({**vars(p.settings), **vars(p.options)} for p in PRESETS.values())
    for option in (*fields(Settings), *fields(Options)):
        name, told = option.name, option.metadata
        default = cpu[name] if cpu[name] == cuda[name] else f"{cpu[name]}; GPU: {cuda[name]}"
        kind = {} if "action" in told["kwargs"] else {"type": type(cpu[name])}
        if told["shown"] is not None:
            default = told["shown"].format(**cuda)
        text = f"{told['text']} (default: {default})"
        parser.add_argument("--" + name.replace("_", "-"), **{**kind, **told["kwargs"]}, help=text)
    return parser


def _values(settings: Settings, options: Options) -> dict[str, Any]:
    """The values that presets determine, under the names of the flags."""
    values = asdict(settings)
    del values["data"]
    values |= {name: getattr(options, name) for name in ("compile", "cuda_graph", "save_every")}
    words = {False: "no", True: "yes"}
    return {
        name.replace("_", "-"): words[value] if isinstance(value, bool) else value
        for name, value in values.items()
    }
