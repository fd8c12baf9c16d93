"""The whole model on ranks, loss and every parameter's gradient, against the same model in one process."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention import sdpa, ulysses_attention
from loss import token_mean
from model import Config, Decoder, RMSNorm
from process_groups import create_parallel_groups
from sharding import shard_batch

CONFIG = Config(vocabulary=31, hidden=48, layers=2, heads=8, kv_heads=4, mlp=64)
TOKENS = 13  # not a multiple of the SP size
VALID = [13, 4, 9, 1]  # labels that count, by sample: the replicas' counts differ


def build(device, dtype=torch.float64):
    torch.manual_seed(3)
    return Decoder(CONFIG).to(device, dtype)


def batch_of(replica, device):
    """Two samples; all but the first labels of each are masked."""
    generator = torch.Generator().manual_seed(replica)
    input_ids = torch.randint(CONFIG.vocabulary, (2, TOKENS), generator=generator)
    labels = input_ids.clone()
    for row in range(2):
        labels[row, VALID[2 * replica + row] :] = -100
    return {"input_ids": input_ids.to(device), "labels": labels.to(device)}


def one_process(model, replicas, device):
    """The token mean over all replicas' samples, each label predicted by the token before it."""
    total, count = 0, 0
    for replica in range(replicas):
        batch = batch_of(replica, device)
        positions = torch.arange(TOKENS, device=device).expand(2, -1)
        logits = model(batch["input_ids"], positions, sdpa)[:, :-1]
        labels = batch["labels"][:, 1:]
        total += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count += (labels >= 0).sum()
    return total / count


every_grid = pytest.mark.parametrize(
    "sp_size",
    [
        pytest.param(sp, marks=pytest.mark.distributed(world_size=world), id=f"dp-{world // sp}-sp-{sp}")
        for world, sp in [(4, 2), (4, 4), (2, 2), (2, 1)]
    ],
)


def assert_same_as_one_process(model, loss, expected_of, replicas, device):
    """The loss, and every parameter's gradient as an engine takes its mean over all ranks."""
    loss.backward()
    reference = build(device)
    expected = expected_of(reference, replicas, device)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(
            mine.grad / dist.get_world_size(),
            theirs.grad,
            rtol=1e-9,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@every_grid
def test_loss_and_every_gradient_are_those_of_one_process(sp_size, device):
    groups = create_parallel_groups(sp_size)
    model = build(device)
    shard = shard_batch(batch_of(groups.dp_rank, device), groups.sp)
    attention = functools.partial(ulysses_attention, group=groups.sp)
    logits = model(shard["input_ids"], shard["position_ids"], attention)
    labels = shard["shift_labels"]
    loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = token_mean(loss_sum, (labels >= 0).sum(), None, gradient_divisor=dist.get_world_size())
    assert_same_as_one_process(model, loss, one_process, groups.dp_size, device)


@pytest.mark.needs_torch("2.2")  # before it, gloo's all-to-all has no bf16
@pytest.mark.distributed(world_size=4)
def test_bf16_on_ranks_is_no_further_from_one_process_than_that_is_from_fp64(device):
    """How equal is equal: the page of that name has the figures."""

    def gradients(dtype, group, attention):
        model = build(device, torch.bfloat16).to(dtype)
        shard = shard_batch(batch_of(0, device), group)
        logits = model(shard["input_ids"], shard["position_ids"], attention).flatten(0, 1)
        loss_sum = F.cross_entropy(
            logits.to(torch.promote_types(dtype, torch.float32)), shard["shift_labels"].flatten(), reduction="sum"
        )
        loss_sum.backward()
        own = torch.cat([x.grad.double().flatten() for x in model.parameters()])
        dist.all_reduce(own, group=group)
        return own

    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    exact = gradients(torch.float64, alone, sdpa)
    once = gradients(torch.bfloat16, alone, sdpa)
    ranks = gradients(torch.bfloat16, None, functools.partial(ulysses_attention, group=None))
    own_error = (once - exact).norm()
    assert 1e-4 * exact.norm() < own_error < 0.1 * exact.norm()
    assert (ranks - exact).norm() < 1.3 * own_error
    assert 0 < (ranks - once).norm() < 1.3 * own_error


def model_and_tokens(device, dtype=torch.float64):
    """The model, two samples' tokens and their positions, each [2, TOKENS]."""
    positions = torch.arange(TOKENS, device=device).expand(2, -1)
    return build(device, dtype), batch_of(0, device)["input_ids"], positions


def normed(x, weight):
    return torch.stack([row / (row.pow(2).mean() + CONFIG.norm_epsilon).sqrt() for row in x]) * weight


def turned(x, head_dim):
    """RoPE of [seq, head_dim], each pair as a complex number."""
    half = head_dim // 2
    frequencies = torch.tensor([CONFIG.rope_base ** (-2 * i / head_dim) for i in range(half)], dtype=torch.float64)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), frequencies).to(x.device)
    pairs = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], dim=1)


