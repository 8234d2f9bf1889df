"""The low-rank gate of a GLA layer: its second linear map, log-sigmoid, division and clamp."""

from gla_ext.ops.gate_projection import gate_projection, plain_gate_projection

__all__ = ["gate_projection", "plain_gate_projection"]
