"""Exercises 5.1 and 5.2: letters for the steps of training. Wrong ones are told by looking."""

from manyhands.checks.engine.mistakes import Mistake, mistakes, patch
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import Malformed, malformed
from manyhands.data_parallel import loops
from manyhands.data_parallel.loops import CHANGES, STEPS

# ---- 5.1 ------------------------------------------------------------------------------------

ORDER = (  # a step, one that has to come later, and why; all other orders are free
    ("E", "L", "The weights have to be there before they can be copied."),
    ("E", "B", "The program has to start before it can read."),
    ("B", "O", "Samples have to be read before they can be decoded."),
    ("O", "J", "A batch is stacked from samples that are decoded already."),
    ("J", "F", "One copy moves the whole batch, so it has to be stacked first."),
    ("F", "I", "The GPU computes with what is in its own memory."),
    ("L", "I", "Forward computes on the GPU, with weights in GPU memory."),
    ("I", "M", "Forward goes from the first layer to the last."),
    ("M", "A", "The loss compares the last layer's output with the targets."),
    ("A", "G", "Backward starts from the loss."),
    ("G", "K", "Backward reaches the last layer first, because the chain rule starts at the loss."),
    ("K", "C", "The optimizer can step only when all gradients are there."),
    ("C", "H", "AdamW makes the step out of its moments, so it updates them first."),
    ("A", "D", "A loss has to be computed before it can be copied."),
    ("H", "N", "The next batch comes after the step."),
    ("D", "N", "The loss of this batch is copied before the loop goes on."),
)
NEEDS = "Ask of each step what it needs, and which step makes that."
Violation = tuple[str, str, str]


def as_order(value: object) -> list[str]:
    """All 15 letters, each once."""
    if not isinstance(value, str | list | tuple):
        raise malformed(value, "one text of 15 letters", 'Return "E...".')
    for letter in value:
        if not isinstance(letter, str) or letter not in STEPS:
            why = f"The steps are {''.join(STEPS)}, in capital letters."
            raise Malformed(f"{letter!r}, which is none of the 15 steps", why)
    for letter, text in STEPS.items():
        if (count := list(value).count(letter)) != 1:
            told = "is missing" if count == 0 else f"occurs {count} times"
            why = "Each of the 15 letters has to occur exactly once."
            raise Malformed(f"an order in which step {letter} ({text}) {told}", why)
    return list(value)


def first_violation(order: list[str]) -> Violation | None:
    """The first step that stands before one that it needs."""
    return next((v for v in ORDER if order.index(v[0]) > order.index(v[1])), None)


def say_order(found: list[str], wanted: list[str]) -> str:
    """Which step stands before which other one."""
    first, later, _ = first_violation(found)
    return f"puts {later} ({STEPS[later]}) before {first} ({STEPS[first]})"


def turned(first: str, later: str) -> Mistake:
    """The mistake of putting a step before one that it needs."""
    old = next(v for v in ORDER if v[:2] == (first, later))
    text = loops.order_of_steps()
    order = text.replace(later, "").replace(first, later + first)
    return Mistake(
        patch(text, order),
        old[2],
        NEEDS,
        fits=lambda found, case: (first_violation(found) or old)[:2] == (first, later),
    )


order_of_steps = Spec(
    todo="5.1",
    truth=loops.order_of_steps,
    cases=lambda: [()],
    form=as_order,
    same=lambda found, wanted, case: first_violation(found) is None,
    say=say_order,
    facts=lambda found, wanted, case: first_violation(found)[2],
    advice={"": NEEDS},
    hints=(
        "Start with the program (E), and end with control going back to the loop (N).",
        "There are four groups: get the batch to the GPU (B, O, J, F); forward and loss; backward; "
        "optimizer. Two copies stand beside them: that of the weights, and that of the loss.",
        "Backward runs through the layers in the opposite order of forward. The weights may go to "
        "the GPU at any time before forward, the loss to the CPU at any time after it is computed.",
    ),
    mistakes=[turned(first, later) for first, later in ("GK", "CH", "OJ", "JF", "IM", "KC", "DN")],
)

