"""loadgen.py's real traffic: traces, the customer's prompts, several classes, sessions."""

import contextlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock
from typing import Any, Dict, Iterator, List, Sequence, Tuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen
from tests import LOADGEN

SCRIPT = os.path.abspath(loadgen.__file__)
TRACES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "traces")
AZURE, MOONCAKE, BURST, TIMED, PLAIN = (os.path.join(TRACES, name) for name in (
    "azure_conv_head.csv", "mooncake_head.jsonl", "burstgpt.csv", "timed_trace.jsonl",
    "plain.csv"))
S = 1_000_000_000  # ns
WHOLE = (0.0, float("inf"))
QUICK = loadgen.Profile(weights_s=0.001, sequence_s=0.0, prefill_s_per_token=1e-7,
                        max_num_batched_tokens=65536, max_model_len=65536)


def read(path: str, window: Tuple[float, float] = WHOLE, speed: float = 1.0, most: int = 10**6,
         duration: float = float("inf"), given: Tuple[int, int] = (0, 0)) -> loadgen.Trace:
    return loadgen.read_trace(path, window, speed, most, duration, given)


def keyed(times: Sequence[int], block: int) -> str:
    """A JSONL trace whose hash ids stand for so many tokens."""
    return "".join(json.dumps({"timestamp": time, "input_length": 3 * block, "output_length": 5,
                               "hash_ids": [3 * n, 3 * n + 1, 3 * n + 2]}) + "\n"
                   for n, time in enumerate(times))


@contextlib.contextmanager
def file_of(text: str, name: str = "file") -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        yield path


def args_of(line: str) -> Tuple[Any, str]:
    """(the flags, stderr) of a command line for a target that is never asked."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return loadgen.parse_args(f"http://127.0.0.1:1 {line}".split()), said.getvalue()


def plan_of(line: str) -> loadgen.Plan:
    args, _ = args_of(line)
    return loadgen.make_plan(loadgen.loads_of(args)[0], loadgen.work_of(args), args.seed, 1.0)


def prompts_of(plan: loadgen.Plan, salt: int = 9, unique: bool = True,
               calibration: Any = loadgen.ONE_A_WORD) -> loadgen.Prompts:
    return loadgen.Prompts(plan.seed, salt, unique, calibration, plan.work)


def common(one: Sequence[Any], two: Sequence[Any]) -> int:
    """How many items two sequences share at their start."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two)))


