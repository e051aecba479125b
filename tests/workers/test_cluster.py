from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.workers.cluster import WorkerEnvironment, first_node, hosts_of_environment
from lockstep.workers.store_server import LAUNCHED

FULL = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_a_bare_launcher_leaves_the_store_to_the_chief() -> None:
    env = WorkerEnvironment.read(FULL)
    assert env == WorkerEnvironment(2, 4, address="node0", port=29500, store_rank=0)


def test_our_launcher_needs_no_address() -> None:
    assert WorkerEnvironment.read({**LOCAL, "RANK": "0", "WORLD_SIZE": "4", LAUNCHED: "1"}) == WorkerEnvironment(
        0, 4, (0, 2), launched=True
    )


def test_a_run_of_torchrun_has_a_prefix_of_its_own() -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = WorkerEnvironment.read({**FULL, "RANK": "0", **elastic})
    assert env is not None
    assert (env.prefix, env.store_rank) == ("lockstep/job", None)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    environment = {key: value for key, value in FULL.items() if key != name}
    with pytest.raises(InputError) as caught:
        WorkerEnvironment.read(environment)
    assert caught.value.what == f"The launcher has not set {name}."
    assert caught.value.given == ", ".join(f"{key}={environment[key]}" for key in sorted(environment))
    assert name in caught.value.hint


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_without_both_local_numbers_the_workers_count_for_themselves(name: str) -> None:
    env = WorkerEnvironment.read({key: value for key, value in {**FULL, **LOCAL}.items() if key != name})
    assert env is not None
    assert env.local is None


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("RANK", "4", "a whole number from 0 to 3"),
        ("RANK", "-1", "a whole number from 0 to 3"),
        ("WORLD_SIZE", "0", "a whole number from 1 to 1048575"),
        ("WORLD_SIZE", "two", "a whole number from 1 to 1048575"),
        ("LOCAL_RANK", "2", "a whole number from 0 to 1"),
        ("LOCAL_WORLD_SIZE", "5", "a whole number from 1 to 4"),
        ("MASTER_PORT", "99999", "a whole number from 1 to 65535"),
    ],
)
def test_a_variable_out_of_range_is_refused(name: str, text: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        WorkerEnvironment.read({**FULL, **LOCAL, name: text})
    assert caught.value.what == f"{name} of the environment cannot be used."
    assert (caught.value.given, caught.value.expected) == (f"{name}={text!r}", expected)


# Launchers that have names of their own ------------------------------------------------------------------------------

STEP = {
    "SLURM_JOB_ID": "1004711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[03-05,9]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
}
GPU_TASKS = {**STEP, "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "11"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
INTEL_MPI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
KUBEFLOW = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-0.svc", "PET_MASTER_PORT": "29400"}
CLUSTER = {"chief": ["one:2222"], "worker": ["two:2222", "three:2222"]}


def tf_config(cluster: object, **task: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # A batch script: srun has not started it.
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "node[1-2]"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
        {"JOB_COMPLETION_INDEX": "3"},  # an Indexed Job may be as many runs
        {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
        {"TF_CONFIG": "{}"},
        tf_config({"chief": ["one:2222"]}, type="chief", index=0),
    ],
)
def test_who_is_started_alone_is_alone(environment: dict[str, str]) -> None:
    assert WorkerEnvironment.read(environment) is None
    assert hosts_of_environment(environment) is None


@pytest.mark.parametrize(
    ("environment", "worker"),
    [
        (GPU_TASKS, (11, 16, None, "node03", 19211, "lockstep/1004711.0")),
        ({**GPU_TASKS, "SLURM_STEP_NUM_NODES": "1"}, (11, 16, None, "127.0.0.1", 19211, "lockstep/1004711.0")),
        ({**GPU_TASKS, "SLURM_STEP_ID": "1"}, (11, 16, None, "node03", 20220, "lockstep/1004711.1")),
        (
            {**GPU_TASKS, "MASTER_ADDR": "ib3", "MASTER_PORT": "1"},
            (11, 16, None, "ib3", 1, "lockstep/1004711.0"),
        ),
        (
            {**GPU_TASKS, "PMI_RANK": "11", "PMI_SIZE": "16"},
            (11, 16, None, "node03", 19211, "lockstep/1004711.0"),
        ),
        ({**OPEN_MPI, "MASTER_ADDR": "a"}, (5, 8, (1, 4), "a", 29500, "lockstep/")),
        ({**OPEN_MPI, "MASTER_ADDR": "a", "PMIX_NAMESPACE": "b@1"}, (5, 8, (1, 4), "a", 22723, "lockstep/b@1")),
        ({**INTEL_MPI, "MASTER_ADDR": "a"}, (5, 8, (1, 4), "a", 29500, "lockstep/")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (5, 8, (1, 8), "127.0.0.1", 29500, "lockstep/")),
    ],
    ids=["srun", "one node", "second step", "address", "pmi of srun", "open mpi", "named job", "intel mpi", "one host"],
)
def test_a_launcher_of_workers(environment: dict[str, str], worker: tuple[object, ...]) -> None:
    place = WorkerEnvironment.read(environment)
    assert place is not None
    assert (place.rank, place.num_workers, place.local, place.address, place.port, place.prefix) == worker
    assert (place.store_rank, place.launched) == (0, False)
    assert hosts_of_environment(environment) is None


@pytest.mark.parametrize(
    ("environment", "hosts"),
    [
        (STEP, (4, 2, "node03:19211")),
        ({**STEP, "SLURM_PROCID": "3"}, (4, 2, "node03:19211")),  # the list of nodes says who is first
        (KUBEFLOW, (4, 2, "job-0.svc:29400")),
        ({"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "job-0.svc"}, (2, 1, "job-0.svc:29500")),
        (tf_config(CLUSTER, type="worker", index=1), (3, 2, "one:2222")),
        (tf_config(CLUSTER, type="chief", index=0), (3, 0, "one:2222")),
        (tf_config({"master": ["m:1"], "worker": ["w:1"]}), (2, 0, "m:1")),
        (tf_config({"worker": ["v:1", "w:1"]}, type="worker", index="1"), (2, 1, "v:1")),
        ({**STEP, **KUBEFLOW}, (4, 2, "node03:19211")),
    ],
    ids=[
        "srun",
        "tasks elsewhere",
        "kubeflow",
        "indexed job",
        "tf worker",
        "tf chief",
        "tf master",
        "tf workers",
        "two",
    ],
)
def test_a_launcher_of_hosts(environment: dict[str, str], hosts: tuple[int, int, str]) -> None:
    assert hosts_of_environment(environment) == hosts
    # A script that joins without our launcher is a worker, one of as many as there are hosts.
    alone = WorkerEnvironment.read(environment)
    assert alone is not None
    assert (alone.num_workers, alone.rank, f"{alone.address}:{alone.port}") == hosts


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("node[03-05,9],login", "node03"),
        ("rack[2-3]n[08,10]", "rack2n08"),
        ("a-b.c", "a-b.c"),
    ],
)
def test_the_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    "launcher", [{"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, {"LOCAL_RANK": "2", **LOCAL, LAUNCHED: ""}]
)
@pytest.mark.parametrize("outside", [STEP, OPEN_MPI, KUBEFLOW, tf_config({"ps": ["p:1"]}, type="ps")])
def test_a_launcher_in_a_process_of_another_one_counts(launcher: dict[str, str], outside: dict[str, str]) -> None:
    environment = {**outside, **FULL, **launcher}
    worker = WorkerEnvironment.read(environment)
    assert worker is not None
    assert (worker.rank, worker.num_workers) == (2, 4)
    assert hosts_of_environment(environment) is None


def test_mpirun_counts_before_the_srun_that_started_it() -> None:
    worker = WorkerEnvironment.read({**STEP, **OPEN_MPI, "MASTER_ADDR": "a"})
    assert worker is not None
    assert (worker.rank, worker.num_workers, worker.address) == (5, 8, "a")


def test_a_task_of_srun_that_is_to_train_alone_says_so() -> None:
    assert WorkerEnvironment.read({**STEP, "RANK": "0", "WORLD_SIZE": "1"}) == WorkerEnvironment(0, 1, store_rank=0)


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({**FULL, **STEP, "RANK": "0"}, "RANK=0 of WORLD_SIZE=4; SLURM_PROCID=2 of SLURM_STEP_NUM_TASKS=4"),
        ({**FULL, **KUBEFLOW, "WORLD_SIZE": "8"}, "RANK=2 of WORLD_SIZE=8; PET_NODE_RANK=2 of PET_NNODES=4"),
        (
            {**STEP, **tf_config(CLUSTER, type="chief")},
            "SLURM_PROCID=2 of SLURM_STEP_NUM_TASKS=4; TF_CONFIG: chief 0, 3 tasks",
        ),
    ],
)
def test_two_that_do_not_agree_are_named(environment: dict[str, str], given: str) -> None:
    with pytest.raises(InputError) as caught:
        WorkerEnvironment.read(environment)
    assert caught.value.what == "The environment says in two ways which of the processes this is."
    assert caught.value.given == given


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        (OPEN_MPI, "MASTER_ADDR"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({"PET_NNODES": "2", "MASTER_ADDR": "a"}, "JOB_COMPLETION_INDEX"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "MASTER_ADDR"),
        *(
            ({key: value for key, value in STEP.items() if key != name}, name)
            for name in STEP
            if "NUM_TASKS" not in name
        ),
    ],
)
def test_what_another_launcher_has_not_set_is_named(environment: dict[str, str], missing: str) -> None:
    with pytest.raises(InputError) as caught:
        hosts_of_environment(environment)
    assert caught.value.what == f"The launcher has not set {missing}."
    assert caught.value.given == ", ".join(f"{key}={environment[key]}" for key in sorted(environment))


