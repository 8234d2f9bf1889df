"""What the tests of `gla_ext.hf` share."""

import pytest


@pytest.fixture(autouse=True)
def registered():
    """FLA, where another test has imported it, has registered its own classes."""
    pytest.importorskip("transformers")
    from gla_ext import hf

    hf.register()


@pytest.fixture
def arguments(tmp_path):
    """A function that gives the arguments of a Trainer on the CPU."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def make(**options):
        return transformers.TrainingArguments(tmp_path, report_to=[], use_cpu=True, **options)

    return make
