#!/usr/bin/env python3
"""Fits the constants of capacity.py's expectation to measured points.

    python3 tests/fit_expected.py            fit, and say how well it does (about two minutes)
    python3 tests/fit_expected.py --write    and put the constants and bands into presets.json

Reads tests/data/measured.csv. Least squares on the logarithm of TPOT (Gauss-Newton, a robust loss,
each (model, GPU, engine) group weighed by the square root of its points), each constant held near
its start by a prior: START says how firmly. Then each group is left out in turn and predicted from
the others; the bands are quantiles of those left-out errors. Standard library only.
"""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections import Counter
from statistics import median
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import capacity  # noqa: E402

POINTS = os.path.join(HERE, "data", "measured.csv")
PRESETS = os.path.join(os.path.dirname(HERE), "presets.json")

# Constant: start, firmness of the start (1: an error of e-fold costs as much as 1 point in a group
# of 40 being off by e-fold), firmness of a factor, the words that have a factor, what it is.
ENGINES, ARCHES = ("sglang", "trtllm", "vllm"), ("Ampere", "Blackwell", "Hopper")
WIDTHS = ("Ampere/16", "Blackwell/4", "Blackwell/8", "Blackwell/16", "Hopper/4", "Hopper/8",
          "Hopper/16")


class Start(NamedTuple):
    """Where a constant starts, and how firmly it is held there."""

    value: float
    firm: float
    factor_firm: float
    words: Tuple[str, ...]
    factors: Mapping[str, float]  # starts of factors that are not 1
    note: str


START: Dict[str, Start] = {
    "mbu": Start(0.78, 1, 8, WIDTHS, {"Ampere/16": 1.05, "Blackwell/4": 0.8, "Hopper/16": 1.14,
                                      "Hopper/8": 1.14},
                 "share of HBM bandwidth: weights but routed experts"),
    "expert_mbu": Start(0.75, 1, 3, WIDTHS, {}, "the same of routed experts"),
    "kv_mbu": Start(0.85, 1000, 8, (), {}, "the same of KV history; from attention kernels over "
                    "512 MB, not fitted"),
    "mfu": Start(0.5, 1, 8, (), {}, "share of peak FLOP/s in decode"),
    "prefill_mfu": Start(0.5, 1, 4, WIDTHS, {"Blackwell/4": 0.8, "Blackwell/8": 0.9,
                                             "Hopper/16": 1.3},
                         "share of peak FLOP/s in prefill: but routed experts"),
    "expert_prefill_mfu": Start(0.25, 1, 8, (), {}, "the same of routed experts"),
    "attention_mfu": Start(0.4, 1, 8, (), {}, "the same of attention over the prompt, of the BF16 "
                           "peak"),
    "layer_s": Start(45e-6, 1, 1, ENGINES + ARCHES, {}, "fixed time of a layer in decode"),
    "moe_layer_s": Start(35e-6, 1, 1, ENGINES + ARCHES, {}, "more, of a layer of experts"),
    "mla_layer_s": Start(20e-6, 1, 1, (), {}, "more, of a layer with an MLA latent"),
    "sequence_s": Start(17e-6, 1, 1, (), {}, "a sequence in the batch, a step"),
    "all_reduce_s": Start(6e-6, 1, 1, (), {}, "latency of a collective over two GPUs; x "
                          "sqrt(log2 GPUs)"),
    "link_share": Start(0.5, 1, 1, (), {}, "share of the link's rate in decode"),
    "prefill_link_share": Start(0.8, 1, 1, (), {}, "the same in prefill"),
    "routing": Start(0.9, 1, 0.5, ("balanced router", "biased router", "plain router"), {},
                     "independent tokens that touch as many experts as a batch of 1"),
    "routing_power": Start(0.9, 1, 1, (), {}, "and how they grow with the batch"),
    "ttft_waits": Start(3.4, 1000, 1, (), {}, "TTFT over prefill and one step; this and the next "
                        "from the measured TTFT, not fitted"),
    "ttft_burst": Start(0.06, 1000, 1, (), {}, "more, for each in the batch: they start together"),
}
ROBUST = 0.06  # errors above this (in the logarithm) count for less than their square


