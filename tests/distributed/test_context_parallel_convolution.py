"""Short convolutions with a cp_context: for any cut one process's results, caches and gradients."""

import random
from itertools import accumulate, pairwise

import torch
from common import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import local, tokens_of

from gla_ext.distributed import build_cp_context
from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.ops._collectives import all_sum
from gla_ext.ops._context import context_of

WIDTHS, D = (4, 2), 3
CPU = torch.device("cpu")


def make_modules():
    torch.manual_seed(0)
    return [ShortConvolution(D, width, bias=True).double() for width in WIDTHS]


def make_text(B, T, N):
    """Inputs of both convolutions, their caches, and gradients of outputs and of caches."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs, upstream = ([normal(B, T, D) for _ in WIDTHS] for _ in range(2))
    caches, of_caches = ([normal(N, D, width) for width in WIDTHS] for _ in range(2))
    return inputs, caches, upstream, of_caches


def all_of(modules, inputs, caches, upstream, of_caches, **options):
    """Outputs, caches and the gradients of inputs, caches and weights, of both convolutions."""
    inputs, caches = ([t.detach().requires_grad_() for t in x] for x in (inputs, caches))
    context = context_of(options.get("cp_context"))
    outputs, kept = context.convolve(modules, inputs, caches, True, options.get("cu_seqlens"))
    leaves = [*inputs, *caches, *(p for module in modules for p in module.parameters())]
    pairs = zip((*outputs, *kept), (*upstream, *of_caches), strict=True)
    with_gradient = [(t, gradient) for t, gradient in pairs if t.requires_grad]
    results, gradients = zip(*with_gradient, strict=True)
    found = torch.autograd.grad(results, leaves, gradients, materialize_grads=True)
    n = len(WIDTHS)
    tokens = [*(o.detach() for o in outputs), *found[:n]]
    return tokens, [*(c.detach() for c in kept), *found[n : 2 * n]], found[2 * n :]


def run_rank(group, text, lengths, sequences):
    inputs, caches, upstream, of_caches = text
    offsets = None if sequences is None else torch.tensor([0, *accumulate(sequences)])
    context = build_cp_context(offsets, group, lengths=lengths)
    tokens = tokens_of(lengths, context.rank)
    cut = context.cut(lengths[context.rank], CPU)
    rows = list(range(len(caches[0]))) if offsets is None else list(cut.sequences)
    mine = [[local(t, tokens) for t in inputs], [c[rows] for c in caches]]
    mine += [[local(t, tokens) for t in upstream], [c[rows] for c in of_caches]]
    of_tokens, own, weights = all_of(make_modules(), *mine, cp_context=context)
    return of_tokens, own, [all_sum(g, group.group_name) for g in weights], tokens, rows


@given(data=st.data())
@settings(max_examples=30)
def test_any_cut(pool, data):
    ranks = data.draw(st.integers(1, 4))
    tokens = st.one_of(st.integers(0, 3), st.integers(0, 20))
    lengths = tuple(data.draw(st.lists(tokens, min_size=ranks, max_size=ranks)))
    lengths = lengths if sum(lengths) else (2, *lengths[1:])
    T, sequences, B = sum(lengths), None, data.draw(st.integers(1, 2))
    if data.draw(st.booleans()):
        rng, B = random.Random(data.draw(st.integers(0, 10**6))), 1
        cuts = [0, *sorted(rng.randint(0, T) for _ in range(rng.randint(0, 4))), T]
        sequences = tuple(b - a for a, b in pairwise(cuts))
    text = make_text(B, T, B if sequences is None else len(sequences))
    offsets = None if sequences is None else torch.tensor([0, *accumulate(sequences)])
    of_tokens, of_rows, of_weights = all_of(make_modules(), *text, cu_seqlens=offsets)
    totals = [torch.zeros_like(t) for t in of_rows]
    for mine, own, weights, tokens, rows in pool(run_rank, text, lengths, sequences, ranks=ranks):
        for found, expected in zip(mine, of_tokens, strict=True):
            assert_close(found, local(expected, tokens), 1e-12, 1e-14)
        for found, total in zip(own, totals, strict=True):
            total.index_add_(0, torch.tensor(rows, dtype=torch.int64), found)
        for found, expected in zip(weights, of_weights, strict=True):
            assert_close(found, expected, 1e-12, 1e-14)
    for total, expected in zip(totals, of_rows, strict=True):
        assert_close(total, expected, 1e-12, 1e-14)
