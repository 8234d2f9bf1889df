"""docs/models.md: every model of the table, by its own recurrence in fp64."""

import math

import torch
from common import assert_close
from torch.nn.functional import logsigmoid, softplus

from gla_ext import (
    chunk_gla,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
)

B, T, H, K, V = 2, 70, 3, 5, 4


def draw(*last: int):
    generator = torch.Generator().manual_seed(len(last) + sum(last))
    return torch.randn(B, T, H, *last, generator=generator, dtype=torch.float64)


def by_tokens(step, S):
    """Outputs of step(t, S) -> (o, S) of every token, `[B, T, H, V]`."""
    outputs = []
    for t in range(T):
        o, S = step(t, S)
        outputs.append(o)
    return torch.stack(outputs, 1)


def outer(x, y):
    return x.unsqueeze(-1) * y.unsqueeze(-2)


def read(q, S):
    return (q.unsqueeze(-2) @ S).squeeze(-2)


q, k, v = draw(K), draw(K) + 0.1, draw(V)
zeros = torch.zeros(B, H, K, V, dtype=torch.float64)


def test_linear_attention():
    """Katharopoulos et al.: s_i, z_i and their quotient."""
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))

    def step(t, S_z):
        S, z = S_z
        S, z = S + outer(phi_k[:, t], v[:, t]), z + phi_k[:, t]
        o = read(phi_q[:, t], S) / (phi_q[:, t] * z).sum(-1, keepdim=True)
        return o, (S, z)

    expected = by_tokens(step, (zeros, torch.zeros(B, H, K, dtype=torch.float64)))
    assert_close(chunk_linear_attn(phi_q, phi_k, v)[0], expected, 1e-8)


def test_retnet():
    """Sun et al.: S_n = gamma S_{n-1} + K_n^T V_n with gamma = 1 - 2^(-5 - h)."""
    gamma = 1 - torch.exp2(-5 - torch.arange(H, dtype=torch.float64))[:, None, None]

    def step(t, S):
        S = gamma * S + outer(k[:, t], v[:, t])
        return read(q[:, t], S) / math.sqrt(K), S

    assert_close(chunk_retention(q, k, v)[0], by_tokens(step, zeros), 1e-12)


def test_lightning_attention():
    """Qin et al.: lambda = exp(-8 h / H (1 - l / L)), kv_t = lambda kv_{t-1} + k_t v_t^T."""
    layer, layers = 2, 8
    heads = torch.arange(H, dtype=torch.float64)
    decay = torch.exp(-8 * heads / H * (1 - layer / layers))[:, None, None]

    def step(t, S):
        S = decay * S + outer(k[:, t], v[:, t])
        return read(q[:, t], S) / math.sqrt(K), S

    o, _ = chunk_lightning_attn(q, k, v, layer, layers)
    assert_close(o, by_tokens(step, zeros), 1e-12)


def test_gated_retnet():
    """Sun et al., YOCO: gamma = sigmoid(x W)^(1 / tau)."""
    x, tau = draw(), 16
    gamma = torch.sigmoid(x) ** (1 / tau)

    def step(t, S):
        S = gamma[:, t, :, None, None] * S + outer(k[:, t], v[:, t])
        return read(q[:, t], S) / math.sqrt(K), S

    o, _ = chunk_simple_gla(q, k, v, logsigmoid(x) / tau)
    assert_close(o, by_tokens(step, zeros), 1e-12)


def test_mamba_2():
    """Dao and Gu: h_t = exp(dt A) h_{t-1} + dt B x^T, y_t = C^T h_t + D x_t; heads share B, C."""
    x, dt = v, softplus(draw())
    A = -torch.rand(H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    D = torch.arange(H, dtype=torch.float64)[:, None]
    of_one_group = k[:, :, :1], q[:, :, :1]

    def step(t, h):
        Bt, Ct = (s[:, t] for s in of_one_group)
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        h = decay * h + dt[:, t, :, None, None] * outer(Bt, x[:, t])
        return (Ct.unsqueeze(-2) @ h).squeeze(-2) + D * x[:, t], h

    Bs, Cs = (s.expand(-1, -1, H, -1) for s in of_one_group)
    o, _ = chunk_simple_gla(Cs, Bs, dt[..., None] * x, dt * A, scale=1.0)
    assert_close(o + D * x, by_tokens(step, zeros), 1e-12)


def test_mlstm_without_normaliser():
    """Beck et al.: C_t = f C_{t-1} + i v k^T with k over sqrt(d), h = C q."""
    f, i = draw() + 3, draw() / 2

    def step(t, C):
        C = torch.sigmoid(f[:, t])[..., None, None] * C + torch.exp(i[:, t])[
            ..., None, None
        ] * outer(v[:, t], k[:, t] / math.sqrt(K))
        return (C @ q[:, t].unsqueeze(-1)).squeeze(-1), C

    o, _ = chunk_simple_gla(q, k, torch.exp(i)[..., None] * v, logsigmoid(f))
    assert_close(o, by_tokens(step, zeros.mT), 1e-12)


def test_gla():
    """Yang et al.: S_t = diag(alpha_t) S_{t-1} + k_t v_t^T."""
    alpha = torch.sigmoid(draw(K)) ** (1 / 16)

    def step(t, S):
        S = alpha[:, t].unsqueeze(-1) * S + outer(k[:, t], v[:, t])
        return read(q[:, t], S) / math.sqrt(K), S

    assert_close(chunk_gla(q, k, v, alpha.log())[0], by_tokens(step, zeros), 1e-12)


def test_hgrn_2():
    """Qin et al.: S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T, o = S^T q."""
    f = torch.sigmoid(draw(K))

    def step(t, S):
        S = f[:, t].unsqueeze(-1) * S + outer(1 - f[:, t], v[:, t])
        return read(q[:, t], S), S

    o, _ = chunk_gla(q, 1 - f, v, f.log(), scale=1.0)
    assert_close(o, by_tokens(step, zeros), 1e-12)


def test_gate_loop():
    """Katsch, with real gates: S_t = S_{t-1} a_t + k_t v_t^T, a_t of key channels."""
    a = torch.sigmoid(draw(K))

    def step(t, S):
        S = S * a[:, t].unsqueeze(-1) + outer(k[:, t], v[:, t])
        return read(q[:, t], S), S

    assert_close(chunk_gla(q, k, v, a.log(), scale=1.0)[0], by_tokens(step, zeros), 1e-12)
