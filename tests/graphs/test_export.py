"""The operators as plain operations: in exported programs, and in ONNX files that run."""

import itertools

import pytest
import torch
from common import assert_close, make_inputs
from models import EVERY, MODEL_EVERY, make_ids, make_layer, make_model, make_x
from source_tree import load_module

from gla_ext import (
    chunk_gla,
    chunk_gla_,
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)
from gla_ext.export import decompositions
from gla_ext.layers.activations import ACTIVATIONS

OPS = torch.ops.gla_ext
examples = load_module("examples/aot_inductor.py")
GATES = (0.1, 10.0, "reset")
BOUND = 1e-12


@pytest.fixture(scope="module")
def table():
    return decompositions()


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_decomposes(table, op, *args, bound=BOUND):
    """All that the operator returns, in value, shape and dtype."""
    results = [op(*args), table[op](*args)]
    expected, actual = ((x,) if isinstance(x, torch.Tensor) else x for x in results)
    for name, one, other in zip(range(len(expected)), actual, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, (op, name)
        assert_close(one, other, bound, name=f"{op} {name}")


@pytest.mark.parametrize("T", [1, 2, 16, 17, 64, 300])
@pytest.mark.parametrize("gate", GATES)
def test_recurrence(table, T, gate):
    x = make_inputs(2, T, 2, 5, 6, torch.float64, gate)
    values = make_inputs(2, T, 2, 6, 6, torch.float64, gate, seed=1).g
    v_first = x.initial_state.mT.contiguous()
    for gv, g in ((None, x.g), (values, x.g), (values, None), (None, None)):
        for h0 in (None, v_first):
            args = (x.q, x.k, x.v, g, gv, h0, None, None, True, True)
            assert_decomposes(table, OPS.chunk_gla_fwd.default, *args, False)
        args = (x.q, x.k, x.v, g, gv, x.initial_state, None, 0.3, True, True, False)
        assert_decomposes(table, OPS.recurrent_gla_fwd.default, *args)


@pytest.mark.parametrize(
    "lengths", [(5, 0, 64, 1, 0, 70, 16), (0, 0, 3), (33, 0), (0, 400, 1, 16, 0)], ids=str
)
@pytest.mark.parametrize("tail", [0, 9])
@pytest.mark.parametrize("gate", GATES)
def test_packed_recurrence(table, lengths, tail, gate):
    T = sum(lengths) + tail
    x = make_inputs(1, T, 2, 5, 6, torch.float64, gate, lengths=lengths)
    values = make_inputs(1, T, 2, 6, 6, torch.float64, gate, seed=1).g
    offsets = (x.cu_seqlens, x.cu_seqlens.int())
    for gv, h0, cu_seqlens in itertools.product((None, values), (None, x.initial_state), offsets):
        args = (x.q, x.k, x.v, x.g, gv, h0, cu_seqlens, None, True)
        assert_decomposes(table, OPS.chunk_gla_fwd.default, *args, False, False)
        assert_decomposes(table, OPS.recurrent_gla_fwd.default, *args, False, False)


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shared_heads_in_other_dtypes(table, dtype, final):
    x = make_inputs(2, 70, 4, 8, 12, dtype, gate_dtype=torch.float32)
    k, v, g = (t[:, :, :2].contiguous() for t in (x.k, x.v, x.g))
    args = (x.q, k, v, g, None, x.initial_state, None, None, final)
    bound = 1e-5 if dtype == torch.float32 else 4e-3
    assert_decomposes(table, OPS.chunk_gla_fwd.default, *args, False, False, bound=bound)
    assert_decomposes(table, OPS.recurrent_gla_fwd.default, *args, False, False, bound=bound)


def test_strong_gates_cost_fp32_no_precision():
    """After resets, where sums of gates since the start would be far larger than what is left."""
    x = make_inputs(1, 600, 1, 8, 8, gate=0.01)
    x.g[:, ::3] = -torch.inf
    args = (x.q, x.k, x.v, x.g, None, x.initial_state, None, None, True, False, False)
    results = decompositions()[OPS.chunk_gla_fwd.default](*args)
    wide = x.double()
    exact = fused_recurrent_gla(
        wide.q, wide.k, wide.v, wide.g, None, None, wide.initial_state, output_final_state=True
    )
    for actual, expected in zip(results[:2], exact, strict=True):
        assert_close(actual, expected, 3e-6)


def test_verification(table):
    x = make_inputs(3, 5, 2, 5, 6, torch.float64)
    pool = draw(4, 2, 5, 6)
    for slots in (torch.tensor([2, -1, 2]), torch.tensor([0, 4, 3], dtype=torch.int32)):
        args = (x.q, x.k, x.v, x.g, None, pool, slots, None, False)
        assert_decomposes(table, OPS.recurrent_gla_verify.default, *args)
    args = (x.q, x.k, x.v, x.g, None, pool[:3].mT.contiguous(), None, None, True)
    assert_decomposes(table, OPS.recurrent_gla_verify.default, *args)
    cu_seqlens = torch.tensor([0, 3, 3, 9, 13])
    packed = [t.flatten(0, 1)[None] for t in (x.q, x.k, x.v, x.g)]
    for slots in (torch.tensor([2, -1, 2, 9]), None):
        args = (*packed, None, pool, slots, None, False, cu_seqlens)
        assert_decomposes(table, OPS.recurrent_gla_verify.default, *args)


@pytest.mark.parametrize("W", [1, 4])
@pytest.mark.parametrize("lengths", [None, (5, 0, 1, 2, 7), (0, 2, 0)], ids=str)
def test_convolution(table, W, lengths):
    for T in (1, 3, 20) if lengths is None else (sum(lengths), sum(lengths) + 5):
        B = 2 if lengths is None else 1
        N = 2 if lengths is None else len(lengths)
        offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
        x, weight, bias, cache = draw(B, T, 6), draw(6, 1, W), draw(6), draw(N, 6, W)
        op = OPS.short_convolution_fwd.default
        for state in (False, True):
            assert_decomposes(table, op, x, weight, None, None, offsets, state)
            assert_decomposes(table, op, x, weight, bias, cache, offsets, state)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_norm(table, activation):
    x, weight, gate = draw(2, 3, 8), draw(8), draw(2, 3, 8, seed=1)
    op = OPS.rms_norm_gate_fwd.default
    for args in ((weight, gate), (None, gate), (weight, None), (None, None)):
        assert_decomposes(table, op, x, *args, activation, 1e-5)
    o, map_weight = draw(2, 3, 3, 8), draw(5, 24)
    for w in (weight, None):
        args = (o, draw(2, 3, 24), map_weight, w, activation, 1e-5)
        assert_decomposes(table, OPS.norm_gate_linear.default, *args)


def test_swiglu(table):
    gate, up, weight, bias = draw(2, 3, 8), draw(2, 3, 8, seed=1), draw(5, 8), draw(5)
    assert_decomposes(table, OPS.swiglu_fwd.default, gate, up)
    for b in (bias, None):
        assert_decomposes(table, OPS.swiglu_linear.default, gate, up, weight, b)


def operators_of(program):
    return {str(node.target) for node in program.graph.nodes if "gla_ext" in str(node.target)}


def test_an_exported_model_is_torchs_alone(table):
    model = make_model(torch.float64, **MODEL_EVERY, num_hidden_layers=1)
    ids = make_ids(T=20)
    program = torch.export.export(model, (ids,))
    assert operators_of(program)
    program = program.run_decompositions(table)
    assert not operators_of(program)
    assert_close(program.module()(ids).logits, model(ids).logits, BOUND)


class Recurrence(torch.nn.Module):
    def forward(self, q, k, v, g, h0, gv=None):
        return chunk_gla(q, k, v, g, initial_state=h0, output_final_state=True, gv=gv)


def test_an_exported_length_is_symbolic(table):
    def arguments(T):
        x = make_inputs(2, T, 2, 4, 6, torch.float64, "reset")
        return x.q, x.k, x.v, x.g, x.initial_state

    T = {1: torch.export.Dim("T", min=2, max=1 << 16)}
    program = torch.export.export(Recurrence(), arguments(5), dynamic_shapes=(T, T, T, T, None))
    program = program.run_decompositions(table)
    assert not operators_of(program)
    for length in (2, 16, 17, 300):
        args = arguments(length)
        for actual, expected in zip(program.module()(*args), Recurrence()(*args), strict=True):
            assert_close(actual, expected, BOUND)


def test_what_has_no_plain_form(table):
    x = make_inputs(1, 20, 2, 4, 6, lengths=(12, 8))
    args = (x.q, x.k, x.v, x.g, None, None, x.cu_seqlens, None, False)
    with pytest.raises(NotImplementedError, match="reverse = True with cu_seqlens"):
        table[OPS.recurrent_gla_fwd.default](*args, True, False)
    with pytest.raises(NotImplementedError, match="keeps 3 bytes for backward"):
        table[OPS.chunk_gla_fwd.default](*args, False, False, 3)


def onnx_session(model, args, path, **options):
    """A function that runs the model's ONNX file, in the exporter of torch.export by default."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.onnx.export(model, args, path, **{"dynamo": True, "verbose": False} | options)
    session = onnxruntime.InferenceSession(path)

    def run(*inputs):
        named = zip(session.get_inputs(), inputs, strict=True)
        results = session.run(None, {x.name: value.numpy() for x, value in named})
        return [torch.from_numpy(result) for result in results]

    return run


class Output(torch.nn.Module):
    """The first of what a module returns, or the logits of a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, mask=None):
        y = self.module(x) if mask is None else self.module(x, attention_mask=mask)
        return y.logits if hasattr(y, "logits") else y[0]


