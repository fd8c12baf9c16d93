import copy
import random
from collections import UserDict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from loss import token_mean
from process_groups import create_parallel_groups
from sharding import shard_batch

VOCABULARY, HIDDEN, PAD = 23, 6, 21
every_grid = pytest.mark.parametrize(
    "sp_size",
    [
        *(
            pytest.param(sp, marks=pytest.mark.distributed(world_size=world), id=f"{world}-ranks-sp-{sp}")
            for world, sp in [(1, 1), (2, 2), (3, 3), (4, 2), (4, 4)]
        ),
        pytest.param(None, marks=pytest.mark.distributed, id="all-ranks-in-one"),  # 4 ranks, or --world-size
    ],
)


def sample(documents):
    """A row of lists from documents given by their token ids: labels are the tokens, as yet unshifted."""
    return {
        "input_ids": [token for document in documents for token in document],
        "labels": [token for document in documents for token in document],
        "position_ids": [position for document in documents for position in range(len(document))],
    }


def batch_of(rows, device, dtype=torch.int64):
    """Tensors [batch, seq] from rows of equal length."""
    return {name: torch.tensor([row[name] for row in rows], dtype=dtype, device=device) for name in rows[0]}


def reference(row, size):
    """What the ranks should hold of a row: a list of slices, made token by token, without tensors."""
    tokens = []
    seq = len(row["input_ids"])
    for t in range(seq):
        follows = t + 1 < seq and row["position_ids"][t + 1] != 0  # in the same document
        label = row["labels"][t + 1] if follows else -100
        tokens.append((row["input_ids"][t], label, row["position_ids"][t]))
    padding = 0
    while len(tokens) % size:
        tokens.append((PAD, -100, padding))
        padding += 1
    length = len(tokens) // size
    names = ("input_ids", "shift_labels", "position_ids")
    slices = [tokens[length * rank : length * (rank + 1)] for rank in range(size)]
    return [dict(zip(names, map(list, zip(*part, strict=True)), strict=True)) for part in slices]


def random_documents(generator, seq):
    """Documents that fill `seq` tokens; some have one token only."""
    documents = []
    while left := seq - sum(map(len, documents)):
        length = min(left, generator.choice([1, 1, 2, 3, 5, 8]))
        documents.append([generator.randrange(VOCABULARY) for _ in range(length)])
    return documents


def random_rows(seed, rows, seq):
    """Rows whose labels hold some -100, as a masked prompt has."""
    generator = random.Random(seed)
    made = [sample(random_documents(generator, seq)) for _ in range(rows)]
    for row in made:
        if generator.random() < 0.3:  # the row begins within a document, up to where the next one starts
            end = [*row["position_ids"], 0].index(0, 1)
            row["position_ids"][:end] = range(9, 9 + end)
        row["labels"] = [-100 if generator.random() < 0.2 else label for label in row["labels"]]
    return made


def check_slice(shard, rows, groups, device):
    for number, row in enumerate(rows):
        for name, expected in reference(row, groups.sp_size)[groups.sp_rank].items():
            assert shard[name][number].tolist() == expected, (name, rows)
    assert {x.device.type for x in shard.values()} == {device}


# -------------------------------------------------------------------------- against a loop over tokens


@every_grid
def test_random_documents(sp_size, device):
    groups = create_parallel_groups(sp_size or dist.get_world_size())
    for seed in range(60):
        # each replica another sample, of another length: 1 to 20 tokens, so also fewer tokens than ranks
        rows = random_rows(10 * seed + groups.dp_rank, rows=seed % 3 + 1, seq=1 + (7 * seed + groups.dp_rank) % 20)
        shard = shard_batch(batch_of(rows, device), groups.sp, pad_token_id=PAD)
        assert sorted(shard) == ["input_ids", "position_ids", "shift_labels"]
        check_slice(shard, rows, groups, device)


