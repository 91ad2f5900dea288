"""The wire code of loadgen.py: fixtures cut at every byte, servers' quirks, bounds, noise."""

import contextlib
import gc
import gzip
import json
import os
import random
import sys
import unittest
import weakref
import zlib
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import loadgen

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
MS = 1_000_000  # ns
Read = Tuple[int, bytes]  # ms after send, bytes
CLASSES = set(
    "ok http_status redirect not_stream stream_error malformed truncated empty filtered "
    "aborted".split()
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def chunk(delta: Any, finish: Optional[str] = None, **more: Any) -> bytes:
    """One event of a chat stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def said(text: str) -> bytes:
    return chunk({"content": text})


def usage(n_in: int, n_out: int, **more: Any) -> bytes:
    counts = {"prompt_tokens": n_in, "completion_tokens": n_out, **more}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


ROLE, STOP, DONE = (
    chunk({"role": "assistant", "content": ""}),
    chunk({}, "stop"),
    b"data: [DONE]\n\n",
)
BASE: List[Read] = [
    (10, ROLE),
    (100, said("a")),
    (120, said("b")),
    (140, said("c") + STOP),
    (160, usage(5, 3) + DONE),
]
BODY = b"".join(data for _, data in BASE)


def bare(reads: Iterable[Read], last_ms: int = 0) -> loadgen.Reply:
    """A reply that got body bytes only, then the peer's close."""
    reply = loadgen.Reply()
    for last_ms, data in reads:
        reply.feed_body(data, last_ms * MS)
    reply.eof(last_ms * MS)
    return reply


def whole(reads: Iterable[Read], close: bool = True) -> loadgen.Reply:
    """A reply that got heads and framing too."""
    reply, ms = loadgen.Reply(), 0
    for ms, data in reads:
        reply.feed(data, ms * MS)
    if close:
        reply.eof(ms * MS)
    return reply


def one(data: bytes, close: bool = True) -> loadgen.Reply:
    return whole([(160, data)], close)


def chunked(reads: Iterable[Read], head: bytes = CHUNKED) -> List[Read]:
    """The reads of a body as those of a chunked reply."""
    framed = [(ms, loadgen.encode_chunk(data)) for ms, data in reads]
    return [(0, head), *framed, (framed[-1][0], loadgen.LAST_CHUNK)]


def bytewise(reads: Iterable[Read]) -> Iterator[Read]:
    return ((ms, data[i : i + 1]) for ms, data in reads for i in range(len(data)))


def cuts(reads: List[Read]) -> Iterator[List[Read]]:
    """The same reads with one of them cut, at each place in turn."""
    for k, (ms, data) in enumerate(reads):
        for i in range(1, len(data)):
            yield [*reads[:k], (ms, data[:i]), (ms, data[i:]), *reads[k + 1 :]]


def facts(reply: loadgen.Reply) -> Dict[str, Any]:
    """What the fixtures state, in their words and in milliseconds."""
    stamps = [ns / MS for ns in reply.event_ns]
    n = len(stamps) if reply.n_out is None else reply.n_out
    timed = bool(stamps) and n > 1
    return {
        "ok": reply.outcome()[0] == "ok",
        "err": reply.outcome()[0] == "stream_error",
        "ttft": stamps[0] if stamps else None,
        "ttfo": None if reply.answer_ns is None else reply.answer_ns / MS,
        "e2e": stamps[-1] if stamps else None,
        "n": n,
        "nsrc": "chunks" if reply.n_out is None else "usage",
        "tpot": round((stamps[-1] - stamps[0]) / (n - 1), 3) if timed else None,
        "gaps": [b - a for a, b in zip(stamps, stamps[1:])],
        "fin": reply.finish_reason,
        "done": reply.done,
        "bad": reply.bad_events,
    }


def fixtures() -> Iterator[Tuple[str, List[Read], Dict[str, Any]]]:
    with open(os.path.join(DATA, "wire_fixtures.json"), encoding="utf-8") as file:
        for name, row in json.load(file).items():
            reads = [(ms, text.encode("latin-1")) for ms, text in row["reads"]]
            for k, length in row.get("replace_content_with_length", {}).items():
                ms, data = reads[int(k)]
                event = json.loads(data[6:])
                event["choices"][0]["delta"]["content"] = "x" * length
                reads[int(k)] = ms, b"data: " + json.dumps(event).encode() + b"\n\n"
            yield name, reads, row["expect"]


def transcript(name: str) -> bytes:
    """The bytes of a recorded reply, whose framing curl took off; a length gives it one again."""
    with open(os.path.join(DATA, "transcripts", name + ".txt"), "rb") as file:
        text = file.read().partition(b"\n")[2]
    head, _, body = text.partition(b"\r\n\r\n")
    if b"chunked" not in head:
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        return head + b"\r\n\r\n" + body[:length]
    events = body.rstrip(b"\n").split(b"\n\n")
    framed = [loadgen.encode_chunk(event + b"\n\n") for event in events]
    return head + b"\r\n\r\n" + b"".join(framed) + loadgen.LAST_CHUNK


class TheFixtures(unittest.TestCase):
    def expect(self, reply: loadgen.Reply, expected: Dict[str, Any]) -> None:
        got = facts(reply)
        self.assertEqual({key: got[key] for key in expected}, expected, reply.outcome())

    def test_have_their_expected_values(self) -> None:
        for name, reads, expected in fixtures():
            with self.subTest(name):
                self.expect(bare(reads), expected)
                self.expect(whole(chunked(reads)), expected)
                self.expect(whole([(0, UNTIL_CLOSE), *reads]), expected)

    def test_have_them_when_fed_one_byte_a_read(self) -> None:
        for name, reads, expected in fixtures():
            if sum(len(data) for _, data in reads) <= 4096:
                with self.subTest(name):
                    self.expect(bare(bytewise(reads)), expected)
                    self.expect(whole(bytewise(chunked(reads))), expected)
                    self.expect(whole(bytewise([(0, UNTIL_CLOSE), *reads])), expected)

    def test_have_them_when_cut_at_any_byte(self) -> None:
        for name, reads, expected in fixtures():
            if sum(len(data) for _, data in reads) <= 4096:
                with self.subTest(name):
                    for cut in cuts(reads):
                        self.expect(bare(cut), expected)

    def test_have_them_when_their_framing_is_cut_at_any_byte(self) -> None:
        for name, reads, expected in fixtures():
            if name in ("base", "A7", "A8", "A10", "A12", "A16", "C13"):
                with self.subTest(name):
                    for cut in cuts(chunked(reads)):
                        self.expect(whole(cut), expected)

    def test_have_them_when_chunks_do_not_follow_events(self) -> None:
        for name, reads, expected in fixtures():
            pieces = [(ms, data[i : i + 7]) for ms, data in reads[:20] for i in range(0, 999, 7)]
            if sum(len(data) for _, data in reads) <= 4096:
                with self.subTest(name):
                    framed = chunked([(ms, data) for ms, data in pieces if data])
                    if sum(len(d) for _, d in pieces) == sum(len(d) for _, d in reads):
                        self.expect(whole(framed), expected)


class Lines(unittest.TestCase):
    def test_end_in_any_mixture(self) -> None:
        rng = random.Random(1)
        for _ in range(50):
            lines = [line + rng.choice((b"\n", b"\r\n", b"\r")) for line in BODY.split(b"\n")[:-1]]
            pairs = zip([b"", *lines], lines)  # CR and then LF would be one line end
            text = b"".join(b"\r" if a[-1:] == b"\r" and b == b"\n" else b for a, b in pairs)
            self.assertEqual(facts(bare([(160, text)])), facts(bare([(160, BODY)])))
            self.assertEqual(facts(bare(bytewise([(160, text)]))), facts(bare([(160, BODY)])))

    def test_ended_by_cr_complete_an_event_without_waiting_for_lf(self) -> None:
        reply = loadgen.Reply()
        reply.feed_body(said("a").replace(b"\n", b"\r"), 7)
        reply.feed_body(b"\n", 9)
        self.assertEqual(list(reply.event_ns), [7])

    def test_may_start_with_a_bom_and_hold_fields_of_all_kinds(self) -> None:
        extra = b"\xef\xbb\xbfid: 1\nretry: 5\n: hello\nevent: message\nfoo: bar\nfoo\n"
        reply = bare([(5, extra), *BASE])
        self.assertEqual(facts(reply), facts(bare(BASE)))
        self.assertEqual(facts(bare(bytewise([(5, extra), *BASE]))), facts(reply))

    def test_cut_inside_a_character_keep_it(self) -> None:
        event = 'data: {"choices":[{"index":0,"delta":{"content":"é世🙂"}}]}\n\n'.encode()
        self.assertEqual(len(bare(bytewise([(1, event), *BASE])).event_ns), 4)

    def test_that_are_not_utf8_are_still_read(self) -> None:
        reply = bare([(1, b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n'), *BASE])
        self.assertEqual((reply.outcome()[0], len(reply.event_ns)), ("ok", 4))

    def test_of_heartbeats_are_no_events(self) -> None:
        beats = [b": hb\n\n", b"data:\n\n", b"data: {}\n\n", b"event: ping\ndata: ping\n\n"]
        beats += [b'event: ping\ndata: {"type":"ping"}\n\n', b"id: 4\n\n", b"event: note\n: x\n\n"]
        for beat in beats:
            reply = bare([(5, beat), *BASE[:2], (105, beat), *BASE[2:]])
            self.assertEqual(facts(reply), facts(bare(BASE)), beat)

    def test_done_may_carry_blanks(self) -> None:
        for done in (
            b"[DONE]\n",
            b"data:[DONE]\n\n",
            b"data:  [DONE] \n\n",
            b"data: [DONE]\r\r",
            b"data: [DONE]",
        ):
            self.assertTrue(bare([(1, said("a")), (2, done)]).done, done)


class Chunks(unittest.TestCase):
    def output(self, **choice: Any) -> int:
        return loadgen.chunk_output(choice)

    def test_carry_answers_reasoning_or_nothing(self) -> None:
        call = {"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}
        quiet = {"index": 0, "function": {"arguments": ""}}
        secret = {"type": "reasoning.encrypted", "data": "AA=="}
        rows = [
            (loadgen.ANSWER, {"content": " "}),
            (loadgen.ANSWER, {"content": "x", "reasoning": "y"}),
            (loadgen.ANSWER, {"tool_calls": [call]}),
            (loadgen.ANSWER, {"tool_calls": [{"function": {"arguments": "{"}}]}),
            (loadgen.ANSWER, {"content": [{"type": "text", "text": "a"}]}),
            (loadgen.REASONING, {"reasoning_content": "h", "content": None}),
            (loadgen.REASONING, {"reasoning": "h", "content": ""}),
            (loadgen.REASONING, {"reasoning_details": [secret, {"summary": "s"}]}),
            (loadgen.NOTHING, {"reasoning_details": [secret]}),
            (loadgen.NOTHING, {"role": "assistant", "content": None, "tool_calls": []}),
            (loadgen.NOTHING, {"tool_calls": [quiet]}),
            (loadgen.NOTHING, {"tool_calls": None, "reasoning_details": None}),
            (loadgen.NOTHING, {"annotations": [{"type": "url_citation"}]}),
            (loadgen.NOTHING, {}),
        ]
        for kind, delta in rows:
            self.assertEqual(self.output(delta=delta), kind, delta)
        self.assertEqual(self.output(text="a"), loadgen.ANSWER)
        self.assertEqual(self.output(text="", delta=None), loadgen.NOTHING)
        self.assertEqual(self.output(message={"content": "ab"}), loadgen.NOTHING)

    def test_of_other_choices_do_not_count(self) -> None:
        other = (
            b'data: {"choices":[{"index":1,"delta":{"content":"z"},"finish_reason":"stop"}]}\n\n'
        )
        both = b'data: {"choices":[{"index":1,"text":"z"},{"index":0,"text":"a"}]}\n\n'
        reply = bare([(50, other), (60, both)])
        self.assertEqual((list(reply.event_ns), reply.finish_reason), ([60 * MS], None))

    def test_beside_cumulative_text_or_other_keys_count_once(self) -> None:
        event = {"choices": [{"delta": {"content": "b"}, "message": {"content": "ab"}}]}
        line = json.dumps({**event, "timings": {"predicted_n": 28}}).encode()
        self.assertEqual(len(bare([(1, b"data: " + line + b"\n\n")]).event_ns), 1)

    def test_give_the_last_integers_of_usage(self) -> None:
        reply = bare([*BASE[:4], (150, usage(5, 3)), (155, b'data: {"usage":null}\n\n')])
        self.assertEqual((reply.n_in, reply.n_out, reply.cached_tokens), (5, 3, None))
        odd = {"prompt_tokens": None, "completion_tokens": True, "prompt_tokens_details": None}
        reply = bare([(1, usage(5, 3)), (2, chunk({}, None, usage=odd)), (3, usage(7, -1))])
        self.assertEqual((reply.n_in, reply.n_out), (7, 3))

    def test_may_have_usage_in_other_places_or_as_floats(self) -> None:
        counts = {"prompt_tokens": 5.0, "completion_tokens": 3.0}
        choice = {"index": 0, "delta": {}, "finish_reason": "stop", "usage": counts}
        line = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        for last in (line, chunk({}, "stop", x_groq={"usage": counts}), chunk({}, usage=counts)):
            reply = bare([*BASE[:3], (140, last)])
            self.assertEqual((reply.n_in, reply.n_out), (5, 3))
            self.assertIs(type(reply.n_out), int)

    def test_tell_unknown_cached_tokens_from_none(self) -> None:
        rows: List[Tuple[Any, Any]] = [(None, None), ({}, None), ({"cached_tokens": None}, None)]
        rows += [({"cached_tokens": 0}, 0), ({"cached_tokens": 4}, 4)]
        for details, cached in rows:
            reply = bare([(1, usage(5, 3, prompt_tokens_details=details))])
            self.assertEqual(reply.cached_tokens, cached)

    def test_that_share_a_read_are_counted(self) -> None:
        self.assertEqual(bare([(160, BODY)]).coalesced, 2)
        self.assertEqual(one(CHUNKED + loadgen.encode_chunk(BODY)).coalesced, 2)
        self.assertEqual(whole([(1, CHUNKED), *chunked(BASE)[1:]]).coalesced, 0)

    def test_after_done_do_not_count(self) -> None:
        reply = bare([*BASE, (200, said("d")), (201, usage(9, 9)), (202, b"data: x\n\n")])
        self.assertEqual(facts(reply), facts(bare(BASE)))

    def test_of_odd_shapes_are_bad_events(self) -> None:
        odd = [b"7", b'"x"', b"{]", b'{"choices":7}', b'{"choices":["x"]}', b'{"a":1}{"b":2}']
        odd += [b'{"choices":[{"delta":"x"}]}', b"[" * 100000, b'{"choices":{"a":1}}', b"[]"]
        for data in odd:
            reply = bare([*BASE[:2], (110, b"data: " + data + b"\n\n"), *BASE[2:]])
            self.assertEqual((reply.outcome()[0], reply.bad_events), ("malformed", 1), data[:20])
            self.assertEqual(len(reply.event_ns), 3)


class TheEndOfAStream(unittest.TestCase):
    def ends(self, body: bytes, expected: str, framed: bool = True) -> loadgen.Reply:
        reply = one(CHUNKED + loadgen.encode_chunk(body) + (loadgen.LAST_CHUNK if framed else b""))
        self.assertEqual(reply.outcome()[0], expected, reply.outcome())
        self.assertEqual(bare([(1, body)]).outcome()[0], expected)
        return reply

    def test_needs_a_finish_or_done(self) -> None:
        self.ends(ROLE + said("a") + said("b"), "truncated")
        self.ends(ROLE + said("a") + said("b"), "truncated", framed=False)
        self.ends(ROLE + said("a") + said("b")[:-9], "truncated", framed=False)
        self.ends(said("a") + DONE, "ok")
        self.ends(said("a") + STOP, "ok", framed=False)

    def test_without_output_is_empty(self) -> None:
        self.ends(b"", "empty")
        self.ends(b": hb\n\n", "empty")
        self.ends(ROLE + STOP + usage(36000, 0) + DONE, "empty")
        self.ends(said("") + STOP, "empty")
        self.ends(DONE, "empty")

    def test_with_tokens_but_no_text_is_a_success_without_a_time(self) -> None:
        reply = self.ends(chunk({}, "stop") + usage(3, 1) + DONE, "ok")
        self.assertEqual((len(reply.event_ns), reply.answer_ns), (0, None))

    def test_by_filter_or_abort_is_its_own_class(self) -> None:
        self.ends(said("a") + chunk({}, "content_filter") + usage(5, 1) + DONE, "filtered")
        self.ends(said("a") + chunk({}, "abort") + DONE, "aborted")
        self.ends(said("a") + chunk({"content": ""}, "error"), "stream_error")

    def test_by_an_error_object_keeps_its_message(self) -> None:
        rows = [
            (b'data: {"error":{"message":"x died","code":500}}\n\n', "x died"),
            (b'data: {"error":{"code":502,"message":"x"},"choices":[{"delta":{}}]}\n\n', "502: x"),
            (b'data: {"error":"CUDA","error_type":"generation","choices":null}\n\n', "CUDA"),
            (b'data: {"object":"error","message":"boom","code":400}\n\n', "400: boom"),
            (b'event: error\ndata: {"message":"boom"}\n\n', "boom"),
            (b"event: error\ndata: no JSON\n\n", "no JSON"),
            (b"event: error\n: Exception: boom\n\n", "Exception: boom"),
            (b": Exception: boom\nevent: error\n\n", "Exception: boom"),
            (b'{"error":{"message":"bare line"}}\n', "bare line"),
        ]
        for body, text in rows:
            reply = self.ends(said("a") + body + DONE, "stream_error")
            self.assertTrue(reply.outcome()[1].endswith(text), reply.outcome())
            self.assertEqual((len(reply.event_ns), reply.bad_events), (1, 0))

    def test_by_an_error_ends_the_count(self) -> None:
        error = b'data: {"error":{"message":"x"}}\n\n'
        for body in ([(1, ROLE), (2, said("a")), (3, error), (4, said("b")), (5, DONE)],):
            for reply in (bare(body), whole(chunked(body)), whole(chunked(body), close=False)):
                self.assertEqual((len(reply.event_ns), reply.done), (1, True))
                self.assertEqual((reply.outcome()[0], reply.end_ns), ("stream_error", 3 * MS))

    def test_is_not_an_error_that_is_null(self) -> None:
        self.ends(chunk({"content": "a"}, "stop", error=None), "ok")

    def test_by_done_needs_no_more_reads(self) -> None:
        reply = whole(chunked(BASE)[:-1], close=False)
        self.assertTrue(reply.complete and reply.lingering and not reply.reusable)
        reply.feed(b"0\r\n\r\n", 161 * MS)
        self.assertTrue(reply.complete and reply.reusable and not reply.lingering)
        self.assertEqual(reply.end_ns, 160 * MS)

    def test_by_finish_alone_starts_the_grace_period(self) -> None:
        reply = whole(chunked(BASE[:4])[:-1], close=False)
        self.assertEqual((reply.complete, reply.finish_ns), (False, 140 * MS))
        reply.feed(loadgen.encode_chunk(b": hb\n\n"), 900 * MS)
        reply.feed(loadgen.encode_chunk(usage(5, 3)), 1140 * MS)
        self.assertEqual((reply.finish_ns, reply.n_out), (140 * MS, 3))
        self.assertEqual((reply.outcome()[0], facts(reply)["e2e"]), ("ok", 140))


class Framing(unittest.TestCase):
    def test_skips_extensions_and_trailers(self) -> None:
        data = b"%x;x=1;y\r\n%s\r\n0;z\r\nX-T: 1\r\nX-U: 2\r\n\r\n" % (len(BODY), BODY)
        reply = one(CHUNKED + data, close=False)
        self.assertTrue(reply.outcome()[0] == "ok" and reply.reusable)
        upper = one(CHUNKED + b"00%X\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), close=False)
        self.assertTrue(upper.outcome()[0] == "ok" and upper.reusable)

    def test_by_length_ends_the_reply(self) -> None:
        head = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY)
        reply = whole([(0, head), (160, BODY)], close=False)
        self.assertTrue(reply.complete and reply.reusable)

    def test_by_close_ends_only_with_the_close_and_is_not_reusable(self) -> None:
        for head in (UNTIL_CLOSE, HEAD + b"\r\n", HEAD + b"Connection: close\r\n\r\n"):
            reply = whole([(0, head), *BASE[:4]], close=False)
            self.assertFalse(reply.complete)
            reply.eof(170 * MS)
            self.assertTrue(reply.complete and not reply.reusable)
            self.assertEqual(reply.outcome()[0], "ok")

    def test_is_not_reusable_after_close_junk_or_contradiction(self) -> None:
        closing = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        both = HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        end = loadgen.encode_chunk(BODY) + loadgen.LAST_CHUNK
        for data in (closing + end, both + end, CHUNKED + end + b"HTTP/1.1 408 x\r\n\r\n"):
            reply = one(data, close=False)
            self.assertEqual((reply.outcome()[0], reply.reusable), ("ok", False), data[:99])
        reply = one(CHUNKED + end, close=False)
        reply.feed(b"HTTP/1.1 408 Timeout\r\n\r\n", 1)
        self.assertEqual((reply.outcome()[0], reply.reusable), ("ok", False))

    def test_that_breaks_is_malformed_and_keeps_what_came_before(self) -> None:
        good = loadgen.encode_chunk(said("a"))
        for junk in (
            b"zz\r\n",
            b"+5\r\n",
            b"-1\r\n",
            b"0x10\r\n",
            b"\r\n\r\n",
            b"5\r\nabcdefg\r\n",
            b"1" * 2000,
        ):
            reply = one(CHUNKED + good + junk, close=False)
            self.assertEqual((reply.outcome()[0], len(reply.event_ns)), ("malformed", 1), junk)
            self.assertTrue(reply.complete and not reply.reusable)

    def test_that_breaks_after_done_costs_only_the_connection(self) -> None:
        reply = one(CHUNKED + loadgen.encode_chunk(BODY) + b"junk\r\n", close=False)
        self.assertEqual((reply.outcome()[0], reply.reusable), ("ok", False))

    def test_of_requests_works_too_and_leaves_the_next_one(self) -> None:
        second = loadgen.request_bytes("GET", "/v1/models", "h:1", {}, b"")
        data = bytearray(loadgen.request_bytes("POST", "/v1/x", "h:1", {"A": "b"}, b"{}") + second)
        head = loadgen.take_head(data)
        assert head is not None
        self.assertEqual(head.start, ("POST", "/v1/x", "HTTP/1.1"))
        self.assertEqual(head.headers, {"host": "h:1", "content-length": "2", "a": "b"})
        body = loadgen.Body(head, False)
        self.assertEqual((body.feed(bytes(data)), body.complete), ([b"{}"], True))
        self.assertEqual(body.leftover, second)
        head = loadgen.take_head(bytearray(second))
        assert head is not None
        self.assertTrue(loadgen.Body(head, False).complete)

    def test_undoes_what_encode_chunk_does(self) -> None:
        body = loadgen.Body(
            loadgen.Head(("POST", "/", "HTTP/1.1"), {"transfer-encoding": "chunked"}), False
        )
        data = b"".join(map(loadgen.encode_chunk, (b"a" * 300, b"", b"b"))) + loadgen.LAST_CHUNK
        got = b"".join(piece for i in range(len(data)) for piece in body.feed(data[i : i + 1]))
        self.assertEqual((got, body.complete), (b"a" * 300 + b"b", True))

    def test_inflates_what_was_compressed_unasked(self) -> None:
        raw = zlib.compressobj(wbits=-15)
        parts = {"gzip": gzip.compress(BODY), "deflate": zlib.compress(BODY)}
        for coding, data in [*parts.items(), ("deflate", raw.compress(BODY) + raw.flush())]:
            head = HEAD + b"Content-Encoding: %s\r\n" % coding.encode()
            reads = chunked([(160, data)], head + b"Transfer-Encoding: chunked\r\n\r\n")
            for reply in (whole(reads), whole(bytewise(reads))):
                self.assertEqual(facts(reply)["n"], 3)
                self.assertEqual((reply.outcome()[0], reply.encoding), ("ok", coding))

    def test_inflates_each_event_as_it_comes(self) -> None:
        packer = zlib.compressobj(wbits=31)
        reads = [(ms, packer.compress(d) + packer.flush(zlib.Z_SYNC_FLUSH)) for ms, d in BASE]
        head = HEAD + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.assertEqual(facts(whole(chunked(reads, head))), facts(bare(BASE)))

    def test_of_an_unknown_coding_is_malformed(self) -> None:
        self.assertEqual(one(HEAD + b"Content-Encoding: br\r\n\r\nxx").outcome()[0], "malformed")
        self.assertEqual(one(HEAD + b"Content-Encoding: gzip\r\n\r\nxx").outcome()[0], "malformed")


class Heads(unittest.TestCase):
    def test_that_are_interim_are_passed_over(self) -> None:
        hint = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        rest = CHUNKED + loadgen.encode_chunk(BODY) + loadgen.LAST_CHUNK
        reply = one(b"HTTP/1.1 100 Continue\r\n\r\n" + hint * 7 + rest, close=False)
        self.assertEqual((reply.outcome()[0], reply.status, reply.reusable), ("ok", 200, True))
        self.assertEqual(one(hint * 9 + rest).outcome()[0], "malformed")
        self.assertEqual(one(b"HTTP/1.1 101 Switching\r\n\r\n").outcome()[0], "malformed")

    def test_may_fold_repeat_and_end_lines_in_lf(self) -> None:
        data = bytearray(b"\r\nHTTP/1.1 200\nA: 1\na:2 \nB: x\n  y\n\nrest")
        head = loadgen.take_head(data)
        assert head is not None
        self.assertEqual(head, (("HTTP/1.1", "200", ""), {"a": "1, 2", "b": "x y"}))
        self.assertEqual(data, b"rest")

    def test_that_are_malformed_are_refused(self) -> None:
        starts = [b"HTTP/2 200 OK", b"HTTP/1.1 20 OK", b"SSH-2.0-x", b"HTTP/1.1 abc x", b"GET /"]
        lines = [b"no colon", b": x", b"a b: c", b"a : b", b"a: b\rc: d", b"a: \0"]
        lines += [b"Content-Length: x", b"Content-Length: 1\r\nContent-Length: 2"]
        for data in [*starts, *(b"HTTP/1.1 200 OK\r\n" + line for line in lines)]:
            reply = one(data + b"\r\n\r\n", close=False)
            self.assertEqual(reply.outcome()[0], "malformed", data)
            self.assertTrue(reply.complete and not reply.reusable)

    def test_that_never_come_are_empty_or_truncated(self) -> None:
        self.assertEqual((one(b"").outcome()[0], one(b"").started), ("empty", False))
        self.assertTrue(one(b"H").started and one(b"HTTP/1.1 100 x\r\n\r\n").started)
        self.assertEqual(one(b"HTTP/1.1 200 OK\r\nA").outcome()[0], "truncated")

    def test_of_any_2xx_are_a_success(self) -> None:
        self.assertEqual(
            one(CHUNKED.replace(b"200", b"201") + loadgen.encode_chunk(BODY)).status, 201
        )
        reply = one(b"HTTP/1.1 201 Created\r\n\r\n" + BODY)
        self.assertEqual((reply.outcome()[0], reply.status), ("ok", 201))

    def test_of_requests_cannot_be_split(self) -> None:
        good = ("POST", "/v1", "h")
        for bad in ({"A": "b\r\nC: d"}, {"A\nB": "c"}, {"A": "b\n"}, {"": "x"}, {"A": "\u4e16"}):
            with self.assertRaises(loadgen.WireError):
                loadgen.request_bytes(*good, bad, b"")
        for start in (("PO ST", "/", "h"), ("GET", "/a b", "h"), ("GET", "/", "h\r\nX: y")):
            with self.assertRaises(loadgen.WireError):
                loadgen.request_bytes(*start, {}, b"")


class RepliesThatAreNoStream(unittest.TestCase):
    def answer(self, start: str, kind: str, body: bytes, *more: str) -> loadgen.Reply:
        lines = [
            f"HTTP/1.1 {start}",
            f"Content-Type: {kind}",
            *more,
            f"Content-Length: {len(body)}",
        ]
        head = "\r\n".join([*lines, "", ""]).encode()
        reply = one(head + body, close=False)
        self.assertTrue(reply.complete)
        self.assertEqual(whole(bytewise([(160, head + body)])).outcome(), reply.outcome())
        return reply

    def test_keep_their_usage(self) -> None:
        choice = {"message": {"content": "abc"}, "finish_reason": "stop"}
        counts = {"prompt_tokens": 5, "completion_tokens": 3}
        body = json.dumps({"choices": [choice], "usage": counts}).encode()
        for kind in ("application/json", "text/event-stream", "text/plain"):
            for tail in (b"", b"\ndata: [DONE]\n"):
                reply = self.answer("200 OK", kind, body + tail)
                self.assertEqual((reply.outcome()[0], reply.n_out), ("not_stream", 3))
                self.assertEqual((len(reply.event_ns), reply.end_ns), (0, 160 * MS))
                self.assertEqual((reply.finish_reason, reply.reusable), ("stop", True))

    def test_may_be_a_page(self) -> None:
        page = b"<html><title>Log in</title></html>"
        for kind in ("text/html", "text/event-stream"):
            self.assertEqual(self.answer("200 OK", kind, page).outcome()[0], "not_stream")
        self.assertEqual(self.answer("200 OK", "text/plain", b"hello\n").outcome()[0], "not_stream")

    def test_but_are_labelled_so_are_streams(self) -> None:
        self.assertEqual(self.answer("200 OK", "application/json", BODY).outcome()[0], "ok")

    def test_may_be_an_error_object_or_nothing(self) -> None:
        body = b'{"error":{"message":"late"}}'
        self.assertEqual(
            self.answer("200 OK", "application/json", body).outcome(), ("stream_error", "late")
        )
        self.assertEqual(self.answer("200 OK", "application/json", b"").outcome()[0], "empty")

    def test_of_an_error_status_quote_the_server(self) -> None:
        rows = [
            (b'{"error":{"code":400,"message":"context"}}', "context"),
            (b'{"error":"Input validation","error_type":"validation"}', "Input validation"),
            (b'{"object":"error","message":"no model","code":404}', "no model"),
            (b'{"detail":"Not Found"}', "Not Found"),
            (b'{"detail":[{"loc":["body"],"msg":"extra"}]}', '[{"loc": ["body"], "msg": "extra"}]'),
            (b"\n upstream \x1b[31m died\nsecond line", "upstream [31m died"),
            (b'data: {"error":{"message":"as an event"}}\n\n', "as an event"),
            (b"", "Bad"),
        ]
        for body, text in rows:
            reply = self.answer("400 Bad", "application/json", body)
            self.assertEqual(reply.outcome(), ("http_status", f"400 {text}"))
        self.assertEqual(
            self.answer("500 Oops", "text/event-stream", BODY).outcome()[0], "http_status"
        )

    def test_keep_retry_after(self) -> None:
        reply = self.answer("429 Too Many", "text/plain", b"slow down", "Retry-After: 2")
        self.assertEqual(reply.outcome(), ("http_status", "429 slow down (Retry-After: 2)"))

    def test_redirect_to_a_host(self) -> None:
        rows = [("http://u:p@other:8/v1/", "other:8"), ("/v1/", "/v1/"), ("http://[x", "http://[x")]
        for to, host in rows:
            reply = self.answer("307 Temporary", "text/html", b"", f"Location: {to}")
            self.assertEqual(reply.outcome(), ("redirect", f"307 to {host}"))
        self.assertEqual(self.answer("302 F", "text/html", b"x").outcome()[1], "302 to nowhere")


class Transcripts(unittest.TestCase):
    def test_of_real_engines_are_read_right(self) -> None:
        rows = {  # output events, n_in, n_out, finish_reason
            "vllm_chat": (8, 7, 8, "length"),
            "vllm_chat_continuous_usage": (4, 7, 4, "length"),
            "vllm_chat_no_usage": (4, None, None, "length"),
            "vllm_completions": (8, 3, 8, "length"),
            "vllm_completions_ids": (6, 5, 6, "length"),
            "vllm_eos_ignore_eos": (0, 3, 6, "length"),
            "vllm_eos_stop": (0, 3, 1, "stop"),
            "llamacpp_chat": (8, 32, 8, "length"),
            "llamacpp_chat_continuous_usage": (3, 32, 4, "length"),
            "llamacpp_chat_no_usage": (4, None, None, "length"),
            "llamacpp_completions": (7, 16, 8, "length"),
            "llamacpp_completions_ids": (5, 5, 6, "length"),
            "llamacpp_eos_ignore_eos": (6, 3, 6, "length"),
            "llamacpp_eos_stop": (0, 3, 1, "stop"),
            "llamacpp_err_model": (4, None, None, "length"),
        }
        for name, expected in rows.items():
            with self.subTest(name):
                for reply in (
                    one(transcript(name), False),
                    whole(bytewise([(1, transcript(name))])),
                ):
                    got = (len(reply.event_ns), reply.n_in, reply.n_out, reply.finish_reason)
                    self.assertEqual(got, expected)
                    self.assertEqual(reply.outcome(), ("ok", ""))
                    self.assertTrue(reply.done and reply.reusable)

    def test_of_their_errors_quote_the_message(self) -> None:
        rows = {
            "vllm_err_model": "404 The model `nope` does not exist. Valid aliases: tiny.",
            "vllm_err_toolong": "400 max_tokens=100000 cannot be greater than max_model_len=2048",
            "vllm_err_json": "400 1 validation error: {'type': 'json_invalid'",
            "llamacpp_err_json": "400 [json.exception.parse_error.101] parse error at line 1",
        }
        for name, why in rows.items():
            failed, got = one(transcript(name), False).outcome()
            self.assertEqual((failed, got[: len(why)]), ("http_status", why))

    def test_of_whole_answers_keep_their_usage(self) -> None:
        for engine in ("vllm", "llamacpp"):
            for kind in ("chat", "completions"):
                with contextlib.suppress(FileNotFoundError):
                    reply = one(transcript(f"{engine}_{kind}_nonstream"), False)
                    self.assertEqual((reply.outcome()[0], reply.n_out), ("not_stream", 4))


class Bounds(unittest.TestCase):
    def flood(
        self, start: bytes, filler: bytes, megabytes: float, close: bool = False
    ) -> loadgen.Reply:
        reply = loadgen.Reply()
        reply.feed(start, 1)
        for _ in range(int(megabytes * loadgen.MIB / len(filler))):
            reply.feed(filler, 2)
            if reply.complete:
                return reply
        self.fail("not bounded")

    def test_hold_for_all_that_a_server_can_fill(self) -> None:
        filler = b"x" * 65536
        close = HEAD + b"\r\n"
        for start in (
            b"",
            b"HTTP/1.1 200 OK\r\nA: ",
            CHUNKED,
            CHUNKED + b"0\r\n",
            close + b"data: ",
        ):
            self.assertEqual(self.flood(start, filler, 17).outcome()[0], "malformed", start)
        for start, more in (
            (close, b"data: " + filler + b"\n"),
            (close + b"<", filler),
            (CHUNKED + b"0\r\n", b"X: y\r\n" * 9999),
        ):
            self.assertEqual(self.flood(start, more, 17).outcome()[0], "malformed", start)

    def test_keep_the_start_of_a_long_error_page(self) -> None:
        reply = self.flood(b"HTTP/1.1 502 Bad\r\n\r\nsorry\n", b"x" * 65536, 1)
        self.assertEqual((reply.outcome(), reply.reusable), (("http_status", "502 sorry"), False))

    def test_hold_for_what_inflates_without_end(self) -> None:
        bomb = gzip.compress(b":\n" * (8 * loadgen.MIB))
        head = HEAD + b"Content-Encoding: gzip\r\n\r\n"
        limit, loadgen.INFLATED_MAX = loadgen.INFLATED_MAX, loadgen.MIB
        try:
            self.assertEqual(one(head + bomb, close=False).outcome()[0], "malformed")
        finally:
            loadgen.INFLATED_MAX = limit

    def test_hold_for_messages(self) -> None:
        body = json.dumps({"error": {"message": "a\n\x1b\x07" * 9999}}).encode()
        reply = one(b"HTTP/1.1 500 x\r\n\r\n" + body)
        self.assertTrue(len(reply.server_message) <= 300 and reply.server_message.isprintable())
        self.assertLessEqual(len(reply.outcome()[1]), 310)
        self.assertTrue(loadgen.printable("\ud800\u202e\0a").isprintable())

    def test_hold_for_memory_without_a_garbage_collector(self) -> None:
        """The driver switches it off while it measures: a cycle would be a leak."""
        gc.disable()
        try:
            for data in (
                CHUNKED + loadgen.encode_chunk(BODY),
                CHUNKED + b"1\r\nabc\r\n",
                b"x\r\n\r\n",
            ):
                reply = type("Watched", (loadgen.Reply,), {})()
                reply.feed(data + loadgen.LAST_CHUNK, 0)
                watch = weakref.ref(reply)
                del reply
                self.assertIsNone(watch())
        finally:
            gc.enable()


class Noise(unittest.TestCase):
    SEEDS = 1500

    def check(self, data: bytes, rng: random.Random) -> None:
        """The reply to `data`, however cut, has a class; a body's class does not hang on cuts."""
        at, cut = 0, []
        while at < len(data):
            size = rng.choice((1, 7, 60, 600, 60000))
            cut.append((at, data[at : at + size]))
            at += size
        for feed in ("feed", "feed_body"):
            first, second = loadgen.Reply(), loadgen.Reply()
            getattr(first, feed)(data, 0)
            for ms, piece in cut:
                getattr(second, feed)(piece, ms)
            for reply in (first, second):
                reply.eof(1)
                self.assertIn(reply.outcome()[0], CLASSES)
                self.assertTrue(reply.complete and reply.outcome()[1].isprintable())
            self.assertEqual(first.outcome(), second.outcome(), data)
            self.assertEqual(len(first.event_ns), len(second.event_ns), data)
            self.assertEqual(first.n_out, second.n_out, data)

    def test_of_mutated_replies_never_raises(self) -> None:
        rng = random.Random(20261129)
        seeds = [b"".join(d for _, d in chunked(reads[:9])) for _, reads, _ in fixtures()]
        seeds = [data for data in seeds if len(data) < 5000]
        seeds += [
            transcript("vllm_chat"),
            transcript("vllm_err_model"),
            transcript("vllm_chat_nonstream"),
        ]
        for _ in range(self.SEEDS):
            data = bytearray(rng.choice(seeds))
            for _ in range(rng.choice((1, 2, 5, 20))):
                i, j = rng.randrange(len(data)), rng.randrange(len(data))
                kind = rng.randrange(5)
                if kind == 0:
                    data[i] = rng.randrange(256)
                elif kind == 1:
                    del data[i : i + rng.randrange(30)]
                elif kind == 2:
                    data[i:i] = data[j : j + rng.randrange(40)]
                elif kind == 3:
                    data[i:i] = rng.choice(
                        (b"\n", b"\r", b"null", b"[", b'"', b"}", b"0\r\n\r\n", b"-")
                    )
                else:
                    data[i : i + 4] = rng.choice((b"null", b"[{}]", b'"s"', b"1e999", b"[[[]]]"))
                data = data or bytearray(b"x")
            self.check(bytes(data), rng)

    def test_of_random_bytes_never_raises(self) -> None:
        rng = random.Random(7)
        starts = [b"", CHUNKED, HEAD + b"\r\n", b"data: ", HEAD + b"Content-Encoding: gzip\r\n\r\n"]
        for _ in range(self.SEEDS):
            noise = bytes(rng.choice(b'\r\n: {}[]"0a\xff') for _ in range(rng.randrange(1, 200)))
            self.check(rng.choice(starts) + noise, rng)

    def test_of_json_in_odd_places_never_raises(self) -> None:
        rng = random.Random(9)
        values = [None, True, 0, 1.5, "", "s", [], [None], {}, {"index": 0}, 10**30, ["x"]]
        keys = "choices delta index content reasoning reasoning_details tool_calls function name"
        keys += (
            " usage prompt_tokens_details completion_tokens error message code finish_reason text"
        )

        def odd(depth: int) -> Any:
            if depth == 0 or rng.random() < 0.2:
                return rng.choice(values)
            if rng.random() < 0.3:
                return [odd(depth - 1) for _ in range(rng.randrange(3))]
            return {key: odd(depth - 1) for key in rng.sample(keys.split(), 4)}

        for _ in range(2 * self.SEEDS):
            body = {"choices": [{"delta": odd(2)}], "usage": odd(2), **{"error": None}}
            body.update({key: odd(3) for key in rng.sample(keys.split(), rng.randrange(3))})
            self.check(b"data: " + json.dumps(body).encode() + b"\n\n", rng)
            self.check(json.dumps(body).encode(), rng)


if __name__ == "__main__":
    unittest.main()
