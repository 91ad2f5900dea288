"""report.html, the setup statement, the operating point and its price; --report, --deployment."""

import base64
import contextlib
import copy
import html.parser
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from typing import Any, Dict, List, Optional, Tuple

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from test_loadgen import load, record, work

import loadgen
from tests import LOADGEN

DEPLOY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "run", "deploy.json")
EVIL = "</td></script><script>alert(1)</script><img src=x onerror=alert(2)> \"' & \u202e\x00\ud800"


class Page(html.parser.HTMLParser):
    """Reads a page: what is not well formed, its tags, its figures (path, value, shown text)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: List[str] = []
        self.wrong: List[str] = []
        self.tags: List[Tuple[str, Dict[str, Optional[str]]]] = []
        self.figures: List[List[Any]] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        found = dict(attrs)
        if len(found) != len(attrs):
            self.wrong.append(f"an attribute twice in {tag}")
        self.tags.append((tag, found))
        if "data-path" in found:
            self.figures.append([json.loads(found["data-path"] or ""),
                                 json.loads(found["data-value"] or ""), None, tag])
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag != "meta":
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes something else")

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.figures and self.figures[-1][2] is None and self.open[-1:] == [
                self.figures[-1][3]]:
            self.figures[-1][2] = data


def run_of(rate: float, ttft: float, number: int = 0, failed: int = 0) -> Dict[str, Any]:
    """The summary of a steady run of 60 requests, the first of them failed."""
    records = [record(i / rate, None if i < failed else ttft + 0.0001 * (i % 7), number=i,
                      cls="http_status" if i < failed else "ok", itl=ttft / 10) for i in range(60)]
    plan = loadgen.make_plan(load(rate_rps=rate, num_requests=60), work(), 0, 1.0)
    outcome = loadgen.Outcome(plan, records, [loadgen.ClientHealth()], 0, loadgen.ONE_A_WORD, [])
    return loadgen.summarise(outcome, loadgen.Slo(0.3, 0.025, None, 0.9), True)


def args_of(*argv: str) -> Any:
    return loadgen.parse_args(["http://127.0.0.1:1", "--rate", "1", *argv])


def summary_of(*runs: Dict[str, Any], flags: Tuple[str, ...] = (), said: Any = None
               ) -> Dict[str, Any]:
    args = args_of(*flags)
    plan = loadgen.make_plan(load(), work(), 0, 1.0)
    summary: Dict[str, Any] = {
        "plan": loadgen.plan_statement(args, [plan]),
        "target": loadgen.target_statement(loadgen.target_of(args, args.url)),
        "slo": loadgen.Slo(0.3, 0.025, None, 0.9)._asdict(), "environment": loadgen.environment(),
        "warmup": {"requests": 4, "failed": 0}, "runs": list(runs)}
    summary["setup"] = loadgen.setup_of(args, said or {})
    loadgen.conclude(summary, args)
    return summary


SWEEP = [run_of(2, 0.05), run_of(8, 0.1, failed=1), run_of(32, 0.9)]


def full() -> Dict[str, Any]:
    """A summary with everything that a page can hold."""
    summary = summary_of(*copy.deepcopy(SWEEP), flags=("--deployment", DEPLOY))
    for i, run in enumerate(summary["runs"]):
        run["server"] = {"series": [[0.1 * t, t, i, 0.01 * t] for t in range(9)] + [
            [1.0, None, None, None]]}
        run["classes"] = {"chat": {"attainment": 0.91, "ttft_s": run["ttft_s"]}, "rag": {}}
        run["turns"] = {"lost": 0, "first": {"ttft_s": run["ttft_s"]}}
    summary["runs"][2]["verdict"] = "UNSTABLE"
    summary["goodput_search"] = {"rate_rps": 9.25, "low_rps": 8.5, "high_rps": 10.0}
    summary["findings"] = [{"symptom": "TTFT spikes", "evidence": "900 ms at 32/s", "run": 2,
                            "cause": "queueing", "vllm": "--max-num-seqs", "sglang": "--dp",
                            "term": "none"}]
    return summary


class ThePage(unittest.TestCase):
    def page(self, summary: Dict[str, Any]) -> Page:
        page = Page(loadgen.page(summary))
        self.assertEqual((page.wrong, page.open), ([], []))
        return page

    def test_every_figure_is_the_summarys_own(self) -> None:
        summary = full()
        saved = loadgen.null_infinities(json.loads(json.dumps(loadgen.null_infinities(summary))))
        page = self.page(summary)
        for path, value, shown, _ in page.figures:
            self.assertEqual(value, loadgen.dig(saved, *path), path)
            if isinstance(value, float) and path[-2] in ("ttft_s", "tpot_s", "e2e_s") and shown:
                self.assertEqual(shown.rstrip("~"), f"{value * 1000:.1f}", path)
        paths = [tuple(path) for path, *_ in page.figures]
        for i in range(3):
            for path in (("output_tok_s",), ("ttft_s", "p99"), ("tpot_s", "p99"), ("verdict",),
                         ("itl_s", "p99_high"), ("attainment",), ("classes", "chat", "attainment")):
                self.assertIn(("runs", i, *path), paths)
            self.assertIn(("cost", "per_1m_output_by_run", i), paths)

    def test_each_chart_has_a_point_a_rate_the_slo_line_and_one_operating_point(self) -> None:
        summary = full()
        text = loadgen.page(summary)
        charts = re.findall(r"<svg.*?</svg>", text, re.S)
        for chart, key, limit in ((charts[0], "ttft_s", "SLO 300 ms"),
                                  (charts[1], "tpot_s", "SLO 25 ms")):
            found = [f[0] for f in Page(chart).figures]
            self.assertEqual(found, [["runs", i, key, "p99"] for i in range(3)])
            self.assertIn(limit, chart)
            self.assertEqual((chart.count('class="ring"'), chart.count('class="slo"')), (1, 1))
            self.assertIn('class="unstable"', chart)

    def test_a_point_lies_where_its_figures_say(self) -> None:
        chart = re.findall(r"<svg.*?</svg>", loadgen.page(full()), re.S)[1]
        x = map(float, re.findall(r'<circle class="(?:valid|unstable)" cx="([\d.]+)"', chart))
        most = max(run["output_tok_s"] for run in SWEEP) * 1.04
        wide = loadgen.WIDE - loadgen.LEFT - loadgen.RIGHT
        for across, run in zip(x, SWEEP):
            right = loadgen.LEFT + wide * run["output_tok_s"] / most
            self.assertAlmostEqual(across, right, delta=0.1)

    def test_nothing_on_the_page_comes_from_elsewhere_or_runs(self) -> None:
        text = loadgen.page(full())
        for tag, attrs in self.page(full()).tags:
            self.assertNotIn(tag, ("script", "link", "img", "iframe", "base", "object", "use"))
            for name in attrs:
                self.assertNotIn(name.split(":")[-1], ("href", "src", "srcset", "action", "style"))
                self.assertFalse(name.startswith("on"), name)
        self.assertNotIn("url(", loadgen.STYLE)
        self.assertNotIn("@import", loadgen.STYLE)
        self.assertIn("default-src &#39;none&#39;".replace("&#39;", "'"), text)

    def test_hostile_text_stays_text(self) -> None:
        summary = full()
        summary["target"].update(model=EVIL, url=EVIL)
        summary["environment"].update(cpu=EVIL, started=EVIL)
        summary["setup"] = {"model": [[EVIL, EVIL]], EVIL: [[EVIL, "server"]], "gpu": None}
        for run in summary["runs"]:
            run.update(label=EVIL, verdict=EVIL, reasons=[EVIL], warnings=[EVIL],
                       classes={EVIL: {}}, turns={EVIL: {}},
                       errors=[{"class": EVIL, "error": EVIL, "count": 1}])
        summary["findings"] = [dict.fromkeys(
            ("symptom", "evidence", "cause", "vllm", "sglang", "term"), EVIL)]
        tame, wild = self.page(full()), self.page(summary)
        self.assertEqual({tag for tag, _ in wild.tags} - {"h3", "li"},
                         {tag for tag, _ in tame.tags} - {"h3", "li"})
        self.assertGreater(wild.words.count("<script>alert(1)</script>"), 20)
        for bad in "\u202e\x00\ud800":
            self.assertNotIn(bad, loadgen.page(summary))
        loadgen.page(summary).encode("utf-8")

    def test_charts_have_a_title_a_description_and_ids_of_their_own(self) -> None:
        summary = full()
        summary["runs"].append({**summary["runs"][0], "output_tok_s": 9.0})  # the rate again
        summary["runs"][3]["in_flight_series"] = [[1.0, 2.0], [2.0, 1.0]]
        summary["runs"][3]["server"] = None
        page = self.page(summary)
        svgs = [attrs for tag, attrs in page.tags if tag == "svg"]
        ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
        self.assertEqual(len(ids), len(set(ids)))
        self.assertGreaterEqual(len(svgs), 9)
        for attrs in svgs:
            self.assertEqual(attrs["role"], "img")
            for name in (attrs["aria-labelledby"] or "").split():
                self.assertIn(name, ids)

    def test_every_chart_is_drawn_inside_its_frame(self) -> None:
        for chart in re.findall(r"<svg.*?</svg>", loadgen.page(full()), re.S):
            height = int(re.findall(r'viewBox="0 0 \d+ (\d+)"', chart)[0])
            for points in re.findall(r'points="([^"]*)"', chart):
                for pair in points.split():
                    x, y = map(float, pair.split(","))
                    self.assertTrue(loadgen.LEFT <= x <= loadgen.WIDE and 0 <= y <= height, pair)
            self.assertNotRegex(chart, r'\b(x|y|cx|cy|d|points)="[^"]*(inf|nan)')

    def test_the_longest_label_of_an_axis_has_room(self) -> None:
        slow = [run_of(rate, ttft) for rate, ttft in ((2, 9.0), (8, 70.0), (32, 900.0))]
        charts = re.findall(r"<svg.*?</svg>", loadgen.page(summary_of(*slow)), re.S)
        longest = ""
        for chart in charts:
            for x, text in re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end" '
                                      r'class="">([\d,.]+)</text>', chart):
                self.assertGreaterEqual(float(x), 6.8 * len(text), text)
                longest = max(longest, text, key=len)
        self.assertEqual(longest, "1,000,000")

    def test_what_met_no_slo_has_no_price(self) -> None:
        summary = summary_of(*SWEEP, flags=("--gpu-price", "2.5", "--metadata", "gpus=2"))
        self.assertEqual(SWEEP[2]["attainment"], 0)
        self.assertIsNone(summary["cost"]["per_1m_output_by_run"][2])
        prices = [shown for path, _, shown, _ in self.page(summary).figures
                  if path[:2] == ["cost", "per_1m_output_by_run"] and path[-1] == 2]
        self.assertEqual(prices, ["-"])

    def test_text_is_readable_on_its_ground(self) -> None:
        def light(colour: str) -> float:
            colour = "".join(c * 2 for c in colour) if len(colour) == 3 else colour
            parts = [int(colour[i:i + 2], 16) / 255 for i in (0, 2, 4)]
            linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        themes = re.findall(r":root\{(.*?)\}", loadgen.STYLE, re.S)
        self.assertEqual(len(themes), 2)
        for theme in themes:
            colours = dict(re.findall(r"--(\w+):#(\w+)", theme))
            ground = light(colours["bg"])
            for name in ("ink", "soft", "data", "limit"):
                low, high = sorted((ground, light(colours[name])))
                self.assertGreaterEqual((high + 0.05) / (low + 0.05), 4.5, name)

    def test_failures_are_infinite_and_never_a_point_among_the_finite(self) -> None:
        summary = summary_of(run_of(8, 0.1, failed=30))
        self.assertEqual(summary["runs"][0]["ttft_s"]["p99"], math.inf)
        page = self.page(summary)
        self.assertIn("8/s inf", page.words)
        self.assertNotIn('class="valid"', loadgen.page(summary))
        self.assertIn("30 x http_status: why", page.words)

    def test_a_run_in_which_nothing_succeeded_has_a_page(self) -> None:
        page = self.page(summary_of(run_of(8, 0.1, failed=60)))
        self.assertIn("no request succeeded", page.words)

    def test_a_run_in_which_nothing_succeeded_says_so_under_the_table(self) -> None:
        summary = summary_of(run_of(8, 0.1, failed=60))
        self.assertIn("8/s: no request succeeded\n", loadgen.render(summary))
        self.assertIn("8/s: no request succeeded<", loadgen.page(summary))

    def test_what_is_rehearsed_simulated_or_spoilt_is_said_at_the_top(self) -> None:
        summary = summary_of(*copy.deepcopy(SWEEP), said={"engine": loadgen.MOCK_VERSION})
        self.assertIn("a rehearsal", self.page(summary).words)
        self.assertNotIn("a rehearsal", self.page(full()).words)
        summary["simulated"] = {"profile": "x", "step_time": {}}
        self.assertIn("nothing was measured", self.page(summary).words)
        summary["runs"][0]["verdict"] = "CLIENT-LIMITED"
        self.assertIn("CLIENT-LIMITED at 2/s", self.page(summary).words)

    def test_a_simulated_run_is_never_called_valid(self) -> None:
        summary = full()
        for run in summary["runs"]:
            run["simulated"] = True
        text = loadgen.page(summary)
        for chart in re.findall(r"<svg.*?</svg>", text, re.S)[:2]:
            self.assertNotIn("VALID", chart)
            self.assertIn("ms, SIMULATED</title>", chart)

    def test_findings_and_advice_are_told_and_so_is_their_absence(self) -> None:
        words = self.page(full()).words
        for part in ("TTFT spikes", "900 ms at 32/s", "--max-num-seqs"):
            self.assertIn(part, words)
        healthy = {**full(), "findings": [], "advice": ["over-provisioned"]}
        self.assertIn("No symptom of the table shows.\nover-provisioned", self.page(healthy).words)
        self.assertNotIn("Findings", self.page(summary_of(*SWEEP)).words)

    def test_many_runs_are_drawn_by_their_ends_and_the_operating_point(self) -> None:
        runs = [run_of(rate, 0.1 if rate < 20 else 0.9) for rate in range(2, 32)]
        summary = summary_of(*runs)
        drawn = loadgen.drawn_runs(summary, 5)
        self.assertEqual(summary["operating_point"]["run"], 17)
        self.assertEqual(drawn, [0, 16, 17, 18, 29])
        self.assertEqual(loadgen.drawn_runs(summary_of(*runs[:3]), 5), [0, 1, 2])


class AnInterruptedRun(unittest.TestCase):
    def cut(self, **more: Any) -> Dict[str, Any]:
        """A summary of one run that was stopped after 60 requests."""
        records = [record(i / 10, 0.05, number=i) for i in range(60)]
        plan = loadgen.make_plan(load(rate_rps=10.0, **more), work(), 0, 1.0)
        health = loadgen.ClientHealth()
        health.interrupted = True
        outcome = loadgen.Outcome(plan, records, [health], 0, loadgen.ONE_A_WORD, [])
        run = loadgen.summarise(outcome, loadgen.Slo(0.3, None, None, 0.9), True)
        summary = summary_of(run)
        loadgen.after_run(args_of(), summary, outcome)
        summary["plan"]["rates"] = [10.0, 20.0, 30.0]
        loadgen.conclude(summary, args_of())
        return summary

    def test_says_so_beside_the_verdict_and_on_top_of_the_page(self) -> None:
        summary = self.cut(num_requests=400)
        run, text, shown = summary["runs"][0], loadgen.render(summary), loadgen.page(summary)
        self.assertEqual(run["verdict"], "VALID")
        for told in (text, shown[:shown.index("<main>")], shown[shown.index("<main>"):]):
            self.assertIn("INTERRUPTED: 60 of 400 requests", told)
            self.assertNotIn("POINT", told)
        self.assertIn("INTERRUPTED: 2 further rates were not run", text)

    def test_says_how_much_of_its_window_it_saw(self) -> None:
        self.assertIn("INTERRUPTED: 6.1 of 60.0 s, 60 requests",
                      loadgen.render(self.cut(num_requests=None, duration_s=60.0, ramp_s=0.0)))

    def test_says_so_in_a_search_too(self) -> None:
        summary = self.searched()
        self.assertIn("INTERRUPTED: 60 of 400 requests", loadgen.render(summary))
        self.assertIn("INTERRUPTED: 60 of 400 requests", loadgen.page(summary))

    def test_a_search_says_why_the_client_was_the_limit(self) -> None:
        summary = self.searched()
        summary["runs"][0]["verdict"] = "CLIENT-LIMITED"
        summary["runs"][0]["reasons"].append("requests left late")
        text = loadgen.render(summary)
        self.assertIn("\n10/s: CLIENT-LIMITED: requests left late\n", text)
        self.assertGreater(text.index("left late"), text.index("GOODPUT"))

    def searched(self) -> Dict[str, Any]:
        summary = self.cut(num_requests=400)
        point = {"rate_rps": 10.0, "offered": 60, "attainment": 1.0, "low": 0.9, "high": 1.0,
                 "verdict": "open"}
        summary["goodput_search"] = {"target": 0.9, "points": [point], "rate_rps": None,
                                     "low_rps": None, "high_rps": None, "requests": 60,
                                     "seconds": 6.0, "why": "interrupted"}
        return summary


class TheOperatingPoint(unittest.TestCase):
    def point(self, *runs: Dict[str, Any], **more: Any) -> Tuple[Optional[int], str]:
        return loadgen.operating_point({**summary_of(*copy.deepcopy(list(runs))), **more})

    def test_it_is_the_highest_rate_that_is_valid_and_meets_the_target(self) -> None:
        self.assertEqual(self.point(*SWEEP)[0], 1)
        self.assertEqual(self.point(*SWEEP[::-1])[0], 1)
        self.assertIsNone(self.point(SWEEP[2])[0])
        for verdict in ("UNSTABLE", "CLIENT-LIMITED"):
            self.assertEqual(self.point(SWEEP[0], {**SWEEP[1], "verdict": verdict})[0], 0)

    def test_it_is_not_above_the_rate_of_the_goodput_search(self) -> None:
        self.assertEqual(self.point(*SWEEP, goodput_search={"rate_rps": 7.0})[0], 0)
        self.assertEqual(self.point(*SWEEP, goodput_search={"rate_rps": 8.0})[0], 1)
        self.assertIsNone(self.point(*SWEEP, goodput_search={"rate_rps": 1.0})[0])

    def test_of_runs_near_the_best_rate_the_one_with_most_requests_is_taken(self) -> None:
        runs = [{**run_of(rate, 0.1), "offered": n} for rate, n in (
            (40.0, 9000), (47.0, 1687), (47.6, 56))]
        self.assertEqual(self.point(*runs), (1, ""))
        self.assertEqual(self.point(*runs[1:], {**runs[2], "offered": 1687})[0], 2)
        self.assertEqual(self.point(runs[0], runs[2])[0], 1)  # 40/s is not near
        missed = {**runs[1], "attainment": 0.5}
        self.assertEqual(self.point(runs[0], missed, runs[2])[0], 2)

    def test_without_an_slo_there_is_none(self) -> None:
        slo = loadgen.Slo(None, None, None, 0.9)._asdict()
        self.assertEqual(self.point(*SWEEP, slo=slo), (None, "no SLO was given"))

    def test_a_sample_that_does_not_prove_the_target_says_so(self) -> None:
        self.assertIn("60 requests are too few", self.point(run_of(8, 0.1, failed=3))[1])
        sure = {**SWEEP[1], "attainment_interval": (0.95, 1.0)}
        self.assertEqual(self.point(sure), (0, ""))

    def test_the_footnote_names_the_run_that_is_worth_least(self) -> None:
        runs = [{**run, "offered": n, "ttft_s": {**run["ttft_s"], "n_effective": worth}}
                for run, n, worth in zip(SWEEP, (119, 463), (100, 3))]
        self.assertIn("the run worth least had 463, worth 3\n",
                      loadgen.render(summary_of(*runs)))

    def test_no_share_is_rounded_up_to_all_of_the_requests(self) -> None:
        slo = loadgen.Slo(0.3, 0.025, None, 0.999)._asdict()
        run = {**SWEEP[0], "attainment": 0.9996, "attainment_interval": (0.94, 1.0)}
        summary = {**summary_of(run), "slo": slo}
        summary["operating_point"]["note"] = loadgen.operating_point(summary)[1]
        self.assertIn("60 requests are too few to be sure of 99.9%", self.point(run, slo=slo)[1])
        text, shown = loadgen.render(summary), loadgen.page(summary)
        for told in (text, shown):
            self.assertIn("99.96%", told)
            self.assertIn("target 99.9%", told)
        self.assertIn("for 99.9% of its", self.point(SWEEP[2], slo=slo)[1])
        self.assertEqual([loadgen.attained(v) for v in (None, 0.994, 0.996, 0.9996, 1.0)],
                         ["-", "99%", "99.6%", "99.96%", "100%"])

    def test_a_miss_at_a_lower_rate_is_pointed_out(self) -> None:
        self.assertIn("a lower rate missed", self.point(SWEEP[1], run_of(4, 0.9))[1])


class TheCost(unittest.TestCase):
    def test_it_is_the_bill_over_the_output_at_the_operating_point(self) -> None:
        cost = summary_of(*SWEEP, flags=("--gpu-price", "2.5", "--metadata", "gpus=2"))["cost"]
        self.assertAlmostEqual(cost["per_1m_output"],
                               2.5 * 2 / (SWEEP[1]["output_tok_s"] * 3600) * 1e6)
        self.assertEqual(cost["per_1m_output"], cost["per_1m_output_by_run"][1])

    def test_the_specs_worked_example(self) -> None:
        run = {**SWEEP[1], "output_tok_s": 1500.0}
        flags = ("--gpu-price", "2.5", "--metadata", "gpus=2")
        self.assertEqual(f"{summary_of(run, flags=flags)['cost']['per_1m_output']:.3f}", "0.926")

    def test_without_the_number_of_gpus_there_is_no_cost_and_the_page_asks(self) -> None:
        summary = summary_of(*SWEEP, flags=("--gpu-price", "2.5"))
        self.assertIsNone(summary["cost"]["per_1m_output"])
        self.assertIn("how many GPUs?", loadgen.page(summary))

    def test_without_a_price_there_is_none(self) -> None:
        self.assertIsNone(summary_of(*SWEEP)["cost"])
        self.assertNotIn("per 1M output", loadgen.page(summary_of(*SWEEP)))

    def test_price_and_gpus_come_from_the_deployment_and_flags_win(self) -> None:
        flags = ("--deployment", DEPLOY)
        self.assertEqual(summary_of(*SWEEP, flags=flags)["cost"]["per_hour"], 5.0)
        flags += ("--gpu-price", "4", "--metadata", "gpus=3")
        self.assertEqual(summary_of(*SWEEP, flags=flags)["cost"]["per_hour"], 12.0)


class TheSetup(unittest.TestCase):
    def refused(self, said: str, *argv: str) -> None:
        with self.assertRaisesRegex(loadgen.UserError, said):
            args_of(*argv)

    def deployment(self, **changes: Any) -> str:
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        path = os.path.join(folder, "deploy.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(changes, file)
        return path

    def test_what_nobody_stated_is_not_stated(self) -> None:
        summary = summary_of(*SWEEP)
        self.assertEqual(set(summary["setup"]), set(loadgen.NAMED))
        self.assertEqual(set(summary["setup"].values()), {None})
        self.assertEqual(Page(loadgen.page(summary)).words.count("not stated"), 9)
        self.assertIn("not stated: model, precision, gpu, gpus, engine, version, flags",
                      "\n".join(loadgen.fact_lines(summary)))

    def test_each_fact_carries_its_source_and_the_flag_comes_first(self) -> None:
        args = args_of("--deployment", DEPLOY, "--metadata", "gpu=h200", "--metadata", "rack=7")
        setup = loadgen.setup_of(args, {"model": "served", "engine": "vllm"})
        self.assertEqual(setup["gpu"], [["h200", "--metadata"], ["h100", "deployment file"]])
        self.assertEqual(setup["model"], [["served", "server"],
                                          ["meta-llama/Llama-3.1-70B", "deployment file"]])
        self.assertEqual(setup["rack"], [["7", "--metadata"]])
        self.assertEqual(loadgen.stated([["a", "x"], ["b", "y"], ["a", "z"]]), "a (x, z); b (y)")
        self.assertEqual(loadgen.stated(setup["precision"]),
                         "weights fp8, kv fp8, compute fp8 (deployment file)")
        self.assertIsNone(setup["version"])

    def test_a_deployment_with_missing_keys_is_taken(self) -> None:
        args = args_of("--deployment", self.deployment(model={"name": "m"}, hardware=None, plan=3))
        self.assertEqual(loadgen.setup_of(args, {})["model"], [["m", "deployment file"]])

    def test_slos_come_from_the_deployment_where_no_flag_gives_them(self) -> None:
        path = self.deployment(model={}, slo={"ttft_s": 0.8, "tpot_s": 0.05, "e2e_s": None})
        args = args_of("--deployment", path, "--slo-tpot-ms", "20", "--gate")
        self.assertEqual((args.slo_ttft_ms, args.slo_tpot_ms, args.slo_e2e_ms), (800, 20, None))

    def test_what_is_no_deployment_is_refused_in_one_line(self) -> None:
        self.refused("no deployment", "--deployment", self.deployment(weights_s=0.01))
        self.refused("price.gpu_per_hour", "--deployment",
                     self.deployment(model={}, price={"gpu_per_hour": "2.5"}))
        self.refused("slo.ttft_s", "--deployment", self.deployment(model={}, slo={"ttft_s": -1}))
        self.refused("cannot be read", "--deployment", "/nowhere/deploy.json")

    def test_a_fact_without_a_value_is_refused(self) -> None:
        for bad in ("gpu", "=x", "gpu=", "gpus=two", "gpus=0"):
            self.refused("--metadata", "--metadata", bad)

    def test_a_pasted_vllm_line_may_give_several_facts(self) -> None:
        args = loadgen.parse_args("vllm bench serve --metadata tp=2 version=0.11 --num-prompts 3"
                                  .split())
        self.assertEqual(args.metadata, [("tp", "2"), ("version", "0.11")])


class InFlightOverTime(unittest.TestCase):
    def test_the_area_is_the_time_that_requests_were_in_flight(self) -> None:
        records = [record(i * 0.37, 0.05 + 0.01 * (i % 5), number=i) for i in range(50)]
        series = loadgen.in_flight_series(records, 0)
        width = series[1][0] - series[0][0]
        held = sum((r.end_ns - r.due_ns) * 1e-9 for r in records)
        self.assertAlmostEqual(sum(level for _, level in series) * width, held, places=6)
        self.assertLessEqual(len(series), loadgen.SERIES_BINS)

    def test_one_request_fills_its_own_time(self) -> None:
        one = record(1.0, 0.5, tokens=2, itl=0.5)
        levels = [level for at, level in loadgen.in_flight_series([one], 0) if at > 1.1]
        self.assertEqual({round(level, 6) for level in levels}, {1.0})
        self.assertEqual(loadgen.in_flight_series([], 0), [])


def loadgen_run(*argv: str) -> Tuple[int, str, str]:
    done = subprocess.run([*LOADGEN, *argv], capture_output=True, text=True, timeout=60,
                          check=False)
    return done.returncode, done.stdout, done.stderr


class AnEndToEndRun(unittest.TestCase):
    """One sweep against the built-in engine, its folder, and --report on it."""

    folder: str
    out: str
    told: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.out = os.path.join(cls.folder, "run")
        code, cls.told, err = loadgen_run(
            "--mock", "--sweep", "20,40", "--num-requests", "12", "--output-len", "4",
            "--input-len", "20", "--warmup", "1", "--deployment", DEPLOY, "--metadata", "version=9",
            "--slo-ttft-ms", "2000", "--out", cls.out, "--api-key", "sk-very-secret-key")
        assert code in (0, 1), err  # 1: a busy machine held the client up

    def read(self, name: str) -> str:
        with open(os.path.join(self.out, name), encoding="utf-8") as file:
            return file.read()

    def test_the_folder_holds_the_page_and_a_copy_of_the_deployment(self) -> None:
        with open(DEPLOY, encoding="utf-8") as file:
            self.assertEqual(json.loads(self.read("deploy.json")), json.load(file))
        page = Page(self.read("report.html"))
        self.assertEqual((page.wrong, page.open), ([], []))
        saved = json.loads(self.read("summary.json"))
        self.assertGreater(len(page.figures), 60)
        for path, value, _, _ in page.figures:
            self.assertEqual(value, loadgen.dig(saved, *path), path)

    def test_the_server_is_asked_what_it_is(self) -> None:
        setup = json.loads(self.read("summary.json"))["setup"]
        self.assertEqual(setup["engine"], [[loadgen.MOCK_VERSION, "server"]])
        self.assertEqual(setup["model"][0], ["mock-model", "server"])
        self.assertIn("num_gpu_blocks 16384", loadgen.stated(setup["flags"]))
        self.assertIn("a rehearsal", self.read("report.html"))
        for line in ("version: 9 (--metadata)", "gpus: 2 (deployment file)", "COST   "):
            self.assertIn(line, self.told)

    def test_no_key_is_anywhere(self) -> None:
        for name in os.listdir(self.out):
            self.assertNotIn("secret", self.read(name), name)

    def test_report_renders_the_same_again_and_takes_a_later_price(self) -> None:
        again = os.path.join(self.folder, "again")
        shutil.copytree(self.out, again)
        os.remove(os.path.join(again, "report.html"))
        code, told, _ = loadgen_run("--report", again)
        with open(os.path.join(again, "report.html"), encoding="utf-8") as file:
            self.assertEqual((code, file.read()), (0, self.read("report.html")))
        self.assertEqual(told, self.told)
        with open(os.path.join(again, "summary.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file), json.loads(self.read("summary.json")))
        loadgen_run("--report", again, "--gpu-price", "10")
        with open(os.path.join(again, "summary.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["cost"]["per_hour"], 20.0)

    def test_report_refuses_to_judge_a_run_by_another_slo(self) -> None:
        for flags in (("--slo-ttft-ms", "100"), ("--goodput", "ttft:100")):
            code, said, errors = loadgen_run("--report", self.out, *flags)
            self.assertEqual((code, said), (2, ""))
            self.assertIn("drop --slo-", errors)

    def test_report_of_something_else_is_one_line(self) -> None:
        for content in ("{}", '{"runs": [{}]}', '{"runs": []}', "[]", "not json"):
            with open(os.path.join(self.folder, "summary.json"), "w", encoding="utf-8") as file:
                file.write(content)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = loadgen.main(["--report", self.folder])
            self.assertEqual((code, out.getvalue()), (2, ""))
            self.assertEqual(err.getvalue().count("\n"), 1, err.getvalue())

    def test_infinities_survive_the_way_to_disk_and_back(self) -> None:
        runs = [run_of(8, 0.1, failed=30)]
        runs[0]["label"] = "inf"
        there = json.loads(json.dumps(loadgen.null_infinities(runs)))
        self.assertEqual(json.dumps(loadgen.with_infinities(there)),
                         json.dumps([{**runs[0], "attainment_interval":
                                      list(runs[0]["attainment_interval"])}]))


class WhatTheServerSays(unittest.TestCase):
    """server_facts on kept answers of real engines, no sockets."""

    def facts(self, answers: Dict[str, Any]) -> Dict[str, str]:
        args = args_of("--model", "tiny", "--api-key", "sk-very-secret-key")
        target = loadgen.target_of(args, "http://127.0.0.1:1")
        wiring = loadgen.Wiring(0, None, "", None, b"", loadgen.Timeouts(1, 1, 1, 1),
                                ("sk-very-secret-key",))
        asked: List[str] = []

        def fetch(target: Any, wiring: Any, path: str, most_s: float) -> Tuple[str, bytes]:
            asked.append(path)
            body = answers.get(path, b"")
            if isinstance(body, Exception):
                raise body
            return ("200", body) if body else ("404", b"")

        with unittest.mock.patch.object(loadgen, "fetch", fetch):
            found = loadgen.server_facts(target, wiring)
        self.assertLessEqual(len(asked), 4)
        return found

    MODELS = (b'{"object":"list","data":[{"id":"other"},{"id":"tiny","owned_by":"vllm",'
              b'"root":"models/mock-model","max_model_len":2048}]}')

    def test_vllm(self) -> None:
        found = self.facts({
            "/v1/models": self.MODELS, "/version": b'{"version":"0.11.0"}',
            "/metrics": b'vllm:num_requests_running{engine="0"} 0.0\nvllm:cache_config_info{'
            b'block_size="128",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks='
            b'"8192",sliding_window="None"} 1.0\n'})
        self.assertEqual(found, {
            "model": "tiny = models/mock-model", "engine": "vllm", "version": "0.11.0",
            "flags": "max_model_len 2048, cache_dtype auto, enable_prefix_caching True, "
            "block_size 128, num_gpu_blocks 8192"})

    def test_sglang(self) -> None:
        found = self.facts({
            "/v1/models": b'{"data":[{"id":"tiny","owned_by":"sglang"}]}',
            "/server_info": b'{"version":"0.5.4","tp_size":2,"quantization":"fp8","dtype":"auto"}'})
        self.assertEqual((found["engine"], found["version"]), ("sglang", "0.5.4"))
        self.assertEqual(found["flags"], "tp_size 2, dtype auto, quantization fp8")

    def test_a_server_that_says_nothing_or_nonsense_leaves_facts_out(self) -> None:
        self.assertEqual(self.facts({}), {})
        for junk in (b"[]", b"{}", b"null", b'{"data": {"id": 1}}', b'{"data": [7, null]}',
                     b"\xff\xfe", b"[" * 10000, OSError("gone"), loadgen.WireError("bad")):
            self.assertEqual(self.facts(dict.fromkeys(
                ("/v1/models", "/version", "/metrics", "/server_info"), junk)), {})

    def test_the_key_does_not_come_back_in_a_fact(self) -> None:
        found = self.facts({"/version": b'{"version":"for sk-very-secret-key"}'})
        self.assertNotIn("secret", found["version"])

    def test_a_long_metrics_line_is_read_in_no_time(self) -> None:
        self.assertEqual(self.facts({
            "/metrics": b"vllm:cache_config_info{" + b"a" * 1_000_000 + b"}"}), {"engine": "vllm"})


CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
MEASURE = """<!DOCTYPE html><body><script>
const page = atob("%s"), said = [];
onload = () => { let left = 2;
  for (const wide of [390, 1280]) { const f = document.createElement("iframe");
    f.style.cssText = `width:${wide}px;height:900px;border:0`; f.srcdoc = decodeURIComponent(
      escape(page)); f.onload = () => { const d = f.contentDocument;
      const small = [...d.querySelectorAll("svg text")].map(t => t.getBoundingClientRect().height);
      said.push({wide, scroll: d.documentElement.scrollWidth, figures:
        d.querySelectorAll("[data-path]").length, charts: d.querySelectorAll("svg").length,
        text: Math.min(...small), run: d.title.includes("ran")});
      if (!--left) document.body.innerHTML = `<pre id="said">${JSON.stringify(said)}</pre>`; };
    document.body.append(f); } };
