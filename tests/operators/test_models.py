"""docs/models.md: every model of the table, by its own recurrence in fp64, in every form."""

import math
import re

import pytest
import torch
from common import ROOT, assert_close
from torch.nn.functional import logsigmoid, pad, softplus

from gla_ext import (
    chunk_gla,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
    recurrent_gla_step_,
)
from gla_ext.ops import lightning_decay, retention_decay

B, T, H, K, V = 2, 70, 4, 5, 3
GATED = (chunk_gla, fused_recurrent_gla)
SIMPLE = (chunk_simple_gla, fused_recurrent_simple_gla)


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


def decoded(q, k, v, g=None, scale=None):
    """Token by token, the states in a pool."""
    pool = q.new_zeros(B, H, K, v.shape[-1])
    tokens = (
        recurrent_gla_step_(
            *(None if x is None else x[:, t : t + 1] for x in (q, k, v, g)), state=pool, scale=scale
        )
        for t in range(T)
    )
    return torch.cat(list(tokens), 1)


def assert_every_form(expected, operators, q, k, v, g, scale=None, plus=0):
    """Both operators of the page's call, and decoding, with the same arguments."""
    forms = [operator(q, k, v, g, scale=scale)[0] for operator in operators]
    for o in (*forms, decoded(q, k, v, g, scale)):
        assert_close(o + plus, expected, 1e-12)


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
    o, _ = fused_recurrent_linear_attn(phi_q, phi_k, v, normalize=True)
    assert_close(chunk_linear_attn(phi_q, phi_k, v)[0], expected, 1e-8)
    assert_close(o, expected, 1e-8)
    *o, sums = chunk_gla(phi_q, phi_k, pad(v, (0, 1), value=1.0), None)[0].split([V, 1], -1)
    assert_close(o[0] / sums, expected, 1e-12)
    # Decoded, a column of ones beside v brings the sums that divide.
    *o, sums = decoded(phi_q, phi_k, pad(v, (0, 1), value=1.0)).split([V, 1], -1)
    assert_close(o[0] / sums, expected, 1e-12)


def test_retnet():
    """Sun et al.: S_n = gamma S_{n-1} + K_n^T V_n with gamma = 1 - 2^(-5 - h)."""
    gamma = 1 - torch.exp2(-5 - torch.arange(H, dtype=torch.float64))[:, None, None]

    def step(t, S):
        S = gamma * S + outer(k[:, t], v[:, t])
        return read(q[:, t], S) / math.sqrt(K), S

    expected = by_tokens(step, zeros)
    for operator in (chunk_retention, fused_recurrent_retention):
        assert_close(operator(q, k, v)[0], expected, 1e-12)
    assert_close(decoded(q, k, v, retention_decay(H, q).expand(B, T, H)), expected, 1e-12)


@pytest.mark.parametrize("layer_idx", [-1, 12])
def test_lightning_attention_of_a_layer_that_is_not_there(layer_idx):
    with pytest.raises(ValueError, match=f"layer_idx to be from 0 to 11, .* got {layer_idx}"):
        lightning_decay(4, layer_idx, 12, torch.zeros(1))


def test_lightning_attention():
    """Qin et al.: lambda = exp(-8 h / H (1 - l / L)), kv_t = lambda kv_{t-1} + k_t v_t^T."""
    layer, layers = 2, 8
    heads = torch.arange(H, dtype=torch.float64)
    decay = torch.exp(-8 * heads / H * (1 - layer / layers))[:, None, None]

    def step(t, S):
        S = decay * S + outer(k[:, t], v[:, t])
        return read(q[:, t], S) / math.sqrt(K), S

    expected = by_tokens(step, zeros)
    for operator in (chunk_lightning_attn, fused_recurrent_lightning_attn):
        assert_close(operator(q, k, v, layer, layers)[0], expected, 1e-12)
    g = lightning_decay(H, layer, layers, q).expand(B, T, H)
    assert_close(decoded(q, k, v, g), expected, 1e-12)


