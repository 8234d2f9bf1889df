"""What has to be right before anything is timed."""

import dataclasses

import torch
from shared import inputs
from shared import operator as bench
from torch import Tensor

from gla_ext import selftest


class WrongResults(Exception):
    """Results that are off, one line each in `args`."""


def require(wrong: list[str]) -> None:
    """Raises WrongResults if there is something in the list."""
    if wrong:
        raise WrongResults(*wrong)


def check_small(device: str, *dtypes: torch.dtype) -> list[str]:
    """The cases of `python -m gla_ext.selftest` that are wrong, one line each."""
    return [
        f"selftest, {case.name}, {dtype}: {name} is off by {error:.1e}"
        for dtype in dtypes
        for case in selftest.CASES
        for name, error in selftest.check(case, dtype, device).items()
        if not error <= selftest.tolerance(name, dtype)
    ]


def check_inputs(x, where: str) -> list[str]:
    """What is wrong on inputs x, one line each: first and last sequence against fp64, on both
    paths.
    """
    wrong = []
    paths = {"default path": inputs.ours(x), "steps": bench.on_steps(lambda: inputs.ours(x))()}
    packed = x.cu_seqlens is not None
    ends = x.cu_seqlens.tolist() if packed else range(x.q.shape[0] + 1)
    for n in sorted({0, len(ends) - 2}):
        rows = slice(ends[n], ends[n + 1])
        for name, expected in inputs.exact_by_chunks(spread(x.select(n))).items():
            if name == "dg" and x.g.dim() == 3:
                expected = expected.sum(-1)
            for path, results in paths.items():
                own = results[name]
                of_state = name in ("final_state", "dh0")
                own = own[n : n + 1] if of_state else own[:, rows] if packed else own[rows]
                error = selftest.relative_error(own, expected)
                if not error <= selftest.tolerance(name, torch.bfloat16):
                    wrong.append(f"{where}, {path}, sequence {n}: {name} is off by {error:.1e}")
    return wrong


def spread(x):
    """x with one gate a channel where it has one a head."""
    if x.g.dim() == 4:
        return x
    return dataclasses.replace(x, g=x.g.unsqueeze(-1).expand(x.k.shape))


def require_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, where: str
) -> None:
    """Raises WrongResults unless every tensor is within `tolerance`, in RMS, of its namesake."""
    errors = {name: selftest.relative_error(actual[name], x) for name, x in expected.items()}
    require(
        [
            f"{where}: {name} is off by {error:.1e}, allowed {tolerance:.1e}"
            for name, error in errors.items()
            if not error <= tolerance
        ]
    )
