"""The recurrent operators on CUDA: sizes, graphs, no synchronisation, pools that are not copied."""

import dataclasses

import pytest
import torch
from common import BAD_OFFSETS, CUDA_DTYPES, PACKED_LENGTHS, assert_same_bits
from cuda_tools import waits_for_nothing
from recurrence import assert_results_close, exact, make_recurrence, ours

from gla_ext import (
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)

pytestmark = pytest.mark.cuda
by_layout = pytest.mark.parametrize("state_v_first", [False, True])
TOKENS = ("q", "k", "v", "gk", "gv")

HEAD_SIZES = [
    *[(1, 1), (1, 512), (512, 1), (7, 17), (31, 33), (60, 72), (63, 65), (64, 64), (72, 100)],
    *[(65, 129), (128, 128), (127, 255), (128, 256), (257, 96), (256, 512), (511, 509), (512, 512)],
]


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("K, V", HEAD_SIZES)
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@by_layout
def test_head_sizes(state_v_first, dtype, K, V):
    x = make_recurrence(1, 67, 2, K, V, dtype=dtype, gate=0.1, device="cuda")
    expected = exact(x)
    if state_v_first:
        x = x.v_first()
        expected = expected | {n: expected[n].mT for n in ("final_state", "dh0")}
    assert_results_close(ours(x, state_v_first=state_v_first), expected, x)


@pytest.mark.parametrize("lengths", [None, (700, 0, 300, 20)], ids=["batch", "packed"])
@pytest.mark.parametrize("reverse", [False, True])
def test_many_tokens(lengths, reverse):
    B, T = (2, 1000) if lengths is None else (1, 1024)
    x = make_recurrence(B, T, 2, 64, 200, gate=1 / 64, lengths=lengths, device="cuda")
    assert_results_close(ours(x, reverse=reverse), exact(x, reverse=reverse), x)


def test_many_sequences_and_heads():
    x = make_recurrence(1000, 3, 70, 5, 4, dtype=torch.bfloat16, device="cuda")
    assert_results_close(ours(x), exact(x), x)
    offsets = torch.arange(1001, dtype=torch.int32, device="cuda") * 3
    packed = dataclasses.replace(
        x.map(lambda t: t if t.shape[1] == 70 else t.flatten(0, 1)[None]), cu_seqlens=offsets
    )
    batch = ours(x)
    assert_same_bits({n: t.view(batch[n].shape) for n, t in ours(packed).items()}, batch)


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets_stay_inside_the_tensors(what, offsets_dtype):
    good = make_recurrence(1, 165, 2, 20, 28, lengths=PACKED_LENGTHS, device="cuda")
    expected = ours(good)
    offsets = torch.tensor(BAD_OFFSETS[what], dtype=offsets_dtype, device="cuda")
    for factor in (1, 2**32) if offsets_dtype == torch.int64 else (1,):
        results = ours(dataclasses.replace(good, cu_seqlens=offsets * factor))
        assert all(results[name].shape == expected[name].shape for name in expected)
    assert_same_bits(ours(good), expected)


