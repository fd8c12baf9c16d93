import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from loss import sum_over_group, token_mean, weighted_all_reduce
from process_groups import create_mesh, create_parallel_groups

SEQUENCE, HIDDEN, VOCABULARY = 16, 5, 7
# Valid labels of each rank's slice, repeated over more ranks: neighbours and replicas differ, and one has none.
VALID = [7, 1, 0, 13, 3, 12]
every_grid = pytest.mark.parametrize(
    "sp_size",
    [
        *(
            pytest.param(sp, marks=pytest.mark.distributed(world_size=world), id=f"dp-{world // sp}-sp-{sp}")
            for world, sp in [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]
        ),
        pytest.param(None, marks=pytest.mark.distributed, id="dp-1-sp-all"),  # 4 ranks, or --world-size
    ],
)


def problem(device, dtype=torch.float64):
    """All ranks' slices, the same on every rank: hidden [world, SEQUENCE, HIDDEN], labels [world, SEQUENCE]."""
    generator = torch.Generator().manual_seed(2)
    world = dist.get_world_size()
    hidden = torch.randn(world, SEQUENCE, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (world, SEQUENCE), generator=generator)
    for rank in range(world):
        labels[rank, torch.randperm(SEQUENCE, generator=generator)[VALID[rank % len(VALID)] :]] = -100
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(device, dtype)
    return hidden.to(device, dtype), labels.to(device), weight.requires_grad_()


def gradient_of(loss, weight):
    weight.grad = None
    loss.backward()
    return weight.grad.clone()


def mean_of_replicas(hidden, labels, weight, sp_size):
    """One process: each replica's mean over its valid labels, then the mean over replicas."""
    replicas = zip(hidden.split(sp_size), labels.split(sp_size), strict=True)
    means = [F.cross_entropy((h @ weight.T).flatten(0, 1), y.flatten()) for h, y in replicas if (y >= 0).any()]
    return sum(means) / (len(hidden) // sp_size)


def mean_of_tokens(hidden, labels, weight):
    """One process: the mean over all valid labels."""
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten())


def reduced(gradient, divisor):
    """What an engine makes of the ranks' gradients: (1/D)·Σ."""
    total = gradient.clone()
    dist.all_reduce(total)
    return total / divisor


def same_bits_on_all(group, value):
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, value.detach(), group=group)
    return all(torch.equal(other, value) for other in everyone)


# ------------------------------------------------------------------------------- weighted_all_reduce


@pytest.mark.parametrize("gradient_reduction", ["mean", "sum"])
@every_grid
def test_weighted_all_reduce_is_the_loss_of_one_process(sp_size, gradient_reduction, device):
    sp_size = sp_size or dist.get_world_size()
    hidden, labels, weight = problem(device)
    groups = create_parallel_groups(sp_size)
    rank = dist.get_rank()
    # the local mean, NaN where the slice has no valid label
    local = F.cross_entropy(hidden[rank] @ weight.T, labels[rank])
    num_valid = int((labels[rank] >= 0).sum())
    loss = weighted_all_reduce(local, num_valid, groups.sp, gradient_reduction=gradient_reduction)

    replica = slice(groups.dp_rank * sp_size, (groups.dp_rank + 1) * sp_size)
    if (labels[replica] >= 0).any():
        expected = mean_of_replicas(hidden[replica], labels[replica], weight, sp_size)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    else:
        assert loss.item() == 0
    assert loss.shape == ()
    assert same_bits_on_all(groups.sp, loss)

    divisor = dist.get_world_size() if gradient_reduction == "mean" else groups.dp_size
    actual = reduced(gradient_of(loss, weight), divisor)
    expected = gradient_of(mean_of_replicas(hidden, labels, weight, sp_size), weight)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def ddp(head):
    return torch.nn.parallel.DistributedDataParallel(head)


def fsdp2(head):
    from torch.distributed.fsdp import fully_shard

    mesh = create_mesh(1, next(head.parameters()).device.type)  # shard over all ranks
    return fully_shard(head, mesh=mesh["dp"])


