"""snippets/with_transformers/token_mean_trainer.py: Trainer takes the step that one process takes; its own does not."""

import re

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: nox -s engines-test")
pytest.importorskip("accelerate", reason="accelerate is not installed: nox -s engines-test")
pytest.importorskip("transformers", reason="transformers is not installed: nox -s engines-test")

import deepspeed
import torch
from token_mean_trainer import TokenMeanTrainer, gradient_divisor
from transformers import Trainer

from engine_gradients_transformers import (
    GRIDS,
    Grid,
    as_in_a_new_process,
    new_model,
    references,
    samples,
    training_arguments,
    whole_parameters,
)


def check(stage, grid, tmp_path, dataset=None, expected=None, **zero):
    deepspeed.init_distributed("gloo", verbose=False)
    loss, gradient = expected or references(grid)["tokens"]
    model = new_model()
    before = torch.cat([x.detach().double().flatten() for x in model.parameters()])
    arguments = training_arguments(stage, grid, tmp_path, **zero)
    trainer = TokenMeanTrainer(model, arguments, train_dataset=dataset or samples())
    assert trainer.train().training_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(before - whole_parameters(trainer.model), gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.distributed(world_size=4)
def test_step_of_one_process(stage, tmp_path):
    check(stage, Grid(2, 2, accumulation=2), tmp_path)


@pytest.mark.distributed(world_size=2)
def test_one_replica(tmp_path):
    check(1, Grid(1, 2, accumulation=2), tmp_path)


@pytest.mark.distributed(world_size=2)
def test_slice_without_a_label(tmp_path):
    dataset = samples()
    for sample in dataset:
        sample["labels"][:33] = -100
    model = new_model()
    logits = model(dataset[0]["input_ids"][None], position_ids=dataset[0]["position_ids"][None]).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, dataset[0]["labels"][1:])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected = loss.item(), torch.cat([x.double().flatten() for x in gradients])
    check(2, Grid(1, 2), tmp_path, dataset, expected)


@pytest.mark.distributed(world_size=2)
def test_evaluation_is_as_in_trainer(tmp_path):
    deepspeed.init_distributed("gloo", verbose=False)
    losses = []
    for kind in (Trainer, TokenMeanTrainer):
        with as_in_a_new_process():
            arguments = training_arguments(1, Grid(1, 2), tmp_path)
            arguments.learning_rate = 0.0
            trainer = kind(new_model(), arguments, train_dataset=samples(), eval_dataset=samples())
            trainer.train()
            losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]


@pytest.mark.distributed(world_size=2)
def test_without_sequence_parallelism_it_is_refused(tmp_path):
    deepspeed.init_distributed("gloo", verbose=False)
    arguments = training_arguments(1, Grid(1, 2), tmp_path)
    trainer = TokenMeanTrainer(new_model(), arguments, train_dataset=samples())
    batch = {"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 4)}
    with pytest.raises(ValueError, match=r"batches without shift_labels, sp_size=2: pass labels"):
        trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))


@pytest.mark.distributed(world_size=4)
def test_zero_3_without_reduce_scatter_is_refused():
    class Engine:
        def zero_optimization_stage(self):
            return 3

        def zero_reduce_scatter(self):
            return False

    with pytest.raises(ValueError, match='ZeRO 3 with "reduce_scatter": false does not divide all gradients'):
        gradient_divisor(Engine(), 2)


# ------------------------------------------------------------------------------------- what Trainer itself does


class Watching(Trainer):
    def get_batch_samples(self, *args):
        batches, self.number = super().get_batch_samples(*args)
        return batches, self.number


@pytest.mark.distributed(world_size=2)
def test_trainer_counts_no_items_and_ignores_a_loss_function(tmp_path):
    deepspeed.init_distributed("gloo", verbose=False)
    called = []

    def own_loss(outputs, labels, num_items_in_batch=None):
        called.append(num_items_in_batch)
        return outputs.logits.sum() * 0

    arguments = training_arguments(1, Grid(1, 2, accumulation=2), tmp_path)
    trainer = Watching(new_model(), arguments, train_dataset=samples(), compute_loss_func=own_loss)
    loss = trainer.train().training_loss
    assert trainer.number is None, "the adapter takes `labels` away, by which Trainer counts"
    assert called == []
    assert loss > 1


def train_with_its_own_loss(tmp_path):
    deepspeed.init_distributed("gloo", verbose=False)
    trainer = Trainer(new_model(), training_arguments(2, GRIDS[0], tmp_path), train_dataset=samples())
    trainer.train()


def test_trainers_own_loss_fails_on_gloo(launch, recorded, tmp_path):
    with pytest.raises(pytest.fail.Exception) as failed:
        launch(train_with_its_own_loss, world_size=4, timeout=30, tmp_path=tmp_path)
    report = str(failed.value)
    frames = re.findall(
        r"site-packages/(transformers/trainer|torch/distributed/nn/functional)(\.py:\d+: in \w+)", report
    )
    error = re.search(r"ValueError: Global rank 0 is not part of group", report)
    assert error, report
    lines = dict.fromkeys("".join(frame) for frame in frames)
    recorded("trainer_on_gloo.txt", "\n".join([*lines, error[0]]) + "\n")