class Point(NamedTuple):
    """One measured point, and what does not change while constants do."""

    group: str
    d: capacity.Deployment
    held: capacity.RankWeights
    batch: int
    engine: str
    tpot_s: float
    ttft_s: float
    aside: str


def read_points(path: str = POINTS) -> List[Point]:
    """The rows of measured.csv as deployments asked of the command line."""
    with open(path, encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [point_of(row) for row in rows]


def argv_of(row: Mapping[str, str]) -> List[str]:
    """The command line that asks for the row's deployment."""
    argv = ["--preset", row["model"], "--gpu", row["gpu"], "--tp", row["tp"], "--engine",
            row["engine"], "--concurrency", row["concurrency"], "--input-len", row["input"],
            "--output-len", row["output"]]
    return [*argv, "--weights", row["weights"]] if row["weights"] else argv


with open(PRESETS, encoding="utf-8") as presets_file:
    TABLES = json.load(presets_file)  # the tables that the fit makes may not be there yet
_HELD: Dict[Any, capacity.RankWeights] = {}


def point_of(row: Mapping[str, str]) -> Point:
    """The point that a row states."""
    args = capacity.parse_args(argv_of(row))
    d = capacity.deployment_of(args, TABLES)
    key = (row["model"], row["tp"], row["weights"])
    held = _HELD.setdefault(key, capacity.rank_weights(d))
    return Point(f"{row['model']} {row['gpu']} {row['engine']}", d, held,
                 capacity.running_batch(d, d.asked or 1), row["engine"],
                 float(row["tpot_ms"]) * capacity.MS, float(row["ttft_ms"] or 0) * capacity.MS,
                 row["aside"])


class Knob(NamedTuple):
    """One number to fit: a constant ('' as its word), or the factor of a word."""

    name: str
    word: str
    start: float  # logarithm
    firm: float


KNOBS = [Knob(name, word, math.log(s.factors.get(word, 1.0) if word else s.value),
              s.factor_firm if word else s.firm)
         for name, s in START.items() for word in ("", *s.words)]


def rows_of(z: Sequence[float]) -> List[Dict[str, Any]]:
    """The rows of the table `efficiency` for the logarithms of all knobs."""
    rows: Dict[str, Dict[str, Any]] = {}
    for knob, value in zip(KNOBS, z):
        if not knob.word:
            rows[knob.name] = {"name": knob.name, "value": math.exp(value)}
        else:
            rows[knob.name].setdefault("times", {})[knob.word] = math.exp(value)
    return list(rows.values())


def logs(points: Sequence[Point], z: Sequence[float]) -> List[float]:
    """log(expected / measured) of each point for the logarithms of all knobs."""
    return errors_of(points, rows_of(z))


def errors_of(points: Sequence[Point], constants: Sequence[Mapping[str, Any]]) -> List[float]:
    """log(expected / measured) of each point for the rows of the table `efficiency`."""
    tables = {"efficiency": constants, "bands": []}
    cals: Dict[Any, capacity.Calibration] = {}
    found = []
    for p in points:
        key = (p.engine, p.d.gpu.name, p.d.weights.name, p.d.model.name)
        if key not in cals:
            cals[key] = capacity.calibration_of(p.d, p.engine, tables)
        tpot = capacity.expected_of(p.d, p.batch, cals[key], p.held).tpot_s
        found.append(math.log(tpot / p.tpot_s))
    return found


def touches(point: Point, knob: Knob) -> bool:
    """Whether the knob can change what is expected of the point."""
    if knob.word and knob.word not in capacity.words_of(point.d, point.engine):
        return False
    experts = ("expert_mbu", "expert_prefill_mfu", "moe_layer_s", "routing", "routing_power")
    return bool(point.d.model.experts) or knob.name not in experts


class Fit:
    """The least-squares problem over some points."""

    def __init__(self, points: Sequence[Point]) -> None:
        """Weigh the points; find which knob touches which."""
        self.points = points
        size: Dict[str, int] = {}
        for p in points:
            size[p.group] = size.get(p.group, 0) + 1
        self.weights = [min(2.5, math.sqrt(40 / size[p.group])) for p in points]
        words: Dict[Any, List[bool]] = {}
        self.touched = [words.setdefault(
            (p.group, p.d.weights.name), [touches(p, k) for k in KNOBS]) for p in points]

    def jacobian(self, z: Sequence[float], base: Sequence[float]) -> List[List[float]]:
        """d log(expected) / d knob, a row for each point."""
        found = [[0.0] * len(KNOBS) for _ in self.points]
        for j in range(len(KNOBS)):
            which = [i for i, touched in enumerate(self.touched) if touched[j]]
            moved = logs([self.points[i] for i in which],
                         [v + 0.02 * (k == j) for k, v in enumerate(z)])
            for i, value in zip(which, moved):
                found[i][j] = (value - base[i]) / 0.02
        return found

    def step(self, z: Sequence[float], base: Sequence[float], slopes: Sequence[Sequence[float]],
             left_out: str = "") -> List[float]:
        """One Gauss-Newton step from z, without the group left out."""
        n = len(KNOBS)
        normal = [[0.0] * n for _ in range(n)]
        right = [0.0] * n
        for p, weight, error, slope in zip(self.points, self.weights, base, slopes):
            if p.group == left_out:
                continue
            w = weight**2 / math.sqrt(1 + (error / ROBUST)**2)
            used = [j for j in range(n) if slope[j]]
            for j in used:
                right[j] -= w * slope[j] * error
                for k in used:
                    normal[j][k] += w * slope[j] * slope[k]
        for j, knob in enumerate(KNOBS):
            normal[j][j] += knob.firm**2
            right[j] += knob.firm**2 * (knob.start - z[j])
        moves = solve(normal, right)
        return [a + max(-0.3, min(0.3, b)) for a, b in zip(z, moves)]


def solve(matrix: List[List[float]], right: Sequence[float]) -> List[float]:
    """The solution of a positive definite system, by elimination."""
    n = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right)]
    for i in range(n):
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            if factor:
                for j in range(i, n + 1):
                    rows[k][j] -= factor * rows[i][j]
    found = [0.0] * n
    for i in reversed(range(n)):
        found[i] = (rows[i][n] - sum(rows[i][j] * found[j] for j in range(i + 1, n))) / rows[i][i]
    return found


