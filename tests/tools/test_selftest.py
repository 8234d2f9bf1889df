import pytest
import torch
from common import run_python

from gla_ext import _C, selftest


@pytest.mark.slow
@pytest.mark.parametrize("capability", _C.build_info()["cpu_capabilities"])
def test_passes(capability):
    """With every capability of the kernels that this processor has; torch and they agree on it."""
    built = _C.build_info()["cpu_capabilities"]
    if built.index(capability) > built.index(_C.cpu_capability()):
        pytest.skip(f"this processor, or ATEN_CPU_CAPABILITY, stops at {_C.cpu_capability()}")
    code = (
        "import runpy, torch, gla_ext; "
        "print(gla_ext._C.cpu_capability(), torch.backends.cpu.get_cpu_capability()); "
        "runpy.run_module('gla_ext.selftest', run_name='__main__')"
    )
    report = run_python(code, ATEN_CPU_CAPABILITY=capability.lower())
    assert report.splitlines()[0] == f"{capability} {capability}"
    assert "all right" in report


def test_fails_when_results_are_wrong(monkeypatch, capsys):
    """Of three cases the output, the gate's gradient and, as NaN, the output again."""
    right, case = selftest.chunk_gla, iter(range(3))

    def wrong(q, k, v, g, **options):
        number = next(case)
        if number == 1:
            g = g.clone()
            g.register_hook(lambda gradient: 1.01 * gradient)
        o, final_state = right(q, k, v, g, **options)
        return o * (1.01, 1.0, float("nan"))[number], final_state

    monkeypatch.setattr(selftest, "chunk_gla", wrong)
    monkeypatch.setattr(selftest, "devices", lambda: ["cpu"])
    monkeypatch.setattr(selftest, "CASES", selftest.CASES[:3])
    monkeypatch.setattr(selftest, "TOLERANCE", {torch.float32: 3e-6})
    assert selftest.main([]) == 1
    _, first, second, third, verdict = capsys.readouterr().out.splitlines()
    assert "WRONG: o" in first and "WRONG: o" in third
    assert second.endswith("WRONG: dg")
    assert "3 cases are wrong" in verdict
