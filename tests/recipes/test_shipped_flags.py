"""What the reference trainers took as flags, a recipe says in fields: each flag has one."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from lockstep.recipes.shipped import find
from lockstep.recipes.toml import from_toml, to_toml, with_settings

INCEPTION_TRAIN = {
    "max_steps": "end.count=10000000",
    "subset": "data.split=train",
    "data_dir": "data.train=mydata/train-*",
    "batch_size": "batch_size=32",
    "image_size": "data.image_size=299",
    "num_gpus": "num_towers=1",
    "num_preprocess_threads": "feed.num_threads=4",
    "num_readers": "feed.num_processes=4",
    "initial_learning_rate": "optimizer.lr.initial=0.1",
    "num_epochs_per_decay": "optimizer.lr.decay_steps.count=30",
    "learning_rate_decay_factor": "optimizer.lr.factor=0.16",
    "fine_tune": r'warm_start.mapping.skip=["^fc\\.", "^AuxLogits\\.fc\\."]',
    "pretrained_model_checkpoint_path": "warm_start.path=model.ckpt-157585",
}
DISTRIBUTED_TRAIN = {
    "max_steps": "end.count=1000000",
    "subset": "data.split=train",
    "save_interval_secs": "checkpoints.every=600 s",
    "save_summaries_secs": "watch.summaries=180 s",
    "initial_learning_rate": "optimizer.lr.initial=0.045",
    "num_epochs_per_decay": "optimizer.lr.decay_steps.count=2",
    "learning_rate_decay_factor": "optimizer.lr.factor=0.94",
}
SLIM_TRAIN = {
    "num_clones": "num_towers=1",
    "clone_on_cpu": "device=cpu",
    "num_readers": "feed.num_processes=4",
    "num_preprocessing_threads": "feed.num_threads=4",
    "log_every_n_steps": "watch.console=10 steps",
    "save_summaries_secs": "watch.summaries=600 s",
    "save_interval_secs": "checkpoints.every=600 s",
    "weight_decay": 'regularization=[{kind = "l2", weight = 4e-5}]',
    "label_smoothing": "loss.label_smoothing=0",
    "moving_average_decay": "average.decay=0.9999",
    "dataset_dir": "data.train=flowers/flowers_train_*",
    "dataset_split_name": "data.split=validation",
    "labels_offset": "data.labels_offset=1",
    "model_name": "model.kind=squeezenet",
    "preprocessing_name": "data.preprocessing.kind=vgg",
    "batch_size": "batch_size=32",
    "train_image_size": "data.image_size=224",
    "max_number_of_steps": "end.count=1000",
    "checkpoint_path": "warm_start.path=inception_v3.ckpt",
    "checkpoint_exclude_scopes": r'warm_start.mapping.skip=["^fc\\.", "^AuxLogits\\."]',
    "trainable_scopes": r'train_only=["^fc\\.", "^AuxLogits\\."]',
    "ignore_missing_vars": "warm_start.mapping.ignore_missing=true",
}


@pytest.mark.parametrize("flag", INCEPTION_TRAIN)
def test_a_flag_of_the_inception_trainer_is_a_field(flag: str) -> None:
    check(INCEPTION_TRAIN[flag])


@pytest.mark.parametrize("flag", DISTRIBUTED_TRAIN)
def test_a_flag_of_the_distributed_trainer_is_a_field(flag: str) -> None:
    check(DISTRIBUTED_TRAIN[flag])


@pytest.mark.parametrize("flag", SLIM_TRAIN)
def test_a_flag_of_slims_trainer_is_a_field(flag: str) -> None:
    check(SLIM_TRAIN[flag])


def check(setting: str) -> None:
    """It stands there in the file of the run, which is read back."""
    changed = with_settings(find("inception_v3"), ["num_towers=1", "data.image_size=224", setting])
    text = to_toml(changed)
    assert from_toml(text, "text") == changed
    path, _, given = setting.partition("=")
    found: Any = tomllib.loads(text)
    for name in path.split("."):
        found = found[name]
    assert found == (given if isinstance(found, str) else tomllib.loads(f"value = {given}")["value"])


def test_all_of_inception_trains_flags_fit_together() -> None:
    settings = [setting for flag, setting in INCEPTION_TRAIN.items() if flag != "num_readers"]
    assert with_settings(find("inception_v3"), settings).warm_start is not None


def test_all_of_slims_flags_fit_together() -> None:
    settings = [setting for flag, setting in SLIM_TRAIN.items() if flag != "num_readers"]
    changed = with_settings(find("inception_v3"), [*settings, "model.num_classes=5"])
    assert (changed.loss.label_smoothing, changed.data.split) == (0, "validation")
