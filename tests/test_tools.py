"""Old numbers, differences between runs, the self-test, and one plan sent from many machines."""

import argparse
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
import time
import unittest
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen
from loadgen import MS, NS, Load, Planned, Record, Slo, UserError
from tests import LOADGEN

SCRIPT = os.path.abspath(loadgen.__file__)
FAST = {"weights_s": 0.002, "sequence_s": 0.00002, "prefill_s_per_token": 0.00001,
        "max_num_batched_tokens": 2048}
WORK = loadgen.Work(loadgen.parse_lengths("lognormal:mean=30,cv=0.5"),
                    loadgen.parse_lengths("uniform:4..12"), 0, 1)
TIMED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "traces",
                     "timed_trace.jsonl")
NO_SLO = Slo(None, None, None, 0.99)
# What vllm bench serve 0.32 wrote with --save-result --save-detailed --goodput and all metrics.
VLLM_KEYS = set(
    "backend burstiness completed date duration endpoint_type errors failed generated_texts "
    "input_lens itls label latencies max_concurrency max_concurrent_requests "
    "max_output_tokens_per_s model_id num_prompts output_lens output_throughput queue_times "
    "request_goodput request_rate request_throughput rtfx start_times tokenizer_id "
    "total_input_tokens total_output_tokens total_token_throughput ttfts".split()) | {
    f"{stat}_{name}_ms" for stat in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    for name in ("ttft", "tpot", "itl", "e2el")}
VLLM_LISTS = set("input_lens output_lens ttfts itls latencies start_times queue_times "
                 "generated_texts errors".split())


def setUpModule() -> None:
    """No test reads or writes the self-tests of this machine."""
    cache = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(cache.cleanup)
    patch = mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache.name})
    patch.start()
    unittest.addModuleCleanup(patch.stop)


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """The built-in engine on a port of its own; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "profile.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(FAST, file)
        process = subprocess.Popen([sys.executable, SCRIPT, "--serve", "--port", "0", "--mock",
                                    path], stdout=subprocess.PIPE)
        try:
            yield process.stdout.readline().decode().split()[-1]
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def command(*argv: str) -> Tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command line."""
    done = subprocess.run([*LOADGEN, *argv], capture_output=True, text=True, timeout=60,
                          check=False)
    return done.returncode, done.stdout, done.stderr


def load(*path: str) -> Any:
    with open(os.path.join(*path), encoding="utf-8") as file:
        return json.load(file)


