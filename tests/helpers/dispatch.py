"""What reaches the dispatcher."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """The operators that are called inside, in `made`: name, arguments, and what is returned."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.made.append((function.overloadpacket.__name__, args, result))
        return result

    def count(self, name: str) -> int:
        return len(self.arguments(name))

    def arguments(self, name: str) -> list[tuple]:
        return [args for made, args, _ in self.made if made == name]

    def names(self) -> list[str]:
        return [name for name, _, _ in self.made]

    def largest(self) -> int:
        """Elements of the largest tensor that an operator returns."""
        flat = torch.utils._pytree.tree_leaves([result for *_, result in self.made])
        return max(t.numel() for t in flat if isinstance(t, torch.Tensor))
