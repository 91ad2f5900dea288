"""What leaves as a file, and what comes back: --save, --measured, --autoscale, --defend."""

import json
import os
import sys
import tempfile
import unittest
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import capacity
import loadgen
from tests.test_capacity import run

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
            self.assertEqual(set(saved(line)["step_time"]), set(loadgen.Profile._fields), line)
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


if __name__ == "__main__":
    unittest.main()
