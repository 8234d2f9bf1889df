"""`chunk_gla_` into an output that is given."""

import pytest
import torch
from pool_inputs import Prompts

by_packing = pytest.mark.parametrize("packed", [False, True])

LAYOUTS = ("contiguous", "tokens of more", "wider rows", "heads first", "misaligned")


def make_out(o, layout):
    """NaN in o's shape, and the tensor that it is in."""
    B, T, H, V = o.shape
    if layout == "misaligned":
        whole = o.new_full((o.numel() + 1,), torch.nan)
        return whole[1:].view(o.shape), whole
    if layout == "heads first":
        whole = o.new_full((B, H, T, V), torch.nan)
        return whole.transpose(1, 2), whole
    if layout == "contiguous":
        whole = torch.full_like(o, torch.nan)
        return whole, whole
    more = 3 if layout == "wider rows" else 0
    whole = o.new_full((B, T + 3, H, V + more), torch.nan)
    return whole[:, 1:-2, :, :V], whole


@by_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out(device, layout, dtype, packed):
    """Has the bits of a fresh output, zeros where there is no sequence, and nothing beside it."""
    prompts, plain = (Prompts(device, packed, dtype=dtype, sizes=(2, 24, 40)) for _ in range(2))
    expected = plain.run()
    out, whole = make_out(expected, layout)
    assert prompts.run(out=out) is out
    assert torch.equal(out, expected) and torch.equal(prompts.pool, plain.pool)
    assert whole.isnan().sum() == whole.numel() - out.numel()


def test_out_with_gates_on_values(device):
    prompts, plain = (Prompts(device, True, gv=True) for _ in range(2))
    expected = plain.run()
    out = torch.full_like(expected, torch.nan)
    prompts.run(out=out)
    assert torch.equal(out, expected) and torch.equal(prompts.pool, plain.pool)


def test_out_without_rows(device):
    prompts = Prompts(device, True)
    out = torch.full_like(prompts.tokens["v"], torch.nan)
    prompts.run(state=prompts.pool[:0], out=out)
    assert not out.any()


def test_compiled_into_out(device):
    """A pool and an output of the caller are written where they lie, by one operator."""
    prompts, plain = Prompts(device, True), Prompts(device, True)
    expected = plain.run()
    whole = expected.new_full((1, 2 * expected.shape[1], *expected.shape[2:]), torch.nan)
    addresses = prompts.pool.data_ptr(), whole.data_ptr()
    calls = []

    def call(whole):
        return prompts.run(out=whole[:, : expected.shape[1]]) + 1

    def counting(graph, inputs):
        calls.append(sum("chunk_gla_" in str(node.target) for node in graph.graph.nodes))
        return graph

    result = torch.compile(call, fullgraph=True, backend="aot_eager")(whole)
    assert torch.equal(result, expected + 1) and torch.equal(prompts.pool, plain.pool)
    assert torch.equal(whole[:, : expected.shape[1]], expected)
    assert whole[:, expected.shape[1] :].isnan().all()
    assert addresses == (prompts.pool.data_ptr(), whole.data_ptr())
    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=counting)(whole)
    assert calls == [1]


@pytest.mark.parametrize("what", ["prompts", "prompts with checkpoints"])
def test_compiled_code_copies_no_pool(device, what):
    """The code of inductor has no clone of a pool, of checkpoints, nor of an output."""
    from torch._inductor.utils import run_and_get_code

    prompts, plain = Prompts(device, True), Prompts(device, True)
    asks = prompts.checkpoints()[0] if "checkpoints" in what else {}
    expected = plain.run(
        **{name: x.clone() if name == "checkpoints" else x for name, x in asks.items()}
    )
    out = torch.empty_like(expected)

    def call(tokens, pool, out):
        prompts.run(**tokens, state=pool, **asks, out=out)

    compiled = torch.compile(call, fullgraph=True)
    _, (code,) = run_and_get_code(compiled, prompts.tokens, prompts.pool, out)
    assert code.count("chunk_gla_.out(") == 1
    assert "empty_strided" not in code.split("def call(")[1]
    assert torch.equal(out, expected) and torch.equal(prompts.pool, plain.pool)
    prompts.pool.copy_(prompts.before)
    fresh = torch.compile(lambda tokens, pool: prompts.run(**tokens, state=pool, **asks))
    o, (code,) = run_and_get_code(fresh, prompts.tokens, prompts.pool)
    assert code.count("chunk_gla_.default(") == 1
    assert "empty_strided" not in code.split("def call(")[1]
    assert torch.equal(o, expected) and torch.equal(prompts.pool, plain.pool)


def test_autocast_into_out(device):
    prompts, plain = Prompts(device, True), Prompts(device, True)
    plain.tokens |= {name: plain.tokens[name].bfloat16() for name in "qkv"}
    expected = plain.run()
    out = torch.full_like(expected, torch.nan)
    with torch.autocast(device, dtype=torch.bfloat16):
        prompts.run(out=out)
    assert torch.equal(out, expected) and torch.equal(prompts.pool, plain.pool)
