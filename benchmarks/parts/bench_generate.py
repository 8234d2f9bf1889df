"""Generation with a language model of 340M parameters: gla_ext's, a Transformer of the same size
on `scaled_dot_product_attention`, and FLA's. Weights are random, sampling is greedy, all in bf16.
"""

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator

import torch
from parts import bench_model
from shared.contenders import FLA, Attends, Contender, Ours
from shared.gate import WrongResults, require_close
from shared.timing import Timing, summary
from torch import Tensor, nn

FUSED, COMPILED = "gla_ext, fused projections", "gla_ext, compiled"
TRANSFORMER = "SDPA Transformer"
TOLERANCE = bench_model.LOGITS_TOLERANCE
CHECKED_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: with prompts of one length, and for one sequence after many tokens."""

    model: dict
    prompt: int = 2048
    batches: tuple[int, ...] = (1, 32)
    lengths: tuple[int, ...] = (1000, 100_000)  # generated
    steps: int = 100  # of a sample
    samples: int = 7


SIZES = Sizes(bench_model.MODEL)


def draw_prompts(sizes: Sizes, batch_size: int, device: str = "cuda") -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    size = (batch_size, sizes.prompt)
    return torch.randint(sizes.model["vocab_size"], size, device=device, generator=generator)


def build_transformer(sizes: Sizes, device: str = "cuda") -> nn.Module:
    from shared.transformer import Transformer

    from gla_ext.model.config import GLAConfig

    torch.manual_seed(0)
    with torch.device(device):
        return Transformer(GLAConfig(**sizes.model)).to(torch.bfloat16).eval()


def checked(sizes: Sizes) -> Sizes:
    """Of what is compared before anything is timed."""
    return dataclasses.replace(sizes, model=bench_model.of_few_layers(sizes.model))


@torch.no_grad()
def check_ours(model: nn.Module, prompts: Tensor) -> None:
    """Raises WrongResults unless decoding gives the logits of one forward over all tokens, and a
    graph the tokens of eager steps.
    """
    from gla_ext.cache import StaticGLACache

    cache, B, T = StaticGLACache(prompts.shape[0]), *prompts.shape
    with cache.prefill():
        logits = [model(prompts, past_key_values=cache, use_cache=True, logits_to_keep=1).logits]
    tokens = prompts
    for _ in range(CHECKED_STEPS):
        tokens = torch.cat([tokens, logits[-1].argmax(-1)], 1)
        logits.append(model(tokens[:, -1:], past_key_values=cache, use_cache=True).logits)
    whole = model(tokens, logits_to_keep=CHECKED_STEPS + 1).logits
    where = f"decoding with gla_ext, B {B}, T {T}"
    require_close({"logits": torch.cat(logits, 1)}, {"logits": whole}, TOLERANCE, where)
    ours = Ours(model, B)
    found = [ours.first(prompts), *(ours.step().clone() for _ in range(CHECKED_STEPS - 1))]
    if not torch.equal(torch.stack(found, 1), tokens[:, T:]):
        raise WrongResults(f"{where}: a CUDA graph draws other tokens than eager steps")


@torch.no_grad()
def check_transformer(model: nn.Module, prompts: Tensor) -> None:
    """The same of the Transformer, whose steps have a length each."""
    B, T = prompts.shape
    cache = model.new_cache(B, T + CHECKED_STEPS)
    everywhere = torch.arange(T + CHECKED_STEPS, device=prompts.device)
    logits, tokens = [model(prompts, cache, everywhere[:T], T)], prompts
    for n in range(T, T + CHECKED_STEPS):
        tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], 1)
        logits.append(model(tokens[:, -1:], cache, everywhere[n : n + 1], n + 1))
    fresh = model.new_cache(B, T + CHECKED_STEPS)
    whole = [
        model(tokens[:, :n], fresh, everywhere[:n], n) for n in range(T, T + CHECKED_STEPS + 1)
    ]
    require_close(
        {"logits": torch.stack(logits)},
        {"logits": torch.stack(whole)},
        TOLERANCE,
        f"decoding with the Transformer, B {B}, T {T}",
    )


@torch.no_grad()
def check_fla(model: nn.Module, prompts: Tensor, sizes: Sizes) -> None:
    """FLA's logits after some decoded tokens against those of our forward in fp32."""
    theirs, T = FLA(model), prompts.shape[1]
    tokens = torch.cat([prompts, theirs.first(prompts).unsqueeze(1)], 1)
    for _ in range(CHECKED_STEPS - 1):
        tokens = torch.cat([tokens, theirs.step().unsqueeze(1)], 1)
    output = model(tokens[:, -1:], past_key_values=theirs.cache, use_cache=True, logits_to_keep=1)
    whole = bench_model.exact_logits(sizes.model, tokens, logits_to_keep=1)
    where = f"decoding with FLA, B {prompts.shape[0]}, T {T}"
    require_close({"logits": output.logits}, {"logits": whole}, TOLERANCE, where)


def step_times(contender: Contender, sizes: Sizes) -> Timing:
    """Milliseconds a step by the host's clock, over many that are queued one after the other."""
    contender.step()
    samples = []
    for _ in range(sizes.samples):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(sizes.steps):
            contender.step()
        torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - start) / sizes.steps)
    return summary(samples)


