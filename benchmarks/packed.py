"""Attention over packed documents, forward and backward on one rank: document by document, by a mask, by two kernels.

    python benchmarks/packed.py [--device cuda]

Each way computes the same, which is checked at the shortest length; "one document" computes less apart than it should,
and is there for scale. Writes docs/_data/packed.json, or packed_cuda.json: milliseconds (median), and GiB at the peak
beyond inputs, output and gradients.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "snippets"))

from attention import sdpa
from measured import write
from packed import cu_seqlens, packed_attention, packed_attention_by_mask

SIZES = {  # tokens and the mean of a document; query heads, KV heads, head_dim
    "cpu": ([(2048, 512), (8192, 512), (8192, 64)], 8, 2, 64),
    "cuda": ([(8192, 4096), (32768, 4096), (131072, 4096), (32768, 256)], 32, 8, 128),
}
ROUNDS = {"cpu": 5, "cuda": 7}


def packed_varlen(position_ids, group):
    from torch.nn.attention.varlen import varlen_attn

    boundaries = cu_seqlens(position_ids, group)
    longest = boundaries.diff().max().item()

    def attention(query, key, value, *, is_causal):
        copies = query.shape[2] // key.shape[2]  # the kernel's own form of it differs from version to version
        query, key, value = query[0], key[0].repeat_interleave(copies, 1), value[0].repeat_interleave(copies, 1)
        ends = boundaries, boundaries, longest, longest
        return varlen_attn(query, key, value, *ends, window_size=(-1, 0))[None]  # causal; from torch 2.11

    return attention


def ways(device):
    found = {
        "one document": lambda position_ids, group: sdpa,
        "by document": packed_attention,
        "by mask": packed_attention_by_mask,
    }
    if device == "cuda":
        from packed_flex import packed_flex_attention

        found |= {"FlexAttention": packed_flex_attention, "varlen_attn": packed_varlen}
    return found


def positions_of(tokens, mean, device):
    generator = random.Random(0)
    positions = []
    while len(positions) < tokens:
        positions += range(generator.randint(1, 2 * mean - 1))
    return torch.tensor([positions[:tokens]], device=device)


class Clock:
    """Milliseconds and, on a GPU, the peak of GiB beyond what is there at the start."""

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error):
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.gib = (torch.cuda.max_memory_allocated() - self.before) / 2**30
        self.ms = 1000 * (time.perf_counter() - self.start)


def measure(way, position_ids, inputs, gradient, rounds):
    """`ms` of a layer; `new_batch_ms` where it is the batch's first one, and documents are looked up."""
    attention, clocks = None, []
    for i in range(rounds + 2):  # the first two make it anew; the first also compiles, and does not count
        for x in inputs:
            x.grad = None
        with Clock(position_ids.device.type) as clock:
            if i < 2:
                attention = way(position_ids, None)
            output = attention(*inputs, is_causal=True)
            output.backward(gradient)
        clocks.append(clock)
    _, new_batch, *clocks = clocks
    figures = {
        "ms": round(statistics.median(clock.ms for clock in clocks), 1),
        "new_batch_ms": round(new_batch.ms, 1),
    }
    if position_ids.is_cuda:
        results = sum(x.numel() * x.element_size() for x in (output, *inputs)) / 2**30
        figures["gib"] = round(max(clock.gib for clock in clocks) - results, 2)
    return figures, [output.detach(), *(x.grad for x in inputs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    device = parser.parse_args().device
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cases, heads, kv_heads, head_dim = SIZES[device]
    rows = []
    for tokens, mean in cases:
        position_ids = positions_of(tokens, mean, device)
        query, key, value, gradient = (
            torch.randn(1, tokens, n, head_dim, device=device, dtype=torch.bfloat16)
            for n in (heads, kv_heads, kv_heads, heads)
        )
        inputs = [x.requires_grad_() for x in (query, key, value)]
        row, results = {"tokens": tokens, "documents": (position_ids == 0).sum().item()}, {}
        for name, way in ways(device).items():
            row[name], results[name] = measure(way, position_ids, inputs, gradient, ROUNDS[device])
            if tokens > cases[0][0]:
                del results[name]  # compared at the shortest length
        rows.append(row)
        for name in results.keys() - {"one document"}:
            for mine, theirs in zip(results[name], results["by document"], strict=True):
                error = ((mine - theirs).norm() / theirs.norm()).item()
                assert error < 0.01, (name, error)
    write(
        "packed" if device == "cpu" else f"packed_{device}",
        device,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype="bfloat16",
        rounds=ROUNDS[device],
        rows=rows,
    )


if __name__ == "__main__":
    main()
