"""`accelerate_fla`: what it replaces and puts back, and which calls go to FLA.

Equal bits (see common.py): own sums.
"""

import copy
import importlib
import pickle
import sys
import threading
import time
import types
import warnings

import pytest
import torch
from common import assert_close, run_python
from fla_kernels import operands
from source_tree import run
from torch.nn.functional import rms_norm, silu

import gla_ext.fla
from gla_ext.fla import generation, simple

NAMES = ("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla", *simple.HOMES)


def held(fla) -> dict[str, object]:
    """Every function of FLA's that a module of FLA's holds by one of these names."""
    modules = {x: y for x, y in sys.modules.items() if x == "fla" or x.startswith("fla.")}
    return {
        f"{module_name}.{name}": vars(module)[name]
        for module_name, module in modules.items()
        for name in NAMES
        if callable(vars(module).get(name))
    }


@pytest.mark.slow
def test_importing_it_imports_no_fla_and_without_it_the_error_says_what_to_install():
    code = "import sys; from gla_ext.fla import accelerate_fla, restore_fla, is_accelerated; "
    code += "restore_fla(); print(is_accelerated(), 'fla' in sys.modules); "
    code += "sys.modules['fla'] = None; accelerate_fla()"
    result = run(sys.executable, "-c", code)
    assert result.stdout.split() == ["False", "False"]
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: accelerate_fla: flash-linear-attention cannot be imported")
    assert "pip install flash-linear-attention" in last


@pytest.mark.slow
def test_without_layers_the_operators_are_replaced(fla):
    code = "import sys; sys.modules['transformers'] = None; import gla_ext.fla as a; "
    code += "a.accelerate_fla(); from fla.ops.gla import chunk_gla; print(chunk_gla.__module__); "
    code += "print('fla.layers.gla' in sys.modules)"
    assert run_python(code).split() == ["gla_ext.fla.simple", "False"]


def test_replaces_and_puts_back(fla):
    user = types.ModuleType("a_users_module")
    user.attention = fla.ops.gla.chunk_gla
    sys.modules[user.__name__] = user
    layers, norm = sys.modules["fla.layers.gla"], fla.modules.FusedRMSNormGated
    mixin = importlib.import_module("fla.models.utils").FLAGenerationMixin
    before = held(fla) | {"user": user.attention, "norm": norm.forward, **vars(layers)}
    before["generate"] = mixin.prepare_inputs_for_generation
    try:
        gla_ext.fla.accelerate_fla()
        gla_ext.fla.accelerate_fla()
        assert gla_ext.fla.is_accelerated()
        for name, function in held(fla).items():
            raises = name.startswith("fla.layers.") and name.endswith("fused_chunk_gla")
            assert (function is before[name]) == raises, name
            if name.rpartition(".")[2] in simple.HOMES:
                assert function.__module__ == "gla_ext.fla.simple"
        assert user.attention is not before["user"]
        later = types.ModuleType("imported_later")
        exec("from fla.ops.gla import chunk_gla", vars(later))
        sys.modules[later.__name__] = later
        assert later.chunk_gla is user.attention
        gla_ext.fla.restore_fla()
        gla_ext.fla.restore_fla()
        assert not gla_ext.fla.is_accelerated()
        assert later.chunk_gla is before["user"]
        after = held(fla) | {"user": user.attention, "norm": norm.forward, **vars(layers)}
        after["generate"] = mixin.prepare_inputs_for_generation
        assert {name: after[name] is value for name, value in before.items()} == dict.fromkeys(
            before, True
        )
    finally:
        sys.modules.pop(user.__name__, None)
        sys.modules.pop("imported_later", None)


def test_generate_hands_on_every_cache_but_an_empty_one_of_transformers(fla):
    utils = importlib.import_module("fla.models.utils")
    cache_utils = importlib.import_module("transformers.cache_utils")
    full = cache_utils.DynamicCache()
    full.update(*torch.ones(2, 1, 1, 3, 4), 0)
    prepare = generation._with_the_cache(lambda self, **inputs: inputs)
    for cache in (utils.Cache(), full):
        assert prepare(None, cache=cache, input_ids=1) == {"input_ids": 1, "past_key_values": cache}
    assert prepare(None, cache=cache_utils.DynamicCache(), input_ids=1) == {"input_ids": 1}
    prepare = generation._with_the_cache(lambda self, past_key_values: {"cache": past_key_values})
    assert prepare(None, cache=full) == {"past_key_values": full}


def test_activations_of_layers_are_replaced_and_put_back(fla):
    make, options = fla.layers.GatedLinearAttention, {"hidden_size": 32, "num_heads": 2}
    options |= {"gate_fn": "sigmoid", "feature_map": "relu"}
    before = make(**options)
    flas, relu = before.gate_fn, before.feature_map_fn
    own = make(**options)
    own.gate_fn = torch.tanh
    gla_ext.fla.accelerate_fla()
    since, copied = make(**options), copy.deepcopy(before)
    pickled = pickle.loads(pickle.dumps(before))
    for layer in (before, since, copied, pickled):
        assert layer.gate_fn != flas
    gla_ext.fla.restore_fla()
    for layer in (before, since, copied, pickled, make(**options)):
        assert (layer.gate_fn, layer.feature_map_fn) == (flas, relu)
    assert own.gate_fn is torch.tanh


