"""capacity.py from the outside: the worked numbers, the sections, inputs gone wrong."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest
from typing import Any, Tuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import capacity

GIB = 2**30
TOP = os.path.dirname(os.path.abspath(capacity.__file__))


def run(*argv: str) -> Tuple[int, str, str]:
    """Exit code, stdout and stderr of one command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = capacity.main(argv)
    return code, out.getvalue(), err.getvalue()


def ask(line: str) -> Any:
    """The JSON answer to a command line, which must succeed."""
    code, out, err = run(*line.split(), "--json")
    assert code == 0, err
    return json.loads(out)


def text(line: str) -> str:
    """The screen that a command line prints, which must succeed."""
    code, out, err = run(*line.split())
    assert code == 0, err
    return out


class LinesAgree(unittest.TestCase):
    """What runs at once is one number, whichever line of the answer says it."""

    DENSE = "llama-3.1-70b -tp 2 --weights fp8 --kv fp8 "

    def running(self, line: str) -> Tuple[int, str]:
        """The batch of bound and expectation, which must be one; and the screen."""
        found = ask(line)
        batch = found["decode"]["at_batch"]["batch"]
        self.assertEqual(found["expected"]["batch"], batch, line)
        return batch, " ".join(text(line + " --gpu-price 2.5 --defend").split())

    def test_with_lengths_as_many_run_as_the_pool_holds_of_that_length(self) -> None:
        batch, out = self.running(self.DENSE + "--concurrency 60 --input-len 2000 --output-len 300")
        self.assertEqual(batch, 60)
        self.assertNotIn("wait;", out)
        self.assertNotIn("SHORT", out)
        batch, out = self.running(self.DENSE + "--concurrency 300 --input-len 2000 --output-len "
                                  "300")
        self.assertEqual(batch, 226)
        self.assertIn("BINDS KV pool: 226 of 300 run, 74 wait", out)
        self.assertIn("KV pool holds 226 of 300", out)
        self.assertIn("SHORT 12.09 GiB/GPU for 300 sequences of 2,150 tokens", out)
        self.assertIn("bound at batch 226", out)
        self.assertIn("full at 226 sequences", out)
        self.assertEqual(int(ask(self.DENSE)["memory"]["max_seqs"]), 59)

    def test_without_lengths_as_many_run_as_the_pool_holds_of_ctx(self) -> None:
        batch, out = self.running(self.DENSE + "--concurrency 100")
        self.assertEqual(batch, 59)
        self.assertIn("BINDS KV pool: 59 of 100 run, 41 wait", out)
        self.assertIn("KV pool holds 59 of 100", out)

    def test_max_num_seqs_is_the_limit_that_is_named_where_it_is_the_lower(self) -> None:
        line = "llama-3.1-8b --concurrency 64 --max-num-seqs 8 --input-len 1000 --output-len 200"
        batch, out = self.running(line)
        self.assertEqual(batch, 8)
        self.assertIn("--max-num-seqs lets 8 of 64 run", out)
        self.assertIn("BINDS --max-num-seqs: 8 of 64 run, 56 wait", out)
        self.assertIn("set to serve 8 at once", out)
        self.assertFalse(ask(line)["expected"]["kv_limited"])


