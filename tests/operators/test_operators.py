"""The registered operators: schemas, dispatch keys, opcheck, and what each says of gradients."""

import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from operators import (
    decoding,
    differentiable,
    halves,
    overload,
    pools,
    steps,
    without_gradient,
)

from gla_ext import _C, chunk_gla, fused_recurrent_gla

LOSS = "int ignore_index, float label_smoothing, float logit_scale, float? logit_softcapping"
SCHEMAS = {
    "chunk_gla_fwd": "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, "
    "Tensor? initial_state, Tensor? cu_seqlens, float? scale, bool output_final_state, "
    "bool state_v_first, bool batch_invariant, int for_backward_bytes=-1) -> "
    "(Tensor o, Tensor final_state, Tensor for_backward)",
    "chunk_gla_bwd": "(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? g, "
    "Tensor? gv, Tensor? initial_state, Tensor? cu_seqlens, float? scale, "
    "bool state_v_first, bool batch_invariant, Tensor? for_backward=None, bool gate_gradient=True) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dgv, Tensor dh0)",
    "chunk_gla_": "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor(a!) state, "
    "Tensor? slots, Tensor? write_slots, Tensor? has_initial_state, Tensor? cu_seqlens, "
    "float? scale, bool state_v_first, bool batch_invariant, int checkpoint_every=0, "
    "Tensor(b!)? checkpoints=None, Tensor? checkpoint_slots=None, "
    "Tensor? checkpoint_cu_starts=None) -> Tensor",
    "chunk_gla_.out": "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor(a!) state, "
    "Tensor? slots, Tensor? write_slots, Tensor? has_initial_state, Tensor? cu_seqlens, "
    "float? scale, bool state_v_first, bool batch_invariant, int checkpoint_every=0, "
    "Tensor(b!)? checkpoints=None, Tensor? checkpoint_slots=None, "
    "Tensor? checkpoint_cu_starts=None, *, Tensor(c!) out) -> ()",
    "chunk_gla_summary": "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, "
    "Tensor? initial_state, float? scale, bool state_v_first, bool batch_invariant, "
    "bool for_backward, int prepared_bytes=0) -> (Tensor summary, Tensor prepared)",
    "chunk_gla_apply": "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, "
    "Tensor? initial_state, float? scale, bool output_final_state, bool state_v_first, "
    "bool batch_invariant, bool for_backward, Tensor prepared, int segments=0) -> "
    "(Tensor o, Tensor final_state, Tensor entering)",
    "chunk_gla_summary_bwd": "(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? g, "
    "Tensor? gv, float? scale, bool state_v_first, bool batch_invariant, Tensor prepared, "
    "int prepared_bytes=0) -> (Tensor state_grad, Tensor prepared_bwd)",
    "chunk_gla_apply_bwd": "(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? g, "
    "Tensor? gv, Tensor? initial_state, float? scale, bool state_v_first, bool batch_invariant, "
    "Tensor prepared, Tensor entering, Tensor prepared_bwd) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dgv, Tensor dh0)",
    "chunk_gla_fold": "(Tensor summaries, Tensor? decays, Tensor? boundary, int size, "
    "SymInt each, SymInt rows, SymInt H, SymInt K, SymInt V, bool key_gated, bool value_gated, "
    "bool state_v_first, int[] places, int[] reach, int[] entered) -> (Tensor x, Tensor decays)",
    "chunk_gla_across_ranks": "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, "
    "Tensor? initial_state, Tensor? cu_seqlens, float? scale, bool output_final_state, "
    "bool state_v_first, bool batch_invariant, bool for_backward, int rank, int size, str group, "
    "int[] counts, int[] before, int[] after, int[] spans) -> (Tensor o, Tensor final_state)",
    "recurrent_gla_fwd": "(Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, "
    "Tensor? initial_state, Tensor? cu_seqlens, float? scale, bool output_final_state, "
    "bool reverse, bool state_v_first) -> (Tensor o, Tensor final_state)",
    "recurrent_gla_bwd": "(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? gk, "
    "Tensor? gv, Tensor? initial_state, Tensor? cu_seqlens, float? scale, bool reverse, "
    "bool state_v_first) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dgk, Tensor dgv, Tensor dh0)",
    "recurrent_gla_step_": "(Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, "
    "Tensor(a!) state, Tensor? slots, float? scale, bool state_v_first, "
    "Tensor? write_slots=None) -> Tensor",
    "recurrent_gla_step_.out": "(Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, "
    "Tensor(a!) state, Tensor? slots, float? scale, bool state_v_first, "
    "Tensor? write_slots=None, *, Tensor(b!) out) -> ()",
    "recurrent_gla_verify": "(Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, "
    "Tensor state, Tensor? slots, float? scale, bool state_v_first, "
    "Tensor? cu_seqlens=None) -> Tensor",
    "recurrent_gla_verify.out": "(Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, "
    "Tensor state, Tensor? slots, float? scale, bool state_v_first, "
    "Tensor? cu_seqlens=None, *, Tensor(a!) out) -> ()",
    "recurrent_gla_commit_": "(Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor(a!) state, "
    "Tensor? slots, Tensor accepted, bool state_v_first, Tensor? cu_seqlens=None, "
    "Tensor? write_slots=None) -> ()",
    "recurrent_gla_buffered_step_": "(Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor(a!) state, "
    "Tensor? slots, Tensor(b!) buffer_k, Tensor(c!) buffer_v, Tensor(d!) buffer_g, Tensor count, "
    "float? scale, bool state_v_first) -> Tensor",
    "rms_norm_gate_fwd": "(Tensor x, Tensor? weight, Tensor? gate, str activation, float eps) -> "
    "(Tensor y, Tensor rstd)",
    "rms_norm_gate_bwd": "(Tensor dy, Tensor x, Tensor? weight, Tensor? gate, Tensor rstd, "
    "str activation, bool output=False) -> (Tensor dx, Tensor dweight, Tensor dgate, Tensor y)",
    "norm_gate_linear": "(Tensor o, Tensor gate, Tensor weight, Tensor? norm_weight, "
    "str activation, float eps) -> Tensor",
    "rms_norm_residual_fwd": "(Tensor x, Tensor residual, Tensor? weight, float eps) -> "
    "(Tensor y, Tensor stream, Tensor rstd)",
    "rms_norm_residual_bwd": "(Tensor dy, Tensor? dstream, Tensor stream, Tensor? weight, "
    "Tensor rstd) -> (Tensor dx, Tensor dresidual, Tensor dweight)",
    "cross_entropy_fwd": f"(Tensor logits, Tensor target, {LOSS}, float lse_square_scale, "
    "bool inplace_backward) -> (Tensor loss, Tensor z_loss, Tensor lse)",
    "cross_entropy_bwd": f"(Tensor dloss, Tensor logits, Tensor target, Tensor lse, {LOSS}, "
    "float lse_square_scale) -> Tensor",
    "cross_entropy_bwd_": f"(Tensor dloss, Tensor(a!) logits, Tensor target, Tensor lse, {LOSS}, "
    "float lse_square_scale) -> ()",
    "cross_entropy_with_grad_": f"(Tensor(a!) logits, Tensor target, {LOSS}, "
    "float lse_square_scale) -> Tensor",
    "linear_cross_entropy_fwd": f"(Tensor x, Tensor weight, Tensor? bias, Tensor target, {LOSS}, "
    "int num_chunks, bool with_dx, bool with_dweight) -> "
    "(Tensor loss, Tensor dx, Tensor dweight, Tensor dbias)",
    "gate_projection_fwd": "(Tensor h, Tensor weight, Tensor? bias, float normalizer, "
    "float? clamp_min) -> Tensor",
    "gate_projection_bwd": "(Tensor dg, Tensor h, Tensor weight, Tensor? bias, "
    "float normalizer, float? clamp_min) -> (Tensor dh, Tensor dweight, Tensor dbias)",
    "swiglu_fwd": "(Tensor gate, Tensor up) -> Tensor",
    "swiglu_bwd": "(Tensor dy, Tensor gate, Tensor up, bool product) -> "
    "(Tensor dgate, Tensor dup, Tensor y)",
    "swiglu_linear": "(Tensor gate, Tensor up, Tensor weight, Tensor? bias) -> Tensor",
    "short_convolution_": "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, "
    "Tensor? slots, Tensor? write_slots, Tensor? has_initial_state, Tensor? cu_seqlens) -> Tensor",
    "short_convolution_.out": "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, "
    "Tensor? slots, Tensor? write_slots, Tensor? has_initial_state, Tensor? cu_seqlens, "
    "*, Tensor(b!) out) -> ()",
    "joint_projection": "(Tensor x, Tensor[] weights, ScalarType dtype, bool together=True) -> "
    "Tensor[]",
    "norm_linear": "(Tensor x, Tensor? norm_weight, float eps, Tensor[] weights, "
    "bool overlaps=False) -> Tensor[]",
    "norm_swiglu": "(Tensor x, Tensor? norm_weight, float eps, Tensor gate_weight, "
    "Tensor up_weight, bool overlaps=False) -> Tensor",
    "linear_residual": "(Tensor x, Tensor weight, Tensor residual, bool overlaps=False) -> Tensor",
    "norm_gate_linear_residual": "(Tensor o, Tensor? norm_weight, float eps, Tensor gate, "
    "Tensor weight, Tensor residual, bool overlaps=False) -> Tensor",
    "recurrent_gla_low_rank_step_": "(Tensor q, Tensor k, Tensor v, Tensor h, Tensor gate_weight, "
    "Tensor? gate_bias, float normalizer, float? clamp_min, Tensor(a!) state, Tensor? slots, "
    "float? scale, bool state_v_first, bool overlaps=False) -> Tensor",
    "short_convolution_fwd": "(Tensor x, Tensor weight, Tensor? bias, Tensor? cache, "
    "Tensor? cu_seqlens, bool output_state) -> (Tensor y, Tensor state)",
    "short_convolution_bwd": "(Tensor dy, Tensor? dstate, Tensor x, Tensor weight, Tensor? bias, "
    "Tensor? cache, Tensor? cu_seqlens) -> "
    "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dcache)",
    "_gate_cumsum": "(Tensor g, Tensor? cu_seqlens) -> Tensor",
    "_chunk_states": "(Tensor k, Tensor v, Tensor b, Tensor? initial_state, Tensor? cu_seqlens, "
    "bool state_v_first) -> (Tensor S, Tensor final_state)",
    "_scores_off_diagonal": "(Tensor q, Tensor k, Tensor b, Tensor? cu_seqlens, float? scale) "
    "-> Tensor",
    "_scores_diagonal": "(Tensor q, Tensor k, Tensor b, Tensor? cu_seqlens, float? scale) "
    "-> Tensor",
    "_output": "(Tensor q, Tensor v, Tensor b, Tensor A, Tensor A_diagonal, Tensor S, "
    "Tensor? cu_seqlens, float? scale) -> Tensor",
    "_state_grads": "(Tensor q, Tensor do, Tensor b, Tensor? dht, Tensor? cu_seqlens, "
    "float? scale, bool state_v_first) -> (Tensor dS, Tensor dh0)",
    "_value_grads": "(Tensor k, Tensor do, Tensor b, Tensor A, Tensor A_diagonal, Tensor dS, "
    "Tensor? cu_seqlens) -> Tensor",
    "_score_grads": "(Tensor do, Tensor v, Tensor? cu_seqlens, float? scale) -> Tensor",
    "_intra_grads": "(Tensor q, Tensor k, Tensor b, Tensor dA, Tensor? cu_seqlens) "
    "-> (Tensor dq, Tensor dk, Tensor dg)",
    "_merge_grads": "(Tensor q, Tensor k, Tensor v, Tensor do, Tensor b, Tensor S, Tensor dS, "
    "Tensor dq, Tensor dk, Tensor dg, Tensor? cu_seqlens, float? scale) "
    "-> (Tensor dq, Tensor dk, Tensor dg)",
}


