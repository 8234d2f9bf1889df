"""SwiGLU on CUDA: nothing copied, graphs, and sizes beyond int32."""

import pytest
import torch
from swiglu_inputs import make_linear

from gla_ext.layers.swiglu import swiglu, swiglu_linear

ops = torch.ops.gla_ext
pytestmark = pytest.mark.cuda


def test_halves_are_not_copied():
    gate, up = torch.randn(512, 8192, device="cuda", dtype=torch.bfloat16).chunk(2, -1)
    swiglu(gate, up)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = swiglu(gate, up)
    assert torch.cuda.max_memory_allocated() - before == y.nbytes


def test_a_cuda_graph_replays():
    inputs, _ = make_linear((9, 40), 24, "cuda", torch.bfloat16)
    others = inputs[1].clone()

    def run():
        return [swiglu_linear(*inputs), *ops.swiglu_bwd(others, *inputs[:2], True)]

    with torch.no_grad():
        run()  # outside of the capture first
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for scale in (1, 3):
            inputs[0].copy_(scale * others)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, run(), strict=True))


@pytest.mark.parametrize("halves", [False, True])
def test_more_elements_than_int32_counts(halves):
    """The last rows have the bits that they have alone."""
    rows, D = 2**31 // 2816 + 1000, 2816
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    of = {"device": "cuda", "dtype": torch.bfloat16}
    if halves:
        gate, up = torch.randn(rows, 2 * D, **of).chunk(2, -1)
    else:
        gate, up = (torch.randn(rows, D, **of) for _ in range(2))
    dy = torch.randn(rows, D, **of)
    outputs = [swiglu(gate, up), *ops.swiglu_bwd(dy, gate, up, True)]
    for part in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(rows - 3, rows)):
        cut = [t[part].clone() for t in (dy, gate, up)]
        alone = [swiglu(*cut[1:]), *ops.swiglu_bwd(*cut, True)]
        assert all(torch.equal(a[part], b) for a, b in zip(outputs, alone, strict=True))
    del gate, up, dy, outputs
    torch.cuda.empty_cache()
