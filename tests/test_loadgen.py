"""loadgen.py: the plan, the prompts, the statistics, the flags; no sockets, no sleeping."""

import array
import contextlib
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import unittest
from typing import Any, List, Optional

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen

TOP = os.path.dirname(os.path.abspath(loadgen.__file__))
S = 1_000_000_000  # ns


def load(**changes: Any) -> loadgen.Load:
    base = {"rate_rps": 10.0, "concurrency": None, "burstiness": 1.0, "num_requests": 100,
            "duration_s": None, "ramp_s": None}
    return loadgen.Load(**{**base, **changes})


def work(n_in: str = "200", n_out: str = "100", shared: int = 0, groups: int = 1) -> loadgen.Work:
    return loadgen.Work(loadgen.parse_lengths(n_in), loadgen.parse_lengths(n_out), shared, groups)


def gaps_of(shape: float, n: int, rate: float = 10.0, seed: int = 3) -> List[float]:
    return list(itertools.islice(loadgen.gaps(load(rate_rps=rate, burstiness=shape), seed), n))


def record(due: float, ttft: Optional[float], tokens: int = 10, itl: float = 0.02,
           cls: str = "ok", number: int = 0, lag: float = 0.0) -> loadgen.Record:
    """A finished request, times in seconds from 0."""
    made = loadgen.Record(loadgen.Planned(number, due, 200, tokens, 0), 0, round(due * S), True)
    made.cls, made.error = cls, "" if cls == "ok" else "why"
    made.sent_ns = round((due + lag) * S)
    if ttft is not None:
        made.event_ns = array.array("q", (round((due + ttft + i * itl) * S)
                                          for i in range(tokens)))
        made.first_ns, made.last_ns = made.event_ns[0], made.event_ns[-1]
        made.answer_ns, made.events = made.first_ns, tokens
    made.n_out, made.n_in = tokens, 200
    made.end_ns = made.last_ns or round((due + 1) * S)
    return made


def summary_of(records: List[loadgen.Record], slo: Any = None, plan: Any = None,
               health: Any = None) -> Any:
    plan = plan or loadgen.make_plan(load(num_requests=len(records)), work(), 0, 1.0)
    health = health or loadgen.ClientHealth()
    outcome = loadgen.Outcome(plan, records, [health], 0, loadgen.ONE_A_WORD, [])
    return loadgen.summarise(outcome, slo or loadgen.Slo(0.3, 0.025, None, 0.99), True)


class Arrivals(unittest.TestCase):
    def test_poisson_gaps_pass_kolmogorov_smirnov(self) -> None:
        found = sorted(gaps_of(1.0, 20_000))
        worst = max(max(abs(1 - math.exp(-10 * x) - i / 20_000),
                        abs(1 - math.exp(-10 * x) - (i + 1) / 20_000))
                    for i, x in enumerate(found))
        self.assertLess(worst, 1.63 / math.sqrt(20_000))  # 1% level

    def test_the_index_of_dispersion_is_one_for_any_number_of_workers(self) -> None:
        plan = loadgen.make_plan(load(rate_rps=200.0, num_requests=60_000), work(), 5, 1.0)
        for shards in (1, 8):
            dues = sorted(r.due_s for n in range(shards) for r in plan.requests[n::shards])
            self.assertEqual(dues, [r.due_s for r in plan.requests])
            for width_s in (1.0, 5.0, 20.0):
                counts = [0] * int(dues[-1] / width_s)
                for due_s in dues:
                    if due_s < len(counts) * width_s:
                        counts[int(due_s / width_s)] += 1
                mean = sum(counts) / len(counts)
                variance = sum((c - mean) ** 2 for c in counts) / (len(counts) - 1)
                bound = 4 * math.sqrt(2 / (len(counts) - 1))
                self.assertLess(abs(variance / mean - 1), bound, (shards, width_s))

    def test_gamma_gaps_have_the_squared_variation_of_their_shape(self) -> None:
        for shape in (0.25, 0.5, 1.0, 4.0):
            found = gaps_of(shape, 100_000)
            mean = sum(found) / len(found)
            variance = sum((x - mean) ** 2 for x in found) / len(found)
            self.assertAlmostEqual(mean, 0.1, 2)
            self.assertLess(abs(variance / mean**2 * shape - 1), 0.06, shape)

    def test_constant_gaps_do_not_vary(self) -> None:
        self.assertEqual(set(gaps_of(math.inf, 100)), {0.1})

    def test_times_are_absolute_and_the_rate_is_kept(self) -> None:
        plan = loadgen.make_plan(load(rate_rps=200.0, num_requests=10_000), work(), 1, 1.0)
        self.assertLess(abs(plan.requests[-1].due_s - 50.0), 2.0)


