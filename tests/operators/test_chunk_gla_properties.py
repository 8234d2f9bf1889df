"""What `chunk_gla` promises beside its values: resets, NaN, equal bits, modes, linear memory."""

import json

import pytest
import torch
from common import (
    DTYPES,
    GATES,
    PACKED_LENGTHS,
    Inputs,
    assert_results_close,
    assert_same_bits,
    exact,
    make_inputs,
    ours,
    run_python,
    run_python_under,
)
from plans import cpu_plan

from gla_ext import batch_invariant, chunk_gla, chunk_linear_attn, fused_recurrent_gla

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_gate = pytest.mark.parametrize("gate", GATES)


@by_dtype
@pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])
def test_resets_get_no_gradient(device, head, lengths, dtype):
    shape = (2, 130, 3, *head) if lengths is None else (1, 165, 3, *head)
    x = make_inputs(*shape, dtype, "reset", lengths=lengths, device=device)
    reset = x.g.isinf()
    assert reset.any()
    results = ours(x)
    assert all(value.isfinite().all() for value in results.values())
    assert not results["dg"][reset].any()


@pytest.mark.parametrize("gate", [-torch.inf, -1e30, -200.0])
def test_only_resets(device, gate):
    """With nothing carried over a token sees itself alone: o_t = scale (q_t . k_t) v_t."""
    x = make_inputs(2, 130, 3, 20, 28, torch.float32, device=device)
    x.g.fill_(gate)
    results = ours(x)
    assert_results_close(results, exact(x), x)
    assert not results["dg"].any()
    assert not results["dh0"].any()


@by_dtype
def test_a_reset_forgets(device, head, dtype):
    x = make_inputs(1, 130, 2, *head, dtype, device=device)
    x.g[:, 70] = -torch.inf
    before = ours(x)
    x.k[:, :70], x.v[:, :70] = 3.0, 4.0
    after = ours(x)
    assert torch.equal(before["o"][:, 70:], after["o"][:, 70:])
    assert torch.equal(before["final_state"], after["final_state"])


@pytest.mark.parametrize("gate", [0.1, 10.0, "reset"])
@pytest.mark.parametrize("operand", ["q", "k", "v", "g"])
@pytest.mark.parametrize("token", [80, 100, 127, 149])
def test_nan_is_never_silent_and_stays_in_its_sequence(device, token, operand, gate):
    lengths, (start, end) = (70, 80, 3), (70, 150)
    x = make_inputs(1, 153, 2, 5, 4, torch.float32, gate, lengths=lengths, device=device)
    clean = ours(x)
    getattr(x, operand)[0, token, 0] = torch.nan
    results = ours(x)

    seen = slice(token, token + 1) if operand == "q" else slice(token, end)
    assert results["o"][0, seen, 0].isnan().all()
    assert results["final_state"][1, 0].isnan().all() or operand == "q"
    if operand != "g":
        assert results["d" + ("k" if operand == "q" else "q")][0, token, 0].isnan().all()

    # As docs/numerics.md says. Before v's block, and before the chunk, all bits are as without NaN.
    reach = 64 if device == "cuda" else 16 if operand == "v" else 1
    first = start + (token - start) // reach * reach
    assert not results["o"][0, start:first].isnan().any()
    if operand == "v":
        assert torch.equal(results["o"][0, start:first], clean["o"][0, start:first])
    chunk_start = start + (token - start) // 64 * 64
    assert torch.equal(results["o"][0, start:chunk_start], clean["o"][0, start:chunk_start])
    for name, value in results.items():
        if name in ("final_state", "dh0"):
            assert torch.equal(value[::2], clean[name][::2]), name
            assert torch.equal(value[:, 1], clean[name][:, 1]), name
        else:
            assert torch.equal(value[0, :start], clean[name][0, :start]), name
            assert torch.equal(value[0, end:], clean[name][0, end:]), name
            assert torch.equal(value[0, :, 1], clean[name][0, :, 1]), name