@pytest.mark.parametrize("form", ["weighted_all_reduce", "token_mean"])
@pytest.mark.parametrize("engine", [ddp, pytest.param(fsdp2, marks=pytest.mark.needs_torch("2.6"))])
@pytest.mark.distributed(world_size=4)
def test_with_an_engine_that_averages_over_all_ranks(engine, form, device):
    """dp 2, sp 2; DDP's and FSDP2's own reduction, which divides by all ranks: D = 4."""
    hidden, labels, weight = problem(device, torch.float32)
    if form == "weighted_all_reduce":
        reference = mean_of_replicas(hidden, labels, weight, sp_size=2)
    else:
        reference = mean_of_tokens(hidden, labels, weight)
    expected = gradient_of(reference, weight)

    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device)
    head.weight.data.copy_(weight.detach())
    model = engine(head)
    groups = create_parallel_groups(2)
    rank = dist.get_rank()
    logits, num_valid = model(hidden[rank]), (labels[rank] >= 0).sum()
    if form == "weighted_all_reduce":
        weighted_all_reduce(F.cross_entropy(logits, labels[rank]), num_valid, groups.sp).backward()
    else:
        local_sum = F.cross_entropy(logits, labels[rank], reduction="sum")
        token_mean(local_sum, num_valid, None, gradient_divisor=4).backward()
    actual = head.weight.grad
    if engine is fsdp2:  # each rank has some rows; full_tensor() crashes on gloo with CUDA tensors, torch 2.11
        actual, expected = actual.to_local(), expected.chunk(4)[rank]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.distributed(world_size=4)
def test_the_probe_for_what_the_engine_divides_by(device):
    """Each rank's loss is one parameter: its gradient is W/D, 1 under DDP."""
    model = torch.nn.Linear(1, 1, device=device)
    torch.nn.parallel.DistributedDataParallel(model)(torch.zeros(1, 1, device=device)).sum().backward()
    assert model.bias.grad.item() == 1


@pytest.mark.distributed(world_size=2)
def test_one_collective_carries_both_sums(monkeypatch, device):
    calls = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda total, group: calls.append(total) or all_reduce(total, group=group))
    weighted_all_reduce(torch.tensor(1.0, device=device, requires_grad=True), 1, None).backward()
    assert [total.numel() for total in calls] == [2]


