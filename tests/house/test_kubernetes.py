"""The course's job in pods: the manifests are sound, and give the ranks that Slurm gives.

A pod is rendered from its manifest as Kubernetes would do it (manyhands.checkpoint.pods); what
Kubeflow adds stands here, from its sources. Two "pods" then train for real, as processes on this
machine.
"""

import json
import random
import re
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

import train_ddp
from commands import ROOT, environment, flags, left_behind, losses, make_clone, settings
from launch import node_of_pod, torchrun_arguments
from manyhands.checkpoint.pods import BROKEN, Pod, mended_job, pods_of
from manyhands.checks.checkpoint.pods import VERSION
from manyhands.ranks.failures import BadInput
from manyhands.ranks.lab import run_ranks

FOLDER = ROOT / "sbatch" / "containers"


def manifest(name: str) -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def trainjob_pods() -> Iterator[dict[str, str]]:
    """The variables of a TrainJob's pods.

    As kubeflow/trainer makes them: pkg/runtime/framework/plugins/torch/torch.go; its pods are those
    of an indexed Job NAME-node-0, in the headless Service NAME that JobSet makes.
    """
    runtime, job = manifest("trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["name"] == "node"
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    for index in range(trainer["numNodes"]):
        yield {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(runtime["spec"]["mlPolicy"]["torch"]["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": str(29500),
            "JOB_COMPLETION_INDEX": str(index),
        }


def pytorchjob_pods() -> Iterator[dict[str, str]]:
    """The variables of a PyTorchJob's pods.

    As kubeflow/training-operator makes them: pkg/controller.v1/pytorch/envvar.go and master.go.
    Pod and Service are NAME-master-0; where nprocPerNode is "auto", WORLD_SIZE counts pods.
    """
    (job,) = manifest("pytorchjob.yaml")
    replicas = {kind: one["replicas"] for kind, one in job["spec"]["pytorchReplicaSpecs"].items()}
    assert replicas["Master"] == 1
    total = sum(replicas.values())
    for index in range(total):
        yield {
            "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": f"{job['metadata']['name']}-master-0",
            "MASTER_PORT": str(23456),
            "WORLD_SIZE": str(total),
            "RANK": str(index),
            "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
            "PET_NODE_RANK": str(index),
            "PET_NNODES": str(total),
        }


PODS = {
    "job.yaml": lambda: [pod.environ for pod in pods_of(manifest("job.yaml"))],
    "trainjob.yaml": lambda: list(trainjob_pods()),
    "pytorchjob.yaml": lambda: list(pytorchjob_pods()),
}


# ---- the manifests ---------------------------------------------------------------------------


def test_what_kubernetes_itself_reads_fits_its_schemas():
    """Strictly: no field that it does not know. Kubeflow's own kinds have pod specs inside."""
    for one in [*manifest("job.yaml"), *mended_job()]:
        assert kubernetes_validate.validate(one, VERSION, strict=True) == VERSION
    runtime, (operator,) = manifest("trainjob.yaml")[0], manifest("pytorchjob.yaml")
    (nodes,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    inside = [nodes["template"]["spec"], *operator["spec"]["pytorchReplicaSpecs"].values()]
    for template in [one["template"] for one in inside]:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **template}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_all_manifests_start_the_same_program_with_the_same_means():
    """One command, one image, one disk for the run, shared memory, no root and no token."""
    said = [(FOLDER / name).read_text() for name in PODS]
    for pattern in (
        r"command: (\[.*\])",
        r"image: (\S+)",
        r"claimName: (\S+)",
        r"mountPath: (/course/runs)",
        r"medium: (Memory)",
        r"nvidia.com/gpu: (\d)",
        r"terminationGracePeriodSeconds: (\d+)",
        r"(automountServiceAccountToken: false)",
        r"(runAsNonRoot: true)",
    ):
        found = [re.findall(pattern, text) for text in said]
        assert len(set(map(frozenset, found))) == 1 and found[0], pattern
    command = re.search(r"command: \[(.*)\]", said[0])[1].split(", ")
    assert (ROOT / command[1]).is_file() and (ROOT / command[2]).is_file() and "--out" in command


def test_a_failed_pod_is_replaced_and_a_stop_is_no_failure():
    spec = manifest("job.yaml")[1]["spec"]
    template = spec["template"]["spec"]
    assert template["restartPolicy"] == "Never"  # or else the API refuses backoffLimitPerIndex
    assert spec["podReplacementPolicy"] == "Failed"
    rule = spec["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "Ignore" and rule["onExitCodes"]["values"] == [75]
    assert rule["onExitCodes"]["containerName"] == template["containers"][0]["name"]


# ---- the same ranks as under Slurm -----------------------------------------------------------


@pytest.mark.parametrize("name", PODS)
@pytest.mark.parametrize("num_gpus", [0, 4])
def test_pods_get_torchrun_s_arguments_of_slurm_s_nodes(name, num_gpus):
    """Each node's list, word for word, for a job of the same number on nodes of the same name."""
    environs = PODS[name]()
    heads = {environ.get("PET_MASTER_ADDR", environ.get("MASTER_ADDR")) for environ in environs}
    assert len(environs) == 2 and len(heads) == 1
    (head,) = heads
    for node, environ in enumerate(environs):
        slurm = {"NODES": "2", "HEAD_NODE": head, "SLURM_NODEID": str(node)}
        slurm["SLURM_JOB_ID"] = str(zlib.crc32(head.encode()))
        wanted = torchrun_arguments(slurm, num_gpus)
        assert torchrun_arguments(environ, num_gpus) == wanted
        assert "--nnodes=2" in wanted and f"--rdzv-conf=is_host={int(node == 0)}" in wanted
        assert f"--nproc-per-node={num_gpus or 2}" in wanted


def test_the_head_s_name_is_in_the_dns():
    pods = pods_of(manifest("job.yaml"))
    assert [pod.host for pod in pods] == ["ddp-0", "ddp-1"]
    assert {pod.environ["MASTER_ADDR"] for pod in pods} == {pods[0].dns} == {"ddp-0.ddp"}


def test_one_pod_is_one_machine_and_a_number_of_ranks_is_heard():
    for environ in ({}, {"NODES": "1"}, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}):
        alone = {"JOB_COMPLETION_INDEX": "0", **environ}
        assert torchrun_arguments(alone, 3) == ["--nnodes=1", "--nproc-per-node=3"]
    two = {"PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}
    assert torchrun_arguments(two, 3) == ["--nnodes=1", "--nproc-per-node=2"]
    assert torchrun_arguments(two | {"RANKS": "5"}, 3) == ["--nnodes=1", "--nproc-per-node=5"]


@pytest.mark.parametrize(
    "environ", [{"NODES": "2"}, {"NODES": "two", "MASTER_ADDR": "a"}, {"PET_NNODES": "1:2"}]
)
def test_a_pod_that_is_told_too_little_says_so(environ):
    with pytest.raises(BadInput, match="give a whole number as NODES, and the name of pod 0"):
        node_of_pod({"JOB_COMPLETION_INDEX": "0", **environ})


def test_outside_of_pods_nothing_changes():
    assert node_of_pod({"MASTER_ADDR": "a", "NODES": "2", "RANK": "1"}) == {}


# ---- what a manifest becomes -----------------------------------------------------------------


def test_the_broken_manifest_has_one_pod_without_a_name():
    (pod,) = pods_of(BROKEN)
    assert pod.dns == "" and pod.host not in ("ddp-0", "ddp") and "--node-rank=0" not in pod.command


def test_variables_are_expanded_in_the_manifest_s_order():
    """A variable may name those before it; a command may name all, and $(NAME) else stays."""
    service, job = mended_job()
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "x"},
        {"name": "BOTH", "value": "$(LATE)$(LATE)"},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
    ]
    container["command"] = ["$(BOTH)", "$(NONE)", "$(JOB_COMPLETION_INDEX)"]
    first, second = pods_of([service, job])
    assert second == Pod(
        "ddp-1",
        "ddp-1.ddp",
        {"EARLY": "$(LATE)", "LATE": "x", "BOTH": "xx", "LABEL": "trainer"}
        | {"JOB_COMPLETION_INDEX": "1"},
        ["xx", "$(NONE)", "1"],
    )
    assert first.dns == "ddp-0.ddp"


# ---- two pods that train ---------------------------------------------------------------------


def head_on_loopback() -> str:
    """An address of this machine whose port, which launch.py makes of it, is free."""
    while True:
        head = ".".join(["127", *(str(random.randint(1, 250)) for _ in range(3))])
        try:
            socket.create_server(("", 20_000 + zlib.crc32(head.encode()) % 10_000)).close()
            return head
        except OSError:  # somebody has the port
            continue


@contextmanager
def two_pods(clone: Path, out: Path) -> Iterator[list[subprocess.Popen]]:
    """The pods of job.yaml as processes, with their commands and variables; the second first."""
    head, started = head_on_loopback(), []
    try:
        for pod in reversed(pods_of(manifest("job.yaml"))):
            words = [*pod.command[:3], *flags(clone, out=out, steps=STEPS, save_every=5)]
            environ = pod.environ | {"MASTER_ADDR": head, "RANKS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            started.append(
                subprocess.Popen(
                    words,
                    env=environment(**environ),
                    cwd=clone,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        yield started
    finally:
        for pod in started:
            pod.kill()
            pod.wait()


def ends(pods: list[subprocess.Popen]) -> tuple[list[int], str]:
    """Exit codes, and all that was printed."""
    said = [pod.communicate(timeout=120)[0] for pod in pods]
    return [pod.returncode for pod in pods], "\n".join(said)


STEPS = 200  # so that a busy machine has time to stop it before the end


@pytest.mark.parametrize("told", [0, 1])
def test_two_pods_train_stop_together_and_go_on(tmp_path, told):
    """One is told to end, as when its node is drained: both end with 75, and the next two finish.

    The losses are those of one process that nobody disturbed.
    """
    clone, out = make_clone(tmp_path / "clone"), tmp_path / "run"
    with two_pods(clone, out) as pods:
        deadline_s = time.monotonic() + 90
        while not (out / "metrics.jsonl").exists() or len(losses(out)) < 8:
            assert all(pod.poll() is None for pod in pods), ends(pods)
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        pods[told].terminate()
        codes, said = ends(pods)
    assert codes == [75, 75] and "stopped by SIGTERM" in said, said
    assert json.loads((out / "status.json").read_text())["state"] == "stopped"
    assert len(losses(out)) < STEPS
    with two_pods(clone, out) as pods:
        codes, said = ends(pods)
    assert codes == [0, 0] and said.count("2 rank(s) on cpu") == 1 and "resumed" in said, said
    calm = train_ddp.Config(**settings(clone, out=str(tmp_path / "calm"), steps=STEPS))
    run_ranks(train_ddp.main, 1, calm, join=False, quiet=True, timeout_s=60)
    assert len(losses(out)) == STEPS
    # Later the rounding of one process's sums differs more: training amplifies it.
    assert losses(out)[:60] == pytest.approx(losses(tmp_path / "calm")[:60], abs=1e-5)
    assert losses(out) == pytest.approx(losses(tmp_path / "calm"), abs=1e-2)
    assert not left_behind(out)
