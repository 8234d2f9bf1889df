"""The engine by itself: every generation is what the model alone gives.

Equal bits (see common.py): the same calls of all rows, or of one prompt.
"""

import pytest
import torch
from engines import SMALL, deltas, greedy, is_empty, prompt, run
from models import make_model

from gla_ext.decode import _capture
from gla_ext.ops import batch_invariant
from gla_ext.serve import ClosedError, Engine, FullError, Limits, Request, engine
from gla_ext.serve.text import Bytes

# A chunk passes at least, where fewer tokens may.
FEWEST = {"prefill_tokens": 1, "checkpoint_tokens": 512}


@pytest.mark.parametrize("limits", [{}, FEWEST], ids=["", "few tokens"])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"use_short_conv": True}])
def test_generations_are_those_of_the_model(options, cache_bytes, limits, device):
    dtype = torch.float64 if device == "cpu" else torch.float32
    model = make_model(dtype, eos_token_id=None, **options).to(device)
    engine = Engine(model, limits=Limits(**SMALL | limits, cache_bytes=cache_bytes))
    prompts = [prompt(n) for n in (1, 5, 64, 65, 300, 129, 2)]
    counts = [20, 1, 7, 30, 12, 3, 40]
    pairs = list(zip(prompts, counts, strict=True))
    for _ in range(2):  # with the second time the prefixes of the first
        found = run(engine, *(Request(p, n, temperature=0) for p, n in pairs))
        for (p, n), (tokens, _, reason) in zip(pairs, found, strict=True):
            assert (tokens, reason) == (greedy(model, p, n), "length"), len(p)
        assert is_empty(engine)
    # Of 65, 300 and 129 tokens.
    cached = 0 if cache_bytes == 0 or limits else 64 * (1 + 4 + 2)
    assert engine.metrics.count("cached_prompt_tokens_total") == cached


def test_the_end_token_ends_and_is_not_shown():
    free = make_model(torch.float64, eos_token_id=None)
    tokens = greedy(free, prompt(9), 20)
    model = make_model(torch.float64, eos_token_id=tokens[5])
    engine = Engine(model, limits=Limits(**SMALL))
    before = tokens[: tokens.index(tokens[5])]
    request = Request(prompt(9), 20, temperature=0)
    assert run(engine, request) == [(before, "", "stop")]
    ignoring = Request(prompt(9), 20, temperature=0, ignore_eos=True)
    assert run(engine, ignoring) == [(tokens, "", "length")]


def test_stop_strings_end_the_text_and_free_the_row():
    model = make_model(torch.float64, vocab_size=256, eos_token_id=None)
    engine = Engine(model, Bytes(), Limits(**SMALL))
    ((tokens, text, _),) = run(engine, Request([0, 65], 60, temperature=0))
    assert text == bytes(tokens).decode(errors="replace").rstrip("\ufffd")
    stop = text[10:13]
    place = text.index(stop)
    ((fewer, stopped, reason),) = run(engine, Request([0, 65], 60, temperature=0, stop=["☃", stop]))
    assert (stopped, reason) == (text[:place], "stop")
    assert len(fewer) < len(tokens)
    assert is_empty(engine)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.7}])
def test_a_seed_decides_whatever_else_is_in_the_batch(filters, device):
    """In batch_invariant the logits of every token are too. In one row they are bit for bit, since
    each product has the same shape and adds up no other row. In another row a BLAS may round
    otherwise.
    """
    model = make_model(eos_token_id=None).to(device)
    request = Request(prompt(200), 25, temperature=1.3, seed=5, logprobs=3, **filters)
    others = [Request(prompt(n), 3 + n % 20, seed=n, top_k=1 + n) for n in (1, 70, 300, 12, 64)]

    def drawn(engine, *requests):
        (first, *_) = engine.submit(*requests)
        found = []
        for generation, delta in deltas(engine):
            found += delta.logprobs if generation is first else []
        return found

    with batch_invariant():
        engine = Engine(model, limits=Limits(**SMALL))
        alone = drawn(engine, request)
        assert len(alone) == 25
        assert drawn(engine, request, *others) == alone  # in row 0 again, from the prefix cache
        other = Engine(model, limits=Limits(**SMALL, cache_bytes=0))
        other.submit(*others[:2])  # so that it gets another row
        other.step()
        for x, y in zip(drawn(other, request, *others), alone, strict=True):
            assert (x.token, list(x.best)) == (y.token, list(y.best))
            assert x.logprob == pytest.approx(y.logprob, abs=1e-5)
    different = drawn(engine, Request(prompt(200), 25, temperature=1.3, seed=6, logprobs=3))
    assert [x.token for x in different] != [x.token for x in alone]


