"""The optimizers: SGD, Adam and its kin, rates by parameter (Adagrad, RMSProp ...), rates by layer (LARS, LAMB)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from lockstep.checks import Fraction, Hint, NonNegativeFloat, PositiveFloat, Range
from lockstep.errors import InputError
from lockstep.optim.rules import Chunk, Rule, WeightDecay, fused_adagrad, fused_adam, fused_sgd, in_float32, slot
from lockstep.optim.schedules import LearningRate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SGD(Rule):
    """buffer = momentum * buffer + gradient; parameter -= lr * buffer (Sutskever et al., 2013).

    The arithmetic and the argument names are torch's, and TensorFlow's MomentumOptimizer is the same rule. With
    `nesterov`, the step is lr * (gradient + momentum * buffer). Without momentum it takes sparse gradients.
    """

    kernel: ClassVar[str | None] = "sgd"
    takes_complex: ClassVar[bool] = True

    lr: LearningRate
    momentum: Fraction = 0.0
    """Share of the momentum buffer that an update keeps; 0: no momentum. 0.9 is usual."""
    nesterov: bool = False
    """Nesterov's form of momentum."""
    weight_decay: WeightDecay = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum > 0:
            raise InputError(
                "Nesterov's update looks ahead along the momentum, and there is none.",
                given=f"nesterov=True, momentum={self.momentum}",
                expected="momentum above 0",
                hint="set momentum (0.9 is usual), or nesterov=False",
            )

    @property
    def takes_rows(self) -> bool:
        """Without momentum, rows without a gradient stay."""
        return not self.momentum

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make a momentum buffer of zeros, if there is a momentum."""
        return {"momentum_buffer": slot(parameter)} if self.momentum else {}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and buffers in place."""
        if chunk.fused:
            fused_sgd(chunk, lr, self.momentum, self.nesterov)
            return
        with in_float32(chunk) as wide:
            update = wide.decayed()
            if self.momentum:
                buffers = wide.slots["momentum_buffer"]
                torch._foreach_mul_(buffers, self.momentum)
                torch._foreach_add_(buffers, update)
                update = list(torch._foreach_add(update, buffers, alpha=self.momentum)) if self.nesterov else buffers
            torch._foreach_add_(wide.parameters, update, alpha=-lr)


Betas = Annotated[tuple[Fraction, Fraction], Hint("write betas=(0.9, 0.999)")]
"""The decays of the means of the gradients and of their squares."""


