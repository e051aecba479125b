"""Every row of the page for those who come from other trainers is carried out: what it quotes trains, scores or reads.

The commands among it are run by `test_document_commands.py`, and the code between the tables by `test_coming_from.py`.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from test_coming_from import FIELDS, HERE, PAGE
from tiny_images import image_folder
from torch import Tensor, nn
from torch.optim import lr_scheduler

import lockstep as ls
from lockstep.cli import train as cli_train
from lockstep.optim.schedules import resolve_schedule
from lockstep.readers.combine import Subset, split
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.toml import to_toml, with_settings
from tests.saved_runs import recipe_of_photos, saved

COMMANDS = [code for code in HERE if code.startswith("lockstep ")]
FLAGS = [code for code in HERE if code.startswith("--")]
COCO = Path(__file__).parent / "fixtures" / "coco"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos of five classes, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        image_folder(Path("photos") / part, 2, "abcde")
    return tmp_path


# Schedules ------------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ls.optim.Cosine(0.1, ls.Epochs(90))": lambda o: lr_scheduler.CosineAnnealingLR(o, 90),
    "ls.optim.Exponential(0.1, ls.Epochs(30), 0.1)": lambda o: lr_scheduler.StepLR(o, 30, 0.1),
    "ls.optim.PiecewiseConstant((ls.Epochs(30), ls.Epochs(60)), (0.1, 0.01, 0.001))": lambda o: (
        lr_scheduler.MultiStepLR(o, [30, 60])
    ),
    "ls.optim.Exponential(0.1, ls.Epochs(1), 0.95)": lambda o: lr_scheduler.ExponentialLR(o, 0.95),
    "ls.optim.OneCycle(0.4, 10_000)": lambda o: lr_scheduler.OneCycleLR(o, 0.4, 10_000),
    "ls.optim.Polynomial(0.1, 10_000, final=0.0, power=1.0)": lambda o: lr_scheduler.PolynomialLR(o, 10_000, 1.0),
    "lambda step: 0.1 * 0.5 ** (step // 1000)": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5 ** (step // 1000)),
    "ls.optim.Warmup(schedule, 500)": lambda o: lr_scheduler.LinearLR(o, 1e-12, total_iters=500),
    "ls.optim.Cosine(0.1, ls.Epochs(90), warmup_steps=500)": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 1e-12, total_iters=500), lr_scheduler.CosineAnnealingLR(o, 400)], [500]
    ),
    "ls.optim.ScaledByBatch(0.1, base_batch_size=256)": lambda o: lr_scheduler.ConstantLR(o, 1.0),
}
"""The schedulers of torch that those of the page stand for, around an optimizer with a rate of 0.1."""


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("code", SCHEDULES)
def test_a_schedule_has_the_rates_of_torchs(code: str) -> None:
    steps_an_epoch = 10 if "warmup" in code else 1
    ours = resolve_schedule(eval(code, {"ls": ls, "schedule": 0.1}), 256 * steps_an_epoch, 256)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    theirs = SCHEDULES[code](optimizer)
    for step in range(10_000 if "10_000" in code else 900 if "warmup" in code else 90):
        assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-9), step
        theirs.step()


# The library ----------------------------------------------------------------------------------------------------------

CALLS = {
    r"ls\.TrainState\(\.\.\., (.*)\)": r"update(ls.TrainState(model, optimizer, \1))",
    r"(ls\.TrainState\(model, optimizer\)|ls\.TrainState\(model, \{.*\}\))": r"update(\1)",
    r"(\{r\".*\})": r"update(ls.TrainState(model, \1))",
    r"((?:average|regularization|gradient_transforms)=\[?ls.*)": r"update(ls.TrainState(model, optimizer, \1))",
    r"(weight_decay=\{.*)": r"update(ls.TrainState(model, ls.optim.SGD(0.1, \1)))",
    r"(ls\.optim\.(?:AdamW|FromTorch)\(.*\))": r"update(ls.TrainState(model, \1))",
    r"(ls\.Towers\(.*\))": r"update(state, towers=\1)",
    r"(ls\.AllReduce\(.*\))": r"update(state, exchange=\1)",
    r"ls\.data\.Loader\(\.\.\., (.*)\)|(order=\".*|order=ls\.data\.Weighted.*)": (
        r"update(state, ls.data.Loader(reader, batch_size=8, \1\2))"
    ),
    r"(?:order=)?(ls\.data\.Balanced\(.*)": r"update(state, ls.data.Loader(reader, batch_size=8, order=\1))",
    r"(ls\.data\.Mixture\(.*)": r"weights = sizes; update(state, ls.data.Loader(reader, batch_size=8, order=\1))",
    r"ls\.data\.IterableLoader\(.*": r"update(state, \g<0>)",
    r"split\(reader, .*": r'update(state, ls.data.Loader(\g<0>["train"], batch_size=8))',
    r"(ls\.data\.ImageFolder\(\"photos)(\"\))": r"\1/train\2.read_batch(first)",
    r"(ls\.data\.DetectionReader\(reader, .*)": r"reader = coco; \1.read_batch(first)",
    r"ls\.augmentations\.MixDraws\(.*": r"mixing = \g<0>; update(images, photos(\g<0>), mixed_losses(mixing))",
    r"ls\.augmentations\.\w+\(.*": r"update(images, photos(\g<0>))",
    r"ls\.(evaluate|run)\(\.\.\., (metrics=.*)\)": r"\1_with(\2)",
    r"ls\.evaluate\((?:\.\.\.|state, score, held_out)(.*)\)": r"ls.evaluate(state, score, held_out\1)",
    r"score\(model, batch\)": r"ls.evaluate(state, score, held_out)",
    r"losses\(model, batch\)": r"update(state)",
    r"(ls\.train\(state, losses, loader, towers, ).*": r"\1until=ls.Steps(2), hooks=[hook])",
    r"(ls\.every\(.*\))": r"ls.train(state, losses, loader, until=ls.Epochs(2), hooks=[\1])",
    r"(?:until=)?(ls\.(?:Hours|Steps|Epochs)\(.*\))": r"next(ls.train_steps(state, losses, loader, until=\1))",
    r"ls\.(?:save|train|train_step|join)\(.*\)": r"\g<0>",
    r"ls\.resume\(.*\)": r'ls.save(state, loader, "runs/mine"); assert \g<0>',
    r"ls\.warm_start\(.*\)": (
        r'torch.save(model.state_dict(), "weights.pth"); state = ls.TrainState(model, optimizer); \g<0>'
    ),
    r"ls\.Ragged\.of\(boxes\)|torch\.manual_seed\(1\)": r"\g<0>",
    r"report\.\w+|state\.model": r"assert \g<0>",
}
"""How what is quoted is carried out: a pattern of it, and the code in whose place it stands."""
SLOW = [code for code in HERE if "compile" in code]
"""Compiled models are trained by `tests/training/test_step_compiled.py`, where there is a compiler."""


def carried_out(code: str) -> str | None:
    """The code that carries out what is quoted; None for what is a name alone."""
    return next((re.sub(f"^(?:{each})$", made, code) for each, made in CALLS.items() if re.fullmatch(each, code)), None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.backbone(images))
        return scores


class Count:
    """A metric as those of `torchmetrics` are."""

    def reset(self) -> None:
        self.count = 0

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        self.count += len(outputs)

    def compute(self) -> float:
        return float(self.count)


def losses(model: nn.Module, batch: ls.Batch) -> Any:
    images, labels = batch.values()
    return {"cross_entropy": F.cross_entropy(model(images / 255), labels)}, {"one": torch.ones(())}


def score(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
    return {"top1": ls.metrics.in_top_k(model(batch["image"]), batch["label"])}


def all_scores(model: nn.Module, batch: ls.Batch) -> dict[str, Any]:
    return {"auroc": (model(batch["image"]), batch["label"])}


def mixed_losses(mixing: Any) -> Any:
    def losses(model: nn.Module, batch: ls.Batch) -> dict[str, Tensor]:
        labels = mixing.apply_to_labels(batch, 5)
        return {"cross_entropy": ls.losses.softmax_cross_entropy(model(mixing.apply(batch)), labels)}

    return losses


def photos(augmentation: Any) -> ls.data.Loader:
    reader = ls.data.ImageFolder("photos/train")
    augment = [ls.augmentations.Resize(32), augmentation]
    return ls.data.Loader(reader, batch_size=8, augment=augment, num_processes=0)


def update(state: ls.TrainState, loader: Any, losses: Any, towers: Any, exchange: Any) -> ls.StepReport:
    """Make one update, and see that it was made."""
    before = [tensor.clone() for tensor in state.parameters.values()]
    [report] = ls.train_steps(state, losses, loader, towers, exchange, until=ls.Steps(state.step + 1))
    assert any(not torch.equal(*pair) for pair in zip(before, state.parameters.values(), strict=True))
    return report


def names() -> dict[str, Any]:
    """What the quoted code names."""
    torch.manual_seed(0)
    model, fields = Net(), {"image": torch.randn(64, 1, 4, 4), "label": torch.arange(64) % 3}
    reader, optimizer = ls.data.Arrays(fields), ls.optim.SGD(0.1)
    loader = ls.data.Loader(reader, batch_size=64)
    state = ls.TrainState(model, optimizer, average=ls.optim.MovingAverage(0.9))

    def one(state: ls.TrainState, loader: Any = loader, losses: Any = losses, towers: Any = None, exchange: Any = None):
        return update(state, loader, losses, towers, exchange)

    return {
        **{"ls": ls, "torch": torch, "split": split, "first": np.arange(1), "photos": photos, "update": one},
        **{"model": model, "optimizer": optimizer, "state": state, "reader": reader, "loader": loader},
        **{"losses": losses, "score": score, "mixed_losses": mixed_losses, "metric": Count(), "hook": print},
        **{"held_out": ls.data.Loader(reader, batch_size=16), "towers": ls.Towers(2), "num_classes": 90},
        **{"x": fields["image"], "y": fields["label"], "labels": fields["label"], "weights": torch.ones(64)},
        **{"sizes": {"a": 16, "b": 48}, "length": 64},
        **{"p": 0.5, "size": 32, "scale": (0.1, 1.0), "ratio": (0.8, 1.2), "resize": "area"},
        "report": update(state, loader, losses, None, None),
        "batch": next(ls.batches(loader, ls.Towers(2))),
        "dataset": [{name: values[row] for name, values in fields.items()} for row in range(64)],
        "images": ls.TrainState(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)), optimizer),
        "boxes": [torch.rand(2, 4), torch.rand(0, 4)],
        "coco": ls.data.Coco(COCO / "instances.json", COCO / "images"),
        "evaluate_with": partial(ls.evaluate, state, all_scores, loader),
        "run_with": partial(ls.run, small_recipe(), None),
    }


CALLED = [code for code in HERE if carried_out(code) and code not in SLOW]


@pytest.mark.parametrize("code", CALLED)
def test_what_is_quoted_of_the_library_is_carried_out(code: str) -> None:
    exec(carried_out(code) or "", names())


# Recipes --------------------------------------------------------------------------------------------------------------

VALUES_OF = {
    "checkpoints.every": "1 steps",
    "checkpoints.retention.newest": "1",
    "checkpoints.retention.keep_best": "1",
    "data.preprocessing.mean": "[0.5, 0.5, 0.5]",
    "data.preprocessing.std": "[0.2, 0.2, 0.2]",
    "seed": "3",
    "watch.console": "1 steps",
}
"""Values for the fields that are named alone."""
OTHERS = {
    "towers.precision": ["fp16"],
    "towers.batch_norm": ["last", "mean"],
    "loggers": ['[{ kind = "csv" }]'],
    "optimizer": [f'{{ kind = "{kind}", lr = 1e-3 }}' for kind in ("lamb", "lars", "rmsprop")],
    "optimizer.lr": [
        '{ kind = "piecewise_constant", boundaries = [1], values = [0.1, 0.01] }',
        '{ kind = "polynomial", initial = 0.1, steps = 10 }',
    ],
    "gradient_transforms": ['[{ kind = "clip_value", max_value = 1.0 }, { kind = "adaptive_clip" }]'],
    "average": ['{ kind = "moving_average", half_life_steps = 3466, dynamic = false }'],
    "data.preprocessing.policy": ["trivial_augment"],
}
"""What a row names by a word alone beside what it quotes."""
APART = [
    ("model", "warm_start", "batch_size", "data.image_size", "evaluate.examples", "feed.num_processes"),
    ("data.preprocessing.policy", "data.preprocessing.augment"),
    ("towers.batch_norm", "exchange.exact"),
]
"""Fields that are not set in one run: they do not go together, or take long together."""
TIMM = 'model={kind = "timm", name = "resnet50", num_classes = 5}'


def small_recipe() -> Recipe:
    recipe = recipe_of_photos(num_classes=5, train="photos/train", validation="photos/val")
    scored = ["checkpoints.retention.best=validation/top1", "evaluate.every=1 steps"]
    recipe = with_settings(recipe, ["data.preprocessing.kind=resized_crop", *scored])
    return replace(recipe, batch_size=8, end=ls.Steps(2), device="cpu")


def settings() -> list[tuple[str, str]]:
    pairs = [tuple(map(str.strip, code.split("=", 1))) if "=" in code else (code, "") for code in FIELDS]
    pairs = [pair for pair in pairs if "wandb" not in pair[1]]  # the table of CSV, below, stands for it
    given = [(path, value or VALUES_OF.get(path, "")) for path, value in pairs if f"{path}={value}" not in SLOW]
    others = [(path, value) for path, values in OTHERS.items() for value in values]
    return [(path, value) for path, value in [*given, *others] if value]


def groups() -> list[list[tuple[str, str]]]:
    """The settings, as many in one run as go together."""
    made: list[list[tuple[str, str]]] = []
    for path, value in settings():
        group = next((each for each in made if not any(clash(path, other) for other, _ in each)), None)
        if group is None:
            made.append(group := [])
        group.append((path, value))
    return made


def clash(path: str, other: str) -> bool:
    begins = path.startswith(other) or other.startswith(path)
    return begins or any({path, other} <= {name for name in (path, other) if name.startswith(each)} for each in APART)


def create_model(name: str, pretrained: bool, num_classes: int, **options: float) -> nn.Module:
    layers = {"conv1": nn.Conv2d(3, 4, 3), "pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
    return nn.Sequential(OrderedDict[str, nn.Module](**layers, fc=nn.Linear(4, num_classes)))


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, or where it is not installed what it would make."""
    if find_spec("timm"):
        return
    module = ModuleType("timm")
    module.__spec__ = ModuleSpec("timm", None)
    vars(module)["list_models"] = lambda include_tags: ["resnet50"]
    vars(module)["create_model"] = create_model
    monkeypatch.setitem(sys.modules, "timm", module)


