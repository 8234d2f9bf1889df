"""What `benchmarks/check_gpu.py` makes of earlier measurements; this needs no GPU."""

import json
import sys

from source_tree import run

TIMINGS = {
    name: {"median": x, "p20": x - 0.1, "p80": x + 0.1, "runs": 10}
    for name, x in {"gla_ext": 2.0, "FLA": 5.0}.items()
}
SHAPE = "32x2048x4x128x256"
KERNEL = "void gla_ext::cuda::(anonymous namespace)::f<(gla_ext::cuda::A)1, __nv_bfloat16>(x::P)"
RESULTS = {
    "environment": {"GPU": "some GPU", "command": "python check"},
    "shapes": {
        SHAPE: {
            "speed": {"forward": TIMINGS, "forward + backward": TIMINGS},
            "memory": {"gla_ext": 2**20, "FLA": 3 * 2**20},
        }
    },
    "steps": {"_output": TIMINGS["gla_ext"]},
    "kernels": [{"kernel": KERNEL, "launches": 2.0, "us": 12.34}],
    "host_us": {"forward": {"gla_ext": 31.0, "FLA": 300.0}},
    "first_call_s": {"first forward": 0.01},
}


def rendered(results, tmp_path) -> tuple[list[str], list[str]]:
    """The page's rows and what is printed."""
    (tmp_path / "in.json").write_text(json.dumps(results))
    files = ["--read", str(tmp_path / "in.json"), "--markdown", str(tmp_path / "page.md")]
    result = run(sys.executable, "benchmarks/check_gpu.py", *files)
    assert result.returncode == 0, result.stderr
    return (tmp_path / "page.md").read_text().splitlines(), result.stdout.splitlines()


def test_a_page_of_everything(tmp_path):
    page, printed = rendered(RESULTS, tmp_path)
    assert "- GPU: some GPU" in page
    assert "- Command: `python check`" in page
    assert f"| {SHAPE} | 2 (1.9 to 2.1) | 5 (4.9 to 5.1) | 2.50 | 0.110 |" in page
    assert f"| {SHAPE} | 2 (1.9 to 2.1) | 5 (4.9 to 5.1) | 2.50 | 0.299 |" in page
    assert f"| {SHAPE} | 1 | 3 |" in page
    assert "| `_output` | 2 (1.9 to 2.1) |" in page
    assert "| `f<A 1, bfloat16>` | 2 | 12.3 |" in page
    assert "| forward | 31.0 | 300.0 |" in page
    assert "| first forward | 0.0100 |" in page
    assert any(line.startswith(f"| {SHAPE} | 2 (1.9 to 2.1) | 5 ") for line in printed)


def test_a_page_of_speed_without_fla(tmp_path):
    speed = {mode: {"gla_ext": TIMINGS["gla_ext"]} for mode in RESULTS["shapes"][SHAPE]["speed"]}
    page, _ = rendered(
        {"environment": RESULTS["environment"], "shapes": {SHAPE: {"speed": speed}}}, tmp_path
    )
    assert f"| {SHAPE} | 2 (1.9 to 2.1) |  |  | 0.110 |" in page
    assert [x for x in page if x.startswith("## ")] == [
        "## Speed, forward", "## Speed, forward + backward",
    ]  # fmt: skip
