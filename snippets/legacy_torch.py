"""A warning at start-up where a trainer's loss would die in backward."""

import warnings

import torch
import torch.distributed as dist


# --8<-- [start:check]
def check_loss_all_gather(group):
    """Warns where backward of torch's functional all_gather breaks.

    Call it on every rank, with the rank's SP group, before training. It sends
    nothing: the groups are taken to be of one size, so that some do not begin
    at global rank 0 if `group` is smaller than the world. Those break over NCCL
    before torch 2.3, and over gloo still in 2.13, on ranks that need not be
    this one. One `UserWarning`, on global rank 0 alone.
    """
    sp_size, world_size = dist.get_world_size(group), dist.get_world_size()
    if dist.get_rank() != 0 or sp_size == world_size:
        return
    backend = dist.get_backend(group)
    old = torch.__version__ < (2, 3)  # compares numbers, not text
    if backend == "gloo" or (backend == "nccl" and old):
        warnings.warn(
            f"torch {torch.__version__} over {backend}: backward of "
            "torch.distributed.nn.functional.all_gather fails in groups that "
            f"do not begin at rank 0, and here groups of {sp_size} ranks share "
            f"a world of {world_size}. Sum the loss with weighted_all_reduce "
            "of loss.py instead.",
            UserWarning,
            stacklevel=2,
        )


# --8<-- [end:check]
