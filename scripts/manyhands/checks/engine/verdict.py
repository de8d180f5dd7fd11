"""Judge an answer by what it does, beside the course's own function and beside mistakes made in it.

    cases --> truth    --> wanted --+
          --> answer   --> found  --+--> the same: done
          --> mistakes --> faces  --+--> one shows the same as the answer: that one is named
                                         none does: the first difference is told, and no cause

A mistake is named only if it shows what the answer shows on every rank in every step. Faults of the
machine are tried once more in new ranks; after that the answer is not judged.
"""

import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from manyhands.checks.engine.card import NotJudged, Wrong
from manyhands.checks.engine.mistakes import Mistake, generic, instead
from manyhands.checks.engine.spec import Spec, Step
from manyhands.checks.engine.trial import UNWAITED, Row, Sight, faces, look
from manyhands.checks.engine.values import same, show
from manyhands.checks.engine.words import own_frame, place, raised
from manyhands.ranks.failures import (
    Frame,
    MachineFault,
    RankFailed,
    RanksHung,
    is_echo,
    name_ranks,
    where,
)

VERDICT_S = 4.0  # for a verdict, of which trying mistakes takes what is left
NAMING_S = 2.5  # at the least
SURE_S = 1.0  # more, for one that shows the same at the first difference, to be tried in all steps
NO_CAUSE = "This is the first difference; it matches none of the mistakes that the check knows."
NO_TIME = "This is the first difference; the check did not have the time to try all it knows."
CONSTANT = Mistake(
    instead(lambda *args, **named: None),
    "The result is the same in every case, although what is given differs.",
    "Compute the result from the arguments.",
)
FEW = 3  # with fewer cases one result may be the same by chance
MOST_PAIRS = 200  # of mistakes, that are tried together
Words = tuple[str, str, str]  # what was seen, why, what to try


class Faces:
    """What mistakes show in the same cases; each is tried once, however many answers there are.

    Args:
        limit_s: for all mistakes that are tried for one answer.

    Attributes:
        ran_out: was there a mistake that could not be tried in that time?
    """

    def __init__(self, spec: Spec, cases: dict, limit_s: float) -> None:
        self.spec = spec
        self.cases = cases
        self.limit_s = limit_s
        self.begin()
        self.steps = spec.steps(cases)
        self._pairs: dict[int, list[Mistake]] = {}
        self._known: dict[int, dict[int, Row | None]] = {}  # mistake -> step -> None: it ended

    def begin(self) -> None:
        """An answer's time begins here."""
        self.until_s = time.monotonic() + self.limit_s
        self.ran_out = False

    @functools.cached_property
    def listed(self) -> list[Mistake]:
        """The exercise's own mistakes that can be tried."""
        return [mistake for mistake in self.spec.mistakes if not mistake.ends]

    @functools.cached_property
    def slips(self) -> list[Mistake]:
        """Slips of any function that can be tried."""
        slips = generic(self.spec.truth, talks=bool(self.spec.layouts))
        return [mistake for mistake in slips if not mistake.ends]

    def rounds(self, slips: bool) -> Iterator[list[Mistake]]:
        """A few mistakes at a time, those of any function last, if at all, and not made before."""
        yield from self._few(self.listed)
        if slips:
            yield from self._few(self.slips)

    def _few(self, mistakes: list[Mistake]) -> Iterator[list[Mistake]]:
        for first in range(0, len(mistakes), self.spec.at_once):
            yield mistakes[first : first + self.spec.at_once]

    def pairs(self, index: int, seen: list[bool | None]) -> list[Mistake]:
        """Two mistakes at once, of which at least one is `seen` in this step by itself.

        None stands for one that hangs, which two at once would do as well.
        """
        if index not in self._pairs:
            found = self._together(seen)
            self._pairs[index] = list(itertools.islice(found, MOST_PAIRS))
        return self._pairs[index]

    def _together(self, seen: list[bool | None]) -> Iterator[Mistake]:
        singles = [*self.listed, *self.slips]
        for one, other in itertools.combinations(range(len(seen)), 2):
            if None not in (seen[one], seen[other]) and (seen[one] or seen[other]):
                with suppress(LookupError):  # both change the same text
                    both = singles[one] + singles[other]
                    both.change.sources(self.spec.truth)
                    yield both

    def of(self, mistakes: list[Mistake], indexes: Iterable[int]) -> list[list[Row]]:
        """The rows of each mistake in these steps.

        Fewer where it ends or hangs the ranks, or where there was no time to try it.
        """
        indexes = tuple(indexes)
        lacking: dict[tuple[int, ...], list[Mistake]] = {}
        for mistake in mistakes:
            shown = self._known.setdefault(id(mistake), {})
            lacking.setdefault(tuple(i for i in indexes if i not in shown), []).append(mistake)
        for missing, new in lacking.items():
            steps = [self.steps[index] for index in missing]
            changes = [mistake.change for mistake in new] if steps else []
            left_s = max(0.0, self.until_s - time.monotonic())
            found = faces(self.spec, changes, steps, self.cases, left_s)
            self.ran_out |= len(found) < len(changes)
            for mistake, face in zip(new, found, strict=False):
                rows = itertools.chain(face, itertools.repeat(None))
                self._known[id(mistake)] |= zip(missing, rows, strict=False)
        every = [[self._known[id(mistake)].get(i) for i in indexes] for mistake in mistakes]
        return [list(itertools.takewhile(bool, face)) for face in every]


