"""What optimizers keep: a save changes nothing, and a run that is resumed at any moment equals the
run without a break, also before its first step or before a parameter's first gradient."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from manyhands.fsdp.units import FSDP
from manyhands.layerwise.optimizers import LAMB, LARS, NovoGrad
from manyhands.ranks.lab import run_ranks
from manyhands.saving.kept import optimizer_state, set_groups
from manyhands.saving.names import flatten
from manyhands.saving.pieces import model_state
from manyhands.saving.sharded import load_sharded, save_sharded

MAKES = {
    "SGD": lambda params: optim.SGD(params, lr=0.1, weight_decay=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "Nesterov": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: optim.Adam(params, lr=0.1, weight_decay=0.1),
    "AdamW": lambda params: optim.AdamW(params, lr=0.1),
    "AdamW, lr a tensor": lambda params: optim.AdamW(params, lr=torch.tensor(0.1)),
    "amsgrad": lambda params: optim.AdamW(params, lr=0.1, amsgrad=True),
    "NAdam": lambda params: optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: optim.RAdam(params, lr=0.1),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda params: optim.Rprop(params, lr=0.1),
    "LARS": lambda params: LARS(params, lr=0.1, weight_decay=0.1, lr_inside=False),
    "LAMB": lambda params: LAMB(params, lr=0.1),
    "NovoGrad": lambda params: NovoGrad(params, lr=0.1),
}
STEPS = 6


class Two:
    """Two parameters, of which the second has no gradient in the first three steps."""

    def __init__(self, make):
        draw = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(4, 3, generator=draw)) for _ in range(2)]
        self.optimizer = make(self.params)
        # It puts its own `step` into the optimizer, and warns where that was not called.
        self.scheduler = optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train(self, steps):
        for step in steps:
            draw = torch.Generator().manual_seed(1 + step)
            grads = [torch.randn(4, 3, generator=draw) for _ in range(2)]
            for param, grad in zip(self.params, grads[: 1 if step < 3 else 2], strict=False):
                param.grad = grad
            self.optimizer.step()
            self.scheduler.step()

    def state(self):
        return {"weights": self.params, "optimizer": optimizer_state(self.optimizer)}

    def load(self, folder):
        loaded = load_sharded(self.state(), folder)
        set_groups(self.optimizer, loaded["optimizer"]["groups"])


class Sharded:
    """A model in shards by hand."""

    def __init__(self, make):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        self.model = FSDP(module, [module[0]])
        self.params = list(self.model.parameters())
        self.optimizer = make(self.params)

    def train(self, steps):
        for step in steps:
            draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 3, generator=draw)).square().mean().backward()
            self.optimizer.step()

    def state(self):
        flats = list(chain(*self.model.units))
        kept = optimizer_state(self.optimizer, flats)
        return {"model": model_state(self.model, flats), "optimizer": kept}

    load = Two.load


def differences(kind, name, at, folder):
    """How far weights are off, after a save at this step, and after a resume from it."""
    make = MAKES[name]
    undisturbed, saved, stepped = kind(make), kind(make), kind(make)
    undisturbed.train(range(STEPS))
    saved.train(range(at))
    save_sharded(saved.state(), folder)
    fresh = kind(make)
    stepped.train(range(STEPS))  # it keeps more than a checkpoint of an early step has
    for one in (fresh, stepped):
        with torch.no_grad():
            for param in one.params:
                param.add_(1)
                param.grad = None
        one.load(folder)
    off = []
    for one in (saved, fresh, stepped):
        one.train(range(at, STEPS))
        pairs = zip(one.params, undisturbed.params, strict=True)
        off.append(max((a - b).abs().max().item() for a, b in pairs))
    return off


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("name", MAKES)
def test_saved_at_any_step_and_resumed_it_equals_an_undisturbed_run(name, at, tmp_path):
    assert differences(Two, name, at, tmp_path) == [0, 0, 0]


def all_in_shards(folder):
    layerwise = ("LARS", "LAMB", "NovoGrad")  # they refuse shards of several layers
    names = [name for name in MAKES if name not in layerwise]
    return {name: differences(Sharded, name, 0, f"{folder}/{name}") for name in names}


def test_in_shards_as_well(tmp_path):
    for found in run_ranks(all_in_shards, 2, str(tmp_path)):
        assert found == dict.fromkeys(found, [0, 0, 0])


def test_what_cannot_be_kept_is_refused_in_one_line(tmp_path):
    weight = nn.Parameter(torch.ones(3))
    lbfgs = optim.LBFGS([weight])
    closure = lambda: (weight.square().sum().backward(), weight.square().sum())[1]  # noqa: E731
    save_sharded({"optimizer": optimizer_state(lbfgs)}, tmp_path)  # nothing yet
    load_sharded({"optimizer": optimizer_state(lbfgs)}, tmp_path)
    lbfgs.step(closure)
    with pytest.raises(ValueError, match="LBFGS keeps a list called"):
        save_sharded({"optimizer": optimizer_state(lbfgs)}, tmp_path)
    lbfgs.state["beside"] = {"count": 1}
    with pytest.raises(ValueError, match="LBFGS keeps a state that belongs to none"):
        optimizer_state(lbfgs)


def test_a_state_with_other_names_is_refused_and_the_optimizer_stays_as_it_was(tmp_path):
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    adam = optim.Adam([weight])
    adam.step()
    save_sharded({"optimizer": optimizer_state(adam)}, tmp_path)
    for other, words in (
        (optim.Adam([weight], amsgrad=True), "max_exp_avg_sq is not in the checkpoint"),
        (optim.SGD([weight], momentum=0.9), "momentum_buffer is not in the checkpoint"),
        (optim.LBFGS([weight]), "of LBFGS cannot be made ahead of its first step, to load into"),
    ):
        state = {"optimizer": {"state": optimizer_state(other)["state"]}}
        with pytest.raises(ValueError, match=words):
            load_sharded(state, tmp_path, keep=["optimizer/groups"])
        assert not other.state


def test_numbers_in_a_state_are_saved_and_loaded(tmp_path):
    class Counts(optim.SGD):
        def step(self):
            super().step()
            for param in self.param_groups[0]["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1

    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    counts = Counts([weight])
    for _ in range(3):
        counts.step()
    save_sharded({"optimizer": optimizer_state(counts)}, tmp_path)
    new = Counts([weight])
    load_sharded({"optimizer": optimizer_state(new)}, tmp_path)
    assert new.state[weight]["count"] == 3
    assert flatten(optimizer_state(new))[1]["state/0/count"] == 3
