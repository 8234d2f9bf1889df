"""Damaged sources and corpora are read, or refused with an error that is documented."""

import gzip
import itertools
import json
import shutil
import tempfile
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
from corpora import documents, prepare
from fuzzing import VALUES, as_bytes, damaged, edited, refused
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from gla_ext.train.prepare.readers import Reader
from gla_ext.train.prepare.sources import Place
from gla_ext.train.prepare.writer import Writer
from gla_ext.train.tokens.corpus import open_corpus
from gla_ext.train.tokens.tokenizer import read_tokenizer

DOCUMENTED = (OSError, ValueError)
TEXTS = documents(8)
LINES = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS).encode()


def in_zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(data)
    return sink.getvalue().to_pybytes()


def in_parquet(**options):
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"id": range(8), "text": TEXTS}), sink, **options)
    return sink.getvalue().to_pybytes()


FILES = {
    "x.txt": "<D>".join(TEXTS).encode(),
    "x.jsonl": LINES,
    "x.json.gz": gzip.compress(LINES),
    "x.jsonl.zst": in_zstd(LINES),
    "plain.parquet": in_parquet(compression="none", use_dictionary=False, row_group_size=3),
    "snappy.parquet": in_parquet(),
}


def read(source, delimiter="<D>"):
    """All pieces of a source."""
    reader = Reader([str(source)], Place(), "text", delimiter, False, 0.1, lambda _: None)
    for piece in reader:
        assert piece.text.encode() and piece.part in ("train", "held_out")


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
def test_a_source(name, data):
    with tempfile.TemporaryDirectory() as folder, refused(DOCUMENTED):
        Path(folder, name).write_bytes(data.draw(damaged(FILES[name])))
        read(Path(folder, name))


@given(lines=st.lists(edited({"id": 1, "text": TEXTS[0]}).map(as_bytes) | VALUES.map(as_bytes)))
def test_lines(lines):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.jsonl")
        path.write_bytes(b"\n".join(lines))
        read(path)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder)
    return folder


def damage(data, folder):
    """Damages one file below a folder."""
    path = data.draw(st.sampled_from(sorted(x for x in folder.rglob("*") if x.is_file())))
    content, strategy = path.read_bytes(), damaged(path.read_bytes())
    if path.suffix == ".json":
        strategy |= edited(json.loads(content)).map(as_bytes)
    path.write_bytes(data.draw(strategy))


@given(data=st.data())
def test_a_saved_dataset(dataset, data):
    with tempfile.TemporaryDirectory() as root, refused(DOCUMENTED):
        folder = shutil.copytree(dataset, Path(root, "x"))
        damage(data, folder)
        read(folder)


def test_texts_outside_of_a_saved_dataset(dataset, tmp_path):
    """pyarrow would end the process."""
    folder = shutil.copytree(dataset, tmp_path / "x")
    (path,) = folder.glob("*.arrow")
    ends = itertools.accumulate(len(text.encode()) for text in TEXTS)
    offsets = b"".join(end.to_bytes(4, "little") for end in ends)
    content = path.read_bytes()
    assert offsets in content
    path.write_bytes(content.replace(offsets, offsets[:4] + b"\xff" * 4 + offsets[8:]))
    with pytest.raises(ValueError, match=f"expected {folder} to be whole, got Offset invariant"):
        read(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    (root / "x.txt").write_text("<D>".join(documents(60)))
    args = ["--delimiter", "<D>", "--held-out", 0.1, "--workers", 1, "--shard-bytes", 2000]
    prepare(root / "x.txt", "--out", root / "x", "--train-tokenizer", 260, *args)
    return root / "x"


@given(data=st.data())
def test_a_corpus(corpus, data):
    with tempfile.TemporaryDirectory() as root, refused(DOCUMENTED):
        folder = shutil.copytree(corpus, Path(root, "x"))
        damage(data, folder)
        found = open_corpus([str(folder)])
        batches = found.batches(2, 16, 0, 1, torch.device("cpu"))
        held_out = found.held_out_tokens(torch.device("cpu"))
        batches.most_documents()
        for tokens in (*batches(0), *batches(1), held_out[0 : len(held_out)]):
            assert tokens.min() >= 0 and tokens.max() < found.vocab_size
        assert found.tokens_per_byte > 0 and found.held_out_tokens_per_byte > 0
        found.text_of(found.prompt("some text"))


@given(data=st.data())
def test_progress(corpus, data):
    settings = json.loads((corpus / "corpus.json").read_text())["settings"]
    numbers = {"tokens": 0, "documents": 0, "bytes": 0}
    place = {"source": 0, "at": 0, "line": 0, "inside": None, "broken": 0, "not_text": 0, "done": 0}
    parts = {"train": numbers, "held_out": numbers}
    progress = {"settings": settings, "place": place, "parts": parts}
    with tempfile.TemporaryDirectory() as folder, refused(DOCUMENTED):
        content = data.draw(edited(progress).map(as_bytes) | damaged(as_bytes(progress)))
        Path(folder, "progress.json").write_bytes(content)
        writer = Writer(Path(folder), settings)
        writer.begin("uint16", 2000)


@given(data=st.data())
def test_a_tokenizer(corpus, data):
    with tempfile.TemporaryDirectory() as root, refused(DOCUMENTED):
        folder = shutil.copytree(corpus / "tokenizer", Path(root, "x"))
        damage(data, folder)
        tokenizer = read_tokenizer(folder)
        assert tokenizer.vocab_size > tokenizer.document_start >= 0
        assert len(tokenizer.digest) == 64
        (tokens,) = tokenizer.encode(["some text"])
        tokenizer.decode(tokens)


@given(damaged(TEXTS[4].encode()))
def test_text(content):
    with tempfile.TemporaryDirectory() as folder, refused(DOCUMENTED):
        path = Path(folder, "x.txt")
        path.write_bytes(content)
        found = open_corpus([str(path)])
        assert found.batches(2, 16, 0, 1, torch.device("cpu"))(0)[0].shape == (2, 16)
