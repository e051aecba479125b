from __future__ import annotations

import math
import random

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from lockstep.checkpoints.encoding import (
    check_saveable,
    decode_tensors,
    decode_values,
    encode_tensors,
    encode_values,
    find_nonfinite,
    size_bytes,
)
from lockstep.errors import CheckpointError


def encode(members: dict[str, Tensor]) -> bytes:
    return b"".join(encode_tensors(members))


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist())


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert bits(found) == bits(expected)


WIDE = torch.arange(48, dtype=torch.float32).reshape(2, 3, 2, 4)
KINDS = {
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0),
    "empty with a shape": torch.zeros(4, 0, 3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(5).bfloat16(),
    "float64": torch.tensor([1 / 3, -0.0, float("nan"), float("inf"), 5e-324], dtype=torch.float64),
    **{f"uint{n}": torch.tensor([0, 1, 2**n - 1], dtype=getattr(torch, f"uint{n}")) for n in (16, 32, 64)},
    "float8": torch.randn(7).to(torch.float8_e4m3fn),
    "transposed": WIDE.transpose(1, 3),
    "strided": WIDE[:, ::2, :, 1],
    "expanded": torch.tensor([1.5]).expand(3, 4),
    "channels_last": WIDE.contiguous(memory_format=torch.channels_last),
    "parameter": nn.Parameter(torch.randn(2, 2)),
    "negated view": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back_bit_for_bit(kind: str) -> None:
    members = {"t": KINDS[kind]}
    check_saveable({"parameters": members})
    found = decode_tensors(encode(members))["t"]
    assert_same_bits(found, KINDS[kind].detach().resolve_neg())
    assert found.is_contiguous()


def test_a_payload_in_a_nan_survives() -> None:
    nan = torch.tensor([0x7FC12345, 0x7F812345], dtype=torch.int32).view(torch.float32)
    assert_same_bits(decode_tensors(encode({"nan": nan}))["nan"], nan)


def test_shared_memory_is_written_in_full_and_comes_back_apart() -> None:
    base = torch.arange(10.0)
    members = {"whole": base, "tied": base, "part": base[2:5], "overlapping": base[4:8], "strided": base[::2]}
    found = decode_tensors(encode(members))
    for name, tensor in members.items():
        assert_same_bits(found[name], tensor)
    found["whole"].zero_()
    assert found["tied"].tolist() == base.tolist()


def test_nothing_at_all_is_a_section_too() -> None:
    assert decode_tensors(encode({})) == {}


@pytest.mark.parametrize(
    "name", ["", " ", "a/b", "../x", "ünï·wéight", "new\nline", 'quote"s\\', "nul\0", "名前", "__metadata"]
)
def test_names_are_any_text(name: str) -> None:
    check_saveable({"parameters": {name: WIDE}})
    assert list(decode_tensors(encode({name: WIDE}))) == [name]


@pytest.mark.parametrize("name", ["__metadata__", "half \ud800 a pair"])
def test_names_that_the_format_cannot_hold(name: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        check_saveable({"buffers": {"fine": WIDE, name: WIDE}})
    assert str(raised.value) == (
        f"The tensor {name!r} of 'buffers' cannot be saved under this name.\n"
        f"  given:    {name!r}\n"
        "  expected: any text that UTF-8 can encode, other than '__metadata__'\n"
        "  hint:     rename the parameter or buffer"
    )


@pytest.mark.parametrize("section", ["parameters", "generator.parameters", "net-2.slots", "A_1"])
def test_sections_that_name_a_file(section: str) -> None:
    check_saveable({section: {}})


@pytest.mark.parametrize("section", ["", ".hidden", "..", "a/b", "a b", "größe", "-x", "x\n", "x" * 101])
def test_sections_that_do_not(section: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        check_saveable({section: {}})
    assert str(raised.value) == (
        f"{section!r} cannot be a section of a checkpoint.\n"
        f"  given:    {section!r}\n"
        "  expected: 1 to 100 letters, digits, '_', '-' and '.', the first no '.' or '-': it names a file\n"
        "  hint:     rename the section (or the state that it belongs to)"
    )


@pytest.mark.parametrize(
    ("tensor", "given"),
    [
        (torch.zeros(2, dtype=torch.complex128), "torch.complex128, torch.strided, on cpu"),
        (torch.zeros(2, dtype=torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz, torch.strided, on cpu"),
        (torch.eye(2).to_sparse(), "torch.float32, torch.sparse_coo, on cpu"),
        (torch.zeros(2, device="meta"), "torch.float32, torch.strided, on meta"),
    ],
)
def test_kinds_that_cannot_be_saved(tensor: Tensor, given: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        check_saveable({"buffers": {"odd": tensor}})
    assert str(raised.value) == (
        "The tensor 'odd' of 'buffers' is of a kind that cannot be saved.\n"
        f"  given:    {given}\n"
        "  expected: a dense tensor with data, of bfloat16, bool, float16, float32, float64, float8_e4m3fn, "
        "float8_e5m2, int16, int32, int64, int8, uint16, uint32, uint64, uint8\n"
        "  hint:     convert it (`to_dense()`, `view_as_real`, `view(torch.int64)`), or keep it in a plain attribute"
    )


GOOD = encode({"t": torch.zeros(4)})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[:-1],
        GOOD + b"\0",
        (1 << 62).to_bytes(8, "little") + GOOD[8:],
        GOOD.replace(b"[4]", b"[9]"),
        GOOD.replace(b"F32", b"X99"),
        GOOD.replace(b"[0,16]", b"[8,16]"),
    ],
)
def test_headers_that_lie(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_tensors(data)


@pytest.mark.parametrize("seed", range(4))
def test_what_the_library_reads_is_read_alike_and_what_it_refuses_is_refused(seed: int) -> None:
    """Bytes of the header are changed at random, most of them to those that it has."""
    draw = random.Random(seed)
    good = encode(
        {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0, 3, dtype=torch.int16), "c": torch.tensor(7)}
    )
    end = 8 + int.from_bytes(good[:8], "little")
    num_read = 0
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(draw.randint(0, 2)):
            data[draw.randrange(end)] = draw.choice([*good[8:end], draw.randrange(256)])
        try:
            wanted = load(bytes(data))
        except Exception:
            with pytest.raises(ValueError, match=r"."):
                decode_tensors(bytes(data))
        else:
            found = decode_tensors(bytes(data))
            assert found.keys() == wanted.keys(), data
            for name, tensor in wanted.items():
                assert_same_bits(found[name], tensor)
            num_read += 1
    assert 300 < num_read < 900


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype":"F32","shape":{},"data_offsets":[0,4]}',
        '{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}',
        '{"dtype":"F32","shape":[1],"data_offsets":[0.0,4]}',
        '{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}',
        '{"dtype":"F32","shape":[4611686018427387904,4611686018427387904,0],"data_offsets":[0,0]}',
        '{"dtype":"F32","shape":[1180591620717411303424,0],"data_offsets":[0,0]}',
        '{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}',
        '{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}',
        '{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4611686018427387904]}',
        "4",
    ],
)
def test_entries_of_headers_that_lie(entry: str) -> None:
    text = f'{{"t":{entry}}}'.encode()
    with pytest.raises(ValueError, match=r"."):
        decode_tensors(len(text).to_bytes(8, "little") + text + bytes(0 if "[0,0]" in entry else 4))


def test_size_without_headers() -> None:
    assert size_bytes({"parameters": {"a": torch.zeros(3), "b": torch.zeros(2, 2).half()}, "average": {}}) == 20


def test_the_file_is_no_longer_than_the_librarys() -> None:
    members = {name: tensor.detach().resolve_neg().contiguous() for name, tensor in KINDS.items()}
    del members["negated view"]
    assert len(encode(members)) == len(save(members))


def test_what_lies_densely_is_not_copied() -> None:
    tensor = torch.arange(6.0)
    header, memory = encode_tensors({"t": tensor})
    tensor[0] = 7
    assert bytes(memory) == tensor.numpy().tobytes()
    assert len(header) % 8 == 0


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("numel", [1, 7, 2**18 + 5])
def test_what_is_not_finite_is_named(dtype: torch.dtype, numel: int) -> None:
    def with_value(value: float) -> Tensor:
        return torch.ones(numel).index_fill(0, torch.tensor([numel // 2]), value).to(dtype)

    tensors = {
        "parameters": {
            "good": with_value(0.5),
            "inf": with_value(-INF),
            "nan": with_value(NAN),
            "still": with_value(-INF),
        },
        "buffers": {"mask": with_value(-INF), "nan": with_value(NAN), "count": torch.tensor(3)},
        "slots": {"max/inf": with_value(INF), "max/nan": with_value(NAN)},
        "average": {"inf": with_value(INF), "mask": with_value(-INF), "nan": with_value(NAN)},
        "other.parameters": {"mask": with_value(INF)},
    }
    assert find_nonfinite(tensors, {"parameters": ["still", "nan"], "other.parameters": []}) == [
        "'inf' of parameters",
        "'nan' of parameters",
        "'nan' of buffers",
        "'max/inf' of slots",
        "'max/nan' of slots",
        "'inf' of average",
        "'nan' of average",
        "'mask' of other.parameters",
    ]


def test_large_numbers_are_finite() -> None:
    large = torch.full((5,), 3e38)
    tensors = {"parameters": {"w": large, "wide": large.double() ** 8, "none": torch.zeros(0), "strided": large[::2]}}
    assert find_nonfinite(tensors, {}) == []


def test_json_comes_back() -> None:
    values = {
        "step": 3,
        "big": 2**70,
        "loss": 0.1 + 0.2,
        "tiny": 5e-324,
        "none": None,
        "flag": True,
        "text": 'ü"\n\ud800',
        "nested": {"list": [1, [2.5, {}]], "": []},
    }
    assert decode_values(encode_values(values)) == values


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ((1, 2), "(1, 2)"),
        ({1: "one"}, "{1: 'one'}"),
        ([math.nan], "[nan]"),
        (-math.inf, "-inf"),
        ({"deep": {2}}, "{'deep': {2}}"),
        (b"bytes", "b'bytes'"),
    ],
)
def test_what_would_come_back_otherwise_is_refused(value: object, given: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        encode_values({"fine": 1, "loader": value})
    assert str(raised.value) == (
        "The value 'loader' cannot be saved as JSON.\n"
        f"  given:    {given}\n"
        "  expected: None, bool, int, finite float, str, and lists and dicts (with str as keys) of these\n"
        "  hint:     save tuples and arrays as lists, and leave out what is not a number"
    )


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe\xfd"])
def test_other_bytes(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_values(data)
