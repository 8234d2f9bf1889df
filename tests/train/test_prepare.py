"""`gla_ext.train.prepare`: all of a source's documents, in order, whatever stops it."""

import errno
import gzip
import json
import multiprocessing
import os
import re
import signal
import tracemalloc
from array import array

import pytest
from corpora import documents, prepare, texts_of

from gla_ext.train.prepare import filling, readers, writer
from gla_ext.train.prepare.readers import Reader
from gla_ext.train.prepare.sources import Place
from gla_ext.train.tokens.folder import MANIFEST, PROGRESS, open_folder
from gla_ext.train.tokens.tokenizer import Tokenizer

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = documents(60)
BYTES = ("--tokenizer", "bytes", "--held-out", 0.1, "--workers", 1)


def in_lines(texts=TEXTS):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def in_files(folder):
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)


def in_parquet(folder):
    table = pyarrow.table({"id": range(60), "text": TEXTS})
    parquet.write_table(table, folder / "x.parquet", row_group_size=17)


def compressed(folder, name, data, cut=0):
    with pyarrow.CompressedOutputStream(str(folder / name), "zstd") as file:
        file.write(data)
    os.truncate(folder / name, (folder / name).stat().st_size - cut)


SOURCES = {
    "files": in_files,
    "lines": lambda folder: (folder / "x.jsonl").write_bytes(in_lines()),
    "lines.gz": lambda folder: (folder / "x.json.gz").write_bytes(gzip.compress(in_lines())),
    "lines.zst": lambda folder: compressed(folder, "x.jsonl.zst", in_lines()),
    "delimiter": lambda folder: (folder / "x.txt").write_text("<D>".join(TEXTS)),
    "delimiter.gz": lambda folder: (folder / "x.gz").write_bytes(
        gzip.compress("<D>".join(TEXTS).encode())
    ),
    "parquet": in_parquet,
    "dataset": lambda folder: datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(
        folder / "x", num_shards=2
    ),
}


