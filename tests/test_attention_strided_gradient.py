"""The fault, as the page says it: right forward, and in backward right only where the gradient is contiguous."""

import pytest
import torch
import torch.distributed as dist

from attention_strided_gradient import AllToAll


def run(layout, device):
    """Rank r's x is [2, 3] with distinct numbers. Returns output and gradient, and what they should be."""
    rank = dist.get_rank()
    of_rank = [torch.arange(6.0, device=device).view(2, 3) + 10 * r for r in range(2)]
    x = of_rank[rank].clone().requires_grad_()
    output = AllToAll.apply(x, None)
    gradient = of_rank[rank] if layout == "contiguous" else of_rank[rank].T.contiguous().T
    output.backward(gradient)
    swapped = torch.stack([of_rank[sender][rank] for sender in range(2)])
    return output.detach(), x.grad, swapped


@pytest.mark.distributed(world_size=2)
def test_a_contiguous_gradient_is_right(device):
    output, gradient, expected = run("contiguous", device)
    assert torch.equal(output, expected)
    assert torch.equal(gradient, expected)


@pytest.mark.distributed(world_size=2)
def test_a_strided_gradient_is_garbage_on_gloo(device):
    output, gradient, expected = run("strided", device)
    assert torch.equal(output, expected)
    assert not torch.equal(gradient, expected)


def strided():
    _, gradient, expected = run("strided", "cpu")
    print(f"rank {dist.get_rank()}: gradient {gradient.tolist()}, should be {expected.tolist()}")


def test_as_the_page_shows_it(launch, recorded, device):
    if device != "cpu":
        pytest.skip("the numbers on the page are those of gloo on CPU")
    recorded("attention-strided-gradient.txt", "".join(launch(strided, world_size=2, timeout=20)))
