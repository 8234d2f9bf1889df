"""Training on many processes: the losses of one, checkpoints that any number goes on from.

Equal bits (see common.py): the same calls.
"""

import os
from unittest import mock

import pytest
import torch
from common import assert_close
from pool import Pool
from torch.distributed.tensor import DTensor

from gla_ext import train
from gla_ext.model.checkpoint import read_metadata
from gla_ext.train.data import load_corpus
from gla_ext.train.presets import Options
from gla_ext.train.trainer import Settings, Trainer

TINY = {"steps": 6, "batch_size": 4, "seq_len": 32, "hidden_size": 16, "layers": 2, "heads": 2}
TINY |= {"lr": 1e-2, "warmup": 2, "use_short_conv": True}
CPU = torch.device("cpu")


def sharded(folder, settings=TINY, compiled=False, **options):
    from gla_ext.train.ranks.processes import Processes

    settings, parallel = Settings(**settings), Processes("cpu")
    half = str(torch.distributed.get_world_size() // 2)
    nodes = {"LOCAL_WORLD_SIZE": half} if options.get("parallel") == "hybrid" else {}
    with mock.patch.dict(os.environ, nodes):
        parallel.lay_out(settings, Options(**{"parallel": "shard", "device": "cpu"} | options))
    return Trainer(settings, load_corpus(folder), CPU, compiled, parallel=parallel)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def run_steps(group, folder, sizes, out):
    """Trains 3 steps, saves a checkpoint, evaluates and trains 3 more; then a second trainer loads
    the checkpoint and trains the same 3 steps.

    Returns the first gradients, the losses of both trainers, the bits a byte at the checkpoint, and
    the weights, which only the first rank has.
    """
    first = sharded(folder, **sizes)
    first.loss(*first.batches(0)).backward()
    named = dict(first.model.named_parameters())
    gradients = {name: whole(p.grad) for name, p in named.items()}
    first.model.zero_grad()
    for _ in range(3):
        first.update()
    first.save(out)
    bits = first.evaluate()
    for _ in range(3):
        first.update()
    again = sharded(folder, **sizes)
    again.load(out)
    for _ in range(3):
        again.update()
    parameters = first.consolidated().model.state_dict()
    parameters = parameters if torch.distributed.get_rank() == 0 else {}
    return gradients, first._mean_losses(), again._mean_losses(), bits, parameters


def run_going_on(group, folder, sizes, path):
    trainer = sharded(folder, **sizes)
    trainer.load(path)
    while trainer.step < TINY["steps"]:
        trainer.update()
    return trainer._mean_losses()


def one_process(folder):
    """A trainer after all steps, its bits a byte in between, and the first gradients."""
    trainer = Trainer(Settings(**TINY), load_corpus(folder), CPU)
    trainer.loss(*trainer.batches(0)).backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
    trainer.optimizer.zero_grad()
    for _ in range(TINY["steps"]):
        trainer.update()
        if trainer.step == 3:
            bits = trainer.evaluate()
    return trainer, bits, gradients


SIZES = {
    "shards": {},
    "replicas": {"parallel": "replicate"},
    "hybrid": {"parallel": "hybrid"},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel": 2},
    "context and tensor": {"context_parallel": 2, "tensor_parallel": 2},
}


def assert_trains_as_one_process(processes, folder, path, sizes):
    trainer, bits, gradients = one_process(folder)
    for own, losses, again, found, parameters in processes(run_steps, folder, sizes, path):
        for name, gradient in gradients.items():
            assert_close(own[name], gradient, 1e-5, 1e-7, name=name)
        assert_close(losses, trainer.losses, 1e-5)
        if sizes.get("parallel") == "replicate":
            # Not the same calls: after its first update DDP puts gradients into other buckets, and
            # the place in one decides in which order gloo adds up those of four ranks.
            assert_close(again, losses, 1e-6)
        else:
            assert torch.equal(losses, again)
        assert found == pytest.approx(bits, rel=1e-5)
        if parameters:
            for name, x in trainer.model.state_dict().items():
                assert_close(parameters[name], x, 1e-3, name=name)
    named = [name] if (name := read_metadata(path).get("sharded")) else []
    assert [f.name for f in path.parent.glob("*.dcp")] == named
    assert bool(named) == (sizes.get("parallel") != "replicate")
    # As one process, whose own checkpoint is the next ones'.
    alone = Trainer(Settings(**TINY), load_corpus(folder), CPU)
    alone.load(path)
    alone.save(path)
    while alone.step < TINY["steps"]:
        alone.update()
    assert_close(alone.losses, trainer.losses, 1e-5)
    others = {} if sizes else {"tensor_parallel": 2}
    return trainer.losses, others


SLOW = ("hybrid", "tensor", "context")  # each of the last two is half of the last


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, sizes in SIZES.items()
    ],
)
def test_losses_gradients_and_weights_are_one_process_s(pool, folder, tmp_path, sizes):
    path = tmp_path / "checkpoint.safetensors"
    expected, others = assert_trains_as_one_process(pool, folder, path, sizes)
    for losses in pool(run_going_on, folder, others, path):
        assert_close(losses, expected, 1e-5)


