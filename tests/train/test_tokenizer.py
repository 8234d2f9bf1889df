"""Tokenizers of corpora: bytes, trained ones, those of others; transformers agrees with them."""

import json

import pytest
from corpora import WORDS, documents, prepare, texts_of
from trainers import TINY, run

from gla_ext.serve.text import Bytes, load_tokenizer
from gla_ext.train.prepare import readers
from gla_ext.train.tokens.folder import open_folder
from gla_ext.train.tokens.tokenizer import byte_tokenizer, read_tokenizer

TEXT = "def café():\n\treturn '日本' \U0001f600 <|endoftext|> Ā\x7f"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A corpus whose tokenizer was made from it."""
    root = tmp_path_factory.mktemp("trained")
    (root / "text.txt").write_text("<D>".join(documents(50)))
    args = ["--train-tokenizer", 320, "--delimiter", "<D>", "--held-out", 0.1, "--workers", 1]
    prepare(root / "text.txt", "--out", root / "out", *args)
    return root / "out"


def test_bytes_are_their_own_tokens(tmp_path):
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 256 and tokenizer.document_start == 0
    assert tokenizer.encode([TEXT]) == [list(TEXT.encode())]
    assert tokenizer.decode([0, *TEXT.encode()]) == TEXT
    assert tokenizer.encode(["".join(map(chr, range(1, 256)))])[0][:126] == list(range(1, 127))
    tokenizer.save(tmp_path)
    assert read_tokenizer(tmp_path).digest == tokenizer.digest


def test_transformers_reads_them(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = byte_tokenizer()
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = TEXT.replace("<|endoftext|>", "")
    assert theirs(text)["input_ids"] == [0, *text.encode()]
    assert theirs.decode([0, *text.encode()], skip_special_tokens=True) == text
    assert theirs.bos_token_id == theirs.eos_token_id == 0 and len(theirs) == 256
    theirs = transformers.AutoTokenizer.from_pretrained(trained / "tokenizer")
    ours = open_folder(trained).tokenizer
    assert theirs(text)["input_ids"] == [ours.document_start, *ours.encode([text])[0]]
    assert len(theirs) == ours.vocab_size == 320


def test_a_trained_one_says_all_there_is(trained):
    folder = open_folder(trained)
    for part in (folder.train, folder.held_out):
        ends = [*part.starts[1:].tolist(), len(part)]
        rows = [part[a:b].tolist() for a, b in zip(part.starts.tolist(), ends, strict=True)]
        assert all(row.count(folder.tokenizer.document_start) == 1 for row in rows)
        assert all(folder.tokenizer.decode(row) in documents(50) for row in rows)
    tokens, size = len(folder.train), folder.train.bytes
    assert tokens < 0.6 * size  # it has merged letters
    assert len(folder.train.starts) + len(folder.held_out.starts) == 50


def test_pieces_have_the_tokens_of_the_whole(trained, monkeypatch):
    """Where there are blanks between words, or lines."""
    tokenizer = open_folder(trained).tokenizer
    text = documents(50)[25]
    for piece, tail in ((60, 50), (100, 30)):
        monkeypatch.setattr(readers, "PIECE", piece)
        monkeypatch.setattr(readers, "_TAIL", tail)
        pieces, ends = zip(*readers.cut(text), strict=True)
        assert "".join(pieces) == text and len(pieces) > 5
        assert ends == (False,) * (len(pieces) - 1) + (True,)
        rows = tokenizer.encode(list(pieces))
        assert [token for row in rows for token in row] == tokenizer.encode([text])[0]
    pieces = [piece for piece, _ in readers.cut("\U0001f600" * 1000)]  # no blank anywhere
    assert max(map(len, pieces)) <= 200 and sum(map(len, pieces)) == 1000


def test_too_little_text_gives_a_smaller_vocabulary(tmp_path, capsys):
    for name in ("x.txt", "y.txt"):
        (tmp_path / name).write_text("ab\ncd")
    args = ["--train-tokenizer", 5000, "--delimiter", "\\n", "--held-out-files", tmp_path / "y.txt"]
    prepare(tmp_path / "x.txt", "--out", tmp_path / "out", *args)
    assert open_folder(tmp_path / "out").tokenizer.vocab_size < 270
    assert len(open_folder(tmp_path / "out").train.starts) == 2


def test_which_token_starts_a_document(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    content = json.loads((trained / "tokenizer/tokenizer.json").read_text())

    def made(special=(), **config):
        added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        names = enumerate(special, 320)
        tokens = [{"id": n, "content": x, "special": True, **added} for n, x in names]
        path.write_text(json.dumps(content | {"added_tokens": tokens}, indent=3))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return read_tokenizer(tmp_path)

    first = made(["<s>"])
    assert (first.start, first.document_start) == ("<s>", 320)
    assert made(["<s>", "</s>"], eos_token="</s>").start == "</s>"
    assert made(["<s>", "</s>"], eos_token="</s>", bos_token={"content": "<s>"}).start == "<s>"
    assert read_tokenizer(path, "</s>").document_start == 321
    with pytest.raises(ValueError, match=r"got no bos_token or eos_token and 2 special .* --docu"):
        made(["<s>", "</s>"])
    with pytest.raises(ValueError, match="to have the token '<x>', got none of that name"):
        read_tokenizer(path, "<x>")
    merged = {"type": "BPE", "continuing_subword_prefix": "x", "vocab": {"a": 0, "": 1}}
    panics = json.dumps(content | {"model": merged | {"merges": [["a", ""]]}})
    for text in ("{}", "[]", "x", panics):
        path.write_text(text)
        with pytest.raises(ValueError, match="to be a tokenizer, got"):
            read_tokenizer(tmp_path, "<s>")
    content["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_id": 0}
    content["padding"] |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "<s>"}
    assert made(["<s>"]).digest == first.digest
    assert made(["<s>"]).encode(["a", "a b"])[0] == first.encode(["a"])[0]
    assert made(["<t>"]).digest != first.digest


def test_special_tokens_in_a_text_are_text(tmp_path):
    for name in ("x.jsonl", "y.jsonl"):
        (tmp_path / name).write_text(json.dumps({"body": " ".join(WORDS)}) + "\n")
    args = ["--tokenizer", "bytes", "--column", "body", "--held-out-files", tmp_path / "y.jsonl"]
    prepare(tmp_path / "x.jsonl", "--out", tmp_path / "out", *args)
    assert texts_of(tmp_path / "out") == [" ".join(WORDS)]


def test_a_model_of_bytes_has_its_tokenizer_beside(folder, tmp_path):
    """transformers reads it; a server needs none for bytes."""
    transformers = pytest.importorskip("transformers")
    import gla_ext.hf  # noqa: F401  registers the model type

    run("--data", folder, "--out", tmp_path / "out", *TINY)
    assert isinstance(load_tokenizer(tmp_path / "out", 256), Bytes)
    generate = transformers.pipeline("text-generation", model=str(tmp_path / "out"))
    (reply,) = generate("def", max_new_tokens=4, do_sample=False)
    assert reply["generated_text"].startswith("def")


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    import tokenizers

    words = {"<s>": 0, "one": 65_535, "two": 70_000}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "words.json"))
    for name in ("x.txt", "y.txt"):
        (tmp_path / name).write_text("one two\ntwo")
    args = ["--tokenizer", tmp_path / "words.json", "--document-start", "<s>", "--delimiter", "\\n"]
    args += ["--held-out-files", tmp_path / "y.txt", "--out", tmp_path / "out"]
    prepare(tmp_path / "x.txt", *args)
    folder = open_folder(tmp_path / "out")
    assert folder.tokenizer.vocab_size == 70_001
    assert (tmp_path / "out" / "train-00000.bin").stat().st_size == 20
    assert folder.train[0:5].tolist() == [0, 65_535, 70_000, 0, 70_000]
