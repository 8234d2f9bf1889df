import dataclasses
import json
import sys

import check_gpu
import pytest


@pytest.fixture
def rendered(tmp_path, monkeypatch, capsys):
    """A function from results to the lines of their page, which is also printed."""

    def render(results: dict) -> list[str]:
        (tmp_path / "in.json").write_text(json.dumps(results, default=dataclasses.asdict))
        files = ["--read", str(tmp_path / "in.json"), "--markdown", str(tmp_path / "page.md")]
        monkeypatch.setattr(sys, "argv", ["check_gpu.py", *files])
        assert check_gpu.main() == 0
        page = (tmp_path / "page.md").read_text()
        assert capsys.readouterr().out == page + "\n"
        return page.splitlines()

    return render
