"""The expectation: fitted constants, their bands, fallbacks, and what the command line says."""

import csv
import math
import os
import sys
import unittest
from statistics import median
from typing import Any, Dict, List

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import capacity
from tests import fit_expected
from tests.test_capacity import ask, text

LINE = ("--preset qwen3-32b --gpu h100 --tp 2 --weights fp8 --engine vllm --concurrency 64 "
        "--input-len 1024 --output-len 512")


class Measured(unittest.TestCase):
    """Every measured row, asked as a user would ask it."""

    points: List[fit_expected.Point]
    found: List[capacity.Expected]

    @classmethod
    def setUpClass(cls) -> None:
        tables = capacity.presets()
        cls.points = fit_expected.read_points()
        cls.found = [capacity.expected_of(
            p.d, p.batch, capacity.calibration_of(p.d, p.engine, tables), p.held)
            for p in cls.points]

    def test_the_constants_give_the_error_that_presets_states_for_them(self) -> None:
        rows = {row["name"]: row for row in capacity.presets()["bands"]}
        for kind in ("dense", "MoE"):
            errors = [abs(e.tpot_s / p.tpot_s - 1) for p, e in zip(self.points, self.found)
                      if not p.aside and fit_expected.kind_of(p) == kind]
            self.assertEqual(len(errors), sum(rows[kind]["seen"].values()))
            self.assertAlmostEqual(median(errors), rows[kind]["fitted"], places=3)
            self.assertLess(rows[kind]["fitted"], rows[kind]["median"])

    def test_presets_has_the_constants_that_the_fit_knows_and_no_others(self) -> None:
        rows = capacity.presets()["efficiency"]
        self.assertEqual([row["name"] for row in rows], list(fit_expected.START))
        for row in rows:
            start = fit_expected.START[row["name"]]
            self.assertLessEqual(set(row.get("times", {})), set(start.words), row["name"])
            self.assertEqual(row["note"], start.note)

    def test_the_bands_hold_most_of_the_points(self) -> None:
        held = [e.tpot_low_s <= p.tpot_s <= e.tpot_high_s
                for p, e in zip(self.points, self.found) if not p.aside]
        self.assertGreater(sum(held) / len(held), 0.8)
        self.assertLess(sum(held) / len(held), 0.99)

    def test_the_bands_hold_most_of_each_kind_on_each_engine(self) -> None:
        families: Dict[str, List[bool]] = {}
        for p, e in zip(self.points, self.found):
            if p.aside != "odd":
                families.setdefault(f"{fit_expected.kind_of(p)} {p.engine}", []).append(
                    e.tpot_low_s <= p.tpot_s <= e.tpot_high_s)
        for name, held in families.items():
            self.assertGreater(sum(held) / len(held), 0.75, name)

    def test_expected_ttft_is_right_within_a_factor_of_two_mostly(self) -> None:
        ratios = [e.ttft_s / p.ttft_s for p, e in zip(self.points, self.found)
                  if p.ttft_s and not p.aside and p.batch == p.d.asked]
        self.assertLess(abs(math.log(median(ratios))), math.log(1.15))
        self.assertGreater(sum(0.5 < r < 2 for r in ratios) / len(ratios), 0.65)

    def test_nothing_is_expected_to_be_faster_than_the_bound(self) -> None:
        for p, e in zip(self.points, self.found):
            bound = capacity.decode_step(p.d, max(1, math.floor(e.decoding))).step_s
            self.assertGreaterEqual(e.tpot_s, bound * 0.999, p.group)