def rows_of(folder: str) -> List[Dict[str, Any]]:
    with open(os.path.join(folder, "requests.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def record(number: int = 0, due_ms: float = 0.0, sent_ms: Optional[float] = None,
           events_ms: Sequence[float] = (), kind: str = "ok", **more: Any) -> Record:
    """A request with its output events at these times; what fails has no tokens."""
    made = Record(Planned(number, 0.0, 20, 4, 0), 0, round(due_ms * MS / NS), True)
    stamps = [round(t * MS / NS) for t in events_ms]
    made.cls, made.error = kind, "" if kind == "ok" else "boom"
    made.sent_ns = round((due_ms if sent_ms is None else sent_ms) * MS / NS)
    made.n_in, made.events, made.n_out = 20, len(stamps), len(stamps) or None
    made.event_ns = array.array("q", stamps)
    if stamps:
        made.first_ns, made.last_ns, made.answer_ns = stamps[0], stamps[-1], stamps[0]
    made.end_ns = stamps[-1] if stamps else made.sent_ns
    for name, value in more.items():
        setattr(made, name, value)
    return made


def outcome(records: List[Record], rate: Optional[float] = 10.0, cap: Optional[int] = None
            ) -> loadgen.Outcome:
    plan = loadgen.make_plan(Load(rate, cap, 1.0, len(records), None, None), WORK, 1, 1.0)
    return loadgen.Outcome(plan, records, [], 0, loadgen.ONE_A_WORD, [])


class OnePlanOverManyMachines(unittest.TestCase):
    """Every shard sends its share of one plan, and together they send all of it."""

    def arrivals(self, plan: loadgen.Plan, shard: int, shards: int, until_s: float = 0.0
                 ) -> List[Tuple[int, int, int, int]]:
        """(id, due, n_in, n_out) of what one process would send."""
        source = loadgen.Source(plan, 0, lambda planned: b"", shard, shards)
        found = []
        while source.ready or (source.more is not None and found[-1][1] < until_s / NS):
            if not source.ready:
                source.ready.append(next(source.more))
            out, made = source.take(0)
            found.append((out.planned.id, made.due_ns, out.planned.n_in, out.planned.n_out))
        return found

    def test_shards_together_have_the_arrivals_of_one_process(self) -> None:
        plan = loadgen.make_plan(Load(20.0, None, 0.7, 101, None, None), WORK, 3, 1.0)
        whole = self.arrivals(plan, 0, 1)
        for shards in (2, 3, 8):
            parts = [self.arrivals(plan, shard, shards) for shard in range(shards)]
            self.assertEqual(sorted(itertools.chain(*parts)), whole)
            for shard, part in enumerate(parts):
                self.assertEqual({number % shards for number, *_ in part}, {shard})
        self.assertEqual(len(whole), 101)

    def test_beyond_what_was_prepared_too(self) -> None:
        plan = loadgen.make_plan(Load(20.0, None, 1.0, None, 3.0, 1.0), WORK, 3, 0.1)
        until_s = plan.requests[-1].due_s + 5.0
        whole = [one for one in self.arrivals(plan, 0, 1, until_s + 5) if one[1] * NS < until_s]
        parts = [self.arrivals(plan, shard, 3, until_s + 5) for shard in range(3)]
        self.assertEqual(sorted(one for one in itertools.chain(*parts) if one[1] * NS < until_s),
                         whole)
        self.assertGreater(len(whole), len(plan.requests))

    def test_workers_of_a_shard_share_its_share(self) -> None:
        plan = loadgen.make_plan(Load(20.0, None, 1.0, 50, None, None), WORK, 3, 1.0)
        seen: List[Tuple[int, int]] = []

        def spy(plan: Any, run: int, make: Any, place: int, of: int, *rest: Any) -> Any:
            seen.append((place, of))
            raise InterruptedError

        running = argparse.Namespace(shard=(1, 3), workers=2)
        with mock.patch.object(loadgen, "Source", spy):
            for worker in range(2):
                with self.assertRaises(InterruptedError):
                    loadgen.work_share(plan, 0, running, lambda p: b"", (worker, 2), (1, 1), [],
                                       bool, time.perf_counter_ns)
        self.assertEqual(seen, [(1, 6), (4, 6)])
        own = sorted(itertools.chain(*(self.arrivals(plan, *place) for place in seen)))
        self.assertEqual(own, self.arrivals(plan, 1, 3))

    def test_concurrency_is_shared_out_to_the_last_slot(self) -> None:
        plan = loadgen.make_plan(Load(None, 11, 1.0, 50, None, None), WORK, 3, 1.0)
        shares: List[int] = []

        def spy(wiring: Any, host: str, load: Load, keep: Any) -> Any:
            shares.append(load.concurrency or 0)
            raise InterruptedError

        with mock.patch.object(loadgen, "Driver", spy):
            for shard in range(3):
                running = mock.Mock(shard=(shard, 3))
                for worker in range(2):
                    with self.assertRaises(InterruptedError):
                        loadgen.work_share(plan, 0, running, lambda p: b"", (worker, 2), (1, 1),
                                           [], bool, time.perf_counter_ns)
        self.assertEqual((sum(shares), min(shares)), (11, 1))

    def test_merged_shards_are_the_plan_of_one_run_and_its_summary(self) -> None:
        base = ("--rate", "40", "--num-requests", "60", "--output-len", "6", "--input-len", "20",
                "--slo-ttft-ms", "200", "--seed", "9", "--warmup", "0")
        with engine() as url, tempfile.TemporaryDirectory() as folder:
            run, out = os.path.join(folder, "run"), os.path.join(folder, "all")
            starts = repr(time.time() + 1.5)
            shards = [subprocess.Popen(
                [sys.executable, SCRIPT, url, *base, "--shard", f"{shard}/3", "--start-at", starts,
                 "--out", run, "--workers", "2" if shard == 1 else "1"],
                stdout=subprocess.DEVNULL) for shard in range(3)]
            self.assertEqual({shard.wait(60) for shard in shards} - {0, 1}, set())
            code, said, errors = command("--merge", run, "--out", out, "--compat", "--save-result",
                                         os.path.join(folder, "result.json"))
            self.assertIn(code, (0, 1), errors)
            self.assertIn("3 of 3 joined", said)
            summary, rows = load(out, "summary.json"), rows_of(out)
            one = loadgen.make_plan(Load(40.0, None, 1.0, 60, None, None), loadgen.Work(
                loadgen.parse_lengths("20"), loadgen.parse_lengths("6"), 0, 1), 9, 1.0)
            self.assertEqual([(row["id"], row["due_s"], row["n_in_planned"], row["n_out_planned"])
                              for row in rows],
                             [(p.id, round(p.due_s, 9), p.n_in, p.n_out) for p in one.requests])
            self.assertEqual(summary["plan"]["hash"], one.hash)
            direct = loadgen.summarise(outcome([loadgen.record_of(row) for row in rows]),
                                       Slo(**summary["slo"]), True)
            for key in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "in_flight_mean", "output_tok_s",
                        "goodput_rps", "attainment", "offered", "completed"):
                self.assertEqual(summary["runs"][0][key],
                                 loadgen.null_infinities(direct[key]), key)
            self.assertEqual(load(folder, "result.json")["num_prompts"], 60)
            self.assertEqual(summary["runs"][0]["client"]["workers"], 4)
            self.assertIn("readings by shard", said)
            self.assertEqual(summary["runs"][0]["server"]["client_ttft_s"]["n"], 60)
            late = any("--start-at" in warning for shard in range(3) for warning in
                       load(run, f"shard-{shard}", "summary.json")["runs"][0]["warnings"])
            self.assertTrue(late or summary["runs"][0]["start_skew_s"] < 0.001)
            self.lose_a_shard(run, folder)
            self.refuse_what_is_no_shard(run, out)

    def test_classes_turns_and_traces_survive_the_merge(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            mix = os.path.join(folder, "mix.json")
            with open(mix, "w", encoding="utf-8") as file:
                json.dump({"a": {"rate": 20, "slo_ttft_ms": 500, "output_len": 5},
                           "b": {"rate": 10, "slo_ttft_ms": 1, "output_len": 5}}, file)
            for flags in (f"--mix {mix} --num-requests 40",
                          "--rate 20 --num-requests 40 --turns 3 --slo-ttft-ms 500",
                          f"--trace {TIMED} --slo-ttft-ms 500"):
                out = os.path.join(folder, str(len(os.listdir(folder))))
                command("--simulate", *flags.split(), "--out", out)
                plan, whole = load(out, "plan.json"), load(out, "summary.json")
                made = [loadgen.record_of(row) for row in rows_of(out)]
                for r, row in zip(made, rows_of(out)):
                    self.assertEqual(r.row(0), row)
                parts = {i: loadgen.Saved("", plan, {}, [r for r in made if (
                    r.id if r.session < 0 else r.session) % 2 == i]) for i in range(2)}
                joined, _ = loadgen.joined_outcome(parts, 2, 0)
                self.assertEqual([r.cls for r in joined.records], ["ok"] * len(made))
                found = loadgen.null_infinities(loadgen.summarise(
                    joined, loadgen.slo_from(whole["slo"]), True))
                for key in ("attainment", "classes", "turns", "ttft_s", "verdict"):
                    self.assertEqual(found[key], whole["runs"][0][key], (flags, key))
                del parts[1]
                joined, wrong = loadgen.joined_outcome(parts, 2, 0)
                self.assertEqual(len(joined.records), len(made))
                self.assertIn("shard 1 of 2 is missing", wrong[-1])

    def test_what_the_engine_said_to_a_shard_is_said_of_all(self) -> None:
        made = [record(i, 100 * i, None, (100 * i + 30,)) for i in range(4)]

        def said(samples: int, n: int) -> Dict[str, Any]:
            return {"samples": samples, "preemptions": 66.0, "ttft_s": {"n": n, "mean": 0.02}}

        found = loadgen.shared_server({0: said(3, 4), 1: said(9, 4), 2: None}, made)
        self.assertEqual((found["shard"], found["preemptions"]), (1, 66.0))
        self.assertAlmostEqual(found["client_ttft_s"]["mean"], 0.03)
        self.assertAlmostEqual(found["beyond_engine_s"], 0.01)
        others = loadgen.shared_server({0: said(3, 9)}, made)
        self.assertIsNone(others["beyond_engine_s"])
        self.assertIsNone(loadgen.shared_server({0: None}, made))

    def lose_a_shard(self, run: str, folder: str) -> None:
        """One shard's folder is gone, another was killed while it wrote a line."""
        os.rename(os.path.join(run, "shard-0"), os.path.join(folder, "elsewhere"))
        os.remove(os.path.join(run, "shard-2", "summary.json"))
        path = os.path.join(run, "shard-2", "requests.jsonl")
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()
        with open(path, "w", encoding="utf-8") as file:
            file.writelines([*lines[:5], lines[5][:40]])
        code, text, errors = command("--merge", run, "--json")
        summary = json.loads(text)
        found = summary["runs"][0]
        self.assertEqual((code, found["verdict"]), (1, "CLIENT-LIMITED"), errors)
        self.assertEqual((found["offered"], found["completed"]), (60, 25))
        self.assertEqual(found["failures"], {"cancelled": 35})
        self.assertLess(found["attainment"], 26 / 60)
        self.assertLess(found["in_flight_max"], 30)  # what never came was never in flight
        self.assertIn("shard 0 of 3 is missing: 20 of its requests", found["reasons"][0])
        self.assertIn("shard 2 of 3 did not end its run: 15", " ".join(found["reasons"]))
        self.assertEqual(summary["shards"], {"of": 3, "joined": [1, 2], "missing": [0]})

    def refuse_what_is_no_shard(self, run: str, out: str) -> None:
        """Folders that do not make up one run are refused by name."""
        part = os.path.join(run, "shard-1")
        for folders, why in (((part, part), "both shard 1"), ((out,), "not of a run with --shard"),
                             ((run + "-not",), "cannot be read")):
            code, _, errors = command("--merge", *folders)
            self.assertEqual(code, 2)
            self.assertIn(why, errors)
        plan = load(part, "plan.json")
        with tempfile.TemporaryDirectory() as other:
            with open(os.path.join(other, "plan.json"), "w", encoding="utf-8") as file:
                json.dump({**plan, "seed": 10, "hash": "0", "shard": [2, 3]}, file)
            with open(os.path.join(other, "requests.jsonl"), "w", encoding="utf-8"):
                pass
            code, _, errors = command("--merge", part, other)
        self.assertEqual(code, 2)
        self.assertIn("seed 9 against 10", errors)


class PlaceAndTime(unittest.TestCase):
    """--shard and --start-at."""

    def test_auto_asks_kubernetes_and_slurm(self) -> None:
        for named, text, wanted in (({"JOB_COMPLETION_INDEX": "3"}, "auto/8", (3, 8)),
                                    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, "auto", (1, 4)),
                                    ({}, "0/1", (0, 1))):
            with mock.patch.dict(os.environ, named):
                self.assertEqual(loadgen.shard(text), wanted)

    def test_a_place_that_is_none_is_refused(self) -> None:
        with mock.patch.dict(os.environ):
            for name in ("JOB_COMPLETION_INDEX", "SLURM_PROCID", "SLURM_NTASKS"):
                os.environ.pop(name, None)
            for text in ("auto", "auto/4", "4/4", "-1/4", "1", "a/b", "0/0", "1/20000"):
                with self.assertRaises(UserError, msg=text):
                    loadgen.shard(text)

    def test_a_place_from_the_environment_is_refused_by_its_name(self) -> None:
        for named, text, why in (
                ({"JOB_COMPLETION_INDEX": "x"}, "auto/4", "JOB_COMPLETION_INDEX='x'"),
                ({"JOB_COMPLETION_INDEX": "4"}, "auto/4", "JOB_COMPLETION_INDEX='4'"),
                ({"SLURM_PROCID": "4", "SLURM_NTASKS": "4", "JOB_COMPLETION_INDEX": ""}, "auto",
                 "SLURM_PROCID='4', SLURM_NTASKS='4'")):
            with mock.patch.dict(os.environ, named), self.assertRaisesRegex(UserError, why):
                loadgen.shard(text)

    def test_a_shard_alone_is_not_judged(self) -> None:
        base = ["http://h", "--rate", "1", "--shard", "0/2"]
        for more in (["--gate", "--slo-ttft-ms", "1"], ["--compat"], ["--save-result", "f"],
                     ["--duration", "5"]):
            with self.assertRaises(UserError, msg=str(more)):
                loadgen.parse_args([*base, *more])
        with self.assertRaises(UserError):
            loadgen.parse_args(["http://h", "--concurrency", "3", "--shard", "0/2", "--workers",
                                "2"])
        args = loadgen.parse_args([*base, "--duration", "5", "--ramp", "1", "--out", "d"])
        self.assertEqual(args.out, os.path.join("d", "shard-0"))

    def test_times_are_iso_unix_or_from_now(self) -> None:
        now = 1_900_000_000.0
        with mock.patch.object(loadgen.time, "time", lambda: now):
            self.assertEqual(loadgen.start_at("+30"), now + 30)
            self.assertEqual(loadgen.start_at(str(now + 5)), now + 5)
            self.assertEqual(loadgen.start_at("2030-03-17T17:46:45Z"), now + 5)
            self.assertEqual(loadgen.start_at("2030-03-17T19:46:45+02:00"), now + 5)
            for text in ("soon", "2030-03-17T17:46:35Z", "2031-03-17T17:46:35Z", "+0", "12"):
                with self.assertRaises(UserError, msg=text):
                    loadgen.start_at(text)

    def test_shards_whose_answers_end_apart_begin_the_next_run_together(self) -> None:
        plan = loadgen.make_plan(Load(10.0, None, 1.0, 100, None, None), WORK, 3, 1.0)
        last_s = plan.requests[-1].due_s
        start = 5_000_000_000
        found = {loadgen.next_start_ns(start, plan, start + round((last_s + more_s) / NS))
                 for more_s in (-3.0, 0.1, 4.0, 25.0)}
        self.assertEqual(len(found), 1)
        later = loadgen.next_start_ns(start, plan, start + round((last_s + 70) / NS))
        self.assertGreater(later * NS, start * NS + last_s + 70)
        self.assertEqual((later - found.pop()) % 10_000_000_000, 0)


