"""FLA's options of a model beside its layers: attention residuals, the term that pulls logits, and
what `fuse_swiglu` means.

Equal bits (see common.py): tokens, and the same calls.
"""

import pytest
import torch
from common import assert_close
from models import make_ids, make_model

from gla_ext.model import GLAConfig

SIZES = (1, 2, 4, 8)


def make_residual(size, num_hidden_layers=4, **options):
    model = make_model(num_hidden_layers=num_hidden_layers, attnres_block_size=size, **options)
    for name, parameter in model.named_parameters():
        if "res_" in name:
            torch.nn.init.normal_(parameter)
    return model


def composed(model, ids):
    """The model by the paper's equations, with the list of all layers' outputs."""
    core, size = model.model, model.config.attnres_block_size
    embedding = core.embeddings(ids)
    outputs = []  # of every layer, attention and MLP in turn

    def normed(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt() * weight

    def mix(query, key_norm, output_norm):
        """Of the embedding and of sums of layers; the first layer counts as a sum of its own
        boundary, so that sums are of the layers 0 to size - 1, and so on."""
        sums = [torch.stack(outputs[i : i + size]).sum(0) for i in range(0, len(outputs), size)]
        values = torch.stack([embedding, *sums])
        scores = normed(values, key_norm.weight) @ query.weight[0]
        return normed((scores.softmax(0).unsqueeze(-1) * values).sum(0), output_norm.weight)

    for n, block in enumerate(core.layers):
        if n == 0:
            x = normed(embedding, block.attn_norm.weight)
        else:
            x = mix(block.attn_res_proj, block.attn_res_norm, block.attn_norm)
        outputs.append(block.attn(x)[0])
        x = mix(block.mlp_res_proj, block.mlp_res_norm, block.mlp_norm)
        outputs.append(block.mlp(x))
    return model.lm_head(mix(core.res_proj, core.res_norm, core.norm))


@pytest.mark.parametrize("size", SIZES)
def test_attention_residuals(size):
    model, ids = make_residual(size, dtype=torch.float64).train(), make_ids(T=20)
    results = []
    for recompute in (None, False, True):
        model.zero_grad()
        model.model.gradient_checkpointing = bool(recompute)
        logits = composed(model, ids) if recompute is None else model(ids).logits
        logits.square().mean().backward()
        gradients = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
        results.append({"logits": logits} | gradients)
    expected, *found = results
    assert "model.layers.0.attn_res_proj.weight" not in expected
    for actual in found:
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(actual[name], value, 1e-11, name=name)


def test_queries_are_0_at_first_and_saved(tmp_path):
    model = make_model(attnres_block_size=2)
    queries = {n: x for n, x in model.named_parameters() if "res_proj" in n}
    assert len(queries) == 2 * 2 + 1
    assert all((x == 0).all() and x.shape == (1, 16) for x in queries.values())
    model = make_residual(2)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(make_ids()).logits, model(make_ids()).logits)


@torch.no_grad()
def test_attention_residuals_decode_and_pad():
    attn = {"layers": [2], "num_heads": 2}
    model, ids = make_residual(4, attn=attn, dtype=torch.float64), make_ids(T=30)
    tokens = model.generate(ids, 6, temperature=0)
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, expected)
    mask = (torch.arange(30) >= torch.tensor([[7], [0]])).long()
    logits = model(ids, attention_mask=mask).logits
    assert_close(logits[0, 7:], model(ids[:1, 7:]).logits[0], 1e-5)


def test_attention_residuals_compile_whole():
    model, ids = make_residual(2, 2, dtype=torch.float64).train(), make_ids(T=20)
    found = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        call(ids, labels=ids).loss.backward()
        found.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
    for a, e in zip(*found, strict=True):
        assert_close(a, e, 1e-11)


def test_a_wrong_size_and_an_adapter_on_a_query_are_refused():
    for size in (0, 3, -2):
        with pytest.raises(ValueError, match=f"to be 1, an even number or None, got {size}"):
            GLAConfig(attnres_block_size=size)
    with pytest.raises(TypeError, match="attnres_block_size to be an integer or None"):
        GLAConfig(attnres_block_size=2.0)
    model = make_residual(2)
    model.model.layers[1].mlp_res_proj = torch.nn.Sequential(model.model.layers[1].mlp_res_proj)
    with pytest.raises(NotImplementedError, match="an adapter on attn_res_proj, mlp_res_proj or"):
        model(make_ids())


@pytest.mark.parametrize("num_items_in_batch", [None, 7], ids=["mean", "7 items"])
@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"fuse_cross_entropy": False},
        {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True},
    ],
    ids=["fused", "torch", "linear"],
)
def test_l2warp_is_a_term_of_the_gradient(loss, num_items_in_batch):
    from gla_ext.model.loss import head_and_loss

    torch.manual_seed(0)
    ids, results = make_ids(T=20), []
    head = torch.nn.Linear(16, 31, dtype=torch.float64)
    x = torch.randn(2, 20, 16, dtype=torch.float64, requires_grad=True)
    for use_l2warp in (False, True):
        config = GLAConfig(use_l2warp=use_l2warp, **loss)
        value, _ = head_and_loss(head, x, ids, config, True, num_items_in_batch)
        results.append([value, *torch.autograd.grad(value, [x, *head.parameters()])])
    greatest = head(x).amax(-1)
    term = 1e-4 / 40 * greatest.square().sum() / 2 / (num_items_in_batch or 1)
    terms = torch.autograd.grad(term, [x, *head.parameters()])
    (plain, *before), (value, *after) = results
    assert value == plain
    for a, b, expected in zip(after, before, terms, strict=True):
        assert_close(a - b, expected, 1e-9)


def test_fuse_swiglu_is_about_the_operator_alone():
    found = []
    for fuse in (True, False):
        model, ids, calls = make_model(fuse_swiglu=fuse), make_ids(), []
        original = model.model.layers[0].mlp.down_proj.__class__.forward

        def spy(self, x, calls=calls, original=original):
            calls.append(x.shape[-1])
            return original(self, x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Linear, "forward", spy)
            found.append(model(ids).logits)
        assert (24 in calls) is not fuse
    assert_close(*found, 1e-6)
