"""SwiGLU for its tests: inputs, the truth, and what is measured of results."""

import pytest
import torch
import torch.nn.functional as F
from common import DTYPES
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from norm_inputs import BOUND, laid_out, normal
from torch._dynamo.backends.common import aot_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
with_bias = pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])


def exact(gate, up, weight=None, bias=None):
    """By the definitions."""
    y = gate / (1 + (-gate).exp()) * up
    return y if weight is None else F.linear(y, weight, bias)


def plain(gate, up, weight=None, bias=None):
    y = F.silu(gate) * up
    return y if weight is None else F.linear(y, weight, bias)


def make(shape, device, dtype, layout=None):
    """gate, up and the gradient of their product; with a layout the shape is [B, T, H, D]."""
    inputs = [normal(*shape, seed=i, device=device, dtype=dtype) for i in (1, 2, 3)]
    return inputs if layout is None else [laid_out(t, layout) for t in inputs]


def make_linear(shape, N, device, dtype, layout=None, biased=False):
    """gate, up, weight and perhaps a bias, and the gradient of the result."""
    *inputs, _ = make(shape, device, dtype, layout)
    of = {"device": device, "dtype": dtype}
    inputs.append(normal(N, shape[-1], seed=4, **of) / shape[-1] ** 0.5)
    if biased:
        inputs.append(normal(N, seed=5, **of))
    return inputs, normal(*shape[:-1], N, seed=6, **of)


def results(function, inputs, dy):
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, dy)]


def errors(found, expected):
    """Of each relative to the root mean square of the expected."""
    return [
        ((got.double() - want).norm() / want.norm().clamp_min(1e-300)).item()
        for got, want in zip(found, expected, strict=True)
    ]


def check(function, inputs, dy, factor=1.0):
    dtype = inputs[0].dtype
    found = results(function, inputs, dy)
    expected = results(exact, [t.double() for t in inputs], dy.double())
    for got, of in zip(found, [dy, *inputs], strict=True):
        assert got.dtype == dtype and got.shape == of.shape and got.is_contiguous()
    for error in errors(found, expected):
        assert error < factor * BOUND[dtype]


def kept(call):
    """What autograd saves in a call, without what it saves twice."""
    saved = {}
    with saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        result = call()
    return result, saved


def compiled_forward(f, inputs, dy):
    """Results of f compiled by torch's partitioner alone, the targets of the graph of forward, and
    the shapes that it keeps for backward.
    """
    seen = []

    def forward(graph, _):
        (outputs,) = next(n for n in graph.graph.nodes if n.op == "output").args
        seen.append([n.target for n in graph.graph.nodes])
        seen.append([tuple(n.meta["val"].shape) for n in outputs[1:]])
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
    )
    found = results(torch.compile(f, fullgraph=True, backend=backend), inputs, dy)
    targets, shapes = seen
    return found, targets, shapes


class Calls(TorchDispatchMode):
    """The operators that are called, swiglu_bwd with whether it makes the product."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.made.append((name, args[3]) if name == "swiglu_bwd" else name)
        return function(*args, **(kwargs or {}))
