"""Every error message: one sentence with what was expected and what came."""

import re

import pytest
import torch
from common import make_inputs
from common import raises_exactly as raises
from torch.distributed.tensor import distribute_tensor

from gla_ext import chunk_gla

ops = torch.ops.gla_ext


@pytest.fixture
def x():
    return make_inputs(2, 64, 4, 8, 12)


@pytest.fixture
def packed():
    return make_inputs(1, 64, 4, 8, 12, lengths=(20, 30))


def call(x, **changes):
    tensors = {name: changes.pop(name, getattr(x, name)) for name in "qkvg"}
    return chunk_gla(**tensors, **changes)


SHAPES = "chunk_gla: expected {} to have shape [B, T, HK, {}] = {}, got {}"


@pytest.mark.parametrize(
    "name, cut, got",
    [("k", 1, [2, 63, 4, 8]), ("g", 2, [2, 64, 3, 8]), ("k", 3, [2, 64, 4, 7])],
)
def test_shapes_of_keys_and_gates(x, name, cut, got):
    t = getattr(x, name)
    with raises(ValueError, SHAPES.format(name, "K", [2, 64, 4, 8], got)):
        call(x, **{name: t.narrow(cut, 0, t.shape[cut] - 1)})


def test_shape_of_values(x):
    with raises(ValueError, SHAPES.format("v", "V", [2, 64, 4, 12], [1, 64, 4, 12])):
        call(x, v=x.v[:1])


def test_rank(x):
    message = "chunk_gla: expected q to have 4 dimensions [B, T, H, K], got 3 with shape [2, 64, 4]"
    with raises(ValueError, message):
        call(x, q=x.q[..., 0])


def test_empty_last_dimension(x):
    message = "chunk_gla: expected the last dimension of {} to be at least 1, got 0"
    with raises(ValueError, message.format("q")):
        call(x, q=x.q[..., :0], k=x.k[..., :0], g=x.g[..., :0])
    with raises(ValueError, message.format("v")):
        call(x, v=x.v[..., :0])


def test_input_dtypes(x):
    with raises(TypeError, "chunk_gla: expected k to be torch.float32 like q, got torch.float16"):
        call(x, k=x.k.half())
    with raises(TypeError, "chunk_gla: expected v to be torch.float32 like q, got torch.float64"):
        call(x, v=x.v.double())
    four = "torch.bfloat16, torch.float16, torch.float32 or torch.float64"
    with raises(TypeError, f"chunk_gla: expected q to be {four}, got torch.int64"):
        call(x, q=x.q.long())
    with raises(TypeError, f"chunk_gla: expected q to be {four}, got torch.ComplexFloat"):
        call(x, q=x.q.cfloat())


def test_gate_dtypes(x):
    three = "torch.bfloat16, torch.float16 or torch.float32"
    with raises(TypeError, f"chunk_gla: expected g to be {three}, got torch.float64"):
        call(x, g=x.g.double())
    with raises(TypeError, "chunk_gla: expected g to be torch.float64 like q, got torch.float32"):
        call(x.double(), g=x.g)


def test_devices(x):
    with raises(ValueError, "chunk_gla: expected k on the device of q, cpu, got meta"):
        call(x, k=x.k.to("meta"))
    with raises(ValueError, "chunk_gla: expected initial_state on the device of q, cpu, got meta"):
        call(x, initial_state=x.initial_state.to("meta"))


class OnNoGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and is on none."""

    __torch_dispatch__ = classmethod(lambda *_: NotImplemented)


def test_a_build_without_kernels_for_a_gpu():
    """As a CPU build answers, here too: by the kernel that other devices have."""
    gate = torch.Tensor._make_wrapper_subclass(OnNoGpu, (2, 3), device="cuda:0")
    swiglu = torch.ops.gla_ext.swiglu_fwd.default
    sentence = "FORCE_CUDA=1 make builds them; see python -m gla_ext.info"
    here = "swiglu: no kernels for device cuda:0 in this build of gla_ext; "
    with raises(NotImplementedError, here + sentence):
        swiglu._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, gate, gate)


def test_initial_state(x, packed):
    expected = "chunk_gla: expected initial_state to "
    with raises(TypeError, expected + "be torch.float32, got torch.float64"):
        call(x, initial_state=x.initial_state.double())
    with raises(TypeError, expected + "be torch.float64, got torch.bfloat16"):
        call(x.double(), initial_state=x.initial_state.bfloat16())
    with raises(TypeError, expected + "be torch.float64, got torch.float32"):
        call(x.double(), initial_state=x.initial_state)
    got = "[2, 4, 8, 12]"
    with raises(ValueError, expected + f"have shape [N, H, V, K] = [2, 4, 12, 8], got {got}"):
        call(x, initial_state=x.initial_state, state_v_first=True)
    with raises(
        ValueError, expected + "have shape [N, H, K, V] = [2, 4, 8, 12], got [1, 4, 8, 12]"
    ):
        call(packed, initial_state=packed.initial_state[:1], cu_seqlens=packed.cu_seqlens)


def test_offsets_as_a_tensor(x, packed):
    with raises(TypeError, "chunk_gla: expected cu_seqlens to be torch.int32 or torch.int64, "
                "got torch.float32"):  # fmt: skip
        call(packed, cu_seqlens=torch.tensor([0.0, 64.0]))
    with raises(ValueError, "chunk_gla: expected cu_seqlens to have 1 dimension [N + 1], got 2 "
                "with shape [1, 2]"):  # fmt: skip
        call(packed, cu_seqlens=torch.tensor([[0, 64]]))
    with raises(ValueError, "chunk_gla: expected cu_seqlens to have at least 1 element "
                "(N + 1 offsets), got 0"):  # fmt: skip
        call(packed, cu_seqlens=torch.tensor([], dtype=torch.int64))
    with raises(ValueError, "chunk_gla: expected batch size 1 with cu_seqlens (sequences packed "
                "in one row), got 2"):  # fmt: skip
        call(x, cu_seqlens=torch.tensor([0, 64]))


BAD_OFFSETS = [
    ([1, 20, 50], "chunk_gla: expected cu_seqlens to start with 0, got 1"),
    (
        [0, 50, 20],
        "chunk_gla: expected cu_seqlens to be non-decreasing, got 50 before 20 at position 1",
    ),
    ([0, 20, 65], "chunk_gla: expected cu_seqlens to end at or before T = 64, got 65"),
]


@pytest.mark.parametrize("offsets, message", BAD_OFFSETS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_contents_of_offsets(packed, offsets, message, dtype):
    with raises(ValueError, message):
        call(packed, cu_seqlens=torch.tensor(offsets, dtype=dtype))
    with raises(ValueError, message):
        call(
            packed,
            cu_seqlens=packed.cu_seqlens,
            cu_seqlens_cpu=torch.tensor(offsets, dtype=dtype),
        )


def test_cu_seqlens_cpu_needs_its_partner(packed):
    with raises(ValueError, "chunk_gla: expected cu_seqlens beside cu_seqlens_cpu, got None"):
        call(packed, cu_seqlens_cpu=torch.tensor([0, 20]))
    with raises(ValueError, "chunk_gla: expected cu_seqlens_cpu to have the shape of cu_seqlens, "
                "[3], got [2]"):  # fmt: skip
        call(packed, cu_seqlens=packed.cu_seqlens, cu_seqlens_cpu=torch.tensor([0, 20]))
    for bad in ([], 0, [[0, 64]]):
        offsets = torch.tensor(bad, dtype=torch.int64)
        with pytest.raises(ValueError, match="chunk_gla: expected cu_seqlens to have"):
            call(packed, cu_seqlens=offsets, cu_seqlens_cpu=offsets)
    with raises(TypeError, "chunk_gla: expected cu_seqlens_cpu to be torch.int32 or torch.int64, "
                "got torch.float32"):  # fmt: skip
        call(packed, cu_seqlens=packed.cu_seqlens, cu_seqlens_cpu=packed.cu_seqlens.float())
    with raises(TypeError, "chunk_gla: expected cu_seqlens_cpu to be a tensor, got <class 'list'>"):
        call(packed, cu_seqlens=packed.cu_seqlens, cu_seqlens_cpu=[0, 20, 50])
    with raises(ValueError, "chunk_gla: expected cu_seqlens_cpu on cpu, got meta"):
        call(
            packed,
            cu_seqlens=packed.cu_seqlens,
            cu_seqlens_cpu=packed.cu_seqlens.to("meta"),
        )


def test_value_gates(x):
    with raises(ValueError, SHAPES.format("gv", "V", [2, 64, 4, 12], [2, 64, 4, 8])):
        call(x, gv=x.g)
    with raises(ValueError, "chunk_gla: expected gv on the device of q, cpu, got meta"):
        call(x, gv=x.v.to("meta"))
    with raises(TypeError, "chunk_gla: expected gv to be torch.bfloat16, torch.float16 or "
                "torch.float32, got torch.float64"):  # fmt: skip
        call(x, gv=x.v.double())
    with raises(NotImplementedError, "chunk_gla: expected strided (dense) tensors, got layout "
                "Sparse"):  # fmt: skip
        call(x, gv=x.v.to_sparse())


def test_layouts(x):
    message = "chunk_gla: expected strided (dense) tensors, got layout "
    for grad_mode in (torch.enable_grad, torch.inference_mode):
        with grad_mode(), pytest.raises(NotImplementedError, match=re.escape(message)):
            call(x, q=x.q.to_sparse())
    with raises(NotImplementedError, message + "Mkldnn"):
        call(x, g=x.g.to_mkldnn())


def test_dtensor(x, one_rank):
    q = distribute_tensor(x.q, one_rank)
    with pytest.raises(NotImplementedError, match="chunk_gla: expected plain tensors, got a D"):
        call(x, q=q)


def test_missing_tensors(x):
    with raises(TypeError, "chunk_gla: expected k to be a tensor, got None"):
        chunk_gla(x.q, None, x.v, x.g)
    with raises(TypeError, "chunk_gla: expected q to be a tensor, got None"):
        chunk_gla(None, x.k, x.v, x.g)
    with raises(TypeError, "_gate_cumsum: expected tensors, got None"):
        ops._gate_cumsum(None, None)


def test_nested_and_quantized(x):
    message = "chunk_gla: nested and quantized tensors are not supported"
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([x.q[0], x.q[1][:3]], layout=layout)
        with pytest.raises(NotImplementedError, match=message):
            call(x, q=nested)
    with pytest.raises(NotImplementedError, match=message):
        call(x, q=torch.quantize_per_tensor(x.q, 0.1, 0, torch.qint8))


def test_scale_is_a_number(x):
    message = "chunk_gla: expected scale to be a number, got a tensor; multiply q by it instead"
    with raises(TypeError, message):
        call(x, scale=torch.tensor(0.5, requires_grad=True))
    compiled = torch.compile(lambda scale: call(x, scale=scale)[0], fullgraph=True)
    with pytest.raises(Exception, match=re.escape(message)):
        compiled(torch.tensor(0.5))


def test_score_grads_needs_a_scale(x):
    with raises(TypeError, "_score_grads: expected scale to be a float (its default, K ** -0.5, "
                "needs K), got None"):  # fmt: skip
        ops._score_grads(x.do, x.v, None, None)


def test_steps_check_their_inputs(x):
    b = ops._gate_cumsum(x.g, None)
    with raises(ValueError, "_scores_diagonal: expected k to have shape [B, T, H, K] = "
                "[2, 64, 4, 8], got [2, 63, 4, 8]"):  # fmt: skip
        ops._scores_diagonal(x.q, x.k[:, 1:], b, None, None)
    with raises(TypeError, "_scores_diagonal: expected b to be torch.float32, got torch.float64"):
        ops._scores_diagonal(x.q, x.k, b.double(), None, None)
    A, A_diagonal = torch.zeros(2, 64, 4, 64), torch.zeros(2, 64, 4, 16)
    with raises(ValueError, "_output: expected S to have shape [B, NT, H, K, V] = "
                "[2, 1, 4, 8, 12], got [2, 2, 4, 8, 12]"):  # fmt: skip
        ops._output(x.q, x.v, b, A, A_diagonal, torch.zeros(2, 2, 4, 8, 12), None, None)
    with raises(ValueError, "_output: expected A_diagonal to have shape [B, T, H, 16] = "
                "[2, 64, 4, 16], got [2, 64, 4, 64]"):  # fmt: skip
        ops._output(x.q, x.v, b, A, A, torch.zeros(2, 1, 4, 8, 12), None, None)


def test_backward_operator_checks_its_inputs(x):
    def forward(for_backward_bytes):
        inputs = (x.q, x.k, x.v, x.g, None, None, None)
        return ops.chunk_gla_fwd(*inputs, None, False, False, False, for_backward_bytes)

    def backward(do=x.do, dht=None, for_backward=None):
        return ops.chunk_gla_bwd(
            do, dht, x.q, x.k, x.v, x.g, None, None, None, None, False, False, for_backward
        )

    with raises(TypeError, "chunk_gla_bwd: expected do to be torch.float32 like q, "
                "got torch.bfloat16"):  # fmt: skip
        backward(do=x.do.bfloat16())
    with raises(ValueError, "chunk_gla_bwd: expected do to have shape [B, T, H, V] = "
                "[2, 64, 4, 12], got [2, 64, 4, 8]"):  # fmt: skip
        backward(do=x.q)
    with raises(ValueError, "chunk_gla_bwd: expected dht to have shape [N, H, K, V] = "
                "[2, 4, 8, 12], got [1, 4, 8, 12]"):  # fmt: skip
        backward(dht=x.dht[:1])
    with raises(TypeError, "chunk_gla_bwd: expected for_backward to be torch.uint8 (as "
                "chunk_gla_fwd leaves it), got torch.float32"):  # fmt: skip
        backward(for_backward=torch.zeros(3))
    with raises(ValueError, "chunk_gla_bwd: expected for_backward to have 1 dimension [bytes], "
                "got 2 with shape [1, 3]"):  # fmt: skip
        backward(for_backward=torch.zeros(1, 3, dtype=torch.uint8))
    with raises(NotImplementedError, "chunk_gla_bwd: expected nothing to be kept for backward on "
                "the CPU, got 3 bytes"):  # fmt: skip
        backward(for_backward=torch.zeros(3, dtype=torch.uint8))
    with raises(NotImplementedError, "chunk_gla: expected nothing to be kept for backward on the "
                "CPU, got 3 bytes"):  # fmt: skip
        forward(3)
    with raises(ValueError, "chunk_gla: expected for_backward_bytes to be at least -1, got -2"):
        forward(-2)


def test_same_sentence_under_compile(x):
    message = "chunk_gla: expected k to have shape [B, T, HK, K] = [2, 64, 4, 8], got [2, 63, 4, 8]"
    compiled = torch.compile(lambda q, k, v, g: chunk_gla(q, k, v, g)[0], fullgraph=True)
    with pytest.raises(Exception, match=re.escape(message)):
        compiled(x.q, x.k[:, 1:], x.v, x.g)
