"""What Transformers, Accelerate and the Trainer do with each loss's gradient: shared by a benchmark and its tests.

As engine_gradients.py, whose verdicts these are, with a Llama of two layers, DeepSpeed's attention and DeepSpeed's
loader. The loader hands an SP group the samples of its ranks in turn, one a micro-batch.
"""

import contextlib
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine_gradients import error_of, flat, judged, loss_of
from process_groups import create_parallel_groups

VOCABULARY, TOKENS = 48, 64
STAGES = (0, 1, 2, 3)
# Shares of valid labels in the quarters of each rank's sample: uneven over slices, micro-batches and replicas.
KEPT = [[0.1, 0.04, 0.3, 0.05], [0.9, 0.3, 0.95, 0.5], [0.2, 0.95, 0.9, 0.8], [0.05, 0.1, 0.04, 0.2]]


@dataclass(frozen=True)
class Grid:
    dp: int
    sp: int
    accumulation: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.sp

    @property
    def name(self) -> str:
        steps = f", {self.accumulation} micro-batches" if self.accumulation > 1 else ""
        return f"dp {self.dp} × sp {self.sp}{steps}"


GRIDS = [Grid(2, 2), Grid(1, 4), Grid(1, 2, accumulation=2), Grid(2, 2, accumulation=2)]
LAST = "token_mean, where the data ends"  # with Accelerate's default, sync_with_dataloader
FORMS = {
    "DeepSpeed": ("all_gather", "weighted, mean", "weighted, sum", "token_mean"),
    "Accelerate": ("its guide", "token_mean", LAST),
    "Trainer": ("its own", "token_mean"),
}


def forms_of(library: str, grid: Grid) -> list[str]:
    # with two replicas, the four samples are the last; with one, there are more
    return [form for form in FORMS[library] if form != LAST or (grid.dp > 1 and grid.accumulation > 1)]


# ------------------------------------------------------------------------------------- samples and model


def samples() -> list[dict]:
    """One for each rank's loader, whole, and the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for kept in KEPT:
        input_ids = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        valid = torch.rand(TOKENS, generator=generator) < torch.tensor(kept).repeat_interleave(TOKENS // 4)
        valid[1 :: TOKENS // 4] = True  # every slice has a label, so that a local mean is a number
        labels = input_ids.masked_fill(~valid, -100)
        made.append({"input_ids": input_ids, "labels": labels, "position_ids": torch.arange(TOKENS)})
    return made


def of_the_step(grid: Grid) -> list[dict]:
    """What SP groups take in one step from `samples()`, by the loaders' order."""
    whole = samples()
    return [whole[group * grid.sp + number] for number in range(grid.accumulation) for group in range(grid.dp)]


def new_model():
    """With weights so large that the loss differs from token to token, as after some training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.dim() == 2 else 1)
    return model


def references(grid: Grid) -> dict[str, tuple[float, torch.Tensor]]:
    """Loss and gradient of three means, in one process, before anything replaces its attention."""
    model = new_model()
    means = {"tokens": [], "replicas": [], "slices": []}
    step = of_the_step(grid)
    all_tokens = sum((sample["labels"][1:] >= 0).sum() for sample in step)
    for sample in step:
        logits = model(sample["input_ids"][None], position_ids=sample["position_ids"][None]).logits[0]
        labels = F.pad(sample["labels"][1:], (0, 1), value=-100)
        losses, valid = F.cross_entropy(logits, labels, reduction="none"), labels >= 0
        slices = [x.sum() / v.sum() for x, v in zip(losses.chunk(grid.sp), valid.chunk(grid.sp), strict=True)]
        means["tokens"].append(losses.sum() / all_tokens * len(step))
        means["replicas"].append(losses.sum() / valid.sum())  # of each sample: of micro-batches as well
        means["slices"].append(sum(slices) / len(slices))
    found = {}
    for name, parts in means.items():
        loss = sum(parts) / len(parts)
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        found[name] = loss.item(), flat(gradients)
    return found


# ----------------------------------------------------------------------------------------------- engines


def zero_config(stage: int, grid: Grid) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": grid.accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 unless told otherwise: it would hide every factor above 1
    }


@contextlib.contextmanager
def as_in_a_new_process():
    """Undoes what these libraries keep for a whole process: states, groups, and the attention that they replace."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
    from accelerate.state import AcceleratorState, GradientState
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
        mpu._SEQUENCE_PARALLEL_GROUP = mpu._SEQUENCE_DATA_PARALLEL_GROUP = None
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def whole_parameters(model) -> torch.Tensor:
    import deepspeed

    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return flat(parameters)


def divisor_of(stage: int, grid: Grid) -> int:
    return grid.world if stage == 3 else grid.dp


def loader():
    from torch.utils.data import DataLoader

    return DataLoader(samples(), batch_size=1)


def loss_sum_of(logits, shard):
    labels = shard["shift_labels"].flatten()
    return F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum"), (labels >= 0).sum()


