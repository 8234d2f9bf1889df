"""Inputs with one gate a head, and what the operators of `gla_ext.ops.simple_gla` make of them."""

import dataclasses

from common import Inputs, make_inputs, outputs_and_gradients
from torch import Tensor

from gla_ext.ops import chunk_simple_gla, fused_recurrent_simple_gla


def make_simple(*shape: int, HK: int | None = None, **options) -> Inputs:
    """`make_inputs` with the first channel's gate for all of a head, `[B, T, HK]`.

    Args:
        HK: heads of k, v and g. Default: those of q.
    """
    x = make_inputs(*shape, **options)
    HK = x.q.shape[2] if HK is None else HK
    k, v, g = (t[:, :, :HK] for t in (x.k, x.v, x.g))
    return dataclasses.replace(x, k=k, v=v, g=g[..., 0])


def simple(inputs: Inputs, operator=chunk_simple_gla, **options) -> dict[str, Tensor]:
    """What the operator makes of the inputs, gradients through autograd."""

    def function(q, k, v, g, initial_state):
        return operator(
            q, k, v, g, initial_state=initial_state, output_final_state=True,
            cu_seqlens=inputs.cu_seqlens, **options,
        )  # fmt: skip

    return outputs_and_gradients(function, inputs)


def recurrent(inputs: Inputs, **options) -> dict[str, Tensor]:
    return simple(inputs, fused_recurrent_simple_gla, **options)


def spread(inputs: Inputs) -> Inputs:
    """The same gate for every key channel, in memory."""
    g = inputs.g.unsqueeze(-1).expand(inputs.k.shape).contiguous()
    return dataclasses.replace(inputs, g=g)
