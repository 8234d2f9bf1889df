"""The page while runs are missing: how many there are, and nothing concluded of too few."""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
from experiment_runs import result as made_up

from experiments import report, run
from experiments.comparisons import ablations, length, transformer, value_gates
from experiments.comparisons.significance import holm, order, verdict
from experiments.runs import Results, foreseen

TEXT = "digest"
TEXTS = {0: TEXT}
SIZE = ablations.SCALES["full"]
CURVE = [[place * 512, 2.0 - place / 100] for place in range(64)]
RATES = len(SIZE.rates)
# Of runs: of each variant a sweep, and two seeds more.
COUNTS = {"ablations": 6, "value_gates": 4, "length": 9, "transformer": 5}
COUNTS = {name: variants * (RATES + 2) for name, variants in COUNTS.items()}
GATES = {"gla": 1.0, "gla, values too": 1.1, "values alone": 1.2, "no gate": 1.3}
LEVELS = {name: 1.0 + place / 10 for place, name in enumerate(ablations.VARIANTS)}


def result(of, score):
    return made_up(of, score, by_position=CURVE if math.isfinite(score) else [])


def score(of):
    """Of ablations: levels far apart, seeds close together, the middle rate best."""
    name = next(
        (
            n
            for n, (layer, heads, _) in ablations.VARIANTS.items()
            if (layer, heads) == (of.layer, of.heads)
        ),
        "no gate",
    )
    return LEVELS[name] + of.seed / 1000 + abs(of.lr - 2e-3)


def perform(results, names, count, score=score):
    """Does the next runs, as `python -m experiments.run` would."""
    for _ in range(count):
        todo = run.pending(names, "full", results, TEXTS)
        results.add(result(todo[0], score(todo[0])))


def test_ablations_of_one_seed(tmp_path):
    results = Results([])
    perform(results, ["ablations"], 6)
    page = ablations.report("full", results, TEXT, tmp_path)
    rows = page.splitlines()[2:8]
    assert [row.split(" | ")[0][2:] for row in rows] == sorted(
        ablations.VARIANTS, key=lambda name: ablations.VARIANTS[name][2]
    )
    assert rows[1] == "| GLA, 4 heads | 14.77 | 1.0000 (n = 1) |  | 0.002 (best of 1) | 14.00 M |"
    assert page.splitlines()[8:] == ["", "Of fewer than two seeds nothing is concluded."]
    said = report.progress("ablations", "full", results, TEXT)
    assert said == f"6 of {COUNTS['ablations']} runs are done, 0.06 hours added up."


def test_ablations_of_some_seeds(tmp_path):
    results = Results([])
    perform(results, ["ablations"], 6 * RATES + 3)  # GLA, no gate and constant decay have two seeds
    page = ablations.report("full", results, TEXT, tmp_path)
    assert re.search(r"^\| no gate \| 23.21 \| 1.1005 ± 0.0007 \(n = 2\) \| < 0.001 \|", page, re.M)
    assert re.search(r"^\| GLA, 8 heads \| 15.29 \| 1.4000 \(n = 1\) \|  \| 0.002 \|", page, re.M)
    last = page.splitlines()[-1]
    assert last.startswith(
        "Beside GLA, 4 heads, at 5% after Holm's correction (comparisons: 2): worse (constant "
        "scalar decay; no gate). Of one seed, so nothing is concluded: GLA, 1 head; GLA, 8 heads; "
        "data-dependent scalar gate. Other than in the paper's order, by the means: no gate before "
        "constant scalar decay (p "
    )
    perform(results, ["ablations"], 9)
    page = ablations.report("full", results, TEXT, tmp_path)
    assert "(n =" not in page and "(comparisons: 5)" in page and "one seed" not in page
    assert not run.pending(["ablations"], "full", results, TEXTS)
    said = report.progress("ablations", "full", results, TEXT)
    assert said.startswith(f"All {COUNTS['ablations']} runs are done")


