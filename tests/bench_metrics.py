"""What reading the engine's metrics costs: a page, a second of it, and the run beside it.

    python3 tests/bench_metrics.py [PAIRS]

A page is as large as vLLM's. The runs are pairs on the mock, with and without the metrics, in
alternating order; medians over the pairs.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen
from tests import test_metrics

PAGE_BYTES = 55_000
FIELDS = (("send lag p99 ms", lambda r: r["client"]["send_lag_s"]["p99"] / loadgen.MS),
          ("send lag max ms", lambda r: r["client"]["send_lag_s"]["max"] / loadgen.MS),
          ("loop p99 ms", lambda r: r["client"]["loop_busy_s"]["p99"] / loadgen.MS),
          ("TTFT p50 ms", lambda r: r["ttft_s"]["p50"] / loadgen.MS),
          ("TTFT p99 ms", lambda r: r["ttft_s"]["p99"] / loadgen.MS),
          ("ITL p99 ms", lambda r: r["itl_s"]["p99"] / loadgen.MS))


def page() -> str:
    text = test_metrics.transcript("vllm")
    filling = "# HELP vllm:filling_seconds Histogram of what is not looked at.\n" + "".join(
        f'vllm:filling_seconds_bucket{{engine="0",le="{i}",model_name="tiny"}} 0.0\n'
        for i in range(1000))
    return text + filling[:PAGE_BYTES - len(text)].rpartition("\n")[0] + "\n"


def parsing(text: str) -> None:
    start, rounds = time.process_time(), 200
    for _ in range(rounds):
        loadgen.parse_metrics(text)
    took_s = (time.process_time() - start) / rounds
    print(f"parsing a page of {len(text):,} bytes: {took_s / loadgen.MS:.2f} ms")


def reading(text: str) -> None:
    """CPU of the process that reads, per reading, over a real socket."""
    with test_metrics.site(lambda path, headers: test_metrics.reply(text)) as port:
        read, _ = test_metrics.source(f"http://127.0.0.1:{port}")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        loadgen.SCRAPE_S, seconds_s = 0.1, loadgen.SCRAPE_S
        scraper = loadgen.Scraper(read)
        scraper.take()
        threading.Event().wait(5.0)
        rows = scraper.take()
        scraper.stop()
        loadgen.SCRAPE_S = seconds_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"reading it: {cpu_s / len(rows) / loadgen.MS:.2f} ms of CPU each, in a process of its "
          f"own: {cpu_s / len(rows):.2%} of a core at one a second")


def run(*more: str) -> Any:
    done = subprocess.run(
        [sys.executable, loadgen.__file__, "--mock", "--rate", "12", "--num-requests", "96",
         "--output-len", "48", "--json", *more], capture_output=True, text=True, check=False)
    return json.loads(done.stdout)["runs"][0]


def pairs(number: int) -> None:
    found: Dict[str, List[Any]] = {"with": [], "without": []}
    for i in range(number):
        order = ("with", "without") if i % 2 else ("without", "with")
        for name in order:
            found[name].append(run(*(["--no-metrics"] if name == "without" else [])))
    print(f"{number} pairs of runs: the median with the metrics, and without")
    for name, value in FIELDS:
        a, b = (statistics.median(map(value, found[key])) for key in ("with", "without"))
        print(f"  {name:16} {a:8.3f} {b:8.3f}")


if __name__ == "__main__":
    text = page()
    parsing(text)
    reading(text)
    pairs(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
