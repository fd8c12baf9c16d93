"""A step on packed batches: loss and every parameter's gradient against one call of the model for each document."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention import sdpa
from packed_step import packed_loss
from process_groups import create_parallel_groups
from test_model import assert_same_as_one_process, batch_of, build, every_grid

DOCUMENTS = [[[5, 8], [1, 3, 9]], [[13], [6, 1, 6]]]  # lengths, by replica and row


def packed_batch(replica, device):
    rows = [[i for length in lengths for i in range(length)] for lengths in DOCUMENTS[replica]]
    return batch_of(replica, device) | {"position_ids": torch.tensor(rows, device=device)}


def each_document_alone(model, replicas, device):
    total, count = 0, 0
    for replica in range(replicas):
        batch = batch_of(replica, device)
        for row, lengths in enumerate(DOCUMENTS[replica]):
            ids, labels = (batch[name][row].split(lengths) for name in ("input_ids", "labels"))
            for own_ids, own_labels in zip(ids, labels, strict=True):
                positions = torch.arange(len(own_ids), device=device)[None]
                logits = model(own_ids[None], positions, sdpa)[0, :-1]
                total += F.cross_entropy(logits, own_labels[1:], reduction="sum")
                count += (own_labels[1:] >= 0).sum()
    return total / count


@every_grid
def test_loss_and_every_gradient_are_those_of_each_document_alone(sp_size, device):
    groups = create_parallel_groups(sp_size)
    model = build(device)
    loss = packed_loss(model, packed_batch(groups.dp_rank, device), groups.sp, dist.get_world_size())
    assert_same_as_one_process(model, loss, each_document_alone, groups.dp_size, device)


@pytest.mark.distributed(world_size=1)
def test_logits_in_bf16_give_the_loss_of_their_numbers(device):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 13, 31, generator=generator).to(device, torch.bfloat16)
    batch = packed_batch(0, device)
    mine, exact = (packed_loss(lambda *_, x=x: x, batch, None, 1) for x in (logits, logits.double()))
    torch.testing.assert_close(mine.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.distributed(world_size=2)
def test_the_batch_is_left_as_it_was(device):
    batch = packed_batch(0, device)
    before = {name: x.clone() for name, x in batch.items()}
    packed_loss(build(device), batch, None, 2)
    assert all(torch.equal(batch[name], x) for name, x in before.items())
    assert batch.keys() == before.keys()
