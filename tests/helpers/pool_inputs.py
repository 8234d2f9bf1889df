"""Prompts whose states lie in a pool, and what the other operators make of them beside it."""

import torch
from common import make_inputs

from gla_ext import chunk_gla, chunk_gla_, fused_recurrent_gla
from gla_ext.ops import is_batch_invariant

LENGTHS = (70, 0, 1, 130, 64, 200, 1)
TAIL = 9  # tokens after the last packed sequence
EVERY = 64
N, P = 7, 11
SLOTS = (4, -1, 0, 9, 6, 11, 2)  # sequences 1 and 5 have no row
WRITE_SLOTS = (4, 1, 3, -1, 6, 5, 10)  # two in place, one of nowhere
HAS_INITIAL = (True, True, False, True, False, True, True)


class Prompts:
    """N sequences of a batch or packed, and a pool of P states with three rows for checkpoints
    beside it.

    Args:
        lengths: of packed sequences.
        storage: dtype of the pool. Default: what the tokens are accumulated in.
        options: of `make_inputs`, and gv: whether there are gates on values.
    """

    def __init__(
        self,
        device,
        packed,
        T=150,
        sizes=(2, 20, 28),
        storage=None,
        v_first=False,
        gv=False,
        lengths=LENGTHS,
        **options,
    ):
        shape = (1, sum(lengths) + TAIL) if packed else (N, T)
        options |= {"lengths": lengths if packed else None, "states": False}
        x = make_inputs(*shape, *sizes, device=device, **options)
        self.packed, self.device = packed, device
        self.lengths = lengths if packed else (T,) * N
        self.tokens = {"q": x.q, "k": x.k, "v": x.v, "g": x.g}
        if gv:
            self.tokens["gv"] = make_inputs(
                *shape, sizes[0], sizes[2], 1, x.q.dtype, device=device, seed=1
            ).g
        H, K, V = sizes
        accumulate = torch.promote_types(x.q.dtype, torch.float32)
        self.pool = self.normal(P, H, *((V, K) if v_first else (K, V))).to(storage or accumulate)
        self.before, self.accumulate = self.pool.clone(), accumulate
        self.options = {"state_v_first": v_first}
        if packed:
            self.options["cu_seqlens"] = x.cu_seqlens
        self.rows = {
            "slots": self.indices(SLOTS),
            "write_slots": self.indices(WRITE_SLOTS),
            "has_initial_state": torch.tensor(HAS_INITIAL, device=device),
        }

    def normal(self, *shape):
        generator = torch.Generator().manual_seed(7)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device)

    def indices(self, values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def run(self, **changes):
        return chunk_gla_(
            **(self.tokens | self.options | self.rows | {"state": self.pool} | changes)
        )

    def expected(self):
        """o, and the pool afterwards: what `chunk_gla` gives, and on CUDA of one token the
        recurrence, outside `batch_invariant`."""
        read = self.rows["slots"]
        read = self.indices(range(N)) if read is None else read
        write = self.rows["write_slots"] if self.rows["write_slots"] is not None else read
        keep = self.rows["has_initial_state"]
        there = [0 <= r < P for r in read.tolist()]
        initial = self.before[read.clamp(0, P - 1).long()].to(self.accumulate)
        if keep is not None:
            initial = torch.where(keep.view(-1, 1, 1, 1), initial, 0)
        o, states = chunk_gla(
            **self.tokens, **self.options, initial_state=initial, output_final_state=True
        )
        o, pool = o.clone(), self.before.clone()
        recurs = torch.device(self.device).type == "cuda" and not is_batch_invariant()
        for n in range(N):
            if recurs and self.lengths[n] == 1:
                self.of(o, n)[:], states[n : n + 1] = self.token(n, initial[n : n + 1])
        for n, row in enumerate(write.tolist()):
            if not there[n]:
                self.of(o, n).zero_()
            elif 0 <= row < P:
                pool[row] = states[n].to(pool.dtype)
        return o, pool

    def token(self, n, state):
        """o of sequence n, which has one token, and the state that it leaves."""
        tokens = {name: t if t is None else self.of(t, n) for name, t in self.tokens.items()}
        return fused_recurrent_gla(
            gk=tokens.pop("g"),
            **tokens,
            initial_state=state,
            output_final_state=True,
            state_v_first=self.options["state_v_first"],
        )

    def of(self, x, n):
        """The tokens of sequence n, a view."""
        if not self.packed:
            return x[n : n + 1]
        start = sum(self.lengths[:n])
        return x[:, start : start + self.lengths[n]]

    def prefix(self, n, count, **more):
        """The state after the first tokens of sequence n alone."""
        tokens = {name: self.of(t, n)[:, :count] for name, t in self.tokens.items()}
        slot, keep = SLOTS[n], HAS_INITIAL[n]
        state = self.before[slot : slot + 1].to(self.accumulate) if keep else None
        v_first = self.options["state_v_first"]
        return chunk_gla(
            **tokens, initial_state=state, output_final_state=True, state_v_first=v_first, **more
        )[1][0]

    def checkpoints(self, every=EVERY):
        """Arguments that ask for checkpoints, and the checkpoints that are made, each as (sequence,
        tokens, row). They go to the rows of a separate tensor in reversed order; it is full of NaN
        before.
        """
        counts = [length // every for length in self.lengths]
        starts = [sum(counts[:n]) for n in range(N + 1)]
        total = starts[-1]
        into = torch.full_like(self.pool, torch.nan)[:1].repeat(total + 1, 1, 1, 1)
        slots = list(range(total, 0, -1))
        made = [
            (n, (j + 1) * every, slots[starts[n] + j])
            for n in range(N)
            if 0 <= SLOTS[n] < P
            for j in range(counts[n])
        ]
        asks = {
            "checkpoint_every": every,
            "checkpoints": into,
            "checkpoint_slots": self.indices(slots),
        }
        if self.packed:
            asks["checkpoint_cu_starts"] = self.indices(starts, torch.int64)
        return asks, made
