"""The plan: the worked runbook to the digit, the fixed point, the search, the inverse questions."""

import json
import math
import os
import sys
import tempfile
import unittest
from typing import Any, List

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import capacity
import loadgen
from tests.test_capacity import ask, run, text

WORKED = ("llama-3.1-70b -tp 2 --weights fp8 --kv fp8 --rate 20 "
          "--input-len lognormal:mean=2000,cv=0.5 --shared-prefix-len 1500 --output-len 300 "
          "--slo-ttft-ms 800 --slo-tpot-ms 50")


class TheRunbook(unittest.TestCase):
    """The support chatbot of the serving spec."""

    plan: Any

    @classmethod
    def setUpClass(cls) -> None:
        cls.plan = ask(WORKED + " --gpu-price 2.5 --mean-rate 8")["plan"]

    def test_littles_law_and_the_kv_tokens_are_the_worked_ones(self) -> None:
        self.assertAlmostEqual(self.plan["in_flight"], 246)
        self.assertAlmostEqual(self.plan["kv_tokens_needed"], 565_800)
        self.assertAlmostEqual(self.plan["kv_tokens_wanted"], 848_700)
        self.assertAlmostEqual(self.plan["kv_tokens_held"] / self.plan["replicas"], 486_596,
                               delta=1)

    def test_an_accepted_length_is_an_acceptance_to_the_plan_and_its_defence(self) -> None:
        by_share = ask(WORKED + " --spec-accept 0.6 --spec-tokens 4")["plan"]["speculation"]
        length = capacity.tokens_a_step(0.6, 4)
        by_length = ask(f"{WORKED} --spec-accept-len {length!r} --spec-tokens 4")["plan"]
        self.assertAlmostEqual(by_length["speculation"]["speedup"], by_share["speedup"])
        self.assertIn("acceptance 0.6", text(f"{WORKED} --spec-accept-len {length!r} --spec-tokens "
                                             "4 --defend").partition("DEFEND")[2])

    def test_the_floors_are_the_worked_ones(self) -> None:
        self.assertEqual(round(self.plan["tpot_floor_s"] * 1000), 15)
        long = self.plan["input_p99_tokens"]
        self.assertAlmostEqual(self.plan["ttft_floor_s"], 2 * 70.6e9 * long / (2 * 1979e12 * 0.5))
        self.assertAlmostEqual(self.plan["ttft_floor_cached_s"],
                               2 * 70.6e9 * (long - 1500) / (2 * 1979e12 * 0.5))

    def test_the_flags_of_two_replicas_are_the_worked_ones(self) -> None:
        flags = ask(WORKED + " -dp 2")["plan"]["flags"]
        self.assertEqual(flags["max-num-seqs"], 160)
        self.assertEqual(flags["max-model-len"], 8192)
        self.assertEqual(flags["max-num-batched-tokens"], 4096)
        self.assertEqual(flags["kv-cache-dtype"], "fp8")

    def test_replicas_are_the_rate_over_the_sustained_rate_over_the_headroom(self) -> None:
        self.assertEqual(self.plan["replicas"],
                         math.ceil(20 / self.plan["rate_per_replica_rps"] / 0.7))
        self.assertEqual(self.plan["spares"], 1)

    def test_the_margins_multiply_to_what_separates_plan_and_need(self) -> None:
        margins = self.plan["margins"]
        product = margins["tpot_margin"] * margins["headroom"] * margins["rounding_up"]
        self.assertAlmostEqual(self.plan["margin_product"], product)
        least = 20 / (self.plan["rate_per_replica_rps"] * margins["tpot_margin"])
        self.assertAlmostEqual(self.plan["replicas"] / least, product)

    def test_the_cost_is_the_bill_over_the_tokens_and_its_parts_make_the_bill(self) -> None:
        plan = self.plan
        hourly = 2.5 * plan["replicas"] * 2
        self.assertAlmostEqual(plan["cost_per_1m_output"], hourly / (20 * 300 * 3600) * 1e6)
        parts = 3600 * 20 * (plan["cost_per_1m_input"] * 2000
                             + plan["cost_per_1m_output_apart"] * 300) / 1e6
        self.assertAlmostEqual(parts, hourly)
        self.assertAlmostEqual(plan["cost_per_1m_output_at_mean_rate"],
                               plan["cost_per_1m_output"] * 20 / 8)

    def test_the_expectation_beside_the_plan_counts_the_prefix_as_cached_too(self) -> None:
        whole = ask(WORKED)
        self.assertAlmostEqual(whole["expected"]["tpot_s"] / whole["plan"]["tpot_s"], 1, delta=0.05)

    def test_the_screen_has_nine_steps_and_five_lines_for_a_customer(self) -> None:
        out = text(WORKED)
        for label in ("1 COLLECT", "2 FIT", "3 TPOT FLOOR", "4 TTFT FLOOR", "5 CONFIGURE",
                      "6 MEASURE", "7 SCALE OUT", "8 AUTOSCALE", "9 REPORT", "\nPLAN ", "\nLOAD ",
                      "\nSLO ", "\nLIMIT ", "\nCOST "):
            self.assertIn(label, out)