def run_segments(group, folder, path, legs):
    """Trains to each step with a kind of its own, and goes on from the one before."""
    for last, kind in legs:
        trainer = sharded(folder, TINY | {"segments": 3, "packed": True}, True, parallel=kind)
        assert str(trainer.parallel).endswith("; not compiled with --segments")
        if path.exists():
            trainer.load(path)
        while trainer.step < last:
            trainer.update()
        trainer.save(path)
    return trainer._mean_losses()


def test_segments_and_packed_documents(pool, folder, tmp_path):
    """In the middle of a window the kind and the number of processes change."""
    path, settings = tmp_path / "checkpoint.safetensors", TINY | {"segments": 3, "packed": True}
    expected = Trainer(Settings(**settings), load_corpus(folder), CPU)
    while expected.step < TINY["steps"]:
        expected.update()
    pool(run_segments, folder, path, [(1, "shard"), (2, "replicate")])
    alone = Trainer(Settings(**settings), load_corpus(folder), CPU)
    alone.load(path)
    while alone.step < 4:
        alone.update()
    alone.save(path)
    for losses in pool(run_segments, folder, path, [(5, "replicate"), (6, "shard")]):
        assert_close(losses, expected.losses, 1e-5)


@pytest.fixture
def eight():
    """Processes for a mesh of three dimensions, each larger than 1."""
    processes = Pool(8)
    yield processes
    processes.stop()


@pytest.mark.slow
def test_a_mesh_of_three_dimensions(eight, pool, folder, tmp_path):
    """FSDP2 2, context 2 and tensor 2; what goes on from it are 4 processes, then 8 again, also as
    two nodes.
    """
    path = tmp_path / "checkpoint.safetensors"
    expected, _ = assert_trains_as_one_process(eight, folder, path, SIZES["context and tensor"])
    for losses in pool(run_going_on, folder, SIZES["tensor"], path):
        assert_close(losses, expected, 1e-5)
    for sizes in (SIZES["context"], {"parallel": "hybrid", "tensor_parallel": 2}):
        for losses in eight(run_going_on, folder, sizes, path):
            assert_close(losses, expected, 1e-5)


def compiled_trainer(folder, **sizes):
    """A trainer of compiled blocks, and a list that every graph made for them goes to."""
    graphs, aot_eager = [], torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def compile_block(block, **options):
        block._compiled_call_impl = torch.compile(block._call_impl, backend=backend, **options)

    torch._dynamo.reset()
    with mock.patch.object(torch.nn.Module, "compile", compile_block):
        return sharded(folder, compiled=True, **sizes), graphs


def run_compiled(group, folder, sizes):
    """The losses of some steps of compiled blocks, an evaluation among them."""
    trainer, _ = compiled_trainer(folder, **sizes)
    while trainer.step < 3:
        trainer.update()
    bits = trainer.evaluate()
    while trainer.step < TINY["steps"]:
        trainer.update()
    return trainer._mean_losses(), bits


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_compiled_blocks(pool, folder, sizes):
    trainer, bits, _ = one_process(folder)
    for losses, found in pool(run_compiled, folder, sizes):
        assert_close(losses, trainer.losses, 1e-5)
        assert found == pytest.approx(bits, rel=1e-5)


