"""The measuring client against real sockets: the built-in engine, and servers that misbehave."""

import concurrent.futures
import contextlib
import glob
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen
from tests import LOADGEN

SCRIPT = os.path.abspath(loadgen.__file__)
FAST = {"weights_s": 0.002, "sequence_s": 0.00002, "prefill_s_per_token": 0.00001,
        "max_num_batched_tokens": 2048}
SSE_HEAD = (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n")


def chunk(text: str) -> bytes:
    return loadgen.encode_chunk(text.encode())


def content(word: str) -> bytes:
    event = {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
    return chunk(f"data: {json.dumps(event)}\n\n")


END = (chunk('data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n')
       + chunk('data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n')
       + chunk("data: [DONE]\n\n") + loadgen.LAST_CHUNK)


def measure(*argv: str) -> Tuple[int, Any, str, List[Any]]:
    """(exit code, summary, stderr, lines of requests.jsonl) of one command line."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "run")
        done = subprocess.run([*LOADGEN, *argv, "--out", out], capture_output=True, text=True,
                              timeout=60, check=False)
        summary, rows = None, []
        if os.path.exists(os.path.join(out, "summary.json")):
            with open(os.path.join(out, "summary.json"), encoding="utf-8") as file:
                summary = json.load(file)
            with open(os.path.join(out, "requests.jsonl"), encoding="utf-8") as file:
                rows = [json.loads(line) for line in file]
        return done.returncode, summary, done.stdout + done.stderr, rows


def spoilt_or(code: int, run: Any) -> int:
    """The exit code wanted: 1 where a busy machine has spoilt the run, which then says so."""
    return 1 if run["verdict"] == "CLIENT-LIMITED" else code


@contextlib.contextmanager
def engine(*argv: str) -> Iterator[str]:
    """The built-in engine on a port of its own; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "profile.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(FAST, file)
        process = subprocess.Popen([sys.executable, SCRIPT, "--serve", "--port", "0", "--mock",
                                    path, *argv], stdout=subprocess.PIPE)
        try:
            line = process.stdout.readline().decode()
            yield line.split()[-1]
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


@contextlib.contextmanager
def server(behave: Callable[[socket.socket, int], None], wrap: Any = None) -> Iterator[str]:
    """A server that lets `behave` loose on each request (its number from 0); its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    counter, lock = [0], threading.Lock()

    def one(sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if wrap:
                sock = stack.enter_context(wrap(sock))
            while True:
                data = bytearray()
                while loadgen.take_head(data) is None:
                    part = sock.recv(65536)
                    if not part:
                        return
                    data += part
                with lock:
                    number, counter[0] = counter[0], counter[0] + 1
                behave(sock, number)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def good(sock: socket.socket, number: int = 0) -> None:
    sock.sendall(SSE_HEAD)
    for word in "abc":
        sock.sendall(content(word))
        time.sleep(0.002)
    sock.sendall(END)


COMMON = ("--model", "mock-model", "--endpoint", "chat", "--warmup", "0", "--rate", "200")


class AgainstTheEngine(unittest.TestCase):
    """Client numbers beside the server's own truth."""

    def test_every_request_agrees_with_the_engines_truth(self) -> None:
        with engine() as url:
            code, summary, said, rows = measure(
                url, "--rate", "60", "--num-requests", "90", "--output-len", "12",
                "--input-len", "40", "--endpoint", "chat")
            with urllib.request.urlopen(f"{url}/truth") as reply:
                truth = json.load(reply)
        self.assertIn(code, (0, 1), said)
        by_id = {row["id"]: row for row in truth["requests"]}
        run = summary["runs"][0]
        self.assertEqual((run["offered"], run["completed"]), (90, 90))
        for row in rows:
            own = by_id[f"loadgen-0-{row['id']}"]
            self.assertEqual((row["n_out"], row["n_in"]), (own["n_out"], own["n_in"]))
            measured = row["last_s"] - row["first_s"]
            self.assertAlmostEqual(measured, (own["last_ns"] - own["first_ns"]) * 1e-9, delta=0.05)
            self.assertGreaterEqual(row["ttft_from_sent_s"] + 1e-4,
                                    (own["first_ns"] - own["recv_ns"]) * 1e-9)

    def test_chat_prompts_are_within_two_tokens_of_the_plan(self) -> None:
        with engine() as url:
            _, summary, said, rows = measure(
                url, "--rate", "100", "--num-requests", "30", "--output-len", "3", "--input-len",
                "lognormal:mean=150,cv=0.5", "--endpoint", "chat")
        self.assertEqual(len(rows), 30, said)
        for row in rows:
            self.assertLessEqual(abs(row["n_in"] - row["n_in_planned"]),
                                 max(2, 0.02 * row["n_in_planned"]))
        self.assertIn("warm-up", summary["runs"][0]["input_source"])

    def test_completions_prompts_are_exact(self) -> None:
        with engine() as url:
            _, summary, said, rows = measure(
                url, "--rate", "100", "--num-requests", "20", "--output-len", "3", "--input-len",
                "uniform:1..300")
        self.assertEqual({row["n_in"] - row["n_in_planned"] for row in rows}, {0}, said)
        self.assertTrue(summary["target"]["token_ids"])

    def test_several_workers_send_the_plan_of_one(self) -> None:
        with engine() as url:
            runs = [measure(url, "--rate", "80", "--num-requests", "60", "--output-len", "4",
                            "--seed", "5", "--workers", n) for n in ("1", "3")]
        dues = [sorted(round(row["due_s"], 6) for row in rows) for _, _, _, rows in runs]
        self.assertEqual(dues[0], dues[1])
        self.assertEqual(runs[1][1]["runs"][0]["client"]["workers"], 3)
        self.assertEqual(sorted(row["id"] for row in runs[1][3]), list(range(60)))

    def test_window_mode_measures_the_window_alone(self) -> None:
        with engine() as url:
            _, summary, said, rows = measure(url, "--rate", "40", "--duration", "1", "--ramp",
                                             "0.5", "--output-len", "120")
        run = summary["runs"][0]
        inside = [row for row in rows if row["measured"]]
        self.assertEqual(run["offered"], len(inside), said)
        self.assertTrue(all(0.5 <= row["due_s"] < 1.5 for row in inside))
        self.assertGreater(max(row["due_s"] for row in rows), 1.5)
        self.assertEqual(run["completed"], run["offered"])

    def test_a_closed_loop_keeps_so_many_in_flight(self) -> None:
        with engine() as url:
            _, summary, said, _ = measure(url, "--concurrency", "4", "--num-requests", "40",
                                          "--output-len", "10")
        run = summary["runs"][0]
        self.assertEqual((run["in_flight_max"], run["completed"], run["label"]), (4, 40, "c=4"),
                         said)

    def test_a_caps_wait_counts_from_due(self) -> None:
        with engine() as url:
            _, _, said, rows = measure(url, "--rate", "100", "--concurrency", "1",
                                             "--num-requests", "30", "--output-len", "20")
        waits = [row["sent_s"] - row["due_s"] for row in rows]
        self.assertGreater(max(waits), 0.3, said)
        last = max(rows, key=lambda row: row["due_s"])
        self.assertGreater(last["ttft_s"], last["ttft_from_sent_s"] + 0.3)

    def test_mock_starts_its_own_engine_and_the_gate_judges(self) -> None:
        argv = ("--mock", "--rate", "20", "--num-requests", "10", "--output-len", "4",
                "--endpoint", "chat", "--slo-ttft-ms")
        code, summary, said, _ = measure(*argv, "5000", "--gate")
        run = summary["runs"][0]
        self.assertEqual((code, run["attainment"]), (spoilt_or(0, run), 1.0), said)
        code, summary, said, _ = measure(*argv, "0.01", "--gate")
        self.assertEqual(code, spoilt_or(3, summary["runs"][0]), said)

    def test_the_key_is_nowhere_in_what_is_printed_or_saved(self) -> None:
        key = "sk-VERYSECRET"
        with engine() as url, tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            done = subprocess.run(
                [sys.executable, SCRIPT, url, "--rate", "50", "--num-requests", "5",
                 "--output-len", "2", "--api-key", key, "--header", f"X-Other: {key}", "--out",
                 out, "--json"], capture_output=True, text=True, check=False)
            saved = ""
            for path in glob.glob(os.path.join(out, "*")):
                with open(path, encoding="utf-8") as file:
                    saved += file.read()
        self.assertIn('"completed": 5', done.stdout)
        self.assertNotIn("VERYSECRET", done.stdout + done.stderr + saved)


class Faults(unittest.TestCase):
    """Every request ends in one class, whatever the server does."""

    CASES = (("status:503", "http_status"), ("refuse", "truncated"), ("reset", "truncated"),
             ("truncate", "truncated"), ("error_event", "stream_error"), ("html", "not_stream"),
             ("bad_json", "malformed"), ("empty", "empty"), ("redirect", "redirect"),
             ("not_stream", "not_stream"), ("stall", "stalled"), ("silent", "timeout"))
    HARMLESS = ("no_done", "crlf", "no_space", "comments", "split", "bundle", "no_usage",
                "slow_head", "wrong_usage")

    def outcomes(self, faults: Sequence[str]) -> Dict[str, Tuple[int, Any, str]]:
        """Each fault in a run of its own against one engine, several at a time."""
        def one(fault: str) -> Tuple[int, Any, str]:
            code, summary, said, rows = measure(
                url, *COMMON, "--num-requests", "6", "--output-len", "5", "--input-len", "5",
                "--stall-timeout", "0.6", "--first-output-timeout", "0.8", "--header",
                f"X-Mock-Fault={fault}")
            self.assertEqual(len(rows), 6, said)
            run = summary["runs"][0]
            self.assertEqual(run["offered"], run["completed"] + sum(run["failures"].values()))
            return code, run, said

        with engine() as url, concurrent.futures.ThreadPoolExecutor(6) as pool:
            return dict(zip(faults, pool.map(one, faults)))

    def test_each_fault_is_classed(self) -> None:
        found = self.outcomes([fault for fault, _ in self.CASES])
        for fault, kind in self.CASES:
            with self.subTest(fault):
                code, run, said = found[fault]
                self.assertEqual((code, run["failures"]), (1, {kind: 6}), said)
                self.assertIn(kind, said)

    def test_dialects_are_successes(self) -> None:
        for fault, (_, run, said) in self.outcomes(self.HARMLESS).items():
            with self.subTest(fault):
                self.assertEqual(run["completed"], 6, said)


class OddServers(unittest.TestCase):
    def classes(self, behave: Callable[[socket.socket, int], None], *argv: str,
                number: int = 4) -> Tuple[int, Dict[str, int], Any]:
        with server(behave) as url:
            code, summary, said, _ = measure(url, *COMMON, "--num-requests", str(number),
                                             *argv)
        self.assertIsNotNone(summary, said)
        run = summary["runs"][0]
        return code, {"ok": run["completed"], **run["failures"]}, run

    def test_a_good_one_is_ok(self) -> None:
        code, found, run = self.classes(good)
        self.assertEqual((code, found), (spoilt_or(0, run), {"ok": 4}))
        self.assertEqual(run["output_tokens_mean"], 3)

    def test_a_kept_alive_connection_that_was_closed_is_tried_once_more(self) -> None:
        def once(sock: socket.socket, number: int) -> None:
            good(sock)
            sock.close()  # though it spoke of keep-alive

        _, found, _ = self.classes(once, "--concurrency", "1", number=6)
        self.assertEqual(found, {"ok": 6})

    def test_an_endless_head_and_a_gigabyte_line_are_bounded(self) -> None:
        def endless(sock: socket.socket, number: int) -> None:
            sock.sendall(b"HTTP/1.1 200 OK\r\n")
            for _ in range(3000):
                sock.sendall(b"X-A: " + b"b" * 1000 + b"\r\n")

        def line(sock: socket.socket, number: int) -> None:
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ")
            for _ in range(60):
                sock.sendall(b"x" * 1_000_000)

        for behave in (endless, line):
            _, found, run = self.classes(behave, "--timeout", "20", number=2)
            self.assertEqual(found, {"ok": 0, "malformed": 2})
            self.assertLess(run["client"]["peak_rss_bytes"], 250e6)

    def test_a_server_that_answers_once_more_than_asked_does_not_break_the_next(self) -> None:
        def twice(sock: socket.socket, number: int) -> None:
            good(sock)
            sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

        _, found, _ = self.classes(twice, "--concurrency", "1")
        self.assertEqual(found, {"ok": 4})

    def test_finish_and_then_silence_is_a_success_after_a_grace(self) -> None:
        def silent(sock: socket.socket, number: int) -> None:
            sock.sendall(SSE_HEAD + content("a") + content("b") + chunk(
                'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'))
            time.sleep(5)

        _, found, run = self.classes(silent, number=2)
        self.assertEqual(found, {"ok": 2})
        self.assertLess(run["e2e_s"]["max"], 1.0)

    def test_heartbeats_do_not_hide_a_stall(self) -> None:
        def beating(sock: socket.socket, number: int) -> None:
            sock.sendall(SSE_HEAD + content("a"))
            for _ in range(40):
                sock.sendall(chunk(": ping\n\n"))
                time.sleep(0.1)

        _, found, _ = self.classes(beating, "--stall-timeout", "1", number=2)
        self.assertEqual(found, {"ok": 0, "stalled": 2})

    def test_nobody_listening_still_gives_a_report_and_exit_1(self) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        code, summary, said, rows = measure(f"http://127.0.0.1:{port}", *COMMON,
                                            "--num-requests", "20")
        self.assertEqual((code, summary["runs"][0]["failures"]), (1, {"refused": 20}), said)
        self.assertEqual(len(rows), 20)
        self.assertIn("20 x refused", said)

    def test_a_name_that_does_not_resolve_is_a_class_of_its_own(self) -> None:
        code, summary, said, _ = measure("http://no-such-host.invalid", *COMMON,
                                         "--num-requests", "3")
        self.assertEqual((code, summary["runs"][0]["failures"]), (1, {"dns": 3}), said)

    def test_too_few_descriptors_are_the_clients_limit(self) -> None:
        import resource
        with server(lambda sock, number: time.sleep(3)) as url:
            done = subprocess.run(
                [sys.executable, SCRIPT, url, *COMMON, "--rate", "1000", "--num-requests", "60",
                 "--first-output-timeout", "1", "--json"], capture_output=True, text=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30)),
                check=False)
        run = json.loads(done.stdout)["runs"][0]
        self.assertGreater(run["failures"].get("client_limit", 0), 0, done.stderr)
        self.assertEqual(sum(run["failures"].values()), 60)
        self.assertIn("descriptors", done.stderr)


CERTIFICATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "localhost.pem")


class Tls(unittest.TestCase):
    """HTTPS with a certificate for localhost made for these tests (tests/data/localhost.pem)."""

    def run_tls(self, *argv: str) -> Tuple[int, Any, str]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        with server(good, lambda sock: context.wrap_socket(sock, server_side=True)) as url:
            url = url.replace("http://127.0.0.1", "https://localhost")
            code, summary, said, _ = measure(url, *COMMON, "--num-requests", "6", *argv)
        return code, summary["runs"][0], said

    def test_an_unknown_authority_is_refused_with_its_cause(self) -> None:
        code, run, said = self.run_tls()
        self.assertEqual((code, run["failures"]), (1, {"tls": 6}), said)
        self.assertIn("self", said)

    def test_it_is_trusted_when_told_and_stamps_hold(self) -> None:
        for argv in (("--ca-file", CERTIFICATE), ("--insecure",)):
            _, run, said = self.run_tls(*argv)
            self.assertEqual((run["completed"], run["output_tokens_mean"]), (6, 3), said)
            apart = run["itl_s"]["max"] > 0.001
            self.assertTrue(apart or run["client"]["coalesced_share"])  # a late reader says so


class Workers(unittest.TestCase):
    def test_a_worker_that_dies_is_said_and_its_requests_are_counted(self) -> None:
        with engine() as url, tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            process = subprocess.Popen(
                [sys.executable, SCRIPT, url, "--rate", "40", "--num-requests", "80",
                 "--output-len", "5", "--workers", "2", "--out", out], stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True)
            path = os.path.join(out, "requests.jsonl")
            while not os.path.exists(path) or os.path.getsize(path) < 3000:
                time.sleep(0.02)
            with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
                os.kill(int(file.read().split()[-1]), signal.SIGKILL)
            text, _ = process.communicate(timeout=30)
            with open(os.path.join(out, "summary.json"), encoding="utf-8") as file:
                run = json.load(file)["runs"][0]
        self.assertEqual((process.returncode, run["offered"], run["verdict"]),
                         (1, 80, "CLIENT-LIMITED"), text)
        self.assertEqual(run["failures"], {"cancelled": 40})
        self.assertIn("worker processes died", text)

    def test_a_signal_for_the_parent_alone_reaches_its_workers(self) -> None:
        with engine() as url:
            process = subprocess.Popen(
                [sys.executable, SCRIPT, url, "--rate", "40", "--num-requests", "4000",
                 "--output-len", "5", "--workers", "2"], stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True)
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            text, _ = process.communicate(timeout=20)
        self.assertEqual(process.returncode, 130, text)

    def test_a_cap_that_workers_cannot_share_is_refused(self) -> None:
        code, _, said, _ = measure("http://127.0.0.1:9", "--concurrency", "1", "--workers", "2")
        self.assertEqual(code, 2, said)


