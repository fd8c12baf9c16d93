"""Packed documents by FlexAttention: a mask in blocks, most of them empty."""

import functools

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from packed import check_tokens, document_starts

# Not compiled, the one has all scores in memory, the other all pairs of tokens.
compiled_attention = torch.compile(flex_attention)
compiled_block_mask = torch.compile(create_block_mask)


# --8<-- [start:flex]
def packed_flex_attention(position_ids, group):
    """As `packed_attention`, in one kernel for all documents. Needs torch 2.5.

    A block is 128 x 128 pairs of tokens; those between documents are skipped.
    Backward needs a GPU: on CPU, `NotImplementedError`.
    """
    document = document_starts(position_ids, group).cumsum(1)  # [batch, seq]
    batch, seq = document.shape

    @functools.cache  # once for each batch, not for each layer
    def block_mask(is_causal):
        def allowed(row, head, q, k):
            same = document[row, q] == document[row, k]
            return same & (q >= k) if is_causal else same

        create = compiled_block_mask if document.is_cuda else create_block_mask
        return create(allowed, batch, None, seq, seq, device=document.device)

    def attention(query, key, value, *, is_causal):
        check_tokens(query, [batch, seq])
        kernel = compiled_attention if query.is_cuda else flex_attention
        output = kernel(
            *(x.transpose(1, 2) for x in (query, key, value)),
            block_mask=block_mask(is_causal),
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return output.transpose(1, 2)

    return attention


# --8<-- [end:flex]