def test_gates_on_values_stand_beside_the_paper_s(tmp_path):
    """v3's Table 2, and whether the means are in its order."""
    results = Results([])
    count = COUNTS["value_gates"]
    perform(results, ["value_gates"], count, lambda of: GATES[of.layer] + of.seed / 1000)
    page = value_gates.report("full", results, TEXT, tmp_path)
    assert [re.split(r" *\| *", row)[1:4] for row in page.splitlines()[2:6]] == [
        ["α, keys", "14.73", "1.0010 ± 0.0010"],
        ["α and β, keys and values", "14.86", "1.1010 ± 0.0010"],
        ["β, values", "15.15", "1.2010 ± 0.0010"],
        ["none", "23.21", "1.3010 ± 0.0010"],
    ]
    assert " The order of the means is the paper's." in page


def eight_diverge(of):
    return math.nan if of.heads == 8 else score(of)


def constant_at_an_end(of):
    return of.lr if of.layer == "constant" else score(of)


SWEEP = (6 * RATES, score)
ABLATIONS = {  # runs and their scores, and what the page says
    "diverged": (
        [SWEEP, (12, eight_diverge)],
        [
            "| GLA, 8 heads | 15.29 | 1.4000 (n = 1, 2 diverged) |  |",
            "Of one seed, so nothing is concluded: GLA, 8 heads.",
        ],
    ),
    "a rate at an end": (
        [(6 * RATES, constant_at_an_end)],
        [
            "At an end of the sweep, beyond which a rate might be better: constant scalar decay "
            "(0.001)."
        ],
    ),
}


@pytest.mark.parametrize("case", ABLATIONS.values(), ids=ABLATIONS)
def test_what_a_page_says_of_ablations(tmp_path, case):
    results = Results([])
    for count, scores in case[0]:
        perform(results, ["ablations"], count, scores)
    page = ablations.report("full", results, TEXT, tmp_path)
    assert all(said in page for said in case[1])


def test_results_of_another_text_and_runs_that_were_performed_again():
    results = Results([])
    perform(results, ["ablations"], 6)
    others = [result(replace(of.run, text="other"), 1.0) for of in list(results)[:2]]
    for other in others:
        results.add(other)
    assert report.most_frequent_texts(results) == TEXTS
    said = report.summary(results, TEXTS)
    assert said.startswith("8 runs on GPU, 0.1 hours") and said.endswith(
        "; 2 of them read another text and are in no table."
    )
    a, b, c = before = list(results)[:3]
    d = others[0]
    for of, score in [(a, a.score + 0.01), (b, b.score - 0.03), (c, math.nan), (d, 9.0)]:
        results.add(result(of.run, score))
    assert [pair[0].run for pair in results.repeats] == [of.run for of in (a, b, c, d)]
    assert list(results)[:3] == before
    assert report.summary(results, TEXTS).endswith(
        " 2 runs on text were performed again, with the same seed: their scores are 0.020 bits a "
        "byte apart on average, 0.030 at most."
    )


def test_long_prose_is_broken_and_rows_are_not():
    prose, row = "some words, again and again; " * 9, "| cell " * 40 + "|"
    text = f"![a figure](page.png)\n\n{row}\n\n{prose}"
    lines = report.wrapped(text).splitlines()
    assert lines[:4] == ["![a figure](page.png)", "", row, ""]
    assert len(lines) > 5 and max(map(len, lines[4:])) <= 138
    assert " ".join(lines[4:]).split() == prose.split()


def test_lengths_while_sweeps_go_on(tmp_path):
    results = Results([])
    perform(results, ["length"], 2, lambda of: 1.5)
    page = length.report("full", results, TEXT, tmp_path)
    cells = "1.965 | 1.885 | 1.765 | 1.525"
    assert f"| GLA | 2K | {cells} | 0.002 (best of 1) | 1 |" in page.splitlines()
    assert (tmp_path / "experiments_length.png").is_file()
    results = Results([])
    perform(results, ["length"], 9 + 1, lambda of: math.nan if of.segments > 1 else 1.5)
    page = length.report("full", results, TEXT, tmp_path)
    assert "12 x 2K" not in page and page.endswith("Runs that diverged, which are in no row: 2.")
    assert "| Transformer++ | 8K | " in page
    for seed in (1, 2):  # of a sweep that is not done
        results.add(result(replace(next(iter(results)).run, seed=seed), math.nan))
    page = length.report("full", results, TEXT, tmp_path)
    assert page.endswith("Runs that diverged, which are in no row: 4.")
    everything = foreseen(partial(length.runs, "full", text=TEXT), results)
    seeds = [of.seed for of in everything[1] if of.seq_len > SIZE.seq_len]
    assert seeds == sorted(seeds) and set(seeds) == {0, 1, 2}


