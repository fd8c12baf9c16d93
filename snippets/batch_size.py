"""What a step holds: samples, tokens and FLOPs, each counted once."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


# --8<-- [start:step]
def accumulation_steps(
    *, global_batch: int, micro_batch: int, dp_size: int
) -> int:
    """Micro-batches that each replica has in a step. A replica is an SP group,
    whose ranks share its samples: so `sp_size` is no argument here.
    """
    at_once = micro_batch * dp_size
    if global_batch < at_once or global_batch % at_once:
        below = global_batch // at_once * at_once
        raise ValueError(
            f"global_batch {global_batch} is no multiple of {at_once}: "
            f"micro_batch {micro_batch} on each of {dp_size} replicas; use "
            + (f"{below} or " if below else "")
            + f"{below + at_once}, or another micro_batch"
        )
    return global_batch // at_once


def tokens_per_step(
    *, micro_batch: int, accumulation: int, dp_size: int, seq: int
) -> int:
    """With padding. `seq` is the whole sequence, not a rank's slice of it."""
    return micro_batch * accumulation * dp_size * seq


# --8<-- [end:step]
# --8<-- [start:valid]
def valid_tokens(shift_labels: Iterable[torch.Tensor]) -> int:
    """Labels other than -100 of a step. Every rank passes its slices of its
    micro-batches; the sum is over all ranks, since each token is on one.
    """
    count = sum((labels != -100).sum() for labels in shift_labels)
    dist.all_reduce(count)
    return count.item()


# --8<-- [end:valid]
# --8<-- [start:flops]
def matrix_parameters(model: nn.Module) -> int:
    """Weights by which each token is multiplied: those of linear layers, with
    the head and without the embedding, which is looked up.
    """
    linear = (x for x in model.modules() if isinstance(x, nn.Linear))
    return sum(x.weight.numel() for x in linear)


def model_flops(
    *,
    parameters: int,
    layers: int,
    width: int,
    lengths: Iterable[int],
    is_causal: bool = True,
) -> int:
    """FLOPs of forward and backward of a step, over all ranks.

    width: query heads times head_dim.
    lengths: of all documents of the step, each whole and once.
    is_causal: each token sees itself and those before it, about half of all
        pairs; False counts all, as many published formulas do.
    """
    lengths = list(lengths)
    pairs = sum(n * (n + 1) // 2 if is_causal else n * n for n in lengths)
    return 6 * parameters * sum(lengths) + 12 * layers * width * pairs


def mfu(
    flops: int, seconds: float, *, peak: float, dp_size: int, sp_size: int
) -> float:
    """Of all ranks' `peak` FLOP/s, the part that a step of `flops` has used."""
    return flops / (seconds * peak * dp_size * sp_size)


# --8<-- [end:flops]
# --8<-- [start:deepspeed]
def deepspeed_batch(
    *, micro_batch: int, accumulation: int, dp_size: int
) -> dict[str, int]:
    """Entries of DeepSpeed's config. Its "gpu" is a replica, not a rank."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch * accumulation * dp_size,
    }


# --8<-- [end:deepspeed]