class WorkedNumbers(unittest.TestCase):
    """Every figure of the serving spec, at its own printed precision."""

    def about(self, value: float, figure: float, share: float = 0.03) -> None:
        self.assertLessEqual(abs(value / figure - 1), share, f"{value} is not about {figure}")

    def test_the_table_of_section_2(self) -> None:
        rows = json.loads(run("--compare", "--json")[1])["compare"]
        shown = [(r["gpus"], round(r["weights_bytes_per_gpu"] / GIB, 2), r.get("max_kv_tokens"),
                  r.get("single_stream_tok_s") and round(r["single_stream_tok_s"])) for r in rows]
        self.assertEqual(shown, [
            (1, 14.96, 450912, 202), (1, 7.48, 1024352, 404), (1, 131.50, None, None),
            (2, 65.75, 27844, 47), (4, 32.88, 486596, 94), (1, 65.75, 27844, 47),
            (2, 32.88, 486596, 94)])
        pools = [round(r["kv_pool_bytes_per_gpu"] / GIB, 2) for r in rows if r["fits"]]
        self.assertEqual(pools, [55.04, 62.52, 4.25, 37.12, 4.25, 37.12])
        per_token = [r["kv_bytes_per_token_per_gpu"] / 1024 for r in rows if r["fits"]]
        self.assertEqual(per_token, [128, 64, 160, 80, 160, 80])

    def test_the_table_prints_sequences_as_the_spec_does(self) -> None:
        out = text("--compare")
        for shown in ("450,912", "1,024,352", "27,844", "486,596", " 55 ", " 125 ", " 3.4 ",
                      " 59 ", "does not fit"):
            self.assertIn(shown, out)

    def test_single_stream_of_8b(self) -> None:
        decode = ask("llama-3.1-8b")["decode"]
        self.assertEqual(round(decode["single_stream_weights_only_tok_s"]), 209)
        self.assertEqual(round(decode["single_stream_tok_s"]), 202)
        out = text("llama-3.1-8b")
        self.assertIn("202 tok/s bound", out)
        self.assertIn("209 tok/s from weights alone", out)

    def test_8b_fp8_at_batch_125(self) -> None:
        rows = ask("llama-3.1-8b --weights fp8 --kv fp8")["decode"]["table"]
        self.assertEqual((rows[-1]["batch"], round(rows[-1]["tok_s"], -1)), (125, 10070))

    def test_the_70b_step_at_its_kv_limit(self) -> None:
        answer = ask("llama-3.1-70b --tp 4")
        row = answer["decode"]["table"][-1]
        self.assertEqual(row["batch"], 59)
        self.assertAlmostEqual(row["step_s"] * 1e3, 16.45, 2)
        real = ask("llama-3.1-70b --tp 4 --mbu 0.7")["decode"]["table"][-1]
        self.assertAlmostEqual(real["step_s"] * 1e3, 23.5, 1)
        self.assertAlmostEqual(row["weights_s"] * 3.35e12 / GIB, 32.88, 2)
        self.assertAlmostEqual(row["kv_s"] * 3.35e12 / GIB, 18.4, 1)
        self.about(row["kv_s"] * 3.35e12 / GIB, 19, 0.04)

    def test_ridge_points(self) -> None:
        self.assertAlmostEqual(ask("llama-3.1-8b")["decode"]["ridge_flop_per_byte"], 295.2, 1)
        fp8 = ask("llama-3.1-8b --weights fp8")["decode"]["ridge_flop_per_byte"]
        self.assertAlmostEqual(fp8, 590.7, 1)
        self.about(fp8, 590)

    def test_prefill_of_2048_tokens(self) -> None:
        prefill = ask("llama-3.1-8b")["prefill"]
        self.assertEqual(prefill["tokens"], 2048)
        self.assertAlmostEqual(prefill["seconds"] * 1e3, 33, 0)

    def test_the_latent_of_deepseek_v3(self) -> None:
        line = "deepseek-v3 --kv fp8 --tp 8 --gpu h200"
        answer = ask(line)
        self.assertAlmostEqual(answer["memory"]["kv_bytes_per_token_per_gpu"] / 1024, 34.3, 1)
        self.assertEqual(answer["kv"]["mla_bytes_per_token"], 61 * 576)
        self.assertIn("34.31 KiB/token/GPU", text(line))

    def test_tensor_parallel_communication(self) -> None:
        comm = ask("llama-3.1-70b --tp 4 --concurrency 64")["tp_comm"]
        self.assertEqual(round(comm["all_reduce_bytes"] / 1e6, 2), 1.05)
        self.assertEqual(round(comm["ring_bytes_per_gpu"] / 1e6, 2), 1.57)
        self.assertEqual(round(comm["layer_bytes"] / 1e6, 1), 3.1)
        self.assertEqual(round(comm["step_bytes"] / 1e6), 252)
        self.assertEqual(round(comm["seconds"] * 1e3, 2), 0.56)
        self.about(comm["share_of_step"], 0.033, 0.05)
        pcie = ask("llama-3.1-70b --tp 4 --concurrency 64 --link pcie5")["tp_comm"]
        self.assertEqual(round(pcie["seconds"] * 1e3), 5)

    def test_speculative_decoding(self) -> None:
        found = ask("llama-3.1-70b --weights fp8 --kv fp8 --tp 2 --spec-accept 0.8 --spec-tokens 4 "
                    "--spec-cost 0.05")["speculative"]
        self.assertEqual(round(found["expected_tokens"], 2), 3.36)
        self.assertEqual(round(found["speedup_memory_bound"], 1), 2.8)
        self.assertEqual(round(found["speedup_compute_bound"], 2), 0.67)

    def test_lora_adapters(self) -> None:
        lora = ask("llama-3.1-8b --lora-rank 16")["lora"]
        self.assertEqual(round(lora["params"] / 1e6), 42)
        self.assertEqual(round(lora["bytes"] / 1e6), 84)

    def test_break_even(self) -> None:
        found = ask("llama-3.1-8b --gpu-price 2.50 --serverless-price 0.20")["break_even"]
        self.assertEqual(found["tokens_per_hour"], 12.5e6)
        self.assertEqual(round(found["tok_s"]), 3472)
        self.about(found["tok_s"], 3470)

    def test_cold_start(self) -> None:
        for storage, own, round_model in (("1GB/s", 141.2, 140), ("7GB/s", 20.2, 20)):
            start = ask(f"llama-3.1-70b --storage {storage}")["cold_start"]
            self.assertEqual(round(start["load_s"], 1), own)
            start = ask(f"--params 70e9 --layers 80 --kv-heads 8 --head-dim 128 --storage {storage}"
                        )["cold_start"]
            self.assertEqual(round(start["load_s"]), round_model)

    def test_kv_transfer(self) -> None:
        moved = ask("llama-3.1-70b --tp 4 --kv-link 50GB/s")["kv_transfer"]
        self.assertEqual(moved["tokens"], 8192)
        self.assertEqual(round(moved["bytes"] / 1e9, 1), 2.7)
        self.assertEqual(round(moved["seconds"] * 1e3), 54)

    def test_cost_of_a_million_tokens(self) -> None:
        eight = "llama-3.1-8b --weights fp8 --kv fp8 --gpu-price 2.5"
        seventy = "llama-3.1-70b --weights fp8 --kv fp8 --tp 2 --gpu-price 2.5"
        for line, dollars in ((eight, 0.069), (f"{eight} --tok-s 10070", 0.069),
                              (f"{eight} --tok-s 4000", 0.174),
                              (f"{seventy} --tok-s 1500", 0.926)):
            self.assertEqual(round(ask(line)["cost"]["per_1m_output"], 3), dollars)
            self.assertIn(f"${dollars:.3f} per 1M", text(line))

    def test_queueing(self) -> None:
        for rho, times in ((".9", 9), (".95", 19)):
            self.assertAlmostEqual(
                ask(f"llama-3.1-8b --rho {rho}")["queueing"]["wait_over_service"], times)

    def test_mha_against_gqa(self) -> None:
        kv = ask("llama-3.1-8b")["kv"]
        self.assertEqual((kv["mha_bytes_per_token"], kv["gqa_bytes_per_token"]),
                         (512 * 1024, 128 * 1024))
        explained = text("llama-3.1-8b --explain")
        self.assertIn("512 KiB", explained)
        self.assertIn("128 KiB", explained)


