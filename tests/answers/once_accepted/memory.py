"""Wrong answers to lesson 09 that its checks once took for right."""

import torch

from manyhands.memory import savings


class CheckpointThatAddsUp(savings.Checkpoint):
    """The parameters get their gradients behind autograd's back, which is told None."""

    @staticmethod
    def backward(ctx, grad):
        x, *params = ctx.saved_tensors
        x = x.detach().requires_grad_()
        now = savings.rng_states(x.device)
        savings.set_rng_states(ctx.rng, x.device)
        with torch.enable_grad():
            again = ctx.function(x)
        savings.set_rng_states(now, x.device)
        again.backward(grad)
        return None, x.grad, *[None for _ in params]


WRONG = {"9.6": [(CheckpointThatAddsUp, "the gradients of the parameters")]}
