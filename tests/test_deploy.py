"""`deploy/`: the job scripts run as they are, with stand-ins for the commands of the cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from worker_processes import HANG_SECONDS

from lockstep.cli.main import parse
from lockstep.launcher.launch import PREEMPTED, WRONG_INPUT

ROOT = Path(__file__).parent.parent
SLURM = ROOT / "deploy/slurm.sh"
WORDS = [
    "mnist", "--device", "cpu", "--towers", "2", "--forever",
    "--set", "batch_size=24", "--set", "checkpoints.every=0", "--set", "watch.metrics=1 steps",
    "--set", "watch.summaries=0", "--set", "evaluate.every=0",
]  # fmt: skip

# Starts all tasks at once with their numbers in the environment, and ends with the highest of their exit codes.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=$SLURM_NNODES SLURM_STEP_NODELIST=localhost
for task in 0 1; do
    SLURM_PROCID=$task SLURM_NODEID=$((task * (SLURM_NNODES - 1))) "$@" & pids+=($!)
done
echo "${pids[@]}" > "$SCRATCH/tasks"
for pid in "${pids[@]}"; do
    wait "$pid"; code=$?
    highest=$((code > highest ? code : highest))
done
exit "$highest"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> "$SCRATCH/scontrol"
"""
LOCKSTEP = f"""#!/usr/bin/env bash
exec {sys.executable} -m lockstep "$@"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script whose srun, scontrol and lockstep are those above."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "lockstep": LOCKSTEP}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": "0", "SCRATCH": str(tmp_path)}
    return {**os.environ, **job, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def wait_for_file(path: Path, job: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + HANG_SECONDS
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(("num_nodes", "to"), [pytest.param("1", 1, marks=pytest.mark.slow), ("2", 1)])
def test_a_signal_to_one_task_has_the_whole_job_saved_and_requeued(
    tmp_path: Path, cluster: dict[str, str], num_nodes: str, to: int
) -> None:
    run = tmp_path / "run"
    command = ["bash", str(SLURM), *WORDS, "--workdir", str(run)]
    environment = {**cluster, "SLURM_NNODES": num_nodes}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        wait_for_file(run / "metrics.jsonl", job)
        pids = [int(pid) for pid in wait_for_file(tmp_path / "tasks", job).split()]
        os.kill(pids[to], signal.SIGUSR1)
        said, _ = job.communicate(timeout=HANG_SECONDS)
    assert job.returncode == 75, said
    assert (tmp_path / "scontrol").read_text() == f"requeue {cluster['SLURM_JOB_ID']}\n"
    stop = json.loads((run / "history.jsonl").read_text().splitlines()[-1])
    assert (stop["event"], stop["workers"]) == ("stop", 2)
    assert max((run / "checkpoints").iterdir()).name == f"step-{stop['step']:08d}"
    assert f"stopped at step {stop['step']}, and saved: the same command goes on from there" in said


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
    return service, job


def test_the_manifest_names_the_pods_that_the_service_resolves() -> None:
    service, job = manifest()
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    chief = next(word for word in pod["containers"][0]["args"] if word.startswith("--chief="))
    assert chief == f"--chief={name}-0.{service['metadata']['name']}:29500"


def test_the_manifest_starts_as_many_hosts_as_it_says() -> None:
    spec = manifest()[1]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    words = container["command"] + container["args"]
    assert words[0] == "lockstep"
    arguments = parse([word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in words[1:]])
    assert spec["completions"] == spec["parallelism"] == arguments.hosts
    assert arguments.host_rank == 1
    assert arguments.requeue
    assert arguments.grace < spec["template"]["spec"]["terminationGracePeriodSeconds"]
    (key,) = container["env"]
    assert key["name"] == "LOCKSTEP_KEY"
    assert key["valueFrom"]["secretKeyRef"]["key"] == "key"


def test_the_manifest_counts_no_preemption_as_a_failure_and_repeats_no_wrong_input() -> None:
    spec = manifest()[1]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    actions = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert actions == {(PREEMPTED,): "Ignore", (WRONG_INPUT,): "FailJob"}


def test_compose_starts_two_hosts_of_one_run() -> None:
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    hosts = [parse(service["command"].split()) for service in compose["services"].values()]
    assert [host.host_rank for host in hosts] == [*range(hosts[0].hosts)] == [0, 1]
    assert {host.chief for host in hosts} == {f"{next(iter(compose['services']))}:29500"}
    assert len({(host.recipe, host.workdir, host.towers) for host in hosts}) == 1
    for service, host in zip(compose["services"].values(), hosts, strict=True):
        assert host.grace < int(service["stop_grace_period"].removesuffix("s"))
        assert str(host.workdir).startswith(service["volumes"][1].partition(":")[2])
        assert (ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_image_runs_as_a_user_and_gets_all_that_a_wheel_is_made_of() -> None:
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users == ["1000:1000"], "a number: Kubernetes can see that it is not root"
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
    assert "ARG TORCH_VERSION=2.13.0" in lines
    sent = [line[1:] for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    assert all((ROOT / name).exists() for name in sent)
    assert {"setup.py", "pyproject.toml", "README.md", "lockstep", "data/squeezenet"} <= {*sent}
