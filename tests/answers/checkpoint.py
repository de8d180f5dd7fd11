"""Answers to lesson 11: RIGHT ones differ in shape from the course's own; WRONG ones are no slip of
it, and come with words that the verdict must hold."""

import copy
import math
import os
import tempfile
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict as torchs
from torch.utils._pytree import tree_map

from manyhands.checkpoint import dcp, pods, state
from manyhands.checkpoint.asynchronous import AsyncSaver, Background
from manyhands.checkpoint.interval import Spent
from manyhands.checks.engine.answer import Pair
from manyhands.saving import kept, pieces, sharded, store

RIGHT: dict[str, list] = defaultdict(list)
WRONG: dict[str, list] = defaultdict(list)


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words=""):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 11.2 TrainingState -----------------------------------------------------------------------

PARTS = {  # names of what has a state_dict() of its own
    "model": "model",
    "optimizers": "optimizer",
    "schedulers": "scheduler",
    "algorithms": "average",
    "scaler": "scaler",
    "dataset_state": "position",
}
PLAIN = {
    "timestamp": "timestamp",
    "train_metrics": "train_metrics",
    "eval_metrics": "eval_metrics",
    "run_name": "name",
}


@right("11.2")
class StateByTables(state.TrainingState):
    def state_dict(self):
        run = self.run
        found = {name: getattr(run, own).state_dict() for name, own in PARTS.items()}
        found |= {name: getattr(run, own) for name, own in PLAIN.items()}
        found["callbacks"] = [run.patience.best, run.patience.waits]
        found["rank_zero_seed"] = run.position.seed
        found["ranks"] = {self.rank: torch.get_rng_state()}
        return copy.deepcopy(found)

    def load_state_dict(self, given):
        run = self.run
        own = copy.deepcopy(given)
        torch.set_rng_state(own["ranks"].get(self.rank, torch.get_rng_state()))
        for name, part in PARTS.items():
            getattr(run, part).load_state_dict(own[name])
        for name, part in PLAIN.items():
            setattr(run, part, own[name])
        run.patience.best, run.patience.waits = own["callbacks"]
        run.position.seed = own["rank_zero_seed"]


@right("11.2")
class StateByTree(StateByTables):
    def state_dict(self):
        live = state.TrainingState(self.run).state_dict()
        live["callbacks"] = [self.run.patience.best, self.run.patience.waits]
        live["optimizers"], live["schedulers"] = live["optimizers"][0], live["schedulers"][0]
        live["algorithms"] = live["algorithms"]["average"]
        live["ranks"] = {name: own["random"] for name, own in live["ranks"].items()}
        return tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, live)


@wrong("11.2", "Every step after loading begins with the same random numbers")
class RandomInEveryStep(state.TrainingState):
    def load_state_dict(self, given):
        super().load_state_dict(given)
        random = torch.get_rng_state()
        self.run.model.register_forward_pre_hook(lambda *_: torch.set_rng_state(random))


@wrong("11.2", "torch.load(..., weights_only=True) cannot read")
class StateOfObjects(state.TrainingState):
    def state_dict(self):
        return super().state_dict() | {"callbacks": {"patience": self.run.patience}}


@wrong("11.2", "random numbers stay where they are")
class StateOfAnyRank(state.TrainingState):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        for random in state["ranks"].values():
            torch.set_rng_state(random["random"])


@wrong("11.2", "gives the weights")
class CopyOfTheOuterDict(state.TrainingState):
    def state_dict(self):
        return super().state_dict() | {"model": dict(self.run.model.state_dict())}


@wrong("11.2", "the random numbers")
class RandomFirst(state.TrainingState):
    def load_state_dict(self, given):
        super().load_state_dict(given)
        for layer in copy.deepcopy(self.run.model):  # to be sure that all is initialised
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()


@wrong("11.2", "KeyError")
class OnlyForTheSameRanks(state.TrainingState):
    def load_state_dict(self, given):
        torch.set_rng_state(given["ranks"][self.rank]["random"])
        super().load_state_dict(given)


# ---- 11.1 Position ----------------------------------------------------------------------------


@right("11.1")
class PositionFromOneNumber(state.Position):
    def __iter__(self):
        for place, index in enumerate(self.order()):
            if place >= self.position:
                yield index

    def advance(self, num_samples):
        samples = self.epoch * self.num_samples + self.position + num_samples
        self.epoch, self.position = divmod(samples, self.num_samples)

    def load_state_dict(self, given):
        vars(self).update(given)


