"""The text: split by file, windows from (seed, step) alone, what other coders pay for it."""

import errno
import hashlib
import lzma
import math
import os
import random
import tracemalloc
from pathlib import Path

import pytest
import torch

from gla_ext.train import data
from gla_ext.train.data import Batches, Corpus, encode, load_corpus


def test_split_is_by_file_disjoint_and_repeatable(folder, corpus):
    parts = [dict(corpus.train), dict(corpus.held_out)]
    assert not parts[0].keys() & parts[1].keys()
    assert all(parts)
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.txt")}
    assert parts[0] | parts[1] == files
    assert load_corpus(folder) == corpus


def test_fingerprint_sees_every_change(folder, corpus):
    fingerprints = {corpus.fingerprint, load_corpus(folder).fingerprint}
    assert len(fingerprints) == 1
    (folder / "5.txt").write_bytes((folder / "5.txt").read_bytes()[:-1] + b"!")
    fingerprints.add(load_corpus(folder).fingerprint)
    (folder / "5.txt").rename(folder / "five.txt")
    fingerprints.add(load_corpus(folder).fingerprint)
    swapped = Corpus("", corpus.held_out, corpus.train)
    fingerprints.add(swapped.fingerprint)
    for name in (b"caf\xe9.txt", b"caf\xe8.txt"):  # names need not be UTF-8
        (folder / os.fsdecode(name)).write_bytes(b"au lait")
        split = load_corpus(folder)
        assert (os.fsdecode(name), b"au lait") in split.train + split.held_out
        fingerprints.add(split.fingerprint)
        (folder / os.fsdecode(name)).unlink()
    assert len(fingerprints) == 6
    # Older checkpoints have this one.
    split = Corpus("", (("caf\N{LATIN SMALL LETTER E WITH ACUTE}", b"au lait"),), (("b", b"x"),))
    expected = b"part5 7 caf\xc3\xa9au laitpart1 1 bx"
    assert split.fingerprint == hashlib.sha256(expected).hexdigest()


def test_held_out_size(monkeypatch):
    documents = [(str(i), bytes([65]) * 1000) for i in range(200)]
    assert len(data._split("", documents).held_out) == 6  # 3 % of 200,000 bytes
    monkeypatch.setattr(data, "MAX_HELD_OUT_BYTES", 2999)
    assert len(data._split("", documents).held_out) == 2
    large = [("a", b"a" * 50), ("b", b"b" * 40), ("c", b"c" * 60)]
    assert data._split("", large).held_out == (("b", b"b" * 40),)


def test_what_is_not_text_is_left_out(folder, corpus):
    (folder / "image").write_bytes(b"\x89PNG\x00\x01")
    (folder / "empty").touch()
    (folder / "link").symlink_to(folder / "3.txt")
    os.mkfifo(folder / "pipe")
    (folder / ".hidden").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    assert load_corpus(folder) == corpus


def test_a_file_is_split_at_its_tail_and_a_folder_of_it_too(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(1, 251)) * 4)
    split, alike = load_corpus(file), load_corpus(tmp_path)
    assert (split.train, split.held_out) == (alike.train, alike.held_out)
    assert split.train == (("book.txt[:970]", file.read_bytes()[:970]),)
    assert split.held_out == (("book.txt[970:]", file.read_bytes()[970:]),)


def test_default_text_is_the_standard_library():
    split = load_corpus()
    names = [name for name, _ in split.train + split.held_out]
    assert "Python" in split.name
    assert "functools.py" in names
    assert all(name.endswith(".py") for name in names)
    assert not any("test" in name.split("/")[:-1] or "site-packages" in name for name in names)
    assert sum(len(text) for _, text in split.train) > 4_000_000
    assert 50_000 < sum(len(text) for _, text in split.held_out) <= 128 << 10