def test_a_second_call_takes_in_what_kept_flas_function(fla, calls):
    original = fla.ops.gla.chunk_gla
    gla_ext.fla.accelerate_fla()
    module = types.ModuleType("kept")
    module.chunk_gla = original
    sys.modules[module.__name__] = module
    try:
        gla_ext.fla.accelerate_fla()
        module.chunk_gla(*operands())
        assert calls == ["chunk_gla"]
        gla_ext.fla.restore_fla()
        assert module.chunk_gla is original
    finally:
        del sys.modules[module.__name__]


@pytest.mark.slow
def test_threads(fla):
    """Whoever looks while others toggle finds FLA accelerated, or all of it restored."""
    before, failures, start = held(fla), [], threading.Barrier(4)

    def work():
        start.wait()
        try:
            for _ in range(3):
                gla_ext.fla.accelerate_fla()
                gla_ext.fla.restore_fla()
        except Exception as failure:
            failures.append(failure)

    def look():
        start.wait()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.002)
            with gla_ext.fla.accelerate._lock:
                own = {name: function is before[name] for name, function in held(fla).items()}
                accelerated = gla_ext.fla.is_accelerated()
            if accelerated == own["fla.ops.gla.chunk_gla"] or accelerated == all(own.values()):
                failures.append((accelerated, own))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        look()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    gla_ext.fla.restore_fla()
    assert all(function is before[name] for name, function in held(fla).items())


def test_another_signature_is_refused(fla, monkeypatch):
    module = sys.modules["fla.ops.gla.chunk"]
    monkeypatch.setattr(module, "chunk_gla", lambda q, k, v, g, head_first: None)
    with pytest.raises(NotImplementedError, match="this one takes q, k, v, g, head_first"):
        gla_ext.fla.accelerate_fla()
    assert not gla_ext.fla.is_accelerated()


def test_the_old_name_of_state_v_first(fla, calls):
    gla_ext.fla.accelerate_fla()
    q, k, v, g = operands()
    options = {"output_final_state": True}
    with pytest.warns(DeprecationWarning, match="transpose_state_layout"):
        _, old = fla.ops.gla.fused_recurrent_gla(q, k, v, g, transpose_state_layout=True, **options)
    _, new = fla.ops.gla.fused_recurrent_gla(q, k, v, g, state_v_first=True, **options)
    assert torch.equal(old, new)
    assert calls == ["fused_recurrent_gla"] * 2


def test_fused_chunk_is_chunk(fla, calls):
    gla_ext.fla.accelerate_fla()
    q, k, v, g = operands()
    expected = fla.ops.gla.chunk_gla(q, k, v, g, output_final_state=True)
    actual = fla.ops.gla.fused_chunk_gla(q=q, k=k, v=v, g=g, output_final_state=True)
    assert all(map(torch.equal, actual, expected))
    assert calls == ["chunk_gla"] * 2
    layer = fla.layers.GatedLinearAttention("fused_chunk", hidden_size=32, num_heads=2)
    with pytest.raises(NotImplementedError, match="fused_chunk_gla"):
        layer(torch.zeros(1, 65, 32))


def test_autocast_changes_no_dtype(fla, calls):
    gla_ext.fla.accelerate_fla()
    q, k, v, g = operands()
    for operator in (fla.ops.gla.chunk_gla, fla.ops.gla.fused_recurrent_gla):
        expected = operator(q, k, v, g)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(operator(q, k, v, g)[0], expected)


def test_where_there_are_no_kernels_the_gated_norm_is_flas_or_plain_torch(monkeypatch, fla):
    make, received = fla.modules.FusedRMSNormGated, []
    norm, (x, gate) = make(8), torch.randn(2, 3, 8)
    expected = rms_norm(x, (8,), eps=norm.eps) * silu(gate)
    monkeypatch.setattr(make, "forward", lambda *args: received.append(args) or args[1])
    monkeypatch.setattr(gla_ext.fla.accelerate, "_has_kernels", lambda x: False)
    monkeypatch.setattr(gla_ext.fla.layers, "rms_norm", None)
    gla_ext.fla.accelerate_fla()
    assert_close(norm(x, gate), expected, 1e-6)
    norm, meta = norm.to("meta"), x.to("meta")
    assert norm(meta, meta) is meta
    assert len(received) == 1
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    assert compiled(meta, meta).device == meta.device
    assert len(received) == 1


