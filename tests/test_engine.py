"""loadgen.py's mock: the scheduler step by step, the server over raw sockets, every fault."""

import json
import os
import random
import socket
import subprocess
import sys
import time
import unittest
import zlib
from typing import Any, Dict, List, Tuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen

# One millisecond a step, a tenth of it a sequence, a hundredth a prompt token.
PROFILE = loadgen.MOCK._replace(weights_s=1e-3, sequence_s=1e-4, prefill_s_per_token=1e-5,
                                num_blocks=100)
FAST = {"weights_s": 0.001, "sequence_s": 0, "prefill_s_per_token": 0.00001, "num_blocks": 64,
        "max_model_len": 512}


def drain(engine: Any, steps: int = 100000) -> Tuple[float, Dict[Any, int]]:
    """Step until idle: seconds taken, and the tokens that each request got."""
    total_s, tokens = 0.0, {}
    for _ in range(steps):
        duration_s, emitted = engine.step()
        if not duration_s:
            return total_s, tokens
        total_s += duration_s
        for job_id, number in emitted:
            tokens[job_id] = tokens.get(job_id, 0) + number
    raise AssertionError("the engine does not come to rest")


def blocks_held(engine: Any) -> int:
    """Blocks that jobs hold, counted from the jobs."""
    jobs = engine.decoding + engine.prefilling
    private = sum(j.capacity // engine.profile.block_tokens - len(j.held) for j in jobs)
    return private + sum(1 for held in engine.references.values() if held)


class ProfileTest(unittest.TestCase):
    def test_a_profile_comes_from_its_fields_or_from_a_deployment(self):
        self.assertEqual(loadgen.profile_from({}), loadgen.MOCK)
        self.assertEqual(loadgen.profile_from({"weights_s": 1}).weights_s, 1.0)
        nested = loadgen.profile_from({"model": "x", "step_time": {"num_blocks": 7.0}})
        self.assertEqual((nested.num_blocks, type(nested.num_blocks)), (7, int))

    def test_a_bad_profile_is_said_in_one_line(self):
        for data, words in (({"weight_s": 1}, "did you mean weights_s"),
                            ({"weights_s": "1"}, "seconds"), ({"num_blocks": 0}, "whole"),
                            ({"num_blocks": 1.5}, "whole"),
                            ({"num_blocks": True}, "whole"), ({"prefix_caching": 1}, "true or"),
                            ({"weights_s": -1}, "zero or more"), ([], "JSON object"),
                            ({"weights_s": float("nan")}, "zero or more"),
                            ({"num_blocks": float("inf")}, "whole"), ({"step_time": 3}, "JSON"),
                            ({"max_num_seqs": 500}, "less than"),
                            ({"weights_s": 0, "sequence_s": 0}, "take time")):
            with self.subTest(data), self.assertRaises(loadgen.UserError) as caught:
                loadgen.profile_from(data)
            self.assertIn(words, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))