@dataclass(frozen=True)
class Adam(Rule):
    """Running means of the gradients over the root of those of their squares (Kingma, Ba: Adam, 2015).

    exp_avg = beta1 * exp_avg + (1 - beta1) * gradient, exp_avg_sq likewise with gradient ** 2 and beta2; then
    parameter -= lr * m / (sqrt(v) + eps), where m and v are the means divided by 1 - beta ** step: both start at 0,
    and this corrects them. The steps counted are those of the run, as TensorFlow counts them: torch counts for each
    parameter the updates that it had a gradient in.
    """

    kernel: ClassVar[str | None] = "adam"
    decoupled: ClassVar[bool] = False

    lr: LearningRate
    betas: Betas = (0.9, 0.999)
    """Decays of the running means of the gradients and of their squares."""
    eps: NonNegativeFloat = 1e-8
    """Added to the root that gradients are divided by, so that none is divided by nearly nothing."""
    weight_decay: WeightDecay = 0.0
    epsilon_hat: bool = False
    """Add eps to the root of exp_avg_sq as it is, not corrected: TensorFlow's form, in section 2 of the paper."""

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make both means, at 0."""
        return {"exp_avg": slot(parameter), "exp_avg_sq": slot(parameter)}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place."""
        correction1, correction2 = corrections(self.betas, step)
        if chunk.fused:
            eps = self.eps / math.sqrt(correction2) if self.epsilon_hat else self.eps
            fused_adam(chunk, lr, step, betas=self.betas, eps=eps, decoupled=self.decoupled)
            return
        # With both corrections in the rate, eps is the uncorrected root's: one pass over the parameters less.
        eps = self.eps if self.epsilon_hat else self.eps * math.sqrt(correction2)
        with in_float32(chunk) as wide:
            gradients = wide.gradients if self.decoupled else wide.decayed()
            if self.decoupled and wide.weight_decay:
                torch._foreach_mul_(wide.parameters, 1.0 - lr * wide.weight_decay)
            update_means(wide, gradients, self.betas)
            root = torch._foreach_sqrt(wide.slots["exp_avg_sq"])
            torch._foreach_add_(root, eps)
            rate = lr * math.sqrt(correction2) / correction1
            torch._foreach_addcdiv_(wide.parameters, wide.slots["exp_avg"], root, value=-rate)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay apart from the gradient (Loshchilov, Hutter: Decoupled Weight Decay, 2019).

    First parameter *= 1 - lr * weight_decay, then Adam's update.
    """

    kernel: ClassVar[str | None] = "adamw"
    decoupled: ClassVar[bool] = True

    weight_decay: WeightDecay = 0.01
    """Times the learning rate, the share of a parameter that each update takes off; one number, or by pattern."""


def corrections(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """Compute the divisors that correct both means for their start at 0, after `step` updates."""
    return 1.0 - betas[0] ** step, 1.0 - betas[1] ** step


def update_means(chunk: Chunk, gradients: list[Tensor], betas: tuple[float, float]) -> None:
    """Move exp_avg towards the gradients and exp_avg_sq towards their squares, in place."""
    means, squares = chunk.slots["exp_avg"], chunk.slots["exp_avg_sq"]
    torch._foreach_lerp_(means, gradients, 1.0 - betas[0])
    torch._foreach_mul_(squares, betas[1])
    torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - betas[1])


@dataclass(frozen=True)
class Adagrad(Rule):
    """Divide each gradient by the root of the sum of its squares so far (Duchi et al., 2011).

    sum += gradient ** 2; parameter -= lr * gradient / (sqrt(sum) + eps). The defaults are torch's;
    tf.train.AdagradOptimizer is initial_accumulator_value=0.1, eps=0. It takes sparse gradients.
    """

    kernel: ClassVar[str | None] = "adagrad"

    lr: LearningRate
    weight_decay: WeightDecay = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    """What the sums start at."""
    eps: NonNegativeFloat = 1e-10
    """Added to the root that gradients are divided by, so that none is divided by nearly nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.eps or self.initial_accumulator_value):
            raise InputError(
                "Adagrad would divide by 0 where a gradient is 0.",
                given="initial_accumulator_value=0, eps=0",
                expected="one of them above 0",
                hint="set initial_accumulator_value=0.1 (TensorFlow's), or eps=1e-10 (torch's)",
            )

    @property
    def takes_rows(self) -> bool:
        """Rows without a gradient stay, and so do their sums."""
        return True

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make the sum of squares."""
        return {"sum": slot(parameter, self.initial_accumulator_value)}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and sums in place."""
        if chunk.fused:
            fused_adagrad(chunk, lr, self.eps)
            return
        with in_float32(chunk) as wide:
            gradients, sums = wide.decayed(), wide.slots["sum"]
            torch._foreach_addcmul_(sums, gradients, gradients)
            root = torch._foreach_sqrt(sums)
            torch._foreach_add_(root, self.eps)
            torch._foreach_addcdiv_(wide.parameters, gradients, root, value=-lr)


