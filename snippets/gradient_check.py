"""Is the gradient under SP that of the run without it? Told in words."""

import re
from dataclasses import dataclass

import torch
import torch.distributed as dist


# --8<-- [start:compare]
@dataclass(frozen=True)
class Verdict:
    """`kind` is "equal", "scaled", "not proportional" or "ranks differ"."""

    kind: str
    factor: float | None = None  # of the reference, where it is proportional
    ranks: tuple[int, ...] = ()  # two that differ
    where: str = ""  # the parameter that shows it most

    def __str__(self):
        if self.kind == "equal":
            return "equal to the gradient of the run without SP"
        if self.kind == "scaled":
            advice = "sum" if self.factor > 1 else "mean"
            return (
                f"{self.factor:.4g} times the gradient of the run without SP: "
                "multiply the loss, or the gradient_divisor of token_mean, by "
                f"{1 / self.factor:.4g}; for weighted_all_reduce it is "
                f'gradient_reduction="{advice}"'
            )
        if self.kind == "ranks differ":
            return (
                f"{self.where} differs between ranks {self.ranks[0]} and "
                f"{self.ranks[1]}: the engine does not reduce gradients over "
                "both, and parameters drift apart"
            )
        return (
            "not proportional to the gradient of the run without SP, most in "
            f"{self.where}: other weights or batches, attention within the "
            "slice, a mean of means, or ranks whose gradients never meet"
        )


def compare_gradients(reference, actual, *, tolerance=None):
    """The verdict on a step's gradient, the same on every rank.

    Called by every rank, with the names and shapes that all have.
    reference, actual: name -> whole tensor; tolerance: of each parameter's
    gradient, relative; 1e-3, or 0.05 if a tensor has less than 32 bits.
    """
    names = check_names(reference, actual)
    if tolerance is None:
        narrow = any(x.element_size() < 4 for x in actual.values())
        tolerance = 0.05 if narrow else 1e-3
    mine = [reference[name].detach().double() for name in names]
    theirs = [actual[name].detach().double() for name in names]
    square = sum((r * r).sum() for r in mine)
    if any(gather(not square > 0)):
        raise ValueError(
            "the reference's gradient is 0 or NaN: its batches must have labels"
        )
    broken = [
        name
        for name, x in zip(names, theirs, strict=True)
        if not x.isfinite().all()
    ]
    for rank, found in enumerate(gather(broken)):
        if found:
            where = f"{found[0]}, which is NaN or infinite on rank {rank}"
            return Verdict("not proportional", where=where)
    total = torch.stack([x.norm() for x in theirs]).norm()
    floor = tolerance * 1e-3 * total + 1e-300

    def error(x, expected):
        """Above 1 where they differ, by more than rounding leaves."""
        return (x - expected).norm() / (tolerance * x.norm() + floor)

    differs = ranks_that_differ(names, theirs, lambda *x: error(*x) > 1)
    if differs:
        return differs
    factor = sum((r * x).sum() for r, x in zip(mine, theirs, strict=True))
    factor = factor / square
    errors = torch.stack(
        [error(x, factor * r) for r, x in zip(mine, theirs, strict=True)]
    )
    if errors.max() > 1 or not factor > 0:
        where = names[errors.argmax()]
        return on_all(Verdict("not proportional", where=where))
    if abs(factor - 1) < tolerance:
        return on_all(Verdict("equal", factor=1.0))
    return on_all(Verdict("scaled", factor=factor.item()))


def compare_parameters(model):
    """None where all ranks have the same bits, else a Verdict.

    Called by every rank, best after a few steps.
    """
    found = {
        plain_name(name): whole_parameter(parameter)
        for name, parameter in model.named_parameters()
    }
    check_names(found, found)
    names = sorted(found)
    tensors = [found[name] for name in names]
    return ranks_that_differ(names, tensors, lambda a, b: not a.equal(b))


def ranks_that_differ(names, tensors, differ):
    """The first rank that has another tensor than rank 0, as a Verdict."""
    where = None
    for name, x in zip(names, tensors, strict=True):
        first = x.clone()
        dist.broadcast(first, 0)
        if where is None and differ(x, first):
            where = name
    for rank, name in enumerate(gather(where)):
        if name is not None:
            return Verdict("ranks differ", ranks=(0, rank), where=name)
    return None


def gather(x, group=None):
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, x, group=group)
    return everyone


def on_all(verdict):
    """Rank 0's: near a limit, rounding may tell ranks apart."""
    same = [verdict]
    dist.broadcast_object_list(same)
    return same[0]


def check_names(reference, actual):
    """Their names. Raises on every rank alike, before any tensor is sent."""
    shapes = [{name: tuple(x.shape) for name, x in reference.items()}]
    shapes += [{name: tuple(x.shape) for name, x in actual.items()}]
    everyone = gather(shapes)
    for rank, pair in enumerate(everyone):
        expected = everyone[0][0]
        for found in pair:
            for name in sorted({*found, *expected}):
                if found.get(name) != expected.get(name):
                    raise ValueError(
                        f"{name} is {expected.get(name)} in rank 0's "
                        f"reference, and {found.get(name)} on rank {rank}: "
                        "both must come from models of one configuration"
                    )
    return sorted(shapes[0])


# --8<-- [end:compare]
# --8<-- [start:gradients]
def full_gradients(model):
    """name -> whole gradient, or zeros without one: of DDP, FSDP2 or ZeRO.

    Called by every rank after backward, before the step. FSDP2 and ZeRO 3
    shard: the whole is put together, so every rank needs room for it.
    """
    return {
        plain_name(name): whole_gradient(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def plain_name(name):
    """Without what DDP, DeepSpeed, torch.compile and checkpointing add."""
    added = r"\b(module|_orig_mod|_checkpoint_wrapped_module)\."
    return re.sub(added, "", name)


def whole_gradient(parameter):
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
    else:
        gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(whole_parameter(parameter))
    if hasattr(gradient, "full_tensor"):  # FSDP2
        gradient = gradient.full_tensor()
    return gradient.detach().clone()


def whole_parameter(parameter):
    if hasattr(parameter, "ds_id"):  # ZeRO 3
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    if hasattr(parameter, "full_tensor"):
        parameter = parameter.full_tensor()
    return parameter.detach().clone()


# --8<-- [end:gradients]
# --8<-- [start:reference]
def reference_gradients(model, batches, loss_sum_of):
    """name -> gradient of the mean over all tokens of `batches`.

    In this process alone. model: not wrapped, with attention of its own;
    batches: whole, of all replicas and micro-batches of the step.
    loss_sum_of(model, batch) -> sum of the tokens' losses, their number.
    """
    model.zero_grad()
    num_tokens = 0
    for batch in batches:
        loss_sum, count = loss_sum_of(model, batch)
        loss_sum.backward()
        num_tokens += count
    gradients = full_gradients(model)
    model.zero_grad()
    return {name: x / num_tokens for name, x in gradients.items()}


# --8<-- [end:reference]
# --8<-- [start:check]
def check_step(model, plain_model, batches, loss_sum_of, dp_group):
    """The verdict on a step, after its last backward.

    model: DDP, FSDP2 or DeepSpeed's engine; plain_model: the same weights.
    batches: what this replica had in the step, before they were cut.
    """
    whole = [batch for own in gather(batches, dp_group) for batch in own]
    reference = reference_gradients(plain_model, whole, loss_sum_of)
    return compare_gradients(reference, full_gradients(model))


# --8<-- [end:check]
