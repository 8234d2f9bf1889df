"""The accuracy table: errors of every output and gradient against fp64 on CUDA.

Head sizes, lengths and gate strengths of training, each bound by `gla_ext.selftest`'s table. The
worst over the shapes is printed at the end of the run, for csrc/cuda/ACCURACY.md.
"""

import dataclasses

import pytest
import torch
from common import Inputs, exact, exact_by_chunks, ours
from large import large_inputs

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


def inputs_of_all_gates(T: int, K: int, V: int, dtype: torch.dtype) -> Inputs:
    """A row of the batch for each of `GATES`, on CUDA."""
    x = large_inputs(len(GATES), T, 2, K, V, dtype, gate=1.0, states=True)
    g = x.g.float() / torch.tensor([*GATES.values()], device="cuda").view(-1, 1, 1, 1)
    generator = torch.Generator("cuda").manual_seed(1)
    chance = torch.rand(g[-1].shape, generator=generator, device="cuda")
    g[-1].masked_fill_(chance < 0.3, -torch.inf)
    return dataclasses.replace(x, g=g.to(dtype))


@pytest.fixture
def tf32_as_before():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("tf32_as_before")
@pytest.mark.parametrize("name, dtype, products", FORMATS, ids=[name for name, *_ in FORMATS])
@pytest.mark.parametrize("T, K, V", SHAPES)
def test_accuracy(T, K, V, name, dtype, products, path, accuracy):
    if path == "steps":
        name += ", steps"
    x = inputs_of_all_gates(T, K, V, dtype)
    expected = exact_by_chunks(x)
    torch.set_float32_matmul_precision("high" if products == "tf32" else "highest")
    results = ours(x)
    wrong = []
    for quantity, value in results.items():
        bound = TF32_TOLERANCE if products == "tf32" else tolerance(quantity, dtype)
        for row, gates in enumerate(GATES):
            error = relative_error(value[row], expected[quantity][row])
            key = (name, gates), quantity
            accuracy[key] = error if error != error else max(accuracy.get(key, 0.0), error)
            if not error <= bound:
                wrong.append(f"{gates}: {quantity} is off by {error:.1e}, allowed {bound:.1e}")
    assert not wrong, "; ".join(wrong)


def test_the_truth_is_the_recurrence():
    x = inputs_of_all_gates(500, 60, 100, torch.float32)
    truth = exact(x)
    for quantity, value in exact_by_chunks(x).items():
        assert relative_error(value, truth[quantity]) <= tolerance(quantity, torch.float64)


@pytest.mark.usefixtures("tf32_as_before")
def test_tf32_is_used_only_where_it_is_allowed():
    x = inputs_of_all_gates(200, 64, 64, torch.float32)
    exactly = ours(x)
    torch.set_float32_matmul_precision("high")
    assert relative_error(ours(x)["o"], exactly["o"]) <= TF32_TOLERANCE
    torch.set_float32_matmul_precision("highest")
    assert torch.equal(ours(x)["o"], exactly["o"])
