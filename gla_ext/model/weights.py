"""The weights of language models: their initial values and their number."""

from torch import nn

from gla_ext.layers import ShortConvolution
from gla_ext.layers.norms import RMSNorm


def init_weights(module: nn.Module, std: float) -> None:
    """Linear, convolution and embedding weights from N(0, std), biases 0, norm weights 1."""
    for child in module.modules():
        init_own_weights(child, std)


def init_own_weights(module: nn.Module, std: float) -> None:
    """`init_weights` for a single module, without its submodules."""
    if isinstance(module, (nn.Linear, nn.Conv1d, nn.Embedding)):
        nn.init.normal_(module.weight, mean=0.0, std=std)
        if not isinstance(module, nn.Embedding) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, RMSNorm):
        module.reset_parameters()


def reset_convolutions(model: nn.Module) -> None:
    """Gives short convolutions weights from torch's default distribution. With the small range of
    the matrices, four taps would let little of the signal pass.
    """
    for module in model.modules():
        if isinstance(module, ShortConvolution):
            module.reset_parameters()


def count_parameters(module: nn.Module) -> int:
    """Number of distinct parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
