"""How a run goes, while it goes: a bar, lines of JSON, the picture, programs that watch runs."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gla_ext.model.files import write_text
from gla_ext.train.output.plot import plot_losses
from gla_ext.train.presets import Options
from gla_ext.train.run_folder import CURVE, LOG

if TYPE_CHECKING:
    from gla_ext.train.trainer import Trainer

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s in bf16, without sparsity
_PICTURE_SECONDS = 60  # between two pictures
Watcher = Callable[[int, dict[str, float]], None]  # takes the step and what is logged of it


def without_nan(value: Any) -> Any:
    """A value that JSON can hold: its numbers that are not finite as text, 'nan' and 'inf'."""
    return json.loads(json.dumps(value), parse_constant=lambda name: str(float(name)))


class Log:
    """Times updates and tells of them; a context, which closes what it opened.

    The speed counts only updates, without evaluations, checkpoints and the first one, which
    compiles.
    """

    def __init__(self, trainer: Trainer, options: Options) -> None:
        from tqdm import tqdm

        self.trainer, self.options = trainer, options
        self.first = self.line = trainer.step  # before this run, and of the last line
        self.first_seconds = self.seconds = self.line_seconds = 0.0
        pauses = (options.log_every, trainer.eval_every, options.save_every)
        self._pauses = (*pauses, trainer.settings.steps)
        self._drawn = time.perf_counter()
        self._peak = peak_flops(trainer)
        self._watchers: list[Watcher] = []
        trainer.parallel.from_first(self._open)
        interval = 0.5 if sys.stderr.isatty() else 10.0
        steps = trainer.settings.steps
        shown = {"desc": "train", "unit": "step", "mininterval": interval}
        self.bar = tqdm(total=steps, initial=self.first, **shown)

    def _open(self) -> None:
        keep_until(self.options.out / LOG, self.trainer)
        opened = {"tensorboard": tensorboard, "wandb": wandb}
        self._watchers = [opened[name](self.trainer, self.options) for name in self.options.log]

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    @property
    def reads(self) -> bool:
        """Whether the losses are to be read now, which waits for a GPU."""
        step = self.trainer.step
        return step == self.first + 1 or not all(step % n for n in self._pauses)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        done = self.trainer.step - self.first - 1
        return self.trainer.settings.tokens * done / self.seconds if self.seconds else 0.0

    def update(self, start: float) -> None:
        """Tells of an update that was begun at that time of `perf_counter`."""
        trainer = self.trainer
        bits = trainer.recent_loss() if self.reads else 0.0
        seconds = time.perf_counter() - start
        if trainer.step == self.first + 1:
            self.first_seconds, self.line = seconds, trainer.step
        else:
            self.seconds += seconds
        if self.reads:
            speed = f", {self.rate:,.0f} tokens/s" if self.rate else ""
            self.bar.set_postfix_str(f"{bits:.3f} bits/byte{speed}", refresh=False)
        self.bar.update()
        if trainer.step % self.options.log_every == 0 or trainer.step == trainer.settings.steps:
            trainer.parallel.from_first(self._line)

    def _line(self) -> None:
        trainer, step = self.trainer, self.trainer.step
        seconds, count = self.seconds - self.line_seconds, step - self.line
        rate = count * trainer.settings.tokens / seconds if count else None
        loss = trainer.losses[max(0, step - self.options.log_every) : step].nanmean().item()
        used = rate and self._peak and rate * flops_per_token(trainer) / self._peak
        self.line, self.line_seconds = step, self.seconds
        entry = {
            "loss": loss,
            "bits_per_byte": loss * trainer.corpus.tokens_per_byte / math.log(2),
            "learning_rate": trainer.settings.learning_rate(step - 1),
            "gradient_norm": trainer.norms[step - 1].item(),
            "tokens": step * trainer.settings.tokens,
            "tokens_per_second": rate and round(rate),
            "mfu": used and round(used, 4),
            "memory_bytes": memory_bytes(trainer.device),
        }
        self._write(entry)
        if time.perf_counter() - self._drawn > _PICTURE_SECONDS:
            plot_losses(self.options.out / CURVE, trainer, {})
            self._drawn = time.perf_counter()

    def evaluation(self) -> None:
        """Tells of the last evaluation."""
        step, bits = self.trainer.evaluations[-1]
        perplexity = self.trainer.perplexity(bits)
        entry = {"held_out_bits_per_byte": bits, "held_out_perplexity": perplexity}
        self.trainer.parallel.from_first(lambda: self._write(entry, step))

    def _write(self, entry: dict[str, Any], step: int | None = None) -> None:
        step = self.trainer.step if step is None else step
        entry = without_nan(entry)
        with (self.options.out / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"update": step} | entry) + "\n")
        for watch in self._watchers:
            watch(step, {k: float(x) for k, x in entry.items() if x is not None})

    def speed(self) -> dict[str, float]:
        """What `metrics.json` has of it."""
        rate, first = round(self.rate), round(self.first_seconds, 1)
        return {"tokens_per_second": rate, "first_step_seconds": first}


def keep_until(path: Path, trainer: Trainer) -> None:
    """Removes the lines of updates and evaluations that a checkpoint does not know of."""
    kept, evaluated = [], dict(trainer.evaluations)
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # cut by a kill
            continue
        known = "loss" in entry or entry["update"] in evaluated
        if entry["update"] <= trainer.step and known:
            kept.append(line + "\n")
    write_text(path, "".join(kept))


def flops_per_token(trainer: Trainer) -> int:
    """6 a parameter of the products, of forward and backward; the states' are not counted."""
    parameters = trainer.model.named_parameters()
    return 6 * sum(p.numel() for name, p in parameters if p.ndim > 1 and "embeddings" not in name)


def peak_flops(trainer: Trainer) -> float | None:
    """Of the run's GPUs together, if the peak is known."""
    if trainer.device.type != "cuda" or trainer.settings.dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(trainer.device)
    return next((x * trainer.parallel.size for key, x in PEAKS.items() if key in name), None)


def memory_bytes(device: torch.device) -> int:
    """The most that this process has taken, of a GPU if it uses one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def tensorboard(trainer: Trainer, options: Options) -> Watcher:
    """Writes into the folder `tensorboard` of the run."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(options.out / "tensorboard"), purge_step=trainer.step + 1)

    def watch(step: int, entry: dict[str, float]) -> None:
        for name, value in entry.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return watch


def wandb(trainer: Trainer, options: Options) -> Watcher:
    """Tells Weights & Biases, or writes for it into the run's folder with WANDB_MODE=offline."""
    import wandb

    about = {"project": "gla_ext", "name": options.out.resolve().name, "resume": "auto"}
    run = wandb.init(dir=str(options.out), config=asdict(trainer.settings), **about)
    return lambda step, entry: run.log(entry, step=step)
