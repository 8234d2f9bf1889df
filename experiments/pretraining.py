"""A GLA model beside a Transformer++ and FLA's GLA, on the same batches in the same order.

    python -m experiments.pretraining corpus --text runs/text/text-small.tar.xz --data runs/corpus
    python -m experiments.pretraining train --model gla --data runs/corpus --rows 16
    python -m experiments.pretraining report

The trainer is that of `gla_ext.train`, eager, with fp32 weights and bf16 products by autocast on a
GPU. FLA's model starts from the weights of ours; the Transformer++ is ours with attention in every
block. Each run is one process, whose lines of JSON are in --out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.comparisons.figures import figure, table
from experiments.language import bits_in_windows
from experiments.pack import read_pack
from experiments.report import filled, wrapped
from experiments.runs import RESULTS
from experiments.text import SMALL_PACK
from gla_ext.devices import check_device, default_device
from gla_ext.model import count_parameters
from gla_ext.model.files import write_text
from gla_ext.train.flags import FlagParser, check_at_least
from gla_ext.train.output.log import flops_per_token, memory_bytes, peak_flops
from gla_ext.train.output.result import device_name
from gla_ext.train.prepare.command import main as prepare
from gla_ext.train.presets import RECIPES, Settings
from gla_ext.train.tokens.corpus import TokenCorpus
from gla_ext.train.tokens.folder import open_folder
from gla_ext.train.trainer import Trainer

MODELS = {"gla": "GLA", "transformer": "Transformer++", "fla": "FLA's GLA"}
PAGE = Path(__file__).parents[1] / "docs" / "pretraining.md"
FIGURE = "pretraining_proof.png"
WINDOWS = 64  # of an update
WARM = 10  # first updates, which the speed does not count: kernels are chosen and compiled
HEAD_DIM = 64  # of the Transformer++


class Contender(Trainer):
    """The project's trainer, with one of MODELS, evaluated as any of them can be.

    Args:
        name: of the model.
        settings, corpus, device, compiled: as the trainer's.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        corpus: TokenCorpus,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        self.name = name
        config = settings.model_config(corpus.vocab_size, corpus.document_start)
        if name == "transformer":
            heads = settings.hidden_size // HEAD_DIM
            every = {"layers": list(range(settings.layers)), "num_heads": heads}
            config = replace(config, attn=every)
        super().__init__(settings, corpus, device, compiled, config=config)

    def make_model(self) -> nn.Module:
        """The model with its initial weights."""
        model = super().make_model()
        return fla_model(model) if self.name == "fla" else model

    def evaluate(self) -> float:
        """See `bits_in_windows`."""
        return bits_in_windows(self)


def fla_model(model: nn.Module) -> nn.Module:
    """FLA's model of the same sizes, with the same weights."""
    from fla.models import GLAConfig, GLAForCausalLM

    theirs = GLAForCausalLM(GLAConfig(**model.config.to_dict() | {"use_cache": False}))
    theirs.load_state_dict(model.state_dict())
    return theirs


def settings_of(options: argparse.Namespace, device: torch.device) -> Settings:
    """The preset's sizes, with batches and rates for a short run."""
    names = {field.name for field in fields(Settings)}
    recipe = {name: x for name, x in RECIPES[options.preset].items() if name in names}
    tokens = WINDOWS * recipe["seq_len"]
    steps = options.tokens // tokens
    if steps <= WARM:
        raise ValueError(
            f"expected --tokens to be over {tokens * WARM}, {WARM} updates, got {options.tokens}"
        )
    recipe |= {
        "warmup_tokens": 0,
        "warmup": steps // 20,
        "lr": options.lr,
        "min_lr": options.lr / 10,
    }
    recipe |= {
        "batch_size": options.rows,
        "tokens_per_update": tokens,
        "steps": steps,
        "spike": 0.0,
    }
    return Settings(**recipe, dtype="bfloat16" if device.type == "cuda" else "float32")


