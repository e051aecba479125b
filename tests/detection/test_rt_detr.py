"""RT-DETR where the recorded nets do not go: other classes, few cells, many objects, objects of no weight or none."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lockstep as ls
from lockstep.detection.detector import Targets
from lockstep.detection.rt_detr import RtDetrNet, losses_of_layers, match_queries
from lockstep.detection.rt_detr_layers import RtDetrSizes
from lockstep.detection.values import RtDetr
from lockstep.models import torchvision_models

pytest.importorskip("scipy")
SIZES = RtDetrSizes((1, 1, 1, 1), False, 2, 0.5, 16, 16, stem=8, queries=16, decoder_feed_forward=16, heads=2)
SHAPE = (64, 96)


def make_net(num_classes: int = 3, seed: int = 0, *, num_queries: int = 6) -> RtDetrNet:
    settings = RtDetr(num_classes, num_queries=num_queries, num_denoising=8)
    return RtDetrNet(settings, SIZES, torch.Generator().manual_seed(seed))


def targets(*numbers: int) -> Targets:
    """So many objects on each image."""
    generator = torch.Generator().manual_seed(7)
    corners = [torch.rand(number, 2, 2, generator=generator) * 30 for number in numbers]
    return Targets(
        boxes=[torch.cat([each[:, 0], each[:, 0] + each[:, 1] + 1], 1) for each in corners],
        labels=[torch.arange(number) % 3 + 1 for number in numbers],
        classes=[torch.eye(3)[torch.arange(number) % 3] for number in numbers],
        weights=[torch.ones(number) for number in numbers],
        is_crowd=[torch.zeros(number, dtype=torch.bool) for number in numbers],
        shape=SHAPE,
    )


def images(number: int) -> Tensor:
    return torch.rand(number, 3, *SHAPE, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("version", [4, 5])
def test_weights_of_other_classes_start_all_but_what_tells_classes(version: int) -> None:
    """By the names of published files, and by those that parameters have in version 5 of `transformers`."""
    values = {f"model.{name}": value for name, value in make_net(80, seed=1).state_dict().items()}
    if version == 5:
        renames = {r"\.encoder\.encoder\.": ".encoder.aifi.", r"\.out_proj\.": ".o_proj.", r"\.(fc[12])\.": r".mlp.\1."}
        for pattern, to in renames.items():
            values = {re.sub(pattern, to, name): value for name, value in values.items()}
    net = make_net()
    report = ls.warm_start(ls.TrainState(net, ls.optim.SGD(lr=0.1)), values, takes="detector")
    heads = {"denoising_class_embed", "enc_score_head", "decoder.class_embed.0", "decoder.class_embed.1"}
    assert {each.target.rpartition(".")[0] for each in report.mismatched} == heads
    assert not report.missing
    assert not report.unexpected


def test_small_images_have_fewer_queries_than_asked_for() -> None:
    net = make_net(num_queries=300).eval()
    with torch.no_grad():
        predicted = net(images(1)[..., :32, :32])
    assert predicted["logits"].shape == (1, 1, 16 + 4 + 1, 3)
    (found,) = net.postprocess(predicted)
    assert len(found.scores) == 3 * 21
    assert torch.equal(found.scores, found.scores.sort(descending=True).values)


def test_more_objects_than_queries_leave_objects_without_one() -> None:
    net = make_net()
    assigned = net.assign(targets(9, 2))
    predicted = net(images(2), assigned)
    rows = match_queries(predicted["logits"], predicted["boxes"], assigned)
    assert rows.shape == (3, 2, 6)
    assert all(len(set(each.tolist())) == 6 and each.min() > 0 for each in rows[:, 0])
    assert all(sorted(each.tolist()) == [0, 0, 0, 0, 10, 11] for each in rows[:, 1])


def test_an_object_of_no_weight_teaches_its_query_nothing() -> None:
    net, both = make_net(), targets(2)
    light = replace(both, weights=[torch.tensor([1.0, 0.0])])
    predicted = net.eval()(images(1), net.assign(both))
    logits, boxes = predicted["logits"], predicted["boxes"]
    rows = torch.tensor([1, 0, 2, 0, 0, 0]).expand(3, 1, -1)
    without = rows.clone()
    without[..., 2] = 0
    found = losses_of_layers(logits, boxes, rows, net.assign(light))
    expected = losses_of_layers(logits, boxes, without, net.assign(both))
    unmatched = losses_of_layers(logits[:, :, 2:3], boxes[:, :, 2:3], without[..., 2:3], net.assign(both))
    torch.testing.assert_close(found["boxes"], expected["boxes"])
    torch.testing.assert_close(found["giou"], expected["giou"])
    torch.testing.assert_close(found["classification"], expected["classification"] - unmatched["classification"])
    assert net.counts(net.assign(light))["boxes"] == 1


def test_images_without_objects_teach_that_there_are_none() -> None:
    net = make_net().train()
    assigned = net.assign(targets(0, 0))
    losses = net.losses(net(images(2), assigned), assigned)
    assert losses["classification"] > 0
    assert not any(each for name, each in losses.items() if name != "classification")
    assert not any(net.counts(assigned).values())
    torch.stack([*losses.values()]).sum().backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in net.parameters())


def test_noise_comes_from_the_stream_of_the_tower() -> None:
    net = make_net().train()
    assigned = net.assign(targets(2, 1))

    def noise(seed: int) -> Tensor:
        torch.manual_seed(seed)
        noised = net._noised(assigned)
        assert noised is not None
        # Four groups of two objects, to be found and not to be found; the second image has one.
        assert noised.rows.tolist() == [[1, 2, 0, 0] * 4, [3, 0, 0, 0] * 4]
        return noised.boxes

    assert torch.equal(noise(1), noise(1))
    assert not torch.equal(noise(1), noise(2))


def test_what_is_not_finite_reaches_the_loss_and_not_the_matching() -> None:
    net = make_net().train()
    assigned = net.assign(targets(2))
    predicted = net(images(1) * torch.nan, assigned)
    assert net.losses(predicted, assigned)["classification"].isnan()


def test_training_without_scipy_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_models, "find_spec", lambda _: None)
    with pytest.raises(ls.InputError, match=r"(?s)needs scipy.*pip install 'lockstep-train\[scipy\]'"):
        RtDetr(3).check_installed()
