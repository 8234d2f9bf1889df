"""Generation with a language model of 374 M parameters: gla_ext's, a Transformer of the same size
on `scaled_dot_product_attention`, and FLA's. Weights are random, sampling is greedy, all in bf16.
"""

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator

import torch
from shared.gate import WrongResults, require_close
from shared.models import FLA, MODEL, TOLERANCE, Attends, Contender, Ours, build, of_few_layers
from shared.timing import Timing, summary
from torch import Tensor, nn

from gla_ext.cache import StaticGLACache
from gla_ext.cache._tokens import TokenBuffers, are_faster
from gla_ext.model import fuse_projections

FUSED, TRANSFORMER = "gla_ext, fused projections", "SDPA Transformer"
CHECKED_STEPS = 20  # more than a buffer of tokens holds


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: with prompts of one length, and for one sequence after many tokens."""

    model: dict = dataclasses.field(default_factory=lambda: MODEL)
    prompt: int = 2048
    batches: tuple[int, ...] = (1, 32)
    lengths: tuple[int, ...] = (1000, 100_000)  # generated
    steps: int = 100  # of a sample
    samples: int = 7
    device: str = "cuda"

    def draw(self, batch_size: int) -> Tensor:
        """Prompts."""
        generator = torch.Generator(self.device).manual_seed(0)
        size = (batch_size, self.prompt)
        vocabulary = self.model["vocab_size"]
        return torch.randint(vocabulary, size, device=self.device, generator=generator)

    def build(self, kind: str = "gla_ext", checked: bool = False) -> nn.Module:
        """The model, or with few layers the one that is checked."""
        model = of_few_layers(self.model) if checked else self.model
        return build(model, self.device, kind=kind).eval()


@torch.no_grad()
def check_ours(model: nn.Module, prompts: Tensor) -> None:
    """Raises WrongResults unless decoding gives the logits of one forward over all tokens, and a
    graph the tokens of eager steps.
    """
    (B, T), device = prompts.shape, prompts.device
    cache = StaticGLACache(B, torch.zeros(B, dtype=torch.bool, device=device))
    if are_faster(B, device):
        cache.buffers = TokenBuffers(B, device)
    with cache.prefill():
        logits = [model(prompts, past_key_values=cache, use_cache=True, logits_to_keep=1).logits]
    tokens = prompts
    for _ in range(CHECKED_STEPS):
        tokens = torch.cat([tokens, logits[-1].argmax(-1)], 1)
        cache.begin_step()
        logits.append(model(tokens[:, -1:], past_key_values=cache, use_cache=True).logits)
        cache.count_token()
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
    cache, fresh = (model.new_cache(B, T + CHECKED_STEPS) for _ in range(2))
    everywhere = torch.arange(T + CHECKED_STEPS, device=prompts.device)
    logits, tokens = [model(prompts, cache, everywhere[:T], T)], prompts
    whole = [logits[0]]
    for n in range(T, T + CHECKED_STEPS):
        tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], 1)
        logits.append(model(tokens[:, -1:], cache, everywhere[n : n + 1], n + 1))
        whole.append(model(tokens, fresh, everywhere[: n + 1], n + 1))
    found, expected = {"logits": torch.stack(logits)}, {"logits": torch.stack(whole)}
    where = f"decoding with the Transformer, B {B}, T {T}"
    require_close(found, expected, TOLERANCE, where)


@torch.no_grad()
def check_fla(model: nn.Module, sizes: Sizes) -> None:
    """FLA's logits after some decoded tokens against those of our forward in fp32."""
    prompts, theirs = sizes.draw(2), FLA(model)
    tokens = torch.cat([prompts, theirs.first(prompts).unsqueeze(1)], 1)
    for _ in range(CHECKED_STEPS - 1):
        tokens = torch.cat([tokens, theirs.step().unsqueeze(1)], 1)
    output = model(tokens[:, -1:], past_key_values=theirs.cache, use_cache=True, logits_to_keep=1)
    exact = sizes.build(checked=True).float()(input_ids=tokens, logits_to_keep=1)
    where = f"decoding with FLA, B 2, T {sizes.prompt}"
    require_close({"logits": output.logits}, {"logits": exact.logits}, TOLERANCE, where)


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


