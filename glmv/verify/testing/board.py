"""What ranks tell each other beside the process group that is under test: JSON values in a store of their own."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

PREFIX = "glmv-testing"
# A wait ends earlier: whoever sees that a rank is lost ends the process.
WHOLE_DAY = timedelta(days=1)


class Board:
    """One client of the store. Two threads must not share one: a wait keeps all others out."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    @classmethod
    def of_launch(cls) -> Board:
        """The board of the ranks that were launched together with this one."""
        import torch.distributed as dist

        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = int(os.environ["MASTER_PORT"])
            store: dist.Store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=WHOLE_DAY)
        else:
            store = next(dist.rendezvous("env://", timeout=WHOLE_DAY))[0]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(dist.PrefixStore(f"{PREFIX}/{attempt}", store))

    def another(self) -> Board:
        """A client for another thread."""
        return Board(self._store.clone())  # type: ignore[attr-defined]

    def put(self, key: str, value: Any) -> None:  # noqa: ANN401 - whatever JSON can say
        """Make a value known to all ranks."""
        self._store.set(key, json.dumps(value, default=repr))

    def get(self, key: str) -> Any:  # noqa: ANN401 - whatever JSON can say
        """The value, or None if nobody has put it yet."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def wait_for_ranks(self, *keys: str) -> list[Any]:
        """The values, as soon as all are there."""
        self._store.wait(list(keys), WHOLE_DAY)
        return [json.loads(value) for value in self._store.multi_get(list(keys))]