</script></body>"""


@unittest.skipUnless(CHROMIUM, "no Chromium on this machine")
class InChromium(unittest.TestCase):
    def test_the_page_fits_a_phone_and_a_desk_and_runs_nothing(self) -> None:
        summary = full()
        summary["target"]["model"] = ("<script>document.title='ran'</script>" + "x" * 300)
        summary["setup"]["note"] = [["<img src=x onerror=\"document.title='ran'\">", "y" * 300]]
        coded = base64.b64encode(loadgen.page(summary).encode()).decode()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "measure.html")
            with open(path, "w", encoding="utf-8") as file:
                file.write(MEASURE % coded)
            done = subprocess.run(
                [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 f"--user-data-dir={folder}/profile", "--virtual-time-budget=5000", "--dump-dom",
                 f"file://{path}"], capture_output=True, text=True, timeout=60, check=False)
        found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout)
        self.assertTrue(found, done.stderr[-2000:])
        assert found is not None
        for said in json.loads(found.group(1)):
            self.assertLessEqual(said["scroll"], said["wide"])
            self.assertGreater(said["figures"], 100)
            self.assertGreaterEqual(said["charts"], 9)
            self.assertGreater(said["text"], 9)
            self.assertFalse(said["run"])


if __name__ == "__main__":
    unittest.main()
