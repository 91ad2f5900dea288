"""The rate that capacity.py says a replica sustains, beside what loadgen.py's engine bears.

    python3 tests/bench_plan.py [PART OF A LINE]

Each deployment is planned and saved, the saved step times are simulated: --find-goodput for the
rate, and a run of 4,000 requests at the planned rate of one replica for the attainment there.
The step times are the expectation's in both, so that this shows the queueing alone.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from typing import Any, Callable, Sequence

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, TOP)
import capacity  # noqa: E402
import loadgen  # noqa: E402

DEPLOYMENTS = (
    "llama-3.1-70b -tp 2 --weights fp8 --kv fp8 --rate 20 --input-len lognormal:mean=2000,cv=0.5 "
    "--shared-prefix-len 1500 --output-len 300 --slo-ttft-ms 800 --slo-tpot-ms 50",
    "llama-3.1-8b --engine vllm --rate 12 --input-len 1000 --output-len 200 --slo-ttft-ms 500 "
    "--slo-tpot-ms 30",
    "llama-3.1-8b --weights fp8 --kv fp8 --engine sglang --rate 40 --input-len "
    "lognormal:mean=800,cv=0.8 --output-len lognormal:mean=250,cv=0.6 --slo-ttft-ms 1000 "
    "--slo-tpot-ms 25",
    "qwen3-30b-a3b --gpu h100 --tp 1 --engine vllm --weights fp8 --rate 20 --input-len "
    "lognormal:mean=1500,cv=0.5 --output-len 400 --slo-ttft-ms 1500 --slo-tpot-ms 40",
    "llama-3.1-70b --gpu h200 --tp 4 --engine vllm --rate 10 --input-len 4000 --output-len 300 "
    "--slo-ttft-ms 2000 --slo-tpot-ms 60",
    "deepseek-v3 --gpu h200 --tp 8 --engine sglang --rate 4 --input-len 3000 --output-len 500 "
    "--slo-ttft-ms 3000 --slo-tpot-ms 60",
    "gpt-oss-20b --gpu h100 --engine vllm --rate 30 --input-len uniform:200..2000 --output-len 300 "
    "--slo-ttft-ms 800 --slo-tpot-ms 20",
    "llama-3.1-8b --gpu a100-sxm-80gb --engine vllm --rate 5 --input-len 8000 --output-len 100 "
    "--slo-ttft-ms 4000 --slo-tpot-ms 100",
    "gemma-3-27b --gpu h100 --tp 2 --engine vllm --rate 6 --input-len lognormal:mean=2000,cv=1 "
    "--output-len lognormal:mean=200,cv=1 --slo-ttft-ms 2000 --slo-tpot-ms 50",
    "llama-3.1-8b --gpu l40s --engine vllm --weights fp8 --rate 8 --input-len 500 --output-len 400 "
    "--slo-tpot-ms 60 --slo-ttft-ms 1000")


def told(main: Callable[[Sequence[str]], int], *argv: str) -> Any:
    """What a command line prints with --json."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main([*argv, "--json"])
    if code:
        raise SystemExit(f"{' '.join(argv)}: exit code {code}")
    return json.loads(out.getvalue())


def main() -> None:
    """Print a line a deployment."""
    print("planned   borne  (95%)            off  met at the planned rate")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "deploy.json")
        for line in DEPLOYMENTS:
            if sys.argv[1:] and sys.argv[1] not in line:
                continue
            plan = told(capacity.main, *line.split(), "--save", path)["plan"]
            found = told(loadgen.main, "--simulate", path, "--find-goodput")["goodput_search"]
            share = plan["rate_rps"] / plan["replicas"]
            run = told(loadgen.main, "--simulate", path, "--rate", f"{share:.4g}",
                       "--num-requests", "4000")["runs"][0]
            rate = plan["rate_per_replica_rps"]
            print(f"{rate:7.3g} {found['rate_rps']:7.3g}  ({found['low_rps']:.3g} to "
                  f"{found['high_rps']:.3g})".ljust(33) + f"{rate / found['rate_rps'] - 1:+5.0%}  "
                  f"{run['attainment']:.2%}  {line[:60]}", flush=True)


if __name__ == "__main__":
    main()
