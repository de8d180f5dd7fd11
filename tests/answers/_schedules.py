"""Answers to 12.1 and 12.4 to 12.9 as students give them; pipeline.py takes them in."""

import itertools

import numpy as np

from manyhands.checks import Pair
from manyhands.pipeline import bubble, schedules, stages
from manyhands.pipeline.bubble import needed, unit_cost
from manyhands.pipeline.schedules import Action

RIGHT: dict[str, list] = {
    "12.1": [stages.partition],
    "12.4": [schedules.gpipe],
    "12.5": [bubble.simulate],
    "12.6": [Pair(bubble.idle_share, bubble.bubble)],
    "12.7": [schedules.one_f_one_b],
    "12.8": [bubble.in_flight],
    "12.9": [schedules.interleaved],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 12.1 partition -------------------------------------------------------------------------


def slowest(costs, bounds):
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))


def all_cuts(costs, num_stages):
    n = len(costs)
    return [(0, *cuts, n) for cuts in itertools.combinations(range(1, n), num_stages - 1)]


@right("12.1")
def partition_by_trying_all(costs, num_stages):
    return min(all_cuts(costs, num_stages), key=lambda bounds: slowest(costs, bounds))


@right("12.1")
def partition_by_recursion(costs, num_stages):
    def solve(stop, num):
        if stop < num:
            raise ValueError("too few layers")
        if num == 1:
            return [0, stop]
        ways = [[*solve(cut, num - 1), stop] for cut in range(num - 1, stop)]
        return min(ways, key=lambda bounds: slowest(costs, bounds))

    return np.array(solve(len(costs), num_stages))


def partition_with(give=lambda bounds, costs: bounds, aim=slowest, refuse=True, ordered=list):
    """Try all cuts; with one part done in another way."""

    def partition(costs, num_stages):
        if refuse and len(costs) < num_stages:
            raise ValueError(f"{len(costs)} layers for {num_stages} stages")
        costs = ordered(costs)
        bounds = min(all_cuts(costs, num_stages), key=lambda bounds: aim(costs, bounds))
        return give(list(bounds), costs)

    return partition


def parts(costs, bounds):
    return [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]


def sort_in_place(costs):
    costs.sort()
    return costs


@wrong("12.1", "stages of equally many layers")
def partition_by_number(costs, num_stages):
    size = len(costs) // num_stages
    return [*(stage * size for stage in range(num_stages)), len(costs)]


@wrong("12.1", "stages of equally many layers")
def partition_as_array_split(costs, num_stages):
    sizes = [len(piece) for piece in np.array_split(costs, num_stages)]
    return [0, *np.cumsum(sizes).tolist()]


@wrong("12.1", "nobody looks at what is left for the last")
def partition_greedily(costs, num_stages):
    bounds, mine, share = [0], 0, sum(costs) / num_stages
    for layer, cost in enumerate(costs):
        mine += cost
        if mine >= share and len(bounds) < num_stages:
            bounds.append(layer + 1)
            mine = 0
    return [*bounds, len(costs)]


@wrong("12.1", "nobody looks at what is left for the last")
def partition_before_it_is_over(costs, num_stages):
    bounds, mine, share = [0], 0, sum(costs) / num_stages
    for layer, cost in enumerate(costs):
        if mine and mine + cost > share and len(bounds) < num_stages:
            bounds.append(layer)
            mine = 0
        mine += cost
    return [*bounds, len(costs)]


def partition_of_fewer_stages(costs, num_stages):
    return partition_with(refuse=False)(costs, min(num_stages, len(costs)))


