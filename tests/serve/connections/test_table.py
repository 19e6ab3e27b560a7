"""Who gets a place and who loses it, with connections that are only names; addresses as they are counted."""

import pytest

from anyprec.serve.connections.table import RESERVE, ConnectionTable, address_group, named_by_proxy, network_of


class Fake:
    def __init__(self, address="a", slow=False, body_bytes=0, trusted=False):
        self.trusted = trusted
        self.address, self.slow, self.body_bytes, self.out = address, slow, body_bytes, False
        self.until = 0.0

    def is_slow(self, now):
        return self.slow

    def unfinished_bytes(self):
        return self.body_bytes

    def evict(self):
        self.out = True


def seat(table, *ones, busy=True):
    for one in ones:
        assert table.admit(one)
        if busy:
            table.mark_busy(one)
    return ones


def test_one_that_has_not_been_read_from_keeps_its_place():
    table = ConnectionTable(2, 2)
    (idle,) = seat(table, Fake(), busy=False)
    new = Fake()
    assert table.admit(new, is_idle=False)
    seat(table, Fake())
    assert idle.out and not table.admit(Fake()) and not new.out
    table.mark_idle(new)
    assert table.admit(Fake()) and new.out


def test_idle_ones_make_way_then_slow_ones_then_nobody():
    table = ConnectionTable(3, 3)
    quick, slow = seat(table, Fake(), Fake(slow=True))
    (idle,) = seat(table, Fake(), busy=False)
    (one,) = seat(table, Fake())
    assert idle.out and not slow.out
    (two,) = seat(table, Fake())
    assert slow.out
    last = Fake()
    assert not table.admit(last) and not any(other.out for other in (quick, one, two))
    assert set(table.reserve) == {last} and table.evicted == 2
    table.remove(quick)
    assert table.admit(Fake())
    for other in list(table.admitted):
        table.remove(other)
        table.remove(other)  # twice is once
    assert not table.by_address and not table.idle


def test_a_rest_counts_from_its_beginning():
    table = ConnectionTable(3, 3)
    one, two, three = seat(table, Fake(), Fake(), Fake(), busy=False)
    table.mark_busy(one)
    table.mark_idle(one)
    seat(table, Fake())
    assert two.out and not one.out and not three.out


def test_one_address():
    table = ConnectionTable(10, 2)
    busy = seat(table, Fake("a"), Fake("a"))
    assert not table.admit(Fake("a")) and not any(one.out for one in busy)
    assert table.admit(Fake("b"))
    seat(table, *(Fake("proxy", trusted=True) for _ in range(5)))
    table.mark_idle(busy[1])
    assert table.admit(Fake("a")) and busy[1].out and not busy[0].out


@pytest.mark.parametrize("host", ["::1", "10.1.2.3", "2001:db8::5"])
def test_a_trusted_address_is_one_host(host):
    """Also where addresses are counted by more than the host."""
    table = ConnectionTable(10, 2, tuple(map(network_of, ("::1", "10.0.0.0/8", "2001:db8::5"))))
    assert table.is_trusted(host) and not table.is_trusted("2001:db8::6") and not table.is_trusted("")


def test_the_reserve_is_taken_from_the_greediest():
    table = ConnectionTable(1, 1)
    seat(table, Fake())
    probe = Fake("probe")
    table.admit(probe)
    crowd = [Fake("crowd") for _ in range(3 * RESERVE)]
    for one in crowd:
        assert not table.admit(one)
    assert not probe.out and len(table.reserve) == RESERVE and crowd[0].out and not crowd[-1].out


def test_memory():
    table = ConnectionTable(10, 10)
    slow, large, small, other = seat(
        table, Fake("a", True, 5), Fake("a", body_bytes=60), Fake("a", body_bytes=10), Fake("b", body_bytes=20)
    )
    assert table.make_room(5, 100, asking="a") and slow.out and not large.out
    assert not table.make_room(5, 100, asking="a")  # its own are the greedy ones
    assert not table.make_room(5, 100, asking="b")  # so soon after a look in vain
    table._no_room_before = 0.0
    assert table.make_room(5, 100, asking="b") and large.out and not small.out and not other.out


@pytest.mark.parametrize(
    "host, group",
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
    ],
)
def test_addresses_are_counted_by_subscriber(host, group):
    assert address_group(host) == group


@pytest.mark.parametrize(
    "given, client",
    [
        ([b"192.0.2.7"], "192.0.2.7"),
        ([b"6.6.6.6, 192.0.2.7"], "192.0.2.7"),  # what the client itself sent comes first
        ([b"6.6.6.6", b"192.0.2.7,10.0.0.1"], "192.0.2.7"),
        ([b"2001:DB8::1"], "2001:db8::1"),
        ([b"10.0.0.1"], None),
        ([b"192.0.2.7, unknown"], None),
        ([b""], None),
        ([], None),
    ],
)
def test_clients_of_a_proxy(given, client):
    headers = [(b"x-forwarded-for", value) for value in given]
    assert named_by_proxy(headers, (network_of("10.0.0.0/8"),)) == client


def test_there_is_room_while_half_of_the_slots_are_free():
    table = ConnectionTable(8, 4)
    assert table.has_room("127.0.0.1")
    for number in range(2):
        table.admit(Fake(address="127.0.0.1"))
        assert table.has_room("127.0.0.1") == (number == 0)
    assert table.has_room("127.0.0.2")
    for _ in range(2):
        table.admit(Fake(address="127.0.0.3"))
    assert not table.has_room("127.0.0.2")
