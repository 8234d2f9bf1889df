"""In `batch_invariant()` on CUDA a token's output has bits that depend on its past alone, in every
kernel of forward.
"""

import pytest
import torch
from common import CUDA_DTYPES, PACKED_LENGTHS, assert_close, tolerance
from past_alone import GATES, check_cuts, decode, make, run

from gla_ext import batch_invariant, chunk_gla, chunk_gla_, fused_recurrent_gla, plan

pytestmark = pytest.mark.cuda

BF16, FP32 = torch.bfloat16, torch.float32
CALLS = {  # on Hopper the kernels of bf16, else the steps; K, V, options of `make`
    "small": ("forward.small", 64, 64, {}),
    "few keys": ("forward.fused", 40, 136, {}),
    "few keys, fp32 gates": ("forward.fused", 64, 72, {"gate_dtype": FP32}),
    "fused": ("forward.fused", 72, 72, {}),
    "cluster": ("forward.cluster", 120, 136, {}),
    "prepared": ("prepare", 72, 72, {"gate_dtype": FP32}),
    "prepared, three tiles": ("prepare", 136, 72, {}),
    "prepared, four tiles": ("prepare", 200, 64, {}),
    "gates of heads": ("head_gates.forward", 72, 72, {"kind": "heads"}),
    "no gates": ("head_gates.forward", 40, 64, {"kind": "none"}),
}
STEPS = {"keys": {}, "keys and values": {"kind": "both"}, "values": {"kind": "values"}}
FEW_CUTS = (1, 41, 64, 105, 191)
by_gate = pytest.mark.parametrize("gate", GATES)
by_some_gates = pytest.mark.parametrize("gate", ["late", "over the limit"])
by_call = pytest.mark.parametrize("call", CALLS)


def on_gpu(tokens, state):
    return {name: x if x is None else x.cuda() for name, x in tokens.items()}, state.cuda()


def make_call(call, gate, **options):
    """Arguments that these kernels take on Hopper."""
    kernel, K, V, given = CALLS[call]
    gates = {"heads": {"head_gates": True}, "none": {"g": False}}.get(given.get("kind"), {})
    with batch_invariant():
        for_hopper = plan(
            1, 192, 2, K, V, gate_dtype=given.get("gate_dtype"), gpu=("9.0", 132), **gates
        )
    assert kernel in for_hopper.forward
    return on_gpu(*make(gate, BF16, K=K, V=V, **given, **options))


@by_gate
@by_call
def test_all_cuts(call, gate):
    check_cuts(*make_call(call, gate))


@pytest.mark.sanitizer
@by_some_gates
@by_call
def test_few_cuts(call, gate):
    check_cuts(*make_call(call, gate, HK=1), FEW_CUTS)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("kind", STEPS)
@by_gate
def test_all_cuts_in_the_steps(gate, kind, dtype):
    check_cuts(*on_gpu(*make(gate, dtype, **STEPS[kind])))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@by_some_gates
def test_few_cuts_in_the_steps(gate, dtype):
    check_cuts(*on_gpu(*make(gate, dtype, kind="both")), FEW_CUTS)


def check_decoding(tokens, state, *all_sizes):
    with batch_invariant():
        o, final_state = run(tokens, state)
    for sizes in all_sizes:
        found, left = decode(tokens, state, sizes)
        assert torch.equal(found, o)
        assert torch.equal(left, final_state)


@by_gate
@by_call
def test_decoding(call, gate):
    check_decoding(*make_call(call, gate, B=2), (1,), (3, 1, 64))


@pytest.mark.sanitizer
@by_some_gates
@by_call
def test_decoding_several_at_once(call, gate):
    check_decoding(*make_call(call, gate, T=128), (23, 1, 64))


@pytest.mark.sanitizer
@by_some_gates
@by_call
def test_packed_and_pool(call, gate):
    """Sequences that are packed, and go on in a pool, have the bits of each alone."""
    total, N = sum(PACKED_LENGTHS), len(PACKED_LENGTHS)
    tokens, state = make_call(call, gate, T=total + 9)  # a tail
    states = state.repeat(N, 1, 1, 1)
    cu_seqlens = torch.tensor([0, *PACKED_LENGTHS]).cumsum(0)
    packed = {"cu_seqlens": cu_seqlens.cuda()}
    pool = states.clone()
    with batch_invariant():
        o, final_states = chunk_gla(
            **tokens, initial_state=states, output_final_state=True, **packed
        )
        in_pool = chunk_gla_(**tokens, state=pool, **packed)
        assert torch.equal(in_pool, o) and torch.equal(pool, final_states)
        assert not o[:, total:].any()
        for n in range(N):
            first, end = cu_seqlens[n : n + 2].tolist()
            if end > first:
                found, left = run(tokens, state, first, end)
                assert torch.equal(found, o[:, first:end])
                assert torch.equal(left, final_states[n : n + 1])


@pytest.mark.sanitizer
@by_some_gates
@by_call
def test_later_tokens_are_not_seen(call, gate):
    """Other tokens after one, the largest and with resets, change nothing before them."""
    tokens, state = make_call(call, gate, T=128)
    with batch_invariant():
        o, _ = run(tokens, state)
        for cut in (5, 41, 63, 64, 90):
            other = {name: None if x is None else x.clone() for name, x in tokens.items()}
            for name, x in other.items():
                if x is not None:
                    x[:, cut:] = -torch.inf if name == "g" else torch.finfo(BF16).max
            assert torch.equal(run(other, state)[0][:, :cut], o[:, :cut])


@by_gate
@by_call
@pytest.mark.parametrize("size", [1.0, pytest.param(1e-2, marks=pytest.mark.sanitizer)])
def test_accuracy(size, call, gate):
    tokens, state = make_call(call, gate, T=150)
    tokens["q"] = size * tokens["q"]
    wide = {name: None if x is None else x.cpu().double() for name, x in tokens.items()}
    g = wide.pop("g")
    gk = g[..., None].expand_as(wide["k"]) if CALLS[call][3].get("kind") == "heads" else g
    expected = fused_recurrent_gla(
        **wide, gk=gk, initial_state=state.cpu().double(), output_final_state=True
    )
    with batch_invariant():
        found = run(tokens, state)
    for name, value, truth in zip(("o", "final_state"), found, expected, strict=True):
        assert_close(value.cpu(), truth, tolerance(name, BF16), name=name)


@pytest.mark.sanitizer
def test_gradients_are_those_of_the_other_mode():
    """Bit for bit: of forward's own operands nothing is left for backward."""
    tokens, _ = make_call("prepared", "late", T=192)  # the other mode keeps operands here
    results = []
    for mode in (False, True):
        leaves = {name: x.clone().requires_grad_() for name, x in tokens.items() if x is not None}
        with batch_invariant(mode):
            chunk_gla(**leaves)[0].backward(tokens["v"])
        results.append(leaves)
    for name, leaf in results[0].items():
        assert torch.equal(results[1][name].grad, leaf.grad), name
