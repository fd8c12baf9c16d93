"""Output and gradients where heads do not divide among the ranks, against SDPA in one process on the whole sequence."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from attention import sdpa
from process_groups import create_parallel_groups
from test_attention import LAYOUTS, assert_same, compare_with_one_process, one_process, slice_of, whole
from uneven_heads import head_shares, ulysses_attention_uneven

# (ranks, SP size) -> query heads, KV heads: as many, a single KV head, one KV head for several ranks, one copy for each
# query head, and numbers that do divide
HEADS = {
    (6, 3): [(4, 1), (4, 4)],
    (4, 2): [(9, 3), (3, 3), (7, 7), (5, 1), (4, 2)],
    (4, 4): [(6, 2), (7, 7), (7, 1), (6, 3), (14, 2), (10, 5), (8, 4), (8, 2), (12, 6)],
    (3, 3): [(7, 7), (4, 2), (8, 4), (5, 1), (10, 5)],
    (2, 1): [(3, 1)],
}


def on_ranks(query, key, value, gradient, group, **options):
    """Output and gradients of this rank's slice; each argument is the whole sequence."""
    query, key, value = (slice_of(x, group).clone().requires_grad_() for x in (query, key, value))
    output = ulysses_attention_uneven(query, key, value, group, **options)
    output.backward(slice_of(gradient, group))
    return [output.detach(), query.grad, key.grad, value.grad]


@pytest.mark.parametrize(
    ("sp_size", "heads"),
    [
        pytest.param(sp, heads, marks=pytest.mark.distributed(world_size=world), id=f"sp-{sp}-of-{world}")
        for (world, sp), heads in HEADS.items()
    ],
)
def test_output_and_gradients_are_those_of_one_process(sp_size, heads, device):
    compare_with_one_process(on_ranks, heads, create_parallel_groups(sp_size), device)


@pytest.mark.distributed
def test_over_all_ranks(device):
    world = dist.get_world_size()
    for tokens in (3, 1):  # of each rank
        inputs = whole(2, tokens * world, 2 * world + 1, 1, 8, 8, device)
        assert_same(on_ranks(*inputs, None), one_process(*inputs, is_causal=True), None)


@pytest.mark.distributed(world_size=1)
def test_shares_are_as_equal_as_they_can_be():
    for heads, sp_size in itertools.combinations_with_replacement(range(40, 0, -1), 2):
        shares = head_shares(heads, sp_size)
        assert (len(shares), sum(shares), max(shares)) == (sp_size, heads, math.ceil(heads / sp_size))
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "heads_by_rank", "kv_by_rank"),
    [
        (7, 7, [[0], [1, 2], [3, 4], [5, 6]], [[0], [1, 2], [3, 4], [5, 6]]),
        (6, 2, [[0], [1, 2], [3], [4, 5]], [[0], [0], [1], [1]]),  # unexpanded: one KV head for each rank
        (14, 2, [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13]], [[0], [0], [1], [1]]),
        (6, 3, [[0], [1, 2], [3], [4, 5]], [[0], [0, 1], [1], [2, 2]]),  # one for each query head
        (8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]], [[0], [0], [1], [1]]),
    ],
)
@pytest.mark.distributed(world_size=4)
def test_which_heads_a_rank_gets(heads, kv_heads, heads_by_rank, kv_by_rank, device):
    rank = dist.get_rank()
    query = torch.arange(float(heads), device=device).view(1, 1, heads, 1).expand(2, 3, heads, 5)
    key = query[:, :, :kv_heads]
    calls = []

    def attention(q, k, v, *, is_causal):
        calls.append((q[0, 0, :, 0].tolist(), k[0, 0, :, 0].tolist(), q.shape, is_causal))
        assert torch.equal(v, -k)
        return q

    output = ulysses_attention_uneven(query, key, -key, None, is_causal=False, attention=attention)
    mine = heads_by_rank[rank]
    assert calls == [(mine, kv_by_rank[rank], (2, 12, len(mine), 5), False)]
    assert torch.equal(output, query)


@pytest.mark.distributed(world_size=4)
def test_the_sequence_arrives_in_order(device):
    tokens = torch.arange(12.0, device=device).view(4, 3)[dist.get_rank()]
    x = tokens.view(1, 3, 1, 1).expand(2, 3, 5, 2)

    def attention(q, k, v, *, is_causal):
        for tensor in (q, k, v):
            assert tensor[1, :, 0, 1].tolist() == [*range(12)]
        return q

    assert torch.equal(ulysses_attention_uneven(x, x, x, None, attention=attention), x)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.distributed(world_size=4)
