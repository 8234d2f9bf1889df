"""Steps on a pool in CUDA: nothing waits, and torch.compile's graphs take the pool where it is."""

import pytest
import torch
from common import assert_same_bits
from cuda_tools import waits_for_nothing
from recurrence import make_recurrence

from gla_ext import recurrent_gla_commit_, recurrent_gla_step_, recurrent_gla_verify

pytestmark = pytest.mark.cuda


class Decoder(torch.nn.Module):
    """A pool as a buffer, and tokens of some of its rows."""

    def __init__(self, B=64, P=96, T=1, state_v_first=True):
        super().__init__()
        options = {"dtype": torch.bfloat16, "gating": "gk", "gate": 0.1, "device": "cuda"}
        x = make_recurrence(P, T, 4, 64, 128, **options)
        x = x.v_first() if state_v_first else x
        self.tokens = {n: getattr(x, n)[:B] for n in ("q", "k", "v", "gk")}
        self.before = x.initial_state
        self.slots = torch.randperm(P, generator=torch.Generator().manual_seed(0))[:B].cuda()
        self.slots[::5] = -1
        self.state_v_first = state_v_first
        self.register_buffer("pool", x.initial_state.clone())

    def forward(self, q, k, v, gk, slots):
        o = recurrent_gla_step_(
            q, k, v, gk, state=self.pool, slots=slots, state_v_first=self.state_v_first
        )
        return o * 2

    def run(self, call=None, steps=3):
        """o of every step and the pool after them."""
        self.pool.copy_(self.before)
        call = self if call is None else call
        outputs = [call(**self.tokens, slots=self.slots).clone() for _ in range(steps)]
        return {"o": torch.stack(outputs), "pool": self.pool.clone()}


def test_no_synchronisation():
    decoder = Decoder(T=3)
    expected, accepted = decoder.run(), torch.full((64,), 2, device="cuda")
    arguments = decoder.tokens | {"state": decoder.pool, "slots": decoder.slots}
    with waits_for_nothing():
        decoded = decoder.run()
        recurrent_gla_verify(**arguments, state_v_first=True)
        del arguments["q"]
        recurrent_gla_commit_(**arguments, accepted=accepted, state_v_first=True)
    assert_same_bits(decoded, expected)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_reduce_overhead_with_the_pool_as_a_buffer(state_v_first):
    torch._dynamo.utils.counters.clear()
    decoder = Decoder(state_v_first=state_v_first)
    compiled = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        expected = decoder.run(steps=4)
        for _ in range(2):
            assert_same_bits(decoder.run(compiled, steps=4), expected)
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert skips == 0
