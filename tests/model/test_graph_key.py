"""When two keys of a model, of what a captured step has taken in, are the same."""

import copy
import dataclasses
import enum
import functools
import gc
import threading
import time
import weakref

import pytest
import stepped
import torch
from models import make_model
from torch import nn

from gla_ext.decode._graph_key import graph_key
from gla_ext.layers.norms import RMSNorm
from gla_ext.model import GLAMLP, GLAForCausalLM
from gla_ext.model.config import GLAConfig


def one_function(x):
    return x


def other_function(x):
    return -x


def one_hook(module, args, output):
    return None


def with_closure(scale):
    return lambda x: x * scale[0]


def with_default(value):
    def function(x, value=value):
        return x

    return function


class Kind(enum.Enum):
    A = "a"
    B = "b"


@dataclasses.dataclass
class Options:
    scale: float = 1.0
    kind: Kind = Kind.A


class Opaque:
    pass


class Slots(nn.Module):
    __slots__ = ("hidden",)


# Of an attribute: two values, of which steps may differ.
VALUES = {
    "number": (1, 2),
    "type": (1, 1.0),
    "flag": (True, 1),
    "zero": (0.0, -0.0),
    "string": ("a", "b"),
    "none": (None, 0),
    "dtype": (torch.float32, torch.bfloat16),
    "dict": ({"a": [1, {"b": (2,)}]}, {"a": [1, {"b": (3,)}]}),
    "key": ({1: 0}, {True: 0}),
    "set": ({"a", "b"}, {"a", "c"}),
    "enum": (Kind.A, Kind.B),
    "dataclass": (Options(), Options(kind=Kind.B)),
    "configuration": (GLAConfig(), GLAConfig(clamp_min=-1.0)),
    "function": (one_function, other_function),
    "builtin": (torch.relu, torch.sigmoid),
    "class": (nn.ReLU, nn.GELU),
    "operator": (torch.ops.aten.relu.default, torch.ops.aten.silu.default),
    "partial": (
        functools.partial(nn.functional.gelu, approximate="tanh"),
        functools.partial(nn.functional.gelu, approximate="none"),
    ),
    "tensor": (torch.ones(3), torch.ones(3)),
}


@pytest.mark.parametrize(("one", "other"), VALUES.values(), ids=VALUES)
def test_plain_values_are_compared(one, other):
    model = make_model()
    keys = []
    for value in (one, copy.deepcopy(one) if not torch.is_tensor(one) else one, other):
        model.model.norm.extra = value
        keys.append(graph_key(model))
    assert None not in keys
    assert keys[0] == keys[1] != keys[2]


CHANGES = stepped.CHANGES | {
    "in place": lambda m: setattr(m.model.layers[0].attn.v_proj.options, "scale", 2.0),
    "in a list": lambda m: m.model.layers[0].attn.v_proj.mixed[0]["scale"].append(2.0),
    "default of a hook": lambda m: m.scale.append(2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_a_step_changes_the_key(change):
    model, scale = stepped.make("cpu"), [1.0]
    vars(model)["scale"] = scale
    adapter = model.model.layers[0].attn.v_proj
    vars(adapter).update(options=Options(), mixed=[{"scale": [1.0]}])
    model.model.norm.register_forward_hook(lambda m, x, y, scale=scale: y * scale[0])
    key = graph_key(model)
    assert key == graph_key(model) is not None
    change(model)
    other = graph_key(model)
    assert other != key
    assert other == graph_key(model) is not None


def holds_itself():
    own = [1]
    own.append(own)
    return own


UNKNOWN = {
    "object": Opaque,
    "list": lambda: [Opaque()],
    "closure": lambda: with_closure([1.0]),
    "default": lambda: with_default(Opaque()),
    "bound": lambda: [].append,
    "lock": threading.Lock,
    "module elsewhere": nn.ReLU,
    "partial": lambda: functools.partial(with_closure([1.0])),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
    "iterator": lambda: iter([1]),
    "list that holds itself": holds_itself,
}


@pytest.mark.parametrize("value", UNKNOWN.values(), ids=UNKNOWN)
def test_what_has_no_key(value):
    model = make_model()
    vars(model.model.norm)["extra"] = value()
    assert graph_key(model) is None
    del model.model.norm.extra
    assert graph_key(model) is not None


def test_modules_that_have_no_key():
    for change in (
        lambda model: model.model.norm.register_forward_hook(lambda m, x, y: model),
        lambda model: model.model.register_module("slots", Slots()),
        lambda model: nn.utils.spectral_norm(model.lm_head),
    ):
        model = make_model()
        change(model)
        assert graph_key(model) is None


def test_hooks_on_all_modules():
    model = make_model()
    key = graph_key(model)
    hook = nn.modules.module.register_module_forward_hook(one_hook)
    try:
        assert graph_key(model) != key
    finally:
        hook.remove()
    assert graph_key(model) == key


@pytest.mark.cuda
def test_tensors_on_the_host_are_compared_by_value():
    model = make_model().cuda()
    model.model.scale = torch.tensor(1.0)
    key = graph_key(model)
    assert key == graph_key(model) is not None
    model.model.scale.fill_(2.0)
    assert graph_key(model) != key
    model.model.scale = torch.ones(17)
    assert graph_key(model) is None


def test_modules_of_transformers_and_parametrizations_have_a_key():
    from gla_ext.hf import GLAConfig as Config
    from gla_ext.hf import GLAForCausalLM as Model

    model = Model(Config(hidden_size=16, num_heads=2, num_hidden_layers=1, vocab_size=31))
    key = graph_key(model)
    assert key == graph_key(model) is not None
    model.config.output_hidden_states = True
    assert graph_key(model) != key
    model = make_model()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    assert graph_key(model) == graph_key(model) is not None


def test_members_of_classes(monkeypatch):
    model = make_model()
    key = graph_key(model)
    monkeypatch.setattr(type(model.model.layers[0].attn), "batch_projections", False)
    other = graph_key(model)
    assert other != key
    monkeypatch.setattr(RMSNorm, "extra_repr", lambda self: "")
    last = graph_key(model)
    assert last != other
    monkeypatch.setattr(GLAMLP, "forward", stepped.method_forward)
    assert graph_key(model) != last


@pytest.mark.parametrize("name", ["GLA_EXT_CUDA_PATH", "deterministic"])
def test_modes(monkeypatch, name):
    model = make_model()
    key = graph_key(model)
    if name == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    else:
        monkeypatch.setenv(name, "steps")
    assert graph_key(model) != key


def test_a_key_keeps_nothing_alive():
    model = make_model()
    model.compile(backend="eager")
    key, parts = graph_key(model), [weakref.ref(x) for x in (model, *model.parameters())]
    assert key is not None
    del model
    gc.collect()
    assert not any(part() for part in parts)


def test_a_key_costs_little():
    """Beside a walk over the model, since a host that others slow down slows both."""

    def seconds(function) -> float:
        start = time.process_time()
        function()
        return time.process_time() - start

    model = GLAForCausalLM(GLAConfig(hidden_size=32, vocab_size=31))  # with 24 layers
    assert graph_key(model) is not None
    key = functools.partial(graph_key, model)
    pairs = [
        (seconds(key), seconds(lambda: [*model.named_modules(), *model.named_parameters()]))
        for _ in range(50)
    ]
    best_key, best_walk = map(min, zip(*pairs, strict=True))
    assert best_key < 8 * best_walk  # 3.3 times