ODD = ("llama-3.1-70b --weights fp8 --kv fp8 --tp 2", "deepseek-v3 --gpu h200 --tp 8",
       "deepseek-v3 --gpu h200 --dp 8 --ep all", "gpt-oss-120b --tp 2 --concurrency 64",
       "gemma-3-27b --tp 2 --ctx 32768", "qwen3.5-35b-a3b --gpu b200 --pp 2",
       "llama-3.1-405b --gpu h200 --tp 8 --pp 2 --weights fp8 --kv fp8",
       "qwen3-235b-a22b --weights fp8 --gpu h200 --tp 8 --ep 8 --pcp 1 --lora-rank 16",
       "llama-3.1-8b --spec-accept .7 --lora-rank 8 --gpu-price 2 --serverless-price 1 "
       "--storage 1 --kv-link ndr --rho .5 --dp 3", "llama-3.1-70b --tp 16 --dcp 2",
       "llama-3.1-70b --tp 2 --weights fp8 --rate 20 --mean-rate 5 --workload chat --gpu-price 2 "
       "--shared-prefix-len 900", "deepseek-v3 --gpu h200 --rate 1 --workload rag --slo-tpot-ms 9",
       "llama-3.1-8b --concurrency 65 --dp 2 --input-len 1000 --output-len 2")


