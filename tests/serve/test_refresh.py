"""An engine whose model changes: what it sees of that, and `refresh`."""

import copy
import dataclasses

import pytest
import torch
from changing import (
    ADAPTERS,
    LIMITS,
    adapted,
    assign,
    expected,
    fused_step,
    load,
    make,
    move,
    optimizer_step,
    own_optimizer,
    replace_module,
    replace_parameter,
    rescale,
    tokens_of,
    write_data,
)
from engines import deltas, greedy, is_empty, prompt, run
from models import make_model

from gla_ext.cache import GLACache
from gla_ext.serve import ChangedError, Engine, Request
from gla_ext.serve.text import Bytes

SEEN = {
    "load_state_dict": (load, "model.embeddings.weight written since"),
    "assign": (assign, "model.embeddings.weight replaced since"),
    "optimizer": (optimizer_step, "model.embeddings.weight written since"),
    "own optimizer": (own_optimizer, "model.embeddings.weight written since"),
    "parameter": (replace_parameter, "lm_head.weight replaced since"),
    "module": (replace_module, "model.layers.1.mlp replaced since"),
    "address": (move, "model.embeddings.weight moved since"),
}


@pytest.mark.parametrize(("change", "message"), SEEN.values(), ids=SEEN)
def test_a_change_that_is_seen(change, message):
    """Requests are refused until `refresh`; then known beginnings are of the new model."""
    model = make()
    engine = Engine(model, limits=LIMITS)
    before = tokens_of(engine, 200, 70)
    assert len(engine.prefixes) > 0
    change(model)
    with pytest.raises(ChangedError, match=rf"Engine: expected .* got {message}; call refresh\(\)"):
        engine.submit(Request(prompt(5)))
    assert not engine.busy
    engine.refresh()
    assert len(engine.prefixes) == 0
    for _ in range(2):  # with the second time the prefixes of the first
        now = tokens_of(engine, 200, 70)
        assert now == expected(model, 200, 70) != before
    assert is_empty(engine)


@pytest.mark.parametrize("change", [rescale, write_data, fused_step])
def test_a_change_that_is_not_seen_needs_refresh(change):
    model = make()
    engine = Engine(model, limits=LIMITS)
    before = tokens_of(engine, 200)
    change(model)
    (now,) = expected(model, 200)
    assert [now] != before
    engine.refresh()
    assert tokens_of(engine, 200) == [now]


def test_inference_mode():
    """Inference tensors have no versions: only their addresses are seen."""
    with torch.inference_mode():
        model = make()
        other = [x.clone() for x in make(seed=5).parameters()]
    engine = Engine(model, limits=LIMITS)
    before = tokens_of(engine, 200)
    assert tokens_of(engine, 200) == before
    with torch.inference_mode():
        for parameter, new in zip(model.parameters(), other, strict=True):
            parameter.copy_(new)
        (now,) = expected(model, 200)
    engine.refresh()
    assert tokens_of(engine, 200) == [now] != before
    replace_parameter(model)
    with pytest.raises(ChangedError, match=r"lm_head\.weight replaced since"):
        engine.submit(Request(prompt(5)))


def test_train_mode():
    """Train mode is refused; back in eval mode the model is as it was."""
    model = make()
    engine = Engine(model, limits=LIMITS)
    found = tokens_of(engine, 70)
    model.train()
    with pytest.raises(ChangedError, match="got training changed since"):
        engine.submit(Request(prompt(5)))
    with pytest.raises(ValueError, match="a model in eval mode, got one in train mode"):
        engine.refresh()
    model.eval()
    assert tokens_of(engine, 70) == found


def test_a_refresh_that_is_refused():
    """What the old model left is given up all the same."""
    model = make()
    engine = Engine(model, limits=LIMITS)
    tokens_of(engine, 200)
    engine.submit(Request(prompt(5), 20, temperature=0))
    engine.step()
    write_data(model)
    model.train()
    with pytest.raises(ValueError, match="got one in train mode"):
        engine.refresh()
    model.eval()
    ((_, delta),) = engine.step()
    assert delta.finish_reason == "refresh"
    assert tokens_of(engine, 200) == expected(model, 200)


def one_token_less(model):
    model.config.vocab_size -= 1


