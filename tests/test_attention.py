"""Output and the three gradients of Ulysses attention, against SDPA in one process on the whole sequence."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint

import attention
from attention import kv_copies, sdpa, ulysses_attention
from process_groups import create_parallel_groups

# SP size -> heads, KV heads: shared out, one KV head for several ranks, one copy for each query head, a single KV head
HEADS = {
    2: [(6, 3), (4, 2), (4, 1), (2, 2), (10, 5)],
    4: [(8, 2), (12, 6), (8, 4), (4, 1), (4, 4), (28, 4)],
    1: [(3, 1)],
}


def whole(batch, tokens, heads, kv_heads, head_dim, value_dim, device, dtype=torch.float64, seed=0):
    """Query, key, value and the output's gradient for the whole sequence, [batch, tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim)]
    return [
        torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for shape in shapes
    ]


def one_process(query, key, value, gradient, is_causal):
    """Output and gradients without any parallelism, each KV head repeated by hand."""
    query, key, value = (x.clone().requires_grad_() for x in (query, key, value))
    copies = query.shape[2] // key.shape[2]
    k, v = (x[:, :, [head // copies for head in range(query.shape[2])]].transpose(1, 2) for x in (key, value))
    output = F.scaled_dot_product_attention(query.transpose(1, 2), k, v, is_causal=is_causal).transpose(1, 2)
    output.backward(gradient)
    return [output.detach(), query.grad, key.grad, value.grad]


def slice_of(x, group):
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


def on_ranks(query, key, value, gradient, group, **options):
    """Output and gradients of this rank's slice; each argument is the whole sequence."""
    query, key, value = (slice_of(x, group).clone().requires_grad_() for x in (query, key, value))
    output = ulysses_attention(query, key, value, group, **options)
    output.backward(slice_of(gradient, group))
    return [output.detach(), query.grad, key.grad, value.grad]


def assert_same(actual, expected, group, rtol=1e-10, atol=1e-12, case=""):
    for name, mine, all_of_it in zip(["output", "query", "key", "value"], actual, expected, strict=True):
        torch.testing.assert_close(
            mine, slice_of(all_of_it, group), rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n} {case}: {m}"
        )


def compare_with_one_process(on_ranks, numbers, groups, device):
    """For the `numbers` of query and KV heads, each replica with a sample of its own."""
    for (heads, kv_heads), batch, is_causal, value_dim in itertools.product(numbers, [1, 3], [True, False], [8, 5]):
        inputs = whole(batch, 12, heads, kv_heads, 8, value_dim, device, seed=groups.dp_rank)
        expected = one_process(*inputs, is_causal)
        case = f"for {heads=}, {kv_heads=}, {batch=}, {is_causal=}, {value_dim=}"
        assert_same(on_ranks(*inputs, groups.sp, is_causal=is_causal), expected, groups.sp, case=case)


@pytest.mark.parametrize("sp_size", HEADS)
@pytest.mark.distributed(world_size=4)
def test_output_and_gradients_are_those_of_one_process(sp_size, device):
    compare_with_one_process(on_ranks, HEADS[sp_size], create_parallel_groups(sp_size), device)


@pytest.mark.distributed
def test_over_all_ranks(device):
    world = dist.get_world_size()
    inputs = whole(2, 3 * world, 2 * world, 2, 8, 8, device)
    assert_same(on_ranks(*inputs, None), one_process(*inputs, is_causal=True), None)


@pytest.mark.distributed(world_size=4)
def test_which_heads_a_rank_computes(device):
    """28 query heads over 4 KV heads on 4 ranks: rank r has query heads 7r to 7r+6 and KV head r."""
    heads, kv_heads, rank = 28, 4, dist.get_rank()
    query = torch.arange(heads, device=device, dtype=torch.float32).view(1, 1, heads, 1).expand(2, 3, heads, 5)
    key = query[:, :, :kv_heads]
    seen = []

    def attention(q, k, v, *, is_causal):
        seen.append((q.shape, k.shape, v.shape, is_causal))
        assert q[0, 0, :, 0].tolist() == [*range(7 * rank, 7 * rank + 7)]
        assert k[0, 0, :, 0].tolist() == v[0, 0, :, 0].tolist() == [rank]
        return q

    output = ulysses_attention(query, key, key, None, is_causal=False, attention=attention)
    assert seen == [((2, 12, 7, 5), (2, 12, 1, 5), (2, 12, 1, 5), False)]
    assert torch.equal(output, query)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "local", "by_rank"),
    [
        (8, 8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (16, 8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),  # two query heads for each, unexpanded
        (8, 2, 2, [[0], [0], [1], [1]]),
        (4, 1, 1, [[0], [0], [0], [0]]),
        (12, 6, 3, [[0, 0, 1], [1, 2, 2], [3, 3, 4], [4, 5, 5]]),  # one and a half KV heads: one a query head
    ],
)
@pytest.mark.distributed(world_size=4)
def test_which_kv_heads_a_rank_gets(heads, kv_heads, local, by_rank):
    def attention(q, k, v, *, is_causal):
        assert q.shape[2] == local
        assert k[0, 0, :, 0].tolist() == by_rank[dist.get_rank()]
        assert torch.equal(v, -k)
        return q

    key = torch.arange(float(kv_heads)).view(1, 1, kv_heads, 1).expand(1, 2, kv_heads, 3)
    ulysses_attention(torch.zeros(1, 2, heads, 3), key, -key, None, attention=attention)


@pytest.mark.distributed(world_size=4)
def test_the_sequence_arrives_in_order(device):
    tokens = torch.arange(12.0, device=device).view(4, 3)[dist.get_rank()]
    x = tokens.view(1, 3, 1, 1).expand(2, 3, 4, 2)

    def attention(q, k, v, *, is_causal):
        for tensor in (q, k, v):
            assert tensor[1, :, 0, 1].tolist() == [*range(12)]
        return q

    assert torch.equal(ulysses_attention(x, x, x, None, attention=attention), x)


LAYOUTS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dim first": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "a slice of a wider tensor": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.distributed(world_size=4)
def test_memory_layouts(layout, batch, device):
    """Of the inputs, of what the attention returns and of the gradients that come back; ranks differ in it."""
    groups = create_parallel_groups(2)
    inputs = whole(batch, 8, 4, 2, 6, 6, device)
    expected = one_process(*inputs, is_causal=True)
    relaid = LAYOUTS[layout] if dist.get_rank() % 2 else lambda x: x

    def attention(q, k, v, *, is_causal):
        return relaid(sdpa(relaid(q), relaid(k), relaid(v), is_causal=is_causal))

    query, key, value, gradient = (relaid(slice_of(x, groups.sp)) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    output = ulysses_attention(*leaves, groups.sp, attention=attention)
    output.backward(gradient)
    assert_same([output.detach(), *(x.grad for x in leaves)], expected, groups.sp)


@pytest.mark.distributed(world_size=4)
def test_a_gradient_without_memory_of_its_own(device):
    """`sum().backward()` sends back one number with strides of 0."""
    groups = create_parallel_groups(4)
    query, key, value, gradient = whole(1, 8, 4, 4, 6, 6, device)
    expected = one_process(query, key, value, torch.ones_like(gradient), is_causal=True)
    leaves = [slice_of(x, groups.sp).clone().requires_grad_() for x in (query, key, value)]
    output = ulysses_attention(*leaves, groups.sp)
    output.sum().backward()
    assert_same([output.detach(), *(x.grad for x in leaves)], expected, groups.sp)


@dataclass(frozen=True)
class Case:
    sp_size: int
    batch: int
    tokens: int  # of each rank
    local_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool
    layouts: tuple[str, ...]  # of query, key, value and the output's gradient, on odd ranks
    short: int  # what `attention.SHORT` is


def cases(world_size):
    from hypothesis import strategies as st

    divisors = [n for n in range(1, 37) if world_size % n == 0]
    dims = st.integers(1, 9)
    few = st.integers(1, 3)
    layout = st.sampled_from(["contiguous", *LAYOUTS])
    return st.tuples(st.sampled_from(divisors), few).flatmap(
        lambda sizes: st.builds(
            Case,
            sp_size=st.just(sizes[0]),
            batch=few,
            tokens=st.integers(1, 4),
            local_heads=st.just(sizes[1]),
            kv_heads=st.sampled_from([n for n in range(1, 37) if math.prod(sizes) % n == 0]),
            head_dim=dims,
            value_dim=dims,
            is_causal=st.booleans(),
            layouts=st.tuples(layout, layout, layout, layout),
            short=st.sampled_from([0, attention.SHORT]),
        )
    )


def problem_with(case, groups, device):
    """What is wrong on this rank, or nothing."""
    group, heads = groups.sp, case.sp_size * case.local_heads
    attention.SHORT = case.short
    inputs = whole(
        case.batch,
        case.tokens * case.sp_size,
        heads,
        case.kv_heads,
        case.head_dim,
        case.value_dim,
        device,
        seed=groups.dp_rank,
    )
    odd = dist.get_rank() % 2
    relaid = [LAYOUTS[name] if odd and name in LAYOUTS else torch.clone for name in case.layouts]
    *leaves, gradient = (f(slice_of(x, group)) for f, x in zip(relaid, inputs, strict=True))
    leaves = [x.detach().requires_grad_() for x in leaves]
    try:
        output = ulysses_attention(*leaves, group, is_causal=case.is_causal)
        output.backward(gradient)
        actual = [output.detach(), *(x.grad for x in leaves)]
        assert_same(actual, one_process(*inputs, case.is_causal), group)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.distributed(world_size=n)) for n in (4, 6)])
