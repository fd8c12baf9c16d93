"""What a rank sends, counted twice: from torch's calls, and by the kernel that carries them."""

import contextlib
import os
import socket
import struct
from pathlib import Path

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

BYTES_SENT = 200  # in Linux's struct tcp_info since 4.19: tcpi_bytes_sent and tcpi_bytes_retrans, 64 bits each


class Sent(TorchDispatchMode):
    """Counts the collectives and sends of what runs inside it, backward too.

    `calls` has the number of each; `bytes` is what such calls must send to other ranks: of an all-to-all and a
    reduce-scatter all but the own part; in an all-gather the own part to each; an all-reduce is these two.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size, self.calls, self.bytes = size, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::").strip("_")
        if func.namespace == "c10d" and name not in ("recv", "barrier"):
            self.calls[name] = self.calls.get(name, 0) + 1
            self.bytes += self._sent(name, args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: tuple) -> int:
        others = self.size - 1
        if name == "send":  # of a list with one tensor
            return of(args[0])
        if name == "alltoall_base":  # (output, input, …)
            return of([args[1]]) * others // self.size
        if name == "allreduce":
            return 2 * of(args[0]) * others // self.size
        if name == "allgather":  # ([outputs], [input], …)
            return of(args[1]) * others
        if name == "reduce_scatter":  # ([output], [inputs], …)
            return of(args[1][0]) * others // self.size
        raise AssertionError(f"how much does {name} send?")


def of(tensors: list) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def on_the_wire() -> int:
    """Bytes that this process has sent over TCP so far, the connections to its peers: Linux counts them by socket."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since, no socket, or none of TCP
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, again = struct.unpack_from("QQ", info, BYTES_SENT)
                total += sent - again
    return total


def sent_by(step) -> int:
    """Runs `step` on all ranks, and returns the bytes that this one has sent meanwhile."""
    dist.barrier()
    before = on_the_wire()
    step()
    dist.barrier()
    return on_the_wire() - before
