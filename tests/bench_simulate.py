"""How close the virtual clock comes to the mock in real time, and how fast it is.

    python3 tests/bench_simulate.py [ARGUMENTS OF loadgen.py ...]

Runs one command line with --mock and with --simulate, and prints every percentile of both with the
difference; the worst one comes last. Then times 6,000 requests of 300 tokens on the virtual clock.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any, Dict, List

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen

SCRIPT = os.path.abspath(loadgen.__file__)
PLAN = ["--sweep", "2,8,32", "--num-requests", "120", "--output-len", "48", "--endpoint", "chat",
        "--slo-ttft-ms", "300", "--slo-tpot-ms", "25"]
BIG = ["--simulate", "--rate", "8", "--num-requests", "6000", "--output-len", "300"]
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")


def runs(arguments: List[str]) -> List[Dict[str, Any]]:
    command = [sys.executable, SCRIPT, *arguments, "--json"]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout
    found: List[Dict[str, Any]] = json.loads(out)["runs"]
    return found


def main() -> None:
    plan = sys.argv[1:] or PLAN
    worst = 0.0, ""
    print(f"{'rate':>6} {'figure':<14} {'real':>10} {'virtual':>10} {'diff':>7}")
    for real, virtual in zip(runs(["--mock", *plan]), runs(["--simulate", *plan])):
        figures = [(f"{key[:-2]} {p}", real[key][p], virtual[key][p], loadgen.MS)
                   for key in LATENCIES for p in ("p50", "p90", "p99")]
        figures += [(key, real[key], virtual[key], 1.0)
                    for key in ("output_tok_s", "goodput_rps", "in_flight_mean")]
        for name, a, b, unit in figures:
            if a is None or b is None:
                continue
            apart = b / a - 1 if a else 0.0
            worst = max(worst, (abs(apart), f"{name} at {real['label']}"))
            print(f"{real['label']:>6} {name:<14} {a / unit:>10.2f} {b / unit:>10.2f} "
                  f"{apart:>+7.2%}")
    print(f"worst: {worst[0]:.2%}, {worst[1]}")
    start_s = time.perf_counter()
    runs(BIG)
    print(f"6,000 requests of 300 tokens: {time.perf_counter() - start_s:.2f} s")


if __name__ == "__main__":
    main()
