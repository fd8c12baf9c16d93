"""The formulas against what ranks send, forward and backward: torch's calls, and Linux's count of what went out."""

import functools
import itertools
import operator
import sys

import pytest
import torch
import torch.distributed as dist

from attention import ulysses_attention
from how_much_is_sent import Layer, hybrid_sends, ring_sends, tensor_parallel_sends, ulysses_sends
from hybrid_attention import create_hybrid_groups, hybrid_attention
from process_groups import create_parallel_groups
from ring_attention import ring_attention
from sent import Sent, sent_by
from tensor_parallel import tensor_parallel_attention
from test_ring_attention import needs_point_to_point

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
ELEMENTS = [pytest.param(2, marks=pytest.mark.needs_torch("2.2")), 4, 8]  # on 2.1, gloo has no bf16
NEEDS_REDUCE_SCATTER = pytest.mark.needs_torch("2.8")  # gloo's
# query heads, KV heads: shared out; a KV head for several ranks; a copy for each query head where the size is 4
HEADS = [(12, 6), (8, 2), (8, 8), (8, 4), (4, 1)]


def small(heads, kv_heads, element, tokens=16):
    return Layer(batch=3, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=8, hidden=24, element=element)


def two_ways(attention, layer, sp_size, device):
    """Forward and backward of `attention` on this rank's slice, to be called in this order."""
    query, key, value = leaves = [
        torch.ones(layer.batch, layer.tokens // sp_size, heads, layer.head_dim, dtype=DTYPES[layer.element])
        .to(device)
        .requires_grad_()
        for heads in (layer.heads, layer.kv_heads, layer.kv_heads)
    ]
    outputs = []

    def backward():
        outputs[0].backward(torch.ones_like(outputs[0]))
        assert all(x.grad is not None for x in leaves)

    return lambda: outputs.append(attention(query, key, value)), backward


def two_ways_of_tensor_parallel(layer, tp_size, group, device, sequence_parallel):
    options = {"dtype": DTYPES[layer.element], "device": device, "requires_grad": True}
    tokens = layer.tokens // tp_size if sequence_parallel else layer.tokens
    hidden = torch.ones(layer.batch, tokens, layer.hidden, **options)
    rows = {"query": layer.heads, "key": layer.kv_heads, "value": layer.kv_heads}
    weights = {name: torch.ones(n * layer.head_dim // tp_size, layer.hidden, **options) for name, n in rows.items()}
    weights["output"] = torch.ones(layer.hidden, layer.heads * layer.head_dim // tp_size, **options)
    outputs = []

    def forward():
        outputs.append(
            tensor_parallel_attention(hidden, weights, layer.head_dim, group, sequence_parallel=sequence_parallel)
        )

    def backward():
        outputs[0].backward(torch.ones_like(outputs[0]))
        assert all(x.grad is not None for x in (hidden, *weights.values()))

    return forward, backward


def counted(step, size):
    with Sent(size) as sent:
        step()
    return sent.calls, sent.bytes


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.distributed(world_size=4)
def test_ulysses(element, device):
    groups = {sp_size: create_parallel_groups(sp_size).sp for sp_size in (2, 4, 1)}
    for (sp_size, group), (heads, kv_heads) in itertools.product(groups.items(), HEADS):
        layer = small(heads, kv_heads, element)
        attention = functools.partial(ulysses_attention, group=group)
        for step, expected in zip(
            two_ways(attention, layer, sp_size, device), ulysses_sends(layer, sp_size), strict=True
        ):
            calls, sent = counted(step, sp_size)
            assert sent == expected
            assert calls == ({"alltoall_base": 2} if sp_size > 1 else {})


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.distributed(world_size=4)
def test_ring(element, device):
    needs_point_to_point(device)
    groups = {sp_size: create_parallel_groups(sp_size).sp for sp_size in (2, 4, 1)}
    for (sp_size, group), (heads, kv_heads) in itertools.product(groups.items(), HEADS):
        layer = small(heads, kv_heads, element)
        forward, backward = two_ways(functools.partial(ring_attention, group=group), layer, sp_size, device)
        moves = {"send": sp_size - 1} if sp_size > 1 else {}
        twice = {"send": 2 * (sp_size - 1)} if sp_size > 1 else {}
        assert counted(forward, sp_size) == (moves, ring_sends(layer, sp_size)[0])
        assert counted(backward, sp_size) == (twice, ring_sends(layer, sp_size)[1])


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.distributed(world_size=4)
def test_hybrid(element, device):
    needs_point_to_point(device)
    groups = create_hybrid_groups(4, 2)
    for heads, kv_heads in HEADS:
        layer = small(heads, kv_heads, element)
        forward, backward = two_ways(functools.partial(hybrid_attention, groups=groups), layer, 4, device)
        assert counted(forward, 2) == ({"alltoall_base": 2, "send": 1}, hybrid_sends(layer, 2, 2)[0])
        assert counted(backward, 2) == ({"alltoall_base": 2, "send": 2}, hybrid_sends(layer, 2, 2)[1])


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.distributed(world_size=4)
def test_tensor_parallel(tp_size, element, device):
    group = create_parallel_groups(tp_size).sp
    layer = small(8, 4, element)
    steps = two_ways_of_tensor_parallel(layer, tp_size, group, device, sequence_parallel=False)
    for step, expected in zip(steps, tensor_parallel_sends(layer, tp_size), strict=True):
        assert counted(step, tp_size) == ({"allreduce": 1}, expected)


@NEEDS_REDUCE_SCATTER
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.distributed(world_size=4)
def test_tensor_parallel_with_the_sequence_cut_sends_as_much(tp_size, device):
    group = create_parallel_groups(tp_size).sp
    layer = small(8, 4, 4)
    steps = two_ways_of_tensor_parallel(layer, tp_size, group, device, sequence_parallel=True)
    for step, expected in zip(steps, tensor_parallel_sends(layer, tp_size), strict=True):
        assert counted(step, tp_size) == ({"allgather": 1, "reduce_scatter": 1}, expected)


def on_linux():
    """All ranks skip alike. Over NCCL nothing goes by TCP."""
    if sys.platform != "linux" or dist.get_backend() != "gloo":
        pytest.skip("it is Linux that counts what gloo sends")


@pytest.mark.distributed(world_size=4)
def test_what_the_kernel_has_sent(device):
    """It counts a few bytes more: gloo puts a header before each message, and waits in barriers before and after."""
    on_linux()
    needs_point_to_point(device)
    layer = Layer(batch=1, tokens=1024, heads=8, kv_heads=4, head_dim=128, hidden=1024, element=4)
    world, hybrid = dist.group.WORLD, create_hybrid_groups(4, 2)
    ways = {
        "Ulysses": (
            two_ways(functools.partial(ulysses_attention, group=world), layer, 4, device),
            ulysses_sends(layer, 4),
        ),
        "ring": (two_ways(functools.partial(ring_attention, group=world), layer, 4, device), ring_sends(layer, 4)),
        "both": (
            two_ways(functools.partial(hybrid_attention, groups=hybrid), layer, 4, device),
            hybrid_sends(layer, 2, 2),
        ),
        "tensor": (two_ways_of_tensor_parallel(layer, 4, world, device, False), tensor_parallel_sends(layer, 4)),
    }
    for name, (steps, formulas) in ways.items():
        for step, expected in zip(steps, formulas, strict=True):
            assert expected > 1_000_000
            assert expected < sent_by(step) < 1.01 * expected, name


@NEEDS_REDUCE_SCATTER
@pytest.mark.distributed(world_size=4)
def test_gloos_reduce_scatter_sends_more_than_it_must(device):
    """It is made of all-reduces: twice as much."""
    on_linux()
    terms, total = list(torch.ones(4, 2**18, device=device)), torch.ones(2**18, device=device)
    sent = sent_by(lambda: dist.reduce_scatter(total, terms))
    must = 3 * 2**18 * 4
    assert 2 * must < sent < 2.02 * must


@pytest.mark.needs_torch("2.5")  # CommDebugMode
@pytest.mark.distributed(world_size=4)
def test_torchs_own_count_of_calls(device):
    from torch.distributed.tensor.debug import CommDebugMode

    layer = small(8, 4, 4)
    ulysses = two_ways(functools.partial(ulysses_attention, group=None), layer, 4, device)
    tensor_parallel = two_ways_of_tensor_parallel(layer, 4, None, device, sequence_parallel=False)
    for steps, operation, number in (
        (ulysses, torch.ops.c10d.alltoall_base_, 2),
        (tensor_parallel, torch.ops.c10d.allreduce_, 1),
    ):
        for step in steps:
            with CommDebugMode() as mode:
                step()
            assert mode.get_comm_counts() == {operation: number}


@pytest.mark.needs_torch("2.5")
@pytest.mark.distributed(world_size=4)
def test_torchs_own_count_knows_no_sends(device):
    needs_point_to_point(device)
    from torch.distributed.tensor.debug import CommDebugMode

    for step in two_ways(functools.partial(ring_attention, group=None), small(8, 4, 4), 4, device):
        with CommDebugMode() as mode:
            step()
        assert mode.get_comm_counts() == {}


WHICH_SENDS_LESS = [  # query heads, KV heads; forward; both ways: on 4 ranks, in bf16
    (8, 8, "Ulysses", "Ulysses"),  # 4 > 1 + 1
    (12, 4, "equal", "Ulysses"),  # 4 = 3 + 1
    (16, 4, "ring", "Ulysses"),  # 4 < 4 + 1
    (24, 4, "ring", "Ulysses"),
    (28, 4, "ring", "equal"),  # 2 · 4 = 7 + 1
    (32, 4, "ring", "ring"),  # 2 · 4 < 8 + 1
    (8, 2, "ring", "Ulysses"),  # two copies: 4 < 4 + 2 < 2 · 4
    (4, 1, "ring", "equal"),  # four copies: 2 · 4 = 4 + 4
    (8, 1, "ring", "ring"),
]


@pytest.mark.needs_torch("2.2")  # bf16 on gloo
@pytest.mark.distributed(world_size=4)
def test_where_ulysses_sends_less_than_a_ring(device):
    needs_point_to_point(device)

    def less(a, b):
        return "equal" if a == b else "Ulysses" if a < b else "ring"

    for heads, kv_heads, *expected in WHICH_SENDS_LESS:
        ulysses, ring = (
            [counted(step, 4)[1] for step in two_ways(functools.partial(way, group=None), layer, 4, device)]
            for layer in [small(heads, kv_heads, 2)]
            for way in (ulysses_attention, ring_attention)
        )
        assert [less(ulysses[0], ring[0]), less(sum(ulysses), sum(ring))] == expected, (heads, kv_heads)


# From the models' published config.json
LLAMA = Layer(batch=1, tokens=131_072, heads=32, kv_heads=8, head_dim=128, hidden=4096, element=2)
QWEN = LLAMA._replace(heads=28, kv_heads=4, hidden=3584)


def table(title, ways, rows):
    """MiB forward and backward, to a tenth where they are no whole numbers."""
    lines = [title, f"{'':8}" + "".join(f"{way:>21}" for way in ways)]
    lines.append(f"{'ranks':>8}" + f"{'forward':>11}{'backward':>10}" * len(ways))
    for label, sent in rows:
        numbers = [f"{forward / 2**20:11g}{backward / 2**20:10g}" for forward, backward in sent]
        lines.append(f"{label:>8}" + "".join(numbers))
    return "\n".join(lines) + "\n"


def test_the_table_of_the_page(recorded):
    rows = [
        (str(size), [ulysses_sends(LLAMA, size), ring_sends(LLAMA, size), tensor_parallel_sends(LLAMA, size)])
        for size in (2, 4, 8)
    ]
    title = "Llama-3.1-8B, 131,072 tokens, bf16: MiB from each rank for one layer"
    recorded("how-much-is-sent.txt", table(title, ["Ulysses", "ring", "tensor parallel"], rows))


def test_the_table_of_the_grids(recorded):
    """Ulysses × ring: the first row of each is Ulysses as far as heads allow, the last a ring alone."""
    tables = []
    for name, layer, grids in (
        ("Llama-3.1-8B", LLAMA, [(16, 1), (8, 2), (4, 4), (1, 16)]),
        ("Qwen2.5-7B", QWEN, [(4, 2), (2, 4), (1, 8)]),
    ):
        rows = []
        for ulysses_size, ring_size in grids:
            both = hybrid_sends(layer, ulysses_size, ring_size)
            block = layer._replace(tokens=layer.tokens // ring_size)
            within = ulysses_sends(block, ulysses_size)
            across = tuple(a - b for a, b in zip(both, within, strict=True))
            rows.append((f"{ulysses_size} × {ring_size}", [within, across]))
        title = f"{name}, 131,072 tokens, bf16: MiB from each rank for one layer"
        tables.append(table(title, ["all-to-all", "ring"], rows))
    recorded("how-much-is-sent-grids.txt", "\n".join(tables))


def test_more_copies_can_outweigh_more_ranks():
    layer = QWEN._replace(tokens=28 * 1024)
    on_4, on_7, on_14 = (ulysses_sends(layer, size) for size in (4, 7, 14))
    assert on_14 < on_4 < on_7
    forty = LLAMA._replace(heads=40, kv_heads=8, tokens=40 * 40)
    less = {size: ulysses_sends(forty, size)[0] < ring_sends(forty, size)[0] for size in (8, 10, 20)}
    assert less == {8: True, 10: False, 20: True}
    assert ulysses_sends(forty, 10)[0] == ring_sends(forty, 10)[0]


def test_from_which_size_ulysses_sends_less(recorded):
    """By the formulas, for SP sizes that divide the query heads."""
    lines = [f"{'query, KV heads':>18}{'forward':>10}{'both ways, bf16':>18}"]
    for heads, kv_heads in [(32, 32), (32, 8), (28, 4), (40, 8), (64, 8), (16, 2), (32, 1)]:
        layer = LLAMA._replace(heads=heads, kv_heads=kv_heads)
        sizes = [size for size in range(2, heads + 1) if heads % size == 0]
        ulysses, ring = ([way(layer, size) for size in sizes] for way in (ulysses_sends, ring_sends))
        forward, both = (
            next((size for size, a, b in zip(sizes, ulysses, ring, strict=True) if total(a) < total(b)), "never")
            for total in (operator.itemgetter(0), sum)
        )
        lines.append(f"{f'{heads}, {kv_heads}':>18}{forward:>10}{both:>18}")
    recorded("how-much-is-sent-sizes.txt", "\n".join(lines) + "\n")
