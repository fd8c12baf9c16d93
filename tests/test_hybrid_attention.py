"""Ulysses × ring on a grid of 2 × 2 ranks, and smaller ones, against one process."""

import itertools

import pytest
import torch
import torch.distributed as dist

from hybrid_attention import create_hybrid_groups, hybrid_attention
from process_groups import create_parallel_groups
from test_attention import assert_same, one_process, whole
from test_ring_attention import needs_point_to_point, on_ranks


@pytest.mark.parametrize(
    ("sp_size", "ulysses_size", "ulysses", "ring"),
    [
        (4, 2, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (2, 1, [[0], [1], [2], [3]], [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (2, 2, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0], [1], [2], [3]]),
        (4, 4, [[0, 1, 2, 3]] * 4, [[0], [1], [2], [3]]),
    ],
)
@pytest.mark.distributed(world_size=4)
def test_which_ranks_share_a_group(sp_size, ulysses_size, ulysses, ring):
    groups = create_hybrid_groups(sp_size, ulysses_size)
    assert dist.get_process_group_ranks(groups.ulysses) == ulysses[dist.get_rank()]
    assert dist.get_process_group_ranks(groups.ring) == ring[dist.get_rank()]


@pytest.mark.distributed(world_size=8)
def test_which_ranks_share_a_group_with_two_replicas():
    groups = create_hybrid_groups(4, 2)
    ulysses = [[0, 1], [2, 3], [4, 5], [6, 7]]
    ring = [[0, 2], [1, 3], [4, 6], [5, 7]]
    rank = dist.get_rank()
    assert dist.get_process_group_ranks(groups.ulysses) == next(ranks for ranks in ulysses if rank in ranks)
    assert dist.get_process_group_ranks(groups.ring) == next(ranks for ranks in ring if rank in ranks)


# query heads, KV heads: shared out; one KV head for both Ulysses ranks; heads that 4 does not divide, so that plain
# Ulysses on 4 ranks refuses them
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (4, 1), (6, 2), (14, 2)])
@pytest.mark.parametrize(("sp_size", "ulysses_size"), [(4, 2), (4, 1), (2, 2)])
@pytest.mark.distributed(world_size=4)
def test_output_and_gradients_are_those_of_one_process(sp_size, ulysses_size, heads, kv_heads, device):
    needs_point_to_point(device)
    sp = create_parallel_groups(sp_size)
    groups = create_hybrid_groups(sp_size, ulysses_size)

    def attention(query, key, value, group, **options):
        assert query.shape[1] == 12 // sp_size
        return hybrid_attention(query, key, value, groups, **options)

    for batch, is_causal, value_dim in itertools.product([1, 3], [True, False], [8, 5]):
        inputs = whole(batch, 12, heads, kv_heads, 8, value_dim, device, seed=sp.dp_rank)
        expected = one_process(*inputs, is_causal)
        assert_same(on_ranks(*inputs, sp.sp, attention=attention, is_causal=is_causal), expected, sp.sp)


@pytest.mark.parametrize(("sp_size", "ulysses_size"), [(3, 1), (4, 3), (8, 2), (4, 0)])
@pytest.mark.distributed(world_size=4)
def test_sizes_that_do_not_fit_fail_before_any_group_is_made(sp_size, ulysses_size, monkeypatch):
    monkeypatch.setattr(dist, "new_group", None)
    message = f"a world of 4 ranks, sequence_parallel_size={sp_size}, ulysses_size={ulysses_size}"
    with pytest.raises(ValueError, match=message):
        create_hybrid_groups(sp_size, ulysses_size)


@pytest.mark.distributed(world_size=4)
def test_heads_that_the_ulysses_size_does_not_divide(device):
    groups = create_hybrid_groups(4, 2)
    x = torch.zeros(1, 2, 3, 4, device=device)
    with pytest.raises(ValueError, match="3 query heads cannot be shared out over 2 ranks"):
        hybrid_attention(x, x, x, groups)
