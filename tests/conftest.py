import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=40, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def nan_in_fresh_memory():
    """Makes torch fill what it allocates without a value with NaN, so that nothing goes
    unwritten."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