@pytest.mark.parametrize(
    "lengths",
    [[16], [4, 4, 4, 4], [8, 8], [3, 1, 4, 5, 3], [1] * 16, [5, 3, 7], [15], [7, 7], [13], [4, 1], [3], [1], [2, 2, 1]],
    ids=str,
)
@pytest.mark.distributed(world_size=4)
def test_documents_and_slices(lengths, device):
    """Documents that begin and end with slices or across them; 0 to 3 tokens of padding; slices all of padding."""
    ids = iter(range(100))
    rows = [sample([[next(ids) for _ in range(length)] for length in lengths])]
    groups = create_parallel_groups(4)
    check_slice(shard_batch(batch_of(rows, device), groups.sp, pad_token_id=PAD), rows, groups, device)


@every_grid
def test_slices_put_together_are_the_padded_batch(sp_size, device):
    groups = create_parallel_groups(sp_size or dist.get_world_size())
    rows = random_rows(groups.dp_rank, rows=2, seq=11)
    shard = shard_batch(batch_of(rows, device), groups.sp, pad_token_id=PAD)
    for name, own in shard.items():
        assert own.is_contiguous()  # what collectives ask for
        everyone = [torch.empty_like(own) for _ in range(groups.sp_size)]
        dist.all_gather(everyone, own, group=groups.sp)
        for number, row in enumerate(rows):
            expected = [x for part in reference(row, groups.sp_size) for x in part[name]]
            assert torch.cat(everyone, dim=1)[number].tolist() == expected


