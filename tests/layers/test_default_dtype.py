"""Results do not depend on `torch.set_default_dtype`, nor on `torch.set_default_device`.

Equal bits (see common.py): the same calls.
"""

import contextlib
import copy

import pytest
import torch
from models import EVERY, make_ids, make_layer, make_model, make_x

from gla_ext import chunk_gla, fused_recurrent_gla, selftest
from gla_ext.cache import GLACache
from gla_ext.decode import Decoder
from gla_ext.decode.sampling import sample
from gla_ext.layers.gate_projection import gate_projection
from gla_ext.layers.norms import rms_norm, rms_norm_residual
from gla_ext.layers.swiglu import swiglu
from gla_ext.losses import fused_linear_cross_entropy_loss
from gla_ext.model import next_token_loss
from gla_ext.train.data import Batches
from gla_ext.train.trainer import Settings, Trainer

OTHERS = (torch.float16, torch.bfloat16, torch.float64)


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_same_under_every_default(results):
    """The tensors that a call returns, bit for bit and of one dtype."""
    expected = results()
    for dtype in OTHERS:
        with default(dtype):
            actual = results()
        assert len(actual) == len(expected) > 0
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def generator():
    return torch.Generator("cpu").manual_seed(3)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator(), dtype=torch.float32).to(dtype)


def loss_and_gradient(dtype, T, offsets=None):
    leaf, labels = draw(1, T, 7, dtype=dtype).requires_grad_(), torch.arange(T)[None] % 7
    labels[0, 4] = -100
    loss = next_token_loss(leaf, labels, cu_seqlens=offsets)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def other_losses(dtype):
    leaves = [draw(n, 8, dtype=dtype).requires_grad_() for n in (64, 7)]
    labels = torch.arange(64) % 7
    loss = fused_linear_cross_entropy_loss(leaves[0], labels, leaves[1])
    by_torch = next_token_loss(draw(1, 64, 8, dtype=dtype), labels[None], fuse_cross_entropy=False)
    return loss.detach(), by_torch, *torch.autograd.grad(loss, leaves)


def modules(dtype):
    x = draw(64, 16, dtype=dtype)
    yield gate_projection(x, x[:7], clamp_min=-0.1)
    yield from rms_norm_residual(x, draw(64, 16))
    yield rms_norm(x, draw(16), gate=x)
    yield swiglu(x, x)


def recurrences(operator):
    q, k, v, g = (draw(1, 70, 2, 8) for _ in range(4))
    return operator(q, k, v, -g.abs(), output_final_state=True)


def selftest_inputs():
    case = next(case for case in selftest.CASES if case.resets)
    tensors, upstream, _ = selftest._inputs(case, torch.float32)
    return *tensors, *upstream


SHORT = (torch.float32, torch.bfloat16)
CALLS = [(loss_and_gradient, dtype, T) for dtype in (*SHORT, torch.float64) for T in (9, 16384)]
CALLS += [(loss_and_gradient, dtype, 9, torch.tensor([0, 5, 9])) for dtype in SHORT]
CALLS += [(call, dtype) for call in (other_losses, modules) for dtype in SHORT]
CALLS += [(recurrences, operator) for operator in (chunk_gla, fused_recurrent_gla)]
CALLS += [(selftest_inputs,)]
CALLS += [
    (lambda **options: [sample(draw(500, 31), generator=generator(), **options)], options)
    for options in ({}, {"top_k": 5}, {"top_p": 0.8})
]


def name_of(call):
    return " ".join(getattr(x, "__name__", str(x)) for x in call)


@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_losses_operators_and_draws(call):
    function, *arguments = call
    options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    assert_same_under_every_default(lambda: list(function(*arguments, **options)))


@pytest.mark.parametrize("options", [{"temperature": 9.0}, {"top_k": 5}, {"top_p": 0.8}])
def test_what_is_generated(options):
    model, ids = make_model(), make_ids(B=3, T=5)

    def results():
        net = copy.deepcopy(model)  # which has no buffers of an earlier call
        decoder = Decoder(net, 3, generator=generator(), **options)
        assert decoder._loop.noise.dtype == decoder._loop.temperature.dtype == torch.float32
        steps = [decoder.prefill(ids).clone(), *(decoder.step().clone() for _ in range(12))]
        return [net.generate(ids, 12, generator=generator(), **options), torch.stack(steps)]

    assert_same_under_every_default(results)


@pytest.mark.parametrize("options", [{}, EVERY], ids=["default", "every"])
@pytest.mark.parametrize("T", [1, 70])
def test_a_layer_and_its_states(options, T):
    layer = make_layer(torch.float32, layer_idx=0, **options).eval()
    x = make_x(T=T, dtype=torch.float32)
    mask = torch.ones(2, T, dtype=torch.int64)
    mask[0, : T // 3] = 0

    def results():
        cache = GLACache()
        with torch.no_grad():
            first = layer(x, past_key_values=cache, use_cache=True)[0]
            second = layer(x[:, :1], past_key_values=cache, use_cache=True)[0]
            masked = layer(x, attention_mask=mask)[0]
        states = [cache[0]["recurrent_state"], *(cache[0]["conv_state"] or ())]
        assert states[0].dtype == torch.float32
        leaf = x.clone().requires_grad_()
        layer(leaf)[0].square().sum().backward()
        return [first, second, masked, leaf.grad, *states]

    assert_same_under_every_default(results)


def test_training_and_its_evaluation(corpus):
    settings = Settings(steps=2, batch_size=2, seq_len=32, hidden_size=16, layers=1, heads=2)
    trainer = Trainer(settings, corpus, torch.device("cpu"))
    assert_same_under_every_default(lambda: [torch.tensor(trainer.evaluate(), dtype=torch.float64)])
    for dtype in OTHERS:
        with default(dtype):
            other = Trainer(settings, corpus, torch.device("cpu"))
            assert other.losses.dtype == torch.float32


def test_what_is_drawn_on_the_host_stays_there():
    """Under another default device; meta is there without a GPU."""
    stream, net, ids = torch.arange(200, dtype=torch.uint8), make_model(), make_ids(B=2, T=5)
    packed = next(case for case in selftest.CASES if case.lengths)

    def drawn():
        tensors, _, offsets = selftest._inputs(packed, torch.float32)
        yield from Batches(stream, 2, 8, seed=1)(3)
        yield from (*tensors, offsets)
        yield from net.generate_stream(ids, 4, temperature=0, eos_token_id=0)

    expected = list(drawn())
    torch.set_default_device("meta")
    try:
        found = list(drawn())
    finally:
        torch.set_default_device(None)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
