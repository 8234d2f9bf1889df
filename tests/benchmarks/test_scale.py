"""The benchmark of two GPUs, on two processes of the CPU."""

import argparse
import os
import subprocess
import sys

import pytest
from common import ROOT
from pages import scale_page
from parts import one_alone, ranks_on_paper

from gla_ext.model import GLAForCausalLM


def test_latency_and_bandwidth_of_an_all_gather():
    times = {size: ranks_on_paper.gather_time(4, size, 1e-5, 2e11) for size in (1000, 10**6)}
    latency, bandwidth = ranks_on_paper.latency_and_bandwidth(times, 4)
    assert latency == pytest.approx(1e-5) and bandwidth == pytest.approx(2e11)
    # Between hosts the network's.
    far = ranks_on_paper.gather_time(64, 10**6, 1e-5, 2e11)
    assert far == pytest.approx(1e-5 + 63e6 / ranks_on_paper.NETWORK)


@pytest.mark.slow
def test_it_checks_and_then_measures(tmp_path):
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "benchmarks/bench_scale.py", "--small", "--repeats", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "--only", "operator", "training", "--markdown", str(page)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "WRONG" not in result.stdout and result.stdout.count("right, error") == 10
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == [
        "| chunk_gla, as many tokens a rank",
        "| chunk_gla, the tokens cut",
        "| chunk_gla, 16 rows a rank, as many tokens",
        "| chunk_gla, as many tokens a rank, on paper",
        "| context parallel training step",
    ]
    assert "tokens/s a GPU, " in rows[-1] and "of one alone with " in rows[-1]


PAGE = """
## 2 GPUs beside one (H200)
| chunk_gla | 1.84x | 1.93x (1.723 ms on 2, 1.661 on one); from idle 1.76x (1.870 ms) |
| chunk_gla, on paper |  | 8 ranks 1.823 ms, 93% of 8 GPUs; 64 ranks 3.181 ms, 53% of 64 GPUs |
## 8 GPUs beside one
| chunk_gla | 7.20x | 7.27x (1.863 ms on 8, 1.693 on one) |
| chunk_gla, on paper |  | 8 ranks 1.833 ms, 90% of 8 GPUs; 64 ranks 3.177 ms, 52% of 64 GPUs |
| FSDP2 |  | 6.24x (782,927 tokens/s, 125,466) |
"""


def test_one_alone_knows_no_other_process(monkeypatch):
    """One GPU alone has a process of its own, and a plain model that nothing wraps."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = argparse.Namespace(small=True, repeats=1)
    found = one_alone.run(["eager"], options)
    assert list(found) == ["eager"] and found["eager"]["tokens_per_s"] > 0
    models = []
    sizes = one_alone.Sizes(options)
    monkeypatch.setattr(sizes, "stepper", lambda model, *_, **__: models.append(model) or bool)
    assert one_alone.measure(sizes, "recomputed")["tokens_per_s"] > 0
    assert type(models[0]) is GLAForCausalLM and models[0].model.gradient_checkpointing


def test_the_figure_s_points(tmp_path):
    rows, paper = scale_page.read(PAGE)
    assert rows == {"chunk_gla": {2: 1.93, 8: 7.27}, "FSDP2": {8: 6.24}}
    assert paper == {8: 0.93, 64: 0.53}  # from the fewest GPUs
    pytest.importorskip("matplotlib")
    scale_page.draw(PAGE, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
