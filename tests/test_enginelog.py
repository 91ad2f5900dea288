"""What the engine will log: weights on a rank, activation peak, KV blocks, refusals, pasted logs.

    python3 -m unittest tests.test_enginelog
"""
import json
import os
import random
import statistics
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import capacity
from tests import bench_logs

TABLES = capacity.presets()
GIB = 2**30
CONFIGS = Path(__file__).resolve().parent / "data" / "configs"


def deployment(line):
    return capacity.deployment_of(capacity.parse_args(line.split()), TABLES)


def rank_bytes(line):
    weights = capacity.rank_weights(deployment(line))
    return weights.dense_bytes + weights.expert_bytes


class Weights(unittest.TestCase):
    def test_weights_on_a_rank_are_what_engines_logged(self):
        # GiB of "Model loading took", tests/data/startup_logs.jsonl
        for line, logged_gib in (
                ("llama-3.1-8b", 14.9888), ("llama-3.3-70b --weights fp8", 67.72),
                ("llama-3.1-70b --weights awq", 37.09), ("llama-3.1-8b --weights gptq", 5.3494),
                ("deepseek-v2 --tp 8 --pp 2", 28.48), ("phi-4 --weights gptq", 8.5107),
                ("glm-5 --weights fp8 --tp 8", 89.39), ("qwen2.5-7b --tp 2", 7.1217)):
            with self.subTest(line):
                self.assertAlmostEqual(rank_bytes(line) / GIB / logged_gib, 1, delta=0.01)

    def test_the_bound_keeps_its_nominal_width(self):
        d = deployment("llama-3.1-70b --weights fp8 --tp 2")
        self.assertEqual(capacity.weights_bytes_per_gpu(d), 70.6e9 / 2)
        self.assertGreater(rank_bytes("llama-3.1-70b --weights fp8 --tp 2"), 70.6e9 / 2)

    def test_nvfp4_leaves_attention_and_mamba_alone_and_packs_the_experts(self):
        line = "nemotron-3-super-120b-a12b --weights nvfp4 --gpu b200"
        self.assertAlmostEqual(rank_bytes(line) / GIB, 71, delta=3)
        stored = capacity.stored_weights(deployment(line).model.tensors,
                                         capacity.stored_as(deployment(line)))
        label = {part.tensor.name: part.label for part in stored}
        self.assertEqual(label["mixer.experts.*.up_proj"], "nvfp4")
        self.assertEqual((label["mixer.q_proj"], label["mixer.in_proj"]), ("bf16", "bf16"))

    def test_one_rank_holds_what_the_checkpoint_declares(self):
        for name in ("gpt-oss-20b", "gpt-oss-120b", "llama-3.1-8b", "qwen3-30b-a3b"):
            with self.subTest(name):
                d = deployment(name)
                stored = d.model.weight_bytes or 2 * d.model.params_exact
                self.assertAlmostEqual(rank_bytes(name) / stored, 1, delta=0.001)

    def test_stages_share_the_layers_as_vllm_does(self):
        sizes = [len(stage) for stage in capacity.stage_layers(61, 4)]
        self.assertEqual(sizes, [15, 15, 16, 15])
        stages = capacity.stage_weights(deployment("llama-3.1-8b --pp 4"))
        whole = rank_bytes("llama-3.1-8b")
        self.assertAlmostEqual(sum(s.dense_bytes for s in stages) / whole, 1, delta=1e-4)
        self.assertGreater(stages[0].dense_bytes, stages[1].dense_bytes)  # the embedding

    def test_routers_norms_and_down_projections_are_whole_on_each_rank(self):
        one, eight = (capacity.rank_weights(deployment(f"deepseek-v3 --tp {tp}")).dense_bytes
                      for tp in (1, 8))
        self.assertGreater(eight * 8 / one, 1.2)

    def test_a_model_by_hand_keeps_the_nominal_split(self):
        line = "--params 8e9 --layers 32 --kv-heads 8 --head-dim 128 --tp 2"
        self.assertEqual(rank_bytes(line), 8e9)

    def test_the_look_up_table_and_the_vision_tower_are_marked_unread(self):
        weights = capacity.rank_weights(deployment("llama-3.1-8b"))
        self.assertAlmostEqual(weights.unread_bytes, 128256 * 4096 * 2, delta=1)
        self.assertEqual(capacity.rank_weights(deployment("qwen3-4b")).unread_bytes, 0)


def asked(line):
    """(deployment, settings, what the engine will log) of a command line."""
    args = capacity.parse_args(line.split())
    d = capacity.deployment_of(args, TABLES)
    s = capacity.settings_of(d, args)
    return d, s, capacity.engine_answer(d, s)


def screen(line):
    args = capacity.parse_args(line.split())
    answer = capacity.answer_for(capacity.deployment_of(args, TABLES), args, TABLES)
    return " ".join(" ".join(answer.lines).split())


def answer_json(line):
    args = capacity.parse_args(line.split())
    return capacity.answer_for(capacity.deployment_of(args, TABLES), args, TABLES).json()


def pool_of(line, available_gib):
    args = capacity.parse_args(line.split())
    d = capacity.deployment_of(args, TABLES)
    s = capacity.settings_of(d, args)
    pool = capacity.vllm_pool(d, s, [available_gib * GIB] * d.pp)
    return pool, capacity.vllm_tokens(pool, d, s)


