"""Models of random layers, with attention and without, in random pieces, against one forward call
over all tokens.
"""

import random

import pytest
import torch
from models import make_model

from gla_ext.cache import GLACache
from gla_ext.decode import Decoder

SEEDS = pytest.mark.parametrize("seed", range(8))


def make(choose):
    count = choose.choice([1, 2, 3])
    attn = [
        {
            "layers": [layer],
            "num_heads": choose.choice([2, 4]),
            "num_kv_heads": choose.choice([1, 2]),
            "window_size": choose.choice([None, 1, 2, 7, 40, 300]),
            "rope_theta": choose.choice([10000.0, 30.0]),
            "qkv_bias": choose.random() < 0.5,
        }
        for layer in choose.sample(range(count), choose.randint(0, count))
    ]
    options = {"use_short_conv": choose.random() < 0.5, "attn": attn or None}
    return make_model(torch.float64, num_hidden_layers=count, **options)


class Texts:
    """B texts, of which some tokens have passed, and the logits that belong to them."""

    def __init__(self, model, B):
        self.tokens = torch.randint(31, (B, 900))
        self.logits, self.seen = model(self.tokens).logits, [0] * B

    def next(self, counts):
        parts = zip(self.tokens, self.seen, counts, strict=True)
        return [row[n : n + count] for row, n, count in parts]

    def check(self, found):
        """The logits of the next tokens of each text."""
        for b, logits in enumerate(found):
            expected = self.logits[b, self.seen[b] : self.seen[b] + len(logits)]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
            self.seen[b] += len(logits)

    def reorder(self, index):
        self.tokens, self.logits = self.tokens[index], self.logits[index]
        self.seen = [self.seen[i] for i in index]


@SEEDS
@torch.no_grad()
def test_pieces(seed):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    model, B, cache = make(choose), choose.choice([1, 2, 3]), GLACache()
    texts, options = Texts(model, B), {"past_key_values": cache, "use_cache": True}
    for kind in choose.choices(["rows", "packed", "padded", "steps", "reordered"], k=8):
        if kind == "rows" or len(cache) == 0:
            rows = texts.next([choose.choice([1, 2, 20, 90])] * B)
            texts.check(model(torch.stack(rows), **options).logits)
        elif kind == "steps":
            for _ in range(choose.choice([1, 5])):
                texts.check(model(torch.stack(texts.next([1] * B)), **options).logits)
        elif kind == "packed":
            counts = [choose.choice([0, 1, 3, 50]) for _ in range(B - 1)] + [7]
            row = torch.cat([*texts.next(counts), torch.zeros(choose.choice([0, 4])).long()])
            cu_seqlens = torch.tensor([0, *counts]).cumsum(0)
            logits = model(row.unsqueeze(0), cu_seqlens=cu_seqlens, **options).logits[0]
            texts.check(logits[: cu_seqlens[-1]].split(counts))
        elif kind == "padded":
            mask = torch.rand(B, choose.choice([1, 9, 40])) < 0.7
            ids = torch.zeros(mask.shape, dtype=torch.long)
            ids[mask] = torch.cat(texts.next(mask.sum(1).tolist()))
            logits = model(ids, attention_mask=mask, **options).logits
            texts.check([own[m] for own, m in zip(logits, mask, strict=True)])
        else:
            index = torch.randint(B, (B,))
            cache.reorder_cache(index)
            texts.reorder(index)


@SEEDS
@torch.no_grad()
def test_rows_of_a_decoder(seed):
    """New prompts, further turns and steps, with rows that are done."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    model, B, end = make(choose), choose.choice([1, 2, 3]), choose.choice([None, 5, 9])
    decoder = Decoder(model, B, temperature=0, eos_token_id=end)
    texts: list[list[int]] = [[] for _ in range(B)]

    def take(row, token):
        logits = model(torch.tensor(texts[row]).unsqueeze(0), logits_to_keep=1).logits
        assert logits.argmax() == token
        texts[row].append(token)

    def prefill(rows, keep):
        counts = [choose.choice([1, 2, 30, 100, 300]) for _ in rows]
        prompts = [[choose.randrange(31) for _ in range(count)] for count in counts]
        segment = choose.choice([64, 128, 16384])
        given = None if rows == list(range(B)) else choose.choice([rows, torch.tensor(rows)])
        drawn = decoder.prefill(prompts, rows=given, keep=keep, segment_tokens=segment)
        for row, prompt, token in zip(rows, prompts, drawn.tolist(), strict=True):
            texts[row] = [*(texts[row] if keep else []), *prompt]
            take(row, token)

    prefill(list(range(B)), keep=False)
    for _ in range(4):
        for _ in range(choose.choice([0, 1, 20])):
            done = [end is not None and text[-1] == end for text in texts]
            assert end is None or decoder.done.tolist() == done
            for row, token in enumerate(decoder.step().tolist()):
                if done[row]:
                    assert token == end
                else:
                    take(row, token)
        prefill(choose.sample(range(B), choose.randint(1, B)), keep=choose.random() < 0.5)
