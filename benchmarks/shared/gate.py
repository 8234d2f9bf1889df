"""What has to be right before anything is timed."""

import dataclasses

import bench_cuda as bench
import torch
from torch import Tensor


class WrongResults(Exception):
    """Results that are off, one line each in `args`."""


def check_small() -> list[str]:
    """The cases of `python -m gla_ext.selftest` that are wrong on CUDA, on the plan's path or the
    steps.
    """
    from gla_ext import selftest

    def errors(path: str) -> list[str]:
        return [
            f"selftest, {path}, {case.name}, {dtype}: {name} is off by {error:.1e}"
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for case in selftest.CASES
            for name, error in selftest.check(case, dtype, "cuda").items()
            if not error <= selftest.tolerance(name, dtype)
        ]

    return errors("default path") + bench.on_steps(lambda: errors("steps"))()


def check(shape, gate: float = 1 / 16) -> list[str]:
    """What is wrong at a shape, one line each."""
    return check_inputs(bench.draw(shape, gate), str(shape))


def check_inputs(x, where: str) -> list[str]:
    """What is wrong on inputs x, one line each: first and last sequence against fp64, on both
    paths.
    """
    from shared.inputs import exact_by_chunks, ours

    from gla_ext import selftest

    wrong = []
    paths = {"default path": ours(x), "steps": bench.on_steps(lambda: ours(x))()}
    packed = x.cu_seqlens is not None
    ends = x.cu_seqlens.tolist() if packed else range(x.q.shape[0] + 1)
    for n in sorted({0, len(ends) - 2}):
        rows = slice(ends[n], ends[n + 1])
        for name, expected in exact_by_chunks(spread(x.select(n))).items():
            if name == "dg" and x.g.dim() == 3:
                expected = expected.sum(-1)
            for path, results in paths.items():
                of_state = name in ("final_state", "dh0")
                own = results[name]
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
    from gla_ext.selftest import relative_error

    errors = {name: relative_error(actual[name], x) for name, x in expected.items()}
    wrong = [
        f"{where}: {name} is off by {error:.1e}, allowed {tolerance:.1e}"
        for name, error in errors.items()
        if not error <= tolerance
    ]
    if wrong:
        raise WrongResults(*wrong)
