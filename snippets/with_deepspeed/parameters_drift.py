"""After one step of DeepSpeed, are the parameters equal on all ranks?

PYTHONPATH=snippets torchrun --nproc-per-node 4 \
    snippets/with_deepspeed/parameters_drift.py sizes --stage 0
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp

SP_SIZE = 4


# --8<-- [start:sizes]
def sizes(config):
    """FAULTY in stages 0 to 2."""
    parallel = {"sequence_parallel_size": SP_SIZE, "data_parallel_size": 1}
    return {"config": config | parallel}


# --8<-- [end:sizes]
# --8<-- [start:mpu]
def mpu(config):
    parallel_state_sp.initialize_sequence_parallel(SP_SIZE)
    return {"config": config, "mpu": parallel_state_sp}


# --8<-- [end:mpu]
# --8<-- [start:none]
def none(config):
    """DeepSpeed takes each rank for a replica; SP is the model's own affair."""
    return {"config": config}


# --8<-- [end:none]
# --8<-- [start:step]
def engine_after_a_step(groups, stage):
    """A linear layer, AdamW, and on each rank its slice of one sequence."""
    torch.manual_seed(0)  # the same weights and the same sequence on all ranks
    model = torch.nn.Linear(4, 1)
    sequence = torch.randn(4 * SP_SIZE, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        **groups(config),
    )
    part = sequence.to(engine.device).chunk(SP_SIZE)[dist.get_rank()]
    engine.backward(engine(part).pow(2).mean())
    engine.step()
    return engine


# --8<-- [end:step]
def weight_of(engine):
    with deepspeed.zero.GatheredParameters([engine.module.weight]):
        return engine.module.weight.detach().flatten().clone()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("groups", choices=["sizes", "mpu", "none"])
    parser.add_argument("--stage", type=int, choices=range(4), default=0)
    options = parser.parse_args()
    deepspeed.init_distributed()
    groups = {"sizes": sizes, "mpu": mpu, "none": none}[options.groups]
    engine = engine_after_a_step(groups, options.stage)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, weight_of(engine).tolist())
    if dist.get_rank() == 0:
        for rank, weight in enumerate(everyone):
            print(f"rank {rank}:", *(f"{x:7.4f}" for x in weight))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
