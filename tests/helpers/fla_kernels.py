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
# On an H200 FLA 0.6.0's chunk kernels fail where V is at most 16: a misaligned address.
HEAD_DIM = {"cpu": 16, "cuda": 64}
HIDDEN = {"cpu": 32, "cuda": 256}  # of 4 heads, K half of it
INTERPRETED_TRITON = "3.6."  # whose internals are known here

# Of a layer of 4 heads, and every option of FLA's away from its default.
LAYER_SIZES = {"hidden_size": 64, "num_heads": 4, "expand_k": 1.0, "expand_v": 2.0}
LAYER_OPTIONS = {
    "default": {},
    "kv heads 2": {"num_kv_heads": 2},
    "kv heads 1": {"num_kv_heads": 1},
    "short conv": {"use_short_conv": True},
    "short conv, bias, 3": {"use_short_conv": True, "conv_bias": True, "conv_size": 3},
    "short conv of 1": {"use_short_conv": True, "conv_size": 1},
    "feature_map relu": {"feature_map": "relu"},
    "feature_map sigmoid": {"feature_map": "sigmoid"},
    "feature_map logsigmoid": {"feature_map": "logsigmoid"},
    "feature_map silu": {"feature_map": "silu"},
    "feature_map swish": {"feature_map": "swish"},
    "feature_map sqrelu": {"feature_map": "sqrelu"},
    "feature_map gelu": {"feature_map": "gelu"},
    "gate_fn silu": {"gate_fn": "silu"},
    "gate_fn sigmoid": {"gate_fn": "sigmoid"},
    "gate_fn logsigmoid": {"gate_fn": "logsigmoid"},
    "gate_fn relu": {"gate_fn": "relu"},
    "gate_fn sqrelu": {"gate_fn": "sqrelu"},
    "gate_fn gelu": {"gate_fn": "gelu", "fuse_norm": False},
    "fuse_norm": {"fuse_norm": False},
    "no output gate": {"use_output_gate": False},
    "no norm weight": {"elementwise_affine": False},
    "no norm weight, unfused": {"elementwise_affine": False, "fuse_norm": False},
    "norm_eps": {"norm_eps": 0.1},
    "clamp_min": {"clamp_min": -0.02},
    "gate_logit_normalizer": {"gate_logit_normalizer": 4},
    "gate_low_rank_dim": {"gate_low_rank_dim": 5},
    "expand": {"expand_k": 0.5, "expand_v": 1.0},
    "fused_recurrent": {"mode": "fused_recurrent"},
    "all": {
        "num_kv_heads": 2,
        "use_short_conv": True,
        "conv_bias": True,
        "feature_map": "silu",
        "gate_fn": "sigmoid",
        "clamp_min": -0.05,
    },
}


@functools.cache
def import_fla():
    """FLA, ready to run on the device at hand; skips the test, with the reason, where it cannot."""
    triton = pytest.importorskip("triton")
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Triton without a GPU, of flash-attn
        fla = pytest.importorskip("fla", exc_type=ImportError)
        pytest.importorskip("fla.models", exc_type=ImportError)
    _take_the_first_config()
    if not torch.cuda.is_available():
        if not triton.__version__.startswith(INTERPRETED_TRITON):
            pytest.skip(f"FLA's kernels are interpreted by Triton 3.6, not {triton.__version__}")
        _interpret(triton)
    return fla


def _take_the_first_config() -> None:
    """No tuning, which takes minutes for each head size."""
    from triton.runtime import autotuner

    prune = autotuner.Autotuner.prune_configs
    autotuner.Autotuner.prune_configs = lambda self, kwargs: prune(self, kwargs)[:1]


def require_kernels(device: str):
    """Skips the test where FLA's kernels do not run on the device in this process."""
    import_fla()
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("FLA's kernels run on the GPU here, and are interpreted without one")


def operands(T=20, dtype=torch.float32, device="cpu"):
    """q, k, v and g for two sequences of T tokens."""
    from common import make_inputs

    D = HEAD_DIM[device]
    x = make_inputs(2, T, 2, D, D, dtype=dtype, device=device)
    return x.q, x.k, x.v, x.g


def make_layer(fla, name, device, **options):
    """A small layer of FLA's, of that class."""
    torch.manual_seed(0)
    options = {"hidden_size": HIDDEN[device], "num_heads": 4, "layer_idx": 0} | options
    return getattr(fla.layers, name)(**options).to(device)


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
    from triton.runtime import interpreter

    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET came too late"
    triton.runtime.driver.set_active(_Driver())
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        # NumPy 2.5 takes int() of scalars alone.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
    for name, module in list(sys.modules.items()):
        if name.startswith(("fla.ops.common.", "fla.ops.gla.")):
            module.range = _range