class EngineTest(unittest.TestCase):
    def engine(self, **fields: Any) -> Any:
        return loadgen.Engine(PROFILE._replace(**fields))

    def test_one_request_prefills_then_decodes_a_token_a_step(self):
        engine = self.engine()
        engine.submit("a", 100, 3)
        first_s, emitted = engine.step()
        self.assertEqual(emitted, [("a", 1)])
        self.assertAlmostEqual(first_s, 1e-3 + 100e-5 + 1e-4)
        second_s, emitted = engine.step()
        self.assertEqual(emitted, [("a", 1)])
        self.assertAlmostEqual(second_s, 1.1e-3)
        self.assertEqual(engine.running, 1)
        self.assertAlmostEqual(engine.kv_usage, 0.07)
        self.assertEqual(engine.step()[1], [("a", 1)])
        self.assertEqual(engine.step(), (0.0, []))
        self.assertEqual((engine.running, engine.kv_usage, engine.prompt_tokens,
                          engine.generation_tokens), (0, 0.0, 100, 3))

    def test_the_step_equation_takes_the_larger_of_compute_and_memory(self):
        engine = self.engine(kv_s_per_token=1e-6, overhead_s=5e-4, flop_s_per_token=0.0)
        engine.submit("a", 100, 9)
        self.assertAlmostEqual(engine.step()[0], 1e-3 + 100e-5 + 1e-4 + 5e-4)  # no context read yet
        self.assertAlmostEqual(engine.step()[0], 1e-3 + 100e-6 + 1e-4 + 5e-4)
        self.assertAlmostEqual(engine.step()[0], 1e-3 + 101e-6 + 1e-4 + 5e-4)
        engine = self.engine(kv_s_per_token=1e-6, flop_s_per_token=5e-3)
        engine.submit("a", 100, 9)
        engine.step()
        self.assertAlmostEqual(engine.step()[0], 5e-3 + 1e-4)

    def test_a_long_prompt_is_prefilled_in_chunks_beside_the_decodes(self):
        engine = self.engine(max_num_batched_tokens=64)
        engine.submit("a", 10, 20)
        engine.step()
        engine.submit("b", 150, 2)
        for chunk, emitted in ((63, [("a", 1)]), (63, [("a", 1)]), (24, [("a", 1), ("b", 1)])):
            duration_s, tokens = engine.step()
            self.assertEqual(tokens, emitted)
            self.assertAlmostEqual(duration_s, 1e-3 + chunk * 1e-5 + 2e-4)
        self.assertEqual(drain(engine)[1], {"a": 16, "b": 1})

    def test_prefills_share_what_the_decodes_leave_in_order_of_arrival(self):
        engine = self.engine(max_num_batched_tokens=64)
        for name in "abc":
            engine.submit(name, 30, 2)
        self.assertEqual(engine.step()[1], [("a", 1), ("b", 1)])  # 30 + 30 + 4 of 64
        self.assertEqual(engine.step()[1], [("a", 1), ("b", 1), ("c", 1)])

    def test_no_more_than_max_num_seqs_run(self):
        engine = self.engine(max_num_seqs=2)
        for name in "abc":
            engine.submit(name, 5, 3)
        seen = [engine.step()[1] for _ in range(4)]
        self.assertEqual(seen[:3], [[("a", 1), ("b", 1)]] * 3)
        self.assertEqual(seen[3], [("c", 1)])
        self.assertEqual((engine.running, engine.waiting), (1, 0))

    def test_a_known_prefix_shortens_the_prefill(self):
        engine = self.engine()
        shared = list(range(64))
        engine.submit("a", [*shared, 901, 902], 2)
        drain(engine)
        job = engine.submit("b", [*shared, 903, 904], 2)
        duration_s, _ = engine.step()
        self.assertAlmostEqual(duration_s, 1e-3 + 2e-5 + 1e-4)
        self.assertEqual((job.cached, engine.prefix_hit_tokens, engine.prefix_query_tokens),
                         (64, 64, 132))

    def test_the_last_prompt_token_is_always_computed(self):
        engine = self.engine()
        engine.submit("a", list(range(64)), 1)
        drain(engine)
        job = engine.submit("b", list(range(64)), 1)
        engine.step()
        self.assertEqual(job.cached, 48)

    def test_a_prefix_is_only_known_from_its_first_token_on(self):
        engine = self.engine()
        engine.submit("a", [0, *range(1, 64)], 1)
        drain(engine)
        job = engine.submit("b", [99, *range(1, 64)], 1)
        drain(engine)
        self.assertEqual(job.cached, 0)

    def test_keys_given_with_a_count_share_blocks_of_prompt_and_output(self):
        engine = self.engine()
        engine.submit("a", 40, 40, [("turn", block) for block in range(5)])
        drain(engine)
        job = engine.submit("b", 100, 1, [("turn", block) for block in range(5)])
        drain(engine)
        self.assertEqual(job.cached, 64)  # 79 tokens were in the cache: four full blocks

    def test_prefix_caching_can_be_off(self):
        engine = self.engine(prefix_caching=False)
        for name in "ab":
            job = engine.submit(name, list(range(64)), 1)
            drain(engine)
        self.assertEqual((job.cached, engine.prefix_query_tokens, engine.kv_usage), (0, 0, 0.0))

    def test_cached_blocks_are_lost_least_recently_used_first(self):
        engine = self.engine(num_blocks=8)
        for start in (0, 100):
            engine.submit(start, list(range(start, start + 48)), 1)
            drain(engine)
        engine.submit("again", list(range(49)), 1)  # refreshes the first
        drain(engine)
        self.assertEqual(engine.prefix_hit_tokens, 48)
        engine.submit("other", list(range(500, 564)), 1)
        drain(engine)
        hits = engine.prefix_hit_tokens
        engine.submit("kept", list(range(49)), 1)
        drain(engine)
        self.assertEqual(engine.prefix_hit_tokens - hits, 48)
        engine.submit("lost", list(range(100, 148)), 1)
        drain(engine)
        self.assertLess(engine.prefix_hit_tokens - hits - 48, 32)

    def test_preemption_recomputes_and_every_token_still_comes_once(self):
        engine = self.engine(num_blocks=6)
        for name in "ab":
            engine.submit(name, 32, 40)  # 72 tokens: five blocks each, of six
        preempted_at = []
        tokens = {"a": 0, "b": 0}
        for step in range(1, 200):
            duration_s, emitted = engine.step()
            for name, number in emitted:
                tokens[name] += number
            if engine.preemptions > len(preempted_at):
                preempted_at.append(step)
                self.assertEqual(emitted, [("a", 1)])
                self.assertEqual((engine.running, engine.waiting), (1, 1))
            if preempted_at and emitted == [("b", 1)] and tokens["b"] == 18:
                self.assertAlmostEqual(duration_s, 1e-3 + (32 + 17) * 1e-5 + 1e-4)  # all again
        self.assertEqual(preempted_at, [18])
        self.assertEqual(tokens, {"a": 40, "b": 40})
        self.assertEqual(engine.prompt_tokens, 64)

    def test_a_request_is_let_in_when_its_whole_prompt_fits(self):
        engine = self.engine(num_blocks=6)
        engine.submit("a", 60, 4)
        engine.step()
        engine.submit("b", 60, 4)
        self.assertEqual(engine.step()[1], [("a", 1)])
        self.assertEqual((engine.running, engine.waiting, engine.preemptions), (1, 1, 0))
        self.assertEqual(drain(engine)[1], {"a": 2, "b": 4})

    def test_requests_that_can_never_run_are_refused(self):
        engine = self.engine(num_blocks=4, max_model_len=100)
        for n_in, max_tokens in ((99, 2), (64, 1), (0, 1), (1, 0)):
            with self.assertRaises(ValueError):
                engine.submit("x", n_in, max_tokens)
        engine.submit("x", 60, 4)
        with self.assertRaises(ValueError):
            engine.submit("x", 1, 1)

    def test_abort_frees_what_a_request_holds_in_every_state(self):
        engine = self.engine(max_num_batched_tokens=64)
        for name, length in (("decoding", 20), ("prefilling", 200), ("waiting", 20)):
            engine.submit(name, length, 10)
        engine.step()
        self.assertEqual((len(engine.decoding), len(engine.prefilling), engine.waiting), (1, 1, 1))
        for name in ("decoding", "prefilling", "waiting"):
            self.assertTrue(engine.abort(name))
            self.assertFalse(engine.abort(name))
        self.assertEqual((engine.kv_usage, engine.running, engine.waiting), (0.0, 0, 0))
        self.assertEqual(engine.step(), (0.0, []))

    def test_blocks_are_conserved_in_a_random_storm(self):
        chance = random.Random(7)
        engine = self.engine(num_blocks=40, max_num_seqs=8)
        asked, got, aborted = {}, {}, set()
        for number in range(3000):
            if chance.random() < 0.2:
                prompt = [chance.randrange(2)] * chance.randrange(1, 150)
                asked[number] = chance.randrange(1, 60)
                engine.submit(number, prompt + [number] * chance.randrange(20), asked[number])
            if chance.random() < 0.02 and engine.jobs:
                victim = chance.choice(sorted(engine.jobs))
                engine.abort(victim)
                aborted.add(victim)
            for job_id, tokens in engine.step()[1]:
                got[job_id] = got.get(job_id, 0) + tokens
            self.assertEqual(engine.free_blocks + len(engine.idle) + blocks_held(engine), 40)
            self.assertLessEqual(engine.running, 8)
        for job_id, tokens in drain(engine)[1].items():
            got[job_id] = got.get(job_id, 0) + tokens
        self.assertGreater(engine.preemptions, 5)
        self.assertGreater(engine.prefix_hit_tokens, 1000)
        self.assertEqual({i: n for i, n in got.items() if i not in aborted},
                         {i: n for i, n in asked.items() if i not in aborted})
        self.assertEqual((engine.free_blocks + len(engine.idle), engine.kv_usage), (40, 0.0))

    def test_the_same_submissions_give_the_same_steps(self):
        def history() -> List[Any]:
            engine = self.engine(num_blocks=30)
            for number in range(12):
                engine.submit(number, 50 + number, 40)
            return [engine.step() for _ in range(200)]
        self.assertEqual(history(), history())


