"""Multi-query associative recall, as the Zoology paper defines it, and training on it.

An example starts with pairs of a key and a value. After these, keys stand again, each once, at
places drawn by a power law, and at each the model is to say its value; every other token is 0, as
in the runs of the Zoology paper's Figure 2. (Arora et al., 2023, arXiv:2312.04927, section 4.1 and
appendix E; the generator is ours.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import borrowed
from experiments.models import make_model, settings_of
from experiments.runs import Run
from gla_ext.losses import cross_entropy_loss
from gla_ext.model.config import GLAConfig
from gla_ext.train.trainer import Trainer

VOCAB_SIZE = 8192
POWER = 0.01
TEST_EXAMPLES = 1024
_AT_ONCE = 4096  # examples made in one piece, for 64 MB of noise
SOLVED = 0.99  # accuracy at which a run ends, as Zoology's do
EVALUATIONS = 20
PLAIN_TORCH = ("hyena", "rwkv")  # layers of many small operations, which torch.compile joins


@dataclass(frozen=True)
class Recall:
    """The task at one size.

    seq_len: tokens of an example, even, at least 4 * pairs.
    pairs: keys and values.
    """

    seq_len: int
    pairs: int

    tokens_per_byte = 1.0  # as of a Corpus

    def __post_init__(self) -> None:
        if self.seq_len % 2 or self.seq_len < 4 * self.pairs:
            raise ValueError(
                f"Recall: expected seq_len to be even and at least 4 * pairs = {4 * self.pairs}, "
                f"got {self.seq_len}"
            )

    @property
    def fingerprint(self) -> str:
        """As of a Corpus."""
        return hashlib.sha256(repr((self, VOCAB_SIZE, POWER)).encode()).hexdigest()

    def examples(self, count: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Examples, a function of the seed on one kind of device.

        Returns:
            Tokens, int64 `[count, seq_len]`, and at each, int64 too, the value that is to follow,
            -100 where none is.
        """
        generator = torch.Generator(device).manual_seed(seed)
        half, space = VOCAB_SIZE // 2, (self.seq_len - 2 * self.pairs) // 2
        # Keys from 1 on, values from the upper half, none of them twice.
        keys = 1 + _draw(torch.zeros(half - 1, device=device), count, self.pairs, generator)
        values = half + _draw(torch.zeros(half, device=device), count, self.pairs, generator)
        log_p = (POWER - 1) * torch.arange(1, space + 1, device=device).log()
        queries = 2 * (self.pairs + _draw(log_p, count, self.pairs, generator))
        tokens = torch.zeros(count, self.seq_len, dtype=torch.int64, device=device)
        tokens[:, 0 : 2 * self.pairs : 2] = keys
        tokens[:, 1 : 2 * self.pairs : 2] = values
        tokens.scatter_(1, queries, keys)
        targets = torch.full_like(tokens, -100).scatter_(1, queries, values)
        return tokens, targets


def _draw(log_p: Tensor, count: int, size: int, generator: torch.Generator) -> Tensor:
    """Draws without putting back, int64 `[count, size]`, by Gumbel's noise (Kool et al., 2019)."""
    uniform = torch.rand(count, len(log_p), generator=generator, device=log_p.device)
    return (log_p - (-uniform.clamp_min(1e-20).log()).log()).topk(size, -1).indices


def _seed(*of: Any) -> int:
    """A seed for examples of a name, in 32 bits: a CPU's generator does not read more."""
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:4], "big")


class Passes:
    """Batches from a set of examples, which is passed through in another order each time.

    What a pass has left after its last whole batch is not taken in it.

    Args:
        tokens, targets: `[n, seq_len]` each, n >= batch_size.
        batch_size: examples a batch.
        seed: of the orders.
    """

    def __init__(self, tokens: Tensor, targets: Tensor, batch_size: int, seed: int) -> None:
        self._tokens, self._targets = tokens, targets
        self._batch_size, self._seed = batch_size, seed
        self._pass, self._order = -1, tokens.new_empty(0, dtype=torch.int64)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step: int64 `[batch_size, seq_len]` each."""
        number, place = divmod(step, len(self._tokens) // self._batch_size)
        if number != self._pass:
            device = self._tokens.device
            generator = torch.Generator(device).manual_seed((self._seed << 20) + number)
            order = torch.randperm(len(self._tokens), generator=generator, device=device)
            self._pass, self._order = number, order
        chosen = self._order[place * self._batch_size : (place + 1) * self._batch_size]
        return self._tokens[chosen].long(), self._targets[chosen].long()


class _Embedding(torch.autograd.Function):
    """Rows of an embedding, with a gradient that is fast where most tokens are 0.

    Torch sums the gradients of equal tokens one after the other. Here the 0s of each place in an
    example are a token of their own, and these are summed in the end.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        seq_len = tokens.shape[1]
        places = ctx.rows + torch.arange(seq_len, device=tokens.device)
        apart = torch.where(tokens == 0, places, tokens).int()
        rows = ctx.rows + seq_len
        d = torch.ops.aten.embedding_dense_backward(dy, apart, rows, -1, False)
        d[0] = d[ctx.rows :].sum(0)
        return d[: ctx.rows], None


