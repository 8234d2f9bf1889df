"""What tensors, values and masks of users are refused, and in which sentence.

Equal bits (see common.py): the same calls.
"""

import numpy as np
import pytest
import torch
from common import assert_close, make_inputs, run_python
from common import raises_exactly as raises
from cuda_tools import waits_for_nothing
from models import make_layer, make_model, make_x

from gla_ext import (
    GatedLinearAttention,
    MultiheadGLA,
    check_inputs,
    chunk_gla,
    chunk_gla_,
    fused_recurrent_gla,
    recurrent_gla_commit_,
    recurrent_gla_step_,
    recurrent_gla_verify,
)
from gla_ext.layers.norms import rms_norm
from gla_ext.layers.short_convolution import ShortConvolution
from gla_ext.layers.swiglu import swiglu, swiglu_linear
from gla_ext.model import next_token_loss


@pytest.fixture
def x():
    return make_inputs(2, 20, 4, 8, 12)


@pytest.fixture
def packed():
    return make_inputs(1, 20, 4, 8, 12, lengths=(5, 10))


def check(x, **changes):
    tensors = {name: changes.pop(name, getattr(x, name)) for name in "qkvg"}
    return check_inputs(**tensors, **changes)


def changed(t, value, *index):
    t = t.clone()
    t[index] = value
    return t


def test_inputs_that_are_right(x, packed):
    check(x)
    check(x, g=None, gv=-torch.rand(2, 20, 4, 12), initial_state=x.initial_state, scale=2)
    check(x, g=x.g.masked_fill(x.g < -1, -torch.inf), output_final_state=True, state_v_first=True)
    check(packed, cu_seqlens=packed.cu_seqlens, cu_seqlens_cpu=packed.cu_seqlens)
    check(x.map(lambda t: t[:, :0]))
    check(x.map(lambda t: t.bfloat16().requires_grad_()))


def test_gates_that_are_no_logarithms(x):
    g = changed(changed(x.g, 0.5, 1, 3, 2, 7), 0.25, 0, 0, 0, 0)
    gv = changed(torch.zeros(2, 20, 4, 12), 3.0, 0, 1, 2, 11)
    for gates, found in (
        ({"g": g}, "2 of 1280 above 0, the largest 0.5 at [1, 3, 2, 7]"),
        ({"gv": gv}, "1 of 1920 above 0, the largest 3 at [0, 1, 2, 11]"),
    ):
        with raises(
            ValueError,
            f"check_inputs: expected {next(iter(gates))} to be natural logarithms of decays, at "
            f"most 0, got {found}; of decays pass .log(), of logits F.logsigmoid",
        ):
            check(x, **gates)
    with pytest.raises(ValueError, match=r"expected g to be .* got 1280 of 1280 above 0"):
        check(x, g=x.g.exp())


WRONG = [(name, value) for name in ("q", "k", "v", "initial_state")
         for value in (torch.nan, torch.inf, -torch.inf)]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [*WRONG, ("g", torch.nan), ("g", torch.inf)])
def test_numbers_that_are_not_finite(x, name, value):
    t = changed(getattr(x, name), value, 1, 3, 2, 4)
    kind = "finite numbers or -inf" if name == "g" else "finite numbers"
    with raises(
        ValueError,
        f"check_inputs: expected {name} to hold {kind}, got 1 of {t.numel()} that are not, among "
        f"them {value} at [1, 3, 2, 4]",
    ):
        check(x, **{name: t})


@pytest.mark.parametrize(("heads", "tokens"), [(4, 64), (8, 1000), (63, 64), (1, 129)])
def test_heads_that_come_first(heads, tokens):
    t = torch.zeros(2, heads, tokens, 8)
    with pytest.raises(
        ValueError,
        match=rf"T = {heads} tokens of H = {tokens} heads, which looks like \[B, H, T, D\]: call",
    ):
        check_inputs(t, t, t, None)
    check_inputs(*3 * [t.transpose(1, 2)], None)


def test_few_tokens_may_have_many_heads_and_a_state_tells_them_apart():
    for tokens, heads in ((1, 128), (3, 8), (64, 64)):
        t = torch.zeros(2, tokens, heads, 8)
        check_inputs(t, t, t, None)
    t = torch.zeros(2, 4, 64, 8)
    check_inputs(t, t, t, None, initial_state=torch.zeros(2, 64, 8, 8))