class Plans(unittest.TestCase):
    def test_the_plan_is_pure(self) -> None:
        arguments = (load(), work("lognormal:mean=500,cv=0.5", "uniform:1..50"), 7, 1.0)
        self.assertEqual(loadgen.make_plan(*arguments).requests,
                         loadgen.make_plan(*arguments).requests)
        other = loadgen.make_plan(*arguments[:2], 8, 1.0)
        self.assertNotEqual(loadgen.make_plan(*arguments).hash, other.hash)

    def test_lengths_do_not_disturb_arrivals(self) -> None:
        one = loadgen.make_plan(load(), work(), 7, 1.0)
        two = loadgen.make_plan(load(), work("uniform:1..9"), 7, 1.0)
        self.assertEqual([r.due_s for r in one.requests], [r.due_s for r in two.requests])

    def test_window_mode_measures_after_the_ramp_and_goes_on_past_the_window(self) -> None:
        plan = loadgen.make_plan(load(num_requests=None, duration_s=10.0), work(), 0, 2.0)
        self.assertEqual(plan.window_s, (2.0, 12.0))
        self.assertFalse(plan.measured(1.99))
        self.assertTrue(plan.measured(2.0))
        self.assertFalse(plan.measured(12.0))
        self.assertGreater(plan.requests[-1].due_s, 17)

    def test_requests_beyond_those_prepared_go_on_where_they_ended(self) -> None:
        plan = loadgen.make_plan(load(num_requests=None, duration_s=1.0), work(), 0, 0.1)
        longer = loadgen.make_plan(load(num_requests=400), work(), 0, 0.1)
        for shards in (1, 3):
            for shard in range(shards):
                source = loadgen.Source(plan, 0, lambda p: b"", shard, shards)
                found = [out.planned for out in source.ready]
                found += [out.planned for out in itertools.islice(source.more, 20)]
                self.assertEqual(found, list(longer.requests[shard::shards][:len(found)]))


class PromptsOfNTokens(unittest.TestCase):
    def prompts(self, salt: int = 9, unique: bool = True,
                calibration: Any = loadgen.ONE_A_WORD) -> Any:
        return loadgen.Prompts(0, salt, unique, calibration)

    def planned(self, number: int = 0, n_in: int = 50, group: int = 0) -> Any:
        return loadgen.Planned(number, 0.0, n_in, 10, group)

    def test_the_words_are_256_and_differ_but_not_in_length(self) -> None:
        self.assertEqual((len(loadgen.WORDS), len(set(loadgen.WORDS))), (256, 256))
        self.assertEqual({len(word) for word in loadgen.WORDS}, {4})

    def test_token_ids_are_exactly_as_many_as_planned(self) -> None:
        for n in (1, 2, 5, 50, 3000):
            self.assertEqual(len(self.prompts().token_ids(self.planned(n_in=n), 0)), n)

    def test_every_prompt_begins_differently_in_every_run(self) -> None:
        seen = set()
        for salt in (1, 2, 3):
            for number in range(300):
                ids = self.prompts(salt).token_ids(self.planned(number), 0)
                seen.add(tuple(ids[:8]))
        self.assertEqual(len(seen), 900)

    def test_the_nonce_comes_right_after_the_shared_prefix(self) -> None:
        one, two = (self.prompts().token_ids(self.planned(n), 20) for n in (0, 1))
        self.assertEqual(one[:20], two[:20])
        self.assertNotEqual(one[20], two[20])
        other = self.prompts().token_ids(self.planned(0, group=1), 20)
        self.assertNotEqual(one[:20], other[:20])

    def test_without_the_nonce_runs_repeat(self) -> None:
        one, two = (self.prompts(salt, unique=False).text(self.planned(), 0) for salt in (1, 2))
        self.assertEqual(one, two)

    def test_a_calibrated_prompt_is_within_two_tokens_of_the_plan(self) -> None:
        points = [(words, round(11 + 1.3 * words)) for words in (200, 100, 200, 100)]
        calibration = loadgen.calibrate(points)
        for n in (20, 57, 200, 1000):
            words = calibration.words_for(n)
            self.assertLessEqual(abs(11 + 1.3 * words - n), max(2, 0.02 * n))

    def test_one_length_calibrates_nothing(self) -> None:
        self.assertIsNone(loadgen.calibrate([(100, 120), (100, 120)]))

    def test_bodies_are_what_the_endpoint_takes(self) -> None:
        target = loadgen.Target("http", "h", 80, "/v1/completions", "/v1", False, "m", (), {
            "top_k": 1, "ignore_eos": None}, True, True)
        body = json.loads(loadgen.body_of(target, self.prompts(), self.planned(), 0))
        self.assertEqual(len(body["prompt"]), 50)
        self.assertNotIn("ignore_eos", body)
        self.assertEqual((body["top_k"], body["max_tokens"], body["stream"]), (1, 10, True))
        chat = json.loads(loadgen.body_of(target._replace(chat=True), self.prompts(),
                                          self.planned(), 0))
        self.assertEqual(len(chat["messages"][0]["content"].split()), 50)


