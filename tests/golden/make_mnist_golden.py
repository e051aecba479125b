"""Record what the reference MNIST net does in real TensorFlow. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" tf-slim
    /tmp/tensorflow/bin/python tests/golden/make_mnist_golden.py

It writes, beside itself, `mnist_golden.json.gz` (training runs), `operations_golden.json.gz` (single operations) and
`mnist_sample.npz` (the first 160 training images and labels of MNIST, licensed CC BY-SA 3.0: see data/mnist/SOURCE.md).
The graphs are built as the reference built them, in TensorFlow 1's graph mode: towers that share variables, the mean
of their gradients, one update; and, by TF-Slim's own training loop, one tower with clipped gradients.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # The kernels that TensorFlow had from the start, the same on each machine.

import mnist_inputs as inputs
import numpy as np
import tensorflow as tf2
import tf_slim as slim
from tensorflow.python.framework import ops

tf = tf2.compat.v1
ops.IndexedSlices = tf2.IndexedSlices  # TF-Slim 1.1 asks for this class where TensorFlow no longer keeps it.
HERE = Path(__file__).parent
MNIST = HERE.parent.parent / "data" / "mnist"
SAMPLE_SIZE = 160
NUM_STEPS = 20
SLIM_CLIP_NORM = 0.1


def main() -> None:
    tf.disable_v2_behavior()
    write_sample()
    about = {"tensorflow": tf2.__version__, "numpy": np.__version__, "weights_seed": inputs.WEIGHTS_SEED}
    runs = {
        "two_towers_float64": two_towers("float64", learning_rate=0.1),
        "two_towers_float32": two_towers("float32", learning_rate=0.05),
        # TensorFlow normalises in float32 alone, and after ten steps rounding shows (see WEIGHTS_SEED).
        "two_towers_lrn_float32": two_towers("float32", learning_rate=0.05, lrn=True, num_steps=10),
        "slim_float64": slim_loop("float64", learning_rate=0.1),
    }
    write("mnist_golden.json.gz", {"about": about, "runs": runs})
    operations = {
        "in_top_k": in_top_k(),
        "local_response_normalization": local_response_normalization(),
        "truncated_normal": truncated_normal(),
        "nesterov": nesterov(),
    }
    write("operations_golden.json.gz", {"about": about, **operations})


def write_sample() -> None:
    """The sample, unless it is there: the runs must not change because a compressor did."""
    path = HERE / "mnist_sample.npz"
    if path.exists():
        return
    with gzip.open(MNIST / "train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(16 + SAMPLE_SIZE * 784)[16:], np.uint8).reshape(-1, 28, 28)
    with gzip.open(MNIST / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + SAMPLE_SIZE)[8:], np.uint8)
    np.savez_compressed(path, images=images, labels=labels)


def write(name: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, default=lambda value: np.asarray(value).tolist()) + "\n"
    (HERE / name).write_bytes(gzip.compress(text.encode(), mtime=0))


# The net and its towers -------------------------------------------------------------------------------------------


def parameters(layer: str, dtype: str) -> tuple[Any, Any]:
    """Weights and biases of a layer, shared between towers, kept on the CPU."""
    shape = inputs.LAYERS[layer][0]
    with tf.variable_scope(layer), tf.device("/cpu:0"):
        weights = tf.get_variable("weights", shape, dtype, tf.zeros_initializer())
        return weights, tf.get_variable("biases", shape[-1:], dtype, tf.zeros_initializer())


def convolution(hidden: Any, layer: str, dtype: str) -> Any:
    weights, biases = parameters(layer, dtype)
    return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(hidden, weights, [1, 1, 1, 1], padding="SAME"), biases))


def max_pool(hidden: Any) -> Any:
    return tf.nn.max_pool(hidden, [1, 2, 2, 1], [1, 2, 2, 1], padding="SAME")


def normalised(hidden: Any) -> Any:
    return tf.nn.lrn(hidden, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)


def dense(hidden: Any, layer: str, dtype: str) -> Any:
    weights, biases = parameters(layer, dtype)
    return tf.matmul(hidden, weights) + biases


def tower_loss(images: Any, labels: Any, dtype: str, lrn: bool) -> Any:
    """Mean cross entropy of the net's scores."""
    hidden = max_pool(convolution(images, "conv1", dtype))
    hidden = convolution(normalised(hidden) if lrn else hidden, "conv2", dtype)
    hidden = max_pool(normalised(hidden) if lrn else hidden)
    hidden = tf.nn.relu(dense(tf.reshape(hidden, [-1, 7 * 7 * 64]), "local3", dtype))
    hidden = tf.nn.relu(dense(hidden, "local4", dtype))
    scores = dense(hidden, "softmax_linear", dtype)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores))


