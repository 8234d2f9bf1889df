"""What the tests of `gla_ext.hf` share."""

import pytest


@pytest.fixture(autouse=True)
def needs_transformers():
    pytest.importorskip("transformers")


@pytest.fixture
def arguments(tmp_path):
    """A function that gives the arguments of a Trainer on the CPU."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def make(**options):
        return transformers.TrainingArguments(tmp_path, report_to=[], use_cpu=True, **options)

    return make
