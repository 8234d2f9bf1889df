"""The layer with fewer heads of k, v and gk than of q: no copy of them is made, in any mode."""

import pytest
import torch
from models import make_layer, make_x
from torch.utils._python_dispatch import TorchDispatchMode

from gla_ext.cache import GLACache

aten, ops = torch.ops.aten, torch.ops.gla_ext
SHARED = {"num_heads": 4, "num_kv_heads": 2, "layer_idx": 0}
REPEATS = {
    *(aten.repeat.default, aten.repeat_interleave.self_int, aten.repeat_interleave.self_Tensor),
    *(aten.expand.default, aten.clone.default, aten.copy_.default, aten.index_select.default),
    *(aten.index.Tensor, aten.gather.default, aten.cat.default, aten.stack.default),
}


RECURRENCES = {
    *(ops.chunk_gla_fwd.default, ops.recurrent_gla_fwd.default, ops.recurrent_gla_step_.default),
}


class Operands(TorchDispatchMode):
    """The operators called, and the k, v and gk of the recurrences."""

    def __init__(self):
        super().__init__()
        self.called, self.operands = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.append(function)
        if function in RECURRENCES:
            self.operands.append(args[1:4])
        return function(*args, **(kwargs or {}))


def assert_in_place(calls: Operands, operator) -> None:
    """One call of the operator, on what the projections wrote: two heads, and no memory more."""
    assert calls.called.count(operator) == 1
    assert not REPEATS.intersection(calls.called)
    ((k, v, gk),) = calls.operands
    for t in (k, v, gk):
        assert t.shape[2] == 2
        assert t.untyped_storage().nbytes() == t.numel() * t.itemsize


def exported_targets(layer, x) -> list:
    program = torch.export.export(layer, (x,)).run_decompositions()
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    operators = [n for n in calls if n.target is ops.chunk_gla_fwd.default]
    assert [n.meta["val"].shape[2] for n in operators[0].args[:4]] == [layer.num_heads] + 3 * [
        layer.num_kv_heads
    ]
    return [node.target for node in calls]


def test_no_repeats_in_the_exported_graph():
    """Shared heads add nothing: the graph has the operators that it has without."""
    x = make_x(dtype=torch.float32)
    shared = exported_targets(make_layer(torch.float32, **SHARED), x)
    assert not REPEATS.intersection(shared)
    assert shared == exported_targets(make_layer(torch.float32, num_heads=4), x)


@pytest.mark.parametrize(
    "mode, operator",
    [("chunk", ops.chunk_gla_fwd.default), ("fused_recurrent", ops.recurrent_gla_fwd.default)],
)
@pytest.mark.parametrize("training", [False, True])
def test_whole_sequences(mode, operator, training):
    layer, x = make_layer(mode=mode, **SHARED).train(training), make_x()
    layer.batch_projections = False  # together, k and v lie among each token's q and gate
    with torch.set_grad_enabled(training), Operands() as calls:
        layer(x)
    assert_in_place(calls, operator)


@pytest.mark.parametrize("in_place", [False, True])
@torch.no_grad()
def test_a_decoded_token(in_place):
    layer, x = make_layer(**SHARED).eval(), make_x(T=6)
    cache = GLACache()
    cache.in_place = in_place
    layer(x[:, :5], past_key_values=cache, use_cache=True)
    with Operands() as calls:
        y = layer(x[:, 5:], past_key_values=cache, use_cache=True)[0]
    step = ops.recurrent_gla_step_.default if in_place else ops.recurrent_gla_fwd.default
    assert_in_place(calls, step)
    torch.testing.assert_close(y, layer(x)[0][:, 5:])
