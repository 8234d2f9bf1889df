"""A training step of a row of `training_rows`: made, checked, timed and profiled."""

import dataclasses
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from parts.training_rows import SIZES, Row
from shared import models
from shared.gate import WrongResults, require_close
from shared.timing import host_us
from shared.utilisation import product_parameters
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda"
TOLERANCE = 0.04  # of two layers in bf16 against fp32: 0.015 is usual
HOST_TOKENS = 64
REST_S = 0.3
KINDS = {  # the first that fits
    "inductor": ("triton_",),  # whose names quote the operators beside them
    "foreach copies": ("CopyFunctor", "::Copy<"),
    "attention": ("flash", "sdpa", "fmha", "cudnn"),
    "scan": ("selective_scan", "causal_conv1d"),
    "products": ("gemm", "cutlass", "nvjet", "cublas", "splitk"),
    "operator": ("sm90::", "steps::"),
    "norms": ("cuda::Norm", "Narrow<", "Wide<", "rms_norm"),
    "loss": ("cross_entropy", "softmax", "nll_loss", "SoftMax"),
    "SwiGLU": ("Swiglu",),
    "gate": ("gate::", "log_sigmoid"),
    "optimizer": ("multi_tensor", "adam"),
    "concatenation": ("CatArray",),
    "copies and fills": ("copy", "Memcpy", "Memset", "Fill"),
    "element-wise": ("elementwise", "reduce_kernel"),
    "embedding": ("compute_grad_weight", "sum_and_scatter", "radix_sort", "gather_kernel"),
}


def tokens_of(row: Row, B: int | None = None, T: int | None = None) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = (B or row.B, T or row.T)
    return torch.randint(SIZES[row.size]["vocab_size"], size, device=DEVICE, generator=generator)


def build(row: Row, layers: int | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """The model, with the same weights for gla_ext and FLA."""
    sizes = SIZES[row.size] | ({"num_hidden_layers": layers} if layers else {})
    if row.loss == "linear":
        sizes |= {"fuse_linear_cross_entropy": True, "fuse_cross_entropy": False}
    if row.hybrid:
        blocks = range(sizes["num_hidden_layers"])
        sizes["attn"] = {"layers": [*blocks[5::6]] or [*blocks[-1:]], "num_heads": 16}
    dtype = dtype or (torch.float32 if row.autocast else torch.bfloat16)
    model = models.build(sizes, DEVICE, dtype, row.model).train()
    if row.apart:
        for block in model.model.layers:
            block.attn.batch_projections = False
    if row.checkpointing and row.model == "FLA":
        model.gradient_checkpointing_enable()
    elif row.checkpointing and row.model == "gla_ext":
        model.model.gradient_checkpointing = True
    return model


def loss_of(model: nn.Module, row: Row) -> Callable[[Tensor], Tensor]:
    """The loss of tokens; compiled as the row says, in whole graphs."""
    compiled = {"fullgraph": True, "dynamic": False}
    transformer = row.model == "Transformer++"
    if row.compiled == "blocks":
        for block in model.layers if transformer else model.model.layers:
            block.compile(**compiled)

    def loss(tokens: Tensor) -> Tensor:
        if transformer:
            return model.training_loss(tokens, row.loss == "ours", row.checkpointing)
        return model(input_ids=tokens, labels=tokens).loss

    # With the loss in the graph: logits that it returned would get a gradient, of zeros, that
    # backward adds to theirs.
    return torch.compile(loss, **compiled) if row.compiled == "model" else loss


@contextmanager
def kernels_of(row: Row) -> Iterator[None]:
    """The kernels that a row asks for, in forward and, where it computes blocks again, backward."""
    with ExitStack() as stack:
        if row.model == "Transformer++":
            stack.enter_context(sdpa_kernel(getattr(SDPBackend, row.attention)))
        if row.steps:
            os.environ["GLA_EXT_CUDA_PATH"] = "steps"
            stack.callback(os.environ.pop, "GLA_EXT_CUDA_PATH")
        if row.accelerated:
            from gla_ext.fla import accelerate_fla, restore_fla

            accelerate_fla()
            stack.callback(restore_fla)
        yield


def stepper(row: Row, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Runs a training step, and returns its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compute_loss = loss_of(model, row)

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=row.autocast):
            loss = compute_loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def check(name: str, row: Row) -> None:
    """The loss and a weight's gradient of two layers, against the same in fp32."""
    tokens = tokens_of(row, 1, min(row.T, 2048))

    def results(row: Row, model: nn.Module) -> dict[str, Tensor]:
        with kernels_of(row):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=row.autocast):
                loss = loss_of(model, row)(tokens)
            loss.backward()
        weight = next(model.parameters())  # the embeddings, which all of backward reaches
        return {"loss": loss.detach(), "embeddings": weight.grad}

    eager = dataclasses.replace(row, compiled="", autocast=False, attention="MATH")
    if row.model == "FLA":  # whose kernels for fp32 would be tuned for minutes
        eager = dataclasses.replace(eager, model="gla_ext")
    expected = results(eager, build(eager, layers=2, dtype=torch.float32))
    row = dataclasses.replace(row, compiled="")
    found = results(row, build(row, layers=2))
    require_close(found, {k: v.double() for k, v in expected.items()}, TOLERANCE, name)


