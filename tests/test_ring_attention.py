"""Output and the three gradients of ring attention, against SDPA in one process on the whole sequence."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint

from process_groups import create_parallel_groups
from ring_attention import ring_attention


def whole(batch, tokens, heads, kv_heads, head_dim, value_dim, device, dtype=torch.float64, seed=0):
    """Query, key, value and the output's gradient for the whole sequence, [batch, tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim)]
    return [
        torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for shape in shapes
    ]


def one_process(query, key, value, gradient, is_causal):
    """Output and gradients without any parallelism, each KV head repeated by hand."""
    query, key, value = (x.clone().requires_grad_() for x in (query, key, value))
    copies = query.shape[2] // key.shape[2]
    k, v = (x[:, :, [head // copies for head in range(query.shape[2])]].transpose(1, 2) for x in (key, value))
    output = F.scaled_dot_product_attention(query.transpose(1, 2), k, v, is_causal=is_causal).transpose(1, 2)
    output.backward(gradient)
    return [output.detach(), query.grad, key.grad, value.grad]


def slice_of(x, group):
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


def needs_point_to_point(device):
    """All ranks skip alike: gloo sends no CUDA tensor from one rank to another."""
    if device == "cuda" and dist.get_backend() == "gloo":
        pytest.skip("gloo's send takes no CUDA tensors: a ring needs a GPU for each rank")


def on_ranks(query, key, value, gradient, group, attention=ring_attention, **options):
    """Output and gradients of this rank's slice; each argument is the whole sequence."""
    query, key, value = (slice_of(x, group).clone().requires_grad_() for x in (query, key, value))
    output = attention(query, key, value, group, **options)
    output.backward(slice_of(gradient, group))
    return [output.detach(), query.grad, key.grad, value.grad]


def assert_same(actual, expected, group, rtol=1e-10, atol=1e-12):
    for name, mine, all_of_it in zip(["output", "query", "key", "value"], actual, expected, strict=True):
        torch.testing.assert_close(
            mine, slice_of(all_of_it, group), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (6, 1)])
@pytest.mark.parametrize("sp_size", [1, 2, 4])
@pytest.mark.distributed(world_size=4)
def test_output_and_gradients_are_those_of_one_process(sp_size, heads, kv_heads, device):
    """Heads that the SP size does not divide are nothing special to a ring."""
    needs_point_to_point(device)
    groups = create_parallel_groups(sp_size)
    for batch, is_causal, value_dim in itertools.product([1, 3], [True, False], [8, 5]):
        # each replica has a sample of its own
        inputs = whole(batch, 12, heads, kv_heads, 8, value_dim, device, seed=groups.dp_rank)
        expected = one_process(*inputs, is_causal)
        assert_same(on_ranks(*inputs, groups.sp, is_causal=is_causal), expected, groups.sp)


@pytest.mark.distributed
def test_over_all_ranks(device):
    needs_point_to_point(device)
    inputs = whole(2, 3 * dist.get_world_size(), 4, 2, 8, 8, device)
    assert_same(on_ranks(*inputs, None), one_process(*inputs, is_causal=True), None)