@pytest.fixture(params=SOURCES)
def source(request, tmp_path):
    """A folder with the texts in one form."""
    (tmp_path / "source").mkdir()
    SOURCES[request.param](tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def lines(tmp_path):
    """A folder with the texts as lines of JSON."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x.jsonl").write_bytes(in_lines())
    return tmp_path / "source"


@pytest.fixture
def small(monkeypatch):
    """Pieces, blocks and groups of rows so small that the texts have many."""
    for module in (readers, filling):
        monkeypatch.setattr(module, "PIECE", 100)
    monkeypatch.setattr(readers, "_BLOCK", 64)
    monkeypatch.setattr(readers, "_TAIL", 30)
    monkeypatch.setattr(readers, "_ROWS", 4)


def test_all_documents_are_there_in_order(source, tmp_path, small):
    out = tmp_path / "out"
    prepare(source, "--out", out, *BYTES, "--delimiter", "<D>", "--shard-bytes", 4000)
    train, held_out = texts_of(out), texts_of(out, "held_out")
    assert 1 <= len(held_out) <= 15
    assert train == [text for text in TEXTS if text not in held_out]
    assert held_out == [text for text in TEXTS if text in held_out]
    manifest = json.loads((out / MANIFEST).read_text())
    assert manifest["train"]["bytes"] == sum(len(text.encode()) for text in train)
    sizes = [shard["tokens"] * 2 for shard in manifest["train"]["shards"]]
    assert len(sizes) > 2 and set(sizes[:-1]) == {4000}
    assert sorted(x.name for x in out.glob("*.bin")) == sorted(
        shard["name"] for part in ("train", "held_out") for shard in manifest[part]["shards"]
    )


def test_reading_goes_on_from_any_place(source, small):
    def read(place):
        return list(Reader([str(source)], place, "text", "<D>", False, 0.1, pytest.fail))

    pieces = read(Place())
    assert "".join(piece.text for piece in pieces) == "".join(TEXTS)
    assert len(pieces) > 65
    for number, piece in enumerate(pieces, 1):
        if piece.after is not None:
            again = read(piece.after)
            assert [(x.text, x.begins, x.part, x.after) for x in again] == [
                (x.text, x.begins, x.part, x.after) for x in pieces[number:]
            ]


def test_the_number_of_processes_does_not_matter(lines, tmp_path, small):
    for workers in (1, 3):
        prepare(lines, "--out", tmp_path / str(workers), *BYTES, "--workers", workers)
    assert open_folder(tmp_path / "1").digest == open_folder(tmp_path / "3").digest


def killed_after(commits, *args):
    """Runs the command in a process that is killed at the end of a commit; returns its status."""

    def run():
        commit = writer.Writer.commit

        def last(self, place):
            run.left -= 1
            commit(self, place)
            if run.left == 0:
                self.parts["train"].append(  # more is written, which nobody knows of
                    writer.Encoded(array("H", range(9)), [0], 9)
                )
                self.parts["train"].flush()
                os.kill(os.getpid(), signal.SIGKILL)

        writer.Writer.commit, run.left = last, commits
        filling.COMMIT_SECONDS = 0
        prepare(*args)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("form", ["lines", "delimiter", "delimiter.gz", "parquet"])
def test_killed_at_any_moment_it_goes_on(form, tmp_path, small):
    source, args = tmp_path / "source", [*BYTES, "--delimiter", "<D>", "--shard-bytes", 3000]
    source.mkdir()
    SOURCES[form](source)
    prepare(source, "--out", tmp_path / "whole", *args)
    out = tmp_path / "out"
    for commits in (1, 4, 17):
        assert killed_after(commits, source, "--out", out, *args) == -signal.SIGKILL
        assert (out / PROGRESS).exists() and not (out / MANIFEST).exists()
    with pytest.raises(ValueError, match="got an unfinished one; the same command goes on"):
        open_folder(out)
    prepare(source, "--out", out, *args)
    assert open_folder(out).digest == open_folder(tmp_path / "whole").digest
    files = [{x.name: x.read_bytes() for x in y.glob("*.*")} for y in (out, tmp_path / "whole")]
    assert files[0] == files[1]


def test_a_full_disk_leaves_nothing_half_written(lines, tmp_path, small, monkeypatch, capsys):
    out, left, write = tmp_path / "out", [3000], writer.Part._write

    def fails(self, path, numbers):
        left[0] -= len(numbers.tobytes())
        if left[0] < 0:
            write(self, path, array("B", numbers.tobytes()[:7]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(self, path, numbers)

    monkeypatch.setattr(filling, "COMMIT_SECONDS", 0)
    with monkeypatch.context() as patched:
        patched.setattr(writer.Part, "_write", fails)
        prepare(lines, "--out", out, *BYTES, code=2)
    assert re.search("No space left on device: .*idx|bin", capsys.readouterr().err)
    known = json.loads((out / PROGRESS).read_text())["parts"]
    for name, part in known.items():
        assert part["documents"] * 8 == (out / f"{name}.idx").stat().st_size
        assert part["tokens"] * 2 == sum(x.stat().st_size for x in out.glob(f"{name}-*.bin"))
    assert 0 < known["train"]["documents"] < 50
    prepare(lines, "--out", out, *BYTES)
    assert sorted(texts_of(out) + texts_of(out, "held_out")) == sorted(TEXTS)


def test_a_signal_stops_it_and_the_same_command_goes_on(lines, tmp_path, small, capsys):
    out, seen = tmp_path / "out", []

    def stop(sentence):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patched:
        append = writer.Part.append
        patched.setattr(
            writer.Part,
            "append",
            lambda self, new: (append(self, new), seen.append(1), len(seen) == 9 and stop("")),
        )
        prepare(lines, "--out", out, *BYTES, code=128 + signal.SIGTERM)
    assert "Stopped. To go on: " in capsys.readouterr().out
    assert json.loads((out / PROGRESS).read_text())["place"]["line"] > 0
    prepare(lines, "--out", out, *BYTES)
    assert "Going on behind" in capsys.readouterr().out
    assert sorted(texts_of(out) + texts_of(out, "held_out")) == sorted(TEXTS)
    prepare(lines, "--out", out, *BYTES)
    assert "is prepared already" in capsys.readouterr().out


def test_a_process_that_was_killed_is_said(lines, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "encode", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        prepare(lines, "--out", tmp_path / "out", *BYTES, code=2)
    assert "got one that was killed, perhaps for its memory" in capsys.readouterr().err
    prepare(lines, "--out", tmp_path / "out", *BYTES)


def test_broken_lines_are_counted_and_said(lines, tmp_path, capsys):
    broken = [
        b"{",
        b"[1]",
        b'{"id": 1}',
        b'{"text": 2}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
    ]
    broken += [b"[" * 100_000, b"3", b"null", b"nan nan", b"x", b"y"]
    (lines / "y.jsonl").write_bytes(b"\n".join(broken) + b"\n\n" + in_lines(["the last"]))
    prepare(lines, "--out", tmp_path / "out", *BYTES)
    output = capsys.readouterr()
    assert "Left out: 12 broken lines" in output.out
    assert "y.jsonl:1: no text under 'text': left out" in output.err
    assert "y.jsonl:2: an array, where a line is to be one object of JSON" in output.err
    assert "more is only counted" in output.err and "y.jsonl:12" not in output.err
    assert "the last" in texts_of(tmp_path / "out") + texts_of(tmp_path / "out", "held_out")


def test_a_long_line_is_never_in_memory(tmp_path):
    file, told = tmp_path / "x.jsonl", []
    file.write_bytes(in_lines(["first"]))
    with file.open("r+b") as opened:
        opened.truncate(1 << 30)  # of which the disk holds the start
        opened.seek(0, os.SEEK_END)
        opened.write(b"\n" + in_lines(["last"]))
    tracemalloc.start()
    try:
        pieces = list(Reader([str(file)], Place(), "text", None, False, 0.0, told.append))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [piece.text for piece in pieces] == ["first", "last"]
    assert [re.sub(".*/", "", x) for x in told] == ["x.jsonl:2: a line of over 16 MiB: left out"]
    assert pieces[-1].after.broken == 1
    assert peak < 64 << 20


def test_files_that_are_not_text_are_left_out_of_a_folder(tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    in_files(source)
    (source / "image").write_bytes(b"\x89PNG\0")
    (source / "empty").touch()
    (source / ".hidden").write_text("hidden")
    (source / "link").symlink_to(source / "03.txt")
    (source / "latin").write_bytes("café".encode("latin-1") + b" au lait")
    os.mkfifo(source / "pipe")
    prepare(source, "--out", tmp_path / "out", *BYTES, code=2)
    assert "latin to be text in UTF-8, got another byte at 3; --skip" in capsys.readouterr().err
    prepare(source, "--out", tmp_path / "new", *BYTES, "--skip-not-utf8")
    assert "Left out: 0 broken lines, 2 files not text" in capsys.readouterr().out
    found = texts_of(tmp_path / "new") + texts_of(tmp_path / "new", "held_out")
    assert sorted(found) == sorted(TEXTS)


def test_held_out_files_of_ones_own(lines, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("held out")
    args = ["--tokenizer", "bytes", "--held-out-files", mine, "--out", tmp_path / "out"]
    prepare(lines, *args)
    assert texts_of(tmp_path / "out") == TEXTS
    assert texts_of(tmp_path / "out", "held_out") == ["held out"]
    prepare(lines, *args, "--held-out", 0.1, code=2)


@pytest.mark.parametrize("inside", ["03.txt", "inner"])
def test_held_out_files_in_a_source_are_not_trained_on(tmp_path, inside):
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    in_files(source)
    (source / "inner" / "a.txt").write_text("far inside")
    args = ["--tokenizer", "bytes", "--held-out-files", source / inside]
    prepare(source, "--out", tmp_path / "out", *args)
    held_out = texts_of(tmp_path / "out", "held_out")
    assert held_out == [TEXTS[3] if inside == "03.txt" else "far inside"]
    assert sorted([*texts_of(tmp_path / "out"), *held_out]) == sorted([*TEXTS, "far inside"])
    prepare(source / inside, "--out", tmp_path / "none", *args, code=2)


def nothing(folder):
    for file in folder.glob("*"):
        file.unlink()


def add(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def two_splits(folder):
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(
        folder
    )


def parquet_of(**columns):
    return lambda folder: parquet.write_table(pyarrow.table(columns), folder / "x.parquet")


REFUSED = {  # what is done to the source, the arguments, and what is said
    "nothing": (nothing, [], "expected documents in the sources, got none$"),
    "broken alone": (add("x.jsonl", b"{\n"), [], "got none; 1 broken ones were left out"),
    "all held out": (None, ["--held-out", 1 - 1e-9], "documents to train on, got 60, all held out"),
    "none held out": (None, ["--held-out", 1e-9], "got none of 60; another --out with a larger"),
    "start of bytes": (
        *(None, ["--document-start", "x"], "--document-start with a tokenizer that is given"),
    ),
    "delimiter": (None, ["--delimiter", ""], "expected --delimiter to be some text, got none"),
    "range": (None, ["--held-out", 0], "expected --held-out to be between 0 and 1, got 0.0"),
    "workers": (None, ["--workers", -1], "expected --workers to be from 1 to 1024, got -1"),
    "column": (parquet_of(a=["x"], b=["y"]), [], "have a column 'text', got a, b; --column names"),
    "no parquet": (add("x.parquet", b"x" * 100), [], "x.parquet to be parquet, got Parquet magic"),
    "cut gz": (add("y.gz", gzip.compress(in_lines())[:-9]), [], "expected .*y.gz to be whole, got"),
    "cut zst": (
        lambda folder: compressed(folder, "y.jsonl.zst", in_lines(), cut=9),
        *([], "expected .*y.jsonl.zst to be whole, got Truncated"),
    ),
    "inside": (None, ["--out", "source/out"], "--out to be outside of the sources, got it in"),
    "splits": (two_splits, [], "got several splits; name one: .*/train"),
    "no tokenizer": (None, ["--tokenizer", "."], "to hold tokenizer.json, got none; transformers"),
    "nowhere": (None, ["--tokenizer", "nowhere"], "No such file or directory: 'nowhere'"),
    "no token": (
        None,
        ["--document-start", "<s>", "--tokenizer", "tokenizer"],
        "to have the token '<s>', got none",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(lines, tmp_path, capsys, monkeypatch, case):
    change, args, message = case
    monkeypatch.chdir(tmp_path)
    if change is not None:
        change(lines)
    if "tokenizer" in args:
        from gla_ext.train.tokens.tokenizer import byte_tokenizer

        byte_tokenizer().save(tmp_path / "tokenizer")
    prepare(lines, "--out", tmp_path / "out", *BYTES, *args, code=2)
    assert re.search("^gla_ext.train.prepare: .*" + message, capsys.readouterr().err, re.MULTILINE)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_going_on_with_something_else_is_refused(lines, tmp_path, capsys):
    out = tmp_path / "out"
    assert killed_after(1, lines, "--out", out, *BYTES) == -signal.SIGKILL
    (out / "progress.json").write_text((out / "progress.json").read_text())
    prepare(lines, "--out", out, *BYTES, "--column", "id", code=2)
    assert "expected --column to be as when" in capsys.readouterr().err
    prepare(lines, "--out", out, "--train-tokenizer", 300, "--held-out", 0.1, code=2)
    assert "expected --tokenizer to be as when" in capsys.readouterr().err
    with (lines / "x.jsonl").open("a") as file:
        file.write("\n")
    prepare(lines, "--out", out, *BYTES, code=2)
    assert "expected SOURCE to be as when" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("kept")
    prepare(lines, "--out", tmp_path / "other", *BYTES, code=2)
    assert "to be a new or empty folder, got" in capsys.readouterr().err
    assert (tmp_path / "other" / "mine.txt").read_text() == "kept"


def test_a_missing_package_is_named(lines, tmp_path, capsys, monkeypatch):
    in_parquet(lines)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    prepare(lines, "--out", tmp_path / "out", *BYTES, code=2)
    error = capsys.readouterr().err
    assert "expected pyarrow to be installed, which reads" in error
    assert "pip install --no-build-isolation -e '.[data]' brings it" in error
