"""11.12: a mended manifest, judged by Kubernetes' published schemas and by what it would start.

Many manifests are right, so one is judged by rules: the schemas, as the API server applies them;
what the API server refuses besides; and the pods that would run, with their names and numbers.
"""

import copy
import importlib
import math
import re
import shlex
from collections.abc import Iterator

from manyhands.checkpoint import pods
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import malformed

NODES, GPUS, SHARED = 2, 4, "4Gi"  # what the task asks for
GPU = "nvidia.com/gpu"
VERSION = "1.34"  # of Kubernetes, whose schemas are used
INDEX_FIELD = f"metadata.annotations['{pods.INDEX}']"

Fault = tuple[str, str, str]  # what is seen, why it is wrong, what to try


def manifest_seen(answer: object, case: tuple) -> str:
    """ "accepted", or Wrong with the first of the faults that are left."""
    broken = copy.deepcopy(pods.BROKEN)
    manifest = _plain(answer())
    if broken != pods.BROKEN:
        pods.BROKEN[:] = broken
        raise Wrong("BROKEN itself has been changed", "", "Change copy.deepcopy(BROKEN).")
    faults = [*_of_schemas(manifest)] or [*_of_the_server(manifest), *_of_pods(manifest)]
    if not faults:
        return "accepted"
    seen, why, hint = faults[0]
    left = (
        f" (at least {len(faults)} faults are left, this is the first)" if len(faults) > 1 else ""
    )
    raise Wrong(f"{seen}{left}", why, hint)


def _plain(value: object) -> list[dict]:
    """A Service and a Job, in this order; further objects stand behind them."""
    hint = "End with return [service, job]."
    if not isinstance(value, list | tuple) or not all(isinstance(one, dict) for one in value):
        raise malformed(value, "a list of two dicts", hint)
    found = {one.get("kind"): one for one in reversed(value)}
    for wanted in ("Service", "Job"):
        if wanted not in found:
            kinds = ", ".join(str(one.get("kind")) for one in value) or "nothing"
            raise Wrong(f"the list holds {kinds}, and no {wanted}", "Both are needed.", hint)
    return copy.deepcopy([found["Service"], found["Job"]])


# ---- what the API server refuses ------------------------------------------------------------


def _of_schemas(manifest: list[dict]) -> Iterator[Fault]:
    """Names, types and fields that Kubernetes does not know."""
    try:
        published = importlib.import_module("kubernetes_validate")
    except ImportError:
        raise Wrong(
            "the package kubernetes-validate is missing, which holds Kubernetes' schemas",
            "This says nothing about your answer.",
            "Install it with `make install`, or with `pip install kubernetes-validate`.",
        ) from None
    for one in manifest:
        try:
            published.validate(one, VERSION, strict=True)
        except published.ValidationError as problem:
            place = ".".join(str(part) for part in problem.absolute_path) or "its top"
            yield (
                f"{one['kind']}, at {place}: {_short(problem.message)}",
                "The API server compares each object with its schema, and creates nothing that "
                "does not fit.",
                f"`kubectl explain {one['kind'].lower()}.spec` lists the fields and their types.",
            )
        except (published.SchemaNotFoundError, KeyError) as problem:
            said = getattr(problem, "message", f"{problem} is missing")
            yield f"{one['kind']}: {_short(said)}", "", "Keep apiVersion, kind and metadata."


def _short(message: str) -> str:
    return message if len(message) <= 160 else f"{message[:80]} ... {message[-75:]}"


def _of_the_server(manifest: list[dict]) -> Iterator[Fault]:
    """What no schema says, but the API server still refuses; and what it cannot know is wrong."""
    _, job = manifest
    pod = job["spec"]["template"]["spec"]
    policy = pod.get("restartPolicy", "Always")
    advice = 'Write restartPolicy: "Never" in the pod.'
    if policy not in ("Never", "OnFailure"):
        why = (
            "The API server refuses the Job: its pods have to end, and this policy would start a "
            "finished container again and again."
        )
        yield f"restartPolicy is {policy}", why, advice
    elif policy == "OnFailure":
        why = (
            "A container that fails is then started again in its old pod, on the node that may be "
            "the cause. The task asks for a new pod."
        )
        yield "restartPolicy is OnFailure", why, advice
    resources = pod["containers"][0].get("resources") or {}
    limit = (resources.get("limits") or {}).get(GPU)
    request = (resources.get("requests") or {}).get(GPU, limit)
    advice = f'Write limits: {{"{GPU}": {GPUS}}} in the resources.'
    if limit is None:
        why = "Without one the container sees no GPU."
        if request is not None:
            why = (
                "The API server refuses the pods: a GPU cannot be shared by requesting some and "
                "using more, so a request for GPUs needs a limit, and the two have to be equal."
            )
        yield "there is no limit for GPUs", why, advice
    elif str(limit) != str(request):
        why = "The API server refuses the pods: of GPUs a request and a limit have to be equal."
        yield f"{request} GPUs are requested, with a limit of {limit}", why, advice
    elif str(limit) != str(GPUS):
        yield f"each pod gets {limit} GPUs, not {GPUS}", "", advice
    for name in ("backoffLimit", "backoffLimitPerIndex"):
        if job["spec"].get(name) == 0:
            why = "No pod is replaced then, and the task asks for a new one."
            yield f"{name} is 0", why, f"Leave {name} out, or let it be above 0."
    yield from _of_shared_memory(pod)


