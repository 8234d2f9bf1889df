"""Calls of CUDA's fused path that keep something for backward."""

import fused
import pytest
import torch
from common import Inputs, ours
from fused import BF16, for_this_gpu, plan_of
from torch.utils._python_dispatch import TorchDispatchMode

in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")
FP32 = torch.float32
LENGTHS = (0, 1, 1300, 64, 700)  # with a tail of 35 tokens, 2100 in all
PAIRED = {  # the batch for an H200, see `for_this_gpu`
    "pairs of blocks": ((16, 200, 4, 128, 256), BF16, None),
    "pairs of blocks, one after the other": ((49, 190, 4, 104, 200), BF16, None),
}
UNPAIRED = {  # likewise
    "single blocks": ((32, 200, 4, 128, 128), BF16, None),
    "single blocks, few keys and values": ((32, 330, 4, 104, 104), BF16, None),
    "single blocks, many chunks": ((32, 650, 4, 128, 128), BF16, None),
    "single blocks, one chunk": ((32, 64, 4, 128, 128), BF16, None),
}
CASES = {
    **PAIRED,
    "segments": ((1, 2100, 2, 128, 256), BF16, None),
    "segments, their states not kept": ((1, 800, 2, 104, 80), BF16, None),
    "segments of forward alone": ((3, 1024, 6, 128, 256), BF16, None),
    "fp32 gates": ((1, 700, 2, 128, 200), FP32, None),
    "many keys": ((2, 320, 3, 256, 136), BF16, None),
    "three tiles of keys": ((1, 640, 2, 192, 72), BF16, None),
    "many keys, fp32 gates": ((1, 192, 2, 200, 200), FP32, None),
    "packed": ((1, 2100, 2, 104, 200), BF16, LENGTHS),
    "packed, many keys": ((1, 2100, 2, 256, 136), BF16, LENGTHS),
}
SWEPT = {
    "swept segments": ((1, 16448, 8, 128, 128), BF16, None),
    "swept segments, fp32 gates": ((1, 16448, 8, 128, 256), FP32, None),
    "swept segments in pairs of blocks": ((1, 16448, 8, 104, 256), BF16, None),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
by_every_case = pytest.mark.parametrize(
    "case",
    [*CASES.values(), *SWEPT.values(), *UNPAIRED.values()],
    ids=[*CASES, *SWEPT, *UNPAIRED],
)


def draw(case, gates=0.1, **options) -> Inputs:
    (B, *sizes), gate_dtype, lengths = case
    B = for_this_gpu(B) if case in (PAIRED | UNPAIRED).values() else B
    return fused.draw(B, *sizes, gates, gate_dtype, lengths, **options)


def for_backward_bytes(x: Inputs, **options) -> int:
    forward, backward = (
        plan_of(x, way, for_backward=True, **options)["for_backward_bytes"] for way in (False, True)
    )
    assert forward == backward
    return forward


class Kept(TorchDispatchMode):
    """The bytes that calls of the operators keep and are given."""

    def __init__(self):
        super().__init__()
        self.forward, self.backward = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if function is torch.ops.gla_ext.chunk_gla_fwd.default:
            self.forward.append(results[2].numel())
        elif function is torch.ops.gla_ext.chunk_gla_bwd.default:
            self.backward.append(args[12].numel())
        return results


def kept_and_made(x: Inputs, keep_nothing, call=ours, **options):
    """The results, and where forward keeps operands also those of a backward that makes them."""
    yield call(x)
    if for_backward_bytes(x, **options):
        keep_nothing()
        yield call(x)
