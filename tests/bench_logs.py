"""Predicted against logged, for every start-up log of tests/data/startup_logs.jsonl.

    python3 tests/bench_logs.py [--json]

A row's "ask" is the command line that describes it; its other fields are what the log or its page
states (GiB; "source" says where). Where the page gives no version or utilisation, none is asked.
Prints each row, then the errors of weights and of the KV cache (GiB, else blocks, tokens or
concurrency), and the reserve logged over the reserve predicted.
"""
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import capacity

ROWS = Path(__file__).resolve().parent / "data" / "startup_logs.jsonl"
GIB = 2**30
TABLES = capacity.presets()
KV = ("available_kv_gib", "num_gpu_blocks", "kv_cache_tokens", "max_concurrency")


def predict(ask):
    """(what the engine will log, by the log's own names; its memory) for a command line."""
    args = capacity.parse_args(ask.split())
    d = capacity.deployment_of(args, TABLES)
    found = capacity.engine_answer(d, capacity.settings_of(d, args))
    memory = found.memory
    return {"model_loading_gib": memory.weights_bytes / GIB,
            "available_kv_gib": memory.available_bytes / GIB,
            "num_gpu_blocks": found.pool.blocks if found.pool else None,
            "kv_cache_tokens": found.tokens, "max_concurrency": found.concurrency,
            "activation_peak_gib": memory.activation_bytes / GIB,
            "low_gib": found.low_bytes / GIB, "high_gib": found.high_bytes / GIB}, memory


def compare(row):
    """Relative errors of one row: weights, each KV figure, and the share of the reserve."""
    got, memory = predict(row["ask"])
    got["max_concurrency"] *= row.get("dp", 1)  # such a row states the sum over its ranks
    errors = {name: got[name] / row[name] - 1 for name in ("model_loading_gib", *KV)
              if row.get(name) and got[name] is not None and row[name] > 0}
    kv, weights = row.get("available_kv_gib"), row.get("model_loading_gib")
    share = None
    if kv and weights and memory.reserve_bytes:
        share = (memory.requested_bytes / GIB - weights - kv) / (memory.reserve_bytes / GIB)
    held = got["low_gib"] <= kv <= got["high_gib"] if kv else None
    return {"ask": row["ask"], "confidence": row["confidence"], "errors": errors,
            "reserve_share": share, "held": held, "got": got}


def main():
    """Print the table."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    found = [(row, compare(row)) for row in rows if "ask" in row]
    weights, kv, held = [], [], []
    for row, result in found:
        errors = result["errors"]
        text = "  ".join(f"{name.split('_')[0]} {row[name]:g}->{result['got'][name]:.6g} "
                         f"{error:+.1%}" for name, error in errors.items())
        share = result["reserve_share"]
        print(f"{row['confidence']:6} {row['ask']}\n       {text}"
              + (f"  reserve x{share:.2f}" if share is not None else ""))
        if row["confidence"] == "low":
            continue
        if "model_loading_gib" in errors:
            weights.append(abs(errors["model_loading_gib"]))
        mine = [abs(errors[name]) for name in KV if name in errors]
        kv += mine[:1]
        held += [] if result["held"] is None else [result["held"]]
    for name, errors in (("weights", weights), ("KV cache", kv)):
        errors.sort()
        print(f"{name}: {len(errors)} rows, median error {statistics.median(errors):.1%}, "
              f"p90 {errors[int(0.9 * (len(errors) - 1))]:.1%}, within 10%: "
              f"{sum(e <= 0.1 for e in errors) / len(errors):.0%}")
    print(f"in the band: {sum(held)} of {len(held)}")


if __name__ == "__main__":
    main()
