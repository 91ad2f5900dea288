"""Models: counting from config.json, presets, KV cache, quantised bytes, reading and fetching.

    python3 -m unittest tests.test_models
"""
import contextlib
import copy
import http.server
import json
import os
import socket
import struct
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import capacity

DATA = Path(__file__).resolve().parent / "data"
CONFIGS = DATA / "configs"
EXPECTED = json.loads((CONFIGS / "expected.json").read_text())
FACTS = json.loads((DATA / "kv_cache.json").read_text())
PRESETS = json.loads(Path(capacity.__file__).with_name("presets.json").read_text())["models"]


def config_of(name):
    return json.loads((CONFIGS / name / "config.json").read_text())


def model_of(config, quant=None):
    return capacity.build_model(capacity.normalise(config, quant))


def tiny(**changes):
    """A small Llama config with changes; None removes nothing, it is null in the JSON."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4,
        "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
        "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    config.update(changes)
    return config


def layers_by_kind(model):
    found = {}
    for cache in model.caches:
        found[cache.kind] = found.get(cache.kind, 0) + cache.layers
    return found


class Counting(unittest.TestCase):
    def test_published_configs_count_exactly(self):
        for name, expected in EXPECTED.items():
            with self.subTest(name):
                config, quant, _, _ = capacity.read_checkpoint(str(CONFIGS / name))
                model = model_of(config, quant)
                self.assertEqual(model.params_exact, expected["total_params"])
                self.assertEqual(model.active_params, expected["active_params"])
                self.assertFalse(model.estimated)

    def test_tensors_add_up_to_the_total(self):
        for name in EXPECTED:
            model = model_of(config_of(name))
            self.assertEqual(sum(t.params for t in model.tensors), model.params_exact, name)

    def test_families_without_a_preset_count_exactly(self):
        cases = {  # published totals
            2779683840: {
                "architectures": ["PhiForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 32,
                "num_attention_heads": 32, "intermediate_size": 10240, "vocab_size": 51200,
            },
            20554567680: {
                "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 6144, "num_hidden_layers":
                44, "num_attention_heads": 64, "intermediate_size": 24576, "vocab_size": 50432,
            },
            51570323328: {
                "architectures": ["JambaForCausalLM"], "hidden_size": 4096, "num_hidden_layers":
                32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size":
                14336, "vocab_size": 65536, "num_experts": 16, "num_experts_per_tok": 2,
                "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256,
            },
            6921720704: {
                "architectures": ["FalconForCausalLM"], "hidden_size": 4544, "num_hidden_layers":
                32, "num_attention_heads": 71, "num_kv_heads": 71, "vocab_size": 65024,
                "multi_query": True, "parallel_attn": True,
            },
            41303293952: {
                "architectures": ["FalconForCausalLM"], "hidden_size": 8192, "num_hidden_layers":
                60, "num_attention_heads": 128, "num_kv_heads": 8, "vocab_size": 65024,
                "new_decoder_architecture": True,
            },
            15957889024: {
                "architectures": ["Starcoder2ForCausalLM"], "hidden_size": 6144,
                "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 4,
                "intermediate_size": 24576, "vocab_size": 49152, "use_bias": True,
                "tie_word_embeddings": False,
            },
            34980831232: {
                "architectures": ["CohereForCausalLM"], "hidden_size": 8192, "num_hidden_layers":
                40, "num_attention_heads": 64, "intermediate_size": 22528, "vocab_size": 256000,
            },
            7298617344: {
                "architectures": ["Olmo2ForCausalLM"], "hidden_size": 4096, "num_hidden_layers":
                32, "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 100352,
            },
            331196416: {
                "architectures": ["OPTForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 24,
                "num_attention_heads": 16, "ffn_dim": 4096, "vocab_size": 50272,
                "max_position_embeddings": 2048, "word_embed_proj_dim": 512,
                "do_layer_norm_before": False,
            },
        }
        for total, config in cases.items():
            with self.subTest(config["architectures"][0]):
                self.assertEqual(model_of(config).params_exact, total)

    def test_head_dim_is_taken_from_the_config_not_from_hidden_by_heads(self):
        self.assertEqual(model_of(config_of("Qwen--Qwen3-0.6B")).head_dim, 128)
        self.assertEqual(model_of(tiny(head_dim=0)).head_dim, 32)
        self.assertEqual(model_of(tiny(head_dim=None)).head_dim, 32)

    def test_missing_or_null_kv_heads_mean_multi_head_attention(self):
        self.assertEqual(model_of(tiny(num_key_value_heads=None)).kv_heads, 8)

    def test_the_outer_tie_word_embeddings_wins(self):
        inner = tiny(tie_word_embeddings=True, model_type="llama")
        outer = {"architectures": ["LlavaForConditionalGeneration"], "text_config": inner,
                 "tie_word_embeddings": False}
        model = model_of(outer)
        self.assertFalse(model.tied)
        self.assertTrue(any("tie_word_embeddings" in note for note in model.notes))

    def test_an_unknown_architecture_is_an_estimate(self):
        model = model_of(tiny(architectures=["NovelForCausalLM"], model_type="novel"))
        self.assertTrue(model.estimated)
        self.assertEqual(model.params_exact, model_of(tiny()).params_exact)


class Presets(unittest.TestCase):
    def test_every_preset_reproduces_its_counts(self):
        for row in PRESETS:
            facts = FACTS[row["name"]]
            if facts["total_params"] is None:
                continue
            with self.subTest(row["name"]):
                model = capacity.build_model(row)
                self.assertEqual(model.params_exact, facts["total_params"])
                self.assertEqual(model.params_exact, row.get("params_exact", row["params"]))
                self.assertEqual(model.active_params, facts["active_params"])

    def test_every_preset_caches_what_the_facts_say(self):
        for row in PRESETS:
            facts = FACTS[row["name"]]["kv_cache"]
            model = capacity.build_model(row)
            kinds = layers_by_kind(model)

            def elements(*names, caches=model.caches):
                return sum(c.layers * c.heads * c.elements for c in caches if c.kind in names)

            with self.subTest(row["name"]):
                if facts["kind"] == "gqa":
                    self.assertEqual(elements("full"), facts["elements_per_token_full"])
                    self.assertEqual(elements("sliding", "chunked"),
                                     facts["elements_per_token_sliding"])
                    self.assertEqual(kinds.get("full", 0), facts["full_layers"])
                    self.assertEqual(kinds.get(facts.get("kind_of_window", "sliding"), 0),
                                     facts["sliding_layers"])
                if facts["kind"] == "mla":
                    self.assertEqual(elements("mla"), facts["elements_per_token"])
                    self.assertEqual(kinds["mla"], facts["layers"])
                if "indexer_elements_per_token" in facts:
                    self.assertEqual(elements("indexer"), facts["indexer_elements_per_token"])
                self.assertEqual(kinds.get("state", 0), facts.get("recurrent_layers", 0))
                if "state_elements_per_sequence" in facts:
                    self.assertEqual(sum(c.layers * c.state_elements for c in model.caches),
                                     facts["state_elements_per_sequence"])

    def test_a_config_and_its_preset_are_the_same_model(self):
        pairs = {"deepseek-ai--DeepSeek-V3": "deepseek-v3", "Qwen--Qwen3-8B": "qwen3-8b",
                 "Qwen--Qwen3.5-35B-A3B": "qwen3.5-35b-a3b", "openai--gpt-oss-20b": "gpt-oss-20b",
                 "google--gemma-4-26B-A4B": "gemma-4-26b-a4b",
                 "meta-llama--Llama-4-Scout-17B-16E-Instruct": "llama-4-scout"}
        rows = {row["name"]: row for row in PRESETS}
        for folder, name in pairs.items():
            with self.subTest(name):
                a, b = model_of(config_of(folder)), capacity.build_model(rows[name])
                self.assertEqual(set(a.tensors), set(b.tensors))
                self.assertEqual(set(a.caches), set(b.caches))

    def test_names_and_aliases_are_unique(self):
        names = [n for row in PRESETS for n in [row["name"], *row.get("aliases", [])]]
        self.assertEqual(len(names), len(set(names)))


class Caches(unittest.TestCase):
    def test_deepseek_v3_keeps_a_latent_of_576_per_layer(self):
        (cache,) = model_of(config_of("deepseek-ai--DeepSeek-V3")).caches
        self.assertEqual((cache.kind, cache.layers, cache.heads, cache.elements),
                         ("mla", 61, 1, 576))
        self.assertEqual(cache.layers * cache.elements * 2, 70272)

    def test_sparse_attention_reads_2048_tokens_and_keeps_an_index(self):
        mla, indexer = model_of(config_of("deepseek-ai--DeepSeek-V3.2")).caches
        self.assertEqual((mla.reads, indexer.kind, indexer.elements), (2048, "indexer", 128))

    def test_delta_net_state_of_qwen35_27b_is_3207168_bytes_per_layer(self):
        rows = {row["name"]: row for row in PRESETS}
        state = [c for c in capacity.build_model(rows["qwen3.5-27b"]).caches if c.kind == "state"]
        self.assertEqual([(c.layers, c.state_bytes) for c in state], [(48, 3207168)])

    def test_a_window_that_does_not_bind_is_full_attention(self):
        cases = (
            ({"sliding_window": 1024}, {"sliding": 4}),
            ({"sliding_window": 1024, "use_sliding_window": False}, {"full": 4}),
            ({"sliding_window": 4096}, {"full": 4}),  # as long as the context
            ({"sliding_window": None}, {"full": 4}),
            ({"sliding_window": 1024, "architectures": ["Qwen2ForCausalLM"]}, {"full": 4}),
            ({"sliding_window": 1024, "architectures": ["Qwen2ForCausalLM"],
              "use_sliding_window": True, "max_window_layers": 3}, {"full": 3, "sliding": 1}),
            ({"sliding_window": 1024, "sliding_window_pattern": 2}, {"full": 2, "sliding": 2}),
            ({"attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0]},
             {"chunked": 3, "full": 1}),
            ({"attention_chunk_size": 64, "no_rope_layers": [], "no_rope_layer_interval": 2},
             {"chunked": 2, "full": 2}),
            ({"sliding_window": 1024, "layer_types": ["sliding_attention"] * 3
              + ["full_attention"] * 3}, {"full": 1, "sliding": 3}),
        )
        for changes, kinds in cases:
            with self.subTest(changes):
                self.assertEqual(layers_by_kind(model_of(tiny(**changes))), kinds)


class WeightBytes(unittest.TestCase):
    def test_bf16_is_two_bytes_a_parameter(self):
        model = model_of(config_of("Qwen--Qwen3-8B"))
        self.assertEqual((model.weight_bytes, model.native), (2 * 8190735360, "bf16"))

    def test_fp8_blocks_carry_a_scale_for_128_by_128_weights(self):
        model = model_of(config_of("Qwen--Qwen3-32B-FP8"))
        linear = 64 * (5120 * 8192 + 2 * 5120 * 1024 + 8192 * 5120 + 3 * 5120 * 25600)
        rest = 2 * 151936 * 5120 + 64 * (2 * 5120 + 2 * 128) + 5120
        self.assertEqual(linear + rest, model.params_exact)
        self.assertEqual(model.weight_bytes, linear + 4 * linear // 128**2 + 2 * rest)
        self.assertEqual(model.native, "fp8")

    def test_mxfp4_holds_for_the_experts_of_gpt_oss_only(self):
        model = model_of(config_of("openai--gpt-oss-20b"))
        experts = 24 * 32 * 3 * 2880 * 2880
        rest = model.params_exact - experts
        self.assertEqual(model.weight_bytes, experts // 2 + experts // 32 + 2 * rest)
        self.assertEqual(model.native, "mxfp4")

    def test_nvfp4_leaves_attention_and_router_of_minimax_in_bf16(self):
        model = model_of(config_of("nvidia--MiniMax-M2.5-NVFP4"))
        experts = 62 * 256 * 3 * 3072 * 1536
        score_bias = 62 * 256  # 4 bytes each
        rest = model.params_exact - experts - score_bias
        self.assertEqual(model.weight_bytes,
                         experts // 2 + experts // 16 + 2 * rest + 4 * score_bias)
        self.assertEqual((model.native, model.kv_native), ("nvfp4", "fp8"))

    def test_compressed_tensors_int4_holds_for_the_experts_of_kimi_only(self):
        model = model_of(config_of("moonshotai--Kimi-K2.5"))
        experts = 60 * 384 * 3 * 7168 * 2048
        score_bias = 60 * 384
        rest = model.params_exact - experts - score_bias
        self.assertEqual(model.weight_bytes,
                         experts // 2 + 2 * experts // 32 + 2 * rest + 4 * score_bias)
        self.assertEqual(model.native, "int4")

    def test_hf_quant_config_alone_declares_nvfp4(self):
        exclude = ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(94))]
        quant = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8",
                                  "group_size": 16, "exclude_modules": exclude}}
        model = model_of(config_of("nvidia--Qwen3-235B-A22B-NVFP4"), quant)
        linear = 94 * (4096 * 8192 * 2 + 2 * 4096 * 512 + 128 * 3 * 4096 * 1536)
        self.assertEqual(model.weight_bytes,
                         linear // 2 + linear // 16 + 2 * (model.params_exact - linear))
        self.assertEqual(model.kv_native, "fp8")

    def test_excluded_modules_stay_in_bf16(self):
        linear = 256 * 256 * 2 + 2 * 256 * 64 + 3 * 256 * 512  # a layer of tiny()
        attention, mlp = 256 * 256 * 2 + 2 * 256 * 64, 3 * 256 * 512
        cases = (
            ([], 4 * linear),
            (["model.layers.0"], 3 * linear),
            (["model.layers.0*"], 3 * linear),
            (["language_model.model.layers.1.self_attn"], 4 * linear - attention),
            (["model.layers.*.self_attn"], 4 * mlp),
            (["self_attn"], 4 * mlp),
            (["gate"], 4 * linear),  # not gate_proj
            (["*.mlp.*"], 4 * attention),
            (["re:.*mlp.*"], 4 * attention),
            ([r"re:model\.layers\.[01]\..*"], 2 * linear),
        )
        total = model_of(tiny()).params_exact
        for patterns, quantised in cases:
            with self.subTest(patterns):
                model = model_of(tiny(quantization_config={
                    "quant_method": "modelopt", "quant_algo": "FP8", "ignore": patterns}))
                self.assertEqual(model.weight_bytes, 2 * total - quantised)

    def test_formats_cost_what_their_scales_cost(self):
        linear = 4 * (256 * 256 * 2 + 2 * 256 * 64 + 3 * 256 * 512)
        columns = 4 * (256 + 2 * 64 + 256 + 2 * 512 + 256)  # outputs of all matrices
        rows = 4 * (4 * 256 + 2 * 256 + 512)  # inputs
        group = {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False},
                 "targets": ["Linear"]}
        cases = {
            "awq": ({"bits": 4, "group_size": 128, "zero_point": True},
                    linear / 2 + linear / 128 * 2.5),
            "gptq": ({"bits": 4, "group_size": -1, "sym": True},
                     linear / 2 + columns * 2.5 + 4 * rows),
            "fp8": ({"activation_scheme": "static"}, linear + 4 * columns),
            "compressed-tensors": ({"config_groups": {"group_0": group}},
                                   linear / 2 + linear / 32 * 2.5),
            "bitsandbytes": ({"load_in_4bit": True}, linear * (0.5 + 4 / 64)),
        }
        total = model_of(tiny()).params_exact
        for method, (options, size) in cases.items():
            with self.subTest(method):
                config = tiny(quantization_config={"quant_method": method, **options})
                self.assertEqual(model_of(config).weight_bytes, 2 * (total - linear) + size)


class BadInput(unittest.TestCase):
    def test_bad_configs_are_refused_in_one_line(self):
        bad = [
            [], "text", 7, None, {}, {"text_config": []}, {"text_config": "x"},
            tiny(num_hidden_layers=-3), tiny(num_hidden_layers=0), tiny(num_hidden_layers=None),
            tiny(num_hidden_layers="32"), tiny(num_hidden_layers=10**9),
            tiny(hidden_size=float("nan")), tiny(hidden_size=float("inf")),
            tiny(hidden_size=True), tiny(hidden_size=1.5), tiny(vocab_size={}),
            tiny(vocab_size=10**15), tiny(intermediate_size=None), tiny(num_key_value_heads=3),
            tiny(tie_word_embeddings="yes"), tiny(layer_types=["full_attention"]),
            tiny(layer_types="full_attention"), tiny(quantization_config=[]),
            tiny(num_local_experts=8, num_experts_per_tok=9), tiny(num_local_experts=8),
            tiny(block_configs=[{}] * 4), tiny(hybrid_override_pattern="MXM*"),
        ]
        for config in bad:
            with self.subTest(repr(config)[-80:]):
                with self.assertRaises(capacity.UserError) as caught:
                    model_of(config)
                self.assertNotIn("\n", str(caught.exception))

    def test_no_single_bad_value_escapes_as_another_exception(self):
        values = [None, -1, 0, 7, float("nan"), 1.5, "x", [], [1], {}, True, 10**12]
        for name in ("moonshotai--Kimi-K2.5", "google--gemma-4-26B-A4B",
                     "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"):
            config = config_of(name)
            text = "text_config" if "text_config" in config else None
            for key in config[text] if text else config:
                for value in values:
                    changed = copy.deepcopy(config)
                    (changed[text] if text else changed)[key] = value
                    with contextlib.suppress(capacity.UserError):
                        model_of(changed)


class Reading(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, name, content):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (self.folder / name).write_bytes(data)

    def test_a_folder_and_its_config_json_read_the_same(self):
        self.write("config.json", tiny())
        self.write("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})
        self.write("model.safetensors.index.json", {"metadata": {"total_size": 12345}})
        a = capacity.read_checkpoint(str(self.folder))
        b = capacity.read_checkpoint(str(self.folder / "config.json"))
        self.assertEqual(a, b)
        self.assertEqual(a[2:], (12345, "model.safetensors.index.json"))
        self.assertEqual(a[1]["quantization"]["quant_algo"], "FP8")

    def test_safetensors_headers_are_summed(self):
        self.write("config.json", tiny())
        header = json.dumps({"__metadata__": {"format": "pt"},
                             "a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
                             "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}})
        header = header.encode()
        for name in ("model-1.safetensors", "model-2.safetensors"):
            self.write(name, struct.pack("<Q", len(header)) + header + b"\0" * 24)
        _, _, size, source = capacity.read_checkpoint(str(self.folder))
        self.assertEqual((size, source), (48, "safetensors headers"))

    def test_bad_files_are_refused_in_one_line(self):
        cases = (
            {}, {"config.json": b""}, {"config.json": b"{"}, {"config.json": b"[]"},
            {"config.json": b"\xff\xfe"}, {"config.json": b"[" * 100000},
            {"config.json": tiny(), "hf_quant_config.json": b"{"},
            {"config.json": tiny(), "model.safetensors.index.json": b"x"},
            {"config.json": tiny(), "model.safetensors": b"abc"},
            {"config.json": tiny(), "model.safetensors": struct.pack("<Q", 1 << 60)},
            {"config.json": tiny(), "model.safetensors": struct.pack("<Q", 100) + b"{}"},
            {"config.json": tiny(), "model.safetensors": struct.pack("<Q", 8) + b'{"a":{}}'},
        )
        for files in cases:
            with self.subTest(files):
                for old in self.folder.iterdir():
                    old.unlink()
                for name, content in files.items():
                    self.write(name, content)
                with self.assertRaises(capacity.UserError) as caught:
                    capacity.read_checkpoint(str(self.folder))
                self.assertNotIn("\n", str(caught.exception))

    def test_a_missing_path_is_refused(self):
        with self.assertRaisesRegex(capacity.UserError, "no such file"):
            capacity.read_checkpoint(str(self.folder / "absent"))


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers from server.files: path -> bytes, status, or address to redirect to."""

    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        answer = self.server.files.get(self.path, 404)
        if isinstance(answer, str):
            self.send_response(302)
            self.send_header("Location", answer)
            answer = b""
        else:
            self.send_response(200 if isinstance(answer, bytes) else answer)
            answer = answer if isinstance(answer, bytes) else b""
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


