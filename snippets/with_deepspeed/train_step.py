"""A training step on DeepSpeed with sequence parallelism, as one process would
take it: the loss, and the gradient that is left when ZeRO has reduced it.
"""

import functools

import deepspeed
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

from attention import ulysses_attention
from loss import token_mean
from sharding import shard_batch


# --8<-- [start:engine]
def create_engine(model, optimizer, config, sequence_parallel_size):
    """DeepSpeed's engine, whose gradients meet over SP and DP ranks.

    Called once, by every rank, after `deepspeed.init_distributed`.
    """
    mpu.initialize_sequence_parallel(sequence_parallel_size)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, mpu=mpu
    )
    return engine


# --8<-- [end:engine]
# --8<-- [start:divisor]
def gradient_divisor(engine):
    """D for `token_mean`: from backward to step, ZeRO applies (1/D)·Σ over all
    ranks to gradients. All ranks must be DP × SP.

    engine.backward divides by the number of micro-batches too, so it is in D.
    """
    world = dist.get_world_size()
    accumulation = engine.gradient_accumulation_steps()
    stage = engine.zero_optimization_stage()
    if stage == 3 and not engine.zero_reduce_scatter():
        raise ValueError(
            'ZeRO 3 with "reduce_scatter": false has one D for parameters that '
            "fit into reduce_bucket_size and another for larger ones: leave it "
            "true"
        )
    if stage == 3:
        return world * accumulation  # averages over DP and SP
    if engine.seq_dp_world_size != world:
        raise ValueError(
            f"ZeRO {stage} reduces gradients over {engine.seq_dp_world_size} "
            f"of {world} ranks, so the ranks of an SP group drift apart: pass "
            "mpu=parallel_state_sp to deepspeed.initialize; "
            '"sequence_parallel_size" in the config does not do it'
        )
    # adds over SP, averages over DP
    return world // engine.sequence_parallel_size * accumulation


# --8<-- [end:divisor]
# --8<-- [start:step]
def train_step(engine, batches):
    """The step's mean loss over all tokens, the same on every rank.

    batches: this replica's micro-batches, the same on all ranks of its SP
        group, as many as the config's gradient_accumulation_steps.
    """
    accumulation = engine.gradient_accumulation_steps()
    if len(batches) != accumulation:
        raise ValueError(
            f"{len(batches)} micro-batches, but gradient_accumulation_steps is "
            f"{accumulation}: pass all of a step at once"
        )
    group = engine.seq_parallel_group
    attention = functools.partial(ulysses_attention, group=group)
    divisor = gradient_divisor(engine)
    shards = [shard_batch(batch, group) for batch in batches]
    num_tokens = sum(map(valid, shards))  # of the whole step, this rank's
    loss = 0
    for shard in shards:
        logits = engine(shard["input_ids"], shard["position_ids"], attention)
        loss_sum = F.cross_entropy(
            logits.float().flatten(0, 1),
            shard["shift_labels"].flatten(),
            ignore_index=-100,
            reduction="sum",
        )
        part = token_mean(loss_sum, num_tokens, None, gradient_divisor=divisor)
        engine.backward(part)
        engine.step()  # DeepSpeed counts: the last one updates parameters
        loss += part.detach()
    return loss.item()


def valid(shard):
    return (shard["shift_labels"] != -100).sum()


# --8<-- [end:step]
