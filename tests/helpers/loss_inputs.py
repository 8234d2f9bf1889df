"""Inputs of cross entropy, and the truth."""

import torch
from norm_inputs import normal


def exact(
    logits,
    target,
    label_smoothing=0.0,
    logit_scale=1.0,
    lse_square_scale=0.0,
    logit_softcapping=None,
    ignore_index=-100,
):
    """By the definitions."""
    s = logits * logit_scale
    if logit_softcapping is not None:
        s = logit_softcapping * (s / logit_softcapping).tanh()
    lse = s.exp().sum(-1).log()
    counts = target != ignore_index
    of_label = s.gather(1, target.where(counts, 0).long()[:, None])[:, 0]
    loss = lse - (1 - label_smoothing) * of_label - label_smoothing * s.mean(-1)
    z_loss = lse_square_scale * lse.square()
    return (loss + z_loss).where(counts, 0), z_loss.where(counts, 0)


def make(N, V, device, dtype, layout="contiguous"):
    logits = 3 * normal(N, V, seed=1, device=device, dtype=dtype)
    if layout == "a part of wider rows":
        logits = torch.cat([logits, logits], 1)[:, 3 : V + 3]
    if layout == "transposed":
        logits = logits.T.contiguous().T
    target = torch.randint(V, (N,), generator=torch.Generator().manual_seed(2)).to(device)
    target[N // 2] = -100
    return (
        logits,
        target,
        normal(N, seed=3, device=device).to(torch.promote_types(dtype, torch.float32)),
    )


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-9)).item()


def linear_inputs(N, device, dtype, biased=True):
    x = normal(N, 16, seed=1, device=device, dtype=dtype)
    weight = normal(72, 16, seed=2, device=device, dtype=dtype)
    bias = normal(72, seed=3, device=device, dtype=dtype) if biased else None
    return [x, weight, bias], make(N, 72, device, dtype)[1]
