"""The rows of whole training steps, and what becomes of one that fails, without a GPU.

Equal bits (see common.py): the same calls, made again by a checkpoint.
"""

import argparse
import dataclasses
import json
import sys

import bench_training
import pytest
import torch
from pages import training_page
from parts import training_steps
from parts.training_rows import ROWS
from shared.utilisation import mfu, product_parameters

TINY = {"hidden_size": 64, "num_hidden_layers": 3, "num_heads": 2, "vocab_size": 61}
CHILD = """
import json, os, sys

names = sys.argv[sys.argv.index("--rows") + 1 :]
print("what else is printed")
for name in names:
    if name == "dies":
        os._exit(7)
    result = {"failed": "ValueError: no"} if name == "fails" else {"pid": os.getpid()}
    result["no caches"] = os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"]
    print(json.dumps({"row": name} | result), flush=True)
    if "failed" in result:
        sys.exit(3)
"""


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(training_steps, "DEVICE", "cpu")
    monkeypatch.setattr(training_steps, "SIZES", dict.fromkeys(("374 M", "1.3 B"), TINY))


def alike(row):
    """What decides what is built, and how it runs."""
    return dataclasses.replace(row, B=2, T=48, compiled="", attention="MATH", size="374 M")


# FLA's own kernels do not run on a CPU, and importing it takes seconds.
KINDS = [alike(row) for row in ROWS.values() if row.model != "FLA"]
FLA = pytest.param(alike(ROWS["FLA accelerated"]), marks=pytest.mark.slow)


@pytest.mark.parametrize("row", [*dict.fromkeys(KINDS), FLA], ids=str)
def test_a_step_of_every_row(tiny, row):
    if row.model == "FLA":
        pytest.importorskip("fla.models.gla")
    training_steps.check("row", row)
    with training_steps.kernels_of(row):
        model = training_steps.build(row)
        step, tokens = training_steps.stepper(row, model), training_steps.tokens_of(row)
        losses = [step(tokens).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


@pytest.mark.parametrize(
    ("row", "parameters", "rate", "found"),
    [
        ("eager", 341.6e6, 229_503, "47.6%"),
        ("Transformer++", 341.0e6, 194_519, "40.2%"),
        ("1.3 B", 1299.8e6, 67_794, "53.5%"),
    ],
)
def test_model_flops_utilisation(monkeypatch, row, parameters, rate, found):
    """The page's model: the products have all parameters but those of the embeddings."""
    monkeypatch.setattr(training_steps, "DEVICE", "meta")
    count = product_parameters(training_steps.build(ROWS[row]))
    assert count == pytest.approx(parameters, rel=1e-3)
    assert mfu(count, rate, "NVIDIA H200") == found
    assert mfu(count, rate, "NVIDIA A100") == mfu(None, rate, "NVIDIA H200") == ""


def test_blocks_are_computed_again(tiny):
    """With the gradients of those that are kept."""
    kept, again = (alike(ROWS[f"1.3 B Transformer++{rest}"]) for rest in ("", " checkpointed"))
    calls, gradients = [], []
    for row in (kept, again):
        model = training_steps.build(row, dtype=torch.float32)
        for block in model.layers:
            block.mlp.register_forward_pre_hook(lambda *_, row=row: calls.append(row))
        with training_steps.kernels_of(row):
            training_steps.loss_of(model, row)(training_steps.tokens_of(row)).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert [calls.count(row) for row in (kept, again)] == [3, 6]
    assert all(map(torch.equal, *gradients))


def test_rows_after_one_that_fails_have_a_new_process(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(bench_training, "__file__", str(tmp_path / "child.py"))
    rows = ["a", "b", "fails", "dies", "c", "d", "fails"]
    arguments = argparse.Namespace(rows=rows, seconds=1.0, profile=False)
    build = bench_training.Build("new", tmp_path, {})
    results = list(bench_training.run_build(build, arguments))
    assert [r["row"] for r in results] == rows
    assert [r.get("failed") for r in results] == [
        *(None, None, "ValueError: no", "exit code 7", None, None, "ValueError: no")
    ]
    pids = [r.get("pid") for r in results]
    assert pids[0] == pids[1] != pids[4] == pids[5]
    assert {r["no caches"] for r in results if "no caches" in r} == {"1"}


def test_results_are_written_as_they_come(tmp_path, monkeypatch, capsys):
    (tmp_path / "gla_ext").mkdir()
    (tmp_path / "gla_ext" / "_C.so").touch()
    out = tmp_path / "rows.json"
    written = []

    def run_build(build, arguments):
        for name in arguments.rows:
            yield {"row": name, "failed": "no"} if name == "compiled" else RESULT | {"row": name}
            written.append(len(out.read_text().splitlines()))

    monkeypatch.setattr(bench_training, "run_build", run_build)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    command = ["", "--builds", f"new={tmp_path}", f"old={tmp_path}", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, "--rows", "eager", "compiled"])
    for _ in range(2):
        bench_training.main()
    assert written == list(range(1, 9))
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("| compiled | old | no | | | | | | | |") == 4
    row = "| eager | new | 1,000 | 20.0% | 2.0 | 1.5 | 3.0 | 7 | 4.0 | 90.0 |"
    assert lines.count(row) == 4
    assert lines.count("| loss | 0.5 | 0.5 |") == 2
    builds = [json.loads(line)["build"] for line in out.read_text().splitlines()]
    assert builds == ["new", "new", "old", "old"] * 2


RESULT = {"tokens_per_s": 1000.0, "ms": 2.0, "cool_ms": 1.5, "peak_gib": 3.0, "launches": 7}
RESULT |= {"product_parameters": 32_966_666_667, "device": "NVIDIA H200"}  # a fifth of the peak
RESULT |= {"host_ms": 4.0, "layer_host_us": 90.0, "kinds": {"loss": 0.5}}


LINES = [
    "gla_ext",
    "gla_ext, compiled",
    "gla_ext, steps, states in memory",
    "FLA",
    "Transformer++, cuDNN",
    "Transformer++, FlashAttention-2",
]


def test_the_figure_has_the_papers_lines(tmp_path):
    pytest.importorskip("matplotlib")
    results = [RESULT | {"row": name, "build": "now"} for name in ROWS]
    results += [{"row": "eager", "build": "now", "failed": "no"}]
    found = {name: sorted(points) for name, points in training_page.lines(results).items()}
    assert found == {name: [2048, 8192, 32768] for name in LINES}
    before = RESULT | {"row": "eager", "build": "before"}
    assert "gla_ext (before)" in training_page.lines([*results, before])
    training_page.draw(results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
