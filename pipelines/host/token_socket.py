"""Tokens of streamed answers, from the engine's process straight to the OpenAI service on the same machine.

Through tritonserver, each token of a stream wakes two more processes and the engine waits for an acknowledgement; on a
machine whose cores all compute, that is a tenth of a token's time. So a request carries an address and a key
(`PARAMETER`), and all but the last of its tokens may be sent there. If the service is unreachable (another container)
or does not keep up, tokens go through tritonserver instead. Order is kept: the service reads the socket before each
response of tritonserver.
"""

import re
import secrets
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

PARAMETER = "token_socket"
"""Of a Triton request: the address and the key, as `TokenListener.expect` returns them."""
NAME = "\0trtllm-pipelines-{}"
FORM = re.compile(r"([0-9a-f]{16}) ([0-9a-f]{16})")
KEY = struct.Struct("=Q")
MOST_SERVICES = 8
LARGEST = 65_536
"""Bytes of one message, more than the tokens of one iteration."""
TOKEN = "i"


class TokenConnections:
    """The engine's side: connections to services, each made when it is first used."""

    def __init__(self) -> None:
        self._open: dict[str, socket.socket] = {}
        self._lock = threading.Lock()

    def send(self, target: tuple[str, int], tokens: Sequence[int]) -> bool:
        """Send new tokens without waiting, from any thread.

        Returns:
            whether the service gets them; if not, it gets nothing more here.
        """
        address, key = target
        with self._lock, suppress(OSError):
            connection = self._open.get(address) or self._connected(address)
            try:
                connection.send(KEY.pack(key) + array(TOKEN, tokens).tobytes())
            except BlockingIOError:  # the service does not keep up; others of its requests may
                return False
            except OSError:
                self._open.pop(address).close()
                raise
            return True
        return False

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for connection in self._open.values():
                connection.close()
            self._open.clear()

    def _connected(self, address: str) -> socket.socket:
        if len(self._open) >= MOST_SERVICES:
            raise ConnectionRefusedError(f"{MOST_SERVICES} services are connected")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            connection.connect(NAME.format(address))
        except OSError:
            connection.close()
            raise
        self._open[address] = connection
        return connection


def parsed(parameter: str) -> tuple[str, int] | None:
    """Return the address and the key of a request's parameter; None if it is not of their form."""
    match = FORM.fullmatch(parameter)
    return (match[1], int(match[2], 16)) if match else None


class TokenListener:
    """The service's side. Not for several threads."""

    def __init__(self) -> None:
        """Choose an address; `open` listens."""
        self._address = secrets.token_hex(8)
        self._takers: dict[int, Callable[[tuple[int, ...]], None]] = {}
        self._listening: socket.socket | None = None
        self._connections: list[socket.socket] = []
        self._watch: Callable[[int, Callable[[], None]], None] = lambda _number, _read: None
        self._unwatch: Callable[[int], object] = lambda _number: None

    def open(self, watch: Callable[[int, Callable[[], None]], None], unwatch: Callable[[int], object]) -> None:
        """Listen.

        Args:
            watch: calls a function when a file can be read (`loop.add_reader`).
            unwatch: ends that (`loop.remove_reader`).
        """
        self._watch, self._unwatch = watch, unwatch
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listening.bind(NAME.format(self._address))
        self._listening.listen(MOST_SERVICES)
        watch(self._listening.fileno(), self.read)

    def close(self) -> None:
        """Stop listening."""
        for each in (*self._connections, *([self._listening] if self._listening else [])):
            self._unwatch(each.fileno())
            each.close()
        self._listening, self._connections = None, []

    def expect(self, take: Callable[[tuple[int, ...]], None]) -> tuple[str, int]:
        """Pass the tokens of a new request on to a function; return the request's parameter, and its key."""
        key = secrets.randbits(64)
        self._takers[key] = take
        return f"{self._address} {key:016x}", key

    def forget(self, key: int) -> None:
        """Drop what still comes for a request."""
        self._takers.pop(key, None)

    def read(self) -> None:
        """Pass on all that has come."""
        if self._listening is None:
            return
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listening.accept()
                connection.setblocking(False)
                self._connections.append(connection)
                self._watch(connection.fileno(), self.read)
        for connection in self._connections[:]:
            self._read(connection)

    def _read(self, connection: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                try:
                    message = connection.recv(LARGEST)
                except ConnectionError:
                    message = b""
                if not message:
                    self._connections.remove(connection)
                    self._unwatch(connection.fileno())
                    connection.close()
                    return
                if len(message) < KEY.size or len(message) % KEY.size % array(TOKEN).itemsize:
                    continue
                take = self._takers.get(KEY.unpack_from(message)[0])
                if take is not None:
                    take(tuple(array(TOKEN, message[KEY.size :])))
