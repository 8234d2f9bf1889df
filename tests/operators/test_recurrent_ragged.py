"""Drafts of several lengths, packed: verification and commit with cu_seqlens."""

import pytest
import torch
from common import assert_close
from ragged import Ragged

from gla_ext import recurrent_gla_commit_, recurrent_gla_step_, recurrent_gla_verify

by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
by_layout = pytest.mark.parametrize("state_v_first", [False, True])


@by_dtype
@by_layout
@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("sizes", [(2, 64, 40), (2, 20, 28), (1, 130, 70), (1, 1000, 40)], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ragged_drafts(device, state_dtype, sizes, state_v_first, dtype):
    drafts = Ragged(device, sizes, dtype, state_dtype, state_v_first)
    before = drafts.pool.clone()
    o = recurrent_gla_verify(**drafts.arguments())
    assert torch.equal(drafts.pool, before)
    assert not o[:, drafts.offsets[-1] :].any()
    for n, length in enumerate(drafts.LENGTHS):
        tokens, state = drafts.alone(n)
        found = o[:, drafts.offsets[n] : drafts.offsets[n + 1]]
        if state is None:
            assert not found.any()
            continue
        options = {"state_v_first": state_v_first}
        expected = recurrent_gla_verify(**tokens, state=state, **options)
        if device == "cpu" or length != 1:
            assert torch.equal(found, expected), n
        else:
            assert_close(found, expected, 1e-6 if dtype == torch.float32 else 1e-3)


@by_layout
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_commit_of_ragged_drafts(device, index_dtype, state_dtype, state_v_first):
    drafts = Ragged(device, state_dtype=state_dtype, state_v_first=state_v_first)
    counts = [2, 5, 3, 1, 17, 1, -4]
    expected = drafts.pool.clone()
    for n, (length, slot) in enumerate(zip(drafts.LENGTHS, drafts.SLOTS, strict=True)):
        tokens, state = drafts.alone(n)
        if state is None:
            continue
        count = min(max(counts[n], 0), length)
        tokens = {name: t[:, :count] for name, t in tokens.items()}
        recurrent_gla_step_(**tokens, state=state, state_v_first=state_v_first)
        expected[slot] = state[0]
    arguments = {n: t for n, t in drafts.arguments().items() if n != "q"}
    arguments |= {"cu_seqlens": drafts.cu_seqlens.to(index_dtype)}
    recurrent_gla_commit_(**arguments, accepted=torch.tensor(counts, device=device))
    assert torch.equal(drafts.pool, expected)


@pytest.mark.cuda
def test_wrong_offsets_stay_inside():
    """On CUDA nobody looks at them: they are clamped."""
    drafts = Ragged("cuda")
    for offsets in ([0, 90, 5, 60, -3, 2**31 - 1, 7, 9], [70, 60, 50, 40, 30, 20, 10, 0]):
        arguments = drafts.arguments() | {"cu_seqlens": torch.tensor(offsets, device="cuda")}
        assert recurrent_gla_verify(**arguments).shape == (1, 54, 2, 40)
    torch.cuda.synchronize()


@pytest.mark.cuda
def test_graph_replays_with_other_lengths():
    drafts = Ragged("cuda", dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    recurrent_gla_verify(**drafts.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = recurrent_gla_verify(**drafts.arguments())
    for offsets in ((0, 1, 2, 3, 19, 40, 41, 54), (0, 0, 5, 10, 10, 26, 27, 29)):
        drafts.cu_seqlens.copy_(torch.tensor(offsets))
        graph.replay()
        assert torch.equal(o, recurrent_gla_verify(**drafts.arguments()))


@pytest.mark.cuda
@pytest.mark.sanitizer
@by_layout
@pytest.mark.parametrize("sizes", [(2, 128, 64), (1, 33, 65), (1, 512, 32), (1, 1000, 40)], ids=str)
def test_for_the_sanitizer(sizes, state_v_first):
    for state_dtype in (torch.float32, torch.bfloat16):
        options = {"state_dtype": state_dtype, "state_v_first": state_v_first}
        drafts = Ragged("cuda", sizes, torch.bfloat16, **options)
        assert recurrent_gla_verify(**drafts.arguments()).isfinite().all()
