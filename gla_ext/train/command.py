"""`python -m gla_ext.train`: trains a byte-level GLA language model on text, from one command.

Writes to the folder --out: checkpoint.safetensors (all that --resume needs), and at the end
model.safetensors and config.json (the model), its tokenizer, model card and custom code for
transformers, metrics.json, loss.png and sample.txt. log.jsonl grows while it goes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from gla_ext.devices import check_device, default_device, in_fixed_order
from gla_ext.model import count_parameters
from gla_ext.model.checkpoint import read_metadata
from gla_ext.model.config import GLAConfig
from gla_ext.train.data import Corpus
from gla_ext.train.flags import flag_of
from gla_ext.train.initial import config_for, initial_config, initial_tensors, with_sizes
from gla_ext.train.loop import Interrupted, StopSignals, train
from gla_ext.train.output.result import device_name, evaluate, write_result
from gla_ext.train.parallel import Parallel
from gla_ext.train.presets import RECIPES, Options, Settings, command_line, describe, preset
from gla_ext.train.run_folder import CHECKPOINT, check_nothing_is_lost, held, keep_earlier
from gla_ext.train.tokens.corpus import TokenCorpus, absolute, check_outside, open_corpus
from gla_ext.train.trainer import CheckpointMismatch, Trainer, checkpoint_settings

_PACKAGES = ("matplotlib", "safetensors", "tokenizers", "tqdm")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns its exit status (128 + the signal's number if stopped)."""
    given = vars(command_line().parse_args(argv))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for unprintable characters
    try:
        check_packages(_PACKAGES)
        return run(given, _processes(given))
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        print(f"gla_ext.train: {error}", file=sys.stderr)
        return 2


def _processes(given: dict[str, Any]) -> Parallel:
    """This process alone, or this process together with the others that torchrun started."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Parallel()
    from gla_ext.train.ranks.processes import Processes  # imports for half a second

    device = given.get("device", "auto")
    return Processes(default_device() if device == "auto" else device)


def run(given: dict[str, Any], parallel: Parallel) -> int:
    """Runs the training that the command line describes, on these processes; returns the exit
    status.
    """
    with parallel.joined():
        is_first = parallel.is_first
        settings, options = parallel.from_first(lambda: _settings_and_options(given))
        check_packages((*options.log, *(("lm_eval", "transformers") if options.evaluate else ())))
        parallel.lay_out(settings, options)
        with StopSignals(parallel) as signals:
            try:
                corpus = open_corpus(settings.data, parallel.size)
                with contextlib.ExitStack() as folder:
                    parallel.from_first(lambda: _take(folder, options, parallel))
                    _run(settings, options, corpus, signals, parallel)
            except Interrupted:
                command = _command_to_go_on(given, options, parallel.launcher)
                print(f"Stopped. To go on: {shlex.join(command)}")
                return 128 + signals.number
    if options.evaluate and is_first:
        evaluate(options)
    return 0


def _take(stack: contextlib.ExitStack, options: Options, parallel: Parallel) -> None:
    """Locks the run's folder until the stack is closed."""
    stack.enter_context(held(options.out))
    check_nothing_is_lost(options.out, options.resume, options.overwrite)
    if not _resumes(options):
        keep_earlier(options.out, 0)
    parallel.tidy(options.out / CHECKPOINT, _resumes(options))


def _resumes(options: Options) -> bool:
    return options.resume and (options.out / CHECKPOINT).exists()


def _command_to_go_on(
    given: dict[str, Any], options: Options, launcher: tuple[str, ...] = Parallel.launcher
) -> list[str]:
    """A command with the given options that are not in the checkpoint, a preset's too."""
    command = [*launcher, "-m", "gla_ext.train", "--out", str(options.out), "--resume"]
    given = RECIPES.get(given.get("preset"), {}) | given
    for field in fields(Options):
        name, flag = field.name, flag_of(field.name)
        if name not in given or name in ("out", "resume", "overwrite"):
            continue
        value = given[name]
        if isinstance(value, bool):
            command.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            values = [str(x) for x in (value if isinstance(value, list) else [value])]
            dashes = values[0].startswith("-")
            command += [f"{flag}={values[0]}"] if dashes else [flag, *values]
    return command


