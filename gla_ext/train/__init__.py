"""Training a byte-level GLA language model: `python -m gla_ext.train`, and what it is made of."""

from gla_ext.train.command import Interrupted, StopSignals, main

__all__ = ["Interrupted", "StopSignals", "main"]
