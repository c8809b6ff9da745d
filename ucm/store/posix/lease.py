# SPDX-License-Identifier: MIT
"""HostLease: the right of a batch's workers to touch the caller's memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class LeaseRevokedError(Exception):
    """The caller has taken its memory back; whatever was under way is to be dropped."""


class HostLease:
    """Shared by the workers of one batch, revoked once by its caller.

    A worker touches host memory only inside `with lease:`, and does nothing in
    there that can wait for storage. So `revoke` can wait until nobody is inside,
    and whoever is stuck in storage meanwhile finds the lease gone when it comes
    back. Any number of workers can be inside at once.

    Args:
        give_way: Called between two steps of the work, for others to go first.
    """

    __slots__ = ("_give_way", "_inside", "_left", "_lock", "revoked")

    def __init__(self, give_way: Callable[[], None] | None = None) -> None:
        self._give_way = give_way
        self._lock = threading.Lock()
        self._left: threading.Condition | None = None  # Made when somebody has to wait.
        self._inside = 0
        self.revoked = False

    def __enter__(self) -> None:
        with self._lock:
            if self.revoked:
                raise LeaseRevokedError
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._left is not None and not self._inside:
                self._left.notify_all()

    def step(self) -> None:
        """Let others go first; then raise `LeaseRevokedError` if the lease is gone.

        For work that is not urgent, wherever it could as well stop. Not to be called inside the lease.
        """
        if self._give_way is not None:
            self._give_way()
        if self.revoked:
            raise LeaseRevokedError

    def revoke(self) -> None:
        """Let nobody in any more, and wait until the last one inside has left."""
        with self._lock:
            self.revoked = True
            if self._inside:
                self._left = threading.Condition(self._lock)
                self._left.wait_for(lambda: not self._inside)


class CallersLease(HostLease):
    """What the caller itself works under: nobody can take its memory away."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
