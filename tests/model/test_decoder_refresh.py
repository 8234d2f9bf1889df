"""A decoder whose model changes; its graphs are in test_decoder_graphs.py."""

import pytest
import torch
from changing import optimizer_step
from models import make_ids, make_model

from gla_ext.cache import GLACache
from gla_ext.decode import ChangedError, Decoder

PROMPTS = [make_ids(B=1, T=T, seed=T)[0] for T in (5, 1, 70, 12)]


def drawn(decoder, steps, prompts) -> torch.Tensor:
    """Tokens `[B, 1 + steps]`."""
    first = decoder.prefill(prompts)
    return torch.stack([first, *(decoder.step().clone() for _ in range(steps))], 1)


def test_a_decoder_whose_model_changed():
    """Prompts are refused until `refresh`; after it no row has had one."""
    model = make_model(torch.float64)
    optimizer_step(model)
    decoder = Decoder(model, 4, temperature=0)
    optimizer_step(model)  # before the first prompt there is no state of the model
    before = drawn(decoder, 9, PROMPTS)
    optimizer_step(model)
    for options in ({}, {"rows": [0, 1, 2, 3]}, {"keep": True}):
        with pytest.raises(ChangedError, match=r"Decoder: .* got model\.embeddings\.weight wri"):
            decoder.prefill(PROMPTS, **options)
    decoder.refresh()
    with pytest.raises(ValueError, match="prefill before step, got no prompt yet"):
        decoder.step()
    with pytest.raises(ValueError, match=r"have had a prompt with keep = True, got \[0, 1, 2, 3\]"):
        decoder.prefill(PROMPTS, keep=True)
    now = drawn(decoder, 9, PROMPTS)
    assert torch.equal(now, drawn(Decoder(model, 4, temperature=0), 9, PROMPTS))
    assert not torch.equal(now, before)
    model.config.vocab_size -= 1
    with pytest.raises(ValueError, match="Decoder: expected a model on cpu in torch"):
        decoder.refresh()
    with pytest.raises(ValueError, match="prefill before step, got no prompt yet"):
        decoder.step()


def test_rows_that_go_on_with_the_model_now():
    model = make_model(torch.float64)
    decoder = Decoder(model, 1, temperature=0)
    tokens = drawn(decoder, 3, PROMPTS[:1])[0].tolist()
    cache = GLACache()
    with torch.no_grad():
        before = torch.cat([PROMPTS[0], torch.tensor(tokens[:-1])])
        model(before[None], past_key_values=cache, use_cache=True)
    optimizer_step(model)
    decoder.refresh(keep_running=True)
    with torch.no_grad():
        for _ in range(5):
            last = torch.tensor([tokens[-1:]])
            logits = model(last, past_key_values=cache, use_cache=True).logits
            tokens.append(int(logits[0, -1].argmax()))
    assert [int(decoder.step()) for _ in range(5)] == tokens[4:]
