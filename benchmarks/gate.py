"""What has to be right before anything is timed."""

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
    """What is wrong at a shape, one line each: first and last row against fp64, on both paths."""
    from common import exact_by_chunks, ours

    from gla_ext import selftest

    x, wrong = bench.draw(shape, gate), []
    paths = {"default path": ours(x), "steps": bench.on_steps(lambda: ours(x))()}
    for row in sorted({0, shape[0] - 1}):
        for name, expected in exact_by_chunks(x.select(row)).items():
            for path, results in paths.items():
                error = selftest.relative_error(results[name][row : row + 1], expected)
                if not error <= selftest.tolerance(name, torch.bfloat16):
                    wrong.append(f"{shape}, {path}, row {row}: {name} is off by {error:.1e}")
    return wrong


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