def registered():
    prefix = "gla_ext::"
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def test_schemas_are_frozen():
    assert registered() == sorted(SCHEMAS)
    for name, schema in SCHEMAS.items():
        assert str(overload(name)._schema) == f"gla_ext::{name}{schema}"


@pytest.mark.parametrize("name", SCHEMAS)
def test_dispatch_keys_and_tag(name):
    keys = ["CPU", "Meta", "Autograd"] + ["CUDA"] * (_C.build_info()["cuda"] is not None)
    if name == "linear_cross_entropy_fwd" and "CUDA" not in keys:
        keys = [*keys, "CUDA"]  # of other operators: the same code
    # Made of other operators, on every device.
    if name in ("swiglu_linear", "norm_gate_linear", "joint_projection"):
        keys = ["CompositeExplicitAutograd", "Autograd"]
    if name == "chunk_gla_across_ranks":
        keys = ["CompositeImplicitAutograd"]
    for key in keys:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gla_ext::{name}", key), key
    assert torch.Tag.pt2_compliant_tag in overload(name).tags


@pytest.mark.parametrize("key", ["AutocastCPU", "AutocastCUDA"])
def test_autocast_key(key):
    """Norm, convolution, SwiGLU and cross entropy keep the dtype that their input comes in, as they
    compute in fp32; the linear maps of SwiGLU, cross entropy, the gate and the norm are cast. The
    layer casts for its joint projection, whose weights are cast inside. Under autocast no token is
    decoded by the operators of a step.
    """
    without = (
        *("_", "rms_norm", "short_convolution", "swiglu_fwd", "cross_entropy", "joint"),
        *("chunk_gla_fold", "norm_linear", "norm_swiglu", "norm_gate_linear_residual"),
        *("linear_residual", "recurrent_gla_low_rank"),
    )
    for name in SCHEMAS:
        expected = not name.startswith(without) and not name.endswith("_bwd")
        has = torch._C._dispatch_has_kernel_for_dispatch_key(f"gla_ext::{name}", key)
        assert has == expected, name


