"""One gate a head on a GPU: `chunk_simple_gla` beside `chunk_gla` with the gate spread over the key
channels before, and FLA's `chunk_simple_gla` where it is installed and runs.

    python benchmarks/bench_simple_gla.py [--no-fla] [--shape 8x2048x16x128x128]

Results are checked against the recurrence by chunks in fp64 first; nothing is timed after an error.
Times the floor are times of reading every bf16 input and writing every bf16 output once, at the
rate of a copy: 2 (2 K + 2 V) bytes a token and head forward, and 2 (4 K + 3 V) more backward.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
from bench_cuda import parse_shape
from shared.timing import cold, copy_bytes_per_s
from torch import Tensor
from torch.nn.functional import logsigmoid

import gla_ext
from gla_ext import chunk_gla, chunk_simple_gla, reference
from gla_ext.ops import retention_decay
from gla_ext.selftest import tolerance

SHAPES = ((32, 2048, 4, 128, 256), (8, 2048, 16, 128, 128), (2, 16384, 64, 128, 128))
CHECKED = ((2, 130, 4, 128, 256), (2, 130, 4, 64, 64), (1, 700, 2, 128, 128))
MODES = ("forward", "forward + backward")
KINDS = ("data-dependent", "constant")


def draw(shape, kind: str) -> tuple[list[Tensor], Tensor]:
    """bf16 q, k, v, the gate [B, T, H] in fp32, and do; constant: RetNet's decays, expanded."""
    B, T, H, K, V = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v, do = (normal(B, T, H, D) for D in (K, K, V, V))
    if kind == "constant":
        g = retention_decay(H, q).expand(B, T, H)
    else:
        g = logsigmoid(normal(B, T, H).float()) / 16
    return [q, k, v, g], do


def floor_ms(shape, backward: bool, bytes_per_s: float) -> float:
    B, T, H, K, V = shape
    values = 2 * K + 2 * V + (4 * K + 3 * V if backward else 0)
    return 1e3 * B * T * H * 2 * values / bytes_per_s


def call(function: Callable, tensors, do, kind: str, backward: bool) -> Callable[[], object]:
    """One forward, or forward + backward: without the gradient of a constant gate."""
    q, k, v, g = (t.detach() for t in tensors)
    leaves = [q, k, v] if kind == "constant" else [q, k, v, g]
    leaves = [t.requires_grad_(backward) for t in leaves]

    def run():
        o, _ = function(q, k, v, g)
        return torch.autograd.grad(o, leaves, do) if backward else o

    return run


def by_fla(q, k, v, g):
    from fla.ops.simple_gla import chunk_simple_gla as theirs

    if g.stride(0) == 0 and g.stride(1) == 0:
        return theirs(q, k, v, g_gamma=g[0, 0])
    return theirs(q, k, v, g)


def check() -> None:
    """Raises AssertionError where a result is worse than the accuracy table."""
    for shape in CHECKED:
        for kind in KINDS:
            tensors, do = draw(shape, kind)
            q, k, v, g = (t.double() for t in tensors)
            wide = g.unsqueeze(-1).expand(k.shape)
            forward = reference.chunked_forward(q, k, v, wide)
            backward = reference.chunked_backward(do.double(), q, k, v, wide)
            expected = {"o": forward.o, "dq": backward.dq, "dk": backward.dk, "dv": backward.dv}
            if kind != "constant":
                expected["dg"] = backward.dg.sum(-1)
            o = call(chunk_simple_gla, tensors, do, kind, False)()
            gradients = call(chunk_simple_gla, tensors, do, kind, True)()
            for (name, truth), x in zip(expected.items(), (o, *gradients), strict=True):
                error = (x.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
                bound = tolerance(name, torch.bfloat16)
                assert error <= bound, f"{shape}, {kind}, {name}: {error:.2e}, allowed {bound:.2e}"
                print(f"  {'x'.join(map(str, shape)):20} {kind:15} {name:3} {error:.1e}")


def contenders(shape, kind: str, backward: bool, fla: bool) -> dict[str, Callable]:
    tensors, do = draw(shape, kind)
    q, k, v, g = tensors
    spread = g.bfloat16().unsqueeze(-1).expand(k.shape).contiguous()
    calls = {
        "chunk_simple_gla": call(chunk_simple_gla, tensors, do, kind, backward),
        "chunk_gla, gate spread": call(
            chunk_gla, [q, k, v, spread], do, "constant" if kind == "constant" else "", backward
        ),
    }
    if fla:
        theirs = call(by_fla, tensors, do, kind, backward)
        try:
            theirs()
            calls["FLA chunk_simple_gla"] = theirs
        except Exception as error:  # whatever FLA refuses with is what the row says
            print(f"  FLA does not run: {type(error).__name__}: {str(error).splitlines()[0]}")
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-fla", action="store_true", help="leave FLA out")
    parser.add_argument("--shape", type=parse_shape, action="append", help="BxTxHxKxV")
    parser.add_argument("--gate", choices=KINDS, action="append", help="default: both")
    arguments = parser.parse_args()
    os.environ.pop("GLA_EXT_CUDA_PATH", None)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, gla_ext {gla_ext.__version__}"
    )
    print("relative RMS errors")
    check()
    bytes_per_s = copy_bytes_per_s()
    print(f"copy: {bytes_per_s / 1e12:.2f} TB/s")
    for shape in arguments.shape or SHAPES:
        for kind in arguments.gate or KINDS:
            for mode in MODES:
                backward = mode != MODES[0]
                print(f"\n{'x'.join(map(str, shape))}, {kind} gate, {mode}")
                plan = partial(gla_ext.plan, *shape, head_gates=True)(
                    gate_dtype=torch.float32, gate_gradient=kind != "constant"
                )
                print(f"  {' -> '.join(plan.backward if backward else plan.forward)}")
                floor = floor_ms(shape, backward, bytes_per_s)
                with torch.set_grad_enabled(backward):
                    timings = cold(contenders(shape, kind, backward, not arguments.no_fla))
                ours = timings["chunk_simple_gla"].median
                for name, timing in timings.items():
                    print(
                        f"  {name:24}{timing!s:24} ms, {timing.median / floor:5.2f} times the "
                        f"floor, {timing.median / ours:5.2f} times chunk_simple_gla"
                    )


if __name__ == "__main__":
    main()
