"""Attention over 4 ranks, forward and backward: ulysses_attention, DeepSpeed's and yunchang's, in one run.

    python benchmarks/attention.py [--device cuda]

Each length is measured with torch's SDPA, and with a kernel in its place that takes no time: what remains is the
collectives and the copies around them. Writes docs/_data/attention.json, or attention_cuda.json.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("DS_BUILD_OPS", "0")
if "cuda" not in sys.argv:
    os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "snippets"), str(ROOT / "tests")]
RANKS, BATCH, HEADS, KV_HEADS, HEAD_DIM = 4, 1, 16, 4, 64
LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]  # tokens a rank
WITH_SDPA = {"cpu": LENGTHS[:5], "cuda": LENGTHS}  # longer ones would take minutes on two cores
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}  # torch's flash attention on a GPU takes no fp32
SECONDS = {"cpu": 8, "cuda": 4}  # for each length, within these numbers of rounds
LEAST, MOST = 7, 60


# ---------------------------------------------------------------------------------- the implementations
# Each takes [batch, seq/sp, heads, dim], contiguous: what a model's projections give. `kernel` sees the whole sequence,
# [batch, seq, heads/sp, dim], and no implementation is charged for a transpose, which is a view, nor for the kernel.


def this_site(kernel):
    from attention import ulysses_attention

    return lambda query, key, value: ulysses_attention(
        query, key, value, None, attention=lambda q, k, v, is_causal: kernel(q, k, v)
    )


def deepspeed(kernel):
    """As its register_with_transformers builds and calls it, and a model of Transformers does: heads before tokens."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    attention = UlyssesSPAttentionHF(
        attn=lambda module, q, k, v, mask, **options: (kernel(*(x.transpose(1, 2) for x in (q, k, v))), None),
        batch_size=BATCH,
        attn_head_count=HEADS,
        attn_head_size=HEAD_DIM,
        kv_head_count=KV_HEADS,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )
    layer = torch.nn.Module()

    def attend(query, key, value):
        tokens = query.shape[1]
        first = dist.get_rank() * tokens
        positions = torch.arange(first, first + tokens, device=query.device).expand(BATCH, -1)
        output, _ = attention(layer, *(x.transpose(1, 2) for x in (query, key, value)), None, position_ids=positions)
        return output.unflatten(2, (HEADS, HEAD_DIM))

    return attend


def yunchang(kernel):
    """It chooses among kernels of its own: the one that it has chosen is replaced."""
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    attention = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
    attention.attn_fn = lambda q, k, v, **options: kernel(q, k, v)
    return lambda query, key, value: attention(query, key, value, causal=True)


IMPLEMENTATIONS = {"this_site": this_site, "deepspeed": deepspeed, "yunchang": yunchang}


def sdpa(query, key, value):
    from attention import sdpa

    return sdpa(query, key, value, is_causal=True)


class NoAttention:
    """A kernel that takes no time: output and gradients are there since its first call, and lie in memory as SDPA's."""

    results = None

    def __call__(self, *qkv):
        if self.results is None:
            few = [x[:, :64].detach().requires_grad_() for x in qkv]
            output = sdpa(*few)
            shown = [output, *torch.autograd.grad(output, few, torch.ones_like(output))]
            self.results = [as_it_lies(x, whole.shape) for x, whole in zip(shown, (qkv[0], *qkv), strict=True)]
        return ReturnResults.apply(self.results, *qkv)


def as_it_lies(x, shape):
    from_the_outermost = sorted(range(x.dim()), key=x.stride, reverse=True)
    return torch.empty_permuted(shape, from_the_outermost, dtype=x.dtype, device=x.device).fill_(1)


class ReturnResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, results, query, key, value):
        output, *ctx.gradients = results
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient):
        return None, *ctx.gradients


# ------------------------------------------------------------------------------------------- the measures


class Collectives:
    """Adds up the seconds in collectives: the two functions that all three call."""

    def __init__(self, synchronize):
        self.seconds, self.synchronize = 0.0, synchronize
        for name in ("all_to_all_single", "all_gather"):
            setattr(dist, name, self.timed(getattr(dist, name)))

    def timed(self, collective):
        def call(*args, **kwargs):
            self.synchronize()
            start = time.perf_counter()
            work = collective(*args, **kwargs)
            self.synchronize()
            self.seconds += time.perf_counter() - start
            return work

        return call


class BytesWritten(TorchDispatchMode):
    """Counts what operations write into memory; collectives, allocations and views write nothing of their own."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace not in ("c10d", "deepspeed") and "empty" not in function.__name__:
            inputs = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
            for x in tensors_in(result):
                if function._schema.is_mutable or x.untyped_storage().data_ptr() not in inputs:
                    self.count += x.numel() * x.element_size()
        return result


def tensors_in(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def inputs_for(tokens, device, dtype):
    """Query, key, value and the output's gradient, [batch, tokens, heads, dim]."""
    generator = torch.Generator().manual_seed(tokens)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(BATCH, tokens, h, HEAD_DIM, generator=generator).to(device, dtype) for h in heads]


