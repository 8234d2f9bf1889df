"""Training a GLA language model: one update, evaluation, checkpoints.

All of an update follows from the settings, the corpus and the checkpoint, so that on CPU a resumed
run equals the uninterrupted one bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gla_ext.losses import cross_entropy_loss
from gla_ext.model import GLAForCausalLM
from gla_ext.model.checkpoint import read_tensors
from gla_ext.model.config import GLAConfig
from gla_ext.model.loss import next_token_loss
from gla_ext.model.weights import reset_convolutions
from gla_ext.train.data import Corpus
from gla_ext.train.graph import GraphedUpdate, check_graph
from gla_ext.train.optimizer import optimizer_of
from gla_ext.train.parallel import ONE_PROCESS, Parallel, Whole, under
from gla_ext.train.presets import DTYPES, Settings
from gla_ext.train.segments import SegmentedLoss, forward, pack_rows
from gla_ext.train.tokens.corpus import TokenCorpus
from gla_ext.train.tokens.folder import Stream

SPIKE_SPAN = 100  # updates whose mean loss a spike is compared with
_FORMAT = "gla_ext.train/1"
# Gives as many blanks as the text has. When colder, or with top-p, runs of indentation never end.
SAMPLE_TEMPERATURE = 0.9


class CheckpointMismatch(ValueError):
    """A checkpoint that belongs to another run."""


class Trainer:
    """A model, its optimizer and its data at some step.

    Args:
        settings, corpus, device: the run's settings, the text, as bytes or tokens, and where to
            train.
        compiled: compile model and loss, forward and backward, by `torch.compile(fullgraph=True)`.
            Default: False.
        cuda_graph: make each update, including forward and backward, one CUDA graph, see
            `gla_ext.train.graph`. Default: False.
        parallel: this process's part of the run, after `lay_out`. Default: all of it, on one
            device.
        config: the model, of the corpus's tokens. Default: as the settings say.

    Raises:
        ValueError: cuda_graph on a device other than CUDA.
    """

    evaluation_segment = 4096  # tokens that pass through the model at once

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus | TokenCorpus,
        device: torch.device,
        compiled: bool = False,
        cuda_graph: bool = False,
        parallel: Parallel = ONE_PROCESS,
        config: GLAConfig | None = None,
    ) -> None:
        if cuda_graph:
            check_graph(device)
        self.settings, self.device, self.parallel = settings, device, parallel
        self.max_norm = settings.grad_clip or math.inf
        self.corpus, self.fingerprint, self.config = corpus, corpus.fingerprint, config
        batches, self.held_out = self.make_data(corpus)
        self.batches = parallel.own_part(batches)
        rows = settings.batch_size // parallel.replicas
        self.documents = rows * batches.most_documents() if settings.packed else 0
        torch.manual_seed(settings.seed)
        self.model = self.make_model().to(device)
        self.weights = parallel.prepare(self.model, settings, compiled)
        compiled &= self.weights.one_graph
        self.loss = (
            torch.compile(self._loss, fullgraph=True, dynamic=False) if compiled else self._loss
        )
        graph_on = device if cuda_graph else None
        rates = (settings.lr, settings.weight_decay, graph_on, settings.betas)
        self.optimizer = optimizer_of(self.weights.parameters.values(), *rates)
        self.segmented = self._segmented_loss(compiled, cuda_graph)
        # One graph for a window's first step, which starts from a zero state, and one for the
        # others.
        graphs = 0 if not cuda_graph else 2 if settings.segments > 1 else 1
        self.graphs = [GraphedUpdate(self._update_on, device) for _ in range(graphs)]
        self.step = 0
        numbers = {"dtype": torch.float32, "device": device}
        self.losses, self.norms, self.bad = torch.zeros(3, settings.steps, **numbers)
        self.limit = torch.full((), math.inf, **numbers)  # a loss above it is a spike
        self.evaluations: list[tuple[int, float]] = []

    def make_data(
        self, corpus: Corpus | TokenCorpus
    ) -> tuple[Callable[[int], tuple[Tensor, Tensor]], Tensor | Stream]:
        """The batches, as a function of the step, and the tokens for `evaluate`."""
        settings, windows = self.settings, self.settings.passes * self.settings.batch_size
        sizes = (windows, settings.seq_len, settings.seed, settings.segments)
        return corpus.batches(*sizes, self.device), corpus.held_out_tokens(self.device)

    def make_model(self) -> GLAForCausalLM:
        """The model with its initial weights."""
        tokens = (self.corpus.vocab_size, self.corpus.document_start)
        model = GLAForCausalLM(self.config or self.settings.model_config(*tokens))
        reset_convolutions(model)
        return model

    def start_from(self, tensors: dict[str, Tensor]) -> None:
        """Takes the weights of another model, of the names of `model_tensors`."""
        tensors = {f"model.{name}": x for name, x in tensors.items()}
        self.weights.restore(self.optimizer, tensors, None)

    @property
    def eval_every(self) -> int:
        """Steps between evaluations."""
        return self.settings.eval_every or max(250, self.settings.steps // 4)

    def update(self) -> None:
        """Runs one update and stores its loss, in nats per token, in `losses[step]`, the norm of
        its gradient in `norms`, and whether it was bad in `bad`: neither number may be infinite or
        NaN, nor the loss a spike. A bad update leaves weights and optimizer as they are.

        This does not wait for a GPU: updates are queued until a loss is read.
        """
        rate = self.settings.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            if self.graphs:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.model.train()
        update_on = self._update_on
        if self.graphs:
            update_on = self.graphs[min(self.step % self.settings.segments, 1)]
        step, spike = self.step, self.settings.spike
        if spike and step >= SPIKE_SPAN:
            self.limit.copy_(self.losses[step - SPIKE_SPAN : step].nanmean() + spike)
        found = update_on(*self.batches(step))
        self.losses[step], self.norms[step], self.bad[step] = found
        self.step += 1

    def _update_on(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, clipping and the optimizer's update on a batch, in as many passes as
        settings say; returns its loss, the norm of its gradient, and whether it was bad.
        """
        total, passes = 0.0, self.settings.passes
        batches = zip(inputs.chunk(passes), targets.chunk(passes), strict=True)
        for number, batch in enumerate(batches, start=1):
            with self.weights.part(last=number == passes):
                if self.segmented is None:
                    loss = self.loss(*batch) / passes
                else:
                    loss = self.segmented(self.step, *batch) / passes
                loss.backward()
            total += loss.detach()
        norm = self.weights.clip(self.max_norm)
        loss = self.parallel.mean(total).float()
        good = loss.isfinite() & norm.isfinite() & (loss <= self.limit)
        self.optimizer.found_inf = 1 - good.float()  # with it the fused step leaves all as it is
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack([loss, norm.float(), self.optimizer.found_inf])

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of a batch, int64 `[B, T]` each, in nats per token."""
        with self._autocast():
            logits = self.weights.module(inputs, **self.parallel.arguments).logits
        return _cross_entropy(logits, targets)

    def _segmented_loss(self, compiled: bool, in_place: bool) -> SegmentedLoss | None:
        """The loss of an update with segments or packed documents, else None."""
        segments = self.settings.segments
        if segments == 1 and not self.documents:
            return None
        options = (self.documents, compiled, self._autocast, in_place, self.corpus.document_start)
        return SegmentedLoss(self.weights.module, _cross_entropy, segments, *options)

    def recent_loss(self, steps: int = 20) -> float:
        """Mean training loss of the last steps, in bits per byte; NaN before the first step."""
        loss = self.losses[max(0, self.step - steps) : self.step].nanmean().item()
        loss *= self.corpus.tokens_per_byte / math.log(2)
        return self.parallel.mean(torch.tensor(loss, dtype=torch.float64)).item()

    def perplexity(self, bits: float) -> float:
        """A held-out token's, of the bits a byte of an evaluation; infinite of a diverged model."""
        bits /= self.corpus.held_out_tokens_per_byte
        return math.inf if bits >= sys.float_info.max_exp else 2**bits

    def has_finite_weights(self) -> bool:
        """Whether all weights are numbers."""
        whole = all(p.isfinite().all() for p in self.weights.parameters.values())
        return not self.parallel.largest(int(not whole))

    def best_evaluation(self) -> tuple[int, float]:
        """Step and bits per byte of the lowest evaluation so far."""
        return min(self.evaluations, key=lambda evaluation: evaluation[1])

    def evaluate(self, should_stop: Callable[[], bool] = lambda: False) -> float | None:
        """Bits per byte of the held-out documents at this step; also appended to `evaluations`.

        The held-out documents pass through the model as one sequence, in segments. The recurrent
        state is passed on from segment to segment; with `packed`, it is not passed on between
        documents.

        Args:
            should_stop: called between segments. Default: never stop.

        Returns:
            Bits per byte, or None if it was stopped.
        """
        self.model.eval()
        states, bits, count = None, 0.0, 0
        size, document_start = self.evaluation_segment, self.corpus.document_start
        with self.weights.evaluating():
            for start in range(0, len(self.held_out) - 1, size):
                if should_stop():
                    return None
                row = self.held_out[start : start + size + 1].to(self.device).long()
                inputs, rows = row[None, :-1], None
                if self.settings.packed:
                    documents = 1 + int((inputs == document_start).sum())
                    rows = pack_rows(inputs, documents, document_start)
                with torch.no_grad(), self._autocast():
                    logits, states = forward(self.model, inputs, states, rows)
                charged = row[1:] != document_start
                nats = cross_entropy_loss(logits[0], row[1:])[0][charged]
                bits += nats.double().sum().item() / math.log(2)
                count += int(charged.sum())
        bits *= self.corpus.held_out_tokens_per_byte / count
        self.evaluations.append((self.step, bits))
        return bits

    def sample(self, prompt: str, length: int) -> str:
        """A continuation of a document that starts with prompt, at most `length` tokens."""
        generator = torch.Generator(self.device).manual_seed(self.settings.seed)
        tokens = torch.tensor([self.corpus.prompt(prompt)], device=self.device)
        self.model.eval()
        with self._autocast():
            tokens = self.model.generate(
                tokens,
                length,
                temperature=SAMPLE_TEMPERATURE,
                eos_token_id=self.corpus.document_start,
                generator=generator,
            )
        known = tokens[0] < self.corpus.vocab_size  # a model to start from may have more
        return self.corpus.text_of(tokens[0][known].tolist())

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file, atomically, with all that `load` needs to continue from
        here. Sharded tensors are in a folder next to it.
        """
        self.snapshot()(Path(path))
        self.parallel.largest(0)  # which waits for the first process, the one that writes the file

    def snapshot(self) -> Callable[[Path], None]:
        """A function that writes what `save` does, of this moment, to a path, to be called on all
        processes; they may go on with updates meanwhile.
        """
        tensors = {"losses": self._mean_losses()[: self.step]}
        if self.segmented is not None:
            for name, x in self.segmented.tensors(self.step).items():
                tensors[f"segments.{name}"] = self.parallel.all_rows(x)
        metadata = {
            "format": _FORMAT,
            "step": self.step,
            "settings": asdict(self.settings),
            "config": self.model.config.to_dict(),
            "corpus": self.fingerprint,
            "evaluations": list(self.evaluations),
        }
        return self.weights.snapshot(self.optimizer, tensors, metadata)

    def _mean_losses(self) -> Tensor:
        return self.parallel.mean(self.losses).float()

    def consolidated(self) -> Trainer:
        """A copy for one process, with the whole model, on the first of the run's processes."""
        whole = copy.copy(self)
        whole.model, whole.losses = self.weights.gather(), self._mean_losses()
        whole.parallel, whole.weights = ONE_PROCESS, Whole(whole.model)
        return whole

    def load(self, path: str | Path) -> None:
        """Continues from a file that `save` wrote, up to the number of steps in the present
        settings.

        Raises:
            CheckpointMismatch: if the file was written with other settings (except `data` and
                `steps`), with another corpus, or after more steps.
        """
        tensors, metadata = read_tensors(path)
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
        folder = metadata.get("sharded") and Path(path).parent / metadata["sharded"]
        self.weights.restore(self.optimizer, tensors, folder)
        if self.segmented is not None:
            states = {
                name: self.parallel.own_rows(x) for name, x in under("segments.", tensors).items()
            }
            self.segmented.load(states, self.device)
        for graph in self.graphs:
            graph.reset()  # its tensors have been replaced
        self.step = metadata["step"]
        self.losses[: self.step] = tensors["losses"].to(self.device)
        self.evaluations = [(step, bits) for step, bits in metadata["evaluations"]]
        if "rng.cpu" in tensors:
            torch.set_rng_state(tensors["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = DTYPES[self.settings.dtype]
        enabled = self.weights.autocasts and dtype != torch.float32
        return torch.autocast(self.device.type, dtype, enabled=enabled)


def checkpoint_settings(metadata: dict[str, Any], path: str | Path) -> Settings:
    """The settings in a checkpoint's metadata.

    Raises:
        CheckpointMismatch: if it is not a checkpoint of this trainer.
    """
    if metadata.get("format") != _FORMAT:
        raise CheckpointMismatch(
            f"expected {path} to be a checkpoint of the format {_FORMAT}, got "
            f"{metadata.get('format')}"
        )
    settings = Settings(**metadata["settings"])
    if isinstance(settings.data, str):  # as of 0.3.0
        settings.data = [settings.data]
    return settings


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return next_token_loss(logits, targets, inplace_backward=True, shifted=True)
