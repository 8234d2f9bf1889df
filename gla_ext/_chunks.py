"""Splits the reference's tensors into chunks and packed sequences, and joins the results."""

import functools
import inspect
import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK, SUB_CHUNK = 64, 16  # tokens


def packable(function):
    """Makes `function` run on each packed sequence separately if `cu_seqlens` is given.

    Arguments and results are cut and joined by their names: states have one entry per sequence, S
    and dS one per chunk, all others one per token.
    """
    signature, states = inspect.signature(function), ("initial_state", "dht", "final_state", "dh0")

    @functools.wraps(function)
    def packed(*args, **kwargs):
        call = signature.bind(*args, **kwargs).arguments
        cu_seqlens = call.pop("cu_seqlens", None)
        if cu_seqlens is None:
            return function(**call)
        T, parts = call["q"].shape[1], []
        for n, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            own = {
                name: x[n : n + 1] if name in states else x[:, start:end]
                for name, x in call.items()
                if isinstance(x, Tensor)
            }
            parts.append(function(**(call | own)))

        def join(name):
            results = [getattr(part, name) for part in parts]
            if name in states:
                return torch.cat(results)
            x = torch.cat(results, 1)
            missing = (T // CHUNK + len(parts) if name in ("S", "dS") else T) - x.shape[1]
            return torch.cat([x, x.new_zeros(1, missing, *x.shape[2:])], 1)

        return type(parts[0])(*map(join, parts[0]._fields))

    return packed


def for_every_head(H, *tensors):
    """Each [B, T, HK, D] -> [B, T, H, D], or None: head h is head h // (H // HK)."""
    return [
        x if x is None or x.shape[2] == H else x.repeat_interleave(H // x.shape[2], 2)
        for x in tensors
    ]


def sum_over_groups(x, HK):
    """[B, T, H, D] -> [B, T, HK, D]: sums over the heads into which `for_every_head` copied one."""
    return x if x.shape[2] == HK else x.unflatten(2, (HK, -1)).sum(3)


def to_chunks(x, hold=False, at_least=0):
    """[B, T, H, D] -> [B, H, NT, C, D]; fills the last chunk with zeros or with x's last token."""
    B, T, H, D = x.shape
    NT = max(-(-T // CHUNK), at_least)
    missing = NT * CHUNK - T
    if hold and T:
        x = torch.cat([x, x[:, -1:].expand(B, missing, H, D)], 1)
    else:
        x = pad(x, (0, 0, 0, 0, 0, missing))
    return x.reshape(B, NT, CHUNK, H, D).permute(0, 3, 1, 2, 4)


def to_tokens(x, T):
    """[B, H, NT, C, D] -> [B, T, H, D]."""
    B, H, NT, C, D = x.shape
    return x.permute(0, 2, 3, 1, 4).reshape(B, NT * C, H, D)[:, :T]


def split_diagonal(A):
    """A, [.., C, C] -> A without its c x c diagonal blocks, and the blocks, [.., C, c]."""
    n = CHUNK // SUB_CHUNK
    block = torch.arange(CHUNK, device=A.device) // SUB_CHUNK
    blocks = A.unflatten(-1, (n, SUB_CHUNK)).unflatten(-3, (n, SUB_CHUNK))  # [.., n, c, n, c]
    diagonal = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).flatten(-3, -2)
    return A.masked_fill(block[:, None] == block, 0), diagonal
