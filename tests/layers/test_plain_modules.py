"""What a linear map or a norm may be for the ways around its call: nothing but itself.

`is_plain` and `is_plain_norm` are asked by every such way. That each asks them of each of its
modules, its own tests say with a hook.
"""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as every
from torch.nn.utils import parametrize

from gla_ext.layers._projections import is_plain, is_plain_norm
from gla_ext.layers.norms import GatedRMSNorm, RMSNorm


class Shard(torch.Tensor):
    pass


class Seen(nn.Module):
    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight


def hooked(name):
    return lambda module: getattr(module, f"register_{name}")(lambda *_: None)


def hooked_everywhere(name):
    return lambda module: getattr(every, f"register_module_{name}")(lambda *_: None)


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


def own_forward(module):
    module.forward = lambda x: x


def subclass(module):
    module.__class__ = type("Adapted", (type(module),), {})


def parametrization(module):
    parametrize.register_parametrization(module, "weight", Seen())


def weight_of_another_kind(module):
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Shard))


KINDS = {name: hooked(name) for name in HOOKS}
KINDS |= {f"{name} of every module": hooked_everywhere(name) for name in HOOKS}
KINDS |= {f.__name__: f for f in (own_forward, subclass, parametrization, weight_of_another_kind)}


@pytest.mark.parametrize("change", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("kind", [nn.Linear, GatedRMSNorm, RMSNorm])
def test_a_module_that_is_more_is_called(kind, change):
    linear = kind is nn.Linear
    module = nn.Linear(8, 8, bias=False) if linear else kind(8)

    def plain():
        return is_plain(module) if linear else is_plain_norm(module, kind)

    assert plain()
    handle = change(module)
    try:
        assert not plain()
    finally:
        if handle is not None:
            handle.remove()
    if change is parametrization:  # whose weight is not computed for the question
        seen = module.parametrizations.weight[0]
        before = seen.calls
        assert not plain() and seen.calls == before
    assert handle is None or plain()


def test_another_module_and_a_bias():
    assert not is_plain(nn.Sequential(nn.Linear(8, 8, bias=False)))
    assert not is_plain(nn.Linear(8, 8)) and is_plain(nn.Linear(8, 8), biased=True)
    assert not is_plain_norm(RMSNorm(8)) and not is_plain_norm(nn.RMSNorm(8), RMSNorm)
    assert is_plain_norm(GatedRMSNorm(8, elementwise_affine=False))
