"""Gates on keys, on values, on both and on none (v3 of the paper, Table 2), on text."""

from __future__ import annotations

from experiments.comparisons.ablations import Comparison

# Name: layer, heads, and v3's perplexity at 340 M parameters and 7 B tokens. Keys alone and none
# are ablations' runs too, which are trained once.
VARIANTS = {
    "α and β, keys and values": ("gla, values too", 4, 14.86),
    "α, keys": ("gla", 4, 14.73),
    "β, values": ("values alone", 4, 15.15),
    "none": ("no gate", 4, 23.21),
}

comparison = Comparison(VARIANTS, "α, keys", ("gates", "p, against keys"))
runs, report = comparison.runs, comparison.report
