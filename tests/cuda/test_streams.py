"""CUDA as a citizen: no host synchronisation, graphs, streams, devices, offsets unread."""

import dataclasses

import pytest
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

from gla_ext import chunk_gla

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("path")]

OTHER_LENGTHS = (0, 30, 3, 64, 65, 0, 1)  # as many sequences as PACKED_LENGTHS
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def small(lengths=None, dtype=torch.bfloat16, **options) -> Inputs:
    B, T = (3, 130) if lengths is None else (1, 165)
    return make_inputs(B, T, 2, 64, 72, dtype, lengths=lengths, device="cuda", **options)


def forward(x: Inputs) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        o, final_state = chunk_gla(
            *(x.q, x.k, x.v, x.g, None, x.initial_state, True), cu_seqlens=x.cu_seqlens
        )
    return {"o": o, "final_state": final_state}


by_mode = pytest.mark.parametrize("function", [forward, ours], ids=["no_grad", "grad"])


@pytest.fixture
def synchronising_is_an_error():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@by_mode
@by_packing
def test_torch_sees_no_synchronisation(lengths, function, synchronising_is_an_error):
    x = small(lengths)
    function(x)
    synchronising_is_an_error()
    with pytest.raises(RuntimeError, match="synchronizing"):  # the check itself works
        x.q.sum().item()
    function(x)


@by_mode
@by_packing
def test_returns_before_the_device_is_done(lengths, function):
    """Also synchronisation that torch does not know of."""
    x = small(lengths)
    function(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    slept = torch.cuda.Event()
    slept.record()
    function(x)
    assert not slept.query()
    torch.cuda.synchronize()


@by_mode
@by_dtype
@by_packing
def test_graph_replays_with_other_data(lengths, dtype, function):
    static, cases = small(lengths, dtype), [small(lengths, dtype, seed=1, gate="reset")]
    if lengths is not None:
        cases.append(small(OTHER_LENGTHS, dtype, seed=2))
    assert_graph_replays(function, static, [static, *cases, cases[0]])


@by_mode
@by_packing
def test_runs_on_the_current_stream(lengths, function):
    """On a stream that is late with the inputs: work anywhere else reads what was there before."""
    x = small(lengths)
    expected = function(x)
    late = x.map(lambda t: torch.full_like(t, torch.nan))
    if x.cu_seqlens is not None:
        late = dataclasses.replace(late, cu_seqlens=torch.zeros_like(x.cu_seqlens))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        copy_into(late, x)
        results = function(late)
    stream.synchronize()
    assert_same_bits(results, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@by_mode
@by_packing
def test_second_device(lengths, function):
    x = small(lengths)
    expected = function(x)
    there = Inputs(**{name: t if t is None else t.to("cuda:1") for name, t in vars(x).items()})
    assert torch.cuda.current_device() == 0
    results = function(there)
    assert torch.cuda.current_device() == 0
    assert all(t.device == torch.device("cuda:1") for t in results.values())
    assert_same_bits({name: t.to("cuda:0") for name, t in results.items()}, expected)


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets_stay_inside_the_tensors(what, offsets_dtype):
    """Their results mean nothing; the sanitizer tests see that no access leaves a tensor."""
    good = small(PACKED_LENGTHS)
    expected = ours(good)
    offsets = torch.tensor(BAD_OFFSETS[what], dtype=offsets_dtype, device="cuda")
    kept = good.map(torch.clone)
    for factor in (1, 2**32) if offsets_dtype == torch.int64 else (1,):
        results = ours(dataclasses.replace(good, cu_seqlens=offsets * factor))
        torch.cuda.synchronize()
        assert all(results[x].shape == expected[x].shape for x in expected)
    assert_same_bits(vars(good), vars(kept))
    assert_same_bits(ours(good), expected)
