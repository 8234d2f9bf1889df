"""Verification of drafts: every length, size and layout against the recurrence in fp64."""

import pytest
import torch
from common import DTYPES, assert_close
from recurrence import GATINGS, VERIFIED, Server, assert_verified, make_recurrence

from gla_ext import fused_recurrent_gla, recurrent_gla_step_, recurrent_gla_verify
from gla_ext.selftest import TOLERANCE

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_layout = pytest.mark.parametrize("state_v_first", [False, True])
SLOTS = (5, -1, 0, 5, 7, 2)  # of a pool of 7: row 1 and row 4 have none, rows 0 and 3 share one
VALID = [0, 2, 3, 5]
HEAD_SIZES = [
    *[(1, 1), (7, 33), (20, 28), (64, 64), (100, 130), (128, 256), (129, 31), (130, 70)],
    *[(256, 96), (300, 40), (511, 37), (512, 64)],
]


class Drafts(Server):
    """T tokens of 6 rows with `SLOTS` in a pool of 7 states."""

    def __init__(self, device, T, K=128, V=100, dtype=torch.float32, state_v_first=False, **more):
        super().__init__(device, T, dtype, state_v_first=state_v_first, sizes=(2, K, V), **more)
        self.pool = self.before.clone(memory_format=torch.contiguous_format)
        self.before = self.pool.clone()
        self.slots = torch.tensor(SLOTS, device=device)

    def first(self, T):
        return {n: t if t is None else t[:, :T] for n, t in self.tokens.items()}

    def verify(self, **changes):
        return recurrent_gla_verify(**self.arguments() | changes)

    def step(self):
        """o of the rows as steps give it, each on a copy of its state."""
        T = self.tokens["q"].shape[1]
        o = self.tokens["v"].new_zeros(6, T, 2, self.tokens["v"].shape[-1])
        for row in VALID:
            tokens = {n: t if t is None else t[row : row + 1] for n, t in self.tokens.items()}
            state = self.before[SLOTS[row]][None].clone()
            o[row] = recurrent_gla_step_(**tokens, state=state, **self.options)[0]
        return o

    def truth(self):
        tokens = {n: t if t is None else t[VALID].double().cpu() for n, t in self.tokens.items()}
        states = self.before[[SLOTS[row] for row in VALID]].double().cpu()
        o, _ = fused_recurrent_gla(**tokens, initial_state=states, **self.options)
        return o

    def check(self):
        o = self.verify()
        assert torch.equal(self.pool, self.before)
        assert not o[[1, 4]].any()
        bound = VERIFIED[o.dtype] if o.dtype == torch.float32 else TOLERANCE[o.dtype]
        truth = self.truth()
        assert_close(o[VALID].cpu(), truth, bound * (1 + 3 / truth.numel() ** 0.5))
        return o


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("T", [*range(1, 18), 33])
@by_dtype
@by_layout
def test_every_length(device, state_v_first, dtype, T):
    drafts = Drafts(device, T, dtype=dtype, state_v_first=state_v_first)
    assert_verified(drafts.check(), drafts.step())


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("sizes", HEAD_SIZES, ids=str)
@pytest.mark.parametrize("T", [2, 11, 16])
@by_dtype
@by_layout
def test_head_sizes(device, state_v_first, dtype, T, sizes):
    Drafts(device, T, *sizes, dtype=dtype, state_v_first=state_v_first).check()


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("sizes", [(320, 24), (512, 1024), (1000, 1016), (1024, 40)], ids=str)
@pytest.mark.parametrize("T", [1, 11])
@by_layout
def test_large_heads(device, state_v_first, T, sizes):
    drafts = Drafts(device, T, *sizes, state_v_first=state_v_first)
    assert_verified(drafts.check(), drafts.step())


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("gate", [1 / 64, 10.0, "reset"])
@by_layout
def test_gates(device, state_v_first, gate, gating):
    Drafts(device, 16, 60, 72, gating=gating, gate=gate, state_v_first=state_v_first).check()


@pytest.mark.parametrize("K", [60, 256])
@by_dtype
@by_layout
def test_a_longer_draft_has_the_same_bits(device, state_v_first, dtype, K):
    drafts = Drafts(device, 16, K, 40, dtype=dtype, state_v_first=state_v_first)
    o = drafts.verify()
    for T in range(2, 16):
        assert torch.equal(drafts.verify(**drafts.first(T)), o[:, :T]), T