def test_gated_retnet():
    """Sun et al., YOCO: gamma = sigmoid(x W)^(1 / tau)."""
    x, tau = draw(), 16
    gamma = torch.sigmoid(x) ** (1 / tau)

    def step(t, S):
        S = gamma[:, t, :, None, None] * S + outer(k[:, t], v[:, t])
        return read(q[:, t], S) / math.sqrt(K), S

    assert_every_form(by_tokens(step, zeros), SIMPLE, q, k, v, logsigmoid(x) / tau)


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba_2(groups):
    """Dao and Gu: h_t = exp(dt A) h_{t-1} + dt B x^T, y_t = C^T h_t + D x_t; the heads of a group
    share B and C.
    """
    x, dt = v, softplus(draw())
    A = -torch.rand(H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    D = torch.arange(H, dtype=torch.float64)[:, None]
    of_groups = k[:, :, :groups], q[:, :, :groups]

    def step(t, h):
        Bt, Ct = (s[:, t, [head * groups // H for head in range(H)]] for s in of_groups)
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        h = decay * h + dt[:, t, :, None, None] * outer(Bt, x[:, t])
        return (Ct.unsqueeze(-2) @ h).squeeze(-2) + D * x[:, t], h

    if groups == 1:
        Bs, Cs = (s.expand(-1, -1, H, -1) for s in of_groups)
    else:
        Bs, Cs = (s.repeat_interleave(H // groups, 2) for s in of_groups)
    values, expected = dt[..., None] * x, by_tokens(step, zeros)
    assert_every_form(expected, SIMPLE, Cs, Bs, values, dt * A, scale=1.0, plus=D * x)


def test_mlstm_without_normaliser():
    """Beck et al.: C_t = f C_{t-1} + i v k^T with k over sqrt(d), h = C q."""
    f, i = draw() + 3, draw() / 2

    def step(t, C):
        C = torch.sigmoid(f[:, t])[..., None, None] * C + torch.exp(i[:, t])[
            ..., None, None
        ] * outer(v[:, t], k[:, t] / math.sqrt(K))
        return (C @ q[:, t].unsqueeze(-1)).squeeze(-1), C

    values = torch.exp(i)[..., None] * v
    assert_every_form(by_tokens(step, zeros.mT), SIMPLE, q, k, values, logsigmoid(f))


def test_gla():
    """Yang et al.: S_t = diag(alpha_t) S_{t-1} + k_t v_t^T."""
    alpha = torch.sigmoid(draw(K)) ** (1 / 16)

    def step(t, S):
        S = alpha[:, t].unsqueeze(-1) * S + outer(k[:, t], v[:, t])
        return read(q[:, t], S) / math.sqrt(K), S

    assert_every_form(by_tokens(step, zeros), GATED, q, k, v, alpha.log())


def test_hgrn_2():
    """Qin et al.: S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T, o = S^T q."""
    f = torch.sigmoid(draw(K))

    def step(t, S):
        S = f[:, t].unsqueeze(-1) * S + outer(1 - f[:, t], v[:, t])
        return read(q[:, t], S), S

    assert_every_form(by_tokens(step, zeros), GATED, q, 1 - f, v, f.log(), scale=1.0)


def test_gate_loop():
    """Katsch, with real gates: S_t = S_{t-1} a_t + k_t v_t^T, a_t of key channels."""
    a = torch.sigmoid(draw(K))

    def step(t, S):
        S = S * a[:, t].unsqueeze(-1) + outer(k[:, t], v[:, t])
        return read(q[:, t], S), S

    assert_every_form(by_tokens(step, zeros), GATED, q, k, v, a.log(), scale=1.0)


def test_every_row_of_the_page_has_a_test():
    tests = {
        "linear attention": test_linear_attention,
        "RetNet": test_retnet,
        "TransNormerLLM, Lightning attention": test_lightning_attention,
        "gated RetNet": test_gated_retnet,
        "Mamba-2": test_mamba_2,
        "mLSTM without its normaliser": test_mlstm_without_normaliser,
        "GLA": test_gla,
        "HGRN-2": test_hgrn_2,
        "GateLoop with real gates": test_gate_loop,
    }
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| ([^|(]+) \(", page, re.MULTILINE) == list(tests)
