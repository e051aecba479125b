"""TF-Slim: a graph of its layers, trained by `slim.learning.train`, with a step function of one call of the session."""

import os
from importlib.metadata import version

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tensorflow_2
import tensorflow.compat.v1 as tf
import tf_slim as slim
from tensorflow.python.framework import ops
from tf_slim.nets.inception import inception_v3, inception_v3_arg_scope
from turns import (
    RESNET18_BLOCKS,
    WORKLOADS,
    Turns,
    first_weights,
    inception_kernels,
    parsed,
    tensorflow_batches,
    tensorflow_kernel,
)  # fmt: skip

ops.Tensor = tf.Tensor  # TF-Slim looks for it where it once was
tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)
arguments = parsed()
workload = WORKLOADS[arguments.workload]
STATISTICS = "statistics"  # in a collection of another name than the usual one its own fused batch norm runs


def conv(x, filters, size, stride=1, *, pad, scope, **options):
    if stride > 1:  # TensorFlow would pad one side alone
        x = tf.pad(x, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
    return slim.conv2d(x, filters, size, stride, "VALID" if stride > 1 else "SAME", scope=scope, **options)


def tiny(x):
    return slim.fully_connected(slim.fully_connected(x, 64, scope="0"), 10, activation_fn=None, scope="2")


def mnist(x):
    for scope, filters in (("conv1", 32), ("conv2", 64)):
        x = slim.max_pool2d(conv(x, filters, 5, pad=2, scope=scope), 2)
    return slim.fully_connected(
        slim.fully_connected(slim.flatten(x), 1024, scope="fc1"), 10, activation_fn=None, scope="fc2"
    )


def block(x, filters, stride, scope):
    shortcut = x
    if stride > 1 or x.shape[-1] != filters:
        shortcut = conv(x, filters, 1, stride, pad=0, scope=f"{scope}.down.0", activation_fn=None)
    x = conv(x, filters, 3, stride, pad=1, scope=f"{scope}.conv1")
    x = conv(x, filters, 3, pad=1, scope=f"{scope}.conv2", activation_fn=None)
    return tf.nn.relu(x + shortcut)


def resnet18(x):
    x = conv(x, 64, 7, 2, pad=3, scope="conv1")
    x = slim.max_pool2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), 3, 2)
    for number, (filters, stride) in enumerate(RESNET18_BLOCKS):
        x = block(x, filters, stride, f"blocks.{number}")
    return slim.fully_connected(tf.reduce_mean(x, [1, 2]), 100, activation_fn=None, scope="fc")


def inception(x):
    with slim.arg_scope(inception_v3_arg_scope(weight_decay=0.0, batch_norm_decay=0.9, updates_collections=STATISTICS)):
        return inception_v3(x, 1000, create_aux_logits=False, dropout_keep_prob=1.0)[0]


def loss_of(images, labels, *, is_training):
    images = tf.cast(images, tf.float32) / 255 - 0.5 if images.dtype == tf.uint8 else images
    norm = {"decay": 0.9, "epsilon": 1e-5, "scale": True, "fused": True, "is_training": is_training}
    norm |= {"updates_collections": STATISTICS}
    normalizer = slim.batch_norm if workload.net == "resnet18" else None
    build = {"tiny": tiny, "mnist": mnist, "resnet18": resnet18, "inception": inception}[workload.net]
    with (
        tf.variable_scope("", reuse=tf.AUTO_REUSE),
        slim.arg_scope([slim.conv2d], normalizer_fn=normalizer, normalizer_params=norm if normalizer else None),
    ):
        return tf.losses.sparse_softmax_cross_entropy(labels, build(images))


def torch_weights():
    """The values of all variables, by name, from torch's names and layouts."""
    given, values = first_weights(arguments), {}
    if workload.net == "inception":
        names = [variable.op.name for variable in slim.get_model_variables() if variable.op.name.endswith("/weights")]
        values = dict(zip(names, inception_kernels(arguments), strict=True))
        values[names[-1]] = values[names[-1]][None, None]  # a convolution of one pixel
        return values
    for variable in slim.get_model_variables():
        scope, _, kind = variable.op.name.rpartition("/")
        if scope.endswith("/BatchNorm"):
            scope = scope.removesuffix("/BatchNorm")
            prefix, _, last = scope.rpartition(".")
            number = last.removeprefix("conv")
            of_norm = f"{prefix}.1" if last == "0" else f"{prefix}.bn{number}".lstrip(".")
            name = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
            values[variable.op.name] = given[f"{of_norm}.{name[kind]}"]
            continue
        if kind == "biases":
            values[variable.op.name] = given[f"{scope}.bias"]
        else:
            values[variable.op.name] = tensorflow_kernel(scope, given[f"{scope}.weight"])
    return values


images, labels = tensorflow_batches(arguments)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().prefetch(tf.data.AUTOTUNE)
batch_images, batch_labels = tf.data.make_one_shot_iterator(dataset).get_next()
loss = loss_of(batch_images, batch_labels, is_training=True)
updates = tf.get_collection(STATISTICS)  # before others are added
final_loss = loss_of(tf.constant(images[0]), tf.constant(labels[0]), is_training=workload.loss_in_training)
rule = tf.train.MomentumOptimizer(workload.lr, workload.momentum)
train_op = slim.learning.create_train_op(loss, rule, update_ops=updates)
start_op, start_values = slim.assign_from_values(torch_weights())
turns, losses, made = Turns(), [], 0


def step(session, train_op, global_step, options):
    global made
    session.run(train_op)
    made += 1
    turns.made_step()
    if made == arguments.steps:
        losses.append(session.run(final_loss))
    return 0.0, made == arguments.steps


def start(session):
    session.run(start_op, start_values)
    turns.begin(tf_slim=version("tf-slim"), tensorflow=tensorflow_2.__version__)


slim.learning.train(train_op, None, train_step_fn=step, init_fn=start, saver=None)
turns.end(losses[0])
