"""Continuous batching: sequences get rows, and prompts are read in pieces while others decode."""

from __future__ import annotations

import contextlib
import logging
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
from gla_ext.serve.batch import Batch, Drawn
from gla_ext.serve.metrics import Metrics
from gla_ext.serve.prefix import PrefixCache
from gla_ext.serve.request import Delta, Limits, Request
from gla_ext.serve.schedule import Schedule, step_of_pieces
from gla_ext.serve.sequence import Sequence, Status
from gla_ext.serve.text import Tokenizer

logger = logging.getLogger("gla_ext.serve")

STATE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


class FullError(RuntimeError):
    """The queue of waiting sequences is full."""


class ClosedError(RuntimeError):
    """The engine accepts no more sequences."""


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

    On a GPU, a long-running program should call `warm_up` before the first request.

    Any thread may call `submit`, `check_room`, `cancel`, `drain`, `warm_up` and `refresh`. Only one
    may run steps: the one that calls `step`, or the thread of `gla_ext.serve.worker.Worker`.

    Call `refresh` after the model changed: the prefix cache and running sequences have states of
    the old model, and CUDA graphs repeat what was recorded. Until then `submit` raises ChangedError
    if it notices a change. It does not notice all changes, such as those of `AdamW(fused=True)`:
    see there. Do not change the model while a step runs.

    In an engine made inside `batch_invariant()` a sequence gets the same bits in the same row,
    whatever else runs: prompts are read one at a time, in pieces of `checkpoint_tokens`, and steps
    always have all rows. In another row a BLAS may round differently. Such an engine is slower with
    many short prompts.

    On CUDA, steps of more than 32 rows keep tokens beside the states, as in `Decoder`.

    Args:
        model: a `GLAForCausalLM` in eval mode.
        tokenizer: converts between tokens and text. Default: None (no text, and no stop strings).
        limits: limits of sequences, tokens and memory. Default: `Limits()`.
        cuda_graph: whether steps are CUDA graphs. Default: None (on a CUDA device).
        state_dtype: dtype in which recurrent states are stored: torch.float32, or torch.bfloat16 or
            torch.float16, which halve the memory of rows and checkpoints; see "States in 16 bits"
            on the page on numerics. Default: None (torch.float32).

    Attributes:
        metrics: counters of its work.
        prefixes: the prefix cache.

    Raises:
        NotImplementedError: for a model with attention layers.
        TypeError: for a model of transformers, or something that is no tokenizer.
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
        if tokenizer is not None and not hasattr(tokenizer, "encode"):
            raise TypeError(f"Engine: expected a tokenizer, got {tokenizer!r}")
        if hasattr(model, "prepare_inputs_for_generation"):
            raise TypeError(
                "Engine: expected a gla_ext.model.GLAForCausalLM, whose from_pretrained reads what "
                f"that of transformers saves, got {type(model).__module__}.{type(model).__name__}"
            )
        if any(isinstance(module, Attention) for module in model.modules()):
            raise NotImplementedError(
                "Engine: a model with attention layers is not implemented, whose keys and values "
                "grow; 'vllm serve FOLDER' serves it, and Decoder runs it"
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
        self._stamp = Stamp(model)  # of the model that made states and graphs
        self._lock = threading.RLock()
        # One thread runs the model, and one is next, or a waiting one might never get its turn.
        self._runs, self._is_next = threading.Lock(), threading.Lock()
        self._waiting: deque[Sequence] = deque()
        self._unfinished = 0  # accepted and not finished
        self._draining = False
        self._free = list(range(self.limits.rows))
        self._schedule = Schedule(self._batch, self.prefixes, self.metrics, most, self._invariant)
        self._running = self._schedule.running
        # On a GPU the next step already runs while the host processes the last one's tokens.
        self._device = device_of(model)
        self._ahead = 1 if self._device.type == "cuda" else 0
        self._under_way: deque[tuple[list[Sequence], Callable[[], Drawn]]] = deque()
        here = torch.cuda.current_stream(self._device) if self._ahead else None
        self._queued = here and here.record_event()  # all work of the last turn

    def _read_ends(self) -> frozenset[int]:
        config = self.model.config
        return frozenset(read_end_tokens(getattr(config, "eos_token_id", None), config.vocab_size))

    @property
    def busy(self) -> bool:
        """Whether there are unfinished sequences."""
        with self._lock:
            return self._unfinished > 0

    @property
    def waiting(self) -> int:
        """Number of sequences without a row."""
        with self._lock:
            return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of sequences with a row."""
        return self.limits.rows - len(self._free)

    def submit(self, *requests: Request) -> list[Sequence]:
        """Accepts a sequence for every request, or raises an error and accepts none.

        Raises:
            FullError: if the queue has not enough room.
            ClosedError: after `drain`.
            ChangedError: if it notices that the model has changed, until `refresh`.
            ValueError: for requests over the limits, also more of them than may run and wait;
                tokens outside of the vocabulary; stop strings without a tokenizer.
            TypeError: for what is no request.
        """
        self._stamp.check("Engine")
        for request in requests:
            if not isinstance(request, Request):
                raise TypeError(f"Engine: expected requests, got {request!r}")
            self.limits.check(request, self.model.config.vocab_size)
            if request.stop and self.tokenizer is None:
                raise ValueError("expected a tokenizer for stop strings, got none")
        self.check_room(len(requests))  # before sequences take memory, and again as they join
        sequences = [Sequence(request, self.tokenizer) for request in requests]
        with self._lock:
            self.check_room(len(sequences))
            self._unfinished += len(sequences)
            self._waiting.extend(sequences)
        return sequences

    def check_room(self, count: int) -> None:
        """Raises what `submit` of so many requests would raise now: FullError, ClosedError, or
        ValueError if so many can never run and wait.
        """
        if count > (most := self.limits.rows + self.limits.waiting):
            raise ValueError(f"expected at most {most} sequences at once, got {count}")
        with self._lock:
            if self._draining:
                raise ClosedError("the server is shutting down")
            room = self.limits.rows + self.limits.waiting - self._unfinished
            if count > room:
                raise FullError(
                    f"expected at most {room} more sequences, of {self.limits.rows} that run and "
                    f"{self.limits.waiting} that wait, got {count}"
                )

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence at the next step, and frees its row."""
        sequence.ending = "cancelled"

    def drain(self) -> None:
        """Rejects new sequences from now on; accepted sequences continue."""
        with self._lock:
            self._draining = True

    def cancel_all(self) -> Deltas:
        """Ends every sequence with finish_reason 'error'. No step must be run afterwards."""
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

        Without it, each graph is captured when its size is needed for the second time, and all
        sequences wait for that. Does nothing if there are no graphs. Waits for a running step.
        """
        with self._as_made():
            self._batch.warm_up()

    def refresh(self, keep_running: bool = False) -> None:
        """Tells the engine that the model has changed, for example by an optimizer's update.

        This waits for a running step and empties the prefix cache. Sequences without a row keep
        waiting. Sequences that have begun end at the next step, which returns their deltas with
        finish_reason 'refresh'. As in `Decoder.refresh`, CUDA graphs are kept if only values
        changed; the call then takes some milliseconds, or tens of them with adapters on every map.
        Otherwise each graph is captured again when its size is needed, or by `warm_up`.

        On a GPU the next step waits for the work that is now queued on the caller's stream.

        Args:
            keep_running: sequences that have begun continue, from states of the old model. They
                store nothing in the prefix cache. Default: False.

        Raises:
            ValueError: for a model in train mode. Also for a model on another device, of another
                dtype or vocabulary, with another number of layers, or whose prompts can no longer
                leave checkpoints in their middle: make another engine for it. Even then no states
                of the old model are used for new sequences.
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
        """The mode and device in which the model runs. Only one thread at a time may be inside, in
        turn, and the threads' streams wait for each other.
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
        """Runs one token step of the decoding sequences, and reads a few pieces of prompts.

        Returns:
            The deltas of sequences, at most one for each.
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
        """Ends cancelled sequences, and after `refresh` those with states of the old model."""
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
        """Gives free rows to waiting sequences, in the order of their arrival."""
        while self._free:
            with self._lock:
                if not self._waiting:
                    return
                sequence = self._waiting.popleft()
            sequence.status = Status.READING
            sequence.row = min(self._free)  # low rows keep steps small
            self._free.remove(sequence.row)
            if not sequence.is_scored:  # else all of the prompt is read
                sequence.keys = self.prefixes.keys(sequence.request.tokens)
            self._running.append(sequence)

    def _queue_draw(self, sequences: list[Sequence]) -> None:
        draws, uniforms = {}, {}
        for sequence in sequences:
            if sequence.drew_all:  # the prompt alone was wanted
                continue
            if sequence.drew == 0:
                self._batch.begin(sequence.row, sequence.request)
            if sequence.draw.temperature > 0:
                uniforms[sequence.row] = sequence.next_uniform()
            draws[sequence.row] = sequence.draw
            sequence.drew += 1
        wanted = any(sequence.request.logprobs is not None for sequence in sequences)
        self._under_way.append((sequences, self._batch.draw(draws, uniforms, wanted)))

    def _collect(self, sequences: list[Sequence], wait: Callable[[], Drawn]) -> Deltas:
        """Waits for tokens that were drawn, and adds them to their sequences."""
        drawn, deltas = wait(), []
        for sequence in sequences:
            if sequence.finished:  # it finished after this token was requested
                continue
            row, request = sequence.row, sequence.request
            scores, draws = sequence.take_scores(), request.max_new_tokens > 0
            if scores is None or (draws and not drawn.is_finite(row)):
                self.metrics.met_nonfinite_logits()
                deltas.append((sequence, self._fail(sequence, "the model's logits are not finite")))
                continue
            delta = Delta(finish_reason="length")
            if draws:
                wanted = request.logprobs
                logprob = None if wanted is None else drawn.logprob(row, wanted)
                try:
                    delta = sequence.add(drawn.tokens[row], logprob, self._ends)
                except Exception as error:  # a tokenizer may know fewer tokens than the model
                    said = f"the tokenizer failed with {error!r}"
                    deltas.append((sequence, self._fail(sequence, said)))
                    continue
                self.metrics.drew(sequence)
            delta.prompt_logprobs = scores
            if delta.finish_reason is not None:
                self._finish(sequence, delta, delta.finish_reason)
            deltas.append((sequence, delta))
        return deltas

    def _fail(self, sequence: Sequence, message: str) -> Delta:
        """Ends a sequence alone, with an error."""
        prompt = len(sequence.request.tokens)
        logger.error("%s after a prompt of %d tokens and %d new", message, prompt, sequence.new)
        return self._finish(sequence, Delta(error=message), "error")

    def _finish(self, sequence: Sequence, delta: Delta, reason: str) -> Delta:
        """Frees a sequence's row and counts the sequence as finished."""
        sequence.status, delta.finish_reason = Status.FINISHED, reason
        if sequence.row is not None:
            self._running.remove(sequence)
            self._cache.drop(sequence.row)
            self._free.append(sequence.row)
        with self._lock:
            self._unfinished -= 1
        self.metrics.finished(sequence, reason)
        return delta
