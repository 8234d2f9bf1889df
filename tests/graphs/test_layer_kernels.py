"""What inductor makes of the layer's training step beside the operators and products."""

import re

import torch
import torch._inductor.config
from common import assert_close
from models import make_layer, make_x
from torch._inductor.utils import run_and_get_code

# Rows of any width are padded, as inductor pads those of more than 1024 numbers on a GPU. What it
# pads for a product alone follows from times that it measures, and may differ from run to run.
PADDED = {
    "disable_padding_cpu": False,
    "padding_stride_threshold": 0,
    "shape_padding": False,
}
PADDED_ROWS = re.compile(r"76\), \((8960, )?128, 1\), torch.bfloat16")  # which depend on the torch
MADE = re.compile(r"^(\w+) = async_compile\.(?:cpp_pybinding|triton)\(", re.MULTILINE)


def gradients(call, x, layer):
    leaf = x.clone().requires_grad_()
    y = call(leaf)[0]
    return [y, *torch.autograd.grad(y.float().square().sum(), [leaf, *layer.parameters()])]


def test_slices_of_the_joint_projection_are_read_in_place(device):
    """All kernels put weights, or gradients, side by side."""
    layer = make_layer(torch.bfloat16).to(device)
    x = make_x(dtype=torch.bfloat16).to(device)
    with torch._inductor.config.patch(PADDED):
        compiled = torch.compile(layer, fullgraph=True)
        got, code = run_and_get_code(gradients, compiled, x, layer)
    assert any(PADDED_ROWS.search(text) for text in code)
    names = [name for text in code for name in MADE.findall(text)]
    assert names and all("_cat_" in name for name in names), names
    for a, b in zip(got, gradients(layer, x, layer), strict=True):
        assert_close(a, b, 0.03)


def test_every_operator_takes_padded_rows():
    """Else inductor copies what it has padded before each of them."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("gla_ext::")}
    assert "gla_ext::chunk_gla_bwd" in names
    for name in sorted(names):
        base, _, overload = name.removeprefix("gla_ext::").partition(".")
        operator = getattr(getattr(torch.ops.gla_ext, base), overload or "default")
        assert torch.Tag.needs_fixed_stride_order in operator.tags, name
