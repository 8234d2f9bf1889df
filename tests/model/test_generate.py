"""`generate` and `generate_stream` on a language model.

Equal bits (see common.py): tokens.
"""

import math
from typing import get_args, get_overloads, get_type_hints

import numpy as np
import pytest
import torch
from common import assert_close
from models import MODEL_EVERY, make_ids, make_model

from gla_ext.cache import GLACache
from gla_ext.decode import decoder as decode
from gla_ext.decode.generate import generate as decode_generate
from gla_ext.model import GLAForCausalLM

PROMPTS = [make_ids(B=1, T=T, seed=T)[0] for T in (5, 1, 70, 12)]

with_options = pytest.mark.parametrize("options", [{}, MODEL_EVERY], ids=["default", "all"])


@with_options
def test_stepwise_decoding_equals_the_full_forward(options):
    model, ids = make_model(torch.float64, **options), make_ids(T=40)
    cache = GLACache()
    pieces = [model(ids[:, :10], past_key_values=cache, use_cache=True).logits]
    pieces += [
        model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
        for t in range(10, 40)
    ]
    assert_close(torch.cat(pieces, 1), model(ids).logits, 1e-12)
    assert cache.get_seq_length() == 40


def test_use_cache_makes_a_cache():
    model, ids = make_model(torch.float64), make_ids()
    cache = model(ids[:, :30], use_cache=True).past_key_values
    rest = model(ids[:, 30:], past_key_values=cache).logits
    assert_close(rest, model(ids).logits[:, 30:], 1e-12)


def test_logits_of_chosen_positions():
    model, ids = make_model(torch.float64), make_ids(T=9)
    chosen = torch.tensor([8, 0, 3])
    with torch.no_grad():
        assert_close(model(ids, logits_to_keep=chosen).logits, model(ids).logits[:, chosen], 1e-12)


@pytest.fixture
def spied_model():
    """A model and the list of the token counts and logits of its calls."""
    model, calls = make_model(torch.float64), []
    model.register_forward_hook(
        lambda module, args, output: calls.append((args[0].shape[1], output.logits))
    )
    return model, calls


def test_generate_takes_one_step_a_token(spied_model):
    model, calls = spied_model
    ids = make_ids(T=10)
    tokens = model.generate(ids, 12, temperature=0)
    assert [count for count, _ in calls] == [10] + [1] * 11
    logits = torch.cat([logits for _, logits in calls], 1)
    full = make_model(torch.float64)(tokens).logits
    assert_close(logits, full[:, 9:-1], 1e-12)
    assert torch.equal(tokens[:, :10], ids)
    assert torch.equal(tokens[:, 10:], full[:, 9:-1].argmax(-1))


def test_prompts_are_packed_without_padding(spied_model):
    model, calls = spied_model
    model.generate(PROMPTS, 3)
    assert [count for count, _ in calls] == [5 + 1 + 70 + 12, 1, 1]
    assert calls[0][1].shape == (1, 4, 31)


@with_options
@pytest.mark.parametrize(("mode", "training"), [("chunk", True), ("fused_recurrent", False)])
def test_prompts_of_any_lengths_are_each_as_alone(training, mode, options):
    model = make_model(torch.float64, **options | {"attn_mode": mode}).train(training)
    alone = [model.generate(prompt[None], 20, temperature=0)[0] for prompt in PROMPTS]
    together = model.generate(PROMPTS, 20, temperature=0)
    assert isinstance(together, list)
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    of_ints = model.generate([prompt.tolist() for prompt in PROMPTS], 20, temperature=0)
    assert all(torch.equal(a, b) for a, b in zip(of_ints, alone, strict=True))


