"""SwiGLU, alone and with the linear map that follows it."""

from gla_ext.ops.swiglu import swiglu, swiglu_linear

__all__ = ["swiglu", "swiglu_linear"]
