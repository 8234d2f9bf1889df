"""Which kernels a call launches, in order: a row a kind of shape."""

import sys

import pytest
import torch
from plans import BATCH, SHAPE

import gla_ext
from gla_ext import _C

MAP = ["map_sequences", "map_chunks"]
SCORES = ["strong_scores_off_diagonal", "strong_scores_diagonal", "scores_off_diagonal"]
VALUES = [f"{name} of values" for name in SCORES]
INTRA = ["intra_grads", "strong_intra_grads"]
LONG = {"B": 1, "T": 32768}

FORWARD = {
    # Sweeps that gate on their way.
    "small heads": ({"K": 64, "V": 64}, ["forward.small", "strong.output"]),
    "small heads, fp32 gates": (
        {"K": 64, "V": 64, "gate_dtype": "float32"},
        ["forward.fused", "strong.output"],
    ),
    "a block a head": ({"V": 128}, ["forward.fused", "strong.output"]),
    "a cluster shares gates": ({}, ["forward.cluster", "strong.output"]),
    "packed": (
        {"B": 1, "T": 65536, "N": 32},
        [*MAP, "states.cluster.packed_summaries", "scan", "forward.cluster", "strong.output"],
    ),
    "segments of small heads": (
        LONG | {"K": 64, "V": 64},
        ["states.fused.summaries", "scan", "forward.small", "strong.output"],
    ),
    # Over prepared chunks.
    "many keys": ({"K": 256}, ["prepare", "forward.prepared"]),
    "fp32 gates": ({"gate_dtype": "float32"}, ["prepare", "forward.prepared"]),
    "a second segment that replays the first": ({"B": 8}, ["prepare", "forward.prepared"]),
    "segments": (
        LONG | {"V": 128},
        ["prepare", "states.prepared.summaries", "scan", "forward.prepared"],
    ),
    "segments, clusters": (
        LONG,
        ["states.cluster.summaries_without_A", "scan.and_strong_A", "forward.prepared.makes_A"],
    ),
}
KEEPING = {
    "a block a head": (
        {"V": 128},
        ["forward.fused.for_backward", "strong.output.for_backward"],
        ["states.prepared.without_grads", "strong.gradients.without_A", "gradients.sweep"],
    ),
    "a cluster shares gates": (
        {},
        ["forward.cluster.for_backward", "strong.output.for_backward"],
        ["states.prepared.without_grads", "strong.gradients.without_A", "gradients.sweep"],
    ),
    "many keys": (
        {"K": 256},
        ["prepare", "forward.prepared"],
        ["states.prepared.chunk_pairs", "strong.gradients.without_A", "gradients.chunk_pair"],
    ),
    "segments, clusters": (
        LONG,
        ["states.cluster.summaries", "scan.and_strong_A", "forward.prepared.makes_A"],
        [
            *("states.prepared.summaries_of_grads", "scan.grads", "states.prepared.without_grads"),
            *("strong.gradients.without_A", "gradients.sweep"),
        ],
    ),
    "packed": (
        {"B": 1, "T": 65536, "N": 32},
        [
            *(*MAP, "states.cluster.packed_summaries", "scan"),
            *("forward.cluster.for_backward", "strong.output.for_backward"),
        ],
        [
            *(*MAP, "states.prepared.summaries_of_grads_and_decays", "scan.grads"),
            *("states.prepared.without_grads", "strong.gradients.without_A", "gradients.sweep"),
        ],
    ),
}
BACKWARD = {
    "small heads, by chunks": (
        {"K": 64, "V": 64, "B": 49},
        ["states.fused", "strong.gradients", "gradients.chunk"],
    ),
    "small heads, swept": (
        {"K": 64, "V": 64, "B": 66},
        ["states.fused.without_grads", "strong.gradients", "gradients.small_sweep"],
    ),
    "segments of few keys": (
        LONG | {"K": 64, "V": 128},
        [
            *("states.fused.summaries_both", "scan.both"),
            *("states.fused", "strong.gradients", "gradients.chunk"),
        ],
    ),
    "a cluster gates and makes S": (
        {},
        ["states.cluster", "strong.gradients", "gradients.sweep"],
    ),
    "prepared and swept": (
        {"V": 128},
        ["prepare", "states.prepared.without_grads", "gradients.sweep"],
    ),
    "prepared, by chunks": (
        {"B": 8},
        ["prepare.without_A", "states.prepared", "gradients.chunk"],
    ),
    "by pairs of chunks": (
        {"K": 256},
        ["prepare", "states.prepared.chunk_pairs", "gradients.chunk_pair"],
    ),
    "segments": (
        LONG | {"V": 192},
        [
            *("prepare.without_A", "states.prepared.summaries_both", "scan.both"),
            *("states.prepared", "gradients.chunk"),
        ],
    ),
    "segments, clusters": (
        LONG,
        [
            *("states.cluster.summaries", "states.prepared.summaries_of_grads", "scan.both"),
            *("states.prepared.without_grads", "strong.gradients", "gradients.sweep"),
        ],
    ),
}


