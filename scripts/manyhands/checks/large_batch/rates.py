"""7.2, 7.3 and 7.7: the learning rate of a large batch, its warm-up, and a batch that grows."""

import random

from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import Malformed, integer, malformed, number, same, show
from manyhands.large_batch import rates
from manyhands.large_batch.rates import Setting


def drawn_rate() -> float:
    """A learning rate of few digits."""
    return round(random.uniform(0.05, 0.4), 3)


# ---- 7.2 ------------------------------------------------------------------------------------


def scalings() -> list[Call]:
    """Every rule for a factor that is whole, that is not, and that is below 1."""
    factors = (random.choice((9, 25, 36)), random.randint(5, 15) + 0.5, 0.25)
    rules = ("linear", "root", "none")
    return [(drawn_rate(), factor, rule) for factor in factors for rule in rules]


POWERS = '"none": 0.0, "root": 0.5, "linear": 1.0'
RESULT = "return rate * factor ** powers[rule]"
FLOAT32 = 1e-6  # the formula is judged, also where torch.sqrt gives seven digits
RULES = "The rate is multiplied by 1, by the root of the factor, or by the factor itself."
scaled_rate = Spec(
    todo="7.2",
    truth=rates.scaled_rate,
    cases=scalings,
    form=lambda value: float(number(value)),
    same=lambda found, wanted, case: same(found, wanted, FLOAT32),
    advice={"": RULES},
    hints=(
        "Each rule multiplies the rate by a number that follows from the factor alone.",
        "That number is 1 for 'none', factor ** 0.5 for 'root', and the factor for 'linear'.",
    ),
    mistakes="""
        {POWERS} => "none": 0.0, "root": 1.0, "linear": 0.5 ::
            The rules 'root' and 'linear' have changed places. | {RULES}
        {RESULT} => return rate * factor :: Every rule multiplies by the factor here.
        {RESULT} => return rate * factor**0.5 ::
            Every rule multiplies by the root of the factor here.
        {POWERS} => "none": 1.0, "root": 0.5, "linear": 1.0 ::
            The rule 'none' is treated as 'linear'. | With 'none' the rate stays as it is.
        {RESULT} => return factor ** powers[rule] ::
            This is only the number by which the rate is multiplied. | Multiply it by the rate.
        {RESULT} => return rate / factor ** powers[rule] ::
            The rate is divided, but a larger batch takes a larger rate. | {RULES}
        {RESULT} => power = powers[rule]; return (rate * factor if power else rate) ** (power or 1)
            ::
            The rule 'root' takes the root of the rate as well. | Take the root of the factor only.
        {POWERS} => "none": 0.0, "root": 2.0, "linear": 1.0 ::
            The rule 'root' squares the factor. | The root of the factor is factor ** 0.5.
        {RESULT} => return rate * (factor / 2 if rule == "root" else factor ** powers[rule]) ::
            The rule 'root' halves the factor, which gives its root only if the factor is 4.
        {RESULT} => from math import log2; return rate * ( log2(factor) if rule == "root" else
            factor ** powers[rule]) ::
            The rule 'root' takes a logarithm, which equals the root only if the factor is 4 or 16.
        {RESULT} => return rate * int(factor) ** powers[rule] ::
            The factor is rounded down. | Use it as it is given, because it may be 2.5 or 0.5.
        {RESULT} => return rate * max(1, factor) ** powers[rule] ::
            A factor below 1 is treated as 1. | A smaller batch takes a smaller rate.
    """,
    module=globals(),
)

# ---- 7.3 ------------------------------------------------------------------------------------


def times() -> list[Call]:
    """Before, at and after each bend; no warm-up; milestones at its end and inside it; none."""
    found = []
    for epoch, warm_up, milestones, fall in (
        (0.0, 4.0, (7.0, 9.0), 0.1),
        (2.5, 4.0, (7.0, 9.0), 0.1),
        (4.0, 4.0, (7.0, 9.0), 0.1),
        (7.5, 3.5, (8.0, 9.5, 11.0), 0.25),
        (8.0, 3.5, (8.0, 9.5, 11.0), 0.25),
        (10.25, 3.5, (8.0, 9.5, 11.0), 0.25),
        (30.0, 3.5, (8.0, 9.5, 11.0), 0.25),
        (0.0, 0.0, (2.0,), 0.5),
        (3.5, 0.0, (2.0, 3.0, 4.0), 0.5),
        (5.0, 5.0, (5.0, 6.0), 0.2),
        (3.5, 5.0, (2.0, 8.0), 0.2),
        (6.75, 5.0, (2.0, 8.0), 0.2),
        (20.0, 5.0, (), 0.2),
    ):
        low = drawn_rate()
        high = round(low * random.uniform(3, 9), 3)
        found.append((epoch, low, high, warm_up, milestones, fall))
    return found


