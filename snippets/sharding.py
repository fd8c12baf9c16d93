"""A batch cut along its sequence: each rank of an SP group gets its slice.

Labels are shifted before the cut: the label of a slice's last token is the
first token of the next slice, which another rank holds.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


# --8<-- [start:shard]
def shard_batch(
    batch: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    *,
    pad_token_id: int = 0,
) -> dict[str, Any]:
    """This rank's slice of a batch, which all ranks of `group` hold alike.

    input_ids: [batch, seq], or inputs_embeds: [batch, seq, hidden].
    labels: [batch, seq], one for each token, not shifted. They come back as
        shift_labels, where the last token of a document has -100. A batch that
        brings shift_labels instead has them sliced as they are.
    position_ids: [batch, seq], or [3, batch, seq] for m-RoPE: a document starts
        where they are 0, on all three axes. Without them: 0 to seq - 1.
    attention_mask: [batch, seq] and all 1; it does not come back.
    Other tensors that begin with [batch, seq] are sliced, and padded with 0.
    What remains is passed on as it is.
    group: the SP group; None is the world.

    The sequence is padded on the right to the next multiple of the group size:
    a document of its own, with positions from 0 and labels -100. Returns a new
    dict; its slices share no memory with the batch. What does not fit is a
    `ValueError`, before anything is cut.

    After UlyssesSPDataLoaderAdapter in DeepSpeed's ulysses_sp.py, which lets
    labels cross documents, and padding continue the last one.
    """
    batch_size, seq, device = check_batch(batch, group, pad_token_id)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    padding = -seq % size
    length = (seq + padding) // size  # of each slice
    start, stop = rank * length, (rank + 1) * length

    dropped = ("attention_mask", "labels", "position_ids")
    whole = {name: x for name, x in batch.items() if name not in dropped}
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(seq, device=device).repeat(batch_size, 1)
    labels = batch.get("labels")
    if labels is not None:
        axes = positions.reshape(-1, batch_size, seq)  # [1 or 3, batch, seq]
        first = (axes == 0).all(0)  # [batch, seq], of each document
        labels = labels.masked_fill(first, -100)  # no token predicts these
        whole["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=-100)

    shard = {}
    pad_with = {"input_ids": pad_token_id, "shift_labels": -100}
    for name, x in whole.items():
        if torch.is_tensor(x) and x.shape[:2] == (batch_size, seq):
            x = x[:, start:stop]  # at the end it is shorter, or empty
            pad = [0, 0] * (x.dim() - 2) + [0, length - x.shape[1]]
            x = F.pad(x, pad, value=pad_with.get(name, 0)).contiguous()
        shard[name] = x  # [batch, length, ...]
    own = torch.arange(padding, dtype=positions.dtype, device=positions.device)
    own = own.expand(*positions.shape[:-1], padding)
    padded = torch.cat([positions, own], dim=-1)  # [..., batch, seq + padding]
    shard["position_ids"] = padded[..., start:stop].clone()
    return shard


# --8<-- [end:shard]
# --8<-- [start:check]
def check_batch(batch, group, pad_token_id):
    """Batch size, sequence length and device of a batch in which all fits."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not in this group: pass the "
            "group that it belongs to"
        )
    if pad_token_id is None:
        raise ValueError(
            "pad_token_id=None: pass any token of the vocabulary, such as the "
            "tokenizer's eos_token_id; its label is -100"
        )
    dims = {"input_ids": 2, "inputs_embeds": 3, "labels": 2, "shift_labels": 2}
    named = {
        name: batch[name]
        for name in (*dims, "position_ids", "attention_mask")
        if batch.get(name) is not None
    }
    for name, x in named.items():
        if not torch.is_tensor(x):
            raise ValueError(f"{name} is a {type(x).__name__}: pass a tensor")
    tokens = named.get("input_ids", named.get("inputs_embeds"))
    if tokens is None:
        raise ValueError(
            f"a batch of {list(batch)}: it needs input_ids or inputs_embeds"
        )
    shape = list(tokens.shape[:2])  # [batch, seq]
    for name in [name for name in dims if name in named]:
        x = named[name]
        if x.dim() != dims[name] or list(x.shape[:2]) != shape or 0 in shape:
            raise ValueError(
                f"{name} of shape {list(x.shape)} with tokens of shape "
                f"{shape}: pass [batch, seq], one entry for each token"
            )
    if "labels" in named and "shift_labels" in named:
        raise ValueError("labels and shift_labels: pass one of them")
    positions = named.get("position_ids")
    if positions is not None and (
        positions.dim() not in (2, 3) or list(positions.shape[-2:]) != shape
    ):
        raise ValueError(
            f"position_ids of shape {list(positions.shape)} with tokens of "
            f"shape {shape}: pass {shape}, or {[3, *shape]} for m-RoPE"
        )
    mask = named.get("attention_mask")
    if mask is not None and list(mask.shape) != shape:
        raise ValueError(
            f"attention_mask of shape {list(mask.shape)} with tokens of shape "
            f"{shape}: a slice cannot carry it. Leave it out, and separate "
            "documents by position_ids that start at 0 in each"
        )
    if mask is not None and not (mask == 1).all():
        raise ValueError(
            f"attention_mask has {int((mask != 1).sum())} of {mask.numel()} "
            "entries that are not 1: a slice cannot carry it. Leave it out. "
            "Padding on the right needs none under causal attention, only "
            "labels of -100; pack other samples, with position_ids that start "
            "at 0 in each"
        )
    return (*shape, tokens.device)


# --8<-- [end:check]