@dataclass
class Trial:
    """An answer tried beside the truth. `found` ends early where the ranks did.

    Args:
        slips: may slips of any function, and two mistakes at once, be named as well? A test of
            answers that are none of these saves their time.
    """

    spec: Spec
    answer: object
    faces: Faces
    wanted: list[Row]
    found: list[Row]
    failed: RankFailed | None
    slips: bool = True

    @property
    def steps(self) -> list[Step]:
        """Every case in every layout."""
        return self.faces.steps

    def case(self, index: int, rank: int) -> object:
        """What a rank was given in a step."""
        return self.spec.case(self.faces.cases, self.steps[index], rank)

    def said(self, index: int, rank: int) -> str:
        """The call of a rank in a step, in words."""
        return self.spec.words(self.steps[index], rank, self.case(index, rank))

    def is_right(self, found: Sight, index: int, rank: int) -> bool:
        """Is this sight as good as the truth's?"""
        wanted = self.wanted[index][rank]
        if found.kind != wanted.kind:
            return False
        if found.kind == "raised":
            return wanted.data[0][0] in found.data[0]
        if found.kind != "value" or not set(found.changed) <= set(wanted.changed):
            return False
        return self.spec.same(judged(found.data), judged(wanted.data), self.case(index, rank))

    def first_wrong(self, rows: list[Row]) -> tuple[int, int] | None:
        """The first step and rank in which these rows show something else than the truth."""
        for index, row in enumerate(rows):
            for rank, sight in enumerate(row):
                if not self.is_right(sight, index, rank):
                    return index, rank
        return None


def judged(data: object) -> object:
    """Without what is seen besides: it tells mistakes apart, and right answers may differ in it."""
    if isinstance(data, dict):
        return {name: value for name, value in data.items() if name != "besides"}
    return data


# ---- the verdict ----------------------------------------------------------------------------


def check(spec: Spec, answer: object) -> None:
    """Return if the answer is right.

    Raises:
        Wrong: with what was seen, the mistake that shows the same, and what to try.
        NotJudged: the machine was at fault, twice.
    """
    tell(attempt(spec, answer))


def tell(trial: Trial) -> None:
    """Return if the answer of a trial is right; raises as `check` does."""
    if trial.failed and trial.failed.failure.error == "NotImplementedError":
        raise trial.failed
    first = trial.first_wrong(trial.found)
    if first is not None:
        raise Wrong(*_words(trial, *first))
    if trial.failed:
        raise Wrong(*_words_of_an_end(trial))
    if len(trial.found) < len(trial.steps):
        said = trial.said(len(trial.found), 0)
        raise Wrong(f"{said} did not return", "A process left early, as sys.exit() makes it do.")


def attempt(spec: Spec, answer: object) -> Trial:
    """Try an answer beside the truth; a second time where the machine was at fault."""
    begin_s = time.monotonic()
    reasons = []
    for _ in range(2):
        cases = spec.draw()
        steps = spec.steps(cases)
        rows, failed = look(spec, [spec.truth, answer], steps, cases, spec.limit_s, quiet=False)
        wanted = rows[: len(steps)]
        if len(wanted) == len(steps) and not is_a_fault(failed):
            found = rows[len(steps) :]
            left_s = VERDICT_S - (time.monotonic() - begin_s)
            faces = Faces(spec, cases, max(NAMING_S, left_s))
            return Trial(spec, answer, faces, wanted, found, failed)
        reasons.append(" ".join(str(failed or "the ranks ended early").split()))
    remedy = "Run the check again."
    if reasons[0] == reasons[1]:
        remedy = "It was the same at a second try: mend that first, then run the check again."
    raise NotJudged(f"the machine did not let the check finish ({reasons[1]})", remedy)


def is_a_fault(failed: RankFailed | None) -> bool:
    """Did the machine end the ranks, so that nothing is known about the answer?"""
    if isinstance(failed, RanksHung):
        return failed.starved
    return isinstance(failed, MachineFault) or "SIGKILL" in str(failed and failed.failure.message)