def check_packages(names: tuple[str, ...]) -> None:
    """Raises ImportError if a package that is needed, even only at the end, is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"expected {', '.join(names)} to be installed, got no {', '.join(missing)}; "
            f"'pip install {' '.join(missing)}' brings them"
        )


def _settings_and_options(given: dict[str, Any]) -> tuple[Settings, Options]:
    """Merges the command line with the device's preset or, when resuming, with the checkpoint."""
    device = given.get("device", "auto")
    device = default_device() if device == "auto" else device
    check_device(device)
    defaults, names = preset(device), {field.name for field in fields(Options)}
    recipe = RECIPES.get(given.get("preset"), {})
    options = {name: value for name, value in (recipe | given).items() if name in names}
    options = replace(defaults.options, **(options | {"device": device}))
    given = {name: value for name, value in given.items() if name not in {*names, "preset"}}
    if "data" in given:
        given["data"] = absolute(given["data"])
        check_outside(options.out, given["data"])
    if "init_from" in given:
        given["init_from"] = os.path.realpath(given["init_from"])
    path = options.out / CHECKPOINT
    if options.resume and path.exists():
        settings = checkpoint_settings(read_metadata(path), path)
        settings.data = given.pop("data", settings.data)
        settings.steps = given.pop("steps", settings.steps)
        recipe = {name: recipe[name] for name in recipe.keys() - names - {"steps"}}
        for name, value in (recipe | given).items():
            saved = getattr(settings, name)
            if value != saved:
                flag, by = flag_of(name), "" if name in given else " by --preset"
                raise CheckpointMismatch(
                    f"expected {flag} to be {saved} as in {path}, got {value}{by}; leave "
                    f"{'--preset' if by else flag} out to go on, or --resume out to start again"
                )
        return settings, options
    given = {name: recipe[name] for name in recipe.keys() - names} | given
    if "init_from" in given:
        given = with_sizes(Path(given["init_from"]), given)
    return replace(defaults.settings, **given), options


def _config(
    settings: Settings, corpus: Corpus | TokenCorpus, checkpoint: Path | None
) -> GLAConfig | None:
    """The configuration of a run that starts from another model, or goes on from a checkpoint."""
    if settings.init_from is None:
        return None
    if checkpoint is not None:
        return GLAConfig.from_dict(read_metadata(checkpoint)["config"])
    folder = Path(settings.init_from)
    return config_for(initial_config(folder), folder, corpus)


def _run(
    settings: Settings,
    options: Options,
    corpus: Corpus | TokenCorpus,
    signals: StopSignals,
    parallel: Parallel,
) -> None:
    """Trains, evaluates and writes everything; raises Interrupted when a signal came."""
    start = time.perf_counter()
    device = torch.device(options.device)
    checkpoint = options.out / CHECKPOINT
    resumes = parallel.from_first(lambda: _resumes(options))
    config = _config(settings, corpus, checkpoint if resumes else None)
    how = (options.compile, options.cuda_graph, parallel, config)
    trainer = Trainer(settings, corpus, device, *how)
    if resumes:
        trainer.load(checkpoint)
    elif options.resume:
        print(f"No checkpoint in {options.out} yet: starting at step 0")
    if settings.init_from and not resumes:
        trainer.start_from(initial_tensors(Path(settings.init_from)))
    saved = checkpoint_settings(read_metadata(checkpoint), checkpoint) if trainer.step else None
    if saved != settings:
        trainer.save(checkpoint)  # from here on --resume knows the run's settings
    _print_start(trainer, corpus, options)
    signals.check()
    # When compiled, a fixed order would cost time, and autotuning could still choose other kernels.
    unordered = options.compile or parallel.size > 1
    with contextlib.nullcontext() if unordered else in_fixed_order(device):
        speed = train(trainer, options, signals)
    whole = trainer.consolidated()
    parallel.from_first(lambda: write_result(whole, corpus, options, speed))
    rate = f", {speed['tokens_per_second']:,} tokens/s" if speed["tokens_per_second"] else ""
    print(f"{time.perf_counter() - start:.0f} s in all{rate}")
    print("To continue a text with the model, and to talk with it:")
    for what in (options.prompt, "-i"):
        command = [sys.executable, "-m", "gla_ext.generate", str(options.out), what]
        print(f"  {shlex.join(command)}")


def _print_start(trainer: Trainer, corpus: Corpus | TokenCorpus, options: Options) -> None:
    print(f"Text: {corpus}")
    settings = trainer.settings
    print(
        f"Model: {count_parameters(trainer.model):,} parameters, {settings.layers} layers of width "
        f"{settings.hidden_size}, on {device_name(trainer.device)} in {settings.dtype}"
    )
    print(describe(settings, options))
    if options.compile and trainer.step < settings.steps:
        print("The first step compiles the model, which can take a minute", flush=True)
    if trainer.step:
        print(f"Going on from step {trainer.step} of {settings.steps}")
    if trainer.parallel.size > 1:
        print(f"Processes: {trainer.parallel}")