@right("11.1")
class PositionOfItsOwn(state.Position):
    def advance(self, num_samples):
        self.position += num_samples
        if self.position == self.num_samples:
            self.position, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return dict(epoch=self.epoch, position=self.position)


@wrong("11.1", "the state after loading")
class PositionThatDiscards(state.Position):
    """Loads and discards: it is at the right sample, and its own count is not."""

    skip = 0

    def __iter__(self):
        return iter(self.order()[self.position + self.skip :])

    def load_state_dict(self, given):
        self.epoch, self.position, self.skip = given["epoch"], 0, given["position"]


@wrong("11.1", "a tuple")
class PositionAsATuple(state.Position):
    def state_dict(self):
        return self.epoch, self.position


# ---- 11.8 AppState ---------------------------------------------------------------------------


@right("11.8")
class AppOfFourCalls(dcp.AppState):
    """Model and optimizer each by a call of its own."""

    def state_dict(self):
        return {
            "progress": dict(self.progress.state_dict()),
            "optimizer": torchs.get_optimizer_state_dict(self.model, self.optimizer),
            "model": torchs.get_model_state_dict(self.model),
        }

    def load_state_dict(self, given):
        self.progress.load_state_dict(given["progress"])
        torchs.set_model_state_dict(self.model, given["model"])
        torchs.set_optimizer_state_dict(self.model, self.optimizer, given["optimizer"])


@right("11.8")
class AppByHand(dcp.AppState):
    """The module inside the wrapper, and an optimizer that is filled before it is asked."""

    def state_dict(self):
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not self.optimizer.state[param]:
                    self.optimizer.state[param] = kept.first_state(self.optimizer, param)
        inner = getattr(self.model, "module", self.model)
        parts = {"model": inner, "optimizer": self.optimizer, "progress": self.progress}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, given):
        getattr(self.model, "module", self.model).load_state_dict(given["model"])
        for name in ("optimizer", "progress"):
            getattr(self, name).load_state_dict(given[name])


@wrong("11.8", "is not subscriptable")
class AppWithAnObject(dcp.AppState):
    def state_dict(self):
        return super().state_dict() | {"progress": self.progress}


@wrong("11.8", "The place in the data is not given back")
class AppWithAnotherObject(AppWithAnObject):
    """The numbers come back in an object of which the training knows nothing."""

    def load_state_dict(self, given):
        super().load_state_dict(given | {"progress": self.progress.state_dict()})
        self.progress = given["progress"]


@wrong("11.8", "The optimizer has no state before its first step")
class AppThatStepsWithoutGradients(dcp.AppState):
    """A step in which no parameter has a gradient makes no state."""

    def state_dict(self):
        self.optimizer.step()
        return {"model": torchs.get_model_state_dict(self.model)} | {
            name: getattr(self, name).state_dict() for name in ("optimizer", "progress")
        }

    def load_state_dict(self, given):
        torchs.set_model_state_dict(self.model, given["model"])
        self.optimizer.load_state_dict(given["optimizer"])
        self.progress.load_state_dict(given["progress"])


@wrong("11.8", "has no attribute 'module'")
class AppOfDdpOnly(dcp.AppState):
    def state_dict(self):
        return super().state_dict() | {"model": self.model.module.state_dict()}


# ---- 11.9 young_daly and best_interval --------------------------------------------------------


def daly_by_shares(save_s, mtbf_s):
    share = save_s / mtbf_s  # of the time between two failures
    if share >= 2:
        return float(mtbf_s)
    half = share / 2
    terms = [half ** (power / 2) / 3**power for power in range(3)]
    return mtbf_s * ((2 * share) ** 0.5 * sum(terms) - share)


def steps_by_counting(save_s, node_mtbf_s, num_nodes, step_s):
    failures_per_s = num_nodes / node_mtbf_s
    steps = math.floor(daly_by_shares(save_s, 1 / failures_per_s) / step_s + 0.5)
    return 1 if steps == 0 else steps


def daly_in_tensors(save_s, mtbf_s):
    save, mtbf = torch.tensor([save_s, mtbf_s], dtype=torch.float64)
    x = (save / mtbf / 2).sqrt()
    series = (2 * save * mtbf).sqrt() * (1 + x / 3 + x * x / 9) - save
    return torch.where(save < 2 * mtbf, series, mtbf)


