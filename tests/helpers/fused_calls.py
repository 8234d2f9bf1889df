"""Calls of the fused path of bf16 on Hopper, by what the plan says of them."""

import dataclasses

import torch
from common import GATES
from fused import (
    BF16,
    FIRST,
    MIXED,
    SWEPT_LENGTHS,
    SWEPT_TOKENS,
    UNEVEN_LENGTHS,
    draw,
    facts_of,
    for_this_gpu,
    half_of_the_gpu,
)

FP32 = torch.float32
HALF = 0  # a number of rows, of heads that leave two places of forward's sweep for each block


@dataclasses.dataclass(frozen=True)
class Calls:
    """Calls that do the same, which `facts_of` tells.

    Args:
        sizes: B, T, H, K and V of each.
        gates, fp32_gates: of `GATES` or `KINDS`, in bf16 and in fp32.
        scaled: which of B, T and H are those for an H200, see `for_this_gpu`.
        invariant: whether the mode is on.
        v_first: how states lie.
    """

    does: set[str]
    sizes: list[tuple[int, int, int, int, int]]
    gates: tuple[float | str, ...] = GATES
    fp32_gates: tuple[float | str, ...] = ()
    lengths: tuple[int, ...] | None = None
    scaled: str = ""
    invariant: bool = False
    v_first: bool = False

    def draw(self, sizes, gates=0.1, gate_dtype=BF16):
        B, T, H, K, V = (
            for_this_gpu(size) if name in self.scaled else size
            for name, size in zip("BTHKV", sizes, strict=True)
        )
        B = half_of_the_gpu(H, V) if B == HALF else B
        x = draw(B, T, H, K, V, gates, gate_dtype, self.lengths)
        assert self.does <= facts_of(x, batch_invariant=self.invariant)
        return x


def of(B, T, H, *heads):
    return [(B, T, H, K, V) for K, V in heads]


