"""What leaves as a file, and what comes back: --save, --measured, --autoscale, --defend."""

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from typing import Any, Callable, Optional

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import capacity
import loadgen
from tests.test_capacity import ask, run

HERE = os.path.dirname(os.path.abspath(__file__))
DENSE = "llama-3.1-70b -tp 2 --weights fp8 --kv fp8 --input-len 2000 --output-len 300"
MODELS = (DENSE, "llama-3.1-8b --gpu l40s --concurrency 40", "deepseek-v3 --gpu h200 --dp 8 --ep "
          "all", "gpt-oss-120b --concurrency 16", "qwen3-next-80b-a3b -tp 4 --concurrency 64",
          "llama-3.1-405b --gpu h200 -tp 8 -pp 2 --weights fp8 --concurrency 32")


def saved(line: str) -> Any:
    """The file that --save writes for a command line."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "deploy.json")
        code, _, err = run(*line.split(), "--save", path)
        assert code == 0, err
        assert os.listdir(folder) == ["deploy.json"], "a partial file is left behind"
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def case_for(line: str) -> capacity.Case:
    """The case of a command line."""
    args, tables = capacity.parse_args(line.split()), capacity.presets()
    case = capacity.case_of(capacity.deployment_of(args, tables), args)
    return case._replace(cal=capacity.calibration_of(case.d, "vllm", tables))


def answer_to(line: str) -> capacity.Answer:
    """The answer, with its steps, to a command line."""
    argv, tables = line.split(), capacity.presets()
    args = capacity.completed(capacity.parse_args(argv), argv, tables)
    return capacity.answer_for(capacity.deployment_of(args, tables), args, tables)


def engine_step_s(profile: loadgen.Profile, batch: int, history: int) -> float:
    """What loadgen's engine takes for a step of so many sequences with that much in the cache."""
    engine = loadgen.Engine(profile._replace(max_num_seqs=batch, num_blocks=10**8,
                                             max_model_len=10**8, max_num_batched_tokens=10**9))
    for number in range(batch):
        engine.submit(number, history, 3)
    engine.step()  # the prompts
    return engine.step()[0]


class Save(unittest.TestCase):
    def test_loadgen_takes_the_file_as_an_engine(self) -> None:
        for line in MODELS:
            profile = loadgen.profile_from(saved(line))
            fields = set(loadgen.Profile._fields) - {"spec_tokens", "spec_acceptance"}  # the mock's
            self.assertEqual(set(saved(line)["step_time"]), fields, line)
            self.assertEqual("", loadgen.Engine(profile).refusal(1000, 200), line)

    def test_the_engine_steps_as_the_expectation_says(self) -> None:
        for line in MODELS:
            found = saved(line)
            at = found["step_time_at"]
            got = engine_step_s(loadgen.profile_from(found), at["batch"],
                                round(at["history_tokens"]))
            case = case_for(line)
            wanted = capacity.expected_step_s(case.d, at["batch"], case.cal)
            self.assertLess(abs(got / wanted - 1), 0.03, f"{line}: {got} for {wanted}")

    def test_a_dense_model_steps_right_at_other_batches_too(self) -> None:
        found, case = saved(DENSE), case_for(DENSE)
        for batch in (1, 8, 200):
            got = engine_step_s(loadgen.profile_from(found), batch, 2150)
            wanted = capacity.expected_step_s(case.d, batch, case.cal)
            self.assertLess(abs(got / wanted - 1), 0.1, f"batch {batch}: {got} for {wanted}")

    def test_the_file_holds_the_flags_as_they_were_written(self) -> None:
        found = saved("llama-3.1-70b -tp 2 --weights fp8 --input-len lognormal:mean=2000,cv=0.5 "
                      "--output-len 300 --gpu-price 2.5 --storage 7GB/s")
        self.assertEqual(found["flags"], {
            "model": "llama-3.1-70b", "tp": 2, "weights": "fp8", "output-len": "300",
            "input-len": "lognormal:mean=2000,cv=0.5", "gpu-price": 2.5, "storage": "7 GB/s"})
        self.assertEqual(found["lengths"]["input"], "lognormal:mean=2000,cv=0.5")
        self.assertEqual(found["price"], {"gpu_per_hour": 2.5})
        self.assertEqual(found["model"]["id"], "meta-llama/Llama-3.1-70B")

    def test_no_folder_of_this_machine_is_in_the_file(self) -> None:
        config = os.path.join(HERE, "data", "configs", "Qwen--Qwen3-8B")
        with tempfile.TemporaryDirectory() as folder:
            lengths = os.path.join(folder, "lengths.txt")
            with open(lengths, "w", encoding="utf-8") as file:
                file.write("100\n200\n")
            told = json.dumps(saved(f"{config} --input-len hist:{lengths} --output-len 10"))
        self.assertNotIn(folder, told)
        self.assertNotIn(HERE, told)
        self.assertIn("hist:lengths.txt", told)

    def test_a_file_that_cannot_be_written_is_one_line(self) -> None:
        for path in ("/nowhere/deploy.json", HERE, "/dev/null"):
            code, out, err = run("llama-3.1-8b", "--save", path)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
            self.assertIn("cannot be written", err)

    def test_what_does_not_fit_is_not_saved(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "deploy.json")
            code, _, err = run("llama-3.1-70b", "--save", path)
            self.assertEqual((code, os.listdir(folder)), (2, []))
            self.assertIn("does not fit", err)


