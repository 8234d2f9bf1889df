"""What CUDA refuses, in one sentence each; operators/ has what every device refuses."""

import pytest
import recurrence
import torch
from common import BAD_OFFSETS, PACKED_LENGTHS, make_inputs, ours
from recurrence import chunked, make_recurrence

from gla_ext import chunk_gla, recurrent_gla_buffered_step_, recurrent_gla_step_

pytestmark = pytest.mark.cuda

ops = torch.ops.gla_ext
BF16 = torch.bfloat16


def refuse(message, error=NotImplementedError):
    return pytest.raises(error, match=message)


def packed():
    return make_inputs(1, 165, 2, 8, 12, BF16, lengths=PACKED_LENGTHS, device="cuda")


def test_offsets_on_the_cpu_are_checked():
    bad = torch.tensor(BAD_OFFSETS["decreasing"])
    with refuse("expected cu_seqlens to be non-decreasing, got 100 bef", ValueError):
        ours(packed(), cu_seqlens_cpu=bad)


def test_head_sizes_beyond_1024():
    for K, V in ((1025, 64), (64, 1025)):
        x = make_inputs(1, 20, 1, K, V, BF16, device="cuda")
        with refuse(r"chunk_gla: .*1024.*1025"):
            chunk_gla(x.q, x.k, x.v, x.g)
        with refuse(r"_chunk_states: .*1024.*1025"):
            ops._chunk_states(x.k, x.v, x.g.float(), None, None, False)
        x = make_recurrence(1, 2, 1, K, V, dtype=BF16, device="cuda")
        with refuse(r"chunk_gla: .*1024.*1025"):
            chunked(x)
        with refuse(r"fused_recurrent_gla: .*1024.*1025"):
            recurrence.ours(x)
        with refuse(r"recurrent_gla_step_: .*1024.*1025"):
            recurrent_gla_step_(x.q, x.k, x.v, x.gk, x.gv, state=x.initial_state)


def test_slots_and_buffers_beyond_the_kernels():
    pool = torch.empty(2**31, 1, 1, 1, dtype=BF16, device="cuda")
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")

    def step(pool, buffer):
        buffers = dict.fromkeys(("buffer_k", "buffer_v", "buffer_g"), buffer)
        pools = {"state": pool, "slots": zero, "count": zero.expand(len(pool)), **buffers}
        recurrent_gla_buffered_step_(*[pool[:1]] * 4, **pools)

    name = "recurrent_gla_buffered_step_: expected"
    with refuse(f"{name} at most 2147483647 slots on CUDA, got 2147483648"):
        step(pool, pool)
    with refuse(f"{name} L, the tokens of a buffer, to be at most 16 on CUDA, got 17"):
        step(pool[:3], pool[:51].view(3, 17, 1, 1))


def test_heads_beyond_32_bits_of_stride():
    x = torch.zeros(1, dtype=BF16, device="cuda").expand(1, 64, 2**19, 1)
    message = r"chunk_gla: expected H \* max\(K, V, 64\) to be less than 33554432 .* H = 524288,"
    with refuse(message):
        chunk_gla(x, x, x, x)


def test_more_blocks_than_a_grid_has():
    x = torch.zeros(1, dtype=BF16, device="cuda").expand(1, 1, 2**11, 1)
    offsets = torch.zeros(1, dtype=torch.int32, device="cuda").expand(2**20 + 1)
    with refuse("to be at most 2147483647 on CUDA, got 1048577 chunks, H = 2048, K = 1 and V = 1"):
        chunk_gla(x, x, x, x, cu_seqlens=offsets)


def test_fp64():
    x = make_inputs(1, 20, 1, 8, 8, torch.float64, device="cuda")
    with refuse(r"chunk_gla: .*float64"):
        chunk_gla(x.q, x.k, x.v, x.g)
    with refuse(r"_gate_cumsum: .*float64"):
        ops._gate_cumsum(x.g, None)
    with refuse(r"fused_recurrent_gla: .*only the CPU backend"):
        recurrence.ours(make_recurrence(1, 2, 1, 5, 4, dtype=torch.float64, device="cuda"))


def test_tensors_on_two_devices():
    x = packed()
    message = "chunk_gla: expected {} on the device of q, cuda:0, got cpu"
    with refuse(message.format("k"), ValueError):
        chunk_gla(x.q, x.k.cpu(), x.v, x.g)
    with refuse(message.format("cu_seqlens"), ValueError):
        chunk_gla(x.q, x.k, x.v, x.g, cu_seqlens=x.cu_seqlens.cpu())


def test_an_unknown_path(monkeypatch):
    x = make_inputs(1, 20, 1, 8, 8, BF16, device="cuda")
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fast")
    with refuse("GLA_EXT_CUDA_PATH: expected fused or steps, got fast", ValueError):
        chunk_gla(x.q, x.k, x.v, x.g)


REFUSED = {  # K, V, dtype, gate_dtype, layout
    "q, k and v in torch.bfloat16": (64, 64, torch.float32, None, "contiguous"),
    "K and V to be multiples of 8": (64, 60, BF16, None, "contiguous"),
    "rows that start at multiples of 16 bytes": (64, 64, BF16, None, "misaligned"),
    "K to be at most 256": (264, 64, BF16, None, "contiguous"),
    "g in torch.bfloat16 or torch.float32": (64, 64, BF16, torch.float16, "contiguous"),
}
IN_BACKWARD = ("K to be at most 256", "g in torch.bfloat16 or torch.float32")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("missing", REFUSED)
def test_what_the_fused_path_does_not_take(missing, monkeypatch):
    K, V, dtype, gate_dtype, layout = REFUSED[missing]
    x = make_inputs(*(1, 20, 2, K, V, dtype, 1.0, gate_dtype), layout=layout, device="cuda")
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    message = f": GLA_EXT_CUDA_PATH=fused expected {missing}, got a call that only the st"
    with refuse("chunk_gla" + message):
        chunk_gla(x.q, x.k, x.v, x.g)
    if missing in IN_BACKWARD:
        with refuse("chunk_gla_bwd" + message):
            ops.chunk_gla_bwd(x.do, None, x.q, x.k, x.v, x.g, *[None] * 4, False, False)


@pytest.mark.parametrize("gating", ["gv", "both"])
def test_the_fused_path_takes_no_gates_on_values(gating, monkeypatch):
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    x = make_recurrence(1, 64, 1, 64, 64, dtype=BF16, gating=gating, device="cuda")
    with refuse("chunk_gla: GLA_EXT_CUDA_PATH=fused .*no gates on values"):
        chunked(x)
