"""What the tests share: seeded inputs, the truth to compare with, one comparator, named shapes.

The tolerance table is `gla_ext.selftest`'s, so that tests and users hold the operators to the same.

A test may ask for equal bits for one of these reasons. In tests/operators and tests/cuda it is the
first; elsewhere the file says which, unless it is plain:
- own sums: gla_ext's kernels add up in an order that no other row, place, stride or thread changes
  (on CUDA within one plan; under `batch_invariant` in all batches).
- the same calls: shapes and strides are the same, or at least the products are.
- tokens: the largest logit leads the next by much more than rounding.
- moved: nothing is computed.
A BLAS may round otherwise with other shapes, at another row, or in a compiler's graph. torch's sums
may over other shapes. Such results are compared by `assert_close`.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from gla_ext import chunk_gla, reference
from gla_ext.selftest import QUANTITIES, tolerance

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CUDA_DTYPES = DTYPES[1:]  # no fp64

# B, T, H, K, V; benchmarks use the same names.
SHAPES = {
    "one token": (2, 1, 3, 5, 4),
    "under a sub-chunk": (1, 15, 3, 60, 100),
    "a sub-chunk": (2, 16, 1, 7, 3),
    "under a chunk": (1, 63, 3, 33, 20),
    "a chunk": (2, 64, 1, 16, 72),
    "over a chunk": (1, 65, 3, 100, 33),
    "over two chunks": (2, 130, 3, 20, 28),
    "scalar head": (1, 130, 1, 1, 1),
    "long": (1, 1000, 1, 24, 40),
    "train": (4, 2048, 4, 64, 128),
}
PACKED_LENGTHS = (5, 0, 64, 1, 0, 70, 16)  # with a tail of 9 tokens, 165 in all
BAD_OFFSETS = {  # as many, of 165 tokens; on CUDA, where nobody reads them on the host
    "decreasing": [0, 100, 50, 120, 20, 165, 3, 165],
    "more chunks than there is room for": [0, 165, 0, 165, 0, 165, 0, 165],
    "negative": [0, -5, 64, 60, 80, -165, 100, 165],
    "first not 0": [7, 20, 64, 65, 80, 90, 100, 165],
    "beyond T": [0, 64, 128, 166, 1000, 5000, 100_000, 1_000_000],
    "last beyond T": [0, 10, 20, 30, 40, 50, 60, 229],
    "extreme": [0, 2**31 - 1, -(2**31), 2**31 - 1, 0, -(2**31), 165, 2**31 - 1],
    "all the last token": [164] * 8,
    "all negative": [-1] * 8,
}

# Gates are logsigmoid(N(0, 1)) times the number: 0 none, .1 and 1 the whole-chunk reference (at 1
# some channels are over its range), 2 the sub-chunks, 10 the blocks element by element; "reset" has
# 30 % -inf.
GATES = (0.0, 0.1, 1.0, 2.0, 10.0, "reset")


class Tensors:
    """The base of a dataclass of tensors."""

    def map(self, function) -> "Tensors":
        """`function` applied to every floating-point tensor."""
        return type(self)(
            **{
                name: function(x) if x is not None and x.is_floating_point() else x
                for name, x in vars(self).items()
            }
        )

    def double(self) -> "Tensors":
        return self.map(lambda x: x.double().contiguous())


@dataclasses.dataclass(frozen=True)
class Inputs(Tensors):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    do: Tensor
    initial_state: Tensor | None
    dht: Tensor | None
    cu_seqlens: Tensor | None

    def select(self, n: int) -> "Inputs":
        """Sequence n alone."""
        if self.cu_seqlens is None:
            return self.map(lambda x: x[n : n + 1])
        start, end = self.cu_seqlens[n : n + 2].tolist()
        tokens = {name: getattr(self, name)[:, start:end] for name in ("q", "k", "v", "g", "do")}
        states = {name: getattr(self, name) for name in ("initial_state", "dht")}
        states = {name: x if x is None else x[n : n + 1] for name, x in states.items()}
        return Inputs(**tokens, **states, cu_seqlens=None)


def make_inputs(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    dtype: torch.dtype = torch.float32,
    gate: float | str = 1.0,
    gate_dtype: torch.dtype | None = None,
    states: bool = True,
    lengths: tuple[int, ...] | None = None,
    layout: str = "contiguous",
    size: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> Inputs:
    """Normal q, k, v, do and states, and gates as `GATES` says; the same for the same
    arguments, and on every device.

    Args:
        gate_dtype: of g. Default: `dtype`.
        states: whether there is an initial state and a gradient of the final one.
        lengths: of packed sequences; then B must be 1, and tokens beyond their sum are a tail.
        layout: of every tensor, see `relayout`.
        size: factor on q, k and v.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    g = logsigmoid(normal(B, T, H, K))
    if gate == "reset":
        g = g.masked_fill(torch.rand(g.shape, generator=generator) < 0.3, -torch.inf)
    else:
        g = g * gate
    q, k, v = (size * normal(B, T, H, D) for D in (K, K, V))
    do = normal(B, T, H, V)
    q, k, v, do = (relayout(x.to(dtype).to(device), layout) for x in (q, k, v, do))
    g = relayout(g.to(gate_dtype or dtype).to(device), layout)
    N = B if lengths is None else len(lengths)
    state_dtype = torch.promote_types(dtype, torch.float32)
    h0, dht = (normal(N, H, K, V).to(state_dtype).to(device) for _ in range(2))
    h0, dht = (relayout(x, layout) for x in (h0, dht))
    cu_seqlens = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).to(device)
    return Inputs(q, k, v, g, do, h0 if states else None, dht if states else None, cu_seqlens)