# ---- naming a mistake -----------------------------------------------------------------------


def name(trial: Trial, index: int) -> Mistake | None:
    """The mistake that shows what the answer shows, everywhere; else two at once that do.

    Slips are tried only where no mistake of the exercise's own fits, and pairs after them. On an
    answer that gives one value always they say nothing: half of 1, rounded down, is 0 as well.
    """
    faces = trial.faces
    faces.begin()
    is_constant = _is_constant(trial)
    seen: list[bool | None] = []
    for tried in faces.rounds(trial.slips and not is_constant):
        heads = faces.of(tried, [index])
        if named := best(trial, _near(trial, tried, heads, index)):
            return named
        seen += [_is_seen(trial, face, index) for face in heads]
    if is_constant:
        return CONSTANT
    is_value = all(sight.kind == "value" for sight in trial.found[index])
    if not is_value or trial.spec.layouts or not trial.slips:
        return None
    pairs = faces.pairs(index, seen)
    return best(trial, _near(trial, pairs, faces.of(pairs, [index]), index))


def _is_constant(trial: Trial) -> bool:
    """Is the answer's value the same in many cases in which the right ones differ?"""
    rows = zip(itertools.chain(*trial.found), itertools.chain(*trial.wanted), strict=False)
    values = [(one, right) for one, right in rows if right.kind == "value"]
    if len(values) < FEW or any(one.kind != "value" for one, _ in values):
        return False
    (first, right), *others = values
    return all(same(one.data, first.data) for one, _ in others) and not all(
        same(other.data, right.data) for _, other in others
    )


def _near(trial: Trial, tried: list[Mistake], heads: list, index: int) -> list[Mistake]:
    """Those of the mistakes that show in this step what the answer shows."""
    return [m for m, face in zip(tried, heads, strict=True) if matches(trial, m, face, [index])]


def best(trial: Trial, near: list[Mistake]) -> Mistake | None:
    """The first that shows the same in all steps; or, where parts are independent, in one part."""
    indexes = range(len(trial.found))
    if near:
        trial.faces.until_s = max(trial.faces.until_s, time.monotonic() + SURE_S)
    full = trial.faces.of(near[:20], indexes)
    parts = [None]
    if trial.spec.independent:
        parts.append(_wrong_part(trial))
    for part in parts:
        for mistake, face in zip(near, full, strict=False):
            if matches(trial, mistake, face, indexes, part):
                return mistake
    return None


def matches(
    trial: Trial,
    mistake: Mistake,
    face: list[Row],
    indexes: Sequence[int],
    part: str | None = None,
) -> bool:
    """Does the mistake show what the answer shows in these steps, and not what is right?

    Args:
        part: of a dict; None compares the whole, and with independent parts in a single step it is
            enough that the first wrong part is the same.
    """
    if len(face) < len(indexes):
        return False
    pairs = list(zip(indexes, face, strict=False))
    if mistake.fits:
        return all(_fits(trial, mistake, index) for index in indexes)
    if all(_is_right_row(trial, row, index) for index, row in pairs):
        return False
    if part is None and len(indexes) == 1 and trial.spec.independent:
        first = _wrong_part(trial)
        if any(_alike_row(trial, i, row, None) for i, row in pairs):
            return True
        part = first
    if part is not None and not all(_adds_no_fault(trial, i, row) for i, row in pairs):
        return False
    return all(_alike_row(trial, index, row, part) for index, row in pairs)


def _adds_no_fault(trial: Trial, index: int, shown: Row) -> bool:
    """Is every part that is wrong by a mistake wrong in the answer, too?"""
    rows = zip(trial.found[index], shown, trial.wanted[index], strict=True)
    for found, other, wanted in rows:
        if not found.kind == other.kind == wanted.kind == "value":
            if not alike(found, other, wanted):
                return False
            continue
        for part, value in judged(wanted.data).items():
            by_mistake = not same(other.data.get(part), value)
            if by_mistake and same(found.data.get(part), value):
                return False
    return True


def _fits(trial: Trial, mistake: Mistake, index: int) -> bool:
    for rank, sight in enumerate(trial.found[index]):
        is_of_this_way = sight.kind == "value" and mistake.fits(sight.data, trial.case(index, rank))
        if not is_of_this_way and not trial.is_right(sight, index, rank):
            return False
    return True


def _is_right_row(trial: Trial, row: Row, index: int) -> bool:
    return all(trial.is_right(sight, index, rank) for rank, sight in enumerate(row))


def _is_seen(trial: Trial, face: list[Row], index: int) -> bool | None:
    return not _is_right_row(trial, face[0], index) if face else None


