"""What `benchmarks/check_gpu.py` makes of its arguments and of measurements; this needs no GPU."""

import dataclasses
import json
import sys

import bench_cuda
import bench_fla
import check_gpu
import pytest
import torch
from large import large_inputs
from parts import bench_attention, bench_length, bench_operators
from shared import bench_cases, gate, inputs
from source_tree import run

TIMINGS = {
    name: {"median": x, "p20": x - 0.1, "p80": x + 0.1, "runs": 10}
    for name, x in {"gla_ext": 2.0, "steps": 4.0, "FLA": 5.0}.items()
}
MODES = {"forward": TIMINGS, "forward + backward": TIMINGS}
ATTENTION = {"gla_ext": TIMINGS["gla_ext"]} | {
    name: TIMINGS["FLA"] for name in bench_attention.BACKENDS
}
SHAPE = "32x2048x4x128x256"
KERNEL = "void gla_ext::cuda::(anonymous namespace)::f<(gla_ext::cuda::A)1, __nv_bfloat16>(x::P)"
RESULTS = {
    "environment": {"GPU": "some H200", "command": "python check"},
    "wrong": [],
    "copy_bytes_per_s": 4.27e12,
    "shapes": {
        SHAPE: {
            "speed": MODES,
            "memory": {"gla_ext": 2**20, "FLA": 3 * 2**20},
            "kept": {
                "ms": {"recomputed": TIMINGS["steps"], "kept": TIMINGS["FLA"]},
                "bytes": {"recomputed": 0, "kept": 3 * 2**20},
            },
        }
    },
    "steps": {"_output": TIMINGS["gla_ext"]},
    "kernels": [{"kernel": KERNEL, "launches": 2.0, "us": 12.34}],
    "host_us": {"forward": {"gla_ext": 31.0, "FLA": 300.0}},
    "first_call_s": {"first forward": 0.01},
    "attention": {
        T: {"forward": ATTENTION, "forward + backward": ATTENTION} for T in ("1024", "2048")
    },
    "layer": {"8x2048": MODES},
    "operators": {
        "norm and gate": {
            mode: {"gla_ext": TIMINGS["gla_ext"], "FLA": TIMINGS["FLA"]} for mode in MODES
        },
        "norm": {mode: {"gla_ext": TIMINGS["gla_ext"]} for mode in MODES},
    },
    "lengths": {"1x1024x4x128x256": MODES, "1x2048x4x128x256": MODES},
}


def test_a_page_of_everything(rendered, tmp_path):
    page = rendered(RESULTS)
    assert "- GPU: some H200" in page
    assert "- Command: `python check`" in page
    assert "- Copy on the device: 4.27 TB/s, read and written" in page
    times = "2 (1.9 to 2.1) | 4 (3.9 to 4.1) | 5 (4.9 to 5.1) | 2.50"
    assert f"| {SHAPE} | {times} | 0.110 | 18.18 |" in page
    assert f"| {SHAPE} | {times} | 0.299 | 6.70 |" in page
    assert f"| {SHAPE} | 1 |  | 3 |" in page
    kept = f"| {SHAPE} | 4 (3.9 to 4.1) | 5 (4.9 to 5.1) | 3 | "
    assert any(x.startswith(kept) for x in page)
    assert "| T 1024 | 2 (1.9 to 2.1) | 5 (4.9 to 5.1) | 5 (4.9 to 5.1) |" in page
    assert any("from T on: cuDNN below 1024, FlashAttention-2 below 1024." in x for x in page)
    assert f"| B 8, T 2048 | {times} |" in page
    assert "| norm and gate | 2 (1.9 to 2.1) | 5 (4.9 to 5.1) |" in page
    assert "| norm | 2 (1.9 to 2.1) |  |" in page
    assert "| `_output` | 2 (1.9 to 2.1) |" in page
    assert "| `f<A 1, bfloat16>` | 2 | 12.3 |" in page
    assert "| forward | 31.0 | 300.0 |" in page
    assert "| first forward | 0.0100 |" in page
    pytest.importorskip("matplotlib")
    assert "![Time over T](page.png)" in page
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_of_speed_without_fla(rendered):
    own = {name: TIMINGS[name] for name in ("gla_ext", "steps")}
    kept = {name: RESULTS[name] for name in ("environment", "wrong", "copy_bytes_per_s")}
    page = rendered(kept | {"shapes": {SHAPE: {"speed": dict.fromkeys(MODES, own)}}})
    assert f"| {SHAPE} | 2 (1.9 to 2.1) | 4 (3.9 to 4.1) |  |  | 0.110 | 18.18 |" in page
    assert [x for x in page if x.startswith("## ")] == [
        "## Speed, forward", "## Speed, forward + backward",
    ]  # fmt: skip


