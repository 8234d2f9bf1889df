"""Runs on prepared corpora: the order of the data does not depend on the number of processes."""

import pytest
import torch
from common import assert_close
from corpora import documents, prepare
from pool import Pool

from gla_ext.train.presets import Options
from gla_ext.train.tokens.corpus import open_corpus
from gla_ext.train.trainer import Settings, Trainer

SIZES = {"steps": 6, "batch_size": 12, "seq_len": 32, "hidden_size": 16, "layers": 1, "heads": 2}
SIZES |= {"lr": 1e-2, "warmup": 2, "packed": True, "tokens_per_update": 2 * 12 * 32}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """--data with two corpora."""
    root, args = tmp_path_factory.mktemp("corpora"), ["--workers", 1, "--held-out", 0.1]
    for name, count in (("a", 60), ("b", 40)):
        (root / f"{name}.txt").write_text("<D>".join(documents(count, seed=count)))
        args = ["--tokenizer", "bytes", "--delimiter", "<D>", *args[-4:]]
        prepare(root / f"{name}.txt", "--out", root / name, *args)
    return [f"{root}/a:0.7", f"{root}/b:0.3"]


def run_from(group, data, path, first, last, sizes):
    """Goes on from a step with the checkpoint at path, to another step, and saves there; the rows
    of the last step that are this rank's, and the losses.
    """
    from gla_ext.train.ranks.processes import Processes

    settings, parallel = Settings(**SIZES), Processes("cpu")
    parallel.lay_out(settings, Options(**{"parallel": "shard", "device": "cpu"} | sizes))
    trainer = Trainer(settings, open_corpus(data, parallel.size), CPU, parallel=parallel)
    return go_on(trainer, path, first, last)


def go_on(trainer, path, first, last):
    if first:
        trainer.load(path)
    assert trainer.step == first
    while trainer.step < last:
        rows = trainer.batches(trainer.step)[0]
        trainer.update()
    trainer.save(path)
    return rows, trainer._mean_losses()[:last]


def assert_goes_on(data, path, legs):
    """Each leg is a pool and its sizes, or None for this process, and takes some of the steps."""
    alone = Trainer(Settings(**SIZES), open_corpus(data), CPU)
    for _ in range(6):
        alone.update()
    ends = range(6 // len(legs), 7, 6 // len(legs))
    for first, last, (pool, sizes) in zip([0, *ends], ends, legs, strict=False):
        if pool is None:
            trainer = Trainer(Settings(**SIZES), open_corpus(data), CPU)
            found = [go_on(trainer, path, first, last)]
        else:
            found = pool(run_from, data, path, first, last, sizes)
        rows = torch.cat([rows for rows, _ in found[:: sizes.get("tensor_parallel", 1)]])
        assert torch.equal(rows, alone.batches(last - 1)[0])
        for _, losses in found:
            assert_close(losses, alone.losses[:last], 1e-5)


def test_another_number_of_processes_goes_on_at_the_very_sample(pool, data, tmp_path):
    """Also of another kind."""
    legs = [(pool, {}), (None, {}), (pool, {"tensor_parallel": 2})]
    assert_goes_on(data, tmp_path / "checkpoint.safetensors", legs)
    legs = [(pool, {}), (pool, {"parallel": "replicate"}), (pool, {})]
    assert_goes_on(data, tmp_path / "checkpoint.safetensors", legs)


@pytest.mark.slow
def test_two_and_three_processes(data, tmp_path):
    two, three = Pool(2), Pool(3)
    try:
        legs = [(two, {}), (three, {}), (three, {"parallel": "replicate"}), (None, {})]
        assert_goes_on(data, tmp_path / "checkpoint.safetensors", legs)
    finally:
        two.stop()
        three.stop()
