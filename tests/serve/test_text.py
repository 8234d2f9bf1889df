"""Tokens to text as they come, and stop strings."""

import pytest

from gla_ext.serve.request import Request, TokenLogprob
from gla_ext.serve.sequence import Sequence
from gla_ext.serve.text import Bytes, Detokenizer, StopStrings, load_tokenizer


class Words:
    """Joins with spaces, which the first word of a text has none of."""

    def decode(self, tokens):
        return " ".join(["one", "two", "three", ""][token] for token in tokens)


def pieces(tokenizer, prompt, tokens):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.push(token) for token in tokens]


def test_text_of_tokens():
    """Characters of several tokens, and a decoder that drops a space at the start."""
    assert pieces(Bytes(), [0, *b"a"], "xé€.".encode()) == ["x", "", "é", "", "", "€", "."]
    assert pieces(Bytes(), [0], [0xFF, 0x80, *b"a", 0xE2]) == ["", "", "\ufffd\ufffda", ""]
    assert pieces(Words(), [0], [1, 2, 2]) == [" two", " three", " three"]
    assert pieces(Words(), [0] * 1000, [1, 2]) == [" two", " three"]


class WithSpecial(Bytes):
    def decode(self, tokens):
        return super().decode([token for token in tokens if token != 1])


@pytest.mark.parametrize("count", [1, 8, 15, 16, 40])
def test_a_token_without_text_waits_or_is_left_out(count):
    """It may be a space at the start of a text; characters of several tokens come whole."""
    assert pieces(Words(), [], [3, 0]) == ["", " one"]
    shown = pieces(WithSpecial(), [*b"a"], [1] * count + [*"🌶b".encode()])
    assert shown == [""] * (count + 3) + ["🌶", "b"]


class Mixed(Bytes):
    """Token 1 is a comma, and the first byte of the character that tokens 2 and 3 end."""

    def decode(self, tokens):
        return b"".join([b"a", b",\xe2", b"\x82", b"\xac"][token] for token in tokens).decode(
            errors="replace"
        )


@pytest.mark.parametrize(
    ("tokens", "text"),
    [([1], ","), ([1, 2], ","), ([1, 2, 3], ",€"), ([0, 1, 0, 1, 2], "a,\ufffda,")],
)
@pytest.mark.parametrize("prompt", [[0], [1]])
def test_text_before_a_part_of_a_character(prompt, tokens, text):
    """It waits with it, and is not lost if that was the end, by whatever."""
    for ends in ((), (3,)):
        request = Request(prompt, len(tokens), temperature=0)
        sequence = Sequence(request, Mixed())
        deltas = [sequence.add(token, None, ends) for token in tokens]
        expected = "stop" if 3 in tokens and ends else "length"
        assert deltas[-1].finish_reason == expected
        wanted = text if expected == "length" else text.rstrip("€")
        assert "".join(delta.text for delta in deltas) == wanted
    sequence = Sequence(Request(prompt, 20, temperature=0, stop=[",a"]), Mixed())
    text_so_far = "".join(sequence.add(token, None, ()).text for token in tokens)
    assert text_so_far + sequence.rest() == text
    sequence = Sequence(Request(prompt, len(tokens), temperature=0, stop=[","]), Mixed())
    assert "".join(sequence.add(token, None, ()).text for token in tokens) == text.partition(",")[0]


def test_what_is_no_text_does_not_wait_for_ever():
    shown = pieces(Bytes(), [0], [0x80] * 100 + [*b"ab"])
    assert "".join(shown) == "\ufffd" * 100 + "ab"
    assert max(map(len, shown)) <= 16


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        ([], "abc", ("abc", False)),
        (["x"], "abc", ("abc", False)),
        (["bc"], "abcd", ("a", True)),
        (["cd", "b"], "abcd", ("a", True)),
        (["bcx"], "abcd", ("abcd", False)),
        (["bcx"], "ab", ("ab", False)),
        (["aab"], "aaab", ("a", True)),
        (["aab", "aac"], "aaac", ("a", True)),
    ],
)
def test_stop_strings(stops, text, expected):
    """The same text at once and letter by letter."""
    for parts in ([text], list(text)):
        stop, shown, stopped = StopStrings(stops), "", False
        for part in parts:
            if not stopped:
                more, stopped = stop.push(part)
                shown += more
        assert (shown + ("" if stopped else stop.flush()), stopped) == expected


def test_what_may_become_a_stop_string_waits():
    stop = StopStrings(["STOP"])
    assert [stop.push(x) for x in ("a S", "T", "A", "STO")] == [
        ("a ", False),
        ("", False),
        ("STA", False),
        ("", False),
    ]
    assert stop.flush() == "STO"


def test_a_model_of_other_tokens_needs_its_tokenizer(tmp_path):
    assert isinstance(load_tokenizer(tmp_path, 256), Bytes)
    with pytest.raises(ValueError, match="as its model has 31 tokens"):
        load_tokenizer(tmp_path, 31)


def test_a_character_that_the_prompt_left_open():
    """Belongs to the reply, from wherever it was cut; the prompt's own text does not."""
    pepper = "🌶".encode()
    for prompt in (b"hot ", b"", "é".encode() * 20, b"\xffx"):
        for cut in range(5):
            shown = "".join(pieces(Bytes(), [0, *prompt, *pepper[:cut]], [*pepper[cut:], *b" end"]))
            assert shown == ("🌶 end" if cut < 4 else " end")
    assert pieces(Bytes(), [0, *b"a", 0xE2], b"bc") == ["b", "c"]  # of a character that never comes


def test_stop_strings_and_offsets_where_the_prompt_left_a_character_open():
    pepper = "🌶".encode()
    options = {"temperature": 0, "logprobs": 0, "stop": ["🌶 e"]}
    generation = Sequence(Request([0, *b"hot ", *pepper[:2]], 20, **options), Bytes())
    tokens = [*pepper[2:], *b" e"]
    deltas = [generation.add(token, TokenLogprob(token, 0.0, {}), ()) for token in tokens]
    assert [delta.logprobs[0].offset for delta in deltas] == [0, 0, 1, 2]
    assert "".join(delta.text for delta in deltas) == ""
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]


def test_offsets_while_text_waits():
    """As it may become a stop string, or is a part of a character."""
    text = "ab é STO 🌶 end"
    tokens = [*text.encode()]
    request = Request([0, 65], 100, temperature=0, logprobs=0, stop=["STOP"])
    generation = Sequence(request, Bytes())
    found = [x for t in tokens for x in generation.add(t, TokenLogprob(t, 0.0, {}), ()).logprobs]
    assert [x.token for x in found] == tokens
    detokenizer, offset = Detokenizer(Bytes(), [0, 65]), 0
    for x in found:
        assert x.offset == offset
        offset += len(detokenizer.push(x.token))
    assert offset == len(text)
