"""Exercises 6.1, 6.2 and 6.7: what a process needs before it can train with others."""

import inspect
import os
import random
import re
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import Malformed, malformed
from manyhands.instruments.ledger import Ledger
from manyhands.ranks import runtime
from manyhands.ranks.runtime import World

# ---- 6.1 ------------------------------------------------------------------------------------

RANK = "RANK counts over the whole job, and LOCAL_RANK counts on this node only."
DEVICE = "The device is cuda:<LOCAL_RANK> where num_gpus >= LOCAL_WORLD_SIZE, else cpu."
ALONE = (
    "Without torchrun the variables are not set, and the process is rank 0 of 1.",
    "Give a default: environ.get('RANK', 0).",
)


def processes() -> list[Call]:
    """Alone, on one node, and on the second of two nodes that start unequal numbers."""
    here = random.randint(3, 4)  # processes on this node
    before = 2 * here + random.randint(1, here - 1)  # on the nodes before it, no multiple
    local = random.randint(1, here - 1)

    def started(rank: int, local_rank: int, world_size: int) -> dict[str, str]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        numbers = (rank, local_rank, world_size, here, "node0")
        return dict(zip(names, map(str, numbers), strict=True))

    one_node = started(local, local, here)
    first_here = started(before, 0, before + here)
    later_here = started(before + local, local, before + here)
    # One variable missing, as where another program than torchrun starts the processes.
    lacking = [{n: v for n, v in later_here.items() if n != name} for name in later_here]
    return [
        ({}, 0),
        ({}, 1),
        ({}, 8),
        (one_node, here),
        (started(0, 0, here), here - 1),
        (started(here - 1, here - 1, here), here - 1),
        (first_here, here + 1),
        (later_here, here),
        (later_here, 0),
        *[(some, here) for some in lacking],
    ]


def place_seen(answer, case: Call) -> World:
    """The answer, where the process's own environment holds other numbers, and no GPU is chosen."""
    other = {"RANK": "77", "LOCAL_RANK": "78", "WORLD_SIZE": "79", "LOCAL_WORLD_SIZE": "0"}
    with mock.patch.dict(os.environ, other), mock.patch.object(torch.cuda, "set_device"):
        return answer(case.environ, case.num_gpus)


def as_world(value: object) -> dict:
    """The four parts of a World, the device as a text."""
    if not isinstance(value, World):
        hint = "Return World(rank, local_rank, world_size, device)."
        raise malformed(value, "a World", hint)
    for name in ("rank", "local_rank", "world_size"):
        part = getattr(value, name)
        if type(part) is not int:
            why = "The variables hold text, and a World holds whole numbers."
            raise Malformed(f"a World whose {name} is {part!r}", why, "Use int(...).")
    if not isinstance(value.device, torch.device):
        why = "The device of a World is a torch.device."
        hint = "torch.device('cpu') is one; a text such as 'cpu' is none."
        raise Malformed(f"a World whose device is {value.device!r}", why, hint)
    parts = {name: getattr(value, name) for name in ("rank", "local_rank", "world_size")}
    return {**parts, "device": str(value.device)}


