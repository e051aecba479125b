"""Have TensorFlow write small checkpoints, and say what it reads in them. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" google-crc32c cramjam
    /tmp/tensorflow/bin/python tests/golden/make_checkpoints_golden.py

It writes checkpoints into `tests/fixtures/tf_ckpt/made`, and `tests/fixtures/tf_ckpt/golden.json`: for each of them,
and for each of those beside them that others wrote, by prefix, {tensor: [data type, shape, SHA-256 of its bytes]} as
TensorFlow restores it; the bytes are little-endian, row by row, and null for what are no numbers of torch's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import cramjam
import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
FOLDER = HERE.parent / "fixtures" / "tf_ckpt"
MADE = FOLDER / "made"

sys.path.insert(0, str(HERE.parent / "weights"))
import tf_files  # noqa: E402 (it lies beside the tests)

v1 = tf.compat.v1
random = np.random.default_rng(6)

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e5m2", "float8_e4m3fn"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
OTHERS = ["complex64", "complex128", "bool"]
NOT_IN_V1 = {"bfloat16", "float8_e5m2", "float8_e4m3fn", "uint32", "uint64"}
QUANTISED = ["qint8", "quint8", "qint32"]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan]


def main() -> None:
    shutil.rmtree(MADE, ignore_errors=True)
    MADE.mkdir(parents=True)
    written = write_kinds()
    written |= write_v1_shards()
    rewrite(MADE / "kinds", MADE / "big_endian", big_endian=True)
    rewrite(MADE / "kinds", MADE / "snappy", compress=lambda content: bytes(cramjam.snappy.compress_raw(content)))
    write_merged()
    write_savers()
    write_object_graph()
    paths = [path.with_suffix("") for path in FOLDER.rglob("*.index")] + [
        *FOLDER.rglob("v1/*.ckpt"),
        MADE / "saver_v1.ckpt",
    ]
    found = {str(path.relative_to(FOLDER)): restored(path) for path in paths}
    for name in ("big_endian", "snappy"):
        same = found[f"made/{name}"]
        assert same == {tensor: found["made/kinds"][tensor] for tensor in same}, name
    lines = [f"{json.dumps(name)}: {json.dumps(tensors)}" for name, tensors in sorted((written | found).items())]
    (FOLDER / "golden.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def some(name: str) -> tf.Tensor:
    """Five by three values of a type, with the largest and least ones."""
    dtype = tf.as_dtype(name)
    if name in FLOATS:
        special = [value for value in SPECIAL if np.isfinite(value) or "float8" not in name]
        values = np.concatenate([special, [dtype.max, dtype.min], random.standard_normal(15)])
        return tf.cast(values[:15].reshape(5, 3), dtype)
    if name in INTEGERS:
        limits = np.iinfo(name)
        values = random.integers(limits.min, limits.max, 15, dtype=name, endpoint=True)
        values[:2] = limits.min, limits.max
        return tf.constant(values.reshape(5, 3))
    if name == "bool":
        return tf.constant(random.integers(0, 2, (5, 3)).astype(bool))
    return tf.constant((random.standard_normal((5, 3)) + 1j * random.standard_normal((5, 3))).astype(name))


def write_kinds() -> dict[str, Any]:
    """Every type there is; scalars and empty tensors; as version 2 and, but for what it cannot hold, as version 1."""
    tensors = {f"kinds/{name}": some(name) for name in [*FLOATS, *INTEGERS, *OTHERS]}
    tensors |= {"scalar": tf.constant(-7, tf.int64), "half scalar": tf.constant(0.5, tf.float16)}
    tensors |= {"empty": tf.zeros((0, 4)), "empty/of bytes": tf.zeros((3, 0, 2), tf.uint8)}
    tensors |= {"in Ελληνικά": tf.constant([1.5]), "deep": tf.reshape(tf.range(64.0), (2,) * 6)}
    tensors |= {f"kinds/{name}": tf.bitcast(tf.constant([[1, 2]], name.replace("q", "")), name) for name in QUANTISED}
    tensors |= {"kinds/string": tf.constant(["one", "two and three"]), "no string": tf.constant([], tf.string)}
    save(MADE / "kinds", tensors)
    old = {name: value for name, value in tensors.items() if value.dtype.name not in NOT_IN_V1}
    v1_save(MADE / "v1_kinds", old)
    return {"made/v1_kinds": {name: described(value) for name, value in old.items()}}


def write_v1_shards() -> dict[str, Any]:
    """Version 1 in two files, with slices of one tensor in both."""
    whole, other = random.standard_normal((130, 3)).astype(np.float32), some("int32")
    v1_save(
        MADE / "v1_shards-00000-of-00002",
        {"whole": whole[:100], "other": other},
        ["130 3 0,100:-", ""],
    )
    v1_save(
        MADE / "v1_shards-00001-of-00002",
        {"whole": whole[100:], "flags": tf.constant([True, False])},
        ["130 3 100,30:0,3", ""],
    )
    tensors = {"whole": tf.constant(whole), "other": other, "flags": tf.constant([True, False])}
    return {"made/v1_shards": {name: described(value) for name, value in tensors.items()}}


def write_merged() -> None:
    """Version 2 with four files of data, as four devices write it; slices along both dimensions."""
    whole = random.integers(-(2**15), 2**15, (100, 70)).astype(np.int16)
    quarters = {"0,65:0,64": 0, "0,65:64,6": 1, "65,35:0,64": 1, "65,35:64,6": 2}
    parts: list[dict[str, str]] = [{}, {}, {}]
    for spec, device in quarters.items():
        parts[device][spec] = spec
    prefixes = [str(MADE / f"part{device}") for device in range(len(parts))]
    for device, prefix in enumerate(prefixes):
        specs = list(parts[device])
        pieces = [tf.constant(whole[tuple(map(range_of, spec.split(":")))]) for spec in specs]
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=["whole"] * len(specs) + [f"device{device}"],
            shape_and_slices=[f"100 70 {spec}" for spec in specs] + [""],
            tensors=[*pieces, tf.constant(device)],
        )
    long = tf.constant(random.integers(-128, 128, 9000).astype(np.int8))
    tf.raw_ops.SaveV2(
        prefix=prefixes[0] + "long",
        tensor_names=["long", "long"],
        shape_and_slices=["9000 0,8500", "9000 8500,500"],
        tensors=[long[:8500], long[8500:]],
    )
    prefixes.append(prefixes[0] + "long")
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=str(MADE / "merged"))


def range_of(spec: str) -> slice:
    start, size = map(int, spec.split(","))
    return slice(start, start + size)


def write_savers() -> None:
    """Partitioned variables and their slots from TensorFlow 1's Saver; its state file has paths within the folder."""
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(6)
        partitioner = v1.fixed_size_partitioner(3, axis=1)
        embedding = v1.get_variable("embedding", (4, 8), partitioner=partitioner)
        bias = v1.get_variable("bias", (8,), initializer=v1.random_normal_initializer())
        step = v1.train.get_or_create_global_step()
        loss = tf.reduce_sum(tf.square(tf.convert_to_tensor(embedding))) + tf.reduce_sum(bias)
        update = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, global_step=step)
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver(save_relative_paths=True)
        for _ in range(2):
            session.run(update)
            saver.save(session, str(MADE / "saver" / "model.ckpt"), global_step=step, write_meta_graph=False)
        old = v1.train.Saver(write_version=v1.train.SaverDef.V1)
        old.save(
            session,
            str(MADE / "saver_v1.ckpt"),
            write_meta_graph=False,
            write_state=False,
        )