WRONG["12.1"] += [
    (partition_of_fewer_stages, "each stage has a layer"),
    (partition_with(aim=lambda c, b: sum(x * x for x in parts(c, b))), "the sum of squares"),
    (partition_with(aim=lambda c, b: max(parts(c, b)) - min(parts(c, b))), "the difference"),
    (partition_with(aim=lambda c, b: -min(parts(c, b))), "the fastest stage"),
    (partition_with(give=lambda b, c: [y - x for x, y in itertools.pairwise(b)]), "the sizes"),
    (
        partition_with(give=lambda b, c: [c[x:y] for x, y in itertools.pairwise(b)]),
        "the layers of each stage",
    ),
    (partition_with(give=lambda b, c: b[1:]), "the first bound, 0, is missing"),
    (partition_with(give=lambda b, c: b[:-1]), "the end, 14, is missing"),
    (partition_with(give=lambda b, c: b[1:-1]), "the first bound, 0, is missing"),
    (partition_with(give=lambda b, c: [*b[:-1], b[-1] - 1]), "behind the last layer"),
    (partition_with(give=lambda b, c: [0, *b[1:-2], b[-1], b[-1]]), "a stage without layers"),
    (partition_with(ordered=sorted), "the costs were sorted"),
    (partition_with(ordered=sort_in_place), "the caller still needs it"),
    (partition_with(give=lambda b, c: float(slowest(c, b))), "no list of whole numbers"),
    (partition_with(give=lambda b, c: print(b)), "nothing is returned"),
]


@wrong("12.1", "raises AssertionError: too few - the docstring asks for a ValueError")
def partition_with_an_assert(costs, num_stages):
    assert len(costs) >= num_stages, "too few"
    return stages.partition(costs, num_stages)


# ---- 12.4 gpipe -----------------------------------------------------------------------------


@right("12.4")
def gpipe_in_loops(p, m):
    schedule = []
    for rank in range(p):
        actions = []
        for i in range(m):
            actions.append(("F", rank, i))
        for i in range(m):
            actions.append(("B", rank, i))
        schedule.append(tuple(actions))
    return tuple(schedule)


def each_rank(row):
    """A schedule of p ranks from a function (rank, p, m) -> actions."""
    return lambda p, m: [row(rank, p, m) for rank in range(p)]


def fs(stage, m):
    return [Action("F", stage, i) for i in range(m)]


def bs(stage, m):
    return [Action("B", stage, i) for i in range(m)]


def one_rank(p, m):
    return [*fs(0, m), *bs(0, m)]


def generated(p, m):
    for rank in range(p):
        yield [*fs(rank, m), *bs(rank, m)]


WRONG["12.4"] += [
    (each_rank(lambda r, p, m: [*fs(r, m), *bs(r, m)[::-1]]), "asked for in the order of the"),
    (schedules.naive, "that is `naive`"),
    (schedules.one_f_one_b, "that is 1F1B"),
    (one_rank, "these are the actions of one rank"),
    (each_rank(lambda r, p, m: [*fs(0, m), *bs(0, m)]), "stage 0 on every rank"),
    (lambda p, m: schedules.gpipe(m, p), "p and m have changed places"),
    (each_rank(lambda r, p, m: [f"{k}{i}" for k in "FB" for i in range(m)]), "words for people"),
    (generated, "a generator can be read only once"),
    (each_rank(lambda r, p, m: (a for a in fs(r, m))), "a generator can be read only once"),
    (each_rank(lambda r, p, m: (fs(r, m) if r < p - 1 else []) + bs(r, m)), "the last rank comp"),
    (each_rank(lambda r, p, m: [None] * r + fs(r, m) + bs(r, m)), "an order, not a time"),
    (each_rank(lambda r, p, m: [(k, i) for k in "FB" for i in range(m)]), "the stage is missing"),
    (
        each_rank(lambda r, p, m: [(k, i, r) for k in "FB" for i in range(m)]),
        "stage and micro-batch have changed places",
    ),
    (
        each_rank(lambda r, p, m: [(k, r, i + 1) for k in "FB" for i in range(m)]),
        "micro-batches are counted from 1",
    ),
    (lambda p, m: {r: fs(r, m) + bs(r, m) for r in range(p)}, "a dict"),
    (each_rank(lambda r, p, m: [fs(r, m), bs(r, m)]), "pairs, or lists, inside"),
    (each_rank(lambda r, p, m: [list(a) for a in fs(r, m)]), "a list cannot be a key"),
    (each_rank(lambda r, p, m: fs(r, m)), "only the forwards"),
    (lambda p, m: schedules.gpipe(p - 1, m), "lists for"),
    (lambda p, m: schedules.gpipe(p, m + 1), "there is no micro-batch"),
    (each_rank(lambda r, p, m: fs(r, m) + bs(r, m - 1)), "is never done"),
    (each_rank(lambda r, p, m: fs(r, m) + bs(r, m) * 2), "is done 2 times"),
]


