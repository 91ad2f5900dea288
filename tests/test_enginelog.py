"""What the engine will log: weights on a rank, activation peak, KV blocks, refusals, pasted logs.

    python3 -m unittest tests.test_enginelog
"""
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import capacity

TABLES = capacity.presets()
GIB = 2**30


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


if __name__ == "__main__":
    unittest.main()
