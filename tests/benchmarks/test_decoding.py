"""What `benchmarks/` measures of decoding, at tiny sizes; this needs no GPU."""

import dataclasses

import pytest
import torch
from models import TINY, make_ids
from parts import bench_generate, bench_recurrent
from shared import contenders, gate
from shared.timing import Timing
from shared.transformer import Transformer, rotate, rotations

from gla_ext.model.config import GLAConfig
from gla_ext.ops import recurrent

MODEL = TINY | {"hidden_size": 64, "num_hidden_layers": 3}
SIZES = bench_generate.Sizes(MODEL, 12, (1, 3), lengths=(5, 40), steps=2, samples=2)


@pytest.fixture
def no_cuda(monkeypatch):
    """torch.cuda's functions that measurements call, without a GPU: graphs run as they are."""
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)

    class Graph:
        def __init__(self, call):
            self.replay = call

    monkeypatch.setattr(contenders, "capture", Graph)
    monkeypatch.setattr(bench_recurrent, "slope_us", lambda call: (call(), timing(3.0))[1])
    monkeypatch.setattr(bench_recurrent, "host_us", lambda call: (call(), 7.5)[1])


def timing(median: float) -> Timing:
    return Timing(median, median - 0.1, median + 0.1, 10)


def tiny_transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer(GLAConfig(**MODEL, initializer_range=0.3)).double().eval()


@torch.no_grad()
def test_the_transformer_decodes_what_its_forward_says():
    model, ids = tiny_transformer(), make_ids(T=20)
    everywhere = torch.arange(20)
    cache = model.new_cache(2, 25)
    logits = [model(ids[:, :8], cache, everywhere[:8], 8)]
    logits += [model(ids[:, t : t + 1], cache, everywhere[t : t + 1], t + 1) for t in range(8, 20)]
    for t, found in zip(range(8, 21), logits, strict=True):
        whole = model(ids[:, :t], model.new_cache(2, t), everywhere[:t], t)
        assert torch.allclose(found, whole, atol=1e-6)
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 1) % 31  # the first token is seen by the last
    assert not torch.allclose(model(other, model.new_cache(2, 20), everywhere, 20), logits[-1])


def test_rotations_depend_on_distance_alone():
    q, k = (torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))

    def score(i, j):
        return (
            rotate(q, rotations(torch.tensor([i]))) * rotate(k, rotations(torch.tensor([j])))
        ).sum()

    assert torch.allclose(score(9, 4), score(105, 100), atol=1e-4)
    assert not torch.allclose(score(9, 4), score(9, 5), atol=1e-2)


