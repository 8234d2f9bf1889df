"""The layer of gla_ext.vllm against the module, on blocks as vLLM lays them out. What it takes from
vLLM is a stub here, so that it runs beside a GPU without vLLM; tests/vllm has the real engine.
"""

import contextlib
import enum
import importlib
import sys
import types
from abc import ABC, abstractmethod

import pytest
import torch
from torch import nn

from gla_ext import GatedLinearAttention
from gla_ext.model import GLAConfig
from gla_ext.model.blocks import gla_options

BLOCKS, NAME = 6, "layers.0"
SIZES = {"hidden_size": 128, "num_heads": 2, "expand_v": 1.5, "num_hidden_layers": 1}
NEAR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class Linear(nn.Linear):
    """vLLM's linear maps return a bias beside the output; their widths may be a list."""

    def __init__(self, inputs, outputs, bias, quant_config, prefix):
        super().__init__(inputs, outputs if isinstance(outputs, int) else sum(outputs), bias=bias)

    def forward(self, x):
        return super().forward(x), None


class MambaBase(ABC):
    @abstractmethod
    def get_state_shape(self): ...

    @property
    @abstractmethod
    def mamba_type(self): ...

    @abstractmethod
    def get_state_dtype(self): ...


context = types.SimpleNamespace(attn_metadata=None, no_compile_layers={})
STUBS = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.compilation.breakable_cudagraph": {
        "eager_break_during_capture": lambda function: function
    },
    "vllm.config": {"VllmConfig": object, "CompilationConfig": object},
    "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: 0},
    "vllm.forward_context": {"get_forward_context": lambda: context},
    "vllm.model_executor.layers.linear": {
        f"{kind}Linear": Linear
        for kind in ("ColumnParallel", "MergedColumnParallel", "Replicated", "RowParallel")
    },
    "vllm.model_executor.layers.mamba.abstract": {"MambaBase": MambaBase},
    "vllm.utils.torch_utils": {
        "STR_DTYPE_TO_TORCH_DTYPE": {"float32": torch.float32, "bfloat16": torch.bfloat16},
        "direct_register_custom_op": lambda op_name, op_func, **options: None,
    },
    "vllm.v1.attention.backends.registry": {
        "MambaAttentionBackendEnum": enum.Enum("MambaAttentionBackendEnum", ["LINEAR"])
    },
}


@pytest.fixture
def layers(monkeypatch):
    """The module gla_ext.vllm.layer, without the package, which registers models in vLLM."""
    for name, members in STUBS.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            part = ".".join(parts[:n])
            if part not in sys.modules:
                monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
        for key, value in members.items():
            setattr(sys.modules[name], key, value)
    package = types.ModuleType("gla_ext.vllm")
    package.__path__ = [f"{path}/vllm" for path in importlib.import_module("gla_ext").__path__]
    monkeypatch.setitem(sys.modules, "gla_ext.vllm", package)
    monkeypatch.delitem(sys.modules, "gla_ext.vllm.layer", raising=False)
    module = importlib.import_module("gla_ext.vllm.layer")
    operators = types.SimpleNamespace(gla_attention=module.gla_attention)
    monkeypatch.setattr(torch.ops, "vllm", operators, raising=False)
    yield module
    sys.modules.pop("gla_ext.vllm.layer", None)


class Pair:
    """A layer of gla_ext, and vLLM's with its weights on blocks full of NaN."""

    def __init__(self, layers, device, dtype, state="float32", **options):
        config = GLAConfig(**SIZES | options)
        torch.manual_seed(0)
        self.module = GatedLinearAttention(**gla_options(config)).to(device, dtype).eval()
        cache = types.SimpleNamespace(mamba_ssm_cache_dtype=state, mamba_cache_dtype="auto")
        settings = types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(tensor_parallel_size=1),
            compilation_config=types.SimpleNamespace(static_forward_context={}),
            cache_config=cache,
            model_config=types.SimpleNamespace(dtype=dtype),
            quant_config=None,
        )
        self.layer = layers.GLALayer(config, settings, 0, NAME).to(device, dtype)
        context.no_compile_layers = settings.compilation_config.static_forward_context
        self._copy_weights()
        self.bind(device)

    def _copy_weights(self):
        weights = self.module.state_dict()
        wide = [weights.pop(f"{name}_proj.weight") for name in "qkvg"]
        weights["in_proj.weight"] = torch.cat(wide)
        if self.module.use_short_conv:
            own = [weights.pop(f"{name}_conv1d.weight") for name in "qkv"]
            weights["conv_weight"] = torch.cat(own)
        self.layer.load_state_dict(weights)

    def bind(self, device):
        """All states of a block lie side by side, and blocks after one another."""
        shapes, dtypes = self.layer.get_state_shape(), self.layer.get_state_dtype()
        sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
        pages = torch.full((BLOCKS, sum(sizes)), -1, dtype=torch.int8, device=device)  # NaN
        parts = pages.split(sizes, 1)
        self.layer.kv_cache = tuple(
            part.view(dtype).view(BLOCKS, *shape)
            for part, dtype, shape in zip(parts, dtypes, shapes, strict=True)
        )


@contextlib.contextmanager
def metadata(device, new, seen, blocks):
    """What vLLM says of requests that have `new` tokens in this call, and `seen` with them."""
    offsets = torch.tensor([0, *new], device=device).cumsum(0).int()
    context.attn_metadata = {
        NAME: types.SimpleNamespace(
            query_start_loc=offsets,
            seq_lens=torch.tensor(seen, dtype=torch.int32, device=device),
            state_indices_tensor=torch.tensor(blocks, dtype=torch.int32, device=device),
            num_prefills=sum(count > 1 for count in new),
        )
    }
    yield
    context.attn_metadata = None


