"""What the redesign must not change, as one JSON file; two files are compared line by line.

    python benchmarks/freeze.py before.json         # at one commit
    python benchmarks/freeze.py after.json          # at another
    python benchmarks/freeze.py before.json after.json

The script stays as long as the redesign of csrc and gla_ext lasts.
"""

import argparse
import hashlib
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton

import gla_ext
from gla_ext import _C
from gla_ext.info import operators
from gla_ext.ops.plan import plan

ROOT = Path(__file__).parents[1]
CUOBJDUMP = "backends/nvidia/bin/cuobjdump"  # of Triton's package


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def schemas() -> dict[str, str]:
    """Each operator's schema, tags and dispatch keys."""
    found = {}
    keys = operators()
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("gla_ext::"):
            name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
            packet = getattr(torch.ops.gla_ext, schema.name.removeprefix("gla_ext::"))
            tags = getattr(packet, schema.overload_name or "default").tags
            in_place = torch._C._dispatch_has_kernel_for_dispatch_key(name, "ADInplaceOrView")
            found[name] = f"{schema} {sorted(map(str, tags))} {keys.get(name)} {in_place}"
    return found


def public_api() -> dict[str, str]:
    """The signature of every public function, class and method, by its path."""
    found = {}
    for module_info in pkgutil.walk_packages(gla_ext.__path__, "gla_ext."):
        if any(part.startswith("_") for part in module_info.name.split(".")):
            continue
        module = importlib.import_module(module_info.name)
        for name, value in vars(module).items():
            if name.startswith("_") or not callable(value):
                continue
            if not getattr(value, "__module__", "").startswith("gla_ext"):
                continue
            path = f"{module.__name__}.{name}"
            found[path] = signature(value)
            if inspect.isclass(value):
                methods = {k: v for k, v in vars(value).items() if not k.startswith("_")}
                found |= {f"{path}.{k}": signature(v) for k, v in methods.items()}
    return found


def signature(value: object) -> str:
    value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return type(value).__name__


def header() -> str:
    """The declarations of the installed header, without comments and layout."""
    text = re.sub(r"//.*", "", (ROOT / "csrc" / "ops.h").read_text())
    return digest(" ".join(text.split()).encode())


def plans() -> dict[str, str]:
    """What runs on an H100, for some hundred shapes."""
    found = {}
    heads = itertools.product((1, 4), (64, 128, 160, 256, 512), (64, 256))
    for (B, T), (H, K, V) in itertools.product(((1, 64), (1, 32768), (8, 2048)), heads):
        for options in ({}, {"head_gates": True}, {"gv": True}, {"dtype": torch.float32}):
            shown = plan(B, T, H, K, V, gpu=("9.0", 132), **options)
            found[f"{B} {T} {H} {K} {V} {options}"] = digest(str(shown).encode())
    return found