def say_process(case: Call) -> str:
    """A call of place in words."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    given = ", ".join(f"{name}={case.environ[name]}" for name in names if name in case.environ)
    return f"with {given or 'none of the variables'} and num_gpus={case.num_gpus}, place"


place = Spec(
    todo="6.1",
    truth=runtime.place,
    cases=processes,
    observe=place_seen,
    form=as_world,
    tell=say_process,
    independent=True,
    advice={"device": DEVICE, "": "Compare with the table of the four variables."},
    hints=(
        "The values in `environ` are text, and some may be missing. `int(environ.get('RANK', 0))` "
        "reads one.",
        "Two questions decide the device: how many GPUs does this node have, and how many "
        "processes share them?",
        "The device is torch.device(f'cuda:{local_rank}') when num_gpus >= LOCAL_WORLD_SIZE, and "
        "torch.device('cpu') otherwise.",
    ),
    mistakes=r"""
        environ.get("RANK", 0) => 0 ::
            The rank is 0 also where RANK says otherwise. | Look at the spelling of RANK.
        environ.get("RANK", 0) => environ.get("LOCAL_RANK", 0) ::
            The rank is the number on this node. | {RANK}
        environ.get("LOCAL_RANK", 0) => environ.get("RANK", 0) ::
            The local rank is the number in the whole job.
        int(environ.get("LOCAL_RANK", 0)) => int(environ.get("RANK", 0)) %
            int(environ.get("LOCAL_WORLD_SIZE", 1)) ::
            The local rank is the rank modulo LOCAL_WORLD_SIZE, which is right only where all nodes
            start equally many processes. | Read LOCAL_RANK.
        environ.get("WORLD_SIZE", 1) => environ.get("LOCAL_WORLD_SIZE", 1) ::
            The world size is the number of processes on this node. | Read WORLD_SIZE.
        local_rank = int( => environ = os.environ\n    local_rank = int( :: The numbers are those of
            os.environ, not those of `environ`. | Read every variable from the argument.
        cuda:{local_rank} => cuda:{environ.get('RANK', 0)} :: The GPU has the number of the rank in
            the whole job, and GPUs are counted on each node. | {DEVICE}
        cuda:{local_rank} => cuda:{int(environ.get('RANK', 0)) % max(num_gpus, 1)} ::
            The GPU has the number rank modulo num_gpus, which need not be free.
        cuda:{local_rank} => cuda ::
            The device names no GPU, so all processes of the node would share one.
        if num_gpus >= local_world_size => if num_gpus ::
            The device is a GPU although the node has fewer GPUs than processes.
        if num_gpus >= local_world_size => if local_rank < num_gpus :: Some processes of one node
            are on GPUs and others on the CPU, and these cannot send to each other.
        if num_gpus >= local_world_size => if num_gpus >= int(environ.get("WORLD_SIZE", 1)) ::
            The device is the CPU although this node has a GPU for each of its own processes.
        if num_gpus >= local_world_size => if num_gpus > local_world_size * bool(environ) ::
            The device is the CPU where num_gpus is just enough.
        if num_gpus >= local_world_size => if False :: The device is always the CPU.
        if num_gpus >= local_world_size => if True :: The device is a GPU on a node without GPUs.
    """,
    reasons={
        f"KeyError: '{name}'": ALONE
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    },
    module=globals(),
)

# ---- 6.2 ------------------------------------------------------------------------------------

FINALLY = "finally:\n        dist.destroy_process_group()"
WHOLE = f"try:\n        yield\n    {FINALLY}"
LEAVE = "dist.destroy_process_group()"
SWALLOWED = "An error in the block does not come out of it: something swallows it."
EXCEPT = f"""try:
        yield
    except Exception:
        {LEAVE}
        raise
    else:
        {LEAVE}"""
LEAVES = "try: yield, finally: dist.destroy_process_group()."
BACKEND = '"nccl" if world.device.type == "cuda" else "gloo"'
LIMIT = "timeout=timedelta(seconds=timeout_s)"


class Join(NamedTuple):
    """One `with process_group(world, timeout_s):`, and the error that its block raises."""

    world: World
    timeout_s: float | None = None  # None: not given
    error: type[BaseException] | None = None


def joins() -> list[Join]:
    """On CPUs and GPUs, with and without an error, and with Stop, which is no Exception."""
    size = random.randint(5, 9)
    last = World(size - 1, 1, size, torch.device("cuda:1"))
    alone = World(0, 0, 1, torch.device("cpu"))
    return [
        Join(alone),
        Join(World(1, 0, 3, torch.device("cpu")), 30),
        Join(last, random.randint(1000, 5000)),
        Join(last, 2.5),
        Join(alone, 5, ArithmeticError),
        Join(World(2, 2, 4, torch.device("cpu")), 40, KeyboardInterrupt),
    ]


def joined(answer, case: Join) -> dict:
    """What is asked of torch, and what holds in the block and after it.

    The group is torch's fake one: its messages go nowhere, and it needs no partners and no GPU.
    """
    asked: list[dict] = []
    real_init = dist.init_process_group
    signature = inspect.signature(real_init)

    def init(*args: object, **named: object) -> None:
        given = signature.bind(*args, **named)
        given.apply_defaults()
        at_hand = {name: os.environ.get(name) for name in meeting}
        for name in ("rank", "world_size"):
            given.arguments[name] = _given(given.arguments[name], name.upper())
        asked.append(given.arguments | {"meets as it was told": at_hand == meeting})
        rank, size = case.world.rank, case.world.world_size
        real_init("fake", rank=rank, world_size=size, store=FakeStore())

    numbers = {"RANK": str(case.world.rank), "WORLD_SIZE": str(case.world.world_size)}
    meeting = {"MASTER_ADDR": "node7", "MASTER_PORT": str(random.randint(20_000, 29_000))}
    options = {} if case.timeout_s is None else {"timeout_s": case.timeout_s}
    with (
        mock.patch.dict(os.environ, numbers | meeting),
        mock.patch.object(dist, "init_process_group", init),
        mock.patch.object(torch.cuda, "set_device"),
        Ledger() as ledger,
    ):
        seen = {}
        if case.world.world_size == 1:  # where a process is alone, nobody has set these
            for name in numbers:
                os.environ.pop(name, None)
        try:
            manager = answer(case.world, **options)
            if not hasattr(manager, "__enter__"):
                hint = "Keep @contextmanager above the function, and yield once."
                raise malformed(manager, "something that can stand in a `with`", hint)
            seen = _in_the_block(manager, case.error, ledger)
        finally:
            left = not dist.is_initialized()
            if not left:
                dist.destroy_process_group()
    return {
        "how often init_process_group is called": len(asked),
        **(_asked_for(asked[-1], case.world) if asked else {}),
        **seen,
        "the process is out of the group after the block": left,
    }


def _in_the_block(manager, error: type[BaseException] | None, ledger: Ledger) -> dict:
    came_out = None
    inside = False
    num_messages = 0
    try:
        with manager:
            inside = dist.is_initialized()
            if error:
                num_messages = len(ledger.entries)
                raise error("from the block")
    except (ArithmeticError, KeyboardInterrupt) as raised:
        came_out = type(raised)
    return {
        "the process is in the group while the block runs": inside,
        "an error in the block comes out of it": came_out is error,
        "nothing is sent once the block has raised": (
            not error or len(ledger.entries) == num_messages
        ),
    }


def _asked_for(given: dict, world: World) -> dict:
    """The arguments of init_process_group; what torch reads from the environment filled in."""
    backend = str(given["backend"] or "").lower()
    kinds = dict(part.split(":") for part in backend.split(",") if ":" in part)
    right = "nccl" if world.device.type == "cuda" else "gloo"
    limit = given["timeout"]
    if limit is not None and not isinstance(limit, timedelta):
        why = "The timeout is a timedelta: a number does not say its unit."
        raise Malformed(f"init_process_group(timeout={limit!r})", why, LIMIT)
    method = given["init_method"]
    return {
        "backend": kinds.get(world.device.type, backend) or right,
        "rank": given["rank"],
        "world_size": given["world_size"],
        "timeout in seconds": limit.total_seconds() if limit is not None else None,
        "init_method": "env://" if method is None else method,
        "MASTER_ADDR and MASTER_PORT stay as they were": given["meets as it was told"],
    }


def _given(number: int, name: str) -> int:
    """What torch reads where it is told -1."""
    return int(os.environ.get(name, -1)) if number == -1 else number


def say_join(case: Join) -> str:
    """A call of process_group in words."""
    given = "" if case.timeout_s is None else f", timeout_s={case.timeout_s}"
    world = case.world
    where = f"rank {world.rank} of {world.world_size}, local rank {world.local_rank}"
    raises = f" whose block raises {case.error.__name__}" if case.error else ""
    return f"process_group(world of {where} on {world.device}{given}){raises}"


process_group = Spec(
    todo="6.2",
    truth=runtime.process_group,
    cases=joins,
    observe=joined,
    tell=say_join,
    independent=True,
    advice={
        "backend": f"The backend is {BACKEND}.",
        "timeout in seconds": f"Pass {LIMIT}.",
        "init_method": "Leave init_method out: torch reads MASTER_ADDR and MASTER_PORT.",
        "MASTER_ADDR and MASTER_PORT stay as they were": (
            "They name the job's meeting place, which is the same on all nodes: only read them."
        ),
        "how often init_process_group is called": "Join once, also where the process is alone.",
        "": LEAVES,
    },
    hints=(
        "There are three parts: dist.init_process_group(...), `yield`, and "
        "dist.destroy_process_group().",
        "The part after `yield` has to run when the block raises, too: that is what try ... "
        "finally is for.",
        "The backend is 'nccl' if world.device.type == 'cuda' else 'gloo', and the timeout is a "
        "timedelta(seconds=timeout_s).",
    ),
    mistakes=r"""
        {BACKEND} => "gloo" :: The backend is gloo also for a GPU, and gloo moves GPU data through
            the CPU. | The backend is {BACKEND}.
        {BACKEND} => "nccl" :: The backend is NCCL also for a CPU, and NCCL joins only GPUs.
        rank=world.rank => rank=world.local_rank ::
            The process joins with its number on the node, and that is not unique in the job. | Pass
            rank=world.rank and world_size=world.world_size.
        {LIMIT}, => :: No limit is passed on, so a lost partner is noticed only after torch's 10 or
            30 minutes. | Pass {LIMIT}.
        {LIMIT} => timeout=timedelta(minutes=timeout_s) :: The limit is counted in minutes.
        {LIMIT} => timeout=timedelta(seconds=int(timeout_s)) ::
            A part of a second is cut off from the limit.
        {FINALLY} => {FINALLY}\n        return ::
            {SWALLOWED} | Use try ... finally, with no except and no return.
        {FINALLY} => except Exception:\n        pass\n    {FINALLY} :: {SWALLOWED}
        {WHOLE} => yield\n    dist.destroy_process_group() ::
            When the block raises, the process stays in the group. | {LEAVES}
        {WHOLE} => yield :: After the block the process is still in the group.
        {WHOLE} => {EXCEPT} :: When the block ends by an interrupt, which is no Exception, the
            process stays in the group.
        {WHOLE} => dist.destroy_process_group()\n    yield ::
            The process has left the group before the block runs.
        {FINALLY} => finally:\n        dist.barrier()\n        dist.destroy_process_group() ::
            When the block raises, the process first waits for ranks that may never come. | Leave
            the group without a barrier, or wait only where nothing was raised.
    """,
    module=globals(),
)

# ---- 6.7 ------------------------------------------------------------------------------------

NAMES = ("nnodes", "nproc-per-node", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "rdzv-conf")
YES = ("1", "true", "t", "yes", "y")
NO = ("0", "false", "f", "no", "n")
PORT = "The port is 20000 + job_id % 10000."
HEAD = "Pass --rdzv-conf=is_host=1 on the head node and is_host=0 on the others."


def agents() -> list[Call]:
    """Heads and others; small job ids, multiples of 10000, and ids of any length."""
    job_id = random.randint(5_001, 9_999)
    far = (2 * random.randint(10**8, 10**9) + 1) * 10_000 + random.randint(1, 9_999)
    return [
        (2, 4, "node17", job_id, True),
        (2, 4, "node17", job_id, False),
        (1, 3, "10.0.0.7", 0, True),
        (12, 8, "gpu-07.site", 10_000 * random.randint(2, 90), False),
        (3, 1, "node17", far, False),
    ]


def as_options(value: object) -> dict:
    """The six arguments by name, from --nnodes=3, --nnodes 3, --rdzv_id 7."""
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise malformed(value, "a list of texts")
    options: dict[str, str] = {}
    name = ""
    for word in value:
        if not word.startswith("--") and not name:
            why = "The list holds the six arguments and nothing else."
            raise Malformed(f"a list with {word!r}", why, "Leave out the program and its script.")
        if re.search(r"\s", word.strip()):
            why = "One entry holds several words, and torchrun would take them for one."
            raise Malformed(f"the entry {word!r}", why, "Join name and value with =.")
        if not word.startswith("--"):
            options[name], name = word, ""
            continue
        name, is_whole, text = word[2:].partition("=")
        name = name.replace("_", "-")
        options[name] = text
        name = "" if is_whole else name
    return _by_name(options)


def _by_name(options: dict[str, str]) -> dict:
    found: dict = {f"--{name}": options.get(name) for name in NAMES if name != "rdzv-conf"}
    low, _, high = str(found["--nnodes"]).partition(":")
    if low == high:  # 3:3 is 3
        found["--nnodes"] = low
    endpoint = found.pop("--rdzv-endpoint")
    host, colon, port = (endpoint or "").rpartition(":")
    found["the host of --rdzv-endpoint"] = host if colon else endpoint
    found["the port of --rdzv-endpoint"] = port if colon else None
    settings = [part.partition("=") for part in options.get("rdzv-conf", "").split(",")]
    is_host = {name.strip(): value.strip().lower() for name, _, value in settings}.get("is_host")
    known = {**dict.fromkeys(YES, "1"), **dict.fromkeys(NO, "0")}
    found["is_host in --rdzv-conf"] = known.get(is_host, is_host)
    found["other arguments"] = [f"--{name}" for name in options if name not in NAMES]
    return found


def same_options(found: dict, wanted: dict, case: Call) -> bool:
    """An id may hold more than the job's number."""
    numbers = re.findall(r"\d+", found["--rdzv-id"] or "")
    named = {**found, "--rdzv-id": str(case.job_id)} if str(case.job_id) in numbers else found
    return named == wanted


rendezvous_arguments = Spec(
    todo="6.7",
    truth=runtime.rendezvous_arguments,
    cases=agents,
    form=as_options,
    same=same_options,
    independent=True,
    advice={
        "the host of --rdzv-endpoint": "--rdzv-endpoint=<head_node>:<port>",
        "the port of --rdzv-endpoint": PORT,
        "is_host in --rdzv-conf": HEAD,
        "": "Compare with the six arguments that the docstring tells; each is given once.",
    },
    hints=(
        "There are six arguments: --nnodes, --nproc-per-node, --rdzv-id, --rdzv-backend, "
        "--rdzv-endpoint and --rdzv-conf. `torchrun --help` explains each.",
        "The endpoint is the same on all nodes: f'{head_node}:{port}', with a port that follows "
        "from the job id.",
        "20000 + job_id % 10000 stays below 65536 however large the job id is. The last argument "
        "is --rdzv-conf=is_host=1 on the head node and is_host=0 on the others.",
    ),
    mistakes="""
        node={processes_per_node} => node={num_nodes * processes_per_node} ::
            --nproc-per-node is the number of all processes, and an agent starts those of its own
            node only. | --nproc-per-node=<processes_per_node>
        f"--nnodes={num_nodes}", => ::
            Without --nnodes torchrun starts a job of one node on every node. | --nnodes=<num_nodes>
        --nnodes={num_nodes} => --nnodes=1:{num_nodes} ::
            The job may start with fewer nodes than it was given.
        --rdzv-id={job_id} => --rdzv-id={job_id + is_head} ::
            Head and other nodes have different ids, so they wait for each other until the limit. |
            --rdzv-id=<job_id>, which all nodes know.
        --rdzv-backend=c10d => --rdzv-backend=static ::
            The backend is not c10d. | --rdzv-backend=c10d
        endpoint={head_node}: => endpoint=localhost: ::
            `localhost` is a different machine on every node. | --rdzv-endpoint=<head_node>:<port>
        {20000 + job_id % 10000} => 29500 ::
            All jobs use one port, so two jobs on one node would collide. | {PORT}
        20000 + job_id % 10000 => 20000 + job_id ::
            The port grows with the job id, and ports end at 65535.
        20000 + job_id % 10000 => 20000 + job_id % 20000 ::
            The port can be above 32767, where Linux takes ports for outgoing connections.
        20000 + job_id % 10000 => job_id % 10000 ::
            The port may be below 1024, and such ports are not for users.
        is_host={int(is_head)} => is_host=1 :: Every node believes that it is the host. | {HEAD}
        is_host={int(is_head)} => is_host={int(not is_head)} ::
            Head and other nodes have changed places.
        f"--rdzv-conf=is_host={int(is_head)}", => ::
            --rdzv-conf does not say which node is the host.
    """,
    module=globals(),
)
