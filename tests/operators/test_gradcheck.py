"""Every gradient of `chunk_gla` on CPU against finite differences, in fp64."""

import dataclasses

import pytest
import torch
from common import make_inputs

from gla_ext import chunk_gla


def gradcheck(fast=False, state_v_first=False, **shape):
    x = make_inputs(**shape, dtype=torch.float64)
    if state_v_first and x.initial_state is not None:
        x = dataclasses.replace(x, initial_state=x.initial_state.mT.contiguous())
    leaves = [x.q, x.k, x.v, x.g] + ([] if x.initial_state is None else [x.initial_state])

    def function(q, k, v, g, initial_state=None):
        o, final_state = chunk_gla(
            *(q, k, v, g, 0.7, initial_state, True, state_v_first, x.cu_seqlens)
        )
        return o, final_state

    leaves = [y.requires_grad_() for y in leaves]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=fast)


@pytest.mark.parametrize("gate", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("states", [True, False])
def test_gradcheck(states, gate):
    gradcheck(B=1, T=20, H=2, K=3, V=2, gate=gate, states=states)


@pytest.mark.parametrize("gate", [0.1, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("state_v_first", [True, False])
def test_gradcheck_over_chunks(state_v_first, gate):
    gradcheck(B=1, T=70, H=1, K=2, V=1, gate=gate, state_v_first=state_v_first)
    gradcheck(B=2, T=130, H=2, K=5, V=3, gate=gate, state_v_first=state_v_first, fast=True)


@pytest.mark.parametrize("gate", [0.1, 1.0, 10.0])
def test_gradcheck_packed(gate):
    gradcheck(B=1, T=80, H=1, K=2, V=1, gate=gate, lengths=(3, 0, 66, 5))
