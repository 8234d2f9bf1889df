"""Recall: its examples, the order of its runs, and its page while they are done."""

from dataclasses import replace

import pytest
import torch
from experiment_runs import RECALL, result

from experiments import run
from experiments.comparisons import mqar
from experiments.recall import VOCAB_SIZE, Passes, Recall, RecallTrainer
from experiments.runs import Results, keep

CPU = torch.device("cpu")


def test_recall_asks_for_every_key_once():
    tokens, values = Recall(64, 8).examples(100, seed=3, device=CPU)
    assert tokens.shape == values.shape == (100, 64)
    half = VOCAB_SIZE // 2
    for row, answers in zip(tokens.tolist(), values.tolist(), strict=True):
        pairs = dict(zip(row[0:16:2], row[1:16:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == 8
        assert all(1 <= key < half <= value < VOCAB_SIZE for key, value in pairs.items())
        asked = {place: value for place, value in enumerate(answers) if value != -100}
        assert sorted(row[place] for place in asked) == sorted(pairs)
        assert all(pairs[row[place]] == value for place, value in asked.items())
        assert all(place >= 16 and place % 2 == 0 for place in asked)
        assert all(row[place] == 0 for place in range(16, 64) if place not in asked)
    again = Recall(64, 8).examples(100, seed=3, device=CPU)
    assert torch.equal(tokens, again[0])
    assert torch.equal(values, again[1])
    assert not torch.equal(tokens, Recall(64, 8).examples(100, seed=4, device=CPU)[0])
    with pytest.raises(ValueError, match=r"at least 4 \* pairs = 32, got 30"):
        Recall(30, 8)


def test_recall_asks_by_a_power_law():
    space, count = 24, 4000
    _, values = Recall(2 + 2 * space, 1).examples(count, seed=0, device=CPU)
    gaps = (values != -100).int().argmax(1).sub(2).div(2, rounding_mode="floor")
    share = torch.bincount(gaps, minlength=space) / count
    p = torch.arange(1, space + 1, dtype=torch.float64) ** (0.01 - 1)
    assert torch.allclose(share.double(), p / p.sum(), atol=0.03)


def test_a_pass_takes_every_example_once():
    tokens = torch.arange(11, dtype=torch.int16).view(11, 1)
    batches = Passes(tokens, -tokens, batch_size=3, seed=5)
    passes = []
    for step in range(6):
        inputs, targets = batches(step)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, -inputs)
        passes.append(inputs.flatten().tolist())
    for first in (0, 3):  # three whole batches a pass
        assert len({*passes[first], *passes[first + 1], *passes[first + 2]}) == 9
    assert passes[:3] != passes[3:]
    assert batches(1)[0].flatten().tolist() == passes[1]
    again = Passes(tokens, -tokens, batch_size=3, seed=6)
    assert again(0)[0].flatten().tolist() != passes[0]


def test_recall_trains_on_its_examples_alone():
    trainer = RecallTrainer(RECALL, CPU)
    seen = [row for step in range(12) for row in trainer.batches(step)[0].tolist()]
    other = RecallTrainer(replace(RECALL, seed=1), CPU)
    held_out, others = trainer.held_out[0].tolist(), other.batches(0)[0].tolist()
    assert len({tuple(row) for row in seen}) == len(held_out) == 5
    assert not any(row in seen for row in held_out + others)
    assert other.held_out[0].tolist() == held_out
    assert trainer.model.lm_head.weight is trainer.model.model.embeddings.weight
    inputs, targets = trainer.batches(0)
    logits = trainer.model(inputs).logits
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(trainer.loss(inputs, targets), nats)


@pytest.mark.parametrize("layer", ["gla", "mamba"])
def test_embeddings_have_torchs_gradient(layer, device):
    trainer = RecallTrainer(replace(RECALL, layer=layer), torch.device(device))
    (embedding,) = (x for x in trainer.model.modules() if isinstance(x, torch.nn.Embedding))
    tokens, _ = trainer.task.examples(400, seed=0, device=trainer.device)
    assert (tokens == 0).float().mean() > 0.4
    dy = torch.randn(*tokens.shape, embedding.embedding_dim, device=device)
    weight = embedding.weight
    outputs = embedding(tokens), torch.nn.functional.embedding(tokens, weight)
    assert [type(y.grad_fn).__name__ for y in outputs] == [
        "_EmbeddingBackward",
        "EmbeddingBackward0",
    ]
    torch.testing.assert_close(*outputs)
    found, expected = (torch.autograd.grad(y, weight, dy)[0] for y in outputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_page_of_what_is_done_so_far(tmp_path):
    size = mqar.SCALES["full"]
    task, rate = size.difficulties[1], size.rates[1]
    begun = mqar._run(size, task, size.swept_width, "gla", rate)
    keep(result(begun, 0.75), tmp_path)
    page = mqar.report("full", Results([tmp_path]), "", tmp_path)
    row = f"| {task[0]}, {task[1]} | GLA | {rate:g} (best of 1) |  | 0.750 (n = 1) |  |  |"
    assert page.splitlines()[4:] == [row]
    assert (tmp_path / "experiments_mqar.png").is_file()


def test_all_widths_come_before_other_seeds():
    size = mqar.SCALES["full"]
    results = Results([])
    while todo := [of for of in mqar.runs("full", results, "") if of not in results]:
        for of in todo:
            results.add(result(of, 0.5))
    order = list(dict.fromkeys(mqar.runs("full", results, "")))
    assert [of.seed for of in order] == sorted(of.seed for of in order)
    first = [of for of in order if of.seed == 0]
    lengths = [of.seq_len for of in first if of.layer in mqar.LAYERS]
    assert lengths == sorted(lengths)
    for task in size.difficulties:
        widths = {of.width for of in first if of.seq_len == task[0]}
        assert widths == set(size.widths)
    assert max(run.estimated_seconds(of, Results([])) for of in order) < 480
