"""MultiheadGLA in the place of nn.MultiheadAttention.

Equal bits (see common.py): the same calls.
"""

import pytest
import torch
from common import assert_close
from torch import nn

from gla_ext import MultiheadGLA

B, T, E, H = 3, 70, 32, 4


def make(**options) -> MultiheadGLA:
    torch.manual_seed(0)
    module = MultiheadGLA(E, H, **{"batch_first": True, "dtype": torch.float64} | options)
    if module.bias is not None:
        nn.init.normal_(module.bias)
    return module


def make_x(*shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*(shape or (B, T, E)), generator=generator, dtype=torch.float64)


def attend(module, x, **options):
    out, weights = module(x, x, x, **{"is_causal": True} | options)
    assert weights is None
    return out


def padding(dtype=torch.bool) -> torch.Tensor:
    """Row 0 whole, row 1 padded behind, row 2 in front and behind."""
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[1, 40:] = mask[2, :7] = mask[2, 60:] = True
    if dtype == torch.bool:
        return mask
    return torch.zeros(B, T, dtype=dtype).masked_fill(mask, -torch.inf)


def causal_mask() -> torch.Tensor:
    """bool, as `padding`: torch's encoder warns of two kinds of masks."""
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def encoder_layer(**options) -> nn.TransformerEncoderLayer:
    torch.manual_seed(2)
    options = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64} | options
    layer = nn.TransformerEncoderLayer(E, H, 2 * E, **options)
    layer.self_attn = make(batch_first=options["batch_first"])
    return layer


def test_is_the_layer_plus_a_bias():
    module, x = make(), make_x()
    assert_close(attend(module, x), module.attention(x)[0] + module.bias, 1e-14)
    without = make(bias=False)
    assert torch.equal(attend(without, x), without.attention(x)[0])
    options = make(expand_k=1.0, gate_logit_normalizer=4).attention
    assert (options.key_dim, options.gate_logit_normalizer) == (E, 4)


@pytest.mark.parametrize("mask", [None, padding()], ids=["whole", "padded"])
@pytest.mark.parametrize("bias", [True, False])
def test_dtype_under_autocast_is_that_of_torch(bias, mask):
    module, x = make(bias=bias, dtype=torch.float32), make_x().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(module, x, key_padding_mask=mask)
        assert out.dtype == nn.MultiheadAttention(E, H)(x, x, x)[0].dtype == torch.bfloat16


def test_layouts():
    x = make_x()
    expected = attend(make(), x)
    assert torch.equal(attend(make(batch_first=False), x.transpose(0, 1)).transpose(0, 1), expected)
    for batch_first in (True, False):
        assert_close(attend(make(batch_first=batch_first), x[1]), expected[1], 1e-12)


def test_is_causal():
    module, x = make(), make_x()
    changed = x.clone()
    changed[:, 50:] += 1
    assert torch.equal(attend(module, changed)[:, :50], attend(module, x)[:, :50])
    assert not torch.equal(attend(module, changed)[:, 50:], attend(module, x)[:, 50:])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64], ids=str)
def test_padding_is_skipped(dtype):
    module, x = make(), make_x().requires_grad_()
    mask = padding()
    out = attend(module, x, key_padding_mask=padding(dtype), attn_mask=causal_mask())
    assert not out[mask].any()
    for row, (start, end) in enumerate([(0, T), (0, 40), (7, 60)]):
        assert_close(out[row, start:end], attend(module, x[row : row + 1, start:end])[0], 1e-12)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert not gradient[mask].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_numbers_are_padding_too(dtype):
    module, x = make(), make_x()
    expected = attend(module, x, key_padding_mask=padding())
    assert_close(attend(module, x[2], key_padding_mask=padding()[2]), expected[2], 1e-12)
    for value in (-1e4, -1e9, torch.finfo(dtype).min):
        mask = torch.zeros(B, T, dtype=dtype).masked_fill(padding(), value)
        assert torch.equal(attend(module, x, key_padding_mask=mask), expected)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_inside_an_encoder_layer(norm_first, batch_first):
    layer = encoder_layer(norm_first=norm_first, batch_first=batch_first)
    x = make_x() if batch_first else make_x().transpose(0, 1)
    options = {
        "src_mask": causal_mask(),
        "is_causal": True,
        "src_key_padding_mask": padding(),
    }
    expected = layer.train()(x, **options)
    for mode in (layer.train, layer.eval):
        mode()  # close, not equal: a BLAS may take another way where a tensor starts elsewhere
        assert_close(layer(x, **options), expected, 1e-12)
        with torch.no_grad():
            assert_close(layer(x, **options), expected, 1e-12)
    calls = []
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        layer(x, **options)
    assert calls  # no fused kernel of torch's has taken its place


def test_inside_an_encoder():
    """Which warns that it does not nest, and finds the causal mask."""
    with pytest.warns(UserWarning, match="use_nested_tensor is False"):
        encoder = nn.TransformerEncoder(encoder_layer(), 2)
    assert encoder.layers[0].self_attn is not encoder.layers[1].self_attn
    x, options = make_x(), {"is_causal": True, "src_key_padding_mask": padding()}
    expected = encoder(x, mask=causal_mask(), **options)
    encoder.eval()
    for mask in (causal_mask(), None):
        with torch.no_grad():
            assert_close(encoder(x, mask=mask, **options), expected, 1e-12)
    loss = encoder.train()(x, mask=causal_mask(), **options).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())
    mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    assert torch.equal(encoder(x, mask=mask), encoder(x, mask=mask, is_causal=True))


