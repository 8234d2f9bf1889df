"""Flags of a command line that are fields of dataclasses, whole words alone."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import field
from typing import Any, NoReturn


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def flag(default: Any, text: str, shown: str | None = None, **kwargs: Any) -> Any:
    """A dataclass field with its flag. `text`: the words of --help. `shown`: the default in words,
    if no preset's value can be shown (`{name}` is a GPU's value of that name). The rest is for
    argparse.
    """
    return field(default=default, metadata={"text": text, "shown": shown, "kwargs": kwargs})


def switch(default: bool, text: str, shown: str = "no", action: Any = None) -> Any:
    """A `flag` with the two forms --NAME and --no-NAME."""
    return flag(default, text, shown, action=action or argparse.BooleanOptionalAction)


def check_at_least(options: Any, **minima: float) -> None:
    """Raises ValueError for an option below its minimum, or NaN."""
    for name, minimum in minima.items():
        value = getattr(options, name)
        if not value >= minimum:
            raise ValueError(f"expected {flag_of(name)} to be at least {minimum}, got {value}")


class FlagParser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, and names the flag nearest to an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        known, rest = self.parse_known_args(args, namespace)
        if rest:
            self._refuse(rest)
        return known

    def _refuse(self, rest: list[str]) -> NoReturn:
        unknown = next((word for word in rest if word.startswith("-")), rest[0]).split("=")[0]
        near = difflib.get_close_matches(unknown, self._option_string_actions, 1)
        said = f"the nearest is {near[0]}" if near else "--help lists them"
        self.error(f"expected flags of this command, as whole words, got {unknown}; {said}")
