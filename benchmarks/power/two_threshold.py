"""A yardstick, not a part of the product: two thresholds, two priorities, locked clocks and a brake.

The published scheme for a row of servers (POLCA, arXiv 2308.12908) with its constants: row power over the budget
above 0.80 locks the clocks of low priority to 1275 MHz; above 0.89 to 1110 MHz, and, if it stays above, those of high
priority to 1305 MHz; above 1.00 the brake takes all boards to 288 MHz. Telemetry is 2 s old, clocks act after 40 s,
the brake after 5 s. Training counts as low priority. The watts of a locked clock are our assumption: the
part above idle falls with the power 2.2 of the clock (20 % at 1275 MHz), and work slows down as under a limit with the same watts.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from busbar.scheduler.simulate.power_row import Floats, Layout, Row, ServerModel

MOST_MHZ = 1410.0
LOW_MHZ, LOWER_MHZ, HIGH_MHZ, BRAKE_MHZ = 1275.0, 1110.0, 1305.0, 288.0
FIRST, SECOND, BRAKE = 0.80, 0.89, 1.00
RELEASE_FIRST, RELEASE_SECOND = 0.75, 0.84
TELEMETRY_S, CLOCK_S, BRAKE_S = 2, 40, 5
BRAKE_HOLD_S = 10
"""The brake stays at least so long; the paper does not say."""
EXPONENT = 2.2


def watts_part(mhz: float, model: ServerModel) -> float:
    """Of a busy board's watts, what this clock lets through."""
    idle = model.idle_w / model.board_max_w
    return float(idle + (1 - idle) * (mhz / MOST_MHZ) ** EXPONENT)


class TwoThreshold:
    """The law; see above."""

    def __init__(self, places: Layout, model: ServerModel, budget_w: float) -> None:
        self.places, self.model, self.budget_w = places, model, budget_w
        self.brakes = 0
        self._limit_w = np.full(places.total, model.board_max_w)
        self._part = np.ones(places.total)
        self._seen: deque[float] = deque(maxlen=TELEMETRY_S + 1)
        self._orders: deque[tuple[float, float, float]] = deque()
        self._low, self._high = LOWER_MHZ, MOST_MHZ  # in force already: the row begins under load
        self._asked = (LOWER_MHZ, MOST_MHZ)
        self._second_since_s: float | None = None
        self._brake_at_s: float | None = None

    def limits(self) -> tuple[Floats, Floats]:
        """For the next step."""
        return self._limit_w, self._part

    def after(self, watts: Floats) -> None:
        """Nothing acts within a second."""

    def second(self, now_s: float, row: Row, mean_w: Floats) -> None:
        """Look, and order clocks that act later."""
        self._seen.append(float(mean_w.sum()) / self.budget_w)
        power = self._seen[0]
        while self._orders and self._orders[0][0] <= now_s:
            _, self._low, self._high = self._orders.popleft()
        if now_s % TELEMETRY_S == 0:
            self._decide(now_s, power)
        braking = self._brake_at_s is not None and now_s >= self._brake_at_s + BRAKE_S
        if self._brake_at_s is not None and now_s >= self._brake_at_s + BRAKE_S + BRAKE_HOLD_S:
            self._brake_at_s = None
        low, high = (BRAKE_MHZ, BRAKE_MHZ) if braking else (self._low, self._high)
        self._part = np.full(self.places.total, watts_part(low, self.model))
        self._part[: self.places.high] = watts_part(high, self.model)

    def _decide(self, now_s: float, power: float) -> None:
        low, high = self._asked
        if power > BRAKE and self._brake_at_s is None:
            self._brake_at_s = now_s
            self.brakes += 1
        if power > SECOND:
            low = LOWER_MHZ
            if self._second_since_s is None:
                self._second_since_s = now_s
            if now_s - self._second_since_s >= CLOCK_S:
                high = HIGH_MHZ
        else:
            self._second_since_s = None
            if power > FIRST:
                low = min(low, LOW_MHZ)
            if power < RELEASE_SECOND:
                high = MOST_MHZ
                low = LOW_MHZ if low == LOWER_MHZ else low
            if power < RELEASE_FIRST:
                low = MOST_MHZ
        if (low, high) != self._asked:
            self._asked = (low, high)
            self._orders.append((now_s + CLOCK_S, low, high))
