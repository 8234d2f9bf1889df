"""What the tests of gates on keys and values share: inputs with both, and the truth."""

import dataclasses
from collections.abc import Callable

import common
import torch
from common import Inputs, Tensors, assert_close, make_inputs, outputs_and_gradients, relayout
from torch import Tensor
from torch.nn.functional import logsigmoid

from gla_ext import chunk_gla, fused_recurrent_gla, reference
from gla_ext.selftest import tolerance

GATINGS = ("none", "gk", "gv", "both")
LEAVES = ("q", "k", "v", "gk", "gv", "initial_state")
SHARED = ("k", "v", "gk", "gv")


@dataclasses.dataclass(frozen=True)
class Recurrence(Tensors):
    q: Tensor
    k: Tensor
    v: Tensor
    gk: Tensor | None
    gv: Tensor | None
    do: Tensor
    initial_state: Tensor | None
    dht: Tensor | None
    cu_seqlens: Tensor | None

    def to(self, device: str) -> "Recurrence":
        moved = self.map(lambda x: x.to(device))
        cu = self.cu_seqlens
        return dataclasses.replace(moved, cu_seqlens=cu if cu is None else cu.to(device))

    def v_first(self) -> "Recurrence":
        states = {name: getattr(self, name) for name in ("initial_state", "dht")}
        states = {name: x if x is None else x.mT.contiguous() for name, x in states.items()}
        return dataclasses.replace(self, **states)

    def sharing(self, HK: int) -> "Recurrence":
        """With HK heads of k, v and the gates."""
        parts = {name: getattr(self, name) for name in SHARED}
        parts = {name: x if x is None else x[:, :, :HK] for name, x in parts.items()}
        return dataclasses.replace(self, **parts)

    def leaves(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in LEAVES}


def make_recurrence(
    *shape: int, gating: str = "both", gate: float | str = 1.0, device: str = "cpu", **options
) -> Recurrence:
    """`make_inputs`, whose gates are gk's, and gates on values made in the same way."""
    x: Inputs = make_inputs(*shape, gate=gate, **options)
    generator = torch.Generator().manual_seed(options.get("seed", 0) + 1)
    gv = logsigmoid(torch.randn(x.v.shape, generator=generator, dtype=torch.float64))
    if gate == "reset":
        gv = gv.masked_fill(torch.rand(gv.shape, generator=generator) < 0.1, -torch.inf)
    else:
        gv = gv * gate
    gv = relayout(gv.to(x.g.dtype), options.get("layout", "contiguous"))
    gates = {
        "gk": x.g if gating in ("gk", "both") else None,
        "gv": gv if gating in ("gv", "both") else None,
    }
    result = Recurrence(
        x.q, x.k, x.v, **gates, do=x.do, initial_state=x.initial_state, dht=x.dht,
        cu_seqlens=x.cu_seqlens,
    )  # fmt: skip
    if device == "cpu":
        return result
    moved = result.to(device)
    return moved.map(lambda t: relayout(t, options.get("layout", "contiguous")))


