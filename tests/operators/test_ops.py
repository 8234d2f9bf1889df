"""The Python front: what it passes on, defaults, the batch-invariant mode."""

import inspect
import threading

import pytest
from common import make_inputs
from models import BATCH_INVARIANT_ARGUMENT

import gla_ext
from gla_ext import batch_invariant, chunk_gla, fused_chunk_gla, fused_recurrent_gla
from gla_ext.ops import chunk as ops
from gla_ext.ops import chunk_simple_gla, fused_chunk_simple_gla


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


FLAS = {
    chunk_gla: "q k v g scale=None initial_state=None output_final_state=False state_v_first=False "
    "cu_seqlens=None cu_seqlens_cpu=None gv=None cp_context=None",
    fused_recurrent_gla: "q k v gk=None gv=None scale=None initial_state=None "
    "output_final_state=False reverse=False state_v_first=False cu_seqlens=None kwargs",
}


@pytest.mark.parametrize("operator, expected", FLAS.items())
def test_signature_is_flas(operator, expected):
    parameters = inspect.signature(operator).parameters
    given = {n: "" if p.default is p.empty else f"={p.default}" for n, p in parameters.items()}
    assert " ".join(name + default for name, default in given.items()) == expected
    keywords = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert keywords == (["gv", "cp_context"] if operator is chunk_gla else [])
    assert fused_chunk_gla is chunk_gla and fused_chunk_simple_gla is chunk_simple_gla


def call():
    x = make_inputs(1, 3, 1, 2, 2)
    return chunk_gla(x.q, x.k, x.v, x.g)


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
            "recurrent_gla_buffered_step_",
            "recurrent_gla_commit_",
            "recurrent_gla_step_",
            "recurrent_gla_verify",
            "short_convolution_",
        ]
    )
    assert all(getattr(gla_ext, name).__doc__ for name in gla_ext.__all__)
