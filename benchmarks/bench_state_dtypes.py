"""Pools of states in fp32, bf16 and fp16: how far 100,000 decoded tokens drift from fp64, and on a
GPU how long a decode step takes beside a copy of as many bytes.

    python benchmarks/bench_state_dtypes.py --only times
    python benchmarks/bench_state_dtypes.py --only drift --tokens 100000

Without a GPU it measures the drift alone, on the CPU.
"""

import argparse
import dataclasses
import platform
from collections.abc import Callable

import torch
from shared.timing import slope_us
from torch import Tensor
from torch.nn.functional import logsigmoid

from gla_ext import recurrent_gla_step_, recurrent_gla_verify

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MARKS = (100, 1_000, 10_000, 100_000)  # tokens after which errors are taken
WINDOW = 100  # tokens whose outputs an error is of
SIZES = (4, 2, 64, 64)  # B, H, K, V of what drifts: its error depends on neither
SHAPE = (256, 4, 256, 512)  # B, H, K, V of the step that is timed


@dataclasses.dataclass(frozen=True)
class Gates:
    """What is decoded: gates, and a mean of keys and values beside their variance of 1."""

    name: str
    make: Callable[[Tensor], Tensor]  # of normal numbers
    mean: float = 0.0


CASES = (
    Gates("logsigmoid(N(0, 1)) / 16: 20 tokens", lambda x: logsigmoid(x) / 16),
    Gates("logsigmoid(N(4, 1)) / 16: 500 tokens", lambda x: logsigmoid(x + 4) / 16),
    Gates("-1e-5: 100,000 tokens", lambda x: torch.full_like(x, -1e-5)),
    Gates("0: all tokens", torch.zeros_like),
    Gates("0, keys and values of mean 1", torch.zeros_like, mean=1.0),
)


def draw(case: Gates, tokens: int, sizes=SIZES) -> dict[str, Tensor]:
    """Tokens [B, T, H, K | V] whose numbers bf16 holds."""
    B, H, K, V = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(D: int) -> Tensor:
        return torch.randn(B, tokens, H, D, generator=generator)

    x = {"q": normal(K), "k": normal(K) + case.mean, "v": normal(V) + case.mean}
    x["gk"] = case.make(normal(K))
    return {name: t.bfloat16().float() for name, t in x.items()} | {"gk": x["gk"]}


def decode(tokens: dict[str, Tensor], state: Tensor) -> Tensor:
    """Moves states on, a token a call."""
    pieces = [t.split(1, dim=1) for t in tokens.values()]
    outputs = [
        recurrent_gla_step_(q, k, v, gk, state=state) for q, k, v, gk in zip(*pieces, strict=True)
    ]
    return torch.cat(outputs, 1)


def drift(case: Gates, tokens: int, device: str) -> dict[str, list[float]]:
    """Relative RMS errors of the outputs up to each mark, by the pool's dtype."""
    marks = [mark for mark in MARKS if mark < tokens] + [tokens]
    B, H, K, V = SIZES
    everything = draw(case, tokens)
    truth = torch.zeros(B, H, K, V, dtype=torch.float64)
    pools = {name: torch.zeros(B, H, K, V, dtype=t, device=device) for name, t in DTYPES.items()}
    errors: dict[str, list[float]] = {name: [] for name in DTYPES}
    done = 0
    for mark in marks:
        here = {name: t[:, done:mark] for name, t in everything.items()}
        last = min(WINDOW, mark - done)
        expected = recurrent_gla_step_(
            **{name: t.double() for name, t in here.items()}, state=truth
        )[:, -last:]
        here = {name: t.to(device) for name, t in here.items()}
        for name, pool in pools.items():
            wrong = decode(here, pool)[:, -last:].double().cpu() - expected
            errors[name].append((wrong.norm() / expected.norm()).item())
        done = mark
    return errors


def print_drift(tokens: int, device: str) -> None:
    where = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    marks = [mark for mark in MARKS if mark < tokens] + [tokens]
    print(
        f"\nRelative RMS error of the last {WINDOW} outputs against fp64, a token a call; {where}"
    )
    print(
        "\n| gates, and how long a state remembers | pool | "
        + " | ".join(f"{mark:,} tokens" for mark in marks)
        + " |"
    )
    print("|---|---|" + "--:|" * len(marks))
    for case in CASES:
        for name, found in drift(case, tokens, device).items():
            print(
                f"| {case.name} | {name} | " + " | ".join(f"{x:.1e}" for x in found) + " |",
                flush=True,
            )


def step_inputs(dtype: torch.dtype, state_v_first: bool, shape=SHAPE, device: str = "cuda") -> dict:
    """bf16 tokens of trained GLA's gates, and a pool of `dtype`."""
    B, H, K, V = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, generator=generator, dtype=dtype, device=device)

    x = {name: normal(B, 1, H, D) for name, D in (("q", K), ("k", K), ("v", V), ("gk", K))}
    x["gk"] = logsigmoid(x["gk"]) / 16
    matrix = (V, K) if state_v_first else (K, V)
    state = normal(B, H, *matrix, dtype=torch.float32).to(dtype)
    return x | {"state": state, "state_v_first": state_v_first}


def check_step(inputs: dict) -> None:
    """A step from a 16-bit pool is a step from the same states in fp32, rounded."""
    state = inputs["state"].clone()
    wide = state.to(torch.float32, copy=True)
    o = recurrent_gla_step_(**inputs | {"state": state})
    expected = recurrent_gla_step_(**inputs | {"state": wide})
    if not (torch.equal(o, expected) and torch.equal(state, wide.to(state.dtype))):
        raise SystemExit(f"a step on {state.dtype} states is wrong")


def print_times() -> None:
    B, H, K, V = SHAPE
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"\nMicroseconds of a decode step, B {B}, H {H}, K {K}, V {V}, {where}\n")
    print(
        "\n| pool | copy of its bytes | layout | step | step / copy | write_slots | verify, T 4 |"
    )
    print("|---|--:|---|--:|--:|--:|--:|")
    for name, dtype in DTYPES.items():
        for state_v_first in (False, True):
            inputs = step_inputs(dtype, state_v_first)
            check_step(inputs)
            state = inputs["state"]
            # The floor: every number of the states is read once and written once.
            floor = slope_us(lambda state=state: state.mul_(1)).median
            step = slope_us(lambda inputs=inputs: recurrent_gla_step_(**inputs)).median
            order = torch.arange(B, device="cuda")
            slots = {"slots": order, "write_slots": order + B, "state": torch.cat([state, state])}
            written = slope_us(lambda inputs=inputs | slots: recurrent_gla_step_(**inputs)).median
            del slots
            tokens = ("q", "k", "v", "gk")
            drafts = inputs | {n: inputs[n].expand(-1, 4, -1, -1).contiguous() for n in tokens}
            verify = slope_us(lambda drafts=drafts: recurrent_gla_verify(**drafts)).median
            layout = "[V, K]" if state_v_first else "[K, V]"
            print(f"| {name} | {floor:.1f} | {layout} | {step:.1f} | {step / floor:.3f} | "
                  f"{written:.1f} | {verify:.1f} |", flush=True)  # fmt: skip
            del inputs, state, drafts
            torch.cuda.empty_cache()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=MARKS[-1])
    parser.add_argument("--only", choices=["times", "drift"])
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if has_gpu and options.only != "drift":
        print_times()
    if options.only != "times":
        print_drift(options.tokens, "cuda" if has_gpu else "cpu")


if __name__ == "__main__":
    main()
