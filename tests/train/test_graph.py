"""Training steps as CUDA graphs: `train.graph` and the trainer over it."""

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import trainers
from capturing import Device
from cuda_tools import waits_for_nothing

from gla_ext.decode import _capture
from gla_ext.devices import in_fixed_order
from gla_ext.train import command as train
from gla_ext.train import trainer
from gla_ext.train.graph import GraphedUpdate, check_graph
from gla_ext.train.presets import Options

WINDOWS = [{}, {"segments": 3}, {"packed": True}, {"segments": 3, "packed": True}]
SIZES = {"steps": 12, "seq_len": 16, "hidden_size": 32, "layers": 2}
make_trainer = functools.partial(
    trainers.make_trainer, **SIZES, warmup=2, schedule="cosine", lr=1e-2
)


def test_elsewhere_than_on_a_gpu_it_is_refused(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--cuda-graph", "--out", str(out), "--steps", "1"]
    assert train.main(arguments) == 2
    expected = "expected --device to be cuda with --cuda-graph, got cpu"
    assert expected in capsys.readouterr().err
    with pytest.raises(ValueError, match=expected):
        make_trainer(cuda_graph=True)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(ValueError, match="expected no PYTORCH_NO_CUDA_MEMORY_CACHING"):
        check_graph(torch.device("cuda"))


def test_going_on_keeps_the_flag(tmp_path):
    given = {"device": "cuda", "compile": False, "cuda_graph": True}
    command = train._command_to_go_on(given, Options(out=tmp_path))
    assert command[-4:] == ["--device", "cuda", "--no-compile", "--cuda-graph"]
    assert "--no-cuda-graph" in train._command_to_go_on({"cuda_graph": False}, Options())
    given = {"preset": "gla-tiny", "steps": 9, "keep": 3, "prompt": "-x", "log": ["wandb"]}
    command = train._command_to_go_on(given | {"overwrite": True}, Options(out=tmp_path))
    kept = ["--prompt=-x", "--save-every", "100", "--keep", "3", "--log", "wandb"]
    assert command[command.index("--resume") + 1 :] == kept


class Replayed(GraphedUpdate):
    """A graph as the CPU can have one: every call reads and writes the tensors of the first."""

    def _first_calls(self):
        where = [p.data_ptr() for p in self._update.__self__.model.parameters()]
        self._result = self._update(*self._batch)
        assert where == [p.data_ptr() for p in self._update.__self__.model.parameters()]


@pytest.mark.parametrize("options", WINDOWS)
def test_a_step_on_tensors_that_stay_is_the_same(monkeypatch, options):
    monkeypatch.setattr(trainer, "check_graph", lambda device: None)
    monkeypatch.setattr(trainer, "GraphedUpdate", Replayed)
    plain, graphed = (make_trainer(cuda_graph=flag, **options) for flag in (False, True))
    states = []
    for _ in range(12):
        plain.update()
        graphed.update()
        if "segments" in options:
            states.append([id(entry["recurrent_state"]) for entry in graphed.segmented.states])
    assert all(ids == states[0] for ids in states)
    rates = [group["lr"] for group in graphed.optimizer.param_groups]
    assert all(isinstance(rate, torch.Tensor) for rate in rates)
    assert rates[0].item() == pytest.approx(plain.optimizer.param_groups[0]["lr"])
    torch.testing.assert_close(graphed.losses, plain.losses, rtol=1e-4, atol=1e-5)
    assert plain.losses[-1] < plain.losses[0]


class Stream:
    """A stream as the CPU can have one."""

    def __init__(self, number):
        self.cuda_stream = number

    def wait_stream(self, other):
        pass


def test_a_graph_has_workspaces_of_its_own(monkeypatch):
    gpu, current, done = Device(), [Stream(7)], []
    streams = (Stream(8), Stream(9))

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def update(x):
        done.append("capture" if gpu.capturing else "warm up")
        return x

    gpu.graph_class.replay = lambda self: None
    monkeypatch.setattr(torch.cuda, "CUDAGraph", gpu.graph_class)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(_capture, "_own_streams", lambda device: streams)
    monkeypatch.setattr(_capture, "_begin", lambda graph, pool: graph.capture_begin(pool))
    monkeypatch.setattr(_capture._C, "drop_workspaces", done.append)
    device, x, elsewhere = torch.device("cuda"), torch.ones(1), Stream(10)
    first, second = (GraphedUpdate(update, device) for _ in range(2))
    for _ in range(_capture.WARMUPS + 1):  # in turn, so that they take the same stream
        first(x)
        with on(elsewhere):
            second(x)
    assert first.recorded and second.recorded
    assert done == ["warm up"] * 4 + [8, "capture", 8] * 2


@pytest.mark.cuda
def test_a_graph_outlives_torchs_workspaces():
    """torch.compile's graphs free all that torch has."""
    sizes = {"batch_size": 64, "seq_len": 256, "hidden_size": 256, "dtype": "float32", "steps": 12}
    with in_fixed_order(torch.device("cuda")):
        losses = []
        for clear in (False, True):
            run = make_trainer(device="cuda", cuda_graph=True, **sizes)
            for _ in range(6):
                run.update()
            torch.cuda.synchronize()
            if clear:
                torch._C._cuda_clearCublasWorkspaces()
            with torch.cuda.stream(run.graphs[0]._stream):  # which gets the memory they had
                there = [torch.full((2**23,), 3.0, device="cuda") for _ in range(4)]
            torch.cuda.synchronize()
            for _ in range(6):
                run.update()
            assert all((x == 3).all() for x in there)
            losses.append(run.losses.tolist())
            del there
        assert losses[0] == losses[1]


@pytest.mark.cuda
def test_runs_in_threads_equal_runs_alone():
    """They warm up in turn and replay at the same time products whose sums are in a workspace."""
    sizes = {"batch_size": 64, "seq_len": 256, "hidden_size": 256, "dtype": "float32"}
    sizes |= {"steps": 300, "lr": 1e-3}  # enough to find a workspace that they share

    def make(seed):
        run = make_trainer(device="cuda", cuda_graph=True, seed=seed, **sizes)
        torch.cuda.synchronize()
        return run

    def train_on(run):
        with torch.cuda.stream(streams[run.settings.seed]):
            while run.step < run.settings.steps:
                run.update()
            return run.losses.tolist()

    with in_fixed_order(torch.device("cuda")):
        streams = [torch.cuda.Stream() for _ in range(3)]
        alone = [train_on(make(seed)) for seed in range(3)]
        runs = [make(seed) for seed in range(3)]
        for _ in range(_capture.WARMUPS + 1):
            for run in runs:
                with torch.cuda.stream(streams[run.settings.seed]):
                    run.update()
        with ThreadPoolExecutor(len(runs)) as pool:
            assert list(pool.map(train_on, runs)) == alone


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", WINDOWS)
def test_graphed_steps_equal_the_eager_ones(options, compiled, tmp_path):
    eager = make_trainer(device="cuda", **options)
    graphed = make_trainer(device="cuda", cuda_graph=True, compiled=compiled, **options)
    for _ in range(12):
        eager.update()
        graphed.update()
        assert graphed.evaluate() == pytest.approx(eager.evaluate(), rel=1e-3)
    assert all(graph.recorded for graph in graphed.graphs)
    torch.testing.assert_close(graphed.losses, eager.losses, rtol=1e-3, atol=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("options", WINDOWS)
def test_a_resumed_graphed_run_equals_the_uninterrupted_one(options, tmp_path):
    whole = make_trainer(device="cuda", cuda_graph=True, **options)
    for step in range(12):
        if step == 7:  # inside a window
            whole.save(tmp_path / "first")
        whole.update()
    rest = make_trainer(device="cuda", cuda_graph=True, **options)
    for _ in range(4):
        rest.update()
    rest.load(tmp_path / "first")  # after its own graph, which is of other tensors
    for _ in range(5):
        rest.update()
    torch.testing.assert_close(rest.losses, whole.losses, rtol=1e-4, atol=1e-4)
    for a, b in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.cuda
def test_a_replayed_step_waits_for_nothing():
    run = make_trainer(device="cuda", cuda_graph=True, dtype="bfloat16")
    for _ in range(4):
        run.update()
    with waits_for_nothing():
        for _ in range(8):
            run.update()
    assert run.losses.isfinite().all()


@pytest.mark.cuda
@pytest.mark.skipif(_capture.DRAWS_ARE_RECORDED, reason="torch before 2.14 records no draws")
def test_what_cannot_be_replayed_is_refused():
    weight = torch.ones(3, device="cuda", requires_grad=True)
    x = torch.ones(3, device="cuda")

    def drops(x):
        return torch.nn.functional.dropout(weight * x).sum().detach()

    step = GraphedUpdate(drops, x.device)
    for _ in range(2):
        step(x)
    with pytest.raises(NotImplementedError, match="expected a model without dropout"):
        step(x)
    with pytest.raises(ValueError, match=r"to be \(3,\), got \(2,\)"):
        step(x[:2])


@pytest.mark.cuda
def test_the_command_with_graphs(folder, tmp_path):
    sizes = ["--steps", "6", "--batch-size", "2", "--seq-len", "32", "--hidden-size", "32"]
    command = [*sizes, "--heads", "2", "--layers", "1", "--sample-bytes", "4", "--no-compile"]
    where = ["--data", str(folder), "--out", str(tmp_path)]
    assert train.main([*where, *command, "--cuda-graph"]) == 0
    assert (tmp_path / "metrics.json").exists()
