"""Dropout on ranks: what each drops, and with that, output and gradients against one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint

from attention import ulysses_attention
from dropout import attention_with_dropout, seed_dropout
from process_groups import create_parallel_groups

P = 0.25


def gathered(x):
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x.contiguous())
    return everyone


def equal_seed(seed):
    torch.manual_seed(seed)


@pytest.mark.parametrize("device_type", ["cpu", "own"])
@pytest.mark.distributed(world_size=4)
def test_no_two_ranks_drop_alike(device_type, device):
    target = "cpu" if device_type == "cpu" else device

    def dropped(seeded):
        seeded(7)
        mask = (F.dropout(torch.ones(64, 32, device=target), P) == 0).float().to(device)
        masks = gathered(mask)
        return [(masks[i] == masks[j]).float().mean().item() for i in range(4) for j in range(i)]

    assert dropped(equal_seed) == [1.0] * 6
    by_chance = P**2 + (1 - P) ** 2
    assert all(abs(share - by_chance) < 0.06 for share in dropped(seed_dropout))
    assert dropped(seed_dropout) == dropped(seed_dropout)  # a run can be repeated


def whole(device):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 8, heads, 6, generator=generator, dtype=torch.float64).to(device) for heads in (8, 4, 4, 8)]


def kept(seed, group, device):
    """1 / (1 - P) where an entry of the attention matrix is kept, else 0: [batch, heads, seq, seq], all heads."""
    query = torch.zeros(2, 8, 8 // dist.get_world_size(group), 6, dtype=torch.float64, device=device)
    eye = torch.eye(8, dtype=torch.float64, device=device)[None, :, None].expand(2, 8, query.shape[2], 8)
    seed_dropout(seed)
    matrix = attention_with_dropout(P)(query, query, eye, is_causal=False) * 8  # all scores are equal
    heads = [torch.empty_like(matrix) for _ in range(dist.get_world_size(group))]
    dist.all_gather(heads, matrix.contiguous(), group=group)
    return torch.cat(heads, dim=2).transpose(1, 2)


def one_process(query, key, value, gradient, mask):
    query, key, value = (x.clone().requires_grad_() for x in (query, key, value))
    output = torch.empty_like(gradient)
    later = torch.ones(8, 8, device=query.device).triu(1).bool()
    for head in range(8):
        scores = query[:, :, head] @ key[:, :, head // 2].mT / 6**0.5
        matrix = scores.masked_fill(later, -torch.inf).softmax(-1)
        output[:, :, head] = (matrix * mask[:, head]) @ value[:, :, head // 2]
    output.backward(gradient)
    return [output.detach(), query.grad, key.grad, value.grad]


def slice_of(x, group):
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


def on_ranks(query, key, value, gradient, group, run):
    query, key, value = (slice_of(x, group).clone().requires_grad_() for x in (query, key, value))
    output = run(query, key, value, group)
    output.backward(slice_of(gradient, group))
    return [output.detach(), query.grad, key.grad, value.grad]


def plain(query, key, value, group):
    return ulysses_attention(query, key, value, group, attention=attention_with_dropout(P))


@pytest.mark.parametrize("sp_size", [2, 4, 1])
@pytest.mark.distributed(world_size=4)
def test_output_and_gradients_are_those_of_one_process_that_drops_the_same(sp_size, device):
    group = create_parallel_groups(sp_size).sp
    inputs = whole(device)
    mask = kept(5, group, device)
    assert mask.unique().tolist() == pytest.approx([0, 1 / (1 - P)])
    seed_dropout(5)
    actual = on_ranks(*inputs, group, plain)
    for mine, theirs in zip(actual, one_process(*inputs, mask), strict=True):
        torch.testing.assert_close(mine, slice_of(theirs, group), rtol=1e-10, atol=1e-12)


def recomputed(query, key, value, group, **options):
    return torch.utils.checkpoint.checkpoint(plain, query, key, value, group, **options)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.distributed(world_size=4)
def test_recomputation_drops_the_same(use_reentrant, device):
    inputs = whole(device)

    def gradients(run, **options):
        seed_dropout(5)
        return on_ranks(*inputs, None, lambda *arguments: run(*arguments, **options))

    expected = gradients(plain)
    actual = gradients(recomputed, use_reentrant=use_reentrant)
    assert all(map(torch.equal, actual, expected))
    wrong = gradients(recomputed, use_reentrant=use_reentrant, preserve_rng_state=False)
    assert torch.equal(wrong[0], expected[0])  # the output does not tell
    assert all((mine - theirs).abs().max() > 0.01 for mine, theirs in zip(wrong[1:], expected[1:], strict=True))


def print_what_is_dropped():
    lines = []
    for name, seeded in {"one seed": equal_seed, "seed_dropout": seed_dropout}.items():
        seeded(7)
        drawn = torch.rand(24)  # the same on all versions, other than F.dropout
        lines.append(f"{name}  " + "".join(".x"[x < P] for x in drawn.tolist()))
    print(f"rank {dist.get_rank()}  " + "  ".join(lines))


def test_as_the_page_shows_it(launch, recorded):
    recorded("dropout.txt", "".join(launch(print_what_is_dropped, world_size=4, timeout=20)))
