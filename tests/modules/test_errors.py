"""What the operators of the modules refuse, in which words.

What all say of dtypes and devices is tried for every tensor that they take. The rest is a
row each: the error, its sentence after the operator's name, and a call, given x of `[2, 3, 8]`.
"""

import pytest
import torch
from common import raises
from modules import OPERATORS, differentiable, results
from norm_inputs import EPS
from swiglu_inputs import plain
from torch.distributed.tensor import Replicate, distribute_tensor
from wrapped import Wrapped

from gla_ext.layers.gate_projection import gate_projection
from gla_ext.layers.norms import GatedRMSNorm, plain_rms_norm, rms_norm, rms_norm_residual
from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.layers.swiglu import swiglu, swiglu_linear
from gla_ext.losses import cross_entropy_loss, fused_linear_cross_entropy_loss

ops = torch.ops.gla_ext
DIFFERENT = [
    operator for name, operator in OPERATORS.items() if " of 6" not in name and "place" not in name
]
ARGUMENTS = [
    (operator, i)
    for operator in DIFFERENT
    for i, t in enumerate(operator.make("cpu", torch.float32))
    if differentiable(t)
]


@pytest.mark.parametrize(("operator", "i"), ARGUMENTS, ids=lambda x: getattr(x, "name", x))
def test_dtypes_and_devices(device, operator, i):
    inputs = operator.make(device, torch.float32)
    first, name = (operator.forward._schema.arguments[k].name for k in (0, i))

    def call(t):
        return operator.function(*inputs[:i], t, *inputs[i + 1 :])

    said = f"{operator.name}: expected {name} "
    if name != "cache":  # which is cast
        for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64):
            with raises(TypeError, said + "to be torch."):
                call(inputs[i].to(dtype))
    if i > 0:
        with raises(ValueError, said + f"on the device of {first}, "):
            call(inputs[i].to("meta"))


@pytest.mark.cuda
def test_fp64_on_cuda():
    """The operators refuse it, and the functions are plain operations."""
    x = torch.randn(2, 3, 8, dtype=torch.float64, device="cuda")
    calls = {
        "rms_norm_gate": lambda: ops.rms_norm_gate_fwd(x, None, None, "swish", EPS),
        "swiglu": lambda: ops.swiglu_fwd(x, x),
        "swiglu_bwd": lambda: ops.swiglu_bwd(x, x, x, True),
        "ShortConvolution": lambda: convolve(x),
    }
    for name, call in calls.items():
        said = f"{name}: expected torch.bfloat16, torch.float16 or torch.fl"
        with raises(NotImplementedError, said):
            call()
    norm, weight = GatedRMSNorm(8).cuda(), x[0]
    assert torch.equal(norm(x, x), plain_rms_norm(x, norm.weight, gate=x))
    assert torch.equal(swiglu(x, x), plain(x, x))
    found, expected = (results(f, [x, x, weight], x @ weight.T) for f in (swiglu_linear, plain))
    assert all(map(torch.equal, found, expected))


def linear(x, gate=None, weight=None, norm_weight=None, activation="swish"):
    """The norm of x as one of 3 heads and their map."""
    gate = x.flatten(-2) if gate is None else gate
    weight = zeros(x, 5, 24) if weight is None else weight
    return ops.norm_gate_linear(x, gate, weight, norm_weight, activation, EPS)


def zeros(x, *shape, dtype=None):
    return x.new_zeros(shape, dtype=dtype)


def convolve(x, weight=None, bias=None, cache=None, cu_seqlens=None):
    weight = zeros(x, 8, 1, 4) if weight is None else weight
    return ops.short_convolution_fwd(x, weight, bias, cache, cu_seqlens, True)


def convolution(x, cache=None, cu_seqlens=None):
    return ShortConvolution(8, 4).to(x.device)(x, cache, cu_seqlens=cu_seqlens)


def loss(x, target=None, **options):
    return cross_entropy_loss(x, x.new_zeros(2).long() if target is None else target, **options)


def linear_loss(x, weight=None, target=None, **options):
    target = (
        torch.zeros(x.shape[0], dtype=torch.int64, device=x.device) if target is None else target
    )
    return fused_linear_cross_entropy_loss(x, target, x if weight is None else weight, **options)