RUN = os.path.join(HERE, "data", "run")  # loadgen.py --mock of its deploy.json, sweep 1,3,20


class Measured(unittest.TestCase):
    def told(self, change: Callable[[Any], None], line: str = "", deploy: bool = True,
             json_: bool = True) -> Any:
        """Exit code, stdout and stderr for the kept run with its summary changed."""
        with open(os.path.join(RUN, "summary.json"), encoding="utf-8") as file:
            summary = json.load(file)
        change(summary)
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "summary.json"), "w", encoding="utf-8") as file:
                json.dump(summary, file)
            if deploy:
                shutil.copy(os.path.join(RUN, "deploy.json"), folder)
            return run("--measured", folder, *["--json"] * json_, *line.split())

    def asked(self, change: Callable[[Any], None] = lambda s: None, line: str = "") -> Any:
        """The `measured` part of the answer to that."""
        code, out, err = self.told(change, line)
        self.assertEqual((code, err), (0, ""))
        return json.loads(out)["measured"]

    def test_bound_expectation_and_measurement_stand_in_one_row(self) -> None:
        found = self.asked()
        self.assertEqual([row["verdict"] for row in found["runs"]], ["VALID", "VALID", "UNSTABLE"])
        for row in found["runs"]:
            self.assertLess(row["bound_tpot_s"], row["tpot_p50_s"])
            self.assertLess(row["expected_tpot_low_s"], row["expected_tpot_s"])
            self.assertGreater(row["bound_output_tok_s"], row["output_tok_s"])

    def test_implied_mbu_is_bytes_over_bandwidth_over_tpot(self) -> None:
        found = self.asked()
        row = found["runs"][1]  # batch 2 of 70B FP8 on two H100s
        read = 70.6e9 / 2 + 2 * (600 + 15) * 160 * 1024 / 2
        self.assertAlmostEqual(found["implied_mbu"], read / 3.35e12 / row["tpot_p50_s"], places=6)
        flop = 2 * 70.6e9 * 2 / 2 * (1 + 600 / 30)
        self.assertAlmostEqual(found["implied_mfu"], flop / 1979e12 / row["tpot_p50_s"], places=6)

    def test_an_unstable_run_is_no_operating_point(self) -> None:
        self.assertEqual(self.asked()["operating_point"]["rate_rps"], 3)

        def client_limited(summary: Any) -> None:
            summary["runs"][1]["verdict"] = "CLIENT-LIMITED"
        self.assertEqual(self.asked(client_limited)["operating_point"]["rate_rps"], 1)

    def test_the_operating_point_is_the_one_that_loadgen_names(self) -> None:
        def named(where: Any) -> Callable[[Any], None]:
            return lambda summary: summary.update(
                operating_point={"run": where, "note": "a lower rate"})
        for where, rate in ((0, 1), (1, 3), (None, None),  # and what names none is not followed
                            (2, 3), (True, 3), ("0", 3), (9, 3), (-3, 3), ({}, 3)):
            point = self.asked(named(where))["operating_point"]
            self.assertEqual(point and point["rate_rps"], rate, where)
        self.assertIn("loadgen.py: a lower rate", self.told(named(0), json_=False)[1])
        older = self.asked(lambda summary: summary.pop("operating_point", None))
        self.assertEqual(older["operating_point"]["rate_rps"], 3)

    def test_what_was_simulated_or_interrupted_is_called_so(self) -> None:
        def odd(summary: Any) -> None:
            for one in summary["runs"]:
                one["simulated"] = True
            summary["runs"][1]["client"] = {"interrupted": True}
        out = self.told(odd, json_=False)[1]
        self.assertRegex(out, r"rate 1 .* SIMULATED, VALID\n")
        self.assertRegex(out, r"rate 3 .* SIMULATED, INTERRUPTED, VALID\n")
        self.assertIn("rate 3 is INTERRUPTED", out)
        self.assertEqual(out.count("nothing was measured"), 1)
        self.assertNotIn("ms measured", out)
        self.assertEqual(self.asked(odd)["operating_point"]["rate_rps"], 1)
        self.assertNotIn("SIMULATED", run("--measured", RUN)[1])

    def test_without_a_trusted_run_nothing_follows(self) -> None:
        def all_unstable(summary: Any) -> None:
            for one in summary["runs"]:
                one["verdict"] = "UNSTABLE"
        found = self.asked(all_unstable, "--rate 20 --gpu-price 2.5")
        self.assertEqual([found[key] for key in (
            "operating_point", "implied_mbu", "implied_mfu", "cost_per_1m_output", "replicas",
            "binding")], [None] * 6)

    def test_a_run_that_misses_its_slo_is_explained_but_not_priced(self) -> None:
        def missed(summary: Any) -> None:
            for one in summary["runs"]:
                one["attainment"] = 0.5
        found = self.asked(missed, "--rate 20")
        self.assertEqual((found["operating_point"], found["cost_per_1m_output"],
                          found["replicas"]), (None, None, None))
        self.assertEqual(found["binding"], "weights")
        self.assertGreater(found["implied_mbu"], 0.3)

    def test_cost_and_replicas_come_from_the_operating_point(self) -> None:
        found = self.asked(line="--rate 20")
        point = found["operating_point"]
        self.assertAlmostEqual(found["cost_per_1m_output"],
                               2 * 2.5 / (point["output_tok_s"] * 3600) * 1e6)
        self.assertEqual(found["replicas"], math.ceil(20 / point["goodput_rps"] / 0.7))
        dearer = self.asked(line="--gpu-price 5")
        self.assertAlmostEqual(dearer["cost_per_1m_output"], 2 * found["cost_per_1m_output"])

    def test_replicas_come_from_the_knee_where_a_search_found_one(self) -> None:
        def searched(high_rps: Optional[float]) -> Callable[[Any], None]:
            return lambda summary: summary.update(goodput_search={
                "rate_rps": 2.5, "low_rps": 2.3, "high_rps": high_rps})
        found = self.asked(searched(2.8), "--rate 20")
        self.assertEqual(found["replicas"], math.ceil(20 / 2.5 / 0.7))
        self.assertEqual(found["operating_point"]["rate_rps"], 1)  # 3 req/s is past it
        for high_rps, said in ((2.8, "95%: 2.3 to 2.8"), (None, "a lower bound")):
            code, out, _ = self.told(searched(high_rps), "--rate 20", json_=False)
            self.assertEqual(code, 0)
            self.assertIn(f"the knee is at 2.5 req/s, {'or higher: ' * (high_rps is None)}{said}",
                          " ".join(out.split()))
            self.assertNotIn("until loadgen.py", out)

    def test_the_knee_is_above_the_operating_point(self) -> None:
        def lower_one_failed(summary: Any) -> None:
            summary["runs"][0]["attainment"] = 0.5
        self.assertIn("the knee is between this rate and 20;", " ".join(
            self.told(lower_one_failed, json_=False)[1].split()))

    def test_a_model_on_the_command_line_goes_before_the_saved_one(self) -> None:
        code, out, err = run("llama-3.1-8b", "--measured", RUN, "--json")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual(json.loads(out)["model"]["name"], "llama-3.1-8b")
        self.assertIsNotNone(json.loads(out)["measured"]["cost_per_1m_output"])  # the saved price

    def test_the_prefix_that_was_cached_is_no_prefill(self) -> None:
        def cached(summary: Any) -> None:
            summary["runs"][1]["cached_tokens_mean"] = 590
        self.assertLess(self.asked(cached)["implied_mfu"], self.asked()["implied_mfu"] / 5)

    def test_absent_keys_and_infinities_are_survived(self) -> None:
        def sparse(summary: Any) -> None:
            summary["runs"][0] = {"verdict": "VALID"}
            summary["runs"][1]["ttft_s"]["p99"] = "inf"
            summary["runs"][2]["tpot_s"] = None
            del summary["slo"], summary["plan"]
        found = self.asked(sparse)
        self.assertEqual(found["runs"][1]["ttft_p99_s"], "inf")
        self.assertIsNone(found["runs"][0]["tpot_p50_s"])
        self.assertEqual(found["operating_point"]["rate_rps"], 3)

    def test_the_screen_says_what_binds_and_which_run_is_not_used(self) -> None:
        code, out, _ = run("--measured", RUN, "--rate", "20")
        self.assertEqual(code, 0)
        self.assertIn("rate 20 is UNSTABLE", out)
        self.assertIn("RUN BINDS    reading the weights", out)
        self.assertIn("the knee is between this rate and 20", out)

    def test_odd_folders_are_one_line(self) -> None:
        def text_for_number(summary: Any) -> None:
            summary["runs"][0]["output_tok_s"] = "fast"

        def no_runs(summary: Any) -> None:
            summary["runs"] = []

        def run_is_text(summary: Any) -> None:
            summary["runs"] = ["x"]

        def below_zero(summary: Any) -> None:
            summary["runs"][0]["tpot_s"]["p50"] = -1
        for change in (text_for_number, no_runs, run_is_text, below_zero):
            code, out, err = self.told(change)
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), err)
        code, _, err = self.told(lambda s: None, deploy=False)
        self.assertEqual((code, err.count("\n")), (2, 1))
        self.assertIn("no model is named", err)
        code, _, err = run("--measured", HERE)
        self.assertEqual((code, err.count("\n")), (2, 1))
        self.assertIn("no summary.json", err)

    def test_a_run_is_called_by_its_folder_however_that_is_written(self) -> None:
        for folder in (RUN, RUN + "/", RUN + "/."):
            self.assertIn("of run; ms;", " ".join(run("--measured", folder)[1].split()))

    def test_a_run_of_another_model_is_said_to_be_one(self) -> None:
        def served(name: Any) -> Callable[[Any], None]:
            return lambda summary: summary.update(target={"model": name})

        note = "note: the run says model %s; judged as llama-3.1-8b"
        for name, deploy, says in (
                ("mock-model", True, "llama-3.1-70b"), ("Qwen/Qwen3-8B", False, "Qwen/Qwen3-8B"),
                ("meta-llama/Llama-3.1-8B-Instruct", False, ""), ("llama-3.1-8b", False, ""),
                ("RedHatAI/Llama-3.1-8B-Instruct-FP8", False, ""),
                ("/models/llama-3.1-8b/", False, ""), (None, False, ""), (7, False, "")):
            out = self.told(served(name), "llama-3.1-8b", deploy, json_=False)[1]
            self.assertEqual(note % says in out, bool(says), name)
            self.assertEqual("the run says" in out, bool(says), name)
        self.assertNotIn("the run says", self.told(served("any"), json_=False)[1])

    def test_a_saved_file_cannot_make_it_write(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(os.path.join(RUN, "summary.json"), folder)
            with open(os.path.join(folder, "deploy.json"), "w", encoding="utf-8") as file:
                json.dump({"flags": {"model": "llama-3.1-8b", "save": f"{folder}/x"}}, file)
            code, _, err = run("--measured", folder)
            self.assertEqual((code, "x" in os.listdir(folder)), (2, False))
            self.assertIn("'save' is not known", err)

    def test_what_save_writes_measured_reads_back(self) -> None:
        for line in (*MODELS, "llama-3.1-70b --rate 20 --workload chat --gpu-price h100=2,h200=3",
                     "--params 8e9 --layers 32 --kv-heads 8 --head-dim 128"):
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(os.path.join(RUN, "summary.json"), folder)
                code, out, err = run(*line.split(), "--json", "--save",
                                     os.path.join(folder, "deploy.json"))
                self.assertEqual((code, err), (0, ""), line)
                again = run("--measured", folder, "--json")
                self.assertEqual((again[0], again[2]), (0, ""), line)
                first, second = json.loads(out), json.loads(again[1])
                for part in ("model", "deployment", "memory"):
                    for key in ("history_tokens", "short_bytes_per_gpu", "would_fit",
                                "weight_source"):  # of the run's lengths; words
                        first[part].pop(key, None), second[part].pop(key, None)
                    self.assertEqual(first[part], second[part], line)

    def test_every_formula_gives_its_value(self) -> None:
        seen = 0
        for line in (f"--measured {RUN} --rate 20 --slo-ttft-ms 900 --autoscale "
                     "--gpu-price 2 --serverless-price 1", f"{PLAN} --autoscale"):
            for step in answer_to(line).steps:
                if step.formula and step.key.startswith(("measured.", "autoscale.")):
                    found = eval(step.formula, {"max": max, "min": min}, dict(step.numbers))
                    self.assertAlmostEqual(found, step.value, msg=step.key)
                    seen += 1
        self.assertGreater(seen, 18)


PLAN = (f"{DENSE} --rate 20 --mean-rate 8 --shared-prefix-len 1500 --slo-ttft-ms 800 "
        "--slo-tpot-ms 50")


class Autoscale(unittest.TestCase):
    def test_the_lead_time_is_longer_than_the_cold_start(self) -> None:
        for more in ("", " --storage 100MB/s", " --storage 7GB/s --pull-s 0 --init-s 34"):
            found = ask(PLAN + more + " --autoscale")["autoscale"]
            self.assertGreater(found["lead_s"], found["cold_start_s"] + 59, more)
            self.assertIn(f", {found['lead_s']:.0f})", found["keda"], more)

    def test_what_was_not_given_is_said_to_be_assumed(self) -> None:
        found = ask(PLAN + " --autoscale")["autoscale"]
        self.assertEqual(len(found["assumed"]), 3)
        self.assertAlmostEqual(found["cold_start_s"], 60 + 70.6 + 200)
        given = ask(PLAN + " --storage 7GB/s --pull-s 0 --init-s 34 --autoscale")["autoscale"]
        self.assertEqual(given["assumed"], [])
        self.assertAlmostEqual(given["cold_start_s"], 70.6 / 7 + 34)

    def test_replicas_run_from_the_mean_rate_to_the_plan_with_its_spare(self) -> None:
        answer = ask(PLAN + " --autoscale")
        found, plan = answer["autoscale"], answer["plan"]
        self.assertEqual(found["max_replicas"], plan["replicas"] + plan["spares"])
        self.assertEqual(found["min_replicas"],
                         math.ceil(8 / plan["rate_per_replica_rps"] / 0.7))

    def test_a_stricter_ttft_leaves_less_room_for_a_queue(self) -> None:
        queues = [ask(f"{DENSE} --rate 20 --slo-ttft-ms {ms} --slo-tpot-ms 80 --autoscale")
                  ["autoscale"]["queue_per_replica"] for ms in (1000, 4000)]
        self.assertLess(queues[0], queues[1])

    def test_every_engine_is_asked_by_its_own_names(self) -> None:
        for engine, prefix in (("vllm", "vllm:"), ("sglang", "sglang:"), ("trtllm", "trtllm_")):
            found = ask(f"{PLAN} --engine {engine} --autoscale")["autoscale"]
            for signal in found["signals"]:
                self.assertIn(prefix, signal["query"], engine)
                self.assertNotIn("gpu_util", signal["query"].lower())
            self.assertIn(f"absent({prefix}", found["alerts"])

    def test_the_series_asked_for_are_of_the_model_that_is_launched(self) -> None:
        config = os.path.join(HERE, "data", "configs", "Qwen--Qwen3-8B")
        pasted = "vllm serve Qwen/Qwen3-8B -tp 1"
        for argv in ([config], [config + "/config.json"], ["llama-3.1-8b"], ["--from", pasted],
                     ["meta-llama/Llama-3.1-8B-Instruct"]):
            code, out, err = run(*argv, "--rate", "5", "--workload", "chat", "--tp", "1",
                                 "--autoscale", "--engine", "vllm", "--json")
            self.assertEqual((code, err), (0, ""), argv)
            found = json.loads(out)
            launched = found["engine"]["command"].split()[2]
            for signal in found["autoscale"]["signals"]:
                self.assertIn(f'{{model_name="{launched}"}}', signal["query"])

    def test_scaling_to_zero_pays_only_where_a_cold_start_is_tolerated(self) -> None:
        strict = ask(PLAN + " --gpu-price 2.5 --serverless-price 0.9 --autoscale")["autoscale"]
        self.assertFalse(strict["scale_to_zero"]["pays"])
        self.assertEqual(strict["scale_to_zero"]["idle_per_hour"], 5)
        self.assertAlmostEqual(strict["scale_to_zero"]["serverless_below_tok_s"],
                               5 / 0.9e-6 / 3600)
        batch = ask("llama-3.1-8b --workload batch --rate 5 --autoscale")["autoscale"]
        self.assertTrue(batch["scale_to_zero"]["pays"])

    def test_without_a_load_there_is_nothing_to_scale(self) -> None:
        self.assertIsNone(ask("llama-3.1-8b --autoscale")["autoscale"])
        self.assertIsNone(ask("llama-3.1-70b -tp 2 --weights bf16 --rate 50 --input-len 8000 "
                              "--output-len 100 --slo-ttft-ms 1 --autoscale")["autoscale"])

    def test_yaml_scalars_are_json(self) -> None:
        tree = {"a": [{"b": 'x "y" #', "c": {"d": 1}}, {"b": "no"}]}
        self.assertEqual(capacity.yaml_lines(tree), [
            "a:", '  - b: "x \\"y\\" #"', "    c:", "      d: 1", '  - b: "no"'])

    def test_a_yaml_parser_reads_both_texts(self) -> None:
        yaml = optional("yaml")
        found = ask(PLAN + " --autoscale")["autoscale"]
        keda, rules = yaml.safe_load(found["keda"]), yaml.safe_load(found["alerts"])
        self.assertEqual(keda["kind"], "ScaledObject")
        self.assertEqual([t["metadata"]["query"] for t in keda["spec"]["triggers"]],
                         [s["query"] for s in found["signals"]])
        self.assertEqual(len(rules["groups"][0]["rules"]), 7)

    def test_promtool_takes_the_rules_and_the_queries(self) -> None:
        if not shutil.which("promtool"):
            self.skipTest("promtool is not on the PATH")
        for engine in capacity.ENGINES:
            found = ask(f"{PLAN} --engine {engine} --autoscale")["autoscale"]
            queries = {"groups": [{"name": "q", "rules": [
                {"record": f"q{i}", "expr": s["query"]} for i, s in enumerate(found["signals"])]}]}
            for rules in (found["alerts"], json.dumps(queries)):
                with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
                    file.write(rules)
                    file.flush()
                    done = subprocess.run(["promtool", "check", "rules", file.name], text=True,
                                          capture_output=True, check=False)
                self.assertEqual(done.returncode, 0, done.stderr)


class Defend(unittest.TestCase):
    def asked(self, line: str) -> Any:
        """The researcher's and the customer's answers, by the order of the questions."""
        found = ask(line + " --defend")["defend"]
        for one in found:
            self.assertEqual(set(one), {"question", "researcher", "customer"})
        return found

    def test_six_questions_are_answered_twice_for_every_kind_of_deployment(self) -> None:
        for line in (*MODELS, PLAN, "llama-3.1-8b", "deepseek-v3 --gpu h200 -tp 8 --rate 2 "
                     "--workload agent", "llama-3.1-70b --rate 20 --workload chat",
                     "llama-3.1-70b -tp 2 --weights fp8 --rate 20 --workload rag",
                     "--params 8e9 --layers 32 --kv-heads 8 --head-dim 128"):
            found = self.asked(line)
            self.assertEqual(len(found), 6, line)
            for one in found:
                self.assertTrue(one["question"].endswith("?"), line)
                self.assertGreater(min(len(one["researcher"]), len(one["customer"])), 20, line)
                for jargon in ("FLOP", "MBU", "ridge", "prefill"):
                    self.assertNotIn(jargon, one["customer"], line)

    def test_tpot_is_explained_by_the_bytes_of_a_step(self) -> None:
        tpot = self.asked("llama-3.1-70b -tp 2 --weights fp8 --kv fp8")[0]
        for part in ("bound by memory", "batch 59", "32.88 GiB of weights", "18.44 GiB of KV",
                     "3.35 TB/s", "16.45 ms at 100%", "MBU"):
            self.assertIn(part, tpot["researcher"])

    def test_the_plan_and_its_defence_give_one_tpot(self) -> None:
        tpot_s = ask(PLAN)["plan"]["tpot_s"]
        told = self.asked(PLAN)[0]
        self.assertEqual(told["question"], f"Why is TPOT {capacity.scaled(tpot_s, 's')}?")

    def test_16_bit_is_priced_at_its_own_cheapest_layout(self) -> None:
        gpus = [ask(line)["plan"]["gpus"] for line in (
            PLAN, PLAN.replace("-tp 2 --weights fp8 --kv fp8", "-tp 4 --weights bf16 --kv bf16"))]
        told = ask(PLAN + " --defend")["defend"][2]
        self.assertIn(f"(TP=4), costs {gpus[1] / gpus[0]:.2f}x as much", told["researcher"])
        told = ask("llama-3.1-70b -tp 2 --weights fp8 --kv fp8 --concurrency 59 --defend")
        ratio = re.search(r"TP=4\), costs ([\d.]+)x", told["defend"][2]["researcher"])
        assert ratio, told["defend"][2]
        self.assertAlmostEqual(float(ratio[1]), 2, delta=0.1)  # half the hardware, half the price

    def test_speculation_pays_at_batch_60_where_the_formulas_say_so(self) -> None:
        found = self.asked("llama-3.1-70b -tp 2 --weights fp8 --kv fp8")[3]
        self.assertEqual(found["question"], "Why speculative decoding?")
        self.assertIn("76 FLOP/B, the ridge is 591", found["researcher"])
        lost = self.asked("llama-3.1-8b --gpu l40s --ctx 512 --spec-accept 0.3")[3]
        self.assertEqual(lost["question"], "Why not speculative decoding?")

    def test_prefill_is_no_faster_with_a_drafter(self) -> None:
        """The promise to the customer is less than the speed-up of the step alone."""
        found = self.asked(f"{DENSE} --rate 20 --slo-ttft-ms 3000 --slo-tpot-ms 100")[3]
        step, tpot = re.findall(r"([0-9.]+)x (?:with|on)", found["researcher"])
        self.assertLess(float(tpot), float(step))
        self.assertIn(f"up to {float(tpot):.1f} times", found["customer"])

    def test_a_single_change_costs_what_the_plan_of_that_change_says(self) -> None:
        line = ("llama-3.1-70b -tp 4 --rate 20 --input-len 1000 --output-len 500 --slo-tpot-ms 30 "
                "--gpu-price h100=2.5,h200=3.2")
        costs = [ask(f"{line} {more}")["plan"]["cost_per_1m_output"] for more in (
            "", "--weights fp8", "--weights int4", "--kv fp8", "--gpu h200")]
        args = capacity.parse_args((line + " --defend").split())
        tables = capacity.presets()
        d = capacity.deployment_of(args, tables)
        case = capacity.case_of(d, args)._replace(tables=tables)
        load = capacity.load_of(args)
        self.assertIsNotNone(load)
        case = case._replace(cal=capacity.calibration_of(d, "vllm", tables))
        case = case._replace(plan=capacity.plan_of(d, load, case.cal, "vllm"))
        changes = {c.label: c for c in capacity.single_changes(case, tables)}
        bills = [capacity.bill(case)] + [capacity.bill(case, changes[name]) for name in (
            "--weights fp8", "--weights int4", "--kv fp8", "--gpu h200")]
        for found, wanted in zip(bills, costs):
            self.assertAlmostEqual(found, wanted, places=6)

    def test_what_halves_the_cost_says_so_and_what_it_asks(self) -> None:
        found = self.asked("llama-3.1-70b -tp 4 --gpu-price 2.5")[5]
        self.assertIn("--kv fp8", found["researcher"])
        self.assertIn("eval set", found["customer"])
        shares = [float(x) for x in re.findall(r"([0-9.]+)x", found["researcher"])]
        if "no single change" in found["researcher"]:
            self.assertGreater(min(shares[:2]), 0.5)
        else:
            self.assertLessEqual(max(shares), 0.5)

    def test_slots_that_were_given_are_among_what_could_change(self) -> None:
        line = ("llama-3.1-70b -tp 2 --weights fp8 --kv fp8 --rate 20 --input-len "
                "lognormal:mean=2000,cv=0.5 --shared-prefix-len 1500 --output-len 300 "
                "--slo-ttft-ms 800 --slo-tpot-ms 50 --gpu-price 2.50")
        given = " ".join(run(*line.split(), "--max-num-seqs", "32", "--defend")[1].split())
        free = json.loads(run(*line.split(), "--json")[1])["plan"]
        self.assertEqual(free["replicas"], 5)
        self.assertIn("7 replicas of", given)
        self.assertIn("slots by the plan instead of 32 0.71x", given)
        self.assertNotIn("slots by the plan", run(*line.split(), "--defend")[1])

    def test_an_impossible_slo_is_not_defended(self) -> None:
        found = self.asked(f"{DENSE} --rate 20 --slo-ttft-ms 1")
        self.assertIn("not even one request", found[1]["researcher"])
        self.assertEqual(found[4]["question"], "Why no number of replicas?")
        self.assertIn("nothing to halve", found[5]["customer"])

    def test_what_does_not_start_is_not_defended(self) -> None:
        self.assertEqual(self.asked("llama-3.1-70b"), [])


def optional(module: str) -> Any:
    """A module that the tests can do without: they are skipped where it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise unittest.SkipTest(f"no {module} here") from None


if __name__ == "__main__":
    unittest.main()
