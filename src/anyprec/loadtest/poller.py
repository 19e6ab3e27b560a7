"""Which sockets are ready, waited for to the microsecond: epoll where it exists, the `selectors` module elsewhere.

epoll itself counts in whole milliseconds, and so do the event loops built on it; a load of 1000 requests a second
sent to the millisecond would not be the one that was asked for. Used by client.py.
"""

from __future__ import annotations

import select
import selectors
import sys

READ, WRITE = 1, 4  # the values of EPOLLIN and EPOLLOUT; EPOLLERR (8) and EPOLLHUP (16) come unasked


class EpollPoller:
    def __init__(self) -> None:
        assert sys.platform == "linux"
        self.epoll = select.epoll()
        self.waiting = [self.epoll.fileno()]

    def add(self, number: int, mask: int) -> None:
        self.epoll.register(number, mask)

    def change(self, number: int, mask: int) -> None:
        self.epoll.modify(number, mask)

    def remove(self, number: int) -> None:
        self.epoll.unregister(number)

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        # An epoll is a file that becomes readable, and select counts in microseconds.
        if seconds > 0:
            select.select(self.waiting, (), (), seconds)
        return self.epoll.poll(0)

    def close(self) -> None:
        self.epoll.close()


class SelectorPoller:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def add(self, number: int, mask: int) -> None:
        self.selector.register(number, events(mask))

    def change(self, number: int, mask: int) -> None:
        self.selector.modify(number, events(mask))

    def remove(self, number: int) -> None:
        self.selector.unregister(number)

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        ready = self.selector.select(max(0.0, seconds))
        return [
            (key.fd, READ * bool(mask & selectors.EVENT_READ) | WRITE * bool(mask & selectors.EVENT_WRITE))
            for key, mask in ready
        ]

    def close(self) -> None:
        self.selector.close()


def events(mask: int) -> int:
    return (selectors.EVENT_READ if mask & READ else 0) | (selectors.EVENT_WRITE if mask & WRITE else 0)


def poller() -> EpollPoller | SelectorPoller:
    return EpollPoller() if hasattr(select, "epoll") else SelectorPoller()
