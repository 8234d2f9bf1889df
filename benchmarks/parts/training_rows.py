"""The models and the ways of training that `bench_training.py` times, by name."""

import dataclasses

SIZES = {
    "374 M": {"hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 4, "vocab_size": 32000},
    "1.3 B": {"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 4, "vocab_size": 32000},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What runs. `attention` is the kernel of the Transformer's."""

    model: str = "gla_ext"  # or FLA, Transformer++
    size: str = "374 M"
    B: int = 16
    T: int = 2048
    compiled: str = ""  # or model, blocks
    autocast: bool = False  # with fp32 weights; else bf16 weights
    loss: str = ""  # gla_ext: linear; Transformer++: ours
    attention: str = "CUDNN_ATTENTION"
    checkpointing: bool = False


ROWS = {
    "eager": Row(),
    "compiled": Row(compiled="model"),
    "compiled by blocks": Row(compiled="blocks"),
    "linear loss": Row(loss="linear"),
    "autocast": Row(B=8, autocast=True),
    "eager 8": Row(B=8),
    "linear loss 8": Row(B=8, loss="linear"),
    "eager 8192": Row(B=4, T=8192),
    "compiled 8192": Row(B=4, T=8192, compiled="model"),
    "eager 32768": Row(B=1, T=32768),
    "compiled 32768": Row(B=1, T=32768, compiled="model"),
    "FLA": Row("FLA"),
    "FLA 8": Row("FLA", B=8),
    "Transformer++": Row("Transformer++", compiled="blocks"),
    "Transformer++, our loss": Row("Transformer++", compiled="blocks", loss="ours"),
    "Transformer++ 8192": Row("Transformer++", B=4, T=8192, compiled="blocks"),
    "Transformer++ 32768": Row("Transformer++", B=1, T=32768, compiled="blocks"),
    "Transformer++ FA2": Row("Transformer++", compiled="blocks", attention="FLASH_ATTENTION"),
    "Transformer++ FA2 8192": Row(
        "Transformer++", B=4, T=8192, compiled="blocks", attention="FLASH_ATTENTION"
    ),
    "Transformer++ FA2 32768": Row(
        "Transformer++", B=1, T=32768, compiled="blocks", attention="FLASH_ATTENTION"
    ),
    "1.3 B": Row(size="1.3 B", B=8),
    "1.3 B checkpointed": Row(size="1.3 B", B=8, checkpointing=True),
    "1.3 B FLA": Row("FLA", size="1.3 B", B=8),
    "1.3 B FLA checkpointed": Row("FLA", size="1.3 B", B=8, checkpointing=True),
    "1.3 B Transformer++": Row("Transformer++", size="1.3 B", B=8, compiled="blocks"),
}
DEFAULT_ROWS = [name for name, row in ROWS.items() if row.model != "FLA" and row.size == "374 M"]