def test_an_evaluation_makes_no_graphs(one_rank, folder):
    """With a cache each block would be another graph; seven blocks were more than dynamo allows."""
    expected, bits, _ = one_process(folder)
    trainer, graphs = compiled_trainer(folder)
    while trainer.step < 3:
        trainer.update()
    made = len(graphs)
    assert made > 0
    assert trainer.evaluate() == pytest.approx(bits, rel=1e-5)
    while trainer.step < TINY["steps"]:
        trainer.update()
    assert len(graphs) == made
    assert_close(trainer._mean_losses(), expected.losses, 1e-5)


def run_bad(group, folder, sizes):
    """Whether updates are bad of which the last rank's second loss is no number, and whether the
    second one left the weights as they were.
    """
    trainer = sharded(folder, **sizes)
    original = trainer.loss

    def loss(*batch):
        is_bad = trainer.step == 1 and torch.distributed.get_rank() == 3
        return original(*batch) * (float("nan") if is_bad else 1)

    trainer.loss = loss
    trainer.update()
    before = [whole(p) for p in trainer.model.parameters()]
    trainer.update()
    kept = all(map(torch.equal, before, map(whole, trainer.model.parameters())))
    trainer.update()
    return trainer.bad[:3].tolist(), kept, trainer.has_finite_weights()


@pytest.mark.parametrize(
    "sizes",
    [{}, {"parallel": "replicate"}, {"context_parallel": 2, "tensor_parallel": 2}],
    ids=str,
)
def test_a_rank_s_bad_loss_is_everyone_s(pool, folder, sizes):
    assert pool(run_bad, folder, sizes) == [([0, 1, 0], True, True)] * 4


def run_refused(group, folder, settings, **options):
    with pytest.raises((NotImplementedError, ValueError)) as caught:
        sharded(folder, TINY | settings, **options)
    return str(caught.value)


TP, CP = "--tensor-parallel", "--context-parallel"
REFUSED = {
    "expected --no-cuda-graph on several processes, got --cuda-graph; an update is not recorded "
    "with what it sends": ({}, {"cuda_graph": True}),
    f"expected --segments 1 with {TP} 2, got another value": (
        *({"segments": 3}, {"tensor_parallel": 2}),
    ),
    f"expected --segments 1 with {CP} 4, got another value": (
        *({"segments": 3}, {"context_parallel": 4}),
    ),
    f"expected --no-packed with {CP} 2, got another value": (
        *({"packed": True}, {"context_parallel": 2}),
    ),
    f"expected --parallel shard with {TP} 2, got another value": (
        *({}, {"tensor_parallel": 2, "parallel": "replicate"}),
    ),
    "expected several nodes, of which --tensor-parallel times --context-parallel, 4 * 1, divides "
    "the processes, with --parallel hybrid, got 2 of 2": (
        *({}, {"tensor_parallel": 4, "parallel": "hybrid"}),
    ),
    "expected --batch-size to be a multiple of 4, the ranks of data parallel, got 6": (
        *({"batch_size": 6}, {}),
    ),
    "expected --seq-len to be a multiple of 2, the ranks of context parallel, got 31": (
        *({"seq_len": 31}, {"context_parallel": 2}),
    ),
    "expected --tensor-parallel times --context-parallel, 3 * 2, to divide the number of "
    "processes, got 4": ({}, {"tensor_parallel": 3, "context_parallel": 2}),
}


def test_what_is_refused(pool, tmp_path):
    (tmp_path / "text.py").write_text("pass\n" * 400)
    for expected, (settings, options) in REFUSED.items():
        assert pool(run_refused, tmp_path, settings, **options) == [expected] * 4


def test_one_process_takes_no_sizes(tmp_path, capsys):
    for flag, given, alone in (("--tensor-parallel", "2", "1"), ("--parallel", "shard", "auto")):
        assert train.main([flag, given, "--out", str(tmp_path), "--device", "cpu"]) == 2
        said = f"expected {flag} to be {alone} in one process, got {given}"
        assert said in capsys.readouterr().err