def not_fewer_than_ranks(schedule):
    def refuses(p, m):
        if m < p:
            raise ValueError(f"{m} micro-batches for {p} ranks")
        return schedule(p, m)

    return refuses


WRONG["12.4"] += [
    (
        lambda p, m: [[Action(k, 0, i) for k in "FB" for i in range(m)]] * p,
        "rank 1 has F0 of stage 0, not F0 of stage 1",
    ),
    (
        lambda p, m: [Action(k, r, i) for r in range(p) for k in "FB" for i in range(m)],
        "the actions of all ranks in one row",
    ),
    (lambda p, m: schedules.gpipe(p, m)[::-1], "not F0 of stage 0 - the ranks are in the wrong"),
    (not_fewer_than_ranks(schedules.gpipe), "fewer micro-batches than ranks are no mistake"),
]


# ---- 12.7 one_f_one_b -----------------------------------------------------------------------


@right("12.7")
def by_walking(p, m):
    schedule = []
    for rank in range(p):
        f = b = 0
        actions = []
        while b < m:
            if f < m and f - b < p - rank:
                actions.append(Action("F", rank, f))
                f += 1
            else:
                actions.append(Action("B", rank, b))
                b += 1
        schedule.append(actions)
    return schedule


@right("12.7")
def in_three_loops(p, m):
    schedule = []
    for rank in range(p):
        warmup = min(m, p - rank - 1)
        actions = [("F", rank, i) for i in range(warmup)]
        for i in range(m - warmup):
            actions += [("F", rank, warmup + i), ("B", rank, i)]
        actions += [("B", rank, i) for i in range(m - warmup, m)]
        schedule.append(actions)
    return schedule


def turns_with(warmup, kinds="FB", drain=True, least=True, take_apart=True):
    """1F1B in loops, with one part done in another way."""

    def one_f_one_b(p, m):
        schedule = []
        for rank in range(p):
            first = warmup(rank, p)
            first = min(first, m) if least else first
            actions = fs(rank, first)
            for i in range(m - first):
                pair = {"F": Action("F", rank, first + i), "B": Action("B", rank, i)}
                pair = [pair[kind] for kind in kinds]
                actions += pair if take_apart else [tuple(pair)]
            actions += bs(rank, m)[max(0, m - first) :] if drain else []
            schedule.append(actions)
        return schedule

    return one_f_one_b


def behind(rank, p):
    return p - 1 - rank


def backwards_of_the_same(p, m):
    return [
        fs(r, min(m, p - 1 - r))
        + [a for i in range(min(m, p - 1 - r), m) for a in (Action("F", r, i), Action("B", r, i))]
        + bs(r, min(m, p - 1 - r))
        for r in range(p)
    ]


WRONG["12.7"] += [
    (turns_with(lambda r, p: p - r), "one forward too many at the beginning"),
    (turns_with(lambda r, p: p - 1), "every rank begins with"),
    (turns_with(lambda r, p: p), "every rank begins with"),
    (turns_with(lambda r, p: 1), "every rank begins with 1 forwards"),
    (turns_with(lambda r, p: r), "turned round"),
    (turns_with(lambda r, p: 2 * (p - 1 - r)), "twice as many forwards"),
    (turns_with(behind, least=False), "there is no micro-batch"),
    (turns_with(behind, kinds="BF"), "B before F in the turns"),
    (turns_with(behind, drain=False), "the end is missing"),
    (turns_with(behind, take_apart=False), "take them apart"),
    (turns_with(lambda r, p: p - 2 - r if r < p - 2 else 0), "one forward too few"),
    (backwards_of_the_same, "B0 of stage 0 comes too late"),
    (schedules.gpipe, "that is GPipe"),
    (schedules.naive, "that is `naive`"),
    (lambda p, m: schedules.one_f_one_b(m, p), "p and m have changed places"),
    (lambda p, m: [schedules.one_f_one_b(p, m)[0]] * p, "all ranks do what rank 0 does"),
    (lambda p, m: schedules.one_f_one_b(p, m)[::-1], "the ranks are in the wrong order"),
    (lambda p, m: [row[::-1] for row in schedules.gpipe(p, m)], "comes before its forward"),
    (lambda p, m: schedules.one_f_one_b(p, m) if m >= p else schedules.gpipe(p, m), "GPipe"),
]


