"""Short convolutions on a pool of caches, and what the module that takes and returns them makes of
the same tokens.
"""

import itertools

import common
import torch
from conv_inputs import make, module

from gla_ext import short_convolution_

LENGTHS = (5, 0, 1, 40, 2, 9)  # and a tail of 3
OFFSETS = [0, *itertools.accumulate(LENGTHS)]
READ, WRITE = (4, 2, -1, 2, 6, 9), (4, 0, 1, 5, -3, 3)  # of a pool of 7


class Pool:
    """Six sequences of a pool of 7 caches, as rows of T tokens or packed; the truth."""

    def __init__(self, device, dtype=torch.float32, T=1, D=24, W=4, packed=False, **more):
        B, T, N = (1, OFFSETS[-1] + 3, 6) if packed else (6, T, 6)
        self.x, self.weight, self.bias, *_ = make(B, T, D, W, device, dtype, N=N, **more)
        self.pool = make(1, 1, D, W, device, dtype, N=7)[3].contiguous()
        self.before = self.pool.clone()
        self.offsets = torch.tensor(OFFSETS, device=device) if packed else None
        self.slots = torch.tensor(READ, device=device)
        self.write_slots = torch.tensor(WRITE, device=device)

    def run(self, **changes):
        arguments = {
            "x": self.x,
            "weight": self.weight,
            "bias": self.bias,
            "state": self.pool,
            "slots": self.slots,
            "write_slots": self.write_slots,
            "cu_seqlens": self.offsets,
        }
        return short_convolution_(**(arguments | changes))

    def expected(self, write=WRITE, read=READ, starts=()):
        """y and the pool, a sequence after the other."""
        y, pool = torch.zeros_like(self.x).contiguous(), self.before.clone()
        convolution = module(self.weight, self.bias)
        for n, slot in enumerate(read):
            if not 0 <= slot < 7:
                continue
            row, here = (
                (n, slice(None)) if self.offsets is None else (0, slice(*OFFSETS[n : n + 2]))
            )
            cache = self.before[slot : slot + 1]
            cache = torch.zeros_like(cache) if n in starts else cache
            with torch.no_grad():
                own, after = convolution(self.x[row : row + 1, here], cache, True)
            y[row, here] = own[0]
            if 0 <= write[n] < 7:
                pool[write[n]] = after[0]
        return y, pool

    def check(self):
        y, pool = self.expected()
        found = self.run()
        assert found.dtype == self.x.dtype and found.is_contiguous()
        assert torch.equal(found, y)
        assert torch.equal(self.pool, pool)


def raises(error, sentence):
    return common.raises(error, "short_convolution_: " + sentence)
