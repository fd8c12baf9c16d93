"""Attention with something for each head, on ranks, against one process: output, and gradients of that too."""

import pytest
import torch
import torch.distributed as dist

from attention import ulysses_attention
from per_head import own_heads, scaled_attention
from process_groups import create_parallel_groups

HEADS, TOKENS = 8, 8


def whole(device):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, TOKENS, heads, 6) for heads in (HEADS, 4, 4, HEADS)] + [(HEADS,)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]


def written_out(query, key, value, per_head, kind):
    """The formulas, head by head, for all heads or for those that a rank has."""
    outputs = []
    position = torch.arange(TOKENS, device=query.device)
    later = position[:, None] < position
    for index in range(query.shape[2]):
        kv = index * key.shape[2] // query.shape[2]
        scores = query[:, :, index] @ key[:, :, kv].mT / 6**0.5
        if kind == "scaled_attention":
            scores = scores * per_head[index]
        if kind == "slope":  # ALiBi
            scores = scores - per_head[index] * (position[:, None] - position)
        scores = scores.masked_fill(later, -torch.inf)
        if kind == "sink":  # one more logit, which takes a share and has no value
            scores = torch.cat([scores, per_head[index].expand(*scores.shape[:2], 1)], dim=2)
        outputs.append(scores.softmax(-1)[:, :, :TOKENS] @ value[:, :, kv])
    return torch.stack(outputs, dim=2)


def attention_of(kind, per_head, group):
    if kind == "scaled_attention":
        return scaled_attention(per_head, group)
    own = own_heads(per_head, group)
    return lambda query, key, value, *, is_causal: written_out(query, key, value, own, kind)


def slice_of(x, group):
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


@pytest.mark.parametrize("kind", ["scaled_attention", "slope", "sink"])
@pytest.mark.parametrize("sp_size", [2, 4, 1])
@pytest.mark.distributed(world_size=4)
def test_output_and_gradients_are_those_of_one_process(sp_size, kind, device):
    group = create_parallel_groups(sp_size).sp
    *inputs, gradient, per_head = whole(device)
    leaves = [x.clone().requires_grad_() for x in (*inputs, per_head)]
    expected = written_out(*leaves, kind)
    expected.backward(gradient)

    parameter = per_head.clone().requires_grad_()
    mine = [slice_of(x, group).clone().requires_grad_() for x in inputs]
    output = ulysses_attention(*mine, group, attention=attention_of(kind, parameter, group))
    output.backward(slice_of(gradient, group))
    of_others = parameter.grad.clone()
    of_others.chunk(sp_size)[dist.get_rank(group)].zero_()
    assert torch.count_nonzero(of_others) == 0
    dist.all_reduce(parameter.grad, group=group)
    torch.testing.assert_close(parameter.grad, leaves[3].grad, rtol=1e-10, atol=1e-12)
    for own, theirs in zip([output, *(x.grad for x in mine)], [expected, *(x.grad for x in leaves[:3])], strict=True):
        torch.testing.assert_close(own, slice_of(theirs, group), rtol=1e-10, atol=1e-12)


@pytest.mark.distributed(world_size=4)
def test_any_shape_that_begins_with_heads(device):
    table = torch.arange(24, device=device).view(8, 3)
    rank = dist.get_rank()
    assert own_heads(table, None).tolist() == table[2 * rank : 2 * rank + 2].tolist()


@pytest.mark.distributed(world_size=4)
def test_entries_that_cannot_be_shared_out():
    with pytest.raises(ValueError, match="6 entries for 4 ranks"):
        own_heads(torch.ones(6), None)


@pytest.mark.distributed(world_size=4)
def test_all_entries_for_one_ranks_heads(device):
    """The error that the page quotes."""
    *inputs, _, per_head = whole(device)
    with pytest.raises(RuntimeError, match=r"size of tensor a \(2\) must match the size of tensor b \(8\)"):
        ulysses_attention(
            *(slice_of(x, None) for x in inputs), None, attention=lambda query, *_, is_causal: query * per_head[:, None]
        )
