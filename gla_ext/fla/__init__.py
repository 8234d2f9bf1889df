"""Makes programs written for flash-linear-attention (FLA) run gla_ext's operators.

`accelerate_fla()` is checked against FLA 0.5.2 and 0.6.0. Importing this package does not import
FLA; that call does.
"""

from gla_ext.fla.accelerate import accelerate_fla, is_accelerated, restore_fla

__all__ = ["accelerate_fla", "is_accelerated", "restore_fla"]
