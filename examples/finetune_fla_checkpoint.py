"""Fine-tunes a language model that flash-linear-attention saved, and saves it for FLA again.

    python examples/finetune_fla_checkpoint.py CHECKPOINT OUT [TEXT] [--device cuda]

CHECKPOINT is the folder that FLA's GLAForCausalLM.save_pretrained wrote: config.json and
model.safetensors, with its tokenizer (which takes transformers to read) or, without one, a model of
bytes. FLA itself is not needed. The weights are trained and saved in fp32.
"""

import torch
from text import command_line, held_out_loss, load_text, windows

from gla_ext.model import GLAForCausalLM
from gla_ext.serve.text import Bytes, load_tokenizer
from gla_ext.train.run_folder import check_nothing_is_lost


def main() -> None:
    batches = {"steps": 100, "batch_size": 4, "seq_len": 256, "lr": 1e-4}
    args = command_line(__doc__, "checkpoint", "out", **batches).parse_args()
    check_nothing_is_lost(args.out, resume=False, overwrite=args.overwrite)
    torch.manual_seed(0)
    model = GLAForCausalLM.from_pretrained(args.checkpoint).to(args.device).train()
    tokenizer = load_tokenizer(args.checkpoint, model.config.vocab_size)
    train, held_out = load_text(args.text, tokenizer, args.seq_len)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    print(f"before: held out {held_out_loss(model, held_out):.3f} nats/token", flush=True)
    for step in range(args.steps):
        rows = windows(train, args.batch_size, args.seq_len).to(args.device)
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: {loss.item():.3f} nats/token", flush=True)
    print(f"after: held out {held_out_loss(model, held_out):.3f} nats/token")
    model.save_pretrained(args.out)
    if not isinstance(tokenizer, Bytes):
        tokenizer.save_pretrained(args.out)
    print(f"Wrote {args.out}")


if __name__ == "__main__":
    main()
