"""Output and the three gradients of ring attention, against SDPA in one process on the whole sequence."""

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

import ring_attention as ring_attention_module
from process_groups import create_parallel_groups
from ring_attention import ring_attention
from test_attention import assert_same, compare_with_one_process, one_process, slice_of, whole


def needs_point_to_point(device):
    """All ranks skip alike: gloo sends no CUDA tensor from one rank to another."""
    if device == "cuda" and dist.get_backend() == "gloo":
        pytest.skip("gloo's send takes no CUDA tensors: a ring needs a GPU for each rank")


def on_ranks(query, key, value, gradient, group, attention=ring_attention, **options):
    """Output and gradients of this rank's slice; each argument is the whole sequence."""
    query, key, value = (slice_of(x, group).clone().requires_grad_() for x in (query, key, value))
    output = attention(query, key, value, group, **options)
    output.backward(slice_of(gradient, group))
    return [output.detach(), query.grad, key.grad, value.grad]


@pytest.mark.parametrize("sp_size", [2, 4, 1])
@pytest.mark.distributed(world_size=4)
def test_output_and_gradients_are_those_of_one_process(sp_size, device):
    """Heads that the SP size does not divide are nothing special to a ring."""
    needs_point_to_point(device)
    compare_with_one_process(on_ranks, [(6, 2), (3, 3), (6, 1)], create_parallel_groups(sp_size), device)


@pytest.mark.distributed
def test_over_all_ranks(device):
    needs_point_to_point(device)
    for tokens in (3, 1):  # of each rank
        inputs = whole(2, tokens * dist.get_world_size(), 4, 2, 8, 8, device)
        assert_same(on_ranks(*inputs, None), one_process(*inputs, is_causal=True), None)


@pytest.mark.distributed(world_size=4)
def test_a_group_whose_ranks_are_no_neighbours(device):
    """Ranks 3 and 0, in this order of slices: the group's order is that of its ranks, 0 first."""
    needs_point_to_point(device)
    apart, between = dist.new_group([0, 3]), dist.new_group([1, 2])
    group = apart if dist.get_rank() in (0, 3) else between
    inputs = whole(2, 6, 4, 2, 6, 6, device)
    assert_same(on_ranks(*inputs, group), one_process(*inputs, is_causal=True), group)


