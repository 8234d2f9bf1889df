"""gla_ext's layer and its language model in training, beside FLA's."""

import contextlib
import copy
import gc
import time
from collections.abc import Callable
from unittest import mock

import bench_cuda as bench
import torch
from bench_fla import HEADS, HIDDEN, LAYERS
from shared.gate import WrongResults, require_close
from shared.timing import Timing, cold, summary
from shared.utilisation import product_parameters
from torch import Tensor, nn

LAYER_TOLERANCE = 0.04  # bf16 throughout against fp32; 0.015 is usual
MODEL = {"hidden_size": HIDDEN, "num_hidden_layers": 24, "num_heads": HEADS, "vocab_size": 32000}
TRAINING_T = 2048
WARMUP, STEPS = 3, 10
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
                row[bench.MODES[backward]] = cold(calls)
        torch.cuda.empty_cache()
    return results


def build_ours(sizes: dict = MODEL, device: str = "cuda") -> nn.Module:
    from gla_ext.model import GLAForCausalLM
    from gla_ext.model.config import GLAConfig

    torch.manual_seed(0)
    with torch.device(device):
        return GLAForCausalLM(GLAConfig(**sizes)).to(torch.bfloat16)


def build_compiled(sizes: dict = MODEL) -> nn.Module:
    model = build_ours(sizes)
    model.compile(dynamic=False)
    return model


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


def fla_operator():
    """While it lasts, our layers call FLA's chunk_gla."""
    from fla.ops.gla import chunk_gla

    return mock.patch("gla_ext.layers.gated_linear_attention.chunk_gla", chunk_gla)


def train(model: nn.Module, tokens: Tensor) -> dict:
    """Time and memory of optimizer steps on one batch, and the first and the last loss."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses, samples = [], []
    for n in range(WARMUP + STEPS):
        if n == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
    return {
        "step": summary(samples[WARMUP:]),
        "tokens": tokens.numel(),
        "product_parameters": product_parameters(model),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "losses": [losses[0], losses[-1]],
    }


def measure_training(fla: bool, compiled: bool, batch: int) -> dict:
    """Rows by name, the number of parameters, and notes on what could not be measured."""
    models: dict[str, tuple[Callable, Callable]] = {"gla_ext": (build_ours, contextlib.nullcontext)}
    notes = []
    if compiled:
        models["gla_ext, compiled"] = (build_compiled, contextlib.nullcontext)
    if fla:
        try:
            import fla.models.gla
        except ImportError as error:
            notes.append(f"FLA's GLAForCausalLM cannot be imported here ({error}).")
            models["gla_ext's model, FLA's chunk_gla"] = (build_ours, fla_operator)
        else:
            models["FLA"] = (build_fla, contextlib.nullcontext)
    generator = torch.Generator("cuda").manual_seed(0)
    size = (batch, TRAINING_T)
    tokens = torch.randint(MODEL["vocab_size"], size, device="cuda", generator=generator)
    rows, parameters, checked = {}, 0, of_few_layers(MODEL)
    expected = {"logits": exact_logits(checked, tokens[:1])}
    for name, (build, context) in models.items():
        with context():
            with torch.no_grad():
                logits = {"logits": build(checked)(input_ids=tokens[:1]).logits}
            require_close(logits, expected, LOGITS_TOLERANCE, f"model of {name}")
            model = build()
            parameters = sum(p.numel() for p in model.parameters())
            rows[name] = train(model, tokens)
        if not all(loss < float("inf") for loss in rows[name]["losses"]):
            raise WrongResults(f"model of {name}: losses {rows[name]['losses']}")
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return {"rows": rows, "parameters": parameters, "notes": notes}