class Secrets(unittest.TestCase):
    def test_a_key_that_the_server_repeats_is_taken_out(self) -> None:
        def echo(sock: socket.socket, number: int) -> None:
            body = b'{"error":{"message":"Incorrect API key provided: sk-VERYSECRET"}}'
            sock.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body)

        with server(echo) as url:
            _, summary, said, rows = measure(url, *COMMON, "--num-requests", "3", "--api-key",
                                             "sk-VERYSECRET")
        self.assertIn("Incorrect API key provided: [key]", said)
        self.assertNotIn("VERYSECRET", said + json.dumps(summary) + json.dumps(rows))

    def test_a_value_of_the_urls_query_that_the_server_repeats_is_taken_out(self) -> None:
        def echo(sock: socket.socket, number: int) -> None:
            body = b'{"error":{"message":"no /v1?k=SECRET%2BQUERY, which is SECRET+QUERY, in v 1"}}'
            sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body) + body)

        with server(echo) as url:
            _, summary, said, rows = measure(f"{url}?k=SECRET%2BQUERY&v=1", *COMMON,
                                             "--num-requests", "3")
        self.assertIn("no /v1?k=[key], which is [key], in v 1", said)
        self.assertNotIn("SECRET", said + json.dumps(summary) + json.dumps(rows))

    def test_a_secret_that_the_end_of_a_message_cuts_is_taken_out(self) -> None:
        args = loadgen.parse_args(["http://127.0.0.1:9/v1?key=VERYSECRET", "--rate", "1"])
        wiring = loadgen.wiring_of(args, loadgen.target_of(args, args.url))
        self.assertEqual(wiring.redacted("HTTP 404: no /v1?key=VERYSECR"),
                         "HTTP 404: no /v1?key=[key]")

    def test_an_answer_before_the_question_never_counts(self) -> None:
        def early(sock: socket.socket) -> socket.socket:
            sock.sendall(SSE_HEAD + content("a") + END)
            return sock

        with server(lambda sock, number: None, early) as url:
            _, summary, said, rows = measure(url, *COMMON, "--num-requests", "4",
                                             "--first-output-timeout", "1",
                                             "--connect-timeout", "1")
        self.assertEqual(len(rows), 4, said)
        self.assertTrue(all(row["ttft_from_sent_s"] is None or row["ttft_from_sent_s"] >= 0
                            for row in rows), rows)
        self.assertGreater(summary["runs"][0]["client"]["connections_opened"], 4)

    def test_a_connection_closed_behind_the_answer_costs_no_request(self) -> None:
        def closing(sock: socket.socket, number: int) -> None:
            good(sock)
            sock.shutdown(socket.SHUT_WR)

        with server(closing) as url:
            _, summary, said, _ = measure(url, *COMMON, "--num-requests", "40", "--concurrency",
                                          "4")
        self.assertEqual(summary["runs"][0]["completed"], 40, said)


