"""What each engine does with the gradient of each loss, measured: shared by its benchmark and its tests.

A small decoder with Ulysses attention takes one step of SGD with a learning rate so large that the step shows the
gradient, `(before - after) / rate`: the same measure for every engine, after whatever the engine does. It is compared
with gradients of one process that sees all samples whole.
"""

import contextlib
import functools
import re
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention import sdpa, ulysses_attention
from loss import token_mean, weighted_all_reduce
from loss_all_gather import all_gather_loss
from model import Config, Decoder
from process_groups import create_parallel_groups
from sharding import shard_batch

CONFIG = Config(vocabulary=48, hidden=32, layers=1, heads=4, kv_heads=2, mlp=48)
TOKENS = 64  # of a sample
KEPT = [0.25, 0.04, 0.95, 0.08]  # shares of valid labels, from slice to slice: uneven over ranks and over replicas


# ------------------------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class Engine:
    name: str
    stage: int | None = None  # of ZeRO
    groups: str = ""  # where ZeRO has them from: "mpu", an "own" one, or "sizes" in its config
    config: tuple = ()  # of DeepSpeed, beside that
    init: bool = False  # parameters partitioned by deepspeed.zero.Init over all ranks, before deepspeed.initialize


@dataclass(frozen=True)
class Setting:
    """Where engines run, with all that is not said as in the core."""

    name: str
    engines: tuple[Engine, ...]
    forms: tuple[str, ...]
    dp: int = 2
    sp: int = 2
    dtype: str = "float32"
    accumulation: int = 1

    def of(self, launch: str) -> list[Engine]:
        """The engines of one launch of ranks. DeepSpeed keeps groups for the whole process: `mpu` and `sizes` exclude
        each other there."""
        return [engine for engine in self.engines if (engine.groups or "plain") == launch]


def zero(stage: int, groups: str = "mpu", **config) -> Engine:
    said = {"mpu": "`mpu`", "own": "an own `mpu`", "sizes": "sizes in the config"}[groups]
    options = "".join(f', `"{key}": {str(value).lower()}`' for key, value in config.items())
    return Engine(f"DeepSpeed ZeRO {stage}, {said}{options}", stage, groups, tuple(config.items()))


OF_ZERO = ("reduce_scatter", "contiguous_gradients", "reduce_bucket_size")
DDP, FSDP2, FSDP2_DP = Engine("DDP"), Engine("FSDP2 over dp × sp"), Engine("FSDP2 over dp alone")
FORMS = ("token_mean", "weighted, mean", "weighted, sum", "all_gather", "in place", "local mean")
CORE = Setting(
    "core",
    (
        DDP,
        FSDP2,
        FSDP2_DP,
        *(zero(stage) for stage in range(4)),
        *(zero(stage, "sizes") for stage in (0, 2, 3)),
    ),
    FORMS,
)
INIT = replace(zero(3), name="DeepSpeed ZeRO 3, `mpu`, `zero.Init` over all ranks", init=True)
ENGINES = (DDP, FSDP2, *(zero(stage) for stage in range(4)))
SETTINGS = [
    CORE,
    Setting("dp 1", CORE.engines, FORMS, dp=1),
    Setting("sp 4", ENGINES, FORMS, dp=1, sp=4),
    Setting("bf16", ENGINES, FORMS, dtype="bfloat16"),
    Setting("accumulation", ENGINES, FORMS, accumulation=2),
    Setting(
        "reduce_scatter",
        (
            *(zero(stage, reduce_scatter=False) for stage in range(4)),
            zero(3, reduce_scatter=False, contiguous_gradients=False),
            zero(3, reduce_scatter=False, reduce_bucket_size=1200),  # less than the embedding has
        ),
        FORMS,
    ),
    Setting(
        "communication_data_type",
        (
            *(zero(stage, communication_data_type="bf16") for stage in range(4)),
            *(zero(stage, seq_parallel_communication_data_type="bf16") for stage in range(4)),
        ),
        FORMS,
    ),
    Setting("zero.Init", (INIT,), FORMS),
    Setting("own mpu", tuple(zero(stage, "own") for stage in range(4)), FORMS),
]


def divisor_of(engine: Engine, dp: int, sp: int) -> int:
    """D: the engine applies (1/D)·Σ over all ranks. Where not all ranks meet there is none, and this is what it divides
    by over those that do."""
    if engine is FSDP2_DP or (engine.groups == "sizes" and engine.stage < 3):
        return dp
    if engine.groups in ("mpu", "own") and (engine.stage < 3 or not dict(engine.config).get("reduce_scatter", True)):
        return dp
    return dp * sp