def repeated(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """k, v and the gates with a copy of their heads for every head of the states."""
    H = tensors["q"].shape[2]
    return {
        name: t.repeat_interleave(H // t.shape[2], 2) if name in SHARED and t is not None else t
        for name, t in tensors.items()
    }


def results_of(function, x: Recurrence, repeat: bool = False) -> dict[str, Tensor]:
    """o, final_state and every gradient of `function(q, k, v, gk, gv, initial_state)`, or of the
    function of `repeated` inputs.
    """

    def of_repeated(*leaves):
        return function(*repeated(dict(zip(LEAVES, leaves, strict=True))).values())

    return outputs_and_gradients(of_repeated if repeat else function, x)


def ours(x: Recurrence, repeat: bool = False, **options) -> dict[str, Tensor]:
    def function(q, k, v, gk, gv, initial_state):
        return fused_recurrent_gla(
            q, k, v, gk, gv, initial_state=initial_state, output_final_state=True,
            cu_seqlens=x.cu_seqlens, **options,
        )  # fmt: skip

    return results_of(function, x, repeat)


def chunked(x: Recurrence, repeat: bool = False, **options) -> dict[str, Tensor]:
    """What `chunk_gla` makes of the inputs."""

    def function(q, k, v, gk, gv, initial_state):
        return chunk_gla(
            q, k, v, gk, initial_state=initial_state, output_final_state=True,
            cu_seqlens=x.cu_seqlens, gv=gv, **options,
        )  # fmt: skip

    return results_of(function, x, repeat)


def exact(x: Recurrence, scale: float | None = None, reverse: bool = False) -> dict[str, Tensor]:
    """The recurrence and its autograd in fp64."""
    x = x.double()

    def function(q, k, v, gk, gv, initial_state):
        return reference.recurrence(
            q, k, v, gk, scale, initial_state, x.cu_seqlens, gv, reverse
        )  # fmt: skip

    return results_of(function, x)


def assert_results_close(actual: dict[str, Tensor], expected: dict[str, Tensor], x: Recurrence):
    """Every quantity within the table's bound for its dtype, which is for many numbers: the RMS of
    a few scatters, by one over the root of their count.
    """
    assert actual.keys() == expected.keys()
    accumulation = torch.promote_types(x.q.dtype, torch.float32)
    for name, value in actual.items():
        assert value.dtype == common.result_dtype(name, x), name
        bound = max(tolerance(name, t) for t in (value.dtype, accumulation))
        bound *= 1 + 3 / max(value.numel(), 1) ** 0.5
        assert_close(value, expected[name], bound, torch.finfo(accumulation).tiny, name)


SLOTS = (4, -1, 0, 9, 6, -7)  # of a pool of 7: rows 1, 3 and 5 have none


class Server:
    """A pool of 7 states, a batch of 6 rows with `SLOTS` in it, T tokens of each; the truth."""

    def __init__(
        self, device, T, dtype=torch.float32, gating="both", state_v_first=False, state_dtype=None,
        sizes=(3, 20, 28), **more,
    ):  # fmt: skip
        x = make_recurrence(7, T, *sizes, dtype=dtype, gating=gating, device=device, **more)
        x = x.v_first() if state_v_first else x
        self.before = x.initial_state if state_dtype is None else x.initial_state.to(state_dtype)
        self.pool = self.before.clone()
        self.slots = torch.tensor(SLOTS, device=device)
        self.valid = torch.tensor([0, 2, 4], device=device)
        names = ("q", "k", "v", "gk", "gv")
        rows = {n: getattr(x, n) for n in names}
        self.tokens = {n: t if t is None else t[:6] for n, t in rows.items()}
        self.options = {"state_v_first": state_v_first}

    def arguments(self, *left_out):
        tokens = {n: t for n, t in self.tokens.items() if n not in left_out}
        return tokens | self.options | {"state": self.pool, "slots": self.slots}

    def expected(self, length=None):
        """o of the rows that have a slot, and the pool after one call of `length` of their tokens:
        its states are rounded once.
        """
        length = self.tokens["q"].shape[1] if length is None else length
        own = {n: t if t is None else t[self.valid, :length] for n, t in self.tokens.items()}
        places = self.slots[self.valid].long()
        wide = torch.promote_types(self.tokens["q"].dtype, torch.float32)
        o, states = fused_recurrent_gla(
            **own,
            initial_state=self.before[places].to(wide),
            output_final_state=True,
            **self.options,
        )
        return o, self.before.index_copy(0, places, states.to(self.before.dtype))


# chunk_gla with gates on values: every operand of a product is rounded to bf16.
CHUNKED_BF16 = 0.005


def assert_chunked_close(actual, expected, x: Recurrence, sizes=None, bf16=CHUNKED_BF16):
    """`common.assert_results_close` of `chunk_gla`; with bf16 None the table's bounds."""
    common.assert_results_close(actual, expected, x, sizes, bf16)


@dataclasses.dataclass(frozen=True)
class Call:
    """An operator, the gates that it is given, and how close it comes to the truth.

    Args:
        run: `chunked` or `ours`.
        a_head: one gate for all channels of a head, `[B, T, HK]`.
    """

    run: Callable
    gating: str
    a_head: bool = False

    @property
    def chunks(self) -> bool:
        return self.run is chunked

    def make(self, *shape: int, **options) -> Recurrence:
        x = make_recurrence(*shape, gating=self.gating, **options)
        return dataclasses.replace(x, gk=x.gk[..., 0]) if self.a_head else x

    def outputs(self, q, k, v, gk, gv, initial_state=None, **options):
        """o and the final state."""
        options = {"output_final_state": True, "initial_state": initial_state} | options
        if self.chunks:
            return chunk_gla(q, k, v, gk, gv=gv, **options)
        return fused_recurrent_gla(q, k, v, gk, gv, **options)

    def assert_close(self, results, x, scale=None, reverse=False, expected=None, sizes=None):
        expected = exact(x, scale, reverse) if expected is None else expected
        if self.chunks or self.a_head:
            bf16 = None if self.gating == "gk" else CHUNKED_BF16
            assert_chunked_close(results, expected, x, sizes, bf16)
        else:
            assert_results_close(results, expected, x)


CALLS = {
    "chunk": Call(chunked, "gk"),
    "chunk, a head's": Call(chunked, "gk", True),
    **{f"chunk, {gating}": Call(chunked, gating) for gating in ("none", "gv", "both")},
    **{f"recurrent, {gating}": Call(ours, gating) for gating in GATINGS},
    "recurrent, a head's": Call(ours, "gk", True),
}
STATES = ("final_state", "dh0")  # of the results; the others have tokens


# Verification of 2 to 16 tokens on CUDA takes the chunk form: fp32 rounding, and what the rounding
# of an output to 16 bits makes of it where it falls to the other side.
CHUNKED_DRAFTS = range(2, 17)
VERIFIED = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 1e-3,
    torch.float16: 2e-4,
}


def assert_verified(o: Tensor, stepped: Tensor):
    """o of a draft [B, T, H, V] is what steps of its tokens give: the same bits where verification
    is the recurrence, else within rounding.
    """
    if o.is_cuda and o.shape[1] in CHUNKED_DRAFTS:
        assert o.dtype == stepped.dtype
        assert_close(o, stepped, VERIFIED[o.dtype])
    else:
        assert torch.equal(o, stepped)