def test_pipes_and_links_to_themselves_are_refused(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(link)
    for path in (pipe, Path(os.devnull)):
        with pytest.raises(ValueError, match="to be a text file, got a pipe, socket, folder or"):
            load_corpus(path)
    with pytest.raises(ValueError, match="to be a text file, got a link to itself"):
        load_corpus(link)


def test_more_than_fits_is_left_out_and_counted(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(b"text" * 250)
    split = load_corpus(file, max_bytes=600)
    assert split.train[0][1] + split.held_out[0][1] == b"text" * 150
    assert split.left_out == 400
    for i in range(9):
        (tmp_path / f"{i}.txt").write_bytes(b"text" * 25)
    (tmp_path / "weights").write_bytes(b"\x00" * 1000)
    split = load_corpus(tmp_path, max_bytes=850)
    assert sum(len(text) for _, text in split.train + split.held_out) == 800
    assert split.left_out == 1100
    assert load_corpus(tmp_path).left_out == 0
    with pytest.raises(ValueError, match="to hold text files that fit, got none"):
        load_corpus(tmp_path, max_bytes=99)


def test_a_large_text_takes_little_memory(tmp_path):
    (tmp_path / "small").write_bytes(b"text" * 1000)
    with (tmp_path / "large").open("wb") as file:
        file.write(b"text" * (1 << 14))
        file.truncate(1 << 28)  # 256 MiB, of which the disk holds the start
    tracemalloc.start()
    try:
        split = load_corpus(tmp_path, max_bytes=1 << 20)
        assert load_corpus(tmp_path / "large", max_bytes=1 << 16).left_out == (1 << 28) - (1 << 16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert split.left_out == 1 << 28
    assert peak < 4 << 20


def test_a_folder_that_cannot_be_read_is_an_error(folder, monkeypatch):
    scandir = os.scandir

    def denied(path):
        if Path(path).name == "sub":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PermissionError, match="sub"):
        load_corpus(folder)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, FileNotFoundError, "text"),
        (b"a\x00b", ValueError, "to be text, got a file with NUL bytes"),
        (b"a", ValueError, "at least 2 bytes of text, got 1"),
        ([], ValueError, "to hold text files, got none"),
        ([b"a\x00b"], ValueError, "to hold text files, got none"),
        ([b"a"], ValueError, "at least 2 bytes of text, got 1"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, content, error, message):
    path = tmp_path / "text"
    if isinstance(content, list):
        path.mkdir()
        for i, text in enumerate(content):
            (path / str(i)).write_bytes(text)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        load_corpus(path)


def test_encode_puts_a_zero_before_each_document():
    assert encode((("a", b"xy"), ("b", b"z"))).tolist() == [0, 120, 121, 0, 122]


def test_order0_of_a_known_case():
    held_out = (("", b"ab"),)
    expected = -(math.log2(4 / 260) + math.log2(2 / 260)) / 2
    actual = data.order0_bits_per_byte((("", b"aaab"),), held_out)
    assert actual == pytest.approx(expected, rel=1e-12)
    even = (("", bytes(range(1, 256)) * 1000),)
    assert data.order0_bits_per_byte(even, held_out) == pytest.approx(math.log2(255), abs=1e-4)


def test_lzma_of_known_cases():
    noise = tuple((str(i), random.Random(i).randbytes(4000)) for i in range(2))
    assert 8 < data.lzma_bits_per_byte(noise) < 8.2
    assert data.lzma_bits_per_byte((("", b"a" * 100_000),)) < 0.05
    assert data.lzma_bits_per_byte(noise + noise) < 4.2  # across documents
    assert data.lzma_bits_per_byte(noise[:1]) <= 8 * len(lzma.compress(noise[0][1])) / 4000


def test_batches_depend_on_seed_and_step_alone():
    stream = torch.arange(1003) % 251
    batches = Batches(stream, 3, 10, seed=5)
    in_order = [batches(step) for step in range(80)]
    for step in (79, 0, 33, 34):
        for got, wanted in zip(Batches(stream, 3, 10, seed=5)(step), in_order[step], strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(batches(step)[0], in_order[step][0])
    assert not torch.equal(Batches(stream, 3, 10, seed=6)(0)[0], in_order[0][0])


def test_any_two_seeds_and_epochs_differ():
    """A CPU's generator reads 32 bits of a seed."""
    stream, seeds = torch.arange(1003) % 251, (0, 1, 4096, 2**43, 2**44, 2**63 - 1, 2**64 - 1, -1)
    batches = [Batches(stream, 25, 10, seed)(step)[0] for seed in seeds for step in (0, 4)]
    assert len({tuple(x.flatten().tolist()) for x in batches}) == 2 * len(seeds)
    # Small seeds keep their batches, so that runs go on from older checkpoints.
    generator = torch.Generator().manual_seed((7 << 20) + 1)
    shift = torch.randint(3, (1,), generator=generator)
    order = torch.randperm(100, generator=generator)
    starts = Batches(torch.arange(1003), 100, 10, seed=7)(1)[0][:, 0]
    assert torch.equal(starts, order * 10 + shift)


def test_an_epoch_sees_every_window_once():
    batches = Batches(torch.arange(1003), 4, 10, seed=0)
    windows, starts = [batches(step) for step in range(50)], []
    for inputs, targets in windows:
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal(inputs[:, -1] + 1, targets[:, -1])
        starts += inputs[:, 0].tolist()
    for epoch in (starts[:100], starts[100:]):
        assert sorted(epoch) == list(range(min(epoch), min(epoch) + 1000, 10))
    assert starts[:100] != starts[100:]


def test_batches_need_one_window():
    with pytest.raises(ValueError, match=r"at least seq_len \+ 1 = 33 tokens, got 32"):
        Batches(torch.zeros(32), 1, 32, 0)
