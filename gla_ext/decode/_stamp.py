"""Sees, at little cost, that a model has changed."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

_KINDS = ("_modules", "_parameters", "_buffers")
# What has happened where one of the lists of `Stamp._look` differs.
_WORDS = ("has other members", "replaced", "changed", "moved", "written")


class ChangedError(RuntimeError):
    """The model has changed since the states that are kept were made."""


class Stamp:
    """What a model is now, as far as a look of 0.2 ms (24 layers) shows.

    It sees modules, parameters and buffers; flags of modules (`training` and all that is True or
    False); addresses of tensors; and versions of tensors, which every operator that writes to one
    moves on. Inference tensors have no version. It does not see writes through `.data`, by fused
    optimizers (torch 2.11 moves on no version there), by replays of CUDA graphs or by kernels that
    torch does not know. Nor does it see other attributes, what containers hold, hooks and classes.

    It keeps these modules and tensors alive.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(f"{name}.", module) for name, module in model.named_modules()]
        named[0] = ("", model)
        owners = [(prefix, vars(module)[kind]) for prefix, module in named for kind in _KINDS]
        self._members = [members for _, members in owners]
        flags = [
            (prefix + flag, vars(module), flag)
            for prefix, module in named
            for flag, value in vars(module).items()
            if type(value) is bool
        ]
        self._flags = [(state, flag) for _, state, flag in flags]
        held = [(prefix + name, x) for prefix, members in owners for name, x in members.items()]
        self._held = [x for _, x in held]  # else another may get its id
        tensors = [(name, x) for name, x in held if isinstance(x, Tensor)]
        placed = [(name, x) for name, x in tensors if _has_address(x)]
        counted = [(name, x) for name, x in tensors if not x.is_inference()]
        self._placed, self._counted = [x for _, x in placed], [x for _, x in counted]
        self._names = [
            [prefix[:-1] or "the model" for prefix, _ in owners],
            *([name for name, *_ in entries] for entries in (held, flags, placed, counted)),
        ]
        self._was = self._look()

    def renewed(self, model: nn.Module) -> Stamp:
        """The model's stamp now. If only values changed it is this one, in a tenth of the time."""
        found = self._look()
        if found[:4] != self._was[:4]:
            return Stamp(model)
        self._was = found
        return self

    def _look(self) -> list[list[object]]:
        return [
            [*map(len, self._members)],
            [*map(id, itertools.chain.from_iterable(map(dict.values, self._members)))],
            [state.get(flag) for state, flag in self._flags],
            [x.data_ptr() for x in self._placed],
            [x._version for x in self._counted],
        ]

    def check(self, asker: str) -> None:
        """Raises ChangedError, in the name of `asker`, if it sees a change."""
        found = self._look()
        if found == self._was:
            return
        for names, was, now, word in zip(self._names, self._was, found, _WORDS, strict=True):
            for name, one, other in zip(names, was, now, strict=False):
                if one != other:
                    raise ChangedError(
                        f"{asker}: expected the model to be as it was at first or at the last "
                        f"refresh(), got {name} {word} since; call refresh()"
                    )


def _has_address(x: Tensor) -> bool:
    try:
        x.data_ptr()
    except RuntimeError:  # a tensor of others, as a DTensor is
        return False
    return True