@pytest.mark.distributed(world_size=4)
def test_without_a_group_it_is_the_world(device):
    groups = create_parallel_groups(4)
    rows = random_rows(1, rows=2, seq=10)
    check_slice(shard_batch(batch_of(rows, device), None, pad_token_id=PAD), rows, groups, device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.distributed(world_size=2)
def test_integer_types_stay(dtype, device):
    groups = create_parallel_groups(2)
    rows = random_rows(2, rows=1, seq=5)
    shard = shard_batch(batch_of(rows, device, dtype), groups.sp, pad_token_id=PAD)
    check_slice(shard, rows, groups, device)
    assert {x.dtype for x in shard.values()} == {dtype}


# -------------------------------------------------------------------------------- what a batch may hold


@pytest.mark.distributed(world_size=4)
def test_without_position_ids_they_are_global(device):
    """One document a row: positions go on from slice to slice, and only the padding begins anew."""
    groups = create_parallel_groups(2)
    rows = [sample([[5, 6, 7, 8, 9, 10, 11]]), sample([[1, 2, 3, 4, 5, 6, 7]])]
    for missing in ({}, {"position_ids": None}):
        batch = batch_of(rows, device)
        del batch["position_ids"]
        shard = shard_batch(batch | missing, groups.sp, pad_token_id=PAD)
        check_slice(shard, rows, groups, device)
    assert shard["position_ids"].tolist() == [[[0, 1, 2, 3], [4, 5, 6, 0]][groups.sp_rank]] * 2


@pytest.mark.distributed(world_size=2)
def test_without_labels_none_come_out(device):
    rows = random_rows(3, rows=2, seq=7)
    for missing in ({}, {"labels": None}):
        batch = batch_of(rows, device)
        del batch["labels"]
        shard = shard_batch(batch | missing, None, pad_token_id=PAD)
        assert sorted(shard) == ["input_ids", "position_ids"]


@pytest.mark.distributed(world_size=2)
def test_shift_labels_are_taken_as_they_are(device):
    rows = [sample([[1, 2, 3], [4, 5]])]
    batch = batch_of(rows, device)
    batch["shift_labels"] = batch.pop("labels")
    shard = shard_batch(batch, None)
    assert shard["shift_labels"].tolist() == [[[1, 2, 3], [4, 5, -100]][dist.get_rank()]]


@pytest.mark.distributed(world_size=2)
def test_other_tensors_of_the_sequence_are_sliced(device):
    rank = dist.get_rank()
    batch = batch_of([sample([[1, 2, 3, 4, 5]])] * 2, device)
    weights = torch.arange(10.0, device=device, dtype=torch.bfloat16).view(2, 5)
    teacher = torch.arange(30.0, device=device).view(2, 5, 3)
    shard = shard_batch(batch | {"weights": weights, "spoken": weights > 3, "teacher": teacher}, None)
    padded = [[0, 1, 2, 3, 4, 0], [5, 6, 7, 8, 9, 0]]
    assert shard["weights"].tolist() == [row[3 * rank : 3 * rank + 3] for row in padded]
    assert shard["weights"].dtype == torch.bfloat16
    assert shard["spoken"].tolist() == [[x > 3 for x in row[3 * rank : 3 * rank + 3]] for row in padded]
    assert shard["spoken"].dtype == torch.bool
    expected = F.pad(teacher, (0, 0, 0, 1))[:, 3 * rank : 3 * rank + 3]
    torch.testing.assert_close(shard["teacher"], expected, rtol=0, atol=0)


@pytest.mark.distributed(world_size=2)
def test_all_else_is_passed_on(device):
    batch = batch_of(random_rows(4, rows=2, seq=6), device)
    others = {
        "pixel_values": torch.zeros(2, 3, 4, 4, device=device),
        "sample_weights": torch.ones(2, device=device),
        "image_grid_thw": torch.ones(6, 2, device=device),  # [seq, batch]
        "image_mask": torch.ones(5, 6, device=device),  # [images, seq]
        "scale": torch.tensor(2.0, device=device),
        "source": ["web", "books"],
        "note": None,
    }
    shard = shard_batch(batch | others, None)
    for name, value in others.items():
        assert shard[name] is value


@pytest.mark.distributed(world_size=2)
def test_inputs_embeds_and_their_gradient(device):
    rank = dist.get_rank()
    rows = random_rows(5, rows=2, seq=5)
    batch = batch_of(rows, device)
    del batch["input_ids"]
    embeds = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    shard = shard_batch(batch | {"inputs_embeds": embeds}, None)
    groups = create_parallel_groups(2)
    for number, row in enumerate(rows):
        expected = reference(row, 2)[groups.sp_rank]
        assert shard["shift_labels"][number].tolist() == expected["shift_labels"]
        assert shard["position_ids"][number].tolist() == expected["position_ids"]
    kept = [3, 2][rank]
    assert shard["inputs_embeds"].shape == (2, 3, HIDDEN)
    assert torch.equal(shard["inputs_embeds"][:, :kept], embeds[:, 3 * rank : 3 * rank + kept])
    assert not shard["inputs_embeds"][:, kept:].any()
    shard["inputs_embeds"].sum().backward()
    assert embeds.grad.any(dim=2).tolist() == [[t // 3 == rank for t in range(5)]] * 2


@pytest.mark.distributed(world_size=4)
def test_mrope_positions(device):
    """Three axes. A document starts where all are 0; in an image at a row's edge only some are."""
    groups = create_parallel_groups(4)
    time = [0, 1, 2, 2, 2, 2, 0, 0, 1]
    height = [0, 1, 0, 0, 1, 1, 0, 1, 0]
    width = [0, 0, 0, 1, 0, 1, 0, 0, 0]
    starts = {0, 6}
    tokens = list(range(9))
    positions = torch.tensor([[axis, axis] for axis in (time, height, width)], device=device)  # [3, 2, 9]
    batch = {"input_ids": torch.tensor([tokens] * 2, device=device), "position_ids": positions}
    shard = shard_batch(batch | {"labels": batch["input_ids"]}, groups.sp)
    part = slice(3 * groups.sp_rank, 3 * groups.sp_rank + 3)
    labels = [t + 1 if t + 1 < 9 and t + 1 not in starts else -100 for t in tokens] + [-100] * 3
    assert shard["shift_labels"].tolist() == [labels[part]] * 2
    for axis, expected in enumerate((time, height, width)):
        assert shard["position_ids"][axis].tolist() == [[*expected, 0, 1, 2][part]] * 2


@pytest.mark.distributed(world_size=2)
def test_a_mask_of_ones_is_left_out(device):
    batch = batch_of(random_rows(6, rows=2, seq=6), device)
    for dtype in (torch.int64, torch.bool, torch.float32):
        shard = shard_batch(batch | {"attention_mask": torch.ones(2, 6, dtype=dtype, device=device)}, None)
        assert sorted(shard) == ["input_ids", "position_ids", "shift_labels"]
    assert "attention_mask" not in shard_batch(batch | {"attention_mask": None}, None)


@pytest.mark.parametrize("mapping", [dict, UserDict])
@pytest.mark.distributed(world_size=2)
def test_the_batch_is_left_as_it_was(mapping, device):
    for seq in (6, 7):  # without padding and with
        rows = random_rows(7, rows=1, seq=seq)
        batch = mapping(batch_of(rows, device) | {"weights": torch.ones(1, seq, device=device)})
        before = copy.deepcopy(dict(batch))
        shard = shard_batch(batch, None)
        for x in shard.values():
            x.fill_(3)  # its memory is its own
        assert list(batch) == list(before)
        assert all(torch.equal(batch[name], before[name]) for name in before)


@pytest.mark.distributed(world_size=2)
def test_memory_in_another_order(device):
    rows = random_rows(8, rows=3, seq=7)
    batch = {name: x.T.contiguous().T for name, x in batch_of(rows, device).items()}
    shard = shard_batch(batch, None, pad_token_id=PAD)
    check_slice(shard, rows, create_parallel_groups(2), device)
    assert all(x.is_contiguous() for x in shard.values())


# ------------------------------------------------------------------------ the loss, and its gradients


class Model(torch.nn.Module):
    """Token by token, and by position: without attention, a slice needs nothing from its neighbours."""

    def __init__(self, device):
        super().__init__()
        generator = torch.Generator().manual_seed(9)
        shapes = [(VOCABULARY, HIDDEN), (40, HIDDEN), (VOCABULARY, HIDDEN)]
        weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        self.tokens, self.positions, self.head = (torch.nn.Parameter(weight.to(device)) for weight in weights)

    def forward(self, input_ids, position_ids):  # [batch, seq] -> [batch, seq, VOCABULARY]
        hidden = F.embedding(input_ids, self.tokens) + F.embedding(position_ids, self.positions)
        return torch.tanh(hidden) @ self.head.T


def loss_of_one_process(model, replicas, device):
    """Each document by itself, its logits and labels shifted against each other; no positions but 0, 1, …"""
    total, count = 0, 0
    for rows in replicas:
        for documents in rows:
            for document in documents:
                ids = torch.tensor([document], device=device)
                logits = model(ids, torch.arange(len(document), device=device)[None])
                total = total + F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
                count += len(document) - 1
    return total / count


@every_grid
def test_loss_and_gradients_are_those_of_one_process(sp_size, device):
    groups = create_parallel_groups(sp_size or dist.get_world_size())
    for seed in range(3):
        generator = random.Random(seed)
        lengths = [generator.randrange(5, 20) for _ in range(groups.dp_size)]
        replicas = [[random_documents(generator, length) for _ in range(2)] for length in lengths]
        batch = batch_of([sample(documents) for documents in replicas[groups.dp_rank]], device)
        shard = shard_batch(batch, groups.sp, pad_token_id=PAD)

        model = Model(device)
        logits = model(shard["input_ids"], shard["position_ids"])
        labels = shard["shift_labels"]
        loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        world = dist.get_world_size()
        loss = token_mean(loss_sum, (labels != -100).sum(), None, gradient_divisor=world)
        loss.backward()

        alone = Model(device)
        expected = loss_of_one_process(alone, replicas, device)
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        for parameter, reference_parameter in zip(model.parameters(), alone.parameters(), strict=True):
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient)  # what an engine does that averages over all ranks
            torch.testing.assert_close(gradient / world, reference_parameter.grad, rtol=1e-11, atol=1e-14)


# ---------------------------------------------------------------------------- what the page shows of it


def print_slices(device):
    documents = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]]
    shard = shard_batch(batch_of([sample(documents)], device), None)
    if dist.get_rank() == 0:
        print(f"{'':6} {'input_ids':15} {'shift_labels':20} position_ids")
    columns = [f"{shard[name][0].tolist()}" for name in ("input_ids", "shift_labels", "position_ids")]
    print(f"rank {dist.get_rank()} {columns[0]:15} {columns[1]:20} {columns[2]}")


