"""Messages between launcher and job server: a line of JSON each, over a stream socket, with file descriptors beside it."""

from __future__ import annotations

import json
import socket
from typing import Any

_CHUNK = 65536
_MOST_DESCRIPTORS = 2


class Channel:
    """One end of the connection.

    Attributes:
        descriptors: file descriptors that came with the latest messages; who takes them removes them.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""
        self.descriptors: list[int] = []

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        line = json.dumps(message).encode() + b"\n"
        if not descriptors:
            self._socket.sendall(line)
        elif (sent := socket.send_fds(self._socket, [line], descriptors)) < len(line):
            self._socket.sendall(line[sent:])

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived; waits until at least some bytes have.

        Raises:
            EOFError: the other end is gone.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK, _MOST_DESCRIPTORS)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            raise EOFError
        self.descriptors += descriptors
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
