"""A network of which you choose latency and bandwidth, between the ranks of one machine.

    with SlowNetwork(latency_s=5e-3, bytes_per_s=100e6):
        all_reduce_ring(tensor)      takes as long as it would on such a network

Between the ranks of one machine messages are copies, and the ranks share its cores. Here every
rank has a network card: a thread that carries one message out at a time and sleeps while a real
one would be on its way. Messages that come in pass one after the other, too. The messages are
real, the time that they take is a model. Works on send, recv, isend, irecv and batches of them. A
Ledger does not see the sends, since the card's thread makes them; NCCL's rules (rules.py) stand
above the network, and see the calls of the program.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist
from torch import Tensor

from manyhands.ranks.rules import replace_in_dist

PATCHED = ("send", "recv", "isend", "irecv")


class SlowNetwork:
    """Slow this rank's messages down while the block runs. Enter it on every rank.

    Args:
        latency_s: of every message, however small.
        bytes_per_s: how fast the bytes follow.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.in_free_s = 0.0  # when the last message had come in

    def __enter__(self) -> "SlowNetwork":
        self.card = ThreadPoolExecutor(1)
        self.real = replace_in_dist({name: getattr(self, f"_{name}") for name in PATCHED})
        return self

    def __exit__(self, *exc: object) -> None:
        replace_in_dist(self.real)
        self.card.shutdown()

    def _isend(self, tensor: Tensor, *args, **kwargs) -> "Outgoing":
        return Outgoing(self.card.submit(self._carry, tensor, args, kwargs))

    def _send(self, tensor: Tensor, *args, **kwargs) -> None:
        self._isend(tensor, *args, **kwargs).wait()

    def _irecv(self, tensor: Tensor, *args, **kwargs) -> "Incoming":
        return Incoming(self, tensor, self.real["irecv"](tensor, *args, **kwargs))

    def _recv(self, tensor: Tensor, *args, **kwargs) -> None:
        self._irecv(tensor, *args, **kwargs).wait()

    def _carry(self, tensor: Tensor, args: tuple, kwargs: dict) -> None:
        time.sleep(self._message_s(tensor))
        self.real["isend"](tensor, *args, **kwargs).wait()

    def _message_s(self, tensor: Tensor) -> float:
        return self.latency_s + tensor.nbytes / self.bytes_per_s

    def come_in(self, tensor: Tensor) -> None:
        """Sleep until a message that has arrived would have passed behind the one before it."""
        time.sleep(max(0.0, self.in_free_s + self._message_s(tensor) - time.monotonic()))
        self.in_free_s = time.monotonic()


class Outgoing:
    """A message on its way out; stands in for torch's Work."""

    def __init__(self, carried: Future) -> None:
        self.carried = carried

    def wait(self) -> bool:
        self.carried.result()
        return True

    def is_completed(self) -> bool:
        return self.carried.done()


class Incoming:
    """A message on its way in; stands in for torch's Work."""

    def __init__(self, network: SlowNetwork, tensor: Tensor, work: dist.Work) -> None:
        self.network, self.tensor, self.work = network, tensor, work

    def wait(self) -> bool:
        self.work.wait()
        self.network.come_in(self.tensor)
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed()
