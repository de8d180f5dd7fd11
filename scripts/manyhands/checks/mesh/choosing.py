"""14.10 to 14.12: which technique, how many tensor ranks, and how many ranks for FSDP."""

import random
from typing import NamedTuple

from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.mistakes import Mistake, instead, mistakes
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import number, show, text
from manyhands.checks.mesh.numbers import called, in_words
from manyhands.mesh import choosing as truth

# ---- 14.10 ----------------------------------------------------------------------------------

PER_N = truth.STATE_BYTES * 2  # bytes of a GPU for each parameter whose state may fit


class Asked(NamedTuple):
    """One call of approach."""

    num_parameters: int
    num_gpus: int
    gpu_bytes: int
    sequences: int
    per_node: int | None = None


def asked(share: float, gpus: int, sequences: int, per_node: int | None = None) -> Asked:
    """A model of this share of what fits on a GPU; the share's 20th is a whole number."""
    fits = 20 * random.randint(10**6, 10**8)  # parameters
    return Asked(round(share * fits), gpus, PER_N * fits, sequences, per_node)


def models() -> list[Asked]:
    """Each class; at and just beyond each limit; few sequences; nodes of 4 and of 16 GPUs.

    Never fewer GPUs than a node has where the third rule is asked: what "a node" is, is open there.
    """
    n = random.choice((24, 40, 56))
    beyond = 1.05
    return [
        asked(0.6, 1, 5),
        asked(0.6, n, 2 * n),
        asked(n - 0.5, n, 2 * n),
        asked(7.5, n, n - 1),
        asked(8.5, n, n - 1),
        asked(n + 0.5, n, 2 * n),
        # at the limits: a fit, as many sequences as GPUs, one node and no more
        asked(1, 1, 1),
        asked(1, n, 3),
        asked(beyond, 2, 2),
        asked(n, n, n),
        asked(n * beyond, n, n),
        asked(8, n, n // 2),
        asked(8 * beyond, n, n // 2),
        asked(5, 8, 7),
        # other nodes, sequences that the GPUs do not divide, a node's share and enough sequences
        asked(3.5, 12, 11, 4),
        asked(4.5, 12, 11, 4),
        asked(12.5, 32, 20, 16),
        asked(16.5, 32, 20, 16),
        asked(5.5, n, n + 3),
        asked(3.5, n, 2 * n, 4),
        asked(0.3, n, n // 2, 16),
        asked(2.5, n, 1),
    ]


def sizes_of(found: str, wanted: str, case: Asked) -> str:
    """The state and the room, or that the text is none of the five."""
    if found not in truth.CLASSES:
        return f"{found!r} is none of the five classes: {', '.join(map(repr, truth.CLASSES))}."
    state = truth.STATE_BYTES * case.num_parameters
    node = case.per_node or 8
    room = case.gpu_bytes / 2
    return (
        f"The state takes {state / room:.4g} times half of a GPU's memory: "
        f"{state / case.num_gpus / room:.4g} times if all {case.num_gpus} GPUs share it, and "
        f"{state / node / room:.4g} times if the {node} of a node do. There are {case.sequences} "
        "sequences."
    )


STATE = "STATE_BYTES * num_parameters"
FSDP_RULE = "state / num_gpus <= room and sequences >= num_gpus"
NODE_RULE = "state / per_node <= room and num_gpus >= per_node"
FIRST_FSDP = f'if {FSDP_RULE}:\\n        return "FSDP"\\n    '
FIRST_NODE = f'if {NODE_RULE}:\\n        return "TP or PP"'
HALF = "State fits where 16 N bytes are at most half of a GPU's memory."
ONE_EACH = "FSDP asks for sequences >= num_gpus, and for a state whose share fits."
NODE = "The third rule asks whether state / per_node fits."
ORDER = "Go through the four rules in their order, and return at the first that holds."
approach = Spec(
    todo="14.10",
    truth=truth.approach,
    cases=models,
    observe=called,
    form=text,
    facts=sizes_of,
    tell=in_words("approach"),
    advice={"": ORDER},
    hints=(
        "Compute the bytes of the state, 16 per parameter, and the room for them on a GPU, which "
        "is half of gpu_bytes.",
        "Every rule compares a share with the room: the state itself, state / num_gpus, "
        "state / per_node. FSDP also needs a sequence for each GPU.",
        f"{ORDER} A share that is exactly as large as the room fits.",
    ),
    mistakes=mistakes(
        """
        {STATE} => 2 * num_parameters
            Only the weights are counted, with 2 bytes each. | A parameter needs STATE_BYTES = 16
            bytes with its gradient and optimizer state.
        {STATE} => num_parameters
            Parameters are compared with bytes. | Every parameter needs STATE_BYTES = 16 bytes.
        gpu_bytes / 2 => gpu_bytes
            The state may fill the whole GPU here, which leaves no room for activations. | {HALF}
        gpu_bytes / 2 => gpu_bytes / 4
            Only a quarter of the GPU is given to the state. | {HALF}
        state <= room: => state < room:
        state / num_gpus <= room => state / num_gpus < room
        state / per_node <= room => state / per_node < room
            A state that fills the room exactly is said not to fit. | Use <= in all three rules.
        "one GPU" if num_gpus == 1 else "DDP" => "one GPU"
            Only one of several GPUs is used. | Where the state fits and there are more GPUs, the
            answer is "DDP".
        if state <= room: => if state <= room and (num_gpus == 1 or sequences >= num_gpus):
            DDP is refused where there are fewer sequences than GPUs. | The first rule asks only
            whether the state fits on a GPU.
        sequences >= num_gpus => True
            FSDP is chosen although there are more GPUs than sequences, so that some would have
            nothing to do. | {ONE_EACH}
        sequences >= num_gpus => sequences > num_gpus
            FSDP is refused where there are exactly as many sequences as GPUs. | {ONE_EACH}
        sequences >= num_gpus => sequences % num_gpus == 0
            FSDP is refused where the GPUs do not divide the sequences. | {ONE_EACH}
        state / num_gpus <= room => True
            FSDP is chosen although the share of a GPU does not fit. | {ONE_EACH}
        state / per_node => state / 8
            `per_node` is not used: every node has 8 GPUs. | {NODE}
        state / per_node => state / num_gpus
            The third rule divides the state by all GPUs, but a copy of the model has to fit in one
            node. | {NODE}
        {FIRST_FSDP} =>
        {FIRST_NODE} => {FIRST_NODE}\\n    if {FSDP_RULE}:\\n        return "FSDP"
            The third rule is asked before the second, so the model is cut where FSDP would do.
            | {ORDER}
        """,
        globals(),
    ),
)

# ---- 14.11 ----------------------------------------------------------------------------------


class Fed(NamedTuple):
    """One call of smallest_tensor_degree."""

    sequences: int
    num_gpus: int
    per_node: int | None = None


def feedings() -> list[Fed]:
    """Powers of two and not; too few sequences and too many; a node's size; no way."""
    k = random.choice((3, 5, 7))
    return [
        Fed(64 * k, 128 * k),
        Fed(16 * k, 16 * k),
        Fed(32 * k, 16 * k),
        Fed(4 * k, 12 * k),
        Fed(6, 8),
        Fed(12, 8),
        Fed(40, 24),
        Fed(1, 8),
        Fed(1, 3),
        Fed(5, 9),
        Fed(1, 16),
        Fed(1, 16, 16),
        Fed(2 * k, 12 * k, 4),
        Fed(2 * k, 12 * k, 6),
        Fed(k, 12 * k, 12),
        Fed(8, 8, 1),
        Fed(7, 8, 1),
        Fed(11, 16 * k),
        Fed(10, 15, 4),
    ]


def number_or_none(value: object) -> float | None:
    """A number, or None: where an error is asked for, that is not the wrong kind of a number."""
    return None if value is None else number(value)


def shares_of(found: float | None, wanted: int, case: Fed) -> str:
    """What the number of tensor ranks makes of the batch."""
    if found is None or found < 1 or found != int(found):
        return "The result is a whole number, at least 1."
    tp, gpus, sequences = int(found), case.num_gpus, case.sequences
    if gpus % tp:
        return f"{tp} does not divide {gpus} GPUs."
    if tp > (case.per_node or 8):
        return f"{tp} is more than a node has GPUs."
    said = f"With tp = {tp} there are {gpus // tp} shares of {sequences} sequences, "
    if sequences % (gpus // tp):
        return said + "which cannot all have the same number of whole sequences."
    return said + f"which is possible, but so it is with tp = {wanted}."


DIVIDES = "num_gpus % tp == 0 and "
EQUAL = "sequences % (num_gpus // tp) == 0"
TRIED = "range(1, per_node + 1)"
EVEN = "The num_gpus // tp shares must divide the sequences: sequences % (num_gpus // tp) == 0."
ALL_TRIED = "Try tp = 1, 2, 3, ... up to per_node, and return the first that fits."


def by_division(sequences: int, num_gpus: int, per_node: int = 8) -> int:
    """As many tensor ranks as there are GPUs for each sequence, rounded up."""
    tp = -(-num_gpus // sequences)
    if tp > per_node:
        raise ValueError(f"{tp} tensor ranks are more than a node has")
    return tp


def in_whole_shares(sequences: int, num_gpus: int, per_node: int = 8) -> int:
    """tp need not divide the GPUs: those that are left have nothing to do."""
    for tp in range(1, per_node + 1):
        if num_gpus >= tp and sequences % (num_gpus // tp) == 0:
            return tp
    raise ValueError("no tp does it")


smallest_tensor_degree = Spec(
    todo="14.11",
    truth=truth.smallest_tensor_degree,
    cases=feedings,
    observe=called,
    form=number_or_none,
    facts=shares_of,
    tell=in_words("smallest_tensor_degree"),
    advice={"": f"{ALL_TRIED} {EVEN}"},
    refusal=(
        "No number of tensor ranks up to per_node feeds all GPUs here, and the docstring asks for "
        "a ValueError.",
        "Put the raise ValueError(...) behind the loop.",
    ),
    reasons={
        "modulo by zero": (
            "With more tensor ranks than GPUs there is no share.",
            "Ask whether tp divides num_gpus before you divide by the number of shares.",
        ),
    },
    hints=(
        "A few numbers of tensor ranks are possible, and the smallest is asked for. So try them in "
        "their order.",
        "tp is possible if it divides num_gpus, and if the sequences can be divided by the "
        "number of shares, num_gpus // tp.",
        f"{ALL_TRIED} Behind the loop, raise ValueError.",
    ),
    mistakes=[
        *mistakes(
            """
            {TRIED} => range(1, per_node)
                As many tensor ranks as a node has are never tried. | range(1, per_node + 1) ends
                with per_node.
            {TRIED} => range(1, 9)
                `per_node` is not used: every node has 8 GPUs. | {ALL_TRIED}
            {TRIED} => range(1, num_gpus + 1)
                There are more tensor ranks than a node has GPUs. | {ALL_TRIED}
            {TRIED} => [2**k for k in range(per_node.bit_length())]
                Only powers of two are tried. | {ALL_TRIED}
            {TRIED} => range(2, per_node + 1)
                tp = 1 is never tried, although a batch may be large enough without tensor
                parallelism. | {ALL_TRIED}
            {TRIED} => range(per_node, 0, -1)
                This is the largest number of tensor ranks that is possible. | {ALL_TRIED}
            {EQUAL} => sequences >= num_gpus // tp
                Every share has a sequence, but not every share has the same number of them.
                | {EVEN}
            {EQUAL} => sequences == num_gpus // tp
                Only shares of a single sequence are accepted. | A share may have several, as long
                as all have the same number.
            {EQUAL} => sequences % tp == 0
                The sequences are divided by the tensor ranks, but these share the same sequences.
                | {EVEN}
            {EQUAL} => (num_gpus // tp) % sequences == 0
                The division is upside down: the number of shares is divided by the sequences.
                | {EVEN}
            return tp => return num_gpus // tp
                This is the number of copies of the model, and the tensor ranks of each are asked
                for. | Return tp.
            """,
            globals(),
        ),
        Mistake(
            instead(by_division),
            "The GPUs are divided by the sequences, and the result is rounded up. It need not "
            "divide the GPUs, and the shares need not be equal.",
            ALL_TRIED,
        ),
        Mistake(
            instead(in_whole_shares),
            "The number of shares is rounded down, so some GPUs belong to no copy of the model.",
            "tp has to divide num_gpus: num_gpus % tp == 0.",
        ),
    ],
)

# ---- 14.12 ----------------------------------------------------------------------------------


class Fits(NamedTuple):
    """One call of ranks_to_fit."""

    num_parameters: int
    unit_parameters: int
    gpu_bytes: int


def fitting(ranks: float, unit: int, room: int) -> Fits:
    """A model that takes about this many ranks, each with this room beside two whole units."""
    return Fits(round(ranks * room / truth.STATE_BYTES), unit, room + 4 * unit)


def fits() -> list[Fits]:
    """Fractions that are small and large, no fraction, one rank; no room, none at all, one byte."""
    unit = random.randint(10**8, 10**9)
    room = 2 ** random.randint(30, 34)  # so that every order of computing is exact at the limit
    n = random.randint(20, 60)
    return [
        fitting(n + 0.2, unit, random.randint(10**9, 10**10)),
        fitting(n + 0.9, unit, random.randint(10**9, 10**10)),
        fitting(n, unit, room),
        fitting(0.4, unit, room),
        fitting(1, unit, room),
        Fits(3 * unit, unit, 4 * unit),
        Fits(unit * n, unit, 4 * unit - 2),
        Fits(unit * n, unit, 3 * unit),
        Fits(unit * n, unit, unit),
        Fits(unit, unit, 14 * unit),
        fitting(3 * n + 0.4, 20 * unit, 2 * unit),
        fitting(random.randint(500, 900) + 0.6, unit // 40, unit),
    ]


def ranks_or_none(answer: object, case: Fits) -> object:
    """What one call gives; an error where None is asked for is told as such."""
    try:
        return called(answer, case)
    except ValueError as error:
        if case.gpu_bytes > 4 * case.unit_parameters:
            raise
        said = "Where no number of ranks will do, None is asked for, and no error."
        raise Wrong("a ValueError was raised", said, "return None") from error


def room_of(found: float | None, wanted: int | None, case: Fits) -> str:
    """What a rank would hold, against what it has."""
    if wanted is None:
        return "Two whole units alone leave no room on a GPU, however many ranks there are."
    if found is None or found < 1:
        return "There is a number of ranks that will do."
    state = truth.STATE_BYTES * case.num_parameters
    holds = {n: state / n + 4 * case.unit_parameters for n in (found, wanted)}
    parts = [
        f"on {show(n)} ranks, a rank holds {show(b / case.gpu_bytes, 6)} of its memory"
        for n, b in holds.items()
    ]
    said = ", and ".join(parts)
    return f"{said[0].upper()}{said[1:]}."


ROOM = "gpu_bytes - 2 * 2 * unit_parameters"
ALL_STATE = "-(-STATE_BYTES * num_parameters // room)"
UNITS = "Two units are whole, with 2 bytes per parameter: 2 * 2 * unit_parameters."
LIMIT = "16 N / ranks + 4 * unit_parameters must be at most gpu_bytes."
UP = "Round up: -(-a // b), or math.ceil(a / b)."
NO_ROOM = "Where two units fill the GPU, no room is left for a share: return None."
ranks_to_fit = Spec(
    todo="14.12",
    truth=truth.ranks_to_fit,
    cases=fits,
    observe=ranks_or_none,
    form=number_or_none,
    facts=room_of,
    tell=in_words("ranks_to_fit"),
    advice={"": LIMIT},
    reasons={"by zero": ("Two units fill the GPU exactly here.", NO_ROOM)},
    hints=(
        "A rank holds two things: its share of the state, which shrinks with the number of ranks, "
        "and two whole units, which do not.",
        "room = gpu_bytes - 2 * 2 * unit_parameters is left for a share of 16 N / ranks bytes. "
        "What if there is no room?",
        "Divide 16 N by the room, and round up.",
    ),
    mistakes=mistakes(
        """
        {ROOM} => gpu_bytes
            The whole units are left out. | {UNITS}
        {ROOM} => gpu_bytes - 2 * unit_parameters
            Only one unit is whole. | One computes while the next one comes. {UNITS}
        {ROOM} => gpu_bytes - 2 * 4 * unit_parameters
            The whole units have 4 bytes per parameter, but they are gathered in 16 bits. | {UNITS}
        {ROOM} => gpu_bytes - 2 * STATE_BYTES * unit_parameters
            The whole units have 16 bytes per parameter, but only their weights are gathered, in 16
            bits, which are 2 bytes. | {UNITS}
        {ROOM} => gpu_bytes / 2 - 2 * 2 * unit_parameters
            Half of the GPU is kept free, as in 14.10. | Here the state may fill the GPU.
        if room <= 0: => if room < 0:
            ! A room of 0 bytes is divided by. | {NO_ROOM}
        {ALL_STATE} => STATE_BYTES * num_parameters // room
            The number of ranks is rounded down, so a share does not fit. | {UP}
        {ALL_STATE} => STATE_BYTES * num_parameters // room + 1
            Where the shares fill the room exactly there is one rank too many. | {UP}
        {ALL_STATE} => STATE_BYTES * num_parameters / room
            The number of ranks is not rounded. | {UP}
        {ALL_STATE} => round(STATE_BYTES * num_parameters / room)
            The number of ranks is rounded to the nearest one. | {UP}
        STATE_BYTES * num_parameters => 2 * num_parameters
            Only the weights are shared, with 2 bytes each. | Each parameter needs STATE_BYTES = 16
            bytes with its gradient and optimizer state.
        {ALL_STATE} => 1 << (-(-STATE_BYTES * num_parameters // room) - 1).bit_length()
            The number of ranks is rounded up to a power of two. | Any whole number is allowed.
        return None => return 0
            Where no number of ranks will do, 0 is returned. | {NO_ROOM}
        """,
        globals(),
    ),
)