def test_what_else_is_looked_at(x, packed):
    with raises(ValueError, "check_inputs: expected scale to be finite, got nan"):
        check(x, scale=float("nan"))
    with raises(ValueError, "check_inputs: expected cu_seqlens to start with 0, got 1"):
        check(packed, cu_seqlens=torch.tensor([1, 20]))
    with raises(ValueError, "check_inputs: expected k on the device of q, cpu, got meta"):
        check(x, k=x.k.to("meta"))
    with raises(TypeError, "check_inputs: expected q to be a tensor, got <class 'list'>"):
        check(x, q=[1.0])
    with raises(TypeError, "chunk_gla: expected q to be a tensor, got None"):
        check(x, q=None)
    with pytest.raises(ValueError, match=r"chunk_gla: expected g to have shape \[B, T, HK, K\]"):
        check(x, g=x.g[:1])


@pytest.mark.slow
def test_the_switch_of_the_environment():
    code = """
import torch
from gla_ext import GatedLinearAttention, chunk_gla, fused_recurrent_gla

q, g = torch.ones(1, 3, 2, 4), torch.full((1, 3, 2, 4), 0.5)
nan = torch.full((1, 3, 8), torch.nan)
layer = GatedLinearAttention(hidden_size=8, num_heads=2)
for call in (
    lambda: chunk_gla(q, q, q, g),
    lambda: fused_recurrent_gla(q, q, q, g),
    lambda: layer(nan),
    lambda: torch.vmap(lambda q: chunk_gla(q, q, q, g)[0])(q[None]),
    lambda: torch.jit.trace(lambda q: chunk_gla(q, q, q, g)[0], (q,), check_trace=False),
):
    try:
        call()
    except ValueError as error:
        print(str(error).split(", ")[0])
    else:
        print("taken")
"""
    refused = [
        "chunk_gla: expected g to be natural logarithms of decays",
        "fused_recurrent_gla: expected gk to be natural logarithms of decays",
        "chunk_gla: expected q to hold finite numbers",
    ]
    found = run_python(code, GLA_EXT_CHECK_INPUTS="1").splitlines()
    assert found == [*refused, "taken", "taken"]


NO_TENSORS = ([[1.0]], np.ones((2, 2)), 1.0)
T = torch.ones(2, 3, 4, 8)
ROW = T[0]  # [3, 4, 8]: B, T, channels
STATE = torch.zeros(2, 4, 8, 8)
CALLS = {
    "chunk_gla": ("q k v g gv initial_state cu_seqlens", chunk_gla, dict.fromkeys("qkvg", T)),
    "fused_recurrent_gla": (
        "q k v gk gv initial_state cu_seqlens",
        fused_recurrent_gla,
        dict.fromkeys("qkv", T),
    ),
    "chunk_gla_": (
        "q k v g gv state slots write_slots has_initial_state cu_seqlens checkpoints "
        "checkpoint_slots checkpoint_cu_starts",
        chunk_gla_,
        dict.fromkeys("qkvg", T) | {"state": STATE},
    ),
    "recurrent_gla_step_": (
        "q k v gk gv state slots",
        recurrent_gla_step_,
        dict.fromkeys("qkv", T) | {"state": STATE},
    ),
    "recurrent_gla_verify": (
        "q k v gk gv state slots",
        recurrent_gla_verify,
        dict.fromkeys("qkv", T) | {"state": STATE},
    ),
    "recurrent_gla_commit_": (
        "k v gk gv state slots accepted",
        recurrent_gla_commit_,
        {"k": T, "v": T, "state": STATE, "accepted": torch.ones(2, dtype=torch.int64)},
    ),
    "rms_norm": ("x weight gate", rms_norm, {"x": T}),
    "swiglu": ("gate up", swiglu, {"gate": T, "up": T}),
    "swiglu_linear": (
        "gate up weight bias",
        swiglu_linear,
        {"gate": T, "up": T, "weight": torch.ones(5, 8)},
    ),
    "ShortConvolution": ("x cache cu_seqlens", ShortConvolution(8, 4), {"x": ROW}),
    "GatedLinearAttention": (
        "hidden_states attention_mask cu_seqlens",
        GatedLinearAttention(hidden_size=8, num_heads=2),
        {"hidden_states": ROW},
    ),
    "MultiheadGLA": (
        "query key value key_padding_mask attn_mask",
        MultiheadGLA(8, 2),
        {"query": ROW, "key": ROW, "value": ROW, "is_causal": True},
    ),
    "GLAForCausalLM": (
        "input_ids cu_seqlens",
        make_model(),
        {"input_ids": torch.ones(1, 3, dtype=torch.int64)},
    ),
    "next_token_loss": (
        "logits labels cu_seqlens",
        next_token_loss,
        {"logits": ROW, "labels": torch.ones(3, 4, dtype=torch.int64)},
    ),
}


