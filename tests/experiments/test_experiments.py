"""The programs of experiments/: their text, their runs and results, and what they draw."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from common import ROOT
from experiment_runs import RUN, result

from experiments import pack, report, run, text
from experiments.comparisons import ablations, budget, mqar
from experiments.comparisons.significance import p_value, paired, welch
from experiments.language import LONGEST, LanguageTrainer, long_documents
from experiments.pack import Document, read_manifest, read_pack, shrink, split, write_pack
from experiments.perform import Worker, perform, text_digest
from experiments.plain_text import plain_text
from experiments.runs import Results, Run, Sweep, best, keep, read_line, spread
from experiments.text import PACK, Source, prose
from gla_ext.train.data import Corpus

CPU = torch.device("cpu")
ON_BYTES = [name for name in run.EXPERIMENTS if not name.startswith("tokens")]


def test_plain_text_leaves_bars_of_links_out():
    html = """<html><head><title>no</title></head><body><div class="navheader big"><p>no<br>no</p>
    </div><h1>A &amp;  b</h1><p>one\n  two <b>three</b>.</p><pre>x  =\n  1</pre>
    <nav><div>no</div></nav><ul><li>four</li></ul><script>no()</script></body></html>"""
    lines = ["A & b", "one two three.", "x  =", "  1", "", "four", ""]
    assert plain_text(html).split("\n") == lines


def test_prose_of_a_package(tmp_path):
    manual = tmp_path / "usr/share/doc/manual"
    (manual / "de").mkdir(parents=True)
    (manual / "1.txt").write_text("first\n")
    (manual / "2.txt").write_text("second\n")
    (manual / "de" / "1.txt").write_text("erstens\n")
    (manual / "3.txt").write_bytes(b"a\0b")
    source = Source("manual", "**/*.txt", skipped=("/de/",))
    (document,) = prose(source, tmp_path)
    assert document == Document("prose", "manual/usr/share/doc/manual", b"first\n\nsecond\n")
    apart = list(prose(Source("manual", "**/*.txt", joined=False), tmp_path))
    assert [document.text for document in apart] == [b"first\n", b"second\n", b"erstens\n"]


def test_a_pack_holds_whole_documents_out(tmp_path, capsys, monkeypatch):
    sizes = {"prose": 200_000, "code": 100_000}
    monkeypatch.setattr(pack, "HELD_OUT_BYTES", sizes)
    documents = [Document("prose", f"p{i}", b"%d " % i * 5000) for i in range(60)]
    documents += [Document("code", f"c{i}", b"%d\n" % i * 5000) for i in range(60)]
    documents += [Document("code", "copy", documents[-1].text)]
    train, held_out = split(documents)
    assert len(train) + len(held_out) == 120  # one of the copies is left out
    assert not {d.name for d in train} & {d.name for d in held_out}
    for kind, size in sizes.items():
        held = sum(len(d.text) for d in held_out if d.kind == kind)
        assert size - 15_000 < held <= size
    path = tmp_path / "text.tar.xz"
    manifest = write_pack(path, documents, {"manual": b"free"}, {"manual": "1.0"})
    assert manifest == read_manifest(path)
    assert manifest["prose_share"] == pytest.approx(0.43, abs=0.1)
    corpus = read_pack(path)
    assert corpus.train == tuple((f"{d.kind}/{d.name}", d.text) for d in train)
    assert corpus.held_out == tuple((f"{d.kind}/{d.name}", d.text) for d in held_out)
    digest = text_digest(path)
    write_pack(path, documents, {"manual": b"free"}, {"manual": "1.0"})
    assert text_digest(path) == digest
    small = tmp_path / "small.tar.xz"
    of_kind = manifest["train"]["prose"]["bytes"], manifest["train"]["code"]["bytes"]
    shrunk = shrink(path, small, sum(of_kind) // 2)
    assert shrunk == read_manifest(small)
    assert shrunk["held_out"] == manifest["held_out"]
    for size, kind in zip(of_kind, ("prose", "code"), strict=True):
        assert size / 2 - 20_000 < shrunk["train"][kind]["bytes"] <= size / 2
    assert read_pack(small).held_out == corpus.held_out
    assert set(read_pack(small).train) < set(corpus.train)
    path.rename(tmp_path / PACK.name)
    command = ["--out", str(tmp_path), "--train-megabytes"]
    assert text.main([*command, "1"]) == 0
    assert "text-small.tar.xz" in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "text-small.tar.xz")
    assert 900_000 < sum(x["bytes"] for x in manifest["train"].values()) <= 10**6
    assert manifest["sources"] == {"manual": "1.0"}
    assert text.main([*command, "0"]) == 2
    assert "expected --train-megabytes to be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match=r"`python -m experiments.text` makes one"):
        read_pack(tmp_path / "nowhere")


def test_a_result_is_a_line(tmp_path):
    keep(result(RUN, 1.25), tmp_path)
    keep(result(RUN, 9.0), tmp_path)  # a run is done once: the first counts
    keep(result(Run(**(vars(RUN) | {"seed": 1})), math.nan), tmp_path)
    lines = (tmp_path / "text.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == [1.25, 9.0, None]
    results = Results([tmp_path])
    assert results[RUN].score == 1.25
    assert math.isnan(read_line(lines[2]).score)
    assert len(list(results)) == 2


def test_the_best_rate_gets_the_other_seeds():
    def make(name: str, lr: float) -> Run:
        return Run(**(vars(RUN) | {"layer": name, "lr": lr}))

    results = Results([])
    rates = (1.0, 2.0, 3.0)
    sweep = Sweep(make, rates, 3, results)
    every = [make(name, lr) for lr in rates for name in ("a", "b")]
    assert list(sweep.runs("ab")) == every
    for lr, score in zip(rates, (5.0, 4.0, math.nan), strict=True):
        results.add(result(make("a", lr), score))
    assert best(sweep.of("b"), results) is None
    assert best(sweep.of("a"), results) == make("a", 2.0)
    seeds = [Run(**(vars(make("a", 2.0)) | {"seed": seed})) for seed in (0, 1, 2)]
    assert list(sweep.runs("ab"))[6:] == seeds[1:]
    assert sweep.chosen("a") == seeds
    assert sweep.rate_of("a") == "2"
    results.add(result(make("b", 1.0), 5.0))
    assert sweep.chosen("b") == []
    so_far = sweep.chosen("b", whole=False)
    assert so_far == [replace(make("b", 1.0), seed=seed) for seed in (0, 1, 2)]
    assert sweep.rate_of("b") == "1 (best of 1)"
    recall = [Run(**(vars(make("a", lr)) | {"task": "recall"})) for lr in rates]
    for of, score in zip(recall, (0.5, 0.9, 0.7), strict=True):
        results.add(result(of, score))
    assert best(recall, results) == recall[1]  # of accuracies the highest


def test_means_and_significance():
    assert spread([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert spread([1.0], 2) == "1.00 (n = 1)"
    assert spread([]) == ""
    assert spread([math.nan, math.nan]) == "(n = 0, 2 diverged)"
    # Of equal variances and sizes t has 2 n - 2 degrees: t = 2.776 is the 5 % point of 4.
    a = [0.0, 1.0, 2.0]
    b = [x + 2.7764451 * math.sqrt(2 / 3) for x in a]
    assert welch(a, b) == pytest.approx(0.05, abs=1e-6)
    assert welch(a, a) == pytest.approx(1)
    assert welch([1.0, 1.0], [1.0, 1.0]) == 1
    # Of differences of the same three runs it has 2: t = 4.303.
    distance = 4.3026527 * 0.01 / math.sqrt(3)
    assert paired(a, [0.0 + distance - 0.01, 1.0 + distance, 2.0 + distance + 0.01]) == (
        pytest.approx(0.05, abs=1e-6)
    )
    assert paired(a, a) == 1 and paired(a, [1.0, 2.0, 3.0]) == 0
    assert p_value([1.0], a) == ""
    assert p_value([100.0, 100.1, 100.2], a) == "< 0.001"


def test_bits_by_position_are_those_of_each_document():
    texts = [bytes([97 + i]) * 40 + b"xyz" * (60 + i) for i in range(3)]
    corpus = Corpus("texts", (("t", b"some text " * 30),), tuple((str(t[0]), t) for t in texts))
    rows, tokens_per_byte = long_documents(corpus)
    assert tokens_per_byte == 1
    assert rows.shape == (1, 227)  # the longest is under LONGEST: only it is so long
    assert len(texts[2]) + 1 == 227 < LONGEST
    trainer = LanguageTrainer(RUN, corpus, CPU)
    stretches = trainer.bits_by_position()
    assert [start for start, _ in stretches] == list(range(0, 226, 3))
    row = torch.tensor([0, *texts[2]])
    with torch.no_grad():
        log_p = trainer.model(row[None, :-1]).logits[0].double().log_softmax(-1)
    bits = -log_p.gather(-1, row[1:, None])[:, 0] / math.log(2)
    assert stretches[1][1] == pytest.approx(bits[3:6].mean().item(), rel=1e-5)


def test_a_run_that_diverges_has_no_score():
    diverging = Run(**(vars(RUN) | {"lr": math.inf, "steps": 100, "text": text_digest(None)}))
    assert math.isnan(perform(diverging, None, CPU).score)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of all tiny runs, done by two calls of the command, and what these said. The first
    shares its runs out to two devices."""
    out = tmp_path_factory.mktemp("results")
    command = ["--scale", "tiny", "--jobs", "2", "--out", str(out), "--minutes", "60"]
    assert run.main(["ablations", *command, "--device", "cpu", "cpu:0"]) == 0
    first = (out / "text.jsonl").read_text()
    assert run.main([*command, "--device", "cpu"]) == 0
    return out, first