def steps_in_tensors(save_s, node_mtbf_s, num_nodes, step_s):
    steps = daly_in_tensors(save_s, node_mtbf_s / num_nodes) / step_s
    return steps.round().long().clamp(min=1)


def steps_as_a_float(save_s, node_mtbf_s, num_nodes, step_s):
    return max(1.0, steps_by_counting(save_s, node_mtbf_s, num_nodes, step_s) / 1)


def steps_with_the_save(save_s, node_mtbf_s, num_nodes, step_s):
    seconds = daly_by_shares(save_s, node_mtbf_s / num_nodes)
    return max(1, round((seconds + save_s) / (step_s + save_s)))


RIGHT["11.9"] += [Pair(daly_by_shares, steps_by_counting), Pair(daly_in_tensors, steps_in_tensors)]
WRONG["11.9"] += [
    (Pair(daly_by_shares, steps_as_a_float), "The exercise asks for a whole number"),
    (Pair(daly_by_shares, steps_with_the_save), "best_interval: "),
    (Pair(daly_by_shares, daly_by_shares), "takes 2 positional arguments"),
]


# ---- 11.10 account -----------------------------------------------------------------------------


@right("11.10")
def account_backwards(events):
    """From the end, the first step seen of each number below what a resume has cut is kept."""
    spent = dict.fromkeys(("useful", "saving", "again", "restarting"), 0.0)
    limit = math.inf  # steps above it are lost to a later resume
    for at in range(len(events) - 1, 0, -1):
        before, (kind, step, time_s) = events[at - 1], events[at]
        if kind == "step":
            name = "useful" if step <= limit else "again"
        elif kind == "saved":
            name = "saving"
        else:
            is_down = kind == "resumed" or before.kind == "killed"
            name = "restarting" if is_down else "again"
        spent[name] += time_s - before.time_s
        limit = min(limit, step) if kind == "resumed" else limit
    return spent


@right("11.10")
def account_by_lives(events):
    times = {}  # step -> seconds in the history that counts
    lost = saving = restarting = 0.0
    is_down = False
    for number, event in enumerate(events[1:], 1):
        seconds = event.time_s - events[number - 1].time_s
        match event.kind:
            case "step":
                times[event.step] = seconds
            case "saved":
                saving += seconds
            case "resumed":
                restarting += seconds
                for step in [step for step in times if step > event.step]:
                    lost += times.pop(step)
                is_down = False
            case "killed" if is_down:
                restarting += seconds
            case "killed":
                lost += seconds
                is_down = True
    return Spent(math.fsum(times.values()), saving, lost, restarting)


@wrong("11.10", "add up to")
def account_of_the_last_life(events):
    begin = max(at for at, event in enumerate(events) if event.kind == "resumed")
    return account_by_lives(events[begin:])


@wrong("11.10", "without 'again'")
def account_of_two(events):
    found = account_by_lives(events)
    return {"useful": found.useful, "saving": found.saving, "restarting": found.restarting}


@wrong("11.10", "useful: ")
def account_in_shares(events):
    found = account_by_lives(events)
    return Spent(*(seconds / sum(found) for seconds in found))


# ---- 11.12 mended_job --------------------------------------------------------------------------


@right("11.12")
def manifest_written_anew():
    name = "ddp"
    labels = {"team": "vision", "run": name}
    shell = "exec torchrun --nnodes 2 --nproc_per_node gpu --node_rank $JOB_COMPLETION_INDEX "
    shell += "--master_addr ddp-0.ddp.default.svc.cluster.local train.py"
    container = {
        "name": "ranks",
        "image": "registry.example.org/other:2",
        "command": ["bash", "-c", shell],
        "resources": {"limits": {"nvidia.com/gpu": "4", "memory": "64Gi"}},
        "volumeMounts": [{"name": "memory", "mountPath": "/dev/shm/"}],
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
        "containers": [container],
    }
    job = {
        "kind": "Job",
        "apiVersion": "batch/v1",
        "metadata": {"name": name},
        "spec": {"completionMode": "Indexed", "completions": 2, "parallelism": 2}
        | {"template": {"metadata": {"labels": labels}, "spec": pod}},
    }
    service = {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": {"run": name}},
    }
    return (job, service)


