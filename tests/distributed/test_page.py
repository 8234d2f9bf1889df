"""The recipes of docs/distributed.md, as they stand there, give one process's results.

Equal bits (see common.py): tokens.
"""

import re

import pytest
import torch
import torch.distributed as dist
from common import ROOT, assert_close
from models import make_ids, make_model
from pool import Pool
from torch.distributed.tensor import DTensor

from gla_ext.distributed import build_cp_context
from gla_ext.ops._collectives import all_sum

PAGE = (ROOT / "docs" / "distributed.md").read_text()
OPTIONS = {"num_heads": 4, "use_short_conv": True, "tie_word_embeddings": True}


def recipe(heading, place=0):
    """A section's Python on the CPU, with graphs that are not compiled."""
    section = re.search(rf"^## {heading}$(.*?)(^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    code = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[place]
    code = code.replace('"cuda"', '"cpu"').replace("(fullgraph=True)", "(backend='eager')")
    return code.replace('"cpu", (2,)', '"cpu", (4,)')  # as many as there are


def run_recipe(heading, names, place=0):
    """Runs it with these names; all names after it."""
    names = {"torch": torch, **names}
    exec(compile(recipe(heading, place), heading, "exec"), names)
    return names


def gradients(model, average=lambda x: x):
    named = {n: p.grad for n, p in model.named_parameters()}
    return {
        n: average(g.full_tensor() if isinstance(g, DTensor) else g).float()
        for n, g in named.items()
    }


def whole(dtype, ids):
    """One process's loss and gradients."""
    model = make_model(dtype, **OPTIONS).train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item(), gradients(model)


def assert_one_process_s(answers, expected, bound):
    for loss, grads in answers:
        assert loss == pytest.approx(expected[0], rel=bound)
        for name, gradient in expected[1].items():
            assert_close(grads[name], gradient, max(bound, 1e-6), name=name)


def run_training(group, heading, dp, cp, tp):
    """The mean loss and the gradients of a section's recipe, of one rank's rows and tokens."""
    dtype = torch.float32 if heading == "Shards" else torch.float64
    model, rank = make_model(dtype, **OPTIONS).train(), dist.get_rank()
    rows = make_ids(B=4, T=24).chunk(dp)[rank // (cp * tp)]
    my_tokens = rows.chunk(cp, 1)[rank // tp % cp]
    names = {"model": model, "my_tokens": my_tokens, "group": group, "dp": dp, "cp": cp, "tp": tp}
    names = run_recipe(heading, names)
    if "loss" not in names:  # a section that only lays a model out
        names["loss"] = names["model"](my_tokens, labels=my_tokens).loss
        names["loss"].backward()
    loss = all_sum(names["loss"], group.group_name).item() / (dp * cp * tp)

    def mean(gradient):
        return all_sum(gradient, group.group_name) / cp

    found = gradients(model, mean if heading == "Context parallel" else lambda x: x)
    if heading == "Shards":
        norm = run_recipe(heading, names, 1)["norm"]
        squares = [gradient.square().sum() for gradient in found.values()]
        assert_close(norm, torch.stack(squares).sum().sqrt(), 1e-5)
    return loss, found


RECIPES = {
    "Tensor parallel": ((1, 1, 4),),
    "Context parallel": ((1, 4, 1),),
    "All three": ((1, 2, 2), (2, 1, 2), (2, 2, 1)),
}


@pytest.mark.parametrize(
    ("heading", "sizes"), [(name, sizes) for name, cases in RECIPES.items() for sizes in cases]
)
def test_training(pool, heading, sizes):
    expected = whole(torch.float64, make_ids(B=4, T=24))
    assert_one_process_s(pool(run_training, heading, *sizes), expected, 1e-12)


def test_shards(pool):
    """In bf16, whose rounding is of single rows."""
    rows = [whole(torch.bfloat16, ids) for ids in make_ids(B=4, T=24).chunk(4)]
    mean = {name: sum(grads[name] for _, grads in rows) / 4 for name in rows[0][1]}
    expected = sum(loss for loss, _ in rows) / 4, mean
    assert_one_process_s(pool(run_training, "Shards", 4, 1, 1), expected, 3e-2)


def run_long_prompt(group):
    model = make_model(torch.float64, **OPTIONS).eval()
    ids, lengths = make_ids(B=2, T=24), (6, 6, 6, 5)
    context = build_cp_context(None, group, lengths=lengths)
    my_tokens = ids[:, :-1].split(lengths, 1)[dist.get_rank()]
    names = {"model": model, "my_tokens": my_tokens, "group": group, "context": context}
    torch.manual_seed(0)
    return run_recipe("Context parallel", names | {"last_token": ids[:, -1:]}, 1)["tokens"][:, 1:]


def test_a_long_prompt(pool):
    model, ids = make_model(torch.float64, **OPTIONS).eval(), make_ids(B=2, T=24)
    torch.manual_seed(0)
    expected = model.generate(ids, 100)[:, 24:]
    for tokens in pool(run_long_prompt):
        assert torch.equal(tokens, expected)


@pytest.mark.slow
def test_all_three_on_eight():
    processes = Pool(8)
    try:
        found = processes(run_training, "All three", 2, 2, 2)
    finally:
        processes.stop()
    assert_one_process_s(found, whole(torch.float64, make_ids(B=4, T=24)), 1e-12)
