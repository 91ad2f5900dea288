"""Launch commands, the flag tables they come from, and reading a pasted command."""

import json
import os
import random
import shlex
import unittest
from typing import Any, Dict

from tests.bench_flags import arguments, launched, random_line
from tests.test_capacity import ask, capacity, run

with open(os.path.join(os.path.dirname(__file__), "data", "engine_flags.json"),
          encoding="utf-8") as file:
    PARSERS = {engine: set(parser["flags"]) for engine, parser in json.load(file).items()
               if engine != "about"}


def answer(*argv: str) -> Any:
    """The JSON answer to words that hold spaces."""
    code, out, err = run(*argv, "--json")
    assert code == 0, err
    return json.loads(out)


def flags(line: str) -> Dict[str, str]:
    """The flags of the launch command that answers a line, with their values."""
    return {flag["flag"]: flag["value"] for flag in ask(line)["engine"]["flags"]}


def changed(*argv: str) -> Dict[str, Any]:
    """What an inherited deployment would change: flag -> suggestion."""
    return {c["flag"]: c["suggested"] for c in answer(*argv)["inherited"]["changes"]}


class Tables(unittest.TestCase):
    def test_every_flag_we_write_is_one_of_the_engine_s_parser(self) -> None:
        for row in capacity.SETTINGS:
            for engine, known in PARSERS.items():
                first = capacity.spelling(engine, row.key)
                self.assertTrue(not first or first in known, f"{engine} {first}")

    def test_flags_called_gone_are_gone_and_neutral_ones_mean_nothing_else(self) -> None:
        for flag in capacity.GONE:
            self.assertNotIn(flag, PARSERS["vllm"] | PARSERS["sglang"])
        for engine in capacity.ENGINES:
            self.assertFalse(capacity.NEUTRAL & set(capacity.setting_names(engine)))

    def test_the_spec_s_vllm_table(self) -> None:
        rows = ask("--flags")["flags"]["vllm"]
        for flag, term, note in (
                ("--tensor-parallel-size / -tp", "N in W/N, KV/N", "Within NVLink domain"),
                ("--pipeline-parallel-size / -pp", "Layers per GPU", "Across nodes"),
                ("--data-parallel-size / -dp", "Replicas", "Also used for DP attention with EP"),
                ("--enable-expert-parallel / -ep", "MoE layout", "EP instead of TP for MoE layers"),
                ("--max-model-len", "Max context", "Must fit one sequence in the KV pool"),
                ("--gpu-memory-utilization", "util", "Fraction of GPU memory for the engine"),
                ("--max-num-seqs", "Max batch B", "Upper bound on concurrency per step"),
                ("--max-num-batched-tokens", "Tokens per step", "The chunked-prefill budget"),
                ("--enable-chunked-prefill", "Prefill mixing", "On by default in the V1 engine"),
                ("--enable-prefix-caching", "Prefix reuse", "--no-enable-prefix-caching for clean"),
                ("--kv-cache-dtype", "b_kv", "auto, fp8 (and fp8_e4m3 / fp8_e5m2 variants)"),
                ("--quantization / -q", "b for weights", "checkpoints auto-detected"),
                ("--speculative-config / -sc", "Tokens per step", '{"method": "eagle3"'),
                ("--enable-lora", "Adapter slots", "rank options up to 512"),
                ("--max-loras, --max-lora-rank", "Adapter slots", "(default 1)"),
                ("--kv-transfer-config", "P/D disaggregation", "JSON naming a KV connector"),
                ("--async-scheduling", "CPU overhead", "Overlaps scheduling with GPU execution")):
            self.assertTrue(any(flag in row["flag"] and row["term"] == term and note in row["notes"]
                                for row in rows), flag)

    def test_the_spec_s_sglang_table(self) -> None:
        rows = ask("--flags")["flags"]["sglang"]
        for flag, analogue, note in (
                ("--tp-size / --tp", "--tensor-parallel-size", ""),
                ("--dp-size", "--data-parallel-size", "Router across replicas built in"),
                ("--ep-size", "--enable-expert-parallel", "Standard DeepSeek recipe"),
                ("--enable-dp-attention", "--enable-expert-parallel", "Standard DeepSeek recipe"),
                ("--context-length", "--max-model-len", ""),
                ("--mem-fraction-static", "--gpu-memory-utilization", "OOM during CUDA graph"),
                ("--max-running-requests", "--max-num-seqs", ""),
                ("--chunked-prefill-size", "--max-num-batched-tokens", "-1 disables chunking"),
                ("--schedule-policy", "(none)", "fcfs default; lpm for prefix-heavy traffic"),
                ("--schedule-conservativeness", "(none)", "fewer preemptions"),
                ("--disable-radix-cache", "--no-enable-prefix-caching", "RadixAttention is on"),
                ("--kv-cache-dtype", "--kv-cache-dtype", "plus FP4 variants on Blackwell"),
                ("--speculative-algorithm", "--speculative-config", "NEXTN (MTP), STANDALONE"),
                ("--speculative-num-draft-tokens", "--speculative-config", "EAGLE3"),
                ("--lora-paths, --max-loras-per-batch", "--enable-lora", "default 8"),
                ("--disaggregation-mode", "--kv-transfer-config", "Separate prefill and decode")):
            self.assertTrue(any(flag in row["flag"] and analogue in row["vllm"]
                                and note in row["notes"] for row in rows), flag)

    def test_the_tables_on_the_screen_hold_every_row_within_its_width(self) -> None:
        out = run("--flags")[1]
        for row in ask("--flags")["flags"]["vllm"]:
            self.assertIn(row["flag"].split(" ")[0].rstrip(","), out)
        self.assertLessEqual(max(map(len, out.splitlines())), 116)