class Explained(unittest.TestCase):
    """The formula that --explain prints is the one that was computed."""

    def test_every_formula_gives_its_value(self) -> None:
        seen = 0
        for line in ODD:
            args = capacity.parse_args(line.split())
            tables = capacity.presets()
            capacity.read_rates(args, tables["links"])
            answer = capacity.answer_for(capacity.deployment_of(args, tables), args, tables)
            for step in answer.steps:
                if step.formula:
                    names = {"max": max, "min": min, "round": round, "ceil": math.ceil}
                    found = eval(step.formula, names, dict(step.numbers))
                    self.assertTrue(math.isclose(found, step.value, rel_tol=1e-9),
                                    f"{line}: {step.key} = {step.value}, formula gives {found}")
                    self.assertTrue(step.source or step.unit, step.key)
                    seen += 1
        self.assertGreater(seen, 250)

    def test_one_of_a_unit_is_singular(self) -> None:
        told = text("llama-3.1-8b --rate 1 --workload chat --tp 1 --explain")
        self.assertIn("plan.gpus = 1 GPU ", told.replace("\n", " "))
        self.assertNotRegex(told, r"= 1 [a-zA-Z]+s\b(?!/)")

    def test_it_shows_formula_numbers_and_source(self) -> None:
        out = text("llama-3.1-70b --tp 2 --weights fp8 --kv fp8 --explain")
        self.assertIn("memory.kv_pool_bytes_per_gpu = max(0, util * memory - weights - adapters - "
                      "reserve)", out)
        self.assertIn("max(0, 0.9 * 85899345920 - 35300000000 - 0 - 2147483648)", out)
        self.assertIn("2309.06180", out)


class Parallelism(unittest.TestCase):
    def test_kv_heads_are_replicated_past_their_number(self) -> None:
        eight = ask("llama-3.1-70b --tp 8")["memory"]["kv_bytes_per_token_per_gpu"]
        sixteen = ask("llama-3.1-70b --tp 16")["memory"]["kv_bytes_per_token_per_gpu"]
        self.assertEqual((eight, sixteen), (40 * 1024, 40 * 1024))

    def test_dcp_shares_replicated_kv_out(self) -> None:
        shared = ask("llama-3.1-70b --tp 16 --dcp 2")["memory"]["kv_bytes_per_token_per_gpu"]
        self.assertEqual(shared, 20 * 1024)

    def test_the_mla_latent_is_whole_on_every_tp_rank(self) -> None:
        four, eight, shared = (ask(f"deepseek-v3 --gpu b200 {s}")["memory"]
                               ["kv_bytes_per_token_per_gpu"]
                               for s in ("--tp 4", "--tp 8", "--tp 8 --dcp 8"))
        self.assertEqual(four, eight)
        self.assertAlmostEqual(shared * 8, eight)

    def test_dp_attention_holds_eight_times_the_sequences(self) -> None:
        tensor = ask("deepseek-v3 --gpu b200 --tp 8")["memory"]
        data = ask("deepseek-v3 --gpu b200 --dp 8 --ep all")["memory"]
        self.assertGreater(data["max_seqs"], 6 * tensor["max_seqs"])
        self.assertGreater(data["weights_bytes_per_gpu"], tensor["weights_bytes_per_gpu"])

    def test_pipeline_stages_save_no_time(self) -> None:
        tp = ask("llama-3.1-70b --tp 2")["decode"]["single_stream_tok_s"]
        pp = ask("llama-3.1-70b --tp 2 --pp 2")["decode"]["single_stream_tok_s"]
        self.assertAlmostEqual(tp, pp)

    def test_the_fullest_stage_decides(self) -> None:
        answer = ask("llama-3.1-70b --tp 1 --pp 3")
        self.assertEqual(answer["pipeline"]["layers_on_fullest_stage"], 27)
        self.assertAlmostEqual(answer["memory"]["weights_bytes_per_gpu"], 141.2e9 * 27 / 80)

    def test_replicas_add_throughput_and_leave_latency(self) -> None:
        one, three = ask("llama-3.1-8b"), ask("llama-3.1-8b --dp 3")
        self.assertEqual(one["decode"]["table"], three["decode"]["table"])
        self.assertAlmostEqual(three["fleet"]["tok_s"], 3 * one["decode"]["table"][-1]["tok_s"])

    def test_an_moe_touches_few_experts_at_batch_1_and_nearly_all_at_64(self) -> None:
        model = capacity.build_model(capacity.find_row("models", "qwen3-30b-a3b", "model",
                                                       capacity.presets()["models"]))
        self.assertAlmostEqual(capacity.touched_share(model, 1) * 128, 8)
        self.assertGreater(capacity.touched_share(model, 64), 0.98)

    def test_an_moe_computes_on_its_active_parameters(self) -> None:
        answer = ask("qwen3-30b-a3b")
        self.assertAlmostEqual(answer["prefill"]["seconds"],
                               2 * answer["model"]["active_params"] * 2048 / 989e12, 9)

    def test_tp_2_is_set_against_two_replicas_at_the_same_load_with_its_traffic(self) -> None:
        found = ask("llama-3.1-8b --tp 2")["tp_against_replicas"]
        load = found["sequences"]
        self.assertEqual(load, 110)
        single = ask(f"llama-3.1-8b --concurrency {load // 2}")["decode"]["at_batch"]
        self.assertAlmostEqual(found["tp1_tok_s_per_gpu"], single["tok_s"])
        slow = ask("llama-3.1-8b --tp 2 --link 1GB/s")["tp_against_replicas"]
        self.assertLess(slow["tok_s_per_gpu"], slow["tp1_tok_s_per_gpu"])

    def test_traffic_that_outlasts_the_step_binds(self) -> None:
        line = "llama-3.1-70b --tp 8 --link 10GB/s --concurrency 64"
        self.assertEqual(ask(line)["decode"]["bound_by"], "comm")
        self.assertIn("BINDS        traffic between GPUs", text(line))

    def test_cards_in_one_server_talk_over_its_pcie(self) -> None:
        self.assertEqual(ask("qwen3-30b-a3b --gpu l40s --tp 2")["tp_comm"]["link"], "pcie4")
        self.assertEqual(ask("llama-3.1-70b --gpu h100 --tp 16")["tp_comm"]["link"], "ndr")

    def test_prefill_context_parallel_divides_the_prefill(self) -> None:
        one, two = (ask(f"llama-3.1-70b --tp 4 --pcp {n}")["prefill"]["seconds"] for n in (1, 2))
        self.assertAlmostEqual(one, 2 * two)


