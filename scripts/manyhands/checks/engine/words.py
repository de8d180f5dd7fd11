"""Where an answer failed, in the learner's own lines, and what some errors are known to mean."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from manyhands.checks.engine.answer import lines_of
from manyhands.ranks.failures import Failure, Frame, where

PACKAGE = str(Path(__file__).parents[2])
KNOWN_ERRORS = {  # words of an error -> what it means, and what to try
    "incompatible function arguments": (
        "An argument of a collective is of the wrong kind; the second one of all_reduce is `op`.",
        "Give the group by its name: group=group.",
    ),
    "'NoneType' object has no attribute 'wait'": (
        "Without async_op=True a collective waits itself and returns None.",
        "Pass async_op=True where you keep the work.",
    ),
    "object is not an iterator": (
        "A function with @contextmanager has to yield.",
        "Write `yield` where the body of the `with` has its place.",
    ),
    "returned non-iterator": ("__iter__ has to return an iterator.", "Return iter(...), or yield."),
    "not part of group": (
        "src counts over the whole job, and that rank is not in the group.",
        "group_src=0 names the group's first rank.",
    ),
    "process group has not been initialized": (
        "There is no process group here, so the one process is rank 0.",
        "Ask dist.is_initialized() first.",
    ),
    "BdbQuit": ("A debugger cannot ask you anything from inside a rank.", "Use print instead."),
}


def place(failure: Failure, answer: object = None) -> str:
    """Where it went wrong: in the answer itself, or else in what it calls."""
    frame = own_frame(failure.frames, answer)
    return f" in{where(frame).replace('  line', ' line', 1)}" if frame else ""


def own_frame(frames: Sequence[Frame], answer: object = None) -> Frame | None:
    """The innermost line of the answer itself, or else of what is not the course's.

    A rank that fails or waits inside a function that was given, such as `exchange`, does so in the
    line of the answer that called it.
    """
    own = lines_of(answer)
    mine = [frame for frame in frames if frame[:2] in own]
    mine = mine or [frame for frame in frames if not frame[0].startswith(PACKAGE)]
    return mine[-1] if mine else None


def raised(
    who: str, failure: Failure, answer: object, reasons: Mapping[str, tuple[str, str]]
) -> tuple[str, str, str]:
    """An exception, or a death, of a rank or of a call as what was seen, why, and a hint.

    Args:
        reasons: of the exercise; of these and of the errors that are known anyway, the one that
            quotes most of the message counts.
    """
    message = re.sub(r" <\S+ object at 0x\w+>", "", " ".join(failure.message.split()))[:300]
    said = f"{failure.error}: {message}"
    known = KNOWN_ERRORS | dict(reasons)
    quoted = [words for words in known if words in said]
    why, hint = known[max(quoted, key=len)] if quoted else ("", "")
    did = "died" if failure.error == "died" else f"raised {failure.error}"
    return f"{who} {did}: {message}{place(failure, answer)}", why, hint
