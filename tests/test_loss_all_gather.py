"""The recipe's fault, as the page says it: right forward, and an error backward in groups not beginning at rank 0."""

import traceback
import warnings

import pytest
import torch
import torch.distributed as dist

from loss_all_gather import all_gather_loss
from nccl_branch import take_nccl_branch
from process_groups import create_parallel_groups

LOSS, WEIGHT = [1.0, 2.0, 3.0, 4.0], [7, 1, 30, 2]


def recipe(group, device):
    rank = dist.get_rank()
    local = torch.tensor(LOSS[rank], device=device, requires_grad=True)
    with warnings.catch_warnings():  # torch 2.13 deprecates the function; that is not the fault shown here
        warnings.simplefilter("ignore", FutureWarning)
        return local, all_gather_loss(local, torch.tensor(WEIGHT[rank], device=device), group)


@pytest.mark.distributed(world_size=4)
def test_over_the_world_it_is_right(device):
    local, loss = recipe(None, device)
    loss.backward()
    assert loss.item() == pytest.approx(sum(map(lambda value, w: value * w, LOSS, WEIGHT)) / 40)
    assert local.grad.item() == pytest.approx(4 * WEIGHT[dist.get_rank()] / 40)


@pytest.mark.distributed(world_size=4)
def test_in_the_second_group_backward_fails_on_gloo(device):
    groups = create_parallel_groups(2)
    local, loss = recipe(groups.sp, device)
    assert loss.item() == pytest.approx([9 / 8, 98 / 32][groups.dp_rank])
    if groups.dp_rank == 0 or dist.get_backend(groups.sp) == "nccl":
        loss.backward()
        assert local.grad.item() == pytest.approx(2 * WEIGHT[dist.get_rank()] / [8, 32][groups.dp_rank])
    else:
        # legacy torch: the second text is that of rank 2, and on 2.1 rank 3 has a RuntimeError
        message = r"Global rank 0 is not part of group|on non-source ranks"
        with pytest.raises((ValueError, RuntimeError), match=message):
            loss.backward()


@pytest.mark.distributed(world_size=4)
def test_torchs_nccl_branch(device):
    """Before torch 2.3 it takes the global rank for an index into the group's gradients."""
    groups = create_parallel_groups(2)
    local, loss = recipe(groups.sp, device)
    take_nccl_branch()
    if torch.__version__ < (2, 3) and groups.dp_rank == 1:
        with pytest.raises(IndexError, match="tuple index out of range") as error:
            loss.backward()
        assert str(error.traceback[-1].path).endswith("torch/distributed/nn/functional.py")
    else:
        loss.backward()
        assert local.grad.item() == pytest.approx(2 * WEIGHT[dist.get_rank()] / [8, 32][groups.dp_rank])


def second_group_only():
    groups = create_parallel_groups(2)
    _, loss = recipe(groups.sp, "cpu")
    if groups.dp_rank == 1:
        try:
            loss.backward()
        except ValueError as error:
            print(f"rank {dist.get_rank()}: ValueError: {str(error).split(' <')[0]}")


def test_the_message_as_the_page_shows_it(launch, recorded, device):
    if device != "cpu" or torch.__version__[:5] != "2.13.":
        pytest.skip("the message on the page is that of torch 2.13 on CPU")
    recorded("loss-all-gather.txt", "".join(launch(second_group_only, world_size=4, timeout=20)))


def nccl_branch_in_the_second_group():
    groups = create_parallel_groups(2)
    _, loss = recipe(groups.sp, "cpu")
    if groups.dp_rank == 1:
        take_nccl_branch()
        try:
            loss.backward()
        except IndexError as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            file = frame.filename.partition("site-packages/")[2]
            print(f"rank {dist.get_rank()}: {file}, in {frame.name}")
            print(f"rank {dist.get_rank()}:     {frame.line}")
            print(f"rank {dist.get_rank()}: IndexError: {error}")


def test_story_a_as_the_page_shows_it(launch, recorded, device):
    if device != "cpu" or torch.__version__[:4] != "2.2.":
        pytest.skip("the traceback on the page is that of torch 2.2 on CPU")
    outputs = launch(nccl_branch_in_the_second_group, world_size=4, timeout=20)
    recorded("loss-all-gather-torch-2.2.txt", "".join(outputs))
