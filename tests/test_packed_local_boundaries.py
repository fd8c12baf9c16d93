"""The recipe's fault, as the page says it: right for the whole sequence, wrong on each rank but the first."""

import pytest
import torch
import torch.distributed as dist

from packed import cu_seqlens
from packed_local_boundaries import local_cu_seqlens


@pytest.mark.distributed(world_size=1)
def test_right_for_a_whole_sequence(device):
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]], device=device)
    assert local_cu_seqlens(positions).tolist() == cu_seqlens(positions, None).tolist() == [0, 3, 4, 8]


def both(lengths, device):
    whole = torch.tensor([[i for length in lengths for i in range(length)]], device=device)
    positions = whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    return positions, local_cu_seqlens(positions).tolist(), cu_seqlens(positions, None).tolist()


@pytest.mark.distributed(world_size=2)
def test_one_document_over_two_slices(device):
    """The numbers of the report."""
    _, local, right = both([2048], device)
    assert local == [[0, 1024], [1024, 3072]][dist.get_rank()]
    assert right == [0, 2048]


@pytest.mark.distributed(world_size=4)
def test_a_document_that_goes_on_in_the_next_slice(device):
    _, local, right = both([3, 6, 7], device)
    # ranks 1 to 3 hold positions 1 to 4; 5, 0, 1, 2; and 3 to 6
    assert local == [[0, 3, 4], [1, 6], [5, 11, 14], [3, 10]][dist.get_rank()]
    assert right == [0, 3, 9, 16]


def print_both(device):
    positions, local, right = both([2048], device)
    text = f"{positions[0, 0]} … {positions[0, -1]}"
    print(f"rank {dist.get_rank()}   positions {text:13} local {local!s:15} cu_seqlens {right}")


def test_as_the_page_shows_it(launch, recorded, device):
    recorded("packed-local-boundaries.txt", "".join(launch(print_both, world_size=2, timeout=20, device=device)))