def test_compiles_whole():
    layer, x = encoder_layer(), make_x()
    options = {"is_causal": True, "src_key_padding_mask": padding(), "src_mask": causal_mask()}
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, **options), layer(x, **options), 1e-12)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dropout": 0.1}, "dropout to be 0, got 0.1"),
        ({"add_bias_kv": True}, "add_bias_kv to be False, got True"),
        ({"add_zero_attn": True}, "add_zero_attn to be False, got True"),
        ({"kdim": 16}, "kdim to be embed_dim = 32, got 16"),
        ({"vdim": 16}, "vdim to be embed_dim = 32, got 16"),
    ],
)
def test_options_without_meaning(options, message):
    with pytest.raises(NotImplementedError, match=message):
        MultiheadGLA(E, H, **options)


def padded_by(value):
    mask = padding(torch.float64)
    mask[0, 3] = value
    return {"key_padding_mask": mask}


CALLS = [
    ({"is_causal": False}, NotImplementedError, "is_causal=True, got False"),
    ({"need_weights": True}, NotImplementedError, "need_weights=False, got True"),
    ({"attn_mask": torch.zeros(T, T + 1)}, ValueError, r"\[70, 70\], got shape \[70, 71\]"),
    ({"attn_mask": torch.zeros(B * H, T, T)}, ValueError, r"got shape \[12, 70, 70\]"),
    ({"key_padding_mask": torch.zeros(B, 5)}, ValueError, r"\[3, 70\], got \[3, 5\]"),
    ({"key_padding_mask": padding().long()}, ValueError, "bool or floating, got torch.int64"),
]
CALLS += [
    (padded_by(value), ValueError, f"0 at tokens and -inf or at most -1000 .* got {value:g}")
    for value in (1.0, -999.0, torch.inf, torch.nan)
]


@pytest.mark.parametrize(("options", "error", "message"), CALLS)
def test_calls_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        attend(make(), make_x(), **options)


def test_the_default_and_wrong_ranks_are_refused():
    x = make_x(T)
    with pytest.raises(ValueError, match=r"2 or 3 dimensions, got shape \[70\]"):
        make()(x, x, x, is_causal=True)
    x = make_x()
    with pytest.raises(NotImplementedError, match="is_causal=True"):
        make()(x, x, x)


def test_views_of_one_tensor_are_one():
    module, x = make(), make_x().requires_grad_()
    expected = attend(module, x)
    assert torch.equal(module(x, x.view_as(x), x[:], is_causal=True)[0], expected)
    (dx,) = torch.autograd.grad(expected.sum(), x)
    (found,) = torch.autograd.grad(module(x, x[:], x.view_as(x), is_causal=True)[0].sum(), x)
    assert torch.equal(found, dx)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x[:, 1:],
        lambda x: x.flip(0),
        lambda x: x.transpose(0, 1).reshape(x.shape),
        lambda x: x.view(torch.int64),
        lambda x: x.detach(),
        lambda x: x.to("meta"),
        lambda x: None,
        lambda x: x.clone(),
        lambda x: torch.cat([x, x])[B:],
        lambda x: x.as_strided(x.shape, x.stride(), x.stride(0)),
    ],
)
def test_other_tensors_are_not_one(other):
    x = make_x(B + 1, T, E)[:B].requires_grad_()
    for key, value in ((other(x), x), (x, other(x))):
        with pytest.raises(NotImplementedError, match="build the module with self_attention=True"):
            make()(x, key, value, is_causal=True)


def test_a_promise_of_self_attention():
    module, x = make(self_attention=True), make_x()
    expected = attend(make(), x)
    assert torch.equal(module(x, x.clone(), torch.zeros_like(x), is_causal=True)[0], expected)
    with pytest.raises(NotImplementedError, match="cross attention"):
        module(x, x[:, :5], x[:, :5], is_causal=True)  # the memory of an encoder
    layer = encoder_layer()
    expected = layer(x, is_causal=True, src_mask=causal_mask())
    layer.self_attn.register_forward_pre_hook(lambda _, args: tuple(arg.clone() for arg in args))
    with pytest.raises(NotImplementedError, match="self_attention=True"):
        layer(x, is_causal=True, src_mask=causal_mask())
    layer.self_attn.self_attention = True
    assert torch.equal(layer(x, is_causal=True, src_mask=causal_mask()), expected)


def test_mixed_precision_of_fsdp_casts_query_alone(one_rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    x, layer = make_x().float(), encoder_layer().float()
    module = fully_shard(layer.self_attn, mesh=one_rank, mp_policy=policy)
    layer(x, is_causal=True, src_mask=causal_mask()).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    for others in ((x, x.clone()), (x.clone(), x)):
        with pytest.raises(NotImplementedError, match="cross attention is not supported"):
            module(x, *others, is_causal=True)


def test_a_promise_compiles_whole():
    x = make_x()
    for self_attention in (True, False):
        torch._dynamo.reset()
        module = make(self_attention=self_attention)
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert_close(compiled(x, x, x, is_causal=True)[0], attend(module, x), 1e-12)
        if self_attention:
            assert_close(compiled(x, x[:], x[:], is_causal=True)[0], attend(module, x), 1e-12)
        else:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="self_attention=True"):
                compiled(x, x[:], x[:], is_causal=True)