def test_prompts_of_one_length(spied_model):
    model, calls = spied_model
    ids = make_ids(T=6)
    tokens = model.generate(list(ids), 5, temperature=0)
    assert calls[0][0] == 6
    assert torch.equal(torch.stack(tokens), model.generate(ids, 5, temperature=0))


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_is_left_out(spied_model, side):
    model, calls = spied_model
    alone = [model.generate(prompt[None], 8, temperature=0)[0] for prompt in PROMPTS]
    ids, mask = make_ids(B=4, T=80, seed=9), torch.zeros(4, 80)
    for b, prompt in enumerate(PROMPTS):
        start = {"left": 80 - len(prompt), "right": 0, "both": 3}[side]
        ids[b, start : start + len(prompt)] = prompt
        mask[b, start : start + len(prompt)] = 1
    calls.clear()
    tokens = model.generate(ids, 8, 0, attention_mask=mask)
    assert calls[0][0] == sum(map(len, PROMPTS))
    assert torch.equal(tokens[:, :80], ids)
    for row, expected in zip(tokens, alone, strict=True):
        assert torch.equal(row[80:], expected[-8:])


def test_generate_nothing():
    model, ids = make_model(), make_ids(T=3)
    assert torch.equal(model.generate(ids, 0), ids)
    assert torch.equal(model.generate([ids[0]], 0)[0], ids[0])
    assert model.generate(ids[:0], 5).shape == (0, 3)
    assert list(model.generate_stream(ids, 0)) == []


def test_generate_follows_its_generator():
    model, ids = make_model(), make_ids(T=5)
    draws = [
        model.generate(ids, 20, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_generate_draws_from_the_models_distribution():
    model, n = make_model(torch.float64), 2000
    prompt = make_ids(B=1, T=4)
    p = model(prompt).logits[0, -1].softmax(-1)
    generator = torch.Generator().manual_seed(0)
    drawn = model.generate(prompt.repeat(n, 1), 2, generator=generator)[:, 4:]
    first = drawn[:, 0].bincount(minlength=31)
    # Chi-square with at most 30 degrees of freedom: 59.7 is exceeded once in 1,000.
    assert ((first - n * p) ** 2 / (n * p)).sum() < 59.7
    likeliest = p.argmax()
    after = model(torch.cat([prompt, likeliest[None, None]], 1)).logits[0, -1].softmax(-1)
    second = drawn[drawn[:, 0] == likeliest, 1]
    counts, m = second.bincount(minlength=31), len(second)
    assert ((counts - m * after) ** 2 / (m * after)).sum() < 59.7


def until(row: list[int], eos: int) -> list[int]:
    return row[: row.index(eos) + 1] if eos in row else row


@pytest.mark.parametrize("kind", [int, list, tuple, torch.tensor], ids=lambda kind: kind.__name__)
def test_generate_stops_at_end_tokens(kind):
    """One that ends row 0 at its fifth token, or two of which another row draws the second."""
    model, ids = make_model(torch.float64), make_ids(B=3, T=6)
    greedy = model.generate(ids, 20, temperature=0)[:, 6:].tolist()
    ends = [next(x for x in greedy[0] if not any(x in row for row in greedy[1:]))]
    if kind is not int:
        ends.append(next(x for x in greedy[1] if x not in (ends[0], *greedy[0][:5])))
    options = {"temperature": 0, "eos_token_id": ends[0] if kind is int else kind(ends)}
    wanted = [min((until(row, end) for end in ends), key=len) for row in greedy]
    longest = max(map(len, wanted))
    assert len(wanted[0]) < longest and (longest == 20 or kind is not int)
    assert kind is int or len({row[-1] for row in wanted}) > 1
    for row, expected in zip(ids, wanted, strict=True):
        assert model.generate(row[None], 20, **options)[0, 6:].tolist() == expected
    listed = model.generate(list(ids), 20, **options)
    assert [row[6:].tolist() for row in listed] == wanted
    filled = [row + row[-1:] * (longest - len(row)) for row in wanted]
    assert model.generate(ids, 20, **options)[:, 6:].tolist() == filled
    stream = model.generate_stream(ids, 20, **options)
    assert torch.stack(list(stream), 1).tolist() == filled
    assert torch.equal(model.generate(ids, 5, 0, eos_token_id=[]), model.generate(ids, 5, 0))


def test_nothing_is_computed_after_the_last_end_token(spied_model):
    model, calls = spied_model
    ids = make_ids(B=1, T=6)
    greedy = make_model(torch.float64).generate(ids, 20, temperature=0)[0, 6:].tolist()
    options = {"temperature": 0, "eos_token_id": greedy[4]}
    expected = until(greedy, greedy[4])
    model.generate(ids, 20, **options)
    assert len(calls) == len(expected)
    calls.clear()
    assert [x.item() for x in model.generate_stream(ids, 20, **options)] == expected
    assert len(calls) == len(expected)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.9}, {}])
