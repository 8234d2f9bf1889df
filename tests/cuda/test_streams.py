"""CUDA as a citizen: no host synchronisation, graphs, streams, devices, offsets unread."""

import dataclasses
from collections.abc import Callable

import pytest
import recurrence
import torch
from common import (
    BAD_OFFSETS,
    PACKED_LENGTHS,
    Inputs,
    assert_graph_replays,
    assert_same_bits,
    copy_into,
    make_inputs,
    ours,
)
from cuda_tools import waits_for_nothing
from fused import draw, draw_packed_sweep, facts_of, for_this_gpu
from kept import CASES, PAIRED, SWEPT
from kept import draw as draw_kept
from recurrence import chunked, make_recurrence
from simple_inputs import make_simple, recurrent, simple

from gla_ext import chunk_gla

pytestmark = pytest.mark.cuda

OTHER_LENGTHS = (0, 30, 3, 64, 65, 0, 1)  # as many sequences as PACKED_LENGTHS
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def forward(x: Inputs) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        o, final_state = chunk_gla(
            *(x.q, x.k, x.v, x.g, None, x.initial_state, True), cu_seqlens=x.cu_seqlens
        )
    return {"o": o, "final_state": final_state}


@dataclasses.dataclass(frozen=True)
class Operator:
    """A call, what makes its inputs, and whether bf16 has kernels for Hopper beside the steps."""

    call: Callable
    make_inputs: Callable
    steps: bool = False
    options: dict = dataclasses.field(default_factory=dict)

    def make(self, lengths=None, dtype=torch.bfloat16, **options):
        B, T = (3, 130) if lengths is None else (1, 165)
        options |= self.options | {"dtype": dtype, "lengths": lengths, "device": "cuda"}
        return self.make_inputs(B, T, 2, 64, 72, **options)


HEAD_GATES = {"gate_dtype": torch.float32}
OPERATORS = {
    "no_grad": Operator(forward, make_inputs),
    "no_grad, steps": Operator(forward, make_inputs, True),
    "grad": Operator(ours, make_inputs),
    "grad, steps": Operator(ours, make_inputs, True),
    "gates on values": Operator(chunked, make_recurrence, options={"gating": "gv"}),
    "gates on both": Operator(chunked, make_recurrence),
    "no gates": Operator(chunked, make_recurrence, options={"gating": "none"}),
    "a gate a head": Operator(simple, make_simple, options=HEAD_GATES),
    "a gate a head, steps": Operator(simple, make_simple, True, HEAD_GATES),
    "a gate a head, recurrent": Operator(recurrent, make_simple, options=HEAD_GATES),
    "recurrent": Operator(recurrence.ours, make_recurrence),
}


@pytest.fixture(params=OPERATORS.values(), ids=OPERATORS)
def operator(request, monkeypatch):
    if request.param.steps:
        monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    return request.param


@by_packing
def test_torch_sees_no_synchronisation(lengths, operator):
    x = operator.make(lengths)
    expected = operator.call(x)
    with waits_for_nothing():
        with pytest.raises(RuntimeError, match="synchronizing"):  # the check itself works
            x.q.sum().item()
        results = operator.call(x)
    assert_same_bits(results, expected)


