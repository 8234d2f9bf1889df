"""What CUDA refuses, in one sentence each; operators/ has what every device refuses."""

import pytest
import torch
from common import BAD_OFFSETS, PACKED_LENGTHS, make_inputs, ours

from gla_ext import chunk_gla

pytestmark = pytest.mark.cuda


def packed():
    lengths = PACKED_LENGTHS
    return make_inputs(1, 165, 2, 8, 12, torch.bfloat16, lengths=lengths, device="cuda")


def test_offsets_on_the_cpu_are_checked():
    x = packed()
    bad = torch.tensor(BAD_OFFSETS["decreasing"])
    with pytest.raises(ValueError, match=r"expected cu_seqlens to be non-decreasing, got 100 bef"):
        ours(x, cu_seqlens_cpu=bad)


def test_head_sizes_beyond_512():
    for K, V in ((513, 64), (64, 513)):
        x = make_inputs(1, 20, 1, K, V, torch.bfloat16, device="cuda")
        with pytest.raises(NotImplementedError, match=r"chunk_gla: .*512.*513"):
            chunk_gla(x.q, x.k, x.v, x.g)
        b = x.g.float()
        with pytest.raises(NotImplementedError, match=r"_chunk_states: .*512.*513"):
            torch.ops.gla_ext._chunk_states(x.k, x.v, b, None, None, False)


def test_heads_beyond_32_bits_of_stride():
    x = torch.zeros(1, dtype=torch.bfloat16, device="cuda").expand(1, 64, 2**19, 1)
    message = r"chunk_gla: expected H \* max\(K, V, 64\) to be less than 33554432 .* H = 524288,"
    with pytest.raises(NotImplementedError, match=message):
        chunk_gla(x, x, x, x)


def test_more_blocks_than_a_grid_has():
    x = torch.zeros(1, dtype=torch.bfloat16, device="cuda").expand(1, 1, 2**11, 1)
    offsets = torch.zeros(1, dtype=torch.int32, device="cuda").expand(2**20 + 1)
    message = r"to be at most 2147483647 on CUDA, got 1048577 chunks, H = 2048, K = 1 and V = 1"
    with pytest.raises(NotImplementedError, match=message):
        chunk_gla(x, x, x, x, cu_seqlens=offsets)


def test_fp64():
    x = make_inputs(1, 20, 1, 8, 8, torch.float64, device="cuda")
    with pytest.raises(NotImplementedError, match=r"chunk_gla: .*float64"):
        chunk_gla(x.q, x.k, x.v, x.g)
    with pytest.raises(NotImplementedError, match=r"_gate_cumsum: .*float64"):
        torch.ops.gla_ext._gate_cumsum(x.g, None)


def test_tensors_on_two_devices():
    x = packed()
    message = "chunk_gla: expected {} on the device of q, cuda:0, got cpu"
    with pytest.raises(ValueError, match=message.format("k")):
        chunk_gla(x.q, x.k.cpu(), x.v, x.g)
    with pytest.raises(ValueError, match=message.format("cu_seqlens")):
        chunk_gla(x.q, x.k, x.v, x.g, cu_seqlens=x.cu_seqlens.cpu())
