"""torch's own ring against one process, where it runs; on a CPU the words with which it fails."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from context_parallel import context_parallel_attention


def mesh_of_all(device):
    """From the group that is there: a mesh made anew would ask for NCCL, which refuses ranks that share a GPU."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(dist.group.WORLD, device)


def whole(device, dtype):
    """Query, key, value and the output's gradient, [batch, heads, seq, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 512, 64, generator=generator).to(device, dtype) for _ in range(4)]


def one_process(query, key, value, gradient):
    """Written out, without SDPA."""
    query, key, value = (x.clone().requires_grad_() for x in (query, key, value))
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
    output = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
    output.backward(gradient)
    return [output.detach(), query.grad, key.grad, value.grad]


@pytest.mark.needs_torch("2.11")
@pytest.mark.parametrize(
    "ranks", [pytest.param(size, marks=pytest.mark.distributed(world_size=size, timeout=120)) for size in (1, 4)]
)
def test_output_and_gradients_are_those_of_one_process(ranks, device):
    if device != "cuda":
        pytest.skip("torch's context_parallel has no attention for a CPU: run with --device cuda")
    if dist.get_backend() == "gloo":  # torch 2.11: all_gather_tensor alone ends so, on two ranks
        pytest.skip("over gloo, torch's functional collectives end with SIGSEGV on CUDA tensors: a GPU for each rank")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = whole(device, torch.bfloat16)
    exact = one_process(*(x.double() for x in inputs))
    query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output.backward(inputs[3])
        on_ranks = context_parallel_attention(*inputs, mesh_of_all(device))
    in_one = [output.detach(), query.grad, key.grad, value.grad]
    for mine, theirs, true in zip(on_ranks, in_one, exact, strict=True):
        assert mine.shape == true.shape
        assert (mine.double() - true).norm() <= 2 * (theirs.double() - true).norm()


def on_cpu():
    try:
        context_parallel_attention(*whole("cpu", torch.float32), mesh_of_all("cpu"))
    except Exception as error:
        if dist.get_rank() == 0:
            print(f"{type(error).__name__}: {error}")


@pytest.mark.needs_torch("2.11")
def test_what_it_says_on_a_cpu(launch, recorded, device):
    if device != "cpu":
        pytest.skip("what the page quotes is said on a CPU")
    recorded("context-parallel-cpu.txt", "".join(launch(on_cpu, world_size=2, timeout=20)))