@by_packing
def test_returns_before_the_device_is_done(lengths, operator):
    """Also synchronisation that torch does not know of."""
    x = operator.make(lengths)
    operator.call(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    slept = torch.cuda.Event()
    slept.record()
    operator.call(x)
    assert not slept.query()
    torch.cuda.synchronize()


@by_packing
def test_runs_on_the_current_stream(lengths, operator):
    """On a stream that is late with the inputs: work anywhere else reads what was there before."""
    x = operator.make(lengths)
    expected = operator.call(x)
    late = x.map(lambda t: torch.full_like(t, torch.nan))
    if x.cu_seqlens is not None:
        late = dataclasses.replace(late, cu_seqlens=torch.zeros_like(x.cu_seqlens))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        operator.call(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        copy_into(late, x)
        results = operator.call(late)
    stream.synchronize()
    assert_same_bits(results, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@by_packing
def test_second_device(lengths, operator):
    x = operator.make(lengths)
    expected = operator.call(x)
    there = type(x)(**{name: t if t is None else t.to("cuda:1") for name, t in vars(x).items()})
    assert torch.cuda.current_device() == 0
    results = operator.call(there)
    assert torch.cuda.current_device() == 0
    assert all(t.device == torch.device("cuda:1") for t in results.values())
    assert_same_bits({name: t.to("cuda:0") for name, t in results.items()}, expected)


@by_dtype
@by_packing
def test_graph_replays_with_other_data(lengths, dtype, operator):
    static = operator.make(lengths, dtype, gate=0.1)
    drawn = [(1, "reset"), (2, 2.0)]
    cases = [operator.make(lengths, dtype, seed=seed, gate=gate) for seed, gate in drawn]
    if lengths is not None:
        cases.append(operator.make(OTHER_LENGTHS, dtype, seed=3))
    assert_graph_replays(operator.call, static, [static, *cases, cases[0]])


REPLAYED = {  # a fact of the plan, what draws, its lengths; the first are those of the capture
    "segments": (
        "backward in segments",
        lambda lengths, seed: draw(1, 1200, 2, 128, 72, lengths=lengths, seed=seed),
        [(1000, 0, 30, 70, 1), (0, 0, 3, 1190, 0), (200, 300, 100, 400, 200), (1, 64, 65, 0, 128)],
    ),
    # One segment is followed, then none, many, and a few: eight parts of it, or fewer.
    "parts": (
        "gradients.sweep",
        lambda lengths, seed: draw(1, 16600, for_this_gpu(8), 72, 72, lengths=lengths, seed=seed),
        [
            *[(2500, *[1000] * 14), (1000,) * 15, (8000, 1, 8000, *[0] * 12)],
            (3000,) * 5 + (0,) * 10,
        ],
    ),
    **{
        kernel: (
            kernel,
            lambda lengths, seed, sizes=sizes: draw_packed_sweep(*sizes, lengths, seed=seed),
            [(4300, 0, 2200, 1000, 900), (0, 0, 3, 8490, 0), (1700,) * 5, (1, 64, 65, 0, 128)],
        )
        for kernel, sizes in (
            ("gradients.sweep", (16, 128, 256)),
            ("gradients.small_sweep", (64, 64, 64)),
        )
    },
    **{
        f"kept: {name}": (
            "fused",
            lambda kind, seed, case=case: draw_kept(case, kind, seed=seed),
            ["every other chunk", 2.0],
        )
        for name, case in (
            ("segments", CASES["segments"]),
            ("swept segments", SWEPT["swept segments in pairs of blocks"]),
            *PAIRED.items(),
        )
    },
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fact, make, others", REPLAYED.values(), ids=REPLAYED)
def test_graph_replays_of_the_fused_path(fact, make, others):
    cases = [make(other, seed) for seed, other in enumerate(others)]
    assert fact in facts_of(cases[0])
    static = cases[0].map(torch.clone)
    if static.cu_seqlens is not None:
        static = dataclasses.replace(static, cu_seqlens=static.cu_seqlens.clone())
    assert_graph_replays(ours, static, [*cases, cases[1]])


def assert_stays_inside(call, good, offsets):
    """Their results mean nothing; the sanitizer tests see that no access leaves a tensor."""
    expected, kept = call(good), good.map(torch.clone)
    for bad in offsets:
        results = call(dataclasses.replace(good, cu_seqlens=bad))
        torch.cuda.synchronize()
        assert all(results[name].shape == expected[name].shape for name in expected)
    tensors = {name: t for name, t in vars(good).items() if t is not None}
    assert_same_bits(tensors, vars(kept))
    assert_same_bits(call(good), expected)


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets_stay_inside_the_tensors(what, offsets_dtype, operator):
    offsets = torch.tensor(BAD_OFFSETS[what], dtype=offsets_dtype, device="cuda")
    factors = (1, 2**32) if offsets_dtype == torch.int64 else (1,)
    good = operator.make(PACKED_LENGTHS)
    assert_stays_inside(operator.call, good, [offsets * factor for factor in factors])


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("what", BAD_OFFSETS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: draw(1, 8 * 165, 2, 64, 72, lengths=tuple(8 * n for n in PACKED_LENGTHS)),
        lambda: draw_packed_sweep(16, 128, 256, (2000, 0, 3000, 500, 0, 2500, 500)),
        lambda: draw_packed_sweep(64, 64, 64, (2000, 0, 3000, 500, 0, 2500, 500)),
    ],
    ids=["segments", "swept", "narrow, swept"],
)
def test_bad_offsets_of_segments(make, what):
    good = make()
    assert "backward in segments" in facts_of(good)
    offsets = torch.tensor(BAD_OFFSETS[what], device="cuda").double() * good.q.shape[1] / 165
    assert_stays_inside(ours, good, [offsets.long()])