class TheFixedPoint(unittest.TestCase):
    """One replica's sustainable rate."""

    def replica(self, line: str) -> capacity.Replica:
        args, tables = capacity.parse_args(line.split()), capacity.presets()
        capacity.read_rates(args, tables["links"])
        d, load = capacity.deployment_of(args, tables), capacity.load_of(args)
        assert load is not None
        return capacity.Replica(d, load, capacity.calibration_of(d, "vllm", tables))

    def test_the_batch_is_rate_times_output_times_step(self) -> None:
        replica = self.replica(WORKED)
        for batch in (1, 7, 64):
            steady = replica.at(batch)
            self.assertAlmostEqual(steady.rate_rps * 300 * steady.tpot_s, batch)

    def test_the_step_holds_its_share_of_the_prefills(self) -> None:
        replica = self.replica(WORKED)
        steady = replica.at(32)
        decode = capacity.expected_step_s(replica.d, 32, replica.cal)
        self.assertAlmostEqual(steady.tpot_s, decode / (1 - steady.prefill_share))

    def test_the_named_limit_is_the_one_that_one_more_would_break(self) -> None:
        for more, limit in (("", "tpot"), (" --max-num-seqs 8", "max_num_seqs")):
            replica = self.replica(WORKED + more)
            best, binding = replica.sustained()
            assert best is not None
            self.assertEqual(binding, limit)
            self.assertEqual(replica.broken(int(best.batch), capacity.TPOT_MARGIN), "")
        tight = WORKED.replace("--weights fp8 --kv fp8", "--weights bf16")
        self.assertEqual(self.replica(tight).sustained()[1], "kv")
        short = WORKED.replace("--slo-ttft-ms 800", "--slo-ttft-ms 400")
        self.assertEqual(self.replica(short).sustained()[1], "ttft")

    def test_a_rate_is_found_again_from_its_batch(self) -> None:
        replica = self.replica(WORKED)
        self.assertAlmostEqual(replica.at_rate(replica.at(20).rate_rps).batch, 20, places=3)

    def test_the_wait_grows_with_the_rate_without_bound(self) -> None:
        replica = self.replica(WORKED)
        waits = [replica.at(batch).ttft_p99_s for batch in (1, 50, 200)]
        self.assertEqual(waits, sorted(waits))

    def test_what_no_replica_can_do_is_said_with_the_limit(self) -> None:
        line = WORKED.replace("--slo-tpot-ms 50", "--slo-tpot-ms 5")
        plan = ask(line)["plan"]
        self.assertEqual((plan["replicas"], plan["binding"]), (0, "tpot"))
        self.assertIn("not even one request", text(line))