def test_the_picture(launch, recorded, device):
    recorded("sharding.txt", "".join(launch(print_slices, world_size=4, timeout=20, device=device)))


# ------------------------------------------------------------------------------------------ bad input


def without(batch, *names):
    return {name: x for name, x in batch.items() if name not in names}


def bad_batches(device):
    """(a batch of [2, 8] with something wrong in it, what the error says)"""
    good = batch_of(random_rows(11, rows=2, seq=8), device)
    mask = torch.ones(2, 8, dtype=torch.int64, device=device)
    causal = torch.ones(2, 1, 8, 8, device=device)
    padded = mask.clone()
    padded[1, 5:] = 0
    ids, positions = good["input_ids"], good["position_ids"]
    return {
        "no tokens": (without(good, "input_ids"), r"a batch of \['labels', 'position_ids'\]: it needs input_ids or"),
        "one sample": (
            without(good, "labels", "position_ids") | {"input_ids": ids[0]},
            r"shape \[8\] .*\[batch, seq\]",
        ),
        "three dimensions": (good | {"input_ids": ids[..., None]}, r"input_ids of shape \[2, 8, 1\] with tokens of"),
        "no length": ({"input_ids": ids[:, :0]}, r"input_ids of shape \[2, 0\]"),
        "a list": (good | {"input_ids": ids.tolist()}, "input_ids is a list: pass a tensor"),
        "fewer labels": (good | {"labels": ids[:, 1:]}, r"labels of shape \[2, 7\] with tokens of shape \[2, 8\]"),
        "labels of samples": (good | {"labels": ids[:, 0]}, r"labels of shape \[2\] with tokens of shape \[2, 8\]"),
        "flat embeddings": (good | {"inputs_embeds": ids}, r"inputs_embeds of shape \[2, 8\] with tokens"),
        "labels twice": (good | {"shift_labels": ids}, "labels and shift_labels: pass one of them"),
        "flat positions": (good | {"position_ids": positions[0]}, r"position_ids of shape \[8\] .* pass \[2, 8\], or"),
        "one row of positions": (good | {"position_ids": positions[:1]}, r"shape \[1, 8\] .* \[3, 2, 8\] for m-RoPE"),
        "long positions": (good | {"position_ids": causal[0].long()[:, :, :2]}, r"position_ids of shape \[1, 8, 2\]"),
        "padding": (good | {"attention_mask": padded}, r"has 3 of 16 entries that are not 1: .* Leave it out"),
        "documents": (good | {"attention_mask": mask + 1}, "has 16 of 16 entries that are not 1"),
        "a causal mask": (good | {"attention_mask": causal}, r"shape \[2, 1, 8, 8\] .* \[2, 8\]: .* by position_ids"),
        "a local mask": (good | {"attention_mask": mask[:, :4]}, r"attention_mask of shape \[2, 4\] with tokens of"),
    }


@pytest.mark.parametrize("problem", list(bad_batches("cpu")))
@pytest.mark.distributed(world_size=2)
def test_bad_batches_fail_early_on_every_rank(problem, device):
    batch, message = bad_batches(device)[problem]
    with pytest.raises(ValueError, match=message):
        shard_batch(batch, None)


@pytest.mark.distributed(world_size=2)
def test_other_bad_input(device):
    batch = batch_of(random_rows(12, rows=1, seq=8), device)
    with pytest.raises(ValueError, match=r"pad_token_id=None: pass any token of the vocabulary"):
        shard_batch(batch, None, pad_token_id=None)
    first_alone = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="global rank 1 is not in this group"):
            shard_batch(batch, first_alone)
