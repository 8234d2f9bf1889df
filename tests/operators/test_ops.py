"""The Python front: what it passes on, defaults, the batch-invariant mode."""

import inspect
import threading

import pytest
import torch
from common import make_inputs
from models import BATCH_INVARIANT_ARGUMENT

import gla_ext
from gla_ext import batch_invariant, chunk_gla, fused_chunk_gla
from gla_ext.ops import chunk as ops


@pytest.fixture
def passed_on(monkeypatch):
    """The batch_invariant argument of every call to the operator."""
    calls = []
    operator = ops._fwd

    def record(*args):
        calls.append(args[BATCH_INVARIANT_ARGUMENT["fwd"]])
        return operator(*args)

    monkeypatch.setattr(ops, "_fwd", record)
    return calls


def call():
    x = make_inputs(1, 3, 1, 2, 2)
    return chunk_gla(x.q, x.k, x.v, x.g)


def test_signature_is_flas():
    parameters = inspect.signature(chunk_gla).parameters
    positional = {
        name: p.default for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    }
    empty = inspect.Parameter.empty
    assert positional == {
        **dict.fromkeys("qkvg", empty),
        "scale": None,
        "initial_state": None,
        "output_final_state": False,
        "state_v_first": False,
        "cu_seqlens": None,
        "cu_seqlens_cpu": None,
    }
    assert [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY] == ["gv", "cp_context"]
    assert fused_chunk_gla is chunk_gla


def test_final_state_is_none_unless_asked_for():
    x = make_inputs(1, 3, 1, 2, 2)
    assert chunk_gla(x.q, x.k, x.v, x.g)[1] is None
    assert chunk_gla(x.q, x.k, x.v, x.g, output_final_state=True)[1].shape == (1, 1, 2, 2)


def test_cu_seqlens_cpu_changes_no_bit():
    x = make_inputs(1, 100, 2, 8, 8, lengths=(30, 50))
    args = {"initial_state": x.initial_state, "cu_seqlens": x.cu_seqlens}
    plain, _ = chunk_gla(x.q, x.k, x.v, x.g, **args)
    checked, _ = chunk_gla(x.q, x.k, x.v, x.g, **args, cu_seqlens_cpu=x.cu_seqlens.int())
    assert torch.equal(plain, checked)


def test_batch_invariant_nests_and_ends(passed_on):
    call()
    with batch_invariant():
        call()
        with batch_invariant(False):
            call()
        call()
    with pytest.raises(RuntimeError), batch_invariant():
        raise RuntimeError
    call()
    assert passed_on == [False, True, False, True, False]


def test_batch_invariant_is_of_one_thread(passed_on):
    with batch_invariant():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert passed_on == [False]


def test_public_names():
    assert sorted(gla_ext.__all__) == sorted(
        [
            "GatedLinearAttention",
            "MultiheadGLA",
            "Plan",
            "__version__",
            "batch_invariant",
            "check_inputs",
            "chunk_gla",
            "chunk_gla_",
            "chunk_lightning_attn",
            "chunk_linear_attn",
            "chunk_retention",
            "chunk_simple_gla",
            "fused_chunk_gla",
            "fused_recurrent_gla",
            "fused_recurrent_lightning_attn",
            "fused_recurrent_linear_attn",
            "fused_recurrent_retention",
            "fused_recurrent_simple_gla",
            "plan",
            "recurrent_gla_commit_",
            "recurrent_gla_step_",
            "recurrent_gla_verify",
            "short_convolution_",
        ]
    )
    assert all(getattr(gla_ext, name).__doc__ for name in gla_ext.__all__)
