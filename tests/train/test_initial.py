"""What a run starts with: a preset of the paper's, and the weights of another model."""

import json
import math

import pytest
import torch
from trainers import TINY, run

from gla_ext.model import GLAConfig, GLAForCausalLM, count_parameters
from gla_ext.model.checkpoint import load_model, read_metadata, read_tensors
from gla_ext.train import command as train
from gla_ext.train.presets import RECIPES, command_line
from gla_ext.train.run_folder import CHECKPOINT, RESULTS


def decide(*args):
    return train._settings_and_options(vars(command_line().parse_args([str(a) for a in args])))


@pytest.mark.parametrize(
    ("name", "parameters", "tokens", "warmup"),
    [("gla-340m", 374e6, 15e9, 0.5e9), ("gla-1.3b", 1.37e9, 100e9, 1e9), ("gla-tiny", 9e6, 4e6, 0)],
)
def test_presets_are_the_paper_s(name, parameters, tokens, warmup):
    settings, options = decide("--preset", name, "--device", "cpu")
    with torch.device("meta"):
        model = GLAForCausalLM(settings.model_config(32_000))
    assert count_parameters(model) == pytest.approx(parameters, rel=0.1)
    assert settings.steps * settings.tokens == pytest.approx(tokens, rel=0.03)
    assert settings.warmup_tokens == warmup
    assert settings.min_lr == pytest.approx(settings.lr / 10)
    assert settings.learning_rate(settings.steps - 1) == pytest.approx(settings.min_lr, rel=0.01)
    assert options.save_every == RECIPES[name]["save_every"]


def test_flags_override_a_preset(folder, tmp_path, capsys):
    given = ["--preset", "gla-tiny", "--tokens-per-update", 128, "--out", tmp_path / "out", *TINY]
    run("--data", folder, *given)
    settings = read_metadata(tmp_path / "out" / CHECKPOINT)["settings"]
    assert (settings["layers"], settings["lr"], settings["weight_decay"]) == (1, 3e-3, 0.01)
    run(*given, "--resume")
    run("--preset", "gla-tiny", "--out", tmp_path / "out", "--resume", "--device", "cpu", code=2)
    said = "by --preset; leave --preset out to go on, or --resume out to start again"
    assert said in capsys.readouterr().err
    run(*given[:6], *TINY[2:], "--resume")  # the preset's --steps do not make it longer
    steps = read_metadata(tmp_path / "out" / CHECKPOINT)["settings"]["steps"]
    assert steps == settings["steps"]


SIZES = ("--hidden-size", "--layers", "--heads")


def without_sizes():
    pairs = zip(TINY[::2], TINY[1::2], strict=True)
    return [x for pair in pairs if pair[0] not in SIZES for x in pair]


@pytest.mark.parametrize("source", ["finished", "unfinished", "other options"])
def test_a_run_starts_from_another_model(finished, tmp_path, source):
    """With no step its evaluation is that of the other; it goes on without the other's folder."""
    text, before = finished
    start, out = tmp_path / "start", tmp_path / "out"
    start.mkdir()
    if source == "unfinished":
        (start / CHECKPOINT).write_bytes((before / CHECKPOINT).read_bytes())
    elif source == "finished":
        for name in RESULTS:
            (start / name).write_bytes((before / name).read_bytes())
    else:
        config = GLAConfig(16, num_hidden_layers=1, num_heads=2, expand_k=1.0, vocab_size=300)
        GLAForCausalLM(config).save_pretrained(start)
    expected = read_tensors(before / CHECKPOINT)[0] if source != "other options" else {}
    expected = {k.removeprefix("model."): x for k, x in expected.items() if k.startswith("model.")}
    expected = expected or load_model(start).state_dict()
    run("--data", text, "--init-from", start, "--out", out, *without_sizes(), "--steps", 0)
    for name, x in load_model(out).state_dict().items():
        assert torch.equal(x, expected[name]), name
    start.rename(tmp_path / "elsewhere")
    run("--out", out, "--resume", "--steps", 3, "--device", "cpu")
    assert read_metadata(out / CHECKPOINT)["step"] == 3
    model = load_model(out)
    assert model.config.vocab_size == (300 if source == "other options" else 256)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (0, 0)


@pytest.mark.slow
def test_a_run_starts_from_a_model_of_fla_s(finished, tmp_path):
    models = pytest.importorskip("fla.models")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_heads": 2, "vocab_size": 256}
    model = models.GLAForCausalLM(models.GLAConfig(**sizes))
    model.save_pretrained(tmp_path / "fla")
    given = ["--data", finished[0], "--init-from", tmp_path / "fla", "--out", tmp_path / "out"]
    run(*given, *without_sizes(), "--steps", 0)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["held_out_bits_per_byte"]["this model"] == pytest.approx(8, abs=0.3)
    theirs = model.state_dict()
    for name, x in load_model(tmp_path / "out").state_dict().items():
        assert torch.equal(x, theirs[name]), name
    assert math.isfinite(metrics["settings"]["lr"])


def test_models_to_start_from_that_do_not_fit(finished, tmp_path, capsys):
    text, before = finished
    config = GLAConfig(16, num_hidden_layers=1, num_heads=2, vocab_size=200)
    GLAForCausalLM(config).save_pretrained(tmp_path / "small")
    other = tmp_path / "other"
    GLAForCausalLM(GLAConfig(16, num_hidden_layers=1, vocab_size=256)).save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = (before / name).read_text()
        (other / name).write_text(content.replace('"use_regex":false', '"use_regex":true'))
    for args, said in (
        (["nowhere"], "expected --init-from to be a folder with config.json or checkpoint"),
        ([before, "--layers", 2], f"expected --layers to be 1, as in {before}, got 2"),
        ([tmp_path / "small"], "expected the text to have at most the 200 tokens of the model"),
        ([other], f"expected the text to have the tokenizer of {other}, got another one"),
    ):
        given = ["--data", text, "--out", tmp_path / "out", *without_sizes(), "--init-from", *args]
        run(*given, code=2)
        assert said in capsys.readouterr().err
        assert not (tmp_path / "out" / CHECKPOINT).exists()