class Client:
    """A raw socket that can ask and read answers."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.data = bytearray()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""
        lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(content)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.sock.sendall("\r\n".join([*lines, "", ""]).encode() + content)

    def more(self) -> bool:
        data = self.sock.recv(65536)
        self.data += data
        return bool(data)

    def head(self) -> Any:
        while True:
            head = loadgen.take_head(self.data)
            if head or not self.more():
                return head

    def answer(self) -> Tuple[int, Dict[str, str], bytes]:
        head = self.head()
        body = loadgen.Body(head, True)
        content = b"".join(body.feed(bytes(self.data)))
        while not body.complete:
            self.data.clear()
            if not self.more():
                break
            content += b"".join(body.feed(bytes(self.data)))
        self.data = bytearray(body.leftover)
        return int(head.start[1]), head.headers, content

    def closed(self) -> bool:
        return not self.more()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.sock.close()


class Server:
    """The mock in its own process, which ends with our end of its stdin."""

    def __init__(self, faults: str = "", **fields: Any) -> None:
        code = ("import json, sys; sys.path[:0] = json.loads(sys.argv[3]); import loadgen\n"
                "loadgen.serve(loadgen.profile_from(json.loads(sys.argv[1])), '127.0.0.1', 0,\n"
                "    loadgen.parse_faults(sys.argv[2]), lambda p: print(p, flush=True), True)")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps({**FAST, **fields}), faults,
             json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.port = int(self.process.stdout.readline())

    def get(self, path: str) -> Any:
        with Client(self.port) as client:
            client.ask("GET", path)
            status, _, body = client.answer()
        assert status == 200, (status, body)
        return json.loads(body) if body.startswith(b"{") else body.decode()

    def post(self, path: str, body: Any, **headers: str) -> Tuple[int, Dict[str, str], bytes]:
        with Client(self.port) as client:
            client.ask("POST", path, body, **headers)
            return client.answer()

    def metrics(self) -> Dict[str, float]:
        """Samples by name, without labels; of a histogram its count and sum."""
        lines = [line for line in self.get("/metrics").splitlines() if line[0] != "#"]
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def end(self) -> int:
        self.process.stdin.close()
        code = self.process.wait(5)
        self.process.stdout.close()
        return code


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(max_tokens: int = 4, **more: Any) -> Dict[str, Any]:
    return {"model": "mock-model", "messages": [{"role": "user", "content": "one two three"}],
            "max_tokens": max_tokens, "stream": True, **more}


def events(body: bytes) -> List[Any]:
    """A stream's events, parsed; [DONE] stays text."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts), parts
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


