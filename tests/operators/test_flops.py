"""What torch's FlopCounterMode counts, beside counts by hand."""

import pytest
import torch
from common import make_inputs, run_python
from models import make_ids, make_model
from torch.utils.flop_counter import FlopCounterMode

from gla_ext import (
    chunk_gla,
    chunk_gla_,
    fused_recurrent_gla,
    recurrent_gla_buffered_step_,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)
from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.layers.swiglu import swiglu_linear

OPS = torch.ops.gla_ext
B, H, K, V = 2, 3, 8, 12
# Tokens, and the pairs in their chunks: 130 = 64 + 64 + 2.
LENGTHS = {1: 1, 64: 64 * 64, 130: 2 * 64 * 64 + 2 * 2}


def flops(call, *args, **kwargs) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        call(*args, **kwargs)
    counts = counter.get_flop_counts().get("Global", {})
    return {str(op).split(".")[-1]: count for op, count in counts.items()}


def leaves(x):
    return [t.requires_grad_() for t in (x.q, x.k, x.v, x.g)]


@pytest.mark.parametrize(("T", "pairs"), LENGTHS.items())
def test_chunks(T, pairs):
    q, k, v, g = leaves(make_inputs(B, T, H, K, V))
    counts = flops(lambda: chunk_gla(q, k, v, g)[0].sum().backward())
    assert counts["chunk_gla_fwd"] == 2 * B * H * (pairs * (K + V) + 2 * T * K * V)
    within = pairs * (3 * K + 2 * V)
    assert counts["chunk_gla_bwd"] == 2 * B * H * (within + 5 * T * K * V)


def test_shared_heads_and_packed_rows():
    """The heads are those of q; a packed row counts as one sequence."""
    x = make_inputs(1, 165, 4, K, V, lengths=(100, 65))
    args = (x.q, x.k[:, :, :2], x.v[:, :, :2], x.g[:, :, :2])
    counts = flops(chunk_gla, *args, cu_seqlens=x.cu_seqlens)
    pairs = 2 * 64 * 64 + 37 * 37
    assert counts == {"chunk_gla_fwd": 2 * 4 * (pairs * (K + V) + 2 * 165 * K * V)}


def test_the_recurrence():
    T, product = 9, 2 * B * 9 * H * K * V
    q, k, v, g = leaves(make_inputs(B, T, H, K, V))
    counts = flops(lambda: fused_recurrent_gla(q, k, v, g)[0].sum().backward())
    assert counts == {"recurrent_gla_fwd": 2 * product, "recurrent_gla_bwd": 5 * product}
    x = make_inputs(B, T, H, K, V)
    pool = {"state": x.initial_state}
    assert flops(chunk_gla_, x.q, x.k, x.v, x.g, **pool) == {
        "chunk_gla_": flops(chunk_gla, x.q, x.k, x.v, x.g)["chunk_gla_fwd"]
    }
    assert flops(recurrent_gla_step_, x.q, x.k, x.v, x.g, **pool) == {
        "recurrent_gla_step_": 2 * product
    }
    assert flops(recurrent_gla_verify, x.q, x.k, x.v, x.g, **pool) == {
        "recurrent_gla_verify": 2 * product
    }
    buffers = {f"buffer_{n}": torch.zeros(B, 16, H, D) for n, D in (("k", K), ("v", V), ("g", K))}
    count = torch.zeros(B, dtype=torch.int32)
    assert flops(
        recurrent_gla_buffered_step_, x.q, x.k, x.v, x.g, **pool, **buffers, count=count
    ) == {"recurrent_gla_buffered_step_": product}
    pool["accepted"] = torch.full((B,), 3)
    assert flops(recurrent_gla_commit_, x.k, x.v, x.g, **pool) == {"recurrent_gla_commit_": product}


def test_the_steps_are_the_whole():
    T, pairs = 130, LENGTHS[130]
    x = make_inputs(B, T, H, K, V)
    steps = {}

    def step(name, *args):
        out = []
        steps.update(flops(lambda: out.append(getattr(OPS, name)(*args))))
        return out[0]

    b = step("_gate_cumsum", x.g, None)
    S, _ = step("_chunk_states", x.k, x.v, b, None, None, False)
    A = step("_scores_off_diagonal", x.q, x.k, b, None, None)
    blocks = step("_scores_diagonal", x.q, x.k, b, None, None)
    step("_output", x.q, x.v, b, A, blocks, S, None, None)
    assert steps["_scores_diagonal"] == 2 * B * H * (8 * 16 * 16 + 2 * 2) * K
    scores = steps["_scores_diagonal"] + steps["_scores_off_diagonal"]
    assert scores == 2 * B * H * pairs * K
    whole = flops(chunk_gla, x.q, x.k, x.v, x.g)["chunk_gla_fwd"]
    assert sum(steps.values()) == whole

    again = scores + steps["_chunk_states"]
    steps.clear()
    dS, _ = step("_state_grads", x.q, x.do, b, None, None, None, False)
    step("_value_grads", x.k, x.do, b, A, blocks, dS, None)
    dA = step("_score_grads", x.do, x.v, None, 0.3)
    intra = step("_intra_grads", x.q, x.k, b, dA, None)
    step("_merge_grads", x.q, x.k, x.v, x.do, b, S, dS, *intra, None, None)
    args = (x.do, None, x.q, x.k, x.v, x.g, None, None, None, None, False, False)
    assert sum(steps.values()) + again == flops(OPS.chunk_gla_bwd, *args)["chunk_gla_bwd"]