KNOWN = "relu, sigmoid, logsigmoid, silu, swish, sqrelu, gelu"
# Of functions that have a plain form, which says the same.
BOTH = {
    "rms_norm_gate": {
        "x to have at least 1 dimension [..., V], got 0": lambda x: rms_norm(x[0, 0, 0]),
        "the last dimension of x to be at least 1, got 0": lambda x: rms_norm(x[..., :0]),
        "gate to have shape [..., V] = [2, 3, 8], got [2, 3, 7]": lambda x: rms_norm(
            x, gate=x[..., 1:]
        ),
        "gate to have shape [..., V] = [2, 3, 8], got [1, 3, 8]": lambda x: rms_norm(x, gate=x[:1]),
        "gate to have 3 dimensions [..., V], got 2": lambda x: rms_norm(x, gate=x[0]),
        "weight to have shape [V] = [8], got [7]": lambda x: rms_norm(x, x[0, 0, 1:]),
        "weight to have shape [V] = [8], got [1]": lambda x: rms_norm(x, x[0, 0, :1]),
        "weight to have 1 dimension [V], got 3 with shape": lambda x: rms_norm(x, x),
        f"activation to be one of {KNOWN}, got": lambda x: rms_norm(x, activation="tanh"),
    },
    "swiglu": {
        "gate to have at least 1 dimension [..., D], got 0": lambda x: swiglu(*[x[0, 0, 0]] * 2),
        "up to have shape [..., D] = [2, 3, 8], got [2, 3, 7]": lambda x: swiglu(x, x[..., 1:]),
        "up to have 3 dimensions [..., D], got 2 with shape [3, 8]": lambda x: swiglu(x, x[0]),
    },
    "swiglu_linear": {
        "up to have shape [..., D] = [2, 3, 8], got [1, 3, 8]": lambda x: swiglu_linear(
            x, x[:1], x[0]
        ),
        "weight to have 2 dimensions [N, D], got 1 with shape [8]": lambda x: swiglu_linear(
            x, x, x[0, 0]
        ),
        "weight to have shape [N, D] = [3, 8], got [3, 7]": lambda x: swiglu_linear(
            x, x, x[0, :, 1:]
        ),
        "bias to have shape [N] = [3], got [2]": lambda x: swiglu_linear(x, x, x[0], x[0, 0, :2]),
    },
}
SHAPES = {
    "rms_norm_gate_bwd": {
        "dy to have shape [..., V] = [2, 3, 8]": lambda x: ops.rms_norm_gate_bwd(
            x[:1], x, None, None, x[..., 0], "swish"
        ),
        "rstd to have shape [...] = [2, 3], got": lambda x: ops.rms_norm_gate_bwd(
            x, x, None, None, x[:, 1:, 0], "swish"
        ),
    },
    "rms_norm_residual": {
        "residual to have shape [..., V] = [2, 3, 8], got [2, 3, 7]": lambda x: rms_norm_residual(
            x, x[..., 1:]
        ),
        "weight to have shape [V] = [8], got [7]": lambda x: rms_norm_residual(x, x, x[0, 0, 1:]),
    },
    "norm_gate_linear": {
        "o to have at least 2 dimensions [..., H, V], got 1": lambda x: linear(x[0, 0], x[0]),
        "gate to have shape [..., H * V] = [2, 24], got [2, 23]": lambda x: linear(
            x, x.flatten(-2)[:, 1:]
        ),
        "weight to have shape [N, D] = [5, 24]": lambda x: linear(x, weight=zeros(x, 5, 23)),
        "norm_weight to have shape [V] = [8], got [7]": lambda x: linear(
            x, norm_weight=x[0, 0, 1:]
        ),
        f"activation to be one of {KNOWN}": lambda x: linear(x, activation="tanh"),
    },
    "swiglu_bwd": {
        "dy to have shape [..., D] = [2, 3, 8], got [1, ": lambda x: ops.swiglu_bwd(
            x[:1], x, x, True
        ),
    },
    "gate_projection": {
        "weight to have shape [K, R] = [3, 8], got [3, 7]": lambda x: gate_projection(
            x, x[0, :, 1:]
        ),
        "bias to have shape [K] = [3], got [2]": lambda x: gate_projection(x, x[0], x[0, 0, :2]),
        "normalizer to be above 0, got 0": lambda x: gate_projection(x, x[0], None, 0),
    },
    "ShortConvolution": {
        "x to have 3 dimensions [B, T, D], got 2 with shape": lambda x: convolution(x[0]),
        "weight to have 3 dimensions [D, 1, W], got 2 with": lambda x: convolve(x, zeros(x, 8, 4)),
        "weight to have shape [D, 1, W] = [8, 1, 4], got [7": lambda x: convolve(
            x, zeros(x, 7, 1, 4)
        ),
        "the last dimension of weight to be at least 1": lambda x: convolve(x, zeros(x, 8, 1, 0)),
        "bias to have shape [D] = [8], got [7]": lambda x: convolve(x, bias=x[0, 0, 1:]),
        "cache to have shape [N, D, W] = [2, 8, 4], got [2, 8, 3]": lambda x: convolution(
            x, zeros(x, 2, 8, 3)
        ),
        "cache to have shape [N, D, W] = [2, 8, 4], got [3, 8, 4]": lambda x: convolution(
            x, zeros(x, 3, 8, 4)
        ),
        "B to be 1 with cu_seqlens, got 2": lambda x: convolution(x, None, offsets(x, [0, 3])),
        "cu_seqlens to have shape [N + 1], got []": lambda x: convolution(
            x[:1], None, offsets(x, 3)
        ),
        "cu_seqlens to have shape [N + 1], got [1, 2]": lambda x: convolution(
            x[:1], None, offsets(x, [[0, 3]])
        ),
    },
    "short_convolution_bwd": {
        "dy to have shape [B, T, D] = [2, 3, 8], got [1, 3, 8]": lambda x: (
            ops.short_convolution_bwd(x[:1], None, x, zeros(x, 8, 1, 4), None, None, None)
        ),
        "dstate to have shape [N, D, W] = [2, 8, 4], got [2, 8, 3]": lambda x: (
            ops.short_convolution_bwd(x, zeros(x, 2, 8, 3), x, zeros(x, 8, 1, 4), None, None, None)
        ),
    },
    "cross_entropy": {
        "logits to have 2 dimensions [N, V], got 3 with shape": loss,
        "target to have shape [N] = [3], got [2]": lambda x: loss(x[0]),
        "label_smoothing to be between 0 and 1, got 2": lambda x: loss(
            x[:, 0], label_smoothing=2.0
        ),
        "logit_softcapping to be above 0, got -1": lambda x: loss(x[:, 0], logit_softcapping=-1.0),
        "reduction to be one of mean, sum, got 'none'": lambda x: linear_loss(
            x[0], reduction="none"
        ),
    },
    "linear_cross_entropy": {
        "weight to have shape [V, D] = [3, 8], got [3, 7]": lambda x: linear_loss(
            x[0], x[0, :, 1:]
        ),
        "num_chunks to be at least 1, got 0": lambda x: linear_loss(x[0], num_chunks=0),
    },
    "cross_entropy_bwd_": {
        "the rows of logits, which are written over": lambda x: ops.cross_entropy_bwd_(
            x[0, :, 0],
            x[0].mT.contiguous().mT,
            offsets(x, [0] * 3),
            x[0, :, 0],
            -100,
            0,
            1,
            None,
            0,
        ),
    },
}
DTYPES = {
    "rms_norm_residual": {
        "residual to be torch.bfloat16 like x, got torch.float16": lambda x: (
            ops.rms_norm_residual_fwd(x.bfloat16(), x.half(), None, EPS)
        ),
    },
    "rms_norm_gate": {
        "gate to be torch.float32 like x, got torch.float16": lambda x: ops.rms_norm_gate_fwd(
            x, None, x.half(), "swish", EPS
        ),
    },
    "rms_norm_residual_bwd": {
        "dstream to be torch": lambda x: ops.rms_norm_residual_bwd(
            *[x.bfloat16()] * 2, x, None, x[..., 0].clone()
        ),
    },
    "norm_gate_linear": {
        "gate to be torch.float32 like o, got torch.bfloat16": lambda x: linear(
            x, x.flatten(-2).bfloat16()
        ),
        "weight to be torch.float32 like o, got torch.bfloat16": lambda x: linear(
            x, weight=x.new_zeros(5, 24).bfloat16()
        ),
    },
    "swiglu": {
        "up to be torch.float32 like gate, got torch.float16": lambda x: ops.swiglu_fwd(
            x, x.half()
        ),
    },
    "swiglu_bwd": {
        "dy to be torch.float32 like gate, got torch.flo": lambda x: ops.swiglu_bwd(
            x.half(), x, x, False
        ),
    },
    "swiglu_linear": {
        "weight to be torch.float32 like gate, got torch.bfloat16": lambda x: swiglu_linear(
            x, x, x[0].bfloat16()
        ),
    },
    "gate_projection": {
        "weight to be torch.float32 like h, got torch.bfloat16": lambda x: gate_projection(
            x, x[0].bfloat16()
        ),
    },
    "ShortConvolution": {
        "cache to be torch.float32 like x, got torch.float16": lambda x: convolve(
            x, cache=x.new_zeros(2, 8, 4).half()
        ),
        "cu_seqlens to be torch.int32 or torch.int64, got tor": lambda x: convolve(
            x[:1], cu_seqlens=zeros(x, 2)
        ),
    },
    "cross_entropy": {
        "target to be torch.int32 or torch.int64, got": lambda x: loss(x[0], x[0, 0, :3]),
    },
    "linear_cross_entropy": {
        "weight to be torch.float32 like x, got torch.float16": lambda x: linear_loss(
            x[0], x[0].half()
        ),
    },
}