def fitted(points: Sequence[Point], rounds: int = 8) -> List[float]:
    """The knobs that fit the points best."""
    fit, z = Fit(points), [knob.start for knob in KNOBS]
    for _ in range(rounds):
        base = logs(points, z)
        z = fit.step(z, base, fit.jacobian(z, base))
    return z


def left_out(points: Sequence[Point], z: Sequence[float]) -> Dict[str, List[float]]:
    """The knobs with each group left out: steps from the whole fit, its slopes kept."""
    fit = Fit(points)
    base = logs(points, z)
    slopes, found = fit.jacobian(z, base), {}
    for group in sorted({p.group for p in points}):
        rest = [i for i, p in enumerate(points) if p.group != group]
        other, part = list(z), Fit([points[i] for i in rest])
        for _ in range(3):
            part.weights = [fit.weights[i] for i in rest]
            other = part.step(other, logs(part.points, other), [slopes[i] for i in rest])
        found[group] = other
    return found


def kind_of(point: Point) -> str:
    """The kind of model that has a band of its own."""
    return "MoE" if point.d.model.experts else "dense"


OUTSIDE = 0.08  # of the points on each side of a band; under 10%, for the next group varies too


def bands_of(points: Sequence[Point], inside: Sequence[float], outs: Sequence[float]
             ) -> List[Dict[str, Any]]:
    """The rows of the table `bands` from the errors in the fit and of groups left out of it.

    Quantiles of measured over expected, each group weighed by the square root of its points.
    fitted, median: median error in the fit, and left out of it. seen: points of the fit by engine,
    GPU generation and width of the weights.
    """
    found = []
    for kind in ("dense", "MoE"):
        which = [i for i, p in enumerate(points) if kind_of(p) == kind]
        size = Counter(points[i].group for i in which)
        each = sorted((-outs[i], 1 / math.sqrt(size[points[i].group])) for i in which)
        used = [i for i in which if not points[i].aside]
        seen = Counter(f"{p.engine} {capacity.generation(p.d.gpu)}/{capacity.stored_bits(p.d)}"
                       for p in (points[i] for i in used))
        found.append({"name": kind, "low": math.exp(quantile(each, OUTSIDE)),
                      "high": math.exp(quantile(each, 1 - OUTSIDE)),
                      "fitted": median(abs(math.exp(inside[i]) - 1) for i in used),
                      "median": median(abs(math.exp(outs[i]) - 1) for i in used),
                      "seen": dict(sorted(seen.items()))})
    return found


