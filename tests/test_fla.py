"""`accelerate_fla`: what it replaces and puts back, and that results stay FLA's own."""

import sys
import threading
import types
import warnings

import pytest
import torch
from common import assert_close, make_inputs, run_python
from fla_kernels import import_fla, require_kernels
from source_tree import run
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import logsigmoid

import gla_ext.fla
from gla_ext import ops, recurrent

NAMES = ("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla")
# FLA's products of fp32 numbers are tf32's on a GPU.
BOUND = {"cpu": 1e-5, "cuda": 5e-3}


@pytest.fixture
def fla():
    """FLA as it is, and again afterwards."""
    yield import_fla()
    gla_ext.fla.restore_fla()


@pytest.fixture
def kernels(device, fla):
    """FLA on a device that its kernels run on."""
    require_kernels(device)
    return fla


@pytest.fixture
def calls(monkeypatch):
    """The names of gla_ext's operators, as they are called by what stands for FLA's."""
    made = []
    for module, name in ((ops, "chunk_gla"), (recurrent, "fused_recurrent_gla")):
        monkeypatch.setattr(module, name, _counted(getattr(module, name), made))
    return made


def _counted(function, made):
    return lambda *args, **kwargs: made.append(function.__name__) or function(*args, **kwargs)


def held(fla) -> dict[str, object]:
    """Every function of FLA's that a module of FLA's holds by one of the three names."""
    modules = {x: y for x, y in sys.modules.items() if x == "fla" or x.startswith("fla.")}
    return {
        f"{module_name}.{name}": vars(module)[name]
        for module_name, module in modules.items()
        for name in NAMES
        if callable(vars(module).get(name))
    }


def test_without_fla_the_error_says_what_to_install():
    code = "import sys; sys.modules['fla'] = None; import gla_ext.fla as a; a.accelerate_fla()"
    last = run(sys.executable, "-c", code).stderr.splitlines()[-1]
    assert last.startswith("ImportError: accelerate_fla: flash-linear-attention cannot be imported")
    assert "pip install flash-linear-attention" in last


def test_importing_it_imports_no_fla():
    code = "import sys; from gla_ext.fla import restore_fla, is_accelerated; restore_fla(); "
    code += "print(is_accelerated(), 'fla' in sys.modules)"
    assert run_python(code).split() == ["False", "False"]


def test_without_layers_the_operators_are_replaced(fla):
    code = "import sys; sys.modules['transformers'] = None; import gla_ext.fla as a; "
    code += "a.accelerate_fla(); from fla.ops.gla import chunk_gla; print(chunk_gla.__module__); "
    code += "print('fla.layers.gla' in sys.modules)"
    assert run_python(code).split() == ["gla_ext.fla", "False"]


def test_replaces_and_puts_back(fla):
    user = types.ModuleType("a_users_module")
    user.attention = fla.ops.gla.chunk_gla
    sys.modules[user.__name__] = user
    layers, norm = sys.modules["fla.layers.gla"], fla.modules.FusedRMSNormGated
    before = held(fla) | {"user": user.attention, "norm": norm.forward, **vars(layers)}
    try:
        gla_ext.fla.accelerate_fla()
        gla_ext.fla.accelerate_fla()
        assert gla_ext.fla.is_accelerated()
        for name, function in held(fla).items():
            raises = name.startswith("fla.layers.") and name.endswith("fused_chunk_gla")
            assert (function is before[name]) == raises, name
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
        assert {name: after[name] is value for name, value in before.items()} == dict.fromkeys(
            before, True
        )
    finally:
        sys.modules.pop(user.__name__, None)
        sys.modules.pop("imported_later", None)


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


def test_threads(fla):
    before = held(fla)

    def work():
        for _ in range(3):
            gla_ext.fla.accelerate_fla()
            gla_ext.fla.restore_fla()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gla_ext.fla.restore_fla()
    assert all(function is before[name] for name, function in held(fla).items())


def test_another_signature_is_refused(fla, monkeypatch):
    module = sys.modules["fla.ops.gla.chunk"]
    monkeypatch.setattr(module, "chunk_gla", lambda q, k, v, g, head_first: None)
    with pytest.raises(NotImplementedError, match="this one takes q, k, v, g, head_first"):
        gla_ext.fla.accelerate_fla()
    assert not gla_ext.fla.is_accelerated()


def operands(T=20, dtype=torch.float32, device="cpu"):
    x = make_inputs(2, T, 2, 16, 16, dtype=dtype, device=device)
    return x.q, x.k, x.v, x.g