LAYOUTS = {
    "rms_norm_gate": {
        "strided (dense) tensors, got layout Sparse": lambda x: rms_norm(x.to_sparse()),
    },
    "swiglu": {
        "strided (dense) tensors, got layout Sparse": lambda x: ops.swiglu_fwd(x.to_sparse(), x),
    },
    "ShortConvolution": {
        "strided (dense) tensors, got layout Sparse": lambda x: convolve(
            x.to_sparse(), zeros(x, 8, 1, 4)
        ),
    },
}


def offsets(x, values):
    return torch.tensor(values, device=x.device)


def rows(kind, table):
    return [
        (kind, f"{name}: expected {said}", call)
        for name in table
        for said, call in table[name].items()
    ]


PLAIN = rows(ValueError, BOTH)
ROWS = (
    PLAIN + rows(ValueError, SHAPES) + rows(TypeError, DTYPES) + rows(NotImplementedError, LAYOUTS)
)


def parametrized(rows):
    return pytest.mark.parametrize(("kind", "sentence", "call"), rows, ids=[r[1] for r in rows])


@parametrized(ROWS)
def test_errors(device, kind, sentence, call):
    with raises(kind, sentence):
        call(torch.zeros(2, 3, 8, device=device))


@parametrized(PLAIN)
def test_plain_operations_refuse_the_same(kind, sentence, call):
    with raises(kind, sentence):
        call(Wrapped(torch.zeros(2, 3, 8)))


