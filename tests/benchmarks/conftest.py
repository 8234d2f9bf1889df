import dataclasses
import json
import sys

import check_gpu
import pytest


@pytest.fixture
def rendered(tmp_path, monkeypatch, capsys):
    """A function from results to their page's rows and what is printed."""

    def render(results: dict) -> tuple[list[str], list[str]]:
        (tmp_path / "in.json").write_text(json.dumps(results, default=dataclasses.asdict))
        files = ["--read", str(tmp_path / "in.json"), "--markdown", str(tmp_path / "page.md")]
        monkeypatch.setattr(sys, "argv", ["check_gpu.py", *files])
        assert check_gpu.main() == 0
        return (tmp_path / "page.md").read_text().splitlines(), capsys.readouterr().out.splitlines()

    return render
