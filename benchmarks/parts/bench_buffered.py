"""A step with buffers beside a plain one, in CUDA graphs and out of them, and what drifts.

A time is the mean of 16 steps in a row, of which one folds the buffer of every sequence, over as
many pools as L2 does not hold. "fold" is that step alone. The floors are a read of the states by
`sum`, and a read and write by `mul_(1)`.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable

import torch
from shared.gate import WrongResults
from shared.timing import capture, elapsed_ms
from torch import Tensor
from torch.nn.functional import logsigmoid

from gla_ext.ops import recurrent_gla_buffered_step_, recurrent_gla_step_
from gla_ext.selftest import TOLERANCE, relative_error

L = 16
HEADS = ((128, 256), (256, 512))  # K, V
BATCHES = (32, 64, 256)
H = 4
COLD_BYTES = 2**28
STATE_DTYPES = (torch.float32, torch.bfloat16)
CHECKED = (  # K, V
    *((128, 256), (256, 512), (512, 64), (1024, 40), (72, 100), (33, 65)),
)


@dataclasses.dataclass
class Rows:
    """T tokens of B rows, the pool of their states, and buffers with every place taken."""

    tokens: dict[str, Tensor]
    pools: dict[str, Tensor]
    state_v_first: bool = False

    def step(self, count: Tensor, device: str | None = None) -> Tensor:
        tensors = self.tokens | self.pools | {"count": count}
        if device is not None:
            tensors = {name: t.to(device) for name, t in tensors.items()}
        options = {"state_v_first": self.state_v_first}
        return recurrent_gla_buffered_step_(**tensors, **options)

    def plain(self) -> Tensor:
        state, options = self.pools["state"], {"state_v_first": self.state_v_first}
        return recurrent_gla_step_(**self.tokens, state=state, **options)


def draw(
    B: int, T: int, K: int, V: int, state_dtype: torch.dtype, dtype=torch.bfloat16, v_first=False,
    device: str = "cuda", gate: float = 1 / 16,
) -> Rows:  # fmt: skip
    generator = torch.Generator(device).manual_seed(K + T)

    def normal(*size, of=dtype):
        return torch.randn(size, generator=generator, dtype=of, device=device)

    tokens = {name: normal(B, T, H, D) for name, D in (("q", K), ("k", K), ("v", V), ("gk", K))}
    pools = {f"buffer_{name}": normal(B, L, H, D) for name, D in (("k", K), ("v", V), ("g", K))}
    for gates in (tokens, "gk"), (pools, "buffer_g"):
        gates[0][gates[1]] = gate * logsigmoid(gates[0][gates[1]])
    matrix = (V, K) if v_first else (K, V)
    pools["state"] = normal(B, H, *matrix, of=torch.float32).to(state_dtype)
    return Rows(tokens, pools, v_first)


def check() -> None:
    """Raises WrongResults where CUDA's results are not those of the CPU, which the tests compare
    with fp64.
    """
    count = torch.tensor([0, 5, 16, 12, 15], dtype=torch.int32)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cases = itertools.product(
        CHECKED, (1, 3, 4, 9), dtypes, (*dtypes[:1], dtypes[2]), (False, True)
    )
    for (K, V), T, dtype, state_dtype, v_first in cases:
        ours = draw(5, T, K, V, state_dtype, dtype, v_first)
        theirs = Rows(ours.tokens, {n: t.cpu() for n, t in ours.pools.items()}, v_first)
        results = {"o": (ours.step(count.cuda()), theirs.step(count, "cpu"))}
        results |= {n: (t, theirs.pools[n]) for n, t in ours.pools.items()}
        for name, (own, expected) in results.items():
            error, bound = relative_error(own, expected), TOLERANCE[expected.dtype]
            if state_dtype == torch.bfloat16:  # here and there a fold rounds to the other side
                bound = max(bound, 1e-4)
            if not error <= bound:
                raise WrongResults(
                    f"K {K}, V {V}, T {T}, {dtype}, states {state_dtype}, v first {v_first}: "
                    f"{name} is off by {error:.1e}"
                )


def us_of(calls: list[Callable[[], object]], graph: bool) -> float:
    """Microseconds of one of the calls, in a row: the median of several runs."""

    def run() -> None:
        for call in calls:
            call()

    if graph:
        run = capture(run).replay
    for _ in range(2):
        run()
    return 1e3 * statistics.median(elapsed_ms(run) for _ in range(5)) / len(calls)


def times(
    B: int, T: int, K: int, V: int, state_dtype: torch.dtype, v_first: bool
) -> dict[str, float]:
    """Microseconds of a step of T tokens."""
    first = draw(B, T, K, V, state_dtype, v_first=v_first)
    copies = max(1, COLD_BYTES // first.pools["state"].nbytes)
    layers = [
        Rows(first.tokens, {n: t.clone() for n, t in first.pools.items()}, v_first)
        for _ in range(copies)
    ]
    held = [L, *range(T, L - T + 1, T)]
    counts = [torch.full((B,), n, dtype=torch.int32, device="cuda") for n in held]

    def steps(counts: list[Tensor]) -> list[Callable[[], object]]:
        return [lambda x=x, n=n: x.step(n) for n in counts for x in layers]

    plain = [x.plain for x in layers] * len(counts)
    states = [x.pools["state"] for x in layers]
    return {
        "read": us_of([lambda s=s: s.view(-1).sum() for s in states], graph=True),
        "read and written": us_of([lambda s=s: s.mul_(1) for s in states], graph=True),
        "plain": us_of(plain, graph=True),
        "buffered": us_of(steps(counts), graph=True),
        "fold": us_of(steps(counts[:1]), graph=True),
        "emptiest": us_of(steps(counts[1:2]), graph=True),
        "fullest": us_of(steps(counts[-1:]), graph=True),
        "plain, eager": us_of(plain, graph=False),
        "buffered, eager": us_of(steps(counts), graph=False),
    }


def drift(tokens: int = 4096, gate: float = 1e-4) -> dict[str, float]:
    """The relative error of the last token's o on bf16 states, whose gates are near 0."""
    ours, plain, exact = (draw(4, 1, 128, 256, torch.bfloat16, torch.float32) for _ in range(3))
    exact.pools["state"] = exact.pools["state"].float()
    generator = torch.Generator("cuda").manual_seed(1)
    count = torch.zeros(4, dtype=torch.int32, device="cuda")
    for t in range(tokens):
        new = {
            n: torch.randn(x.shape, generator=generator, device="cuda")
            for n, x in ours.tokens.items()
        }
        new["gk"] = gate * logsigmoid(new["gk"])
        ours.tokens = plain.tokens = exact.tokens = new
        o, rounded, truth = ours.step(count), plain.plain(), exact.plain()
        count.fill_(t % L + 1)
    return {"buffered": relative_error(o, truth), "plain": relative_error(rounded, truth)}


@torch.no_grad()
def main() -> None:
    check()
    print("equal to the CPU's; microseconds of a step, H 4:")
    cases = [*itertools.product(BATCHES, (1,), HEADS, STATE_DTYPES, (False, True))]
    cases += itertools.product((32,), (4,), HEADS, STATE_DTYPES, (False, True))
    for B, T, (K, V), state_dtype, v_first in cases:
        found = times(B, T, K, V, state_dtype, v_first)
        row = ", ".join(f"{n} {us:.1f}" for n, us in found.items())
        layout = "[V, K]" if v_first else "[K, V]"
        print(f"B {B}, T {T}, K {K}, V {V}, {state_dtype}, {layout}: {row}", flush=True)
        torch.cuda.empty_cache()
    for name, error in drift().items():
        print(f"drift of bf16 states in 4,096 tokens, {name}: {error:.3f}")
