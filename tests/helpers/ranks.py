"""The ranks of a text one after the other in this process, for `chunk_gla` with a cp_context where
there is no network: what they gather is kept and handed out.
"""

import contextlib
import random

import torch

from gla_ext import chunk_gla
from gla_ext.distributed.context import CPContext

NAMES = ("q", "k", "v", "g", "gv")


def tokens_of(lengths, rank):
    """The tokens of a rank, as a range of the whole text."""
    return range(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def local(x, tokens):
    """Those tokens of a tensor, in a tensor of their own."""
    return x[:, tokens.start : tokens.stop].clone()


class _Context(CPContext):
    """A rank's, whose process group nobody asks."""

    def __init__(self, rank, size, offsets, lengths):
        self.group, self.group_name = None, "in one process"
        self.rank, self.size = rank, size
        self.offsets, self.lengths = offsets, lengths
        self.cuts_rows_evenly = offsets is None and lengths is None
        self._cuts = {}

    def compare(self, op, key, facts):
        pass


class _Network:
    """Gathers in two rounds: the first keeps what every rank sends, the second hands it out."""

    def __init__(self, size):
        self.size, self.rank, self.sent, self.keeps = size, 0, {}, True

    def all_gather(self, own, size, group):
        assert (size, group) == (self.size, "in one process")
        if self.keeps:
            self.sent[self.rank] = own.clone()
            return own.repeat(size)
        return torch.cat([self.sent[rank] for rank in range(size)])

    def rounds(self, function):
        """What function(rank) gives in the second round, of every rank in any order."""
        order = random.Random(self.size).sample(range(self.size), self.size)
        results = {}
        for self.keeps in (True, False):
            for self.rank in order:
                results[self.rank] = function(self.rank)
        return [results[rank] for rank in range(self.size)]


@contextlib.contextmanager
def network(size):
    """Inside, torch's functional all-gather is the network's."""
    found = _Network(size)
    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        for key in ("CPU", "CUDA"):
            library.impl("all_gather_into_tensor", found.all_gather, key)
            library.impl("wait_tensor", lambda x: x.clone(), key)
        yield found


def across_ranks(x, lengths, uneven=False, **options):
    """What `chunk_gla` on as many ranks as lengths makes of a whole text, by name.

    Args:
        x: q, k, v, g, gv, do, h0, dht, cu_seqlens by name; g, gv, h0 and cu_seqlens may be None.
        lengths: the tokens of each rank.
        uneven: whether the context is told them.
    """
    size, device = len(lengths), x["q"].device
    offsets = None if x["cu_seqlens"] is None else tuple(x["cu_seqlens"].tolist())
    told = tuple(lengths) if uneven else None
    contexts = [_Context(rank, size, offsets, told) for rank in range(size)]
    pieces = [tokens_of(lengths, rank) for rank in range(size)]
    cuts = [c.cut(n, device) for c, n in zip(contexts, lengths, strict=True)]
    everything = list(range(x["dht"].shape[0]))
    rows = [everything if offsets is None else list(cut.sequences) for cut in cuts]
    leaves = [
        {n: local(x[n], p).requires_grad_() for n in NAMES if x[n] is not None} for p in pieces
    ]
    for mine, own in zip(leaves, rows, strict=True):
        if x["h0"] is not None:
            mine["h0"] = x["h0"][own].requires_grad_()

    def forward(rank):
        mine = leaves[rank]
        operands = [mine.get(n) for n in NAMES]
        return chunk_gla(
            *operands[:4], initial_state=mine.get("h0"), output_final_state=True, gv=operands[4],
            cp_context=contexts[rank], **options,
        )  # fmt: skip

    def backward(rank):
        upstream = local(x["do"], pieces[rank]), x["dht"][rows[rank]]
        inputs = list(leaves[rank].values())
        return torch.autograd.grad(outputs[rank], inputs, upstream, retain_graph=True)

    with network(size) as ranks:
        outputs = ranks.rounds(forward)
        gradients = ranks.rounds(backward)
    results = [
        {"o": o.detach(), "state": state.detach()} | dict(zip(mine, found, strict=True))
        for (o, state), mine, found in zip(outputs, leaves, gradients, strict=True)
    ]
    return joined(results, pieces, rows, x)


def text_of(x, gv=None):
    """`common.Inputs` as `across_ranks` takes it."""
    return {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "gv": gv, "do": x.do} | {
        "h0": x.initial_state, "dht": x.dht, "cu_seqlens": x.cu_seqlens
    }  # fmt: skip


def named(results):
    """As `common.ours` names results."""
    names = {"state": "final_state", "h0": "dh0", "o": "o"}
    return {names.get(name, f"d{name}"): value for name, value in results.items()}


def joined(results, pieces, rows, x):
    """Every rank's results as those of the whole text: tokens in order, states summed by row."""
    whole = {}
    for name in results[0]:
        like = x["dht"] if name in ("state", "h0") else {"o": x["do"]}.get(name, x.get(name))
        whole[name] = torch.zeros_like(like)
        for mine, tokens, own in zip(results, pieces, rows, strict=True):
            if name in ("state", "h0"):
                whole[name].index_add_(
                    0, torch.tensor(own, dtype=torch.int64).to(like.device), mine[name]
                )
                continue
            whole[name][:, tokens.start : tokens.stop] = mine[name]
    return whole
