"""FAULTY, but it says so at start-up: a trainer with the all-gather recipe.

torchrun --nproc-per-node 4 snippets/legacy_torch_trainer.py
"""

# --8<-- [start:trainer]
import torch
import torch.distributed as dist
import torch.nn.functional as F

from legacy_torch import check_loss_all_gather
from loss_all_gather import all_gather_loss
from process_groups import create_parallel_groups


def main():
    dist.init_process_group("gloo")
    groups = create_parallel_groups(sequence_parallel_size=2)
    check_loss_all_gather(groups.sp)  # before training, on every rank

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        hidden, labels = torch.randn(32, 8), torch.randint(16, (32,))
        mean_loss = F.cross_entropy(model(hidden), labels)
        loss = all_gather_loss(mean_loss, len(labels), groups.sp)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


# --8<-- [end:trainer]
if __name__ == "__main__":
    main()