SOME = (0.1, 2.0, "reset")
RANGES = (*MIXED, "resets alone")  # chunks in tier 1 and out of it
KEYS, VALUES = (8, 64, 72, 120, 128, 136, 192, 256), (8, 64, 72, 136, 256, 512)
BATCHES = {1: 64, 15: 4, 64: 2, 65: 2, 130: 2, 1000: 1}  # of sequences of so many tokens
UNEVEN = [
    *[(64, 72), (128, 256), (136, 64), (192, 72), (256, 64)],
    *[(8, 8), (64, 64), (40, 136), (64, 512)],
]
PAIR_LENGTHS = (64, 1, 65, 0, 128, 129, 300, 64, 3)  # slots of either parity, chunks up to five
ONE_LONG = (5, 0, 4000, *[20] * 12, 64, 0)
WIDE, NARROW = [(72, 72), (104, 128), (128, 128), (128, 200), (128, 256)], [(64, 64), (40, 16)]
OTHER_LENGTHS = (
    *((8500,), (8499,), (0, 8500, 0), (500,) * 17),
    *((64,) * 100, (64, 0) * 50, (0,) * 9, (8400, *[1] * 50)),
)
PACKED_WIDE = of(1, SWEPT_TOKENS, 16, (128, 128), (72, 200), (128, 256))
PACKED_NARROW = of(1, SWEPT_TOKENS, 64, *NARROW)
SUMS = "a segment sums the one before"
CALLS = {
    # In turns, so that every K meets every T, and every V both.
    "sizes": Calls(
        {"fused"},
        [
            (B, T, 3, K, VALUES[(i + j) % len(VALUES)])
            for i, (T, B) in enumerate(BATCHES.items())
            for j, K in enumerate(KEYS)
        ],
    ),
    "strong chunks": Calls(
        {"fused"}, of(2, 330, 2, (64, 64), (128, 136), (160, 64), (200, 64)), RANGES
    ),
    "few keys, fp32 gates": Calls({"fused"}, of(70, 200, 3, *UNEVEN[5:]), (), RANGES),
    # More heads than an H200 has clusters for at once: two to four each.
    "clusters": Calls(
        {"forward of several heads a cluster"},
        [
            *[(23, 130, 3, 72, 256), (45, 200, 3, 72, 136), (30, 65, 3, 72, 512)],
            *[(80, 64, 3, 72, 256), (80, 130, 3, 72, 256)],
        ],
        scaled="B",
        invariant=True,
    ),
    # Operands in memory.
    "prepared": Calls(
        {"states.prepared", "backward whole"},
        of(2, 330, 2, (72, 64), (128, 264), (256, 64), (136, 512)),
        fp32_gates=SOME,
        invariant=True,
    ),
    # More chunks than an H200 has blocks for at once; packed, also slots that no sequence uses.
    "prepared, several chunks a block": Calls(
        {"prepare.without_A"}, of(11, 330, 6, (72, 64), (200, 8)), RANGES
    ),
    "prepared, several chunks a block, packed": Calls(
        {"prepare.without_A"},
        of(1, 2900, 6, (72, 64), (200, 8)),
        RANGES,
        lengths=(330,) * 8 + (5,) * 40,
    ),
    # Segments, and the same sequences whole.
    **{
        f"{'packed' if lengths else 'batch'}, {how}": Calls(
            {f"forward {how}", f"backward {how}"},
            of(1, 695, 2, *UNEVEN),
            SOME,
            SOME,
            lengths=lengths,
            invariant=how == "whole",
        )
        for lengths in (None, UNEVEN_LENGTHS)
        for how in ("in segments", "whole")
    },
    "one among many short": Calls(
        {"forward in segments", "backward in segments"},
        of(1, 4316, 2, (64, 64), (128, 136)),
        (0.1, 1.0, "reset"),
        lengths=ONE_LONG,
    ),
    "a long sequence": Calls(
        {"forward in segments", "backward in segments"},
        [
            *of(1, 6400, 1, (64, 64)),
            *of(1, 4101, 2, (128, 256)),
            *of(1, 4101, 1, (136, 72), (192, 64), (200, 72)),
        ],
        (0.01, 0.1, 1.0, 10.0, "reset"),  # e^-2 a segment, ...
    ),
    "segments that sum the one before": Calls(
        {SUMS},
        [
            *[(HALF, 330, 3, 72, 40), (HALF, 1000, 2, 128, 256), (HALF, 1025, 3, 200, 136)],
            *[(HALF, 700, 3, 256, 64), (HALF, 390, 2, 160, 200), (HALF, 520, 2, 64, 128)],
            (HALF, 1000, 3, 8, 200),
        ],
        (0.1, 1.0, "reset", *MIXED),
        (0.1, "reset", "every other chunk"),
        v_first=True,
    ),
    # With bf16 gates these have a kernel of their own, which does not.
    "small heads that sum the one before": Calls(
        {SUMS}, of(HALF, 900, 3, (64, 64), (40, 8)), (), (0.1, "reset", *MIXED)
    ),
    # K and V above 128: pairs of chunks have one S and one dS. One to three, and behind them a
    # chunk without another; of three tiles of values to eight.
    "pairs of chunks": Calls(
        {"gradients.chunk_pair"},
        [
            *[(3, 65, 2, 256, 136), (3, 128, 2, 136, 512), (3, 192, 2, 200, 192)],
            *[(3, 193, 2, 256, 256), (3, 257, 2, 144, 200), (3, 384, 2, 192, 264)],
        ],
        fp32_gates=SOME,
    ),
    "strong chunks of pairs": Calls(
        {"gradients.chunk_pair"}, of(2, 310, 2, (256, 136), (136, 200)), (*RANGES, *FIRST)
    ),
    "pairs of chunks, packed": Calls(
        {"gradients.chunk_pair"}, of(1, 764, 2, (256, 200), (136, 136)), lengths=PAIR_LENGTHS
    ),
    "pairs that two segments share": Calls(
        {"gradients.chunk_pair", "backward in segments of 5 chunks"},
        of(1, 5110, 1, (256, 136)),
        ("every other chunk",),
        scaled="T",
    ),
    "no pairs of chunks": Calls(
        {"gradients.chunk"}, of(2, 200, 2, (256, 136)), (0.1,), invariant=True
    ),
    # Gradients in one sweep, dS on chip.
    "swept": Calls(
        {"gradients.sweep"},
        [
            *[(16, T, 4, K, V) for T in (1, 65, 330) for K, V in WIDE],
            *[(16, 64, 4, 128, 256), (16, 130, 4, 72, 72)],
            *[(32, 200, 4, 128, 256), (33, 200, 4, 128, 256)],  # more than fit at once
        ],
        scaled="B",
    ),
    "narrow, swept": Calls(
        {"gradients.small_sweep"},
        [
            *[(22, T, 9, K, V) for T in (1, 65, 330) for K, V in (*NARROW, (8, 64), (64, 8))],
            *[(22, 64, 9, 64, 64), (22, 130, 9, 64, 64), (53, 200, 8, 64, 64)],
        ],
        scaled="B",
    ),
    "swept, strong chunks": Calls(
        {"gradients.sweep"},
        of(16, 330, 4, (104, 128), (128, 256)),
        RANGES,
        (*GATES, *RANGES),
        scaled="B",
    ),
    "narrow, swept, strong chunks": Calls(
        {"gradients.small_sweep"}, of(22, 330, 9, (64, 64), (40, 24)), RANGES, scaled="B"
    ),
    # Operands and states of more heads than an H200 has clusters for at once, of few chunks.
    "swept by clusters": Calls(
        {"states.cluster", "backward of several heads a cluster"},
        [
            *[(33, 1, 4, 72, 200), (33, 65, 4, 128, 256), (33, 64, 4, 128, 256)],
            *[(49, 190, 4, 72, 200), (64, 128, 4, 128, 256), (65, 129, 4, 104, 256)],
        ],
        (0.1, "every other chunk", "one head"),
        scaled="B",
    ),
    # Parts of one sequence meet in the states between them.
    "segments of many chunks": Calls(
        {"states.cluster.summaries", "backward in segments"},
        of(1, 32768, 4, (128, 256)),
        (0.1, *MIXED),
    ),
    "swept segments": Calls(
        {"gradients.sweep", "backward in segments"},
        of(1, 8200, 16, (128, 128), (128, 256)),
        SOME,
        SOME,
    ),
    "operands and segments in one pass": Calls(
        {"states.cluster.summaries", "states.cluster.summaries_without_A"},
        of(1, 8200, 16, (128, 256), (72, 200)),
        (0.1, *RANGES),
        v_first=True,
    ),
    "narrow, swept segments": Calls(
        {"gradients.small_sweep", "backward in segments"},
        of(1, 8200, 64, (64, 64), (40, 24)),
        (*SOME, *RANGES),
        scaled="H",
        v_first=True,
    ),
    "packed, swept": Calls(
        {"gradients.sweep", "backward in segments"},
        PACKED_WIDE,
        (*GATES, *RANGES),
        SOME,
        lengths=SWEPT_LENGTHS,
        scaled="H",
        v_first=True,
    ),
    "packed, narrow, swept": Calls(
        {"gradients.small_sweep", "backward in segments"},
        PACKED_NARROW,
        (*GATES, *RANGES),
        lengths=SWEPT_LENGTHS,
        scaled="H",
        v_first=True,
    ),
    **{
        f"{len(lengths)} of {sum(lengths)} tokens, {name}": Calls(
            {kernel, "backward in segments"}, sizes, (0.1,), lengths=lengths, scaled="H"
        )
        for lengths in OTHER_LENGTHS
        for name, kernel, sizes in (
            ("swept", "gradients.sweep", PACKED_WIDE),
            ("narrow, swept", "gradients.small_sweep", PACKED_NARROW),
        )
    },
}
