"""The command `lockstep`: what each of its commands takes. Loads no torch before one of them needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from lockstep import __version__
from lockstep.cli import convert
from lockstep.errors import InputError, LockstepError
from lockstep.reporting.log import configure
from lockstep.screen import log, one_line

EXIT_CODES = """exit codes:
  0    the run reached its end
  1    a worker failed
  2    wrong input: a flag, a recipe, a workdir or data that cannot be used
  75   preempted (SIGUSR1; with --requeue also SIGTERM), after a final checkpoint: to be started again
  130  stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP, after a final checkpoint: the same command goes on
  137  aborted by a second Ctrl-C: the last checkpoint stands"""

PREEMPTION = """preemption:
  At SIGUSR1 or SIGTERM all workers end the step they are at, save, and the command ends; the same command goes on from
  there, and the run learns what it would have learned without the break. Under Slurm, with --signal=USR1@120:
    srun lockstep train mnist --workdir runs/mnist --grace 110
    if [ $? -eq 75 ]; then scontrol requeue $SLURM_JOB_ID; fi"""

EXAMPLES = """examples:
  lockstep train mnist --towers 2 --workdir runs/mnist    train; the same again resumes
  lockstep train mnist --set optimizer.lr.initial=0.02    change one field of the recipe
  lockstep train mnist --print-recipe > mine.toml         a recipe of your own: lockstep train mine.toml
  lockstep evaluate runs/mnist                            score its newest checkpoint
  lockstep run my_script.py --workers 4                   your own script on four workers
  lockstep convert images photos --to shards              sharded records of folders of images
  lockstep benchmark input mnist                          what limits the run, and what to change
  lockstep show photos --augment crop --to page.html      examples, before and after they are augmented
  lockstep inspect runs/mnist                             what is in a checkpoint or a record file, and what is damaged
  lockstep import checkpoint net.ckpt --to net.safetensors    weights of another system, TensorFlow's among them
  lockstep export runs/mnist --to model.pt2               the model, for plain torch"""

# Commands that are called like a word or a module of Python's.
_MODULES = {"import": "importing", "inspect": "inspecting"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # A pattern of the shell makes arguments of file names.
        super().error(one_line(message))


def parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    top = _Parser(
        prog="lockstep",
        description="Train vision models on many devices as if they were one.",
        epilog=f"{EXAMPLES}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"lockstep {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_train(
        commands.add_parser(
            "train",
            help="train by a recipe, or go on where its workdir stands",
            epilog=f"{PREEMPTION}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    _add_evaluate(commands.add_parser("evaluate", help="score a checkpoint of a workdir"))
    _add_run(commands.add_parser("run", help="run your own script on several workers", allow_abbrev=False))
    convert.add_arguments(commands.add_parser("convert", help="make sharded records of a data set"))
    _add_benchmark(commands.add_parser("benchmark", help="measure what limits a run, and say what to change"))
    _add_show(commands.add_parser("show", help="show examples, before and after they are augmented"))
    _add_inspect(commands.add_parser("inspect", help="list what is in a checkpoint, a run or a record file"))
    _add_import(commands.add_parser("import", help="make a file of safetensors of weights from anywhere"))
    _add_export(commands.add_parser("export", help="write the model of a run as a file that needs no Lockstep"))
    return top


def _add_train(train: argparse.ArgumentParser) -> None:
    train.add_argument("recipe", help="the name of a shipped recipe (mnist, mnist_reference), or a file.toml")
    train.add_argument("--workdir", metavar="DIR", help="the run's folder (default: runs/NAME); 'none' writes nothing")
    train.add_argument("--towers", type=int, metavar="N", help="slices of the batch (default: the number of workers)")
    end = train.add_mutually_exclusive_group()
    end.add_argument("--steps", type=int, metavar="N", help="end after so many updates")
    end.add_argument("--epochs", type=float, metavar="N", help="end after so many passes over the data")
    end.add_argument("--hours", type=float, metavar="N", help="end after so many hours from now")
    end.add_argument("--forever", action="store_true", help="train until stopped")
    train.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="PATH=VALUE", help="change a field of the recipe"
    )
    train.add_argument(
        "--fork-from", metavar="RUN[@STEP]", help="begin a new workdir with the full state of another run"
    )
    train.add_argument("--accept-changes", action="store_true", help="resume although the recipe has changed")
    train.add_argument(
        "--accept-data-change", action="store_true", help="resume although the training data has changed"
    )
    train.add_argument("--rehearse", action="store_true", help="two steps, save, resume, evaluate, in a scratch folder")
    train.add_argument("--requeue", action="store_true", help="exit code 75 at SIGTERM too, as always at SIGUSR1")
    train.add_argument(
        "--grace", type=float, metavar="SECONDS", help="after a signal, end what has not saved by then (default: wait)"
    )
    train.add_argument("--print-recipe", action="store_true", help="print the whole recipe as TOML, and do nothing")
    _add_machine(train)


def _add_evaluate(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument("workdir", help="the folder of a run")
    evaluate.add_argument(
        "--split", help="which examples: test (default, where there are some), validation (default else) or train"
    )
    weights = evaluate.add_mutually_exclusive_group()
    weights.add_argument("--average", action="store_true", help="score the moving averages of the parameters")
    weights.add_argument("--raw", action="store_true", help="score the parameters themselves (default: as the recipe)")
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    which.add_argument(
        "--best", action="store_true", help="the best one, by the score that the recipe keeps the best by"
    )
    which.add_argument("--follow", action="store_true", help="each new one, until the run is over")
    evaluate.add_argument("--examples", type=int, metavar="N", help="the first N of the split (default: as the recipe)")
    evaluate.add_argument(
        "--interval", type=float, metavar="SECONDS", help="with --follow, at least so long from one to the next (60)"
    )
    evaluate.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="with --follow, end after so long without a new one"
    )
    evaluate.add_argument("--json", metavar="FILE", help="write the result, with --follow the last one, as JSON")
    evaluate.add_argument("--confusion", metavar="FILE", help="which classes are taken for which: a table of CSV")
    evaluate.add_argument("--mistakes", metavar="FILE", help="the examples with the largest losses: one PNG")
    evaluate.add_argument("--force", action="store_true", help="overwrite these files")
    _add_machine(evaluate)


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("script", help="a Python file; ls.join() in it takes its place among the workers")
    run.add_argument(
        "--hang-seconds",
        type=float,
        default=600.0,
        metavar="N",
        help="end workers that stay at one step for longer (default: 600; 0 never)",
    )
    run.epilog = "All other arguments are the script's own; after -- also those that lockstep would take."
    _add_machine(run)


def _add_benchmark(benchmark: argparse.ArgumentParser) -> None:
    benchmark.add_argument("part", choices=["input"], help="what is measured: the way from files to batches")
    benchmark.add_argument(
        "what", help="a recipe, a file.toml, or a path to data: images in folders, shards, VOC, COCO"
    )
    benchmark.add_argument("--seconds", type=float, default=10.0, metavar="N", help="how long in all (default: 10)")
    benchmark.add_argument("--batch-size", type=int, metavar="N", help="default: the recipe's, 64 for a path")
    benchmark.add_argument(
        "--augment",
        metavar="NAME",
        help="lenet, cifarnet, vgg or inception; for a path (default: a random resized crop of 224, and flip)",
    )
    benchmark.add_argument("--processes", type=int, metavar="N", help="loader processes (default: as in training)")
    benchmark.add_argument("--threads", type=int, default=0, metavar="N", help="loader threads in place of processes")
    benchmark.add_argument("--device", choices=["cpu"], help="leave the accelerators alone")
    benchmark.add_argument("--json", action="store_true", help="write JSON, for programs")


def _add_show(show: argparse.ArgumentParser) -> None:
    show.add_argument("source", help="a recipe, a file.toml, or a path to data: images in folders, shards, VOC, COCO")
    show.add_argument("--to", required=True, metavar="FILE", help="page.html, or sheet.png for all in one image")
    show.add_argument("--force", action="store_true", help="overwrite the file")
    show.add_argument(
        "--positions", default="0:16", metavar="FIRST:END", help="places in the stream (default: 0:16, the first 16)"
    )
    show.add_argument("--order", choices=["shuffled", "sequential"], help="default: the recipe's, shuffled for a path")
    show.add_argument("--seed", type=int, metavar="N", help="default: the recipe's, 0 for a path")
    show.add_argument(
        "--augment", metavar="WHAT", help="crop, lenet, cifarnet, vgg, inception, or a recipe (default: the recipe's)"
    )
    show.add_argument("--size", type=int, metavar="N", help="height and width that a preset crops to, in pixels")
    show.add_argument("--repeat", type=int, default=1, metavar="N", help="augment each so many times")


def _add_inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument(
        "path", help="weights of any supported system, a run (or run@STEP), a record file, its pattern or folder"
    )
    inspect.add_argument(
        "--diff", metavar="OTHER", help="compare with these weights; the exit code is 1 if they differ"
    )
    inspect.add_argument("--values", metavar="NAME", help="show the values of this tensor")
    inspect.add_argument("--norms", action="store_true", help="show the 2-norm of each tensor")
    inspect.add_argument("--json", action="store_true", help="write JSON, for programs")
    inspect.description = "List what is there. All of it is read and verified; exit code 1 if some is damaged."


def _add_import(importing: argparse.ArgumentParser) -> None:
    importing.add_argument("what", choices=["checkpoint"], help="what is imported")
    importing.add_argument("path", help="weights of any supported system, or a run (or run@STEP)")
    importing.add_argument("--to", required=True, metavar="FILE", help="the file of safetensors")
    importing.add_argument("--average", action="store_true", help="take moving averages where there are some")
    importing.add_argument(
        "--map", metavar="NAME", help="give TensorFlow's weights torch's names and layouts: tensorflow, mnist, ..."
    )
    importing.add_argument("--force", action="store_true", help="overwrite the file")


def _add_export(export: argparse.ArgumentParser) -> None:
    export.add_argument("run", metavar="RUN[@STEP]", help="the folder of a run, and a step (default: the newest)")
    export.add_argument("--to", required=True, metavar="FILE", help="model.safetensors, model.pt2 or model.onnx")
    export.add_argument("--average", action="store_true", help="export the moving averages of the parameters")
    export.add_argument("--force", action="store_true", help="overwrite the file")


def _add_machine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workers", type=int, metavar="N", help="processes, one a device (default: what there is)")
    command.add_argument("--device", choices=["cpu"], help="leave the accelerators alone")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; for `run`, `arguments` holds those of the script."""
    top = parser()
    split = argv.index("--") if "--" in argv else len(argv)
    arguments, unknown = top.parse_known_args(argv[:split])
    arguments.arguments = [*unknown, *argv[split + 1 :]]
    if arguments.arguments and arguments.command != "run":
        top.error(f"unrecognized arguments: {' '.join(arguments.arguments)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(given)
    configure()
    try:
        command = import_module(f"lockstep.cli.{_MODULES.get(arguments.command, arguments.command)}")
        code: int = command.run(arguments, given)
    except LockstepError as error:
        log.error("%s", error)
        return 2 if isinstance(error, InputError) else 1
    return code