def average_gradients(tower_gradients: list[list[tuple[Any, Any]]]) -> list[tuple[Any, Any]]:
    """The mean over towers of each variable's gradients."""
    averaged = []
    for of_towers in zip(*tower_gradients, strict=True):
        stacked = tf.concat([tf.expand_dims(gradient, 0) for gradient, _ in of_towers], axis=0)
        averaged.append((tf.reduce_mean(stacked, 0), of_towers[0][1]))
    return averaged


def two_towers(dtype: str, learning_rate: float, lrn: bool = False, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Updates by the mean gradient of two towers of 16 examples."""
    with tf.Graph().as_default(), tf.Session(config=one_thread()) as session:
        images = tf.placeholder(dtype, [inputs.BATCH_SIZE, 28, 28, 1])
        labels = tf.placeholder(tf.int64, [inputs.BATCH_SIZE])
        optimizer = momentum(learning_rate, dtype)
        losses, gradients = [], []
        with tf.variable_scope(tf.get_variable_scope()):
            halves = zip(tf.split(images, 2), tf.split(labels, 2), strict=True)
            for tower, (tower_images, tower_labels) in enumerate(halves):
                with tf.name_scope(f"tower_{tower}"):
                    losses.append(tower_loss(tower_images, tower_labels, dtype, lrn))
                    tf.get_variable_scope().reuse_variables()
                    gradients.append(optimizer.compute_gradients(losses[-1]))
        averaged = average_gradients(gradients)
        update = optimizer.apply_gradients(averaged)
        session.run(tf.global_variables_initializer())
        sha256 = load_initial(session, dtype)

        batch_images, batch_labels = inputs.batches(dtype)
        curve, first = [], {}
        for step in range(num_steps):
            batch = step % len(batch_images)
            feed = {images: batch_images[batch], labels: batch_labels[batch]}
            _, step_losses, values = session.run([update, losses, [gradient for gradient, _ in averaged]], feed)
            curve.append(step_losses)
            first = first or {name_of(v): value for (_, v), value in zip(averaged, values, strict=True)}
        settings = {"dtype": dtype, "num_towers": 2, "learning_rate": learning_rate, "lrn": lrn, "clip_norm": None}
        return {
            **settings,
            "initial_weights_sha256": sha256,
            "losses": curve,
            "first_gradients": summary(first),
            "weight_changes": changes({name_of(v): session.run(v) for v in tf.trainable_variables()}, dtype),
        }


def slim_loop(dtype: str, learning_rate: float) -> dict[str, Any]:
    """Twenty updates by `slim.learning.train`, one tower of 32 examples, each variable's gradient clipped by norm."""
    curve, final, digests = [], {}, []

    def recording_step(session: Any, train_op: Any, global_step: Any, arguments: Any) -> tuple[Any, bool]:
        loss, should_stop = slim.learning.train_step(session, train_op, global_step, arguments)
        curve.append([loss])
        final.update({name_of(v): session.run(v) for v in tf.trainable_variables()})
        return loss, should_stop

    with tf.Graph().as_default():
        batch_images, batch_labels = inputs.batches(dtype)
        batch = tf.train.get_or_create_global_step() % len(batch_images)
        images, labels = tf.gather(tf.constant(batch_images), batch), tf.gather(tf.constant(batch_labels), batch)
        loss = tower_loss(images, labels, dtype, lrn=False)
        train_op = slim.learning.create_train_op(
            loss, momentum(learning_rate, dtype), clip_gradient_norm=SLIM_CLIP_NORM
        )
        slim.learning.train(
            train_op,
            logdir=None,
            number_of_steps=NUM_STEPS,
            train_step_fn=recording_step,
            init_fn=lambda session: digests.append(load_initial(session, dtype)),
            session_config=one_thread(),
        )
    settings = {"dtype": dtype, "num_towers": 1, "learning_rate": learning_rate, "lrn": False}
    return {
        **settings,
        "clip_norm": SLIM_CLIP_NORM,
        "initial_weights_sha256": digests[0],
        "losses": curve,
        "first_gradients": {},
        "weight_changes": changes(final, dtype),
    }


def momentum(learning_rate: Any, dtype: str) -> Any:
    """The reference's optimizer. A plain Python number would be rounded to float32, whatever the variables are."""
    number = np.dtype(dtype).type
    rate = learning_rate if tf.is_tensor(learning_rate) else number(learning_rate)
    return tf.train.MomentumOptimizer(rate, number(inputs.MOMENTUM), use_nesterov=True)


def one_thread() -> Any:
    return tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)


def name_of(variable: Any) -> str:
    return variable.op.name


def load_initial(session: Any, dtype: str) -> str:
    """Give the variables their initial values, and return those values' digest."""
    values = inputs.initial_weights(dtype)
    for variable in tf.trainable_variables():
        variable.load(values[name_of(variable)], session)
    return inputs.digest(values)


