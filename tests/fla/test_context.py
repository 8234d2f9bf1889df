"""FLA's context of context parallelism, as the tests of many ranks have recorded it."""

import dataclasses

import torch
from fla_context import OFFSETS, RANKS, context_of


def test_the_recorded_fields_are_flas(fla):
    from fla.ops.cp.context import get_cp_cu_seqlens

    for rank in range(RANKS):
        made = get_cp_cu_seqlens(torch.tensor(OFFSETS), world_size=RANKS, rank=rank)
        recorded = context_of(rank)
        assert type(made).__name__ == type(recorded).__name__
        names = [field.name for field in dataclasses.fields(made)]
        every = [field.name for field in dataclasses.fields(recorded)]
        assert names == every[: None if hasattr(made, every[-1]) else len(names)]  # 0.5.2 has fewer
        for name in names:
            theirs, ours = getattr(made, name), getattr(recorded, name)
            if isinstance(ours, torch.Tensor):
                theirs, ours = theirs.tolist(), ours.tolist()
            assert theirs == ours, name
