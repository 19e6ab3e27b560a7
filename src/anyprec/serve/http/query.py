"""Query strings: `?bits=4&top=1` in, checked values out. Used by classify.py and live.py."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qs

from anyprec.errors import InputError
from anyprec.serve.http.exchange import HttpExchange
from anyprec.serve.http.protocol import LONGEST_S


def query_of(http: HttpExchange, *known: str) -> dict[str, str]:
    raw = http.scope.get("query_string", b"")
    if not raw:
        return {}
    try:
        given = parse_qs(raw.decode("ascii"), keep_blank_values=True, max_num_fields=32, errors="strict")
    except ValueError as error:
        raise InputError(f"the query cannot be read: {error}") from error
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InputError(f"{unknown[0][:64]!r} is not known here; the query may have {', '.join(known)}")
    return {name: values[-1] for name, values in given.items()}


def whole_number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    given = query.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 10 and least <= int(given) <= most):
        raise InputError(f"{name}={given[:32]!r} must be a whole number from {least} to {most}")
    return int(given)


def seconds(query: Mapping[str, str], name: str) -> float | None:
    given = query.get(name)
    if given is None:
        return None
    try:
        found = float(given) / 1e3
    except ValueError:
        found = -1.0
    if not 0 < found <= LONGEST_S:
        raise InputError(f"{name}={given[:32]!r} must be above 0 and at most {LONGEST_S * 1e3:.0f}")
    return found