def calls() -> list[tuple]:
    """Differentiable calls and the sizes of their tensors; what writes to a pool gives the pool."""
    ops = torch.ops.gla_ext
    B, T, H, K, V, D, R, W = 2, 70, 3, 20, 24, 72, 6, 4
    q, v, state, cu = (B, T, H, K), (B, T, H, V), (B, H, K, V), torch.tensor([0, 3, T - 1])
    x, maps = (B, T, D), (5, D)
    labels = torch.arange(T) % 9

    def norm(*tensors):
        return ops.rms_norm_gate_fwd(*tensors, "gelu", 1e-5)

    @torch.no_grad()
    def on_pool(op, *tensors, **options):
        *inputs, pool = (t.detach().clone() for t in tensors)
        return op(*inputs, state=pool, slots=torch.tensor([1, -1]), **options), pool

    @torch.no_grad()
    def token(op, *tensors):
        return op(*(t.detach() for t in tensors))

    def loss(x):
        options = (0, 0.1, 0.7, 20.0, 1e-4, False)
        return ops.cross_entropy_fwd(x, labels, *options)

    def over_logits(x):
        logits = x.detach().clone()
        return logits, ops.cross_entropy_with_grad_(logits, labels, 0, 0.1, 0.7, None, 1e-4)

    def linear_loss(*tensors):
        return ops.linear_cross_entropy_fwd(*tensors, labels, 0, 0.1, 0.7, None, 4, True, True)

    return [
        ("gv", lambda *t: gla_ext.chunk_gla(*t[:4], gv=t[4], initial_state=t[5].float() if
         t[5].dtype == torch.bfloat16 else t[5], output_final_state=True), q, q, v, q, v, state),
        ("packed", lambda *t: gla_ext.chunk_gla(*t, cu_seqlens=cu), *((1, *s[1:]) for s in
         (q, q, v, q))),
        ("grouped", lambda *t: gla_ext.chunk_gla(*t), q, *((B, T, 1, s) for s in (K, V, K))),
        ("head gates", lambda *t: gla_ext.chunk_gla(*t), q, q, v, (B, T, H)),
        ("reverse", lambda *t: gla_ext.fused_recurrent_gla(*t, reverse=True), q, q, v, q, v),
        ("norm", norm, x, (D,), x),
        ("norm of nothing", lambda x: norm(x, None, None), x),
        ("norm of residual", lambda *t: ops.rms_norm_residual_fwd(*t, 1e-5), x, x, (D,)),
        ("norm, linear", lambda o, gate, w, n: ops.norm_gate_linear(o, gate, w, n, "swish", 1e-5),
         v, x, maps, (V,)),
        ("swiglu", ops.swiglu_fwd, x, x),
        ("swiglu, linear", ops.swiglu_linear, x, x, maps, (5,)),
        ("convolution", lambda *t: ops.short_convolution_fwd(*t, None, True), x, (D, 1, W), (D,),
         (B, D, W)),
        ("gate", lambda *t: ops.gate_projection_fwd(*t, 16.0, -3.0), (B, T, R), (D, R), (D,)),
        ("maps", lambda x, *w: ops.joint_projection(x, w, w[0].dtype, True), x, maps, maps),
        ("cross entropy", loss, (T, 9)),
        ("cross entropy over logits", over_logits, (T, 9)),
        ("linear cross entropy", linear_loss, (T, D), (9, D), (9,)),
        ("chunks on a pool", lambda *t: on_pool(gla_ext.chunk_gla_, *t), q, q, v, q, state),
        ("token on a pool", lambda *t: on_pool(gla_ext.recurrent_gla_step_, *t), *((B, 1, *s[2:])
         for s in (q, q, v, q)), state),
        ("draft", lambda *t: on_pool(gla_ext.recurrent_gla_verify, *t), *((B, 5, *s[2:])
         for s in (q, q, v, q)), state),
        ("convolution on a pool", lambda *t: on_pool(gla_ext.short_convolution_, *t), x, (D, 1, W),
         (D,), (B, D, W)),
        ("token: norm, linear", lambda x, n, *w: token(lambda x, n, *w: torch.cat(
         ops.norm_linear(x, n, 1e-5, w), -1), x, n, *w), (B, 1, D), (D,), maps, maps),
        ("token: norm, SwiGLU", lambda *t: token(lambda x, n, *w: ops.norm_swiglu(x, n, 1e-5, *w),
         *t), (B, 1, D), (D,), maps, maps),
        ("token: linear, residual", lambda *t: token(ops.linear_residual, *t), (B, 1, D), maps,
         (B, 1, 5)),
    ]  # fmt: skip


