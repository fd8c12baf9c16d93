"""One step on packed documents: the batch cut, attention within documents."""

import functools

import torch
import torch.nn.functional as F

from attention import ulysses_attention
from loss import token_mean
from packed import packed_attention
from sharding import shard_batch


# --8<-- [start:step]
def packed_loss(model, batch, group, gradient_divisor):
    """The loss of a packed batch, to call `backward` on.

    batch: whole on every rank of `group`, with position_ids that begin at 0 in
        each document.
    """
    shard = shard_batch(batch, group)
    attention = functools.partial(
        ulysses_attention,
        group=group,
        attention=packed_attention(shard["position_ids"], group),
    )
    logits = model(shard["input_ids"], shard["position_ids"], attention)
    # A sum over many tokens loses digits in bf16.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = shard["shift_labels"].flatten()
    loss_sum = F.cross_entropy(
        logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum"
    )
    num_tokens = (labels != -100).sum()
    return token_mean(
        loss_sum, num_tokens, None, gradient_divisor=gradient_divisor
    )


# --8<-- [end:step]