def copy_into(static, x):
    """The values of `x` into the tensors of `static`, two of `Inputs` or of another dataclass."""
    for name, value in vars(x).items():
        if value is not None:
            getattr(static, name).copy_(value)


LAYOUTS = ("contiguous", "transposed", "sliced", "misaligned", "expanded")


def relayout(x: Tensor, layout: str) -> Tensor:
    """`x` with other strides or another alignment; "expanded" repeats head 0 with stride 0."""
    match layout:
        case "contiguous":
            return x
        case "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "sliced":
            wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
            wide[..., 1::2] = x
            return wide[..., 1::2]
        case "misaligned":
            return torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape)
        case "expanded":
            heads = 2 if x.dim() == 4 and x.shape[1] > x.shape[2] else 1
            return x.narrow(heads, 0, 1).expand(x.shape)
    raise ValueError(layout)


GRADIENTS = {  # of leaves, in the order of arguments
    "q": "dq",
    "k": "dk",
    "v": "dv",
    **{gate: f"d{gate}" for gate in ("g", "gk", "gv")},
    "initial_state": "dh0",
}


def outputs_and_gradients(function, inputs: Tensors) -> dict[str, Tensor]:
    """o, final_state and every gradient of `function(q, k, v, g, initial_state)`, or with the gates
    gk and gv in g's place where the inputs have these.

    A gradient that autograd finds to be absent is zero.
    """
    leaves = {name: getattr(inputs, name) for name in GRADIENTS if hasattr(inputs, name)}
    leaves = {n: x if x is None else x.detach().requires_grad_() for n, x in leaves.items()}
    o, final_state = function(*leaves.values())
    outputs, upstream = [o], [inputs.do]
    if inputs.dht is not None:
        outputs, upstream = [o, final_state], [inputs.do, inputs.dht]
    wanted = {GRADIENTS[name]: x for name, x in leaves.items() if x is not None}
    gradients = torch.autograd.grad(
        outputs, list(wanted.values()), upstream, materialize_grads=True
    )
    results = {"o": o, "final_state": final_state} | dict(zip(wanted, gradients, strict=True))
    return {name: x.detach() for name, x in results.items()}


def ours(inputs: Inputs, **options) -> dict[str, Tensor]:
    """What `chunk_gla` makes of the inputs, gradients through autograd."""

    def function(q, k, v, g, initial_state):
        return chunk_gla(
            q,
            k,
            v,
            g,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=inputs.cu_seqlens,
            **options,
        )

    return outputs_and_gradients(function, inputs)


def exact(inputs: Inputs, scale: float | None = None) -> dict[str, Tensor]:
    """The truth: the recurrence and its autograd in fp64."""

    def function(q, k, v, g, initial_state):
        return reference.recurrence(q, k, v, g, scale, initial_state, inputs.cu_seqlens)

    return outputs_and_gradients(function, inputs.double())


def exact_by_chunks(inputs: Inputs, scale: float | None = None) -> dict[str, Tensor]:
    """The truth by the chunkwise form and its backward by hand, in fp64: as good as `exact` (see
    test_reference.py), and on a GPU, where a token of it costs a dozen launches, much faster.
    """
    x = inputs.double()
    operands = (x.q, x.k, x.v, x.g, scale, x.initial_state)
    forward = reference.chunked_forward(*operands, cu_seqlens=x.cu_seqlens)._asdict()
    backward = reference.chunked_backward(x.do, *operands, x.dht, x.cu_seqlens)._asdict()
    results = forward | backward
    names = QUANTITIES if inputs.initial_state is not None else QUANTITIES[:-1]
    return {name: results[name] for name in names}


