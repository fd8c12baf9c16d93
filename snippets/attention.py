"""Ulysses attention: trade slices of the sequence for heads, and back."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


# --8<-- [start:ulysses]
def ulysses_attention(
    query, key, value, group, *, is_causal=True, attention=None
):
    """Attention over a sequence of which each rank of `group` has a slice.

    query: [batch, seq/sp, heads, head_dim], slices of equal length in the order
        of the ranks.
    key, value: the same; fewer heads are allowed, for value another head_dim.
    attention: called as `attention(query, key, value, is_causal=...)` with the
        whole sequence and this rank's heads, [batch, seq, heads/sp, head_dim];
        returns the like. Its KV heads divide its query heads. Default: `sdpa`.

    Returns this rank's slice, [batch, seq/sp, heads, head_dim of value]. Rank r
    computes query heads [r·heads/sp, (r+1)·heads/sp). First derivatives only.
    Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3.
    """
    sp_size = _check(query, key, value, group)
    attention = attention or sdpa
    if sp_size == 1:
        return attention(query, key, value, is_causal=is_causal)
    copies = kv_copies(query.shape[2], key.shape[2], sp_size)
    if copies > 1:  # some ranks need the same KV head: one copy for each
        key = key.repeat_interleave(copies, dim=2)
        value = value.repeat_interleave(copies, dim=2)
    query, key, value = _ToHeads.apply(group, query, key, value)
    output = attention(query, key, value, is_causal=is_causal)
    return _ToSequence.apply(group, output)


# --8<-- [end:ulysses]
# --8<-- [start:kv]
def kv_copies(heads, kv_heads, sp_size):
    """How many copies of each KV head are sent, so that each rank has its own.

    One, where the ranks can share out the KV heads; one for each rank that
    needs the head, where a head's ranks are whole; else one for each query
    head.
    """
    if kv_heads % sp_size == 0:
        return 1
    if sp_size % kv_heads == 0:
        return sp_size // kv_heads
    return heads // kv_heads


# --8<-- [end:kv]
# --8<-- [start:sdpa]
def sdpa(query, key, value, *, is_causal):
    """torch's attention, for [batch, seq, heads, head_dim]."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped = {}
    if query.shape[1] != key.shape[1]:
        if torch.__version__ >= (2, 5):  # compares numbers, not text
            grouped = {"enable_gqa": True}
        else:
            copies = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(copies, dim=1)
            value = value.repeat_interleave(copies, dim=1)
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, **grouped
    )
    return output.transpose(1, 2)


# --8<-- [end:sdpa]
# --8<-- [start:exchange]
SHORT = 2**22  # bytes of one tensor, at most


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return to_heads(tensors, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        return None, *to_sequence(gradients, ctx.group)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, tensor):
        ctx.group = group
        return to_sequence([tensor], group)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return None, *to_heads([gradient], ctx.group)


def to_heads(tensors, group):
    """[batch, seq/sp, heads, dim] each -> [batch, seq, heads/sp, dim] each.

    Tokens come first in what is sent, so that what comes is in the order of the
    sequence already: the results are views of it.
    """
    sp_size = dist.get_world_size(group)
    # [batch, seq/sp, heads, dim] -> [to rank, seq/sp, batch, heads/sp, dim]
    parts = [
        x.unflatten(2, (sp_size, -1)).permute(2, 1, 0, 3, 4) for x in tensors
    ]
    # [from rank, seq/sp, batch, heads/sp, dim] -> [batch, seq, heads/sp, dim]
    return tuple(
        x.flatten(0, 1).transpose(0, 1) for x in all_to_all(parts, group)
    )


def to_sequence(tensors, group):
    """[batch, seq, heads/sp, dim] each -> [batch, seq/sp, heads, dim] each.

    Short ones share a collective. Long ones go one by one, each sent from where
    it lies: what that saves in copies is more than what a collective costs.
    """
    size = tensors[0].numel() * tensors[0].element_size()
    if len(tensors) > 1 and size > SHORT:
        return tuple(to_sequence([x], group)[0] for x in tensors)
    sp_size = dist.get_world_size(group)
    # [batch, seq, heads/sp, dim] -> [to rank, seq/sp, batch, heads/sp, dim]
    parts = [x.transpose(0, 1).unflatten(0, (sp_size, -1)) for x in tensors]
    # [from rank, seq/sp, batch, heads/sp, dim] -> [batch, seq/sp, heads, dim]
    return tuple(
        x.permute(2, 1, 0, 3, 4).flatten(2, 3) for x in all_to_all(parts, group)
    )


def all_to_all(parts, group):
    """Entry i of each part's first dimension goes to rank i, in one collective.

    Returns tensors of the same shapes: entry i came from rank i.
    """
    widths = [x.shape[3] * x.shape[4] for x in parts]
    if len(parts) == 1:
        send = parts[0].flatten(3).contiguous()  # no copy where batch is 1
    else:
        send = parts[0].new_empty(*parts[0].shape[:3], sum(widths))
        for place, x in zip(send.split(widths, dim=3), parts, strict=True):
            place.unflatten(3, x.shape[3:]).copy_(x)
    # Contiguous, whatever came in: gloo writes nonsense into strided memory.
    received = torch.empty(send.shape, dtype=send.dtype, device=send.device)
    dist.all_to_all_single(received, send, group=group)
    return [
        piece.unflatten(3, x.shape[3:])
        for piece, x in zip(received.split(widths, dim=3), parts, strict=True)
    ]


# --8<-- [end:exchange]
# --8<-- [start:check]
def _check(query, key, value, group):
    """The group's size. `ValueError` on every rank that sees the shapes."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not in this group: pass the "
            "group that it belongs to"
        )
    shapes = [list(x.shape) for x in (query, key, value)]
    if (
        any(len(shape) != 4 for shape in shapes)
        or not shapes[0][:2] == shapes[1][:2] == shapes[2][:2]
        or shapes[1][2] != shapes[2][2]
        or shapes[0][3] != shapes[1][3]
    ):
        raise ValueError(
            f"query {shapes[0]}, key {shapes[1]}, value {shapes[2]}: each is "
            "[batch, seq/sp, heads, head_dim]; key and value have equally many "
            "heads, query and key the same head_dim"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: "
            "they travel together, so cast them to one dtype first"
        )
    sp_size = dist.get_world_size(group)
    heads, kv_heads = shapes[0][2], shapes[1][2]
    if heads % sp_size:
        sizes = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"{heads} query heads cannot be shared out over {sp_size} ranks: "
            f"use an SP size of {sizes}"
        )
    if heads % kv_heads:
        raise ValueError(
            f"{heads} query heads cannot share {kv_heads} KV heads evenly: the "
            "number of KV heads must divide that of query heads"
        )
    return sp_size


# --8<-- [end:check]
