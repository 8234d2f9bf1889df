"""Every operator on DTensors: one process's results, or an error that names it."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from common import assert_close
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gla_ext.ops
from gla_ext.layers.gate_projection import gate_projection
from gla_ext.layers.norms import rms_norm, rms_norm_residual
from gla_ext.layers.short_convolution import causal_convolution
from gla_ext.layers.swiglu import swiglu, swiglu_linear
from gla_ext.losses import cross_entropy_loss, fused_linear_cross_entropy_loss
from gla_ext.ops import _sharding

OPS = torch.ops.gla_ext
LABELS = torch.tensor([1, -100, 4, 0, 2])


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make_cases():
    """Of operators with a rule: arguments, and of each tensor among them the dimension that is
    sharded, None for none.
    """
    x, last = normal(5, 3, 8), normal(8)  # 5 rows and 3 tokens divide by no two ranks
    rstd = x[..., 0].square() + 1
    conv, cache = (x, normal(8, 1, 4), last), normal(5, 8, 4)
    packed = (x[:1], conv[1], None, cache[:2], torch.tensor([0, 2, 3]))
    gate = (normal(5, 3, 4), normal(8, 4), last, 16.0, -0.1)
    channels = (2, 0, 0, 1)
    logits, lse = normal(5, 6), normal(5)
    options = (-100, 0.1, 1.0, None)
    return {
        "rms_norm_gate_fwd": [
            ((x, last, x, "swish", 1e-5), (0, None, 0)),
            ((x, None, None, "swish", 1e-5), (1,)),
        ],
        "rms_norm_gate_bwd": [
            ((x, x, last, x, rstd, "swish", True), (0, 0, None, 0, 0)),
            ((x, x, None, None, rstd, "swish", False), (1, 1, 1)),
        ],
        "rms_norm_residual_fwd": [((x, x, last, 1e-5), (dim, dim, None)) for dim in (0, 1)],
        "rms_norm_residual_bwd": [
            ((x, x, x, last, rstd), (0, 0, 0, None, 0)),
            ((x, None, x, None, rstd), (1, 1, 1)),
        ],
        "swiglu_fwd": [((x, x), (dim, dim)) for dim in (0, 1, 2)],
        "swiglu_bwd": [((x, x, x, full), (dim,) * 3) for dim in (0, 2) for full in (False, True)],
        "short_convolution_fwd": [
            ((*conv, cache, None, False), (0, None, None, 0)),
            ((*conv, cache, None, True), (0, None, None, 0)),
            ((*conv, cache, None, True), channels),
            ((*packed, True), (2, 0, 1, None)),
        ],
        "short_convolution_bwd": [
            ((x, cache, *conv, cache, None), (0, 0, 0, None, None, 0)),
            ((x, None, x, conv[1], None, None, None), (0, 0, None)),
            ((x, cache, *conv, cache, None), (2, 1, 2, 0, 0, 1)),
        ],
        "gate_projection_fwd": [(gate, (0, None, None)), (gate, (None, 0, 0))],
        "gate_projection_bwd": [
            ((x, *gate), (1, 1, None, None)),
            ((x, *gate), (2, None, 0, 0)),
        ],
        "cross_entropy_fwd": [((logits, LABELS, *options, 0.1, False), (0, 0))],
        "cross_entropy_bwd": [((lse, logits, LABELS, lse + 3, *options, 0.1), (0, 0, 0, 0))],
    }


def sharded(mesh, args, dims):
    """The arguments as DTensors, sharded by these dimensions on every dimension of the mesh."""
    left = iter(dims)

    def convert(t):
        if not isinstance(t, torch.Tensor):
            return t
        dim = next(left)
        placement = Replicate() if dim is None else Shard(dim)
        return distribute_tensor(t.detach(), mesh, [placement] * mesh.ndim)

    return [convert(t) for t in args]


def whole(results):
    results = [results] if isinstance(results, torch.Tensor) else results
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in results]


def run_operators(group):
    torch.manual_seed(1)
    mesh, found = DeviceMesh.from_group(group, "cpu"), []
    for name, cases in make_cases().items():
        op = getattr(OPS, name)
        with torch.no_grad():
            for args, dims in cases:
                outputs = op(*sharded(mesh, args, dims))
                outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
                assert not all(output.placements == (Replicate(),) for output in outputs), name
                replicated = op(*sharded(mesh, args, [None] * len(dims)))
                assert all(placement == Replicate() for placement in replicated[0].placements)
                found.append((name, whole(outputs), whole(replicated)))
    return found


def test_operators_on_shards(pool):
    torch.manual_seed(1)
    cases = make_cases()
    assert cases.keys() == _sharding._RULES.keys()
    expected = [
        whole(getattr(OPS, name)(*args)) for name, calls in cases.items() for args, _ in calls
    ]
    for ranks in (2, 3):
        for found in pool(run_operators, ranks=ranks):
            for (name, *results), theirs in zip(found, expected, strict=True):
                for mine in results:
                    for a, b in zip(mine, theirs, strict=True):
                        assert a.shape == b.shape, name
                        assert_close(a, b, 1e-12, name=name)


def run_on_two_dimensions(group):
    """Rows over one dimension of a mesh and channels over the other, and what has to be summed."""
    torch.manual_seed(1)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    x, weight = normal(6, 3, 8), normal(8, 1, 4)
    tokens = [Shard(0), Shard(2)]
    y, _ = OPS.short_convolution_fwd(
        distribute_tensor(x, mesh, tokens),
        distribute_tensor(weight, mesh, [Replicate(), Replicate()]),  # is redistributed
        None, None, None, False,
    )  # fmt: skip
    assert list(y.placements) == tokens
    part = DTensor.from_local(x / 4, mesh, [Partial(), Partial()])
    product = OPS.swiglu_fwd(part, part)
    expected = OPS.short_convolution_fwd(x, weight, None, None, None, False)[0]
    assert_close(y.full_tensor(), expected, 1e-12)
    assert_close(product.full_tensor(), swiglu(x, x), 1e-12)


def test_two_dimensions_of_a_mesh(pool):
    pool(run_on_two_dimensions)


def convolution(x, weight, bias):
    conv = torch.nn.Module()
    conv.weight, conv.bias = weight, bias
    return causal_convolution(conv, x, None, True, None)


def attend(function, *args, **options):
    def call(q, k, v, state, *gates):
        o, final = function(
            q, k, v, *gates, *args, initial_state=state, output_final_state=True, **options
        )
        if isinstance(o, DTensor):
            assert (o.placements, final.placements) == (q.placements, state.placements)
        return o, final

    return call


def with_labels(function, labels, dim):
    """A function of labels, with DTensors sharded by this dimension."""

    def call(*leaves):
        if isinstance(leaves[0], DTensor):
            return function(*leaves, *sharded(leaves[0].device_mesh, [labels], [dim]))
        return function(*leaves, labels)

    return call


def cross_entropy(logits, target):
    return cross_entropy_loss(logits, target, 0.1, inplace_backward=True)[0]


def linear_cross_entropy(x, weight, target):
    return fused_linear_cross_entropy_loss(x, target, weight)


def normalised(q, k, v, state, z):
    o, (state, z) = gla_ext.ops.chunk_linear_attn(
        q, k, v, initial_state=(state, z), output_final_state=True
    )
    return o, state, z


def make_functions():
    """Public functions with leaves and the dimension by which each is sharded."""
    x, last, weight = normal(5, 3, 8), normal(8), normal(6, 8)
    rows = x[:, 0]  # torch's product takes no 5 rows of 3 on two ranks
    q, state, g = normal(2, 7, 4, 8), normal(2, 4, 8, 8), F.logsigmoid(normal(2, 7, 4))
    heads = ((q, q, q, state), (2, 2, 2, 1))
    batch, gated = (heads[0], (0, 0, 0, 0)), ((*heads[0], g), (2, 2, 2, 1, 2))
    ops = gla_ext.ops
    # Torch's operations take no other labels on shards of classes.
    labels, packed = LABELS.where(LABELS >= 0, 3), {"cu_seqlens": torch.tensor([0, 5, 7])}
    gla = (q[:1], q[:1], q[:1], state, F.logsigmoid(q[:1]))  # k is redistributed
    return {
        "rms_norm": (lambda x, w, g: rms_norm(x, w, 1e-5, g), (x, last, x), (1, None, 1)),
        "rms_norm_residual": (rms_norm_residual, (x, x, last), (0, 0, None)),
        "norm_gate_linear": (
            lambda *tensors: OPS.norm_gate_linear(*tensors, "swish", 1e-5),
            (normal(5, 2, 8), normal(5, 16), normal(6, 16), last), (0, 0, None, None),
        ),
        "swiglu": (swiglu, (x, x), (2, 2)),
        "swiglu_linear": (swiglu_linear, (rows, rows, weight, weight[:, 0]), (0, 0, None, None)),
        "swiglu_linear by columns": (swiglu_linear, (rows, rows, weight), (1, 1, 1)),
        "joint_projection": (
            lambda x, a, b: tuple(OPS.joint_projection(x, [a, b], torch.float64)),
            (rows, weight, weight), (0, None, None),
        ),
        "ShortConvolution": (convolution, (x, normal(8, 1, 4), last), (2, 0, 0)),
        "ShortConvolution, batch": (convolution, (x, normal(8, 1, 4), last), (0, None, None)),
        "gate_projection": (gate_projection, (normal(5, 4), normal(8, 4), last), (0, None, None)),
        "gate_projection, heads": (gate_projection, (normal(5, 4), normal(8, 4)), (None, 0)),
        "loss over tokens": (with_labels(cross_entropy, LABELS, 0), (normal(5, 6),), (0,)),
        "loss over classes": (with_labels(cross_entropy, labels, None), (normal(5, 6),), (1,)),
        "linear loss": (
            with_labels(linear_cross_entropy, LABELS, 0), (normal(5, 8), weight), (0, None)
        ),
        "chunk_simple_gla": (attend(ops.chunk_simple_gla), *gated),
        "fused_recurrent_simple_gla": (attend(ops.fused_recurrent_simple_gla), *gated),
        "chunk_simple_gla, g_gamma": (
            attend(ops.chunk_simple_gla, g_gamma=-torch.arange(4.0)), *heads
        ),
        "chunk_retention": (attend(ops.chunk_retention), *heads),
        "fused_recurrent_retention": (attend(ops.fused_recurrent_retention), *batch),
        "chunk_lightning_attn": (attend(ops.chunk_lightning_attn, 1, 2), *batch),
        "fused_recurrent_lightning_attn": (
            attend(ops.fused_recurrent_lightning_attn, 1, 2), *heads
        ),
        "fused_recurrent_linear_attn": (attend(ops.fused_recurrent_linear_attn), *heads),
        "chunk_gla_step": (
            lambda q, k, v, state, g: ops.chunk_gla_step(q[:, 5:], k, v, g, None, state)[0], *gated
        ),
        "chunk_linear_attn": (
            normalised, (*heads[0], normal(2, 1, 4, 8)), (*heads[1], 2)
        ),
        **{
            f"{function.__name__} of {name}": (attend(function, **options), leaves, dims)
            for function in (ops.chunk_gla, ops.fused_recurrent_gla)
            for name, options, leaves, dims in (
                ("rows", {}, (*heads[0], F.logsigmoid(q)), (0, None, 0, 0, 0)),
                ("packed heads", packed, gla, (2, None, 2, 1, 2)),
                ("whole tensors", {}, (*heads[0], F.logsigmoid(q)), (None,) * 5),
            )
        },
    }  # fmt: skip


def outputs_and_gradients(function, leaves):
    """The outputs; upstream gradients are the outputs themselves, so that all count."""
    leaves = [t.requires_grad_() for t in leaves]
    outputs = function(*leaves)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    total = sum(output.square().sum() for output in outputs)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    return [t.detach() for t in whole([*outputs, *torch.autograd.grad(total, leaves)])]


def run_functions(group):
    torch.manual_seed(1)
    mesh, found = DeviceMesh.from_group(group, "cpu"), {}
    for name, (function, leaves, dims) in make_functions().items():
        try:
            found[name] = outputs_and_gradients(function, sharded(mesh, leaves, dims))
        except Exception as error:
            raise AssertionError(name) from error
    return found


def test_functions_on_shards(pool):
    torch.manual_seed(1)
    expected = {
        name: outputs_and_gradients(function, [t.detach().clone() for t in leaves])
        for name, (function, leaves, _) in make_functions().items()
    }
    for found in pool(run_functions, ranks=2):
        for name, theirs in expected.items():
            for mine, its in zip(found[name], theirs, strict=True):
                assert_close(mine, its, 1e-11, name=name)


def make_pool():
    x = [normal(3, 2, 4, 8) for _ in range(3)]
    gate = F.logsigmoid(normal(3, 2, 4))
    return x, gate, normal(5, 4, 8, 8), torch.tensor([4, -1, 2]), torch.tensor([2, 1, 1])


def step_verify_and_commit(q, k, v, gate, state, slots, accepted):
    ops, to = gla_ext.ops, {"slots": slots, "write_slots": slots - 1}
    drafted = ops.recurrent_gla_verify(q, k, v, gate, state=state, slots=slots)
    packed = {"slots": slots[:2], "cu_seqlens": torch.tensor([0, 1, 2])}
    drafts = ops.recurrent_gla_verify(*(x[:1] for x in (q, k, v, gate)), state=state, **packed)
    ops.recurrent_gla_commit_(k, v, gate, state=state, **to, accepted=accepted)
    return drafted, drafts, ops.recurrent_gla_step_(q, k, v, gate, state=state, **to), state


def run_pool(group):
    torch.manual_seed(1)
    mesh = DeviceMesh.from_group(group, "cpu")
    qkv, gate, state, slots, accepted = make_pool()
    operands = sharded(mesh, (*qkv, gate, state), (2, 2, None, 2, 1))
    return whole(step_verify_and_commit(*operands, slots, *sharded(mesh, (accepted,), (None,))))


def test_a_pool_of_states(pool):
    torch.manual_seed(1)
    qkv, gate, *others = make_pool()
    expected = step_verify_and_commit(*qkv, gate, *others)
    for found in pool(run_pool, ranks=2):
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs, 1e-12)


SAMPLES = {"float": 1.0, "int": 1, "bool": False, "str": "group", "ScalarType": torch.float32}
SAMPLES |= {"List[int]": [0], "SymInt": 1, "List[Tensor]": []}


def sample(mesh, argument):
    kind = str(argument.type)
    if kind.startswith("Optional"):
        return None
    x = torch.zeros(1, 2, 2, 4)
    return distribute_tensor(x, mesh, [Replicate()]) if kind == "Tensor" else SAMPLES[kind]


def test_other_operators_are_refused_by_name(one_rank):
    """Among them what is registered one day, and has no rule then."""
    with_rule = _sharding._RULES.keys() | _sharding._DECOMPOSED.keys()
    # It is made of the halves, which refuse by their names.
    others = set(_sharding.names_of_operators()) - with_rule - {"chunk_gla_across_ranks"}
    assert len(others) > 20
    for name in sorted(others):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(OPS, packet), overload or "default")
        arguments = [sample(one_rank, argument) for argument in op._schema.arguments]
        message = f"^{packet}: expected plain tensors, got a DTensor; .*redistribute to whole seq"
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), pytest.raises(NotImplementedError, match=message):
                given = zip(op._schema.arguments, arguments, strict=True)
                named = {a.name: x for (a, x) in given if a.kwarg_only}
                op(*arguments[: len(arguments) - len(named)], **named)


def test_each_public_function_is_here():
    """Or takes no tensors of its own."""
    functions = {name for name in gla_ext.ops.__all__ if not name.startswith("fused_chunk")}
    others = {"batch_invariant", "check_inputs", "in_mode_of_now", "is_batch_invariant"}
    others |= {"keeps_for_backward", "lightning_decay", "retention_decay"}
    # Refused: see test_sharding.py.
    others |= {"chunk_gla_", "recurrent_gla_buffered_step_", "short_convolution_"}
    mentioned = inspect.getsource(make_functions) + inspect.getsource(step_verify_and_commit)
    mentioned += inspect.getsource(normalised)
    assert {name for name in functions - others if name not in mentioned} == set()
