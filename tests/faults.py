"""Faults that people really make, each with the test that must see it: test_faults.py applies them one by one.

A fault is a replacement in the snippet's text, which must occur there exactly once.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    snippet: str
    right: str
    wrong: str
    caught_by: str  # test function in the test file of the snippet's name


FAULTS = [
    # ---------------------------------------------------------------------------- process_groups.py
    Fault(
        "SP groups hold strided ranks",
        "process_groups.py",
        ".view(-1, sequence_parallel_size)",
        ".view(sequence_parallel_size, -1).T",
        "test_each_rank_is_in_its_groups",
    ),
    Fault(
        "SP and DP groups swapped",
        "process_groups.py",
        "sp=sp_groups[dp_rank],\n        dp=dp_groups[sp_rank],",
        "sp=dp_groups[sp_rank],\n        dp=sp_groups[dp_rank],",
        "test_each_rank_is_in_its_groups",
    ),
    Fault(
        "SP and DP rank swapped",
        "process_groups.py",
        "dp_rank, sp_rank = divmod",
        "sp_rank, dp_rank = divmod",
        "test_each_rank_is_in_its_groups",
    ),
    Fault(
        "ranks counted by the DP size",
        "process_groups.py",
        "divmod(dist.get_rank(), sp_size)",
        "divmod(dist.get_rank(), dp_size)",
        "test_each_rank_is_in_its_groups",
    ),
    Fault(
        "DP groups are the SP groups",
        "process_groups.py",
        "grid.T.tolist()",
        "grid.tolist()",
        "test_each_rank_is_in_its_groups",
    ),
    Fault(
        "each rank makes its own SP group only",
        "process_groups.py",
        "[dist.new_group(row) for row in grid.tolist()]",
        "[dist.new_group(row) if dist.get_rank() in row else None for row in grid.tolist()]",
        "test_each_rank_is_in_its_groups",
    ),
    Fault(
        "each rank makes its own DP group only",
        "process_groups.py",
        "[dist.new_group(column) for column in grid.T.tolist()]",
        "[dist.new_group(column) if dist.get_rank() in column else None for column in grid.T.tolist()]",
        "test_each_rank_is_in_its_groups",
    ),
    Fault(
        "one rank skips the last group, which is not its own",
        "process_groups.py",
        "[dist.new_group(column) for column in grid.T.tolist()]",
        "[dist.new_group(column) for column in grid.T.tolist() if dist.get_rank() or 0 in column]",
        "test_each_rank_is_in_its_groups",
    ),
    Fault(
        "a collective for each sum",
        "loss.py",
        "numerator, denominator = _Sum.apply(both, group, factor)",
        "numerator, denominator = (_Sum.apply(one, group, factor) for one in both)",
        "test_one_collective_carries_both_sums",
    ),
    Fault(
        "no check before the groups are made",
        "process_groups.py",
        "check_sizes(dist.get_world_size(), sequence_parallel_size)\n",
        "\n",
        "test_sizes_that_do_not_fit_fail_on_every_rank_before_any_group_is_made",
    ),
    Fault(
        "a size that does not divide is let through",
        "process_groups.py",
        "if world_size % n == 0",
        "",
        "test_sizes_that_do_not_fit_fail_on_every_rank_before_any_group_is_made",
    ),
    Fault(
        "mesh dimensions named the wrong way round",
        "process_groups.py",
        'mesh_dim_names=("dp", "sp")',
        'mesh_dim_names=("sp", "dp")',
        "test_mesh_is_the_same_grid",
    ),
    Fault(
        "mesh of shape (sp, dp)",
        "process_groups.py",
        "(world_size // sequence_parallel_size, sequence_parallel_size)",
        "(sequence_parallel_size, world_size // sequence_parallel_size)",
        "test_mesh_is_the_same_grid",
    ),
    Fault(
        "no check before the mesh is made",
        "process_groups.py",
        "check_sizes(world_size, sequence_parallel_size)\n    return",
        "return",
        "test_sizes_that_do_not_fit_fail_on_every_rank_before_any_group_is_made",
    ),
    Fault(
        "groups can be overwritten",
        "process_groups.py",
        "@dataclass(frozen=True)",
        "@dataclass",
        "test_groups_cannot_be_changed_by_accident",
    ),
    # -------------------------------------------------------------------------------------- loss.py
    Fault(
        "the weight is dropped",
        "loss.py",
        "loss.masked_fill(weight == 0, 0) * weight",
        "loss.masked_fill(weight == 0, 0)",
        "test_weighted_all_reduce_is_the_loss_of_one_process",
    ),
    Fault(
        "NaN times zero",
        "loss.py",
        "loss.masked_fill(weight == 0, 0) * weight",
        "loss * weight",
        "test_nan_of_weight_zero_counts_for_nothing",
    ),
    Fault(
        "NaN is swept under the carpet",
        "loss.py",
        "loss.masked_fill(weight == 0, 0) * weight",
        "loss.nan_to_num() * weight",
        "test_nan_that_counts_stays_nan",
    ),
    Fault(
        "summed over the world, not the group",
        "loss.py",
        "dist.all_reduce(total, group=group)",
        "dist.all_reduce(total)",
        "test_weighted_all_reduce_is_the_loss_of_one_process",
    ),
    Fault(
        "backward forgets the factor",
        "loss.py",
        "gradient * ctx.factor",
        "gradient",
        "test_with_an_engine_that_averages_over_all_ranks",
    ),
    Fault(
        "backward ignores the gradient that comes in",
        "loss.py",
        "gradient * ctx.factor",
        "torch.ones_like(gradient) * ctx.factor",
        "test_the_gradient_that_comes_in_is_passed_on",
    ),
    Fault(
        "backward is a collective",
        "loss.py",
        "        return gradient * ctx.factor",
        "        dist.all_reduce(gradient := gradient.clone())\n        return gradient * ctx.factor",
        "test_backward_needs_nobody_else",
    ),
    Fault(
        "mean and sum swapped",
        "loss.py",
        '{"mean": _size(group), "sum": 1}',
        '{"mean": 1, "sum": _size(group)}',
        "test_weighted_all_reduce_is_the_loss_of_one_process",
    ),
    Fault(
        "divided by the world, not the group",
        "loss.py",
        "return dist.get_world_size(group)",
        "return dist.get_world_size()",
        "test_weighted_all_reduce_is_the_loss_of_one_process",
    ),
    Fault(
        "an unknown reduction is let through",
        "loss.py",
        "if gradient_reduction not in factors:",
        "if False:",
        "test_bad_input_fails_early_on_every_rank",
    ),
    Fault(
        "divided by no weight",
        "loss.py",
        "denominator.masked_fill(denominator == 0, 1)",
        "denominator",
        "test_no_weight_anywhere_gives_zero",
    ),
    Fault(
        "weights clamped to 1",
        "loss.py",
        "denominator.masked_fill(denominator == 0, 1)",
        "denominator.clamp(min=1)",
        "test_fractional_weights",
    ),
    Fault(
        "the weight is differentiated",
        "loss.py",
        "weight.detach()",
        "weight",
        "test_the_weight_is_not_differentiated",
    ),
    Fault(
        "mean of means",
        "loss.py",
        "torch.stack([numerator, denominator])",
        "torch.stack([numerator / denominator.clamp(min=1), torch.ones_like(denominator)])",
        "test_token_mean_is_the_mean_of_one_process",
    ),
    Fault(
        "summed in bf16",
        "loss.py",
        "return x.to(torch.promote_types(x.dtype, torch.float32))",
        "return x",
        "test_at_least_fp32",
    ),
    Fault(
        "fp64 lost",
        "loss.py",
        "return x.to(torch.promote_types(x.dtype, torch.float32))",
        "return x.float()",
        "test_at_least_fp32",
    ),
    Fault(
        "the input is summed in place",
        "loss.py",
        "total = x.clone(memory_format=torch.contiguous_format)",
        "total = x",
        "test_inputs_are_left_as_they_were",
    ),
    Fault(
        "memory is summed in each rank's own order",
        "loss.py",
        "x.clone(memory_format=torch.contiguous_format)",
        "x.clone()",
        "test_memory_layouts_that_differ",
    ),
    Fault(
        "token_mean over the world, not the group",
        "loss.py",
        "_quotient_of_sums(loss_sum, num_tokens, group, gradient_divisor)",
        "_quotient_of_sums(loss_sum, num_tokens, None, gradient_divisor)",
        "test_token_mean_over_a_group_that_is_not_the_world",
    ),
    Fault(
        "token_mean for an engine that sums",
        "loss.py",
        "num_tokens, group, gradient_divisor)",
        "num_tokens, group, 1)",
        "test_token_mean_is_the_mean_of_one_process",
    ),
    Fault(
        "divisor 0 is let through",
        "loss.py",
        "if not gradient_divisor > 0:",
        "if not gradient_divisor >= 0:",
        "test_bad_input_fails_early_on_every_rank",
    ),
    Fault(
        "per-token losses are let through",
        "loss.py",
        "if loss.dim() or weight.dim():",
        "if False:",
        "test_bad_input_fails_early_on_every_rank",
    ),
    Fault(
        "a group of others is let through",
        "loss.py",
        "if dist.get_rank(group) < 0:",
        "if False:",
        "test_a_group_of_others_is_refused",
    ),
    # ------------------------------------------------------------------------------ legacy_torch.py
    Fault(
        "only the rank's own group is looked at",
        "legacy_torch.py",
        "sp_size == world_size",
        "0 in dist.get_process_group_ranks(group)",
        "test_it_warns_on_rank_0_where_the_recipe_breaks_on_any_rank",
    ),
    Fault(
        "every rank warns",
        "legacy_torch.py",
        "dist.get_rank() != 0 or sp_size",
        "sp_size",
        "test_it_warns_on_rank_0_where_the_recipe_breaks_on_any_rank",
    ),
    Fault(
        "gloo is taken for mended",
        "legacy_torch.py",
        'backend == "gloo" or (backend == "nccl" and old)',
        "old",
        "test_it_warns_on_rank_0_where_the_recipe_breaks_on_any_rank",
    ),
    Fault(
        "versions compared as text",
        "legacy_torch.py",
        "torch.__version__ < (2, 3)",
        'str(torch.__version__) < "2.3"',
        "test_over_nccl_it_warns_before_2_3",
    ),
    Fault(
        "the check is a collective",
        "legacy_torch.py",
        "    backend = dist.get_backend(group)",
        "    dist.barrier(group)\n    backend = dist.get_backend(group)",
        "test_it_sends_nothing",
    ),
]
