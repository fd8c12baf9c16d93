"""FAULTY, shown as a warning: the loss by torch's functional all_gather."""

import torch
import torch.distributed.nn.functional as dist_fn


# --8<-- [start:faulty]
def all_gather_loss(loss, weight, group):
    """Right forward; backward fails in all groups but the first ranks."""
    weight = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
    losses = torch.stack(dist_fn.all_gather(loss, group=group))
    weights = torch.stack(dist_fn.all_gather(weight, group=group))
    return (losses * weights).sum() / weights.sum()


# --8<-- [end:faulty]