def test_all_that_is_compared_comes_before_its_spread():
    names, results, order = list(COUNTS), Results([]), []
    while todo := run.pending(names, "full", results, TEXTS):
        order.append(todo[0])
        results.add(result(todo[0], score(todo[0])))
    assert [of.seed for of in order] == sorted(of.seed for of in order)
    first = order[:6]
    assert {(of.layer, of.heads) for of in first} == {v[:2] for v in ablations.VARIANTS.values()}
    assert {of.lr for of in first} == {SIZE.rates[0]}
    assert len(order) == len(run.still_to_be_done(names, "full", Results([]), TEXTS))
    assert max(run.estimated_seconds(of, Results([])) for of in order) < 480
    for name, count in COUNTS.items():
        done, left = foreseen(partial(run.EXPERIMENTS[name].runs, "full", text=TEXT), results)
        assert len(done) == count and not left


def test_the_list_has_what_follows_too(capsys):
    command = ["ablations", "--scale", "tiny", "--device", "cpu", "--list"]
    assert run.main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6 * (2 + 1)


def test_beside_a_transformer(tmp_path):
    """On the first bytes of long documents, as many as were trained on, whatever the scores are."""
    results = Results([])
    perform(
        results, ["transformer"], 5 * RATES + 5, lambda of: 9.0 if of.layer == "gla" else score(of)
    )
    perform(results, ["transformer"], 3, lambda of: math.nan)
    lines = transformer.report("full", results, TEXT, tmp_path).splitlines()
    first = "1.9850 ± 0.0000 (n = 2, 1 diverged)"  # of four stretches of 512 bytes, alike for all
    assert "| Transformer++ | " + first + " | 1.000 | 0.002 | 14.00 M |" in lines
    assert [line.split(" | ")[0][2:] for line in lines[2:7]] == list(transformer.VARIANTS)
    assert transformer.within(next(iter(results))) == pytest.approx(1.985)
    of = replace(next(iter(results)).run, seq_len=100)  # shorter than a stretch
    assert transformer.within(result(of, 1.0)) == 2.0
    assert transformer.report("full", Results([]), TEXT, tmp_path) == ""


def test_verdicts():
    near, far = [1.0, 1.01, 1.02], [2.0, 2.01, 2.02]
    said = verdict({"a": near, "b": far, "c": [x - 1e-4 for x in near], "d": [0.1]}, "a")
    assert said == (
        "Beside a, at 5% after Holm's correction (comparisons: 2): worse (b), not told apart (c). "
        "Of one seed, so nothing is concluded: d."
    )
    assert verdict({"a": far, "b": near}, "a").endswith("(comparisons: 1): better (b).")
    assert verdict({"b": near}, "a") == verdict({"a": [1.0], "b": far}, "a")
    assert order({"a": near, "b": far}, ["a", "b"]) == "The order of the means is the paper's."
    assert order({"a": near, "b": [0.0]}, ["a", "b"]) == ""
    turned = order({"a": far, "b": near}, ["a", "b"])
    assert turned == "Other than in the paper's order, by the means: b before a (p < 0.001)."


@pytest.mark.parametrize(
    "ps, found",
    [
        ({"a": 0.01, "b": 0.02, "c": 0.04}, ["a", "b", "c"]),
        ({"a": 0.04, "b": 0.02, "c": 0.03}, []),  # 3 * 0.02 is over
        ({"a": 0.04, "b": 0.001, "c": 0.03}, ["b"]),  # 2 * 0.03 is over, so 0.04 is not asked
    ],
)
def test_holm(ps, found):
    assert holm(ps) == found
