"""Runs on tokens: their corpus, their scores, rows in a row, and the whole budget of recall."""

import math
from dataclasses import replace

import pytest
import torch
from experiment_runs import RUN, result

from experiments import pretraining, report, run
from experiments.comparisons import budget, mqar, tokens
from experiments.language import LanguageTrainer, long_documents
from experiments.pack import Document, write_pack
from experiments.perform import perform, text_digest
from experiments.runs import Results, read_line
from gla_ext.train.data import Corpus
from gla_ext.train.tokens.corpus import TokenCorpus
from gla_ext.train.tokens.folder import open_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus of 280 tokens."""
    root = tmp_path_factory.mktemp("tokens")
    texts = [(f"some words {i} and more of them, " * (5 + i)).encode() for i in range(12)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.pack.HELD_OUT_BYTES", {"prose": 1500, "code": 0})
        documents = [Document("prose", str(i), text) for i, text in enumerate(texts)]
        write_pack(root / "pack.tar.xz", documents, {}, {})
    command = ["--text", root / "pack.tar.xz", "--data", root / "corpus", "--vocabulary", 280]
    assert pretraining.main(["corpus", *map(str, command)]) == 0
    return root / "corpus"


def test_scores_on_tokens_are_bits_a_byte(folder):
    corpus = TokenCorpus((open_folder(folder),))
    trainer = LanguageTrainer(replace(RUN, vocabulary=280), corpus, CPU)
    stream, start, T = trainer.held_out, corpus.document_start, RUN.seq_len
    held_out = stream[0 : len(stream)]
    nats = count = 0
    for first in range(0, len(held_out) - T, T):
        row = held_out[first : first + T + 1]
        with torch.no_grad():
            log_p = trainer.model(row[None, :-1]).logits[0].double().log_softmax(-1)
        asked = row[1:] != start
        nats -= log_p.gather(-1, row[1:, None])[asked].sum().item()
        count += int(asked.sum())
    documents = (held_out == start).sum().item()
    per_byte = (len(held_out) - documents) / stream.bytes
    by_position = trainer.bits_by_position()
    assert trainer.score(by_position) == pytest.approx(nats / count * per_byte / math.log(2), 1e-5)
    rows, ratio = long_documents(corpus)
    assert (rows[:, 0] == start).all() and not (rows[:, 1:] == start).any()
    read = sum(len(corpus.text_of(row[1:].tolist()).encode()) for row in rows)
    assert ratio == pytest.approx(rows[:, 1:].numel() / read) and ratio < 0.9
    whole = sum(bits for _, bits in by_position) / len(by_position)
    assert whole == pytest.approx(math.log2(280) * ratio, rel=0.2)  # of a new model


def test_rows_in_a_row():
    """Rows that follow each other are the parts of the longer rows of the same seed."""
    text = bytes(range(1, 251)) * 40
    corpus = Corpus("bytes", (("a", text),), (("b", text[:300]),))
    sizes = {"batch_size": 8, "seq_len": 16}
    near = LanguageTrainer(replace(RUN, **sizes, consecutive=4), corpus, CPU)
    far = LanguageTrainer(replace(RUN, batch_size=2, seq_len=64), corpus, CPU)
    for step in range(3):
        for x, y in zip(near.batches(step), far.batches(step), strict=True):
            assert x.shape == (8, 16)
            assert torch.equal(x, y.reshape(8, 16))


def test_runs_on_tokens_from_the_command_to_the_page(folder, tmp_path, capsys, monkeypatch):
    digest = text_digest(folder)
    variants = {name: tokens.VARIANTS[name] for name in ("GLA, 4 heads", "Transformer++")}
    monkeypatch.setitem(run.EXPERIMENTS, "tokens_8k", replace(tokens.AT_8K, variants=variants))
    command = ["tokens_8k", "--scale", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert run.main(command) == 2
    assert "--vocabulary N` makes one" in capsys.readouterr().err
    assert run.main([*command, "--tokens", str(folder), "--minutes", "9"]) == 0
    lines = (tmp_path / "text.jsonl").read_text().splitlines()
    done = [read_line(line) for line in lines]
    assert len(done) == 2 * (2 + 1)
    assert {(of.run.vocabulary, of.run.text) for of in done} == {(280, digest)}
    assert [of.score for of in done] == [perform(of.run, folder, CPU).score for of in done]
    results = Results([tmp_path])
    assert report.most_frequent_texts(results) == {280: digest}
    page = run.EXPERIMENTS["tokens_8k"].report("tiny", results, digest, tmp_path)
    row = next(line for line in page.splitlines() if line.startswith("| GLA, 4 heads | 14.73 | "))
    best = [of for of in done if (of.run.layer, of.run.lr) == ("gla", 4e-3)]
    shown = sum(2**of.score for of in best) / 2
    assert float(row.split(" | ")[2].split(" ")[0]) == pytest.approx(shown, abs=1e-4)
    parameters = done[0].details["parameters"]
    without = (parameters - 2 * 280 * 16) / 1e6
    assert f"({without:.2f} M without embeddings)" in row


def test_the_whole_budget_is_for_what_was_not_learned(tmp_path, monkeypatch):
    size, results, panels = mqar.SCALES["full"], Results([]), []
    figure = budget.figure
    monkeypatch.setattr(budget, "figure", lambda at, n: panels.append(n) or figure(at, n))
    hardest, other = run.EXPERIMENTS["budget_512"], run.EXPERIMENTS["budget_256"]
    while todo := [of for of in mqar.runs("full", results, "") if of not in results]:
        for of in todo:
            learned = of.layer == "gla" or (of.layer == "attention" and of.width > 64)
            results.add(result(of, 0.992 if learned else 0.7))
    first = list(hardest.runs("full", results, ""))
    assert {of.layer for of in first} == set(budget.LAYERS)
    assert {of.steps for of in first} == {50_000} and {of.pairs for of in first} == {64}
    assert len(first) == len(budget.LAYERS) * len(size.widths) * len(budget.RATES["full"])
    column = first[: len(first) // len(size.widths)]  # complete before the next width
    assert {of.width for of in column} == {budget.FIRST_WIDTH}
    assert {of.steps for of in run.EXPERIMENTS["budget_64"].runs("full", results, "")} == {12_500}
    assert {of.layer for of in other.runs("full", results, "")} == {*budget.LAYERS} - {"gla"}
    for of in first:
        if of == column[0]:  # one width is drawn without the others
            assert hardest.report("full", results, "", tmp_path) == ""
        results.add(result(of, 0.5 + (of.lr == 2.2e-3) / 4, accuracies=[[50_000, 0.5]]))
        if of == column[0]:
            assert "best of 1" in hardest.report("full", results, "", tmp_path)
    after = [of for of in hardest.runs("full", results, "") if of not in results]
    assert {(of.lr, of.seed) for of in after} == {(2.2e-3, 1), (2.2e-3, 2)}
    for of in after:
        results.add(result(of, 0.75 + of.seed / 100, accuracies=[[50_000, 0.75]]))
    page = hardest.report("full", results, "", tmp_path)
    assert panels == [1, 2]  # widths are drawn if there are two
    for of in other.runs("full", results, ""):  # not of every layer at every width
        results.add(result(of, 0.5, accuracies=[[25_000, 0.5]]))
    assert other.report("full", results, "", tmp_path) and panels.pop() == 2
    assert "| GLA | 0.760 ± 0.010 at 0.0022 |" in page
    assert (tmp_path / "experiments_budget_512.png").is_file()
    assert hardest.report("full", Results([]), "", tmp_path) == ""


def test_a_run_that_has_solved_the_task_stays_in_the_curve():
    runs = [[1, 0.2], [2, 0.992]], [[1, 0.1], [2, 0.3], [3, 0.6]]
    assert budget._curve(runs) == {1: [0.2, 0.1], 2: [0.992, 0.3], 3: [0.992, 0.6]}


def test_an_estimate_is_of_a_run_that_does_not_end_early():
    of = next(iter(run.EXPERIMENTS["budget_512"].runs("full", Results([]), "")))
    results = Results([])
    results.add(result(of, 0.995, seconds=20.0, steps_done=of.steps // 10))
    assert run.estimated_seconds(replace(of, seed=1), results) == pytest.approx(200)


def test_long_runs_share_a_gpu_with_few():
    """So that each ends within a call of ten minutes, unless it is longer alone."""
    runs = list(run.EXPERIMENTS["budget_512"].runs("full", Results([]), ""))
    seconds = {of: run.estimated_seconds(of, Results([])) for of in runs}
    assert all(of < 560 or run.share(key) == 1 for key, of in seconds.items())
    assert all(
        run.share(of) * run.LONGEST_RUN >= run._alone(of) * 0.999 or run.share(of) == 1
        for of in runs
    )
    narrow = next(of for of in runs if (of.layer, of.width) == ("gla", 128))
    assert 1 / 8 < run.share(narrow) < 1 / 4


def test_lengths_on_tokens(tmp_path):
    """Mamba, without a state here, is not trained in segments."""
    lengths, results = run.EXPERIMENTS["tokens_length"], Results([])
    curve = [[place * 256, 1.5] for place in range(64)]
    for of in lengths.runs("full", results, "digest"):
        results.add(result(of, 1.5, by_position=curve))
    trained = {(of.run.layer, of.run.seq_len, of.run.segments) for of in results}
    assert {of.run.vocabulary for of in results} == {32_000}
    assert {of.run.seq_len * of.run.batch_size for of in results} == {2048 * 8}
    assert ("mamba", 8192, 1) in trained and ("mamba", 2048, 12) not in trained
    assert ("gla", 2048, 12) in trained
    page = lengths.report("full", results, "digest", tmp_path)
    assert f"| Mamba | 8K | {' | '.join(['1.500 ± 0.000'] * 4)} | 0.002 | 3 |" in page
    assert (tmp_path / "experiments_length_tokens.png").is_file()