def measure_batches(make: Callable[[int], Contender], sizes: Sizes) -> dict:
    """Time to the first token and of a step by batch size."""
    results = {}
    for B in sizes.batches:
        with emptied():
            contender = make(B)
            first = first_times(contender, sizes.draw(B), sizes)
            results[str(B)] = {"first": first, "step": step_times(contender, sizes)}
            del contender
    return results


def measure_lengths(
    make: Callable[[int], Contender], sizes: Sizes, lengths: tuple[int, ...], generated: bool
) -> dict:
    """Time of a step and peak memory, weights included, of one sequence after so many new tokens.

    Args:
        make: a contender by the number of tokens it is to have seen.
        generated: whether its steps get there one by one; else it is there from the start.
    """
    results, done, contender = {}, 0, None
    for n in lengths:
        with emptied():
            if contender is None or not generated:
                contender = make(sizes.prompt + n)
                contender.first(sizes.draw(1))
                gc.collect()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()  # prefill's is not of interest
            for _ in range(n - done if generated else 0):
                contender.step()
            step = step_times(contender, sizes)
            results[str(n)] = {"step": step, "peak_bytes": torch.cuda.max_memory_allocated()}
            done = n + 1 + sizes.steps * sizes.samples
            if not generated:
                contender = None
    return results


@torch.no_grad()
def measure(fla: bool, sizes: Sizes | None = None) -> dict:
    """Rows by name, sizes, and notes on what could not be measured."""
    sizes = sizes or Sizes()
    results = dataclasses.asdict(sizes) | {"rows": {}, "parameters": {}, "notes": []}
    for part in (measure_gla, measure_transformer, *[measure_fla] * fla):
        with emptied():
            part(results, sizes)
    return results


def measure_gla(results: dict, sizes: Sizes) -> None:
    prompts, model = sizes.draw(2), sizes.build(checked=True)
    check_ours(model, prompts)
    check_ours(fuse_projections(model), prompts)
    del model  # whose memory would be counted
    model = sizes.build()
    results["parameters"]["gla_ext"] = sum(p.numel() for p in model.parameters())
    for name, lengths in (("gla_ext", sizes.lengths[:1]), (FUSED, sizes.lengths)):
        if name == FUSED:
            fuse_projections(model)
        make = functools.partial(Ours, model)
        results["rows"][name] = {
            "batches": measure_batches(make, sizes),
            "lengths": measure_lengths(lambda _, make=make: make(1), sizes, lengths, True),
        }


def measure_transformer(results: dict, sizes: Sizes) -> None:
    check_transformer(sizes.build("Transformer++", checked=True), sizes.draw(2))
    model = sizes.build("Transformer++")
    results["parameters"][TRANSFORMER] = sum(p.numel() for p in model.parameters())
    of_batch = functools.partial(Attends, model, length=sizes.prompt + 1)
    of_length = functools.partial(Attends, model, 1)
    results["rows"][TRANSFORMER] = {
        "batches": measure_batches(of_batch, sizes),
        "lengths": measure_lengths(of_length, sizes, sizes.lengths, False),
    }


def measure_fla(results: dict, sizes: Sizes) -> None:
    """FLA's row, of the first length alone: it would take half an hour to the others."""
    try:
        few = sizes.build("FLA", checked=True)
    except ImportError as error:
        results["notes"].append(f"FLA's GLAForCausalLM cannot be imported here ({error}).")
        return
    check_fla(few, sizes)
    model = sizes.build("FLA")
    results["rows"]["FLA"] = {
        "batches": measure_batches(lambda _: FLA(model), sizes),
        "lengths": measure_lengths(lambda _: FLA(model), sizes, sizes.lengths[:1], True),
    }
