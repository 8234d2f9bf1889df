"""Language models that generate, greedily, each in its own way."""

from typing import Protocol

import torch
from shared.timing import capture
from torch import Tensor, nn


class Contender(Protocol):
    """A model with the buffers of B sequences."""

    def first(self, prompts: Tensor) -> Tensor:
        """The first new token of every sequence, int64 `[B]`."""

    def step(self) -> Tensor:
        """The next one."""


class Ours:
    """`gla_ext.decode.Decoder`, whose step is a CUDA graph."""

    def __init__(self, model: nn.Module, batch_size: int, compiled: bool = False) -> None:
        from gla_ext.decode import Decoder

        self.decoder = Decoder(model, batch_size, temperature=0, compiled=compiled)

    def first(self, prompts: Tensor) -> Tensor:
        return self.decoder.prefill(prompts)

    def step(self) -> Tensor:
        return self.decoder.step()


class Attends:
    """The Transformer, whose step is a CUDA graph made for one number of tokens seen, so that no
    mask is needed and nothing is read beyond them: every step is a step at that position.
    """

    def __init__(
        self, model: nn.Module, batch_size: int, length: int, compiled: bool = False
    ) -> None:
        self.model, self.length = model, length
        self.stepping = torch.compile(model, dynamic=False) if compiled else model
        self.cache = model.new_cache(batch_size, length)
        device = self.cache.device
        self.tokens = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.position = torch.full((1,), length - 1, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def first(self, prompts: Tensor) -> Tensor:
        T = prompts.shape[1]
        position = torch.arange(T, device=prompts.device)
        self.tokens.copy_(self.model(prompts, self.cache, position, T).argmax(-1))
        return self.tokens

    def advance(self) -> None:
        """One step at the last position of the cache."""
        ids = self.tokens.unsqueeze(1)
        logits = self.stepping(ids, self.cache, self.position, self.length)
        self.tokens.copy_(logits.argmax(-1))

    def step(self) -> Tensor:
        if self.graph is None:
            self.graph = capture(self.advance)
        self.graph.replay()
        return self.tokens


class FLA:
    """FLA's GLAForCausalLM on its own cache, step by step as its `generate` does, without what
    transformers does in between.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.cache, self.tokens = model, None, None

    def first(self, prompts: Tensor) -> Tensor:
        return self._run(prompts, None)

    def step(self) -> Tensor:
        return self._run(self.tokens.unsqueeze(1), self.cache)

    def _run(self, ids: Tensor, cache) -> Tensor:
        output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.cache = output.past_key_values
        self.tokens = output.logits[:, -1].argmax(-1)
        return self.tokens
