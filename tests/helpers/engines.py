"""Running an engine of a small model until it has nothing to do."""

from models import make_ids

SMALL = {"rows": 3, "waiting": 20, "prefill_tokens": 128, "checkpoint_tokens": 64}


def prompt(length, seed=None) -> list[int]:
    return make_ids(1, length, seed=length if seed is None else seed)[0].tolist()


def deltas(engine):
    """What sequences and their steps give until nothing is left to do."""
    while engine.busy:
        yield from engine.step()


def run(engine, *requests):
    """Tokens, text and finish_reason of each request, all submitted at once."""
    generations = engine.submit(*requests)
    found = {generation: ([], [], []) for generation in generations}
    steps = 0
    while engine.busy:
        for generation, delta in engine.step():
            tokens, texts, reasons = found[generation]
            tokens += delta.tokens
            texts.append(delta.text)
            reasons += [delta.finish_reason] * (delta.finish_reason is not None)
        steps += 1
        assert steps < 2000
    assert all(len(reasons) == 1 for _, _, reasons in found.values())
    return [(tokens, "".join(texts), *reasons) for tokens, texts, reasons in found.values()]


def run_and_cancel(engine, requests, steps, choose):
    """Cancels the sequences that `choose` takes after some steps. Returns all sequences, the tokens
    of each, those cancelled, and why each ended that had not before.
    """
    sequences = engine.submit(*requests)
    tokens, reasons = {sequence: [] for sequence in sequences}, {}
    for _ in range(steps):
        for sequence, delta in engine.step():
            tokens[sequence] += delta.tokens
    left = choose(sequences)
    for sequence in left:
        engine.cancel(sequence)
    for sequence, delta in deltas(engine):
        tokens[sequence] += delta.tokens
        reasons[sequence] = delta.finish_reason
    return sequences, tokens, left, reasons


def greedy(model, tokens, count):
    (row,) = model.generate([tokens], count, temperature=0)
    return row[len(tokens) :].tolist()


def is_empty(engine) -> bool:
    """Whether no generation has left anything behind."""
    return (
        sorted(engine._free) == list(range(engine.limits.rows))
        and not engine.busy
        and not engine._running
        and engine.waiting == 0
    )
