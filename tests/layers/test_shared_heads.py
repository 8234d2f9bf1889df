"""The layer with fewer heads of k, v and gk than of q: no copy of them is made, in any mode."""

import pytest
import torch
from dispatch import Calls
from models import make_layer, make_x

from gla_ext.cache import GLACache

SHARED = {"num_heads": 4, "num_kv_heads": 2, "layer_idx": 0}
REPEATS = {
    *("repeat", "repeat_interleave", "expand", "clone", "copy_", "index_select", "index", "gather"),
    *("cat", "stack"),
}


def assert_in_place(calls: Calls, operator: str) -> None:
    """One call of the operator, on what the projections wrote: two heads, and no memory more."""
    assert not REPEATS.intersection(calls.names())
    (arguments,) = calls.arguments(operator)
    for t in arguments[1:4]:
        assert t.shape[2] == 2
        assert t.untyped_storage().nbytes() == t.numel() * t.itemsize


@pytest.mark.parametrize(
    "mode, operator",
    [("chunk", "chunk_gla_fwd"), ("fused_recurrent", "recurrent_gla_fwd")],
)
@pytest.mark.parametrize("training", [False, True])
def test_whole_sequences(mode, operator, training):
    layer, x = make_layer(mode=mode, **SHARED).train(training), make_x()
    layer.batch_projections = False  # together, k and v lie among each token's q and gate
    with torch.set_grad_enabled(training), Calls() as calls:
        layer(x)
    assert_in_place(calls, operator)


@pytest.mark.parametrize("in_place", [False, True])
@torch.no_grad()
def test_a_decoded_token(in_place):
    layer, x = make_layer(**SHARED).eval(), make_x(T=6)
    cache = GLACache()
    cache.in_place = in_place
    layer(x[:, :5], past_key_values=cache, use_cache=True)
    with Calls() as calls:
        y = layer(x[:, 5:], past_key_values=cache, use_cache=True)[0]
    assert_in_place(calls, "recurrent_gla_step_" if in_place else "recurrent_gla_fwd")
    torch.testing.assert_close(y, layer(x)[0][:, 5:])