def test_head_sizes_beyond_512():
    x = make_recurrence(1, 2, 1, 513, 4, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(NotImplementedError, match=r"fused_recurrent_gla: .*512.*513"):
        ours(x)
    arguments = {n: getattr(x, n) for n in TOKENS}
    with pytest.raises(NotImplementedError, match=r"recurrent_gla_step_: .*512.*513"):
        recurrent_gla_step_(**arguments, state=x.initial_state)
    x = make_recurrence(1, 2, 1, 5, 4, dtype=torch.float64, device="cuda")
    with pytest.raises(NotImplementedError, match=r"fused_recurrent_gla: .*only the CPU backend"):
        ours(x)


def test_same_bits_beside_other_work():
    x = make_recurrence(8, 100, 4, 128, 256, dtype=torch.bfloat16, device="cuda")
    expected = ours(x)
    noise, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for i in range(20):
        with torch.cuda.stream(stream):
            for _ in range(i % 4):
                noise = (noise @ noise).clamp(-1, 1)
        assert_same_bits(ours(x), expected)


class Decoder(torch.nn.Module):
    """A pool as a buffer, and tokens of some of its rows."""

    def __init__(self, B=64, P=96, H=4, K=64, V=128, T=1, state_v_first=True):
        super().__init__()
        x = make_recurrence(
            P, T, H, K, V, dtype=torch.bfloat16, gating="gk", gate=0.1, device="cuda"
        )
        x = x.v_first() if state_v_first else x
        self.tokens = {n: getattr(x, n)[:B] for n in ("q", "k", "v", "gk")}
        self.before = x.initial_state
        self.slots = torch.randperm(P, generator=torch.Generator().manual_seed(0))[:B].cuda()
        self.slots[::5] = -1
        self.state_v_first = state_v_first
        self.register_buffer("pool", x.initial_state.clone())

    def forward(self, q, k, v, gk, slots):
        o = recurrent_gla_step_(
            q, k, v, gk, state=self.pool, slots=slots, state_v_first=self.state_v_first
        )
        return o * 2

    def reset(self):
        self.pool.copy_(self.before)

    def run(self, call=None, steps=3):
        """o of every step and the pool after them."""
        self.reset()
        call = self if call is None else call
        outputs = [call(**self.tokens, slots=self.slots).clone() for _ in range(steps)]
        return {"o": torch.stack(outputs), "pool": self.pool.clone()}


def test_no_synchronisation():
    decoder, x = Decoder(T=3), make_recurrence(2, 40, 2, 20, 28, device="cuda")
    expected, results = ours(x), decoder.run()
    accepted = torch.full((64,), 2, device="cuda")
    arguments = decoder.tokens | {"state": decoder.pool, "slots": decoder.slots}
    with waits_for_nothing():
        again, decoded = ours(x), decoder.run()
        recurrent_gla_verify(**arguments, state_v_first=True)
        del arguments["q"]
        recurrent_gla_commit_(**arguments, accepted=accepted, state_v_first=True)
    assert_same_bits(again, expected)
    assert_same_bits(decoded, results)


@by_layout
def test_graph_replays_with_other_slots(state_v_first):
    decoder = Decoder(state_v_first=state_v_first)
    decoder.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decoder(**decoder.tokens, slots=decoder.slots)
    for shift in (0, 7):
        decoder.slots.copy_(torch.where(decoder.slots < 0, -1, (decoder.slots + shift) % 96))
        expected = decoder.run(steps=1)
        decoder.reset()
        graph.replay()
        assert_same_bits({"o": o[None], "pool": decoder.pool}, expected)


@by_layout
def test_reduce_overhead_with_the_pool_as_a_buffer(state_v_first):
    torch._dynamo.utils.counters.clear()
    decoder = Decoder(state_v_first=state_v_first)
    compiled = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        expected = decoder.run(steps=4)
        for _ in range(2):
            assert_same_bits(decoder.run(compiled, steps=4), expected)
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert skips == 0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_copies_no_pool(mode):
    decoder = Decoder(B=16, P=512)  # 64 MiB
    compiled = torch.compile(decoder, mode=mode, fullgraph=True)
    with torch.no_grad():
        decoder.run(compiled)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            compiled(**decoder.tokens, slots=decoder.slots)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < decoder.pool.nbytes / 16


def test_a_step_takes_the_memory_of_its_output():
    decoder = Decoder(B=16, P=512)
    decoder.run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = recurrent_gla_step_(
        **decoder.tokens, state=decoder.pool, slots=decoder.slots, state_v_first=True
    )
    assert torch.cuda.max_memory_allocated() - before <= o.nbytes + 512


def test_pool_of_more_than_int32_elements():
    P, H, K, V = 8193, 1, 512, 512
    pool = torch.zeros(P, H, K, V, device="cuda")
    x = make_recurrence(2, 1, H, K, V, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([P - 1, 0], device="cuda")
    pool[slots] = x.initial_state
    arguments = {n: getattr(x, n) for n in TOKENS}
    o = recurrent_gla_step_(**arguments, state=pool, slots=slots)
    expected, states = fused_recurrent_gla(**x.leaves(), output_final_state=True)
    assert torch.equal(o, expected)
    assert torch.equal(pool[slots], states)
    assert not pool[1 : P - 1].any()


SANITIZED = {  # (B, T, H, K, V), options
    "aligned": ((2, 35, 1, 64, 128), {}),
    "widest": ((1, 3, 1, 512, 512), {}),
    "odd": ((2, 34, 2, 33, 65), {}),
    "misaligned": ((1, 5, 2, 64, 64), {"layout": "misaligned"}),
    "strided": ((2, 5, 2, 20, 28), {"layout": "sliced"}),
    "packed": ((1, 165, 1, 20, 28), {"lengths": PACKED_LENGTHS}),
    "no gates": ((2, 3, 1, 130, 70), {"gating": "none"}),
}


@pytest.mark.sanitizer
@pytest.mark.parametrize("what", SANITIZED)
@by_layout
def test_for_the_sanitizer(state_v_first, what):
    sizes, options = SANITIZED[what]
    x = make_recurrence(*sizes, dtype=torch.bfloat16, device="cuda", **options)
    x = x.v_first() if state_v_first else x
    results = ours(x, state_v_first=state_v_first)
    tokens = {n: getattr(x, n) for n in TOKENS}
    if x.cu_seqlens is None:
        slots = torch.tensor([5, 0][: sizes[0]], device="cuda")
        pool = {
            "state": x.initial_state.contiguous(),
            "slots": slots,
            "state_v_first": state_v_first,
        }
        recurrent_gla_verify(**tokens, **pool)
        recurrent_gla_step_(**tokens, **pool)
        del tokens["q"]
        recurrent_gla_commit_(**tokens, **pool, accepted=torch.ones_like(slots))
    assert results["o"].isfinite().all()