# opcheck.


def opcheck(name, arguments):
    keywords = arguments[-1] if isinstance(arguments[-1], dict) else {}
    torch.library.opcheck(overload(name), arguments[: len(arguments) - bool(keywords)], keywords)


by_packing = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])


@by_packing
@pytest.mark.parametrize("name", differentiable("cpu", False))
def test_opcheck_of_gradients(device, name, packed):
    """The inputs of forward want gradients where they are packed."""
    dtype = torch.float32 if "fwd" in name else torch.bfloat16
    arguments = differentiable(device, packed, dtype)[name]
    if packed and "fwd" in name:
        arguments = [wanting(x) if floating(x) else x for x in arguments]
    opcheck(name, arguments)


@by_packing
@pytest.mark.parametrize("name", [*steps("cpu", False), *pools("cpu", False)])
def test_opcheck_of_steps_and_pools(device, name, packed):
    opcheck(name, (steps if name.startswith("_") else pools)(device, packed)[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", decoding("cpu"))
def test_opcheck_of_decoding(device, name, dtype):
    opcheck(name, decoding(device, dtype)[name])


@pytest.mark.parametrize("name", halves())
def test_opcheck_of_halves(name):
    opcheck(name, halves()[name])


# What autograd, functorch and forward mode are told.


def floating(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def wanting(x):
    return x.detach().requires_grad_()


def replaced(arguments, change):
    """The arguments with one tensor after the other changed."""
    for i, x in enumerate(arguments):
        if floating(x):
            yield (*arguments[:i], change(x), *arguments[i + 1 :])
        elif isinstance(x, list) and all(map(floating, x)):
            for j, y in enumerate(x):
                yield (*arguments[:i], [*x[:j], change(y), *x[j + 1 :]], *arguments[i + 1 :])
        elif isinstance(x, dict):
            yield (*arguments[:i], {name: change(y) for name, y in x.items()})


def call(name, arguments):
    keywords = arguments[-1] if isinstance(arguments[-1], dict) else {}
    return overload(name)(*arguments[: len(arguments) - bool(keywords)], **keywords)


POOL = [f"recurrent_gla_{x}" for x in ("step_", "buffered_step_", "verify", "commit_")]
SENTENCES = {  # by how a name begins
    **dict.fromkeys(POOL, "decoding on a pool has no gradient, call gla_ext.fused_recurrent_gla, "),
    **dict.fromkeys(decoding("cpu"), "decoding has no gradient, run it under torch.no_grad()"),
    "chunk_gla_:": "a pool of states has no gradient, call gla_ext.chunk_gla, or run it under ",
    "short_convolution_": "decoding on a pool has no gradient, call a",
}
OWN = "it has no gradient of its own, call gla_ext.chunk_gla, or this under torch.no_grad()"


@pytest.mark.parametrize("name", without_gradient())
def test_no_gradient_is_lost(name):
    """Whichever tensor wants one."""
    operator = name.partition(".")[0].partition(":")[0]
    sentence = SENTENCES.get("chunk_gla_:" if operator == "chunk_gla_" else operator, OWN)
    for arguments in replaced(without_gradient()[name], wanting):
        with pytest.raises(NotImplementedError, match=re.escape(f"{operator}: {sentence}")):
            call(name, arguments)
        with torch.no_grad():
            call(name, arguments)


TANGENT = "forward-mode AD is not supported, use reverse mode (backward)"


@pytest.mark.parametrize(
    "name", ["chunk_gla_fwd: both", "recurrent_gla_fwd: both", *without_gradient()]
)
def test_no_tangent_is_lost(name):
    given = (without_gradient() | differentiable("cpu", False))[name]
    with fwAD.dual_level():
        for arguments in replaced(given, lambda x: fwAD.make_dual(x, x)):
            with pytest.raises(NotImplementedError, match=re.escape(TANGENT)):
                call(name, arguments)


@pytest.mark.parametrize("operator", [chunk_gla, fused_recurrent_gla])
def test_what_autograd_does_not_do(operator):
    name = operator.__name__
    q, k, v, g = (torch.randn(1, 5, 2, 4) for _ in range(4))
    with pytest.raises(NotImplementedError, match=re.escape(f"{name}: {TANGENT}")):
        torch.func.jvp(lambda q: operator(q, k, v, -g.abs())[0], (q,), (q,))
    with pytest.raises(NotImplementedError, match=rf"{name}: torch\.func transforms"):
        torch.func.grad(lambda q: operator(q, k, v, g)[0].sum())(q)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(operator(q, k, v, g)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"^{name}: double backward is not supported$"):
        dq.sum().backward()


IN_PLACE = [name for name in without_gradient() if re.search(r"_(\.out)?$", name)]


@pytest.mark.parametrize("name", [*IN_PLACE, *decoding("cpu")])
def test_vmap_is_refused(name):
    arguments = without_gradient()[name]
    first = next(i for i, x in enumerate(arguments) if floating(x))
    message = f"{name.partition('.')[0]}: torch.vmap is not supported"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        torch.vmap(lambda x: call(name, (*arguments[:first], x, *arguments[first + 1 :])))(
            arguments[first].expand(3, *arguments[first].shape)
        )


# Tensors that are written.


def written(name, arguments):
    """The tensors that the operator's schema says it writes, and the others."""
    found, others = [], []
    keywords = arguments[-1] if isinstance(arguments[-1], dict) else {}
    for i, argument in enumerate(overload(name)._schema.arguments):
        x = keywords.get(argument.name, arguments[i] if i < len(arguments) else None)
        if isinstance(x, torch.Tensor):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (found if writes else others).append(x)
    return found, others


WRITING = [name for name in without_gradient() if written(name, without_gradient()[name])[0]]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITING)
def test_autograd_knows_of_the_writes(name, mode):
    arguments = without_gradient()[name]
    found, others = written(name, arguments)
    weights = [torch.ones_like(x).requires_grad_() for x in found]
    losses = [(weight * x).sum() for weight, x in zip(weights, found, strict=True)]
    versions = [x._version for x in found], [x._version for x in others]
    with mode():
        call(name, arguments)
    assert [x._version for x in found] == [n + 1 for n in versions[0]]
    assert [x._version for x in others] == versions[1]
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
