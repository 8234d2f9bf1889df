"""Two GPUs of one host beside one: context parallel, FSDP2, and a training step of both.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_scale.py [--markdown page.md]

Every ratio is of one run: the first rank times one GPU's row while the others wait, then all time
theirs. Rows that need what this build has not are named, and left out. NVLink multicast stays off
(NCCL_NVLS_ENABLE=0). Takes some five minutes.
"""

import argparse
import os
import statistics
from pathlib import Path

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gla_ext import chunk_gla
from gla_ext.distributed import build_cp_context
from gla_ext.model import GLAForCausalLM
from gla_ext.model.config import GLAConfig

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 4, "vocab_size": 32000}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 64}


class Bench:
    """The ranks, the sizes, and the rows so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.cuda = not options.small
        local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", local_rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.alone = [dist.new_group([rank]) for rank in range(self.size)][self.rank]
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.tokens = 131072 if self.cuda else 256
        self.model_tokens = 16384 if self.cuda else 64
        self.model = LARGE if self.cuda else SMALL
        self.repeats, self.rows = options.repeats, []

    def seconds(self, step, everywhere: bool) -> float:
        """The median time of a step, the slowest rank's; of the first rank alone, or of all."""
        dist.barrier()
        median = 0.0
        if everywhere or self.rank == 0:
            for _ in range(3):
                step()
            times = [self._once(step) for _ in range(self.repeats)]
            median = statistics.median(times)
        slowest = torch.tensor(median, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def _once(self, step) -> float:
        if not self.cuda:
            import time

            start = time.perf_counter()
            step()
            return time.perf_counter() - start
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def peak(self, step) -> int:
        """The most memory that a step held on a rank, bytes, the largest of the ranks."""
        if not self.cuda:
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        most = torch.tensor(torch.cuda.max_memory_allocated(self.device))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def row(self, name: str, asked: str, measure) -> None:
        try:
            result = measure()
        except NotImplementedError as error:
            result = f"left out: {error}"
        self.rows.append((name, asked, result))
        if self.rank == 0:
            print(f"{name} | {asked} | {result}", flush=True)

    # The operator.

    def operator(self, T: int, context=None):
        generator = torch.Generator(self.device).manual_seed(self.rank)
        shape = {"generator": generator, "device": self.device, "dtype": self.dtype}
        q, k, g = (torch.randn(1, T, 4, 128, **shape) for _ in range(3))
        v, do = (torch.randn(1, T, 4, 256, **shape) for _ in range(2))
        g = torch.nn.functional.logsigmoid(g) / 16
        leaves = [x.requires_grad_() for x in (q, k, v, g)]

        def step():
            o, _ = chunk_gla(*leaves, cp_context=context)
            torch.autograd.grad(o, leaves, do)

        return step

    def weak(self) -> str:
        context = build_cp_context(None)
        together = self.seconds(self.operator(self.tokens, context), True)
        alone = self.seconds(self.operator(self.tokens), False)
        ratio = self.size * alone / together
        return f"{ratio:.2f}x ({together * 1e3:.3f} ms on {self.size}, {alone * 1e3:.3f} on one)"

    def strong(self) -> str:
        context = build_cp_context(None)
        together = self.seconds(self.operator(self.tokens // self.size, context), True)
        alone = self.seconds(self.operator(self.tokens), False)
        return f"{alone / together:.2f}x ({together * 1e3:.3f} ms, {alone * 1e3:.3f} on one)"

    # The model.

    def training(self, B: int, T: int, group, compiled=False, context=None, checkpointing=False):
        """A training step of the model sharded over a group, compiled block by block or eager."""
        torch.manual_seed(0)
        model = GLAForCausalLM(GLAConfig(**self.model)).to(self.device).train()
        model.model.gradient_checkpointing = checkpointing
        kind = self.device.type
        mesh = dist.DeviceMesh.from_group(group, kind)
        dtype = self.dtype if self.cuda else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": False}
        blocks = list(model.model.layers)
        for block in blocks:
            if compiled:
                block.compile(fullgraph=True, dynamic=False)
            fully_shard(block, **options)
        fully_shard(model, **options)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 2])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - 1) : i])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.cuda)
        ids = torch.randint(self.model["vocab_size"], (B, T), device=self.device)

        def step():
            model(ids, labels=ids, cp_context=context).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def fsdp(self, compiled: bool) -> str:
        B, T = 8, self.model_tokens // 8
        together = self.seconds(self.training(B, T, dist.group.WORLD, compiled), True)
        alone = self.seconds(self.training(B, T, self.alone, compiled), False)
        rate = self.size * B * T / together
        return f"{self.size * alone / together:.2f}x ({rate:,.0f} tokens/s, {B * T / alone:,.0f})"

    def context_training(self) -> str:
        args = {"checkpointing": True}
        context = build_cp_context(None)
        world = dist.group.WORLD
        step = self.training(1, self.tokens, world, context=context, **args)
        together, peak = self.seconds(step, True), self.peak(step)
        del step
        step = self.training(1, self.tokens, self.alone, **args)
        alone, own = self.seconds(step, False), self.peak(step)
        ratio = self.size * alone / together
        memory = f", peak {peak / 2**30:.2f} GiB, {own / 2**30:.2f} on one" if self.cuda else ""
        return f"{ratio:.2f}x ({self.size * self.tokens / together:,.0f} tokens/s{memory})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="write the rows there")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps (default: 20)")
    parser.add_argument("--small", action="store_true", help="tiny sizes on the CPU")
    bench = Bench(parser.parse_args())
    bench.row("FSDP2, compiled blocks", "1.85x", lambda: bench.fsdp(True))
    bench.row("FSDP2, eager", "1.6x", lambda: bench.fsdp(False))
    bench.row("chunk_gla, as many tokens a rank", "1.84x", bench.weak)
    bench.row("chunk_gla, the tokens cut", "1.7x", bench.strong)
    bench.row("context parallel training step", "1.8x, memory + 2 %", bench.context_training)
    options = parser.parse_args()
    if bench.rank == 0 and options.markdown is not None:
        device = torch.cuda.get_device_name() if bench.cuda else "CPU"
        lines = [
            f"# {bench.size} GPUs beside one ({device}, torch {torch.__version__})",
            "",
            "`torchrun --standalone --nproc-per-node 2 benchmarks/bench_scale.py --markdown PAGE`",
            "",
            "| | asked | found |",
            "|---|--:|---|",
            *(f"| {name} | {asked} | {found} |" for name, asked, found in bench.rows),
        ]
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
