"""The site that `make docs` makes: nothing is fetched, formulas are MathML, titles differ."""

import json
import re
import sys

import pytest
from source_tree import ROOT, run

pytest.importorskip("latex2mathml", reason="make docs installs what the site needs")
pytest.importorskip("material")

FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed|link(?![^>]*rel=\"?(?:canonical|next|prev)))"
    r"\b[^>]*?\b(?:src|srcset|href)\s*=\s*[\"']?(?:https?:)?//",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)]
    result = run(*command, NO_MKDOCS_2_WARNING="1")
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    found = {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}
    assert {"index.html", "cpp.html", "core.html", "api/operators.html"} <= found.keys()
    return found


def test_no_page_fetches_from_elsewhere(site, pages):
    for name, text in pages.items():
        assert not FETCHED.search(text), name
        assert 'data-md-component="source"' not in text  # asks api.github.com for stars
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text()), style
    for page in pages.values():
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", page)


def test_what_counts_as_fetched():
    assert FETCHED.search('<script src="https://cdn.jsdelivr.net/x.js">')
    assert FETCHED.search("<link rel=stylesheet href=//fonts.example/x.css>")
    assert not FETCHED.search('<a href="https://arxiv.org">')
    assert not FETCHED.search('<script src="assets/x.js">')


def test_formulas_are_mathml(pages):
    home = pages["index.html"]
    assert len(re.findall(r"<math\b", home)) == 2
    assert home.count('display="block"') == 1
    for name, text in pages.items():
        assert "arithmatex" not in text, name


def test_the_hooks_are_not_published(site):
    assert not list(site.rglob("*.py"))


def test_search_needs_no_server(site, pages):
    index = (site / "search" / "search_index.js").read_text()
    documents = json.loads(index.removeprefix("var __index = "))["docs"]
    assert any("swiglu" in document["text"] for document in documents)
    assert 'src="javascripts/iframe-worker.js"' in pages["index.html"]


def test_titles_and_headings_differ(pages):
    pages = {name: text for name, text in pages.items() if name != "404.html"}
    for tag in ("title", "h1"):
        texts = [re.search(rf"<{tag}\b[^>]*>(.*?)<", text)[1] for text in pages.values()]
        assert all(texts)
        assert len(set(texts)) == len(pages)


def test_the_cpp_page_has_the_program_that_ctest_builds(pages):
    text = re.sub(r"<[^>]*>", "", pages["cpp.html"])
    for name in ("main.cpp", "CMakeLists.txt"):
        source = (ROOT / "tests" / "cpp" / "consumer" / name).read_text()
        line = max((x for x in source.splitlines() if not re.search(r"[<>&#\"]", x)), key=len)
        assert line in text