@pytest.mark.parametrize("operator", [chunk_gla, chunk_linear_attn, fused_recurrent_gla])
@pytest.mark.parametrize("token", [77, 95, 96])
def test_nan_in_v_stays_in_its_row_and_reaches_back_as_documented(device, token, operator):
    """Token by token it reaches no earlier token; in chunks it may reach its block's first."""
    x = make_inputs(2, 130, 2, 5, 4, torch.float32, 0.1, device=device)
    options = {"normalize": False} if operator is chunk_linear_attn else {}
    gates = [] if operator is chunk_linear_attn else [x.g]
    clean, _ = operator(x.q, x.k, x.v, *gates, **options)
    x.v[0, token, 0, 1] = torch.nan
    found, _ = operator(x.q, x.k, x.v, *gates, **options)

    reach = 1 if operator is fused_recurrent_gla else 16 if device == "cpu" else 64
    first = token // reach * reach
    assert found[0, token:, 0, 1].isnan().all()
    found[0, first:, 0, 1] = clean[0, first:, 0, 1]
    assert torch.equal(found, clean)


def test_nan_after_the_last_offset_is_ignored(device):
    x = make_inputs(1, 165, 3, 5, 4, lengths=PACKED_LENGTHS, device=device)
    end = int(x.cu_seqlens[-1])
    clean = ours(x)
    for name in ("q", "k", "v", "g", "do"):
        getattr(x, name)[:, end:] = torch.nan
    assert_same_bits(ours(x), clean)


@by_dtype
@by_gate
def test_both_modes(gate, dtype, monkeypatch):
    """States for every chunk, or kept in one sweep: the same bits."""
    cases = [
        make_inputs(2, 200, 3, 20, 28, dtype, gate),
        make_inputs(1, 165, 3, 20, 28, dtype, gate, lengths=PACKED_LENGTHS),
        make_inputs(1, 300, 1, 33, 7, dtype, gate, states=False),
    ]
    for x in cases:
        results = {}
        for mode in ("materialised", "sweep"):
            monkeypatch.setenv("GLA_EXT_CPU_MODE", mode)
            assert cpu_plan(*x.q.shape, x.v.shape[-1])["mode"] == mode
            results[mode] = ours(x)
        assert_same_bits(results["sweep"], results["materialised"])


@by_dtype
@pytest.mark.parametrize("gate", [1.0, "reset"])
def test_same_bits_every_run(device, head, gate, dtype):
    x = make_inputs(2, 200, 3, *head, dtype, gate, device=device)
    first = ours(x)
    for _ in range(5):
        assert_same_bits(ours(x), first)