def changes(final: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What the run added to the weights."""
    initial = inputs.initial_weights(dtype)
    return summary({name: value.astype(np.float64) - initial[name] for name, value in final.items()})


def summary(values: dict[str, Any]) -> dict[str, Any]:
    """Sum, norm and a few values of each array, added up in float64."""
    described = {}
    for name, value in values.items():
        flat = value.astype(np.float64).ravel()
        sampled = flat[inputs.sampled_indices(flat.size)]
        described[name] = {"sum": flat.sum(), "norm": np.sqrt(np.square(flat).sum()), "sampled": sampled}
    return described


# Single operations ------------------------------------------------------------------------------------------------


def evaluated(*tensors: Any) -> list[Any]:
    with tf.Session(config=one_thread()) as session:
        return session.run(list(tensors))


def in_top_k() -> dict[str, Any]:
    """Ties at, above and below the boundary, scores that are not finite, labels that are no class."""
    inf, nan = float("inf"), float("nan")
    rows = [
        ([0.1, 0.9, 0.3, 0.2], 1),
        ([0.1, 0.9, 0.3, 0.2], 2),
        ([0.1, 0.9, 0.3, 0.2], 0),
        ([0.5, 0.5, 0.5, 0.5], 3),
        ([0.7, 0.5, 0.5, 0.1], 2),
        ([0.7, 0.7, 0.5, 0.1], 1),
        ([0.7, 0.7, 0.5, 0.5], 3),
        ([0.7, 0.6, 0.5, 0.5], 3),
        ([-0.0, 0.0, -1.0, -1.0], 0),
        ([inf, 0.9, 0.3, 0.2], 1),
        ([inf, 0.9, 0.3, 0.2], 0),
        ([0.1, 0.9, 0.3, -inf], 1),
        ([0.1, 0.9, nan, 0.2], 1),
        ([nan, 0.9, 0.3, 0.2], 0),
        ([0.1, 0.9, 0.3, 0.2], -1),
        ([0.1, 0.9, 0.3, 0.2], 4),
    ]
    scores, labels = [row for row, _ in rows], [label for _, label in rows]
    expected = {}
    with tf.Graph().as_default():
        for k in (1, 2, 3, 4, 5):
            predictions = tf.constant(scores, tf.float32)
            expected[str(k)] = evaluated(tf.nn.in_top_k(predictions, tf.constant(labels, tf.int64), k))[0]
    # As text, because JSON has no word for what is not finite.
    return {"scores": [[repr(score) for score in row] for row in scores], "labels": labels, "expected": expected}


def local_response_normalization() -> dict[str, Any]:
    """Outputs, and the gradients of their weighted sum, where the window meets both ends of the channels."""
    random = np.random.RandomState(5)
    # Large values: with small ones the divisor is 1 and nothing is shown.
    values = (random.random_sample((2, 2, 3, 12)) * 200 - 100).astype(np.float32)
    weights = random.random_sample(values.shape).astype(np.float32)
    with tf.Graph().as_default():
        images = tf.constant(values)
        outputs = normalised(images)
        gradient = tf.gradients(tf.reduce_sum(outputs * tf.constant(weights)), images)[0]
        results = evaluated(outputs, gradient)
    return {"inputs": values, "output_weights": weights, "outputs": results[0], "gradients": results[1]}


def truncated_normal() -> dict[str, Any]:
    """Standard deviation and quantiles of a million numbers from TensorFlow's initialiser of standard deviation 1."""
    with tf.Graph().as_default():
        draws = evaluated(tf.truncated_normal_initializer(stddev=1.0, seed=1)([1_000_000]))[0].astype(np.float64)
    probabilities = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]
    return {
        "std": draws.std(),
        "largest": np.abs(draws).max(),
        "probabilities": probabilities,
        "quantiles": np.quantile(draws, probabilities),
    }


def nesterov() -> dict[str, Any]:
    """Momentum with Nesterov's look-ahead where the rate changes at each step."""
    random = np.random.RandomState(7)
    start, gradients = random.random_sample(5), random.random_sample((12, 5)) - 0.5
    rates = 0.5 / np.arange(1, 13)
    with tf.Graph().as_default(), tf.Session(config=one_thread()) as session:
        rate, gradient = tf.placeholder(tf.float64, []), tf.placeholder(tf.float64, [5])
        variable = tf.get_variable("variable", initializer=tf.constant(start))
        update = momentum(rate, "float64").apply_gradients([(gradient, variable)])
        session.run(tf.global_variables_initializer())
        path = []
        for step, value in enumerate(rates):
            session.run(update, {rate: value, gradient: gradients[step]})
            path.append(session.run(variable))
    return {"momentum": inputs.MOMENTUM, "start": start, "gradients": gradients, "rates": rates, "path": path}


if __name__ == "__main__":
    main()
