"""What a call is given, what is seen of it, and words that several exercises share."""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.checks.collectives.tape import Tape, rounds_down, rounds_up, together
from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place
from manyhands.checks.engine.values import same

# 5 is no power of 2 and has a third round; in a ring of 4 not all ranks are neighbours. In a group,
# ranks have other numbers, and its data is not that of the others.
OF_FIVE = (((0, 1, 2, 3, 4),), ((0,), (1, 2, 3, 4)))
OF_FOUR = (((0, 1, 2, 3),), ((0,), (1, 2, 3)))
OPERATIONS = ("send", "recv")
UNTOUCHED = "no tensor is used while its message is on its way"
BESIDE = "the memory beside the tensor is unchanged"
SAME_LIST = "the list holds the same tensors as before"


class Call(NamedTuple):
    """One call with a tensor, or with chunks of one."""

    form: str
    sizes: tuple[int, ...]  # elements: of the tensor, of each chunk, or of each rank's message
    dtype: torch.dtype
    seed: int
    root: int = 0
    op: str = "sum"
    piece_bytes: int = 0  # 0: not given
    shift: int = 1  # rank r sends to r + shift

    @property
    def options(self) -> dict:
        """Arguments of the call that are not the tensor, without those that have their default."""
        options = {"root": self.root} if self.root else {}
        return options | ({"op": self.op} if self.op != "sum" else {})

    @property
    def words(self) -> str:
        """The tensor, for people."""
        kind = {torch.float32: ""}.get(self.dtype, f" of {str(self.dtype).removeprefix('torch.')}")
        size = sum(self.sizes)
        what = "element" if size == 1 else "elements"
        return {
            "vector": f"a vector of {size} {what}{kind}",
            "matrix": f"a 2x{size // 2} matrix{kind}",
            "transposed": f"a transposed 2x{size // 2} matrix{kind}",
            "column": f"a column of a {size}x3 matrix{kind}",
            "scalar": f"a tensor without dimensions{kind}",
            "empty": f"an empty tensor{kind}",
        }[self.form]

    def draw(self, who: int) -> tuple[Tensor, Tensor]:
        """The tensor of a rank of the job, and the memory that it is a view of."""
        draw = cases.generator(self.seed, who)
        tensor, memory = cases.shaped(self.form, sum(self.sizes), draw, self.dtype)
        if self.op in ("min", "max"):
            # Half of the numbers have one sign: a maximum that starts from 0 shows there.
            half = memory.view(-1)[memory.numel() // 2 :]
            half.abs_().add_(1).mul_(-1 if self.op == "max" else 1)
        if self.dtype is torch.int64:
            memory += (memory > 0) * 2**58  # no float holds these
        return tensor, memory[:]  # a tensor that is given other memory leaves this one as it is

    def tensor_in(self, memory: Tensor) -> Tensor:
        """What the memory holds of the tensor."""
        return memory[:, 1] if self.form == "column" else memory

    @property
    def is_tuple(self) -> bool:
        """Are the chunks given as a tuple, as tensor_split makes one? Else as a list."""
        return self.form == "vector" and len(set(self.sizes)) > 1

    def chunks(self, tensor: Tensor) -> list[Tensor]:
        """The tensor as the chunks that the function is given."""
        return list(tensor.split(self.sizes))


def call_of(form: str, *sizes: int, dtype: torch.dtype = torch.float32, **options: object) -> Call:
    """A call with numbers of its own."""
    return Call(form, sizes, dtype, cases.draw_seed(), **options)


def is_beside_unchanged(call: Call, memory: Tensor, before: Tensor) -> bool:
    """Of a column, the other columns."""
    if call.form != "column":
        return True
    return torch.equal(memory[:, ::2], before[:, ::2])


def in_chunks(n: int, rooted: bool = True, with_op: bool = False) -> list[Call]:
    """Equal chunks, uneven ones of a column, empty ones; the root is not always the first."""
    uneven = tuple(range(2, n + 2))
    calls = [
        call_of("vector", *(3,) * n),
        call_of("vector", *uneven, root=n - 1, op="avg"),
        call_of("column", *uneven[::-1], root=random.randrange(n), dtype=torch.float64, op="min"),
        call_of("vector", *cases.uneven(n), dtype=torch.bfloat16, op="max"),
    ]
    if not rooted:
        calls = [call._replace(root=0) for call in calls]
    return calls if with_op else [call._replace(op="sum") for call in calls]


def tell_chunks(name: str):
    """Words for a call with chunks."""

    def tell(case: Call) -> str:
        options = "".join(f", {key}={value!r}" for key, value in case.options.items())
        sizes = ", ".join(map(str, case.sizes))
        kind = case.words.partition(" of ")[0] if case.form == "column" else "a vector"
        what = "a tuple of chunks" if case.is_tuple else "chunks"
        return f"{name}({what} of {sizes} elements of {kind} of {str(case.dtype)[6:]}{options})"

    return tell


def rooted(n: int, with_op: bool = False) -> list[Call]:
    """Tensors of all forms and types, and all kinds of roots."""
    calls = [
        call_of("vector", 4),
        call_of("vector", 9, root=n - 1, op="avg"),
        call_of("matrix", 6, root=random.randrange(n), dtype=torch.int64, op="min"),
        call_of("column", 7, root=random.randrange(n), dtype=torch.bfloat16, op="max"),
        call_of("scalar", 1, root=random.randrange(n), dtype=torch.float64, op="avg"),
        call_of("empty", 0),
    ]
    return calls if with_op else [call._replace(op="sum") for call in calls]


def messages_seen(tape: Tape, counted: dict[str, bool], nbytes: int) -> dict:
    """What is judged of the messages of one rank.

    Args:
        counted: is the number of its messages of this kind the same in all right answers?
        nbytes: of each message that it sends.
    """
    numbers = {op: len(tape.messages(op)) if counts else None for op, counts in counted.items()}
    return {
        "messages sent": numbers["send"],
        "messages received": numbers["recv"],
        WHOLE: all(entry.nbytes == nbytes for entry in tape.messages("send")),
    }


def tensor_seen(
    answer, case: Call, place: Place, is_tree: bool = True, only_root: bool = False
) -> dict:
    """What a call leaves in the tensor, what it sends, and how many rounds that takes.

    Args:
        is_tree: do right answers differ in whether another rank than the root passes things on?
        only_root: does only the root have a result?
    """
    tensor, memory = case.draw(place.job_rank)
    before = memory.clone()
    tape = Tape(place)
    taped = together(place, tape, lambda: answer(tensor, **case.options, **place.options))
    is_root = place.rank == case.root
    counted = {
        "send": is_root or only_root or not is_tree,
        "recv": is_root or not only_root or not is_tree,
    }
    num_rounds = rounds_up(taped, place, case.root) if only_root else rounds_down(taped)
    return {
        UNTOUCHED: not tape.is_touched,  # first: what a message has left there is luck
        RESULT: case.tensor_in(memory).clone() if is_root or not only_root else None,
        BESIDE: is_beside_unchanged(case, memory, before),
        **messages_seen(tape, counted, tensor.nbytes),
        ROUNDS: num_rounds if is_tree else None,
    }


def tell_tensor(name: str):
    """Words for a call with a tensor."""

    def tell(case: Call) -> str:
        options = "".join(f", {key}={value!r}" for key, value in case.options.items())
        return f"{name}({case.words}{options})"

    return tell


# ---- words that several exercises share -----------------------------------------------------


def stated(sentences: dict[str, str]) -> Callable:
    """Facts: a sentence for the first part that is wrong, by the name of the part."""

    def facts(found: dict, wanted: dict, case: object) -> str:
        part = next(name for name in wanted if not same(found[name], wanted[name]))
        return sentences.get(part, "")

    return facts


NO_DIMENSION = (
    "A tensor without dimensions, such as a loss, has neither a length nor elements to go through.",
    "Use operations on whole tensors; `flat` makes a vector of any tensor.",
)
RESULT = "the tensor afterwards"
ROUNDS = "rounds of messages, of all ranks together"
WHOLE = "every message has the size of what the rank has to send"
COLUMN = "A column of a matrix is not one piece of memory, and a message is."
FLAT = "Inside `with flat(tensor) as vector:` send and receive `vector`."
ROOT_0 = "Rank 0 is taken for the root. | Use the argument `root`."
WITH = "with flat(tensor) as vector:"
COPY = "vector = tensor.contiguous().view(-1)\n    if True:"
BARE = "vector = tensor\n    if True:"
IN_A_COPY = "Of a tensor that is not one piece of memory, only a copy is changed."
TOO_EARLY = "Call wait() before a tensor is read, sent on, or changed."
ON_SAME_LIST = "Write into the chunks themselves, as copy_() does."
FACTS_TABLE = {
    SAME_LIST: "The list itself was changed. The caller still uses it, and the memory of its "
    "tensors.",
    BESIDE: "The other columns of the matrix belong to somebody else.",
    UNTOUCHED: "A tensor was read or changed before the wait for its message had returned.",
}
FACTS = stated(FACTS_TABLE)
ADVICE = {
    "": "Write down for these ranks who sends to whom in each step; every send needs its recv.",
    BESIDE: FLAT,
    UNTOUCHED: TOO_EARLY,
}
REASONS = {
    "does not support item assignment": (
        "The chunks may be a tuple, and `chunks[r] /= n` or `chunks[r] = ...` puts another element "
        "into it.",
        "Change the tensor itself, such as by chunks[r].div_(n) or chunks[r].copy_(...).",
    ),
    "contiguous": (COLUMN, FLAT),
    "0-d tensor": NO_DIMENSION,
    "different size or type": (
        "A message differs in its size or type from the tensor that receives it.",
        "Both ends take the same number of elements of the same type: torch.empty_like(vector).",
    ),
    "should not be the same as the rank": (
        "A rank sends to itself, or receives from itself.",
        "Leave out the rank's own number; place p, counted from the root, is rank (p + root) % n.",
    ),
    "incompatible function arguments": (
        "A rank has to be a whole number.",
        "A step is halved with //, since / makes a float.",
    ),
}
