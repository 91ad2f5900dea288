"""loadgen.py's virtual clock: strides against single steps, the driver's rules, the command."""

import array
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import unittest
from typing import Any, Dict, Iterator, List, Optional, Tuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen

MS = 1_000_000  # ns
EPOCH = loadgen.EPOCH_NS
# One millisecond a step, whatever it does.
FLAT = loadgen.MOCK._replace(weights_s=1e-3, sequence_s=0.0, prefill_s_per_token=0.0,
                             max_num_batched_tokens=512)
Arrival = Tuple[int, int, int, List[Any]]  # when [ns], n_in, n_out, keys


def load(**changes: Any) -> Any:
    base = {"rate_rps": 50.0, "concurrency": None, "burstiness": 1.0, "num_requests": 40,
            "duration_s": None, "ramp_s": None}
    return loadgen.Load(**{**base, **changes})


def work(n_in: str = "64", n_out: str = "20", shared: int = 0, groups: int = 1) -> Any:
    return loadgen.Work(loadgen.parse_lengths(n_in), loadgen.parse_lengths(n_out), shared, groups)


def simulated(profile: Any = FLAT, r: Any = None, made: Any = None, number: int = 0,
              **changes: Any) -> Any:
    """The outcome of one plan, its records by id."""
    plan = loadgen.make_plan(load(**changes), made or work(), 1, 0.1)
    outcome = loadgen.simulate_plan(plan, number, profile, r)
    outcome.records.sort(key=lambda record: record.id)
    return outcome


def running(stop: Any = bool, unique: bool = True, **limits: float) -> Any:
    """What a command line's runs share, for a run without a server."""
    timeouts = loadgen.Timeouts(10.0, 300.0, 60.0, 3600.0)._replace(**limits)
    target = loadgen.Target("http", "x", 80, "/", "/v1", False, "m", (), {}, True, False)
    return loadgen.Running(target, loadgen.Wiring(0, None, "", None, b"", timeouts, ()), 1,
                           loadgen.Journal(None), stop, 1, unique)