def test_log_probabilities():
    model = make_model(torch.float64, eos_token_id=None)
    tokens = prompt(10)
    engine = Engine(model, limits=Limits(**SMALL))
    (generation,) = engine.submit(Request(tokens, 8, temperature=0.9, seed=1, logprobs=4))
    found = []
    for _, delta in deltas(engine):
        found += delta.logprobs
    new = [x.token for x in found]
    with torch.no_grad():
        logits = model(torch.tensor([tokens + new])).logits[0, len(tokens) - 1 : -1]
    expected = logits.log_softmax(-1)
    for row, x in zip(expected, found, strict=True):
        assert x.logprob == pytest.approx(row[x.token].item(), abs=1e-5)
        best, ids = row.topk(4)
        assert list(x.best) == ids.tolist()
        assert list(x.best.values()) == pytest.approx(best.tolist(), abs=1e-5)
    assert generation.finished


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_graphs_give_the_tokens_of_eager_steps(rows):
    """Also while they are captured one by one."""
    model = make_model(eos_token_id=None, use_short_conv=True).to("cuda")
    requests = [Request(prompt(n), 20, temperature=n % 2, seed=n) for n in (1, 70, 3, 200, 5)]
    found = []
    for cuda_graph, warm in ((False, False), (True, False), (True, True)):
        engine = Engine(model, limits=Limits(**SMALL | {"rows": rows}), cuda_graph=cuda_graph)
        if warm:
            engine.warm_up()
        found.append([run(engine, *requests) for _ in range(3)])
        assert bool(engine._batch._graphs) == cuda_graph
        assert is_empty(engine)
    assert found[0] == found[1] == found[2]


@pytest.mark.cuda
def test_graphs_share_memory():
    """Steps' and prompts', 23 of them, each with workspaces of cuBLAS, 32 MiB on Hopper."""
    model = make_model(eos_token_id=None).to("cuda")
    engine = Engine(model, limits=Limits(**SMALL))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    engine.warm_up()
    torch.cuda.empty_cache()
    graphs = [*engine._batch._graphs._graphs.values()]
    graphs += engine._batch._prompts._graphs._graphs.values()
    assert len(graphs) == 23 and len({graph.pool for graph in graphs}) == 1
    assert len({_capture._streams[graph._owned[0]] for graph in graphs}) == 1
    assert torch.cuda.memory_reserved() < before + 200 * 2**20


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("use_short_conv", [False, True])
def test_graphs_fill_up(captures, use_short_conv, warm, monkeypatch):
    """A graph that is larger than its batch is filled up with what belongs to no sequence.
    Capturing a graph while sequences run does not change their states.
    """
    model = make_model(eos_token_id=None, use_short_conv=use_short_conv)
    requests = [Request(prompt(n), 9, temperature=n % 2, seed=n) for n in (1, 70, 3, 200, 5, 64)]
    with monkeypatch.context() as patched:
        patched.setattr(engine, "uses_graph", lambda *_: False)
        expected = run(Engine(model, limits=Limits(**SMALL)), *requests)
    captured, replayed = captures
    assert captured == []
    filled = Engine(model, limits=Limits(**SMALL))
    if warm:
        filled.warm_up()
    for cached in (0, 64 * (1 + 3)):  # of 70 and 200 tokens
        assert run(filled, *requests) == expected
        assert filled.metrics.count("cached_prompt_tokens_total") == cached
        assert is_empty(filled)
    assert set(replayed) == {"step", "prompt"}


def test_graphs_are_captured_when_a_size_comes_again(captures):
    """One generation alone needs none but that of a step; `warm_up` captures all, once."""
    model = make_model(eos_token_id=None)
    captured, replayed = captures
    lazy = Engine(model, limits=Limits(**SMALL, cache_bytes=0))
    assert captured == []
    run(lazy, Request(prompt(5), 2))
    assert (captured, replayed) == ([], [])
    run(lazy, Request(prompt(70), 5))
    assert (captured, replayed) == (["step"], ["step"] * 4)
    run(lazy, Request(prompt(100), 2))
    assert (captured, replayed) == (["step", "prompt"], ["step"] * 4 + ["prompt", "step"])
    lazy.warm_up()
    assert (captured.count("step"), captured.count("prompt")) == (3, 4)  # 1, 2, 3 rows
    before = len(captured)
    lazy.warm_up()
    run(lazy, *(Request(prompt(n), 3) for n in (1, 2, 3, 100)))
    assert len(captured) == before


def test_a_long_prompt_holds_nobody_up():
    """A prompt of many pieces leaves a token of another generation at each step."""
    model = make_model(eos_token_id=None)
    engine = Engine(model, limits=Limits(**SMALL, cache_bytes=0))
    (short,) = engine.submit(Request(prompt(3), 100, temperature=0))
    engine.step()
    (long,) = engine.submit(Request(prompt(128 * 6 + 1), 1))
    (late,) = engine.submit(Request(prompt(4), 1))
    order = []
    while not long.finished:
        before = short.new
        order += [g for g, delta in engine.step() if delta.finish_reason]
        assert short.new == before + 1
    assert order == [late, long]


