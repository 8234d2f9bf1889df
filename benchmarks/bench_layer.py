"""What the layer's options cost: projections together or apart, shared heads, convolutions.

    python benchmarks/bench_layer.py                     # an H200: B 32, T 2048, hidden 1024
    python benchmarks/bench_layer.py --device cpu --shape 1x512 --hidden 256

Eager and compiled, in training (forward + backward) and for a decoded token; the layer beside its
products alone, those of q, k, v, g and o; then `chunk_gla` with 2 heads of k, v and g, read in
place and repeated for 4, in time and memory. Of one set of weights, or inputs, variants are checked
against each other before anything is timed.
"""

import argparse
from collections.abc import Callable

import torch
from shared.gate import require_close
from shared.timing import cold, interleave
from torch import Tensor

from gla_ext import chunk_gla
from gla_ext.cache import GLACache
from gla_ext.layers import GatedLinearAttention

TOLERANCE = {"cuda": 0.04, "cpu": 1e-4}  # bf16, fp32
OPTIONS = {
    "projections together": {},
    "projections apart": {},
    "2 kv heads": {"num_kv_heads": 2},
    "1 kv head": {"num_kv_heads": 1},
    "short convolutions": {"use_short_conv": True},
}


def build(name: str, hidden: int, device: str) -> GatedLinearAttention:
    torch.manual_seed(0)
    layer = GatedLinearAttention(hidden_size=hidden, num_heads=4, layer_idx=0, **OPTIONS[name])
    layer.batch_projections = name != "projections apart"
    return layer.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def training(layer, call: Callable, x: Tensor, do: Tensor) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_(), *layer.parameters()]
    return lambda: torch.autograd.grad(call(leaves[0])[0], leaves, do)


def products(layer: GatedLinearAttention, x: Tensor) -> dict[str, Callable[[], object]]:
    """Those of q, k, v, g and o alone, forward and both ways."""
    linears = [layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, layer.o_proj]
    leaves = [x.detach().requires_grad_(), *(linear.weight for linear in linears)]
    with torch.no_grad():
        gradients = [torch.randn_like(linear(x)) for linear in linears]

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [linear(x) for linear in linears]

    def both() -> object:
        return torch.autograd.grad([linear(leaves[0]) for linear in linears], leaves, gradients)

    return {"forward": forward, "both ways": both}


def beside_products(layer, x: Tensor, do: Tensor) -> dict[str, Callable[[], object]]:
    """The layer and its products, forward and both ways."""

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)[0]

    calls = {"layer, forward": forward, "layer, both ways": training(layer, layer, x, do)}
    return calls | {f"products, {name}": call for name, call in products(layer, x).items()}


def decoding(layer, x: Tensor) -> Callable[[], object]:
    """One token on the state that the prompt x left; each call goes on from the same."""
    layer = layer.eval()
    cache = GLACache()
    layer(x, past_key_values=cache, use_cache=True)
    entry = {name: cache[0][name] for name in ("recurrent_state", "conv_state")}

    def run():
        cache.update(layer_idx=0, **entry)
        return layer(x[:, :1], past_key_values=cache, use_cache=True)[0]

    return run


def check(layers: dict[str, GatedLinearAttention], x: Tensor, do: Tensor, bound: float) -> None:
    """That together and apart agree: output, dx and the gradient of a weight."""
    results = []
    for name in ("projections together", "projections apart"):
        layer = layers[name]
        leaf = x[:1].detach().requires_grad_()
        o = layer(leaf)[0]
        dx, dw = torch.autograd.grad(o, [leaf, layer.k_proj.weight], do[:1])
        results.append({"o": o, "dx": dx, "dw": dw})
    require_close(results[0], {n: t.float() for n, t in results[1].items()}, bound, "together")


def sharing(B: int, T: int, K: int, V: int, dtype, device: str) -> dict[str, Callable]:
    """`chunk_gla`, forward and backward, with two heads of k, v and g for four."""
    shapes = ((4, K), (2, K), (2, V), (2, K), (4, V))
    *leaves, do = (torch.randn(B, T, H, D, dtype=dtype, device=device) for H, D in shapes)
    leaves[3] = torch.nn.functional.logsigmoid(leaves[3]) / 16
    leaves = [t.requires_grad_() for t in leaves]

    def run(repeats: int):
        q, k, v, g = leaves
        if repeats > 1:
            k, v, g = (t.repeat_interleave(repeats, 2) for t in (k, v, g))
        return torch.autograd.grad(chunk_gla(q, k, v, g)[0], leaves, do)

    calls = {"in place": lambda: run(1), "repeated": lambda: run(2)}
    for in_place, repeated in zip(*(call() for call in calls.values()), strict=True):
        assert torch.equal(in_place, repeated)
    return calls


def peak(call: Callable) -> float:
    """The most that a call allocates on the GPU, MiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="32x2048", help="BxT")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--only-products", action="store_true", help="the layer beside these alone")
    arguments = parser.parse_args()
    device, hidden = arguments.device, arguments.hidden
    B, T = map(int, arguments.shape.split("x"))
    measure = cold if device == "cuda" else interleave
    layers = {name: build(name, hidden, device) for name in OPTIONS}
    dtype = next(layers["projections together"].parameters()).dtype
    x, do = (torch.randn(B, T, hidden, dtype=dtype, device=device) for _ in range(2))
    check(layers, x, do, TOLERANCE[device])

    times = measure(beside_products(layers["projections together"], x, do))
    print("| ms | layer | its products | times |\n|---|--:|--:|--:|")
    for way in ("forward", "both ways"):
        layer, alone = times[f"layer, {way}"], times[f"products, {way}"]
        print(f"| {way} | {layer} | {alone} | {layer.median / alone.median:.2f} |")
    if arguments.only_products:
        return
    print()
    rows = {"training": measure({n: training(layer, layer, x, do) for n, layer in layers.items()})}
    compiled = {n: torch.compile(layer, dynamic=False) for n, layer in layers.items()}
    calls = {n: training(layers[n], call, x, do) for n, call in compiled.items()}
    rows["training, compiled"] = measure(calls)
    with torch.no_grad():
        rows["a token"] = measure({n: decoding(layer, x) for n, layer in layers.items()})
    layer = layers["2 kv heads"]
    operators = sharing(B, T, layer.head_k_dim, layer.head_v_dim, dtype, device)
    times = measure(operators)

    print(f"| ms, B {B}, T {T}, hidden {hidden} | {' | '.join(rows)} |")
    print("|---|" + "--:|" * len(rows))
    for name in OPTIONS:
        print(f"| {name} | {' | '.join(str(row[name]) for row in rows.values())} |")
    print("\n| chunk_gla, 2 heads of k, v and g for 4 | ms | peak MiB |\n|---|--:|--:|")
    for name, call in operators.items():
        memory = f"{peak(call):.0f}" if device == "cuda" else ""
        print(f"| {name} | {times[name]} | {memory} |")


if __name__ == "__main__":
    main()
