"""NaN on the fused path: never silent, in its sequence and head alone, and ignored in a tail."""

import pytest
import torch
from common import assert_same_bits, ours
from fused import BF16, UNEVEN_LENGTHS, draw, draw_packed_sweep, facts_of, for_this_gpu

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("hopper")]

TOKENS = ("q", "k", "v", "g", "do")
by_operand = pytest.mark.parametrize("operand", TOKENS)


@pytest.mark.usefixtures("nan_in_fresh_memory")
@by_operand
@pytest.mark.parametrize("lengths", [(70, 150, 3), (300, 700, 3)], ids=["whole", "segments"])
@pytest.mark.parametrize("gate", [0.1, 10.0, "reset"])
@pytest.mark.parametrize("offset", [10, 64, 149])
@pytest.mark.parametrize("way", ["bf16 gates", "fp32 gates", "steps"])
def test_nan_is_never_silent(way, offset, operand, gate, lengths, monkeypatch):
    """Nor is it in another sequence or head, nor before its token, by chunks."""
    if way == "steps":
        monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    gate_dtype = torch.float32 if way == "fp32 gates" else BF16
    start, end = lengths[0], lengths[0] + lengths[1]
    token = start + offset
    x = draw(1, sum(lengths), 2, 64, 72, gate, gate_dtype, lengths)
    clean = ours(x)
    getattr(x, operand)[0, token, 0] = torch.nan
    results = ours(x)

    for name, value in results.items():
        if name in ("final_state", "dh0"):
            assert torch.equal(value[::2], clean[name][::2]), name
            assert torch.equal(value[:, 1], clean[name][:, 1]), name
        else:
            assert torch.equal(value[0, :start], clean[name][0, :start]), name
            assert torch.equal(value[0, end:], clean[name][0, end:]), name
            assert torch.equal(value[0, :, 1], clean[name][0, :, 1]), name

    chunk_start = start + offset // 64 * 64
    if operand == "do":  # reaches the gradients of its token and those before it
        for name in ("o", "final_state"):
            assert torch.equal(results[name], clean[name]), name
        for name in ("dq", "dv"):
            assert results[name][0, token, 0].isnan().all(), name
        assert results["dv"][0, start : token + 1, 0].isnan().all()
        assert results["dh0"][1, 0].isnan().all()
        behind = slice(min(chunk_start + 64, end), end)
        for name in ("dq", "dk", "dv", "dg"):
            assert torch.equal(results[name][0, behind], clean[name][0, behind]), name
        return
    seen = slice(token, token + 1) if operand == "q" else slice(token, end)
    assert results["o"][0, seen, 0].isnan().all()
    assert results["final_state"][1, 0].isnan().all() or operand == "q"
    if operand != "g":
        assert results["d" + ("k" if operand == "q" else "q")][0, token, 0].isnan().all()
    before = slice(start, chunk_start)
    assert torch.equal(results["o"][0, before], clean["o"][0, before])


def sweep(B, *sizes):
    return draw(for_this_gpu(B), 200, 4, *sizes), 70


def packed_sweep(*sizes):
    return draw_packed_sweep(*sizes, lengths=(0, 300, 4300, 65, 2000))


CASES = {  # the kernel; inputs and a token of the sequence in their middle
    "first of two chunks": ("gradients.chunk_pair", lambda: (draw(3, 128, 2, 256, 136), 10)),
    "second of two chunks": ("gradients.chunk_pair", lambda: (draw(3, 128, 2, 136, 136), 70)),
    "sweep": ("gradients.sweep", lambda: sweep(16, 128, 256)),
    "narrow sweep": ("gradients.small_sweep", lambda: sweep(50, 64, 64)),
    # Of the second segment.
    "packed sweep": ("gradients.sweep", lambda: (packed_sweep(16, 128, 256), 2500)),
    "packed sweep, few values": ("gradients.sweep", lambda: (packed_sweep(16, 128, 128), 2500)),
    "packed narrow sweep": ("gradients.small_sweep", lambda: (packed_sweep(64, 64, 64), 2500)),
}


@by_operand
@pytest.mark.parametrize("kernel, make", CASES.values(), ids=CASES)
def test_nan_stays_in_its_sequence_and_head(kernel, make, operand, operands):
    x, token = make()
    assert kernel in facts_of(x)
    n, tokens = len(x.initial_state) // 2, (len(x.q) // 2,)
    if x.cu_seqlens is not None:
        start, end = x.cu_seqlens[n : n + 2].tolist()
        tokens, token = (0, slice(start, end)), start + token
    clean = ours(x)
    getattr(x, operand)[tokens[0], token, 1, 5] = torch.nan
    results = ours(x)
    for name, t in results.items():
        mine = (n,) if name in ("final_state", "dh0") else tokens
        different = t != clean[name]
        different[mine] = False
        assert not different.any(), name
        other_heads = t[mine].clone()
        other_heads.select(-3 if name in ("final_state", "dh0") else -2, 1).zero_()
        assert other_heads.isfinite().all(), name
    gradients = ("dq", "dk", "dv", "dg")
    assert any(results[name][tokens][..., 1, :].isnan().any() for name in gradients)


@pytest.mark.usefixtures("path", "operands")
@pytest.mark.parametrize(
    "H, K, V",
    [
        *[(2, 64, 72), (2, 128, 72), (2, 256, 72)],
        *[(16, 128, 128), (16, 72, 200), (16, 128, 256), (64, 64, 64), (64, 40, 16)],
    ],
)
def test_nan_after_the_last_offset_is_ignored(H, K, V):
    x = draw(1, 695, H, K, V, lengths=UNEVEN_LENGTHS) if H == 2 else draw_packed_sweep(H, K, V)
    clean, end = ours(x), int(x.cu_seqlens[-1])
    for name in TOKENS:
        getattr(x, name)[:, end:] = torch.nan
    assert_same_bits(ours(x), clean)
