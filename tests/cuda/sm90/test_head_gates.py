"""One gate a head, or none, on Hopper: the sweeps of csrc/cuda/sm90/head_gates."""

import dataclasses

import pytest
import torch
from common import (
    GATES,
    LAYOUTS,
    Inputs,
    assert_close,
    assert_results_close,
    assert_same_bits,
    exact_by_chunks,
    relayout,
)
from fused import BF16, UNEVEN_LENGTHS
from plans import one_pass
from simple_inputs import make_simple, simple, spread

from gla_ext import _C, batch_invariant, chunk_gla, chunk_linear_attn
from gla_ext.ops import chunk_simple_gla

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

SIZES = [  # every kernel: one to four tiles of keys, of which a gradient's are the values
    (65, 8, 64),
    (130, 64, 128),
    (64, 72, 136),
    (130, 128, 256),
    (65, 192, 8),
    (130, 256, 200),
]
GRADIENTS = ("dq", "dk", "dv", "dh0")
in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")


def inputs(T, K, V, gate=0.1, B=2, H=3, **options) -> Inputs:
    options = {"gate_dtype": torch.float32} | options
    return make_simple(B, T, H, K, V, dtype=BF16, gate=gate, device="cuda", **options)


def kernels(x: Inputs, backward: bool, gate_gradient=False, **options) -> list[str]:
    plan = _C.plan(
        *x.q.shape, x.v.shape[-1], dtype="bfloat16", head_gated=True, gate_gradient=gate_gradient,
        N=None if x.cu_seqlens is None else len(x.cu_seqlens) - 1, device="cuda",
        processors=torch.cuda.get_device_properties().multi_processor_count, **options,
    )  # fmt: skip
    return [name for name in one_pass(plan, backward)["kernels"] if not name.startswith("map")]


def constant(x: Inputs, operator=chunk_simple_gla, **options) -> dict[str, torch.Tensor]:
    """What the operator makes of the inputs, and the gradients of all but the gate."""
    leaves = [x.q, x.k, x.v, x.initial_state]
    leaves = [t if t is None else t.detach().requires_grad_() for t in leaves]
    o, state = operator(
        *leaves[:3], x.g, initial_state=leaves[3], output_final_state=True,
        cu_seqlens=x.cu_seqlens, **options,
    )  # fmt: skip
    outputs = [o] if x.dht is None else [o, state]
    upstream = [x.do] if x.dht is None else [x.do, x.dht]
    leaves = [t for t in leaves if t is not None]
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    results = {"o": o.detach(), "final_state": state.detach()}
    return results | dict(zip(GRADIENTS, gradients, strict=False))


def truth(x: Inputs) -> dict[str, torch.Tensor]:
    expected = exact_by_chunks(spread(x.double()))
    return expected | {"dg": expected["dg"].sum(-1)}


def assert_like_truth(results, x):
    expected = truth(x)
    assert_results_close(results, {name: expected[name] for name in results}, x)


SWEEPS = {
    constant: ["query_grads", "key_grads", "value_grads"],
    simple: ["query_grads.and_dots", "key_grads.and_dots", "gate_grads", "value_grads"],
}
by_operator = pytest.mark.parametrize(
    "operator", [constant, simple], ids=["constant gate", "gradient of the gate"]
)


@in_nan
@by_operator
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T, K, V", SIZES)
def test_sizes(T, K, V, gate, operator):
    x = inputs(T, K, V, gate)
    sweeps = [f"head_gates.{name}" for name in SWEEPS[operator]]
    assert kernels(x, False) == ["head_gates.sums", "head_gates.forward"]
    assert kernels(x, True, operator is simple) == ["head_gates.sums", *sweeps]
    assert_like_truth(operator(x), x)


@in_nan
@by_operator
@pytest.mark.parametrize("absent", [("dht",), ("initial_state", "dht")], ids=str)
def test_without_states(absent, operator):
    x = dataclasses.replace(inputs(65, 128, 64), **dict.fromkeys(absent))
    assert_like_truth(operator(x), x)


PACKED = {  # of 695 tokens and 2400, with a tail
    "short": (UNEVEN_LENGTHS, 695, "reset"),
    "one long": ((1500, 0, 65, 3, 700), 2400, 0.1),
}


