"""Hybrid models of `gla_ext.hf`: configuration, generation, packed rows.

Equal bits (see common.py): tokens, and the same calls.
"""

import pytest
import torch
from common import assert_close
from models import make_ids

pytest.importorskip("transformers")

from hf_models import PADDED, make_model
from transformers import AutoConfig, AutoModelForCausalLM

from gla_ext import hf, model
from gla_ext.cache import GLACache

ATTN = [
    {"layers": [0], "num_heads": 2, "window_size": 5},
    {"layers": [2], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "rope_theta": 500.0},
]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(autouse=True)
def registered():
    """FLA, where another test has imported it, has registered its own classes."""
    hf.register()


def make_hybrid(**options):
    return make_model(num_hidden_layers=3, attn=ATTN, **options)


def test_saved_and_read_by_both_models(tmp_path):
    ours, ids = make_hybrid(), make_ids()
    ours.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).attn == ours.config.attn
    assert ours.config.attn[0] == ATTN[0] | {
        "num_kv_heads": 2,
        "qkv_bias": False,
        "rope_theta": 10000.0,
    }
    logits = ours(ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)
    assert torch.equal(model.GLAForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)


def test_wrong_attn_is_refused_when_it_is_set():
    with pytest.raises(ValueError, match="layers of attn from 0 to 1, got 2"):
        hf.GLAConfig(num_hidden_layers=2, attn={"layers": [2], "num_heads": 2})
    config = hf.GLAConfig(num_hidden_layers=3)
    with pytest.raises(TypeError, match="attn to be a dict or a list of dicts, got 5"):
        config.attn = 5
    config.attn = ATTN[0]
    assert config.to_dict()["attn"]["num_kv_heads"] == 2


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}, {"prefill_chunk_size": 1, "num_beams": 2}],
    ids=str,
)
def test_generate(options):
    ours, ids = make_hybrid().double(), make_ids(T=12)
    actual = ours.generate(ids, attention_mask=PADDED, **GREEDY | options)
    options.pop("prefill_chunk_size", None)
    options |= GREEDY | {"use_cache": False}
    assert torch.equal(actual, ours.generate(ids, attention_mask=PADDED, **options))


def test_returned_sequences_are_of_their_own():
    ours, ids = make_hybrid(), make_ids(T=12)
    torch.manual_seed(0)
    options = GREEDY | {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9}
    sampled = ours.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    logits = ours(sampled.sequences).logits[:, 11:-1]
    assert_close(torch.stack(sampled.logits, 1), logits, 1e-5)


def test_a_cache_goes_on():
    ours, ids, cache = make_hybrid(), make_ids(T=40), GLACache()
    with torch.no_grad():
        for piece in ids.split([20, 1, 15, 4], 1):
            logits = ours(piece, past_key_values=cache, use_cache=True).logits
    assert_close(logits, ours(ids).logits[:, 36:], 1e-5)
    with pytest.raises(ValueError, match="past_key_values of 3 sequences, got 2"):
        ours(make_ids(B=3, T=4), past_key_values=cache)


def test_packed_rows_stay_apart():
    ours, ids = make_hybrid(), make_ids(T=30)
    positions = torch.cat([torch.arange(12), torch.arange(18)]).expand(2, -1)
    apart = torch.cat([ours(ids[:, :12]).logits, ours(ids[:, 12:]).logits], 1)
    assert_close(ours(ids, position_ids=positions).logits, apart, 1e-5)
    offsets = torch.tensor([0, 12, 30], dtype=torch.int32)
    options = {"cu_seq_lens_q": offsets, "max_length_q": 18}
    assert_close(ours(ids[:1], **options).logits, apart[:1], 1e-5)


def test_a_cache_of_fla_is_refused():
    cache_utils = pytest.importorskip("fla.models.cache_utils", exc_type=ImportError)
    with pytest.raises(TypeError, match=r"to be a gla_ext\.cache\.GLACache, got Cache"):
        make_hybrid()(make_ids(), past_key_values=cache_utils.Cache(), use_cache=True)


def test_recomputed_blocks_give_the_same_loss():
    ours, ids = make_hybrid().train(), make_ids()
    loss = ours(ids, labels=ids).loss
    ours.gradient_checkpointing_enable()
    again = ours(ids, labels=ids).loss
    again.backward()
    assert torch.equal(loss, again)
    assert all(parameter.grad is not None for parameter in ours.parameters())