@dataclass(frozen=True)
class Adadelta(Rule):
    """Divide each gradient by the root of its mean square, and multiply it by that of the updates (Zeiler, 2012).

    square_avg = rho * square_avg + (1 - rho) * gradient ** 2;
    delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * gradient; acc_delta = rho * acc_delta +
    (1 - rho) * delta ** 2; parameter -= lr * delta. The rule and the defaults are torch's, and the rule is that of
    tf.train.AdadeltaOptimizer; TF-Slim's classifier has rho=0.95 and eps=1.0.
    """

    lr: LearningRate
    rho: Fraction = 0.9
    """The decay of both means."""
    eps: Annotated[PositiveFloat, Hint("set eps=1e-6: the first update is as large as the root of eps")] = 1e-6
    """Added to the root that gradients are divided by, so that none is divided by nearly nothing."""
    weight_decay: WeightDecay = 0.0

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make the mean squares of gradients and updates, at 0."""
        return {"square_avg": slot(parameter), "acc_delta": slot(parameter)}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place."""
        with in_float32(chunk) as wide:
            gradients, squares, deltas = wide.decayed(), wide.slots["square_avg"], wide.slots["acc_delta"]
            torch._foreach_mul_(squares, self.rho)
            torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - self.rho)
            root = torch._foreach_add(squares, self.eps)
            torch._foreach_sqrt_(root)
            update = torch._foreach_add(deltas, self.eps)
            torch._foreach_sqrt_(update)
            torch._foreach_div_(update, root)
            torch._foreach_mul_(update, gradients)
            torch._foreach_mul_(deltas, self.rho)
            torch._foreach_addcmul_(deltas, update, update, value=1.0 - self.rho)
            torch._foreach_add_(wide.parameters, update, alpha=-lr)


@dataclass(frozen=True)
class RMSProp(Rule):
    """Divide each gradient by the root of a running mean of its squares (Tieleman, Hinton: lecture 6.5, 2012).

    The rule of tf.train.RMSPropOptimizer: square_avg = alpha * square_avg + (1 - alpha) * gradient ** 2, then
    buffer = momentum * buffer + lr * gradient / sqrt(square_avg + eps), then parameter -= buffer. Torch's differs in
    three places: there the mean starts at 0, eps is added to the root, and the buffer holds no learning rate.

    The Inception trainer, and TensorFlow Object Detection by default, train with alpha=0.9, momentum=0.9, eps=1.0.
    """

    lr: LearningRate
    alpha: Fraction = 0.9
    """The decay of the mean, which TensorFlow calls `decay`."""
    eps: NonNegativeFloat = 1e-10
    """Inside the root, so its size is that of a squared gradient."""
    weight_decay: WeightDecay = 0.0
    momentum: Fraction = 0.0
    """Share of the momentum buffer that an update keeps; 0: no momentum. 0.9 is usual."""
    centered: bool = False
    """Divide by the root of the variance: the running mean of the gradients, squared, is taken off `square_avg`."""
    initial_accumulator_value: NonNegativeFloat = 1.0
    """What `square_avg` starts at: with 1 the first updates are small, with 0 they are large."""

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make the mean of the squares, and where they are used the momentum buffer and the mean of the gradients."""
        slots = {"square_avg": slot(parameter, self.initial_accumulator_value)}
        if self.momentum:
            slots["momentum_buffer"] = slot(parameter)
        if self.centered:
            slots["grad_avg"] = slot(parameter)
        return slots

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place."""
        with in_float32(chunk) as wide:
            gradients = wide.decayed()
            root = self._root(wide, gradients)
            if not self.momentum:
                torch._foreach_addcdiv_(wide.parameters, gradients, root, value=-lr)
                return
            buffers = wide.slots["momentum_buffer"]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_addcdiv_(buffers, gradients, root, value=lr)
            torch._foreach_sub_(wide.parameters, buffers)

    def _root(self, chunk: Chunk, gradients: list[Tensor]) -> tuple[Tensor, ...]:
        """Move the means by these gradients, and return the roots to divide the gradients by."""
        squares = chunk.slots["square_avg"]
        torch._foreach_mul_(squares, self.alpha)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - self.alpha)
        if not self.centered:
            root = torch._foreach_add(squares, self.eps)
        else:
            means = chunk.slots["grad_avg"]
            torch._foreach_lerp_(means, gradients, 1.0 - self.alpha)
            root = torch._foreach_addcmul(squares, means, means, value=-1.0)
            # A variance of 0 may come out below it by rounding.
            torch._foreach_clamp_min_(root, 0.0)
            torch._foreach_add_(root, self.eps)
        torch._foreach_sqrt_(root)
        return root


