"""Answers to lesson 01: right ones of other shapes, and wrong ones that are no slip."""

import itertools

import numpy as np
import torch

from manyhands.gradient_descent import descent
from manyhands.gradient_descent.descent import gradient, mean_squared_error, mini_batches


def gradient_by_autograd(parameters, x, y):
    parameters = parameters.clone().requires_grad_()
    mean_squared_error(parameters, x, y).backward()
    return parameters.grad


def gradient_by_matrices(parameters, x, y):
    design = torch.stack([x, torch.ones_like(x)], dim=1).double()
    return 2 / len(x) * design.T @ (design @ parameters.double() - y)


# ---- 1.3 ------------------------------------------------------------------------------------


def rate_with_numpy(x):
    design = np.stack([x.numpy(), np.ones(len(x))], axis=1)
    return 2 / np.linalg.eigvalsh(2 * design.T @ design / len(x)).max()


def rate_of_the_formula(x):
    square = (x * x).mean()
    mean = x.mean()
    return 2 / (square + 1 + ((square - 1) ** 2 + 4 * mean**2).sqrt())


def rate_by_autograd(x):
    def loss(parameters):
        return mean_squared_error(parameters, x, torch.zeros(len(x)))

    hessian = torch.autograd.functional.hessian(loss, torch.zeros(2))
    return (2 / torch.linalg.norm(hessian, 2)).item()


def rate_of_complex_numbers(x):
    hessian = 2 * torch.tensor([[x.square().mean(), x.mean()], [x.mean(), 1.0]])
    return 2 / torch.linalg.eigvals(hessian).max().item()


# ---- 1.4 ------------------------------------------------------------------------------------


def batches_by_slices(num_samples, batch, generator):
    order = torch.randperm(num_samples, generator=generator)
    for first in range(0, num_samples, batch):
        yield order[first : first + batch]


def batches_in_a_list(num_samples, batch, generator):
    keys = torch.rand(num_samples, generator=generator)
    return list(keys.argsort().split(batch))


def batches_left_over(num_samples, batch, generator):
    left = list(range(num_samples))
    while left:
        size = min(batch, len(left))
        picks = [torch.randint(len(left) - k, (1,), generator=generator) for k in range(size)]
        yield torch.tensor([left.pop(pick) for pick in picks])


def batches_rolled(num_samples, batch, generator):
    shift = torch.randint(num_samples, (1,), generator=generator).item()
    yield from torch.arange(num_samples).roll(shift).split(batch)


def batches_forever(num_samples, batch, generator):
    while True:
        yield from mini_batches(num_samples, batch, generator)


def batches_of_a_kept_order(num_samples, batch, generator, order={}):  # noqa: B006
    before = order.get(num_samples, torch.arange(num_samples))
    order[num_samples] = before[torch.randperm(num_samples, generator=generator)]
    return order[num_samples].split(batch)


# ---- 1.5 ------------------------------------------------------------------------------------


def batched_by_counting(start, x, y, batch, num_steps, step, generator):
    path = [start.clone()]
    batches = iter(())
    for _ in range(num_steps):
        chosen = next(batches, None)
        if chosen is None:
            batches = iter(batches_by_slices(len(x), batch, generator))
            chosen = next(batches)
        path.append(step(path[-1], gradient_by_matrices(path[-1], x[chosen], y[chosen])))
    return torch.stack([point.double() for point in path])


def batched_by_a_list(start, x, y, batch, num_steps, step, generator):
    plan = []
    while len(plan) < num_steps:
        plan += batches_left_over(len(x), batch, generator)
    path = start[None]
    here = start
    for chosen in plan[:num_steps]:
        here = step(parameters=here, slope=gradient_by_autograd(here, x[chosen], y[chosen]))
        path = torch.cat([path, here[None]])
    return path


def batched_without_a_new_epoch(start, x, y, batch, num_steps, step, generator):
    path = [start]
    batches = iter(mini_batches(len(x), batch, generator))
    for _ in range(num_steps):
        chosen = next(batches)
        path.append(step(path[-1], gradient(path[-1], x[chosen], y[chosen])))
    return torch.stack(path)


def batched_without_moving(start, x, y, batch, num_steps, step, generator):
    path = [start]
    epochs = (mini_batches(len(x), batch, generator) for _ in itertools.count())
    for chosen in itertools.islice(itertools.chain.from_iterable(epochs), num_steps):
        step(start, gradient(start, x[chosen], y[chosen]))
        path.append(start.clone())
    return torch.stack(path)


# ---- 1.6 ------------------------------------------------------------------------------------


def gradients(parameters, x, y, batch, repeats, generator):
    drawn = torch.randint(len(x), (repeats, batch), generator=generator)
    return torch.stack([gradient(parameters, x[chosen], y[chosen]) for chosen in drawn])


