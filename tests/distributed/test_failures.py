"""A rank that fails or stays away ends the others by the time-out of the context's group."""

import datetime
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from models import make_ids, make_layer, make_model, make_x

from gla_ext import chunk_gla
from gla_ext.distributed import build_cp_context

TIMEOUT = 3  # seconds, of the group alone that the rank stays away from
ABSENT = 1
_numbers = itertools.count()


def operator(context):
    """`chunk_gla`: forward as a function that gives backward as one."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 8, 2, 4, generator=generator).requires_grad_()

    def forward():
        o, _ = chunk_gla(q, q, q, -q.abs(), cp_context=context)
        return o.sum().backward

    return forward


def layer(context):
    """A layer whose convolutions ask for their halo first."""
    module = make_layer(torch.float32, use_short_conv=True)
    x = make_x(B=1, T=8, dtype=torch.float32)
    return lambda: module(x, cp_context=context)[0].sum().backward


def model(context):
    """A language model with its loss."""
    module, ids = make_model(use_short_conv=True).train(), make_ids(B=1, T=8)
    return lambda: module(ids, labels=ids, cp_context=context).loss.backward


CALLS = {"operator": operator, "layer": layer, "model": model}


def limited_group():
    limit = datetime.timedelta(seconds=TIMEOUT)
    return dist.new_group(timeout=limit, group_desc=f"limited {next(_numbers)}")


def error_of(call):
    """What a call meets, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value), time.monotonic() - start


def run_without_one(group, name, when):
    """What a rank meets where ABSENT does not come."""
    forward = CALLS[name](build_cp_context(None, limited_group()))
    if when != "the first call":  # at which the ranks are compared
        forward()()
    backward = forward() if when == "backward" else None
    if dist.get_rank() == ABSENT:
        return None
    return error_of(forward if backward is None else backward)


def run_whole(group):
    CALLS["model"](build_cp_context(None, group))()()


@pytest.mark.parametrize(
    ("name", "when"),
    [("operator", "the first call"), ("layer", "a later call"), ("model", "backward")],
)
def test_the_others_have_an_error_in_time(pool, name, when):
    answers = pool(run_without_one, name, when)
    assert answers.pop(ABSENT) is None
    for text, seconds in answers:
        assert "Timed out" in text or "closed" in text
        assert seconds < 3 * TIMEOUT
    pool(run_whole)  # the processes go on with other groups
