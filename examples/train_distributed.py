"""Training on many processes, whole: shards, tensor parallel and context parallel of one model.

    torchrun --nproc-per-node 2 examples/train_distributed.py [TEXT] [--device cpu]
    torchrun --nproc-per-node 8 examples/train_distributed.py \\
        --tensor-parallel 2 --context-parallel 2

Each process has a GPU, and they talk over NCCL; with --device cpu they are on the CPU, over gloo.
`torchrun -m gla_ext.train` is the same with checkpoints, resuming and evaluation.
"""

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from text import command_line, load_text, windows
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor.parallel import parallelize_module

from gla_ext.distributed import build_cp_context, shard_model, tensor_parallel_plan
from gla_ext.model import GLAConfig, GLAForCausalLM
from gla_ext.serve.text import Bytes
from gla_ext.train.run_folder import check_nothing_is_lost


def main() -> None:
    batches = {"steps": 200, "batch_size": 8, "seq_len": 128, "lr": 3e-3}  # of all together
    processes = {"tensor_parallel": 1, "context_parallel": 1}  # of a layer, of a sequence
    out = Path("runs/example-distributed")
    parser = command_line(__doc__, out=out, hidden_size=128, **batches, **processes)
    args = parser.parse_args()
    check_nothing_is_lost(args.out, resume=False, overwrite=args.overwrite)
    kind = torch.device(args.device).type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tp, cp = args.tensor_parallel, args.context_parallel
    dp = size // (tp * cp)
    for name, count, parts in (
        ("the number of processes", size, tp * cp),
        ("--batch-size", args.batch_size, dp),
        ("--seq-len", args.seq_len, cp),
    ):
        if count % parts:
            raise SystemExit(f"expected {name} to be a multiple of {parts}, got {count}")
    mesh = dist.init_device_mesh(kind, (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))

    torch.manual_seed(0)  # on every process: all begin with one model and draw the same batches
    train, _ = load_text(args.text, Bytes(), args.seq_len)
    config = GLAConfig(
        vocab_size=256, hidden_size=args.hidden_size, num_hidden_layers=2, num_heads=2
    )
    model = GLAForCausalLM(config).to(kind)
    if tp > 1:
        parallelize_module(model, mesh["tp"], tensor_parallel_plan(model, loss_parallel=True))
    dtype = torch.bfloat16 if kind == "cuda" else None  # of products
    shards = shard_model(model, mesh["dp", "cp"]._flatten("dp_cp"), param_dtype=dtype)
    context = build_cp_context(None, mesh["cp"].get_group()) if cp > 1 else None
    optimizer = torch.optim.AdamW(
        shards.parameters.values(), lr=args.lr, betas=(0.9, 0.95), fused=True
    )

    for step in range(args.steps):
        rows = windows(train, args.batch_size, args.seq_len).to(kind)
        rows = rows.chunk(dp)[mesh.get_local_rank("dp")]  # this process's sequences,
        tokens = rows.chunk(cp, 1)[mesh.get_local_rank("cp")]  # and its part of each
        loss = model(tokens, labels=tokens, cp_context=context).loss
        loss.backward()
        shards.take_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # each adds its loss; processes of one "dp" have the same
            if rank == 0:
                bits = mean.item() / size / math.log(2)
                print(f"step {step}: {bits:.3f} bits/byte on {size} processes", flush=True)

    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        model = GLAForCausalLM(config)
        model.load_state_dict(whole)
        model.save_pretrained(args.out)
        print(f"Wrote {args.out}; python -m gla_ext.serve {args.out} serves it")
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