class Listening(loadgen.MockServer):
    """The mock engine, which also keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(QUICK)
        self.bodies: List[Dict[str, Any]] = []

    def generate(self, conn: Any, head: Any, body: bytearray) -> None:
        self.bodies.append(json.loads(body))
        super().generate(conn, head, body)


Rows = List[Dict[str, Any]]


def measure(line: str) -> Tuple[Any, Rows, Rows, str]:
    """(summary, requests, bodies that the engine got, all that was printed) of a run."""
    server = Listening()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            done = subprocess.run(
                [*LOADGEN, f"http://127.0.0.1:{server.port}", *line.split(), "--out", out],
                capture_output=True, text=True, timeout=60, check=False)
            if done.returncode > 1:  # 1: a busy machine sent late, which is no matter here
                raise AssertionError(done.stdout + done.stderr)
            with open(os.path.join(out, "summary.json"), encoding="utf-8") as file:
                summary = json.load(file)
            with open(os.path.join(out, "requests.jsonl"), encoding="utf-8") as file:
                rows = sorted(map(json.loads, file), key=lambda row: row["id"])
    finally:
        server.stopping = True
        thread.join()
        server.listener.close()
        server.selector.close()
    return summary, rows, server.bodies, done.stdout + done.stderr


class Traces(unittest.TestCase):
    def test_azure_keeps_its_seven_digits(self) -> None:
        trace = read(AZURE)
        self.assertEqual(len(trace.requests), 40)
        self.assertEqual(trace.about["format"], "Azure CSV")
        self.assertEqual([round(p.due_s * 10**7) for p in trace.requests[:4]],
                         [0, 43_145_790, 45_418_770, 47_104_270])
        self.assertEqual([(p.n_in, p.n_out) for p in trace.requests[:2]], [(374, 44), (396, 109)])
        self.assertEqual(trace.notes, [])

    def test_dates_may_have_a_zone_and_cross_midnight(self) -> None:
        with file_of("TIMESTAMP,ContextTokens,GeneratedTokens\n"
                     "2024-05-11 23:59:59.9999999+00:00,5,6\n"
                     "2024-05-12T01:30:00.0000001+01:30,7,8\n") as path:
            self.assertEqual(round(read(path).requests[1].due_s * 10**7), 2)

    def test_mooncake_is_in_milliseconds_with_blocks_of_512(self) -> None:
        trace = read(MOONCAKE)
        self.assertEqual((trace.block, trace.about["unit"]), (512, "milliseconds"))
        self.assertEqual(trace.requests[0].due_s, 0.0)
        self.assertEqual(trace.requests[-1].due_s, 12.0)
        self.assertIn("milliseconds", trace.notes[0])

    def test_timed_trace_is_in_seconds_with_blocks_of_16(self) -> None:
        trace = read(TIMED)
        self.assertEqual((trace.block, trace.about["unit"]), (16, "seconds"))
        self.assertEqual([round(p.due_s, 9) for p in trace.requests], [0.0, 0.386, 2.136])

    def test_burstgpt_is_in_seconds_and_its_failures_are_left_out(self) -> None:
        trace = read(BURST)
        self.assertEqual([p.due_s for p in trace.requests], [0.0, 40.0, 113.0, 115.0])
        self.assertEqual([(p.n_in, p.n_out) for p in trace.requests][-1], (1360, 647))
        self.assertIn("line 5", trace.notes[0])

    def test_a_plain_csv_needs_no_more_than_three_columns(self) -> None:
        self.assertEqual([(p.due_s, p.n_in, p.n_out) for p in read(PLAIN).requests],
                         [(0.0, 100, 10), (0.25, 120, 12), (1.125, 90, 9)])

    def test_units_are_told_by_name_by_size_and_by_gaps(self) -> None:
        for field, times, apart in (
                ("arrival_ms", "0 5", 0.005), ("timestamp", "0 100", 0.1),
                ("timestamp", "0 2", 2.0), ("timestamp", "0 100.5", 100.5),
                ("timestamp", "1753780607550317897 1753780608550317897", 1.0),
                ("timestamp", "1753780607550 1753780608050", 0.5),
                ("timestamp", "1753780607 1753780667", 60.0)):
            with self.subTest(field=field, times=times), file_of(
                    f"{field},input_tokens,output_tokens\n" + "".join(
                        f"{time},5,6\n" for time in times.split())) as path:
                self.assertEqual(read(path).requests[1].due_s, apart)

    def test_speed_window_number_and_duration_cut_it(self) -> None:
        self.assertEqual([p.due_s for p in read(BURST, speed=10).requests], [0.0, 4.0, 11.3, 11.5])
        window = read(BURST, (30.0, 114.0)).requests
        self.assertEqual([(p.id, p.due_s) for p in window], [(0, 10.0), (1, 83.0)])
        self.assertEqual(len(read(BURST, most=2).requests), 2)
        self.assertEqual(len(read(BURST, speed=10, duration=11.4).requests), 3)

    def test_what_is_wrong_with_it_is_said_with_its_line(self) -> None:
        plain = "arrival_s,input_tokens,output_tokens\n0,5,6\n1,5,6\n2,5,6\n"
        unsaid = plain.replace("arrival_s", "timestamp")
        keyed = '{"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": %s}\n'
        for text, parts in (
                (plain + "0.5,5,6\n", ("line 5", "back in time", "line 4")),
                (plain + "-1,5,6\n", ("line 5", "negative")),
                (plain + ",5,6\n", ("line 5", "arrival_s is missing")),
                (plain + "3,,6\n", ("line 5", "input_tokens is missing")),
                (plain + "3,5\n", ("line 5", "output_tokens is missing")),
                (plain + "3,5,-6\n", ("line 5", "no number of tokens")),
                (plain + "3,5.5,6\n", ("line 5", "no number of tokens")),
                (plain + "x,5,6\n", ("line 5", "no time")),
                (plain + "nan,5,6\n", ("line 5", "no time")),
                (plain + "2023-11-16 18:15:46,5,6\n", ("line 5", "units are mixed")),
                (unsaid + "3000,5,6\n4000,5,6\n5000,5,6\n", ("line 5", "units are mixed")),
                ("arrival_s,tokens\n0,5\n", ("line 2", "input length")), ("", ("empty",)),
                (plain[:plain.index("0,")], ("empty",)),
                ("{\n", ("line 1", "JSON")), ('{"timestamp": 0}\n', ("line 1", "input length")),
                (keyed % "[1]" + '{"timestamp": 1, "input_length": 5}\n',
                 ("line 2", "output_length is missing")),
                (keyed % '"x"', ("line 1", "hash_ids")),
                (keyed % list(range(99)), ("line 1", "block size"))):
            with self.subTest(text=text[-60:]), file_of(text) as path:
                with self.assertRaises(loadgen.UserError) as caught:
                    read(path)
                for part in parts:
                    self.assertIn(part, str(caught.exception))

    def test_lines_a_moment_out_of_order_are_sorted_and_said(self) -> None:
        with file_of("arrival_s,input_tokens,output_tokens\n0,1,1\n2.5,2,1\n2.1,3,1\n9,4,1\n"
                     ) as path:
            trace = read(path)
        self.assertEqual([p.n_in for p in trace.requests], [1, 3, 2, 4])
        self.assertIn("line 4", trace.notes[0])

    def test_a_pause_of_the_night_is_no_change_of_units(self) -> None:
        with file_of("arrival_s,input_tokens,output_tokens\n" + "".join(
                f"{t},5,6\n" for t in (1, 2, 3, 4, 30_000, 30_001, 30_002))) as path:
            self.assertEqual(len(read(path).requests), 7)

    def test_pauses_are_no_change_of_units_where_the_unit_is_stated(self) -> None:
        plain = "arrival_s,input_tokens,output_tokens\n"
        for text in (plain + "".join(f"{t},5,6\n" for t in (0, .001, .002, .003, 5, 10, 15)),
                     "Timestamp,Model,Request tokens,Response tokens\n" + "".join(
                         f"{t},m,5,6\n" for t in (0, 1, 1, 2, 300, 340)),
                     keyed((0, 1, 2, 3, 4, 3000, 6000, 9000), 512)):
            with self.subTest(text=text[:60]), file_of(text) as path:
                self.assertEqual(len(read(path).requests), text.count("\n") - (text[0] != "{"))

    def test_a_stated_unit_overrides_what_looks_mixed(self) -> None:
        text = "timestamp,input_tokens,output_tokens\n" + "".join(
            f"{t},5,6\n" for t in (0, 1, 2, 3000, 4000, 5000))
        with file_of(text) as path:
            with self.assertRaisesRegex(loadgen.UserError, "units are mixed; --trace-unit"):
                args_of(f"--trace {path}")
            args, said = args_of(f"--trace {path} --trace-unit ms")
        self.assertEqual((args.trace_read.requests[-1].due_s, said), (5.0, ""))

    def test_the_formats_unit_is_taken_before_any_guess(self) -> None:
        for times, block, apart in (((172_800_000, 172_800_030), 512, 0.03),
                                    ((0, 30, 60), 16, 30.0), ((0, 10, 20), 16, 10.0)):
            with self.subTest(times=times), file_of(keyed(times, block)) as path:
                trace = read(path)
                self.assertAlmostEqual(trace.requests[1].due_s, apart)
                self.assertIn("--trace-unit", trace.notes[0])

    def test_the_unit_and_the_block_can_be_stated_as_vllm_does(self) -> None:
        with file_of(keyed((0, 10, 20), 16)) as path:
            for flags in ("--trace-unit ms", "--timed-trace-sec-multiplier 0.001"):
                args, said = args_of(f"--trace {path} {flags} --timed-trace-chunk-hash-size 16")
                self.assertEqual((args.trace_read.requests[-1].due_s, said), (0.02, ""))
            with self.assertRaisesRegex(loadgen.UserError, "--trace-block 512"):
                args_of(f"--trace {path} --trace-block 512")
        for line, why in ((f"--trace {AZURE} --trace-unit ms", "dates"),
                          (f"--trace {PLAIN} --trace-unit h", "not a number"),
                          ("--rate 1 --trace-unit s", "goes with --trace")):
            with self.assertRaisesRegex(loadgen.UserError, why):
                args_of(line)

    def test_what_a_cut_leaves_out_or_sorts_is_said_of_the_cut(self) -> None:
        text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
            f"2024-05-11 00:{n // 60:02}:{n % 60:02}.5,5,{n % 10}\n" for n in range(1000))
        with file_of(text) as path:
            trace = read(path, (99.0, 399.0))
        self.assertEqual(len(trace.requests), 270)
        self.assertIn("30 requests of 0 tokens left out (the first on line 102)", trace.notes[0])
        with file_of("arrival_s,input_tokens,output_tokens\n0,1,1\n2.5,2,1\n2.1,3,1\n9,4,1\n"
                     ) as path:
            self.assertIn("1 lines are out of order", read(path, most=2).notes[0])
            self.assertEqual(read(path, most=1).notes, [])

    def test_a_csv_without_a_header_is_said_to_need_one(self) -> None:
        for text in ("0,5,6\n", "0,5,6\n1,5,6\n", "2024-05-11 23:59:59,5,6\n"):
            with file_of(text) as path, self.assertRaisesRegex(loadgen.UserError, "header"):
                read(path)

    def test_a_window_without_requests_is_said(self) -> None:
        with self.assertRaisesRegex(loadgen.UserError, "--trace-window"):
            read(PLAIN, (100.0, 200.0))


class SharedPrefixes(unittest.TestCase):
    def test_equal_hash_ids_are_equal_tokens_of_the_right_number(self) -> None:
        plan = plan_of(f"--trace {MOONCAKE}")
        prompts = prompts_of(plan)
        one, two = (prompts.token_ids(p, 0) for p in plan.requests[:2])
        self.assertEqual((len(one), len(two)), (6758, 7322))
        self.assertEqual(common(one, two), 512)
        for p in plan.requests:
            self.assertEqual(len(prompts.token_ids(p, 0)), p.n_in)

    def test_a_partial_last_block_is_the_start_of_the_whole_one(self) -> None:
        plan = plan_of(f"--trace {TIMED}")
        first, second, third = (prompts_of(plan).token_ids(p, 0) for p in plan.requests)
        self.assertEqual(len(first), 40)
        self.assertEqual(common(first, third), 40)
        self.assertEqual(common(second, third), 32)

    def test_in_words_too_however_many_tokens_a_word_has(self) -> None:
        plan = plan_of(f"--trace {MOONCAKE} --endpoint chat")
        calibration = loadgen.Calibration(1.25, 10.0, "")
        texts = [prompts_of(plan, calibration=calibration).text(p, 0).split()
                 for p in plan.requests[:2]]
        self.assertEqual([len(text) for text in texts], [round((n - 10) / 1.25)
                                                         for n in (6758, 7322)])
        self.assertEqual(common(*texts), round(512 / 1.25))

    def test_another_run_finds_none_of_them_in_the_cache(self) -> None:
        plan = plan_of(f"--trace {MOONCAKE}")
        first = plan.requests[0]
        runs = [prompts_of(plan, salt).token_ids(first, 0) for salt in (1, 2)]
        self.assertLess(common(*runs), 4)
        same = [prompts_of(plan, salt, unique=False).token_ids(first, 0) for salt in (1, 2)]
        self.assertEqual(*same)

    def test_the_engine_finds_what_the_trace_shares(self) -> None:
        plan = plan_of(f"--trace {MOONCAKE}")
        engine = loadgen.Engine(QUICK._replace(num_blocks=10**6, max_model_len=10**6))
        for p in plan.requests:
            engine.submit(p.id, p.n_in, 1, loadgen.prefix_keys(p, plan.work, 16, 0))
            while engine.step()[0]:
                pass
        said = read(MOONCAKE).about["shared_share"]
        hit = engine.prefix_hit_tokens / engine.prefix_query_tokens
        self.assertAlmostEqual(hit, said, delta=0.005)
        self.assertGreater(said, 0.02)


class Replays(unittest.TestCase):
    def test_requests_are_due_when_the_trace_says_and_the_statement_names_it(self) -> None:
        summary, rows, bodies, text = measure(f"--trace {AZURE} --trace-speed 30")
        due = [p.due_s for p in read(AZURE, speed=30).requests]
        self.assertEqual([row["due_s"] for row in rows], [round(s, 9) for s in due])
        self.assertTrue(all(row["sent_s"] >= row["due_s"] for row in rows))
        self.assertEqual([row["n_in"] for row in rows], [row["n_in_planned"] for row in rows])
        self.assertEqual({body["max_tokens"] for body in bodies[4:]},
                         {row["n_out"] for row in rows})
        self.assertIn("Azure CSV", summary["plan"]["traffic"]["text"])
        self.assertIn("trace azure_conv_head.csv", text)

    def test_shared_blocks_come_from_the_servers_cache(self) -> None:
        summary, rows, _, _ = measure(f"--trace {TIMED} --trace-speed 10 --endpoint chat")
        self.assertEqual(rows[2]["cached_tokens"], 32)
        self.assertNotIn("prefix cache", "".join(summary["runs"][0]["warnings"]))

    def test_the_hash_covers_times_lengths_and_blocks(self) -> None:
        plans = [plan_of(f"--trace {path}") for path in (AZURE, MOONCAKE, PLAIN)]
        plans += [plan_of(f"--trace {AZURE} {more}") for more in (
            "--trace-speed 2", "--trace-window 1..20", "--num-requests 39", "--seed 2")]
        with open(MOONCAKE, encoding="utf-8") as file, file_of(
                file.read().replace("[0, 1, 2,", "[0, 1, 3,", 1)) as path:
            plans.append(plan_of(f"--trace {path}"))
        self.assertEqual(len({plan.hash for plan in plans}), len(plans))
        self.assertEqual(plan_of(f"--trace {AZURE}").hash, plans[0].hash)

    def test_requests_past_the_memory_for_them_are_made_later_in_the_same_order(self) -> None:
        plan = plan_of(f"--trace {AZURE}")
        made: List[int] = []

        def make(planned: loadgen.Planned) -> bytes:
            made.append(planned.id)
            return b"x" * 100

        with unittest.mock.patch.object(loadgen, "AHEAD_BYTES", 1000):
            source = loadgen.Source(plan, 0, make)
            self.assertEqual(len(made), 10)
            driver = unittest.mock.Mock(load=plan.load)
            taken = []
            while True:
                due_ns = source.next_ns(0, driver)
                if due_ns is None:
                    break
                self.assertLessEqual(source.held, 1100)
                taken.append(source.take(due_ns)[0].planned.id)
        self.assertEqual(taken, list(range(40)))


MESSAGES = "".join(json.dumps(row) + "\n" for row in (
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"},
                  {"role": "assistant", "content": "four " * 8}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Two?"}]}],
     "tools": [{"type": "function"}]},
    {"body": {"messages": [{"role": "user", "content": "Three?"}], "max_tokens": 7}}))
SHAREGPT = json.dumps([
    {"id": "a", "conversations": [{"from": "human", "value": "Hello there"},
                                  {"from": "gpt", "value": "x" * 40},
                                  {"from": "human", "value": "more"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "no question"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "Bye"}]}])


class OwnPrompts(unittest.TestCase):
    def test_sharegpt_gives_the_first_question_and_the_length_of_its_answer(self) -> None:
        with file_of(SHAREGPT) as path:
            items = loadgen.read_prompts(path).items
        self.assertEqual([loadgen.joined(item.messages) for item in items], ["Hello there", "Bye"])
        self.assertEqual([item.n_out for item in items], [10, None])

    def test_messages_end_with_the_users_and_a_reply_gives_the_length(self) -> None:
        with file_of(MESSAGES) as path:
            items = loadgen.read_prompts(path).items
        self.assertEqual([len(item.messages) for item in items], [2, 1, 1])
        self.assertEqual([item.n_out for item in items], [10, None, 7])
        self.assertEqual(items[1].more, {"tools": [{"type": "function"}]})

    def test_every_prompt_comes_once_a_round_in_an_order_by_the_seed(self) -> None:
        with file_of("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(10))) as path:
            one, again, other = (plan_of(f"--rate 1 --num-requests 25 --prompts {path} --seed {n}")
                                 for n in (1, 1, 2))
        order = [p.prompt for p in one.requests]
        self.assertEqual(sorted(order[:10]), list(range(10)))
        self.assertEqual(sorted(order[10:20]), list(range(10)))
        self.assertNotEqual(order[:10], order[10:20])
        self.assertEqual((one.requests, one.hash), (again.requests, again.hash))
        self.assertNotEqual(order, [p.prompt for p in other.requests])

    def test_a_round_shares_its_nonce_so_that_system_prompts_stay_shared(self) -> None:
        with file_of('{"prompt": "same start a"}\n{"prompt": "same start b"}\n') as path:
            plan = plan_of(f"--rate 1 --num-requests 4 --prompts {path}")
        texts = [loadgen.joined(prompts_of(plan).messages(p, 0)) for p in plan.requests]
        starts = [text.partition("same")[0] for text in texts]
        self.assertEqual((starts[0], starts[2]), (starts[1], starts[3]))
        self.assertNotEqual(starts[0], starts[2])
        self.assertNotEqual(starts[0], loadgen.joined(
            prompts_of(plan, salt=10).messages(plan.requests[0], 0)).partition("same")[0])

    def test_without_unique_prompts_they_are_sent_as_they_are(self) -> None:
        with file_of(MESSAGES) as path:
            line = f"--rate 50 --num-requests 6 --prompts {path} --no-unique-prompts --output-len 5"
            summary, rows, bodies, text = measure(line + " --endpoint chat --warmup 0")
            own = [body["messages"] for body in bodies]
            self.assertEqual(own.count([{"role": "system", "content": "Be brief."},
                                        {"role": "user", "content": "One?"}]), 2)
            self.assertEqual(own.count([{"role": "user", "content": [
                {"type": "text", "text": "Two?"}]}]), 2)
            self.assertEqual(sorted(body["max_tokens"] for body in bodies), [5, 5, 7, 7, 10, 10])
            self.assertEqual(sum("tools" in body for body in bodies), 2)
            self.assertEqual({row["n_in_planned"] for row in rows}, {None})
            self.assertTrue(all(row["n_in"] for row in rows))
            self.assertIn("3 repeats", text)
            self.assertIsNone(summary["runs"][0]["input_error_max"])
            _, _, bodies, _ = measure(line + " --warmup 0")
        self.assertEqual(sum(body["prompt"] == "Be brief.\nOne?" for body in bodies), 2)

    def test_the_hash_is_of_the_content(self) -> None:
        hashes = []
        for text in ("a", "b", "a"):
            with file_of(json.dumps({"prompt": text})) as path:
                hashes.append(plan_of(f"--rate 1 --prompts {path}").hash)
        self.assertEqual(hashes[0], hashes[2])
        self.assertNotEqual(hashes[0], hashes[1])

    def test_what_is_wrong_with_the_file_is_said_with_its_line(self) -> None:
        for text, parts in (("", ("no prompt",)), ("[1]", ("entry 1", "object")),
                            ("[{", ("JSON",)), ('{"prompt": "a"}\n{"x": 1}\n', ("line 2",)),
                            ('{"prompt": "a"}\n{\n', ("line 2", "JSON"))):
            with self.subTest(text=text), file_of(text) as path:
                with self.assertRaises(loadgen.UserError) as caught:
                    loadgen.read_prompts(path)
                for part in parts:
                    self.assertIn(part, str(caught.exception))


CHAT = {"name": "chat", "rate": 30, "input_len": 50, "output_len": 5, "slo_ttft_ms": 5000,
        "model": "mock-model", "shared_prefix_len": 20, "prefix_groups": 2}
BATCH = {"name": "batch", "rate": 10, "input_len": "uniform:100..200", "output_len": 20,
         "burstiness": "inf", "slo_e2e_ms": 0.001}


class Mixes(unittest.TestCase):
    def plan(self, classes: Sequence[Any], more: str = "") -> loadgen.Plan:
        with file_of(json.dumps({"classes": classes})) as path:
            return plan_of(f"--mix {path} {more}")

    def test_each_class_keeps_its_own_rate_lengths_and_arrivals(self) -> None:
        plan = self.plan([CHAT, BATCH], "--num-requests 4000")
        by_class = {name: [p for p in plan.requests if p.cls == name] for name in ("chat", "batch")}
        span_s = plan.requests[-1].due_s
        self.assertAlmostEqual(len(by_class["chat"]) / span_s, 30, delta=2)
        self.assertAlmostEqual(len(by_class["batch"]) / span_s, 10, delta=0.1)
        self.assertEqual({p.n_in for p in by_class["chat"]}, {50})
        self.assertTrue(all(100 <= p.n_in <= 200 for p in by_class["batch"]))
        self.assertEqual([p.id for p in plan.requests], list(range(4000)))
        self.assertEqual(list(plan.requests), sorted(plan.requests, key=lambda p: p.due_s))
        batch = by_class["batch"]
        self.assertEqual({round(b.due_s - a.due_s, 9) for a, b in zip(batch, batch[1:])}, {0.1})

    def test_a_class_arrives_the_same_whatever_the_others_do(self) -> None:
        one = self.plan([CHAT, BATCH], "--num-requests 400")
        two = self.plan([CHAT, {**BATCH, "rate": 100}], "--num-requests 400")
        chats = [[p.due_s for p in plan.requests if p.cls == "chat"] for plan in (one, two)]
        self.assertEqual(chats[0][:len(chats[1])], chats[1])
        self.assertNotEqual(one.hash, two.hash)

    def test_a_rate_on_the_command_line_is_shared_by_weight(self) -> None:
        plan = self.plan([{**CHAT, "weight": 1}, {**BATCH, "weight": 3}],
                         "--rate 40 --num-requests 2000")
        batch = sum(p.cls == "batch" for p in plan.requests)
        self.assertAlmostEqual(batch / 2000, 0.75, delta=0.03)
        closed = self.plan([{**CHAT, "weight": 1}, {**BATCH, "weight": 3}],
                           "--concurrency 4 --num-requests 2000")
        self.assertAlmostEqual(sum(p.cls == "batch" for p in closed.requests) / 2000, 0.75,
                               delta=0.03)

    def test_prefixes_and_models_are_the_classs_own(self) -> None:
        plan = self.plan([CHAT, {**BATCH, "shared_prefix_len": 30, "model": "adapter"}])
        prompts = prompts_of(plan)
        heads: Dict[Tuple[str, int], set] = {}
        for p in plan.requests:
            shared = loadgen.shared_of(p, plan.work)
            self.assertEqual(shared, {"chat": 20, "batch": 30}[p.cls])
            heads.setdefault((p.cls, p.group), set()).add(
                tuple(prompts.token_ids(p, shared)[:shared]))
        self.assertEqual(sorted(heads), [("batch", 2), ("chat", 0), ("chat", 1)])
        self.assertEqual({len(found) for found in heads.values()}, {1})
        self.assertEqual(len(set.union(*heads.values())), 3)
        target = loadgen.Target("http", "h", 80, "/", "/v1", False, "base", (), {}, True, True)
        models = loadgen.models_of(plan.work, target)
        self.assertEqual({name: own.model for name, own in models.items()},
                         {"chat": "mock-model", "batch": "adapter"})

    def test_goodput_is_given_by_class_and_for_all(self) -> None:
        with file_of(json.dumps({"classes": [CHAT, BATCH]})) as path:
            summary, rows, _, text = measure(f"--mix {path} --num-requests 40")
        run, classes = summary["runs"][0], summary["runs"][0]["classes"]
        chats = sum(row["mix_class"] == "chat" for row in rows)
        self.assertEqual((classes["chat"]["offered"], classes["batch"]["offered"]),
                         (chats, 40 - chats))
        self.assertEqual((classes["chat"]["attainment"], classes["batch"]["attainment"]), (1, 0))
        self.assertAlmostEqual(run["attainment"], chats / 40)
        self.assertAlmostEqual(run["goodput_rps"], sum(
            part["goodput_rps"] for part in classes.values()))
        self.assertIn("chat: offered", text)
        self.assertIn("batch: offered", text)

    def test_the_setup_states_each_class(self) -> None:
        rows = [{**CHAT, "model": "adapter-1", "input_len": "uniform:100..300", "burstiness": 0.5},
                BATCH]
        with file_of(json.dumps({"classes": rows})) as path:
            for more, rate in (("", "30 req/s"), ("--rate 4", "3 req/s"),
                               ("--concurrency 4", "75.0% of the requests")):
                args, _ = args_of(f"--mix {path} --num-requests 40 --slo-ttft-ms 300 {more}")
                plan = loadgen.plan_statement(args, [loadgen.make_plan(
                    loadgen.loads_of(args)[0], loadgen.work_of(args), 1, 1.0)])
                chat, batch = loadgen.class_lines(plan)
                for part in ("class chat: model adapter-1", rate, "input uniform:100..300",
                             "20 tokens shared in 2 groups", "SLO ttft"):
                    self.assertIn(part, chat)
                self.assertEqual("arrivals gamma, shape 0.5" in chat, "concurrency" not in more)
                self.assertEqual("arrivals constant" in batch, "concurrency" not in more)

    def test_one_group_is_one_and_lengths_of_a_file_are_called_so(self) -> None:
        self.assertEqual([loadgen.several(n, "group") for n in (1, 2)], ["1 group", "2 groups"])
        for told, said in ((("200", "100"), "input 200, output 100 tokens"),
                           (("of the trace", "of the trace"),
                            "input and output lengths of the trace"),
                           (("of the file (estimated)", "50"),
                            "input lengths of the file (estimated), output 50 tokens")):
            self.assertEqual(loadgen.lengths_told(*told), said)

    def test_a_search_for_the_knee_of_a_mix_is_refused_with_what_to_do(self) -> None:
        with file_of(json.dumps({"classes": [CHAT, BATCH]})) as path:
            for flags, name in (("--find-goodput", "--find-goodput"), ("--sweep auto --slo-ttft-ms "
                                "100", "--sweep auto")):
                with self.assertRaisesRegex(
                        loadgen.UserError, f"^--mix and {name} do not .*--sweep R,R"):
                    args_of(f"--mix {path} {flags}")

    def test_a_class_below_target_fails_the_gate_though_all_together_do_not(self) -> None:
        slos = {"slo": {"ttft_s": 1.0}}
        run = {"client": {"interrupted": False}, "completed": 9, "verdict": "VALID",
               "attainment": 0.995, "classes": {"few": {"attainment": 0.5, **slos},
                                                "free": {"attainment": None, "slo": {"t": None}}}}
        args = unittest.mock.Mock(gate=True, slo_attainment=0.99)
        self.assertEqual(loadgen.exit_code(args, {"runs": [run], "unsaved": ""}), 3)
        run["classes"] = {"few": {"attainment": 1.0, **slos}}
        self.assertEqual(loadgen.exit_code(args, {"runs": [run], "unsaved": ""}), 0)

    def test_classes_without_a_limit_take_the_command_lines(self) -> None:
        with file_of(json.dumps({"a": {"rate": 1, "slo_ttft_ms": 100}, "b": {"rate": 1}})) as path:
            slo = loadgen.slo_of(args_of(f"--mix {path} --slo-ttft-ms 300 --slo-tpot-ms 20")[0])
        self.assertEqual([(own.ttft_s, own.tpot_s) for own in slo.classes.values()],
                         [(0.1, 0.02), (0.3, 0.02)])

    def test_what_is_wrong_with_a_mix_is_said_with_its_class(self) -> None:
        for value, parts in (
                ([], ("classes",)), ([{"rate": 1}], ("class 1", "no name")), (7, ("classes",)),
                ([CHAT, CHAT], ("same name",)), ([{**CHAT, "rte": 1}], ("rte", "rate")),
                ([{**CHAT, "rate": -1}], ("class 1: rate", "more than zero")),
                ([{"name": "a"}], ("class a has no rate",)),
                ([{**CHAT, "shared_prefix_len": 50}], ("class 1", "as long as the prompt"))):
            with self.subTest(value=value), self.assertRaises(loadgen.UserError) as caught:
                self.plan(value)
            for part in parts:
                self.assertIn(part, str(caught.exception))


def turn_ended(source: loadgen.Source, out: Any, record: loadgen.Record, end_ns: int,
               cls: str = "ok") -> None:
    record.cls, record.end_ns, record.said = cls, end_ns, "fine"
    source.ended(record)


class Sessions(unittest.TestCase):
    def source(self, line: str) -> Tuple[loadgen.Source, Any, List[Any]]:
        plan = plan_of(line)
        talks: List[Any] = []

        def make(planned: loadgen.Planned, talk: List[Any]) -> bytes:
            talk.append({"role": "user", "content": f"turn {planned.turn}"})
            talks.append([message["content"] for message in talk])
            return b"x"

        return loadgen.Source(plan, 0, make), unittest.mock.Mock(load=plan.load), talks

    def test_later_turns_carry_all_before_them(self) -> None:
        plan = plan_of("--rate 6 --num-requests 8 --turns 3 --input-len 40 --output-len 10")
        self.assertEqual([p.id for p in plan.requests], [0, 3, 6])
        turns = list(loadgen.turns_of(plan.requests))
        self.assertEqual([(p.turn, p.context, p.n_in) for p in turns[:3]],
                         [(0, 0, 40), (1, 50, 90), (2, 100, 140)])
        self.assertEqual([p.id for p in turns], list(range(8)))
        self.assertEqual({p.session for p in turns[:3]}, {0})

    def test_sessions_begin_at_the_rate_over_the_turns(self) -> None:
        plan = plan_of("--rate 8 --num-requests 8000 --turns uniform:1..7")
        turns = list(loadgen.turns_of(plan.requests))
        self.assertEqual(len(turns), 8000)
        self.assertAlmostEqual(len(turns) / plan.requests[-1].due_s, 8, delta=0.6)

    def test_a_turn_is_due_when_the_answer_has_ended_and_been_thought_about(self) -> None:
        source, driver, talks = self.source("--rate 2 --num-requests 4 --turns 2 --think-time 3")
        first_ns = source.next_ns(0, driver)
        out, record = source.take(first_ns)
        second_ns = source.next_ns(0, driver)
        self.assertGreater(second_ns, first_ns)  # another session does not wait
        turn_ended(source, out, record, second_ns - 4 * S)
        self.assertEqual(source.next_ns(0, driver), second_ns - S)
        out, record = source.take(second_ns)
        self.assertEqual((out.planned.turn, record.due_ns), (1, second_ns - S))
        self.assertEqual(talks[-1], ["turn 0", "fine", "turn 1"])
        self.assertIsNone(record.n_in_planned)
        self.assertEqual(source.next_ns(0, driver), second_ns)

    def test_a_failed_turn_ends_its_session_and_the_rest_is_counted(self) -> None:
        source, driver, _ = self.source("--rate 2 --num-requests 5 --turns 5")
        out, record = source.take(source.next_ns(0, driver))
        turn_ended(source, out, record, S, "truncated")
        self.assertIsNone(source.next_ns(0, driver))
        self.assertEqual((source.lost, source.sessions), (4, 0))

    def test_a_turn_cut_off_by_the_end_of_the_run_costs_no_later_ones(self) -> None:
        source, driver, _ = self.source("--rate 2 --num-requests 5 --turns 5")
        turn_ended(source, *source.take(source.next_ns(0, driver)), S, "cancelled")
        self.assertEqual(source.lost, 0)

    def test_the_closed_loop_holds_so_many_sessions_thinking_or_not(self) -> None:
        source, driver, _ = self.source(
            "--concurrency 2 --num-requests 8 --turns 2 --think-time 5")
        taken = []
        for _ in range(2):
            self.assertEqual(source.next_ns(7, driver), 7)
            taken.append(source.take(7))
        self.assertIsNone(source.next_ns(7, driver))
        turn_ended(source, *taken[0], 10)
        self.assertEqual(source.next_ns(11, driver), 10 + 5 * S)  # one thinks: no third begins
        last = source.take(10 + 5 * S)
        turn_ended(source, *last, 6 * S)
        self.assertEqual(source.next_ns(7 * S, driver), 7 * S)

    def test_interrupted_sessions_leave_no_turn_behind(self) -> None:
        source, driver, _ = self.source("--rate 1 --num-requests 20 --turns 2 --think-time 0")
        out, record = source.take(source.next_ns(0, driver))
        turn_ended(source, out, record, record.due_ns + 1)
        due_ns = source.next_ns(0, driver)
        self.assertEqual([r.turn for r in source.unsent(due_ns)], [1])
        self.assertIsNone(source.next_ns(10**12, driver))

    def test_the_answers_text_is_kept_however_it_is_cut(self) -> None:
        for delta in ({"delta": {"content": "a é"}}, {"text": "a é"}):
            events = b"".join(b"data: " + json.dumps({"choices": [
                {"index": 0, **delta, "finish_reason": None}]}).encode() + b"\n\n"
                for _ in range(3))
            wire = (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                    b"transfer-encoding: chunked\r\n\r\n" + loadgen.encode_chunk(events)
                    + loadgen.encode_chunk(b"data: [DONE]\n\n") + loadgen.LAST_CHUNK)
            for cut in range(0, len(wire), 7):
                reply = loadgen.TalkingReply()
                for part in (wire[:cut], wire[cut:]):
                    if part:
                        reply.feed(part, 1)
                self.assertEqual((reply.said, len(reply.event_ns)), ("a éa éa é", 3))
            one_a_read = loadgen.TalkingReply()
            head, rest = wire.split(b"\r\n\r\n", 1)
            one_a_read.feed(head + b"\r\n\r\n", 1)
            for event in events.split(b"\n\n")[:3]:
                one_a_read.feed(loadgen.encode_chunk(event + b"\n\n"), 2)
            self.assertEqual(one_a_read.said, "a éa éa é", rest[:20])

    def test_the_conversation_is_carried_forward(self) -> None:
        for kind in ("chat", "completions"):
            with self.subTest(kind=kind):
                summary, rows, bodies, text = measure(
                    f"--rate 60 --num-requests 12 --turns 3 --think-time 0.01 --input-len 40 "
                    f"--output-len 8 --endpoint {kind} --warmup 2")
                run = summary["runs"][0]
                self.assertEqual((run["completed"], run["turns"]["lost"]), (12, 0))
                self.assertEqual((run["turns"]["first"]["offered"],
                                  run["turns"]["later"]["offered"]), (4, 8))
                self.assertIn("later turns: offered 8", text)
                for first, second, third in zip(*(rows[n::3] for n in range(3))):
                    self.assertGreaterEqual(second["due_s"], first["last_s"] + 0.01)
                    self.assertLess(first["n_in"] + 40, second["n_in"])
                    self.assertLess(second["n_in"] + 40, third["n_in"])
                    self.assertGreaterEqual(third["cached_tokens"], first["n_in"])
                if kind == "chat":
                    said = [body["messages"] for body in bodies if len(body["messages"]) == 5]
                    self.assertEqual(len(said), 4)
                    self.assertEqual([m["role"] for m in said[0]],
                                     ["user", "assistant", "user", "assistant", "user"])
                    self.assertEqual(len(said[0][1]["content"].split()), 8)

    def test_the_hash_covers_turns_and_think_time(self) -> None:
        lines = ("", "--turns 2", "--turns 3", "--turns 2 --think-time 1",
                 "--turns 2 --think-time exp:1")
        self.assertEqual(len({plan_of(f"--rate 1 {line}").hash for line in lines}), len(lines))

    def test_think_time_is_fixed_exponential_or_as_lengths_are(self) -> None:
        for text, mean, median in (("0.5", 0.5, 0.5), ("0", 0, 0), ("exp:2", 2, 1.386),
                                   ("uniform:1..3", 2, 2)):
            lengths = loadgen.think_time(text)
            self.assertAlmostEqual(lengths.mean, mean)
            self.assertAlmostEqual(lengths.quantile(0.5), median, places=3)


class Simulated(unittest.TestCase):
    def run_plan(self, line: str) -> List[loadgen.Record]:
        engine = QUICK._replace(num_blocks=10**5, max_model_len=10**6)
        outcome = loadgen.simulate_plan(plan_of(line), 0, engine)
        return sorted(outcome.records, key=lambda record: record.id)

    def test_a_trace_finds_its_shared_blocks_in_the_virtual_cache(self) -> None:
        records = self.run_plan(f"--trace {TIMED}")
        self.assertEqual([record.cached_tokens for record in records], [None, 32, 32])

    def test_sessions_wait_for_the_answer_and_find_the_conversation_cached(self) -> None:
        records = self.run_plan("--rate 5 --num-requests 30 --turns 3 --think-time 2 "
                                "--input-len 100 --output-len 20")
        self.assertEqual([record.turn for record in records], [0, 1, 2] * 10)
        for before, after in zip(records, records[1:]):
            if after.turn:
                self.assertEqual(after.due_ns, before.end_ns + 2 * S)
                self.assertEqual(after.n_in, before.n_in + 120)
                self.assertGreaterEqual(after.cached_tokens, before.n_in)


class Workloads(unittest.TestCase):
    def test_lengths_and_slos_are_those_of_the_presets(self) -> None:
        args, _ = args_of("--rate 1 --workload rag --slo-tpot-ms 30 --output-len 9")
        self.assertEqual((args.input_len.mean, args.output_len.mean), (32000, 9))
        self.assertEqual((args.slo_ttft_ms, args.slo_tpot_ms, args.slo_e2e_ms), (2000, 30, None))

    def test_a_class_of_a_mix_may_be_one(self) -> None:
        with file_of(json.dumps({"a": {"rate": 1, "workload": "code", "output_len": 5}})) as path:
            one = args_of(f"--mix {path}")[0].classes[0]
        self.assertEqual((one.work.n_in.mean, one.work.n_out.mean), (1500, 5))
        self.assertEqual(one.limits, {"ttft_s": 0.2, "tpot_s": None, "e2e_s": 1.5})

    def test_an_unknown_one_is_said(self) -> None:
        with self.assertRaisesRegex(loadgen.UserError, "chat"):
            args_of("--rate 1 --workload chatt")

    def test_without_presets_json_a_line_says_what_to_give(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(SCRIPT, folder)
            done = subprocess.run(
                [sys.executable, os.path.join(folder, "loadgen.py"), "--mock", "--rate", "1",
                 "--workload", "chat"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
        self.assertIn("--input-len", done.stderr)


class Contradictions(unittest.TestCase):
    def test_are_said_in_one_line(self) -> None:
        for line, part in (
                (f"--trace {PLAIN} --rate 1", "--rate"),
                (f"--trace {PLAIN} --sweep 1,2", "--sweep"),
                (f"--trace {PLAIN} --turns 2", "do not go together"),
                (f"--trace {PLAIN} --input-len 5", "--input-len"),
                ("--rate 1 --trace-speed 2", "--trace"), ("--rate 1 --think-time 2", "--turns"),
                ("--rate 1 --turns 201", "200"), (f"--trace {PLAIN} --trace-window 5..2", "START"),
                (f"--trace {PLAIN} --trace-speed 0", "--trace-speed"),
                ("--trace /nowhere/x", "cannot be read"),
                ("--rate 1 --dataset-name sonnet", "not known")):
            with self.subTest(line=line), self.assertRaises(loadgen.UserError) as caught:
                args_of(line)
            self.assertIn(part, str(caught.exception))

    def test_vllms_spelling_of_a_trace_is_understood(self) -> None:
        args, _ = args_of(f"--dataset-name timed_trace --dataset-path {TIMED} --request-rate inf")
        self.assertEqual((args.trace, args.num_requests), (TIMED, 3))


if __name__ == "__main__":
    unittest.main()
