"""Serving a language model: an engine with continuous batching, and an HTTP server for it.

`python -m gla_ext.serve MODEL` serves a folder. It needs the extra `serve`; the engine does not.
"""

from gla_ext.decode import ChangedError
from gla_ext.serve.engine import ClosedError, Engine, FullError
from gla_ext.serve.request import Delta, Limits, Request, TokenLogprob

__all__ = [
    "ChangedError",
    "ClosedError",
    "Delta",
    "Engine",
    "FullError",
    "Limits",
    "Request",
    "TokenLogprob",
]