def train(options: argparse.Namespace) -> None:
    """Trains a model, evaluates it ten times and at the end, and writes a line for each update."""
    device = torch.device(default_device() if options.device == "auto" else options.device)
    check_device(str(device))
    if options.model == "fla" and (device.type != "cuda" or options.compile):
        raise ValueError("expected a GPU and no --compile with --model fla, got another way")
    check_at_least(options, rows=1)
    settings = settings_of(options, device)
    corpus = TokenCorpus((open_folder(options.data),))
    begin = time.perf_counter()
    trainer = Contender(options.model, settings, corpus, device, options.compile)
    path, seconds, every = options.out / f"{options.model}.jsonl", [], max(1, settings.steps // 10)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:

        def write(**entry: Any) -> None:
            print(json.dumps(entry), file=file, flush=True)

        while trainer.step < settings.steps:
            start = time.perf_counter()
            trainer.update()
            loss = trainer.losses[trainer.step - 1].item()  # waits for a GPU
            seconds.append(time.perf_counter() - start)
            write(
                update=trainer.step,
                loss=loss,
                learning_rate=settings.learning_rate(trainer.step - 1),
                gradient_norm=trainer.norms[trainer.step - 1].item(),
                tokens=trainer.step * settings.tokens,
                seconds=round(seconds[-1], 4),
            )
            if trainer.step % every == 0 or trainer.step == settings.steps:
                bits = trainer.evaluate()
                write(update=trainer.step, bits_per_byte=bits, perplexity=trainer.perplexity(bits))
                print(
                    f"{trainer.step} of {settings.steps}: {loss:.3f} nats, {bits:.4f} bits a byte"
                )
        write(result=result_of(trainer, seconds[WARM:], time.perf_counter() - begin, options))
    print(path.read_text(encoding="utf-8").splitlines()[-1])


def result_of(
    trainer: Contender, seconds: list[float], whole: float, options: argparse.Namespace
) -> dict[str, Any]:
    """The last line of a run: what its table has, and what it ran on."""
    rate, peak = trainer.settings.tokens * len(seconds) / sum(seconds), peak_flops(trainer)
    bits = trainer.evaluations[-1][1]
    return {
        "model": trainer.name,
        "parameters": count_parameters(trainer.model),
        "tokens": trainer.step * trainer.settings.tokens,
        "corpus_tokens": len(trainer.corpus.folders[0].train),
        "held_out_bytes": trainer.corpus.held_out_bytes,
        "corpus": trainer.fingerprint[:12],
        "bits_per_byte": bits,
        "perplexity": trainer.perplexity(bits),
        "tokens_per_second": round(rate),
        "mfu": peak and round(rate * flops_per_token(trainer) / peak, 4),
        "memory_bytes": memory_bytes(trainer.device),
        "seconds": round(whole, 1),
        "device": device_name(trainer.device),
        "torch": torch.__version__,
        "fla": importlib.metadata.version("fla-core") if trainer.name == "fla" else None,
        "command": f"python -m experiments.pretraining {' '.join(options.argv)}",
    }


def corpus(options: argparse.Namespace) -> None:
    """Makes tokens of a pack of `experiments.text`, whose held-out documents are held out."""
    texts = read_pack(options.text)
    which = ["--tokenizer", options.tokenizer] if options.tokenizer else ["--train-tokenizer"]
    which += [] if options.tokenizer else [str(options.vocabulary)]
    with tempfile.TemporaryDirectory() as folder:
        parts = {"train": texts.train, "held_out": texts.held_out}
        for part, documents in parts.items():
            (Path(folder) / part).mkdir()
            for number, (_, text) in enumerate(documents):
                (Path(folder) / part / f"{number:06}.txt").write_bytes(text)
        train, held_out = (f"{folder}/{part}" for part in parts)
        out = ["--skip-not-utf8", "--out", str(options.data)]
        if prepare([train, "--held-out-files", held_out, *which, *out]):
            raise ValueError(f"expected a corpus of {options.text}, got none, as said above")


def report(options: argparse.Namespace) -> None:
    """Draws the figure and the table of the page from the lines of the runs."""
    runs = {}
    for name in MODELS:
        path = options.out / f"{name}.jsonl"
        if path.exists():
            runs[name] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    if not runs:
        raise ValueError(f"expected {options.out} to hold runs of this command, got none")
    rows = []
    with figure(options.page.parent / FIGURE, panels=2) as (axis, held_out):
        axis.set(xlabel="million tokens", ylabel="nats a token", title="training")
        held_out.set(xlabel="million tokens", title="held out")
        for number, (name, lines) in enumerate(runs.items()):
            told, per = lines[-1]["result"], lines[0]["tokens"] / 1e6
            losses = [line["loss"] for line in lines if "loss" in line]
            span = max(1, len(losses) // 50)
            places = range(span, len(losses) + 1)
            means = [statistics.fmean(losses[end - span : end]) for end in places]
            drawn = {"color": f"C{number}", "label": MODELS[name]}
            axis.plot([per * place for place in places], means, **drawn)
            found = [line for line in lines if "perplexity" in line]
            nats = [math.log(line["perplexity"]) for line in found]
            held_out.plot([per * line["update"] for line in found], nats, "o-", ms=4, **drawn)
            mfu = f"{told['mfu']:.1%}" if told["mfu"] else ""
            row = [MODELS[name], f"{told['parameters'] / 1e6:.1f} M", f"{told['perplexity']:.2f}"]
            row += [f"{told['bits_per_byte']:.4f}", f"{told['tokens_per_second']:,}", mfu]
            rows.append([*row, f"{told['memory_bytes'] / 2**30:.1f} GiB"])
        axis.legend()
    head = ["", "parameters", "perplexity a token", "bits a byte", "tokens/s", "MFU", "memory"]
    first = next(iter(runs.values()))[-1]["result"]
    passes = first["tokens"] / first["corpus_tokens"]
    about = (
        f"{first['tokens'] / 1e6:.1f} M tokens, {passes:.1f} passes over the text, in "
        f"{first['seconds']:.0f} s with evaluations, on one {first['device']}, torch "
        f"{first['torch']}; held out are {first['held_out_bytes'] / 1e6:.1f} MB."
    )
    section = f"![losses against tokens]({FIGURE})\n\n{table(head, rows)}\n\n{wrapped(about)}"
    content = filled(options.page.read_text(encoding="utf-8"), "proof", section, options.page)
    write_text(options.page, content)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; 2 if something is not as expected."""
    argv = sys.argv[1:] if argv is None else argv
    shown = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    parser = FlagParser(
        prog="python -m experiments.pretraining", description=__doc__.split("\n")[0]
    )
    commands = parser.add_subparsers(required=True, metavar="corpus|train|report")
    run = commands.add_parser("train", help="trains one of the models", **shown)
    run.add_argument("--model", choices=list(MODELS), required=True, help="which")
    run.add_argument("--tokens", type=int, default=36_000_000, help="to train on")
    run.add_argument("--rows", type=int, default=16, help="windows that pass at once")
    run.add_argument("--lr", type=float, default=1e-3, help="highest rate; it falls to a tenth")
    run.add_argument("--preset", choices=list(RECIPES), default="gla-340m", help="sizes")
    run.add_argument("--device", default="auto", help="where")
    run.add_argument("--compile", action="store_true", help="use torch.compile; not FLA's")
    make = commands.add_parser("corpus", help="makes tokens of a pack of experiments.text", **shown)
    make.add_argument("--text", type=Path, default=SMALL_PACK, help="the pack")
    make.add_argument("--tokenizer", help="folder of one that is there")
    make.add_argument("--vocabulary", type=int, default=32_000, help="tokens of one made here")
    for one in (run, make):
        one.add_argument("--data", type=Path, default=Path("runs/corpus"), help="the corpus")
    draw = commands.add_parser("report", help="draws the page's figure and table", **shown)
    draw.add_argument("--page", type=Path, default=PAGE, help="the page")
    for one in (run, draw):
        one.add_argument("--out", type=Path, default=RESULTS / "pretraining", help="of the lines")
    for one, function in ((run, train), (make, corpus), (draw, report)):
        one.set_defaults(function=function, argv=argv)
    options = parser.parse_args(argv)
    try:
        options.function(options)
    except (OSError, ValueError, ImportError) as error:
        print(f"experiments.pretraining: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