class Asked(unittest.TestCase):
    """The command line's answer."""

    def test_every_group_can_be_asked_for_on_the_command_line(self) -> None:
        with open(fit_expected.POINTS, encoding="utf-8") as file:
            rows = csv.DictReader(line for line in file if not line.startswith("#"))
            lines = {(r["model"], r["gpu"], r["engine"], r["weights"]): fit_expected.argv_of(r)
                     for r in rows}
        for argv in lines.values():
            e = ask(" ".join(argv))["expected"]
            self.assertGreater(e["tpot_s"], 0, argv)
            self.assertEqual(e["engine"], argv[argv.index("--engine") + 1])

    def test_the_terms_are_the_step_and_the_tpot(self) -> None:
        e = ask(LINE)["expected"]
        parts = sum(e[key + "_s"] for key in ("layers", "comm", "sequences"))
        self.assertAlmostEqual(e["step_s"], max(e["compute_s"], e["weights_s"] + e["kv_s"]) + parts)
        self.assertAlmostEqual(e["tpot_s"], e["step_s"] + e["prefill_s"])

    def test_the_json_has_its_promised_keys_and_they_fit_together(self) -> None:
        e = ask(LINE)["expected"]
        self.assertLess(e["tpot_low_s"], e["tpot_s"])
        self.assertLess(e["tpot_s"], e["tpot_high_s"])
        each = 64 * 512 / (e["ttft_s"] + 511 * e["tpot_s"])
        self.assertAlmostEqual(e["output_tok_s"], each)
        self.assertFalse(e["kv_limited"])
        self.assertIn("measured on", e["basis"])

    def test_the_batch_that_the_kv_pool_holds_is_expected_where_more_is_asked(self) -> None:
        line = "llama-3.1-70b --tp 2 --weights bf16 --concurrency 64 --input-len 2000 " \
               "--output-len 300"
        e = ask(line)["expected"]
        self.assertTrue(e["kv_limited"])
        self.assertLess(e["batch"], 64)
        self.assertIn(f"KV pool holds {e['batch']} of 64", " ".join(text(line).split()))

    def test_streams_are_counted_where_replicas_share_them_unevenly(self) -> None:
        def found(more: str) -> float:
            return float(ask("llama-3.1-8b --gpu-price 2 " + more)["expected"]["output_tok_s"])

        one, two = found("--concurrency 1"), found("--concurrency 2")
        self.assertAlmostEqual(found("--concurrency 2 --dp 4"), 2 * one)
        self.assertAlmostEqual(found("--concurrency 9 --dp 8"), two + 7 * one)
        self.assertAlmostEqual(found("--concurrency 16 --dp 8"), 8 * two)
        uneven = ask("llama-3.1-8b --gpu-price 2 --concurrency 9 --dp 8")
        table = {row["batch"]: row["tok_s"] for row in uneven["decode"]["table"]}
        self.assertAlmostEqual(uneven["fleet"]["tok_s"], table[2] + 7 * table[1])
        self.assertAlmostEqual(uneven["cost"]["tok_s"], table[2] + 7 * table[1])

    def test_a_drafter_is_not_in_the_expectation_and_that_is_said(self) -> None:
        plain, drafted = text(LINE), text(LINE + " --spec-accept 0.8")
        self.assertNotIn("drafter", plain.partition("EXPECT")[2].partition("BINDS")[0])
        self.assertIn("without the drafter of --spec-accept", " ".join(drafted.split()))

    def test_no_band_reaches_below_the_bound(self) -> None:
        for line in ("qwen3-coder-next --gpu b200 --tp 1 --weights bf16 --concurrency 16 "
                     "--input-len 128 --output-len 2048", "llama-3.1-8b --gpu mi300x --concurrency "
                     "256 --input-len 128 --output-len 2048", LINE):
            found = ask(line)
            low, bound = found["expected"]["tpot_low_s"], found["decode"]["at_batch"]["step_s"]
            self.assertGreaterEqual(low, bound, line)
            self.assertLessEqual(low, found["expected"]["tpot_s"], line)

    def test_a_step_takes_no_more_prefill_than_its_chunk(self) -> None:
        def found(output: int) -> Any:
            return ask(f"llama-3.1-8b --concurrency 64 --input-len 1000 --output-len {output}"
                       )["expected"]

        for output in (2, 3, 5, 9):
            e = found(output)
            self.assertLess(e["tpot_s"], 0.2, output)
            self.assertLess(e["output_tok_s"] / output, 60)  # req/s: 18 ms of prefill each
        self.assertAlmostEqual(found(2)["prefill_s"], found(3)["prefill_s"])
        self.assertLess(found(200)["prefill_s"], found(2)["prefill_s"] / 5)

    def test_weights_that_do_not_fit_are_said_beside_their_expectation(self) -> None:
        out = text("llama-3.1-70b --weights bf16 --concurrency 8 --input-len 2000 --output-len 300")
        self.assertIn("as if they did", out)

    def test_more_prompt_means_more_prefill_in_each_step(self) -> None:
        short = ask(LINE)["expected"]
        long = ask(LINE.replace("--input-len 1024", "--input-len 4096"))["expected"]
        self.assertGreater(long["tpot_s"], short["tpot_s"] * 1.1)

    def test_a_shared_prefix_is_not_prefilled_again(self) -> None:
        line = LINE.replace("--input-len 1024", "--input-len 4096")
        whole, fresh = ask(line)["expected"], ask(line + " --shared-prefix-len 3072")["expected"]
        short = ask(LINE)["expected"]
        self.assertLess(fresh["tpot_s"], whole["tpot_s"])
        self.assertLess(short["prefill_s"], fresh["prefill_s"])  # attends to the prefix
        self.assertIn("1,024 of a prompt past the shared prefix",
                      " ".join(text(line + " --shared-prefix-len 3072").split()))

    def test_what_was_not_measured_has_a_wider_band_and_says_so(self) -> None:
        def width(line: str) -> float:
            e = ask(line)["expected"]
            return float(math.log(e["tpot_high_s"] / e["tpot_low_s"]))

        other = LINE.replace("--gpu h100", "--gpu mi300x")
        self.assertGreater(width(other), 1.2 * width(LINE))
        self.assertIn("not measured", ask(other)["expected"]["basis"])

    def test_a_layout_that_no_point_states_has_a_wider_band_and_is_named(self) -> None:
        moe = "deepseek-v3 --gpu h200 --concurrency 64"
        plain = ask(moe + " --tp 8")["expected"]
        for line, names in (("llama-3.1-70b --pp 2", "PP"), (moe + " --tp 8 --ep 8", "EP"),
                            (moe + " --dp 8 --ep all", "EP and DP attention"),
                            (moe + " --tp 8 --dcp 8", "context parallelism")):
            self.assertTrue(ask(line)["expected"]["basis"].startswith(
                names + " not measured, so a wider band; measured on"), line)
        self.assertTrue(plain["basis"].startswith("measured on"))
        wide = ask(moe + " --tp 8 --dcp 8")["expected"]
        self.assertGreater(wide["tpot_high_s"] / wide["tpot_s"],
                           plain["tpot_high_s"] / plain["tpot_s"])
        for kv, said in (("fp8", True), ("bf16", False)):
            basis = ask(f"llama-3.1-8b --kv {kv}")["expected"]["basis"]
            self.assertEqual("the KV precision of the points is not known" in basis, said)

    def test_an_expectation_held_at_the_bound_says_so(self) -> None:
        for line, said in (("qwen3-30b-a3b", True), ("llama-3.1-8b", False)):
            out = " ".join(text(line).split())
            self.assertEqual("no faster than the bound, where it would come out" in out, said)

    def test_without_presets_the_constants_are_starting_values(self) -> None:
        args = capacity.parse_args(LINE.split())
        d = capacity.deployment_of(args, capacity.presets())
        cal = capacity.calibration_of(d, "vllm", {})
        self.assertIn("measured on nothing", cal.basis)
        self.assertEqual((cal.low, cal.high), (0.5, 2.0))

    def test_a_broken_table_is_one_clear_line(self) -> None:
        args = capacity.parse_args(LINE.split())
        d = capacity.deployment_of(args, capacity.presets())
        broken: List[Dict[str, Any]] = [
            {"efficiency": [{"name": "mbu"}]}, {"efficiency": [{"name": "x", "value": 1}]},
            {"efficiency": [], "bands": [{"name": "dense"}]}]
        for tables in broken:
            with self.assertRaises(capacity.UserError):
                capacity.calibration_of(d, "vllm", tables)


if __name__ == "__main__":
    unittest.main()
