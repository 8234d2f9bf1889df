"""What `chunk_gla` and `fused_recurrent_gla` promise beside their values: resets, NaN, equal bits,
modes, linear memory; and their gradients against finite differences.
"""

import dataclasses
import json

import pytest
import torch
from common import DTYPES, GATES, PACKED_LENGTHS, assert_same_bits, run_python
from plans import cpu_plan
from recurrence import CALLS, STATES, exact

from gla_ext import batch_invariant, chunk_gla, chunk_linear_attn, fused_recurrent_gla

pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")
KEYS, BOTH, RECURRENT = (CALLS[name] for name in ("chunk", "chunk, both", "recurrent, both"))
CHUNKS = {name: call for name, call in CALLS.items() if call.chunks}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_chunks = pytest.mark.parametrize("call", CHUNKS.values(), ids=CHUNKS)
by_two = pytest.mark.parametrize("call", [KEYS, BOTH], ids=["keys", "both"])
by_packing = pytest.mark.parametrize("lengths", [None, PACKED_LENGTHS], ids=["batch", "packed"])


def gates(x):
    return [(name, getattr(x, name)) for name in ("gk", "gv") if getattr(x, name) is not None]


@by_dtype
@by_packing
@by_chunks
def test_resets_get_no_gradient(device, head, call, lengths, dtype):
    shape = (2, 130, 3, *head) if lengths is None else (1, 165, 3, *head)
    x = call.make(*shape, dtype=dtype, gate="reset", lengths=lengths, device=device)
    results = call.run(x)
    assert all(t.isfinite().all() for t in results.values())
    for name, g in gates(x):
        assert g.isinf().any()
        assert not results[f"d{name}"][g.isinf()].any()


@pytest.mark.parametrize("gate", [-torch.inf, -1e30, -200.0])
@pytest.mark.parametrize("call, of", [(KEYS, "gk"), (BOTH, "gv")], ids=["keys", "values"])
def test_only_resets(device, call, of, gate):
    """With nothing carried over a token sees itself alone: o_t = scale (q_t . k_t) v_t."""
    x = call.make(2, 130, 3, 20, 28, gate=0.1, device=device)
    getattr(x, of).fill_(gate)
    results = call.run(x)
    call.assert_close(results, x)
    assert not results[f"d{of}"].any() and not results["dh0"].any()


@by_dtype
@pytest.mark.parametrize("name", ["chunk", "chunk, a head's", "chunk, both"])
def test_a_reset_forgets(device, head, name, dtype):
    """With gates on values a channel of them does."""
    call = CALLS[name]
    x = call.make(1, 130, 2, *head, dtype=dtype, device=device)
    if x.gv is None:
        x.gk[:, 70] = -torch.inf
        channels = slice(None)
    else:
        channels = slice(None, None, 2)
        x.gv[:, 70, :, channels] = -torch.inf
    before = call.run(x)
    x.v[:, :70, :, channels] = 4.0
    if x.gv is None:
        x.k[:, :70] = 3.0
        x.initial_state.neg_()
    after = call.run(x)
    assert torch.equal(before["o"][:, 70:], after["o"][:, 70:])
    assert torch.equal(before["final_state"], after["final_state"])


def assert_same_elsewhere(results, clean, start, end):
    """Sequence 1, tokens start to end, may differ in head 0 alone."""
    for name, value in results.items():
        if name in STATES:
            assert torch.equal(value[::2], clean[name][::2]), name
            assert torch.equal(value[:, 1], clean[name][:, 1]), name
        else:
            assert torch.equal(value[0, :start], clean[name][0, :start]), name
            assert torch.equal(value[0, end:], clean[name][0, end:]), name
            assert torch.equal(value[0, :, 1], clean[name][0, :, 1]), name


