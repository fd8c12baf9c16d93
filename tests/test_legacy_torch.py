import warnings

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from legacy_torch import check_loss_all_gather
from loss_all_gather import all_gather_loss
from nccl_branch import take_nccl_branch
from process_groups import create_parallel_groups


def warnings_of(group):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_loss_all_gather(group)
    return caught


def recipe(group, device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return all_gather_loss(torch.tensor(1.0, device=device, requires_grad=True), 1, group)


def recipe_breaks(group, device, nccl_branch=False):
    """On any rank: whether backward of the recipe raises there."""
    loss = recipe(group, device)
    failed = torch.zeros((), device=device)
    if nccl_branch:
        take_nccl_branch()
    try:
        loss.backward()
    except (ValueError, IndexError, RuntimeError):  # of backward's own; the sums that follow would not come to be
        failed += 1
    dist.all_reduce(failed)
    return failed.item() > 0


@pytest.mark.parametrize("sp_size", [2, 4, 1])
@pytest.mark.distributed(world_size=4)
def test_it_warns_on_rank_0_where_the_recipe_breaks_on_any_rank(sp_size, device):
    groups = create_parallel_groups(sp_size)
    warned = warnings_of(groups.sp)
    # with groups of one rank all but the first break, and only ranks other than 0 see it
    expected = recipe_breaks(groups.sp, device) and dist.get_rank() == 0
    assert len(warned) == expected
    if warned:
        assert warned[0].category is UserWarning
        assert warned[0].filename == __file__, "it points at the caller"
        for part in (
            torch.__version__,
            "gloo",
            "weighted_all_reduce",
            f"groups of {sp_size} ranks in a world of 4",
            "remove this check",
        ):
            assert part in str(warned[0].message)


@pytest.mark.parametrize("sp_size", [2, 4, 1])
@pytest.mark.distributed(world_size=4)
def test_over_nccl_it_warns_where_torchs_nccl_branch_breaks(sp_size, monkeypatch, device):
    """On the torch that runs here, without a GPU: see nccl_branch.py."""
    groups = create_parallel_groups(sp_size)
    expected = recipe_breaks(groups.sp, device, nccl_branch=True) and dist.get_rank() == 0
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    assert len(warnings_of(groups.sp)) == expected


@pytest.mark.parametrize(("version", "warns"), [("2.1.2+cu121", 1), ("2.2.2", 1), ("2.3.0", 0), ("2.13.0a0+git12", 0)])
@pytest.mark.distributed(world_size=4)
def test_over_nccl_it_warns_before_2_3(version, warns, monkeypatch):
    groups = create_parallel_groups(2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    warned = warnings_of(groups.sp)
    assert len(warned) == (warns if dist.get_rank() == 0 else 0)
    assert all(f"torch {version} over nccl" in str(warning.message) for warning in warned)


@pytest.mark.distributed(world_size=4)
def test_it_warns_also_where_groups_are_not_neighbours(device):
    """{0, 2} begins at rank 0, and breaks all the same."""
    groups = create_parallel_groups(2)
    expected = recipe_breaks(groups.dp, device) and dist.get_rank() == 0
    assert len(warnings_of(groups.dp)) == expected


@pytest.mark.distributed(world_size=4)
def test_so_it_does_over_nccl(monkeypatch, device):
    """There only rank 2 of {0, 2} raises, and rank 0 would wait for it: it is left out where it would."""
    groups = create_parallel_groups(2)
    loss = recipe(groups.dp, device)
    take_nccl_branch()
    breaks = torch.__version__ < (2, 3)
    if not breaks:
        loss.backward()
    elif dist.get_rank() >= 2:
        with pytest.raises(IndexError, match="tuple index out of range"):
            loss.backward()
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    assert len(warnings_of(groups.dp)) == (breaks and dist.get_rank() == 0)


@pytest.mark.parametrize("backend", ["undefined", "mpi", "ucc", "cpu:gloo,cuda:nccl"])
@pytest.mark.distributed(world_size=4)
def test_it_says_nothing_of_other_backends(backend, monkeypatch):
    groups = create_parallel_groups(2)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.1.2"))
    assert not warnings_of(groups.sp)


@pytest.mark.distributed(world_size=4)
def test_it_sends_nothing():
    groups = create_parallel_groups(2)
    if dist.get_rank() == 0:  # alone
        assert len(warnings_of(groups.sp)) == (dist.get_backend() == "gloo")


@pytest.mark.distributed(world_size=4)
def test_it_is_silent_over_the_world():
    assert not warnings_of(None)
    assert not warnings_of(create_parallel_groups(4).sp)
