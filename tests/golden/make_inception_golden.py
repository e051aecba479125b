"""Record what TF-Slim's Inception-v3 does in real TensorFlow. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" tf-slim
    /tmp/tensorflow/bin/python tests/golden/make_inception_golden.py [training] [checkpoint] [logits]

It writes, into `tests/fixtures/inception`:
training.npz    losses and what became of the variables in runs of a shrunken net;
model.ckpt-6    what `tf.train.Saver` keeps of another run: weights, statistics, their averages, slots, the step;
logits.npz      scores of the whole net on photos, and of the shrunken one with what is in that checkpoint.

The training graph is that of the reference trainer: towers that share variables, the penalties among the losses, the
mean of the towers' gradients, batch-norm updates of the last tower, RMSProp, moving averages of all that is saved.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import inception_inputs as inputs
import numpy as np
from tensorflow_graphs import graph, slim, tf, widened
from tf_slim.nets import inception

# With a collection of another name TF-Slim's own batch norm runs, and not that of a layer of an older Keras.
UPDATES = "updates"
SHRUNKEN = {"depth_multiplier": inputs.DEPTH_MULTIPLIER, "min_depth": inputs.MIN_DEPTH}


def main(parts: Sequence[str]) -> None:
    tf.disable_v2_behavior()
    tf.disable_resource_variables()
    if "training" in parts:
        runs = {name: train(run) for name, run in inputs.RUNS.items()}
        flat = {f"{name}/{key}": value for name, values in runs.items() for key, value in values.items()}
        np.savez_compressed(inputs.FIXTURES / "training.npz", **flat)
    if "checkpoint" in parts:
        train(inputs.CHECKPOINT_RUN, save)
    if "logits" in parts:
        np.savez_compressed(inputs.FIXTURES / "logits.npz", **full_size_logits(), **checkpoint_logits())


def net(
    images: Any, num_classes: int, *, is_training: bool, batch_norm_decay: float = 0.9997, **settings: Any
) -> tuple[Any, Any]:
    """Logits and auxiliary logits, without dropout. The fused kernels of batch norm calculate in float32 alone."""
    dtype = images.dtype.name
    scope = inception.inception_v3_arg_scope(
        weight_decay=widened(inputs.L2_WEIGHT, dtype),
        batch_norm_decay=widened(batch_norm_decay, dtype),
        updates_collections=UPDATES,
        use_fused_batchnorm=dtype == "float32",
    )
    with slim.arg_scope(scope):
        logits, ends = inception.inception_v3(
            images, num_classes, is_training=is_training, dropout_keep_prob=1.0, **settings
        )
    return logits, ends["AuxLogits"]


def load(session: Any, variables: Sequence[Any], start: inputs.Start) -> None:
    """Give the variables of the net the weights that both sides begin with."""
    session.run(tf.global_variables_initializer())
    values = inputs.weights(shapes_of(variables), start, variables[0].dtype.base_dtype.name)
    # In one run: TensorFlow prepares its graph anew for each set of what is asked for.
    session.run([v.initializer for v in variables], {v.initial_value: values[v.op.name] for v in variables})


def shapes_of(variables: Sequence[Any]) -> dict[str, list[int]]:
    return {v.op.name: v.shape.as_list() for v in variables}


# Scores -------------------------------------------------------------------------------------------------------------


def full_size_logits() -> dict[str, Any]:
    """Of the whole net, as it scores, and in float64 as it trains: with the statistics of the batch."""
    scored, _ = full_size("float32", is_training=False)
    trained, auxiliary = full_size("float64", is_training=True)
    return {"scored": scored, "trained": trained, "auxiliary": auxiliary}


def full_size(dtype: str, *, is_training: bool) -> Any:
    images = inputs.full_size_images(dtype)
    with graph(dtype) as session:
        fed = tf.placeholder(dtype, images.shape)
        logits = net(fed, inputs.NUM_IMAGENET_CLASSES, is_training=is_training)
        load(session, tf.global_variables(), inputs.USUAL)
        return session.run(logits, {fed: images})


def checkpoint_logits() -> dict[str, Any]:
    """Of the shrunken net in the checkpoint, with its weights and with its averages."""
    images, scored = inputs.full_size_images("float32"), {}
    with graph("float32") as session:
        fed = tf.placeholder("float32", images.shape)
        logits, _ = net(fed, inputs.NUM_CLASSES, is_training=False, **SHRUNKEN)
        variables = tf.global_variables()
        averages = tf.train.ExponentialMovingAverage(inputs.AVERAGE_DECAY)
        names: dict[str, Callable[[Any], str]] = {
            "checkpoint_weights": lambda v: v.op.name,
            "checkpoint_averages": averages.average_name,
        }
        for name, name_of in names.items():
            tf.train.Saver({name_of(v): v for v in variables}).restore(session, str(inputs.CHECKPOINT))
            scored[name] = session.run(logits, {fed: images})
    return scored


# Training -----------------------------------------------------------------------------------------------------------


def train(run: inputs.Run, finish: Callable[[Any, Any], None] = lambda session, step: None) -> dict[str, Any]:
    """The losses of each step, and sketches of what the run added to variables and averages."""
    with graph(run.dtype) as session:
        size = next(inputs.batches(run))[0].shape
        images, labels = tf.placeholder(run.dtype, size), tf.placeholder(tf.int64, size[:1])
        step = tf.train.get_or_create_global_step()
        optimizer = rmsprop(run, step)
        losses, gradients, updates = towers(run, images, labels, optimizer)
        variables = slim.get_model_variables()
        averages = tf.train.ExponentialMovingAverage(widened(inputs.AVERAGE_DECAY, run.dtype), step)
        with tf.control_dependencies([optimizer.apply_gradients(gradients, step), *updates]):
            train_op = averages.apply(variables)
        shadows = [averages.average(v) for v in variables]
        load(session, variables, run.start)
        session.run([tf.assign(shadow, v) for shadow, v in zip(shadows, variables, strict=True)])
        initial, curve = session.run(variables), []
        for batch_images, batch_labels in inputs.batches(run):
            feed = {images: batch_images, labels: batch_labels}
            # Losses first: one run would not promise that they do not see the update.
            curve.append(np.mean(session.run(losses, feed), axis=0, dtype=np.float64))
            session.run(train_op, feed)
        finish(session, step)
        return {
            "variables": json.dumps(shapes_of(variables)),
            "num_penalties": len(tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)),
            "losses": np.array(curve),
            "changes": sketches(session.run(variables), initial),
            "average_changes": sketches(session.run(shadows), initial),
        }


def rmsprop(run: inputs.Run, step: Any) -> Any:
    rate, factor = widened(run.learning_rate, run.dtype), widened(inputs.DECAY_FACTOR, run.dtype)
    return tf.train.RMSPropOptimizer(
        tf.train.exponential_decay(rate, step, inputs.DECAY_STEPS, factor, staircase=True),
        decay=widened(inputs.RMSPROP_DECAY, run.dtype),
        momentum=widened(inputs.RMSPROP_MOMENTUM, run.dtype),
        epsilon=widened(inputs.RMSPROP_EPSILON, run.dtype),
    )


def towers(run: inputs.Run, images: Any, labels: Any, optimizer: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The losses of each tower, the mean of their gradients, and the batch-norm updates of the last one."""
    losses: list[Any] = []
    gradients: list[Any] = []
    parts = zip(tf.split(images, run.num_towers), tf.split(labels, run.num_towers), strict=True)
    for index, (tower_images, tower_labels) in enumerate(parts):
        num_updates = len(tf.get_collection(UPDATES))
        with tf.name_scope(f"tower_{index}"), variables_of(run.dtype):
            cross_entropies = tower(run, tower_images, tower_labels, reuse=index > 0)
        # A variable has one penalty, in however many towers it is used.
        losses.append([*cross_entropies, tf.add_n(tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES))])
        gradients.append(optimizer.compute_gradients(tf.add_n(losses[-1])))
        updates = tf.get_collection(UPDATES)[num_updates:]
    mean = [
        (tf.add_n([gradient for gradient, _ in pairs]) / run.num_towers, pairs[0][1])
        for pairs in zip(*gradients, strict=True)
    ]
    return losses, mean, updates


