"""Record quantization-aware training by TensorFlow's own rewriter, in real TensorFlow. Run by hand.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" tf-slim
    pip download --no-deps --python-version 3.7 --abi cp37m --platform manylinux2010_x86_64 tensorflow-cpu==1.15.0
    unzip tensorflow_cpu-1.15.0-*.whl "tensorflow_core/contrib/quantize/*" -d /tmp/tensorflow1
    /tmp/tensorflow/bin/python tests/golden/make_quantization_golden.py /tmp/tensorflow1

It writes `quantization_golden.npz` beside itself: what `fake_quant_with_min_max_vars` and its gradient give; and of a
small net that `contrib.quantize` of 1.15 has rewritten, a few updates: losses, gradients, ranges, statistics, and what
the rewritten net for evaluation predicts in the end. Nothing of the rewriter is changed but the name of its package.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import quantization_inputs as inputs
from tensorflow.python.ops import cond, control_flow_ops
from tensorflow_graphs import slim, tf

_MODULES = ("common", "graph_matcher", "input_to_ops", "quant_ops", "fold_batch_norms", "quantize", "quantize_graph")
_UPDATES = "updates"


def rewriter(folder: Path) -> Any:
    """Import tensorflow.contrib.quantize of TensorFlow 1.15 from its files."""
    for name in ("tensorflow.contrib", "tensorflow.contrib.quantize", "tensorflow.contrib.quantize.python"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace("tensorflow", "tensorflow_core", 1).replace(".", "/"))]
        sys.modules[name] = package
    for name in _MODULES:
        module = __import__(f"tensorflow.contrib.quantize.python.{name}", fromlist=[name])
        setattr(sys.modules["tensorflow.contrib.quantize.python"], name, module)
    control_flow_ops.cond = cond.cond  # where TensorFlow 1.15 has it
    return sys.modules["tensorflow.contrib.quantize.python.quantize_graph"]


def net(images: Any, is_training: bool) -> Any:
    """Layers with batch norm and ReLU6, depthwise, without activation, added before and without a ReLU, linear."""
    norm = {"decay": inputs.MOMENTUM, "epsilon": 0.001, "scale": True, "fused": True, "is_training": is_training}
    norm["updates_collections"] = _UPDATES
    options = {"normalizer_fn": slim.batch_norm, "normalizer_params": norm, "activation_fn": tf.nn.relu6}
    stem = slim.conv2d(images, 8, 3, stride=2, scope="stem", **options)
    expanded = slim.conv2d(stem, 12, 1, scope="expand", **options)
    deep = slim.separable_conv2d(expanded, None, 3, depth_multiplier=1, scope="depthwise", **options)
    options["activation_fn"] = None
    added = slim.conv2d(deep, 8, 1, scope="project", **options) + stem
    last = tf.nn.relu(slim.conv2d(added, 8, 1, scope="last", **options) + added)
    return slim.fully_connected(tf.reduce_mean(last, [1, 2]), 5, activation_fn=None, scope="logits")


def record_training(quantize_graph: Any) -> dict[str, Any]:
    tf.reset_default_graph()
    found: dict[str, list[Any]] = {}
    images, targets = (tf.placeholder(tf.float32, shape) for shape in ((4, 9, 9, 3), (4, 5)))
    outputs = net(images, True)
    loss = tf.reduce_mean(tf.square(outputs - targets))
    quantize_graph.create_training_graph(tf.get_default_graph(), quant_delay=inputs.DELAY)
    variables = tf.trainable_variables()
    gradients = tf.tuple(tf.gradients(loss, variables))  # variables change once all are there
    updates = tf.get_collection(_UPDATES)
    for update in updates:  # the folded layers see the statistics before the update
        update.op._add_control_inputs([gradient.op for gradient in gradients])
    train = tf.train.GradientDescentOptimizer(inputs.LEARNING_RATE).apply_gradients(
        zip(gradients, variables, strict=True)
    )
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for each in slim.get_model_variables():
            if not each.op.name.endswith(("min", "max")):
                session.run(each.assign(inputs.weights(each.op.name, each.shape.as_list())))
        for step in range(inputs.STEPS):
            fed = {images: inputs.images(step), targets: inputs.targets(step)}
            value, slopes, *_ = session.run([loss, gradients, train, *updates], fed)
            found.setdefault("losses", []).append(value)
            found.setdefault("gradients", []).append(np.concatenate([slope.ravel() for slope in slopes]))
        kept = {each.op.name: session.run(each) for each in tf.global_variables()}
    return {
        **found,
        "names": [each.op.name for each in variables],
        "ranges": {name: value for name, value in kept.items() if name.endswith(("quant/min", "quant/max"))},
        "kept": kept,
    }


def record_evaluation(quantize_graph: Any, kept: dict[str, Any]) -> Any:
    tf.reset_default_graph()
    predicted = net(tf.constant(inputs.images(99)), False)
    outputs = tf.pad(predicted, [[0, 0], [0, 0]])  # what is quantized is what another function is given
    quantize_graph.create_eval_graph(tf.get_default_graph())
    with tf.Session() as session:
        for each in tf.global_variables():
            session.run(each.assign(kept[each.op.name]))
        return session.run(outputs)


def fake_quantized(bits: int, narrow: bool) -> tuple[Sequence[Any], Sequence[Any]]:
    values, made, slopes = tf.constant(inputs.values()), [], []
    for low, high in inputs.RANGES:
        given = {"min": low, "max": high, "num_bits": bits, "narrow_range": narrow}
        made.append(tf.quantization.fake_quant_with_min_max_vars(values, **given))
        slopes.append(tf.gradients(made[-1], values)[0])
    with tf.Session() as session:
        return session.run([made, slopes])


def main(folder: Path) -> None:
    tf.disable_v2_behavior()
    quantize_graph = rewriter(folder)
    training = record_training(quantize_graph)
    kept = training.pop("kept")
    ranges = training.pop("ranges")
    statistics = [value for name, value in sorted(kept.items()) if name.endswith(("moving_mean", "moving_variance"))]
    golden = {
        **{name: np.stack(values) for name, values in training.items()},
        "range_names": np.array(sorted(ranges)),
        "ranges": np.array([ranges[name] for name in sorted(ranges)]),
        "statistics": np.concatenate(statistics),
        "evaluated": record_evaluation(quantize_graph, kept),
    }
    for bits, narrow in ((8, False), (8, True), (4, False), (2, True)):
        made, slopes = fake_quantized(bits, narrow)
        golden[f"fake_{bits}_{narrow}"] = np.stack(made)
        golden[f"slopes_{bits}_{narrow}"] = np.packbits(np.stack(slopes).astype(bool))
    np.savez_compressed(inputs.PATH, **golden)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
