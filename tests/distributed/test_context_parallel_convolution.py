"""Short convolutions with a cp_context: for any cut one process's results, caches and gradients."""

import torch
from cuts import assert_same_on_ranks, draw_cut
from hypothesis import given, settings
from hypothesis import strategies as st

from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.ops._context import context_of

WIDTHS, D = (4, 2), 3


def make_text(B, T, N):
    """Inputs of both convolutions, their caches, and gradients of outputs and of caches."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs, upstream = ([normal(B, T, D) for _ in WIDTHS] for _ in range(2))
    caches, of_caches = ([normal(N, D, width) for width in WIDTHS] for _ in range(2))
    return inputs, upstream, caches, of_caches


def results(part, *text):
    """Outputs, caches and the gradients of inputs, caches and weights, of both convolutions."""
    torch.manual_seed(0)
    modules = [ShortConvolution(D, width, bias=True).double() for width in WIDTHS]
    inputs, upstream = ([part.own(t) for t in x] for x in text[:2])
    caches, of_caches = ([t[part.rows] for t in x] for x in text[2:])
    weights = [p for module in modules for p in module.parameters()]
    leaves = [*(t.requires_grad_() for t in (*inputs, *caches)), *weights]
    context = context_of(part.options.get("cp_context"))
    outputs, kept = context.convolve(modules, inputs, caches, True, part.options.get("cu_seqlens"))
    pairs = zip((*outputs, *kept), (*upstream, *of_caches), strict=True)
    with_gradient = [(t, gradient) for t, gradient in pairs if t.requires_grad]
    outcome, gradients = zip(*with_gradient, strict=True)
    found = torch.autograd.grad(outcome, leaves, gradients, materialize_grads=True)
    n = len(WIDTHS)
    kinds = (*outputs, *found[:n]), (*kept, *found[n : 2 * n]), map(part.sum, found[2 * n :])
    return [{str(i): t for i, t in enumerate(kind)} for kind in kinds]


@given(data=st.data())
@settings(max_examples=25)
def test_any_cut(pool, data):
    cut = draw_cut(data, 20, tail=False)
    text = make_text(cut.B, sum(cut.lengths), len(cut.sequences or range(cut.B)))
    assert_same_on_ranks(pool, results, cut, *text, weights=1e-12)