def _of_shared_memory(pod: dict) -> Iterator[Fault]:
    volumes = {one["name"]: one.get("emptyDir") or {} for one in pod.get("volumes") or []}
    mounts = pod["containers"][0].get("volumeMounts") or []
    mounted = [one["name"] for one in mounts if one["mountPath"].rstrip("/") == "/dev/shm"]
    advice = 'Keep the volume {"medium": "Memory", "sizeLimit": "4Gi"} mounted at /dev/shm.'
    if not mounted:
        why = (
            "A container has 64 MB there, so workers of a data loader, which pass their batches "
            "through it, end with a bus error."
        )
        yield "nothing is mounted at /dev/shm", why, advice
    elif mounted[0] not in volumes:
        why = "The API server refuses a mount of a volume that the pod does not have."
        yield f"no volume is named {mounted[0]}", why, advice
    elif volumes[mounted[0]].get("medium") != "Memory":
        why = "It lies on the node's disk then, and every batch is written there."
        yield "the volume at /dev/shm is not backed by memory", why, advice
    elif _bytes_of(limit := volumes[mounted[0]].get("sizeLimit", SHARED)) < _bytes_of(SHARED):
        why = "Gi counts in powers of 1024, G in powers of 1000."
        yield f"the shared memory is {limit}, and 4 GiB are asked for", why, advice


def _bytes_of(quantity: object) -> float:
    """A quantity of Kubernetes, such as 4Gi, 500M or 1e9; none is endless."""
    found = re.fullmatch(r"([\d.]+(?:[eE]\d+)?)([kKMGTPE]?)(i?)", str(quantity))
    if found is None:
        return math.inf  # as the schema has let it pass
    power = " KMGTPE".index(found[2].upper() or " ")
    return float(found[1]) * (1024 if found[3] else 1000) ** power


# ---- what would run -------------------------------------------------------------------------


def _of_pods(manifest: list[dict]) -> Iterator[Fault]:
    """As many pods as nodes, at the same time; their numbers; their names; torchrun's words."""
    service, job = manifest
    spec = job["spec"]
    parallelism = spec.get("parallelism", 1)
    completions = spec.get("completions", parallelism)
    if completions != NODES:
        seen = f"the Job is complete after {completions} pod(s), not {NODES}"
        yield seen, "", f"Write completions: {NODES}."
    if parallelism != completions:
        why = (
            "Only so many run at the same time. The first waits for the others to meet it, and "
            "they start only after it has ended."
        )
        why = why if parallelism < completions else "The two have to be equal here."
        seen = f"parallelism is {parallelism}, with {completions} completions"
        yield seen, why, f"Write parallelism: {NODES}."
    mode = spec.get("completionMode", "NonIndexed")
    if mode not in ("Indexed", "NonIndexed"):
        why = "The API server refuses the Job: it knows the modes Indexed and NonIndexed."
        yield f"completionMode is {mode}", why, 'Write completionMode: "Indexed".'
        return
    if mode == "NonIndexed":
        why = (
            "All pods are alike then: none has a number, there is no JOB_COMPLETION_INDEX, and "
            "their names end in random letters, so that no pod can know that of the first."
        )
        yield "completionMode is NonIndexed, the default", why, 'Write completionMode: "Indexed".'
    yield from _of_names(service, job)
    if parallelism == completions == NODES and mode == "Indexed":
        yield from _of_torchrun(pods.pods_of(manifest))


def _of_names(service: dict, job: dict) -> Iterator[Fault]:
    """Does the Service give each pod a name of its own?"""
    name = service["metadata"]["name"]
    template = job["spec"]["template"]
    if service["spec"].get("clusterIP") != "None":
        why = (
            "The Service then has one virtual address, which leads to any of its pods, and the "
            "DNS has no names for single pods."
        )
        hint = 'Write clusterIP: "None", a text: the Service is then headless.'
        yield "the Service is not headless", why, hint
    own = template.get("metadata", {}).get("labels", {})
    given = {pods.JOB_NAME: job["metadata"]["name"], "job-name": job["metadata"]["name"]}
    if not pods.selects(service, own | given):
        selector = service["spec"].get("selector") or {}
        why = (
            f"The pods have the labels {_listed(own | given)}, so the Service leads to no pod and "
            "the DNS knows none of them."
        )
        hint = "Let the selector name a label that the pods have, or give them that label."
        yield f"the Service selects {_listed(selector) or 'nothing'}", why, hint
    subdomain = template["spec"].get("subdomain")
    if subdomain != name:
        said = f"the pods' subdomain is {subdomain}" if subdomain else "the pods have no subdomain"
        why = (
            "The DNS lists a pod by its own name only below the Service that the pod names as its "
            "subdomain."
        )
        yield said, why, f'Write subdomain: "{name}" beside restartPolicy.'