def one_layer_more(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.model.layers[2].attn.layer_idx = 2


def one_layer_less(model):
    del model.model.layers[1]


def other_pieces(model):
    model.model.layers[0].attn.mode = "fused_recurrent"


NO_BUFFERS, OTHERS = "expected a model on cpu in torch", "expected 2 layers, as before, got others"
FOR_ANOTHER = {
    "fp32": (lambda model: model.float(), NO_BUFFERS, 1 << 20),
    "device": (lambda model: model.to("meta"), NO_BUFFERS, 1 << 20),
    "vocabulary": (one_token_less, NO_BUFFERS, 1 << 20),
    "one layer more": (one_layer_more, OTHERS, 0),
    "one layer less": (one_layer_less, OTHERS, 0),
    "other pieces": (other_pieces, "2 layers that pass prompts in chunks, as before", 1 << 20),
}


@pytest.mark.parametrize("case", FOR_ANOTHER.values(), ids=FOR_ANOTHER)
def test_a_model_that_needs_another_engine(case):
    change, message, cache_bytes = case
    model = make()
    engine = Engine(model, limits=dataclasses.replace(LIMITS, cache_bytes=cache_bytes))
    change(model)
    with pytest.raises(ValueError, match=message):
        engine.refresh()


def test_other_end_tokens():
    model = make()
    engine = Engine(model, limits=LIMITS)
    ((before, _, _),) = run(engine, Request(prompt(5), 8, temperature=0))
    model.config.eos_token_id = before[2]
    engine.refresh()
    ((now, _, reason),) = run(engine, Request(prompt(5), 8, temperature=0))
    assert (now, reason) == (before[: before.index(before[2])], "stop")


@pytest.mark.parametrize(("change", "seen"), ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_of_peft(change, seen):
    adapters, model = adapted()
    engine = Engine(model, limits=LIMITS)
    before = tokens_of(engine, 200)
    change(adapters)
    if seen:
        with pytest.raises(ChangedError, match=f"{seen} changed since"):
            engine.submit(Request(prompt(5)))
    engine.refresh()
    now = tokens_of(engine, 200)
    assert now == expected(model, 200)
    assert (now == before) == (change is ADAPTERS["merged"][0])


def test_running_sequences_end():
    """One decodes, one is read, one has not begun and one waits: those two go on."""
    model = make()
    engine = Engine(model, limits=LIMITS)
    found, sequences = {}, []
    for lengths in ((5,), (700, 30, 40)):
        sequences += engine.submit(*(Request(prompt(n), 20, temperature=0) for n in lengths))
        found |= {sequence: [] for sequence in sequences if sequence not in found}
        for sequence, delta in engine.step():
            found[sequence].append(delta)
    assert [sequence.passed > 0 for sequence in sequences] == [True, True, False, False]
    assert (engine.running, engine.waiting) == (3, 1)
    load(model)
    engine.refresh()
    engine.refresh(keep_running=True)  # which does not bring them back
    assert engine.busy
    for sequence, delta in deltas(engine):
        found[sequence].append(delta)
    reasons = [found[sequence][-1].finish_reason for sequence in sequences]
    assert reasons == ["refresh", "refresh", "length", "length"]
    tokens = [[t for delta in found[sequence] for t in delta.tokens] for sequence in sequences]
    old, new = make(), model
    assert 0 < len(tokens[0]) < 4
    assert tokens[0] == greedy(old, prompt(5), 20)[: len(tokens[0])]
    assert tokens[1:] == [[], *expected(new, 30, 40, count=20)]
    assert engine.metrics.reasons() == {"refresh": 2, "length": 2}
    assert 'requests_total{reason="refresh"} 2' in engine.metrics.text({})
    assert is_empty(engine)


def test_running_sequences_go_on():
    """They go on from their states; a prompt that is being read leaves none for others."""
    model = make()
    engine = Engine(model, limits=LIMITS)
    found = {}

    def step():
        for sequence, delta in engine.step():
            found.setdefault(sequence, []).extend(delta.tokens)

    (decodes,) = engine.submit(Request(prompt(5), 20, temperature=0))
    step()
    (reads,) = engine.submit(Request(prompt(700), 20, temperature=0))
    step()
    step()
    drew, passed = len(found[decodes]), reads.passed
    assert drew == 3 and 0 < passed < 700 and passed % 64 == 0
    load(model)
    engine.refresh(keep_running=True)
    while engine.busy:
        step()
    assert len(engine.prefixes) == 0
    # The cache has what the old model made of all tokens but the last one.
    cache, old = GLACache(), make()
    tokens = greedy(old, prompt(5), drew)
    with torch.no_grad():
        old(torch.tensor([prompt(5) + tokens[:-1]]), past_key_values=cache, use_cache=True)
        for _ in range(20 - drew):
            last = torch.tensor([tokens[-1:]])
            logits = model(last, past_key_values=cache, use_cache=True).logits
            tokens.append(int(logits[0, -1].argmax()))
    assert found[decodes] == tokens
    assert len(found[reads]) == 20
    assert engine.metrics.reasons() == {"length": 2}
    assert tokens_of(engine, 700) == expected(model, 700)


def test_text_that_waited_comes_with_the_end():
    model = make_model(torch.float64, vocab_size=256, eos_token_id=None)
    engine = Engine(model, Bytes(), LIMITS)
    ((_, text, _),) = run(engine, Request([0, 65], 12, temperature=0))
    engine.submit(Request([0, 65], 40, temperature=0, stop=[text[:6] + "never"]))
    shown = ""
    while len(shown) < 4:
        ((sequence, delta),) = engine.step()
        shown += delta.text
        if sequence.new == 5:
            engine.refresh()
    assert delta.finish_reason == "refresh" and text.startswith(shown)