class Sections(unittest.TestCase):
    def test_speculation_still_pays_at_the_kv_limit_of_70b(self) -> None:
        found = ask("llama-3.1-70b --weights fp8 --kv fp8 --tp 2 --spec-accept 0.8")["speculative"]
        self.assertEqual(found["batch"], 59)
        self.assertGreater(found["speedup"], 1)
        self.assertIsNone(found["turning_batch"])  # KV reads keep it memory-bound
        self.assertEqual([row["gamma"] for row in found["table"]], list(range(1, 9)))

    def test_a_win_at_every_batch_says_why_the_compute_bound_loss_is_not_met(self) -> None:
        out = " ".join(text("llama-3.1-70b --weights fp8 --kv fp8 --tp 2 --spec-accept 0.8")
                       .split())
        self.assertIn("0.67x once compute-bound", out)
        self.assertIn("wins at every batch: at a history of 4,096 reads outweigh arithmetic in all "
                      "of them, so the 0.67x is not met", out)

    def test_speculation_turns_from_win_to_loss_where_it_says(self) -> None:
        args = capacity.parse_args("llama-3.1-70b --weights fp8 --kv fp8 --tp 2 --ctx 256".split())
        d = capacity.deployment_of(args, capacity.presets())
        (turn, last), = capacity.losing_batches(d, 0.6, 4, 0.05)
        self.assertIsNone(last)
        self.assertLess(capacity.speculative_speedup(d, turn, 0.6, 4, 0.05), 1)
        self.assertGreaterEqual(capacity.speculative_speedup(d, turn - 1, 0.6, 4, 0.05), 1)

    def test_an_moe_loses_at_small_batch_and_says_so(self) -> None:
        line = "qwen3-30b-a3b --gpu b300 --tp 4 --ctx 512 --spec-accept 0.7"
        args = capacity.parse_args(line.split())
        d = capacity.deployment_of(args, capacity.presets())
        ranges = capacity.losing_batches(d, 0.7, 4, 0.05)
        for batch in (1, 2, 3, 5, 8, 64, 500, 4000, 16000):
            said = any(a <= batch and (b is None or batch <= b) for a, b in ranges)
            loses = capacity.speculative_speedup(d, batch, 0.7, 4, 0.05) < 1
            self.assertEqual(said, loses, batch)
        self.assertEqual(ranges[0][0], 1)
        self.assertIn("loses at batches 1-", text(line))

    def test_an_engines_accepted_length_stands_for_alpha(self) -> None:
        found = ask("llama-3.1-8b --spec-accept-len 3.3616 --spec-tokens 4")["speculative"]
        self.assertAlmostEqual(found["alpha"], 0.8, 4)

    def test_adapters_take_their_room_from_the_kv_pool(self) -> None:
        plain = ask("llama-3.1-8b")["memory"]
        lora = ask("llama-3.1-8b --lora-rank 16 --lora-count 100")["lora"]
        self.assertAlmostEqual(lora["kv_tokens_lost"], 100 * lora["bytes"] / (128 * 1024))
        self.assertLess(lora["max_seqs"], plain["max_seqs"])

    def test_a_slow_link_does_not_pay_for_disaggregation(self) -> None:
        self.assertTrue(ask("llama-3.1-70b --tp 4 --kv-link 50GB/s")["kv_transfer"]["pays"])
        self.assertFalse(ask("llama-3.1-70b --tp 4 --kv-link 10Gb/s")["kv_transfer"]["pays"])

    def test_break_even_is_against_the_throughput_that_is_expected(self) -> None:
        line = "llama-3.1-8b --gpu-price 2.50 --serverless-price 0.20"
        found = ask(line)
        expected = found["expected"]["output_tok_s"]
        self.assertAlmostEqual(found["break_even"]["share_of_tok_s"],
                               found["break_even"]["tok_s"] / expected)
        self.assertIn(f"{expected:,.0f} tok/s that EXPECT has", " ".join(text(line).split()))
        self.assertIn("4,000 tok/s measured (--tok-s)",
                      " ".join(text(line + " --tok-s 4000").split()))

    def test_break_even_past_the_throughput_is_said(self) -> None:
        out = text("llama-3.1-70b --tp 4 --gpu-price 10 --serverless-price 0.01 --tok-s 100")
        self.assertIn("serverless is cheaper at any load", " ".join(out.split()))

    def test_what_does_not_fit_says_by_how_much_and_what_would(self) -> None:
        out = text("llama-3.1-70b")
        self.assertIn("DOES NOT FIT", out)
        self.assertIn("61.50 GiB of it before any KV cache", out)
        self.assertIn("TP=2", out)
        answer = ask("llama-3.1-70b")
        self.assertFalse(answer["memory"]["fits"])
        self.assertEqual(answer["decode"]["table"], [])
        self.assertIsNone(answer["decode"]["single_stream_tok_s"])

    def test_what_fits_but_not_for_all_that_are_asked_says_how_many_run(self) -> None:
        out = " ".join(text("llama-3.1-70b --tp 4 --concurrency 64").split())
        for words in ("FITS (59 of 64 sequences)", "at batch 64 as asked (59 run)",
                      "in brackets, the sequences that each holds"):
            self.assertEqual(out.count(words), 1, words)
        out = " ".join(text("llama-3.1-70b --tp 4 --concurrency 16").split())
        self.assertNotIn("FITS (", out)
        self.assertIn("ms at batch 16, ", out)

    def test_a_context_too_long_says_which_would_fit(self) -> None:
        self.assertIn("--ctx up to 27,843 would fit", text("llama-3.1-70b --tp 2 --ctx 100000"))

    def test_what_is_asked_past_the_kv_limit_is_not_priced(self) -> None:
        line = "llama-3.1-70b --weights fp8 --kv fp8 --tp 2 --ctx 32768 --gpu-price 2.5"
        asked, at_limit = ask(f"{line} --concurrency 40"), ask(line)
        self.assertEqual(asked["cost"]["per_1m_output"], at_limit["cost"]["per_1m_output"])
        out = text(f"{line} --concurrency 40")
        self.assertIn("14 of 40 run, 26 wait", out)
        self.assertIn("TP=4 (42)", out)

    def test_adapters_that_fill_the_pool_do_not_fit(self) -> None:
        self.assertFalse(ask("llama-3.1-8b --lora-rank 64 --lora-count 400")["memory"]["fits"])

    def test_four_bit_presets_weigh_what_their_checkpoint_does(self) -> None:
        weights = ask("gpt-oss-20b")["memory"]["weights_bytes_per_gpu"]
        folder = os.path.join(TOP, "tests", "data", "configs", "openai--gpt-oss-20b")
        self.assertEqual(weights, ask(folder)["memory"]["weights_bytes_per_gpu"])
        self.assertEqual(weights, 13761264768)

    def test_the_binding_line_offers_nothing_already_done(self) -> None:
        _, binds, out = text("llama-3.1-8b --weights fp8 --kv fp8 --ctx 32k").partition("\nBINDS ")
        self.assertTrue(binds)
        self.assertNotIn("--kv fp8", out)

    def test_no_paragraph_is_wider_than_the_screen(self) -> None:
        for line in ("llama-3.1-70b --tp 2", "gpt-oss-120b --tp 4", "deepseek-v3 --gpu h200 --dp 8 "
                     "--ep all", "llama-3.1-8b --rate 5 --workload chat --engine vllm"):
            for told in text(line).splitlines():
                self.assertLessEqual(len(told), capacity.SCREEN, told)

    def test_concurrency_is_shared_out_over_the_replicas(self) -> None:
        batches = [r["batch"] for r in ask("llama-3.1-8b --dp 4 --concurrency 30")["decode"]
                   ["table"]]
        self.assertIn(8, batches)

    def test_the_table_holds_the_asked_batch_and_the_limit(self) -> None:
        batches = [r["batch"] for r in ask("llama-3.1-70b --tp 4 --concurrency 100")["decode"]
                   ["table"]]
        self.assertEqual(batches, [1, 2, 4, 8, 16, 32, 59, 100])

    def test_lengths_set_the_average_history(self) -> None:
        answer = ask("llama-3.1-8b --input-len 2000 --output-len 300")
        self.assertEqual(answer["deployment"]["history_tokens"], 2150)
        self.assertEqual(answer["prefill"]["tokens"], 2000)


