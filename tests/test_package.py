"""The layer as an AOTInductor package, from Python and from a C++ program without Python."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from common import assert_close
from models import EVERY, make_layer, make_x
from source_tree import ROOT

from gla_ext.cache import GLACache

RUNNER = ROOT / "build" / "run_package"
BOUND = 1e-5


class Segment(torch.nn.Module):
    """The layer with its states as tensors: padded tokens that go on from what came before."""

    def __init__(self):
        super().__init__()
        self.layer = make_layer(torch.float32, layer_idx=0, **EVERY)

    def forward(self, x, mask, state, q_state, k_state, v_state):
        cache = GLACache()
        conv_state = (q_state, k_state, v_state)
        cache.update(layer_idx=0, recurrent_state=state, conv_state=conv_state)
        y, _, cache = self.layer(x, mask, cache, use_cache=True)
        return y, cache[0]["recurrent_state"], *cache[0]["conv_state"]


@pytest.fixture(scope="module")
def segment():
    return Segment().eval()


def make_segment_inputs(layer, T):
    generator = torch.Generator().manual_seed(T)
    shapes = [(2, layer.num_heads, layer.head_v_dim, layer.head_k_dim)]
    shapes += [(2, c.hidden_size, 4) for c in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)]
    states = (torch.randn(shape, generator=generator) for shape in shapes)
    mask = (torch.arange(T) >= torch.tensor([[0], [T // 3]])).long()
    return (make_x(T=T, dtype=torch.float32), mask, *states)


@pytest.fixture(scope="module")
def package(segment, tmp_path_factory):
    T = torch.export.Dim("T", min=2, max=4096)
    inputs = make_segment_inputs(segment.layer, 20)
    shapes = ({1: T}, {1: T}, *[None] * 4)
    with torch.no_grad():
        exported = torch.export.export(segment, inputs, dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("package") / "layer.pt2"
    return torch._inductor.aoti_compile_and_package(exported, package_path=str(path))


@pytest.fixture
def cases(segment):
    """Inputs of several lengths and what the layer makes of them."""
    inputs = [make_segment_inputs(segment.layer, T) for T in (2, 20, 99)]
    with torch.no_grad():
        return [{"inputs": [*x], "expected": [*segment(*x)], "bound": BOUND} for x in inputs]


@pytest.mark.slow
def test_from_python(package, cases):
    run = torch._inductor.aoti_load_package(package)
    for case in cases:
        for got, wanted in zip(run(*case["inputs"]), case["expected"], strict=True):
            assert_close(got, wanted, BOUND)


@pytest.mark.slow
@pytest.mark.skipif(not RUNNER.exists(), reason="make ctest builds build/run_package")
def test_from_cpp(package, cases, tmp_path):
    def run():
        file = tmp_path / "cases.pt"
        torch.save(cases, file)
        command = [RUNNER, package, file]
        # The package looks for libtorch.so, which the program itself does not load.
        path = {"LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib")}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=os.environ | path
        )

    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines().count("ok") == len(cases)
    cases[1]["expected"][0][0, 5] += 1  # and it does compare
    result = run()
    assert result.returncode == 1
    assert result.stdout.splitlines().count("FAILED") == 1
