"""Sequences packed in rows of `gla_ext.hf`, by every keyword that transformers says it with.

Equal bits (see common.py): the same calls.
"""

import warnings

import pytest
import torch
from common import assert_close
from models import make_ids
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import transformers
from hf_models import PADDED, make_model
from torch._dynamo.testing import CompileCounterWithBackend

LENGTHS = (5, 1, 12)
OFFSETS = torch.tensor([0, 5, 6, 18], dtype=torch.int32)
SEQUENCES = torch.tensor([[0] * 5 + [1] + [2] * 12], dtype=torch.int32)
SAID = {
    "position_ids": lambda flat: {"position_ids": flat["position_ids"]},
    "position_ids from 2": lambda flat: {"position_ids": flat["position_ids"] + 2},
    "seq_idx": lambda flat: {"seq_idx": SEQUENCES},
    "seq_idx beside position_ids": lambda flat: {
        "seq_idx": SEQUENCES,
        "position_ids": torch.arange(18)[None],
    },
    "cu_seq_lens_q": lambda flat: {"cu_seq_lens_q": OFFSETS, "max_length_q": 12},
    "cu_seq_lens_k": lambda flat: {"cu_seq_lens_k": OFFSETS, "max_length_k": 12},
    "cu_seqlens": lambda flat: {"cu_seqlens": OFFSETS},
    "a mask of ones": lambda flat: {
        "position_ids": flat["position_ids"],
        "attention_mask": torch.ones(1, 18, dtype=torch.int64),
    },
}


def make_rows():
    return [make_ids(B=1, T=T, seed=T)[0] for T in LENGTHS]


def flatten(rows, **options):
    collator = transformers.DataCollatorWithFlattening(**options)
    return collator([{"input_ids": row.tolist()} for row in rows])


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters()}