@pytest.mark.parametrize(("dtype", "result"), [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64")])
@pytest.mark.distributed(world_size=2)
def test_at_least_fp32(dtype, result, device):
    dtype, result = getattr(torch, dtype), getattr(torch, result)
    rank = dist.get_rank()
    # 1/3 and 5 are rounded by the loss's own dtype; from there on nothing is lost
    local = torch.tensor([1 / 3, 5.0][rank], dtype=dtype, device=device, requires_grad=True)
    loss = weighted_all_reduce(local, [7, 93][rank], None)
    exact = (7 * torch.tensor(1 / 3, dtype=dtype).double() + 93 * 5) / 100
    assert loss.dtype == result
    assert loss.item() == pytest.approx(exact.item(), rel=1e-15 if result == torch.float64 else 2e-7)
    loss.backward()
    assert local.grad.dtype == dtype
    assert local.grad.item() == pytest.approx(2 * [0.07, 0.93][rank], rel=torch.finfo(dtype).eps)


@pytest.mark.distributed(world_size=2)
def test_a_count_past_the_range_of_bf16_and_of_fp16_is_not_lost(device):
    local = torch.tensor(1.0 + dist.get_rank(), dtype=torch.float16, device=device)
    loss = weighted_all_reduce(local, [1_000_001, 1][dist.get_rank()], None)
    assert loss.item() == pytest.approx((1_000_001 + 2) / 1_000_002, rel=1e-6)


@pytest.mark.distributed(world_size=2)
def test_an_fp64_loss_counts_exactly_past_the_range_of_fp32(device):
    count = torch.tensor([2**24 + 1, 0][dist.get_rank()], device=device)
    loss = token_mean(torch.tensor(1.0, dtype=torch.float64, device=device), count, None, gradient_divisor=1)
    assert loss.item() == 2 / (2**24 + 1)


@pytest.mark.distributed(world_size=4)
def test_nan_of_weight_zero_counts_for_nothing(device):
    groups = create_parallel_groups(2)
    odd = groups.sp_rank == 1
    local = torch.tensor(math.nan if odd else 2.5, device=device, requires_grad=True)
    loss = weighted_all_reduce(local, 0 if odd else 3, groups.sp)
    loss.backward()
    assert loss.item() == 2.5
    assert local.grad.item() == (0 if odd else 2)


@pytest.mark.distributed(world_size=2)
def test_nan_that_counts_stays_nan(device):
    local = torch.tensor([math.nan, 1.0][dist.get_rank()], device=device)
    assert weighted_all_reduce(local, 1, None).isnan()


@pytest.mark.distributed(world_size=2)
def test_a_hand_made_mean_over_nothing_has_nan_gradients_whatever_its_weight(device):
    """Why the page says: pass sums."""
    mask = torch.full((4,), float(dist.get_rank()), device=device)
    for form in ("mean", "sum"):
        per_token = torch.ones(4, device=device, requires_grad=True)
        local_sum = (per_token * mask).sum()
        if form == "mean":
            loss = weighted_all_reduce(local_sum / mask.sum(), mask.sum(), None)
        else:
            loss = token_mean(local_sum, mask.sum(), None, gradient_divisor=2)
        loss.backward()
        assert loss.item() == 1
        poisoned = form == "mean" and dist.get_rank() == 0
        assert per_token.grad.isnan().any().item() == poisoned


@pytest.mark.parametrize("value", [math.nan, 3.0])
@pytest.mark.distributed(world_size=2)
def test_no_weight_anywhere_gives_zero(value, device):
    local = torch.tensor(value, device=device, requires_grad=True)
    loss = weighted_all_reduce(local, 0, None)
    loss.backward()
    assert (loss.item(), local.grad.item()) == (0, 0)


@pytest.mark.parametrize("unit", [1.0, 2.0**-20])
@pytest.mark.distributed(world_size=2)
def test_fractional_weights(unit, device):
    rank = dist.get_rank()
    local = torch.tensor([1.0, 4.0][rank], device=device, requires_grad=True)
    loss = weighted_all_reduce(local, [0.25 * unit, 0.125 * unit][rank], None, gradient_reduction="sum")
    loss.backward()
    assert loss.item() == 2.0
    assert local.grad.item() == pytest.approx([2 / 3, 1 / 3][rank])


@pytest.mark.distributed(world_size=2)
def test_the_weight_is_not_differentiated(device):
    count = torch.tensor(2.0 + dist.get_rank(), device=device, requires_grad=True)
    weighted_all_reduce(torch.tensor(1.0, device=device, requires_grad=True), count, None).backward()
    assert count.grad is None


@pytest.mark.parametrize("form", ["weighted", "token_mean", "sum"])
@pytest.mark.distributed(world_size=2)
def test_the_gradient_that_comes_in_is_passed_on(form, device):
    """Gradient accumulation and fp16 loss scaling multiply the loss afterwards."""
    local = torch.tensor(1.0, device=device, requires_grad=True)
    if form == "weighted":
        loss, expected = weighted_all_reduce(local, [1, 3][dist.get_rank()], None), [0.5, 1.5]
    elif form == "token_mean":
        loss, expected = token_mean(local, [1, 3][dist.get_rank()], None, gradient_divisor=2), [0.5, 0.5]
    else:
        loss, expected = sum_over_group(local, None, gradient_reduction="mean"), [2, 2]
    (loss * 1024).backward()
    assert local.grad.item() == 1024 * expected[dist.get_rank()]


@pytest.mark.distributed(world_size=2)
def test_the_gradient_that_comes_in_is_left_as_it_was(device):
    local = torch.ones(3, device=device, requires_grad=True)
    total = sum_over_group(local, None, gradient_reduction="mean")
    incoming = torch.ones(3, device=device)
    total.backward(incoming)
    assert incoming.tolist() == [1, 1, 1]
    assert local.grad.tolist() == [2, 2, 2]


@pytest.mark.distributed(world_size=2)
def test_a_second_derivative(device):
    """A gradient penalty differentiates the gradient. With x = 3 on both ranks, L = 9 and this rank's share is x²/2."""
    local = torch.tensor(3.0, device=device, requires_grad=True)
    loss = weighted_all_reduce(local**2, 1, None, gradient_reduction="sum")
    (first,) = torch.autograd.grad(loss**2, local, create_graph=True)
    (second,) = torch.autograd.grad(first, local)
    assert first.item() == 54  # 2 L · x
    assert second.item() == 36  # 2 L + 2 x · x


@pytest.mark.parametrize("form", ["weighted", "token_mean", "sum"])
@pytest.mark.distributed(world_size=2)
def test_backward_needs_nobody_else(form, device):
    local = torch.tensor(1.0, device=device, requires_grad=True)
    if form == "weighted":
        loss = weighted_all_reduce(local, 1, None)
    elif form == "token_mean":
        loss = token_mean(local, 1, None, gradient_divisor=2)
    else:
        loss = sum_over_group(local, None, gradient_reduction="sum")
    if dist.get_rank() == 1:
        loss.backward()
        assert local.grad.item() == 1


@pytest.mark.distributed(world_size=2)
def test_no_warning(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local = torch.tensor(1.0, device=device, requires_grad=True)
        weighted_all_reduce(local, 1, None).backward()
        token_mean(local, 1, None, gradient_divisor=2).backward()
        sum_over_group(local, None, gradient_reduction="mean").backward()


@pytest.mark.distributed(world_size=2)
def test_inputs_are_left_as_they_were(device):
    local = torch.tensor(1.0 + dist.get_rank(), device=device)
    count = torch.tensor(2.0, device=device)
    weighted_all_reduce(local, count, None)
    sum_over_group(local, None, gradient_reduction="mean")
    token_mean(local, count, None, gradient_divisor=1)
    assert (local.item(), count.item()) == (1.0 + dist.get_rank(), 2.0)


# ---------------------------------------------------------------------------------------- token_mean


@pytest.mark.parametrize("divisor", ["all ranks", "replicas"])
@every_grid
def test_token_mean_is_the_mean_of_one_process(sp_size, divisor, device):
    hidden, labels, weight = problem(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    divisor = world if divisor == "all ranks" else world // (sp_size or world)
    local_sum = F.cross_entropy(hidden[rank] @ weight.T, labels[rank], reduction="sum")
    loss = token_mean(local_sum, (labels[rank] >= 0).sum(), None, gradient_divisor=divisor)

    reference = mean_of_tokens(hidden, labels, weight)
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=0)
    assert loss.shape == ()
    assert same_bits_on_all(None, loss)
    actual = reduced(gradient_of(loss, weight), divisor)
    torch.testing.assert_close(actual, gradient_of(reference, weight), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("divisor", [4, 0.5])
@pytest.mark.distributed(world_size=4)
def test_token_mean_over_a_group_that_is_not_the_world(divisor, device):
    groups = create_parallel_groups(2)
    local = torch.tensor([1.0, 2.0, 3.0, 4.0][dist.get_rank()], device=device, requires_grad=True)
    loss = token_mean(local, [7, 1, 30, 2][dist.get_rank()], groups.sp, gradient_divisor=divisor)
    loss.backward()
    assert loss.item() == pytest.approx([3 / 8, 7 / 32][groups.dp_rank])
    assert local.grad.item() == pytest.approx(divisor / [8, 32][groups.dp_rank])


@pytest.mark.distributed(world_size=4)
def test_the_mean_of_replica_means_is_another_number(device):
    """Why token_mean exists: replicas with different token counts."""
    hidden, labels, weight = problem(device)
    of_replicas = gradient_of(mean_of_replicas(hidden, labels, weight, sp_size=2), weight)
    of_tokens = gradient_of(mean_of_tokens(hidden, labels, weight), weight)
    assert (of_replicas - of_tokens).norm() > 0.1 * of_tokens.norm()


@pytest.mark.distributed(world_size=4)
def test_token_mean_over_accumulated_micro_batches(device):
    hidden, labels, weight = problem(device)
    rank = dist.get_rank()
    num_tokens = (labels[rank] >= 0).sum()  # of the whole step, before the first micro-batch
    weight.grad, value = None, 0
    for cut in (slice(0, 5), slice(5, SEQUENCE)):
        local_sum = F.cross_entropy(hidden[rank, cut] @ weight.T, labels[rank, cut], reduction="sum")
        loss = token_mean(local_sum, num_tokens, None, gradient_divisor=dist.get_world_size())
        loss.backward()
        value += loss.item()
    actual = reduced(weight.grad, dist.get_world_size())
    reference = mean_of_tokens(hidden, labels, weight)
    assert value == pytest.approx(reference.item(), rel=1e-12)
    torch.testing.assert_close(actual, gradient_of(reference, weight), rtol=1e-12, atol=1e-14)


@pytest.mark.distributed(world_size=2)
def test_token_mean_in_bf16_and_without_tokens(device):
    local = torch.tensor(0.0, dtype=torch.bfloat16, device=device, requires_grad=True)
    loss = token_mean(local, 0, None, gradient_divisor=2)
    assert (loss.item(), loss.dtype) == (0, torch.float32)


# ------------------------------------------------------------------------------------ sum_over_group


def preference_loss(chosen, rejected):
    return -F.logsigmoid(0.3 * (chosen - rejected)).mean()


@pytest.mark.parametrize("gradient_reduction", ["mean", "sum"])
@every_grid
def test_a_loss_of_sums_over_the_sequence(sp_size, gradient_reduction, device):
    """DPO's shape: the log-probability of a whole sample, two samples, then a non-linear step."""
    sp_size = sp_size or dist.get_world_size()
    hidden, labels, weight = problem(device)
    groups = create_parallel_groups(sp_size)
    rank = dist.get_rank()

    def log_probability(h, y):  # [..., SEQUENCE, HIDDEN], [..., SEQUENCE] -> [..., SEQUENCE]
        return -F.cross_entropy((h @ weight.T).movedim(-1, 1), y, reduction="none")

    def both(h, y):  # a sample and, as its rejected sibling, the same with its hidden states reversed
        return torch.stack([log_probability(h, y), log_probability(-h, y)])

    local = both(hidden[rank : rank + 1], labels[rank : rank + 1]).sum((1, 2))  # [2]
    loss = preference_loss(*sum_over_group(local, groups.sp, gradient_reduction=gradient_reduction))

    replicas = both(hidden, labels).sum(-1).unflatten(-1, (-1, sp_size)).sum(-1)  # [2, dp]
    one_process = [preference_loss(*replicas[:, replica]) for replica in range(groups.dp_size)]
    torch.testing.assert_close(loss, one_process[groups.dp_rank], rtol=1e-12, atol=0)

    divisor = dist.get_world_size() if gradient_reduction == "mean" else groups.dp_size
    actual = reduced(gradient_of(loss, weight), divisor)
    expected = gradient_of(sum(one_process) / groups.dp_size, weight)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.distributed(world_size=2)
def test_memory_layouts_that_differ(device):
    x = torch.arange(6.0, device=device).view(2, 3)
    x = x if dist.get_rank() == 0 else x.T.contiguous().T  # equal numbers, in another order in memory
    assert sum_over_group(x, None, gradient_reduction="mean").tolist() == [[0, 2, 4], [6, 8, 10]]


@pytest.mark.distributed(world_size=2)
def test_sums_are_at_least_fp32(device):
    x = torch.full((3, 2), [256.0, 1.0][dist.get_rank()], dtype=torch.bfloat16, device=device)
    total = sum_over_group(x, None, gradient_reduction="mean")
    assert total.dtype == torch.float32
    assert total.tolist() == [[257.0, 257.0]] * 3


# ------------------------------------------------------------------------------------------ bad input


@pytest.mark.distributed(world_size=2)
def test_bad_input_fails_early_on_every_rank(device):
    one = torch.tensor(1.0, device=device)
    with pytest.raises(ValueError, match="""gradient_reduction='average': use "mean" or "sum\""""):
        weighted_all_reduce(one, 1, None, gradient_reduction="average")
    with pytest.raises(ValueError, match="""gradient_reduction=None: use "mean" or "sum\""""):
        sum_over_group(one, None, gradient_reduction=None)
    with pytest.raises(ValueError, match=r"loss of shape \[4\] and a weight of shape \[\]"):
        weighted_all_reduce(torch.ones(4, device=device), 4, None)
    with pytest.raises(ValueError, match=r"loss of shape \[1\] and a weight of shape \[\]"):
        weighted_all_reduce(torch.ones(1, device=device), 4, None)
    with pytest.raises(ValueError, match=r"loss of shape \[\] and a weight of shape \[4\]"):
        token_mean(one, torch.ones(4, device=device), None, gradient_divisor=2)
    for divisor in (0, -2, math.nan):
        with pytest.raises(ValueError, match=f"gradient_divisor={divisor} must be positive"):
            token_mean(one, 1, None, gradient_divisor=divisor)


@pytest.mark.distributed(world_size=2)
def test_a_group_of_others_is_refused(device):
    first_alone = dist.new_group([0])
    one = torch.tensor(1.0, device=device)
    if dist.get_rank() == 1:
        for call in (
            lambda: weighted_all_reduce(one, 1, first_alone),
            lambda: token_mean(one, 1, first_alone, gradient_divisor=1),
            lambda: sum_over_group(one, first_alone, gradient_reduction="mean"),
        ):
            with pytest.raises(ValueError, match="global rank 1 is not in this group"):
                call()