WRONG = {"dtype": lambda x: x.long(), "device": lambda x: x.to("meta")}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("function", [swiglu, swiglu_linear, rms_norm], ids=lambda f: f.__name__)
def test_plain_operations_refuse_dtypes_and_devices(function, wrong):
    x = torch.ones(2, 8)
    names = {"weight": x[0], "gate": x} if function is rms_norm else {"up": x}
    names |= {"weight": x} if function is swiglu_linear else {}
    rest = {"up": x, "weight": x} if function is swiglu_linear else {}
    rest |= {"up": x} if function is swiglu else {}
    with pytest.raises(TypeError, match=r"^\w*: expected (x|gate) to be torch\."):
        function(Wrapped(x.long()), **rest)
    for name, t in names.items():
        with pytest.raises(
            (TypeError, ValueError), match=f"^{function.__name__}.*: expected {name}"
        ):
            function(Wrapped(x), **rest | {name: wrong(t)})


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("arguments", [{"weight": torch.ones(1)}, {"activation": "tanh"}])
def test_compiled_it_refuses_what_the_operator_refuses(arguments, dynamic):
    options, x = {"backend": "eager", "dynamic": dynamic}, torch.ones(2, 3, 8)
    with raises(ValueError, "rms_norm_gate: expected " + next(iter(arguments))):
        torch.compile(rms_norm, **options)(x, **arguments)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="rms_norm_gate"):
        torch.compile(rms_norm, fullgraph=True, **options)(x, **arguments)


def test_under_vmap_shapes_are_those_of_a_slice():
    x = torch.zeros(2, 3, 8)
    with raises(ValueError, "rms_norm_gate: expected weight to have 1 dimension [V], got 2 "):
        torch.vmap(rms_norm)(x, x)
    with raises(ValueError, "swiglu: expected up to have 2 dimensions [..., D], got 1 with"):
        torch.vmap(swiglu)(x, x[:, 0])
    call = torch.vmap(swiglu_linear, (0, 0, None))
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x, x, x[0].half()).dtype == torch.bfloat16
    assert call(*[x.to("meta")] * 2, x[0].to("meta")).shape == (2, 3, 3)


def test_plain_tensors_beside_sharded_ones(one_rank):
    x = distribute_tensor(torch.zeros(1, 4, 8), one_rank, [Replicate()])
    message = "short_convolution_fwd: expected weight to be a DTensor like the others, got a plain"
    with raises(NotImplementedError, message):
        convolution(x)