@dataclass(frozen=True)
class FTRL(Rule):
    """FTRL-proximal (McMahan et al.: Ad Click Prediction, 2013), the rule of tf.train.FtrlOptimizer.

    With s = accumulator ** -learning_rate_power before the update and s' = the same after accumulator += gradient ** 2:
    linear += gradient + 2 * l2_shrinkage * parameter - (s' - s) / lr * parameter, and then
    parameter = (sign(linear) * l1 - linear) / (s' / lr + 2 * l2) where |linear| > l1, else 0. The first update sets
    each parameter anew, with little regard to its value: FTRL is for models that start at 0.
    """

    lr: LearningRate
    """The learning rate, above 0 at every step: a number, or a schedule of the step."""
    learning_rate_power: Annotated[float, Range(le=0), Hint("leave it at -0.5, or set 0 for a steady rate")] = -0.5
    """With 0 the rate does not fall with the gradients."""
    initial_accumulator_value: Annotated[PositiveFloat, Hint("set initial_accumulator_value=0.1")] = 0.1
    """What the sums of the squared gradients start at."""
    l1: NonNegativeFloat = 0.0
    """Strength of the L1 term, which sets small parameters to 0."""
    l2: NonNegativeFloat = 0.0
    """Strength of the L2 term."""
    l2_shrinkage: NonNegativeFloat = 0.0
    """L2 on the size of the parameters as they are; `l2` stabilises, and acts on the solution."""
    weight_decay: WeightDecay = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr == 0:
            raise _rate_of_zero("")

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make the sums of squared gradients, and the linear terms at 0."""
        sums = slot(parameter, self.initial_accumulator_value)
        return {"accumulator": sums, "linear": slot(parameter)}

    def check_rate(self, lr: float, step: int) -> None:
        """Refuse a rate of 0."""
        if not lr > 0:
            raise _rate_of_zero(f" in the update that makes step {step}")

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place."""
        with in_float32(chunk) as wide:
            root = self._move_slots(wide, lr)
            torch._foreach_div_(root, lr)
            torch._foreach_add_(root, 2.0 * self.l2)
            linear = wide.slots["linear"]
            # linear cut to [-l1, l1], minus linear: 0 where l1 holds the parameter at 0.
            solution = torch._foreach_clamp_max(linear, self.l1)
            torch._foreach_clamp_min_(solution, -self.l1)
            torch._foreach_sub_(solution, linear)
            torch._foreach_div_(solution, root)
            torch._foreach_copy_(wide.parameters, solution)

    def _move_slots(self, chunk: Chunk, lr: float) -> tuple[Tensor, ...]:
        """Add this update's gradients to both slots; returns the accumulators' new root."""
        gradients, sums, linear = chunk.decayed(), chunk.slots["accumulator"], chunk.slots["linear"]
        fallen = self._root(sums)
        torch._foreach_addcmul_(sums, gradients, gradients)
        root = self._root(sums)
        torch._foreach_sub_(fallen, root)
        torch._foreach_add_(linear, gradients)
        torch._foreach_addcmul_(linear, fallen, chunk.parameters, value=1.0 / lr)
        if self.l2_shrinkage:
            torch._foreach_add_(linear, chunk.parameters, alpha=2.0 * self.l2_shrinkage)
        return root

    def _root(self, sums: list[Tensor]) -> tuple[Tensor, ...]:
        if self.learning_rate_power == -0.5:
            return torch._foreach_sqrt(sums)
        return torch._foreach_pow(sums, -self.learning_rate_power)


def _rate_of_zero(when: str) -> InputError:
    return InputError(
        f"FTRL divides by lr, which is 0{when}.",
        given="lr=0",
        expected="a number above 0",
        hint="start a warm-up, and end a decay, above 0",
    )


