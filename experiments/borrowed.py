"""Mamba and RWKV-4 as transformers has them.

Mamba runs by the kernels of the packages mamba-ssm and causal-conv1d where both are installed, and
else by a loop over tokens, which is slow. RWKV's recurrence is `wkv` here, in plain torch: chunks
of tokens by products of matrices, as the loop of transformers would be slow on a GPU.
"""

from __future__ import annotations

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla_ext.model.causal_lm import CausalLMOutput

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read as transformers loads: no kernels of the Hub
NAMES = ("mamba", "rwkv")
_CHUNK = 64  # tokens
# Weights are exp(HIGHEST) at most and exp(LOWEST) at least. A key that is over 120 below the
# largest up to the end of its chunk, also a later one, counts as 120 below.
_HIGHEST, _LOWEST = 40.0, -80.0


class Borrowed(nn.Module):
    """A model of transformers with what the trainers call of a `GLAForCausalLM`.

    Args:
        name: 'mamba' (blocks without an MLP) or 'rwkv' (version 4; its blocks have channel mixing).
        width: hidden size.
        layers: number of blocks.
        vocab_size: number of tokens.
        seq_len: longest sequence.
        tied: whether the output matrix is the embeddings. Default: True.
    """

    def __init__(
        self,
        name: str,
        width: int,
        layers: int,
        vocab_size: int,
        seq_len: int,
        tied: bool = True,
    ) -> None:
        super().__init__()
        options = {"vocab_size": vocab_size, "hidden_size": width, "num_hidden_layers": layers}
        if name == "mamba":
            from transformers import MambaConfig, MambaModel

            options["initializer_range"] = 0.02  # as our models have; Mamba's default is 0.1
            self.model = MambaModel(MambaConfig(**options, use_cache=False))
        else:
            from transformers import RwkvConfig, RwkvModel
            from transformers.models.rwkv import modeling_rwkv

            modeling_rwkv.rwkv_linear_attention = wkv
            self.model = RwkvModel(RwkvConfig(**options, context_length=seq_len, use_cache=False))
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.model.get_input_embeddings().weight
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        """Logits `[B, T, vocab_size]`."""
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return CausalLMOutput(loss=None, logits=logits, past_key_values=None)


def language_model(name: str, width: int, layers: int, vocab_size: int, seq_len: int) -> Borrowed:
    """A model with about as many parameters as `layers` of our blocks and of RWKV's, which have 13
    width^2 at width 512; a block of Mamba has half of that.
    """
    layers = 2 * layers if name == "mamba" else layers
    return Borrowed(name, width, layers, vocab_size, seq_len, tied=False)


def wkv(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: None = None,
    return_state: bool = False,
) -> tuple[Tensor, None]:
    """RWKV-4's recurrence, with the arguments of transformers' `rwkv_linear_attention`:

        a_t = sum_{i<t} exp(k_i - (t - 1 - i) w) v_i,  b_t the same without v,  w = exp(time_decay)
        o_t = (a_t + exp(time_first + k_t) v_t) / (b_t + exp(time_first + k_t))

    Memory grows with the square of the number of chunks.

    Args:
        time_decay, time_first: `[D]`.
        key, value: `[B, T, D]`.
        state, return_state: must be None and False.
    """
    if state is not None or return_state:
        raise NotImplementedError("wkv: expected no state to start from or to return")
    with torch.autocast(key.device.type, enabled=False):
        wide = torch.promote_types(key.dtype, torch.float32)
        w, first = time_decay.to(wide).exp(), time_first.to(wide).exp()
        T = key.shape[1]
        n = min(_CHUNK, T)
        k = _chunks(key.to(wide), n, -math.inf)  # padding is never the highest
        v = _chunks(value.to(wide), n, 0.0)
        highest = k.amax(1, keepdim=True).detach()
        highest = highest.cummax(2).values  # [D, 1, N, B], up to the end of each chunk
        e = (k - (highest - _HIGHEST)).clamp_min(_LOWEST).exp()
        own = torch.eye(n + 1, n, dtype=torch.bool, device=w.device)
        # Not a product with ones and zeros: backward would make 0 * inf where keys are far apart.
        within = torch.where(own, first[:, None, None], _decays(w, n))
        within, at_end = within.split([n, 1], 1)
        place = torch.arange(n, device=w.device)[:, None, None]
        # [D, n, 1, 1]: the part of the sums before a chunk that is left at each of its tokens.
        fade = torch.exp(-place * w[:, None, None, None])
        # [D, N, N, B]: the part of a chunk's sum that is left where a later chunk begins. Of the
        # other chunks it is 0, and may not become 0 * inf.
        between = _decays(n * w, k.shape[2])[:, :-1].unsqueeze(-1)
        between = between * (highest - highest.transpose(1, 2)).clamp_max(0).exp()

        def sums(x: Tensor) -> Tensor:
            """The decayed sums of what each token adds, both `[D, n, N, B]`."""
            ends = (at_end @ x.flatten(2)).unflatten(2, x.shape[2:])
            before = (between * ends).sum(2).unsqueeze(1)
            return torch.addcmul((within @ x.flatten(2)).view_as(x), fade, before)

        o = (sums(e * v) / sums(e)).permute(3, 2, 1, 0).flatten(1, 2)
        return o[:, :T].to(value.dtype), None


def _chunks(x: Tensor, n: int, padding: float) -> Tensor:
    """`[B, T, D]` in chunks of n tokens, `[D, n, N, B]`; the last is filled up."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % n), value=padding)
    return x.unflatten(1, (-1, n)).permute(3, 2, 1, 0).contiguous()


def _decays(w: Tensor, n: int) -> Tensor:
    """`exp(-(t - 1 - i) w)` where i < t, else 0: `[D, n + 1, n]`."""
    place = torch.arange(n + 1, device=w.device)
    steps = place.unsqueeze(-1) - 1 - place[:n]
    decay = torch.exp(-steps.clamp_min(0) * w[:, None, None])
    return decay.masked_fill(steps < 0, 0)
