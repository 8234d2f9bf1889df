import pytest
from pool import Pool
from torch import distributed


def pytest_collection_modifyitems(items):
    """What takes the pool in one process of pytest -n, whose pool serves it."""
    for item in items:
        if "pool" in item.fixturenames and "distributed" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("distributed"))


@pytest.fixture(scope="session")
def pool():
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    processes = Pool()
    yield processes
    processes.stop()
