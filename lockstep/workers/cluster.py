"""Where a launcher has put this process, by the variables of its environment: which worker it is, or which host.

One process a worker is started by torchrun and all who set RANK and WORLD_SIZE, by Open MPI, MPICH and Intel MPI, and
by srun with several tasks on a node. One process a host, whose workers our own launcher then starts, is started by srun
with one task a node, by those who set PET_NNODES and its like (torchrun's own flags: Kubeflow), and by those who set
TF_CONFIG. A launcher inside a process of another one counts: torchrun or mpirun under srun.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from zlib import crc32

from lockstep.errors import InputError
from lockstep.workers.store_server import LAUNCHED

Environment = Mapping[str, str]

DEFAULT_PORT = 29500
"""Where the chief listens if nobody says otherwise, as under torchrun."""
_JOB_PORTS = range(15000, 29500)
"""The ports for jobs that have a name, so that two on a host do not meet; below those that a kernel hands out."""
_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
)
_NAMES = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_.*|OMPI_COMM_WORLD_.*|PMI_(RANK|SIZE)|MPI_LOCAL.*"
    "|SLURM_(PROCID|NODEID|JOB_ID|STEP_.*)|PET_.*|JOB_COMPLETION_INDEX"
)
"""Names of variables that count or name the processes of a run."""


@dataclass(frozen=True)
class WorkerEnvironment:
    """What a launcher's variables say of this process, one of those that it has started alike."""

    rank: int
    num_workers: int
    local: tuple[int, int] | None = None
    """Rank among the workers of this host, and their number; None where the launcher does not set them."""
    launched: bool = False
    """Our own launcher has set them: this process has inherited a connection to its store."""
    address: str = ""
    port: int = 0
    """Address and port of the store under other launchers; none for a worker that is alone."""
    store_rank: int | None = None
    """The worker that holds the store; None where the launcher does."""
    prefix: str = "lockstep/"
    """Keeps runs apart that use the same store."""
    one_a_host: bool = False
    """It is the only process on its host: our own launcher may start the workers there."""
    source: str = field(default="", compare=False)
    """The variables that say so, for messages."""

    @classmethod
    def read(cls, environment: Environment) -> WorkerEnvironment | None:
        """Read the variables; None where no launcher has started this process, or none but this one.

        Raises:
            InputError: a variable is missing or cannot be used, or two launchers do not agree.
        """
        place = _torch(environment)
        if place and (place.launched or place.local or place.num_workers == 1):
            return place
        # Who has set numbers by hand, or a platform that has, starts nothing: it says what the others say, or is wrong.
        places = (place, _mpi(environment) or _slurm(environment), _elastic(environment), _tf_config(environment))
        return _agreed([place for place in places if place])


def hosts_of_environment(environment: Environment) -> tuple[int, int, str] | None:
    """Return what `--hosts`, `--host-rank` and `--chief` are by a launcher's variables: (4, 0, "node1:29500").

    None where there is no launcher, or one that starts the workers itself. Raises InputError as `read` does.
    """
    place = WorkerEnvironment.read(environment)
    if place is None or not place.one_a_host:
        return None
    return place.num_workers, place.rank, f"{place.address}:{place.port}"


# What each launcher says ---------------------------------------------------------------------------------------------


