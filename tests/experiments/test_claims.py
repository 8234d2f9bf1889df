"""The table of the paper's claims: what scores of a few seeds say to each."""

import math
from dataclasses import replace

from experiment_runs import result

from experiments import run
from experiments.comparisons import budget, claims, mqar
from experiments.runs import Results

BYTES, TOKENS = "bytes", "tokens"
TEXTS = {0: BYTES, 8_000: TOKENS, 32_000: "other tokens"}
CURVE = [[place * 512, 1.5] for place in range(64)]


def performed(names, score, curve=lambda of: CURVE):
    """All runs of experiments, with made-up scores; by default the loss by position is level."""
    results = Results([])
    while todo := run.pending(names, "full", results, TEXTS):
        for of in todo:
            results.add(result(of, score(of), by_position=curve(of)))
    return results


def rows(results):
    table = claims.report("full", results, TEXTS, run.EXPERIMENTS)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_claims_on_bytes_and_on_tokens():
    """On bytes one gate a head is far worse; on tokens it is far better, as a Transformer++ is."""
    levels = {"head gate": 1.0, "attention": 0.5}

    def score(of):
        sign = -1 if of.vocabulary else 1
        return 2.0 + sign * levels.get(of.layer, 0.0) + of.seed / 1000 + abs(of.lr - 2e-3)

    found = rows(performed(["ablations", "tokens_8k"], score))
    said = {(row[0], row[4]): row for row in found}
    gate = "a gate a channel is better than one a head (Table 4)"
    assert said[gate, "`ablations`, bytes"][2:4] == ["2.001, 3.001 (p < 0.001)", "agree"]
    here, verdict = said[gate, "`tokens_8k`, 8,000 tokens"][2:4]
    assert here.startswith(f"{2**2.001:.3f}, {2**1.001:.3f} (p < 0.001)")
    assert verdict == "differ"
    as_good = "GLA is as good as a Transformer++ (Table 2)"
    assert said[as_good, "`tokens_8k`, 8,000 tokens"][3] == "differ, worse"
    heads = said["4 heads are better than 8 (Table 4)", "`ablations`, bytes"]
    assert heads[2:4] == ["2.001, 2.001 (p = 1.000)", "not told apart"]
    values = said[
        "gates on values add nothing to those on keys (v3, Table 2)", "`tokens_8k`, 8,000 tokens"
    ]
    assert values[3] == "not told apart, as claimed"
    assert not any("tokens_32k" in row[4] for row in found)


def test_two_that_are_said_to_be_alike():
    """They differ, one way or the other; or they might, by p alone, and the claim is not proved."""
    losses = {
        "differ, better": (1.5, 1.52, 1.54),
        "differ, worse": (0.5, 0.52, 0.54),
        "not told apart": (1.05, 1.07, 1.09),
        "not told apart, as claimed": (1.01, 1.02, 1.03),
    }
    for said, those in losses.items():

        def score(of, those=those):
            level = those if of.layer == "attention" else (1.0, 1.02, 1.04)
            return level[of.seed] + abs(of.lr - 2e-3)

        (found,) = (
            row for row in rows(performed(["tokens_8k"], score)) if "Transformer++" in row[0]
        )
        assert found[3] == said


def test_a_claim_counts_by_the_comparisons_own_test():
    """p < .05 alone is not enough: Holm's correction is for all that are beside GLA."""
    near = {("gla", 4): (1.0, 1.02, 1.04), ("head gate", 4): (1.05, 1.07, 1.09)}

    def score(of):
        return near.get((of.layer, of.heads), (1.0, 1.021, 1.041))[of.seed] + abs(of.lr - 2e-3)

    row = next(row for row in rows(performed(["ablations"], score)) if "one a head" in row[0])
    assert 0.01 < float(row[2].split("p = ")[1][:-1]) < 0.05
    assert row[3] == "not told apart"


ON_RECALL = {
    "attention": "attention solves recall at every width (Figure 4)",
    "RetNet": "GLA recalls more than RetNet (Figure 4)",
    "others": "GLA, RetNet and Mamba recall more than Hyena and RWKV-4 (Figure 4)",
}


def test_claims_on_recall_and_on_length():
    """Above 99 %, where runs end, all are alike, as they are if none learns."""

    def score(of):
        if of.task == "text":
            return 1.0
        if of.layer == "attention":
            return 0.995 if of.width < 512 or of.seq_len > 64 else 0.5
        if of.width == 64:
            return {"gla": 0.991, "retnet": 0.999}.get(of.layer, 0.7)
        if of.width == 128:
            return {"gla": 0.02}.get(of.layer, 0.03)
        return {"gla": 0.8, "hyena": 0.75}.get(of.layer, 0.7)

    found = rows(performed(["mqar", "budget_512", "length"], score))
    said = {(row[0], row[4]): row[2:4] for row in found}
    n = len(mqar.SCALES["full"].widths)
    some = [f"{4 * n - 1} of {4 * n} cells", "as claimed, but for 1"]
    assert said[ON_RECALL["attention"], "`mqar`"] == some
    assert said[ON_RECALL["attention"], "`budget_512`"] == [f"{n} of {n} cells", "as claimed"]
    half = [f"{n - 2} of {n - 2} cells; 2 say nothing", "as claimed"]
    assert said[ON_RECALL["RetNet"], "`budget_512`"] == half
    none = [f"0 of {n - 1} cells; 1 say nothing", "not as claimed"]
    assert said[ON_RECALL["others"], "`budget_512`"] == none
    assert (ON_RECALL["others"], "`mqar`") not in said and "hyena" in budget.LAYERS
    level = [row for row in found if "beyond its length" in row[0]]
    assert [row[3] for row in level] == ["not told apart, as claimed"] * 2 + ["not told apart"]
    assert found[-1][3] == "not comparable"
    assert claims.report("full", Results([]), TEXTS, run.EXPERIMENTS) == ""
    assert rows(performed(["ablations"], lambda of: math.nan)) == []


