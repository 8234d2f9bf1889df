"""One gate a head on any GPU: the steps, the recurrence and decoding read or spread it."""

import pytest
import torch
from common import (
    CUDA_DTYPES,
    PACKED_LENGTHS,
    assert_graph_replays,
    assert_results_close,
    assert_same_bits,
    exact,
)
from recurrence import assert_verified
from simple_inputs import make_simple, recurrent, simple, spread

from gla_ext import (
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)

pytestmark = pytest.mark.cuda
by_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])


def inputs(T=70, K=20, V=28, lengths=None, **options):
    B, T = (2, T) if lengths is None else (1, 165)
    return make_simple(B, T, 2, K, V, lengths=lengths, device="cuda", **options)


@by_dtype
@by_packing
@pytest.mark.parametrize("gate", [1.0, "reset"])
def test_steps(dtype, lengths, gate, monkeypatch):
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    x = inputs(dtype=dtype, lengths=lengths, gate=gate)
    assert_results_close(simple(x), exact(x), x)


@by_dtype
@by_packing
def test_recurrence(dtype, lengths):
    """It reads the gate where it lies, strides of 0 included, as if it were spread."""
    x = inputs(dtype=dtype, lengths=lengths, gate="reset", HK=1)
    results = recurrent(x)
    assert_results_close(results, exact(x), x)
    wide = simple(spread(x), fused_recurrent_gla)
    del results["dg"], wide["dg"]
    assert_same_bits(results, wide)
    constant = x.g[:, :1].expand(x.g.shape)
    o, _ = fused_recurrent_gla(x.q, x.k, x.v, constant)
    assert torch.equal(o, fused_recurrent_gla(x.q, x.k, x.v, constant.contiguous())[0])


@by_dtype
@pytest.mark.parametrize("T", [1, 5])
def test_decoding_on_a_pool(dtype, T):
    x = inputs(T=T, K=32, V=64, HK=1, dtype=dtype)
    wide = spread(x)
    pool = torch.randn(4, 2, 32, 64, device="cuda")
    slots = torch.tensor([2, 0], device="cuda")
    pools = [pool.clone() for _ in range(3)]
    drafted = recurrent_gla_verify(x.q, x.k, x.v, x.g[..., None], state=pool, slots=slots)
    o = recurrent_gla_step_(x.q, x.k, x.v, x.g, state=pools[0], slots=slots)
    expected = recurrent_gla_step_(wide.q, wide.k, wide.v, wide.g, state=pools[1], slots=slots)
    assert torch.equal(o, expected) and torch.equal(pools[0], pools[1])
    assert_verified(drafted, o)
    accepted = torch.tensor([T, T], device="cuda")
    recurrent_gla_commit_(x.k, x.v, x.g, state=pools[2], slots=slots, accepted=accepted)
    assert torch.equal(pools[2], pools[1])


@by_dtype
@by_packing
@pytest.mark.parametrize("operator", [simple, recurrent], ids=["chunk", "recurrent"])
def test_graph_replays_with_other_data(operator, dtype, lengths):
    """Forward and backward, on the kernels for Hopper too: K and V are what these take."""

    def draw(seed, gate, lengths=lengths):
        options = {"gate": gate, "seed": seed, "gate_dtype": torch.float32}
        return inputs(T=130, K=64, V=72, lengths=lengths, dtype=dtype, **options)

    cases = [draw(1, "reset"), draw(2, 2.0)]
    if lengths is not None:
        cases.append(draw(3, 0.1, (64, 0, 30, 1, 5, 60, 0)))
    assert_graph_replays(operator, draw(0, 0.1), [*cases, cases[0]])
