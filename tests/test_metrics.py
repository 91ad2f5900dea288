"""loadgen.py: the engine's metrics, read from text, from servers of every kind, and beside a run.

data/transcripts/*_metrics.txt: bodies of GET /metrics of vLLM 0.32 (its lines that matter here) and
of llama.cpp's server; the SGLang and TensorRT-LLM pages follow their collectors' sources.
"""

import array
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import unittest
from typing import Any, Callable, Dict, Iterator, List, Optional
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen
from loadgen import NS
from tests import LOADGEN

TRANSCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "transcripts")
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 7.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.28
sglang:num_retracted_reqs{model_name="m"} 9.0
sglang:num_retracted_requests_total{model_name="m"} 3.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 800.0
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 200.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 300.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 100.0
sglang:spec_accept_rate{model_name="m"} 0.75
sglang:time_to_first_token_seconds_sum{model_name="m"} 2.5
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 4.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 5.0
sglang:time_to_first_token_seconds_count{model_name="m"} 5.0
"""
TRTLLM = """trtllm_num_requests_running{engine_type="undefined",model_name="m"} 4.0
trtllm_num_requests_waiting{model_name="m"} 1.0
trtllm_kv_cache_utilization{model_name="m"} 0.5
trtllm_kv_cache_reused_blocks_total{model_name="m"} 30.0
trtllm_kv_cache_missed_blocks_total{model_name="m"} 70.0
trtllm_spec_decode_num_draft_tokens_total{model_name="m"} 90.0
trtllm_spec_decode_num_accepted_tokens_total{model_name="m"} 60.0
trtllm_time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 2.0
trtllm_time_to_first_token_seconds_count{model_name="m"} 2.0
trtllm_time_to_first_token_seconds_sum{model_name="m"} 0.4
"""


def transcript(name: str) -> str:
    with open(os.path.join(TRANSCRIPTS, f"{name}_metrics.txt"), encoding="utf-8") as file:
        return file.read()


class Text(unittest.TestCase):
    """parse_metrics."""

    def test_accepted_drafts_are_counted_by_position(self) -> None:
        line = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="%s",position="%s"} %s\n'
        row = loadgen.parse_metrics(line % (0, 0, 9) + line % (0, 1, 4) + line % (1, 1, 2)
                                    + line % (0, "x", 1) + line % (0, 2, "NaN"))
        self.assertEqual((row["accepted_at"], row["bad"]), ([9.0, 6.0], 1))

    def test_vllms_page_comes_out_under_our_names(self) -> None:
        row = loadgen.parse_metrics(transcript("vllm"))
        ttft = row.pop("ttft")
        self.assertEqual(row, {
            "engine": "vllm", "bad": 0, "cpu_s": 16.81, "running": 0.0, "waiting": 0.0,
            "kv_usage": 0.0, "preemptions": 0.0, "prefix_hits": 0.0, "prefix_queries": 61.0})
        self.assertEqual((ttft["count"], round(ttft["sum"], 3)), (13.0, 17.687))
        self.assertEqual(ttft["buckets"][2:4], [[0.01, 7.0], [0.02, 11.0]])
        self.assertEqual(ttft["buckets"][-1], [math.inf, 13.0])

    def test_llama_cpp_counts_cached_tokens_apart(self) -> None:
        row = loadgen.parse_metrics(transcript("llamacpp"))
        self.assertEqual((row["prefix_hits"], row["prefix_queries"]), (169.0, 231.0))
        self.assertNotIn("kv_usage", row)
        self.assertNotIn("ttft", row)

    def test_sglangs_retractions_are_its_counter_and_not_its_gauge(self) -> None:
        row = loadgen.parse_metrics(SGLANG)
        self.assertEqual({name: row[name] for name in (
            "running", "waiting", "kv_usage", "preemptions", "prefix_hits", "prefix_queries",
            "spec_rate")}, {"running": 7.0, "waiting": 2.0, "kv_usage": 0.28, "preemptions": 3.0,
                            "prefix_hits": 400.0, "prefix_queries": 1000.0, "spec_rate": 0.75})
        self.assertEqual(row["ttft"]["buckets"], [[0.1, 4.0], [math.inf, 5.0]])

    def test_tensorrt_llm_has_no_preemptions_rather_than_none_counted(self) -> None:
        row = loadgen.parse_metrics(TRTLLM)
        self.assertEqual((row["prefix_hits"], row["prefix_queries"]), (30.0, 100.0))
        self.assertEqual((row["accepted"], row["drafted"]), (60.0, 90.0))
        self.assertNotIn("preemptions", row)
        newer = TRTLLM + ("trtllm_prompt_cached_tokens_total 5\ntrtllm_prompt_tokens_total 50\n")
        row = loadgen.parse_metrics(newer)
        self.assertEqual((row["prefix_hits"], row["prefix_queries"]), (5.0, 50.0))

    def test_older_names_and_underscores_for_colons_are_known(self) -> None:
        row = loadgen.parse_metrics("vllm_num_requests_running 3\nvllm:gpu_cache_usage_perc 0.4\n")
        self.assertEqual((row["running"], row["kv_usage"]), (3.0, 0.4))

    def test_replicas_are_summed_and_the_fullest_pool_counts(self) -> None:
        row = loadgen.parse_metrics("".join(
            f'vllm:num_requests_running{{engine="{i}"}} {i + 1}\n'
            f'vllm:kv_cache_usage_perc{{engine="{i}"}} 0.{i + 1}\n'
            f'vllm:time_to_first_token_seconds_bucket{{engine="{i}",le="+Inf"}} 2\n'
            f'vllm:time_to_first_token_seconds_count{{engine="{i}"}} 2\n' for i in range(3)))
        self.assertEqual((row["running"], row["kv_usage"], row["ttft"]["count"]), (6.0, 0.3, 6.0))
        self.assertEqual(row["ttft"]["buckets"], [[math.inf, 6.0]])

    def test_odd_but_legal_lines_are_read(self) -> None:
        row = loadgen.parse_metrics(
            'vllm:num_requests_running{model_name="a } b, le=\\"9\\" {"} 5 1700000000000\r\n'
            'vllm:num_requests_waiting  +1.5e1\n'
            'vllm:kv_cache_usage_perc{a="b"} NaN\n'
            'vllm:num_preemptions_total{} 3 # {trace_id="x"} 0.5 1700000000\n')
        self.assertEqual(row, {"engine": "vllm", "bad": 0, "running": 5.0, "waiting": 15.0,
                               "preemptions": 3.0})

    def test_lines_that_make_no_sense_are_counted_and_left_out(self) -> None:
        row = loadgen.parse_metrics("vllm:num_requests_running 1\nvllm:num_requests_waiting\n"
                                    "vllm:kv_cache_usage_perc{ lots\nvllm:x many\n")
        self.assertEqual(row, {"engine": "vllm", "bad": 3, "running": 1.0})

    def test_other_pages_hold_no_engine(self) -> None:
        for text in ("", "<html>vllm:</html>", "[]", "process_cpu_seconds_total 5\n",
                     "http_requests_total 3\n", "\0\xff"):
            self.assertEqual(loadgen.parse_metrics(text), {}, text)

    def test_a_page_cut_anywhere_raises_nothing(self) -> None:
        for page in (SGLANG, TRTLLM):
            for end in range(len(page)):
                loadgen.parse_metrics(page[:end])

    def test_quantiles_come_from_inside_a_bucket_or_not_at_all(self) -> None:
        buckets = [(0.1, 50.0), (0.2, 90.0), (0.4, 100.0), (math.inf, 104.0)]
        self.assertAlmostEqual(loadgen.bucket_quantile(buckets, 0.25), 0.052)
        self.assertAlmostEqual(loadgen.bucket_quantile(buckets, 0.75), 0.17)
        self.assertIsNone(loadgen.bucket_quantile(buckets, 0.99))
        self.assertIsNone(loadgen.bucket_quantile([], 0.5))
        self.assertIsNone(loadgen.bucket_quantile([(0.1, 0.0)], 0.5))


def row(t_s: float, **values: Any) -> Dict[str, Any]:
    return {"t_ns": round(t_s / NS), "engine": "vllm", "bad": 0, **values}


def histogram(total_s: float, *counts: float) -> Dict[str, Any]:
    """A TTFT histogram with bounds 0.1, 0.2, ... and +Inf."""
    bounds = [(i + 1) / 10 for i in range(len(counts) - 1)] + [math.inf]
    return {"sum": total_s, "count": counts[-1], "buckets": [list(b) for b in zip(bounds, counts)]}


def outcome(rows: List[Dict[str, Any]], firsts: List[float], ttft: float = 0.15,
            window: Optional[Any] = None) -> loadgen.Outcome:
    """Requests whose first tokens came then, sent ttft before; the run starts at 10 s."""
    load = loadgen.Load(1.0, None, 1.0, None if window else len(firsts), 1.0, 0.0)
    work = loadgen.Work(loadgen.parse_lengths("10"), loadgen.parse_lengths("2"), 0, 1)
    plan = loadgen.Plan(load, work, 0, (), window or (0.0, math.inf), "")
    records = []
    for n, first in enumerate(firsts):
        planned = loadgen.Planned(n, 0.0, 10, 2, 0)
        made = loadgen.Record(planned, 0, round((first - ttft) / NS), True)
        made.sent_ns, made.cls = made.due_ns, "ok"
        made.event_ns = array.array("q", [round(first / NS)])
        made.first_ns = made.last_ns = made.end_ns = round(first / NS)
        records.append(made)
    return loadgen.Outcome(plan, records, [], round(10 / NS), loadgen.ONE_A_WORD, [], rows=rows)


class Beside(unittest.TestCase):
    """server_summary: pure."""

    def test_gauges_are_of_the_run_and_counters_from_before_to_after(self) -> None:
        found = loadgen.server_summary(outcome([
            row(9.5, running=50, waiting=50, kv_usage=0.9, preemptions=4.0, prefix_hits=100.0,
                prefix_queries=1000.0, accepted=0.0, drafted=0.0, cpu_s=1.0),
            row(11, running=2, waiting=0, kv_usage=0.2, preemptions=5.0),
            row(12, running=4, waiting=3, kv_usage=0.4, preemptions=6.0),
            row(14.5, running=0, waiting=0, kv_usage=0.0, preemptions=7.0, prefix_hits=400.0,
                prefix_queries=2000.0, accepted=30.0, drafted=40.0, cpu_s=3.0)], [11, 12, 13]))
        self.assertEqual(found["samples"], 2)
        self.assertEqual(found["running"], {"mean": 3.0, "max": 4})
        self.assertEqual(found["queue_depth"], {"mean": 1.5, "max": 3})
        self.assertAlmostEqual(found["kv_usage"]["mean"], 0.3)
        self.assertEqual((found["preemptions"], found["prefix_hit_rate"],
                          found["spec_acceptance"], found["cpu_share"]), (3.0, 0.3, 0.75, 0.4))
        self.assertEqual(found["series"], [[1.0, 2, 0, 0.2], [2.0, 4, 3, 0.4]])

    def test_what_the_engine_does_not_tell_is_absent(self) -> None:
        found = loadgen.server_summary(outcome([row(9), row(11), row(13)], [12]))
        for name in ("preemptions", "prefix_hit_rate", "spec_acceptance", "beyond_engine_s",
                     "cpu_share"):
            self.assertIsNone(found[name], name)
        self.assertEqual(found["queue_depth"], {"mean": None, "max": None})
        self.assertEqual(found["ttft_s"], {"n": None, "mean": None, "p50": None, "p99": None})
        self.assertIn("preemptions -", loadgen.server_lines(found)[0])
        self.assertIsNone(loadgen.server_summary(outcome([], [12])))
        self.assertIsNone(loadgen.server_summary(outcome([{"t_ns": 0, "why": "gone"}], [12])))

    def test_ttft_of_the_same_first_tokens_is_compared(self) -> None:
        rows = [row(9.5, ttft=histogram(5.0, 10, 10, 10)), row(14, ttft=histogram(5.4, 12, 14, 14))]
        found = loadgen.server_summary(outcome(rows, [11, 12, 13, 13.5], ttft=0.15))
        self.assertEqual(found["ttft_s"]["n"], 4.0)
        self.assertAlmostEqual(found["ttft_s"]["mean"], 0.1)
        self.assertAlmostEqual(found["ttft_s"]["p50"], 0.1)
        self.assertAlmostEqual(found["ttft_s"]["p99"], 0.198)
        self.assertAlmostEqual(found["beyond_engine_s"], 0.05)
        self.assertIn("50.0 ms are network", loadgen.server_lines(found)[1])

    def test_first_tokens_of_others_make_it_not_comparable(self) -> None:
        rows = [row(9.5, ttft=histogram(5.0, 10, 10)), row(14, ttft=histogram(9.0, 50, 50))]
        found = loadgen.server_summary(outcome(rows, [11, 12, 13]))
        self.assertIsNone(found["beyond_engine_s"])
        self.assertIn("it counted 40 first tokens and we 3", loadgen.server_lines(found)[1])

    def test_a_window_is_compared_by_what_came_between_the_readings(self) -> None:
        rows = [row(t, ttft=histogram(0.1 * n, n, n)) for t, n in
                ((9.5, 0), (11.5, 1), (12.5, 2), (13.5, 3), (14.5, 4))]
        found = loadgen.server_summary(outcome(rows, [11, 12, 13, 14], window=(2.0, 3.4)))
        self.assertEqual((found["samples"], found["ttft_s"]["n"], found["client_ttft_s"]["n"]),
                         (1, 2.0, 2))

    def test_counters_that_went_down_are_absent_and_said(self) -> None:
        found = loadgen.server_summary(outcome([row(9, preemptions=9.0), row(13, preemptions=1.0)],
                                               [12]))
        self.assertIsNone(found["preemptions"])
        self.assertIn("went down", found["warnings"][0])

    def test_lost_and_broken_readings_are_one_warning_each(self) -> None:
        rows = [row(9, bad=2), {"t_ns": 1, "why": "timed out"}, {"t_ns": 2, "why": "x"}, row(13)]
        found = loadgen.server_summary(outcome(rows, [12]))
        self.assertEqual(found["warnings"], [
            "2 of 4 readings of the metrics failed: timed out",
            "2 lines of the metrics make no sense and were left out"])

    def test_the_series_is_bounded(self) -> None:
        rows = [row(10 + t, running=t) for t in range(5000)]
        found = loadgen.server_summary(outcome(rows, [6000]))
        self.assertLessEqual(len(found["series"]), loadgen.SERIES_MAX)
        self.assertEqual(found["samples"], 5000)
        self.assertGreater(found["series"][-1][0], 4980)


class Process(unittest.TestCase):
    """The fork that reads."""

    def setUp(self) -> None:
        self.number = 0

    def read(self) -> Dict[str, Any]:
        self.number += 1  # in the fork
        return {"number": self.number}

    def test_it_hands_over_what_it_has_and_reads_once_more(self) -> None:
        scraper = loadgen.Scraper(self.read)
        try:
            self.assertEqual(scraper.take(), [{"number": 1}])
            self.assertEqual(scraper.take(), [{"number": 2}])
        finally:
            scraper.stop()
        with self.assertRaises(ProcessLookupError):
            os.kill(scraper.pid, 0)

    def test_readings_go_on_by_themselves_and_stay_bounded(self) -> None:
        with mock.patch.multiple(loadgen, SCRAPE_S=0.0005, ROWS_MAX=16):
            scraper = loadgen.Scraper(self.read)
            try:
                scraper.take()
                time.sleep(0.3)
                rows = scraper.take()
            finally:
                scraper.stop()
        self.assertLessEqual(len(rows), 17)
        self.assertGreater(rows[-1]["number"], 20)

    def test_a_reader_that_dies_leaves_a_run_without_readings(self) -> None:
        def die() -> Dict[str, Any]:
            raise MemoryError
        scraper = loadgen.Scraper(die)
        self.assertEqual([scraper.take(), scraper.take()], [[], []])
        scraper.stop()


@contextlib.contextmanager
def site(answer: Callable[[str, Dict[str, str]], bytes]) -> Iterator[int]:
    """A server whose replies to a path and headers are answer's bytes, then closed; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                conn, _ = listener.accept()
                with conn:
                    data = bytearray()
                    head = None
                    while head is None:
                        part = conn.recv(65536)
                        if not part:
                            break
                        data += part
                        head = loadgen.take_head(data)
                    if head is not None:
                        conn.sendall(answer(head.start[1], head.headers))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def reply(body: str, status: str = "200 OK", more: str = "") -> bytes:
    return (f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n{body}").encode()


def source(url: str, metrics_url: Optional[str] = None, no_metrics: bool = False) -> Any:
    """metrics_source for a target with a key."""
    more = ["--metrics-url", metrics_url] if metrics_url else []
    args = loadgen.parse_args([
        url, "--rate", "1", "--model", "m", "--api-key", "sk-secret", "--connect-timeout", "1",
        *more, *(["--no-metrics"] if no_metrics else [])])
    target = loadgen.target_of(args, url)
    return loadgen.metrics_source(args, target, loadgen.wiring_of(args, target))


class Sources(unittest.TestCase):
    """Where the metrics are looked for, and what is sent there."""

    def test_they_are_found_beside_the_api(self) -> None:
        for base, page in (("", "/metrics"), ("/v1", "/metrics"), ("/llm/v1", "/llm/metrics"),
                           ("/llm/v1", "/metrics"), ("", "/prometheus/metrics")):
            def answer(path: str, _: Any, page: str = page) -> bytes:
                return reply(TRTLLM) if path == page else reply("[]")
            with self.subTest(base + page), site(answer) as port:
                read, told = source(f"http://127.0.0.1:{port}{base}")
                self.assertEqual(told, {"url": f"http://127.0.0.1:{port}{page}",
                                        "engine": "trtllm", "why": None})
                self.assertEqual(read()["running"], 4.0)

    def test_where_there_are_none_it_is_said_why(self) -> None:
        for answer, why in ((lambda path, _: reply("", "404 Not Found"), "/metrics answered 404"),
                            (lambda path, _: reply("{}"), "--enable-metrics"),
                            (lambda path, _: b"\0\0\r\n\r\n", "not an HTTP/1 start line"),
                            (lambda path, _: reply("Bearer sk-secret", "401 sk-secret"),
                             "/metrics answered 401")):
            with site(answer) as port:
                read, told = source(f"http://127.0.0.1:{port}")
            self.assertIsNone(read)
            self.assertIn(why, told["why"])
            self.assertNotIn("sk-secret", json.dumps(told))
        self.assertEqual(source("http://127.0.0.1:1", no_metrics=True)[1]["why"], "--no-metrics")

    def test_the_key_goes_to_the_targets_host_alone(self) -> None:
        seen: List[Optional[str]] = []

        def answer(_: str, headers: Dict[str, str]) -> bytes:
            seen.append(headers.get("authorization"))
            return reply(SGLANG)

        with site(answer) as port:
            for url, other in ((f"http://127.0.0.1:{port}", None),
                               ("http://127.0.0.1:9", f"127.0.0.1:{port}/metrics?a=b"),
                               ("http://127.0.0.1:9", f"http://localhost:{port}"),
                               ("https://127.0.0.1:9", f"http://127.0.0.1:{port}")):
                _, told = source(url, other)
                self.assertEqual(told["engine"], "sglang")
                self.assertNotIn("a=b", told["url"])
        key = "Bearer sk-secret"
        self.assertEqual(seen, [key, key, None, None])

    def test_redirects_are_not_followed(self) -> None:
        visits: List[str] = []
        with site(lambda path, _: visits.append(path) or reply(SGLANG)) as other, site(
                lambda path, _: reply("", "302 Found", f"Location: http://127.0.0.1:{other}/\r\n")
                ) as port:
            read, told = source(f"http://127.0.0.1:{port}")
        self.assertIsNone(read)
        self.assertEqual((visits, told["why"]), ([], "/metrics answered 302"))

    def test_a_page_without_end_is_given_up(self) -> None:
        with mock.patch.object(loadgen, "MODELS_BYTES", 10_000), site(
                lambda path, _: reply("vllm:x 1\n" * 100_000)) as port:
            read, told = source(f"http://127.0.0.1:{port}")
        self.assertIsNone(read)
        self.assertIn("too long", told["why"])

    def test_a_reading_that_fails_later_is_a_row_that_says_so(self) -> None:
        with site(lambda path, _: reply(SGLANG)) as port:
            read, _ = source(f"http://127.0.0.1:{port}")
            self.assertEqual(read()["engine"], "sglang")
        self.assertEqual(set(read()), {"t_ns", "why"})


class Mock(unittest.TestCase):
    """The built-in engine's own page."""

    def metrics(self, **fields: Any) -> Dict[str, Any]:
        server = loadgen.MockServer(loadgen.profile_from(fields))
        server.engine.submit(1, 20, 8)
        while server.engine.jobs:
            server.engine.step()
        server.observe("time_to_first_token", 30_000_000)
        page = server.metrics()
        server.listener.close()
        server.selector.close()
        return loadgen.parse_metrics(page)

    def test_it_has_all_that_findings_need(self) -> None:
        row = self.metrics()
        self.assertEqual(set(row), {"engine", "bad", "cpu_s", "running", "waiting", "kv_usage",
                                    "preemptions", "prefix_hits", "prefix_queries", "ttft"})
        self.assertEqual((row["engine"], row["prefix_queries"]), ("vllm", 20.0))
        self.assertEqual((row["ttft"]["count"], round(row["ttft"]["sum"], 9)), (1.0, 0.03))

    def test_drafts_are_counted_where_the_profile_has_them(self) -> None:
        row = self.metrics(spec_tokens=4, spec_acceptance=0.75)
        self.assertAlmostEqual(row["accepted"] / row["drafted"], 0.75)
        steps = row["drafted"] / 4
        self.assertAlmostEqual(steps * (1 + 4 * 0.75), 8.0)  # the tokens that came out
        with self.assertRaises(loadgen.UserError):
            loadgen.profile_from({"spec_acceptance": 1.5})


class Commands(unittest.TestCase):
    """Whole command lines."""

    def run_it(self, *argv: str) -> Any:
        return subprocess.run([*LOADGEN, *argv], capture_output=True, text=True, timeout=60,
                              check=False)

    def test_a_run_holds_what_the_mock_says_with_one_worker_and_with_two(self) -> None:
        for workers in ("1", "2"):
            with self.subTest(workers):
                done = self.run_it("--mock", "--rate", "40", "--num-requests", "40", "--json",
                                   "--output-len", "8", "--input-len", "20", "--workers", workers)
                summary = json.loads(done.stdout)
                server = summary["runs"][0]["server"]
                self.assertEqual((summary["metrics"]["engine"], server["engine"]), ("vllm",) * 2)
                self.assertEqual((server["ttft_s"]["n"], server["client_ttft_s"]["n"]), (40, 40))
                self.assertGreater(server["beyond_engine_s"], -0.001)
                self.assertEqual((server["preemptions"], server["warnings"]), (0, []))
                self.assertEqual(len(server["series"]), server["samples"])

    def test_no_metrics_leaves_the_key_null(self) -> None:
        done = self.run_it("--mock", "--rate", "100", "--num-requests", "5", "--output-len", "2",
                           "--json", "--no-metrics")
        summary = json.loads(done.stdout)
        self.assertIsNone(summary["runs"][0]["server"])
        self.assertEqual(summary["metrics"]["why"], "--no-metrics")

    def test_contradictions_and_bad_urls_are_one_line(self) -> None:
        for argv, said in ((("--metrics-url", "http://h", "--no-metrics"), "contradict"),
                           (("--metrics-url", "ftp://h/metrics"), "the URL must be"),
                           (("--metrics-url", "http://u:p@h/metrics"), "must not hold")):
            done = self.run_it("--mock", "--rate", "1", *argv)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertIn(said, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1)


if __name__ == "__main__":
    unittest.main()