def test_both_models_have_one_size():
    from gla_ext.model import GLAForCausalLM, count_parameters

    with torch.device("meta"):
        config = GLAConfig(**bench_generate.SIZES.model)
        sizes = [count_parameters(build(config)) for build in (GLAForCausalLM, Transformer)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    assert 3.4e8 < sizes[0] < 3.9e8


def environment() -> dict:
    """What every run writes beside its measurements."""
    return {"environment": {"GPU": "some GPU", "command": "x"}, "wrong": [], "shapes": {}}


@pytest.mark.usefixtures("no_cuda")
def test_generation_is_measured(rendered):
    found = bench_generate.measure(False, False, SIZES, "cpu")
    assert found["rows"].keys() == {"gla_ext", bench_generate.FUSED, bench_generate.TRANSFORMER}
    for name, row in found["rows"].items():
        assert row["batches"].keys() == {"1", "3"}
        assert row["lengths"].keys() == ({"5"} if name == "gla_ext" else {"5", "40"})
        assert all(x["step"].median > 0 < x["first"].median for x in row["batches"].values())
    page = rendered(environment() | {"generate": found})
    assert {x for x in page if x.startswith("## ")} == {
        *("## Generation, B 1", "## Generation, B 3", "## Generation over length, B 1")
    }
    assert len([x for x in page if x.startswith("| gla_ext |")]) == 3
    assert len([x for x in page if x.startswith(f"| {bench_generate.FUSED} |")]) == 3


def test_a_page_of_generation(rendered):
    speed = {"first": timing(20.0), "step": timing(0.5)}
    lengths = {"1000": {"step": timing(0.5), "peak_bytes": 2**30}}
    found = dataclasses.asdict(bench_generate.SIZES) | {
        "parameters": {"gla_ext": 374_000_000, "SDPA Transformer": 373_000_000},
        "notes": ["FLA's GLAForCausalLM cannot be imported here (no transformers)."],
        "rows": {
            "gla_ext": {
                "batches": {"1": speed, "32": speed},
                "lengths": lengths | {"100000": {"step": timing(0.5), "peak_bytes": 2**31}},
            },
            "FLA": {"batches": {"1": speed, "32": speed}, "lengths": lengths},
        },
    }
    page = rendered(environment() | {"generate": found})
    times = "20 (19.9 to 20.1) | 0.5 (0.4 to 0.6)"
    assert f"| gla_ext | {times} | 2000 |" in page
    assert f"| gla_ext | {times} | 64000 |" in page
    step = "0.5 (0.4 to 0.6)"
    assert f"| gla_ext | {step} | 1.000 | {step} | 2.000 |" in page
    assert f"| FLA | {step} | 1.000 |  |  |" in page
    assert any("gla_ext 374 M" in x and len(x) < 500 for x in page)
    assert "- FLA's GLAForCausalLM cannot be imported here (no transformers)." in page


@pytest.mark.usefixtures("no_cuda")
def test_steps_before_a_length_are_taken(monkeypatch):
    made, seen = [], []

    class Counter:
        def __init__(self, length):
            made.append(length)
            self.steps = 0

        def first(self, prompts):
            return prompts[:, 0]

        def step(self):
            self.steps += 1

    def step_times(contender, sizes):
        seen.append(contender.steps)
        for _ in range(1 + sizes.steps * sizes.samples):
            contender.step()

    monkeypatch.setattr(bench_generate, "step_times", step_times)
    bench_generate.measure_lengths(Counter, SIZES, "cpu", True)
    assert (made, seen) == ([17], [5, 40])
    bench_generate.measure_lengths(Counter, SIZES, "cpu", False)
    assert (made[1:], seen[2:]) == ([17, 52], [0, 0])


def test_wrong_decoding_is_not_timed(monkeypatch):
    prompts = bench_generate.draw_prompts(SIZES, 2, "cpu")
    model = bench_generate.bench_model.build_ours(MODEL, "cpu").eval()
    transformer = bench_generate.build_transformer(SIZES, "cpu")
    bench_generate.check_ours(model, prompts)
    bench_generate.check_transformer(transformer, prompts)

    def off(module, inputs, output):
        """What decodes one token is off."""
        return output * 9 if inputs[0].shape[1] == 1 else None

    for one in (model.model, transformer):
        one.layers[0].mlp.register_forward_hook(off)
    with pytest.raises(gate.WrongResults, match="with gla_ext, B 2, T 12: logits is off by"):
        bench_generate.check_ours(model, prompts)
    with pytest.raises(gate.WrongResults, match="with the Transformer, B 2, T 12: logits is off"):
        bench_generate.check_transformer(transformer, prompts)


def test_a_graph_that_draws_other_tokens_is_not_timed(monkeypatch):
    prompts = bench_generate.draw_prompts(SIZES, 2, "cpu")
    model = bench_generate.bench_model.build_ours(MODEL, "cpu").eval()
    step = bench_generate.Ours.step
    monkeypatch.setattr(bench_generate.Ours, "step", lambda self: (step(self) + 1) % 31)
    with pytest.raises(gate.WrongResults, match="draws other tokens than eager steps"):
        bench_generate.check_ours(model, prompts)


def test_recurrent_operators_are_measured_and_shown(monkeypatch, no_cuda, rendered):
    small = (2, 1, 8, 16)
    monkeypatch.setattr(bench_recurrent, "SHAPES", (small, (1, 3, 24, 8)))
    monkeypatch.setattr(bench_recurrent, "VERIFY_SHAPES", (small,))
    monkeypatch.setattr(bench_recurrent, "SHORT_SHAPE", small)
    found = bench_recurrent.measure("cpu")
    page = rendered(environment() | {"recurrent": found})
    cell = "3 (2.9 to 3.1)"
    short = [f"B 2, H 1, K 8, V 16, {of} states" for of in ("bf16", "fp16")]
    for name in ("B 2, H 1, K 8, V 16", "B 1, H 3, K 24, V 8", *short):
        assert f"| {name} | {' | '.join([cell] * 5)} |" in page
    for layout in ("[K, V]", "[V, K]"):
        assert f"| B 2, H 1, K 8, V 16, {layout} | {' | '.join([cell] * 5)} |" in page
    assert "| `verify` | 7.5 |" in page


def test_wrong_recurrence_is_not_timed(monkeypatch):
    rows = bench_recurrent.draw((2, 1, 8, 16), 3, device="cpu")
    bench_recurrent.check(rows, "here")
    verify, step = recurrent.recurrent_gla_verify, recurrent.recurrent_gla_step_
    for wrong in (lambda **x: verify(**x) * 2, lambda **x: (x["state"].add_(1), verify(**x))[1]):
        monkeypatch.setattr(recurrent, "recurrent_gla_verify", wrong)
        with pytest.raises(gate.WrongResults, match="here: verification is not what a step gives"):
            bench_recurrent.check(rows, "here")
    monkeypatch.setattr(recurrent, "recurrent_gla_step_", lambda **x: step(**x) * 1.1)
    with pytest.raises(gate.WrongResults, match="here: o is off by"):
        bench_recurrent.check(rows, "here")
