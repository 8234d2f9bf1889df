"""The example for another engine, against a stub of what it publishes.

vLLM's `MambaBase` is an abstract class: a subclass that misses a method cannot be made.
"""

import enum
import sys
import types
from abc import ABC, abstractmethod

import pytest
import torch
from source_tree import load_module

from gla_ext import reference, short_convolution_

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
    assert make_states(vllm).mamba_type.name == "LINEAR"
    states = make_states(vllm, num_heads=8, tensor_parallel_size=4, conv_size=4)
    assert states.get_state_shape() == ((2 * (2 * K + V), 4), (2, V, K))
    assert states.get_state_dtype() == (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="to divide num_heads = 2, got 3"):
        make_states(vllm, tensor_parallel_size=3).get_state_shape()


def make_bound(vllm, given, **options):
    """States in blocks that hold what is given."""
    states = make_states(vllm, state_dtype=given.dtype, **options)
    pairs = zip(states.get_state_shape(), states.get_state_dtype(), strict=True)
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in pairs)
    states.bind_kv_cache(torch.zeros(len(given), size, dtype=torch.int8))
    states.kv_cache[-1].copy_(given)
    return states


def describe(num_decodes, offsets, seq_lens, blocks):
    """vLLM's metadata, int32 and perhaps strided."""
    query_start_loc, seq_lens = (torch.tensor(x, dtype=torch.int32) for x in (offsets, seq_lens))
    return types.SimpleNamespace(
        num_decodes=num_decodes,
        num_prefills=len(blocks) - num_decodes,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        state_indices_tensor=torch.tensor([[x, 7] for x in blocks], dtype=torch.int32)[:, 0],
    )


@pytest.mark.parametrize(("state_dtype", "conv_size"), [(torch.float32, None), (torch.bfloat16, 4)])
def test_vllm_batch(vllm, inputs, conv_size, state_dtype):
    """Four requests. One continues with one token; one is a prompt of one token, which vLLM counts
    as the same kind; one is a prompt that starts; one continues after a cached prefix.
    """
    q, k, v, g, given = inputs = (*inputs[:4], inputs[4].to(state_dtype))
    given[[2, 0]] = torch.nan  # left by others
    states = make_bound(vllm, given, conv_size=conv_size)
    metadata = describe(2, [0, 1, 2, 72, 77], [9, 1, 70, 69], [5, 2, 0, 3])
    o = states.attend(q, k, v, g, metadata)
    pieces = [(0, 1, 5), (1, 2, None), (2, 72, None), (72, 77, 3)]
    expected = [one(inputs, *piece) for piece in pieces]
    assert_near(o, torch.cat([x for x, _ in expected]))
    pool = states.kv_cache[-1]
    for slot, (_, state) in zip([5, 2, 0, 3], expected, strict=True):
        assert_near(pool[slot], state)
    assert torch.equal(pool[[1, 4]], given[[1, 4]])


def test_vllm_batch_of_decodes(vllm, inputs):
    """All of one token; the last two are a CUDA graph's padding, in vLLM's block of nobody."""
    q, k, v, g, given = inputs
    given[4] = torch.nan
    states = make_bound(vllm, given)
    metadata = describe(4, [0, 1, 2, 2, 2], [1, 8, 0, 0], [4, 1, 0, 0])
    o = states.attend(q[:4], k[:4], v[:4], g[:4], metadata)
    expected = [one(inputs, 0, 1, None), one(inputs, 1, 2, 1)]
    assert_near(o[:2], torch.cat([x for x, _ in expected]))
    for slot, (_, state) in zip([4, 1], expected, strict=True):
        assert_near(states.kv_cache[-1][slot], state)
    assert torch.equal(states.kv_cache[-1][[2, 3, 5]], given[[2, 3, 5]])


def test_vllm_without_blocks(vllm, inputs):
    """As vLLM measures memory."""
    assert make_states(vllm).attend(*inputs[:4], None).shape == (77, H, V)


def test_vllm_convolutions(vllm, inputs):
    """A prompt of one token does not see the last owner's inputs."""
    x = inputs[2].flatten(1)
    weight = torch.randn(H * V, 1, 4, generator=torch.Generator().manual_seed(1))
    left = torch.full((3, H * V, 4), torch.nan)
    metadata = describe(1, [0, 1, 8], [1, 7], [2, 0])
    y = short_convolution_(x[None, :8], weight, state=left, **vllm.rows_of(metadata))[0]
    padded = torch.nn.functional.pad(x[:1].T, (3, 0))
    expected = torch.nn.functional.silu((padded.double() * weight[:, 0].double()).sum(1))
    assert_near(y[0], expected)
    assert y.isfinite().all() and left[[2, 0]].isfinite().all()
