"""Record what real TensorFlow, TF-Slim and Keras do in the update. Run by hand, never in the tests.

    python3.11 -m venv /tmp/tensorflow
    /tmp/tensorflow/bin/pip install "tensorflow-cpu==2.21.*" tf-slim
    /tmp/tensorflow/bin/python tests/golden/make_update_golden.py

It writes `update_golden.json.gz` beside itself, in float64 and in float32: the parameters along 25 updates by each
optimizer, learning rates by each schedule, clipped and scaled gradients, averages, losses with their gradients,
batch-norm statistics.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import update_cases as cases
import update_inputs as inputs
from tensorflow_graphs import as_text, both, graph, in_both, keras, slim, tf, tf2, widened

HERE = Path(__file__).parent


def main() -> None:
    optimizers = {name: in_both(keras_path, *case) for name, case in cases.KERAS_OPTIMIZERS.items()}
    tf.disable_v2_behavior()  # After Keras, which wants TensorFlow 2.
    optimizers |= {name: in_both(dense_path, *case) for name, case in cases.OPTIMIZERS.items()}
    sparse = {name: in_both(sparse_path, *cases.OPTIMIZERS[name]) for name in cases.SPARSE_OPTIMIZERS}
    scheduled = {"kind": "MomentumOptimizer", "kwargs": {"momentum": 0.9}, "exponential_decay": cases.STAIRCASE}
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
        "schedules": {name: in_both(learning_rates, *case) for name, case in cases.SCHEDULES.items()},
        "gradients": both(clips_and_scales),
        "train_op": {
            "multipliers": inputs.MULTIPLIERS,
            "clip_gradient_norm": inputs.CLIP_NORM,
            "momentum": {"learning_rate": 0.05, "momentum": 0.9, **both(train_op_with_momentum)},
            "sparse": {"learning_rate": 0.05, **both(sparse_train_op)},
        },
        "averages": both(parameter_averages),
        "loss_averages": {"decay": 0.9, **both(loss_averages)},
        "losses": {name: loss_case(*case) for name, case in cases.LOSSES.items()},
        "regularizers": {"l1": 0.3, "l2": 0.2, **both(regularizers)},
        "batch_norm": {"decay": inputs.BATCH_NORM_DECAY, "epsilon": 0.001, **batch_norm()},
    }
    (HERE / "update_golden.json.gz").write_bytes(gzip.compress(as_text(recorded).encode(), mtime=0))


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
        feeds = [{rows: r, values: v} for r, v in inputs.sparse_gradients(dtype, repeated=True)]
        return walk(session, update, {"embedding": embedding}, feeds)


def scheduled_path(dtype: str) -> dict[str, Any]:
    """Momentum whose rate comes from a schedule of the global step."""
    with graph(dtype) as session:
        variables, given = parameters(dtype), fed_gradients(dtype)
        global_step = tf.train.get_or_create_global_step()
        rate = tf.train.exponential_decay(global_step=global_step, **widened(cases.STAIRCASE, dtype))
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
    """The same with rows of the embedding that are looked up, each once a step, and gradient descent."""
    with graph(dtype) as session:
        embedding = parameters(dtype)["embedding"]
        rows, values = tf.placeholder(tf.int64, [4]), tf.placeholder(dtype, [4, 2])
        loss = tf.reduce_sum(values * tf.gather(embedding, rows))
        optimizer = optimizer_of("GradientDescentOptimizer", {"learning_rate": 0.05}, dtype)
        feeds = [{rows: r, values: v} for r, v in inputs.sparse_gradients(dtype, repeated=False)]
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
