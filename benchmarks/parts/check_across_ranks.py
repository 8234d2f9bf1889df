"""Whether `chunk_gla` over several GPUs gives one GPU's results: what bench_scale checks first.

    torchrun --standalone --nproc-per-node 2 benchmarks/parts/check_across_ranks.py [--graphs]

Every GPU computes the whole text by itself, then its own part of it with the others. Prints a line
a case and ends with status 1 where results differ. On CPU (gloo) without GPUs, with small shapes.
"""

import argparse
import itertools
import os
import sys

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from torch import Tensor

from gla_ext import chunk_gla
from gla_ext.distributed import build_cp_context

# B, T of all ranks, H, K, V: by clusters, in few segments, over prepared chunks, small heads, a
# batch that fills the GPU, sizes of no tile, the step path (K above 256).
SHAPES = (
    *((1, 8192, 4, 128, 256), (2, 8192, 2, 128, 128), (1, 16384, 2, 256, 512)),
    *((1, 4096, 4, 64, 64), (1, 8192, 4, 64, 128), (32, 1024, 4, 128, 256), (3, 640, 2, 96, 80)),
    *((1, 2048, 2, 200, 264), (1, 512, 2, 320, 64), (1, 131072, 4, 128, 256)),
)
SMALL = ((1, 256, 2, 16, 8), (2, 128, 2, 8, 12))
MOST = 1.5e-2  # relative RMS error, bf16 beside bf16


def inputs(shape: tuple[int, ...], gates: str, gate_dtype: torch.dtype, device, dtype) -> dict:
    """q, k, v, g, initial state, and the gradients of o and the final state."""
    B, T, H, K, V = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, device=device, generator=generator)

    g = torch.nn.functional.logsigmoid(normal(B, T, H, K))
    g = {"weak": g / 512, "strong": g, "reset": g / 512}[gates]
    if gates == "reset":
        g[:, :: T // 7 + 1] = -torch.inf
    sizes = {"q": K, "k": K, "v": V, "do": V}
    x = {name: normal(B, T, H, size).to(dtype) for name, size in sizes.items()}
    states = {name: normal(B, H, K, V) / 10 for name in ("h0", "dht")}
    return x | states | {"g": g.to(gate_dtype)}


def results(x: dict, tokens: slice, rows, cu_seqlens=None, **options) -> dict[str, Tensor]:
    """o, the final state and every gradient, of these tokens and the states' `rows`."""

    def cut(t):
        return t[:, tokens].contiguous()

    leaves = {name: cut(x[name]).requires_grad_() for name in "qkvg"}
    leaves["h0"] = x["h0"][rows].clone().requires_grad_()
    o, state = chunk_gla(
        *[leaves[name] for name in "qkvg"], initial_state=leaves["h0"], output_final_state=True,
        cu_seqlens=cu_seqlens, **options,
    )  # fmt: skip
    upstream = (cut(x["do"]), x["dht"][rows])
    gradients = torch.autograd.grad((o, state), list(leaves.values()), upstream)
    found = {"o": o.detach(), "state": state.detach()}
    return found | dict(zip(leaves, gradients, strict=True))


def worst_error(x: dict, sequences: list[int] | None) -> float:
    """The largest relative RMS error of this rank's part of any result, over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    T, device = x["q"].shape[1], x["q"].device
    offsets = None
    if sequences is not None:
        offsets = torch.tensor([0, *itertools.accumulate(sequences)], device=device)
        for name in ("h0", "dht"):
            x = x | {name: x[name][:1].repeat(len(sequences), 1, 1, 1)}
    context = build_cp_context(offsets)
    cut = context.cut(T // size, device)
    tokens = slice(rank * (T // size), (rank + 1) * (T // size))
    everything = list(range(x["h0"].shape[0]))
    rows = everything if sequences is None else list(cut.sequences)
    whole = results(x, slice(0, T), everything, offsets)
    mine = results(x, tokens, rows, cp_context=context)
    worst = 0.0
    for name, found in mine.items():
        expected = whole[name]
        if name in ("state", "h0"):  # a row is one rank's, and 0 elsewhere
            total = torch.zeros_like(expected)
            total.index_add_(0, torch.tensor(rows, dtype=torch.int64, device=device), found)
            dist.all_reduce(total)
            found = total
        else:
            expected = expected[:, tokens]
        difference = (found.float() - expected.float()).square().mean().sqrt()
        error = (difference / expected.float().square().mean().sqrt().clamp_min(1e-20)).item()
        worst = max(worst, error if error == error else torch.inf)
    worst = torch.tensor(worst, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def cases(cuda: bool):
    """Shape, gates, the gates' dtype and the packed sequences' lengths, or None."""
    short, wide = (torch.bfloat16, torch.float32) if cuda else (torch.float32, torch.float32)
    for shape in SHAPES if cuda else SMALL:
        for gates in ("weak", "strong"):
            yield shape, gates, short, None
        yield shape, "reset", wide, None
    for shape in (SHAPES[0], SHAPES[2]) if cuda else SMALL[:1]:
        T = shape[1]
        packed = [T // 3, 1, 0, T // 2, T - T // 3 - T // 2 - 10]
        yield shape, "weak", short, packed
        yield shape, "strong", short, packed
        yield shape, "weak", wide, [T]


def check(device: torch.device) -> int:
    """Prints a line a case on the first rank; how many are wrong."""
    wrong = 0
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    for shape, gates, gate_dtype, sequences in cases(cuda):
        x = inputs(shape, gates, gate_dtype, device, dtype)
        error = worst_error(x, sequences)
        wrong += error > MOST
        if dist.get_rank() == 0:
            packed = "" if sequences is None else f", packed {sequences}"
            verdict = "right" if error <= MOST else "WRONG"
            name = f"{shape}, {gates} gates in {gate_dtype}{packed}"
            print(f"{verdict}, error {error:.1e}: {name}", flush=True)
    return wrong


def check_graph(device: torch.device) -> int:
    """Captures forward and backward with their all-gathers, and replays them on other tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, other = (inputs((1, 8192, 4, 128, 256), "weak", torch.bfloat16, device, torch.bfloat16),) * 2
    other = {name: t.flip(1) if name != "h0" else t for name, t in other.items()}
    context = build_cp_context(None)
    piece = slice(rank * 8192 // size, (rank + 1) * 8192 // size)
    leaves = [x[name][:, piece].clone().requires_grad_() for name in "qkvg"]
    do = x["do"][:, piece].clone()

    def step():
        o, _ = chunk_gla(*leaves, cp_context=context)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        for leaf, name in zip(leaves, "qkvg", strict=True):
            leaf.copy_(other[name][:, piece])
        do.copy_(other["do"][:, piece])
    graph.replay()
    torch.cuda.synchronize()
    same = all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
    if rank == 0:
        print(f"{'right' if same else 'WRONG'}: a CUDA graph replayed on other tokens", flush=True)
    return not same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs too")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    wrong = check(device)
    if options.graphs and cuda:
        wrong += check_graph(device)
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
