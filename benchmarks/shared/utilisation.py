"""Model FLOPs utilisation of training: products with weights, as a share of a GPU's peak."""

from torch import nn

PEAK_FLOPS = 989e12  # bf16, dense, by the data sheets of both
GPUS = ("H100 80GB HBM3", "H200")
MEANING = (
    "MFU: 6 x parameters of the products x tokens/s over 989 TFLOP/s, the bf16 peak of an H100 and "
    "of an H200. The products are those of linear maps and of the output matrix: 2 FLOPs a "
    "parameter and token forward, 4 backward. The operator, attention and what is computed again "
    "are not counted."
)


def product_parameters(model: nn.Module) -> int:
    """Elements of the weights that tokens are multiplied by; embeddings are only looked up."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


def mfu(parameters: int | None, tokens_per_s: float, device: str) -> str:
    """A cell of a table; '' without `parameters`, or on a GPU whose peak is not known here."""
    if parameters is None or not any(name in device for name in GPUS):
        return ""
    return f"{6 * parameters * tokens_per_s / PEAK_FLOPS:.1%}"
