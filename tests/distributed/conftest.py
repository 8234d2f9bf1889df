import pytest
from pool import Pool
from torch import distributed


@pytest.fixture(scope="module")
def pool():
    """A module's own: each group of gloo has a thread that polls until its process ends."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    processes = Pool()
    yield processes
    processes.stop()
