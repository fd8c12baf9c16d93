import dataclasses

import pytest
import torch
import torch.distributed as dist

from process_groups import ParallelGroups, create_mesh, create_parallel_groups

# (world size, SP size) -> the groups, written down by hand
GROUPS = {
    (1, 1): {"sp": [[0]], "dp": [[0]]},
    (2, 1): {"sp": [[0], [1]], "dp": [[0, 1]]},
    (2, 2): {"sp": [[0, 1]], "dp": [[0], [1]]},
    (4, 1): {"sp": [[0], [1], [2], [3]], "dp": [[0, 1, 2, 3]]},
    (4, 2): {"sp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]},
    (6, 2): {"sp": [[0, 1], [2, 3], [4, 5]], "dp": [[0, 2, 4], [1, 3, 5]]},
    (6, 3): {"sp": [[0, 1, 2], [3, 4, 5]], "dp": [[0, 3], [1, 4], [2, 5]]},
}
every_grid = pytest.mark.parametrize(
    ("sp_size", "groups"),
    [
        *(
            pytest.param(sp, groups, marks=pytest.mark.distributed(world_size=world), id=f"{world}-ranks-sp-{sp}")
            for (world, sp), groups in GROUPS.items()
        ),
        pytest.param(None, None, marks=pytest.mark.distributed, id="all-ranks-in-one"),  # 4 ranks, or --world-size
    ],
)


def of_all_ranks():
    world = dist.get_world_size()
    return world, {"sp": [[*range(world)]], "dp": [[rank] for rank in range(world)]}


def group_of(rank, groups):
    return next(group for group in groups if rank in group)


@every_grid
def test_each_rank_is_in_its_groups(sp_size, groups, device):
    sp_size, groups = (sp_size, groups) if sp_size else of_all_ranks()
    parallel = create_parallel_groups(sp_size)
    rank = dist.get_rank()
    sp, dp = group_of(rank, groups["sp"]), group_of(rank, groups["dp"])

    assert dist.get_process_group_ranks(parallel.sp) == sp
    assert dist.get_process_group_ranks(parallel.dp) == dp
    assert (parallel.sp_rank, parallel.sp_size) == (sp.index(rank), len(sp))
    assert (parallel.dp_rank, parallel.dp_size) == (dp.index(rank), len(dp))
    # and the groups work: what is summed over them is the sum over these very ranks
    for group, ranks in [(parallel.sp, sp), (parallel.dp, dp)]:
        total = torch.tensor(10.0**rank, device=device)
        dist.all_reduce(total, group=group)
        assert total.item() == sum(10.0**member for member in ranks)
    # and every rank made every group: otherwise the next group of all would not come to be
    everybody = dist.new_group()
    total = torch.ones((), device=device)
    dist.all_reduce(total, group=everybody)
    assert total.item() == dist.get_world_size()


@pytest.mark.needs_torch("2.2")
@every_grid
def test_mesh_is_the_same_grid(sp_size, groups, device):
    sp_size = sp_size or dist.get_world_size()
    mesh = create_mesh(sp_size, device)
    parallel = create_parallel_groups(sp_size)
    assert mesh.mesh_dim_names == ("dp", "sp")
    assert mesh.shape == (parallel.dp_size, parallel.sp_size)
    for name, group in [("sp", parallel.sp), ("dp", parallel.dp)]:
        assert dist.get_process_group_ranks(mesh.get_group(name)) == dist.get_process_group_ranks(group)
        total = torch.tensor(10.0 ** dist.get_rank(), device=device)
        dist.all_reduce(total, group=mesh.get_group(name))
        assert total.item() == sum(10.0**member for member in dist.get_process_group_ranks(group))
    assert (mesh.get_local_rank("dp"), mesh.get_local_rank("sp")) == (parallel.dp_rank, parallel.sp_rank)


@pytest.mark.parametrize("create", ["groups", pytest.param("mesh", marks=pytest.mark.needs_torch("2.2"))])
@pytest.mark.parametrize("sp_size", [3, 0, -2, 8, "2", 1.5, 2.0, True])
@pytest.mark.distributed(world_size=4)
def test_sizes_that_do_not_fit_fail_on_every_rank_before_any_group_is_made(sp_size, create, monkeypatch):
    def no_group(*arguments, **keywords):
        raise AssertionError("a group was made")

    monkeypatch.setattr(dist, "new_group", no_group)
    with pytest.raises(ValueError, match="world of 4 ranks") as error:
        create_parallel_groups(sp_size) if create == "groups" else create_mesh(sp_size, "cpu")
    assert f"sequence_parallel_size={sp_size!r}: use one of [1, 2, 4]" in str(error.value)


@pytest.mark.distributed(world_size=2)
def test_groups_cannot_be_changed_by_accident():
    parallel = create_parallel_groups(2)
    assert isinstance(parallel, ParallelGroups)
    with pytest.raises(dataclasses.FrozenInstanceError):
        parallel.sp_size = 1
