"""The matrix products of a token step, fused with their neighbours: see `gla_ext.model.step`."""

from gla_ext.ops._operator import declare

norm_linear = declare("norm_linear")
norm_gate_linear_residual = declare("norm_gate_linear_residual")
norm_swiglu = declare("norm_swiglu")
linear_residual = declare("linear_residual")
