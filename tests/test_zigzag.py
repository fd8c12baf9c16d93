"""Zigzag slices: wrong with Ulysses and with a plain ring, right once the sequence is put in order."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention import sdpa, ulysses_attention
from model import Config, Decoder
from process_groups import create_parallel_groups
from ring_attention import ring_attention
from test_attention import one_process, slice_of, whole
from test_ring_attention import needs_point_to_point
from zigzag import in_order, zigzag_slice

CONFIG = Config(vocabulary=8, hidden=32, layers=2, heads=4, kv_heads=2, mlp=64)


@pytest.mark.distributed(world_size=4)
def test_a_chunk_from_each_end():
    sp = create_parallel_groups(2)
    tokens = torch.arange(12).expand(3, -1)
    expected = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]][sp.sp_rank]
    assert zigzag_slice(tokens, sp.sp).tolist() == [expected] * 3
    with pytest.raises(ValueError, match="10 tokens cannot be cut into 4 equal chunks"):
        zigzag_slice(tokens[:, :10], sp.sp)
    x = torch.zeros(1, 10, 2, 4)  # slices of 5, from elsewhere
    with pytest.raises(ValueError, match="10 tokens are not 4 equal chunks"):
        in_order(sdpa, sp.sp)(x, x, x, is_causal=True)


@pytest.mark.distributed(world_size=4)
def test_each_rank_has_as_many_pairs_under_a_causal_mask():
    """The token at position p sees p + 1 tokens: of 24 · 25 / 2 pairs, each of four ranks has a quarter."""
    assert zigzag_slice(torch.arange(1, 25)[None], None).sum() == 75


@pytest.mark.parametrize("sp_size", [2, 4, 1])
@pytest.mark.distributed(world_size=4)
def test_ulysses_in_order_is_one_process(sp_size, device):
    sp = create_parallel_groups(sp_size)
    query, key, value, gradient = whole(2, 16, 8, 4, 8, 5, device, seed=sp.dp_rank)
    expected = one_process(query, key, value, gradient, is_causal=True)
    leaves = [zigzag_slice(x, sp.sp).clone().requires_grad_() for x in (query, key, value)]
    output = ulysses_attention(*leaves, sp.sp, attention=in_order(sdpa, sp.sp))
    output.backward(zigzag_slice(gradient, sp.sp))
    for mine, all_of_it in zip([output.detach(), *(x.grad for x in leaves)], expected, strict=True):
        torch.testing.assert_close(mine, zigzag_slice(all_of_it, sp.sp), rtol=1e-10, atol=1e-12)


@pytest.mark.distributed(world_size=4)
def test_without_a_mask_the_order_does_not_matter(device):
    """Which is why the fault can go unnoticed in a test without one."""
    query, key, value, gradient = whole(2, 16, 8, 4, 8, 5, device)
    expected = one_process(query, key, value, gradient, is_causal=False)[0]
    inputs = [zigzag_slice(x, None) for x in (query, key, value)]
    output = ulysses_attention(*inputs, None, is_causal=False)
    torch.testing.assert_close(output, zigzag_slice(expected, None), rtol=1e-10, atol=1e-12)


@functools.lru_cache
def taught(device):
    """A model that has learned one text by heart, with its loss there, in one process."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(CONFIG.vocabulary, (1, 65), generator=generator).to(device)
    batch = {"input_ids": text[:, :-1], "labels": text[:, 1:], "position_ids": torch.arange(64, device=device)[None]}
    torch.manual_seed(0)
    model = Decoder(CONFIG).to(device, torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)  # a larger one lets the last digits of versions part
    for _ in range(150):
        optimizer.zero_grad()
        loss = loss_of(model, batch, sdpa)
        loss.backward()
        optimizer.step()
    return model, batch


def loss_of(model, batch, attention):
    logits = model(batch["input_ids"], batch["position_ids"], attention)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def losses(device):
    """By slices and attention, the mean over all ranks: the slices have equally many labels."""
    model, batch = taught(device)
    ulysses = functools.partial(ulysses_attention, group=None)
    ways = {
        "one process": (lambda x, _: x, sdpa),
        "slices in order, Ulysses": (slice_of, ulysses),
        "slices in order, ring": (slice_of, functools.partial(ring_attention, group=None)),
        "zigzag slices, Ulysses": (zigzag_slice, ulysses),
        "zigzag slices, ring": (zigzag_slice, functools.partial(ring_attention, group=None)),
        "zigzag slices, Ulysses with in_order": (
            zigzag_slice,
            functools.partial(ulysses, attention=in_order(sdpa, None)),
        ),
    }
    found = {}
    for name, (cut, attention) in ways.items():
        with torch.no_grad():
            loss = loss_of(model, {key: cut(x, None) for key, x in batch.items()}, attention)
        dist.all_reduce(loss)
        found[name] = (loss / dist.get_world_size()).item()
    return found


def print_losses(device):
    needs_point_to_point(device)
    found = losses(device)
    if dist.get_rank() == 0:
        for name, loss in found.items():
            print(f"{name:38}{loss:.4f}")
        print(f"{f'guessing among {CONFIG.vocabulary} tokens':38}{math.log(CONFIG.vocabulary):.4f}")


def test_the_losses_as_the_page_shows_them(launch, recorded, device):
    recorded("zigzag.txt", "".join(launch(print_losses, world_size=4, timeout=60, device=device)))


@pytest.mark.distributed(world_size=4, timeout=60)
def test_what_is_right_is_the_loss_of_one_process(device):
    needs_point_to_point(device)
    found = losses(device)
    right = found.pop("one process")
    wrong = [found.pop(f"zigzag slices, {way}") for way in ("Ulysses", "ring")]
    assert list(found.values()) == pytest.approx([right] * 3, rel=1e-9)
    assert min(wrong) > math.log(CONFIG.vocabulary) > 20 * right