def test_same_bits_with_any_number_of_threads():
    x, threads = make_inputs(2, 600, 3, 20, 28, torch.float32), torch.get_num_threads()
    try:
        runs = []
        for n in (1, 3):
            torch.set_num_threads(n)
            runs += [ours(x) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@by_dtype
@pytest.mark.parametrize("K, V", [(20, 28), (64, 32), (1, 1)])
@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
def test_batch_invariance(device, gate, K, V, dtype):
    """A sequence gives the same bits alone, in a batch, and packed among others."""
    B, T, H = 3, 130, 2
    with batch_invariant():
        batch = make_inputs(B, T, H, K, V, dtype, gate, device=device)
        in_batch = ours(batch)
        tokens = ("q", "k", "v", "g", "do")
        packed = Inputs(
            **{name: getattr(batch, name).reshape(1, B * T, H, -1) for name in tokens},
            initial_state=batch.initial_state,
            dht=batch.dht,
            cu_seqlens=torch.arange(B + 1, device=device) * T,
        )
        in_packed = ours(packed)
        for name in ("final_state", "dh0"):
            assert torch.equal(in_packed[name], in_batch[name]), name
        for name in ("o", "dq", "dk", "dv", "dg"):
            assert torch.equal(in_packed[name].view(in_batch[name].shape), in_batch[name]), name
        for n in range(B):
            alone = ours(batch.select(n))
            assert_same_bits(alone, {name: x[n : n + 1] for name, x in in_batch.items()})


@by_dtype
def test_batch_invariance_with_other_neighbours(device, head, dtype):
    with batch_invariant():
        x = make_inputs(1, 165, 3, *head, dtype, lengths=PACKED_LENGTHS, device=device)
        packed = ours(x)
        for n, (start, end) in enumerate(zip(x.cu_seqlens, x.cu_seqlens[1:], strict=False)):
            own = {name: y[:, start:end] for name, y in packed.items()}
            own |= {name: packed[name][n : n + 1] for name in ("final_state", "dh0")}
            assert_same_bits(ours(x.select(n)), own)


BATCH_INVARIANT = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from gla_ext import batch_invariant, chunk_gla
class Record(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.gla_ext.chunk_gla_fwd.default:
            print(args[10])
        return function(*args, **(kwargs or {}))
x = torch.zeros(1, 1, 1, 1)
with Record():
    chunk_gla(x, x, x, x)
    with batch_invariant():
        chunk_gla(x, x, x, x)
        with batch_invariant(False):
            chunk_gla(x, x, x, x)
    chunk_gla(x, x, x, x)
"""


def test_who_sets_batch_invariance():
    defaults = {"": "False", "0": "False", "1": "True"}
    outputs = run_python_under("GLA_EXT_BATCH_INVARIANT", defaults, BATCH_INVARIANT)
    for variable, default in defaults.items():
        assert outputs[variable].split() == [default, "True", "False", default]


KEEP_OPERANDS = """
from gla_ext.ops import chunk as ops
print(ops._for_backward_bytes)
"""


def test_who_sets_what_to_keep():
    passed = {"": "-1\n", "1": "-1\n", "0": "0\n", "off": "0\n"}
    assert run_python_under("GLA_EXT_KEEP_OPERANDS", passed, KEEP_OPERANDS) == passed


@by_dtype
def test_state_carries_over(device, head, dtype):
    x = make_inputs(2, 200, 3, *head, dtype, device=device)
    state, o = x.initial_state, []
    for part in (slice(0, 1), slice(1, 70), slice(70, 200)):
        tokens = (y[:, part] for y in (x.q, x.k, x.v, x.g))
        o_part, state = chunk_gla(*tokens, initial_state=state, output_final_state=True)
        o.append(o_part)
    expected = exact(x)
    parts = {"o": torch.cat(o, 1), "final_state": state}
    assert_results_close(parts, {name: expected[name] for name in parts}, x)


MEMORY = """
import json, torch
from gla_ext import chunk_gla
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
def run(T, K=64, V=64):
    x = [torch.randn(1, T, 1, D).requires_grad_() for D in (K, K, V, K)]
    x[3] = (-x[3].detach().abs() / 16).requires_grad_()
    o, _ = chunk_gla(*x)
    o.backward(torch.randn_like(o))
run(128)
before = peak()
sizes = {}
for T in (8192, 16384, 32768):
    run(T)
    sizes[T] = peak() - before
print(json.dumps(sizes))
"""


@pytest.mark.parametrize("mode", ["materialised", "sweep"])
def test_memory_is_linear_in_tokens(mode):
    """Inputs, outputs and gradients are 10 tensors of T * 64 numbers; a [T, T] tensor would be T /
    64 times as large as one of them, a [T, K, V] tensor 64 times, so 24 in all leave room for
    neither.
    """
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # nothing fragments
    output = run_python(MEMORY, GLA_EXT_CPU_MODE=mode, OMP_NUM_THREADS="2", **malloc)
    peaks = {int(T): peak for T, peak in json.loads(output).items()}
    one_tensor = 32768 * 64 * 4
    assert peaks[32768] < 24 * one_tensor
    assert peaks[32768] > 8 * one_tensor  # the measurement sees what it must
    assert peaks[32768] - peaks[16384] < 1.3 * 2 * (peaks[16384] - peaks[8192]) + one_tensor