def test_whatever_the_sizes(size, device):
    """Examples that hypothesis finds, each rank the same ones: they agree on each outcome, so all go on alike."""
    from hypothesis import HealthCheck, Phase, given, settings  # here: each rank of each test imports this file

    groups = {sp_size: create_parallel_groups(sp_size) for sp_size in range(1, size + 1) if size % sp_size == 0}

    @settings(
        derandomize=True,
        database=None,
        deadline=None,  # nothing that depends on the clock
        suppress_health_check=list(HealthCheck),
        max_examples=20,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(cases(size))
    def holds(case):
        print(case)  # where a rank waits for ever, the last one is the example
        problems = [None] * size
        dist.all_gather_object(problems, problem_with(case, groups[case.sp_size], device))
        found = "".join(f"\nrank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
        if found:
            pytest.fail(f"{case}{found}", pytrace=False)

    holds()


@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.distributed(world_size=2)
def test_where_only_one_of_the_three_is_trained(trained, device):
    inputs = whole(1, 8, 4, 2, 6, 6, device)
    expected = one_process(*inputs, is_causal=True)[1 + trained]
    leaves = [slice_of(x, None).clone().requires_grad_(i == trained) for i, x in enumerate(inputs[:3])]
    ulysses_attention(*leaves, None).backward(slice_of(inputs[3], None))
    torch.testing.assert_close(leaves[trained].grad, slice_of(expected, None), rtol=1e-10, atol=1e-12)
    assert [x.grad is None for x in leaves] == [i != trained for i in range(3)]


@pytest.mark.distributed(world_size=2)
def test_under_checkpointing_and_twice(device):
    inputs = whole(2, 8, 4, 2, 6, 6, device)
    expected = one_process(*inputs, is_causal=True)
    leaves = [slice_of(x, None).clone().requires_grad_() for x in inputs[:3]]
    for use in (1, 2):
        output = torch.utils.checkpoint.checkpoint(ulysses_attention, *leaves, None, use_reentrant=False)
        output.backward(slice_of(inputs[3], None))
        for leaf, gradient in zip(leaves, expected[1:], strict=True):
            torch.testing.assert_close(leaf.grad, use * slice_of(gradient, None), rtol=1e-10, atol=1e-12)


@pytest.mark.distributed(world_size=2)
def test_inputs_are_left_as_they_were(device):
    inputs = whole(1, 8, 4, 2, 6, 6, device)
    before = [x.clone() for x in inputs]
    on_ranks(*inputs, None)
    assert all(map(torch.equal, inputs, before))


SINCE_2_2 = pytest.mark.needs_torch("2.2")  # on 2.1, gloo has no bf16, and SDPA on a CPU no fp16


@pytest.mark.parametrize(
    "dtype", [pytest.param("bfloat16", marks=SINCE_2_2), pytest.param("float16", marks=SINCE_2_2), "float32"]
)
@pytest.mark.distributed(world_size=4)
def test_lower_precision_rounds_as_one_process_does(dtype, device):
    dtype = getattr(torch, dtype)
    inputs = whole(1, 16, 8, 4, 8, 8, device, dtype)
    exact = one_process(*(x.double() for x in inputs), is_causal=True)
    once = one_process(*inputs, is_causal=True)
    for mine, in_one, true in zip(on_ranks(*inputs, None), once, exact, strict=True):
        assert mine.dtype == dtype
        error, usual = (mine.double() - slice_of(true, None)).norm(), (in_one.double() - true).norm()
        assert error <= 1.5 * usual


@pytest.mark.needs_torch("2.6")  # 2.2 to 2.4 compile no autograd.Function that writes into a part of a buffer
@pytest.mark.distributed(world_size=2, timeout=60)
def test_compiled_at_any_length(device):
    """The second length makes torch compile for all: sizes are symbols then."""
    compiled = torch.compile(ulysses_attention, backend="aot_eager")
    for tokens in (12, 20, 28):
        inputs = whole(2, tokens, 4, 2, 8, 8, device)
        query, key, value = (slice_of(x, None).clone().requires_grad_() for x in inputs[:3])
        output = compiled(query, key, value, None)
        output.backward(slice_of(inputs[3], None))
        actual = [output.detach(), query.grad, key.grad, value.grad]
        assert_same(actual, one_process(*inputs, is_causal=True), None, case=f"for {tokens=}")


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.distributed(world_size=4)
def test_what_is_sent(needs_grad, long, monkeypatch, device):
    """One collective for query, key and value, one for the output; the same again in backward, unless they are long."""
    monkeypatch.setattr(attention, "SHORT", 0 if long else attention.SHORT)
    sent = []
    send = dist.all_to_all_single
    monkeypatch.setattr(
        dist, "all_to_all_single", lambda out, x, group: sent.append(x.numel()) or send(out, x, group=group)
    )
    query, key, value, gradient = whole(3, 16, 8, 4, 10, 6, device)
    leaves = [slice_of(x, None).clone().requires_grad_(needs_grad) for x in (query, key, value)]
    output = ulysses_attention(*leaves, None)
    inputs, outputs = sum(x.numel() for x in leaves), output.numel()
    assert sent == [inputs, outputs]
    if needs_grad:
        output.backward(slice_of(gradient, None))
        assert sent == [inputs, outputs, outputs, *([x.numel() for x in leaves] if long else [inputs])]


@pytest.mark.distributed(world_size=1)
def test_one_rank_sends_nothing(monkeypatch, device):
    monkeypatch.setattr(dist, "all_to_all_single", None)
    inputs = whole(2, 8, 4, 2, 6, 6, device)
    assert_same(on_ranks(*inputs, None), one_process(*inputs, is_causal=True), None)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            [(1, 2, 28, 4), (1, 2, 4, 4), (1, 2, 4, 4)],
            r"28 query heads cannot be shared out over 3 ranks: use an SP size of \[1, 2, 4, 7, 14, 28\]",
        ),
        ([(1, 2, 6, 4), (1, 2, 4, 4), (1, 2, 4, 4)], "6 query heads cannot share 4 KV heads"),
        ([(2, 6, 4), (2, 6, 4), (2, 6, 4)], r"query \[2, 6, 4\], key"),
        ([(1, 2, 6, 4), (1, 3, 6, 4), (1, 3, 6, 4)], r"query \[1, 2, 6, 4\], key \[1, 3, 6, 4\]"),
        ([(1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 3, 4)], "equally many heads"),
        ([(1, 2, 6, 4), (1, 2, 6, 5), (1, 2, 6, 4)], "the same head_dim"),
        ([(2, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4)], r"query \[2, 2, 6, 4\], key"),
    ],
)
@pytest.mark.distributed(world_size=3)
def test_shapes_that_do_not_fit(shapes, message, monkeypatch):
    monkeypatch.setattr(dist, "all_to_all_single", None)  # before anything is sent
    with pytest.raises(ValueError, match=message):
        ulysses_attention(*map(torch.zeros, shapes), None)


