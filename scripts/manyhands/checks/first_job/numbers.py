"""0.3 and 0.5: a power law, device-hours."""

import math
import random
from statistics import fmean

from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import Malformed, listing, number, same, show
from manyhands.first_job import planning, power_law

# ---- 0.3 ------------------------------------------------------------------------------------


def curve(a: float, b: float, sizes: list[float], spread: float = 0.0) -> Call:
    """A power law, with scattered errors."""
    errors = [a * size**-b * math.exp(spread * random.gauss(0, 1)) for size in sizes]
    return sizes, errors


def point_sets() -> list[Call]:
    """Two points, exact curves that fall and rise, tuples; scattered ones with repeated sizes."""
    a, b = random.uniform(3, 8), random.uniform(0.2, 0.8)
    sizes = [size for size in (20, 40, 80, 160, 320, 640) for _ in range(random.randrange(2, 5))]
    random.shuffle(sizes)
    exact = curve(a, b, [320, 20, 5000, 80, 1250])
    return [
        curve(6.0, 0.5, [4.0, 100.0]),
        exact,
        tuple(map(tuple, exact)),
        curve(random.uniform(0.02, 0.1), -random.uniform(0.1, 0.4), [10, 100, 2000]),
        curve(random.uniform(20, 90), random.uniform(1.1, 1.6), [1000.0, 1e6, 1e4]),
        curve(a, b, sizes, 0.4),
        curve(a, b, sizes[::-1], 0.6),
    ]


def as_pair(names: str) -> object:
    """The form of two numbers."""

    def form(value: object) -> dict:
        found = listing(number, f"two numbers, {names}")(value)
        if len(found) != 2:
            raise Malformed(f"{len(found)} values", f"Two numbers are asked for, {names}.")
        return dict(zip(names.split(" and "), map(float, found), strict=True))

    return form


def as_close(found: dict, wanted: dict, case: object) -> bool:
    """Within what 32 bits reach."""
    return all(math.isclose(found[n], wanted[n], rel_tol=1e-3, abs_tol=1e-6) for n in wanted)


def distances(found: dict, wanted: dict, case: Call) -> str:
    """How far the line lies from the points, against the least."""
    if not found["a"] > 0:
        return "a is the error at size 1, which is above 0."
    x, y = ([math.log(value) for value in values] for values in case)
    pairs = list(zip(x, y, strict=True))
    far, least = (
        sum((q - math.log(line["a"]) + line["b"] * p) ** 2 for p, q in pairs)
        for line in (found, wanted)
    )
    words = f"The squared distances in log(error) add up to {show(far, 4)}"
    return f"{words}; the least possible is {show(round(least, 9), 4)}."


def of_groups(choose: object) -> object:
    """A fit with one error for each size."""

    def fit(sizes, errors):
        groups: dict = {}
        for size, error in zip(sizes, errors, strict=True):
            groups.setdefault(size, []).append(error)
        return power_law.fit_power_law(list(groups), [choose(g) for g in groups.values()])

    return fit


of_group_means = of_groups(fmean)


LOGS = "(torch.tensor(values, dtype=torch.float64).log() for values in (sizes, errors))"
A_OF = "math.exp(y.mean() - slope * x.mean())"
PLAIN = "torch.tensor(sizes, dtype=torch.float64)"
PLAIN_Y = "torch.tensor(errors, dtype=torch.float64)"
LINE = "log(error) = log(a) - b log(size), so a = exp(intercept) and b = -slope."
SLOPE = "slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()"
fit_power_law = Spec(
    todo="0.3",
    truth=power_law.fit_power_law,
    cases=point_sets,
    form=as_pair("a and b"),
    same=as_close,
    facts=distances,
    tell=lambda case: f"fit_power_law({show(case.sizes, 4)}, {show(case.errors, 4)})",
    say=lambda found, wanted: f"gives {two(found)}, not {two(wanted)}",
    advice={"": LINE},
    reasons="""
        must be Tensor :: torch.log takes a tensor, not a list. | torch.tensor(sizes).log()
        must be real number :: math.log takes one number. | [math.log(s) for s in sizes]
        math domain error :: math.log was called with a number that is not above 0. | {LINE}
    """,
    hints=(
        "Take the logarithm of all sizes and of all errors. Then a straight line has to be fitted.",
        "The least squares line is y = intercept + slope * x with slope = sum((x - mean x) * "
        "(y - mean y)) / sum((x - mean x)**2) and intercept = mean y - slope * mean x.",
        "log(error) = log(a) - b log(size), so b = -slope and a = exp(intercept).",
    ),
    mistakes="""
        -slope.item() => slope.item() ::
            b has the wrong sign: a curve that falls has a positive b. | {LINE}
        {A_OF} => (y.mean() - slope * x.mean()).item() ::
            a is the intercept, which is the logarithm of a.
        {A_OF}, -slope.item() => -slope.item(), {A_OF} :: a and b have changed places.
        {A_OF}, -slope.item() => slope.item(), (y.mean() - slope * x.mean()).item() ::
            These are slope and intercept of the line, not a and b.
        {A_OF} => 2 ** ((y.mean() - slope * x.mean()) / math.log(2) ** 2) ::
            The logarithm to base 2 was undone with exp. | Use the same base for both.
        {A_OF} => math.exp((y.mean() - slope * x.mean()) / math.log(10)) ::
            The logarithm to base 10 was undone with exp.
        {LOGS} => ({PLAIN}, {PLAIN_Y}.log()) :: The sizes were taken without a logarithm. | Take the
            logarithm of the sizes and of the errors.
        {LOGS} => ({PLAIN}, {PLAIN_Y}) :: No logarithm was taken.
        {SLOPE} => slope = (x * y).sum() / (x * x).sum()
        {A_OF} => 1.0 :: The line goes through the origin, and that leaves no room for a. | {LINE}
        {SLOPE} => slope = (y[-1] - y[0]) / (x[-1] - x[0])
        {A_OF} => math.exp(y[0] - slope * x[0]) ::
            This is the line through the first and the last point. | Use all points: least squares.
        instead of_groups(lambda errors: errors[-1]) ::
            Of each size the last counts. | Every network counts, also where several have one size.
        instead of_group_means :: The errors of a size were averaged first.
    """,
    module=globals(),
)


