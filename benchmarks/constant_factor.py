"""What a gradient that is SP times too large does to training: the same steps with it and without, in one process.

    python benchmarks/constant_factor.py

Writes docs/_data/constant_factor.json.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "snippets"), str(ROOT / "tests")]
STEPS, FACTORS, BATCH, TOKENS = 100, [2, 8], 8, 64
# name: the optimizer, and the norm at which gradients are clipped
OPTIMIZERS = {
    "AdamW": (lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1), None),
    "AdamW, clipped at norm 1": (lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1), 1.0),
    "Adam with L2 weight decay": (lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.1), None),
    "SGD": (lambda p: torch.optim.SGD(p, 0.03), None),
}


def batches():
    """Bytes of Python's own documentation, in the same order for every run."""
    from train import samples_of

    samples = [x for x in samples_of(TOKENS)[0] if len(x) == TOKENS]
    generator = torch.Generator().manual_seed(0)
    for step in torch.randperm(len(samples), generator=generator)[: STEPS * BATCH].view(STEPS, BATCH):
        yield torch.stack([samples[i] for i in step])


def train(make_optimizer, max_norm, factor):
    """The loss at each step, and the parameters after the last."""
    from attention import sdpa
    from model import Config, Decoder

    torch.manual_seed(0)
    model = Decoder(Config())
    optimizer = make_optimizer(model.parameters())
    positions = torch.arange(TOKENS - 1)[None]
    losses = []
    for ids in batches():
        logits = model(ids[:, :-1], positions, sdpa)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        (factor * loss).backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.cat([x.detach().flatten() for x in model.parameters()])


def main() -> None:
    from measured import write

    runs = []
    for name, (make_optimizer, max_norm) in OPTIMIZERS.items():
        losses, right = train(make_optimizer, max_norm, 1)
        runs.append({"optimizer": name, "loss": [round(x, 4) for x in losses], "factors": []})
        for factor in FACTORS:
            losses, wrong = train(make_optimizer, max_norm, factor)
            apart = ((wrong - right).norm() / right.norm()).item()
            runs[-1]["factors"].append(
                {"factor": factor, "loss": [round(x, 4) for x in losses], "parameters_apart": float(f"{apart:.2g}")}
            )
    write("constant_factor", "cpu", steps=STEPS, batch=BATCH, tokens=TOKENS, runs=runs)


if __name__ == "__main__":
    main()