class AgainstTheSimulator(unittest.TestCase):
    """The plan beside loadgen's engine, which takes the step times that --save writes."""

    @staticmethod
    def sent(n_in: str, shared: int, rate_rps: float, number: int) -> loadgen.Plan:
        work = loadgen.Work(loadgen.parse_lengths(n_in), loadgen.parse_lengths("300"), shared, 1)
        load = loadgen.Load(rate_rps, None, 1.0, number, None, None)
        return loadgen.make_plan(load, work, 1, 1.0)

    def test_a_prompt_shorter_than_the_shared_prefix_is_as_loadgen_sends_it(self) -> None:
        for text_in, shared in (("lognormal:mean=2000,cv=0.5", 1500), ("uniform:100..4000", 1000),
                                ("lognormal:mean=2000,cv=0.5", 0), ("2000", 1500)):
            sent = [r.n_in - shared for r in self.sent(text_in, shared, 1.0, 20_000).requests]
            planned, _ = capacity.past_prefix(capacity.parse_lengths(text_in), shared)
            self.assertAlmostEqual(planned / (sum(sent) / len(sent)), 1, delta=0.01, msg=text_in)

    def test_loadgen_takes_the_shared_prefix_with_the_lengths_of_the_deployment(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "deploy.json")
            ask(f"{WORKED} --save {path}")
            for more, shared in (("", 1500), (" --output-len 9", 1500), (" --input-len 200", 0),
                                 (" --shared-prefix-len 0", 0), (" --shared-prefix-len 7", 7)):
                for how in ("--simulate", "--mock", "--mock --deployment"):
                    args = loadgen.parse_args(f"{how} {path} --rate 1{more}".split())
                    self.assertEqual(args.shared_prefix_len, shared, how + more)

    def attainment(self, profile: loadgen.Profile, rate_rps: float) -> float:
        plan = self.sent("lognormal:mean=2000,cv=0.5", 1500, rate_rps, 3000)
        records = loadgen.simulate_plan(plan, 3, profile).records
        slo = loadgen.Slo(0.8, 0.05, None, 0.99)
        return sum(slo.met(r) for r in records) / len(records)

    def test_the_simulator_keeps_the_slo_at_a_tenth_less_than_the_plan_says_and_not_at_a_tenth_more(
            self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "deploy.json")
            plan = ask(f"{WORKED} --save {path}")["plan"]
            profile = loadgen.profile_from(loadgen.read_json(path))
        for slots, rate in ((profile.max_num_seqs, plan["rate_within_slots_rps"]),
                            (1024, plan["rate_per_replica_rps"])):
            engine = profile._replace(max_num_seqs=slots)
            self.assertGreater(self.attainment(engine, 0.9 * rate), 0.985)
            self.assertLess(self.attainment(engine, 1.1 * rate), 0.98)


class TheSearch(unittest.TestCase):
    """Without --tp and --weights the deployment is found, not given."""

    LINE = WORKED.replace("-tp 2 --weights fp8 --kv fp8 ", "")

    def test_the_cheapest_is_answered_and_the_table_is_in_order(self) -> None:
        found = ask(self.LINE + " --gpu-price h100=2.5,h200=3.2,l40s=0.8")
        ranked = found["plan"]["ranked"]
        prices = [row["per_hour"] for row in ranked]
        self.assertEqual(prices, sorted(prices))
        self.assertEqual(ranked[0]["gpu"], found["deployment"]["gpu"])
        self.assertLessEqual({row["gpu"] for row in ranked}, {"h100", "h200", "l40s"})

    def test_without_a_rate_the_cheapest_is_by_output_token(self) -> None:
        line = "llama-3.1-8b --workload rag --gpu-price h100=2.50,h200=3.20"
        costs = [row["cost_per_1m_output"] for row in ask(line)["plan"]["ranked"]]
        self.assertEqual(costs, sorted(costs))
        self.assertLess(costs[0], 12)
        told = " ".join(text(line).split())
        self.assertIn("deployments meet the SLOs, each planned at 70% of its own rate", told)
        self.assertNotRegex(told, r"meet the load|\babout 0 at|\b0 (in flight|users|planned)")
        unpriced = ask("llama-3.1-8b --workload rag --gpu h100")["plan"]["ranked"]
        each = [row["gpus"] / row["replicas"] / row["rate_per_replica_rps"] for row in unpriced]
        self.assertEqual(each, sorted(each))

    def test_each_candidate_could_be_asked_for_by_its_flags(self) -> None:
        row = ask(self.LINE + " --gpu h100")["plan"]["ranked"][0]
        tp = row["layout"].partition("=")[2]
        again = ask(f"{self.LINE} --gpu {row['gpu']} -tp {tp} --weights {row['weights']} "
                    f"--kv {row['kv']}")["plan"]
        self.assertEqual(again["replicas"], row["replicas"])
        self.assertAlmostEqual(again["rate_per_replica_rps"], row["rate_per_replica_rps"])

    def test_the_lengths_are_walked_once_for_all_candidates(self) -> None:
        calls: List[float] = []
        args, tables = capacity.parse_args(self.LINE.split()), capacity.presets()
        plain = args.input_len

        def quantile(q: float) -> float:
            calls.append(q)
            return float(plain.quantile(q))

        args.input_len = plain._replace(quantile=quantile)
        d, load = capacity.deployment_of(args, tables), capacity.load_of(args)
        assert load is not None
        found = capacity.search(d, args, load, tables)
        self.assertGreater(len(found), 100)
        tried = len(capacity.candidates(d, args, tables))
        self.assertLess(len(calls), 4 * tried + 2 * capacity.GRID)

    def test_what_was_given_is_kept(self) -> None:
        ranked = ask(self.LINE + " --gpu h200 --kv bf16")["plan"]["ranked"]
        self.assertEqual({(row["gpu"], row["kv"]) for row in ranked}, {("h200", "bf16")})


