"""Tensor-parallel attention as Megatron has it: each rank has some heads."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention import sdpa


# --8<-- [start:tensor_parallel]
def tensor_parallel_attention(
    hidden, weights, head_dim, group, *, sequence_parallel=False
):
    """A causal attention layer with its four projections.

    hidden: [batch, seq, hidden], the same on all ranks of `group`; with
        `sequence_parallel` this rank's slice, [batch, seq/tp, hidden].
    weights: those of this rank's heads: "query", "key" and "value", [heads/tp ·
        head_dim, hidden], and "output", [hidden, heads/tp · head_dim].

    Returns the like of `hidden`. First derivatives only. Sources: Shoeybi et
    al., Megatron-LM, arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198,
    for the slices.
    """
    for name in ("query", "key", "value"):
        if weights[name].shape[0] % head_dim:
            raise ValueError(
                f"{name} has {weights[name].shape[0]} rows on this rank, no "
                f"multiple of head_dim={head_dim}: heads are not cut, so the "
                "group's size must divide the number of query and KV heads"
            )
    if sequence_parallel:
        whole, summed = _AllGather.apply, _ReduceScatter.apply
    else:
        whole, summed = _Copy.apply, _AllReduce.apply
    hidden = whole(hidden, group)
    query, key, value = (
        F.linear(hidden, weights[name]).unflatten(2, (-1, head_dim))
        for name in ("query", "key", "value")
    )  # [batch, seq, heads/tp, head_dim]
    output = sdpa(query, key, value, is_causal=True).flatten(2)
    # Each rank's heads give a term of the output projection's sum.
    return summed(F.linear(output, weights["output"]), group)


# --8<-- [end:tensor_parallel]
# --8<-- [start:collectives]
class _Copy(torch.autograd.Function):
    """Each rank uses it for its own heads, so backward sums over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return all_reduce(gradient, ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return reduce_scatter(gradient, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return all_gather(gradient, ctx.group), None


def all_reduce(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather(x, group):
    """[batch, seq/tp, hidden] -> [batch, seq, hidden]."""
    x = x.contiguous()
    slices = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim=1)


def reduce_scatter(x, group):
    """[batch, seq, hidden] -> its sum's slice, [batch, seq/tp, hidden]."""
    terms = x.chunk(dist.get_world_size(group), dim=1)
    terms = [term.contiguous() for term in terms]
    total = torch.empty_like(terms[0])
    dist.reduce_scatter(total, terms, group=group)
    return total


# --8<-- [end:collectives]
