"""The pages of docs/: their code runs, their links lead to files, and each is in the navigation.

`make docs` builds the site, and stops at a section or a documented name that is not there.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from source_tree import ROOT, run

DOCS = ROOT / "docs"
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)

# Graphs are traced and differentiated as ever; compiling C++ for them is left to graphs/.
PRELUDE = (
    "import functools, torch; torch.compile = functools.partial(torch.compile, backend='aot_eager')"
)


def code_of(page: Path) -> str:
    """The Python blocks of a page, each line at its number there."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        pytest.param("tutorial", [], marks=pytest.mark.slow),
        pytest.param("serving", [], marks=pytest.mark.slow),
        pytest.param("migration", ["transformers", "triton", "fla"], marks=pytest.mark.slow),
        pytest.param("huggingface", ["accelerate", "peft"], marks=pytest.mark.slow),
        pytest.param("export", ["onnx", "onnxscript", "onnxruntime"], marks=pytest.mark.slow),
    ],
)
def test_the_code_of_a_page_runs(name, needs, tmp_path):
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"could not import {package!r}")
    code = code_of(DOCS / f"{name}.md")
    assert code.count("import") > 4
    (tmp_path / "prelude.py").write_text(PRELUDE)
    script = tmp_path / f"{name}.py"
    script.write_text(f"import prelude{code}")  # on the title's line
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = run(sys.executable, str(script), cwd=tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr


def test_every_page_is_in_the_navigation_once():
    nav = re.search(r"\nnav:\n(.*?)\n\n", (ROOT / "mkdocs.yml").read_text(), re.DOTALL)[1]
    pages = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert sorted(re.findall(r"(\S+\.md)$", nav, re.MULTILINE)) == pages


def test_a_link_leads_to_a_file():
    """Of the site, or of the repository on a page that is a file there too: see docs/hooks.py."""
    links = [
        (page, target)
        for page in [*sorted(DOCS.rglob("*.md")), *(ROOT / ".github").glob("*.md")]
        for target in re.findall(r"\]\((?!http)([^)#\s]+)[^)]*\)", CODE.sub("", page.read_text()))
    ]
    assert links
    for page, target in links:
        folders = (page.parent, page.resolve().parent)
        assert any((folder / target).exists() for folder in folders), (page, target)