def assert_close(actual: Tensor, expected: Tensor, rtol: float, atol: float = 0.0, name: str = ""):
    """Same shape, NaN in the same places, and RMS(error) <= rtol * RMS(expected) + atol."""
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, not {expected.shape}"
    if not actual.numel():
        return
    actual, expected = actual.detach().double(), expected.detach().double()
    for what, test in (("NaN", torch.isnan), ("inf", torch.isinf)):
        wrong = test(actual) != test(expected)
        assert not wrong.any(), (
            f"{name}: {what} wrong at {wrong.sum()} places, first {wrong.nonzero()[0].tolist()}"
        )
    finite = expected.isfinite()
    difference = torch.where(finite, actual - expected, 0.0).abs()
    error = difference.square().mean().sqrt().item()
    size = torch.where(finite, expected, 0.0).square().mean().sqrt().item()
    worst = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    assert error <= rtol * size + atol, (
        f"{name}: relative RMS error {error / max(size, 1e-300):.2e}, allowed {rtol:.2e} "
        f"(+ {atol:.1e} absolute); worst at {worst}: {actual[worst]:.9g}, not {expected[worst]:.9g}"
    )


def assert_results_close(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    inputs: Tensors,
    sizes: dict[str, Tensor] | None = None,
    bf16: float | None = None,
):
    """Every quantity within the table's bound for its dtype, relative to `sizes` where given.

    The bounds are for many numbers: the RMS of a few scatters, by one over the root of their count.
    Allowed on top: what is too small for the accumulation dtype may be zero, and `cancelling_terms`
    keep their rounding.

    Args:
        bf16: bound where a dtype is bf16. Default: the table's.
    """
    dtype = inputs.q.dtype
    accumulation = torch.finfo(torch.promote_types(dtype, torch.float32))
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype == result_dtype(name, inputs), name
        bound = max(tolerance(name, t) for t in (value.dtype, dtype))
        if bf16 is not None and torch.bfloat16 in (value.dtype, dtype):
            bound = bf16
        bound *= 1 + 3 / max(value.numel(), 1) ** 0.5
        atol = accumulation.tiny + 8 * accumulation.eps * cancelling_terms(name, inputs, expected)
        if sizes is not None:
            atol += bound * sizes[name].square().mean().nan_to_num().sqrt().item()
        assert_close(value, expected[name], bound, atol, name)


def result_dtype(name: str, inputs: Tensors) -> torch.dtype:
    if name.startswith("dg"):
        return getattr(inputs, name[1:]).dtype
    state = torch.promote_types(inputs.q.dtype, torch.float32)
    return state if name in ("final_state", "dh0") else inputs.q.dtype


OF_KEYS = (("q", "dq"), ("k", "dk"))
TERMS = {"dg": OF_KEYS, "dgk": OF_KEYS, "dgv": (("do", "o"), ("v", "dv"))}


def cancelling_terms(
    name: str, inputs: Tensors, expected: dict[str, Tensor], row: slice = slice(None)
) -> float:
    """The size (RMS) of the terms of which the gradient of a gate is the difference; 0 of others.

    Such a gradient keeps the rounding of its terms in the accumulation dtype.
    """
    size = 0.0
    for factor, product in TERMS.get(name, ()):
        term = expected[product][row] * getattr(inputs, factor)[row].double()
        size += term.square().mean().nan_to_num().sqrt().item()
    return size


def raises(error: type[Exception], sentence: str):
    """That the body raises `error` with a message that begins so."""
    return pytest.raises(error, match="^" + re.escape(sentence))


def raises_exactly(error: type[Exception], sentence: str):
    """That the body raises `error` with this message."""
    return pytest.raises(error, match="^" + re.escape(sentence) + "$")


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]):
    for name, value in actual.items():
        different = value != expected[name]
        assert torch.equal(value, expected[name]), f"{name}: {int(different.sum())} bits differ"


def assert_graph_replays(function, static, cases):
    """A CUDA graph of function(static) gives the bits of function(case), with the data of each case
    in turn in `static`, and leaves nothing unwritten.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = function(static)
    for case in cases:
        copy_into(static, case)
        for x in results.values():
            x.fill_(torch.nan)
        graph.replay()
        assert_same_bits(results, function(case))


def count_differences(results: dict[str, Tensor], expected: dict[str, Tensor]) -> Tensor:
    """Tensors with a different bit, counted on the device."""
    integers = {2: torch.int16, 4: torch.int32}
    different = [
        (x.view(integers[x.itemsize]) != expected[name].view(integers[x.itemsize])).any()
        for name, x in results.items()
    ]
    return torch.stack(different).sum()


def run_python(code: str, **environment: str) -> str:
    """The standard output of `code` in a fresh interpreter at the repository's root."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
