"""FAULTY, shown as a warning: each slice shifts its own labels."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


# --8<-- [start:faulty]
def shard_then_shift(batch, group):
    """The label of a slice's last token is lost: another rank holds it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shard = {name: x.chunk(size, dim=1)[rank] for name, x in batch.items()}
    labels = shard.pop("labels")  # [batch, seq / sp]
    shard["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=-100)
    # what a model makes up that gets no position_ids: each slice from 0
    positions = torch.arange(labels.shape[1], device=labels.device)
    shard["position_ids"] = positions.expand(labels.shape)
    return shard


# --8<-- [end:faulty]
