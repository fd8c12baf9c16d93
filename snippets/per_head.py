"""Something for each head, such as a scale, a sink or a slope of ALiBi."""

import torch.distributed as dist

from attention import sdpa


# --8<-- [start:own]
def own_heads(per_head, group):
    """[heads, ...] -> [heads/sp, ...]: this rank's, as `ulysses_attention` has.

    A parameter gets gradients from each rank for that rank's heads, and zeros
    for the others: the sum over the group is the whole.
    """
    sp_size = dist.get_world_size(group)
    heads = per_head.shape[0]
    if heads % sp_size:
        raise ValueError(
            f"{heads} entries for {sp_size} ranks: one for each query head, "
            "whose number the SP size divides"
        )
    return per_head.chunk(sp_size)[dist.get_rank(group)]


# --8<-- [end:own]
# --8<-- [start:scaled]
def scaled_attention(scale, group):
    """An `attention` whose queries are scaled by head. scale: [heads]."""

    def attention(query, key, value, *, is_causal):
        scaled = query * own_heads(scale, group)[:, None]
        return sdpa(scaled, key, value, is_causal=is_causal)

    return attention


# --8<-- [end:scaled]
