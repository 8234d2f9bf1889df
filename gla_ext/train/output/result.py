"""What a run ends with: a folder for Hugging Face's libraries, and its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gla_ext.model import count_parameters
from gla_ext.model.checkpoint import CONFIG_FILE
from gla_ext.model.custom_code import AUTO_MAP, write_custom_code
from gla_ext.model.files import write_text
from gla_ext.train.data import Corpus
from gla_ext.train.output.log import without_nan
from gla_ext.train.output.plot import plot_losses
from gla_ext.train.presets import Options
from gla_ext.train.run_folder import CARD, CHECKPOINT, CURVE, METRICS, RESULTS, SAMPLE
from gla_ext.train.tokens.corpus import TokenCorpus
from gla_ext.train.trainer import Trainer

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [gated-linear-attention, gla_ext]
---
# {name}

A language model of Gated Linear Attention ([arXiv 2312.06635](https://arxiv.org/abs/2312.06635)):
{parameters:,} parameters, {layers} layers of width {hidden_size}, {vocab_size:,} tokens. It was
trained by `python -m gla_ext.train`, in {steps:,} updates of {tokens:,} tokens, on {text}.

| held-out text, {held_out_bytes:,} bytes | |
|---|---|
| bits a byte | {bits:.3f} |
| perplexity a token | {perplexity:.2f} |

`metrics.json` has all settings, `loss.png` the curve. With gla_ext installed:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
```

`python -m gla_ext.generate {name} TEXT` continues a text, `python -m gla_ext.serve {name}` serves
the model.
"""


def device_name(device: torch.device) -> str:
    """The GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def write_result(
    trainer: Trainer, corpus: Corpus | TokenCorpus, options: Options, speed: dict[str, float]
) -> None:
    """Writes what RESULTS names, and prints the results."""
    bits = {"this model": trainer.evaluations[-1][1]} | corpus.bits_of_others()
    out = options.out
    trainer.model.save_pretrained(out)
    write_custom_code(out)
    config = json.loads((out / CONFIG_FILE).read_text(encoding="utf-8")) | {"auto_map": AUTO_MAP}
    write_text(out / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    corpus.tokenizer.save(out)
    sample = trainer.sample(options.prompt, options.sample_bytes)
    write_text(out / SAMPLE, sample + "\n")
    plot_losses(out / CURVE, trainer, bits)
    metrics = {
        "held_out_bits_per_byte": bits,
        "held_out_perplexity": trainer.perplexity(bits["this model"]),
        "held_out_bytes": corpus.held_out_bytes,
        "train_bits_per_byte": trainer.recent_loss(),
        "steps": trainer.step,
        **speed,
        "device": device_name(trainer.device),
        "parameters": count_parameters(trainer.model),
        "evaluations": trainer.evaluations,
        "best_evaluation": trainer.best_evaluation(),
        "text": corpus.name,
        "settings": asdict(trainer.settings),
    }
    write_text(out / METRICS, json.dumps(without_nan(metrics), indent=2) + "\n")
    write_text(out / CARD, _card(trainer, out, metrics))
    print(f"\nA continuation of {options.prompt!r}:\n\n{sample}\n")
    print(f"Held-out text, perplexity a token: {metrics['held_out_perplexity']:.2f}")
    print(f"Held-out text, bits a byte ({metrics['held_out_bytes']:,} bytes):")
    for name, value in bits.items():
        print(f"  {name:<12}{value:.3f}")
    step, best = trainer.best_evaluation()
    print(f"Best evaluation: {best:.3f} at step {step} of {trainer.step}")
    print(f"Wrote {', '.join((CHECKPOINT, *RESULTS[:-1]))} and {RESULTS[-1]} to {out}")


def _card(trainer: Trainer, out: Path, metrics: dict[str, Any]) -> str:
    """The model card."""
    settings = trainer.settings
    text = _CARD.format(
        name=out.resolve().name,
        parameters=metrics["parameters"],
        layers=settings.layers,
        hidden_size=settings.hidden_size,
        vocab_size=trainer.model.config.vocab_size,
        steps=trainer.step,
        tokens=settings.tokens,
        text=metrics["text"],
        held_out_bytes=metrics["held_out_bytes"],
        bits=metrics["held_out_bits_per_byte"]["this model"],
        perplexity=metrics["held_out_perplexity"],
    )
    return text.encode(errors="replace").decode()  # names of files need not be UTF-8


def evaluate(options: Options) -> None:
    """Runs lm-eval on the result; what it writes is in the folder lm_eval of the run.

    Raises:
        OSError: if it fails.
    """
    torch.cuda.empty_cache()
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks"]
    command += [",".join(options.evaluate), "--device", options.device, "--model_args"]
    command += [f"pretrained={options.out},trust_remote_code=True", "--output_path"]
    command += [str(options.out / "lm_eval")]
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun's
    alone = {name: value for name, value in os.environ.items() if name not in ranks}
    status = subprocess.run(command, env=alone, check=False).returncode
    if status:
        raise OSError(f"lm-eval ended with status {status}; the model in {options.out} is whole")
