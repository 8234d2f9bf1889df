"""What the layer takes for a sequence: masks, packing, and segments through the cache.

Equal bits (see common.py): the same calls; between other batches, products of integers.
"""

import copy
import itertools

import pytest
import torch
from common import assert_close
from dispatch import Calls
from models import EVERY, composed, composed_with, make_layer, make_x
from torch.utils.checkpoint import checkpoint

from gla_ext import batch_invariant
from gla_ext.cache import GLACache

MASKS = {
    "left": [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]],
    "right": [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]],
    "none": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "all-padded row": [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 1, 0, 1]],
    "nothing": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
}


with_options = pytest.mark.parametrize("options", [{}, EVERY], ids=["default", "all"])


def stretched(rows, to=70, dtype=torch.long):
    return torch.tensor(rows, dtype=dtype).repeat_interleave(to // 5, 1)


ROWS = [(rows, torch.long) for rows in MASKS.values()] + [(MASKS["holes"], torch.bool)]


@pytest.mark.parametrize(("rows", "dtype"), ROWS, ids=str)
@with_options
def test_mask_skips_padding(rows, dtype, options):
    layer, x, mask = make_layer(layer_idx=0, **options), make_x(), stretched(rows, dtype=dtype)
    valid = mask.bool()
    y, _, cache = layer(x, attention_mask=mask, past_key_values=GLACache(), use_cache=True)
    assert (y[~valid] == 0).all()
    for b in range(2):
        expected, state = composed_with(options, layer, x[b : b + 1, valid[b]])
        assert_close(y[b : b + 1, valid[b]], expected, 1e-12)
        assert_close(cache[0]["recurrent_state"][b : b + 1], state.mT, 1e-12)
    assert cache.get_seq_length() == 70
    longer = torch.cat([torch.zeros(2, 9, dtype=dtype), mask], 1)  # whose last columns count
    assert torch.equal(layer(x, longer)[0], layer(x, mask)[0])
    if not valid.any():
        assert layer(x[:0], mask[:0])[0].shape == layer(x[:0])[0].shape == (0, 70, 24)


@with_options
def test_mask_gradients_ignore_nan_in_padding(options):
    layer, mask = make_layer(**options), stretched(MASKS["left"])
    valid = mask.bool()
    clean = make_x()
    dirty = clean.masked_fill(~valid.unsqueeze(-1), torch.nan)
    results = []
    for x in (clean, dirty):
        x = x.detach().requires_grad_()
        y = layer(x, attention_mask=mask)[0]
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
    for got, wanted in zip(*results, strict=True):
        assert wanted.isfinite().all()
        assert torch.equal(got, wanted)
    assert (results[1][1][~valid] == 0).all()


@with_options
def test_mask_with_cached_states(options):
    layer, x = make_layer(layer_idx=0, **options), make_x()
    cache = GLACache()
    layer(x[:, :30], past_key_values=cache, use_cache=True)
    mask = torch.cat([torch.ones(2, 30), stretched(MASKS["all-padded row"], 40)], 1)
    before = cache[0]["recurrent_state"].clone()
    y = layer(x[:, 30:], mask, past_key_values=cache, use_cache=True)[0]
    assert (y[0] == 0).all()
    assert torch.equal(cache[0]["recurrent_state"][0], before[0])
    assert_close(y[1:], composed_with(options, layer, x)[0][1:, 30:], 1e-12)


@with_options
def test_cu_seqlens_separates_sequences_and_beats_the_mask(options):
    layer, x = make_layer(**options), make_x(B=1)
    offsets = [0, 5, 5, 69]
    y = layer(x, cu_seqlens=torch.tensor(offsets))[0]
    for start, end in itertools.pairwise(offsets):
        expected, _ = composed_with(options, layer, x[:, start:end])
        assert_close(y[:, start:end], expected, 1e-12)
    assert (y[:, 69:] == 0).all()
    zero_mask = torch.zeros(1, 70)
    assert torch.equal(layer(x, zero_mask, cu_seqlens=torch.tensor(offsets))[0], y)


@pytest.mark.parametrize("cuts", [(0, 70), (0, 40, 70), (0, 1, 65, 66, 70), (*range(12), 70)])
@with_options
def test_cached_segments_equal_the_whole(cuts, options):
    layer, x = make_layer(layer_idx=1, **options), make_x()
    cache, pieces = GLACache(), []
    for start, end in itertools.pairwise(cuts):
        y, _, same = layer(x[:, start:end], past_key_values=cache, use_cache=True)
        assert same is cache
        pieces.append(y)
    expected, state = composed_with(options, layer, x)
    assert_close(torch.cat(pieces, 1), expected, 1e-12)
    assert_close(cache[1]["recurrent_state"], state.mT, 1e-12)  # v-first
    assert (len(cache), cache.get_seq_length(1), cache.get_seq_length(0)) == (2, 70, 0)


@with_options
def test_without_use_cache_the_state_stays(options):
    layer, x = make_layer(layer_idx=0, **options), make_x()
    cache = GLACache()
    layer(x, past_key_values=cache, use_cache=True)
    cache.detach()
    before = copy.deepcopy(cache[0])
    layer(x, past_key_values=cache)
    assert torch.equal(cache[0]["recurrent_state"], before["recurrent_state"])
    for now, then in zip(cache[0]["conv_state"] or (), before["conv_state"] or (), strict=True):
        assert torch.equal(now, then)


def test_cache_holds_the_last_inputs_of_the_convolutions():
    layer, x = make_layer(layer_idx=0, **EVERY), make_x()
    cache = layer(x, None, GLACache(), use_cache=True)[2]
    states = cache[0]["conv_state"]
    assert isinstance(states, tuple)
    for state, projection in zip(states, (layer.q_proj, layer.k_proj, layer.v_proj), strict=True):
        assert_close(state, projection(x)[:, -4:].mT, 1e-12)


class OtherCache(list):
    """A cache that has what the layer asks for and nothing more."""

    def update(self, *, layer_idx, recurrent_state, conv_state, offset):
        assert conv_state is None
        self[layer_idx:] = [{"recurrent_state": recurrent_state, "conv_state": None}]
        self.offset = offset


def test_takes_any_cache_of_its_kind():
    layer, x, cache = make_layer(layer_idx=0), make_x(), OtherCache()
    layer(x[:, :20], past_key_values=cache, use_cache=True)
    y = layer(x[:, 20:], past_key_values=cache, use_cache=True)[0]
    assert_close(y, composed(layer, x)[0][:, 20:], 1e-12)
    assert (len(cache), cache.offset) == (1, 50)


def test_cache_selects_repeats_detaches_and_resets():
    cache = GLACache()
    state = torch.arange(3.0, requires_grad=True).view(3, 1)
    cache.update(layer_idx=0, recurrent_state=state, conv_state=(state * 2,), offset=4)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert cache[0]["recurrent_state"].flatten().tolist() == [2, 0]
    cache.batch_repeat_interleave(2)
    assert cache[0]["conv_state"][0].flatten().tolist() == [4, 4, 0, 0]
    cache.reorder_cache(torch.tensor([3, 1]))
    assert cache[0]["recurrent_state"].flatten().tolist() == [0, 2]
    assert cache[0]["recurrent_state"].requires_grad
    cache.detach()
    assert not cache[0]["recurrent_state"].requires_grad
    assert [*cache] == [cache[0]]
    assert cache.get_seq_length() == 4
    cache.reset()
    assert (len(cache), cache.get_seq_length()) == (0, 0)


def test_cache_needs_layer_idx():
    with pytest.raises(ValueError, match=r"expected layer_idx to be an int .* got None"):
        make_layer()(make_x(), past_key_values=GLACache())


def recurrences(calls):
    return [name for name in calls.names() if name.startswith(("chunk_gla", "recurrent_gla"))]


@with_options
def test_decoding_takes_the_recurrence(options):
    layer, x, cache = make_layer(layer_idx=0, **options).eval(), make_x(T=40), GLACache()
    with torch.no_grad(), Calls() as calls:
        pieces = [
            layer(piece, past_key_values=cache, use_cache=True)[0]
            for piece in x.split([20, 1, 1, 16, 2], 1)
        ]
    assert_close(torch.cat(pieces, 1), composed_with(options, layer, x)[0], 1e-12)
    assert recurrences(calls) == [
        "chunk_gla_fwd",
        *["recurrent_gla_fwd"] * 2,
        *["chunk_gla_fwd"] * 2,
    ]
    with Calls() as calls:
        layer(x[:, :1], past_key_values=cache)
        with torch.no_grad(), batch_invariant():
            layer(x[:, :1], past_key_values=cache)
    assert recurrences(calls) == ["chunk_gla_fwd"] * 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_training_recomputes_what_it_computed(use_reentrant):
    """Reentrant checkpointing runs forward without a gradient, then again with one."""
    layer, x = make_layer(layer_idx=0), make_x(T=1).requires_grad_()
    cache = layer(make_x(seed=2), None, GLACache(), use_cache=True)[2]
    cache.detach()

    def segment(y):
        return layer(y, past_key_values=cache)[0]

    leaves = [x, *layer.parameters()]
    y = segment(x)
    expected = torch.autograd.grad(y.square().sum(), leaves)
    with Calls() as calls:
        recomputed = checkpoint(segment, x, use_reentrant=use_reentrant)
        assert torch.equal(recomputed, y)
        recomputed.square().sum().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, gradient)
    assert recurrences(calls) == ["chunk_gla_fwd"] * 2 + ["chunk_gla_bwd"]


@torch.no_grad()
def test_batch_invariant_bits_of_one_token():
    """Products of small integers are exact, so that no bit depends on how the projections add."""
    layer = make_layer(torch.float32, layer_idx=0).eval()
    for parameter in layer.parameters():
        parameter.round_()
    layer.o_proj = torch.nn.Identity()
    x = (4 * make_x(B=3, T=1, dtype=torch.float32)).round()
    states = torch.randn(3, layer.num_heads, layer.head_v_dim, layer.head_k_dim)

    def bits(rows, mask=None):
        cache = GLACache()
        cache.update(layer_idx=0, recurrent_state=states[rows])
        y = layer(x[rows], mask, cache, use_cache=True)[0]
        return y, cache[0]["recurrent_state"]

    with batch_invariant():
        whole, whole_states = bits(slice(0, 3))
        masked, masked_states = bits(slice(0, 3), torch.tensor([[1], [0], [1]]))
        for row in (0, 2):
            alone, alone_state = bits(slice(row, row + 1))
            for y, state in ((whole, whole_states), (masked, masked_states)):
                assert torch.equal(y[row], alone[0])
                assert torch.equal(state[row], alone_state[0])
    assert (masked[1] == 0).all() and torch.equal(masked_states[1], states[1])
