"""What FLA's operators, norms and layers return under `accelerate_fla`: what they did before."""

import pytest
import torch
from common import assert_close
from fla_kernels import BOUND, HIDDEN, make_layer, operands
from torch.nn.functional import logsigmoid

import gla_ext.fla


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
        ("fused_recurrent_gla", {"gv": None, "initial_state": None, "output_final_state": True}),
    ],
    ids=str,
)
def test_operators_return_what_flas_kernels_do(kernels, device, calls, name, options):
    options, operator = dict(options), getattr(kernels.ops.gla, name)
    q, k, v, g = operands(device=device)
    if "cu_seqlens" in options:
        q, k, v, g = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g))
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"], device=device)
    leaves, D, generator = {}, v.shape[-1], torch.Generator().manual_seed(3)
    if "gv" in options:
        leaves["gv"] = logsigmoid(torch.randn(v.shape, generator=generator)).to(v)
        leaves["initial_state"] = torch.randn(2, 2, D, D, generator=generator).to(v)

    def results(operator):
        def call(*x):
            return operator(*x[:4], **options | dict(zip(leaves, x[4:], strict=True)))

        return gradients(call, q, k, v, g, *leaves.values())

    expected = results(operator)
    gla_ext.fla.accelerate_fla()
    replaced = getattr(kernels.ops.gla, name)
    assert replaced is not operator
    actual = results(replaced)
    assert calls == [name]
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert_close(got, wanted, BOUND[device])


@pytest.mark.parametrize(
    ("home", "name"),
    [
        ("gla", "fused_recurrent_gla"),
        ("gla", "chunk_gla"),
        ("simple_gla", "chunk_simple_gla"),
        ("retention", "chunk_retention"),
        ("retention", "fused_chunk_retention"),
        ("retention", "fused_recurrent_retention"),
    ],
)
def test_from_a_bf16_state(kernels, device, home, name):
    """The final state is fp32, the initial state's gradient of its dtype."""
    q, k, v, g = operands(device=device)
    if home == "simple_gla" and device == "cuda":
        g = None  # with gates FLA's own backward refuses to run on Hopper
    D = v.shape[-1]
    state = torch.randn(2, 2, D, D, generator=torch.Generator().manual_seed(4)).bfloat16()
    gate = {
        "gla": {"g" if name == "chunk_gla" else "gk": g},
        "simple_gla": {"g": None if g is None else g[..., 0]},
    }.get(home, {})

    def run(state):
        operator = getattr(getattr(kernels.ops, home), name)

        def call(q, k, v, state):
            return operator(q, k, v, **gate, initial_state=state, output_final_state=True)

        return gradients(call, q, k, v, state.to(device))

    if name == "chunk_gla":  # FLA's takes fp32 alone
        *expected, wide = run(state.float())
        expected.append(wide.bfloat16())
    else:
        expected = run(state)
    gla_ext.fla.accelerate_fla()
    assert expected[1].dtype == torch.float32
    for got, wanted in zip(run(state), expected, strict=True):
        assert got.dtype == wanted.dtype
        # The interpreter cuts off where it makes bf16 of fp32.
        assert_close(got, wanted, BOUND[device] if got.dtype == torch.float32 else 8e-3)