@pytest.mark.slow
def test_a_run_done_is_not_done_again(finished, capsys):
    out, first = finished
    lines = (out / "text.jsonl").read_text()
    assert lines.startswith(first)
    keys = [read_line(line).run.key for line in lines.splitlines()]
    assert len(keys) == len(set(keys))
    command = ["--scale", "tiny", "--device", "cpu", "--out", str(out)]
    assert run.main([*command, "--list"]) == 0
    assert capsys.readouterr().out == ""
    assert run.main(command) == 0
    assert "0 results" in capsys.readouterr().out
    assert (out / "text.jsonl").read_text() == lines


@pytest.mark.slow
def test_every_run_of_every_experiment_is_done(finished):
    results, text = Results([finished[0]]), text_digest(None)
    for name in ON_BYTES:
        found = list(run.EXPERIMENTS[name].runs("tiny", results, text))
        assert bool(found) == (name not in ("budget_128", "budget_64"))  # harder tasks alone
        assert all(of in results for of in found)
    layers = {of.run.layer for of in results if of.run.task == "recall"}
    assert layers == {*mqar.LAYERS, *budget.LAYERS}
    seeds = {of.run.seed for of in results}
    assert seeds == {0, 1}
    for of in results:
        assert of.details["steps_done"] == of.run.steps in (1, 2)
        assert of.details["command"].startswith("python -m experiments.run")


