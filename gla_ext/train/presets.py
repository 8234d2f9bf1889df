"""What a training run does on each kind of device, and the flags that say otherwise."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gla_ext.train.data import MAX_BYTES
from gla_ext.train.settings import DTYPES, SCHEDULES, Settings, check_at_least


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
