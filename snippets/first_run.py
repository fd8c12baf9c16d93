"""A first run: four ranks hold the slices of two samples, and agree on a loss.

torchrun --nproc-per-node 4 snippets/first_run.py
"""

import torch
import torch.distributed as dist

from loss import token_mean, weighted_all_reduce
from process_groups import create_parallel_groups

# What a model would give each rank for its slice: the mean loss, and how many
# labels it is the mean of.
MEAN_LOSS = [1.0, 2.0, 3.0, 4.0]
NUM_LABELS = [7, 1, 30, 2]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = create_parallel_groups(sequence_parallel_size=2)
    mean_loss, num_labels = torch.tensor(MEAN_LOSS[rank]), NUM_LABELS[rank]

    of_sample = weighted_all_reduce(mean_loss, num_labels, groups.sp)
    loss_sum = mean_loss * num_labels
    of_step = token_mean(
        loss_sum, num_labels, None, gradient_divisor=world_size
    )
    for turn in range(world_size):  # in turn; every rank enters every barrier
        if turn == rank:
            print(
                f"rank {rank}: slice {groups.sp_rank} of sample "
                f"{groups.dp_rank}, {num_labels:2} labels; means: slice "
                f"{mean_loss:.4f}, sample {of_sample:.4f}, step {of_step:.4f}",
                flush=True,
            )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