# ----------------------------------------------------------------------------------------------- samples


def samples(setting: Setting) -> list[dict]:
    """One for each replica and micro-batch, whole, and the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(setting.dp * setting.accumulation):
        input_ids = torch.randint(CONFIG.vocabulary, (1, TOKENS), generator=generator)
        width = TOKENS // setting.sp
        kept = [KEPT[(number * setting.sp + part + number // 2) % len(KEPT)] for part in range(setting.sp)]
        valid = torch.rand(1, TOKENS, generator=generator) < torch.tensor(kept).repeat_interleave(width)
        valid[:, 1::width] = True  # every slice has a label, so that a local mean is a number
        made.append({"input_ids": input_ids, "labels": input_ids.masked_fill(~valid, -100)})
    return made


def of_replica(setting: Setting, dp_rank: int) -> list[dict]:
    return samples(setting)[dp_rank :: setting.dp]


def new_model(dtype=torch.float32) -> Decoder:
    """With weights so large that the loss differs from token to token, as after some training."""
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.dim() == 2 else 1)
    return model.to(dtype)


def loss_sum_of(model, shard, attention):
    logits = model(shard["input_ids"], shard["position_ids"], attention)
    labels = shard["shift_labels"].flatten()
    return F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum"), (labels >= 0).sum()


def references(setting: Setting, alone) -> dict[str, tuple[float, torch.Tensor]]:
    """Loss and gradient of three means, in one process and fp32, with no parallelism in it."""
    means = {"tokens": [], "replicas": [], "slices": []}
    model = new_model(getattr(torch, setting.dtype)).float()  # the weights that a model in this precision has
    whole = [shard_batch(sample, alone) for sample in samples(setting)]
    all_tokens = sum((shard["shift_labels"] >= 0).sum() for shard in whole)
    for shard in whole:
        logits = model(shard["input_ids"], shard["position_ids"], sdpa).float()[0]
        losses = F.cross_entropy(logits, shard["shift_labels"][0], reduction="none")
        valid = shard["shift_labels"][0] >= 0
        slices = [
            part.sum() / v.sum() for part, v in zip(losses.chunk(setting.sp), valid.chunk(setting.sp), strict=True)
        ]
        means["tokens"].append(losses.sum() / all_tokens * len(whole))
        means["replicas"].append(losses.sum() / valid.sum())
        means["slices"].append(sum(slices) / len(slices))
    found = {}
    for name, parts in means.items():
        loss = sum(parts) / len(parts)
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        found[name] = loss.item(), torch.cat([x.flatten() for x in gradients]).double()
    return found


# --------------------------------------------------------------------------------------------- loss forms


def in_place(loss, weight, group):
    """As in the public regression test: autograd knows nothing of the all-reduce."""
    total, weight = loss * weight, weight.clone()
    dist.all_reduce(total, group=group)
    dist.all_reduce(weight, group=group)
    return total / weight


def loss_of(form: str, loss_sum, tokens, step_tokens, groups, divisor):
    mean = loss_sum / tokens
    if form == "token_mean":
        return token_mean(loss_sum, step_tokens, None, gradient_divisor=divisor)
    if form.startswith("weighted"):
        return weighted_all_reduce(mean, tokens, groups.sp, gradient_reduction=form.split(", ")[1])
    if form == "all_gather":
        return all_gather_loss(mean, tokens, groups.sp)
    return in_place(mean, tokens, groups.sp) if form == "in place" else mean


def error_of(form: str, groups) -> str | None:
    """What backward of the loss raises on the first rank where it does, less addresses in memory.

    Within an engine, the others would hang.
    """
    local = torch.ones((), requires_grad=True)
    count = torch.tensor(2)
    error = None
    try:
        loss_of(form, local * 2, count, count, groups, 1).backward()
    except Exception as raised:
        text = re.sub(r" <.* object at 0x\w+>", " …", str(raised).partition("\n")[0])
        error = f"{type(raised).__name__}: {text}"
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((text for text in errors if text), None)


# ----------------------------------------------------------------------------------------------- engines


class Plain:
    """DDP and FSDP2, with the loop that torch's documentation has."""

    divides_by_accumulation = False

    def __init__(self, engine: Engine, setting: Setting, mesh, rate: float):
        self.model = new_model(getattr(torch, setting.dtype))
        if engine is DDP:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        else:
            from torch.distributed.fsdp import fully_shard

            over = mesh["dp"] if engine is FSDP2_DP else None
            for layer in self.model.layers:
                fully_shard(layer, mesh=over)
            fully_shard(self.model, mesh=over)
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate)

    def backward(self, loss, last: bool):
        loss.backward()

    def sync(self, last: bool):
        if hasattr(self.model, "no_sync"):
            return contextlib.nullcontext() if last else self.model.no_sync()
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def step(self):
        self.optimizer.step()

    def parameters(self) -> torch.Tensor:
        whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in self.model.parameters()]
        return flat(whole)


