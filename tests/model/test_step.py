"""A decoded token in five kernels a block: what it gives, and where the modules are called.

Equal bits (see common.py): tokens.
"""

import copy
import functools

import pytest
import torch
from dispatch import Calls
from functorch.compile import make_boxed_func
from models import make_ids, make_model
from torch._dynamo.backends.common import aot_autograd

from gla_ext.cache import GLACache, StaticGLACache
from gla_ext.decode import Decoder
from gla_ext.model import fuse_projections, step
from gla_ext.ops import batch_invariant
from gla_ext.selftest import relative_error

OPERATORS = (
    "norm_linear",
    "recurrent_gla_low_rank_step_",
    "norm_gate_linear_residual",
    "norm_swiglu",
    "linear_residual",
)
ATTENTION, MLP = OPERATORS[:3], OPERATORS[3:]
SIZES = {"hidden_size": 64, "num_heads": 2, "num_hidden_layers": 2}  # heads of 16 keys, 32 values
PROMPTS = [make_ids(B=1, T=T, seed=T)[0] for T in (5, 1, 9)]


def steps(calls):
    """The five operators that were called, and whether they overlap."""
    found = []
    for name, args, _ in calls.made:
        if name in OPERATORS:
            flags = [x for x in args if isinstance(x, bool)]
            # An argument of its default is left out.
            least = 1 if name == "recurrent_gla_low_rank_step_" else 0
            found.append((name, flags[-1] if len(flags) > least else False))
    return found


def names(calls):
    return [name for name, _ in steps(calls)]


@pytest.fixture
def on_cpu(monkeypatch):
    """The operators serve the CPU too, of fp32 and fp64 too."""
    monkeypatch.setattr(step, "DEVICES", ("cpu", "cuda"))
    wide = (torch.float64, torch.float32, *step.DTYPES)
    monkeypatch.setattr(step, "DTYPES", wide)


def model_of(dtype=torch.float64, device="cpu", **options):
    return make_model(dtype, **(SIZES | options)).to(device)


def static_cache(model, ids):
    cache = StaticGLACache(ids.shape[0])
    with cache.prefill(), torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def logits_of(model, ids, cache, **options):
    return model(ids, past_key_values=cache, use_cache=True, **options).logits


@torch.no_grad()
def recorded_step(model, ids=None, cache=None, **options):
    """Calls and logits of one decoded token."""
    ids = make_ids(B=3, T=7) if ids is None else ids
    cache = static_cache(model, ids[:, :-1]) if cache is None else cache
    with Calls() as record:
        logits = logits_of(model, ids[:, -1:], cache, **options)
    return record, logits


