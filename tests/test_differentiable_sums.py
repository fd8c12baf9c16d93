"""Each way to a sum over the ranks, forward and backward, on the torch that runs here; the page's table shows it."""

import json
import warnings

import pytest
import torch
import torch.distributed as dist

from differentiable_sums import (
    all_gather_with_own,
    funcol_all_gather_single,
    funcol_all_reduce,
    in_place_all_reduce,
    nn_all_gather,
    nn_all_reduce,
)
from loss import sum_over_group
from nccl_branch import take_nccl_branch
from process_groups import create_parallel_groups
from records import ROOT


def nn_all_gather_nccl_branch(x, group):
    total = nn_all_gather(x, group)
    take_nccl_branch()
    return total


def own_function(x, group):
    return sum_over_group(x, group, gradient_reduction="mean")


TORCHS_WAYS = [
    nn_all_reduce,
    nn_all_gather,
    nn_all_gather_nccl_branch,
    funcol_all_reduce,
    funcol_all_gather_single,
    in_place_all_reduce,
    all_gather_with_own,
]


def outcome(way, group, device):
    """In a few words, what this rank gets. All ranks call backward on the sum: the right gradient is the group size."""
    x = torch.tensor(10.0 ** dist.get_rank(), device=device, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            total = way(x, group)
            assert total.detach().item() == sum(10.0**rank for rank in dist.get_process_group_ranks(group))
            total.backward()
        except AttributeError:
            return "not there"
        except (RuntimeError, ValueError, IndexError) as error:
            return "no gradient" if "does not require grad" in str(error) else type(error).__name__
    gradients = {dist.get_world_size(group): "right", 1: "own term only"}
    warned = {warning.category.__name__ for warning in caught}
    return ", ".join([gradients.get(x.grad.item(), f"gradient {x.grad.item()}"), *sorted(warned)])


def try_all_ways(device):
    groups = create_parallel_groups(2)
    for way in TORCHS_WAYS:
        print(json.dumps([way.__name__, outcome(way, groups.sp, device)]))
        dist.nn.functional.dist = dist
        dist.barrier()


def test_torchs_ways_as_the_page_shows_them(launch, tabulated, device):
    outputs = launch(try_all_ways, world_size=4, timeout=20, device=device)
    by_rank = [dict(map(json.loads, output.splitlines())) for output in outputs]
    tabulated("differentiable_sums", {way.__name__: [rank[way.__name__] for rank in by_rank] for way in TORCHS_WAYS})


@pytest.mark.distributed(world_size=4)
def test_the_function_of_ones_own_is_right(device):
    groups = create_parallel_groups(2)
    assert outcome(own_function, groups.sp, device) == "right"


@pytest.mark.parametrize("way", [way.__name__ for way in TORCHS_WAYS])
def test_none_of_torchs_ways_is_right_without_a_warning_on_all_versions(way):
    tables = [json.loads(file.read_text()) for file in (ROOT / "docs/_data/differentiable_sums").glob("*.json")]
    outcomes = {outcome for table in tables for outcome in table["rows"][way]}
    assert outcomes
    assert outcomes != {"right"}