def run(pair, xs, counts, seen, blocks):
    """One call with the next counts[n] tokens of each request, of which it has seen[n] after it."""
    pieces = [
        x[stop - count : stop] for x, count, stop in zip(xs, counts, seen, strict=True) if count
    ]
    with metadata(xs[0].device, counts, seen, blocks):
        return pair.layer(torch.cat(pieces)).split([count for count in counts if count])


@pytest.mark.parametrize(
    "dtype, state, options",
    [
        (torch.float32, "float32", {}),
        (torch.float32, "float32", {"use_short_conv": True, "num_kv_heads": 1}),
        (torch.bfloat16, "float32", {"use_short_conv": True}),
        (torch.bfloat16, "bfloat16", {"hidden_size": 512}),
    ],
)
@torch.no_grad()
def test_requests_of_many_calls(layers, device, dtype, state, options):
    """Prompts in pieces, one of a single token, and decoding: each request is as if alone."""
    pair = Pair(layers, device, dtype, state, **options)
    lengths, blocks = [140, 8, 70], [4, 0, 2]
    xs = [torch.randn(T, pair.module.hidden_size, device=device, dtype=dtype) for T in lengths]
    found: list[list] = [[], [], []]
    calls = [[64, 1, 0], [70, 1, 64], [1, 1, 1], [1, 1, 1], [1, 1, 1], [3, 3, 3]]
    seen = [0, 0, 0]
    for counts in calls:
        seen = [a + b for a, b in zip(seen, counts, strict=True)]
        taking = [n for n in range(3) if counts[n]]
        chosen = [[values[n] for n in taking] for values in (xs, counts, seen, blocks)]
        for n, y in zip(taking, run(pair, *chosen), strict=True):
            found[n].append(y)
    for n, x in enumerate(xs):
        expected = pair.module(x.unsqueeze(0))[0][0][: seen[n]]
        y = torch.cat(found[n])
        error = (y - expected).float().norm() / expected.float().norm()
        assert error < NEAR[dtype] * (2 if state == "bfloat16" else 1), (n, error)
    assert all(s[[1, 3, 5]].isnan().all() for s in pair.layer.kv_cache)


@torch.no_grad()
def test_decoding_with_a_request_that_starts_and_padding(layers, device):
    """One goes on, one starts in a block full of NaN with one token, and two have no token."""
    pair = Pair(layers, device, torch.float32, use_short_conv=True)
    xs = [torch.randn(T, 128, device=device) for T in (10, 1)]
    run(pair, xs[:1], [9], [9], [3])
    before = [state[0].clone() for state in pair.layer.kv_cache]
    with metadata(device, [1, 1, 0, 0], [10, 1, 0, 0], [3, 1, 0, 0]):
        y = pair.layer(torch.cat([xs[0][9:], xs[1], torch.full((2, 128), 7.0, device=device)]))
    for row, x in enumerate(xs):
        expected = pair.module(x.unsqueeze(0))[0][0, -1]
        torch.testing.assert_close(y[row], expected, atol=1e-4, rtol=1e-4)
    for state, old in zip(pair.layer.kv_cache, before, strict=True):
        torch.testing.assert_close(state[0], old, equal_nan=True, atol=0, rtol=0)


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_rows_of_no_request(layers, device, count):
    """Of a graph of the model's other parts: a NaN in them would reach what all rows share."""
    pair = Pair(layers, device, torch.float32)
    x = torch.randn(count + 2, 128, device=device)
    with metadata(device, [count], [count], [3]):
        y = pair.layer(x)
    expected = pair.module(x[None, :count])[0][0]
    torch.testing.assert_close(y[:count], expected, atol=1e-4, rtol=1e-4)
    assert not y[count:].any()


@torch.no_grad()
def test_without_blocks(layers, device):
    """As vLLM measures memory."""
    pair = Pair(layers, device, torch.float32)
    context.attn_metadata = None
    assert not pair.layer(torch.randn(7, 128, device=device)).any()


@pytest.mark.cuda
@torch.no_grad()
def test_graph_of_decoding(layers):
    """A graph of four requests of a token each, of which two are padding when it is replayed."""
    pair = Pair(layers, "cuda", torch.bfloat16, use_short_conv=True)
    xs = [torch.randn(20, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    run(pair, xs, [9, 5], [9, 5], [3, 1])
    x = torch.zeros(4, 128, device="cuda", dtype=torch.bfloat16)
    with metadata("cuda", [1] * 4, [1] * 4, [0] * 4):
        buffers = context.attn_metadata[NAME]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            pair.layer(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                y = pair.layer(x)
        buffers.query_start_loc.copy_(torch.tensor([0, 1, 2, 2, 2]))
        buffers.state_indices_tensor.copy_(torch.tensor([3, 1, 0, 0]))
        for n in range(10):
            buffers.seq_lens.copy_(torch.tensor([10 + n, 6 + n, 0, 0]))
            x[:2] = torch.stack([xs[0][9 + n], xs[1][5 + n]])
            graph.replay()
            for row, stop in ((0, 10 + n), (1, 6 + n)):
                expected = pair.module(xs[row][None, :stop])[0][0, -1]
                torch.testing.assert_close(y[row], expected, atol=2e-2, rtol=2e-2)
