"""A warning at start-up where a trainer's loss would die in backward."""

# --8<-- [start:check]
import warnings

import torch
import torch.distributed as dist


def check_loss_all_gather(group):
    """Warns where backward of torch's functional all_gather breaks.

    Call it on every rank, with the rank's SP group, before training. It sends
    nothing: the groups are taken to be of one size, so that some are not ranks
    0, 1, 2, … if `group` is smaller than the world. Those break over NCCL
    before torch 2.3, and over gloo still in 2.15, on ranks that need not be
    this one. One `UserWarning`, on global rank 0 alone. Silent for other
    backends, and for mixed ones such as cpu:gloo,cuda:nccl: not run there.
    """
    sp_size, world_size = dist.get_world_size(group), dist.get_world_size()
    if dist.get_rank() != 0 or sp_size == world_size:
        return
    backend = dist.get_backend(group)
    old = torch.__version__ < (2, 3)  # compares numbers, not text
    if backend == "gloo" or (backend == "nccl" and old):
        warnings.warn(
            f"torch {torch.__version__} over {backend}, groups of {sp_size} "
            f"ranks in a world of {world_size}: a loss that goes through "
            "torch.distributed.nn.functional.all_gather fails in backward, in "
            "all groups but the first. Use weighted_all_reduce of loss.py; if "
            "you do so already, remove this check.",
            UserWarning,
            stacklevel=2,
        )


# --8<-- [end:check]
