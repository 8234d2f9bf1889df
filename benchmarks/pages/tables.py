"""A table of the pages of results."""

import re
from collections.abc import Iterable, Mapping


def table(
    title: str, text: str, heads: Iterable[str], rows: Mapping[str, Iterable[object]]
) -> list[str]:
    """A section with one table; the first column has no head. Without rows there is none."""
    if not rows:
        return []
    shapes = all(re.fullmatch(r"\d+(x\d+){4}", name) for name in rows)
    return [
        "",
        f"## {title}",
        "",
        *([text, ""] if text else []),
        f"| {'B x T x H x K x V' if shapes else ''} | {' | '.join(heads := [*heads])} |",
        "|---|" + "--:|" * len(heads),
        *(f"| {' | '.join([name, *map(str, cells)])} |" for name, cells in rows.items()),
    ]


def under(heads: Iterable[str], row: Mapping[str, object], form: str = "") -> list[str]:
    """The cells of a row by heads; empty where something was not measured."""
    return [format(row[head], form) if head in row else "" for head in heads]
