"""Prompts on a pool of states, on a GPU: `chunk_gla_` beside `chunk_gla` between a gather, a mask
and a scatter of its states; a packed batch of a prompt and one-token sequences beside the two
apart; and what checkpoints cost.

    python benchmarks/bench_pool_prefill.py [--heads 4x128x256] [--gate 0.0625]
    python benchmarks/bench_pool_prefill.py --mixed  # prompts beside tokens alone, with its kernels

Gates are logsigmoid(N(0, 1)) times --gate: 1 / 16 is a trained model's, which divides by its
gate_logit_normalizer, and 1 a random one's without that.

Every call is checked against `chunk_gla` first; nothing is timed after an error. Times are the
GPU's, with a cold L2; the slope is that of one more call in a CUDA graph, warm. The floor of
one-token sequences and of checkpoints is the time of reading or writing their states at the rate of
a copy.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable

import torch
from shared.timing import capture, cold, copy_bytes_per_s, slope_us
from torch import Tensor
from torch.nn.functional import logsigmoid

import gla_ext
from gla_ext import chunk_gla, chunk_gla_, recurrent_gla_step_
from gla_ext.selftest import relative_error

POOL = 512  # rows, of which sequences have random ones
PROMPTS = {  # lengths of packed prompts; one alone is not packed
    "one of 2,048": (2048,),
    "one of 32,768": (32768,),
    "8 of 2,048": (2048,) * 8,
    "512 of 128": (128,) * 512,
    "64 of 16 to 2,048": tuple(16 + 2032 * n // 63 for n in range(64)),
}
DECODING = (64, 256)
EVERY = 512
TOLERANCE = 6e-3


@dataclasses.dataclass
class Call:
    """Packed sequences, or one, whose states are in rows of a pool; every other prompt starts."""

    tokens: dict[str, Tensor]
    pool: Tensor
    slots: Tensor
    goes_on: Tensor
    cu_seqlens: Tensor | None
    lengths: tuple[int, ...]

    def in_place(self, **options) -> Tensor:
        return chunk_gla_(
            **self.tokens,
            state=self.pool,
            slots=self.slots,
            has_initial_state=self.goes_on,
            cu_seqlens=self.cu_seqlens,
            **options,
        )

    def around(self) -> Tensor:
        """The same by a gather, a mask and a scatter, as serving engines do it."""
        states = torch.where(self.goes_on.view(-1, 1, 1, 1), self.pool[self.slots], 0)
        o, states = chunk_gla(
            **self.tokens,
            initial_state=states,
            output_final_state=True,
            cu_seqlens=self.cu_seqlens,
        )
        self.pool[self.slots] = states
        return o

    def chunks_alone(self) -> Tensor:
        """Without any states: what the tokens cost."""
        return chunk_gla(**self.tokens, cu_seqlens=self.cu_seqlens)[0]


def make(
    lengths: tuple[int, ...], heads: tuple[int, int, int], pool: Tensor, gate: float = 1 / 16
) -> Call:
    H, K, V = heads
    generator = torch.Generator("cuda").manual_seed(0)
    T = sum(lengths)

    def normal(D: int) -> Tensor:
        shape = (1, T, H, D)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    tokens = {"q": normal(K), "k": normal(K), "v": normal(V), "g": logsigmoid(normal(K)) * gate}
    slots = torch.randperm(len(pool), generator=generator, device="cuda")[: len(lengths)]
    decodes = torch.tensor(lengths, device="cuda") == 1
    goes_on = decodes | (torch.arange(len(lengths), device="cuda") % 2 == 0)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).cuda() if len(lengths) > 1 else None
    return Call(tokens, pool, slots, goes_on, cu_seqlens, lengths)


def checkpoints(call: Call) -> dict[str, Tensor | int]:
    counts = [length // EVERY for length in call.lengths]
    into = call.pool.new_empty(sum(counts), *call.pool.shape[1:])
    options = {"checkpoint_every": EVERY, "checkpoints": into}
    if call.cu_seqlens is not None:
        options["checkpoint_cu_starts"] = torch.tensor([0, *counts]).cumsum(0).cuda()
    return options


def check(call: Call, where: str) -> None:
    """Raises SystemExit unless both ways leave the same, and checkpoints are the states there."""
    before = call.pool.clone()
    expected = call.around()
    expected_pool = call.pool.clone()
    call.pool.copy_(before)
    options = checkpoints(call)
    o = call.in_place(**options)
    pairs = {"o": (o, expected), "the pool": (call.pool.clone(), expected_pool)}
    start, number = 0, 0
    for n, length in enumerate(call.lengths):
        count = length // EVERY
        if count and n in (0, len(call.lengths) - 1):
            prefix = {k: t[:, start : start + count * EVERY] for k, t in call.tokens.items()}
            state = before[call.slots[n]][None] * call.goes_on[n]
            _, state = chunk_gla(**prefix, initial_state=state, output_final_state=True)
            own = options["checkpoints"][number + count - 1]
            pairs[f"the last checkpoint of sequence {n}"] = (own, state[0])
        start, number = start + length, number + count
    call.pool.copy_(before)
    for name, (actual, true) in pairs.items():
        error = relative_error(actual, true)
        if not error <= TOLERANCE:
            raise SystemExit(f"{where}: {name} is off by {error:.1e}, allowed {TOLERANCE:.0e}")


def show(calls: dict[str, Callable[[], object]], more: dict[str, str] | None = None) -> None:
    graphs = {name: capture(call) for name, call in calls.items()}
    timings = cold({name: graph.replay for name, graph in graphs.items()})
    for name, timing in timings.items():
        print(f"  {name:44}{timing} ms   slope {slope_us(calls[name], (5, 25))} µs")
    for name, value in (more or {}).items():
        print(f"  {name:44}{value}")


def show_kernels(call: Callable[[], object], rounds: int = 10) -> None:
    """Microseconds of each kernel of the call, L2 as the calls leave it."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            name = re.sub(r"(?:void )?gla_ext::cuda::|[<(].*", "", event.key)
            print(f"    {name:42}{event.self_device_time_total / rounds:.1f} µs")


def compare_mixed(prompt: Call, mixed: Call, alone: Call, floor_ms: float) -> None:
    """A prompt and sequences of one token in one call, and the two apart."""
    one_each = {
        {"g": "gk"}.get(n, n): t.transpose(0, 1).contiguous() for n, t in alone.tokens.items()
    }
    packed = dataclasses.replace(prompt, cu_seqlens=torch.tensor([0, *prompt.lengths]).cuda())
    print(f"\na prompt of 2,048 and {len(alone.lengths)} sequences of one token")
    show(
        {
            "chunk_gla_, together": mixed.in_place,
            "gather, chunk_gla, scatter, together": mixed.around,
            "chunk_gla_, the prompt": prompt.in_place,
            "chunk_gla_, the prompt, packed": packed.in_place,
            "chunk_gla_, the tokens": alone.in_place,
            "recurrent_gla_step_, the tokens": lambda: recurrent_gla_step_(
                **one_each, state=alone.pool, slots=alone.slots
            ),
        },
        {"the tokens' states": f"{floor_ms:.4f} ms"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", default="4x128x256", help="H x K x V. Default: 4x128x256")
    parser.add_argument("--gate", type=float, default=1 / 16, help="strength. Default: 1 / 16")
    parser.add_argument("--mixed", action="store_true", help="prompts beside tokens alone")
    options = parser.parse_args()
    heads = tuple(int(x) for x in options.heads.split("x"))
    H, K, V = heads
    pool = torch.randn(POOL, H, K, V, device="cuda")
    state_bytes = 4 * H * K * V
    gate = options.gate
    calls = {name: make(lengths, heads, pool, gate) for name, lengths in PROMPTS.items()}
    mixed = {count: make((2048, *[1] * count), heads, pool, gate) for count in DECODING}
    steps = {count: make((1,) * count, heads, pool, gate) for count in DECODING}
    for name, call in (calls | mixed | steps).items():
        check(call, str(name))
    rate = copy_bytes_per_s()
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{where}, H {H}, K {K}, V {V}, bf16, gates times {gate:g}")
    print(f"{gla_ext.__file__}: all calls agree; a copy moves {rate / 1e12:.2f} TB/s")

    for name, call in () if options.mixed else calls.items():
        count = sum(length // EVERY for length in call.lengths)
        asks = checkpoints(call)
        print(f"\nprompts: {name}")
        show(
            {
                "gather, chunk_gla, scatter": call.around,
                "chunk_gla_": call.in_place,
                "chunk_gla, no states": call.chunks_alone,
                f"chunk_gla_, a checkpoint each {EVERY}": lambda c=call, a=asks: c.in_place(**a),
            },
            {"checkpoints' bytes": f"{1e3 * count * state_bytes / rate:.4f} ms"},
        )
    for count in DECODING:
        floor_ms = 2e3 * count * state_bytes / rate
        compare_mixed(calls["one of 2,048"], mixed[count], steps[count], floor_ms)
        if options.mixed:
            show_kernels(mixed[count].in_place)


if __name__ == "__main__":
    main()
