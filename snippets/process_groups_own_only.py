"""FAULTY, shown as warnings: not every rank makes every group."""

import torch
import torch.distributed as dist


# --8<-- [start:own]
def create_own_group(sequence_parallel_size):
    """Each rank makes the one group that it belongs to: right by luck."""
    ranks = torch.arange(dist.get_world_size())
    grid = ranks.view(-1, sequence_parallel_size)
    my_row = dist.get_rank() // sequence_parallel_size
    return dist.new_group(grid[my_row].tolist())


# --8<-- [end:own]
# --8<-- [start:skipped]
def create_evaluation_group(ranks):
    """The other ranks skip the call: the next group of all never comes up."""
    if dist.get_rank() in ranks:
        return dist.new_group(ranks)
    return None


# --8<-- [end:skipped]
