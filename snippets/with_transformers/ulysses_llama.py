"""A Transformers model whose attention is `ulysses_attention`: for DDP, FSDP2
and DeepSpeed alike, by Transformers' AttentionInterface.
"""

import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from attention import ulysses_attention
from loss import token_mean


# --8<-- [start:attention]
def use_ulysses(model, group):
    """Has the model's attention go over the ranks of the SP group.

    Called by every rank before the engine wraps the model, and once in a
    process: it holds for all models there whose attention is "ulysses".
    """

    def attend(module, query, key, value, mask, scaling=None, **options):
        for name in ("dropout", "sliding_window", "softcap", "s_aux"):
            if options.get(name):
                raise ValueError(
                    f"{name}={options[name]}: pass ulysses_attention an "
                    "`attention` that computes it"
                )
        if scaling is not None:  # the default is 1/√head_dim
            query = query * (scaling * query.shape[-1] ** 0.5)
        # [batch, heads, seq/sp, head_dim] -> [batch, seq/sp, heads, head_dim]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        is_causal = module.is_causal
        return ulysses_attention(q, k, v, group, is_causal=is_causal), None

    AttentionInterface.register("ulysses", attend)
    # no mask: one of this slice alone says nothing about the whole sequence
    AttentionMaskInterface.register("ulysses", lambda *args, **kwargs: None)
    model.set_attn_implementation("ulysses")


# --8<-- [end:attention]
# --8<-- [start:loss]
def mean_loss(model, shard, num_tokens, *, gradient_divisor):
    """This micro-batch's part of the step's mean loss.

    shard: from `shard_batch`. num_tokens: this rank's valid labels in the step.
    """
    logits = model(
        input_ids=shard["input_ids"],
        position_ids=shard["position_ids"],  # else each slice counts from 0
        use_cache=False,
    ).logits
    loss_sum = F.cross_entropy(
        logits.float().flatten(0, 1),
        shard["shift_labels"].flatten(),
        ignore_index=-100,
        reduction="sum",
    )
    return token_mean(
        loss_sum, num_tokens, None, gradient_divisor=gradient_divisor
    )


# --8<-- [end:loss]
