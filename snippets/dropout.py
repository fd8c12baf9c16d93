"""Dropout under sequence parallelism: no two ranks drop alike."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


# --8<-- [start:seed]
def seed_dropout(seed):
    """Seeds this rank's generators, on all devices, unlike any other rank's.

    Call it after the weights are made, which come from one seed on all ranks.
    """
    torch.manual_seed(seed + dist.get_rank())


# --8<-- [end:seed]
# --8<-- [start:attention]
def attention_with_dropout(dropout):
    """An `attention` for `ulysses_attention`, as it is in training.

    dropout: probability of an entry of the attention matrix to be dropped. In
        evaluation pass no attention, or 0.0.
    """

    def attention(query, key, value, *, is_causal):
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        copies = query.shape[1] // key.shape[1]
        output = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(copies, dim=1),
            value.repeat_interleave(copies, dim=1),
            dropout_p=dropout,
            is_causal=is_causal,
        )
        return output.transpose(1, 2)

    return attention


# --8<-- [end:attention]