def deepspeed_step(stage: int, form: str, grid: Grid, groups) -> tuple[float, torch.Tensor]:
    """By hand, as DeepSpeed's tutorial has it; gives the loss that one would log, and the step taken."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    model = new_model()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=grid.sp,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero_config(stage, grid), mpu=mpu)
    own = torch.utils.data.DataLoader(samples()[dist.get_rank() :: grid.world], batch_size=1)
    adapter = UlyssesSPDataLoaderAdapter(
        own,
        sp_rank=mpu.get_sequence_parallel_rank(),
        sp_group=mpu.get_sequence_parallel_group(),
        sp_world_size=grid.sp,
        device=torch.device("cpu"),
    )
    before = whole_parameters(model)
    shards = [next(adapter) for _ in range(grid.accumulation)]
    step_tokens = sum((shard["shift_labels"] >= 0).sum() for shard in shards)
    logged = 0.0
    for shard in shards:
        logits = engine(shard["input_ids"], position_ids=shard["position_ids"]).logits
        divisor = divisor_of(stage, grid) * grid.accumulation
        loss = loss_of(form, *loss_sum_of(logits, shard), step_tokens, groups, divisor)
        logged += loss.item() / (1 if form == "token_mean" else grid.accumulation)
        engine.backward(loss)
        engine.step()
    return logged, before - whole_parameters(model)


def new_accelerator(stage: int, grid: Grid, *, sync_with_dataloader=False):
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from accelerate.utils import GradientAccumulationPlugin

    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero_config(stage, grid)),
        parallelism_config=parallelism(grid),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=grid.accumulation, sync_with_dataloader=sync_with_dataloader
        ),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )


def parallelism(grid: Grid):
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    return ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=grid.sp,
        dp_shard_size=grid.dp,
        sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"),
    )


def accelerate_step(stage: int, form: str, grid: Grid, groups) -> tuple[float, torch.Tensor]:
    accelerator = new_accelerator(stage, grid, sync_with_dataloader=form == LAST)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    before = whole_parameters(model)
    batches = iter(batches)
    shards = [next(batches) for _ in range(grid.accumulation)]
    step_tokens = sum((shard["shift_labels"] >= 0).sum() for shard in shards)
    logged = 0.0
    for shard in shards:
        with accelerator.accumulate(model):
            logits = model(shard["input_ids"], position_ids=shard["position_ids"]).logits
            divisor = divisor_of(stage, grid) * grid.accumulation
            of = "all_gather" if form == "its guide" else "token_mean"
            loss = loss_of(of, *loss_sum_of(logits, shard), step_tokens, groups, divisor)
            logged += loss.item() / (grid.accumulation if form == "its guide" else 1)
            accelerator.backward(loss)
            optimizer.step()
    return logged, before - whole_parameters(model)


def training_arguments(stage: int, grid: Grid, directory: Path, **more):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(directory),
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=grid.accumulation,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        deepspeed=zero_config(stage, grid),
        parallelism_config=parallelism(grid),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **more,
    )


def trainer_step(stage: int, form: str, grid: Grid, groups, directory: Path) -> tuple[float, torch.Tensor]:
    from token_mean_trainer import TokenMeanTrainer
    from transformers import Trainer

    kind = {"its own": Trainer, "token_mean": TokenMeanTrainer}[form]
    model = new_model()
    before = flat(model.parameters())
    trainer = kind(model, training_arguments(stage, grid, directory), train_dataset=samples())
    logged = trainer.train().training_loss
    return logged, before - whole_parameters(trainer.model)


def error_of_trainer(grid: Grid) -> str | None:
    """What backward of the Trainer's own loss raises on the first rank where it does. Its function is called with a
    model that only has a loss: within an engine, the other ranks would hang."""
    import types

    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
    import deepspeed.utils.groups
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    mpu.initialize_sequence_parallel(grid.sp)
    deepspeed.utils.groups.mpu = mpu
    loss = torch.ones((), requires_grad=True)
    error = None
    try:
        outputs = types.SimpleNamespace(loss=loss * 2)
        shard = {"shift_labels": torch.zeros(1, 4, dtype=torch.long)}
        deepspeed_sp_compute_loss(None, lambda **_: outputs, shard, False, parallelism(grid)).backward()
    except Exception as raised:
        error = without_addresses(raised)
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((text for text in errors if text), None)


def without_addresses(error: Exception) -> str:
    text = re.sub(r" <.* object at 0x\w+>", " …", str(error).partition("\n")[0])
    return f"{type(error).__name__}: {text}"


# ----------------------------------------------------------------------------------------------- measured


def measure(library: str, grid: Grid, directory: Path, stages=STAGES) -> list[dict]:
    """Each stage with each form of the loss: called by all ranks, and the same rows on all."""
    import deepspeed

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"  # as Accelerate leaves it behind
    deepspeed.init_distributed("gloo", verbose=False)
    groups = create_parallel_groups(grid.sp)
    expected = references(grid)
    errors = dict.fromkeys(forms_of(library, grid))
    if library == "Trainer":
        with as_in_a_new_process():
            errors["its own"] = error_of_trainer(grid)
    else:
        gathers = "its guide" if library == "Accelerate" else "all_gather"
        errors[gathers] = error_of("all_gather", groups)
    step = {
        "DeepSpeed": deepspeed_step,
        "Accelerate": accelerate_step,
        "Trainer": functools.partial(trainer_step, directory=directory),
    }[library]
    rows = []
    for stage in stages:
        for form, error in errors.items():
            row = {"library": library, "stage": stage, "form": form}
            if error:
                rows.append(row | {"verdict": "raises", "error": error})
                continue
            with as_in_a_new_process():
                logged, gradient = step(stage, form, grid, groups)
            right = expected["tokens"][1]
            off = ((gradient - right).norm() / right.norm()).item()
            rows.append(row | judged(logged, gradient, expected, 1e-4) | {"off": float(f"{off:.4g}")})
    return rows


def launches() -> list[tuple[str, int]]:
    """What is run at once: a library, and a grid's number."""
    return [(library, number) for library in FORMS for number in range(len(GRIDS))]
