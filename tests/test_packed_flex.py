"""FlexAttention on packed documents against each document alone: values on CPU, gradients where there is a GPU."""

import itertools

import pytest
import torch

from attention import ulysses_attention
from process_groups import create_parallel_groups
from test_packed import each_alone, inputs_of, on_ranks, positions_of, slice_of

pytestmark = pytest.mark.needs_torch("2.5")
DOCUMENTS = [
    [[300, 84]],
    [[1, 1, 190, 192], [100, 284]],
]


def cases(groups, device):
    for seed, (rows, is_causal) in enumerate(itertools.product(DOCUMENTS, [True, False])):
        inputs = inputs_of(rows, 4, 2, 16, 16, device, seed=10 * seed + groups.dp_rank)
        yield rows, is_causal, [x.float() for x in inputs]


@pytest.mark.distributed(world_size=2, timeout=120)  # on a GPU it compiles
def test_output_is_that_of_each_document_alone(device):
    from packed_flex import packed_flex_attention

    for sp_size in (1, 2):
        groups = create_parallel_groups(sp_size)
        for rows, is_causal, inputs in cases(groups, device):
            positions = slice_of(positions_of(rows, device), groups.sp)
            attention = packed_flex_attention(positions, groups.sp)
            with torch.no_grad():
                query, key, value = (slice_of(x, groups.sp) for x in inputs[:3])
                output = ulysses_attention(query, key, value, groups.sp, is_causal=is_causal, attention=attention)
            expected = slice_of(each_alone(rows, *(x.double() for x in inputs), is_causal)[0], groups.sp)
            torch.testing.assert_close(output.double(), expected, rtol=1e-3, atol=1e-3)  # TF32 on a GPU


@pytest.mark.distributed(world_size=2, timeout=120)
def test_gradients_on_a_gpu_and_on_cpu_its_error(device):
    from packed_flex import packed_flex_attention

    groups = create_parallel_groups(2)
    for rows, is_causal, inputs in cases(groups, device):
        arguments = packed_flex_attention, positions_of(rows, device), *inputs, groups.sp, is_causal
        if device == "cpu":
            with pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"):
                on_ranks(*arguments)
            continue
        expected = each_alone(rows, *(x.double() for x in inputs), is_causal)
        for mine, theirs in zip(on_ranks(*arguments), expected, strict=True):
            theirs = slice_of(theirs, groups.sp)
            assert (mine.double() - theirs).norm() < 0.005 * theirs.norm()  # TF32
