"""Autoscaling: widths adapt first, replicas second. Statistics of schedulers in, a number of replicas out.

Each replica reports a range (report_of): how many replicas its load would keep busy at the narrowest width, and how
many at the widest. While the number of replicas is within the range it stays, and only the widths adapt (scale). Called
by ray/app.py; Ray pickles `scale` by value into its controller, so nothing here imports Ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

LEAST, MOST, SHORT = "anyprec_least", "anyprec_most", "anyprec_short"  # as Ray's context has them

ROOM = 0.5  # longest batch counted, as a fraction of the SLO: requests that arrive meanwhile must still be in time
NARROW = 0.5  # share of answers at the narrowest width from which misses mean too few replicas
MISSES = 0.01  # tolerated share of missed requests
EASE = 0.1  # replicas of tolerance, so that the number does not flap near a whole number


def report_of(
    stats: Iterable[Mapping[str, Any]], *, settle: int | str | None = None, busy: float = 0.7, engines: int = 1
) -> dict[str, float]:
    """The report of one replica, from the `Scheduler.stats()` of its models.

    settle: a width that is good enough to stay at; where it is too slow, replicas are added. None: the narrowest.
    busy: highest utilization of an engine.
    """
    least = most = short = 0.0
    for one in stats:
        low, high = profile_range(one, settle)
        per_engine = one.get("rate", 0.0) / (busy * engines)  # images a second; refused ones count
        least += per_engine * seconds_an_image(one, low)
        most += per_engine * seconds_an_image(one, high)
        short = max(short, missed_share(one, low))
    return {LEAST: least, MOST: max(least, most), SHORT: short}


def profile_range(stats: Mapping[str, Any], settle: int | str | None) -> tuple[str, str]:
    """The narrowest acceptable profile, and the most accurate one."""
    if stats["policy"] == "fixed":
        return str(stats["bits"]), str(stats["bits"])
    profiles = [level["name"] for level in stats["levels"]]  # least accurate first
    if settle is None:
        return profiles[0], profiles[-1]
    if str(settle) in profiles:
        return str(settle), profiles[-1]
    wider = [profile for profile in profiles if profile.isdigit() and int(profile) >= int(settle)]
    return (wider or profiles[-1:])[0], profiles[-1]


def seconds_an_image(stats: Mapping[str, Any], profile: str) -> float:
    """At the most efficient batch size that leaves room within the target."""
    cells: dict[str, float] = stats["table"]["ms"][profile]
    longest: float = ROOM * stats["slo_ms"]
    return 1e-3 * min(ms / int(images) for images, ms in cells.items() if int(images) == 1 or ms <= longest)


def missed_share(stats: Mapping[str, Any], low: str) -> float:
    """The share of recent requests that missed their deadline; 0 where widths could still be lowered."""
    window = stats["window"]
    answers = window["bits_histogram"]
    total = sum(answers.values())
    if total:
        profiles = [level["name"] for level in stats["levels"]]
        narrow = profiles[: profiles.index(low) + 1] if low in profiles else [low]
        if sum(answers.get(profile, 0) for profile in narrow) < NARROW * total:
            return 0.0
    return 1.0 - float(window["attainment"])


def scale(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy: the number of replicas wanted, and no state of its own.

    Ray waits for upscale_delay_s and downscale_delay_s, and keeps to min_replicas and max_replicas. Example: 3
    replicas; the load needs 1.4 at 1 bit and 6.3 at 8 bit: 3 it stays. Needs 3.6 at 1 bit: 4. Needs 1.5 at 8 bit: 2.
    """
    found = context.aggregated_metrics or {}
    now = context.target_num_replicas
    if not found.get(LEAST) or not found.get(MOST):
        return now, {}  # nobody has reported yet
    least, most = sum(found[LEAST].values()), sum(found[MOST].values())
    wanted = min(max(now, math.ceil(least - EASE)), math.ceil(most + EASE) if most > 0 else 0)
    short = found.get(SHORT) or {0: 0.0}
    # Misses show a wrong table or steep bursts. A client with impossible deadlines must not add replicas, so there must
    # be work for them too. We add one at a time, and none while another is starting.
    if (
        sum(short.values()) > MISSES * len(short)
        and least > 0.5 * now
        and context.current_num_replicas >= context.target_num_replicas
    ):
        wanted = max(wanted, now + 1)
    return wanted, {}
