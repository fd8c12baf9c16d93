"""Accelerate's loop under Ulysses: loss and gradient of a step are the mean
over all its tokens, on every ZeRO stage and with gradient accumulation.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import (
    DeepSpeedSequenceParallelConfig,
    GradientAccumulationPlugin,
    ParallelismConfig,
)

from loss import token_mean


# --8<-- [start:accelerator]
def create_accelerator(config, sequence_parallel_size, data_parallel_size):
    """config: DeepSpeed's, with gradient_accumulation_steps. The model's
    attn_implementation must be "sdpa", as here; of a packed batch's documents
    "sdpa" knows nothing, and each token attends to earlier ones too."""
    attention = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    on_gpu = torch.cuda.is_available()
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(
            sp_backend="deepspeed",
            sp_size=sequence_parallel_size,
            dp_shard_size=data_parallel_size,
            sp_handler=attention,
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config["gradient_accumulation_steps"],
            sync_with_dataloader=False,
        ),
        # without it Accelerate on gloo takes each rank for the only one
        kwargs_handlers=[
            InitProcessGroupKwargs(backend="nccl" if on_gpu else "gloo")
        ],
    )


# --8<-- [end:accelerator]
# --8<-- [start:step]
def train_step(accelerator, model, optimizer, batches):
    """The step's mean loss over all tokens, the same on every rank.

    model, optimizer: as accelerator.prepare returned them, with its dataloader.
    batches: as many of that dataloader's as gradient_accumulation_steps.
    """
    check(accelerator, batches)
    divisor = gradient_divisor(accelerator, model)
    num_tokens = sum((x["shift_labels"] != -100).sum() for x in batches)
    loss = 0
    for batch in batches:
        with accelerator.accumulate(model):
            logits = model(
                batch["input_ids"], position_ids=batch["position_ids"]
            ).logits
            loss_sum = F.cross_entropy(
                logits.float().flatten(0, 1),
                batch["shift_labels"].flatten(),
                ignore_index=-100,
                reduction="sum",
            )
            part = token_mean(
                loss_sum, num_tokens, None, gradient_divisor=divisor
            )
            accelerator.backward(part)  # the last one updates parameters too
            optimizer.step()
            optimizer.zero_grad()
            loss += part.detach()
    return loss.item()


# --8<-- [end:step]
# --8<-- [start:divisor]
def gradient_divisor(accelerator, engine):
    """D for `token_mean`. DeepSpeed's backward divides by the number of
    micro-batches, so it is in D."""
    world = dist.get_world_size()
    accumulation = accelerator.gradient_accumulation_steps
    stage = engine.zero_optimization_stage()
    if stage == 3:
        if not engine.zero_reduce_scatter():
            raise ValueError(
                'ZeRO 3 with "reduce_scatter": false does not divide all '
                "gradients by the same number: leave it true"
            )
        return world * accumulation  # averages over DP and SP
    sp_size = accelerator.parallelism_config.sp_size
    return world // sp_size * accumulation  # adds over SP, averages over DP


# --8<-- [end:divisor]
# --8<-- [start:check]
def check(accelerator, batches):
    world = dist.get_world_size()
    if accelerator.num_processes != world:
        raise ValueError(
            f"accelerator.num_processes is {accelerator.num_processes}, but "
            f"there are {world} ranks: on gloo pass kwargs_handlers="
            '[InitProcessGroupKwargs(backend="gloo")] to Accelerator'
        )
    if len(batches) != accelerator.gradient_accumulation_steps:
        raise ValueError(
            f"{len(batches)} micro-batches, but gradient_accumulation_steps is "
            f"{accelerator.gradient_accumulation_steps}: pass all of a step"
        )
    if len(batches) > 1 and accelerator.gradient_state.sync_with_dataloader:
        raise ValueError(
            f"of {len(batches)} micro-batches each updates parameters where "
            "the dataloader ends, as it has read all while sp of them remain: "
            "pass gradient_accumulation_plugin=GradientAccumulationPlugin("
            f"num_steps={len(batches)}, sync_with_dataloader=False)"
        )


# --8<-- [end:check]
