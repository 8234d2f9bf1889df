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


@pytest.mark.parametrize("T", [9, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_and_its_gradient(T, dtype, packed):
    logits = torch.randn(1, T, 7, generator=generator()).to(dtype)
    labels = torch.randint(7, (1, T), generator=generator())
    labels[0, 4] = -100
    offsets = torch.tensor([0, 5, T]) if packed else None

    def results():
        leaf = logits.clone().requires_grad_()
        loss = next_token_loss(leaf, labels, cu_seqlens=offsets)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    assert_same_under_every_default(results)
    assert results()[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_other_losses_and_the_gate(dtype):
    x, h = (torch.randn(64, D, generator=generator()).to(dtype) for D in (8, 16))
    weight, up = (torch.randn(7, D, generator=generator()).to(dtype) for D in (8, 16))
    labels = torch.randint(7, (64,), generator=generator())
    residual = x.float()

    def results():
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        loss = fused_linear_cross_entropy_loss(leaves[0], labels, leaves[1])
        torch_loss = next_token_loss(x[None], labels[None], fuse_cross_entropy=False)
        gate, stream = gate_projection(h, up, clamp_min=-0.1), rms_norm_residual(x, residual)
        return [loss.detach(), torch_loss, *torch.autograd.grad(loss, leaves), gate, *stream]

    assert_same_under_every_default(results)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8}])
def test_what_is_drawn(options):
    logits = torch.randn(500, 31, generator=generator())
    assert_same_under_every_default(lambda: [sample(logits, generator=generator(), **options)])


@pytest.mark.parametrize("options", [{"temperature": 9.0}, {"top_k": 5}, {"top_p": 0.8}])
def test_what_is_generated(options):
    model, ids = make_model(), make_ids(B=3, T=5)

    def results():
        net = copy.deepcopy(model)  # which has no buffers of an earlier call
        decoder = Decoder(net, 3, generator=generator(), **options)
        assert decoder._loop.noise.dtype == decoder._loop.temperature.dtype == torch.float32
        steps = [decoder.prefill(ids).clone(), *(decoder.step().clone() for _ in range(60))]
        return [net.generate(ids, 60, generator=generator(), **options), torch.stack(steps)]

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


def test_operators():
    q, k, v, g = (torch.randn(1, 70, 2, 8, generator=generator()) for _ in range(4))
    g = -g.abs()
    weight = torch.ones(8, dtype=torch.float32)

    def results():
        return [
            *chunk_gla(q, k, v, g, output_final_state=True),
            *fused_recurrent_gla(q, k, v, g, output_final_state=True),
            rms_norm(q, weight, gate=k),
            rms_norm(q.bfloat16(), weight, gate=k.bfloat16()),
            swiglu(q, k),
        ]

    assert_same_under_every_default(results)


def test_training_and_its_evaluation(corpus):
    settings = Settings(steps=2, batch_size=2, seq_len=32, hidden_size=16, layers=1, heads=2)
    trainer = Trainer(settings, corpus, torch.device("cpu"))
    assert_same_under_every_default(lambda: [torch.tensor(trainer.evaluate(), dtype=torch.float64)])
    for dtype in OTHERS:
        with default(dtype):
            other = Trainer(settings, corpus, torch.device("cpu"))
            assert other.losses.dtype == torch.float32


def test_the_selftest_has_the_same_inputs():
    case = next(case for case in selftest.CASES if case.resets)

    def inputs():
        tensors, upstream, _ = selftest._inputs(case, torch.float32)
        return [*tensors, *upstream]

    assert_same_under_every_default(inputs)


def test_what_is_drawn_on_the_host_stays_there():
    """Under another default device; meta is there without a GPU."""
    stream = torch.arange(200, dtype=torch.uint8)
    expected = Batches(stream, 2, 8, seed=1)(3)
    packed = next(case for case in selftest.CASES if case.lengths)
    net, ids = make_model(), make_ids(B=2, T=5)
    tokens = list(net.generate_stream(ids, 4, temperature=0, eos_token_id=0))
    before = selftest._inputs(packed, torch.float32)
    torch.set_default_device("meta")
    try:
        batch = Batches(stream, 2, 8, seed=1)(3)
        inputs = selftest._inputs(packed, torch.float32)
        streamed = list(net.generate_stream(ids, 4, temperature=0, eos_token_id=0))
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs[0], before[0], strict=True))
    assert torch.equal(inputs[2], before[2])
    assert all(torch.equal(a, b) for a, b in zip(streamed, tokens, strict=True))
