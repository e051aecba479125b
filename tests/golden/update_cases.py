"""What is recorded of the update: the reference's classes and functions, by their names there, with their arguments."""

from __future__ import annotations

from typing import Any

Case = tuple[str, dict[str, Any]]
"""The name of a class or function, and its arguments."""

STAIRCASE = {"learning_rate": 0.1, "decay_steps": 4, "decay_rate": 0.5, "staircase": True}
_INCEPTION = {"learning_rate": 0.05, "decay": 0.9, "momentum": 0.9, "epsilon": 1.0}
_RMSPROP = {"learning_rate": 0.05, "decay": 0.9, "momentum": 0.0, "epsilon": 1e-10}
_FTRL = {
    "learning_rate": 0.1,
    "learning_rate_power": -0.5,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
}
_FTRL_L1_L2 = {**_FTRL, "l1_regularization_strength": 0.01, "l2_regularization_strength": 0.02}
_POLYNOMIAL = {"learning_rate": 0.1, "decay_steps": 12, "end_learning_rate": 0.01, "power": 1.0, "cycle": False}
_SMOOTHED = {"label_smoothing": 0.1}

# In tf.compat.v1.train.
OPTIMIZERS: dict[str, Case] = {
    "gradient_descent": ("GradientDescentOptimizer", {"learning_rate": 0.05}),
    "momentum": ("MomentumOptimizer", {"learning_rate": 0.02, "momentum": 0.9}),
    "nesterov": ("MomentumOptimizer", {"learning_rate": 0.02, "momentum": 0.9, "use_nesterov": True}),
    "rmsprop_inception": ("RMSPropOptimizer", _INCEPTION),
    "rmsprop": ("RMSPropOptimizer", _RMSPROP),
    "rmsprop_inception_centered": ("RMSPropOptimizer", {**_INCEPTION, "centered": True}),
    "rmsprop_centered": ("RMSPropOptimizer", {**_RMSPROP, "centered": True}),
    "adam": ("AdamOptimizer", {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
    "adam_epsilon_1": ("AdamOptimizer", {"learning_rate": 0.5, "beta1": 0.9, "beta2": 0.999, "epsilon": 1.0}),
    "adagrad": ("AdagradOptimizer", {"learning_rate": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": ("AdadeltaOptimizer", {"learning_rate": 100.0, "rho": 0.95, "epsilon": 1e-8}),
    "adadelta_epsilon_1": ("AdadeltaOptimizer", {"learning_rate": 0.05, "rho": 0.95, "epsilon": 1.0}),
    "ftrl": ("FtrlOptimizer", _FTRL),
    "ftrl_l1_l2": ("FtrlOptimizer", _FTRL_L1_L2),
    # The one whose parameters come to lie at 0.
    "ftrl_large_l1": ("FtrlOptimizer", {**_FTRL, "l1_regularization_strength": 4.0}),
    "ftrl_l2_shrinkage": ("FtrlOptimizer", {**_FTRL_L1_L2, "l2_shrinkage_regularization_strength": 0.03}),
}
SPARSE_OPTIMIZERS = ("gradient_descent", "adagrad")

# In keras.optimizers. Keras adds epsilon to a root, as TensorFlow 1 did: in AdamW to the root before bias correction
# (epsilon-hat), in Lamb to the corrected one.
_ADAMW = {"learning_rate": 0.05, "weight_decay": 0.1, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
KERAS_OPTIMIZERS: dict[str, Case] = {
    "adamw": ("AdamW", _ADAMW),
    "adamw_epsilon_0.1": ("AdamW", {**_ADAMW, "epsilon": 0.1}),
    "lamb": ("Lamb", {"learning_rate": 0.05, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-6}),
}

# In tf.compat.v1.train.
SCHEDULES: dict[str, Case] = {
    "exponential": ("exponential_decay", {**STAIRCASE, "staircase": False}),
    "exponential_staircase": ("exponential_decay", STAIRCASE),
    "polynomial": ("polynomial_decay", _POLYNOMIAL),
    "polynomial_power_2": ("polynomial_decay", {**_POLYNOMIAL, "power": 2.0}),
    "polynomial_cycle": ("polynomial_decay", {**_POLYNOMIAL, "cycle": True}),
    "polynomial_power_2_cycle": ("polynomial_decay", {**_POLYNOMIAL, "power": 2.0, "cycle": True}),
    "cosine": ("cosine_decay", {"learning_rate": 0.1, "decay_steps": 30, "alpha": 0.0}),
    "cosine_alpha": ("cosine_decay", {"learning_rate": 0.1, "decay_steps": 30, "alpha": 0.2}),
    "piecewise_constant": ("piecewise_constant", {"boundaries": [3, 10, 25], "values": [1.0, 0.3, 0.1, 0.01]}),
}

# name -> (function in tf.compat.v1.losses and tf_slim.losses, predictions, labels, further arguments); predictions and
# labels by their names in update_inputs.loss_inputs.
LOSSES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "softmax_cross_entropy": ("softmax_cross_entropy", "logits", "one_hot", {}),
    "softmax_cross_entropy_smoothed": ("softmax_cross_entropy", "logits", "one_hot", _SMOOTHED),
    "sigmoid_cross_entropy": ("sigmoid_cross_entropy", "logits", "binary", {}),
    "sigmoid_cross_entropy_smoothed": ("sigmoid_cross_entropy", "logits", "binary", _SMOOTHED),
    "log_loss": ("log_loss", "probabilities", "binary", {}),
    "hinge_loss": ("hinge_loss", "logits", "binary", {}),
    "absolute_difference": ("absolute_difference", "logits", "targets", {}),
    "mean_squared_error": ("mean_squared_error", "logits", "targets", {}),
    "cosine_distance": ("cosine_distance", "unit_predictions", "unit_targets", {}),
}
