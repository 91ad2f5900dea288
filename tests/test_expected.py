"""The expectation: fitted constants, their bands, fallbacks, and what the command line says."""

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

    def test_the_constants_give_about_the_error_that_their_bands_state(self) -> None:
        rows = {row["name"]: row for row in capacity.presets()["bands"]}
        for kind in ("dense", "MoE"):
            errors = [abs(e.tpot_s / p.tpot_s - 1) for p, e in zip(self.points, self.found)
                      if not p.aside and bool(p.d.model.experts) == (kind == "MoE")]
            self.assertEqual(len(errors), sum(rows[kind]["seen"].values()))
            self.assertLess(median(errors), rows[kind]["median"] + 0.005, kind)
            self.assertGreater(median(errors), 0.02, kind)

    def test_the_bands_hold_most_of_the_points(self) -> None:
        held = [e.tpot_low_s <= p.tpot_s <= e.tpot_high_s
                for p, e in zip(self.points, self.found) if not p.aside]
        self.assertGreater(sum(held) / len(held), 0.8)
        self.assertLess(sum(held) / len(held), 0.99)

    def test_nothing_is_expected_to_be_faster_than_the_bound(self) -> None:
        for p, e in zip(self.points, self.found):
            bound = capacity.decode_step(p.d, max(1, math.floor(e.decoding))).step_s
            self.assertGreaterEqual(e.tpot_s, bound * 0.999, p.group)


class Asked(unittest.TestCase):
    """The command line's answer."""

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

    def test_weights_that_do_not_fit_are_said_beside_their_expectation(self) -> None:
        out = text("llama-3.1-70b --weights bf16 --concurrency 8 --input-len 2000 --output-len 300")
        self.assertIn("as if they did", out)

    def test_more_prompt_means_more_prefill_in_each_step(self) -> None:
        short = ask(LINE)["expected"]
        long = ask(LINE.replace("--input-len 1024", "--input-len 4096"))["expected"]
        self.assertGreater(long["tpot_s"], short["tpot_s"] * 1.1)

    def test_what_was_not_measured_has_a_wider_band_and_says_so(self) -> None:
        def width(line: str) -> float:
            e = ask(line)["expected"]
            return float(math.log(e["tpot_high_s"] / e["tpot_low_s"]))

        other = LINE.replace("--gpu h100", "--gpu mi300x")
        self.assertGreater(width(other), 1.2 * width(LINE))
        self.assertIn("not measured", ask(other)["expected"]["basis"])

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