@right("11.12")
def manifest_with_the_job_s_own_label():
    service, job = copy.deepcopy(pods.BROKEN)
    service["spec"] = {"clusterIP": "None", "selector": {pods.JOB_NAME: "ddp"}}
    job["spec"] |= {"completionMode": "Indexed", "parallelism": 2, "backoffLimitPerIndex": 3}
    pod = job["spec"]["template"]["spec"]
    pod |= {"restartPolicy": "Never", "subdomain": "ddp"}
    (container,) = pod["containers"]
    container["resources"] = {"limits": {"nvidia.com/gpu": 4}}
    container["env"] = [{"name": "NODES", "value": "2"}]
    container["command"] = ["torchrun", "--nnodes=$(NODES)"]
    container["args"] = ["--nproc-per-node=4", "--rdzv-backend=c10d", "train.py"]
    container["args"].insert(1, "--rdzv-endpoint=ddp-0.ddp")
    return [service, job]


def container_of(manifest):
    return manifest[1]["spec"]["template"]["spec"]["containers"][0]


WRONG["11.12"] += [
    (lambda: pods.BROKEN, "restartPolicy is Always (at least 7 faults are left"),
    (lambda: pods.mended_job()[1:], "the list holds Job, and no Service"),
]


@wrong("11.12", "8 GPUs are requested, with a limit of 4")
def manifest_with_the_gpus_of_all_pods():
    found = pods.mended_job()
    container_of(found)["resources"]["requests"]["nvidia.com/gpu"] = 8
    return found


@wrong("11.12", "nothing is mounted at /dev/shm")
def manifest_without_shared_memory():
    found = pods.mended_job()
    del container_of(found)["volumeMounts"]
    return found


@wrong("11.12", "torchrun is to meet at ddp-0 - In the DNS, pod 0 is ddp-0.ddp.")
def manifest_with_the_short_name():
    found = pods.mended_job()
    command = container_of(found)["command"]
    command[4] = command[4].removesuffix(".ddp")
    return found


@wrong("11.12", "Additional properties are not allowed ('completionmode' was unexpected)")
def manifest_in_small_letters():
    found = pods.mended_job()
    found[1]["spec"]["completionmode"] = found[1]["spec"].pop("completionMode")
    return found


# ---- 11.11 ----------------------------------------------------------------------------------


