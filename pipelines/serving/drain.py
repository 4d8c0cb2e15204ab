"""Shorten the drain of a tritonserver on which nothing runs, and of none on which something does.

Given SIGTERM, tritonserver 2.51 first waits until every HTTP connection is closed, for as long as the drain may take:
an idle connection that a client keeps open holds it up to the end. Then it waits for inferences, without those of
decoupled python models that answer over gRPC, and then unloads its models, which takes seconds and is of no use to a
process that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.host.keeper import stat_of

HTTP_WAITS = re.compile(r"Found [1-9]\d* HTTP service connections")
INFERENCES_ENDED = re.compile(r"All models are stopped, unloading models")
SILENT_MS = 600  # the server looks at its connections once a second
IDLE_WINDOW_S, IDLE_SHARE = 0.3, 0.1
"""Processes are idle when they use less than this share of one core for that long."""

PORTS = ("http_port", "grpc_port")
PIDFD_GETFD = 438  # of every architecture
SOCK_DIAG_BY_FAMILY, TCP_INFO, NLM_F_REQUEST_DUMP, NLMSG_DONE, NLMSG_ERROR = 20, 2, 0x301, 3, 2
ESTABLISHED = 1
HEADER, REQUEST = struct.Struct("=IHHII"), struct.Struct("=BBBBI48s")
DIAG_BYTES = 72  # struct inet_diag_msg
LAST_SENT, LAST_RECEIVED, BYTES_ACKED, BYTES_RECEIVED = 44, 52, 120, 128  # offsets in struct tcp_info


@dataclass(frozen=True, slots=True)
class Connection:
    """The server's end of a TCP connection.

    Attributes:
        inode: of its socket.
        sent_ms: milliseconds since data was sent, in steps of the kernel's clock (4 ms).
        received_ms: milliseconds since data was received, in the same steps.
        acknowledged: bytes of the server that have arrived.
        received: bytes that the server has received.
    """

    inode: int
    sent_ms: int
    received_ms: int
    acknowledged: int
    received: int

    @property
    def waits_for_a_request(self) -> bool:
        """Whether the last bytes were the server's and a while ago, or there were none at all.

        The same is true of a stream in a pause, and of a request that came within a step of the clock after the last
        response: neither can be while the server's processes are idle.
        """
        answered = self.acknowledged > 0 and SILENT_MS <= self.sent_ms <= self.received_ms
        return not self.received or answered


class Drain:
    """Watches one server that was told to end."""

    def __init__(self, pid: int, ports: Mapping[str, int], read_log: Callable[[], Sequence[str]]) -> None:
        """Watch.

        Args:
            pid: of tritonserver.
            ports: http_port and grpc_port.
            read_log: returns the lines since it was told to end.
        """
        self._pid, self._ports, self._read_log = pid, ports, read_log
        self._idle = IdleWatch(pid)

    def streams_over_grpc(self) -> bool:
        """Return whether a gRPC connection was sent something a moment ago.

        tritonserver would unload the models of such a stream at once, and it would end with an error.
        """
        return any(each.sent_ms < SILENT_MS for each in connections(self._ports["grpc_port"]) if each.received)

    def finished(self) -> bool:
        """Return whether all requests have been answered; close HTTP connections that wait for none."""
        if not self._idle.look():
            return False
        lines = self._read_log()
        if any(INFERENCES_ENDED.search(line) for line in lines):
            return all(each.sent_ms >= SILENT_MS for port in PORTS for each in connections(self._ports[port]))
        if any(HTTP_WAITS.search(line) for line in lines):
            http = connections(self._ports["http_port"])
            close(self._pid, [each.inode for each in http if each.waits_for_a_request])
        return False


class IdleWatch:
    """Notices that the processes of a session use hardly any processor time: no model generates anything."""

    def __init__(self, pid: int) -> None:
        self._session = os.getsid(pid)
        self._seen: list[tuple[float, float]] = []  # time, processor seconds

    def look(self) -> bool:
        """Return whether they were idle for `IDLE_WINDOW_S`."""
        now = time.monotonic()
        self._seen.append((now, self._used()))
        before = [entry for entry in self._seen if now - entry[0] >= IDLE_WINDOW_S]
        if not before:
            return False
        then, used = before[-1]
        return self._seen[-1][1] - used < IDLE_SHARE * (now - then)

    def _used(self) -> float:
        ticks = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    stat = stat_of(entry.name)
                    if int(stat[3]) == self._session:
                        ticks += int(stat[11]) + int(stat[12])  # utime, stime
        return ticks / os.sysconf("SC_CLK_TCK")


def connections(port: int) -> Iterator[Connection]:
    """List the established connections to a port of this machine; none where the kernel does not tell."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:
            asked = REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (TCP_INFO - 1), 0, 1 << ESTABLISHED, bytes(48))
            kernel.send(HEADER.pack(HEADER.size + len(asked), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 0, 0) + asked)
            yield from (each for local, each in _answers(kernel) if local == port)


def _answers(kernel: socket.socket) -> Iterator[tuple[int, Connection]]:
    """Yield local port and connection from the kernel's messages."""
    while True:
        data = kernel.recv(1 << 16)
        while data:
            length, kind, *_ = HEADER.unpack_from(data)
            if kind in (NLMSG_DONE, NLMSG_ERROR):
                return
            message, data = data[HEADER.size : length], data[(length + 3) & ~3 :]
            info = dict(_attributes(message[DIAG_BYTES:])).get(TCP_INFO, b"")
            if len(info) >= BYTES_RECEIVED + 8:
                (port,) = struct.unpack_from("!H", message, 4)
                (inode,) = struct.unpack_from("=I", message, DIAG_BYTES - 4)
                sent, received = (struct.unpack_from("=I", info, at)[0] for at in (LAST_SENT, LAST_RECEIVED))
                yield port, Connection(inode, sent, received, *struct.unpack_from("=QQ", info, BYTES_ACKED))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        yield kind, data[4:length]
        data = data[max((length + 3) & ~3, 4) :]


def close(pid: int, inodes: Sequence[int]) -> None:
    """Shut sockets of another process down, as if their clients had closed them; nothing where that is not allowed."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()) in wanted:
                        _shut_down(process, int(entry.name))
        finally:
            os.close(process)


def _shut_down(process: int, number: int) -> None:
    copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, number, 0)
    if copy >= 0:
        with socket.socket(fileno=copy) as found:
            found.shutdown(socket.SHUT_RDWR)
