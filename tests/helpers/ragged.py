"""Drafts of several lengths, packed, and the pool of their states."""

import itertools

import torch
from recurrence import make_recurrence


class Ragged:
    """Drafts of `LENGTHS` tokens and 3 tokens after them; drafts 2 and 5 have no state."""

    LENGTHS = (3, 1, 16, 0, 20, 2, 9)
    SLOTS = (4, 0, -1, 5, 6, 7, 2)

    def __init__(self, device, sizes=(2, 64, 40), dtype=torch.float32, state_dtype=torch.float32,
                 state_v_first=False):  # fmt: skip
        x = make_recurrence(7, 8, *sizes, dtype=dtype, device=device)
        x = x.v_first() if state_v_first else x
        names = ("q", "k", "v", "gk", "gv")
        end = sum(self.LENGTHS) + 3
        self.tokens = {n: getattr(x, n).flatten(0, 1)[None, :end] for n in names}
        self.pool = x.initial_state.to(state_dtype, memory_format=torch.contiguous_format)
        self.slots = torch.tensor(self.SLOTS, device=device)
        self.offsets = [0, *itertools.accumulate(self.LENGTHS)]
        self.cu_seqlens = torch.tensor(self.offsets, device=device)
        self.state_v_first = state_v_first

    def arguments(self):
        more = {"cu_seqlens": self.cu_seqlens, "state_v_first": self.state_v_first}
        return self.tokens | {"state": self.pool, "slots": self.slots} | more

    def alone(self, n):
        """The tokens of draft n, and its state; without one the state is None."""
        here = slice(self.offsets[n], self.offsets[n + 1])
        tokens = {name: t[:, here] for name, t in self.tokens.items()}
        slot = self.SLOTS[n]
        return tokens, self.pool[slot][None].clone() if 0 <= slot < 7 else None