class Lengths(unittest.TestCase):
    def test_a_lognormal_has_the_mean_and_spread_it_was_given(self) -> None:
        found = capacity.parse_lengths("lognormal:mean=2000,cv=0.5")
        quantiles = [found.quantile((i + 0.5) / 20000) for i in range(20000)]
        mean = sum(quantiles) / len(quantiles)
        cv = math.sqrt(sum((q - mean) ** 2 for q in quantiles) / len(quantiles)) / mean
        self.assertAlmostEqual(mean / 2000, 1, 2)
        self.assertAlmostEqual(cv, 0.5, 2)

    def test_a_histogram_counts_its_lines(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "lengths.csv")
            with open(path, "w", encoding="utf-8") as file:
                file.write("# tokens,requests\n100,3\n500,1\n")
            found = capacity.parse_lengths(f"hist:{path}")
        self.assertEqual((found.mean, found.quantile(0.5), found.quantile(0.99)), (200, 100, 500))


class InputsGoneWrong(unittest.TestCase):
    """One line on stderr, exit code 2, nothing on stdout, never a traceback."""

    def refused(self, line: str, *said: str) -> None:
        code, out, err = run(*line.split())
        self.assertEqual((code, out), (2, ""), line)
        self.assertEqual(err.count("\n"), 1, err)
        self.assertTrue(err.startswith("capacity: error: "), err)
        for part in said:
            self.assertIn(part, err)

    def test_unknown_names_suggest_near_ones(self) -> None:
        self.refused("llama-3.1-7b", "llama-3.1-8b")
        self.refused("llama-3.1-8b --gpu h1000", "h100")
        self.refused("llama-3.1-8b --weights fp9", "fp8")
        self.refused("llama-3.1-8b --link nvlink9", "nvlink")

    def test_an_unknown_workload_is_told_those_there_are(self) -> None:
        names = [row["name"] for row in capacity.presets()["workloads"]]
        self.assertIn("known are " + ", ".join(names),
                      run("llama-3.1-8b", "--workload", "foo")[2])

    def test_tp_that_does_not_divide_the_heads_names_what_does(self) -> None:
        self.refused("llama-3.1-70b --tp 3", "64 query heads", "1, 2, 4, 8")

    def test_layouts_that_no_engine_takes(self) -> None:
        self.refused("llama-3.1-8b --pp 33", "32 layers")
        self.refused("llama-3.1-8b --ep 2", "dense")
        self.refused("llama-3.1-8b --tp 4 --dcp 3", "divide")
        self.refused("llama-3.1-8b --tp 4 --dcp 2", "KV heads")
        self.refused("deepseek-v3 --tp 2 --dp 4 --ep 4", "EP=4")

    def test_numbers_out_of_range(self) -> None:
        for bad in ("--tp 0", "--tp -1", "--tp 1.5", "--tp nan", "--util 0", "--util 1.2",
                    "--ctx 0", "--weight-bytes 0", "--kv-bytes inf", "--reserve-gib -1",
                    "--mbu 0", "--concurrency 0", "--rho 1", "--spec-accept 1.1",
                    "--gpu-price 0", "--storage 0", "--input-len 0", "--input-len uniform:9..1",
                    "--input-len lognormal:mean=5", "--input-len hist:/nonexistent",
                    "--spec-accept-len 9", "--input-len 9000", "--compare tpp=1",
                    "--compare json=1", "--ctx 1e30", "--gpu-memory-gib 1e300",
                    "--kv-bytes 1e-300", "--tp 1_6",
                    "--tok-s 5", "--serverless-price 1", "--lora-count 3", "--init-s 5",
                    "--params 70e9", "--layers 3", "--gpu-bandwidth x", "--compare tp=1 tp=2"):
            self.refused(f"llama-3.1-8b {bad}", bad.split()[0])

    def test_no_model_or_two(self) -> None:
        self.refused("", "no model given")
        self.refused("llama-3.1-8b --preset llama-3.1-70b", "more than once")
        self.refused("./nowhere", "no such file")

    def test_unknown_flags(self) -> None:
        self.refused("llama-3.1-8b --frobnicate", "--frobnicate")

    def test_an_empty_value_is_not_taken_for_a_default(self) -> None:
        for flag in ("--gpu", "--link", "--weights", "--kv", "--input-len", "--storage", "--tp"):
            code, out, err = run("llama-3.1-8b", flag, "")
            self.assertEqual((code, out, err.count("\n")), (2, "", 1), flag)
            self.assertIn(flag, err)

    def test_a_comparison_of_which_every_row_is_refused_is_an_error(self) -> None:
        self.refused("llama-3.1-8b --compare gpu=h1000", "h100")
        self.refused("nosuch --compare", "nosuch")

    def test_a_rate_of_next_to_nothing_is_no_rate(self) -> None:
        for flags in ("--gpu-bandwidth 1e-308", "--link 5e-324 --tp 2", "--storage 1e-308"):
            self.refused(f"llama-3.1-8b {flags}", "a byte a second or more")

    def test_a_line_break_in_a_name_does_not_make_a_second_line(self) -> None:
        code, _, err = run("a\nb")
        self.assertEqual((code, err.count("\n")), (2, 1))

    def test_a_full_disk_is_one_line(self) -> None:
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, capacity.__file__, "llama-3.1-8b"], stdout=full,
                                  stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)

    def test_a_refused_row_of_a_comparison_says_why(self) -> None:
        out = text("llama-3.1-70b --compare tp=2,3")
        self.assertIn("does not divide", out)


