"""The section of docs/pretraining.md from a folder of text to a served model, on less text."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request

import pytest
from served import serving
from source_tree import ROOT, run

TITLE = "## From a folder of text to a served model\n"
BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LESS = {
    "gla_ext.train.prepare": ["--held-out", ".1", "--workers", "1"],
    "gla_ext.train": ["--steps", "40", "--batch-size", "2", "--tokens-per-update", "1024"],
}
LOAD = """
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("runs/tiny", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("runs/tiny", trust_remote_code=True)
print(model(**tokenizer("The state", return_tensors="pt")).logits.shape)
"""


@pytest.mark.slow
def test_a_stranger_follows_the_page(tmp_path):
    section = (ROOT / "docs" / "pretraining.md").read_text().split(TITLE)[1].split("\n## ")[0]
    commands, (curl,) = (block.splitlines() for block in BLOCK.findall(section))
    (tmp_path / "text").mkdir()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        shutil.copy(page, tmp_path / "text" / f"{page.parent.name}-{page.name}")
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    *made, serve = (shlex.split(command) for command in commands)
    for program, flag, module, *given in made:
        assert (program, flag) == ("python", "-m")
        given += [*LESS[module], *(["--device", "cpu"] if module == "gla_ext.train" else [])]
        result = run(sys.executable, "-m", module, *given, cwd=tmp_path, **environment)
        assert result.returncode == 0, result.stderr
    assert serve[:3] == ["python", "-m", "gla_ext.serve"]
    out = tmp_path / serve[3]
    body = shlex.split(curl)[-1]
    with serving(out, tmp_path / "log") as served:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{served.port}/v1/completions",
            body.encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            (choice,) = json.load(answer)["choices"]
    assert choice["finish_reason"] in ("length", "stop") and choice["text"]
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["held_out_bits_per_byte"]["this model"] < 5
    assert metrics["settings"]["lr"] == 3e-3
    card = (out / "README.md").read_text()
    assert "# tiny\n" in card and "40 updates of 1,024 tokens" in card
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=tmp_path,
        env={**environment, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.fullmatch(r"torch\.Size\(\[1, \d+, 2000\]\)\n", loaded.stdout), loaded.stderr
