"""What `chunk_gla_` refuses: one sentence with what was expected and what came."""

import pytest
import torch
from common import make_inputs
from common import raises_exactly as raises

from gla_ext import chunk_gla_

EXPECTED = "chunk_gla_: expected "


@pytest.fixture
def x():
    return make_inputs(2, 130, 2, 8, 12)


def call(x, **changes):
    arguments = {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "state": x.initial_state}
    return chunk_gla_(**(arguments | changes))


def indices(*values):
    return torch.tensor(values)


BAD_CALLS = {
    "tokens": (
        {"k": torch.zeros(2, 129, 2, 8)},
        "k to have shape [B, T, HK, K] = [2, 130, 2, 8], got [2, 129, 2, 8]",
    ),
    "rank": (
        {"state": torch.zeros(2, 8, 12)},
        "state to have 4 dimensions [P, H, K, V], got 3 with shape [2, 8, 12]",
    ),
    "layout": (
        {"state_v_first": True},
        "state to have shape [P, H, V, K] = [2, 2, 12, 8], got [2, 2, 8, 12]",
    ),
    "rows without slots": (
        {"state": torch.zeros(3, 2, 8, 12)},
        "state to have shape [P, H, K, V] = [2, 2, 8, 12], got [3, 2, 8, 12]",
    ),
    "strides": (
        {"state": torch.zeros(2, 2, 12, 8).mT},
        "the last two dimensions of state to be contiguous, got strides [192, 96, 1, 8]",
    ),
    "overlap": (
        {"state": torch.zeros(1, 2, 8, 12).expand(2, 2, 8, 12)},
        "the matrices of state to lie apart, got sizes [2, 2, 8, 12] with strides [0, 96, 12, 1]",
    ),
    "count of has_initial_state": (
        {"has_initial_state": torch.ones(3, dtype=torch.bool)},
        "has_initial_state to have shape [N] = [2], got [3]",
    ),
    "every": (
        {"checkpoint_every": 100, "checkpoint_slots": indices(0, 1)},
        "checkpoint_every to be a multiple of 64 tokens, at most 1073741824, got 100",
    ),
    "every below 0": (
        {"checkpoint_every": -64},
        "checkpoint_every to be a multiple of 64 tokens, at most 1073741824, got -64",
    ),
    "no every": (
        {"checkpoint_slots": indices(0, 1)},
        "checkpoint_every beside checkpoint_slots, got none",
    ),
    "nowhere": (
        {"checkpoint_every": 64},
        "checkpoint_slots, rows of the pool, or a tensor of checkpoints beside checkpoint_every, "
        "got neither",
    ),
    "count of checkpoints": (
        {"checkpoint_every": 64, "checkpoint_slots": indices(0, 1)},
        "checkpoint_slots to have shape [N * (T // checkpoint_every)] = [4], got [2]",
    ),
    "checkpoints of another layout": (
        {"checkpoint_every": 64, "checkpoints": torch.zeros(9, 2, 12, 8)},
        "checkpoints to have shape [Q, H, K, V] = [9, 2, 8, 12], got [9, 2, 12, 8]",
    ),
    "checkpoints that overlap": (
        {"checkpoint_every": 64, "checkpoints": torch.zeros(1, 2, 8, 12).expand(4, 2, 8, 12)},
        "the matrices of checkpoints to lie apart, got sizes [4, 2, 8, 12] with strides "
        "[0, 96, 12, 1]",
    ),
    "starts": (
        {
            "checkpoint_every": 64,
            "checkpoints": torch.zeros(9, 2, 8, 12),
            "checkpoint_cu_starts": indices(0, 2),
        },
        "checkpoint_cu_starts to have shape [N + 1] = [3], got [2]",
    ),
    "offsets": (
        {"cu_seqlens": indices(0, 130)},
        "batch size 1 with cu_seqlens (sequences packed in one row), got 2",
    ),
}


@pytest.mark.parametrize("changes, message", BAD_CALLS.values(), ids=BAD_CALLS)
def test_values(x, changes, message):
    with raises(ValueError, EXPECTED + message):
        call(x, **changes)


def test_dtypes(x):
    three = "torch.bfloat16, torch.float16 or torch.float32"
    with raises(TypeError, EXPECTED + f"state to be {three}, got torch.float64"):
        call(x, state=x.initial_state.double())
    with raises(TypeError, EXPECTED + "state to be torch.float64 like q, got torch.float32"):
        call(x.map(torch.Tensor.double), state=x.initial_state)
    with raises(TypeError, EXPECTED + "has_initial_state to be torch.bool, got torch.int64"):
        call(x, has_initial_state=indices(0, 1))


def test_packed_checkpoints_need_their_offsets():
    x = make_inputs(1, 130, 2, 8, 12, lengths=(64, 66))
    message = "checkpoint_cu_starts beside checkpoint_every and cu_seqlens, got None"
    with raises(ValueError, EXPECTED + message):
        call(x, cu_seqlens=x.cu_seqlens, checkpoint_every=64, checkpoint_slots=indices(0, 1))