LAYOUTS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "expanded": lambda x: x[:, :, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.distributed(world_size=4)
def test_memory_layouts(layout, device):
    """Of the inputs and of the output's gradient, on every other rank: the numbers count, not how they lie."""
    needs_point_to_point(device)
    inputs = whole(2, 8, 4, 2, 6, 6, device)
    if layout == "expanded":
        inputs = [x[:, :, :1].repeat(1, 1, x.shape[2], 1) for x in inputs]
    relaid = [LAYOUTS[layout](x) if dist.get_rank() % 2 else x for x in inputs]
    query, key, value = leaves = [slice_of(x, None).detach().requires_grad_() for x in relaid[:3]]
    output = ring_attention(query, key, value, None)
    output.backward(slice_of(relaid[3], None))
    assert_same([output.detach(), *(x.grad for x in leaves)], one_process(*inputs, is_causal=True), None)


@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.distributed(world_size=2)
def test_where_only_one_of_the_three_is_trained(trained, device):
    needs_point_to_point(device)
    inputs = whole(1, 8, 4, 2, 6, 6, device)
    expected = one_process(*inputs, is_causal=True)[1 + trained]
    leaves = [slice_of(x, None).clone().requires_grad_(i == trained) for i, x in enumerate(inputs[:3])]
    ring_attention(*leaves, None).backward(slice_of(inputs[3], None))
    torch.testing.assert_close(leaves[trained].grad, slice_of(expected, None), rtol=1e-10, atol=1e-12)
    assert [x.grad is None for x in leaves] == [i != trained for i in range(3)]


@pytest.mark.distributed(world_size=2)
def test_under_checkpointing_and_twice(device):
    needs_point_to_point(device)
    inputs = whole(2, 8, 4, 2, 6, 6, device)
    expected = one_process(*inputs, is_causal=True)
    leaves = [slice_of(x, None).clone().requires_grad_() for x in inputs[:3]]
    for use in (1, 2):
        output = torch.utils.checkpoint.checkpoint(ring_attention, *leaves, None, use_reentrant=False)
        output.backward(slice_of(inputs[3], None))
        for leaf, gradient in zip(leaves, expected[1:], strict=True):
            torch.testing.assert_close(leaf.grad, use * slice_of(gradient, None), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.distributed(world_size=4)
def test_scores_too_large_for_an_exponential(size, device):
    """exp(1000) is infinite in fp64, and the maximum of a row may lie in any block."""
    needs_point_to_point(device)
    query, key, value, gradient = whole(1, 16, 4, 2, 8, 8, device)
    inputs = (query * size, key, value, gradient)
    actual, expected = on_ranks(*inputs, None), one_process(*inputs, is_causal=True)
    assert_same(actual, expected, None, rtol=1e-8, atol=1e-8)


SINCE_2_2 = pytest.mark.needs_torch("2.2")  # on 2.1, gloo has no bf16, and SDPA on a CPU no fp16


@pytest.mark.parametrize(
    "dtype", [pytest.param("bfloat16", marks=SINCE_2_2), pytest.param("float16", marks=SINCE_2_2), "float32"]
)
@pytest.mark.distributed(world_size=4)
def test_lower_precision_rounds_as_one_process_does(dtype, device):
    needs_point_to_point(device)
    dtype = getattr(torch, dtype)
    inputs = whole(1, 16, 8, 4, 8, 8, device, dtype)
    exact = one_process(*(x.double() for x in inputs), is_causal=True)
    once = one_process(*inputs, is_causal=True)
    for mine, in_one, true in zip(on_ranks(*inputs, None), once, exact, strict=True):
        assert mine.dtype == dtype
        error, usual = (mine.double() - slice_of(true, None)).norm(), (in_one.double() - true).norm()
        assert error <= 1.5 * usual


@pytest.mark.distributed(world_size=4)
def test_gradients_of_many_blocks_are_summed_in_fp32(device):
    """Each block adds about 1 to value's gradient of 1000: in bf16, that would be lost."""
    needs_point_to_point(device)
    shape = (1, 2, 1, 2)
    key, value = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    query, key, value = leaves = [
        x.bfloat16().requires_grad_() for x in (torch.zeros(shape, device=device), key, value)
    ]
    output = ring_attention(query, key, value, None, is_causal=False)
    mine = 8000.0 if dist.get_rank() == 0 else 8.0
    output.backward(torch.full_like(output, mine))
    assert value.grad.tolist() == torch.full_like(value, 2 * (8000 + 3 * 8) / 8).tolist()
    assert all(x.grad is not None for x in leaves)


@pytest.mark.distributed(world_size=2)
def test_autocast_changes_nothing(device):
    needs_point_to_point(device)
    inputs = whole(2, 16, 4, 2, 8, 8, device, torch.float32)

    def under_autocast(*arguments, **options):
        with torch.autocast(device, torch.bfloat16):
            return ring_attention(*arguments, **options)

    actual = on_ranks(*inputs, None, attention=under_autocast)
    assert all(map(torch.equal, actual, on_ranks(*inputs, None)))


@pytest.mark.distributed(world_size=1)
def test_one_rank_sends_nothing(monkeypatch, device):
    monkeypatch.setattr(dist, "batch_isend_irecv", None)
    inputs = whole(2, 8, 4, 2, 6, 6, device)
    assert_same(on_ranks(*inputs, None), one_process(*inputs, is_causal=True), None)


@pytest.mark.distributed(world_size=4)
def test_sends_run_while_a_block_is_computed(monkeypatch, device):
    """Each block is on its way before its scores are computed, and awaited after."""
    needs_point_to_point(device)
    events = []
    pass_on, scores_of = ring_attention_module.pass_on, ring_attention_module.scores_of

    def passing(tensors, group):
        arrive = pass_on(tensors, group)
        events.append("send") if tensors else None
        return lambda: (events.append("arrive") if tensors else None, arrive())[1]

    def scores(*arguments):
        events.append("compute")
        return scores_of(*arguments)

    monkeypatch.setattr(ring_attention_module, "pass_on", passing)
    monkeypatch.setattr(ring_attention_module, "scores_of", scores)
    inputs = whole(1, 8, 4, 2, 6, 6, device)
    on_ranks(*inputs, None, is_causal=False)
    step = ["send", "compute", "arrive"]
    assert events == [*step * 3, "compute", *step * 4, "send", "arrive"]


@pytest.mark.distributed(world_size=4)
def test_under_a_causal_mask_later_ranks_compute_more(monkeypatch, device):
    """Rank r computes r + 1 of the blocks: the last all four, the first its own alone."""
    needs_point_to_point(device)
    computed = []
    scores_of = ring_attention_module.scores_of
    monkeypatch.setattr(ring_attention_module, "scores_of", lambda *x: computed.append(x[2]) or scores_of(*x))
    on_ranks(*whole(1, 8, 4, 2, 6, 6, device), None)
    blocks = [True] + [False] * dist.get_rank()  # the first is the diagonal
    assert computed == blocks * 2  # backward computes them again


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(1, 2, 6, 4), (1, 2, 4, 4), (1, 2, 4, 4)], "6 query heads cannot share 4 KV heads"),
        ([(2, 6, 4), (2, 6, 4), (2, 6, 4)], r"query \[2, 6, 4\], key"),
        ([(1, 2, 6, 4), (1, 3, 6, 4), (1, 3, 6, 4)], r"query \[1, 2, 6, 4\], key \[1, 3, 6, 4\]"),
        ([(1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 3, 4)], "equally many heads"),
        ([(1, 2, 6, 4), (1, 2, 6, 5), (1, 2, 6, 4)], "the same head_dim"),
    ],
)
@pytest.mark.distributed(world_size=2)
def test_shapes_that_do_not_fit(shapes, message, monkeypatch):
    monkeypatch.setattr(dist, "batch_isend_irecv", None)  # before anything is sent
    with pytest.raises(ValueError, match=message):
        ring_attention(*map(torch.zeros, shapes), None)


