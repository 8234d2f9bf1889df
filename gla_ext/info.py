"""Prints versions, capabilities and operators: `python -m gla_ext.info`."""

import os
import platform

import torch

import gla_ext
from gla_ext import _C
from gla_ext._build_info import BUILD_INFO

DISPATCH_KEYS = ("CPU", "CUDA", "Meta", "Autograd", "AutocastCPU", "AutocastCUDA")


def operators() -> dict[str, list[str]]:
    """Every registered operator of gla_ext, with the dispatch keys for which it has a kernel."""
    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("gla_ext::"))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name: [key for key in DISPATCH_KEYS if has_kernel(name, key)] for name in names}


def gpus() -> str:
    """This machine's GPUs, and what each runs of a call that the fused kernels take."""
    found = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        runs = gla_ext.plan(1, 64, 1, 64, 64, gpu=i).standing
        found.append(f"{gpu.name}, {gpu.major}.{gpu.minor}: {runs}")
    return "; ".join(found) or "none"


def describe() -> str:
    """The report, as text."""
    built = _C.build_info()
    cuda = "not built"
    if built["cuda"] is not None:
        cuda = f"{built['cuda']}, for {', '.join(built['cuda_archs'])}"
    rows = [
        ("gla_ext", f"{gla_ext.__version__}, in {os.path.dirname(gla_ext.__file__)}"),
        ("commit", BUILD_INFO.get("commit", "unknown")),
        ("Python", platform.python_version()),
        ("torch", f"{torch.__version__}, built against {built['torch']}"),
        ("C++ compiler", built["cxx"]),
        ("CUDA backend", cuda),
        ("GPUs", gpus()),
        (
            "CPU capabilities",
            f"{', '.join(built['cpu_capabilities'])}; in use: {_C.cpu_capability()}",
        ),
        ("OpenMP", f"{torch.get_num_threads()} threads" if built["openmp"] else "off: one thread"),
    ]
    table = operators()
    width = max(len(label) for label in [*table, *(label for label, _ in rows)])
    lines = [f"{label:{width}}  {text}" for label, text in rows]
    lines += ["", f"{'operator':{width}}  dispatch keys"]
    lines += [f"{name:{width}}  {' '.join(keys)}" for name, keys in table.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(describe())
