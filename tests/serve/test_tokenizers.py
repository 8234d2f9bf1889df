"""Serving a folder with a tokenizer of transformers: text goes through it both ways."""

import pytest
import torch
from engines import run
from models import make_model
from served import client_of

from gla_ext.serve import Engine, Limits, Request
from gla_ext.serve.text import Bytes, Detokenizer, load_tokenizer

transformers = pytest.importorskip("transformers")
PROMPT = "L'été, le café est fermé."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokens are of parts of characters up to whole words."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([PROMPT * 20], trainer)
    path = tmp_path_factory.mktemp("model")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.save_pretrained(path)
    make_model(vocab_size=len(tokenizer), eos_token_id=None).save_pretrained(path)
    return path


def test_text_comes_as_the_tokenizer_decodes_it(folder):
    """Streamed it is what all tokens together are, characters of several tokens included."""
    from gla_ext.model import GLAForCausalLM

    model = GLAForCausalLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    engine = Engine(model, tokenizer, Limits(rows=2))
    prompt = tokenizer.encode(PROMPT)
    assert 1 < len(prompt) < len(PROMPT) and max(prompt) >= 256
    assert tokenizer.decode(prompt) == PROMPT
    for seed in range(3):
        ((tokens, text, _),) = run(engine, Request(prompt, 60, temperature=2.0, seed=seed))
        whole = tokenizer.decode(prompt + tokens).removeprefix(PROMPT)
        assert text.rstrip("\ufffd") == whole.rstrip("\ufffd")  # but for what is open at the end
        assert len(tokens) == 60


def test_over_http(folder):
    pytest.importorskip("starlette")
    from gla_ext.model import GLAForCausalLM

    model = GLAForCausalLM.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    prompt = tokenizer.encode(PROMPT)
    (row,) = model.generate([prompt], 12, temperature=0)
    expected = tokenizer.decode(row.tolist()).removeprefix(PROMPT)
    body = {"max_tokens": 12, "temperature": 0, "logprobs": 1}
    with client_of(Engine(model, tokenizer, Limits(rows=2))) as client:
        for given in (PROMPT, prompt):
            reply = client.post("/v1/completions", json=body | {"prompt": given}).json()
            (choice,) = reply["choices"]
            assert choice["text"] == expected.rstrip("\ufffd")
            assert reply["usage"]["prompt_tokens"] == len(prompt)
            names = choice["logprobs"]["tokens"]
            new = row[len(prompt) :].tolist()
            assert [tokenizer.decode([token]) for token in new] == [
                tokenizer.decode([int(name[9:])]) if name.startswith("token_id:") else name
                for name in names
            ]
            assert torch.tensor(choice["logprobs"]["token_logprobs"]).le(0).all()


def words(*, metaspace: bool):
    """A tokenizer of whole words, of which 0 to 2 are special; `metaspace` drops a first space."""
    import tokenizers
    from tokenizers import decoders, models

    names = ["<s>", "<|im_end|>", "<|tool|>", "\u2581one", "\u2581two"]
    made = tokenizers.Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, "<s>"))
    made.decoder = decoders.Metaspace() if metaspace else decoders.Fuse()
    special = [tokenizers.AddedToken("<|tool|>", special=True)]
    made.add_special_tokens(special)  # special, and none of those that have a role
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", additional_special_tokens=["<|im_end|>"]
    )


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_special_tokens(metaspace, skip):
    """As `decode` leaves them out, or has them; the words beside keep their spaces."""
    tokenizer = words(metaspace=metaspace)
    prompt, tokens = [0, 3], [1, 4, 2, 2, 3, 1, *[2] * 9, 4, 1]
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces = [detokenizer.push(token) for token in tokens]
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + tokens, skip_special_tokens=skip)
    assert before + "".join(pieces) == whole
    assert ("<|im_end|>" in whole, "<|tool|>" in whole) == (not skip, not skip)
    assert Detokenizer(Bytes(), [0], skip_special_tokens=skip).push(65) == "A"


@pytest.mark.parametrize("count", [1, 15, 16, 20, 200])
def test_a_space_waits_behind_any_number_of_special_tokens(count):
    tokenizer = words(metaspace=True)
    detokenizer = Detokenizer(tokenizer, [3])
    tokens = [4, *[2] * count, 3, 4]
    assert "".join(detokenizer.push(token) for token in tokens) == " two one two"


@pytest.mark.parametrize("skip", [None, True, False])
def test_special_tokens_over_http(skip):
    pytest.importorskip("starlette")
    tokenizer = words(metaspace=False)
    model = make_model(vocab_size=5, eos_token_id=None)
    model.lm_head.register_forward_hook(
        lambda module, args, output: output.new_tensor([0.0, 1, 0, 0, 0]).expand_as(output)
    )
    body = {"prompt": [3], "max_tokens": 3, "temperature": 0, "logprobs": 0}
    body |= {} if skip is None else {"skip_special_tokens": skip}
    with client_of(Engine(model, tokenizer, Limits(rows=2))) as client:
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        bad = client.post("/v1/completions", json=body | {"skip_special_tokens": 1})
    assert choice["text"] == ("<|im_end|>" * 3 if skip is False else "")
    assert choice["logprobs"]["tokens"] == ["<|im_end|>"] * 3  # each token has its name
    assert "expected skip_special_tokens to be true or false, got 1" in bad.text


def test_a_prompt_that_spells_out_a_special_token_has_its_offsets():
    pytest.importorskip("starlette")
    model = make_model(vocab_size=5, eos_token_id=None)
    body = {"prompt": "<s>\u2581one", "max_tokens": 0, "echo": True, "logprobs": 0}
    with client_of(Engine(model, words(metaspace=False), Limits(rows=2))) as client:
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == body["prompt"]
    assert choice["logprobs"]["text_offset"] == [0, 3]


def test_what_no_tokenizer_can_be_read_from_is_said_in_a_line(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(ValueError, match=f"expected {tmp_path} to hold a tokenizer, got .{{20}}"):
        load_tokenizer(tmp_path, 300)


def test_a_tokenizer_of_bytes_with_another_token(tmp_path):
    from gla_ext.train.tokens.tokenizer import byte_tokenizer

    byte_tokenizer().save(tmp_path)
    assert isinstance(load_tokenizer(tmp_path, 256), Bytes)
    more = transformers.AutoTokenizer.from_pretrained(tmp_path)
    more.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    more.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, 257).encode("a<|user|>")[-2:] == [97, 256]
