"""Transformers' Trainer under Ulysses: loss and gradient of a step are the mean
over all its tokens, on every ZeRO stage and with gradient accumulation.
"""

import torch.distributed as dist
import torch.nn.functional as F
from transformers import Trainer

from loss import token_mean


# --8<-- [start:trainer]
class TokenMeanTrainer(Trainer):
    """For TrainingArguments with `deepspeed` and a `parallelism_config` of
    sp_backend="deepspeed". Evaluation is as in Trainer."""

    # no division by the number of micro-batches: the step's tokens divide
    loss_is_scaled_for_ga = True

    def get_batch_samples(self, *args):
        """The step's micro-batches, and this rank's valid labels in them."""
        batches, _ = super().get_batch_samples(*args)
        if any("shift_labels" not in batch for batch in batches):
            sp_size = self.get_sp_size()
            raise ValueError(
                f"batches without shift_labels, sp_size={sp_size}: pass labels "
                "in the dataset and sp_size of 2 or more in parallelism_config"
            )
        return batches, sum((x["shift_labels"] != -100).sum() for x in batches)

    def compute_loss(
        self,
        model,
        inputs,
        return_outputs=False,
        num_items_in_batch=None,
    ):
        if not model.training:
            return super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch
            )
        inputs = dict(inputs)
        labels = inputs.pop("shift_labels").flatten()
        outputs = model(**inputs)
        loss_sum = F.cross_entropy(
            outputs.logits.float().flatten(0, 1),
            labels,
            ignore_index=-100,
            reduction="sum",
        )
        loss = token_mean(
            loss_sum,
            num_items_in_batch,
            None,
            gradient_divisor=gradient_divisor(model, self.get_sp_size()),
        )
        return (loss, outputs) if return_outputs else loss


# --8<-- [end:trainer]
# --8<-- [start:divisor]
def gradient_divisor(engine, sp_size):
    """D for `token_mean`. Trainer tells DeepSpeed not to divide by the number
    of micro-batches, so it is not in D."""
    world = dist.get_world_size()
    stage = engine.zero_optimization_stage()
    if stage == 3:
        if not engine.zero_reduce_scatter():
            raise ValueError(
                'ZeRO 3 with "reduce_scatter": false does not divide all '
                "gradients by the same number: leave it true"
            )
        return world  # averages over DP and SP
    return world // sp_size  # adds over SP, averages over DP


# --8<-- [end:divisor]
