"""FAULTY, most of them: sums over the ranks by what torch ships."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_fn


# --8<-- [start:nn]
def nn_all_reduce(x, group):
    """Right. Deprecated in 2.13."""
    return dist_fn.all_reduce(x, group=group)


def nn_all_gather(x, group):
    """Backward fails in groups other than the first ranks of the world."""
    return torch.stack(dist_fn.all_gather(x, group=group)).sum(0)


# --8<-- [end:nn]
# --8<-- [start:funcol]
def funcol_all_reduce(x, group):
    """Right in 2.13, no gradient in 2.3. A private module."""
    return funcol.all_reduce(x, "sum", group)


def funcol_all_gather_single(x, group):
    """Right in 2.13, not there in 2.3. A private module."""
    return funcol.all_gather_single(x.unsqueeze(0), 0, group).sum(0)


# --8<-- [end:funcol]
# --8<-- [start:own_term]
def in_place_all_reduce(x, group):
    """Right value; its gradient is that of this rank's term alone."""
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def all_gather_with_own(x, group):
    """The same: each rank puts its own term back into the graph."""
    size = dist.get_world_size(group)
    shards = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(shards, x.detach(), group=group)
    shards[dist.get_rank(group)] = x
    return torch.stack(shards).sum(0)


# --8<-- [end:own_term]
