"""Hybrid models beside plain GLA and a Transformer, all of gla_ext's blocks, of 374 M parameters.

    python benchmarks/bench_hybrid.py                    # training and decoding
    python benchmarks/bench_hybrid.py --only training

bf16, random weights. A Transformer has attention in every block, a hybrid in every sixth (16 heads
of 64, over all tokens or a window of 2,048), plain GLA in none. Training is an AdamW step of 16,384
tokens, in rows of 2,048 and 8,192. Decoding is one sequence after a prompt of 1,000 and 100,000
tokens, greedily, a CUDA graph a step; memory is the peak of the steps, weights included. Before
anything is timed each kind of model is compared with itself in fp32, and its graphs' tokens with
those of steps without a graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys

import torch
from parts import bench_generate, bench_model
from parts.bench_generate import emptied
from shared.contenders import Ours
from shared.gate import WrongResults, require_close
from shared.utilisation import mfu
from torch import Tensor, nn

WINDOW = 2048
HEADS = 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured."""

    model: dict
    lengths: tuple[int, ...] = (2048, 8192)
    tokens: int = 16_384  # of a step
    prompts: tuple[int, ...] = (1000, 100_000)
    steps: int = 100
    samples: int = 7
    checked: int = 2500  # tokens of a prompt that is compared


SIZES = Sizes(bench_model.MODEL)


def kinds(sizes: Sizes) -> dict[str, dict]:
    """The models' configurations by name."""
    count = sizes.model["num_hidden_layers"]
    sixth, every = list(range(min(5, count - 1), count, 6)), list(range(count))

    def attn(layers: list[int], window: int | None = None) -> dict:
        return {"layers": layers, "num_heads": HEADS, "window_size": window}

    return {
        "GLA": sizes.model,
        f"hybrid, window {WINDOW}": sizes.model | {"attn": attn(sixth, WINDOW)},
        "hybrid, all tokens": sizes.model | {"attn": attn(sixth)},
        "Transformer": sizes.model | {"attn": attn(every)},
    }


def few_layers(options: dict) -> dict:
    """The same with two blocks, the second one of the kind that is checked."""
    if options.get("attn") is None:
        return options | {"num_hidden_layers": 2}
    every = len(options["attn"]["layers"]) == options["num_hidden_layers"]
    layers = [0, 1] if every else [1]
    return options | {"num_hidden_layers": 2, "attn": options["attn"] | {"layers": layers}}


def draw(sizes: Sizes, B: int, T: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(sizes.model["vocab_size"], (B, T), device=device, generator=generator)


@torch.no_grad()
def check(name: str, options: dict, sizes: Sizes, device: str) -> None:
    """Raises WrongResults."""
    options, T = few_layers(options), sizes.checked
    model, tokens = bench_model.build_ours(options, device).eval(), draw(sizes, 2, T, device)
    exact = bench_model.exact_logits(options, tokens)
    require_close(
        {"logits": model(tokens).logits}, {"logits": exact}, bench_model.LOGITS_TOLERANCE, name
    )
    from gla_ext.cache import GLACache

    cache, before = GLACache(), T - 8
    parts = [model(tokens[:, :before], past_key_values=cache, use_cache=True).logits]
    for t in range(before, T):
        step = tokens[:, t : t + 1]
        parts.append(model(step, past_key_values=cache, use_cache=True).logits)
    where = f"decoding, {name}"
    found = {"logits": torch.cat(parts, 1)}
    require_close(found, {"logits": exact}, bench_model.LOGITS_TOLERANCE, where)
    if device == "cuda":
        check_graphs(name, options, tokens)


def check_graphs(name: str, options: dict, tokens: Tensor) -> None:
    """In fp32, whose two ways of a step are apart by less than any two tokens."""
    from gla_ext.decode import Decoder

    model, found = bench_model.build_ours(options).float().eval(), []
    for graph in (True, False):
        decoder = Decoder(model, len(tokens), temperature=0, cuda_graph=graph)
        drawn = [decoder.prefill(tokens[:, :1000]).clone()]
        found.append(torch.stack([*drawn, *(decoder.step().clone() for _ in range(40))]))
    if not torch.equal(*found):
        raise WrongResults(f"decoding, {name}: a CUDA graph draws other tokens than eager steps")


def measure_training(options: dict, sizes: Sizes, device: str) -> dict[str, str]:
    """Thousands of tokens a second, and GiB, by column."""
    found = {}
    for T in sizes.lengths:
        with emptied():
            model = bench_model.build_ours(options, device)
            row = bench_model.train(model, draw(sizes, sizes.tokens // T, T, device))
            if not all(loss < float("inf") for loss in row["losses"]):
                raise WrongResults(f"training, T {T}: losses {row['losses']}")
            del model
        rate = row["tokens"] / row["step"].median
        found[f"training, T {T}: k tokens/s"] = f"{rate:.0f}"
        if device == "cuda":
            name = torch.cuda.get_device_name()
            found[f"T {T}: MFU"] = mfu(row["product_parameters"], 1e3 * rate, name)
        found[f"T {T}: GiB"] = f"{row['peak_bytes'] / 2**30:.1f}"
    return found


@torch.no_grad()
def measure_decoding(model: nn.Module, sizes: Sizes, device: str) -> dict[str, str]:
    """Tokens a second after prompts, and GiB."""
    found = {}
    for count in sizes.prompts:
        with emptied():
            ours = Ours(model, 1)
            ours.first(draw(sizes, 1, count, device))
            ours.step()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            few = dataclasses.replace(
                bench_generate.SIZES, steps=sizes.steps, samples=sizes.samples
            )
            step = bench_generate.step_times(ours, few)
            peak, states = torch.cuda.max_memory_allocated(), ours.decoder.nbytes
            del ours
        found[f"decoding after {count}: tokens/s"] = f"{1e3 / step.median:.0f}"
        found[f"{count}: GiB"] = f"{peak / 2**30:.2f}"
        found[f"{count}: MiB of states"] = f"{states / 2**20:.0f}"
    return found


def table(rows: dict[str, dict[str, str]]) -> str:
    """Markdown."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(row.get(column, '') for column in columns)} |")
    return "\n".join(lines)


def measure(sizes: Sizes, device: str, only: str | None) -> dict[str, dict[str, str]]:
    every = kinds(sizes)
    for name, options in every.items():
        with emptied():
            check(name, options, sizes, device)
    print("all results agree with fp32, and graphs with steps without one", file=sys.stderr)
    rows: dict[str, dict[str, str]] = {}
    for name, options in every.items():
        with emptied():
            model = bench_model.build_ours(options, device).eval()
            count = sum(p.numel() for p in model.parameters()) / 1e6
            row = rows[name] = {"M parameters": f"{count:.0f}"}
            if only != "training":
                row |= measure_decoding(model, sizes, device)
            del model
        if only != "decoding":
            row |= measure_training(options, sizes, device)
        print(f"{name}: {row}", file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("training", "decoding"))
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(table(measure(SIZES, "cuda", arguments.only)))


if __name__ == "__main__":
    main()