class Standalone(unittest.TestCase):
    """Copied alone into an empty folder."""

    def alone(self, *argv: str) -> "subprocess.CompletedProcess[str]":
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "capacity.py")
            with open(capacity.__file__, encoding="utf-8") as source, \
                    open(path, "w", encoding="utf-8") as copy:
                copy.write(source.read())
            return subprocess.run([sys.executable, "-I", path, *argv], capture_output=True,
                                  text=True, cwd=folder, check=False)

    def test_help_works_and_names_every_flag(self) -> None:
        done = self.alone("--help")
        self.assertEqual(done.returncode, 0)
        for name in capacity.FLAG_NAMES:
            self.assertIn(name, done.stdout)

    def test_explicit_flags_need_no_presets(self) -> None:
        done = self.alone(*"--params 8.03e9 --layers 32 --kv-heads 8 --head-dim 128 --heads 32 "
                          "--hidden 4096 --gpu-memory-gib 80 --gpu-bandwidth 3350GB/s "
                          "--gpu-tflops 989".split())
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("450,912 tokens", done.stdout)

    def test_what_could_not_be_looked_up_is_said(self) -> None:
        done = self.alone("llama-3.1-8b")
        self.assertEqual(done.returncode, 2)
        self.assertIn("presets.json is not beside", done.stderr)