class Logs(unittest.TestCase):
    def test_logged_starts_are_predicted(self):
        rows = [json.loads(line) for line in bench_logs.ROWS.read_text().splitlines()]
        weights, kv = [], []
        for row in rows:
            if "ask" not in row or row["confidence"] == "low":
                continue
            errors = bench_logs.compare(row)["errors"]
            weights += [abs(e) for name, e in errors.items() if name == "model_loading_gib"]
            kv += [abs(errors[name]) for name in bench_logs.KV if name in errors][:1]
        self.assertGreaterEqual(len(kv), 35)
        self.assertLess(statistics.median(weights), 0.005)
        self.assertLess(statistics.median(kv), 0.02)
        self.assertGreaterEqual(sum(e <= 0.1 for e in kv) / len(kv), 0.9)

    def test_the_band_holds_most_logs(self):
        rows = [json.loads(line) for line in bench_logs.ROWS.read_text().splitlines()]
        held = [bench_logs.compare(row)["held"] for row in rows
                if "ask" in row and row["confidence"] != "low"]
        held = [h for h in held if h is not None]
        self.assertGreaterEqual(sum(held) / len(held), 0.8)

    def test_loaded_weights_count_rotary_tables_and_the_allocator(self):
        # vllm 0.10.1.1 and vllm#13061 logged these to four digits
        for line, logged_gib in (("qwen2-7b --tp 2", 7.1217), ("llama-3.1-8b", 14.9888),
                                 ("deepseek-r1-distill-qwen-14b --tp 2", 13.9476)):
            with self.subTest(line):
                loaded = capacity.loaded_bytes(deployment(line), 0) / GIB
                self.assertAlmostEqual(loaded, logged_gib, delta=0.005)

    def test_metas_fp8_405b_keeps_its_attention_in_16_bit(self):
        for name, logged_gib in (("meta-llama/Llama-3.1-405B-Instruct-FP8", 57.75),  # vllm#6746
                                 ("RedHatAI/Meta-Llama-3.1-405B-Instruct-FP8-dynamic", 47.8)):
            with self.subTest(name):
                args = capacity.parse_args(["--from", f"vllm serve {name} -tp 8"])
                loaded = capacity.loaded_bytes(capacity.deployment_of(args, TABLES), 0) / GIB
                self.assertAlmostEqual(loaded / logged_gib, 1, delta=0.02)

    def test_gpt_oss_experts_are_padded_as_the_gpu_needs(self):
        for line, logged_gib in (("gpt-oss-20b --gpu a100", 13.72), ("gpt-oss-120b", 64.38)):
            with self.subTest(line):
                loaded = capacity.loaded_bytes(deployment(line), 0) / GIB
                self.assertAlmostEqual(loaded / logged_gib, 1, delta=0.005)


class Drafting(unittest.TestCase):
    LINE = "deepseek-v3 --tp 8 --gpu h200 --engine vllm"

    def test_mtp_costs_its_layer_s_weights_and_cache(self):
        plain, drafting = asked(self.LINE)[2], asked(self.LINE + " --spec-accept 0.8")[2]
        more = drafting.memory.weights_bytes - plain.memory.weights_bytes
        model = deployment(self.LINE).model
        self.assertGreater(more, model.mtp_params / 8)  # its projection is whole on each rank
        self.assertLess(more, 1.3 * model.mtp_params / 8)
        self.assertAlmostEqual(drafting.pool.block_bytes / plain.pool.block_bytes, 1 + 1 / 61)

    def test_eagle_adds_one_layer_as_logged(self):
        # vLLM, June 2025: 51.63 GiB are 410,128 tokens of Llama-3.1-8B with an EAGLE drafter
        _, tokens = pool_of("llama-3.1-8b --engine vllm --max-model-len 131072 --spec-method "
                            "eagle", 51.63)
        self.assertAlmostEqual(tokens / 410128, 1, delta=1e-4)

    def test_the_answer_says_what_it_assumed(self):
        self.assertIn("speculation by mtp (assumed): about",
                      screen(self.LINE + " --spec-accept .8"))
        self.assertIn("NOT counted", screen("llama-3.1-8b --engine vllm --spec-method draft_model"))
        self.assertNotIn("speculation by", screen("llama-3.1-8b --engine vllm"))
        self.assertEqual(answer_json(self.LINE + " --spec-accept .8")["engine"]["draft_layers"], 1)

    def test_a_recurrent_state_is_kept_for_each_drafted_token(self):
        line = "qwen3-next-80b-a3b --tp 4 --engine vllm"
        plain, drafting = (asked(text)[2].pool.blocks_per_request
                           for text in (line, line + " --spec-method mtp --spec-tokens 2"))
        self.assertGreater(drafting, plain)


class Profiling(unittest.TestCase):
    def test_the_sampler_warm_up_is_the_peak_at_many_sequences(self):
        # "PyTorch activation peak" of Llama-3.1-8B on H100 and Qwen3-4B on T4
        for line, logged_gib in (
                ("llama-3.1-8b --engine-version 0.11", 4.76),
                ("qwen3-4b --gpu t4 --max-num-seqs 160 --engine-version 0.8.5", 0.88),
                ("llama-3.2-1b --gpu l40s --engine-version 0.10.1", 0.45),
                ("phi-4-mini --gpu a100-40gb --engine-version 0.7.3", 1.83)):
            with self.subTest(line):
                _, _, found = asked(line + " --engine vllm --max-model-len 2048")
                self.assertAlmostEqual(found.memory.activation_bytes / GIB / logged_gib, 1,
                                       delta=0.06)

    def test_v0_profiled_at_the_context_length_unless_prefill_was_chunked(self):
        line = "llama-3.1-8b --gpu a10g --engine vllm --engine-version 0.7.1 --max-model-len "
        self.assertAlmostEqual(asked(line + "20000")[2].memory.activation_bytes / GIB, 2.07,
                               delta=0.05)
        self.assertAlmostEqual(asked(line + "131072")[2].memory.activation_bytes / GIB, 0.22,
                               delta=0.03)

    def test_without_a_version_the_largest_reserve_counts(self):
        line = "qwen3-8b --engine vllm"
        unknown = asked(line)[2].memory.reserve_bytes
        self.assertGreaterEqual(unknown, max(
            asked(f"{line} --engine-version {v}")[2].memory.reserve_bytes
            for v in ("0.9.1", "0.11", "0.19", "0.33")))

    def test_defaults_follow_the_class_of_gpu(self):
        for gpu, seqs, tokens in (("h100", 1024, 8192), ("a100", 256, 2048), ("l4", 256, 2048),
                                  ("b200", 1024, 16384)):
            with self.subTest(gpu):
                s = asked(f"llama-3.1-8b --gpu {gpu} --engine vllm")[1]
                self.assertEqual((s.max_num_seqs, s.max_num_batched_tokens), (seqs, tokens))
        given = asked("llama-3.1-8b --engine vllm --max-num-seqs 8 --max-num-batched-tokens 512")[1]
        self.assertEqual((given.max_num_seqs, given.max_num_batched_tokens), (8, 512))

    def test_sglang_keeps_a_share_of_what_was_free_before_loading(self):
        _, s, found = asked("llama-3.1-8b --engine sglang --engine-version 0.4.1")
        self.assertEqual(s.util, 0.88)
        self.assertAlmostEqual(found.tokens / 444500, 1, delta=0.01)  # logged, H100
        self.assertEqual(asked("llama-3.1-8b --engine sglang --util 0.5")[1].util, 0.5)

    def test_sglang_counts_the_buffers_between_gpus_before_it_loads(self):
        for line, tokens in (  # vllm#21348 and tests/data/startup_logs.jsonl
                ("qwen3-235b-a22b --weights fp8 --tp 4 --util 0.93", 367404),
                ("kimi-k2.5 --gpu mi355x --tp 8 --util 0.82604", 2454421)):
            with self.subTest(line):
                found = asked(f"{line} --engine sglang")[2]
                self.assertAlmostEqual(found.tokens / tokens, 1, delta=0.02)

    def test_a_sampler_that_may_not_be_installed_widens_the_band(self):
        line = "qwen3-235b-a22b --weights fp8 --tp 4 --engine vllm --engine-version "
        for version, optional in (("0.10", True), ("0.11", False)):
            with self.subTest(version):
                text = screen(line + version)
                self.assertEqual("8.86 where FlashInfer is not installed" in text, optional)
        self.assertLess(asked(line + "0.10")[2].low_bytes / GIB, 8.11)  # vllm#21348 logged

    def test_tensorrt_is_reckoned_with_the_share_that_its_command_has(self):
        engine = answer_json("llama-3.1-70b --tp 4 --engine trtllm --util 0.8")["engine"]
        share = float(engine["command"].split('free_gpu_memory_fraction": ')[1].split("}")[0]
                      .split(",")[0])
        self.assertAlmostEqual(share, engine["util"], delta=1e-4)
        room = engine["total_bytes"] - engine["weights_bytes"] - engine["activation_bytes"] \
            - engine["other_bytes"]
        self.assertAlmostEqual(engine["available_kv_bytes"] / room, engine["util"], delta=1e-6)

    def test_versions_are_read_as_people_and_engines_write_them(self):
        for text, version in (("0.33", (0, 33)), ("v0.14.0rc2.dev348", (0, 14, 0)), ("V0", (0,)),
                              ("0.8.5.post1", (0, 8, 5)), ("0.2x (Sep 2026)", ()),
                              ("0.1.dev8168+g475c1a0", ()), ("0.19.x dev", (0, 19))):
            with self.subTest(text):
                self.assertEqual(capacity.engine_version(text), version)
        with self.assertRaises(capacity.UserError):
            capacity.engine_version("latest")


