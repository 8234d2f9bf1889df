"""How a run reads prepared corpora: streams over shards, mixing, windows, and what is refused."""

import json
import shutil

import pytest
import torch
from corpora import documents, prepare
from trainers import TINY, run

from gla_ext.model.checkpoint import load_model, read_tensors
from gla_ext.train import command as train
from gla_ext.train.tokens.batches import PERIOD, Mixture, TokenBatches, shuffled
from gla_ext.train.tokens.corpus import absolute, open_corpus
from gla_ext.train.tokens.folder import MANIFEST, Stream, open_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with two corpora of one tokenizer, a and b, and other, of another tokenizer."""
    root = tmp_path_factory.mktemp("made")
    for name, count in (("a", 90), ("b", 40)):
        (root / f"{name}.txt").write_text("<D>".join(documents(count, seed=count)))
    args = ["--delimiter", "<D>", "--held-out", 0.1, "--workers", 1]
    prepare(root / "a.txt", "--out", root / "a", "--train-tokenizer", 300, *args)
    args += ["--shard-bytes", 1000]
    prepare(root / "b.txt", "--out", root / "b", "--tokenizer", root / "a/tokenizer", *args)
    prepare(root / "b.txt", "--out", root / "other", "--tokenizer", "bytes", *args)
    return root


def test_a_stream_is_its_shards_in_a_row(made):
    folder = open_folder(made / "b")
    stream, held_out = folder.train, folder.held_out
    assert len(stream.shards) == 3 and len(stream.shards[0]) == 500
    whole = torch.cat([shard.long() for shard in stream.shards])
    assert len(stream) == len(whole)
    for start, stop in ((0, 0), (0, 1), (499, 501), (3, 1300), (500, 1000), (0, len(whole))):
        assert torch.equal(stream[start:stop], whole[start:stop])
    assert stream[len(whole) - 2 : len(whole) + 9].tolist() == whole[-2:].tolist()
    starts = (whole == folder.tokenizer.document_start).nonzero().flatten()
    assert torch.equal(stream.starts, starts)
    chained = Stream.chain([held_out, stream])
    assert torch.equal(chained[0 : len(chained)], torch.cat([held_out[0 : len(held_out)], whole]))
    assert torch.equal(chained.starts, torch.cat([held_out.starts, starts + len(held_out)]))


@pytest.mark.parametrize("seq_len", [1, 10, 64, 500])
def test_most_documents_is_enough_for_every_window(made, seq_len):
    stream = open_folder(made / "a").train
    starts = torch.zeros(len(stream), dtype=torch.int64)
    starts[stream.starts] = 1
    inside = starts.unfold(0, seq_len, 1).sum(1).max().item()
    assert inside <= stream.most_documents(seq_len) <= inside + 1


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1, 2, 4], [1.0], [0.001, 1, 1]])
def test_shares_are_met_in_any_stretch(weights):
    mixture, count = Mixture(weights), 2 * PERIOD + 123
    which, numbers = zip(*map(mixture, range(count)), strict=True)
    for corpus, weight in enumerate(weights):
        own = [n for c, n in zip(which, numbers, strict=True) if c == corpus]
        assert own == list(range(len(own)))
        for start, stop in ((0, count), (77, 1077), (PERIOD - 500, PERIOD + 500)):
            share = which[start:stop].count(corpus) / (stop - start)
            assert share == pytest.approx(weight / sum(weights), abs=0.01)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_shuffled_is_a_permutation(count):
    order = [shuffled(n, count, b"key") for n in range(count)]
    assert sorted(order) == list(range(count))
    if count > 16:
        assert order != sorted(order) and order != [
            shuffled(n, count, b"other") for n in range(count)
        ]
        assert sum(abs(a - b) for a, b in enumerate(order)) / count > count / 6


def batches(made, seed=0, weights=(3.0, 1.0), seq_len=10, segments=1):
    streams = [open_folder(made / name).train for name in ("a", "b")]
    return TokenBatches(streams, list(weights), 4, seq_len, seed, segments, CPU)


def test_a_pass_sees_every_window_of_a_corpus_once(made):
    stream = open_folder(made / "a").train
    one = TokenBatches([stream], None, 1, 10, 5, 1, CPU)
    (count,) = one.windows
    passes = [[one._start(0, i) for i in range(n * count, (n + 1) * count)] for n in (0, 1)]
    for starts in passes:
        first = min(starts)
        assert sorted(starts) == list(range(first, first + 10 * count, 10))
        assert first + 10 * count + 1 <= len(stream)
    assert passes[0] != passes[1]
    for step in (0, count - 1, count + 3):
        row = stream[(start := (passes[0] + passes[1])[step]) : start + 11][None]
        assert all(map(torch.equal, one(step), (row[:, :-1], row[:, 1:])))


def test_batches_depend_on_seed_and_step_alone(made):
    again, first = batches(made), batches(made)
    in_order = [first(step) for step in range(30)]
    for step in (29, 0, 17):
        assert all(map(torch.equal, again(step), in_order[step]))
    assert not torch.equal(batches(made, seed=1)(0)[0], in_order[0][0])
    whole, parts = batches(made, seq_len=30), batches(made, segments=3)
    rows = [torch.cat(x, 1) for x in zip(*map(parts, range(3, 6)), strict=True)]
    assert all(map(torch.equal, rows, whole(1)))


def data(made, *names):
    return [str(made / name) for name in names]


def cut_short(folder):
    with (folder / "train-00001.bin").open("r+b") as file:
        file.truncate(998)


def without_a_shard(folder):
    (folder / "train-00001.bin").unlink()


def with_another_tokenizer(folder):
    path = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"].pop()
    path.write_text(json.dumps(content))


def of_another_format(folder):
    (folder / MANIFEST).write_text(json.dumps({"format": "x"}))


def not_finished(folder):
    (folder / MANIFEST).rename(folder / "progress.json")


def one_document(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["train"]["documents"] = 1
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (folder / "train.idx").write_bytes(bytes(8))


REFUSED = {
    cut_short: "train-00001.bin to have 1,000 bytes, as corpus.json says, got 998; a copy that was",
    without_a_shard: "train-00001.bin to have 1,000 bytes, as corpus.json says, got no file",
    with_another_tokenizer: "to be the tokenizer of the shards .*, got another one",
    of_another_format: "to be of the format gla_ext.train.prepare/1, got x",
    not_finished: "got an unfinished one; the same command goes on with it",
    one_document: "at least as many documents as processes, 2, got 1",
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_folder_that_is_not_whole_is_refused(made, tmp_path, change):
    folder = shutil.copytree(made / "b", tmp_path / "b")
    change(folder)
    with pytest.raises(ValueError, match=REFUSED[change]):
        open_corpus([str(folder)], processes=2)


def test_what_does_not_mix_is_refused(made):
    with pytest.raises(ValueError, match=r"to have the tokenizer of .*a, got another one"):
        open_corpus(data(made, "a", "other"))
    with pytest.raises(ValueError, match="a weight for every folder of --data or for none"):
        open_corpus(data(made, "a:1", "b"))
    with pytest.raises(ValueError, match=r"a.txt to be a corpus that .* got no corpus\.json"):
        open_corpus(data(made, "a", "a.txt"))
    for weight in ("0", "-1", "nan", "inf"):
        corpus = open_corpus(data(made, "a:1", f"b:{weight}"))
        with pytest.raises(ValueError, match=f"weights of --data to be positive, got {weight}"):
            corpus.batches(1, 10, 0, 1, CPU)
    with pytest.raises(ValueError, match="every weight of --data to be at least 1 / 10000 of all"):
        open_corpus(data(made, "a:1", "b:1e-5")).batches(1, 10, 0, 1, CPU)
    with pytest.raises(ValueError, match="every corpus of --data to have at least 90,001 tokens"):
        open_corpus(data(made, "a", "b")).batches(1, 90_000, 0, 1, CPU)


def test_what_data_names(made, tmp_path, monkeypatch):
    monkeypatch.chdir(made)
    assert absolute(["a:0.7", "b", "c:d"]) == [f"{made}/a:0.7", f"{made}/b", f"{made}/c:d"]
    both = open_corpus(["a:0.7", "b:0.3"])
    assert both.weights == (0.7, 0.3) and both.name == "a:0.7, b:0.3"
    fingerprints = {open_corpus(x).fingerprint for x in (["a"], ["b"], ["a", "b"], ["b", "a"])}
    fingerprints |= {both.fingerprint, open_corpus(["a:0.6", "b:0.4"]).fingerprint}
    assert len(fingerprints) == 6
    shutil.copytree(made / "a", tmp_path / "a:2")
    assert len(open_corpus([str(tmp_path / "a:2")]).folders) == 1
    assert open_corpus(["a.txt"]).vocab_size == 256


def test_packed_windows_of_tokens(made):
    """Documents start where the token says; the bits a byte are of all held-out text."""
    from gla_ext.train.trainer import Settings, Trainer

    corpus = open_corpus(data(made, "a", "b"))
    sizes = {"batch_size": 3, "seq_len": 48, "hidden_size": 16, "layers": 1, "heads": 2, "steps": 3}
    trainer = Trainer(Settings(packed=True, **sizes), corpus, CPU)
    assert trainer.model.config.vocab_size == corpus.vocab_size == 300
    trainer.update()
    nats, size = 0.0, 0
    for folder in corpus.folders:
        stream = folder.held_out
        for start, end in zip(stream.starts, [*stream.starts[1:], len(stream)], strict=True):
            row = stream[start:end][None]
            with torch.no_grad():
                logits = trainer.model(row[:, :-1]).logits[0]
            nats += torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
        size += stream.bytes
    assert trainer.evaluate() == pytest.approx(nats / size / torch.tensor(2.0).log().item(), 1e-5)


def test_a_run_on_corpora_goes_on_as_if_never_stopped(made, tmp_path, capsys):
    mixed = ["--data", *data(made, "a:0.7", "b:0.3"), *TINY, "--packed"]
    run("--out", tmp_path / "whole", *mixed)
    run("--out", tmp_path / "run", *mixed, "--steps", 2, "--lr", 1e-3)
    shutil.rmtree(tmp_path / "run")
    update, left = train.Trainer.update, [3]

    def stopping(self):
        update(self)
        left[0] -= 1
        if left[0] == 0:
            raise ValueError("stopped")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train.Trainer, "update", stopping)
        run("--out", tmp_path / "run", *mixed, "--save-every", 2, code=2)
    capsys.readouterr()
    run("--out", tmp_path / "run", "--resume", "--data", *data(made, "a:7", "b:4"), code=2)
    assert "a checkpoint of other text" in capsys.readouterr().err
    run("--out", tmp_path / "run", "--resume", "--device", "cpu", "--prompt", "日本")
    assert "Going on from step 2 of 6" in capsys.readouterr().out
    files = [read_tensors(tmp_path / x / train.CHECKPOINT)[0] for x in ("run", "whole")]
    for name, tensor in files[0].items():
        assert torch.equal(tensor, files[1][name]), name
    metrics = json.loads((tmp_path / "whole" / "metrics.json").read_text())
    assert metrics["held_out_bits_per_byte"].keys() == {"this model"}
    assert load_model(tmp_path / "run").config.bos_token_id == 0
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("日本")


def test_a_checkpoint_of_0_3_0_names_one_text():
    """Its --data was a path, not a list."""
    metadata = {"format": "gla_ext.train/1", "settings": {"data": "text", "steps": 3}}
    assert train.checkpoint_settings(metadata, "checkpoint").data == ["text"]