NORMS = {
    "gated": ("FusedRMSNormGated", {}, {}),
    "gated by sigmoid": ("FusedRMSNormGated", {"activation": "sigmoid"}, {}),
    "gated, no weight": ("FusedRMSNormGated", {"elementwise_affine": False}, {}),
    "gated, prenorm": ("FusedRMSNormGated", {}, {"prenorm": True}),
    "plain": ("RMSNorm", {"eps": 0.1}, {}),
    "plain, no weight": ("RMSNorm", {"elementwise_affine": False}, {}),
    "prenorm": ("RMSNorm", {}, {"prenorm": True}),
    "prenorm in fp32": ("RMSNorm", {}, {"prenorm": True, "residual_in_fp32": True}),
    "residual": ("RMSNorm", {}, {"residual": None, "prenorm": True}),
    "residual alone": ("RMSNorm", {}, {"residual": None}),
    "residual in fp32": ("RMSNorm", {}, {"residual": torch.float32, "prenorm": True}),
    "residual in bf16": ("RMSNorm", {}, {"residual": torch.bfloat16, "prenorm": True}),
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
    inputs = [x, other] if name == "FusedRMSNormGated" or "residual" in called else [x]
    if (wide := called.pop("residual", None)) is not None:
        inputs[1] = other.to(wide)

    def run(*inputs):
        out = norm(*inputs, **called)
        return out if isinstance(out, tuple) else (out,)

    expected = gradients(run, *inputs)
    gla_ext.fla.accelerate_fla()
    torch._dynamo.reset()
    # The interpreter cuts off where it makes bf16 of fp32.
    bf16 = 3e-3 if device == "cuda" else 6e-3
    bound = 1e-5 if all(x.dtype == torch.float32 for x in inputs) else bf16
    calls = [run]
    if dtype == torch.float32 or (name == "FusedRMSNormGated" and not made and not called):
        calls.append(torch.compile(run, backend="aot_eager"))
    for call in calls:
        for got, wanted in zip(gradients(call, *inputs), expected, strict=True):
            assert got.dtype == wanted.dtype
            assert_close(got, wanted, bound)


ACTIVATIONS = ["sigmoid", "logsigmoid", "silu", "swish", "sqrelu", "gelu"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_flas(kernels, device, name):
    make = kernels.layers.GatedLinearAttention
    function = make(hidden_size=32, num_heads=2, feature_map=name).feature_map_fn
    x = 3 * torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.compiler.set_stance("force_eager"):  # FLA compiles some of them
        expected = gradients(lambda y: (function(y),), x)
    gla_ext.fla.accelerate_fla()
    replaced = make(hidden_size=32, num_heads=2, feature_map=name).feature_map_fn
    assert replaced is not function

    def run(y):
        return (replaced(y),)

    if device == "cuda":  # elsewhere FLA's kernel stays
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(gradients(run, x), expected, strict=True):
        assert_close(got, wanted, 1e-5)


CONVOLUTIONS = {  # how a module is made, the offsets of packed sequences, from a cache
    "batch": ({"bias": True}, None, False),
    "no bias, 3": ({"kernel_size": 3}, None, False),
    "one input": ({"kernel_size": 1}, None, False),
    "on a cache": ({}, None, True),
    "packed": ({"bias": True}, [0, 2, 9, 20], False),
    "packed on a cache": ({}, [0, 2, 9, 20], True),
    "no activation": ({"activation": None}, None, False),
}


@pytest.mark.parametrize(("made", "offsets", "cached"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_short_convolutions_are_flas(kernels, device, made, offsets, cached):
    torch.manual_seed(0)
    conv = kernels.modules.ShortConvolution(24, **{"kernel_size": 4} | made).to(device)
    x = torch.randn(2 if offsets is None else 1, 20, 24).to(device)
    where = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets, device=device)}
    N = len(x) if offsets is None else len(offsets) - 1
    cache = torch.randn(N, 24, conv.kernel_size[0]).to(device) if cached else None
    leaves = [x, *conv.parameters()]

    def run(x, *values):
        parameters = dict(zip(dict(conv.named_parameters()), values, strict=True))
        given = {"cache": cache, "output_final_state": True, **where}
        y, state = torch.func.functional_call(conv, parameters, (x,), given)
        return y, state.detach()

    expected = [*run(*leaves), *gradients(lambda *x: run(*x)[:1], *leaves)]
    gla_ext.fla.accelerate_fla()
    if device == "cuda" and "activation" not in made:  # elsewhere FLA's kernel stays
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    actual = [*run(*leaves), *gradients(lambda *x: run(*x)[:1], *leaves)]
    for got, wanted in zip(actual, expected, strict=True):
        assert_close(got, wanted, 1e-5)


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


@pytest.mark.cuda  # the interpreter does not know all of their kernels
@pytest.mark.parametrize("T", [9, 66], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["GatedLinearAttention", "HGRN2Attention", "LightNetAttention"])
def test_layers_of_other_models_return_what_they_did(fla, calls, name, padded, T):
    options = {} if name == "GatedLinearAttention" else {"mode": "chunk"}
    layer = make_layer(fla, name, "cuda", **options)
    mask = (torch.arange(T) >= torch.tensor([[4], [0]])).long().cuda() if padded else None
    x = torch.randn(2, T, HIDDEN["cuda"], device="cuda")
    check_layer(layer, x, mask, 4 * BOUND["cuda"], calls)