def write_object_graph() -> None:
    """The object graph of TensorFlow 2's Checkpoint, with its description as a string."""
    model = tf.Module()
    model.layers = [tf.Module(), tf.Module()]
    for number, layer in enumerate(model.layers):
        layer.kernel = tf.Variable(tf.constant(random.standard_normal((3, 2 + number)), tf.float32))
    checkpoint = tf.train.Checkpoint(model=model, step=tf.Variable(11, dtype=tf.int64))
    tf.train.CheckpointManager(checkpoint, str(MADE / "objects"), max_to_keep=1).save()


def rewrite(source: Path, target: Path, *, big_endian: bool = False, compress: Any = None) -> None:
    """A bundle's numbers as a machine writes them whose numbers begin with the highest byte; or with Snappy."""
    reader = tf.train.load_checkpoint(str(source))
    entries, data = {b"": tf_files.header(big_endian=big_endian)}, b""
    for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
        # TensorFlow swaps no bytes of the types that have one.
        if is_number(dtype) and not (big_endian and "float8" in dtype.name):
            values = restored_value(source, name, dtype)
            unit = values.dtype.itemsize // (2 if dtype.is_complex else 1)
            stored = (
                np.frombuffer(values.tobytes(), f"<u{unit}").astype(f"{'>' if big_endian else '<'}u{unit}").tobytes()
            )
            entries[name.encode()] = tf_files.entry(dtype.as_datatype_enum, values.shape, data=stored, offset=len(data))
            data += stored
    table = tf_files.table(sorted(entries.items()), per_block=12, compress=compress)
    target.with_suffix(".index").write_bytes(table)
    target.with_suffix(".data-00000-of-00001").write_bytes(data)


def save(prefix: Path, tensors: dict[str, Any]) -> None:
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )


def v1_save(path: Path, tensors: dict[str, Any], slices: list[str] | None = None) -> None:
    tf.raw_ops.SaveSlices(
        filename=str(path),
        tensor_names=list(tensors),
        shapes_and_slices=slices or [""] * len(tensors),
        data=list(tensors.values()),
    )


def restored(path: Path) -> dict[str, Any]:
    """What TensorFlow finds in a checkpoint."""
    reader = tf.train.load_checkpoint(str(path))
    found = {}
    for name, dtype in reader.get_variable_to_dtype_map().items():
        if is_number(dtype):
            found[name] = described(restored_value(path, name, dtype))
        else:
            found[name] = [f"DT_{dtype.name.upper()}", reader.get_variable_to_shape_map()[name], None]
    return dict(sorted(found.items()))


def restored_value(path: Path, name: str, dtype: tf.DType) -> Any:
    (value,) = tf.raw_ops.RestoreV2(prefix=str(path), tensor_names=[name], shape_and_slices=[""], dtypes=[dtype])
    return value.numpy()


def described(value: Any) -> list[Any]:
    dtype = tf.as_dtype(value.dtype)
    if not is_number(dtype):
        return [f"DT_{dtype.name.upper()}", list(value.shape), None]
    return [dtype.name, list(value.shape), hashlib.sha256(np.asarray(value).tobytes()).hexdigest()]


def is_number(dtype: tf.DType) -> bool:
    return dtype.name not in {*QUANTISED, "string"}


if __name__ == "__main__":
    main()
