"""`shard_model` in a loop of one's own, and what `--parallel auto` takes."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import assert_close
from models import make_ids, make_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from gla_ext.distributed import shard_model
from gla_ext.model import GLAForCausalLM
from gla_ext.train.presets import RECIPES, Settings
from gla_ext.train.ranks import memory

OPTIONS = {"num_hidden_layers": 5, "use_short_conv": True, "tie_word_embeddings": True}


def one_process():
    """Norms, losses and weights of three updates."""
    model, ids = make_model(torch.float64, **OPTIONS).train(), make_ids(B=8, T=12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms, losses = [], []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, losses, dict(model.named_parameters())


def run_own_loop(group, sizes, blocks_per_group, reshard):
    """The same from two parts of a batch, and what each part sent."""
    model, rank = make_model(torch.float64, **OPTIONS).train(), dist.get_rank()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("nodes", "ranks")[-len(sizes) :])
    options = {"reshard_after_forward": reshard}
    shards = shard_model(model, mesh, blocks_per_group, **options)
    optimizer = torch.optim.AdamW(shards.parameters.values(), lr=1e-2, fused=True)
    norms, losses, sent = [], [], []
    for _ in range(3):
        total = 0.0
        for last, ids in zip(
            (False, True), make_ids(B=8, T=12).chunk(4)[rank].chunk(2), strict=True
        ):
            with shards.part(last), CommDebugMode() as communication:
                loss = model(ids, labels=ids).loss / 2
                loss.backward()
            total += loss.detach()
            sent.append(communication.get_total_counts())
        norms.append(shards.clip_gradients(0.1).item())
        dist.all_reduce(total)
        losses.append(total.item() / 4)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.full_tensor() for name, p in shards.whole.items()}
    return norms, losses, weights, sent


@pytest.mark.parametrize(
    ("sizes", "blocks_per_group", "reshard"),
    [((4,), 1, False), ((4,), 2, True), ((2, 2), 4, False), ((4,), 9, False)],
    ids=str,
)
def test_a_loop_of_one_s_own(pool, sizes, blocks_per_group, reshard):
    expected = one_process()
    for norms, losses, weights, sent in pool(run_own_loop, sizes, blocks_per_group, reshard):
        assert norms == pytest.approx(expected[0], rel=1e-9)
        assert losses == pytest.approx(expected[1], rel=1e-9)
        for name, x in weights.items():
            assert_close(x, expected[2][name], 1e-9, name=name)
        groups = -(-5 // blocks_per_group) + 1
        gathers = groups * (1 if not reshard else 2)
        reduces = groups * len(sizes)
        if not reshard:
            assert sent == [groups, reduces] * 3
        else:
            assert sent[0] <= gathers and sent[1] > reduces


def run_refused(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    for model, count, error, said in (
        (torch.nn.Linear(2, 2), 1, TypeError, "blocks in model.model.layers, got Linear"),
        (make_model(), 0, ValueError, "blocks_per_group to be at least 1, got 0"),
    ):
        with pytest.raises(error, match=f"^shard_model: expected .*{said}"):
            shard_model(model, mesh, count)


def test_what_is_refused(pool):
    pool(run_refused, ranks=1)


GPU = 80_000_000_000
# Preset, rows of a process, processes of each kind: what auto takes.
CASES = [
    ("gla-340m", 16, {"shard": 4}, "replicate"),
    ("gla-340m", 64, {"shard": 4}, "shard"),  # activations alone do not fit, nor do shards
    ("gla-1.3b", 8, {"shard": 8}, "replicate"),
    ("gla-1.3b", 14, {"shard": 8}, "shard"),
    ("gla-1.3b", 14, {"hybrid": 8, "shard": 16}, "hybrid"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_auto(case):
    name, rows, others, expected = case
    ranks = {"replicate": 1} | others
    sizes = {key: RECIPES[name][key] for key in ("layers", "heads", "hidden_size")}
    with torch.device("meta"):
        model = GLAForCausalLM(Settings(**sizes).model_config(32_000))
    kind, reason = memory.choose(model, True, rows * 2048, GPU, ranks)
    assert kind == expected
    taken = sum(p.numel() for p in model.parameters()) * (16 / ranks[kind] + 2) / 1e9
    assert f"optimizer {taken:.2f} GB a rank" in reason and "of 72.0 usable" in reason


def test_auto_counts_gathered_weights():
    """In fp32 too, where a replica needs no other weights than its own."""
    model, ranks = make_model(), {"replicate": 1, "hybrid": 4, "shard": 16}
    parameters = sum(p.numel() for p in model.parameters())
    for bytes_each, expected in ((16.1, "replicate"), (15.9, "hybrid"), (7.9, "shard")):
        there = int(parameters * bytes_each / memory.SHARE)
        kind, _ = memory.choose(model, False, 0, there, ranks)
        assert kind == expected


@pytest.mark.parametrize("bf16", [False, True])
def test_auto_counts_whole_gradients(bf16):
    """Those of shards, while an update has several passes; a replica takes what it did."""
    model, ranks = make_model(), {"replicate": 1, "hybrid": 4, "shard": 16}
    parameters, weight = sum(p.numel() for p in model.parameters()), 2 if bf16 else 4
    for count, kind in ((1, "replicate"), (4, "hybrid"), (16, "shard")):
        each = 12 / count + 4 + weight * (bf16 or count > 1)
        there = int(parameters * (each + 0.1) / memory.SHARE)
        found, reason = memory.choose(model, bf16, 0, there, ranks, accumulates=True)
        assert found == kind and f"optimizer {parameters * each / 1e9:.2f} GB" in reason
        if kind != "shard":  # which is taken, fit or not
            there = int(parameters * (each - 0.1) / memory.SHARE)
            assert memory.choose(model, bf16, 0, there, ranks, accumulates=True)[0] != kind


def run_auto(group, folder, nodes, tensor_parallel, passes=1):
    from test_training import TINY, sharded

    settings = TINY | {"tokens_per_update": passes * TINY["batch_size"] * TINY["seq_len"]}
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(4 // nodes)}):
        trainer = sharded(folder, settings, parallel="auto", tensor_parallel=tensor_parallel)
    return str(trainer.parallel)


def run_auto_of_passes(group, folder, bytes_each):
    """What it takes with 1 and 2 passes, if a process has so many bytes a parameter."""

    def choose(model, bf16, tokens, memory_of_one, *rest):
        parameters = sum(p.numel() for p in model.parameters())
        there = int(bytes_each * parameters / memory.SHARE)
        return memory.choose(model, bf16, 0, there, *rest)

    with mock.patch("gla_ext.train.ranks.processes.choose", choose):
        return [run_auto(group, folder, 2, 1, passes) for passes in (1, 2)]


def test_auto_says_why(pool, folder):
    fits = "--parallel replicate: weights, gradients and optimizer 0.00 GB a rank"
    for text in pool(run_auto, folder, 2, 1):
        assert text.startswith(f"4 on 2 nodes, 4 x data, 1 x context, 1 x tensor; {fits}")
    for text in pool(run_auto, folder, 1, 2):
        assert text.endswith("2 x tensor; --parallel shard, because --tensor-parallel needs it")


def test_auto_knows_of_passes(pool, folder):
    """Two nodes of two in fp32: 12 bytes a parameter for one pass, 14 for several."""
    for texts in pool(run_auto_of_passes, folder, 13):
        kinds = [text.partition("--parallel ")[2].partition(":")[0] for text in texts]
        assert kinds == ["hybrid", "shard"]


def test_memory_of_a_host():
    assert memory.memory_of(torch.device("cpu"), 4) == memory.memory_of(torch.device("cpu"), 1) // 4