class Urls(unittest.TestCase):
    def test_with_or_without_v1_it_is_one_final_url(self) -> None:
        for text in ("http://h", "http://h/", "http://h/v1", "http://h/v1/",
                     "http://h/v1/chat/completions", "h:80"):
            found = loadgen.parse_url(text, "chat")
            self.assertEqual(found, ("http", "h", 80, "/v1/chat/completions", "/v1", True), text)
        self.assertEqual(loadgen.parse_url("https://h/openai/v1", "completions")[2:5],
                         (443, "/openai/v1/completions", "/openai/v1"))
        self.assertEqual(loadgen.parse_url("http://[::1]:9/v1", "chat")[1:3], ("::1", 9))

    def test_what_is_no_url_is_refused(self) -> None:
        for text in ("ftp://h", "http://", "http://h:x", "http://u:p@h"):
            with self.assertRaises(loadgen.UserError):
                loadgen.parse_url(text, "chat")


class Percentiles(unittest.TestCase):
    def test_linear_interpolation(self) -> None:
        self.assertAlmostEqual(loadgen.percentile([10, 20, 30], 0.99), 29.8)
        self.assertEqual(loadgen.percentile([10, 20, 30], 0.5), 20)
        self.assertIsNone(loadgen.percentile([], 0.5))

    def test_a_failure_is_infinitely_late(self) -> None:
        values = [1.0] * 98 + [math.inf] * 2
        self.assertEqual(loadgen.percentile(values, 0.5), 1.0)
        self.assertEqual(loadgen.percentile(values, 0.99), math.inf)

    def test_p99_is_bounded_from_368_independent_requests_on(self) -> None:
        self.assertIsNone(loadgen.binomial_ranks(367, 0.99)[1])
        self.assertEqual(loadgen.binomial_ranks(368, 0.99)[1], 368)

    def test_intervals_hold_the_truth_as_often_as_they_say(self) -> None:
        rng, held = random.Random(1), 0
        truth = -math.log(0.1)
        for _ in range(400):
            values = sorted(rng.expovariate(1) for _ in range(200))
            low, high = loadgen.interval(values, 0.9, 1.0)
            held += low <= truth <= high
        self.assertGreater(held, 368)  # 95% of 400 less three sigma

    def test_autocorrelation_shrinks_the_sample(self) -> None:
        rng = random.Random(2)
        value, walk = 0.0, []
        for _ in range(4000):
            value = 0.9 * value + rng.gauss(0, 1)
            walk.append(value)
        factor = loadgen.autocorrelation_factor(walk)
        self.assertTrue(12 < factor < 30, factor)  # (1 + .9) / (1 - .9) = 19 in theory
        independent = [rng.gauss(0, 1) for _ in range(4000)]
        self.assertLess(loadgen.autocorrelation_factor(independent), 1.2)

    def test_itl_percentiles_are_those_of_the_pooled_gaps(self) -> None:
        rng = random.Random(3)
        records = []
        for number in range(50):
            made = record(number * 0.1, 0.05, 20)
            stamps, at = array.array("q"), made.first_ns
            for _ in range(20):
                stamps.append(at)
                at += rng.randrange(5, 50) * 1_000_000
            made.event_ns, made.events = stamps, 20
            records.append(made)
        found = loadgen.itl_spread(records)
        pooled = sorted((b - a) / S for r in records for a, b in zip(r.event_ns, r.event_ns[1:]))
        self.assertEqual(found["n"], 950)
        for key, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            self.assertAlmostEqual(found[key], loadgen.percentile(pooled, share), 6)
        self.assertAlmostEqual(found["max"], pooled[-1], 6)


