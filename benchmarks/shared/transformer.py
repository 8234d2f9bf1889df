"""A Transformer of the size of gla_ext's language model, to generate beside it.

Norms, MLP and sizes are those of `gla_ext.model`; attention has as many parameters as a GLA layer
(but for its gate's 2 %), rotary positions, and a cache of keys and values that is written in place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from gla_ext.layers.norms import RMSNorm
from gla_ext.losses import cross_entropy_loss
from gla_ext.model import GLAMLP, init_weights
from gla_ext.model.config import GLAConfig

HEAD_DIM = 64
ROTARY_BASE = 10000.0


def rotations(position: Tensor) -> Tensor:
    """Cosines and sines of rotary positions (Su et al., 2021, arXiv:2104.09864), fp32 [2, T, D];
    position [T].
    """
    half = torch.arange(HEAD_DIM // 2, device=position.device, dtype=torch.float32)
    angle = (position[:, None] * ROTARY_BASE ** (-2 / HEAD_DIM * half)).repeat(1, 2)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """x [B, H, T, D], in two halves, turned by `rotations`."""
    a, b = x.chunk(2, -1)
    cos, sin = rotary
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention of whole sequences, or with a cache: then tokens at `position` see its
    first `length` entries.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_DIM
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(
        self,
        x: Tensor,
        rotary: Tensor,
        cache: Tensor | None = None,
        position: Tensor | None = None,
        length: int = 0,
    ) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, HEAD_DIM)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            keys, values = cache  # [B, H, capacity, D] each
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            k, v = keys[:, :, :length], values[:, :, :length]
        # A prompt begins at 0, so the causal mask is a square one; one token sees all there is.
        o = scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Attention(config.hidden_size)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GLAMLP(config.hidden_size, config.mlp_size)

    def forward(self, x: Tensor, *attention: Tensor | int) -> Tensor:
        x = x + self.attn(self.attn_norm(x), *attention)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The language model.

    Args:
        config: sizes; what is GLA's alone is not looked at. hidden_size is a multiple of 64.
    """

    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        init_weights(self, config.initializer_range)

    def new_cache(self, batch_size: int, capacity: int) -> Tensor:
        """Keys and values of every layer, `[layers, 2, B, H, capacity, 64]`."""
        weight = self.lm_head.weight
        heads = weight.shape[1] // HEAD_DIM
        size = (len(self.layers), 2, batch_size, heads, capacity, HEAD_DIM)
        return weight.new_zeros(size)

    def forward(self, ids: Tensor, cache: Tensor, position: Tensor, length: int) -> Tensor:
        """Logits of the last token, `[B, vocab_size]`.

        Args:
            ids: int64 `[B, T]`: a prompt, or T = 1.
            cache: of `new_cache`; entries at `position` are written.
            position: int64 `[T]`, where the tokens stand.
            length: number of entries of the cache that are seen: the last position + 1.
        """
        x, rotary = self.embeddings(ids), rotations(position)
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, rotary, own, position, length)
        return self.lm_head(self.norm(x[:, -1]))

    def training_loss(
        self, ids: Tensor, fused: bool = False, checkpointing: bool = False
    ) -> Tensor:
        """Mean cross entropy of each next token, nats: by torch, or by gla_ext's operator; with
        checkpointing backward computes every block again.
        """
        x, rotary = self.embeddings(ids), rotations(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            if checkpointing:
                x = checkpoint(layer, x, rotary, use_reentrant=False)
            else:
                x = layer(x, rotary)
        logits, targets = self.lm_head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        if fused:
            return cross_entropy_loss(logits, targets, inplace_backward=True)[0].mean()
        return F.cross_entropy(logits.float(), targets)