def test_an_elastic_number_of_hosts_is_refused() -> None:
    with pytest.raises(InputError, match="PET_NNODES of the environment cannot be used"):
        hosts_of_environment({**KUBEFLOW, "PET_NNODES": "1:4"})


@pytest.mark.parametrize("task", [("worker", 0), ("ps", 0), ("evaluator", 0)])
def test_parameter_servers_and_evaluators_are_refused(task: tuple[str, int]) -> None:
    cluster = {"chief": ["c:1"], "worker": ["w:1"]} | ({} if task[0] == "evaluator" else {"ps": ["p:1"]})
    with pytest.raises(InputError) as caught:
        hosts_of_environment(tf_config(cluster, type=task[0], index=task[1]))
    assert caught.value.what == "TF_CONFIG has tasks that Lockstep has no use for."
    assert caught.value.given == f"TF_CONFIG: {task[0]} {task[1]} of a cluster of {' and '.join(cluster)}"
    assert str(caught.value.hint).startswith("leave parameter servers and evaluators out of the job")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 5000,
        '{"cluster": 3}',
        '{"cluster": {"worker": 3}}',
        '{"cluster": {"worker": "one:1"}}',
        '{"task": [1]}',
        json.dumps({"cluster": {"worker": ["one:1", "two:1"]}}),
        json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 2}}),
        json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1e400}}),
        json.dumps({"cluster": {"worker": ["one", "two"]}, "task": {"type": "worker"}}),
    ],
)
def test_a_tf_config_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        hosts_of_environment({"TF_CONFIG": text})
    assert caught.value.what == "TF_CONFIG of the environment cannot be used."
    assert caught.value.given == f"TF_CONFIG={text[:200]}"


NAMES = sorted({*FULL, *LOCAL, *STEP, *OPEN_MPI, *INTEL_MPI, *KUBEFLOW, "TF_CONFIG", "JOB_COMPLETION_INDEX"})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["worker", "chief", "ps", "a:1"]),
    lambda part: (
        st.lists(part) | st.dictionaries(st.sampled_from(["cluster", "task", "worker", "index", "type"]), part)
    ),
)


@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["0", "1", "2", "9" * 30, "-1", "", "a", "²", "a[1-2]"]))
)
def test_any_environment_is_understood_or_refused(environment: dict[str, str]) -> None:
    with suppress(InputError):
        place = WorkerEnvironment.read(environment)
        assert place is None or 0 <= place.rank < place.num_workers


@example({"cluster": [True]})
@given(JSON)
def test_any_tf_config_is_understood_or_refused(config: object) -> None:
    with suppress(InputError):
        hosts = hosts_of_environment({"TF_CONFIG": json.dumps(config)})
        assert hosts is None or 0 <= hosts[1] < hosts[0]
