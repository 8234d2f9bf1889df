"""The language models that are measured, and how each generates, greedily."""

import torch
from parts.training_rows import SIZES
from shared.timing import capture
from shared.transformer import Transformer
from torch import Tensor, nn

from gla_ext.decode import Decoder
from gla_ext.model import GLAConfig, GLAForCausalLM

MODEL = SIZES["374 M"]
# Models are checked with two of their layers, in bf16 against fp32: 0.015 is usual. Each layer adds
# as much, so that 24 random ones in bf16 are 0.2 from fp32 and from one another.
CHECKED_LAYERS = 2
TOLERANCE = 0.04


def build(
    sizes: dict, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, kind: str = "gla_ext"
) -> nn.Module:
    """A model with random weights.

    Args:
        kind: gla_ext; FLA, with the same weights; Transformer++; or Mamba: transformers' model,
            with two blocks for each of ours: they have no MLP.
    """
    torch.manual_seed(0)
    with torch.device(device):
        if kind == "Transformer++":
            return Transformer(GLAConfig(**sizes)).to(dtype)
        if kind == "Mamba":
            return _mamba(sizes).to(dtype)
        model = GLAForCausalLM(GLAConfig(**sizes)).to(dtype)
        if kind == "gla_ext":
            return model
        from fla.models import gla  # ImportError without the transformers that it needs

        theirs = gla.GLAForCausalLM(gla.GLAConfig(**sizes)).to(dtype)
    theirs.load_state_dict(model.state_dict())
    return theirs


def _mamba(sizes: dict) -> nn.Module:
    import causal_conv1d  # noqa: F401, without these two transformers loops over tokens
    import mamba_ssm  # noqa: F401
    from transformers import MambaConfig, MambaForCausalLM

    own = {name: sizes[name] for name in ("hidden_size", "vocab_size")}
    own |= {"num_hidden_layers": 2 * sizes["num_hidden_layers"], "tie_word_embeddings": False}
    own |= {"initializer_range": 0.02}  # its own, 0.1, makes logits of std 4.5 at width 2048
    return MambaForCausalLM(MambaConfig(**own, use_cache=False))


def of_few_layers(sizes: dict) -> dict:
    return sizes | {"num_hidden_layers": min(CHECKED_LAYERS, sizes["num_hidden_layers"])}


class Ours:
    """`gla_ext.decode.Decoder`, whose step is a CUDA graph."""

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self.decoder = Decoder(model, batch_size, temperature=0)
        self.step = self.decoder.step
        self.first = self.decoder.prefill


class Attends:
    """The Transformer, whose step is a CUDA graph made for one number of tokens seen, so that no
    mask is needed and nothing is read beyond them: every step is a step at that position.
    """

    def __init__(self, model: nn.Module, batch_size: int, length: int) -> None:
        self.model, self.length = model, length
        self.cache = model.new_cache(batch_size, length)
        device = self.cache.device
        self.tokens = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.position = torch.full((1,), length - 1, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def first(self, prompts: Tensor) -> Tensor:
        """The first new token of every sequence, int64 `[B]`."""
        T = prompts.shape[1]
        position = torch.arange(T, device=prompts.device)
        self.tokens.copy_(self.model(prompts, self.cache, position, T).argmax(-1))
        return self.tokens

    def advance(self) -> None:
        """One step at the last position of the cache."""
        ids = self.tokens.unsqueeze(1)
        self.tokens.copy_(self.model(ids, self.cache, self.position, self.length).argmax(-1))

    def step(self) -> Tensor:
        """The next token of every sequence."""
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
        self.cache = None
        return self._run(prompts)

    def step(self) -> Tensor:
        return self._run(self.tokens.unsqueeze(1))

    def _run(self, ids: Tensor) -> Tensor:
        output = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.cache = output.past_key_values
        self.tokens = output.logits[:, -1].argmax(-1)
        return self.tokens


Contender = Ours | Attends | FLA