@pytest.mark.distributed(world_size=2)
def test_dtypes_that_differ(monkeypatch):
    """As rotary embeddings in fp32 leave them."""
    monkeypatch.setattr(dist, "batch_isend_irecv", None)
    x = torch.zeros(1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"query is torch.float32, key torch.float32, value torch.bfloat16"):
        ring_attention(x, x, x.bfloat16(), None)


@pytest.mark.distributed(world_size=2)
def test_a_group_of_others():
    first_alone = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="global rank 1 is not in this group"):
            ring_attention(*[torch.zeros(1, 2, 2, 4)] * 3, first_alone)


def one_token_more_on_rank_1():
    x = torch.zeros(1, [3, 4][dist.get_rank()], 2, 4)
    ring_attention(x, x, x, None)


def test_slices_of_unequal_length_end_the_process(launch, device):
    """gloo's own check, and no exception, as in Ulysses' all-to-all: only a collective could tell before."""
    if device != "cpu":
        pytest.skip("what the page quotes is gloo's on CPU")
    with pytest.raises(pytest.fail.Exception) as failure:
        launch(one_token_more_on_rank_1, world_size=2, timeout=10)
    assert "killed by SIGABRT" in str(failure.value)
    assert "op.preamble.length <= op.nbytes" in str(failure.value)