def test_memory_layouts(layout, batch, device):
    """Of the inputs, of what the attention returns and of the gradients that come back; ranks differ in it."""
    groups = create_parallel_groups(2)
    inputs = whole(batch, 8, 9, 3, 6, 6, device)
    expected = one_process(*inputs, is_causal=True)
    relaid = LAYOUTS[layout] if dist.get_rank() % 2 else lambda x: x

    def attention(q, k, v, *, is_causal):
        return relaid(sdpa(relaid(q), relaid(k), relaid(v), is_causal=is_causal))

    query, key, value, gradient = (relaid(slice_of(x, groups.sp)) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    output = ulysses_attention_uneven(*leaves, groups.sp, attention=attention)
    output.backward(gradient)
    assert_same([output.detach(), *(x.grad for x in leaves)], expected, groups.sp)


@pytest.mark.distributed(world_size=4)
def test_what_cannot_be_sent_as_it_lies(device):
    """What the attention returns has every second number of its memory; the gradient one number with strides of 0."""
    query, key, value, gradient = whole(1, 8, 7, 7, 6, 6, device)
    expected = one_process(query, key, value, torch.ones_like(gradient), is_causal=True)

    def attention(q, k, v, *, is_causal):
        return torch.stack([sdpa(q, k, v, is_causal=is_causal)] * 2, dim=-1)[..., 0]

    leaves = [slice_of(x, None).clone().requires_grad_() for x in (query, key, value)]
    output = ulysses_attention_uneven(*leaves, None, attention=attention)
    output.sum().backward()
    assert_same([output.detach(), *(x.grad for x in leaves)], expected, None)


@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.distributed(world_size=2)
def test_where_only_one_of_the_three_is_trained(trained, device):
    inputs = whole(1, 8, 3, 1, 6, 6, device)
    expected = one_process(*inputs, is_causal=True)[1 + trained]
    leaves = [slice_of(x, None).clone().requires_grad_(i == trained) for i, x in enumerate(inputs[:3])]
    ulysses_attention_uneven(*leaves, None).backward(slice_of(inputs[3], None))
    torch.testing.assert_close(leaves[trained].grad, slice_of(expected, None), rtol=1e-10, atol=1e-12)
    assert [x.grad is None for x in leaves] == [i != trained for i in range(3)]


@pytest.mark.distributed(world_size=2)
def test_under_checkpointing_and_twice(device):
    inputs = whole(2, 8, 3, 1, 6, 6, device)
    expected = one_process(*inputs, is_causal=True)
    leaves = [slice_of(x, None).clone().requires_grad_() for x in inputs[:3]]
    for use in (1, 2):
        output = torch.utils.checkpoint.checkpoint(ulysses_attention_uneven, *leaves, None, use_reentrant=False)
        output.backward(slice_of(inputs[3], None))
        for leaf, gradient in zip(leaves, expected[1:], strict=True):
            torch.testing.assert_close(leaf.grad, use * slice_of(gradient, None), rtol=1e-10, atol=1e-12)


@pytest.mark.distributed(world_size=2)
def test_inputs_are_left_as_they_were(device):
    inputs = whole(1, 8, 3, 1, 6, 6, device)
    before = [x.clone() for x in inputs]
    on_ranks(*inputs, None)
    assert all(map(torch.equal, inputs, before))


SINCE_2_2 = pytest.mark.needs_torch("2.2")  # on 2.1, gloo has no bf16


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=SINCE_2_2), "float32"])
@pytest.mark.distributed(world_size=4)
def test_lower_precision_rounds_as_one_process_does(dtype, device):
    dtype = getattr(torch, dtype)
    inputs = whole(1, 16, 7, 7, 8, 8, device, dtype)
    exact = one_process(*(x.double() for x in inputs), is_causal=True)
    once = one_process(*inputs, is_causal=True)
    for mine, in_one, true in zip(on_ranks(*inputs, None), once, exact, strict=True):
        assert mine.dtype == dtype
        error, usual = (mine.double() - slice_of(true, None)).norm(), (in_one.double() - true).norm()
        assert error <= 1.5 * usual


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.distributed(world_size=4)
def test_what_is_sent(needs_grad, monkeypatch, device):
    """One collective for query, key and value, one for the output; the same again in backward. No head is padded."""
    sent = []
    send = dist.all_to_all_single

    def counted(received, x, receive_sizes, send_sizes, group):
        sent.append((x.numel(), received.numel()))
        send(received, x, receive_sizes, send_sizes, group=group)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    query, key, value, gradient = whole(3, 8, 6, 2, 10, 7, device)
    leaves = [slice_of(x, None).clone().requires_grad_(needs_grad) for x in (query, key, value)]
    output = ulysses_attention_uneven(*leaves, None)
    heads = [1, 2, 1, 2][dist.get_rank()]
    tokens = 3 * 8 // 4  # of each sample in the batch
    inputs = tokens * (6 * 10 + 4 * 10 + 4 * 7), 4 * tokens * (heads * 10 + 10 + 7)  # two copies of each KV head
    outputs = 4 * tokens * heads * 7, tokens * 6 * 7
    assert sent == [inputs, outputs]
    if needs_grad:
        output.backward(slice_of(gradient, None))
        assert sent == [inputs, outputs, outputs[::-1], inputs[::-1]]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            [(1, 2, 7, 4), (1, 2, 3, 4), (1, 2, 3, 4)],
            r"query \[1, 2, 7, 4\], key \[1, 2, 3, 4\].*divide those of query",
        ),
        ([(1, 2, 2, 4), (1, 2, 1, 4), (1, 2, 1, 4)], "2 query heads on 3 ranks.*use an SP size of 2 at most"),
        ([(2, 6, 4), (2, 6, 4), (2, 6, 4)], r"query \[2, 6, 4\], key"),
        ([(1, 2, 7, 4), (1, 3, 7, 4), (1, 3, 7, 4)], r"query \[1, 2, 7, 4\], key \[1, 3, 7, 4\]"),
        ([(1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 3, 4)], "equally many heads"),
        ([(1, 2, 7, 4), (1, 2, 7, 5), (1, 2, 7, 4)], "the same head_dim"),
        ([(2, 2, 7, 4), (1, 2, 7, 4), (1, 2, 7, 4)], r"query \[2, 2, 7, 4\], key"),
    ],
)
@pytest.mark.distributed(world_size=3)
def test_shapes_that_do_not_fit(shapes, message, monkeypatch):
    monkeypatch.setattr(dist, "all_to_all_single", None)  # before anything is sent
    with pytest.raises(ValueError, match=message):
        ulysses_attention_uneven(*map(torch.zeros, shapes), None)


