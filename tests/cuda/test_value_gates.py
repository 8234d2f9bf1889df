"""`chunk_gla` with gates on values on CUDA: accuracy, sizes, bits, graphs, the sanitizer."""

import dataclasses

import pytest
import torch
from common import (
    BAD_OFFSETS,
    CUDA_DTYPES,
    PACKED_LENGTHS,
    assert_graph_replays,
    assert_same_bits,
    count_differences,
)
from cuda_tools import waits_for_nothing
from recurrence import (
    CHUNKED_BF16,
    Recurrence,
    assert_chunked_close,
    cancelling_terms,
    chunked,
    exact,
    make_recurrence,
)
from torch.nn.functional import logsigmoid

from gla_ext import chunk_gla
from gla_ext.selftest import TF32_TOLERANCE, relative_error, tolerance

pytestmark = pytest.mark.cuda
by_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
by_gating = pytest.mark.parametrize("gating", ["none", "gv", "both"])
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])

# Row i of the batch has the i-th gates, as in test_accuracy.py, on keys and on values.
GATES = {"n = 0.1": 0.1, "n = 1": 1.0, "n = 4": 4.0, "n = 16": 16.0, "n = 64": 64.0, "resets": 1.0}
FORMATS = [
    ("fp32, gv", torch.float32, "ieee"),
    ("fp32, gv, tf32 allowed", torch.float32, "tf32"),
    ("bf16, gv", torch.bfloat16, "ieee"),
    ("fp16, gv", torch.float16, "ieee"),
]
HEAD_SIZES = [
    *[(1, 1), (1, 512), (512, 1), (7, 17), (31, 33), (60, 72), (64, 64), (65, 129), (72, 100)],
    *[(128, 64), (128, 256), (136, 72), (257, 96), (256, 512), (511, 509), (512, 512)],
]


def inputs_of_all_gates(T: int, K: int, V: int, dtype: torch.dtype) -> Recurrence:
    x = make_recurrence(len(GATES), T, 2, K, V, dtype=torch.float32, device="cuda")
    strength = torch.tensor([*GATES.values()], device="cuda").view(-1, 1, 1, 1)
    generator = torch.Generator("cuda").manual_seed(1)
    gates = {}
    for name in ("gk", "gv"):
        like = getattr(x, name)
        g = torch.randn(like.shape, generator=generator, device="cuda")
        g = logsigmoid(g) / strength
        chance = torch.rand(g[-1].shape, generator=generator, device="cuda")
        g[-1].masked_fill_(chance < 0.3, -torch.inf)
        gates[name] = g.to(dtype)
    short = {name: getattr(x, name).to(dtype) for name in ("q", "k", "v", "do")}
    return dataclasses.replace(x, **short, **gates)


@pytest.fixture
def tf32_as_before():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("tf32_as_before")
@pytest.mark.parametrize("name, dtype, products", FORMATS, ids=[name for name, *_ in FORMATS])
@pytest.mark.parametrize("T, K, V", [(1000, 64, 64), (1000, 128, 256), (999, 60, 100)])
def test_accuracy(T, K, V, name, dtype, products, accuracy):
    x = inputs_of_all_gates(T, K, V, dtype)
    expected = exact(x)
    torch.set_float32_matmul_precision("high" if products == "tf32" else "highest")
    results, wrong = chunked(x), []
    for quantity, value in results.items():
        bound = TF32_TOLERANCE if products == "tf32" else tolerance(quantity, dtype)
        bound = CHUNKED_BF16 if dtype == torch.bfloat16 else bound
        for row, gates in enumerate(GATES):
            truth = expected[quantity][row]
            error = relative_error(value[row], truth)
            accuracy[(name, gates), quantity] = error
            terms = cancelling_terms(quantity, x, expected, slice(row, row + 1))
            rounding = 8 * torch.finfo(torch.float32).eps * terms
            if not error <= bound + rounding / truth.square().mean().sqrt().item():
                wrong.append(f"{gates}: {quantity} is off by {error:.1e}, allowed {bound:.1e}")
    assert not wrong, "; ".join(wrong)


@pytest.mark.usefixtures("nan_in_fresh_memory")
@by_dtype
@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
@pytest.mark.parametrize("K, V", HEAD_SIZES)
def test_head_sizes(K, V, gate, dtype):
    B = 64 if K == V == 1 else 1  # enough numbers for their RMS to say something
    x = make_recurrence(B, 82, 2, K, V, dtype=dtype, gate=gate, device="cuda")
    assert_chunked_close(chunked(x), exact(x), x)


def test_head_sizes_beyond_512():
    x = make_recurrence(1, 2, 1, 4, 513, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(NotImplementedError, match=r"chunk_gla: .*512.*513"):
        chunked(x)


@pytest.mark.parametrize("gating", ["gv", "both"])
def test_the_fused_path_does_not_take_them(gating, monkeypatch):
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "fused")
    x = make_recurrence(1, 64, 1, 64, 64, dtype=torch.bfloat16, gating=gating, device="cuda")
    message = "chunk_gla: GLA_EXT_CUDA_PATH=fused .*no gates on values"
    with pytest.raises(NotImplementedError, match=message):
        chunked(x)