def _torch(environment: Environment) -> WorkerEnvironment | None:
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    place = _counted(environment, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if LAUNCHED in environment:
        return replace(place, launched=True, store_rank=None)
    if place.num_workers == 1:
        return place
    return replace(
        place,
        address=_variable(environment, "MASTER_ADDR"),
        port=_number(environment, "MASTER_PORT", range(1, 1 << 16)),
        store_rank=None if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
        prefix=f"lockstep/{environment.get('TORCHELASTIC_RUN_ID', '')}",
    )


def _mpi(environment: Environment) -> WorkerEnvironment | None:
    for rank, size, local_rank, local_size in _MPI_NAMES:
        numbers = environment.get(rank), environment.get(size)
        # srun may set PMI_RANK and PMI_SIZE itself; mpirun under it has numbers of its own.
        of_srun = numbers == (environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NUM_TASKS"))
        if numbers[0] is not None and numbers[1] != "1" and not of_srun:
            place = _counted(environment, rank, size, local_rank, local_size)
            on_one_host = place.local is not None and place.local[1] == place.num_workers
            address = "127.0.0.1" if on_one_host else _variable(environment, "MASTER_ADDR")
            job = environment.get("PMIX_NAMESPACE", "")  # set by Open MPI
            port = _JOB_PORTS[crc32(job.encode()) % len(_JOB_PORTS)] if job else DEFAULT_PORT
            return _meeting(place, environment, address, port, job)
    return None


def _slurm(environment: Environment) -> WorkerEnvironment | None:
    # A batch script has SLURM_PROCID and SLURM_NTASKS too: only the variables of a step say that srun has started us.
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    place = _counted(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    num_nodes = _number(environment, "SLURM_STEP_NUM_NODES", range(1, place.num_workers + 1))
    one_a_host = num_nodes == place.num_workers
    if one_a_host:  # by its place in the list of nodes, of which the first is the chief's
        place = replace(place, rank=_number(environment, "SLURM_NODEID", range(num_nodes)), one_a_host=True)
    every = range(1 << 32)
    job, step = (_number(environment, name, every) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    chief = "127.0.0.1" if num_nodes == 1 else first_node(_variable(environment, "SLURM_STEP_NODELIST"))
    port = _JOB_PORTS[(job + 1009 * step) % len(_JOB_PORTS)]
    return _meeting(place, environment, chief, port, f"{job}.{step}")


def first_node(nodes: str) -> str:
    """Return the first of a list of nodes as Slurm writes it: "node03" of "node[03-05,9],login"."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def _elastic(environment: Environment) -> WorkerEnvironment | None:
    if environment.get("PET_NNODES", "1") == "1":
        return None
    # An Indexed Job of Kubernetes numbers its pods; alone it says nothing, as it may be as many runs.
    numbered = "PET_NODE_RANK" if "PET_NODE_RANK" in environment else "JOB_COMPLETION_INDEX"
    place = replace(_counted(environment, numbered, "PET_NNODES"), one_a_host=True)
    names = {
        name: environment[f"PET_{name}"] for name in ("MASTER_ADDR", "MASTER_PORT") if f"PET_{name}" in environment
    }
    environment = {**environment, **names}
    return _meeting(place, environment, _variable(environment, "MASTER_ADDR"), DEFAULT_PORT)


def _tf_config(environment: Environment) -> WorkerEnvironment | None:
    text = environment.get("TF_CONFIG", "{}")
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
        lists = {kind: [str(where) for where in places] for kind, places in cluster.items()}
        # Without a type, the trainer of Object Detection takes its process for the master.
        here = str(task.get("type", "master")), str(task.get("index", 0))
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise _unusable_tf_config(text) from None
    if "ps" in lists or here[0] in {"ps", "evaluator"}:
        raise InputError(
            "TF_CONFIG has tasks that Lockstep has no use for.",
            given=f"TF_CONFIG: {' '.join(here)} of a cluster of {' and '.join(lists) or 'nobody'}",
            expected="a chief or master, and workers",
            hint="leave parameter servers and evaluators out of the job: each worker makes the whole update, the run "
            "evaluates by itself, and lockstep evaluate scores its checkpoints elsewhere",
        )
    kinds = ("chief", "master", "worker")
    tasks = {(kind, str(index)): where for kind in kinds for index, where in enumerate(lists.get(kind, ()))}
    if len(tasks) < 2:
        return None
    address, _, port = next(iter(tasks.values())).rpartition(":")
    if here not in tasks or not address or not port.isdecimal():
        raise _unusable_tf_config(text)
    rank, source = [*tasks].index(here), f"TF_CONFIG: {' '.join(here)}, {len(tasks)} tasks"
    return WorkerEnvironment(
        rank, len(tasks), address=address, port=int(port), store_rank=0, one_a_host=True, source=source
    )


def _unusable_tf_config(text: str) -> InputError:
    return InputError(
        "TF_CONFIG of the environment cannot be used.",
        given=f"TF_CONFIG={text[:200]}",
        expected='{"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]}, "task": {"type": "worker", "index": 0}}',
        hint="mend it, or unset TF_CONFIG to train on this host alone",
    )


# What they have in common --------------------------------------------------------------------------------------------


def _counted(
    environment: Environment, rank: str, size: str, local_rank: str = "", local_size: str = ""
) -> WorkerEnvironment:
    """Read rank and number of processes, and those of this host if there are both."""
    num_workers = _number(environment, size, range(1, 1 << 20))
    number = _number(environment, rank, range(num_workers))
    local = None
    if local_rank in environment and local_size in environment:
        num_local = _number(environment, local_size, range(1, num_workers + 1))
        local = _number(environment, local_rank, range(num_local)), num_local
    source = f"{rank}={number} of {size}={num_workers}"
    return WorkerEnvironment(number, num_workers, local, store_rank=0, source=source)


def _meeting(
    place: WorkerEnvironment, environment: Environment, address: str, port: int, job: str = ""
) -> WorkerEnvironment:
    """Set where the processes of a job meet: MASTER_ADDR and MASTER_PORT count before address and port."""
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT", range(1, 1 << 16))
    return replace(place, address=environment.get("MASTER_ADDR", address), port=port, prefix=f"lockstep/{job}")


def _agreed(places: list[WorkerEnvironment]) -> WorkerEnvironment | None:
    for other in places[1:]:
        if (other.rank, other.num_workers) != (places[0].rank, places[0].num_workers):
            raise InputError(
                "The environment says in two ways which of the processes this is.",
                given=f"{places[0].source}; {other.source}",
                expected="the same rank and the same number of processes",
                hint="unset the variables of the one that has not started these processes",
            )
    return places[0] if places else None


def _variable(environment: Environment, name: str) -> str:
    if name not in environment:
        raise InputError(
            f"The launcher has not set {name}.",
            given=", ".join(f"{key}={environment[key]}" for key in sorted(environment) if _NAMES.fullmatch(key)),
            expected=f"{name}, beside the others",
            hint=f"set {name} for each process (Open MPI: mpirun -x {name}=...), or unset all of them to train alone",
        )
    return environment[name]


def _number(environment: Environment, name: str, allowed: range) -> int:
    text = _variable(environment, name)
    if not text.isdecimal() or int(text) not in allowed:
        raise InputError(
            f"{name} of the environment cannot be used.",
            given=f"{name}={text!r}",
            expected=f"a whole number from {allowed.start} to {allowed.stop - 1}",
            hint="start the processes with a launcher that numbers them, or unset its variables to train alone",
        )
    return int(text)
