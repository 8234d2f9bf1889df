"""The baselines that are not ours, against their definitions: Hyena, Mamba, RWKV-4."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from experiment_runs import RECALL, RUN

from experiments import borrowed
from experiments.hyena import Hyena, long_convolution
from experiments.language import LanguageTrainer
from experiments.layers import WithoutMLP
from experiments.models import make_model
from experiments.recall import RecallTrainer
from gla_ext.model import count_parameters
from gla_ext.model.config import GLAConfig
from gla_ext.train.data import Corpus
from gla_ext.train.trainer import Trainer

B, T, D = 2, 37, 6
CPU = torch.device("cpu")
CORPUS = Corpus("words", (("a", b"some words of text\n" * 50),), (("b", b"more words\n" * 9),))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_hyena_is_its_definition():
    layer, x = Hyena(D, seq_len=20).double(), torch.randn(B, T, D, dtype=torch.double)
    u = x @ layer.in_proj.weight.T + layer.in_proj.bias
    short = torch.stack(
        [
            sum(layer.taps[2 - i] * u[:, t - i] for i in range(3) if t >= i) + layer.taps_bias
            for t in range(T)
        ],
        1,
    )
    q, k, v = short.chunk(3, -1)
    h, kv = layer.filter(T), k * v
    y = torch.stack([sum(h[i] * kv[:, t - i] for i in range(t + 1)) for t in range(T)], 1)
    wanted = (q * (y + layer.skip * kv)) @ layer.out_proj.weight.T + layer.out_proj.bias
    torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-10, atol=1e-10)


def test_hyenas_filter_is_a_network_of_the_time_in_a_window():
    layer = Hyena(D, seq_len=20).filter.double()
    time = torch.arange(50, dtype=torch.double) / 20
    turn = 2 * torch.pi * time
    h = torch.stack([time, torch.ones(50), turn.cos(), torch.zeros(50), turn.sin()], -1)
    for linear in layer.maps:
        h = (layer.frequency * (h @ linear.weight.T + linear.bias)).sin()
    # The slowest window is 1e-2 after one and a half lengths, the fastest after 0.3 of one.
    window = 1e-2 ** (time[:, None] * torch.linspace(1 / 1.5, 1 / 0.3, D))
    torch.testing.assert_close(layer(50), (h @ layer.out.weight.T) * window, rtol=1e-5, atol=1e-7)
    layer.reset_parameters()
    assert layer(20).abs().max() > 0.1  # of weights of std 0.02 it would be 1e-4


def test_a_long_convolution_does_not_come_round():
    u, h = torch.zeros(1, 8, 1), torch.zeros(8, 1)
    u[0, 6], h[5] = 1.0, 1.0
    torch.testing.assert_close(long_convolution(u, h), torch.zeros(1, 8, 1))
    h[1] = 2.0
    torch.testing.assert_close(long_convolution(u, h)[0, 7], torch.tensor([2.0]))


def recurrence(time_decay, time_first, k, v):
    """RWKV-4's, token by token, without anything against large exponents."""
    a, b, parts = 0, 0, []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        own = (time_first + k_t).exp()
        parts.append((a + own * v_t) / (b + own))
        kept = (-time_decay.exp()).exp()
        a, b = kept * a + k_t.exp() * v_t, kept * b + k_t.exp()
    return torch.stack(parts, 1)


@pytest.mark.parametrize("length", [2, 64, 65, 150])
def test_wkv_is_its_recurrence(length):
    """Also with keys whose weights are far apart, in gradients, and beside transformers' loop."""
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    k, v = torch.randn(2, B, length, D, dtype=torch.double)
    first = torch.randn(D, dtype=torch.double)
    inputs = [torch.linspace(-3, 1, D, dtype=torch.double), first, 8 * k, v]
    inputs = [x.requires_grad_() for x in inputs]
    wanted, got = recurrence(*inputs), borrowed.wkv(*inputs)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(got)
    gradients = [torch.autograd.grad((o * weight).sum(), inputs) for o in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)
    single = [x.detach().float() for x in inputs]
    theirs, ours = (f(*single)[0] for f in (rwkv_linear_attention_cpu, borrowed.wkv))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="expected no state"):
        borrowed.wkv(*inputs, return_state=True)