class OneServer(unittest.TestCase):
    """A server for all the tests of a class."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server()

    @classmethod
    def tearDownClass(cls):
        assert cls.server.end() == 0


class ServerTest(OneServer):
    def setUp(self):
        self.server.get("/truth/reset")

    def test_a_chat_stream_has_vllms_shape(self):
        status, headers, body = self.server.post(
            CHAT, chat(3, stream_options={"include_usage": True}), X_Request_Id="abc-1")
        self.assertEqual((status, headers["content-type"], headers["transfer-encoding"]),
                         (200, "text/event-stream; charset=utf-8", "chunked"))
        role, first, _second, last, usage, done = events(body)
        self.assertEqual((role["id"], role["object"], role["model"]),
                         ("chatcmpl-abc-1", "chat.completion.chunk", "mock-model"))
        self.assertEqual(role["choices"], [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
             "finish_reason": None}])
        self.assertRegex(first["choices"][0]["delta"]["content"], r"^ w\d{3}$")
        self.assertIsNone(first["choices"][0]["finish_reason"])
        self.assertEqual(last["choices"][0]["finish_reason"], "length")
        self.assertTrue(last["choices"][0]["delta"]["content"])
        self.assertEqual((usage["choices"], usage["usage"]), (
            [], {"prompt_tokens": 10, "total_tokens": 13, "completion_tokens": 3}))
        self.assertEqual(done, "[DONE]")

    def test_the_bytes_of_an_inner_event_are_vllms(self):
        body = self.server.post(CHAT, chat(3), X_Request_Id="x")[2]
        inner = body.split(b"\n\n")[2]
        self.assertRegex(inner.decode(), r'^data: \{"id":"chatcmpl-x","object":"chat.completion.'
                         r'chunk","created":\d+,"model":"mock-model","choices":\[\{"index":0,"delta"'
                         r':\{"content":" w\d\d\d"\},"logprobs":null,"finish_reason":null,'
                         r'"token_ids":null\}\]\}$')

    def test_usage_comes_only_when_asked(self):
        for path, body in ((CHAT, chat(2)), (TEXT, {"prompt": "a b", "stream": True,
                                                    "max_tokens": 2})):
            answer = events(self.server.post(path, body)[2])
            self.assertFalse([e for e in answer if "usage" in e])
            self.assertEqual(answer[-1], "[DONE]")
            body["stream_options"] = {"include_usage": True}
            self.assertTrue(events(self.server.post(path, body)[2])[-2]["usage"])
        body["stream_options"]["continuous_usage_stats"] = True
        answer = events(self.server.post(TEXT, body)[2])
        self.assertEqual([e["usage"]["completion_tokens"] for e in answer[:-1]], [1, 2, 2])

    def test_prompts_are_words_or_ids_and_count_as_such(self):
        for prompt, n_in in (("one two  three", 3), ([5, 6, 7, 8], 4), (["a b"], 2), ([[1, 2]], 2)):
            body = {"prompt": prompt, "max_tokens": 1, "stream": True,
                    "stream_options": {"include_usage": True}}
            answer = events(self.server.post(TEXT, body)[2])
            self.assertEqual(answer[-2]["usage"]["prompt_tokens"], n_in)
            self.assertEqual(answer[0]["choices"][0]["finish_reason"], "length")
            self.assertTrue(answer[0]["choices"][0]["text"])

    def test_an_answer_without_a_stream_is_one_json(self):
        status, headers, body = self.server.post(CHAT, chat(3, stream=False))
        whole = json.loads(body)
        self.assertEqual((status, headers["content-type"]), (200, "application/json"))
        self.assertEqual((whole["object"], whole["usage"]["completion_tokens"]),
                         ("chat.completion", 3))
        self.assertEqual(len(whole["choices"][0]["message"]["content"].split()), 3)
        whole = json.loads(self.server.post(TEXT, {"prompt": [1], "max_tokens": 2})[2])
        self.assertEqual((whole["object"], len(whole["choices"][0]["text"].split())),
                         ("text_completion", 2))

    def test_without_max_tokens_a_chat_stops_and_a_completion_is_cut(self):
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]}
        whole = json.loads(self.server.post(CHAT, body)[2])
        self.assertEqual((whole["choices"][0]["finish_reason"], whole["usage"]["prompt_tokens"]),
                         ("stop", 9))
        whole = json.loads(self.server.post(TEXT, {"prompt": "a"})[2])
        self.assertEqual((whole["choices"][0]["finish_reason"],
                          whole["usage"]["completion_tokens"]), ("length", 16))
        body["max_completion_tokens"] = 2
        self.assertEqual(json.loads(self.server.post(CHAT, body)[2])["usage"]["total_tokens"], 11)

    def test_bad_requests_get_vllms_errors_and_the_connection_lives(self):
        with Client(self.server.port) as client:
            for status, path, body in (
                    (404, CHAT, chat(model="nope")), (400, CHAT, b'{"model":'), (400, CHAT, b"[1]"),
                    (400, TEXT, {"prompt": [1], "max_tokens": 100000}), (400, TEXT, {"a": 1}),
                    (400, TEXT, {"prompt": [1] * 512, "max_tokens": 1}), (404, "/v1/no", {"a": 1}),
                    (400, TEXT, {"prompt": "a", "max_tokens": 0}), (400, CHAT, {"messages": []}),
                    (400, CHAT, chat(n=2)), (400, TEXT, {"prompt": [1, "a"]}),
                    (405, "/v1/models", {"a": 1}), (400, CHAT, b"\xff" * 9)):
                client.ask("POST", path, body)
                code, headers, content = client.answer()
                self.assertEqual(code, status, body)
                self.assertEqual(headers["content-type"], "application/json")
                error = json.loads(content)["error"]
                self.assertEqual(error["code"], status)
                self.assertTrue(error["message"] and error["type"])
            client.ask("POST", CHAT, chat(1))
            self.assertEqual(client.answer()[0], 200)

    def test_what_is_no_http_is_answered_and_hung_up_on(self):
        for data in (b"HELLO\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"y" * 66000,
                     b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
                     b"POST / HTTP/1.1\r\nContent-Length: 67108865\r\n\r\n"):
            with Client(self.server.port) as client:
                client.sock.sendall(data)
                self.assertIn(client.answer()[0], (400, 413, 431))
                self.assertTrue(client.closed())

    def test_connections_are_kept_and_requests_may_follow_at_once(self):
        with Client(self.server.port) as client:
            client.ask("POST", CHAT, chat(2))
            client.ask("POST", TEXT, {"prompt": "a", "max_tokens": 1})
            client.ask("GET", "/health")
            self.assertTrue(client.answer()[2].endswith(b"data: [DONE]\n\n"))
            self.assertEqual(json.loads(client.answer()[2])["object"], "text_completion")
            self.assertEqual(client.answer()[0], 200)

    def test_connection_close_and_http_1_0_are_honoured(self):
        with Client(self.server.port) as client:
            client.ask("POST", CHAT, chat(2), Connection="close")
            _, headers, body = client.answer()
            self.assertEqual((headers["connection"], body[-8:]), ("close", b"[DONE]\n\n"))
            self.assertTrue(client.closed())
        with Client(self.server.port) as client:
            body = json.dumps(chat(2)).encode()
            client.sock.sendall(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b"
                                % (CHAT.encode(), len(body), body))
            _, headers, answer = client.answer()
            self.assertNotIn("transfer-encoding", headers)
            self.assertEqual(events(answer)[-1], "[DONE]")

    def test_a_request_may_come_byte_by_byte(self):
        with Client(self.server.port) as client:
            client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            body = json.dumps(chat(1)).encode()
            for byte in b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (
                    CHAT.encode(), len(body), body):
                client.sock.send(bytes([byte]))
            self.assertEqual(client.answer()[0], 200)

    def test_a_client_that_goes_away_frees_its_seat(self):
        with Client(self.server.port) as client:
            client.ask("POST", CHAT, chat(450), X_Request_Id="gone")
            client.head()
            self.assertEqual(self.server.metrics()["vllm:num_requests_running"], 1)
        deadline = time.monotonic() + 2
        while self.server.metrics()["vllm:num_requests_running"] and time.monotonic() < deadline:
            time.sleep(0.002)
        truth, = self.server.get("/truth")["requests"]
        self.assertEqual((truth["id"], truth["ended"]), ("gone", "abort"))
        self.assertLess(truth["n_out"], 450)
        self.assertEqual(self.server.metrics()["vllm:kv_cache_usage_perc"], 0)

    def test_the_model_is_listed(self):
        model, = self.server.get("/v1/models")["data"]
        self.assertEqual((model["id"], model["max_model_len"]), ("mock-model", 512))

    def test_metrics_agree_with_the_truth(self):
        before = self.server.metrics()
        clients = [Client(self.server.port) for _ in range(5)]
        for number, client in enumerate(clients):
            client.ask("POST", CHAT, chat(5 + number), X_Request_Id=str(number))
        for client in clients:
            client.answer()
            client.sock.close()
        after, truths = self.server.metrics(), self.server.get("/truth")["requests"]

        def grown(name: str) -> float:
            return after[f"vllm:{name}"] - before[f"vllm:{name}"]
        self.assertEqual(sorted(t["id"] for t in truths), list("01234"))
        self.assertEqual(grown("generation_tokens_total"), sum(t["n_out"] for t in truths))
        self.assertEqual(grown("prompt_tokens_total"), sum(t["n_in"] for t in truths))
        self.assertEqual(grown("time_to_first_token_seconds_count"), 5)
        self.assertEqual(grown("inter_token_latency_seconds_count"), 35 - 5)
        for name, start, end in (("time_to_first_token", "recv_ns", "first_ns"),
                                 ("e2e_request_latency", "recv_ns", "last_ns"),
                                 ("request_queue_time", "recv_ns", "start_ns"),
                                 ("request_prefill_time", "start_ns", "first_ns"),
                                 ("request_decode_time", "first_ns", "last_ns")):
            total_s = sum(t[end] - t[start] for t in truths) * 1e-9
            self.assertAlmostEqual(grown(f"{name}_seconds_sum"), total_s, places=6)
        self.assertEqual(after["vllm:num_requests_running"], 0)

    def test_the_truth_is_on_the_clients_clock_and_no_token_is_early(self):
        sent_ns = time.perf_counter_ns()
        self.server.post(CHAT, chat(10), X_Request_Id="t")
        end_ns = time.perf_counter_ns()
        truth, = self.server.get("/truth")["requests"]
        self.assertLess(sent_ns, truth["recv_ns"])
        self.assertLess(truth["last_ns"], end_ns)
        self.assertGreaterEqual(truth["first_ns"] - truth["recv_ns"], 1_100_000)  # 10 tokens: 0.1
        self.assertGreaterEqual(truth["last_ns"] - truth["recv_ns"], 10_100_000)
        self.assertEqual((truth["n_in"], truth["n_out"], truth["ended"]), (10, 10, "length"))

    def test_cached_tokens_are_told_when_the_prefix_was_known(self):
        body = {"prompt": list(range(100, 164)), "max_tokens": 1}
        self.assertNotIn("prompt_tokens_details",
                         json.loads(self.server.post(TEXT, body)[2])["usage"])
        self.assertEqual(json.loads(self.server.post(TEXT, body)[2])["usage"]
                         ["prompt_tokens_details"], {"cached_tokens": 48})

    def test_the_next_turn_of_a_chat_finds_its_history(self):
        messages = [{"role": "user", "content": "tell me more " * 20}]
        whole = json.loads(self.server.post(CHAT, {"messages": messages, "max_tokens": 40})[2])
        messages += [whole["choices"][0]["message"], {"role": "user", "content": "and then"}]
        whole = json.loads(self.server.post(CHAT, {"messages": messages, "max_tokens": 1})[2])
        self.assertEqual(whole["usage"]["prompt_tokens_details"], {"cached_tokens": 96})  # of 106

    def test_many_connections_are_served(self):
        clients = [Client(self.server.port) for _ in range(200)]
        for client in clients:
            client.ask("POST", TEXT, {"prompt": [1, 2], "max_tokens": 3, "stream": True})
        for client in clients:
            self.assertTrue(client.answer()[2].endswith(b"data: [DONE]\n\n"))
            client.sock.close()

    def test_a_busy_port_is_said(self):
        with self.assertRaises(loadgen.UserError) as caught:
            loadgen.serve(loadgen.MOCK, "127.0.0.1", self.server.port, loadgen.parse_faults(""),
                          lambda port: None)
        self.assertIn(str(self.server.port), str(caught.exception))


class FaultTest(OneServer):
    def ask(self, fault: str, tokens: int = 6, path: str = CHAT) -> Client:
        client = Client(self.server.port)
        self.addCleanup(client.sock.close)
        client.ask("POST", path, chat(tokens, stream_options={"include_usage": True}),
                   X_Mock_Fault=fault, X_Request_Id=fault)
        return client

    def answer(self, fault: str, tokens: int = 6) -> Tuple[int, Dict[str, str], bytes]:
        return self.ask(fault, tokens).answer()

    def test_names_and_shares_are_parsed_and_checked(self):
        parsed = loadgen.parse_faults("stall=0.05, status:503=0.1,no_done", seed=3)
        self.assertEqual([(n, r) for _, n, r in parsed.rates],
                         [("stall", 0.05), ("status", 0.1), ("no_done", 1.0)])
        self.assertEqual((parsed.seed, loadgen.parse_faults("").rates), (3, ()))
        for text, words in (("stal", "did you mean stall"), ("stall=2", "0 to 1"),
                            ("status", "status:503"),
                            ("status:abc", "400 to 599"), ("stall:3", "argument"),
                            ("stall=x", "0 to 1"), ("status:200", "400 to 599")):
            with self.subTest(text), self.assertRaises(loadgen.UserError) as caught:
                loadgen.parse_faults(text)
            self.assertIn(words, str(caught.exception))

    def test_status_answers_with_an_error(self):
        status, headers, body = self.answer("status:429")
        self.assertEqual((status, headers["retry-after"]), (429, "1"))
        self.assertEqual(json.loads(body)["error"]["code"], 429)
        status, headers, _ = self.answer("status:503")
        self.assertEqual((status, "retry-after" in headers), (503, False))

    def test_answers_that_are_no_stream(self):
        status, headers, body = self.answer("html")
        self.assertEqual((status, headers["content-type"], body[:15]),
                         (200, "text/html", b"<!DOCTYPE html>"))
        status, headers, _ = self.answer("redirect")
        self.assertEqual((status, headers["location"]), (307, "/v1/elsewhere"))
        _, headers, body = self.answer("not_stream")
        self.assertEqual(headers["content-type"], "application/json")
        self.assertEqual(json.loads(body)["object"], "chat.completion")

    def test_silent_and_stall_keep_the_connection_and_say_no_more(self):
        silent, stalled = self.ask("silent"), self.ask("stall")
        stalled.head()
        while stalled.data.count(b'"content":" ') < 3:
            self.assertTrue(stalled.more())
        for client in (silent, stalled):
            client.sock.settimeout(0.02)
            with self.assertRaises(socket.timeout):
                client.more()

    def test_reset_and_truncate_cut_the_stream_half_way(self):
        client = self.ask("reset")
        with self.assertRaises(ConnectionResetError):
            while client.more():
                pass
        _, _, body = self.answer("truncate")
        self.assertEqual(len(events(body)), 4)  # role and three of six tokens

    def test_refuse_closes_without_a_word(self):
        self.assertTrue(self.ask("refuse").closed())

    def test_a_slow_head_comes_in_pieces(self):
        start_s = time.monotonic()
        client, reads = self.ask("slow_head"), 0
        while b"\r\n\r\n" not in client.data:
            client.more()
            reads += 1
        self.assertGreater(reads, 4)
        self.assertGreater(time.monotonic() - start_s, 0.15)
        self.assertEqual(events(client.answer()[2])[-1], "[DONE]")

    def test_an_endless_head_and_a_huge_line_flow_as_long_as_one_reads(self):
        for fault in ("endless_head", "huge_line"):
            client, total = self.ask(fault), 0
            while total < 3_000_000:
                total += client.sock.recv_into(bytearray(65536))
        client.sock.close()
        self.assertEqual(self.server.get("/health"), "")

    def test_errors_in_the_stream(self):
        answer = events(self.answer("error_event")[2])
        self.assertEqual((answer[-2]["error"]["code"], answer[-1]), (500, "[DONE]"))
        self.assertEqual(len(answer), 6)
        body = self.answer("bad_json")[2]
        with self.assertRaises(ValueError):
            events(body)
        self.assertTrue(body.endswith(b"data: [DONE]\n\n"))

    def test_streams_without_their_end_their_usage_or_any_token(self):
        self.assertTrue(events(self.answer("no_done")[2])[-1]["usage"])
        answer = events(self.answer("no_usage")[2])
        self.assertTrue(answer[-1] == "[DONE]" and answer[-2]["choices"])
        _role, finish, usage, _done = events(self.answer("empty")[2])
        self.assertEqual((finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]),
                         ({}, "stop"))
        self.assertEqual(usage["usage"]["completion_tokens"], 0)
        told = events(self.answer("wrong_usage")[2])[-2]["usage"]
        self.assertEqual((told["completion_tokens"], told["total_tokens"]), (12, 16))

    def test_odd_dialects_of_sse(self):
        plain = self.answer("no_space")[2]
        self.assertEqual((plain.count(b"data:{"), plain.count(b"data: ")), (8, 0))
        self.assertEqual(self.answer("crlf")[2].count(b"\r\n\r\n"), 9)
        self.assertEqual(self.answer("comments")[2].count(b": keep-alive\n\n"), 9)
        _, headers, body = self.answer("gzip")
        self.assertEqual(headers["content-encoding"], "gzip")
        self.assertEqual(len(events(zlib.decompress(body, 31))), 9)

    def test_events_are_split_or_bundled_over_sends(self):
        for fault, chunks in (("split", 27), ("bundle", 2)):
            client = self.ask(fault)
            client.head()
            while not client.data.endswith(b"0\r\n\r\n"):
                client.more()
            sizes = [line for line in bytes(client.data).split(b"\r\n")[::2] if line]
            self.assertEqual(len(sizes), chunks + 1)
            self.assertTrue(all(int(size, 16) >= 0 for size in sizes))

    def test_a_request_for_no_stream_gets_only_the_faults_that_fit(self):
        for fault, status in (("slow_head,empty,reset,gzip,crlf", 200), ("status:500", 500)):
            with Client(self.server.port) as client:
                client.ask("POST", TEXT, {"prompt": "a", "max_tokens": 2}, X_Mock_Fault=fault)
                code, _, body = client.answer()
                self.assertEqual((code, type(json.loads(body))), (status, dict))

    def test_faults_combine_and_an_unknown_one_is_refused(self):
        body = self.answer("crlf,no_done")[2]
        self.assertEqual((body.count(b"\r\n\r\n"), b"DONE" in body), (8, False))
        self.assertEqual(self.answer("nonsense")[0], 400)

    def test_a_share_of_the_requests_is_struck_and_the_rest_is_well(self):
        server = Server("status:503=0.5,refuse=0.3")
        seen = []
        for _ in range(40):
            try:
                seen.append(server.post(TEXT, {"prompt": "a", "max_tokens": 1})[0])
            except (ConnectionError, AttributeError):
                seen.append(0)
        self.assertEqual(server.end(), 0)
        self.assertTrue(all(seen.count(code) >= 5 for code in (0, 200, 503)), seen)

    def test_every_fault_in_the_table_is_tried_here(self):
        with open(__file__, encoding="utf-8") as source:
            text = source.read()
        for name in loadgen.FAULTS:
            self.assertRegex(text, rf'["(]{name}[":=,]|,{name}[=":]')


class LifeTest(unittest.TestCase):
    def test_sigterm_ends_it_in_order(self):
        server = Server()
        server.process.terminate()
        self.assertEqual(server.process.wait(5), 0)
        server.end()


if __name__ == "__main__":
    unittest.main()