@pytest.mark.parametrize("value", NO_TENSORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, (names, *_) in CALLS.items() for name in names.split()]
)
def test_values_that_are_no_tensors(op, name, value):
    _, function, arguments = CALLS[op]
    with raises(TypeError, f"{op}: expected {name} to be a tensor, got {type(value)}"):
        function(**arguments | {name: value})


@pytest.mark.parametrize("scale", ["1", [1.0], np.ones(2)])
@pytest.mark.parametrize(
    "function", [chunk_gla, fused_recurrent_gla, recurrent_gla_step_, recurrent_gla_verify]
)
def test_scales_that_are_no_numbers(function, scale):
    state = (
        {"state": STATE} if function.__name__ not in ("chunk_gla", "fused_recurrent_gla") else {}
    )
    name = function.__name__
    with raises(TypeError, f"{name}: expected scale to be a number, got {type(scale)}"):
        function(T, T, T, T, scale=scale, **state)


def test_numbers_of_numpy_are_scales(x):
    expected = chunk_gla(x.q, x.k, x.v, x.g, scale=0.5)[0]
    for scale in (np.float32(0.5), np.float64(0.5)):
        assert torch.equal(chunk_gla(x.q, x.k, x.v, x.g, scale=scale)[0], expected)


MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_masks_of_0_and_1(dtype):
    layer, x = make_layer(), make_x(T=7)
    assert torch.equal(layer(x, MASK.to(dtype))[0], layer(x, MASK.bool())[0])


@pytest.mark.parametrize("value", [-torch.inf, -1e9, 2.0, 0.5, torch.nan])
def test_masks_of_other_numbers(value):
    mask = torch.where(MASK.bool(), 0.0, value)
    message = (
        "GatedLinearAttention: expected attention_mask to hold 1 for tokens and 0 for padding, got "
        f"{value}; of an additive mask pass mask == 0"
    )
    layer, model = make_layer(), make_model()
    with raises(ValueError, message):
        layer(make_x(T=7), mask)
    with raises(ValueError, message):
        model(torch.ones(2, 7, dtype=torch.int64), attention_mask=mask)
    layer(make_x(T=4), torch.cat([mask[:, :1], MASK[:, :4]], 1))  # the last columns count


def test_masks_are_not_read_where_there_are_no_values():
    layer, x = make_layer(), make_x(T=7)
    expected = layer(x, MASK)[0]
    (found,) = torch.vmap(lambda x, m: layer(x, m)[0])(x[None], MASK[None])
    assert_close(found, expected, 1e-14)
    layer.to("meta")(x.to("meta"), MASK.to("meta"))


@pytest.mark.cuda
def test_on_cuda_nothing_is_read_but_by_check_inputs():
    layer, x = make_layer(torch.float32).cuda(), make_x(T=7, dtype=torch.float32).cuda()
    mask = MASK.cuda()
    expected, other = layer(x, mask)[0], 2.0 * mask
    with waits_for_nothing():
        found = layer(x, other)[0]
    assert torch.equal(found, expected)
    inputs = make_inputs(2, 20, 4, 8, 12, device="cuda")
    check(inputs)
    with pytest.raises(ValueError, match=r"expected g to be .* got 1280 of 1280 above 0"):
        check(inputs, g=-inputs.g)


@pytest.mark.cuda
def test_the_switch_leaves_captures_alone():
    code = """
import torch
from gla_ext import chunk_gla

q, g = torch.ones(1, 3, 2, 4, device="cuda"), torch.full((1, 3, 2, 4), 0.5, device="cuda")
try:
    chunk_gla(q, q, q, g)
except ValueError:
    print("refused")
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.graph(graph, stream=stream):
    chunk_gla(q, q, q, g)
print("captured")
"""
    assert run_python(code, GLA_EXT_CHECK_INPUTS="1").splitlines() == ["refused", "captured"]
