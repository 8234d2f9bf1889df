"""What mkdocs does to the pages beyond its plugins: parts of README.md, headings, links, formulas
as MathML, figures that open by themselves.
"""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert

# A link to a file, not an image, with its text, the file and the section.
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!http|#)([^)#\s]+)(?:#[^)]*)?\)")
# A line for a section of README.md, and the sections there.
PART = re.compile(r'^--8<-- "README\.md:(\w+)"$', re.MULTILINE)
SECTION = re.compile(r"<!-- --8<-- \[start:(\w+)\] -->\n(.*?)<!-- --8<-- \[end:\1\] -->", re.DOTALL)
# What pymdownx.arithmatex leaves of $...$ and $$...$$.
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>',
    re.DOTALL,
)
FIGURE = re.compile(r'<img [^>]*src="([^"]+)"[^>]*>')


def on_page_markdown(markdown: str, *, page, **_) -> str:
    """Heads a page as the navigation names it: an included file's own heading fits its folder.

    A file of the repository that is a page here too may link to files that are none; only the
    text of such a link stays.
    """
    path = Path(page.file.abs_src_path)
    markdown = PART.sub(lambda m: readme(path.parent)[m[1]], markdown)
    if path.is_symlink():
        markdown = LINK.sub(lambda m: m[0] if (path.parent / m[2]).exists() else m[1], markdown)
    if page.is_homepage or page.title is None:
        return markdown
    return re.sub(r"\A# .*$", lambda _: f"# {page.title}", markdown, count=1, flags=re.MULTILINE)


def readme(docs: Path) -> dict[str, str]:
    """The sections of README.md; links to files lead to the pages that these files are, if any."""
    pages = {page.resolve(): str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    root = docs.parent

    def link(m: re.Match) -> str:
        page = pages.get(root / m[2])
        return m[0].replace(m[2], page) if page else m[1]

    text = (root / "README.md").read_text()
    return {m[1]: LINK.sub(link, m[2]) for m in SECTION.finditer(text)}


def on_page_content(content: str, **_) -> str:
    """Turns formulas into MathML, which browsers show without a script, and links figures."""
    return FIGURE.sub(r'<a href="\1">\g<0></a>', FORMULA.sub(mathml, content))


def mathml(formula: re.Match) -> str:
    """The MathML of one formula, with its TeX for whoever copies it."""
    tex = html.unescape(formula[2]).strip()
    display = "block" if formula[1] == "div" else "inline"
    math = convert(tex, display=display)
    return f'<span class="formula" title="{html.escape(tex)}">{math}</span>'