def assert_runs(run, model, *inputs, bound=1e-5):
    with torch.no_grad():
        expected = model(*inputs)
    expected = getattr(expected, "logits", expected)
    assert_close(run(*inputs)[0], expected, bound)


@pytest.mark.slow
def test_onnx_of_a_model(tmp_path):
    """By the line that torch's pages have, and nothing before it."""
    attn = {"layers": [1], "num_heads": 2, "num_kv_heads": 1, "window_size": 9}
    model, ids = make_model(**MODEL_EVERY, attn=attn), make_ids()
    run = onnx_session(model, (ids,), tmp_path / "model.onnx")
    assert_runs(run, model, make_ids(seed=5))


@pytest.mark.parametrize("options", [{}, EVERY], ids=["default", "every"])
@pytest.mark.filterwarnings("ignore")  # of what torch calls legacy
def test_onnx_by_torchscript(options, tmp_path):
    layer = Output(make_layer(torch.float32, **options)).eval()
    run = onnx_session(layer, (make_x(dtype=torch.float32),), tmp_path / "x.onnx", dynamo=False)
    assert_runs(run, layer, make_x(dtype=torch.float32, seed=5))


@pytest.mark.parametrize("attn", [None, {}, {"num_kv_heads": 1, "window_size": 9}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_onnx_of_a_model_by_torchscript(attn, tmp_path):
    """As it is, not in a module that calls it: then the exporter passes the defaults, too."""
    attn = None if attn is None else {"layers": [1], "num_heads": 2} | attn
    model = make_model(**MODEL_EVERY, attn=attn)
    run = onnx_session(model, (make_ids(),), tmp_path / "model.onnx", dynamo=False)
    assert_runs(run, model, make_ids(seed=5))


@pytest.mark.filterwarnings("ignore")
def test_onnx_of_a_padded_hybrid_by_torchscript(tmp_path):
    model = Output(make_model(**MODEL_EVERY, attn={"layers": [1], "num_heads": 2}))
    ids = make_ids()
    mask = (torch.arange(ids.shape[1]) >= torch.tensor([[5], [0]])).long()
    run = onnx_session(model, (ids, mask), tmp_path / "model.onnx", dynamo=False)
    with torch.no_grad():
        for seen in (mask, mask.flip(0)):
            (actual,), expected = run(ids, seen), model(ids, seen)
            assert_close(actual[seen == 1], expected[seen == 1], 1e-5)


@pytest.mark.parametrize(
    ("T", "options"),
    [
        pytest.param(20, {"dynamo": True}, marks=pytest.mark.slow),
        (20, {"dynamo": False}),
        (1, {"dynamo": False}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_onnx_of_a_segment_with_its_states(T, options, tmp_path):
    """A padded one: packed, states in and out, of the recurrence and of the convolutions."""
    segment = examples.Segment(make_layer(torch.float32, layer_idx=0, **EVERY)).eval()
    args = examples.make_inputs(segment.layer, T)
    run = onnx_session(segment, args, tmp_path / "segment.onnx", **options)
    with torch.no_grad():
        for actual, expected in zip(run(*args), segment(*args), strict=True):
            assert_close(actual, expected, 1e-5)


@pytest.mark.filterwarnings("ignore")
def test_onnx_of_gated_values_by_torchscript(tmp_path):
    x = make_inputs(2, 70, 2, 8, 12, gate="reset")
    gv = make_inputs(2, 70, 2, 12, 12, gate="reset", seed=1).g
    args = (x.q, x.k, x.v, x.g, x.initial_state, gv)
    run = onnx_session(Recurrence().eval(), args, tmp_path / "gla.onnx", dynamo=False)
    for actual, expected in zip(run(*args), Recurrence()(*args), strict=True):
        assert_close(actual, expected, 3e-6)


@pytest.mark.parametrize(
    "call", [chunk_gla_, recurrent_gla_step_, recurrent_gla_verify, recurrent_gla_commit_]
)
def test_a_pool_has_no_form_in_onnx(call, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    x = make_inputs(1, 1, 2, 4, 6)
    q = (x.q,) if call is not recurrent_gla_commit_ else ()
    more = {} if q else {"accepted": torch.ones(1, dtype=torch.int64)}
    with pytest.raises(NotImplementedError, match="a pool of states has no form in ONNX"):
        call(*q, x.k, x.v, x.g, state=x.initial_state, **more)


@pytest.mark.slow
def test_onnx_of_any_length_and_gate(tmp_path):
    def arguments(B, T, gate):
        x = make_inputs(B, T, 2, 8, 12, gate=gate)
        gv = make_inputs(B, T, 2, 12, 12, gate=gate, seed=1).g
        return x.q, x.k, x.v, x.g, x.initial_state, gv

    sizes = {0: "B", 1: "T"}
    shapes = (sizes, sizes, sizes, sizes, {0: "B"}, sizes)
    path = tmp_path / "gla.onnx"
    run = onnx_session(Recurrence().eval(), arguments(2, 5, 1.0), path, dynamic_shapes=shapes)
    for T, gate in itertools.product((1, 16, 70, 257, 1000), GATES):
        args = arguments(3, T, gate)
        for actual, expected in zip(run(*args), Recurrence()(*args), strict=True):
            assert_close(actual, expected, 3e-6)


@pytest.mark.slow
def test_onnx_of_a_padded_batch(tmp_path):
    """With its mask: the model packs, and the file takes other lengths."""
    model, ids = make_model(**MODEL_EVERY, num_hidden_layers=1), make_ids(B=3)
    mask = torch.ones_like(ids)
    sizes = {0: "B", 1: "T"}
    shapes = {"input_ids": sizes, "attention_mask": sizes}
    path = tmp_path / "model.onnx"
    run = onnx_session(model, (ids, mask), path, dynamic_shapes=shapes)
    ids, mask = make_ids(B=4, T=90, seed=3), torch.ones(4, 90, dtype=torch.int64)
    mask[0, :20] = mask[1, 50:] = mask[2, 30:40] = 0
    assert_runs(run, model, ids, mask)
