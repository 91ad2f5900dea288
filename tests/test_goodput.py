"""The search for the knee, over queues whose knee is known: no engine, no clock, no sockets."""

import functools
import math
import os
import random
import sys
import unittest
from typing import Any, Callable, Optional

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen
from loadgen import PointResult, Sample, find_goodput

READS_PER_S = 10.0  # prompts of the mean length
SLO_S = 1.0
KNEE_RPS = READS_PER_S - math.log(100) / SLO_S  # M/M/1: P(time in it > t) = exp(-(mu - rate) t)


def queue(rate_rps: float, n: int, number: int, reads_per_s: float = READS_PER_S,
          slo_s: float = SLO_S, verdict: str = "VALID") -> PointResult:
    """A server that reads one prompt after the other, each of exponential length: M/M/1."""
    choice = random.Random(1000 * number + 7)
    due_s = free_s = 0.0
    samples = []
    ramp = 20
    for i in range(n + ramp):
        due_s += choice.expovariate(rate_rps)
        n_in = max(1, round(choice.expovariate(1 / 1000)))
        free_s = max(free_s, due_s) + n_in / 1000 / reads_per_s
        samples.append(Sample(due_s, free_s, free_s - due_s <= slo_s, i >= ramp, True, n_in, 1))
    return PointResult(rate_rps, verdict, n + ramp, free_s, samples)


def search(measure: Callable[[float, int, int], Optional[PointResult]] = queue,
           **options: Any) -> loadgen.Search:
    """The search for 99% from 1 req/s, with 3,800 requests."""
    return find_goodput(measure, **{"target": 0.99, "budget": 3800, "start_rps": 1.0, **options})


found_in = functools.lru_cache(None)(lambda budget: search(budget=budget))


class TheSearch(unittest.TestCase):
    def test_it_lands_near_the_knee_of_queueing_theory_and_covers_it(self) -> None:
        found = found_in(3800)
        assert found.rate_rps and found.low_rps and found.high_rps
        self.assertLess(abs(found.rate_rps / KNEE_RPS - 1), 0.1)
        self.assertTrue(found.low_rps <= KNEE_RPS <= found.high_rps)

    def test_it_spends_no_more_than_it_was_allowed(self) -> None:
        for budget in (1000, 3800):
            with self.subTest(budget):
                found = found_in(budget)
                self.assertLessEqual(found.requests, budget)
                self.assertEqual(found.requests, sum(p["requests"] for p in found.points))

    def test_a_wider_budget_gives_a_narrower_interval(self) -> None:
        narrow, wide = found_in(3800), found_in(1000)
        assert narrow.rate_rps and narrow.low_rps and narrow.high_rps
        assert wide.low_rps and wide.high_rps
        self.assertLess(narrow.high_rps / narrow.low_rps, wide.high_rps / wide.low_rps)
        self.assertLess(abs(narrow.rate_rps / KNEE_RPS - 1), 0.1)

    def test_a_knee_far_below_the_first_rate_is_found(self) -> None:
        found = search(start_rps=60.0)
        assert found.rate_rps
        self.assertLess(abs(found.rate_rps / KNEE_RPS - 1), 0.15)

    def test_what_misses_with_nobody_else_there_has_no_knee(self) -> None:
        found = search(lambda *a: queue(*a, slo_s=0.01))
        self.assertIsNone(found.rate_rps)
        self.assertIn("even when they are alone", found.why)
        self.assertFalse(found.settled)

    def test_a_server_that_never_misses_gives_a_lower_bound(self) -> None:
        found = search(lambda *a: queue(*a, reads_per_s=1e9), budget=20_000)
        self.assertEqual((found.rate_rps, found.high_rps), (found.points[-1]["rate_rps"], None))
        self.assertIn("lower bound", found.why)

    def test_where_nothing_misses_the_knee_is_where_the_queue_begins_to_grow(self) -> None:
        def loose(rate_rps: float, n: int, number: int) -> PointResult:
            return queue(rate_rps, n, number, slo_s=math.inf,
                         verdict="UNSTABLE" if rate_rps > READS_PER_S else "VALID")
        found = search(loose, budget=2000)
        assert found.rate_rps and found.low_rps and found.high_rps
        self.assertLess(abs(found.rate_rps / READS_PER_S - 1), 0.15)
        self.assertTrue(found.low_rps <= READS_PER_S <= found.high_rps)

    def test_a_queue_that_grew_by_chance_is_asked_about_again(self) -> None:
        seen = []

        def startled(rate_rps: float, n: int, number: int) -> PointResult:
            seen.append(rate_rps)
            return queue(rate_rps, n, number, verdict="UNSTABLE" if number == 1 else "VALID")
        found = search(startled)
        assert found.rate_rps
        self.assertEqual(seen[1:3], [2.0, 2.0])
        self.assertLess(abs(found.rate_rps / KNEE_RPS - 1), 0.15)

    def test_a_client_at_its_limit_gives_a_lower_bound(self) -> None:
        def limited(rate_rps: float, n: int, number: int) -> PointResult:
            return queue(rate_rps, n, number,
                         verdict="CLIENT-LIMITED" if rate_rps > 3 else "VALID")
        found = search(limited)
        self.assertEqual((found.rate_rps, found.high_rps, found.settled), (2.0, None, False))
        self.assertIn("this client could not send more", found.why)

    def test_an_interrupted_search_keeps_what_it_found(self) -> None:
        def stopped(rate_rps: float, n: int, number: int) -> Optional[PointResult]:
            return queue(rate_rps, n, number) if number < 8 else None
        found = search(stopped)
        self.assertEqual((len(found.points), found.settled, found.why), (8, False, "interrupted"))
        assert found.rate_rps and found.low_rps and found.high_rps
        self.assertTrue(found.low_rps < found.rate_rps < found.high_rps)

    def test_a_point_says_whether_its_interval_meets_the_target(self) -> None:
        found = found_in(3800)
        for point in found.points:
            said = ("meets" if point["low"] >= 0.99 else "misses" if point["high"] < 0.99
                    else "open")
            self.assertEqual(point["verdict"], said)


class Parts(unittest.TestCase):
    def test_the_backlog_is_what_is_left_of_earlier_prompts_and_its_own(self) -> None:
        self.assertEqual(loadgen.backlog([0.0, 1.0, 1.5, 9.0], [100, 50, 20, 5], 40.0),
                         [100.0, 110.0, 110.0, 5.0])

    def test_isotonic_pools_what_falls(self) -> None:
        self.assertEqual(loadgen.isotonic([1, 3, 2, 4], [1, 1, 1, 1]), [1, 2.5, 2.5, 4])
        self.assertEqual(loadgen.isotonic([3, 0], [1, 2]), [1, 1])

    def test_misses_by_long_prompts_are_put_down_to_prompts_and_by_crowds_to_crowds(self) -> None:
        points = [queue(rate, 400, i) for i, rate in enumerate((4.0, 5.0, 6.0))]
        causes = loadgen.causes_of(points, 0.99)
        lives = [life for p in points for life in loadgen.lives_of(p.samples, causes)]
        by_prompts = loadgen.learn(lives, lives, causes)[0]
        crowded = [life._replace(met=life.arrival < 8) for life in lives]
        by_crowds = loadgen.learn(crowded, crowded, causes)[0]
        self.assertLess(abs(by_prompts.cause.drain / (1000 * READS_PER_S) - 1), 0.15)
        self.assertEqual(by_crowds.cause, loadgen.Cause(blend=1.0))


if __name__ == "__main__":
    unittest.main()
