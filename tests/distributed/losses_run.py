"""For torchrun: trains on Python's library and writes the losses.

Arguments: --parallel, or 'one' for one process; the device; a file; the settings as JSON.
"""

import json
import sys
from pathlib import Path

import torch

from gla_ext.devices import in_fixed_order
from gla_ext.train.data import load_corpus
from gla_ext.train.parallel import Parallel
from gla_ext.train.presets import Options, Settings
from gla_ext.train.ranks.processes import Processes
from gla_ext.train.trainer import Trainer

if __name__ == "__main__":
    kind, name, out, settings = sys.argv[1:]
    parallel = Parallel() if kind == "one" else Processes(name)
    options = Options(device=name, parallel="auto" if kind == "one" else kind)
    settings = Settings(**json.loads(settings))
    with parallel.joined():
        parallel.lay_out(settings, options)
        corpus = load_corpus(max_bytes=8 << 20)
        device = torch.device(options.device)
        trainer = Trainer(settings, corpus, device, parallel=parallel)
        with in_fixed_order(device):
            while trainer.step < settings.steps:
                trainer.update()
        if parallel.is_first:
            Path(out).write_text(json.dumps(trainer.losses.tolist()))