def gradients(function, *leaves):
    """The outputs and the gradients of a function of tensors; what is None is left out."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    outputs = [x for x in function(*leaves) if x is not None]
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chunk_gla", {"output_final_state": True}),
        ("chunk_gla", {"scale": 0.5, "state_v_first": True, "output_final_state": True}),
        ("chunk_gla", {"cu_seqlens": [0, 5, 40]}),
        ("fused_recurrent_gla", {"output_final_state": True}),
        ("fused_recurrent_gla", {"reverse": True, "state_v_first": True, "scale": 0.3}),
        ("fused_recurrent_gla", {"cu_seqlens": [0, 5, 20, 40], "output_final_state": True}),
    ],
    ids=str,
)
def test_operators_return_what_flas_kernels_do(kernels, device, calls, name, options):
    options, operator = dict(options), getattr(kernels.ops.gla, name)
    q, k, v, g = operands(device=device)
    if "cu_seqlens" in options:
        q, k, v, g = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g))
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"], device=device)
    expected = gradients(lambda *x: operator(*x, **options), q, k, v, g)
    gla_ext.fla.accelerate_fla()
    replaced = getattr(kernels.ops.gla, name)
    assert replaced is not operator
    actual = gradients(lambda *x: replaced(*x, **options), q, k, v, g)
    assert calls == [name]
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert_close(got, wanted, BOUND[device])


def test_recurrence_with_both_gates_and_a_state(kernels, device):
    q, k, v, g = operands(device=device)
    gv = logsigmoid(torch.randn(v.shape, generator=torch.Generator().manual_seed(3))).to(v)
    state = torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(4)).to(v)

    def run(*x):
        q, k, v, gk, gv, state = x
        return kernels.ops.gla.fused_recurrent_gla(
            q, k, v, gk, gv, initial_state=state, output_final_state=True
        )

    expected = gradients(run, q, k, v, g, gv, state)
    gla_ext.fla.accelerate_fla()
    for got, wanted in zip(gradients(run, q, k, v, g, gv, state), expected, strict=True):
        assert_close(got, wanted, BOUND[device])


def test_recurrence_from_a_bf16_state(kernels, device, calls):
    q, k, v, g = operands(device=device)
    state = torch.ones(2, 2, 16, 16, dtype=torch.bfloat16, device=device)
    options = {"initial_state": state, "output_final_state": True}
    expected = kernels.ops.gla.fused_recurrent_gla(q, k, v, g, **options)
    gla_ext.fla.accelerate_fla()
    actual = kernels.ops.gla.fused_recurrent_gla(q, k, v, g, **options)
    assert calls == ["fused_recurrent_gla"]
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert_close(got, wanted, BOUND[device])


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


@pytest.mark.parametrize(("change", "why"), FALLBACKS.values(), ids=FALLBACKS)
@pytest.mark.parametrize("name", ["chunk_gla", "fused_recurrent_gla"])
def test_other_calls_go_to_fla_and_warn_once(fla, calls, monkeypatch, name, change, why):
    gla_ext.fla.accelerate_fla()
    monkeypatch.setattr(gla_ext.fla, "_warned", set())
    received = []
    monkeypatch.setitem(
        gla_ext.fla._originals, name, lambda *x, **y: received.append((x, y)) or (0, 0)
    )
    args, kwargs = change(*operands())
    operator = getattr(fla.ops.gla, name)
    with pytest.warns(UserWarning, match=f"{name} runs FLA's kernels where .*{why}"):
        operator(*args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator(*args, **kwargs)
    assert calls == []
    assert len(received) == 2
    positional, named = received[1]
    names = ("q", "k", "v", "g" if name == "chunk_gla" else "gk")
    given = named | dict(zip(names, positional, strict=False))
    for key, value in (dict(zip(names, args, strict=True)) | kwargs).items():
        assert given[key] is value


def test_chunk_refuses_a_bf16_state_as_fla_does(fla, calls):
    gla_ext.fla.accelerate_fla()
    state = torch.zeros(2, 2, 16, 16, dtype=torch.bfloat16)
    with (
        pytest.warns(UserWarning, match="an initial_state in torch.bfloat16"),
        pytest.raises(AssertionError, match="initial_state must be in float32"),
    ):
        fla.ops.gla.chunk_gla(*operands(), initial_state=state)
    assert calls == []


NORMS = {
    "gated": ("FusedRMSNormGated", {}, {}),
    "gated by sigmoid": ("FusedRMSNormGated", {"activation": "sigmoid"}, {}),
    "gated, no weight": ("FusedRMSNormGated", {"elementwise_affine": False}, {}),
    "gated, prenorm": ("FusedRMSNormGated", {}, {"prenorm": True}),
    "plain": ("RMSNorm", {"eps": 0.1}, {}),
    "plain, no weight": ("RMSNorm", {"elementwise_affine": False}, {}),
    "prenorm": ("RMSNorm", {}, {"prenorm": True}),
    "prenorm in fp32": ("RMSNorm", {}, {"prenorm": True, "residual_in_fp32": True}),
    "residual": ("RMSNorm", {}, {"residual": True, "prenorm": True}),
    "bias": ("RMSNorm", {"bias": True}, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "made", "called"), NORMS.values(), ids=NORMS)
def test_norms_are_flas(kernels, device, name, made, called, dtype):
    norm, called = getattr(kernels.modules, name)(24, **made).to(device), dict(called)
    torch.manual_seed(0)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    x, other = (torch.randn(2, 5, 24).to(device, dtype) for _ in range(2))
    inputs = [x, other] if name == "FusedRMSNormGated" or called.pop("residual", False) else [x]

    def run(*inputs):
        out = norm(*inputs, **called)
        return out if isinstance(out, tuple) else (out,)

    expected = gradients(run, *inputs)
    gla_ext.fla.accelerate_fla()
    if device == "cuda":  # elsewhere FLA's kernel stays
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager")
    for got, wanted in zip(gradients(run, *inputs), expected, strict=True):
        assert got.dtype == wanted.dtype
        # The interpreter cuts off where it makes bf16 of fp32.
        bf16 = 3e-3 if device == "cuda" else 6e-3
        assert_close(got, wanted, 1e-5 if dtype == torch.float32 else bf16)


def check_layer(layer, x, mask, bound, calls):
    """Results of a layer before and after `accelerate_fla`."""
    parameters = dict(layer.named_parameters())

    def run(x, *values):
        arguments = (dict(zip(parameters, values, strict=True)), (x, mask))
        return torch.func.functional_call(layer, *arguments)[:1]

    expected = gradients(run, x, *parameters.values())
    gla_ext.fla.accelerate_fla()
    actual = gradients(run, x, *parameters.values())
    assert calls == ["chunk_gla" if x.shape[1] > 64 else "fused_recurrent_gla"]
    for name, got, wanted in zip(["o", "x", *parameters], actual, expected, strict=True):
        assert_close(got, wanted, bound, name=name)


def make_layer(fla, name, device, **options):
    torch.manual_seed(0)
    layer = getattr(fla.layers, name)(hidden_size=32, num_heads=2, layer_idx=0, **options)
    return layer.to(device)


@pytest.mark.parametrize(
    ("T", "padded", "options"),
    [(9, False, {}), (9, True, {"num_kv_heads": 1}), (66, True, {})],
    ids=["recurrent", "recurrent, padded, grouped heads", "chunked, padded"],
)
def test_the_layer_returns_what_it_did(kernels, device, calls, T, padded, options):
    layer = make_layer(kernels, "GatedLinearAttention", device, **options)
    mask = (torch.arange(T) >= torch.tensor([[4], [0]])).long().to(device) if padded else None
    check_layer(layer, torch.randn(2, T, 32, device=device), mask, BOUND[device], calls)


@pytest.mark.cuda  # the interpreter does not know all of their kernels
@pytest.mark.parametrize("T", [9, 66], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["GatedLinearAttention", "HGRN2Attention", "LightNetAttention"])
def test_layers_of_other_models_return_what_they_did(fla, calls, name, padded, T):
    options = {} if name == "GatedLinearAttention" else {"mode": "chunk"}
    layer = make_layer(fla, name, "cuda", **options)
    mask = (torch.arange(T) >= torch.tensor([[4], [0]])).long().cuda() if padded else None
    check_layer(layer, torch.randn(2, T, 32, device="cuda"), mask, 4 * BOUND["cuda"], calls)


@pytest.mark.parametrize("options", [{}, {"use_output_gate": False}, {"num_kv_heads": 1}], ids=str)
def test_the_layer_compiles_whole(fla, device, options):
    torch._dynamo.reset()
    layer = make_layer(fla, "GatedLinearAttention", device, **options)
    gla_ext.fla.accelerate_fla()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    parameters = list(layer.parameters())
    for T in (70, 90):
        x = torch.randn(2, T, 32, device=device)
        mask = (torch.arange(T) >= torch.tensor([[4], [0]])).long().to(device)
        x[0, :4] = float("nan")  # padding reaches nothing
        for arguments in ((x.nan_to_num(), None), (x, mask)):
            results = []
            for module in (layer, compiled):
                o = module(*arguments)[0]
                results.append([o, *torch.autograd.grad(o.square().sum(), parameters)])
            for got, wanted in zip(*results, strict=True):
                assert_close(got, wanted, BOUND[device])
    assert counter.frame_count <= 4  # with and without a mask, at one length and at any
    torch._dynamo.reset()
