"""What the engine of `gla_ext.serve` gives on a GPU, with a 374 M model of random weights in bf16.

    python benchmarks/bench_serve.py [--only start decode first load] [--device cpu --tiny]

- start: ms to make an engine, to its first token and the 99 after it without `warm_up`, and of
  `warm_up`, in an engine of its own
- decode: tokens/s of B greedy sequences, beside `Decoder` with the same projections
- first: ms from submit to the first token of one prompt, without other work and without a prefix
- load: 64 clients, each of which asks 4 times in turn for 128 tokens after one of 8 beginnings of
  1,536 tokens and 100 to 400 of its own: tokens/s, time to the first token and between tokens, with
  and without the prefix cache

Before anything is timed, the engine's tokens are compared with those of `generate`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Iterator

import torch
from shared import models
from shared.gate import WrongResults
from shared.machine import require_gpu

from gla_ext.decode import Decoder
from gla_ext.model import GLAForCausalLM, fuse_projections
from gla_ext.serve import Engine, Limits, Request
from gla_ext.serve.sequence import Sequence

PARTS = ("start", "decode", "first", "load")
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured."""

    model: dict
    dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = (1, 32, 256)
    steps: int = 200
    prompts: tuple[int, ...] = (2048, 100_000)
    clients: int = 64
    turns: int = 4
    new: int = 128
    beginnings: int = 8
    shared: int = 1536
    own: tuple[int, int] = (100, 400)
    checkpoint_tokens: int = 512
    cache_bytes: int = 2 << 30


SIZES = Sizes(models.MODEL)
TINY = Sizes(
    {"hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2, "vocab_size": 99},
    torch.float32,
    batches=(1, 3),
    steps=5,
    prompts=(50, 300),
    clients=6,
    turns=2,
    new=6,
    beginnings=2,
    shared=150,
    own=(1, 40),
    checkpoint_tokens=64,
    cache_bytes=1 << 20,
)


def build(sizes: Sizes, device: str) -> GLAForCausalLM:
    model = models.build(sizes.model | {"eos_token_id": None}, device, sizes.dtype)
    return fuse_projections(model.eval())


def draw(sizes: Sizes, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(sizes.model["vocab_size"]), k=count)


def limits(sizes: Sizes, rows: int, cache_bytes: int = 0) -> Limits:
    return Limits(
        rows=rows,
        waiting=4096,
        new_tokens=1 << 20,
        checkpoint_tokens=sizes.checkpoint_tokens,
        cache_bytes=cache_bytes,
    )


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def check(sizes: Sizes, device: str) -> None:
    """Raises WrongResults unless the engine gives the tokens of `generate`, of a model in fp32 with
    two of the layers: more, in bf16, would round to other tokens where prompts are packed."""
    few = models.of_few_layers(sizes.model)
    model = build(dataclasses.replace(sizes, model=few, dtype=torch.float32), device)
    engine = Engine(model, limits=limits(sizes, 8, sizes.cache_bytes))
    engine.warm_up()
    prompts = [draw(sizes, 30 + 40 * seed, seed) for seed in range(8)]
    for _ in range(2):  # with the prefix cache the second time
        sequences = engine.submit(*(Request(p, 8, temperature=0) for p in prompts))
        found: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
        while engine.busy:
            for sequence, delta in engine.step():
                found[sequence] += delta.tokens
        expected = model.generate(prompts, 8, temperature=0)
        for prompt, tokens, row in zip(prompts, found.values(), expected, strict=True):
            if tokens != (wanted := row[len(prompt) :].tolist()):
                raise WrongResults(
                    f"expected generate's tokens after {len(prompt)}, {wanted}, got {tokens}"
                )


def start_ms(model: GLAForCausalLM, sizes: Sizes) -> Iterator[tuple[str, float]]:
    """What is waited for in a program that asks for one text, and in one that stays."""

    def passed() -> float:
        nonlocal start
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        before, start = start, time.perf_counter()
        return 1000 * (start - before)

    for name in ("without warm_up", "with it"):
        start = time.perf_counter()
        engine = Engine(model, limits=limits(sizes, 32, sizes.cache_bytes))
        yield f"an engine, {name}", passed()
        if name == "with it":
            engine.warm_up()
            yield "warm_up", passed()
        (sequence,) = engine.submit(Request(draw(sizes, 100, 0), 100, temperature=0))
        while not sequence.new:
            engine.step()
        yield f"first token, {name}", passed()
        finish(engine)
        yield f"99 tokens, {name}", passed()


def decode_rates(model: GLAForCausalLM, sizes: Sizes, batch: int) -> Iterator[tuple[str, float]]:
    """Tokens/s of the engine and of `Decoder`."""
    prompts = [draw(sizes, 64, seed) for seed in range(batch)]
    engine, rates = Engine(model, limits=limits(sizes, batch)), []
    engine.warm_up()
    for _ in range(REPEATS):
        sequences = engine.submit(*(Request(p, sizes.steps, temperature=0) for p in prompts))
        while not all(sequence.new for sequence in sequences):
            engine.step()
        start, before = time.perf_counter(), sum(g.new for g in sequences)
        finish(engine)
        rates.append((batch * sizes.steps - before) / (time.perf_counter() - start))
    yield "engine", statistics.median(rates)
    decoder, rates = Decoder(model, batch, temperature=0), []
    for _ in range(REPEATS):
        decoder.prefill(prompts).tolist()
        start = time.perf_counter()
        for _ in range(sizes.steps):
            tokens = decoder.step()
        tokens.tolist()
        rates.append(batch * sizes.steps / (time.perf_counter() - start))
    yield "Decoder", statistics.median(rates)


def first_token_ms(engine: Engine, sizes: Sizes, count: int) -> float:
    times = []
    for seed in range(REPEATS + 1):
        tokens = draw(sizes, count, seed)
        start = time.perf_counter()
        engine.submit(Request(tokens, 1, temperature=0))
        finish(engine)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])  # the first one warms up


