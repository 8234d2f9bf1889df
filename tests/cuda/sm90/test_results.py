"""The fused path of bf16 on Hopper against the truth: every kernel, every way to share out work.

The plan says what a call does, and every row of `CALLS` is there for what it says of it.
"""

import dataclasses
import math

import pytest
import torch
from common import (
    assert_results_close,
    assert_same_bits,
    exact_by_chunks,
    ours,
)
from fused import (
    BF16,
    SWEPT_LENGTHS,
    TOKENS,
    UNEVEN_LENGTHS,
    draw,
    facts_of,
    for_this_gpu,
    half_of_the_gpu,
    v_first_results,
)
from fused_calls import CALLS, FP32, PACKED_WIDE, of
from kept import kept_and_made

from gla_ext import batch_invariant, chunk_gla

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

in_nan = pytest.mark.usefixtures("nan_in_fresh_memory")
ROWS = {
    f"{name}-{'x'.join(map(str, sizes))}-{gates}-{str(dtype).removeprefix('torch.')}": (
        *(calls, sizes, gates, dtype),
    )
    for name, calls in CALLS.items()
    for sizes in calls.sizes
    for dtype, kinds in ((BF16, calls.gates), (FP32, calls.fp32_gates))
    for gates in kinds
}


def some_heads(x, results):
    """Four heads of many: the reference of all takes gigabytes."""
    H = x.q.shape[2]
    if H <= 12:
        return x, results
    heads = [0, 1, H // 2, H - 1]

    def part(named):
        return {
            name: t if t is None or name == "cu_seqlens" else
            t[:, heads] if name in ("initial_state", "dht", "final_state", "dh0") else
            t[:, :, heads]
            for name, t in named.items()
        }  # fmt: skip

    return dataclasses.replace(x, **part(vars(x))), part(results)


def assert_right(x, *runs):
    """Each of the results close to the truth, in all heads finite, and 0 after the last offset."""
    for results in runs:
        assert all(t.isfinite().all() for t in results.values())
        if x.cu_seqlens is not None:
            end = int(x.cu_seqlens[-1])
            assert not any(results[name][:, end:].any() for name in TOKENS)
    expected = None
    for results in runs:
        y, part = some_heads(x, results)
        expected = exact_by_chunks(y) if expected is None else expected
        assert_results_close(part, {name: expected[name] for name in part}, y)


@in_nan
@pytest.mark.parametrize("calls, sizes, gates, gate_dtype", ROWS.values(), ids=ROWS)
def test_results(calls, sizes, gates, gate_dtype, keep_nothing):
    x = calls.draw(sizes, gates, gate_dtype)
    call = v_first_results if calls.v_first else ours
    with batch_invariant(calls.invariant):
        runs = kept_and_made(x, keep_nothing, call, batch_invariant=calls.invariant)
        assert_right(x, *runs)


def test_packed_rows_are_cut():
    """Two of the sequences of packed sweeps are in several segments."""
    facts = facts_of(CALLS["packed, swept"].draw(PACKED_WIDE[0]))
    (chunks,) = (int(f.split()[-2]) for f in facts if f.startswith("backward in segments of"))
    assert sum(length > 64 * chunks for length in SWEPT_LENGTHS) == 2


BOTH_SWEEPS = [(16, 130, 4, 128, 200), (22, 130, 9, 56, 48)]  # the batch for an H200


def swept(B, *rest, **options):
    x = draw(for_this_gpu(B) if B > 1 else 1, *rest, **options)
    assert facts_of(x) & {"gradients.sweep", "gradients.small_sweep"}
    return x


@in_nan
@pytest.mark.parametrize("absent", [("initial_state",), ("dht",), ("initial_state", "dht")])
@pytest.mark.parametrize("lengths", [None, SWEPT_LENGTHS], ids=["batch", "packed"])
@pytest.mark.parametrize("narrow", [False, True])
def test_without_states(narrow, lengths, absent, keep_nothing):
    if lengths is None:
        x = swept(*BOTH_SWEEPS[narrow])
    else:
        rows = CALLS["packed, narrow, swept" if narrow else "packed, swept"]
        x = rows.draw(rows.sizes[-1])
    x = dataclasses.replace(x, **dict.fromkeys(absent))
    assert_right(x, *kept_and_made(x, keep_nothing))


@pytest.mark.parametrize("lengths", [None, UNEVEN_LENGTHS], ids=["batch", "packed"])
@pytest.mark.parametrize("K, V", [(64, 72), (128, 72), (136, 72), (256, 136)])
def test_v_first_states(K, V, lengths):
    x = draw(1, 695, 2, K, V, lengths=lengths)
    assert "backward in segments" in facts_of(x)
    assert_same_bits(v_first_results(x), ours(x))


@in_nan
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(
    "B, H, K, V",
    [
        *[(2, 3, 64, 64), (2, 3, 128, 256), (2, 3, 192, 64), (2, 3, 256, 64)],
        *[(16, 4, 128, 256), (22, 9, 64, 64)],
    ],
)
def test_no_tokens(B, H, K, V, states):
    """The states pass through, and so do their gradients."""
    x = draw(for_this_gpu(B), 0, H, K, V, states=states)
    results = ours(x)
    assert all(results[name].numel() == 0 for name in TOKENS)
    if states:
        assert_same_bits({"final_state": x.initial_state, "dh0": x.dht}, results)
    else:
        assert not results["final_state"].any()


UPSTREAM = {
    "one number": (0, 0, 0, 0),
    "one row": (slice(1),),
    "one token": (slice(None), slice(1)),
    "one head": (slice(None), slice(None), slice(1)),
}


@in_nan
@pytest.mark.parametrize("sizes", [*of(2, 130, 3, (64, 72), (128, 72), (256, 72)), *BOTH_SWEEPS])
@pytest.mark.parametrize("part", UPSTREAM.values(), ids=UPSTREAM)
def test_strides(part, sizes, keep_nothing):
    """Halves of wider tensors, and an upstream gradient that is a part for all."""
    B, *rest = sizes
    x = draw(for_this_gpu(B), *rest)

    def sliced(t):
        return torch.cat([t, t.new_full(t.shape, torch.nan)], -1)[..., : t.shape[-1]]

    tokens = {name: sliced(getattr(x, name)) for name in ("q", "k", "v", "g")}
    x = dataclasses.replace(x, **tokens, do=x.do[part].expand(x.do.shape))
    assert_right(x, *kept_and_made(x, keep_nothing))


def test_one_token_of_an_odd_stride():
    """The stride of a dimension of size 1 is never taken, so it need not be aligned."""
    x = draw(4, 1, 3, 64, 72)

    def odd(t):
        B, T, H, D = t.shape
        return t.as_strided((B, T, H, D), (H * D, H * D + 1, D, 1)) if t.ndim == 4 else t

    tokens = {name: odd(getattr(x, name)) for name in ("q", "k", "v", "g", "do")}
    assert_same_bits(ours(dataclasses.replace(x, **tokens)), ours(x))


@pytest.mark.parametrize("sequences", ["one", "half of the GPU"])
@pytest.mark.parametrize("K, V", [(8, 8), (64, 64), (40, 136)])
def test_low_bits_of_fp32_gates_count(K, V, sequences):
    """Rounded to bf16, these gates would leave 1 / 512 more in the state. All q, k and v are 1, so
    the only other error is the rounding of keys, which goes up and down.
    """
    gate, T = -(1 + 2**-9) / 32, 500
    B = 1 if sequences == "one" else half_of_the_gpu(2, V)
    ones = torch.ones(B, T, 2, K, dtype=BF16, device="cuda")
    v = torch.ones(B, T, 2, V, dtype=BF16, device="cuda")
    h0 = torch.zeros(B, 2, K, V, device="cuda", requires_grad=True)
    o, state = chunk_gla(ones, ones, v, ones.float() * gate, 1.0, h0, output_final_state=True)
    expected = math.expm1(T * gate) / math.expm1(gate)
    assert (state / expected - 1).abs().max() < 2**-11
    assert (o[:, -1].float() / (K * expected) - 1).abs().max() < 2**-8
    (dh0,) = torch.autograd.grad(o, h0, torch.ones_like(o))
    assert (dh0 / (math.exp(gate) * expected) - 1).abs().max() < 2**-11


def with_sums(x, multiple, least):
    """Changes the gates: their sum over a chunk is close to an odd multiple of `multiple` log2
    units.
    """
    g, chunks, unit = x.g.clone(), x.g.shape[1] // 64, multiple * math.log(2)
    y = g[:, : 64 * chunks].double().unflatten(1, (chunks, 64))
    y *= least * unit / -y[:, :, :60].sum(2, keepdim=True).amax()
    y = y.to(BF16).double()
    sums = -y[:, :, :60].sum(2) / unit
    rest = y[:, :, :60].sum(2) + unit * (2 * torch.ceil((sums + 1) / 2) - 1)
    for i in range(60, 64):  # cut off, so that what is left has the same sign
        part = -(rest.float().view(torch.int32) & -65536).view(torch.float32)
        y[:, :, i] = part
        rest = rest + part
    g[:, : 64 * chunks] = y.flatten(1, 2).to(BF16)
    return dataclasses.replace(x, g=g)


TWO_SWEEPS = [(16, 330, 4, 128, 256), (22, 330, 9, 64, 64)]  # the batch for an H200


@in_nan
@pytest.mark.parametrize(
    "sizes, multiple, least",
    [
        *[(sizes, 1.0, least) for sizes in TWO_SWEEPS for least in (3.0, 20.0)],
        *[(sizes, 112.0, 0.1) for sizes in TWO_SWEEPS],
        *[(sizes, 112.0, 0.1) for sizes in of(1, 8200, 16, (128, 256), (72, 200))],
    ],
)
def test_references_that_rounding_decides(sizes, multiple, least, keep_nothing):
    """Half of each sum is close to the middle between two integers, or the sum is at the end of
    tier 1's range. All kernels that sum the gates must come to the same reference.
    """
    x = with_sums(swept(*sizes), multiple, least)
    assert_right(x, *kept_and_made(x, keep_nothing))


@pytest.mark.parametrize("gate", [0.1, 1.0])
@pytest.mark.parametrize("sizes", TWO_SWEEPS, ids=str)
def test_gates_of_the_first_token_have_no_gradient(sizes, gate, keep_nothing):
    """Without states, the first token's gates decay nothing: their true dg is 0. The computed dg is
    what is left of sums that cancel, whose terms are as large as those of other tokens.
    """
    x = swept(*sizes, gates=gate, states=False)
    for results in kept_and_made(x, keep_nothing):
        dg = results["dg"].float()
        assert dg[:, 0].abs().max() <= 2e-2 * dg[:, 1:].abs().max()
        assert dg[:, 0].square().mean() <= 1e-5 * dg[:, 1:].square().mean()


def test_forcing_a_path(monkeypatch):
    x = draw(1, 130, 2, 64, 72, 0.5)
    planned = ours(x)
    for path in ("", "fused"):
        monkeypatch.setenv("GLA_EXT_CUDA_PATH", path)
        assert_same_bits(ours(x), planned)
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    steps = ours(x)
    assert any(not torch.equal(steps[name], planned[name]) for name in planned)
    assert_results_close(steps, exact_by_chunks(x), x)