@pytest.mark.distributed(world_size=2)
def test_dtypes_that_differ(monkeypatch):
    """As rotary embeddings in fp32 leave them."""
    monkeypatch.setattr(dist, "all_to_all_single", None)
    x = torch.zeros(1, 2, 2, 4)
    with pytest.raises(ValueError, match=r"query is torch.float32, key torch.float32, value torch.bfloat16"):
        ulysses_attention(x, x, x.bfloat16(), None)


@pytest.mark.distributed(world_size=2)
def test_a_group_of_others():
    first_alone = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="global rank 1 is not in this group"):
            ulysses_attention(*[torch.zeros(1, 2, 2, 4)] * 3, first_alone)


def one_token_more_on_rank_1():
    x = torch.zeros(1, [3, 4][dist.get_rank()], 2, 4)
    ulysses_attention(x, x, x, None)


def test_slices_of_unequal_length_end_the_process(launch, device):
    """gloo's own check, and no exception: on a page, not in the snippet, since only a collective could tell."""
    if device != "cpu":
        pytest.skip("what the page quotes is gloo's on CPU")
    with pytest.raises(pytest.fail.Exception) as failure:
        launch(one_token_more_on_rank_1, world_size=2, timeout=10)
    assert "killed by SIGABRT" in str(failure.value)
    assert "op.preamble.length <= op.nbytes" in str(failure.value)


