"""The ablations and the Transformer++ on tokens, beside v3 of the paper's Table 2.

The text, the blocks and the number of updates are those of the runs on bytes. Windows have as many
tokens as those have bytes and batches a quarter as many windows, so that an update has about as
many bytes. All layers are scored in windows of that length, each from no state.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.comparisons.ablations import SCALES, Comparison
from experiments.runs import Result

# Name: layer, heads, and v3's perplexity at 340 M parameters and 7 B tokens where it has one.
VARIANTS = {
    "Transformer++": ("attention", 8),
    "GLA, 4 heads": ("gla", 4, 14.73),
    "GLA, convolution": ("gla, convolution", 4),
    "RetNet": ("retnet", 4),
    "data-dependent scalar gate": ("head gate", 4),
    "constant scalar decay": ("constant", 4),
    "no gate": ("no gate", 4, 23.21),
    "gates on keys and values": ("gla, values too", 4, 14.86),
    "gates on values": ("values alone", 4, 15.15),
    "GLA, 8 heads": ("gla", 8, 15.29),
    "GLA, 1 head": ("gla", 1, 14.61),
}


def perplexity_a_byte(result: Result) -> float:
    """What can be compared between vocabularies."""
    return 2**result.score


def _at(tiny: int, full: int) -> Comparison:
    """The comparison with vocabularies of two scales. A batch has a quarter of the tokens."""
    sizes = {
        "tiny": replace(SCALES["tiny"], vocabulary=tiny),
        "full": replace(SCALES["full"], vocabulary=full, batch_size=8),
    }
    heads = ("model", "p, against GLA")
    of = {"measure": perplexity_a_byte, "unit": "perplexity a byte", "sizes": sizes}
    return Comparison(VARIANTS, "GLA, 4 heads", heads, **of)


AT_8K, AT_32K = _at(280, 8_000), _at(300, 32_000)
