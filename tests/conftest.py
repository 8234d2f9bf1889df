import os
import random
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from cuda_tools import built_for_hopper
from fla_kernels import import_fla, require_kernels

import gla_ext.fla
from gla_ext import _C
from gla_ext.cache import _tokens
from gla_ext.decode._loop import DecodeLoop
from gla_ext.ops import chunk as ops
from gla_ext.train.data import load_corpus

# What cuBLAS asks for under nan_in_fresh_memory; read when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Inductor compiles in this process: its pool would be one more with torch for each worker.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=40, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def why_no_cuda() -> str | None:
    """Why tests marked `cuda` cannot run here, or None if they can."""
    if _C.build_info()["cuda"] is None:
        return "this build of gla_ext has no CUDA kernels"
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    return None


PATHS = ("plan", "steps")
KEPT, AGAIN = "kept", "made again"
CACHED_BYTES = 2 << 30  # what torch's allocator may keep on the GPU from one test to the next
HEADS = {"K20-V28": (20, 28), "K24-V40": (24, 40)}


def pytest_generate_tests(metafunc):
    """A test that takes a `device` runs on CPU and, in a variant marked `cuda`, on CUDA. One that
    takes a `head` runs with a K and V that no fast path takes and, where there is a fast path, with
    a K and V that it takes. One that takes a `path` runs on the plan's path and, where that may be
    another, on CUDA's steps.
    """
    if "device" in metafunc.fixturenames:
        cuda = [] if why_no_cuda() else [pytest.param("cuda", marks=pytest.mark.cuda)]
        metafunc.parametrize("device", ["cpu", *cuda])
    if "head" in metafunc.fixturenames:
        metafunc.parametrize("head", HEADS.values(), ids=HEADS)
    if "path" in metafunc.fixturenames:
        metafunc.parametrize("path", PATHS, indirect=True)


def pytest_report_header() -> str | None:
    reason = why_no_cuda()
    return f"{reason}: what is marked cuda is left out" if reason else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One worker takes a whole file of tests/distributed, whose tests share a pool of processes."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.startswith("tests/distributed/") else nodeid

    return Scheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_modifyitems(items):
    """Drops variants in fp64 on CUDA, which has no kernels for it, and variants that would run the
    same kernels twice. Without a GPU it drops all tests that need one: half of all tests would be
    reported as skipped.
    """
    no_cuda = why_no_cuda() is not None
    items[:] = [
        x for x in items if _runs(_parameters(x)) and not (no_cuda and x.get_closest_marker("cuda"))
    ]


def _runs(parameters: dict) -> bool:
    on_cpu = parameters.get("device") == "cpu"
    if parameters.get("dtype") == torch.float64 and parameters.get("device") == "cuda":
        return False
    K, V = parameters.get("head", (parameters.get("K", 8), parameters.get("V", 8)))
    may_be_fused = (
        not on_cpu
        and parameters.get("dtype", torch.bfloat16) == torch.bfloat16
        and parameters.get("layout") != "misaligned"
        and K % 8 == V % 8 == 0
        and K <= 256
    )
    another = parameters.get("path") == "steps" or parameters.get("head") == HEADS["K24-V40"]
    has_operands = parameters.get("K", 128) > 64
    return (may_be_fused or not another) and (has_operands or parameters.get("operands") != AGAIN)


def _parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture
def path(request, monkeypatch) -> str:
    """Where CUDA's bf16 calls go: wherever the plan says, or to the steps."""
    if request.param == "steps":
        monkeypatch.setenv("GLA_EXT_CUDA_PATH", "steps")
    return request.param


@pytest.fixture
def keep_nothing(monkeypatch):
    """A function that has backward on CUDA make all again from then on."""
    return lambda: monkeypatch.setattr(ops, "_for_backward_bytes", 0)


@pytest.fixture(params=[KEPT, AGAIN])
def operands(request, keep_nothing) -> str:
    """Whose operands backward on CUDA takes: those that forward has left, or its own."""
    if request.param == AGAIN:
        keep_nothing()
    return request.param


