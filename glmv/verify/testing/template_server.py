"""The template process: it has imported torch but nothing of this project, and forks ranks on request.

It is started as a file and not as a module, because importing the package would import glmv: a rank must be able to put
a seeded fault in before that. One client is one connection; when a connection closes, the ranks it asked for are
killed, and when the owner goes, all are.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

PRELOADED = (
    "pytest",
    "hypothesis",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "transformers.models.glm4v_moe.modeling_glm4v_moe",
)
PR_SET_PDEATHSIG = 1
LONGEST_MESSAGE = 65536


class Server:
    """Accepts clients, forks what they ask for and tells them how it ended."""

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self.listener, self.owner = listener, owner
        self.ranks: dict[int, tuple[socket.socket, int]] = {}
        self.selector = selectors.DefaultSelector()
        self.woken, waker = socket.socketpair()
        for end in (self.woken, waker):
            end.setblocking(False)
        self.waker = waker
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for readable in (listener, owner, self.woken):
            self.selector.register(readable, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], socket.socket] | None:
        """Serve until the owner goes (then None); in a forked rank, return what it was asked to be."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self.selector.register(self.listener.accept()[0], selectors.EVENT_READ)
                elif key.fileobj == self.owner:
                    self._end(list(self.ranks))
                    signal.set_wakeup_fd(-1)
                    return None
                elif key.fileobj is self.woken:
                    self._reap()
                elif (born := self._answer(key.fileobj)) is not None:  # type: ignore[arg-type]
                    return born

    def _answer(self, client: socket.socket) -> tuple[dict[str, Any], socket.socket] | None:
        try:
            message, descriptors, _, _ = socket.recv_fds(client, LONGEST_MESSAGE, 1)
        except OSError:
            message, descriptors = b"", []
        if not message:
            self._forget(client)
            return None
        with without_torch_npu():
            for name in PRELOADED:
                importlib.import_module(name)
        gc.freeze()
        with open(message.decode(), encoding="utf-8") as file:
            request = json.load(file)
        pid = os.fork()
        if pid == 0:
            self._leave()
            return request, socket.socket(fileno=descriptors[0])
        os.close(descriptors[0])
        self.ranks[pid] = client, request["rank"]
        self._tell(client, {"rank": request["rank"], "pid": pid})
        return None

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(LONGEST_MESSAGE)
        while self.ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            client, rank = self.ranks.pop(pid)
            # What the rank started and left behind is in its process group.
            self._kill_group(pid)
            self._tell(client, {"rank": rank, "exit_code": os.waitstatus_to_exitcode(status)})

    def _forget(self, client: socket.socket) -> None:
        self.selector.unregister(client)
        client.close()
        self._end([pid for pid, (asked_by, _) in self.ranks.items() if asked_by is client])

    def _end(self, pids: list[int]) -> None:
        """Kill ranks that have not been reaped yet, with all that they started."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # one that was just forked may not lead a process group yet
            self._kill_group(pid)

    @staticmethod
    def _kill_group(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    @staticmethod
    def _tell(client: socket.socket, message: dict[str, int]) -> None:
        with contextlib.suppress(OSError):
            client.send(json.dumps(message).encode())

    def _leave(self) -> None:
        """In a forked rank: let go of all that belongs to the template."""
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        clients = {key.fileobj for key in self.selector.get_map().values() if isinstance(key.fileobj, socket.socket)}
        self.selector.close()
        for end in (*clients, self.listener, self.woken, self.waker):
            end.close()


@contextlib.contextmanager
def without_torch_npu() -> Iterator[None]:
    """Transformers imports torch_npu where it is installed: nothing to do before a fork, and it may fail."""
    sys.modules["torch_npu"] = None  # type: ignore[assignment] # Python's own way of saying that there is none
    try:
        yield
    finally:
        del sys.modules["torch_npu"]


def become(request: dict[str, Any], control: socket.socket) -> int:
    """Turn this forked process into the rank that the request describes; its exit code."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    with open(os.devnull) as nothing, open(request["output"], "ab", buffering=0) as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stacks = open(request["stacks"], "a", encoding="utf-8")  # noqa: SIM115 - open for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    return int(importlib.import_module(request["module"]).main(request, control))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    born = Server(socket.socket(fileno=int(sys.argv[1])), owner=0).serve()
    if born is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        code = 1
        try:
            code = become(*born)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Without the interpreter's own end: threads of a broken process group may never come to one.
            os._exit(code)