def test_packed_has_the_bits_of_a_batch():
    x = make_recurrence(200, 67, 4, 24, 40, dtype=torch.bfloat16, gate=0.3, device="cuda")
    offsets = torch.arange(201, dtype=torch.int32, device="cuda") * 67
    packed = dataclasses.replace(
        x.map(lambda t: t if t.shape[1] == 4 else t.flatten(0, 1)[None]), cu_seqlens=offsets
    )
    batch = chunked(x)
    assert_same_bits({n: t.view(batch[n].shape) for n, t in chunked(packed).items()}, batch)


@by_dtype
@by_packing
def test_same_bits_beside_other_work(lengths, dtype):
    B, T = (4, 330) if lengths is None else (1, 165)
    for gate in (0.1, 2.0, "reset"):
        x = make_recurrence(
            B, T, 4, 64, 128, dtype=dtype, gate=gate, lengths=lengths, device="cuda"
        )
        expected = chunked(x)
        noise, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
        differences = 0
        for i in range(30):
            with torch.cuda.stream(stream):
                for _ in range(i % 4):
                    noise = (noise @ noise).clamp(-1, 1)
            differences = differences + count_differences(chunked(x), expected)
        assert differences.item() == 0


def test_many_times_at_full_load():
    x = make_recurrence(8, 1024, 4, 128, 256, dtype=torch.bfloat16, gate=0.3, device="cuda")
    expected = chunked(x)
    assert all(t.isfinite().all() for t in expected.values())
    differences = sum(count_differences(chunked(x), expected) for _ in range(200))
    assert differences.item() == 0


@by_packing
@by_gating
@by_dtype
def test_no_synchronisation(dtype, gating, lengths):
    B, T = (3, 130) if lengths is None else (1, 165)
    x = make_recurrence(B, T, 2, 64, 72, dtype=dtype, gating=gating, lengths=lengths, device="cuda")
    expected = chunked(x)
    with waits_for_nothing():
        results = chunked(x)
    assert_same_bits(results, expected)


@by_packing
@by_gating
@by_dtype
def test_graph_replays_with_other_data(dtype, gating, lengths):
    B, T = (3, 130) if lengths is None else (1, 165)

    def inputs(seed, gate, lengths=lengths):
        return make_recurrence(
            B, T, 2, 64, 72, dtype=dtype, gating=gating, gate=gate, lengths=lengths, seed=seed,
            device="cuda",
        )  # fmt: skip

    static, cases = inputs(0, 0.1), [inputs(1, "reset"), inputs(2, 2.0)]
    if lengths is not None:
        cases.append(inputs(3, 0.1, (64, 0, 30, 1, 5, 60, 0)))
    assert_graph_replays(chunked, static, [*cases, cases[0]])


@pytest.mark.parametrize("what", BAD_OFFSETS)
def test_bad_offsets_stay_inside_the_tensors(what):
    good = make_recurrence(1, 165, 2, 24, 40, lengths=PACKED_LENGTHS, device="cuda")
    expected = chunked(good)
    offsets = torch.tensor(BAD_OFFSETS[what], device="cuda")
    for factor in (1, 2**32):
        results = chunked(dataclasses.replace(good, cu_seqlens=offsets * factor))
        torch.cuda.synchronize()
        assert all(results[name].shape == expected[name].shape for name in expected)
    assert_same_bits(chunked(good), expected)


def test_forward_keeps_its_outputs_alone():
    x = make_recurrence(4, 1024, 4, 128, 128, dtype=torch.bfloat16, device="cuda")
    x = x.map(lambda t: t.requires_grad_())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o, _ = chunk_gla(x.q, x.k, x.v, x.gk, gv=x.gv)
    assert torch.cuda.memory_allocated() - before <= o.nbytes + 4 * 512


SANITIZED = {  # B, T, H, K, V, options
    "aligned": ((1, 80, 1, 64, 128), {}),
    "wide": ((1, 66, 1, 128, 256), {}),
    "odd": ((1, 81, 2, 33, 65), {}),
    "widest": ((1, 17, 1, 512, 512), {}),
    "misaligned": ((1, 70, 1, 64, 64), {"layout": "misaligned"}),
    "strided": ((1, 70, 2, 20, 28), {"layout": "sliced"}),
    "packed": ((1, 165, 1, 20, 28), {"lengths": PACKED_LENGTHS}),
    "no gates on keys": ((2, 65, 1, 24, 40), {"gating": "gv"}),
    "no gates": ((2, 65, 1, 24, 40), {"gating": "none"}),
}


@pytest.mark.sanitizer
@by_dtype
@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
@pytest.mark.parametrize("what", SANITIZED)
def test_for_the_sanitizer(what, gate, dtype):
    sizes, options = SANITIZED[what]
    x = make_recurrence(*sizes, dtype=dtype, gate=gate, **options)
    there = make_recurrence(*sizes, dtype=dtype, gate=gate, device="cuda", **options)
    results = {name: t.cpu() for name, t in chunked(there).items()}
    assert_chunked_close(results, exact(x), x)