@pytest.mark.distributed(world_size=2)
def test_dtypes_that_differ(monkeypatch):
    """torch.cat would make them one dtype, and say nothing."""
    monkeypatch.setattr(dist, "all_to_all_single", None)
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"query is torch.float32, key torch.float32, value torch.bfloat16"):
        ulysses_attention_uneven(x, x, x.bfloat16(), None)


@pytest.mark.distributed(world_size=2)
def test_a_group_of_others():
    first_alone = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="global rank 1 is not in this group"):
            ulysses_attention_uneven(*[torch.zeros(1, 2, 3, 4)] * 3, first_alone)


ON_EIGHT = {  # query heads, KV heads; from the models' published config.json
    "Qwen2.5-0.5B": (14, 2),
    "Qwen2.5-1.5B": (12, 2),
    "Qwen2.5-7B": (28, 4),
    "GPT-2 XL": (25, 25),
    "Falcon-7B": (71, 1),
}


def heads_on_this_rank(device):
    def attention(q, k, v, *, is_causal):
        print(q.shape[2], k.shape[2])
        return q

    for heads, kv_heads in ON_EIGHT.values():
        query, key = torch.zeros(1, 1, heads, 1, device=device), torch.zeros(1, 1, kv_heads, 1, device=device)
        ulysses_attention_uneven(query, key, key, None, attention=attention)


def test_the_heads_of_eight_ranks_as_the_page_shows_them(launch, recorded, device):
    by_rank = [output.splitlines() for output in launch(heads_on_this_rank, world_size=8, timeout=30, device=device)]
    lines = [f"{'':12}  query, KV   most / even share   query by rank     KV by rank"]
    for (model, (heads, kv_heads)), outputs in zip(ON_EIGHT.items(), zip(*by_rank, strict=True), strict=True):
        query, kv = zip(*(output.split() for output in outputs), strict=True)
        most, even = max(map(int, query)), heads / 8
        lines.append(
            f"{model:12}{f'{heads}, {kv_heads}':>11}   {f'{most} / {even:g} = {most / even:.2f}':17}"
            f"   {' '.join(query)}   {' '.join(kv)}"
        )
    recorded("uneven-heads.txt", "\n".join(lines) + "\n")


def heads_changed_by_padding():
    """Qwen2.5-7B's heads, made 32 in three ways: which of its 28 come out otherwise?"""
    query, key, value, _ = whole(1, 8, 28, 4, 6, 6, "cpu")
    expected = sdpa(query, key, value, is_causal=True)

    def with_zeros(x, heads):
        return torch.cat([x, torch.zeros_like(x[:, :, :1]).expand(-1, -1, heads, -1)], dim=2)

    def in_groups(x, change):  # [batch, seq, 4 KV heads x query heads of each, dim]
        return torch.cat([change(group) for group in x.chunk(4, dim=2)], dim=2)

    last = with_zeros(query, 4)
    outputs = {
        "32 query heads, the new ones last": sdpa(last, key, value, is_causal=True)[:, :, :28],
        "the same, and 8 KV heads": sdpa(last, with_zeros(key, 4), with_zeros(value, 4), is_causal=True)[:, :, :28],
        "32 query heads, a new one after each 7": in_groups(
            sdpa(in_groups(query, lambda x: with_zeros(x, 1)), key, value, is_causal=True), lambda x: x[:, :, :7]
        ),
    }
    for how, output in outputs.items():
        wrong = [head for head in range(28) if not torch.allclose(output[:, :, head], expected[:, :, head])]
        print(f"{how:41}{len(wrong):2} of 28 heads wrong")


def test_padding_as_the_page_shows_it(launch, recorded):
    (output,) = launch(heads_changed_by_padding, world_size=1, timeout=20)
    # head i uses KV head floor(i K / H)
    to_32, with_8 = (sum(i * 4 // 28 != i * kv_heads // 32 for i in range(28)) for kv_heads in (4, 8))
    assert [int(line[41:43]) for line in output.splitlines()] == [to_32, with_8, 0]
    recorded("uneven-heads-padding.txt", output)