@pytest.mark.parametrize("gate", [0.1, 10.0, "reset"])
@pytest.mark.parametrize(
    "call, operand", [*((KEYS, name) for name in ("q", "k", "v", "gk")), (BOTH, "v"), (BOTH, "gv")]
)
@pytest.mark.parametrize("token", [80, 127, 149])
def test_nan_is_never_silent_and_stays_in_its_sequence(device, token, call, operand, gate):
    start, end = 70, 150
    x = call.make(1, 153, 2, 5, 4, gate=gate, lengths=(70, 80, 3), device=device)
    clean = call.run(x)
    getattr(x, operand)[0, token, 0] = torch.nan
    results = call.run(x)

    seen = slice(token, token + 1) if operand == "q" else slice(token, end)
    assert results["o"][0, seen, 0].isnan().all()
    assert results["final_state"][1, 0].isnan().all() or operand == "q"
    # As docs/numerics.md says. Before v's block, and before the chunk, all bits are as without NaN.
    if call is KEYS:
        if operand != "gk":
            assert results["d" + ("k" if operand == "q" else "q")][0, token, 0].isnan().all()
        reach = 64 if device == "cuda" else 16 if operand == "v" else 1
        first = start + (token - start) // reach * reach
        assert not results["o"][0, start:first].isnan().any()
        if operand == "v":
            assert torch.equal(results["o"][0, start:first], clean["o"][0, start:first])
    chunk_start = start + (token - start) // 64 * 64
    assert torch.equal(results["o"][0, start:chunk_start], clean["o"][0, start:chunk_start])
    assert_same_elsewhere(results, clean, start, end)


@pytest.mark.parametrize("operator", [chunk_gla, chunk_linear_attn, fused_recurrent_gla])
@pytest.mark.parametrize("token", [77, 95, 96])
def test_nan_in_v_stays_in_its_row_and_reaches_back_as_documented(device, token, operator):
    """Token by token it reaches no earlier token; in chunks it may reach its block's first."""
    x = KEYS.make(2, 130, 2, 5, 4, gate=0.1, device=device)
    options = {"normalize": False} if operator is chunk_linear_attn else {}
    g = [] if operator is chunk_linear_attn else [x.gk]
    clean, _ = operator(x.q, x.k, x.v, *g, **options)
    x.v[0, token, 0, 1] = torch.nan
    found, _ = operator(x.q, x.k, x.v, *g, **options)

    reach = 1 if operator is fused_recurrent_gla else 16 if device == "cpu" else 64
    first = token // reach * reach
    assert found[0, token:, 0, 1].isnan().all()
    found[0, first:, 0, 1] = clean[0, first:, 0, 1]
    assert torch.equal(found, clean)


# Equal bits.

GATED = [(name, g) for name in CHUNKS for g in (GATES if name == "chunk" else (1.0, 10.0, "reset"))]


@by_dtype
@pytest.mark.parametrize("name, gate", GATED)
def test_both_modes_on_cpu(name, gate, dtype, monkeypatch):
    """States for every chunk, or kept in one sweep."""
    call, options = CALLS[name], {"dtype": dtype, "gate": gate}
    cases = [
        call.make(2, 200, 4, 20, 28, **options).sharing(2 if name == "chunk, both" else 4),
        call.make(1, 165, 3, 20, 28, **options, lengths=PACKED_LENGTHS),
        call.make(1, 300, 1, 33, 7, **options, states=False),
    ]
    for x in cases:
        results = {}
        for mode in ("materialised", "sweep"):
            monkeypatch.setenv("GLA_EXT_CPU_MODE", mode)
            assert cpu_plan(*x.q.shape, x.v.shape[-1])["mode"] == mode
            results[mode] = call.run(x)
        assert_same_bits(results["sweep"], results["materialised"])


