"""FLA's language model on a CPU under `accelerate_fla`, without its kernels and without Triton's
interpreter: in a process of its own, since the other tests turn that on.

Equal bits (see common.py): tokens.
"""

import pytest
import torch
from common import assert_close, run_python
from fla_kernels import import_fla, require_kernels
from torch.nn.functional import logsigmoid

import gla_ext.fla

MODEL = '''
import warnings

warnings.simplefilter("ignore")
import torch
from common import assert_close

import gla_ext.fla

from fla import layers, models, modules
from fla.layers.simple_gla import SimpleGatedLinearAttention

before = layers.attn.flash_attn_func
gla_ext.fla.accelerate_fla()
from gla_ext import hf

SIZES = {
    "hidden_size": 32,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 31,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
ids = torch.randint(31, (2, 70), generator=torch.Generator().manual_seed(1))
mask = (torch.arange(70) >= torch.tensor([[5], [0]])).long()
labels = ids.masked_fill(mask == 0, -100)
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def results(model):
    out = model(ids, attention_mask=mask, labels=labels, use_cache=False)
    model.zero_grad()
    out.loss.backward()
    found = {"loss": out.loss}
    if out.logits is not None:
        found["logits"] = out.logits
    return found | {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@torch.no_grad()
def continued(model):
    """Greedily, from the states of the tokens so far."""
    tokens, whole = ids, mask
    out = model(ids, attention_mask=mask, use_cache=True)
    for _ in range(5):
        new = out.logits[:, -1:].argmax(-1)
        tokens, whole = torch.cat([tokens, new], 1), torch.cat([whole, mask[:, -1:]], 1)
        states = out.past_key_values
        out = model(new, attention_mask=whole, past_key_values=states, use_cache=True)
    return tokens


for options in (
    {},
    {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True, "use_short_conv": True},
    {"fuse_cross_entropy": False, "fuse_norm": False, "num_kv_heads": 1},
    {"attn": {"layers": [0], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True}},
    {"attn": [{"layers": [1], "num_heads": 2, "window_size": 9, "rope_theta": 500}]},
):
    torch.manual_seed(0)
    theirs = models.GLAForCausalLM(models.GLAConfig(**SIZES | options)).eval()
    ours = hf.GLAForCausalLM(hf.GLAConfig(**SIZES | options)).eval()
    ours.load_state_dict(theirs.state_dict())
    actual, expected = results(theirs), results(ours)
    for name, value in actual.items():
        assert_close(value, expected[name], 1e-5, name=name)
    options = {"attention_mask": mask, **GREEDY}
    expected = ours.generate(ids, **options)
    assert torch.equal(theirs.generate(ids, **options), expected)
    assert torch.equal(theirs.generate(ids, use_cache=False, **options), expected)
    assert torch.equal(continued(theirs), expected)
    print("agrees")

simple = SimpleGatedLinearAttention(hidden_size=32, num_heads=2, use_short_conv=True)
x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))
y = simple(x, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9]))[0]
assert_close(y[:1, 2:], simple(x[:1, 2:])[0], 1e-5)
assert_close(y[1:], simple(x[1:])[0], 1e-5)
print("padded")

gla_ext.fla.restore_fla()
for owner in (modules.FusedCrossEntropyLoss, modules.FusedLinearCrossEntropyLoss):
    print(owner.forward.__module__.split(".")[0])
print(modules.mlp.swiglu_linear.__module__.split(".")[0])
print("flash_attn again:", vars(layers.attn).get("flash_attn_func", 0) is before)
try:
    theirs(ids)
except RuntimeError as error:
    print("needs a driver again:", "active drivers" in str(error))
'''


@pytest.mark.slow
def test_a_model_of_fla_trains_and_generates_on_a_cpu():
    pytest.importorskip("transformers")
    import_fla()
    if torch.cuda.is_available():
        pytest.skip("FLA's kernels have a driver here")
    output = run_python(MODEL, PYTHONPATH="tests/helpers", TRITON_INTERPRET="0").splitlines()
    assert output == [
        *["agrees"] * 5,
        "padded",
        *["fla"] * 3,
        "flash_attn again: True",
        "needs a driver again: True",
    ]


@pytest.fixture
def accelerated():
    require_kernels("cpu")
    gla_ext.fla.accelerate_fla()
    yield import_fla()
    gla_ext.fla.restore_fla()


def make_logits(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(12, 31, generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(31, (12,), generator=generator)
    target[[2, 7]] = -100
    return logits, target


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"logit_scale": 0.5}, {"lse_square_scale": 0.01}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_on_a_cpu_is_that_of_flas_kernels(accelerated, options, dtype):
    """FLA's module refuses a CPU; the function that it calls is interpreted here."""
    from fla.modules.fused_cross_entropy import cross_entropy_loss

    logits, target = make_logits(dtype)
    expected, expected_z = cross_entropy_loss(logits, target, **options)
    weight = torch.linspace(0.5, 2, 12)
    (gradient,) = torch.autograd.grad(expected @ weight, logits)
    loss = accelerated.modules.FusedCrossEntropyLoss(reduction="none", **options)
    actual = loss(logits, target)
    assert actual.dtype == torch.float32
    assert_close(actual, expected, 1e-5)
    (actual_gradient,) = torch.autograd.grad(actual @ weight, logits)
    assert_close(actual_gradient, gradient, 1e-5 if dtype == torch.float32 else 8e-3)
    loss = accelerated.modules.FusedCrossEntropyLoss(return_z_loss=True, **options)
    for value, terms in zip(loss(logits, target), (expected, expected_z), strict=True):
        assert_close(value, terms.sum() / 10, 1e-5)
    loss = accelerated.modules.FusedCrossEntropyLoss(reduction="sum", **options)
    assert_close(loss(logits, target), expected.sum(), 1e-5)


def test_softcapping(accelerated):
    """Its tanh is one of CUDA's, which Triton does not interpret."""
    logits, target = make_logits()
    capped = accelerated.modules.FusedCrossEntropyLoss(logit_scale=0.5, logit_softcapping=4.0)
    plain = accelerated.modules.FusedCrossEntropyLoss()
    expected = plain(4 * torch.tanh(logits * 0.5 / 4), target)
    assert not torch.isclose(expected, plain(logits, target))
    assert_close(capped(logits, target), expected, 1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear_cross_entropy_on_a_cpu_is_that_of_flas_kernels(accelerated, reduction):
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).requires_grad_()
        for shape in ((2, 6, 8), (31, 8), (31,))
    )
    target = make_logits()[1]
    options = {"reduction": reduction, "use_l2warp": True, "l2_penalty_factor": 0.1}
    expected = fused_linear_cross_entropy_loss(x.flatten(0, 1), target, weight, bias, **options)
    loss = accelerated.modules.FusedLinearCrossEntropyLoss(**options)
    actual = loss(x, target.view(2, 6), weight, bias)
    assert_close(actual, expected, 1e-5)
    inputs = (x, weight, bias)
    gradients = zip(
        torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs), strict=True
    )
    for mine, theirs in gradients:
        assert_close(mine, theirs, 1e-5)


def test_swiglu_is_ours_on_a_cpu(accelerated):
    from fla.modules import activations, mlp

    assert mlp.swiglu is activations.swiglu is not None
    x = torch.randn(3, 8, dtype=torch.float64)
    # In fp64, which FLA's kernel rounds to fp32.
    assert_close(activations.swiglu(x, x + 1), x * logsigmoid(x).exp() * (x + 1), 1e-14)
