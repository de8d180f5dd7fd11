"""What Kubernetes makes of a Job and its Service: pods with names, numbers and variables.

    Job ddp, Indexed, 2 pods                    Service ddp, headless
      ddp-0   JOB_COMPLETION_INDEX=0     <---   ddp-0.ddp   address of the first pod
      ddp-1   JOB_COMPLETION_INDEX=1     <---   ddp-1.ddp   address of the second pod

A manifest is what a YAML file holds: nested dicts and lists. Nothing here talks to a cluster.
Sources: kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/,
kubernetes.io/docs/concepts/services-networking/dns-pod-service/ and
kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
"""

import copy
import re
from collections.abc import Mapping
from typing import NamedTuple

INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"

BROKEN = [
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "ddp"},
        "spec": {"ports": [{"port": 29500}], "selector": {"app": "ddp"}},
    },
    {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "ddp"},
        "spec": {
            "completions": 2,
            "parallelism": 1,
            "template": {
                "metadata": {"labels": {"app": "trainer"}},
                "spec": {
                    "restartPolicy": "Always",
                    "containers": [
                        {
                            "name": "trainer",
                            "image": "registry.example.org/manyhands:1",
                            "command": [
                                "torchrun",
                                "--nnodes=2",
                                "--nproc-per-node=4",
                                "--node-rank=$(NODE_RANK)",
                                "--master-addr=ddp-0.ddp",
                                "train.py",
                            ],
                            "env": [
                                {
                                    "name": "NODE_RANK",
                                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                                }
                            ],
                            "resources": {"requests": {"nvidia.com/gpu": 4}},
                            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                        }
                    ],
                    "volumes": [
                        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}
                    ],
                },
            },
        },
    },
]


def mended_job() -> list[dict]:
    """Return the Service and the Job of BROKEN, mended: a list of the two.

    The Job trains on 2 pods that run at the same time, with 4 GPUs each. torchrun runs once in each
    pod and starts a rank per GPU; its node rank is the pod's index in the Job, 0 or 1. Both meet at
    ddp-0.ddp, the name that the Service gives to pod 0. A pod that fails is replaced by a new one,
    which may start on another node. Data loaders have 4 GiB of shared memory.

    BROKEN itself stays as it is: copy.deepcopy(BROKEN) is yours to change.
    """
    service, job = copy.deepcopy(BROKEN)
    service["spec"]["clusterIP"] = "None"
    service["spec"]["selector"] = {"app": "trainer"}
    job["spec"]["completionMode"] = "Indexed"
    job["spec"]["parallelism"] = 2
    pod = job["spec"]["template"]["spec"]
    pod["restartPolicy"] = "Never"
    pod["subdomain"] = "ddp"
    container = pod["containers"][0]
    container["resources"]["limits"] = {"nvidia.com/gpu": 4}
    field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] = field
    return [service, job]


class Pod(NamedTuple):
    """One of the pods that run at the same time."""

    host: str  # its own name
    dns: str  # the name under which other pods find it, or "" where there is none
    environ: dict[str, str]  # of its first container
    command: list[str]


def selects(service: dict, labels: Mapping[str, str]) -> bool:
    """Does the Service lead to pods with these labels? An empty selector leads to none."""
    selector = service["spec"].get("selector") or {}
    return bool(selector) and selector.items() <= labels.items()


def pods_of(manifest: list[dict]) -> list[Pod]:
    """The pods that Kubernetes starts at first for the Job among these objects, in order."""
    job = next(one for one in manifest if one["kind"] == "Job")
    services = [one for one in manifest if one["kind"] == "Service"]
    spec = job["spec"]
    count = min(spec.get("parallelism", 1), spec.get("completions", spec.get("parallelism", 1)))
    return [_pod(job, services, number) for number in range(count)]


def _pod(job: dict, services: list[dict], number: int) -> Pod:
    name, template = job["metadata"]["name"], job["spec"]["template"]
    is_indexed = job["spec"].get("completionMode") == "Indexed"
    # Without an index the end of the name is random, and no pod can know that of another.
    host = f"{name}-{number}" if is_indexed else f"{name}-{'bcdfghjklmnp'[number % 12] * 5}"
    labels = {**template.get("metadata", {}).get("labels", {}), JOB_NAME: name, "job-name": name}
    metadata = {"name": host, "namespace": "default", "labels": labels, "annotations": {}}
    if is_indexed:
        metadata["annotations"][INDEX] = labels[INDEX] = str(number)
    container = template["spec"]["containers"][0]
    environ = _environ(container.get("env") or [], metadata)
    if is_indexed:
        environ.setdefault("JOB_COMPLETION_INDEX", str(number))  # added behind all others
    words = [*container.get("command", []), *container.get("args", [])]
    subdomain = template["spec"].get("subdomain", "")
    is_found = is_indexed and any(
        service["metadata"]["name"] == subdomain
        and service["spec"].get("clusterIP") == "None"
        and selects(service, labels)
        for service in services
    )
    dns = f"{host}.{subdomain}" if is_found else ""
    return Pod(host, dns, environ, [expanded(word, environ) for word in words])


def _environ(entries: list[dict], metadata: dict) -> dict[str, str]:
    """Variables in the order of the manifest; each may name those before it."""
    environ: dict[str, str] = {}
    for entry in entries:
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        value = _field(path, metadata) if path else expanded(entry.get("value", ""), environ)
        environ[entry["name"]] = value
    return environ


def _field(path: str, metadata: dict) -> str:
    """What the downward API gives for a field of the pod, such as metadata.labels['app']."""
    found = re.fullmatch(r"metadata\.(\w+)(?:\['(.+)'\])?", path)
    if not found or found[1] not in metadata:
        return f"<{path}>"  # status.podIP and others that only a running pod has
    value = metadata[found[1]]
    return value.get(found[2], "") if isinstance(value, dict) else value


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """The text with $(NAME) replaced; a name that is not known is left as it stands."""
    return re.sub(r"\$\((\w+)\)", lambda found: environ.get(found[1], found[0]), text)
