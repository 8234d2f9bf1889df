"""A pool with buffers of the newest tokens, and what a step on it is to do, in fp64."""

import torch
from common import assert_close, raises_exactly
from recurrence import SLOTS, VERIFIED, make_recurrence

from gla_ext import fused_recurrent_gla, recurrent_gla_buffered_step_
from gla_ext.selftest import TOLERANCE

L = 16
COUNTS = (0, 9, 2, 3, 11, 1, 16)
SHORT = {torch.bfloat16: 2**-9, torch.float16: 2**-12}  # relative RMS error of rounding
BOUNDS = VERIFIED | {t: TOLERANCE[t] for t in SHORT}


def raises(error, message):
    return raises_exactly(error, "recurrent_gla_buffered_step_: expected " + message)


class Buffered:
    """A pool of 7 slots with `COUNTS` tokens in buffers of 16, and a batch of 6 rows with `SLOTS`
    in it, T tokens of each. Places of a buffer without a token are NaN.
    """

    def __init__(
        self, device, T, dtype=torch.float32, state_v_first=False, state_dtype=None,
        sizes=(4, 20, 28), HK=4, counts=COUNTS, **more,
    ):  # fmt: skip
        x = make_recurrence(7, L + T, *sizes, dtype=dtype, gating="gk", device=device, **more)
        x = (x.v_first() if state_v_first else x).sharing(HK)
        self.counts = [min(max(n, 0), L) for n in counts]
        state = x.initial_state.to(state_dtype or x.initial_state.dtype)
        self.pools = {"state": state.clone(memory_format=torch.contiguous_format)}
        for name, t in (("buffer_k", x.k), ("buffer_v", x.v), ("buffer_g", x.gk)):
            self.pools[name] = t[:, :L].clone(memory_format=torch.contiguous_format)
            for slot, n in enumerate(self.counts):
                self.pools[name][slot, n:] = torch.nan
        self.tokens = {n: getattr(x, n)[:6, L:] for n in ("q", "k", "v", "gk")}
        slots, count = torch.tensor(SLOTS, device=device), torch.tensor(counts, dtype=torch.int32)
        self.rows = {"slots": slots, "count": count.to(device)}
        self.state_v_first = state_v_first
        self.before = {n: t.clone() for n, t in self.pools.items()}

    def step(self, **changes):
        arguments = self.tokens | self.pools | self.rows | {"state_v_first": self.state_v_first}
        return recurrent_gla_buffered_step_(**(arguments | changes))

    def run(self, q, k, v, gk, state):
        """o and the state after these tokens, in fp64."""
        o, after = fused_recurrent_gla(
            *(t.double().cpu()[None] for t in (q, k, v, gk)),
            initial_state=state.double().cpu()[None],
            output_final_state=True,
            state_v_first=self.state_v_first,
        )
        return o[0], after[0]

    def check(self):
        """o of a step is the truth, within rounding, and so is all that is written."""
        count, o = self.rows["count"].clone(), self.step()
        T, dtype = o.shape[1], o.dtype
        state_dtype = self.pools["state"].dtype
        expected = {n: t.clone() for n, t in self.before.items()}
        for row, slot in enumerate(SLOTS):
            if not 0 <= slot < 7:
                assert not o[row].any()
                continue
            n = self.counts[slot]
            q, k, v, gk = (t[row] for t in self.tokens.values())
            old = [self.before[f"buffer_{x}"][slot, :n] for x in "kvg"]
            state = self.before["state"][slot]
            if n + T > L:
                _, state = self.run(q[:1].expand(n, -1, -1), *old, state)
                expected["state"][slot] = folded = self.pools["state"][slot]
                assert_close(folded.cpu(), state, SHORT.get(state_dtype, BOUNDS[torch.float32]))
                state, n, old = folded, 0, [t[:0] for t in old]
            new = [torch.cat(pair) for pair in zip(old, (k, v, gk), strict=True)]
            truth, _ = self.run(torch.cat([q[:1].expand(n, -1, -1), q]), *new, state)
            bound = BOUNDS[dtype] * (1 + 3 / o[row].numel() ** 0.5)
            assert_close(o[row].cpu(), truth[n:], bound)
            for name, t in zip("kvg", (k, v, gk), strict=True):
                expected[f"buffer_{name}"][slot, n : n + T] = t
        for name, t in expected.items():
            assert torch.equal(self.pools[name].nan_to_num(), t.nan_to_num()), name
        assert torch.equal(count, self.rows["count"])
        return o