class Summaries(unittest.TestCase):
    def test_goodput_is_the_offered_rate_times_attainment(self) -> None:
        records = [record(i * 0.5, 0.1 if i % 4 else 0.4, number=i) for i in range(101)]
        found = summary_of(records)
        self.assertAlmostEqual(found["offered_rate_rps"], 2.0)
        self.assertAlmostEqual(found["attainment"], 75 / 101)
        self.assertAlmostEqual(found["goodput_rps"], 2.0 * 75 / 101)

    def test_failures_are_misses_and_classes_sum_to_offered(self) -> None:
        records = [record(i, 0.1, number=i) for i in range(8)]
        records += [record(8 + i, None, cls=c, number=8 + i)
                    for i, c in enumerate(("refused", "stalled", "refused"))]
        found = summary_of(records)
        self.assertEqual(found["failures"], {"refused": 2, "stalled": 1})
        self.assertEqual(found["offered"], found["completed"] + sum(found["failures"].values()))
        self.assertAlmostEqual(found["attainment"], 8 / 11)
        self.assertEqual(found["ttft_s"]["p99"], math.inf)
        self.assertAlmostEqual(found["ttft_s"]["successes"]["p99"], 0.1)

    def test_nothing_succeeding_still_gives_a_summary_that_json_holds(self) -> None:
        found = summary_of([record(i, None, cls="refused", number=i) for i in range(20)])
        text = json.dumps(loadgen.null_infinities(found), allow_nan=False)
        self.assertEqual(json.loads(text)["completed"], 0)
        self.assertIsNone(found["tpot_s"]["mean"])

    def test_tpot_is_absent_with_one_token(self) -> None:
        one = record(0, 0.1, 1)
        self.assertIsNone(one.tpot_s)
        self.assertIsNone(one.row(0)["tpot_s"])

    def test_a_success_without_visible_output_is_a_miss(self) -> None:
        silent = record(0, None)
        self.assertFalse(loadgen.Slo(1.0, None, None, 0.99).met(silent))

    def test_latency_runs_from_due_and_also_from_sent(self) -> None:
        late = record(1.0, 0.5, lag=0.2)
        row = late.row(0)
        self.assertAlmostEqual(row["ttft_s"], 0.5)
        self.assertAlmostEqual(row["ttft_from_sent_s"], 0.3)

    def test_little_holds(self) -> None:
        rng, due, records = random.Random(4), 0.0, []
        for i in range(2000):
            due += rng.expovariate(10)
            records.append(record(due, 0.1, 10, 0.02, number=i))
        found = summary_of(records)
        self.assertAlmostEqual(found["in_flight_mean"] / found["little_rps_x_s"], 1, 2)
        self.assertAlmostEqual(found["in_flight_mean"], 2.8, 0)

    def test_a_cache_hit_on_unique_prompts_is_said(self) -> None:
        records = [record(i, 0.1, number=i) for i in range(5)]
        for made in records:
            made.cached_tokens = 100
        self.assertIn("prefix cache", " ".join(summary_of(records)["warnings"]))

    def test_chunks_of_many_tokens_are_called_so(self) -> None:
        records = [record(i, 0.1, 10, number=i) for i in range(5)]
        for made in records:
            made.n_out = 40
        self.assertTrue(summary_of(records)["itl_is_chunk_gap"])


class TheSpan(unittest.TestCase):
    def test_a_stream_that_hangs_until_its_timeout_does_not_stretch_it(self) -> None:
        records = [record(i, 0.5, number=i) for i in range(10)]
        whole = summary_of(records)
        hung = record(5.5, 0.1, number=10, cls="stalled")
        hung.end_ns = round(66 * S)
        found = summary_of([*records, hung])
        self.assertEqual(found["span_s"], whole["span_s"])
        self.assertEqual(found["achieved_rps"], whole["achieved_rps"])
        self.assertAlmostEqual(found["output_tok_s"], whole["output_tok_s"] * 11 / 10)
        self.assertAlmostEqual(found["in_flight_mean"], found["little_rps_x_s"])
        late = record(20, None, number=11, cls="refused")  # what is due is in it
        self.assertEqual(summary_of([*records, hung, late])["span_s"], 20)
        self.assertEqual(summary_of([late])["span_s"], 1)  # no output at all: to the last end