def planned(change, for_backward=False):
    return _C.plan(
        **BATCH | {"device": "cuda", "dtype": "bfloat16", "for_backward": for_backward} | change
    )


@pytest.mark.parametrize("change, kernels", FORWARD.values(), ids=FORWARD)
def test_forward(change, kernels):
    plan = planned(change)
    assert plan["path"] == "fused" and plan["fused_expects"] is None
    assert plan["forward"]["kernels"] == kernels


@pytest.mark.parametrize("change, kernels", BACKWARD.values(), ids=BACKWARD)
def test_backward(change, kernels):
    assert planned(change)["backward"]["kernels"] == kernels


@pytest.mark.parametrize("change, forward, backward", KEEPING.values(), ids=KEEPING)
def test_what_forward_leaves_backward_does_not_make(change, forward, backward):
    plan = planned(change, for_backward=True)
    assert plan["for_backward_bytes"] > 0
    assert plan["forward"]["kernels"] == forward
    assert plan["backward"]["kernels"] == backward


STATES = {"bfloat16": ["states_and_state_grads"], "float32": ["chunk_states", "state_grads"]}


@pytest.mark.parametrize("dtype", STATES)
@pytest.mark.parametrize("N", [None, 3])
def test_steps(N, dtype):
    change = {"capability": "8.0", "dtype": dtype, "B": 1, "N": N}
    plan = planned(change)
    first = [*(MAP if N else []), "gate_cumsum"]
    assert plan["path"] == "steps" and "compute capability 9.0" in plan["fused_expects"]
    cut = [] if N else ["chunk_states.summaries", "segment_scan"]
    cut_back = [] if N else [*(f"{name}.summaries" for name in STATES[dtype]), "segment_scan"]
    assert plan["forward"]["kernels"] == [*first, *cut, "chunk_states", *SCORES, "output"]
    last = [*cut_back, *STATES[dtype], "value_grads", "score_grads", *INTRA, "merge_grads"]
    assert plan["backward"]["kernels"] == [*first, *SCORES, *last]
    without = planned(change | {"key_gated": False})
    assert "gate_cumsum" not in without["forward"]["kernels"] + without["backward"]["kernels"]


def test_steps_with_gates_on_values():
    plan = planned({"value_gated": True})
    first = ["gate_cumsum", "gate_cumsum of values", "gate_values"]
    assert plan["fused_expects"] == "no gates on values (gv)"
    assert plan["forward"]["kernels"] == [
        *(*first, "value_gated_states", *SCORES, "value_gated_output"),
    ]
    assert plan["backward"]["kernels"] == [
        *(*first, *SCORES, "value_gated_states", "value_gated_state_grads", *VALUES),
        *(*INTRA, *(f"{name} of values" for name in INTRA)),
        *("merge_key_grads", "merge_value_grads"),
    ]


# gla_ext.plan


def test_for_users():
    plan = gla_ext.plan(32, 2048, 4, 128, 256, gpu=("9.0", 132))
    assert plan.forward == tuple(KEEPING["a cluster shares gates"][1])
    assert plan.backward == tuple(KEEPING["a cluster shares gates"][2])
    assert (plan.path, plan.fused_expects, plan.forward_segments) == ("fused", None, 0)
    assert "forward: forward.cluster.for_backward -> strong.output.for_backward" in str(plan)
    with gla_ext.batch_invariant():
        assert gla_ext.plan(1, 32768, 4, 128, 256, gpu=("9.0", 132)).forward_segments == 0
    assert gla_ext.plan(1, 32768, 4, 128, 256, gpu=("9.0", 132)).forward_segments > 0