def backwards_turned_round(p, m):
    return [
        [a if a.kind == "F" else a._replace(stage=p - 1 - a.stage) for a in mine]
        for mine in schedules.one_f_one_b(p, m)
    ]


WRONG["12.7"] += [
    (backwards_turned_round, "not B0 of stage 0"),
    (not_fewer_than_ranks(schedules.one_f_one_b), "fewer micro-batches than ranks are no mistake"),
]


# ---- 12.8 in_flight -------------------------------------------------------------------------


@right("12.8")
def in_flight_of_sets(actions):
    kept, most = set(), 0
    for kind, stage, i in actions:
        (kept.add if kind == "F" else kept.discard)((stage, i))
        most = max(most, len(kept))
    return most


@right("12.8")
def in_flight_added_up(actions):
    return np.cumsum([1 if action.kind == "F" else -1 for action in actions]).max()


def steps(actions):
    return list(itertools.accumulate(1 if action.kind == "F" else -1 for action in actions))


def micro_batches_in_flight(actions):
    kept, most = set(), 0
    for kind, _, i in actions:
        (kept.add if kind == "F" else kept.discard)(i)
        most = max(most, len(kept))
    return most


def empties_the_list(actions):
    num = most = 0
    while actions:
        num += 1 if actions.pop(0).kind == "F" else -1
        most = max(most, num)
    return most


WRONG["12.8"] += [
    (lambda actions: sum(action.kind == "F" for action in actions), "all forwards"),
    (lambda actions: steps(actions)[-1], "what is left at the end"),
    (len, "the number of actions"),
    (lambda actions: max(action.microbatch for action in actions), "the largest number of a micro"),
    (
        lambda actions: len(list(itertools.takewhile(lambda a: a.kind == "F", actions))),
        "a row of forwards",
    ),
    (
        lambda actions: max(
            len(list(run))
            for kind, run in itertools.groupby(a.kind for a in actions)
            if kind == "F"
        ),
        "a row of forwards",
    ),
    (
        lambda actions: max(
            n for n, a in zip(steps(actions), actions, strict=True) if a.kind == "B"
        ),
        "one too few",
    ),
    (lambda actions: max([0, *steps(actions)[:-1]]) + 1, "one too many"),
    (lambda actions: max(steps(actions)) - 1, "one too few"),
    (lambda actions: -min(steps(actions)), "F and B turned round"),
    (micro_batches_in_flight, "micro-batches are counted, not stages"),
    (steps, "that is no number"),
    (empties_the_list, "the caller still needs it"),
]


def how_far_apart(actions):
    at = {a: i for i, a in enumerate(actions)}
    return max(at[Action("B", a.stage, a.microbatch)] - at[a] for a in actions if a.kind == "F")


def counts_letters(forward, backward):
    def in_flight(actions):
        num = most = 0
        for action in actions:
            num += 1 if action.kind == forward else -1 if backward in (None, action.kind) else 0
            most = max(most, num)
        return most

    return in_flight


def returns_too_early(actions):
    num = most = 0
    for action in actions:
        num += 1 if action.kind == "F" else -1
        most = max(most, num)
        return most


WRONG["12.8"] += [
    (how_far_apart, "how many actions lie between an F and its B"),
    (counts_letters("f", None), "another letter than a capital F"),
    (counts_letters("f", "b"), "another letter than a capital F"),
    (counts_letters("F", "b"), "all forwards"),
    (returns_too_early, "`return` stands inside the loop"),
]


# ---- 12.9 interleaved -----------------------------------------------------------------------