class OtherToolsDefinitions(unittest.TestCase):
    """--save-result and --compat on requests worked out by hand."""

    def records(self) -> List[Record]:
        return [
            record(0, 0, 10, (40, 60, 90), opened_ns=round(30 * MS / NS)),  # role 10 ms before
            record(1, 100, 110, (150,), closed_ns=round(170 * MS / NS)),  # one token, then an end
            record(2, 200, 205, (), kind="http_status"),
            record(3, 300, 330, (350, 370), connect_s=0.02)]  # 20 ms of it for the connection

    def test_vllm_counts_chunks_from_the_send_over_successes(self) -> None:
        view = loadgen.vllm_view(outcome(self.records()), Slo(0.05, 0.025, None, 0.99))
        self.assertAlmostEqual(view["ttft_s"]["mean"], (20 + 40 + 40) / 3 * MS)
        self.assertAlmostEqual(view["e2e_s"]["p50"], 60 * MS)  # 80, 60 (its end chunk), 60
        self.assertAlmostEqual(view["tpot_s"]["mean"], ((80 - 20) / 2 + 20) / 2 * MS)
        self.assertAlmostEqual(view["itl_s"]["mean"], (10 + 20 + 30 + 20 + 20) / 5 * MS)
        self.assertAlmostEqual(view["duration_s"], 370 * MS)
        self.assertEqual((view["completed"], view["failed"], view["output_tokens"]), (3, 1, 6))
        self.assertAlmostEqual(view["goodput_rps"] * 0.37, 2)  # one token has no TPOT: it passes

    def test_aiperf_counts_output_and_fails_one_token_under_a_tpot_limit(self) -> None:
        view = loadgen.aiperf_view(outcome(self.records()), Slo(0.05, 0.025, None, 0.99))
        self.assertAlmostEqual(view["ttft_s"]["mean"], (30 + 40 + 40) / 3 * MS)
        self.assertAlmostEqual(view["itl_s"]["p50"], 20 * MS)
        self.assertAlmostEqual(view["duration_s"], 360 * MS)  # first send to last output
        self.assertAlmostEqual(view["goodput_rps"] * 0.36, 2)
        strict = loadgen.aiperf_view(outcome(self.records()[1:2]), Slo(None, 1.0, None, 0.99))
        self.assertEqual(strict["goodput_rps"], 0)

    def test_the_result_has_vllms_keys_and_units(self) -> None:
        run = outcome(self.records(), cap=8)
        target = {"model": "m", "chat": True}
        result = loadgen.vllm_result(loadgen.vllm_view(run, Slo(1.0, None, None, 0.9)), run,
                                     target, True)
        self.assertEqual(VLLM_KEYS - set(result), set())
        self.assertEqual({key for key in set(result) - VLLM_KEYS
                          if not key.endswith("_client_queue_time_ms")}, set())
        self.assertAlmostEqual(result["p50_ttft_ms"], 40)
        self.assertAlmostEqual(result["std_ttft_ms"], math.sqrt(800 / 9))
        self.assertEqual([round(v, 6) for v in result["ttfts"]], [0.02, 0.04, 0.0, 0.04])
        self.assertEqual([len(gaps) for gaps in result["itls"]], [3, 1, 0, 1])
        self.assertEqual(result["output_lens"], [3, 1, 0, 2])
        self.assertEqual(result["errors"], ["", "", "http_status: boom", ""])
        self.assertEqual((result["request_rate"], result["max_concurrency"]), (10.0, 8))
        self.assertEqual((result["max_output_tokens_per_s"], result["max_concurrent_requests"]),
                         (8.0, 3))
        brief = loadgen.vllm_result(loadgen.vllm_view(run, NO_SLO), run, target, False)
        self.assertEqual(VLLM_LISTS & set(brief), set())
        self.assertIsNone(brief["request_goodput"])

    def test_the_result_has_label_metadata_and_drafts_as_vllm_writes_them(self) -> None:
        run = outcome(self.records())
        server = {"spec_drafts": 10.0, "spec_drafted": 30.0, "spec_accepted": 18.0,
                  "spec_accepted_at": [9.0, 6.0, 3.0]}
        result = loadgen.vllm_result(
            loadgen.vllm_view(run, NO_SLO), run, {"model": "m", "chat": False}, False,
            {"label": "lab", "foo": "bar", "completed": "mine"}, server)
        self.assertEqual((result["label"], result["foo"], result["completed"]), ("lab", "bar", 3))
        self.assertEqual((result["spec_decode_acceptance_rate"],
                          result["spec_decode_acceptance_length"]), (60.0, 2.8))
        self.assertEqual([result[f"spec_decode_{name}"] for name in (
            "num_drafts", "draft_tokens", "accepted_tokens")], [10, 30, 18])
        self.assertEqual(result["spec_decode_per_position_acceptance_rates"], [0.9, 0.6, 0.3])
        self.assertEqual(loadgen.vllm_drafts({"spec_drafts": None, "spec_drafted": None,
                                              "spec_accepted": None}), {})

    def test_a_result_that_cannot_be_written_is_said_before_the_run(self) -> None:
        base = ("--simulate", "--rate", "3", "--save-result")
        with tempfile.TemporaryDirectory() as folder:
            for name, why in (("nope/x.json", "there is no folder"), ("", "a folder or a device")):
                code, said, errors = command(*base, os.path.join(folder, name))
                self.assertEqual((code, said, errors.count("\n")), (2, "", 1))
                self.assertIn(why, errors)

    def test_a_result_says_what_was_stated_of_the_run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "r.json")
            code, _, errors = command(
                "--simulate", "--rate", "30", "--num-requests", "20", "--save-result", path,
                "--metadata", "foo=bar", "--label", "lab")
            saved = load(path)
        self.assertEqual((code, saved["foo"], saved["label"]), (0, "bar", "lab"))
        self.assertEqual(errors.count("generated_texts"), 1)

    def test_a_ramp_of_the_rate_is_refused_by_name(self) -> None:
        with self.assertRaisesRegex(UserError, "--ramp-up-strategy changes the rate"):
            loadgen.parse_args("vllm bench serve --port 1 --ramp-up-strategy linear "
                               "--ramp-up-start-rps 1 --ramp-up-end-rps 5".split())

    def test_percentiles_are_numpys(self) -> None:
        found = loadgen.moments([4.0, 1.0, 3.0, 2.0])
        self.assertEqual((found["mean"], found["p50"]), (2.5, 2.5))
        self.assertAlmostEqual(found["p90"], 3.7)
        self.assertAlmostEqual(found["std"], math.sqrt(1.25))

    def test_nothing_measured_is_null_not_zero(self) -> None:
        run = outcome([record(0, 0, 1, (), kind="refused")], rate=None)
        result = loadgen.vllm_result(loadgen.vllm_view(run, NO_SLO), run,
                                     {"model": "m", "chat": False}, True)
        self.assertEqual((result["mean_ttft_ms"], result["p99_itl_ms"]), (None, None))
        self.assertEqual((result["request_rate"], result["completed"]), ("inf", 0))

    def test_a_file_a_run_and_the_rate_in_the_name_of_a_sweep(self) -> None:
        args = argparse.Namespace(save_result="out/r.json", result_filename=None, result_dir=None)
        run = {"label": "8", "rate_rps": 8.0, "concurrency": None}
        self.assertEqual(loadgen.result_path(args, run, True), "out/r.json")
        self.assertEqual(loadgen.result_path(args, run, False), "out/r-8.json")

    def test_what_is_no_file_is_not_replaced_by_one(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(os.path.join(folder, "pipe"))
            why = loadgen.save(folder, "pipe", {})
            self.assertIn("pipe could not be written: it is a folder or a device", why)
            self.assertEqual(os.listdir(folder), ["pipe"])
            self.assertFalse(os.path.isfile(os.path.join(folder, "pipe")))

    def test_a_pasted_command_names_its_result_as_vllm_does(self) -> None:
        words = "vllm bench serve --port 1 --save-result --result-dir d --result-filename f.json"
        args = loadgen.parse_args(words.split())
        run = {"label": "inf", "rate_rps": None, "concurrency": None}
        self.assertEqual(loadgen.result_path(args, run, True), os.path.join("d", "f.json"))
        self.assertEqual((args.saves, args.lists), (True, False))

    def test_a_role_chunk_is_vllms_first_and_nobody_elses(self) -> None:
        reply = loadgen.Reply()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        reply.feed(head, 1)
        for at, delta in ((10, {"role": "assistant", "content": ""}), (20, {"content": "a"}),
                          (30, {"content": "b"}), (40, {})):
            event = {"choices": [{"index": 0, "delta": delta}]}
            reply.feed(f"data: {json.dumps(event)}\n\n".encode(), at)
        self.assertEqual((reply.opened_ns, list(reply.event_ns), reply.closed_ns),
                         (10, [20, 30], 40))

    def test_the_table_of_compat_says_why(self) -> None:
        with engine() as url, tempfile.TemporaryDirectory() as folder:
            code, text, errors = command(
                url, "--rate", "100", "--num-requests", "20", "--output-len", "5", "--warmup", "0",
                "--endpoint", "chat", "--compat", "--json", "--save-result",
                os.path.join(folder, "r.json"))
            self.assertIn(code, (0, 1), errors)
            summary, saved = json.loads(text), load(folder, "r.json")
        run = summary["runs"][0]
        self.assertEqual(run["compat"]["vllm"]["ttft_s"]["p99"], saved["p99_ttft_ms"] * MS)
        self.assertEqual(len(saved["itls"][0]), 5)  # the role chunk's gap is one of vLLM's
        summary = {**summary, "runs": [{**run, "reasons": [], "warnings": []}]}
        said = loadgen.render(summary)
        self.assertIn("COMPAT", said)
        for line in loadgen.COMPAT_WHY:
            self.assertIn(line, said)
        self.assertEqual(said.split("\n")[-1].strip(), loadgen.COMPAT_WHY[-1])  # no fact after it


class KeptRuns(unittest.TestCase):
    """requests.jsonl holds what a summary needs."""

    def test_what_a_killed_process_could_not_summarise_is_from_its_records(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            command("--simulate", "--sweep", "20,30", "--num-requests", "30", "--out", out)
            whole = load(out, "summary.json")
            self.assertEqual(loadgen.kept_summary(out)["runs"],
                             loadgen.with_infinities(whole["runs"]))
            with open(os.path.join(out, "summary.json"), "w", encoding="utf-8") as file:
                json.dump({**whole, "runs": whole["runs"][:1]}, file)  # as it was after the first
            path = os.path.join(out, "requests.jsonl")
            with open(path, encoding="utf-8") as file:
                lines = file.readlines()
            with open(path, "w", encoding="utf-8") as file:
                file.writelines([*lines[:40], lines[40][:50]])  # torn
            first, second = loadgen.kept_summary(out)["runs"]
            self.assertEqual(first, loadgen.with_infinities(whole["runs"][0]))
            self.assertEqual(second["completed"], 10)
            n = 10 + second["failures"]["cancelled"]
            self.assertIn(f"INTERRUPTED: {n} of 30 requests", second["reasons"][0])
            os.remove(os.path.join(out, "summary.json"))
            self.assertEqual([run["completed"] for run in loadgen.kept_summary(out)["runs"]],
                             [30, 10])
            with open(path, "w", encoding="utf-8"):
                pass
            with self.assertRaisesRegex(UserError, "before any request had ended"):
                loadgen.kept_summary(out)

    def killed(self, kept: int, *argv: str) -> Dict[str, Any]:
        """The report of a simulated run that was killed after so many lines; -1: after the end."""
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            self.assertEqual(command("--simulate", "--seed", "3", *argv, "--out", out)[0], 0)
            os.remove(os.path.join(out, "summary.json"))
            path = os.path.join(out, "requests.jsonl")
            with open(path, encoding="utf-8") as file:
                lines = file.readlines()
            self.rows = [json.loads(line) for line in lines[:kept if kept >= 0 else None]]
            self.plan = load(out, "plan.json")
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(lines[:kept if kept >= 0 else None])
            code, self.text, errors = command("--report", out)
            self.assertEqual(code, 0, errors)
            return load(out, "summary.json")

    def test_what_was_in_flight_at_the_kill_is_cancelled(self) -> None:
        slo = ("--slo-e2e-ms", "1e6")
        run = self.killed(60, "--rate", "20", "--num-requests", "200", *slo)["runs"][0]
        due = [due_s for due_s in self.plan["arrivals"][0]
               if due_s <= max(row["end_s"] for row in self.rows)]
        self.assertGreater(len(due), 70)
        self.assertEqual((run["completed"], run["failures"]), (60, {"cancelled": len(due) - 60}))
        self.assertAlmostEqual(run["offered_rate_rps"], (len(due) - 1) / (due[-1] - due[0]))
        self.assertAlmostEqual(run["attainment"], 60 / len(due))
        self.assertNotIn("COST", self.text)
        for argv, n in ((("--concurrency", "8"), 8), (("--concurrency", "5", "--turns", "3"), 5)):
            run = self.killed(40, *argv, "--num-requests", "200", *slo)["runs"][0]
            self.assertLessEqual(run["failures"]["cancelled"], n)
            self.assertGreaterEqual(run["failures"]["cancelled"], n - 1)  # one may be to send
        run = self.killed(60, "--rate", "20", "--duration", "30", "--ramp", "1", *slo)["runs"][0]
        self.assertGreater(run["failures"]["cancelled"], 10)
        self.assertIn("of 30.0 s", run["reasons"][0])

    def test_only_a_run_that_was_killed_is_interrupted(self) -> None:
        argv = "--sweep", "20,30", "--num-requests", "30"
        for kept, told in ((60, [False, False]), (50, [False, True])):
            summary = self.killed(kept, *argv)
            self.assertEqual([run["client"]["interrupted"] for run in summary["runs"]], told)
        self.assertEqual(len(self.killed(30, *argv)["runs"]), 1)
        self.assertIn("1 further rate was not run", self.text)
        for argv in (("--rate", "20", "--duration", "5"), ("--concurrency", "5", "--duration", "5"),
                     ("--concurrency", "5", "--turns", "3", "--num-requests", "40")):
            self.killed(-1, *argv)
            self.assertNotIn("INTERRUPTED", self.text)

    def test_a_search_and_what_follows_it_are_reported_after_a_kill(self) -> None:
        summary = self.killed(-1, "--sweep", "auto", "--slo-e2e-ms", "2000",
                              "--max-requests", "1200")
        self.assertEqual(len(summary["runs"]), len(summary["plan"]["rates"]))
        self.assertNotIn("INTERRUPTED", self.text)
        self.assertIn("GOODPUT  not found: the search had not ended", self.text)
        self.assertNotIn("KNEE", self.text)

    def test_every_file_that_could_not_be_written_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            gone = os.path.join(folder, "gone")
            with mock.patch.object(loadgen, "page", lambda summary: ""):
                why = loadgen.save_report(gone, {})
        self.assertIn("summary.json could not be written", why)
        self.assertIn("report.html could not be written", why)
        self.assertEqual(loadgen.unsaved_line("a", why, why), f"a; {why}")

    def test_a_line_gives_its_record_back(self) -> None:
        for made in (record(3, 1.5, 2.25, (10.0, 12.5, 17.001), opened_ns=9_000_000,
                            closed_ns=18_000_000, cached_tokens=4, itl_max_s=0.004501),
                     record(4, 5, 6, (), kind="refused"), record(5, 5, 6, (9, 11), kind="stalled")):
            row = json.loads(json.dumps(made.row(0)))
            self.assertEqual(loadgen.record_of(row).row(0), row)

    def test_the_clock_of_the_run_does_not_matter(self) -> None:
        made = record(3, 1.5, 2.25, (10.0, 12.5))
        for name in ("due_ns", "sent_ns", "first_ns", "last_ns", "ready_ns", "answer_ns", "end_ns"):
            setattr(made, name, getattr(made, name) + 7_000_000_123)
        made.event_ns = array.array("q", (t + 7_000_000_123 for t in made.event_ns))
        self.assertEqual(made.row(7_000_000_123), record(3, 1.5, 2.25, (10.0, 12.5)).row(0))


def noisy(seed: int, n: int, slower_ms: float = 0.0, failures: int = 0) -> List[Record]:
    """A run of n requests whose latencies scatter; the same ids and dues for every seed."""
    rng, made = random.Random(seed), []
    for i in range(n):
        first = 100 * i + 50 + 10 * rng.random() + slower_ms
        events = list(itertools.accumulate((5 + rng.random() for _ in range(4)), initial=first))
        made.append(record(i, 100 * i, None, () if i < failures else events,
                           kind="refused" if i < failures else "ok"))
    return made


class DifferenceOfTwoRuns(unittest.TestCase):
    """--diff: pairs, intervals, and no difference where none is shown."""

    def setUp(self) -> None:
        patch = mock.patch.object(loadgen, "RESAMPLES", 200)
        patch.start()
        self.addCleanup(patch.stop)

    def answers(self, a: List[Record], b: List[Record], slo: Slo = NO_SLO) -> Dict[str, str]:
        return {row["name"]: row["answer"] for row in loadgen.compare(a, b, slo, 10.0)["metrics"]}

    def test_simulated_runs_are_called_so(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            runs = [os.path.join(folder, name) for name in "ab"]
            for out in runs:
                command("--simulate", "--rate", "30", "--num-requests", "20", "--out", out)
            code, said, errors = command("--diff", *runs)
        self.assertEqual(code, 0, errors)
        self.assertIn("A SIMULATED, B SIMULATED", said)
        for word in ("VALID", "None"):
            self.assertNotIn(word, said)

    def test_each_class_of_a_mix_is_judged_by_its_own_slo(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            mix, runs = os.path.join(folder, "mix"), [os.path.join(folder, name) for name in "ab"]
            with open(mix, "w", encoding="utf-8") as file:
                json.dump({"a": {"rate": 20, "slo_ttft_ms": 9000}, "b": {"rate": 20,
                                                                        "slo_ttft_ms": 1}}, file)
            for out in runs:
                command("--simulate", "--mix", mix, "--num-requests", "40", "--out", out)
            own = load(runs[0], "summary.json")["runs"][0]["attainment"]
            code, said, errors = command("--diff", *runs, "--json")
        self.assertEqual(code, 0, errors)
        rows = {row["name"]: row for row in json.loads(said)["runs"][0]["metrics"]}
        self.assertEqual(rows["attainment"]["a"], own)
        self.assertTrue(0.3 < own < 0.7, own)

    def test_two_runs_alike_show_no_difference(self) -> None:
        wrong = 0
        for seed in range(12):
            found = self.answers(noisy(seed, 150), noisy(100 + seed, 150))
            wrong += found["TTFT p50"] != "no difference shown"
        self.assertLessEqual(wrong, 3)  # 5% each: four or more of twelve happen once in 500

    def test_a_slower_run_is_told_with_how_much(self) -> None:
        found = loadgen.compare(noisy(1, 150), noisy(2, 150, 8.0), NO_SLO, 10.0)["metrics"]
        row = next(row for row in found if row["name"] == "TTFT p50")
        self.assertEqual(row["answer"], "B higher")
        self.assertTrue(0 < row["low"] < 0.008 < row["high"] < 0.012, row)
        itl = next(row for row in found if row["name"] == "ITL p50")
        self.assertEqual(itl["answer"], "no difference shown")
        back = self.answers(noisy(2, 150, 8.0), noisy(1, 150))
        self.assertEqual(back["TTFT p50"], "B lower")

    def test_a_percentile_that_the_sample_cannot_hold_is_not_judged(self) -> None:
        few = self.answers(noisy(1, 150), noisy(2, 150, 50.0))
        self.assertEqual(few["TTFT p99"], "not enough requests to tell")
        many = self.answers(noisy(1, 500), noisy(2, 500, 50.0))
        self.assertEqual(many["TTFT p99"], "B higher")
        none = loadgen.compare([], [], NO_SLO, 10.0)
        self.assertEqual({row["answer"] for row in none["metrics"]},
                         {"not enough requests to tell"})

    def test_a_latency_that_one_request_has_tells_nothing(self) -> None:
        a, b = noisy(1, 150), noisy(2, 150)
        for run in (a, b):
            for made in run[1:]:
                made.n_out = 1  # so that one request alone has a TPOT
        self.assertEqual(self.answers(a, b)["TPOT p50"], "not enough requests to tell")

    def test_runs_that_meet_the_slo_alike_leave_room_for_chance(self) -> None:
        slo = Slo(1.0, None, None, 0.99)
        found = loadgen.compare(noisy(1, 150), noisy(2, 150), slo, 10.0)["metrics"]
        row = next(row for row in found if row["name"] == "attainment")
        self.assertEqual((row["a"], row["b"], row["answer"]), (1.0, 1.0, "no difference shown"))
        self.assertTrue(row["low"] < -0.005 and row["high"] > 0.005, row)

    def test_failures_count_as_infinitely_late(self) -> None:
        slo = Slo(1.0, None, None, 0.99)
        mixed = noisy(2, 150)
        for made in mixed[::3]:
            made.cls = "refused"
        found = loadgen.compare(noisy(1, 150), mixed, slo, 10.0)["metrics"]
        rows = {row["name"]: row for row in found}
        self.assertEqual(rows["attainment"]["answer"], "B lower")
        self.assertEqual(rows["TTFT p99"]["b"], math.inf)
        both = loadgen.compare(mixed, mixed, slo, 10.0)["metrics"]
        self.assertEqual({row["name"]: row["difference"] for row in both}["TTFT p99"], 0.0)

    def test_requests_are_paired_by_id(self) -> None:
        a, b = noisy(1, 60), noisy(2, 60)
        self.assertEqual(loadgen.compare(a[5:], b[:50], NO_SLO, 10.0)["paired"], 45)

    def test_equal_values_do_not_pass_for_memory(self) -> None:
        rng = random.Random(5)
        coins = [float(rng.random() < 0.9) for _ in range(400)]
        self.assertLess(loadgen.autocorrelation_factor(coins), 1.5)
        self.assertGreater(loadgen.autocorrelation_factor([0.0] * 200 + [1.0] * 200), 50)

    def test_two_folders_of_one_plan_are_compared_and_others_named(self) -> None:
        base = ("--rate", "100", "--num-requests", "40", "--output-len", "4", "--warmup", "0")
        with engine() as url, tempfile.TemporaryDirectory() as folder:
            a, b, c = (os.path.join(folder, name) for name in "abc")
            for out, seed in ((a, "1"), (b, "1"), (c, "2")):
                command(url, *base, "--seed", seed, "--out", out)
            code, text, errors = command("--diff", a, b, "--json", "--slo-ttft-ms", "1000")
            self.assertEqual(code, 0, errors)
            report = json.loads(text)
            self.assertEqual(report["runs"][0]["paired"], 40)
            self.assertIn("attainment", [row["name"] for row in report["runs"][0]["metrics"]])
            code, text, errors = command("--diff", a, b)
            self.assertEqual((code, errors), (0, ""))
            self.assertIn("RATE 100: 40 requests paired by id", text)
            code, _, errors = command("--diff", a, c)
            self.assertEqual(code, 2)
            self.assertIn("seed 1 against 2", errors)
            os.remove(os.path.join(b, "summary.json"))
            code, _, errors = command("--diff", a, b)
            self.assertEqual((code, errors.count("\n")), (2, 1))


class TheGate(unittest.TestCase):
    """--gate: exit 3 below the target, however the load is given."""

    def test_it_closes_in_every_mode(self) -> None:
        base = ("--output-len", "3", "--warmup", "0", "--gate", "--slo-e2e-ms", "0.01")
        modes = (("--rate", "50", "--num-requests", "10"), ("--concurrency", "2", "--num-requests",
                 "10"), ("--sweep", "50,60", "--num-requests", "8"), ("--rate", "50", "--duration",
                 "0.3", "--ramp", "0.1", "--json"))
        with engine() as url:
            for mode in modes:
                self.ends(3, url, *base, *mode)
            self.ends(0, url, *base[:-1], "60000", *modes[0])

    def test_it_closes_on_merged_shards(self) -> None:
        with engine() as url, tempfile.TemporaryDirectory() as out:
            for shard in ("0/2", "1/2"):
                self.ends(0, url, "--output-len", "3", "--warmup", "0", "--rate", "50",
                          "--num-requests", "10", "--out", out, "--shard", shard)
            for limit, wanted in (("0.01", 3), ("60000", 0)):
                self.ends(wanted, "--merge", out, "--gate", "--slo-e2e-ms", limit)

    def ends(self, wanted: int, *argv: str) -> None:
        """A command line's exit code; 1 too where a busy machine has spoilt the run."""
        code, said, errors = command(*argv)
        self.assertEqual(code, 1 if "CLIENT-LIMITED" in said else wanted, (argv, said, errors))

    def test_a_run_that_is_to_be_trusted_and_misses_is_3(self) -> None:
        args = argparse.Namespace(gate=True, slo_attainment=0.9)
        good = {"client": {"interrupted": False}, "completed": 5, "verdict": "VALID",
                "attainment": 0.95}
        for more, wanted in (({}, 0), ({"attainment": 0.89}, 3), ({"attainment": None}, 3),
                             ({"verdict": "UNSTABLE", "attainment": 0.1}, 3),
                             ({"verdict": "CLIENT-LIMITED", "attainment": 0.1}, 1)):
            summary = {"unsaved": "", "runs": [good, {**good, **more}]}
            self.assertEqual(loadgen.exit_code(args, summary), wanted, more)


class TheSelfTest(unittest.TestCase):
    """Errors against the engine's own times, and what later runs make of them."""

    def level(self, right: bool, kept_up: bool = True, size: float = 1.0) -> Dict[str, Any]:
        return {"right": right, "engine_kept_up": kept_up, "streams": size, "reasons": [],
                "events_per_s": 10 * size, "requests_per_s": 2 * size}

    def test_errors_are_the_differences_of_stamps(self) -> None:
        made = [record(0, 0, 1, (10, 30, 51)), record(1, 0, 1, (10,), kind="refused")]
        truth = {"loadgen-0-0": [9_990_000, 29_000_000, 50_990_000]}
        first, gaps = loadgen.stamp_errors(made, truth)
        self.assertAlmostEqual(first[0], 0.01 * MS)
        self.assertEqual(first[1], math.inf)
        for found, wanted in zip(gaps, (0.99 * MS, 0.99 * MS)):
            self.assertAlmostEqual(found, wanted)

    def test_events_that_do_not_match_are_wrong_without_bound(self) -> None:
        made = [record(0, 0, 1, (10, 30, 51))]
        self.assertEqual(loadgen.stamp_errors(made, {"loadgen-0-0": [1, 2]})[0], [math.inf])

    def climb(self, levels: Sequence[Dict[str, Any]]) -> Tuple[List[Any], str]:
        answers = iter(levels)
        return loadgen.ladder([(1.0, 1, 1)] * 3, lambda *level: next(answers), lambda found: None)

    def test_a_level_counts_unless_it_is_wrong_twice(self) -> None:
        yes, no = self.level(True), self.level(False)
        self.assertEqual(self.climb([yes, no, yes, yes])[0], [yes] * 3)
        right, why = self.climb([yes, no, no])
        self.assertEqual((right, why), ([yes], "the client's times were off beyond that"))

    def test_an_engine_at_its_own_limit_proves_nothing_more(self) -> None:
        right, why = self.climb([self.level(True), self.level(True, kept_up=False)])
        self.assertEqual(len(right), 1)
        self.assertIn("own engine", why)

    def kept(self) -> None:
        args = argparse.Namespace(json=False, workers=1)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = loadgen.selftest_verdict(args, [self.level(True, size=8.0)],
                                            [self.level(True, size=1.0)], ("a", "b"))
        self.assertEqual(code, 0)
        self.assertIn("up to 8 streams and 80 events/s", said.getvalue())

    def test_a_run_past_it_is_client_limited_and_one_within_is_not(self) -> None:
        self.kept()
        self.addCleanup(os.remove, loadgen.selftest_path())
        for streams, verdict in ((6, "VALID"), (20, "CLIENT-LIMITED")):
            made = [record(i, 0, 1, (10, 1010)) for i in range(streams)]
            run = outcome(made)._replace(health=[loadgen.ClientHealth()])
            summary = {"plan": {"rates": [1]}, "slo": NO_SLO._asdict(), "runs": [
                {"verdict": "VALID", "reasons": [], "warnings": [], "span_s": 1.0}]}
            loadgen.after_run(argparse.Namespace(compat=False, saves=False), summary, run)
            self.assertEqual(summary["runs"][0]["verdict"], verdict)
        self.assertIn("20 streams open at once, past the 8", summary["runs"][0]["reasons"][0])

    def test_one_for_other_workers_or_a_broken_file_says_nothing(self) -> None:
        self.kept()
        self.addCleanup(os.remove, loadgen.selftest_path())
        one, two = (outcome([])._replace(health=[loadgen.ClientHealth()] * n) for n in (1, 2))
        self.assertEqual(loadgen.known_selftest(one)["streams"], 8.0)
        self.assertEqual(loadgen.known_selftest(two), {})
        with open(loadgen.selftest_path(), "w", encoding="utf-8") as file:
            file.write("{")
        self.assertEqual(loadgen.known_selftest(one), {})

    def test_nothing_right_is_exit_code_1_and_not_kept(self) -> None:
        args = argparse.Namespace(json=False, workers=1)
        with contextlib.redirect_stderr(io.StringIO()):
            code = loadgen.selftest_verdict(args, [], [self.level(True)], ("a", "b"))
        self.assertEqual((code, os.path.exists(loadgen.selftest_path())), (1, False))

    def test_the_engine_tells_when_it_sent_each_token(self) -> None:
        with engine() as url:
            own = loadgen.parse_args([url, "--rate", "1"])
            target = loadgen.target_of(own, url)._replace(model=loadgen.MODEL)
            running = loadgen.Running(target, loadgen.wiring_of(own, target), 1,
                                      loadgen.Journal(None), lambda: False, 1, True)
            found = loadgen.trial(running, 40.0, 30, 5)
        self.assertLess(found["ttft_error_p99_s"], 10.0)  # every request was found in the truth
        self.assertLess(found["itl_error_p99_s"], 10.0)
        self.assertFalse(math.isinf(found["ttft_error_p99_s"]))

    def test_the_times_that_the_engine_keeps_are_bounded(self) -> None:
        server = loadgen.MockServer(loadgen.MOCK)
        self.addCleanup(server.selector.close)
        self.addCleanup(server.listener.close)
        self.assertEqual(server.events_left, 0)
        loadgen.GETS["/truth/events"](server)
        self.assertEqual(server.events_left, loadgen.TRUE_EVENTS_MAX)
        loadgen.GETS["/truth/reset"](server)
        self.assertEqual(server.events_left, 0)

    def test_it_goes_alone(self) -> None:
        for words in (["--selftest", "http://h"], ["--merge", "a", "--selftest"],
                      ["--diff", "a", "b", "--compat"]):
            with self.assertRaises(UserError, msg=str(words)):
                loadgen.parse_args(words)


if __name__ == "__main__":
    unittest.main()
