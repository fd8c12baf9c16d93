import random
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from process_groups import create_parallel_groups
from same_batch import check_same_batch, create_loader
from sharding import shard_batch

every_grid = pytest.mark.parametrize(
    "sp_size",
    [
        *(
            pytest.param(sp, marks=pytest.mark.distributed(world_size=world), id=f"{world}-ranks-sp-{sp}")
            for world, sp in [(1, 1), (2, 1), (2, 2), (4, 2)]
        ),
        pytest.param(None, marks=pytest.mark.distributed, id="all-ranks-in-one"),  # 4 ranks, or --world-size
    ],
)


class Numbers(Dataset):
    """Sample i is tokens 10·i, 10·i + 1, …"""

    def __init__(self, samples, seq=6):
        self.samples, self.seq = samples, seq

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return {"input_ids": torch.arange(10 * index, 10 * index + self.seq)}


class Augmented(Numbers):
    """With a random number from each source that transforms use."""

    def __getitem__(self, index):
        noise = [torch.rand(()).item(), random.random()]
        return super().__getitem__(index) | {"noise": torch.tensor(noise)}


def samples_of(loader, epoch):
    loader.sampler.set_epoch(epoch)
    return [batch["input_ids"][:, 0].div(10, rounding_mode="floor").tolist() for batch in loader]


def on_all_ranks(value, group=None):
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


# --------------------------------------------------------------------------------------------- loader


@every_grid
def test_in_an_epoch_each_sample_is_seen_once_by_each_rank_of_one_group(sp_size):
    groups = create_parallel_groups(sp_size or dist.get_world_size())
    loader = create_loader(Numbers(24), batch_size=3, dp_rank=groups.dp_rank, dp_size=groups.dp_size)
    epochs = []
    for epoch in range(2):
        batches = samples_of(loader, epoch)
        assert {str(others) for others in on_all_ranks(batches, groups.sp)} == {str(batches)}
        replicas = on_all_ranks(batches, groups.dp)  # one rank of each SP group
        seen = [sample for replica in replicas for batch in replica for sample in batch]
        assert sorted(seen) == list(range(24))
        epochs.append(seen)
    assert epochs[0] != epochs[1]  # set_epoch shuffles anew


