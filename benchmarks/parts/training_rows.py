"""The models and the ways of training that `bench_training.py` times, by name."""

import dataclasses

SIZES = {
    "374 M": {"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 4, "vocab_size": 32000},
    "1.3 B": {"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 4, "vocab_size": 32000},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What runs. `attention` is the kernel of the Transformer's."""

    model: str = "gla_ext"  # or FLA, Transformer++, Mamba
    size: str = "374 M"
    B: int = 16
    T: int = 2048
    compiled: str = ""  # or model, blocks
    autocast: bool = False  # with fp32 weights; else bf16 weights
    loss: str = ""  # gla_ext: linear; Transformer++: ours
    attention: str = "CUDNN_ATTENTION"
    checkpointing: bool = False
    steps: bool = False  # gla_ext by its step kernels, which have the states in memory
    apart: bool = False  # gla_ext: q, k, v, g and h by products of their own
    accelerated: bool = False  # FLA under gla_ext.fla.accelerate_fla
    hybrid: bool = False  # gla_ext: attention in every sixth block, 16 heads over all tokens


def over_lengths(name: str, row: Row) -> dict[str, Row]:
    """The row, and the same with as many tokens in longer sequences."""
    longer = {f"{name} {T}": dataclasses.replace(row, B=32768 // T, T=T) for T in (8192, 32768)}
    return {name: row} | longer


def large(name: str, row: Row) -> dict[str, Row]:
    """The row at 1.3 B over the lengths of the paper's Figure 6, 32,768 tokens a step."""
    row = dataclasses.replace(row, size="1.3 B")
    lengths = (2048, 8192, 16384, 32768)
    return {f"1.3 B {name} {T}": dataclasses.replace(row, B=32768 // T, T=T) for T in lengths}


ROWS = {
    **over_lengths("eager", Row()),
    **over_lengths("compiled", Row(compiled="model")),
    "compiled by blocks": Row(compiled="blocks"),
    **over_lengths("steps", Row(steps=True)),
    "eager apart": Row(apart=True),
    **over_lengths("hybrid", Row(hybrid=True)),
    "linear loss": Row(loss="linear"),
    "autocast": Row(B=8, autocast=True),
    "eager 8": Row(B=8),
    "linear loss 8": Row(B=8, loss="linear"),
    **over_lengths("FLA", Row("FLA")),
    "FLA 8": Row("FLA", B=8),
    "FLA accelerated": Row("FLA", accelerated=True),
    **over_lengths("Transformer++", Row("Transformer++", compiled="model")),
    "Transformer++ by blocks": Row("Transformer++", compiled="blocks"),
    **over_lengths("Transformer++, our loss", Row("Transformer++", compiled="model", loss="ours")),
    **over_lengths(
        "Transformer++ FA2",
        Row("Transformer++", compiled="model", attention="FLASH_ATTENTION"),
    ),
    "1.3 B": Row(size="1.3 B", B=8),
    "1.3 B checkpointed": Row(size="1.3 B", B=8, checkpointing=True),
    "1.3 B compiled by blocks": Row(size="1.3 B", B=8, compiled="blocks"),
    "1.3 B FLA": Row("FLA", size="1.3 B", B=8),
    "1.3 B FLA checkpointed": Row("FLA", size="1.3 B", B=8, checkpointing=True),
    "1.3 B Transformer++": Row("Transformer++", size="1.3 B", B=8, compiled="blocks"),
    "1.3 B Transformer++ checkpointed": Row(
        "Transformer++", size="1.3 B", B=8, compiled="blocks", checkpointing=True
    ),
    **large("gla_ext", Row()),
    **large("FLA", Row("FLA")),
    **large("Transformer++", Row("Transformer++", compiled="blocks")),
    **large(
        "Transformer++ FA2",
        Row("Transformer++", compiled="blocks", attention="FLASH_ATTENTION"),
    ),
    **large("Mamba", Row("Mamba")),
}
DEFAULT_ROWS = [name for name, row in ROWS.items() if row.model != "FLA" and row.size == "374 M"]
