"""Towers: logical copies of the computation that split the global batch; precision, mixed precision among it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Literal

from lockstep.checks import Checked, Hint, PositiveInt, check_even_split
from lockstep.errors import InputError

BatchNorm = Literal["mean", "first", "last", "none", "sync", "frozen"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
Precision = Literal["fp32", "bf16", "fp16"]
Variance = Literal["unbiased", "biased"]


@dataclass(frozen=True)
class InTurn:
    """One worker runs its towers one after the other, through one module."""


@dataclass(frozen=True)
class Towers(Checked):
    """How many towers there are and how each computes: a property of the experiment, not of the machine."""

    count: Annotated[PositiveInt | None, Hint("write ls.Towers(4) for four")] = None
    """None: one for each worker that computes. A checkpoint holds the number; another one is refused on resume."""
    batch_norm: BatchNorm = "mean"
    """What becomes of the towers' new batch-norm statistics, and what they normalise with.

    "mean", "first", "last": each tower normalises with its own batch; the towers' mean, or the first or last tower's
    statistics, are committed. "none": nothing is committed, in any buffer. "sync": the towers of all workers normalise
    with the statistics of the whole batch, those of one worker as one joined batch with one random stream; its rounding
    depends on the number of workers. "frozen": normalise with the statistics there are, which stay.
    Integer buffers always come from the first tower.
    """
    variance: Variance = "unbiased"
    """The running variance that batch norm keeps: with Bessel's correction, as torch and fused TensorFlow kernels do,
    or that of the batch as it is, as unfused TensorFlow does. The normalisation uses the latter in any case."""
    precision: Precision = "fp32"
    """bf16 and fp16 compute losses under autocast; parameters, gradients and the update keep their own dtype.

    With fp16, losses are scaled before the backward pass, and an attempt whose gradients overflow is refused, counted
    and followed by a smaller scale.
    """
    channels_last: bool = False
    """Keep image tensors and convolution weights in the channels_last memory format."""
    compile: bool = False
    """Run the model through torch.compile: other bits, a slow first step, and a C++ compiler on a CPU.

    It is compiled once for batches of one shape; checkpoints have the names of the plain model. Among several workers,
    in parts that end where a bucket of gradients is full, and can be sent; not with an exact exchange.
    """
    compile_mode: CompileMode = "default"
    """As torch.compile has them: "reduce-overhead" replays CUDA graphs, for models of small kernels, and takes memory
    for them; "max-autotune" also times more kernels, and compiles for long."""
    activation_checkpointing: tuple[str, ...] = ()
    """Patterns of modules whose activations are not kept for the backward pass, but computed again: less memory, a
    second forward pass of these modules, and the same bits. A pattern is the exact name of a module, or a regular
    expression that is searched for in the names: "^layer[1-3].[0-9]$" for blocks of a ResNet, of which each keeps its
    input."""
    cudnn_benchmark: bool | None = None
    """Let cuDNN time its convolutions and take the fastest: good for images of one size; the bits of two runs differ.

    These three are flags of torch's backends on CUDA devices. None leaves torch's own, whose defaults are no benchmark,
    TF32 in convolutions and none in matrix products; with an exact exchange, None is off.
    """
    conv_tf32: bool | None = None
    """Multiply float32 with 10 bits of mantissa in convolutions: several times as fast, on Ampere and later GPUs."""
    matmul_tf32: bool | None = None
    """The same in matrix products, such as those of linear layers."""
    hosting: InTurn = field(default_factory=InTurn)
    """How a worker computes several towers: one after another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile and (self.batch_norm == "sync" or self.variance == "biased"):
            raise InputError(
                "A compiled model keeps torch's own batch norm.",
                given=f"compile=True, batch_norm={self.batch_norm!r}, variance={self.variance!r}",
                expected='another policy than "sync", and the unbiased variance',
                hint="set compile=False, or change the policy",
            )
        if self.compile_mode != "default" and not self.compile:
            raise InputError(
                "A mode of torch.compile is given, and the model is not compiled.",
                given=f"compile_mode={self.compile_mode!r}, compile=False",
                expected="compile=True beside it",
                hint=f"write compile=True, compile_mode={self.compile_mode!r}; in a recipe towers.compile=true",
            )
        if self.activation_checkpointing and (self.compile or self.batch_norm == "sync"):
            other = "compile=True" if self.compile else 'batch_norm="sync"'
            why = (
                "torch.compile chooses itself what it keeps" if self.compile else "the workers exchange statistics once"
            )
            raise InputError(
                f"Activations cannot be computed again with {other}: {why}.",
                given=f"{other}, activation_checkpointing={list(self.activation_checkpointing)}",
                expected="one of the two",
                hint="leave one of them out",
            )

    @property
    def num_towers(self) -> int:
        """The count, of towers that a step has been given."""
        assert self.count is not None, "counted_towers says how many"
        return self.count

    @property
    def joined(self) -> bool:
        """Whether a worker runs its towers as one batch."""
        return self.batch_norm == "sync"

    def check(self, batch_size: int, num_workers: int) -> None:
        """Refuse a batch that cannot be split evenly, and workers that would have no tower."""
        check_even_split(batch_size, self.num_towers)
        if num_workers > self.num_towers:
            raise InputError(
                "Some workers would have no tower to run.",
                given=f"{num_workers} workers, {self.count} towers",
                expected="at least as many towers as workers",
                hint=f"start at most {self.count} (--workers), or split the batch over more towers (--towers)",
            )


@cache
def counted_towers(towers: Towers | None, num_computing: int) -> Towers:
    """Return the towers with their count: where they have none, or are not given, one for each that computes."""
    towers = towers or Towers()
    return towers if towers.count is not None else replace(towers, count=num_computing)
