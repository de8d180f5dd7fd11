"""Processes: this rank's place in the job, its device, and joining and leaving the group.

    torchrun --nproc-per-node=2 script.py          (one agent per node, one process per GPU)
        |-- RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 --> place() -> World --> process_group(world)
        '-- RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 --> place() -> World --> process_group(world)

gloo joins CPU processes and NCCL joins GPUs; the code above them is the same. Without torchrun a
process is a world of one. Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from manyhands.ranks import peers, private, streams
from manyhands.ranks.failures import ECHOES, BadInput
from manyhands.ranks.rules import watching

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
HUNG_UP = 128 + signal.SIGHUP  # as a shell says that this signal has ended something
UNFINISHED = 75  # "try again", in sysexits.h
FINISHED = "finished"  # a file in the room of a job
END_WITH_PARENT = "MANYHANDS_END_WITH_PARENT"  # a process id
NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_last_groups: list[dist.ProcessGroup] = []  # what `distributed` joined last
private.meet_in_room()
peers.watch_groups()


@dataclass(frozen=True)
class World:
    """This process's place in the job."""

    rank: int  # 0 .. world_size-1, unique in the whole job
    local_rank: int  # 0 .. processes on this node - 1, unique on this node
    world_size: int  # processes in the job
    device: torch.device
    seed: int = 1  # the same on every rank

    @property
    def is_main(self) -> bool:
        """Is this rank 0, the one that prints and saves?"""
        return self.rank == 0

    @property
    def data_seed(self) -> int:
        """A seed that differs by rank, for what must differ: dropout and data augmentation."""
        return 1_000_003 * self.seed + self.rank + 1

    @property
    def backend(self) -> str:
        """The library that carries messages between the ranks."""
        if self.world_size == 1 and not dist.is_initialized():
            return "no process group"
        return "nccl" if self.device.type == "cuda" else "gloo"

    def print(self, *args: object) -> None:
        """Print on rank 0 only, so that a line is not repeated `world_size` times."""
        if self.is_main:
            print(*args, flush=True)


def place(environ: Mapping[str, str], num_gpus: int) -> World:
    """Read this process's place in the job from the variables that torchrun sets.

    Args:
        environ: holds RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE (processes on this node),
            all as text. A missing one has the value of a process that is alone: a rank is 0, a
            number of processes 1.
        num_gpus: GPUs of this node.

    Returns:
        The World. Its device is torch.device("cuda:<local rank>") when the node has a GPU for each
        of its own processes, else torch.device("cpu") for all of them, so that no two ranks share
        a GPU by accident.
    """
    local_rank = int(environ.get("LOCAL_RANK", 0))
    local_world_size = int(environ.get("LOCAL_WORLD_SIZE", 1))
    device = f"cuda:{local_rank}" if num_gpus >= local_world_size else "cpu"
    return World(
        rank=int(environ.get("RANK", 0)),
        local_rank=local_rank,
        world_size=int(environ.get("WORLD_SIZE", 1)),
        device=torch.device(device),
    )


