"""Ways to train in less memory: small pieces, computing twice, shorter numbers.

    accumulate      a large batch piece by piece: the activations of one piece at a time
    checkpointed    forward keeps a module's input only; backward computes the rest again
                    in --> [block] --> [block] --> loss     kept: the inputs of the blocks
                            again  <--  again  <--          and one block's activations at a time
    MasterWeights   compute in bfloat16; step copies of the weights in fp32, where small steps count

Price: accumulation costs only smaller pieces of work; a checkpoint costs a second forward, which is
a third more work; master weights cost 4 bytes per parameter, while weights and gradients shrink
from 4 bytes each to 2. During its step the gradients are in fp32, 2 bytes per parameter more.
Sources: Chen et al. 2016, https://arxiv.org/abs/1604.06174; Micikevicius et al. 2018, "Mixed
Precision Training", https://arxiv.org/abs/1710.03740, section 3.1.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def accumulate(model: nn.Module, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Add the gradient of one large batch to .grad, micro-batch by micro-batch; return its loss.

    `model(inputs, targets)` returns the mean loss of the targets. Micro-batches (inputs, targets)
    may differ in size, and there may be more inputs than targets. Each target of the large batch
    counts the same. Only one micro-batch's graph exists at a time, and the returned loss has none.
    A frozen parameter gets no gradient: its .grad stays None.
    """
    num_targets = sum(targets.numel() for _, targets in micro_batches)
    losses = []
    for inputs, targets in micro_batches:
        loss = model(inputs, targets) * (targets.numel() / num_targets)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


class Checkpoint(torch.autograd.Function):
    """Run a function and keep only its input; backward runs the function a second time."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        function: Callable[[Tensor], Tensor],
        x: Tensor,
        *params: nn.Parameter,
    ) -> Tensor:
        """Return function(x), and keep what backward needs: the input and the random states.

        Tensors go to ctx.save_for_backward, so that autograd can count them, free them, and notice
        changes in place; everything else becomes an attribute of ctx. Autograd records nothing in
        here. `params` are the trainable parameters that the function uses: they are arguments so
        that autograd asks for their gradients.
        """
        ctx.function, ctx.rng = function, rng_states(x.device)
        ctx.save_for_backward(x, *params)
        return function(x)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Run the function again on its input, with the same random numbers, and differentiate.

        Returns a tuple with one entry for each argument of forward: None for the function, then the
        gradients of x and of every parameter, None for one that took no part. Afterwards the
        random states are what they were before the call.
        """
        x, *params = ctx.saved_tensors
        x = x.detach().requires_grad_()
        now = rng_states(x.device)
        set_rng_states(ctx.rng, x.device)
        with torch.enable_grad():
            again = ctx.function(x)
        set_rng_states(now, x.device)
        return None, *torch.autograd.grad(again, (x, *params), grad, allow_unused=True)


def checkpointed(
    module: nn.Module, x: Tensor, rule: type[torch.autograd.Function] = Checkpoint
) -> Tensor:
    """Return module(x); its activations are dropped in forward and computed again in backward.

    The module runs twice, so what its forward changes is changed twice: batch norm's running
    statistics count each batch double, as with PyTorch's checkpoint. x may be whole numbers.

    Raises:
        ValueError: the module returns something else than one tensor, or uses a weight that is not
            among its own parameters: the checkpoint would lose that one's gradient.
    """
    device = x.device.type
    precision = {
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
    }

    def function(x: Tensor) -> Tensor:  # backward runs outside the `with` of autocast
        with torch.autocast(device, **precision), Uses([x, *params]):
            out = module(x)
        if not isinstance(out, Tensor):
            raise ValueError(
                f"a checkpointed module returned {type(out).__name__}: let it return one tensor"
            )
        return out

    params = [param for param in module.parameters() if param.requires_grad]
    if x.is_floating_point():
        return rule.apply(function, x, *params)
    # Whole numbers have no gradient: the function brings them itself, and 0 stands in for them.
    return rule.apply(lambda _: function(x), torch.zeros((), device=x.device), *params)


class Uses(TorchFunctionMode):
    """Raise ValueError where a function is given a tensor that wants a gradient and is not known.

    It tells in forward only, where autograd is off: then nothing that is computed inside wants one.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {id(tensor) for tensor in known}

    def __torch_function__(self, func, types, args=(), kwargs=None):  # torch's own signature
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            return func(*args, **kwargs)
        for part in tree_leaves((args, kwargs)):
            if isinstance(part, Tensor) and part.requires_grad and id(part) not in self.known:
                raise ValueError(
                    f"a checkpointed module uses a weight of shape {tuple(part.shape)} that is not "
                    "among its own parameters, so the weight would get no gradient: register it in "
                    "the module"
                )
        return func(*args, **kwargs)


def rng_states(device: torch.device) -> list[Tensor]:
    """Return the states of the random generators, of the CPU and of a GPU."""
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]


def set_rng_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Continue with the random numbers from the point at which `rng_states` was called."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class MasterWeights:
    """Step fp32 copies of short weights, so that no step is lost because it is too small.

    The copies are made once. After other weights were loaded into the model call reload(), or the
    next step would bring the old ones back. A checkpoint needs state_dict(): the short weights have
    lost the copies' last bits.

    Args:
        params: those of a model in bfloat16, for example. Frozen ones stay as they are.
        make_optimizer: gets the fp32 copies and returns the optimizer that steps them.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.params = [param for param in params if param.requires_grad]
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = make_optimizer(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        """Step the copies by the parameters' gradients, and round the result into the parameters.

        A parameter without a gradient stays as it is. No gradient is left afterwards, neither of
        the parameters nor of the copies.
        """
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
            param.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    @torch.no_grad()
    def reload(self) -> None:
        """Take the weights as they are in the parameters now; the optimizer's state stays."""
        for param, master in zip(self.params, self.masters, strict=True):
            master.copy_(param)

    def state_dict(self) -> dict[str, object]:
        """The copies and the optimizer's state; like an optimizer's, it does not copy them."""
        return {"masters": [*self.masters], "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from a state_dict(), also in the parameters, which get its weights, rounded."""
        for param, master, saved in zip(self.params, self.masters, state["masters"], strict=True):
            master.copy_(saved)
            param.copy_(master)
        self.optimizer.load_state_dict(state["optimizer"])