class Interrupted(unittest.TestCase):
    def start(self, url: str, out: str, rate: str = "30") -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, SCRIPT, url, "--rate", rate, "--num-requests", "600",
             "--output-len", "10", "--out", out], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True)
        path = os.path.join(out, "requests.jsonl")
        for _ in range(400):
            time.sleep(0.02)
            if os.path.exists(path) and os.path.getsize(path) > 4000:
                break
        return process

    def test_ctrl_c_reports_what_there_is_and_exits_130(self) -> None:
        with engine() as url, tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            process = self.start(url, out)
            process.send_signal(signal.SIGINT)
            text, errors = process.communicate(timeout=20)
            with open(os.path.join(out, "summary.json"), encoding="utf-8") as file:
                run = json.load(file)["runs"][0]
        self.assertEqual(process.returncode, 130)
        self.assertIn("ttft p50", text)
        self.assertIn(f"INTERRUPTED: {run['offered']} of 600 requests", text)
        self.assertIn("interrupted", errors)
        self.assertGreater(run["completed"], 5)
        self.assertLess(run["offered"], 600)
        self.assertEqual(run["offered"], run["completed"] + sum(run["failures"].values()))

    def test_kill_9_leaves_every_finished_request_on_disk(self) -> None:
        with engine() as url, tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            process = self.start(url, out)
            process.kill()
            process.communicate()
            with open(os.path.join(out, "requests.jsonl"), encoding="utf-8") as file:
                rows = [json.loads(line) for line in file]
            with open(os.path.join(out, "plan.json"), encoding="utf-8") as file:
                plan = json.load(file)
            self.assertNotIn("summary.json", os.listdir(out))
            done = subprocess.run([sys.executable, SCRIPT, "--report", out], capture_output=True,
                                  text=True, check=False)
            self.assertIn("report.html", os.listdir(out))
        self.assertEqual(done.returncode, 0, done.stderr)
        known, last_s = {row["id"] for row in rows}, max(row["end_s"] for row in rows)
        due = {i for i, due_s in enumerate(plan["arrivals"][0]) if due_s <= last_s}
        self.assertIn(f"INTERRUPTED: {len(known | due)} of 600 requests when its process was "
                      f"killed; the {len(due - known)} in flight then are cancelled", done.stdout)
        self.assertGreater(len(rows), 5)
        self.assertTrue(all(row["class"] == "ok" for row in rows))
        self.assertEqual(len(plan["arrivals"][0]), 600)

    def test_an_engine_that_dies_leaves_the_run_standing(self) -> None:
        with engine() as url, tempfile.TemporaryDirectory() as folder:
            process = self.start(url, os.path.join(folder, "run"), "200")
        text, _ = process.communicate(timeout=60)  # the engine is gone by now
        self.assertIn(process.returncode, (0, 1))
        self.assertIn("refused", text)
        self.assertIn("offered 600", text)


class Proxies(unittest.TestCase):
    def test_the_environments_proxy_is_ignored_unless_asked_for(self) -> None:
        environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        with server(good) as url:
            for argv, kind in (((), "ok"), (("--proxy", "env"), "refused")):
                done = subprocess.run(
                    [sys.executable, SCRIPT, url, *COMMON, "--num-requests", "3", "--json", *argv],
                    capture_output=True, text=True, env=environment, check=False)
                run = json.loads(done.stdout)["runs"][0]
                found = "ok" if run["completed"] == 3 else next(iter(run["failures"]))
                self.assertEqual(found, kind, done.stderr)


if __name__ == "__main__":
    unittest.main()
