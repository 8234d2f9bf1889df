"""Runs of the experiments and their results, made up."""

from experiments.runs import Result, Run

SIZES = {"width": 16, "layers": 1, "heads": 2, "seq_len": 32, "batch_size": 2, "steps": 2}
RUN = Run(task="text", layer="gla", lr=1e-2, text="digest", **SIZES)
RECALL = Run(task="recall", layer="gla", lr=1e-2, pairs=2, examples=5, tied=True, **SIZES)


def result(of: Run, score: float, **details) -> Result:
    known = {"seconds": 36.0, "device": "GPU", "parameters": 14_000_000, "steps_done": of.steps}
    return Result(of, score, known | details)
