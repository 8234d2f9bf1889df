"""Trains a byte-level language model of nn.TransformerEncoderLayer on the text of one file.

    python examples/transformer.py [TEXT] [--gla]

With --gla, GLA takes the place of attention: `self_attn` is the one line that changes.
"""

import torch
from text import command_line, windows
from torch import nn
from torch.nn.functional import cross_entropy

from gla_ext import MultiheadGLA


class LanguageModel(nn.Module):
    """A causal encoder over bytes `[B, T]`, T up to max_len; gives logits `[B, T, 256]`."""

    def __init__(self, width: int, heads: int, layers: int, max_len: int, gla: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(max_len, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        if gla:
            layer.self_attn = MultiheadGLA(width, heads, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embedding(tokens) + self.position[:length]
        return self.head(self.encoder(x, mask=mask, is_causal=True))


def main() -> None:
    batches = {"steps": 200, "batch_size": 8, "seq_len": 128, "lr": 1e-3}
    parser = command_line(__doc__, width=128, heads=4, layers=2, **batches)
    parser.add_argument("--gla", action="store_true", help="MultiheadGLA in place of attention")
    args = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor(list(args.text.read_bytes()))
    model = LanguageModel(args.width, args.heads, args.layers, args.seq_len, args.gla)
    model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        rows = windows(text, args.batch_size, args.seq_len + 1).to(args.device)
        logits = model(rows[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.3f} nats/byte", flush=True)


if __name__ == "__main__":
    main()
