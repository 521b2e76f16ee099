"""Start the template process, and ask it for ranks.

`GLMV_TEST_TEMPLATE` holds the address of a template that somebody else started and will end: `glmv faults run` shares
one between all faults, a session of pytest-xdist between its workers.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = "GLMV_TEST_TEMPLATE"
SERVER = Path(__file__).with_name("template_server.py")


class Template:
    """A template process that this process owns; it ends with its owner, however that ends."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="glmv-")
        self.address = os.path.join(self._directory, "template")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen()
            # -P: the directory of the file, which has modules of common names, stays off the path.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(SERVER), str(listener.fileno())],
                stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True, env=_environment(),
            )  # fmt: skip

    def stop(self) -> None:
        """End the template and every rank that it still has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _environment() -> dict[str, str]:
    # No thread may run when the template forks, and no backend of a device may have been loaded.
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1"}


class Spawner:
    """One client's connection to a template; closing it kills the ranks that were asked for through it."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)

    def fileno(self) -> int:
        """For `selectors`: readable when a rank was born or ended."""
        return self._socket.fileno()

    def spawn(self, request: Path, control: socket.socket) -> None:
        """Ask for the rank that a request file describes; it talks through `control`."""
        socket.send_fds(self._socket, [str(request).encode()], [control.fileno()])

    def receive(self) -> dict[str, int] | None:
        """The next birth ({"rank", "pid"}) or end ({"rank", "exit_code"}); None if the template is gone."""
        try:
            message = self._socket.recv(65536)
        except OSError:
            return None
        return json.loads(message) if message else None

    def close(self) -> None:
        """Kill what is left of the ranks."""
        self._socket.close()
