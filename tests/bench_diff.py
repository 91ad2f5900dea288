"""How often --diff sees a difference: where there is none (about 5%), and where there is one.

    python3 tests/bench_diff.py [PAIRS]        default 60 pairs of made-up runs a line

Latencies are log-normal around 200 ms, each remembering the one before it by rho; B is `slower`
than A. Prints, by metric, in how many of the pairs that could be judged a difference was shown.
"""

import array
import collections
import itertools
import math
import os
import random
import sys
import time
from typing import List

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen
from loadgen import MS, NS


def run(rng: random.Random, number: int, rho: float, slower_s: float) -> List[loadgen.Record]:
    """A run of so many requests, ten a second, six tokens each."""
    level, records = rng.gauss(0, 1), []
    for i in range(number):
        level = rho * level + math.sqrt(1 - rho * rho) * rng.gauss(0, 1)
        ttft_s = 0.2 * math.exp(0.4 * level) + slower_s
        made = loadgen.Record(loadgen.Planned(i, 0.0, 10, 6, 0), 0, round(i * 0.1 / NS), True)
        gaps = [round((20 * MS + 2 * MS * rng.gauss(0, 1) + 5 * MS * ttft_s) / NS)
                for _ in range(5)]
        made.event_ns = array.array("q", itertools.accumulate(
            gaps, initial=made.due_ns + round(ttft_s / NS)))
        made.cls, made.sent_ns, made.n_out, made.events = "ok", made.due_ns, 6, 6
        made.first_ns, made.last_ns = made.event_ns[0], made.event_ns[-1]
        made.end_ns = made.last_ns
        records.append(made)
    return records


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    for number, rho, slower_s in ((100, 0.0, 0.0), (400, 0.0, 0.0), (400, 0.8, 0.0),
                                  (1000, 0.9, 0.0), (400, 0.0, 0.05), (1000, 0.0, 0.05)):
        shown, judged = collections.Counter[str](), collections.Counter[str]()
        start_s = time.perf_counter()
        for seed in range(pairs):
            rng = random.Random(seed)
            a, b = run(rng, number, rho, 0.0), run(rng, number, rho, slower_s)
            for row in loadgen.compare(a, b, loadgen.Slo(0.4, None, None, 0.99), 10.0)["metrics"]:
                judged[row["name"]] += row["low"] is not None
                shown[row["name"]] += row["answer"] in ("B higher", "B lower")
        took_s = (time.perf_counter() - start_s) / pairs
        print(f"{number} requests, rho {rho}, B slower by {slower_s / MS:g} ms ({took_s:.1f} s a "
              "pair): " + ", ".join(f"{name} {shown[name]}/{judged[name]}" for name in judged
                                    if judged[name]))


if __name__ == "__main__":
    main()