def pytest_runtest_setup():
    """A test compiles anew: a function's graphs are counted over all tests of a process."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def pytest_runtest_teardown(item):
    """Leaves the GPU's memory to other workers (pytest -n): torch's cache would only grow."""
    if item.get_closest_marker("cuda") and torch.cuda.memory_reserved() > CACHED_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def hopper():
    """Skips where the fused path's kernels cannot run."""
    if torch.cuda.get_device_capability() != (9, 0) or not built_for_hopper():
        pytest.skip("needs a GPU of compute capability 9.0 and a build for 9.0a")


ACCURACY = pytest.StashKey[dict]()


@pytest.fixture
def accuracy(request) -> dict:
    """Errors by (row, quantity), the worst of the run: what `pytest_terminal_summary` prints."""
    return request.config.stash.setdefault(ACCURACY, {})


def pytest_terminal_summary(terminalreporter, config):
    """The table of csrc/cuda/ACCURACY.md, as Markdown, after a run that measured it."""
    if errors := config.stash.get(ACCURACY, None):
        rows, columns = (list(dict.fromkeys(x)) for x in zip(*errors, strict=True))
        terminalreporter.section("relative RMS error against the fp64 recurrence")
        terminalreporter.line(f"| dtype | gates | {' | '.join(columns)} |")
        terminalreporter.line("|---|---|" + "--:|" * len(columns))
        for row in rows:
            cells = " | ".join(f"{errors[row, x]:.1e}" for x in columns)
            terminalreporter.line(f"| {' | '.join(row)} | {cells} |")


@pytest.fixture
def nan_in_fresh_memory():
    """Makes torch fill what it allocates without a value with NaN, so that nothing goes unwritten.

    It warns only: what the reference uses on CUDA is not deterministic there, as torch sees it.
    The emulated GPU's memory is so by itself, and runs none of torch's kernels.
    """
    if "GLA_EMULATOR_PTX" in os.environ:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fla():
    """flash-linear-attention as it is, and again afterwards."""
    yield import_fla()
    gla_ext.fla.restore_fla()


@pytest.fixture
def kernels(device, fla):
    """FLA on a device that its kernels run on."""
    require_kernels(device)
    return fla


@pytest.fixture
def calls(monkeypatch):
    """The names of gla_ext's operators, as they are called by what stands for FLA's."""
    made, call = [], gla_ext.fla.accelerate._call

    def counted(operator, *args, **kwargs):
        made.append(operator.__name__)
        return call(operator, *args, **kwargs)

    monkeypatch.setattr(gla_ext.fla.accelerate, "_call", counted)
    return made


def _words(seed: int, count: int) -> bytes:
    choose = random.Random(seed).choice
    return " ".join(choose(["def", "return", "x", "y", "+", "\n"]) for _ in range(count)).encode()


def _write_texts(folder: Path) -> Path:
    """Writes twelve text files into a new folder, two of them in another one inside."""
    for i in range(12):
        file = folder / ("sub" if i < 2 else ".") / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_words(i, 200 + 10 * i))
    return folder


@pytest.fixture(scope="session")
def texts():
    """A function that writes text files into a new folder, always the same."""
    return _write_texts


@pytest.fixture
def folder(tmp_path):
    """A folder of text files."""
    return _write_texts(tmp_path / "text")


@pytest.fixture
def corpus(folder):
    return load_corpus(folder)


@pytest.fixture
def one_rank():
    """A device mesh of this process alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def buffers(monkeypatch):
    """Decoders and engines of any size, on any device, keep tokens beside their states."""
    monkeypatch.setattr(_tokens, "FEWEST_ROWS", 1)
    monkeypatch.setattr(_tokens, "DEVICES", ("cpu", "cuda"))


@pytest.fixture
def captures(monkeypatch):
    """The batch sizes of the graphs that were captured."""
    found, capture = [], DecodeLoop.capture

    def spy(self, *models):
        found.append(self.tokens.shape[0])
        capture(self, *models)

    monkeypatch.setattr(DecodeLoop, "capture", spy)
    return found
