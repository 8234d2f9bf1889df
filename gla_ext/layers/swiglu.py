"""SwiGLU, alone and with the linear map after it."""

from gla_ext.ops.swiglu import swiglu, swiglu_linear

__all__ = ["swiglu", "swiglu_linear"]
