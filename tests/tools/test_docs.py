"""The pages of docs/: their code runs, and what they name is there. `make docs` builds the site."""

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from source_tree import ROOT, run

DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(DOCS)): page for page in sorted(DOCS.rglob("*.md"))}
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def found(pattern: str, text_of=Path.read_text) -> list[tuple[str, ...]]:
    """The name of a page and the groups of the pattern, for all places where it stands."""
    rows = []
    for name, page in PAGES.items():
        matches = re.finditer(pattern, text_of(page), re.MULTILINE)
        rows += [(name, *match.groups()) for match in matches]
    assert rows, pattern
    return rows


LINKS = found(r"\]\((?!http)([^)#\s]+)[^)]*\)", lambda page: CODE.sub("", page.read_text()))
SECTIONS = found(r'^--8<-- "([^:"]+):(\w+)"$')
NAMES = found(r"^::: (\S+)$")

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
        ("tutorial.md", []),
        ("serving.md", []),
        ("migration.md", ["transformers", "triton", "fla"]),
        pytest.param(*("export.md", ["onnx", "onnxscript", "onnxruntime"]), marks=pytest.mark.slow),
    ],
)
def test_the_code_of_a_page_runs(name, needs, tmp_path):
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"could not import {package!r}")
    page = PAGES[name]
    code = code_of(page)
    assert code.count("import") > 4
    (tmp_path / "prelude.py").write_text(PRELUDE)
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(f"import prelude{code}")  # on the title's line
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = run(sys.executable, str(script), cwd=tmp_path, PYTHONPATH=path, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr


def test_every_page_is_in_the_navigation_once():
    nav = re.search(r"\nnav:\n(.*?)\n\n", (ROOT / "mkdocs.yml").read_text(), re.DOTALL)[1]
    assert sorted(re.findall(r"(\S+\.md)$", nav, re.MULTILINE)) == sorted(PAGES)


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_a_link_leads_to_a_file(page, target):
    """Of the site, or of the repository on a page that is a file there too: see docs/hooks.py."""
    folders = (PAGES[page].parent, PAGES[page].resolve().parent)
    assert any((folder / target).exists() for folder in folders)


@pytest.mark.parametrize(("page", "source", "section"), SECTIONS)
def test_an_included_section_is_marked_and_has_no_relative_links(page, source, section):
    text = (ROOT / source).read_text()
    marks = ("<!-- ", " -->") if source.endswith(".md") else ("// ", "")
    start, end = (f"{marks[0]}--8<-- [{edge}:{section}]{marks[1]}\n" for edge in ("start", "end"))
    assert text.count(start) == text.count(end) == 1
    included = text.split(start)[1].split(end)[0]
    assert included.strip()
    assert not re.search(r"\]\((?!http)", included)


@pytest.mark.parametrize(("page", "name"), NAMES)
def test_a_documented_name_is_there_and_has_a_docstring(page, name):
    if name.startswith("gla_ext.hf"):
        pytest.importorskip("transformers")
    try:
        value = importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
    assert value.__doc__