def first_times(contender: Contender, prompts: Tensor, sizes: Sizes) -> Timing:
    """Milliseconds from prompts on the device to their first new tokens on the host."""
    samples = []
    for _ in range(sizes.samples + 2):  # two warm up
        torch.cuda.synchronize()
        start = time.perf_counter()
        contender.first(prompts).tolist()
        samples.append(1e3 * (time.perf_counter() - start))
    return summary(samples[2:])


@contextlib.contextmanager
def emptied() -> Iterator[None]:
    """Gives memory back at its end."""
    try:
        yield
    finally:
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def measure_batches(make: Callable[[int], Contender], sizes: Sizes, device: str) -> dict:
    """Time to the first token and of a step by batch size."""
    results = {}
    for B in sizes.batches:
        with emptied():
            contender, prompts = make(B), draw_prompts(sizes, B, device)
            first = first_times(contender, prompts, sizes)
            results[str(B)] = {"first": first, "step": step_times(contender, sizes)}
            del contender
    return results


@torch.no_grad()
def measure_lengths(
    make: Callable[[int], Contender], sizes: Sizes, device: str, generated: bool
) -> dict:
    """Time of a step and peak memory, weights included, of one sequence after so many new tokens.

    Args:
        make: a contender by the number of tokens it is to have seen.
        generated: whether its steps get there one by one; else it is there from the start.
    """
    results, done, contender = {}, 0, None
    for n in sizes.lengths:
        with emptied():
            if contender is None or not generated:
                contender = make(sizes.prompt + n)
                contender.first(draw_prompts(sizes, 1, device))
                gc.collect()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()  # prefill's is not of interest
            if generated:
                for _ in range(n - done):
                    contender.step()
            done = n
            step = step_times(contender, sizes)
            results[str(n)] = {"step": step, "peak_bytes": torch.cuda.max_memory_allocated()}
            done += 1 + sizes.steps * sizes.samples
            if not generated:
                contender = None
    return results


def measure(
    fla: bool,
    compiled: bool = False,
    sizes: Sizes = SIZES,
    device: str = "cuda",
    results: dict | None = None,
) -> dict:
    """Rows by name, sizes, and notes on what could not be measured; `results` has each row as soon
    as it is there.
    """
    results = {} if results is None else results
    results |= dataclasses.asdict(sizes) | {"rows": {}, "parameters": {}, "notes": []}
    with emptied():
        measure_gla(results, compiled, sizes, device)
    with emptied():
        measure_transformer(results, compiled, sizes, device)
    if fla:
        with emptied():
            measure_fla(results, sizes, device)
    return results


def measure_gla(results: dict, compiled: bool, sizes: Sizes, device: str) -> None:
    from gla_ext.model import fuse_projections

    prompts = draw_prompts(sizes, 2, device)
    model = bench_model.build_ours(checked(sizes).model, device).eval()
    check_ours(model, prompts)
    check_ours(fuse_projections(model), prompts)
    del model  # whose memory would be counted
    model = bench_model.build_ours(sizes.model, device).eval()
    results["parameters"]["gla_ext"] = sum(p.numel() for p in model.parameters())
    few = dataclasses.replace(sizes, lengths=sizes.lengths[:1])
    for name in ("gla_ext", COMPILED, FUSED):
        if name == COMPILED and not compiled:
            continue
        if name == FUSED:
            fuse_projections(model)
        make = functools.partial(Ours, model, compiled=name == COMPILED)
        lengths = sizes if name == FUSED else few
        results["rows"][name] = {
            "batches": measure_batches(make, sizes, device),
            "lengths": measure_lengths(lambda _, make=make: make(1), lengths, device, True),
        }


def measure_transformer(results: dict, compiled: bool, sizes: Sizes, device: str) -> None:
    check_transformer(build_transformer(checked(sizes), device), draw_prompts(sizes, 2, device))
    model = build_transformer(sizes, device)
    results["parameters"][TRANSFORMER] = sum(p.numel() for p in model.parameters())
    for name in (TRANSFORMER, f"{TRANSFORMER}, compiled")[: 1 + compiled]:
        make = functools.partial(Attends, model, compiled=name != TRANSFORMER)
        of_batch = functools.partial(make, length=sizes.prompt + 1)
        of_length = functools.partial(make, 1)
        results["rows"][name] = {
            "batches": measure_batches(of_batch, sizes, device),
            "lengths": measure_lengths(of_length, sizes, device, False),
        }


def measure_fla(results: dict, sizes: Sizes, device: str) -> None:
    """FLA's row, of the first length alone: it would take half an hour to the others."""
    try:
        import fla.models.gla  # noqa: F401
    except ImportError as error:
        results["notes"].append(f"FLA's GLAForCausalLM cannot be imported here ({error}).")
        return
    few = checked(sizes)
    check_fla(bench_model.build_fla(few.model).eval(), draw_prompts(sizes, 2, device), few)
    model = bench_model.build_fla(sizes.model).eval()
    few = dataclasses.replace(sizes, lengths=sizes.lengths[:1])
    results["rows"]["FLA"] = {
        "batches": measure_batches(lambda _: FLA(model), sizes, device),
        "lengths": measure_lengths(lambda _: FLA(model), few, device, True),
    }
