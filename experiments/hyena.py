"""Hyena of order 2 (Poli et al., 2023, arXiv:2302.10866), in plain torch, by FFT.

    q, k, v = three causal taps a channel over W x + b
    y = W_o (q * (h ⋆ (k * v) + skip * (k * v))),   (h ⋆ u)_t = sum_i h_i u_{t - i}

The filter h is implicit: a small network of the time, with sines between its layers, in a window
that decays at another speed in every channel.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BANDS = 2  # frequencies of the time's features: 0 and one turn in seq_len
HIDDEN = 64
TAPS = 3
TARGET = 1e-2  # what a window has decayed to after a part of seq_len, of FASTEST up to SLOWEST
FASTEST, SLOWEST = 0.3, 1.5


class ImplicitFilter(nn.Module):
    """The filter of each channel, at any length.

    Args:
        channels: how many.
        seq_len: the length that times are a part of.
    """

    def __init__(self, channels: int, seq_len: int) -> None:
        super().__init__()
        self.seq_len = seq_len
        sizes = [1 + 2 * BANDS, HIDDEN, HIDDEN, HIDDEN]
        self.maps = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))
        self.out = nn.Linear(HIDDEN, channels, bias=False)
        self.frequency = nn.Parameter(torch.ones(HIDDEN))  # of all sines
        speeds = torch.linspace(1 / SLOWEST, 1 / FASTEST, channels) * -math.log(TARGET)
        self.register_buffer("speeds", speeds, persistent=False)

    def reset_parameters(self) -> None:
        """Torch's own initial weights: of small ones the filter would be nearly 0."""
        for linear in (*self.maps, self.out):
            linear.reset_parameters()

    def forward(self, length: int) -> Tensor:
        """The filters, `[length, channels]`, float32 or more."""
        like = {"device": self.speeds.device, "dtype": self.speeds.dtype}
        time = torch.arange(length, **like).div(self.seq_len).unsqueeze(-1)
        turns = 2 * math.pi * time * torch.arange(BANDS, **like)
        h = torch.cat([time, turns.cos(), turns.sin()], -1)
        for linear in self.maps:
            h = torch.sin(self.frequency * linear(h))
        return self.out(h) * torch.exp(-time * self.speeds)


class Hyena(nn.Module):
    """The layer, in the place of a block's `GatedLinearAttention`.

    Args:
        hidden_size: width of the input and the output.
        seq_len: see `ImplicitFilter`.
    """

    def __init__(self, hidden_size: int, seq_len: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)
        bound = TAPS**-0.5
        self.taps = nn.Parameter(torch.empty(TAPS, 3 * hidden_size).uniform_(-bound, bound))
        self.taps_bias = nn.Parameter(torch.empty(3 * hidden_size).uniform_(-bound, bound))
        self.filter = ImplicitFilter(hidden_size, seq_len)
        self.skip = nn.Parameter(torch.randn(hidden_size))

    def forward(self, x: Tensor, **_: None) -> tuple[Tensor, None, None]:
        """The output, `[B, T, hidden_size]`, as the first of what a layer returns."""
        T = x.shape[1]
        # Under autocast too the fp32 taps make q, k and v fp32, as the FFT needs.
        u = F.pad(self.in_proj(x), (0, 0, TAPS - 1, 0))
        taps = [u[:, i : i + T] * tap for i, tap in enumerate(self.taps)]
        q, k, v = (self.taps_bias + sum(taps)).chunk(3, -1)  # [B, T, D] each
        kv = k * v
        with torch.autocast(x.device.type, enabled=False):
            y = long_convolution(kv, self.filter(T)) + self.skip * kv
        return self.out_proj(q * y), None, None


def long_convolution(u: Tensor, h: Tensor) -> Tensor:
    """`y_t = sum_i h_i u_{t - i}` of each channel, u `[B, T, D]`, h `[T, D]`, by FFT."""
    size = 2 * len(h)  # so that the end does not come round to the beginning
    u, h = u.transpose(-1, -2), h.T
    y = torch.fft.irfft(torch.fft.rfft(u, size) * torch.fft.rfft(h, size), size)
    return y[..., : size // 2].transpose(-1, -2)
