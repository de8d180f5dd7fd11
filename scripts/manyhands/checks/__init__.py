"""Verdicts on a learner's function: done, not started, or not yet with the reason.

    check.place(place)  ->  run on real ranks beside the truth  ->  a card and one plain line

`engine/` judges. A file or folder for each lesson says what is asked, in which cases, and which
mistakes readers make.
"""


def score(
    what: str,
    predicted: float | None,
    formula: float,
    measured: float,
    unit: str = "",
    word: str = "expected",
) -> None:
    """Print the learner's prediction, what the formula says, and the measurement side by side.

    Args:
        word: what the formula gives: "ideal", "at least" or "at most" where it is a bound.
    """

    def text(value: float) -> str:
        is_whole = float(value).is_integer() or abs(value) >= 1000
        return f"{value:,.0f}" if is_whole else f"{value:.3g}"

    try:
        yours = "no prediction" if predicted is None else f"you said {text(float(predicted))}"
    except (TypeError, ValueError):
        yours = f"you said {predicted!r}, which is no number"
    print(f"{what}: {yours}, {word} {text(formula)}, measured {text(measured)} {unit}".rstrip())