@pytest.mark.distributed(world_size=2)
def test_other_shapes_with_as_many_numbers_give_no_error(device):
    """What the page warns of: [2, 4] tokens on one rank, [1, 8] on the other."""
    inputs = whole(2, 8, 2, 2, 4, 4, device)[:3]
    query, key, value = (slice_of(x, None) for x in inputs)
    if dist.get_rank() == 1:
        query, key, value = (x.flatten(0, 1)[None] for x in (query, key, value))
    output = ulysses_attention(query, key, value, None)
    expected = slice_of(sdpa(*inputs, is_causal=True), None)
    assert output.shape == query.shape
    assert not torch.allclose(output.view_as(expected), expected)


MODELS = {  # query heads, KV heads; from the models' published config.json
    "Llama-3.1-8B": (32, 8),
    "Qwen2.5-3B": (16, 2),
    "Qwen2.5-7B": (28, 4),
    "Qwen2.5-32B": (40, 8),
}


def test_the_rule_of_heads_as_the_page_shows_it(recorded):
    lines = [f"{'':14}{'query, KV heads':>16}   SP size: KV heads on each rank"]
    for model, (heads, kv_heads) in MODELS.items():
        sizes = [size for size in range(1, heads + 1) if heads % size == 0]
        each = [f"{size}: {kv_heads * kv_copies(heads, kv_heads, size) // size}" for size in sizes]
        lines.append(f"{model:14}{f'{heads}, {kv_heads}':>16}   {'  '.join(each)}")
    recorded("attention-heads.txt", "\n".join(lines) + "\n")


def seven_billion_on_eight():
    query, key = torch.zeros(1, 2, 28, 8), torch.zeros(1, 2, 4, 8)
    try:
        ulysses_attention(query, key, key, None)
    except ValueError as error:
        if dist.get_rank() == 0:
            print(f"ValueError: {error}")


def test_the_error_as_the_page_shows_it(launch, recorded):
    recorded("attention-28-heads.txt", "".join(launch(seven_billion_on_eight, world_size=8, timeout=20)))


def test_copies_of_kv_heads_for_real_models():
    """(query heads, KV heads, SP size) -> copies of each KV head that are sent."""
    assert kv_copies(32, 8, 8) == 1  # Llama-3.1-8B
    assert kv_copies(32, 8, 16) == 2
    assert kv_copies(64, 8, 32) == 4
    assert kv_copies(40, 8, 5) == 5  # 8 heads on 5 ranks: one for each query head
    assert kv_copies(28, 4, 7) == 7  # Qwen2.5-7B
    assert kv_copies(28, 4, 4) == 1
    assert kv_copies(16, 2, 8) == 4
