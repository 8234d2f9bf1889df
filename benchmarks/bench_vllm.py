"""The two calls by which the layer of gla_ext.vllm attends, on blocks as vLLM lays them out.

    python benchmarks/bench_vllm.py

`short_convolution_` and `chunk_gla_` of a layer of the 374 M model (4 heads, K 128, V 256), in CUDA
graphs, beside the same calls on states that lie alone, and beside `recurrent_gla_step_` where each
request has one token. Outputs are compared before anything is timed. Takes ten seconds.
"""

import argparse
from functools import partial

import torch
from shared.gate import WrongResults
from shared.machine import require_gpu
from shared.timing import slope_us

from gla_ext.ops import chunk_gla_, recurrent_gla_step_
from gla_ext.ops.short_convolution import short_convolution_

H, K, V, W = 4, 128, 256, 4  # heads, a head's keys and values, inputs of a convolution
CHANNELS = H * (2 * K + V)
BATCHES = {
    "1 token": [1],
    "32 of a token": [1] * 32,
    "256 of a token": [1] * 256,
    "a prompt of 2,048": [2048],
    "the same and 32 of a token": [*[1] * 32, 2048],
}


class Calls:
    """Requests of some lengths, whose states lie in every second block."""

    def __init__(self, lengths: list[int]) -> None:
        torch.manual_seed(0)
        device, B, T = {"device": "cuda"}, len(lengths), sum(lengths)
        sizes = (H * V * K * 4, CHANNELS * W * 2)
        pages = torch.zeros(2 * B, sum(sizes), dtype=torch.int8, **device)
        states, inputs = pages.split(sizes, 1)
        states = states.view(torch.float32).view(-1, H, V, K)
        inputs = inputs.view(torch.bfloat16).view(-1, CHANNELS, W)
        slots = torch.arange(B, dtype=torch.int32, **device)
        self.blocks = states, inputs, 2 * slots
        self.alone = states[::2].clone(), inputs[::2].clone(), slots
        self.rows = {"has_initial_state": torch.ones(B, dtype=torch.bool, **device)}
        rows = (1, T)
        if max(lengths) == 1:
            rows = (B, 1)
        else:
            self.rows["cu_seqlens"] = torch.tensor([0, *lengths], **device).cumsum(0).int()
        self.qkv = torch.randn(*rows, CHANNELS, dtype=torch.bfloat16, **device)
        self.g = torch.nn.functional.logsigmoid(torch.randn(*rows, H, K, **device)) / 16
        self.weight = torch.randn(CHANNELS, 1, W, dtype=torch.bfloat16, **device)

    def convolve(self, on_blocks: bool = True) -> torch.Tensor:
        _, state, slots = self.blocks if on_blocks else self.alone
        return short_convolution_(self.qkv, self.weight, state=state, slots=slots, **self.rows)

    def attend(self, on_blocks: bool = True) -> torch.Tensor:
        state, _, slots = self.blocks if on_blocks else self.alone
        pool = {"state": state, "state_v_first": True, "slots": slots}
        return chunk_gla_(*self.heads(), self.g, **pool, **self.rows)

    def step(self) -> torch.Tensor:
        pool = {"state": self.alone[0], "state_v_first": True}
        return recurrent_gla_step_(*self.heads(), self.g, **pool)

    def heads(self) -> list[torch.Tensor]:
        parts = self.qkv.split([H * K, H * K, H * V], -1)
        return [x.unflatten(-1, (H, -1)) for x in parts]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    require_gpu()
    print(f"{torch.cuda.get_device_name()}, us: on blocks / states alone / recurrent_gla_step_")
    for name, lengths in BATCHES.items():
        calls, row = Calls(lengths), [f"{name:28}"]
        for part in (calls.convolve, calls.attend):
            if not torch.equal(part(), part(on_blocks=False)):
                raise WrongResults(f"{part.__name__}, {name}: blocks differ from states alone")
            times = [slope_us(partial(part, side)).median for side in (True, False)]
            row.append(f"{part.__name__} {times[0]:.1f} / {times[1]:.1f}")
        if max(lengths) == 1:
            row.append(f"/ {slope_us(calls.step).median:.1f}")
        print("  ".join(row))


if __name__ == "__main__":
    main()
