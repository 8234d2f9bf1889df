"""The five steps of forward and the seven of backward, of which `chunk_gla` consists."""

from typing import Any

from gla_ext.ops._flops import chunks
from gla_ext.ops._operator import declare

_SUB_CHUNK = 16  # tokens
_scores, _diagonal = chunks(0, 0, keys=1), chunks(0, 0, keys=1, length=_SUB_CHUNK)


def _off_diagonal(*args: Any, **kwargs: Any) -> int:
    return _scores(*args) - _diagonal(*args)


declare("_chunk_states", flops=chunks(0, 1, states=1))
declare("_scores_off_diagonal", flops=_off_diagonal)
declare("_scores_diagonal", flops=_diagonal)
declare("_output", flops=chunks(0, 1, values=1, states=1))
declare("_state_grads", flops=chunks(0, 1, states=1))
declare("_value_grads", flops=chunks(0, 1, values=1, states=1))
declare("_score_grads", flops=chunks(0, 1, values=1))
declare("_intra_grads", flops=chunks(0, 0, keys=2))
declare("_merge_grads", flops=chunks(0, 2, states=2))
