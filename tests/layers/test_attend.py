"""How `Attention` calls torch's flash kernels, on kernels of our own that leave unwritten what
theirs do; this needs no GPU."""

import pytest
import torch
from common import assert_close

from gla_ext.layers import _attend, _route
from gla_ext.layers._attend import attend_last, attend_packed, attend_rows

D = 8


def one(q, k, v, window, causal=True):
    """A sequence's queries [T, H, D] against its keys [L, HK, D]; also the log of the sum of
    exponentials [H, T], +inf for no key as flash_attn has it."""
    T, L, groups = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("thd,lhd->htl", q, k) / D**0.5
    query, key = torch.arange(T).unsqueeze(1) + L - T, torch.arange(L)
    seen = key <= query if causal else torch.ones(T, L, dtype=torch.bool)
    if window is not None:
        seen = seen & (key > query - window)
    scores = scores.masked_fill(~seen, -torch.inf)
    o = torch.einsum("htl,lhd->thd", scores.softmax(-1), v)
    lse = scores.logsumexp(-1)
    return o, lse.masked_fill(lse == -torch.inf, torch.inf)


class Unwritten(torch.autograd.Function):
    """What it is given, but NaN outside of the sequences, and so its gradient."""

    @staticmethod
    def forward(ctx, x, inside):
        ctx.save_for_backward(inside)
        return x.where(inside, torch.nan)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.where(ctx.saved_tensors[0], torch.nan), None


def unwritten(x, offsets):
    tokens = torch.arange(len(x)).view(-1, 1, 1)
    return Unwritten.apply(x, (tokens >= offsets[0]) & (tokens < offsets[-1]))


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=None):
    """`torch.nn.attention.varlen.varlen_attn`; torch 2.11 has no enable_gqa."""
    assert enable_gqa in (None, q.shape[1] != k.shape[1])
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.diff().max() <= max_q
    assert cu_k.diff().max() <= max_k
    left, right = window_size
    assert right == 0
    inputs = unwritten(q, cu_q), unwritten(k, cu_k), unwritten(v, cu_k)
    o = torch.full_like(q, torch.nan)
    for n in range(len(cu_q) - 1):
        own_q, own_k = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        window = None if left < 0 else left + 1
        found = one(inputs[0][own_q], inputs[1][own_k], inputs[2][own_k], window)[0]
        o = o.slice_scatter(found, 0, int(cu_q[n]), int(cu_q[n + 1]))
    return unwritten(o, cu_q)


def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, seqused_k):
    """`aten::_flash_attention_forward`."""
    assert cu_q.dtype == cu_k.dtype == seqused_k.dtype == torch.int32
    assert (dropout, causal, debug) == (0.0, False, False)
    o = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[1], len(q)), torch.nan, dtype=q.dtype)
    for n, used in enumerate(seqused_k.tolist()):
        assert used <= max_k
        own_q = slice(cu_q[n], cu_q[n + 1])
        own_k = slice(cu_k[n], cu_k[n] + used)
        o[own_q], lse[:, own_q] = one(q[own_q], k[own_k], v[own_k], None, causal=False)
        if not used:
            o[own_q] = 0
    return o, lse, None, None, None


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(_attend, "has_flash", lambda q: True)
    monkeypatch.setattr(_route, "can_be_read", lambda t: False)
    monkeypatch.setattr(_attend, "varlen_attn", varlen)
    monkeypatch.setattr(_attend, "_flash_forward", forward)
    monkeypatch.setattr(_attend, "_KEYS_A_SPLIT", 16)


def draw(*lengths, heads=(4, 2)):
    torch.manual_seed(0)
    counts = (heads[0], heads[1], heads[1])
    lengths = lengths if len(lengths) == 2 else lengths * 2
    sizes = (lengths[0], lengths[1], lengths[1])
    pairs = zip(sizes, counts, strict=True)
    return [torch.randn(*size, H, D, dtype=torch.float64).requires_grad_() for size, H in pairs]


def assert_same(o, expected, inputs):
    """And the gradients."""
    do = torch.linspace(-0.5, 1, o.numel(), dtype=o.dtype).view_as(o)
    results = ([x, *torch.autograd.grad(x, inputs, do)] for x in (o, expected))
    for a, e in zip(*results, strict=True):
        assert_close(a, e, 1e-12)


@pytest.mark.parametrize("window", [None, 1, 5], ids=str)
def test_packed(flash, window):
    inputs = draw((40,), (50,))
    cu_q, cu_k = torch.tensor([0, 3, 3, 20, 33]), torch.tensor([0, 3, 5, 30, 45])
    longest = (17, 25) if window else ()
    o = attend_packed(*inputs, cu_q, cu_k, *longest, window=window)
    q, k, v = inputs
    expected = torch.zeros_like(q)
    for n in range(4):
        own = slice(cu_k[n], cu_k[n + 1])
        found = one(q[cu_q[n] : cu_q[n + 1]], k[own], v[own], window)[0]
        expected = expected.slice_scatter(found, 0, int(cu_q[n]), int(cu_q[n + 1]))
    assert_same(o, expected, inputs)


@pytest.mark.parametrize("window", [None, 5], ids=str)
def test_packed_by_a_mask(monkeypatch, window):
    """If no kernel takes the sequences and the offsets cannot be read, a mask is used, for some
    queries at a time.
    """
    monkeypatch.setattr(_route, "can_be_read", lambda t: False)
    monkeypatch.setattr(_attend, "_MASKED_QUERIES", 16)
    inputs = draw((40,), (50,))
    cu_q, cu_k = torch.tensor([0, 3, 3, 20, 33]), torch.tensor([0, 3, 5, 30, 45])
    o = attend_packed(*inputs, cu_q, cu_k, window=window)
    monkeypatch.undo()
    expected = attend_packed(*inputs, cu_q, cu_k, window=window)
    assert_same(o, expected, inputs)


def test_rows_with_a_window(flash):
    inputs = draw((3, 20))
    o = attend_rows(*inputs, window=5)
    expected = torch.stack([one(*(x[n] for x in inputs), 5)[0] for n in range(3)])
    assert_same(o, expected, inputs)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)], ids=str)
@torch.no_grad()
def test_one_token_by_splits(flash, heads):
    """Of a part of longer rows, of which one has no key; what lies past a length is NaN."""
    q, k, v = draw((4, 1), (4, 80), heads=heads)
    lengths = torch.tensor([1, 16, 41, 64])
    past = torch.arange(80) >= lengths.unsqueeze(1)
    for x in (k, v):
        x[past] = torch.nan
    o = attend_last(q, k[:, :64], v[:, :64], lengths)
    for n, length in enumerate(lengths.tolist()):
        expected = one(q[n], k[n, :length], v[n, :length], None)[0]
        assert_close(o[n], expected, 1e-12)
    assert attend_last(q, k[:, :64], v[:, :64], lengths * 0).eq(0).all()
    # Rows that are not full, and no lengths.
    o = attend_last(q[:1], v[3:, :64], v[3:, :64], None)
    assert_close(o[0], one(q[0], v[3, :64], v[3, :64], None)[0], 1e-12)
