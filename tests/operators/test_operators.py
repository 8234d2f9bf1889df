"""The registered operators: schemas, dispatch keys, opcheck."""

import pytest
import torch
from common import make_inputs

from gla_ext import _C

ops = torch.ops.gla_ext

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


def overload(name):
    name, _, variant = name.partition(".")
    return getattr(getattr(ops, name), variant or "default")


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


def call_arguments(device, requires_grad, packed, optionals, dtype=torch.float32):
    lengths = (30, 0, 36) if packed else None
    x = make_inputs(
        *(1 if packed else 2, 70, 2, 8, 12, dtype), states=optionals, lengths=lengths, device=device
    )
    if requires_grad:
        x = x.map(lambda t: t.requires_grad_())
    return x


OPTIONS = [
    pytest.param(requires_grad, packed, optionals, id=f"{requires_grad=}-{packed=}-{optionals=}")
    for requires_grad in (False, True)
    for packed in (False, True)
    for optionals in (False, True)
]


@pytest.mark.parametrize("requires_grad, packed, optionals", OPTIONS)
def test_opcheck_forward(device, requires_grad, packed, optionals):
    x = call_arguments(device, requires_grad, packed, optionals)
    scale = 0.3 if optionals else None
    flags = (optionals, optionals, packed)  # final state, v-first, invariant
    h0 = x.initial_state
    if optionals:
        h0 = h0.detach().transpose(2, 3).contiguous().requires_grad_(requires_grad)
    torch.library.opcheck(
        ops.chunk_gla_fwd.default, (x.q, x.k, x.v, x.g, None, h0, x.cu_seqlens, scale, *flags)
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("optionals", [False, True])
def test_opcheck_backward(device, packed, optionals):
    x = call_arguments(device, False, packed, optionals, torch.bfloat16)
    inputs = (x.do, x.dht, x.q, x.k, x.v, x.g, None, x.initial_state, x.cu_seqlens)
    torch.library.opcheck(ops.chunk_gla_bwd.default, (*inputs, None, False, False))


def step_calls(device, packed, optionals):
    """The arguments of every step, each fed with what the steps before it returned."""
    x = call_arguments(device, False, packed, optionals)
    cu, scale = x.cu_seqlens, 0.3 if optionals else 8**-0.5
    h0, dht = x.initial_state, x.dht
    b = ops._gate_cumsum(x.g, cu)
    S, _ = ops._chunk_states(x.k, x.v, b, h0, cu, False)
    A = ops._scores_off_diagonal(x.q, x.k, b, cu, scale)
    A_diagonal = ops._scores_diagonal(x.q, x.k, b, cu, scale)
    dS, _ = ops._state_grads(x.q, x.do, b, dht, cu, scale, False)
    dA = ops._score_grads(x.do, x.v, cu, scale)
    intra = ops._intra_grads(x.q, x.k, b, dA, cu)
    return {
        "_gate_cumsum": (x.g, cu),
        "_chunk_states": (x.k, x.v, b, h0, cu, False),
        "_scores_off_diagonal": (x.q, x.k, b, cu, scale),
        "_scores_diagonal": (x.q, x.k, b, cu, scale),
        "_output": (x.q, x.v, b, A, A_diagonal, S, cu, scale),
        "_state_grads": (x.q, x.do, b, dht, cu, scale, False),
        "_value_grads": (x.k, x.do, b, A, A_diagonal, dS, cu),
        "_score_grads": (x.do, x.v, cu, scale),
        "_intra_grads": (x.q, x.k, b, dA, cu),
        "_merge_grads": (x.q, x.k, x.v, x.do, b, S, dS, *intra, cu, scale),
    }


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name.startswith("_")])
@pytest.mark.parametrize("packed, optionals", [(False, False), (True, True)])
def test_opcheck_steps(device, name, packed, optionals):
    torch.library.opcheck(overload(name), step_calls(device, packed, optionals)[name])
