"""The table of the paper's claims: what scores of a few seeds say to each."""

import math

from experiment_runs import result

from experiments import run
from experiments.comparisons import budget, claims, mqar
from experiments.runs import Results

BYTES, TOKENS = "bytes", "tokens"
TEXTS = {0: BYTES, 8_000: TOKENS}
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
    gate = "a gate a channel is better than one a head (Table 2)"
    assert said[gate, "`ablations`, bytes"][2:4] == ["2.001, 3.001 (p < 0.001)", "agree"]
    here, verdict = said[gate, "`tokens_8k`, 8,000 tokens"][2:4]
    assert here.startswith(f"{2**2.001:.3f}, {2**1.001:.3f} (p < 0.001)")
    assert verdict == "differ"
    as_good = "GLA is as good as a Transformer++ (Table 1)"
    assert said[as_good, "`tokens_8k`, 8,000 tokens"][3] == "differ, worse"
    heads = said["4 heads are better than 8 (Table 2)", "`ablations`, bytes"]
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


def test_claims_on_recall_and_on_length():
    def score(of):
        if of.task == "text":
            return 1.0
        if of.layer == "attention":
            return 0.995 if of.width < 512 or of.seq_len > 64 else 0.5
        return {"gla": 0.8, "hyena": 0.9}.get(of.layer, 0.7)

    found = rows(performed(["mqar", "budget_512", "length"], score))
    said = {(row[0], row[4]): row[2:4] for row in found}
    cells = len(mqar.SCALES["full"].widths)
    solved = "attention solves recall at every width (Figure 4)"
    assert said[solved, "`mqar`"] == [f"{4 * cells - 1} of {4 * cells} cells", "agree but for 1"]
    assert said[solved, "`budget_512`"] == [f"{cells} of {cells} cells", "agree"]
    ahead = "GLA recalls at least as much as {} (Figure 4)"
    assert said[ahead.format("RWKV-4"), "`budget_512`"] == [f"{cells} of {cells} cells", "agree"]
    behind = said[ahead.format("Hyena"), "`budget_512`"]
    assert behind == [f"0 of {cells} cells", f"agree but for {cells}"]
    assert (ahead.format("Hyena"), "`mqar`") not in said and "hyena" in budget.LAYERS
    level = [row for row in found if "beyond its length" in row[0]]
    assert [row[3] for row in level] == ["not told apart, as claimed"] * 2 + ["not told apart"]
    assert claims.report("full", Results([]), TEXTS, run.EXPERIMENTS) == ""
    assert rows(performed(["ablations"], lambda of: math.nan)) == []


def test_of_recall_a_seed_counts_where_a_task_has_no_other():
    results = Results([])
    for of in run.pending(["mqar", "budget_512"], "full", results, TEXTS):
        if of.seed == 0 and of.width == budget.FIRST_WIDTH and of.seq_len == 512:
            results.add(result(of, {"attention": 0.995, "hyena": 0.9}.get(of.layer, 0.8)))
    found = {row[0]: row[2:] for row in rows(results)}
    one, task = "1 of 1 cells, one seed each", "`budget_512`"
    assert found["attention solves recall at every width (Figure 4)"] == [one, "agree", task]
    ahead = "GLA recalls at least as much as {} (Figure 4)"
    assert found[ahead.format("RetNet")] == [one, "agree", task]
    none = "0 of 1 cells, one seed each"
    assert found[ahead.format("Hyena")] == [none, "agree but for 1", task]


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
