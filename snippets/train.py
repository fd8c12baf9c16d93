"""Trains a small language model under sequence parallelism, end to end.

torchrun --nproc-per-node 4 snippets/train.py --sequence-parallel-size 2
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics  # Python's own documentation, as text

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from attention import sdpa, ulysses_attention
from loss import token_mean
from model import Config, Decoder
from process_groups import create_parallel_groups
from same_batch import check_same_batch, create_loader
from sharding import shard_batch


# --8<-- [start:options]
def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--sequence-parallel-size", type=int, default=1)
    add("--engine", choices=["ddp", "fsdp2"], default="ddp")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--steps", type=int, default=50)
    add("--seed", type=int, default=0)
    add("--tokens", type=int, default=256, help="longest sample")
    add("--global-batch", type=int, default=8, help="samples of a step")
    add("--micro-batch", type=int, default=2, help="samples of a forward pass")
    add("--learning-rate", type=float, default=1e-3)
    add("--max-norm", type=float, default=1.0)
    add("--compile", action="store_true")
    add(
        "--metrics", type=Path, help="JSON lines: step, loss, grad_norm, tokens"
    )
    add("--checkpoint-dir", type=Path)
    add("--save-every", type=int, default=20, help="steps")
    add("--resume", action="store_true", help="from the newest checkpoint")
    return parser.parse_args()


# --8<-- [end:options]
# --8<-- [start:data]
def samples_of(tokens):
    """Paragraphs, as bytes, of at most `tokens`: for training, and held out."""
    paragraphs = [
        text.encode()
        for name in sorted(topics)
        for text in topics[name].split("\n\n")
    ]
    samples = [
        torch.tensor(list(text[start : start + tokens]))
        for text in paragraphs
        for start in range(0, len(text) - 1, tokens)
    ]
    return [x for i, x in enumerate(samples) if i % 100], samples[::100]


def collate(samples):
    """Rows as long as the longest sample; what is padding has label -100."""
    pad = functools.partial(
        torch.nn.utils.rnn.pad_sequence, samples, batch_first=True
    )
    return {"input_ids": pad(), "labels": pad(padding_value=-100)}


def batches_of_steps(loader, accumulation, first_step):
    """The micro-batches of each step, from `first_step` on, without an end.

    A step has the same samples whatever the number of replicas: together these
    take the next ones of one order, which depends on seed and epoch alone.
    """
    in_epoch = len(loader) // accumulation
    for epoch in itertools.count(first_step // in_epoch):
        loader.sampler.set_epoch(epoch)
        micro_batches = iter(loader)
        for step in range(epoch * in_epoch, (epoch + 1) * in_epoch):
            batches = list(itertools.islice(micro_batches, accumulation))
            if step >= first_step:
                yield batches


# --8<-- [end:data]
# --8<-- [start:engine]
def wrap(model, engine):
    """Both engines take the mean of gradients over all ranks: D is world."""
    if engine == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard  # torch 2.6

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


@contextlib.contextmanager
def gradient_sync(model, needed):
    """Micro-batches' gradients add up; the last one's backward reduces them."""
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if needed else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(needed)
        yield


def clip_gradients(model, max_norm):
    """Returns the norm before. Under FSDP2 a rank has parts of gradients."""
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    sharded = not isinstance(model, DistributedDataParallel)
    if sharded:
        gradients = [x.to_local() for x in gradients]
    square = sum(x.float().pow(2).sum() for x in gradients)
    if sharded:
        dist.all_reduce(square)
    norm = square.sqrt()
    for x in gradients:
        x.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


# --8<-- [end:engine]
# --8<-- [start:step]
def loss_sum_of(model, shard, attention):
    logits = model(shard["input_ids"], shard["position_ids"], attention)
    return F.cross_entropy(
        logits.float().flatten(0, 1),
        shard["shift_labels"].flatten(),
        ignore_index=-100,
        reduction="sum",
    )


def valid(shard):
    return (shard["shift_labels"] != -100).sum()


def train_step(model, optimizer, batches, groups, attention, max_norm):
    """The step's mean loss and gradient norm, the same on every rank."""
    shards = [shard_batch(batch, groups.sp) for batch in batches]
    num_tokens = sum(map(valid, shards))  # of the whole step, this rank's
    loss = 0
    for i, shard in enumerate(shards):
        with gradient_sync(model, needed=i + 1 == len(shards)):
            part = token_mean(
                loss_sum_of(model, shard, attention),
                num_tokens,
                None,
                gradient_divisor=dist.get_world_size(),
            )
            part.backward()
        loss += part.detach()
    norm = clip_gradients(model, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item(), num_tokens


# --8<-- [end:step]
# --8<-- [start:evaluate]
# --8<-- [start:mean]
@torch.no_grad()
def evaluate(model, samples, groups, attention, batch_size, device):
    """The mean loss over all tokens of `samples`, the same on every rank.

    Replicas have different numbers of batches, but the forward pass may hold
    collectives: all run as many, the last ones without a label.
    """
    own = samples[groups.dp_rank :: groups.dp_size]
    rounds = -(-len(samples) // (groups.dp_size * batch_size))
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for i in range(rounds):
        batch = collate(
            own[i * batch_size : (i + 1) * batch_size] or samples[:1]
        )
        if i * batch_size >= len(own):
            batch["labels"].fill_(-100)
        shard = shard_batch(to(device, batch), groups.sp)
        sums[0] += loss_sum_of(model, shard, attention)
        sums[1] += valid(shard)
    dist.all_reduce(sums)  # over all ranks: each token is on one of them
    return (sums[0] / sums[1]).item()


# --8<-- [end:mean]
# --8<-- [start:generate]
@torch.no_grad()
def generate(model, prompt, length, device):
    """`prompt` and `length` bytes more, the likeliest each.

    Every rank runs it, on the whole sequence: under FSDP2 the forward pass is
    collective.
    """
    ids = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        positions = torch.arange(ids.shape[1], device=device)[None]
        logits = model(ids, positions, sdpa)[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


# --8<-- [end:generate]
# --8<-- [end:evaluate]
# --8<-- [start:checkpoint]
def save_checkpoint(folder, step, model, optimizer):
    """Every rank calls it. The folder has its name once it is whole."""
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.state_dict import get_state_dict

    partial = folder / f"step-{step}.partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=partial)
    # It returns on rank 0 once all ranks have written.
    if dist.get_rank() == 0:
        shutil.rmtree(folder / f"step-{step}", ignore_errors=True)
        partial.rename(folder / f"step-{step}")
    dist.barrier()


def load_checkpoint(folder, model, optimizer):
    """The steps that the newest whole checkpoint has behind it; 0 without one.

    It may have been saved on other numbers of ranks, and at another SP size.
    """
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import (
        get_state_dict,
        set_state_dict,
    )

    steps = [
        int(path.name.removeprefix("step-"))
        for path in folder.glob("step-*")
        if path.suffix != ".partial"
    ]
    newest = [max(steps, default=0)]
    dist.broadcast_object_list(newest)  # all load what rank 0 sees
    if newest[0]:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        load(state, checkpoint_id=folder / f"step-{newest[0]}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    return newest[0]


# --8<-- [end:checkpoint]
def to(device, batch):
    return {name: x.to(device) for name, x in batch.items()}


# --8<-- [start:main]
def main():
    options = parse_options()
    stopping = []  # by SIGTERM, which may come at any time: here only noted
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    device = start(options.device)
    groups = create_parallel_groups(options.sequence_parallel_size)
    attention = functools.partial(ulysses_attention, group=groups.sp)
    samples, held_out = samples_of(options.tokens)

    model = train(options, samples, groups, attention, device, stopping)
    if not stopping:
        with_sp = evaluate(model, held_out, groups, attention, 4, device)
        alone = create_parallel_groups(1)  # each rank a replica
        without = evaluate(model, held_out, alone, sdpa, 4, device)
        text = generate(model, "The ", 60, device)
        if dist.get_rank() == 0:
            print(f"held out: {with_sp:.4f} with SP, {without:.4f} without")
            print(repr(text))
    dist.destroy_process_group()


def train(options, samples, groups, attention, device, stopping):
    """The trained model. Ends early, on all ranks, once one is `stopping`."""
    accumulation = accumulation_of(options, groups)
    torch.manual_seed(options.seed)  # the same weights on every rank
    model = Decoder(Config()).to(device)
    if options.compile:
        for layer in model.layers:
            layer.compile(dynamic=True)  # batches have many lengths
    model = wrap(model, options.engine)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
    folder, first = options.checkpoint_dir, 0
    if options.resume:
        first = load_checkpoint(folder, model, optimizer)
    loader = create_loader(
        samples,
        batch_size=options.micro_batch,
        dp_rank=groups.dp_rank,
        dp_size=groups.dp_size,
        seed=options.seed,
        collate_fn=collate,
    )
    steps = batches_of_steps(loader, accumulation, first)
    with Log(options.metrics, options.steps) as log:
        for step in range(first + 1, options.steps + 1):
            batches = [to(device, batch) for batch in next(steps)]
            if step == first + 1:
                for batch in batches:
                    check_same_batch(batch, groups.sp)
            loss, norm, num_tokens = train_step(
                model, optimizer, batches, groups, attention, options.max_norm
            )
            # --8<-- [start:agree]
            # One rank's SIGTERM ends all, after the same step.
            counts = torch.tensor([num_tokens, len(stopping)], device=device)
            dist.all_reduce(counts)
            tokens, stop = counts.tolist()
            log.write(step=step, loss=loss, grad_norm=norm, tokens=tokens)
            # --8<-- [end:agree]
            if folder and (stop or step % options.save_every == 0):
                save_checkpoint(folder, step, model, optimizer)
            if stop:
                stopping.append(True)
                break
    return model


def start(device):
    """The process group; NCCL where each rank has a GPU of its own."""
    backend = "gloo"
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
        if int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus:
            backend = "nccl"
    dist.init_process_group(backend)
    return torch.device(device)


def accumulation_of(options, groups):
    """How many micro-batches each replica has in a step."""
    at_once = options.micro_batch * groups.dp_size
    if options.global_batch % at_once:
        raise ValueError(
            f"--global-batch {options.global_batch} is no multiple of "
            f"{at_once}: {groups.dp_size} replicas with --micro-batch "
            f"{options.micro_batch}"
        )
    return options.global_batch // at_once


class Log:
    """A line of progress and a file of metrics, from rank 0."""

    def __init__(self, path, steps):
        self.steps, self.tokens, self.start = steps, 0, time.perf_counter()
        writes = path and dist.get_rank() == 0
        self.file = open(path, "a") if writes else None

    def __enter__(self):
        return self

    def write(self, **metrics):
        self.tokens += metrics["tokens"]
        if self.file:
            print(json.dumps(metrics), file=self.file, flush=True)
        if dist.get_rank() == 0:
            rate = self.tokens / (time.perf_counter() - self.start)
            print(
                f"\rstep {metrics['step']}/{self.steps}  "
                f"loss {metrics['loss']:.4f}  {rate:,.0f} tokens/s",
                end="",
                file=sys.stderr,
            )

    def __exit__(self, *error):
        if self.file:
            self.file.close()
        if dist.get_rank() == 0:
            print(file=sys.stderr)


# --8<-- [end:main]
if __name__ == "__main__":
    main()