def _set_up_compiler() -> None:
    """Makes room for the shapes of all runs of a process, and switches off sums of rows and columns
    in one, where torch 2.11 gives gradients of RWKV's parameters a wrong shape
    (https://github.com/pytorch/pytorch/issues/178080).
    """
    import torch._inductor.config as inductor

    torch._dynamo.config.recompile_limit = 64
    inductor.triton.mix_order_reduction = False


class RecallTrainer(Trainer):
    """The project's trainer on recall, with models of two blocks without an MLP.

    Args:
        run: the run.
        device: where.
        cuda_graph: as the trainer's. With it models of PLAIN_TORCH are compiled. Default: False.
    """

    def __init__(self, run: Run, device: torch.device, cuda_graph: bool = False) -> None:
        self.run, self.task = run, Recall(run.seq_len, run.pairs)
        if compiled := cuda_graph and run.layer in PLAIN_TORCH:
            _set_up_compiler()
        super().__init__(settings_of(run, device), self.task, device, compiled, cuda_graph)

    def make_data(self, corpus: Recall) -> tuple[Passes, tuple[Tensor, Tensor]]:
        """Batches to train on, and the examples to test on, which are no more."""
        run, parts = self.run, []
        for first in range(0, run.examples, _AT_ONCE):
            count = min(_AT_ONCE, run.examples - first)
            made = corpus.examples(count, _seed("train", run.seed, first), self.device)
            parts.append([x.to(torch.int16) for x in made])
        train = [torch.cat(x) for x in zip(*parts, strict=True)]
        test = corpus.examples(min(TEST_EXAMPLES, run.examples), _seed("test"), self.device)
        return Passes(*train, run.batch_size, run.seed), test

    def make_model(self) -> nn.Module:
        """Two blocks without an MLP, output matrix and embeddings one, as Zoology's."""
        run = self.run
        model: nn.Module
        if run.layer in borrowed.NAMES:
            model = borrowed.Borrowed(run.layer, run.width, run.layers, VOCAB_SIZE, run.seq_len)
        else:
            sizes = {"hidden_size": run.width, "num_hidden_layers": run.layers}
            sizes |= {"num_heads": run.heads, "vocab_size": VOCAB_SIZE}
            sizes |= {"max_position_embeddings": run.seq_len}
            config = GLAConfig(**sizes, tie_word_embeddings=run.tied)
            model = make_model(run.layer, config, mlp=False)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.forward = lambda tokens, of=module: _Embedding.apply(of.weight, tokens)
        return model

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits, values = self._answers(inputs, targets)
        return cross_entropy_loss(logits, values, inplace_backward=True)[0].mean()

    def _answers(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits at the queries alone, `[count * pairs, vocab_size]`, and their values."""
        # As many in each example, so that nothing is read back from a GPU. They are chosen by a
        # product with ones and zeros: backward of a gather in a fixed order sorts.
        number = (targets >= 0).cumsum(-1) * (targets >= 0)
        every = torch.arange(1, self.task.pairs + 1, device=targets.device)
        chosen = number.unsqueeze(1) == every.unsqueeze(1)  # [count, pairs, seq_len]
        with self._autocast():
            hidden = self.model.model(inputs).last_hidden_state
            logits = self.model.lm_head(chosen.to(hidden.dtype) @ hidden)
        return logits.flatten(0, 1), (chosen * targets.unsqueeze(1)).sum(-1).flatten()

    def evaluate(self, should_stop: Callable[[], bool] = lambda: False) -> float:
        """The share of queries answered right, of examples never trained on."""
        self.model.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        for inputs, targets in zip(*(x.split(128) for x in self.held_out), strict=True):
            with torch.no_grad():
                logits, values = self._answers(inputs, targets)
            right += (logits.argmax(-1) == values).sum()
        accuracy = int(right) / (len(self.held_out[0]) * self.task.pairs)
        self.evaluations.append((self.step, accuracy))
        return accuracy