class CountReads(TorchDispatchMode):
    """Inside, counts the operations whose result has a size that is data."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        masked = name == "aten::index.Tensor" and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        self.count += masked or name in ("aten::nonzero", "aten::_local_scalar_dense")
        return function(*args, **(kwargs or {}))


HYBRID = {"attn": {"layers": [1], "num_heads": 2, "window_size": 5}}
CONVOLVED = {"use_short_conv": True}
PACKED = [(name, CONVOLVED, False) for name in SAID] + [("position_ids", CONVOLVED, True)]
PACKED += [("position_ids", HYBRID, False), ("cu_seq_lens_q", HYBRID, True)]


@pytest.mark.parametrize(("name", "options", "checkpointing"), PACKED)
def test_a_packed_row_is_its_sequences(name, options, checkpointing):
    ours, rows = make_model(**options).train(), make_rows()
    if checkpointing:
        ours.gradient_checkpointing_enable()
    apart = [ours(row[None], labels=row[None], num_items_in_batch=15) for row in rows]
    logits = torch.cat([x.logits for x in apart], 1).clone()  # backward writes over them
    expected = gradients(ours, sum(x.loss for x in apart))
    flat = flatten(rows)
    assert set(flat) == {"input_ids", "labels", "position_ids"}
    said, total = SAID[name](flat), sum(x.loss for x in apart)
    hidden = ours.model(flat["input_ids"], **said).last_hidden_state
    assert_close(ours.lm_head(hidden), logits, 1e-5)
    for labels in (flat["labels"], flat["input_ids"]):
        for count in (None, 15):
            out = ours(flat["input_ids"], labels=labels, num_items_in_batch=count, **said)
            assert_close(out.logits, logits, 1e-5)
            assert_close(out.loss, total, 1e-6)
    for parameter, gradient in gradients(ours, out.loss).items():
        assert_close(gradient, expected[parameter], 1e-5, name=parameter)


def test_a_cache_has_the_states_of_the_sequences():
    ours, rows = make_model(), make_rows()
    flat = flatten(rows)
    cache = ours(flat["input_ids"], position_ids=flat["position_ids"]).past_key_values
    assert cache.get_seq_length() == 18
    for n, row in enumerate(rows):
        alone = ours(row[None]).past_key_values
        for states, expected in zip(cache, alone, strict=True):
            actual = states["recurrent_state"][n : n + 1]
            assert_close(actual, expected["recurrent_state"], 1e-5)


POSITIONS = torch.tensor([[*range(5), *range(4), *range(3)], [*range(1, 12), 0]])


@pytest.mark.parametrize("options", [{}, HYBRID], ids=["GLA", "hybrid"])
@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
def test_every_row_of_a_batch_is_packed(mask, options):
    ours, ids = make_model(**options), make_ids(T=12)
    cuts = ((0, 5), (5, 9), (9, 12)), ((0, 11), (11, 12))
    expected, kept = torch.zeros(2, 12, 31), torch.zeros(2, 12, dtype=torch.bool)
    total = count = 0
    for b, row in enumerate(cuts):
        for start, end in row:
            if mask is None or mask[b, start]:
                piece = ids[b : b + 1, start:end]
                out = ours(piece, labels=piece, num_items_in_batch=1)
                expected[b, start:end], kept[b, start:end] = out.logits[0], True
                total, count = total + out.loss, count + end - start - 1
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    if mask is not None:
        labels[0, 5] = -100  # of the first token after the padding, as without positions
    out = ours(
        ids,
        attention_mask=mask,
        position_ids=POSITIONS,
        labels=labels,
        output_hidden_states=True,
    )
    assert_close(out.logits[kept], expected[kept], 1e-5)
    assert_close(out.loss, total / count, 1e-6)
    assert [x.shape for x in out.hidden_states] == [(2, 12, 16)] * 3
    assert out.past_key_values.get_seq_length() == 12


ROW = torch.arange(12)[None]
CONTINUED = [(mask, x) for mask in (None, PADDED) for x in (ROW, ROW.expand(2, 12) + 7, 3 * ROW)]
CONTINUED += [  # versions of generate() differ
    (PADDED, (PADDED.cumsum(1) - 1).masked_fill(PADDED == 0, fill)) for fill in (0, 1, 100)
]


@pytest.mark.parametrize(("mask", "positions"), CONTINUED)
def test_positions_that_do_not_start_again_change_nothing(positions, mask):
    ours, ids = make_model(), make_ids(T=12)
    expected = ours(ids, attention_mask=mask, labels=ids)
    actual = ours(ids, attention_mask=mask, labels=ids, position_ids=positions)
    assert torch.equal(actual.logits, expected.logits)
    assert torch.equal(actual.loss, expected.loss)


def test_a_step_looks_at_no_position():
    ours, ids = make_model(), make_ids(T=12)
    expected = ours(ids, use_cache=False).logits[:, -1:]
    cache = ours(ids[:, :-1]).past_key_values
    with CountReads() as reads:
        step = ours(ids[:, -1:], past_key_values=cache, position_ids=torch.zeros(2, 1)).logits
    assert reads.count == 0
    assert_close(step, expected, 1e-5)


def test_sizes_are_read_once_a_model_and_not_beside_offsets():
    ours, flat = make_model().train(), flatten(make_rows(), return_flash_attn_kwargs=True)
    assert flat["cu_seq_lens_q"].tolist() == flat["cu_seq_lens_k"].tolist() == OFFSETS.tolist()
    with CountReads() as reads:
        ours(**flat)
    assert reads.count == 0
    with CountReads() as reads:
        ours(flat["input_ids"], labels=flat["labels"], position_ids=flat["position_ids"])
    assert reads.count == 1


@pytest.mark.cuda
def test_the_host_waits_once_for_positions_and_not_for_offsets():
    ours = make_model().cuda().train()
    flat = flatten(make_rows(), return_flash_attn_kwargs=True)
    flat = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in flat.items()}
    positions = {name: flat[name] for name in ("input_ids", "labels", "position_ids")}
    ours(**flat), ours(**positions)
    torch.cuda.synchronize()
    counts = []
    for batch in (flat, positions):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                ours(**batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("called a synchronizing" in str(x.message) for x in caught))
    assert counts == [0, 1]


def test_compiled():
    ours, flat = make_model(num_hidden_layers=1), flatten(make_rows())
    batch = {"use_cache": False, **flat}
    expected = ours(**batch)
    compiled = torch.compile(ours, backend="eager")  # in two graphs
    assert_close(compiled(**batch).logits, expected.logits, 1e-5)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        whole = torch.compile(ours, fullgraph=True, backend=counter)
        actual = whole(**batch)
        again = flatten(list(reversed(make_rows()[1:] + make_rows()[:1])))
        other = whole(use_cache=False, **again)
    assert counter.frame_count == 1
    assert_close(actual.logits, expected.logits, 1e-5)
    assert_close(actual.loss, expected.loss, 1e-6)
    assert_close(other.logits, ours(use_cache=False, **again).logits, 1e-5)


@pytest.mark.parametrize("name", ["position_ids", "seq_idx"])
def test_errors(name):
    ours, ids = make_model(), make_ids(T=12)
    with pytest.raises(TypeError, match=f"expected {name} to be a tensor, got <class 'list'>"):
        ours(ids, **{name: [[0] * 12] * 2})
    for shape in ((2, 11), (3, 12), (12,), (3, 2, 12)):
        with pytest.raises(ValueError, match=rf"expected {name} to have shape \[B, T\] = \[2, 12"):
            ours(ids, **{name: torch.zeros(shape, dtype=torch.int64)})


def test_trainer_keeps_the_columns_that_say_how_rows_are_packed(arguments):
    flat = flatten(make_rows())
    row = {name: x[0] for name, x in flat.items()}
    given = arguments(
        max_steps=1, per_device_train_batch_size=1, logging_steps=1, save_strategy="no"
    )
    ours = make_model()
    expected = ours(**flat).loss.item()
    trainer = transformers.Trainer(ours, given, train_dataset=[row])
    trainer._set_signature_columns_if_needed()
    assert {*flat, "seq_idx", "cu_seq_lens_q"} <= set(trainer._signature_columns)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-3)
