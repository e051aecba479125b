"""Keras 3 on TensorFlow: `compile` and `fit`, with XLA by `--compile`, and without it."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import tensorflow as tf
from keras import layers
from turns import (
    FIRST_STEPS,
    RESNET18_BLOCKS,
    WORKLOADS,
    Places,
    Turns,
    first_weights,
    inception_kernels,
    parsed,
    tensorflow_batches,
    tensorflow_kernel,
)  # fmt: skip

arguments = parsed()
workload = WORKLOADS[arguments.workload]
if arguments.precision == "bf16":
    keras.mixed_precision.set_global_policy("mixed_bfloat16")


def conv(x, filters, size, stride=1, *, pad, name, bias=False):
    if stride > 1:  # TensorFlow would pad one side alone
        x, padding = layers.ZeroPadding2D(pad)(x), "valid"
    else:
        padding = "same"
    return layers.Conv2D(filters, size, stride, padding, use_bias=bias, name=name)(x)


def batch_norm(x, name):
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)(x)


def tiny():
    images = x = keras.Input((64,))
    x = layers.Dense(64, "relu", name="0")(x)
    return keras.Model(images, layers.Dense(10, dtype="float32", name="2")(x))


def mnist():
    images = keras.Input((28, 28, 1), dtype="uint8")
    x = layers.Rescaling(1 / 255, -0.5)(images)
    for name, filters in (("conv1", 32), ("conv2", 64)):
        x = layers.ReLU()(conv(x, filters, 5, pad=2, name=name, bias=True))
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(1024, "relu", name="fc1")(layers.Flatten()(x))
    return keras.Model(images, layers.Dense(10, dtype="float32", name="fc2")(x))


def block(x, filters, stride, name):
    shortcut = x
    if stride > 1 or x.shape[-1] != filters:
        shortcut = conv(x, filters, 1, stride, pad=0, name=f"{name}.down.0")
        shortcut = batch_norm(shortcut, f"{name}.down.1")
    x = layers.ReLU()(batch_norm(conv(x, filters, 3, stride, pad=1, name=f"{name}.conv1"), f"{name}.bn1"))
    x = batch_norm(conv(x, filters, 3, pad=1, name=f"{name}.conv2"), f"{name}.bn2")
    return layers.ReLU()(layers.Add()([x, shortcut]))


def resnet18():
    images = keras.Input((64, 64, 3), dtype="uint8")
    x = layers.Rescaling(1 / 255, -0.5)(images)
    x = layers.ReLU()(batch_norm(conv(x, 64, 7, 2, pad=3, name="conv1"), "bn1"))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))  # after ReLU, so that zeros change no maximum
    for number, (filters, stride) in enumerate(RESNET18_BLOCKS):
        x = block(x, filters, stride, f"blocks.{number}")
    return keras.Model(images, layers.Dense(100, dtype="float32", name="fc")(layers.GlobalAveragePooling2D()(x)))


def inception():
    images = keras.Input((299, 299, 3), dtype="uint8")
    scaled = layers.Rescaling(1 / 255, -0.5)(images)
    return keras.applications.InceptionV3(weights=None, input_tensor=scaled, classes=1000, classifier_activation=None)


def set_weights(model):
    """Torch's weights in Keras's layouts."""
    if workload.net == "inception":  # whose layers are numbered as they were made
        made = [layer for layer in model.layers if isinstance(layer, layers.Conv2D)]
        made.sort(key=lambda layer: int(layer.name.partition("_")[2] or 0))
        *kernels, last = inception_kernels(arguments)
        for layer, kernel in zip(made, kernels, strict=True):
            layer.set_weights([kernel])
        model.get_layer("predictions").set_weights([last, first_weights(arguments)["fc.bias"]])
        return
    given = first_weights(arguments)
    for layer in model.layers:
        if f"{layer.name}.running_mean" in given:
            names = ("weight", "bias", "running_mean", "running_var")
            layer.set_weights([given[f"{layer.name}.{name}"] for name in names])
        elif f"{layer.name}.weight" in given:
            kernel = tensorflow_kernel(layer.name, given[f"{layer.name}.weight"])
            layer.set_weights([kernel, *([given[f"{layer.name}.bias"]] if layer.use_bias else [])])


class TakesTurns(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        turns.made_step()


model = {"tiny": tiny, "mnist": mnist, "resnet18": resnet18, "inception": inception}[workload.net]()
set_weights(model)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(workload.lr, workload.momentum), loss, jit_compile=arguments.compile)
images, labels = tensorflow_batches(arguments)
epoch = tf.data.Dataset.from_tensor_slices((images, labels))
turns = Turns()
turns.begin(keras=keras.__version__, tensorflow=tf.__version__)
batches = epoch.repeat().prefetch(tf.data.AUTOTUNE)
if arguments.what == "train":
    model.fit(batches, steps_per_epoch=arguments.steps, verbose=0, callbacks=[TakesTurns()])
else:
    model.fit(batches, steps_per_epoch=FIRST_STEPS, verbose=0)
if arguments.what == "evaluate":
    once = epoch.prefetch(tf.data.AUTOTUNE)
    turns.end(turns.repeat(arguments, lambda: model.evaluate(once, verbose=0)))
elif arguments.what == "save":
    places = Places(arguments, ".keras")
    turns.repeat(arguments, lambda: model.save(places.next()))
if workload.loss_in_training:
    model.reset_metrics()
    turns.end(model.train_on_batch(images[0], labels[0]))
elif arguments.what != "evaluate":
    turns.end(model.evaluate(images[0], labels[0], batch_size=workload.batch_size, verbose=0))