@in_nan
@by_operator
@pytest.mark.parametrize("lengths, T, gate", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("K, V", [(64, 64), (128, 136), (256, 72)])
def test_packed(K, V, lengths, T, gate, operator):
    x = inputs(T, K, V, gate, B=1, H=2, lengths=lengths)
    assert "head_gates.summaries.of_grads" in kernels(x, True, operator is simple)
    results = operator(x)
    assert_like_truth(results, x)
    for name in {"o", "dq", "dk", "dv", "dg"} & results.keys():
        assert not results[name][:, sum(lengths) :].any()


@in_nan
@pytest.mark.parametrize("gate", [0.1, "reset"])
@pytest.mark.parametrize("T, K, V", [(1900, 64, 64), (1300, 128, 136), (1300, 256, 72)])
def test_segments(T, K, V, gate):
    """Of a long sequence; the states that enter them are those of the gradients' sweeps too."""
    x = inputs(T, K, V, gate, B=1, H=2)
    summaries = ["head_gates.summaries", "head_gates.summaries.of_grads", "scan.both"]
    assert kernels(x, False)[1:3] == ["head_gates.summaries", "scan"]
    assert kernels(x, True)[1:4] == summaries
    assert_like_truth(constant(x), x)


@in_nan
@pytest.mark.parametrize(
    "T, K, V, gate",
    [
        *[(4096, 64, 64, gate) for gate in (1 / 64, 1 / 16, 0.25)],
        (2100, 64, 256, 0.25),
        pytest.param(260, 64, 128, 0.25, marks=pytest.mark.sanitizer),
        pytest.param(260, 72, 136, 0.25, marks=pytest.mark.sanitizer),
    ],
)
def test_gradient_of_the_gate_over_segments(T, K, V, gate):
    """Pairs that cross from one to another are as one sweep's: nothing adds up over many."""
    x = inputs(T, K, V, gate, B=1, H=1)
    assert "head_gates.summaries.of_grads" in kernels(x, True, True)
    assert_like_truth(simple(x), x)


@in_nan
def test_gradient_of_the_gate_over_many_chunks():
    """What passes from chunk to chunk, more of them than at once, with and without a last state."""
    x = inputs(64 * 35 + 9, 64, 64, 0.05, B=1, H=2)
    assert_like_truth(simple(x), x)
    x = dataclasses.replace(x, dht=None, g=x.g * 8)
    with batch_invariant():
        assert_like_truth(simple(x), x)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_gate_dtypes_and_shared_heads(dtype):
    x = inputs(130, 72, 136, 1.0, H=4, HK=2, gate_dtype=dtype)
    assert_like_truth(constant(x), x)
    results = simple(x)
    assert results["dg"].dtype == dtype and results["dg"].shape == x.g.shape
    assert_like_truth(results, x)


def test_gradient_of_gates_that_are_all_alike():
    """Decays of every token from e^-1 to e^-30: dg is what is left of much larger terms."""
    x = inputs(700, 64, 64, B=1, states=False)
    for strength in (1.0, 6.0, 12.0, 30.0):
        x = dataclasses.replace(x, g=torch.full_like(x.g, -strength))
        assert_like_truth(simple(x), x)


@in_nan
@by_operator
@pytest.mark.parametrize("layout", [*LAYOUTS, "one decay"])
def test_layouts(layout, operator):
    """Expanded are B and C of Mamba-2: one group's for all heads, in place. One decay of every
    token, g_gamma, has strides of 0.
    """
    x = inputs(130, 64, 128)
    if layout == "one decay":
        x = dataclasses.replace(x, g=x.g[:1, :1].expand(x.g.shape))
    else:
        x = x.map(lambda t: relayout(t, layout))
    assert_like_truth(operator(x), x)


def test_without_gates():
    x = inputs(130, 64, 128, 0.0)
    x = dataclasses.replace(x, g=torch.zeros_like(x.g))
    results = constant(dataclasses.replace(x, g=None))
    assert_like_truth(results, x)
    o, _ = chunk_linear_attn(x.q.abs(), x.k.abs(), x.v)
    q, k, v = x.q.double().abs(), x.k.double().abs(), x.v.double()
    scores = torch.einsum("bihk,bjhk->bhij", q, k).tril()
    expected = torch.einsum("bhij,bjhv->bihv", scores / scores.sum(-1, keepdim=True), v)
    assert_close(o, expected, 0.01)


@pytest.mark.parametrize("T", [130, 1300], ids=["whole", "segments"])
def test_states_that_lie_v_first(T):
    x = inputs(T, 72, 128, B=1, H=1)
    turned = {name: getattr(x, name).mT.contiguous() for name in ("initial_state", "dht")}
    results = constant(dataclasses.replace(x, **turned), state_v_first=True)
    expected = constant(x)
    for name in ("final_state", "dh0"):
        results[name] = results[name].mT
    assert_same_bits(results, expected)


def test_same_bits_alone_and_packed():
    x = inputs(695, 128, 128, B=1, lengths=UNEVEN_LENGTHS)
    with batch_invariant():
        together = constant(x)
        for n, (start, end) in enumerate(zip(x.cu_seqlens[:-1], x.cu_seqlens[1:], strict=True)):
            if start == end:
                continue
            alone = constant(x.select(n))
            own = {
                name: t[n : n + 1] if name in ("final_state", "dh0") else t[:, start:end]
                for name, t in together.items()
            }
            assert_same_bits(alone, own)


def test_nan_comes_out_from_its_token_on():
    x = inputs(130, 64, 128)
    x.g[0, 100, 1] = torch.nan
    o, state = chunk_gla(x.q, x.k, x.v, x.g, output_final_state=True)
    assert o[0, 100:, 1].isnan().all() and state[0, 1].isnan().all()
    o[0, 64:, 1] = 0
    assert o.isfinite().all()
