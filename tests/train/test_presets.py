"""What a training run does on each kind of device, and training as the GPU's preset does it.

Equal bits (see common.py): the same calls.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
import torch
from cuda_tools import waits_for_nothing
from torch._dynamo.testing import CompileCounterWithBackend

from gla_ext.model import GLAForCausalLM, count_parameters
from gla_ext.model.checkpoint import read_tensors
from gla_ext.train import command as train
from gla_ext.train.presets import PRESETS, Options, command_line, describe, preset
from gla_ext.train.trainer import Settings, Trainer

CPU, CUDA = PRESETS["cpu"], PRESETS["cuda"]
OTHERS = {
    "out": Path("elsewhere"),
    "resume": True,
    "overwrite": True,
    "compile": False,
    "cuda_graph": True,
    "prompt": "class ",
    "sample_bytes": 7,
    "save_every": 3,
    "save_minutes": 0.5,
    "keep": 4,
    "log_every": 4,
    "log": ["wandb"],
    "evaluate": ["piqa", "lambada_openai"],
    "skip_bad": True,
    "parallel": "shard",
    "tensor_parallel": 2,
    "context_parallel": 2,
    "data": [str(Path("text").resolve())],
    "init_from": None,
    "dtype": "float32",
    "steps": 11,
    "batch_size": 5,
    "tokens_per_update": 64 << 10,
    "seq_len": 12,
    "hidden_size": 64,
    "layers": 4,
    "heads": 8,
    "use_short_conv": True,
    "segments": 3,
    "packed": True,
    "lr": 0.25,
    "min_lr": 1e-4,
    "schedule": "linear",
    "warmup": 13,
    "warmup_tokens": 1000,
    "decay": 7,
    "betas": [0.8, 0.99],
    "weight_decay": 0.5,
    "grad_clip": 0.75,
    "eval_every": 17,
    "spike": 1.5,
    "seed": 19,
}


@pytest.fixture
def gpu(monkeypatch):
    """A machine that seems to have a GPU with operators."""
    monkeypatch.setattr(train, "default_device", lambda: "cuda")
    monkeypatch.setattr(train, "check_device", lambda device: None)


def decide(*args):
    return train._settings_and_options(vars(command_line().parse_args([str(a) for a in args])))


def test_a_gpu_takes_its_preset(gpu):
    expected = CUDA.settings, dataclasses.replace(CUDA.options, device="cuda")
    assert decide() == expected
    assert decide("--device", "cuda") == expected
    assert decide("--device", "cuda:1")[0] == CUDA.settings
    assert decide("--device", "cuda:1")[1].device == "cuda:1"
    assert preset("cuda:1") is CUDA
    assert CUDA.options.compile
    assert CUDA.settings.dtype == "bfloat16"


def test_the_cpu_takes_its_preset_beside_a_gpu_too(gpu):
    assert decide("--device", "cpu") == (Settings(), Options(device="cpu"))


def test_there_is_a_flag_for_everything():
    names = {f.name for c in (Settings, Options) for f in dataclasses.fields(c)}
    assert OTHERS.keys() == names - {"device"}


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "init_from"])
def test_every_flag_overrides_the_preset_alone(gpu, name):
    value, flag = OTHERS[name], "--" + name.replace("_", "-")
    if isinstance(value, bool):
        args = [flag if value else flag.replace("--", "--no-")]
    else:
        args = [flag, *(value if isinstance(value, list) else [value])]
    settings, options = decide(*args)
    got = vars(settings) | vars(options)
    before = vars(CUDA.settings) | vars(CUDA.options) | {"device": "cuda"}
    assert got[name] == value != before[name]
    assert got == before | {name: value}


def test_what_is_printed(gpu):
    line = describe(*decide())
    assert line.startswith("Defaults for cuda: dtype bfloat16, steps 1200, batch-size 32, ")
    assert line.endswith("compile yes, cuda-graph no, save-every 600")
    changed = describe(*decide("--steps", 1200, "--seq-len", 64, "--no-compile"))
    assert changed == line + "; but seq-len 64, compile no"
    assert describe(*decide("--device", "cpu")) == (
        "Defaults for cpu: dtype float32, steps 2000, batch-size 8, tokens-per-update 0, "
        "seq-len 128, hidden-size 128, layers 3, heads 2, use-short-conv no, segments 1, "
        "packed no, lr 0.003, min-lr 0.0, schedule linear, warmup 100, warmup-tokens 0, decay 0, "
        "weight-decay 0.1, betas [0.9, 0.95], grad-clip 1.0, eval-every 0, spike 3.0, seed 0, "
        "compile no, cuda-graph no, save-every 200"
    )


def test_help_has_both_defaults(capsys):
    with pytest.raises(SystemExit):
        command_line().parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--steps STEPS updates in all (default: 2000; GPU: 1200)" in text
    assert "--seed SEED seed of weights, batches and sample (default: 0)" in text


def test_the_gpu_model_has_about_50_million_parameters():
    with torch.device("meta"):
        model = GLAForCausalLM(CUDA.settings.model_config())
    assert 45e6 < count_parameters(model) < 60e6
    layer = model.model.layers[0].attn
    assert (layer.head_k_dim, layer.head_v_dim) == (128, 256)


SMALL = {"steps": 6, "batch_size": 2, "seq_len": 32, "hidden_size": 16, "layers": 2, "heads": 2}
SMALL_FLAGS = [x for name, n in SMALL.items() for x in ("--" + name.replace("_", "-"), str(n))]


def make_trainer(corpus, device="cpu", of=CUDA, **options) -> Trainer:
    """The GPU's preset, or another, with a small model and few steps."""
    settings = dataclasses.replace(of.settings, **(SMALL | options))
    return Trainer(settings, corpus, torch.device(device), of.options.compile)


