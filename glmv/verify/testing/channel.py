"""Messages between a pool and its ranks: JSON with a length in front."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!Q")
Message = dict[str, Any]


class Channel:
    """One end of a stream socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def fileno(self) -> int:
        """For `selectors`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        content = json.dumps(message, default=repr).encode()
        self._socket.sendall(LENGTH.pack(len(content)) + content)

    def receive(self) -> Message | None:
        """Wait for a message; None once the other end is gone."""
        while (message := self._next()) is None:
            if not self._read():
                return None
        return message

    def receive_all(self) -> tuple[list[Message], bool]:
        """What can be read without waiting twice, and whether the other end is still there."""
        alive = self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages, alive

    def _read(self) -> bool:
        try:
            content = self._socket.recv(1 << 20)
        except OSError:
            return False
        self._received += content
        return bool(content)

    def _next(self) -> Message | None:
        if len(self._received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        content = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        return json.loads(content)

    def close(self) -> None:
        """Let the other end see that this one is gone."""
        self._socket.close()