def sustained(step: Callable[[Tensor], Tensor], tokens: Tensor, seconds: float) -> dict:
    """Milliseconds a step, back to back after a second of the same; the first and last loss."""
    losses = []

    def run() -> None:
        losses[1:] = [step(tokens)]

    losses.append(step(tokens).item())
    times_ms(run, 2)
    (one,) = times_ms(run, 1)
    times_ms(run, 1, max(1, int(1e3 / one)))
    torch.cuda.reset_peak_memory_stats()
    count = max(5, int(1e3 * seconds / one))
    (ms,) = times_ms(run, 1, count)
    return {
        "ms": ms,
        "steps": count,
        "tokens_per_s": 1e3 * tokens.numel() / ms,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": [float(loss) for loss in losses],
    }


def times_ms(run: Callable[[], object], count: int, steps: int = 1, rest_s: float = 0) -> list:
    """Milliseconds of a step by the host's clock, over `steps` in a row, each time after a rest."""
    samples = []
    for _ in range(count):
        torch.cuda.synchronize()
        time.sleep(rest_s)
        start = time.perf_counter()
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - start) / steps)
    return samples


def layer_host_us(model: nn.Module, row: Row) -> float:
    """Of a layer's forward in training, 1 x 64 tokens."""
    layer, weight = model.model.layers[0].attn, model.model.embeddings.weight
    x = torch.randn(1, HOST_TOKENS, weight.shape[1], device=DEVICE, dtype=weight.dtype)
    x.requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=row.autocast):
        return host_us(lambda: layer(x), calls=400)


def kind_of(kernel: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(p in kernel for p in parts)), "other")


def profile(step: Callable[[Tensor], Tensor], tokens: Tensor) -> dict:
    """Milliseconds of GPU time by kind of kernel, and the number of kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    times_ms(lambda: step(tokens), 1)
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        times_ms(lambda: step(tokens), 1)
    on_gpu = torch.autograd.DeviceType.CUDA
    kinds: dict[str, float] = {}
    kernels = [e for e in run.events() if e.device_type == on_gpu and not e.is_user_annotation]
    for kernel in kernels:
        kind = kind_of(kernel.name)
        kinds[kind] = kinds.get(kind, 0.0) + kernel.time_range.elapsed_us() / 1e3
    return {"kinds": kinds, "launches": len(kernels)}


def measure(name: str, row: Row, seconds: float, profiled: bool) -> dict:
    check(name, row)
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    with kernels_of(row):
        model, tokens = build(row), tokens_of(row)
        step = stepper(row, model)
        result = sustained(step, tokens, seconds)
        if not all(math.isfinite(loss) for loss in result["losses"]):
            raise WrongResults(f"{name}: losses {result['losses']}")
        # After a rest the clocks are not lowered by the power limit.
        result["cool_ms"] = statistics.median(times_ms(lambda: step(tokens), 5, rest_s=REST_S))
        if profiled:
            result |= profile(step, tokens)
        if not row.compiled:
            few = tokens_of(row, 1, HOST_TOKENS)
            times_ms(lambda: step(few), 5)
            result["host_ms"] = min(times_ms(lambda: step(few), 4, steps=10))
            if row.model in ("gla_ext", "FLA"):
                result["layer_host_us"] = layer_host_us(model, row)
        result["product_parameters"] = product_parameters(model)
        return result | {"device": torch.cuda.get_device_name()}