def test_claims_on_recall_of_one_seed():
    """One seed of each layer is compared if a layer has no more; one that diverged is none."""
    level = {"attention": 0.995, "retnet": 0.85, "mamba": 0.9, "hyena": 0.3, "rwkv": 0.82}
    results = Results([])
    for of in run.pending(["budget_512", "budget_64"], "full", results, TEXTS):
        if of.seed == 0 and of.width in (64, 128):
            results.add(result(of, level.get(of.layer, 0.8)))
            other = 0.99 if of.layer == "gla" else math.nan
            results.add(result(replace(of, seed=1), other))
    found = {row[0]: row[2:] for row in rows(results) if "Figure 4" in row[0]}
    others = len(mqar.SCALES["full"].widths) - 2
    held, failed = (f"{k} of 2 cells, one seed; {others} not complete" for k in (2, 0))
    assert found == {
        ON_RECALL["attention"]: [held, "as claimed so far", "`budget_512`"],
        ON_RECALL["RetNet"]: [failed, "not as claimed so far", "`budget_512`"],
        ON_RECALL["others"]: [failed, "not as claimed so far", "`budget_512`"],
    }


def test_of_runs_that_end_early_the_first_is_best():
    results = Results([])
    done = {4.6e-4: (0.999, 4000), 2.2e-3: (0.991, 3000), 1e-4: (0.98, 2000), 1e-2: (0.5, 1000)}
    for of in run.pending(["budget_512"], "full", results, TEXTS):
        score, steps = done[of.lr]
        results.add(result(of, score, steps_done=steps))
    after = run.pending(["budget_512"], "full", results, TEXTS)
    assert {of.lr for of in after} == {2.2e-3} and {of.seed for of in after} == {1, 2}
    sweep = run.EXPERIMENTS["budget_512"]._sweep("full", 256, results)
    assert sweep.rate_of("gla") == "0.0022"
    assert {of.lr for of in sweep.chosen("gla", whole=False)} == {2.2e-3}
    plain = replace(sweep, solved=math.inf)
    assert plain.rate_of("gla") == "0.00046"


def test_a_run_s_loss_is_compared_with_its_own():
    """Seeds far apart hide no rise that each of them has, and a fall is what the paper claims."""
    rises = {"gla": 0.05, "retnet": -0.05, "attention": 0.05}

    def curve(of):
        end = 1.5 + of.seed / 10 + rises[of.layer] * (1 + of.seed / 20)
        return [[place * 512, 1.5 + of.seed / 10 if place < 32 else end] for place in range(64)]

    found = rows(performed(["length"], lambda of: 1.0, curve))
    found = [row for row in found if "beyond its length" in row[0]]
    assert [row[3] for row in found] == ["differ", "agree", "agree"]
    assert all(row[2].endswith("(p < 0.001)") for row in found)


def test_claims_on_the_length_of_training():
    """In the second half, longer is better for GLA and worse for RetNet, and segments are worse; in
    the first 8th Mamba is better.
    """
    ends = {"retnet": 1, "gla": -1}

    def curve(of):
        longer, seed = of.seq_len > 2048, of.seed / 100
        last = 3 + seed + ends.get(of.layer, 0) * longer
        last += {"gla": (of.segments > 1) / 2, "mamba": 9}.get(of.layer, 0)
        first = 3 + seed - (of.layer == "mamba") / 2
        return [[place, first if place < 8 else last] for place in range(64)]

    found = rows(performed(["tokens_length"], lambda of: 1.0, curve))
    said = {row[0]: row[1:] for row in found}
    at_8k = said["GLA is better trained at 8K than at 2K (Figure 5)"]
    assert at_8k == ["better", "2.010, 3.010 (p < 0.001)", "agree", "`tokens_length`, second half"]
    assert said["RetNet is better trained at 8K than at 2K (Figure 5)"][2] == "differ"
    assert said["Mamba is better trained at 8K than at 2K (Figure 5)"][2] == "not told apart"
    segments = said["GLA is as good trained at 12 x 2K as at 8K (Figure 5)"]
    assert segments[:3] == ["about the same", "3.510, 2.010 (p < 0.001)", "differ, worse"]
    mamba = said["GLA is as good as Mamba (Table 2)"]
    assert mamba[1:3] == ["3.010, 2.510 (p < 0.001)", "differ, worse"]
    assert mamba[3] == "`tokens_length`, first 8th, at 2K"
    assert said["Mamba's loss rises beyond its length (Figure 5)"][2] == "agree"


def test_the_claims_of_an_experiment_are_corrected_together():
    """A p below .05 that the correction for all six comparisons of the experiment takes away, and
    one for the three of the loss beyond the length would not.
    """

    def curve(of):
        rise = (0.04, 0.05, 0.06)[of.seed] if of.layer == "retnet" else 0.0
        start = 3 + of.seed / 100
        return [[place, start + rise * (place >= 32)] for place in range(64)]

    found = rows(performed(["length"], lambda of: 1.0, curve))
    (row,) = (row for row in found if row[0].startswith("RetNet's loss does not rise"))
    assert 0.05 / 6 < float(row[2].split("p = ")[1][:-1]) < 0.05 / 3
    assert row[3] == "not told apart"