def _alike_row(trial: Trial, index: int, shown: Row, part: str | None) -> bool:
    rows = zip(trial.found[index], shown, trial.wanted[index], strict=True)
    return all(alike(found, other, wanted, part) for found, other, wanted in rows)


def alike(one: Sight, other: Sight, wanted: Sight, part: str | None = None) -> bool:
    """Do two sights show the same? Of an error that is asked for the message does not count."""
    if one.kind != other.kind:
        return False
    if one.kind == "raised":
        names, message = one.data
        other_names, other_message = other.data
        return names[0] == other_names[0] and (wanted.kind == "raised" or message == other_message)
    if part is not None:
        if one.kind == "value" and part not in one.data and part not in other.data:
            return True  # this step does not show that part
        if one.kind != "value" or part not in one.data or part not in other.data:
            return False
        return same(one.data[part], other.data[part])
    return same(one.data, other.data)


def _wrong_part(trial: Trial) -> str | None:
    """The first part that is wrong, where values are dicts."""
    first = trial.first_wrong(trial.found)
    if first is None:
        return None
    index, rank = first
    found = trial.found[index][rank]
    wanted = trial.wanted[index][rank]
    if found.kind != "value" or wanted.kind != "value" or not isinstance(wanted.data, dict):
        return None
    for part, value in judged(wanted.data).items():
        if not same(found.data.get(part), value):
            return part
    return None


# ---- words ----------------------------------------------------------------------------------


def _colon(said: str, seen: str) -> str:
    """The call and what was seen; the words for a call may end in a comma."""
    return f"{said.rstrip(',')}: {seen}"


def _words(trial: Trial, index: int, rank: int) -> Words:
    """Seen, why and hint for the first rank that is wrong."""
    spec = trial.spec
    sight = trial.found[index][rank]
    wanted = trial.wanted[index][rank]
    said = trial.said(index, rank)
    if sight.kind == "told":
        seen, why, hint = sight.data
        return f"{said} {seen}" if seen.startswith("gives") else _colon(said, seen), why, hint
    if is_lost(sight):
        at = place(sight.failure, trial.answer)
        return _colon(said, f"a rank waited{at} for partners that had already left"), *PARTED
    if sight.kind == "value" and wanted.kind == "value":
        changed = set(sight.changed) - set(wanted.changed)
        if UNWAITED in changed or _is_only_changed(trial, index, rank):
            return _words_of_a_change(said, changed)
    mistake = name(trial, index)
    if mistake is None and sight.kind == "value" and set(sight.changed) - set(wanted.changed):
        return _words_of_a_change(said, set(sight.changed) - set(wanted.changed))
    cause = (mistake.why, mistake.hint) if mistake else None
    if sight.kind == "raised":
        return _words_of_an_error(spec, said, sight, wanted, trial.answer, cause)
    if sight.kind == "lost":
        hint = "Every send needs its recv: write down who sends to whom in each step."
        return _colon(said, sight.data), *(cause or (_no_cause(trial), hint))
    if wanted.kind == "raised":
        return f"{said} raises nothing and gives {show(sight.data)}", *(cause or spec.refusal)
    seen = f"{said} {spec.say(judged(sight.data), judged(wanted.data))}"
    if cause is None:
        fact = spec.facts(judged(sight.data), judged(wanted.data), trial.case(index, rank))
        cause = fact or _no_cause(trial), _advice(spec, _wrong_part(trial))
    return seen, *cause


PARTED = ("Not all ranks made the same calls.", "Look for a call that only some ranks reach.")


def _no_cause(trial: Trial) -> str:
    return NO_TIME if trial.faces.ran_out else NO_CAUSE


def _advice(spec: Spec, part: str | None) -> str:
    hint = f"check.hint('{spec.todo}') prints a hint."
    return spec.advice.get(part or "", spec.advice.get("", hint))


def is_lost(sight: Sight) -> bool:
    """Did this rank wait for others who had left?"""
    return sight.kind == "raised" and is_echo(sight.failure)


def _is_only_changed(trial: Trial, index: int, rank: int) -> bool:
    """Is the value right, and only something beside it has changed?"""
    sight = trial.found[index][rank]
    wanted = trial.wanted[index][rank]
    case = trial.case(index, rank)
    return trial.spec.same(judged(sight.data), judged(wanted.data), case)


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


def _words_of_an_error(spec, said, sight, wanted, answer, cause) -> Words:
    seen, *known = raised(said, sight.failure, answer, spec.reasons)
    if wanted.kind == "raised":
        right = wanted.data[0][0]
        other = f"The docstring asks for a {right} here, and callers catch only that."
        return seen, *(cause or (other, f"raise {right}(...)"))
    return seen, *(cause or known)


def _words_of_an_end(trial: Trial) -> Words:
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
