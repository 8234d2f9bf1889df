"""A training loop, whole: a byte-level GLA language model on the text of one file.

    python examples/train.py [TEXT] [--device cuda] [--compile]

`python -m gla_ext.train` is the same with checkpoints, resuming and evaluation on whole files.
"""

import math
from pathlib import Path

import torch
from text import command_line, held_out_loss, load_text, windows

from gla_ext.model import GLAConfig, GLAForCausalLM, count_parameters
from gla_ext.serve.text import Bytes
from gla_ext.train.run_folder import check_nothing_is_lost


def main() -> None:
    sizes = {"hidden_size": 128, "layers": 2, "heads": 2}
    batches = {"steps": 200, "batch_size": 8, "seq_len": 128, "lr": 3e-3}
    parser = command_line(__doc__, out=Path("runs/example"), **sizes, **batches)
    parser.add_argument("--compile", action="store_true", help="one graph; takes a minute before")
    args = parser.parse_args()
    check_nothing_is_lost(args.out, resume=False, overwrite=args.overwrite)
    torch.manual_seed(0)
    train, held_out = load_text(args.text, Bytes(), args.seq_len)
    config = GLAConfig(
        vocab_size=256,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_heads=args.heads,
        initializer_range=args.hidden_size**-0.5,
        bos_token_id=0,  # byte 0, which text does not contain
        eos_token_id=0,
    )
    model = GLAForCausalLM(config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.steps, pct_start=0.1, cycle_momentum=False
    )

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            return model(rows, labels=rows).loss

    step_loss = torch.compile(loss_of, fullgraph=True) if args.compile else loss_of
    print(f"{count_parameters(model):,} parameters on {args.device}, {len(train):,} bytes of text")
    for step in range(args.steps):
        rows = windows(train, args.batch_size, args.seq_len).to(args.device)
        loss = step_loss(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step}: {loss.item() / math.log(2):.3f} bits/byte", flush=True)
    bits = held_out_loss(model, held_out) / math.log(2)
    print(f"held out: {bits:.3f} bits/byte")

    prompt = [Bytes().encode("def ")]
    sample = model.eval().generate(prompt, 100, temperature=0.9, eos_token_id=0)
    print(Bytes().decode(sample[0][1:].tolist()))
    model.save_pretrained(args.out)
    print(f"Wrote {args.out}; python -m gla_ext.serve {args.out} serves it")


if __name__ == "__main__":
    main()