@pytest.mark.process
@pytest.mark.parametrize("group", groups(), ids=lambda group: group[0][0])
def test_fields_of_recipes_are_trained_with(group: list[tuple[str, str]], timm: None) -> None:
    recipe, given = small_recipe(), [f"{path}={value}" for path, value in group]
    save_file(recipe.model.build(1).state_dict(), "resnet50.safetensors")
    if any("'^conv1'" in each for each in given):
        given.append(TIMM)
    assert ls.run(with_settings(recipe, given), "runs/mine").step == 2


@pytest.mark.process
@pytest.mark.parametrize("flags", FLAGS)
def test_flags_are_trained_with(flags: str) -> None:
    recipe = small_recipe()
    Path("mine.toml").write_text(to_toml(recipe))
    if "--fork-from" in flags:
        Path("runs").mkdir()
        saved(Path("runs/mine"), recipe, 5000)
    words = ["train", "mine.toml", *flags.split()]
    if "--hosts" in flags:  # which tests/hosts has
        assert cli_train.plan_train(words)["workers"] >= 1
        return
    assert cli_train.train_as_worker([*words, "--rehearse"]) == 0


# The page -------------------------------------------------------------------------------------------------------------

BY_HAND = {
    "`num_workers`, `prefetch_factor`, `persistent_workers`": """
        augment = [ls.augmentations.Resize(32)]
        update(images, ls.data.Loader(images_reader, batch_size=8, augment=augment, num_processes=1, prefetch=2))
    """,
    "`pin_memory`, `batch.to(device, non_blocking=True)`, a prefetcher with a stream": """
        assert next(ls.batches(loader))["image"].device == ls.join().device
    """,
    "`drop_last`": """
        loader = ls.data.Loader(reader, batch_size=24)
        assert [report.num_examples for report in ls.train_steps(state, losses, loader, until=ls.Steps(6))] == [24] * 5
        assert ls.evaluate(state, score, loader).num_examples == 64
    """,
    "`DistributedSampler`, `set_epoch`": """
        whole, *halves = (next(loader.batches(*towers)) for towers in [(range(1), 1), (range(1), 2), (range(1, 2), 2)])
        assert torch.equal(torch.cat([half["image"] for half in halves]), whole["image"])
    """,
    "`Subset`, `random_split`, `ConcatDataset`": """
        parts = split(reader, {"a": 0.5, "b": 0.5})
        update(state, ls.data.Loader(ls.data.Concatenated({**parts, "c": Subset(reader, range(8))}), batch_size=8))
    """,
    "`transform=` of a dataset": """
        dataset = ls.data.TorchDataset(Transformed(lambda image: image + torch.randn(1)))
        first, again = (next(ls.data.Loader(dataset, batch_size=8, num_processes=0).batches(range(1), 1)) for _ in "ab")
        assert torch.equal(first["image"], again["image"])
    """,
    "`torchvision.transforms.v2` with boxes, masks, keypoints": """
        plain, flipped = (
            next(ls.data.Loader(coco, batch_size=1, augment=augment, num_processes=0).batches(range(1), 1))["boxes"]
            for augment in ([ls.augmentations.Decode()], [ls.augmentations.HorizontalFlip(1.0)])
        )
        assert torch.allclose(flipped.values[:, 1], 1 - plain.values[:, 3])
    """,
    "`torch.utils.checkpoint`, `torch.func`, `torch.profiler`": """
        def losses(model, batch):
            hidden = torch.utils.checkpoint.checkpoint(model.backbone, batch["image"], use_reentrant=False)
            outputs = torch.func.functional_call(model.head, dict(model.head.named_parameters()), hidden)
            return {"loss": torch.nn.functional.cross_entropy(outputs, batch["label"])}

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            update(ls.TrainState(model, optimizer), losses=losses)
        assert any("linear" in event.key for event in profile.key_averages())
    """,
    "`configure_optimizers`": """
        update(ls.TrainState(model, optimizer, gradient_transforms=[ls.optim.ClipValue(1.0)], nonfinite="skip"))
    """,
    "`LightningDataModule`": """
        update(state, ls.data.Loader(reader, batch_size=8))
    """,
    "`StochasticWeightAveraging`": """
        state = ls.TrainState(model, optimizer, average=ls.optim.MovingAverage(0.9))
        update(state)
        assert not torch.equal(state.averages()["head.weight"], model.head.weight)
    """,
    "`fit(steps_per_epoch=...)`": """
        ends = [ls.Interval.parse(text) for text in ("1 steps", "600 s", "2 epochs")]
        hooks = [ls.every(end, calls.append) for end in ends]
        ls.train(state, losses, ls.data.Loader(reader, batch_size=32), until=ls.Epochs(4), hooks=hooks)
        assert [report.progress.epochs for report in calls] == [0.5, 1, 1.5, 2, 2, 2.5, 3, 3.5, 4, 4]
    """,
    "`callbacks=[...]`": """
        ls.train(state, losses, loader, until=ls.Steps(3), hooks=[calls.append])
        assert [report.step for report in calls] == [2, 3]
    """,
    "`BackupAndRestore`": """
        ls.save(state, loader, "runs/mine")
        due = next(ls.batches(loader))
        again = ls.data.Loader(reader, batch_size=64)
        assert ls.resume(state, again, "runs/mine")
        assert torch.equal(next(ls.batches(again))["image"], due["image"])
    """,
}
"""What carries out the rows that say what is done, and quote no code that does it."""
ELSEWHERE = {
    "`pycocotools`' `COCOeval`, `torchmetrics`' `MeanAveragePrecision`": "metrics/test_metrics_coco.py",
    "manual optimization, several optimizers": "examples/test_two_networks.py",
    "`GradientAccumulationScheduler`": "",  # not here
}
"""The tests that carry out the other rows."""


class Transformed(torch.utils.data.Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(torch.zeros(1, 4, 4)), index


@pytest.mark.process
@pytest.mark.parametrize("left", BY_HAND)
def test_a_row_that_quotes_no_code_is_carried_out(left: str) -> None:
    own = {
        "Transformed": Transformed,
        "Subset": Subset,
        "calls": [],
        "images_reader": ls.data.ImageFolder("photos/train"),
    }
    exec(textwrap.dedent(BY_HAND[left]), names() | own)


def test_every_row_is_carried_out() -> None:
    done = {*SCHEDULES, *CALLED, *SLOW, *COMMANDS, *FLAGS, *FIELDS}
    rows = re.findall(r"^\| (.*) \| (.*) \|\n(?!\|--)", PAGE, re.MULTILINE)
    left = [before for before, here in rows if not done & set(re.findall(r"`([^`]+)`", here)) and "](#" not in here]
    assert len(rows) > 120
    assert sorted(left) == sorted([*BY_HAND, *ELSEWHERE])
    assert all((Path(__file__).parent / path).exists() for path in ELSEWHERE.values())
