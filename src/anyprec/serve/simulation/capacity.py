"""Capacity planning with the simulator: how many servers, how much load, which policy. From a SimulationSetup.

    fewest_servers(arrivals, setup, attainment=0.999)       the fewest servers that meet the target
    highest_rate(setup, attainment=0.99)                    the highest load that meets the target
    grid(setup, loads, cv2s, policies)                      every policy at every load and burstiness

Called by `anyprec simulate`; grid is the table of docs/concepts/policy.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from anyprec.errors import ServeError
from anyprec.loadtest.arrivals import gamma
from anyprec.serve.simulation.simulate import SimulationResult, SimulationSetup, simulate

MOST_SERVERS = 10_000
PolicySetting = tuple[str, int | str | None]  # its name, and the bits where it is "fixed"


def fewest_servers(
    arrivals: np.ndarray,
    setup: SimulationSetup,
    attainment: float = 0.999,
    accuracy: float | None = None,
    seed: int = 0,
    tell: Callable[[SimulationResult], None] | None = None,
) -> SimulationResult:
    """The run with the fewest servers that reaches this attainment (and this mean accuracy, in percent).

    Doubles the servers until they are enough, then bisects: about 2 log2(n) runs.
    """

    def enough(servers: int) -> SimulationResult | None:
        result = simulate(arrivals, replace(setup, servers=servers), seed)
        if tell is not None:
            tell(result)
        held = result.attainment >= attainment and (accuracy is None or result.accuracy >= accuracy)
        return result if held else None

    servers, too_few = 1, 0
    while (best := enough(servers)) is None:
        too_few, servers = servers, 2 * servers
        if servers > MOST_SERVERS:
            wish = f"{100 * attainment:g} % in time" + ("" if accuracy is None else f" and an accuracy of {accuracy:g}")
            raise ServeError(f"{MOST_SERVERS} servers do not reach {wish}; allow a longer SLO, or less")
    while servers - too_few > 1:
        middle = (servers + too_few) // 2
        if (result := enough(middle)) is not None:
            best, servers = result, middle
        else:
            too_few = middle
    return best


def highest_rate(
    setup: SimulationSetup,
    attainment: float = 0.99,
    cv2: float = 1.0,
    requests: int = 20_000,
    seed: int = 0,
    rounds: int = 10,
) -> float:
    """The highest rate, in requests a second, that reaches this attainment; within about 1 %.

    The same requests are sent faster or slower, so that attainment falls monotonically with the rate.
    """
    unit = gamma(1.0, cv2, requests, seed)
    # Start from the rate that keeps the engines busy with single images at the fastest level.
    fastest = min(cells[1] for cells in setup.times.values())
    rate = setup.servers * setup.engines / fastest

    def holds(rate: float) -> bool:
        return simulate(unit / rate, setup, seed).attainment >= attainment

    if holds(rate):
        while holds(2 * rate):
            rate *= 2
        low, high = rate, 2 * rate
    else:
        while not holds(rate / 2):
            rate /= 2
            if rate < 1e-6 / fastest:
                raise ServeError(
                    f"not even a single request now and then is {100 * attainment:g} % in time; allow a longer SLO"
                )
        low, high = rate / 2, rate
    for _ in range(rounds):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
        if high / low < 1.01:
            break
    return low


@dataclass(frozen=True)
class GridCell:
    load: float  # times the base rate
    cv2: float
    policy: PolicySetting
    result: SimulationResult

    def record(self) -> dict[str, object]:
        return {"load": self.load, "cv2": self.cv2, **self.result.record()}


def grid(
    setup: SimulationSetup,
    base: float,
    loads: Sequence[float],
    cv2s: Sequence[float],
    policies: Sequence[PolicySetting],
    requests: int = 20_000,
    seed: int = 1,
) -> Iterable[GridCell]:
    """Run every policy at every load (times `base` requests a second) and burstiness, on the same arrivals."""
    for cv2 in cv2s:
        for load in loads:
            arrivals = gamma(load * base, cv2, requests / (load * base), seed)
            for name, bits in policies:
                yield GridCell(
                    load, cv2, (name, bits), simulate(arrivals, replace(setup, policy=name, bits=bits), seed)
                )


def dominated_cells(cells: Sequence[GridCell]) -> list[tuple[GridCell, GridCell]]:
    """Cells of "adaptive" with a fixed width that is better in both attainment and accuracy, at the same load."""
    found = []
    for cell in cells:
        if cell.policy[0] != "adaptive":
            continue
        for other in cells:
            same = (other.load, other.cv2) == (cell.load, cell.cv2) and other.policy[0] == "fixed"
            mine, theirs = cell.result, other.result
            if same and theirs.attainment > mine.attainment and theirs.accuracy > mine.accuracy:
                found.append((cell, other))
    return found