class Presets(unittest.TestCase):
    def test_there_are_enough_and_each_is_one_line(self) -> None:
        tables = capacity.presets()
        self.assertGreaterEqual(len(tables["models"]), 60)
        self.assertGreaterEqual(len(tables["gpus"]), 25)
        with open(os.path.join(TOP, "presets.json"), encoding="utf-8") as file:
            lines = file.read().splitlines()
        for table in ("models", "gpus", "links", "workloads"):
            for row in tables[table]:
                self.assertEqual(sum(f'"name": "{row["name"]}"' in line for line in lines), 1,
                                 row["name"])

    def test_every_model_answers_on_a_large_gpu(self) -> None:
        for row in capacity.presets()["models"]:
            fits = [n for n in (8, 4, 2, 1) if not capacity.tp_problem(
                capacity.build_model(row), n)]
            answer = ask(f"{row['name']} --gpu b300 --tp {fits[0]}")
            self.assertEqual(answer["model"]["params"], row["params"])
            self.assertGreater(answer["memory"]["kv_bytes_per_token_per_gpu"], 0, row["name"])

    def test_every_gpu_answers(self) -> None:
        tables = capacity.presets()
        for row in tables["gpus"]:
            answer = ask(f"llama-3.2-1b --gpu {row['name']}")
            self.assertTrue(answer["memory"]["fits"], row["name"])
        for name in ("h100", "h200", "b200", "b300", "gb200", "a100", "l40s", "mi300x", "mi325x",
                     "rtxpro6000", "4090", "3090"):  # as measured points name them
            capacity.find_row("gpus", name, "GPU", tables["gpus"])


if __name__ == "__main__":
    unittest.main()