@dataclass(frozen=True)
class LARS(Rule):
    """SGD with a rate of its own for each tensor (You et al.: Large Batch Training of Convolutional Networks, 2017).

    trust = trust_coefficient * |parameter| / (|gradient| + weight_decay * |parameter|) by the 2-norms of whole tensors,
    1 where one of them is 0; buffer = momentum * buffer + lr * trust * (gradient + weight_decay * parameter);
    parameter -= buffer.
    """

    lr: LearningRate
    momentum: Fraction = 0.9
    """Share of the momentum buffer that an update keeps; 0: no momentum. 0.9 is usual."""
    weight_decay: WeightDecay = 0.0
    """One number, or by pattern; the paper has 0.0005. Biases are decayed too, unless no pattern finds them."""
    trust_coefficient: NonNegativeFloat = 0.001
    """Factor of each tensor's own rate; the paper has 0.001."""
    skip_vectors: bool = True
    """Parameters of one dimension or none (biases, the scales of batch norm) have the trust 1."""

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make a momentum buffer of zeros, if there is a momentum."""
        return {"momentum_buffer": slot(parameter)} if self.momentum else {}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and buffers in place."""
        with in_float32(chunk) as wide:
            update = _trusted(
                wide.decayed(),
                wide.gradients,
                wide.parameters,
                skip_vectors=self.skip_vectors,
                coefficient=self.trust_coefficient,
                weight_decay=wide.weight_decay,
            )
            if not self.momentum:
                torch._foreach_add_(wide.parameters, update, alpha=-lr)
                return
            buffers = wide.slots["momentum_buffer"]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, update, alpha=lr)
            torch._foreach_sub_(wide.parameters, buffers)


@dataclass(frozen=True)
class LAMB(Rule):
    """Adam with a rate of its own for each tensor (You et al.: Large Batch Optimization for Deep Learning, 2020).

    update = m / (sqrt(v) + eps) + weight_decay * parameter, with Adam's corrected means m and v;
    parameter -= lr * trust * update, where trust = |parameter| / |update| by the 2-norms of whole tensors, 1 where one
    of them is 0.
    """

    lr: LearningRate
    betas: Betas = (0.9, 0.999)
    """Decays of the running means of the gradients and of their squares."""
    eps: NonNegativeFloat = 1e-6
    """Added to the root that gradients are divided by, so that none is divided by nearly nothing."""
    weight_decay: WeightDecay = 0.0
    """One number, or by pattern; the paper has 0.01. Biases are decayed too, unless no pattern finds them."""
    skip_vectors: bool = True
    """Parameters of one dimension or none (biases, the scales of batch norm) have the trust 1."""

    def start(self, parameter: Tensor) -> dict[str, Tensor]:
        """Make both means, at 0."""
        return {"exp_avg": slot(parameter), "exp_avg_sq": slot(parameter)}

    def apply(self, chunk: Chunk, lr: float, step: int) -> None:
        """Update parameters and slots in place."""
        correction1, correction2 = corrections(self.betas, step)
        with in_float32(chunk) as wide:
            update_means(wide, wide.gradients, self.betas)
            root = torch._foreach_sqrt(wide.slots["exp_avg_sq"])
            torch._foreach_div_(root, math.sqrt(correction2))
            torch._foreach_add_(root, self.eps)
            torch._foreach_mul_(root, correction1)
            update = list(torch._foreach_div(wide.slots["exp_avg"], root))
            if wide.weight_decay:
                torch._foreach_add_(update, wide.parameters, alpha=wide.weight_decay)
            update = _trusted(update, update, wide.parameters, skip_vectors=self.skip_vectors)
            torch._foreach_add_(wide.parameters, update, alpha=-lr)


def _trusted(
    updates: list[Tensor],
    measured: list[Tensor],
    parameters: list[Tensor],
    *,
    skip_vectors: bool,
    coefficient: float = 1.0,
    weight_decay: float = 0.0,
) -> list[Tensor]:
    """Multiply updates by their trust: coefficient * |parameter| / (|measured| + weight_decay * |parameter|)."""
    chosen = [index for index, p in enumerate(parameters) if p.ndim > 1 or not skip_vectors]
    if not chosen:
        return updates
    sizes = torch.stack(torch._foreach_norm([parameters[i] for i in chosen]))
    norms = torch.stack(torch._foreach_norm([measured[i] for i in chosen]))
    trusts = coefficient * sizes / (norms + weight_decay * sizes)
    trusts = torch.where((sizes > 0) & (norms > 0), trusts, 1.0)
    products = torch._foreach_mul([updates[i] for i in chosen], list(trusts.unbind()))
    product_of = dict(zip(chosen, products, strict=True))
    return [product_of.get(index, update) for index, update in enumerate(updates)]
