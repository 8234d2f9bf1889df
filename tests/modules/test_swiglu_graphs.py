"""SwiGLU and its linear map compiled, exported, traced and on sharded tensors.

Equal bits (see common.py): the same calls.
"""

import math

import pytest
import torch
from common import assert_close
from norm_inputs import BOUND, normal
from swiglu_inputs import compiled_forward, errors, exact, make_linear, plain, results
from wrapped import Wrapped

from gla_ext.layers.swiglu import swiglu, swiglu_linear
from gla_ext.model import GLAMLP

ops = torch.ops.gla_ext


def test_compiled_it_is_the_operator_in_one_graph_for_many_lengths():
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    mlp = GLAMLP(8, 16)
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=backend)
    for T in (7, 5, 12):
        x = normal(2, T, 8, seed=1, dtype=torch.float32)
        assert_close(compiled(x), mlp(x), 1e-6)
    assert len(graphs) == 1
    assert ops.swiglu_linear.default in graphs[0]


def test_checks_of_plain_operations_make_no_graph_for_a_size():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    mapped = torch.vmap(swiglu_linear, (0, 0, None))
    compiled = torch.compile(mapped, fullgraph=True, dynamic=True, backend=backend)
    for T, D in ((7, 8), (5, 12), (12, 9)):
        inputs, _ = make_linear((2, T, D), 4, "cpu", torch.float32)
        torch.testing.assert_close(compiled(*inputs), plain(*inputs))
    assert len(graphs) == 1


def test_a_compiled_graph_keeps_no_product():
    """The partitioner sees through to the operators, and has one tensor less to keep."""
    kept_for_backward = {}
    inputs, dy = make_linear((2, 9, 40), 24, "cpu", torch.float32)
    expected = results(exact, [t.double() for t in inputs], dy.double())
    for f in (swiglu_linear, plain):
        found, targets, kept_for_backward[f] = compiled_forward(f, inputs, dy)
        assert (ops.swiglu_fwd.default in targets) == (f is swiglu_linear)
        assert ops.swiglu_linear.default not in targets
        assert max(errors(found, expected)) < BOUND[torch.float32]
    large = [t for t in kept_for_backward[swiglu_linear] if math.prod(t) == 2 * 9 * 40]
    assert len(large) == 2
    assert len(kept_for_backward[plain]) == len(kept_for_backward[swiglu_linear]) + 1


def test_inductor(device):
    compiled = torch.compile(swiglu_linear, fullgraph=True, dynamic=True)
    for T in (9, 12):
        inputs, dy = make_linear((T, 40), 24, device, torch.float32, biased=True)
        for got, want in zip(
            results(compiled, inputs, dy), results(swiglu_linear, inputs, dy), strict=True
        ):
            torch.testing.assert_close(got, want)


def test_compiled_autograd():
    inputs, dy = make_linear((9, 40), 24, "cpu", torch.float32, biased=True)
    expected = results(swiglu_linear, inputs, dy)[1:]
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = swiglu_linear(*leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        y.backward(dy)
    for leaf, wanted in zip(leaves, expected, strict=True):
        assert_close(leaf.grad, wanted, 1e-6)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_export(strict, grad):
    mlp, x = GLAMLP(8, 16), normal(2, 5, 8, seed=1, dtype=torch.float32)
    shapes = ({1: torch.export.Dim("T", min=2)},)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(mlp, (x,), dynamic_shapes=shapes, strict=strict)
    targets = [node.target for node in program.run_decompositions().graph.nodes]
    assert targets.count(ops.swiglu_fwd.default) == 1
    longer = normal(2, 9, 8, seed=1, dtype=torch.float32)
    torch.testing.assert_close(program.module()(longer), mlp(longer))


@pytest.mark.slow  # graphs/test_package.py has an MLP in its package
def test_aot_inductor(tmp_path):
    mlp, x = GLAMLP(8, 16), normal(2, 5, 8, seed=1, dtype=torch.float32)
    program = torch.export.export(mlp, (x,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), mlp(x))


def test_a_trace_keeps_the_operator():
    mlp, x = GLAMLP(8, 16), torch.randn(2, 5, 8)
    traced = torch.jit.trace(mlp, x)
    assert "gla_ext::swiglu_" in str(traced.inlined_graph)
    assert_close(traced(x), mlp(x), 1e-6)


def test_other_subclasses_take_plain_operations():
    (gate, up, weight), _ = make_linear((3, 8), 4, "cpu", torch.float32)
    assert torch.equal(swiglu(Wrapped(gate), up).inner, plain(gate, up))
    assert torch.equal(swiglu_linear(gate, Wrapped(up), weight).inner, plain(gate, up, weight))
    # In bf16 too, of which autograd keeps nothing wider.
    gate, up = gate.bfloat16(), up.bfloat16()
    assert torch.equal(swiglu(Wrapped(gate), up).inner, torch.nn.functional.silu(gate) * up)