@pytest.mark.parametrize("sizes", [(128, 512), (256, 500), (500, 70), (1000, 600)], ids=str)
@by_layout
def test_rows_alone_have_the_same_bits(device, state_v_first, sizes):
    """However many blocks share a head's values."""
    drafts = Drafts(device, 9, *sizes, state_v_first=state_v_first)
    o = drafts.verify()
    for row in VALID:
        alone = {n: t if t is None else t[row : row + 1] for n, t in drafts.tokens.items()}
        own = drafts.pool[SLOTS[row]][None].clone()
        assert torch.equal(drafts.verify(**alone, state=own, slots=None), o[row : row + 1])
    many = 60 if device == "cuda" else 2
    repeated = {n: t if t is None else t.repeat(many, 1, 1, 1) for n, t in drafts.tokens.items()}
    together = drafts.verify(**repeated, slots=drafts.slots.repeat(many))
    assert torch.equal(together, o.repeat(many, 1, 1, 1))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "misaligned", "expanded"])
@by_dtype
@by_layout
def test_strides(device, state_v_first, dtype, layout):
    drafts = Drafts(device, 7, 64, 40, dtype=dtype, state_v_first=state_v_first, layout=layout)
    plain = {n: t.clone(memory_format=torch.contiguous_format) for n, t in drafts.tokens.items()}
    assert torch.equal(drafts.check(), drafts.verify(**plain))


@by_layout
def test_a_pool_whose_heads_are_one(device, state_v_first):
    drafts = Drafts(device, 7, 64, 40, state_v_first=state_v_first)
    one_head = drafts.pool[:, :1].expand(-1, 2, -1, -1)  # whose matrices overlap
    assert torch.equal(drafts.verify(state=one_head)[:, :, 0], drafts.verify()[:, :, 0])


@pytest.mark.parametrize("name", ["q", "k", "v", "gk", "gv"])
@by_layout
def test_nan_stays_behind_its_token(device, state_v_first, name):
    drafts = Drafts(device, 12, 60, 72, state_v_first=state_v_first)
    clean = drafts.verify()
    drafts.tokens[name][2, 5, 1, 3] = torch.nan
    o, truth = drafts.verify(), drafts.truth()
    assert torch.equal(o[VALID].isnan().cpu(), truth.isnan())
    assert torch.equal(o[~o.isnan()], clean[~o.isnan()])
    assert o[2, 5, 1].isnan().any() and not o[2, :5].isnan().any()


def test_mixed_gate_types(device):
    drafts = Drafts(device, 5, 64, 40, dtype=torch.bfloat16)
    o = drafts.verify()
    wide = {n: drafts.tokens[n].float() for n in ("gk", "gv")}
    assert torch.equal(drafts.verify(**wide), o)


@pytest.mark.cuda
@by_layout
def test_graph_replays_with_other_slots(state_v_first):
    drafts = Drafts("cuda", 8, dtype=torch.bfloat16, state_v_first=state_v_first)
    drafts.verify()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = drafts.verify()
    for slots in (SLOTS, (0, 1, -1, 2, 2, 6)):
        drafts.slots.copy_(torch.tensor(slots))
        graph.replay()
        assert torch.equal(o, drafts.verify())


@pytest.mark.cuda
def test_pool_of_more_than_int32_elements():
    pool = torch.zeros(8193, 1, 512, 512, device="cuda")
    x = make_recurrence(2, 6, 1, 512, 512, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([8192, 0], device="cuda")
    pool[slots] = x.initial_state
    tokens = {n: getattr(x, n) for n in ("q", "k", "v", "gk", "gv")}
    for call in (recurrent_gla_verify, recurrent_gla_step_):
        states = x.initial_state.clone()
        o = call(**tokens, state=pool, slots=slots)
        assert torch.equal(o, call(**tokens, state=states))
        assert torch.equal(pool[slots], states)
    assert not pool[1:8192].any()


@pytest.mark.cuda
def test_same_bits_beside_other_work():
    drafts = Drafts("cuda", 16, 256, 512, dtype=torch.bfloat16)
    expected = drafts.verify()
    noise, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for i in range(50):
        with torch.cuda.stream(stream):
            for _ in range(i % 4):
                noise = (noise @ noise).clamp(-1, 1)
        assert torch.equal(drafts.verify(), expected)


SANITIZED = {  # (T, K, V), options
    "aligned": ((16, 128, 64), {}),
    "wide": ((3, 512, 64), {}),
    "widest": ((3, 1000, 1016), {}),
    "odd": ((9, 33, 65), {}),
    "misaligned": ((5, 256, 40), {"layout": "misaligned"}),
    "no gates": ((2, 130, 70), {"gating": "none"}),
}


@pytest.mark.cuda
@pytest.mark.sanitizer
@pytest.mark.parametrize("what", SANITIZED)
@by_layout
def test_for_the_sanitizer(state_v_first, what):
    sizes, options = SANITIZED[what]
    drafts = Drafts("cuda", *sizes, dtype=torch.bfloat16, state_v_first=state_v_first, **options)
    assert drafts.verify().isfinite().all()
