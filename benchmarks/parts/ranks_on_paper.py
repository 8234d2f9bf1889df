"""A context parallel call of `chunk_gla` on 8 and 64 ranks, on paper, from parts measured on few.

    time(W) = time(now) + 2 (gather(W) - gather(now) + fold(W) - fold(now))
    gather(W) = latency + (W - 1) bytes / bandwidth

A direction has one all-gather and one fold. Everything else of a rank does not depend on their
number: its own tokens' summary and what is applied to them. The fold of W summaries is measured on
one GPU; the all-gather's latency and bandwidth follow from two sizes on the GPUs that are there.
For ranks on several hosts the bandwidth is that of a network, NETWORK.
"""

import torch

GPUS_A_HOST = 8
NETWORK = 50e9  # bytes/s a GPU: one port of 400 Gb/s


def gather_time(W: int, size: int, latency: float, bandwidth: float) -> float:
    """Seconds of an all-gather of `size` bytes a rank."""
    if W > GPUS_A_HOST:
        bandwidth = min(bandwidth, NETWORK)
    return latency + (W - 1) * size / bandwidth


def latency_and_bandwidth(times: dict[int, float], W: int) -> tuple[float, float]:
    """Of the times of two sizes on W ranks."""
    (small, first), (large, second) = sorted(times.items())
    bandwidth = (W - 1) * (large - small) / max(second - first, 1e-9)
    return max(first - (W - 1) * small / bandwidth, 0.0), bandwidth


def fold_call(W: int, H: int, K: int, V: int, device: torch.device):
    """The fold of W ranks' summaries on the last of them, as a function."""
    own = H * (K * V + K)
    summaries = torch.zeros(W * own, device=device)

    def run():
        torch.ops.gla_ext.chunk_gla_fold(
            summaries, None, None, W, 1, 1, H, K, V, True, False, False, [W - 1], [W - 1], []
        )

    return run
