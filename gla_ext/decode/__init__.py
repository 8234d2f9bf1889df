"""Decoding a batch token by token, and choosing the next token.

`generate` and `generate_stream` are in `gla_ext.decode.generate`, and methods of `GLAForCausalLM`.
"""

from gla_ext.decode._stamp import ChangedError
from gla_ext.decode.decoder import Decoder, uses_graph
from gla_ext.decode.sampling import Sampling, sample

__all__ = ["ChangedError", "Decoder", "Sampling", "sample", "uses_graph"]
