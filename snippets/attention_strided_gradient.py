"""FAULTY, shown as a warning: an all-to-all, its backward garbage on gloo."""

import torch
import torch.distributed as dist


# --8<-- [start:faulty]
class AllToAll(torch.autograd.Function):
    """Entry i of the first dimension goes to rank i."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        received = torch.empty_like(gradient)  # with the gradient's strides
        dist.all_to_all_single(received, gradient.contiguous(), group=ctx.group)
        return received, None


# --8<-- [end:faulty]
