"""Output and gradients of packed documents on ranks, against each document alone in one process."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from attention import ulysses_attention
from packed import cu_seqlens, packed_attention, packed_attention_by_mask
from process_groups import create_parallel_groups
from sharding import shard_batch

WAYS = {"by document": packed_attention, "by mask": packed_attention_by_mask}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
# the documents' lengths, row by row: across slices, at their seams, of one token, one alone
PACKED = [
    [[12]],
    [[3, 9], [12]],
    [[6, 6], [3, 3, 3, 3]],
    [[1, 1, 5, 1, 4], [7, 5], [2, 10]],
    [[1] * 12],
]


def positions_of(rows, device, first=0):
    """[batch, seq]; `first` is where the first document of the last row begins to count."""
    positions = torch.tensor([[i for length in row for i in range(length)] for row in rows], device=device)
    positions[-1, : rows[-1][0]] += first
    return positions


def inputs_of(rows, heads, kv_heads, head_dim, value_dim, device, seed=0):
    """Query, key, value and the output's gradient, for the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    dims = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim)]
    return [
        torch.randn(len(rows), sum(rows[0]), *dim, generator=generator, dtype=torch.float64).to(device) for dim in dims
    ]


def each_alone(rows, query, key, value, gradient, is_causal):
    """Output and gradients of every document by itself, by the formula, head by head."""
    query, key, value = (x.clone().requires_grad_() for x in (query, key, value))
    shared = query.shape[2] // key.shape[2]
    output = torch.zeros_like(gradient)
    for row, lengths in enumerate(rows):
        for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
            for head in range(query.shape[2]):
                of_query, of_key = (
                    (row, slice(end - length, end), head),
                    (row, slice(end - length, end), head // shared),
                )
                scores = query[of_query] @ key[of_key].T / query.shape[3] ** 0.5
                if is_causal:
                    later = torch.ones(length, length, device=scores.device).triu(1).bool()
                    scores = scores.masked_fill(later, -torch.inf)
                output[of_query] = scores.softmax(1) @ value[of_key]
    output.backward(gradient)
    return [output.detach(), query.grad, key.grad, value.grad]


def slice_of(x, group, dim=1):
    return x.chunk(dist.get_world_size(group), dim=dim)[dist.get_rank(group)]


def on_ranks(way, positions, query, key, value, gradient, group, is_causal=True):
    attention = way(slice_of(positions, group, dim=-1), group)
    query, key, value = (slice_of(x, group).clone().requires_grad_() for x in (query, key, value))
    output = ulysses_attention(query, key, value, group, is_causal=is_causal, attention=attention)
    output.backward(slice_of(gradient, group))
    return [output.detach(), query.grad, key.grad, value.grad]


def assert_same(actual, expected, group, context):
    for name, mine, theirs in zip(["output", "query", "key", "value"], actual, expected, strict=True):
        torch.testing.assert_close(
            mine, slice_of(theirs, group), rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}, {context}: {m}"
        )


@every_way
@pytest.mark.parametrize(
    "sp_size", [pytest.param(sp, marks=pytest.mark.distributed(world_size=4), id=f"sp-{sp}") for sp in (2, 4, 1)]
)
def test_output_and_gradients_are_those_of_each_document_alone(sp_size, way, device):
    groups = create_parallel_groups(sp_size)
    for seed, (rows, is_causal, kv_heads) in enumerate(itertools.product(PACKED, [True, False], [1, 4])):
        rows = rows if groups.dp_rank % 2 == 0 else [row[::-1] for row in rows]  # each replica other documents
        inputs = inputs_of(rows, 4, kv_heads, 6, 5, device, seed=10 * seed + groups.dp_rank)
        actual = on_ranks(way, positions_of(rows, device), *inputs, groups.sp, is_causal)
        assert_same(actual, each_alone(rows, *inputs, is_causal), groups.sp, (rows, is_causal, kv_heads))


@every_way
@pytest.mark.distributed
def test_over_all_ranks(way, device):
    world = dist.get_world_size()
    rows = [[3 * world - 1, world + 1]]
    inputs = inputs_of(rows, world, 1, 6, 6, device)
    actual = on_ranks(way, positions_of(rows, device), *inputs, None)
    assert_same(actual, each_alone(rows, *inputs, is_causal=True), None, rows)


@every_way
@pytest.mark.distributed(world_size=4)
def test_no_gradient_crosses_documents(way, device):
    """Exactly zero, from each document to each other one; and not zero where torch's attention sees all as one."""
    rows = [[5, 4, 7]]
    positions = positions_of(rows, device)
    document = (positions[0] == 0).cumsum(0)
    query, key, value, _ = inputs_of(rows, 4, 2, 6, 6, device)
    for number in (1, 2, 3):
        own = (document == number).double()[None, :, None, None]
        apart = on_ranks(way, positions, query, key, value, own.expand_as(query), None, is_causal=False)
        joined = on_ranks(no_documents, positions, query, key, value, own.expand_as(query), None, is_causal=False)
        others = slice_of(document, None, dim=0) != number
        for mine in apart[1:]:
            assert torch.count_nonzero(mine[:, others]) == 0
            assert mine[:, ~others].all()
        assert joined[3][:, others].all()  # of value: a sum of probabilities


