"""Record what real TensorFlow, TF-Slim and Keras do in the update. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" tf-slim
    /tmp/tensorflow/bin/python tests/golden/make_update_golden.py

It writes `update_golden.json` beside itself: the parameters along 25 updates by each optimizer, learning rates by each
schedule, clipped and scaled gradients, averages, losses with their gradients, batch-norm statistics. Each is recorded
in float64 and in float32. TensorFlow turns Python's numbers into float32, and some of its functions always calculate
in float32 (the decay of an average, losses, a cosine). So the float64 runs are given numpy's float64 numbers, and those
functions then find float64 where they ask for float32: the rules are TensorFlow's own code, with all the digits.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # The kernels that TensorFlow had from the start, the same on each machine.

import keras
import numpy as np
import tensorflow as tf2
import tf_slim as slim
import update_inputs as inputs
from tensorflow.python.framework import ops
from tensorflow.python.keras.optimizer_v2 import learning_rate_schedule
from tensorflow.python.ops.losses import losses_impl
from tensorflow.python.training import moving_averages

tf = tf2.compat.v1
# TF-Slim 1.1 asks for these classes where TensorFlow no longer keeps them.
ops.IndexedSlices, ops.Tensor = tf2.IndexedSlices, tf2.Tensor
HERE = Path(__file__).parent
DTYPES = ("float64", "float32")
STAIRCASE = {"learning_rate": 0.1, "decay_steps": 4, "decay_rate": 0.5, "staircase": True}

# name -> (class in tf.compat.v1.train, its arguments)
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient_descent": ("GradientDescentOptimizer", {"learning_rate": 0.05}),
    "momentum": ("MomentumOptimizer", {"learning_rate": 0.02, "momentum": 0.9}),
    "nesterov": ("MomentumOptimizer", {"learning_rate": 0.02, "momentum": 0.9, "use_nesterov": True}),
    "rmsprop_inception": (
        "RMSPropOptimizer",
        {"learning_rate": 0.05, "decay": 0.9, "momentum": 0.9, "epsilon": 1.0},
    ),
    "rmsprop": ("RMSPropOptimizer", {"learning_rate": 0.05, "decay": 0.9, "momentum": 0.0, "epsilon": 1e-10}),
    "rmsprop_inception_centered": (
        "RMSPropOptimizer",
        {"learning_rate": 0.05, "decay": 0.9, "momentum": 0.9, "epsilon": 1.0, "centered": True},
    ),
    "rmsprop_centered": (
        "RMSPropOptimizer",
        {"learning_rate": 0.05, "decay": 0.9, "momentum": 0.0, "epsilon": 1e-10, "centered": True},
    ),
    "adam": ("AdamOptimizer", {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
    "adam_epsilon_1": ("AdamOptimizer", {"learning_rate": 0.5, "beta1": 0.9, "beta2": 0.999, "epsilon": 1.0}),
    "adagrad": ("AdagradOptimizer", {"learning_rate": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": ("AdadeltaOptimizer", {"learning_rate": 100.0, "rho": 0.95, "epsilon": 1e-8}),
    "adadelta_epsilon_1": ("AdadeltaOptimizer", {"learning_rate": 0.05, "rho": 0.95, "epsilon": 1.0}),
    "ftrl": (
        "FtrlOptimizer",
        {
            "learning_rate": 0.1,
            "learning_rate_power": -0.5,
            "initial_accumulator_value": 0.1,
            "l1_regularization_strength": 0.0,
            "l2_regularization_strength": 0.0,
        },
    ),
    "ftrl_l1_l2": (
        "FtrlOptimizer",
        {
            "learning_rate": 0.1,
            "learning_rate_power": -0.5,
            "initial_accumulator_value": 0.1,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
        },
    ),
    # The one whose parameters come to lie at 0.
    "ftrl_large_l1": (
        "FtrlOptimizer",
        {
            "learning_rate": 0.1,
            "learning_rate_power": -0.5,
            "initial_accumulator_value": 0.1,
            "l1_regularization_strength": 4.0,
            "l2_regularization_strength": 0.0,
        },
    ),
    "ftrl_l2_shrinkage": (
        "FtrlOptimizer",
        {
            "learning_rate": 0.1,
            "learning_rate_power": -0.5,
            "initial_accumulator_value": 0.1,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.03,
        },
    ),
}
SPARSE_OPTIMIZERS = ("gradient_descent", "adagrad")
# name -> (class in keras.optimizers, its arguments); Keras's epsilon is added to the root, as TensorFlow 1's was:
# AdamW's to the root before bias correction (epsilon-hat), Lamb's to the corrected one.
KERAS_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": (
        "AdamW",
        {"learning_rate": 0.05, "weight_decay": 0.1, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7},
    ),
    "adamw_epsilon_0.1": (
        "AdamW",
        {"learning_rate": 0.05, "weight_decay": 0.1, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 0.1},
    ),
    "lamb": ("Lamb", {"learning_rate": 0.05, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-6}),
}
# name -> (function in tf.compat.v1.train, its arguments)
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "exponential": ("exponential_decay", {**STAIRCASE, "staircase": False}),
    "exponential_staircase": ("exponential_decay", STAIRCASE),
    "polynomial": (
        "polynomial_decay",
        {"learning_rate": 0.1, "decay_steps": 12, "end_learning_rate": 0.01, "power": 1.0, "cycle": False},
    ),
    "polynomial_power_2": (
        "polynomial_decay",
        {"learning_rate": 0.1, "decay_steps": 12, "end_learning_rate": 0.01, "power": 2.0, "cycle": False},
    ),
    "polynomial_cycle": (
        "polynomial_decay",
        {"learning_rate": 0.1, "decay_steps": 12, "end_learning_rate": 0.01, "power": 1.0, "cycle": True},
    ),
    "polynomial_power_2_cycle": (
        "polynomial_decay",
        {"learning_rate": 0.1, "decay_steps": 12, "end_learning_rate": 0.01, "power": 2.0, "cycle": True},
    ),
    "cosine": ("cosine_decay", {"learning_rate": 0.1, "decay_steps": 30, "alpha": 0.0}),
    "cosine_alpha": ("cosine_decay", {"learning_rate": 0.1, "decay_steps": 30, "alpha": 0.2}),
    "piecewise_constant": ("piecewise_constant", {"boundaries": [3, 10, 25], "values": [1.0, 0.3, 0.1, 0.01]}),
}
SMOOTHED = {"label_smoothing": 0.1}
# name -> (function in tf.compat.v1.losses and tf_slim.losses, predictions, labels, further arguments)
LOSSES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "softmax_cross_entropy": ("softmax_cross_entropy", "logits", "one_hot", {}),
    "softmax_cross_entropy_smoothed": ("softmax_cross_entropy", "logits", "one_hot", SMOOTHED),
    "sigmoid_cross_entropy": ("sigmoid_cross_entropy", "logits", "binary", {}),
    "sigmoid_cross_entropy_smoothed": ("sigmoid_cross_entropy", "logits", "binary", SMOOTHED),
    "log_loss": ("log_loss", "probabilities", "binary", {}),
    "hinge_loss": ("hinge_loss", "logits", "binary", {}),
    "absolute_difference": ("absolute_difference", "logits", "targets", {}),
    "mean_squared_error": ("mean_squared_error", "logits", "targets", {}),
    "cosine_distance": ("cosine_distance", "unit_predictions", "unit_targets", {}),
}


def main() -> None:
    optimizers = {name: in_both(keras_path, *case) for name, case in KERAS_OPTIMIZERS.items()}
    tf.disable_v2_behavior()  # After Keras, which wants TensorFlow 2.
    optimizers |= {name: in_both(dense_path, *case) for name, case in OPTIMIZERS.items()}
    sparse = {name: in_both(sparse_path, *OPTIMIZERS[name]) for name in SPARSE_OPTIMIZERS}
    scheduled = {"kind": "MomentumOptimizer", "kwargs": {"momentum": 0.9}, "exponential_decay": STAIRCASE}
    recorded = {
        "about": {
            "tensorflow": tf2.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
            "inputs_sha256": inputs.digest(),
        },
        "optimizers": optimizers,
        "sparse_optimizers": sparse,
        "scheduled_momentum": {**scheduled, **both(scheduled_path)},
        "schedules": {name: in_both(learning_rates, *case) for name, case in SCHEDULES.items()},
        "gradients": both(clips_and_scales),
        "train_op": {
            "multipliers": inputs.MULTIPLIERS,
            "clip_gradient_norm": inputs.CLIP_NORM,
            "momentum": {"learning_rate": 0.05, "momentum": 0.9, **both(train_op_with_momentum)},
            "sparse": {"learning_rate": 0.05, **both(sparse_train_op)},
        },
        "averages": both(parameter_averages),
        "loss_averages": {"decay": 0.9, **both(loss_averages)},
        "losses": {name: loss_case(*case) for name, case in LOSSES.items()},
        "regularizers": {"l1": 0.3, "l2": 0.2, **both(regularizers)},
        "batch_norm": {"decay": inputs.BATCH_NORM_DECAY, "epsilon": 0.001, **batch_norm()},
    }
    (HERE / "update_golden.json").write_text(as_text(recorded) + "\n")


def in_both(record: Callable[..., Any], kind: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "kwargs": kwargs, **both(lambda dtype: record(kind, kwargs, dtype))}


def both(record: Callable[[str], Any]) -> dict[str, Any]:
    return {dtype: record(dtype) for dtype in DTYPES}


def as_text(value: Any, indent: str = "\n") -> str:
    """JSON with a name's arrays on one line."""
    if not isinstance(value, dict):
        return json.dumps(as_numbers(value))
    inner = indent + " "
    return "{" + ",".join(f"{inner}{json.dumps(k)}: {as_text(v, inner)}" for k, v in value.items()) + indent + "}"