class Fetching(unittest.TestCase):
    BASE = "/org/name/resolve/main/"

    def serve(self, files):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
        server.files, server.seen = files, []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server, f"http://127.0.0.1:{server.server_port}"

    def fetch(self, endpoint, hf_id="org/name"):
        settings = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "secret", "no_proxy": "*"}
        with mock.patch.dict(os.environ, settings):
            return capacity.fetch_checkpoint(hf_id)

    def test_a_checkpoint_is_fetched_with_the_token(self):
        server, endpoint = self.serve({
            self.BASE + "config.json": json.dumps(tiny()).encode(),
            self.BASE + "model.safetensors.index.json": b'{"metadata": {"total_size": 99}}'})
        config, quant, size, source = self.fetch(endpoint)
        self.assertEqual((config, quant, size), (tiny(), None, 99))
        self.assertEqual(source, "model.safetensors.index.json")
        self.assertEqual({token for _, token in server.seen}, {"Bearer secret"})

    def test_a_redirect_to_another_host_does_not_carry_the_token(self):
        other, other_url = self.serve({"/blob": json.dumps(tiny()).encode()})
        server, endpoint = self.serve({self.BASE + "config.json": other_url + "/blob"})
        self.assertEqual(self.fetch(endpoint)[0], tiny())
        self.assertEqual(other.seen, [("/blob", None)])
        self.assertEqual(server.seen[0][1], "Bearer secret")

    def test_a_redirect_on_the_same_host_keeps_the_token(self):
        server, endpoint = self.serve({self.BASE + "config.json": "/new",
                                       "/new": json.dumps(tiny()).encode()})
        self.assertEqual(self.fetch(endpoint)[0], tiny())
        self.assertIn(("/new", "Bearer secret"), server.seen)

    def test_refusals_are_one_line_without_the_token(self):
        for answer in (401, 403, 404, 500, b"<html>", b"[]"):
            with self.subTest(answer):
                _, endpoint = self.serve({self.BASE + "config.json": answer})
                with self.assertRaises(capacity.UserError) as caught:
                    self.fetch(endpoint)
                self.assertNotIn("\n", str(caught.exception))
                self.assertNotIn("secret", str(caught.exception))

    def test_an_unreachable_endpoint_is_a_user_error(self):
        for endpoint in ("http://127.0.0.1:9", "file:///etc"):
            with self.subTest(endpoint), self.assertRaises(capacity.UserError):
                self.fetch(endpoint)

    def test_a_name_that_does_not_resolve_and_a_timeout_are_user_errors(self):
        for error in (socket.gaierror(-2, "Name or service not known"), TimeoutError("timed out")):
            with self.subTest(error), mock.patch("socket.getaddrinfo", side_effect=error), \
                    self.assertRaises(capacity.UserError):
                self.fetch("http://hub.example")

    def test_ids_that_are_no_ids_never_reach_the_network(self):
        for hf_id in ("name", "a/b/c", "../x", "org/..", "org/na me", "org/name?x", "", "/", "a/"):
            with self.subTest(hf_id), self.assertRaises(capacity.UserError):
                capacity.fetch_checkpoint(hf_id)


if __name__ == "__main__":
    unittest.main()
