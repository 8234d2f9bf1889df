"""The chunkwise form that `benchmarks/bench_naive.py` times, its check, and the pages' pictures."""

import importlib
import sys
import types

import bench_naive
import pytest
import torch
from common import exact, make_inputs
from pages import training_page
from parts.naive import naive_chunk_gla
from parts.training_rows import ROWS, SIZES
from shared import models
from shared.gate import WrongResults

from gla_ext.model import count_parameters


@pytest.mark.parametrize("chunk", [1, 16, 48])
def test_the_naive_form_is_the_recurrence(chunk):
    x = make_inputs(2, 48, 3, 5, 7, torch.float64, gate=1 / 4, states=False)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g)]
    o, state = naive_chunk_gla(*leaves, chunk=chunk)
    wanted = exact(x)
    found = (o, state, *torch.autograd.grad(o, leaves, x.do))
    names = ("o", "final_state", "dq", "dk", "dv", "dg")
    for name, own in zip(names, found, strict=True):
        torch.testing.assert_close(own, wanted[name], rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="multiple of chunk = 32, got 48"):
        naive_chunk_gla(*leaves, chunk=32)


def test_what_is_off_is_not_timed(monkeypatch):
    x = make_inputs(1, 512, 2, 64, 64, torch.bfloat16, gate=1 / 16, states=False)
    off = bench_naive.errors(x)
    assert list(off) == ["gla_ext", *(f"PyTorch, {C}" for C in bench_naive.CHUNKS)]
    # Of longer chunks the differences that the gates' gradient is made of are larger.
    assert off["gla_ext"]["dg"] < off["PyTorch, 16"]["dg"] < off["PyTorch, 256"]["dg"]
    strong = make_inputs(1, 512, 2, 64, 64, torch.bfloat16, gate=4.0, states=False)
    with pytest.raises(WrongResults, match="PyTorch, 256: o is off by nan"):
        bench_naive.errors(strong)


def test_tables_of_lines():
    times = {mode: {"median": 2.0} for mode in ("forward", "forward + backward")}
    line = {"shape": "1x2", "device": "a GPU", "peak_bytes": 2**30, "dg_error": 1e-3} | times
    slow = {mode: {"median": 5.0} for mode in times}
    lines = [line | {"name": "gla_ext"}, line | slow | {"name": "cuDNN", "dg_error": None}]
    said = bench_naive.tables(lines)
    assert said[-3] == "| gla_ext | 2 | 1.0 x | 2 | 1.0 x | 1.00 | 1.0e-03 |"
    assert said[-2] == "| cuDNN | 5 | 2.5 x | 5 | 2.5 x | 1.00 |  |"


def test_the_picture_of_large_models():
    rows = {
        name: row for name, row in ROWS.items() if row.size == "1.3 B" and row.B * row.T == 2**15
    }
    assert len(rows) == 5 * 4 and {row.T for row in rows.values()} == {2048, 8192, 16384, 32768}
    results = [{"row": name, "build": "now"} for name in ROWS]
    large = training_page.lines(results, "1.3 B")
    assert set(large) == {"gla_ext", "FLA", "Mamba"} | {
        f"Transformer++, {kernel}" for kernel in ("cuDNN", "FlashAttention-2")
    }
    assert all(sorted(points) == [2048, 8192, 16384, 32768] for points in large.values())
    small = training_page.lines(results)
    assert "Mamba" not in small and set(small["gla_ext"]) == {2048, 8192, 32768}


def test_mamba_has_about_as_many_parameters(monkeypatch):
    importlib.import_module("transformers.models.mamba.modeling_mamba")  # without the packages
    with pytest.raises(ImportError):
        models.build(SIZES["1.3 B"], "meta", kind="Mamba")
    for package in ("causal_conv1d", "mamba_ssm"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    counts = {
        kind: count_parameters(models.build(SIZES["1.3 B"], "meta", kind=kind))
        for kind in ("gla_ext", "Mamba")
    }
    assert counts["Mamba"] == pytest.approx(counts["gla_ext"], rel=0.05)