def forward_and_backward(attend, query, key, value, gradient):
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = attend(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, gradient)


def check(device):
    """Output and gradients of each implementation are those of one process."""
    whole = inputs_for(RANKS * LENGTHS[0], device, torch.float32)
    slices = [x.chunk(RANKS, dim=1)[dist.get_rank()].clone() for x in whole]
    expected = [x.chunk(RANKS, dim=1)[dist.get_rank()] for x in forward_and_backward(sdpa, *whole)]
    for make in IMPLEMENTATIONS.values():
        actual = forward_and_backward(make(sdpa), *slices)
        for part, mine, right in zip(["output", "query", "key", "value"], actual, expected, strict=True):
            torch.testing.assert_close(
                mine, right, rtol=1e-3, atol=1e-4, msg=lambda text, of=f"{make.__name__}, {part}": f"{of}: {text}"
            )


def measure(attends, inputs, seconds, collectives):
    """For each implementation [rounds, 2]: milliseconds, and those of them in collectives; means over the ranks."""
    times = {name: [] for name in attends}
    limit = float("inf")
    for turn in itertools.count(-2):  # two to warm up
        if turn == 0:
            start = time.perf_counter()
        for name, attend in attends.items():  # in turn, so that a busy machine is busy for all
            dist.barrier()
            collectives.seconds, begin = 0.0, time.perf_counter()
            forward_and_backward(attend, *inputs)
            collectives.synchronize()
            if turn >= 0:
                times[name].append([time.perf_counter() - begin, collectives.seconds])
        if turn == 0:  # all ranks must end in the same round
            rounds = torch.tensor(seconds / (time.perf_counter() - start))
            dist.all_reduce(rounds, dist.ReduceOp.MIN)
            limit = min(MOST, max(LEAST, int(rounds)))
        if turn + 1 >= limit:
            break
    for name, rows in times.items():
        mean = 1000 * torch.tensor(rows)
        dist.all_reduce(mean)
        times[name] = mean / RANKS
    return times


def summary(times):
    """Medians over the rounds, quartiles of the whole, and this site's time over that of the faster of the others."""
    figures = {"rounds": len(times["this_site"])}
    for name, rounds in times.items():
        low, total, high = statistics.quantiles(rounds[:, 0].tolist(), n=4)
        parts = {"ms": total, "low_ms": low, "high_ms": high, "collective_ms": rounds[:, 1].median().item()}
        figures[name] = {key: float(f"{value:.4g}") for key, value in parts.items()}
    mine, *others = (figures[name]["ms"] for name in IMPLEMENTATIONS)
    figures["ratio"] = round(mine / min(others), 2)
    return figures


def bytes_copied(attend, inputs):
    with BytesWritten() as written:
        forward_and_backward(attend, *inputs)
    return written.count


# ------------------------------------------------------------------------------------------------- the run


def on_each_rank(device):
    from launcher import backend_for
    from measured import write

    warnings.simplefilter("ignore")  # what the peers say at import
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend = backend_for(device, RANKS)
    dist.init_process_group(backend)
    collectives = Collectives(torch.cuda.synchronize if device == "cuda" else lambda: None)
    check(device)
    lengths = []
    for tokens in LENGTHS:
        inputs = inputs_for(tokens, device, DTYPE[device])
        figures = {"tokens": tokens}
        without = {name: make(NoAttention()) for name, make in IMPLEMENTATIONS.items()}
        figures["no_attention"] = summary(measure(without, inputs, SECONDS[device], collectives))
        for name, attend in without.items():
            figures["no_attention"][name]["bytes_copied"] = bytes_copied(attend, inputs)
        if tokens in WITH_SDPA[device]:
            attends = {name: make(sdpa) for name, make in IMPLEMENTATIONS.items()}
            figures["sdpa"] = summary(measure(attends, inputs, SECONDS[device], collectives))
        lengths.append(figures)
    if dist.get_rank() == 0:
        write(
            "attention" if device == "cpu" else f"attention_{device}",
            device,
            backend=backend,
            ranks=RANKS,
            dtype=str(DTYPE[device]).removeprefix("torch."),
            batch=BATCH,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            deepspeed=version("deepspeed"),
            yunchang=version("yunchang"),
            lengths=lengths,
        )
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    if "RANK" in os.environ:
        on_each_rank(device)
        return
    from rank_main import Script
    from ranks import run_on_ranks

    with tempfile.TemporaryDirectory() as directory:
        script = Script(__file__, ("--device", device))
        print(run_on_ranks(script, world_size=RANKS, timeout=600, directory=Path(directory))[0])


if __name__ == "__main__":
    main()