def _listed(labels: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def _words(pod: pods.Pod) -> list[str]:
    """The words of the command; of `bash -c "..."` those that the shell makes of the text."""
    words = pod.command
    if len(words) > 2 and words[0].endswith("sh") and words[1].endswith("c"):
        found = re.sub(r"\$\{?(\w+)\}?", lambda one: pod.environ.get(one[1], ""), words[2])
        words = shlex.split(found)
    return words[words.index("torchrun") :] if "torchrun" in words else []


def _flag(words: list[str], name: str, default: str) -> str:
    """The value of an option of torchrun, also with _ in place of - and after a space."""
    for number, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == f"--{name}":
            return value if equals else " ".join(words[number + 1 : number + 2])
    return default


def _of_torchrun(found: list[pods.Pod]) -> Iterator[Fault]:
    calls = [_words(pod) for pod in found]
    if not all(calls):
        yield "the pods do not start torchrun", "", "Keep the command of BROKEN."
        return
    for name, wanted in (("nnodes", (str(NODES),)), ("nproc-per-node", (str(GPUS), "gpu", "auto"))):
        value = _flag(calls[0], name, "1")
        if value not in wanted:
            yield f"--{name} is {value}", "", f"Write --{name}={wanted[0]}."
    is_static = _flag(calls[0], "rdzv-backend", "static") == "static"
    numbers = [_flag(words, "node-rank", "0") for words in calls]
    if is_static and sorted(numbers) != [str(number) for number in range(NODES)]:
        why = "Of every number from 0 there has to be one pod, or torchrun waits, or refuses."
        if not all(number.isdigit() for number in numbers):
            why = "A node rank is a whole number, which is the pod's index in the Job."
        hint = f"The index is JOB_COMPLETION_INDEX, and the field {INDEX_FIELD}."
        yield f"the node ranks are {' and '.join(numbers)}", why, hint
    host = _flag(calls[0], "master-addr", "127.0.0.1") if is_static else _endpoint(calls[0])
    known = [pod.dns for pod in found if pod.dns]
    if known and not _is_name_of(host, known[0]):
        why = f"In the DNS, pod 0 is {known[0]}."
        if "." not in host:
            why += " The short name is known only in that pod itself."
        yield f"torchrun is to meet at {host}", why, f"Write --master-addr={known[0]}."


def _endpoint(words: list[str]) -> str:
    return _flag(words, "rdzv-endpoint", "").partition(":")[0]


def _is_name_of(host: str, name: str) -> bool:
    """The name as it stands, or with as much of its end as people write."""
    whole = f"{name}.default.svc.cluster.local"
    return host in (name, f"{name}.default", f"{name}.default.svc", whole)


mended_job = Spec(
    todo="11.12",
    truth=pods.mended_job,
    cases=lambda: [()],
    observe=manifest_seen,
    tell=lambda case: "mended_job()",
    limit_s=20.0,  # the schemas are large files
    mistake_s=4.0,
    hints=(
        "Go through both objects from the top and ask of each pod: does it run together with the "
        "other, which number has it, and under which name is pod 0 found?",
        "Three faults hide the name ddp-0.ddp: what kind of Service has names for single pods, "
        "which labels does it select, and which field of a pod names its Service? Two others "
        "concern the number: the mode of the Job, and the field that NODE_RANK is taken from.",
        'A headless Service has clusterIP: "None". The Job is Indexed, with parallelism: 2, and '
        'its pods have subdomain: "ddp" and restartPolicy: "Never". GPUs need limits. '
        f"NODE_RANK comes from {INDEX_FIELD}.",
    ),
    mistakes="""
        service["spec"]["clusterIP"] = "None" => ... ::
            The Service has one virtual address for all its pods.
        service["spec"]["selector"] = {"app": "trainer"} => ... :: The Service leads to no pod.
        ["selector"] = {"app": "trainer"} => ["selector"] = {} ::
            A Service that selects nothing leads nowhere.
        job["spec"]["completionMode"] = "Indexed" => ... :: The pods have no numbers.
        "Indexed" => "indexed" :: Kubernetes knows no such mode.
        job["spec"]["parallelism"] = 2 => ... :: The pods run one after the other.
        pod["restartPolicy"] = "Never" => ... :: A Job refuses to start its pods for ever.
        pod["restartPolicy"] = "Never" => pod["restartPolicy"] = "OnFailure" ::
            The failed pod stays where it is.
        pod["subdomain"] = "ddp" => ... :: The pod does not say which Service lists it.
        pod["subdomain"] = "ddp" => job["spec"]["subdomain"] = "ddp" ::
            A Job has no such field: its pods have it.
        container["resources"]["limits"] = {"nvidia.com/gpu": 4} => ... ::
            GPUs are requested without a limit.
        {"nvidia.com/gpu": 4} => {"nvidia.com/gpu": 8} :: The limit is not what is requested.
        annotations['batch.kubernetes.io/job-completion-index'] => uid ::
            The pod's identity is no number.
    """,
    module=globals(),
)