@pytest.fixture
def backend(monkeypatch):
    """What compiles in inductor's place, and counts its graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    return counter


@pytest.mark.slow
def test_the_compiled_step_is_one_graph_and_equals_the_eager_one(corpus, backend):
    run, eager = make_trainer(corpus), make_trainer(corpus)
    eager.loss = eager._loss
    for _ in range(3):
        run.update()
        run.evaluate()
        eager.update()
    assert backend.frame_count == 1
    assert run.losses.isfinite().all()
    assert torch.allclose(run.losses, eager.losses, rtol=1e-3)


RESUMED = {
    "plain": (CPU, {}),
    "convolutions": (CPU, {"use_short_conv": True}),
    "segments": (CPU, {"segments": 4}),
    "packed": (CPU, {"segments": 4, "packed": True}),
    "compiled": (CUDA, {}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(corpus, tmp_path, backend, case):
    of, options = RESUMED[case]
    runs = [make_trainer(corpus, of=of, steps=8, **options)]
    if "use_short_conv" in options:  # they start as torch's: uniform, within 4 ** -0.5
        weight = runs[0].model.model.layers[0].attn.q_conv1d.weight
        assert weight.shape == (8, 1, 4)
        assert 0.3 < weight.abs().max() <= 0.5 and weight.std() > 0.2
    for step in range(8):
        if step == 6:  # inside a window
            runs[0].save(tmp_path / "first")
            handed_on = [
                x for x in read_tensors(tmp_path / "first")[0] if x.startswith("segments.")
            ]
            assert bool(handed_on) == ("segments" in options)
            torch.manual_seed(99)
            runs.append(make_trainer(corpus, of=of, steps=8, **options))
            runs[1].load(tmp_path / "first")
            runs[1].evaluate()
            runs[1].evaluations.clear()
        for run in runs:
            run.update()
    for i, run in enumerate(runs):
        run.evaluate()
        run.save(tmp_path / str(i))
    (tensors, metadata), (others, other_metadata) = (read_tensors(tmp_path / x) for x in "01")
    assert metadata == other_metadata and metadata["step"] == len(tensors["losses"]) == 8
    assert tensors.keys() == others.keys()  # at a window's end there is nothing to hand on
    assert not any("_orig_mod" in name or name.startswith("segments.") for name in tensors)
    moments = [name for name in tensors if name.endswith(".exp_avg_sq")]
    assert len(moments) == len(list(runs[1].model.parameters()))
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert tensors["losses"].isfinite().all()
    assert tensors["model.lm_head.weight"].dtype == torch.float32


def test_metrics_have_the_best_evaluation(folder, tmp_path, capsys, monkeypatch):
    values = iter([3.0, 2.0, 2.5])
    monkeypatch.setattr(
        Trainer, "evaluate", lambda run, _: run.evaluations.append((run.step, next(values)))
    )
    args = ["--data", str(folder), "--out", str(tmp_path), "--device", "cpu", "--eval-every", "2"]
    assert train.main([*args, *SMALL_FLAGS]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["best_evaluation"] == [4, 2.0]
    assert metrics["held_out_bits_per_byte"]["this model"] == 2.5
    assert metrics["device"] == "cpu"
    out = capsys.readouterr().out
    assert "Best evaluation: 2.000 at step 4 of 6" in out
    assert "Defaults for cpu: " in out


@pytest.mark.cuda
def test_training_on_a_gpu(corpus, tmp_path):
    run = make_trainer(corpus, "cuda", steps=60, batch_size=4, warmup=5, lr=1e-2, hidden_size=64)
    for tensor in (run.batches.stream, run.held_out, *run.model.parameters()):
        assert tensor.is_cuda
    run.update()  # compiles
    with waits_for_nothing():
        for _ in range(59):
            run.update()
    first = run.losses[0].item() / math.log(2)
    assert first == pytest.approx(8, abs=1.5)
    assert run.recent_loss() < 0.6 * first
    assert run.evaluate() < 0.6 * first
    run.save(tmp_path / "checkpoint")
    again = make_trainer(corpus, "cuda", **dataclasses.asdict(run.settings))
    again.load(tmp_path / "checkpoint")
    assert again.evaluate() == pytest.approx(run.evaluations[-1][1], rel=1e-3)


@pytest.mark.cuda
def test_the_command_on_a_gpu(folder, tmp_path):
    assert train.main(["--data", str(folder), "--out", str(tmp_path), *SMALL_FLAGS]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["device"] == torch.cuda.get_device_name()
    assert metrics["settings"] == dataclasses.asdict(
        dataclasses.replace(CUDA.settings, data=[str(folder)], **SMALL)
    )
