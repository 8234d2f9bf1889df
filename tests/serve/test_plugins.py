"""The examples for other engines, against stubs of what these publish.

vLLM's `MambaBase` and SGLang's `LinearAttnKernelBase` are abstract classes: a subclass that misses
a method cannot be made.
"""

import enum
import inspect
import sys
import types
from abc import ABC, abstractmethod

import pytest
import torch
from source_tree import load_module

from gla_ext import recurrent_gla_commit_, reference

H, K, V = 2, 16, 24


def stub(monkeypatch, name: str, **members) -> None:
    """A module of that name, and its packages."""
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        part = ".".join(parts[:n])
        if part not in sys.modules:
            monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    for key, value in members.items():
        setattr(sys.modules[name], key, value)


@pytest.fixture
def inputs():
    """q, k, v, g [tokens, H, K | V] of sequences of 1, 1, 70 and 5 tokens, and states [6, H, V, K]
    in blocks that lie apart."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v = normal(77, H, K), normal(77, H, K), normal(77, H, V)
    g = torch.nn.functional.logsigmoid(normal(77, H, K)) / 16
    pool = normal(6, 3 * H * V * K)[:, : H * V * K].view(6, H, V, K)
    return q, k, v, g, pool


def one(inputs, start, stop, slot):
    """Outputs and final state of a sequence from a slot's state, or from zero, by the recurrence in
    fp64."""
    q, k, v, g = (x[start:stop].double().unsqueeze(0) for x in inputs[:4])
    state = None if slot is None else inputs[4][slot : slot + 1].double().mT
    o, state = reference.recurrence(q, k, v, g, initial_state=state)
    return o[0], state[0].mT


def assert_near(found, expected):
    """To the rounding of fp32, or of a state in 16 bits; fp32 outputs have only read these."""
    error = max(1e-4, 2 * torch.finfo(found.dtype).eps)
    torch.testing.assert_close(found.double(), expected, atol=error, rtol=error)


by_state_dtype = pytest.mark.parametrize(
    "state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)


@pytest.fixture
def kernel(monkeypatch):
    class LinearAttnKernelBase(ABC):
        @abstractmethod
        def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices): ...

        @abstractmethod
        def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc): ...

        def target_verify(self, A_log, dt_bias, q, k, v, a, b, **kwargs):
            raise NotImplementedError

    name = "sglang.srt.layers.attention.linear.kernels.kernel_backend"
    stub(monkeypatch, name, LinearAttnKernelBase=LinearAttnKernelBase)
    return load_module("examples/plugins/sglang_gla.py").GLAKernel()


@by_state_dtype
def test_sglang(kernel, inputs, state_dtype):
    q, k, v, g, pool = inputs = (*inputs[:4], inputs[4].to(state_dtype))
    before = pool.clone()
    expected = [one(inputs, 2, 72, 4), one(inputs, 72, 77, 1)]
    extend = {"ssm_states": pool, "cache_indices": torch.tensor([4, 1])}
    extend["query_start_loc"] = torch.tensor([0, 70, 75])
    packed = [x[None, 2:] for x in (q, k, v, g)]
    o = kernel.extend(*packed, beta=None, A_log=None, dt_bias=None, **extend)
    assert_near(o[0], torch.cat([x for x, _ in expected]))
    for slot, (_, state) in zip([4, 1], expected, strict=True):
        assert_near(pool[slot], state)

    expected = [one(inputs, 0, 1, 4), one(inputs, 1, 2, 0)]
    slots = torch.tensor([4, 0, -1])
    step = [x[None, :3] for x in (q, k, v, g)]
    places = {"ssm_states": pool, "cache_indices": slots, "query_start_loc": torch.arange(4)}
    o = kernel.decode(*step, None, A_log=None, dt_bias=None, **places)
    assert_near(o[0, :2], torch.cat([x for x, _ in expected]))
    assert not o[0, 2].any()
    for slot, (_, state) in zip([4, 0], expected, strict=True):
        assert_near(pool[slot], state)
    assert torch.equal(pool[[2, 3, 5]], before[[2, 3, 5]])


def test_sglang_drafts(kernel, inputs):
    q, k, v, g, pool = inputs
    before, slots = pool.clone(), torch.tensor([3, 5])
    draft = [x[None, :8] for x in (q, k, v, g)]  # 4 tokens of each
    places = {"ssm_states": pool, "cache_indices": slots, "query_start_loc": None}
    o = kernel.target_verify(None, None, *draft, None, **places)
    expected = [one(inputs, 0, 4, 3), one(inputs, 4, 8, 5)]
    assert_near(o[0], torch.cat([x for x, _ in expected]))
    assert torch.equal(pool, before)
    k, v, g = (x.unflatten(1, (2, 4))[0] for x in draft[1:])
    options = {"slots": slots, "accepted": torch.tensor([4, 0]), "state_v_first": True}
    recurrent_gla_commit_(k, v, g, state=pool, **options)
    assert_near(pool[3], expected[0][1])
    assert torch.equal(pool[5], before[5])


@pytest.fixture
def vllm(monkeypatch):
    class MambaBase(ABC):
        kv_cache: tuple[torch.Tensor, ...]

        @abstractmethod
        def get_state_shape(self): ...

        @property
        @abstractmethod
        def mamba_type(self): ...

        @abstractmethod
        def get_state_dtype(self): ...

        def bind_kv_cache(self, pages):
            """Of bytes [blocks, n]: one state after the other in each block."""
            states, offset = [], 0
            for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype(), strict=True):
                size = torch.Size(shape).numel() * dtype.itemsize
                part = pages[:, offset : offset + size].view(dtype)
                states.append(part.view(-1, *shape))
                offset += size
            self.kv_cache = tuple(states)

    types_of = enum.Enum("MambaAttentionBackendEnum", ["MAMBA1", "MAMBA2", "LINEAR"])
    stub(monkeypatch, "vllm.model_executor.layers.mamba.abstract", MambaBase=MambaBase)
    name = "vllm.v1.attention.backends.registry"
    stub(monkeypatch, name, MambaAttentionBackendEnum=types_of)
    return load_module("examples/plugins/vllm_gla.py")


def make_states(vllm, **options):
    states = vllm.GLAStates()
    for name, value in ({"num_heads": H, "K": K, "V": V} | options).items():
        setattr(states, name, value)
    return states


def test_vllm_shapes(vllm):
    states = make_states(vllm)
    assert not inspect.isabstract(vllm.GLAStates)
    assert states.mamba_type.name == "LINEAR"
    assert states.get_state_shape() == ((H, V, K),)
    assert states.get_state_dtype() == (torch.float32,)
    sharded = make_states(vllm, num_heads=8, tensor_parallel_size=4, conv_size=4)
    assert sharded.get_state_shape() == ((2 * (2 * K + V), 4), (2, V, K))
    assert sharded.get_state_dtype() == (torch.bfloat16, torch.float32)
    short = make_states(vllm, state_dtype=torch.float16, conv_size=4)
    assert short.get_state_dtype() == (torch.bfloat16, torch.float16)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 or torch\.float16, got torch\.float8"):
        make_states(vllm, state_dtype=torch.float8_e4m3fn).get_state_dtype()
    with pytest.raises(ValueError, match="to divide num_heads = 2, got 3"):
        make_states(vllm, tensor_parallel_size=3).get_state_shape()


@by_state_dtype
@pytest.mark.parametrize("conv_size", [None, 4])
def test_vllm_batch(vllm, inputs, conv_size, state_dtype):
    """Two one-token requests, a prompt that starts, and one that goes on after a cached prefix."""
    q, k, v, g, given = inputs = (*inputs[:4], inputs[4].to(state_dtype))
    states = make_states(vllm, conv_size=conv_size, state_dtype=state_dtype)
    size = state_dtype.itemsize * H * V * K + (
        0 if conv_size is None else 2 * H * (2 * K + V) * conv_size
    )
    states.bind_kv_cache(torch.zeros(6, size, dtype=torch.int8))
    pool = states.kv_cache[-1]
    pool.copy_(given)
    metadata = types.SimpleNamespace(
        num_decodes=2,
        num_prefills=2,
        query_start_loc=torch.tensor([0, 1, 2, 72, 77], dtype=torch.int32),
        seq_lens=torch.tensor([9, 30, 70, 69], dtype=torch.int32),
        state_indices_tensor=torch.tensor([5, 2, 0, 3], dtype=torch.int32),
    )
    o = states.attend(q, k, v, g, metadata)
    pieces = [(0, 1, 5), (1, 2, 2), (2, 72, None), (72, 77, 3)]
    expected = [one(inputs, *piece) for piece in pieces]
    assert_near(o, torch.cat([x for x, _ in expected]))
    for slot, (_, state) in zip([5, 2, 0, 3], expected, strict=True):
        assert_near(pool[slot], state)
    assert torch.equal(pool[[1, 4]], given[[1, 4]])
