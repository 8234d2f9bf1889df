"""The GPUs of one host beside one: context parallel, replicas, shards, tensor parallel within them.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/bench_scale.py \\
        [--only operator] [--markdown page.md]
    python benchmarks/bench_scale.py --figure pages.md --draw RESULTS_SCALE.png

First `chunk_gla` over all GPUs is compared with one GPU; if they differ, nothing is timed. Every
ratio is of one run. For the operator all ranks time their row, then the first rank alone times one
GPU's. For the model a process of its own, without torch.distributed, times one GPU before the rest,
in the same precision: fp32 weights under autocast, as shards have them, or bf16 weights. Steps
follow each other without a wait, as in training; the operator's rows also have a call from an idle
GPU. `--only replicas shards` says for a model what each GPU reaches of one alone, by --rows and
--size; `--only groups buckets` compares their sizes. NVLink multicast stays off
(NCCL_NVLS_ENABLE=0). Takes some six minutes.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from pages.scale_page import draw
from pages.tables import table
from parts import one_alone
from parts.check_across_ranks import check
from parts.ranks_on_paper import fold_call, gather_time, latency_and_bandwidth
from parts.training_rows import SIZES
from shared.machine import require_gpu
from shared.timing import capture
from torch.distributed.tensor.parallel import parallelize_module

from gla_ext import chunk_gla
from gla_ext.distributed import build_cp_context, shard_model, tensor_parallel_plan
from gla_ext.distributed.shards import BLOCKS_PER_GROUP
from gla_ext.train.ranks.weights import BUCKET_MB, replicated

H, K, V = 4, 128, 256


class Bench(one_alone.Sizes):
    """The ranks, the sizes, and the rows so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        local_rank = int(os.environ["LOCAL_RANK"])
        names = dict.fromkeys(name for part in options.only for name in NEEDS.get(part, ()))
        first = names and local_rank == 0
        self.one = one_alone.run(names, options) if first else {}  # before a rank uses its GPU
        if self.cuda:
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.across = dist.new_group()  # its all-gathers do not wait for the shards'
        self.context = build_cp_context(None, self.across)
        self.rows = []

    def seconds(self, step: Callable, everywhere: bool, at_once: int = 8) -> float:
        """The median time of a step, the slowest rank's; of the first rank alone, or of all.

        at_once: steps that follow each other in one measurement.
        """
        dist.barrier()
        median = self.median(step, at_once) if everywhere or self.rank == 0 else 0.0
        slowest = torch.tensor(median, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def row(self, name: str, each: dict[int, float], measure: Callable) -> None:
        asked = f"{each[self.size] * self.size:.2f}x" if self.size in each else ""
        result = measure(self)
        self.rows.append((name, asked, result))
        if self.rank == 0:
            print(f"{name} | {asked} | {result}", flush=True)

    # The operator.

    def operator(self, T: int, context=None, B: int = 1) -> Callable:
        generator = torch.Generator(self.device).manual_seed(self.rank)
        shape = {"generator": generator, "device": self.device, "dtype": self.dtype}
        q, k, g = (torch.randn(B, T, H, K, **shape) for _ in range(3))
        v, do = (torch.randn(B, T, H, V, **shape) for _ in range(2))
        g = torch.nn.functional.logsigmoid(g) / 16
        leaves = [x.requires_grad_() for x in (q, k, v, g)]

        def step():
            o, _ = chunk_gla(*leaves, cp_context=context)
            torch.autograd.grad(o, leaves, do)

        return step

    def together(self, T: int, at_once: int = 8, B: int = 1) -> float:
        """Seconds of T tokens a rank, of one text a row."""
        return self.seconds(self.operator(T, self.context, B), True, at_once)

    def alone(self, T: int, at_once: int = 8, B: int = 1) -> float:
        """Seconds of T tokens on the first rank's GPU."""
        return self.seconds(self.operator(T, B=B), False, at_once)

    def ratio(self, work: float, together: float, alone: float) -> str:
        """Times as fast as one GPU, where all do `work` times as much."""
        times = f"{together * 1e3:.3f} ms on {self.size}, {alone * 1e3:.3f} on one"
        return f"{work * alone / together:.2f}x ({times})"

    def beside(self, T: int) -> str:
        """Compares one text, T tokens a rank, with `self.tokens` tokens on one GPU: tokens/s over
        tokens/s.
        """
        work = self.size * T / self.tokens
        in_a_row, from_idle = (
            self.ratio(work, self.together(T, at_once), self.alone(self.tokens, at_once))
            for at_once in (8, 1)
        )
        return f"{in_a_row}; from idle {from_idle}"

    def weak(self) -> str:
        return self.beside(self.tokens)

    def strong(self) -> str:
        """Compares one text cut over all ranks with the whole text on one GPU. Also says what one
        rank's part takes alone; the rest of the time is the cost of the exchange.
        """
        T = self.tokens // self.size
        rest = self.alone(T)
        return f"{self.beside(T)}; {T} tokens on one {rest * 1e3:.3f} ms"

    def strong_in_graphs(self) -> str:
        """The same without the host: each side is one CUDA graph's replay."""
        if not self.cuda:
            return "a GPU's"
        graph = capture(self.operator(self.tokens // self.size, self.context))
        together = self.seconds(graph.replay, True)
        alone = self.seconds(capture(self.operator(self.tokens)).replay, False)  # on every rank
        return self.ratio(1, together, alone)

    def batch(self) -> str:
        """Rows that fill the GPU are not cut into segments there, and each makes a summary."""
        B = 16 if self.cuda else 2
        T = self.tokens // B
        return self.ratio(self.size, self.together(T, B=B), self.alone(T, B=B))

    def on_paper(self) -> str:
        """As many tokens a rank on 8 and 64 ranks, from what these few take."""
        size = 4 * H * (K * V + K)
        now, alone = self.together(self.tokens), self.alone(self.tokens)
        times = {n * size: self.seconds(self.gather(n * size), True) for n in (1, 32)}
        latency, bandwidth = latency_and_bandwidth(times, self.size)

        def meeting(W: int) -> float:
            fold = self.seconds(fold_call(W, H, K, V, self.device), False)
            return fold + gather_time(W, size, latency, bandwidth)

        here, found = meeting(self.size), []
        for W in (8, 64):
            step = now + 2 * (meeting(W) - here)
            found.append(f"{W} ranks {step * 1e3:.3f} ms, {alone / step:.0%} of {W} GPUs")
        parts = f"all-gather {latency * 1e6:.0f} us + {bandwidth / 1e9:.0f} GB/s"
        return f"{'; '.join(found)} ({parts}, both and fold {here * 1e6:.0f} us)"

    def gather(self, size: int) -> Callable:
        """An all-gather of so many bytes a rank, as a step."""
        own = torch.zeros(size // 4, device=self.device)
        every = own.new_empty(self.size * own.numel())
        return lambda: dist.all_gather_into_tensor(every, own, group=self.across)

    # The model.

    def training(
        self,
        B: int,
        T: int,
        compiled=False,
        context=None,
        checkpointing=False,
        tp: int = 1,
        blocks: int = BLOCKS_PER_GROUP,
    ) -> Callable:
        """A training step of the model sharded over all ranks, compiled block by block or eager.

        tp: ranks of tensor parallel within that of all ranks. blocks: of a group.
        """
        model = self.build(checkpointing, compiled)
        sizes, names = (self.size // tp, tp), ("dp", "tp")
        meshes = dist.init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        if tp > 1:
            parallelize_module(model, meshes["tp"], tensor_parallel_plan(model))
        dtype = self.dtype if self.cuda else None
        shards = shard_model(model, meshes["dp"], blocks, dtype)
        return self.stepper(model, B, T, context, shards=shards)

    def beside_one(self, seconds: float, tokens: int, one: str, also: str = "") -> str:
        """Tokens/s of all over those of one GPU alone; `tokens` are a rank's, of a step."""
        if self.rank:
            return ""
        rate, alone = tokens / seconds, self.one[one]["tokens_per_s"]
        return (
            f"{self.size * rate / alone:.2f}x ({rate:,.0f} tokens/s a GPU, {rate / alone:.0%} of "
            f"one alone with {alone:,.0f}{also})"
        )

    def replicas(self, one: str, bucket_mb: int = BUCKET_MB) -> str:
        """As the trainer has them."""
        model = self.build(dtype=torch.bfloat16 if one == "bf16" else torch.float32)
        step = self.stepper(replicated(model, bucket_mb), self.B, self.T, autocast=one != "bf16")
        return self.beside_one(self.seconds(step, True, 3), self.B * self.T, one)

    def shards(self, one: str, blocks: int = BLOCKS_PER_GROUP) -> str:
        step = self.training(self.B, self.T, one == "compiled", blocks=blocks)
        return self.beside_one(self.seconds(step, True, 3), self.B * self.T, one)

    def tensor_training(self) -> str:
        """Has as many tokens in total as shards over all GPUs, so that the two can be compared."""
        tp = min(4 if self.cuda else 2, self.size)  # of as many heads
        if self.size % tp:
            return f"{tp} heads' GPUs are needed"
        seconds = self.seconds(self.training(self.B * tp, self.T, tp=tp), True, 3)
        also = f"; tensor {tp}, shards {self.size // tp}"
        return self.beside_one(seconds, self.B * self.T, "autocast", also)

    def context_training(self) -> str:
        step = self.training(1, self.tokens, context=self.context, checkpointing=True)
        seconds, memory = self.seconds(step, True, 2), ""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            step()
            peak = torch.tensor(torch.cuda.max_memory_allocated(self.device) / 2**30)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            own = self.one.get("recomputed", {}).get("peak_gib")
            memory = f"; peak {peak.item():.2f} GiB, {own} on one, asked at most 2 % more"
        return self.beside_one(seconds, self.tokens, "recomputed", memory)


# What is measured on one GPU alone, by the part whose rows need it.
NEEDS = {
    "replicas": ("bf16", "autocast"),
    "shards": ("autocast", "compiled"),
    "buckets": ("autocast",),
    "groups": ("autocast",),
    "tensor": ("autocast",),
    "training": ("recomputed",),
}
BUCKETS, GROUPS = (10, 25, 100, 400), (1, 2, 3, 4, 6, 8, 12)
# What is asked of each of the GPUs, by their number, and what measures it.
ROWS = {
    "operator": {
        "chunk_gla, as many tokens a rank": ({2: 0.92, 4: 0.92, 8: 0.90}, Bench.weak),
        "chunk_gla, the tokens cut": ({2: 0.85}, Bench.strong),
        "chunk_gla, 16 rows a rank, as many tokens": ({}, Bench.batch),
        "chunk_gla, as many tokens a rank, on paper": ({}, Bench.on_paper),
    },
    "graphs": {"chunk_gla, the tokens cut, in CUDA graphs": ({}, Bench.strong_in_graphs)},
    "replicas": {
        "replicas, bf16 weights": ({2: 0.93, 4: 0.93}, lambda bench: bench.replicas("bf16")),
        "replicas, autocast": ({2: 0.92, 4: 0.92}, lambda bench: bench.replicas("autocast")),
    },
    "shards": {
        "shards, eager": ({2: 0.85, 4: 0.85}, lambda bench: bench.shards("autocast")),
        "shards, compiled blocks": ({}, lambda bench: bench.shards("compiled")),
    },
    "buckets": {
        f"replicas, autocast, buckets of {n} MB": (
            {},
            lambda bench, n=n: bench.replicas("autocast", n),
        )
        for n in BUCKETS
    },
    "groups": {
        f"shards, groups of {n}": ({}, lambda bench, n=n: bench.shards("autocast", n))
        for n in GROUPS
    },
    "tensor": {"tensor parallel within shards, eager": ({}, Bench.tensor_training)},
    "training": {"context parallel training step": ({2: 0.9}, Bench.context_training)},
}


def write_page(bench: Bench, path: Path) -> None:
    device = torch.cuda.get_device_name() if bench.cuda else "CPU"
    lines = table(
        f"{bench.size} GPUs beside one ({device}, torch {torch.__version__})",
        f"`python -m torch.distributed.run --standalone --nproc-per-node {bench.size} "
        f"benchmarks/bench_scale.py {' '.join(sys.argv[1:])}`",
        ["asked", "found"],
        {name: cells for name, *cells in bench.rows},
    )
    path.write_text("\n".join(lines[1:]) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="write the rows there")
    parser.add_argument("--repeats", type=int, default=10, help="measurements (default: 10)")
    unusual = ("graphs", "buckets", "groups", "tensor")  # NCCL may not allow the first
    usual = [name for name in ROWS if name not in unusual]
    parser.add_argument("--only", nargs="+", choices=ROWS, default=usual, help="these rows")
    parser.add_argument("--rows", type=int, default=8, help="of 2,048 tokens a GPU (default: 8)")
    parser.add_argument("--size", choices=SIZES, default="374 M", help="model (default: 374 M)")
    parser.add_argument("--small", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--figure", type=Path, help="draw these pages; nothing is run")
    parser.add_argument("--draw", type=Path, default=Path("RESULTS_SCALE.png"), help="where to")
    parser.add_argument("--alone", nargs="+", choices=one_alone.NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        sizes = one_alone.Sizes(options)
        print(json.dumps({name: one_alone.measure(sizes, name) for name in options.alone}))
        return 0
    if options.figure is not None:
        draw(options.figure.read_text(encoding="utf-8"), options.draw)
        return 0
    if not dist.is_torchelastic_launched():
        parser.error("expected torch.distributed.run to start it, see the top of this file")
    if not options.small:
        require_gpu()
    bench = Bench(options)
    wrong = check(bench.device)
    if wrong == 0:
        for part in options.only:
            for name, (each, measure) in ROWS[part].items():
                bench.row(name, each, measure)
        if bench.rank == 0 and options.markdown is not None:
            write_page(bench, options.markdown)
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