@dataclasses.dataclass(frozen=True)
class Load:
    """What clients saw: seconds to the first token, and between the others."""

    tokens_per_s: float
    first: list[float]
    between: list[float]
    cached: float  # share of the prompts' tokens

    def row(self, name: str) -> str:
        cells = [f"{self.tokens_per_s:,.0f}"]
        for values in (self.first, self.between):
            cells += [f"{1000 * quantile(values, q):.1f}" for q in (0.5, 0.99)]
        return f"| {name} | {' | '.join(cells)} | {100 * self.cached:.0f} % |"


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def load(model: GLAForCausalLM, sizes: Sizes, cache_bytes: int) -> Load:
    """Clients that each ask for the next text when they have one."""
    engine = Engine(model, limits=limits(sizes, sizes.clients, cache_bytes))
    engine.warm_up()
    beginnings = [draw(sizes, sizes.shared, -1 - n) for n in range(sizes.beginnings)]
    chosen = random.Random(0)

    def request(client: int, turn: int) -> Request:
        own = draw(sizes, chosen.randint(*sizes.own), 1000 * client + turn)
        return Request(beginnings[client % sizes.beginnings] + own, sizes.new, temperature=0)

    running: dict[Sequence, tuple[int, int]] = {}

    def submit(client: int, turn: int) -> None:
        (sequence,) = engine.submit(request(client, turn))
        running[sequence] = (client, turn)
        last[sequence] = sequence.arrived

    last: dict[Sequence, float] = {}
    first, between, count = [], [], 0
    finish(engine)
    start = time.perf_counter()
    for client in range(sizes.clients):
        submit(client, 0)
    while engine.busy:
        deltas, now = engine.step(), time.monotonic()
        for sequence, delta in deltas:
            (first if sequence.new == 1 else between).append(now - last[sequence])
            last[sequence], count = now, count + len(delta.tokens)
            if delta.finish_reason is not None:
                client, turn = running.pop(sequence)
                if turn + 1 < sizes.turns:
                    submit(client, turn + 1)
    rate = count / (time.perf_counter() - start)
    prompt_tokens = engine.metrics.count("prompt_tokens_total")
    cached = engine.metrics.count("cached_prompt_tokens_total") / prompt_tokens
    return Load(rate, first, between, cached)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try this program")
    args = parser.parse_args(arguments)
    if args.device.startswith("cuda"):
        require_gpu()
    sizes = TINY if args.tiny else SIZES
    model = build(sizes, args.device)
    name = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    count = sum(p.numel() for p in model.parameters())
    print(f"{name}, torch {torch.__version__}, {count:,} parameters")
    check(sizes, args.device)
    if "start" in args.only:
        print("\n| start | ms |\n|---|--:|")
        for name, ms in start_ms(model, sizes):
            print(f"| {name} | {ms:.1f} |", flush=True)
    if "decode" in args.only:
        print("\n| decoding, tokens/s | engine | Decoder |\n|---|--:|--:|")
        for batch in sizes.batches:
            rates = dict(decode_rates(model, sizes, batch))
            print(f"| B {batch} | {rates['engine']:,.0f} | {rates['Decoder']:,.0f} |", flush=True)
    if "first" in args.only:
        print("\n| first token, ms | without checkpoints | with |\n|---|--:|--:|")
        for count in sizes.prompts:
            times = []
            for cache_bytes in (0, sizes.cache_bytes):
                engine = Engine(model, limits=limits(sizes, 1, cache_bytes))
                engine.warm_up()
                times.append(first_token_ms(engine, sizes, count))
            print(f"| {count:,} tokens | {times[0]:.2f} | {times[1]:.2f} |", flush=True)
    if "load" in args.only:
        head = "tokens/s | first p50, ms | p99 | between p50, ms | p99 | from the cache"
        print(f"\n| {sizes.clients} clients | {head} |\n|---|--:|--:|--:|--:|--:|--:|")
        load(model, dataclasses.replace(sizes, turns=1), 0)  # warms up
        print(load(model, sizes, 0).row("without the prefix cache"), flush=True)
        print(load(model, sizes, sizes.cache_bytes).row("with it"), flush=True)


if __name__ == "__main__":
    main()