@pytest.mark.slow
def test_figures_come_from_the_results_alone(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__call__", None)  # nothing may be trained
    page = tmp_path / "page.md"
    drawn = []
    for _ in range(2):
        page.write_text((ROOT / "docs" / "experiments.md").read_text())
        arguments = ["--results", str(finished[0]), "--page", str(page), "--scale", "tiny"]
        assert report.main(arguments) == 0
        drawn.append({file.name: file.read_bytes() for file in tmp_path.iterdir()})
    assert drawn[0] == drawn[1]
    names = ("mqar", "length", "budget_16", "budget_32")
    assert drawn[0].keys() == {"page.md", *(f"experiments_{name}.png" for name in names)}
    text = page.read_text()
    assert text.count(report.NOTHING) == 5  # runs on tokens, tasks that the scale does not have
    for name in ablations.VARIANTS:
        assert re.search(rf"^\| {name} \| \d+\.\d\d \| \d\.\d{{4}} ± ", text, re.MULTILINE)
    assert report.main(["--results", str(tmp_path / "none"), "--page", str(page)]) == 2
    assert page.read_text() == text
    page.write_text("no marks")
    assert report.main(["--results", str(finished[0]), "--page", str(page)]) == 2


TINY = ["--scale", "tiny", "--device", "cpu"]
BROKEN = replace(RUN, layer="no such layer", text=text_digest(None))
COMMANDS = {  # arguments, status, and what is said
    "cut off": ([*TINY, "--minutes", "0"], 0, ["0 results"]),
    "failed": (
        ["ablations", *TINY],
        1,
        ["KeyError: 'no such layer'", "0 results", "1 failed; 1 runs are still to be done"],
    ),
    "jobs": ([*TINY, "--jobs", "0"], 2, ["--jobs to be at least 1"]),
    "minutes": ([*TINY, "--minutes", "nan"], 2, ["--minutes a number"]),
    "experiment": (
        ["nothing"],
        2,
        ["expected experiments of mqar, ablations, length, value_gates"],
    ),
    "text": (
        ["length", "--device", "cpu", "--text", "none"],
        2,
        ["`python -m experiments.text` makes one"],
    ),
}


@pytest.mark.parametrize("case", COMMANDS.values(), ids=COMMANDS)
def test_what_is_not_done_is_not_kept(tmp_path, capsys, monkeypatch, case):
    args, status, said = case
    monkeypatch.setattr(ablations, "runs", lambda *of: iter([BROKEN]))
    assert run.main([*args, "--out", str(tmp_path)]) == status
    written = capsys.readouterr()
    assert all(x in written.out + written.err for x in said)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_has_failed_all_its_runs():
    """Also those that it has not read, and those that it is given after its end."""
    runs = [Run(**(vars(RUN) | {"seed": seed})) for seed in range(2)]
    worker = Worker({}, "cpu", False)
    worker.start(runs[0])
    worker._process.kill()
    expected = "its process ended with status -9"
    assert worker.results() == [(runs[0], expected)]
    worker.start(runs[1])
    assert worker.results() == [(runs[1], expected)]
    assert not worker.running
    worker.end()


@pytest.mark.parametrize("operators, devices", [("cuda", ["cuda:0", "cuda:1"]), ("cpu", ["cpu"])])
def test_devices(operators, devices, monkeypatch):
    """All GPUs, but not of a build without operators for these."""
    monkeypatch.setattr(run, "default_device", lambda: operators)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert run._devices("auto") == devices
    assert run._devices("cuda:1") == ["cuda:1"]