def test_a_run_with_wrong_results_is_not_shown(tmp_path):
    (tmp_path / "in.json").write_text(json.dumps(RESULTS | {"wrong": ["dq is off by 1.0e-01"]}))
    files = ["--read", str(tmp_path / "in.json"), "--markdown", str(tmp_path / "page.md")]
    result = run(sys.executable, "benchmarks/check_gpu.py", *files)
    assert result.returncode == 1
    assert result.stdout.splitlines()[0] == "dq is off by 1.0e-01"
    assert SHAPE not in result.stdout
    assert not (tmp_path / "page.md").exists()


def test_wrong_results_raise():
    x = torch.arange(4.0)
    gate.require_close({"o": x}, {"o": x}, 0.01, "layer")
    for wrong in (x + 1, torch.full_like(x, torch.nan)):
        with pytest.raises(gate.WrongResults, match="layer: o is off by"):
            gate.require_close({"o": wrong}, {"o": x}, 0.01, "layer")


def few_rows(row):
    """The same row with few rows of its leaves, and few tokens of its sequences."""
    first, *rest = row.sizes[0]
    few = (3, 40, *rest[1:]) if len(rest) == 2 else (64, *rest)
    sizes = (few if x == row.sizes[0] else (64, *x[1:]) if x[0] == first else x for x in row.sizes)
    return dataclasses.replace(row, sizes=tuple(sizes))


@pytest.mark.parametrize("name", bench_operators.rows())
def test_operators_are_checked(name, monkeypatch):
    monkeypatch.setattr(bench_operators, "CHECKED", 2**12)
    row = few_rows(bench_operators.rows()[name])
    leaves = row.draw("cpu")
    bench_operators.check(name, row, {"gla_ext": row.ours, "torch": row.plain}, leaves)

    def wrong(*leaves):
        return tuple(1.1 * y for y in bench_operators.outputs(row.ours, leaves))

    with pytest.raises(gate.WrongResults, match="wrong: output 0 is off by"):
        bench_operators.check(name, row, {"wrong": wrong}, leaves)


def test_one_gate_a_head_is_checked(monkeypatch):
    """Against the same gate spread over the channels."""
    case = bench_cases.OTHERS["8x2048x16x128x128, one gate a head"]
    small = dataclasses.replace(case, B=2, T=70, H=2, K=16, V=24)
    monkeypatch.setattr(
        bench_cases.bench,
        "draw",
        lambda shape, gate, lengths: large_inputs(*shape, gate=gate, lengths=lengths, device="cpu"),
    )
    x = small.draw()
    assert x.g.shape == (2, 70, 2) and x.g.dtype == torch.float32
    assert gate.check_inputs(x, "here") == []
    ours = inputs.ours
    monkeypatch.setattr(inputs, "ours", lambda x: ours(x) | {"dg": 2 * ours(x)["dg"]})
    assert all("dg is off by" in line for line in gate.check_inputs(x, "here"))


def test_fla_at_some_head_sizes_alone():
    functions = {"gla_ext": 1, "FLA": 2}
    assert check_gpu.at_heads(functions, (1, 64, 4, 128, 256), []) == functions
    assert check_gpu.at_heads(functions, (1, 64, 4, 128, 256), ["128x256"]) == functions
    assert check_gpu.at_heads(functions, (1, 64, 4, 64, 64), ["128x256"]) == {"gla_ext": 1}


def test_floors():
    shape, rate = (2, 3, 5, 7, 11), 1e3
    forward = 2 * (3 * 7 + 2 * 11)
    backward = 2 * (6 * 7 + 3 * 11)
    assert bench_cuda.floor_ms(shape, False, rate) == 2 * 3 * 5 * forward
    assert bench_cuda.floor_ms(shape, True, rate) == 2 * 3 * 5 * (forward + backward)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ((2.0, 3.0, 9.0), "below 1024"),
        ((0.5, 1.0, 2.0), "above 4096"),
        ((0.5, 4.0, 16.0), "1448"),
        ((0.5, 2.0, 9.0), "2048"),
        ((2.0, 1.0, 9.0), "more than one"),
    ],
)
def test_break_even(theirs, expected):
    ours = {1024: 1.0, 2048: 2.0, 4096: 4.0}
    assert bench_attention.break_even(ours, dict(zip(ours, theirs, strict=True))) == expected


