#!/usr/bin/env python3
"""How fast, under load: an open-loop load generator for OpenAI-compatible streaming endpoints.

    loadgen.py http://HOST:8000 --rate 4 --num-requests 50
    loadgen.py http://HOST:8000 --sweep 2,4,8 --duration 60 --slo-ttft-ms 500 --out run/
    loadgen.py --mock --sweep 2,8,32 --num-requests 120 --output-len 48 --endpoint chat

Requests go out when the plan says, whatever the answers do, and latency runs from that moment, so
that a slow server cannot slow the clock. The client judges itself: a run that it spoilt says so.
Standard library only. --mock brings its own engine, over real HTTP on this machine; --simulate
runs the same plan on the same engine without sockets or waiting, and measures nothing.

Data flows downwards: 1 words, units and lengths, 2 the flags, 3 the plan, 3b traces, prompts,
classes and sessions, 4 prompts and requests, 5 the wire, 6 the driver (the only client sockets),
7 workers and runs, 7b server metrics, 8 statistics, 8b the search for the knee, 8c findings,
9 rendering, 9b the page, 10 the engine, 10b the virtual clock, 11 the mock server, 11b old
numbers, differences and shards, 12 the command line.
"""

from __future__ import annotations

import array
import bisect
import collections
import contextlib
import errno
import functools
import gc
import heapq
import io
import itertools
import json
import math
import operator
import os
import re
import select
import signal
import socket
import struct
import sys
import time
import zlib
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Hashable,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

# ---- 1. Words, units and lengths ---------------------------------------------------------------
# due: when the plan says a request arrives; user-facing latency runs from here.
# sent: its first byte was handed to the kernel on a connected socket.
# output event: an SSE event that carries output (text, reasoning, a tool call).
# TTFT: first output event - due. TTFO: first output event that is no reasoning - due.
# E2E: last output event - due. TPOT: (E2E - TTFT) / (n_out - 1). ITL: a gap between output events.
# in flight: due and not finished. attainment: share of offered requests that met every SLO.
# Inside: seconds (suffix _s) and nanoseconds of the monotonic clock (suffix _ns).

# >>>> the same in capacity.py and loadgen.py; a test compares them
KIB, MIB, GIB = 2**10, 2**20, 2**30
KILO, MEGA, GIGA, TERA = 1e3, 1e6, 1e9, 1e12
MS, US, NS = 1e-3, 1e-6, 1e-9
MINUTE_S, HOUR_S = 60.0, 3600.0
ABSURD = 1e15  # past this a number given by hand is a slip


class UserError(Exception):
    """Bad input; its text is one line that says what is wrong and what to do."""


def count(value: float) -> str:
    """A whole number with thousands separators.

    >>> count(450912.2)
    '450,912'
    """
    return f"{value:,.0f}"


def figure(value: float, digits: int = 3) -> str:
    """A number with about so many significant digits and no exponent.

    >>> figure(3.3989), figure(486596.3), figure(0.0694)
    ('3.4', '486,596', '0.0694')
    """
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{float(f'{value:.{digits}g}'):.10f}".rstrip("0").rstrip(".")


def near(name: str, known: Iterable[str]) -> str:
    """'; did you mean a, b?' for a name that is not among the known ones, or ''."""
    import difflib
    close = difflib.get_close_matches(name.lower(), sorted(known), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""


def number(text: str) -> float:
    """A finite number."""
    try:
        if "_" in text or not text.isascii():
            raise ValueError
        value = float(text)
    except ValueError:
        raise UserError(f"{text!r} is not a number") from None
    if not abs(value) < ABSURD or 0 < abs(value) < 1 / ABSURD:
        raise UserError(f"{text!r} is past any sensible number")
    return value


def positive(text: str) -> float:
    """A number more than zero."""
    value = number(text)
    if value <= 0:
        raise UserError(f"{text!r} must be more than zero")
    return value


def not_negative(text: str) -> float:
    """A number, zero or more."""
    value = number(text)
    if value < 0:
        raise UserError(f"{text!r} must not be negative")
    return value


def whole(text: str) -> int:
    """A whole number from 1 to a billion; 32k means 32,000 and 32K 32,768, as in vLLM."""
    scale = {"k": 1000, "K": KIB, "m": 10**6, "M": MIB}.get(text[-1:], 0)
    value = positive(text[:-1] if scale else text) * (scale or 1)
    if value != int(value) or value > GIGA:
        raise UserError(f"{text!r} must be a whole number, at most a billion")
    return int(value)


def fraction(text: str) -> float:
    """A share: more than 0, at most 1."""
    value = positive(text)
    if value > 1:
        raise UserError(f"{text!r} must be a share from 0 to 1, such as 0.9")
    return value


class Lengths(NamedTuple):
    """A distribution of token counts: its mean and its quantile function."""

    text: str
    mean: float
    quantile: Callable[[float], float]


def parse_lengths(text: str) -> Lengths:
    """Lengths as flags write them: 2000, lognormal:mean=2000,cv=0.5, uniform:100..4000, hist:FILE.

    hist:FILE holds one length a line, or `length,count`. Raises UserError.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "lognormal":
            parts = dict(part.split("=") for part in rest.split(","))
            if set(parts) != {"mean", "cv"}:
                raise ValueError
            return lognormal(text, positive(parts["mean"]), positive(parts["cv"]))
        if kind == "uniform":
            low, high = (positive(part) for part in rest.split(".."))
            if high < low:
                raise ValueError
            return Lengths(text, (low + high) / 2, lambda q: low + q * (high - low))
        if kind == "hist":
            return histogram(rest)
        fixed = float(whole(text))
        return Lengths(text, fixed, lambda q: fixed)
    except ValueError:
        raise UserError(f"{text!r} is not a length; write 2000, lognormal:mean=2000,cv=0.5, "
                        "uniform:100..4000 or hist:FILE") from None


def lognormal(text: str, mean: float, cv: float) -> Lengths:
    """Log-normal lengths with this mean and coefficient of variation (sd / mean)."""
    from statistics import NormalDist
    sigma = math.sqrt(math.log1p(cv * cv))
    mu = math.log(mean) - sigma * sigma / 2
    return Lengths(text, mean, lambda q: math.exp(mu + sigma * NormalDist().inv_cdf(q)))


def histogram(path: str) -> Lengths:
    """Lengths as counted in a file: one a line, or `length,count`; '#' starts a comment."""
    pairs = []
    try:
        with open(path, encoding="utf-8") as file:
            for n, line in enumerate(file, 1):
                length, _, times = line.partition("#")[0].strip().partition(",")
                try:
                    if length:
                        pairs.append((positive(length), not_negative(times or "1")))
                except UserError as error:
                    raise UserError(f"{path} line {n}: {error}; write a length, or length,count"
                                    ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    total = sum(times for _, times in pairs)
    if not total:
        raise UserError(f"{path} holds no lengths")
    pairs.sort()

    def quantile(q: float) -> float:
        seen = 0.0
        for length, times in pairs:
            seen += times
            if seen >= q * total:
                return length
        return pairs[-1][0]

    return Lengths(f"hist:{path}", sum(a * b for a, b in pairs) / total, quantile)


def named(flag: str, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """The type of a flag, its complaints beginning with the flag's name."""
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except UserError as error:
            raise UserError(f"{flag} {error}") from None
    return parse
# <<<<


Facts = Mapping[str, Any]  # a summary, or a part of one
Rows = List[Dict[str, Any]]  # messages, readings, findings
Records = Sequence["Record"]


# ---- 2. The flags ------------------------------------------------------------------------------


class Flag(NamedTuple):
    """One command-line flag: its spellings (ours first), its value and meaning."""

    names: str
    kind: Optional[Callable[[str], Any]]  # None: a switch
    metavar: str
    help: str
    default: Any = None
    nargs: Union[str, int, None] = None


def word(text: str) -> str:
    """Any text but an empty one, which is an unset variable more often than not."""
    if not text.strip():
        raise UserError("is empty")
    return text


def rate_or_inf(text: str) -> float:
    """Requests a second; inf = no rate."""
    return math.inf if text.lower() == "inf" else positive(text)


def natural(text: str) -> int:
    """A whole number, zero or more."""
    return 0 if text.strip() == "0" else whole(text)


def at_most(most: float, kind: Callable[[str], Any], why: str) -> Callable[[str], Any]:
    """A kind of number with a largest value; what is wrong past it."""
    def parse(text: str) -> Any:
        value = kind(text)
        if value > most:
            raise UserError(f"{text!r} {why}")
        return value
    return parse


seconds = at_most(30 * 24 * HOUR_S, positive, "seconds are more than a month")
workers = at_most(256, whole, "processes are more than 256")
requests = at_most(5_000_000, whole, "requests are more than 5 million in one run")


def token_lengths(text: str) -> Lengths:
    """A distribution of prompt or output lengths."""
    lengths = parse_lengths(word(text))
    if not 1 <= lengths.quantile(0.5) <= lengths.quantile(1 - 1e-9) <= TOKENS_PLANNED_MAX:
        raise UserError(f"{text!r} reaches lengths past {TOKENS_PLANNED_MAX:,} tokens, or under 1")
    return lengths


TOKENS_PLANNED_MAX = 4_000_000
SEARCH_REQUESTS = 3800


def trace_window(text: str) -> Tuple[float, float]:
    """A part of a trace, START..END [s]; without END, to the last request."""
    start, dots, end = text.partition("..")
    found = not_negative(start or "0"), positive(end) if end else math.inf
    if not dots or found[1] <= found[0]:
        raise UserError(f"{text!r} must be START..END, in seconds of the trace")
    return found


def trace_unit(text: str) -> int:
    """A unit of time [ns]: by name, or the seconds in it."""
    named_ns = {"s": SECOND_NS, "ms": 10**6, "us": 1000, "ns": 1}
    unit_ns = named_ns.get(text) or round(positive(text) / NS)
    if not 1 <= unit_ns <= 3600 * SECOND_NS:
        raise UserError(f"{text!r} must be from 1e-9 to 3600 s")
    return unit_ns


def turns(text: str) -> Lengths:
    """How many turns a session has: 1 to 200."""
    lengths = token_lengths(text)
    if lengths.quantile(1 - 1e-9) > 200:
        raise UserError(f"{text!r} reaches past 200 turns")
    return lengths


def think_time(text: str) -> Lengths:
    """Time between turns [s]: 5 (always), exp:5 (exponential, that mean), or as lengths are."""
    if text.startswith("exp:"):
        mean = positive(text[4:])
        return Lengths(text, mean, lambda q: -mean * math.log1p(-q))
    try:
        fixed = not_negative(text)
    except UserError:
        return parse_lengths(text)
    return Lengths(text, fixed, lambda q: fixed)


def rates(text: str) -> List[float]:
    """A list of rates, separated by commas; auto is an empty one."""
    return [] if text == "auto" else [positive(part) for part in text.split(",")]


def shard(text: str) -> Tuple[int, int]:
    """(i, N) of i/N; auto takes i, and N where it is not given, from Kubernetes or Slurm."""
    place, _, of = text.partition("/")
    if place == "auto":
        name = ("JOB_COMPLETION_INDEX" if os.environ.get("JOB_COMPLETION_INDEX")
                else "SLURM_PROCID")
        place, number = os.environ.get(name, ""), of or os.environ.get("SLURM_NTASKS", "")
        if not (place and number):
            raise UserError("auto: JOB_COMPLETION_INDEX with auto/N, or SLURM_PROCID and "
                            "SLURM_NTASKS, must say which of how many")
        if not (place.isdecimal() and number.isdecimal() and int(place) < int(number) <= 10_000):
            counted = "" if of else f", SLURM_NTASKS={number!r}"
            raise UserError(f"{text}: {name}={place!r}{counted} is no I from 0 to N-1")
        of = number
    if not (place.isdecimal() and of.isdecimal() and int(place) < int(of) <= 10_000):
        raise UserError(f"{text!r} must be I/N with I from 0 to N-1, such as 0/4")
    return int(place), int(of)


def start_at(text: str) -> float:
    """A time of day as unix seconds: ISO 8601, unix seconds, or +S from now."""
    import datetime
    now_s = time.time()
    try:
        at_s = (now_s + positive(text[1:]) if text[:1] == "+" else float(text)
                if text.replace(".", "", 1).isdecimal() else
                datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp())
    except (ValueError, OverflowError, OSError):
        raise UserError(f"{text!r} is no time; write 2026-01-31T12:00:00Z, unix seconds or +30"
                        ) from None
    if not now_s - 1 < at_s < now_s + 7 * 24 * HOUR_S:
        raise UserError(f"{text!r} is over, or more than a week away")
    return at_s


def json_object(text: str) -> Dict[str, Any]:
    """A JSON object."""
    try:  # the text itself is not repeated: it may hold a key
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise UserError("is JSON, but no object {...}")
    return value


def header(text: str) -> Tuple[str, str]:
    """A header as K=V or K: V."""
    cut = min((text.index(c) for c in ":=" if c in text), default=0)
    name, value = text[:cut].strip(), text[cut + 1:].strip()
    if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise UserError("is not a header; write NAME=VALUE or 'NAME: VALUE'")
    if not all(" " <= c <= "~" or c == "\t" for c in value):
        raise UserError(f"{name} has a value with a line break or a character that is no ASCII")
    return name, value


def told(text: str) -> Tuple[str, str]:
    """A fact about the setup, as NAME=VALUE."""
    name, _, value = text.partition("=")
    if not name.strip() or not value.strip():
        raise UserError(f"{text!r} is no fact; write NAME=VALUE, such as gpu=h100 or gpus=2")
    return name.strip(), str(whole(value.strip())) if name.strip() == "gpus" else value.strip()


def range_ratio(text: str) -> Tuple[float, float]:
    """The spread of input and output lengths as vllm bench writes it: R, or JSON of both."""
    both = json_object(text) if text.startswith("{") else {"input": text, "output": text}
    found = [not_negative(str(both.get(key, 0))) for key in ("input", "output")]
    if max(found) >= 1:
        raise UserError(f"{text!r} must be under 1")
    return found[0], found[1]


def goodput_limit(text: str) -> Tuple[str, float]:
    """(our flag, seconds) of a limit as vllm bench serve writes it: ttft:500, e2el:2000 (ms)."""
    name, _, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise UserError(f"{text!r} must be ttft:MS, tpot:MS or e2el:MS")
    return f"slo_{name[:4].rstrip('l')}_ms", positive(value) * MS


def endpoint(text: str) -> str:
    """chat or completions, or vllm's paths and backend names for them."""
    known = {"chat": "chat", "completions": "completions", "/v1/chat/completions": "chat",
             "/v1/completions": "completions", "openai-chat": "chat", "vllm": "completions",
             "openai": "completions", "sglang": "completions", "sglang-oai": "completions",
             "sglang-oai-chat": "chat"}
    if text not in known:
        raise UserError(f"{text!r} is not known{near(text, known)}; write chat or completions")
    return known[text]


FLAGS: Dict[str, Tuple[Flag, ...]] = {
    "target": (
        Flag("--base-url", word, "URL", "http://HOST:PORT, with or without /v1"),
        Flag("--host", word, "HOST", "host of the target, or to listen on with --serve"),
        Flag("--port", natural, "PORT", "its port (default: 8000)"),
        Flag("--model", word, "NAME", "model to ask for (default: the server's first)"),
        Flag("--served-model-name", word, "NAME", "the same, and wins over --model"),
        Flag("--endpoint --backend", endpoint, "NAME", "chat or completions (the default)"),
        Flag("--api-key", word, "KEY", "sent as a bearer token, never printed or saved (default: "
             "OPENAI_API_KEY)"),
        Flag("--header", header, "K=V", "one more header, may be repeated", nargs="append"),
        Flag("--extra-body", json_object, "JSON", "fields put over the request body; null removes"),
        Flag("--temperature", not_negative, "T", "sampling temperature (default: 0)"),
        Flag("--top-p", fraction, "P", "and vllm bench's other sampling fields"),
        Flag("--top-k", number, "K", ""), Flag("--min-p", not_negative, "P", ""),
        Flag("--frequency-penalty", number, "X", ""), Flag("--presence-penalty", number, "X", ""),
        Flag("--repetition-penalty", number, "X", ""),
        Flag("--ca-file", word, "FILE", "certificate authority to trust"),
        Flag("--insecure", None, "", "do not verify TLS certificates"),
        Flag("--proxy", word, "env", "use the proxy that the environment names; ignored otherwise"),
        Flag("--metrics-url", word, "URL", "the engine's Prometheus metrics (default: /metrics of "
             "the target)"),
        Flag("--no-metrics", None, "", "do not read them"),
    ),
    "load": (
        Flag("--rate --request-rate", rate_or_inf, "REQ/S", "open loop: requests due a second"),
        Flag("--sweep", rates, "R,R", "one run for each rate; auto: find the knee, then around it"),
        Flag("--find-goodput", None, "", "search the highest rate that meets the SLO"),
        Flag("--max-requests", requests, "N", f"that the search may send, about (default: "
             f"{SEARCH_REQUESTS})"),
        Flag("--concurrency --max-concurrency", whole, "N", "most in flight: a cap with a rate, "
             "the closed loop without"),
        Flag("--trace", word, "FILE", "replay recorded arrivals and lengths: Mooncake or vLLM "
             "timed_trace JSONL, Azure, BurstGPT or plain CSV"),
        Flag("--trace-speed", positive, "X", "times as fast as recorded (default: 1)"),
        Flag("--trace-window", trace_window, "START..END", "a part of it, in its own seconds"),
        Flag("--trace-unit --timed-trace-sec-multiplier", trace_unit, "s|ms|us|ns", "of its times, "
             "where it is known better than from the file; or seconds in it, as vllm bench has it"),
        Flag("--trace-block --timed-trace-chunk-hash-size", at_most(4096, whole, "is past 4096"),
             "TOKENS", "that a hash id stands for (default: by the lengths)"),
        Flag("--mix", word, "FILE", "several classes at once, each with its own rate, lengths, "
             "prefix, SLO and model (JSON)"),
        Flag("--burstiness", rate_or_inf, "SHAPE", "gamma shape of the gaps: 1 Poisson, <1 "
             "burstier, inf constant", 1.0),
        Flag("--num-requests --num-prompts", requests, "N", "requests a run (default: 100)"),
        Flag("--duration", seconds, "S", "instead: measure what is due in so long a window"),
        Flag("--ramp", not_negative, "S", "before that window (default: one expected E2E)"),
        Flag("--warmup --num-warmups", natural, "N", "requests first, never counted", 4),
        Flag("--seed", natural, "N", "of arrivals, lengths and prompts", 1),
        Flag("--workers", workers, "N", "processes that share the plan", 1),
        Flag("--shard", shard, "I/N", "send every N-th request from the I-th (from 0); auto[/N] "
             "asks Kubernetes or Slurm; --out gets DIR/shard-I"),
        Flag("--start-at", start_at, "TIME", "start of the plan's clock: ISO time, unix seconds, "
             "or +S"),
    ),
    "work": (
        Flag("--input-len --random-input-len", token_lengths, "TOKENS", "prompt: 2000, "
             "lognormal:mean=2000,cv=0.5, uniform:100..4000, hist:FILE (default: 200)"),
        Flag("--output-len --random-output-len", token_lengths, "TOKENS",
             "output, same grammar (default: 100)"),
        Flag("--random-range-ratio", range_ratio, "R", "make fixed lengths uniform, +-R of them"),
        Flag("--shared-prefix-len --random-prefix-len", natural, "TOKENS",
             "of every prompt that are the same (default: 0)"),
        Flag("--prefix-groups", whole, "N", "different shared prefixes", 1),
        Flag("--no-unique-prompts", None, "", "no nonce: prompts may repeat between runs"),
        Flag("--ignore-eos", None, "", "ask for the full output length (on by default)"),
        Flag("--no-ignore-eos", None, "", "let the model stop when it will"),
        Flag("--workload", word, "NAME", "lengths and SLOs of presets.json: chat, code, rag, "
             "agent, batch"),
        Flag("--prompts", word, "FILE", "your own: ShareGPT JSON, or JSON lines of messages or "
             "prompt"),
        Flag("--turns", turns, "N", "of a conversation, each with all before it in its prompt"),
        Flag("--think-time", think_time, "S", "from an answer to the next turn: 5, exp:5, "
             "lognormal:... (default: 0)"),
        Flag("--dataset-name", word, "NAME", "random; timed_trace (--trace), sharegpt or custom "
             "(--prompts)"),
        Flag("--dataset-path", word, "FILE", "of such a dataset"),
    ),
    "limits": (
        Flag("--connect-timeout", seconds, "S", "to connect", 10.0),
        Flag("--first-output-timeout", seconds, "S", "from sent to the first output", 300.0),
        Flag("--stall-timeout", seconds, "S", "between output events", 60.0),
        Flag("--timeout", seconds, "S", "from sent to the end", 3600.0),
    ),
    "judgement": (
        Flag("--slo-ttft-ms", positive, "MS", "most a first token may take, from due"),
        Flag("--slo-tpot-ms", positive, "MS", "most a further token may take, on average"),
        Flag("--slo-e2e-ms", positive, "MS", "most a whole answer may take, from due"),
        Flag("--slo-attainment", fraction, "SHARE", "of requests that must meet them", 0.99),
        Flag("--goodput", goodput_limit, "NAME:MS", "the same as vllm bench writes it: ttft:500 "
             "tpot:40", nargs="+"),
        Flag("--gate", None, "", "exit 3 when attainment is below the target"),
    ),
    "output": (
        Flag("--out", word, "DIR", "plan.json, requests.jsonl, summary.json, report.html"),
        Flag("--report", word, "DIR", "print the report of an earlier --out DIR again, and write "
             "its report.html"),
        Flag("--deployment", word, "FILE", "what is served, from capacity.py --save: for the setup "
             "statement; its SLOs and price where no flag gives them"),
        Flag("--metadata", told, "K=V", "one more fact for the setup statement (model, precision, "
             "gpu, gpus, engine, version, flags, ...), may be repeated", nargs="append"),
        Flag("--gpu-price", positive, "USD/H", "of one GPU: cost per 1M output tokens"),
        Flag("--json", None, "", "print summary.json instead of the table"),
        Flag("--compat", None, "", "also under vllm bench serve's and AIPerf's definitions"),
        Flag("--save-result", word, "FILE", "the JSON that vllm bench serve writes; a sweep adds "
             "-RATE to the name", nargs="?"),
        Flag("--label", word, "TEXT", "of the run, in it"),
        Flag("--save-detailed", None, "", "with a pasted command: keep the lists in it"),
        Flag("--result-dir", word, "DIR", "where --save-result writes"),
        Flag("--result-filename", word, "FILE", "its name"),
    ),
    "instead of a run": (
        Flag("--merge", word, "DIR", "join the shards of one run into one summary", nargs="+"),
        Flag("--diff", word, "DIR", "compare two runs of the same plan", nargs=2),
        Flag("--selftest", None, "", "how much load this machine measures right; later runs past "
             "it are CLIENT-LIMITED"),
    ),
    "mock engine": (
        Flag("--mock", word, "PROFILE", "start the built-in engine, and aim at it; PROFILE: a JSON "
             "file of its constants", nargs="?"),
        Flag("--simulate", word, "PROFILE", "run the plan on that engine under a virtual clock, "
             "without sockets or waiting", nargs="?"),
        Flag("--serve", None, "", "run the engine alone, for other clients"),
        Flag("--faults", word, "LIST", "have the engine misbehave: stall=0.05,status:503=0.1"),
    ),
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
            "repetition_penalty")
MANY = -1
# Flags of vllm bench serve that have no meaning here, and how many values they take.
NO_MEANING = {
    **dict.fromkeys((
        "--trust-remote-code --disable-tqdm --append-result --profile --use-beam-search "
        "--disable-shuffle --skip-chat-template --plot-timeline --no-stream --no-oversample "
        "--self-timed --skip-tokenizer-init --plot-dataset-stats --no-reranker").split(), 0),
    **dict.fromkeys((
        "--tokenizer --tokenizer-mode --percentile-metrics --metric-percentiles "
        "--ready-check-timeout-sec --logprobs --best-of --num-fewshot --request-id-prefix "
        "--chat-template-kwargs --probe-request-rate --lora-assignment --random-batch-size "
        "--timeline-itl-thresholds --timed-trace-label-timestamp --timed-trace-label-input-length "
        "--timed-trace-label-output-length --timed-trace-label-hash-ids").split(), 1),
    "--lora-modules": MANY}

EXAMPLES = """examples:
  loadgen.py --mock --sweep 2,8,32 --num-requests 120 --output-len 48 --endpoint chat \\
      --slo-ttft-ms 300 --slo-tpot-ms 25
  loadgen.py http://HOST:8000 --rate 8 --duration 60 --input-len lognormal:mean=2000,cv=0.5
  loadgen.py http://HOST:8000 --concurrency 64 --num-requests 500 --output-len 300
  loadgen.py http://HOST:8000 --trace conversation_trace.jsonl --trace-window 600..1200"""


def parse_args(argv: Sequence[str]) -> Any:
    """The flags as a namespace; UserError on anything that is not understood."""
    import argparse

    class Parser(argparse.ArgumentParser):
        """argparse, with its complaints raised as UserError."""

        def error(self, message: str) -> Any:
            kind, _, words = message.partition(": ")
            if kind == "unrecognized arguments":  # their values may be keys
                flags = " ".join(w for w in words.split() if w[0] == "-")
                message = f"{kind}: {flags}" if flags else "more than one URL"
            raise UserError(f"{message}; --help lists the flags")

    pasted = list(argv[:3]) == ["vllm", "bench", "serve"]
    parser = Parser(prog="loadgen.py", allow_abbrev=False, epilog=EXAMPLES,
                    description="How fast, under load: measures an OpenAI-compatible endpoint.",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", metavar="URL", help="http://HOST:PORT of the endpoint")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            names = flag.names.split()
            shown = flag.help + ("" if flag.default is None else f" (default: {flag.default:g})")
            if flag.kind is None:
                group.add_argument(*names, action="store_true", help=shown)
                continue
            options: Dict[str, Any] = {"default": flag.default, "nargs": flag.nargs}
            if flag.nargs == "append":
                options = {"action": "extend", "default": [], "nargs": "+" if pasted else 1}
            elif flag.nargs == "?":
                options["const"] = DEFAULT_PROFILE
            group.add_argument(*names, type=named(names[0], flag.kind), metavar=flag.metavar,
                               help=shown, **options)
    args = parser.parse_args(without_meaning(argv[3:] if pasted else argv))
    settle(args, pasted)
    return args


DEFAULT_PROFILE = "the default profile"


def without_meaning(argv: Sequence[str]) -> List[str]:
    """The command line without the flags that have no meaning here, each said on stderr."""
    kept, words = [], list(argv)
    while words:
        text = words.pop(0)
        name, has_value, _ = text.partition("=")
        refuse((name.startswith("--ramp-up-"), f"{name} changes the rate within a run, which is "
                "not done here; --sweep R,R measures each rate by itself"))
        if name not in NO_MEANING:
            kept.append(text)
            continue
        say(f"{name} has no meaning here and is left out")
        values = 0 if has_value else NO_MEANING[name]
        while words and values and (values == 1 or not words[0].startswith("-")):
            words.pop(0)
            values -= values == 1
    return kept


def say(text: str) -> None:
    """A line on stderr."""
    print(f"loadgen: {text}", file=sys.stderr)


def refuse(*rules: Tuple[Any, str]) -> None:
    """UserError with the text of the first rule whose condition holds."""
    for wrong, why in rules:
        if wrong:
            raise UserError(why)


def settle(args: Any, pasted: bool) -> None:
    """Fill in what follows from other flags; UserError where they contradict each other."""
    args.deployed, of = None, args.shard[1] if args.shard else 1
    dataset = args.dataset_path and {"timed_trace": "trace", "sharegpt": "prompts",
                                     "custom": "prompts"}.get(args.dataset_name)
    refuse(
        (args.sweep and args.rate is not None, "--sweep and --rate say the same thing; give one"),
        (args.num_requests and args.duration,
         "--num-requests and --duration say the same thing; give one"),
        (args.ignore_eos and args.no_ignore_eos,
         "--ignore-eos and --no-ignore-eos contradict each other; give one"),
        (args.proxy not in (None, "env"),
         "--proxy takes only env: the proxy that the environment names"),
        (not dataset and args.dataset_name not in (None, "random"),
         f"--dataset-name {args.dataset_name} is not known; prompts are random here, with lengths "
         "by --input-len and --output-len; timed_trace, sharegpt and custom take a --dataset-path"),
        (args.duration and args.rate == math.inf and args.concurrency is None,
         "--duration with no rate would send without end; give --rate R or --concurrency N"),
        (args.concurrency is not None and args.concurrency < args.workers * of,
         f"--concurrency {args.concurrency} cannot be shared by " + (
             f"--workers {args.workers}; fewer workers" if of == 1 else
             f"{of} shards of --workers {args.workers}; fewer of them")))
    if dataset:
        setattr(args, dataset, args.dataset_path)
    settle_tools(args, pasted)
    if args.metrics_url:
        parse_url(args.metrics_url, "chat")
    args.find_goodput |= args.sweep == []
    simulated = args.simulate is not None
    own, name = simulated or args.mock is not None, "--simulate" if simulated else "--mock"
    refuse(
        (args.metrics_url and args.no_metrics,
         "--metrics-url and --no-metrics contradict each other; give one"),
        (args.ramp is not None and not args.duration and not args.find_goodput,
         "--ramp goes with --duration or --find-goodput"),
        *((simulated and given, f"--simulate and {flag} do not go together: {why}")
          for flag, given, why in (("--mock", args.mock is not None, "that runs in real time"),
                                   ("--serve", args.serve, "that runs in real time"),
                                   ("--faults", args.faults, "faults need sockets; use --mock"))),
        (args.faults and args.mock is None and not args.serve,
         "--faults needs the built-in engine: add --mock or --serve"))
    parse_faults(args.faults or "")
    refuse((args.url and args.base_url, "the URL is given twice; drop --base-url"))
    args.url = args.url or args.base_url
    if args.url is None and not own and (pasted or args.host or args.port):
        args.url = f"http://{args.host or '127.0.0.1'}:{args.port or 8000}"
    refuse((args.url and own, f"{name} brings its own engine; drop the URL, or {name}"))
    if args.serve or args.merge or args.diff or args.selftest:
        return
    args.deployed = deployed(args)
    if args.report:
        refuse((args.gate, "--report prints a run again; --gate judges a run, or --merge"),
               (args.goodput or any(limits_of(args).values()),
                "--report prints a run again by the SLO that it was judged by; drop --slo-*"))
        return
    refuse((args.url is None and not own,
            "no target; give http://HOST:PORT, or --mock for the built-in engine"))
    settle_load(args, pasted)


def settle_load(args: Any, pasted: bool) -> None:
    """Fill in the SLO, the load and the lengths, from --goodput, the deployment and files."""
    take_goodput(args)
    for name in ("ttft", "tpot", "e2e"):
        limit = dig(args.deployed, "slo", f"{name}_s")
        if limit and getattr(args, f"slo_{name}_ms") is None:
            setattr(args, f"slo_{name}_ms", limit / MS)
    if not (args.trace or args.prompts or args.mix or args.workload):
        shared = dig(args.deployed, "lengths", "shared_prefix")
        if shared and args.input_len is args.shared_prefix_len is None:
            args.shared_prefix_len = named("lengths.shared_prefix", natural)(str(shared))
        for name, key in (("input_len", "input"), ("output_len", "output")):
            text = dig(args.deployed, "lengths", key)
            if text and getattr(args, name) is None:
                setattr(args, name, token_lengths(str(text)))
    settle_traffic(args)
    args.shared_prefix_len = args.shared_prefix_len or 0
    if args.rate is None and not (args.sweep or args.find_goodput) and args.concurrency is None:
        refuse((not pasted, "no load; give --rate, --sweep, --find-goodput, --concurrency, "
                "--trace or --mix"))
        args.rate = math.inf
    refuse((args.gate and not slo_of(args).any,
            "--gate needs an SLO: --slo-ttft-ms, --slo-tpot-ms or --slo-e2e-ms"))
    settle_search(args)
    spread_in, spread_out = args.random_range_ratio or (0.0, 0.0)
    args.input_len = ranged(args.input_len or parse_lengths("200"), spread_in)
    args.output_len = ranged(args.output_len or parse_lengths("100"), spread_out)
    shared = args.shared_prefix_len
    refuse((0 < args.input_len.mean <= shared, f"--shared-prefix-len {shared} is as long as the "
            f"prompt of {args.input_len.mean:g} tokens; it is a part of it"))


def take_goodput(args: Any) -> None:
    """--goodput: the SLO's limits, as vllm bench serve writes them."""
    for name, limit in args.goodput or ():
        setattr(args, name, limit / MS)


def settle_search(args: Any) -> None:
    """UserError where the flags of the search for the knee do not fit together."""
    if not args.find_goodput:
        refuse((args.max_requests, "--max-requests goes with --find-goodput or --sweep auto"))
        return
    auto = args.sweep is not None
    name = "--sweep auto" if auto else "--find-goodput"
    args.max_requests = args.max_requests or SEARCH_REQUESTS
    refuse(
        (not any(limits_of(args).values()), f"{name} needs an SLO to look for the knee of: "
         "--slo-ttft-ms, --slo-tpot-ms or --slo-e2e-ms"),
        (args.slo_attainment > 0.9999, f"{name} cannot show that no request in 10,000 misses; "
         "--slo-attainment 0.99 is usual"),
        *((given, f"{name} chooses rates and lengths of runs itself; drop {flag}, or set "
           "--max-requests") for flag, given in (
               ("--rate", args.rate), ("--sweep with rates", args.sweep),
               ("--num-requests", not auto and args.num_requests),
               ("--duration", not auto and args.duration))),
        (args.max_requests < 500,
         f"--max-requests {args.max_requests} cannot find the knee; 500 at least"))


def ranged(lengths: Lengths, ratio: float) -> Lengths:
    """Fixed lengths as vllm's random dataset spreads them: uniform in +-ratio of the mean."""
    if not ratio or not lengths.text.isdigit():
        return lengths
    low, high = lengths.mean * (1 - ratio), lengths.mean * (1 + ratio)
    return parse_lengths(f"uniform:{max(1, low):g}..{high:g}")


# ---- 3. The plan -------------------------------------------------------------------------------
# Pure: which request is due when, how long its prompt and its output are. Made before the run.


class Load(NamedTuple):
    """How requests arrive."""

    rate_rps: Optional[float]  # None: no rate, all at once or as slots come free
    concurrency: Optional[int]  # most in flight; without a rate, the closed loop
    burstiness: float  # gamma shape; 1 = Poisson, inf = constant
    num_requests: Optional[int]  # count mode: measure all of them
    duration_s: Optional[float]  # window mode: measure what is due in a window this long
    ramp_s: Optional[float]  # before the window opens; None: one expected E2E

    @property
    def closed(self) -> bool:
        """Whether a request is due only when an earlier one has ended."""
        return self.rate_rps is None and self.concurrency is not None

    @property
    def label(self) -> str:
        """The load in a few characters, for tables."""
        if self.closed:
            return f"c={self.concurrency}"
        return "inf" if self.rate_rps is None else f"{self.rate_rps:g}"


class Planned(NamedTuple):
    """One request of the plan."""

    id: int
    due_s: float  # from the run's start; 0 in the closed loop, where a free slot decides
    n_in: int  # tokens of the prompt, shared prefix included
    n_out: int  # tokens asked for
    group: int  # which shared prefix; of --prompts, which round through the file
    keys: Tuple[Hashable, ...] = ()  # of a trace: its blocks; equal keys are equal text
    cls: str = ""  # of --mix
    prompt: int = -1  # of --prompts: which one; n_in is then an estimate
    session: int = -1  # of --turns
    turn: int = 0
    context: int = 0  # tokens of n_in that earlier turns and their answers make up
    follow: Optional[Planned] = None  # the next turn; its due_s counts from the end of this one


class Work(NamedTuple):
    """What the requests ask for."""

    n_in: Lengths
    n_out: Lengths
    shared_prefix: int  # tokens that every prompt of a group begins with
    prefix_groups: int
    trace: Optional[Trace] = None
    prompts: Optional[PromptFile] = None
    classes: Tuple[TrafficClass, ...] = ()
    turns: Optional[Lengths] = None
    think_s: Optional[Lengths] = None


def stream(seed: Union[int, str], what: str) -> Any:
    """A random generator of its own for each purpose, so that one does not disturb another."""
    import random
    return random.Random(f"{seed}/{what}")


def gaps(load: Load, seed: Union[int, str]) -> Iterator[float]:
    """Inter-arrival times [s] without end: gamma of shape `burstiness` and mean 1/rate."""
    mean_s, shape = 1 / load.rate_rps if load.rate_rps else 0.0, load.burstiness
    if not mean_s or math.isinf(shape):
        return itertools.repeat(mean_s)
    draw, scale_s = stream(seed, "arrivals").gammavariate, mean_s / shape
    return (draw(shape, scale_s) for _ in itertools.repeat(0))


def singles(load: Load, work: Work, seed: Union[int, str]) -> Iterator[Planned]:
    """Requests by the distributions alone, due at sums of gaps, the first after one; no end."""
    lengths, groups = stream(seed, "lengths"), stream(seed, "groups")
    due_s = 0.0
    for number, gap_s in enumerate(gaps(load, seed)):
        due_s += gap_s
        n_in = max(1, round(work.n_in.quantile(open_unit(lengths))))
        n_out = max(1, round(work.n_out.quantile(open_unit(lengths))))
        group = groups.randrange(work.prefix_groups)
        yield Planned(number, due_s, max(n_in, work.shared_prefix + 1), n_out, group)


def open_unit(rng: Any) -> float:
    """A number between 0 and 1, neither included, which every quantile function takes."""
    return min(max(float(rng.random()), 1e-12), 1 - 1e-12)


class Plan(NamedTuple):
    """What one run sends: the load, the work, the seed, and the requests known beforehand."""

    load: Load
    work: Work
    seed: int
    requests: Tuple[Planned, ...]  # count mode: all; window mode: to the expected end
    window_s: Tuple[float, float]  # measured: due in [open, close); (0, inf) in count mode
    hash: str  # of load, work and seed: equal plans have equal arrivals and lengths
    tail_s: float = math.inf  # most that arrivals go on after the window

    def measured(self, due_s: float) -> bool:
        """Whether a request due then counts."""
        return self.window_s[0] <= due_s < self.window_s[1]


TAIL = 3.0  # expected E2Es after the window for which requests are prepared ahead
PREPARED_MAX = 200_000


def make_plan(load: Load, work: Work, seed: int, expected_e2e_s: float) -> Plan:
    """The plan of one run. Pure: equal arguments give an equal plan."""
    import hashlib
    endless = schedule(load, work, seed)
    if load.num_requests is not None:
        requests = tuple(itertools.islice(endless, load.num_requests))
        window = (0.0, math.inf)
    else:
        ramp_s = session_s(work, expected_e2e_s) if load.ramp_s is None else load.ramp_s
        window = (ramp_s, ramp_s + (load.duration_s or 0.0))
        end_s = window[1] + TAIL * expected_e2e_s
        ahead = (itertools.takewhile(lambda r: r.due_s < end_s, endless) if not load.closed
                 else itertools.islice(endless, load.concurrency))
        requests = tuple(itertools.islice(ahead, PREPARED_MAX))
    told = [load, [shape_of(work.n_in), shape_of(work.n_out)], work.shared_prefix,
            work.prefix_groups, seed, *traffic_told(work)]
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    return Plan(load, work, seed, requests, window, digest)


# ---- 3b. Traces, prompts, classes and sessions -------------------------------------------------
# Where requests come from when not from two distributions. Files are read once, before the run.

SECOND_NS = 1_000_000_000
TRACE_TIMES = {  # field, in lower case: the nanoseconds of its unit; 0: to be guessed
    "arrival_s": SECOND_NS, "timestamp_s": SECOND_NS, "arrival_ms": 10**6, "timestamp_ms": 10**6,
    "timestamp": 0, "arrival": 0}
TRACE_INPUTS = {  # field: (format, nanoseconds of its unit where known)
    "input_length": ("JSONL with lengths", 0), "contexttokens": ("Azure CSV", 0),
    "request_tokens": ("BurstGPT CSV", SECOND_NS), "input_tokens": ("plain", 0)}
TRACE_OUTPUTS = dict.fromkeys(("output_length", "generatedtokens", "response_tokens",
                               "output_tokens"))
UNITS_NS = {SECOND_NS: "seconds", 10**6: "milliseconds", 1000: "microseconds", 1: "nanoseconds"}
HASH_BLOCKS = (512, 16, 64, 8, 32, 128, 256, 1024, 2048, 4096)  # Mooncake, Bailian and vLLM first
DATES_S = range(10**10, 10**11)  # dates as seconds since the year 1, which no number reaches
HEAD_ROWS = 1000  # looked at to tell units and block size
BACKWARD_NS = SECOND_NS  # lines so little out of order are sorted; more is a mistake


class TraceRow(NamedTuple):
    """One request of a trace as its file has it."""

    line: int
    time: int  # ns, or the file's own unit times 10^9 until that is known
    n_in: int
    n_out: int
    keys: Tuple[Hashable, ...]

    @property
    def whole(self) -> bool:
        """Whether it was answered when it was recorded: with 0 tokens it failed."""
        return self.n_in > 0 and self.n_out > 0


class TraceFile(NamedTuple):
    """A trace that is being read."""

    kind: str
    unit_ns: int
    sure: bool  # a flag, the field's name, the format or the size of the times tells the unit
    block: int
    rows: Iterator[TraceRow]  # with times in 10^-9 units


class Trace(NamedTuple):
    """Recorded traffic, ready to be sent."""

    requests: Tuple[Planned, ...]
    block: int  # tokens that one of the keys stands for; 0 without keys
    about: Dict[str, Any]  # for the record: file, format, unit, speed, shared_share ...
    notes: List[str]  # what was assumed, sorted or left out


class PromptItem(NamedTuple):
    """One prompt of the customer's."""

    messages: Rows
    n_out: Optional[int]  # of the file's reply: given, or estimated from its text
    more: Dict[str, Any]  # tools and the like, for chat


class PromptFile(NamedTuple):
    """The customer's own prompts."""

    path: str
    items: List[PromptItem]
    digest: str  # of the file's content

    def tokens(self, index: int) -> int:
        """About how many tokens a prompt has."""
        return tokens_about(joined(self.items[index].messages))


class TrafficClass(NamedTuple):
    """One of several kinds of traffic at once."""

    name: str
    share: float  # of all arrivals
    rate_rps: Optional[float]  # its own, where the file says so
    burstiness: Optional[float]
    work: Work
    limits: Dict[str, Optional[float]]  # its SLO: ttft_s, tpot_s, e2e_s
    model: str  # or the name of a LoRA adapter; "" the target's


def schedule(load: Load, work: Work, seed: int) -> Iterator[Planned]:
    """The requests of a plan in the order in which they are due; without end but for a trace."""
    if work.trace is not None:
        return iter(work.trace.requests)
    if work.classes:
        return mixed(load, work.classes, seed)
    if work.prompts is not None:
        return prompted(singles(load, work, seed), work.prompts, seed)
    return sessions(load, work, seed) if work.turns else singles(load, work, seed)


def traffic_told(work: Work) -> List[Any]:
    """What the plan's hash must cover beyond load, lengths and seed."""
    if work.trace is not None:
        return ["trace", repr(work.trace.requests), work.trace.block]
    if work.prompts is not None:
        return ["prompts", work.prompts.digest]
    if work.turns is not None and work.think_s is not None:
        return ["turns", *shape_of(work.turns), *shape_of(work.think_s)]
    return [[c.name, c.share, c.burstiness, shape_of(c.work.n_in), shape_of(c.work.n_out),
             c.work.shared_prefix, c.work.prefix_groups, c.model] for c in work.classes]


def shape_of(lengths: Lengths) -> List[float]:
    """A distribution as fifty of its quantiles, however it was written."""
    return [lengths.quantile((i + 0.5) / 50) for i in range(50)]


def lengths_seen(text: str, values: Sequence[int]) -> Lengths:
    """The distribution of lengths that a file holds."""
    ordered = sorted(values)
    return Lengths(text, sum(ordered) / len(ordered),
                   lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))])


# -- traces


def read_trace(path: str, window_s: Tuple[float, float], speed: float, most: int,
               duration_s: float, given: Tuple[int, int] = (0, 0)) -> Trace:
    """A trace of any known format, cut to a window [s of the trace], sped up and limited.

    Times count from the window's start, else from the first request. given: the unit [ns] and the
    tokens of a hash block; 0: the file tells. UserError with the line.
    """
    notes: List[str] = []
    kind, unit_ns, sure, block, rows = open_trace(path, given, notes)
    moved: Set[int] = set()
    kept: List[TraceRow] = []
    failed: List[TraceRow] = []
    base_ns, end_ns = -1, math.inf
    for row in in_order(path, rows, unit_ns, sure, moved):
        if base_ns < 0 and row.whole:
            base_ns = row.time + round(window_s[0] * SECOND_NS)
            end_ns = base_ns + min(window_s[1] - window_s[0], duration_s * speed) * SECOND_NS
            failed = [] if window_s[0] else failed
        if row.time >= end_ns or len(kept) >= most:
            break
        if row.time >= base_ns:
            (kept if row.whole else failed).append(row)
    if not kept:
        raise UserError(f"{path} has no request" + (
            " in --trace-window and --duration" if base_ns >= 0 else ""))
    if failed:
        notes.append(f"trace: {len(failed)} requests of 0 tokens left out (the first on line "
                     f"{failed[0].line}): they failed when they were recorded")
    sorted_lines = [row.line for row in kept if row.line in moved]
    if sorted_lines:
        notes.append(f"trace: {len(sorted_lines)} lines are out of order by a second or less (the "
                     f"first is line {min(sorted_lines)}): sorted")
    requests = tuple(Planned(n, (row.time - base_ns) / SECOND_NS / speed, row.n_in, row.n_out, 0,
                             row.keys) for n, row in enumerate(kept))
    about = {"file": os.path.basename(path), "format": kind, "requests": len(kept),
             "unit": UNITS_NS.get(unit_ns, f"units of {unit_ns * NS:g} s"), "speed": speed,
             "span_s": requests[-1].due_s,
             "first_line": kept[0].line, "last_line": kept[-1].line, "block_tokens": block or None,
             "shared_share": shared_share(requests, block) if block else None}
    return Trace(requests, block, about, notes)


def open_trace(path: str, given: Tuple[int, int], notes: List[str]) -> TraceFile:
    """Tell a trace's format, unit and block from its fields and first rows; given as read_trace."""
    records = trace_records(path)
    head = list(itertools.islice(records, 1))
    if not head:
        raise UserError(f"{path} is empty")
    names = {str(name).strip().lower().replace(" ", "_"): name for name in head[0][1]}
    found = [next((name for name in table if name in names), "")
             for table in (TRACE_TIMES, TRACE_INPUTS, TRACE_OUTPUTS)]
    if not all(found):
        missing = ("a time", "an input length", "an output length")[found.index("")]
        raise UserError(f"{path} line {head[0][0]} has no field for {missing}: Mooncake and "
                        "timed_trace have timestamp, input_length, output_length, hash_ids; Azure "
                        "TIMESTAMP, ContextTokens, GeneratedTokens; BurstGPT Timestamp, Request "
                        "tokens, Response tokens; a plain CSV arrival_s, input_tokens, "
                        "output_tokens")
    rows = trace_rows(path, itertools.chain(head, records), [names[name] for name in found])
    first = list(itertools.islice(rows, HEAD_ROWS))
    kind, unit_ns = TRACE_INPUTS[found[1]]
    block = block_of(path, first, given[1])
    if block:
        kind = "Mooncake JSONL" if block == HASH_BLOCKS[0] else "timed_trace JSONL"
    unit_ns, why = given[0] or TRACE_TIMES[found[0]] or unit_ns, "stated"
    if first[0].time // SECOND_NS in DATES_S:
        refuse((given[0], f"{path} has dates for times, which need no --trace-unit; drop it"))
        unit_ns = SECOND_NS
    elif not unit_ns:
        unit_ns, why = guess_unit([row.time for row in first], block)
        notes.append(f"trace: timestamps taken as {UNITS_NS[unit_ns]}, {why or 'a guess'}; the "
                     "file does not say (--trace-unit s, ms, us or ns puts it right)")
    return TraceFile(kind, unit_ns, bool(why), block, itertools.chain(first, rows))


def trace_records(path: str) -> Iterator[Tuple[int, Dict[str, Any]]]:
    """(line number, fields) of a file of JSON lines or of a CSV with a header."""
    import csv
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            start = file.read(KIB).lstrip()[:1]
            file.seek(0)
            if start == "{":
                for line, text in enumerate(file, 1):
                    if text.strip():
                        yield line, json_line(path, line, text)
                return
            reader = csv.DictReader(file)
            if not any(name[:1].isalpha() for name in reader.fieldnames or ("none",)):
                raise UserError(f"{path} line 1 is no header; a CSV needs one, such as "
                                "arrival_s,input_tokens,output_tokens")
            for fields in reader:
                yield reader.line_num, fields
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def json_line(path: str, line: int, text: str) -> Dict[str, Any]:
    """The object on one line; its fractions stay text, so that no digit is lost."""
    try:
        value = json.loads(text, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} line {line} is not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} line {line} is no JSON object")
    return value


def trace_rows(path: str, records: Iterator[Tuple[int, Dict[str, Any]]], names: Sequence[str]
               ) -> Iterator[TraceRow]:
    """Rows with checked fields."""
    at, n_in, n_out = names
    dated = None
    for line, fields in records:
        where = f"{path} line {line}"
        stamp_ns, is_date = trace_time(fields.get(at), f"{where}: {at}")
        if is_date is not (dated := is_date if dated is None else dated):
            raise UserError(f"{where}: {at} is {'a date' if is_date else 'a number'} and those "
                            "before are not: units are mixed")
        read = trace_length(fields.get(n_in), f"{where}: {n_in}")
        made = trace_length(fields.get(n_out), f"{where}: {n_out}")
        keys = fields.get("hash_ids") or ()
        if not isinstance(keys, (list, tuple)) or not all(
                type(key) in (int, str) for key in keys):
            raise UserError(f"{where}: hash_ids is no list of numbers")
        yield TraceRow(line, stamp_ns, read, made, tuple(keys))


def trace_time(value: Any, where: str) -> Tuple[int, bool]:
    """(exact time in 10^-9 of its unit, whether it was a date). Raises UserError."""
    import datetime
    from decimal import Decimal, InvalidOperation
    text = "" if value is None else str(value).strip()
    if not text:
        raise UserError(f"{where} is missing")
    date = re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.](\d{1,9}))?"
                        r"(?:Z|([+-]\d\d):?(\d\d))?", text)
    try:
        if date is None:
            number = Decimal(text) * SECOND_NS
            if number < 0:
                raise UserError(f"{where} is negative: {text[:40]}")
            if not number < 10**28:
                raise ValueError
            return int(number), False
        year, month, day, hour, minute, second = (int(part) for part in date.groups()[:6])
        days = datetime.date(year, month, day).toordinal()
        east = int(date[8]) * 60 + int(date[8][0] + date[9]) if date[8] else 0
        whole_s = ((days * 24 + hour) * 60 + minute - east) * 60 + second
        return whole_s * SECOND_NS + int((date[7] or "0").ljust(9, "0")), True
    except (ValueError, InvalidOperation):
        raise UserError(f"{where} is no time: {text[:40]!r}") from None


def trace_length(value: Any, where: str) -> int:
    """A number of tokens, zero or more."""
    text = "" if value is None else str(value).strip()
    if not text:
        raise UserError(f"{where} is missing")
    try:
        tokens = float(text)
    except ValueError:
        tokens = math.nan
    if not 0 <= tokens <= TOKENS_PLANNED_MAX or tokens != int(tokens):
        raise UserError(f"{where} is no number of tokens: {text[:40]!r}")
    return int(tokens)


def guess_unit(times: Sequence[int], block: int) -> Tuple[int, str]:
    """(the unit [ns] of bare timestamps, why): by their size, else as the format is documented,
    else by fractions and the mean gap, which is a guess: ''."""
    first = times[0] // SECOND_NS  # dates since 1970 give themselves away by their size
    for unit_ns, least in ((1, 10**17), (1000, 10**14), (10**6, 10**11)):
        if first >= least:
            return unit_ns, "by their size"
    if block:
        return (10**6, "as Mooncake's are") if block == HASH_BLOCKS[0] else (
            SECOND_NS, "as vLLM takes those of a timed_trace")
    if first >= 10**8:
        return SECOND_NS, "by their size"
    gap = (max(times) - min(times)) / SECOND_NS / max(1, len(times) - 1)
    fractions = any(time % SECOND_NS for time in times)
    return (10**6 if gap >= 1000 or (gap >= 20 and not fractions) else SECOND_NS), ""


def block_of(path: str, rows: Sequence[TraceRow], given: int) -> int:
    """Tokens that a hash id stands for, by the lengths, if not given; 0 without hash ids."""
    keyed = [row for row in rows if row.keys and row.n_in]
    if not keyed:
        return 0
    blocks = (given,) if given else HASH_BLOCKS
    fits = {block: [row for row in keyed if abs(row.n_in - len(row.keys) * block) < block]
            for block in blocks}
    best = max(blocks, key=lambda block: len(fits[block]))
    if 2 * len(fits[best]) < len(keyed):
        raise UserError(f"{path} line {keyed[0].line}: {len(keyed[0].keys)} hash_ids for "
                        f"{keyed[0].n_in} tokens: " + (
                            f"--trace-block {given} does not explain the file" if given else
                            "no block size of 8 to 4096 explains the file"))
    return best


YEARS_NS = 10 * 365 * 24 * 3600 * SECOND_NS  # no trace has a gap so long


def in_order(path: str, rows: Iterator[TraceRow], unit_ns: int, sure: bool, moved: Set[int]
             ) -> Iterator[TraceRow]:
    """The rows in time order, in ns; lines out of order are added to moved.

    What goes back too far, or changes units where these are a guess, is a UserError.
    """
    held: List[Tuple[int, TraceRow]] = []
    newest: Optional[TraceRow] = None
    widest_ns, suspect = 0, 0
    for count_, row in enumerate(rows):
        time = row.time if unit_ns == SECOND_NS else row.time * unit_ns // SECOND_NS
        row = row._replace(time=time)
        if newest is not None and time < newest.time:
            if newest.time - time > BACKWARD_NS:
                raise UserError(f"{path} line {row.line} goes back in time, by "
                                f"{figure((newest.time - time) * NS)} s from line {newest.line}: "
                                "sort the file by time, or mend its units if they are mixed")
            moved.add(row.line)
        elif newest is not None:
            gap_ns = time - newest.time
            if gap_ns > YEARS_NS:
                raise UserError(f"{path} line {row.line} is {gap_ns // YEARS_NS:,} decades after "
                                f"line {newest.line}: units are mixed")
            if suspect and not sure and gap_ns > 30 * widest_ns:
                raise UserError(f"{path} line {suspect}: from here on times are about a thousand "
                                "times as far apart: units are mixed; --trace-unit s, ms, us or ns "
                                "takes them as they are")
            suspect = row.line if (count_ > 2 and widest_ns and gap_ns > 100 * widest_ns
                                   and time > 100 * newest.time) else 0
            widest_ns = widest_ns if suspect else max(widest_ns, gap_ns)
        newest = row if newest is None or time >= newest.time else newest
        heapq.heappush(held, (time, row))
        while held and newest is not None and held[0][0] < newest.time - BACKWARD_NS:
            yield heapq.heappop(held)[1]
    while held:
        yield heapq.heappop(held)[1]


def shared_share(requests: Sequence[Planned], block: int) -> float:
    """The share of prompt tokens that a prefix cache without limit would hold already."""
    seen: Set[int] = set()
    shared = 0
    for planned in requests:
        chain = 0
        for number, key in enumerate(planned.keys, 1):
            chain = hash((chain, key))
            if number * block > planned.n_in:
                break
            shared += block if chain in seen else 0
            seen.add(chain)
    return shared / sum(planned.n_in for planned in requests)


def most_at_once(plan: Plan) -> int:
    """The most requests of a plan that are due within 20 ms: connections to hold ready."""
    dues, first, most = [planned.due_s for planned in plan.requests], 0, 0
    for last, due_s in enumerate(dues):
        while due_s - dues[first] > 20 * MS:
            first += 1
        most = max(most, last - first + 1)
    return most


# -- the customer's prompts


def joined(messages: Sequence[Facts]) -> str:
    """The text of messages, for completions and for estimates."""
    texts = []
    for message in messages:
        content = message.get("content") or ""
        parts = content if isinstance(content, list) else [content]
        texts += [str(part.get("text") or "") if isinstance(part, dict) else str(part)
                  for part in parts]
    return "\n".join(texts)


def tokens_about(text: str) -> int:
    """Tokens of a text, estimated: about four characters each in English."""
    return max(1, round(len(text) / 4))


def read_prompts(path: str) -> PromptFile:
    """Prompts from ShareGPT JSON, or JSON lines of {"messages"} or {"prompt"}. Raises UserError."""
    import hashlib
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    rows: List[Tuple[str, Any]]
    if text.lstrip().startswith("["):
        try:
            rows = [(f"{path} entry {n}", row) for n, row in enumerate(json.loads(text), 1)]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not JSON: {str(error)[:100]}") from None
    else:
        rows = [(f"{path} line {n}", json_line(path, n, line))
                for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    items = [item for where, row in rows for item in prompt_item(row, where)]
    if not items:
        raise UserError(f"{path} holds no prompt that ends with a user's message")
    return PromptFile(path, items, hashlib.sha256(text.encode()).hexdigest()[:16])


ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
         "assistant": "assistant", "bing": "assistant", "bard": "assistant", "system": "system"}


def prompt_item(row: Any, where: str) -> List[PromptItem]:
    """The prompt of one entry, as a list of one or none (a conversation without a question)."""
    row = row.get("body", row) if isinstance(row, dict) else row
    if not isinstance(row, dict):
        raise UserError(f"{where} is no JSON object")
    reply: Any = row.get("completion") or row.get("response") or row.get("output")
    if isinstance(row.get("conversations"), list):  # ShareGPT: the first question and its answer
        talk = [{"role": ROLES.get(str(turn.get("from")), "user"), "content": turn.get("value")}
                for turn in row["conversations"] if isinstance(turn, dict)]
        asked = next((n for n, turn in enumerate(talk) if turn["role"] == "user"), len(talk))
        messages, rest = talk[:asked + 1], talk[asked + 1:asked + 2]
        reply = rest[0]["content"] if rest and rest[0]["role"] == "assistant" else None
        messages = [m for m in messages if m["role"] != "assistant"]
    elif isinstance(row.get("messages"), list):
        messages = [message for message in row["messages"] if isinstance(message, dict)]
        if messages and messages[-1].get("role") == "assistant":
            *messages, last = messages
            reply = joined([last])
    elif isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        raise UserError(f'{where} has no "messages", "prompt" or "conversations"')
    if not joined(messages).strip():
        return []
    given = next((row[key] for key in ("output_tokens", "max_tokens", "max_completion_tokens")
                  if type(row.get(key)) is int and 0 < row[key] <= TOKENS_PLANNED_MAX), None)
    if given is None and isinstance(reply, str) and reply:
        given = tokens_about(reply)
    more = {key: row[key] for key in ("tools", "tool_choice", "response_format") if key in row}
    return [PromptItem(messages, given, more)]


def prompted(plain: Iterator[Planned], prompts: PromptFile, seed: int) -> Iterator[Planned]:
    """Each request with a prompt of the file: all of them in random order, then all again."""
    order = list(range(len(prompts.items)))
    shuffle = stream(seed, "prompts").shuffle
    for planned in plain:
        turn, place = divmod(planned.id, len(order))
        if not place:
            shuffle(order)
        n_out = prompts.items[order[place]].n_out or planned.n_out
        yield planned._replace(n_in=prompts.tokens(order[place]), n_out=n_out, group=turn,
                               prompt=order[place])


# -- several classes


def read_mix(path: str, fallback: Mapping[str, Optional[float]]) -> Tuple[TrafficClass, ...]:
    """The classes of a JSON file; a limit that one does not give is the fallback's. UserError."""
    whole_file = read_json(path)
    rows: Any = whole_file.get("classes", whole_file)
    if isinstance(rows, dict):
        rows = [{"name": name, **row} if isinstance(row, dict) else row
                for name, row in rows.items()]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f'{path} must hold {{"classes": [{{"name": ..., "rate": ...}}]}}')
    classes = [traffic_class(row, f"{path}: class {n}", fallback) for n, row in enumerate(rows, 1)]
    if len({c.name for c in classes}) < len(classes):
        raise UserError(f"{path}: two classes have the same name")
    total = math.fsum(c.share for c in classes)
    return tuple(c._replace(share=c.share / total) for c in classes)


MIX_FIELDS: Dict[str, Callable[[str], Any]] = {
    "name": word, "rate": positive, "weight": positive, "burstiness": rate_or_inf,
    "input_len": token_lengths, "output_len": token_lengths, "shared_prefix_len": natural,
    "prefix_groups": whole, "slo_ttft_ms": positive, "slo_tpot_ms": positive,
    "slo_e2e_ms": positive, "model": word, "workload": word}


def traffic_class(row: Facts, where: str, fallback: Mapping[str, Optional[float]]) -> TrafficClass:
    """One class from its JSON object, its weight still as written."""
    unknown = sorted(set(row) - set(MIX_FIELDS))
    if unknown:
        raise UserError(f"{where}: unknown field {unknown[0]!r}{near(unknown[0], MIX_FIELDS)}")
    if isinstance(row.get("workload"), str):
        row = {**workload_row(row["workload"]), **row}
    got = {key: named(f"{where}: {key}", kind)(str(row[key]))
           for key, kind in MIX_FIELDS.items() if row.get(key) is not None}
    if "name" not in got:
        raise UserError(f"{where} has no name")
    work = Work(got.get("input_len") or parse_lengths("200"),
                got.get("output_len") or parse_lengths("100"),
                got.get("shared_prefix_len", 0), got.get("prefix_groups", 1))
    if work.shared_prefix and work.shared_prefix >= work.n_in.mean:
        raise UserError(f"{where}: shared_prefix_len is as long as the prompt")
    limits = {f"{name}_s": got[f"slo_{name}_ms"] * MS if f"slo_{name}_ms" in got
              else fallback[f"{name}_s"] for name in ("ttft", "tpot", "e2e")}
    return TrafficClass(got["name"], got.get("weight", got.get("rate", 1.0)), got.get("rate"),
                        got.get("burstiness"), work, limits, got.get("model", ""))


def mixed(load: Load, classes: Sequence[TrafficClass], seed: int) -> Iterator[Planned]:
    """The classes' own arrivals merged; without a rate, each next request's class by its share."""
    streams, first_group = [], 0  # each class's prefix groups are apart from the others'
    for c in classes:
        own = load._replace(rate_rps=load.rate_rps and load.rate_rps * c.share,
                            burstiness=load.burstiness if c.burstiness is None else c.burstiness)
        streams.append(zip(singles(own, c.work, f"{seed}/{c.name}"), itertools.repeat(c.name),
                           itertools.repeat(first_group)))
        first_group += c.work.prefix_groups
    if load.rate_rps is None:
        choose, shares = stream(seed, "classes").choices, [c.share for c in classes]
        merged = (next(choose(streams, shares)[0]) for _ in itertools.repeat(0))
    else:
        merged = heapq.merge(*streams, key=lambda drawn: drawn[0].due_s)
    return (planned._replace(id=number, cls=name, group=planned.group + first)
            for number, (planned, name, first) in enumerate(merged))


# -- sessions


def sessions(load: Load, work: Work, seed: int) -> Iterator[Planned]:
    """First turns in the order in which they are due, each with the turns that follow it.

    The rate counts requests, so sessions begin at the rate over the mean number of turns. A later
    turn's due_s counts from the end of the one before; its n_in is what it carries plus new text.
    """
    assert work.turns is not None and work.think_s is not None
    draw = stream(seed, "sessions")
    own = load._replace(rate_rps=load.rate_rps and load.rate_rps / work.turns.mean)
    single, number = singles(own, work, seed), 0
    left = math.inf if load.num_requests is None else load.num_requests
    for session, first in enumerate(single):
        wanted = max(1, round(work.turns.quantile(open_unit(draw))))
        turns = [first._replace(id=number, session=session)]
        while len(turns) < min(wanted, left):
            last = turns[-1]
            context = last.n_in + last.n_out
            turns.append(Planned(
                number + len(turns), work.think_s.quantile(open_unit(draw)),
                context + max(1, round(work.n_in.quantile(open_unit(draw)))),
                max(1, round(work.n_out.quantile(open_unit(draw)))), first.group,
                session=session, turn=len(turns), context=context))
        number += len(turns)
        left -= len(turns)
        chained: Optional[Planned] = None
        for planned in reversed(turns):
            chained = planned._replace(follow=chained)
        if chained is not None:
            yield chained
        if left <= 0:
            return


def session_s(work: Work, e2e_s: float) -> float:
    """How long a mean session lasts [s]; without turns, one E2E."""
    if work.turns is None or work.think_s is None:
        return e2e_s
    return work.turns.mean * (e2e_s + work.think_s.mean) - work.think_s.mean


def turns_of(requests: Iterable[Planned]) -> Iterator[Planned]:
    """Every request of a plan, the later turns of a session after its first."""
    for planned in requests:
        turn: Optional[Planned] = planned
        while turn is not None:
            yield turn
            turn = turn.follow


def prefix_keys(planned: Planned, work: Work, tokens: int, owner: int) -> List[Hashable]:
    """Keys of a request's leading blocks of so many tokens, for an engine's prefix cache.

    Equal keys mean equal text up to the block's end. owner: whose text it is (a run; the same
    number in each where prompts repeat). None where neither a trace nor a session says anything.
    """
    if planned.session >= 0:  # of the whole conversation, answers included
        blocks = (planned.n_in + planned.n_out) // tokens
        return [(owner, "session", planned.session, n) for n in range(blocks)]
    block = work.trace.block if work.trace else 0
    chains = list(itertools.accumulate(planned.keys, lambda c, key: hash((c, key)), initial=0))
    full = min(planned.n_in, block * len(planned.keys)) // tokens
    return [(owner, chains[-(-(n + 1) * tokens // block)], n) for n in range(full)]


def shared_of(planned: Planned, work: Work) -> int:
    """Tokens of the shared prefix that a request begins with."""
    own = next((c.work for c in work.classes if c.name == planned.cls), work)
    return own.shared_prefix


# -- from the flags


def workload_row(name: str) -> Dict[str, Any]:
    """The lengths and SLOs that presets.json has for a workload. Raises UserError."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "presets.json")
    if not os.path.exists(path):
        raise UserError(f"--workload {name} cannot be looked up: presets.json is not beside "
                        "loadgen.py; put it there, or give --input-len, --output-len and the SLOs")
    rows = {row["name"]: row for row in read_json(path).get("workloads", ())}
    if name not in rows:
        raise UserError(f"--workload {name!r} is not known{near(name, rows)}; presets.json has "
                        f"{', '.join(rows)}")
    return {key: value for key, value in rows[name].items()
            if key in MIX_FIELDS and key != "name"}


def settle_traffic(args: Any) -> None:
    """Read the files that the flags name, and settle the load and the lengths that follow."""
    args.trace_read = args.prompts_read = None
    args.classes = ()
    if args.workload:
        for key, value in workload_row(args.workload).items():
            if getattr(args, key) is None:
                setattr(args, key, token_lengths(value) if key.endswith("len") else value)
    sources = [flag for flag in ("trace", "prompts", "mix", "turns") if getattr(args, flag)]
    if len(sources) > 1:
        raise UserError(f"--{sources[0]} and --{sources[1]} do not go together; give one")
    for flag, needs in (("think_time", "turns"), ("trace_speed", "trace"),
                        ("trace_window", "trace"), ("trace_unit", "trace"),
                        ("trace_block", "trace")):
        if getattr(args, flag) is not None and not getattr(args, needs):
            raise UserError(f"--{flag.replace('_', '-')} goes with --{needs}")
    given = [flag for source in sources for flag in IN_THE_FILE.get(source, ())
             if getattr(args, flag, None) not in (None, False, 0, math.inf)]
    if given:
        raise UserError(f"--{sources[0]} says that itself; drop --{given[0].replace('_', '-')}")
    {"trace": settle_trace, "prompts": settle_prompts, "mix": settle_mix}.get(
        "".join(sources), lambda args: None)(args)


IN_THE_FILE = {  # flags that contradict a file
    "trace": ("rate", "sweep", "find_goodput", "ramp",
              "input_len", "output_len", "shared_prefix_len"),
    "prompts": ("input_len", "shared_prefix_len"),
    "mix": ("input_len", "output_len", "shared_prefix_len")}


def settle_trace(args: Any) -> None:
    """--trace: its arrivals and lengths are the plan."""
    trace = args.trace_read = read_trace(args.trace, args.trace_window or (0.0, math.inf),
                                         args.trace_speed or 1.0, args.num_requests or 5_000_000,
                                         args.duration or math.inf,
                                         (args.trace_unit or 0, args.trace_block or 0))
    args.input_len = lengths_seen("of the trace", [p.n_in for p in trace.requests])
    args.output_len = lengths_seen("of the trace", [p.n_out for p in trace.requests])
    args.num_requests, args.duration = len(trace.requests), None
    rate = max(1, len(trace.requests) - 1) / (trace.requests[-1].due_s or 1.0)
    args.rate = float(f"{rate:.3g}")
    for note in trace.notes:
        say(note)


def settle_prompts(args: Any) -> None:
    """--prompts: the customer's own texts; lengths are known only when the server has counted."""
    found = args.prompts_read = read_prompts(args.prompts)
    items = len(found.items)
    args.input_len = lengths_seen("of the file (estimated)",
                                  [found.tokens(n) for n in range(items)])
    if not args.output_len and all(item.n_out for item in found.items):
        args.output_len = lengths_seen("of the file's replies",
                                       [item.n_out or 0 for item in found.items])
    wanted = args.num_requests or (0 if args.duration else 100)
    if wanted > items:
        say(f"{wanted} requests from {items} prompts: {wanted - items} repeats, " + (
            "which a prefix cache will serve (--no-unique-prompts)" if args.no_unique_prompts
            else "each round with a nonce of its own in front"))


def settle_mix(args: Any) -> None:
    """--mix: the classes, their total rate, and the mean lengths of all."""
    search = "--find-goodput" if args.sweep is None else "--sweep auto"
    refuse((args.find_goodput, f"--mix and {search} do not go together: the search is for one "
            "SLO; --sweep R,R gives the goodput of each class at each total rate"))
    classes = args.classes = read_mix(args.mix, limits_of(args))
    if args.rate is None and not args.sweep and args.concurrency is None:
        without = [c.name for c in classes if c.rate_rps is None]
        if without:
            raise UserError(f"{args.mix}: class {without[0]} has no rate; give it one, or --rate "
                            "for all")
        args.rate = math.fsum(c.rate_rps or 0.0 for c in classes)
    args.input_len = blend([(c.share, c.work.n_in) for c in classes])
    args.output_len = blend([(c.share, c.work.n_out) for c in classes])


def blend(parts: Sequence[Tuple[float, Lengths]]) -> Lengths:
    """A mixture of distributions by their shares, its quantiles from 200 points of each."""
    points = sorted((lengths.quantile((i + 0.5) / 200), share / 200)
                    for share, lengths in parts for i in range(200))
    reached = list(itertools.accumulate(share for _, share in points))
    mean = math.fsum(share * lengths.mean for share, lengths in parts)
    return Lengths("of the mix", mean,
                   lambda q: points[min(len(points) - 1, bisect.bisect_left(reached, q))][0])


def work_of(args: Any) -> Work:
    """What the requests ask for, as the flags and their files say."""
    think = args.think_time or (think_time("0") if args.turns else None)
    return Work(args.input_len, args.output_len, args.shared_prefix_len, args.prefix_groups,
                args.trace_read, args.prompts_read, args.classes, args.turns, think)


def limits_of(args: Any) -> Dict[str, Optional[float]]:
    """The limits of the SLO that the flags give [s], None where they give none."""
    return {f"{name}_s": value * MS if value else None for name, value in (
        ("ttft", args.slo_ttft_ms), ("tpot", args.slo_tpot_ms), ("e2e", args.slo_e2e_ms))}


def slo_of(args: Any) -> Slo:
    """What a request must meet, as the flags and the classes say."""
    share = args.slo_attainment
    return Slo(**limits_of(args), attainment=share, classes={
        c.name: Slo(**c.limits, attainment=share) for c in args.classes})


def traffic_statement(args: Any) -> Optional[Dict[str, Any]]:
    """Where requests come from, for the record and the setup statement; None: distributions."""
    text, more = "", {}
    if args.trace_read:
        more = args.trace_read.about
        text = (f"trace {more['file']} ({more['format']}), lines {more['first_line']} to "
                f"{more['last_line']}, {more['unit']}, speed {more['speed']:g}")
        if more["shared_share"] is not None:
            text += (f"; hash ids of {more['block_tokens']} tokens, {more['shared_share']:.0%} of "
                     "the prompt tokens repeat an earlier prefix")
        more = {**more, "notes": args.trace_read.notes}
    elif args.prompts_read:
        more = {"file": os.path.basename(args.prompts), "prompts": len(args.prompts_read.items)}
        text = f"{more['prompts']} prompts of {more['file']}, in an order by the seed, then again"
        text += "" if args.no_unique_prompts else "; a nonce of a few words in front of each"
    elif args.classes:
        text = f"{len(args.classes)} classes of {os.path.basename(args.mix)}"
        more = {"classes": {c.name: {
            "share": c.share, "model": c.model or None, "input": c.work.n_in.text,
            "output": c.work.n_out.text, "shared_prefix_len": c.work.shared_prefix,
            "prefix_groups": c.work.prefix_groups,
            "burstiness": None if c.burstiness is None or math.isinf(c.burstiness)
            else c.burstiness, "arrivals": arrivals_named(
                args.burstiness if c.burstiness is None else c.burstiness), **c.limits}
            for c in args.classes}}
    elif args.turns:
        think = args.think_time.text if args.think_time else "0"
        more = {"turns": args.turns.text, "think_time_s": think}
        text = (f"sessions of {args.turns.text} turns, think time {think} s; input length is the "
                "new text of a turn, and the rate counts turns")
    return {"text": text, **more} if text else None


def arrivals_named(burstiness: float) -> str:
    """An arrival process by its gamma shape."""
    return ("constant" if math.isinf(burstiness) else "Poisson" if burstiness == 1 else
            f"gamma, shape {burstiness:g}")


def several(number: float, thing: str) -> str:
    """So many of a thing."""
    return f"{number:g} {thing}{'s' * (number != 1)}"


def lengths_told(n_in: str, n_out: str) -> str:
    """Lengths of prompts and answers as the setup statement has them.

    >>> lengths_told("200", "100"), lengths_told("of the trace", "of the trace")
    ('input 200, output 100 tokens', 'input and output lengths of the trace')
    """
    seen = [text.startswith("of ") for text in (n_in, n_out)]
    if all(seen) and n_in == n_out:
        return f"input and output lengths {n_in}"
    if not any(seen):
        return f"input {n_in}, output {n_out} tokens"
    return ", ".join(f"{name} lengths {text}" if of else f"{name} {text} tokens" for name, text, of
                     in zip(("input", "output"), (n_in, n_out), seen))


def class_lines(plan: Facts) -> List[str]:
    """Each class of a mix as the setup statement has it: model, load, lengths, prefix, SLO."""
    lines, rates = [], plan["rates"]
    for name, c in (dig(plan, "traffic", "classes") or {}).items():
        rate = (f"{c['share'] * rates[0]:.4g} req/s, " if len(rates) == 1 and rates[0] else
                f"{c['share']:.1%} of the requests, ")
        asked = ", ".join(f"{key} {c[f'{key}_s'] / MS:g}" for key in ("ttft", "tpot", "e2e")
                          if c[f"{key}_s"])
        lines.append(
            f"       class {name}: model {c['model'] or 'of the target'}, {rate}"
            f"{lengths_told(c['input'], c['output'])}"
            + (f", arrivals {c['arrivals']}" if any(rates) and c.get("arrivals") else "")
            + ((f", {c['shared_prefix_len']} tokens shared in "
                + several(c.get("prefix_groups", 1), "group"))
               if c["shared_prefix_len"] else ", no shared prefix")
            + (f", SLO {asked} ms" if asked else ", no SLO"))
    return lines


# ---- 4. Prompts and requests -------------------------------------------------------------------
# A prompt of N tokens without a tokenizer: token ids where the server takes them, else words that
# are one token each in the usual vocabularies, their number corrected by what the server counted.

# 256 words of four letters: one token each in the usual vocabularies, and as many tokens as each
# other in those that spell words out: which words a prompt holds does not change its length.
WORDS = (
    "able acid aged also area army away baby back ball band bank base bath bean bear beat been "
    "bell belt best bird blow blue boat body bone book born both bowl bulk burn bush busy call "
    "calm came camp card care case cash cast cell chat chip city club coal coat code cold come "
    "cook cool cope copy core corn cost crew crop dark data date dawn days dead deal dear debt "
    "deep deny desk dial diet disc disk does done door dose down draw drew drop drug dual duke "
    "dust duty each earn ease east easy edge else even ever evil exit face fact fail fair fall "
    "farm fast fate fear feed feel feet fell felt file fill film find fine fire firm fish five "
    "flat flow food foot ford form fort four free from fuel full fund gain game gate gave gear "
    "gene gift girl give glad goal goes gold golf gone good gray grew grey grow gulf hair half "
    "hall hand hang hard harm hate have head hear heat held help here hero high hill hire hold "
    "hole holy home hope host hour huge hung hunt hurt idea inch into iron item join jump jury "
    "just keen keep kept kick kind king knee knew know lack lady laid lake land lane last late "
    "lead left less life lift like line link list live load loan lock long look lord lose loss "
    "lost love luck made mail main make male many mark mass meal mean meat meet menu mere mile "
    "milk mind mine miss").split()
TOKEN_IDS = range(300, 1000)  # ordinary tokens in every vocabulary of a thousand or more


class Calibration(NamedTuple):
    """How the server counts: prompt tokens = overhead + tokens_per_word * words."""

    tokens_per_word: float
    overhead: float
    source: str

    def words_for(self, tokens: int) -> int:
        """Words of a prompt that the server will count as so many tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))


ONE_A_WORD = Calibration(1.0, 0.0, "one word a token, not calibrated")


def calibrate(points: Sequence[Tuple[int, int]]) -> Optional[Calibration]:
    """The line through (words sent, tokens counted), least squares; None without two lengths."""
    if len({words for words, _ in points}) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    if not 0.2 < slope < 20:
        return None
    return Calibration(slope, mean_y - slope * mean_x, f"{len(points)} warm-up requests")


class Prompts:
    """Makes prompts: shared prefix of the group, then a nonce, then filling, all from the seed."""

    def __init__(self, seed: int, salt: int, unique: bool, calibration: Calibration,
                 work: Optional[Work] = None) -> None:
        """seed fixes the filling, salt the nonces; unique=False leaves the nonce out."""
        self.seed, self.salt, self.unique, self.calibration = seed, salt, unique, calibration
        self.block = work.trace.block if work and work.trace else 0
        self.items = work.prompts.items if work and work.prompts else []

    def units(self, planned: Planned, shared: int, total: int, symbols: Sequence[Any]) -> List[Any]:
        """So many symbols: shared ones of the group first, then the nonce, then filling."""
        prefix = stream(self.seed, f"prefix {planned.group}").choices(symbols, k=shared)
        own = max(1, total - shared)
        nonce = self.nonce(planned.id, symbols)[:own]
        filling = stream(self.seed, f"filling {planned.id}").choices(symbols, k=own - len(nonce))
        return [*prefix, *nonce, *filling]

    def nonce(self, number: int, symbols: Sequence[Any]) -> List[Any]:
        """A few symbols that no other number and no other run has; none where not wanted."""
        value = (self.salt << 32 | number) if self.unique else 0
        found: List[Any] = []
        while value:
            value, digit = divmod(value, len(symbols))
            found.append(symbols[digit])
        return found

    def blocks(self, planned: Planned, total: int, size: float, symbols: Sequence[Any]
               ) -> List[Any]:
        """So many symbols: a block of about `size` for each key, by key and run; then filling."""
        seed = f"{self.seed}/{self.salt if self.unique else 0}"
        found: List[Any] = []
        for number, key in enumerate(planned.keys):
            length = round((number + 1) * size) - round(number * size)
            found += stream(seed, f"block {key}").choices(symbols, k=length)
        filling = stream(seed, f"filling {planned.id}")
        found += filling.choices(symbols, k=max(0, total - len(found)))
        return found[:total]

    def token_ids(self, planned: Planned, shared: int) -> List[int]:
        """A prompt of exactly planned.n_in token ids."""
        if planned.keys:
            return self.blocks(planned, planned.n_in, self.block, TOKEN_IDS)
        return self.units(planned, shared, planned.n_in, TOKEN_IDS)

    def text(self, planned: Planned, shared: int) -> str:
        """A prompt that the server should count as planned.n_in tokens; later turns: the new."""
        a_word = self.calibration.tokens_per_word
        total = (max(1, round((planned.n_in - planned.context) / a_word)) if planned.turn
                 else self.calibration.words_for(planned.n_in))
        if planned.keys:
            return " ".join(self.blocks(planned, total, self.block / a_word, WORDS))
        shared = 0 if planned.turn else min(round(shared / a_word), total - 1)
        return " ".join(self.units(planned, shared, total, WORDS))

    def messages(self, planned: Planned, shared: int) -> Rows:
        """The new messages of a request; the customer's own with a nonce in front."""
        if planned.prompt < 0:
            return [{"role": "user", "content": self.text(planned, shared)}]
        messages = [dict(message) for message in self.items[planned.prompt].messages]
        # one nonce a round through the file: what its prompts share stays shared
        nonce, content = " ".join(self.nonce(planned.group, WORDS)), messages[0].get("content")
        if nonce:
            messages[0]["content"] = ([{"type": "text", "text": nonce}, *content]
                                      if isinstance(content, list) else f"{nonce}\n{content or ''}")
        return messages


class Target(NamedTuple):
    """Where requests go, and what every one of them carries."""

    scheme: str
    host: str
    port: int
    path: str  # of the endpoint
    base_path: str  # of the API, up to and including /v1
    chat: bool
    model: str
    headers: Tuple[Tuple[str, str], ...]  # with the key: never printed
    extra_body: Facts
    ignore_eos: bool
    token_ids: bool  # completions prompts as ids

    @property
    def authority(self) -> str:
        """The Host header: without the port where it is the scheme's own."""
        host = _bracketed(self.host)
        standard = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == standard else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The final URL, for the setup statement."""
        path = self.path.partition("?")[0]  # a query may hold a key
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}{path}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def parse_url(text: str, endpoint: str) -> Tuple[str, str, int, str, str, bool]:
    """(scheme, host, port, endpoint path, API path, is chat) of a URL, which may end in any."""
    import urllib.parse
    if "//" not in text:
        text = f"http://{text}"
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port
    except ValueError as error:  # the URL itself is not repeated: it may hold a password
        raise UserError(f"the URL is not one: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise UserError("the URL must be http://HOST:PORT or https://HOST")
    if parts.username or parts.password:
        raise UserError("a URL must not hold a user name or password; use --api-key or --header")
    if not all("!" <= c <= "~" for c in text):
        raise UserError("the URL holds a space or a character that is no ASCII; write it as %XX")
    path, chat = parts.path.rstrip("/"), endpoint == "chat"
    for tail, is_chat in (("/chat/completions", True), ("/completions", False)):
        if path.endswith(tail):
            path, chat = path[: -len(tail)], is_chat
            break
    else:
        if not path.endswith("/v1"):
            path += "/v1"
    full = path + ("/chat/completions" if chat else "/completions")
    query = f"?{parts.query}" if parts.query else ""
    standard = 443 if parts.scheme == "https" else 80
    return parts.scheme, parts.hostname, port or standard, full + query, path, chat


def models_of(work: Work, target: Target) -> Dict[str, Target]:
    """The target of each traffic class: another model, or adapter, where the class names one."""
    return {c.name: target._replace(model=c.model or target.model) for c in work.classes}


def body_of(target: Target, prompts: Prompts, planned: Planned, shared: int,
            talk: Optional[Rows] = None) -> bytes:
    """The JSON body of one request. `talk` is what was said before it; its messages are added."""
    fields: Dict[str, Any] = {"model": target.model}
    if not target.chat and target.token_ids and talk is None:
        fields["prompt"] = prompts.token_ids(planned, shared)
    else:
        talk = [] if talk is None else talk
        talk += prompts.messages(planned, shared)
        fields.update({"messages": talk} if target.chat else {"prompt": joined(talk)})
        if target.chat and planned.prompt >= 0:
            fields.update(prompts.items[planned.prompt].more)
    fields.update(max_tokens=planned.n_out, stream=True, temperature=0.0,
                  stream_options={"include_usage": True})
    if target.ignore_eos:
        fields["ignore_eos"] = True
    fields.update(target.extra_body)
    fields = {key: value for key, value in fields.items() if value is not None}
    return json.dumps(fields, separators=(",", ":")).encode()


def encode(target: Target, prompts: Prompts, planned: Planned, shared: int, run: int,
           talk: Optional[Rows] = None) -> bytes:
    """The bytes of one request, head and body in one piece."""
    name = "warmup" if run < 0 else run
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream",
               "Accept-Encoding": "identity", "X-Request-Id": f"loadgen-{name}-{planned.id}",
               **dict(target.headers)}
    return request_bytes("POST", target.path, target.authority, headers,
                         body_of(target, prompts, planned, shared, talk))


# ---- 5. The wire -------------------------------------------------------------------------------
# Sans-IO: bytes in, facts out; no clock, no socket. A peer may send anything, cut anywhere:
# whatever it can fill has a bound, and past it the reply is malformed.

HEAD_MAX, SIZE_LINE_MAX, TRAILER_MAX = 64 * KIB, KIB, 64 * KIB
EVENT_MAX, DOCUMENT_MAX, ERROR_BODY_MAX = 4 * MIB, 4 * MIB, 64 * KIB
INFLATED_MAX, INFLATE_STEP = 256 * MIB, MIB
MESSAGE_MAX, INTERIM_MAX, TOKENS_MAX = 300, 8, 10**8
raw_decode = json.JSONDecoder().raw_decode
LAST_CHUNK = b"0\r\n\r\n"
BOM = b"\xef\xbb\xbf"
TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class WireError(Exception):
    """A peer sent what is not HTTP or SSE; the text says what, in one line."""


class Head(NamedTuple):
    """The start line and headers of one HTTP message."""

    start: Tuple[str, str, str]  # (method, target, version) or (version, status, reason)
    headers: Dict[str, str]  # lower-case names; repeated ones joined by ", "


def printable(text: str, length: int = MESSAGE_MAX) -> str:
    """What a peer wrote as one line that is safe to print, of at most `length` characters."""
    safe = "".join(c if c.isprintable() else " " for c in text[: 4 * length])
    return " ".join(safe.split())[:length]


def take_head(data: bytearray) -> Optional[Head]:
    """Remove a complete head from the front of `data`; None when more bytes are needed."""
    del data[: len(data) - len(data.lstrip(b"\r\n"))]  # empty lines before it are allowed
    ends = [at for at in (data.find(b"\r\n\r\n"), data.find(b"\n\n")) if at >= 0]
    end = min(ends, default=len(data))
    if end > HEAD_MAX:
        raise WireError(f"a head of over {HEAD_MAX} bytes")
    if not ends:
        return None
    lines = data[:end].decode("latin-1").replace("\r\n", "\n").split("\n")
    del data[: end + (2 if data.startswith(b"\n\n", end) else 4)]
    return Head(start_line(lines[0]), header_fields(lines[1:]))


def start_line(line: str) -> Tuple[str, str, str]:
    """The three parts of a request or status line, checked."""
    first, _, rest = line.partition(" ")
    second, _, third = rest.partition(" ")
    if first in ("HTTP/1.0", "HTTP/1.1") and len(second) == 3 and second.isascii():
        if second.isdigit() and second >= "100":
            return first, second, third
    elif third in ("HTTP/1.0", "HTTP/1.1") and second and first and TOKEN.issuperset(first):
        return first, second, third
    raise WireError(f"not an HTTP/1 start line: {printable(line, 60)!r}")


def header_fields(lines: List[str]) -> Dict[str, str]:
    """Header lines as a mapping; a folded line continues the one before it."""
    headers: Dict[str, str] = {}
    name = ""
    for line in lines:
        key, colon, value = line.partition(":")
        if line[:1] in (" ", "\t") and name:
            headers[name] += " " + line.strip(" \t")
        elif colon and key and TOKEN.issuperset(key):
            name, value = key.lower(), value.strip(" \t")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        else:
            raise WireError(f"not a header: {printable(line, 60)!r}")
        if "\r" in line or "\0" in line:
            raise WireError(f"a control character in header {printable(name, 60)!r}")
    return headers


def header_list(headers: Mapping[str, str], name: str) -> List[str]:
    """The lower-case members of a comma-separated header."""
    return [word for word in (w.strip().lower() for w in headers.get(name, "").split(",")) if word]


class Body:
    """The framing of one body: chunked, of a given length, or until the peer closes."""

    def __init__(self, head: Head, is_response: bool) -> None:
        """Choose the framing as RFC 9112, 6.3 says; WireError when the head contradicts itself."""
        codings = header_list(head.headers, "transfer-encoding")
        lengths = set(header_list(head.headers, "content-length"))
        bodiless = is_response and head.start[1] in ("204", "304")
        self.chunked = codings[-1:] == ["chunked"] and not bodiless
        self.until_close = is_response and not (self.chunked or bodiless)
        self.ambiguous = bool(codings and lengths)  # smuggling or a fault: never reuse after it
        self.leftover = b""  # what came after the end
        self.fault = ""  # found behind good pieces; the next feed raises it
        self._left = 0  # bytes still due of this chunk, or of the body
        self._line = b""  # a size or trailer line not yet ended
        self._want: Callable[[Body, bytes], None] = Body._size_line  # unbound: makes no cycle
        self._trailer_bytes = 0
        if codings and not (self.chunked or is_response):
            raise WireError(f"a request with transfer-encoding {printable(codings[-1], 40)}")
        if lengths and not codings and not bodiless:
            text = lengths.pop()
            if lengths or not (text.isascii() and text.isdigit()) or len(text) > 18:
                raise WireError(f"not a content-length: {printable(text, 40)!r}")
            self.until_close, self._left = False, int(text)
        self.complete = not (self.chunked or self.until_close or self._left)

    @property
    def idle(self) -> bool:
        """Whether the next byte starts a chunk."""
        return (self.chunked and self._want is Body._size_line
                and not (self._left or self._line or self.complete or self.fault))

    def feed(self, data: bytes) -> List[bytes]:
        """Payload pieces in `data`; WireError at once, or on the next call if pieces came first."""
        if self.fault:
            raise WireError(self.fault)
        if self.complete:
            self.leftover += data
            return []
        if self.chunked:
            return self._chunks(data)
        if self.until_close:
            return [data] if data else []
        piece, self.leftover = data[: self._left], data[self._left :]
        self._left -= len(piece)
        self.complete = not self._left
        return [piece] if piece else []

    def _chunks(self, data: bytes) -> List[bytes]:
        pieces: List[bytes] = []
        data, self._line, at = self._line + data, b"", 0
        try:
            while at < len(data) and not self.complete:
                if self._left:
                    pieces.append(data[at : at + self._left])
                    at += len(pieces[-1])
                    self._left -= len(pieces[-1])
                    continue
                end = data.find(b"\n", at)
                if (end if end >= 0 else len(data)) - at > SIZE_LINE_MAX:
                    raise WireError(f"a chunk-size line of over {SIZE_LINE_MAX} bytes")
                if end < 0:
                    self._line = data[at:]
                    return pieces
                line, at = data[at:end], end + 1
                self._want(self, line[:-1] if line.endswith(b"\r") else line)
        except WireError as error:
            self.fault = str(error)
            if not pieces:
                raise
        self.leftover = data[at:]
        return pieces

    def _size_line(self, line: bytes) -> None:
        size = line.partition(b";")[0].strip()  # its extensions are ignored
        try:
            if not size.isalnum() or b"x" in size.lower() or len(size) > 16:
                raise ValueError
            self._left = int(size, 16)
        except ValueError:
            raise WireError(f"not a chunk size: {printable(size.decode('latin-1'), 40)!r}"
                            ) from None
        self._want = Body._chunk_end if self._left else Body._trailer

    def _chunk_end(self, line: bytes) -> None:
        if line:
            raise WireError("a chunk longer than its size")
        self._want = Body._size_line

    def _trailer(self, line: bytes) -> None:
        self.complete = not line
        self._trailer_bytes += len(line)
        if self._trailer_bytes > TRAILER_MAX:
            raise WireError(f"trailers of over {TRAILER_MAX} bytes")


def encode_chunk(data: bytes) -> bytes:
    """One HTTP chunk; nothing for nothing, since an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def request_bytes(method: str, target: str, host: str, headers: Mapping[str, str], body: bytes
                  ) -> bytes:
    """A whole request as one buffer, for one write. WireError for what would break the head."""
    fields = {"host": ("Host", host)}
    if body or method != "GET":
        fields["content-length"] = ("Content-Length", str(len(body)))
    fields.update((name.lower(), (name, value)) for name, value in headers.items())
    for name, value in fields.values():
        if not name or not TOKEN.issuperset(name) or any(c in value for c in "\r\n\0"):
            raise WireError(f"header {printable(name, 60)!r} cannot be sent: a control character")
    if not TOKEN.issuperset(method) or any(c <= " " for c in target) or not target:
        raise WireError(f"not a request line: {printable(method + ' ' + target, 80)!r}")
    lines = [f"{method} {target} HTTP/1.1", *(f"{n}: {v}" for n, v in fields.values()), "", ""]
    try:
        return "\r\n".join(lines).encode("latin-1") + body
    except UnicodeEncodeError:
        raise WireError("a target or header with characters outside latin-1") from None


class Inflater:
    """Undoes gzip or deflate piece by piece, in bounded steps."""

    def __init__(self, coding: str) -> None:
        """`coding` is what content-encoding names; WireError when zlib does not know it."""
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise WireError(f"content-encoding {printable(coding, 40)}, which was not asked for")
        self._zlib = zlib.decompressobj(32 + zlib.MAX_WBITS)
        self._unsure = coding == "deflate"  # some servers leave the zlib wrapper off
        self._lead = b""
        self._total = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What `data` inflates to, in pieces of at most 1 MiB."""
        if self._unsure:
            data = self._lead = self._lead + data
            if len(data) < 2:
                return
            self._unsure = False
            if data[0] & 15 != zlib.DEFLATED or int.from_bytes(data[:2], "big") % 31:
                self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)
        while data:
            try:
                piece = self._zlib.decompress(data, INFLATE_STEP)
            except zlib.error as error:
                raise WireError(f"a broken compressed body: {printable(str(error))}") from None
            data = self._zlib.unconsumed_tail
            if self._zlib.eof:  # the next member, if there is one
                data, self._zlib = self._zlib.unused_data, zlib.decompressobj(32 + zlib.MAX_WBITS)
            self._total += len(piece)
            if self._total > INFLATED_MAX:
                raise WireError(f"a body that inflates to over {INFLATED_MAX} bytes")
            if piece:
                yield piece


class Sse(NamedTuple):
    """One server-sent event."""

    name: bytes
    data: bytes
    comment: bytes  # the last one before or in it: Dynamo says there what went wrong


STRAY = b"\0stray"  # names a line of bare JSON or [DONE], which some servers end with


class SseLines:
    """Splits a body into server-sent events; lines end in LF, CRLF, CR or a mixture."""

    def __init__(self) -> None:
        """Start before the first line."""
        self.known = False  # whether any line was SSE at all
        self.stray = b""  # the first that was not
        self._line = bytearray()
        self._skip_lf = False  # the last read ended in CR: an LF to come belongs to it
        self._clear()

    def _clear(self) -> None:
        self._name, self._comment, self._size = b"", b"", 0
        self._data: List[bytes] = []

    @property
    def idle(self) -> bool:
        """Whether the next byte starts an event."""
        return not (self._pending or self._skip_lf)

    @property
    def _pending(self) -> bool:
        return bool(self._line or self._data or self._name)

    def feed(self, data: bytes) -> List[Sse]:
        """The events that `data` completes."""
        if self._skip_lf and data.startswith(b"\n"):
            data, self._skip_lf = data[1:], False
        if data:
            self._skip_lf = data.endswith(b"\r")
        if data.find(b"\r") >= 0:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        whole = data.endswith(b"}\n\n") and data.find(b"\n") == len(data) - 2
        if whole and data.startswith(b"data: {") and not self._pending:
            self.known = True
            return [Sse(b"", data[6:-2], b"")]  # most often: one whole event
        first, *lines = data.split(b"\n")
        self._line += first
        events: List[Sse] = []
        if lines:
            lines.insert(0, bytes(self._line))
            self._line = bytearray(lines.pop())
            for line in lines:
                self._take(line, events)
        if len(self._line) + self._size > EVENT_MAX:
            raise WireError(f"an event of over {EVENT_MAX} bytes")
        return events

    def _take(self, line: bytes, events: List[Sse]) -> None:
        """One line: a blank one ends the event, every other adds to it."""
        if line.startswith(BOM):
            line = line[len(BOM) :]
        if not line:
            if self._data or self._name:
                events.append(Sse(self._name, b"\n".join(self._data), self._comment))
                self._clear()
            return
        name, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        self.known = self.known or name in (b"", b"data", b"event", b"id", b"retry")
        if name == b"data":
            self._data.append(value)
            self._size += len(value) + 1
        elif name == b"event":
            self._name = value.strip()[:KIB]
        elif not name:
            self._comment = value[:KIB]
        elif line.startswith((b"{", b"[DONE]")):
            events.append(Sse(STRAY, line, b""))
        if name not in (b"", b"data", b"event", b"id", b"retry"):
            self.stray = self.stray or line[:KIB]


NOTHING, REASONING, ANSWER = 0, 1, 2  # what a chunk carries


def chunk_output(choice: Facts) -> int:
    """What one choice of a chunk carries: NOTHING, REASONING or ANSWER.

    >>> chunk_output({"delta": {"reasoning": "h", "content": ""}}) == REASONING
    True
    """
    delta = choice.get("delta")
    if not delta:
        return ANSWER if choice.get("text") else NOTHING
    content = delta.get("content")
    if content:
        if type(content) is not list or any(part.get("text") for part in content):
            return ANSWER
        return REASONING if any(part.get("thinking") for part in content) else NOTHING
    if any(called(call) for call in delta.get("tool_calls") or ()):
        return ANSWER
    if delta.get("function_call") and called({"function": delta["function_call"]}):
        return ANSWER
    if delta.get("reasoning_content") or delta.get("reasoning"):
        return REASONING
    shown = any((detail.get("text") or detail.get("summary"))  # encrypted ones do not show
                for detail in delta.get("reasoning_details") or ()
                if "encrypted" not in str(detail.get("type")))
    return REASONING if shown else NOTHING


def called(call: Facts) -> bool:
    """Whether a tool call's piece has a name or arguments."""
    function = call.get("function") or {}
    return bool(function.get("name") or function.get("arguments"))


def token_count(value: Any) -> Optional[int]:
    """A token count, or None for whatever else stood there. Lua proxies write 3 as 3.0."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None


def error_of(message: Any) -> Tuple[bool, str, str]:
    """Whether a JSON object reports an error, its code, and what the server said."""
    if type(message) is list and message:
        message = message[0]
    if type(message) is not dict:
        return False, "", ""
    error = message.get("error")
    found = bool(error) or message.get("object") == "error" or message.get("type") == "error"
    inner = error if type(error) is dict else message
    said = error if type(error) is str else None
    for key in ("message", "detail", "msg", "error", "error_type", "type"):
        said = said or inner.get(key)
    code = inner.get("code") or message.get("code") or ""
    text = said if type(said) is str else json.dumps(said) if said else ""
    return found, printable(str(code), 40) if type(code) in (int, str) else "", printable(text)


def parsed(data: bytes) -> Any:
    """The JSON value that `data` starts with, or None."""
    try:
        return raw_decode(data.decode("utf-8", "replace").strip())[0]
    except (ValueError, RecursionError):
        return None


def redirect_host(location: str) -> str:
    """The host that a Location header names, or its path when it names none."""
    import urllib.parse
    try:
        parts = urllib.parse.urlsplit(location)
    except ValueError:
        return printable(location, 100)
    return printable(parts.netloc.rpartition("@")[2] or parts.path, 100)


FINISH_CLASS = {  # a finish_reason that is no success
    "abort": "aborted", "aborted": "aborted", "cancelled": "aborted", "canceled": "aborted",
    "error": "stream_error", "content_filter": "filtered"}
HEARTBEATS = (b"ping", b"heartbeat", b"keepalive", b"keep-alive")
WHOLE = (b"}\n\n\r\n", b"}\r\n\r\n\r\n")  # a chunk that ends with its event
CODING_HEADERS = ("content-encoding", "transfer-encoding")
DOCUMENT_STARTS = (b"{", b"[", b"<")
MISSHAPEN = (ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError)


NO_TWIN = (b"\0", b"\0")  # no event begins or ends so
SIZES = [b"%x\r\n" % size for size in range(2048)]  # chunk-size lines
PLAIN = bytes(set(range(32, 127)) - set(b'"\\'))  # what stands for itself in a JSON string


def around(data: bytes, choice: Facts) -> Tuple[bytes, bytes]:
    """What is around an ordinary chunk's text, so that the next need not be decoded; NO_TWIN."""
    key, text = b'"text":', choice.get("text")
    if text is None:
        key, text = b'"content":', (choice.get("delta") or {}).get("content")
    if choice.get("finish_reason") or type(text) is not str or data.count(key) != 1:
        return NO_TWIN
    start = data.find(b'"', data.find(key) + len(key)) + 1
    raw = text.encode("utf-8", "replace")
    end = start + len(raw)
    if data[start:end] != raw or data[end : end + 1] != b'"' or raw.find(b'"') >= 0:
        return NO_TWIN
    return data[:start], data[end:]


class Reply:
    """One response to a streaming request, fed with timed reads. Nothing it is fed raises.

    Times are int nanoseconds, those of the reads; absent ones are None.
    """

    __slots__ = (  # not a dict: a thousand of these must stay in the cache
        "steady", "_twin", "event_ns", "coalesced", "_around", "_begun", "_body", "_broken",
        "_document", "_failed", "_head", "_inflater", "_interim", "_keep_alive", "_lead",
        "_over", "_sniffed", "_sse", "answer_ns", "bad_events", "cached_tokens", "done",
        "closed_ns", "encoding", "end_ns", "error", "finish_ns", "finish_reason", "headers", "n_in",
        "n_out", "opened_ns", "reason", "server_message", "status",
    )

    def __init__(self) -> None:
        """Wait for the head."""
        self.status: Optional[int] = None
        self.reason = ""
        self.headers: Dict[str, str] = {}
        self.event_ns = array.array("q")  # of each output event
        self.answer_ns: Optional[int] = None  # the first output event that is not reasoning
        self.opened_ns: Optional[int] = None  # the first chunk, if it had no output: a role
        self.closed_ns: Optional[int] = None  # the last chunk without output after some
        self.finish_ns: Optional[int] = None  # finish_reason or [DONE], the first of them
        self.end_ns: Optional[int] = None  # [DONE], an error, the body's end or the peer's close
        self.coalesced = 0  # output events that shared a read with a later one: stamped late
        self.n_in: Optional[int] = None
        self.n_out: Optional[int] = None
        self.cached_tokens: Optional[int] = None
        self.finish_reason: Optional[str] = None
        self.done = False  # [DONE] was seen
        self.bad_events = 0
        self.error = ""  # what went wrong, in one line
        self.server_message = ""  # what the server said about it
        self.encoding = ""  # content-encoding, though identity was asked for
        self._twin = self._around = NO_TWIN  # around the text of a read, of an event
        self._failed = ""  # "malformed" or "stream_error" once one is certain
        self._head = bytearray()
        self._interim = 0
        self._body: Optional[Body] = None
        self._inflater: Optional[Inflater] = None
        self._sse = SseLines()
        self._document: Optional[bytearray] = None  # a body that is not a stream
        self._sniffed = False  # whether the body is known to be the one or the other
        self._lead = bytearray()  # blank bytes before that is known
        self._begun = False  # an event with data has come
        self._broken = False  # the framing cannot be followed any more
        self._keep_alive = False  # the head left the connection open
        self._over = False  # the body or the connection has ended
        self.steady = False  # between chunks and between events of a plain SSE body

    # -- what the driver asks --

    @property
    def started(self) -> bool:
        """Whether any byte has come; until then a reused connection may have been a dead one."""
        return bool(self._head or self._interim or self._broken) or self._body is not None

    @property
    def complete(self) -> bool:
        """Whether no more need be read."""
        return self.done or self._over or self._broken or bool(self._failed)

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request."""
        body = self._body
        if body is None or self._broken:
            return False
        framed = body.complete and not (body.until_close or body.leftover or body.ambiguous)
        return framed and self._keep_alive

    @property
    def lingering(self) -> bool:
        """Complete, but for the framing's end: a short wait for it may save the connection."""
        framing = self._body is not None and not (self._body.complete or self._body.until_close)
        return self.complete and framing and self._keep_alive and not (self._over or self._broken)

    # -- bytes in --

    def feed(self, data: bytes, at_ns: int) -> None:
        """Take one read from the socket: head, framing and events."""
        start = data.find(b"\n") + 1
        size, (before, after) = len(data) - start - 2, self._twin
        if size < len(SIZES) and data.startswith(before, start) and data.endswith(after):
            said = data[start + len(before) : -len(after)]  # most often: one chunk like the last
            if (said and self.steady and data.startswith(SIZES[size])
                    and not said.translate(None, PLAIN)):
                self.event_ns.append(at_ns)
                return
        known = len(self.event_ns)
        at = self._twins(data, at_ns) if self.steady else 0
        if at < len(data):
            data = data[at:] if at else data
            start = data.find(b"\n") + 1
            event = data[start + 6 : -2].rstrip(b"\r\n")
            if (self.steady and data.endswith(WHOLE)  # one chunk with one event, though unlike
                    and data[:start] == b"%x\r\n" % (len(data) - start - 2)  # the one before
                    and data.startswith(b"data: {", start)
                    and event.find(b"\n") < 0 and event.find(b"\r") < 0):
                self._message(event, at_ns)
            else:
                self._feed(data, at_ns)
            if self._around is not NO_TWIN:
                self._twin = b"data: " + self._around[0], self._around[1] + b"\n\n\r\n"
            self.coalesced += max(0, len(self.event_ns) - known - 1)

    def _twins(self, data: bytes, at_ns: int) -> int:
        """Count the chunks at the front that differ from an earlier one in their text alone."""
        before, after = self._twin
        at = events = 0
        while True:
            start = data.find(b"\n", at) + 1
            stop = data.find(b"\n\r\n", start) + 3
            if not (3 <= stop - start < len(SIZES) and data.startswith(before, start)
                    and data.endswith(after, start, stop)):
                break
            said = data[start + len(before) : stop - len(after)]
            if (not said or said.translate(None, PLAIN)
                    or not data.startswith(SIZES[stop - start - 2], at)):
                break
            self.event_ns.append(at_ns)
            events += 1
            at = stop
            if at == len(data):
                self.coalesced += events - 1
                break
        return at

    def feed_body(self, data: bytes, at_ns: int) -> None:
        """Take one read of a body without its framing."""
        if self._body is None:
            self._body = Body(Head(("HTTP/1.1", "200", ""), {}), True)
        before = len(self.event_ns)
        try:
            self._payload(data, at_ns)
        except WireError as error:
            self._fail("malformed", str(error), at_ns)
        self.coalesced += max(0, len(self.event_ns) - before - 1)

    def eof(self, at_ns: int) -> None:
        """The peer closed: whatever is still held counts, and nothing more will come."""
        if self._body is not None and self._body.until_close:
            self._body.complete = True
        before = len(self.event_ns)
        self._end(at_ns)
        self.coalesced += max(0, len(self.event_ns) - before - 1)

    def _feed(self, data: bytes, at_ns: int) -> None:
        try:
            for piece in self._unframed(data):
                for plain in self._inflater.feed(piece) if self._inflater else (piece,):
                    self._payload(plain, at_ns)
            if self._body is not None and self._body.fault:
                raise WireError(self._body.fault)
            if self._body is not None and self._body.complete:
                self._end(at_ns)
        except WireError as error:
            self._fail("malformed", str(error), at_ns)
        self.steady = (self._sniffed and self._document is None and self._body is not None
                       and not (self.complete or self._inflater)
                       and self._body.idle and self._sse.idle)

    def _unframed(self, data: bytes) -> List[bytes]:
        """The body's pieces in one read."""
        if self._broken or self._over:
            self._broken = self._broken or bool(data)  # nothing is due: the next reply would be off
            return []
        if self._body is None:
            self._head += data
            if not self._take_heads():
                return []
            data = bytes(self._head)
            self._head.clear()
        return self._body.feed(data) if self._body is not None else []

    def _take_heads(self) -> bool:
        """Pass interim heads and read the final one; whether it was there."""
        while True:
            head = take_head(self._head)
            if head is None:
                return False
            if not head.start[0].startswith("HTTP/"):
                raise WireError("a request where a reply was due")
            if not head.start[1].startswith("1"):
                self._begin(head)
                return True
            self._interim += 1
            if head.start[1] == "101" or self._interim > INTERIM_MAX:
                raise WireError(f"{head.start[1]} instead of a reply")

    def _begin(self, head: Head) -> None:
        """Set out what the final head says about the body to come."""
        self.status, self.reason = int(head.start[1]), printable(head.start[2])
        self.headers = head.headers
        options = header_list(head.headers, "connection")
        persists = head.start[0] == "HTTP/1.1" or "keep-alive" in options
        self._keep_alive = persists and "close" not in options
        self._body = Body(head, True)
        codings = [c for n in CODING_HEADERS for c in header_list(head.headers, n)]
        self.encoding = ", ".join(c for c in codings if c not in ("identity", "chunked"))
        if self.encoding:
            self._inflater = Inflater(self.encoding)
        if not self._success or "html" in head.headers.get("content-type", "").lower():
            self._document, self._sniffed = bytearray(), True

    @property
    def _success(self) -> bool:
        return self.status is None or 200 <= self.status < 300

    # -- the body --

    def _payload(self, data: bytes, at_ns: int) -> None:
        """Body bytes, unframed and inflated: part of a stream or, by their start, a document."""
        if not self._sniffed:
            self._lead += data
            start = self._lead.lstrip(BOM + b" \t\r\n")
            if not start and len(self._lead) < KIB:
                return
            data, self._sniffed = bytes(self._lead), True
            self._document = bytearray() if start.startswith(DOCUMENT_STARTS) else None
        if self._document is None:
            for event in self._sse.feed(data):
                self._dispatch(event, at_ns)
            return
        room = (DOCUMENT_MAX if self._success else ERROR_BODY_MAX) - len(self._document)
        self._document += data[:room]
        if len(data) > room:
            if self._success:
                raise WireError(f"an answer of over {DOCUMENT_MAX} bytes that is not a stream")
            self._end(at_ns)  # enough of an error page

    def _dispatch(self, event: Sse, at_ns: int) -> None:
        """Sort out one event; chunks go on to _message. Nothing counts after the stream's end."""
        data = event.data.strip()
        if data == b"[DONE]" and event.name != b"error":
            self.done = True
            self.finish_ns = at_ns if self.finish_ns is None else self.finish_ns
            self.end_ns = at_ns if self.end_ns is None else self.end_ns
        if self.done or self._failed:
            return
        if event.name == b"error":
            self._report(data or event.comment.strip() or b"event: error", at_ns)
        elif event.name == STRAY:
            self._report(data, at_ns, certain=False)
        elif data not in (b"", b"null") and event.name not in HEARTBEATS:
            self._begun = True
            self._message(data, at_ns)

    def _message(self, data: bytes, at_ns: int) -> None:
        """Count one chunk. The hot path: each line here costs every event."""
        try:
            text = data.decode("utf-8", "replace")
            message, end = raw_decode(text)
            if end != len(text):
                raise ValueError("more than one JSON value")
            choices = message.get("choices")
            choice, kind = {}, NOTHING
            if choices:
                choice = choices[0]
                if choice.get("index"):  # only choice 0 counts, wherever it stands
                    choice = next((c for c in choices if not c.get("index")), {})
                kind = chunk_output(choice)
                if kind:
                    self.event_ns.append(at_ns)
                    if kind == ANSWER and self.answer_ns is None:
                        self.answer_ns = at_ns
                elif self.event_ns:
                    self.closed_ns = at_ns
                elif self.opened_ns is None:
                    self.opened_ns = at_ns
            usage = message.get("usage")
            if kind == ANSWER and not usage and len(choices) == 1:
                self._around = around(data, choice)
            if choice.get("finish_reason"):
                self._finish(choice["finish_reason"], at_ns)
                usage = usage or choice.get("usage") or (message.get("x_groq") or {}).get("usage")
            if usage:
                self._count(usage)
            if not choices or message.get("error"):
                self._report(data, at_ns, certain=False)
        except MISSHAPEN:
            if self._over and (data.startswith(b"{") or b"[DONE]".startswith(data)):
                return  # the end of the body has cut it short
            self.bad_events += 1
            if not self.error:
                self.server_message = printable(data[:KIB].decode("utf-8", "replace"))
                self.error = f"not a chunk: {self.server_message}"[:MESSAGE_MAX]

    def _finish(self, reason: Any, at_ns: int) -> None:
        reason = reason.get("type") if type(reason) is dict else reason
        self.finish_reason = printable(str(reason), 60)
        self.finish_ns = at_ns if self.finish_ns is None else self.finish_ns

    def _count(self, usage: Any) -> None:
        """Keep the integers of a usage object; null and absent ones leave what was known."""
        if type(usage) is not dict:
            return
        details = usage.get("prompt_tokens_details")
        cached = token_count(details.get("cached_tokens")) if type(details) is dict else None
        n_in = token_count(usage.get("prompt_tokens"))
        n_out = token_count(usage.get("completion_tokens"))
        self.n_in = self.n_in if n_in is None else n_in
        self.n_out = self.n_out if n_out is None else n_out
        self.cached_tokens = self.cached_tokens if cached is None else cached

    def _report(self, data: bytes, at_ns: int, certain: bool = True) -> None:
        """Fail the stream if `data` is an error object, or anyhow when that is certain."""
        found, code, said = error_of(parsed(data))
        if found or certain:
            self.server_message = said or printable(data[:KIB].decode("utf-8", "replace"))
            why = f"{code}: {self.server_message}" if code else self.server_message
            self._fail("stream_error", why[:MESSAGE_MAX], at_ns)

    def _fail(self, failed: str, why: str, at_ns: int) -> None:
        """Settle the class, once; after [DONE] a fault costs only the connection."""
        self.steady = False
        self._broken = self._broken or failed == "malformed"
        if not (self.done or self._failed):
            self._failed, self.error = failed, why
        self.end_ns = at_ns if self.end_ns is None else self.end_ns

    def _end(self, at_ns: int) -> None:
        """The body is over, or as much of it as will come."""
        if self._over:
            return
        self._over = True
        self.end_ns = at_ns if self.end_ns is None else self.end_ns
        if self._document is not None:
            self._read_document(bytes(self._document), at_ns)
            return
        for event in self._sse.feed(b"\n\n"):  # the last one, though its blank line never came
            self._dispatch(event, at_ns)

    def _read_document(self, document: bytes, at_ns: int) -> None:
        """Learn what there is to learn from a body that is not a stream."""
        document = document.lstrip(BOM + b" \t\r\n")
        document = document[5:].strip() if document.startswith(b"data:") else document
        message = parsed(document)
        found, _, said = error_of(message)
        if self._success and found:
            self._report(document, at_ns)
        elif self._success and type(message) is dict:
            self._count(message.get("usage"))
            choices = message.get("choices")
            choice = choices[0] if type(choices) is list and choices else None
            if type(choice) is dict and choice.get("finish_reason"):
                self._finish(choice["finish_reason"], at_ns)
        else:
            line = document[: 4 * KIB].partition(b"\n")[0].decode("utf-8", "replace")
            self.server_message = said or printable(line)

    # -- the verdict --

    def outcome(self) -> Tuple[str, str]:
        """The class of the request and why, from what has arrived; for when it is over."""
        if self._body is None:
            at = "inside the head" if self._head else "before any reply"
            failed = self._failed or ("truncated" if self._head else "empty")
            return failed, self.error or f"the connection closed {at}"
        if 300 <= (self.status or 0) < 400:
            to = redirect_host(self.headers.get("location", "")) or "nowhere"
            return "redirect", f"{self.status} to {to}"
        if not self._success:
            said = f"{self.status} {self.server_message or self.reason}".strip()[:MESSAGE_MAX]
            wait = printable(self.headers.get("retry-after", ""), 60)  # seconds or a date
            return "http_status", said + (f" (Retry-After: {wait})" if wait else "")
        said = f": {self.server_message}" if self.server_message else ""
        kind = self.headers.get("content-type", "no content-type")
        other = bool(self._document) or (not self._sse.known and bool(self._sse.stray))
        finish = FINISH_CLASS.get(self.finish_reason or "", "")
        verdicts = (  # the first that holds
            (self._failed, self._failed, self.error),
            (self.bad_events, "malformed", self.error),
            (other, "not_stream", f"{printable(kind, 60)} instead of an event stream{said}"),
            (finish, finish, f"finish_reason {self.finish_reason}"),
            (not self._begun and not self.done, "empty", "a body without events"),
            (self.finish_ns is None, "truncated", "no finish_reason and no [DONE]"),
            (not self.event_ns and not self.n_out, "empty", "an end without output"),
        )
        return next(((name, why) for holds, name, why in verdicts if holds), ("ok", ""))


class TalkingReply(Reply):
    """A reply that keeps its answer, for the next turn; each event is then decoded twice."""

    __slots__ = ("said",)

    def __init__(self) -> None:
        """Nothing said."""
        super().__init__()
        self.said = ""

    def _message(self, data: bytes, at_ns: int) -> None:
        super()._message(data, at_ns)
        self._around = NO_TWIN  # else the next like it would not come here
        with contextlib.suppress(*MISSHAPEN):
            choice = raw_decode(data.decode("utf-8", "replace"))[0]["choices"][0]
            text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            if len(self.said) < EVENT_MAX:
                self.said += text if type(text) is str else joined([{"content": text}])


# ---- 6. The driver -----------------------------------------------------------------------------
# The only client sockets. The kernel stamps what arrives, so a read's time does not depend on when
# it is looked at. An ordinary read is parsed at once: where it differs from an earlier one in its
# text alone (Reply.feed), that costs less than keeping it, whose bytes would leave the cache.

READABLE, WRITABLE = 1, 2  # as in selectors
READ, READ_WRITE, READY_MOST = 1, 5, 4096  # as in epoll, where 4 is room to write
SO_TIMESTAMPNS = 35  # Linux: each read then carries the time at which the kernel received it,
STAMP = struct.Struct("qq")  # as seconds and nanoseconds of the real-time clock
READ_BYTES = 65536
TURN = 64  # sockets handled between looks at what is due
SWEEP_S = 0.25  # how often timeouts are looked at
BATCH_S = 0.0005  # reads wait so long for company: the kernel's stamps do not mind
GRACE_S = 2.0  # after finish_reason for usage and [DONE] (they may never come)
EVENTS_SPARE = 100_000  # output events past twice the tokens asked for: a server gone wild
DRAIN_S = 2.0  # after Ctrl-C for what is in flight
LINGER_S = 0.1  # after [DONE] for the end of the body, which frees the connection
IDLE_S = 3.5  # servers drop idle connections after 5 s; ours go first


class Timeouts(NamedTuple):
    """The four limits on a request [s]."""

    connect_s: float
    first_output_s: float  # from sent to the first output event
    stall_s: float  # between output events
    total_s: float  # from sent to the end


class Record:
    """What became of one request. Times in ns of the monotonic clock; None where there is none."""

    __slots__ = ("answer_ns", "cached_tokens", "closed_ns", "coalesced", "connect_s", "cls",
                 "due_ns", "error",
                 "event_ns", "events", "finish_reason", "first_ns", "id", "itl_max_s", "last_ns",
                 "measured", "mix_class", "said", "session", "turn", "n_in", "n_in_planned",
                 "n_out", "n_out_estimated", "n_out_planned", "opened_ns", "ready_ns", "resent",
                 "reused", "run", "sent_ns", "status", "end_ns")

    def __init__(self, planned: Planned, run: int, due_ns: int, measured: bool) -> None:
        """A request that is due and not yet sent."""
        self.id, self.run, self.due_ns, self.measured = planned.id, run, due_ns, measured
        self.n_in_planned = None if planned.prompt >= 0 or planned.turn else planned.n_in
        self.n_out_planned, self.said = planned.n_out, ""
        self.mix_class, self.session, self.turn = planned.cls, planned.session, planned.turn
        self.cls, self.error = "unsent", "never sent"
        self.ready_ns = due_ns  # when the load let it go: due, or when a slot came free
        self.sent_ns: Optional[int] = None
        self.first_ns: Optional[int] = None
        self.last_ns: Optional[int] = None
        self.answer_ns: Optional[int] = None
        self.opened_ns: Optional[int] = None
        self.closed_ns: Optional[int] = None
        self.end_ns: Optional[int] = None
        self.n_in: Optional[int] = None
        self.n_out: Optional[int] = None
        self.n_out_estimated = False
        self.cached_tokens: Optional[int] = None
        self.status: Optional[int] = None
        self.finish_reason: Optional[str] = None
        self.connect_s: Optional[float] = None  # of a connection opened for it after it was due
        self.itl_max_s: Optional[float] = None
        self.events = self.coalesced = 0
        self.resent = self.reused = False
        self.event_ns = array.array("q")

    def take(self, reply: Reply) -> None:
        """Copy what the reply holds."""
        stamps = reply.event_ns
        self.stamp(stamps)
        self.answer_ns, self.coalesced = reply.answer_ns, reply.coalesced
        self.opened_ns, self.closed_ns = reply.opened_ns, reply.closed_ns
        self.n_in, self.cached_tokens = reply.n_in, reply.cached_tokens
        self.n_out, self.n_out_estimated = reply.n_out, False
        if self.n_out is None and stamps:
            self.n_out, self.n_out_estimated = len(stamps), True
        self.status, self.finish_reason = reply.status, reply.finish_reason
        self.said = getattr(reply, "said", "")

    def stamp(self, stamps: array.array[int]) -> None:
        """Keep the times of its output events, and what follows from them."""
        self.event_ns, self.events = stamps, len(stamps)
        if stamps:
            self.first_ns, self.last_ns = stamps[0], stamps[-1]
        if len(stamps) > 1:
            self.itl_max_s = max(map(operator.sub, stamps[1:], stamps)) * NS

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.cls == "ok"

    def since(self, end_ns: Optional[int], start_ns: Optional[int]) -> Optional[float]:
        """Seconds between two of its times; None where either is absent or it failed."""
        if end_ns is None or start_ns is None or not self.ok:
            return None
        return (end_ns - start_ns) * NS

    @property
    def tpot_s(self) -> Optional[float]:
        """(E2E - TTFT) / (n_out - 1); None when fewer than two tokens came."""
        if not self.ok or self.first_ns is None or self.last_ns is None or (self.n_out or 0) < 2:
            return None
        return (self.last_ns - self.first_ns) * NS / ((self.n_out or 0) - 1)

    @property
    def gaps_us(self) -> List[int]:
        """The gaps between its output events, in order [us, rounded]."""
        return [(b - a + 500) // 1000 for a, b in zip(self.event_ns, self.event_ns[1:])]

    def row(self, start_ns: int) -> Dict[str, Any]:
        """The line of requests.jsonl, times in seconds from the run's start."""
        def at(stamp: Optional[int]) -> Optional[float]:
            return None if stamp is None else round((stamp - start_ns) * NS, 9)

        def span(value: Optional[float]) -> Optional[float]:
            return None if value is None else round(value, 9)

        return {
            "run": self.run, "id": self.id, "class": self.cls, "error": self.error or None,
            "due_s": at(self.due_ns), "sent_s": at(self.sent_ns), "first_s": at(self.first_ns),
            "last_s": at(self.last_ns), "n_in": self.n_in, "n_in_planned": self.n_in_planned,
            "n_out": self.n_out, "n_out_estimated": self.n_out_estimated,
            "n_out_planned": self.n_out_planned, "events": self.events,
            **{key: span(seconds_of(self)) for key, seconds_of in LATENCIES.items()},
            "itl_max_s": span(self.itl_max_s), "cached_tokens": self.cached_tokens,
            "status": self.status, "finish_reason": self.finish_reason,
            "measured": self.measured, "coalesced": self.coalesced,
            "connect_s": span(self.connect_s), "reused": self.reused, "resent": self.resent,
            "mix_class": self.mix_class or None,
            "session": None if self.session < 0 else self.session,
            "turn": None if self.session < 0 else self.turn,
            "ready_s": at(self.ready_ns), "answer_s": at(self.answer_ns),
            "opened_s": at(self.opened_ns), "closed_s": at(self.closed_ns),
            "end_s": at(self.end_ns), "gaps_us": self.gaps_us}


LATENCIES: Dict[str, Callable[[Record], Optional[float]]] = {  # of a request [s]; None: no success
    "ttft_s": lambda r: r.since(r.first_ns, r.due_ns),
    "ttft_from_sent_s": lambda r: r.since(r.first_ns, r.sent_ns),
    "ttfo_s": lambda r: r.since(r.answer_ns, r.due_ns),
    "tpot_s": lambda r: r.tpot_s,
    "e2e_s": lambda r: r.since(r.last_ns, r.due_ns),
    "e2e_from_sent_s": lambda r: r.since(r.last_ns, r.sent_ns)}


class Clocks:
    """The monotonic clock, and the way from kernel stamps (real-time clock) to it."""

    def __init__(self) -> None:
        """Take the offset between the clocks for the first time."""
        self.offset_ns = self._measure()
        self.jump_ns = 0

    @staticmethod
    def _measure() -> int:
        """real-time - monotonic [ns], from the tightest of a few pairs of readings."""
        best = None
        for _ in range(5):
            before, real, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
            if best is None or after - before < best[0]:
                best = (after - before, real - (before + after) // 2)
        return best[1] if best else 0

    def monotonic_ns(self, ancillary: Sequence[Tuple[int, int, bytes]]) -> int:
        """The kernel's stamp that came with a read, on the monotonic clock."""
        seconds, nanoseconds = STAMP.unpack(ancillary[0][2])
        return int(seconds * 1_000_000_000 + nanoseconds - self.offset_ns)

    def retake(self) -> None:
        """Follow the real-time clock; remember the largest jump beyond a slew."""
        offset = self._measure()
        self.jump_ns = max(self.jump_ns, abs(offset - self.offset_ns))
        self.offset_ns = offset


class Channel:
    """One socket of the driver and the request on it, if any."""

    __slots__ = ("fd", "idle_ns", "opened_ns", "out", "reads", "receive", "record",
                 "reply", "request", "reserved", "sock", "state", "tls", "uses")

    def __init__(self, sock: socket.socket, now_ns: int) -> None:
        """A socket that has begun to connect."""
        self.sock, self.fd, self.opened_ns = sock, sock.fileno(), now_ns
        self.receive = sock.recvmsg_into
        self.state = CONNECTING
        self.tls: Optional[Tls] = None
        self.out: bytes = b""
        self.reads: List[bytes] = []  # of a proxy's answer, while the tunnel is opened
        self.record: Optional[Record] = None
        self.reserved: Optional[Tuple[Outgoing, Record]] = None  # a request sent once more
        self.reply: Optional[Reply] = None
        self.request: bytes = b""
        self.uses, self.idle_ns = 0, now_ns


CONNECTING, HANDSHAKE, IDLE, BUSY, LINGERING = range(5)  # lingering: over, but for the framing


class Tls:
    """TLS over memory, so that the socket is still read by recvmsg with its stamps."""

    def __init__(self, context: Any, host: str) -> None:
        """A client's side of a handshake that has not begun."""
        import ssl
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.object = context.wrap_bio(self.incoming, self.outgoing, server_hostname=host)
        self.want = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
        self.error = ssl.SSLError

    def decrypt(self, data: bytes) -> bytes:
        """The plain bytes that these encrypted ones complete."""
        self.incoming.write(data)
        plain = []
        while True:
            try:
                part = self.object.read(READ_BYTES)
            except self.want:
                break
            if not part:
                break
            plain.append(part)
        return b"".join(plain)

    def speaks(self, data: bytes) -> bool:
        """Whether these bytes mean more than TLS's own business, such as session tickets."""
        try:
            return bool(self.decrypt(data))
        except self.error:
            return True

    def encrypt(self, data: bytes) -> bytes:
        """The encrypted bytes of these plain ones."""
        if data:
            self.object.write(data)
        return self.outgoing.read()


class Selecting:
    """What selectors offers, under the names and bits of epoll: for systems that have no epoll."""

    def __init__(self) -> None:
        """Nothing registered."""
        import selectors
        self.selector = selectors.DefaultSelector()
        self.unregister, self.close = self.selector.unregister, self.selector.close

    def register(self, fd: int, mask: int) -> None:
        """Wait for data to read, and for room to write where the mask says so."""
        self.selector.register(fd, READABLE | WRITABLE if mask == READ_WRITE else READABLE)

    def modify(self, fd: int, mask: int) -> None:
        """Wait for that from now on."""
        self.selector.modify(fd, READABLE | WRITABLE if mask == READ_WRITE else READABLE)

    def poll(self, timeout_s: float, _most: int) -> Sequence[Tuple[int, int]]:
        """(descriptor, mask) of what is ready."""
        return [(key.fd, 4 if mask & WRITABLE else READ)
                for key, mask in self.selector.select(timeout_s)]


SECRET_MIN = 6  # characters; a shorter value is no secret, and may be a part of any word


class Wiring(NamedTuple):
    """How to reach the target: the address pinned, TLS, a proxy in between, the limits."""

    family: int
    address: Optional[Tuple[Any, ...]]  # None: the name did not resolve
    dns_error: str
    tls: Any  # an ssl.SSLContext, or None
    proxy_connect: bytes  # the CONNECT request that opens a tunnel, or b""
    timeouts: Timeouts
    secrets: Tuple[str, ...]  # of headers and the query: taken out of whatever a server says

    def redacted(self, text: str) -> str:
        """What a server said, without the keys that it may have echoed."""
        for secret in self.secrets:
            text = text.replace(secret, "[key]")
            for n in range(len(secret) - 1, SECRET_MIN - 1, -1):  # what the server said was cut
                if text.endswith(secret[:n]):
                    text = text[:-n] + "[key]"
                    break
        return text


class ClientHealth:
    """How well the client itself did: what the verdict needs."""

    def __init__(self) -> None:
        """Nothing seen."""
        self.lag_s = array.array("d")  # sent - ready, a request
        self.busy_s = array.array("d")  # one turn of the loop between two waits
        self.cpu_s = self.wall_s = 0.0
        self.events = self.coalesced = self.resent = self.clock_jump_ns = 0
        self.opened = self.reused = 0
        self.kernel_stamps = self.real_time = False
        self.peak_rss_bytes = 0
        self.interrupted = self.died = False
        self.turns_lost = 0  # that never came, since an earlier one of their session failed


class Outgoing(NamedTuple):
    """A planned request with its bytes, and what has been said in its session."""

    planned: Planned
    data: bytes
    talk: Optional[Rows] = None


AHEAD_BYTES = 64 * MIB  # of requests made before the run; the others when nothing else is due
CALM_NS = 50_000_000  # to the next due time, so that making one more delays nothing


class Source:
    """The requests of one plan, or of a worker's share of it, as they come due."""

    def __init__(self, plan: Plan, run: int, make: Callable[..., bytes], shard: int = 0,
                 shards: int = 1, all_over: Callable[[bool], bool] = bool) -> None:
        """all_over(mine) tells whether every worker's measured requests have ended."""
        self.plan, self.run, self.make, self.all_over = plan, run, make, all_over
        self.windowed = plan.load.num_requests is None
        share = plan.requests[shard::shards]
        self.left, self.held = len(share), 0  # known and not made yet; bytes of those in ready
        self.ready: Deque[Outgoing] = collections.deque()
        later = (p for n, p in enumerate(schedule(plan.load, plan.work, plan.seed))
                 if n >= len(plan.requests) and n % shards == shard) if self.windowed else ()
        self.more: Iterator[Outgoing] = (self.made(p) for p in itertools.chain(share, later))
        self.turns: List[Tuple[int, int, Outgoing]] = []  # due after an answer, the next first
        self.talking: Dict[int, Outgoing] = {}  # in flight, of sessions
        self.sessions = 0  # begun and not over
        self.lost = 0
        self.turn_next = False
        self.start_ns, self.over = 0, False
        while self.left and self.held < AHEAD_BYTES:
            self.prepare()

    def made(self, planned: Planned) -> Outgoing:
        """A request with its bytes."""
        if planned.session < 0:
            return Outgoing(planned, self.make(planned))
        talk: Rows = []
        return Outgoing(planned, self.make(planned, talk), talk)

    def prepare(self) -> None:
        """Make one more request, if there is one."""
        out = next(self.more, None)
        self.left -= 1
        if out is not None:
            self.held += len(out.data)
            self.ready.append(out)

    def next_ns(self, now_ns: int, driver: Union[Driver, Virtual]) -> Optional[int]:
        """When the next request is due [ns]; None when no more will come by itself."""
        if self.windowed:
            past_s = (now_ns - self.start_ns) * NS - self.plan.window_s[1]
            self.over = past_s >= 0 and self.all_over(driver.measured_open == 0)
            if self.over or past_s > self.plan.tail_s:
                return None
        if not self.ready:
            self.prepare()
        first_ns = self.first_ns(now_ns, driver.load.concurrency) if self.ready else None
        turn_ns = self.turns[0][0] if self.turns else None
        self.turn_next = turn_ns is not None and (first_ns is None or turn_ns <= first_ns)
        due_ns = turn_ns if self.turn_next else first_ns
        if self.left > 0 and self.held < AHEAD_BYTES and (due_ns or 0) - now_ns > CALM_NS:
            self.prepare()
        return due_ns

    def first_ns(self, now_ns: int, limit: Optional[int]) -> Optional[int]:
        """When the next request that waits for no answer is due [ns]."""
        if self.plan.load.closed:
            return None if limit is not None and self.sessions >= limit else now_ns
        return self.start_ns + round(self.ready[0].planned.due_s / NS)

    def take(self, now_ns: int) -> Tuple[Outgoing, Record]:
        """The next request, and its record."""
        if self.turn_next:
            due_ns, _, out = heapq.heappop(self.turns)
        else:
            out = self.ready.popleft()
            self.held -= len(out.data)
            due_ns = (now_ns if self.plan.load.closed
                      else self.start_ns + round(out.planned.due_s / NS))
            self.sessions += out.talk is not None
        if out.talk is not None:
            self.talking[out.planned.id] = out
        measured = self.plan.measured((due_ns - self.start_ns) * NS)
        return out, Record(out.planned, self.run, due_ns, measured)

    def ended(self, record: Record) -> None:
        """A request is over: the next turn of its session is due after the think time."""
        out = self.talking.pop(record.id, None)
        if out is None or out.talk is None:
            return
        follow, said, record.said = out.planned.follow, record.said, ""
        if follow is None or not record.ok or record.end_ns is None:
            self.sessions -= 1
            if follow is not None and record.cls not in ("cancelled", "unsent"):
                self.lost += len(list(turns_of([follow])))
            return
        talk = [*out.talk, {"role": "assistant", "content": said}]
        # end_ns is when the loop woke: bytes that came while it read are stamped later
        due_ns = max(record.end_ns, record.last_ns or record.end_ns) + round(follow.due_s / NS)
        made = Outgoing(follow, self.make(follow, talk), talk)
        heapq.heappush(self.turns, (due_ns, follow.id, made))

    def unsent(self, now_ns: int) -> List[Record]:
        """Records of what was due by now and never let go."""
        found = []
        while not self.plan.load.closed:
            self.turn_next = bool(self.turns) and self.turns[0][0] <= now_ns
            if not self.turn_next and not (self.ready and (self.first_ns(now_ns, None) or 0)
                                           <= now_ns):
                break
            found.append(self.take(now_ns)[1])
        self.ready.clear()
        self.turns.clear()
        self.more, self.left = iter(()), 0
        return found


class Driver:
    """Sends the requests of one plan (or its share) and records what comes back."""

    def __init__(self, wiring: Wiring, host: str, load: Load,
                 on_record: Callable[[Record], None]) -> None:
        """on_record gets each record as its request ends."""
        self.wiring, self.host, self.load = wiring, host, load
        self.on_record = on_record
        self.poller: Any = select.epoll() if hasattr(select, "epoll") else Selecting()
        self.clocks, self.health = Clocks(), ClientHealth()
        self.conns: Dict[int, Channel] = {}
        self.idle: List[Channel] = []
        self.opening = 0
        self.waiting: Deque[Tuple[Outgoing, Record]] = collections.deque()
        self.in_flight = 0
        self.done = self.failed = self.measured_open = 0
        self.reply: Callable[[], Reply] = Reply
        self.stopped_ns: Optional[int] = None
        self.no_room = "client_limit", ""  # class and reason when no connection can be opened
        self.view = memoryview(bytearray(READ_BYTES))
        self.buffers = [self.view]

    # -- connections

    def open(self, now_ns: int) -> Optional[Channel]:
        """Begin one more connection; None with `no_room` set when the machine has no more."""
        wiring = self.wiring
        try:
            sock = socket.socket(wiring.family, socket.SOCK_STREAM)
        except OSError as error:
            self.no_room = "client_limit", f"no descriptor for a connection: {error.strerror}"
            return None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform.startswith("linux"):
            try:
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
                self.health.kernel_stamps = True
            except OSError:
                self.health.kernel_stamps = False
        conn = Channel(sock, now_ns)
        code = sock.connect_ex(wiring.address or ())
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            sock.close()
            self.no_room = (("client_limit", "no port for another connection (all are in use or in "
                             "TIME_WAIT)") if code == errno.EADDRNOTAVAIL
                            else ("refused", os.strerror(code)))
            return None
        self.conns[conn.fd] = conn
        self.poller.register(conn.fd, READ_WRITE)
        self.opening += 1
        self.health.opened += 1
        return conn

    def close(self, conn: Channel) -> None:
        """Drop a connection."""
        if self.conns.pop(conn.fd, None) is None:
            return
        if conn.state < IDLE:
            self.opening -= 1
        elif conn.state == IDLE:
            self.idle.remove(conn)
        self.poller.unregister(conn.fd)
        conn.sock.close()

    def advance(self, conn: Channel, now_ns: int) -> None:
        """A connecting socket has become ready: connected, refused, or on with the handshake."""
        if conn.state == CONNECTING:
            code = conn.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                kind = "connect_timeout" if code == errno.ETIMEDOUT else "refused"
                self.lost(conn, kind, os.strerror(code), now_ns)
                return
            conn.state, conn.out = HANDSHAKE, self.wiring.proxy_connect
        if conn.state == HANDSHAKE:
            self.shake(conn, now_ns)

    def shake(self, conn: Channel, now_ns: int) -> None:
        """Go on opening: the proxy's tunnel, then TLS; idle when nothing is left to do."""
        if conn.tls is None:
            if self.wiring.proxy_connect and not (
                    self.flush(conn) and self.tunnelled(conn, now_ns)):
                return
            conn.tls = Tls(self.wiring.tls, self.host) if self.wiring.tls else None
        if conn.tls is not None:
            try:
                if not self.tls_step(conn):
                    return
            except conn.tls.error as error:
                reason = getattr(error, "verify_message", "") or error.reason or str(error)
                self.lost(conn, "tls", f"{reason}; --ca-file or --insecure", now_ns)
                return
            except OSError as error:
                self.lost(conn, "tls", error.strerror or str(error), now_ns)
                return
        conn.state, conn.idle_ns = IDLE, now_ns
        self.opening -= 1
        self.poller.modify(conn.fd, READ)
        if conn.reserved is not None:
            self.send(conn, *conn.reserved, now_ns)
        else:
            self.idle.append(conn)

    def tunnelled(self, conn: Channel, now_ns: int) -> bool:
        """Whether the proxy has opened the tunnel; its refusal ends the connection."""
        try:
            data = conn.sock.recv(READ_BYTES)
            conn.reads.append(data)
            head = take_head(bytearray(b"".join(conn.reads)))
        except BlockingIOError:
            return False
        except OSError as error:
            self.lost(conn, "refused", f"proxy: {error.strerror}", now_ns)
            return False
        except WireError as error:
            self.lost(conn, "malformed", f"proxy: {error}", now_ns)
            return False
        if head is None and data:
            return False
        conn.reads = []
        if head is None or head.start[1][:1] != "2":
            self.lost(conn, "refused", f"proxy answered {' '.join(head.start[1:]) if head else ''}",
                      now_ns)
            return False
        return True

    def tls_step(self, conn: Channel) -> bool:
        """Exchange what the handshake has; True when it is done. Raises ssl.SSLError, OSError."""
        tls = conn.tls
        assert tls is not None
        while True:
            done = False
            with contextlib.suppress(*tls.want):
                tls.object.do_handshake()
                done = True
            conn.out += tls.outgoing.read()
            if conn.out:
                with contextlib.suppress(BlockingIOError):
                    conn.out = conn.out[conn.sock.send(conn.out):]
            if done and not conn.out:
                return True
            try:
                data = conn.sock.recv(READ_BYTES)
            except BlockingIOError:
                self.poller.modify(conn.fd, READ_WRITE if conn.out else READ)
                return False
            if not data:
                raise OSError(errno.ECONNRESET, "closed during the TLS handshake")
            tls.incoming.write(data)

    def lost(self, conn: Channel, kind: str, why: str, now_ns: int) -> None:
        """A connection could not be opened: the longest waiting request fails with it."""
        self.close(conn)
        if conn.reserved is not None:
            self.finish(conn.reserved[1], kind, why, now_ns)
        elif self.waiting:
            self.finish(self.waiting.popleft()[1], kind, why, now_ns)

    # -- sending

    def due(self, out: Outgoing, record: Record, now_ns: int) -> None:
        """A request is due and the load lets it go: send it, or have it wait for a connection."""
        record.ready_ns = max(record.due_ns, now_ns) if self.load.concurrency else record.due_ns
        self.in_flight += 1
        if self.wiring.address is None:
            self.finish(record, "dns", self.wiring.dns_error, now_ns)
            return
        conn = self.fresh()
        if conn is not None:
            self.send(conn, out, record, now_ns)
        else:
            self.waiting.append((out, record))
            if self.opening < len(self.waiting) and self.open(now_ns) is None \
                    and not self.opening:
                self.waiting.pop()
                self.finish(record, *self.no_room, now_ns)

    def fresh(self) -> Optional[Channel]:
        """An idle connection on which nothing waits to be read, not even its end; others close."""
        while self.idle:
            conn = self.idle.pop()
            try:
                data = conn.sock.recv(READ_BYTES)
            except BlockingIOError:
                return conn
            except OSError:
                data = b""
            if data and conn.tls is not None and not conn.tls.speaks(data):
                return conn
            self.idle.append(conn)  # where close() looks for it
            self.close(conn)
        return None

    def send(self, conn: Channel, out: Outgoing, record: Record, now_ns: int) -> None:
        """Put a request on a connection that stands."""
        conn.state, conn.record, conn.reply, conn.request = BUSY, record, self.reply(), out.data
        conn.reads = []
        record.reused = conn.uses > 0
        self.health.reused += record.reused
        conn.uses += 1
        if conn.opened_ns > record.due_ns:
            record.connect_s = (now_ns - conn.opened_ns) * NS
        data = conn.tls.encrypt(out.data) if conn.tls else out.data
        stamp_ns = time.perf_counter_ns()
        try:
            written = conn.sock.send(data)
        except BlockingIOError:
            written = 0
        except OSError as error:
            if record.reused and not record.resent:
                self.resend(conn, now_ns)
            else:
                self.end(conn, "truncated", error.strerror or str(error), now_ns)
            return
        if record.sent_ns is None:
            record.sent_ns = stamp_ns
            self.health.lag_s.append(max(0, stamp_ns - record.ready_ns) * NS)
        if written < len(data):
            conn.out = data[written:]
            self.poller.modify(conn.fd, READ_WRITE)

    def flush(self, conn: Channel) -> bool:
        """Write what is left to write; True when all of it is out."""
        if conn.out:
            try:
                conn.out = conn.out[conn.sock.send(conn.out):]
            except BlockingIOError:
                return False
            except OSError:
                conn.out = b""  # the answer may still be read: a 413, say, before all was sent
        if not conn.out and conn.state == BUSY:
            self.poller.modify(conn.fd, READ)
        return not conn.out

    # -- receiving

    def take(self, conn: Channel, data: bytes, at_ns: int, now_ns: int) -> None:
        """Hand a read to its reply; end the request when the reply is complete."""
        reply = conn.reply
        if reply is None:
            return
        if conn.tls is not None:
            try:
                data = conn.tls.decrypt(data)
            except conn.tls.error as error:
                self.end(conn, "malformed", f"TLS: {error}", now_ns)
                return
        reply.feed(data, at_ns)
        if reply.complete:
            self.end(conn, *reply.outcome(), now_ns)

    def gone(self, conn: Channel, why: str, now_ns: int) -> None:
        """The server closed or reset a connection."""
        if conn.state in (IDLE, LINGERING):
            self.close(conn)
        elif conn.state < IDLE:
            self.lost(conn, "tls" if conn.tls else "refused", why or "closed by the server", now_ns)
        elif conn.record is not None and conn.reply is not None:
            if not conn.reply.started and conn.record.reused and not conn.record.resent:
                self.resend(conn, now_ns)
                return
            conn.reply.eof(now_ns)
            kind, text = conn.reply.outcome()
            if not conn.reply.started:
                kind, text = "truncated", why or "closed before it answered"
            elif why and kind in ("truncated", "empty"):
                kind, text = "truncated", why
            self.end(conn, kind, text, now_ns)

    def resend(self, conn: Channel, now_ns: int) -> None:
        """Once more on a new connection: the server had closed this one before a byte came."""
        record, data = conn.record, conn.request
        assert record is not None
        conn.record = conn.reply = None
        self.close(conn)
        record.resent = True
        self.health.resent += 1
        planned = Planned(record.id, 0.0, 0, record.n_out_planned, 0)
        fresh = self.open(now_ns)
        if fresh is None:
            self.finish(record, *self.no_room, now_ns)
        else:
            fresh.reserved = Outgoing(planned, data), record

    def end(self, conn: Channel, kind: str, why: str, now_ns: int) -> None:
        """The request on a connection is over; keep the connection if it can carry another."""
        record, reply = conn.record, conn.reply
        assert record is not None and reply is not None
        record.take(reply)
        kind, why = judged(record, self.wiring.timeouts, kind, why)
        conn.record, conn.request, conn.idle_ns = None, b"", now_ns
        if kind in ("stalled", "timeout", "cancelled") or conn.out:
            self.close(conn)
        elif reply.lingering:
            conn.state = LINGERING
        else:
            self.settle(conn)
        self.finish(record, kind, why, now_ns)

    def settle(self, conn: Channel) -> None:
        """The answer's framing is over too: the connection is free for the next, or closed."""
        reusable = conn.reply is not None and conn.reply.reusable
        conn.reply = None
        if reusable:
            conn.state = IDLE
            self.idle.append(conn)
        else:
            self.close(conn)

    def finish(self, record: Record, kind: str, why: str, now_ns: int) -> None:
        """Class a request and hand its record on."""
        record.cls, record.end_ns = kind, now_ns
        record.error = "" if kind == "ok" else self.wiring.redacted(why)
        self.in_flight -= 1
        self.done += 1
        self.failed += kind != "ok"
        self.measured_open -= record.measured
        self.health.events += record.events
        self.health.coalesced += record.coalesced
        self.on_record(record)

    # -- time

    def sweep(self, now_ns: int) -> None:
        """Look at every limit: connecting, first output, stall, total, grace, idle."""
        limits = self.wiring.timeouts
        while self.waiting and (now_ns - self.waiting[0][1].ready_ns) * NS > limits.connect_s:
            self.finish(self.waiting.popleft()[1], "connect_timeout", "no connection to send it on "
                        f"within {limits.connect_s:g} s", now_ns)
        for conn in list(self.conns.values()):
            if conn.state < IDLE:
                if (now_ns - conn.opened_ns) * NS > limits.connect_s:
                    self.lost(conn, "connect_timeout", f"no connection within "
                              f"{limits.connect_s:g} s", now_ns)
                continue
            if conn.state != BUSY:
                if (now_ns - conn.idle_ns) * NS > (IDLE_S if conn.state == IDLE else LINGER_S):
                    self.close(conn)
                continue
            record, reply = conn.record, conn.reply
            if record is None or reply is None or record.sent_ns is None:
                continue
            age_s = (now_ns - record.sent_ns) * NS
            if reply.finish_ns is not None and (now_ns - reply.finish_ns) * NS > GRACE_S:
                reply.eof(now_ns)
                self.end(conn, *reply.outcome(), now_ns)
            elif len(reply.event_ns) > 2 * record.n_out_planned + EVENTS_SPARE:
                self.end(conn, "malformed", f"{len(reply.event_ns)} output events for "
                         f"{record.n_out_planned} tokens asked for", now_ns)
            elif age_s > limits.total_s:
                self.end(conn, "timeout", NOT_OVER.format(limits.total_s), now_ns)
            elif not reply.event_ns and age_s > limits.first_output_s:
                self.end(conn, "timeout", NO_OUTPUT.format(limits.first_output_s), now_ns)
            elif reply.event_ns and (now_ns - reply.event_ns[-1]) * NS > limits.stall_s:
                self.end(conn, "stalled", STALLED.format(limits.stall_s), now_ns)

    def top_up(self, spare: int, now_ns: int) -> None:
        """Keep so many connections ready beyond those in use, a few at a time."""
        missing = max(spare - len(self.idle), len(self.waiting)) - self.opening
        for _ in range(min(missing, 32)):
            if self.wiring.address is None or self.open(now_ns) is None:
                return

    def prepare(self, wanted: int) -> None:
        """Open connections before the clock starts, so that the first requests find them."""
        end_ns = time.perf_counter_ns() + round(self.wiring.timeouts.connect_s / NS)
        while len(self.idle) < wanted and time.perf_counter_ns() < end_ns:
            if not self.opening:
                self.top_up(wanted, time.perf_counter_ns())
                if not self.opening:
                    return
            ready = len(self.idle)
            self.handle(self.poller.poll(0.1, READY_MOST), time.perf_counter_ns())
            if not self.opening and len(self.idle) == ready:
                return  # refused: the requests will find out for themselves

    def drive(self, source: Source, spare: int, progress: Callable[[Driver], None],
              stop: Callable[[], bool]) -> None:
        """Run until the source has ended and nothing is in flight, or until stopped."""
        clock, poll = time.perf_counter_ns, self.poller.poll
        busy_s, sweep_ns, second_ns, woke_ns = self.health.busy_s.append, 0, 0, clock()
        batch = self.health.kernel_stamps
        ready: Sequence[Tuple[int, int]] = ()
        while True:
            now_ns = clock()
            next_ns = self.dispatch(source, now_ns, stop)
            if now_ns >= sweep_ns:
                self.sweep(now_ns)
                self.top_up(spare, now_ns)
                progress(self)
                sweep_ns = now_ns + round(SWEEP_S / NS)
                if now_ns >= second_ns:
                    self.clocks.retake()
                    second_ns = now_ns + round(1 / NS)
            if next_ns is None and (not self.in_flight or (source.over and not self.stopped_ns)):
                return  # in window mode, when all measured ones have ended
            rested_ns = clock()
            busy_s((rested_ns - woke_ns) * NS)
            wait_s = (min(sweep_ns, next_ns or sweep_ns) - rested_ns) * NS
            if batch and wait_s > 2 * BATCH_S and len(ready) < TURN:
                time.sleep(BATCH_S)
                wait_s -= BATCH_S
            # epoll counts in milliseconds: wait short of the deadline, then sleep the rest
            ready = poll(wait_s - MS if wait_s > MS else 0.0, READY_MOST)
            if not ready and 0 < wait_s <= MS:
                time.sleep(min(wait_s, BATCH_S))
            woke_ns = clock()
            for first in range(0, len(ready), TURN):  # what is due does not wait for a burst
                if first:
                    self.dispatch(source, clock(), stop)
                self.handle(ready[first:first + TURN], woke_ns)
            if not ready:
                self.handle((), woke_ns)

    def handle(self, ready: Sequence[Tuple[int, int]], now_ns: int) -> None:
        """Go on with sockets that are ready. The hot path: one read and its stamp."""
        conns, buffers, view = self.conns, self.buffers, self.view
        offset_ns, unpack = self.clocks.offset_ns, STAMP.unpack
        for fd, mask in ready:
            conn = conns.get(fd)
            if conn is None:
                continue
            if mask != 1 or conn.state < IDLE:
                if conn.state < IDLE:
                    if conn.opened_ns < now_ns:  # else a number taken anew, not this socket's news
                        self.advance(conn, now_ns)
                    continue
                if mask & 4:
                    self.flush(conn)
                if mask == 4:
                    continue
            try:  # into one buffer for all: a read of its own would hold 64 KiB until parsed
                size, ancillary, _, _ = conn.receive(buffers, 64)
            except BlockingIOError:
                continue
            except OSError as error:
                self.gone(conn, error.strerror or str(error), now_ns)
                continue
            data, reply = bytes(view[:size]), conn.reply
            if not size or conn.record is None or reply is None:
                self.after(conn, data, now_ns)
                continue
            if ancillary:
                seconds, nanoseconds = unpack(ancillary[0][2])
                at_ns = seconds * 1_000_000_000 + nanoseconds - offset_ns
            else:
                at_ns = time.perf_counter_ns()
            if not reply.steady or conn.tls is not None:
                self.take(conn, data, at_ns, now_ns)
                continue
            reply.feed(data, at_ns)
            if not reply.steady and reply.complete:
                self.end(conn, *reply.outcome(), now_ns)
        while self.waiting:  # requests that wait for a connection, and connections come ready
            fresh = self.fresh()
            if fresh is None:
                return
            self.send(fresh, *self.waiting.popleft(), time.perf_counter_ns())

    def after(self, conn: Channel, data: bytes, now_ns: int) -> None:
        """Bytes, or the close, on a connection whose request is over."""
        if conn.state == IDLE and data and conn.tls is not None and not conn.tls.speaks(data):
            return  # session tickets
        if conn.state != LINGERING or not data or conn.reply is None:
            self.gone(conn, "", now_ns)
            return
        if conn.tls is not None:
            try:
                data = conn.tls.decrypt(data)
            except conn.tls.error:
                self.close(conn)
                return
        conn.reply.feed(data, now_ns)
        if not conn.reply.lingering:
            self.settle(conn)

    def dispatch(self, source: Source, now_ns: int, stop: Callable[[], bool]) -> Optional[int]:
        """Let go what is due; when the next one is [ns], None when there is none."""
        if stop():
            return self.stopping(source, now_ns)
        limit = self.load.concurrency
        for _ in range(TURN):
            due_ns = source.next_ns(now_ns, self)
            if due_ns is None or due_ns > now_ns:
                return due_ns
            if limit is not None and self.in_flight >= limit:
                return now_ns + round(SWEEP_S / NS)
            out, record = source.take(now_ns)
            self.measured_open += record.measured
            self.due(out, record, now_ns)
        return now_ns

    def stopping(self, source: Source, now_ns: int) -> Optional[int]:
        """After Ctrl-C: nothing more is sent; what is in flight gets a moment."""
        if self.stopped_ns is None:
            self.stopped_ns = now_ns
            self.health.interrupted = True
            for record in source.unsent(now_ns):
                self.in_flight += 1
                self.measured_open += record.measured
                self.finish(record, "unsent", "interrupted before it was sent", now_ns)
            while self.waiting:
                self.finish(self.waiting.popleft()[1], "unsent", "interrupted before it was sent",
                            now_ns)
        if (now_ns - self.stopped_ns) * NS > DRAIN_S:
            self.cancel_all("interrupted", now_ns)
        return None

    def cancel_all(self, why: str, now_ns: int) -> None:
        """End whatever is in flight."""
        for conn in [c for c in self.conns.values() if c.state == BUSY]:
            self.end(conn, "cancelled", why, now_ns)
        while self.waiting:
            self.finish(self.waiting.popleft()[1], "cancelled", why, now_ns)


NO_OUTPUT, NOT_OVER = "no output within {:g} s (first output)", "not over within {:g} s (total)"
STALLED = "no output for {:g} s (stall)"


def judged(record: Record, limits: Timeouts, kind: str, why: str) -> Tuple[str, str]:
    """The class of a request, its times considered: a success past a limit is none."""
    sent_ns = record.sent_ns
    if kind != "ok" or sent_ns is None or record.first_ns is None or record.last_ns is None:
        return kind, why
    if record.first_ns < sent_ns:
        return "malformed", "answered before it was asked"
    if (record.first_ns - sent_ns) * NS > limits.first_output_s:
        return "timeout", NO_OUTPUT.format(limits.first_output_s)
    if (record.itl_max_s or 0) > limits.stall_s:
        return "stalled", STALLED.format(limits.stall_s)
    if (record.last_ns - sent_ns) * NS > limits.total_s:
        return "timeout", NOT_OVER.format(limits.total_s)
    return kind, why


# ---- 7. Workers and runs -----------------------------------------------------------------------
# One process by default. With --workers N the plan is shared out by index after it is made, so
# that the arrival process is the same for any N; each worker is a fork with a driver of its own.


class Outcome(NamedTuple):
    """What one run brought: its plan, its records, the health of the clients."""

    plan: Plan
    records: List[Record]
    health: List[ClientHealth]
    start_ns: int
    calibration: Calibration
    warnings: List[str]
    rows: Sequence[Facts] = ()  # readings of the server's metrics, section 7b
    simulated: bool = False  # on the virtual clock: nothing was measured


class Journal:
    """requests.jsonl, a line the moment a request ends; several processes may append."""

    def __init__(self, folder: Optional[str]) -> None:
        """None: nothing is kept on disk."""
        self.fd, self.failed = None, ""
        if folder:
            path = os.path.join(folder, "requests.jsonl")
            try:
                self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
            except OSError as error:
                raise UserError(f"--out: {path}: {error.strerror}; name another folder") from None

    def add(self, record: Record, start_ns: int) -> None:
        """One line, in one write."""
        if self.fd is None:
            return
        row = record.row(start_ns)
        line = (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()
        try:
            written = os.write(self.fd, line)
            if written < len(line):  # no torn line stays behind
                os.ftruncate(self.fd, os.fstat(self.fd).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.failed, self.fd = f"requests.jsonl is not complete: {error.strerror}", None


def interrupt() -> Callable[[], bool]:
    """Take SIGINT and SIGTERM over: whether one came, to stop sending; a second ends at once."""
    came: List[int] = []

    def on(sign: int, _: Any) -> None:
        if came:
            os._exit(130)
        came.append(sign)

    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, on)
    return lambda: bool(came)


class Progress:
    """One line on stderr, on a terminal only: rate, in flight, done, failed, time left."""

    def __init__(self, label: str, seconds: Optional[float], wanted: bool) -> None:
        """seconds of the run, where they are known."""
        self.shown = wanted and bool(sys.stderr) and sys.stderr.isatty()
        self.label, self.seconds, self.next_s = label, seconds, 0.0
        self.start_s = time.perf_counter()

    def __call__(self, driver: Driver) -> None:
        """Redraw the line, at most twice a second."""
        now_s = time.perf_counter()
        if not self.shown or now_s < self.next_s:
            return
        self.next_s = now_s + 0.5
        left = "" if self.seconds is None else (
            f", {max(0.0, self.seconds - now_s + self.start_s):.0f} s left")
        sys.stderr.write(f"\r\x1b[K{self.label}: {driver.in_flight} in flight, {driver.done} done, "
                         f"{driver.failed} failed{left}")
        sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class Running(NamedTuple):
    """What every run of a command line shares."""

    target: Target
    wiring: Wiring
    workers: int
    journal: Journal
    stop: Callable[[], bool]
    salt: int
    unique: bool
    engine: Optional[Engine] = None  # simulate: on this engine, under the virtual clock
    scraper: Optional[Scraper] = None
    shard: Tuple[int, int] = (0, 1)  # which of how many machines' shares of the plan
    start_ns: int = 0  # when the plan's clock is to begin; 0: when ready

    def begin(self, soonest_ns: int = 0) -> int:
        """Wait for the start of the plan's clock, and tell it [ns]."""
        at_ns = max(self.start_ns, soonest_ns, time.perf_counter_ns())
        while time.perf_counter_ns() < at_ns and not self.stop():
            time.sleep(max(0.0, min(0.1, (at_ns - time.perf_counter_ns()) * NS)))
        return at_ns


def run_plan(plan: Plan, run: int, r: Running, calibration: Calibration,
             expected_e2e_s: float) -> Outcome:
    """Send a plan and gather its records, over one process or several."""
    if r.engine is not None:
        return simulate_plan(plan, run, r.engine, r)
    prompts = Prompts(plan.seed, r.salt + run, r.unique, calibration, plan.work)
    models = models_of(plan.work, r.target)

    def make(planned: Planned, talk: Optional[Rows] = None) -> bytes:
        return encode(models.get(planned.cls, r.target), prompts, planned,
                      shared_of(planned, plan.work), run, talk)

    rate = plan.load.rate_rps
    expected = plan.load.concurrency or (len(plan.requests) if rate is None
                                         else math.ceil(1.3 * rate * expected_e2e_s) + 4)
    expected = min(expected, len(plan.requests), 4096)
    spare = min(64, max(2, math.ceil(0.1 * rate))) if rate else 0
    if plan.work.trace:
        spare = max(spare, min(1024, most_at_once(plan)))
        expected = max(expected, spare)
    expected, spare = (-(-n // r.shard[1]) for n in (expected, spare))
    before = r.scraper.take() if r.scraper else []
    if r.workers == 1:
        records: List[Record] = []
        health, start_ns = work_share(
            plan, run, r, make, (0, 1), (expected, spare), records, bool,
            (lambda: r.begin(soon())) if plan.work.trace else r.begin)
        outcome = Outcome(plan, records, [health], start_ns, calibration, [])
    else:
        outcome = fork_workers(plan, run, r, make, (expected, spare), calibration)
    return outcome._replace(rows=before[-1:] + (r.scraper.take() if r.scraper else []))


def real_time(wanted: bool) -> bool:
    """Real-time priority on or off, for a trace; whether that was allowed (root, CAP_SYS_NICE)."""
    try:
        if wanted and len(os.sched_getaffinity(0)) < 2:
            return False  # it would take the only core
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK if wanted else os.SCHED_OTHER
        os.sched_setscheduler(0, policy, os.sched_param(int(wanted)))
    except (AttributeError, OSError):
        return False
    return True


def soon() -> int:
    """A start [ns] that finds the loop running: a trace's first requests are often due at 0."""
    return time.perf_counter_ns() + round(READY_S / NS)


def work_share(plan: Plan, run: int, r: Running, make: Callable[..., bytes],
               shard: Tuple[int, int], connections: Tuple[int, int], records: List[Record],
               all_over: Callable[[bool], bool], start: Callable[[], int]
               ) -> Tuple[ClientHealth, int]:
    """One process's share of a plan; start(), called when ready, tells when that begins [ns]."""
    (number, of), (first, step) = shard, r.shard
    source = Source(plan, run, make, first + step * number, step * of, all_over)
    load = plan.load
    for place, parts in (r.shard, shard):
        if load.concurrency is not None:
            share = load.concurrency // parts + (place < load.concurrency % parts)
            load = load._replace(concurrency=share)

    def keep(record: Record) -> None:
        source.ended(record)
        records.append(record)
        r.journal.add(record, source.start_ns)

    driver = Driver(r.wiring, r.target.host, load, keep)
    driver.reply = TalkingReply if plan.work.turns else Reply
    expected, spare = connections
    driver.prepare(-(-expected // of))
    gc.collect()
    gc.freeze()
    gc.disable()
    seconds = plan.window_s[1] if load.num_requests is None else (
        plan.requests[-1].due_s if plan.requests and not load.closed else None)
    progress = Progress(("warm-up" if run < 0 else f"rate {load.label}")
                        + (f" (worker 1 of {of})" if of > 1 else ""), seconds, number == 0)
    source.start_ns = start()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    driver.health.real_time = bool(plan.work.trace) and real_time(True)
    try:
        driver.drive(source, -(-spare // of), progress, r.stop)
        driver.cancel_all("after the measured window", time.perf_counter_ns())
    finally:
        if driver.health.real_time:
            real_time(False)
        gc.enable()
        gc.unfreeze()
        progress.clear()
    health = driver.health
    health.turns_lost = source.lost
    health.cpu_s, health.wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    health.clock_jump_ns = driver.clocks.jump_ns
    for conn in list(driver.conns.values()):
        driver.close(conn)
    driver.poller.close()
    health.peak_rss_bytes = peak_rss_bytes()
    return health, source.start_ns


def peak_rss_bytes() -> int:
    """The most memory this process has held [B]; Linux's ru_maxrss starts at the parent's."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next(int(line.split()[1]) * KIB for line in status if line[:6] == "VmHWM:")
    except (OSError, StopIteration):
        import resource
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else KIB)


READY_S = 0.05  # from the last worker's readiness to the start of the plan's clock


class Board:
    """What workers and their parent tell each other: a page of memory that all of them see."""

    def __init__(self, workers: int) -> None:
        """Nobody ready, nobody over, no start time."""
        import mmap
        page = memoryview(mmap.mmap(-1, 8 + 2 * workers))
        self.start_ns = page[:8].cast("q")  # one number: the clock's start; 0 until it is settled
        self.ready = page[8:8 + workers]  # of each worker: it has prepared its share, or died
        self.over = page[8 + workers:]  # whether its measured requests have ended


def fork_workers(plan: Plan, run: int, r: Running, make: Callable[..., bytes],
                 connections: Tuple[int, int], calibration: Calibration) -> Outcome:
    """Share a plan out over forks; they start together and hand their records back by pipe."""
    board, pipes, children = Board(r.workers), {}, []
    parent = os.getpid()
    try:
        for number in range(r.workers):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    worker_main(plan, run, r._replace(stop=lambda: r.stop() or (
                        os.getppid() != parent)), make, connections, (number, board, writer))
                os._exit(0)
            os.close(writer)
            children.append(child)
            pipes[reader] = number
    except OSError as error:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise UserError(f"--workers {r.workers}: cannot start so many processes: "
                        f"{error.strerror}") from None
    parts = gather(board, pipes, children, r)
    for child in children:
        os.waitpid(child, 0)
    outcome = Outcome(plan, [], [], board.start_ns[0], calibration, [])
    for number, data in sorted(parts.items()):
        share = plan.requests[r.shard[0] + r.shard[1] * number::r.shard[1] * r.workers]
        take_part(outcome, share, run, data)
    return outcome


def gather(board: Board, pipes: Dict[int, int], children: Sequence[int], r: Running
           ) -> Dict[int, bytes]:
    """What every worker hands back, and the start given when all are ready; the dead count so."""
    parts: Dict[int, bytes] = dict.fromkeys(pipes.values(), b"")
    told = False
    while pipes:
        if not board.start_ns[0] and all(board.ready):
            board.start_ns[0] = max(r.start_ns, soon())
        if r.stop() and not told:
            told = True
            for child in children:  # a signal for the parent alone is meant for all
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGINT)
        for reader in select.select(list(pipes), [], [], 0.1 if board.start_ns[0] else MS)[0]:
            data = os.read(reader, 1 << 20)
            parts[pipes[reader]] += data
            if not data:
                number = pipes.pop(reader)
                os.close(reader)
                board.ready[number] = board.over[number] = 1
    return parts


def take_part(outcome: Outcome, share: Sequence[Planned], run: int, data: bytes) -> None:
    """Add a worker's records; a worker that died leaves its requests cancelled, not forgotten."""
    import pickle
    try:
        records, health = pickle.loads(data)
    except (EOFError, pickle.UnpicklingError):
        health, records = ClientHealth(), []
        health.died = True
        for planned in share:
            due_ns = outcome.start_ns + round(planned.due_s / NS)
            record = Record(planned, run, due_ns, outcome.plan.measured(planned.due_s))
            record.cls, record.error = "cancelled", "its worker process died"
            records.append(record)
    outcome.records.extend(records)
    outcome.health.append(health)


def worker_main(plan: Plan, run: int, r: Running, make: Callable[..., bytes],
                connections: Tuple[int, int], place: Tuple[int, Board, int]) -> None:
    """A fork's life: prepare, wait for the common start, work, hand back."""
    import pickle
    number, board, writer = place
    records: List[Record] = []

    def start() -> int:
        board.ready[number] = 1
        while not board.start_ns[0] and not r.stop():
            time.sleep(MS / 2)
        return r.begin(board.start_ns[0])

    def all_over(mine: bool) -> bool:
        board.over[number] = mine
        return all(board.over)

    health, _ = work_share(plan, run, r, make, (number, r.workers), connections, records,
                           all_over, start)
    with os.fdopen(writer, "wb") as file:
        pickle.dump((records, health), file, protocol=pickle.HIGHEST_PROTOCOL)


def warm_up(number: int, work: Work, seed: int, r: Running) -> Tuple[Outcome, Calibration, float]:
    """Requests that are never counted: (outcome, calibration, E2E [s] expected on average).

    The first two are short, of two lengths: the line through them makes the others about as long
    as the run's prompts, and all of them together give the calibration.
    """
    quiet = r._replace(journal=Journal(None), workers=1, shard=(0, 1))
    made = max(2, min(32, round(work.n_out.mean)))
    length = max(8, round(work.n_in.mean))
    by_words = r.target.chat or not r.target.token_ids
    first = [min(length, 48), min(length, 16)] if by_words and number > 2 else []
    outcome, points = warm_pass(first, made, work, seed, quiet, ONE_A_WORD)
    guess = calibrate(points) or ONE_A_WORD
    rest = [length if i % 2 == 0 else max(4, length // 2) for i in range(number - len(first))]
    later, more = warm_pass(rest, made, work, seed + 1, quiet, guess)
    outcome.records.extend(later.records)
    calibration = (calibrate([*points, *more]) or guess) if by_words else ONE_A_WORD
    took_s = [(record.since(record.first_ns, record.sent_ns) or 0.0)
              + (record.tpot_s or 0.0) * work.n_out.mean for record in later.records if record.ok]
    return outcome, calibration, sum(took_s) / len(took_s) if took_s else 1.0


def warm_pass(lengths: Sequence[int], made: int, work: Work, seed: int, r: Running,
              calibration: Calibration) -> Tuple[Outcome, List[Tuple[int, int]]]:
    """Send prompts of these lengths, two at a time; (outcome, (words sent, tokens counted))."""
    requests = tuple(Planned(i, 0.0, n, made, 0) for i, n in enumerate(lengths))
    load = Load(None, 2, 1.0, len(requests), None, None)
    plain = work._replace(shared_prefix=0, trace=None, prompts=None, turns=None)
    plan = Plan(load, plain, seed, requests, (0.0, math.inf), "")
    targets = list(models_of(work, r.target).values()) or [r.target]
    prompts = Prompts(seed, r.salt - 1, True, calibration)
    records: List[Record] = []

    def make(planned: Planned) -> bytes:
        return encode(targets[planned.id % len(targets)], prompts, planned, 0, -1)

    if r.engine is not None:  # on another, that this one may begin cold
        return simulate_plan(plan, -1, r.engine.profile, r), []
    if requests:
        work_share(plan, -1, r, make, (0, 1), (2, 0), records, bool, time.perf_counter_ns)
    points = [(calibration.words_for(record.n_in_planned), record.n_in) for record in records
              if record.ok and record.n_in and record.n_in_planned]
    return Outcome(plan, records, [], 0, calibration, []), points


# ---- 7b. Server metrics ------------------------------------------------------------------------
# What the engine says of itself in the Prometheus text format, read once a second by a process of
# its own, so that the driver's clock is not disturbed.

SCRAPE_S, SCRAPE_LIMIT_S = 1.0, 2.0
ROWS_MAX, SERIES_MAX = 4096, 600  # readings kept of a run: past that every other one goes
# Our names against each engine's, without its prefix, a colon read as an underscore; a|b is the
# first that is there, a+b the sum. Sources: vLLM 0.32 vllm/v1/metrics/loggers.py, SGLang 0.5
# srt/observability/metrics_collector.py, TensorRT-LLM 1.3 tensorrt_llm/metrics/collector.py,
# llama.cpp server --metrics. SGLang has no draft counters, TensorRT-LLM counts no preemptions.
METRICS: Dict[str, Dict[str, str]] = {
    "vllm": {
        "running": "num_requests_running", "waiting": "num_requests_waiting",
        "kv_usage": "kv_cache_usage_perc|gpu_cache_usage_perc",
        "preemptions": "num_preemptions_total",
        "prefix_hits": "prefix_cache_hits_total|gpu_prefix_cache_hits_total",
        "prefix_queries": "prefix_cache_queries_total|gpu_prefix_cache_queries_total",
        "accepted": "spec_decode_num_accepted_tokens_total",
        "drafted": "spec_decode_num_draft_tokens_total", "drafts": "spec_decode_num_drafts_total",
        "ttft": "time_to_first_token_seconds"},
    "sglang": {
        "running": "num_running_reqs", "waiting": "num_queue_reqs", "kv_usage": "token_usage",
        "preemptions": "num_retracted_requests_total", "prefix_hits": "cached_tokens_total",
        "prefix_queries": "prompt_tokens_total", "spec_rate": "spec_accept_rate",
        "ttft": "time_to_first_token_seconds"},
    "trtllm": {
        "running": "num_requests_running", "waiting": "num_requests_waiting",
        "kv_usage": "kv_cache_utilization",
        "prefix_hits": "prompt_cached_tokens_total|kv_cache_reused_blocks_total",
        "prefix_queries": "prompt_tokens_total|kv_cache_reused_blocks_total"
                          "+kv_cache_missed_blocks_total",
        "accepted": "spec_decode_num_accepted_tokens_total|spec_decode_accepted_tokens_total",
        "drafted": "spec_decode_num_draft_tokens_total|spec_decode_drafted_tokens_total",
        "ttft": "time_to_first_token_seconds"},
    "llamacpp": {
        "running": "requests_processing", "waiting": "requests_deferred",
        "kv_usage": "kv_cache_usage_ratio", "prefix_hits": "prompt_tokens_cached_total",
        "prefix_queries": "prompt_tokens_total+prompt_tokens_cached_total",
        "accepted": "spec_decode_num_accepted_tokens_total",
        "drafted": "spec_decode_num_draft_tokens_total", "drafts": "spec_decode_num_drafts_total"},
}
CPU_METRIC = "process_cpu_seconds_total"  # of the process that answers: vLLM's API server
METRIC_STARTS = (*(name + mark for name in METRICS for mark in ":_"), CPU_METRIC)


def parse_metrics(text: str) -> Dict[str, Any]:
    """One reading under our names: requests, tokens, shares, seconds; {} where no engine is known.

    Series of several replicas are summed; of a share the largest counts. "ttft" is a histogram
    {sum, count, buckets: [[bound, count up to it], ...]}; "bad" counts lines that make no sense.
    """
    sample = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
    found: Dict[str, List[float]] = {}
    buckets: Dict[str, Dict[float, float]] = {}
    positions: Dict[int, float] = {}  # of drafts: tokens accepted there
    engine, bad = "", 0
    for line in text.split("\n"):
        if not line.startswith(METRIC_STARTS):
            continue
        match = sample.match(line.partition(" # ")[0])
        try:
            written, labels, text = match.groups() if match else ("", "", "")
            name, value = written.replace(":", "_"), float(text)
            bound = re.search(r'(?:^|[,\s])le="([^"]*)"', labels or "")
            if name.endswith("_bucket") and bound:
                counts = buckets.setdefault(name[:-len("_bucket")], {})
                counts[float(bound[1])] = counts.get(float(bound[1]), 0.0) + value
            if name.endswith("accepted_tokens_per_pos_total") and math.isfinite(value):
                place = int((labels or "").partition('position="')[2].partition('"')[0])
                positions[place] = positions.get(place, 0.0) + value
        except ValueError:
            bad += 1
            continue
        if math.isfinite(value):
            found.setdefault(name, []).append(value)
            engine = engine or (name.partition("_")[0] if name != CPU_METRIC else "")
    if not engine:
        return {}
    row: Dict[str, Any] = {"engine": engine, "bad": bad}
    if CPU_METRIC in found:
        row["cpu_s"] = found[CPU_METRIC][0]
    if positions:
        row["accepted_at"] = [positions.get(place, 0.0) for place in range(min(64, max(
            positions) + 1))]
    for ours, theirs in METRICS[engine].items():
        for choice in theirs.split("|"):
            names = [f"{engine}_{name}" for name in choice.split("+")]
            merge = max if ours in ("kv_usage", "spec_rate") else sum
            if all(name in found for name in names):
                row[ours] = sum(merge(found[name]) for name in names)
                break
            if names[0] in buckets and names[0] + "_count" in found:
                row[ours] = {"sum": sum(found.get(names[0] + "_sum", ())),
                             "count": sum(found[names[0] + "_count"]),
                             "buckets": sorted(map(list, buckets[names[0]].items()))}
    return row


def read_metrics(place: Target, wiring: Wiring) -> Dict[str, Any]:
    """One reading of the metrics at a place, with its time [ns]; {"why"} where there is none."""
    before_ns, why = time.perf_counter_ns(), ""
    row: Dict[str, Any] = {}
    try:
        status, body = fetch(place, wiring, place.path, SCRAPE_LIMIT_S)
        row = parse_metrics(body.decode("utf-8", "replace")) if status == "200" else {}
        why = "" if row else (f"answered {status}" if status != "200" else
                              "has no metrics of a known engine (SGLang: --enable-metrics)")
    except (OSError, WireError) as error:
        why = wiring.redacted(printable(getattr(error, "strerror", None) or str(error)))
    row["t_ns"] = (before_ns + time.perf_counter_ns()) // 2
    return {**row, "why": why} if why else row


def metrics_source(args: Any, target: Target, wiring: Wiring
                   ) -> Tuple[Optional[Callable[[], Dict[str, Any]]], Dict[str, Any]]:
    """(how to read the engine's metrics, None where there are none; {url, engine, why not}).

    Headers, which may hold a key, go to the target's own host alone, and never from https to http.
    Redirects are not followed.
    """
    if args.no_metrics:
        return None, {"url": None, "engine": None, "why": "--no-metrics"}
    if args.metrics_url:
        import urllib.parse
        scheme, host, port, *_ = parse_url(args.metrics_url, "chat")
        url = args.metrics_url if "//" in args.metrics_url else f"http://{args.metrics_url}"
        parts = urllib.parse.urlsplit(url)
        path = (parts.path or "/metrics") + (f"?{parts.query}" if parts.query else "")
        same = host == target.host and (scheme, target.scheme) != ("http", "https")
        place = target._replace(scheme=scheme, host=host, port=port, path=path,
                                headers=target.headers if same else ())
        places, known = [place], wiring.secrets
        wiring = wiring_of(args, place)
        wiring = wiring._replace(secrets=tuple(sorted({*known, *wiring.secrets}, key=len,
                                                      reverse=True)))
    else:  # trtllm-serve has JSON at /metrics
        stem = target.base_path[:-len("/v1")] if target.base_path.endswith("/v1") else ""
        places = [target._replace(path=path) for path in dict.fromkeys(
            (stem + "/metrics", stem + "/prometheus/metrics", "/metrics"))]
    why = ""
    for place in places:
        row = read_metrics(place, wiring)
        if row.get("engine"):
            return functools.partial(read_metrics, place, wiring), {
                "url": place.url, "engine": row["engine"], "why": None}
        why = why or f"{place.path.partition('?')[0]} {row['why']}"
        if "answered" not in row["why"] and "engine" not in row["why"]:
            break  # no use asking again
    if args.metrics_url:
        say(f"--metrics-url: {why}")
    return None, {"url": places[0].url, "engine": None, "why": why}


def scrape(sock: socket.socket, read: Callable[[], Dict[str, Any]]) -> None:
    """A fork's life: a reading a second, and, asked, one more and all of them as a line of JSON."""
    rows: Rows = []
    every_s, next_s = SCRAPE_S, math.inf
    while True:
        wait_s = None if next_s == math.inf else max(0.0, next_s - time.monotonic())
        asked = bool(select.select([sock], [], [], wait_s)[0])
        if asked and not sock.recv(1):
            return
        rows.append(read())
        if asked:
            sock.sendall(json.dumps(rows).encode() + b"\n")
            rows, every_s, next_s = [], SCRAPE_S, time.monotonic()
        elif len(rows) >= ROWS_MAX:
            rows, every_s = rows[::2], 2 * every_s
        next_s = max(next_s + every_s, time.monotonic())


class Scraper:
    """The process that reads the metrics; its readings are fetched between runs."""

    def __init__(self, read: Callable[[], Dict[str, Any]]) -> None:
        """Fork it; it waits until first asked."""
        self.sock, other = socket.socketpair()
        self.sock.settimeout(3 * SCRAPE_LIMIT_S)
        self.pid = os.fork()
        if not self.pid:
            with contextlib.suppress(BaseException):
                self.sock.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's last reading comes after
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.nice(5)
                scrape(other, read)
            os._exit(0)
        other.close()

    def take(self) -> Rows:
        """The readings since the last time, the newest made now; [] where the process is gone."""
        data = bytearray()
        try:
            self.sock.sendall(b"?")
            while not data.endswith(b"\n"):
                part = self.sock.recv(READ_BYTES)
                if not part:
                    return []
                data += part
            rows: Rows = json.loads(data)
            return rows
        except OSError:
            self.sock.close()  # an answer that comes too late would be taken for the next
            return []

    def stop(self) -> None:
        """End it."""
        self.sock.close()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def bucket_quantile(buckets: Sequence[Tuple[float, float]], share: float) -> Optional[float]:
    """A quantile of [(bound, count up to it)] as Prometheus has it; None past the last bound."""
    rank = share * buckets[-1][1] if buckets else 0.0
    below, start = 0.0, 0.0
    for bound, upto in buckets:
        if upto >= rank and upto > below:
            if math.isinf(bound):
                return None
            return start + (bound - start) * (rank - below) / (upto - below)
        below, start = max(below, upto), bound
    return None


def server_summary(outcome: Outcome) -> Optional[Dict[str, Any]]:
    """What the engine said of itself during a run; None without a reading.

    Gauges are over the readings inside the run, counters from the reading before it to the one
    after. beyond_engine_s: our mean TTFT from sent less the engine's, over the same first tokens;
    None where their numbers differ, since others then use the engine, or it is one of several.
    """
    known = [row for row in outcome.rows if "engine" in row]
    if not known:
        return None
    open_s, close_s = outcome.plan.window_s
    open_ns = outcome.start_ns + round(open_s / NS)
    ends = [r.end_ns for r in outcome.records if r.end_ns is not None]
    close_ns = (max(ends, default=open_ns) if math.isinf(close_s)
                else outcome.start_ns + round(close_s / NS))
    before = max((i for i, row in enumerate(known) if row["t_ns"] <= open_ns), default=0)
    after = min((i for i, row in enumerate(known) if row["t_ns"] >= close_ns),
                default=len(known) - 1)
    first, last = known[before], known[after]
    inside = [row for row in known if open_ns <= row["t_ns"] <= close_ns]

    def gauge(name: str) -> Dict[str, Optional[float]]:
        most = 1.0 if name in ("kv_usage", "spec_rate") else ABSURD
        values = [row[name] for row in inside if 0 <= row.get(name, -1) <= most]
        return {"mean": mean_of(values), "max": max(values, default=None)}

    def counted(name: str) -> Optional[float]:
        if name not in first or name not in last or last[name] < first[name]:
            return None
        return float(last[name] - first[name])

    hits, queries = counted("prefix_hits"), counted("prefix_queries")
    accepted, drafted = counted("accepted"), counted("drafted")
    cpu_s, wall_s = counted("cpu_s"), (last["t_ns"] - first["t_ns"]) * NS
    took = [(r.first_ns - r.sent_ns) * NS for r in outcome.records
            if r.first_ns is not None and r.sent_ns is not None
            and first["t_ns"] < r.first_ns <= last["t_ns"]]
    ttft, ours_s = histogram_delta(first, last), mean_of(took)
    equal = ttft["n"] is not None and abs(ttft["n"] - len(took)) <= max(1, 0.02 * len(took))
    step = -(-len(inside) // SERIES_MAX) or 1
    return {
        "engine": last["engine"], "samples": len(inside), "queue_depth": gauge("waiting"),
        "running": gauge("running"), "kv_usage": gauge("kv_usage"),
        "preemptions": counted("preemptions"),
        "prefix_hit_rate": hits / queries if hits is not None and queries and hits <= queries
        else None,
        "prefix_hits": hits, "prefix_queries": queries,
        "spec_acceptance": accepted / drafted if accepted is not None and drafted
        else gauge("spec_rate")["mean"] or None,
        "spec_drafts": counted("drafts"), "spec_drafted": drafted, "spec_accepted": accepted,
        "spec_accepted_at": [b - a for a, b in zip(first.get("accepted_at", ()),
                                                   last.get("accepted_at", ()))],
        "ttft_s": ttft, "client_ttft_s": {"n": len(took), "mean": ours_s},
        "beyond_engine_s": ours_s - ttft["mean"] if equal and ours_s is not None
        and ttft["mean"] is not None else None,
        "cpu_share": cpu_s / wall_s if cpu_s is not None and wall_s > 0 else None,
        "warnings": server_warnings(outcome.rows, first, last),
        "series": [[round((row["t_ns"] - outcome.start_ns) * NS, 3),
                    *(row.get(name) for name in ("running", "waiting", "kv_usage"))]
                   for row in inside[::step]]}


def histogram_delta(first: Facts, last: Facts) -> Dict[str, Any]:
    """{n, mean, p50, p99} [s] of the TTFTs between two readings, percentiles by the buckets."""
    none = dict.fromkeys(("n", "mean", "p50", "p99"))
    if "ttft" not in last or "ttft" not in first:
        return none
    old, new = first["ttft"], last["ttft"]
    n = new["count"] - old["count"]
    if n < 0:
        return none
    had = dict(map(tuple, old["buckets"]))
    buckets = [(bound, count - had.get(bound, 0.0)) for bound, count in new["buckets"]]
    return {"n": n, "mean": (new["sum"] - old["sum"]) / n if n else None,
            "p50": bucket_quantile(buckets, 0.5), "p99": bucket_quantile(buckets, 0.99)}


def server_warnings(rows: Sequence[Facts], first: Facts, last: Facts) -> List[str]:
    """What is doubtful about a run's readings."""
    lost = [row for row in rows if "engine" not in row]
    bad = max(row.get("bad", 0) for row in rows)
    reset = any(type(last.get(name)) is float and last[name] < value
                for name, value in first.items() if name in ("preemptions", "prefix_queries"))
    return [text for wrong, text in (
        (lost, f"{len(lost)} of {len(rows)} readings of the metrics failed"
         + (f": {lost[0].get('why')}" if lost else "")),
        (any(not 0 <= row.get("kv_usage", 0) <= 1 or min(
            row.get("running", 0), row.get("waiting", 0)) < 0 for row in rows),
         "gauges of the metrics are out of any range and were left out: they are not to be "
         "trusted"),
        (bad, f"{bad} lines of the metrics make no sense and were left out"),
        (reset, "counters of the metrics went down: the engine restarted, or a balancer answers "
         "for several")) if wrong]


def server_lines(server: Optional[Facts]) -> List[str]:
    """What the engine said, beside our own figures."""
    if server is None:
        return []

    def level(name: str, form: str) -> str:
        mean, most = (optional(server[name][key], form) for key in ("mean", "max"))
        return mean if mean == "-" else f"{mean} mean {most} max"

    ttft, ours = server["ttft_s"], server["client_ttft_s"]
    whose = "" if server.get("shard") is None else f" by shard {server['shard']}"
    lines = [f"  server ({server['engine']}; readings{whose}: {server['samples']}): running "
             f"{level('running', '{:.1f}')}, queue {level('queue_depth', '{:.1f}')}, KV use "
             f"{level('kv_usage', '{:.0%}')}, preemptions "
             f"{optional(server['preemptions'], '{:.0f}')}, prefix hits "
             f"{optional(server['prefix_hit_rate'], '{:.0%}')}, drafts accepted "
             f"{optional(server['spec_acceptance'], '{:.0%}')}"]
    if ttft["n"] and ours["n"]:
        lines.append(
            f"    its TTFT mean {in_ms(ttft['mean'])}, about p50 {in_ms(ttft['p50'])}, p99 "
            f"{in_ms(ttft['p99'])} ms; ours from sent, mean {in_ms(ours['mean'])}: " + (
                f"{in_ms(server['beyond_engine_s'])} ms are network, gateway and tokenisation"
                if server["beyond_engine_s"] is not None else
                f"not comparable, it counted {ttft['n']:.0f} first tokens and we {ours['n']} (other"
                " users, or one of several replicas)"))
    return lines + [f"    warning: {text}" for text in server["warnings"]]


# ---- 8. Statistics -----------------------------------------------------------------------------
# Pure. Percentiles are over offered requests, a failure counting as infinitely late; each carries
# a 95% interval from order statistics, the sample size reduced for autocorrelation.

Z95 = 1.959964
UNSTABLE_BLOCKS = 10  # of equal numbers of requests, for the trend test
# What a stable server does not show: so many sqrt of those in flight more, in a run of so many E2Es
# at least; TTFT longer by so much of the E2E.
CROWD_SD, E2ES_TO_JUDGE, TTFT_RISE = 3.0, 20, 0.1
LAG_P99_S, LAG_MAX_S = 0.010, 0.250  # send lag that the figures can bear
BUSY_P99_S = 0.010  # one turn of the loop
CPU_SHARE = 0.90  # of a core, a worker
COALESCED_SHARE = 0.05
LITTLE_GAP = 0.05
CURVE = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.965, 0.98,
         0.985, 0.99, 0.995, 0.998, 0.999)  # shares at which a distribution is drawn
CACHED_SPARE = 32  # tokens that a chat template may share between prompts that are unique


def mean_of(values: Sequence[float]) -> Optional[float]:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def percentile(ordered: Sequence[float], share: float) -> Optional[float]:
    """Linear interpolation between order statistics, numpy's default; None of nothing.

    >>> percentile([10.0, 20.0, 30.0], 0.99)
    29.8
    """
    if not ordered:
        return None
    place = (len(ordered) - 1) * share
    low = int(place)
    part = place - low
    if part < 1e-9 or low + 1 >= len(ordered):
        return ordered[low]
    if math.isinf(ordered[low + 1]):
        return math.inf
    return ordered[low] + part * (ordered[low + 1] - ordered[low])


def autocorrelation_factor(values: Sequence[float], most_lags: int = 200) -> float:
    """1 + 2 * sum of the autocorrelations of the values' ranks up to the first negative one.

    The sample is worth n / factor independent values. Ranks take infinite values too. Source:
    Geyer, "Practical Markov Chain Monte Carlo" (1992), initial positive sequence, simplified.
    """
    n = len(values)
    if n < 8:
        return 1.0
    ordered, left, right = sorted(values), bisect.bisect_left, bisect.bisect_right
    ranks = [(left(ordered, v) + right(ordered, v) - n) / 2 for v in values]  # ties share theirs
    variance = sum(x * x for x in ranks)
    if not variance:
        return 1.0
    total = 1.0
    for lag in range(1, min(most_lags, n // 4)):
        rho = sum(map(operator.mul, ranks, ranks[lag:])) / variance
        if rho < Z95 / math.sqrt(n):
            break
        total += 2 * rho
    return max(1.0, min(total, n / 2))


def binomial_ranks(n: int, share: float) -> Tuple[Optional[int], Optional[int]]:
    """Ranks (from 1) of the order statistics that enclose a quantile with 95%; None: no such one.

    The lower is the largest l with P(X < l) <= 0.025, the upper the smallest u with
    P(X < u) >= 0.975, X binomial(n, share). p99 has an upper bound from n = 368 on.
    Source: David and Nagaraja, Order Statistics, 7.1.
    """
    if n < 1:
        return None, None
    if n > 20_000:  # normal approximation, far in its range
        half = Z95 * math.sqrt(n * share * (1 - share))
        return max(1, math.floor(n * share - half)), min(n, math.ceil(n * share + half) + 1)
    log_share, log_rest = math.log(share), math.log1p(-share)
    log_n = math.lgamma(n + 1)
    below, low, high = 0.0, None, None
    for k in range(n):  # below = P(X < k + 1) after the addition
        below += math.exp(log_n - math.lgamma(k + 1) - math.lgamma(n - k + 1)
                          + k * log_share + (n - k) * log_rest)
        if below <= 0.025:
            low = k + 1
        if below >= 0.975:
            high = k + 1
            break
    return low, high


def interval(ordered: Sequence[float], share: float, factor: float
             ) -> Tuple[Optional[float], Optional[float]]:
    """95% interval of a percentile; None on a side that the sample cannot bound."""
    n = len(ordered)
    below, above = (
        None if rank is None else ordered[min(n - 1, max(0, round(rank * factor) - 1))]
        for rank in binomial_ranks(int(n / factor), share))
    return below, above


def spread_of(values: Sequence[float], factor: Optional[float] = None) -> Dict[str, Any]:
    """{n, mean, p50, p90, p99, max, p50_low ... p99_high, n_effective} of values as they were due.

    In the values' own unit; *_low and *_high bound a percentile with 95%, None where the sample
    cannot. Infinite values are failures: they count in the percentiles, and the mean is of the
    others.
    """
    if not values:
        return {"n": 0, **dict.fromkeys(("mean", "p50", "p90", "p99", "max", "p50_low", "p50_high",
                                         "p99_low", "p99_high", "n_effective"))}
    ordered = sorted(values)
    factor = autocorrelation_factor(values) if factor is None else factor
    finite = [v for v in values if not math.isinf(v)]
    found = {"n": len(values), "mean": math.fsum(finite) / len(finite) if finite else None,
             "p50": percentile(ordered, 0.5), "p90": percentile(ordered, 0.9),
             "p99": percentile(ordered, 0.99), "max": ordered[-1]}
    for name, share in (("p99", 0.99), ("p50", 0.5)):
        found[f"{name}_low"], found[f"{name}_high"] = interval(ordered, share, factor)
    return {**found, "n_effective": len(values) / factor}


def itl_spread(records: Records) -> Dict[str, Any]:
    """The gaps between output events, pooled over successes, to a microsecond.

    Gaps of one request move together, so the sample is worth n / design effect: the variance
    between requests of how many of their gaps pass the p99, over that of independent gaps.
    """
    bins: Dict[int, int] = {}  # gaps by microseconds: a long run has millions
    for record in records:
        for gap_ns, times in collections.Counter(gaps_ns(record)).items():
            gap_us = (gap_ns + 500) // 1000
            bins[gap_us] = bins.get(gap_us, 0) + times
    n = sum(bins.values())
    if not n:
        return spread_of([])
    ladder = sorted(bins)
    reached = list(itertools.accumulate(bins[us] for us in ladder))

    def at(rank: int) -> float:
        return ladder[bisect.bisect_left(reached, min(n, max(1, rank)))] * US

    def quantile(share: float) -> float:
        place = (n - 1) * share
        low = at(int(place) + 1)
        return low + (place - int(place)) * (at(int(place) + 2) - low)

    limit_us = quantile(0.99) / US
    beyond = (n - reached[bisect.bisect_right(ladder, limit_us) - 1]) / n
    is_beyond = (math.floor(limit_us) * 1000 + 500).__le__  # in ns: what rounds to more
    clustered = sum((sum(map(is_beyond, gaps_ns(r))) - beyond * max(0, r.events - 1)) ** 2
                    for r in records)
    independent = n * beyond * (1 - beyond)
    effect = max(1.0, clustered / independent) if independent else 1.0
    low, high = binomial_ranks(int(n / effect), 0.99)
    return {"n": n, "mean": sum(us * c for us, c in bins.items()) * US / n, "p50": quantile(0.5),
            "p90": quantile(0.9), "p99": quantile(0.99), "max": ladder[-1] * US,
            "curve": [quantile(share) for share in CURVE],
            "p99_low": at(round(low * effect)) if low else None,
            "p99_high": at(round(high * effect)) if high else None, "n_effective": n / effect}


def gaps_ns(record: Record) -> Iterator[int]:
    """The gaps between a record's output events [ns]."""
    return map(operator.sub, record.event_ns[1:], record.event_ns)


class Slo(NamedTuple):
    """What a request must meet, each in seconds, None where not asked; and by what share."""

    ttft_s: Optional[float]
    tpot_s: Optional[float]
    e2e_s: Optional[float]
    attainment: float
    classes: Mapping[str, Slo] = {}  # of --mix: each request is judged by its own

    @property
    def any(self) -> bool:
        """Whether anything is asked."""
        return self[:3] != (None, None, None) or any(slo.any for slo in self.classes.values())

    def met(self, record: Record) -> bool:
        """Whether a request succeeded, with visible output, and met every one."""
        if record.mix_class in self.classes:
            return self.classes[record.mix_class].met(record)
        ttft_s = record.since(record.first_ns, record.due_ns)
        return ttft_s is not None and self.within(ttft_s, record.tpot_s,
                                                  record.since(record.last_ns, record.due_ns))

    def within(self, ttft_s: float, tpot_s: Optional[float], e2e_s: Optional[float]) -> bool:
        """Whether latencies [s] meet every limit; what is None is not judged."""
        return ((self.ttft_s is None or ttft_s <= self.ttft_s)
                and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)
                and (self.e2e_s is None or e2e_s is None or e2e_s <= self.e2e_s))


def slo_statement(slo: Slo) -> Dict[str, Any]:
    """The SLO as summary.json has it."""
    return {**slo._asdict(), "classes": {name: own._asdict() for name, own in slo.classes.items()}}


def slo_from(told: Facts) -> Slo:
    """The SLO that a summary.json was judged by; KeyError or TypeError where it is not one."""
    return Slo(**{**told, "classes": {name: Slo(**own) for name, own in told.get(
        "classes", {}).items()}})


def share_interval(hits: int, n: float, total: int) -> Tuple[float, float]:
    """Wilson 95% interval of a share, the sample being worth n independent ones."""
    if not total or n <= 0:
        return 0.0, 1.0
    p = hits / total
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def in_flight_mean(records: Records, span: Tuple[int, int]) -> Optional[float]:
    """Time average of due and not finished over the span, L of Little's law."""
    start_ns, end_ns = span
    if end_ns <= start_ns:
        return None
    held = sum(max(0, min(end_ns if r.end_ns is None else r.end_ns, end_ns)
                   - max(r.due_ns, start_ns)) for r in records)
    return held / (end_ns - start_ns)


SERIES_BINS = 80


def in_flight_series(records: Records, start_ns: int) -> List[List[float]]:
    """[[seconds from the run's start, mean in flight in the bin that ends there], ...]."""
    end_ns = max((r.end_ns or r.due_ns for r in records), default=start_ns)
    width_ns = -(-(end_ns - start_ns) // SERIES_BINS)
    if width_ns <= 0:
        return []

    def passed(stamps: List[int]) -> Callable[[int], int]:
        """Of a moment: the sum of its distances from all the stamps before it [ns]."""
        stamps.sort()
        sums = [0, *itertools.accumulate(stamps)]

        def at(now_ns: int) -> int:
            before = bisect.bisect_right(stamps, now_ns)
            return before * now_ns - sums[before]
        return at

    due, ended = (passed([t for t in stamps if t is not None]) for stamps in (
        [r.due_ns for r in records], [r.end_ns for r in records]))
    held = [due(t) - ended(t) for t in range(start_ns, end_ns + 2 * width_ns, width_ns)]
    return [[(i + 1) * width_ns * NS, (b - a) / width_ns]
            for i, (a, b) in enumerate(zip(held, held[1:SERIES_BINS + 1]))]


def summarise(outcome: Outcome, slo: Slo, token_ids: bool, unique: bool = True) -> Dict[str, Any]:
    """One run's summary, SI units; the keys of summary.json."""
    everything = sorted(outcome.records, key=lambda r: (r.due_ns, r.id))
    records = [r for r in everything if r.measured]
    plan, start_ns = outcome.plan, outcome.start_ns
    good = [r for r in records if r.ok]
    span = measured_span(plan, records, start_ns, any(h.interrupted for h in outcome.health))
    span_s = (span[1] - span[0]) * NS
    failures = collections.Counter(r.cls for r in records if not r.ok)
    lost = sum(h.turns_lost for h in outcome.health)  # turns that failed ones before them cost
    if lost:
        failures["unsent"] += lost
    offered = len(records) + lost
    rate = offered_rate(plan, records, span_s)
    summary: Dict[str, Any] = {
        "offered": offered, "sent": sum(r.sent_ns is not None for r in records),
        "completed": len(good), "failures": dict(failures), "rate_rps": plan.load.rate_rps,
        "label": plan.load.label, "concurrency": plan.load.concurrency, "offered_rate_rps": rate,
        "achieved_rps": len(good) / span_s if span_s else None, "span_s": span_s,
        "simulated": outcome.simulated, **judgement(records, lost, slo, rate),
        **tokens(everything, records, span, span_s), **latencies(records, good),
        **little(everything, records, span),
        "in_flight_series": in_flight_series(everything, start_ns),
        **input_error(good, token_ids, outcome.calibration)}
    summary["classes"] = {c.name: part_of(
        [r for r in records if r.mix_class == c.name], slo.classes.get(c.name, slo), span_s, rate,
        offered) for c in plan.work.classes} or None
    summary["turns"] = {"lost": lost, **{name: part_of(
        [r for r in records if (r.turn > 0) == later], slo, span_s, rate, offered)
        for name, later in (("first", False), ("later", True))}} if plan.work.turns else None
    summary["client"] = client_summary(outcome)
    worst = collections.Counter((r.cls, r.error) for r in records if not r.ok).most_common(10)
    summary["errors"] = [{"class": kind, "error": text, "count": n} for (kind, text), n in worst]
    summary["server"] = server_summary(outcome)
    summary["signs"] = signs(good, good, summary, slo.attainment)
    summary["context_share"] = context_share(good, summary["signs"]["ttft"])
    summary["repeated_tokens"] = repeated(everything, plan)
    for name, part in (summary["classes"] or {}).items():
        part["signs"] = signs([r for r in good if r.mix_class == name], good,
                              {**summary, **part}, slo.attainment)
    summary["verdict"], summary["reasons"] = verdict(summary, records, outcome)
    summary["warnings"] = [*warnings_of(summary, good, plan, unique), *outcome.warnings]
    return summary


def judgement(records: Records, lost: int, slo: Slo, rate: Optional[float]) -> Dict[str, Any]:
    """attainment of the SLO, its 95% interval, goodput [1/s]; lost requests count as misses."""
    met = [1.0 if slo.met(r) else 0.0 for r in records] + [0.0] * lost
    if not (slo.any and met):
        return dict.fromkeys(("attainment", "attainment_interval", "goodput_rps"))
    attainment, worth = sum(met) / len(met), len(met) / autocorrelation_factor(met)
    return {"attainment": attainment,
            "attainment_interval": share_interval(int(sum(met)), worth, len(met)),
            "goodput_rps": None if rate is None else rate * attainment}


def part_of(records: Records, slo: Slo, span_s: float, rate: Optional[float],
            offered: int) -> Dict[str, Any]:
    """What a part of a run's requests saw (a class, first or later turns), as the run itself."""
    good = [r for r in records if r.ok]
    own_rate = rate * len(records) / offered if rate is not None and offered else None
    seen = latencies(records, good)
    return {"offered": len(records), "completed": len(good), "failed": len(records) - len(good),
            "offered_rate_rps": own_rate, **judgement(records, 0, slo, own_rate),
            "output_tok_s": sum(r.n_out or 0 for r in good) / span_s if span_s else None,
            "input_tokens_mean": mean_of([r.n_in for r in good if r.n_in is not None]),
            "cached_tokens_mean": mean_of([r.cached_tokens for r in good
                                           if r.cached_tokens is not None]),
            **{key: seen[key] for key in ("ttft_s", "ttft_from_sent_s", "tpot_s", "itl_s",
                                          "e2e_s")},
            "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s}}


def measured_span(plan: Plan, records: Records, start_ns: int, interrupted: bool
                  ) -> Tuple[int, int]:
    """What is measured [ns]: the window, or first due to last end in count mode.

    That is the end of the last success, output event or due time: a timeout does not stretch it.
    """
    last_ns = max((r.end_ns or r.due_ns for r in records), default=start_ns)
    if plan.load.num_requests is None:
        opened, closed = (start_ns + round(t / NS) for t in plan.window_s)
        return min(opened, last_ns), min(closed, last_ns) if interrupted else closed
    seen = [t for r in records for t in (r.last_ns, r.end_ns if r.ok else None) if t is not None]
    if seen:
        last_ns = min(last_ns, max(*seen, records[-1].due_ns))
    return (records[0].due_ns if records else start_ns), last_ns


def offered_rate(plan: Plan, records: Records, span_s: float) -> Optional[float]:
    """Requests due over the span in which they were due [1/s]; closed loops offer what they get."""
    if not records:
        return None
    if plan.load.num_requests is None or plan.load.closed:
        return len(records) / span_s if span_s else None
    due_s = (records[-1].due_ns - records[0].due_ns) * NS
    return (len(records) - 1) / due_s if due_s > 0 else None


def tokens(everything: Records, records: Records, span: Tuple[int, int],
           span_s: float) -> Dict[str, Any]:
    """Token rates over the span: output tokens received in it, from whatever request."""
    def received(r: Record) -> float:
        stamps = r.event_ns
        if not stamps or not r.n_out:
            return 0.0
        inside = bisect.bisect_right(stamps, span[1]) - bisect.bisect_left(stamps, span[0])
        return r.n_out * inside / len(stamps)

    made = sum(received(r) for r in everything)
    read = sum(r.n_in or 0 for r in records if r.ok)
    return {"output_tok_s": made / span_s if span_s else None,
            "total_tok_s": (made + read) / span_s if span_s else None,
            "output_tokens_mean": mean_of([r.n_out for r in records
                                           if r.ok and r.n_out is not None]),
            "n_out_estimated": sum(r.n_out_estimated for r in records)}


def offered_s(records: Iterable[Record], key: str) -> Iterator[Optional[float]]:
    """A latency of each request: a failure is infinitely late; None where there is none to tell."""
    for r in records:
        seconds = LATENCIES[key](r)
        yield math.inf if seconds is None and (not r.ok or r.first_ns is None) else seconds


def latencies(records: Records, good: Records) -> Dict[str, Any]:
    """Every latency over offered requests (failures infinitely late) and over successes."""
    found: Dict[str, Any] = {}
    spread = functools.lru_cache(maxsize=None)(spread_of)  # most often, many are the same
    for key in LATENCIES:
        offered = [v for v in offered_s(records, key) if v is not None]
        found[key] = {**spread(tuple(offered)),
                      "successes": spread(tuple(v for v in offered if v < math.inf))}
        if key in ("ttft_s", "tpot_s", "e2e_s"):
            offered.sort()
            found[key]["curve"] = [percentile(offered, share) for share in CURVE]
    found["itl_s"] = itl_spread(good)
    found["itl_max_s"] = max((r.itl_max_s for r in good if r.itl_max_s is not None), default=None)
    events, outs = sum(r.events for r in good), sum(r.n_out or 0 for r in good)
    found["chunks_per_token"] = events / outs if outs else None
    found["itl_is_chunk_gap"] = bool(outs > 1.1 * events) if events else False
    connects = [r.connect_s for r in records if r.connect_s is not None]
    found["connect_s"] = spread_of(connects, 1.0)
    return found


def little(everything: Records, records: Records, span: Tuple[int, int]) -> Dict[str, Any]:
    """L measured against lambda x W: they must agree, or the bookkeeping is wrong."""
    mean = in_flight_mean(everything, span)
    ends = [((r.end_ns if r.ok else max(r.due_ns, min(r.end_ns, span[1]))) - r.due_ns) * NS
            for r in records if r.end_ns is not None]
    span_s = (span[1] - span[0]) * NS
    arrivals = len(records) / span_s if span_s else None
    product = arrivals * math.fsum(ends) / len(ends) if arrivals and ends else None
    edges = sorted([(r.due_ns, 1) for r in everything]
                   + [(r.end_ns, -1) for r in everything if r.end_ns is not None])
    most = max(itertools.accumulate((step for _, step in edges), initial=0))
    return {"in_flight_mean": mean, "in_flight_max": most, "little_rps_x_s": product}


def input_error(good: Records, token_ids: bool, calibration: Calibration) -> Dict[str, Any]:
    """The input length that the server counted against the planned one."""
    pairs = [(r.n_in_planned, r.n_in) for r in good if r.n_in and r.n_in_planned]
    counted = [r.n_in for r in good if r.n_in]
    planned = [p for p, _ in pairs] if len(pairs) == len(counted) else []  # else not comparable
    return {"input_tokens_planned_mean": mean_of(planned), "input_tokens_mean": mean_of(counted),
            "input_error_max": max((abs(got - p) / p for p, got in pairs), default=None),
            "input_source": "token ids" if token_ids else calibration.source,
            "cached_tokens_mean": mean_of([r.cached_tokens for r in good
                                           if r.cached_tokens is not None])}


def client_summary(outcome: Outcome) -> Dict[str, Any]:
    """How the client did: CPU, send lag, loop turns, bundled reads."""
    def levels(values: Iterable[float]) -> Dict[str, Optional[float]]:
        ordered = sorted(values)
        return {"p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99),
                "max": ordered[-1] if ordered else None}

    health = outcome.health
    events, cpu_s = sum(h.events for h in health), sum(h.cpu_s for h in health)
    found: Dict[str, Any] = {
        "cpu_s": cpu_s, "events": events,
        "cpu_s_per_million_events": cpu_s / events * MEGA if events else None,
        "cpu_share": max((h.cpu_s / h.wall_s for h in health if h.wall_s), default=None),
        "send_lag_s": levels(x for h in health for x in h.lag_s),
        "loop_busy_s": levels(x for h in health for x in h.busy_s),
        "coalesced_share": sum(h.coalesced for h in health) / events if events else None,
        "connections_opened": sum(h.opened for h in health),
        "reused": sum(h.reused for h in health), "resent": sum(h.resent for h in health),
        "kernel_stamps": all(h.kernel_stamps for h in health) if health else None,
        "clock_jump_s": max((h.clock_jump_ns for h in health), default=0) * NS,
        "real_time": any(h.real_time for h in health),
        "workers": len(health), "interrupted": any(h.interrupted for h in health),
        "peak_rss_bytes": sum(h.peak_rss_bytes for h in health)}
    if outcome.simulated:  # there was no client to speak of
        return {key: dict.fromkeys(value) if isinstance(value, dict) else
                value if key == "interrupted" else None for key, value in found.items()}
    return found


def trend(values: Sequence[float]) -> Tuple[bool, float, float]:
    """Whether a series of a queueing system rises through the run: (rises, first, last third).

    Means of equal blocks; it rises when nearly every later block is above nearly every earlier one
    (Kendall's tau of the block means over 0.6) and the last third is well above the first.
    """
    n = len(values)
    if n < 3 * UNSTABLE_BLOCKS:
        return False, 0.0, 0.0
    size = n / UNSTABLE_BLOCKS
    means = []
    for i in range(UNSTABLE_BLOCKS):
        block = sorted(values[round(i * size):round((i + 1) * size)])
        means.append(block[len(block) // 2])
    pairs = [(means[i], means[j]) for i in range(len(means)) for j in range(i + 1, len(means))]
    tau = sum((b > a) - (b < a) for a, b in pairs) / len(pairs)
    third = UNSTABLE_BLOCKS // 3
    first, last = sum(means[:third]) / third, sum(means[-third:]) / third
    return tau > 0.6 and last > 1.5 * first, first, last


def verdict(summary: Facts, records: Records, outcome: Outcome) -> Tuple[str, List[str]]:
    """VALID, UNSTABLE (about the server) or CLIENT-LIMITED (about us), with reasons and advice."""
    reasons = client_reasons(summary["client"])
    limited = summary["failures"].get("client_limit")
    if limited:
        reasons.insert(0, f"{limited} requests found no descriptor or port on this machine")
    died = sum(h.died for h in outcome.health)
    if died:
        reasons.insert(0, f"{died} of {len(outcome.health)} worker processes died")
    if reasons:
        return "CLIENT-LIMITED", [*reasons, "the figures are not to be trusted: more --workers, a "
                                  "lower rate, or a quieter machine"]
    if not outcome.plan.load.closed:
        # a trace's rate may rise, and sessions build up: only TTFT then tells of a queue
        work, from_ns = outcome.plan.work, 0
        if work.turns and summary["e2e_s"]["mean"]:
            from_ns = outcome.start_ns + round(session_s(work, summary["e2e_s"]["mean"]) / NS)
        ttft = [LATENCIES["ttft_s"](r) for r in records
                if r.ok and r.first_ns and not r.turn and r.due_ns >= from_ns]
        levels: Sequence[float] = [] if work.trace or work.turns else settled_levels(
            [r for r in records if r.ok])  # a stream that hangs is in nobody's queue
        for what, values, least, unit in (
                ("in flight", levels, 3.0, ""),
                ("TTFT", ttft, max(0.05, TTFT_RISE * (summary["e2e_s"]["mean"] or 0.0)), " s")):
            rises, first, last = trend([v for v in values if v is not None])
            if not unit:  # chance moves k in flight by some sqrt(k) within an E2E
                least = max(least, CROWD_SD * math.sqrt(first))
                rises &= len(values) >= E2ES_TO_JUDGE * first
            if rises and last - first > least:
                cap = outcome.plan.load.concurrency
                cause = (f"they wait for --concurrency {cap}" if cap else "the queue grows")
                reasons.append(f"{what} rose from {figure(first)}{unit} to {figure(last)}{unit} "
                               f"through the run: {cause}, and every latency grows with the "
                               "length of the run; lower the rate or add capacity")
    if not summary["completed"]:
        return "VALID", ["no request succeeded" if records else "nothing was due"]
    ends = [r.end_ns - r.due_ns for r in records if r.ok and r.end_ns is not None]
    spread_ns = records[-1].due_ns - records[0].due_ns
    drain_ns = max(r.end_ns or 0 for r in records if r.ok) - records[-1].due_ns
    if not reasons and not outcome.plan.load.closed and len(records) >= 10 and (
            drain_ns > 2 * spread_ns > 0 and drain_ns > 5 * min(ends)):
        reasons.append(f"the requests of {figure(spread_ns * NS)} s took {figure(drain_ns * NS)} s "
                       "more to be answered: more was asked than the server can do")
    return ("UNSTABLE", reasons[:1]) if reasons else ("VALID", [])


def in_flight_at_arrivals(records: Records) -> List[float]:
    """How many were in flight when each request came due."""
    ends: List[int] = []
    levels = []
    for r in records:
        while ends and ends[0] <= r.due_ns:
            heapq.heappop(ends)
        levels.append(float(len(ends)))
        heapq.heappush(ends, r.end_ns if r.end_ns is not None else sys.maxsize)
    return levels


def settled_levels(records: Records) -> List[float]:
    """in_flight_at_arrivals, without the time in which an empty server fills: the quick E2Es."""
    levels = in_flight_at_arrivals(records)
    took = sorted((r.end_ns or r.due_ns) - r.due_ns for r in records)
    if not took:
        return []
    from_ns = records[0].due_ns + 1.2 * took[len(took) // 10]
    return [level for level, r in zip(levels, records) if r.due_ns >= from_ns]


def client_reasons(client: Facts) -> List[str]:
    """What the client did wrong, if anything; bundled reads only beside one of these."""
    lag, busy, share = client["send_lag_s"], client["loop_busy_s"], client["cpu_share"]
    found = []
    if (lag["p99"] or 0) > LAG_P99_S or (lag["max"] or 0) > LAG_MAX_S:
        found.append(f"requests left late: send lag p99 {in_ms(lag['p99'])} ms, max "
                     f"{in_ms(lag['max'])} ms")
    if (busy["p99"] or 0) > BUSY_P99_S:
        found.append(f"the client's loop was held up: p99 {in_ms(busy['p99'])} ms a turn")
    if (share or 0) > CPU_SHARE:
        found.append(f"the client used {share:.0%} of a core")
    if found and (client["coalesced_share"] or 0) > COALESCED_SHARE:
        found.append(f"{client['coalesced_share']:.0%} of the output events shared a read, so "
                     "their times are late")
    return found


def warnings_of(summary: Facts, good: Records, plan: Plan, unique: bool) -> List[str]:
    """What a reader should know beside the verdict."""
    found = []
    mean, product = summary["in_flight_mean"], summary["little_rps_x_s"]
    if mean and product and abs(mean / product - 1) > LITTLE_GAP and not plan.load.closed:
        found.append(f"in flight {figure(mean)} differs from rate x time in system "
                     f"{figure(product)}: the run is short beside its latencies, or not stationary")
    client = summary["client"]
    if (client["coalesced_share"] or 0) > COALESCED_SHARE and not client_reasons(client):
        found.append(f"{client['coalesced_share']:.0%} of the output events came bundled with "
                     "others: the server or a gateway sends in bursts, so ITL is a chunk gap")
    cached = summary["cached_tokens_mean"]
    work = plan.work
    expected = max([work.shared_prefix, *(c.work.shared_prefix for c in work.classes)])
    sharing = work.prompts or work.turns or (work.trace and work.trace.block)
    if cached and cached > expected + CACHED_SPARE and unique and not sharing:
        found.append(f"{figure(cached)} prompt tokens a request came from the server's prefix "
                     "cache though prompts are unique: this is not a cold run")
    if (summary["input_error_max"] or 0) > 0.02 and any(
            abs((r.n_in or 0) - r.n_in_planned) > 2 for r in good if r.n_in and r.n_in_planned):
        found.append(f"prompts were up to {summary['input_error_max']:.1%} off their planned "
                     "length, by the server's count")
    short = sum(1 for r in good if r.n_out is not None and r.n_out < r.n_out_planned)
    if short:
        found.append(f"{short} answers were shorter than asked: the model stopped early, or "
                     "ignore_eos was not honoured")
    lost = (summary.get("turns") or {}).get("lost")
    if lost:
        found.append(f"{lost} later turns were never due: an earlier one of their session failed; "
                     "they count as unsent, misses")
    if summary["n_out_estimated"]:
        found.append(f"{summary['n_out_estimated']} answers came without usage: their tokens are "
                     "counted as events, an estimate")
    if (client["clock_jump_s"] or 0) > 0.01:
        found.append(f"the machine's real-time clock jumped by {client['clock_jump_s']:.3f} s; "
                     "receive times around it are wrong by as much")
    if client["resent"]:
        found.append(f"{client['resent']} requests were sent again: their kept-alive connection "
                     "had been closed by the server")
    return found


def in_ms(seconds: Optional[float]) -> str:
    """Seconds as milliseconds with one decimal; inf and absent as such."""
    if seconds is None:
        return "-"
    return "inf" if math.isinf(seconds) else f"{seconds / MS:.1f}"


# ---- 8b. The search for the knee ---------------------------------------------------------------
# Pure, over a function that measures one rate. Misses near the knee come in clusters, a hundred
# requests long: counting them alone would take tens of thousands of requests. So each run also
# teaches a small model of the server, how fast it works with k in flight and which share misses
# the SLO then, or after how long a queue of prompts, and the model is replayed over arrivals
# without end. What it says about the knee is a prior, that the counted misses confirm or shift:
# Bayes on a grid of knee and slope.

SEARCH_SPAN = 1024.0  # how far from the first rate the search goes, as a factor
LIMITED = "CLIENT-LIMITED"
ARRIVALS = 12_000, 100_000  # that the model is replayed over, on the way and at the end
SEARCH_START_N = 60  # measured requests of the first points; a quarter of the budget at most
STAY = 3.0  # E2Es that a point's window is long: a queue must have time to grow
NEAR = 1.25  # rates within this factor of the knee teach the model most
# The log error of the model's knee has a part for what the model leaves out, one for the requests
# it was learnt from, and one for the share of misses at a level, over the slope.
MODEL_SD, MODEL_SD_N, MODEL_ODDS_SD = 0.035, 1.2, 0.4
ENOUGH_MISSES = 20  # to learn from; with fewer near the knee, those of a jam must do,
MODEL_FAR_SD = 0.08  # and a jam's are more at the same level: more prompts come between the tokens
DRAIN_DOUBT = 5.0  # of log likelihood: there are many drains to choose from
ALIKE = 10.0  # two causes as likely as that: the error has half of what they differ by
# Of a queue that grows: shown by chance; not shown; how near capacity either is as likely.
FALSE_ALARM, NO_ALARM, GROWTH_SD = 0.03, 0.3, 0.03
CERTAIN_N = 100  # measured requests after which a queue is taken to grow
# Requests that an independent miss stands for, before data: this many, and of those in flight.
CLUSTER, CLUSTER_CROWD, CLUSTER_MISSES = 20.0, 2.0, 5.0
DRAINS = [1.1 * 1.15**i for i in range(14)]  # speeds of reading prompts that are tried
PRECISION = 0.035  # half the 95% interval, of the rate: settled
STEPS = (1.0, 1.06, 0.98, 1.03)  # around the estimate, in turn: the slope is learnt too


class Sample(NamedTuple):
    """One request of a point."""

    due_s: float
    end_s: Optional[float]  # None: nobody saw its end
    met: bool
    measured: bool
    ok: bool
    n_in: int
    n_out: int


class PointResult(NamedTuple):
    """What one run at one rate showed."""

    rate_rps: float
    verdict: str  # VALID, UNSTABLE or CLIENT-LIMITED
    requests: int  # sent for it, ramp and tail included
    seconds: float
    samples: Sequence[Sample]  # by due time

    @property
    def met(self) -> List[bool]:
        """Whether each measured request met the SLO."""
        return [s.met for s in self.samples if s.measured]

    @property
    def calm(self) -> bool:
        """Whether the server was not full, so that its E2E says something."""
        return 2 * sum(self.met) > len(self.met) and self.verdict != "UNSTABLE"


class Life(NamedTuple):
    """A measured request and the company it had: what the model is learnt from."""

    arrival: int  # in flight when it came
    mean: float  # in flight while it was there, itself included
    levels: Tuple[float, ...]  # by each cause that a miss may have
    e2e_s: float
    met: bool
    ok: bool
    n_in: int
    n_out: int


class Cause(NamedTuple):
    """What a miss may depend on: how many are in flight, or the prompts that are read first."""

    blend: float = 0.0  # of those in flight: blend * at arrival + (1 - blend) * mean while there
    drain: float = 0.0  # prompt tokens read a second; 0: it is those in flight

    def levels(self, due: Sequence[float], n_in: Sequence[int],
               company: Sequence[Tuple[int, float]]) -> List[float]:
        """How high it stands for each request."""
        if self.drain:
            return backlog(due, n_in, self.drain)
        return [self.blend * k + (1 - self.blend) * mean for k, mean in company]


class Model(NamedTuple):
    """A server as a shared queue: with k there, each gets 1/slow[k] of its work done a second."""

    slow: List[float]
    sizes: List[Tuple[int, int]]  # prompt and output tokens of the requests seen
    prompt_weight: float  # a prompt token's work, of an output token's
    work_mean: float  # tokens that are one unit of work
    cause: Cause  # of misses
    edges: List[float]  # of its level, ascending,
    risks: List[float]  # and the share of misses from each edge on

    def work(self, n_in: int, n_out: int) -> float:
        """The work of a request."""
        return (n_out + self.prompt_weight * n_in) / self.work_mean

    def misses(self, due: Sequence[float], sizes: Sequence[Tuple[int, int]]) -> float:
        """How many of the requests that come at these times are expected to miss."""
        crowd = [] if self.cause.drain else company(self.slow, due,
                                                    [self.work(*size) for size in sizes])
        levels = self.cause.levels(due, [n_in for n_in, _ in sizes], crowd)
        find, edges, risks = bisect.bisect_right, self.edges, self.risks
        return math.fsum(risks[max(0, find(edges, level) - 1)] for level in levels)


class Fit(NamedTuple):
    """Where attainment crosses the target, with its 95% interval [1/s]."""

    rate_rps: float
    low_rps: float
    high_rps: float


class Search(NamedTuple):
    """The answer: the knee, how it was found and whether it is settled."""

    rate_rps: Optional[float]
    low_rps: Optional[float]
    high_rps: Optional[float]
    target: float
    points: List[Dict[str, Any]]
    requests: int
    seconds: float
    settled: bool
    why: str


def clean_needed(target: float) -> int:
    """Requests without a miss after which attainment is at least the target with 95% (Wilson).

    >>> clean_needed(0.99)
    381
    """
    return math.floor(Z95**2 * target / (1 - target)) + 1 if target < 1 else sys.maxsize


def isotonic(values: Sequence[float], weights: Sequence[float]) -> List[float]:
    """The non-decreasing series nearest to the values, by weighted squares (pool adjacent)."""
    blocks: List[List[float]] = []  # sum, weight, length
    for value, weight in zip(values, weights):
        blocks.append([value * weight, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
            blocks[-2:] = [[a + b for a, b in zip(*blocks[-2:])]]
    return [total / weight for total, weight, length in blocks for _ in range(int(length))]


def backlog(due: Sequence[float], n_in: Sequence[int], drain: float) -> List[float]:
    """Prompt tokens that are still to be read when each request comes, its own included."""
    found, left, before = [], 0.0, 0.0
    for at, tokens in zip(due, n_in):
        left = max(0.0, left - drain * (at - before)) + tokens
        before = at
        found.append(left)
    return found


def lives_of(samples: Sequence[Sample], causes: Sequence[Cause]) -> List[Life]:
    """The measured requests with the company they had, and how high each cause stood."""
    edges = sorted([(s.due_s, 1) for s in samples]
                   + [(s.end_s, -1) for s in samples if s.end_s is not None])
    times, levels, areas = [0.0], [0], [0.0]  # after each edge; the area under the level before
    for at, step in edges:
        areas.append(areas[-1] + levels[-1] * (at - times[-1]))
        times.append(at)
        levels.append(levels[-1] + step)

    def area(at: float) -> float:
        place = bisect.bisect_right(times, at) - 1
        return areas[place] + levels[place] * (at - times[place])

    crowd = []
    for s in samples:
        arrival = levels[bisect.bisect_left(times, s.due_s) - 1] if s.due_s > 0 else 0
        took_s = 0.0 if s.end_s is None else s.end_s - s.due_s
        crowd.append((arrival, (area(s.due_s + took_s) - area(s.due_s)) / took_s
                      if took_s > 0 else math.inf))
    due, n_in = [s.due_s for s in samples], [s.n_in for s in samples]
    return [Life(arrival, mean, tuple(stood), s.end_s - s.due_s, s.met, s.ok, s.n_in, s.n_out)
            for s, (arrival, mean), *stood in zip(samples, crowd, *(
                cause.levels(due, n_in, crowd) for cause in causes))
            if s.measured and s.end_s is not None and mean < math.inf]


def learn(lives: Sequence[Life], near: Sequence[Life], causes: Sequence[Cause],
          bins: int = 24) -> List[Model]:
    """The models that these requests teach, first by those near the knee; none of too few.

    The likeliest cause of misses makes one, and the likeliest of the other kind, a crowd or
    prompts, where it is nearly as likely.
    """
    good = sorted((life for life in near if life.ok), key=lambda life: life.mean)
    n = len(good)
    if n < 2 * bins:
        return []
    groups = [good[i * n // bins:(i + 1) * n // bins] for i in range(bins)]

    def spread(weight: float) -> float:
        total = 0.0
        for group in groups:
            logs = [math.log(x.e2e_s / (x.n_out + weight * x.n_in)) for x in group]
            mean = sum(logs) / len(logs)
            total += sum((value - mean) ** 2 for value in logs)
        return total

    weight = min((0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0), key=spread)
    sizes = [life.n_out + weight * life.n_in for life in good]
    size = sum(sizes) / n
    at = [sum(x.mean for x in g) / len(g) for g in groups]
    took = isotonic([sum(x.e2e_s * size / (x.n_out + weight * x.n_in) for x in g) / len(g)
                     for g in groups], [1.0] * bins)
    top = 3 * math.ceil(at[-1]) + 50
    slow = [between(at, took, float(k)) for k in range(top)]
    told = near if sum(not life.met for life in near) >= ENOUGH_MISSES else lives
    tried = sorted((risk_of(told, i, cause) for i, cause in enumerate(causes)), reverse=True)
    kinds = {bool(risk.cause.drain): risk for risk in reversed(tried)}  # the likeliest of each
    return [Model(slow, [(x.n_in, x.n_out) for x in good], weight, size, *risk[1:])
            for risk in sorted(kinds.values(), reverse=True)
            if risk.likelihood > tried[0].likelihood - ALIKE]


def between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear interpolation; outside, on as the outer quarter goes, past the last at most in
    proportion: a server that is fuller does no less work."""
    quarter = len(xs) // 4
    if x <= xs[0]:
        i, j = 0, quarter
    elif x >= xs[-1]:
        i, j = -1 - quarter, -1
    else:
        j = bisect.bisect_right(xs, x)
        i = j - 1
    slope = (ys[j] - ys[i]) / (xs[j] - xs[i]) if xs[j] > xs[i] else 0.0
    if x >= xs[-1]:
        return ys[-1] + min(slope, ys[-1] / xs[-1]) * (x - xs[-1])
    return max(ys[0] / 2, ys[i] + slope * (x - xs[i]))


class Risk(NamedTuple):
    """The share of misses as a rising step function of how high a cause stands."""

    likelihood: float  # its logarithm
    cause: Cause
    edges: List[float]  # of the cause's level, ascending
    risks: List[float]  # from each edge on


def risk_of(lives: Sequence[Life], index: int, cause: Cause) -> Risk:
    """The step function nearest to these requests."""
    pairs = sorted((life.levels[index], not life.met) for life in lives)
    least = 0.02 * pairs[len(pairs) // 2][0] if cause.drain else 0.5
    edges: List[float] = []
    missed: List[int] = []
    number: List[int] = []
    for level, miss in pairs:
        if not edges or level - edges[-1] > max(least, 0.02 * level):
            edges.append(level)
            missed.append(0)
            number.append(0)
        missed[-1] += miss
        number[-1] += 1
    risks = isotonic([m / n for m, n in zip(missed, number)], [float(n) for n in number])
    likelihood = math.fsum(m * math.log(r) + (n - m) * math.log1p(-r)
                           for m, n, r in zip(missed, number, risks) if 0 < r < 1)
    return Risk(likelihood - (DRAIN_DOUBT if cause.drain else 0), cause, edges, risks)


def company(slow: Sequence[float], due: Sequence[float], works: Sequence[float]
            ) -> List[Tuple[int, float]]:
    """(in flight at arrival, mean while there) of each request of a shared queue.

    All progress alike, so that the one with the least work left ends next: a heap of the shared
    progress at which each ends. Past the top of `slow` the queue counts as lost: infinite.
    """
    found: List[Tuple[int, float]] = [(len(slow), math.inf)] * len(due)
    heap: List[Tuple[float, int, float, float, int]] = []
    push, pop = heapq.heappush, heapq.heappop
    progress = t = area = 0.0
    k, top = 0, len(slow) - 1
    for i, at in enumerate(itertools.chain(due, (math.inf,))):
        while heap:
            step = (heap[0][0] - progress) * slow[k]
            if t + step > at:
                break
            t += step
            area += k * step
            progress, arrival, area0, t0, j = pop(heap)
            k -= 1
            found[j] = arrival, (area - area0) / (t - t0)
        if at == math.inf or k >= top:
            break
        if heap:
            progress += (at - t) / slow[k]
            area += k * (at - t)
        t = at
        push(heap, (progress + works[i], k, area, t, i))
        k += 1
    return found


def model_knee(model: Model, unit_due: Sequence[float], sizes: Sequence[Tuple[int, int]],
               target: float, guess_rps: float) -> Optional[Tuple[float, float]]:
    """(rate, slope of the log odds of a miss in log rate) where the model crosses the target."""
    n, aim = len(unit_due), log_odds(1 - target)

    def odds(x: float) -> float:
        rate = math.exp(x)
        misses = model.misses([t / rate for t in unit_due], sizes)
        return log_odds(min(max(misses / n, 0.1 / n), 1 - 0.1 / n)) - aim

    x, slope, before = math.log(guess_rps), 15.0, None
    low, high = x - 3, x + 3
    for _ in range(20):  # secant within a bracket: the curve is close to a line
        value = odds(x)
        low, high = (x, high) if value <= 0 else (low, x)
        if before is not None and max(abs(value), abs(before[1])) < 5:
            slope = min(30.0, max(1.0, (value - before[1]) / (x - before[0])))
        if before is not None and (abs(value) < 0.1 or high - low < 0.005):
            return math.exp(x), slope
        before = x, value
        x -= math.copysign(min(0.3, max(0.02, abs(value) / slope)), value)
        if not low < x < high:
            x = (low + high) / 2
    return None


def log_odds(share: float) -> float:
    """log(p / (1 - p))."""
    return math.log(share / (1 - share))


def likeness(model: Model, points: Sequence[PointResult], lives: Sequence[List[Life]]) -> float:
    """How much quicker than the model the server is, from the levels that real arrivals reached.

    The model's queue is fed with the arrivals of the points; the factor makes its crowding, the
    number in flight past the upper quartile, what was seen.
    """
    levels = sorted(life.arrival for part in lives for life in part)
    line = levels[3 * len(levels) // 4]
    seen = sum(max(0, level - line) for level in levels)
    low, high = 0.8, 1.25
    for _ in range(8):
        middle = math.sqrt(low * high)
        crowd = 0
        for point in points:
            found = company(model.slow, [s.due_s * middle for s in point.samples],
                            [model.work(s.n_in, s.n_out) for s in point.samples])
            crowd += sum(max(0, k - line) for (k, _), s in zip(found, point.samples)
                         if s.measured and s.end_s is not None)
        low, high = (low, middle) if crowd < seen else (middle, high)
    return math.sqrt(low * high)


def clustering(points: Sequence[PointResult]) -> float:
    """How many requests one independent miss stands for, over points weighted by their misses.

    Before any is seen, a few times as many as were in flight: a crowd takes as long to go.
    """
    crowd = max((p.rate_rps * seconds_in(p) for p in points if p.met), default=0.0)
    total, weight = CLUSTER_MISSES * (CLUSTER + CLUSTER_CROWD * crowd), CLUSTER_MISSES
    for point in points:
        met = point.met
        missed = len(met) - sum(met)
        if 0 < missed < len(met):
            total += missed * autocorrelation_factor([float(m) for m in met])
            weight += missed
    return total / weight


def fit_knee(points: Sequence[PointResult], target: float,
             prior: Optional[Tuple[float, float, float]]) -> Fit:
    """The knee's posterior median and 95% interval.

    The log odds of a miss are taken as linear in the log of the rate near the knee, each point
    worth its requests over their clustering and weighted down with its distance. prior: the
    model's log knee, its error and its slope. A point whose queue grew shows fewer misses than a
    longer run would: it is evidence against more attainment, never against less; and that no rate
    as high is one for long, whatever the SLO, so that the knee is below it.
    """
    aim = log_odds(1 - target)
    centre, sd, slope = prior or (rough_knee(points, target), math.inf, 12.0)
    factor = clustering([p for p in points if not fails(p, target)])
    reach = 120 if sd == math.inf else max(120, round(3 * sd / 0.005))  # of the grid, each way
    width = math.log(NEAR) if sd == math.inf else max(math.log(NEAR), 2 * sd)
    xs = [centre + i * 0.005 for i in range(-reach, reach + 1)]
    slopes = [slope * math.exp(0.25 * j) for j in range(-4, 5)]
    facts = []
    for p in points:
        met = p.met
        if met:
            x = math.log(p.rate_rps)
            own = max(factor, autocorrelation_factor([float(m) for m in met]))
            worth = math.exp(-0.5 * ((x - centre) / width) ** 2) / own
            facts.append((x, (len(met) - sum(met)) * worth, sum(met) * worth,
                          p.verdict == "UNSTABLE" or sum(met) < 0.7 * len(met)))
    grown = [math.log(p.rate_rps) for p in points if p.verdict == "UNSTABLE" and fails(p, target)]
    steady = [math.log(p.rate_rps) for p in points if nothing_missed(points)
              and p.verdict == "VALID" and len(p.met) >= CERTAIN_N]
    logs = []
    for x in xs:
        alarms = -math.fsum(math.log(floor + 1 / (1 + math.exp(sign * (x - at) / GROWTH_SD)))
                            for floor, sign, rates in ((FALSE_ALARM, 1, grown),
                                                       (NO_ALARM, -1, steady)) for at in rates)
        for j, b in enumerate(slopes):
            total = -0.5 * ((x - centre) / sd) ** 2 - 0.5 * ((j - 4) * 0.25 / 0.4) ** 2 - alarms
            for at, missed, met_, grew in facts:
                odds = aim + b * (at - x)
                if grew:
                    odds = min(odds, math.log((missed + 1e-9) / (met_ + 1e-9)))
                total -= missed * softplus(-odds) + met_ * softplus(odds)
            logs.append(total)
    most = max(logs)
    weights = [math.fsum(math.exp(v - most) for v in logs[i:i + len(slopes)])
               for i in range(0, len(logs), len(slopes))]
    reached = list(itertools.accumulate(weights))
    low, middle, high = (math.exp(xs[bisect.bisect_left(reached, q * reached[-1])])
                         for q in (0.025, 0.5, 0.975))
    return Fit(middle, low, high)


def softplus(x: float) -> float:
    """log(1 + e^x), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def rough_knee(points: Sequence[PointResult], target: float) -> float:
    """The log rate between the last point that met the target and the first that did not."""
    bad = min((p.rate_rps for p in points if fails(p, target)), default=math.inf)
    good = max((p.rate_rps for p in points if seems_fine(p, target) and p.rate_rps < bad),
               default=bad)
    return math.log(math.sqrt(good * min(bad, 2 * good)))


def estimate(points: Sequence[PointResult], target: float, burstiness: float, seed: int,
             arrivals: int, guess_rps: float) -> Fit:
    """The knee by what the points taught, and by what they counted."""
    return fit_knee(points, target, taught(points, target, burstiness, seed, arrivals, guess_rps))


def taught(points: Sequence[PointResult], target: float, burstiness: float, seed: int,
           arrivals: int, guess_rps: float) -> Optional[Tuple[float, float, float]]:
    """What the model says: the log of the knee, its error, and the slope there; None if nothing."""
    causes = causes_of(points, target)
    lives = [lives_of(p.samples, causes) for p in points]
    everything = [life for part in lives for life in part]
    close = [life for p, part in zip(points, lives) if 1 / NEAR < p.rate_rps / guess_rps < NEAR
             for life in part]
    calm = [life for p, part in zip(points, lives) if 2 * sum(p.met) > len(p.met)
            for life in part]
    models = learn(everything, close if len(close) >= 400 else calm if len(calm) >= 200
                   else everything, causes)
    if not models:
        return None
    sizes = stream(seed, "works").choices(models[0].sizes, k=arrivals)  # the same in all models
    load = Load(1.0, None, burstiness, None, None, None)
    unit_due = list(itertools.accumulate(itertools.islice(gaps(load, seed), arrivals)))
    bad = min((p.rate_rps for p in points if fails(p, target)), default=math.inf)
    knees = []
    for model in models:
        rate, slope = model_knee(model, unit_due, sizes, target, guess_rps) or (math.inf, 1.0)
        near = [(p, part) for p, part in zip(points, lives)
                if 1 / NEAR < p.rate_rps / rate < NEAR and len(part) >= 50]
        if near and not model.cause.drain:
            rate *= likeness(model, [p for p, _ in near], [part for _, part in near])
        told = sum(len(part) for _, part in near)
        far = sum(not life.met for _, part in near for life in part) < ENOUGH_MISSES
        if min(p.rate_rps for p in points) / 2 < rate < NEAR * bad:  # else it saw too little
            knees.append((math.log(rate), MODEL_SD_N / (told + 30) + (MODEL_ODDS_SD / slope) ** 2
                          + (MODEL_FAR_SD if far else MODEL_SD) ** 2, slope))
    if not knees:
        return None
    (x, variance, slope), (other, _, _) = knees[0], knees[-1]
    return (x + other) / 2, math.sqrt(variance + ((x - other) / 2) ** 2), slope


def causes_of(points: Sequence[PointResult], target: float) -> List[Cause]:
    """The causes of misses that are tried.

    Prompts are read faster than the server was seen to keep up with: were it slower, a queue of
    prompts would grow in every jam, and pass for its cause.
    """
    kept_up = max((p.rate_rps * sum(s.n_in for s in p.samples) / len(p.samples)
                   for p in points if p.samples and not fails(p, target)), default=0.0)
    return ([Cause(blend) for blend in (0.0, 0.5, 1.0)]
            + [Cause(drain=part * kept_up) for part in DRAINS if kept_up])


# (rate, requests to measure, number of the point) -> what it showed; None: interrupted
Measure = Callable[[float, int, int], Optional[PointResult]]


ALONE = ("requests miss the SLO even when they are alone: no rate meets the target; look at the "
         "SLO, the lengths and the failures")


def find_goodput(measure: Measure, target: float, budget: int, start_rps: float,
                 burstiness: float = 1.0, seed: int = 1, least_s: float = 0.0) -> Search:
    """The highest rate whose attainment meets the target, in about `budget` requests at most.

    Doubles or halves from start_rps until one rate is fine and one is not, then measures around
    the estimate, longer each time, until its interval is narrow. A window lasts least_s, or takes
    an eighth of the budget: in less than a few times the SLO nothing can miss it. What misses with
    nobody else in flight no lower rate mends; a queue that grows is past the knee whatever the SLO,
    and is asked about again where the point was short. Rates in 1/s.
    """
    points: List[PointResult] = []
    usable: List[PointResult] = []
    bad: List[float] = []
    rate, n, fit = start_rps, SEARCH_START_N, None
    why = "the requests were spent before the interval was narrow"
    while True:
        rate = float(f"{rate:.3g}")
        least = max(SEARCH_START_N, min(math.ceil(rate * least_s), budget // 8))
        n = affordable(points, rate, budget, max(n, least), fit is not None)
        point = measure(rate, n, len(points)) if n >= SEARCH_START_N // 2 else None
        if point is None:
            why = "interrupted" if n >= SEARCH_START_N // 2 else why
            break
        points.append(point)
        usable = believed(points)
        good = [p.rate_rps for p in usable if seems_fine(p, target)]
        bad = [p.rate_rps for p in usable if fails(p, target)]
        doubtful = min((p.rate_rps for p in usable if not seems_fine(p, target)), default=math.inf)
        ceiling = min((p.rate_rps for p in points if p.verdict == LIMITED), default=math.inf)
        if misses_alone(usable, target):
            return answer(points, None, target, None, ALONE)
        if good and not bad and ceiling < math.inf:
            rate, n = max(good), clean_needed(target)
            if sum(len(p.met) for p in usable if p.rate_rps == rate) >= n:
                return answer(points, None, target, max(good), "this client could not send more: "
                              "a lower bound, --workers or another machine go further")
        elif doubtful < min(bad, default=math.inf):
            rate, n = doubtful, 2 * CERTAIN_N
        elif not bad and usable:
            rate = further(usable)
            n = max(SEARCH_START_N, min(budget // 8, math.ceil(STAY * rate * seconds_in(point))))
            if rate > SEARCH_SPAN * start_rps:
                return answer(points, None, target, max(good), "no rate tried missed the SLO: a "
                              "lower bound")
        elif not good:
            rate /= 2
            if rate < start_rps / SEARCH_SPAN:
                return answer(points, None, target, None, "no rate tried met the SLO, the lowest "
                              f"being {figure(2 * rate)} req/s")
        else:
            fit = estimate(usable, target, burstiness, seed, ARRIVALS[0],
                           fit.rate_rps if fit else math.exp(rough_knee(usable, target)))
            width = math.log(fit.high_rps / fit.low_rps)
            long = sum(len(p.met) for p in usable if 1 / NEAR < p.rate_rps / fit.rate_rps < NEAR)
            sound = any(len(p.met) >= 200 and seems_fine(p, target) for p in usable)
            if width < 2 * PRECISION and long > 3 * clean_needed(target) and sound:
                why = ""
                break
            rate = fit.rate_rps * STEPS[len(points) % len(STEPS)]
            if nothing_missed(usable):  # halve the bracket, then ask again whether the queue grows
                rate = min(bad) if min(bad) < 1.03 * max(good) else math.sqrt(max(good) * min(bad))
            rate = min(rate, 0.95 * ceiling, NEAR * min(bad))
            n = max(budget // (4 if width < 0.4 and long >= 200 else 12),
                    math.ceil(STAY * rate * seconds_in(point)))
    if fit is not None:
        fit = estimate(usable, target, burstiness, seed, ARRIVALS[1], fit.rate_rps)
        return answer(points, fit, target, None, why)
    sure = [] if bad else [p.rate_rps for p in usable if len(p.met) >= clean_needed(target)]
    return answer(points, None, target, max(sure, default=None), why + (
        ", and no rate tried missed the SLO: a lower bound" if sure else ""))


def nothing_missed(points: Sequence[PointResult]) -> bool:
    """Whether no request missed: then the knee is where the queue begins to grow."""
    return all(all(p.met) for p in points)


def believed(points: Sequence[PointResult]) -> List[PointResult]:
    """The points that count: not at the client's limit, and a queue that grew by chance, as one no
    shorter at no lower rate shows, taken as steady."""
    steady = [(p.rate_rps, len(p.met)) for p in points if p.verdict == "VALID"]
    return [p._replace(verdict="VALID") if any(rate >= p.rate_rps and n >= len(p.met)
                                               for rate, n in steady) else p
            for p in points if p.verdict != LIMITED]


def further(points: Sequence[PointResult]) -> float:
    """The next rate while none has missed: twice the last, or short of where the server is full.

    Two points tell where that is: with work shared, E2E is a / (1 - rate / full). Once E2E has
    grown by half, steps are small: a run far past the knee costs many requests.
    """
    last = points[-1].rate_rps
    before = [p for p in points if p.rate_rps < last]
    if not before:
        return 2 * last
    grown = seconds_in(points[-1]) / seconds_in(before[-1])
    full = ((grown * last - before[-1].rate_rps) / (grown - 1)) if grown > 1.02 else math.inf
    most = 1.4 if seconds_in(points[-1]) > 1.5 * min(map(seconds_in, points)) else 2.0
    return min(most * last, max(1.2 * last, 0.9 * full))


def seconds_in(point: PointResult) -> float:
    """The mean time from due to end of a point's requests [s]."""
    took = [s.end_s - s.due_s for s in point.samples if s.measured and s.end_s is not None]
    return math.fsum(took) / len(took) if took else math.inf


def affordable(points: Sequence[PointResult], rate_rps: float, budget: int, n: int,
               bracketed: bool) -> int:
    """Requests that a point at this rate is to measure: n at most, if that can be paid.

    Between the brackets it is more where its ramp and its tail cost more than that, and all that
    is left where that would not pay for another point.
    """
    spare, extra = float(budget - sum(p.requests for p in points)), 0.0
    spare -= 3 * math.sqrt(max(0.0, spare))  # arrivals are random
    if points:
        last = points[-1]
        extra = (last.requests - len(last.met)) * min(2, rate_rps / last.rate_rps) ** 2
        calm = [p for p in points if p.calm]
        if calm:  # a ramp of an E2E, a tail of two
            extra = max(extra, 3 * rate_rps * seconds_in(calm[-1]))
    most = math.floor(spare - extra)
    if not bracketed:
        return min(n, most)
    n = max(n, round(1.5 * extra))
    return most if most < 1.5 * n + extra else n


def misses_alone(points: Sequence[PointResult], target: float) -> bool:
    """Whether requests that had the server to themselves miss more than the target allows."""
    alone = [life.met for p in points for life in lives_of(p.samples, ()) if life.mean < 1 + 1e-6]
    return share_interval(sum(alone), len(alone), len(alone))[1] < target if alone else False


def fails(point: PointResult, target: float) -> bool:
    """Whether a point looks like missing the target: grows, or misses beyond chance."""
    n = len(point.met)
    return (n - sum(point.met) > max(2.0, 2 * (1 - target) * n)
            or (point.verdict == "UNSTABLE" and n >= CERTAIN_N))


def seems_fine(point: PointResult, target: float) -> bool:
    """Whether it does not fail; one whose queue grew in too few requests to say does neither."""
    return point.verdict != "UNSTABLE" and not fails(point, target)


def answer(points: Sequence[PointResult], fit: Optional[Fit], target: float,
           bound_rps: Optional[float], why: str) -> Search:
    """The search as reported: every point with its interval, and what it says."""
    factor = clustering([p for p in points if not fails(p, target)])
    rows = []
    for p in points:
        n, met = len(p.met), sum(p.met)
        low, high = share_interval(met, n / factor if met < n else n, n)
        verdict = p.verdict if p.verdict != "VALID" else (
            "meets" if low >= target else "misses" if high < target else "open")
        rows.append({"rate_rps": p.rate_rps, "offered": n, "attainment": met / n if n else None,
                     "low": low, "high": high, "verdict": verdict, "requests": p.requests})
    rate, low_rps, high_rps = fit or (bound_rps, bound_rps, None)
    return Search(rate, low_rps, high_rps, target, rows, sum(p.requests for p in points),
                  sum(p.seconds for p in points), fit is not None and not why, why)
# ---- 8c. Findings ------------------------------------------------------------------------------
# Pure. Which symptoms of a table show in the runs, with their figures: what is likely behind each,
# the knob in two engines' spelling, and the term of the step-time equation that the knob moves.
# "High" is against the SLO; without one, against low load, or a ratio that needs no model.


LOW_IN_FLIGHT = 2.0  # on average, at most: nobody queues, and so few contexts weigh little
QUEUED, SAMPLES = 1.0, 3  # waiting in the engine, on average of so many readings, at least
LONG_WAIT = 0.5  # TTFT over the time of the answer after it, medians: where both are too long
PLATEAU = 0.8  # of the most that ran, on average while any waited: of a few seats one is often free
OFTEN = 0.2  # of those readings are the most that ran, where the limit is not known
POOL_FULL = 0.8  # of the KV pool, with one more request: that one may have to wait for blocks
DEPTH_LEAST = 0.25  # of what Little's law has waiting where TTFTs of like prompts differ so much
LATE_SURE = 1.5  # a prefill over the SLO past low load, where others' prefills slow it as much
TIMES_FLOOR = 3.0  # TTFT p99 over that of the same prompts alone, where no SLO says what is high
SPIKE = 3.0  # a gap over the median one: more than a step beside a prefill chunk of its own cost
SPIKE_NO_SLO = 8.0  # p99 over the median gap, at least: 6 ms tokens then pause for a chat's 50 ms
IN_PREFILL = 0.7  # of the spikes, at least, and of the ordinary gaps at most half that share
GROWN = 2.0  # the time of a token over low load's: the batch then costs as much as all else
GROWN_PAST_SLO = 1.25  # the same where the TPOT SLO is missed that low load meets
PREEMPTED = 0.01  # of the requests, at least: from there on p99 is theirs
HITS_LOW, PREFIX_LEAST = 0.5, 256  # of what prompts share; tokens: two of the largest usual blocks
GAPS_SEEN = 1000  # of a run, to tell what goes with the context: more say hardly more
KV_SMALL = 0.2  # of the pool: KV of less is read faster than the weights, where no gaps tell
BATCH_SMALL = 128  # far from the ridge of current GPUs, near 300: such a batch is not compute-bound
CORE_FULL = 0.9  # of a core used by the API server: one Python process can hardly use more
MARGIN = 0.5  # p99s under half of their limits: the SLO is met with margin


def signs(mine: Records, good: Records, summary: Facts, share: float) -> Dict[str, Any]:
    """What findings need to know of single requests, and no other key tells. Seconds, tokens.

    mine: those of a class among all the good ones, or all; the line of TTFTs is of all.
    base_s + s_per_token * tokens is the TTFT of a prompt that waits for nobody (alone()).
    floor_s is that of a long prompt: shorter ones are the share that must meet the SLO.
    excess_p99_s is how far TTFTs go past the line.
    spikes: gaps over SPIKE times the median, and the share of them, and of the others, that fall
    in another request's prefill; None where the 99th percentile of the gaps is none.
    """
    capped = summary["concurrency"] is not None

    def first_tokens(records: Records) -> List[Tuple[int, float, float]]:
        return sorted((max(1, (r.n_in or r.n_in_planned or 1) - (r.cached_tokens or 0)),
                       (r.first_ns - r.sent_ns) * NS,
                       (r.first_ns - (r.sent_ns if capped else r.due_ns)) * NS)
                      for r in records if r.first_ns is not None and r.sent_ns is not None)

    rows, every = first_tokens(mine), first_tokens(good)
    if len(rows) < 8:
        return {"ttft": None, "spikes": None}
    base_s, slope = alone([(n, took_s) for n, took_s, _ in every[::-(-len(every) // 1000)]])
    per_token, long = slope or 0.0, rows[math.ceil(share * len(rows)) - 1][0]
    past = sorted(max(0.0, from_s - base_s - per_token * n) for n, _, from_s in rows)
    itl, spikes = summary["itl_s"], None
    if itl["p99"] and itl["p99"] > SPIKE * itl["p50"]:
        spikes = spikes_in(mine, round(SPIKE * itl["p50"] / NS), prefills(good, base_s, per_token))
    return {"ttft": {"base_s": base_s, "s_per_token": slope, "long_tokens": long,
                     "floor_s": base_s + per_token * long,
                     "excess_p99_s": percentile(past, 0.99)}, "spikes": spikes}


def repeated(everything: Records, plan: Plan) -> Dict[str, Optional[float]]:
    """{mean, of_repeaters}: prompt tokens that began an earlier prompt of the run or its answer.

    of_repeaters: the mean over the requests with any. What a prefix cache without limit would hold
    as each measured request comes; the first of a group or a session finds nothing.
    """
    work, tokens = plan.work, []
    groups: Dict[str, int] = collections.defaultdict(int)  # requests of a class so far
    held: Dict[int, int] = {}  # tokens of a session so far
    for r in everything:
        n_in = r.n_in or r.n_in_planned or 0
        if work.trace:
            own = n_in * (work.trace.about.get("shared_share") or 0.0)
        elif r.session >= 0:
            own, held[r.session] = held.get(r.session, 0), n_in + (r.n_out or 0)
        else:
            of = next((c.work for c in work.classes if c.name == r.mix_class), work)
            own = of.shared_prefix if groups[r.mix_class] >= of.prefix_groups else 0
            groups[r.mix_class] += 1
        if r.ok and r.measured:
            tokens.append(min(own, n_in))
    return {"mean": mean_of(tokens), "of_repeaters": mean_of([n for n in tokens if n])}


def alone(rows: Sequence[Tuple[int, float]]) -> Tuple[float, Optional[float]]:
    """(base, per token) [s] of TTFT by length, sorted: a line along the 10th percentiles.

    A least-squares line through up to eight groups, each at the 10th percentile of what its
    requests took beyond the line before, until the line stays. None a token: all of one length.
    """
    base_s = percentile(sorted(took_s for _, took_s in rows), 0.1) or 0.0
    size = max(8, -(-len(rows) // 8))
    groups = [rows[at:at + size] for at in range(0, len(rows) - 7, size)]
    tokens = [sum(n for n, _ in group) / len(group) for group in groups]
    if tokens[-1] <= 1.5 * tokens[0]:
        return base_s, None
    slope, mean_n = 0.0, sum(tokens) / len(tokens)
    for _ in range(30):
        lows = [slope * n + (percentile(sorted(t - slope * m for m, t in group), 0.1) or 0.0)
                for n, group in zip(tokens, groups)]
        mean_s, before = sum(lows) / len(lows), slope
        slope = max(0.0, sum((n - mean_n) * (low - mean_s) for n, low in zip(tokens, lows))
                    / sum((n - mean_n) ** 2 for n in tokens))
        base_s = max(0.0, mean_s - slope * mean_n)
        if abs(slope - before) <= 0.001 * slope:
            break
    return base_s, slope


def prefills(good: Records, base_s: float, s_per_token: float) -> List[Tuple[int, int]]:
    """When each request's prompt was computed [ns], by the line of TTFTs."""
    return [(r.first_ns - round((base_s + s_per_token * (r.n_in or r.n_in_planned or 1)) / NS),
             r.first_ns) for r in good if r.first_ns is not None]


def covered(spans: Iterable[Tuple[int, int]]) -> Tuple[List[int], List[int]]:
    """(starts, stops) of what spans of time cover, in order."""
    starts: List[int] = []
    stops: List[int] = []
    for start, stop in sorted(spans):
        if stops and start <= stops[-1]:
            stops[-1] = max(stops[-1], stop)
        else:
            starts.append(start)
            stops.append(stop)
    return starts, stops


def context_share(good: Records, line: Optional[Facts]) -> Optional[Dict[str, float]]:
    """{share, error}: what part of what a sequence adds to a step goes with its context.

    Least squares of gaps beside no prefill on how many decode (d) and on how many tokens these hold
    (h): the part of h that d does not explain tells its cost a token, since requests come and go.
    Twice the gaps are left out that are far off the fit: something else made them long, a late
    reader or a prefill. error: the standard one. None where no load or context differs.
    """
    if line is None:
        return None
    starts, stops = covered(prefills(good, line["base_s"], line["s_per_token"] or 0.0))
    stride = max(1, sum(r.events for r in good) // (4 * GAPS_SEEN))
    quiet = []
    for n, r in enumerate(good):
        for i in range(n % stride, len(r.event_ns) - 1, stride):
            a, b = r.event_ns[i:i + 2]
            at = bisect.bisect_right(stops, a)
            if at == len(starts) or starts[at] >= b:
                quiet.append((a, (b - a) * NS))
    quiet = sorted(quiet[::-(-len(quiet) // GAPS_SEEN) or 1])
    times = [at_ns for at_ns, _ in quiet]
    decode, held = [0.0] * len(times), [0.0] * len(times)
    for r in good:
        stamps, n_in = r.event_ns, r.n_in or r.n_in_planned or 0
        if stamps:
            for k in range(bisect.bisect_left(times, stamps[0]),
                           bisect.bisect_left(times, stamps[-1])):
                decode[k] += 1
                held[k] += n_in + bisect.bisect_right(stamps, times[k])

    def dot(a: Iterable[float], b: Iterable[float]) -> float:
        return math.fsum(map(operator.mul, a, b))

    found, rows = None, list(zip(decode, held, (gap_s for _, gap_s in quiet)))
    for _ in range(3):
        if len(rows) < 30:
            break
        means = [math.fsum(column) / len(rows) for column in zip(*rows)]
        d, h, y = ([v - mean for v in column] for column, mean in zip(zip(*rows), means))
        if not dot(d, d):
            break
        per_d, s_per_d = dot(d, h) / dot(d, d), dot(d, y) / dot(d, d)
        rest = [b - per_d * a for a, b in zip(d, h)]
        if s_per_d <= 0 or dot(rest, rest) < 1e-6 * dot(h, h):
            break
        late = [b - s_per_d * a for a, b in zip(d, y)]
        s_per_token = dot(rest, late) / dot(rest, rest)
        left = [b - s_per_token * a for a, b in zip(rest, late)]
        error = math.sqrt(dot(left, left) / (len(rows) - 3) / dot(rest, rest))
        found = {"share": s_per_token * per_d / s_per_d, "error": error * abs(per_d) / s_per_d}
        least = 3 * sorted(map(abs, left))[len(left) // 2]
        rows = [row for row, apart in zip(rows, left) if abs(apart) <= least]
    return found


def spikes_in(good: Records, limit_ns: int, spans: Sequence[Tuple[int, int]]) -> Dict[str, Any]:
    """{n, in_prefill, others_in_prefill}: gaps over a limit, and shares that overlap a prefill.

    A token that leaves with a prefill's last step is stamped just before it: a millisecond is
    taken off each end, so that the next gap does not count.
    """
    starts, stops = covered((start, stop - min(round(MS / NS), (stop - start) // 4))
                            for start, stop in spans)
    seen, hit = [0, 0], [0, 0]
    for r in good:
        for i, (a, b) in enumerate(zip(r.event_ns, itertools.islice(r.event_ns, 1, None))):
            spike = b - a > limit_ns
            if spike or not i % 8:
                at = bisect.bisect_right(stops, a)
                seen[spike] += 1
                hit[spike] += at < len(starts) and starts[at] < b
    return {"n": seen[1], "in_prefill": hit[1] / seen[1] if seen[1] else None,
            "others_in_prefill": hit[0] / seen[0] if seen[0] else None}


class Case(NamedTuple):
    """One run to be judged, the runs around it by load, and the SLO."""

    number: int
    run: Facts  # of a class of --mix: its own latencies, and all else as it was for all
    runs: Sequence[Facts]  # that can be trusted, by how much was in flight
    slo: Facts  # the class's own
    name: str = ""  # the class's
    weights_s: Optional[float] = None  # of a step, by the deployment file
    most: Optional[float] = None  # that may run at once, by the same or of what is simulated

    @property
    def label(self) -> str:
        """The load, and whose."""
        return f"{self.name} at {self.run['label']}" if self.name else str(self.run["label"])

    def p(self, key: str, name: str = "p99") -> Optional[float]:
        """A percentile over successes [s]: failures are no symptom of the table."""
        spread = self.run[key]
        value: Optional[float] = spread.get("successes", spread)[name]
        return value

    @property
    def missed(self) -> bool:
        """Whether the SLO is missed; without one, whatever grows may matter."""
        share: Optional[float] = self.run["attainment"]
        return share is None or share < self.slo["attainment"]

    @property
    def low(self) -> bool:
        """Whether the run is at low load."""
        return (self.run["in_flight_mean"] or math.inf) <= LOW_IN_FLIGHT

    def server(self, key: str, part: str = "mean") -> Optional[float]:
        """What the engine said; None where it said nothing."""
        value = (self.run["server"] or {}).get(key)
        return value.get(part) if isinstance(value, Mapping) else value

    @property
    def depth(self) -> Optional[float]:
        """Requests that waited in the engine, on average; None where it did not say often."""
        return self.server("queue_depth") if (self.server("samples") or 0) >= SAMPLES else None

    @property
    def waits(self) -> bool:
        """Whether the engine has a queue: it says so or, where it is silent, latencies grow."""
        return (self.run["verdict"] == "UNSTABLE" and not self.run["concurrency"]
                if self.depth is None else self.depth >= QUEUED)

    @property
    def seats(self) -> Optional[float]:
        """How many ran whenever any waited, though the KV pool had room: the engine's own limit."""
        rows = [row[1] for row in (self.run["server"] or {}).get("series", ())
                if (row[2] or 0) >= 1 and row[1]]
        most, kv = self.server("running", "max"), self.server("kv_usage", "max")
        if len(rows) < SAMPLES or not most or kv is None or kv * (1 + 1 / most) > POOL_FULL or any(
                (run["server"] or {}).get("preemptions") for run in self.runs):
            return None
        often = (most >= 0.95 * self.most if self.most else
                 rows.count(most) >= OFTEN * len(rows))  # else the step's tokens may be the limit
        return most if often and sum(rows) >= PLATEAU * most * len(rows) else None


def of_slo(value: Optional[float], limit: Optional[float]) -> str:
    """A figure [s] in ms beside its limit."""
    return f"{in_ms(value)} ms" + (f" (SLO {in_ms(limit)})" if limit else "")


def queue(c: Case) -> Tuple[str, bool]:
    """(what shows that TTFT is high for a queue, '' if it is not; whether TPOT is fine)."""
    ttft = c.p("ttft_from_sent_s" if c.run["concurrency"] else "ttft_s")
    tpot, own, limit, depth = c.p("tpot_s"), c.run["signs"]["ttft"], c.slo["tpot_s"], c.depth
    if ttft is None or own is None:
        return "", False
    best_s = min(run["signs"]["ttft"]["floor_s"] for run in c.runs if run["signs"]["ttft"])
    least = c.runs[0]["tpot_s"]["successes"]["p50"] or math.inf
    fine = tpot is None or (tpot <= limit if limit else (c.p("tpot_s", "p50") or 0)
                            <= GROWN * least)
    # by Little's law so many wait on average, the p99 of an exponential wait being 4.6 means
    due = (c.run["offered_rate_rps"] or 0.0) * own["excess_p99_s"] / 4.6
    apart = fine and not c.low and own["excess_p99_s"] >= ttft / 2 and (
        depth >= DEPTH_LEAST * due if depth is not None else not prefill_stalls(c))
    if c.slo["ttft_s"]:
        high = ttft > c.slo["ttft_s"] and (c.waits or apart)
    else:
        high = c.waits and ttft > TIMES_FLOOR * best_s
    if not high or (late_alone(c) and slow_prefill(c)):
        return "", fine
    kv, running, seats = c.server("kv_usage", "max"), c.server("running", "max"), c.seats
    return (f"TTFT p99 {of_slo(ttft, c.slo['ttft_s'])}, at best {in_ms(best_s)} ms for a long "
            f"prompt; TPOT p99 {of_slo(tpot, limit)}"
            + (f"; {figure(depth)} wait in the engine on average" if depth is not None else
               "; the queue grows" if c.waits else "")
            + ("" if kv is None or running is None else
               f"; {running:.0f} ran whenever any waited, KV use {kv:.0%}: the engine's own limit, "
               "and KV has room for more" if seats and fine else
               f"; {running:.0f} ran at most, KV use {kv:.0%}"), fine)


def seats_taken(c: Case) -> str:
    """TTFT high, TPOT fine, and a queue before a limit that can be raised."""
    text, fine = queue(c)
    return text if fine and c.seats else ""


def queueing(c: Case) -> str:
    """TTFT high, TPOT fine, and a queue: the engine says so, it grows, or like prompts differ."""
    text, fine = queue(c)
    return text if fine else ""


def overload(c: Case) -> str:
    """TTFT high for a queue, and TPOT as well, but the wait weighs more."""
    text, fine = queue(c)
    ttft, e2e = c.p("ttft_s", "p50") or 0.0, c.p("e2e_s", "p50") or 0.0
    return text if not fine and ttft > LONG_WAIT * (e2e - ttft) else ""


def prefill_stalls(c: Case) -> str:
    """Spikes between tokens that fall in others' prefills, and are long beside the TPOT SLO."""
    itl, spikes, limit = c.run["itl_s"], c.run["signs"]["spikes"], c.slo["tpot_s"]
    if not spikes or (c.run["client"]["coalesced_share"] or 0) > COALESCED_SHARE:
        return ""
    least = SPIKE_NO_SLO * itl["p50"]
    if limit:
        least = limit if (c.p("tpot_s") or 0) > limit else SPIKE * limit
    if itl["p99"] <= least:
        return ""
    within, others = spikes["in_prefill"] or 0.0, spikes["others_in_prefill"] or 0.0
    if within < IN_PREFILL or others > within / 2:
        return ""
    return (f"ITL p99 {of_slo(itl['p99'], limit)}, p50 {in_ms(itl['p50'])} ms; {within:.0%} of the "
            f"{spikes['n']} gaps over {SPIKE:g}x the median fall in another request's prefill, "
            f"{others:.0%} of the others; long prompts have "
            f"{count(c.run['signs']['ttft']['long_tokens'])} tokens")


def late_alone(c: Case) -> bool:
    """Whether no queue need be: a long prompt's prefill, where it was quickest, is past the SLO."""
    limit, best = c.slo["ttft_s"], min(
        (run for run in c.runs if run["signs"]["ttft"] and run["verdict"] == "VALID"),
        key=lambda run: float(run["signs"]["ttft"]["floor_s"]), default=None)
    if not limit or best is None or c.run["verdict"] != "VALID":
        return False
    own = best["signs"]["ttft"]
    per_token, low = own["s_per_token"], best["in_flight_mean"] <= LOW_IN_FLIGHT
    return bool((own["floor_s"] if low else 0.0) > limit if per_token is None else
                per_token * own["long_tokens"] > limit * (1.0 if low else LATE_SURE))


def slow_prefill(c: Case) -> str:
    """A long prompt's own prefill is late at low load, or most of what is late without a queue."""
    own, limit, ttft = c.run["signs"]["ttft"], c.slo["ttft_s"], c.p("ttft_s")
    if not (own and limit and ttft and ttft > limit) or not (
            (c.low and own["floor_s"] > limit) or (not c.waits and own["floor_s"] > ttft / 2)
            or late_alone(c)):
        return ""
    per_token, ours = own["s_per_token"], c.server("client_ttft_s")
    if not c.low if per_token is None else per_token * own["long_tokens"] < own["floor_s"] / 2:
        return ""  # it cannot be told from the batch, or most of it does not depend on the length
    if (c.server("beyond_engine_s") or 0) > (ours or math.inf) / 2:
        return ""  # it is not spent in the engine
    return (f"TTFT p99 {of_slo(ttft, limit)} at {figure(c.run['in_flight_mean'])} in flight, "
            f"where a prompt of {count(own['long_tokens'])} tokens takes {in_ms(own['floor_s'])} "
            "ms alone"
            + (f"; {figure(per_token / US)} us a prompt token" if per_token is not None else
               "; prompts have one length, so a delay before the engine would look the same"
               if c.server("beyond_engine_s") is None else ""))


def one_token_s(runs: Sequence[Facts]) -> Optional[float]:
    """How long a token takes a stream alone [s], by the line through two loads; None of one batch.

    By Little's law the batch is what is in flight less the share of its time that is TTFT.
    """
    points = [(run["in_flight_mean"] * (1 - run["ttft_s"]["successes"]["mean"]
                                        / run["e2e_s"]["successes"]["mean"]),
               run["tpot_s"]["successes"]["p50"]) for run in runs
              if run["tpot_s"]["successes"]["p50"]]
    least = points[0] if points else (0.0, 0.0)
    batch, token_s = next((p for p in points if p[0] >= 2 * least[0]), least)
    if not batch > least[0]:
        return None
    slope = max(0.0, (token_s - least[1]) / (batch - least[0]))
    return float(least[1] - slope * max(0.0, least[0] - 1))


def bandwidth(c: Case) -> str:
    """TPOT misses, and a stream alone takes as long or, where growth() shows none, nearly so."""
    worst, limit, least = c.p("tpot_s"), c.slo["tpot_s"], c._replace(run=c.runs[0])
    alone_s = (least.p("tpot_s", "p50") if least.low else one_token_s(c.runs)) or 0.0
    if not (limit and worst and worst > limit and alone_s > limit / GROWN_PAST_SLO
            and not growth(c)[0]):
        return ""
    drafts = c.server("spec_acceptance")
    return (f"TPOT p50 {in_ms(c.p('tpot_s', 'p50'))}, p99 {of_slo(worst, limit)} at "
            f"{figure(c.run['in_flight_mean'])} in flight"
            + (f", so {in_ms(alone_s)} ms alone by how it grows with the load" if not least.low
               else f", p50 {in_ms(alone_s)} ms at {figure(least.run['in_flight_mean'])}"
               if c.run is not least.run else "")
            + (f"; {drafts:.0%} of the drafts accepted" if drafts is not None else "")
            + (f"; the deployment has {in_ms(c.weights_s)} ms for reading weights, so "
               + ("most of it is that" if c.weights_s > alone_s / 2 else
                  "most of it is a fixed cost") if c.weights_s else ""))


def growth(c: Case) -> Tuple[str, bool]:
    """(how a token's time grew with the load, '' if that did not matter; whether KV can be why)."""
    least, limit = c.runs[0], c.slo["tpot_s"]
    upto = [run for run in c.runs if run["in_flight_mean"] <= c.run["in_flight_mean"]]
    gaps = [(not run["itl_is_chunk_gap"] and (run["client"]["coalesced_share"] or 0)
             <= COALESCED_SHARE and run["itl_s"]["p50"])  # else events are not tokens
            or run["tpot_s"]["successes"]["p50"] or math.inf for run in upto]
    ratio = gaps[-1] / gaps[0]
    first, last = (run["tpot_s"]["successes"] for run in (least, c.run))
    broken = limit is not None and (last["p99"] or 0) > limit >= (first["p99"] or math.inf)
    if (c.run["in_flight_mean"] < 2 * least["in_flight_mean"]
            or any(b < 0.95 * a for a, b in zip(gaps, gaps[1:]))
            or not (broken and ratio >= GROWN_PAST_SLO if limit else ratio >= GROWN)):
        return "", False
    kv, batch = c.server("kv_usage", "max"), c.server("running", "max")
    most = c._replace(run=c.runs[-1])  # what grows is the same in all of them
    most_kv, most_batch = most.server("kv_usage", "max"), most.server("running", "max")
    error, share = min(((told["error"], told["share"]) for told in (
        run["context_share"] for run in c.runs) if told), default=(math.inf, 0.5))
    sure = abs(share - 0.5) > 3 * error
    small = share < 0.5 if sure else most_kv is not None and most_kv < KV_SMALL
    small = small and most_batch is not None and most_batch < BATCH_SMALL
    return (f"a token takes {in_ms(gaps[-1])} ms at {figure(c.run['in_flight_mean'])} in flight, "
            f"{in_ms(gaps[0])} ms at {figure(least['in_flight_mean'])}; TPOT p99 "
            f"{of_slo(last['p99'], limit)}"
            + (f"; KV use {kv:.0%} at most" if kv is not None else "; KV use is not known"
               + (", nor how many ran at once" if sure else
                  ", so work for each sequence would look the same"))
            + (f", {batch:.0f} running" if batch is not None else "")
            + (f"; {min(1.0, max(0.0, share)):.0%} of what a sequence adds to a step goes with its "
               "context" if sure else "; so little KV can hardly slow a step so much" if small else
               "")), not small


def degrades(c: Case) -> str:
    """The time of a token grows with the load, and KV reads can be why."""
    text, by_kv = growth(c)
    return text if by_kv else ""


def preempted(c: Case) -> str:
    """The engine took requests out of the batch and computed them again."""
    number, kv = c.server("preemptions"), c.server("kv_usage", "max")
    if not number or number < PREEMPTED * c.run["offered"]:
        return ""
    return (f"{count(number)} preemptions for {count(c.run['offered'])} requests"
            + (f"; KV use {kv:.0%} at most" if kv is not None else ""))


def few_hits(c: Case) -> str:
    """Prompts repeat how earlier ones began, and the engine computes it again and again."""
    mean, cached = c.run["input_tokens_mean"], c.run["cached_tokens_mean"]
    could, each = (c.run["repeated_tokens"][key] or 0.0 for key in ("mean", "of_repeaters"))
    hits, off = c.server("prefix_hit_rate"), c.server("prefix_queries") == 0
    if hits is None:
        hits = 0.0 if off else cached / mean if cached is not None and mean else None
    if each < PREFIX_LEAST or not mean or hits is None or hits >= HITS_LOW * could / mean:
        return ""
    return (f"{hits:.0%} of the prompt tokens came from the prefix cache, {could / mean:.0%} "
            f"could: of {count(mean)} a prompt {count(could)} are those of an earlier one's "
            "beginning" + ("; the engine looks nothing up: prefix caching is off" if off else ""))


def cpu_bound(c: Case) -> str:
    """Little output with room to spare: the client, the API server, or work for each sequence."""
    cpu = c.server("cpu_share")
    harmed = c.run["verdict"] == "UNSTABLE" or c.run["attainment"] is not None
    if harmed and (cpu or 0) >= CORE_FULL:
        return f"the API server's process used {cpu:.0%} of a core"
    text, by_kv = growth(c)
    return "" if by_kv else text


class Finding(NamedTuple):
    """A row of the symptom table; evidence gives the figures, '' where it does not show."""

    name: str
    symptom: str
    evidence: Callable[[Case], str]
    cause: str
    vllm: str
    sglang: str
    term: str
    engine: bool = False  # of the engine, not of a class, and whether the SLO is met or not


WAIT_TERM = "none: the wait before the first step, which grows as rho / (1 - rho)"
FINDINGS = (  # of those with one name the first that shows is given
    Finding("queueing", "TTFT p99 spikes under load, TPOT fine", seats_taken,
            "queueing: the arrival rate is near capacity, which the limit of the batch sets",
            "raise --max-num-seqs, KV allows it; more replicas (--data-parallel-size)",
            "raise --max-running-requests, KV allows it; more replicas (--dp-size)", WAIT_TERM),
    Finding("queueing", "TTFT p99 spikes under load, TPOT fine", queueing,
            "queueing: the arrival rate is near capacity",
            "more replicas (--data-parallel-size)", "more replicas (--dp-size)", WAIT_TERM),
    Finding("queueing", "TTFT p99 spikes under load, and TPOT is high too", overload,
            "queueing: the arrival rate is past what the engine can do within the TPOT",
            "more replicas (--data-parallel-size); what makes the step long, if found below",
            "more replicas (--dp-size); what makes the step long, if found below", WAIT_TERM),
    Finding("prefill_stalls", "ITL p99 spikes when long prompts arrive", prefill_stalls,
            "prefill stalls decode: a step carries a large piece of a prompt",
            "lower --max-num-batched-tokens; at scale disaggregate P/D (--kv-transfer-config)",
            "lower --chunked-prefill-size; at scale disaggregate P/D (--disaggregation-mode)",
            "prefill_tokens * prefill_s_per_token, in others' steps"),
    Finding("slow_prefill", "TTFT high for long prompts at low load", slow_prefill,
            "prefill compute",
            "raise --max-num-batched-tokens, --tensor-parallel-size or "
            "--prefill-context-parallel-size; --quantization fp8; --enable-prefix-caching for "
            "shared context",
            "raise --chunked-prefill-size or --tp-size; --quantization fp8; no "
            "--disable-radix-cache",
            "prefill_tokens * prefill_s_per_token, in its own steps"),
    Finding("bandwidth", "TPOT high at low load", bandwidth,
            "memory bandwidth per GPU, every step reads all weights; or a fixed cost a step: "
            "launches, scheduler, communication. Latency alone cannot tell; how long reading the "
            "weights takes (capacity.py) does",
            "raise --tensor-parallel-size; --quantization fp8 or awq; --speculative-config; H200 "
            "or B200; for a fixed cost --async-scheduling, no --enforce-eager, NVLink",
            "raise --tp-size; --quantization fp8 or awq; --speculative-algorithm; H200 or B200; "
            "for a fixed cost no --disable-overlap-schedule, no --disable-cuda-graph, NVLink",
            "weights_s, or overhead_s"),
    Finding("degrades", "TPOT degrades steadily with load", degrades,
            "the batch grows, KV reads dominate; of hundreds of sequences compute may",
            "cap --max-num-seqs; --kv-cache-dtype fp8; or accept the curve",
            "cap --max-running-requests; --kv-cache-dtype fp8_e4m3; or accept the curve",
            "kv_s_per_token * sum(context)"),
    Finding("preemptions", "preemptions", preempted,
            "the KV pool is exhausted: sequences are evicted and computed again",
            "--kv-cache-dtype fp8; raise --gpu-memory-utilization; lower --max-num-seqs or "
            "--max-model-len; raise --tensor-parallel-size",
            "--kv-cache-dtype fp8_e4m3; raise --mem-fraction-static or "
            "--schedule-conservativeness; lower --max-running-requests or --context-length; raise "
            "--tp-size",
            "the KV pool, which bounds sum(context); recomputing adds prefill_tokens", engine=True),
    Finding("few_hits", "low prefix-cache hit rate with a shared prefix", few_hits,
            "an unstable prompt prefix, caching off, a KV pool too small to keep prefixes, or "
            "replicas that are not prefix-aware",
            "static content first; --enable-prefix-caching; prefix-aware routing (Dynamo, llm-d)",
            "static content first; no --disable-radix-cache; --schedule-policy lpm; SGLang router",
            "prefill_tokens", engine=True),
    Finding("cpu_bound", "tok/s low while the GPU is not saturated, though its util may read high",
            cpu_bound, "CPU: scheduler, detokenisation, the API server; or the client",
            "--async-scheduling; raise --api-server-count; check the client",
            "raise --tokenizer-worker-num; no --disable-overlap-schedule; check the client",
            "sequences * sequence_s"),
)


def cases_of(summary: Facts, name: str = "") -> List[Case]:
    """The runs that can be trusted, as all requests saw them or one class of --mix, by load."""
    seen = [{**run, **run["classes"][name]} if name else run for run in summary["runs"]]
    slo = {**summary["slo"], **(seen[0]["slo"] if name else {})}
    sound = sorted((n for n, run in enumerate(seen) if run["verdict"] != "CLIENT-LIMITED"
                    and run["completed"] and run["in_flight_mean"]),
                   key=lambda n: seen[n]["in_flight_mean"])
    told = [dig(summary, *path) for path in (("step_time", "weights_s"), (
        "step_time", "max_num_seqs"), ("simulated", "step_time", "max_num_seqs"))]
    weights_s, *most = (v if type(v) in (int, float) and v > 0 else None for v in told)
    return [Case(n, seen[n], [seen[i] for i in sound], slo, name, weights_s, most[0] or most[1])
            for n in sound]


def findings(summary: Facts) -> Rows:
    """Each symptom that shows: figures of the least load that shows it, the others named."""
    everyone = cases_of(summary)
    found: Rows = []
    classes = [case for name in summary["runs"][0].get("classes") or () for case in cases_of(
        summary, name)]
    judged = sorted(classes, key=lambda case: case.run["in_flight_mean"]) or everyone
    for rule in FINDINGS:
        shown = [(case, text) for case in (everyone if rule.engine else judged)
                 if rule.engine or case.missed for text in [rule.evidence(case)] if text]
        if shown and all(other["name"] != rule.name for other in found):
            first, text = shown[0]
            also = ", ".join(case.label for case, _ in shown[1:])
            found.append({"name": rule.name, "symptom": rule.symptom, "run": first.number,
                          "evidence": (f"{first.name}: " if first.name else "") + text
                          + (f"; also {'' if first.name else 'at '}{also}" if also else ""),
                          "cause": rule.cause, "vllm": rule.vllm, "sglang": rule.sglang,
                          "term": rule.term})
    return found


def slo_missed(summary: Facts) -> bool:
    """Whether in any run fewer requests met the SLO, each its own, than should."""
    return any(run["attainment"] is not None and run["attainment"] < summary["slo"]["attainment"]
               for run in summary["runs"])


def advice(summary: Facts) -> List[str]:
    """What is no finding, but worth a line: cost, and what these runs cannot show."""
    slo, found = summary["slo"], []
    last = summary["runs"][by_rate(summary["runs"])[-1]]
    parts = (last.get("classes") or {"": {**last, "slo": slo}}).values()
    limits = [(part[key]["p99"], part["slo"][key]) for part in parts
              for key in ("ttft_s", "tpot_s", "e2e_s") if part["slo"][key]]
    if limits and last["verdict"] == "VALID" and not last["client"]["interrupted"] and all(
            p99 is not None and p99 <= MARGIN * limit for p99, limit in limits):
        found.append(f"COST  the SLO is met with margin at {last['label']}: run nearer the goodput "
                     "knee (--find-goodput), or take FP8 or a smaller model")
    runs = [run for run in summary["runs"] if run["in_flight_mean"]]
    if slo_missed(summary) and all(run["in_flight_mean"] > LOW_IN_FLIGHT for run in runs):
        least = min(runs, key=lambda run: run["in_flight_mean"])
        ttft_s, tpot_s = (least[key]["successes"]["p50"] or 0 for key in ("ttft_s", "tpot_s"))
        alone_s = ttft_s + tpot_s * (least["output_tokens_mean"] or 0)
        if alone_s:
            found.append("ASK   no run at low load, so bandwidth and prefill cannot be told from "
                         "the batch and the queue: add one at about "
                         f"{figure(1 / alone_s, 2)} req/s")
    every = (slo, *slo.get("classes", {}).values())
    if not any(own[key] for own in every for key in ("ttft_s", "tpot_s")):
        found.append(f"ASK   no SLO {'of TTFT or TPOT ' * any(own['e2e_s'] for own in every)}was "
                     "given, so what is high at low load cannot be said: --slo-ttft-ms and "
                     "--slo-tpot-ms")
    return [*found, "ASK   out of memory at start-up shows only in the engine's start-up log: "
            "capacity.py --startup-log FILE reads it"]


def finding_lines(summary: Facts) -> List[str]:
    """The findings and the advice as text."""
    found, runs = summary.get("findings", ()), summary["runs"]
    why = (summary.get("metrics") or {}).get("why")
    if not any(run["completed"] for run in runs):
        lines = ["FINDINGS  none can be made: no request succeeded"]
    else:
        failures = collections.Counter(kind for run in runs for kind, n in run["failures"].items()
                                       for _ in range(n)).most_common()
        lines = [] if found else ["FINDINGS  none: " + (
            "the SLO is missed, and no symptom of the table explains it" if slo_missed(summary)
            else "no symptom of the table shows") + ("; failed: " * bool(failures) + ", ".join(
                f"{n:,} {kind}" for kind, n in failures)) + (
            f"; the engine's metrics were not there to see ({why})" if why else "")]
    for n, item in enumerate(found, 1):
        lines += [f"FINDING {n}  {item['symptom']} (rate {runs[item['run']]['label']})",
                  f"  seen    {item['evidence']}",
                  f"  cause   {item['cause']}; step-time term: {item['term']}",
                  f"  vLLM    {item['vllm']}", f"  SGLang  {item['sglang']}"]
    return [*lines, *summary.get("advice", ())]


# ---- 9. Rendering ------------------------------------------------------------------------------


class Column(NamedTuple):
    """One column: its head, its cell from a run's summary; its head and figure on the page."""

    head: str
    cell: Callable[[Facts], str]
    title: str = ""
    path: Tuple[str, ...] = ()


def optional(value: Optional[float], form: str) -> str:
    """A number in a format, '-' when absent."""
    return "-" if value is None else form.format(value)


def tail_ms(spread: Facts, key: str = "p99") -> str:
    """A percentile in ms, '~' after it where the sample does not bound it."""
    value = in_ms(spread[key])
    return value + ("~" if spread["n"] and spread[f"{key}_high"] is None else "")


TABLE = (  # the usual columns first and in this order, then ours
    Column("rate", lambda s: s["label"], "rate", ("label",)),
    Column("out tok/s", lambda s: optional(s["output_tok_s"], "{:.0f}"), "output tok/s",
           ("output_tok_s",)),
    Column("goodput", lambda s: optional(s["goodput_rps"], "{:.2f}")
           + ("*" if s["goodput_rps"] is not None and s["verdict"] == "UNSTABLE" else ""),
           "goodput /s", ("goodput_rps",)),
    Column("ttft p50", lambda s: tail_ms(s["ttft_s"], "p50"), "TTFT p50", ("ttft_s", "p50")),
    Column("ttft p99", lambda s: tail_ms(s["ttft_s"]), "TTFT p99", ("ttft_s", "p99")),
    Column("tpot p50", lambda s: tail_ms(s["tpot_s"], "p50"), "TPOT p50", ("tpot_s", "p50")),
    Column("tpot p99", lambda s: tail_ms(s["tpot_s"]), "TPOT p99", ("tpot_s", "p99")),
    Column("|", lambda s: "|"),
    Column("offered", lambda s: optional(s["offered_rate_rps"], "{:.2f}"), "offered /s",
           ("offered_rate_rps",)),
    Column("attain", lambda s: attained(s["attainment"]), "attained", ("attainment",)),
    Column("fail", lambda s: str(sum(s["failures"].values())), "failed", ("failures",)),
    Column("in flight", lambda s: optional(s["in_flight_mean"], "{:.1f}"), "in flight",
           ("in_flight_mean",)),
    Column("verdict", lambda s: verdict_text(s), "verdict", ("verdict",)),
)


def verdict_text(run: Facts) -> str:
    """The verdict; a simulated run measured nothing, and says so in its place."""
    if not run.get("simulated"):
        return str(run["verdict"])
    return "SIMULATED" if run["verdict"] == "VALID" else f"SIMULATED, {run['verdict']}"


def is_cut(run: Facts) -> bool:
    """Whether a run was interrupted; its first reason then says how far it came."""
    return bool(run["reasons"]) and str(run["reasons"][0]).startswith("INTERRUPTED")


def render_table(runs: Sequence[Facts]) -> List[str]:
    """The table, a line a run."""
    return columns([[c.head for c in TABLE]] + [[c.cell(run) for c in TABLE] for run in runs])


def columns(rows: Sequence[Sequence[str]]) -> List[str]:
    """Rows of text as lines, each column as wide as it must be, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]


def render(summary: Facts) -> str:
    """The whole report as text."""
    search = summary.get("goodput_search")
    runs = summary["runs"]
    if search:
        runs = sorted(runs, key=lambda run: run["rate_rps"])
    table = render_table(runs)
    lines = [*table, *footnotes(summary, runs, "".join(table[1:]))]
    if search:
        lines += ["", *search_lines(search)]
        lines += [f"{run_name(run)}: CLIENT-LIMITED: {run['reasons'][is_cut(run)]}" for run in runs
                  if run["verdict"] == "CLIENT-LIMITED"]
    for run in () if search else runs:
        lines += ["", f"RATE {run['label']}", *run_lines(run)]
    lines += ["", *finding_lines(summary), "", *setup_lines(summary), *fact_lines(summary),
              *shard_lines(summary), *compat_why(summary)]
    return "\n".join(lines)


def footnotes(summary: Facts, runs: Sequence[Facts], rows: str) -> List[str]:
    """What the marks in the table's rows mean, and the knee if the sweep shows one."""
    slo = summary["slo"]
    asked = ", ".join(f"{name} {slo[key] / MS:g}" for name, key in
                      (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("e2e", "e2e_s")) if slo[key])
    lines = ["ms from due" + (", SIMULATED" if summary.get("simulated") else "")
             + (f"; SLO {asked} ms, target {share(slo['attainment'])} of requests"
                              if asked else "" if slo.get("classes")
                              else "; no SLO given, so no goodput")
             + ("; each class is judged by its own SLO" if slo.get("classes") else "")]
    if "~" in rows:
        fewest = min((run["ttft_s"].get("n_effective") or 0, run["offered"]) for run in runs)
        lines.append(f"~ not bounded by the sample: p99 needs 368 independent requests, the "
                     f"run worth least had {fewest[1]}, worth {fewest[0]:.0f}")
    if "*" in rows:
        lines.append("* the queue grows: the figure falls with the length of the run")
    lines += [f"{run_name(run)}: {run['reasons'][0]}" for run in runs
              if is_cut(run) or (run["verdict"] == "VALID" and run["reasons"])]
    unrun = len(summary["plan"].get("rates") or runs) - len(runs)
    if unrun > 0 and (summary.get("killed") or any(map(is_cut, runs))):
        lines.append(f"INTERRUPTED: {unrun} further rate{'s were' if unrun > 1 else ' was'} not "
                     "run")
    if summary["plan"].get("find_goodput") and "goodput_search" not in summary:
        lines.append("GOODPUT  not found: the search had not ended")
    elif "goodput_search" not in summary and (asked or slo.get("classes")):
        lines += [f"KNEE between {before['label']} and {after['label']}: goodput no longer follows "
                  "the rate" for before, after in zip(runs, runs[1:]) if
                  (before["attainment"] or 0) >= slo["attainment"] > (after["attainment"] or 0)][:1]
    return lines


def search_lines(search: Facts) -> List[str]:
    """The points of a search for the knee, and what they say."""
    lines = columns([("rate", "requests", "attained", "95%", "against " + share(search["target"]))]
                    + [(f"{p['rate_rps']:g}", f"{p['offered']:,}",
                        attained(p["attainment"], 2),
                        f"{p['low']:.2%} to {p['high']:.2%}", p["verdict"])
                       for p in sorted(search["points"], key=lambda p: float(p["rate_rps"]))])
    rate, low, high = (search[key] for key in ("rate_rps", "low_rps", "high_rps"))
    said = "not found"
    if rate is not None:
        said = (f"{figure(rate)} req/s (95%: {figure(low)} to {figure(high)})" if high else
                f"at least {figure(rate)} req/s")
    lines.append(f"GOODPUT {said} at {share(search['target'])} attainment; {len(search['points'])} "
                 f"runs, {search['requests']:,} requests, {search['seconds']:,.0f} s")
    return [*lines, f"        {search['why']}"] if search["why"] else lines


def share(value: float) -> str:
    """A share as a percentage, no more digits than it has.

    >>> share(0.99), share(0.999)
    ('99%', '99.9%')
    """
    return f"{value * 100:.6g}%"


def attained(value: Optional[float], digits: int = 0) -> str:
    """A share that was reached; more digits where it would round to 100% while something missed.

    >>> attained(0.994), attained(0.996), attained(1.0), attained(0.9996, 1)
    ('99%', '99.6%', '100%', '99.96%')
    """
    if value is None:
        return "-"
    while value < 1 and digits < 6 and float(f"{value * 100:.{digits}f}") >= 100:
        digits += 1
    return f"{value:.{digits}%}"


def run_lines(run: Facts) -> List[str]:
    """The details of one run."""
    lines = [f"  {verdict_text(run)}" + "".join(f": {reason}" for reason in run["reasons"][:1])]
    lines += [f"    {reason}" for reason in run["reasons"][1:]]
    failed = ", ".join(f"{n} {kind}" for kind, n in run["failures"].items())
    lines.append(f"  offered {run['offered']}, sent {run['sent']}, completed {run['completed']}"
                 + (f"; failed: {failed}" if failed else "")
                 + f"; offered {optional(run['offered_rate_rps'], '{:.3g}')}/s, achieved "
                 f"{optional(run['achieved_rps'], '{:.3g}')}/s over {run['span_s']:.1f} s")
    for name, key in (("TTFT", "ttft_s"), ("  from sent", "ttft_from_sent_s"), ("TTFO", "ttfo_s"),
                      ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2E", "e2e_s")):
        if key == "ttfo_s" and run["ttfo_s"]["p50"] == run["ttft_s"]["p50"]:
            continue
        lines.append(latency_line("chunk gap" if key == "itl_s" and run["itl_is_chunk_gap"]
                                  else name, run[key], key == "itl_s" and run["itl_max_s"]))
    if run["attainment_interval"]:
        low, high = run["attainment_interval"]
        lines.append(f"  attainment {attained(run['attainment'], 1)} (95%: {low:.1%} to "
                     f"{high:.1%})")
    lines.append(f"  in flight {optional(run['in_flight_mean'], '{:.2f}')} mean, "
                 f"{run['in_flight_max']} max; rate x time in system "
                 f"{optional(run['little_rps_x_s'], '{:.2f}')}; "
                 f"{optional(run['total_tok_s'], '{:.0f}')} tok/s in and out")
    for name, part in {**(run.get("classes") or {}), **(run.get("turns") or {})}.items():
        lines += part_lines(name if run.get("classes") else f"{name} turns", part)
    if not run.get("simulated"):
        client, lag = run["client"], run["client"]["send_lag_s"]
        lines.append(f"  client: send lag p99 {in_ms(lag['p99'])} max {in_ms(lag['max'])} ms, loop "
                     f"p99 {in_ms(client['loop_busy_s']['p99'])} ms, CPU "
                     f"{optional(client['cpu_share'], '{:.0%}')} of a core, bundled reads "
                     f"{optional(client['coalesced_share'], '{:.1%}')}, "
                     f"{client['connections_opened']} connections")
    lines += [*server_lines(run.get("server")), *compat_lines(run)]
    lines += [f"  warning: {warning}" for warning in run["warnings"]]
    lines += [f"  {e['count']} x {e['class']}: {e['error']}" for e in run["errors"]]
    return lines


def latency_line(name: str, spread: Facts, longest: Any = None) -> str:
    """p50, p90, p99 with its interval, mean and longest of one latency."""
    if not spread["n"]:
        return f"  {name:<12} -"
    low, high = in_ms(spread["p99_low"]), in_ms(spread["p99_high"])
    bounds = f"({low} to {high})" if high != "-" else f"({low} to ?)"
    return (f"  {name:<12} p50 {in_ms(spread['p50'])}, p90 {in_ms(spread['p90'])}, p99 "
            f"{in_ms(spread['p99'])} {bounds}, mean {in_ms(spread['mean'])}, max "
            f"{in_ms(spread['max'])} ms" + (f", longest gap {in_ms(longest)} ms" if longest
                                            else ""))


def part_lines(name: str, part: Any) -> List[str]:
    """A class, or the first or later turns: its share of the load, goodput and latencies."""
    if not isinstance(part, Mapping):
        return []
    limits = ", ".join(f"{key[:-2]} {limit / MS:g}" for key, limit in part["slo"].items() if limit)
    line = (f"  {name}: offered {part['offered']} ({optional(part['offered_rate_rps'], '{:.3g}')}"
            f"/s), {part['failed']} failed")
    if part["attainment"] is not None:
        low, high = part["attainment_interval"]
        line += (f"; attainment {attained(part['attainment'], 1)} (95%: {low:.1%} to {high:.1%}) "
                 f"of {limits} ms, goodput {optional(part['goodput_rps'], '{:.3g}')}/s")
    return [line, *("  " + latency_line(head, part[key]) for head, key in (
        ("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s")))]


def setup_lines(summary: Facts) -> List[str]:
    """The setup statement: what was asked of what, and how."""
    plan, target = summary["plan"], summary["target"]
    run = summary["runs"][0]
    what = target["url"]
    if summary.get("simulated"):
        told = ", ".join(f"{key} {value:g}" for key, value in
                         summary["simulated"]["step_time"].items() if value != getattr(MOCK, key))
        what = (f"SIMULATED, no server, nothing measured: engine of "
                f"{summary['simulated']['profile']}{f' ({told})' if told else ''}")
    lengths = ("lengths of each class" if dig(plan, "traffic", "classes") else
               lengths_told(plan["lengths"]["input"], plan["lengths"]["output"]))
    lines = [f"SETUP  {what}, model {target['model']}; {lengths}; ignore_eos "
             f"{'on' if target['ignore_eos'] else 'off'}; arrivals {plan['arrival_process']}; "
             f"seed {plan['seed']}"]
    prefix = (f"{plan['shared_prefix_len']} tokens shared in "
              + several(plan["prefix_groups"], "group")
              if plan["shared_prefix_len"] else "as the traffic has it" if plan.get("traffic")
              else "none shared")
    lines.append(f"       prompts {'unique' if plan['unique_prompts'] else 'NOT unique'}, prefix "
                 f"{prefix}; length by {run['input_source']}: "
                 f"{optional(run['input_tokens_mean'], '{:.1f}')} tokens counted for "
                 f"{optional(run['input_tokens_planned_mean'], '{:.1f}')} planned; "
                 f"{summary['warmup']['requests']} warm-up requests"
                 + (f", {summary['warmup']['failed']} failed" if summary["warmup"]["failed"]
                    else ""))
    if plan.get("traffic"):
        lines += [f"       {plan['traffic']['text']}", *class_lines(plan)]
    client = run["client"]
    clock = (f"{client['workers']} worker(s), receive times from "
             f"{'the kernel' if client['kernel_stamps'] else 'the clock after recv'}")
    lines.append(f"       {'virtual clock' if summary.get('simulated') else clock}; plan "
                 f"{plan['hash'].replace('+', ', ')}")
    return lines


def null_infinities(value: Any) -> Any:
    """The same with infinite numbers as the text "inf", which JSON can hold."""
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if isinstance(value, Mapping):
        return {key: null_infinities(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [null_infinities(inner) for inner in value]
    return value


def as_json(value: Any, indent: Optional[int] = 1) -> str:
    """Strict JSON; infinite numbers as "inf"."""
    return json.dumps(null_infinities(value), indent=indent, allow_nan=False)


# ---- 9b. The page ------------------------------------------------------------------------------
# report.html: a pure function of the summary, one file that needs no network and no script. Each
# figure from the summary carries its path in data-path and its value in data-value.

NAMED = ("model", "precision", "gpu", "gpus", "engine", "version", "flags")  # setup, always said
MOCK_VERSION = "loadgen's built-in engine"
SERVED = ("max_model_len", "tp_size", "dtype", "quantization", "kv_cache_dtype", "cache_dtype",
          "mem_fraction_static", "gpu_memory_utilization", "enable_prefix_caching", "block_size",
          "num_gpu_blocks")  # what servers tell of their flags
NEAR_BEST = 0.95  # of a rate, close enough to speak for it
ASKED_S = 2.0  # at most, to ask the server one thing about itself


def dig(value: Any, *keys: Any) -> Any:
    """What lies under these keys and indices; None where nothing does."""
    for key in keys:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def deployed(args: Any) -> Dict[str, Any]:
    """The deployment that the flags name, {} where none; a profile of --mock may be one too."""
    for path in (args.deployment, args.mock, vars(args).get("simulate")):
        found = {} if path in (None, DEFAULT_PROFILE) else read_json(path)
        if not isinstance(found.get("model"), dict):
            if found and args.deployment:
                raise UserError(f"--deployment {path} describes no deployment; capacity.py --save "
                                "writes one")
            continue
        for keys in (("price", "gpu_per_hour"), ("hardware", "count"), ("slo", "ttft_s"),
                     ("slo", "tpot_s"), ("slo", "e2e_s")):
            value = dig(found, *keys)
            if value is not None and not (type(value) in (int, float) and 0 < value < ABSURD):
                raise UserError(f"{path}: {'.'.join(keys)} must be a number more than zero")
        return found
    return {}


def server_facts(target: Target, wiring: Wiring) -> Dict[str, str]:
    """What the server says of itself: model, engine, version, flags, as far as it does.

    From the list of models, /version (vLLM, TensorRT-LLM), /server_info (SGLang) and the labels of
    cache_config_info in /metrics (vLLM). Each is asked once, for ASKED_S at most.
    """
    root, answers = re.sub(r"/v1$", "", target.base_path), {}
    for path in (f"{target.base_path}/models", f"{root}/version", f"{root}/metrics",
                 f"{root}/server_info"):
        try:
            status, body = fetch(target, wiring, path, ASKED_S)
        except (OSError, WireError):
            break
        answers[path.rpartition("/")[2]] = body if status == "200" else b""
    models, version, info = (parsed(answers.get(name, b"")) for name in (
        "models", "version", "server_info"))
    metrics = answers.get("metrics", b"").decode("utf-8", "replace")
    listed = dig(models, "data")
    mine = next((m for m in listed if dig(m, "id") == target.model), None) if isinstance(
        listed, list) else None
    owner, engine = dig(mine, "owned_by"), re.search(r"^(vllm|sglang|trtllm)[:_]", metrics, re.M)
    cache = re.search(r"^vllm:cache_config_info\{(.{,4000})", metrics, re.M)
    labels = re.findall(r'(\w+)="([^"\\]*)"', cache[1]) if cache else ()
    flags = {"max_model_len": dig(mine, "max_model_len"),
             **(info if isinstance(info, Mapping) else {}), **dict(labels)}
    names = dict.fromkeys(str(dig(mine, key)) for key in ("id", "root") if dig(mine, key))
    facts = {
        "model": " = ".join(names),
        "engine": engine[1] if engine else owner if owner in ("vllm", "sglang", "llamacpp") else "",
        "version": dig(version, "version") or dig(info, "version"), "flags": ", ".join(
            f"{k} {flags[k]}" for k in SERVED if flags.get(k) not in (None, "", "None"))}
    if facts["version"] == MOCK_VERSION:
        facts.update(engine=MOCK_VERSION, version=None)
    return {key: printable(wiring.redacted(str(value)), 300) for key, value in facts.items()
            if value}


def setup_of(args: Any, said: Facts, known: Optional[Facts] = None,
             redacted: Callable[[str], str] = str) -> Dict[str, Any]:
    """The setup: {fact: [[value, source], ...]}, most believed first; None: nobody stated it."""
    d = args.deployed

    def listed(names: Sequence[str], *groups: str) -> str:
        found = [(name, dig(d, group, name)) for group in groups for name in names]
        return ", ".join(f"{name} {value}" for name, value in found if value is not None)

    planned = {
        "model": dig(d, "model", "id") or dig(d, "model", "name"),
        "precision": listed(("weights", "kv", "compute"), "precision"),
        "gpu": dig(d, "hardware", "gpu"), "gpus": dig(d, "hardware", "count"),
        "engine": dig(d, "engine"), "flags": listed(
            ("tp", "pp", "dp", "ep", "util", "max_num_seqs", "max_num_batched_tokens",
             "max_model_len", "prefix_caching"), "hardware", "step_time"),
        "sized for": listed(("input", "output", "shared_prefix"), "lengths")}
    facts: Dict[str, List[List[str]]] = {}
    for source, pairs in (("--metadata", args.metadata), ("server", said.items()),
                          ("deployment file", planned.items())):
        for name, value in pairs:
            if value:
                facts.setdefault(name, []).append([redacted(str(value)), source])
    for name, old in (known or {}).items():
        facts[name] = facts.get(name, []) + [p for p in old or [] if p not in facts.get(name, [])]
    return {name: facts.get(name) for name in dict.fromkeys((*NAMED, *facts))}


def stated(facts: Optional[Sequence[Sequence[str]]]) -> str:
    """A fact with its sources, equal ones together; 'not stated'."""
    values = dict.fromkeys(value for value, _ in facts or ())
    return "; ".join(f"{value} ({', '.join(by for v, by in facts or () if v == value)})"
                     for value in values) or "not stated"


def operating_point(summary: Facts) -> Tuple[Optional[int], str]:
    """(the run at which to operate, what to know about it or why there is none).

    The highest rate whose run is VALID and meets the target, not above the goodput search's rate;
    of the runs within NEAR_BEST of it, the one with the most requests.
    """
    slo, runs = summary["slo"], summary["runs"]
    if not any(slo[key] for key in ("ttft_s", "tpot_s", "e2e_s")):
        return None, "no SLO was given"
    limit = dig(summary, "goodput_search", "rate_rps") or math.inf
    order = by_rate(runs)
    met = {i for i in order if (runs[i]["attainment"] or 0) >= slo["attainment"]}
    good = [i for i in order if i in met and runs[i]["verdict"] == "VALID"
            and not dig(runs[i], "client", "interrupted")
            and (runs[i]["rate_rps"] or 0) <= limit * 1.001]
    if not good:
        return None, (f"no VALID run met the SLO for {share(slo['attainment'])} of its requests"
                      + f" at {figure(limit)}/s or less" * (limit < math.inf)
                      + "; an interrupted one is none" * any(map(is_cut, runs)))
    best = max((i for i in good if rate_of(runs[i]) >= NEAR_BEST * rate_of(runs[good[-1]])),
               key=lambda i: (runs[i]["offered"], rate_of(runs[i])))
    notes = []
    if limit < math.inf and rate_of(runs[good[-1]]) < NEAR_BEST * limit:
        notes.append(f"the knee found is {figure(limit)}/s, and no VALID run just under it: "
                     "figures and cost are of this lower rate")
    if runs[best]["attainment_interval"][0] < slo["attainment"]:
        notes.append(f"{runs[best]['offered']} requests are too few to be sure of "
                     f"{share(slo['attainment'])}")
    if set(order[:order.index(best)]) - met:
        notes.append("a lower rate missed the target: measure again")
    return best, "; ".join(notes)


def by_rate(runs: Sequence[Facts]) -> List[int]:
    """Indices of the runs by rate."""
    return sorted(range(len(runs)), key=lambda i: rate_of(runs[i]))


def rate_of(run: Facts) -> float:
    """The rate asked for, else the one that came about [1/s]."""
    return float(run["rate_rps"] or run["offered_rate_rps"] or 0.0)


def conclude(summary: Dict[str, Any], args: Any) -> None:
    """Add operating_point and cost [USD], the whole bill on the output, as far as known."""
    where, note = operating_point(summary)
    summary["operating_point"] = {"run": where, "note": note}
    price = (args.gpu_price or dig(args.deployed, "price", "gpu_per_hour")
             or dig(summary, "cost", "gpu_per_hour"))
    gpus = dig(summary, "setup", "gpus", 0, 0)
    hourly = price * float(gpus) if price and gpus else None
    by_run = [hourly / (run["output_tok_s"] * HOUR_S) * MEGA if hourly and run["output_tok_s"]
              and attained(run["attainment"]) != "0%" else None for run in summary["runs"]]
    summary["cost"] = price and {
        "gpu_per_hour": price, "gpus": float(gpus) if gpus else None, "per_hour": hourly,
        "per_1m_output_by_run": by_run,
        "per_1m_output": None if where is None else by_run[where]}


def fact_lines(summary: Facts) -> List[str]:
    """The facts of the setup, the operating point and its price, as text."""
    facts, point = summary.get("setup") or {}, summary.get("operating_point") or {}
    lines = [f"       {name}: {stated(told)}" for name, told in facts.items() if told]
    unknown = [name for name, told in facts.items() if not told]
    if unknown:
        lines.append(f"       not stated: {', '.join(unknown)} (--deployment FILE, --metadata K=V)")
    if point.get("run") is not None:
        run = summary["runs"][point["run"]]
        lines.append(f"POINT  {run_name(run)}: {optional(run['output_tok_s'], '{:.0f}')} tok/s, "
                     f"ttft p99 {tail_ms(run['ttft_s'])}, tpot p99 {tail_ms(run['tpot_s'])} ms"
                     + (f"; {point['note']}" if point["note"] else ""))
    return lines + ([f"COST   {cost_text(summary)}"] if summary.get("cost") else [])


def cost_text(summary: Facts) -> str:
    """The price of output at the operating point, or why there is none."""
    cost = summary["cost"]
    if not cost["gpus"]:
        return f"${cost['gpu_per_hour']:.2f} per GPU-hour; how many GPUs? --metadata gpus=N"
    each = (f"{several(cost['gpus'], 'GPU')} at ${cost['gpu_per_hour']:.2f}/h, all of it on the "
            "output tokens")
    if cost["per_1m_output"] is None:
        return f"no operating point to price; {each}"
    return f"${cost['per_1m_output']:.3f} per 1M output tokens at the operating point: {each}"


def run_name(run: Facts) -> str:
    """A run by its load: 8/s, c=4, ..."""
    return f"{run['label']}/s" if run["rate_rps"] else str(run["label"])


ESCAPED = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord('"'): "&quot;",
           ord("'"): "&#39;"}


def esc(text: Any) -> str:
    """Text for HTML: nothing in it is markup, no control or direction character survives."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}"
                   for c in str(text)).translate(ESCAPED)


class Cell(NamedTuple):
    """A figure of the summary: as shown, its path and its value."""

    text: str
    path: Tuple[Any, ...] = ()
    value: Any = None

    def attributes(self) -> str:
        """Its path and value as JSON in data attributes."""
        told = (esc(json.dumps(it)) for it in (self.path, null_infinities(self.value)))
        return ' data-path="{}" data-value="{}"'.format(*told) if self.path else ""


def cell(summary: Facts, path: Tuple[Any, ...], show: Callable[[Any], str] = figure) -> Cell:
    """The figure at a path, '-' where it is absent."""
    value = dig(summary, *path)
    return Cell("-" if value is None else show(value), path, value)


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "",
          mark: Optional[int] = None) -> str:
    """An HTML table, scrolling if too wide; a row is text and Cells, its first the row's head."""
    def one(tag: str, it: Any) -> str:
        shown = it if isinstance(it, Cell) else Cell(str(it))
        return f"<{tag}{shown.attributes()}>{esc(shown.text)}</{tag.split()[0]}>"

    body = "".join(f"<tr{' class=mark' * (k == mark)}>" + "".join(
        one("td" if i else 'th scope="row"', it) for i, it in enumerate(row)) + "</tr>\n"
        for k, row in enumerate(rows))
    head = "".join(f'<th scope="col">{esc(h)}</th>' for h in heads)
    return (f'<div class="scroll" tabindex="0" role="region" aria-label="{esc(caption)}">'
            f'<table class="{kind}"><caption>{esc(caption)}</caption>\n'
            + (f"<thead><tr>{head}</tr></thead>\n" if heads else "")
            + f"<tbody>{body}</tbody></table></div>\n")


Place = Callable[[float], float]  # from a value to where it lies
Marks = Callable[[Place, Place], Iterable[str]]


class Axis(NamedTuple):
    """One axis of a chart: its label, where a value lies on it (0 to 1), its ticks."""

    label: str
    place: Place
    ticks: List[float]
    show: Callable[[float], str] = figure


def axis(label: str, values: Iterable[float], log: bool = False) -> Axis:
    """From zero to past the highest value; logarithmic where asked and they span a decade."""
    shown = [v for v in values if 0 < v < math.inf] or [1.0]
    low, high = min(shown), max(shown)
    ladder = [m * 10.0**e for e in range(math.floor(math.log10(low)) - 1, math.ceil(
        math.log10(high)) + 1) for m in (1, 2, 5)]
    if log and high > 12 * low:
        low, high = max(t for t in ladder if t <= low), min(t for t in ladder if t >= high)
        ticks = [t for t in ladder if low <= t <= high]
        if len(ticks) > 7:
            ticks = [t for t in ticks if f"{t:e}"[0] == "1"]
        return Axis(label, lambda v: math.log(max(v, low) / low) / math.log(high / low), ticks)
    step, top = min(t for t in ladder if t * 5 >= high), high * 1.04
    return Axis(label, lambda v: v / top, [step * i for i in range(int(top / step) + 1)])


WIDE, LEFT, RIGHT, TOP, FOOT = 400, 44, 14, 30, 36  # of a chart, in its own units; LEFT at least
DIGIT = 7  # a character of a tick is no wider


def chart(title: str, desc: str, axes: Tuple[Axis, Axis], marks: Marks, height: int = 250) -> str:
    """A figure: an SVG with grid, ticks and labels; marks(x, y) draws with values to places."""
    x, y = axes
    left = max([LEFT, *(DIGIT * len(y.show(t)) + 8 for t in y.ticks)])

    def px(value: float) -> float:
        return round(left + x.place(value) * (WIDE - left - RIGHT), 1)

    def py(value: float) -> float:
        return round(height - FOOT - y.place(value) * (height - FOOT - TOP), 1)

    grid = [f'<path class="grid" d="M{left} {py(t)}H{WIDE - RIGHT}"/>'
            + words(left - 6, py(t) + 4, y.show(t), "end") for t in y.ticks]
    grid += [words(px(t), height - FOOT + 16, x.show(t), "middle") for t in x.ticks]
    grid += [words(WIDE - RIGHT, height - 4, x.label, "end"), words(2, 12, y.label, "start")]
    drawn = "\n".join([f"{esc(desc)}</desc>", *grid, *marks(px, py)])
    key = f"c{zlib.crc32(drawn.encode()):x}"
    return (f'<figure><svg viewBox="0 0 {WIDE} {height}" role="img" aria-labelledby="{key}t {key}d"'
            f'><title id="{key}t">{esc(title)}</title><desc id="{key}d">{drawn}</svg></figure>\n')


def words(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    """Text in a chart."""
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{esc(text)}'
            "</text>")


def polyline(points: Iterable[Tuple[float, float]], kind: str) -> str:
    """A line through points in a chart's units."""
    told = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline class="{kind}" points="{told}"/>'


def whisker(across: float, spread: Facts, p: str, py: Place, kind: str) -> str:
    """The 95% interval of a percentile; its upper end open and dashed where there is none."""
    low, value, high = (spread.get(key) for key in (f"{p}_low", p, f"{p}_high"))
    if low is None or value is None or value == math.inf:
        return ""
    bounded = high is not None and high < math.inf
    end = py((high if bounded and high is not None else value) / MS)
    told = f'<path class="whisker {kind}" d="M{across} {py(low / MS)}V{end}"/>'
    return told if bounded else (f'{told}<path class="whisker open {kind}" d="M{across} {end}V'
                                 f'{max(TOP - 8, end - 24)}"/>')


def rate_chart(summary: Facts, key: str, name: str) -> str:
    """The deliverable: a p99 over output tok/s, a point a run, SLO line, operating point."""
    runs, limit = summary["runs"], dig(summary, "slo", key)
    where = dig(summary, "operating_point", "run")
    order = [i for i in by_rate(runs) if runs[i]["output_tok_s"] and runs[i][key]["n"]]
    spreads = [runs[i][key] for i in order]
    values = [v / MS for s in spreads for v in (s["p99"], s["p99_high"]) if v] + (
        [limit / MS] if limit else [])
    y = axis(f"{name} p99, ms", values, log=True)
    if not any(v < math.inf for v in values):
        y = y._replace(ticks=[])

    def marks(px: Place, py: Place) -> Iterator[str]:
        spots = [(px(runs[i]["output_tok_s"]), TOP if s["p99"] == math.inf else py(s["p99"] / MS))
                 for i, s in zip(order, spreads)]
        left = px(0)  # the ticks are further left
        taken = [(0.0, 0.0, left, 250.0), *((a - 7, b - 22, a + 7, b + 7) for a, b in spots)]
        if limit:
            level, text = py(limit / MS), f"SLO {limit / MS:g} ms"
            yield f'<path class="slo" d="M{left} {level}H{WIDE - RIGHT}"/>'
            yield words(left + 4, level - 5, text, "start", "limit")
            taken.append((left, level - 17, left + 6 * len(text) + 10, level + 2))
        yield polyline(spots, "trail")
        for i, s, (a, b) in zip(order, spreads, spots):
            run = runs[i]
            if i == where:
                yield f'<path class="here guide" d="M{a} {TOP - 12}V{250 - FOOT}"/>'
                yield f'<circle class="ring" cx="{a}" cy="{b}" r="9"/>'
            yield whisker(a, s, "p99", py, "")
            kind = "unstable" if s["p99"] == math.inf else run["verdict"].lower()
            yield (f'<circle class="{esc(kind)}" cx="{a}" cy="{b}" r="4.5"'
                   f"{cell(summary, ('runs', i, key, 'p99'), in_ms).attributes()}>"
                   f"<title>{esc(run_name(run))}: {figure(run['output_tok_s'])} tok/s, {name} p99 "
                   f"{tail_ms(s)} ms, {esc(verdict_text(run))}</title></circle>")
            label = run_name(run) + (" inf" if s["p99"] == math.inf else "")
            yield place_label(label, (a, b), taken, "here" if i == where else "")

    desc = "; ".join(f"{run_name(runs[i])}: {figure(runs[i]['output_tok_s'])} tok/s, "
                     f"{tail_ms(runs[i][key])} ms, {verdict_text(runs[i])}" for i in order)
    return chart(f"{name} p99 by output rate", desc,
                 (axis("output tokens/s", [runs[i]["output_tok_s"] for i in order]), y), marks)


Box = Tuple[float, float, float, float]  # left, top, right, bottom


def place_label(text: str, spot: Tuple[float, float], taken: List[Box], kind: str) -> str:
    """A label near a point, where it covers least of what is there already."""
    wide = 6.4 * len(text) + 4
    choices: List[Tuple[float, int, Box, str]] = []
    for dx, dy, anchor, back in (
            (0, -12, "middle", 0.5), (10, 4, "start", 0.0), (-10, 4, "end", 1.0),
            (0, 20, "middle", 0.5), (9, -10, "start", 0.0), (-9, -10, "end", 1.0),
            (9, 18, "start", 0.0), (0, 34, "middle", 0.5)):
        left, y = spot[0] + dx - wide * back, spot[1] + dy
        covered = sum(max(0, min(left + wide, b[2]) - max(left, b[0]))
                      * max(0, min(y + 3, b[3]) - max(y - 11, b[1])) for b in taken)
        outside = left < LEFT or left + wide > WIDE or y < 25 or y > 247 - FOOT
        choices.append((covered + 1000 * outside, len(choices), (left, y - 11, left + wide, y + 3),
                        words(spot[0] + dx, y, text, anchor, kind)))
    _, _, box, told = min(choices)
    taken.append(box)
    return told


def drawn_runs(summary: Facts, most: int) -> List[int]:
    """The runs to draw one by one: the ends, the operating point and its neighbours."""
    order, where = by_rate(summary["runs"]), dig(summary, "operating_point", "run")
    last, middle = len(order) - 1, len(order) // 2 if where is None else order.index(where)
    nearest = sorted(range(len(order)), key=lambda k: (k not in (0, last), abs(k - middle)))
    return [order[k] for k in sorted(nearest[:most])]


def curve_chart(summary: Facts, key: str, name: str) -> str:
    """The distribution of a latency by percentile, a line a run, 95% intervals at p50 and p99."""
    where = dig(summary, "operating_point", "run")
    shown = [(i, run[key]) for i, run in ((i, summary["runs"][i]) for i in drawn_runs(summary, 5))
             if dig(run, key, "curve") and run[key]["n"]]
    if not shown:
        return ""
    if key == "itl_s" and any(summary["runs"][i]["itl_is_chunk_gap"] for i, _ in shown):
        name = "Chunk gap (several tokens an event)"
    top = 0.999 if max(s["n"] for _, s in shown) >= 1000 else 0.99
    points = {i: [(q, v / MS) for q, v in zip(CURVE, s["curve"]) if q <= top and v < math.inf]
              for i, s in shown}
    y = axis(f"{name}, ms", [v for line in points.values() for _, v in line]
             + [(s["p99_high"] or 0) / MS for _, s in shown], log=True)
    span = 0.4 - math.log10(1 - top)
    x = Axis("percentile of gaps" if key == "itl_s" else "percentile of requests",
             lambda q: -math.log10(1 - q) / span,
             [q for q in (0.5, 0.9, 0.99, 0.999) if q <= top], lambda q: f"p{100 * q:g}")

    def marks(px: Place, py: Place) -> Iterator[str]:
        ends = []
        for k, (i, s) in enumerate(shown):
            kind = "here" if i == where or len(shown) == 1 else "other"
            if not points[i]:
                continue
            yield polyline([(px(q), py(v)) for q, v in points[i]], f"curve {kind}")
            for share, p in ((0.5, "p50"), (0.99, "p99")):
                yield whisker(px(share) + 3 * (k - len(shown) // 2), s, p, py, kind)
            ends.append((py(points[i][-1][1]), px(points[i][-1][0]) + 8, i, kind))
        last = math.inf
        for level, across, i, kind in sorted(ends, reverse=True):
            last = min(level + 4, last - 13)
            yield words(across + 5, last, run_name(summary["runs"][i]), "start", kind)

    desc = "; ".join(f"{run_name(summary['runs'][i])}: p50 {in_ms(s['p50'])}, p90 "
                     f"{in_ms(s['p90'])}, p99 {tail_ms(s)} ms" for i, s in shown)
    return chart(f"{name} by percentile", desc, (x, y), marks)


def time_charts(summary: Facts, i: int) -> str:
    """What was in flight over a run, beside the server's queue and KV use where they are known."""
    run, found = summary["runs"][i], ""
    server = dig(run, "server", "series") or ()
    told = [[(row[0], row[at]) for row in server if None not in (row[0], row[at])]
            for at in (1, 2, 3)]
    for title, lines in (
            ("in flight", [("client", run.get("in_flight_series"), "here"),
                           ("server running", told[0], "other"),
                           ("server waiting", told[1], "limit")]),
            ("KV cache in use, %", [("KV", [(t, 100 * share) for t, share in told[2]], "here")])):
        drawn: List[Any] = [line for line in lines if line[1]]
        if not drawn:
            continue

        def marks(px: Place, py: Place, drawn: List[Any] = drawn) -> Iterator[str]:
            across: float = WIDE - RIGHT
            for name, line, kind in reversed(drawn):
                yield polyline([(px(a), py(b)) for a, b in line], f"curve {kind}")
                yield words(across, 12, name, "end", kind) if len(drawn) > 1 else ""
                across -= 6.2 * len(name) + 12
        desc = "; ".join(f"{name}: most {figure(max(p[1] for p in line))}"
                         for name, line, _ in drawn)
        axes = (axis("seconds", [p[0] for _, line, _ in drawn for p in line]),
                axis(f"{run_name(run)}: {title}", [p[1] for _, line, _ in drawn for p in line]))
        found += chart(axes[1].label, desc, axes, marks, 170)
    return found


def runs_table(summary: Facts) -> str:
    """The text report's table, with the cost of each run where it is known."""
    shown, rows = [c for c in TABLE if c.title], []
    costs = dig(summary, "cost", "per_1m_output_by_run")
    order = by_rate(summary["runs"])
    for i, run in ((i, summary["runs"][i]) for i in order):
        rows.append([Cell(c.cell(run), ("runs", i, *c.path), dig(run, *c.path)) for c in shown])
        if costs:
            rows[-1].append(cell(summary, ("cost", "per_1m_output_by_run", i), "${:.3f}".format))
    notes = footnotes(summary, summary["runs"], "".join(c.text for row in rows for c in row))
    where = dig(summary, "operating_point", "run")
    heads = [c.title for c in shown] + ["per 1M output"] * bool(costs)
    return table("Runs; latencies in ms", heads, rows, "",
                 None if where is None else order.index(where)) + "".join(
        f'<p class="note">{esc(line)}</p>\n' for line in notes)


def latency_table(summary: Facts) -> str:
    """Percentiles with their 95% intervals."""
    places = ("p50", "p50_low", "p50_high", "p90", "p99", "p99_low", "p99_high", "mean", "max")
    rows = [[f"{name} {run_name(summary['runs'][i])}",
             *(cell(summary, ("runs", i, key, p), in_ms) for p in places)]
            for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"),
                              ("E2E", "e2e_s"), ("TTFT from sent", "ttft_from_sent_s"))
            for i in drawn_runs(summary, 5)]
    return table("Latency, ms from due; low and high bound a percentile with 95%",
                 ("", *(p.replace("_", " ") for p in places)), rows)


def parts_table(summary: Facts, key: str, caption: str) -> str:
    """Classes or turns of every run that has them, one row each."""
    shows: Tuple[Any, ...] = (
        ("attained", lambda v: attained(v, 1), "attainment"), ("goodput /s", figure, "goodput_rps"),
        *((f"{name.upper()} {p}", in_ms, f"{name}_s", p) for name in ("ttft", "tpot")
          for p in ("p50", "p99")))
    rows = [[f"{run_name(run)} {name}", *(cell(summary, ("runs", i, key, name, *path), show)
                                          for _, show, *path in shows)]
            for i, run in enumerate(summary["runs"])
            for name, part in (run.get(key) or {}).items() if isinstance(part, Mapping)]
    return table(caption, ("", *(show[0] for show in shows)), rows) if rows else ""


def setup_rows(summary: Facts) -> List[Tuple[str, str]]:
    """The setup statement, (fact, text) each; the run's own clauses are the text report's."""
    machine, runs = summary["environment"], summary["runs"]
    names = {"gpu": "GPU", "gpus": "GPUs", "version": "engine version", "flags": "engine flags"}
    cached = [run["cached_tokens_mean"] for run in runs if run["cached_tokens_mean"] is not None]
    told = [*setup_lines(summary), *shard_lines(summary), *compat_why(summary)]
    said = re.sub(r"^SETUP|\n", ";", "\n".join(told)).split(";")
    return [
        *((names.get(name, name), stated(facts)) for name, facts in (
            summary.get("setup") or dict.fromkeys(NAMED)).items()),
        ("sent", "\n".join(part.strip() for part in said if part.strip())),
        ("cached prompt tokens", f"{figure(sum(cached) / len(cached))} a request, by the server"
         if cached else "not stated by the server"),
        ("client", f"{machine['cpu'] or machine['machine']}, {machine['cores']} cores, Python "
         f"{machine['python']}"), ("started", machine["started"])]


def lead(summary: Facts) -> str:
    """The answer first: the operating point and its figures."""
    runs, slo, cost = summary["runs"], summary["slo"], summary.get("cost")
    where, note = (dig(summary, "operating_point", key) for key in ("run", "note"))
    text = (f"No operating point: {note or 'unknown'}" if where is None
            else f"Operating point: {run_name(runs[where])}".replace("/s", " requests/s"))
    search = summary.get("goodput_search") or {}
    if search.get("rate_rps"):
        text += f". Goodput search: {figure(search['rate_rps'])}/s (95%: " + " to ".join(
            optional(search.get(key), "{:.3g}") for key in ("low_rps", "high_rps")) + ")"
    found = f'<p class="answer">{esc(text)}</p>\n'
    if where is not None and note:
        found += f'<p class="note">{esc(note)}</p>\n'
    if where is None and len(runs) > 1:
        return found
    i = where or 0
    run = runs[i]
    facts = [("Output tokens/s", cell(summary, ("runs", i, "output_tok_s")),
              f"at {run_name(run)}, {optional(run['in_flight_mean'], '{:.1f}')} in flight")]
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        low, high = (in_ms(run[key][f"p99_{end}"]) for end in ("low", "high"))
        facts.append((f"{name} p99, ms", cell(summary, ("runs", i, key, "p99"), in_ms),
                      (f"95%: {low} to {high}" if high != "-" else f"at least {low} with 95%")
                      + (f", SLO {slo[key] / MS:g} ms" if slo[key] else "")))
    if run["attainment"] is not None:
        low, high = (f"{edge:.1%}" for edge in run["attainment_interval"])
        facts.append(("Requests within SLO", cell(
            summary, ("runs", i, "attainment"), lambda v: attained(v, 1)),
            f"95%: {low} to {high}, target {share(slo['attainment'])}"))
    if cost and cost["gpus"]:
        facts.append(("Per 1M output tokens", cell(
            summary, ("cost", "per_1m_output_by_run", i), "${:.3f}".format),
            f"{several(cost['gpus'], 'GPU')} at ${cost['gpu_per_hour']:.2f}/h"))
    return found + '<dl class="figures">' + "".join(
        f"<div><dt>{esc(name)}</dt><dd{it.attributes()}>{esc(it.text)}</dd><dd class=\"note\">"
        f"{esc(note)}</dd></div>" for name, it, note in facts) + "</dl>\n"


def remarks(summary: Facts) -> str:
    """Verdicts with their reasons, warnings and failures, a paragraph a run that has any."""
    found = ""
    for run in summary["runs"]:
        lines = [*run["reasons"], *(f"warning: {w}" for w in run["warnings"]),
                 *(f"{e['count']} x {e['class']}: {e['error']}" for e in run["errors"])]
        if lines or run["verdict"] != "VALID":
            found += (f"<h3>{esc(run_name(run))}: {esc(verdict_text(run))}</h3><ul>"
                      + "".join(f"<li>{esc(line)}</li>" for line in lines) + "</ul>\n")
    return found or "<p>Every run is VALID, without warnings or failures.</p>\n"


def findings_list(summary: Facts) -> str:
    """What the symptoms point to, and the advice."""
    found = summary.get("findings")
    rows = (("Evidence", "evidence"), ("Likely cause", "cause"), ("vLLM", "vllm"),
            ("SGLang", "sglang"), ("Term it moves", "term"))
    return "".join(
        f"<h3>{esc(it.get('symptom'))}</h3><dl class=\"facts\">" + "".join(
            f"<dt>{name}</dt><dd>{esc(it[key])}</dd>" for name, key in rows if it.get(key))
        + "</dl>\n" for it in found or ()) + "".join(
        f"<p>{esc(line)}</p>\n" for line in (
            *["No symptom of the table shows."] * (found == []), *(summary.get("advice") or ())))


STYLE = """
:root{--bg:#fff;--ink:#1c1e22;--soft:#5a5f68;--rule:#dfe2e7;--data:#1a5cb8;--limit:#b3261e}
@media screen and (prefers-color-scheme:dark){:root{color-scheme:dark;--bg:#16181c;--ink:#e6e7ea;
--soft:#a5abb5;--rule:#343941;--data:#8ab6f9;--limit:#ff8f84}}
*{box-sizing:border-box}dd,figure{margin:0}
body{margin:0 auto;padding:2.5rem 1.25rem 4rem;max-width:68rem;background:var(--bg);
color:var(--ink);font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;
overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .3rem;letter-spacing:-.01em}
h2{font-size:1.1rem;margin:2.75rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:1.25rem 0 .25rem}p,ul{margin:.4rem 0;max-width:46rem}ul{padding:0 1.2rem}
.note,caption,dt{color:var(--soft);font-size:.875rem}
.alert{border-left:3px solid var(--limit);padding-left:.75rem}
.answer{font-size:1.2rem;font-weight:600;margin:1.5rem 0 .25rem}
.figures,.charts{display:grid;gap:1.25rem 2rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr))}
.figures{grid-template-columns:repeat(auto-fit,minmax(10rem,1fr));margin:1.25rem 0 0}
.figures dd:nth-child(2){font-size:1.75rem;line-height:1.3;font-weight:600}
svg{display:block;width:100%;max-width:40rem;height:auto;font-size:11.5px}
path,polyline{stroke:var(--data);fill:none;stroke-linejoin:round}path.grid{stroke:var(--rule)}
.slo,polyline.limit,.unstable{stroke:var(--limit)}.slo{stroke-dasharray:5 3}
.trail,path.other,polyline.other{stroke:var(--soft)}.trail{opacity:.55}.curve{stroke-width:1.5}
.guide{stroke-dasharray:1 3}.open{stroke-dasharray:2 2}.curve.here{stroke-width:2.25}
text{fill:var(--soft);stroke:var(--bg);stroke-width:3px;paint-order:stroke}
text.here{fill:var(--data);font-weight:600}text.limit{fill:var(--limit)}
circle{fill:var(--bg);stroke:var(--soft);stroke-width:1.5}circle.unstable{stroke:var(--limit)}
.valid,.ring{stroke:var(--data)}.valid{fill:var(--data)}.ring{fill:none}
.scroll{overflow-x:auto;margin:.75rem 0;background:linear-gradient(270deg,var(--bg) 40%,transparent)
right/2.5rem 100% no-repeat local,linear-gradient(270deg,var(--rule),transparent)
right/.6rem 100% no-repeat}.scroll:focus-visible{outline:2px solid var(--data)}
table{border-collapse:collapse;font-size:.875rem;min-width:100%}
caption{text-align:left;padding-bottom:.3rem}
th,td{padding:.35rem .5rem;text-align:right;border-bottom:1px solid var(--rule);
overflow-wrap:normal}tbody th{white-space:nowrap}
thead th,.facts th{color:var(--soft);font-weight:500;vertical-align:bottom}
th:first-child{text-align:left;padding-left:0;position:sticky;left:0;background:var(--bg)}
.mark *{font-weight:600;color:var(--data)}
.facts td,.facts th{white-space:pre-line;text-align:left;vertical-align:top;min-width:6.5rem}
dl.facts{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:.25rem 0}
@media(max-width:30rem){body{padding:1.5rem 1rem 3rem}dl.facts{grid-template-columns:1fr}
.figures{grid-template-columns:1fr 1fr}}
@media print{@page{margin:14mm}body{padding:0;max-width:none;font-size:9.5pt}table{font-size:7.5pt}
h2,h3{break-after:avoid}figure,tr,.figures,dl.facts{break-inside:avoid}.scroll{overflow:visible}
th,td{padding:.25rem .3rem}.charts{grid-template-columns:1fr 1fr}}
"""

READING = (
    "TTFT: from the moment a request was due (not sent) to its first output. TPOT: time per "
    "further token of a request. ITL: gap between successive output events. Percentiles are over "
    "all offered requests; a failed one counts as infinitely late (inf). Intervals are 95%, from "
    "order statistics; a dashed end or ~ means that the sample does not bound the percentile. "
    "Goodput: offered rate times the share of requests that met every SLO.")


def page(summary: Facts) -> str:
    """report.html. Pure; the figures are the summary's own."""
    model = dig(summary, "setup", "model", 0, 0) or dig(summary, "target", "model") or "a model"
    alerts = ["SIMULATED on a virtual clock: nothing was measured."
              ] if summary.get("simulated") else []
    alerts += ["Run against loadgen's built-in engine: a rehearsal, not a measurement of a real "
              "deployment."] if MOCK_VERSION in stated(dig(summary, "setup", "engine")) else []
    alerts += [f"{run_name(r)}: {r['reasons'][0]}." for r in summary["runs"] if is_cut(r)]
    limited = [run_name(r) for r in summary["runs"] if r["verdict"] == "CLIENT-LIMITED"]
    if limited:
        alerts.append(f"CLIENT-LIMITED at {', '.join(limited)}: the client spoilt these runs, and "
                      "their figures are not to be trusted.")
    cost = summary.get("cost")
    sections = [
        ("Latency against throughput", '<p class="note">One point for each offered rate; hollow '
         "where the run is not VALID, or p99 infinite because more than 1% failed. Ring: the "
         "operating point. Bars: 95% intervals, dashed where the sample is too small.</p>"
         '<div class="charts">' + rate_chart(summary, "ttft_s", "TTFT")
         + rate_chart(summary, "tpot_s", "TPOT") + "</div>" + runs_table(summary)
         + (f'<p class="note">Cost: {esc(cost_text(summary))}</p>' if cost else "")
         + parts_table(summary, "classes", "Classes") + parts_table(summary, "turns", "Turns")),
        ("Verdicts and warnings", remarks(summary)),
        ("Findings", findings_list(summary)),
        ("Distributions", '<div class="charts">' + "".join(
            curve_chart(summary, key, name) for key, name in (
                ("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"), ("e2e_s", "E2E")))
         + "</div>"
         + latency_table(summary)),
        ("Over time", '<div class="charts">' + "".join(
            time_charts(summary, i) for i in drawn_runs(summary, 4)) + "</div>"),
        ("Setup", table("What is not stated is not known", (), setup_rows(summary), "facts")),
        ("How to read this", f"<p>{esc(READING)}</p>")]
    body = "".join(f"<section><h2>{name}</h2>\n{inner}</section>\n" for name, inner in sections
                   if inner)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        f"'unsafe-inline'\">\n<title>Load test of {esc(model)}</title>\n<style>{STYLE}</style>"
        f"</head>\n<body>\n<header><h1>Load test of {esc(model)}</h1>\n"
        f'<p class="note">{esc(dig(summary, "target", "url") or "no server")}, '
        f'{esc(dig(summary, "environment", "started"))}, {len(summary["runs"])} run'
        f"{'s' * (len(summary['runs']) > 1)}</p>\n"
        + "".join(f'<p class="alert">{esc(text)}</p>\n' for text in alerts)
        + f"{lead(summary)}</header>\n<main>\n{body}</main>\n</body></html>\n")


def with_infinities(value: Any) -> Any:
    """What null_infinities wrote as "inf", as numbers again; labels and messages are left alone."""
    if isinstance(value, dict):
        return {key: inner if key in ("label", "error") else with_infinities(inner)
                for key, inner in value.items()}
    if isinstance(value, list):
        return [with_infinities(inner) for inner in value]
    return math.inf if value == "inf" else value


def report_command(args: Any) -> int:
    """--report DIR: the text again, and report.html; new facts and prices join summary.json."""
    path = os.path.join(args.report, "summary.json")
    try:
        summary = kept_summary(args.report)
        summary["setup"] = setup_of(args, {}, summary.get("setup"))
        conclude(summary, args)
        text, html = render(summary), page(summary)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{path} is not one of loadgen's: {error!r}") from None
    print(as_json(summary) if args.json else text)
    why = unsaved_line(save(args.report, "summary.json", summary),
                       save(args.report, "report.html", html))
    if why:
        say(why)
    return 1 if why else 0


# ---- 10. The engine ----------------------------------------------------------------------------
# A pure scheduler: no clock, no socket, no chance. Its drivers say when requests arrive and make
# its step times real (section 11) or virtual. Blocks are counted, not numbered: a job holds
# `capacity` tokens' worth, of which those in the prefix cache are known by a key that stands for
# their content and all before it.


class Profile(NamedTuple):
    """The step-time constants and the limits of an engine (seconds, tokens, blocks).

    One step takes max(decode_tokens * flop_s_per_token, weights_s + kv_s_per_token * context)
    + prefill_tokens * prefill_s_per_token + sequences * sequence_s + overhead_s, where context is
    what the decoding sequences have in the KV cache when the step begins.
    """

    weights_s: float = 12 * MS
    sequence_s: float = 0.1 * MS
    prefill_s_per_token: float = 0.07 * MS
    flop_s_per_token: float = 0.0
    kv_s_per_token: float = 0.0
    overhead_s: float = 0.0
    max_num_batched_tokens: int = 128
    max_num_seqs: int = 64
    block_tokens: int = 16
    num_blocks: int = 16384
    prefix_caching: bool = True
    max_model_len: int = 32768
    spec_tokens: int = 0  # drafted a step and sequence, for /metrics alone: a step's constants are
    spec_acceptance: float = 0.0  # then those of one emitted token; the share accepted


MOCK = Profile()


def profile_from(data: Any) -> Profile:
    """A profile from JSON: some of its fields, or a deployment that holds them in "step_time"."""
    if isinstance(data, Mapping):
        data = data.get("step_time", data)
    if not isinstance(data, Mapping):
        raise UserError("an engine profile is a JSON object such as {\"weights_s\": 0.012}")
    fields: Dict[str, Any] = {}
    for name, value in data.items():
        if name not in Profile._fields:
            raise UserError(f"engine profile: unknown field {name!r}{near(name, Profile._fields)}")
        kind, number = type(getattr(MOCK, name)), type(value) in (int, float)
        right, wanted = {
            bool: (type(value) is bool, "true or false"),
            int: (number and min(1, getattr(MOCK, name)) <= value <= 1e9 and value == int(value),
                  "a whole number from 1 to a billion"),
            float: (number and 0 <= value < 1e6, "a number of seconds, zero or more")}[kind]
        if not right:
            raise UserError(f"engine profile: {name} must be {wanted}, not {json.dumps(value)}")
        fields[name] = kind(value)
    profile = MOCK._replace(**fields)
    tokens, seats = profile.max_num_batched_tokens, profile.max_num_seqs
    refuse((tokens < seats, f"engine profile: max_num_batched_tokens {tokens} is less than "
            f"max_num_seqs {seats}"),
           (profile.spec_acceptance > 1, "engine profile: spec_acceptance is a share, at most 1"),
           (not profile.weights_s + profile.overhead_s + profile.sequence_s,
            "engine profile: a step must take time; set weights_s"))
    return profile


def block_keys(tokens: Sequence[Hashable], block_tokens: int) -> List[int]:
    """One key for each full block of tokens; a key stands for the block and all before it."""
    keys, key = [], 0
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        key = hash((key, tuple(tokens[end - block_tokens:end])))
        keys.append(key)
    return keys


class Job:
    """A request in the engine: what it asks for, and how far it is."""

    __slots__ = ("cached", "capacity", "computed", "held", "id", "joined", "keys", "max_tokens",
                 "n_in", "n_out", "number", "published", "spans", "target")

    def __init__(self, job_id: Hashable, n_in: int, max_tokens: int,
                 keys: Sequence[Hashable]) -> None:
        """A job that has not begun."""
        self.id, self.n_in, self.max_tokens = job_id, n_in, max_tokens
        self.keys = keys  # of its first blocks, prompt and output alike
        self.target = n_in  # tokens to prefill; after a preemption its output too
        self.number = 0  # in order of arrival
        self.n_out = self.computed = 0  # tokens emitted; in the KV cache: at its last join or leave
        self.joined = -1  # the step that ended its prefill, while it decodes
        self.spans: List[Tuple[int, int]] = []  # steps [from, to) that each gave it a token
        self.cached = -1  # prompt tokens that the prefix cache had when it was first let in
        self.capacity = 0  # tokens that its blocks can hold
        self.published = 0  # how many leading blocks have been offered to the prefix cache
        self.held: List[Hashable] = []  # keys of cached blocks that it holds a reference to


ARRIVAL = operator.attrgetter("number")


class Engine:
    """Continuous batching with chunked prefill, paged KV blocks and prefix caching.

    A step serves every decoding sequence first; what is left of max_num_batched_tokens goes to
    prefills in order of arrival. A request is let in when the blocks of its whole prompt are
    there. When a decode finds no block, the latest arrival loses its own and starts again later:
    its tokens are recomputed, none is emitted twice. Cached blocks that no one holds are free,
    and lost least recently used first.

    A step's cost does not depend on how many decode: each gains a token a step, so the steps at
    which it next needs a block and at which it ends are known when it joins them.
    """

    def __init__(self, profile: Profile = MOCK) -> None:
        """An idle engine with an empty cache."""
        self.profile = profile
        self.decoding: List[Job] = []  # by arrival; all of them before all of prefilling,
        self.prefilling: List[Job] = []  # and these before all of the queue
        self.queue: Deque[Job] = collections.deque()
        self.jobs: Dict[Hashable, Job] = {}
        self.free_blocks = profile.num_blocks  # holding nothing
        self.references: Dict[Hashable, int] = {}  # of each cached block
        self.idle: collections.OrderedDict[Hashable, None] = collections.OrderedDict()
        self.steps = self.submitted = 0
        self.context = 0  # tokens in the KV cache of those that decode
        self.growing: Dict[int, List[Job]] = {}  # who needs a block before which step
        self.ending: Dict[int, List[Job]] = {}  # who has all its tokens after how many steps
        self.admitted: List[Hashable] = []  # ids that the last step let in
        self.ended: List[Job] = []  # those that it gave their last token
        self.sequences = 0  # served by it
        self.preemptions = self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self.prompt_tokens = self.generation_tokens = 0

    @property
    def running(self) -> int:
        """Requests that hold a seat."""
        return len(self.decoding) + len(self.prefilling)

    @property
    def waiting(self) -> int:
        """Requests that have none yet, or lost it."""
        return len(self.queue)

    @property
    def kv_usage(self) -> float:
        """The share of KV blocks that requests hold."""
        return 1 - (self.free_blocks + len(self.idle)) / self.profile.num_blocks

    def refusal(self, n_in: int, max_tokens: int) -> str:
        """Why a request of this size can never run, or ''."""
        limit, total = self.profile.max_model_len, n_in + max_tokens
        if n_in < 1 or max_tokens < 1:
            return "a request needs a prompt and max_tokens of at least 1"
        if total > limit:
            return (f"This model's maximum context length is {limit} tokens. However, you "
                    f"requested {max_tokens} output tokens and your prompt contains {n_in} input "
                    f"tokens, for a total of {total} tokens.")
        if self._blocks(total) > self.profile.num_blocks:
            return f"{total} tokens do not fit the KV cache of {self.profile.num_blocks} blocks"
        return ""

    def submit(self, job_id: Hashable, prompt: Union[int, Sequence[Hashable]], max_tokens: int,
               keys: Sequence[Hashable] = ()) -> Job:
        """Queue a request; ValueError if it can never run.

        A prompt given as tokens names its own blocks. For one given as a count, keys name its
        first blocks, and the output's after them; a key stands for all up to its block's end, so
        that equal keys mean equal prefixes. Blocks past the keys are never shared.
        """
        n_in = prompt if isinstance(prompt, int) else len(prompt)
        why = self.refusal(n_in, max_tokens)
        if why or job_id in self.jobs:
            raise ValueError(why or f"request {job_id!r} is here already")
        if not self.profile.prefix_caching:
            keys = ()
        elif not isinstance(prompt, int):
            keys = block_keys(prompt, self.profile.block_tokens)
        job = self.jobs[job_id] = Job(job_id, n_in, max_tokens, keys)
        job.number = self.submitted = self.submitted + 1
        self.queue.append(job)
        return job

    def abort(self, job_id: Hashable) -> bool:
        """Forget a request, whatever its state; False if it is not here (any more)."""
        job = self.jobs.pop(job_id, None)
        if job is None:
            return False
        if job.joined >= 0:
            self.decoding.remove(job)
            self._leave(job)
        else:
            (self.prefilling if job in self.prefilling else self.queue).remove(job)
        self._release(job)
        return True

    def step(self) -> Tuple[float, List[Tuple[Hashable, int]]]:
        """Run one step: how long it takes [s], and the tokens it emits for each request."""
        duration_s = self.advance()
        served = self.decoding if duration_s else []
        if self.ended:
            served = sorted([*self.ended, *served], key=ARRIVAL)
        return duration_s, [(job.id, 1) for job in served]

    def stride(self, start_ns: int, until_ns: int, ends_ns: array.array[int]) -> int:
        """Run steps from start_ns on until one ends a request, or ends at until_ns or later.

        At least one; their ends are added to ends_ns [ns], and the last is returned: start_ns if
        the engine is idle. The same steps as step() takes, and of the same lengths.
        """
        profile, now_ns = self.profile, start_ns
        while True:
            if self.prefilling or (self.queue and self.running < profile.max_num_seqs):
                quiet = 0
            else:
                quiet = self._quiet(until_ns - now_ns)
            if quiet > 1:
                now_ns = self._glide(quiet, now_ns, until_ns, ends_ns)
            else:
                duration_s = self.advance()
                if not duration_s:
                    return now_ns
                now_ns += max(1, round(duration_s / NS))
                ends_ns.append(now_ns)
                if self.ended:
                    return now_ns
            if now_ns >= until_ns:
                return now_ns

    def _quiet(self, left_ns: int) -> int:
        """How many steps from now on only decode, and neither need a block nor end a request."""
        if not self.decoding:
            return 0
        at, growing, ending = self.steps, self.growing, self.ending
        if at in growing:
            return 0
        last = at + left_ns // max(1, round(self._decode_s(self.context) / NS)) + 1
        at += 1
        while at < last and at not in growing and at not in ending:
            at += 1
        return at - self.steps - (at in ending)

    def _glide(self, quiet: int, now_ns: int, until_ns: int, ends_ns: array.array[int]) -> int:
        """Up to so many quiet steps at once; when the last of them ends."""
        n, context, before, p = len(self.decoding), self.context, len(ends_ns), self.profile
        if p.kv_s_per_token:  # _took_s written out: this may be most of a run's steps
            compute_s, extra_s = n * p.flop_s_per_token, n * p.sequence_s
            for held in range(context, context + n * quiet, n):
                read_s = p.weights_s + p.kv_s_per_token * held
                took_s = (read_s if read_s > compute_s else compute_s) + extra_s + p.overhead_s
                now_ns += round(took_s / NS) or 1
                ends_ns.append(now_ns)
                if now_ns >= until_ns:
                    break
        else:
            each_ns = max(1, round(self._decode_s(context) / NS))
            quiet = min(quiet, max(1, -(-(until_ns - now_ns) // each_ns)))
            ends_ns.extend(range(now_ns + each_ns, now_ns + quiet * each_ns + 1, each_ns))
            now_ns += quiet * each_ns
        taken = len(ends_ns) - before
        self.admitted, self.ended, self.sequences = [], [], n
        self.steps += taken
        self.context += taken * n
        self.generation_tokens += taken * n
        return now_ns

    def _decode_s(self, context: int) -> float:
        """How long a step takes that only decodes [s]."""
        return self._took_s(len(self.decoding), context, 0, len(self.decoding))

    def _took_s(self, decode_tokens: int, context: int, prefill_tokens: int, sequences: int
                ) -> float:
        """How long a step takes [s]: the equation of Profile."""
        p = self.profile
        return (max(decode_tokens * p.flop_s_per_token, p.weights_s + p.kv_s_per_token * context)
                + prefill_tokens * p.prefill_s_per_token + sequences * p.sequence_s + p.overhead_s)

    def advance(self) -> float:
        """Run one step; how long it takes [s], 0 if there is nothing to do."""
        preemptions = self.preemptions
        self.admitted, self.ended = [], []
        if self.steps in self.growing:
            self._grow()
        decode_tokens, context, prefill_tokens = len(self.decoding), self.context, 0
        self.sequences = decode_tokens
        if self.prefilling or self.queue:
            prefill_tokens = self._prefill(self.profile.max_num_batched_tokens - decode_tokens,
                                           self.preemptions == preemptions)
        if not self.sequences:
            return 0.0
        self.steps += 1
        self.context += decode_tokens
        self.generation_tokens += len(self.decoding)
        if self.steps in self.ending:  # let go of the jobs that have all their tokens
            self.ended = sorted(self.ending.pop(self.steps), key=ARRIVAL)
            for job in self.ended:
                self.decoding.remove(job)
                self._leave(job)
                self._publish(job, job.computed)
                self._release(job)
                del self.jobs[job.id]
        return self._took_s(decode_tokens, context, prefill_tokens, self.sequences)

    def _prefill(self, budget: int, may_admit: bool) -> int:
        """Spend the rest of a step's tokens on prompts, the oldest first; how many were used."""
        left, done = budget, 0
        while left and (done < len(self.prefilling) or (may_admit and self._admit())):
            job = self.prefilling[done]
            chunk = min(left, job.target - job.computed)
            left -= chunk
            job.computed += chunk
            self.sequences += 1
            self._publish(job, job.computed)
            if job.computed < job.target:
                break  # out of tokens
            done += 1
            if not job.n_out:
                self.prompt_tokens += job.n_in
            job.joined = self.steps  # its token comes with this step, and one a step from now
            self.context += job.computed
            self.ending.setdefault(job.joined + job.max_tokens - job.n_out, []).append(job)
            self._await_block(job)
        self.decoding += self.prefilling[:done]
        del self.prefilling[:done]
        return budget - left

    def _await_block(self, job: Job) -> None:
        """Note when a decoding job will have filled its blocks, if that is before its end."""
        if job.capacity < job.n_in + job.max_tokens - 1:
            step = job.joined + 1 + job.capacity - job.computed
            self.growing.setdefault(step, []).append(job)

    def _leave(self, job: Job) -> None:
        """A job decodes no longer: bring its counts up to date."""
        gained = self.steps - job.joined  # tokens, the first from the prefill
        for due, at in ((self.ending, job.joined + job.max_tokens - job.n_out),
                        (self.growing, job.joined + 1 + job.capacity - job.computed)):
            if job in due.get(at, ()):
                due[at].remove(job)
        job.spans.append((job.joined, self.steps))
        job.n_out += gained
        job.computed += gained - 1
        self.context -= job.computed
        job.joined = -1

    def _admit(self) -> bool:
        """Give the head of the queue a seat and the blocks of all it must prefill."""
        if not self.queue or self.running >= self.profile.max_num_seqs:
            return False
        job, size = self.queue[0], self.profile.block_tokens
        job.target = job.n_in + job.n_out
        known = itertools.takewhile(self.references.__contains__, job.keys)
        found = list(itertools.islice(known, (job.target - 1) // size))
        need = self._blocks(job.target) - len(found)
        if need > self.free_blocks + len(self.idle) - sum(key in self.idle for key in found):
            return False
        for key in found:
            self.references[key] += 1
            self.idle.pop(key, None)
        self._take(need)
        job.held, job.published, job.computed = found, len(found), len(found) * size
        job.capacity = job.computed + need * size
        if job.cached < 0:
            job.cached = job.computed
            self.prefix_query_tokens += job.n_in if self.profile.prefix_caching else 0
            self.prefix_hit_tokens += job.cached
        self.prefilling.append(self.queue.popleft())
        self.admitted.append(job.id)
        return True

    def _grow(self) -> None:
        """One more block for each job that has filled its own, at the cost of later arrivals."""
        jobs = self.growing.pop(self.steps)
        for job in sorted(jobs, key=ARRIVAL) if len(jobs) > 1 else jobs:
            if job.joined < 0:
                continue  # an earlier one took its blocks
            self._publish(job, job.capacity)
            while not self._take(1):
                victim = (self.prefilling or self.decoding).pop()
                if victim.joined >= 0:
                    self._leave(victim)
                self._release(victim)
                self.queue.appendleft(victim)
                self.preemptions += 1
                if victim is job:
                    break
            else:
                job.capacity += self.profile.block_tokens
                self._await_block(job)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_tokens)

    def _take(self, blocks: int) -> bool:
        """Take free blocks: empty ones first, then the cached ones that were idle longest."""
        if blocks > self.free_blocks + len(self.idle):
            return False
        while self.free_blocks < blocks:
            del self.references[self.idle.popitem(last=False)[0]]
            self.free_blocks += 1
        self.free_blocks -= blocks
        return True

    def _publish(self, job: Job, computed: int) -> None:
        """Put the blocks that a job has filled, with so many tokens, into the prefix cache."""
        full = min(computed // self.profile.block_tokens, len(job.keys))
        for key in job.keys[job.published:full]:
            if key not in self.references:  # else it was computed twice, and this one stays private
                self.references[key] = 1
                job.held.append(key)
        job.published = max(job.published, full)

    def _release(self, job: Job) -> None:
        """Give a job's blocks back, its last first to be lost."""
        self.free_blocks += job.capacity // self.profile.block_tokens - len(job.held)
        for key in reversed(job.held):
            self.references[key] -= 1
            if not self.references[key]:
                self.idle[key] = None
        job.held, job.computed, job.capacity, job.published = [], 0, 0, 0


# ---- 10b. The virtual clock --------------------------------------------------------------------
# A plan on the engine without sockets and without waiting: what the driver does, at the times at
# which nothing is late. A request meets the mock's rules: one that comes to an idle engine starts
# a step at once and alone; one that a seat lets go, at the end of a step, finds the next begun.

EPOCH_NS = 1_000_000_000  # where a virtual run's clock begins, so that no time in it is 0
FOREVER_NS = 1 << 62
PLANNED = Calibration(1.0, 0.0, "the plan (simulated)")


class Virtual:
    """Takes the requests of one source to an engine, and records what becomes of them."""

    def __init__(self, engine: Engine, load: Load, limits: Timeouts,
                 keys: Callable[[Planned], Sequence[Hashable]],
                 on_record: Callable[[Record], None]) -> None:
        """keys names the blocks of a request; on_record gets each record as its request ends."""
        self.engine, self.load, self.limits = engine, load, limits
        self.keys, self.on_record = keys, on_record
        self.records: Dict[Hashable, Record] = {}  # of those in flight, by id
        self.late: List[Planned] = []  # let go when a step had just begun
        self.waits: List[Tuple[float, str, Deque[Record]]] = [
            (limits.first_output_s, NO_OUTPUT, collections.deque()),
            (limits.total_s, NOT_OVER, collections.deque())]
        self.measured_open = self.freed_ns = 0  # freed: when a request last ended
        self.first_step, self.ends_ns = engine.steps, array.array("q")
        self.rows: Rows = []  # readings of the engine, as of its metrics
        self.read_ns, self.every_s = 0, SCRAPE_S

    def drive(self, source: Source, stop: Callable[[], bool]) -> bool:
        """Run until the source has ended and nothing is in flight; False if stopped before."""
        now_ns, engine = source.start_ns, self.engine
        while not stop():
            if now_ns >= self.read_ns:
                self.rows.append(engine_row(engine, now_ns))
                if len(self.rows) >= ROWS_MAX:
                    self.rows, self.every_s = self.rows[::2], 2 * self.every_s
                self.read_ns = now_ns + round(self.every_s / NS)
            self.dispatch(source, now_ns)
            for job in engine.ended:
                record = self.records.pop(job.id)
                self.stamp(record, job)
                record.n_in, record.cached_tokens = job.n_in, job.cached or None
                record.finish_reason = "length"
                self.finish(record, *judged(record, self.limits, "ok", ""), now_ns)
            engine.ended = []
            self.expire(now_ns)
            next_ns = self.dispatch(source, now_ns)
            if next_ns is None and (source.over or not self.records):
                self.cancel_all("after the measured window", now_ns)
                return True
            until_ns = min(FOREVER_NS if next_ns is None else next_ns, self.expire(now_ns))
            if engine.jobs:
                now_ns = engine.stride(now_ns, now_ns if self.late else until_ns, self.ends_ns)
            else:
                now_ns = until_ns
            for planned in self.late:
                self.submit(planned)
            self.late = []
        for record in source.unsent(now_ns):
            self.finish(record, "unsent", "interrupted before it was sent", now_ns)
        self.cancel_all("interrupted", now_ns)
        return False

    def dispatch(self, source: Source, now_ns: int) -> Optional[int]:
        """Let go what is due; when the next one is [ns], None when there is none."""
        limit = self.load.concurrency
        while True:
            due_ns = source.next_ns(now_ns, self)
            if due_ns is None or due_ns > now_ns:
                return due_ns
            if limit is not None and len(self.records) >= limit:
                return FOREVER_NS
            out, record = source.take(now_ns)
            self.measured_open += record.measured
            if limit is not None:
                record.ready_ns = max(record.due_ns, self.freed_ns)
            if not self.send(out.planned, record, now_ns) and self.load.closed:
                return now_ns + round(MS / NS)  # a refusal takes time too, or it never ended

    def send(self, planned: Planned, record: Record, now_ns: int) -> bool:
        """A request reaches the engine: before its next step, or after it if that begins now."""
        engine = self.engine
        record.sent_ns = record.ready_ns
        why = engine.refusal(planned.n_in, planned.n_out)
        if why:
            record.status = 400
            self.finish(record, "http_status", f"400 {why}"[:MESSAGE_MAX], record.sent_ns)
            return False
        self.records[record.id] = record
        for _, _, waiting in self.waits:
            waiting.append(record)
        if record.sent_ns == now_ns and engine.jobs:
            self.late.append(planned)
        else:
            self.submit(planned)
        return True

    def submit(self, planned: Planned) -> None:
        """Queue a request."""
        self.engine.submit(planned.id, planned.n_in, planned.n_out, self.keys(planned))

    def expire(self, now_ns: int) -> int:
        """End what is past a limit, at the end of a step; when the next limit is reached [ns]."""
        soonest_ns = FOREVER_NS
        for limit_s, what, waiting in self.waits:
            limit_ns = round(limit_s / NS)
            while waiting:
                record = waiting[0]
                job = self.engine.jobs.get(record.id) if record.end_ns is None else None
                if job is not None and not (what is NO_OUTPUT and (job.spans or job.joined >= 0)):
                    over_ns = (record.sent_ns or 0) + limit_ns + 1
                    if over_ns > now_ns:
                        soonest_ns = min(soonest_ns, over_ns)
                        break
                    self.cut(record, "timeout", what.format(limit_s), now_ns)
                waiting.popleft()
        return soonest_ns

    def cut(self, record: Record, kind: str, why: str, now_ns: int) -> None:
        """End a request that the engine has, or is about to get."""
        job = self.engine.jobs.get(record.id)
        if job is not None:
            self.engine.abort(record.id)
            self.stamp(record, job)
            record.n_out_estimated = bool(record.events)  # no usage was seen
        del self.records[record.id]
        self.finish(record, kind, why, now_ns)

    def cancel_all(self, why: str, now_ns: int) -> None:
        """End whatever is in flight."""
        for record in list(self.records.values()):
            self.cut(record, "cancelled", why, now_ns)

    def stamp(self, record: Record, job: Job) -> None:
        """The times of a job's tokens: the ends of the steps that gave them."""
        stamps, first = array.array("q"), self.first_step
        for start, end in job.spans:
            stamps += self.ends_ns[start - first:end - first]
        record.stamp(stamps)
        record.answer_ns, record.status = record.first_ns, 200
        record.n_out = record.events or None

    def finish(self, record: Record, kind: str, why: str, now_ns: int) -> None:
        """Class a request and hand its record on."""
        record.cls, record.error, record.end_ns = kind, why, now_ns
        self.freed_ns = now_ns
        self.measured_open -= record.measured
        self.on_record(record)


def simulate_plan(plan: Plan, run: int, profile: Union[Profile, Engine],
                  r: Optional[Running] = None) -> Outcome:
    """run_plan on a simulated engine; one that is given may hold what earlier runs have cached."""
    engine = profile if isinstance(profile, Engine) else Engine(profile)
    limits = r.wiring.timeouts if r else Timeouts(10.0, 300.0, 60.0, 3600.0)
    unique, lead = r.unique if r else True, CHAT_OVERHEAD_TOKENS if r and r.target.chat else 0
    source = Source(plan, run, lambda *_: b"")
    source.start_ns = EPOCH_NS
    records: List[Record] = []

    def keys(planned: Planned) -> Sequence[Hashable]:
        owners = run + 3, run + 3 if unique else 1
        return prefix_keys(planned, plan.work, size, owners[1]) or virtual_keys(
            planned, (shared_of(planned, plan.work) + lead) // size, size, owners)

    def keep(record: Record) -> None:
        source.ended(record)
        records.append(record)
        if r:
            r.journal.add(record, EPOCH_NS)

    size, health = engine.profile.block_tokens, ClientHealth()
    virtual = Virtual(engine, plan.load, limits, keys, keep)
    health.interrupted = not virtual.drive(source, r.stop if r else bool)
    health.turns_lost = source.lost
    over_ns = max((record.end_ns or 0 for record in records), default=EPOCH_NS) + 1
    return Outcome(plan, records, [health], EPOCH_NS, PLANNED, [],
                   [*virtual.rows, engine_row(engine, over_ns)], True)


def engine_row(engine: Engine, now_ns: int) -> Dict[str, Any]:
    """A reading of an engine as parse_metrics gives one; it has no histograms."""
    return {"t_ns": now_ns, "engine": "simulated", "bad": 0, "running": engine.running,
            "waiting": engine.waiting, "kv_usage": engine.kv_usage,
            "preemptions": float(engine.preemptions),
            "prefix_hits": float(engine.prefix_hit_tokens),
            "prefix_queries": float(engine.prefix_query_tokens)}


def virtual_keys(planned: Planned, shared: int, size: int, owners: Tuple[int, int]) -> List[int]:
    """Names for the blocks of a request's prompt and output: equal where the tokens would be.

    shared: blocks of the group's common prefix. owners: whose the output is, and the rest of the
    prompt: the run, or the same number in every run if prompts repeat.
    """
    made, own = (owner << 48 | planned.id << 24 for owner in owners)
    prompt, total = planned.n_in // size, (planned.n_in + planned.n_out) // size
    shared = min(shared, (planned.n_in - 1) // size)
    group = -(planned.group + 1 << 24)
    return [*range(group, group + shared), *range(own + shared, own + prompt),
            *range(made + prompt, made + total)]


# ---- 11. The mock server -----------------------------------------------------------------------
# The engine behind real HTTP and SSE: one thread, an absolute timeline, vLLM's shapes.

MODEL, FINGERPRINT = "mock-model", "loadgen-mock"
BODY_BYTES_MAX, PIPELINED_BYTES_MAX = 64 * MIB, MIB
UNREAD_BYTES_MAX = 64 * MIB  # of an answer that the client does not take
SPIN_NS = 150_000  # the last stretch to a deadline is spent awake
SLIP_NS = 250_000_000  # later than this (a stopped process), the timeline starts afresh
SLEEP_S = 0.1  # at most, so that a signal is heeded
CHAT_OVERHEAD_TOKENS = 7
CHAT_TOKENS_DEFAULT, COMPLETION_TOKENS_DEFAULT = 128, 16
TRUTHS_MAX, TRUE_EVENTS_MAX = 200_000, 4_000_000
PIECE = b"x" * 64 * KIB
POSTS = ("/v1/chat/completions", "/v1/completions")
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15,
            0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 40.0,
            60.0, 80.0, 120.0, 160.0, 640.0, 2560.0)  # of the histograms in /metrics
SPANS = (("e2e_request_latency", "recv_ns", "last_ns"),  # histograms of whole requests
         ("request_queue_time", "recv_ns", "start_ns"),
         ("request_prefill_time", "start_ns", "first_ns"),
         ("request_decode_time", "first_ns", "last_ns"))

clock_ns = time.perf_counter_ns
compact = json.JSONEncoder(separators=(",", ":")).encode


class RequestError(Exception):
    """A request that gets an error for an answer: code, message, type, parameter."""

    def __init__(self, code: int, message: str, kind: str = "BadRequestError",
                 param: Optional[str] = None) -> None:
        """An error in vLLM's shape."""
        super().__init__(message)
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.code, self.body = code, compact({"error": error}).encode()


def tokens_of(data: Facts, chat: bool) -> List[Hashable]:
    """The prompt's tokens: given ids are themselves, text counts one for each word."""
    if chat:
        messages = data.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError(400, "messages: a list with at least one message is required")
        tokens: List[Hashable] = [""] * CHAT_OVERHEAD_TOKENS
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else [content]:
                text = part.get("text") if isinstance(part, dict) else part
                tokens += str(text or "").split()
        return tokens
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return list(prompt.split()) or [""]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return list(prompt)
    raise RequestError(400, "prompt: a text or one list of token ids is required", param="prompt")


class Exchange:
    """One request for tokens and its answer so far."""

    start_ns = first_ns = last_ns = n_out = cached = 0
    before = after = b""  # an inner token's event on the wire, its word between
    plain = False  # a stream whose inner events no fault and no usage touches
    faults: Sequence[Fault] = ()
    packer: Any = None  # compresses the answer
    kept = b""  # what a fault holds back
    event_ns: Optional[array.array[int]] = None  # when each token was sent, where that is kept
    job: Job

    def __init__(self, server: MockServer, conn: Connection, head: Head, body: bytearray) -> None:
        """What a request asks for; RequestError where that makes no sense."""
        try:
            data = json.loads(body)
            if not isinstance(data, dict):
                raise ValueError("an object is required")
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"JSON decode error: {error}", "Bad Request", "body") from None
        if data.get("model") not in (None, "", server.model):
            raise RequestError(404, f"The model `{data['model']}` does not exist. "
                               f"Valid aliases: {server.model}.", "NotFoundError", "model")
        options = data.get("stream_options") or {}
        if data.get("n") not in (None, 1) or not isinstance(options, dict):
            raise RequestError(400, "n must be 1, and stream_options an object")
        self.chat = head.start[1].startswith(POSTS[0])
        wanted = data.get("max_tokens")
        if self.chat and data.get("max_completion_tokens") is not None:
            wanted = data["max_completion_tokens"]
        if type(wanted) not in (int, type(None)):
            raise RequestError(400, "max_tokens must be a whole number", param="max_tokens")
        default = CHAT_TOKENS_DEFAULT if self.chat else COMPLETION_TOKENS_DEFAULT
        self.max_tokens: int = default if wanted is None else wanted
        self.finish = "stop" if self.chat and wanted is None else "length"
        self.stream = data.get("stream") is True
        self.usage_wanted = options.get("include_usage") is True
        self.usage_always = options.get("continuous_usage_stats") is True
        self.tokens = tokens_of(data, self.chat)
        self.n_in = len(self.tokens)
        self.conn: Connection = conn
        self.recv_ns, self.number = conn.recv_ns, next(server.numbers)
        self.id = head.headers.get("x-request-id", "") or f"{self.number:016x}"
        self.model, self.created = server.model, int(time.time())

    def word(self, index: int) -> str:
        """The output's token so far along; all are of one length."""
        return f" w{(self.number * 37 + index * 7) % 1000:03d}"

    def json(self, choices: List[Any], **more: Any) -> bytes:
        """The answer, or a chunk of it."""
        kind = "chat.completion" if self.chat else "text_completion"
        return compact({
            "id": ("chatcmpl-" if self.chat else "cmpl-") + self.id,
            "object": kind + (".chunk" if self.chat and self.stream else ""),
            "created": self.created, "model": self.model, "choices": choices, **more}).encode()

    def usage(self) -> Dict[str, Any]:
        """The usage so far."""
        details = {"prompt_tokens_details": {"cached_tokens": self.cached}} if self.cached else {}
        return {"prompt_tokens": self.n_in, "total_tokens": self.n_in + self.n_out,
                "completion_tokens": self.n_out, **details}

    def event(self, choices: List[Any], **more: Any) -> bytes:
        """One chunk of the stream as an SSE event."""
        if self.usage_always and choices:
            more = {"usage": self.usage(), **more}
        return b"data: %b\n\n" % self.json(choices, **more)

    def token_event(self, text: str, last: bool = False) -> bytes:
        """The chunk of one token."""
        choice: Dict[str, Any] = {"index": 0}
        if self.chat:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["text"] = text
        choice.update(logprobs=None, finish_reason=self.finish if last else None)
        if last or not self.chat:
            choice["stop_reason"] = None
        if not self.chat:
            choice["prompt_token_ids"] = None
        mark = {"system_fingerprint": FINGERPRINT} if last and not self.usage_wanted else {}
        return self.event([{**choice, "token_ids": None}], **mark)

    def frame(self, data: bytes) -> bytes:
        """Bytes of a stream as they go over the wire."""
        return encode_chunk(data) if self.conn.chunked else data

    def whole(self) -> bytes:
        """The answer to a request that wanted no stream."""
        text = "".join(map(self.word, range(self.n_out)))
        message = {"role": "assistant", "content": text, "refusal": None}
        said = {"message": message} if self.chat else {"text": text}
        return self.json([{"index": 0, **said, "logprobs": None, "finish_reason": self.finish,
                           "stop_reason": None}], system_fingerprint=FINGERPRINT,
                         usage=self.usage())


class Connection:
    """A client's socket, what it is sending, and what it has not taken yet."""

    events = READABLE
    recv_ns = 0  # when its last bytes came
    request: Optional[Tuple[Head, Body, bytearray]] = None  # the one that is coming in
    exchange: Optional[Exchange] = None  # the one being answered
    pump = b""  # sent without end
    chunked = True  # as HTTP/1.1 has it
    close_after = closed = False

    def __init__(self, sock: socket.socket) -> None:
        """A new connection."""
        self.sock, self.data, self.out = sock, bytearray(), bytearray()


Hook = Callable[["MockServer", Exchange], Any]


class Fault(NamedTuple):
    """A way to misbehave."""

    answer: Optional[Hook] = None  # in place of the engine
    opening: Optional[Hook] = None  # the same, for streams alone
    event: Callable[[Exchange, bytes], List[bytes]] = lambda exchange, event: [event]  # as sent
    half: Hook = lambda server, exchange: None  # once half of the tokens are out


def answer_status(server: MockServer, exchange: Exchange, code: int = 503) -> None:
    """An error status with vLLM's error object."""
    refused = RequestError(code, f"injected status {code}", "InjectedError")
    server.reply(exchange.conn, code, refused.body,
                 more="retry-after: 1\r\n" if code == 429 else "")


def open_slowly(server: MockServer, exchange: Exchange) -> None:
    """The head in ten pieces, 20 ms apart; then the stream."""
    head, now_ns, apart_ns = server.stream_head(exchange), clock_ns(), round(20 * MS / NS)
    for part in range(10):
        piece = head[len(head) * part // 10:len(head) * (part + 1) // 10]
        server.at(now_ns + part * apart_ns, functools.partial(server.send, exchange.conn, piece))
    server.at(now_ns + 10 * apart_ns, functools.partial(server.submit, exchange, False))


def open_empty(server: MockServer, exchange: Exchange) -> None:
    """A well-formed stream without a token."""
    exchange.max_tokens, exchange.finish = 0, "stop"
    server.send(exchange.conn, server.stream_head(exchange))
    server.send_token(exchange)
    server.finish(exchange, "stop")


def endless(server: MockServer, exchange: Exchange, start: bytes, piece: bytes) -> None:
    """The same piece over and over, as long as the client takes it."""
    server.engine.abort(exchange.number)
    exchange.conn.pump = piece
    server.send(exchange.conn, start)
    server.flush(exchange.conn)


def bundle(exchange: Exchange, event: bytes) -> List[bytes]:
    """Nothing until there are eight, or the end."""
    exchange.kept += event
    if exchange.kept.count(b"data:") < 8 and b"[DONE]" not in event:
        return []
    kept, exchange.kept = exchange.kept, b""
    return [kept]


def break_off(server: MockServer, exchange: Exchange) -> None:
    """An error object in the stream, then [DONE], as vLLM does it."""
    error = RequestError(500, "injected error", "InternalServerError")
    server.emit(exchange, b"data: %b\n\n" % error.body)
    server.engine.abort(exchange.number)
    server.finish(exchange, "error")


FAULTS: Dict[str, Fault] = {
    "status": Fault(answer_status),  # status:CODE; 429 has a Retry-After
    "refuse": Fault(lambda server, exchange: server.close(exchange.conn)),  # see accept()
    "silent": Fault(lambda server, exchange: None),
    "html": Fault(lambda server, exchange: server.reply(
        exchange.conn, 200, b"<!DOCTYPE html><html><h1>Welcome</h1></html>\n", "text/html")),
    "redirect": Fault(lambda server, exchange: server.reply(
        exchange.conn, 307, b"", more="location: /v1/elsewhere\r\n")),
    "endless_head": Fault(functools.partial(
        endless, start=b"HTTP/1.1 200 OK\r\n", piece=b"x-filler: %b\r\n" % PIECE[:KIB])),
    "slow_head": Fault(opening=open_slowly),
    "empty": Fault(opening=open_empty),
    "not_stream": Fault(),  # generate() knows
    "reset": Fault(half=lambda server, exchange: server.close(exchange.conn, reset=True)),
    "truncate": Fault(half=lambda server, exchange: server.close(exchange.conn)),
    "stall": Fault(half=lambda server, exchange: server.drop(exchange)),
    "error_event": Fault(half=break_off),
    "huge_line": Fault(half=functools.partial(
        endless, start=encode_chunk(b"data: "), piece=encode_chunk(PIECE))),
    "bad_json": Fault(half=lambda server, exchange: server.emit(
        exchange, b'data: {"choices":[{\n\n')),
    "no_done": Fault(event=lambda _, event: [] if b"[DONE]" in event else [event]),
    "no_usage": Fault(event=lambda _, event: [] if b'"choices":[],' in event else [event]),
    "wrong_usage": Fault(event=lambda _, event: [re.sub(  # twice the completion tokens
        rb'(?<="completion_tokens":)\d+', lambda n: b"%d" % (2 * int(n[0])), event)]),
    "crlf": Fault(event=lambda _, event: [event.replace(b"\n", b"\r\n")]),
    "no_space": Fault(event=lambda _, event: [event.replace(b"data: ", b"data:", 1)]),
    "comments": Fault(event=lambda _, event: [b": keep-alive\n\n" + event]),
    "split": Fault(event=lambda _, event: [event[:9], event[9:-1], event[-1:]]),
    "bundle": Fault(event=bundle),
    "gzip": Fault(event=lambda exchange, event: [  # though nobody asked
        exchange.packer.compress(event) + exchange.packer.flush(zlib.Z_SYNC_FLUSH)]),
}


class Faults(NamedTuple):
    """Which faults strike, each with the share of requests that it strikes, and the seed."""

    rates: Tuple[Tuple[Fault, str, float], ...] = ()
    seed: int = 0


NO_FAULTS = Faults()


def parse_faults(text: str, seed: int = 0) -> Faults:
    """'stall=0.05,status:503=0.1': each fault and its share of the requests, 1 if not given."""
    rates = []
    for item in filter(None, map(str.strip, text.split(","))):
        given, equals, share = item.partition("=")
        name, colon, code = given.strip().partition(":")
        if name not in FAULTS:
            raise UserError(f"no fault is called {name!r}{near(name, FAULTS)}")
        if not (re.fullmatch("[45][0-9][0-9]", code) if name == "status" else not colon):
            raise UserError(f"fault {item!r}: status needs a code from 400 to 599, as in "
                            "status:503, and no other takes an argument")
        fault = FAULTS[name]
        if name == "status":
            fault = Fault(functools.partial(answer_status, code=int(code)))
        try:
            rate = float(share) if equals else 1.0
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1:
            raise UserError(f"fault {item!r}: the share of requests must be from 0 to 1")
        rates.append((fault, name, rate))
    return Faults(tuple(rates), seed)


class MockServer:
    """Serves the engine in real time, on an absolute timeline.

    A step starts when the one before it ended, or when a request arrives at an idle engine; its
    tokens are sent at its end, never before. A request header `X-Mock-Fault: NAME` makes that one
    request misbehave.
    """

    def __init__(self, profile: Profile, host: str = "127.0.0.1", port: int = 0,
                 faults: Faults = NO_FAULTS, model: str = MODEL) -> None:
        """Listen, and serve from run() on."""
        import http
        import random
        import selectors
        self.engine, self.faults, self.model = Engine(profile), faults, model
        self.chance, self.clocks = random.Random(faults.seed), Clocks()
        self.reasons = {status.value: status.phrase for status in http.HTTPStatus}
        self.numbers = itertools.count(1)
        self.exchanges: Dict[Hashable, Exchange] = {}  # those in the engine
        self.truths: Deque[Dict[str, Any]] = collections.deque(maxlen=TRUTHS_MAX)
        self.emitted: List[Tuple[Hashable, int]] = []  # what the step in progress will give
        self.end_ns = 0  # when it ends; 0: no step in progress
        self.timers: List[Tuple[int, int, Callable[[], Any]]] = []
        self.histograms = {name: [0.0] * (len(BOUNDS_S) + 2)  # a count by bound, then the sum
                           for name in ("time_to_first_token", "inter_token_latency",
                                        *(name for name, _, _ in SPANS))}
        self.ends = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.slips = self.events_left = 0  # how many more tokens' times may be kept
        self.stopping = False
        try:
            self.listener = socket.create_server(
                (host, port), backlog=4096,
                family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, OverflowError) as error:
            raise UserError(f"cannot listen on {host}:{port}: {error}") from None
        self.listener.setblocking(False)
        self.port: int = self.listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, READABLE)

    # -- time --

    def run(self) -> None:
        """Serve until stopping is set."""
        while not self.stopping:
            due_ns = self.timers[0][0] if self.timers else 0
            self.wait(due_ns)
            if due_ns and due_ns - clock_ns() <= SPIN_NS:
                while clock_ns() < due_ns:
                    pass
                self.wait(due_ns)  # what came meanwhile takes part in the next step
                heapq.heappop(self.timers)[2]()

    def at(self, due_ns: int, call: Callable[[], Any]) -> None:
        """Call something at a time."""
        heapq.heappush(self.timers, (due_ns, next(self.numbers), call))

    def wait(self, due_ns: int) -> None:
        """Serve the sockets until shortly before a deadline."""
        left_s = min((due_ns - clock_ns() - SPIN_NS) * NS, SLEEP_S) if due_ns else SLEEP_S
        descriptor = getattr(self.selector, "fileno", None)
        if descriptor and left_s > 0:  # exact to 0.1 ms, epoll's own timeout only to 1 ms
            select.select([descriptor()], [], [], left_s)
            left_s = 0.0
        for served, (key, mask) in enumerate(self.selector.select(max(0.0, left_s))):
            if served >= 4 and due_ns and clock_ns() >= due_ns:
                break  # the others stay ready
            if key.fileobj is self.listener:
                self.accept()
            elif key.data is None:
                self.stopping |= not os.read(key.fd, KIB)
            else:
                if mask & WRITABLE:
                    self.flush(key.data)
                if mask & READABLE:
                    self.read(key.data)

    def begin(self, start_ns: int) -> None:
        """Start a step if there is something to do."""
        duration_s, self.emitted = self.engine.step()
        self.end_ns = start_ns + max(1, round(duration_s / NS)) if duration_s else 0
        if self.end_ns:
            self.at(self.end_ns, self.deliver)
        for number in self.engine.admitted:
            exchange = self.exchanges[number]
            exchange.start_ns = exchange.start_ns or max(start_ns, exchange.recv_ns)

    def deliver(self) -> None:
        """A step has ended: send its tokens, and start the next."""
        ended: List[Exchange] = []
        for number, _one in self.emitted:
            exchange = self.exchanges.get(number)
            if exchange is None:
                continue  # it went away
            now_ns = clock_ns()
            if exchange.n_out:
                self.observe("inter_token_latency", now_ns - exchange.last_ns)
            else:
                exchange.first_ns, exchange.cached = now_ns, exchange.job.cached
                self.observe("time_to_first_token", now_ns - exchange.recv_ns)
            exchange.last_ns = now_ns
            if exchange.event_ns is not None:
                exchange.event_ns.append(now_ns)
            exchange.n_out += 1
            if exchange.n_out == exchange.max_tokens:
                ended.append(exchange)
            if exchange.plain and 1 < exchange.n_out < exchange.max_tokens:
                word = exchange.word(exchange.n_out - 1).encode()
                self.send(exchange.conn, exchange.before + word + exchange.after)
            elif exchange.stream:
                self.send_token(exchange)
        for exchange in ended:
            if exchange.number in self.exchanges:
                self.finish(exchange, exchange.finish)
        late = clock_ns() - self.end_ns > SLIP_NS
        self.slips += late
        self.begin(clock_ns() if late else self.end_ns)

    def observe(self, name: str, duration_ns: int) -> None:
        """Count a duration in a histogram."""
        histogram, duration_s = self.histograms[name], duration_ns * NS
        histogram[bisect.bisect_left(BOUNDS_S, duration_s)] += 1
        histogram[-1] += duration_s

    # -- answers --

    def generate(self, conn: Connection, head: Head, body: bytearray) -> None:
        """Take in a request for tokens: to the engine, unless a fault answers it."""
        exchange = Exchange(self, conn, head, body)
        why = self.engine.refusal(exchange.n_in, exchange.max_tokens)
        if why:
            raise RequestError(400, why)
        try:
            asked = parse_faults(head.headers.get("x-mock-fault", "")).rates
        except UserError as error:
            raise RequestError(400, str(error), param="x-mock-fault") from None
        exchange.faults = [fault for fault, name, rate in (*self.faults.rates, *asked)
                           if self.chance.random() < rate and (name != "refuse" or asked)]
        exchange.stream &= FAULTS["not_stream"] not in exchange.faults
        if exchange.stream and FAULTS["gzip"] in exchange.faults:
            exchange.packer = zlib.compressobj(wbits=31)
        conn.exchange = exchange
        for fault in exchange.faults:
            hook = fault.answer or (fault.opening if exchange.stream else None)
            if hook:
                hook(self, exchange)
                return
        self.submit(exchange)

    def submit(self, exchange: Exchange, with_head: bool = True) -> None:
        """Hand a request to the engine, and open its answer."""
        if exchange.conn.closed:
            return
        words = [exchange.word(index)[1:] for index in range(exchange.max_tokens)]
        keys = block_keys([*exchange.tokens, *words], self.engine.profile.block_tokens)
        exchange.job = self.engine.submit(exchange.number, exchange.n_in, exchange.max_tokens, keys)
        self.exchanges[exchange.number] = exchange
        if self.events_left >= exchange.max_tokens:
            self.events_left -= exchange.max_tokens
            exchange.event_ns = array.array("q")
        if exchange.stream:
            exchange.plain = not (exchange.faults or exchange.usage_always)
            sample = exchange.frame(exchange.token_event(" w000"))
            exchange.before, _word, exchange.after = sample.rpartition(b" w000")
            if with_head:
                self.send(exchange.conn, self.stream_head(exchange))
        if not self.end_ns:
            self.begin(exchange.recv_ns)

    def send_token(self, exchange: Exchange) -> None:
        """Send a token that is not like the others: the first, the last, or one with a fault."""
        events = []
        if exchange.chat and exchange.n_out <= 1:
            delta = {"role": "assistant", "content": ""}
            role = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            events += [exchange.event([role], prompt_token_ids=None, prompt_text=None)]
        text = exchange.word(exchange.n_out - 1) if exchange.n_out else ""
        events += [exchange.token_event(text, exchange.n_out == exchange.max_tokens)]
        self.emit(exchange, *events)
        if exchange.n_out == max(1, exchange.max_tokens // 2):
            for fault in exchange.faults:
                if not exchange.conn.closed:
                    fault.half(self, exchange)

    def emit(self, exchange: Exchange, *events: bytes) -> None:
        """Send events as the exchange's faults will have them: in one send if there are none."""
        parts = list(events)
        for fault in exchange.faults:
            parts = [part for event in parts for part in fault.event(exchange, event)]
        sends = [exchange.frame(part) for part in parts]
        for data in sends if exchange.faults else [b"".join(sends)]:
            self.send(exchange.conn, data)

    def finish(self, exchange: Exchange, ended: str) -> None:
        """End an answer; the connection may then ask again."""
        conn = exchange.conn
        self.record(exchange, ended)
        if not exchange.stream:
            self.reply(conn, 200, exchange.whole())
            return
        if exchange.usage_wanted and ended != "error":
            self.emit(exchange, exchange.event([], usage=exchange.usage(),
                                               system_fingerprint=FINGERPRINT))
        self.emit(exchange, b"data: [DONE]\n\n")
        rest = exchange.kept + (exchange.packer.flush() if exchange.packer else b"")
        self.send(conn, exchange.frame(rest) + (LAST_CHUNK if conn.chunked else b""))
        self.next(conn)

    def drop(self, exchange: Exchange) -> None:
        """Forget a request that the engine still works on."""
        self.engine.abort(exchange.number)
        if exchange.number in self.exchanges:
            self.record(exchange, "abort")

    def record(self, exchange: Exchange, ended: str) -> None:
        """Keep the truth about a request that has ended, and its metrics."""
        self.exchanges.pop(exchange.number, None)
        self.ends[ended] += 1
        names = ("id", "recv_ns", "start_ns", "first_ns", "last_ns", "n_in", "n_out", "cached")
        truth = {name: getattr(exchange, name) for name in names}
        times = {} if exchange.event_ns is None else {"event_ns": list(exchange.event_ns)}
        self.truths.append({**truth, "ended": ended, **times})
        if ended in ("stop", "length") and exchange.n_out:
            for name, start, end in SPANS:
                self.observe(name, truth[end] - truth[start])

    def head(self, conn: Connection, code: int, kind: str, more: str) -> bytes:
        """The head of any answer."""
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        ends = "connection: close\r\n" if conn.close_after else ""
        return (f"HTTP/1.1 {code} {self.reasons.get(code, 'Injected')}\r\ndate: {date}\r\n"
                f"server: {FINGERPRINT}\r\ncontent-type: {kind}\r\n{more}{ends}\r\n").encode()

    def stream_head(self, exchange: Exchange) -> bytes:
        """The head of a stream."""
        more = "content-encoding: gzip\r\n" if exchange.packer else ""
        more += "transfer-encoding: chunked\r\n" if exchange.conn.chunked else ""
        return self.head(exchange.conn, 200, "text/event-stream; charset=utf-8", more)

    def reply(self, conn: Connection, code: int, body: bytes, kind: str = "application/json",
              more: str = "") -> None:
        """A whole answer in one send."""
        more += f"content-length: {len(body)}\r\n"
        self.send(conn, self.head(conn, code, kind, more) + body)
        self.next(conn)

    def next(self, conn: Connection) -> None:
        """An answer is complete: close, or go on with what has come meanwhile."""
        conn.exchange = conn.request = None
        if conn.close_after:
            self.flush(conn)
        elif conn.data:
            self.at(clock_ns(), functools.partial(self.parse, conn))

    # -- sockets --

    def accept(self) -> None:
        """Take new connections, some at a time."""
        for _ in range(32):
            try:
                sock, _address = self.listener.accept()
            except OSError:  # none left, gone already, or no descriptors
                return
            if any(name == "refuse" and self.chance.random() < rate
                   for _, name, rate in self.faults.rates):
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform.startswith("linux"):
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            self.selector.register(sock, READABLE, Connection(sock))

    def send(self, conn: Connection, data: bytes) -> None:
        """Send at once what the socket takes, and the rest when it can."""
        if conn.closed:
            return
        if not conn.out:
            try:
                data = data[conn.sock.send(data):]
            except BlockingIOError:
                pass
            except OSError:
                self.close(conn)
                return
            if not data:
                return
        conn.out += data
        self.watch(conn, READABLE | WRITABLE)
        if len(conn.out) > UNREAD_BYTES_MAX:
            self.close(conn)

    def flush(self, conn: Connection) -> None:
        """Send some of what is left; close if there is nothing, and will be nothing."""
        if not conn.out:
            conn.out += conn.pump
        self.watch(conn, READABLE | WRITABLE if conn.out else READABLE)
        try:
            if conn.out:
                del conn.out[:conn.sock.send(conn.out)]
            elif conn.close_after and not conn.exchange:
                self.close(conn)
        except BlockingIOError:
            pass
        except OSError:
            self.close(conn)

    def watch(self, conn: Connection, events: int) -> None:
        """Say what the selector should report."""
        if conn.events != events and not conn.closed:
            conn.events = events
            self.selector.modify(conn.sock, events, conn)

    def close(self, conn: Connection, reset: bool = False) -> None:
        """Close a connection, by FIN or RST; what it asked for is dropped."""
        if not conn.closed:
            if reset:
                conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            conn.closed = True
            self.selector.unregister(conn.sock)
            conn.sock.close()
            exchange, conn.exchange = conn.exchange, None
            if exchange:
                self.drop(exchange)

    def read(self, conn: Connection) -> None:
        """Take what a client sends."""
        try:
            data: bytes = b""
            stamp: List[Tuple[int, int, bytes]] = []
            if not conn.closed:
                data, stamp, _, _ = conn.sock.recvmsg(64 * KIB, 64)
        except BlockingIOError:
            return
        except OSError:
            pass
        self.clocks.retake()
        conn.recv_ns = self.clocks.monotonic_ns(stamp) if stamp else clock_ns()
        conn.data += data
        if data and len(conn.data) <= PIPELINED_BYTES_MAX:
            self.parse(conn)
        else:
            self.close(conn)

    def parse(self, conn: Connection) -> None:
        """Answer the next request if it is all here; what is no HTTP ends the connection."""
        if conn.closed or conn.exchange or (conn.close_after and not conn.request):
            return
        try:
            if not conn.request:
                head = take_head(conn.data)
                if head is None:
                    return
                conn.chunked = head.start[2] != "HTTP/1.0"
                conn.close_after = (not conn.chunked
                                    or "close" in header_list(head.headers, "connection"))
                conn.request = head, Body(head, False), bytearray()
            head, body, content = conn.request
            content += b"".join(body.feed(bytes(conn.data)))
            conn.data[:] = body.leftover
            declared = head.headers.get("content-length", "0")
            if body.ambiguous or len(content) > BODY_BYTES_MAX or (
                    declared.isdecimal() and int(declared) > BODY_BYTES_MAX):
                raise WireError("the body has two lengths, or is too large")
            if body.complete:
                conn.request = None
                self.handle(conn, head, content)
        except WireError as error:
            conn.close_after = True
            self.reply(conn, 400, RequestError(400, f"bad request: {error}").body)
        except RequestError as refused:
            self.reply(conn, refused.code, refused.body)

    def handle(self, conn: Connection, head: Head, body: bytearray) -> None:
        """Answer one request."""
        method, path = head.start[0], head.start[1].partition("?")[0]
        if path not in POSTS and path not in GETS:
            raise RequestError(404, f"Not Found: {path}", "NotFoundError")
        if method != ("POST" if path in POSTS else "GET"):
            raise RequestError(405, f"Method Not Allowed: {method} {path}", "MethodNotAllowedError")
        if method == "POST":
            self.generate(conn, head, body)
            return
        told = GETS[path](self)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        if not isinstance(told, str):
            told, kind = compact(told), "application/json"
        self.reply(conn, 200, told.encode(), kind)

    def forget(self, events: int = 0) -> Dict[str, Any]:
        """Begin the truth anew; from now on keep the times of so many tokens."""
        self.truths.clear()
        self.slips, self.events_left = 0, events
        return {"ok": True}

    def metrics(self) -> str:
        """Under vLLM's names, in the Prometheus text format."""
        engine, profile = self.engine, self.engine.profile
        labels = f'engine="0",model_name="{self.model}"'
        lines = ["# TYPE process_cpu_seconds_total counter",
                 f"process_cpu_seconds_total {time.process_time()}"]
        drafted = profile.spec_tokens * engine.generation_tokens / (
            1 + profile.spec_tokens * profile.spec_acceptance)  # a step emits one token and these
        for name, value in (("num_requests_running", engine.sequences if self.end_ns else 0),
                            ("num_requests_waiting", engine.waiting),
                            ("kv_cache_usage_perc", engine.kv_usage),
                            ("prefix_cache_queries_total", engine.prefix_query_tokens),
                            ("prefix_cache_hits_total", engine.prefix_hit_tokens),
                            ("num_preemptions_total", engine.preemptions),
                            ("prompt_tokens_total", engine.prompt_tokens),
                            ("generation_tokens_total", engine.generation_tokens),
                            *((("spec_decode_num_drafts_total", drafted / profile.spec_tokens),
                               ("spec_decode_num_draft_tokens_total", drafted),
                               ("spec_decode_num_accepted_tokens_total",
                                drafted * profile.spec_acceptance)) if drafted else ())):
            lines += [f"# TYPE vllm:{name} {'counter' if name.endswith('_total') else 'gauge'}",
                      f"vllm:{name}{{{labels}}} {float(value)}"]
        lines.append("# TYPE vllm:request_success_total counter")
        lines += [f'vllm:request_success_total{{finished_reason="{reason}",{labels}}} {number}.0'
                  for reason, number in self.ends.items()]
        for name, (*counts, sum_s) in self.histograms.items():
            totals = list(itertools.accumulate(counts))
            lines.append(f"# TYPE vllm:{name}_seconds histogram")
            lines += [f'vllm:{name}_seconds_bucket{{le="{bound}",{labels}}} {total}'
                      for bound, total in zip((*BOUNDS_S, "+Inf"), totals)]
            lines += [f"vllm:{name}_seconds_count{{{labels}}} {totals[-1]}",
                      f"vllm:{name}_seconds_sum{{{labels}}} {sum_s}"]
        lines += ["# TYPE vllm:cache_config_info gauge",
                  f'vllm:cache_config_info{{block_size="{profile.block_tokens}",enable_prefix_cachi'
                  f'ng="{profile.prefix_caching}",num_gpu_blocks="{profile.num_blocks}"}} 1.0', ""]
        return "\n".join(lines)


GETS: Dict[str, Callable[[MockServer], Any]] = {  # text, or what becomes JSON
    "/health": lambda server: "",
    "/metrics": MockServer.metrics,
    "/v1/models": lambda server: {"object": "list", "data": [{
        "id": server.model, "object": "model", "created": int(time.time()), "owned_by": "vllm",
        "root": server.model, "parent": None, "permission": [],
        "max_model_len": server.engine.profile.max_model_len}]},
    "/version": lambda server: {"version": MOCK_VERSION},
    "/truth": lambda server: {  # of every request that has ended, stamped by perf_counter_ns()
        "clock": "CLOCK_MONOTONIC", "unit": "ns", "cpu_s": time.process_time(),
        "slips": server.slips, "requests": list(server.truths)},
    "/truth/reset": MockServer.forget,
    "/truth/events": lambda server: server.forget(TRUE_EVENTS_MAX),
}


def serve(profile: Profile, host: str, port: int, faults: Faults, ready: Callable[[int], None],
          stdin_watch: bool = False) -> None:
    """Run the mock until SIGTERM or SIGINT, or the end of stdin where that is watched."""
    server = MockServer(profile, host, port, faults)

    def stop(*_: Any) -> None:
        server.stopping = True

    raise_descriptors(0)
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
    with contextlib.suppress(OSError, ValueError):  # a file or nothing: never readable
        if stdin_watch:
            server.selector.register(sys.stdin, READABLE)
    gc.freeze()
    gc.disable()  # nothing here makes cycles; a collection would be a stall
    try:
        ready(server.port)
        server.run()
    finally:
        gc.enable()
        server.listener.close()
        server.selector.close()


# ---- 11b. Old numbers, differences, shards -----------------------------------------------------
# The run under other tools' definitions; two runs of one plan compared; the self-test; the shards
# of one plan sent by several machines, and joined.


def settle_tools(args: Any, pasted: bool) -> None:
    """Fill in what follows from the flags of this section; UserError where they make no sense."""
    args.saves, args.lists = args.save_result is not None, args.save_detailed or not pasted
    if args.save_result == DEFAULT_PROFILE:  # no FILE given
        args.save_result = None
    asked = [name for name in ("merge", "diff", "selftest") if getattr(args, name)]
    target = args.url or args.base_url or args.serve or args.mock is not None
    alone = [name for name, on in (("simulate", args.simulate is not None),
                                   ("find-goodput", args.find_goodput or args.sweep == [])) if on]
    other = "--shard" if args.shard else "--start-at" if args.start_at else "--selftest"
    refuse(
        (len(asked) > 1 or (asked and target),
         f"--{''.join(asked[:1])} goes alone: no URL, no --mock, no other such flag"),
        ((args.compat or args.saves) and asked[:1] in (["diff"], ["selftest"]),
         f"--compat and --save-result do not go with --{''.join(asked)}"),
        (alone and (args.shard or args.start_at or args.selftest),
         f"--{''.join(alone[:1])} and {other} do not go together: it is one client's affair"),
        (args.shard and (args.saves or args.compat or args.gate),
         "--save-result, --compat and --gate would judge one shard's share; give them to --merge"),
        (args.shard and args.duration and args.ramp is None,
         "--shard with --duration needs --ramp S, so that every shard measures the same window"))
    if args.label and not args.saves:
        say("--label goes into the file of --save-result, which is not asked for")
    if args.shard and args.out:
        args.out = os.path.join(args.out, f"shard-{args.shard[0]}")


# -- other tools' definitions

PEER_SHARES = (0.5, 0.9, 0.95, 0.99)


def moments(values: Sequence[float]) -> Dict[str, Any]:
    """{mean, std, p50 ... p99} as numpy has them, in the values' unit; None of nothing."""
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered) if ordered else None
    spread = None if mean is None else math.sqrt(
        math.fsum((v - mean) ** 2 for v in ordered) / len(ordered))
    return {"mean": mean, "std": spread, **{f"p{100 * share:g}": percentile(ordered, share)
                                            for share in PEER_SHARES}}


def peer_start_ns(record: Record) -> int:
    """Where other tools' clocks start: just before the request, connecting included [ns]."""
    return (record.sent_ns or record.due_ns) - round((record.connect_s or 0.0) / NS)


def chunk_ns(record: Record) -> List[int]:
    """The times that vllm bench serve counts: chunks with output, a role before, an end after."""
    stamps = list(record.event_ns)
    if record.opened_ns is not None:
        stamps.insert(0, record.opened_ns)
    if record.closed_ns is not None and stamps and record.closed_ns >= stamps[-1]:
        stamps.append(record.closed_ns)
    return stamps


def peer_view(outcome: Outcome, slo: Slo, stamps_of: Callable[[Record], List[int]],
              one_token_passes: bool) -> Dict[str, Any]:
    """A run by the definitions that other tools share, over successes; SI units.

    TTFT, E2E: first, last of the stamps - start; TPOT: (E2E - TTFT) / (n_out - 1); ITL: gaps of
    the stamps, pooled; goodput: successes within every SLO / duration. Source: vLLM
    benchmarks/serve.py calculate_metrics; AIPerf docs/metrics-reference.md.
    """
    records = sorted((r for r in outcome.records if r.measured), key=lambda r: (r.due_ns, r.id))
    ttft, tpot, itl, e2e, good = [], [], [], [], 0
    ok = [(r, stamps) for r, stamps in ((r, stamps_of(r)) for r in records if r.ok) if stamps]
    for r, stamps in ok:
        start_ns, n = peer_start_ns(r), r.n_out or 0
        ttft.append((stamps[0] - start_ns) * NS)
        e2e.append((stamps[-1] - start_ns) * NS)
        itl += [(b - a) * NS for a, b in zip(stamps, stamps[1:])]
        each = (e2e[-1] - ttft[-1]) / (n - 1) if n > 1 else None
        if each is not None:
            tpot.append(each)
        judged_s = math.inf if each is None and not one_token_passes else each
        good += slo.within(ttft[-1], judged_s, e2e[-1])
    if one_token_passes:  # vLLM: from before the first gap to the end of the last request
        begin = outcome.start_ns + round(outcome.plan.window_s[0] / NS)
        end = max((r.end_ns or r.due_ns for r in records), default=begin)
    else:  # AIPerf: from the first request to the last response
        begin = min((peer_start_ns(r) for r, _ in ok), default=0)
        end = max((stamps[-1] for _, stamps in ok), default=0)
    duration_s = (end - begin) * NS
    read, made = (sum(n or 0 for n in column) for column in (
        [r.n_in for r, _ in ok], [r.n_out for r, _ in ok]))
    each_s = (lambda n: n / duration_s) if duration_s > 0 else (lambda n: None)
    return {"duration_s": duration_s, "completed": len(ok), "failed": len(records) - len(ok),
            "input_tokens": read, "output_tokens": made, "request_rps": each_s(len(ok)),
            "output_tok_s": each_s(made), "total_tok_s": each_s(read + made),
            "goodput_rps": each_s(good) if slo.any else None, "ttft_s": moments(ttft),
            "tpot_s": moments(tpot), "itl_s": moments(itl), "e2e_s": moments(e2e)}


vllm_view = functools.partial(peer_view, stamps_of=chunk_ns, one_token_passes=True)
aiperf_view = functools.partial(  # its "ITL" is tpot_s, its "inter chunk latency" itl_s
    peer_view, stamps_of=lambda r: list(r.event_ns), one_token_passes=False)


COMPAT_ROWS = (
    *((f"{name} {share}", key, share) for name, key in (
        ("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
      for share in ("mean", "p50", "p99")),
    ("req/s", "request_rps", ""), ("out tok/s", "output_tok_s", ""),
    ("goodput req/s", "goodput_rps", ""))
COMPAT_WHY = (
    "ours: from due, a failure counting as infinitely late; theirs: from the send, over successes,",
    "so waits for a late client or a --concurrency slot, and all failures, are not in them",
    "TTFT: vLLM's ends with the first chunk, a role without text too; the others' with output",
    "TPOT: (E2E - TTFT) / (n_out - 1) for all; vLLM's E2E ends with the last chunk, text or not",
    "ITL: vLLM's are the gaps between all chunks; AIPerf calls TPOT ITL, and these gaps ICL",
    "req/s: ours over first due to last end; vLLM's from before the first gap; AIPerf's over first",
    "send to last output. AIPerf counts tokens by a tokenizer of its own, which is not done here",
    "goodput: ours a share of all that was offered; theirs good requests / duration; one token has",
    "no TPOT, which passes a limit in ours and vLLM's, and fails in AIPerf's")


def compat_lines(run: Facts) -> List[str]:
    """The table of --compat: a run under three definitions; COMPAT_WHY says why they differ."""
    if "compat" not in run:
        return []
    views = ({**run, "request_rps": run["achieved_rps"]}, run["compat"]["vllm"],
             run["compat"]["aiperf"])
    lines = [f"  COMPAT         {'ours':>10} {'vLLM':>10} {'AIPerf':>10}   latencies in ms"]
    for name, key, share in COMPAT_ROWS:
        cells = [in_ms(view[key][share]) if share else optional(view[key], "{:.2f}")
                 for view in views]
        lines.append(f"  {name:<14} " + " ".join(f"{cell:>10}" for cell in cells))
    return lines


def compat_why(summary: Facts) -> List[str]:
    """Why the figures of --compat differ, where they were asked for."""
    asked = any("compat" in run for run in summary["runs"])
    return [f"{'' if n else 'COMPAT':<7}{line}" for n, line in enumerate(COMPAT_WHY) if asked]


def vllm_result(view: Facts, outcome: Outcome, target: Facts, lists: bool,
                told: Optional[Facts] = None, server: Optional[Facts] = None) -> Dict[str, Any]:
    """The object that vllm bench serve --save-result writes: its keys, its units (ms, tok/s).

    tokenizer_id is null, since none was used; where nothing succeeded, latencies are null (vLLM
    writes 0); generated_texts are empty, since texts are not kept. With `lists`, as with
    --save-detailed, an entry a request, failed ones as vLLM has them. told: its label and
    metadata, which as in vLLM no figure gives way to; server: for the drafts. Source: vLLM 0.32
    benchmarks/serve.py.
    """
    load = outcome.plan.load
    records = sorted((r for r in outcome.records if r.measured), key=lambda r: (r.due_ns, r.id))
    ok, backend = [r for r in records if r.ok], "openai-chat" if target["chat"] else "openai"
    busiest = busiest_second(ok)
    result: Dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"), "endpoint_type": backend, "backend": backend,
        "label": None, "model_id": target["model"], "tokenizer_id": None,
        "num_prompts": len(records), **(told or {}),
        "request_rate": "inf" if load.rate_rps is None else load.rate_rps,
        "burstiness": load.burstiness, "max_concurrency": load.concurrency,
        "duration": view["duration_s"], "completed": view["completed"], "failed": view["failed"],
        "total_input_tokens": view["input_tokens"], "total_output_tokens": view["output_tokens"],
        "request_throughput": view["request_rps"], "request_goodput": view["goodput_rps"],
        "output_throughput": view["output_tok_s"], "total_token_throughput": view["total_tok_s"],
        "max_output_tokens_per_s": busiest[0], "max_concurrent_requests": busiest[1], "rtfx": 0.0}
    if lists:
        stamps = [chunk_ns(r) if r.ok else [] for r in records]
        starts = [peer_start_ns(r) for r in records]
        result.update(
            input_lens=[r.n_in or r.n_in_planned for r in records],
            output_lens=[r.n_out or 0 if r.ok else 0 for r in records],
            ttfts=[(s[0] - at) * NS if s else 0.0 for s, at in zip(stamps, starts)],
            itls=[[(b - a) * NS for a, b in zip(s, s[1:])] for s in stamps],
            latencies=[(s[-1] - at) * NS if s else 0.0 for s, at in zip(stamps, starts)],
            start_times=[at * NS for at in starts],
            queue_times=[(r.ready_ns - r.due_ns) * NS for r in records],
            generated_texts=[""] * len(records),
            errors=["" if r.ok else f"{r.cls}: {r.error}" for r in records])
    result.update(vllm_drafts(server or {}))
    spreads = [("ttft", view["ttft_s"]), ("tpot", view["tpot_s"]), ("itl", view["itl_s"]),
               ("e2el", view["e2e_s"])]
    if load.concurrency is not None:
        spreads.append(("client_queue_time", moments([(r.ready_ns - r.due_ns) * NS for r in ok])))
    for name, spread in spreads:
        for key, value in {**spread, "median": spread["p50"]}.items():
            result[f"{key}_{name}_ms"] = None if value is None else value / MS
    return result


def vllm_drafts(server: Facts) -> Dict[str, Any]:
    """What vllm bench serve writes of speculative decoding; {} of none."""
    drafts, drafted, accepted = (server.get(f"spec_{key}") for key in (
        "drafts", "drafted", "accepted"))
    if not drafted or accepted is None:
        return {}
    return {"spec_decode_acceptance_rate": 100 * accepted / drafted,
            "spec_decode_acceptance_length": 1 + accepted / drafts if drafts else 0.0,
            "spec_decode_num_drafts": int(drafts or 0), "spec_decode_draft_tokens": int(drafted),
            "spec_decode_accepted_tokens": int(accepted),
            "spec_decode_per_position_acceptance_rates": [
                n / drafts for n in server["spec_accepted_at"] if drafts]}


def busiest_second(ok: Records) -> Tuple[float, int]:
    """(most chunks, most requests) in one second of the run, counted from its first send."""
    first_ns = min(map(peer_start_ns, ok), default=0)
    tokens, active = collections.Counter[int](), collections.Counter[int]()
    for r in ok:
        seconds = [int((t - first_ns) * NS) for t in (peer_start_ns(r), *chunk_ns(r))]
        tokens.update(seconds[1:])
        active.update(range(seconds[0], seconds[-1] + 1))
    return float(max(tokens.values(), default=0)), max(active.values(), default=0)


def result_path(args: Any, run: Facts, alone: bool) -> str:
    """Where a run's --save-result goes: the name given, -RATE before its end for a sweep."""
    name = args.save_result or args.result_filename
    if not name:
        cap = f"-concurrency{run['concurrency']}" if run["concurrency"] else ""
        rate = "inf" if run["rate_rps"] is None else f"{run['rate_rps']:g}"
        name = f"{args.label or 'loadgen'}-{rate}qps{cap}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    elif not alone:
        stem, end = os.path.splitext(name)
        name = f"{stem}-{run['label']}{end}"
    return os.path.join(args.result_dir or "", name)


def after_run(args: Any, summary: Facts, outcome: Outcome, asked_ns: int = 0) -> str:
    """What is added to the last run of a summary; why a result could not be saved, or ''."""
    run = summary["runs"][-1]
    run["start_unix_s"] = round((outcome.start_ns + Clocks().offset_ns) * NS, 6)
    late_s = (outcome.start_ns - asked_ns) * NS if asked_ns else 0.0
    if late_s > MS:
        run["warnings"].append(f"it began {late_s:.3f} s after --start-at: not ready before")
    reasons = [] if summary.get("simulated") else beyond_selftest(
        run, outcome, known_selftest(outcome))
    if reasons:
        run["verdict"] = "CLIENT-LIMITED"
        run["reasons"] = [*reasons, *run["reasons"]]
    if dig(run, "client", "interrupted"):
        run["reasons"].insert(0, f"INTERRUPTED: {how_far(outcome, run, args.shard or (0, 1))}; "
                              "the figures are of these alone")
    return peers_of(args, summary, outcome)


def how_far(outcome: Outcome, run: Facts, shard: Tuple[int, int]) -> str:
    """How much of its plan an interrupted run came to measure."""
    plan, (place, of) = outcome.plan, shard
    if plan.load.num_requests is not None:
        wanted = sum(1 for _ in turns_of(plan.requests[place::of]))
        return f"{run['offered']:,} of {wanted:,} requests"
    opened, closed = plan.window_s
    last_ns = max((r.end_ns or r.due_ns for r in outcome.records), default=outcome.start_ns)
    came_s = min(closed, max(opened, (last_ns - outcome.start_ns) * NS)) - opened
    return f"{came_s:.1f} of {closed - opened:.1f} s, {run['offered']:,} requests"


def peers_of(args: Any, summary: Facts, outcome: Outcome) -> str:
    """--compat and --save-result for the last run; why it could not be saved, or ''."""
    run, slo = summary["runs"][-1], slo_from(summary["slo"])
    if args.compat:
        run["compat"] = {"vllm": vllm_view(outcome, slo), "aiperf": aiperf_view(outcome, slo)}
    if not args.saves:
        return ""
    path = result_path(args, run, len(summary["plan"]["rates"]) == 1)
    metadata = {name: value for name, facts in (summary.get("setup") or {}).items()
                for value, by in facts or () if by == "--metadata"}
    result = vllm_result(vllm_view(outcome, slo), outcome, summary["target"], args.lists,
                         {"label": args.label, **metadata}, run["server"])
    return save(os.path.dirname(path) or ".", os.path.basename(path), result, None)


def open_result(args: Any) -> None:
    """Make the folder of --save-result if need be; UserError where nothing can be written."""
    if not args.saves:
        return
    name = args.save_result or args.result_filename or ""
    path = os.path.join(args.result_dir or "", name)
    folder = os.path.dirname(path) or "."
    try:
        if args.result_dir:
            os.makedirs(args.result_dir, exist_ok=True)
    except OSError as error:
        raise UserError(f"--result-dir {args.result_dir}: {error.strerror}") from None
    refuse(
        (name and os.path.exists(path) and not os.path.isfile(path),
         f"--save-result {path} is a folder or a device; name a file"),
        (not os.path.isdir(folder), f"--save-result {path}: there is no folder {folder}"),
        (not os.access(folder, os.W_OK), f"--save-result {path}: {folder} cannot be written to"))
    if args.lists:
        say("--save-result: answers are not kept, so its generated_texts are empty")


# -- runs kept on disk


class Saved(NamedTuple):
    """A run as --out kept it."""

    path: str
    plan: Dict[str, Any]
    summary: Dict[str, Any]  # {} where the run did not live to write it
    records: List[Record]  # of requests.jsonl


def load_run(path: str) -> Saved:
    """Read the folder of a run; a torn last line of requests.jsonl is left out. UserError."""
    plan = read_json(os.path.join(path, "plan.json"))
    at = os.path.join(path, "summary.json")
    summary = read_json(at) if os.path.exists(at) else {}
    records: List[Record] = []
    at = os.path.join(path, "requests.jsonl")
    try:
        with open(at, encoding="utf-8") as file:
            for line in file:
                if not line.endswith("\n"):
                    break  # torn: its process was killed while it wrote
                records.append(record_of(json.loads(line)))
    except OSError as error:
        raise UserError(f"{at}: {error.strerror}") from None
    except MISSHAPEN:
        raise UserError(f"{at} line {len(records) + 1}: not a line that this loadgen writes"
                        ) from None
    if len({(r.run, r.id) for r in records}) < len(records):
        raise UserError(f"{at} holds a request twice: it is not of one run of its plan.json")
    return Saved(path, plan, summary, records)


ROW_TIMES = ("due", "sent", "first", "last", "ready", "answer", "opened", "closed", "end")
ROW_SAME = ("n_out", "n_out_estimated", "events", "itl_max_s", "cached_tokens", "status",
            "finish_reason", "coalesced", "connect_s", "reused", "resent")


def record_of(row: Facts) -> Record:
    """The record of a line of requests.jsonl, the run's start being 0 ns; MISSHAPEN of another."""
    session = -1 if row["session"] is None else row["session"]
    planned = Planned(row["id"], 0.0, row["n_in_planned"], row["n_out_planned"], 0,
                      cls=row["mix_class"] or "", session=session, turn=row["turn"] or 0)
    record = Record(planned, row["run"], round(row["due_s"] / NS), row["measured"])
    for name in ROW_TIMES:
        at_s = row[f"{name}_s"]
        setattr(record, f"{name}_ns", None if at_s is None else round(at_s / NS))
    for name in ("n_in", *ROW_SAME):
        setattr(record, name, row[name])
    record.cls, record.error = row["class"], row["error"] or ""
    if record.first_ns is not None:
        record.event_ns = array.array("q", itertools.accumulate(
            (us * 1000 for us in row["gaps_us"]), initial=record.first_ns))
    return record


def work_kept(saved: Facts, rows: Facts) -> Work:
    """The work of a plan.json, as far as a summary asks for it: the requests are in its rows."""
    def known(text: str, mean: float = math.nan) -> Lengths:  # the lengths drawn are in the rows
        return Lengths(text, mean, lambda q: math.nan)

    traffic = saved.get("traffic") or {}
    work = Work(known(saved["lengths"]["input"]), known(saved["lengths"]["output"]),
                saved["shared_prefix_len"], saved["prefix_groups"])
    if "format" in traffic:
        work = work._replace(trace=Trace((), traffic["block_tokens"] or 0, traffic, []))
    if "turns" in traffic:
        think = [think_s for think_s in rows["think_s"] if think_s is not None]
        turns = len(rows["session"]) / len(set(rows["session"]))
        work = work._replace(turns=known(traffic["turns"], turns),
                             think_s=known(traffic["think_time_s"], mean_of(think) or 0.0))
    return work._replace(classes=tuple(TrafficClass(name, c["share"], None, None, work._replace(
        n_in=known(c["input"]), n_out=known(c["output"]), shared_prefix=c["shared_prefix_len"]),
        {}, c["model"] or "") for name, c in traffic.get("classes", {}).items()))


def plan_of(saved: Facts, run: int) -> Plan:
    """The plan of one run as plan.json keeps it; a later turn is due with its session's first."""
    rows = saved["runs"][run]
    n = len(rows["n_in"])
    opened, closed = (float(edge) for edge in saved["windows_s"][run])  # "inf" is a text
    load = Load(saved["rates"][run], saved["concurrency"],
                math.inf if saved["burstiness"] is None else saved["burstiness"],
                n if math.isinf(closed) else None, saved["duration_s"], None)
    classes, sessions, turns = (rows.get(name) or [default] * n for name, default in (
        ("cls", ""), ("session", -1), ("turn", 0)))
    dues: List[float] = []
    for due_s in saved["arrivals"][run]:
        dues.append(dues[-1] if due_s is None else due_s)
    requests = tuple(
        Planned(i, due_s, n_in, n_out, group, cls=cls, session=session, turn=turn)
        for i, (due_s, n_in, n_out, group, cls, session, turn) in enumerate(zip(
            dues, rows["n_in"], rows["n_out"], rows["group"], classes, sessions, turns)))
    return Plan(load, work_kept(saved, rows), saved["seed"], requests, (opened, closed),
                rows["hash"])


PLAN_KEYS = ("seed", "rates", "lengths", "arrival_process", "burstiness", "concurrency",
             "num_requests", "duration_s", "shared_prefix_len", "prefix_groups")


def same_plan(a: Saved, b: Saved) -> None:
    """UserError naming the difference where two runs are not of the same plan."""
    if bool(a.plan.get("shard")) != bool(b.plan.get("shard")):
        raise UserError(f"of {a.path} and {b.path} one is a shard and the other is not; --merge "
                        "the shards first")
    if a.plan.get("hash") == b.plan.get("hash"):
        return
    found = [f"{key} {json.dumps(a.plan.get(key))} against {json.dumps(b.plan.get(key))}"
             for key in PLAN_KEYS if a.plan.get(key) != b.plan.get(key)]
    raise UserError(f"{a.path} and {b.path} are not of the same plan: "
                    + ("; ".join(found) or "the ramp, or what a file of lengths holds"))


def kept_summary(path: str) -> Dict[str, Any]:
    """The summary of a folder; what a killed process could not summarise is, from its records."""
    at = os.path.join(path, "summary.json")
    plan_at = os.path.join(path, "plan.json")
    if os.path.exists(at) or not os.path.exists(plan_at):
        summary = read_json(at)
        summary["runs"] = with_infinities(summary["runs"])
    else:
        summary = {**read_json(plan_at).get("told", {}), "runs": []}
    if os.path.exists(plan_at) and last_run(path) >= len(summary["runs"]):
        saved = load_run(path)
        kept = ("salt", "runs", "arrivals", "told")
        summary["plan"] = {key: value for key, value in saved.plan.items() if key not in kept}
        for run in range(len(summary["runs"]), last_run(path) + 1):
            summary["runs"].append(killed_run(saved, summary, run))
        summary["findings"], summary["advice"] = findings(summary), advice(summary)
        summary["killed"] = True
    refuse((not summary["runs"], f"{path}: the run was stopped before any request had ended; there "
            "is nothing to report"))
    return summary


def last_run(path: str) -> int:
    """The run that the last whole line of requests.jsonl is of; -1 without one."""
    try:
        with open(os.path.join(path, "requests.jsonl"), "rb") as file:
            file.seek(max(0, os.path.getsize(file.name) - MIB))
            runs = re.findall(rb'^\{"run":(\d+),.*\n', file.read(), re.M)
            return max(map(int, runs), default=-1)
    except OSError:
        return -1


def killed_run(saved: Saved, summary: Facts, run: int) -> Dict[str, Any]:
    """The summary of a run that its process did not live to write: killed in it, or after it."""
    health, plan = ClientHealth(), plan_of(saved.plan, run)
    shard = saved.plan["shard"] or (0, 1)
    records = [r for r in saved.records if r.run == run]
    health.lag_s.extend(max(0, r.sent_ns - r.ready_ns) * NS for r in records
                        if r.sent_ns is not None)
    cut, health.turns_lost = cut_off(plan, run, records, shard,
                                      saved.plan["runs"][run].get("think_s", ()))
    ended_s = max((r.end_ns or 0 for r in records), default=0) * NS
    is_last = run == max((r.run for r in saved.records), default=run)
    far = len(records) + len(cut) + health.turns_lost
    health.interrupted = any(r.measured for r in cut) or (is_last and (
        far < sum(shard_of(p, shard[1]) == shard[0] for p in plan.requests)
        if plan.load.num_requests is not None else plan.load.closed and ended_s < plan.window_s[1]))
    outcome = Outcome(plan, records + cut, [health], 0, ONE_A_WORD, [],
                      simulated=bool(summary["simulated"]))
    found = summarise(outcome, slo_from(summary["slo"]), summary["target"]["token_ids"],
                      summary["plan"]["unique_prompts"])
    if health.interrupted:
        found["reasons"].insert(0, f"INTERRUPTED: {how_far(outcome, found, shard)} when its "
                                f"process was killed; the {len(cut)} in flight then are cancelled, "
                                "misses")
    return found


def shard_of(planned: Planned, of: int) -> int:
    """Which of so many shards sends a request; a session is one shard's."""
    return (planned.id if planned.session < 0 else planned.session) % of


def cut_off(plan: Plan, run: int, records: Records, shard: Tuple[int, int],
            think_s: Sequence[Optional[float]]) -> Tuple[List[Record], int]:
    """(requests due before the last record's end that have none, turns that failed ones cost).

    A closed loop's request is due when a slot came free, a later turn when it had been thought of.
    """
    known, (place, of), lost = {r.id: r for r in records}, shard, 0
    last_ns = max((r.end_ns or r.due_ns for r in records), default=0)
    mine = [p for p in plan.requests if shard_of(p, of) == place]
    more = {before.id for before, p in zip(mine, mine[1:]) if p.turn}  # a turn follows them
    free = [0] * len(mine)
    if plan.load.closed and plan.load.concurrency:
        slots = plan.load.concurrency // of + (place < plan.load.concurrency % of)
        free = [0] * slots + sorted(r.end_ns for r in records if r.end_ns is not None
                                    and not (r.ok and r.id in more))
    found: List[Record] = []
    firsts = iter(free)
    for before, p in zip([None, *mine], mine):
        due_ns = None if p.turn else max(next(firsts, last_ns + 1), round(p.due_s / NS))
        if p.turn and before is not None:
            ahead = known.get(before.id)
            if ahead and ahead.ok and ahead.end_ns is not None:
                due_ns = ahead.end_ns + round((think_s[p.id] or 0.0) / NS)
            elif ahead and ahead.cls not in ("cancelled", "unsent") and p.id not in known:
                lost += sum(1 for q in mine if q.session == p.session and q.turn >= p.turn)
        if p.id not in known and due_ns is not None and due_ns <= last_ns:
            record = Record(p, run, due_ns, plan.measured(due_ns * NS))
            record.cls, record.error = "cancelled", "in flight when the process was killed"
            record.end_ns = last_ns
            found.append(record)
    return found, lost


# -- shards

GRID_S, SETTLE_S, PREPARE_S = 10, 30.0, 1.0


def next_start_ns(start_ns: int, plan: Plan, ended_ns: int) -> int:
    """When the shards of a sweep begin their next run [ns]: a time that all come to by themselves.

    SETTLE_S after the last arrival; by whole GRID_S later where this shard took longer.
    """
    last_s = plan.window_s[1] if plan.load.num_requests is None else max(
        (p.due_s for p in plan.requests), default=0.0)
    wait_s = max(last_s + SETTLE_S, (ended_ns - start_ns) * NS + PREPARE_S)
    return start_ns + math.ceil(wait_s / GRID_S) * round(GRID_S / NS)


def aligned(r: Running, start_at_s: Optional[float], plans: Sequence[Plan], number: int) -> Running:
    """Wait until shortly before a run is to start; the run's settings with its start in them."""
    if start_at_s is None:
        return r
    now_ns = time.perf_counter_ns()
    start_ns = (next_start_ns(r.start_ns, plans[number - 1], now_ns) if number
                else now_ns + round((start_at_s - time.time()) / NS))
    r = r._replace(start_ns=start_ns)
    r._replace(start_ns=start_ns - round(PREPARE_S / NS)).begin()
    return r


def load_shards(paths: Sequence[str]) -> Tuple[Dict[int, Saved], int]:
    """({shard: its run}, how many there were) in these folders; UserError unless of one plan."""
    import glob
    parts: Dict[int, Saved] = {}
    folders, of = [], 0
    for path in paths:
        plans = glob.glob(os.path.join(glob.escape(path), "shard-*", "plan.json"))
        folders += sorted(map(os.path.dirname, plans)) or [path]
    for part in map(load_run, folders):
        try:
            place, count = part.plan["shard"]
        except (TypeError, KeyError, ValueError):
            raise UserError(f"{part.path} is not of a run with --shard; --merge joins the shards "
                            "of one run") from None
        if parts:
            same_plan(next(iter(parts.values())), part)
        if place in parts:
            raise UserError(f"{parts[place].path} and {part.path} are both shard {place}")
        if of not in (0, count):
            raise UserError(f"{part.path} is one of {count} shards, the others of {of}")
        parts[place], of = part, count
    return parts, of


def health_of(client: Facts, records: Records) -> ClientHealth:
    """A shard's health from its summary and its records."""
    health = ClientHealth()
    health.lag_s.extend(max(0, r.sent_ns - r.ready_ns) * NS for r in records
                        if r.sent_ns is not None)
    for name in ("cpu_s", "events", "reused", "resent", "kernel_stamps", "interrupted",
                 "peak_rss_bytes"):
        setattr(health, name, client[name])
    health.wall_s = health.cpu_s / client["cpu_share"] if client["cpu_share"] else 0.0
    health.opened = client["connections_opened"]
    health.coalesced = round((client["coalesced_share"] or 0) * health.events)
    health.clock_jump_ns = round(client["clock_jump_s"] / NS)
    return health


def joined_outcome(parts: Mapping[int, Saved], of: int, run: int) -> Tuple[Outcome, List[str]]:
    """(one run's shards as one outcome, what is wrong with any); lost requests are cancelled."""
    plan = max((plan_of(part.plan, run) for part in parts.values()),
               key=lambda plan: len(plan.requests))
    outcome, wrong = Outcome(plan, [], [], 0, ONE_A_WORD, []), []

    for shard in range(of):
        part = parts.get(shard)
        told = dig(part.summary, "runs", run) if part else None  # by its own summary
        mine = [r for r in part.records if r.run == run] if part else []
        seen = {r.id for r in mine}
        lost = [p for p in plan.requests
                if shard_of(p, of) == shard and p.id not in seen and plan.measured(p.due_s)]
        if told:
            outcome.health.append(health_of(told["client"], mine))
            outcome.health[-1].turns_lost = dig(told, "turns", "lost") or 0
            lost = [p for p in lost if not p.turn]  # turns_lost has the others
            if told["verdict"] == "CLIENT-LIMITED":
                wrong += [f"shard {shard}: {reason}" for reason in told["reasons"][:-1]
                          or told["reasons"]]
        if lost or not told:
            why = ("is missing" if not part else "was interrupted" if told else
                   "did not end its run")
            wrong.append(f"shard {shard} of {of} {why}: {len(lost)} of its requests are counted as "
                         "cancelled, misses")
            for p in lost:
                record = Record(p, run, round(p.due_s / NS), True)
                record.cls, record.error = "cancelled", f"shard {shard} {why}"
                record.end_ns = record.due_ns  # when it ended is not known: never in flight
                mine.append(record)
        outcome.records.extend(mine)
    return outcome, wrong


def joined_summary(parts: Mapping[int, Saved], of: int, run: int, slo: Slo
                   ) -> Tuple[Outcome, Dict[str, Any]]:
    """(outcome, summary) of one run over its shards, percentiles from their raw records."""
    outcome, wrong = joined_outcome(parts, of, run)
    told = [one for one in (dig(part.summary, "runs", run) for part in parts.values()) if one]
    first = next((part.summary for part in parts.values() if part.summary), {})
    if told:
        outcome = outcome._replace(calibration=ONE_A_WORD._replace(source=told[0]["input_source"]))
    found = summarise(outcome, slo, first.get("target", {}).get("token_ids", False),
                      first.get("plan", {}).get("unique_prompts", True))
    found["server"] = shared_server({shard: dig(part.summary, "runs", run, "server")
                                     for shard, part in parts.items()}, outcome.records)
    client = found["client"]
    client["workers"] = sum(one["client"]["workers"] for one in told)
    client["loop_busy_s"] = {key: max((one["client"]["loop_busy_s"][key] or 0 for one in told),
                                      default=None) for key in ("p50", "p99", "max")}
    if wrong:
        found["verdict"], found["reasons"] = "CLIENT-LIMITED", wrong
    starts = [one["start_unix_s"] for one in told]
    found["start_skew_s"] = max(starts) - min(starts) if starts else None
    return outcome, found


def shared_server(told: Mapping[int, Any], records: Records) -> Optional[Dict[str, Any]]:
    """What the engine, which all shards share, said: of the shard with the most readings.

    Its counters hold the requests of every shard; its TTFT is laid beside those of all.
    """
    known = {shard: server for shard, server in told.items() if server}
    if not known:
        return None
    shard = max(known, key=lambda shard: (known[shard]["samples"], -shard))
    server: Dict[str, Any] = {**known[shard], "shard": shard}
    took = [(r.first_ns - r.sent_ns) * NS for r in records
            if r.first_ns is not None and r.sent_ns is not None]
    mean_s, its = mean_of(took), server["ttft_s"]
    equal = its["n"] is not None and abs(its["n"] - len(took)) <= max(1, 0.02 * len(took))
    server["client_ttft_s"] = {"n": len(took), "mean": mean_s}
    server["beyond_engine_s"] = mean_s - its["mean"] if (
        equal and mean_s is not None and its["mean"] is not None) else None
    return server


def merge(args: Any) -> Dict[str, Any]:
    """--merge: one summary of the shards of one run; with --out the joined files too."""
    parts, of = load_shards(args.merge)
    summaries = [part.summary for part in parts.values() if part.summary]
    if not summaries:
        raise UserError("no shard has a summary.json: none of them ended a run")
    base, plan = summaries[0], next(iter(parts.values())).plan
    try:
        slo = slo_from({**base["slo"], **asked_slo(args)})
        summary: Dict[str, Any] = {
            "plan": {**base["plan"], "shard": None}, "target": base["target"],
            "slo": slo_statement(slo), "environment": base["environment"],
            "setup": base.get("setup"), "metrics": base.get("metrics"), "simulated": None,
            "step_time": base.get("step_time"),
            "warmup": {**base["warmup"], **{key: sum(one["warmup"][key] for one in summaries)
                                            for key in ("requests", "failed")}},
            "shards": {"of": of, "joined": sorted(parts),
                       "missing": [shard for shard in range(of) if shard not in parts]},
            "runs": []}
        summary["setup"] = setup_of(args, {}, summary["setup"])
        summary["metrics"] = next((one["metrics"] for one in summaries if dig(
            one, "metrics", "engine")), summary["metrics"])
        folder = open_folder(args.out)
        journal = Journal(folder)
        unsaved = save(folder, "plan.json", {**plan, "shard": None})
        for run in range(max(len(one["runs"]) for one in summaries)):
            outcome, found = joined_summary(parts, of, run, slo)
            summary["runs"].append(found)
            summary["findings"], summary["advice"] = findings(summary), advice(summary)
            conclude(summary, args)
            unsaved = peers_of(args, summary, outcome) or unsaved
            for record in sorted(outcome.records, key=lambda r: (r.due_ns, r.id)):
                journal.add(record, 0)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UserError(f"--merge: a plan.json or summary.json is not one that this loadgen "
                        f"writes: {printable(repr(error), 80)}") from None
    summary["unsaved"] = unsaved_line(journal.failed, save_report(folder, summary), unsaved)
    return summary


def asked_slo(args: Any) -> Dict[str, Any]:
    """The limits that the command line gives, over those that a run was judged by."""
    take_goodput(args)
    found = {key: value for key, value in limits_of(args).items() if value}
    return {**found, "attainment": args.slo_attainment} if found or args.gate else found


def shard_lines(summary: Facts) -> List[str]:
    """Which shard of how many this is, or how they were joined, for the setup statement."""
    own, shards = summary["plan"].get("shard"), summary.get("shards")
    if own:
        return [f"SHARD  {own[0]} of {own[1]}: every figure is of its share of the plan; "
                "--merge joins them"]
    if not shards:
        return []
    skews = [run["start_skew_s"] for run in summary["runs"] if run["start_skew_s"] is not None]
    gone = ", ".join(map(str, shards["missing"]))
    return [f"SHARDS {len(shards['joined'])} of {shards['of']} joined"
            + (f"; MISSING: {gone}" if gone else "")
            + f"; by their own clocks they started within {in_ms(max(skews, default=None))} ms"]


# -- two runs of one plan

RESAMPLES, RESAMPLED_MOST, BLOCKS_FEWEST = 1000, 3_000_000, 12
SLICES = 60  # of the time that both runs lasted, for token rates
Edges = Tuple[Optional[float], Optional[float]]  # of a 95% interval; None: cannot be told
Side = List[Tuple[float, int]]  # values with the block of requests that each belongs to


def less(b: float, a: float) -> float:
    """b - a, where two infinities are alike."""
    return 0.0 if a == b else b - a


def side_of(records: Records, block: int, key: str) -> Side:
    """A latency of each request with its block, ascending; failures infinitely late."""
    return sorted((v, i // block) for i, v in enumerate(offered_s(records, key)) if v is not None)


def gaps_side(records: Records, block: int) -> Side:
    """The gaps between output events of successes with their block, ascending [s]."""
    return sorted((us * US, i // block) for i, r in enumerate(records) if r.ok
                  for us in r.gaps_us)


def weighted(side: Side, weights: Sequence[int], share: float) -> float:
    """A percentile of a side whose blocks count so often (nearest rank)."""
    reached = list(itertools.accumulate(weights[block] for _, block in side))
    return side[bisect.bisect_left(reached, max(1, math.ceil(share * reached[-1])))][0]


def bounds(differences: List[float], blocks: int) -> Edges:
    """95% interval from a bootstrap's differences, widened as Student's t is for few blocks."""
    ordered = sorted(differences)
    middle, low, high = (percentile(ordered, share) or 0.0 for share in (0.5, 0.025, 0.975))
    wider = 1 + 1.7 / blocks  # about t(blocks - 1) / 1.96 * sqrt(blocks / (blocks - 1))
    if not math.isinf(middle):
        low, high = middle + (low - middle) * wider, middle + (high - middle) * wider
    return low, high


def diff_row(name: str, key: str, values: Edges, edges: Edges) -> Dict[str, Any]:
    """One metric of a comparison, with the answer that its interval allows."""
    (a, b), (low, high) = values, edges
    answer = ("not enough requests to tell" if low is None or high is None
              else "B higher" if low > 0 else "B lower" if high < 0 else "no difference shown")
    return {"name": name, "metric": key, "a": a, "b": b, "low": low, "high": high,
            "difference": None if a is None or b is None else less(b, a), "answer": answer}


def compare_spread(name: str, key: str, sides: Tuple[Side, Side], blocks: int, enough: bool
                   ) -> Rows:
    """p50 and p99 of one latency in both runs; the same draws of blocks for both, so paired."""
    rows, choose = [], stream(1, "bootstrap").choices
    number = max(100, min(RESAMPLES, RESAMPLED_MOST // max(1, sum(map(len, sides)))))
    draws = [[0] * blocks for _ in range(number if all(sides) else 0)]  # how often each is drawn
    for weights in draws:
        for block in choose(range(blocks), k=blocks):
            weights[block] += 1
    for share in (0.5, 0.99):
        a, b = (percentile([v for v, _ in side], share) for side in sides)
        edges: Edges = (None, None)
        held = min(len({block for _, block in side}) for side in sides)
        if draws and held >= BLOCKS_FEWEST and (enough or share == 0.5):
            drawn = [w for w in draws if all(any(w[block] for _, block in s) for s in sides)]
            found = [[weighted(side, weights, share) for side in sides] for weights in drawn]
            edges = bounds([less(y, x) for x, y in found], blocks)
        rows.append(diff_row(f"{name} p{share * 100:g}", f"{key} p{share * 100:g}", (a, b), edges))
    return rows


def mean_difference(pairs: Sequence[Tuple[float, float]]) -> Edges:
    """95% interval of the mean of b - a over pairs in order of time, autocorrelation included."""
    steps = [b - a for a, b in pairs]
    n = len(steps)
    worth = n / autocorrelation_factor(steps) if n else 0.0
    if worth < BLOCKS_FEWEST:
        return None, None
    mean = math.fsum(steps) / n
    sd = math.sqrt(math.fsum((s - mean) ** 2 for s in steps) / (n - 1))
    half = (Z95 + 2.4 / worth) * sd / math.sqrt(worth)  # Student's t to a hundredth
    return mean - half, mean + half


def token_slices(records: Records, span_ns: int) -> List[float]:
    """Output tokens a second in each of SLICES equal parts of the first span_ns of a run."""
    rates, each_s = [0.0] * SLICES, span_ns * NS / SLICES
    for r in records:
        worth = (r.n_out or 0) / len(r.event_ns) / each_s if r.event_ns else 0.0
        for at in r.event_ns:
            if 0 <= at < span_ns:
                rates[at * SLICES // span_ns] += worth
    return rates


def compare(a: Records, b: Records, slo: Slo, rate_rps: Optional[float]) -> Dict[str, Any]:
    """Two runs of one plan, metric by metric, with 95% intervals of the difference.

    Requests are paired by id. Percentiles: bootstrap over blocks of successive requests, three
    times as long as what they remember, the same blocks drawn for both. Source: Kuensch, "The
    jackknife and the bootstrap for general stationary observations" (1989). Shares and rates: the
    mean of paired differences. An interval holds what moves within one run, not from run to run.
    """
    first, second = ({r.id: r for r in records if r.measured} for records in (a, b))
    ids = sorted(first.keys() & second.keys(), key=lambda i: (first[i].due_ns, i))
    left, right = [first[i] for i in ids], [second[i] for i in ids]
    n = len(ids)
    factor = max(autocorrelation_factor([LATENCIES["ttft_s"](r) or math.inf for r in side])
                 for side in (left, right))
    block = max(1, math.ceil(n ** (1 / 3)), math.ceil(3 * factor))
    blocks = -(-n // block) if n else 0
    rows: Rows = []
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s")):
        sides = side_of(left, block, key), side_of(right, block, key)
        rows += compare_spread(name, key, sides, blocks, n / factor >= 368)
    rows += compare_spread("ITL", "itl_s", (gaps_side(left, block), gaps_side(right, block)),
                           blocks, n / factor >= 50)
    if slo.any and n:
        met = [(float(slo.met(x)), float(slo.met(y))) for x, y in zip(left, right)]
        shares = sum(x for x, _ in met) / n, sum(y for _, y in met) / n
        # one pair more each way: a share of 100% in both is no proof. Agresti and Min (2005)
        low, high = mean_difference([*met, (0.0, 1.0), (1.0, 0.0)])
        for name, key, scale in (("attainment", "attainment", 1.0),
                                 ("goodput", "goodput_rps", rate_rps)):
            if scale is not None:
                rows.append(diff_row(name, key, (scale * shares[0], scale * shares[1]),
                                     (None, None) if low is None or high is None
                                     else (scale * low, scale * high)))
    ends = [max((r.end_ns or 0 for r in side), default=0) for side in (left, right)]
    if min(ends) > 0:
        slices = [token_slices(side, min(ends)) for side in (a, b)]
        means = [sum(part) / SLICES for part in slices]
        rows.append(diff_row("out tok/s", "output_tok_s", (means[0], means[1]),
                             mean_difference(list(zip(*slices)))))
    return {"paired": n, "block": block, "n_effective": n / factor if n else 0.0, "metrics": rows}


def diff_command(args: Any) -> int:
    """--diff A B: print how two runs of one plan differ, and whether that is shown. Exit code 0."""
    a, b = map(load_run, args.diff)
    same_plan(a, b)
    try:
        slo = slo_from({**a.summary["slo"], **asked_slo(args)})
        report: Dict[str, Any] = {
            "plan": a.plan["hash"], "slo": slo_statement(slo),
            **{name: {"path": one.path, "model": one.summary["target"]["model"],
                      "url": one.summary["target"]["url"],
                      "started": one.summary["environment"]["started"]}
               for name, one in (("a", a), ("b", b))}, "runs": []}
        for run, (one, other) in enumerate(zip(a.summary["runs"], b.summary["runs"])):
            sides = [[r for r in side.records if r.run == run] for side in (a, b)]
            report["runs"].append({
                "label": one["label"], "verdicts": [verdict_text(one), verdict_text(other)],
                **compare(sides[0], sides[1], slo, one["offered_rate_rps"])})
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"--diff: a summary.json is missing, or not one that this loadgen writes: "
                        f"{printable(repr(error), 80)}") from None
    print(as_json(report) if args.json else "\n".join(diff_lines(report)))
    return 0


def diff_lines(report: Facts) -> List[str]:
    """The comparison as text."""
    lines = [f"{name.upper()} = {one['path']}: {one['model']} at {one['url'] or 'no server'}, "
             f"{one['started']}"
             for name, one in (("a", report["a"]), ("b", report["b"]))]
    for run in report["runs"]:
        lines += ["", f"RATE {run['label']}: {run['paired']} requests paired by id; "
                  f"A {run['verdicts'][0]}, B {run['verdicts'][1]}",
                  f"  {'':<11} {'A':>10} {'B':>10} {'B - A':>10}  95% interval"]
        for row in run["metrics"]:
            scale = MS if "_s p" in row["metric"] else 1.0
            a, b, step, low, high = ("-" if row[key] is None else figure(row[key] / scale)
                                     for key in ("a", "b", "difference", "low", "high"))
            edges = "-" if low == "-" else f"{low} to {high}"
            lines.append(f"  {row['name']:<11} {a:>10} {b:>10} {step:>10}  {edges:<20} "
                         f"{row['answer']}")
    return [*lines, "", "latencies in ms, from due; failures count as infinitely late. Of twenty "
            "intervals, one misses by chance",
            "one run each: what changes from run to run (other load, a warm cache) is not in the "
            "intervals; repeat A against A to see it"]


# -- the self-test

TEST_STEP_S, TEST_TOKENS = 0.020, 100
TEST_STREAMS, TEST_RATES = (64, 128, 256, 512, 1024, 2048), (250, 500, 1000, 2000)
TEST_ERROR_S = MS
TEST_SPARE = 1.1  # how far past a proven load a run may go
TEST_PROFILE = {"weights_s": TEST_STEP_S, "sequence_s": 0.0, "prefill_s_per_token": 0.0,
                "max_num_seqs": 8192, "max_num_batched_tokens": 131072, "num_blocks": 131072,
                "prefix_caching": False}
TEST_LIMITS = (("streams", "streams open at once"), ("events_per_s", "output events/s"),
               ("requests_per_s", "requests/s"))


def selftest_path() -> str:
    """Where self-tests are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "loadgen", "selftest.json")


def selftest_key(processes: int) -> str:
    """What a self-test holds for: processor, cores, Python, worker processes."""
    here = environment()
    return (f"{here['cpu'] or here['machine']}, {here['cores']} cores, Python {here['python']}, "
            f"{processes} workers")


def known_selftest(outcome: Outcome) -> Facts:
    """What a self-test on a machine like this found, or nothing."""
    try:
        found = read_json(selftest_path()).get(selftest_key(len(outcome.health)))
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def beyond_selftest(run: Facts, outcome: Outcome, known: Facts) -> List[str]:
    """Why a run's means over its span are past what the self-test found right, for its verdict."""
    records, span_s = outcome.records, run["span_s"] or math.inf
    open_ns = sum(r.last_ns - r.first_ns for r in records
                  if r.first_ns is not None and r.last_ns is not None)
    load = {"streams": open_ns * NS / span_s,
            "events_per_s": sum(r.events for r in records) / span_s,
            "requests_per_s": sum(r.sent_ns is not None for r in records) / span_s}
    return [f"{load[key]:.0f} {what}, past the {known[key]:.0f} at which --selftest found times "
            "right on this machine: more --workers, and --selftest with as many"
            for key, what in TEST_LIMITS
            if isinstance(known.get(key), (int, float)) and load[key] > TEST_SPARE * known[key]]


def stamp_errors(records: Records, truth: Mapping[str, Sequence[int]]
                 ) -> Tuple[List[float], List[float]]:
    """([TTFT error], [ITL error]) [s] of a run against the engine's own, on one clock."""
    first, gap = [], []
    for r in records:
        true = truth.get(f"loadgen-{r.run}-{r.id}", ())
        if not r.ok or len(true) != len(r.event_ns):
            first.append(math.inf)
            continue
        off = [(own - sent) * NS for own, sent in zip(r.event_ns, true)]
        first.append(abs(off[0]) if off else math.inf)
        gap += [abs(b - a) for a, b in zip(off, off[1:])]
    return first, gap


def trial(r: Running, rate_rps: float, number: int, n_out: int) -> Dict[str, Any]:
    """One level of the self-test: a load, its errors, whether they are within bounds."""
    import http.client
    mock = http.client.HTTPConnection(r.target.host, r.target.port, timeout=60)

    def ask(path: str) -> Any:
        mock.request("GET", path)
        return json.loads(mock.getresponse().read())

    ask("/truth/events")
    work = Work(parse_lengths("8"), parse_lengths(str(n_out)), 0, 1)
    e2e_s = (n_out + 1) * TEST_STEP_S
    plan = make_plan(Load(rate_rps, None, 1.0, number, None, None), work, 1, e2e_s)
    outcome = run_plan(plan, 0, r, ONE_A_WORD, e2e_s)
    truth = {row["id"]: row["event_ns"] for row in ask("/truth")["requests"] if "event_ns" in row}
    mock.close()
    first, gap = stamp_errors(outcome.records, truth)
    client = client_summary(outcome)
    steps = sorted((b - a) * NS for times in truth.values() for a, b in zip(times, times[1:]))
    step_s = percentile(steps, 0.5) or TEST_STEP_S
    found = {"requests_per_s": rate_rps, "streams": rate_rps * (n_out - 1) * step_s,
             "events_per_s": rate_rps * n_out, "ttft_error_p99_s": percentile(sorted(first), 0.99),
             "itl_error_p99_s": percentile(sorted(gap), 0.99), "step_s": step_s,
             "cpu_share": client["cpu_share"], "reasons": client_reasons(client)}
    found["engine_kept_up"] = step_s < 1.2 * TEST_STEP_S
    found["right"] = not found["reasons"] and all(
        (found[key] or 0.0) <= TEST_ERROR_S for key in ("ttft_error_p99_s", "itl_error_p99_s"))
    return found


def ladder(levels: Iterable[Tuple[float, int, int]], attempt: Callable[[float, int, int], Any],
           say: Callable[[Any], None]) -> Tuple[List[Any], str]:
    """Levels from the lightest up until one is wrong twice; ([those right], why it ended)."""
    right: List[Any] = []
    for level in levels:
        found = attempt(*level)
        say(found)
        if not found["right"] and found["engine_kept_up"]:
            found = attempt(*level)
            say(found)
        if not found["engine_kept_up"]:
            return right, "the test's own engine could not send faster: the client may bear more"
        if not found["right"]:
            return right, "the client's times were off beyond that"
        right.append(found)
    return right, "the test goes no further"


def selftest_command(args: Any) -> int:
    """--selftest: the client against the engine's own times, at rising load; its exit code."""
    import tempfile
    import types

    def say(found: Any) -> None:
        why = ("right" if found["right"] else "engine too slow" if not found["engine_kept_up"]
               else "; ".join(found["reasons"]) or "WRONG")
        ttft, itl = (optional(found[key] and found[key] / MS, "{:.3f}")
                     for key in ("ttft_error_p99_s", "itl_error_p99_s"))
        if not args.json:
            print(f"{found['streams']:>8.0f} {found['requests_per_s']:>11.0f} "
                  f"{found['events_per_s']:>9.0f} {ttft:>9} {itl:>8} "
                  f"{optional(found['cpu_share'], '{:.0%}'):>5}  {why}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "profile.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(TEST_PROFILE, file)
        mock = MockProcess(types.SimpleNamespace(mock=path, faults=None))
        try:
            own = parse_args([mock.url, "--rate", "1", "--workers", str(args.workers)])
            target = target_of(own, mock.url)._replace(model=MODEL, headers=())
            r = Running(target, wiring_of(own, target), args.workers, Journal(None), interrupt(),
                        1, True)
            raise_descriptors(2 * TEST_STREAMS[-1])
            if not args.json:
                print(" streams  requests/s  events/s  TTFT err  ITL err   CPU   (p99, ms)")
            e2e_s = TEST_TOKENS * TEST_STEP_S
            attempt = functools.partial(trial, r)
            wide, why_wide = ladder([(n / e2e_s, round(1.5 * n), TEST_TOKENS)
                                     for n in TEST_STREAMS], attempt, say)
            quick, why_quick = ladder([(n, 2 * n, 2) for n in TEST_RATES], attempt, say)
        finally:
            mock.stop()
    if r.stop():
        return 130
    return selftest_verdict(args, wide, quick, (why_wide, why_quick))


def selftest_verdict(args: Any, wide: Sequence[Any], quick: Sequence[Any], why: Tuple[str, str]
                     ) -> int:
    """Print and keep what the self-test found; its exit code."""
    if not wide or not quick:
        say("--selftest: this machine measures nothing right to 1 ms, not even the lightest load; "
            "try again when it is quiet")
        return 1
    found = {"streams": wide[-1]["streams"],
             "events_per_s": max(one["events_per_s"] for one in (*wide, *quick)),
             "requests_per_s": max(one["requests_per_s"] for one in (*wide, *quick)),
             "streams_ended": why[0], "requests_ended": why[1],
             "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    path, key = selftest_path(), selftest_key(args.workers)
    try:
        kept = read_json(path) if os.path.exists(path) else {}
        os.makedirs(os.path.dirname(path), exist_ok=True)
        unsaved = save(os.path.dirname(path), os.path.basename(path), {**kept, key: found})
    except (UserError, OSError) as error:
        unsaved = str(error)
    if args.json:
        print(json.dumps({key: found, "levels": [*wide, *quick]}, indent=1))
    else:
        print(f"RIGHT within 1 ms (p99) up to {found['streams']:.0f} streams and "
              f"{found['events_per_s']:.0f} events/s ({why[0]}),\n      and up to "
              f"{found['requests_per_s']:.0f} requests/s ({why[1]}). Later runs past that on this "
              f"machine are CLIENT-LIMITED.")
    if unsaved:
        say(f"--selftest is not kept: {unsaved}")
    return 0


# ---- 12. The command line ----------------------------------------------------------------------


WINDOWS = 5.0  # a point of the search lasts so many times the SLO: misses take time to show
AROUND = 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.3  # --sweep auto: of the knee
IDLE_TIMES, IDLE_SPARE_S, DRAINED_S = 3.0, 0.05, 120.0  # an idle server answers so much slower


def loads_of(args: Any, knee_rps: Optional[float] = None) -> List[Load]:
    """The runs that the flags ask for; knee_rps: those of --sweep auto around it."""
    number = None if args.duration else args.num_requests or (400 if knee_rps else 100)
    if args.trace_read:
        return [Load(args.rate, args.concurrency, 1.0, number, None, None)]
    wanted = args.sweep or [args.rate]
    if knee_rps:
        wanted = [float(f"{knee_rps * part:.3g}") for part in AROUND]
    return [Load(None if rate is None or math.isinf(rate) else rate, args.concurrency,
                 args.burstiness, number, args.duration, args.ramp) for rate in wanted]


def target_of(args: Any, url: str) -> Target:
    """Where requests go, the model not asked for yet."""
    scheme, host, port, path, base_path, chat = parse_url(url, args.endpoint or "completions")
    headers = list(args.header)
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if key and not any(name.lower() == "authorization" for name, _ in headers):
        if not all("!" <= c <= "~" for c in key):
            raise UserError("the API key holds a space, a line break or a character that is no "
                            "ASCII")
        headers.append(("Authorization", f"Bearer {key}"))
    extra = dict(args.extra_body or {})
    for field in SAMPLING:
        value = getattr(args, field)
        if value is not None:
            extra.setdefault(field, int(value) if field == "top_k" else value)
    return Target(scheme, host, port, path, base_path, chat,
                  args.served_model_name or args.model or "", tuple(headers), extra,
                  not args.no_ignore_eos, not (chat or args.prompts or args.turns))


def wiring_of(args: Any, target: Target) -> Wiring:
    """How to reach the target: address, TLS, proxy. Raises UserError on a bad --ca-file."""
    timeouts = Timeouts(args.connect_timeout, args.first_output_timeout, args.stall_timeout,
                        args.timeout)
    if args.simulate is not None:
        return Wiring(socket.AF_INET, None, "", None, b"", timeouts, ())
    context: Any = None
    if target.scheme == "https":
        import ssl
        try:
            context = ssl.create_default_context(cafile=args.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise UserError(f"--ca-file {args.ca_file}: {error}") from None
        if args.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    proxy = proxy_of(target) if args.proxy else None
    place = f"{_bracketed(target.host)}:{target.port}"
    tunnel = request_bytes("CONNECT", place, place, {}, b"") if proxy else b""
    family, address, why = reachable(*(proxy or (target.host, target.port)), args.connect_timeout)
    return Wiring(family, address, why, context, tunnel, timeouts, secrets_of(target))


def secrets_of(target: Target) -> Tuple[str, ...]:
    """What a server may echo and nobody should read: values of headers and of the URL's query."""
    import urllib.parse
    parts = [part for _, value in target.headers for part in (value, value.split(" ")[-1])]
    for pair in target.path.partition("?")[2].split("&"):
        value = pair.partition("=")[2] or pair
        parts += [value, urllib.parse.unquote(value), urllib.parse.unquote_plus(value)]
    return tuple(sorted({part for part in parts if len(part) >= SECRET_MIN}, key=len, reverse=True))


def proxy_of(target: Target) -> Optional[Tuple[str, int]]:
    """The proxy that the environment names for the target, None where it names none."""
    import urllib.parse
    import urllib.request
    if urllib.request.proxy_bypass(target.host):
        return None
    url = urllib.request.getproxies().get(target.scheme)
    if not url:
        return None
    known = "--proxy env: only http://HOST:PORT proxies without a password are known"
    try:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        raise UserError(known) from None
    if host is None or parts.scheme != "http" or parts.username:
        raise UserError(known)
    return host, port


def reachable(host: str, port: int, limit_s: float) -> Tuple[int, Optional[Tuple[Any, ...]], str]:
    """(family, address, why not) of a host: the first of its addresses that answers, or of all."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        return socket.AF_INET, None, f"{host} is no host name"
    except OSError as error:
        return socket.AF_INET, None, f"{host}: {error.strerror or error}"
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.settimeout(min(limit_s, 5.0))
                sock.connect(address)
            return family, address, ""
        except OSError:
            continue
    return found[0][0], found[0][4], ""


MODELS_S, MODELS_BYTES = 15.0, 1 << 20  # limits on asking for the list of models


def first_model(target: Target, wiring: Wiring) -> Tuple[str, str]:
    """(the first model that the server lists, why there is none)."""
    where = f"{target.base_path}/models"
    try:
        status, body = fetch(target, wiring, where)
        if status != "200":
            return "", f"{where} answered {status}"
        model = json.loads(body)["data"][0]["id"]
    except (OSError, WireError) as error:
        return "", wiring.redacted(printable(getattr(error, "strerror", None) or str(error)))
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return "", f"{where} lists no model"
    if not isinstance(model, str) or not model.isprintable() or not 0 < len(model) <= 200:
        return "", f"{where} names its model in a way that cannot be used"
    return model, ""


def fetch(target: Target, wiring: Wiring, path: str, most_s: float = MODELS_S) -> Tuple[str, bytes]:
    """(status, body) of a GET on the target, bounded in time and size. OSError or WireError."""
    end_s = time.monotonic() + min(most_s, 2 * wiring.timeouts.connect_s)
    data = bytearray()
    with socket.socket(wiring.family, socket.SOCK_STREAM) as plain:
        plain.settimeout(min(most_s, wiring.timeouts.connect_s))
        if wiring.address is None:
            raise OSError(wiring.dns_error)
        plain.connect(wiring.address)

        def more(sock: Any) -> bytes:
            sock.settimeout(max(0.01, end_s - time.monotonic()))
            part = bytes(sock.recv(READ_BYTES))
            if time.monotonic() > end_s or len(data) > MODELS_BYTES:
                raise OSError(f"{path} takes too long or is too long")
            return part

        def answer_of(sock: Any, request: bytes) -> Head:
            sock.sendall(request)
            while True:
                head = take_head(data)
                if head is not None and not head.start[1].startswith("1"):
                    return head
                part = more(sock) if head is None else b""
                if head is None and not part:
                    raise WireError("closed before it answered")
                data.extend(part)

        if wiring.proxy_connect:
            status = answer_of(plain, wiring.proxy_connect).start[1]
            if status[:1] != "2":
                raise WireError(f"the proxy answered {status}")
        sock = wiring.tls.wrap_socket(plain, server_hostname=target.host) if wiring.tls else plain
        head = answer_of(sock, request_bytes("GET", path, target.authority, dict(target.headers),
                                             b""))
        framing, body, part = Body(head, True), b"", bytes(data)
        while True:
            body += b"".join(framing.feed(part))
            part = b"" if framing.complete else more(sock)
            if not part:
                return head.start[1], body
            data.extend(part)


def raise_descriptors(needed: int) -> str:
    """Raise RLIMIT_NOFILE as far as allowed; a warning where it stays under what is needed."""
    import resource
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = 1 << 20 if hard == resource.RLIM_INFINITY else min(1 << 20, hard)
    if soft != resource.RLIM_INFINITY and soft < goal:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
            soft = goal
    if soft != resource.RLIM_INFINITY and needed + 32 > soft:
        return (f"only {soft} descriptors (ulimit -n) for up to {needed} connections: requests "
                "past that fail as client_limit")
    return ""


def too_few_ports(needed: int) -> str:
    """A warning where more connections may be needed than there are ephemeral ports."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        return ""
    if needed > high - low:
        return f"only {high - low} local ports for up to {needed} connections to one address"
    return ""


class MockProcess:
    """The built-in engine in a process of its own, on a port of its choice."""

    def __init__(self, args: Any) -> None:
        """Start it and learn its port; UserError where it does not come up."""
        import subprocess
        command = [sys.executable, os.path.abspath(__file__), "--serve", "--port", "0"]
        if args.mock != DEFAULT_PROFILE:
            profile_from(read_json(args.mock))  # its faults are said here, once
            command += ["--mock", args.mock]
        if args.faults:
            command += ["--faults", args.faults]
        environment = {**os.environ, WATCH_STDIN: "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env=environment, start_new_session=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line.strip().isdigit():
            self.stop()
            raise UserError("the built-in engine did not start; see above")
        self.url = f"http://127.0.0.1:{int(line)}"

    def stop(self) -> None:
        """End it: its stdin closes."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        try:
            self.process.wait(timeout=2.0)
        except Exception:  # whatever it is stuck in
            self.process.kill()
            self.process.wait()


WATCH_STDIN = "LOADGEN_WATCH_STDIN"


def serve_command(args: Any) -> int:
    """--serve: the engine alone, until SIGTERM or Ctrl-C."""
    profile = MOCK
    if args.mock not in (None, DEFAULT_PROFILE):
        profile = profile_from(read_json(args.mock))
    host = args.host or "127.0.0.1"
    watched = WATCH_STDIN in os.environ

    def ready(port: int) -> None:
        print(port if watched else f"serving on http://{_bracketed(host)}:{port}", flush=True)

    serve(profile, host, 8000 if args.port is None else args.port,
          parse_faults(args.faults or ""), ready, watched)
    return 0


def read_json(path: str) -> Dict[str, Any]:
    """A JSON object from a file."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return value


def environment() -> Dict[str, Any]:
    """The machine that the client ran on, without its name."""
    import platform
    model = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8",
                                            errors="replace") as file:
        model = next((line.split(":", 1)[1].strip() for line in file
                      if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"python": platform.python_version(), "system": platform.system(),
            "kernel": platform.release(), "machine": platform.machine(), "cpu": model,
            "cores": cores, "load_average": os.getloadavg()[0],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


# What plan.json holds of a summary, for a process that does not live to write one.
TOLD = "target", "slo", "environment", "warmup", "simulated", "step_time", "metrics"


def measure(args: Any, url: str) -> Dict[str, Any]:
    """Every run that the flags ask for, in order; the summary of all."""
    target = target_of(args, url)
    wiring = wiring_of(args, target)
    simulated = simulated_statement(args)
    if simulated:
        target = target._replace(model=target.model or simulated["model"] or MODEL)
    if not target.model:
        model, why = first_model(target, wiring)
        if why:
            say(f"no --model, and {why}; asking for 'default'")
        target = target._replace(model=model or "default")
    work = work_of(args)
    folder = open_folder(args.out)
    journal = Journal(folder)
    running = Running(target, wiring, args.workers, journal, interrupt(),
                      int.from_bytes(os.urandom(4), "little") | 1, not args.no_unique_prompts,
                      Engine(profile_from(simulated["step_time"])) if simulated else None,
                      shard=args.shard or (0, 1))
    warm, running, calibration, expected_s = warmed(args, work, running)
    slo = slo_of(args)
    read, metrics = (metrics_source(args, target, wiring) if not simulated
                     else (None, {"url": None, "engine": "simulated", "why": None}))
    running = running._replace(scraper=Scraper(read) if read else None)
    summary: Dict[str, Any] = {
        "plan": {}, "target": {**target_statement(running.target), **({"url": None} if simulated
                                                                      else {})},
        "slo": slo_statement(slo), "environment": environment(), "warmup": warm,
        "simulated": simulated, "metrics": metrics, "runs": [],
        "step_time": dig(args.deployed, "step_time")}
    if args.deployed:
        save(folder, "deploy.json", args.deployed)
    plans: List[Plan] = []
    unsaved = ""

    def plan_more(loads: Sequence[Load], seed: int, e2e_s: float, tail_s: float = math.inf) -> None:
        nonlocal unsaved
        plans.extend(make_plan(load, work, seed, e2e_s)._replace(tail_s=tail_s) for load in loads)
        most = -(-most_connections(plans, e2e_s) // running.shard[1])
        for warning in filter(None, () if simulated else (raise_descriptors(most),
                                                          too_few_ports(most))):
            say(warning)
        summary["plan"] = plan_statement(args, plans)
        unsaved = save(folder, "plan.json", {
            **summary["plan"], "salt": running.salt,
            "told": {key: summary[key] for key in TOLD if key in summary},
            "runs": [plan_rows(plan) for plan in plans],
            "arrivals": [[None if p.turn else round(p.due_s, 9) for p in turns_of(plan.requests)]
                         for plan in plans]}) or unsaved

    def keep() -> None:
        nonlocal unsaved
        conclude(summary, args)
        unsaved = save_report(folder, summary) or unsaved

    def go(e2e_s: float) -> Outcome:
        nonlocal unsaved, running
        number = len(summary["runs"])
        running = aligned(running, args.start_at, plans, number)
        outcome = run_plan(plans[number], number, running, calibration, e2e_s)
        summary["runs"].append(summarise(outcome, slo, running.target.token_ids and not simulated,
                                         running.unique))
        summary["findings"], summary["advice"] = findings(summary), advice(summary)
        if number == 0:
            summary["setup"] = setup_of(args, server_facts(running.target, wiring)
                                        if summary["target"]["url"] and any(
                                            r.ok for r in outcome.records) else {},
                                        redacted=wiring.redacted)
        unsaved = after_run(args, summary, outcome, running.start_ns) or unsaved
        keep()
        return outcome

    if args.find_goodput:
        search_knee(args, slo, running, expected_s, summary, plan_more, go)
        keep()
    knee_rps = summary["goodput_search"]["rate_rps"] if args.find_goodput else None
    if not args.find_goodput or (args.sweep == [] and knee_rps):
        plan_more(loads_of(args, knee_rps), args.seed, expected_s)
    while len(summary["runs"]) < len(plans) and not (summary["runs"] and running.stop()):
        go(expected_s)
    if running.scraper:
        running.scraper.stop()
    summary["unsaved"] = unsaved_line(journal.failed, unsaved)
    return summary


def search_knee(args: Any, slo: Slo, running: Running, expected_s: float,
                summary: Dict[str, Any], plan_more: Callable[..., None],
                go: Callable[[float], Outcome]) -> None:
    """Find the knee with real or simulated runs; the answer is summary["goodput_search"]."""
    start_rps = float(f"{4 / expected_s:.2g}")
    needed = clean_needed(slo.attainment)
    say(f"searching the knee: about {args.max_requests:,} requests, some ten runs; "
        f"{count(args.max_requests / start_rps)} s at {start_rps:g} req/s, less at higher rates. "
        f"One run alone would need {needed:,} requests without a miss to show "
        f"{slo.attainment:.4g}")
    quiet = running._replace(journal=Journal(None), workers=1)
    e2e_s, idle_s = expected_s, None if running.engine else drained(quiet, args.seed, None)

    def point(rate_rps: float, n: int, number: int) -> Optional[PointResult]:
        nonlocal e2e_s
        if number and not running.engine:
            drained(quiet, args.seed, idle_s)
        ramp_s = e2e_s if args.ramp is None else args.ramp
        load = Load(rate_rps, args.concurrency, args.burstiness, None, n / rate_rps, ramp_s)
        plan_more([load], args.seed + number, e2e_s, 2 * e2e_s)
        result = point_of(go(e2e_s), slo, summary["runs"][-1]["verdict"])
        if result.calm:
            e2e_s = seconds_in(result)
        say(f"{rate_rps:g} req/s: {sum(result.met):,} of {len(result.met):,} met the SLO, "
            f"{result.verdict}")
        return None if running.stop() else result

    summary["goodput_search"] = find_goodput(point, slo.attainment, args.max_requests, start_rps,
                                             args.burstiness, args.seed, WINDOWS * max(
                                                 slo.ttft_s or 0.0, slo.e2e_s or 0.0))._asdict()


def point_of(outcome: Outcome, slo: Slo, verdict: str) -> PointResult:
    """A run as a point of the search."""
    records, start_ns = sorted(outcome.records, key=lambda r: r.due_ns), outcome.start_ns
    samples = [Sample((r.due_ns - start_ns) * NS, None if r.end_ns is None or r.cls == "cancelled"
                      else (r.end_ns - start_ns) * NS, r.measured and slo.met(r), r.measured, r.ok,
                      r.n_in_planned or r.n_in or 1, r.n_out or r.n_out_planned) for r in records]
    ends_ns = max((r.end_ns or r.due_ns for r in records), default=start_ns)
    return PointResult(outcome.plan.load.rate_rps or 0.0, verdict, len(records),
                       (ends_ns - start_ns) * NS, samples)


def drained(r: Running, seed: int, idle_s: Optional[float]) -> Optional[float]:
    """Wait until a short request takes about idle_s again, None: only see; what it took [s]."""
    short = parse_lengths("16")
    end_s = time.perf_counter() + DRAINED_S
    while True:
        outcome, _ = warm_pass([16], 1, Work(short, short, 0, 1), seed, r, ONE_A_WORD)
        record = outcome.records[0]
        took_s = record.since(record.first_ns, record.sent_ns)
        if r.stop() or idle_s is None or time.perf_counter() > end_s or (
                took_s is not None and took_s < IDLE_TIMES * idle_s + IDLE_SPARE_S):
            return took_s
        time.sleep(SWEEP_S)


def simulated_statement(args: Any) -> Optional[Dict[str, Any]]:
    """What stands in for the server: the engine, its constants, whose they are; None if nothing."""
    if args.simulate is None:
        return None
    given = {} if args.simulate == DEFAULT_PROFILE else read_json(args.simulate)
    model = given.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    return {"profile": args.simulate, "step_time": profile_from(given)._asdict(),
            "model": printable(name, 200) if isinstance(name, str) else None}


def warmed(args: Any, work: Work, running: Running
           ) -> Tuple[Dict[str, Any], Running, Calibration, float]:
    """Warm up: (what it showed, whether ids are taken, the calibration, the expected E2E [s])."""
    if not args.warmup:
        return {"requests": 0, "failed": 0}, running, ONE_A_WORD, 1.0
    outcome, calibration, expected_s = warm_up(args.warmup, work, args.seed, running)
    if running.target.token_ids and all(r.cls == "http_status" and r.status in (400, 422)
                                        for r in outcome.records):
        by_words = running._replace(target=running.target._replace(token_ids=False))
        again, words, seconds = warm_up(args.warmup, work, args.seed, by_words)
        if any(r.ok for r in again.records):
            outcome, running, calibration, expected_s = again, by_words, words, seconds
    failed = [r for r in outcome.records if not r.ok]
    if failed:
        say(f"{len(failed)} of {len(outcome.records)} warm-up requests failed: {failed[0].cls}: "
            f"{failed[0].error}")
    return {"requests": len(outcome.records), "failed": len(failed), "expected_e2e_s": expected_s,
            "tokens_per_word": calibration.tokens_per_word, "overhead_tokens": calibration.overhead,
            "calibration": calibration.source}, running, calibration, expected_s


def most_connections(plans: Sequence[Plan], expected_s: float) -> int:
    """Connections that the busiest plan may need at once, by Little's law, doubled."""
    return max(plan.load.concurrency or (
        len(plan.requests) if plan.load.rate_rps is None
        else min(len(plan.requests), math.ceil(2 * plan.load.rate_rps * expected_s) + 16))
        for plan in plans)


def plan_statement(args: Any, plans: Sequence[Plan]) -> Dict[str, Any]:
    """What was planned, for the record and the setup statement."""
    load = plans[0].load
    shape = ("of the trace" if args.trace_read else
             "closed loop" if load.closed else "all at once" if load.rate_rps is None else
             "of each class" if args.classes else arrivals_named(load.burstiness))
    return {"seed": args.seed, "hash": "+".join(plan.hash for plan in plans),
            "rates": [plan.load.rate_rps for plan in plans], "arrival_process": shape,
            "lengths": {"input": args.input_len.text, "output": args.output_len.text},
            "burstiness": None if math.isinf(load.burstiness) else load.burstiness,
            "concurrency": load.concurrency, "num_requests": load.num_requests,
            "duration_s": load.duration_s, "windows_s": [plan.window_s for plan in plans],
            "shared_prefix_len": args.shared_prefix_len, "prefix_groups": args.prefix_groups,
            "unique_prompts": not args.no_unique_prompts, "workers": args.workers,
            "find_goodput": bool(args.find_goodput), "shard": args.shard,
            "workload": args.workload, "traffic": traffic_statement(args)}


def plan_rows(plan: Plan) -> Dict[str, Any]:
    """A plan's requests as columns."""
    rows, work = list(turns_of(plan.requests)), plan.work
    more = [name for name, used in (("cls", work.classes), ("prompt", work.prompts),
                                    ("keys", work.trace), ("session", work.turns),
                                    ("turn", work.turns), ("context", work.turns)) if used]
    return {"hash": plan.hash, **{name: [getattr(r, name) for r in rows]
                                  for name in ("n_in", "n_out", "group", *more)},
            **({"think_s": [r.due_s if r.turn else None for r in rows]} if work.turns else {})}


def target_statement(target: Target) -> Dict[str, Any]:
    """The target without its headers, which may hold a key."""
    return {"url": target.url, "model": target.model, "chat": target.chat,
            "ignore_eos": target.ignore_eos, "token_ids": target.token_ids,
            "extra_body": sorted(target.extra_body)}


def open_folder(path: Optional[str]) -> Optional[str]:
    """The output folder, made if need be; UserError where results of an earlier run are in it."""
    if path is None:
        return None
    try:
        os.makedirs(path, exist_ok=True)
        if os.path.exists(os.path.join(path, "requests.jsonl")):
            raise UserError(f"--out {path} holds an earlier run; name another folder")
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from None
    return path


def save(folder: Optional[str], name: str, value: Any, indent: Optional[int] = 1) -> str:
    """Write a file, JSON or text, whole or not at all; why it could not be, or ''."""
    if folder is None:
        return ""
    path = os.path.realpath(os.path.join(folder, name))
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(0, "it is a folder or a device")
        with open(path + ".part", "w", encoding="utf-8") as file:
            file.write(value if isinstance(value, str) else as_json(value, indent) + "\n")
        os.replace(path + ".part", path)
    except OSError as error:
        return f"{path} could not be written: {error.strerror}"
    return ""


def save_report(folder: Optional[str], summary: Facts) -> str:
    """Write summary.json and report.html; why they could not be, or ''."""
    return unsaved_line(save(folder, "summary.json", summary),
                  folder and save(folder, "report.html", page(summary)))


def unsaved_line(*whys: Optional[str]) -> str:
    """What could not be saved, each reason once, as one line; '' where there is none."""
    return "; ".join(dict.fromkeys(why for why in whys if why))


def exit_code(args: Any, summary: Facts) -> int:
    """0 measured, 1 nothing succeeded, saved or to be trusted, 3 below the gate, 130 Ctrl-C."""
    runs = summary["runs"]
    if any(run["client"]["interrupted"] for run in runs):
        return 130
    if summary["unsaved"] or not any(run["completed"] for run in runs) or any(
            run["verdict"] == "CLIENT-LIMITED" for run in runs):
        return 1
    judged = [*runs, *(part for run in runs for part in (run.get("classes") or {}).values()
                       if any(part["slo"].values()))]
    search = summary.get("goodput_search")
    missed = (search["rate_rps"] is None if search else
              any((part["attainment"] or 0) < args.slo_attainment for part in judged))
    return 3 if args.gate and missed else 0


def run(argv: Sequence[str]) -> int:
    """Do what one command line asks; its exit code."""
    args = parse_args(argv)
    if args.serve:
        return serve_command(args)
    if args.report:
        return report_command(args)
    if args.diff or args.selftest:
        return (diff_command if args.diff else selftest_command)(args)
    open_result(args)
    mock = MockProcess(args) if args.mock is not None else None
    try:
        summary = merge(args) if args.merge else measure(
            args, mock.url if mock else args.url or "http://simulated")
    finally:
        if mock:
            mock.stop()
    print(as_json(summary) if args.json else render(summary))
    if sys.stdout:
        sys.stdout.flush()
    if summary["unsaved"]:
        say(summary["unsaved"])
    code = exit_code(args, summary)
    if code == 130:
        say("interrupted: the report is of what was measured until then")
    return code


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit code: 0 measured, 1 nothing succeeded or CLIENT-LIMITED, 2 bad usage or input,
    3 below the gate, 130 interrupted."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        return run(sys.argv[1:] if argv is None else argv)
    except (UserError, WireError) as error:
        say("error: " + "".join(c if c.isprintable() else " " for c in str(error)))
        return 2
    except MemoryError:
        say("error: the plan does not fit in memory; fewer or shorter requests")
        return 2
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if not sys.stdout or error.errno not in (errno.ENOSPC, errno.EBADF):
            raise
        say(f"error: cannot write the report: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
