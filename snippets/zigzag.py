"""Zigzag slices, which balance a causal ring, and how Ulysses can use them."""

import torch
import torch.distributed as dist


# --8<-- [start:slice]
def zigzag_slice(x, group):
    """[batch, seq, ...] -> [batch, seq/sp, ...]: a chunk from each end.

    Of 2·sp chunks, rank r has chunks r and 2·sp - 1 - r, so that under a causal
    mask each rank has as many pairs of tokens to compute. The order is wrong
    for all that takes slices in the order of the ranks.
    """
    rank, sp_size = dist.get_rank(group), dist.get_world_size(group)
    if x.shape[1] % (2 * sp_size):
        raise ValueError(
            f"{x.shape[1]} tokens cannot be cut into {2 * sp_size} equal "
            "chunks: pad the sequence to a multiple of twice the SP size"
        )
    chunks = x.chunk(2 * sp_size, dim=1)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)


# --8<-- [end:slice]
# --8<-- [start:in_order]
def in_order(attention, group):
    """For `ulysses_attention(..., attention=in_order(sdpa, group))`, where
    slices are zigzag: hands `attention` the sequence in its own order."""
    sp_size = dist.get_world_size(group)
    arrived = [c for r in range(sp_size) for c in (r, 2 * sp_size - 1 - r)]
    sort = [arrived.index(c) for c in range(2 * sp_size)]

    def reordered(query, key, value, *, is_causal):
        query, key, value = (take(x, sort) for x in (query, key, value))
        output = attention(query, key, value, is_causal=is_causal)
        return take(output, arrived)

    return reordered


def take(x, order):
    """[batch, seq, heads, dim], its chunks in another order."""
    if x.shape[1] % len(order):
        raise ValueError(
            f"{x.shape[1]} tokens are not {len(order)} equal chunks: these "
            "slices are not those of `zigzag_slice`"
        )
    chunks = x.chunk(len(order), dim=1)
    return torch.cat([chunks[i] for i in order], dim=1)


# --8<-- [end:in_order]
