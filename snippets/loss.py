"""One loss from the shards of a sequence, as one process would compute it.

Equal in value, and in the gradient that is left when the engine has reduced it.
"""

import torch
import torch.distributed as dist


# --8<-- [start:weighted]
def weighted_all_reduce(loss, weight, group, *, gradient_reduction="mean"):
    """Σ loss·weight / Σ weight over the ranks of `group`.

    loss: this rank's mean loss, 0-dim.
    weight: what it counts, such as this rank's number of valid labels; int or
        0-dim tensor.
    gradient_reduction: what the engine does with gradients over the SP ranks,
        "mean" or "sum".

    Returns the same 0-dim value on every rank, fp64 for fp64, else fp32. A loss
    of weight 0 counts for nothing, even NaN. Where all weights are 0, so are
    value and gradients.
    """
    factor = _factor(group, gradient_reduction)
    loss, weight = _scalars(loss, weight)
    # NaN · 0 is NaN, so fill before multiplying
    weighted = loss.masked_fill(weight == 0, 0) * weight
    return _quotient_of_sums(weighted, weight, group, factor)


# --8<-- [end:weighted]
# --8<-- [start:token_mean]
def token_mean(loss_sum, num_tokens, group, *, gradient_divisor):
    """The mean loss over all tokens of an optimizer step.

    loss_sum: the sum of this rank's token losses, 0-dim.
    num_tokens: this rank's number of valid labels in the whole step; int or
        0-dim tensor.
    group: all ranks that share the step, over SP and DP; None is the world.
    gradient_divisor: D of the engine, which applies (1/D)·Σ over all ranks to
        gradients.

    Returns the same 0-dim value on every rank, fp64 for fp64, else fp32. With
    gradient accumulation, pass each micro-batch's loss_sum with the num_tokens
    of the whole step: values and gradients of the micro-batches add up. With no
    tokens in the whole step it is the sum of the sums, which then are 0.
    """
    if not gradient_divisor > 0:
        raise ValueError(
            f"gradient_divisor={gradient_divisor} must be positive: the engine "
            "applies (1/D)·Σ over all ranks, with D the world size for DDP"
        )
    _size(group)
    loss_sum, num_tokens = _scalars(loss_sum, num_tokens)
    return _quotient_of_sums(loss_sum, num_tokens, group, gradient_divisor)


# --8<-- [end:token_mean]
# --8<-- [start:sum_over_group]
def sum_over_group(x, group, *, gradient_reduction):
    """Σ x over the ranks of `group`; x has the same shape on all of them.

    For losses that need a sum over the whole sequence before a non-linear step,
    such as DPO's. All ranks must go on with the sum in the same way: backward
    takes their gradients for equal, so only first derivatives are right.
    Returns fp64 for fp64, else fp32.
    """
    factor = _factor(group, gradient_reduction)
    return _Sum.apply(_at_least_fp32(x), group, factor)


# --8<-- [end:sum_over_group]
# --8<-- [start:sum]
class _Sum(torch.autograd.Function):
    """Sums over the group. Backward multiplies by `factor`, and asks nobody:
    the gradient that comes in is the same on all ranks."""

    @staticmethod
    def forward(ctx, x, group, factor):
        ctx.factor = factor
        # in one memory layout on all ranks: all_reduce adds what lies in memory
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None, None


# --8<-- [end:sum]
def _quotient_of_sums(numerator, denominator, group, factor):
    both = torch.stack([numerator, denominator])  # one collective for both
    numerator, denominator = _Sum.apply(both, group, factor)
    return numerator / denominator.masked_fill(denominator == 0, 1)


def _scalars(loss, weight):
    loss = _at_least_fp32(loss)
    weight = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
    if loss.dim() or weight.dim():
        raise ValueError(
            f"a loss of shape {list(loss.shape)} and a weight of shape "
            f"{list(weight.shape)}: each rank passes one number for each, 0-dim"
        )
    return loss, weight.detach()


def _at_least_fp32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _factor(group, gradient_reduction):
    """An engine that averages over the ranks divides by the group size, where
    their shares should add up: multiply by it beforehand."""
    factors = {"mean": _size(group), "sum": 1}
    if gradient_reduction not in factors:
        raise ValueError(
            f'gradient_reduction={gradient_reduction!r}: use "mean" or "sum"'
        )
    return factors[gradient_reduction]


def _size(group):
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not in this group: pass the "
            "group that it belongs to"
        )
    return dist.get_world_size(group)