def tower(run: inputs.Run, images: Any, labels: Any, *, reuse: bool) -> tuple[Any, Any]:
    """Cross entropies of the logits and of the auxiliary logits, the latter weighted."""
    logits, auxiliary = net(
        images,
        inputs.NUM_CLASSES,
        is_training=True,
        batch_norm_decay=run.batch_norm_decay,
        reuse=reuse,
        **SHRUNKEN,
    )
    targets = tf.one_hot(labels, inputs.NUM_CLASSES, dtype=run.dtype)
    smoothing = widened(inputs.LABEL_SMOOTHING, run.dtype)
    weight = widened(inputs.AUXILIARY_WEIGHT, run.dtype)
    settings = {"label_smoothing": smoothing, "loss_collection": None}
    return (
        tf.losses.softmax_cross_entropy(targets, logits, **settings),
        tf.losses.softmax_cross_entropy(targets, auxiliary, weights=weight, **settings),
    )


def sketches(final: list[Any], initial: list[Any]) -> Any:
    return np.stack([inputs.sketch(new - old) for new, old in zip(final, initial, strict=True)])


def save(session: Any, step: Any) -> None:
    """As the trainers do, without the graph."""
    saver = tf.train.Saver(tf.global_variables())
    saver.save(session, str(inputs.FIXTURES / "model.ckpt"), step, write_meta_graph=False, write_state=False)


def variables_of(dtype: str) -> Any:
    """Variables of this dtype, where TF-Slim would make them float32."""
    return tf.variable_scope(tf.get_variable_scope(), dtype=tf.as_dtype(dtype))


if __name__ == "__main__":
    main(sys.argv[1:] or ["training", "checkpoint", "logits"])
