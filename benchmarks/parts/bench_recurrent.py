"""Decoding's operators at the shapes of benchmarks/NOTES.md: in CUDA graphs, and on the host.

The floor of a step is `state.mul_(1)`, which reads and writes the states too.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from shared.gate import WrongResults, require_close
from shared.timing import Timing, host_us, slope_us
from torch import Tensor
from torch.nn.functional import logsigmoid

from gla_ext import reference
from gla_ext.ops.recurrent import (
    fused_recurrent_gla,
    recurrent_gla_step_,
    recurrent_gla_verify,
)
from gla_ext.selftest import TOLERANCE, relative_error

SHAPES = (  # B, H, K, V
    (1, 4, 128, 256),
    (64, 4, 128, 256),
    (256, 4, 128, 128),
    (256, 4, 256, 512),
    (64, 2, 512, 512),
)
SHORT_SHAPE = (256, 4, 256, 512)  # with states in 16 bits too
VERIFY_SHAPES = ((1, 4, 128, 256), (64, 4, 256, 512))
DRAFTS = (1, 2, 4, 8, 16)  # tokens
# Between o of verification and of steps, which differ by fp32 rounding before they become bf16.
ROUNDED_ELSEWHERE = 1e-3
STATE_DTYPES = {"": torch.float32, ", bf16 states": torch.bfloat16, ", fp16 states": torch.float16}
LAYOUTS = {"[K, V]": False, "[V, K]": True}  # state_v_first


@dataclasses.dataclass(frozen=True)
class Rows:
    """T tokens of B rows, and the pool of their states."""

    tokens: dict[str, Tensor]  # q, k, v, gk
    state: Tensor  # [B, H, K, V] or [B, H, V, K]
    state_v_first: bool

    def arguments(self) -> dict:
        return self.tokens | {"state": self.state, "state_v_first": self.state_v_first}


def draw(
    shape, T: int, state_v_first: bool, device: str, state_dtype: torch.dtype = torch.float32
) -> Rows:
    """bf16 tokens with trained GLA's gates, and states, drawn on the device."""
    B, H, K, V = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size, dtype=torch.bfloat16):
        return torch.randn(size, generator=generator, dtype=dtype, device=device)

    tokens = {name: normal(B, T, H, D) for name, D in (("q", K), ("k", K), ("v", V), ("gk", K))}
    tokens["gk"] = logsigmoid(tokens["gk"]) / 16
    matrix = (V, K) if state_v_first else (K, V)
    state = normal(B, H, *matrix, dtype=torch.float32).to(state_dtype)
    return Rows(tokens, state, state_v_first)


def check(rows: Rows, where: str) -> None:
    """Raises WrongResults unless a step is the recurrence in fp64, for the first and the last row,
    and verification has its outputs and leaves the states.
    """
    state, ends = rows.state.clone(), [0, -1]
    o = recurrent_gla_step_(**rows.arguments() | {"state": state})
    first = rows.state[ends].double()
    expected = reference.recurrence(
        *(x[ends].double() for x in rows.tokens.values()),
        initial_state=first.mT if rows.state_v_first else first,
    )
    final = expected.final_state.mT if rows.state_v_first else expected.final_state
    bound = TOLERANCE[torch.bfloat16]
    require_close({"o": o[ends]}, {"o": expected.o}, bound, where)
    require_close({"state": state[ends]}, {"state": final}, TOLERANCE[state.dtype], where)
    before = rows.state.clone()
    verified = recurrent_gla_verify(**rows.arguments())
    same = relative_error(verified, o) <= ROUNDED_ELSEWHERE
    if not (same and torch.equal(rows.state, before)):
        raise WrongResults(f"{where}: verification is not what a step gives, or it wrote a state")


def calls(rows: Rows) -> dict[str, Callable[[], object]]:
    """A step in place, one that returns a new state, and the floor of both."""
    arguments = rows.arguments()
    return {
        "floor": lambda: rows.state.mul_(1),
        "step_": lambda: recurrent_gla_step_(**arguments),
        "fused_recurrent": lambda: fused_recurrent_gla(
            **rows.tokens,
            initial_state=rows.state,
            output_final_state=True,
            state_v_first=rows.state_v_first,
        ),
    }


@torch.no_grad()
def measure(device: str = "cuda") -> dict[str, dict[str, dict[str, Timing | float]]]:
    """Microseconds: steps and verification in graphs by shape, and eager calls on the host."""
    results: dict[str, dict] = {"step": {}, "verify": {}, "host": {}}
    short = [(SHORT_SHAPE, of) for of in STATE_DTYPES if of]
    for shape, of in [*((shape, "") for shape in SHAPES), *short]:
        row = results["step"].setdefault(name(shape) + of, {})
        for layout, state_v_first in LAYOUTS.items():
            rows = draw(shape, 1, state_v_first, device, STATE_DTYPES[of])
            check(rows, f"recurrence, {name(shape)}{of}, {layout}")
            times = {what: slope_us(call) for what, call in calls(rows).items()}
            row.setdefault("floor", times.pop("floor"))
            row |= {f"{what} {layout}": time for what, time in times.items()}
            del rows
            torch.cuda.empty_cache()
    for shape in VERIFY_SHAPES:
        for layout, state_v_first in LAYOUTS.items():
            row = results["verify"].setdefault(f"{name(shape)}, {layout}", {})
            for T in DRAFTS:
                rows = draw(shape, T, state_v_first, device)
                check(rows, f"verification, {name(shape)}, {layout}, T {T}")
                call = functools.partial(recurrent_gla_verify, **rows.arguments())
                row[f"T {T}"] = slope_us(call)
    rows = draw(SHAPES[0], 1, False, device)
    eager = calls(rows) | {"verify": lambda: recurrent_gla_verify(**rows.arguments())}
    results["host"] = {what: host_us(call) for what, call in eager.items() if what != "floor"}
    return results


def name(shape) -> str:
    return "B {}, H {}, K {}, V {}".format(*shape)