def test_convolution():
    x = torch.randn(B, 7, 6).requires_grad_()
    conv = ShortConvolution(6, 4)
    products = 2 * B * 7 * 6 * 4
    assert flops(lambda: conv(x)[0].sum().backward()) == {
        "short_convolution_fwd": products,
        "short_convolution_bwd": 3 * products,
    }
    by_torch = torch.nn.Conv1d(6, 6, 4, padding=3, groups=6, bias=False)
    assert flops(by_torch, x.mT[..., :4]) == {"convolution": 2 * B * 7 * 6 * 4}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_operators_that_hold_a_product_count_it_once(mode):
    gate, up, weight = torch.randn(B, 7, 6), torch.randn(B, 7, 6), torch.randn(5, 6)
    with mode():
        weight = weight.clone().requires_grad_(mode is torch.enable_grad)
        assert sum(flops(swiglu_linear, gate, up, weight).values()) == 2 * B * 7 * 6 * 5
        norm = (up.unflatten(-1, (3, 2)), gate, weight, None, "swish", 1e-5)
        assert sum(flops(OPS.norm_gate_linear, *norm).values()) == 2 * B * 7 * 6 * 5


@pytest.mark.parametrize("together", [True, False])
def test_projections(together):
    x, weights = torch.randn(B, 7, 6).requires_grad_(), [torch.randn(n, 6) for n in (4, 5)]
    weights = [w.requires_grad_() for w in weights]

    def call():
        sum(y.sum() for y in OPS.joint_projection(x, weights, x.dtype, together)).backward()

    assert sum(flops(call).values()) == 3 * 2 * B * 7 * 6 * 9


@pytest.mark.parametrize("use_short_conv", [False, True])
def test_a_model(use_short_conv):
    """Six times the parameters in products a token, and the recurrence."""
    options = {"hidden_size": 32, "intermediate_size": 64, "use_short_conv": use_short_conv}
    model, ids = make_model(**options).train(), make_ids(T=128)
    counts = flops(lambda: model(ids, labels=ids).loss.backward())
    tokens = ids.numel()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    own = sum(counts[name] for name in counts if name.startswith(("chunk_gla", "short_conv")))
    assert own > 0
    assert sum(counts.values()) - own == 6 * tokens * sum(p.numel() for p in matrices)
    # Heads of 8 keys and 16 values, 2 layers: 128 / 64 chunks a sequence.
    forward = 2 * 2 * 2 * 2 * (2 * 64 * 64 * (8 + 16) + 2 * 128 * 8 * 16)
    assert counts["chunk_gla_fwd"] == forward


@pytest.mark.slow
def test_the_counter_is_imported_by_who_counts():
    """It is heavy; the formulas are there whichever comes first."""
    count = (
        "import sys; assert 'torch.utils.flop_counter' not in sys.modules, 'imported'\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    gla_ext.chunk_gla(*(torch.zeros(1, 2, 1, 4) for _ in range(4)))\n"
        "print(counter.get_total_flops(), 'WaitsFor' in repr(sys.meta_path))"
    )
    expected = f"{2 * (4 * 8 + 2 * 2 * 16)} False"
    assert run_python(f"import torch, gla_ext\n{count}").strip() == expected
    count = count.split("\n", 1)[1]
    before = "import sys, torch, torch.utils.flop_counter, gla_ext\n"
    assert run_python(before + count).strip() == expected


def test_halves_across_ranks():
    """The summaries' products, and those of the whole."""
    T, pairs = 130, LENGTHS[130]
    x = make_inputs(B, T, H, K, V)
    operands, none = (x.q, x.k, x.v, x.g, None), torch.empty(0, dtype=torch.uint8)
    flags = (None, False, False)
    counts = flops(OPS.chunk_gla_summary, *operands, None, *flags, True, 0)
    assert counts == {"chunk_gla_summary": 2 * B * H * T * K * V}
    counts = flops(OPS.chunk_gla_summary_bwd, x.do, None, *operands, *flags, none, 0)
    assert counts == {"chunk_gla_summary_bwd": 2 * B * H * T * K * V}
    args = (*operands, x.initial_state, None, True, False, False, True, none, 0)
    within = pairs * (K + V)
    assert flops(OPS.chunk_gla_apply, *args) == {
        "chunk_gla_apply": 2 * B * H * (within + 2 * T * K * V)
    }
    args = (x.do, None, *operands, x.initial_state, *flags, none, none, none)
    within = pairs * (3 * K + 2 * V)
    assert flops(OPS.chunk_gla_apply_bwd, *args) == {
        "chunk_gla_apply_bwd": 2 * B * H * (within + 5 * T * K * V)
    }
