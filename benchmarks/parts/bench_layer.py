"""gla_ext's layer beside FLA's and its own products."""

import copy
import functools
from collections.abc import Callable, Iterable

import torch
from bench_fla import HEADS, HIDDEN, LAYERS
from shared import operator as bench
from shared.gate import require_close
from shared.inputs import layer_class
from torch import Tensor

from gla_ext.layers import GatedLinearAttention

TOLERANCE = 0.04  # bf16 throughout against fp32; 0.015 is usual


def build(fla: bool, compiled: bool) -> dict[str, Callable]:
    """Layers of one set of bf16 weights."""
    torch.manual_seed(0)
    ours = GatedLinearAttention(hidden_size=HIDDEN, num_heads=HEADS).to("cuda", torch.bfloat16)
    layers = {"gla_ext": ours}
    if compiled:
        layers["gla_ext, compiled"] = torch.compile(copy.deepcopy(ours), dynamic=False)
    if fla:
        theirs = layer_class()(hidden_size=HIDDEN, num_heads=HEADS)
        theirs.to("cuda", torch.bfloat16).load_state_dict(ours.state_dict())
        layers["FLA"] = theirs
    return layers


def check(layers: dict[str, Callable], x: Tensor, do: Tensor) -> None:
    """Output and gradient of the input, first sequence, against our layer in fp32.

    The gradient counts from token 64 on. Before it few keys have been added, a head's output may be
    near 0, and the norm divides by it: one of the first tokens can be most of the error of all.
    """

    def results(layer, x, do):
        leaf = x.detach().requires_grad_()
        o = layer(leaf)[0]
        (dx,) = torch.autograd.grad(o, leaf, do)
        return {"o": o[:1], "dx": dx[:1, 64:]}

    expected = results(copy.deepcopy(layers["gla_ext"]).float(), x[:1].float(), do[:1].float())
    for name, layer in layers.items():
        where = f"layer of {name}, B {x.shape[0]}, T {x.shape[1]}"
        require_close(results(layer, x, do), expected, TOLERANCE, where)


def calls(layers: dict[str, Callable], x: Tensor, do: Tensor, backward: bool) -> dict:
    """One forward of each, or forward + backward to the input and all weights; "its products" are
    our layer's linear maps of q, k, v, g and o alone, back to back.
    """

    def call(outputs: Callable, weights: Iterable[Tensor], gradients: list[Tensor]) -> Callable:
        leaves = [x.detach().requires_grad_(backward), *weights]

        def run():
            y = outputs(leaves[0])
            return torch.autograd.grad(y, leaves, gradients) if backward else y

        return run

    ours = layers["gla_ext"]
    linears = [ours.q_proj, ours.k_proj, ours.v_proj, ours.g_proj, ours.o_proj]

    def products(x: Tensor) -> list[Tensor]:
        return [linear(x) for linear in linears]

    gradients = [torch.randn_like(y) for y in products(x)]
    found = {n: call(lambda x, f=f: f(x)[:1], f.parameters(), [do]) for n, f in layers.items()}
    return found | {"its products": call(products, [f.weight for f in linears], gradients)}


def measure(fla: bool, compiled: bool) -> dict[str, bench.Times]:
    """Times by "BxT", after a comparison of the results."""
    layers, results = build(fla, compiled), {}
    for B, T in LAYERS:
        x, do = (torch.randn(B, T, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        torch.compiler.reset()  # each shape is compiled for itself
        check(layers, x, do)
        results[f"{B}x{T}"] = bench.time_both_ways(functools.partial(calls, layers, x, do))
    return results
