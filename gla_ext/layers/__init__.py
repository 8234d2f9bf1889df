"""Layers: gated linear attention, and the norms and the convolution that belong to it.

The functions `swiglu` and `swiglu_linear` are in `gla_ext.layers.swiglu`.
"""

from gla_ext.layers.gated_linear_attention import GatedLinearAttention
from gla_ext.layers.multihead import MultiheadGLA
from gla_ext.layers.norms import GatedRMSNorm, RMSNorm, rms_norm
from gla_ext.layers.short_convolution import ShortConvolution

__all__ = [
    "GatedLinearAttention",
    "GatedRMSNorm",
    "MultiheadGLA",
    "RMSNorm",
    "ShortConvolution",
    "rms_norm",
]