class Commands(unittest.TestCase):
    def test_random_deployments_give_flags_that_exist_and_values_where_they_belong(self) -> None:
        models = [row["name"] for row in capacity.presets()["models"]]
        for engine, known in PARSERS.items():
            rng, seen = random.Random(7), 0
            while seen < 40:
                command = launched(random_line(rng, models, engine))
                if command is None:
                    continue
                seen += 1
                words = arguments(command)
                for i, word in enumerate(words):
                    if word.startswith("--"):
                        self.assertIn(word, known)
                        takes = i + 1 < len(words) and not words[i + 1].startswith("--")
                        key = capacity.setting_names(engine).get(word, "model")
                        self.assertEqual(takes, not capacity.is_switch(engine, key), word)

    def test_each_reason_begins_with_the_term_that_the_flag_changes(self) -> None:
        found = ask("deepseek-v3 --gpu h200 --tp 8 --ep all --kv fp8 --spec-accept 0.8 "
                    "--engine vllm")
        terms = {row.vllm.split(" ")[0]: row.term for row in capacity.SETTINGS if row.term}
        for flag in found["engine"]["flags"]:
            self.assertTrue(flag["reason"].startswith(terms[flag["flag"]] + ": "), flag)
            self.assertGreater(len(flag["reason"]), len(terms[flag["flag"]]) + 5)

    def test_the_runbook_s_chatbot_at_two_replicas(self) -> None:
        line = ("llama-3.1-70b -tp 2 --dp 2 --weights fp8 --kv fp8 --rate 20 --input-len "
                "lognormal:mean=2000,cv=0.5 --shared-prefix-len 1500 --output-len 300 "
                "--slo-ttft-ms 800 --slo-tpot-ms 50 --engine ")
        self.assertEqual(flags(line + "vllm"), {
            "--tensor-parallel-size": "2", "--quantization": "fp8",
            "--kv-cache-dtype": "fp8", "--max-model-len": "8192", "--max-num-seqs": "160",
            "--max-num-batched-tokens": "4096", "--enable-prefix-caching": "",
            "--gpu-memory-utilization": "0.9"})
        self.assertEqual(flags(line + "sglang")["--schedule-policy"], "lpm")

    def test_a_replica_of_one_gpu_still_writes_every_limit_out(self) -> None:
        for engine in capacity.ENGINES:
            found = flags(f"llama-3.1-8b --engine {engine}")
            for key in ("util", "ctx", "max_num_seqs", "max_num_batched_tokens"):
                self.assertIn(capacity.spelling(engine, key), found)
        self.assertIn("--enable-metrics", flags("llama-3.1-8b --engine sglang"))

    def test_sglang_counts_dp_attention_ranks_in_its_tp_and_limits(self) -> None:
        line = "deepseek-v3 --gpu h200 --dp 8 --ep all --engine "
        vllm, sglang = flags(line + "vllm"), flags(line + "sglang")
        self.assertNotIn("--tensor-parallel-size", vllm)
        self.assertEqual((sglang["--tp-size"], sglang["--dp-size"], sglang["--ep-size"]),
                         ("8", "8", "8"))
        self.assertIn("--enable-dp-attention", sglang)
        self.assertEqual(int(sglang["--chunked-prefill-size"]),
                         8 * int(vllm["--max-num-batched-tokens"]))
        self.assertEqual(int(sglang["--max-running-requests"]), 8 * int(vllm["--max-num-seqs"]))

    def test_limits_that_are_given_are_written_as_given(self) -> None:
        for engine, seqs, tokens in (("vllm", "--max-num-seqs", "--max-num-batched-tokens"),
                                     ("sglang", "--max-running-requests",
                                      "--chunked-prefill-size")):
            found = flags(f"deepseek-v3 --gpu h200 --dp 8 --ep all --max-num-seqs 64 "
                          f"--max-num-batched-tokens 2048 --engine {engine}")
            self.assertEqual((found[seqs], found[tokens]), ("64", "2048"))

    def test_a_reason_is_of_the_value_that_is_written(self) -> None:
        line = "llama-3.1-8b --rate 2 --tp 1 --input-len 500 --output-len 100 --engine vllm"
        for extra, says in (("", "Little's L"), (" --max-num-seqs 64", "the rest queue")):
            reasons = {f["flag"]: f["reason"] for f in ask(line + extra)["engine"]["flags"]}
            self.assertIn(says, reasons["--max-num-seqs"])

    def test_vllm_takes_no_fewer_tokens_a_step_than_sequences(self) -> None:
        found = flags("llama-3.1-8b --gpu l40s --max-num-seqs 4000 --engine vllm")
        self.assertGreaterEqual(int(found["--max-num-batched-tokens"]), 4000)

    def test_quantization_is_written_only_where_the_engine_makes_it(self) -> None:
        self.assertEqual(flags("qwen3-8b --weights fp8 --engine vllm")["--quantization"], "fp8")
        for line in ("deepseek-v3 --tp 8 --gpu h200", "gpt-oss-120b", "qwen3-8b --weights awq"):
            self.assertNotIn("--quantization", flags(f"{line} --engine vllm"))
        notes = ask("qwen3-8b --weights awq --engine vllm")["engine"]["launch_notes"]
        self.assertTrue(any("awq" in note and "Qwen/Qwen3-8B" in note for note in notes))
        notes = ask("qwen3-8b --weights fp8 --engine trtllm")["engine"]["launch_notes"]
        self.assertTrue(any("FP8 checkpoint" in note for note in notes))

    def test_kv_width_by_each_engine_s_name(self) -> None:
        for engine, flag, name in (("vllm", "--kv-cache-dtype", "fp8"),
                                   ("sglang", "--kv-cache-dtype", "fp8_e4m3"),
                                   ("trtllm", "kv_cache_config.dtype", "fp8")):
            self.assertEqual(flags(f"qwen3-8b --kv fp8 --engine {engine}")[flag], name)
            self.assertNotIn(flag, flags(f"qwen3-8b --engine {engine}"))

    def test_speculation_in_each_engine_s_words(self) -> None:
        line = "--spec-accept 0.7 --spec-tokens 3 --spec-model org/head --engine "
        config = json.loads(flags(f"qwen3-8b {line}vllm")["--speculative-config"])
        self.assertEqual(config, {"method": "eagle3", "num_speculative_tokens": 3,
                                  "model": "org/head"})
        found = flags(f"qwen3-8b {line}sglang")
        self.assertEqual({k: v for k, v in found.items() if k.startswith("--spec")}, {
            "--speculative-algorithm": "EAGLE3", "--speculative-draft-model-path": "org/head",
            "--speculative-num-steps": "3", "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": "4"})
        config = json.loads(flags(f"qwen3-8b {line}trtllm")["speculative_config"])
        self.assertEqual(config["decoding_type"], "Eagle3")
        found = flags("deepseek-v3 --gpu h200 --tp 8 --spec-accept 0.8 --engine vllm")
        self.assertEqual(json.loads(found["--speculative-config"])["method"], "mtp")
        notes = ask("qwen3-8b --spec-accept 0.7 --engine vllm")["engine"]["launch_notes"]
        self.assertTrue(any("--spec-model" in note for note in notes))
        notes = ask("qwen3-8b --spec-method suffix --engine sglang")["engine"]["launch_notes"]
        self.assertTrue(any("no flag for speculation by suffix" in note for note in notes))

    def test_lora_ranks_round_up_to_what_vllm_takes(self) -> None:
        found = flags("llama-3.1-8b --lora-rank 24 --lora-count 3 --engine vllm")
        self.assertEqual((found["--max-lora-rank"], found["--max-loras"]), ("32", "3"))
        self.assertEqual(flags("llama-3.1-8b --lora-rank 24 --engine sglang")["--max-lora-rank"],
                         "24")

    def test_what_the_question_involves_is_in_the_command(self) -> None:
        line = "llama-3.1-70b -tp 4 --engine "
        plain, rich = flags(line + "vllm"), flags(
            line + "vllm --kv-link ndr --storage 7GB/s --lora-rank 16")
        for flag in ("--kv-transfer-config", "--load-format", "--enable-lora"):
            self.assertNotIn(flag, plain)
            self.assertIn(flag, rich)
        self.assertEqual(rich["--load-format"], "runai_streamer")
        self.assertEqual(flags(line + "sglang --kv-link ndr")["--disaggregation-mode"], "decode")
        self.assertIn("--async-scheduling", flags("llama-3.1-8b --ctx 2048 --concurrency 4 "
                                                  "--engine vllm"))
        self.assertNotIn("--async-scheduling", flags("llama-3.1-70b -tp 2 --weights fp8 --kv fp8 "
                                                     "--engine vllm"))

    def test_trtllm_options_are_yaml_and_keep_the_pool_s_size(self) -> None:
        found = ask("llama-3.1-70b --tp 4 --weights fp8 --kv fp8 --engine trtllm")
        command = found["engine"]["command"]
        head, _, rest = command.partition("\nEND\n")
        options = dict(line.split(": ", 1) for line in head.splitlines()[1:])
        cache = json.loads(options["kv_cache_config"])
        self.assertEqual(cache["dtype"], "fp8")
        memory, d = found["memory"], found["deployment"]
        free = d["gpu_memory_bytes"] - memory["weights_bytes_per_gpu"] \
            - memory["reserve_bytes_per_gpu"]
        self.assertAlmostEqual(cache["free_gpu_memory_fraction"] * free
                               / memory["kv_pool_bytes_per_gpu"], 1, places=3)
        self.assertNotIn("free_gpu_memory", rest)  # YAML's kv_cache_config takes the flag's place
        self.assertTrue(rest.startswith("trtllm-serve meta-llama/Llama-3.1-70B"))

    def test_the_command_can_be_pasted(self) -> None:
        out = run("qwen3-8b", "--engine", "vllm", "--spec-accept", "0.7", "--spec-model",
                  "my drafts/it's")[1]
        command = out[out.index("\nvllm serve") + 1:]
        words = shlex.split(command.replace("\\\n", " "))
        self.assertEqual(json.loads(words[words.index("--speculative-config") + 1])["model"],
                         "my drafts/it's")
        self.assertEqual(words[:3], ["vllm", "serve", "Qwen/Qwen3-8B"])

    def test_limits_that_the_predicted_log_does_not_have_are_said(self) -> None:
        line = ("llama-3.1-70b", "-tp", "2", "--weights", "fp8", "--engine", "vllm")
        self.assertIn("ENGINE reckons", run(*line)[1])
        seqs = ask(" ".join(line))["engine"]["command"].split("--max-num-seqs ")[1].split()[0]
        self.assertNotIn("ENGINE reckons", run(*line, "--max-num-seqs", seqs)[1])

    def test_a_deployment_that_does_not_fit_says_so_at_its_command(self) -> None:
        self.assertIn("refuse to start", run("llama-3.1-70b", "--engine", "vllm")[1])


    def test_what_the_engine_refuses_is_said_under_a_budget_that_fits(self) -> None:
        out = " ".join(run("llama-3.1-70b", "--tp", "2", "--engine", "vllm")[1].split())
        self.assertIn("FITS", out)
        self.assertIn("note the budget fits with its 2 GiB reserve; vllm with its own defaults "
                      "would refuse to start, see REFUSES", out)
        self.assertIn("with the limits of this command the engine is not expected to refuse "
                      "vllm serve", out)

    def test_a_command_that_is_refused_has_that_note_right_above_it(self) -> None:
        out = " ".join(run("llama-3.1-70b", "--tp", "2", "--engine", "vllm", "--max-num-seqs",
                           "1024")[1].split())
        self.assertRegex(out, r"note the engine would refuse to start: no memory is left [^;]*; "
                         r"--gpu-memory-utilization [0-9.]+ vllm serve")

    def test_which_kv_tokens_count_is_said_where_the_engine_has_others(self) -> None:
        note = "everything else here counts with the budget's"
        ranks = " ".join(run("deepseek-v3", "--gpu", "h200", "--dp", "8", "--ep", "all",
                             "--engine", "sglang")[1].split())
        self.assertIn("would hold 3,552,408 KV tokens", ranks)  # 8 ranks of 444,051
        for line, said in (("qwen3-8b --rate 5 --workload chat --tp 1 --engine vllm", False),
                           ("llama-3.1-70b --tp 2 --engine vllm --max-num-seqs 8", True),
                           ("llama-3.1-70b --tp 2", False)):
            self.assertEqual(note in " ".join(run(*line.split())[1].split()), said, line)


