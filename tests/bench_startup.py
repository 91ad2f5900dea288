"""Start-up time of each script beside bare Python with its heaviest imports, side by side.

    python3 tests/bench_startup.py [ROUNDS]

Whole processes, alternating so that a busy moment hits both alike; prints medians and their ratio.
"""

import os
import statistics
import subprocess
import sys
import time
from typing import List

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAIRS = (
    (["capacity.py", "--preset", "llama-3.1-8b"], "import json, argparse"),
    (["loadgen.py", "--help"], "import argparse, json, socket"),
)


def seconds(argv: List[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *argv], cwd=TOP, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 41
    for argv, imports in PAIRS:
        if not os.path.exists(os.path.join(TOP, argv[0])):
            continue
        ours, bare = [], []
        for _ in range(rounds):
            bare.append(seconds(["-c", imports]))
            ours.append(seconds(argv))
        a, b = statistics.median(ours), statistics.median(bare)
        print(f"{' '.join(argv)}: {a * 1e3:.1f} ms; python3 -c '{imports}': {b * 1e3:.1f} ms; "
              f"ratio {a / b:.2f}")


if __name__ == "__main__":
    main()
