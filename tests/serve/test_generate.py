"""`python -m gla_ext.generate`: a text as it comes, and a conversation at the terminal."""

import io
import subprocess
import sys

import pytest
import torch
from models import make_model
from served import ENVIRONMENT

from gla_ext import generate
from gla_ext.serve.text import Bytes


def greedy(model, text, count=30) -> str:
    tokens = Bytes().encode(text)
    (row,) = model.generate([tokens], count, temperature=0)
    return bytes(row[1:].tolist()).decode(errors="replace")[len(text) :].rstrip("\ufffd")


def run(*arguments) -> None:
    given = ("--device", "cpu", "--max-new-tokens", 30, "--temperature", 0)
    generate.main([*map(str, (*given, *arguments))])


@pytest.mark.parametrize("attn", [None, {"layers": [0], "num_heads": 2}])
def test_a_text(tmp_path, capsys, attn):
    """Of hybrids too."""
    model = make_model(vocab_size=256, eos_token_id=None, attn=attn)
    model.save_pretrained(tmp_path)
    run(tmp_path, "def f(x):")
    assert capsys.readouterr().out == f"def f(x):{greedy(model, 'def f(x):')}\n"


def test_it_comes_as_it_is_drawn(folder, capsys, monkeypatch):
    """And Ctrl-C leaves what has come."""
    push, seen = generate.Detokenizer.push, []

    def pushed(self, token):
        seen.append(capsys.readouterr().out)
        if len(seen) == 12:
            raise KeyboardInterrupt
        return push(self, token)

    monkeypatch.setattr(generate.Detokenizer, "push", pushed)
    run(folder, "def f(x):")
    assert seen[0] == "def f(x):" and len([text for text in seen if text]) > 3
    assert len(seen) == 12 and capsys.readouterr().out == "\n"


def test_the_end_and_options(model, tmp_path, capsys):
    """The model's end token ends the text; a seed fixes it; top_k 1 is the most probable."""
    text = greedy(model, "ab")
    end = next(x for x in text[4:] if x.isascii() and x not in text[:4])
    model.config.eos_token_id, before = ord(end), model.config.eos_token_id
    model.save_pretrained(tmp_path)
    model.config.eos_token_id = before
    before = text[: text.index(end)].rstrip("\ufffd")  # but for an open character
    for options in ([], ["--temperature", 1, "--top-k", 1]):
        run(tmp_path, "ab", *options)
        assert capsys.readouterr().out == f"ab{before}\n"
    drawn = []
    for seed in (1, 1, 2):
        run(tmp_path, "ab", "--temperature", 2, "--top-p", 0.9, "--seed", seed)
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_conversation_without_a_template(folder, model, capsys, monkeypatch):
    """All that was written goes on."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("and\n"))
    run(folder, "-i", "one")
    first = greedy(model, "one\n")
    second = greedy(model, f"one\n{first}\nand\n")
    assert capsys.readouterr().out == f"{first}\n> {second}\n> \n"


def test_a_conversation_with_a_template(tmp_path, capsys, monkeypatch):
    """Each turn is all messages as the template writes them."""
    train = pytest.importorskip("gla_ext.train.tokens.tokenizer")
    pytest.importorskip("transformers")
    template = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"
    model = make_model(vocab_size=256, eos_token_id=None)
    model.save_pretrained(tmp_path)
    train.byte_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    asked = []
    stream = generate.generate_stream
    monkeypatch.setattr(
        generate,
        "generate_stream",
        lambda *args, **kw: asked.append(args[1]) or stream(*args, **kw),
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    run(tmp_path, "-i")
    answers = [part.partition("\n> ")[0] for part in capsys.readouterr().out.split("> ", 2)[1:]]
    answer = answers[0].removesuffix("\n")
    texts = [bytes(tokens).decode() for ((tokens,),) in zip(asked, strict=True)]
    assert texts == ["[u]one[a]", f"[u]one[a]{answer}[u]two[a]"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a text to continue, or -i for a conversation"),
        (["a", "--temperature", "-1"], "expected temperature to be at least 0, got -1.0"),
        (["a", "--max-new-tokens", "-1"], "expected max_new_tokens to be at least 0, got -1"),
        (["a", "--top-k", "0"], "expected top_k to be at least 1, got 0"),
        (["a", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["a", "--device", "gpu"], "argument --device: expected --device to be one of torch's"),
    ],
)
def test_what_cannot_be(folder, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        run(folder, *arguments)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("python -m gla_ext.generate: ") and message in last


def test_logits_that_are_not_finite(tmp_path, capsys):
    model = make_model(vocab_size=256, eos_token_id=None)
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        run(tmp_path, "a")
    assert "expected the model's logits to be finite" in capsys.readouterr().err


@pytest.mark.slow
def test_the_program(folder, model):
    command = [sys.executable, "-m", "gla_ext.generate", folder, "-i", "--temperature", "0"]
    command += ["--device", "cpu", "--max-new-tokens", "30"]
    ran = subprocess.run(
        command, input="one\n", capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    answer = greedy(model, "one\n")
    assert (ran.stdout, ran.stderr) == (f"> {answer}\n> \n", "")
