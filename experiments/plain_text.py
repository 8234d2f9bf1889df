"""What a reader sees of an HTML page, as plain text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_SKIPPED = {"footer", "head", "header", "nav", "script", "style"}
_SKIPPED_CLASSES = {"docnav", "footer", "navfooter", "navheader", "navsetbottom", "navsettop"}
_SKIPPED_CLASSES |= {"related", "sphinxsidebar", "toc", "tocset"}
_BLOCKS = {"blockquote", "br", "dd", "div", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li"}
_BLOCKS |= {"ol", "p", "pre", "section", "table", "td", "th", "tr", "ul"}
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source"}
_VOID |= {"wbr"}


def plain_text(html: str) -> str:
    """The text of a page, without its head and its bars of links; a block starts a line."""
    parser = _Reader()
    parser.feed(html)
    parser.close()
    text = re.sub(r"[ \t]+\n", "\n", "".join(parser.parts))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped: list[str] = []  # open elements, from the one on that is left out
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = set((dict(attrs).get("class") or "").split())
        if self._skipped or tag in _SKIPPED or classes & _SKIPPED_CLASSES:
            if tag not in _VOID:
                self._skipped.append(tag)
            return
        self._pre += tag == "pre"
        if tag in _BLOCKS:
            self._break()

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            if tag in self._skipped:  # what was left open inside ends with it
                while self._skipped.pop() != tag:
                    pass
            return
        self._pre -= tag == "pre" and self._pre > 0
        if tag in _BLOCKS:
            self._break()

    def handle_data(self, data: str) -> None:
        if self._skipped:
            return
        if not self._pre:
            data = re.sub(r"\s+", " ", data)
            if not self.parts or self.parts[-1].endswith(("\n", " ")):
                data = data.lstrip(" ")
        self.parts.append(data)

    def _break(self) -> None:
        if self.parts and not self.parts[-1].endswith("\n"):
            self.parts.append("\n")
