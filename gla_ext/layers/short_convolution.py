"""A short causal convolution of every channel: of sequences, packed sequences and segments."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gla_ext.layers._options import typed_options
from gla_ext.ops.short_convolution import short_convolution


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution, then SiLU. The parameters are those of FLA's
    `ShortConvolution`.

    `y_t = silu(bias + sum_s weight[:, 0, W - 1 - s] * x_{t-s})`, with s from 0 to W - 1 and zeros
    before the first token. One operator computes it in fp32 (fp64 for fp64 inputs) and rounds once.
    It reads nothing back from the device.

    Args:
        hidden_size: number of channels D.
        kernel_size: W, in tokens, at least 1.
        bias: whether there is a `bias` `[D]` besides the `weight` `[D, 1, W]`. Default: False.

    Raises:
        TypeError: for more positional arguments, which peft passes if LoRA targets a convolution.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> ShortConvolution:
        if len(args) > 3:
            raise TypeError(
                "ShortConvolution: expected hidden_size, kernel_size and bias, got "
                f"{len(args)} positional arguments; LoRA takes its weight, as "
                "target_parameters=['q_conv1d.weight'], and not the module as target_modules"
            )
        return super().__new__(cls)

    @typed_options
    def __init__(self, hidden_size: int, kernel_size: int, bias: bool = False) -> None:
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
        )
        self.hidden_size = hidden_size

    def forward(
        self,
        x: Tensor,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolves sequences, starting from their last earlier inputs.

        Args:
            x: `[B, T, D]`; bfloat16, float16, float32, or float64 (CPU). Rows of a wider tensor are
                read in place.
            cache: the last W inputs of each sequence so far, `[N, D, W]`, filled with 0 where there
                were fewer; not written to. Default: None (no earlier inputs).
            output_final_state: return the cache after these tokens. Default: False.
            cu_seqlens: int32 or int64 `[N + 1]`, offsets of the sequences packed into a batch of
                one. Tokens after the last offset count as another sequence. Default: None.

        Returns:
            The output `[B, T, D]` and the new cache `[N, D, W]` or None, both in x's dtype.

        Raises:
            TypeError: for other dtypes.
            ValueError: for shapes or devices that do not fit, and on CPU for invalid offsets.
            NotImplementedError: a device or layout without kernels, fp64 on CUDA; double backward,
                forward-mode AD, torch.func transforms except vmap; DTensors mixed with plain
                tensors.
        """
        return causal_convolution(self, x, cache, output_final_state, cu_seqlens)


def causal_convolution(
    conv: nn.Conv1d,
    x: Tensor,
    cache: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`ShortConvolution.forward` with the weight and bias of any depthwise `nn.Conv1d`."""
    return short_convolution(x, conv.weight, conv.bias, cache, output_final_state, cu_seqlens)