@pytest.mark.distributed(world_size=4)
def test_what_fills_no_batch_is_left_out_on_all_replicas_alike():
    groups = create_parallel_groups(2)
    for samples in range(4, 13):  # batches of 2 on 2 replicas
        loader = create_loader(Numbers(samples), batch_size=2, dp_rank=groups.dp_rank, dp_size=2)
        left_out = set()
        for epoch in range(6):
            replicas = on_all_ranks(samples_of(loader, epoch), groups.dp)
            seen = [sample for replica in replicas for batch in replica for sample in batch]
            assert len(set(seen)) == len(seen) == samples // 4 * 4
            assert {len(replica) for replica in replicas} == {samples // 4}
            left_out |= set(range(samples)) - set(seen)
        assert len(left_out) > samples % 4 or samples % 4 == 0  # not the same ones each time


@pytest.mark.distributed(world_size=4)
def test_the_seed_orders_the_samples():
    groups = create_parallel_groups(2)
    orders = [
        samples_of(create_loader(Numbers(24), batch_size=1, dp_rank=groups.dp_rank, dp_size=2, seed=seed), 0)
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.distributed(world_size=4)
def test_workers_augment_alike_within_a_group_though_ranks_have_seeds_of_their_own():
    groups = create_parallel_groups(2)
    torch.manual_seed(dist.get_rank())  # as for dropout
    random.seed(dist.get_rank())
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}  # a rank's default would import torch anew
    loader = create_loader(Augmented(8), batch_size=2, dp_rank=groups.dp_rank, dp_size=2, **workers)
    noise = []
    for batch in loader:
        check_same_batch(batch, groups.sp)
        noise.append(batch["noise"].tolist())
    assert len(noise) == 2
    assert noise[0] != noise[1]
    mine, others = on_all_ranks(noise, groups.dp)
    assert mine != others  # replicas augment in their own ways
    if groups.sp_rank == 0:
        next(iter(loader))  # the others do not: their workers then have other seeds
    batch = next(iter(loader))
    with pytest.raises(ValueError, match="noise") as error:
        check_same_batch(batch, groups.sp)
    assert "input_ids" not in str(error.value)


@pytest.mark.distributed(world_size=2)
def test_without_workers_augmentation_follows_the_ranks_own_seed():
    """What the page warns of: the loader's generator seeds workers only."""
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    loader = create_loader(Augmented(8), batch_size=2, dp_rank=0, dp_size=1)
    for batch in loader:
        with pytest.raises(ValueError, match="noise") as error:
            check_same_batch(batch, None)
        assert "input_ids" not in str(error.value)


@pytest.mark.distributed(world_size=2)
def test_a_dataset_too_small_fails_early():
    for samples in (1, 3):
        with pytest.raises(ValueError, match=f"{samples} samples give no batch of 2 on each of 2 replicas: use a"):
            create_loader(Numbers(samples), batch_size=2, dp_rank=0, dp_size=2)
    with pytest.raises(ValueError, match=r"rank 3.*interval \[0, 1\]"):  # torch's own
        create_loader(Numbers(8), batch_size=1, dp_rank=3, dp_size=2)


@pytest.mark.distributed(world_size=4)
def test_from_loader_to_slice(device):
    """The whole way: a group's slices are the sample that its replica drew."""
    groups = create_parallel_groups(2)
    loader = create_loader(Numbers(8, seq=5), batch_size=2, dp_rank=groups.dp_rank, dp_size=2)
    for batch in loader:
        check_same_batch(batch, groups.sp)
        shard = shard_batch({name: x.to(device) for name, x in batch.items()}, groups.sp)
        first = batch["input_ids"][:, 0].tolist()
        tokens = [[token, token + 1, token + 2, token + 3, token + 4, 0] for token in first]
        own = slice(3 * groups.sp_rank, 3 * groups.sp_rank + 3)
        assert shard["input_ids"].tolist() == [row[own] for row in tokens]


# ---------------------------------------------------------------------------------------------- check


def sample(device):
    return {
        "input_ids": torch.tensor([[3, 1, 1, 3, 2, 4]], device=device),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]], device=device),
        "weights": torch.tensor([0.5, -0.0, 2.0], dtype=torch.bfloat16, device=device),
        "scale": torch.tensor(1.0, device=device),
        "nothing": torch.empty(1, 0, device=device),
        "spoken": torch.tensor([[True, False]], device=device),
        "source": "web",
    }


def change(name, value):
    return lambda batch: batch.update({name: value(batch[name])})


