"""gla_ext's layer beside FLA's and its own products, and the language models of both."""

import copy
from collections.abc import Callable

import bench_cuda as bench
import torch
from bench_fla import HEADS, HIDDEN, LAYERS
from shared.gate import require_close
from shared.timing import Timing, cold
from torch import Tensor, nn

LAYER_TOLERANCE = 0.04  # bf16 throughout against fp32; 0.015 is usual
MODEL = {"hidden_size": HIDDEN, "num_hidden_layers": 24, "num_heads": HEADS, "vocab_size": 32000}
# Models are checked with two of their layers, in bf16 against fp32: 0.015 is usual. Each layer adds
# as much, so that 24 random ones in bf16 are 0.2 from fp32 and from one another.
CHECKED_LAYERS = 2
LOGITS_TOLERANCE = 0.04


def build_layers(fla: bool, compiled: bool) -> dict[str, Callable]:
    """Layers of one set of bf16 weights."""
    from shared.inputs import layer_class

    from gla_ext.layers import GatedLinearAttention

    torch.manual_seed(0)
    ours = GatedLinearAttention(hidden_size=HIDDEN, num_heads=HEADS).to("cuda", torch.bfloat16)
    layers = {"gla_ext": ours}
    if compiled:
        layers["gla_ext, compiled"] = torch.compile(copy.deepcopy(ours), dynamic=False)
    if fla:
        theirs = layer_class()(hidden_size=HIDDEN, num_heads=HEADS)
        theirs.to("cuda", torch.bfloat16).load_state_dict(ours.state_dict())
        layers["FLA"] = theirs
    return layers


def check_layers(layers: dict[str, Callable], x: Tensor, do: Tensor) -> None:
    """Output and gradient of the input, first sequence, against our layer in fp32."""

    def results(layer, x, do):
        leaf = x.detach().requires_grad_()
        o = layer(leaf)[0]
        (dx,) = torch.autograd.grad(o, leaf, do)
        return {"o": o[:1], "dx": dx[:1]}

    expected = results(copy.deepcopy(layers["gla_ext"]).float(), x[:1].float(), do[:1].float())
    for name, layer in layers.items():
        where = f"layer of {name}, B {x.shape[0]}, T {x.shape[1]}"
        require_close(results(layer, x, do), expected, LAYER_TOLERANCE, where)


def call_layer(layer, x: Tensor, do: Tensor, backward: bool) -> Callable[[], object]:
    """One forward, or forward + backward to the input and to all weights."""
    leaves = [x.detach().requires_grad_(backward), *layer.parameters()]

    def run():
        o = layer(leaves[0])[0]
        return torch.autograd.grad(o, leaves, do) if backward else o

    return run


def call_products(layer, x: Tensor, backward: bool) -> Callable[[], object]:
    """The layer's linear maps of q, k, v, g and o alone, back to back."""
    linears = [layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, layer.o_proj]
    leaves = [x.detach().requires_grad_(backward), *(linear.weight for linear in linears)]
    gradients = [torch.randn_like(linear(x)) for linear in linears]

    def run():
        y = [linear(leaves[0]) for linear in linears]
        return torch.autograd.grad(y, leaves, gradients) if backward else y

    return run


def measure_layers(fla: bool, compiled: bool) -> dict[str, dict[str, dict[str, Timing]]]:
    """Timings by "BxT", mode and name, after a comparison of the results."""
    layers, results = build_layers(fla, compiled), {}
    for B, T in LAYERS:
        x, do = (torch.randn(B, T, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        torch.compiler.reset()  # each shape is compiled for itself
        check_layers(layers, x, do)
        row = results.setdefault(f"{B}x{T}", {})
        for backward in (False, True):
            with torch.set_grad_enabled(backward):
                calls = {n: call_layer(layer, x, do, backward) for n, layer in layers.items()}
                calls["its products"] = call_products(layers["gla_ext"], x, backward)
                row[bench.MODES[backward]] = cold(calls)
        torch.cuda.empty_cache()
    return results


def build_ours(sizes: dict = MODEL, device: str = "cuda") -> nn.Module:
    from gla_ext.model import GLAForCausalLM
    from gla_ext.model.config import GLAConfig

    torch.manual_seed(0)
    with torch.device(device):
        return GLAForCausalLM(GLAConfig(**sizes)).to(torch.bfloat16)


def build_fla(sizes: dict = MODEL) -> nn.Module:
    """FLA's model with the weights of ours; ImportError without the transformers it needs."""
    from fla.models.gla import GLAConfig, GLAForCausalLM

    with torch.device("cuda"):  # its weights are drawn, which takes a CPU a minute
        model = GLAForCausalLM(GLAConfig(**sizes)).to(torch.bfloat16)
    model.load_state_dict(build_ours(sizes).state_dict())
    return model


def of_few_layers(sizes: dict) -> dict:
    return sizes | {"num_hidden_layers": min(CHECKED_LAYERS, sizes["num_hidden_layers"])}


@torch.no_grad()
def exact_logits(sizes: dict, tokens: Tensor, **options) -> Tensor:
    """Of our model in fp32, with the weights that the bf16 models of these sizes have."""
    model = build_ours(sizes, tokens.device.type).float().eval()
    return model(input_ids=tokens, **options).logits
