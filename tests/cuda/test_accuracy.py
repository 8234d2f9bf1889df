"""The accuracy table: errors of every output and gradient against fp64 on CUDA.

Head sizes, lengths and gate strengths of training, each bound by `gla_ext.selftest`'s table. The
worst over the shapes is printed at the end of the run, for csrc/cuda/ACCURACY.md.
"""

import dataclasses

import pytest
import recurrence
import torch
from common import cancelling_terms, exact_by_chunks, ours
from large import large_inputs
from recurrence import CHUNKED_BF16, chunked, make_recurrence
from torch.nn.functional import logsigmoid

from gla_ext.selftest import TF32_TOLERANCE, relative_error, tolerance

pytestmark = pytest.mark.cuda

# Row i of the batch has the i-th gates: logsigmoid(N(0, 1)) / n, or at 1 with 30 % resets.
GATES = {"n = 0.1": 0.1, "n = 1": 1.0, "n = 4": 4.0, "n = 16": 16.0, "n = 64": 64.0, "resets": 1.0}
SHAPES = [  # T, K, V
    (4096, 64, 64),
    (4096, 128, 256),
    (4096, 256, 128),
    (4096, 256, 256),
    (4095, 60, 100),
    (4096, 100, 60),
    (2049, 64, 256),
    (1000, 128, 128),
    (130, 100, 256),
]
FORMATS = [  # name, dtype, products
    ("fp32", torch.float32, "ieee"),
    ("fp32, tf32 allowed", torch.float32, "tf32"),
    ("bf16", torch.bfloat16, "ieee"),
    ("fp16", torch.float16, "ieee"),
]


VALUE_GATED = [(1000, 64, 64), (1000, 128, 256), (999, 60, 100)]  # with gates on values too


def gates_of_rows(like: torch.Tensor, seed: int) -> torch.Tensor:
    """A row of the batch for each of `GATES`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    g = logsigmoid(torch.randn(like.shape, generator=generator, device="cuda"))
    g /= torch.tensor([*GATES.values()], device="cuda").view(-1, 1, 1, 1)
    chance = torch.rand(g[-1].shape, generator=generator, device="cuda")
    g[-1].masked_fill_(chance < 0.3, -torch.inf)
    return g.to(like.dtype)


@pytest.fixture
def accuracy_of(accuracy):
    """A function that allows a call products in tf32 or not, measures the results, and says which
    are wrong.
    """
    before = torch.get_float32_matmul_precision()

    def measure(name, products, call, x, expected, bound, rounding=lambda quantity, row: 0.0):
        torch.set_float32_matmul_precision("high" if products == "tf32" else "highest")
        wrong = []
        for quantity, value in call(x).items():
            allowed = TF32_TOLERANCE if products == "tf32" else bound(quantity)
            for row, gates in enumerate(GATES):
                truth = expected[quantity][row]
                error = relative_error(value[row], truth)
                key = (name, gates), quantity
                accuracy[key] = error if error != error else max(accuracy.get(key, 0.0), error)
                more = rounding(quantity, row) / truth.square().mean().sqrt().item()
                if not error <= allowed + more:
                    wrong.append(
                        f"{gates}: {quantity} is off by {error:.1e}, allowed {allowed:.1e}"
                    )
        return wrong

    yield measure
    torch.set_float32_matmul_precision(before)


by_format = pytest.mark.parametrize("name, dtype, products", FORMATS, ids=[x for x, *_ in FORMATS])


@by_format
@pytest.mark.parametrize("T, K, V", SHAPES)
def test_accuracy(T, K, V, name, dtype, products, path, accuracy_of):
    name += ", steps" if path == "steps" else ""
    x = large_inputs(len(GATES), T, 2, K, V, dtype, states=True)
    x = dataclasses.replace(x, g=gates_of_rows(x.g, 1))
    expected = exact_by_chunks(x)
    assert not accuracy_of(name, products, ours, x, expected, lambda q: tolerance(q, dtype))


@by_format
@pytest.mark.parametrize("T, K, V", VALUE_GATED)
def test_accuracy_of_gates_on_values(T, K, V, name, dtype, products, accuracy_of):
    x = make_recurrence(len(GATES), T, 2, K, V, dtype=dtype, device="cuda")
    x = dataclasses.replace(x, gk=gates_of_rows(x.gk, 1), gv=gates_of_rows(x.gv, 2))
    expected = recurrence.exact(x)

    def bound(quantity):
        return CHUNKED_BF16 if dtype == torch.bfloat16 else tolerance(quantity, dtype)

    def rounding(quantity, row):
        terms = cancelling_terms(quantity, x, expected, slice(row, row + 1))
        return 8 * torch.finfo(torch.float32).eps * terms

    name += ", gv"
    assert not accuracy_of(name, products, chunked, x, expected, bound, rounding)