@right("11.11")
def samples_by_index(step, rank, world_size, num_samples, batch, seed=0):
    per_epoch = num_samples // batch
    generator = torch.Generator()
    generator.manual_seed(seed + step // per_epoch)
    order = torch.randperm(num_samples, generator=generator)
    start = step % per_epoch * batch
    return [int(order[start + place]) for place in range(rank, batch, world_size)]


@right("11.11")
def samples_of_all_ranks(step, rank, world_size, num_samples, batch, seed=0):
    epoch = step // (num_samples // batch)
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))
    steps = order[: num_samples // batch * batch].view(-1, batch)
    shares = [[] for _ in range(world_size)]
    for place, sample in enumerate(steps[step % len(steps)].tolist()):
        shares[place % world_size].append(sample)
    return shares[rank]


@wrong("11.11")
def samples_from_the_last(step, rank, world_size, num_samples, batch, seed=0):
    found = samples_by_index(step, rank, world_size, num_samples, batch, seed)
    return found[::-1]


# ---- 11.3 write_whole -------------------------------------------------------------------------


@right("11.3")
def whole_by_rename(path, fill):
    path = Path(path)
    second = path.with_name(path.name + ".new")
    try:
        with second.open("wb", buffering=0) as file:
            made = fill(file)
            os.fsync(file)
    except BaseException:
        second.unlink()
        raise
    second.rename(path)
    store.sync_folder(path.parent)
    return made


@right("11.3")
def whole_by_temporary_file(path, fill):
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
        try:
            made = fill(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.remove(file.name)
            raise
    store.sync_folder(os.path.dirname(path))
    return made


# ---- 11.5 overlap -----------------------------------------------------------------------------


@right("11.5")
def overlap_by_loops(first, second):
    starts, sizes = [], []
    for dim in range(len(first.offset)):
        start = max(first.offset[dim], second.offset[dim])
        ends = [one.offset[dim] + one.size[dim] for one in (first, second)]
        if min(ends) <= start:
            return None
        starts.append(start)
        sizes.append(min(ends) - start)
    return pieces.Box(tuple(starts), tuple(sizes))


@right("11.5")
def overlap_by_ranges(first, second):
    shared = []
    for one, n, other, m in zip(*first, *second, strict=True):
        shared.append([at for at in range(one, one + n) if at in range(other, other + m)])
    if not all(shared):
        return None
    return tuple(places[0] for places in shared), tuple(map(len, shared))


# ---- 11.4 plan --------------------------------------------------------------------------------


@right("11.4")
def plan_by_search(every_box):
    boxes = sorted({one for held in every_box for one in held.items() if 0 not in one[1].size})
    done = [0] * len(every_box)
    writers = {}
    for name, box in boxes:
        holders = [rank for rank, held in enumerate(every_box) if held.get(name) == box]
        _, writers[name, box] = min((done[rank], rank) for rank in holders)
        done[writers[name, box]] += math.prod(box.size)
    return writers


@right("11.4")
def plan_by_tensors(every_box):
    boxes = sorted({one for held in every_box for one in held.items() if 0 not in one[1].size})
    done = torch.zeros(len(every_box))
    writers = {}
    for name, box in boxes:
        holds = torch.tensor([held.get(name) == box for held in every_box])
        rank = done.masked_fill(~holds, math.inf).argmin().item()
        done[rank] += math.prod(box.size)
        writers[name, box] = rank
    return writers


# ---- 11.6 parts_to_copy -----------------------------------------------------------------------


@right("11.6")
def parts_by_loops(held, tensors):
    wanted = {}
    for name, piece in held.items():
        if name not in tensors:
            continue
        for one in tensors[name]["pieces"]:
            box = pieces.Box(tuple(one["offset"]), tuple(one["size"]))
            common = pieces.overlap(box, piece.box)
            if common is not None:
                wanted.setdefault(one["file"], []).append((name, box.offset, common))
    return wanted


@right("11.6")
def parts_by_the_index(held, tensors):
    wanted = defaultdict(list)
    for name in sorted(held.keys() & tensors.keys(), reverse=True):
        for one in tensors[name]["pieces"]:
            box = pieces.Box(tuple(one["offset"]), tuple(one["size"]))
            if common := pieces.overlap(held[name].box, box):
                wanted[one["file"]].append((name, box.offset, common))
    return wanted


@right("11.6")
def parts_by_files(held, tensors):
    found = [
        (one["file"], (name, tuple(one["offset"]), common))
        for name in held
        for one in tensors.get(name, {"pieces": []})["pieces"]
        if (
            common := pieces.overlap(
                pieces.Box(*map(tuple, (one["offset"], one["size"]))), held[name].box
            )
        )
    ]
    return {file: [part for other, part in found if other == file] for file, _ in found}


# ---- 11.7 AsyncSaver --------------------------------------------------------------------------


@right("11.7")
class SaverWithPool(Background):
    """A pool of one thread, whose future keeps the error."""

    running = None

    def copied(self, name, tensor):
        new = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin)
        buffer = self.buffers.setdefault(name, new)
        with torch.no_grad():
            buffer[...] = tensor
        return buffer

    def save(self, state, folder):
        self.wait()
        self.running = ThreadPoolExecutor(1).submit(self.write, self.copy(state), folder)

    def write(self, state, folder):
        sharded.save_sharded(state, folder, self.group)

    def wait(self):
        running, self.running = self.running, None
        if running is not None:
            running.result()


@right("11.7")
class SaverWithList(Background):
    """Errors in a list, and a thread that is no daemon."""

    errors: tuple = ()

    def copied(self, name, tensor):
        try:
            return self.buffers[name].copy_(tensor)
        except KeyError:
            self.buffers[name] = tensor.to("cpu", copy=True)
            return self.buffers[name]

    def save(self, state, folder):
        self.wait()
        mine = self.copy(state)
        self.thread = threading.Thread(target=lambda: self.write(mine, folder))
        self.thread.start()

    def write(self, state, folder):
        try:
            sharded.save_sharded(state, folder, self.group)
        except (ValueError, OSError) as problem:
            self.errors = (problem,)

    def wait(self):
        self.join()
        for problem in self.errors:
            self.errors = ()
            raise problem


@wrong("11.7", "checkpoint 1")
class CopiesInTheThread(AsyncSaver):
    """The copy is made when the thread comes to it."""

    def save(self, state, folder):
        self.wait()
        self.thread = threading.Thread(target=lambda: self.write(self.copy(state), folder))
        self.thread.start()


@wrong("11.7", "save 3 raises")
class WaitsAfterTheCopy(AsyncSaver):
    """The error of one save comes out only when the next one has been started."""

    def save(self, state, folder):
        self.join()
        copied = self.copy(state)
        self.thread = threading.Thread(target=self.write, args=(copied, folder))
        self.thread.start()
