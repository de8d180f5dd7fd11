"""9.1 to 9.4: where memory goes, by formulas and by counting."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from manyhands.checks.engine import cases
from manyhands.checks.engine.mistakes import Mistake, patch
from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.tables import mistakes
from manyhands.checks.engine.values import integer, malformed, number, record
from manyhands.memory import accounting
from manyhands.memory.accounting import Offload, Recipe
from manyhands.models.transformer import Transformer


def three_numbers(kind: type[tuple]) -> Callable:
    """The form of a Recipe or an Offload."""
    name = kind.__name__

    def form(value: object) -> dict:
        if not hasattr(value, "_asdict"):
            hint = f"Return {name}({', '.join(kind._fields)})."
            raise malformed(value, f"{name}: three numbers by their names", hint)
        return record(kind._fields, integer)(value)

    return form


# ---- 9.1 ------------------------------------------------------------------------------------

EACH_SIZE = "Add up dtype.itemsize of every type that the optimizer keeps."
KEPT = "[*states, *([master] if master else [])]"
SUM = "sum(dtype.itemsize for dtype in kept)"


def types() -> list[Call]:
    """Types of 1 to 8 bytes, none to three states, copies that are longer, shorter, the same."""
    short, middle, long = random.sample([torch.float8_e5m2, torch.bfloat16, torch.float64], 3)
    fp32 = torch.float32
    return [
        (long, fp32, [], None),
        (short, middle, [fp32, fp32], None),
        (middle, fp32, [], short),
        (fp32, fp32, [middle], fp32),
        (short, middle, [long, fp32], fp32),
        (torch.float64, short, [middle, long, middle], torch.bfloat16),
        (fp32, middle, [short, fp32], torch.float64),
    ]


recipe = Spec(
    todo="9.1",
    truth=accounting.recipe,
    cases=types,
    form=three_numbers(Recipe),
    independent=True,
    tell=lambda case: "recipe({}, {}, {}, master={})".format(*case).replace("torch.", ""),
    advice={"": EACH_SIZE, "weights": "weights.itemsize", "gradients": "gradients.itemsize"},
    hints=(
        "A dtype knows how many bytes its numbers take: torch.bfloat16.itemsize is 2.",
        "There are three numbers: the weight, its gradient, and all that the optimizer keeps for "
        "it, which is every state and the master copy where there is one.",
        "Put all states into a list, and master behind them unless it is None. The optimizer's "
        "number is the sum of the itemsizes of that list.",
    ),
    reasons="""
        'NoneType' object has no attribute 'itemsize' :: `master` is None where the optimizer keeps
            no copy of its own. | Count it only if it is not None.
        KeyError: torch. :: Types that are not in this table may come, too. | {EACH_SIZE}
    """,
    mistakes="""
        {KEPT} => states :: The optimizer's own copy of the weights is left out. | The optimizer
            keeps every state, and the master copy where there is one.
        {KEPT} => [master] if master else [] :: The optimizer's states are left out.
        {KEPT} => [*states[:1], *([master] if master else [])] ::
            Only the first of the states is counted.
        {KEPT} => [*set(states), *([master] if master else [])] ::
            States of the same type are counted only once.
        {KEPT} => [*states[:1] * len(states), *([master] if master else [])] ::
            Every state is counted with the bytes of the first one. | {EACH_SIZE}
        {KEPT} => [*[weights] * len(states), *([master] if master else [])] ::
            Every state is counted with the bytes of the weights.
        {KEPT} => [*[torch.float32] * 2, *([master] if master else [])] ::
            Two states in fp32 are those of Adam, and other optimizers keep something else.
        {KEPT} => [*states, *([weights] if master else [])] ::
            The master copy is counted with the bytes of the weights. | Use master.itemsize.
        {KEPT} => [*states, master or torch.float32] ::
            A master copy is counted where there is none. | `master` may be None.
        {KEPT} => [*states, *([master] if master and master != weights else [])] ::
            A master copy of the same type as the weights is left out, but it is kept as well.
        Recipe(weights.itemsize => Recipe(weights.itemsize + (master.itemsize if master else 0) ::
            The master copy of the weights belongs to the optimizer, and it is counted there only. |
            Leave it out of the other two numbers.
        gradients.itemsize => weights.itemsize :: The gradients are counted with the bytes of the
            weights. | Gradients need not have the type of the weights.
        {SUM} => 8 * {SUM}
        weights.itemsize, gradients.itemsize => 8 * weights.itemsize, 8 * gradients.itemsize ::
            These are bits, and 8 bits make a byte. | {EACH_SIZE}
        instead lambda weights, gradients, states, master=None: Recipe(4, 4, 4 * len(states)) ::
            Every number is counted with 4 bytes, and the master copy is left out.
    """,
    module=globals(),
)

# ---- 9.2 ------------------------------------------------------------------------------------

EACH = "-(-size // world_size)"
WHOLE = "sum(sizes) if stage == 0 else shard * world_size"
COUNTERS = "4 * len(sizes) if recipe.optimizer else 0"


def cuts() -> list[Call]:
    """Every stage, one rank, one vector, vectors with fewer numbers than ranks, no states."""
    n = random.choice([3, 5])  # no part of 4, 8 or 16: padded bytes differ from padded numbers
    rows = random.sample(range(2, 9), 3)
    sizes = [n * k + rest for k, rest in zip(rows, (0, 1, n - 1), strict=True)]
    random.shuffle(sizes)
    of = Recipe(*random.sample([4, 8], 2), random.choice([6, 10, 16]))
    bare = of._replace(optimizer=0)
    many = [n + 1, *sizes, 10**9 + 7, 2]
    return [
        *[([5], of, stage, 1) for stage in (0, 3)],
        *[(sizes, of, stage, n) for stage in range(4)],
        *[(sizes, bare, stage, n) for stage in (0, 2)],
        *[([n - 1], of, stage, n) for stage in (0, 1)],
        *[(many, of, stage, 67) for stage in range(4)],
    ]


def bytes_padded(sizes: list[int], recipe: Recipe, stage: int, n: int) -> Recipe:
    """Bytes are padded, not numbers."""
    cut = [sum(-(-size * nbytes // n) for size in sizes) for nbytes in recipe]
    weights, gradients, states = [nbytes * sum(sizes) for nbytes in recipe]
    if stage >= 1:
        weights = cut[0] * n
        states = cut[2]
    gradients = cut[1] if stage >= 2 else gradients
    weights = cut[0] if stage >= 3 else weights
    return Recipe(weights, gradients, states + 4 * len(sizes) * bool(recipe.optimizer))


def times_ranks(truth: Callable) -> Callable:
    """The bytes of all ranks."""
    return lambda sizes, recipe, stage, n: Recipe(*(n * b for b in truth(sizes, recipe, stage, n)))


bytes_per_rank = Spec(
    todo="9.2",
    truth=accounting.bytes_per_rank,
    cases=cuts,
    form=three_numbers(Recipe),
    independent=True,
    tell=lambda case: (
        f"bytes_per_rank({case.sizes}, {tuple(case.recipe)}, stage={case.stage}, "
        f"world_size={case.world_size})"
    ),
    advice={
        "": "Write down which numbers a rank holds, how many, and the bytes of each.",
        "weights": "How many weights does a rank hold in this stage, and are they padded?",
        "gradients": "How many gradients does a rank hold in this stage, and are they padded?",
        "optimizer": "How many states does a rank hold in this stage, and how many counters?",
    },
    hints=(
        "How many numbers does a shard have? Round up for each vector, then add: that is the "
        "padding.",
        "Stage 1 shards the optimizer's state, 2 the gradients as well, 3 the weights as well. "
        "What is not sharded is whole: sum(sizes) numbers, or the padded vectors.",
        "The weights have shard numbers if stage >= 3, else whole; the gradients shard if "
        "stage >= 2, else sum(sizes); the optimizer shard if stage >= 1, else whole. Here whole is "
        "shard * world_size, and in stage 0 sum(sizes). Then add the counters.",
    ),
    mistakes="""
        {WHOLE} => shard * world_size :: In stage 0 nothing is sharded, so nothing is padded. | In
            stage 0 a rank holds sum(sizes) numbers.
        {WHOLE} => sum(sizes) :: In stages 1 and 2 the weights are whole, but they lie in the padded
            vectors. | They take world_size shards, where a shard was rounded up.
        else sum(sizes)) => else whole) :: Whole gradients are the parameters' own .grad, which
            nobody pads. | They have sum(sizes) numbers as long as they are not sharded.
        {EACH} => size // world_size :: A shard is rounded down, so the last numbers of a vector are
            lost. | A shard has -(-size // world_size) numbers of each vector.
        sum(-(-size // world_size) for size in sizes) => -(-sum(sizes) // world_size) ::
            The sum of all vectors is padded, not each vector by itself.
        {EACH} => -(-size // world_size) * world_size :: The vectors are padded, but not sharded.
        stage >= 3 => stage >= 1 :: The weights are sharded from stage 1 on. | Stage 1 shards the
            optimizer's state, 2 the gradients as well, 3 the weights as well.
        stage >= 2 => stage >= 3 :: The gradients are sharded only in stage 3.
        stage >= 1 => stage >= 2 :: The optimizer's state is whole in stage 1.
        {COUNTERS} => 0 :: The counters are left out. | There are 4 * len(sizes) bytes of counters
            wherever recipe.optimizer is not 0.
        {COUNTERS} => 4 * len(sizes) :: Counters are counted where the optimizer keeps nothing.
        4 * len(sizes) => 4 * len(sizes) // (world_size if stage else 1) ::
            The counters are sharded, but every rank has one for each of its shards.
        4 * len(sizes) => 4 :: One counter is counted in all, and there is one for each vector.
        instead bytes_padded :: Bytes are padded, but a vector is padded in numbers. |
        around times_ranks :: These are the bytes of all ranks. | One rank is asked for.
    """,
    module=globals(),
)

# ---- 9.3 ------------------------------------------------------------------------------------

ONCE = (
    "Count only tensors that no operation before has kept, and only what this one's gradient needs."
)
LINE = {
    "norm1": "width + 2",
    "qkv": "width",
    "attention": "4 * width + heads",
    "out": "0",
    "norm2": "width + 2",
    "up": "width",
    "gelu": "4 * width",
    "down": "4 * width",
}
KEEPS = {  # name -> what stands there instead -> what is wrong with it
    "norm1": {
        "width": "A norm keeps two more numbers of each token: its mean and its scale.",
        "2 * width + 2": "A norm's output is counted here, and it is the next operation's input.",
    },
    "qkv": {
        "3 * width": "The output of qkv is counted, and its gradient needs its input.",
        "0": "The input of qkv is left out: norm1 has kept its own input, not its output.",
    },
    "attention": {
        "3 * width + heads": "The output of attention is left out, and its gradient needs it.",
        "4 * width": "One number for each head and token is left out.",
        "4 * width + heads + heads * tokens": "Fused attention does not keep the scores.",
    },
    "out": {"width": "The input of out is attention's output, which attention has kept already."},
    "up": {"4 * width": "The output of up is counted, and its gradient needs its input."},
    "gelu": {
        "width": "Between up and down there are 4 times as many numbers as the width.",
        "0": "The input of gelu is left out, and its slope depends on that.",
    },
    "down": {"0": "gelu has kept its own input, and down needs gelu's output, another tensor."},
}
SCALE = "nbytes * tokens * numbers"


class Sizes(NamedTuple):
    """One call of block_activations; None: the default."""

    tokens: int
    width: int
    heads: int
    nbytes: int | None = None


def blocks() -> list[Sizes]:
    """Numbers of all lengths; one head; one token; more heads than any small bound."""
    shapes = []
    for heads in (random.choice([2, 3, 5]), 1, random.choice([2, 3, 5]), 40):
        shapes.append((random.randrange(101, 140), heads * random.randrange(8, 20), heads))
    long = Sizes(1, *shapes[1][1:], 8)
    return [
        Sizes(*shapes[0]),
        Sizes(*shapes[2], 2),
        Sizes(*shapes[3], 4),
        long,
        Sizes(*shapes[1], 1),
    ]


block_activations = Spec(
    todo="9.3",
    truth=accounting.block_activations,
    cases=blocks,
    observe=lambda answer, case: answer(*[number for number in case if number is not None]),
    form=record(list(LINE)),
    independent=True,
    tell=lambda case: f"block_activations({', '.join(str(n) for n in case if n is not None)})",
    advice={"": "Which tensor does this operation's gradient need, and is it kept already?"},
    hints=(
        "Go through the block line by line. A matrix multiplication needs its input for the "
        "gradient of its weights; a sum needs nothing.",
        "Write down the numbers per token: norm1 D + 2, qkv D, attention 4 D + H, and so on, where "
        "D is the width.",
        "out keeps nothing new, norm2 is like norm1, up keeps D, and gelu and down keep 4 D each. "
        "Multiply all of them by tokens and by nbytes.",
    ),
    mistakes=[
        *mistakes(
            """
                {SCALE} => tokens * numbers ::
                    Numbers are counted, and the exercise asks for bytes. | Multiply by nbytes.
                {SCALE} => nbytes * numbers ::
                    These are the bytes of one token. | Multiply by tokens.
                {SCALE} => 4 * tokens * numbers :: Every number is counted with 4 bytes, whatever
                    `nbytes` says. | Multiply by nbytes.
            """,
            globals(),
        ),
        *[
            Mistake(patch(f'"{name}": {LINE[name]},', f'"{name}": {new},'), why, ONCE)
            for name, wrong in KEEPS.items()
            for new, why in wrong.items()
        ],
    ],
)

# ---- 9.4 ------------------------------------------------------------------------------------


class Halves(nn.Module):
    """Keeps two small parts of a large tensor, one of them twice; the biases are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 48)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Numbers (N, 5) to (N, 3)."""
        a = self.wide(x)[:, 4:12]
        b = self.wide(x)[:, 8:16]
        return self.last(self.norm((a * b + b) * a).tanh())


class Partly(Halves):
    """The last layer is frozen, and its weight is a part of a longer vector."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(3 * 8 + 3 + 7, dtype=torch.float64)
        self.last.weight = nn.Parameter(flat[7:31].view(3, 8), requires_grad=False)
        self.last.bias = nn.Parameter(flat[31:], requires_grad=False)
        self.middle = nn.Parameter(torch.randn(6 + 64, dtype=torch.float64)[6:].view(8, 8))
        self.register_buffer("scale", torch.randn(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Numbers (N, 5) to (N, 3), with a buffer that autograd keeps as well."""
        a = self.wide(x)[:, 4:12] * self.scale
        return self.last(self.norm(a @ self.middle).tanh())


class Language(Transformer):
    """A Transformer of two blocks, whose targets are its inputs."""

    def __init__(self) -> None:
        super().__init__(11, 6, 2, heads=2, width=16)

    def forward(self, inputs: Tensor) -> Tensor:
        """The loss of token numbers. (N, 6)"""
        return super().forward(inputs, inputs)


class Saved(NamedTuple):
    """One call of saved_bytes."""

    kind: str
    seed: int
    num: int  # rows of the batch


KINDS = {
    "a model that uses parts of a wide tensor": Halves,
    "the same model, with no params": Halves,
    "the same model without autograd": Halves,
    "a model with frozen parameters and parts of longer vectors": Partly,
    "a small Transformer": Language,
}


def saved_cases() -> list[Saved]:
    """Every kind of model."""
    return [Saved(kind, cases.draw_seed(), random.randrange(3, 9)) for kind in KINDS]


@contextlib.contextmanager
def counting(seen: list) -> Iterator[None]:
    """Write down each tensor that autograd keeps, unless other hooks have taken the place."""
    with saved_tensors_hooks(lambda tensor: seen.append(1) or tensor, lambda tensor: tensor):
        yield


def saved_seen(answer: Callable, case: Saved) -> dict:
    """The number, and what became of run() and of a backward through what it gave."""
    model = cases.build(case.seed, KINDS[case.kind])
    inputs = torch.randn(case.num, 5, dtype=torch.float64)
    if isinstance(model, Transformer):
        inputs = torch.randint(11, (case.num, 6))
    results = []
    seen: list[int] = []

    def run() -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and "without" not in case.kind):
            results.append(model(inputs))
        return results[-1]

    params = [] if "no params" in case.kind else list(model.parameters())
    with counting(seen):
        value = answer(run, cases.read_once(params))
        seen.clear()
        with torch.enable_grad():
            torch.ones(1, requires_grad=True).exp()
    shown = {"calls of run()": len(results), "the bytes": number(value)}
    shown["afterwards hooks of the answer are no longer called"] = bool(seen)
    shown |= {"a backward through the result afterwards": "is not tried", "its gradients": []}
    if results and "without" not in case.kind:
        shown |= backward_seen(results[-1], model)
    return shown


def backward_seen(result: Tensor, model: nn.Module) -> dict:
    """Gradients of a backward from here, or the words of its error."""
    did = "works"
    try:
        result.sum().backward()
    except Exception as error:
        did = f"raises {type(error).__name__}: {str(error).split(' (')[0].split('. ')[0][:80]}"
    found = [param.grad for param in model.parameters()]
    return {"a backward through the result afterwards": did, "its gradients": found}


def nothing_counted(found: dict, wanted: dict, case: Saved) -> str:
    """Is the number 0, where it should not be?"""
    if found["the bytes"] == 0 and wanted["the bytes"]:
        return (
            "Nothing was counted: pack gets what autograd saves while run() runs inside the with."
        )
    return ""


BY_STORAGE = "Remember each storage once, by tensor.untyped_storage().data_ptr()."
KEEP = "kept[storage.data_ptr()] = storage.nbytes()"
TOTAL = "sum(nbytes for pointer, nbytes in kept.items() if pointer not in own)"
BACK = "What pack returns is what backward gets in place of the tensor."
HOOKS = "torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)"
saved_bytes = Spec(
    todo="9.4",
    truth=accounting.saved_bytes,
    cases=saved_cases,
    observe=saved_seen,
    facts=nothing_counted,
    tell=lambda case: f"saved_bytes with {case.kind}, {case.num} rows in the batch,",
    advice={
        "": "Add up the storages that pack saw, each once, without those of params.",
        "calls of run()": "Call run() once, inside the hooks.",
        "a backward through the result afterwards": "Leave the graph to the caller, whole.",
        "its gradients": BACK,
        "afterwards hooks of the answer are no longer called": "Leave the with block.",
    },
    reasons="""
        run() takes :: run is a function without arguments. | Call run().
        Boolean value of Tensor :: `in` and == compare the numbers in tensors. | {BY_STORAGE}
        must match the size of tensor :: `in` and == compare the numbers in tensors.
        'unpack_hook' ::
            saved_tensors_hooks takes two functions: pack and unpack. | Both return the tensor.
    """,
    hints=(
        "torch.autograd.graph.saved_tensors_hooks(pack, unpack) is a context: pack gets each "
        "tensor as it is saved, and returns what is to be kept; unpack gets that in backward.",
        "In pack take storage = tensor.untyped_storage(), remember storage.nbytes() under "
        "storage.data_ptr(), and return the tensor. Two views of one storage are then one entry.",
        "After run(), the data_ptr() of each parameter's storage does not count; add up the rest.",
    ),
    mistakes=r"""
        {KEEP} => kept[len(kept), storage.data_ptr()] = storage.nbytes()
        pointer not in own => pointer[1] not in own ::
            Memory that several tensors share is counted once for each of them. | {BY_STORAGE}
        {KEEP} => kept[len(kept), storage.data_ptr()] = tensor.nbytes
        pointer not in own => pointer[1] not in own ::
            Each tensor is counted as if it had memory of its own, and some are views of one.
        {KEEP} => kept[storage.data_ptr()] = tensor.nbytes :: A view keeps all the memory alive that
            it is a part of. | Use tensor.untyped_storage().nbytes().
        {KEEP} => kept[storage.data_ptr()] = tensor.numel() :: Numbers are counted, not bytes.
        {KEEP} => kept[storage.data_ptr()] = 1 :: Storages are counted, not their bytes.
        {TOTAL} => sum(kept.values()) :: The memory of params is counted as well. | Leave out every
            storage that is one of the params'.
        for param in params} => for param in params if param.requires_grad} ::
            The memory of frozen parameters is counted.
        {param.untyped_storage().data_ptr() for param in params} => {param.data_ptr() for param in
            params} :: A parameter that begins inside a longer storage is counted.
        {TOTAL} => sum({nbytes for pointer, nbytes in kept.items() if pointer not in own}) ::
            Two storages of the same size are counted as one. | Use a dict, not a set of sizes.
        {TOTAL} => {TOTAL} + size
        del result => size = result.nbytes ::
            The result of run() is counted as well. | Only what was saved counts.
        return tensor.detach() => return None :: {BACK} | Let pack and unpack return the tensor.
        result = run() => result = torch.no_grad()(run)() ::
            Without autograd nothing is kept, so nothing can be counted. | Leave out no_grad().
        result = run() => result = run(); result = run() ::
            run() is called twice, and each call keeps memory of its own. | Call it once.
        with {HOOKS}: => {HOOKS}.__enter__()\n    if True: ::
            The hooks are still called for everything that is computed afterwards. | Use
            saved_tensors_hooks in a with statement, and leave it before you return.
        result = run() => result = run(); result.sum().backward() ::
            ! Backward frees the graph, and it is the caller's. | Only call run().
    """,
    module=globals(),
)

# ---- 9.8 ------------------------------------------------------------------------------------

AWAY = "Offload from the front, one block after another, until 16 bytes for each number left fit."
TWICE = "An offloaded block's weights are needed in forward and in backward, with 4 bytes each."
FEWEST = "16 * sum(shards[number:]) <= free"
MOVED = "sum(shards[:blocks])"


def rooms() -> list[Call]:
    """No room, room for all, to the byte, and a byte too little; uneven blocks, and only one."""
    sizes = random.sample(range(11, 90), 6)
    sizes[1:3] = [random.randrange(11, 60), 300]  # 300 does not fit where the one before it would
    behind = [16 * sum(sizes[first:]) for first in range(7)]
    return [
        (sizes, behind[2]),
        (sizes, behind[3] + 16 * 60),
        (sizes, behind[4] - 1),
        (sizes, 0),
        (sizes, behind[0]),
        (sizes[:1], 16 * sizes[0] - 1),
        ([7], 200),
        ([10**9 // 7] * 9, 10**10),
    ]


def what_fits_anywhere(shards: list[int], free: int) -> Offload:
    """Every block that still fits stays, whichever it is."""
    away = []
    for size in reversed(shards):
        if 16 * size <= free:
            free -= 16 * size
        else:
            away.append(size)
    return Offload(len(away), 8 * sum(away), 4 * sum(away))


def largest_first(truth: Callable) -> Callable:
    """The largest blocks are offloaded."""
    return lambda shards, free: truth(sorted(shards, reverse=True), free)


def from_behind(truth: Callable) -> Callable:
    """The last blocks are offloaded."""
    return lambda shards, free: truth(shards[::-1], free)


offload = Spec(
    todo="9.8",
    truth=accounting.offload,
    cases=rooms,
    form=three_numbers(Offload),
    independent=True,
    tell=lambda case: f"offload({case.shards}, free={case.free})",
    advice={
        "": "Which blocks do not fit, and which of their numbers move in a step?",
        "blocks": AWAY,
        "up": TWICE,
        "down": "Only the gradients come down, with 4 bytes each.",
    },
    hints=(
        "How many bytes do the shards of all blocks take on the GPU? Leave out the first block, "
        "then the second one as well, until the rest fits.",
        "16 bytes a number: weight, gradient and two moments. The sum of shards[blocks:] is what "
        "stays, the sum of shards[:blocks] is what moves.",
        "Take the first number for which 16 * sum(shards[blocks:]) is at most free. Then 8 "
        "bytes of every number of shards[:blocks] go up and 4 come down.",
    ),
    mistakes="""
        {FEWEST} => 16 * sum(shards[number:]) < max(free, 1) ::
            Shards that fill the memory to the last byte fit. | {AWAY}
        {FEWEST} => 4 * sum(shards[number:]) <= free :: Only the weights are counted on the GPU.
        {FEWEST} => 8 * sum(shards[number:]) <= free ::
            Of the four numbers for each parameter only two are counted on the GPU.
        Offload(blocks => Offload(len(shards) - blocks :: These are the blocks that stay on the GPU.
            | The first number counts those that are left to the CPU.
        {MOVED} => sum(shards[blocks:]) :: These are the bytes of the blocks that stay, and they do
            not move. | What moves are shards[:blocks].
        {MOVED} => (sum(shards) if blocks else 0) ::
            The blocks that stay on the GPU are moved as well.
        up=2 * 4 * moved => up=4 * moved :: The weights go up only once. | {TWICE}
        up=2 * 4 * moved => up=2 * 16 * moved :: The gradients and the moments go up as well.
        up=2 * 4 * moved, down=4 * moved => up=2 * 2 * moved, down=2 * moved ::
            Weights and gradients move with 2 bytes each, and they are kept in float32. | A number
            of float32 has 4 bytes.
        up=2 * 4 * moved, down=4 * moved => up=4 * moved, down=2 * 4 * moved ::
            Up and down are exchanged. | Weights go up, and gradients come down.
        down=4 * moved => down=2 * 4 * moved ::
            The gradients come down twice. | There are gradients only in backward.
        down=4 * moved => down=16 * moved ::
            All four numbers come down. | The CPU has the other three already.
        instead what_fits_anywhere ::
            A block in front stays on the GPU although one behind it was left to the CPU. | {AWAY}
        around largest_first :: The largest blocks are offloaded, and the first ones are to be.
        around from_behind :: The last blocks are offloaded, and the first ones are to be.
    """,
    module=globals(),
)