class DeepSpeed:
    divides_by_accumulation = True

    def __init__(self, engine: Engine, setting: Setting, mpu, rate: float):
        import deepspeed

        model = new_model()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": setting.accumulation,
            "zero_optimization": {"stage": engine.stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # 1.0 unless told otherwise: it would hide every factor above 1
            "bf16": {"enabled": setting.dtype == "bfloat16"},
        }
        for key, value in engine.config:
            (config["zero_optimization"] if key in OF_ZERO else config)[key] = value
        if engine.groups == "sizes":
            config |= {"sequence_parallel_size": setting.sp, "data_parallel_size": setting.dp}
        if engine.init:
            everyone = mpu.get_sequence_data_parallel_group()
            deepspeed.zero.Init(module=model, data_parallel_group=everyone, config_dict_or_path=config, mpu=mpu)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, mpu=mpu, config=config)

    def sync(self, last: bool):
        return contextlib.nullcontext()

    def backward(self, loss, last: bool):
        self.model.backward(loss)
        if not last:
            self.model.step()

    def step(self):
        self.model.step()

    def parameters(self) -> torch.Tensor:
        return flat(map(whole, self.model.module.parameters()))


def whole(parameter) -> torch.Tensor:
    """ZeRO 3's parts, gathered here, so that nothing of DeepSpeed's gathering is in the measure."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter
    parts = [torch.empty_like(parameter.ds_tensor) for _ in range(dist.get_world_size(parameter.ds_process_group))]
    dist.all_gather(parts, parameter.ds_tensor.contiguous(), group=parameter.ds_process_group)
    return torch.cat(parts)[: parameter.ds_numel]


def flat(parameters) -> torch.Tensor:
    return torch.cat([x.detach().double().flatten() for x in parameters])


# ----------------------------------------------------------------------------------------------- measured


def measure(setting: Setting, launch: str, forms=None) -> list[dict]:
    """Each engine of this launch with each form: called by all ranks, and the same rows on all."""
    groups = create_parallel_groups(setting.sp)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    expected = references(setting, alone)
    mpu, mesh = None, None
    engines = setting.of(launch)
    if launch != "plain":
        import deepspeed

        deepspeed.init_distributed("gloo")
    if launch in ("mpu", "own"):
        mpu = make_mpu(setting.sp, groups, launch)
    elif FSDP2_DP in engines:
        from process_groups import create_mesh

        mesh = create_mesh(setting.sp, "cpu")
    errors = {form: error_of(form, groups) for form in forms or setting.forms}
    rows = []
    for engine in engines:
        for form, error in errors.items():
            row = {"engine": engine.name, "form": form}
            rows.append(row | ({"verdict": "raises", "error": error} if error else {}))
            if not error:
                kind = DeepSpeed if engine.groups else Plain
                step = one_step(kind, engine, form, setting, groups, mpu or mesh)
                rows[-1] |= judged(*step, expected, tolerance_of(engine, setting))
    return rows


def make_mpu(sp: int, groups, launch: str):
    """What DeepSpeed takes as `mpu`: its own module, where it has one."""
    if launch == "mpu":
        with contextlib.suppress(ImportError):  # DeepSpeed 0.16.9
            from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

            mpu.initialize_sequence_parallel(sequence_parallel_size=sp)
            return mpu
    return OwnMpu(groups)


class OwnMpu:
    """What a DeepSpeed without parallel_state_sp asks for in its groups.py, with the DP group that it needs there."""

    def __init__(self, groups):
        self.groups = groups

    def get_sequence_parallel_group(self):
        return self.groups.sp

    def get_sequence_parallel_world_size(self):
        return self.groups.sp_size

    def get_sequence_parallel_rank(self):
        return self.groups.sp_rank

    def get_sequence_data_parallel_group(self):
        return dist.group.WORLD

    def get_sequence_data_parallel_world_size(self):
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self):
        return dist.get_rank()

    def get_data_parallel_group(self):
        return self.groups.dp

    def get_data_parallel_world_size(self):
        return self.groups.dp_size

    def get_data_parallel_rank(self):
        return self.groups.dp_rank

    # one dimension beside DP: SP stands for the model-parallel one, as in parallel_state_sp
    get_model_parallel_group = get_sequence_parallel_group
    get_model_parallel_world_size = get_sequence_parallel_world_size
    get_model_parallel_rank = get_sequence_parallel_rank


def one_step(kind, engine: Engine, form: str, setting: Setting, groups, groups_of_engine):
    """The loss that one would log, and the gradient that the step took on this rank."""
    rate = 1.0 if setting.dtype == "float32" else 1024.0  # so that the step outgrows what bf16 rounds off
    running = kind(engine, setting, groups_of_engine, rate)
    before = running.parameters()
    attention = functools.partial(ulysses_attention, group=groups.sp)
    shards = [shard_batch(sample, groups.sp) for sample in of_replica(setting, groups.dp_rank)]
    step_tokens = sum((shard["shift_labels"] >= 0).sum() for shard in shards)
    divisor = divisor_of(engine, setting.dp, setting.sp)
    if running.divides_by_accumulation:
        divisor *= setting.accumulation
    logged = 0.0
    for i, shard in enumerate(shards):
        last = i + 1 == len(shards)
        with running.sync(last):
            loss_sum, tokens = loss_sum_of(running.model, shard, attention)
            loss = loss_of(form, loss_sum, tokens, step_tokens, groups, divisor)
            if form == "token_mean":
                logged += loss.item()
            else:
                logged += loss.item() / setting.accumulation
                if not running.divides_by_accumulation:
                    loss = loss / setting.accumulation
            running.backward(loss, last)
    running.step()
    return logged, (before - running.parameters()) / rate


def tolerance_of(engine: Engine, setting: Setting) -> float:
    """What rounding may leave of a gradient, relative: the next wrong one is 0.3 away."""
    low = setting.dtype == "bfloat16" or "bf16" in dict(engine.config).values()
    return 0.05 if low else 1e-4


def judged(logged: float, gradient: torch.Tensor, expected: dict, tolerance: float) -> dict:
    """The verdict on what all ranks took for the gradient, and the figures that it rests on.

    `ranks differ`, `not proportional` to any of the means, or else `factor` times the gradient of the mean over `of`.
    It is `right` with 1 × tokens where the loss is right too. Parameters are judged with it, as it is read from them.
    """
    world = dist.get_world_size()
    everyone = [torch.empty_like(gradient) for _ in range(world)]
    dist.all_gather(everyone, gradient)
    losses = torch.tensor(logged, dtype=torch.float64)
    dist.all_reduce(losses)
    gradient, loss = everyone[0], losses.item() / world
    fits, row = {}, {"loss_error": significant(abs(loss / expected["tokens"][0] - 1))}
    for name, (_, reference) in expected.items():
        factor = (gradient @ reference / (reference @ reference)).item()
        residual = ((gradient - factor * reference).norm() / gradient.norm()).item()
        fits[name] = residual, factor
    row |= {"factor": significant(fits["tokens"][1]), "residual": significant(fits["tokens"][0])}
    nearest = min(fits, key=fits.get)
    if not all(torch.equal(other, gradient) for other in everyone):
        return {"verdict": "ranks differ"} | row
    if fits[nearest][0] > tolerance:
        return {"verdict": "not proportional"} | row
    residual, factor = fits[nearest]
    right = nearest == "tokens" and abs(factor - 1) < tolerance and row["loss_error"] < tolerance
    row |= {"factor": significant(factor), "residual": significant(residual), "of": nearest}
    return {"verdict": "right" if right else "scaled"} | row


def significant(x: float) -> float:
    return float(f"{x:.4g}")


def same(old: dict, new: dict) -> bool:
    """Whether a cell is as recorded; figures may differ by rounding, as between machines."""
    if {key: old.get(key) for key in ("verdict", "of")} != {key: new.get(key) for key in ("verdict", "of")}:
        return False
    return all(abs(old[key] - new[key]) < 2e-3 for key in ("factor", "residual", "loss_error") if key in old)


def launches() -> list[tuple[int, str]]:
    """What is run at once: a setting's number, and where its engines have groups from."""
    return [
        (number, launch)
        for number, setting in enumerate(SETTINGS)
        for launch in ("plain", "mpu", "own", "sizes")
        if setting.of(launch)
    ]
