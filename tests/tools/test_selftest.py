import pytest
from common import run_python

from gla_ext import _C, selftest


@pytest.mark.parametrize("capability", _C.build_info()["cpu_capabilities"])
def test_passes(capability):
    """With every capability of the kernels that this processor has."""
    built = _C.build_info()["cpu_capabilities"]
    if built.index(capability) > built.index(_C.cpu_capability()):
        pytest.skip(f"this processor, or ATEN_CPU_CAPABILITY, stops at {_C.cpu_capability()}")
    code = "import runpy; runpy.run_module('gla_ext.selftest', run_name='__main__')"
    assert "all right" in run_python(code, ATEN_CPU_CAPABILITY=capability.lower())


def test_is_a_command(capsys):
    with pytest.raises(SystemExit) as stop:
        selftest.main(["--help"])
    assert stop.value.code == 0
    assert "gla_ext.selftest" in capsys.readouterr().out


@pytest.mark.parametrize("quantity", ["output", "gate gradient", "NaN"])
def test_fails_when_results_are_wrong(quantity, monkeypatch, capsys):
    right = selftest.chunk_gla

    def wrong(q, k, v, g, **options):
        if quantity == "gate gradient":
            g = g.clone()
            g.register_hook(lambda gradient: 1.01 * gradient)
        o, final_state = right(q, k, v, g, **options)
        if quantity == "output":
            o = o * 1.01
        if quantity == "NaN":
            o = o + float("nan")
        return o, final_state

    monkeypatch.setattr(selftest, "chunk_gla", wrong)
    monkeypatch.setattr(selftest, "devices", lambda: ["cpu"])
    assert selftest.main([]) == 1
    report = capsys.readouterr().out
    assert "20 cases are wrong" in report
    if quantity == "gate gradient":
        assert all(line.endswith("WRONG: dg") for line in report.splitlines() if "WRONG" in line)
