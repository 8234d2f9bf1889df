"""Training a byte-level GLA language model: settings, one step, evaluation, checkpoints.

Everything a step does follows from the settings, the corpus and the checkpoint, so that on CPU a
resumed run equals the uninterrupted one bit for bit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.model import GLAForCausalLM
from gla_ext.model.checkpoint import load_tensors, model_tensors, read_tensors, write_tensors
from gla_ext.model.config import GLAConfig
from gla_ext.model.weights import reset_convolutions
from gla_ext.train.data import DOCUMENT_START, VOCAB_SIZE, Batches, Corpus, encode
from gla_ext.train.graph import GraphedStep, check_graph
from gla_ext.train.optimizer import optimizer_of
from gla_ext.train.segments import SegmentedLoss, forward, most_documents, pack_rows

_FORMAT = "gla_ext.train/1"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCHEDULES = ("linear", "cosine")
# As many blanks as the text has; colder, or by top-p, runs of indentation do not end.
SAMPLE_TEMPERATURE = 0.9


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


class CheckpointMismatch(ValueError):
    """A checkpoint that belongs to another run."""


class Trainer:
    """A model, its optimizer and its data at some step, all on one device.

    Args:
        settings: the run's settings.
        corpus: the text.
        device: where to train.
        compiled: run model and loss, forward and backward, through
            `torch.compile(fullgraph=True)`. Default: False.
        cuda_graph: make each step, the optimizer's update included, one CUDA graph, see
            `gla_ext.train.graph`. Default: False.

    Raises:
        ValueError: cuda_graph on another device than a CUDA one.
    """

    evaluation_segment = 4096  # bytes that pass through the model at a time

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        device: torch.device,
        compiled: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        if cuda_graph:
            check_graph(device)
        self.settings, self.device = settings, device
        self.fingerprint = corpus.fingerprint
        self.batches, self.held_out = self.make_data(corpus)
        torch.manual_seed(settings.seed)
        self.model = self.make_model().to(device)
        graph_on = device if cuda_graph else None
        self.optimizer = optimizer_of(self.model, settings.lr, settings.weight_decay, graph_on)
        self.loss = self._loss
        if compiled:
            self.loss = torch.compile(self._loss, fullgraph=True, dynamic=False)
        self.segmented = self._segmented_loss(compiled, cuda_graph)
        # Of a window's first step, which starts from no state, and of the others.
        graphs = 0 if not cuda_graph else 2 if settings.segments > 1 else 1
        self.graphs = [GraphedStep(self._update, device) for _ in range(graphs)]
        self.step = 0
        self.losses = torch.zeros(settings.steps, dtype=torch.float32, device=device)
        self.evaluations: list[tuple[int, float]] = []

    def make_data(self, corpus: Corpus) -> tuple[Callable[[int], tuple[Tensor, Tensor]], Tensor]:
        """The batches, a function of the step, and what `evaluate` takes."""
        settings = self.settings
        stream = encode(corpus.train).to(self.device)
        sizes = (settings.batch_size, settings.seq_len, settings.seed, settings.segments)
        return Batches(stream, *sizes), encode(corpus.held_out).to(self.device)

    def make_model(self) -> GLAForCausalLM:
        """The model with its initial weights."""
        model = GLAForCausalLM(self.settings.model_config())
        reset_convolutions(model)
        return model

    def train_step(self) -> None:
        """One optimizer step; its loss, nats a byte, goes to `losses[step]`.

        On a GPU nothing here waits for it: the steps queue up until a loss is read.
        """
        rate = self.settings.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            if self.graphs:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.model.train()
        batch, update = self.batches(self.step), self._update
        if self.graphs:
            update = self.graphs[min(self.step % self.settings.segments, 1)]
        self.losses[self.step] = update(*batch)
        self.step += 1

    def _update(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, clipping and the optimizer's step on a batch; returns its loss."""
        if self.segmented is None:
            loss = self.loss(inputs, targets)
        else:
            loss = self.segmented(self.step, inputs, targets)
        loss.backward()
        if self.settings.grad_clip > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of a batch, int64 `[B, T]` each, in nats a byte."""
        with self._autocast():
            logits = self.model(inputs).logits
        return _cross_entropy(logits, targets)

    def _segmented_loss(self, compiled: bool, in_place: bool) -> SegmentedLoss | None:
        """What `train_step` calls where steps hand on states or documents are apart."""
        settings, documents = self.settings, 0
        if settings.packed:
            sizes = (settings.batch_size, settings.seq_len)
            documents = most_documents(self.batches.stream, *sizes)
        elif settings.segments == 1:
            return None
        return SegmentedLoss(
            self.model,
            _cross_entropy,
            settings.segments,
            documents,
            compiled,
            self._autocast,
            in_place,
        )

    def recent_loss(self, steps: int = 20) -> float:
        """Mean training loss of the last steps in bits a byte; NaN before the first."""
        return self.losses[max(0, self.step - steps) : self.step].mean().item() / math.log(2)

    def best_evaluation(self) -> tuple[int, float]:
        """Step and bits a byte of the lowest evaluation so far."""
        return min(self.evaluations, key=lambda evaluation: evaluation[1])

    def evaluate(self, should_stop: Callable[[], bool] = lambda: False) -> float | None:
        """Held-out bits a byte at this step, also noted in `evaluations`.

        The held-out documents pass through the model as one text, in segments, the recurrent
        state going from segment to segment, but of packed documents not from one to the next.

        Args:
            should_stop: asked between segments. Default: never.

        Returns:
            Bits a byte, or None if it was stopped.
        """
        self.model.eval()
        states, bits, count = None, 0.0, 0
        size = self.evaluation_segment
        for start in range(0, len(self.held_out) - 1, size):
            if should_stop():
                return None
            row = self.held_out[start : start + size + 1].long()
            inputs, rows = row[None, :-1], None
            if self.settings.packed:
                rows = pack_rows(inputs, 1 + int((inputs == DOCUMENT_START).sum()))
            with torch.no_grad(), self._autocast():
                logits, states = forward(self.model, inputs, states, rows)
            charged = row[1:] != DOCUMENT_START
            nats = F.cross_entropy(logits[0].float(), row[1:], reduction="none")[charged]
            bits += nats.double().sum().item() / math.log(2)
            count += int(charged.sum())
        self.evaluations.append((self.step, bits / count))
        return bits / count

    def sample(self, prompt: str, length: int) -> str:
        """A continuation of a document that starts with prompt, at most `length` bytes."""
        generator = torch.Generator(self.device).manual_seed(self.settings.seed)
        # Bytes of the command line that are not UTF-8 come as surrogates.
        prompt_bytes = prompt.encode(errors="surrogateescape")
        tokens = torch.tensor([[DOCUMENT_START, *prompt_bytes]], device=self.device)
        self.model.eval()
        with self._autocast():
            tokens = self.model.generate(
                tokens,
                length,
                temperature=SAMPLE_TEMPERATURE,
                eos_token_id=DOCUMENT_START,
                generator=generator,
            )
        text = bytes(tokens[0, 1:].tolist()).rstrip(bytes([DOCUMENT_START]))
        return text.decode(errors="replace")

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file, atomically: all that `load` needs to go on from here."""
        tensors = {f"model.{name}": x for name, x in model_tensors(self.model).items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
        if self.segmented is not None:
            for name, x in self.segmented.tensors(self.step).items():
                tensors[f"segments.{name}"] = x
        tensors["losses"] = self.losses[: self.step]
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        write_tensors(path, tensors, self._metadata())

    def _metadata(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "step": self.step,
            "settings": asdict(self.settings),
            "config": self.model.config.to_dict(),
            "corpus": self.fingerprint,
            "evaluations": self.evaluations,
        }

    def load(self, path: str | Path) -> None:
        """Goes on from what `save` wrote, up to as many steps as the settings say now.

        Raises:
            CheckpointMismatch: if it was written with other settings (`data` and `steps` aside) or
                another corpus, or after more steps.
        """
        tensors, metadata = self._read(path)
        now = {"data": self.settings.data, "steps": self.settings.steps}
        settings = replace(checkpoint_settings(metadata, path), **now)
        if settings != self.settings:
            raise CheckpointMismatch(
                f"expected a checkpoint with {self.settings}, got one with {settings}"
            )
        if metadata["step"] > self.settings.steps:
            raise CheckpointMismatch(
                f"expected --steps to be at least {metadata['step']}, the step of {path}, got "
                f"{self.settings.steps}"
            )
        if metadata["corpus"] != self.fingerprint:
            raise CheckpointMismatch(
                f"expected {path} to be trained on the text given now (digest "
                f"{self.fingerprint[:12]}), got a checkpoint of other text "
                f"({metadata['corpus'][:12]})"
            )
        self._restore(tensors)
        for graph in self.graphs:
            graph.reset()  # its tensors have been replaced
        self.step = metadata["step"]
        self.losses[: self.step] = tensors["losses"].to(self.device)
        self.evaluations = [(step, bits) for step, bits in metadata["evaluations"]]
        if "rng.cpu" in tensors:
            torch.set_rng_state(tensors["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)

    def _read(self, path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A checkpoint's tensors and metadata, also of one that many processes wrote."""
        tensors, metadata = read_tensors(path)
        if "sharded" in metadata:
            from gla_ext.distributed.checkpoints import read_whole

            tensors |= read_whole(Path(path).parent / metadata["sharded"])
        return tensors, metadata

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        """Puts a checkpoint's tensors into model and optimizer."""
        load_tensors(self.model, _under("model.", tensors))
        for name, parameter in self.model.named_parameters():
            state = _under(f"optimizer.{name}.", tensors)
            if state:
                self.optimizer.state[parameter] = {
                    key: value.to(parameter.device) for key, value in state.items()
                }
        if self.segmented is not None:
            self.segmented.load(_under("segments.", tensors), self.device)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = DTYPES[self.settings.dtype]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)


def checkpoint_settings(metadata: dict[str, Any], path: str | Path) -> Settings:
    """The settings in a checkpoint's metadata.

    Raises:
        CheckpointMismatch: if it is no checkpoint of this trainer.
    """
    if metadata.get("format") != _FORMAT:
        raise CheckpointMismatch(
            f"expected {path} to be a checkpoint of the format {_FORMAT}, got "
            f"{metadata.get('format')}"
        )
    return Settings(**metadata["settings"])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
