"""Bytes that each rank sends for one attention layer, forward and backward."""

from typing import NamedTuple

from attention import kv_copies


# --8<-- [start:formulas]
class Layer(NamedTuple):
    """An attention layer, its whole batch, and the bytes of a number."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    element: int  # 2 for bf16


def ulysses_sends(layer: Layer, sp_size: int) -> tuple[int, int]:
    """Query, key, value and output, each without the part that stays."""
    copies = kv_copies(layer.heads, layer.kv_heads, sp_size)
    heads = 2 * layer.heads + 2 * copies * layer.kv_heads
    numbers = layer.batch * layer.tokens * heads * layer.head_dim // sp_size
    forward = numbers * layer.element * (sp_size - 1) // sp_size
    return forward, forward


def ring_sends(layer: Layer, sp_size: int) -> tuple[int, int]:
    """Key and value, sp - 1 times; backward again, and their gradients too."""
    heads = 2 * layer.kv_heads
    numbers = layer.batch * layer.tokens * heads * layer.head_dim // sp_size
    steps = (sp_size - 1) * numbers
    sums = max(layer.element, 4)  # gradients are added up in at least fp32
    return steps * layer.element, steps * (layer.element + sums)


def hybrid_sends(
    layer: Layer, ulysses_size: int, ring_size: int
) -> tuple[int, int]:
    """Ulysses within a block of the sequence, then a ring with fewer heads."""
    copies = kv_copies(layer.heads, layer.kv_heads, ulysses_size)
    block = layer._replace(tokens=layer.tokens // ring_size)
    share = layer._replace(kv_heads=copies * layer.kv_heads // ulysses_size)
    both = ulysses_sends(block, ulysses_size), ring_sends(share, ring_size)
    forward, backward = map(sum, zip(*both, strict=True))
    return forward, backward


def tensor_parallel_sends(layer: Layer, tp_size: int) -> tuple[int, int]:
    """One all-reduce of the hidden states each way, or what amounts to it."""
    numbers = layer.batch * layer.tokens * layer.hidden
    forward = 2 * numbers * layer.element * (tp_size - 1) // tp_size
    return forward, forward


# --8<-- [end:formulas]