def quantile(each: Sequence[Tuple[float, float]], share: float) -> float:
    """The value below which a share of the weight lies; (value, weight) sorted."""
    total, seen = sum(weight for _, weight in each), 0.0
    for value, weight in each:
        seen += weight
        if seen >= share * total:
            return value
    return each[-1][0]


def rounded(value: Any) -> Any:
    """A number at three significant digits, and so within lists and objects."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def noted(rows: Iterable[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """Rows of constants as presets.json has them: rounded, a note each, factors of 1 left out."""
    found = []
    for row in rows:
        times = {word: f for word, f in rounded(row.get("times", {})).items() if f != 1}
        found.append({"name": row["name"], "value": rounded(row["value"]),
                      **({"times": times} if times else {}), "note": START[row["name"]].note})
    return found


def write(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Put the tables into presets.json, one row a line."""
    with open(PRESETS, encoding="utf-8") as file:
        text = file.read()
    for name, rows in tables.items():
        body = f' "{name}": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]"
        start = text.find(f' "{name}": [')
        if start < 0:
            text = text.rstrip()[:-1].rstrip() + ",\n" + body + "\n}\n"
        else:
            text = text[:start] + body + text[text.index("\n ]", start) + len("\n ]"):]
    with open(PRESETS, "w", encoding="utf-8") as file:
        file.write(text)


def error_text(errors: Iterable[float]) -> str:
    """Median and p90 of absolute errors, from logarithms."""
    each = sorted(abs(math.exp(e) - 1) for e in errors)
    return f"{median(each):6.1%} {each[int(0.9 * len(each))]:6.1%}"


def held_share(points: Sequence[Point], outs: Sequence[float], group: str) -> float:
    """Share of a left-out group's points that the band made from the other groups holds."""
    rest = [i for i, p in enumerate(points) if p.group != group]
    others = [outs[i] for i in rest]
    bands = {row["name"]: row for row in bands_of([points[i] for i in rest], others, others)}
    inside = [bands[kind_of(p)]["low"] <= math.exp(-error) <= bands[kind_of(p)]["high"]
              for p, error in zip(points, outs) if p.group == group]
    return sum(inside) / len(inside)


def report(points: Sequence[Point], inside: Sequence[float], outs: Sequence[float]) -> None:
    """In-sample and left-out error by kind, engine and group, and how the bands hold up."""
    print("error of TPOT, median and p90: fitted; left out; then its bias, and share of its points "
          "in the band of the others")
    held = {group: held_share(points, outs, group) for group in {p.group for p in points}}
    parts: Dict[str, List[int]] = {}
    for i, p in enumerate(points):
        for name in (kind_of(p), f" {kind_of(p)} {p.engine}", f"  {p.group}"):
            parts.setdefault(name, []).append(i)
    for name in sorted(parts, key=lambda name: (name.count(" ", 0, 2), name)):
        which = parts[name]
        used = [i for i in which if not points[i].aside] or which
        share = sum(held[points[i].group] for i in which) / len(which)
        print(f"{name:34s} {len(which):4d}  {error_text(inside[i] for i in used)}   "
              f"{error_text(outs[i] for i in used)}  "
              f"{median(math.exp(outs[i]) - 1 for i in used):+6.1%} {share:5.0%}")


def main(argv: Sequence[str]) -> int:
    """Fit, report, and write where asked."""
    every = [p for p in read_points() if p.aside != "odd"]
    used = [p for p in every if not p.aside]
    z = fitted(used)
    without = left_out(used, z)
    constants = noted(rows_of(z))
    inside = errors_of(every, constants)
    outs = [0.0] * len(every)
    for group, other in without.items():
        which = [i for i, p in enumerate(every) if p.group == group]
        for i, value in zip(which, logs([every[i] for i in which], other)):
            outs[i] = value
    bands = rounded(bands_of(every, inside, outs))
    report(every, inside, outs)
    for row in [*constants, *bands]:
        print(json.dumps(row))
    if "--write" in argv:
        write({"efficiency": constants, "bands": bands})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
