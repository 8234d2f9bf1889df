"""A rank that fails or stays away ends the others by the time-out of the context's group."""

import datetime
import itertools
import time

import pytest
import torch.distributed as dist
from models import make_ids, make_model

from gla_ext.distributed import build_cp_context

TIMEOUT = 3  # seconds, of the group alone that the rank stays away from
ABSENT = 1
_numbers = itertools.count()


def model(context):
    """A language model with convolutions: forward as a function that gives backward as one."""
    module, ids = make_model(use_short_conv=True).train(), make_ids(B=1, T=8)
    return lambda: module(ids, labels=ids, cp_context=context).loss.backward


def limited_group():
    limit = datetime.timedelta(seconds=TIMEOUT)
    return dist.new_group(timeout=limit, group_desc=f"limited {next(_numbers)}")


def error_of(call):
    """What a call meets, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value), time.monotonic() - start


def run_without_one(group, when):
    """What a rank meets where ABSENT does not come."""
    forward = model(build_cp_context(None, limited_group()))
    if when != "the first call":  # at which the ranks are compared
        forward()()
    backward = forward() if when == "backward" else None
    if dist.get_rank() == ABSENT:
        return None
    return error_of(forward if backward is None else backward)


def run_whole(group):
    model(build_cp_context(None, group))()()


@pytest.mark.parametrize(
    "when",
    ["the first call", pytest.param("a later call", marks=pytest.mark.slow), "backward"],
)
def test_the_others_have_an_error_in_time(pool, when):
    answers = pool(run_without_one, when)
    assert answers.pop(ABSENT) is None
    for text, seconds in answers:
        assert "Timed out" in text or "closed" in text
        assert seconds < 3 * TIMEOUT
    pool(run_whole)  # the processes go on with other groups