def no_documents(position_ids, group):
    return None


@every_way
@pytest.mark.distributed(world_size=4)
def test_random_documents(way, device):
    generator = random.Random(4)
    groups = create_parallel_groups(2)
    for seed in range(25):
        rows = [[], [], []][: seed % 3 + 1]
        tokens = 2 * generator.randint(1, 8)
        for row in rows:
            while left := tokens - sum(row):
                row.append(min(left, generator.choice([1, 2, 3, 5, 9])))
        is_causal, first = generator.random() < 0.5, generator.choice([0, 0, 7])
        inputs = inputs_of(rows, 8, 4, 3, 3, device, seed)
        actual = on_ranks(way, positions_of(rows, device, first), *inputs, groups.sp, is_causal)
        assert_same(actual, each_alone(rows, *inputs, is_causal), groups.sp, (rows, is_causal, first))


@every_way
@pytest.mark.distributed(world_size=2)
def test_positions_of_m_rope(way, device):
    """Time, height and width: within an image single axes are 0 again, or fall. A document starts where all are 0."""
    text = [[0, 0, 0], [1, 1, 1]]
    image = [[2, 2 + y, 2 + x] for y in range(2) for x in range(2)]
    video_first = [[0, y, x] for y in range(2) for x in range(2)]  # begins with an image: 0 in time for all of it
    positions = torch.tensor([[*text, *image, *video_first, *text]], device=device).permute(2, 0, 1)
    rows = [[6, 4, 2]]
    assert positions.shape == (3, 1, 12)
    inputs = inputs_of(rows, 4, 2, 6, 6, device)
    actual = on_ranks(way, positions, *inputs, None)
    assert_same(actual, each_alone(rows, *inputs, is_causal=True), None, rows)


@every_way
@pytest.mark.distributed(world_size=4)
def test_padding_takes_no_part_though_attention_is_not_causal(way, device):
    """shard_batch makes padding a document of its own."""
    rows = [[13]]
    inputs = inputs_of(rows, 4, 2, 6, 6, device)
    expected = each_alone(rows, *inputs, is_causal=False)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 3), value=0.5) for x in (*inputs, *expected)]
    tokens = torch.zeros(1, 13, dtype=torch.int64, device=device)
    own = shard_batch({"input_ids": tokens}, None)["position_ids"]

    def made(position_ids, group):
        return way(own, group)

    anything = torch.zeros(1, 16, device=device)
    actual = on_ranks(made, anything, *padded[:4], None, is_causal=False)
    joined = on_ranks(no_documents, anything, *padded[:4], None, is_causal=False)
    real = slice(0, 1) if dist.get_rank() == 3 else slice(0, 4)
    for mine, theirs in zip(actual, padded[4:], strict=True):
        torch.testing.assert_close(mine[:, real], slice_of(theirs, None)[:, real], rtol=1e-10, atol=1e-12)
    assert (joined[0][:, real] - slice_of(padded[4], None)[:, real]).abs().max() > 0.01


@every_way
@pytest.mark.distributed(world_size=4)
def test_one_small_collective_for_all_layers(way, monkeypatch, device):
    rows = [[3, 5], [8]]
    sent = []
    gather = dist.all_gather
    monkeypatch.setattr(dist, "all_gather", lambda out, x, group: sent.append(x.numel()) or gather(out, x, group=group))
    attention = way(slice_of(positions_of(rows, device), None), None)
    whole = [x[:, :, :1] for x in inputs_of(rows, 4, 4, 6, 6, device)[:3]]
    for _ in range(3):
        attention(*whole, is_causal=True)
    assert sent == [4]  # positions of two tokens in two rows