# ---- 5.2 ------------------------------------------------------------------------------------

LURES = {  # of a change: wrong steps -> why they are wrong; the steps left out are right
    "share": {
        "OJFI": "A rank that drops samples after reading them has still read the whole batch.",
        "EL": "Every rank holds the whole model, and only the samples are dealt out.",
        "N": "The next batch is another one, and this batch's samples are touched long before.",
        "MAGKCHD": "By then each rank has already computed with its samples.",
    },
    "equal": {
        "E": "That is when the weights come to differ. Which step waits until they are equal?",
        "BOJF": "Samples can be read before the weights are equal.",
        "MAGKCHDN": "By then the first layer has already computed with unequal weights.",
    },
    "mean": {
        "GK": "A message may start there, but backward goes on without its result. Which step is "
        "the first that cannot?",
        "ELBOJFIMA": "At that point there is no gradient yet.",
        "H": "By then the moments are already made from this rank's own gradients.",
        "DN": "The step of the optimizer needs the mean, and it comes before.",
    },
    "once": {
        "A": "Each rank still computes the loss of its own samples, and waits for nobody.",
        "ELBOJFIM": "At that point there is no loss yet.",
        "GKCHN": "That step needs no printed loss: each rank's own loss is enough for it.",
    },
}
GO_THROUGH = (
    "Go through the 15 steps in order, and stop at the first one that would come out "
    "differently, or that has to wait."
)


def as_changes(value: object) -> dict[str, str]:
    """One letter for each of the four changes."""
    if not isinstance(value, dict) or set(value) != set(CHANGES):
        hint = f"Return {{{', '.join(f'{name!r}: ...' for name in CHANGES)}}}."
        raise malformed(value, "a dict with the four names of CHANGES", hint)
    for name, letter in value.items():
        if not isinstance(letter, str) or letter not in STEPS:
            why = "Each change has one letter of a step, a capital one: the first step alone."
            raise Malformed(f"{letter!r} for {name!r}", why)
    return {name: value[name] for name in CHANGES}


def wrong_change(found: dict[str, str]) -> tuple[str, str] | None:
    """The first change with a wrong step, and why that is wrong."""
    for name, letter in found.items():
        for letters, why in LURES[name].items():
            if letter in letters:
                return name, why
    return None


def say_change(found: dict[str, str], wanted: dict[str, str]) -> str:
    """The first change with a wrong step."""
    name, _ = wrong_change(found)
    letter = found[name]
    return f"gives {letter} ({STEPS[letter]}) for {name!r} ({CHANGES[name]})"


steps_that_change = Spec(
    todo="5.2",
    truth=loops.steps_that_change,
    cases=lambda: [()],
    form=as_changes,
    same=lambda found, wanted, case: wrong_change(found) is None,
    say=say_change,
    facts=lambda found, wanted, case: wrong_change(found)[1],
    advice={name: GO_THROUGH for name in ("", *CHANGES)},
    hints=(
        "For each change ask: what does it need, and which step is the first to use what it makes?",
        "A change stands as late as it may: right before the first step that cannot do without it.",
        "Samples are first touched by B; weights are first used by forward; gradients are first "
        "used by the optimizer; the loss is used where it is printed.",
    ),
    mistakes=mistakes(
        f"""
        "share": "B" => "share": "J"
            {LURES["share"]["OJFI"]} | {GO_THROUGH}
        "equal": "L" => "equal": "E"
            {LURES["equal"]["E"]}
        "mean": "C" => "mean": "G"
            {LURES["mean"]["GK"]}
        "mean": "C" => "mean": "H"
            {LURES["mean"]["H"]}
        "once": "D" => "once": "A"
            {LURES["once"]["A"]}
        """,
        {},
    ),
)
