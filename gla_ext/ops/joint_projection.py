"""Several linear maps of one input; one operator adds up the input's gradients."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gla_ext.ops._operator import declare


def _on_shards(
    x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype, together: bool = True
) -> list[Tensor]:
    return [F.linear(x, weight.to(dtype)) for weight in weights]  # one product each


joint_projection = declare("joint_projection", made_of=_on_shards)
