"""What scripts reach through `import lockstep as ls`."""

from __future__ import annotations

import inspect

import pytest

import lockstep as ls

IN_USE = {
    "data": [
        "Arrays",
        "Augment",
        "Balanced",
        "BlockShuffled",
        "CentralCrop",
        "ColourDraws",
        "Concatenated",
        "Decoding",
        "DistortedCrop",
        "EncodedImage",
        "FAST_ORDERS",
        "HorizontalFlip",
        "INCEPTION_ORDERS",
        "ImageFolder",
        "Integer",
        "Label",
        "LabelMap",
        "Loader",
        "Mixture",
        "Pixels",
        "RandomResizedCrop",
        "RandomShift",
        "Reader",
        "RecordFiles",
        "Records",
        "Region",
        "Resize",
        "SLIM_ORDERS",
        "SequenceExample",
        "Sequential",
        "Shuffled",
        "Subset",
        "TorchDataset",
        "Weighted",
        "centred",
        "distort",
        "find_shards",
        "mnist_reader",
        "one_of",
        "parse_example",
        "parse_sequence_example",
        "read_all",
        "read_label_map",
        "read_labels",
        "scaled",
        "serialize_example",
        "serialize_sequence_example",
        "split",
        "write_label_map",
        "write_records",
    ],
    "metrics": ["in_top_k"],
    "models": ["Mnist", "MnistNet"],
}


@pytest.mark.parametrize("package", IN_USE)
def test_each_package_exports_its_names_documented(package: str) -> None:
    module = getattr(ls, package)
    assert sorted(module.__all__) == IN_USE[package]
    assert all(inspect.getdoc(getattr(module, name)) for name in ["__class__", *module.__all__])
