"""Packed documents: each token attends within its own document."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention import sdpa


# --8<-- [start:starts]
def document_starts(position_ids, group):
    """Where documents start in the whole sequence: [batch, seq] of bool.

    position_ids: this rank's slice, [batch, seq/sp], or [3, batch, seq/sp] for
        m-RoPE. They are 0 (on all three axes) where a document starts; a row
        starts one too. Every rank of `group` calls this, once for each batch.

    `ValueError` on every rank where positions fall within a document, as in
    slices that are not in the order of the sequence.
    """
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(
            f"global rank {dist.get_rank()} is not in this group: pass the "
            "group that it belongs to"
        )
    position_ids = position_ids.contiguous()
    slices = [torch.empty_like(position_ids) for _ in range(size)]
    dist.all_gather(slices, position_ids, group=group)
    positions = torch.cat(slices, dim=-1)
    axes = positions.reshape(-1, *positions.shape[-2:])  # [1 or 3, batch, seq]
    starts = (axes == 0).all(0)
    falls = (axes.diff(dim=2) < 0).all(0) & ~starts[:, 1:]
    if falls.any():
        row, token = falls.nonzero()[0].tolist()
        before, after = axes[0, row, token : token + 2].tolist()
        raise ValueError(
            f"row {row}: position {after} follows {before} at token "
            f"{token + 1} of the whole sequence; a document starts at 0, and "
            "slices are in the order of the ranks"
        )
    starts[:, 0] = True
    return starts


# --8<-- [end:starts]
# --8<-- [start:cu_seqlens]
def cu_seqlens(position_ids, group):
    """Documents' boundaries as kernels for packed input take them.

    int32, [documents + 1]: from 0 to batch·seq, for tokens of the whole
    sequence, row after row, [batch·seq, heads/sp, head_dim].
    """
    starts = document_starts(position_ids, group)
    first = starts.flatten().nonzero().flatten()
    return F.pad(first, (0, 1), value=starts.numel()).int()


# --8<-- [end:cu_seqlens]
# --8<-- [start:packed]
def packed_attention(position_ids, group):
    """An `attention` for `ulysses_attention` that keeps documents apart.

    position_ids: this rank's slice, as for `document_starts`. Make it anew for
        each batch, on every rank of `group`; all layers share it.

    Returns `attention(query, key, value, *, is_causal)`: torch's own attention,
    document by document. No mask, so memory grows with the sequence, and time
    with the sum of the squares of the documents' lengths.
    """
    lengths = cu_seqlens(position_ids, group).diff().tolist()
    tokens = list(position_ids.shape[-2:])
    tokens[1] *= dist.get_world_size(group)

    def attention(query, key, value, *, is_causal):
        check_tokens(query, tokens)
        rows = [x.flatten(0, 1)[None] for x in (query, key, value)]
        documents = zip(*(x.split(lengths, dim=1) for x in rows), strict=True)
        outputs = [sdpa(*parts, is_causal=is_causal) for parts in documents]
        return torch.cat(outputs, dim=1).reshape(*tokens, *outputs[0].shape[2:])

    return attention


# --8<-- [end:packed]
# --8<-- [start:mask]
def packed_attention_by_mask(position_ids, group):
    """The same by a mask over pairs of tokens, of batch · seq² bytes.

    A causal one is made in each call, and takes as much again.
    """
    document = document_starts(position_ids, group).cumsum(1)  # [batch, seq]
    same = document[:, None, :, None] == document[:, None, None, :]

    def attention(query, key, value, *, is_causal):
        check_tokens(query, list(document.shape))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        copies = query.shape[1] // key.shape[1]
        output = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(copies, dim=1),
            value.repeat_interleave(copies, dim=1),
            attn_mask=same.tril() if is_causal else same,
        )
        return output.transpose(1, 2)

    return attention


# --8<-- [end:mask]
def check_tokens(query, tokens):
    if list(query.shape[:2]) != tokens:
        raise ValueError(
            f"query is {list(query.shape[:2])} tokens, the positions are "
            f"{tokens}: make the attention anew for each batch"
        )