def two(values: dict) -> str:
    """a and b in words."""
    return ", ".join(f"{name} = {show(value, 6)}" for name, value in values.items())


# ---- 0.5 ------------------------------------------------------------------------------------


def hours() -> list[Call]:
    """Equal and uneven samples, idle devices, a rank without samples, no rank, no time."""

    def samples() -> list[float]:
        return [round(random.random(), 3) for _ in range(random.randrange(2, 9))]

    def seconds() -> int:
        return random.randrange(1000, 20000)

    return [
        ([[0.5, 1.0], [0.25]], 2, 3600),
        ([[1.0, 0.0, 0.7, 0.8], [0.6, 0.4, 0.1, 0.2]], 2, 5400),
        ([samples() + [0.9] * 5, samples(), [0.25]], random.randrange(5, 9), seconds()),
        ([samples()], 4, seconds()),
        ([tuple(samples()), (), samples()], 4, seconds() + 0.5),
        ([[], [], samples()], 4, seconds()),
        ([], 8, seconds()),
        ([[0.5], [1.0]], 2, 0.0),
    ]


CHARGED = "return num_granted * hours,"
USED = "sum(means) * hours"
FLAT = "[one for samples in busy for one in samples]"
MEANS = "[sum(samples) / len(samples) if samples else 0.0 for samples in busy]"
GRANTED = "Charged is what was granted, idle or not: num_granted * seconds / 3600."
OWN_MEAN = "Take each rank's mean over its own samples, add these up, and multiply by the hours."
IDLE = "A rank without samples counts as idle: its mean is 0."
NO_MEAN = ("There is no mean of nothing.", f"{IDLE} A job without ranks has no mean either.")
NO_TABLE = ("Ranks have unequal numbers of samples, so they make no table.", OWN_MEAN)
device_hours = Spec(
    todo="0.5",
    truth=planning.device_hours,
    cases=hours,
    form=as_pair("charged and used"),
    same=lambda found, wanted, case: same(found, wanted, 1e-5),
    tell=lambda case: f"device_hours({samples_of(case)}, {case.num_granted}, {case.seconds})",
    independent=True,
    advice={"charged": GRANTED, "used": OWN_MEAN},
    reasons={
        "division by zero": NO_MEAN,
        "at least one data point": NO_MEAN,
        "expected sequence of length": NO_TABLE,
        "each tensor to be equal size": NO_TABLE,
        "inhomogeneous shape": NO_TABLE,
    },
    hints=(
        "There are two numbers. The first does not depend on `busy` at all: it is the devices that "
        "were granted, times the hours.",
        "For the second take each rank's mean over its own samples: a rank that was busy half of "
        "the time used half of the hours.",
        "A device without a rank worked for 0 hours: add up the means of the ranks, and do not "
        "divide by their number.",
    ),
    mistakes="""
        {CHARGED} => return len(busy) * hours, ::
            Only devices with a rank are charged here. | {GRANTED}
        {CHARGED} => return num_granted * seconds, ::
            Charged is in device-seconds. | Divide the seconds by 3600.
        {CHARGED} => return num_granted * (seconds // 3600), :: Only whole hours are charged.
        {CHARGED} => return hours, :: This is the time; each granted device is charged for it.
        {CHARGED} {USED} => return {USED}, num_granted * hours ::
            The two numbers have changed places. | Return charged, used.
        {USED} => sum(means) / max(1, len(means)) * num_granted * hours :: The mean of the ranks is
            taken for every granted device. | A device without a rank is idle.
        {USED} => sum(means) / max(1, len(means)) * hours ::
            This is what one device used, the mean of the ranks. | {OWN_MEAN}
        {USED} => sum({FLAT}) / max(1, len({FLAT})) * len(busy) * hours ::
            All samples are in one heap, where a rank with more of them counts more.
        {MEANS} => [sum(samples) / len(samples) if samples else 1.0 for samples in busy] ::
            A rank without samples counts as busy all the time. | {IDLE}
        {MEANS} => [max(samples, default=0.0) for samples in busy] ::
            The largest sample of each rank counts, and not the mean. | {OWN_MEAN}
        {USED} => num_granted * hours - {USED} :: The second number is what was idle.
        {USED} => {USED} * 3600 ::
            The second number is in device-seconds. | Divide the seconds by 3600.
        {USED} => sum(means) / num_granted ::
            The second number is a share of the granted devices, not hours. | {OWN_MEAN}
        {USED} => len(busy) * hours ::
            Every rank counts as busy all the time. | Look at its samples.
    """,
    module=globals(),
)


def samples_of(case: Call) -> str:
    """The samples, or how many there are."""
    text = str([list(samples) for samples in case.busy])
    counts = [len(samples) for samples in case.busy]
    return text if len(text) < 80 else f"ranks with {counts} samples"
