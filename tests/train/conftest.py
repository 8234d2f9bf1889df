"""Fixtures of several files here."""

import pytest
from trainers import TINY, run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, texts):
    """The text of a run, and its folder."""
    folder, out = (tmp_path_factory.mktemp("finished") / name for name in ("text", "out"))
    texts(folder)
    run("--data", folder, "--out", out, *TINY)
    return folder, out
