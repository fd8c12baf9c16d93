"""How far bf16 and fp32 are from fp64, in one process and on 4 ranks, and how far these two are apart.

    python benchmarks/precision.py [--device cuda]

Ulysses attention alone, and a decoder's loss and gradients with it. Errors are relative, ‖x - y‖ / ‖y‖. Writes
docs/_data/precision.json, or precision_cuda.json.
"""

import argparse
import functools
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "snippets"), str(ROOT / "tests")]
RANKS = 4
TOKENS = [256, 1024, 4096]
LAYERS = 4


def error(x, y):
    """Of lists of tensors, as one long vector."""
    square = sum((a.double() - b.double()).pow(2).sum() for a, b in zip(x, y, strict=True))
    return (square / sum(b.double().pow(2).sum() for b in y)).sqrt().item()


def compare(exact, once, ranks):
    return {
        "one_process": float(f"{error(once, exact):.2g}"),
        "on_ranks": float(f"{error(ranks, exact):.2g}"),
        "apart": float(f"{error(ranks, once):.2g}"),
        "bitwise_equal": all(map(torch.equal, ranks, once)),
    }


def whole(x):
    everyone = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(RANKS)]
    dist.all_gather(everyone, x.contiguous())
    return torch.cat(everyone, dim=1)


def of_attention(tokens, dtype, device):
    from attention import sdpa, ulysses_attention

    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 64), (4, 64), (4, 64), (8, 64)]
    inputs = [torch.randn(1, tokens, *shape, generator=generator).to(device, dtype) for shape in shapes]

    def run(attention, *tensors):
        leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
        output = attention(*leaves)
        output.backward(tensors[3])
        return [output.detach(), *(x.grad for x in leaves)]

    causal = functools.partial(sdpa, is_causal=True)
    exact = run(causal, *(x.double() for x in inputs))
    once = run(causal, *inputs)
    slices = [x.chunk(RANKS, dim=1)[dist.get_rank()] for x in inputs]
    ranks = [whole(x) for x in run(functools.partial(ulysses_attention, group=None), *slices)]
    return {"output": compare(exact[:1], once[:1], ranks[:1]), "gradients": compare(exact[1:], once[1:], ranks[1:])}


def of_model(tokens, dtype, device):
    from attention import sdpa, ulysses_attention
    from loss import token_mean
    from model import Config, Decoder
    from sharding import shard_batch

    config = Config(vocabulary=512, hidden=256, layers=LAYERS, heads=8, kv_heads=4, mlp=704)
    input_ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    batch = shard_batch({"input_ids": input_ids, "labels": input_ids}, None)

    def run(precision, attention, ids, positions, labels, divisor):
        torch.manual_seed(0)
        model = Decoder(config).to(device, dtype).to(precision)  # the same weights
        logits = model(ids, positions, attention).flatten(0, 1)
        precise = logits.to(torch.promote_types(precision, torch.float32))
        loss_sum = F.cross_entropy(precise, labels.flatten(), reduction="sum")
        group = None if divisor > 1 else alone
        loss = token_mean(loss_sum, (labels >= 0).sum(), group, gradient_divisor=divisor)
        loss.backward()
        gradients = [x.grad.to(torch.promote_types(precision, torch.float32)) for x in model.parameters()]
        if divisor > 1:
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= divisor
        return [loss.detach()], gradients

    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    in_one = shard_batch({"input_ids": input_ids, "labels": input_ids}, alone)
    arguments = [in_one[name] for name in ("input_ids", "position_ids", "shift_labels")]
    exact = run(torch.float64, sdpa, *arguments, 1)
    once = run(dtype, sdpa, *arguments, 1)
    slices = [batch[name] for name in ("input_ids", "position_ids", "shift_labels")]
    ranks = run(dtype, functools.partial(ulysses_attention, group=None), *slices, RANKS)
    return {"loss": compare(exact[0], once[0], ranks[0]), "parameters": compare(exact[1], once[1], ranks[1])}


def on_each_rank(device: str) -> None:
    from launcher import backend_for
    from measured import write

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend = backend_for(device, RANKS)
    dist.init_process_group(backend)
    rows = []
    for tokens in TOKENS:
        rows.append({"tokens": tokens})
        for dtype in (torch.bfloat16, torch.float32):
            figures = {**of_attention(tokens, dtype, device), **of_model(tokens, dtype, device)}
            rows[-1][str(dtype).removeprefix("torch.")] = figures
    if dist.get_rank() == 0:
        name = "precision" if device == "cpu" else f"precision_{device}"
        write(name, device, backend=backend, ranks=RANKS, layers=LAYERS, rows=rows)
    dist.destroy_process_group()


def main() -> None:
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
        print(run_on_ranks(script, world_size=RANKS, timeout=300, directory=Path(directory))[0])


if __name__ == "__main__":
    main()
