"""flash-linear-attention for the tests: on a GPU as it is, without one in Triton's interpreter.

FLA's Triton kernels, and with them its layers and models, run on a CPU in the interpreter after
some help: it has no driver to ask, no timer to tune with, and lets kernels loop over Python's ints,
which lack a method that tensors have.
"""

import builtins
import functools
import os
import sys
import warnings

import pytest
import torch

if not torch.cuda.is_available():  # conftest.py imports this before anything loads Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

# FLA's products of fp32 numbers are tf32's on a GPU.
BOUND = {"cpu": 1e-5, "cuda": 5e-3}
INTERPRETED_TRITON = "3.6."  # whose internals are known here


@functools.cache
def import_fla():
    """FLA, ready to run on the device at hand; skips the test, with the reason, where it cannot."""
    triton = pytest.importorskip("triton")
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Triton without a GPU, of flash-attn
        fla = pytest.importorskip("fla", exc_type=ImportError)
        pytest.importorskip("fla.models", exc_type=ImportError)
    if not torch.cuda.is_available():
        if not triton.__version__.startswith(INTERPRETED_TRITON):
            pytest.skip(f"FLA's kernels are interpreted by Triton 3.6, not {triton.__version__}")
        _interpret(triton)
    return fla


def require_kernels(device: str):
    """Skips the test where FLA's kernels do not run on the device in this process."""
    import_fla()
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("FLA's kernels run on the GPU here, and are interpreted without one")


def operands(T=20, dtype=torch.float32, device="cpu"):
    """q, k, v and g for two sequences of T tokens."""
    from common import make_inputs

    x = make_inputs(2, T, 2, 16, 16, dtype=dtype, device=device)
    return x.q, x.k, x.v, x.g


class _Driver:
    """What autotuning and the heuristics of launches ask of a GPU's driver."""

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self):
        return lambda kernel, **_: [0.0, 0.0, 0.0]


class _Index(int):
    """A loop's counter with the conversion that Triton's scalars have."""

    def to(self, dtype) -> "_Index":
        return self


def _range(*bounds):
    return map(_Index, builtins.range(*bounds))


def _interpret(triton) -> None:
    from triton.runtime import autotuner, interpreter

    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET came too late"
    triton.runtime.driver.set_active(_Driver())
    prune = autotuner.Autotuner.prune_configs
    autotuner.Autotuner.prune_configs = lambda self, kwargs: prune(self, kwargs)[:1]
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        # NumPy 2.5 takes int() of scalars alone.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
    for name, module in list(sys.modules.items()):
        if name.startswith(("fla.ops.common.", "fla.ops.gla.")):
            module.range = _range