LINE = "low + (high - low) * epoch / warm_up"
REACHED = "sum(epoch >= milestone for milestone in milestones)"
AFTER = f"return high * fall ** {REACHED}"
RISE = (
    "During the warm-up the rate is low + (high - low) * epoch / warm_up, whatever the milestones "
    "are."
)
AT = "A milestone is reached where epoch >= milestone."
FALLS = (
    "After the warm-up the rate is high * fall ** count, where count is the number of milestones "
    "with epoch >= milestone."
)
warmed_up_rate = Spec(
    todo="7.3",
    truth=rates.warmed_up_rate,
    cases=times,
    form=lambda value: float(number(value)),
    advice={"": f"{RISE} {FALLS}"},
    reasons="""
        division by zero :: The warm-up may be 0 epochs long, and then there is no line. | Use the
            line only while epoch < warm_up, which is never true for a warm-up of 0.
    """,
    hints=(
        "There are two parts: while epoch < warm_up the rate lies on a line, and from then on it "
        "depends only on the number of milestones that have been reached.",
        "The line begins with `low` at epoch 0 and ends with `high` at epoch `warm_up`. The part "
        "of the way that is done is epoch / warm_up.",
        f"{RISE} {FALLS}",
    ),
    mistakes="""
        {LINE} => high * epoch / warm_up :: The warm-up begins at 0, and not at `low`. | {RISE}
        {LINE} => low + high * epoch / warm_up ::
            The warm-up ends at low + high. | Over the whole warm-up the rate rises by high - low.
        {LINE} => low * (high / low) ** (epoch / warm_up) :: The rate grows by the same factor in
            every epoch, so it does not follow a straight line. | {RISE}
        {LINE} => low + (high - low) * int(epoch) / warm_up ::
            The rate rises only once per epoch. | Use the epoch with its fraction.
        {LINE} => low + (high - low) * (epoch + 1) / warm_up ::
            The warm-up is one epoch ahead. | At epoch 0 the rate is `low`.
        {LINE} => low :: The rate stays at `low` and then jumps to `high`. | {RISE}
        return {LINE} => return ({LINE}) * fall ** {REACHED} ::
            Milestones inside the warm-up lower the rate at once.
        epoch >= milestone => epoch >= milestone >= warm_up :: Milestones inside the warm-up do not
            count afterwards, although they are reached. | {FALLS}
        epoch >= milestone => epoch - warm_up >= milestone :: The epochs up to a milestone are
            counted from the end of the warm-up. | Count the epochs from the start of the training.
        epoch >= milestone => epoch > milestone :: A milestone counts only after its epoch. | {AT}
        {REACHED} => any(epoch >= milestone for milestone in milestones) ::
            The rate falls once, however many milestones have been reached. | {FALLS}
        {AFTER} => count = {REACHED}; return high * (count * fall if count else 1) ::
            `fall` is multiplied by the number of milestones.
        {AFTER} => return high / fall ** {REACHED} ::
            The rate rises at the milestones: it is divided by `fall`.
        {AFTER} => return low * fall ** {REACHED} ::
            After the warm-up, the rate starts from `low` again.
        if epoch < warm_up => if epoch <= warm_up ::
            The line is still used where epoch == warm_up, so milestones there do not count, and a
            warm-up of 0 divides by zero. | The warm-up is over where epoch == warm_up.
    """,
    module=globals(),
)

# ---- 7.7 ------------------------------------------------------------------------------------


