"""FAULTY, shown as a warning: collectives that only some ranks enter."""

import torch
import torch.distributed as dist


# --8<-- [start:log]
def log_mean_loss(step, loss):
    if dist.get_rank() == 0:
        dist.all_reduce(loss)  # the others never come
        print(f"step {step}: loss {loss / dist.get_world_size():.4f}")


# --8<-- [end:log]
# --8<-- [start:save]
def save_model(folder, model):
    if dist.get_rank() == 0:  # save is collective: every rank has a part
        torch.distributed.checkpoint.save(
            {"model": model.state_dict()}, checkpoint_id=folder
        )


# --8<-- [end:save]
# --8<-- [start:evaluate]
def mean_loss(batches, loss_of):
    total = 0
    for batch in batches:  # one batch fewer on some replicas
        loss = loss_of(batch)
        dist.all_reduce(loss)
        total += loss
    return total / len(batches)


# --8<-- [end:evaluate]
