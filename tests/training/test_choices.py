from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from lockstep.errors import WorkdirError
from lockstep.training.choices import Choices, differences, refuse_changed

CHOICES = Choices(1, "cpu", "x86_64 AVX2", "fp32", "channels_last", "fused", "off", "none", "2.11.0", "0.1.0")


def test_one_line_says_all() -> None:
    assert str(CHOICES) == (
        "cpu (x86_64 AVX2), 1 thread a worker, fp32, channels_last, fused kernels, compilation off, "
        "torch 2.11.0, lockstep 0.1.0"
    )
    assert ", 4 threads a worker, " in str(replace(CHOICES, threads=4))


def test_they_come_back() -> None:
    assert Choices.read(asdict(CHOICES)) == CHOICES


def test_differences_are_named() -> None:
    assert differences(CHOICES, CHOICES) == []
    assert differences(CHOICES, replace(CHOICES, cpu="x86_64 AVX512", torch="2.13.0")) == [
        "cpu was x86_64 AVX2 and is x86_64 AVX512",
        "torch was 2.11.0 and is 2.13.0",
    ]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("simplejpeg 1.9.0 (libjpeg-turbo)", "pillow 13.0.0 (libjpeg-turbo 3.2.0)", False),
        ("torchcodec 0.17.0; pillow 13.0.0, libjpeg-turbo 3.2.0", "simplejpeg 1.9.0 (libjpeg-turbo)", False),
        ("simplejpeg 1.9.0 (libjpeg-turbo)", "pillow 13.0.0 (libjpeg 9.6)", True),
        ("a decoder 1.0", "a decoder 1.1", True),
        ("none", "simplejpeg 1.9.0 (libjpeg-turbo)", True),
    ],
)
def test_another_decoder_is_named_if_its_pixels_may_differ(before: str, after: str, told: bool) -> None:
    changed = differences(replace(CHOICES, decoder=before), replace(CHOICES, decoder=after))
    assert changed == ([f"decoder was {before} and is {after}"] if told else [])


def test_exact_runs_refuse_them() -> None:
    refuse_changed([])
    with pytest.raises(WorkdirError) as caught:
        refuse_changed(["torch was 2.11.0 and is 2.13.0", "kernels was fused and is foreach"])
    assert str(caught.value) == (
        "This exact run cannot go on with the same bits here.\n"
        "  given:    torch was 2.11.0 and is 2.13.0; kernels was fused and is foreach\n"
        "  expected: the choices of its first start\n"
        "  hint:     resume on a machine and with versions like those, or set exchange.exact to false"
    )