class Reading(unittest.TestCase):
    WORDS = "--tp 2 --ctx 8192"

    def read(self, command: str) -> Any:
        return answer("--from", command)["inherited"]

    def test_the_many_ways_that_a_command_is_written(self) -> None:
        for command in (
                "vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192",
                "vllm serve Qwen/Qwen3-8B --tensor_parallel_size=2 --max_model_len=8192",
                "$ CUDA_VISIBLE_DEVICES=0,1 vllm serve Qwen/Qwen3-8B \\\n -tp 2 \\\n"
                "  --max-model-len 8192 > log 2>&1 &",
                "cd /srv && nohup vllm serve --trust-remote-code Qwen/Qwen3-8B -tp 2 "
                "--max-model-len 8192 2>err | tee log",
                "python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B -tp=2 "
                "--max-model-len 8192 --host 0.0.0.0 --port 8000",
                "docker run --gpus all -v ~/.cache/huggingface:/root/.cache/huggingface "
                "-e HF_TOKEN=$TOKEN --ipc=host vllm/vllm-openai:v0.10.2 --model Qwen/Qwen3-8B "
                "--tensor-parallel-size 2 --max-model-len '8192'",
                '["vllm", "serve", "Qwen/Qwen3-8B", "-tp", "2", "--max-model-len", "8192"]',
                "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2 "
                "--context-length 8192",
                "sglang serve Qwen/Qwen3-8B --tp-size 2 --context-length 8192 --port 30000",
                "docker run --gpus all lmsysorg/sglang:v0.5.3 python3 -m sglang.launch_server "
                "--model Qwen/Qwen3-8B --tensor-parallel-size 2 --context-length 8192",
                "mpirun -n 2 trtllm-llmapi-launch trtllm-serve Qwen/Qwen3-8B --tp_size 2 "
                "--max_seq_len 8192 --backend pytorch"):
            with self.subTest(command=command):
                read = self.read(command)
                self.assertEqual((read["model"], read["flags"], read["not_understood"]),
                                 ("Qwen/Qwen3-8B", self.WORDS, []))

    def test_what_is_read_is_as_if_given_here(self) -> None:
        pasted = answer("--from", "vllm serve meta-llama/Llama-3.1-70B -tp 4 -pp 2 -dp 2 -q fp8 "
                        "--kv-cache-dtype fp8_e4m3 --gpu-memory-utilization 0.95 --max-model-len "
                        "16k --max-num-seqs 64 --max-num-batched-tokens 4096 --enable-lora "
                        "--max-lora-rank 32 --max-loras 2")
        ours = ask("llama-3.1-70b --tp 4 --pp 2 --dp 2 --weights fp8 --kv fp8 --util 0.95 --ctx "
                   "16000 --max-num-seqs 64 --max-num-batched-tokens 4096 --lora-rank 32 "
                   "--lora-count 2 --engine vllm")
        pasted.pop("inherited")
        self.assertEqual(pasted, ours)

    def test_what_is_written_is_read_back(self) -> None:
        models = [row["name"] for row in capacity.presets()["models"]]
        left_out = {"--weights", "--rate", "--kv-link", "--slo-tpot-ms", "--storage",
                    "--shared-prefix-len", "--input-len", "--output-len", "--concurrency"}
        for engine in ("vllm", "sglang"):
            rng, seen = random.Random(3), 0
            while seen < 20:
                model, *pairs = random_line(rng, models, engine)
                words = [model, "--engine", engine]
                for flag, value in zip(pairs[3::2], pairs[4::2]):
                    if flag not in left_out and not flag.startswith("--spec"):
                        words += [flag, "fp8" if value == "int8" else value]
                command = launched([*words, "--json"])
                if command is None:
                    continue
                seen += 1
                again = answer("--from", command, "--gpu", words[words.index("--gpu") + 1])
                first = answer(*words)
                self.assertEqual(again["engine"]["command"], command)
                same = ["tp", "pp", "dp", "dcp", "pcp", "kv_bytes_per_element"]
                for key in same + ["util"] * ("--util" in words):
                    self.assertEqual(again["deployment"][key], first["deployment"][key], command)
                self.assertEqual(again["inherited"]["not_understood"], [])

    def test_flags_beside_a_pasted_command_win(self) -> None:
        found = answer("--from", "vllm serve Qwen/Qwen3-8B -tp 2 -q fp8", "-tp", "1",
                       "--weight-bytes", "2", "--engine", "sglang")
        self.assertEqual(found["deployment"]["tp"], 1)
        self.assertEqual(found["deployment"]["weight_bytes_per_param"], 2)
        self.assertIn("sglang.launch_server", found["engine"]["command"])
        other = answer("qwen3-14b", "--from", "vllm serve /models/mine -tp 2")
        self.assertEqual((other["model"]["name"], other["deployment"]["tp"]), ("qwen3-14b", 2))

    def test_a_plan_keeps_the_pasted_layout(self) -> None:
        found = answer("--from", "vllm serve Qwen/Qwen3-8B", "--rate", "5", "--workload", "chat")
        self.assertEqual((found["deployment"]["gpu"], found["deployment"]["tp"],
                          found["deployment"]["weights"]), ("h100", 1, "bf16"))
        self.assertIn("command", found["engine"])

    def test_a_pasted_command_can_be_compared(self) -> None:
        code, out, err = run("--from", "vllm serve Qwen/Qwen3-8B -q fp8", "--compare", "tp=1,2",
                             "--json")
        self.assertEqual((code, err), (0, ""))
        self.assertEqual([row["gpus"] for row in json.loads(out)["compare"]], [1, 2])

    def test_sglang_s_dp_attention_becomes_ours(self) -> None:
        found = answer("--gpu", "h200", "--from", "python -m sglang.launch_server --model "
                       "deepseek-ai/DeepSeek-V3 --tp 16 --dp 8 --enable-dp-attention "
                       "--speculative-algorithm EAGLE --speculative-num-steps 2")
        d = found["deployment"]
        self.assertEqual((d["tp"], d["dp"], d["ep"], d["gpus"]), (2, 8, 16, 16))
        self.assertIn("--spec-method mtp --spec-tokens 2", found["inherited"]["flags"])
        code, _, err = run("--from", "sglang serve a/b --tp 4 --dp 3 --enable-dp-attention")
        self.assertEqual((code, err.count("\n")), (2, 1))

    def test_a_container_s_tag_is_the_engine_s_version(self) -> None:
        found = answer("--from", "docker run vllm/vllm-openai:v0.10.2 --model Qwen/Qwen3-8B")
        self.assertEqual(found["engine"]["version"], "0.10.2")
        found = answer("--from", "docker run vllm/vllm-openai:latest --model Qwen/Qwen3-8B")
        self.assertIsNone(found["engine"]["version"])

    def test_speculation_and_precision_are_read_from_json_names_and_the_model_s_name(self) -> None:
        read = self.read("vllm serve neuralmagic/Meta-Llama-3.1-70B-Instruct-FP8 -tp 2 "
                         "--speculative-config '{\"method\": \"eagle3\", \"model\": \"a/b\", "
                         "\"num_speculative_tokens\": 3}'")
        self.assertEqual(read["read_as"], "llama-3.1-70b")
        for words in ("--weights fp8", "--spec-method eagle3 --spec-model a/b --spec-tokens 3"):
            self.assertIn(words, read["flags"])
        found = answer("--from", "vllm serve neuralmagic/Meta-Llama-3.1-70B-Instruct-FP8 -tp 2")
        self.assertNotIn("--quantization", found["engine"]["command"])  # the checkpoint carries it
        self.assertIn("neuralmagic/Meta-Llama-3.1-70B-Instruct-FP8", found["engine"]["command"])
        self.assertIn("--spec-method mtp", self.read(
            "vllm serve deepseek-ai/DeepSeek-V3 --speculative-config.method deepseek_mtp "
            "--speculative-config.num_speculative_tokens 1")["flags"])
        self.assertIn("--weights awq", self.read("vllm serve Qwen/Qwen2.5-72B-Instruct-AWQ -q "
                                                 "awq_marlin")["flags"])

    def test_names_that_share_words_are_not_taken_for_one_another(self) -> None:
        for name, preset in (("Qwen/Qwen3-8B-Base", "qwen3-8b"),
                             ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
                             ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b-2507"),
                             ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
                             ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", None),
                             ("meta-llama/Meta-Llama-3-80B", None)):
            found = capacity.known_as(name)[0]
            self.assertEqual(found, capacity.find_row("models", preset, "", capacity.presets()[
                "models"])["name"] if preset else name)

    def test_what_is_not_understood_is_named_in_one_line(self) -> None:
        read = self.read("vllm serve Qwen/Qwen3-8B --zany 3 --quantization strange --swap-space 4 "
                         "--kv-cache-dtype turboquant_3bit_nc")
        self.assertEqual(read["not_understood"], [
            "--zany", "--quantization strange", "--kv-cache-dtype turboquant_3bit_nc"])
        self.assertIn("--swap-space", [change["flag"] for change in read["changes"]])

    def test_what_cannot_be_read_is_one_clear_line(self) -> None:
        for command, says in (
                ("vllm serve", "names no model"), ("ls -l", "no launch command"),
                ("vllm bench serve --model a", "no launch command"), ("", "empty|launch command"),
                ("vllm serve 'x", "cannot be split"), ("vllm serve $MODEL", "shell variable"),
                ("vllm serve a/b -tp", "no value after -tp"), ("[1, 2", "no JSON list"),
                ("vllm serve Qwen/Qwen3-8B -sc nonsense", "no JSON object"),
                ("vllm serve Qwen/Qwen3-8B -tp two", "not a number"),
                ("vllm serve /models/mystery", "--config FOLDER"),
                ("vllm serve mystery-9b", "--config FOLDER")):
            with self.subTest(command=command):
                code, _, err = run("--from", command)
                self.assertEqual((code, err.count("\n")), (2, 1))
                self.assertRegex(err, says)


