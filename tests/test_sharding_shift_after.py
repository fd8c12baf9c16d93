"""The recipe's fault, as the page says it: each slice but the last loses one label of each sample."""

import pytest
import torch
import torch.distributed as dist

from process_groups import create_parallel_groups
from sharding import shard_batch
from sharding_shift_after import shard_then_shift


def batch_of_one_document(batch_size, seq, device):
    tokens = torch.arange(11, 11 + batch_size * seq, device=device).view(batch_size, seq)
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("sp_size", [2, 4])
@pytest.mark.distributed(world_size=4)
def test_each_slice_but_the_last_loses_a_label_of_each_sample(sp_size, device):
    groups = create_parallel_groups(sp_size)
    batch = batch_of_one_document(3, 8 * sp_size, device)
    faulty = shard_then_shift(batch, groups.sp)
    right = shard_batch(batch, groups.sp)
    is_last = groups.sp_rank == sp_size - 1

    wrong = faulty["shift_labels"] != right["shift_labels"]
    assert wrong.sum(dim=1).tolist() == [0 if is_last else 1] * 3
    assert faulty["shift_labels"][:, -1].tolist() == [-100] * 3
    if not is_last:
        assert wrong[:, -1].all()
        # the label is the first token of the next slice, in this slice nowhere
        following = batch["input_ids"][:, 8 * (groups.sp_rank + 1)]
        assert right["shift_labels"][:, -1].tolist() == following.tolist()
    valid = (faulty["shift_labels"] != -100).sum()
    dist.all_reduce(valid, group=groups.sp)
    assert valid.item() == 3 * (8 * sp_size - 1) - 3 * (sp_size - 1)


@pytest.mark.distributed(world_size=4)
def test_without_position_ids_each_slice_counts_from_0(device):
    groups = create_parallel_groups(2)
    batch = batch_of_one_document(1, 8, device)
    assert shard_then_shift(batch, groups.sp)["position_ids"].tolist() == [[0, 1, 2, 3]]
    assert shard_batch(batch, groups.sp)["position_ids"].tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]][groups.sp_rank]]


def print_both(device):
    batch = batch_of_one_document(1, 12, device)
    faulty, right = shard_then_shift(batch, None), shard_batch(batch, None)
    if dist.get_rank() == 0:
        print(f"{'':6} {'input_ids':13} {'shift_labels':15} {'right':15} {'position_ids':13} right")
    columns = [faulty["input_ids"], faulty["shift_labels"], right["shift_labels"]]
    columns += [faulty["position_ids"], right["position_ids"]]
    texts = [str(x[0].tolist()) for x in columns]
    print(f"rank {dist.get_rank()} {texts[0]:13} {texts[1]:15} {texts[2]:15} {texts[3]:13} {texts[4]}")


def test_side_by_side(launch, recorded, device):
    recorded("sharding-shift-after.txt", "".join(launch(print_both, world_size=4, timeout=20, device=device)))
