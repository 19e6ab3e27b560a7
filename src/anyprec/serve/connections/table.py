"""ConnectionTable: open connections by address, and which to evict when another needs the slot or the memory.

A client cannot reserve anything by a promise: idle connections and slow requests are closed in favor of new ones. A few
slots beyond the limit answer only health probes, so that these always get through. Filled by connection.py; BodyReader
asks it for memory.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Protocol

RESERVE = 64  # slots for health probes beyond the limit
LOOK_S = 0.1  # between two scans of all connections, which take up to 1 ms

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrackedConnection(Protocol):
    """What takes a slot: a connection (connection.py), or one whose TLS handshake is under way (handshake.py)."""

    address: str  # to count by
    trusted: bool  # a proxy of ours
    until: float  # more must come by then

    def is_slow(self, now: float) -> bool: ...
    def evict(self) -> None: ...
    def unfinished_bytes(self) -> int: ...  # of a body that is still coming


class ConnectionTable:
    """`most` slots, of which one address may take `per_address`; addresses in `trusted` may take all."""

    def __init__(self, most: int, per_address: int, trusted: tuple[Network, ...] = ()) -> None:
        self.most, self.per_address, self.trusted = most, per_address, trusted
        self.admitted: OrderedDict[TrackedConnection, None] = OrderedDict()
        self.by_address: dict[str, OrderedDict[TrackedConnection, None]] = {}  # of those admitted; longest idle first
        self.idle: OrderedDict[TrackedConnection, None] = OrderedDict()  # of those admitted; longest idle first
        self.reserve: OrderedDict[TrackedConnection, None] = OrderedDict()  # oldest first
        self.evicted = 0
        self._late: dict[str, list[TrackedConnection]] = {}  # of an address, or ("") of all; the latest last
        self._look_again = self._no_room_before = 0.0

    def admit(self, new: TrackedConnection, is_idle: bool = True) -> bool:
        """Give it a slot, if need be another's; False: one of the reserve, for health probes only.

        `is_idle`: it may be evicted at once.
        """
        same = self.by_address.get(new.address)
        if same is not None and len(same) >= self.per_address and not new.trusted:
            has_slot = self._evict_for(new.address, same, next((one for one in same if one in self.idle), None))
        else:
            has_slot = len(self.admitted) < self.most or self._evict_for("", self.admitted, next(iter(self.idle), None))
        if not has_slot:
            self._admit_to_reserve(new)
            return False
        self.admitted[new] = None
        if is_idle:
            self.idle[new] = None
        self.by_address.setdefault(new.address, OrderedDict())[new] = None
        return True

    def has_room(self, host: str) -> bool:
        """Whether half of the slots are free, its address's too: a rush would not take its slot again at once."""
        same = self.by_address.get(address_group(host), ())
        crowded = 2 * len(same) >= self.per_address and not self.is_trusted(host)
        return not crowded and 2 * len(self.admitted) < self.most

    def remove(self, one: TrackedConnection) -> None:
        """It is closed, or about to be."""
        self.idle.pop(one, None)
        self.reserve.pop(one, None)
        if one in self.admitted:
            del self.admitted[one]
            same = self.by_address[one.address]
            del same[one]
            if not same:
                del self.by_address[one.address]

    def mark_idle(self, one: TrackedConnection) -> None:
        """All its requests are answered."""
        if one in self.admitted and one not in self.idle:
            self.idle[one] = None
            self.by_address[one.address].move_to_end(one)

    def mark_busy(self, one: TrackedConnection) -> None:
        self.idle.pop(one, None)

    def is_trusted(self, host: str) -> bool:
        return bool(self.trusted) and in_networks(host, self.trusted)

    # --- eviction ---

    def _evict_for(self, of: str, among: Iterable[TrackedConnection], idle: TrackedConnection | None) -> bool:
        """Evicts `idle`, else the latest among these: connections of an address, or ("") all. False: none is late."""
        victim = self._latest(of, among) if idle is None else idle
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def _latest(self, of: str, among: Iterable[TrackedConnection]) -> TrackedConnection | None:
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + LOOK_S
            self._late.clear()
        if of not in self._late:
            self._late[of] = sorted((one for one in among if one.is_slow(now)), key=lambda one: -one.until)
        late = self._late[of]
        while late:
            one = late.pop()
            if one in self.admitted and one.is_slow(now):
                return one
        return None

    def _admit_to_reserve(self, new: TrackedConnection) -> None:
        """The newest may stay longest: a probe asks at once, and one that sends nothing is soon the oldest."""
        if len(self.reserve) >= RESERVE:
            greedy, _ = Counter(one.address for one in self.reserve).most_common(1)[0]
            self._evict(next(one for one in self.reserve if one.address == greedy))
        self.reserve[new] = None

    def _evict(self, one: TrackedConnection) -> None:
        self.remove(one)
        self.evicted += 1
        one.evict()

    def make_room(self, size: int, bound: int, asking: str) -> bool:
        """Give up unfinished bodies for `size` bytes that `asking` sent: slow ones, then those of another address that
        holds over half of `bound`. False: there was none. Their memory is free when their tasks have ended, soon."""
        now = time.monotonic()
        if now < self._no_room_before:
            return False
        held = {one: has for one in self.admitted if (has := one.unfinished_bytes())}
        by_address: Counter[str] = Counter()
        for one, has in held.items():
            by_address[one.address] += has
        freed = 0
        for one, has in sorted(held.items(), key=lambda pair: (not pair[0].is_slow(now), -pair[1])):
            if freed >= size:
                break
            greedy = by_address[one.address] > bound // 2 and one.address != asking and not one.trusted
            if greedy or one.is_slow(now):
                freed += has
                by_address[one.address] -= has
                self._evict(one)
        if not freed:
            self._no_room_before = now + LOOK_S
        return freed > 0


def network_of(text: str) -> Network:
    """'127.0.0.1', '10.0.0.0/8', '::1'. ValueError says what is wrong."""
    return ipaddress.ip_network(text.strip(), strict=False)


def in_networks(address: str, networks: Iterable[Network]) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(found in network for network in networks)


def address_group(host: str) -> str:
    """The address to count by: of IPv6, the 64 bits that one subscriber has at the least."""
    if ":" not in host:
        return host
    found = ipaddress.IPv6Address(host.partition("%")[0])
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(found) >> 64 << 64))


def named_by_proxy(headers: Iterable[tuple[bytes, bytes]], trusted: tuple[Network, ...]) -> str | None:
    """The client as a trusted proxy tells it: the last address in X-Forwarded-For that is no such proxy itself."""
    given = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
    for part in reversed([part.strip() for part in given.split(",")]):
        try:
            address = str(ipaddress.ip_address(part))
        except ValueError:
            return None
        if not in_networks(address, trusted):
            return address
    return None
