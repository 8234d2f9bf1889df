"""A causal language model of GLA blocks, with the parameter names of FLA's `GLAForCausalLM`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from gla_ext.decode.generate import generate, generate_stream
from gla_ext.decode.language_model import LanguageModel
from gla_ext.model.blocks import GLAModel
from gla_ext.model.config import GLAConfig
from gla_ext.model.loss import head_and_loss
from gla_ext.model.tensors import fitting, load_tensors, read_model, save_model
from gla_ext.model.weights import init_weights
from gla_ext.ops._door import form_of


class CausalLMOutput(NamedTuple):
    """The result of `GLAForCausalLM`.

    loss: scalar, fp32 (fp64 for an fp64 model), in nats per token; None without labels.
    logits: `[B, T, vocab_size]`; None with labels and config.fuse_linear_cross_entropy.
    past_key_values: the cache, or None.
    """

    loss: Tensor | None
    logits: Tensor | None
    past_key_values: Any | None


class GLAForCausalLM(LanguageModel):
    """The language model: `GLAModel` and a linear map to the logits of the next token.

    Args:
        config: the configuration.
    """

    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        self.config = config
        self.model = GLAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._reset_head()

    def reset_parameters(self) -> None:
        """Like `GLAModel.reset_parameters`; also ties the embeddings again, which `to_empty()`
        unties.
        """
        self.model.reset_parameters()
        self._reset_head()

    def _reset_head(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embeddings.weight
        else:
            init_weights(self.lm_head, self.config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool = False,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        cp_context: Any = None,
    ) -> CausalLMOutput:
        """Logits of the next token at every position, and the loss when labels are given.

        Args:
            input_ids: int64 `[B, T]`.
            attention_mask: `[B, >= T]` of 0 (padding) and 1, see `GatedLinearAttention.forward`.
                Default: None.
            past_key_values: a cache of the tokens before these. Default: None.
            use_cache: store the states after these tokens in past_key_values, or in a new
                `GLACache`. Default: False.
            labels: int64 `[B, T]`, usually input_ids: logits at t are compared with labels at t +
                1, and labels of -100 do not count. With cu_seqlens the first label of each sequence
                does not count either. Default: None.
            logits_to_keep: if labels is None, compute only the logits of the last `logits_to_keep`
                positions, or of the positions in an int64 tensor `[n]`; 0 means all. Default: 0.
            cu_seqlens: int32 or int64 `[N + 1]`, offsets of the sequences packed into a batch of
                one. Default: None.
            cp_context: the result of `gla_ext.distributed.build_cp_context` if input_ids and labels
                are one rank's tokens of a longer sequence; replaces cu_seqlens. On every rank the
                loss is that of the whole sequence. Its gradients are scaled to be averaged over the
                ranks, as DDP and FSDP2 do. Default: None.

        Returns:
            A `CausalLMOutput`. In train mode, backward of the loss writes the gradient over the
            logits, as FLA's does, except in torch.compile and with fuse_cross_entropy False. With
            labels and fuse_linear_cross_entropy there are no logits.

        Raises:
            ValueError: logits_to_keep below 0; a mask with numbers other than 0 and 1 (on CPU).
            TypeError: input_ids, labels or cu_seqlens that are not tensors.
        """
        logits_to_keep = check_logits_to_keep(logits_to_keep)
        x, past_key_values = self.model(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            cp_context=cp_context,
        )
        if labels is None:
            if isinstance(logits_to_keep, Tensor):
                x = x.index_select(1, logits_to_keep)
            else:
                x = x[:, -logits_to_keep:]
            return CausalLMOutput(None, self.lm_head(x), past_key_values)
        args = (self.lm_head, x, labels, self.config, self.training, None, cu_seqlens, cp_context)
        return CausalLMOutput(*head_and_loss(*args), past_key_values)

    generate = generate
    generate_stream = generate_stream

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes model.safetensors and config.json: see `gla_ext.model.checkpoint.save_model`."""
        save_model(self, folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> GLAForCausalLM:
        """Reads a folder that `save_pretrained`, FLA or transformers wrote: see
        `gla_ext.model.checkpoint.load_model`.
        """
        config, tensors = read_model(folder)
        tensors = fitting(cls, config, tensors)
        model = cls(config)
        load_tensors(model, tensors)
        return model.eval()


def _as_it_is(x: int | Tensor) -> int | Tensor:
    return x


def _as_a_number(x: int | Tensor) -> int | Tensor:
    """The older exporter to ONNX makes numbers tensors."""
    return int(x) if isinstance(x, Tensor) and x.ndim == 0 else x


def check_logits_to_keep(logits_to_keep: int | Tensor) -> int | Tensor:
    """A number of positions, or a list of them; raises ValueError for a negative number."""
    logits_to_keep = form_of(_as_it_is, plain=_as_a_number)(logits_to_keep)
    if isinstance(logits_to_keep, int) and logits_to_keep < 0:
        raise ValueError(
            f"GLAForCausalLM: expected logits_to_keep to be at least 0, got {logits_to_keep}"
        )
    return logits_to_keep
