"""What the client costs and how right its times are, against the built-in engine's own truth.

    python3 tests/bench_client.py [STREAMS ...]        default 64 256

The engine runs on the first core, the client on the last, each stream one token a 20 ms step.
Beside it stands the floor: the same streams read by a bare epoll and recv loop that only counts
bytes. Prints events/s, CPU seconds per million events, TTFT error (client from sent - engine from
request received), ITL p99 of both sides, send lag and memory.
"""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any, Dict, List

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen

SCRIPT = os.path.abspath(loadgen.__file__)
TOKENS = 100
PROFILE = {"weights_s": 0.02, "sequence_s": 0.0, "prefill_s_per_token": 0.0, "max_num_seqs": 1024,
           "max_num_batched_tokens": 65536}


def on_core(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core]})


def quantile(values: List[float], share: float) -> float:
    return loadgen.percentile(sorted(values), share) or 0.0


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as reply:
        return json.load(reply)


def client(url: str, streams: int) -> Dict[str, float]:
    """One run of loadgen at so many streams, beside the engine's truth."""
    urllib.request.urlopen(f"{url}/truth/reset").close()
    rate = streams / (TOKENS * PROFILE["weights_s"])
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "run")
        subprocess.run(
            [sys.executable, SCRIPT, url, "--rate", str(rate), "--num-requests",
             str(int(rate * 8)), "--input-len", "32", "--output-len", str(TOKENS), "--warmup", "0",
             "--out", out], preexec_fn=lambda: on_core(-1), stdout=subprocess.DEVNULL, check=False)
        with open(os.path.join(out, "summary.json"), encoding="utf-8") as file:
            run = json.load(file)["runs"][0]
        with open(os.path.join(out, "requests.jsonl"), encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
    truth = {row["id"]: row for row in get(f"{url}/truth")["requests"]}
    errors, spans = [], []
    for row in rows:
        own = truth.get(f"loadgen-0-{row['id']}")
        if own and row["class"] == "ok":
            errors.append(abs(row["ttft_from_sent_s"] - (own["first_ns"] - own["recv_ns"]) * 1e-9))
            spans.append(abs(row["last_s"] - row["first_s"]
                             - (own["last_ns"] - own["first_ns"]) * 1e-9))
    health = run["client"]
    return {"events/s": health["events"] / run["span_s"],
            "CPU s/1M": health["cpu_s_per_million_events"],
            "TTFT err p50 ms": quantile(errors, 0.5) * 1e3,
            "TTFT err p99 ms": quantile(errors, 0.99) * 1e3,
            "first-to-last err p99 ms": quantile(spans, 0.99) * 1e3,
            "lag p99 ms": health["send_lag_s"]["p99"] * 1e3,
            "MB": health["peak_rss_bytes"] / 1e6}


def floor(url: str, streams: int) -> float:
    """CPU seconds per million events of a loop that only receives [s]."""
    host, port = url.rsplit("/", 1)[1].split(":")
    body = json.dumps({"model": "mock-model", "prompt": list(range(32)), "max_tokens": TOKENS,
                       "stream": True, "ignore_eos": True}).encode()
    poller, socks = select.epoll(), {}
    for number in range(streams):
        sock = socket.create_connection((host, int(port)))
        sock.sendall(loadgen.request_bytes("POST", "/v1/completions", "x", {
            "X-Request-Id": f"floor-{number}"}, body))
        sock.setblocking(False)
        socks[sock.fileno()] = sock
        poller.register(sock.fileno(), select.EPOLLIN)
    start_s, events, left = time.process_time(), 0, streams
    while left:
        for fd, _ in poller.poll(1.0):
            data = socks[fd].recv(65536)
            events += 1
            if data.endswith(loadgen.LAST_CHUNK) or not data:
                left -= 1
    for sock in socks.values():
        sock.close()
    poller.close()
    return (time.process_time() - start_s) * 1e6 / (streams * TOKENS)


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or [64, 256]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "profile.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(PROFILE, file)
        engine = subprocess.Popen([sys.executable, SCRIPT, "--serve", "--port", "0", "--mock",
                                   path], stdout=subprocess.PIPE, preexec_fn=lambda: on_core(0))
        assert engine.stdout is not None
        url = engine.stdout.readline().decode().split()[-1]
        on_core(-1)
        try:
            for streams in sizes:
                base = floor(url, streams)
                found = client(url, streams)
                print(f"{streams} streams: " + ", ".join(f"{key} {value:.3g}" for key, value
                                                         in found.items())
                      + f"; bare recv {base:.3g} CPU s/1M, ratio {found['CPU s/1M'] / base:.2f}")
        finally:
            engine.terminate()
            engine.wait()
            engine.stdout.close()


if __name__ == "__main__":
    main()