def test_wkv_stays_finite():
    k = torch.zeros(1, 70, 2)
    k[:, 30], k[:, 66] = 300.0, -300.0
    inputs = [torch.zeros(2), torch.zeros(2), k, torch.ones(1, 70, 2)]
    o = borrowed.wkv(*(x.requires_grad_() for x in inputs))[0]
    torch.testing.assert_close(o, torch.ones(1, 70, 2))
    for gradient in torch.autograd.grad(o.sum(), inputs):
        assert gradient.isfinite().all()


def test_mamba_is_its_recurrence():
    model = borrowed.Borrowed("mamba", 16, 1, 11, T).eval()
    layer, x = model.model.layers[0].mixer, torch.randn(B, T, 16)
    u, z = (x @ layer.in_proj.weight.T).chunk(2, -1)
    u = F.silu(F.conv1d(F.pad(u.mT, (3, 0)), layer.conv1d.weight, layer.conv1d.bias, groups=32).mT)
    rank, N = layer.time_step_rank, layer.ssm_state_size
    low, b, c = (u @ layer.x_proj.weight.T).split([rank, N, N], -1)
    step = F.softplus(low @ layer.dt_proj.weight.T + layer.dt_proj.bias)  # [B, T, 32]
    state, parts = torch.zeros(B, 32, N), []
    for t in range(T):
        decay = torch.exp(-layer.A_log.exp() * step[:, t, :, None])
        state = decay * state + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
        parts.append((state * c[:, t, None]).sum(-1))
    y = (torch.stack(parts, 1) + layer.D * u) * F.silu(z)
    torch.testing.assert_close(layer(x), y @ layer.out_proj.weight.T, rtol=1e-4, atol=1e-5)


NAMES = ("hyena", *borrowed.NAMES)


@pytest.mark.parametrize("layer", NAMES)
def test_baselines_in_recall_and_on_text(layer):
    """Both train: a batch seen again and again is learned."""
    sizes = {"layer": layer, "steps": 12, "examples": 2, "layers": 2}
    recall = RecallTrainer(replace(RECALL, **sizes), CPU)
    text = LanguageTrainer(replace(RUN, **sizes | {"examples": 0}), CORPUS, CPU)
    for trainer in (recall, text):
        for _ in range(12):
            trainer.update()
        assert trainer.losses[-1] < trainer.losses[0] - 0.05
    assert 0 <= recall.evaluate() <= 1
    assert 0 < text.score(text.bits_by_position()) < 9


@torch._dynamo.config.patch(recompile_limit=2)
def test_a_process_compiles_more_shapes_than_torch_keeps_by_default(monkeypatch):
    """With the compiler's front alone, and without the CUDA graph that goes with it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    init = Trainer.__init__
    monkeypatch.setattr(Trainer, "__init__", lambda *args: init(*args[:-1]))
    torch._dynamo.reset()
    for width in (8, 16, 24, 32):
        run = replace(RECALL, layer="hyena", width=width)
        RecallTrainer(run, CPU, cuda_graph=True).update()
    torch._dynamo.reset()


@pytest.mark.parametrize("layer", NAMES)
def test_a_baseline_sees_no_later_token(layer):
    if layer == "hyena":
        model = make_model(layer, GLAConfig(hidden_size=16, num_hidden_layers=2, vocab_size=11))
    else:
        model = borrowed.language_model(layer, 16, 2, 11, T)
    ids = torch.randint(11, (1, T))
    other = ids.clone()
    other[0, 20] = (ids[0, 20] + 1) % 11
    first, second = (model.eval()(x).logits for x in (ids, other))
    torch.testing.assert_close(first[:, :20], second[:, :20], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(first[:, 20:], second[:, 20:], rtol=1e-4, atol=1e-5)


def test_baselines_have_about_as_many_parameters():
    """Without embeddings, which are alike."""
    ours = GLAConfig(hidden_size=512, num_hidden_layers=4, num_heads=4, vocab_size=8)
    with torch.device("meta"):
        sizes = [count_parameters(make_model(layer, ours)) for layer in ("gla", "hyena")]
        sizes += [count_parameters(borrowed.language_model(n, 512, 4, 8, 64)) for n in NAMES[1:]]
        without = make_model("hyena", ours, mlp=False)
    assert max(sizes) < 1.06 * min(sizes)
    assert isinstance(without.model.layers[0], WithoutMLP)