def test_in_training_norms_are_the_operator(monkeypatch, fla):
    norm, (x, residual) = fla.modules.RMSNorm(8), torch.randn(2, 2, 3, 8)
    called, have = [], [True]

    def counted(function):
        return lambda *args: called.append(function.__name__) or function(*args)

    for name in ("rms_norm", "rms_norm_residual"):
        function = getattr(gla_ext.fla.layers, name)
        monkeypatch.setattr(gla_ext.fla.layers, name, counted(function))
    monkeypatch.setattr(gla_ext.fla.accelerate, "_has_kernels", lambda x: have[0])
    gla_ext.fla.accelerate_fla()
    y, (z, stream) = norm(x), norm(x, residual, prenorm=True)
    assert called == ["rms_norm", "rms_norm_residual"]
    assert torch.equal(stream, residual + x)
    # Sums of the residual's dtype, no gradients, graphs of torch.compile, builds without kernels.
    assert norm(x.double(), residual, prenorm=True)[1].dtype == torch.float32
    with torch.no_grad():
        assert_close(norm(x), y.detach(), 1e-6)
    assert_close(torch.compile(norm, fullgraph=True, backend="eager")(x, residual), z, 1e-6)
    have[0] = False
    assert_close(norm(x, residual), z, 1e-6)
    assert called == ["rms_norm", "rms_norm_residual"]


@pytest.mark.parametrize(
    ("cuda", "old", "expected"), [(True, {1}, True), (True, {0}, False), (False, set(), False)]
)
def test_kernels_are_where_the_build_and_the_gpu_have_them(monkeypatch, cuda, old, expected):
    monkeypatch.setattr(gla_ext.fla.accelerate, "_has_no_cuda", not cuda)
    monkeypatch.setattr(gla_ext.fla.accelerate, "_old_gpus", old)
    on_gpu = types.SimpleNamespace(device=torch.device("cuda", 0))
    assert gla_ext.fla.accelerate._has_kernels(on_gpu) == expected
    assert gla_ext.fla.accelerate._has_kernels(torch.zeros(1))
    assert not gla_ext.fla.accelerate._has_kernels(torch.zeros(1, device="meta"))


def _bf16(x):
    return x.bfloat16()


FALLBACKS = {  # how a call is changed, and what the warning says
    "mixed dtypes": (lambda q, k, v, g: ((q, _bf16(k), v, g), {}), "q, k and v in torch.float32, "),
    "fp64 gate": (lambda q, k, v, g: ((q, k, v, g.double()), {}), "a gate in torch.float64"),
    "int": (lambda q, k, v, g: ((q.int(), k.int(), v.int(), g), {}), "torch.int32 on cpu"),
    "device": (lambda *x: (tuple(y.to("meta") for y in x), {}), "a tensor on meta"),
    "two devices": (lambda q, *x: ((q, *(y.to("meta") for y in x)), {}), "on several devices"),
    "scale": (lambda *x: (x, {"scale": torch.ones(1)}), "a scale of <class 'torch.Tensor'>"),
    "keyword": (lambda *x: (x, {"head_first": False}), "the keyword head_first"),
    "offsets": (lambda *x: (x, {"cu_seqlens": torch.ones(2)}), "cu_seqlens in torch.float32"),
}
OF_ONE = {
    "fp64 state": (
        "chunk_gla",
        lambda *x: (x, {"initial_state": torch.zeros(2, 2, 16, 16, dtype=torch.float64)}),
        "an initial_state in torch.float64",
    ),
    "both gates": (
        "chunk_simple_gla",
        lambda q, k, v, g: ((q, k, v, g[..., 0]), {"g_gamma": torch.zeros(2)}),
        "g and g_gamma in one call",
    ),
}
OF_ONE |= {f"simple {x}": ("chunk_simple_gla", *FALLBACKS[x]) for x in ("keyword", "scale")}
OTHERS = {
    f"{name} {x}": (name, *FALLBACKS[x])
    for name in ("chunk_gla", "fused_recurrent_gla")
    for x in FALLBACKS
}


@pytest.mark.parametrize("case", (OTHERS | OF_ONE).values(), ids=OTHERS | OF_ONE)
def test_other_calls_go_to_fla_and_warn_once(fla, calls, monkeypatch, case):
    name, change, why = case
    gla_ext.fla.accelerate_fla()
    monkeypatch.setattr(gla_ext.fla.accelerate, "_warned", set())
    received = []
    monkeypatch.setitem(
        gla_ext.fla.accelerate._originals, name, lambda *x, **y: received.append((x, y)) or (0, 0)
    )
    args, kwargs = change(*operands())
    operator = getattr(fla.ops.simple_gla if "simple" in name else fla.ops.gla, name)
    with pytest.warns(UserWarning, match=f"{name} runs FLA's kernels where .*{why}"):
        operator(*args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator(*args, **kwargs)
    assert calls == []
    assert len(received) == 2
    positional, named = received[1]
    names = ("q", "k", "v", "gk" if name == "fused_recurrent_gla" else "g")
    given = named | dict(zip(names, positional, strict=False))
    for key, value in (dict(zip(names, args, strict=True)) | kwargs).items():
        assert given[key] is value
