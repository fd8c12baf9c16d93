"""Process groups for sequence parallelism, with data parallelism around it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


# --8<-- [start:groups]
@dataclass(frozen=True)
class ParallelGroups:
    """The two groups that this rank belongs to, and its place in each."""

    sp: dist.ProcessGroup  # share one sample, each with a slice of its sequence
    dp: dist.ProcessGroup  # hold the same slice of different samples
    sp_rank: int
    sp_size: int
    dp_rank: int
    dp_size: int


def create_parallel_groups(sequence_parallel_size: int) -> ParallelGroups:
    """Cuts the world into SP and DP groups. Every rank calls it, once.

    SP groups hold neighbouring ranks, which share the fastest links; DP groups
    hold the ranks of equal SP rank. Where the sizes do not fit: `ValueError` on
    every rank, before any group is made.
    """
    check_sizes(dist.get_world_size(), sequence_parallel_size)
    ranks = torch.arange(dist.get_world_size(), device="cpu")
    grid = ranks.view(-1, sequence_parallel_size)  # [dp_size, sp_size]
    # new_group is collective over the world: every rank makes every group, in
    # the same order.
    sp_groups = [dist.new_group(row) for row in grid.tolist()]
    dp_groups = [dist.new_group(column) for column in grid.T.tolist()]

    dp_size, sp_size = grid.shape
    dp_rank, sp_rank = divmod(dist.get_rank(), sp_size)
    return ParallelGroups(
        sp=sp_groups[dp_rank],
        dp=dp_groups[sp_rank],
        sp_rank=sp_rank,
        sp_size=sp_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )


# --8<-- [end:groups]
# --8<-- [start:mesh]
def create_mesh(
    sequence_parallel_size: int, device_type: str
) -> "dist.DeviceMesh":
    """The same grid as a mesh of dimensions ("dp", "sp"). Needs torch 2.2."""
    from torch.distributed.device_mesh import init_device_mesh

    world_size = dist.get_world_size()
    check_sizes(world_size, sequence_parallel_size)
    return init_device_mesh(
        device_type,
        (world_size // sequence_parallel_size, sequence_parallel_size),
        mesh_dim_names=("dp", "sp"),
    )


# --8<-- [end:mesh]
# --8<-- [start:check]
def check_sizes(world_size: int, sequence_parallel_size: int) -> None:
    """Raises `ValueError` unless the SP size divides the world size."""
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    size = sequence_parallel_size
    if type(size) is not int or size not in sizes:
        raise ValueError(
            f"a world of {world_size} ranks cannot be cut into groups of "
            f"sequence_parallel_size={size!r}: use one of "
            f"{sizes}, or start another number of ranks"
        )


# --8<-- [end:check]
