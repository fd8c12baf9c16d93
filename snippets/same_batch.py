"""All ranks of an SP group hold the same sample: a loader, and a check."""

import ctypes
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


# --8<-- [start:loader]
def create_loader(
    dataset: Dataset,
    *,
    batch_size: int,
    dp_rank: int,
    dp_size: int,
    seed: int = 0,
    **options: Any,
) -> DataLoader:
    """The batches of one replica, the same on all ranks of its SP group.

    dp_rank, dp_size: of `create_parallel_groups`, not the global rank and the
        world size, which DistributedSampler takes by default.
    seed: the same on all ranks.
    options: for DataLoader, such as collate_fn and num_workers.

    Call `loader.sampler.set_epoch(epoch)` on every rank before each epoch. What
    does not fill a batch on every replica is left out, in each epoch another
    part. A dataset too small for that: `ValueError`.
    """
    sampler = DistributedSampler(
        dataset, num_replicas=dp_size, rank=dp_rank, seed=seed, drop_last=True
    )
    # Workers are seeded from it, so a random transform gives all ranks of the
    # SP group the same. The default is torch's own, often seeded by rank.
    generator = torch.Generator().manual_seed(seed + dp_rank)
    loader = DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        generator=generator,
        drop_last=True,
        **options,
    )
    if len(loader) == 0:
        raise ValueError(
            f"{len(dataset)} samples give no batch of {batch_size} on each of "
            f"{dp_size} replicas: use a smaller batch_size or dp_size"
        )
    return loader


# --8<-- [end:loader]
# --8<-- [start:check]
def check_same_batch(
    batch: Mapping[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Raises the same `ValueError` on every rank of `group` unless all hold the
    same batch; it names the ranks, by their global number, and what differs.

    Every rank of the group calls it, before `shard_batch`. What travels is a
    digest of each tensor. Of other values only the type is compared. Over NCCL,
    `torch.cuda.set_device` comes first. None is the world.
    """
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not in this group: pass the "
            "group that it belongs to"
        )
    mine = {name: describe(value) for name, value in batch.items()}
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (dist.get_rank(), mine), group=group)

    differences = []
    names = dict.fromkeys(name for _, theirs in everyone for name in theirs)
    for name in names:
        ranks = {}  # which hold the same under this name
        for rank, theirs in everyone:
            ranks.setdefault(theirs.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            differences.append(f"  {name}:")
            differences += [
                f"    ranks {on}: {what}" for what, on in ranks.items()
            ]
    if differences:
        raise ValueError(
            "the ranks of this SP group hold different batches:\n"
            + "\n".join(differences)
            + "\nsample by dp_rank, with the same seed and epoch on all of them"
        )


def describe(value: Any) -> str:
    """What is the same for equal tensors: dtype, shape, digest of the bytes."""
    if not torch.is_tensor(value) or value.layout != torch.strided:
        return type(value).__name__
    x = value.detach().cpu().contiguous()
    content = ctypes.string_at(x.data_ptr(), x.numel() * x.element_size())
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return f"{str(x.dtype)[6:]} {list(x.shape)} {digest}"


# --8<-- [end:check]
