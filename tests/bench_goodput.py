"""How near --find-goodput lands to the true knee, on the virtual clock.

    python3 tests/bench_goodput.py [--seeds N] [--first N] [--budget N] [--only CASE] [--truth]

Each case is an engine, lengths and an SLO, for Poisson arrivals and for burstiness 0.5. The true
knee, the rate at which a very long run's attainment is 99%, is in the table below: the mean of
estimates 1 to 3% apart, of up to 1.2 million requests each. --truth makes another, from 100,000
requests at each of four rates.
Printed: how many of the seeds land within 10% and within 5% of it, in how many the 95% interval
covers it, the most requests that one took, and each landing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
import tempfile
import time
from typing import Any, Dict, List, NamedTuple, Tuple

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import loadgen


class Case(NamedTuple):
    """One engine under one kind of work, and what is asked of it."""

    profile: Dict[str, Any]
    flags: str
    knees_rps: Dict[float, float]  # by burstiness


CASES = {
    "mock": Case({}, "--output-len 48 --slo-ttft-ms 300 --slo-tpot-ms 25", {1: 17.15, 0.5: 12.47}),
    "fast": Case({"weights_s": 0.002, "sequence_s": 2e-5, "prefill_s_per_token": 5e-6,
                  "max_num_batched_tokens": 2048, "max_num_seqs": 256},
                 "--input-len lognormal:mean=500,cv=0.5 --output-len lognormal:mean=100,cv=0.5 "
                 "--slo-ttft-ms 100 --slo-tpot-ms 10", {1: 159.4, 0.5: 147.9}),
    "kv": Case({"weights_s": 0.010, "sequence_s": 2e-5, "prefill_s_per_token": 2e-5,
                "kv_s_per_token": 5e-8, "max_num_batched_tokens": 2048, "max_num_seqs": 256,
                "num_blocks": 1500},
               "--input-len lognormal:mean=800,cv=0.5 --output-len lognormal:mean=200,cv=0.5 "
               "--slo-ttft-ms 1000 --slo-tpot-ms 50", {1: 6.94, 0.5: 6.06}),
    "ttft": Case({"weights_s": 0.010, "sequence_s": 5e-5, "prefill_s_per_token": 5e-5,
                  "kv_s_per_token": 2e-8, "max_num_batched_tokens": 2048, "max_num_seqs": 128},
                 "--input-len lognormal:mean=1500,cv=0.4 --output-len lognormal:mean=100,cv=0.5 "
                 "--slo-ttft-ms 500", {1: 6.03, 0.5: 3.26}),
    "tpot": Case({"weights_s": 0.010, "sequence_s": 1e-4, "prefill_s_per_token": 3e-5,
                  "kv_s_per_token": 2e-7, "max_num_batched_tokens": 2048, "max_num_seqs": 256},
                 "--input-len lognormal:mean=500,cv=0.5 --output-len lognormal:mean=200,cv=0.5 "
                 "--slo-tpot-ms 30", {1: 9.136, 0.5: 8.44}),
    "heavy": Case({"weights_s": 0.01, "sequence_s": 5e-5, "prefill_s_per_token": 3e-5,
                   "max_num_batched_tokens": 2048, "max_num_seqs": 128},
                  "--input-len lognormal:mean=2000,cv=1.5 --output-len lognormal:mean=200,cv=1.5 "
                  "--slo-ttft-ms 1500 --slo-tpot-ms 40", {1: 5.23}),
}


def simulated(case: Case, folder: str, *flags: str) -> Dict[str, Any]:
    """The summary of one command line on the case's engine, under the virtual clock."""
    path = os.path.join(folder, "profile.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(case.profile or {"weights_s": 0.012}, file)
    args = loadgen.parse_args(["--simulate", path, *case.flags.split(), *flags])
    with contextlib.redirect_stderr(io.StringIO()):
        return loadgen.measure(args, "http://simulated")


def true_knee(case: Case, burstiness: float, folder: str) -> Tuple[float, List[str]]:
    """The rate of 99%, by a line through the log odds of a miss at four rates around it."""
    guess, points, shown = case.knees_rps[burstiness], [], []
    for part in (0.94, 0.98, 1.02, 1.06):
        rate, missed, total = guess * part, 0.0, 0
        for seed in range(20):
            run = simulated(case, folder, "--rate", f"{rate:.6g}", "--duration",
                            f"{5000 / rate:.6g}", "--ramp", f"{300 / rate:.6g}", "--seed",
                            str(7000 + seed), "--burstiness", str(burstiness))["runs"][0]
            missed += run["offered"] * (1 - run["attainment"])
            total += run["offered"]
        points.append((math.log(rate), loadgen.log_odds(max(missed, 0.5) / total)))
        shown.append(f"{rate:.4g}: {missed / total:.2%}")
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points))
    slope = (sum((x - mean_x) * (y - mean_y) for x, y in points)
             / sum((x - mean_x) ** 2 for x, _ in points))
    return math.exp(mean_x + (loadgen.log_odds(0.01) - mean_y) / slope), shown


def judge(name: str, burstiness: float, seeds: range, budget: int, folder: str) -> str:
    """The line of the table for one case."""
    case, begun = CASES[name], time.perf_counter()
    knee = case.knees_rps[burstiness]
    landings, covered, most = [], 0, 0
    for seed in seeds:
        found = simulated(case, folder, "--find-goodput", "--max-requests", str(budget), "--seed",
                          str(1000 * seed), "--burstiness", str(burstiness))["goodput_search"]
        landings.append((found["rate_rps"] or 0.0) / knee)
        covered += (found["low_rps"] or 0) <= knee <= (found["high_rps"] or 0)
        most = max(most, found["requests"])
    within = [sum(abs(x - 1) <= part for x in landings) for part in (0.10, 0.05)]
    each_s = (time.perf_counter() - begun) / len(seeds)
    return (f"{name:>5}  {burstiness:>5g}  {knee:>7.4g}  {within[0]:>6} {within[1]:>6} {covered:>6}"
            f"  of {len(seeds):>3}  {most:>8,}  {each_s:>5.1f}  "
            + " ".join(f"{x:.2f}" for x in landings))


def main() -> None:
    """Print the table, or the true knees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=1, help="the number of the first seed")
    parser.add_argument("--budget", type=int, default=loadgen.SEARCH_REQUESTS)
    parser.add_argument("--only")
    parser.add_argument("--truth", action="store_true")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    if not options.truth:
        print(" case  burst     knee     10%     5% covers      of  requests  s each  landings")
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if options.only in (None, name):
                for burstiness in case.knees_rps:
                    if options.truth:
                        knee, shown = true_knee(case, burstiness, folder)
                        print(name, burstiness, f"{knee:.4g}", *shown, flush=True)
                    else:
                        print(judge(name, burstiness, seeds, options.budget, folder),
                              flush=True)


if __name__ == "__main__":
    main()