@right("12.9")
def interleaved_by_formulas(p, m, v=2):
    rounds = max(1, m // p)
    if m % rounds:
        raise ValueError("no")
    g = m // rounds

    def place(step, rank, forward):
        chunk, turn = step // g % v, step // (g * v)
        chunk = chunk if forward else v - 1 - chunk
        return ("F" if forward else "B", chunk * p + rank, turn * g + step % g)

    schedule = []
    for rank in range(p):
        warmup = min(m * v, (p - rank - 1) * 2 + (v - 1) * g)
        actions = [place(step, rank, True) for step in range(warmup)]
        for step in range(warmup, m * v):
            actions += [place(step, rank, True), place(step - warmup, rank, False)]
        actions += [place(step, rank, False) for step in range(m * v - warmup, m * v)]
        schedule.append(actions)
    return schedule


def interleaved_with(
    size=lambda p, m: m // max(1, m // p),
    warmup=lambda rank, p, v, g: 2 * (p - 1 - rank) + (v - 1) * g,
    stage=lambda rank, chunk, p, v: chunk * p + rank,
    back=lambda chunk, v: v - 1 - chunk,
    order=lambda places: places,
    refuse=True,
):
    """Interleaved with one part done in another way."""

    def interleaved(p, m, v=2):
        if refuse and m % max(1, m // p):
            raise ValueError(f"{m} on {p}")
        g = size(p, m)
        starts = range(0, m, g)
        places = [(c, i) for a in starts for c in range(v) for i in range(a, min(a + g, m))]
        places = order(places)
        schedule = []
        for rank in range(p):
            f = [Action("F", stage(rank, c, p, v), i) for c, i in places]
            b = [Action("B", stage(rank, back(c, v), p, v), i) for c, i in places]
            first = min(m * v, warmup(rank, p, v, g))
            turns = [a for pair in zip(f[first:], b, strict=False) for a in pair]
            schedule.append([*f[:first], *turns, *b[m * v - first :]])
        return schedule

    return interleaved


RIGHT["12.9"].append(interleaved_with())
WRONG["12.9"] += [
    (interleaved_with(stage=lambda r, c, p, v: r * v + c), "neighbouring stages on one rank"),
    (interleaved_with(size=lambda p, m: m), "no groups: all micro-batches of a stage first"),
    (interleaved_with(back=lambda c, v: c), "from the first stage to the last; deadlock"),
    (interleaved_with(warmup=lambda r, p, v, g: p - 1 - r), "warm-up: p - 1 - rank; deadlock"),
    (interleaved_with(warmup=lambda r, p, v, g: 2 * (p - 1 - r)), "warm-up: 2 (p - 1 - rank);"),
    (
        interleaved_with(warmup=lambda r, p, v, g: p - 1 - r + (v - 1) * g),
        "warm-up: p - 1 - rank + (v - 1) g;",
    ),
    (
        interleaved_with(warmup=lambda r, p, v, g: 2 * (p - 1 - r) + (v - 1) * g + 1),
        "warm-up: one too many; it takes",
    ),
    (interleaved_with(size=lambda p, m: p), "groups of 4, not of"),
    (
        interleaved_with(warmup=lambda r, p, v, g: 2 * (p - 1 - r) + (v - 1) * p),
        "groups of 4, not of",
    ),
    (
        interleaved_with(order=lambda places: sorted(places, key=lambda place: place[1])),
        "each micro-batch through all stages of the rank at once",
    ),
    (interleaved_with(refuse=False), "raises nothing"),
    (lambda p, m, v=2: schedules.one_f_one_b(p, m), "that is 1F1B"),
    (lambda p, m, v=2: schedules.one_f_one_b(p * v, m), "lists for"),
    (lambda p, m, v=2: schedules.interleaved(p, m, 2), "rank 0 has 3 stages"),
    (lambda p, m, v: schedules.interleaved(p, m, v), "missing 1 required positional argument"),
]


def two_chunks(p, m, v=2):
    g = m // max(1, m // p)
    places = [(c, a + i) for a in range(0, m, g) for c in range(2) for i in range(g)]
    schedule = []
    for rank in range(p):
        f = [Action("F", c * p + rank, i) for c, i in places]
        b = [Action("B", (v - 1 - c) * p + rank, i) for c, i in places]
        first = min(2 * (p - 1 - rank) + (v - 1) * g, m * v)
        turns = [a for pair in zip(f[first:], b, strict=False) for a in pair]
        schedule.append([*f[:first], *turns, *b[m * v - first :]])
    return schedule


def only_multiples(p, m, v=2):
    if m % p:
        raise ValueError(f"{m} is no multiple of {p}")
    return schedules.interleaved(p, m, v)


def asserts_groups(p, m, v=2):
    assert m % max(1, m // p) == 0, "odd"
    return schedules.interleaved(p, m, v)


WRONG["12.9"] += [
    (two_chunks, "rank 0 has 3 stages - range(v)"),
    (only_multiples, "no mistake"),
    (asserts_groups, "raises AssertionError: odd - the docstring asks for a ValueError"),
]


# ---- 12.5 simulate --------------------------------------------------------------------------


def times(
    schedule,
    cost=unit_cost,
    needs=needed,
    start=lambda free, before, all_done: max([free, *before]),
    span=lambda action, begin, end: (action, begin, end),
    is_stuck=True,
    called=lambda cost, action: cost(action),
):
    """Take the first rank that can go on, one action at a time; with one part done otherwise."""
    num_stages = 1 + max(action.stage for mine in schedule for action in mine)
    spans, ends, done = [[] for _ in schedule], [0] * len(schedule), {}
    while sum(map(len, spans)) < sum(map(len, schedule)):
        for rank, mine in enumerate(schedule):
            if len(spans[rank]) == len(mine):
                continue
            action = mine[len(spans[rank])]
            before = needs(action, num_stages)
            if all(other in done for other in before):
                ready = [done[other] for other in before]
                begin = start(ends[rank], ready, done.values())
                ends[rank] = done[action] = begin + called(cost, action)
                spans[rank].append(span(action, begin, ends[rank]))
                break
        else:
            if is_stuck:
                raise ValueError(f"deadlock: rank {rank} cannot go on with {mine[-1]}")
    return spans


def simulate_with(**parts):
    def simulate(schedule, cost=unit_cost):
        return times(schedule, cost, **parts)

    return simulate


def by_relaxation(schedule, cost=unit_cost):
    """Push starts up until nothing moves; a deadlock pushes without end."""
    num_stages = 1 + max(action.stage for mine in schedule for action in mine)
    start = {action: 0 for mine in schedule for action in mine}
    for _ in range(len(start) + 1):
        moved = False
        for mine in schedule:
            for index, action in enumerate(mine):
                before = needed(action, num_stages) + ([mine[index - 1]] if index else [])
                if any(other not in start for other in before):
                    raise ValueError(f"Action {action} waits for what nobody does")
                first = max([0, *(start[other] + cost(other) for other in before)])
                moved, start[action] = moved or first > start[action], first
        if not moved:
            return [[(a, start[a], start[a] + cost(a)) for a in mine] for mine in schedule]
    raise ValueError(f"deadlock: rank 0 or another one waits, at {action}")


def in_lock_step(schedule, cost=unit_cost):
    num_stages = 1 + max(action.stage for mine in schedule for action in mine)
    spans, done, now = [[] for _ in schedule], set(), 0
    while any(len(s) < len(mine) for s, mine in zip(spans, schedule, strict=True)):
        going = []
        for s, mine in zip(spans, schedule, strict=True):
            if len(s) < len(mine) and done.issuperset(needed(mine[len(s)], num_stages)):
                going.append((s, mine[len(s)]))
        if not going:
            raise ValueError("rank 0 is stuck")
        for s, action in going:
            s.append((action, now, now + cost(action)))
            done.add(action)
        now += max(cost(action) for _, action in going)
    return spans


def takes_actions_out(schedule, cost=unit_cost):
    spans = times([list(mine) for mine in schedule], cost)
    for mine in schedule:
        mine.clear()
    return spans


def ranks_one_after_the_other(schedule, cost=unit_cost):
    num_stages = 1 + max(action.stage for mine in schedule for action in mine)
    done, spans = {}, []
    for mine in schedule:
        now, own = 0, []
        for action in mine:
            begin = max([now, *(done[other] for other in needed(action, num_stages))])
            now = done[action] = begin + cost(action)
            own.append((action, begin, now))
        spans.append(own)
    return spans


def own_stage(action, num_stages):
    return [other for other in needed(action, num_stages) if other.stage == action.stage]


def only_forward(action, num_stages):
    return needed(action, num_stages) if action.kind == "F" else own_stage(action, num_stages)


def only_backward(action, num_stages):
    return needed(action, num_stages) if action.kind == "B" else []


RIGHT["12.5"] += [times, by_relaxation]
WRONG["12.5"] += [
    (simulate_with(needs=lambda action, n: []), "does not wait for what it needs"),
    (simulate_with(needs=own_stage), "from another stage"),
    (simulate_with(needs=only_forward), "from another stage"),
    (simulate_with(needs=only_backward), "from another stage"),
    (simulate_with(start=lambda f, before, d: max([0, *before])), "one action at a time"),
    (simulate_with(start=lambda f, b, done: max([0, *done])), "only one rank works at a time"),
    (simulate_with(start=lambda f, b, done: max([1, f, *b])), "time begins at 0"),
    (in_lock_step, "all ranks go on together"),
    (simulate_with(called=lambda cost, action: 1), "`cost` says how long"),
    (simulate_with(called=lambda cost, action: unit_cost(action)), "`cost` says how long"),
    (simulate_with(called=lambda cost, action: cost(action.kind)), "`cost` takes a whole action"),
    (simulate_with(span=lambda a, begin, end: (a, begin, end - begin)), "is a duration"),
    (simulate_with(span=lambda a, begin, end: (begin, end)), "a span"),
    (lambda s, cost=unit_cost: sum(times(s, cost), []), "one list of all ranks"),
    (lambda s, cost=unit_cost: [sorted(m, reverse=True) for m in times(s, cost)], "is another"),
    (lambda s, cost=unit_cost: times(s, cost)[::-1], "every action of a rank once"),
    (takes_actions_out, "the caller still needs it"),
    (ranks_one_after_the_other, "an action is looked up before it is done"),
    (simulate_with(is_stuck=False), "the loop goes round for ever"),
]


@wrong("12.5", "a schedule where rank 2 has B0 before F0 raises nothing")
def stops_quietly(schedule, cost=unit_cost):
    try:
        return times(schedule, cost)
    except ValueError:
        return []


@wrong("12.5", "that does not say who waits")
def says_only_deadlock(schedule, cost=unit_cost):
    try:
        return times(schedule, cost)
    except ValueError:
        raise ValueError("deadlock") from None


def as_many_stages_as_ranks(schedule, cost=unit_cost):
    return times(schedule, cost, needs=lambda action, n: needed(action, len(schedule)))


def keeps_starts(schedule, cost=unit_cost):
    num_stages = 1 + max(action.stage for mine in schedule for action in mine)
    spans, done = [[] for _ in schedule], {}
    while sum(map(len, spans)) < sum(map(len, schedule)):
        for own, mine in zip(spans, schedule, strict=True):
            while len(own) < len(mine):
                action, free = mine[len(own)], own[-1][2] if own else 0
                before = needed(action, num_stages)
                if any(other not in done for other in before):
                    break
                done[action] = max([free, *(done[other] for other in before)])
                own.append((action, done[action], done[action] + cost(action)))
    return spans


@wrong("12.5", "simulate of a schedule where rank 2 has B0 before F0 raises RuntimeError: ")
def raises_another_error(schedule, cost=unit_cost):
    try:
        return times(schedule, cost)
    except ValueError as error:
        raise RuntimeError(str(error)) from None


WRONG["12.5"] += [
    (as_many_stages_as_ranks, "the number of ranks was taken for the number of stages"),
    (keeps_starts, "it waits until what it needs starts, not until it stops"),
    (simulate_with(needs=own_stage), "on rank 1 F0 of stage 1 starts at 0, but F0 of stage 0 ends"),
]


# ---- 12.6 idle_share and bubble -------------------------------------------------------------


def own_idle_share(spans):
    ends = [stop for mine in spans for *_, stop in mine]
    starts = [start for mine in spans for _, start, _ in mine]
    total = max(ends) - min(starts)
    idle = sum(total - sum(stop - start for _, start, stop in mine) for mine in spans)
    return np.float64(idle / (len(spans) * total))


def own_bubble(p, m, v=1):
    return [(p - 1) / (v * m), (p - 1) / (v * m + p - 1)]


def sharing(share):
    """idle_share from (work of each rank, first start, last stop of each rank)."""

    def idle_share(spans):
        works = [sum(stop - start for _, start, stop in mine) for mine in spans]
        begins, ends = [mine[0][1] for mine in spans], [mine[-1][2] for mine in spans]
        return share(works, begins, ends)

    return Pair(idle_share, own_bubble)


def formula(give):
    return Pair(own_idle_share, lambda p, m, v=1: give(p, m, v))


RIGHT["12.6"].append(Pair(own_idle_share, own_bubble))
WRONG["12.6"] += [
    (sharing(lambda w, b, e: sum(w) / (max(e) - min(b)) / len(w)), "in which ranks work"),
    (sharing(lambda w, b, e: 1 - sum(w) / (max(e) - min(b))), "the time of one rank"),
    (sharing(lambda w, b, e: 1 - sum(w) / max(e) / len(w)), "before the first start"),
    (sharing(lambda w, b, e: 1 - max(w) / (max(e) - min(b))), "of one rank only"),
    (sharing(lambda w, b, e: 1 - w[-1] / (max(e) - min(b))), "of one rank only"),
    (sharing(lambda w, b, e: 1 - sum(w) / sum(e)), "the last stops added up"),
    (sharing(lambda w, b, e: 1 - sum(w) / (sum(e) - sum(b))), "waiting at both ends is lost"),
    (sharing(lambda w, b, e: 100 - 100 * sum(w) / (max(e) - min(b)) / len(w)), "in percent"),
    (sharing(lambda w, b, e: len(w) * (max(e) - min(b)) - sum(w)), "a time, not a share"),
    (sharing(lambda w, b, e: len(w) * (max(e) - min(b)) / sum(w) - 1), "relative to the time of"),
    (formula(lambda p, m, v: own_bubble(p, m, v)[::-1]), "the two are swapped"),
    (formula(lambda p, m, v: (p / v / m, p / v / (m + p / v))), "p in place of p - 1"),
    (formula(lambda p, m, v: own_bubble(p, m - 1, v)), "m - 1 in place of m"),
    (formula(lambda p, m, v: own_bubble(p, m)), "v is left out"),
    (formula(lambda p, m, v: own_bubble(p, m, 1 / v)), "multiplied by v"),
    (formula(lambda p, m, v: [100 * one for one in own_bubble(p, m, v)]), "in percent"),
    (formula(lambda p, m, v: [(p - 1) / v / m] * 2), "the second is relative to work, too"),
    (formula(lambda p, m, v: [own_bubble(p, m, v)[1]] * 2), "of the time that passes, too"),
    (formula(lambda p, m, v: own_bubble(p, m, v)[1]), "that is no pair"),
    (formula(lambda p, m, v: ((p - 1) / v / m, (p - 1) / v / (m + p))), "m + p in place of"),
    (
        formula(lambda p, m, v: ((p - 1) / v / m, (p - 1) / (m + p - 1))),
        "v is left out of the second",
    ),
    (formula(lambda p, m, v: own_bubble(m, p, v)), "p and m have changed places"),
]


def up_to_the_last_rank(spans):
    start, stop = spans[0][0][1], spans[-1][-1][2]
    work = sum(end - begin for mine in spans for _, begin, end in mine)
    return 1 - work / ((stop - start) * len(spans))


def only_gaps(spans):
    gaps = sum(b[1] - a[2] for mine in spans for a, b in itertools.pairwise(mine))
    starts = [start for mine in spans for _, start, _ in mine]
    ends = [stop for mine in spans for *_, stop in mine]
    return gaps / ((max(ends) - min(starts)) * len(spans))


WRONG["12.6"] += [
    (Pair(up_to_the_last_rank, own_bubble), "the stop of the last rank, which ends first"),
    (Pair(only_gaps, own_bubble), "waiting at both ends is lost"),
    (formula(lambda p, m, v: ((e := (p - 1) // v) / m, e / (m + e))), "// drops the rest"),
    (formula(lambda p, m, v: ((p - 1) // (v * m), (p - 1) // (v * m + p - 1))), "// drops the"),
]