def variance_of_all_at_once(parameters, x, y, batch, repeats, generator):
    drawn = torch.randint(len(x), (repeats, batch), generator=generator)
    error = parameters[0] * x[drawn] + parameters[1] - y[drawn]
    found = torch.stack([2 * (error * x[drawn]).mean(1), 2 * error.mean(1)], dim=1)
    return (found - gradient(parameters, x, y)).pow(2).sum(1).mean()


def variance_by_var(*call):
    return float(gradients(*call).var(dim=0).sum())


def variance_by_multinomial(parameters, x, y, batch, repeats, generator):
    whole = gradient(parameters, x, y)
    total = 0.0
    for _ in range(repeats):
        even = torch.ones(len(x))
        chosen = torch.multinomial(even, batch, replacement=True, generator=generator)
        total += (gradient(parameters, x[chosen], y[chosen]) - whole).norm().item() ** 2
    return np.float64(total / repeats)


def variance_without_drawing(parameters, x, y, batch, repeats, generator):
    each = torch.stack([gradient(parameters, x[[k]], y[[k]]) for k in range(len(x))])
    return each.var(dim=0, correction=0).sum().item() / batch


def variance_of_small_batches(parameters, x, y, batch, repeats, generator):
    batch = min(batch, len(x))
    return descent.gradient_variance(parameters, x, y, batch, repeats, generator)


# ---- 1.7 ------------------------------------------------------------------------------------


class RateInTheVelocity:
    velocity = torch.zeros(2)

    def __init__(self, rate, momentum):
        self.rate = rate
        self.momentum = momentum

    def __call__(self, parameters, slope):
        self.velocity = self.momentum * self.velocity - self.rate * slope
        return parameters + self.velocity


def momentum_in_a_closure(rate, momentum):
    gradients = []

    def step(parameters, slope):
        gradients.insert(0, slope)
        velocity = sum(momentum**age * gradient for age, gradient in enumerate(gradients))
        return parameters - rate * velocity

    return step


class WithoutCall:
    def __init__(self, rate, momentum):
        self.rate = rate

    def step(self, parameters, slope):
        return parameters - self.rate * slope


class VelocityIsTheGradient:
    def __init__(self, rate, momentum):
        self.rate = rate
        self.momentum = momentum
        self.velocity = None

    def __call__(self, parameters, slope):
        if self.velocity is None:
            self.velocity = slope
        else:
            slope += self.momentum * self.velocity
            self.velocity = slope
        return parameters - self.rate * self.velocity


class MomentumOfTorch:
    def __init__(self, rate, momentum):
        self.here = torch.zeros(2, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.here], lr=rate, momentum=momentum)

    def __call__(self, parameters, slope):
        with torch.no_grad():
            self.here.copy_(parameters)
        self.here.grad = slope.clone()
        self.optimizer.step()
        return self.here.detach().clone()


class MomentumInOneMemory:
    """What was returned before is overwritten by the next call."""

    def __init__(self, rate, momentum):
        self.rate, self.momentum, self.velocity, self.out = rate, momentum, 0.0, torch.zeros(2)

    def __call__(self, parameters, slope):
        self.velocity = self.momentum * self.velocity + slope
        return torch.sub(parameters, self.rate * self.velocity, out=self.out)


class MomentumInTheFirstGradient:
    def __init__(self, rate, momentum):
        self.rate, self.momentum, self.velocity = rate, momentum, None

    def __call__(self, parameters, slope):
        if self.velocity is None:
            self.velocity = slope
        else:
            self.velocity *= self.momentum
            self.velocity += slope
        return parameters - self.rate * self.velocity


RIGHT = {
    "1.3": [rate_with_numpy, rate_of_the_formula, rate_by_autograd],
    "1.4": [batches_by_slices, batches_in_a_list, batches_left_over],
    "1.5": [batched_by_counting, batched_by_a_list],
    "1.6": [variance_of_all_at_once, variance_by_var, variance_by_multinomial],
    "1.7": [RateInTheVelocity, momentum_in_a_closure, MomentumOfTorch],
}
WRONG = {
    "1.3": [(rate_of_complex_numbers, "eigvalsh")],
    "1.4": [
        (batches_rolled, ""),
        (batches_forever, "has not ended after more batches than there are samples"),
        (batches_of_a_kept_order, "generators of the same seed give the same batches"),
    ],
    "1.5": [
        (batched_without_a_new_epoch, "StopIteration"),
        (batched_without_moving, "the path holds the start and what step has returned"),
    ],
    "1.6": [
        (variance_without_drawing, "does not depend on the seed"),
        (variance_of_small_batches, ""),
    ],
    "1.7": [
        (WithoutCall, "cannot be called"),
        (VelocityIsTheGradient, "a += b changes it"),
        (MomentumInOneMemory, "the parameters that it is given stay as they were"),
        (MomentumInTheFirstGradient, "a += b changes it"),
    ],
}
