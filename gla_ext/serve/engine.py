"""Continuous batching: sequences take rows, prompts pass in pieces beside those that decode."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

from gla_ext.decode._loop import device_of
from gla_ext.decode._stamp import Stamp
from gla_ext.decode.decoder import uses_graph
from gla_ext.decode.language_model import LanguageModel
from gla_ext.decode.sampling import read_end_tokens
from gla_ext.layers.attention import Attention
from gla_ext.ops.chunk import batch_invariant, is_batch_invariant
from gla_ext.serve.batch import Batch, Draw, Drawn
from gla_ext.serve.metrics import Metrics
from gla_ext.serve.prefix import PrefixCache
from gla_ext.serve.request import Delta, Limits, Request, TokenLogprob
from gla_ext.serve.schedule import Schedule, step_of_pieces
from gla_ext.serve.sequence import Sequence, Status
from gla_ext.serve.text import Tokenizer

logger = logging.getLogger("gla_ext.serve")

STATE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


class FullError(RuntimeError):
    """As many sequences wait as may."""


class ClosedError(RuntimeError):
    """The engine takes no more."""


Deltas = list[tuple[Sequence, Delta]]


def _check_mode(model: LanguageModel) -> None:
    if model.training:
        raise ValueError("Engine: expected a model in eval mode, got one in train mode")


class Engine:
    """Continues many prompts of one model at once.

        engine = Engine(model, tokenizer)
        sequence = engine.submit(Request(tokenizer.encode("def "), max_new_tokens=100))
        while engine.busy:
            for sequence, delta in engine.step():
                print(delta.text)

    On a GPU, `warm_up` before the first request, in a program that lives for longer.

    Any thread may call `submit`, `cancel`, `drain`, `warm_up` and `refresh`. One thread alone
    steps: the one that calls `step`, or that of `gla_ext.serve.worker.Worker`.

    Call `refresh` after the model changed: the prefix cache and running sequences have states of
    the old model, and CUDA graphs repeat what was recorded. Until then `submit` raises ChangedError
    if it sees a change, which it does not of `AdamW(fused=True)` and others: see there. No step may
    be under way while the model changes.

    In an engine made inside `batch_invariant()` a sequence gets the same bits in the same row,
    whatever else runs: prompts pass one at a time, in segments of `checkpoint_tokens`, and steps
    are always of all rows. In another row a BLAS may round otherwise. Such an engine is slower with
    many short prompts.

    Args:
        model: a `GLAForCausalLM` in eval mode.
        tokenizer: makes text of tokens. Default: None (no text, and no stop strings).
        limits: what it takes on. Default: `Limits()`.
        cuda_graph: whether steps are CUDA graphs. Default: None (on a CUDA device).
        state_dtype: what recurrent states are stored in: torch.float32, or torch.bfloat16 or
            torch.float16 for half of the memory of rows and checkpoints; see "States in 16 bits" on
            the page on numerics. Default: None (torch.float32).

    Attributes:
        metrics: what it has done.
        prefixes: the prefix cache.

    Raises:
        NotImplementedError: for a model with attention layers.
        ValueError: for a model in train mode, another state_dtype, or cuda_graph on another device.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        limits: Limits | None = None,
        cuda_graph: bool | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if state_dtype not in STATE_DTYPES:
            raise ValueError(
                "Engine: expected state_dtype to be torch.float32, torch.bfloat16, torch.float16 "
                f"or None, got {state_dtype}"
            )
        if any(isinstance(module, Attention) for module in model.modules()):
            raise NotImplementedError(
                "Engine: a model with attention layers is not implemented, whose keys and values "
                "grow; Decoder runs it"
            )
        _check_mode(model)
        self.model, self.tokenizer = model, tokenizer
        self.limits = Limits() if limits is None else limits
        self._invariant = is_batch_invariant()
        every, most = self.limits.checkpoint_tokens, self.limits.prefill_tokens
        self._batch = Batch(
            model,
            self.limits.rows,
            uses_graph(model, cuda_graph, "Engine"),
            self._invariant,
            state_dtype,
            self.limits.cache_bytes,
            step_of_pieces(every, most),
        )
        self._cache = self._batch.cache
        self.prefixes = PrefixCache(self._batch.checkpoints, self._batch.row_nbytes, every)
        self.metrics = Metrics()
        self._ends = self._read_ends()
        self._stamp = Stamp(model)  # of what states and graphs are of
        self._lock = threading.Lock()
        # One thread runs the model, and one is next. With the first lock alone, the thread that
        # steps might take it again before a thread that waits for it.
        self._runs, self._is_next = threading.Lock(), threading.Lock()
        self._waiting: deque[Sequence] = deque()
        self._unfinished = 0  # accepted and not finished
        self._draining = False
        self._free = list(range(self.limits.rows))
        self._schedule = Schedule(self._batch, self.prefixes, self.metrics, most, self._invariant)
        self._running = self._schedule.running
        # On a GPU the next step is under way while the host looks at the last one's tokens.
        self._device = device_of(model)
        self._ahead = 1 if self._device.type == "cuda" else 0
        self._queued = torch.cuda.Event() if self._ahead else None  # all of the last turn
        self._under_way: deque[tuple[list[Sequence], Callable[[], Drawn]]] = deque()

    def _read_ends(self) -> frozenset[int]:
        config = self.model.config
        return frozenset(read_end_tokens(getattr(config, "eos_token_id", None), config.vocab_size))

    @property
    def busy(self) -> bool:
        """Whether a sequence is not finished."""
        with self._lock:
            return self._unfinished > 0

    @property
    def waiting(self) -> int:
        """Sequences without a row."""
        with self._lock:
            return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with a row."""
        return self.limits.rows - len(self._free)

    def submit(self, *requests: Request) -> list[Sequence]:
        """Takes on sequences, all or none.

        Raises:
            FullError: where there is no room to wait.
            ClosedError: after `drain`.
            ChangedError: if it sees that the model has changed, until `refresh`.
            ValueError: for requests over the limits, tokens that the model does not have, stop
                strings without a tokenizer.
        """
        self._stamp.check("Engine")
        for request in requests:
            self._check(request)
        sequences = [Sequence(request, self.tokenizer) for request in requests]
        with self._lock:
            if self._draining:
                raise ClosedError("the server is shutting down")
            room = self.limits.rows + self.limits.waiting - self._unfinished
            if len(sequences) > room:
                raise FullError(
                    f"expected at most {room} more sequences, of {self.limits.rows} that run and "
                    f"{self.limits.waiting} that wait, got {len(sequences)}"
                )
            self._unfinished += len(sequences)
            self._waiting.extend(sequences)
        return sequences

    def _check(self, request: Request) -> None:
        most = self.limits.prompt_tokens
        if len(request.tokens) > most:
            raise ValueError(
                f"expected a prompt of at most {most} tokens, got {len(request.tokens)}"
            )
        if request.max_new_tokens > self.limits.new_tokens:
            raise ValueError(
                f"expected at most {self.limits.new_tokens} new tokens, got "
                f"{request.max_new_tokens}"
            )
        vocab_size = self.model.config.vocab_size
        tokens = torch.frombuffer(request.tokens, dtype=torch.long)  # of 100,000 in no time
        lowest, highest = (x.item() for x in torch.aminmax(tokens))
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"expected tokens from 0 to {vocab_size - 1}, got {wrong}")
        if request.stop and self.tokenizer is None:
            raise ValueError("expected a tokenizer for stop strings, got none")

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence at the next step, and frees its row."""
        sequence.ending = "cancelled"

    def drain(self) -> None:
        """Refuses new sequences; those that were accepted go on."""
        with self._lock:
            self._draining = True

    def cancel_all(self) -> Deltas:
        """Ends every sequence as an error does, after which no step must be taken."""
        with self._lock:
            self._draining = True
            sequences, self._unfinished = [*self._waiting], 0
            self._waiting.clear()
        sequences += self._running
        sequences = [sequence for sequence in sequences if not sequence.finished]
        for sequence in sequences:
            sequence.status = Status.FINISHED
        return [(sequence, Delta(finish_reason="error")) for sequence in sequences]

    def warm_up(self) -> None:
        """Captures the CUDA graphs of steps and of pieces of prompts, which takes a second or more.

        Without it each is captured when its size has come for the second time, and everyone waits
        for that. Nothing happens where there are no graphs. It waits for a step under way.
        """
        with self._as_made():
            self._batch.warm_up()

    def refresh(self, keep_running: bool = False) -> None:
        """Says that the model changed, for example by an optimizer's step.

        It waits for a step under way and empties the prefix cache. Sequences that wait go on
        waiting. Those that have begun end at the next step, which gives out their deltas with
        finish_reason 'refresh'. CUDA graphs stay, as in `Decoder.refresh`, if only values changed,
        and all of this takes some milliseconds, or tens of them with adapters on every map. Else
        they are captured anew, when their sizes come again or by `warm_up`.

        On a GPU the next step waits for what the caller's stream has been given until now.

        Args:
            keep_running: sequences that have begun go on, from states of the old model. They leave
                nothing in the prefix cache. Default: False.

        Raises:
            ValueError: for a model in train mode. For one on another device, of another dtype or
                vocabulary, with more or fewer layers, or whose prompts must now be cut otherwise:
                make another engine. New sequences find nothing of the old model then either.
        """
        with self._as_made():
            self.prefixes.clear()
            for sequence in self._running:
                if sequence.passed > 0:
                    sequence.keys = []
                    if not keep_running and sequence.ending is None:
                        sequence.ending = "refresh"
            self._batch.refresh()
            _check_mode(self.model)
            self._ends = self._read_ends()
            self._stamp = self._stamp.renewed(self.model)

    @contextlib.contextmanager
    def _as_made(self) -> Iterator[None]:
        """The mode and the device in which the model runs, for one thread at a time, in turn. The
        streams of these threads wait for each other.
        """
        on_device = torch.cuda.device(self._device) if self._ahead else contextlib.nullcontext()
        with self._is_next:
            self._runs.acquire()
        try:
            with torch.no_grad(), batch_invariant(self._invariant), on_device:
                if self._queued is not None:
                    self._queued.wait()
                yield
                if self._queued is not None:
                    self._queued.record()
        finally:
            self._runs.release()

    def step(self) -> Deltas:
        """One step of what decodes and a few pieces of prompts.

        Returns:
            What it added to sequences, each once.
        """
        with self._as_made():
            deltas = self._sweep()
            self._admit()
            draws_for = self._schedule.decode() + self._schedule.read()
            if draws_for:
                self._queue_draw(draws_for)
            if self._under_way and (len(self._under_way) > self._ahead or not draws_for):
                deltas += self._collect(*self._under_way.popleft())
        return deltas

    def _sweep(self) -> Deltas:
        """Ends what was cancelled, and what has states of an old model."""
        deltas: Deltas = []
        with self._lock:
            ending = [sequence for sequence in self._waiting if sequence.ending]
            for sequence in ending:
                self._waiting.remove(sequence)
        ending += [sequence for sequence in self._running if sequence.ending]
        for sequence in ending:
            delta = Delta(sequence.rest() if sequence.ending == "refresh" else "")
            deltas.append((sequence, self._finish(sequence, delta, sequence.ending)))
        return deltas

    def _admit(self) -> None:
        """Gives free rows to those that wait, the first come first."""
        while self._free:
            with self._lock:
                if not self._waiting:
                    return
                sequence = self._waiting.popleft()
            sequence.status = Status.READING
            sequence.row = min(self._free)  # low rows keep steps small
            self._free.remove(sequence.row)
            sequence.keys = self.prefixes.keys(sequence.request.tokens)
            self._running.append(sequence)

    def _queue_draw(self, sequences: list[Sequence]) -> None:
        draws = {}
        for sequence in sequences:
            request = sequence.request
            temperature = sequence.temperature
            uniform = sequence.next_uniform() if temperature > 0 else 0.0
            draws[sequence.row] = Draw(uniform, temperature, request.top_k, request.top_p)
            sequence.drew += 1
        wanted = any(sequence.request.logprobs is not None for sequence in sequences)
        self._under_way.append((sequences, self._batch.draw(draws, wanted)))

    def _collect(self, sequences: list[Sequence], wait: Callable[[], Drawn]) -> Deltas:
        """Waits for tokens that were drawn, and hands them to their sequences."""
        drawn, deltas = wait(), []
        for sequence in sequences:
            if sequence.finished:  # before this token was drawn, but not before it was asked for
                continue
            row, wanted = sequence.row, sequence.request.logprobs
            if not math.isfinite(drawn.largest[row]):
                deltas.append((sequence, self._fail(sequence)))
                continue
            logprob = None
            if wanted is not None:
                best = zip(drawn.best_ids[row][:wanted], drawn.best[row][:wanted], strict=True)
                logprob = TokenLogprob(drawn.tokens[row], drawn.logprobs[row], dict(best))
            delta = sequence.add(drawn.tokens[row], logprob, self._ends)
            self.metrics.drew(sequence)
            if delta.finish_reason is not None:
                self._finish(sequence, delta, delta.finish_reason)
            deltas.append((sequence, delta))
        return deltas

    def _fail(self, sequence: Sequence) -> Delta:
        """Ends a sequence that has a logit of NaN or inf, or whose logits are all -inf."""
        message = "the model's logits are not finite"
        prompt = len(sequence.request.tokens)
        logger.error("%s after a prompt of %d tokens and %d new", message, prompt, sequence.new)
        self.metrics.met_nonfinite_logits()
        return self._finish(sequence, Delta(error=message), "error")

    def _finish(self, sequence: Sequence, delta: Delta, reason: str) -> Delta:
        """Frees what a sequence has."""
        sequence.status, delta.finish_reason = Status.FINISHED, reason
        if sequence.row is not None:
            self._running.remove(sequence)
            self._cache.drop(sequence.row)
            self._free.append(sequence.row)
        with self._lock:
            self._unfinished -= 1
        self.metrics.finished(sequence, reason)
        return delta
