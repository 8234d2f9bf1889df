"""`fused_recurrent_gla`, forward and every gradient, against the recurrence in fp64."""

import warnings

import pytest
import torch
from common import DTYPES, assert_close
from recurrence import GATINGS, assert_results_close, exact, make_recurrence, ours

from gla_ext import fused_recurrent_gla, fused_recurrent_simple_gla
from gla_ext.selftest import tolerance

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_gating = pytest.mark.parametrize("gating", GATINGS)


@pytest.mark.parametrize("sizes", [(320, 24), (512, 1024), (1000, 1016), (1024, 40)], ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_large_heads(device, state_v_first, sizes):
    x = make_recurrence(1, 35, 1, *sizes, dtype=torch.bfloat16)
    expected = exact(x)
    results = ours((x.v_first() if state_v_first else x).to(device), state_v_first=state_v_first)
    results = {name: t.cpu() for name, t in results.items()}
    if state_v_first:
        results |= {name: results[name].mT for name in ("final_state", "dh0")}
    assert_results_close(results, expected, x)


@by_gating
@pytest.mark.parametrize("gate", [1 / 64, 1.0])
def test_gate_gradients_keep_their_digits_over_a_long_sequence(device, gating, gate):
    """A suffix sum of q dq - k dk would be off by the rounding of sums that cancel."""
    x = make_recurrence(1, 700, 1, 24, 40, gating=gating, gate=gate, device=device)
    results, expected = ours(x), exact(x)
    for name, value in results.items():
        assert_close(value, expected[name], tolerance("o", torch.float32), name=name)


def test_a_reset_has_no_gradient_even_beside_nan(device):
    x = make_recurrence(1, 20, 1, 5, 4, device=device)
    x.gk[:, 9], x.gv[:, 13] = -torch.inf, -1e30
    x.do[:, 16] = torch.nan
    results = ours(x)
    assert not results["dgk"][:, 9].any() and not results["dgv"][:, 13].any()
    assert results["dgk"][:, 10].isnan().all()


@by_dtype
@pytest.mark.parametrize("name", ["q", "k", "v", "gk", "gv"])
def test_nan_reaches_every_later_token_and_no_earlier_one(device, name, dtype):
    x = make_recurrence(1, 40, 2, 5, 4, dtype=dtype, gate=0.1, device=device)
    getattr(x, name)[0, 17, 0] = torch.nan
    o = ours(x)["o"]
    last = 18 if name == "q" else 40
    assert o[0, 17:last, 0].isnan().all()
    assert not o[0, :17].isnan().any() and not o[0, last:].isnan().any()
    assert not o[0, :, 1].isnan().any()


def test_old_name_of_the_layout():
    x = make_recurrence(2, 5, 3, 20, 28)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is the old name of state"):
        _, state = fused_recurrent_gla(
            x.q, x.k, x.v, output_final_state=True, transpose_state_layout=True
        )
    assert state.shape == (2, 3, 28, 20)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is the old name of state"):
        _, same = fused_recurrent_simple_gla(
            x.q, x.k, x.v, output_final_state=True, transpose_state_layout=True
        )
    assert_close(same, state, 1e-6)
    compiled = torch.compile(
        lambda q: fused_recurrent_gla(
            q, x.k, x.v, output_final_state=True, transpose_state_layout=True
        )[1],
        backend="eager",
        fullgraph=True,
    )
    assert torch.equal(compiled(x.q), state)
    with pytest.raises(ValueError, match="expected state_v_first or transpose_state_layout, its o"):
        fused_recurrent_gla(x.q, x.k, x.v, state_v_first=True, transpose_state_layout=True)
    with (
        warnings.catch_warnings(),
        pytest.raises(TypeError, match=r"keywords than its signature's, got \['head_first'\]"),
    ):
        warnings.simplefilter("error")
        fused_recurrent_gla(x.q, x.k, x.v, head_first=False)
