"""chunk_gla over two GPUs by NCCL; the ranks on one GPU are sm90/test_across_ranks.py.

The tests start this file under torchrun, with the name of one of the functions in RUN.
"""

import datetime
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.cuda

TIMEOUT = 10  # seconds, of the group of a rank that stays away


@pytest.fixture
def torchrun():
    """A function that runs a script on two GPUs."""
    from common import ROOT

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def run(*args):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "NCCL_NVLS_ENABLE": "0"}
        return subprocess.run(
            [*command, "--nproc-per-node", "2", *args],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    return run


def test_results_are_one_gpu_s(torchrun):
    """Every kind of plan, both layouts, packed sequences, and a CUDA graph."""
    result = torchrun("benchmarks/parts/check_across_ranks.py", "--graphs")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WRONG" not in result.stdout and result.stdout.count("right") > 20


def normal(seed, *shapes):
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(*shape, **options) for shape in shapes]


def operator_step(lengths, T, H, K, V, gv=False):
    """A function that makes the operands of other tokens, and a step over a rank's operands.

    Sequences cross the ranks and have states.
    """
    from gla_ext import chunk_gla
    from gla_ext.distributed import build_cp_context

    offsets = None if lengths is None else torch.tensor([0, *lengths], device="cuda").cumsum(0)
    context = build_cp_context(offsets)
    part = T // context.size
    N = 1 if lengths is None else len(context.cut(part, torch.device("cuda")).sequences)

    def make(seed):
        heads, values = (1, part, H, K), (1, part, H, V)
        q, k, g, v, do, gate = normal(seed + context.rank, *[heads] * 3, *[values] * 3)
        g, gate = (torch.nn.functional.logsigmoid(x) / 16 for x in (g, gate))
        h0, dht = (x.float() for x in normal(seed, *[(N, H, K, V)] * 2))
        return [*(x.requires_grad_() for x in (q, k, v, g, gate, h0)), do, dht]

    def step(q, k, v, g, gate, h0, do, dht):
        options = {"gv": gate} if gv else {}
        o, state = chunk_gla(
            q, k, v, g, initial_state=h0, output_final_state=True, cp_context=context, **options
        )
        leaves = (q, k, v, g, h0, *options.values())
        return o.detach(), state.detach(), *torch.autograd.grad((o, state), leaves, (do, dht))

    return make, step


def layer_step():
    """The same of a layer with convolutions, whose halo is gathered too."""
    from gla_ext import GatedLinearAttention
    from gla_ext.distributed import build_cp_context

    torch.manual_seed(0)
    layer = GatedLinearAttention(hidden_size=512, num_heads=4, use_short_conv=True)
    layer, context = layer.to("cuda", torch.bfloat16), build_cp_context(None)

    def make(seed):
        x, do = normal(seed + context.rank, *[(2, 2048, 512)] * 2)
        return [x.requires_grad_(), do]

    def step(x, do):
        o = layer(x, cp_context=context)[0]
        return o.detach(), *torch.autograd.grad(o, (x, *layer.parameters()), do)

    return make, step


STEPS = {
    "rows": (operator_step, None, 16384, 4, 128, 256),
    "packed": (operator_step, (5000, 1, 0, 9000, 2383), 16384, 2, 64, 64),
    "gates on values": (operator_step, None, 2048, 2, 64, 64, True),
    "layer": (layer_step,),
}


def run_graphs():
    """Forward and backward with their all-gathers as one graph, replayed on other tokens: the bits
    of the same step without a graph.
    """
    for name, (of, *args) in STEPS.items():
        make, step = of(*args)
        operands, stream = make(0), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(*operands)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step(*operands)
        before = None
        for seed in (100, 200):
            with torch.no_grad():
                for x, new in zip(operands, make(seed), strict=True):
                    x.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            found = [x.clone() for x in captured]
            for mine, eager in zip(found, step(*operands), strict=True):
                assert torch.equal(mine, eager), (name, seed)
            assert before is None or not torch.equal(before, found[0])
            before = found[0]
        dist.barrier()
        if dist.get_rank() == 0:
            print("right:", name, flush=True)


def test_cuda_graphs(torchrun):
    result = torchrun(__file__, "graphs")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("right:") == len(STEPS)


def run_absent():
    """The second rank stays away from a call."""
    from gla_ext import chunk_gla
    from gla_ext.distributed import build_cp_context

    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    context = build_cp_context(None, group)
    (q,) = normal(0, (1, 1024, 2, 64))
    g = -q.abs()
    chunk_gla(q, q, q, g, cp_context=context)
    torch.cuda.synchronize()
    print("together", flush=True)
    if dist.get_rank() == 1:
        time.sleep(200)
    chunk_gla(q, q, q, g, cp_context=context)
    torch.cuda.synchronize()
    time.sleep(200)  # the watchdog's, which ends the process


def test_a_rank_that_stays_away_ends_the_other(torchrun):
    start = time.monotonic()
    result = torchrun(__file__, "absent")
    assert result.returncode != 0
    assert result.stdout.count("together") == 2, result.stdout + result.stderr
    assert time.monotonic() - start < 150, result.stderr


RUN = {"graphs": run_graphs, "absent": run_absent}

if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    RUN[sys.argv[1]]()
    dist.destroy_process_group()