def test_steps_are_forced_only_within_the_call(monkeypatch):
    path = bench_cuda.on_steps(lambda: bench_cuda.os.environ[bench_cuda.PATH_VARIABLE])
    monkeypatch.delenv(bench_cuda.PATH_VARIABLE, raising=False)
    assert path() == "steps"
    assert bench_cuda.PATH_VARIABLE not in bench_cuda.os.environ
    monkeypatch.setenv(bench_cuda.PATH_VARIABLE, "fused")
    assert path() == "steps"
    assert bench_cuda.os.environ[bench_cuda.PATH_VARIABLE] == "fused"


def test_fla_is_tuned_once_a_head_size():
    shapes = [
        (32, 2048, 4, 128, 256),
        (32, 8192, 4, 128, 256),
        (1, 64, 4, 128, 256),
        (8, 9, 2, 64, 64),
    ]
    assert bench_fla.jobs(shapes, True) == {
        "128x256": ["32x2048x4x128x256", "1x64x4x128x256"],
        "64x64": ["8x9x2x64x64"],
        "layer": ["--layer"],
    }


def test_fla_is_tuned_for_packed_sequences_apart():
    """And for gates of another dtype with the rest, but for lengths alone no second time."""
    jobs = bench_fla.jobs([(32, 2048, 4, 128, 256)], False, bench_cases.OTHERS)
    assert jobs["128x256"] == [
        *("32x2048x4x128x256", "8x2048x4x128x256", "8x2048x4x128x256, g in fp32"),
    ]
    assert jobs["128x256_packed"] == ["1x65536x4x128x256, packed, 32 of 2,048"]
    assert jobs["64x64"] == ["32x2048x16x64x64, g in fp32"]
    named = {name for names in jobs.values() for name in names}
    for name in named:
        case = bench_fla.parse_case(name)
        assert case == bench_cases.OTHERS.get(name, bench_cases.Case(32, 2048, 4, 128, 256))
    with pytest.raises(ValueError, match="packed"):
        bench_fla.parse_case("packed")


def arguments(monkeypatch, *given: str):
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", *given])
    return check_gpu.parse_arguments()


def test_every_part_can_be_chosen(monkeypatch):
    for part in check_gpu.PARTS:
        assert arguments(monkeypatch, "--only", part).only == [part]
    assert arguments(monkeypatch).only == check_gpu.PARTS
    with pytest.raises(SystemExit):
        arguments(monkeypatch, "--only", "nothing")
    with pytest.raises(SystemExit):
        arguments(monkeypatch, "--shapes", "1x2x3")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["layer", "operators"], []),
        (["steps"], [(32, 2048, 4, 128, 256)]),
        (["speed"], list(bench_cuda.BASELINES)),
        (["attention"], [(32, T, 4, 128, 256) for T in (1024, 2048, 4096, 8192)]),
        (["plot"], list(bench_length.shapes().values())),
    ],
)
def test_what_is_timed_is_checked(parts, expected, monkeypatch):
    assert check_gpu.checked_shapes(arguments(monkeypatch, "--only", *parts)) == expected


def test_the_plots_lines():
    timings = {"gla_ext": bench_cuda.Timing(2.0, 1.9, 2.1, 10)}
    lengths = {name: dict.fromkeys(MODES, timings) for name in RESULTS["lengths"]}
    row = dict.fromkeys(bench_attention.BACKENDS, bench_cuda.Timing(5.0, 4.9, 5.1, 10))
    attention = {T: {"forward": row} for T in ("1024", "2048")}
    results = RESULTS | {"lengths": lengths, "attention": attention}
    found = bench_length.lines(results, "forward")
    assert found[1, "gla_ext"] == {1024: 2.0, 2048: 2.0}
    assert found[1, "floor"][2048] == pytest.approx(0.110 / 32, rel=0.01)
    assert found[32, "cuDNN"] == found[32, "FlashAttention-2"] == {1024: 5.0, 2048: 5.0}
    looks = [bench_length.look(*line) for line in found]
    assert len({(x["color"], x.get("ls")) for x in looks}) == len(found)