def test_limits():
    model = make_model(eos_token_id=None)
    engine = Engine(model, limits=Limits(**SMALL | {"waiting": 1}, prompt_tokens=9, new_tokens=5))
    requests = [Request([1], 5)] * 4
    with pytest.raises(ValueError, match="at most 4 sequences at once, got 5"):  # never
        engine.submit(*requests, requests[0])
    with pytest.raises(TypeError, match="expected requests, got"):
        engine.submit(requests)
    assert not engine.busy
    engine.submit(*requests)
    with pytest.raises(FullError, match="at most 0 more sequences, of 3 that run and 1 that"):
        engine.submit(requests[0])
    for request, message in [
        (Request([1] * 10), "a prompt of at most 9 tokens, got 10"),
        (Request([1], 6), "at most 5 new tokens, got 6"),
        (Request([31], 1), "tokens from 0 to 30, got 31"),
        (Request([-1, 2], 1), "tokens from 0 to 30, got -1"),
        (Request([1], 1, stop=["a"]), "a tokenizer for stop strings"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit(request)
    engine.drain()
    with pytest.raises(ClosedError):
        engine.submit(requests[0])
    while engine.busy:  # what was accepted goes on
        engine.step()
    assert is_empty(engine)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (Request, {"tokens": []}, ValueError, "at least one token, got none"),
        (Request, {"tokens": [1.5]}, TypeError, "tokens to be ints"),
        (Request, {"max_new_tokens": -1}, ValueError, "max_new_tokens to be at least 0, got -1"),
        (Request, {"max_new_tokens": 1.0}, TypeError, "max_new_tokens to be an int"),
        (Request, {"temperature": float("nan")}, ValueError, "temperature"),
        (Request, {"temperature": -1}, ValueError, "temperature"),
        (Request, {"top_p": 0}, ValueError, "top_p"),
        (Request, {"top_k": 0}, ValueError, "top_k"),
        (Request, {"seed": 2**64}, ValueError, "seed"),
        (Request, {"stop": "a"}, TypeError, "stop to be a list"),
        (Request, {"stop": [""]}, ValueError, "1 to 256 characters"),
        (Request, {"stop": ["a"] * 17}, ValueError, "at most 16 stop strings, got 17"),
        (Request, {"logprobs": 21}, ValueError, "logprobs from 0 to 20, got 21"),
        (Request, {"prompt_logprobs": -1}, ValueError, "prompt_logprobs from 0 to 20, got -1"),
        (Limits, {"cache_bytes": 1.5}, TypeError, "cache_bytes to be an int, got 1.5"),
    ],
)
def test_what_cannot_be_asked_for(make, options, error, message):
    needed = {"tokens": [1]} if make is Request else {}
    with pytest.raises(error, match=message):
        make(**needed | options)


def test_states_in_16_bits():
    """Rows and checkpoints take half."""
    short, wide = (Engine(make_model(), state_dtype=x) for x in (torch.bfloat16, None))
    assert 2 * short._batch.row_nbytes == wide._batch.row_nbytes


def test_models_that_it_does_not_run():
    dtypes = "expected state_dtype to be torch.float32, torch.bfloat16, torch.float16 or None, got"
    for state_dtype in (torch.float64, torch.int8, "bfloat16"):
        with pytest.raises(ValueError, match=dtypes):
            Engine(make_model(), state_dtype=state_dtype)
    with pytest.raises(ValueError, match="in eval mode"):
        Engine(make_model().train())
    with pytest.raises(TypeError, match="expected a tokenizer, got Limits"):
        Engine(make_model(), Limits())
    with pytest.raises(ValueError, match="Engine: expected a model on a CUDA device with cuda_gr"):
        Engine(make_model(), cuda_graph=True)
    attention = {"layers": [1], "num_heads": 2, "num_kv_heads": 2, "window_size": None}
    with pytest.raises(NotImplementedError, match="grow; 'vllm serve FOLDER' serves it"):
        Engine(make_model(attn=attention))


def test_a_model_of_transformers_is_refused_by_name():
    pytest.importorskip("transformers")
    from gla_ext import hf

    config = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1, "vocab_size": 31}
    with pytest.raises(
        TypeError, match=r"from_pretrained .*, got gla_ext.hf.modeling.GLAForCausalLM"
    ):
        Engine(hf.GLAForCausalLM(hf.GLAConfig(**config)).eval())


def test_an_error_ends_every_sequence(monkeypatch):
    """Also one whose prompt had ended before another's failed in the same step."""
    with batch_invariant():  # prompts pass one after the other
        engine = Engine(make_model(eos_token_id=None), limits=Limits(**SMALL))
    generations = engine.submit(*(Request(prompt(n), 5) for n in (3, 200, 4, 5)))
    prefill, passed = engine._batch.prefill, []

    def prefill_one(pieces):
        if passed:
            raise RuntimeError("failed")
        passed.extend(pieces)
        prefill(pieces)

    monkeypatch.setattr(engine._batch, "prefill", prefill_one)
    with pytest.raises(RuntimeError, match="failed"):
        engine.step()
    assert [piece.ends for piece in passed] == [True]
    ended = engine.cancel_all()
    assert sorted(map(id, generations)) == sorted(id(sequence) for sequence, _ in ended)
    assert {delta.finish_reason for _, delta in ended} == {"error"}
    assert not engine.busy
