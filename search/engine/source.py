"""Problems as they are wanted, without ever waiting for a slow iterator while searches are open."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from queue import Empty, SimpleQueue

from mas_gym.errors import DataError
from mas_gym.tasks.base import Problem

GRACE_SECONDS = 0.02
"""How long to wait for an iterator before work on open searches goes on."""


class Source:
    """Reads problems one by one, and no sooner than they are wanted.

    A task, a list and whatever else has a length is read in place. Any other iterable may block
    (a queue, a socket, a person), so it is read on a thread of its own.

    Attributes:
        exhausted: Whether there are no more.
    """

    def __init__(self, problems: Iterable[Problem], wake: Callable[[], None]) -> None:
        """Read from ``problems``; ``wake`` is called on the reader's thread whenever there is news."""
        self.exhausted = False
        self._seen: set[str] = set()
        self._iterator = iter(problems)
        self._reader = None if isinstance(problems, Sized) else _Reader(self._iterator, wake)

    def poll(self) -> Problem | None:
        """Return the next problem; None if there is none now, or, when `exhausted`, none at all.

        Raises:
            DataError: Two problems have the same id.
        """
        if self.exhausted:
            return None
        problem = next(self._iterator, None) if self._reader is None else self._reader.poll()
        if problem is None:
            self.exhausted = self._reader is None or self._reader.ended
        elif problem.id in self._seen:
            raise DataError(f"two problems have the id {problem.id!r}; ids must be distinct within a run")
        else:
            self._seen.add(problem.id)
        return problem

    def close(self) -> None:
        """Read no further."""
        self.exhausted = True
        if self._reader is not None:
            self._reader.close()


class _Reader:
    """Reads an iterator on a thread, one item at each request."""

    def __init__(self, iterator: Iterator[Problem], wake: Callable[[], None]) -> None:
        self.ended = False
        self._asked = False
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._items: SimpleQueue[Problem | BaseException | None] = SimpleQueue()
        context, work = contextvars.copy_context(), (_read, iterator, self._requests, self._items, wake)
        self._thread = threading.Thread(target=context.run, args=work, name="mas-gym-problems", daemon=True)

    def poll(self) -> Problem | None:
        wait = 0.0
        if not self._asked:
            if self._thread.ident is None:
                self._thread.start()
            self._requests.put(True)
            self._asked, wait = True, GRACE_SECONDS
        try:
            item = self._items.get(timeout=wait) if wait else self._items.get_nowait()
        except Empty:
            return None
        self._asked = False
        self.ended = item is None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._requests.put(False)


def _read(
    iterator: Iterator[Problem],
    requests: SimpleQueue[bool],
    items: SimpleQueue[Problem | BaseException | None],
    wake: Callable[[], None],
) -> None:
    while requests.get():
        try:
            item: Problem | BaseException | None = next(iterator, None)
        except BaseException as error:
            item = error
        items.put(item)
        wake()