@contextmanager
def process_group(world: World, timeout_s: float = 120) -> Iterator[None]:
    """Join the job's process group, and leave it at the end.

    Joins with NCCL when `world.device` is a GPU and gloo when it is a CPU, as rank `world.rank` of
    `world.world_size`, and waits for no message longer than `timeout_s` seconds (a timedelta). The
    meeting place comes from the variables MASTER_ADDR and MASTER_PORT, which torch reads. Leaves
    the group when the block ends, also when it raises: then the error appears at the `yield`.
    """
    dist.init_process_group(
        "nccl" if world.device.type == "cuda" else "gloo",
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def rendezvous_arguments(
    num_nodes: int, processes_per_node: int, head_node: str, job_id: int, is_head: bool
) -> list[str]:
    """The arguments that make `num_nodes` torchrun agents, one per node, start one job together.

    Args:
        processes_per_node: ranks that this node's agent starts; one per GPU.
        head_node: name or address of the node where the agents meet, the same on every node.
        job_id: any number that the scheduler gives each job, however large. Agents with the same
            number belong together, and the port follows from it, so that two jobs on one node do
            not collide: 20000 + (job_id % 10000).
        is_head: is this node the head node? It then holds the meeting place, even where the
            head's name in the network is not its own host name.
    """
    return [
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={processes_per_node}",
        f"--rdzv-id={job_id}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={head_node}:{20000 + job_id % 10000}",
        f"--rdzv-conf=is_host={int(is_head)}",
    ]


@contextmanager
def distributed(
    device: str = "auto",
    seed: int = 1,
    timeout_s: float = 120,
    place: Callable = place,
    process_group: Callable = process_group,
) -> Iterator[World]:
    """Join the job's process group and yield this rank's World; leave the group at the end.

    Every rank gets the same torch seed, so that all build the same model; after that, a script
    calls `torch.manual_seed(world.data_seed)`. Also works without torchrun, as a world of one.
    A learner's own `place` and `process_group` can take the place of the course's.

    Raises:
        BadInput: the environment or the device asked for cannot be used.
    """
    _prepare_environment()
    world = _on_device(replace(place(os.environ, torch.cuda.device_count()), seed=seed), device)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        torch.set_float32_matmul_precision("high")  # TF32, as on any GPU that trains today
    _sow(seed)
    try:
        with process_group(world, timeout_s):
            # A DDP model that outlives the block, in a traceback for example, would destroy the
            # group while it holds Python's lock, and wait for ever for a thread of gloo's that
            # needs the lock. What Python itself holds is destroyed without it.
            _last_groups[:] = [dist.group.WORLD]
            if world.device.type == "cpu":
                # A rank that ends at once, for a fault in its input, would break the connections
                # that gloo is still opening on the others, and each of them would log it.
                dist.barrier()
            world.print(_one_line(world))
            with watching(os.environ.get("MANYHANDS_RULES", "")):
                yield world
    except peers.Stranger as error:
        remedy = "start it again; where that happens, a container for each user keeps them apart"
        raise BadInput(f"{error}: {remedy}") from error
    except dist.DistNetworkError as error:
        raise BadInput(
            f"cannot meet the other ranks at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}: {first_line(error)}. Is the port in use? Choose another "
            "with MASTER_PORT"
        ) from error


def _prepare_environment() -> None:
    """See that a meeting place is set, and that this rank ends with its torchrun."""
    if "WORLD_SIZE" not in os.environ:
        refuse_copies(os.environ, has_ranks=True)
        # A world of one still needs a meeting place; with port 0 it is this process's memory.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        os.environ["GLOO_SOCKET_IFNAME"] = private.LOOPBACK
    elif missing := [name for name in NEEDED if name not in os.environ]:
        raise BadInput(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but {', '.join(missing)} is not set: start "
            "this script with torchrun, or unset WORLD_SIZE to run in one process"
        )
    if private.ROOM in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_caller(private.room())  # launch.py is
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def alone(device: str = "auto", seed: int = 1) -> World:
    """A world of one without a process group, seeded; for scripts that train in one process."""
    refuse_copies(os.environ, has_ranks=False)
    world = _on_device(replace(place({}, torch.cuda.device_count()), seed=seed), device)
    _sow(seed)
    world.print(_one_line(world))
    return world


def refuse_copies(environ: Mapping[str, str], has_ranks: bool) -> None:
    """Refuse to be one of several copies that srun started: each would train a world of its own.

    Args:
        environ: holds SLURM_STEP_ID, SLURM_STEP_NUM_TASKS and so on in a step of a Slurm job.
        has_ranks: can this script run on several ranks, once torchrun starts them?

    Raises:
        BadInput: in the step's first task.
        SystemExit: with code 2 in its others, which say nothing.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if "RANK" in environ or "SLURM_STEP_ID" not in environ or int(tasks) == 1:
        return
    if environ.get("SLURM_PROCID", "0") != "0":
        raise SystemExit(2)
    script = Path(sys.argv[0])
    job_file = script.parents[1] / "sbatch" / f"{script.stem.removeprefix('train_')}.sbatch"
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    ranks = int(tasks) // nodes
    given = shlex.join([str(script), *sys.argv[1:]])
    if not has_ranks:
        command = f"srun --ntasks=1 {sys.executable} {given}"
    elif nodes == 1:
        launcher = f"{sys.executable} {script.with_name('launch.py')}"
        command = f"RANKS={ranks} srun -n1 --cpus-per-task={ranks} {launcher} {given}"
    else:
        ours = f"RANKS={ranks} PYTHON={sys.executable}"
        command = f"{ours} sbatch --nodes={nodes} {shlex.join([str(job_file), *sys.argv[1:]])}"
    raise BadInput(
        f"srun started {tasks} copies of this script, and each would train alone, in the same "
        f"folder; the right command is: {command}"
    )


def _sow(seed: int) -> None:
    if not 0 <= seed < 2**31:  # so that every data_seed fits into 64 bits
        raise BadInput(f"--seed is {seed}: take a number from 0 to {2**31 - 1}")
    torch.manual_seed(seed)


def _on_device(world: World, device: str) -> World:
    """`world` on the device asked for: auto (GPUs where there are enough), cpu or cuda."""
    if device not in ("auto", "cpu", "cuda"):
        raise BadInput(f"--device is {device!r}: choose auto, cpu or cuda")
    if device == "cpu":
        return replace(world, device=torch.device("cpu"))
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and world.device.type != "cuda":
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        raise BadInput(
            f"--device cuda, but this node has {num_gpus} GPU(s) for {processes} process(es): "
            "start fewer processes, or take --device cpu"
        )
    if num_gpus and world.device.type == "cpu":
        world.print(f"this node has {num_gpus} GPU(s), fewer than its ranks: all ranks use the CPU")
    return world


def _one_line(world: World) -> str:
    threads = torch.get_num_threads()
    return (
        f"device: {world.world_size} rank(s) on {world.device.type}, {threads} thread(s) each, "
        f"backend: {world.backend}, torch {torch.__version__}"
        f"{', float32 matrix products in TF32' if world.device.type == 'cuda' else ''}"
    )


def together(work: Callable[[], object]) -> list:
    """Run `work` on every rank; each gets all values, by rank.

    Raises:
        BadInput: the same on every rank, when BadInput or OSError ended `work` on one of them.
    """
    value = error = None
    try:
        value = work()
    except (BadInput, OSError) as problem:
        error = str(problem)
    outcomes = [(value, error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        outcomes *= dist.get_world_size()
        dist.all_gather_object(outcomes, (value, error))
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise BadInput(errors[0])
    return [value for value, _ in outcomes]


def on_main(work: Callable[[], object]) -> object:
    """Run `work` on rank 0; every rank gets its value, or the same BadInput."""
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    return together(work if is_main else lambda: None)[0]


def stop_code(number: int) -> int:
    """The exit code of a run that a signal has stopped after it was saved, which is never 0.

    75 where SIGTERM or SIGUSR1 has asked for it; 129 after SIGHUP, which nobody means as a stop.
    """
    return HUNG_UP if number == signal.SIGHUP else UNFINISHED


class StopSignals:
    """Notes the signals that ask this process to stop, so that it can first save its work.

    A rank gets such a signal twice, from Slurm and from torchrun's agent, and at a time of its own.
    So after a stop they are noted until the process has ended: by default the second one would kill
    a rank at once, while the others wait for it. One that is ignored when the process starts, as
    nohup has SIGHUP ignored, is not noted.
    """

    def __init__(self) -> None:
        self.came = dict.fromkeys(STOP_SIGNALS, False)
        self.agreed = False  # True when all ranks stop, whichever of them it has reached so far
        self._old = {}
        came = self.came
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                old = signal.signal(number, lambda number, _: came.update({number: True}))
                # None: a handler set by C code, which is now lost.
                self._old[number] = old or signal.SIG_DFL

    @property
    def came_first(self) -> signal.Signals | None:
        """The first signal of STOP_SIGNALS that has come, if any."""
        return next((number for number, has_come in self.came.items() if has_come), None)

    def let_go(self) -> None:
        """Give the handlers back, unless this process is to stop: then the end is near."""
        if not self.agreed and not any(self.came.values()):
            for number, old in self._old.items():
                signal.signal(number, old)


def end_with_parent(
    room: Path | None = None, parent_ends: Callable[[], object] | None = None
) -> None:
    """End this process as soon as its parent is gone, however that ended.

    torchrun or a notebook kernel that is killed outright cannot take its ranks along; they would
    go on for hours, unseen.

    Args:
        room: the folder of the parent's job (private.py), which has to go with it.
        parent_ends: returns when the parent is gone; by default, when this process is adopted.
    """
    parent = os.getppid()

    def adopted() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)

    def watch() -> None:
        (parent_ends or adopted)()
        private.clear(room)
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)  # with everything this rank started
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def end_with_caller(room: Path | None = None) -> None:
    """End with the program that started this process for its own use: a notebook, or launch.py.

    It has put its process id into MANYHANDS_END_WITH_PARENT; a scheduler or a shell sets nothing.
    """
    if caller := os.environ.get(END_WITH_PARENT):
        if os.getppid() != int(caller):
            private.clear(room)
            os._exit(130)  # it has gone meanwhile; importing torch takes seconds
        end_with_parent(room)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done its work: a call returns before that. Nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the C++ part that torch adds."""
    return str(error).strip().split("\n")[0].split(" Exception raised from")[0]


def command_line(main: Callable, config_class: type) -> None:
    """Read the flags into `config_class`, call `main(config)`, and end with a tidy exit code.

    Exit codes: 0 done, 1 a fault of ours (with its traceback, or one line on a rank that only lost
    another one), 2 bad input (with one line on standard error, from the first rank that met it),
    75 stopped and saved, 129 stopped by SIGHUP, 130 interrupted.
    """
    import tyro

    streams.guard()
    config = tyro.cli(config_class, description=sys.modules[main.__module__].__doc__)
    if not sys.stderr.isatty():
        streams.copy()
    code = 0
    try:
        main(config)
    except SystemExit as stop:  # a run that was asked to stop
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        code = 130
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # else torchrun says so, once for all ranks
            print(f"{os.path.basename(sys.argv[0])}: interrupted before its end", file=sys.stderr)
    except Exception as error:
        told = _one_line_of(error)
        if told and _claim("bad input"):
            print(f"{os.path.basename(sys.argv[0])}: {told}", file=sys.stderr)
        # A rank that only lost its partner stays silent when the partner said what is wrong.
        code = 2 if told or _claimed("bad input") else 1
        if code == 1 and (echo := _echo_of(error)):
            print(f"{os.path.basename(sys.argv[0])}: {echo}", file=sys.stderr)
        elif code == 1:
            traceback.print_exc()
        traceback.clear_frames(error.__traceback__)  # ends the run that the frames still hold
    if code == 0 and (room := private.room()):
        with suppress(OSError):  # the job has ended before its rank
            (room / FINISHED).touch()  # an agent that stops its ranks is not told how they ended
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit can wait for ever for a process group that has lost a rank


def _one_line_of(error: Exception) -> str | None:
    """What to tell a person whose input or machine is at fault; None for a fault of the code."""
    if isinstance(error, BadInput):
        return str(error)
    # torch.save says RuntimeError when the disk is full, and keeps the reason behind it.
    cause = error.__context__ if isinstance(error, RuntimeError) else error
    if isinstance(cause, OSError) and cause.strerror:
        return f"{cause.strerror}: {cause.filename or 'a file of this run'}"
    return None


def _echo_of(error: Exception) -> str | None:
    """What to tell on a rank that fails only because another one is gone; None for other faults."""
    heard = [words for words in ECHOES if words in str(error)]
    if not heard or not isinstance(error, RuntimeError) or "RANK" not in os.environ:
        return None
    return f"rank {os.environ['RANK']} ends, since it has lost another rank ({heard[0].lower()})"


def _job_store() -> dist.Store | None:
    """A new connection to the store of this job's ranks, or None without torchrun."""
    # Without an agent the port may be another program's, which would never answer.
    if "TORCHELASTIC_RUN_ID" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        return None
    if private.STORE in os.environ:
        with suppress(dist.DistNetworkError):  # launch.py is gone, and the store with it
            return private.store()
        return None
    with suppress(dist.DistError, RuntimeError):  # the rank that held the store may be gone
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=2))
    return None


def _claim(what: str) -> bool:
    """True on the first rank of this start of the job that calls it."""
    store = _job_store()
    return store is None or store.add(_key(what), 1) == 1


def _claimed(what: str) -> bool:
    """Did some rank call `_claim`? Waits a moment, since errors travel faster than words."""
    if _job_store() is not None:
        time.sleep(0.5)
    store = _job_store()
    return store is not None and store.add(_key(what), 0) > 0


def _key(what: str) -> str:
    return f"manyhands/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{what}"
