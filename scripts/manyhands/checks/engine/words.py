"""What a verdict says: what was seen, why, and what to try; where, in the learner's own lines."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from manyhands.checks.engine.answer import lines_of
from manyhands.checks.engine.attempt import Trial, judged
from manyhands.checks.engine.naming import name, wrong_part
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.tables import reasons
from manyhands.checks.engine.trial import UNWAITED, Outcome
from manyhands.checks.engine.values import show
from manyhands.ranks.failures import Failure, Frame, RanksHung, is_echo, name_ranks, where

Words = tuple[str, str, str]  # what was seen, why, what to try
NO_CAUSE = "This is the first difference; it matches none of the mistakes that the check knows."
NO_TIME = "This is the first difference; the check did not have the time to try all it knows."
PACKAGE = str(Path(__file__).parents[2])
KNOWN_ERRORS = reasons(  # in any lesson; an exercise's own reason for the same words goes first
    """
    incompatible function arguments :: An argument of a collective is of the wrong kind; the second
        one of all_reduce is `op`. | Give the group by its name: group=group.
    'NoneType' object has no attribute 'wait' :: Without async_op=True a collective waits itself and
        returns None. | Pass async_op=True where you keep the work.
    object is not an iterator :: A function with @contextmanager has to yield. | Write `yield` where
        the body of the `with` has its place.
    returned non-iterator :: __iter__ has to return an iterator. | Return iter(...), or yield.
    not part of group :: src counts over the whole job, and that rank is not in the group. |
        group_src=0 names the group's first rank.
    process group has not been initialized :: There is no process group here, so the one process is
        rank 0. | Ask dist.is_initialized() first.
    BdbQuit :: A debugger cannot ask you anything from inside a rank. | Use print instead.
    is being used in an in-place :: Autograd does not let a parameter be changed in place while it
        records. | Write into param.detach(), or inside `with torch.no_grad():`.
    incorrect number of gradients :: backward returns one entry for each argument of forward after
        ctx. | Return None for each that has no gradient, as a group or a function.
    save_for_backward :: save_for_backward takes only tensors. | Keep everything else as an
        attribute: ctx.group = group.
    through the graph a second time :: Backward went through a graph that had been used already. |
        Call it once for each forward.
    expected a non-empty list of Tensors :: There is nothing to pack. A generator, for example, can
        be gone through only once. | Keep what you go through twice in a list.
    maximum recursion :: A call ends in the same call again, without end. | Call what you were
        given, or the base class, and not what you are writing.
    """,
    {},
)

# ---- of a difference --------------------------------------------------------------------------


def _colon(said: str, seen: str) -> str:
    """The call and what was seen; the words for a call may end in a comma."""
    return f"{said.rstrip(',')}: {seen}"


def words_of(trial: Trial, index: int, rank: int) -> Words:
    """Seen, why and hint for the first rank that is wrong."""
    spec = trial.spec
    outcome = trial.found[index][rank]
    wanted = trial.wanted[index][rank]
    said = trial.said(index, rank)
    if outcome.kind == "explained":
        seen, why, hint = outcome.data
        return f"{said} {seen}" if seen.startswith("gives") else _colon(said, seen), why, hint
    if is_lost(outcome):
        at = place(outcome.failure, trial.answer)
        return _colon(said, f"a rank waited{at} for partners that had already left"), *PARTED
    if outcome.kind == "value" and wanted.kind == "value":
        changed = set(outcome.changed) - set(wanted.changed)
        if UNWAITED in changed or _is_only_changed(trial, index, rank):
            return _words_of_a_change(said, changed)
    mistake = name(trial, index)
    if mistake is None and outcome.kind == "value" and set(outcome.changed) - set(wanted.changed):
        return _words_of_a_change(said, set(outcome.changed) - set(wanted.changed))
    cause = (mistake.why, mistake.hint) if mistake else None
    if outcome.kind == "raised":
        return _words_of_an_error(spec, said, outcome, wanted, trial.answer, cause)
    if outcome.kind == "lost":
        hint = "Every send needs its recv: write down who sends to whom in each step."
        return _colon(said, outcome.data), *(cause or (_no_cause(trial), hint))
    if wanted.kind == "raised":
        return f"{said} raises nothing and gives {show(outcome.data)}", *(cause or spec.refusal)
    seen = f"{said} {spec.say(judged(outcome.data), judged(wanted.data))}"
    if cause is None:
        fact = spec.facts(judged(outcome.data), judged(wanted.data), trial.case(index, rank))
        cause = fact or _no_cause(trial), _advice(spec, wrong_part(trial))
    return seen, *cause


PARTED = ("Not all ranks made the same calls.", "Look for a call that only some ranks reach.")


def _no_cause(trial: Trial) -> str:
    return NO_TIME if trial.candidates.ran_out else NO_CAUSE


def _advice(spec: Spec, part: str | None) -> str:
    hint = f"check.hint('{spec.todo}') prints a hint."
    return spec.advice.get(part or "", spec.advice.get("", hint))


def is_lost(outcome: Outcome) -> bool:
    """Did this rank wait for others who had left?"""
    return outcome.kind == "raised" and is_echo(outcome.failure)


def _is_only_changed(trial: Trial, index: int, rank: int) -> bool:
    """Is the value right, and only something beside it has changed?"""
    outcome = trial.found[index][rank]
    wanted = trial.wanted[index][rank]
    case = trial.case(index, rank)
    return trial.spec.same(judged(outcome.data), judged(wanted.data), case)


def _words_of_a_change(said: str, changed: set[str]) -> Words:
    what = UNWAITED if UNWAITED in changed else sorted(changed)[0]
    if what == UNWAITED:
        seen = f"{said} returned while a message of its own was still on its way"
        hint = "Call wait() on what a call with async_op=True, isend or irecv returns."
        return seen, "Until wait() has returned, the tensor may still change.", hint
    if what.startswith("`"):
        seen = f"after {said} the caller's {what} has changed"
        return seen, "The caller still needs it as it was.", "Work on a copy, or build a new one."
    seen = f"{said} left {what} changed"
    hint = "Use an object of your own, such as a Generator, or put back what was there before."
    return seen, "Other parts of the program depend on it.", hint


def _words_of_an_error(spec, said, outcome, wanted, answer, cause) -> Words:
    seen, *known = raised(said, outcome.failure, answer, spec.reasons)
    if wanted.kind == "raised":
        right = wanted.data[0][0]
        other = f"The docstring asks for a {right} here, and callers catch only that."
        return seen, *(cause or (other, f"raise {right}(...)"))
    return seen, *(cause or known)


def words_of_an_end(trial: Trial) -> Words:
    """A hang, a death, or an error of one rank that left the others waiting."""
    failed = trial.failed
    index = min(len(trial.found), len(trial.steps) - 1)
    said = trial.said(index, failed.rank)
    if isinstance(failed, RanksHung):
        return _words_of_a_hang(said, failed, trial.answer, trial.spec.waits)
    if failed.failure.error == "Wrong":
        return _colon(said, failed.failure.message), "", _advice(trial.spec, None)
    if is_echo(failed.failure):
        at = place(failed.failure, trial.answer)
        return _colon(said, f"rank {failed.rank} waited{at} for a partner that had left"), *PARTED
    return raised(said, failed.failure, trial.answer, trial.spec.reasons)


def _words_of_a_hang(
    said: str, failed: RanksHung, answer: object, waits: Mapping[str, tuple[str, str]]
) -> Words:
    """Who waits and who computes, and where; a cause only where the exercise has one for a line."""
    if len(failed.stacks) + len(failed.finished) == 1:
        lines = [_line(stack, answer) for stack in failed.stacks.values() if stack]
        at = f": it is still in{lines[0]}" if lines else ""
        return f"{said} never ended{at}", "", "What ends the loop, or the wait, in that line?"
    parts = []
    away = list(failed.finished)
    for rank, stack in failed.stacks.items():
        if not stack:
            away.append(rank)
            continue
        does = "computes" if rank in failed.computing else "waits"
        parts.append(f"rank {rank} {does} in{_line(stack, answer)}")
    if away:
        have = "has" if len(away) == 1 else "have"
        parts.append(f"{name_ranks(sorted(away))} {have} left the function")
    seen = f"{said} never ended ({'; '.join(parts)})"
    if any(rank in failed.computing for rank in failed.stacks):
        return seen, "A rank still computes.", "What ends the loop in that line, on every rank?"
    waiting = (
        "All ranks that are left wait.",
        "For each line: which rank has to come, or to send?",
    )
    return seen, *next((words for call, words in waits.items() if call in seen), waiting)


def _line(stack: Sequence[Frame], answer: object) -> str:
    """The line of the answer that a rank is in, and not that of a helper which it called."""
    return where(own_frame(stack, answer) or stack[-1])[1:]


# ---- of an error, and its place ---------------------------------------------------------------


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