def storm(seed: int) -> Tuple[Any, List[Arrival]]:
    """A profile and arrivals that preempt, share prefixes and queue."""
    rng = random.Random(seed)
    profile = loadgen.MOCK._replace(
        weights_s=1e-3, sequence_s=1e-4, prefill_s_per_token=1e-5, max_model_len=300,
        kv_s_per_token=rng.choice((0.0, 1e-6)), flop_s_per_token=rng.choice((0.0, 2e-4)),
        num_blocks=rng.choice((24, 48, 1000)), block_tokens=rng.choice((4, 16)),
        max_num_seqs=rng.choice((3, 16)), max_num_batched_tokens=rng.choice((16, 64)))
    now_ns, arrivals = 0, []
    for number in range(60):
        now_ns += rng.choice((0, 1, 3 * MS, 40 * MS, 400 * MS))
        n_in, n_out = rng.choice((1, 9, 40, 64)), rng.choice((1, 2, 25, 90))
        size = profile.block_tokens
        if (n_in + n_out) // size >= profile.num_blocks:
            continue
        shared = rng.randrange(1 + n_in // size)
        keys = [*range(shared), *((number, i) for i in range((n_in + n_out) // size - shared))]
        arrivals.append((now_ns, n_in, n_out, keys))
    return profile, arrivals


def played(profile: Any, arrivals: List[Arrival], strides: bool) -> Tuple[Any, Dict[Any, Any]]:
    """The engine after all of it, and when each request got its tokens."""
    engine, ends = loadgen.Engine(profile), array.array("q")
    times: Dict[Any, List[int]] = {}
    jobs, left, now_ns = [], list(enumerate(arrivals)), 0
    while left or engine.jobs:
        while left and left[0][1][0] <= now_ns:
            number, (_, n_in, n_out, keys) = left.pop(0)
            jobs.append(engine.submit(number, n_in, n_out, keys))
        until_ns = left[0][1][0] if left else 1 << 62
        if not engine.jobs:
            now_ns = until_ns
        elif strides:
            now_ns = engine.stride(now_ns, until_ns, ends)
        else:
            duration_s, emitted = engine.step()
            now_ns += max(1, round(duration_s * 1e9))
            for number, _one in emitted:
                times.setdefault(number, []).append(now_ns)
    if strides:
        times = {job.id: [t for a, b in job.spans for t in ends[a:b]] for job in jobs}
    return engine, times


class StrideTest(unittest.TestCase):
    def test_strides_give_the_tokens_and_times_of_single_steps(self) -> None:
        preemptions = hits = 0
        for seed in range(120):
            profile, arrivals = storm(seed)
            with self.subTest(seed):
                one, singly = played(profile, arrivals, False)
                other, at_once = played(profile, arrivals, True)
                self.assertEqual(singly, at_once)
                for name in ("steps", "preemptions", "prefix_hit_tokens", "generation_tokens",
                             "free_blocks", "references", "idle", "context"):
                    self.assertEqual(getattr(one, name), getattr(other, name), name)
                preemptions += one.preemptions
                hits += one.prefix_hit_tokens
        self.assertGreater(preemptions, 200)  # else the storm was none
        self.assertGreater(hits, 10_000)

    def test_every_request_gets_all_its_tokens(self) -> None:
        for seed in range(0, 120, 7):
            profile, arrivals = storm(seed)
            times = played(profile, arrivals, True)[1]
            self.assertEqual([len(times[n]) for n in range(len(arrivals))],
                             [n_out for _, _, n_out, _ in arrivals])

    def test_a_stride_stops_at_the_first_step_that_ends_at_the_limit_or_later(self) -> None:
        engine, ends = loadgen.Engine(FLAT), array.array("q")
        engine.submit("a", 10, 100)
        self.assertEqual(engine.stride(0, 5 * MS, ends), 5 * MS)
        self.assertEqual(engine.stride(5 * MS, 7 * MS + 1, ends), 8 * MS)
        self.assertEqual(list(ends), [n * MS for n in range(1, 9)])

    def test_a_stride_stops_where_a_request_ends(self) -> None:
        engine, ends = loadgen.Engine(FLAT), array.array("q")
        engine.submit("a", 10, 7)
        engine.submit("b", 10, 9)
        self.assertEqual(engine.stride(0, 1 << 62, ends), 7 * MS)
        self.assertEqual([job.id for job in engine.ended], ["a"])
        self.assertEqual(engine.stride(7 * MS, 1 << 62, ends), 9 * MS)
        self.assertEqual(engine.stride(9 * MS, 1 << 62, ends), 9 * MS)  # idle


class VirtualTest(unittest.TestCase):
    def test_one_request_has_the_times_of_the_step_equation(self) -> None:
        plan = loadgen.make_plan(load(num_requests=1), work("200", "4"), 1, 1.0)
        (record,) = loadgen.simulate_plan(plan, 3, loadgen.MOCK).records
        due_ns = EPOCH + round(plan.requests[0].due_s * 1e9)
        first_ns = due_ns + 38_200_000  # 12.1 ms and 128 x 0.07, then 12.1 and 72 x 0.07
        self.assertEqual((record.due_ns, record.ready_ns, record.sent_ns), (due_ns,) * 3)
        self.assertEqual(list(record.event_ns), [first_ns + n * 12_100_000 for n in range(4)])
        self.assertEqual((record.first_ns, record.answer_ns, record.last_ns, record.end_ns),
                         (first_ns, first_ns, record.event_ns[3], record.event_ns[3]))
        self.assertEqual((record.cls, record.run, record.n_in, record.n_out, record.status,
                          record.finish_reason, record.cached_tokens, record.n_out_estimated),
                         ("ok", 3, 200, 4, 200, "length", None, False))
        self.assertAlmostEqual(record.itl_max_s, 0.0121)

    def test_equal_plans_have_equal_records(self) -> None:
        rows = [[r.row(EPOCH) for r in simulated().records] for _ in range(2)]
        self.assertEqual(*rows)
        self.assertEqual(len(rows[0]), 40)

    def test_who_comes_to_an_idle_engine_starts_a_step_alone(self) -> None:
        outcome = simulated(rate_rps=None, num_requests=3, made=work("64", "5"))
        self.assertEqual([(r.first_ns - EPOCH) // MS for r in outcome.records], [1, 2, 2])

    def test_a_closed_loop_keeps_so_many_in_flight(self) -> None:
        outcome = simulated(rate_rps=None, concurrency=4, num_requests=20)
        ends = {r.end_ns for r in outcome.records}
        for record in outcome.records[4:]:
            self.assertIn(record.due_ns, ends)
            self.assertEqual(record.sent_ns, record.due_ns)
            # the step that began when it was let go passes it by
            self.assertEqual(record.first_ns - record.due_ns, 2 * MS)
        levels = loadgen.in_flight_at_arrivals(outcome.records)
        self.assertEqual(max(levels), 3.0)
        self.assertLess(outcome.records[-1].end_ns - EPOCH, 5 * 22 * MS)

    def test_a_caps_wait_counts_from_due(self) -> None:
        outcome = simulated(rate_rps=200.0, concurrency=2, num_requests=30)
        held = [r for r in outcome.records if r.sent_ns > r.due_ns]
        ends = {r.end_ns for r in outcome.records}
        self.assertGreater(len(held), 10)
        self.assertLess(len(held), 30)  # the first found a seat
        for record in held:
            self.assertIn(record.sent_ns, ends)
        self.assertEqual(loadgen.summarise(outcome, loadgen.Slo(None, None, None, 0.99),
                                           False)["in_flight_max"] > 2, True)

    def test_a_window_has_arrivals_until_the_last_measured_has_ended(self) -> None:
        outcome = simulated(num_requests=None, duration_s=0.4, ramp_s=0.2)
        measured = [r for r in outcome.records if r.measured]
        rest = [r for r in outcome.records if not r.measured]
        self.assertTrue(all(0.2 <= (r.due_ns - EPOCH) / 1e9 < 0.6 and r.ok for r in measured))
        last_ns = max(r.end_ns for r in measured)
        after = [r for r in rest if r.due_ns > EPOCH + 0.6e9]
        self.assertTrue(after and all(r.due_ns <= last_ns for r in after))
        cut = [r for r in rest if not r.ok]
        self.assertTrue(cut)
        for record in cut:
            self.assertEqual((record.cls, record.error, record.end_ns),
                             ("cancelled", "after the measured window", last_ns))
            self.assertEqual(record.n_out or 0, len(record.event_ns))
            self.assertTrue(all(t <= last_ns for t in record.event_ns))

    def test_a_closed_loop_has_a_window_too(self) -> None:
        outcome = simulated(num_requests=None, duration_s=0.2, ramp_s=0.05, rate_rps=None,
                            concurrency=3)
        measured = [r for r in outcome.records if r.measured]
        self.assertTrue(measured and all(r.ok for r in measured))
        self.assertGreaterEqual(max(r.end_ns for r in measured), EPOCH + 0.25e9 - 22 * MS)

    def test_what_is_past_a_limit_is_cut_and_frees_its_seat(self) -> None:
        one = FLAT._replace(max_num_seqs=1)
        outcome = simulated(one, running(first_output_s=0.05), rate_rps=None, num_requests=5)
        self.assertEqual([r.cls for r in outcome.records], ["ok"] * 3 + ["timeout"] * 2)
        self.assertEqual(outcome.records[4].error, "no output within 0.05 s (first output)")
        outcome = simulated(one, running(total_s=0.01), rate_rps=None, concurrency=1,
                            num_requests=3)
        self.assertEqual([(r.cls, r.events, r.n_out_estimated) for r in outcome.records],
                         [("timeout", 11, True)] * 3)

    def test_a_stall_past_its_limit_is_no_success(self) -> None:
        tight = FLAT._replace(num_blocks=8, max_model_len=128)  # the second loses its blocks
        outcome = simulated(tight, running(stall_s=0.02), rate_rps=None, num_requests=2,
                            made=work("40", "60"))
        self.assertEqual([r.cls for r in outcome.records], ["ok", "stalled"])

    def test_what_the_engine_can_never_run_is_refused(self) -> None:
        small = FLAT._replace(max_model_len=70)
        for changes in ({}, {"rate_rps": None, "concurrency": 2},
                        {"rate_rps": None, "concurrency": 2, "num_requests": None,
                         "duration_s": 0.05}):
            outcome = simulated(small, **changes)
            self.assertTrue(outcome.records)
            for record in outcome.records:
                self.assertEqual((record.cls, record.status), ("http_status", 400))
                self.assertIn("maximum context length is 70", record.error)

    def test_an_interrupted_run_keeps_what_there_is(self) -> None:
        calls = iter(range(1000))
        outcome = simulated(r=running(lambda: next(calls) > 20))
        kinds = {r.cls for r in outcome.records}
        self.assertTrue(outcome.health[0].interrupted)
        self.assertLess(len(outcome.records), 40)
        self.assertIn("cancelled", kinds)
        self.assertFalse(simulated().health[0].interrupted)

    def test_slos_and_the_unstable_verdict_work_as_for_real_runs(self) -> None:
        slo = loadgen.Slo(0.05, None, None, 0.99)
        slow = loadgen.summarise(simulated(loadgen.MOCK, rate_rps=200.0, num_requests=300), slo,
                                 False)
        self.assertEqual((slow["verdict"], slow["simulated"]), ("UNSTABLE", True))
        self.assertLess(slow["attainment"], 0.5)
        calm = loadgen.summarise(simulated(rate_rps=5.0), slo, False)
        self.assertEqual((calm["verdict"], calm["attainment"]), ("VALID", 1.0))


class PrefixTest(unittest.TestCase):
    def cached(self, outcome: Any) -> List[Optional[int]]:
        return [r.cached_tokens for r in outcome.records]

    def test_a_shared_prefix_is_found_by_whole_blocks(self) -> None:
        found = self.cached(simulated(rate_rps=10.0, made=work(shared=40)))
        self.assertEqual(found, [None] + [32] * 39)  # 40 tokens are two blocks and a half
        self.assertEqual(self.cached(simulated(rate_rps=10.0)), [None] * 40)

    def test_each_group_has_a_prefix_of_its_own(self) -> None:
        found = self.cached(simulated(rate_rps=10.0, made=work(shared=40, groups=4)))
        self.assertEqual(found.count(None), 4)

    def test_prompts_are_fresh_in_every_run_unless_told_otherwise(self) -> None:
        for unique, second in ((True, [None] * 40), (False, [48] * 40)):
            engine = loadgen.Engine(FLAT)
            r = running(unique=unique)
            self.assertEqual(self.cached(simulated(engine, r, rate_rps=10.0)), [None] * 40)
            self.assertEqual(self.cached(simulated(engine, r, rate_rps=10.0, number=1)), second)
            self.assertEqual((engine.running, engine.waiting, engine.kv_usage), (0, 0, 0.0))

    def test_names_of_blocks_are_equal_only_where_the_tokens_are(self) -> None:
        planned = loadgen.Planned(7, 0.0, 70, 30, 2)
        other = planned._replace(id=8, n_in=100)
        a = loadgen.virtual_keys(planned, 2, 16, (3, 3))
        b = loadgen.virtual_keys(other, 2, 16, (3, 3))
        self.assertEqual((len(a), len(set(a)), len(b)), (6, 6, 8))
        self.assertEqual(set(a) & set(b), set(a[:2]))
        again = loadgen.virtual_keys(planned, 2, 16, (4, 1))
        self.assertEqual(set(again) & set(a), set(a[:2]))
        self.assertEqual(loadgen.virtual_keys(planned._replace(n_in=32), 2, 16, (3, 3))[:1], a[:1])


@contextlib.contextmanager
def command(*argv: str) -> Iterator[Tuple[int, str, str]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = loadgen.main(argv)
    yield code, out.getvalue(), err.getvalue()


PLAN = ("--sweep", "2,32", "--num-requests", "60", "--output-len", "48", "--slo-ttft-ms", "300")


class CommandTest(unittest.TestCase):
    def test_the_report_can_not_be_taken_for_a_measurement(self) -> None:
        with command("--simulate", *PLAN) as (code, out, err):
            self.assertEqual((code, err), (0, ""))
        rows = out.splitlines()
        self.assertTrue(rows[1].endswith("  SIMULATED"), rows[1])
        self.assertTrue(rows[2].endswith("SIMULATED, UNSTABLE"), rows[2])
        self.assertIn("SETUP  SIMULATED, no server, nothing measured", out)
        self.assertNotIn("VALID", out)
        self.assertNotIn("client:", out)
        self.assertNotIn("http://", out)

    def test_the_client_is_absent_and_not_zero(self) -> None:
        with command("--simulate", *PLAN, "--json") as (code, out, _):
            self.assertEqual(code, 0)
        summary = json.loads(out)
        self.assertEqual(summary["simulated"]["step_time"]["weights_s"], 0.012)
        self.assertIsNone(summary["target"]["url"])
        for run in summary["runs"]:
            client = dict(run["client"])
            self.assertIs(client.pop("interrupted"), False)
            self.assertEqual(client.pop("send_lag_s"), dict.fromkeys(("p50", "p99", "max")))
            self.assertEqual(client.pop("loop_busy_s"), dict.fromkeys(("p50", "p99", "max")))
            self.assertEqual(set(client.values()), {None})
            self.assertIs(run["simulated"], True)

    def test_out_holds_what_a_real_run_would_leave(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "run")
            with command("--simulate", *PLAN, "--out", path) as (code, _, err):
                self.assertEqual((code, err), (0, ""))
            with open(os.path.join(path, "requests.jsonl"), encoding="utf-8") as file:
                rows = [json.loads(line) for line in file]
            with open(os.path.join(path, "plan.json"), encoding="utf-8") as file:
                plan = json.load(file)
            self.assertTrue(os.path.exists(os.path.join(path, "summary.json")))
        self.assertEqual(len(rows), 120)
        due = {(row["run"], row["id"]): row["due_s"] for row in rows}
        for run, arrivals in enumerate(plan["arrivals"]):
            for number, due_s in enumerate(arrivals):
                self.assertAlmostEqual(due[run, number], due_s, places=8)

    def test_a_deployment_brings_its_profile_and_its_model(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "deploy.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"model": {"name": "some-model"}, "step_time": {"weights_s": 0.05}}, file)
            with command("--simulate", path, "--concurrency", "1", "--num-requests", "5", "--json"
                         ) as (code, out, _):
                self.assertEqual(code, 0)
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"step_time": {"weight_s": 0.05}}, file)
            with command("--simulate", path, "--rate", "1") as (code, _, err):
                self.assertEqual(code, 2)
                self.assertIn("did you mean weights_s", err)
        summary = json.loads(out)
        self.assertEqual(summary["target"]["model"], "some-model")
        self.assertAlmostEqual(summary["runs"][0]["tpot_s"]["p50"], 0.0501)

    def test_windows_ramp_by_the_simulated_warm_up(self) -> None:
        with command("--simulate", "--rate", "4", "--duration", "20", "--json") as (code, out, _):
            self.assertEqual(code, 0)
        summary = json.loads(out)
        self.assertEqual(summary["warmup"]["requests"], 4)
        opened_s, closed_s = summary["plan"]["windows_s"][0]
        self.assertAlmostEqual(opened_s, summary["warmup"]["expected_e2e_s"])
        self.assertAlmostEqual(closed_s, opened_s + 20)
        self.assertTrue(0.5 < opened_s < 5.0, opened_s)

    def test_the_gate_judges_a_simulation_too(self) -> None:
        with command("--simulate", *PLAN, "--gate") as (code, _, _err):
            self.assertEqual(code, 3)

    def test_what_needs_a_server_is_refused_beside_it(self) -> None:
        for more, said in ((("--faults", "stall"), "sockets"), (("--mock",), "real time"),
                           (("http://127.0.0.1:1",), "its own engine"),
                           (("--serve",), "real time")):
            with command("--rate", "1", *more, "--simulate") as (code, out, err):
                self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
                self.assertIn(said, err)


if __name__ == "__main__":
    unittest.main()