class Verdicts(unittest.TestCase):
    def test_a_steady_run_is_valid(self) -> None:
        rng, due, records = random.Random(5), 0.0, []
        for i in range(400):
            due += rng.expovariate(20)
            records.append(record(due, 0.05 + 0.02 * rng.random(), 100, 0.02, number=i))
        self.assertEqual(summary_of(records)["verdict"], "VALID")

    def test_a_growing_queue_is_unstable(self) -> None:
        records = [record(i * 0.05, 0.05 + 0.03 * i, number=i) for i in range(120)]
        found = summary_of(records)
        self.assertEqual(found["verdict"], "UNSTABLE")
        self.assertIn("queue grows", found["reasons"][0])

    def test_streams_that_hang_are_no_queue(self) -> None:
        records = []
        for i in range(120):
            records.append(record(i * 0.125, 0.05, number=i))
            if i % 10 == 0:  # no output for a minute
                records[-1].cls, records[-1].end_ns = "stalled", records[-1].due_ns + 60 * 10**9
        found = summary_of(records)
        self.assertEqual((found["verdict"], found["failures"]), ("VALID", {"stalled": 12}))

    def test_late_sending_is_the_clients_fault(self) -> None:
        health = loadgen.ClientHealth()
        health.lag_s.extend([0.001] * 90 + [0.05] * 10)
        health.coalesced, health.events = 50, 100
        found = summary_of([record(i, 0.1, number=i) for i in range(100)], health=health)
        self.assertEqual(found["verdict"], "CLIENT-LIMITED")
        self.assertIn("send lag", found["reasons"][0])
        self.assertIn("shared a read", found["reasons"][1])

    def test_bundled_reads_alone_are_the_servers(self) -> None:
        health = loadgen.ClientHealth()
        health.lag_s.extend([0.0001] * 100)
        health.coalesced, health.events = 50, 100
        found = summary_of([record(i, 0.1, number=i) for i in range(100)], health=health)
        self.assertEqual(found["verdict"], "VALID")
        self.assertIn("bundled", " ".join(found["warnings"]))


class Memory(unittest.TestCase):
    @unittest.skipUnless(os.path.exists("/proc/self/status"), "the kernel's own figure")
    def test_that_the_parent_held_is_not_the_childs(self) -> None:
        held = bytearray(b"x") * 150_000_000
        own = "import sys; sys.path.insert(0, sys.argv[1]); import loadgen; " \
              "print(loadgen.peak_rss_bytes())"
        found = subprocess.run([sys.executable, "-c", own, TOP], capture_output=True, check=True)
        self.assertTrue(5e6 < int(found.stdout) < 120e6 < len(held), found.stdout)


class Rendering(unittest.TestCase):
    def test_the_usual_columns_come_first_and_in_order(self) -> None:
        heads = [column.head for column in loadgen.TABLE[:7]]
        self.assertEqual(heads, ["rate", "out tok/s", "goodput", "ttft p50", "ttft p99",
                                 "tpot p50", "tpot p99"])

    def test_an_unbounded_p99_and_a_growing_queue_are_marked(self) -> None:
        records = [record(i * 0.05, 0.05 + 0.03 * i, number=i) for i in range(120)]
        lines = loadgen.render_table([summary_of(records)])
        self.assertRegex(lines[1], r"\d\.\d\d\*")
        self.assertRegex(lines[1], r"\d~")

    def test_nothing_that_failed_is_shown_as_zero(self) -> None:
        found = summary_of([record(i, None, cls="refused", number=i) for i in range(20)])
        self.assertIn("inf", loadgen.render_table([found])[1])


