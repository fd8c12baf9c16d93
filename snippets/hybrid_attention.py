"""Ulysses among neighbouring ranks and a ring across them, for few heads."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from attention import ulysses_attention
from ring_attention import ring_attention


# --8<-- [start:hybrid]
@dataclass(frozen=True)
class HybridGroups:
    """The two groups of this rank within its SP group."""

    ulysses: dist.ProcessGroup  # neighbours, whose slices make one block
    ring: dist.ProcessGroup  # ranks with the same heads of different blocks


def create_hybrid_groups(
    sequence_parallel_size: int, ulysses_size: int
) -> HybridGroups:
    """Cuts each SP group, neighbouring ranks, once more. Every rank calls it.

    Slices of the sequence stay in the order of the ranks: the ranks of a
    Ulysses group have neighbouring slices, which make one block, and block b
    is that of rank b of the ring.
    """
    world_size, sp_size = dist.get_world_size(), sequence_parallel_size
    if (
        min(sp_size, ulysses_size) < 1
        or world_size % sp_size
        or sp_size % ulysses_size
    ):
        raise ValueError(
            f"a world of {world_size} ranks, sequence_parallel_size={sp_size}, "
            f"ulysses_size={ulysses_size}: each must divide the one before it"
        )
    ranks = torch.arange(world_size, device="cpu")
    grid = ranks.view(-1, sp_size // ulysses_size, ulysses_size)
    # new_group is collective over the world: every rank makes every group, in
    # the same order.
    rows = [dist.new_group(row) for row in grid.flatten(0, 1).tolist()]
    columns = [dist.new_group(c) for c in grid.mT.flatten(0, 1).tolist()]
    replica, sp_rank = divmod(dist.get_rank(), sp_size)
    return HybridGroups(
        ulysses=rows[dist.get_rank() // ulysses_size],
        ring=columns[replica * ulysses_size + sp_rank % ulysses_size],
    )


def hybrid_attention(query, key, value, groups, *, is_causal=True):
    """As `ulysses_attention`; only `groups.ulysses` must divide the heads."""
    ring = functools.partial(ring_attention, group=groups.ring)
    return ulysses_attention(
        query, key, value, groups.ulysses, is_causal=is_causal, attention=ring
    )


# --8<-- [end:hybrid]
