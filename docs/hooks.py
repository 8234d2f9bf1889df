"""What mkdocs does to the pages beyond its plugins: headings, links, and formulas as MathML."""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert

# A link to a file, not an image, with its text, the file and the section.
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!http|#)([^)#\s]+)(?:#[^)]*)?\)")
# What pymdownx.arithmatex leaves of $...$ and $$...$$.
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>',
    re.DOTALL,
)


def on_page_markdown(markdown: str, *, page, **_) -> str:
    """Heads a page as the navigation names it: an included file's own heading fits its folder.

    A file of the repository that is a page here too may link to files that are none; only the
    text of such a link stays.
    """
    path = Path(page.file.abs_src_path)
    if path.is_symlink():
        markdown = LINK.sub(lambda m: m[0] if (path.parent / m[2]).exists() else m[1], markdown)
    if page.is_homepage or page.title is None:
        return markdown
    return re.sub(r"\A# .*$", lambda _: f"# {page.title}", markdown, count=1, flags=re.MULTILINE)


def on_page_content(content: str, **_) -> str:
    """Turns formulas into MathML, which browsers show without a script."""
    return FORMULA.sub(mathml, content)


def mathml(formula: re.Match) -> str:
    """The MathML of one formula, with its TeX for whoever copies it."""
    tex = html.unescape(formula[2]).strip()
    display = "block" if formula[1] == "div" else "inline"
    math = convert(tex, display=display)
    return f'<span class="formula" title="{html.escape(tex)}">{math}</span>'