class Changes(unittest.TestCase):
    BASE = ("vllm serve meta-llama/Llama-3.1-8B -q fp8 --kv-cache-dtype fp8 --max-model-len 4096 "
            "--gpu-memory-utilization 0.9 --max-num-seqs 64")
    LOAD = ("--input-len", "2000", "--output-len", "300", "--concurrency", "48")

    def test_nothing_is_changed_where_nothing_needs_it(self) -> None:
        self.assertEqual(changed("--from", self.BASE, *self.LOAD), {})
        self.assertIn("nothing", run("--from", self.BASE, *self.LOAD)[1])

    def test_the_command_after_the_changes_is_said_to_be_without_them(self) -> None:
        said = "the pasted deployment, what it set NOT changed as CHANGE says; limits that it left"
        pasted = run("--from", "vllm serve meta-llama/Llama-3.1-70B -tp 4 --max-num-seqs 256")[1]
        self.assertIn(said, " ".join(pasted.split()))
        self.assertIn("--max-num-seqs 256 \\\n", pasted)
        self.assertNotIn("the pasted", run("llama-3.1-8b", "--engine", "vllm")[1])

    def test_each_fault_alone_is_found(self) -> None:
        for old, new, flag, suggested in (
                (" --gpu-memory-utilization 0.9", "", "--gpu-memory-utilization", "0.9"),
                ("4096", "131072", "--max-model-len", "3072"),
                (" --max-model-len 4096", "", "--max-model-len", "3072"),
                ("seqs 64", "seqs 8", "--max-num-seqs", "64"),
                (" -q fp8", "", "--quantization", "fp8"),
                ("64", "64 --no-enable-prefix-caching", "--no-enable-prefix-caching", None),
                ("64", "64 --enforce-eager", "--enforce-eager", None),
                ("64", "64 --no-async-scheduling", "--no-async-scheduling", None),
                ("64", "64 --no-enable-chunked-prefill", "--no-enable-chunked-prefill", "8192"),
                ("64", "64 --max-num-batched-tokens 65536", "--max-num-batched-tokens", "8192"),
                ("64", "64 --num-scheduler-steps 8", "--num-scheduler-steps", None),
                ("64", "64 -tp 4", "--tensor-parallel-size", "1")):
            with self.subTest(flag=flag, new=new):
                self.assertEqual(changed("--from", self.BASE.replace(old, new), *self.LOAD),
                                 {flag: suggested})

    def test_more_slots_than_the_kv_pool_holds_and_a_wide_kv(self) -> None:
        found = changed("--from", self.BASE.replace("seqs 64", "seqs 1024").replace(
            "--kv-cache-dtype fp8", ""), *self.LOAD)
        self.assertEqual(set(found), {"--max-num-seqs", "--kv-cache-dtype"})
        d = answer("--from", self.BASE.replace("--kv-cache-dtype fp8", ""), *self.LOAD)
        held = d["memory"]["kv_pool_bytes_per_gpu"] / (2150 * 131072)
        self.assertEqual(int(found["--max-num-seqs"]), int(held) // 8 * 8)

    def test_a_pasted_command_without_a_context_starts_with_the_model_s(self) -> None:
        found = answer("--from", "vllm serve Qwen/Qwen3-32B", "--gpu", "h100")
        refusal, = found["engine"]["refusals"]
        self.assertIn("40,960 tokens does not fit", refusal["what"])
        held = int(refusal["cure"].split()[-1])
        self.assertTrue(8192 < held <= found["engine"]["kv_cache_tokens"])
        self.assertIn("--max-model-len 8192", found["engine"]["command"])
        for shorter in ("--max-model-len 8192", "--max-model-len 18032"):
            self.assertEqual(answer("--from", f"vllm serve Qwen/Qwen3-32B {shorter}", "--gpu",
                                    "h100")["engine"]["refusals"], [])

    def test_the_share_that_sglang_derives_is_the_one_to_write_out(self) -> None:
        found = answer("--from", "python -m sglang.launch_server --model-path Qwen/Qwen3-32B",
                       "--gpu", "h100")
        advised = next(c for c in found["inherited"]["changes"]
                       if c["flag"] == "--mem-fraction-static")["suggested"]
        self.assertIn(f"--mem-fraction-static {advised}", found["engine"]["command"])

    def test_a_context_that_does_not_fit_is_lowered_to_what_does(self) -> None:
        command = "vllm serve meta-llama/Llama-3.1-70B -tp 2 --max-model-len 131072"
        shorter = changed("--from", command)["--max-model-len"]
        again = answer("--from", command.replace("131072", shorter))
        self.assertTrue(again["memory"]["fits"])
        self.assertFalse(answer("--from", command)["memory"]["fits"])

    def test_tp_that_the_load_needs_is_left_alone(self) -> None:
        command = "vllm serve meta-llama/Llama-3.1-70B -tp 4 --kv-cache-dtype fp8"
        self.assertNotIn("--tensor-parallel-size", changed("--from", command, *self.LOAD))

    def test_latent_caches_under_tp_want_dp_attention(self) -> None:
        found = changed("--gpu", "h200", "--from", "sglang serve deepseek-ai/DeepSeek-V3 --tp 8")
        self.assertEqual((found["--tp-size"], found["--enable-metrics"]),
                         ("--tp-size 8 --dp-size 8 --ep-size 8 --enable-dp-attention", "on"))


if __name__ == "__main__":
    unittest.main()
