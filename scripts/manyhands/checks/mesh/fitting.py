"""14.11: how many ranks FSDP needs."""

import math
import random

from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import show
from manyhands.checks.mesh.calls import called, in_words, number_or_none
from manyhands.mesh import choosing as truth

WHOLE_BYTES = 6  # of a parameter of a unit: the weights of two units, and the gradients of one


def fitting(ranks: float, unit: int, room: int) -> Call:
    """A model that takes about this many ranks, each with this room beside what is whole."""
    whole = WHOLE_BYTES * unit
    return (round(ranks * room / truth.STATE_BYTES), unit, room + whole)


def fits() -> list[Call]:
    """Fractions that are small and large, no fraction, one rank; no room, none at all, one byte."""
    unit = random.randint(10**8, 10**9)
    room = 2 ** random.randint(30, 34)  # so that every order of computing is exact at the limit
    n = random.randint(20, 60)
    odd = 16 * random.randint(10**7, 10**8) + 15  # bytes: a whole number of parameters and a half
    return [
        fitting(n + 0.2, unit, random.randint(10**9, 10**10)),
        fitting(n + 0.9, unit, random.randint(10**9, 10**10)),
        fitting(n, unit, room),
        fitting(0.4, unit, room),
        fitting(1, unit, room),
        (3 * unit, unit, 6 * unit),
        (unit * n, unit, 6 * unit - 2),
        (unit * n, unit, 5 * unit),
        (unit * n, unit, unit),
        (unit, unit, 16 * unit),
        fitting(3 * n + 0.4, 20 * unit, 2 * unit),
        fitting(random.randint(500, 900) + 0.6, unit // 40, unit),
        (2 * odd, unit, odd + 6 * unit),  # 32 ranks, of which none has a whole number
        fitting(random.randint(150_000, 200_000) + 0.6, unit, 10**8),
    ]


def ranks_or_none(answer: object, case: Call) -> object:
    """What one call gives; an error where None is asked for is told as such."""
    try:
        return called(answer, case)
    except ValueError as error:
        if case.gpu_bytes > WHOLE_BYTES * case.unit_parameters:
            raise
        said = "Where no number of ranks will do, None is asked for, and no error."
        raise Wrong("a ValueError was raised", said, "return None") from error


def room_of(found: float | None, wanted: int | None, case: Call) -> str:
    """What a rank would hold, against what it has."""
    if wanted is None:
        return "What is whole leaves no room on a GPU, however many ranks there are."
    if found is not None and found != found // 1:
        return "A number of ranks is whole."
    state = truth.STATE_BYTES * case.num_parameters
    whole = WHOLE_BYTES * case.unit_parameters
    ranks = [found, wanted] if found and 1 <= found < math.inf else [wanted]
    parts = [
        f"{show((state / n + whole) / case.gpu_bytes)} times its memory on "
        f"{show(n)} {'rank' if n == 1 else 'ranks'}"
        for n in ranks
    ]
    return f"A rank needs {', and '.join(parts)}."


ROOM = "gpu_bytes - 3 * 2 * unit_parameters"
ALL_STATE = "-(-STATE_BYTES * num_parameters // room)"
UNITS = "Whole are the weights of two units and the gradients of one: 3 * 2 * unit_parameters."
LIMIT = "16 N / ranks + 6 * unit_parameters must be at most gpu_bytes."
NO_ROOM = "Where the whole units fill the GPU, no room is left for a share: return None."
ranks_to_fit = Spec(
    todo="14.11",
    truth=truth.ranks_to_fit,
    cases=fits,
    observe=ranks_or_none,
    form=number_or_none,
    facts=room_of,
    tell=in_words("ranks_to_fit"),
    advice={"": LIMIT},
    reasons="""
        by zero :: The whole units fill the GPU exactly here. | {NO_ROOM}
    """,
    hints=(
        "A rank holds two things: its share of the state, which shrinks with the number of ranks, "
        "and whole units, which do not.",
        "room = gpu_bytes - 3 * 2 * unit_parameters is left for a share of 16 N / ranks bytes. "
        "What if there is no room?",
        "Divide 16 N by the room, and round up.",
    ),
    mistakes="""
        {ROOM} => gpu_bytes :: The whole units are left out. | {UNITS}
        {ROOM} => gpu_bytes - 2 * unit_parameters ::
            Only one unit is whole. | One computes while the next one comes. {UNITS}
        {ROOM} => gpu_bytes - 2 * 2 * unit_parameters ::
            The whole gradients of one unit are left out, or the weights of one. | {UNITS}
        {ROOM} => gpu_bytes - 4 * 2 * unit_parameters :: The gradients of two units are whole. |
            Those of a unit are reduced before the next ones are complete. {UNITS}
        {ROOM} => gpu_bytes - 3 * 4 * unit_parameters ::
            The whole units have 4 bytes per parameter, but they are gathered in 16 bits. | {UNITS}
        {ROOM} => gpu_bytes - 2 * STATE_BYTES * unit_parameters ::
            The whole units have 16 bytes per parameter, but their optimizer state is never whole.
        {ROOM} => gpu_bytes / 2 - 3 * 2 * unit_parameters ::
            Half of the GPU is kept free, as in 14.9. | Here the state may fill the GPU.
        if room <= 0: => if room < 0: :: ! A room of 0 bytes is divided by. | {NO_ROOM}
        {ALL_STATE} => STATE_BYTES * num_parameters // room :: The number of ranks is rounded down,
            so a share does not fit. | Round up: -(-a // b), or math.ceil(a / b).
        {ALL_STATE} => STATE_BYTES * num_parameters // room + 1 ::
            Where the shares fill the room exactly there is one rank too many.
        {ALL_STATE} => STATE_BYTES * num_parameters / room :: The number of ranks is not rounded.
        {ALL_STATE} => round(STATE_BYTES * num_parameters / room) ::
            The number of ranks is rounded to the nearest one.
        STATE_BYTES * num_parameters => 2 * num_parameters ::
            Only the weights are shared, with 2 bytes each. | Each parameter needs STATE_BYTES = 16
            bytes with its gradient and optimizer state.
        {ALL_STATE} => 1 << (-(-STATE_BYTES * num_parameters // room) - 1).bit_length() ::
            The number of ranks is rounded up to a power of two. | Any whole number is allowed.
        return None => return 0 :: Where no number of ranks will do, 0 is returned. | {NO_ROOM}
    """,
    module=globals(),
)
