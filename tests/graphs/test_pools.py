"""What works on a pool of states under torch.compile: it is written where it lies, by one operator.

Equal bits (see common.py): own sums.
"""

import pytest
import torch
from conv_pool import Pool
from pool_inputs import Prompts
from recurrence import Server
from torch._dynamo import lookup_backend
from torch._inductor.utils import run_and_get_code

from gla_ext import recurrent_gla_commit_, recurrent_gla_step_, recurrent_gla_verify

OPERATORS = {
    "prompts": ["chunk_gla_"],
    "prompts with checkpoints": ["chunk_gla_"],
    "a step": ["recurrent_gla_step_"],
    "a round of drafts": ["recurrent_gla_verify", "recurrent_gla_commit_"],
    "a packed round": ["recurrent_gla_verify", "recurrent_gla_commit_"],
    "a convolution": ["short_convolution_"],
    "a packed convolution": ["short_convolution_"],
}
by_name = pytest.mark.parametrize("name", OPERATORS)
by_out = pytest.mark.parametrize("into", [False, True], ids=["fresh", "out"])


class Call:
    """A call's tokens and pool, a function of these and an output or None, and what else it
    writes."""

    def __init__(self, name, device):
        self.others = []
        if name.startswith("prompts"):
            prompts, asks = Prompts(device, True), {}
            if "checkpoints" in name:
                asks, _ = prompts.checkpoints()
                self.others = [asks["checkpoints"]]
            self.tokens, self.pool = prompts.tokens, prompts.pool
            self.run = lambda t, pool, out: prompts.run(**t, state=pool, **asks, out=out)
            return
        if "convolution" in name:
            conv = Pool(device, packed="packed" in name)
            self.tokens, self.pool = {"x": conv.x}, conv.pool
            self.run = lambda t, pool, out: conv.run(**t, state=pool, out=out)
            return
        server = Server(device, 1 if name == "a step" else 3)
        self.tokens, self.pool = server.tokens, server.pool
        arguments = {"slots": server.slots, "state_v_first": False}
        if name == "a step":
            writes = torch.tensor([4, 1, 2, 3, 5, 0], device=device)
            self.run = lambda t, pool, out: recurrent_gla_step_(
                **t, **arguments, state=pool, write_slots=writes, out=out
            )
            return
        accepted = torch.tensor([1, 0, 2, 3, 20, 1], device=device)
        if name == "a packed round":
            self.tokens = {n: t.flatten(0, 1)[None] for n, t in self.tokens.items()}
            arguments["cu_seqlens"] = torch.tensor([0, 3, 4, 10, 10, 15, 17], device=device)

        def run(tokens, pool, out):
            o = recurrent_gla_verify(**tokens, **arguments, state=pool, out=out)
            tokens = {n: t for n, t in tokens.items() if n != "q"}
            recurrent_gla_commit_(**tokens, **arguments, state=pool, accepted=accepted)
            return o

        self.run = run

    def plain(self, out=None):
        return self.run(self.tokens, self.pool, out)

    def assert_wrote(self, other, pool=None):
        assert torch.equal(self.pool if pool is None else pool, other.pool)
        for x, y in zip(self.others, other.others, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@by_name
@by_out
def test_written_in_place_by_one_operator(device, name, into):
    """A layer of a pool of many; and a part of a wider output where that is contiguous, as torch's
    compiler wants it.
    """
    call, plain, counts = Call(name, device), Call(name, device), []
    expected = plain.plain()
    pool = torch.stack([call.pool] * 3, 1)
    B, T, *heads = expected.shape
    wide = expected.new_full((B, 2 * T if B == 1 else T, *heads), torch.nan)
    addresses = pool.data_ptr(), wide.data_ptr()

    def function(tokens, pool, wide):
        return call.run(tokens, pool[:, 1], wide[:, :T] if into else None) + 1

    def backend(graph, inputs):
        targets = [str(node.target) for node in graph.graph.nodes]
        counts.append([sum(op in t for t in targets) for op in OPERATORS[name]])
        return lookup_backend("aot_eager")(graph, inputs)

    result = torch.compile(function, fullgraph=True, backend=backend)(call.tokens, pool, wide)
    assert counts == [[1] * len(OPERATORS[name])]
    assert torch.equal(result, expected + 1)
    call.assert_wrote(plain, pool[:, 1])
    assert torch.equal(pool[:, 0], call.pool) and torch.equal(pool[:, 2], call.pool)
    assert addresses == (pool.data_ptr(), wide.data_ptr())
    assert wide[:, T:].isnan().all() and wide[:, :T].isnan().all() == (not into)
    assert not into or torch.equal(wide[:, :T], expected)


@pytest.mark.parametrize(
    "name, into",
    [
        ("prompts", False),
        ("a convolution", False),
        *((name, True) for name in ("prompts with checkpoints", "a step", "a packed round")),
        ("a convolution", True),
    ],
)
def test_inductor_copies_no_pool(device, name, into):
    """Its code calls each operator once and clones no pool, no checkpoints and no output."""
    call, plain = Call(name, device), Call(name, device)
    expected = plain.plain()
    pool, out = torch.stack([call.pool] * 3, 1), torch.empty_like(expected) if into else None

    def function(tokens, pool, out):
        return call.run(tokens, pool[:, 1], out)

    compiled = torch.compile(function, fullgraph=True)
    o, (code,) = run_and_get_code(compiled, call.tokens, pool, out)
    for op in OPERATORS[name]:
        variant = "out" if into and "commit" not in op else "default"
        assert code.count(f"{op}.{variant}(") == 1
    assert "empty_strided" not in code.split("def call(")[1]
    assert torch.equal(o, expected)
    call.assert_wrote(plain, pool[:, 1])
    assert torch.equal(pool[:, ::2], torch.stack([call.pool] * 2, 1))


@by_out
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["prompts", "a step"])
def test_autocast_casts_q_k_v_alone(device, name, compiled, into):
    call, plain = Call(name, device), Call(name, device)
    plain.tokens = plain.tokens | {n: plain.tokens[n].bfloat16() for n in "qkv"}
    expected = plain.plain()
    assert expected.dtype == torch.bfloat16
    out = torch.full_like(expected, torch.nan) if into else None
    run = torch.compile(call.run, fullgraph=True, backend="aot_eager") if compiled else call.run
    with torch.autocast(device, dtype=torch.bfloat16):
        o = run(call.tokens, call.pool, out)
    assert torch.equal(out if into else o, expected)
    call.assert_wrote(plain)