class Flags(unittest.TestCase):
    def refused(self, line: str, *said: str) -> None:
        err, out = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            code = loadgen.main(line.split())
        self.assertEqual((code, out.getvalue()), (2, ""), line)
        self.assertEqual(err.getvalue().count("\n"), 1, err.getvalue())
        self.assertTrue(err.getvalue().startswith("loadgen: error: "), err.getvalue())
        self.assertNotIn("SECRET", err.getvalue())
        for part in said:
            self.assertIn(part, err.getvalue())

    def test_bad_input_is_one_line_and_exit_2(self) -> None:
        url = "http://127.0.0.1:1"
        for line, said in (
                ("", "no target"), (url, "no load"), (f"{url} --rate 0", "--rate"),
                (f"{url} --rate nan", "--rate"), (f"{url} --rate 1 --sweep 1,2", "same thing"),
                (f"{url} --sweep 1,x", "--sweep"), (f"{url} --rate 1 --num-requests 0", "requests"),
                (f"{url} --rate 1 --input-len 0", "--input-len"),
                (f"{url} --rate 1 --output-len uniform:9..1", "--output-len"),
                (f"{url} --rate 1 --endpoint char", "chat"), (f"{url} --rate 1 --gate", "SLO"),
                (f"{url} --rate 1 --header x", "--header"),
                (f"{url} --rate 1 --extra-body [1]", "--extra-body"),
                (f"{url} --rate 1 --goodput ttfx:1", "--goodput"),
                (f"{url} --rate 1 --num-requests 5 --duration 5", "same thing"),
                (f"{url} --rate inf --duration 5", "without end"),
                (f"{url} --rate 1 --num-requests 1e12", "billion"),
                (f"{url} --rate 1 --input-len 9e8", "--input-len"),
                ("http://u:SECRET@h --rate 1", "password"),
                (f"{url} --apikey SECRET", "--apikey"), ("http://a/%20é --rate 1", "ASCII"),
                (f"{url} --mock --rate 1", "its own engine"), ("ftp://x --rate 1", "http"),
                (f"{url} --rate 1 --faults stall", "--mock"),
                (f"{url} --rate 1 --shared-prefix-len 200", "part of it"),
                ("--mock --rate 1 --faults stal", "stall"), (f"{url} --frobnicate", "frobnicate")):
            self.refused(line, said)

    def test_a_pasted_vllm_bench_line_is_understood(self) -> None:
        line = ("vllm bench serve --backend openai-chat --base-url http://127.0.0.1:8000 "
                "--endpoint /v1/chat/completions --model m --tokenizer t --dataset-name random "
                "--random-input-len 1024 --random-output-len 128 --random-range-ratio 0.5 "
                "--num-prompts 40 --request-rate 4 --max-concurrency 8 --burstiness 0.5 "
                "--header A=1 B=2 --metadata x=1 y=2 --goodput ttft:500 tpot:40 "
                "--ignore-eos --percentile-metrics ttft,tpot "
                "--metric-percentiles 99 --trust-remote-code --seed 1 --save-result")
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            args = loadgen.parse_args(line.split())
        self.assertEqual((args.rate, args.concurrency, args.num_requests, args.model, args.seed),
                         (4, 8, 40, "m", 1))
        self.assertEqual((args.slo_ttft_ms, args.slo_tpot_ms), (500, 40))
        self.assertEqual((args.input_len.mean, args.input_len.quantile(0.0)), (1024, 512))
        self.assertEqual((args.endpoint, args.header), ("chat", [("A", "1"), ("B", "2")]))
        for flag in ("--tokenizer", "--percentile-metrics", "--trust-remote-code"):
            self.assertEqual(err.getvalue().count(flag + " "), 1)

    def test_request_rate_inf_is_no_rate(self) -> None:
        args = loadgen.parse_args("http://h --request-rate inf --max-concurrency 4".split())
        self.assertTrue(loadgen.loads_of(args)[0].closed)

    def test_help_names_every_flag(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "loadgen.py")
            with open(loadgen.__file__, encoding="utf-8") as source, \
                    open(path, "w", encoding="utf-8") as copy:
                copy.write(source.read())
            done = subprocess.run([sys.executable, "-I", path, "--help"], capture_output=True,
                                  text=True, cwd=folder, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        for flags in loadgen.FLAGS.values():
            for flag in flags:
                for name in flag.names.split():
                    self.assertIn(name, done.stdout)


class SharedBlock(unittest.TestCase):
    def test_units_and_lengths_are_the_same_bytes_in_both_scripts(self) -> None:
        blocks = []
        for name in ("capacity.py", "loadgen.py"):
            with open(os.path.join(TOP, name), encoding="utf-8") as file:
                text = file.read()
            blocks.append(text[text.index("# >>>>"):text.index("# <<<<")])
        self.assertEqual(*blocks)
        self.assertGreater(len(blocks[0]), 4000)


if __name__ == "__main__":
    unittest.main()