def test_for_users_without_a_gpu_an_h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gla_ext.plan(**SHAPE) == gla_ext.plan(**SHAPE, gpu=("9.0", 132))


GPU = "a GPU of compute capability 9.0 and a build for 9.0a"
REASONS = [  # why not the fused path; None: that path
    ({"dtype": torch.float32}, "q, k and v in torch.bfloat16"),
    ({"dtype": torch.float16}, "q, k and v in torch.bfloat16"),
    ({"gpu": ("8.0", 108)}, GPU),
    ({"gpu": ("10.0", 132)}, GPU),
    ({"gv": True}, "no gates on values (gv)"),
    ({"g": False, "gv": True}, "no gates on values (gv)"),
    ({"gate_dtype": torch.float16}, "g in torch.bfloat16 or torch.float32"),
    *(({"gate_dtype": torch.float32} | sizes, None) for sizes in ({}, {"V": 64}, {"K": 72})),
    *(({"K": K}, None) for K in (8, 72, 128, 136, 256)),
    *((sizes, None) for sizes in ({"V": 8}, {"V": 512}, {"T": 1}, {"B": 1})),
]


@pytest.mark.parametrize("change, reason", REASONS, ids=str)
def test_why_not_the_fused_path(change, reason):
    plan = gla_ext.plan(**SHAPE | {"gpu": ("9.0", 132)} | change)
    assert (plan.path, plan.fused_expects) == ("steps" if reason else "fused", reason)
    assert reason is None or f"path: steps (fused expects {reason})" in str(plan)


@pytest.mark.parametrize(
    "change, standing, line",
    [
        ({}, "fused", "path: fused"),
        ({"gv": True}, "steps, run", "path: steps (fused expects no gates on values (gv)), run"),
        *(({"gpu": (capability, 100)}, "steps, compiled and never run", ", compiled and never run")
          for capability in ("8.0", "8.9", "10.0", "12.0")),
    ],
)  # fmt: skip
def test_a_plan_says_whether_it_was_ever_run(change, standing, line):
    plan = gla_ext.plan(**SHAPE | {"gpu": ("9.0", 132)} | change)
    assert plan.standing == standing
    assert str(plan).splitlines()[0].endswith(line)


@pytest.mark.parametrize(
    "archs, expected", [(["8.0+PTX"], "steps"), (["8.0", "9.0a+PTX"], "fused"), ([], "fused")]
)
def test_a_build_without_the_fused_kernels(monkeypatch, archs, expected):
    """On a Hopper GPU; a pair is any build's."""
    monkeypatch.setattr(sys.modules["gla_ext.ops.plan"], "_capability", lambda gpu: ("9.0", 132))
    built = _C.build_info() | {"cuda_archs": archs}
    monkeypatch.setattr(_C, "build_info", lambda: built)
    plan = gla_ext.plan(**SHAPE)
    assert plan.path == expected
    assert plan.fused_expects == ("a build for 9.0a" if expected == "steps" else None)
    assert gla_ext.plan(**SHAPE, gpu=("9.0", 132)).path == "fused"


@pytest.mark.parametrize("change", [{"aligned": False}, {"K": 60}, {"V": 100}, {"K": 264}], ids=str)
def test_sizes_and_places_that_take_the_steps(change):
    plan = planned(change)
    assert plan["path"] == "steps" and plan["fused_expects"]


def test_the_environment_is_asked(monkeypatch):
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    plan = gla_ext.plan(**SHAPE, gpu=("9.0", 132))
    assert (plan.path, plan.fused_expects) == ("steps", "no GLA_EXT_CUDA_PATH=steps")
    monkeypatch.setenv("GLA_EXT_CUDA_PATH", "step")
    with pytest.raises(ValueError, match="GLA_EXT_CUDA_PATH: expected fused or steps, got step"):
        gla_ext.plan(**SHAPE, gpu=("9.0", 132))