OPTIONS = {
    "plain": {},
    "short convolutions": {"use_short_conv": True, "feature_map": "silu"},
    "shared heads": {"num_kv_heads": 1, "clamp_min": -0.02},
    "no norm weight": {"elementwise_affine": False, "hidden_act": "silu"},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


HYBRID = {"attn": {"layers": [1], "num_heads": 2}}  # a block with attention has the MLP of a step


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("options", [*OPTIONS.values(), HYBRID], ids=[*OPTIONS, "hybrid"])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_one_forward_over_all_tokens(options, fused):
    model = model_of(**options)
    model = fuse_projections(model) if fused else model
    ids = make_ids(B=3, T=9)
    cache = static_cache(model, ids[:, :5])
    with Calls() as record:
        found = [logits_of(model, ids[:, t : t + 1], cache) for t in range(5, 9)]
    assert names(record) == 4 * [*OPERATORS, *(MLP if options is HYBRID else OPERATORS)]
    with torch.no_grad():
        whole = model(ids).logits[:, 5:]
    assert relative_error(torch.cat(found, 1), whole) < 1e-10


@pytest.mark.usefixtures("on_cpu")
def test_only_what_follows_a_step_overlaps():
    record, _ = recorded_step(model_of())
    first, second = steps(record)[:5], steps(record)[5:]
    assert [overlaps for _, overlaps in first] == [False, True, True, True, True]
    assert [overlaps for _, overlaps in second] == [True] * 5


@by_options
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_generate_draws_the_same_tokens(options, dtype, request):
    model = model_of(dtype, **options)
    expected = model.generate(PROMPTS, 12, temperature=0, eos_token_id=3)
    request.getfixturevalue("on_cpu")
    with Calls() as record:
        found = model.generate(PROMPTS, 12, temperature=0, eos_token_id=3)
    assert set(names(record)) == set(OPERATORS)
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("on_cpu")
def test_rows_that_wait_keep_their_states():
    model, done = model_of(), torch.tensor([False, True, False])
    cache = StaticGLACache(3, done)
    with cache.prefill(), torch.no_grad():
        model(make_ids(B=3, T=5), past_key_values=cache, use_cache=True)
    cache.skip_done()
    before = [x.clone() for x in cache.tensors()]
    record, _ = recorded_step(model, make_ids(B=3, T=1), cache)
    assert names(record)
    for old, new in zip(before, cache.tensors(), strict=True):
        assert torch.equal(old[1], new[1]) and not torch.equal(old[0], new[0])


def hooked(module):
    module.register_forward_hook(lambda *_: None)


# What changes the first block, and the operators that its token then takes.
CHANGES = {
    f"hook on {name}": (lambda b, name=name: hooked(b.get_submodule(name)), rest)
    for places, rest in (
        ("attn attn.k_proj attn.q_proj attn.o_proj attn.gk_proj.1 attn.norm attn_norm", MLP),
        ("mlp mlp_norm mlp.up_proj mlp.down_proj", ATTENTION),
    )
    for name in places.split()
}
CHANGES |= {  # tests/layers/test_plain_modules.py has what else a module may be
    "forward of its own": (lambda b: setattr(b.mlp, "forward", b.mlp.forward), ATTENTION),
    "no fusion of norms": (lambda b: setattr(b, "fuse_norm", False), ()),
    "train mode": (lambda b: b.train(), ()),
    "other dtype": (lambda b: b.attn.o_proj.float(), None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_others_see_is_called(name, request):
    """A changed block gives what it gives without the operators."""
    change, expected = CHANGES[name]
    model = model_of()
    change(model.model.layers[0])
    ids = make_ids(B=3, T=7)
    cache = static_cache(model, ids[:, :-1]) if expected is not None else None
    if expected is None:  # torch's own error of two dtypes, as before
        request.getfixturevalue("on_cpu")
        with pytest.raises(RuntimeError, match="dtype"):
            static_cache(model, ids)
        return
    other = copy.deepcopy(cache)
    plain = logits_of(model, ids[:, -1:], other)
    request.getfixturevalue("on_cpu")
    record, logits = recorded_step(model, ids, cache)
    assert names(record) == [*expected, *OPERATORS]
    assert relative_error(logits, plain) < 1e-10


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", ["rows", "tokens", "gradient", "mode", "autocast", "cache", "off"])
def test_other_calls_take_the_modules(name):
    model, ids = model_of(torch.float32), make_ids(B=step.MOST_ROWS + (name == "rows"), T=7)
    cache = static_cache(model, ids[:, :-1])
    run = functools.partial(model, ids[:, -1:], past_key_values=cache, use_cache=True)
    expected = set()
    with Calls() as record, torch.set_grad_enabled(name == "gradient"):
        if name == "tokens":
            model(ids, past_key_values=cache, use_cache=True)
        elif name == "mode":
            with batch_invariant():
                run()
        elif name == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                run()
        elif name == "cache":  # whose states are not written in place; MLPs know of none
            expected = set(MLP)
            other = GLACache()
            model(ids[:, :-1], past_key_values=other, use_cache=True)
            model(ids[:, -1:], past_key_values=other, use_cache=True)
        elif name == "off":
            expected = set(MLP)
            model(ids[:, -1:], past_key_values=cache)
        else:
            run()
    assert set(names(record)) == expected


@pytest.mark.usefixtures("on_cpu")
def test_compiled():
    model, ids = model_of(torch.float32), make_ids(B=3, T=7)
    cache = static_cache(model, ids[:, :-1])
    expected = logits_of(model, ids[:, -1:], copy.deepcopy(cache))
    targets = []

    def recorded(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=recorded)
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
    logits = logits_of(compiled, ids[:, -1:], cache)
    assert f"gla_ext.{OPERATORS[0]}.default" in targets
    assert relative_error(logits, expected) < 1e-5


DEVICE_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004}


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 8, 12, 32])
@pytest.mark.parametrize("dtype", DEVICE_TOLERANCE, ids=str)
@by_options
def test_cuda_steps(dtype, rows, options, monkeypatch):
    """As near to fp64 as one forward over all tokens is."""
    monkeypatch.setattr(step, "MOST_ROWS", 32)
    sizes = {"hidden_size": 256, "intermediate_size": 352}
    model = model_of(dtype, "cuda", **sizes, **options)
    ids = make_ids(B=rows, T=9).cuda()
    cache = static_cache(model, ids[:, :5])
    with Calls() as record:
        found = [logits_of(model, ids[:, t : t + 1], cache) for t in range(5, 9)]
    assert names(record) == 4 * 2 * [*OPERATORS]
    with torch.no_grad():
        exact = copy.deepcopy(model).cpu().double()(ids.cpu()).logits[:, 5:]
    assert relative_error(torch.cat(found, 1).cpu().double(), exact) < DEVICE_TOLERANCE[dtype]


@pytest.mark.cuda
def test_cuda_graph_draws_the_tokens_of_eager_steps(captures):
    model = model_of(torch.bfloat16, "cuda", hidden_size=256)
    prompts = [prompt.cuda() for prompt in PROMPTS]
    eager = model.generate(prompts, 30, temperature=0, cuda_graph=False)
    graphed = model.generate(prompts, 30, temperature=0)
    assert captures == [3] and all(map(torch.equal, eager, graphed))


@pytest.mark.cuda
@pytest.mark.parametrize("cuda_graph", [None, False])
def test_cuda_compiled_steps(cuda_graph):
    model = model_of(torch.bfloat16, "cuda", hidden_size=256)
    ids = make_ids(B=4, T=9).cuda()
    plain, compiled = (
        Decoder(model, 4, temperature=0, cuda_graph=cuda_graph, compiled=compiled)
        for compiled in (False, True)
    )
    found = []
    for decoder in (plain, compiled):
        first = decoder.prefill(ids)
        found.append(torch.stack([first, *(decoder.step().clone() for _ in range(8))]))
    # Rounded at other places around the operators: most tokens, not all, are the same.
    assert (found[0] == found[1]).float().mean() > 0.8