def as_numbers(value: Any) -> Any:
    """Lists of Python's numbers; those of float32 with as few digits as tell them apart."""
    if isinstance(value, list | tuple):
        return [as_numbers(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return as_numbers(value.tolist()) if value.dtype != np.float32 else as_numbers32(value)
    return value


def as_numbers32(value: Any) -> Any:
    return [as_numbers32(v) for v in value] if np.ndim(value) else float(str(value))


# TensorFlow, in graphs, in either width -----------------------------------------------------------------------------


@contextlib.contextmanager
def graph(dtype: str) -> Iterator[Any]:
    """A session in a graph of its own; with float64, TensorFlow's fixed float32 is float64 in what we record."""
    config = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with contextlib.ExitStack() as stack:
        for module in (moving_averages, losses_impl):
            stack.enter_context(changed(module, "dtypes", float32=tf.as_dtype(dtype)))
        stack.enter_context(changed(learning_rate_schedule, "math", pi=np.dtype(dtype).type(np.pi)))
        stack.enter_context(changed(learning_rate_schedule, "array_ops", where_v2=where_of_one_dtype))
        stack.enter_context(tf.Graph().as_default())
        yield stack.enter_context(tf.Session(config=config))


def changed(module: Any, name: str, **replacements: Any) -> Any:
    """While it is entered, the module sees another module, by that name, with other values in it."""
    return mock.patch.object(module, name, SimpleNamespace(**{**vars(getattr(module, name)), **replacements}))


def where_of_one_dtype(condition: Any, number: float, tensor: Any) -> Any:
    return tf2.where(condition, tf.cast(number, tensor.dtype), tensor)


def widened(value: Any, dtype: str) -> Any:
    """Numbers of that dtype: a plain Python number would be rounded to float32, whatever the variables are."""
    if isinstance(value, float):
        return np.dtype(dtype).type(value)
    if isinstance(value, list):
        return [widened(v, dtype) for v in value]
    return {k: widened(v, dtype) for k, v in value.items()} if isinstance(value, dict) else value


def optimizer_of(kind: str, kwargs: dict[str, Any], dtype: str) -> Any:
    return getattr(tf.train, kind)(**widened(kwargs, dtype))


def parameters(dtype: str) -> dict[str, Any]:
    """The variables, with their first values."""
    return {n: tf.get_variable(n, initializer=tf.constant(v)) for n, v in inputs.initial(dtype).items()}


def fed_gradients(dtype: str) -> dict[str, Any]:
    return {name: tf.placeholder(dtype, shape) for name, shape in inputs.SHAPES.items()}


def walk(session: Any, train_op: Any, variables: dict[str, Any], feeds: list[dict[Any, Any]]) -> dict[str, Any]:
    """Run an update for each feed; the variables after the recorded steps, by step."""
    session.run(tf.global_variables_initializer())
    path = {}
    for step, feed in enumerate(feeds, start=1):
        session.run(train_op, feed)
        if step in inputs.RECORDED_STEPS:
            path[str(step)] = session.run(variables)
    return path


# Optimizers ---------------------------------------------------------------------------------------------------------


def keras_path(kind: str, kwargs: dict[str, Any], dtype: str) -> dict[str, Any]:
    keras.config.set_floatx(dtype)
    variables = {name: tf2.Variable(value) for name, value in inputs.initial(dtype).items()}
    # Keras takes Python's numbers alone for float32, and rounds them to it where they are of no wider type.
    optimizer = getattr(keras.optimizers, kind)(**(widened(kwargs, dtype) if dtype == "float64" else kwargs))
    path = {}
    for step, gradients in enumerate(inputs.gradients(dtype), start=1):
        optimizer.apply_gradients([(tf2.constant(gradients[name]), variables[name]) for name in variables])
        if step in inputs.RECORDED_STEPS:
            path[str(step)] = {name: variable.numpy() for name, variable in variables.items()}
    return path


def dense_path(kind: str, kwargs: dict[str, Any], dtype: str) -> dict[str, Any]:
    with graph(dtype) as session:
        variables, given = parameters(dtype), fed_gradients(dtype)
        update = optimizer_of(kind, kwargs, dtype).apply_gradients([(given[n], variables[n]) for n in variables])
        feeds = [{given[n]: step[n] for n in given} for step in inputs.gradients(dtype)]
        return walk(session, update, variables, feeds)


def sparse_path(kind: str, kwargs: dict[str, Any], dtype: str) -> dict[str, Any]:
    with graph(dtype) as session:
        embedding = parameters(dtype)["embedding"]
        rows, values = tf.placeholder(tf.int64, [4]), tf.placeholder(dtype, [4, 2])
        gradient = tf.IndexedSlices(values, rows, tf.constant(inputs.SHAPES["embedding"], tf.int64))
        update = optimizer_of(kind, kwargs, dtype).apply_gradients([(gradient, embedding)])
        feeds = [{rows: r, values: v} for r, v in inputs.sparse_gradients(dtype)]
        return walk(session, update, {"embedding": embedding}, feeds)


def scheduled_path(dtype: str) -> dict[str, Any]:
    """Momentum whose rate comes from a schedule of the global step."""
    with graph(dtype) as session:
        variables, given = parameters(dtype), fed_gradients(dtype)
        global_step = tf.train.get_or_create_global_step()
        rate = tf.train.exponential_decay(global_step=global_step, **widened(STAIRCASE, dtype))
        optimizer = optimizer_of("MomentumOptimizer", {"learning_rate": rate, "momentum": 0.9}, dtype)
        update = optimizer.apply_gradients([(given[n], variables[n]) for n in variables], global_step)
        feeds = [{given[n]: step[n] for n in given} for step in inputs.gradients(dtype)]
        return walk(session, update, variables, feeds)


def learning_rates(kind: str, kwargs: dict[str, Any], dtype: str) -> Any:
    with graph(dtype) as session:
        step = tf.placeholder(tf.int64, [])
        given = "x" if kind == "piecewise_constant" else "global_step"
        rate = getattr(tf.train, kind)(**{given: step}, **widened(kwargs, dtype))
        return np.array([session.run(rate, {step: s}) for s in inputs.SCHEDULE_STEPS])


# Gradients ----------------------------------------------------------------------------------------------------------


def clips_and_scales(dtype: str) -> dict[str, Any]:
    """Each set of gradients, dense or sparse, through each clip and scaling."""
    with graph(dtype) as session:
        variables = parameters(dtype)
        dense = {
            name: through_all([(tf.constant(values[n]), variables[n]) for n in variables], dtype)
            for name, values in inputs.single_gradients(dtype).items()
        }
        shape = tf.constant(inputs.SHAPES["embedding"], tf.int64)
        sparse = {
            name: through_all([(tf.IndexedSlices(values, rows, shape), variables["embedding"])], dtype)
            for name, (rows, values) in inputs.sparse_sets(dtype).items()
        }
        return session.run({"clip_norm": tf.constant(widened(inputs.CLIP_NORM, dtype)), **dense, **sparse})


def through_all(pairs: list[tuple[Any, Any]], dtype: str) -> dict[str, Any]:
    """The gradients after each of TensorFlow's and TF-Slim's functions alone."""
    names = [variable.op.name for _, variable in pairs]
    largest, gradients = widened(inputs.CLIP_NORM, dtype), [gradient for gradient, _ in pairs]
    multipliers = {name: inputs.MULTIPLIERS[name] for name in names}
    clipped, norm = tf.clip_by_global_norm(gradients, largest)
    results = {
        "clip_gradient_norms": [g for g, _ in slim.learning.clip_gradient_norms(pairs, largest)],
        "multiply_gradients": [g for g, _ in slim.learning.multiply_gradients(pairs, multipliers)],
        "clip_by_global_norm": clipped,
    }
    if not isinstance(gradients[0], tf.IndexedSlices):
        results["clip_by_value"] = [tf.clip_by_value(g, -largest, largest) for g in gradients]
    by_name = {kind: dict(zip(names, map(dense_values, gs), strict=True)) for kind, gs in results.items()}
    return {"global_norm": norm, **by_name}


def dense_values(gradient: Any) -> Any:
    """Of sparse gradients the rows as they are: their numbers stay."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.identity(gradient)


def train_op_with_momentum(dtype: str) -> dict[str, Any]:
    """TF-Slim's whole train op: gradients scaled, then each clipped, then momentum."""
    with graph(dtype) as session:
        variables, given = parameters(dtype), fed_gradients(dtype)
        loss = tf.add_n([tf.reduce_sum(given[n] * variables[n]) for n in variables])  # Its gradients are those given.
        optimizer = optimizer_of("MomentumOptimizer", {"learning_rate": 0.05, "momentum": 0.9}, dtype)
        feeds = [{given[n]: step[n] for n in given} for step in inputs.gradients(dtype)]
        return walk(session, slim_train_op(loss, optimizer), variables, feeds)


def sparse_train_op(dtype: str) -> dict[str, Any]:
    """The same with looked-up rows of the embedding, gradient descent."""
    with graph(dtype) as session:
        embedding = parameters(dtype)["embedding"]
        rows, values = tf.placeholder(tf.int64, [4]), tf.placeholder(dtype, [4, 2])
        loss = tf.reduce_sum(values * tf.gather(embedding, rows))
        optimizer = optimizer_of("GradientDescentOptimizer", {"learning_rate": 0.05}, dtype)
        feeds = [{rows: r, values: v} for r, v in inputs.sparse_gradients(dtype)]
        train_op = slim_train_op(loss, optimizer, variables_to_train=[embedding])
        return walk(session, train_op, {"embedding": embedding}, feeds)


def slim_train_op(loss: Any, optimizer: Any, **kwargs: Any) -> Any:
    trained = [variable.op.name for variable in kwargs.get("variables_to_train", tf.trainable_variables())]
    multipliers = {name: inputs.MULTIPLIERS[name] for name in trained}
    return slim.learning.create_train_op(
        loss, optimizer, gradient_multipliers=multipliers, clip_gradient_norm=inputs.CLIP_NORM, **kwargs
    )


# Averages -----------------------------------------------------------------------------------------------------------


def parameter_averages(dtype: str) -> dict[str, Any]:
    """The average after each step; `num_updates` is the step that the update made, counted from 1."""
    return {
        "constant_0.9": follow(dtype, 0.9, dynamic=False),
        "dynamic_0.9999": follow(dtype, 0.9999, dynamic=True),
        # The one whose dynamic decay meets the bound on the way.
        "dynamic_0.5": follow(dtype, 0.5, dynamic=True),
    }


def follow(dtype: str, decay: float, *, dynamic: bool) -> Any:
    with graph(dtype) as session:
        variable = parameters(dtype)["biases"]
        step, value = tf.placeholder(tf.int64, []), tf.placeholder(dtype, [4])
        average = tf.train.ExponentialMovingAverage(widened(decay, dtype), num_updates=step if dynamic else None)
        assign, update = variable.assign(value), average.apply([variable])
        session.run(tf.global_variables_initializer())
        path = []
        for number, row in enumerate(inputs.followed(dtype), start=1):
            session.run(assign, {value: row})
            session.run(update, {step: number})
            path.append(session.run(average.average(variable)))
        return np.array(path)


def loss_averages(dtype: str) -> dict[str, Any]:
    """The average of a loss, which is no variable: it starts at 0, corrected for that or not."""
    return {"plain": smoothed_loss(dtype, zero_debias=False), "zero_debias": smoothed_loss(dtype, zero_debias=True)}


def smoothed_loss(dtype: str, *, zero_debias: bool) -> Any:
    with graph(dtype) as session:
        value = tf.placeholder(dtype, [])
        average = tf.train.ExponentialMovingAverage(widened(0.9, dtype), zero_debias=zero_debias)
        update = average.apply([value])
        session.run(tf.global_variables_initializer())
        path = []
        for number in inputs.loss_series(dtype):
            session.run(update, {value: number})
            path.append(session.run(average.average(value)))
        return np.array(path)


# Losses -------------------------------------------------------------------------------------------------------------


def loss_case(kind: str, predictions: str, labels: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    by_dtype = both(lambda dtype: weighted_losses(kind, predictions, labels, kwargs, dtype))
    return {"kind": kind, "predictions": predictions, "labels": labels, "kwargs": kwargs, **by_dtype}


def weighted_losses(kind: str, predictions: str, labels: str, kwargs: dict[str, Any], dtype: str) -> dict[str, Any]:
    """TensorFlow's loss, its gradients with respect to the predictions, and TF-Slim's loss, under each weighting."""
    given, recorded = inputs.loss_inputs(dtype), {}
    for name, weights in {"none": 1.0, **inputs.loss_weights(dtype)}.items():
        with graph(dtype) as session:
            scores, truth = tf.constant(given[predictions]), tf.constant(given[labels])
            value = loss_of(tf.losses, kind, scores, truth, weights, widened(kwargs, dtype))
            results = {"value": value, "gradients": tf.gradients(value, scores)[0]}
            # TF-Slim's own losses are of float32 alone, and its hinge loss is not summed up.
            if dtype == "float32" and kind != "hinge_loss":
                results["slim_value"] = loss_of(slim.losses, kind, scores, truth, weights, kwargs)
            recorded[name] = session.run(results)
    return recorded


def loss_of(module: Any, kind: str, scores: Any, truth: Any, weights: Any, kwargs: dict[str, Any]) -> Any:
    """A loss by its many argument names; weights of examples have the shape that it asks for."""
    names = {
        "softmax_cross_entropy": ("logits", "onehot_labels"),
        "sigmoid_cross_entropy": ("logits", "multi_class_labels"),
        "hinge_loss": ("logits", "labels"),
    }.get(kind, ("predictions", "labels"))
    if np.ndim(weights) and kind != "softmax_cross_entropy":
        weights = weights[:, None]
    if kind == "cosine_distance":
        kwargs = {**kwargs, "axis": 1}
    return getattr(module, kind)(**dict(zip(names, (scores, truth), strict=True)), weights=weights, **kwargs)


def regularizers(dtype: str) -> dict[str, Any]:
    """Values and gradients for the weights, with scales 0.3 (L1) and 0.2 (L2)."""
    with graph(dtype) as session:
        weights = tf.constant(inputs.initial(dtype)["weights"])
        rules = {
            "l1": slim.l1_regularizer(0.3),
            "l2": slim.l2_regularizer(0.2),
            "l1_l2": slim.l1_l2_regularizer(0.3, 0.2),
        }
        values = {name: rule(weights) for name, rule in rules.items()}
        return session.run({n: {"value": v, "gradients": tf.gradients(v, weights)[0]} for n, v in values.items()})


# Batch norm ---------------------------------------------------------------------------------------------------------


def batch_norm() -> dict[str, Any]:
    """The fused kernels calculate in float32 alone."""
    return {
        "plain": both(lambda dtype: normalised_batches(dtype, fused=False)),
        "fused": {"float32": normalised_batches("float32", fused=True)},
    }


def normalised_batches(dtype: str, *, fused: bool) -> dict[str, Any]:
    """Moving mean and variance after each batch, the first outputs, and outputs with the final statistics."""
    batches = inputs.batch_norm_images(dtype)
    with graph(dtype) as session:
        images, decay = tf.placeholder(dtype, batches.shape[1:]), widened(inputs.BATCH_NORM_DECAY, dtype)
        # With a collection of another name TF-Slim's own code runs, and not that of a layer of an older Keras.
        settings = {"decay": decay, "fused": fused, "updates_collections": "updates", "scope": "norm"}
        trained = slim.batch_norm(images, is_training=True, **settings)
        scored = slim.batch_norm(images, is_training=False, reuse=True, **settings)
        statistics = {v.op.name.removeprefix("norm/"): v for v in tf.global_variables() if "moving" in v.op.name}
        session.run(tf.global_variables_initializer())
        path, first = {}, None
        for number, batch in enumerate(batches, start=1):
            outputs, _ = session.run([trained, tf.get_collection("updates")], {images: batch})
            first = outputs if first is None else first
            path[str(number)] = session.run(statistics)
        last = session.run(scored, {images: batches[0]})
        return {"statistics": path, "first_outputs": first.ravel(), "scored_outputs": last.ravel()}


if __name__ == "__main__":
    main()
