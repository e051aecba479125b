"""A detector of your own: where blood cells have their centres, and how far the edges of their boxes are from there.

python examples/own_detector.py                        or lockstep run --workers 2: the same result
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lockstep as ls

BCCD, NUM_CLASSES, STRIDE = Path(__file__).parent.parent / "data" / "bccd", 3, 8


class Centres(ls.detection.DetectionModel):
    num_classes = NUM_CLASSES

    def __init__(self):
        super().__init__()
        self.features = ls.models.SqueezeNet().build(seed=0).features[:8]
        self.head = nn.Conv2d(256, NUM_CLASSES + 4, 3, padding=1)

    def assign(self, targets):
        """Find the place of each object's centre on the map, and its distances from there, in places."""
        boxes, labels = torch.cat([*targets.boxes]) / STRIDE, torch.cat([*targets.labels])
        image = torch.cat([torch.full_like(each, index) for index, each in enumerate(targets.labels)])
        place = ((boxes[:, :2] + boxes[:, 2:]) / 2).floor()
        edges = torch.cat([place + 0.5 - boxes[:, :2], boxes[:, 2:] - place - 0.5], 1)
        return image, labels - 1, *place.long().T, edges

    def counts(self, assigned):
        return dict.fromkeys(["centres", "edges"], torch.tensor(len(assigned[0])))

    def forward(self, inputs, assigned=None):
        maps = self.head(self.features(F.pad(inputs / 128 - 1, (4, 4, 4, 4))))
        return {"scores": (maps[:, :NUM_CLASSES] - 3).sigmoid(), "edges": F.softplus(maps[:, NUM_CLASSES:])}

    def losses(self, predictions, assigned):
        image, label, row, column, edges = assigned
        truth = torch.zeros_like(predictions["scores"]).index_put((image, label, row, column), torch.tensor(1.0))
        error = (predictions["scores"] - truth).abs()
        focal = error**2 * F.binary_cross_entropy(predictions["scores"], truth, reduction="none")
        return {"centres": focal.sum(), "edges": (predictions["edges"][image, :, row, column] - edges).abs().sum()}

    def postprocess(self, predictions):
        peaks = predictions["scores"] * (predictions["scores"] == F.max_pool2d(predictions["scores"], 3, 1, 1))
        return [self.of_image(*maps) for maps in zip(peaks, predictions["edges"], strict=True)]

    def of_image(self, peaks, edges):
        scores, places = peaks.flatten().topk(50)
        label, row, column = torch.unravel_index(places, peaks.shape)
        centres, edges = torch.stack([row, column], 1) + 0.5, edges[:, row, column].T
        return ls.detection.Detections(
            STRIDE * torch.cat([centres - edges[:, :2], centres + edges[:, 2:]], 1), scores, label + 1
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    steps = ls.Steps(parser.parse_args().steps)
    data = ls.recipes.DetectionData(f"{BCCD}", test=f"{BCCD}", resizer=ls.augmentations.FixedShapeResizer(192, 256))
    train, test = data.reader("train", NUM_CLASSES, to_train=True), data.reader("test", NUM_CLASSES)
    task = ls.recipes.Detection(data, NUM_CLASSES).with_metrics(test.classes, {})
    here = ls.join()
    state = ls.TrainState(Centres().to(here.device), ls.optim.Adam(1e-3))
    loader = ls.data.Loader(train, batch_size=8, augment=[*data.training(), *task.targets()])
    ls.train(state, task.losses, loader, ls.Towers(2), counts=task.counts(state.model), until=steps)
    loader = ls.data.Loader(test, batch_size=8, augment=data.evaluation())
    result = ls.evaluate(state, task.score, loader, metrics=task.metrics)
    if here.is_chief:
        print(result)


if __name__ == "__main__":
    main()