class Blocks(unittest.TestCase):
    def test_windowed_layers_share_blocks_in_groups_of_the_rarest_kind(self):
        # gemma-3-1b on vLLM 0.13 logged 25.39 GiB, 950,864 tokens, 461.21x
        pool, tokens = pool_of("gemma-3-1b --engine vllm --engine-version 0.13 --max-model-len "
                               "2048 --max-num-batched-tokens 8192", 25.39)
        self.assertAlmostEqual(tokens / 950864, 1, delta=1e-3)
        self.assertAlmostEqual(pool.concurrency, 461.21, delta=0.2)
        self.assertEqual([g.tables for g in sorted(pool.groups, key=lambda g: g.kind)], [1, 6])

    def test_the_attention_block_grows_to_hold_a_recurrent_state(self):
        # Qwen3.6-35B-A3B, FP8 KV, vLLM 0.20: 2096 tokens a block, 82.42 GiB, 2,158,880 tokens;
        # Qwen3-Next TP=2, FP8 KV, 0.13: 17.58 GiB, 767,552 tokens, 84.29x
        pool, tokens = pool_of("qwen3.5-35b-a3b --kv fp8 --engine vllm --engine-version 0.20 "
                               "--max-model-len 65536", 82.42)
        self.assertEqual({g.block_tokens for g in pool.groups}, {2096})
        self.assertEqual(tokens, 2158880)
        pool, tokens = pool_of("qwen3-next-80b-a3b --tp 2 --kv fp8 --engine vllm --engine-version "
                               "0.13 --max-model-len 32768", 17.58)
        self.assertAlmostEqual(tokens / 767552, 1, delta=0.002)
        self.assertAlmostEqual(pool.concurrency, 84.29, delta=0.2)

    def test_the_logged_tokens_of_a_hybrid_changed_meaning(self):
        line = "gemma-3-27b --engine vllm --max-model-len 65536 --engine-version "
        old, new = (pool_of(line + version, 20)[1] for version in ("0.19", "0.21"))
        self.assertGreater(new, 2 * old)

    def test_a_latent_and_its_indexer_are_one_group(self):
        # GLM-5.1-FP8 TP=8: 32.06 GiB, 343,744 tokens
        pool, tokens = pool_of("glm-5 --tp 8 --weights fp8 --gpu h200 --engine vllm "
                               "--engine-version 0.19 --max-model-len 202752", 32.06)
        self.assertAlmostEqual(tokens / 343744, 1, delta=0.002)
        self.assertAlmostEqual(pool.concurrency, 1.70, delta=0.01)

    def test_the_poorest_stage_decides(self):
        args = capacity.parse_args("llama-3.1-8b --pp 2 --engine vllm".split())
        d = capacity.deployment_of(args, TABLES)
        pool = capacity.vllm_pool(d, capacity.settings_of(d, args), [8 * GIB, 4 * GIB])
        self.assertEqual(pool.blocks, 4 * GIB // (16 * 4096 * 16))


class Refusals(unittest.TestCase):
    REFUSED = (
        "llama-3.1-8b --gpu l4 --max-model-len 131072",
        "llama-3.1-70b",
        "llama-3.1-70b --tp 2 --engine-version 0.11",
        "qwen3.5-27b --max-model-len 4096",
        "deepseek-v3 --tp 32 --gpu h200 --link ndr",
        "qwen2.5-14b --weights awq --tp 8",
        "llama-3.1-8b --max-num-batched-tokens 512",
        "llama-3.1-8b --max-model-len 200000",
        "llama-3.1-8b --util 1",
        "minimax-m2 --tp 8 --gpu h200",
        "glm-4.6 --tp 8 --weights awq --gpu h200")

    def test_each_refusal_is_cured_by_the_flag_it_names(self):
        for line in self.REFUSED:
            line += " --engine vllm"
            with self.subTest(line):
                refusals = asked(line)[2].refusals
                self.assertTrue(refusals)
                words = line.split() + refusals[0].cure.replace(
                    "--enable-expert-parallel", "--ep all").split()
                args = capacity.parse_args(words)
                d = capacity.deployment_of(args, TABLES)
                after = capacity.engine_answer(d, capacity.settings_of(d, args)).refusals
                kinds = [r.what.split(":")[0] for r in after]
                self.assertNotIn(refusals[0].what.split(":")[0], kinds)

    def test_what_starts_is_not_refused(self):
        for line in ("llama-3.1-8b", "llama-3.1-70b --tp 4", "qwen3-30b-a3b --weights fp8 --tp 2",
                     "deepseek-v3 --gpu h200 --tp 8", "qwen2.5-14b --weights awq --tp 4",
                     "gpt-oss-120b --tp 8", "gpt-oss-120b --tp 4"):  # MXFP4 experts are padded
            with self.subTest(line):
                self.assertEqual(asked(line + " --engine vllm")[2].refusals, [])

    def test_fp8_has_blocks_only_where_the_checkpoint_itself_is_fp8(self):
        shard = "fp8 scales do not divide"
        for line, refused in (("qwen3-235b-a22b --weights fp8 --tp 8", False),  # made at load
                              ("minimax-m2 --gpu h200 --tp 8", True)):
            with self.subTest(line):
                whats = [r.what for r in asked(line + " --engine vllm")[2].refusals]
                self.assertEqual(any(what.startswith(shard) for what in whats), refused)
        for made_by, refused in (("Qwen/Qwen3-235B-A22B-FP8", True),
                                 ("RedHatAI/Qwen3-235B-A22B-FP8-dynamic", False)):
            with self.subTest(made_by):
                args = capacity.parse_args(["--from", f"vllm serve {made_by} -tp 8"])
                d = capacity.deployment_of(args, TABLES)
                found = capacity.engine_answer(d, capacity.settings_of(d, args))
                self.assertEqual(any(r.kind == "shard" for r in found.refusals), refused)
        self.assertEqual(capacity.stored_as(deployment("qwen3-235b-a22b --weights fp8"))
                         .rules[0][1].block, 1)

    def test_sglang_refuses_experts_whose_blocks_tp_cuts(self):
        for line in ("minimax-m2 --gpu h200", f"{CONFIGS}/Qwen--Qwen3-30B-A3B-FP8"):
            with self.subTest(line):
                line += " --tp 8 --engine sglang"
                refusal = asked(line)[2].refusals[0]
                self.assertTrue(refusal.what.startswith("fp8 scales do not divide"))
                self.assertEqual(refusal.cure, "--ep-size 8")
                self.assertEqual(asked(f"{line} {refusal.cure}")[2].refusals, [])

    def test_keys_that_end_within_a_block_load_since_vllm_014(self):
        for version, refused in (("0.13", True), ("0.14", False), ("0.33", False)):
            line = f"mimo-v2-flash --gpu h200 --tp 4 --engine vllm --engine-version {version}"
            with self.subTest(version):
                self.assertEqual(any(r.kind == "shard" for r in asked(line)[2].refusals), refused)
        self.assertEqual(asked("mimo-v2-flash --gpu h200 --tp 4 --engine sglang")[2].refusals, [])

    def test_published_awq_copies_are_padded_for_tp(self):
        args = capacity.parse_args(["--from", "vllm serve Qwen/Qwen2.5-72B-Instruct-AWQ -tp 4",
                                    "--gpu", "a100"])
        d = capacity.deployment_of(args, TABLES)
        self.assertEqual(capacity.engine_answer(d, capacity.settings_of(d, args)).refusals, [])
        for line in ("qwen2.5-72b --tp 8", "qwen2.5-vl-72b --tp 2"):
            with self.subTest(line):
                line += " --weights awq --gpu a100 --engine vllm"
                self.assertEqual(asked(line)[2].refusals, [])

    def test_an_empty_pool_is_not_cured_by_a_shorter_context(self):
        found = asked("deepseek-v4-flash --tp 1 --engine vllm --max-model-len 2000000")[2]
        self.assertIn("--tensor-parallel-size", found.refusals[-1].cure)
        self.assertNotIn("--max-model-len", found.refusals[-1].cure)
        self.assertEqual([r.kind for r in found.refusals], ["length", "room"])

    def test_fewer_sequences_are_tried_before_the_last_of_the_memory(self):
        for ctx, cure in ((8192, "--max-num-seqs 256"),
                          (23008, "--max-num-seqs 256 --gpu-memory-utilization 0.92")):
            with self.subTest(ctx):
                found = asked(f"llama-3.1-70b --tp 2 --ctx {ctx} --engine vllm")[2]
                self.assertEqual(found.refusals[0].cure, cure)
        given = asked("llama-3.1-70b --tp 2 --max-num-seqs 1024 --engine vllm")[2]
        self.assertNotIn("--max-num-seqs", given.refusals[0].cure)

    def test_sglang_and_tensorrt_refuse_a_request_past_their_pool(self):
        for line in ("llama-3.1-70b --tp 2 --ctx 131072 --engine trtllm",
                     "llama-3.1-8b --gpu l4 --engine sglang"):
            with self.subTest(line):
                found = asked(line)[2]
                self.assertLess(found.concurrency, 1)
                cured = asked(f"{line} {found.refusals[0].cure}")[2]
                self.assertGreaterEqual(cured.concurrency, 1)

    def test_the_default_context_is_never_past_the_model_s_own(self) -> None:
        d, _, found = asked("llama-2-7b --engine vllm --concurrency 8 --input-len 128")
        self.assertEqual((d.ctx_tokens, found.refusals), (4096, []))
        d, _, found = asked("llama-2-7b --engine vllm --ctx 8192")
        self.assertEqual((d.ctx_tokens, found.refusals[0].cure), (8192, "--max-model-len 4096"))

    def test_slots_past_any_default_are_a_cause_to_cure(self) -> None:
        refusal, = asked("nemotron-3-nano-30b-a3b --tp 1 --engine vllm --max-num-seqs 4096")[
            2].refusals
        self.assertEqual(refusal.cure, "--max-num-seqs 256")

    def test_cures_taken_in_turn_end_and_none_comes_back(self):
        names = sorted(row["name"] for row in TABLES["models"])
        gpus = sorted(row["name"] for row in TABLES["gpus"])
        chosen = random.Random(0)
        lines = [f"{chosen.choice(names)} --gpu {chosen.choice(gpus)} --tp "
                 f"{chosen.choice((1, 1, 2, 4, 8))} --ctx {chosen.choice((8192, 65536, 262144))}"
                 f" --engine {chosen.choice(('vllm', 'vllm', 'sglang', 'trtllm'))}"
                 + chosen.choice(("", "", " --weights fp8", " --weights awq", " --util 0.99",
                                  " --spec-accept 0.8")) for _ in range(55)]
        lines += [f"{line} --engine vllm" for line in (
            "mimo-v2-flash --gpu a100", "kimi-k2 --gpu h100 --tp 4", "glm-5.2 --tp 8",
            "glm-5.3 --tp 8", "glm-4.6 --tp 8 --weights awq --gpu h200", "deepseek-v4-flash",
            "deepseek-v4-pro --gpu a100 --util 1")]
        cures = 0
        for line in lines:
            with self.subTest(line):
                try:
                    refusals = asked(line)[2].refusals
                except capacity.UserError:
                    continue  # that TP does not divide its heads
                for _ in range(4):
                    if not refusals or refusals[0].cure == capacity.NO_CURE:
                        break
                    before, line = refusals[0].kind, f"{line} {refusals[0].cure}"
                    refusals, cures = asked(line)[2].refusals, cures + 1
                    self.assertNotIn(before, [r.kind for r in refusals])
                self.assertTrue(not refusals or refusals[0].cure == capacity.NO_CURE, line)
        self.assertGreater(cures, 20)

    def test_the_longest_context_is_the_one_that_just_fits(self):
        d, s, found = asked("llama-3.1-8b --gpu l4 --max-model-len 131072 --engine vllm")
        longest = capacity.longest_that_fits(found.pool, d, s)
        self.assertIn(f"--max-model-len {longest}", found.refusals[0].cure)
        self.assertEqual(longest, (found.pool.blocks - 1) * 16)

    def test_json_has_the_keys(self):
        engine = answer_json("llama-3.1-8b --engine vllm --engine-version 0.11")["engine"]
        for key in ("available_kv_bytes", "kv_cache_tokens", "num_gpu_blocks", "max_concurrency",
                    "weights_bytes", "refusals"):
            self.assertIn(key, engine)
        self.assertEqual(engine["refusals"], [])
        refused = answer_json("llama-3.1-70b --engine vllm")["engine"]["refusals"]
        self.assertEqual(set(refused[0]), {"what", "cure"})

    def test_the_default_answer_stays_as_it_is_without_the_flag(self):
        self.assertNotIn("engine", answer_json("llama-3.1-8b"))

    def test_each_formula_gives_its_value(self):
        args = capacity.parse_args("qwen3-8b --engine vllm --tp 2".split())
        answer = capacity.answer_for(capacity.deployment_of(args, TABLES), args, TABLES)
        steps = [s for s in answer.steps if s.key.startswith("engine.") and s.formula]
        self.assertTrue(steps)
        for step in steps:
            value = eval(step.formula, {"__builtins__": {}}, dict(step.numbers))
            self.assertAlmostEqual(value / step.value, 1, delta=1e-9)


V1_LOG = """
INFO 08-27 Initializing a V1 LLM engine (v0.10.1.1) with config: model='Qwen/Qwen2-7B-Instruct', \
max_seq_len=16384, tensor_parallel_size=1, pipeline_parallel_size=1
INFO 08-27 [gpu_model_runner.py:2007] Model loading took 14.2488 GiB and 5.6 seconds
INFO 08-27 [gpu_worker.py:276] Available KV cache memory: 5.01 GiB
INFO 08-27 [kv_cache_utils.py:849] GPU KV cache size: 93,872 tokens
INFO 08-27 [kv_cache_utils.py:853] Maximum concurrency for 16,384 tokens per request: 5.73x
INFO 08-27 [gpu_model_runner.py:2708] Graph capturing finished in 5 secs, took 0.50 GiB
"""
V0_LOG = """
the current vLLM instance can use total_gpu_memory (22.07GiB) x gpu_memory_utilization (0.90) = \
19.86GiB
model weights take 14.99GiB; non_torch_memory takes 0.05GiB; PyTorch activation peak memory takes \
0.22GiB; the rest of the memory reserved for KV Cache is 4.60GiB.
INFO executor_base.py:110] # CUDA blocks: 2356, # CPU blocks: 2048
INFO executor_base.py:115] Maximum concurrency for 131072 tokens per request: 0.29x
"""
NEW_LOG = """
model_runner.py:407] Model loading took 15.0 GiB memory and 5.420225 seconds
gpu_worker.py:692] Available KV cache memory: 56.21 GiB
kv_cache_utils.py:2464] GPU KV cache size: 460,496 tokens, Maximum concurrency for 131,072 tokens \
per request: 3.51x
gpu_worker.py:955] Free memory on device (78.84/79.25 GiB) on startup. Desired GPU memory \
utilization is (0.92, 72.91 GiB). Actual usage is 15.26 GiB for consumed memory (weights + \
non-torch), 1.44 GiB for peak activation, and 0.23 GiB for CUDAGraph memory.
"""
SGLANG_LOG = """
[2025-01-10 TP0] server_args=ServerArgs(model_path='meta-llama/Meta-Llama-3.1-8B-Instruct', \
mem_fraction_static=0.88, tp_size=1)
[2025-01-10 TP0] Load weight begin. avail mem=78.81 GB
[2025-01-10 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.72 GB, \
mem usage=15.09 GB.
[2025-01-10 TP0] KV Cache is allocated. #tokens: 444500, K size: 27.13 GB, V size: 27.13 GB
[2025-01-10 TP0] max_total_num_tokens=444500, chunked_prefill_size=8192, context_len=131072
"""


ARGS_LOG = """
INFO 09-10 [api_server.py:1896] vLLM API server version 0.10.2
INFO 09-10 [utils.py:328] non-default args: {'model_tag': 'Qwen/Qwen3-8B', 'model': \
'Qwen/Qwen3-8B', 'max_model_len': 16384, 'quantization': 'fp8', 'gpu_memory_utilization': 0.85, \
'kv_cache_dtype': 'fp8', 'max_num_batched_tokens': 2048, 'max_num_seqs': 64}
INFO 09-10 [core.py:654] Initializing a V1 LLM engine (v0.10.2) with config: \
model='Qwen/Qwen3-8B', speculative_config=None, dtype=torch.bfloat16, max_seq_len=16384, \
tensor_parallel_size=1, quantization=fp8, kv_cache_dtype=fp8, seed=0
INFO 09-10 [gpu_model_runner.py:2392] Model loading took 8.8 GiB and 5.6 seconds
INFO 09-10 [gpu_worker.py:298] Available KV cache memory: 56.0 GiB
INFO 09-10 [kv_cache_utils.py:864] GPU KV cache size: 815,536 tokens
"""
USAGE = """Free memory on device (78.69/79.2 GiB) on startup. Desired GPU memory utilization is \
(0.9, 71.28 GiB). Actual usage is 37.99 GiB for weight, 4.71 GiB for peak activation, 1.84 GiB for \
non-torch memory, and 0.62 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with \
`--kv-cache-memory=26559211520` to fit into requested memory. Current kv cache memory in use is \
26.74 GiB.
"""


class StartupLog(unittest.TestCase):
    def refused(self, line, log):
        """The one line that a command with this log ends with, at exit 2."""
        import contextlib
        import io
        stderr, stdout = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
            code = capacity.main([*line.split(), "--startup-log", self.written(log)])
        self.assertEqual((code, stdout.getvalue()), (2, ""))
        self.assertEqual(stderr.getvalue().count("\n"), 1)
        return stderr.getvalue()

    def written(self, text):
        handle, name = tempfile.mkstemp(".log")
        self.addCleanup(os.unlink, name)
        with os.fdopen(handle, "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
        return name

    def test_any_version_s_wording_is_read(self):
        v1 = capacity.parse_startup_log(V1_LOG)
        self.assertEqual((v1["version"], v1["kv_cache_tokens"], v1["tp"]), ((0, 10, 1), 93872, 1))
        self.assertAlmostEqual(v1["available_kv_bytes"] / GIB, 5.01)
        self.assertAlmostEqual(v1["captured_bytes"] / GIB, 0.5)
        v0 = capacity.parse_startup_log(V0_LOG)
        self.assertEqual((v0["num_gpu_blocks"], v0["util"]), (2356, 0.9))
        for key, gib in (("total_bytes", 22.07), ("weights_bytes", 14.99), ("other_bytes", 0.05),
                         ("activation_bytes", 0.22), ("available_kv_bytes", 4.60)):
            self.assertAlmostEqual(v0[key] / GIB, gib)
        new = capacity.parse_startup_log(NEW_LOG)
        self.assertEqual((new["kv_cache_tokens"], new["max_concurrency"]), (460496, 3.51))
        self.assertAlmostEqual(new["total_bytes"] / GIB, 79.25)
        sglang = capacity.parse_startup_log(SGLANG_LOG)
        self.assertEqual((sglang["engine"], sglang["kv_cache_tokens"]), ("sglang", 444500))
        self.assertAlmostEqual(sglang["available_kv_bytes"] / GIB, 54.26)
        self.assertAlmostEqual(sglang["weights_bytes"] / GIB, 15.09)

    def test_the_worst_rank_counts(self):
        text = "\n".join(f"Model loading took {w} GiB\nAvailable KV cache memory: {k} GiB"
                         for w, k in ((27.63, 5.71), (28.48, 3.58)))
        found = capacity.parse_startup_log(text)
        self.assertAlmostEqual(found["weights_bytes"] / GIB, 28.48)
        self.assertAlmostEqual(found["available_kv_bytes"] / GIB, 3.58)

    def test_the_inferred_reserve_predicts_the_log_itself(self):
        for log, line in ((V1_LOG, "qwen2-7b --gpu a100 --util 0.25"),
                          (V0_LOG, "llama-3.1-8b --gpu a10g"), (NEW_LOG, "llama-3.1-8b"),
                          (SGLANG_LOG, "llama-3.1-8b")):
            with self.subTest(line):
                answer = answer_json(f"{line} --startup-log {self.written(log)}")
                logged = capacity.parse_startup_log(log)
                self.assertAlmostEqual(answer["engine"]["available_kv_bytes"]
                                       / logged["available_kv_bytes"], 1, delta=1e-6)
                self.assertAlmostEqual(answer["engine"]["kv_cache_tokens"]
                                       / logged.get("kv_cache_tokens", 37696), 1, delta=0.002)
                self.assertIn("predicted_available_kv_bytes", answer["startup_log"])

    def test_the_reserve_carries_over_to_another_utilisation(self):
        name = self.written(NEW_LOG)
        low, high = (answer_json(f"llama-3.1-8b --util {u} --startup-log {name}")
                     ["engine"]["available_kv_bytes"] for u in (0.8, 0.92))
        self.assertAlmostEqual((high - low) / GIB, 0.12 * 79.25, delta=0.01)

    def test_the_budget_is_given_again_with_that_reserve(self):
        answer = answer_json(f"llama-3.1-8b --startup-log {self.written(NEW_LOG)}")
        reserve = answer["startup_log"]["reserve_bytes"]
        self.assertAlmostEqual(reserve / GIB, 72.91 - 15.0 - 56.21, delta=0.01)
        again = answer_json(f"llama-3.1-8b --util 0.92 --reserve-gib {reserve / GIB}")
        self.assertAlmostEqual(answer["startup_log"]["budget_max_kv_tokens"],
                               again["memory"]["max_kv_tokens"], delta=2)

    def test_odd_input_is_one_line(self):
        import contextlib
        import io
        for text in ("", "hello\n", b"\xff\xfe\x00" * 1000, "Model loading took GiB\n" * 3,
                     "Available KV cache memory: --5.-1 GiB"):
            with self.subTest(text[:20]):
                stderr = io.StringIO()
                with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
                    code = capacity.main(["llama-3.1-8b", "--startup-log", self.written(text)])
                self.assertEqual(code, 2)
                self.assertEqual(stderr.getvalue().count("\n"), 1)
        with self.assertRaises(capacity.UserError):
            capacity.parse_args(["llama-3.1-8b", "--startup-log", "/no/such/file"])

    def test_the_reserve_of_a_log_is_called_that(self):
        text = screen("llama-3.1-8b --startup-log " + self.written(NEW_LOG))
        self.assertIn("+ reserve (logged) 1.70", text)
        self.assertNotIn("not torch's", text[text.index("ENGINE"):])

    def test_no_memory_for_kv_is_called_none(self):
        log = NEW_LOG.replace("56.21 GiB", "-0.03 GiB").replace("15.0 GiB", "71.24 GiB")
        text = screen("llama-3.1-8b --startup-log " + self.written(log))
        self.assertIn("Available KV cache memory: none (0.03 GiB short)", text)

    def test_a_log_says_its_own_batch_limits_and_precisions(self):
        line = f"qwen3-8b --startup-log {self.written(ARGS_LOG)}"
        engine = answer_json(line)["engine"]
        self.assertEqual((engine["max_num_seqs"], engine["max_num_batched_tokens"]), (64, 2048))
        self.assertEqual((engine["max_model_len"], engine["util"]), (16384, 0.85))
        self.assertAlmostEqual(engine["kv_cache_tokens"] / 815536, 1, delta=1e-3)
        text = screen(line)
        self.assertIn("read from it: --weights fp8, --kv fp8, max_num_seqs 64, "
                      "max_num_batched_tokens 2048", text)
        self.assertNotIn("WARNING", text)
        self.assertNotIn("with its own defaults", text)
        engine = answer_json(line + " --max-num-seqs 128")["engine"]  # a flag goes before it
        self.assertEqual(engine["max_num_seqs"], 128)

    def test_a_log_s_limits_are_those_of_every_line(self):
        log = f"qwen3-8b --startup-log {self.written(ARGS_LOG)}"
        flags = ("qwen3-8b --weights fp8 --kv fp8 --max-num-seqs 64 --max-num-batched-tokens 2048 "
                 "--util 0.85 --ctx 16384 --engine vllm --engine-version 0.10.2 --tp 1")
        work = (" --rate 60 --input-len 1000 --output-len 200 --slo-tpot-ms 50 --slo-ttft-ms 1000 "
                "--gpu-price h100=2.5,l4=0.1")
        for more in ("", " --max-num-seqs 32 --util 0.9 --ctx 8192 --kv bf16", work):
            with self.subTest(more):
                found, same = answer_json(log + more), answer_json(flags + more)
                for part in set(same) - {"engine"}:
                    self.assertEqual(found[part], same[part], part)
                self.assertEqual(found["engine"]["command"], same["engine"]["command"])
        text = screen(log + work)
        self.assertNotIn("SEARCH", text)
        for line in ("util 0.85", "(0.85 x 80 = 68.00)", "max-num-seqs 64 (as given",
                     "max-model-len 16384 (as given; p99.9 context 2048)",
                     "--max-num-batched-tokens 2048", "max_num_seqs 64,"):
            self.assertIn(line, text)
        text = screen(log + " --engine vllm")
        self.assertNotIn("the engine's own defaults", text)
        self.assertNotIn("read from it: --weights fp8, --kv fp8, max_num_seqs", screen(
            log + " --max-num-seqs 32"))
        self.assertIn("the log does not name --max-num-seqs", screen(
            f"llama-3.1-8b --engine vllm --startup-log {self.written(NEW_LOG)}"))

    def test_a_log_that_contradicts_the_flags_is_said_to(self):
        name = self.written(ARGS_LOG)
        text = screen("qwen3-8b --gpu l4 --util 0.99 --weights bf16 --kv bf16 --startup-log "
                      + self.written(ARGS_LOG.replace("56.0 GiB", "3.0 GiB")))
        self.assertIn("WARNING: the log's weights are fp8, the deployment's bf16", text)
        self.assertIn("WARNING: the log's KV cache is fp8, the deployment's bf16", text)
        text = screen(f"qwen3-8b --weights bf16 --startup-log {name}")
        self.assertIn("= weights 15.27 + reserve (logged)", text)
        text = screen(f"qwen3-8b --engine sglang --engine-version 0.5 --startup-log {name}")
        self.assertIn("WARNING: the log is vllm's: --engine sglang is not used", text)
        self.assertIn("ENGINE vllm 0.10.2:", text)
        text = screen("llama-3.1-8b --gpu h200 --startup-log " + self.written(NEW_LOG))
        self.assertIn("WARNING: the log's GPU has 79.25 GiB, h200 139.80", text)
        plain = ARGS_LOG.replace("quantization=fp8", "quantization=None").replace(
            "'quantization': 'fp8', ", "").replace("8.8 GiB", "15.3 GiB").replace(
                "56.0", "48.0")
        self.assertIn("WARNING: the log's weights are bf16, the deployment's fp8",
                      screen("qwen3-8b --weights fp8 --startup-log " + self.written(plain)))

    def test_a_log_that_is_grossly_off_is_of_another_deployment(self):
        wide = ARGS_LOG.replace("quantization=fp8", "quantization=None").replace(
            "'quantization': 'fp8', ", "").replace("torch.bfloat16", "torch.float32").replace(
                "8.8 GiB", "30.55 GiB").replace("56.0", "34.2").replace("815,536", "498,000")
        halved = SGLANG_LOG.replace("tp_size=1", "tp_size=1, quantization='fp8', "
                                    "kv_cache_dtype='fp8_e5m2'")
        for model, log, said in (
                ("qwen3-8b", wide, "weights +100%, KV tokens -34% against"),
                ("llama-3.1-8b", halved, "weights +78%, KV tokens -55% against")):
            text = screen(f"{model} --startup-log {self.written(log)}")
            self.assertEqual(text.count("WARNING"), 1)
            self.assertIn(f"the log is of another deployment than described: {said}", text)
            self.assertNotIn("reserve (logged) -", text)
        for line, log in (("llama-3.1-8b", SGLANG_LOG), ("llama-3.1-8b", NEW_LOG),
                          ("llama-3.1-8b --gpu a10g", V0_LOG), ("qwen3-8b", ARGS_LOG),
                          ("qwen2-7b --gpu a100 --util 0.25", V1_LOG)):
            text = screen(f"{line} --startup-log {self.written(log)}")
            self.assertNotIn("WARNING", text)
            self.assertNotIn("reserve (logged) -", text)
        for row in map(json.loads, bench_logs.ROWS.read_text().splitlines()):
            if "ask" in row and row["confidence"] != "low" and row.get("model_loading_gib"):
                log = {"weights_bytes": row["model_loading_gib"] * GIB}
                if row.get("kv_cache_tokens"):
                    log["kv_cache_tokens"] = row["kv_cache_tokens"]
                self.assertEqual(capacity.gross_difference(log, asked(row["ask"])[2]), "",
                                 row["ask"])

    def test_a_log_of_another_model_is_refused(self):
        self.assertIn("is of Qwen/Qwen3-8B, the deployment of llama-3.1-8b",
                      self.refused("llama-3.1-8b", ARGS_LOG))
        self.refused("mistral-7b-v0.3", ARGS_LOG.replace("Qwen/Qwen3-8B", "x/Llama-3.1-8B-FP8"))
        tuned = ARGS_LOG.replace("Qwen/Qwen3-8B", "/models/my-tune")
        self.assertIn("engine", answer_json("llama-3.1-8b --startup-log " + self.written(tuned)))

    def test_the_usage_line_gives_weights_and_kv_too(self):
        for log in (USAGE, USAGE.replace("26.74 GiB", f"{26.74 * GIB:.0f} bytes")):
            found = capacity.parse_startup_log(log)
            for key, gib in (("weights", 37.99), ("activation", 4.71), ("other", 1.84),
                             ("available_kv", 26.74), ("total", 79.2)):
                self.assertAlmostEqual(found[f"{key}_bytes"] / GIB, gib)
        found = capacity.parse_startup_log(NEW_LOG)
        self.assertAlmostEqual(found["consumed_bytes"] / GIB, 15.26)
        self.assertIn("weights and not torch's: logged 15.26 GiB, predicted",
                      screen("llama-3.1-8b --startup-log " + self.written(NEW_LOG)))

    def test_the_last_start_of_a_file_counts(self):
        first = ARGS_LOG.replace("56.0", "3.0").replace("'max_num_seqs': 64", "'seed': 1")
        for log in (first + ARGS_LOG, V1_LOG + ARGS_LOG, first + ARGS_LOG + ARGS_LOG[:300]):
            found = capacity.parse_startup_log(log)
            self.assertAlmostEqual(found["available_kv_bytes"] / GIB, 56)
            self.assertEqual((found["max_num_seqs"], found["starts"]), (64, 2))
        ranks = "".join(f"(EngineCore_DP{i}) Initializing a V1 LLM engine (v0.11.0) with config: "
                        f"model='a'\nAvailable KV cache memory: {i + 1} GiB\n" for i in range(3))
        self.assertEqual(capacity.parse_startup_log(ranks)["available_kv_bytes"], GIB)

    def test_a_development_build_has_no_version(self):
        log = ARGS_LOG.replace("0.10.2", "0.1.dev8168+g475c1a0")
        self.assertEqual(capacity.parse_startup_log(log)["version"], ())
        self.assertIn("ENGINE vllm (version not given)",
                      screen("qwen3-8b --startup-log " + self.written(log)))

    def test_colours_and_other_encodings_are_read(self):
        colours = ARGS_LOG.replace("56.0 GiB", "\x1b[1m56.0\x1b[0m GiB").replace(
            "8.8 GiB", "[1;36m8.8[0m GiB")
        for log in (colours, ARGS_LOG.encode("utf-16"), ARGS_LOG.encode("utf-16-le"),
                    ARGS_LOG.encode("utf-8-sig")):
            with self.subTest(log[:4]):
                found = capacity.read_startup_log(self.written(log))
                self.assertAlmostEqual(found["available_kv_bytes"] / GIB, 56)
                self.assertAlmostEqual(found["weights_bytes"] / GIB, 8.8)

    def test_sglang_counts_the_ranks_of_dp_attention_in_its_tp(self):
        log = SGLANG_LOG.replace("tp_size=1", "moe_dense_tp_size=1, tp_size=8, dp_size=8, "
                                 "enable_dp_attention=True")
        self.assertEqual(capacity.parse_startup_log(log)["tp"], 1)

    def test_sglang_s_running_requests_are_the_sequences(self):
        args = SGLANG_LOG.replace("tp_size=1", "tp_size=1, max_running_requests=48")
        came = SGLANG_LOG.replace("chunked_prefill_size=8192", "chunked_prefill_size=8192, "
                                  "max_prefill_tokens=16384, max_running_requests=40")
        ranks = came.replace("tp_size=1", "tp_size=2, dp_size=2, enable_dp_attention=True, "
                             "max_running_requests=80")
        for log, seqs in ((args, 48), (came, 40), (ranks, 80), (SGLANG_LOG, None)):
            self.assertEqual(capacity.parse_startup_log(log).get("max_num_seqs"), seqs)
        text = screen("llama-3.1-8b --startup-log " + self.written(args))
        self.assertIn("read from it: max_num_seqs 48,", text)
        self.assertIn("--max-running-requests 48", text)
        self.assertNotIn("does not name", text)

    def test_figures_that_no_engine_logs_are_refused(self):
        room = "Available KV cache memory: 5.0 GiB"
        for log in (f"Available KV cache memory: {'9' * 400} GiB",
                    f"GPU KV cache size: {'9' * 30} tokens",
                    "GPU KV cache size: 999999999999 tokens",
                    f"total_gpu_memory (0.0GiB) x gpu_memory_utilization (0.90)\n{room}",
                    f"total_gpu_memory (79.0GiB) x gpu_memory_utilization (5.0)\n{room}",
                    f"total_gpu_memory (-79.0GiB) x gpu_memory_utilization (0.9)\n{room}",
                    "Available KV cache memory: 500 GiB", "Model loading took -5 GiB",
                    f"tensor_parallel_size=0, x\n{room}"):
            with self.subTest(log[:60]):
                self.assertLess(len(self.refused("llama-3.1-8b", log)), 250)

    def test_a_reserve_too_large_to_be_one_is_doubted(self):
        log = "Model loading took 15.0 GiB\nAvailable KV cache memory: 3.0 GiB"
        text = screen("llama-3.1-8b --startup-log " + self.written(log))
        self.assertIn("WARNING: a reserve of 53.27 GiB is more than engines take", text)
        text = screen("llama-3.1-8b --startup-log " + self.written(
            "Available KV cache memory: 0.0 GiB"))
        self.assertIn("none (0.00 GiB short)", text)
        self.assertIn("KV memory: logged none, predicted 51.35 GiB ", text)

    def test_a_reserve_under_nothing_is_not_proposed(self):
        text = screen("llama-3.1-8b --startup-log " + self.written(
            SGLANG_LOG.replace("27.13 GB", "27.20 GB")))
        self.assertIn("(--reserve-gib 0.00)", text)

    def test_a_log_of_another_tp_is_refused(self):
        name = self.written(V1_LOG)
        with self.assertRaisesRegex(capacity.UserError, "TP=1"):
            answer_json(f"qwen2-7b --tp 2 --startup-log {name}")


if __name__ == "__main__":
    unittest.main()
