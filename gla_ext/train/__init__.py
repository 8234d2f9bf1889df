"""Training a byte-level GLA language model: `python -m gla_ext.train`, and its parts."""

from gla_ext.devices import default_device
from gla_ext.train.command import main
from gla_ext.train.loop import Interrupted, StopSignals
from gla_ext.train.run_folder import CHECKPOINT

__all__ = ["CHECKPOINT", "Interrupted", "StopSignals", "default_device", "main"]