def bits() -> dict[str, str]:
    """Digests of results on this CPU; they agree between builds on one machine alone."""
    torch.manual_seed(0)
    found = {}

    def note(name: str, *tensors: torch.Tensor) -> None:
        whole = (t.detach().contiguous().flatten().view(torch.uint8).numpy() for t in tensors)
        found[name] = digest(b"".join(x.tobytes() for x in whole))

    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    for dtype, T, gate in itertools.product(dtypes, (1, 65, 200), (0.1, 10)):
        q, k, g = (torch.randn(2, T, 3, 20, dtype=dtype) for _ in range(3))
        v = torch.randn(2, T, 3, 28, dtype=dtype)
        g = gate * torch.nn.functional.logsigmoid(g)
        leaves = [t.requires_grad_() for t in (q, k, v, g)]
        for name in ("chunk_gla", "fused_recurrent_gla"):
            o, state = getattr(gla_ext, name)(*leaves, output_final_state=True)
            grads = torch.autograd.grad(o.sum() + state.sum(), leaves)
            note(f"{name} {dtype} {T} {gate}", o, state, *grads)
    for (name, call, *tensors), dtype in itertools.product(calls(), dtypes):
        torch.manual_seed(1)
        leaves = [torch.randn(size).to(dtype).requires_grad_() for size in tensors]
        result = call(*leaves)
        outputs = [result] if isinstance(result, torch.Tensor) else result
        outputs = [y for y in outputs if y is not None]
        note(f"{name} {dtype}", *outputs)
        outputs = [y for y in outputs if y.requires_grad]
        for count in range(1, len(outputs) + 1):
            for some in itertools.combinations(range(len(outputs)), count):
                total = sum(outputs[i].double().square().sum() for i in some)
                grads = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
                there = [x is not None for x in grads]
                note(f"{name} {dtype} {some} {there}", *(x for x in grads if x is not None))
    return found


def machine_code() -> dict[str, str]:
    """A digest of each CUDA kernel's instructions, by its name without the hash of its file."""
    if _C.build_info()["cuda"] is None:
        return {}
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tool = shutil.which("cuobjdump") or Path(triton.__file__).parent / CUOBJDUMP
        command = [str(tool), "-xelf", "all", _C.__file__]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for file in Path(folder).glob("*.cubin"):
            for name, data in sections(file.read_bytes()):
                if name.startswith(".text."):
                    kernel = re.sub(r"_GLOBAL__N__[0-9a-f]{8}_", "_GLOBAL__N__", name[6:])
                    kernel = re.sub(r"(\d+_INTERNAL)_[0-9a-f]+_", r"\1_", kernel)
                    name = f"{file.name.split('.')[-2]} {kernel}"
                    found.setdefault(name, []).append(digest(data))
    return {kernel: " ".join(sorted(digests)) for kernel, digests in found.items()}


def sections(elf: bytes) -> list[tuple[str, bytes]]:
    """The sections of a 64-bit ELF file: name and contents."""
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    names = elf[rows[names_at][4] :]
    return [
        (names[row[0] : names.index(b"\0", row[0])].decode(), elf[row[4] : row[4] + row[5]])
        for row in rows
        if row[1] == 1  # program data
    ]


PARTS = {
    "schemas": schemas,
    "public_api": public_api,
    "header": lambda: {"ops.h": header()},
    "plans": plans,
    "bits": bits,
    "machine_code": machine_code,
}


def compare(before: dict, after: dict) -> int:
    """Prints what differs; the number of differences."""
    count = 0
    for part in sorted({*before, *after}):
        rows, other = before.get(part, {}), after.get(part, {})
        for name in sorted({*rows, *other}):
            if rows.get(name) != other.get(name):
                count += 1
                print(f"{part}: {name}\n  - {rows.get(name)}\n  + {other.get(name)}")
        print(f"{part}: {len(rows)} before, {len(other)} after")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="one to write, or two to compare")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="default: all")
    args = parser.parse_args()
    if len(args.files) > 2:
        parser.error(f"expected one file or two, got {len(args.files)}")
    if len(args.files) == 2:
        sys.exit(compare(*(json.loads(file.read_text()) for file in args.files)) > 0)
    found = {part: PARTS[part]() for part in args.parts}
    args.files[0].write_text(json.dumps(found, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