# name: (what one rank does to its batch, the entry that then differs)
DIFFERENCES = {
    "another sample": (change("input_ids", lambda x: x + 1), "input_ids"),
    "one token": (change("input_ids", lambda x: x + (x == 4)), "input_ids"),
    "tokens permuted": (change("input_ids", lambda x: x[:, [1, 0, 2, 3, 4, 5]]), "input_ids"),
    "tokens permuted, sums and moments kept": (change("input_ids", lambda x: x[:, [1, 0, 3, 2, 4, 5]]), "input_ids"),
    "reversed": (change("input_ids", lambda x: x.flip(1)), "input_ids"),
    "shorter": (change("input_ids", lambda x: x[:, :-1]), "input_ids"),
    "padded": (change("input_ids", lambda x: torch.nn.functional.pad(x, (0, 1))), "input_ids"),
    "other rows": (change("input_ids", lambda x: x.view(2, 3)), "input_ids"),
    "another type": (change("input_ids", lambda x: x.int()), "input_ids"),
    "other positions": (change("position_ids", lambda x: torch.arange(6, device=x.device)[None]), "position_ids"),
    "a bf16 number": (change("weights", lambda x: x * 1.01), "weights"),
    "a scalar": (change("scale", lambda x: x + 1e-6), "scale"),
    "a bool": (change("spoken", lambda x: ~x), "spoken"),
    "an entry missing": (lambda batch: batch.pop("weights"), "weights"),
    "an entry more": (lambda batch: batch.update(extra=torch.zeros(1)), "extra"),
    "an entry renamed": (lambda batch: batch.update(labels=batch.pop("weights")), "labels"),
    "no tensor": (change("input_ids", lambda x: x.tolist()), "input_ids"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.distributed(world_size=4)
def test_the_rank_that_differs_is_named_on_every_rank(difference, device):
    """Rank 2, the first of its group; the other group, whose ranks agree, is none the wiser."""
    groups = create_parallel_groups(2)
    tamper, name = DIFFERENCES[difference]
    batch = sample(device)
    if dist.get_rank() == 2:
        tamper(batch)
    if groups.dp_rank == 0:
        check_same_batch(batch, groups.sp)
        return
    with pytest.raises(ValueError, match=rf"  {name}:\n    ranks \[2\]: .*\n    ranks \[3\]: ") as error:
        check_same_batch(batch, groups.sp)
    first, second = on_all_ranks(str(error.value), groups.sp)
    assert first == second


@every_grid
def test_equal_batches_pass(sp_size, device):
    groups = create_parallel_groups(sp_size or dist.get_world_size())
    batch = sample(device)
    batch["input_ids"] += groups.dp_rank  # replicas hold other samples
    batch["source"] = f"rank {dist.get_rank()}"  # of what is no tensor only the type is compared
    if groups.sp_rank == 1:  # the same in another order of entries and of memory
        batch = dict(reversed(batch.items()))
        batch["input_ids"] = torch.stack([batch["input_ids"], -batch["input_ids"]], dim=-1)[..., 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same_batch(batch, groups.sp)


@pytest.mark.distributed(world_size=4)
def test_ranks_that_agree_stand_together(device):
    batch = {"input_ids": torch.tensor([[[7, 8, 7, 9][dist.get_rank()]]], device=device), "labels": torch.ones(1)}
    with pytest.raises(ValueError, match="hold different batches") as error:
        check_same_batch(batch, None)
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in lines[1:-1]] == [
        "  input_ids",
        "    ranks [0, 2]",
        "    ranks [1]",
        "    ranks [3]",
    ]


@pytest.mark.distributed(world_size=2)
def test_the_batch_is_not_sent(device):
    """A long batch takes no longer on its way than a short one: what travels has the same size."""
    sizes = []
    original = dist.all_gather_object

    def measured(everyone, value, group=None):
        sizes.append(len(str(value)))
        original(everyone, value, group=group)

    dist.all_gather_object = measured
    for length in (100_000, 999_999):
        check_same_batch({"input_ids": torch.zeros(1, length, dtype=torch.int64, device=device)}, None)
    assert sizes[0] == sizes[1] < 200


@pytest.mark.distributed(world_size=2)
def test_a_late_rank_is_waited_for(device):
    if dist.get_rank() == 1:
        time.sleep(0.2)
    check_same_batch(sample(device), None)


@pytest.mark.distributed(world_size=2)
def test_a_group_of_others_is_refused(device):
    first_alone = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="global rank 1 is not in this group"):
            check_same_batch(sample(device), first_alone)


# ---------------------------------------------------------------------------- what the page shows of it


def sample_by_global_rank(device):
    """The fault: DistributedSampler's defaults, the global rank and the world size."""
    groups = create_parallel_groups(2)
    loader = create_loader(Numbers(8), batch_size=1, dp_rank=dist.get_rank(), dp_size=dist.get_world_size())
    batch = next(iter(loader))
    try:
        check_same_batch(batch, groups.sp)
    except ValueError as error:
        if groups.sp_rank == 0:
            print(f"ValueError: {error}")


def test_a_sampler_by_global_rank_is_found(launch, recorded, device):
    outputs = launch(sample_by_global_rank, world_size=4, timeout=20, device=device)
    recorded("same-batch.txt", outputs[2])