def test_streaming_is_generate(options):
    model = make_model(torch.float64)
    seeds = [{"generator": torch.Generator().manual_seed(3)} for _ in range(2)]
    tokens = model.generate(PROMPTS, 15, **options, **seeds[0])
    stream = list(model.generate_stream(PROMPTS, 15, **options, **seeds[1]))
    assert len(stream) == 15
    for b, prompt in enumerate(PROMPTS):
        assert torch.equal(torch.stack(stream)[:, b], tokens[b][len(prompt) :])


def test_streaming_computes_a_token_when_it_is_asked_for(spied_model):
    model, calls = spied_model
    stream = model.generate_stream(make_ids(T=4), 10)
    assert not calls
    next(stream)
    assert len(calls) == 1
    next(stream)
    assert len(calls) == 2
    stream.close()


def test_streams_side_by_side():
    model, ids = make_model(torch.float64), make_ids(B=2, T=6)
    expected = model.generate(ids, 8, temperature=0)[:, 6:]
    streams = [model.generate_stream(row[None], 8, temperature=0) for row in ids]
    together = [[x.item() for x in pair] for pair in zip(*streams, strict=True)]
    assert torch.tensor(together).T.equal(expected)


IDS = make_ids(B=1, T=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": IDS[:, :0]}, r"\[B, at least 1\], got \[1, 0\]"),
        ({"input_ids": IDS[0]}, r"\[B, at least 1\], got \[3\]"),
        ({"input_ids": []}, "at least one prompt, got an empty list"),
        ({"input_ids": [IDS[0], []]}, r"prompt 1 to have shape \[at least 1\], got \[0\]"),
        ({"input_ids": [IDS]}, r"prompt 0 to have shape \[at least 1\], got \[1, 3\]"),
        ({"input_ids": [IDS[0]], "attention_mask": IDS}, "no attention_mask beside a list"),
        ({"max_new_tokens": -1}, "max_new_tokens to be at least 0, got -1"),
        ({"temperature": math.nan}, "temperature to be at least 0, got nan"),
        ({"top_k": 0}, "top_k to be at least 1, got 0"),
        ({"attention_mask": torch.tensor([[0, 0, 0]])}, "a token in every prompt, got a row"),
        ({"attention_mask": torch.tensor([[0.0, -1e9, 0.0]])}, "of 0 and 1, got other values"),
        ({"attention_mask": torch.ones(3)}, r"attention_mask to have shape \[1, 3\], got \[3\]"),
        ({"cuda_graph": True}, "on a CUDA device with cuda_graph = True, got cpu"),
    ],
)
@pytest.mark.parametrize("function", ["generate", "generate_stream"])
def test_generate_errors(function, options, message):
    arguments = {"input_ids": IDS, "max_new_tokens": 1} | options
    with pytest.raises(ValueError, match=message):
        getattr(make_model(), function)(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 5.0}, "max_new_tokens to be an int, got 5.0"),
        ({"max_new_tokens": None}, "max_new_tokens to be an int, got None"),
        ({"max_new_tokens": True}, "max_new_tokens to be an int, got True"),
        ({"temperature": None}, "temperature to be a number, got None"),
        ({"top_k": 5.0}, "top_k to be an int or None, got 5.0"),
        ({"input_ids": IDS.byte()}, "tokens to be torch.int64 or torch.int32, got torch.uint8"),
        ({"input_ids": [[1.0, 2.0]]}, "tokens to be torch.int64 or torch.int32, got torch.float"),
        ({"input_ids": [IDS[0], [1.0]]}, "tokens to be torch.int64 or torch.int32, got torch.fl"),
        (
            {"input_ids": "def "},
            "input_ids to be tokens, .* got a str: encode it with the model's t",
        ),
        ({"input_ids": 5}, "input_ids to be tokens, .* got <class 'int'>"),
        ({"input_ids": [IDS[0], "def "]}, "prompt 1 to be tokens, got a str: encode it"),
        ({"input_ids": [b"def "]}, "prompt 0 to be tokens, got a bytes: encode it"),
        ({"input_ids": {"input_ids": IDS}}, "prompt 0 to be tokens, got a str"),
        ({"input_ids": [[1, None]]}, "prompt 0 to be tokens, got <class 'list'>"),
        ({"attention_mask": [[1, 1, 1]]}, "attention_mask to be a tensor, got <class 'list'>"),
    ],
)
@pytest.mark.parametrize("function", ["generate", "generate_stream"])
def test_arguments_of_other_types(function, options, message):
    arguments = {"input_ids": IDS, "max_new_tokens": 1} | options
    with pytest.raises(TypeError, match=f"generate: expected {message}"):
        getattr(make_model(), function)(**arguments)


