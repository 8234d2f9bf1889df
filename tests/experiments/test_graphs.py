"""Steps of the experiments' models as CUDA graphs, beside the same steps without."""

import dataclasses
import functools

import experiment_runs
import pytest
import torch

from experiments import borrowed
from experiments.comparisons import mqar
from experiments.language import LanguageTrainer
from experiments.models import LAYERS
from experiments.perform import perform
from experiments.recall import RecallTrainer
from gla_ext.train.data import Corpus

pytestmark = pytest.mark.cuda
STEPS = 8
SIZES = {"width": 64, "layers": 2, "seq_len": 64, "batch_size": 64, "steps": STEPS, "lr": 3e-3}
RECALL = dataclasses.replace(  # one batch, whose loss falls at once
    experiment_runs.RECALL, pairs=4, examples=64, **SIZES
)
CORPUS = Corpus("words", (("a", b"some words of text\n" * 200),), (("b", b"more words\n" * 20),))


def assert_same_losses(make, evaluate):
    runs = [make(cuda_graph) for cuda_graph in (False, True)]
    for run in runs:
        for _ in range(STEPS):
            run.update()
    eager, graphed = runs
    assert all(graph.recorded for graph in graphed.graphs)
    # Sums of embeddings' gradients have no fixed order, and products are bf16.
    torch.testing.assert_close(graphed.losses, eager.losses, rtol=2e-3, atol=2e-3)
    assert eager.losses[-1] < eager.losses[0] - 0.1
    assert evaluate(graphed) == pytest.approx(evaluate(eager), rel=1e-2, abs=1e-2)


@pytest.mark.parametrize("layer", [*mqar.LAYERS, "hyena", *borrowed.NAMES])
def test_recall(layer):
    run, device = dataclasses.replace(RECALL, layer=layer), torch.device("cuda")
    make = functools.partial(RecallTrainer, run, device)
    assert_same_losses(make, lambda trainer: trainer.evaluate())


def test_rwkv_at_a_size_for_mix_order_reductions():
    sizes = {"layer": "rwkv", "width": 256, "seq_len": 512}
    make = functools.partial(
        RecallTrainer, dataclasses.replace(RECALL, **sizes), torch.device("cuda")
    )
    assert_same_losses(make, lambda trainer: trainer.evaluate())
    assert not torch._inductor.config.triton.mix_order_reduction


@pytest.mark.parametrize("layer", LAYERS)
def test_text(layer):
    sizes = {"seq_len": 128, "batch_size": 4, "heads": 1, "pairs": 0, "examples": 0, "tied": False}
    run = dataclasses.replace(RECALL, task="text", layer=layer, **sizes)
    make = functools.partial(LanguageTrainer, run, CORPUS, torch.device("cuda"))
    # Attention goes on from no state, as `evaluate` would: it is scored on whole documents.
    assert_same_losses(make, lambda trainer: trainer.score(trainer.bits_by_position()))


def test_a_run_ends_with_a_score():
    result = perform(RECALL, None, torch.device("cuda"), cuda_graph=True)
    assert 0 <= result.score <= 1
    assert result.details["steps_done"] == STEPS
