"""A table of the pages of results."""

import re


def table(title: str, text: str, heads: list[str], rows: dict[str, list[str]]) -> list[str]:
    """A section with one table; the first column has no head."""
    shapes = all(re.fullmatch(r"\d+(x\d+){4}", name) for name in rows)
    return [
        "",
        f"## {title}",
        "",
        *([text, ""] if text else []),
        f"| {'B x T x H x K x V' if shapes else ''} | {' | '.join(heads)} |",
        "|---|" + "--:|" * len(heads),
        *(f"| {' | '.join([name, *cells])} |" for name, cells in rows.items()),
    ]