@pytest.mark.parametrize("count", [np.int64(3), np.array(3), torch.tensor(3)], ids=type)
def test_integers_of_numpy_and_torch(count):
    model = make_model()
    expected = model.generate(IDS, 3, temperature=0)
    for ids in (IDS, IDS.int()):
        assert torch.equal(model.generate(ids, count, temperature=0), expected)
        assert torch.equal(model.generate(ids, count, top_k=count // 3), expected)
    for row in model.generate([IDS[0].short(), IDS[0]], count, temperature=0):
        assert torch.equal(row, expected[0])


NO_TOKEN = "eos_token_id to be an int, a list of ints or None"
NOT_ITS_OWN = r"expected eos_token_id from 0 to 30, got (31|-1)"
EOS = [(eos, TypeError, NO_TOKEN) for eos in ([1, 2.0], 1.0, "2", True, torch.tensor([1.0, 2.0]))]
EOS += [(eos, ValueError, NOT_ITS_OWN) for eos in (31, -1, [2, 31])]


@pytest.mark.parametrize(("eos", "error", "message"), EOS, ids=str)
def test_wrong_end_tokens(eos, error, message):
    for name in ("generate", "generate_stream"):
        with pytest.raises(error, match=message):
            getattr(make_model(), name)([[1, 2]], 3, eos_token_id=eos)


@pytest.mark.parametrize("token", [31, -1])
def test_tokens_that_the_model_does_not_have(token, device):
    model = make_model().to(device)
    row = torch.tensor([3, token, 5], device=device)
    for prompts in (row[None], row[None].int(), [[1], row], [[3, token, 5]]):
        with pytest.raises(ValueError, match=f"expected tokens from 0 to 30, got {token}"):
            model.generate(prompts, 1)
    masked = model.generate(row[None], 4, 0, attention_mask=torch.tensor([[1, 0, 1]]))
    assert torch.equal(masked[0, 3:], model.generate(row[None, ::2], 4, 0)[0, 2:])
    with pytest.raises(ValueError, match=f"expected tokens from 0 to 30, got {token}"):
        decode.Decoder(model, 1).prefill(row[None])


@pytest.mark.parametrize("function", [decode_generate, GLAForCausalLM.generate])
def test_types_say_what_comes_of_a_tensor_and_of_a_list(function):
    found = {
        str(x.__annotations__["input_ids"]): x.__annotations__["return"]
        for x in get_overloads(function)
    }
    assert found == {"Tensor": "Tensor", "Sequence[Tensor | Sequence[int]]": "list[Tensor]"}


def test_types_say_what_each_option_is():
    expected = get_type_hints(GLAForCausalLM.generate)
    for x in get_overloads(GLAForCausalLM.generate):
        hints = get_type_hints(x)
        (options,) = get_args(hints.pop("options"))
        hints |= get_type_hints(options)
        assert hints.keys() == expected.keys()
        odd = [name for name in hints if hints[name] != expected[name]]
        assert odd == ["input_ids", "return"]
