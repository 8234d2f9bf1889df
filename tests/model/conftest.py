import types

import pytest
import torch
from capturing import Device

from gla_ext.decode import _capture


@pytest.fixture
def gpu(monkeypatch):
    found = Device()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", found.graph_class)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(_capture, "_begin", lambda graph, pool: graph.capture_begin(pool))
    return found
