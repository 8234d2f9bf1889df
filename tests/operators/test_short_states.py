"""Initial states of 16 bits: every function computes as from the same numbers in float32."""

import pytest
import torch
from common import PACKED_LENGTHS, Inputs, assert_same_bits, make_inputs

from gla_ext import batch_invariant, check_inputs, chunk_gla, fused_recurrent_gla, ops

by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
_HEADS = {"layer_idx": 1, "num_layers": 4}
FUNCTIONS = {
    "chunk_gla": lambda x, **o: chunk_gla(x.q, x.k, x.v, x.g, **o),
    "fused_recurrent_gla": lambda x, **o: fused_recurrent_gla(x.q, x.k, x.v, x.g, **o),
    "chunk_simple_gla": lambda x, **o: ops.chunk_simple_gla(x.q, x.k, x.v, x.g[..., 0], **o),
    "fused_recurrent_simple_gla": lambda x, **o: ops.fused_recurrent_simple_gla(
        x.q, x.k, x.v, x.g[..., 0], **o
    ),
    "chunk_retention": lambda x, **o: ops.chunk_retention(x.q, x.k, x.v, **o),
    "fused_recurrent_retention": lambda x, **o: ops.fused_recurrent_retention(x.q, x.k, x.v, **o),
    "chunk_lightning_attn": lambda x, **o: ops.chunk_lightning_attn(x.q, x.k, x.v, **_HEADS, **o),
    "fused_recurrent_lightning_attn": lambda x, **o: ops.fused_recurrent_lightning_attn(
        x.q, x.k, x.v, **_HEADS, **o
    ),
    "chunk_linear_attn": lambda x, **o: ops.chunk_linear_attn(x.q, x.k, x.v, normalize=False, **o),
    "fused_recurrent_linear_attn": lambda x, **o: ops.fused_recurrent_linear_attn(
        x.q, x.k, x.v, **o
    ),
}
by_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
V_FIRST = [FUNCTIONS[name] for name in ("chunk_gla", "fused_recurrent_gla", "chunk_simple_gla")]


def run(function, x: Inputs, state, **options):
    """o, the final state, and the state's gradient."""
    leaf = state.detach().requires_grad_()
    o, final_state = function(x, initial_state=leaf, output_final_state=True, **options)
    dht = x.dht if final_state.shape == x.dht.shape else x.dht.mT
    (dh0,) = torch.autograd.grad([o, final_state], leaf, [x.do, dht.to(final_state.dtype)])
    return {"o": o.detach(), "final_state": final_state.detach(), "dh0": dh0}


def check(function, x: Inputs, dtype, **options):
    state = x.initial_state.to(dtype)
    if options.get("state_v_first"):
        state = state.mT
    found, wide = run(function, x, state, **options), run(function, x, state.float(), **options)
    assert found["final_state"].dtype == torch.float32
    assert found["dh0"].dtype == dtype
    assert_same_bits(found, wide | {"dh0": wide["dh0"].to(dtype)})


@by_function
@by_dtype
@pytest.mark.parametrize("of_q", [torch.bfloat16, torch.float32], ids=str)
def test_as_from_float32(device, function, dtype, of_q):
    check(function, make_inputs(2, 70, 2, 16, 24, dtype=of_q, device=device), dtype)


@by_function
@by_dtype
def test_packed(device, function, dtype):
    x = make_inputs(1, 165, 2, 16, 24, lengths=PACKED_LENGTHS, device=device)
    check(function, x, dtype, cu_seqlens=x.cu_seqlens)


@pytest.mark.parametrize("function", V_FIRST)
@by_dtype
def test_state_layout_and_batch_invariance(device, function, dtype):
    x = make_inputs(2, 70, 2, 16, 24, device=device)
    with batch_invariant():
        check(function, x, dtype, state_v_first=True)


@by_dtype
def test_normalized_linear_attention(device, dtype):
    x = make_inputs(2, 70, 2, 16, 24, device=device)
    state, z = x.initial_state.to(dtype), x.k[:, :1].abs().to(dtype)
    found, wide = (
        ops.chunk_linear_attn(x.q.abs(), x.k.abs(), x.v, None, pair, True)
        for pair in ((state, z), (state.float(), z.float()))
    )
    assert torch.equal(found[0], wide[0])
    assert all(map(torch.equal, found[1], wide[1]))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_compiled(device, function):
    x = make_inputs(2, 70, 2, 16, 24, device=device)

    def call(state):
        return function(x, initial_state=state, output_final_state=True)

    leaf = x.initial_state.bfloat16().requires_grad_()
    o, final_state = torch.compile(call, backend="aot_eager", fullgraph=True)(leaf)
    (dh0,) = torch.autograd.grad([o, final_state], leaf, [x.do, x.dht])
    found = {"o": o.detach(), "final_state": final_state.detach(), "dh0": dh0}
    assert_same_bits(found, run(function, x, leaf))


def test_vmap(device):
    x = make_inputs(2, 20, 2, 16, 24, device=device)
    states = torch.stack([x.initial_state, -x.initial_state]).bfloat16()

    def final_state(state):
        return chunk_gla(x.q, x.k, x.v, x.g, initial_state=state, output_final_state=True)[1]

    found = torch.func.vmap(final_state)(states)
    for state, one in zip(states, found, strict=True):
        torch.testing.assert_close(one, final_state(state))


def test_checked_values(device):
    x = make_inputs(2, 20, 2, 16, 24, device=device)
    state = x.initial_state.bfloat16()
    check_inputs(x.q, x.k, x.v, x.g, initial_state=state)
    state[0, 1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match="initial_state to hold finite numbers, got 1 of 1536"):
        check_inputs(x.q, x.k, x.v, x.g, initial_state=state)
