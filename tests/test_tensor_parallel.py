"""An attention layer with its weights cut by heads, against the same layer in one process."""

import pytest
import torch
import torch.distributed as dist

from process_groups import create_parallel_groups
from tensor_parallel import all_reduce, tensor_parallel_attention

HEAD_DIM = 6
NAMES = ("query", "key", "value", "output")


def layer(heads, kv_heads, device, seed):
    """Hidden states, the output's gradient and the whole weights. The hidden size is not heads · head_dim."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (2, 8, 10),
        (2, 8, 10),
        *((n * HEAD_DIM, 10) for n in (heads, kv_heads, kv_heads)),
        (10, heads * HEAD_DIM),
    ]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]


def one_process(hidden, gradient, *weights):
    """Output and gradients, head by head."""
    hidden, *weights = leaves = [x.clone().requires_grad_() for x in (hidden, *weights)]
    query, key, value = (
        (hidden @ weight.T).unflatten(2, (-1, HEAD_DIM)).unbind(2) for weight in weights[:3]
    )  # lists of heads, each [batch, seq, head_dim]
    later = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool, device=hidden.device).triu(1)
    heads = []
    for head, q in enumerate(query):
        k, v = key[head * len(key) // len(query)], value[head * len(key) // len(query)]
        scores = q @ k.transpose(1, 2) / HEAD_DIM**0.5
        heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v)
    output = torch.cat(heads, dim=2) @ weights[3].T
    output.backward(gradient)
    return [output.detach(), *(x.grad for x in leaves)]


def on_ranks(hidden, gradient, *weights, group, sequence_parallel):
    """The like, of this rank's slice of the sequence and of the weights."""
    mine = [
        x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
        for x, dim in zip(weights, (0, 0, 0, 1), strict=True)
    ]
    if sequence_parallel:
        hidden, gradient = (slice_of(x, group) for x in (hidden, gradient))
    hidden, *mine = leaves = [x.clone().requires_grad_() for x in (hidden, *mine)]
    output = tensor_parallel_attention(
        hidden, dict(zip(NAMES, mine, strict=True)), HEAD_DIM, group, sequence_parallel=sequence_parallel
    )
    output.backward(gradient)
    return [output.detach(), *(x.grad for x in leaves)]


def slice_of(x, group):
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


def compare(tp_size, heads, kv_heads, sequence_parallel, device):
    groups = create_parallel_groups(tp_size)
    inputs = layer(heads, kv_heads, device, seed=groups.dp_rank)
    output, d_hidden, *d_weights = one_process(*inputs)
    if sequence_parallel:
        output, d_hidden = slice_of(output, groups.sp), slice_of(d_hidden, groups.sp)
    cut = [x.chunk(tp_size, dim)[groups.sp_rank] for x, dim in zip(d_weights, (0, 0, 0, 1), strict=True)]
    actual = on_ranks(*inputs, group=groups.sp, sequence_parallel=sequence_parallel)
    for name, mine, expected in zip(["out", "hidden", *NAMES], actual, [output, d_hidden, *cut], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4)])
@pytest.mark.parametrize("tp_size", [2, 4, 1])
@pytest.mark.distributed(world_size=4)
def test_output_and_gradients_are_those_of_one_process(tp_size, heads, kv_heads, device):
    compare(tp_size, heads, kv_heads, False, device)


@pytest.mark.needs_torch("2.8")  # gloo has no reduce_scatter before
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4)])
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.distributed(world_size=4)
def test_with_the_sequence_cut_between_layers(tp_size, heads, kv_heads, device):
    compare(tp_size, heads, kv_heads, True, device)


@pytest.mark.distributed(world_size=2)
def test_a_sum_of_what_lies_otherwise_in_memory(device):
    """gloo adds up memory from front to back: strides that differ would mix the numbers up."""
    x = torch.arange(12.0, device=device).view(2, 3, 2)
    mine = x.transpose(0, 1).contiguous().transpose(0, 1) if dist.get_rank() else x
    assert torch.equal(all_reduce(mine, None), 2 * x)


@pytest.mark.distributed(world_size=1)
def test_second_derivatives_are_refused(device):
    """They would be wrong: backward's collectives are nothing that autograd knows."""
    hidden, _, *weights = layer(4, 4, device, 0)
    hidden.requires_grad_()
    output = tensor_parallel_attention(hidden, dict(zip(NAMES, weights, strict=True)), HEAD_DIM, None)
    (gradient,) = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.distributed(world_size=2)
def test_a_head_that_would_be_cut(monkeypatch, device):
    monkeypatch.setattr(dist, "all_reduce", None)
    weights = dict(zip(NAMES, layer(2, 1, device, 0)[2:], strict=True))
    weights["value"] = weights["value"][:3]
    message = "value has 3 rows on this rank, no multiple of head_dim=6"
    with pytest.raises(ValueError, match=message):
        tensor_parallel_attention(torch.zeros(1, 2, 10, device=device), weights, HEAD_DIM, None)
