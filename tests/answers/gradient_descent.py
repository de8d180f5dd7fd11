"""Answers to lesson 01 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold. A name is the exercise, then what is done."""

import itertools
import random

import numpy as np
import torch

from manyhands.gradient_descent import descent as gradient_descent
from manyhands.gradient_descent.descent import gradient, mean_squared_error, mini_batches

RIGHT: dict[str, list] = {
    "1.1": [gradient_descent.gradient],
    "1.2": [gradient_descent.descend],
    "1.3": [gradient_descent.largest_rate],
    "1.4": [gradient_descent.mini_batches],
    "1.5": [gradient_descent.descend_in_batches],
    "1.6": [gradient_descent.gradient_variance],
    "1.7": [gradient_descent.Momentum],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 1.1 gradient ---------------------------------------------------------------------------


@right("1.1")
def gradient_by_autograd(parameters, x, y):
    parameters = parameters.clone().requires_grad_()
    mean_squared_error(parameters, x, y).backward()
    return parameters.grad


@right("1.1")
def gradient_by_matrices(parameters, x, y):
    design = torch.stack([x, torch.ones_like(x)], dim=1).double()
    return 2 / len(x) * design.T @ (design @ parameters.double() - y)


@right("1.1")
def gradient_of_numbers(parameters, x, y):
    w, b = parameters.tolist()
    dw = sum(2 * (w * p + b - q) * p for p, q in zip(x.tolist(), y.tolist(), strict=True))
    db = sum(2 * (w * p + b - q) for p, q in zip(x.tolist(), y.tolist(), strict=True))
    return torch.tensor([dw / len(x), db / len(x)])


def slope(error, x, pick=torch.mean, factor=2):
    return torch.stack([factor * pick(error * x), factor * pick(error + 0 * x)])


def in_place(p, x, y):
    p.requires_grad_()
    mean_squared_error(p, x, y).backward()
    return p.grad


def in_place_without_a_change(p, x, y):
    p.requires_grad_()
    return torch.autograd.grad(mean_squared_error(p, x, y), p)[0]


def parts(p, x, y):
    return gradient(p, x, y).unbind()


WRONG["1.1"] += [
    (lambda p, x, y: gradient(p, x, y) / 2, "the factor 2 is missing"),
    (lambda p, x, y: slope(p[0] * x + p[1] - y, x, torch.sum), "the loss is the mean"),
    (lambda p, x, y: slope(p[0] * x + p[1] - y, x, torch.sum, 1), "the sum over the samples, with"),
    (lambda p, x, y: slope(y - p[0] * x - p[1], x), "the sign is turned"),
    (lambda p, x, y: gradient(p, x, y).flip(0), "changed places"),
    (lambda p, x, y: gradient(p.flip(0), x, y), "not ["),
    (lambda p, x, y: slope(p[0] * x + p[1] - y, 1), "x is missing in dL/dw"),
    (lambda p, x, y: slope(x * (p[0] * x + p[1] - y), 1), "x is in both parts"),
    (lambda p, x, y: slope((p[0] * x + p[1] - y).sign(), x, factor=1), "an absolute error"),
    (lambda p, x, y: slope((p[0] * x + p[1] - y).abs(), x), "an absolute error"),
    (lambda p, x, y: gradient(p, x, y) / len(x), "number of samples twice"),
    (lambda p, x, y: slope(p[0] * x - y, x), "b is left out"),
    (lambda p, x, y: slope((p[0] * x + p[1] - y).mean(), x), "multiply first"),
    (lambda p, x, y: gradient(p, x, y).tolist(), "gives a list of 2"),
    (parts, "gives a tuple of 2"),
    (lambda p, x, y: gradient(p, x, y).numpy(), "gives a ndarray of 2"),
    (lambda p, x, y: gradient(p, x, y)[:, None], "has shape (2, 1), not (2,)"),
    (lambda p, x, y: 2 * (p[0] * x + p[1] - y) * x, "not (2,)"),
    (in_place, "the caller's tensor `parameters`"),
    (in_place_without_a_change, "requires_grad_() changed the caller's tensor `parameters`"),
]


# ---- 1.2 descend ----------------------------------------------------------------------------


@right("1.2")
def descend_in_a_while(start, x, y, rate, tolerance, max_steps):
    path, here, steps = start[None], start.clone(), 0
    slope = gradient_by_autograd(here, x, y)
    while steps < max_steps and not slope.square().sum().sqrt() < tolerance:
        here = here - slope * rate
        slope = gradient_by_autograd(here, x, y)
        path, steps = torch.cat([path, here[None]]), steps + 1
    return path


@right("1.2")
def descend_in_place_on_copies(start, x, y, rate, tolerance, max_steps):
    rows = torch.zeros(max_steps + 1, 2, dtype=torch.float64)
    here = rows[0] = start
    here = here.clone()
    for step in range(max_steps):
        found = gradient(here, x, y)
        if found.norm() <= tolerance:
            return rows[: step + 1]
        here -= rate * found
        rows[step + 1] = here
    return rows


def descent(stop=None, move=None, first=0, last=None, count=lambda n: n, after=False):
    """A descent whose condition, move, rows or number of steps are another's."""
    stop = stop or (lambda slope, p, x, y, rate: slope.norm())
    move = move or (lambda p, slope, rate: p - rate * slope)

    def descend(start, x, y, rate, tolerance, max_steps):
        path = [start]
        for _ in range(count(max_steps)):
            slope = gradient(path[-1], x, y)
            ends = stop(slope, path[-1], x, y, rate) < tolerance
            if ends and not after:
                break
            path.append(move(path[-1], slope, rate))
            if ends:
                break
        return torch.stack(path[first:last])

    return descend


def stub(*call):
    raise NotImplementedError("TODO 1.1")


@wrong("1.2", "calls your `stub`, TODO 1.1, which is not written yet")
def descend_by_the_stub(start, x, y, rate, tolerance, max_steps):
    return torch.stack([start, start - rate * stub(start, x, y)])


@wrong("1.2", "in descend_without_end: ")
def descend_without_end(start, x, y, rate, tolerance, max_steps):
    path = [start]
    for p in path:
        path.append(p - rate * gradient_by_autograd(p, x, y))
    return torch.stack(path)


@wrong("1.2", "return behind the loop")
def descend_returns_in_the_loop(start, x, y, rate, tolerance, max_steps):
    path = [start]
    for _ in range(max_steps):
        slope = gradient(path[-1], x, y)
        if slope.norm() >= tolerance:
            path.append(path[-1] - rate * slope)
        return torch.stack(path)


@wrong("1.2", "the distance from the last point was compared")
def descend_until_the_path_stands(start, x, y, rate, tolerance, max_steps):
    path = [start]
    for _ in range(max_steps):
        if len(path) > 1 and (path[-1] - path[-2]).norm() < tolerance:
            break
        path.append(path[-1] - rate * gradient(path[-1], x, y))
    return torch.stack(path)


@wrong("1.2", "< tolerance, not >")
def descend_while_it_is_small(start, x, y, rate, tolerance, max_steps):
    path = [start]
    while len(path) <= max_steps and gradient(path[-1], x, y).norm() <= tolerance:
        path.append(path[-1] - rate * gradient(path[-1], x, y))
    return torch.stack(path)


@wrong("1.2", "no step moves")
def descend_without_moving(start, x, y, rate, tolerance, max_steps):
    return start.repeat(max_steps + 1, 1)


@wrong("1.2", "the caller's tensor `start` was changed")
def descend_on_the_start_itself(start, x, y, rate, tolerance, max_steps):
    path = [start]
    for _ in range(max_steps):
        start -= rate * gradient(start, x, y)
        path.append(start)
    return torch.stack(path)


@wrong("1.2", "one tensor, changed in place")
def descend_with_one_tensor(start, x, y, rate, tolerance, max_steps):
    here = start.clone()
    path = [here]
    for _ in range(max_steps):
        here -= rate * gradient(here, x, y)
        path.append(here)
    return torch.stack(path)


@wrong("1.2", "the gradient of the start, again")
def descend_by_the_first_gradient(start, x, y, rate, tolerance, max_steps):
    slope, path = gradient(start, x, y), [start]
    for _ in range(max_steps):
        path.append(path[-1] - rate * slope)
    return torch.stack(path)


@wrong("1.2", "add up in .grad")
def descend_with_gradients_that_add_up(start, x, y, rate, tolerance, max_steps):
    here = start.clone().requires_grad_()
    path = [start]
    for _ in range(max_steps):
        mean_squared_error(here, x, y).backward()
        here.data = here.data - rate * here.grad
        path.append(here.detach().clone())
    return torch.stack(path)


@wrong("1.2", "a list of")
def descend_to_a_list(*call):
    return list(gradient_descent.descend(*call))


@wrong("1.2", "max_steps is left out")
def descend_without_an_end(start, x, y, rate, tolerance, max_steps):
    return gradient_descent.descend(start, x, y, rate, tolerance, 1000)


WRONG["1.2"] += [
    (descent(move=lambda p, slope, rate: p + rate * slope), "the gradient was added"),
    (descent(move=lambda p, slope, rate: p - slope), "the rate is left out"),
    (descent(move=lambda p, slope, rate: p - rate * slope / slope.norm()), "length is taken out"),
    (descent(stop=lambda s, p, x, y, rate: mean_squared_error(p, x, y)), "the loss was compared"),
    (descent(stop=lambda s, p, x, y, rate: rate * s.norm()), "the step's length"),
    (descent(stop=lambda s, p, x, y, rate: s.abs().max()), "each component, or one of them"),
    (descent(stop=lambda s, p, x, y, rate: s.sum()), "signs cancel"),
    (descent(stop=lambda s, p, x, y, rate: s.square().sum()), "the square of the length"),
    (descent(stop=lambda *call: torch.tensor(9e9)), "the tolerance never ends it"),
    (descent(stop=lambda s, p, x, y, rate: s[0].abs()), "each component, or one of them"),
    (descent(first=1), "the start is missing"),
    (descent(last=-1), "one step too few"),
    (descent(count=lambda n: max(n, 1) - 1), "one step too few"),
    (descent(count=lambda n: n + 1), "one step too many"),
    (descent(after=True), "looked at after a step"),
    (lambda *call: gradient_descent.descend(*call)[-1], "the whole path is asked for"),
    (lambda *call: gradient_descent.descend(*call).T, "each row is one point"),
    (lambda *call: gradient_descent.descend(*call).numpy(), "a ndarray of"),
]


# ---- 1.3 largest_rate -----------------------------------------------------------------------


@right("1.3")
def rate_with_numpy(x):
    design = np.stack([x.numpy(), np.ones(len(x))], axis=1)
    return 2 / np.linalg.eigvalsh(2 * design.T @ design / len(x)).max()


@right("1.3")
def rate_of_the_formula(x):
    square, mean = (x * x).mean(), x.mean()
    return 2 / (square + 1 + ((square - 1) ** 2 + 4 * mean**2).sqrt())


@right("1.3")
def rate_by_autograd(x):
    def loss(parameters):
        return mean_squared_error(parameters, x, torch.zeros(len(x)))

    hessian = torch.autograd.functional.hessian(loss, torch.zeros(2))
    return (2 / torch.linalg.norm(hessian, 2)).item()


def hessian(x, mean=True):
    mean = x.mean() * mean
    return 2 * torch.tensor([[x.square().mean(), mean], [mean, 1.0]])


def eigenvalues(x):
    return torch.linalg.eigvalsh(hessian(x))


WRONG["1.3"] += [
    (lambda x: 2 / eigenvalues(x)[0].item(), "the smallest eigenvalue"),
    (lambda x: 1 / eigenvalues(x)[1].item(), "it diverges above 2 / h"),
    (lambda x: 4 / eigenvalues(x)[1].item(), "without its factor 2"),
    (lambda x: eigenvalues(x)[1].item(), "the eigenvalue itself"),
    (lambda x: 2 / eigenvalues(x), "both eigenvalues"),
    (lambda x: 2 / torch.linalg.eigvals(hessian(x))[0].item(), "H is symmetric: eigvalsh"),
    (lambda x: 2 / eigenvalues(x + 1)[1].item(), "H is [["),
    (lambda x: 2 / torch.linalg.eigvalsh(hessian(x, False))[1].item(), "beside the diagonal"),
    (lambda x: 1 / x.square().mean().item(), "w alone"),
    (lambda x: 2 / torch.trace(hessian(x)).item(), "the trace"),
    (lambda x: 2 / torch.linalg.det(hessian(x)).item(), "the determinant"),
    (lambda x: 2 / hessian(x).norm().item(), "the norm of H"),
    (lambda x: 1 / (x.mean().item() ** 2 + 1), "mean(x)^2 is not mean(x^2)"),
    (lambda x: rate_of_the_formula(x) / len(x), "sums over the samples"),
    (lambda x: 2 / eigenvalues(x - x.mean())[1].item(), "is "),
    (lambda x: 2 / torch.linalg.eigvals(hessian(x)).max().item(), "H is symmetric: eigvalsh"),
    (lambda x, y: 2 / eigenvalues(x)[1].item(), "missing 1 required positional argument"),
]


# ---- 1.4 mini_batches -----------------------------------------------------------------------


@right("1.4")
def batches_by_slices(num_samples, batch, generator):
    order = torch.randperm(num_samples, generator=generator)
    for first in range(0, num_samples, batch):
        yield order[first : first + batch]


@right("1.4")
def batches_in_a_list(num_samples, batch, generator):
    keys = torch.rand(num_samples, generator=generator)
    return [part.int() for part in keys.argsort().split(batch)]


@right("1.4")
def batches_left_over(num_samples, batch, generator):
    left = list(range(num_samples))
    while left:
        size = min(batch, len(left))
        picks = [torch.randint(len(left) - k, (1,), generator=generator) for k in range(size)]
        yield torch.tensor([left.pop(pick) for pick in picks])


def cut(order, batch):
    return list(torch.as_tensor(order).split(batch))


def in_pieces(n, batch, g):
    pieces = cut(torch.arange(n), batch)
    return [pieces[k] for k in torch.randperm(len(pieces), generator=g)]


def by_random(n, batch, g):
    return cut(random.sample(range(n), n), batch)


def filled(n, batch, g):
    order = torch.randperm(n, generator=g)
    return cut(torch.cat([order, order])[: -(-n // batch) * batch], batch)


def all_at_once(n, batch, g):
    yield torch.randperm(n, generator=g).split(batch)


def forever(n, batch, g):
    while True:
        yield from mini_batches(n, batch, g)


def two_epochs(n, batch, g):
    for _ in range(2):
        yield from mini_batches(n, batch, g)


def windows(n, batch, g):
    order = torch.randperm(n, generator=g)
    for first in range(n):
        yield order[first : first + batch]


def never_on(n, batch, g):
    order = torch.randperm(n, generator=g)
    while True:
        yield order[:batch]


def order_each_batch(n, batch, g):
    for first in range(0, n, batch):
        yield torch.randperm(n, generator=g)[first : first + batch]


def printed(n, batch, g):
    for chosen in mini_batches(n, batch, g):
        print(len(chosen))


def kept_order(n, batch, g, order={}):  # noqa: B006
    order[n] = order.get(n, torch.arange(n))[torch.randperm(n, generator=g)]
    return order[n].split(batch)


def within(n, batch, g):
    return [p[torch.randperm(len(p), generator=g)] for p in cut(torch.arange(n), batch)]


WRONG["1.4"] += [
    (lambda n, b, g: cut(torch.randint(n, (n,), generator=g), b), "drawn with replacement"),
    (lambda n, b, g: cut(torch.arange(n), b), "the order is not random"),
    (lambda n, b, g: cut(torch.randperm(n, generator=g), b)[: n // b], "smaller batch was dropped"),
    (lambda n, b, g: mini_batches(n, b, g.manual_seed(0)), "the same order in two epochs"),
    (
        lambda n, b, g: mini_batches(n, b, torch.Generator().manual_seed(0)),
        "the same order in two epochs",
    ),
    (lambda n, b, g: cut(torch.randperm(n), b), "from the global generator"),
    (by_random, "from the global generator"),
    (lambda n, b, g: cut(torch.randperm(n, generator=g) + 1, b), "numbers from 1"),
    (lambda n, b, g: torch.randperm(n, generator=g).chunk(b), "not the number of batches"),
    (lambda n, b, g: cut(torch.randperm(n, generator=g), b)[0], "that is no batch"),
    (lambda n, b, g: torch.randperm(n, generator=g), "that is no batch"),
    (lambda n, b, g: cut(torch.randperm(n, generator=g).float(), b), "are integers"),
    (in_pieces, "the batches were shuffled"),
    (within, "shuffled within itself"),
    (filled, "it may be smaller"),
    (lambda n, b, g: [c.tolist() for c in mini_batches(n, b, g)], "yields a list, not a tensor"),
    (lambda n, b, g: [tuple(c) for c in mini_batches(n, b, g)], "yields a tuple, not a tensor"),
    (lambda n, b, g: [c.numpy() for c in mini_batches(n, b, g)], "yields a ndarray, not a tensor"),
    (two_epochs, "two epochs are yielded"),
    (windows, "batches overlap"),
    (never_on, "the same batch again and again"),
    (order_each_batch, "a new order for each batch"),
    (printed, "nothing is handed out"),
    (kept_order, "an order is kept from call to call"),
    (lambda n, b, g: torch.randperm(n, g), "generator=generator"),
    (lambda n, b, g: next(mini_batches(n, b, g)), "handed out by `yield`"),
    (forever, "never ends"),
    (all_at_once, "all batches at once"),
    (lambda n, b, g: [*mini_batches(n, b, g), torch.arange(0)], "1 batches are empty"),
]


# ---- 1.5 descend_in_batches -----------------------------------------------------------------


@right("1.5")
def batched_by_counting(start, x, y, batch, num_steps, step, generator):
    path, batches = [start.clone()], iter(())
    for _ in range(num_steps):
        chosen = next(batches, None)
        if chosen is None:
            batches = iter(batches_by_slices(len(x), batch, generator))
            chosen = next(batches)
        path.append(step(path[-1], gradient_by_matrices(path[-1], x[chosen], y[chosen])))
    return torch.stack([point.double() for point in path])


@right("1.5")
def batched_by_a_list(start, x, y, batch, num_steps, step, generator):
    plan = []
    while len(plan) < num_steps:
        plan += batches_left_over(len(x), batch, generator)
    path, here = start[None], start
    for chosen in plan[:num_steps]:
        here = step(parameters=here, slope=gradient_by_autograd(here, x[chosen], y[chosen]))
        path = torch.cat([path, here[None]])
    return path


def batched(draw=None, at=None, move=None, slope=None, first=0):
    """A descent that draws, looks, moves or begins in a way of its own."""
    draw = draw or endless
    at = at or (lambda path: path[-1])
    move = move or (lambda step, here, slope: step(here, slope))
    slope = slope or (lambda here, x, y, chosen, generator: gradient(here, x[chosen], y[chosen]))

    def descend_in_batches(start, x, y, batch, num_steps, step, generator):
        path, batches = [start], draw(len(x), batch, generator)
        for _ in range(num_steps):
            found = slope(at(path), x, y, next(batches), generator)
            path.append(move(step, path[-1], found))
        return torch.stack(path[first:])

    return descend_in_batches


def endless(n, batch, g):
    while True:
        yield from mini_batches(n, batch, g)


def drawn_anew(n, batch, g):
    while True:
        yield next(mini_batches(n, batch, g))


def with_replacement(n, batch, g):
    while True:
        yield torch.randint(n, (batch,), generator=g)


def one_order(n, batch, g):
    batches = list(mini_batches(n, batch, g))
    while True:
        yield from batches


def in_order(n, batch, g):
    while True:
        yield from torch.arange(n).split(batch)


def without_the_last(n, batch, g):
    while True:
        yield from torch.randperm(n, generator=g)[: n // batch * batch].split(batch)


def global_numbers(n, batch, g):
    while True:
        yield from torch.randperm(n).split(batch)


def own_generators(n, batch, g):
    while True:
        yield from mini_batches(n, batch, torch.Generator())


def swapped(n, batch, g):
    while True:
        yield from mini_batches(batch, n, g)


def one_by_one(n, batch, g):
    return (one for chosen in endless(n, batch, g) for one in chosen[:, None])


def one_epoch_only(n, batch, g):
    return iter(mini_batches(n, batch, g))


def shuffled_apart(here, x, y, chosen, generator):
    return gradient(here, x[torch.randperm(len(x), generator=generator)][: len(chosen)], y[chosen])


def from_the_start(step, path, start):
    return step(start, path)


@wrong("1.5", "num_steps counts steps, not epochs")
def batched_epochs(start, x, y, batch, num_steps, step, generator):
    path = [start]
    for _ in range(num_steps):
        for chosen in mini_batches(len(x), batch, generator):
            path.append(step(path[-1], gradient(path[-1], x[chosen], y[chosen])))
    return torch.stack(path)


@wrong("1.5", "it ends after one epoch")
def batched_one_epoch(start, x, y, batch, num_steps, step, generator):
    path = [start]
    for chosen in mini_batches(len(x), batch, generator):
        if len(path) <= num_steps:
            path.append(step(path[-1], gradient(path[-1], x[chosen], y[chosen])))
    return torch.stack(path)


@wrong("1.5", "the last epoch runs to its end")
def batched_whole_epochs(start, x, y, batch, num_steps, step, generator):
    path = [start]
    while len(path) <= num_steps:
        for chosen in mini_batches(len(x), batch, generator):
            path.append(step(path[-1], gradient(path[-1], x[chosen], y[chosen])))
    return torch.stack(path)


@wrong("1.5", "")
def batched_floor(start, x, y, batch, num_steps, step, generator):
    path = [start]
    for _ in range(num_steps // (len(x) // batch)):
        for chosen in mini_batches(len(x), batch, generator):
            path.append(step(path[-1], gradient(path[-1], x[chosen], y[chosen])))
    return torch.stack(path)


@wrong("1.5", "one step too many")
def batched_one_more(start, x, y, batch, num_steps, step, generator):
    return gradient_descent.descend_in_batches(start, x, y, batch, num_steps + 1, step, generator)


@wrong("1.5", "the new parameters are thrown away")
def batched_without_moving(start, x, y, batch, num_steps, step, generator):
    path, batches = [start], endless(len(x), batch, generator)
    for chosen in itertools.islice(batches, num_steps):
        step(start, gradient(start, x[chosen], y[chosen]))
        path.append(start.clone())
    return torch.stack(path)


@wrong("1.5", "in batched_without_end: ")
def batched_without_end(start, x, y, batch, num_steps, step, generator):
    path = [start]
    while True:
        for chosen in mini_batches(len(x), batch, generator):
            if len(path) > num_steps:
                break
            path.append(step(path[-1], gradient(path[-1], x[chosen], y[chosen])))


@wrong("1.5", "each step begins at the start")
def batched_from_the_start(start, x, y, batch, num_steps, step, generator):
    path, batches = [start], endless(len(x), batch, generator)
    for _ in range(num_steps):
        chosen = next(batches)
        path.append(step(start, gradient(start, x[chosen], y[chosen])))
    return torch.stack(path)


WRONG["1.5"] += [
    (batched(drawn_anew), "each step draws a new order"),
    (batched(with_replacement), "drawn with replacement"),
    (batched(one_order), "drawn once, or by a new generator"),
    (batched(own_generators), "drawn once, or by a new generator"),
    (batched(in_order), "is 1.4 green?"),
    (batched(swapped), "have changed places"),
    (batched(one_by_one), "one sample a step"),
    (batched(one_epoch_only), "then call mini_batches again"),
    (batched(slope=lambda p, x, y, c, g: len(c) * gradient(p, x[c], y[c])), "a sum, not a mean"),
    (batched(slope=lambda p, x, y, c, g: gradient(p, c, y[c])), "stand in the place of x"),
    (batched(move=lambda step, p, s: [step(p, s), step(p, s)][0]), "called twice"),
    (batched(without_the_last), "the last, smaller batch is dropped"),
    (batched(global_numbers), "from the global one"),
    (batched(at=lambda path: path[0]), "the gradient is taken at the start"),
    (batched(slope=lambda p, x, y, c, g: gradient(p, x, y)), "the gradient of all samples"),
    (batched(slope=lambda p, x, y, c, g: -gradient(p, x[c], y[c])), "is 1.1 green?"),
    (batched(slope=shuffled_apart), "x and y come from different samples"),
    (batched(move=lambda step, p, s: p - 0.1 * s), "step is never called"),
    (batched(move=lambda step, p, s: [p - 0.1 * s, step(p, s)][0]), "what step returns is not"),
    (batched(move=lambda step, p, s: step(s, p)), "takes the parameters first"),
    (batched(first=1), "the start is missing"),
    (lambda *call: list(gradient_descent.descend_in_batches(*call)), "gives a list of"),
    (lambda *call: gradient_descent.descend_in_batches(*call)[-1], "the whole path"),
]


# ---- 1.6 gradient_variance ------------------------------------------------------------------


def gradients(parameters, x, y, batch, repeats, generator):
    drawn = torch.randint(len(x), (repeats, batch), generator=generator)
    return torch.stack([gradient(parameters, x[chosen], y[chosen]) for chosen in drawn])


@right("1.6")
def variance_of_all_at_once(parameters, x, y, batch, repeats, generator):
    drawn = torch.randint(len(x), (repeats, batch), generator=generator)
    error = parameters[0] * x[drawn] + parameters[1] - y[drawn]
    found = torch.stack([2 * (error * x[drawn]).mean(1), 2 * error.mean(1)], dim=1)
    return (found - gradient(parameters, x, y)).pow(2).sum(1).mean()


@right("1.6")
def variance_by_var(*call):
    return float(gradients(*call).var(dim=0).sum())


@right("1.6")
def variance_by_multinomial(parameters, x, y, batch, repeats, generator):
    whole, total = gradient(parameters, x, y), 0.0
    for _ in range(repeats):
        even = torch.ones(len(x))
        chosen = torch.multinomial(even, batch, replacement=True, generator=generator)
        total += (gradient(parameters, x[chosen], y[chosen]) - whole).norm().item() ** 2
    return np.float64(total / repeats)


def distances(*call):
    return gradients(*call) - gradient(*call[:3])


def by_draws(draw):
    """The right one but for how it draws: draw(n, batch, g) gives numbers for x, or for x and y."""

    def gradient_variance(p, x, y, batch, repeats, g):
        whole, squares = gradient(p, x, y), []
        for _ in range(repeats):
            drawn = draw(len(x), batch, g)
            at_x, at_y = drawn if isinstance(drawn, tuple) else (drawn, drawn)
            squares.append((gradient(p, x[at_x], y[at_y]) - whole).square().sum())
        return torch.stack(squares).mean().item()

    return gradient_variance


def randint(first, last, size, g):
    return torch.randint(first, last, (size,), generator=g)


def same_batch(p, x, y, batch, repeats, g):
    return distances(p, x, y, batch, 1, g).square().sum().item()


def without_drawing(p, x, y, batch, repeats, g):
    each = torch.stack([gradient(p, x[[k]], y[[k]]) for k in range(len(x))])
    return each.var(dim=0, correction=0).sum().item() / batch


def own_seed(p, x, y, batch, repeats, g):
    return distances(p, x, y, batch, repeats, g.manual_seed(1)).square().sum(1).mean().item()


def returns_in_the_loop(p, x, y, batch, repeats, g):
    return distances(p, x, y, batch, 1, g).square().sum().item() / repeats


WRONG["1.6"] += [
    (lambda *call: gradients(*call).square().sum(1).mean().item(), "subtract the gradient of all"),
    (lambda *call: distances(*call).square().sum(1).mean().sqrt().item(), "standard deviation"),
    (lambda *call: distances(*call)[:, 0].square().mean().item(), "the part of w alone"),
    (lambda *call: distances(*call)[:, 1].square().mean().item(), "the part of b alone"),
    (lambda *call: distances(*call).square().mean().item(), "not their sum"),
    (lambda *call: distances(*call).square().sum().item(), "the sum over the repeats"),
    (lambda *call: distances(*call).norm(dim=1).mean().item(), "the length is not squared"),
    (lambda *call: distances(*call).square().sum(1).mean().item() / call[3], "batch size again"),
    (lambda *call: distances(*call).square().mean(0), "the squared length of a vector"),
    (lambda *call: distances(*call).sum(1).square().mean().item(), "added, then squared"),
    (lambda *call: distances(*call).abs().sum(1).mean().item(), "absolute values"),
    (by_draws(lambda n, b, g: torch.randperm(n, generator=g)[:b]), "drawn without replacement"),
    (by_draws(lambda n, b, g: (randint(0, n, b, g), randint(0, n, b, g))), "x and y come from"),
    (by_draws(lambda n, b, g: randint(1, n, b, g)), "the first sample is never drawn"),
    (by_draws(lambda n, b, g: randint(0, n - 1, b, g)), "the last sample is never drawn"),
    (by_draws(lambda n, b, g: randint(0, n, b + 1, g)), "two samples in a batch of one"),
    (by_draws(lambda n, b, g: randint(0, n, 1, g)), "`batch` does not count"),
    (by_draws(lambda n, b, g: randint(0, n, min(b, n), g)), "the samples' own spread gives"),
    (by_draws(lambda n, b, g: torch.randint(n, (b,))), "do not follow from the generator"),
    (by_draws(lambda n, b, g: torch.randint(n, b, generator=g)), "the size is a tuple"),
    (same_batch, "one batch, again and again"),
    (without_drawing, "nothing is drawn, or not from the generator"),
    (own_seed, "nothing is drawn, or not from the generator"),
    (returns_in_the_loop, "return at the end"),
    (lambda *call: distances(*call).mean(0).square().sum().item(), "averaged, then squared"),
]


# ---- 1.7 Momentum ---------------------------------------------------------------------------


@right("1.7")
class RateInTheVelocity:
    velocity = torch.zeros(2)

    def __init__(self, rate, momentum):
        self.lr, self.m = rate, momentum

    def __call__(self, parameters, slope):
        self.velocity = self.m * self.velocity - self.lr * slope
        return parameters + self.velocity


@right("1.7")
def momentum_of_torch(rate, momentum):
    here = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([here], lr=rate, momentum=momentum)

    def step(parameters, slope):
        here.data, here.grad = parameters.clone(), slope.clone()
        optimizer.step()
        return here.detach().clone()

    return step


def momentum(rule, start=0.0):
    """A class that makes new parameters and velocity from (r, m, p, v, g)."""

    class Momentum:
        def __init__(self, rate, momentum):
            self.rate, self.momentum, self.velocity = rate, momentum, start

        def __call__(self, parameters, slope):
            call = (self.rate, self.momentum, parameters, self.velocity, slope)
            new, self.velocity = rule(*call)
            return new

    return Momentum


def velocity_by(rule):
    return momentum(lambda r, m, p, v, g: (p - r * rule(m, v, g), rule(m, v, g)))


@wrong("1.7", "the instances share one velocity")
class SharedVelocity:
    velocity = torch.zeros(2)

    def __init__(self, rate, momentum):
        self.rate, self.momentum = rate, momentum
        SharedVelocity.velocity = torch.zeros(2)

    def __call__(self, parameters, slope):
        SharedVelocity.velocity = self.momentum * SharedVelocity.velocity + slope
        return parameters - self.rate * SharedVelocity.velocity


@wrong("1.7", "were changed in place")
class VelocityIsTheGradient(SharedVelocity):
    velocity = None

    def __call__(self, parameters, slope):
        self.velocity = (
            slope if self.turns() == 1 else self.velocity.mul_(self.momentum).add_(slope)
        )
        return parameters - self.rate * self.velocity

    def turns(self):
        self.count = getattr(self, "count", 0) + 1
        return self.count


@wrong("1.7", "write __call__")
class WithoutCall:
    def __init__(self, rate, momentum):
        self.rate = rate

    def step(self, parameters, slope):
        return parameters - self.rate * slope


@wrong("1.7", "write __init__")
class WithoutInit:
    def __call__(self, parameters, slope):
        return parameters


WRONG["1.7"] += [
    (momentum(lambda r, m, p, v, g: (p - r * (m * v + g), m * v + g))(0.1, 0.9), "the class, no"),
    (momentum(lambda r, m, p, v, g: (p + r * (m * v + g), m * v + g)), "it goes up"),
    (momentum(lambda r, m, p, v, g: (p - r * g, m * v + g)), "not kept from call to call"),
    (momentum(lambda r, m, p, v, g: (p - r * v, m * v + g)), "the old velocity"),
    (momentum(lambda r, m, p, v, g: (p - m * v - g, m * v + g)), "the rate is left out"),
    (momentum(lambda r, m, p, v, g: (p.sub_(r * (m * v + g)), m * v + g)), "changed in place"),
    (momentum(lambda r, m, p, v, g: (None, m * v + g)), "nothing is returned"),
    (momentum(lambda r, m, p, v, g: ((p, v), v)), "gives a tuple of 2"),
    (velocity_by(lambda m, v, g: m * v + (1 - m) * g), "with 1 - momentum in it"),
    (velocity_by(lambda m, v, g: (1 - m) * v + m * g), "with 1 - momentum in it"),
    (velocity_by(lambda m, v, g: v + g), "nothing fades"),
    (velocity_by(lambda m, v, g: v + m * g), "momentum times the gradient"),
    (velocity_by(lambda m, v, g: m * v - g), "it goes up"),
]
