"""Assisted decoding, and caches that go back to fewer tokens.

Equal bits (see common.py): tokens.
"""

import copy

import pytest
import torch
from common import assert_close
from models import make_ids

pytest.importorskip("transformers")

from hf_models import make_model

from gla_ext.cache import GLACache

GREEDY = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
MODELS = {
    "GLA": {},
    "convolutions": {"use_short_conv": True},
    "attention": {"attn": {"layers": [1], "num_heads": 2}},
    "window": {"attn": {"layers": [0], "num_heads": 2, "window_size": 7}},
}
EVERY = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def make_assistant(model):
    """Like the model, but not always of its opinion."""
    assistant = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return assistant


def long_drafts(model, count):
    """An assistant that drafts so many tokens; some drafts are taken whole."""
    assistant = make_assistant(model)
    config = assistant.generation_config
    config.num_assistant_tokens, config.assistant_confidence_threshold = count, 0.0
    return assistant


@pytest.mark.parametrize(
    ("T", "padding", "drafted"), [(12, 5, None), (150, 0, None), (21, 0, 70)], ids=str
)
@EVERY
def test_tokens_are_those_without_assistance(options, T, padding, drafted):
    """Also of drafts longer than a piece."""
    model, ids = make_model(**options).double(), make_ids(B=1, T=T)
    given = GREEDY | {"attention_mask": (torch.arange(T) >= padding).long().unsqueeze(0)}
    expected = model.generate(ids, **given)
    assistant, lengths = make_assistant(model), []
    if drafted is not None:
        assistant = long_drafts(model, drafted)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert torch.equal(model.generate(ids, assistant_model=assistant, **given), expected)
    assert len(lengths) < 50  # some drafts were taken
    assert set(lengths[1:]) != {1}
    if drafted is None:
        given |= {"prompt_lookup_num_tokens": 3, "eos_token_id": -1}  # transformers 4.55 needs one
        assert torch.equal(model.generate(ids, **given), expected)


@EVERY
@torch.no_grad()
def test_a_cache_goes_back(options):
    """By steps, pieces and whole calls, of rows of which one begins with padding."""
    model, ids = make_model(**options).double(), make_ids(T=260)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    expected = model(ids, attention_mask=mask).logits
    cache, now = GLACache(), 0
    cache.activate_past_recording()
    calls = [(100, 64), (30, 1), (1, 0), (1, 2), (20, 20), (70, 33), (9, 40), (64, 64)]
    for piece, back in (*calls, (100, 99), (80, 80), (19, 0)):
        own = mask[:, : now + piece] if now < 9 else None
        out = model(ids[:, now : now + piece], attention_mask=own, past_key_values=cache)
        seen = expected[:, now : now + piece]
        where = mask[:, now : now + piece].bool()
        assert_close(out.logits[where], seen[where], 1e-12)
        now += piece
        cache.activate_past_recording()  # transformers does so again; nothing is lost
        cache.crop(-back)
        now -= back
        assert cache.get_seq_length() == now
    for _ in range(70):
        out = model(ids[:, now : now + 1], past_key_values=cache)
        assert_close(out.logits, expected[:, now : now + 1], 1e-12)
        now += 1
    cache.crop(now - 64)  # as transformers 4 counts
    out = model(ids[:, now - 64 : now], past_key_values=cache, output_hidden_states=True)
    assert_close(out.logits, expected[:, now - 64 : now], 1e-12)
    assert {x.shape[1] for x in out.hidden_states} == {64}


def test_a_cache_goes_back_no_further_than_it_can():
    model, ids = make_model(), make_ids(T=200)
    cache = model(ids).past_key_values
    cache.crop(0)
    with pytest.raises(NotImplementedError, match=r"without activate_past_recording\(\)"):
        cache.crop(-1)
    assert not cache.is_croppable
    cache.activate_past_recording()
    assert cache.is_croppable
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="to go back to 200 tokens or more, of 400, got 199"):
        cache.crop(199)
    cache.crop(-3)
    with pytest.raises(NotImplementedError, match="packed sequences and use_cache = False"):
        model(ids, past_key_values=cache, use_cache=False)
    cache.reset()
    assert not cache.is_croppable


@EVERY
@torch.no_grad()
def test_rows_of_a_cache_that_goes_back_change_places(options):
    model, ids, rows = make_model(**options).double(), make_ids(T=90), torch.tensor([1, 0, 1])
    expected, cache = model(ids).logits[rows], GLACache()
    cache.activate_past_recording()
    model(ids[:, :80], past_key_values=cache)
    cache.crop(-10)
    cache.batch_select_indices(rows)
    found = model(ids[rows, 70:90], past_key_values=cache).logits
    assert_close(found, expected[:, 70:], 1e-12)
    cache.crop(-50)
    assert_close(model(ids[rows, 40:], past_key_values=cache).logits, expected[:, 40:], 1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("count", [20, 70])
@EVERY
def test_long_drafts_on_cuda(options, count):
    model = make_model(hidden_size=64, num_heads=2, **options).cuda()
    ids, steps = make_ids(B=1, T=21).cuda(), GREEDY | {"max_new_tokens": 160}
    found = model.generate(ids, assistant_model=long_drafts(model, count), **steps)
    with torch.no_grad():
        logits = model(found, use_cache=False).logits[:, 20:-1]
    drawn = logits.gather(-1, found[:, 21:, None])[..., 0]
    assert (logits.amax(-1) - drawn).max() < 2e-3  # ties may go either way


def test_continuous_batching_is_refused():
    for name in ("generate_batch", "init_continuous_batching"):
        with pytest.raises(
            NotImplementedError, match=r"generate_batch is not implemented, .*pages"
        ):
            getattr(make_model(), name)([[1, 2]])
