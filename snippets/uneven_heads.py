"""Ulysses attention where the SP size does not divide the query heads."""

import itertools

import torch
import torch.distributed as dist

from attention import kv_copies, sdpa


def ulysses_attention_uneven(
    query, key, value, group, *, is_causal=True, attention=None
):
    """`ulysses_attention` of attention.py, where some ranks have a head more.

    query, key, value, attention: as there. Rank r computes query heads
        [r·heads//sp, (r+1)·heads//sp); there must be one for each rank.

    Returns this rank's slice, [batch, seq/sp, heads, head_dim of value].
    """
    sp_size, heads = _check(query, key, value, group), query.shape[2]
    attention = attention or sdpa
    # One KV head for each rank, or one for each query head: see head_shares.
    copies = kv_copies(heads, key.shape[2], sp_size)
    key, value = (x.repeat_interleave(copies, dim=2) for x in (key, value))
    query, key, value = to_heads([query, key, value], group)
    output = attention(query, key, value, is_causal=is_causal)
    return to_sequence(output, heads, group)


def head_shares(heads, sp_size):
    """How many heads each rank gets, those with one more spread out evenly.

    Where the KV heads divide the ranks, the ranks of a KV head then have all of
    its query heads, and no others: 28 over 4 on 8 ranks is 3, 4, 3, 4, …
    """
    bounds = [rank * heads // sp_size for rank in range(sp_size + 1)]
    return [end - start for start, end in itertools.pairwise(bounds)]


def to_heads(tensors, group):
    """[batch, seq/sp, heads, dim] each -> [batch, seq, rank's heads, dim]."""
    sp_size, rank = dist.get_world_size(group), dist.get_rank(group)
    # For each tensor, and each rank to send to: [seq/sp, batch, heads, dim]
    parts = [
        x.transpose(0, 1).split(head_shares(x.shape[2], sp_size), dim=2)
        for x in tensors
    ]
    # For each rank, its parts of all tensors in one: [seq/sp, batch, width]
    send = [
        torch.cat([x.flatten(2) for x in of_rank], dim=2)
        for of_rank in zip(*parts, strict=True)
    ]
    received = _AllToAll.apply(
        torch.cat([x.flatten() for x in send]),
        [x.numel() for x in send],
        [send[rank].numel()] * sp_size,  # slices are of equal length
        group,
    )
    # What came lies in the order of the sequence: [seq, batch, width]
    whole = received.view(-1, *send[rank].shape[1:])
    widths = [x[rank].shape[2] * x[rank].shape[3] for x in parts]
    return [
        piece.unflatten(2, (-1, x.shape[3])).transpose(0, 1)
        for piece, x in zip(whole.split(widths, dim=2), tensors, strict=True)
    ]


def to_sequence(x, heads, group):
    """[batch, seq, rank's heads, dim] -> [batch, seq/sp, heads, dim]."""
    sp_size = dist.get_world_size(group)
    batch, seq, _, dim = x.shape
    tokens = seq // sp_size
    sizes = [
        tokens * batch * share * dim for share in head_shares(heads, sp_size)
    ]
    received = _AllToAll.apply(
        x.transpose(0, 1).flatten(),
        [x.numel() // sp_size] * sp_size,
        sizes,
        group,
    )
    parts = [
        part.view(tokens, batch, -1, dim) for part in received.split(sizes)
    ]
    return torch.cat(parts, dim=2).transpose(0, 1)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, send, send_sizes, receive_sizes, group):
        ctx.back = receive_sizes, send_sizes, group
        received = send.new_empty(sum(receive_sizes))
        dist.all_to_all_single(
            received, send.contiguous(), receive_sizes, send_sizes, group=group
        )
        return received

    @staticmethod
    def backward(ctx, gradient):
        return _AllToAll.apply(gradient, *ctx.back), None, None, None


def _check(query, key, value, group):
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
        or shapes[0][2] % shapes[1][2]
        or shapes[0][3] != shapes[1][3]
    ):
        raise ValueError(
            f"query {shapes[0]}, key {shapes[1]}, value {shapes[2]}: each is "
            "[batch, seq/sp, heads, head_dim]; key and value have equally many "
            "heads, which divide those of query; query and key have the same "
            "head_dim"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: "
            "they travel together, so cast them to one dtype first"
        )
    sp_size, heads = dist.get_world_size(group), shapes[0][2]
    if heads < sp_size:
        raise ValueError(
            f"{heads} query heads on {sp_size} ranks: each rank needs one, so "
            f"use an SP size of {heads} at most"
        )
    return sp_size
