"""Is it a rank of this user to which a new group is connected? The kernel knows.

gloo opens a port while ranks join, and takes for a rank whoever comes first and says its number, a
small one. Such a stranger would read the rank's messages and answer them, also those that carry a
pickle. Whoever else connects to the port stays without a word, so a group is sound when each of its
connections leads to this user. Linux only: elsewhere nobody looks.

    /proc/self/fdinfo   which connections gloo listens to: those of the group
    sock_diag           who owns the other end of a connection on this machine

Source: https://man7.org/linux/man-pages/man7/sock_diag.7.html
"""

import os
import re
import select
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from manyhands.ranks import private

ESTABLISHED = 1
MAPPED = "::ffff:"  # before an address of IPv4 that is written as one of IPv6
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
ANSWER_S = 5.0  # the kernel answers at once
NO_COOKIE = b"\xff" * 8
_known: set[tuple[int, str]] = set()  # sockets of this process that were there before


class Stranger(RuntimeError):
    """Another user has taken the place of a rank."""


class End(NamedTuple):
    """One end of a connection on this machine."""

    state: int
    uid: int  # of its owner


def watch_groups() -> None:
    """Look at each group of one machine's ranks that this process joins from now on."""
    make = dist.distributed_c10d._new_process_group_helper

    def watched(group_size: int, *args: object, **named: object) -> tuple:
        made = make(group_size, *args, **named)
        is_here = private.STORE in os.environ and sys.platform == "linux"
        if is_here and group_size > 1 and _is_gloos(made[0]):
            refuse_strangers(group_size - 1)
        return made

    dist.distributed_c10d._new_process_group_helper = watched


def _is_gloos(group: object) -> bool:
    """Is this process in the group, and does gloo carry its messages?"""
    if not isinstance(group, dist.ProcessGroup):
        return False
    with suppress(RuntimeError):  # NCCL's alone
        return isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    return False


def refuse_strangers(num_peers: int) -> None:
    """Raise Stranger where a connection that is new does not lead to this user.

    Args:
        num_peers: how many connections the group has.
    """
    sockets = set(_descriptors("socket"))
    new = sockets - _known
    _known.clear()
    _known.update(sockets)
    are_ours = {number: ours for number, _ in new if (ours := _is_to_this_user(number)) is not None}
    if all(are_ours.values()):
        return
    # Somebody is there who does not belong to the group; is it complete without him?
    listened = set(_listened())
    if sum(ours and number in listened for number, ours in are_ours.items()) < num_peers:
        raise Stranger("another user of this machine has connected in the place of a rank")


def _descriptors(kind: str) -> Iterator[tuple[int, str]]:
    """This process's descriptors of a kind, each with what it is."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith(kind):
                yield int(name), link


def _listened() -> Iterator[int]:
    """The descriptors that gloo listens to for good: not those that have yet to say a number."""
    for number, _ in _descriptors("anon_inode:[eventpoll]"):
        text = Path(f"/proc/self/fdinfo/{number}").read_text()
        for target, events in re.findall(r"tfd:\s*(\d+) events:\s*(\w+)", text):
            if not int(events, 16) & select.EPOLLONESHOT:
                yield int(target)


def _is_to_this_user(number: int) -> bool | None:
    """Is a connection to a process of this user? None for other sockets, or if nobody can tell."""
    with socket.socket(fileno=os.dup(number)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            here, there = one.getsockname()[:2], one.getpeername()[:2]
        except OSError:  # it is not connected
            return None
    if (mine := _end(here, there)) is None:
        return None
    other = _end(there, here)
    return other == End(ESTABLISHED, mine.uid)


def _end(here: tuple[str, int], there: tuple[str, int]) -> End | None:
    """What the kernel says of the socket with this address that is connected to that one."""
    addresses = [name.removeprefix(MAPPED) for name, _ in (here, there)]
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    packed = b"".join(socket.inet_pton(family, name).ljust(16, b"\0") for name in addresses)
    names = struct.pack("!HH", here[1], there[1]) + packed + bytes(4) + NO_COOKIE
    asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + names
    head = struct.pack("=IHHII", 16 + len(asked), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(ANSWER_S)
            kernel.send(head + asked)
            told = kernel.recv(4096)
    except OSError:  # some containers may not ask
        return None
    if struct.unpack_from("=H", told, 4)[0] != SOCK_DIAG_BY_FAMILY:
        return None
    return End(told[17], struct.unpack_from("=I", told, 80)[0])