@by_dtype
@pytest.mark.parametrize("call", [KEYS, RECURRENT], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("gate", [1.0, "reset"])
def test_same_bits_every_run(device, head, gate, call, dtype):
    x = call.make(2, 200, 3, *head, dtype=dtype, gate=gate, device=device)
    first = call.run(x)
    for _ in range(2):
        assert_same_bits(call.run(x), first)


def test_same_bits_with_any_number_of_threads():
    x, threads = KEYS.make(2, 600, 3, 20, 28), torch.get_num_threads()
    try:
        runs = []
        for n in (1, 3):
            torch.set_num_threads(n)
            runs += [KEYS.run(x) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


def sequence(x, n):
    """Sequence n of a packed row alone."""
    here = slice(*x.cu_seqlens[n : n + 2].tolist())
    alone = {
        name: t if t is None else t[n : n + 1] if name in ("initial_state", "dht") else t[:, here]
        for name, t in vars(x).items()
        if name != "cu_seqlens"
    }
    return dataclasses.replace(x, **alone, cu_seqlens=None), here


def assert_same_alone(call, x):
    packed = call.run(x)
    for n in range(len(x.cu_seqlens) - 1):
        alone, here = sequence(x, n)
        own = {name: t[n : n + 1] if name in STATES else t[:, here] for name, t in packed.items()}
        assert_same_bits(call.run(alone), own)
    return packed


INVARIANT = [
    ("chunk", 2, 20, 28),
    ("chunk", 2, 64, 32),
    ("chunk", 2, 1, 1),
    ("chunk, both", 2, 24, 40),
]
INVARIANT += [("chunk, a head's", 2, 20, 28), ("recurrent, both", 3, 20, 28)]


@by_dtype
@pytest.mark.parametrize("name, H, K, V", INVARIANT, ids=str)
@pytest.mark.parametrize("gate", [0.1, 2.0, "reset"])
def test_batch_invariance(device, gate, name, H, K, V, dtype):
    """A sequence gives the same bits alone, in a batch, and packed among others."""
    call, options = CALLS[name], {"dtype": dtype, "gate": gate, "device": device}
    B, T = 3, 130
    with batch_invariant():
        batch = call.make(B, T, H, K, V, **options)
        packed = batch.map(lambda t: t.flatten(0, 1)[None] if t.shape[1] == T else t)
        offsets = torch.arange(B + 1, device=device) * T
        results = assert_same_alone(call, dataclasses.replace(packed, cu_seqlens=offsets))
        in_batch = call.run(batch)
        assert_same_bits({n: t.view(in_batch[n].shape) for n, t in results.items()}, in_batch)
        if gate != 2.0:
            options |= {"lengths": PACKED_LENGTHS}
            assert_same_alone(call, call.make(1, 165, H, K, V, **options))


VARIABLES = """
import os, torch
from torch.utils._python_dispatch import TorchDispatchMode
class Record(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.gla_ext.chunk_gla_fwd.default:
            print(args[10], ops._for_backward_bytes)
        return function(*args, **(kwargs or {}))
x = torch.zeros(1, 1, 1, 1)
for invariant, keep in (("", ""), ("0", "1"), ("1", "0"), ("1", "off")):
    if os.fork() == 0:
        os.environ |= {"GLA_EXT_BATCH_INVARIANT": invariant, "GLA_EXT_KEEP_OPERANDS": keep}
        import gla_ext
        from gla_ext.ops import chunk as ops
        with Record():
            gla_ext.chunk_gla(x, x, x, x)
        plan = gla_ext.plan(8, 2048, 4, 256, 512, gpu=("9.0", 132))
        print(plan.for_backward_bytes > 0, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.slow
def test_who_sets_batch_invariance_and_what_to_keep():
    lines = run_python(VARIABLES).splitlines()
    assert lines[::2] == ["False -1", "False -1", "True 0", "True 0"]
    assert lines[1::2] == ["True", "True", "False", "False"]


@by_dtype
@by_two
def test_state_carries_over(device, head, call, dtype):
    x = call.make(2, 200, 3, *head, dtype=dtype, device=device)
    leaves, o = x.leaves(), []
    state = leaves.pop("initial_state")
    for part in (slice(0, 1), slice(1, 70), slice(70, 200)):
        tokens = {name: t if t is None else t[:, part] for name, t in leaves.items()}
        o_part, state = call.outputs(**tokens, initial_state=state)
        o.append(o_part)
    expected = exact(x)
    parts = {"o": torch.cat(o, 1), "final_state": state}
    call.assert_close(parts, x, expected={name: expected[name] for name in parts})


@pytest.mark.parametrize("call", [BOTH, RECURRENT], ids=["chunk", "recurrent"])
def test_nothing_but_inputs_is_saved(device, call):
    x = call.make(2, 37, 3, 20, 28, device=device).map(lambda t: t.requires_grad_())
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call.outputs(**x.leaves())
    inputs = {t.data_ptr() for t in x.leaves().values()}
    assert saved and all(t.data_ptr() in inputs for t in saved if t.numel())


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


@pytest.mark.slow
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


# Finite differences, in fp64. A full Jacobian costs a call for every number of the inputs.

SMALL = {"shape": (1, 20, 2, 3, 2)}
OVER_CHUNKS = {"shape": (2, 130, 2, 5, 3)}
PACKED = {"shape": (1, 80, 1, 2, 1), "lengths": (3, 0, 66, 5)}
NO_STATES = {"shape": (1, 70, 1, 2, 3), "states": False}
SHARED = {"shape": (1, 66, 4, 2, 1), "HK": 2}
SHARED_PACKED = {"shape": (1, 165, 4, 2, 1), "HK": 2, "lengths": PACKED_LENGTHS}
V_FIRST = {"shape": (2, 70, 2, 3, 2), "state_v_first": True}
DIFFERENCES = [(name, SMALL, 1.0, False) for name in ("chunk", "chunk, both", "recurrent, both")]
DIFFERENCES += [("chunk", SMALL, 10.0, False)]
DIFFERENCES += [
    (name, case, gate, True)
    for name in CHUNKS
    for case, gate in ((SMALL, 10.0), (OVER_CHUNKS, 0.1), (OVER_CHUNKS, 2.0), (PACKED, 1.0))
]
DIFFERENCES += [("chunk", case, 0.0, True) for case in (SMALL, OVER_CHUNKS)]
DIFFERENCES += [
    ("chunk, both", case, 1.0, True) for case in (NO_STATES, SHARED, SHARED_PACKED, V_FIRST)
]
SMALL_PACKED = {"shape": (1, 20, 2, 3, 2), "lengths": (3, 0, 14, 1)}
REVERSED = {"reverse": True, "state_v_first": True}
DIFFERENCES += [
    (name, case, 1.0, True)
    for name, call in CALLS.items()
    if not call.chunks
    for case in (SMALL, SMALL_PACKED | REVERSED | {"states": False})
]
DIFFERENCES += [("recurrent, both", case, 1.0, True) for case in (SHARED, SMALL_PACKED | REVERSED)]


@pytest.mark.parametrize("name, case, gate, fast", DIFFERENCES, ids=str)
def test_gradcheck(name, case, gate, fast):
    call, case = CALLS[name], dict(case)
    shape, HK = case.pop("shape"), case.pop("HK", None)
    options = {n: case.pop(n) for n in ("reverse", "state_v_first") if n in case}
    x = call.make(*shape, dtype=torch.float64, gate=gate, **case).sharing(HK or shape[2])
    x = x.v_first() if "state_v_first" in options else x
    leaves = {n: t.requires_grad_() for n, t in x.leaves().items() if t is not None}

    def function(*given):
        operands = dict.fromkeys(x.leaves()) | dict(zip(leaves, given, strict=True))
        return call.outputs(**operands, scale=0.7, cu_seqlens=x.cu_seqlens, **options)

    assert torch.autograd.gradcheck(function, [*leaves.values()], fast_mode=fast)
