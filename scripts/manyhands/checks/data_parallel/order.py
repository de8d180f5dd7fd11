"""Exercises 5.1 and 5.2: letters for the steps of training. Wrong ones are told by looking."""

from manyhands.checks.engine.mistakes import Mistake, patch
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import Malformed, malformed
from manyhands.data_parallel import loops
from manyhands.data_parallel.loops import CHANGES, STEPS

# ---- 5.1 ------------------------------------------------------------------------------------

ORDER = (  # a step, one that has to come later, and why; all other orders are free
    ("D", "A", "Forward computes with the weights, so the model has to be there."),
    ("G", "F", "Samples have to be read before they can be copied to the GPU."),
    ("F", "A", "The GPU computes with what is in its own memory."),
    ("A", "H", "Backward starts from the loss, which forward computes."),
    ("H", "E", "Backward reaches the last layer first, because the chain rule starts at the loss."),
    ("E", "C", "The optimizer can step only when all gradients are there."),
    ("A", "B", "A loss has to be computed before it can be copied."),
)
NEEDS = "Ask of each step what it needs, and which step makes that."
Violation = tuple[str, str, str]


def as_order(value: object) -> list[str]:
    """All 8 letters, each once."""
    if not isinstance(value, str | list | tuple):
        raise malformed(value, "one text of 8 letters", 'Return "ABCDEFGH" in another order.')
    for letter in value:
        if not isinstance(letter, str) or letter not in STEPS:
            why = f"The steps are {''.join(STEPS)}, in capital letters."
            raise Malformed(f"{letter!r}, which is none of the 8 steps", why)
    for letter, text in STEPS.items():
        if (count := list(value).count(letter)) != 1:
            told = "is missing" if count == 0 else f"occurs {count} times"
            why = "Each of the 8 letters has to occur exactly once."
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
        "Write down for each step what it needs: forward needs a model, and a batch on the GPU.",
        "There are four groups: model and batch (D, G, F), forward (A), backward (H, E), optimizer "
        "(C). The copy of the loss stands beside them.",
        "Backward runs through the layers in the opposite order of forward. The model may be built "
        "at any time before forward, and the loss copied at any time after it.",
    ),
    mistakes=[turned(first, later) for first, later in ("HE", "EC", "AH", "GF", "FA", "AB")],
)

# ---- 5.2 ------------------------------------------------------------------------------------

LURES = {  # of a change: wrong steps -> why they are wrong; the step left out is right
    "share": {
        "F": "A rank that drops samples after reading them has still read the whole batch.",
        "D": "Every rank holds the whole model, and only the samples are dealt out.",
        "AHECB": "By then each rank has already read its samples.",
    },
    "equal": {
        "D": "That is when the weights come to differ. Which step waits until they are equal?",
        "GF": "Samples can be read before the weights are equal.",
        "HECB": "By then forward has already computed with unequal weights.",
    },
    "mean": {
        "HE": "A message may start there, but backward goes on without its result. Which step is "
        "the first that cannot?",
        "DGFA": "At that point there is no gradient yet.",
        "B": "What is printed is a loss, and it needs no gradient.",
    },
    "once": {
        "A": "Each rank still computes the loss of its own samples, and waits for nobody.",
        "DGF": "At that point there is no loss yet.",
        "HEC": "That step needs no printed loss: each rank's own loss is enough for it.",
    },
}
GO_THROUGH = (
    "Go through the 8 steps in order, and stop at the first one that would come out "
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
        "Samples are first touched by G; weights are first used by forward; gradients are first "
        "used by the optimizer; the loss is used where it is printed.",
    ),
    mistakes=[
        Mistake(patch(*change), why, GO_THROUGH)
        for change, why in {
            ('"share": "G"', '"share": "F"'): LURES["share"]["F"],
            ('"equal": "A"', '"equal": "D"'): LURES["equal"]["D"],
            ('"mean": "C"', '"mean": "H"'): LURES["mean"]["HE"],
            ('"mean": "C"', '"mean": "A"'): LURES["mean"]["DGFA"],
            ('"once": "B"', '"once": "A"'): LURES["once"]["A"],
        }.items()
    ],
)