def growths() -> list[Call]:
    """No milestone; at one; up to the largest; a step that does not fit; a start that is larger."""
    many = (2.0, 5.0, 7.5, 9.0)
    found = []
    for epoch, batch, largest, milestones, fall in (
        (1.5, 8, 64, many, 0.5),
        (2.0, 8, 64, many, 0.25),
        (6.5, 8, 128, many, 0.25),
        (8.0, 8, 128, many, 0.25),
        (8.0, 12, 40, many, 0.5),
        (9.5, 6, 40, many, 0.5),
        (30.0, 3, 100, many[:3], 0.1),
        (4.0, 16, 8, many, 0.5),
        (4.0, 16, 16, many, 1 / 3),
        (50.0, 7, 1000, (), 0.2),
        (3.0, 4, 1000, many, 1 / 93),  # 4 / (1 / 93) is a little below 372
    ):
        found.append((epoch, Setting(batch, drawn_rate()), largest, milestones, fall))
    return found


def as_setting(value: object) -> dict:
    """Something with a batch and a rate."""
    if not hasattr(value, "batch") or not hasattr(value, "rate"):
        raise malformed(value, "a Setting", "Return Setting(batch, rate).")
    if isinstance(value.batch, float):
        seen = f"a batch of {value.batch!r}"
        hint = "Use round(batch / fall), which is a whole number."
        raise Malformed(seen, "A batch is a whole number of samples.", hint)
    return {"batch": integer(value.batch), "rate": float(number(value.rate))}


FITS = "round(batch / fall) <= largest"
GROW = "batch = round(batch / fall)"
LOWER = "rate *= fall"
EITHER = "At each milestone either the batch grows or the rate falls, and never both."
NEXT = "Ask whether the next batch would fit, which is batch / fall."
grown_batch = Spec(
    todo="7.7",
    truth=rates.grown_batch,
    cases=growths,
    form=as_setting,
    tell=lambda case: (
        f"grown_batch({case.epoch:g}, Setting({case.start.batch}, {case.start.rate:g}), "
        f"largest={case.largest}, milestones={show(case.milestones)}, fall={show(case.fall, 3)})"
    ),
    advice={"": f"{EITHER} {NEXT}"},
    reasons="""
        can't set attribute :: A Setting is a tuple, and its parts cannot be changed. | Keep the
            batch and the rate in variables, and return a new Setting.
    """,
    hints=(
        "Go through the milestones that have been reached, one by one, with the batch and the "
        "rate as they are at the start.",
        f"{NEXT} If it is at most `largest`, the batch becomes that number. Otherwise the rate "
        "is multiplied by `fall`.",
        "batch, rate = start takes the Setting apart, round(batch / fall) is the next batch, and "
        "Setting(batch, rate) is the result.",
    ),
    mistakes="""
        {GROW} => {GROW}; rate *= fall :: The rate falls as well where the batch grows. | {EITHER}
        {GROW} => {GROW}; rate /= fall ::
            The rate rises where the batch grows. | The batch grows so that the rate can stay.
        {FITS} => True :: The batch grows beyond `largest`. | {NEXT}
        {FITS} => batch <= largest ::
            The present batch is compared with `largest`, so the next one may exceed it.
        {FITS} => round(batch / fall) < largest ::
            A batch of exactly `largest` is allowed, and it is refused here.
        {FITS} => True
        {GROW} => batch = min(largest, round(batch / fall)) ::
            The batch is cut to `largest`, and the rate does not fall instead. | Where the batch
            cannot grow, it stays as it is, and the rate is multiplied by `fall`.
        {LOWER} => full = max(batch, largest); batch, rate = full, rate * fall * full / batch ::
            The batch is filled up to `largest`, and the rate falls by the rest.
        {LOWER} => pass :: The rate never falls.
        {LOWER} => rate /= fall ::
            The rate rises where the batch cannot grow: it is divided by `fall`.
        {LOWER} => batch, rate = start.batch, start.rate * fall ** {REACHED} :: As soon as the batch
            cannot grow, it is set back, and the rate falls at every milestone. | {EITHER}
        epoch >= milestone => epoch > milestone :: A milestone counts only after its epoch. | {AT}
        {REACHED} => any(epoch >= milestone for milestone in milestones) ::
            Only one milestone counts, however many have been reached. | Go through all milestones
            that have been reached, one by one.
        {GROW} => batch += round(start.batch / fall) - start.batch ::
            The batch grows by the same number each time. | Divide the present batch by `fall`.
        {GROW} => batch = int(batch // fall) :: Rounding down drops a sample where `fall` is not
            exact: 3 // 0.1 is 29. | Use round(batch / fall).
        {GROW} => batch = round(batch * fall) ::
            The batch is multiplied by `fall`, so it shrinks. | Divide the batch by `fall`.
    """,
    module=globals(),
)
