"""How exactly a trace is replayed against the built-in engine: sent - (the trace's time / speed).

    python3 tests/bench_replay.py TRACE [SPEED [flags of loadgen.py ...]]

Prints percentiles of the error in ms, over all requests, as the client stamps them.
"""

import json
import os
import subprocess
import sys
import tempfile

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, TOP)
import loadgen  # noqa: E402

PROFILE = {"weights_s": 0.002, "sequence_s": 2e-5, "prefill_s_per_token": 1e-7,
           "max_num_batched_tokens": 200_000, "max_model_len": 200_000, "num_blocks": 300_000,
           "max_num_seqs": 256}


def main() -> None:
    path, speed = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    with tempfile.TemporaryDirectory() as folder:
        profile, out = os.path.join(folder, "profile.json"), os.path.join(folder, "run")
        with open(profile, "w", encoding="utf-8") as file:
            json.dump(PROFILE, file)
        subprocess.run([sys.executable, os.path.join(TOP, "loadgen.py"), "--mock", profile,
                        "--trace", path, "--trace-speed", str(speed), "--out", out,
                        *sys.argv[3:]], stdout=subprocess.DEVNULL, check=False)
        with open(os.path.join(out, "requests.jsonl"), encoding="utf-8") as file:
            rows = sorted(map(json.loads, file), key=lambda row: row["id"])
    trace = loadgen.read_trace(path, (0.0, float("inf")), speed, len(rows), float("inf"))
    late = sorted(row["sent_s"] - planned.due_s for row, planned in zip(rows, trace.requests)
                  if row["sent_s"] is not None)
    shown = ", ".join(f"{name} {loadgen.in_ms(loadgen.percentile(late, share))}"
                      for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)))
    print(f"{len(late)} of {len(trace.requests)} requests sent; late by at least "
          f"{loadgen.in_ms(late[0])}, {shown} ms")


if __name__ == "__main__":
    main()