class Inputs(unittest.TestCase):
    """Workloads, and what is refused."""

    def test_a_workload_fills_in_what_was_not_given(self) -> None:
        plan = ask("llama-3.1-8b --rate 5 --tp 1 --workload chat --output-len 100")["plan"]
        self.assertEqual((plan["input_len"], plan["output_len"]),
                         ("lognormal:mean=2000,cv=0.5", "100"))
        self.assertEqual((plan["slo_ttft_s"], plan["slo_tpot_s"]), (0.5, 0.05))

    def test_every_workload_can_be_planned(self) -> None:
        for name in ("chat", "code", "rag", "agent", "batch"):
            plan = ask(f"llama-3.1-8b --rate 2 --tp 1 --workload {name}")["plan"]
            self.assertIn("replicas", plan, name)

    def test_users_contexts_and_gpus_are_found_without_a_rate(self) -> None:
        plan = ask("llama-3.1-8b --tp 1 --input-len 1000 --output-len 200 --slo-tpot-ms 40 "
                   "--concurrency 16")["plan"]
        inverse = plan["inverse"]
        longest = inverse["longest_context_tokens"]
        self.assertGreater(inverse["max_in_flight"], 16)
        memory = ask(f"llama-3.1-8b --ctx {longest}")["memory"]
        self.assertGreaterEqual(memory["max_seqs"], 16)

    def test_without_a_rate_the_plan_is_that_of_the_rate_it_says_it_plans(self) -> None:
        for line in ("llama-3.1-8b --tp 1 --weights fp8 --input-len 2000 --output-len 300 "
                     "--slo-ttft-ms 1000 --slo-tpot-ms 40",
                     "llama-3.1-8b --gpu 4090 --tp 1 --weights fp8 --input-len 2000 --output-len "
                     "300 --slo-ttft-ms 500 --slo-tpot-ms 20"):
            free = ask(line)["plan"]
            self.assertAlmostEqual(free["planned_rate_rps"], 0.7 * free["rate_per_replica_rps"])
            asked = ask(f"{line} --rate {free['planned_rate_rps']:.9f}")["plan"]
            for key in ("replicas", "in_flight", "tpot_s", "ttft_p99_s", "batch_per_replica"):
                self.assertAlmostEqual(free[key], asked[key], places=6, msg=key)
            self.assertGreaterEqual(free["inverse"]["max_in_flight"], round(free["in_flight"]))
            out = " ".join(text(line).split())
            self.assertIn(f"LOAD up to {capacity.figure(free['planned_rate_rps'])} requests/s", out)
            self.assertIn(f"LIMIT {capacity.figure(free['rate_per_replica_rps'])} requests/s", out)

    def test_slots_that_were_given_are_not_said_to_follow_from_the_load(self) -> None:
        self.assertIn("max-num-seqs 160 (as given;", text(WORKED + " --max-num-seqs 160"))
        self.assertRegex(text(WORKED), r"max-num-seqs 64 \(\d+ in flight a replica x 1.3\)")

    def test_room_is_not_promised_past_the_slots_that_were_given(self) -> None:
        out = " ".join(text(WORKED + " --max-num-seqs 32").split())
        self.assertIn("246 planned, room for 224 in all slots", out)
        self.assertIn("max-num-seqs 32 (as given; 19.5 in flight a replica expected, 35 a replica "
                      "planned for, which would not all run at once)", out)
        out = " ".join(text(WORKED + " --max-num-seqs 32 --dp 3 --concurrency 400").split())
        self.assertIn("82 in each of the 3 replicas named (--dp) planned for", out)
        self.assertRegex(out, r"longest mean request with 32 in flight a replica: 2,\d+ tokens")
        self.assertIn("room for 246 planned", text(WORKED))

    def test_an_answer_of_one_token_has_no_tpot_to_limit(self) -> None:
        line = ("llama-3.1-8b --tp 1 --rate 20 --input-len 2000 --output-len 1 --slo-ttft-ms 800 "
                "--gpu-price 2.5")
        strict, free = ask(line + " --slo-tpot-ms 25")["plan"], ask(line)["plan"]
        self.assertEqual(strict, free)
        self.assertEqual((free["binding"], free["slo_tpot_s"]), ("ttft", None))
        out = " ".join(text(line + " --slo-tpot-ms 25 --defend").split())
        self.assertIn("answers of one token have no TPOT: its SLO does not apply", out)
        self.assertNotIn("TPOT SLO", out)
        two = line.replace("--output-len 1", "--output-len 2")
        self.assertEqual(ask(two + " --slo-tpot-ms 25")["plan"]["binding"], "tpot")

    def test_the_two_costs_of_a_plan_have_names_of_their_own(self) -> None:
        for more, label in (("", "COST/REPLICA"), (" --dp 2", "COST (--dp)")):
            told = text(WORKED + more + " --gpu-price 2.5").splitlines()
            labels = [line[:12].strip() for line in told if line.startswith("COST")]
            self.assertEqual(labels, [label, "COST"])

    def test_one_of_a_thing_is_singular(self) -> None:
        for line in (WORKED, WORKED.replace("--rate 20", "--rate 1"), "llama-3.1-8b --tp 1 "
                     "--input-len 2000 --output-len 300 --slo-ttft-ms 1000 --slo-tpot-ms 40 "
                     "--autoscale"):
            self.assertNotRegex(text(line), r"\b1 (replicas|GPUs|users)\b", line)

    def test_no_more_users_are_promised_than_have_a_batch_slot(self) -> None:
        plan = ask(WORKED)["plan"]
        self.assertLessEqual(plan["inverse"]["max_in_flight"], plan["max_num_seqs"])

    def test_what_cannot_be_planned_is_refused_in_one_line(self) -> None:
        for more, word in (("--rate 5", "--input-len"), ("--workload nosuch", "workload"),
                           ("--rate 5 --input-len 100 --output-len 9 --shared-prefix-len 100",
                            "prefix"), ("--mean-rate 5", "--rate"),
                           ("--rate 5 --mean-rate 6 --workload chat", "--mean-rate"),
                           ("--rate 0 --workload chat", "zero"),
                           ("--rate 5 --workload chat --engine nosuch", "vllm"),
                           ("--shared-prefix-len 5", "--input-len")):
            code, out, err = run(*f"llama-3.1-8b {more}".split())
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), more)
            self.assertIn(word, err)

    def test_the_json_has_its_promised_keys(self) -> None:
        plan = ask(WORKED)["plan"]
        for key in ("in_flight", "kv_tokens_needed", "replicas", "spares", "rate_per_replica_rps",
                    "flags", "cost_per_1m_output", "cost_per_1m_input", "binding"):
            self.assertIn(key, plan)
        self.assertIsNone(plan["cost_per_1m_output"])
        json.dumps(plan, allow_nan=False)


if __name__ == "__main__":
    unittest.main()