def written_out(model, input_ids):
    """The logits of one sample, head by head, from the formulas."""
    p = dict(model.named_parameters())
    head_dim = CONFIG.hidden // CONFIG.heads
    hidden = p["embedding.weight"][input_ids]  # [seq, hidden]
    later = torch.ones(len(input_ids), len(input_ids), device=hidden.device).triu(1).bool()
    for layer in range(CONFIG.layers):
        w = {name.removeprefix(f"layers.{layer}."): x for name, x in p.items() if name.startswith(f"layers.{layer}.")}
        x = normed(hidden, w["attention_norm.weight"])
        heads = []
        for head in range(CONFIG.heads):
            kv = head * CONFIG.kv_heads // CONFIG.heads
            own, shared = (slice(i * head_dim, (i + 1) * head_dim) for i in (head, kv))
            query, key = turned(x @ w["query.weight"][own].T, head_dim), turned(x @ w["key.weight"][shared].T, head_dim)
            scores = (query @ key.T / head_dim**0.5).masked_fill(later, -torch.inf)
            heads.append(scores.softmax(1) @ (x @ w["value.weight"][shared].T))
        hidden = hidden + torch.cat(heads, dim=1) @ w["output.weight"].T
        x = normed(hidden, w["mlp_norm.weight"])
        gate = x @ w["gate.weight"].T
        hidden = hidden + (gate * gate.sigmoid() * (x @ w["up.weight"].T)) @ w["down.weight"].T
    return normed(hidden, p["norm.weight"]) @ p["head.weight"].T


@pytest.mark.distributed(world_size=1)
def test_it_is_what_the_formulas_say(device):
    model, input_ids, positions = model_and_tokens(device)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing small, nothing 1
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) / 3
            )
    logits = model(input_ids, positions, sdpa)
    expected = torch.stack([written_out(model, sample) for sample in input_ids])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)  # the model's angles are fp32


@pytest.mark.distributed(world_size=1)
def test_it_begins_small(device):
    for parameter in build(device).parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.distributed(world_size=1)
def test_attention_is_the_only_place_where_tokens_meet(device):
    model, input_ids, positions = model_and_tokens(device)
    whole = model(input_ids, positions, own_value)
    parts = [model(input_ids[:, cut], positions[:, cut], own_value) for cut in (slice(0, 5), slice(5, TOKENS))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-12, atol=1e-12)


def own_value(query, key, value, *, is_causal):
    return value.repeat_interleave(query.shape[2] // value.shape[2], dim=2)


@pytest.mark.distributed(world_size=1)
def test_only_differences_of_positions_count(device):
    model, input_ids, positions = model_and_tokens(device)
    near = model(input_ids, positions, sdpa)
    far = model(input_ids, positions + 1000, sdpa)
    stretched = model(input_ids, 3 * positions, sdpa)
    torch.testing.assert_close(far, near, rtol=1e-4, atol=1e-6)  # angles are fp32
    assert (stretched - near).abs().max() > 1e-3 * near.abs().max()


@pytest.mark.distributed(world_size=1)
def test_norms_and_angles_are_computed_in_fp32(device):
    """In bf16 a norm would be rounded three times, and position 1001 would be 1000."""
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    once = normed(x.double(), 1).bfloat16()
    norm = RMSNorm(CONFIG).to(device, torch.bfloat16)
    assert (norm(x) == once).float().mean() > 0.99

    model, _, positions = model_and_tokens(device)
    expected = model.rotation(positions + 1000)
    torch.set_default_dtype(torch.bfloat16)
    assert all(map(torch.equal, model.rotation(positions + 1000), expected))


@pytest.mark.parametrize("sizes", [{"hidden": 48, "heads": 7}, {"hidden": 40}, {"kv_heads": 3}], ids=str)
def test_sizes_that_do_not_fit(sizes):
    """48 // 7 is 6: the model would have 8 heads, and say nothing. 40 / 8 is 5, which has no pairs."""
    with pytest.raises(ValueError, match="hidden must be a multiple of twice the heads"):
        Config(**sizes)


@pytest.mark.distributed(world_size=1)
def test_no_token_sees_a_later_one(device):
    model, input_ids, positions = model_and_tokens(device)
    changed = input_ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % CONFIG.vocabulary
    before, after = (model(ids, positions, sdpa) for ids in (input_ids, changed))
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7], after[:, 7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.distributed(world_size=1)
def test_query_key_and_value_have_the_models_dtype(dtype, device):
    def attention(query, key, value, *, is_causal):
        assert query.dtype == key.dtype == value.dtype == dtype
        assert is_causal
        return sdpa(query, key, value, is_causal=is_causal)

    model, input_ids, positions = model_and_tokens(device, dtype)
    logits = model(input_ids, positions, attention)
    assert logits.dtype == dtype
    assert logits.shape == (2, TOKENS, CONFIG.vocabulary)
