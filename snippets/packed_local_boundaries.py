"""FAULTY, shown as a warning: boundaries from one slice's positions."""

import torch


# --8<-- [start:faulty]
def local_cu_seqlens(position_ids):
    """Right for a whole sequence, [1, seq]; wrong for a slice of it."""
    positions = position_ids.flatten()
    ends = torch.cat([positions[1:] == 0, positions[:1] >= 0])  # and the last
    lengths = positions[ends] + 1
    return torch.cat([positions[:1], lengths]).cumsum(0).int()


# --8<-- [end:faulty]