class Largest(TorchDispatchMode):
    """The largest tensor that an operation returns, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if torch.is_tensor(x):
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return result


@pytest.mark.distributed(world_size=1)
def test_memory_without_a_mask_and_with_one(device):
    batch, seq = 2, 512
    rows = [[64] * 8, [32] * 16]
    inputs = inputs_of(rows, 1, 1, 4, 4, device)
    tensor = batch * seq * 4 * 8
    largest = {}
    for name, way in WAYS.items():
        with Largest() as largest[name]:
            on_ranks(way, positions_of(rows, device), *inputs, None)
    assert largest["by document"].bytes <= max(tensor, 64 * 64 * 8)
    assert largest["by mask"].bytes >= batch * seq**2


@pytest.mark.distributed(world_size=4)
def test_boundaries_as_kernels_take_them(device):
    groups = create_parallel_groups(4)
    for rows, expected in [
        ([[3, 5]], [0, 3, 8]),
        ([[3, 5], [8]], [0, 3, 8, 16]),
        ([[1] * 4, [2, 2]], [0, 1, 2, 3, 4, 6, 8]),
    ]:
        boundaries = cu_seqlens(slice_of(positions_of(rows, device), groups.sp), groups.sp)
        assert boundaries.tolist() == expected
        assert boundaries.dtype == torch.int32
        assert boundaries.device.type == device


@pytest.mark.distributed(world_size=2)
def test_torchs_kernel_for_packed_input_takes_them(device):
    if device == "cpu":
        pytest.skip("torch's varlen_attn runs on GPUs only")
    varlen_attn = pytest.importorskip("torch.nn.attention.varlen", reason="torch 2.11 is the first with it").varlen_attn

    rows = [[30, 98], [128]]
    positions = slice_of(positions_of(rows, device), None)
    boundaries, longest = cu_seqlens(positions, None), 128

    def attention(query, key, value, *, is_causal):
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        causal = {"window_size": (-1, 0)}  # from torch 2.11
        output = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **causal)
        return output.unflatten(0, (len(rows), -1))

    inputs = inputs_of(rows, 4, 4, 64, 64, device)
    leaves = [slice_of(x, None).bfloat16().requires_grad_() for x in inputs[:3]]
    output = ulysses_attention(*leaves, None, attention=attention)
    output.backward(slice_of(inputs[3], None).bfloat16())
    expected = each_alone(rows, *(x.bfloat16().double() for x in inputs), is_causal=True)
    for mine, theirs in zip([output, *(x.grad for x in leaves)], expected, strict=True):
        theirs = slice_of(theirs, None)
        assert (mine.double() - theirs).norm() < 0.01 * theirs.norm()


# ------------------------------------------------------------------------------------------ what does not fit


@pytest.mark.distributed(world_size=4)
def test_slices_out_of_order(device):
    """Zigzag, as ring attention cuts: each rank holds a piece from the front and one from the back."""
    pieces = torch.arange(16, device=device).chunk(8)
    rank = dist.get_rank()
    zigzag = torch.cat([pieces[rank], pieces[7 - rank]])[None]
    with pytest.raises(ValueError, match="row 0: position 2 follows 15 at token 4 of the whole sequence"):
        packed_attention(zigzag, None)


@pytest.mark.distributed(world_size=2)
def test_positions_may_leave_some_out(device):
    """As recipes for longer contexts do: only a fall is refused."""
    positions = torch.tensor([[0, 1, 5, 9], [0, 3, 4, 4]][dist.get_rank()], device=device)[None]
    assert cu_seqlens(positions, None).tolist() == [0, 4, 8]


@every_way
@pytest.mark.distributed(world_size=2)
def test_attention_of_another_batch(way, device):
    attention = way(slice_of(positions_of([[3, 5]], device), None), None)
    x = torch.zeros(2, 4, 2, 4, device=device)
    with pytest.raises(ValueError, match=r"query is \[2, 4\] tokens, the positions are \[1, 8\]"):
        attention(x, x, x, is_causal=True)


@pytest.mark.distributed(world_size=2)
def test_a_group_of_others(device):
    first_alone = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="global rank 1 is not in this group"):
            packed_attention(torch.arange(4, device=device)[None], first_alone)


# ----------------------------------------------------------------------------------------- as the page shows it


def what_crosses(device):
    rows = [[5, 4, 7]]
    positions = positions_of(rows, device)
    document = (positions[0] == 0).cumsum(0)
    query, key, value, _ = inputs_of(rows, 4, 2, 6, 6, device)
    own = (document == 3).double()[None, :, None, None].expand_as(query)
    lines = [f"{'':26}document 1   document 2   document 3"]
    for name, way in {"default attention": no_documents, "packed_attention": packed_attention}.items():
        gradient = on_ranks(way, positions, query, key, value, own, None)[3].abs()
        everyone = [torch.empty_like(gradient) for _ in range(4)]
        dist.all_gather(everyone, gradient)
        whole = torch.cat(everyone, dim=1)
        of_documents = [whole[:, document == number].max().item() for number in (1, 2, 3)]
        lines.append(f"{name:26}" + "   ".join(f"{x:<10.2f}" for x in of_documents).rstrip())
    if dist.get_rank() == 0:
        print("largest gradient that the output of document 3 gives the values of")
        print("\n".join(lines))


def test_what_crosses_as_the_page_shows_it(launch, recorded, device):
    recorded("packed.txt", "".join(launch(what_crosses, world_size=4, timeout=20, device=device)))
