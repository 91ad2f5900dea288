#!/usr/bin/env python3
"""How many GPUs, which flags, how fast, what price: sizes a large-language-model deployment.

    capacity.py llama-3.1-70b -tp 2 --weights fp8 --kv fp8       a preset's name
    capacity.py ./Qwen3-8B --gpu l40s --ctx 32k                  a folder with config.json
    capacity.py Qwen/Qwen3-8B --compare tp=1,2 gpu=h100,h200     a Hugging Face id
    capacity.py llama-3.1-70b --rate 20 --workload chat          what serves this load, and its cost
    capacity.py --from 'vllm serve MODEL -tp 2 ...'              what a pasted command will do

A serving engine's step time decides everything here:

    t_step = max(FLOP / peak, bytes / bandwidth),   bytes = weights + KV history of each sequence

Memory decides how many sequences share that step. Figures are bounds (100% of the datasheet)
unless they are called expected: those are calibrated on public measurements and carry a band.
Standard library only; needs nothing but presets.json beside it, and without that works from
explicit flags.

Sections: 1 words, units and lengths, 2 the answer and its steps, 3 models (skip it unless you add
a family), 4 hardware, 5 the deployment, 6 memory, 6b what the engine will log, 7 step time,
8 collectives, 8b the expectation, 8c the plan, 9 the sections of the answer, 9b what is saved,
measured, watched and defended, 9c launch commands, 10 comparing, 11 the command line.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from functools import lru_cache, partial
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

# ---- 1. Words, units and lengths ---------------------------------------------------------------
# Inside: seconds, bytes, FLOP, tokens and per-second rates, the unit last in every name.
# history: tokens a sequence has in its KV cache when a step reads it. ctx: its longest.
# step: one forward pass of the batch, one token for each sequence.

# >>>> the same in capacity.py and loadgen.py; a test compares them
KIB, MIB, GIB = 2**10, 2**20, 2**30
KILO, MEGA, GIGA, TERA = 1e3, 1e6, 1e9, 1e12
MS, US, NS = 1e-3, 1e-6, 1e-9
MINUTE_S, HOUR_S = 60.0, 3600.0
ABSURD = 1e15  # past this a number given by hand is a slip


class UserError(Exception):
    """Bad input; its text is one line that says what is wrong and what to do."""


def count(value: float) -> str:
    """A whole number with thousands separators.

    >>> count(450912.2)
    '450,912'
    """
    return f"{value:,.0f}"


def figure(value: float, digits: int = 3) -> str:
    """A number with about so many significant digits and no exponent.

    >>> figure(3.3989), figure(486596.3), figure(0.0694)
    ('3.4', '486,596', '0.0694')
    """
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{float(f'{value:.{digits}g}'):.10f}".rstrip("0").rstrip(".")


def near(name: str, known: Iterable[str]) -> str:
    """'; did you mean a, b?' for a name that is not among the known ones, or ''."""
    import difflib
    close = difflib.get_close_matches(name.lower(), sorted(known), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""


def number(text: str) -> float:
    """A finite number."""
    try:
        if "_" in text or not text.isascii():
            raise ValueError
        value = float(text)
    except ValueError:
        raise UserError(f"{text!r} is not a number") from None
    if not abs(value) < ABSURD or 0 < abs(value) < 1 / ABSURD:
        raise UserError(f"{text!r} is past any sensible number")
    return value


def positive(text: str) -> float:
    """A number more than zero."""
    value = number(text)
    if value <= 0:
        raise UserError(f"{text!r} must be more than zero")
    return value


def not_negative(text: str) -> float:
    """A number, zero or more."""
    value = number(text)
    if value < 0:
        raise UserError(f"{text!r} must not be negative")
    return value


def whole(text: str) -> int:
    """A whole number from 1 to a billion; 32k means 32,000 and 32K 32,768, as in vLLM."""
    scale = {"k": 1000, "K": KIB, "m": 10**6, "M": MIB}.get(text[-1:], 0)
    value = positive(text[:-1] if scale else text) * (scale or 1)
    if value != int(value) or value > GIGA:
        raise UserError(f"{text!r} must be a whole number, at most a billion")
    return int(value)


def fraction(text: str) -> float:
    """A share: more than 0, at most 1."""
    value = positive(text)
    if value > 1:
        raise UserError(f"{text!r} must be a share from 0 to 1, such as 0.9")
    return value


class Lengths(NamedTuple):
    """A distribution of token counts: its mean and its quantile function."""

    text: str
    mean: float
    quantile: Callable[[float], float]


def parse_lengths(text: str) -> Lengths:
    """Lengths as flags write them: 2000, lognormal:mean=2000,cv=0.5, uniform:100..4000, hist:FILE.

    hist:FILE holds one length a line, or `length,count`. Raises UserError.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "lognormal":
            parts = dict(part.split("=") for part in rest.split(","))
            if set(parts) != {"mean", "cv"}:
                raise ValueError
            return lognormal(text, positive(parts["mean"]), positive(parts["cv"]))
        if kind == "uniform":
            low, high = (positive(part) for part in rest.split(".."))
            if high < low:
                raise ValueError
            return Lengths(text, (low + high) / 2, lambda q: low + q * (high - low))
        if kind == "hist":
            return histogram(rest)
        fixed = float(whole(text))
        return Lengths(text, fixed, lambda q: fixed)
    except ValueError:
        raise UserError(f"{text!r} is not a length; write 2000, lognormal:mean=2000,cv=0.5, "
                        "uniform:100..4000 or hist:FILE") from None


def lognormal(text: str, mean: float, cv: float) -> Lengths:
    """Log-normal lengths with this mean and coefficient of variation (sd / mean)."""
    from statistics import NormalDist
    sigma = math.sqrt(math.log1p(cv * cv))
    mu = math.log(mean) - sigma * sigma / 2
    return Lengths(text, mean, lambda q: math.exp(mu + sigma * NormalDist().inv_cdf(q)))


def histogram(path: str) -> Lengths:
    """Lengths as counted in a file: one a line, or `length,count`; '#' starts a comment."""
    pairs = []
    try:
        with open(path, encoding="utf-8") as file:
            for n, line in enumerate(file, 1):
                length, _, times = line.partition("#")[0].strip().partition(",")
                try:
                    if length:
                        pairs.append((positive(length), not_negative(times or "1")))
                except UserError as error:
                    raise UserError(f"{path} line {n}: {error}; write a length, or length,count"
                                    ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    total = sum(times for _, times in pairs)
    if not total:
        raise UserError(f"{path} holds no lengths")
    pairs.sort()

    def quantile(q: float) -> float:
        seen = 0.0
        for length, times in pairs:
            seen += times
            if seen >= q * total:
                return length
        return pairs[-1][0]

    return Lengths(f"hist:{path}", sum(a * b for a, b in pairs) / total, quantile)


def named(flag: str, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """The type of a flag, its complaints beginning with the flag's name."""
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except UserError as error:
            raise UserError(f"{flag} {error}") from None
    return parse
# <<<<


def mean_count(value: float) -> str:
    """A mean number of things: whole, but two digits under one.

    >>> mean_count(61.5), mean_count(0.187)
    ('62', '0.19')
    """
    return count(value) if value >= 1 else figure(value, 2)


TYPICAL_MBU = 0.70  # real decode reaches 60-85% of HBM bandwidth (Databricks, "LLM Inference
#                     Performance Engineering", MBU)
TYPICAL_MFU = 0.50  # of prefill on Hopper; a TTFT floor is usually taken at half the peak
ACTIVATION_BYTES = 2  # hidden states travel between GPUs in BF16
SERVER_GPUS = 8  # GPUs that share one server's PCIe
SCREEN = 110  # columns


def scaled(value: float, unit: str) -> str:
    """A value in SI units as people read it: bytes in GiB, KiB or MB, seconds in ms, and so on."""
    if unit == "B":
        size = abs(value)
        if size >= GIB / 10:
            return f"{value / GIB:,.2f} GiB"
        if size >= MIB:
            return f"{value / MIB:.2f} MiB"
        return f"{figure(value / KIB, 4)} KiB" if size >= KIB else f"{figure(value)} B"
    if unit == "MB":
        return f"{figure(value / MEGA, 4)} MB"
    if unit == "s":
        return f"{figure(value, 4)} s" if abs(value) >= 1 else f"{figure(value / MS, 4)} ms"
    if unit == "FLOP/s":
        return f"{figure(value / TERA, 4)} TFLOP/s"
    if unit == "B/s":
        return f"{figure(value / GIGA, 4)} GB/s"
    if unit == "x":
        return f"{figure(value)}x"
    shown = figure(value, 4)
    one = shown == "1" and "/" not in unit
    return f"{shown} {unit.removesuffix('s') if one else unit}".rstrip()


# ---- 2. The answer and its steps ---------------------------------------------------------------
# Text, --json and --explain are three renderings of one thing: a list of steps.


class Step(NamedTuple):
    """One number of the answer: where it stands in the JSON, and how it came about."""

    key: str  # dotted path in the JSON, "memory.kv_pool_bytes_per_gpu"
    value: Any
    unit: str  # SI; "MB" marks bytes that are shown in decimal units
    formula: str  # a Python expression over `numbers`; '' where the value is an input
    numbers: Mapping[str, float]
    source: str


class Column(NamedTuple):
    """One column of a table: the row's field, its head with the unit, how a value is shown."""

    key: str
    head: str
    show: Callable[[Any], str]


def render_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> List[str]:
    """Rows as right-aligned lines under their heads; what is absent shows as '-'."""
    cells = [[c.head for c in columns]]
    for row in rows:
        cells.append(["-" if row.get(c.key) is None else c.show(row[c.key]) for c in columns])
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(map(str.rjust, line, widths)) for line in cells]


ARITHMETIC: Dict[str, Any] = {"__builtins__": {"max": max, "min": min, "round": round}}


class Answer:
    """The steps and the screen lines of an answer, in the order they were found."""

    def __init__(self, facts: Mapping[str, float]) -> None:
        """An empty answer; `facts` are what formulas may call by name."""
        self.steps: List[Step] = []
        self.lines: List[str] = []
        self.known: Dict[str, Any] = dict(facts)

    def add(self, key: str, value: Any, unit: str = "", formula: str = "", source: str = "",
            **numbers: float) -> Any:
        """Record one step and hand its value on. A test evaluates `formula` over its numbers.

        A name that is not among `numbers` is that of an earlier step, by the last part of its key,
        or of a fact.
        """
        known = {**self.known, **numbers} if formula else {}
        self.steps.append(Step(key, value, unit, formula, known, source))
        if isinstance(value, (int, float)):
            self.known[key.rpartition(".")[2]] = value
        return value

    def work(self, key: str, unit: str, formula: str, source: str, **numbers: float) -> Any:
        """Record the step whose value is that of its formula, and hand the value on."""
        value = eval(formula, dict(ARITHMETIC), {**self.known, **numbers})
        return self.add(key, value, unit, formula, source, **numbers)

    def inputs(self, prefix: str, **values: Any) -> None:
        """Record values that come from nowhere else, each under its name."""
        for name, value in values.items():
            self.add(prefix + name, value)

    def say(self, label: str, *lines: str) -> None:
        """One labelled paragraph of the screen, wrapped to its width."""
        import textwrap
        wrapped = [part for line in lines for part in textwrap.wrap(
            line, SCREEN - 13, break_on_hyphens=False)]
        for i, line in enumerate(wrapped):
            self.lines.append(f"{label if i == 0 else '':<12} {line}")

    def heading(self, *lines: str) -> None:
        """Lines without a label, wrapped to the screen's width."""
        import textwrap
        for line in lines:
            self.lines += textwrap.wrap(line, SCREEN, subsequent_indent="  ",
                                        break_on_hyphens=False)

    def table(self, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> None:
        """A table on the screen, indented."""
        self.lines.extend("  " + line for line in render_table(columns, rows))

    def json(self) -> Dict[str, Any]:
        """The steps as nested objects in SI units; an infinite or unknown number is null."""
        tree: Dict[str, Any] = {}
        for step in self.steps:
            *parents, leaf = step.key.split(".")
            place = tree
            for parent in parents:
                place = place.setdefault(parent, {})
            infinite = isinstance(step.value, float) and not abs(step.value) < float("inf")
            place[leaf] = None if infinite else step.value
        return tree

    def explain(self) -> str:
        """Every step: its formula, the numbers put in, its value and its source."""
        lines = []
        for step in self.steps:
            if not isinstance(step.value, (int, float)) or isinstance(step.value, bool):
                continue
            shown = scaled(step.value, step.unit)
            if not step.formula:
                source = f"   [{step.source}]" if step.source else ""
                lines.append(f"{step.key} = {shown}{source}")
                continue
            lines.append(f"{step.key} = {step.formula}")
            lines.append(f"    = {_put_in(step.formula, step.numbers)}")
            lines.append(f"    = {shown}   [{step.source}]")
        return "\n".join(lines)


def _put_in(formula: str, numbers: Mapping[str, float]) -> str:
    """The formula with each name replaced by its number."""
    import re
    def shown(match: re.Match[str]) -> str:
        value = numbers.get(match[0])
        if value is None:
            return match[0]
        return f"{value:.0f}" if value == int(value) else f"{value:.10g}"

    return re.sub(r"[a-zA-Z_]\w*", shown, formula)


# ---- 3. Models ---------------------------------------------------------------------------------
# config.json --normalise--> row --build_model--> Model. A row is flat and says only what differs
# from DEFAULTS and from its family in FAMILIES; presets.json holds such rows.
#
# A layer is a mixer and an FFN, one letter each:
#   mixer  F full attention  S sliding window  C chunks    A, H compressed 4x, 128x (DeepSeek-V4)
#          L gated DeltaNet  K Kimi delta      N lightning M Mamba-2  J Mamba-1
#          R one linear layer                  - none
#   ffn    D dense           E experts         R one linear layer     - none
# A pattern is a text of letters, repeated until every layer has one; letters before "|" are not
# repeated: "DDD|E" is three dense layers, then experts.

Row = Dict[str, Any]


class Tensor(NamedTuple):
    """A weight as it stands in each of the layers that have it."""

    name: str  # HF module path below the layer; the whole path if outside the layers
    layers: Tuple[int, ...]  # the layers that have it; () = outside the layers
    d_in: int  # 0 for a vector (norm, bias), which has d_out elements
    d_out: int
    copies: int = 1  # number of routed experts; the name then has a "*"
    split: str = "tp"  # "tp"; "kv": by min(tp, kv_heads); "vocab"; "expert"; "none": replicated

    @property
    def params(self) -> int:
        """Parameters in all the layers and copies."""
        return max(1, len(self.layers)) * self.copies * max(1, self.d_in) * self.d_out


class Cache(NamedTuple):
    """What one kind of layer keeps for a sequence."""

    kind: str  # "full", "sliding", "chunked", "mla", "compressed", "indexer", "state"
    layers: int
    heads: int = 0  # KV (or state) heads that TP divides; 1 for a latent: replicated
    elements: int = 0  # per token, layer and head: d_k + d_v, or latent + rope for MLA
    window: int = 0  # most tokens kept; 0 = all
    reads: int = 0  # most tokens read in a decode step (sparse attention); 0 = all kept
    every: int = 1  # one entry for this many tokens
    element_bytes: float = 0.0  # where it is not the KV cache's own [B]; 0 = as --kv says
    state_bytes: int = 0  # fixed state of a sequence [B/layer], at TP 1
    state_elements: int = 0  # the same in elements
    flops: int = 0  # of attention, per query token, context token and layer (prefill)
    decode_flops: int = 0  # the same in decode (MLA: absorbed form)


class Model(NamedTuple):
    """A language model: what it weighs, computes and caches."""

    name: str
    arch: str
    params: float  # what the bound uses; presets may round it as model cards do
    params_exact: int
    active_params: int  # per token: no embedding look-up, top_k of the routed experts
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_len: int  # tokens; 0 = not stated
    tied: bool  # lm_head shares the embedding table
    tensors: Tuple[Tensor, ...]
    caches: Tuple[Cache, ...]
    experts: int  # routed experts in an expert layer; 0 = dense model
    top_k: int
    expert_layers: int
    native: str  # precision of the checkpoint: bf16, fp8, int4, mxfp4, nvfp4, awq, ...
    weight_bytes: Optional[int]  # [B] as the quantisation declares it; None for presets
    weight_bytes_source: str
    expert_byte_share: float  # of weight_bytes (of the parameters where that is None)
    kv_native: str  # KV-cache precision the checkpoint asks for: "fp8" or "" (16 bit)
    mtp_layers: int  # multi-token-prediction layers, not in params
    mtp_params: int  # of these, without copies of embedding and head; 0 if none or unknown
    vision_params: int  # rough size of a vision tower, not in params
    estimated: bool  # some structure is unknown: counted as a generic decoder
    notes: Tuple[str, ...]
    quant: Optional[Quant] = None  # as the checkpoint declares it; None for presets and by hand
    expert_params: int = 0  # routed experts, of params_exact

    @property
    def latent(self) -> int:
        """Elements of an MLA latent, for each token and layer; 0 where there is none."""
        return next((cache.elements for cache in self.caches if cache.kind == "mla"), 0)


DEFAULTS: Row = {
    # sizes; what is 0 is absent
    "ffn": 0, "kv_heads": 0, "head_dim": 0, "v_head_dim": 0, "max_len": 0, "tied": False,
    "mixers": "F", "ffns": "", "layout": "", "blocks": (), "window": 0, "chunk": 0,
    "swa_heads": 0, "swa_kv_heads": 0, "swa_head_dim": 0, "swa_v_head_dim": 0,
    # attention
    "qkv_bias": False, "o_bias": False, "qk_norm": "", "gate": False, "sinks": "",
    "k_eq_v": False, "kv_shared": 0, "double_wide": False, "per_layer_input": 0,
    "q_lora": 0, "kv_lora": 0, "nope": 0, "rope": 0, "mla_gate": False,
    "index_heads": 0, "index_dim": 0, "index_topk": 0, "indexers": "I",
    "o_groups": 0, "o_lora": 0, "hc_mult": 0, "hash_layers": 0,
    # recurrent mixers: GDN, KDA, lightning, Mamba
    "conv": 4, "key_heads": 0, "value_heads": 0, "key_dim": 0, "value_dim": 0, "full_gate": False,
    "mamba_heads": 0, "mamba_dim": 0, "groups": 1, "state": 0, "dt_rank": 0, "conv_bias": True,
    "mamba_bias": False, "state_bytes_each": 2,
    # FFN
    "mlp": "gated", "mlp_bias": False, "experts": 0, "top_k": 0, "expert_ffn": 0, "shared_ffn": 0,
    "shared_gate": False, "latent": 0, "router_bias": False, "expert_bias": False,
    "score_bias": False, "moe_plus_dense": False,
    # the rest
    "norms": 2, "norm_width": 1, "final_norm": True, "positions": 0, "embed_dim": 0,
    "head_bias": False, "mtp": 0, "vision_params": 0,
    "paths": "self_attn mlp experts gate shared_experts",
    "estimated": False, "quant": None, "native": "bf16", "notes": (),
}

_QWEN = {"swa_opt_in": True}
_QWEN2 = {**_QWEN, "qkv_bias": True, "bias_flag": ()}
_QWEN3 = {**_QWEN, "qk_norm": "head"}
_QWEN_SHARED = {"shared_gate": True, "paths": "self_attn mlp experts gate shared_expert"}
_QWEN_NEXT = {**_QWEN3, **_QWEN_SHARED, "gate": True, "mixers": "LLLF"}
_GLM = {"bias_flag": ("qkv_bias",)}
_GPT = {"mlp": "plain", "norm_width": 2}  # LayerNorm with bias, two-matrix FFN
_GPT_BIAS = {**_GPT, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "bias_flag": ()}
_GEMMA = {"norms": 4, "tied": True}
_SPARSE_MOE = {"paths": "self_attn block_sparse_moe experts gate shared_experts"}
_MINIMAX = {**_SPARSE_MOE, "score_bias": True}

# Stems of architectures and model_types (stem(), below) -> how the family differs from DEFAULTS.
# Keys that are no row fields only steer normalise(): bias_flag (what attention_bias governs),
# qk_norm_flag (what use_qk_norm: true adds), swa_opt_in (sliding_window needs use_sliding_window),
# ffn_times (FFN width when absent, in hidden sizes), shared_is_ffn (shared expert always there).
FAMILIES: Dict[str, Row] = {
    "llama mistral ministral yi granite granitemoe smollm3 internlm2 internlm3 ernie45"
    " baichuan": {},
    "mixtral": _SPARSE_MOE,
    "qwen2 qwen2vl qwen25vl qwen25omni": _QWEN2,
    "mimo": _QWEN2,
    "qwen2moe": {**_QWEN2, **_QWEN_SHARED},
    "qwen3 qwen3vl qwen3moe qwen3vlmoe qwen3omnimoe": _QWEN3,
    "qwen3next qwen35 qwen35moe": _QWEN_NEXT,
    "llama4": {"mixers": "CCCF", "chunk": 8192, "shared_is_ffn": True,
               "paths": "self_attn feed_forward experts router shared_expert"},
    "gemma": {"tied": True},
    "gemma2": {**_GEMMA, "mixers": "SF", "window": 4096},
    "gemma3": {**_GEMMA, "qk_norm": "head", "mixers": "SSSSSF", "window": 1024, "heads": 8,
               "kv_heads": 4, "head_dim": 256, "vocab": 262208, "max_len": 131072},
    "gemma4": {**_GEMMA, "qk_norm": "head", "mixers": "SSSSSF", "window": 1024,
               "paths": "self_attn mlp experts router shared_experts"},
    "deepseek deepseekv2": {},
    "deepseekv3 deepseekv32 kimik2 kimik25": {"score_bias": True},
    "kimilinear kimik3": {"score_bias": True},
    "deepseekv4": {"score_bias": True, "norm_width": 1, "window": 128,
                   "paths": "attn ffn experts gate shared_experts"},
    "glm": _GLM,
    "glm4 glm4v": {**_GLM, "norms": 4},
    "glm4moe glm4vmoe": {**_GLM, "score_bias": True, "qk_norm_flag": "head"},
    "glm4moelite glmmoedsa": {"score_bias": True},
    "gptoss": {"qkv_bias": True, "o_bias": True, "bias_flag": (), "sinks": "all", "mixers": "SF",
               "window": 128, "router_bias": True, "expert_bias": True,
               "paths": "self_attn mlp experts router shared_experts"},
    "minimaxm1 minimaxtext01 minimax": {**_SPARSE_MOE, "mixers": "NNNNNNNF"},
    "minimaxm2": {**_MINIMAX, "qk_norm": "layer"},
    "minimaxm3 minimaxm3sparse minimaxm3vl": {
        **_MINIMAX, "qk_norm": "head", "indexers": "---|I", "index_heads": 4, "index_dim": 128,
        "index_topk": 2048},
    "mimov2flash mimov2": {"score_bias": True, "bias_flag": ("qkv_bias",)},
    "seedoss": {"qkv_bias": True, "bias_flag": ("qkv_bias",)},
    "nemotronh": {"norms": 1, "mlp": "plain", "score_bias": True,
                  "paths": "mixer mixer experts gate shared_experts"},
    "decilm nemotronnas": {},
    "nemotron": _GPT,
    "jamba": {"paths": "self_attn feed_forward experts router shared_experts",
              "attn_period": 8, "attn_offset": 4, "expert_period": 2, "expert_offset": 1},
    "phi3": {},
    "phi": {**_GPT_BIAS, "norms": 1, "head_bias": True, "ffn_times": 4},
    "phimoe": {**_SPARSE_MOE, "norm_width": 2},
    "starcoder2": {**_GPT, "tied": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "gptneox": {**_GPT_BIAS, "bias_flag": ("qkv_bias", "o_bias")},
    "falcon": {**_GPT, "tied": True, "ffn_times": 4},
    "opt": {**_GPT_BIAS, "tied": True, "extra_positions": 2},
    "gpt2 gptbigcode": {**_GPT_BIAS, "tied": True, "ffn_times": 4, "extra_positions": 0},
    "gptj": {**_GPT, "norms": 1, "mlp_bias": True, "head_bias": True, "ffn_times": 4},
    "stablelm": {"norm_width": 2},
    "cohere": {"norms": 1, "tied": True, "qk_norm_flag": "layer"},
    "cohere2": {"norms": 1, "tied": True, "mixers": "SSSF", "window": 4096},
    "olmo": {"norms": 0, "final_norm": False},
    "olmo2 olmoe": {"qk_norm": "layer"},
    "exaone4": {"qk_norm": "head", "mixers": "SSSF"},
    "olmo3": {"qk_norm": "layer", "mixers": "SSSF"},
}


def stem(name: str) -> str:
    """Architecture or model_type as FAMILIES writes it: "Qwen3MoeForCausalLM" -> "qwen3moe"."""
    for tail in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "_text"):
        name = name.removesuffix(tail)
    return name.replace("_", "").replace("-", "").replace(".", "").lower()


def family_of(names: Iterable[str]) -> Optional[Row]:
    """The first family that one of these architectures or model_types belongs to."""
    wanted = [stem(name) for name in names]
    table = {key: traits for keys, traits in FAMILIES.items() for key in keys.split()}
    return next((table[name] for name in wanted if name in table), None)


# ---- 3a. config.json to a row ------------------------------------------------------------------

# Row field -> its names in config.json, the first that is there wins; all are whole numbers.
# Aliases: vLLM transformers_utils/config.py CONFIG_FIELD_ALIASES, and older models.
NUMBERS: Dict[str, str] = {
    "layers": "num_hidden_layers n_layer n_layers num_layers",
    "hidden": "hidden_size n_embd d_model",
    "heads": "num_attention_heads n_head n_heads",
    "kv_heads": "n_head_kv num_kv_heads num_key_value_heads multi_query_group_num"
                " num_attention_groups",
    "head_dim": "head_dim hidden_size_per_head attention_head_dim kv_channels",
    "v_head_dim": "v_head_dim", "vocab": "vocab_size padded_vocab_size",
    "ffn": "dense_intermediate_size intermediate_size_mlp intermediate_size n_inner ffn_dim"
           " ffn_hidden_size",
    "max_len": "max_position_embeddings n_positions max_sequence_length seq_length"
               " model_max_length",
    "window": "sliding_window sliding_window_size", "chunk": "attention_chunk_size",
    "swa_heads": "swa_num_attention_heads", "swa_kv_heads": "swa_num_key_value_heads",
    "swa_head_dim": "swa_head_dim", "swa_v_head_dim": "swa_v_head_dim",
    "kv_shared": "num_kv_shared_layers", "per_layer_input": "hidden_size_per_layer_input",
    "q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim", "index_heads": "index_n_heads", "index_dim": "index_head_dim",
    "index_topk": "index_topk", "o_groups": "o_groups", "o_lora": "o_lora_rank",
    "hc_mult": "hc_mult", "hash_layers": "num_hash_layers",
    "conv": "linear_conv_kernel_dim conv_kernel mamba_d_conv",
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim", "value_dim": "linear_value_head_dim",
    "mamba_heads": "mamba_num_heads", "mamba_dim": "mamba_head_dim", "groups": "n_groups",
    "state": "ssm_state_size mamba_d_state",
    "experts": "num_experts moe_num_experts n_routed_experts num_local_experts",
    "top_k": "num_experts_per_tok num_experts_per_token experts_per_token top_k_experts"
             " moe_topk moe_top_k",
    "expert_ffn": "moe_intermediate_size", "latent": "moe_latent_size routed_expert_hidden_size",
    "embed_dim": "word_embed_proj_dim",
    "mtp": "num_nextn_predict_layers mtp_num_hidden_layers num_mtp_modules",
}
LARGEST = {"layers": 2_000, "heads": 100_000, "hidden": 1_000_000, "vocab": 100_000_000,
           "max_len": 10_000_000_000}  # others: 10 million
MIXER_LETTERS = {
    "full_attention": "F", "attention": "F", "sliding_attention": "S", "chunked_attention": "C",
    "linear_attention": "L", "mamba": "M", "compressed_sparse_attention": "A",
    "heavily_compressed_attention": "H", "deepseek_sparse_attention": "F",
}
LAYOUT_LETTERS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")


class Fields:
    """config.json read by name: the text config first, null is absent, wrong types are refused."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Descend to the text config, however deep it is."""
        self.outer = self.text = config
        while True:
            inner = next((self.text[k] for k in TEXT_CONFIGS if self.text.get(k) is not None), None)
            if inner is None:
                break
            if not isinstance(inner, dict):
                raise UserError("config.json: text_config is not an object; expected {...}")
            self.text = inner

    def get(self, names: str, kind: Any = object, outer_first: bool = False) -> Any:
        """The first of the names that is there and not null, or None."""
        places = (self.outer, self.text) if outer_first else (self.text,)
        for place in places:
            for name in names.split():
                value = place.get(name)
                if value is not None:
                    if not isinstance(value, kind):
                        raise UserError(f"config.json: {name} is {_shown(value)}; wrong type")
                    return value
        return None

    def number(self, names: str, largest: int = 10_000_000) -> Optional[int]:
        """A whole number from 0 to largest (a list stands for its first entry), or None."""
        for name in names.split():
            value: Any = self.text.get(name)
            value = value[0] if isinstance(value, list) and value else value
            if value is None:
                continue
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            if isinstance(value, bool) or not whole or not 0 <= value <= largest:
                raise UserError(f"config.json: {name} is {_shown(value)};"
                                f" expected a whole number from 0 to {largest}")
            return int(value)
        return None

    def integers(self, names: str) -> List[int]:
        """A list of whole numbers; [] if it is absent."""
        values = self.get(names, list) or []
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise UserError(f"config.json: {names} is {_shown(values)}; expected whole numbers")
        return list(values)

    def flag(self, names: str, default: bool, outer_first: bool = False) -> bool:
        """true or false, or the default if absent."""
        value = self.get(names, bool, outer_first)
        return default if value is None else bool(value)

    def per_layer(self, name: str, layers: int) -> Optional[List[Any]]:
        """A list with an entry for each layer, cut to the layers (MTP entries may follow)."""
        values = self.get(name, list) or None
        if values is not None and len(values) < layers:
            raise UserError(f"config.json: {name} has {len(values)} entries for {layers} layers")
        return None if values is None else list(values[:layers])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def normalise(config: Any, quant: Optional[Mapping[str, Any]] = None, name: str = "") -> Row:
    """The row for a config.json (and hf_quant_config.json, if any); UserError if it is bad."""
    if not isinstance(config, dict):
        raise UserError(f"config.json holds {_shown(config)}; expected a JSON object")
    fields = Fields(config)
    archs = [a for c in (config, fields.text) for a in fields_list(c, "architectures")]
    types = [t for t in (fields.text.get("model_type"), config.get("model_type"))
             if isinstance(t, str)]
    family = family_of(archs + types)
    row: Row = {**(family or {}), "arch": (archs + types + ["unknown"])[0], "notes": []}
    row["name"] = name or str(config.get("_name_or_path") or row["arch"])
    if family is None:
        row["estimated"] = True
        row["notes"].append(f"{row['arch']} is not a known architecture: counted as a generic"
                            " decoder")
    _read_numbers(fields, row)
    _read_attention(fields, row)
    _read_recurrent(fields, row)
    _read_mixers(fields, row)
    _read_experts(fields, row)
    _read_rest(fields, row)
    _read_odd_families(fields, row)
    row["quant"] = read_quant(fields, quant)
    _check(row)
    return row


def fields_list(config: Mapping[str, Any], name: str) -> List[str]:
    """The texts in a list of the config; [] if it is absent or no list."""
    values = config.get(name)
    return [v for v in values if isinstance(v, str)] if isinstance(values, list) else []


def _read_numbers(fields: Fields, row: Row) -> None:
    for key, names in NUMBERS.items():
        value = fields.number(names, LARGEST.get(key, 10_000_000))
        if value == 0 and key == "kv_heads":
            raise UserError("config.json: the number of KV heads is 0; expected 1 or more")
        if value or (value is not None and key != "head_dim"):  # head_dim 0 means absent
            row[key] = value
    layout = fields.get("hybrid_override_pattern layers_block_type", (str, list))
    if isinstance(layout, list):
        layout = "".join(LAYOUT_LETTERS.get(kind, "?") for kind in map(str, layout))
    if layout and not fields.text.get("attn_layer_period"):
        row["layout"] = layout.replace("|", "")
        row.setdefault("layers", len(row["layout"]))
        if set(row["layout"]) - set("M*E-") or len(row["layout"]) < row["layers"]:
            raise UserError(f"config.json: layer pattern {_shown(layout)} does not describe"
                            f" {row['layers']} layers in M, *, E, -")
    for key in ("layers", "hidden", "heads", "vocab"):
        if not row.get(key):
            how = "is 0" if key in row else "is missing"
            raise UserError(f"config.json: {NUMBERS[key].split()[0]} {how}; is it the config of a"
                            " language model?")
    if not row.get("ffn") and row.get("ffn_times"):
        row["ffn"] = row["ffn_times"] * row["hidden"]


def _read_attention(fields: Fields, row: Row) -> None:
    bias = fields.get("attention_bias use_bias qkv_bias use_qkv_bias add_qkv_bias", bool)
    if bias is not None:
        qkv_only = any(fields.text.get(k) for k in ("qkv_bias", "use_qkv_bias", "add_qkv_bias"))
        governed = ("qkv_bias",) if qkv_only else row.get("bias_flag", ("qkv_bias", "o_bias"))
        row.update(dict.fromkeys(governed, bias))
    row["o_bias"] = fields.flag("attention_out_bias", row.get("o_bias", False))
    use_norm = fields.get("use_qk_norm", bool)
    if use_norm is True:
        row.setdefault("qk_norm", row.get("qk_norm_flag", ""))
    elif use_norm is False:
        row["qk_norm"] = ""
    norm_type = {"per_head": "head", "per_layer": "layer"}.get(str(fields.get("qk_norm_type")))
    if norm_type and row.get("qk_norm"):
        row["qk_norm"] = norm_type
    sinks = (fields.flag("add_full_attention_sink_bias", False),
             fields.flag("add_swa_attention_sink_bias", False))
    if any(sinks):
        row["sinks"] = {(True, True): "all", (True, False): "F"}.get(sinks, "S")
    indexers = fields.per_layer("indexer_types", row["layers"])
    if indexers and row.get("index_heads"):
        row["indexers"] = "".join("I" if kind == "full" else "-" for kind in indexers)
    row["k_eq_v"] = fields.flag("attention_k_eq_v", False)
    wide = fields.number("global_head_dim")
    if wide:  # Gemma-4: the plain names are those of the sliding layers
        row["swa_kv_heads"] = row.get("kv_heads") or row["heads"]
        row["swa_head_dim"] = row.get("head_dim") or row["hidden"] // row["heads"]
        row["head_dim"] = wide
        if row["k_eq_v"]:
            row["kv_heads"] = fields.number("num_global_key_value_heads") or row.get("kv_heads", 0)


def _read_recurrent(fields: Fields, row: Row) -> None:
    delta = fields.get("linear_attn_config", dict)  # Kimi-Linear
    if delta:
        inner = Fields(delta)
        row.update(value_heads=inner.number("num_heads") or 0, estimated=True,
                   value_dim=inner.number("head_dim") or 0, state_bytes_each=4,
                   conv=inner.number("short_conv_kernel_size") or 4,
                   full_gate=inner.flag("use_full_rank_gate", False),
                   mla_gate=fields.flag("mla_use_output_gate", False))
        row["notes"].append("delta-attention and latent-expert layers are estimated")
    if "mamba_d_state" in fields.text:  # Jamba
        rank = fields.get("mamba_dt_rank", (int, str))
        row["dt_rank"] = (fields.number("mamba_dt_rank") if isinstance(rank, int)
                          else -(-row["hidden"] // 16))
        row["mamba_dim"] = (fields.number("mamba_expand") or 2) * row["hidden"]
    row["conv_bias"] = fields.flag("use_conv_bias mamba_conv_bias", True)
    row["mamba_bias"] = fields.flag("mamba_proj_bias", False)
    dtype = fields.get("mamba_ssm_dtype mamba_ssm_cache_dtype", str)
    if dtype is not None and "float32" in dtype:
        row["state_bytes_each"] = 4


def _read_mixers(fields: Fields, row: Row) -> None:
    """The mixer of each layer: the most explicit statement wins; then windows that do not bind."""
    layers = row["layers"]
    kinds = fields.per_layer("layer_types", layers)
    ratios = fields.per_layer("compress_ratios", layers)
    hybrid = fields.per_layer("hybrid_layer_pattern", layers)
    attention = fields.per_layer("attn_type_list", layers)
    if ratios:
        row["mixers"] = "".join("S" if r == 0 else "A" if r == 4 else "H" for r in ratios)
    elif hybrid:
        row["mixers"] = "".join("S" if k == 1 else "F" for k in hybrid)
    elif attention:
        row["mixers"] = "".join("F" if k == 1 else "N" for k in attention)
    elif kinds:
        row["mixers"] = "".join(MIXER_LETTERS.get(str(kind), "?") for kind in kinds)
        if "?" in row["mixers"]:
            row["mixers"] = row["mixers"].replace("?", "F")
            row["estimated"] = True
            row["notes"].append("some layer_types are not known: counted as full attention")
    else:
        row["mixers"] = _mixers_by_rule(fields, row)
    if row.get("dt_rank"):
        row["mixers"] = row["mixers"].replace("M", "J")
    unbound = not row.get("window") or 0 < row.get("max_len", 0) <= row["window"]
    if unbound or (fields.get("use_sliding_window") is False and not kinds):
        row["mixers"] = row["mixers"].replace("S", "F")
    if not row.get("chunk"):
        row["mixers"] = row["mixers"].replace("C", "F")


def _mixers_by_rule(fields: Fields, row: Row) -> str:
    """Mixer pattern from intervals and periods."""
    layers = range(row["layers"])
    interval = fields.number("full_attention_interval")
    period = fields.number("attn_layer_period") or row.get("attn_period")
    delta = fields.get("linear_attn_config", dict)
    every = fields.number("sliding_window_pattern _sliding_window_pattern")
    ropes = fields.per_layer("no_rope_layers", row["layers"])
    rope_step = fields.number("no_rope_layer_interval")
    first_window = fields.number("max_window_layers")
    if interval:
        return "L" * (interval - 1) + "F"
    if period:
        offset = fields.number("attn_layer_offset")
        offset = row.get("attn_offset", 0) if offset is None else offset
        return "".join("F" if i % period == offset else "M" for i in layers)
    if delta:
        full = set(Fields(delta).integers("full_attn_layers"))  # counted from 1
        return "".join("F" if i + 1 in full else "K" for i in layers)
    if every:
        return "S" * (every - 1) + "F"
    if row.get("chunk") and (ropes or rope_step):
        return ("".join("C" if rope else "F" for rope in ropes) if ropes
                else "C" * ((rope_step or 1) - 1) + "F")
    if "mixers" in row:
        return str(row["mixers"])
    if fields.flag("use_sliding_window", False) and first_window is not None:
        return "".join("S" if i >= first_window else "F" for i in layers)
    wanted = fields.flag("use_sliding_window", not row.get("swa_opt_in", False))
    return "S" if row.get("window") and wanted else "F"


def _read_experts(fields: Fields, row: Row) -> None:
    if row.get("experts", 0) <= 1:
        row.update(experts=0, top_k=0, ffns="D")
        return
    row.setdefault("top_k", fields.number("top_k") or 0)
    plain = fields.number("intermediate_size ffn_hidden_size") or 0
    row.setdefault("expert_ffn", plain)
    shared = fields.number("n_shared_experts num_shared_experts moe_num_shared_experts") or 0
    width = fields.number("shared_expert_intermediate_size moe_shared_expert_intermediate_size"
                          " share_expert_dim shared_intermediate_size")
    row["shared_ffn"] = shared * row["expert_ffn"] if width is None else width
    if row.get("shared_is_ffn"):
        row["shared_ffn"] = plain
    if not row["shared_ffn"]:
        row["shared_gate"] = False
    row["score_bias"] = fields.flag("use_routing_bias use_moe_router_bias",
                                    row.get("score_bias", False))
    row["moe_plus_dense"] = fields.flag("enable_moe_block", False)
    row["ffns"] = _expert_layers(fields, row)


def _expert_layers(fields: Fields, row: Row) -> str:
    """FFN pattern: which layers hold experts."""
    layers = range(row["layers"])
    kinds = fields.per_layer("mlp_layer_types", row["layers"])
    listed: Any = fields.get("moe_layers moe_layers_enum", (list, str))
    frequency = fields.get("moe_layer_freq", (list, int))
    period = fields.number("expert_layer_period") or row.get("expert_period")
    step = fields.number("interleave_moe_layer_step decoder_sparse_step") or 1
    first = fields.number("first_k_dense_replace") or 0
    if kinds:
        chosen = {i for i in layers if kinds[i] == "sparse"}
    elif listed:
        texts = listed.split(",") if isinstance(listed, str) else listed
        chosen = {int(i) for i in texts if str(i).strip().isdecimal()}
    elif frequency and isinstance(frequency, list):
        flags = fields.per_layer("moe_layer_freq", row["layers"]) or []
        chosen = {i for i in layers if flags[i]}
    elif period:
        offset = fields.number("expert_layer_offset")
        offset = row.get("expert_offset", 0) if offset is None else offset
        chosen = {i for i in layers if i % period == offset}
    else:
        dense = set(fields.integers("mlp_only_layers"))
        chosen = {i for i in layers if i >= first and (i + 1) % step == 0 and i not in dense
                  and i % (frequency or 1) == 0}
    return "".join("E" if i in chosen else "D" for i in layers)


def _read_rest(fields: Fields, row: Row) -> None:
    tied = fields.get("tie_word_embeddings", bool, outer_first=True)
    row["tied"] = row.get("tied", False) if tied is None else tied
    inner = fields.text.get("tie_word_embeddings")
    if isinstance(inner, bool) and inner != row["tied"]:
        row["notes"].append(f"tie_word_embeddings: the outer {str(row['tied']).lower()} is used,"
                            " the text config says otherwise")
    row["mlp_bias"] = fields.flag("mlp_bias use_bias", row.get("mlp_bias", False))
    row["head_bias"] = fields.flag("lm_head_bias", row.get("head_bias", False))
    row["double_wide"] = fields.flag("use_double_wide_mlp", False)
    if "extra_positions" in row:
        row["positions"] = row.get("max_len", 0) + row["extra_positions"]
    if row.get("per_layer_input"):
        row["estimated"] = True
        row["notes"].append("per-layer input embeddings are estimated")
    vision = next((fields.outer[k] for k in ("vision_config", "visual")
                   if isinstance(fields.outer.get(k), dict)), None)
    if vision:  # roughly depth * (4 h^2 + 2 h mlp); 0 if the config does not say
        depth, hidden, mlp = (
            next((vision[n] for n in names.split() if isinstance(vision.get(n), int)), 0)
            for names in ("depth num_hidden_layers vt_num_hidden_layers",
                          "hidden_size embed_dim vt_hidden_size",
                          "intermediate_size vt_intermediate_size"))
        row["vision_params"] = depth * (4 * hidden**2 + 2 * hidden * (mlp or 4 * hidden))
        row["notes"].append("the vision tower is not counted")


def _read_odd_families(fields: Fields, row: Row) -> None:
    """What one family alone says in its own way."""
    kind = stem(row["arch"])
    if kind == "falcon":
        new = fields.flag("new_decoder_architecture", False)
        alone = fields.number("num_ln_in_parallel_attn")
        row["norms"] = (alone or 2) if new else 1 if fields.flag("parallel_attn", True) else 2
        if fields.flag("multi_query", True) and not new:
            row["kv_heads"] = 1
        bias = fields.flag("bias", False)
        row.update(qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    elif kind == "gptbigcode" and fields.flag("multi_query", True):
        row["kv_heads"] = 1
    elif kind == "opt":
        row["final_norm"] = fields.flag("do_layer_norm_before", True)
    elif kind == "stablelm":
        row["norms"] = 1 if fields.flag("use_parallel_residual", False) else 2
        row["qk_norm"] = ""
    blocks = fields.get("block_configs", list)
    if blocks is not None:
        row["blocks"] = [_nas_block(block, row) for block in blocks]
        if len(blocks) != row["layers"]:
            raise UserError(f"config.json: block_configs has {len(blocks)} entries for"
                            f" {row['layers']} layers")
        row["kv_heads"] = max(kv for kv, _, _ in row["blocks"])


def _nas_block(block: Any, row: Row) -> Tuple[int, int, int]:
    """(KV heads, FFN width, 1) of a Nemotron-NAS block; 0 = none, -1 = one linear layer."""
    try:
        attention, ffn = block["attention"], block["ffn"]
        kv_heads = 0 if attention.get("no_op") else -1
        if not kv_heads or not attention.get("replace_with_linear"):
            kv_heads = kv_heads and row["heads"] // int(attention["n_heads_in_group"])
        width = 0 if ffn.get("no_op") else -1
        if width and not ffn.get("replace_with_linear"):
            width = int(2 * float(ffn["ffn_mult"]) * row["hidden"] / 3)
            width = -(-width // 256) * 256
    except (KeyError, TypeError, ArithmeticError, ValueError, AttributeError):
        raise UserError("config.json: a block of block_configs lacks attention.n_heads_in_group"
                        " or ffn.ffn_mult") from None
    return kv_heads, width, 1


def _check(row: Row) -> None:
    """Refuse sizes that do not fit each other."""
    full = {**DEFAULTS, **row}
    kinds = layer_kinds(row)
    heads, kv_heads = full["heads"], full["kv_heads"] or full["heads"]
    if not full["kv_lora"] and heads % kv_heads:
        raise UserError(f"config.json: {heads} attention heads are not a multiple of"
                        f" {kv_heads} KV heads")
    if full["experts"] and not 0 < full["top_k"] <= full["experts"]:
        raise UserError(f"config.json: {full['top_k']} experts per token of {full['experts']};"
                        " num_experts_per_tok must be from 1 to the number of experts")
    if any(kind.ffn == "D" and not kind.width for kind in kinds):
        raise UserError("config.json has no intermediate_size, which its layers need")
    needs = (
        ("E", "expert_ffn", "moe_intermediate_size"),
        ("L", "value_dim", "linear_value_head_dim"), ("M", "state", "ssm_state_size"),
    )
    for letter, key, name in needs:
        if any(letter in kind[:2] for kind in kinds) and not full[key]:
            raise UserError(f"config.json has no {name}, which its layers need")
    if not any(c.elements or c.state_bytes for c in caches_of(full)):
        raise UserError("config.json: no layer keeps a KV cache or a state; is it a language"
                        " model's?")
    if full["kv_lora"] and not full["rope"] + full["nope"]:
        raise UserError("config.json has kv_lora_rank but no qk_nope_head_dim, qk_rope_head_dim")
    if not full["kv_lora"] and not full["head_dim"] and heads > full["hidden"]:
        raise UserError(f"config.json: hidden_size {full['hidden']} is less than {heads} heads")


# ---- 3b. A row to tensors ----------------------------------------------------------------------


def spread(pattern: str, layers: int) -> str:
    """One letter for each layer from a pattern: spread("DD|E", 5) -> "DDEEE"."""
    head, _, body = pattern.rpartition("|")
    rest = max(0, layers - len(head))
    return (head + body * (rest // max(1, len(body)) + 1))[:layers]


class Kind(NamedTuple):
    """What tells one layer from another."""

    mixer: str
    ffn: str
    kv_heads: int  # 0 = as the row says
    width: int  # of the dense FFN
    indexer: bool  # has its own sparse-attention indexer
    hashed: bool  # routes by token id: no score bias (DeepSeek-V4)
    shared_kv: bool  # reuses the KV cache of an earlier layer


def layer_kinds(row: Row) -> List[Kind]:
    """The kind of each layer."""
    r = {**DEFAULTS, **row}
    count = r["layers"]
    if r["layout"]:
        mixers = r["layout"].translate(str.maketrans("M*E-", "MF--"))
        ffns = r["layout"].translate(str.maketrans("M*E-", "--ED"))
    else:
        mixers = spread(r["mixers"], count)
        ffns = spread(r["ffns"] or ("E" if r["experts"] else "D"), count)
    if r["blocks"]:
        blocks = [(kv, width) for kv, width, times in r["blocks"] for _ in range(times)]
        return [Kind("F" if kv > 0 else "R" if kv else "-", "D" if width > 0 else
                     "R" if width else "-", max(kv, 0), width, False, False, False)
                for kv, width in blocks]
    indexers = spread(r["indexers"], count) if r["index_heads"] else "-" * count
    first_shared = count - r["kv_shared"]
    return [
        Kind(mixers[i], ffns[i], 0,
             r["ffn"] * (2 if r["double_wide"] and i >= first_shared else 1),
             indexers[i] == "I" and mixers[i] in "FA", i < r["hash_layers"], i >= first_shared)
        for i in range(count)
    ]


def heads_of(r: Row, kind: Kind) -> Tuple[int, int, int, int]:
    """Query heads, KV heads, d_k and d_v of an attention layer (row with defaults)."""
    heads = r["heads"]
    d_k = r["head_dim"] or r["hidden"] // heads
    d_v = r["v_head_dim"] or d_k
    kv_heads = kind.kv_heads or r["kv_heads"] or heads
    if kind.mixer == "S":
        d_v = r["swa_v_head_dim"] or r["swa_head_dim"] or d_v
        d_k = r["swa_head_dim"] or d_k
        heads, kv_heads = r["swa_heads"] or heads, r["swa_kv_heads"] or kv_heads
    return heads, kv_heads, d_k, d_v


def _matrix(name: str, d_in: int, d_out: int, split: str = "tp", bias: bool = False,
            copies: int = 1) -> List[Tensor]:
    """A linear layer; the bias of a layer that sums over ranks is on each rank."""
    found = [Tensor(name, (), d_in, d_out, copies, split)]
    if bias:
        summed = name.endswith(("o_proj", "down_proj", "out_proj")) and split == "tp"
        found.append(Tensor(name + ".bias", (), 0, d_out, copies, "none" if summed else split))
    return found


def _vector(name: str, size: int, split: str = "none") -> List[Tensor]:
    return [Tensor(name, (), 0, size, 1, split)]


def tensors_of(row: Row) -> Tuple[Tensor, ...]:
    """Every weight of the model, layers of one kind together."""
    r = {**DEFAULTS, **row}
    found = _outer_tensors(r)
    groups: Dict[Kind, List[int]] = {}
    for i, kind in enumerate(layer_kinds(row)):
        groups.setdefault(kind, []).append(i)
    for kind, indices in groups.items():
        layers = tuple(indices)
        parts = _mixer_tensors(r, kind) + _ffn_tensors(r, kind) + _layer_norms(r, kind)
        found += [t._replace(layers=layers) for t in parts if t.d_out]
    return tuple(found)


def _outer_tensors(r: Row) -> List[Tensor]:
    hidden, vocab, wide = r["hidden"], r["vocab"], r["embed_dim"] or r["hidden"]
    found = [Tensor("model.embed_tokens", (), wide, vocab, 1, "vocab")]
    if not r["tied"]:
        found.append(Tensor("lm_head", (), hidden, vocab, 1, "vocab"))
    if r["head_bias"]:
        found.append(Tensor("lm_head.bias", (), 0, vocab, 1, "vocab"))
    if r["final_norm"]:
        found += _vector("model.norm", hidden * r["norm_width"])
    if r["positions"]:
        found += _matrix("model.embed_positions", hidden, r["positions"], "none")
    if wide != hidden:  # OPT-350m
        found += _matrix("model.project_in", wide, hidden, "none")
        found += _matrix("model.project_out", hidden, wide, "none")
    if r["hc_mult"]:
        found += _matrix("model.hc_head", r["hc_mult"] * hidden, r["hc_mult"], "none")
        found += _vector("model.hc_head.base", r["hc_mult"] + 1)
    if r["per_layer_input"]:
        size = r["per_layer_input"] * r["layers"]
        found += _matrix("model.embed_tokens_per_layer", size, vocab, "vocab")
        found += _matrix("model.per_layer_model_projection", hidden, size, "none")
        found += _vector("model.per_layer_projection_norm", r["per_layer_input"])
    return found


def _layer_norms(r: Row, kind: Kind) -> List[Tensor]:
    hidden, count = r["hidden"], r["norms"]
    if r["blocks"]:
        count -= (kind.mixer == "-") + (kind.ffn == "-")
    if kind.ffn == "E" and r["moe_plus_dense"]:
        count += 3  # Gemma-4
    found = _vector("norms", count * hidden * r["norm_width"]) if count else []
    if r["hc_mult"]:  # DeepSeek-V4 hyper-connections, before attention and before the FFN
        streams = r["hc_mult"]
        mix = (2 + streams) * streams
        for name in ("hc_attn", "hc_ffn"):
            found += _matrix(name, streams * hidden, mix, "none") + _vector(name + ".base", mix + 3)
    if r["per_layer_input"]:
        found += _matrix("per_layer_input_gate", hidden, r["per_layer_input"], "none")
        found += _matrix("per_layer_projection", r["per_layer_input"], hidden, "none")
        found += _vector("post_per_layer_input_norm", hidden)
    return found


def _mixer_tensors(r: Row, kind: Kind) -> List[Tensor]:
    at = r["paths"].split()[0]
    hidden = r["hidden"]
    if kind.mixer == "-":
        return []
    if kind.mixer == "R":
        return _matrix(f"{at}.linear_attn", hidden, hidden)
    if kind.mixer in "LKNMJ":
        return RECURRENT[kind.mixer](r)
    if r["hc_mult"]:
        return _compressed_attention(r, kind, at)
    found = _latent_attention(r, at) if r["kv_lora"] else _grouped_attention(r, kind, at)
    return found + (_indexer(r, at) if kind.indexer else [])


def _grouped_attention(r: Row, kind: Kind, at: str) -> List[Tensor]:
    """MHA, GQA, MQA: q, k, v, o with biases, QK norms, output gate and sinks where they are."""
    hidden, bias = r["hidden"], r["qkv_bias"]
    heads, kv_heads, d_k, d_v = heads_of(r, kind)
    found = _matrix(f"{at}.q_proj", hidden, heads * d_k * (2 if r["gate"] else 1), "tp", bias)
    if not kind.shared_kv:
        found += _matrix(f"{at}.k_proj", hidden, kv_heads * d_k, "kv", bias)
        if not (r["k_eq_v"] and kind.mixer == "F"):
            found += _matrix(f"{at}.v_proj", hidden, kv_heads * d_v, "kv", bias)
    found += _matrix(f"{at}.o_proj", heads * d_v, hidden, "tp", r["o_bias"])
    if r["qk_norm"]:
        each = (1, 1) if r["qk_norm"] == "head" else (heads, kv_heads)
        found += _vector(f"{at}.q_norm", each[0] * d_k)
        found += [] if kind.shared_kv else _vector(f"{at}.k_norm", each[1] * d_k)
    if r["sinks"] in ("all", kind.mixer):
        found += _vector(f"{at}.sinks", heads, "tp")
    return found


def _latent_attention(r: Row, at: str) -> List[Tensor]:
    """MLA (DeepSeek-V2/V3, Kimi, GLM-5): down-projections are on each TP rank."""
    hidden, heads, latent, rope = r["hidden"], r["heads"], r["kv_lora"], r["rope"]
    d_qk, d_v = r["nope"] + rope, r["v_head_dim"] or r["nope"]
    if r["q_lora"]:
        found = _matrix(f"{at}.q_a_proj", hidden, r["q_lora"], "none", r["qkv_bias"])
        found += _vector(f"{at}.q_a_layernorm", r["q_lora"])
        found += _matrix(f"{at}.q_b_proj", r["q_lora"], heads * d_qk)
    else:
        found = _matrix(f"{at}.q_proj", hidden, heads * d_qk)
    found += _matrix(f"{at}.kv_a_proj_with_mqa", hidden, latent + rope, "none", r["qkv_bias"])
    found += _vector(f"{at}.kv_a_layernorm", latent)
    found += _matrix(f"{at}.kv_b_proj", latent, heads * (r["nope"] + d_v))
    if r["mla_gate"]:
        found += _matrix(f"{at}.g_proj", hidden, heads * d_v)
    return found + _matrix(f"{at}.o_proj", heads * d_v, hidden, "tp", r["o_bias"])


def _indexer(r: Row, at: str) -> List[Tensor]:
    """Sparse-attention indexer: DSA (DeepSeek-V3.2, GLM-5) with a query latent, or MiniMax-M3."""
    hidden, heads, dim = r["hidden"], r["index_heads"], r["index_dim"]
    found = _matrix(f"{at}.indexer.wq_b", r["q_lora"] or hidden, heads * dim, "none")
    found += _matrix(f"{at}.indexer.wk", hidden, dim, "none")
    found += _vector(f"{at}.indexer.k_norm", 2 * dim)
    if r["q_lora"]:
        found += _matrix(f"{at}.indexer.weights_proj", hidden, heads, "none")
    return found


def _compressed_attention(r: Row, kind: Kind, at: str) -> List[Tensor]:
    """DeepSeek-V4: one KV head, compressed 4x (A, with indexer) or 128x (H); grouped output."""
    hidden, heads, dim, q_lora = r["hidden"], r["heads"], r["head_dim"], r["q_lora"]
    grouped = r["o_groups"] * r["o_lora"]
    found = _matrix(f"{at}.wq_a", hidden, q_lora, "none") + _vector(f"{at}.q_norm", q_lora)
    found += _matrix(f"{at}.wq_b", q_lora, heads * dim)
    found += _matrix(f"{at}.wkv", hidden, dim, "none") + _vector(f"{at}.kv_norm", dim)
    found += _matrix(f"{at}.wo_a", heads * dim // max(1, r["o_groups"]), grouped)
    found += _matrix(f"{at}.wo_b", grouped, hidden) + _vector(f"{at}.attn_sink", heads, "tp")
    if kind.mixer in "AH":
        found += _compressor(f"{at}.compressor", hidden, dim, COMPRESSION[kind.mixer])
    if kind.mixer == "A":
        found += _matrix(f"{at}.indexer.wq_b", q_lora, r["index_heads"] * r["index_dim"], "none")
        found += _matrix(f"{at}.indexer.weights_proj", hidden, r["index_heads"], "none")
        found += _compressor(f"{at}.indexer.compressor", hidden, r["index_dim"], 4)
    return found


INDEX_BYTES = 1 + 4 / 128  # an index key's element: FP8, one scale of 4 B for 128 (vLLM, SGLang)
COMPRESSION = {"A": 4, "H": 128}  # tokens in a KV entry


def _compressor(name: str, hidden: int, dim: int, ratio: int) -> List[Tensor]:
    wide = dim * (2 if ratio == 4 else 1)  # the 4x windows overlap
    return (_matrix(f"{name}.wkv", hidden, wide, "none")
            + _matrix(f"{name}.wgate", hidden, wide, "none")
            + _vector(f"{name}.ape", ratio * wide) + _vector(f"{name}.norm", dim))


def _gated_delta(r: Row) -> List[Tensor]:
    """Gated DeltaNet of Qwen3-Next and Qwen3.5."""
    hidden, heads, conv = r["hidden"], r["value_heads"], r["conv"]
    keys, values = r["key_heads"] * r["key_dim"], heads * r["value_dim"]
    return (_matrix("linear_attn.in_proj_qkv", hidden, 2 * keys + values)
            + _matrix("linear_attn.in_proj_z", hidden, values)
            + _matrix("linear_attn.in_proj_b", hidden, heads)
            + _matrix("linear_attn.in_proj_a", hidden, heads)
            + _matrix("linear_attn.conv1d", conv, 2 * keys + values)
            + _vector("linear_attn.A_log", 2 * heads, "tp")  # and dt_bias
            + _vector("linear_attn.norm", r["value_dim"])
            + _matrix("linear_attn.out_proj", values, hidden))


def _kimi_delta(r: Row) -> List[Tensor]:
    """Kimi delta attention; the gates are of full rank, or of the rank of a head."""
    hidden, heads, dim = r["hidden"], r["value_heads"], r["value_dim"]
    wide = heads * dim
    found: List[Tensor] = []
    for name in "qkv":
        found += _matrix(f"self_attn.{name}_proj", hidden, wide)
        found += _matrix(f"self_attn.{name}_conv1d", r["conv"], wide)
    for name in "fg":
        if r["full_gate"]:
            found += _matrix(f"self_attn.{name}_proj", hidden, wide)
        else:
            found += _matrix(f"self_attn.{name}_a_proj", hidden, dim, "none")
            found += _matrix(f"self_attn.{name}_b_proj", dim, wide)
    return (found + _matrix("self_attn.b_proj", hidden, heads)
            + _vector("self_attn.A_log", heads + wide, "tp") + _vector("self_attn.o_norm", dim)
            + _matrix("self_attn.o_proj", wide, hidden))


def _lightning(r: Row) -> List[Tensor]:
    """Lightning attention of MiniMax-M1."""
    hidden = r["hidden"]
    wide = r["heads"] * (r["head_dim"] or hidden // r["heads"])
    return (_matrix("self_attn.qkv_proj", hidden, 3 * wide)
            + _matrix("self_attn.output_gate", hidden, wide)
            + _vector("self_attn.norm", wide, "tp") + _matrix("self_attn.out_proj", wide, hidden))


def _mamba2(r: Row) -> List[Tensor]:
    """Mamba-2 of Nemotron-H; its width is heads * head size, "expand" is not used."""
    hidden, heads = r["hidden"], r["mamba_heads"]
    inner = heads * r["mamba_dim"]
    wide = inner + 2 * r["groups"] * r["state"]
    found = _matrix("mixer.in_proj", hidden, inner + wide + heads, "tp", r["mamba_bias"])
    found += _matrix("mixer.conv1d", r["conv"], wide, "tp", r["conv_bias"])
    found += _vector("mixer.A_log", 3 * heads, "tp")  # and D, dt_bias
    found += _vector("mixer.norm", inner, "tp")
    return found + _matrix("mixer.out_proj", inner, hidden, "tp", r["mamba_bias"])


def _mamba1(r: Row) -> List[Tensor]:
    """Mamba-1 of Jamba, with norms on dt, B and C."""
    hidden, inner, state, rank = r["hidden"], r["mamba_dim"], r["state"], r["dt_rank"]
    return (_matrix("mamba.in_proj", hidden, 2 * inner, "tp", r["mamba_bias"])
            + _matrix("mamba.conv1d", r["conv"], inner, "tp", r["conv_bias"])
            + _matrix("mamba.x_proj", inner, rank + 2 * state)
            + _matrix("mamba.dt_proj", rank, inner, "tp", True)
            + _vector("mamba.A_log", inner * (state + 1), "tp")  # and D
            + _vector("mamba.dt_layernorm", rank + 2 * state)
            + _matrix("mamba.out_proj", inner, hidden, "tp", r["mamba_bias"]))


RECURRENT = {"L": _gated_delta, "K": _kimi_delta, "N": _lightning, "M": _mamba2, "J": _mamba1}


def _ffn_tensors(r: Row, kind: Kind) -> List[Tensor]:
    at = r["paths"].split()[1]
    if kind.ffn == "R":
        return _matrix(f"{at}.linear_mlp", r["hidden"], r["hidden"])
    found: List[Tensor] = []
    if kind.ffn == "D" or (kind.ffn == "E" and r["moe_plus_dense"]):
        dense = "mlp" if at == "block_sparse_moe" else at
        found = _mlp(r, dense, r["hidden"], kind.width)
    if kind.ffn == "E":
        found += _experts(r, kind, at)
    return found


def _mlp(r: Row, at: str, hidden: int, width: int, copies: int = 1,
         bias: Optional[bool] = None) -> List[Tensor]:
    """Gated (three matrices) or plain (two) FFN."""
    split = "tp" if copies == 1 else "expert"
    biased = r["mlp_bias"] if bias is None else bias
    found = []
    if r["mlp"] == "gated":
        found = _matrix(f"{at}.gate_proj", hidden, width, split, biased, copies)
    found += _matrix(f"{at}.up_proj", hidden, width, split, biased, copies)
    return found + _matrix(f"{at}.down_proj", width, hidden, split, biased, copies)


def _experts(r: Row, kind: Kind, at: str) -> List[Tensor]:
    """Router, routed experts, shared expert."""
    _, _, experts, router, shared = r["paths"].split()
    hidden, count, latent = r["hidden"], r["experts"], r["latent"]
    path = "" if r["moe_plus_dense"] else at + "."  # Gemma-4 keeps experts beside the MLP
    found = _matrix(f"{path}{router}", hidden, count, "none", r["router_bias"])
    if r["score_bias"] and not kind.hashed:
        found += _vector(f"{path}{router}.e_score_correction_bias", count)
    if r["moe_plus_dense"]:
        found += _vector(f"{path}{router}.scale", hidden + count)
    found += _mlp(r, f"{path}{experts}.*", latent or hidden, r["expert_ffn"], count,
                  r["expert_bias"])
    if latent:
        found += _matrix(f"{path}fc1_latent_proj", hidden, latent, "none")
        found += _matrix(f"{path}fc2_latent_proj", latent, hidden, "none")
    if r["shared_ffn"]:
        found += _mlp(r, f"{path}{shared}", hidden, r["shared_ffn"])
    if r["shared_gate"]:
        found += _matrix(f"{path}shared_expert_gate", hidden, 1, "none")
    return found


# ---- 3c. A row to caches -----------------------------------------------------------------------


def caches_of(row: Row) -> Tuple[Cache, ...]:
    """What the layers keep for a sequence, equal layers together."""
    r = {**DEFAULTS, **row}
    counts: Dict[Cache, int] = {}
    for kind in layer_kinds(row):
        for cache in _layer_caches(r, kind):
            counts[cache] = counts.get(cache, 0) + 1
    return tuple(cache._replace(layers=n) for cache, n in counts.items())


def _layer_caches(r: Row, kind: Kind) -> List[Cache]:
    if kind.mixer in "R-":
        return []
    if kind.mixer in "LKNMJ":
        return [_state(r, kind.mixer)]
    if r["hc_mult"]:
        return _compressed_caches(r, kind)
    if r["kv_lora"]:
        heads, latent, rope = r["heads"], r["kv_lora"], r["rope"]
        found = [Cache("mla", 1, 1, latent + rope, reads=r["index_topk"],
                       flops=2 * heads * (r["nope"] + rope + (r["v_head_dim"] or r["nope"])),
                       decode_flops=2 * heads * (2 * latent + rope))]
    else:
        heads, kv_heads, d_k, d_v = heads_of(r, kind)
        name, window = {"S": ("sliding", r["window"]), "C": ("chunked", r["chunk"])}.get(
            kind.mixer, ("full", 0))
        kept = (0, 0) if kind.shared_kv else (kv_heads, d_k + d_v)
        work = 2 * heads * (d_k + d_v)
        found = [Cache(name, 1, *kept, window, flops=work, decode_flops=work,
                       reads=r["index_topk"] if kind.indexer and not kind.shared_kv else 0)]
    if kind.indexer:
        work = 2 * r["index_heads"] * r["index_dim"]
        found.append(Cache("indexer", 1, 1, r["index_dim"], element_bytes=INDEX_BYTES, flops=work,
                           decode_flops=work))
    return found


def _compressed_caches(r: Row, kind: Kind) -> List[Cache]:
    """DeepSeek-V4: a window of entries in every layer, one entry for 4 or 128 tokens beside it."""
    dim, work = r["head_dim"], 4 * r["heads"] * r["head_dim"]
    found = [Cache("sliding", 1, 1, dim, r["window"], flops=work, decode_flops=work)]
    if kind.mixer in "AH":
        every = COMPRESSION[kind.mixer]
        found.append(Cache("compressed", 1, 1, dim, every=every,
                           reads=r["index_topk"] if kind.mixer == "A" else 0,
                           flops=work // every, decode_flops=work // every))
    if kind.mixer == "A":
        work = 2 * r["index_heads"] * r["index_dim"] // 4
        found.append(Cache("indexer", 1, 1, r["index_dim"], every=4, element_bytes=INDEX_BYTES,
                           flops=work, decode_flops=work))
    return found


def _state(r: Row, mixer: str) -> Cache:
    """Fixed state of a recurrent layer: last inputs of the convolution (2 B each), and state."""
    rows, heads, dim = r["conv"] - 1, r["value_heads"], r["value_dim"]
    if mixer == "L":
        conv = (2 * r["key_heads"] * r["key_dim"] + heads * dim) * rows
        state = heads * dim * r["key_dim"]
    elif mixer == "K":
        conv, state = 3 * heads * dim * rows, heads * dim * dim
    elif mixer == "M":
        heads, inner = r["mamba_heads"], r["mamba_heads"] * r["mamba_dim"]
        conv = (inner + 2 * r["groups"] * r["state"]) * rows
        state = inner * r["state"]
    elif mixer == "J":
        heads, conv, state = r["mamba_dim"], r["mamba_dim"] * rows, r["mamba_dim"] * r["state"]
    else:
        heads, conv = r["heads"], 0
        state = heads * (r["head_dim"] or r["hidden"] // heads) ** 2
    return Cache("state", 1, heads, state_bytes=2 * conv + r["state_bytes_each"] * state,
                 state_elements=conv + state)


# ---- 3d. Bytes of quantised weights ------------------------------------------------------------


class Scheme(NamedTuple):
    """How a quantised matrix is stored: values, scales, zero points."""

    label: str
    bits: int
    group: int = 0  # inputs that share a scale; 0 = all
    block: int = 1  # outputs that share a scale; 0 = all
    scale_bytes: float = 0  # a scale (and zero point) [B]
    row_bytes: int = 0  # per input [B] (GPTQ g_idx)

    def bytes_of(self, d_in: int, d_out: int) -> float:
        """Stored size of a d_in x d_out matrix [B]."""
        scales = -(-d_in // (self.group or d_in)) * -(-d_out // (self.block or d_out))
        return d_in * d_out * self.bits / 8 + scales * self.scale_bytes + d_in * self.row_bytes


class Quant(NamedTuple):
    """Quantisation that a checkpoint declares."""

    method: str  # "" = none
    rules: Tuple[Tuple[Optional[Tuple[str, ...]], Scheme], ...] = ()  # (patterns or all, scheme)
    ignore: Tuple[str, ...] = ()
    plain_bytes: int = 2  # per unquantised weight [B]
    plain: str = "bf16"
    kv_native: str = ""


NVFP4 = Scheme("nvfp4", 4, 16, 1, 1)
MXFP4 = Scheme("mxfp4", 4, 32, 1, 1)
ROUGH = "unknown format"  # label of a method that is not in the table: taken from its bits
EXPERTS = ("re:.*\\.experts\\..*",)  # routed experts only
EXPERT_ALIASES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# quant_algo of NVIDIA modelopt -> scheme. NVFP4's one 4-byte scale per tensor is left out.
ALGOS = {
    "FP8": Scheme("fp8", 8), "NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "NVFP4_AWQ": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4, "MXFP8": Scheme("mxfp8", 8, 32, 1, 1), "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4, "FP8_PB_WO": Scheme("fp8", 8, 128, 128, 4),
    "FP8_BLOCK_SCALES": Scheme("fp8", 8, 128, 128, 4),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", 8, 0, 1, 4),
    "W4A16_AWQ": Scheme("int4", 4, 128, 1, 2), "W4A8_AWQ": Scheme("int4", 4, 128, 1, 2),
    "W8A16": Scheme("int8", 8, 0, 1, 2),
    "W8A8_SQ_PER_CHANNEL": Scheme("int8", 8, 0, 1, 4), "W4A16": Scheme("int4", 4, 0, 1, 2),
}
NEVER_QUANTISED = (  # last part of the name
    "embed_tokens", "lm_head", "gate", "router", "conv1d", "q_conv1d", "k_conv1d", "v_conv1d",
    "shared_expert_gate", "weights_proj", "in_proj_a", "in_proj_b", "embed_positions", "hc_attn",
    "hc_ffn", "hc_head", "embed_tokens_per_layer",
)


def read_quant(fields: Fields, extra: Optional[Mapping[str, Any]] = None) -> Quant:
    """What quantization_config, or hf_quant_config.json (extra), declares."""
    dtype = str(fields.get("torch_dtype dtype", str, outer_first=True) or "bfloat16").split(".")[-1]
    plain, size = {"float32": ("fp32", 4), "float16": ("fp16", 2), "half": ("fp16", 2)}.get(
        dtype, ("bf16", 2))
    config = fields.get("quantization_config", dict, outer_first=True) or {}
    inner = (extra or {}).get("quantization", extra) or {}
    if not isinstance(inner, dict):
        raise UserError("hf_quant_config.json: quantization is not an object")
    merged = {**config, **{k: v for k, v in inner.items() if v is not None}}
    if not merged:
        return Quant("", plain_bytes=size, plain=plain)
    method = str(merged.get("quant_method") or ("modelopt" if merged.get("quant_algo") else ""))
    ignore = [p for key in ("modules_to_not_convert", "ignore", "exclude_modules",
                            "ignored_layers", "llm_int8_skip_modules")
              for p in fields_list(merged, key)]
    rules = _quant_rules(method, merged)
    if method == "fp8" and fields.text.get("expert_dtype") == "fp4":  # DeepSeek-V4
        rules.insert(len(rules) - 1, (EXPERTS, MXFP4))
    if method == "fp8" and isinstance(merged.get("quantized_layers"), dict):
        ignore = fields_list(merged, "modules_to_not_convert")  # what is not in the map stays fp8
    scheme = merged.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, dict) else scheme
    fp8_kv = bits == 8 or "FP8" in (bits, merged.get("kv_cache_quant_algo"))
    return Quant(method, tuple(rules), tuple(ignore), size, plain, "fp8" if fp8_kv else "")


Rules = List[Tuple[Optional[Tuple[str, ...]], Scheme]]


def _quant_rules(method: str, q: Mapping[str, Any]) -> Rules:
    """Which modules are stored how; the first rule that matches a module counts."""
    layers = q.get("quantized_layers")
    if isinstance(layers, dict) and layers:  # {module: {quant_algo}} of modelopt
        names: Dict[str, List[str]] = {}
        for name, how in layers.items():
            if ".experts." not in name or ".experts.0." in name or name.endswith(".experts"):
                algo = how.get("quant_algo") if isinstance(how, dict) else how
                names.setdefault(str(algo), []).append(name)  # one routed expert stands for all
        mapped: Rules = [(tuple(found), ALGOS.get(algo, ALGOS["FP8"]))
                         for algo, found in names.items()]
        return mapped + ([(None, _fp8(q))] if method == "fp8" else [])
    bits, group = _bits_of(q, "bits", default=4), max(0, _int_of(q, "group_size", 128))
    if method in ("fp8", "fbgemm_fp8"):
        return [(None, _fp8(q))]
    if method in ("awq", "awq_marlin"):
        return [(None, Scheme("awq", bits, group, 1, 2 + bits / 8))]
    if method.startswith("gptq"):
        scheme = Scheme("gptq", bits, group, 1, 2 + bits / 8, 4)
        head: Rules = [(("lm_head",), scheme)]
        return (head if q.get("lm_head") else []) + [(None, scheme)]
    if method == "mxfp4":
        return [(EXPERTS, MXFP4)]
    if method == "bitsandbytes":
        if not q.get("load_in_4bit"):
            return [(None, Scheme("int8", 8))]
        double = q.get("bnb_4bit_use_double_quant")
        return [(None, Scheme("int4", 4, 64, 1, 1 + 4 / 256 if double else 4))]
    algo = str(q.get("quant_algo") or "")
    if algo in ALGOS:
        return [(None, ALGOS[algo])]
    groups = q.get("config_groups")
    if isinstance(groups, dict) and groups:
        return [_rule_of_group(g, str(q.get("format") or "")) for g in groups.values()]
    return [(None, Scheme(ROUGH, _bits_of(q, "bits", "w_bit", default=8), group, 1, 2))]


def _int_of(q: Mapping[str, Any], key: str, default: int) -> int:
    value = q.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= 65536:
        raise UserError(f"quantization_config: {key} is {_shown(value)}; expected a whole number")
    return value


def _bits_of(q: Mapping[str, Any], *keys: str, default: int) -> int:
    """Bits of a stored weight, under the first of the keys that is there; 1 to 32."""
    bits = next((_int_of(q, key, default) for key in keys if q.get(key) is not None), default)
    if not 1 <= bits <= 32:
        raise UserError(f"quantization_config: {bits} bits a weight; expected 1 to 32")
    return bits


def _fp8(q: Mapping[str, Any]) -> Scheme:
    block = q.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(
            isinstance(b, int) and b > 0 for b in block):
        return Scheme("fp8", 8, block[1], block[0], 4)
    return Scheme("fp8", 8, 0, 1, 4)


def _rule_of_group(group: Any, outer_format: str) -> Tuple[Optional[Tuple[str, ...]], Scheme]:
    """Rule from a compressed-tensors group: targets and weights."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise UserError("config.json: a group of quantization_config has no weights")
    targets = fields_list(group, "targets")
    named = tuple(t for t in targets if t.startswith("re:") or "." in t or t == "lm_head")
    bits = _bits_of(weights, "num_bits", default=8)
    size = max(0, _int_of(weights, "group_size", 0))
    form = str(group.get("format") or outer_format)
    is_float = weights.get("type") == "float"
    if is_float and bits == 4:
        return named or None, MXFP4 if form.startswith("mxfp4") or size == 32 else NVFP4
    if weights.get("strategy") == "block" or weights.get("block_structure"):
        block = weights.get("block_structure")
        return named or None, _fp8({"weight_block_size": block or [128, 128]})
    zero = 0 if weights.get("symmetric", True) else bits / 8
    return named or None, Scheme(f"{'fp' if is_float else 'int'}{bits}", bits, size, 1, 2 + zero)


class Stored(NamedTuple):
    """A weight with the layers in which it is stored one way."""

    tensor: Tensor
    layers: FrozenSet[int]  # {-1} = outside the layers
    bytes: float  # of all its copies, in each of these layers
    label: str  # of the scheme


@lru_cache(maxsize=64)
def stored_weights(tensors: Tuple[Tensor, ...], quant: Quant) -> Tuple[Stored, ...]:
    """How each weight is stored under a quantisation; a weight of two schemes comes twice."""
    found: List[Stored] = []
    ignored = Patterns(quant.ignore)
    rules = [(None if p is None else Patterns(p), scheme) for p, scheme in quant.rules]
    for t in tensors:
        last = t.name.rsplit(".", 1)[-1]
        layers: Set[int] = set(t.layers or (-1,))
        plain = set(layers) if not t.d_in else ignored.matching(t.name, layers)
        rest = layers - plain
        for patterns, scheme in rules if rest else ():
            if patterns is None and last in NEVER_QUANTISED:
                continue
            chosen = rest if patterns is None else patterns.matching(t.name, rest)
            found.append(Stored(t, frozenset(chosen), t.copies * scheme.bytes_of(t.d_in, t.d_out),
                                scheme.label))
            rest = rest - chosen
        width = 4 if last == "e_score_correction_bias" else quant.plain_bytes
        found.append(Stored(t, frozenset(plain | rest), t.copies * max(1, t.d_in) * t.d_out * width,
                            quant.plain))
    return tuple(part for part in found if part.layers)


def quantised_bytes(tensors: Sequence[Tensor], quant: Quant) -> Tuple[int, str]:
    """(bytes of all weights as stored, label of the scheme that most parameters have)."""
    total = 0.0
    by_label: Dict[str, int] = {quant.plain: 0}
    for t, layers, each, label in stored_weights(tuple(tensors), quant):
        total += len(layers) * each
        params = len(layers) * t.copies * max(1, t.d_in) * t.d_out
        by_label[label] = by_label.get(label, 0) + params
    return round(total), max(by_label, key=lambda label: by_label[label])


class Patterns:
    """Module patterns of an exclude or target list, grouped so that layers need no loop.

    A plain name holds for a module whose path has it as whole components; "*" makes a glob (the
    children of what it matches count too); "re:" is a regular expression.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        """Split each pattern into the layers it names and the rest of the path."""
        self.by_rest: Dict[str, Set[str]] = {}  # rest of the path -> layer numbers, as text
        self.regexes: List[str] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                self.regexes.append(pattern[3:])
                continue
            rest = _without_prefix(pattern)
            start, _, last = rest.rpartition(".")
            if ".experts." in rest and last in EXPERT_ALIASES:
                rest = f"{start}.{EXPERT_ALIASES[last]}"
            layer = "*"
            if rest.startswith("layers."):
                layer, dot, rest = rest[len("layers."):].partition(".")
                rest = rest if dot else "*"  # "layers.61*" and "layers.61"
            self.by_rest.setdefault(rest, set()).add(layer)

    def matching(self, name: str, layers: Set[int]) -> Set[int]:
        """Those of the layers in which the module matches a pattern."""
        found: Set[int] = set()
        probe = _without_prefix(name).replace("*", "0")
        for rest, numbers in self.by_rest.items():
            if not self._holds(rest, probe):
                continue
            if "*" in numbers:
                return set(layers)
            for number in numbers:
                if number.endswith("*"):
                    found |= {i for i in layers if str(i).startswith(number[:-1])}
            found |= {i for i in layers if str(i) in numbers}
        for regex in self.regexes:
            found |= _regex_layers(regex, name.replace("*", "0"), layers - found)
        return found

    @staticmethod
    def _holds(pattern: str, probe: str) -> bool:
        if "*" not in pattern and "?" not in pattern:
            return f".{pattern}." in f".{probe}."
        from fnmatch import fnmatchcase

        return any(fnmatchcase(text, pattern) or fnmatchcase(text, pattern + ".*")
                   for text in (probe, "layers." + probe))


def _without_prefix(name: str) -> str:
    """The path without "model.", "language_model.", "backbone." and the like in front."""
    while True:
        head, dot, rest = name.partition(".")
        if not dot or head not in ("model", "language_model", "backbone", "transformer",
                                   "text_model", "thinker"):
            return name
        name = rest


def _regex_layers(regex: str, name: str, layers: Set[int]) -> Set[int]:
    """Layers whose module path the expression matches, by any of the usual prefixes."""
    import re
    try:  # a repeated group that repeats inside can take for ever: no checkpoint needs one
        if len(regex) > 1000 or re.search(r"[*+}][^()]*\)+[*+{]", regex):
            raise re.error("nested repeats")
        match = re.compile(regex).match
    except re.error:
        raise UserError(f"quantization_config: {_shown(regex)} is no usable regular expression"
                        ) from None

    def holds(layer: int) -> bool:
        path = name if layer < 0 else f"model.layers.{layer}.{name}"
        bare = path.removeprefix("model.")
        return any(match(p + bare) for p in ("model.", "language_model.model.",
                                             "model.language_model.", "backbone.", ""))

    if "layers" in regex or any(c.isdigit() for c in regex):
        return {layer for layer in layers if holds(layer)}
    return set(layers) if layers and holds(next(iter(layers))) else set()


INT8 = Scheme("int8", 8, 0, 1, 2)
BLOCK_FP8 = Scheme("fp8", 8, 128, 128, 4)
# How the usual checkpoint of a precision is stored, where no config.json says it: Linear layers
# alone, never NEVER_QUANTISED, norms or biases. Sources: vLLM's quantization methods; RedHatAI
# w8a8 and w4a16; AutoAWQ and GPTQ at group 128; bitsandbytes with double quantisation.
USUAL: Dict[str, Scheme] = {
    "fp8": Scheme("fp8", 8, 0, 1, 4), "int8": INT8, "int4": Scheme("int4", 4, 128, 1, 2),
    "awq": Scheme("awq", 4, 128, 1, 2.5), "gptq": Scheme("gptq", 4, 128, 1, 2.5, 4),
    "bnb": Scheme("int4", 4, 64, 1, 1 + 4 / 256), "mxfp4": MXFP4, "nvfp4": NVFP4}
# attention and Mamba, not the experts that Nemotron-H keeps under its mixer
ATTENTION = ("re:.*(self_attn|linear_attn|mixer)\\.(?!experts|shared_experts|fc).*",)


def standard_quant(name: str, model: Model) -> Quant:
    """The quantisation that a checkpoint of this precision usually has; none for 16 bit and more.

    MXFP4 is of the routed experts where there are any (gpt-oss), the int4 of a native int4 MoE
    too (Kimi: group 32). NVIDIA's NVFP4 of an MoE leaves attention in 16 bit. FP8 has blocks of
    128 x 128 where the checkpoint itself is FP8; of a 16-bit one the engine makes it at load, with
    a scale for each output.
    """
    scheme = USUAL.get(name)
    if scheme is None:
        return Quant("", plain_bytes=4 if name == "fp32" else 2, plain=name)
    native = name == SPELLINGS.get(model.native, model.native)
    if name == "fp8" and native:
        scheme = BLOCK_FP8
    if model.experts and (name == "mxfp4" or (name == "int4" and native)):
        experts: Rules = [(EXPERTS, scheme._replace(group=32))]
        if model.arch.startswith("DeepseekV4"):
            experts.append((None, BLOCK_FP8))
        return Quant(name, tuple(experts))
    return Quant(name, ((None, scheme),), ATTENTION if name == "nvfp4" and model.experts else ())


# ---- 3e. A row to a model ----------------------------------------------------------------------


def build_model(row: Row) -> Model:
    """The model that a row of presets.json, or of normalise(), describes.

    Its active parameters leave out the embedding look-up (a tied table counts once, as lm_head)
    and all but top_k of the routed experts. A multi-token-prediction layer is taken for the last
    layer, a 2H x H projection and three norms.
    """
    family = family_of([row.get("arch", "")]) or {}
    r: Row = {**DEFAULTS, **family, **row}
    if isinstance(r["blocks"], list):
        r["blocks"] = tuple(map(tuple, r["blocks"]))
    tensors = tensors_of(r)
    total = sum(t.params for t in tensors)
    looked_up = {"model.embed_tokens_per_layer", "" if r["tied"] else "model.embed_tokens"}
    active = sum(t.params // t.copies * r["top_k"] if t.copies > 1 else t.params
                 for t in tensors if t.name not in looked_up)
    last = sum(t.params // len(t.layers) for t in tensors if r["layers"] - 1 in t.layers)
    drafts = 0 if r["layout"] or r["hc_mult"] else r["mtp"]
    quant: Optional[Quant] = r["quant"]
    size, native = (quantised_bytes(tensors, quant) if quant
                    else (r.get("weight_bytes"), r["native"]))
    experts = [t for t in tensors if t.split == "expert"]
    expert_params = sum(t.params for t in experts)
    share = (quantised_bytes(experts, quant)[0] / size if quant and size
             else r.get("expert_byte_share", expert_params / total))
    stated = r.get("params_exact") or r.get("params")
    return Model(
        name=r["name"], arch=r.get("arch", ""), params=r.get("params") or total,
        params_exact=int(stated) if stated and r["estimated"] else total,
        active_params=r.get("active_params") or active,
        layers=r["layers"], hidden=r["hidden"], heads=r["heads"],
        kv_heads=1 if r["kv_lora"] else r["kv_heads"] or r["heads"],
        head_dim=(r["nope"] + r["rope"] if r["kv_lora"]
                  else r["head_dim"] or r["hidden"] // r["heads"]),
        vocab=r["vocab"], max_len=r["max_len"], tied=r["tied"], tensors=tensors,
        caches=caches_of(r), experts=r["experts"], top_k=r["top_k"],
        expert_layers=sum(kind.ffn == "E" for kind in layer_kinds(r)),
        native=native, weight_bytes=size, weight_bytes_source=_bytes_source(quant),
        expert_byte_share=share,
        kv_native=quant.kv_native if quant else "", mtp_layers=r["mtp"],
        mtp_params=int(drafts * (last + 2 * r["hidden"] ** 2 + 3 * r["hidden"])),
        vision_params=r["vision_params"], estimated=r["estimated"],
        notes=tuple(r["notes"]) + ((r["note"],) if r.get("note") else ()), quant=quant,
        expert_params=expert_params,
    )


def _bytes_source(quant: Optional[Quant]) -> str:
    if quant is None:
        return "the checkpoint, counted from its config.json"
    if any(scheme.label == ROUGH for _, scheme in quant.rules):
        return f"rough: quantization {quant.method or 'without a name'} is not known"
    return (f"counted from shapes and quantization ({quant.method})" if quant.method
            else f"counted from shapes at {quant.plain}")


# ---- 3f. Checkpoints on disk and on the Hub ----------------------------------------------------

JSON_BYTES_MAX = 50_000_000
HEADER_BYTES_MAX = 100_000_000
HUB_TIMEOUT_S = 15.0
Checkpoint = Tuple[Dict[str, Any], Optional[Dict[str, Any]], Optional[int], str]


def parse_json(data: bytes, where: str) -> Dict[str, Any]:
    """The JSON object in data; UserError names where it came from."""
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise UserError(f"{where} is not valid JSON; is it complete?") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} holds {_shown(value)}; expected a JSON object")
    return value


def read_checkpoint(path: str) -> Checkpoint:
    """(config, quantisation, weight bytes or None, source of these) of a config.json or folder."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    config_path = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if not os.path.isfile(config_path):
        raise UserError(f"{config_path}: no such file; give a config.json or the folder that"
                        " holds it")
    config = read_json(config_path)
    quant_path = os.path.join(folder, "hf_quant_config.json")
    quant = read_json(quant_path) if os.path.isfile(quant_path) else None
    size, source = _weights_on_disk(folder)
    return config, quant, size, source


def read_json(path: str) -> Dict[str, Any]:
    """The JSON object in a file; UserError where it cannot be read, is too large or none."""
    try:
        if os.path.getsize(path) > JSON_BYTES_MAX:
            raise UserError(f"{path} is over {JSON_BYTES_MAX // 1_000_000} MB; that is no "
                            f"{os.path.basename(path)}")
        with open(path, "rb") as file:
            return parse_json(file.read(JSON_BYTES_MAX), path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _weights_on_disk(folder: str) -> Tuple[Optional[int], str]:
    """Weight bytes of a folder, from the index or from the headers of its safetensors files."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.isfile(index):
        size = total_size(read_json(index))
        if size:
            return size, "model.safetensors.index.json"
    try:
        names = sorted(n for n in os.listdir(folder or ".") if n.endswith(".safetensors")
                       and os.path.isfile(os.path.join(folder, n)))
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}") from None
    names = [n for n in names if n.startswith("model")] or names  # not consolidated copies
    if not names:
        return None, ""
    shards = names[0].rpartition("-of-")[2].partition(".")[0]
    if shards.isdecimal() and int(shards) > len(names):
        raise UserError(f"{folder} holds {len(names)} of {int(shards)} safetensors files; finish "
                        "the download, or give the config.json alone in a folder")
    return sum(_safetensors_bytes(os.path.join(folder, n)) for n in names), "safetensors headers"


def total_size(index: Mapping[str, Any]) -> Optional[int]:
    """metadata.total_size of a model.safetensors.index.json [B]."""
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    good = isinstance(size, (int, float)) and not isinstance(size, bool) and 0 < size < 1e15
    return int(size) if good and size is not None else None


def _safetensors_bytes(path: str) -> int:
    """Bytes of the tensors in a safetensors file, from its header."""
    import struct
    try:
        stored = os.path.getsize(path)
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= HEADER_BYTES_MAX:
                raise UserError(f"{path}: no safetensors header; is the download complete?")
            data = file.read(length)
            if len(data) < length:
                raise UserError(f"{path} is cut off; is the download complete?")
            header = parse_json(data, path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    size = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2
                and all(isinstance(n, int) for n in offsets) and 0 <= offsets[0] <= offsets[1]):
            raise UserError(f"{path}: header entry {_shown(name)} has no data_offsets")
        size += offsets[1] - offsets[0]
    if stored < 8 + length + size:
        raise UserError(f"{path} is cut off: {stored} of {8 + length + size} bytes; finish the "
                        "download")
    return size


def fetch_checkpoint(hf_id: str) -> Checkpoint:
    """As read_checkpoint, from the Hugging Face Hub or what HF_ENDPOINT names."""
    import re
    parts = hf_id.split("/")
    if len(parts) != 2 or not all(re.fullmatch(r"[A-Za-z0-9._-]+", p) and p.strip(".")
                                  for p in parts):
        raise UserError(f"{_shown(hf_id)} is no Hugging Face id; expected org/name")
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if "@" in endpoint or not endpoint.startswith(("https://", "http://")):
        raise UserError("HF_ENDPOINT must be https://HOST or http://HOST, without a user name")
    base = f"{endpoint}/{hf_id}/resolve/main/"
    data = _download(base + "config.json", hf_id)
    if data is None:
        raise UserError(f"{hf_id}: not found at {endpoint}; check the id, or give a config.json")
    config = parse_json(data, f"config.json of {hf_id}")
    extra = _download(base + "hf_quant_config.json", hf_id)
    quant = parse_json(extra, f"hf_quant_config.json of {hf_id}") if extra is not None else None
    index = _download(base + "model.safetensors.index.json", hf_id)
    size = total_size(parse_json(index, f"index of {hf_id}")) if index is not None else None
    return config, quant, size, "model.safetensors.index.json" if size else ""


def _download(url: str, hf_id: str) -> Optional[bytes]:
    """The body at url, None if it is not there (404); the token goes to no other host."""
    import http.client
    import time
    import urllib.error
    import urllib.parse
    import urllib.request
    class Redirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req: Any, *args: Any) -> Any:
            found = super().redirect_request(req, *args)
            if found is not None and origin(found.full_url) != origin(url):
                found.headers.pop("Authorization", None)
            return found

    def origin(address: str) -> Tuple[str, str]:
        parts = urllib.parse.urlsplit(address)
        return parts.scheme, parts.netloc

    token = os.environ.get("HF_TOKEN", "").strip()
    if not all("!" <= c <= "~" for c in token):
        raise UserError("HF_TOKEN holds a space, a line break or a character that is no ASCII")
    request = urllib.request.Request(url, headers={"User-Agent": "capacity"})
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    deadline_s, body = time.monotonic() + 2 * HUB_TIMEOUT_S, b""
    try:
        with urllib.request.build_opener(Redirect).open(request, timeout=HUB_TIMEOUT_S) as reply:
            while len(body) <= JSON_BYTES_MAX:
                part = reply.read1(JSON_BYTES_MAX)
                if not part:
                    break
                body += part
                if time.monotonic() > deadline_s:
                    raise TimeoutError("too slow")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        gated = ("; it is private or gated, set HF_TOKEN to one that may read it"
                 if error.code in (401, 403) else "; save its config.json and give its path")
        raise UserError(f"{hf_id}: {url} answered {error.code}{gated}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise UserError(f"{hf_id}: cannot reach {origin(url)[1]} ({why}); save its config.json and"
                        " give its path") from None
    if len(body) > JSON_BYTES_MAX:
        raise UserError(f"{url} is over {JSON_BYTES_MAX // 1_000_000} MB; that is no config file")
    return body


# ---- 4. Hardware -------------------------------------------------------------------------------


class Gpu(NamedTuple):
    """One accelerator: what a datasheet and its driver say of it."""

    name: str
    title: str
    memory_bytes: float  # what the driver reports
    bandwidth_bytes_s: float
    flop_s: Mapping[str, float]  # dense peak by compute type: bf16, fp8, int8, fp4
    link: Optional[Link]  # between the GPUs of one domain
    domain: int  # GPUs that one such link domain joins
    pcie: Optional[Link]  # between the GPUs of a server that no such link joins
    note: str
    arch: str = ""  # generation: Ampere, Hopper ...
    vendor: str = ""
    torch_bytes: float = 0.0  # what an engine sees of the memory, and multiplies by its share


class Link(NamedTuple):
    """A way between GPUs, or from storage, in one direction."""

    name: str
    bytes_s: float


class Precision(NamedTuple):
    """How an element is stored: nominal width and the tensor-core type that multiplies it."""

    name: str
    bytes: float
    compute: str


# Nominal widths; scales and unquantised parts belong to the checkpoint's own accounting.
# 4-bit integer weights are dequantised to BF16 before they multiply; so is MXFP4 without FP4 units.
WEIGHTS = {p.name: p for p in (
    Precision("fp32", 4.0, "bf16"), Precision("bf16", 2.0, "bf16"), Precision("fp16", 2.0, "bf16"),
    Precision("fp8", 1.0, "fp8"), Precision("int8", 1.0, "int8"), Precision("int4", 0.5, "bf16"),
    Precision("awq", 0.5, "bf16"), Precision("gptq", 0.5, "bf16"), Precision("bnb", 0.5, "bf16"),
    Precision("mxfp4", 0.5, "fp4"), Precision("nvfp4", 0.5, "fp4"))}
KV = {p.name: p for p in (
    Precision("bf16", 2.0, ""), Precision("fp16", 2.0, ""), Precision("fp8", 1.0, ""),
    Precision("int8", 1.0, ""), Precision("nvfp4", 0.5625, ""))}  # 1/16 of an FP8 scale an element
SPELLINGS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8_e4m3": "fp8",
             "fp8_e5m2": "fp8", "w8a8": "int8", "modelopt_fp4": "nvfp4", "awq_marlin": "awq",
             "gptq_marlin": "gptq", "fp4": "nvfp4", "compressed-tensors": "auto",
             "awq-4bit": "awq", "gptq-4bit": "gptq", "bnb-4bit": "bnb", "bitsandbytes": "bnb"}


def presets() -> Dict[str, List[Dict[str, Any]]]:
    """The tables of presets.json beside this script; empty when it is not there.

    Raises UserError when it is there and cannot be read.
    """
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "presets.json")
    try:
        with open(path, encoding="utf-8") as file:
            tables = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"presets.json cannot be read: {error}; restore it beside capacity.py"
                        ) from None
    rows = [tables.get(name) for name in TABLES] if isinstance(tables, dict) else [None]
    if not all(isinstance(table, list) and all(isinstance(row, dict) and isinstance(
            row.get("name"), str) for row in table) for table in rows):
        raise UserError("presets.json is not made of tables of named rows; restore it beside "
                        "capacity.py")
    return {name: tables[name] for name in TABLES}


TABLES = ("models", "gpus", "links", "workloads", "efficiency", "bands")


def find_row(table: str, name: str, what: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """The preset row called `name` (or with that alias); UserError with near names if none is."""
    wanted = name.lower()
    for row in rows:
        if wanted == row["name"] or wanted in row.get("aliases", ()):
            return row
    if not rows:
        raise UserError(f"{what} {name!r} cannot be looked up: presets.json is not beside "
                        f"capacity.py; put it there, or {BY_HAND[table]}")
    names = [n for row in rows for n in (row["name"], *row.get("aliases", ()))]
    known = f"known are {', '.join(names)}" if table == "workloads" else "--list shows all"
    raise UserError(f"unknown {what} {name!r}{near(name, names)}; {known}")


BY_HAND = {
    "workloads": "give --input-len, --output-len and the SLOs",
    "models": "give the model by hand (--params --layers --kv-heads --head-dim, or --config)",
    "gpus": "give the hardware by hand (--gpu-memory-gib --gpu-bandwidth --gpu-tflops)",
    "links": "give a rate such as 450GB/s",
}


def parse_rate(text: str, links: Sequence[Mapping[str, Any]]) -> Link:
    """A data rate: '7GB/s', '400Gb/s', a link's name, or a bare number of GB/s."""
    import re
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*(?:([KMGT])([Bb])(?:/s|ps)?)?\s*", text)
    if not match:
        row = find_row("links", text.strip(), "link or rate", links)
        return Link(str(row["name"]), row["gb_s"] * GIGA)
    number, prefix, unit = match.groups()
    try:
        rate = float(number)
    except ValueError:
        raise UserError(f"{text!r} is no rate; write 7GB/s, 400Gb/s or a link's name") from None
    rate *= {"K": KILO, "M": MEGA, "G": GIGA, "T": TERA}[prefix or "G"]
    rate /= 8 if unit == "b" else 1
    if not 1 <= rate < ABSURD * KILO:
        raise UserError(f"{text!r} is no rate; it must be a byte a second or more")
    return Link(scaled(rate, "B/s"), rate)


def find_gpu(args: Any, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> Gpu:
    """The GPU that the flags describe: a preset's row, with what was given by hand put over it."""
    by_hand = args.gpu_memory_gib and args.gpu_bandwidth and args.gpu_tflops
    links = tables.get("links", [])
    row: Mapping[str, Any] = {"name": args.gpu or "by hand", "link": None, "domain": 8,
                              "memory_mib": 0, "hbm_tb_s": 0, "tflops": {}}
    if args.gpu or not by_hand:
        row = find_row("gpus", args.gpu or "h100", "GPU", tables.get("gpus", []))
    gpu = gpu_of(row, links)
    if args.gpu_memory_gib:
        gpu = gpu._replace(memory_bytes=args.gpu_memory_gib * GIB,
                           torch_bytes=args.gpu_memory_gib * GIB)
    if args.gpu_bandwidth:
        rate = named("--gpu-bandwidth", lambda text: parse_rate(text, links))(args.gpu_bandwidth)
        gpu = gpu._replace(bandwidth_bytes_s=rate.bytes_s)
    if args.gpu_tflops:
        gpu = gpu._replace(flop_s=dict.fromkeys(("bf16", "fp8", "int8", "fp4"),
                                                args.gpu_tflops * TERA))
    return gpu


TORCH_SHARE = 0.985  # of the driver's total, where presets.json has no torch_gib (0.97 to 1)


def gpu_of(row: Mapping[str, Any], links: Sequence[Mapping[str, Any]]) -> Gpu:
    """The GPU of a row of presets.json; UserError where the row is broken."""
    try:
        return Gpu(row["name"], row.get("title", row["name"]), row["memory_mib"] * MIB,
                   row["hbm_tb_s"] * TERA,
                   {kind: tflops * TERA for kind, tflops in row["tflops"].items()},
                   parse_rate(row["link"], links) if row["link"] else None, row["domain"],
                   parse_rate(row["pcie"], links) if "pcie" in row else None, row.get("note", ""),
                   row.get("arch", ""), row.get("vendor", ""),
                   row.get("torch_gib", row["memory_mib"] / KIB * TORCH_SHARE) * GIB)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"presets.json: the GPU {row['name']!r} is broken "
                        f"({type(error).__name__} {error}); mend its row") from None


# ---- 5. The deployment -------------------------------------------------------------------------


class Deployment(NamedTuple):
    """One model on some GPUs, and the shape of its work: everything a question may ask of."""

    model: Model
    gpu: Gpu
    tp: int
    pp: int
    dp: int
    ep: int
    dcp: int
    pcp: int
    util: float
    reserve_bytes: float
    mbu: float
    mfu: float
    link: Optional[Link]  # as asked for; else the GPU's own, or `far_link` past its domain
    far_link: Optional[Link]
    weights: Precision
    weight_bytes: float  # of the whole model
    weight_source: str
    expert_share: float  # of these bytes: the routed experts
    kv: Precision
    compute: str  # tensor-core type that multiplies: the weights' one, where the GPU has it
    ctx_tokens: int
    history_tokens: float  # average length that a decode step reads back
    history_source: str
    prompt_tokens: float
    output_tokens: float  # 0 where not given
    shared_tokens: int  # that every prompt begins with, cached
    fresh_tokens: float  # of a prompt past these, on average
    asked: Optional[int]  # in flight in one replica, where asked
    adapter_bytes: float  # LoRA adapters resident, whole model

    @property
    def attention_dp(self) -> int:
        """Ranks that run attention data-parallel over one set of experts (EP wider than TP)."""
        return self.dp if self.ep > self.tp * self.pcp else 1

    @property
    def replicas(self) -> int:
        """Independent copies of the model, behind a load balancer."""
        return self.dp // self.attention_dp

    @property
    def replica_gpus(self) -> int:
        """GPUs that one copy of the model takes."""
        return self.tp * self.pp * self.pcp * self.attention_dp

    @property
    def gpus(self) -> int:
        """GPUs of all copies together."""
        return self.replica_gpus * self.replicas

    @property
    def stage_share(self) -> float:
        """Share of the layers on the fullest pipeline stage."""
        layers = self.model.layers
        return -(-layers // self.pp) / layers

    @property
    def expert_bytes(self) -> float:
        """Bytes of the routed experts, whole model."""
        return self.weight_bytes * self.expert_share

    @property
    def expert_ranks(self) -> int:
        """GPUs of one stage that share the routed experts out among them."""
        return max(self.tp, self.ep)

    def link_for(self, ranks: int) -> Optional[Link]:
        """The link that a collective over so many GPUs runs on; None when none is known."""
        if self.link:
            return self.link
        if ranks <= self.gpu.domain:
            return self.gpu.link
        return self.gpu.pcie if ranks <= SERVER_GPUS and self.gpu.pcie else self.far_link


KV_HEAD_KINDS = ("full", "sliding", "chunked")  # their heads divide over TP
SHARED_KINDS = ("full", "mla", "indexer")  # whose tokens DCP shares out


def expert_param_share(model: Model) -> float:
    """Share of the parameters that are routed experts."""
    return model.expert_params / model.params_exact


def layout_text(d: Deployment) -> str:
    """The parallelism in the field's abbreviations: 'TP=2 DP=4 EP=8'."""
    sizes = ((n, getattr(d, n)) for n in ("tp", "pp", "dp", "ep", "dcp", "pcp"))
    return " ".join(f"{n.upper()}={size}" for n, size in sizes if size > 1 or n == "tp")


def fitting_tp(model: Model) -> List[int]:
    """TP sizes up to 64 that divide the query heads and go evenly with the KV heads."""
    return [n for n in range(1, 65) if not tp_problem(model, n)]


def tp_problem(model: Model, tp: int) -> str:
    """Why the model cannot be split over so many GPUs, or ''."""
    if model.heads and model.heads % tp:
        return f"TP={tp} does not divide the {model.heads} query heads"
    for kv_heads in kv_heads_of(model):
        if kv_heads % tp and tp % kv_heads:
            return f"TP={tp} neither divides nor is a multiple of the {kv_heads} KV heads"
    return ""


def kv_heads_of(model: Model) -> List[int]:
    """The numbers of KV heads that TP divides, over the kinds of layer; none under MLA."""
    return sorted({c.heads for c in model.caches if c.kind in KV_HEAD_KINDS and c.heads})


def check_layout(d: Deployment) -> None:
    """Raise UserError when the model cannot be laid out so; the line names what would fit."""
    model = d.model
    problem = tp_problem(model, d.tp)
    if problem:
        fits = [n for n in fitting_tp(model) if n & (n - 1) == 0] or fitting_tp(model)
        raise UserError(f"{problem} of {model.name}; TP sizes that fit: "
                        f"{', '.join(map(str, fits))}")
    if d.pp > model.layers:
        raise UserError(f"PP={d.pp} is more than the {model.layers} layers of {model.name}; "
                        f"use --pp {model.layers} or less")
    if d.tp % d.dcp:
        raise UserError(f"DCP={d.dcp} must divide TP={d.tp}: it shards the KV cache over TP ranks")
    kv_heads = max(kv_heads_of(model), default=0)
    if d.dcp > 1 and kv_heads and d.dcp > max(1, d.tp // kv_heads):
        raise UserError(f"DCP={d.dcp} with {kv_heads} KV heads needs TP of at least "
                        f"{kv_heads * d.dcp}: only replicated heads can share tokens out")
    if d.ep > 1 and not model.experts:
        raise UserError(f"EP={d.ep} needs a mixture of experts; {model.name} is dense, drop --ep")
    world = d.tp * d.pcp * d.dp
    if d.ep > 1 and (world % d.ep or (d.ep % (d.tp * d.pcp) and d.tp * d.pcp % d.ep)
                     or (d.ep > d.tp * d.pcp and d.ep != world)):
        raise UserError(f"EP={d.ep} must divide TP x PCP = {d.tp * d.pcp}, or be all "
                        f"TP x PCP x DP = {world} of them (attention then runs data-parallel)")


# ---- 6. Memory ---------------------------------------------------------------------------------


def weights_bytes_per_gpu(d: Deployment) -> float:
    """Weights on each GPU of the fullest pipeline stage [B].

    Dense parts are split over TP, experts over EP where that is wider (whole experts: the fullest
    rank decides). Every parameter counts as split, also the few that engines keep whole on each
    rank (norms, routers, MLA down-projections).
    Source: Shoeybi et al., Megatron-LM (1909.08053); vLLM expert parallelism.
    """
    return read_weight_bytes(d, touched=1.0)


def read_weight_bytes(d: Deployment, touched: float) -> float:
    """Weights that a step reads on a GPU of the fullest stage [B]; touched: share of experts."""
    dense = (d.weight_bytes - d.expert_bytes) / d.tp
    return (dense + d.expert_bytes * fullest_expert_share(d) * touched) * d.stage_share


def fullest_expert_share(d: Deployment) -> float:
    """Share of the expert bytes on the GPU that holds the most: whole experts under EP."""
    if d.ep <= 1 or not d.model.experts:
        return 1 / d.expert_ranks
    within = d.expert_ranks // d.ep  # TP ranks that slice each expert further
    return -(-d.model.experts // d.ep) / d.model.experts / within


class RankWeights(NamedTuple):
    """Weights as an engine stores them on one GPU of the fullest pipeline stage [B]."""

    dense_bytes: float  # all but the routed experts
    expert_bytes: float
    unread_bytes: float = 0.0  # of dense_bytes: what no decode step reads (look-up table, vision)


def rank_weights(d: Deployment) -> RankWeights:
    """Weights as the engine stores them on each GPU of the fullest pipeline stage [B].

    Unlike the bound's nominal width: what a checkpoint leaves unquantised, its scales, what each
    TP rank holds whole (norms, routers, MLA down-projections), vocabularies padded to 64 rows, the
    vision tower. A model by hand has no shapes: its nominal split. Source: vLLM
    model_executor/layers (ReplicatedLinear, QKVParallelLinear, VocabParallelEmbedding).
    """
    return max(stage_weights(d), key=lambda stage: stage.dense_bytes + stage.expert_bytes)


def stage_weights(d: Deployment) -> List[RankWeights]:
    """As rank_weights, for each pipeline stage."""
    quant = stored_as(d)
    if quant is None:
        expert = d.expert_bytes * fullest_expert_share(d) * d.stage_share
        return [RankWeights(weights_bytes_per_gpu(d) - expert, expert)] * d.pp
    return [_one_stage(d, quant, stage) for stage in range(d.pp)]


def stored_as(d: Deployment) -> Optional[Quant]:
    """The quantisation of the deployment's checkpoint; None where the shapes or it are unknown."""
    model = d.model
    if not model.tensors or d.weights.name not in WEIGHTS:
        return None
    own = SPELLINGS.get(model.native, model.native) == d.weights.name
    return model.quant if model.quant and own else standard_quant(d.weights.name, model)


def stage_layers(layers: int, pp: int) -> List[range]:
    """The layers of each stage: a remainder goes to the last stages but one.

    Source: vLLM distributed/utils.py, get_pp_indices.
    """
    sizes = [layers // pp] * pp
    for i in range(2, layers % pp + 2):
        sizes[-i] += 1
    return [range(sum(sizes[:i]), sum(sizes[:i + 1])) for i in range(pp)]


def _one_stage(d: Deployment, quant: Quant, stage: int) -> RankWeights:
    model, layers = d.model, stage_layers(d.model.layers, d.pp)[stage]
    padded = -(-model.vocab // VOCAB_PAD) * VOCAB_PAD / max(1, model.vocab)
    share = {"tp": 1 / d.tp, "kv": 1 / kv_ranks(d), "vocab": padded / d.tp, "none": 1.0,
             "expert": fullest_expert_share(d)}
    vision = model.vision_params * quant.plain_bytes / d.tp if stage == 0 else 0
    dense, expert, unread = float(vision), 0.0, float(vision)
    for t, where, each, _ in stored_weights(model.tensors, quant):
        if not t.layers:
            first = "embed" in t.name or t.name == "model.project_in"
            twice = model.tied and t.name == "model.embed_tokens"
            times = int(stage == (0 if first else d.pp - 1) or (twice and stage == d.pp - 1))
        else:
            times = (len(where) if d.pp == 1 else sum(layer in layers for layer in where))
        size = each * times * share[t.split]
        if t.split == "expert":
            expert += size
        else:
            dense += size
            unread += size if t.name == "model.embed_tokens" and not model.tied else 0
    return RankWeights(dense, expert, unread)


VOCAB_PAD = 64  # rows: vLLM DEFAULT_VOCAB_PADDING_SIZE


CACHE_FORMULA = ("layers * stage_share * (tokens_kept * heads_per_gpu * elements * kv_bytes "
                 "/ every / dcp + state_bytes / tp)")


def cache_terms(cache: Cache, d: Deployment, tokens: float) -> Dict[str, float]:
    """The numbers of CACHE_FORMULA for one kind of layer and a sequence of so many tokens.

    GQA: heads shrink by TP down to one, then replicate. An MLA latent is whole on each TP rank;
    DCP shares the tokens out, of full and latent caches alone.
    """
    return {"layers": cache.layers, "stage_share": d.stage_share,
            "tokens_kept": min(tokens, cache.window) if cache.window else tokens,
            "heads_per_gpu": (max(1.0, cache.heads / d.tp) if cache.kind in KV_HEAD_KINDS
                              else cache.heads),
            "elements": cache.elements, "kv_bytes": cache.element_bytes or d.kv.bytes,
            "every": cache.every, "dcp": d.dcp if cache.kind in SHARED_KINDS else 1,
            "state_bytes": cache.state_bytes, "tp": d.tp}


def cache_bytes(cache: Cache, d: Deployment, tokens: float) -> float:
    """What one kind of layer holds of a sequence of so many tokens, on each GPU of a stage [B].

    Source: vLLM kv_cache_interface; DeepSeek-V2 (2405.04434) for the latent.
    """
    t = cache_terms(cache, d, tokens)
    per_token = t["heads_per_gpu"] * t["elements"] * t["kv_bytes"] / t["every"] / t["dcp"]
    return t["layers"] * t["stage_share"] * (t["tokens_kept"] * per_token
                                             + t["state_bytes"] / t["tp"])


def sequence_bytes(d: Deployment, tokens: float) -> float:
    """KV cache and state of one sequence of so many tokens, on each GPU that holds it [B]."""
    return sum(cache_bytes(cache, d, tokens) for cache in d.model.caches)


def read_bytes(d: Deployment, history: float) -> float:
    """Bytes of one sequence's cache that a decode step moves, on each GPU of a stage [B].

    Sparse attention reads its top-k tokens only; a recurrent state is read and written.
    """
    moved = 0.0
    for cache in d.model.caches:
        tokens = min(history, cache.reads) if cache.reads else history
        moved += cache_bytes(cache, d, tokens) * (2 if cache.state_bytes else 1)
    return moved


class Memory(NamedTuple):
    """The memory budget of one GPU [B], and what its KV pool holds."""

    weights_bytes: float
    adapter_bytes: float
    pool_bytes: float  # negative when the weights do not fit
    sequence_bytes: float  # one sequence of ctx tokens
    max_seqs: float  # of ctx tokens, in one replica
    fits: bool


def memory_of(d: Deployment) -> Memory:
    """The memory budget: KV pool = util * memory - weights - adapters - reserve.

    Source: Kwon et al., PagedAttention (2309.06180); vLLM --gpu-memory-utilization.
    """
    weights = weights_bytes_per_gpu(d)
    adapters = d.adapter_bytes / d.tp * d.stage_share
    pool = d.util * d.gpu.memory_bytes - weights - adapters - d.reserve_bytes
    one = sequence_bytes(d, d.ctx_tokens)
    max_seqs = max(0.0, pool) / one * d.attention_dp
    return Memory(weights, adapters, pool, one, max_seqs, max_seqs >= 1)


# ---- 6b. What the engine will log --------------------------------------------------------------
# An engine's own accounting at start-up, line by line. It stands beside the budget above, which
# asks less: weights as stored, the memory that torch sees, the activations that profiling finds.

Version = Tuple[int, ...]  # (0, 10, 1); () = not given


class Draft(NamedTuple):
    """Speculative decoding as an engine is asked for it."""

    method: str = ""  # vLLM's name; "" = none
    tokens: int = 0  # drafted in a step
    assumed: bool = False  # the method was not given


class Asked(NamedTuple):
    """How an engine was asked to start; None is the engine's own default."""

    engine: str
    version: Version
    max_model_len: int
    max_num_seqs: Optional[int]
    max_num_batched_tokens: Optional[int]
    util: Optional[float]  # of all memory; for SGLang its mem_fraction_static
    draft: Draft


class Settings(NamedTuple):
    """How an engine is started: what was asked for, else its own defaults for this GPU."""

    engine: str  # vllm, sglang, trtllm
    version: Version
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    util: float  # share of memory, in the engine's own sense
    block_tokens: int
    draft: Draft
    asked: Asked

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that may be scheduled and not settled: two steps with asynchronous scheduling."""
        return self.max_num_batched_tokens * (2 if self.since(0, 28) else 1)

    def since(self, *version: int) -> bool:
        """Whether the engine is this version or a later one; not given counts as the newest."""
        return not self.version or self.version >= version


NEWEST_VLLM = (0, 33)  # of the versions described
BLOCK_TOKENS = {"vllm": 16, "sglang": 1, "trtllm": 32}
CHUNKED_FROM_TOKENS = 32768  # V0 turned chunked prefill on past this context


def settings_of(d: Deployment, args: Any, plan: Optional[Plan] = None) -> Settings:
    """What the flags ask for, else what a plan wants, else the engine's own defaults for this GPU.
    """
    seqs, tokens = args.max_num_seqs, args.max_num_batched_tokens
    if plan:
        seqs = seqs or plan.max_num_seqs
        tokens = tokens or max(plan.max_num_batched_tokens, plan.max_num_seqs)
    longest = plan.max_model_len if plan and "ctx" not in args.given else d.ctx_tokens
    engine = args.engine or "vllm"
    util = None if engine == "sglang" and "util" not in args.given else d.util
    return engine_settings(d, Asked(engine, args.engine_version or (), longest, seqs, tokens, util,
                                    draft_of(d, args)))


def engine_settings(d: Deployment, asked: Asked) -> Settings:
    """What was asked for, with the engine's own defaults for this GPU where nothing was.

    TensorRT-LLM's share is of what weights, adapters and reserve leave, and keeps the budget's KV
    pool. Source: vLLM engine/arg_utils.py, get_batch_defaults; SGLang arg_groups/memory_hook.py.
    """
    engine, version, longest = asked.engine, asked.version, asked.max_model_len
    memory = d.gpu.torch_bytes / GIB
    old = () < version < (0, 8)
    util = asked.util or d.util
    if engine == "sglang":
        _, tokens, small, large = next(row for row in SGLANG_CLASSES if memory < row[0])
        seqs = large if d.tp >= 4 else small
        if asked.util is None:
            util = sglang_fraction(d, version, asked.max_num_batched_tokens or tokens, seqs)
    elif old:
        tokens, seqs = 2048 if longest > CHUNKED_FROM_TOKENS else max(longest, 2048), 256
    else:
        roomy = memory >= 70 and not d.gpu.name.startswith("a100")
        tokens = 16384 if memory >= 160 else 8192 if roomy else 2048
        seqs = 1024 if roomy else 256
    if engine == "trtllm":
        m = memory_of(d._replace(util=util))
        free = d.gpu.memory_bytes - m.weights_bytes - m.adapter_bytes - d.reserve_bytes
        util = min(0.95, max(0.01, m.pool_bytes / free)) if free > 0 else 0.01
    block = 64 if d.model.latent and engine == "vllm" and not old else BLOCK_TOKENS[engine]
    return Settings(engine, version, longest, asked.max_num_seqs or seqs,
                    asked.max_num_batched_tokens or tokens, util, block, asked.draft,
                    asked)


def started_with(case: Case) -> Settings:
    """What the engine is started with: a pasted command that sets no context has the model's."""
    s, own = settings_of(case.d, case.args, case.plan), case.d.model.max_len
    if own and getattr(case.args, "from") and not case.plan and "ctx" not in case.args.given:
        return engine_settings(case.d, s.asked._replace(max_model_len=own))
    return s


def draft_of(d: Deployment, args: Any) -> Draft:
    """The speculation that the flags ask for; without a method, what the launch command takes."""
    if not {"spec_accept", "spec_accept_len", "spec_method"} & args.given:
        return Draft()
    method = args.spec_method or ("mtp" if d.model.mtp_layers else
                                  "eagle3" if args.spec_cost else "ngram")
    return Draft(method, args.spec_tokens, not args.spec_method)


def draft_layers(model: Model, draft: Draft) -> int:
    """Layers with a KV cache of their own that a drafter adds: MTP's, or EAGLE's one."""
    return {"mtp": model.mtp_layers, "eagle": 1, "eagle3": 1}.get(draft.method, 0)


def drafting(d: Deployment, s: Settings) -> Deployment:
    """The deployment with the drafter's layers among its caches, each as the model's attention.

    Source: a log of Llama-3.1-8B with EAGLE has 33 layers (tests/data/startup_logs.jsonl).
    """
    extra, caches = draft_layers(d.model, s.draft), d.model.caches
    main = next((c for kind in ("full", "mla", "sliding", "chunked") for c in caches
                 if c.kind == kind and c.elements), None)
    if not extra or main is None:
        return d
    grown = tuple(c._replace(layers=c.layers + extra)
                  if c is main or (c.kind == "indexer" and main.kind == "mla") else c
                  for c in caches)
    return d._replace(model=d.model._replace(caches=grown))


EAGLE3_VOCAB = 32000  # entries of the usual EAGLE-3 head's own vocabulary


def draft_bytes(d: Deployment, s: Settings) -> float:
    """Weights of the drafter on each GPU of the last stage [B], roughly; embedding and head are
    the target's. 0 for a draft model, whose shapes are not known.

    MTP: the last layer again as the checkpoint stores it, and a 2H x H projection on each rank.
    EAGLE: one dense 16-bit layer and a projection of 2H (EAGLE-3: 3H, and its own small head).
    Source: vLLM models/deepseek_mtp.py, llama_eagle.py, llama_eagle3.py.
    """
    layers, m, method = draft_layers(d.model, s.draft), d.model, s.draft.method
    quant = stored_as(d) if method == "mtp" else Quant("")
    if not layers:
        return 0.0
    if quant is None or not m.tensors:
        return layers * weights_bytes_per_gpu(d) / m.layers / d.stage_share
    tensors = [t._replace(layers=(m.layers - 1,)) for t in m.tensors if m.layers - 1 in t.layers]
    wide = 2 * m.hidden
    if method != "mtp":
        tensors = [t for t in tensors if t.split != "expert"]
        if m.experts:
            tensors += [Tensor("up_proj", (m.layers - 1,), m.hidden, 12 * m.hidden, 1, "tp")]
    if method == "eagle3":
        wide += m.hidden
        tensors += [Tensor("head", (m.layers - 1,), m.hidden, EAGLE3_VOCAB, 1, "tp")]
    alone = d._replace(pp=1, model=m._replace(tensors=tuple(tensors), vision_params=0))
    size = _one_stage(alone, quant, 0)
    return layers * (size.dense_bytes + size.expert_bytes + wide * m.hidden * ACTIVATION_BYTES)


class Profile(NamedTuple):
    """What vLLM counts before it sizes the KV cache, from one version on."""

    since: Version
    sampler_bytes: float  # of the sampler's warm-up, for each sequence and vocabulary entry
    library_gib: float  # outside torch on one GPU
    graphs_gib: float  # CUDA graphs, where they are counted before the KV cache
    dense_only: bool
    basis: str
    optional: bool = False  # a sampler that pip leaves out: without it, NATIVE's


# The last row that applies counts. Fitted to tests/data/startup_logs.jsonl (tests/bench_logs.py);
# which sampler and runner a version has: vLLM pulls 15777, 40376, 44443 and release 0.29.
NATIVE = Profile((), 39, 0.1, 0.0, False, "the PyTorch sampler, the largest of any version")
VLLM = (
    NATIVE._replace(basis="the PyTorch sampler"),
    Profile((0, 9, 1), 15, 0.1, 0.0, False, "the FlashInfer sampler, as in the container images",
            True),
    Profile((0, 10, 2), 39, 0.1, 0.0, False, "the PyTorch sampler"),
    Profile((0, 16), 15, 0.5, 0.0, False, "the Triton sampler"),
    Profile((0, 21), 39, 0.5, 0.5, False, "the PyTorch sampler warmed up too; CUDA graphs "
            "counted"),
    Profile((0, 25), 4, 0.5, 0.0, True, "runner V2, which warms no top-p sampler up"),
    Profile((0, 29), 4, 0.5, 0.5, False, "runner V2, which warms no top-p sampler up; CUDA graphs "
            "counted"),
)
NVLS_LINKS = ("nvlink4", "nvlink5")
# Buffers between GPUs, from logs; "rccl" on 8 MI355X, by SGLang's "Load weight begin. avail mem"
COMM_GIB = {"nvls": 1.4, "server": 0.12, "far": 2.15, "rccl": 4.1}


def profile_of(d: Deployment, s: Settings) -> Profile:
    """The row of VLLM for this version; the largest peak where the version is not given."""
    if not s.version:
        return NATIVE
    rows = [p for p in VLLM if p.since <= s.version and not (p.dense_only and d.model.experts)]
    return rows[-1]


class EngineMemory(NamedTuple):
    """One GPU's memory as an engine divides it up at start-up [B]."""

    total_bytes: float  # as torch sees it
    requested_bytes: float
    weights_bytes: float  # with what loading adds to them
    activation_bytes: float  # the peak of the profiling run
    other_bytes: float  # outside torch: context, libraries, buffers between GPUs
    graphs_bytes: float  # CUDA graphs, where counted before the KV cache

    @property
    def reserve_bytes(self) -> float:
        """All that is neither weights nor KV cache."""
        return self.activation_bytes + self.other_bytes + self.graphs_bytes

    @property
    def available_bytes(self) -> float:
        """Left for the KV cache."""
        return self.requested_bytes - self.weights_bytes - self.reserve_bytes


def comm_bytes(d: Deployment) -> float:
    """Buffers for collectives on each GPU of a replica [B]; NCCL's are larger with NVLS."""
    if d.tp * d.pp == 1:
        return 0.0
    nvls = d.gpu.link is not None and d.gpu.link.name in NVLS_LINKS
    far = d.replica_gpus > max(SERVER_GPUS, d.gpu.domain)
    rccl = d.gpu.vendor == "amd"
    return COMM_GIB["rccl" if rccl else "far" if far else "nvls" if nvls else "server"] * GIB


def activation_bytes(d: Deployment, s: Settings, sampler_bytes: float) -> float:
    """Peak of vLLM's profiling run on one GPU [B]: the larger of forward pass and sampler.

    Forward: each token's hidden states (three at a time) and its gate, up and product of the FFN,
    or of its top-k experts. Sampler: logits sorted, copied and normalised, for as many sequences
    as may run. V0 with chunked prefill ran no sampler. A vision tower is roughly 4 patches a token
    of the encoder's budget. Source: vLLM profile_run; constants from logs.
    """
    m, tokens = d.model, s.max_num_batched_tokens
    if not m.tensors:
        return d.reserve_bytes  # a model by hand: the budget's own reserve
    up = [t for t in m.tensors if t.name.endswith("up_proj")]
    wide = max((t.d_out for t in up if t.split == "tp"), default=4 * m.hidden)
    expert = max((t.d_out for t in up if t.split == "expert"), default=0)
    routed = m.top_k * (max(2 * expert / d.tp, m.hidden) + expert / d.tp) if expert else 0.0
    forward = tokens * ACTIVATION_BYTES * (3 * m.hidden + max(3 * wide / d.tp, routed))
    legacy = s.engine == "vllm" and () < s.version < (0, 8)
    if legacy and s.max_model_len > CHUNKED_FROM_TOKENS:
        return forward
    sampler = (sampler_bytes * min(s.max_num_seqs, tokens) * m.vocab
               + tokens * m.hidden * ACTIVATION_BYTES)
    vision = tokens * VISION_TOKEN_BYTES if m.vision_params else 0.0
    return max(forward, sampler, vision)


VISION_TOKEN_BYTES = 128 * KIB
# MXFP4 experts are padded to these multiples (hidden, width): vLLM quantization/mxfp4.py
MXFP4_PAD = {"Hopper": (256, 64), "Blackwell": (256, 256), "Blackwell Ultra": (256, 256)}
MERGED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "up", "up_proj": "up"}


def loaded_bytes(d: Deployment, stage: int) -> float:
    """Weights as "Model loading took" counts them on a GPU of this stage [B].

    Beside the stored weights: adapters, rotary tables, MLA's absorbed up-projections, the padding
    of MXFP4 experts, and what torch's allocator cannot split off a tensor's last 2 MiB.
    """
    m, weights, padding = d.model, stage_weights(d)[stage], 1.0
    layers = stage_layers(m.layers, d.pp)[stage]
    extra = d.adapter_bytes / d.tp * len(layers) / m.layers
    latent = [t for t in m.tensors if t.name.endswith("kv_b_proj")]
    if m.tensors and any(c.kind in (*KV_HEAD_KINDS, "mla") for c in m.caches):
        extra += m.max_len * (64 if latent else m.head_dim) * ACTIVATION_BYTES
    extra += sum(t.d_in * t.d_out * ACTIVATION_BYTES / d.tp * len(set(t.layers) & set(layers))
                 for t in latent)
    width = next((t.d_out for t in m.tensors if t.split == "expert"
                  and t.name.endswith("up_proj")), 0)
    if pads_experts(d) and width:
        hidden_to, width_to = MXFP4_PAD.get(d.gpu.arch, (256, 128))
        padded = -(-m.hidden // hidden_to) * hidden_to * -(-(width / d.tp) // width_to) * width_to
        padding = padded / (m.hidden * width / d.tp)
    return (weights.dense_bytes + weights.expert_bytes * padding + extra
            + unsplit_bytes(d, layers))


def pads_experts(d: Deployment) -> bool:
    """Whether the engine pads each rank's MXFP4 experts (gpt-oss), so that any TP divides them."""
    return d.weights.name == "mxfp4" and stem(d.model.arch) == "gptoss"


def unsplit_bytes(d: Deployment, layers: Iterable[int]) -> float:
    """What torch's caching allocator adds to the 16-bit matrices of these layers [B].

    A tensor of 10 MiB or more takes whole 2 MiB; a remainder up to 1 MiB stays with it. q, k, v
    and gate, up are one tensor each. Source: torch c10 CUDACachingAllocator.
    """
    quant = stored_as(d)
    sizes: Dict[Tuple[str, FrozenSet[int]], float] = {}
    if quant is None:
        return 0.0
    for t, where, each, label in stored_weights(d.model.tensors, quant):
        if t.d_in and label == quant.plain and t.split in ("tp", "kv", "expert"):
            start, _, last = t.name.rpartition(".")
            key = (start + MERGED.get(last, last), where)
            sizes[key] = sizes.get(key, 0.0) + each / (kv_ranks(d) if t.split == "kv" else d.tp)
    chosen, total = set(layers), 0.0
    for (_, where), size in sizes.items():
        left = -size % (2 * MIB)
        if size >= 10 * MIB and left <= MIB:
            total += left * len(where & chosen)
    return total


class Group(NamedTuple):
    """Layers that share a block table in vLLM."""

    kind: str
    window: int
    tables: int  # block tables of this kind
    block_tokens: int


class Pool(NamedTuple):
    """vLLM's paged KV cache on one GPU."""

    groups: Tuple[Group, ...]
    block_bytes: float  # of one block id: a page in each layer of a group
    blocks: int
    blocks_per_request: int  # of max_model_len tokens

    @property
    def concurrency(self) -> float:
        """Requests of max_model_len that fit."""
        return self.blocks / max(1, self.blocks_per_request)


def token_page_bytes(cache: Cache, d: Deployment) -> float:
    """What a token takes in one layer of this kind on a GPU; a state's whole size [B]."""
    t = cache_terms(cache._replace(layers=1), d, 1)
    if cache.state_bytes:
        return cache.state_bytes / d.tp
    return t["heads_per_gpu"] * t["elements"] * t["kv_bytes"] / t["every"]


def kv_groups(d: Deployment, s: Settings) -> Tuple[Tuple[Group, ...], float]:
    """vLLM's groups of layers and the bytes of one block.

    One kind of layer is one group. Of several kinds: an SSM hybrid's attention block grows to hold
    a state; pages are made equal by longer blocks or padding; a group has as many layers as the
    rarest kind (the commonest, where that is under 1.5 times it). Before 0.9.2 a window was kept
    whole. Source: vLLM v1/core/kv_cache_utils.py.
    """
    caches = [c for c in drafting(d, s).model.caches if c.elements or c.state_bytes]
    if not s.since(0, 9, 2):
        caches = [c._replace(kind="full", window=0) if c.window else c for c in caches]
    kinds = {c.kind if c.kind not in SHARED_KINDS else "full" for c in caches}
    size = s.block_tokens
    if kinds == {"full"} or len({(c.kind, c.window) for c in caches}) == 1:
        first = caches[0]
        block = sum(c.layers * size * token_page_bytes(c, d) for c in caches)
        return (Group(first.kind, first.window, 1, size),), block
    state = max((token_page_bytes(c, d) for c in caches if c.state_bytes), default=0.0)
    attention = max((token_page_bytes(c, d) for c in caches if not c.state_bytes), default=1.0)
    align = 128 if any(c.kind == "mla" for c in caches) else 16
    if state:
        size = max(size, align * math.ceil(state / (align * attention)))
    pages = [state if c.state_bytes else size * token_page_bytes(c, d) for c in caches]
    page = max(pages)
    fewest, most = min(c.layers for c in caches), max(c.layers for c in caches)
    together = most if most < 1.5 * fewest else fewest
    groups = tuple(
        Group(c.kind, c.window, -(-c.layers // together),
              size if c.state_bytes or page % own else size * int(page // own))
        for c, own in zip(caches, pages))
    return groups, together * page


def request_blocks(groups: Iterable[Group], tokens: int, d: Deployment, s: Settings) -> int:
    """Block ids that one request of so many tokens takes. Source: vLLM v1/kv_cache_interface.py."""
    total = 0
    for g in groups:
        if g.kind == "state":
            need = (2 if s.since(0, 28) else 1) + s.draft.tokens
        elif g.kind == "sliding":
            need = -(-min(g.window - 1 + s.in_flight_tokens, tokens) // g.block_tokens) + 1
        elif g.kind == "chunked":
            need = -(-min(g.window + s.in_flight_tokens, tokens) // g.block_tokens)
        else:
            need = math.ceil(math.ceil(tokens / d.dcp) / g.block_tokens)
        total += g.tables * need
    return total


def vllm_pool(d: Deployment, s: Settings, available: Sequence[float]) -> Pool:
    """The KV cache that these bytes on each stage make: the poorest stage decides for all."""
    groups, block = kv_groups(d, s)
    shares = [len(stage) / d.model.layers for stage in stage_layers(d.model.layers, d.pp)]
    blocks = min(max(0, int(free // (block * share))) for free, share in zip(available, shares))
    return Pool(groups, block, blocks, request_blocks(groups, s.max_model_len, d, s))


# DeepSeek-V4 packs pages of several sizes into one block, which is not described here: bytes of a
# sequence times this, and these bytes for each token in flight and layer (fitted to two logs).
PACKED_SHARE, PACKED_TOKEN_BYTES = 1.24, 8700


def packed_request_bytes(d: Deployment, s: Settings) -> float:
    """What one request of max_model_len takes of a pool with compressed caches, roughly [B]."""
    return (PACKED_SHARE * sequence_bytes(drafting(d, s), s.max_model_len)
            + PACKED_TOKEN_BYTES * s.max_num_batched_tokens * d.model.layers * d.stage_share)


def vllm_tokens(pool: Pool, d: Deployment, s: Settings) -> int:
    """"GPU KV cache size" as the log has it: requests times their length; before 0.21, and for
    one group, the blocks of one table times their tokens (too few, for hybrids: vllm#40691).
    """
    tables = sum(g.tables for g in pool.groups)
    if tables == 1 or not s.since(0, 21):
        return pool.blocks // tables * min(g.block_tokens for g in pool.groups) * d.dcp
    return int(pool.concurrency * s.max_model_len)


def longest_that_fits(pool: Pool, d: Deployment, s: Settings) -> int:
    """Most tokens of one request, by bisection as the engine does; 0 where none fits."""
    return most_tokens(s.max_model_len, lambda tokens: request_blocks(
        pool.groups, tokens, d, s) <= pool.blocks - 1)  # one is never used


def most_tokens(high: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `high` that fits, where fewer tokens always do; 0 for none."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


SGLANG_CLASSES = (  # memory under GiB, chunked prefill, decode batch at TP under 4, from 4
    (20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512),
    (10**6, 16384, 512, 512))
SGLANG_CONTEXT_GIB = 0.4  # taken before the weights: torch's total less "avail mem" in three logs


def sglang_fraction(d: Deployment, version: Version, prefill_tokens: int, graph_seqs: int) -> float:
    """SGLang's own mem_fraction_static; before 0.5 a table by TP.

    Source: SGLang 0.5.23 arg_groups/memory_hook.py; 0.4.1 server_args.py.
    """
    if () < version < (0, 5):
        return {1: 0.88, 2: 0.87, 4: 0.85, 8: 0.81}.get(d.tp, 0.79)
    mib = d.gpu.memory_bytes / MIB
    reserved = 512 + 1.5 * max(prefill_tokens, 2048) + d.tp * d.pp / 8 * 1024 + 2 * graph_seqs
    reserved += 1536 if d.model.latent else 0
    if mib > 60 * KIB:
        reserved = max(reserved, 10240)
    return round((mib - reserved) / mib, 3)


SWA_RATIO, STATE_RATIO = 0.8, 0.9  # SGLang swa_full_tokens_ratio, mamba_full_memory_ratio


def sglang_tokens(d: Deployment, available: float) -> int:
    """SGLang's max_total_num_tokens for these bytes.

    Sliding layers hold 0.8 of the tokens of full ones; recurrent states take 0.9/1.9 of the pool.
    """
    cell = 0.0
    for c in d.model.caches:
        if not c.state_bytes:
            cell += c.layers * d.stage_share * token_page_bytes(c, d) * (
                SWA_RATIO if c.window else 1)
    if any(c.state_bytes for c in d.model.caches):
        available /= 1 + STATE_RATIO
    return max(0, int(available // cell)) if cell else 0


class Refusal(NamedTuple):
    """Why an engine would not start, or not take one request, and the flags that cure it."""

    kind: str  # shard, length, batch, share, room, states
    what: str
    cure: str = ""


def refusals_of(d: Deployment, s: Settings, found: EngineAnswer) -> List[Refusal]:
    """Every reason why the engine would refuse this deployment, without cures.

    SGLang and TensorRT-LLM start with a pool under one request; the request is what they refuse.
    """
    m, memory, pool, vllm = d.model, found.memory, found.pool, s.engine == "vllm"
    short = pool.blocks_per_request > pool.blocks - 1 if pool else found.concurrency < 1
    empty = memory.available_bytes <= (pool.block_bytes if pool else 0) or not found.tokens
    needed = (memory.weights_bytes + memory.reserve_bytes) / memory.total_bytes
    taken = f"{needed:.0%} of" if needed < 10 else f"{needed:,.0f} times"
    held = "" if vllm else f" the pool of {count(found.tokens)}"
    reasons = (
        ("length", vllm and 0 < m.max_len < s.max_model_len,
         f"max_model_len {count(s.max_model_len)} is past the model's {count(m.max_len)}"),
        ("batch", vllm and s.max_num_seqs > s.max_num_batched_tokens, "max_num_batched_tokens "
         f"{s.max_num_batched_tokens} is under max_num_seqs {s.max_num_seqs}"),
        ("share", vllm and memory.requested_bytes > memory.total_bytes - CONTEXT_GIB * GIB,
         "free memory is less than the utilisation asks for"),
        ("room", empty, f"no memory is left for the KV cache: {taken} the GPU goes to weights, "
         "activations and buffers"),
        ("room", short and not empty,
         f"one request of {count(s.max_model_len)} tokens does not fit{held}"),
        ("states", pool and any(g.kind == "state" for g in pool.groups)
         and 0 < pool.blocks < s.max_num_seqs,
         f"max_num_seqs {s.max_num_seqs} is past the {pool.blocks if pool else 0} state blocks"))
    return (shard_refusals(d, s) if s.engine != "trtllm" else []) + [
        Refusal(kind, what) for kind, holds, what in reasons if holds]


CONTEXT_GIB = 0.5  # what a process takes of a GPU before vLLM looks how much is free


class Way(NamedTuple):
    """A change that may cure a refusal: flags, and what is deployed and asked for with them."""

    flags: str
    d: Deployment
    asked: Asked


# How each engine spells them; TensorRT-LLM's share is of other memory, so ours stand for it.
CURE_FLAGS = {
    "vllm": {"util": "--gpu-memory-utilization", "tp": "--tensor-parallel-size",
             "pp": "--pipeline-parallel-size", "ctx": "--max-model-len", "seqs": "--max-num-seqs",
             "weights": "--quantization", "ep": "--enable-expert-parallel"},
    "sglang": {"util": "--mem-fraction-static", "tp": "--tp-size", "pp": "--pp-size",
               "ctx": "--context-length", "seqs": "--max-running-requests",
               "weights": "--quantization", "ep": "--ep-size {}"},
    "trtllm": {"util": "--util", "tp": "--tp_size", "pp": "--pp_size", "ctx": "--max_seq_len",
               "seqs": "--max_batch_size", "weights": "--weights", "ep": ""}}
NO_CURE = "a larger GPU, or more of them with fewer bytes a weight"
LEAST_CTX = 1024  # tokens: a cut of the context below serves nobody
CURE_GPUS = 64  # most of one replica that a cure asks for


def _asking(d: Deployment, s: Settings, key: str, value: float) -> Way:
    """One setting changed: util, ctx or seqs."""
    flag, asked = CURE_FLAGS[s.engine][key], s.asked
    if key == "util":
        return Way(f"{flag} {value:g}", d, asked._replace(util=value))
    field = {"ctx": "max_model_len", "seqs": "max_num_seqs"}[key]
    return Way(f"{flag} {int(value)}", d, Asked(**{**asked._asdict(), field: int(value)}))


def _layouts(d: Deployment, s: Settings, sizes: Iterable[Tuple[int, int]]) -> Iterator[Way]:
    """Ways to these sizes of TP and PP; each with whole experts too, where the engine takes them.
    """
    names, every = CURE_FLAGS[s.engine], d.ep > 1 and d.ep == d.tp * d.pcp * d.dp
    wholes = (False, True) if names["ep"] and d.model.experts and d.ep == 1 else (False,)
    for tp, pp in sizes:
        for whole in wholes:
            if tp == 1 if whole else (tp, pp) == (d.tp, d.pp):
                continue
            other = d._replace(tp=tp, pp=pp, ep=tp * d.pcp * d.dp if whole or every else d.ep)
            words = [f"{names[key]} {size}" for key, size, now in (
                ("tp", tp, d.tp), ("pp", pp, d.pp)) if size != now]
            try:
                check_layout(other)
            except UserError:
                continue
            yield Way(" ".join(words + [names["ep"].format(other.ep)] * whole), other, s.asked)


def room_ways(d: Deployment, found: EngineAnswer) -> Iterator[Way]:
    """Room for one request: fewer sequences profiled where none were asked for, or more than by
    any engine's default; a shorter context, a larger share, more GPUs, fewer bytes a weight.
    """
    s, room, longest = found.settings, found.memory.available_bytes, 0
    fewer = [_asking(d, s, "seqs", n) for n in (1024, 256, 128, 64)
             if n < s.max_num_seqs and (s.asked.max_num_seqs or math.inf) > 1024]
    yield from fewer
    if room > 0 and found.pool:
        longest = longest_that_fits(found.pool, d, s)
    elif room > 0 and s.engine == "vllm":
        longest = most_tokens(s.max_model_len, lambda tokens: packed_request_bytes(
            d, s._replace(max_model_len=tokens)) <= room)
    elif room > 0:
        longest = min(found.tokens, s.max_model_len)
    if longest >= (d.prompt_tokens + d.output_tokens if d.output_tokens else LEAST_CTX):
        yield _asking(d, s, "ctx", longest)
    now = s.asked.util or (d.util if s.engine == "trtllm" else s.util)
    shares = [_asking(d, s, "util", n / 100) for n in range(math.ceil(now * 100 + 1e-9), 98)]
    modest = [way for way in shares if (way.asked.util or 1) <= 0.95]
    yield from modest
    if fewer:
        yield from (way._replace(flags=f"{fewer[0].flags} {way.flags}", asked=way.asked._replace(
            max_num_seqs=fewer[0].asked.max_num_seqs)) for way in modest)
    yield from shares[len(modest):]
    powers = [2 ** n for n in range(7)]
    sizes = [(tp, pp) for tp in powers for pp in powers[:4] if d.tp <= tp and d.pp <= pp
             and tp * pp <= max(CURE_GPUS, 2 * d.tp * d.pp)]
    yield from _layouts(d, s, sorted(sizes, key=lambda n: (n[0] * n[1], n[1])))
    if d.weights.bytes >= 2:
        yield Way(f"{CURE_FLAGS[s.engine]['weights']} fp8", d._replace(
            weights=WEIGHTS["fp8"], weight_bytes=d.model.params), s.asked)


def shard_ways(d: Deployment, found: EngineAnswer) -> Iterator[Way]:
    """Whole experts, fewer TP ranks, with more stages for them, more ranks."""
    s = found.settings
    fewer = [n for n in range(d.tp, 0, -1) if d.tp % n == 0]
    sizes = [(n, d.pp) for n in fewer] + [(n, d.pp * d.tp // n) for n in fewer]
    more = [(d.tp * n, d.pp) for n in (2, 4, 8) if d.tp * n <= CURE_GPUS]
    return _layouts(d, s, sizes + more + [(tp // 2, pp * 4) for tp, pp in more if tp % 2 == 0])


def share_ways(d: Deployment, found: EngineAnswer) -> Iterator[Way]:
    """The largest share that is free, by itself or with more room."""
    total, s = found.memory.total_bytes, found.settings
    most = _asking(d, s, "util", math.floor((1 - CONTEXT_GIB * GIB / total) * 100) / 100)
    yield most
    lower = reckon(d, engine_settings(d, most.asked), Logged())
    yield from (way._replace(flags=f"{most.flags} {way.flags}") for way in room_ways(d, lower))


WAYS: Dict[str, Callable[[Deployment, EngineAnswer], Iterator[Way]]] = {
    "shard": shard_ways, "share": share_ways, "room": room_ways,
    "length": lambda d, f: iter([_asking(d, f.settings, "ctx", d.model.max_len)]),
    "batch": lambda d, f: iter([_asking(d, f.settings, "seqs",
                                        f.settings.max_num_batched_tokens)]),
    "states": lambda d, f: iter([_asking(d, f.settings, "seqs", f.pool.blocks if f.pool else 1)])}


ROW_PARALLEL = ("o_proj", "down_proj", "out_proj")  # TP divides their inputs
# AWQ and GPTQ copies of these are published with a wider FFN, so that TP divides its groups:
# intermediate_size in config.json of Qwen/Qwen2.5-72B-Instruct-AWQ; of the VL one, vllm#21695
PADDED_FFN = {"qwen2.5-72b": 29696, "qwen2.5-vl-72b": 29696}


def shard_refusals(d: Deployment, s: Settings) -> List[Refusal]:
    """The first quantised matrix that TP cuts within a block or group of its scales.

    MXFP4 experts that the engine pads are never cut so. Source: vLLM quantization/fp8.py, awq.py,
    gptq.py: input and output sizes of a partition; SGLang's are alike (sglang#23265).
    """
    quant = stored_as(d)
    for _, scheme in quant.rules if quant and d.tp > 1 else ():
        padded = scheme.label == "mxfp4" and pads_experts(d)
        for t, _, _, label in stored_weights(d.model.tensors, quant) if quant else ():
            if padded or label != scheme.label or t.split not in ("tp", "kv", "expert") or (
                    t.split == "expert" and d.ep > 1):
                continue
            ranks = kv_ranks(d) if t.split == "kv" else d.tp
            row = t.name.endswith(ROW_PARALLEL)
            size, unit = (t.d_in, scheme.group) if row else (t.d_out, scheme.block)
            if label in ("awq", "gptq") and t.name.endswith("mlp.down_proj"):
                size = PADDED_FFN.get(d.model.name, size)
            cut = unit > 1 and (size % ranks or size // ranks % unit)
            if cut and not loads_cut_blocks(d, s, t):
                return [Refusal("shard", f"{scheme.label} scales do not divide {t.name} over "
                                f"TP={d.tp}")]
    return []


def loads_cut_blocks(d: Deployment, s: Settings, t: Tensor) -> bool:
    """Whether the engine loads this matrix though a rank's part ends within a block.

    vLLM since 0.14: q, k, v in one, and gate, up outside the experts (vllm#30836, for the 192-wide
    keys of MiMo-V2-Flash). SGLang: q, k, v of that model alone (its models/mimo_v2.py).
    """
    name = t.name.rpartition(".")[2]
    if s.engine == "vllm":
        return s.since(0, 14) and t.split != "expert" and name in MERGED
    return stem(d.model.arch).startswith("mimov2") and MERGED.get(name) == "qkv"


def kv_ranks(d: Deployment) -> int:
    """TP ranks that hold KV heads of their own; past these they are copies."""
    return min(d.tp, max(kv_heads_of(d.model), default=1))


# A pasted log: what it says, whatever the version's wording. The worst rank counts.
GIB_TEXT = r"(?<![-\d.])([-\d.]+) ?Gi?B"
ARGS = r"(?:non-default args|args: Namespace|ServerArgs).*?[ ({,'\"]"  # what was asked for
IS = r"['\"]?[=:] ?['\"]?"  # key=value, 'key': value
LOG_LINES: Tuple[Tuple[str, str, str], ...] = (  # key, pattern; "max", "min", "first" of a line ...
    ("version", r"(?:LLM engine \(v|(?:server|vLLM|█) +version |sglang[= ]v?)"
                r"(\d+(?:\.\d+)+(?:\.dev)?)", "text"),
    ("model", r"LLM engine .*? config: model=['\"]?([^'\",]+)", "text"),
    ("model", ARGS + r"model(?:_path|_tag)?" + IS + r"([^'\",]+)", "text"),
    ("model", r"(?:Starting to load model|serving model|█ +model) +(\S+?)(?:\.\.\.|\s|$)", "text"),
    ("quantization", ARGS + "quantization" + IS + r"([a-z][\w-]*)", "text"),
    ("quantization", r"(?:LLM engine .*?[ ,]quantization|Load weight end.*quant)=([\w-]+)", "text"),
    ("kv_cache_dtype", ARGS + "kv_cache_dtype" + IS + r"(\w+)", "text"),
    ("kv_cache_dtype", r"(?:LLM engine .*?[ ,]kv_cache_dtype=|Using KV cache dtype: (?:torch\.)?)"
                       r"(\w+)", "text"),
    ("total_bytes", r"total_gpu_memory \(" + GIB_TEXT, "min"),
    ("total_bytes", r"Free memory on device (?:\S+ )?\([\d.]+/([\d.]+) GiB\)", "min"),
    ("util", r"gpu_memory_utilization \(([-\d.]+)\)", "first"),
    ("util", r"Desired GPU memory utilization is \(([-\d.]+)", "first"),
    ("util", r"[^a-z]gpu[_-]memory[_-]utilization['\"]?[=: ]+['\"]?([\d.]+)", "first"),
    ("util", r"mem[_-]fraction[_-]static=([\d.]+)", "first"),
    ("max_model_len", r"(?<![a-z_])(?:max_seq_len|max_model_len|context_length)" + IS + r"(\d+)",
     "first"),
    ("max_model_len", r"Maximum concurrency for ([\d,]+) tokens", "first"),
    ("max_model_len", r"context_len=(\d+)", "first"),
    ("max_num_seqs", r"(?<![a-z_])max_num_seqs" + IS + r"(\d+)", "first"),
    ("max_num_seqs", ARGS + r"max_running_requests" + IS + r"(\d+)", "first"),
    ("rank_seqs", r"max_total_num_tokens=.*[ ,]max_running_requests=(\d+)", "min"),
    ("max_num_batched_tokens", r"(?<![a-z_])(?:max_num_batched_tokens|chunked_prefill_size)" + IS
     + r"(\d+)", "first"),
    ("tp", r"(?<![a-z_])(?:tensor_parallel_size|tp_size)" + IS + r"(\d+)", "first"),
    ("dp", r"(?<![a-z_])dp_size=(\d+).*enable_dp_attention=True", "first"),
    ("weights_bytes", r"(?:[Mm]odel loading|Loading model weights) took " + GIB_TEXT, "max"),
    ("weights_bytes", r"model weights take " + GIB_TEXT, "max"),
    ("weights_bytes", GIB_TEXT + r" for weights?\b", "max"),
    ("weights_bytes", r"Load weight end.*mem usage=" + GIB_TEXT, "max"),
    ("consumed_bytes", GIB_TEXT + r" for consumed memory", "max"),
    ("other_bytes", r"non_torch_memory takes " + GIB_TEXT, "max"),
    ("other_bytes", GIB_TEXT + r" for non-torch memory", "max"),
    ("activation_bytes", r"PyTorch activation peak memory takes " + GIB_TEXT, "max"),
    ("activation_bytes", GIB_TEXT + r" for peak activation", "max"),
    ("graphs_bytes", r"Estimated CUDA graph memory: " + GIB_TEXT, "max"),
    ("captured_bytes", r"Graph capturing finished in .* took " + GIB_TEXT, "max"),
    ("captured_bytes", GIB_TEXT + r" for CUDAGraph memory", "max"),
    ("available_kv_bytes", r"Available KV cache memory: " + GIB_TEXT, "min"),
    ("available_kv_bytes", r"reserved for KV Cache is " + GIB_TEXT, "min"),
    ("available_kv_bytes", r"kv cache memory in use is " + GIB_TEXT, "min"),
    ("available_kv_bytes", r"kv cache memory in use is (\d+ bytes)", "min"),
    ("pool_part_bytes", r"[KV]V? size: " + GIB_TEXT, "sum"),
    ("num_gpu_blocks", r"# (?:GPU|cuda|CUDA) blocks: (\d+)", "min"),
    ("num_gpu_blocks", r"num_gpu_blocks(?: is|=|:) ?(\d+)", "min"),
    ("kv_cache_tokens", r"GPU KV cache size: ([\d,]+) tokens", "min"),
    ("kv_cache_tokens", r"max_total_num_tokens=(\d+)", "min"),
    ("kv_cache_tokens", r"KV Cache is allocated.*#tokens: (\d+)", "min"),
    ("kv_cache_tokens", r"stored in KV cache \((\d+)\)", "min"),
    ("max_concurrency", r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", "min"),
)
LOG_BYTES_MAX = 64 * MIB
LOG_LINE_CHARS = 16000  # of a line are looked at
WORTH_READING = r"Gi?B|=|': |version|engine|model|[Cc]ache|blocks|concurrency|utili"  # quick
COLOURS = r"(?:\x1b|\\x1b|\\u001b|#033|\^\[)\[[\d;]*[A-Za-z]|\[\d{1,3}(?:;\d{1,3})*m"
SERVER_STARTS = r"(?:server|█) +version \d|server_args=ServerArgs"
ENGINE_STARTS = r"Initializing an? (?:V\d )?LLM engine"  # once a data-parallel rank
MEMORY_SAID = r"took [\d.]+ Gi?B|weights? (?:take|end)|KV [Cc]ache (?:size|mem|is al)|# \w+ blocks"
# Past these no engine ever logs
LOG_MOST = {"util": 1.0, "tp": 4096, "max_num_seqs": 1e6, "rank_seqs": 1e6}
SIGNED = ("available_kv_bytes", "graphs_bytes", "captured_bytes", "other_bytes")
ASKED = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
NEVER_ZERO = ("util", "tp", "dp", "total_bytes", "rank_seqs", *ASKED)


def read_startup_log(path: str) -> Dict[str, Any]:
    """What a pasted vLLM or SGLang start-up log states, SI units. UserError where it says nothing.

    Every rank writes its own lines: weights and peaks count at their largest, room at its least.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(LOG_BYTES_MAX + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if len(data) > LOG_BYTES_MAX:
        raise UserError(f"{path} is over {LOG_BYTES_MAX // MIB} MiB; cut it to one start")
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff") or data[:400].count(0) > 100
    try:
        found = parse_startup_log(data.decode("utf-16" if wide else "utf-8", "replace"))
    except UserError as error:
        raise UserError(f"{path} {error}") from None
    if not {name for name, _ in LOGGED} & set(found):
        raise UserError(f"{path} has no line of a vLLM or SGLang start that says how memory was "
                        "divided; paste those from the weights to the KV cache")
    return found


def parse_startup_log(text: str) -> Dict[str, Any]:
    """The figures of the last start in a log, by LOG_LINES. UserError where one cannot be."""
    import re
    patterns = [(key, re.compile(pattern), how) for key, pattern, how in LOG_LINES]
    lines, starts = last_start(re.sub(COLOURS, "", text).splitlines())
    found: Dict[str, Any] = {}
    worth = re.compile(WORTH_READING)
    for line in lines:
        line = line[:LOG_LINE_CHARS]
        for key, pattern, how in patterns if worth.search(line) else ():
            matches = pattern.findall(line)
            if matches and how == "text":
                found[key] = engine_version(matches[0]) if key == "version" else matches[0]
            elif matches:
                values = [value for value in (log_number(key, m) for m in matches)
                          if value is not None]
                value = sum(values) if how == "sum" else next(iter(values), None)
                old = found.get(key, value)
                if value is not None:
                    found[key] = {"max": max, "min": min, "sum": max}.get(
                        how, lambda _, new: new)(old, value)
    start = "\n".join(lines)
    if re.search("Load weight|max_total_num_tokens|server_args=ServerArgs", start):
        found["engine"] = "sglang"
    elif re.search(r"LLM engine|KV [Cc]ache|gpu_memory_util|# \w+ blocks|loading took", start):
        found["engine"] = "vllm"
    if "dp" in found and "tp" in found:  # SGLang's TP counts the ranks of DP attention too
        found["tp"] //= found["dp"]
    if "rank_seqs" in found:  # what came of the flag, on each of those ranks
        found["max_num_seqs"] = found.pop("rank_seqs") * found.get("dp", 1)
    if "pool_part_bytes" in found:
        found.setdefault("available_kv_bytes", found.pop("pool_part_bytes"))
    return {**found, "starts": starts} if starts > 1 else found


def last_start(lines: Sequence[str]) -> Tuple[Sequence[str], int]:
    """The lines of the last start that says anything of memory, and how many starts do."""
    import re

    server, engine, memory = map(re.compile, (SERVER_STARTS, ENGINE_STARTS, MEMORY_SAID))
    said: List[List[str]] = []  # the starts that say something of memory
    start: List[str] = []
    spoke = False
    for line in lines:
        new = server.search(line) or (spoke and engine.search(line)
                                      and not re.search(r"_DP[1-9]", line))
        if new:
            said += [start] if spoke else []
            start, spoke = [], False
        start.append(line)
        spoke = spoke or bool(memory.search(line))
    said += [start] if spoke or not said else []
    return said[-1], len(said)


def log_number(key: str, text: str) -> Optional[float]:
    """A number of a log, SI units; None for none. UserError for one that no engine logs."""
    try:
        value = float(text.replace(",", "").replace(" bytes", ""))
    except ValueError:
        return None
    in_bytes = key.endswith("_bytes")
    if in_bytes and not text.endswith("bytes"):
        value *= GIB
    most = LOG_MOST.get(key, 4096 * GIB if in_bytes else 1e12)
    least = -most if key in SIGNED else 0
    if not least <= value <= most or (value == 0 and key in NEVER_ZERO):
        shown = text if len(text) < 20 else f"{text[:16]}... ({len(text)} characters)"
        raise UserError(f"has {shown} for {key.replace('_bytes', '')}, which no engine logs; paste "
                        "its lines as they were")
    return value


def engine_version(text: str) -> Version:
    """The numbers of a version: v0.14.0rc2 -> (0, 14, 0). UserError without any.

    () for what tells nothing: a source build calls itself 0.1.dev8168; 0.2x may be any of ten.
    """
    import re
    match = re.match(r"v?(\d{1,4}(?:\.\d{1,4})*)(\.dev|x)?", text.strip().lower())
    if not match:
        raise UserError(f"{text!r} is no version; write 0.33 or 0.10.2")
    numbers = tuple(int(part) for part in match[1].split(".")[:3])
    return () if match[2] == "x" or (match[2] and numbers == (0, 1)) else numbers


def dotted(version: Version) -> str:
    """A version as people write it; '' where it is not known."""
    return ".".join(map(str, version))


class EngineAnswer(NamedTuple):
    """What an engine will log at start-up."""

    settings: Settings
    memory: EngineMemory  # of the poorest stage
    pool: Optional[Pool]  # vLLM's; None for engines without block groups
    tokens: int
    concurrency: float
    refusals: Sequence[Refusal]
    low_bytes: float  # the band of the available KV memory
    high_bytes: float


class Logged(NamedTuple):
    """What a start-up log states, in place of the reckoning [B]."""

    reserve_bytes: Optional[float] = None
    weights_bytes: Optional[float] = None


def engine_answer(d: Deployment, s: Settings, logged: Optional[Logged] = None) -> EngineAnswer:
    """What the engine will log; with the reserve and weights of a log, where there is one.

    A refusal's cure is the first flags after which it is gone and no other has come, so cures that
    are taken in turn end; NO_CURE where none is found.
    """
    logged = logged or Logged()
    found = reckon(d, s, logged)
    before = {r.kind for r in found.refusals}

    def cure(kind: str) -> str:
        for way in WAYS[kind](d, found):
            same = (way.d.tp, way.d.pp, way.d.ep, way.d.weights) == (d.tp, d.pp, d.ep, d.weights)
            after = reckon(way.d, engine_settings(way.d, way.asked),
                           logged if same else logged._replace(weights_bytes=None))
            if {r.kind for r in after.refusals} <= before - {kind}:
                return way.flags
        first = next(iter(WAYS[kind](d, found)), None)
        return first.flags if first and kind in ("length", "batch", "states") else NO_CURE

    return found._replace(refusals=[r._replace(cure=cure(r.kind)) for r in found.refusals])


def reckon(d: Deployment, s: Settings, logged: Logged) -> EngineAnswer:
    """As engine_answer; its refusals have no cures. The band holds nine of ten logs."""
    stages = engine_stages(d, s, logged)
    memory = min(stages, key=lambda stage: stage.available_bytes)
    left, reserve, pool = memory.available_bytes, memory.reserve_bytes, None
    if s.engine == "vllm" and any(c.every > 1 for c in d.model.caches):
        concurrency = max(0.0, left) / packed_request_bytes(d, s)
        tokens = int(concurrency * s.max_model_len)
    elif s.engine == "vllm":
        pool = vllm_pool(d, s, [stage.available_bytes for stage in stages])
        tokens, concurrency = vllm_tokens(pool, d, s), pool.concurrency
    else:
        tokens = sglang_tokens(drafting(d, s), left)
        tokens -= tokens % s.block_tokens
        concurrency = tokens / s.max_model_len
    if logged.reserve_bytes is not None or s.engine != "vllm":
        part = POOL_BAND[s.engine if logged.reserve_bytes is None else "logged"]
        low, high = left - abs(left) * part, left + abs(left) * part
    else:
        less, more = RESERVE_BAND[bool(s.version)]
        load = memory.weights_bytes * 0.005
        low, high = left - reserve * more - load, left + reserve * less + load
        if profile_of(d, s).optional:
            low -= (1 + more) * (left - without_option(d, s))
    found = EngineAnswer(s, memory, pool, tokens, concurrency, (), low, high)
    return found._replace(refusals=refusals_of(d, s, found))


def without_option(d: Deployment, s: Settings) -> float:
    """vLLM's memory for KV where the optional sampler of its version is not installed [B]."""
    return min(stage.available_bytes for stage in engine_stages(d, s._replace(version=()),
                                                                Logged()))


POOL_BAND = {"logged": 0.01, "sglang": 0.04, "trtllm": 0.10}  # of the pool; the last is a guess
# By how much the reserve logged was under, and over, the one predicted in nine of ten logs
# (tests/bench_logs.py), by whether the version is known: the newest reserve a third of the oldest.
RESERVE_BAND = {False: (0.65, 0.3), True: (0.25, 0.3)}


def engine_stages(d: Deployment, s: Settings, logged: Logged) -> List[EngineMemory]:
    """How the engine divides the memory of a GPU, on each pipeline stage where it is vLLM; what a
    log states is put over it.

    vLLM: requested = ceil(total * utilisation); available = requested - weights - peak of a
    profiling run - what is not torch's - CUDA graphs (from 0.21). SGLang's pool is what is free
    after the weights, less a share of what was free before; TensorRT-LLM's is a share of what
    weights and activations leave. Source: vLLM v1/worker/gpu_worker.py; SGLang 0.5.23
    model_executor/pool_configurator.py.
    """
    total = d.gpu.torch_bytes
    served = [loaded_bytes(d, stage) for stage in range(d.pp)]
    served[-1] += draft_bytes(d, s)
    if s.engine == "vllm":
        profile = profile_of(d, s)
        stages = [EngineMemory(
            total, math.ceil(total * s.util), weights,
            activation_bytes(d, s, profile.sampler_bytes if stage == d.pp - 1 else 0.0),
            profile.library_gib * GIB + comm_bytes(d), profile.graphs_gib * GIB)
            for stage, weights in enumerate(served)]
    elif s.engine == "sglang":
        # free before loading, when the links between GPUs have their buffers already
        free = total - SGLANG_CONTEXT_GIB * GIB - comm_bytes(d)
        stages = [EngineMemory(total, free * s.util, max(served), 0.0, 0.0, 0.0)]
    else:
        peak, other = activation_bytes(d, s, 0.0), 0.5 * GIB + comm_bytes(d)
        kept = max(0.0, total - max(served) - peak - other) * (1 - s.util)
        stages = [EngineMemory(total, total - kept, max(served), peak, other, 0.0)]
    if logged.weights_bytes is not None:
        stages = [m._replace(weights_bytes=logged.weights_bytes) for m in stages]
    if logged.reserve_bytes is not None:
        stages = [m._replace(activation_bytes=0.0, graphs_bytes=0.0,
                             other_bytes=logged.reserve_bytes) for m in stages]
    return stages


# ---- 7. Step time ------------------------------------------------------------------------------


class StepTime(NamedTuple):
    """The terms of one decode step [s], summed over the pipeline stages a token passes."""

    batch: int
    weights_s: float
    kv_s: float
    compute_s: float

    @property
    def step_s(self) -> float:
        """max(compute, weights + KV): reads and arithmetic overlap at best."""
        return max(self.compute_s, self.weights_s + self.kv_s)

    @property
    def bound_by(self) -> str:
        """The term that decides: compute, weights or kv."""
        if self.compute_s > self.weights_s + self.kv_s:
            return "compute"
        return "weights" if self.weights_s >= self.kv_s else "kv"


def touched_share(model: Model, tokens: float) -> float:
    """Share of the experts that so many tokens reach in one layer, under uniform routing.

    E(1 - (1 - k/E)^B) distinct experts of E: nearly k*B at batch 1, all of them at large batch.
    """
    if not model.experts:
        return 1.0
    return float(1 - (1 - model.top_k / model.experts) ** tokens)


def decode_step(d: Deployment, batch: int, tokens_per_seq: int = 1,
                mbu: Optional[float] = None) -> StepTime:
    """The bound on one decode step of a replica with `batch` sequences in flight.

    A dense model reads and multiplies by all its parameters; an MoE reads what is not expert plus
    the experts that its tokens touch, and multiplies by the active ones. Each of the PP stages
    works on batch/PP sequences; a token passes them one after another, so PP saves no time.
    tokens_per_seq > 1 is a speculative step's verification: more FLOP, the same reads.
    Source: Pope et al., "Efficiently Scaling Transformer Inference" (2211.05102), section 2.
    """
    bandwidth = d.gpu.bandwidth_bytes_s * (mbu or d.mbu)
    seqs, all_seqs = microbatch(d, batch)
    all_tokens = all_seqs * tokens_per_seq
    weights = read_weight_bytes(d, touched_share(d.model, all_tokens)) * d.pp
    kv = seqs * read_bytes(d, d.history_tokens) * d.pp
    flop = flop_per_gpu(d, seqs * tokens_per_seq, all_tokens) * d.pp * d.stage_share
    return StepTime(batch, weights / bandwidth, kv / bandwidth, flop / (peak_flop_s(d) * d.mfu))


def microbatch(d: Deployment, batch: int) -> Tuple[int, int]:
    """Sequences that a pipeline stage works on at a time: (on one attention rank, on all)."""
    return -(-batch // (d.attention_dp * d.pp)), -(-batch // d.pp)


def peak_flop_s(d: Deployment) -> float:
    """Dense peak of one GPU at the compute type in use [FLOP/s]."""
    return d.gpu.flop_s[d.compute]


def flop_per_gpu(d: Deployment, tokens: float, all_tokens: float) -> float:
    """FLOP of the linear layers on each GPU [FLOP]: 2 a parameter, a token.

    tokens: on one attention rank; all_tokens: of all the ranks, which share the experts.
    """
    if not d.model.experts:
        return 2 * d.model.params * tokens / d.tp
    expert = expert_param_share(d.model) * d.model.params * d.model.top_k / d.model.experts
    dense = d.model.active_params - expert
    return 2 * (dense * tokens / d.tp + expert * all_tokens / d.expert_ranks)


def prefill_seconds(d: Deployment, tokens: float, mfu: Optional[float] = None) -> float:
    """The bound on prefilling one prompt [s]: 2 * parameters * tokens / (peak * MFU).

    TP and PCP share the work; the stages of PP follow one another. Source: Kaplan et al.
    (2001.08361), section 2.1.
    """
    return flop_per_gpu(d, tokens, tokens) / d.pcp / (peak_flop_s(d) * (mfu or d.mfu))


def attention_seconds(d: Deployment, tokens: float) -> float:
    """What causal attention adds to the prefill of one prompt [s], in BF16; not in the bound."""
    return attention_flop(d, tokens) / (d.tp * d.pcp * d.gpu.flop_s["bf16"] * d.mfu)


def attention_flop(d: Deployment, tokens: float) -> float:
    """FLOP of causal attention over one prompt: 2 n (d_qk + d_v) for each pair of tokens."""
    flop = 0.0
    for cache in d.model.caches:
        window = min(cache.window or tokens, tokens)
        seen = window - window * window / (2 * tokens)  # mean of min(position, window)
        flop += cache.layers * cache.flops * tokens * seen
    return flop


def prefill_tok_s(d: Deployment, tokens: float, mfu: float) -> float:
    """Prompt tokens a second when all GPUs do nothing but prefill, attention included [tok/s]."""
    busy_s = (flop_per_gpu(d, tokens, tokens * d.attention_dp) / d.pcp / (peak_flop_s(d) * mfu)
              + attention_seconds(d, tokens) * d.mfu / mfu)
    return tokens * d.attention_dp * d.pp * d.replicas / busy_s


def ladder(most: int, *others: int) -> List[int]:
    """Batches to show: 1, 2, 4 ... up to `most`, `most` itself and the others."""
    sizes = {2**i for i in range(most.bit_length()) if 2**i <= most}
    return sorted(sizes | {n for n in (most, *others) if n > 0})


# ---- 8. Collectives ----------------------------------------------------------------------------


class Collective(NamedTuple):
    """One kind of exchange between GPUs in a step."""

    name: str
    times: float  # a step
    bytes: float  # one message, on each GPU
    wire: float  # share of the message that crosses the link: 2(N-1)/N for a ring all-reduce
    ranks: int


def collectives(d: Deployment, tokens: float) -> List[Collective]:
    """What a step over so many tokens on each attention rank sends between GPUs.

    Source: Shoeybi et al., Megatron-LM (1909.08053), two all-reduces a layer; DeepSeek-V3
    (2412.19437), dispatch in FP8 and combine in BF16.
    """
    model, found = d.model, []
    hidden = tokens * model.hidden * ACTIVATION_BYTES
    wide = d.ep > d.tp * d.pcp
    if d.tp > 1:
        times = 2 * model.layers - (model.expert_layers if wide else 0)
        found.append(Collective("all-reduce", times, hidden, 2 * (d.tp - 1) / d.tp, d.tp))
    if wide:  # the ranks of a TP group hold the same tokens and send a share each
        sent = tokens * model.top_k * model.hidden * (1 + ACTIVATION_BYTES) / d.tp
        found.append(Collective("all-to-all", model.expert_layers, sent, (d.ep - 1) / d.ep, d.ep))
    if d.pp > 1:
        found.append(Collective("stage send", d.pp - 1, hidden, 1, d.replica_gpus))
    return found


def context_collectives(d: Deployment, tokens: float) -> List[Collective]:
    """What decode context parallelism adds: queries gathered, partial outputs and their log-sums
    scattered, over the ranks that share a sequence. Source: vLLM decode context parallel.
    """
    shared = [cache for cache in d.model.caches if cache.kind in ("full", "mla")]
    if d.dcp == 1 or not shared:
        return []
    per_head = max(c.elements + (c.elements if c.kind == "mla" else 0) for c in shared)
    size = tokens * d.model.heads / d.tp * d.dcp * (per_head + 1) * ACTIVATION_BYTES
    return [Collective("context merge", sum(c.layers for c in shared), size,
                       (d.dcp - 1) / d.dcp, d.dcp)]


def decode_collectives(d: Deployment, batch: int) -> List[Collective]:
    """All that a decode step of this batch sends."""
    seqs, _ = microbatch(d, batch)
    return collectives(d, seqs) + context_collectives(d, seqs)


def prefill_collectives(d: Deployment, tokens: float) -> List[Collective]:
    """All that the prefill of one prompt sends; PCP passes each rank's KV round a ring."""
    found = collectives(d, tokens / d.pcp)
    if d.pcp > 1:
        whole_kv = sequence_bytes(d, tokens) / d.stage_share
        found.append(Collective("KV ring", 1, whole_kv, (d.pcp - 1) / d.pcp, d.tp * d.pcp))
    return found


def collective_seconds(d: Deployment, found: Sequence[Collective]) -> Optional[float]:
    """Their time together [s], transfer alone; None where no link is known."""
    total = 0.0
    for c in found:
        link = d.link_for(c.ranks)
        if link is None:
            return None
        total += c.times * c.bytes * c.wire / link.bytes_s
    return total


# ---- 8b. Expectation ---------------------------------------------------------------------------
# The bound with the losses put in: efficiencies, fixed times, prefill shared into the steps. The
# constants are rows of presets.json (efficiency), fitted by tests/fit_expected.py on the measured
# points of tests/data/measured.csv; a band holds 80% of the points of groups left out of the fit.


class Calibration(NamedTuple):
    """The constants that turn the bound into an expectation, for one kind of deployment.

    The defaults are for a GPU, engine or installation that presets.json says nothing of.
    """

    mbu: float = 0.7  # share of HBM bandwidth: weights but experts
    expert_mbu: float = 0.8  # routed experts
    kv_mbu: float = 0.85  # KV cache
    mfu: float = 0.5  # share of peak FLOP/s in decode
    prefill_mfu: float = 0.6  # in prefill, but experts
    expert_prefill_mfu: float = 0.24
    attention_mfu: float = 0.4  # attention over the prompt, of the BF16 peak
    layer_s: float = 46e-6  # fixed time of a layer: kernels too small to fill the GPU, launches
    moe_layer_s: float = 41e-6  # more for routing, sorting and small expert matrices
    mla_layer_s: float = 22e-6  # more for MLA's absorbed projections
    sequence_s: float = 15e-6  # a sequence in the batch: scheduling, sampling, detokenising
    all_reduce_s: float = 5.5e-6  # latency of a collective over two GPUs; x sqrt(log2 GPUs)
    link_share: float = 0.5  # of the link's rate, in decode
    prefill_link_share: float = 0.8
    routing: float = 0.9  # independent tokens that route as one of the batch, at batch 1
    routing_power: float = 0.82  # and how they grow with the batch: alike tokens share experts
    ttft_waits: float = 3.4  # TTFT over prefill and one step: prompts wait for each other
    ttft_burst: float = 0.06  # and for the others of the batch, where they start together
    low: float = 0.5  # the 80% band of measured over expected
    high: float = 2.0
    basis: str = "starting values, measured on nothing"


class ExpectedStep(NamedTuple):
    """The terms of one expected decode step [s]."""

    weights_s: float
    kv_s: float
    compute_s: float
    layers_s: float
    comm_s: float
    sequences_s: float
    bound_s: float  # the bound on the same step

    @property
    def step_s(self) -> float:
        """The step-time equation of the bound, with its fixed times; never under the bound."""
        return max(self.bound_s, max(self.compute_s, self.weights_s + self.kv_s) + self.layers_s
                   + self.comm_s + self.sequences_s)


class Expected(NamedTuple):
    """What a replica with so many in flight really does, with the band of the TPOT."""

    batch: int
    tpot_s: float
    tpot_low_s: float
    tpot_high_s: float
    ttft_s: float
    output_tok_s: float
    basis: str
    decoding: float  # of the batch, so many decode at a time; the others are in prefill
    step_s: float  # a decode step of these
    prefill_s: float  # of the TPOT: prompts of others


UNFITTED = Calibration()


def calibration_of(d: Deployment, engine: str, tables: Mapping[str, Any]) -> Calibration:
    """The constants fitted for this kind of deployment, or the nearest and a wider band.

    A constant is its row's value times the factor of each word that describes the deployment.
    Source: presets.json, tables efficiency and bands. Raises UserError where they are broken.
    """
    words, rows = words_of(d, engine), tables.get("efficiency", [])
    try:
        found = {row["name"]: row["value"] * math.prod(
            factor for word, factor in row.get("times", {}).items() if word in words)
            for row in rows}
        return UNFITTED._replace(**found)._replace(**band_of(d, engine, tables.get("bands", [])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"presets.json: the table efficiency or bands is broken "
                        f"({type(error).__name__} {error}); mend it") from None


def words_of(d: Deployment, engine: str) -> Set[str]:
    """What the rows of efficiency tell deployments apart by: engine, GPU generation, width of the
    weights, how the router spreads its tokens."""
    arch = generation(d.gpu)
    names = [t.name for t in d.model.tensors]
    router = ("balanced router" if any(n.endswith("e_score_correction_bias") for n in names) else
              "biased router" if any(n.endswith(("router.bias", "gate.bias")) for n in names) else
              "plain router")
    return {engine, arch, f"{arch}/{stored_bits(d)}", router}


def generation(gpu: Gpu) -> str:
    """The GPU's generation as the tables name it: Blackwell Ultra counts as Blackwell."""
    return gpu.arch.partition(" ")[0]


def stored_bits(d: Deployment) -> int:
    """Width of the weights in bits: 4, 8 or 16."""
    return 16 if d.weights.bytes > 1.5 else 8 if d.weights.bytes > 0.75 else 4


def band_of(d: Deployment, engine: str, rows: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
    """The band and its basis: of all points of this kind of model, wider where none is alike."""
    kind, arch, bits = "MoE" if d.model.experts else "dense", generation(d.gpu), stored_bits(d)
    row = next((row for row in rows if row["name"] == kind), None)
    if row is None:
        return {}
    near = sum(n for seen, n in row["seen"].items() if seen.startswith(f"{engine} {arch}/"))
    known = {word for seen in row["seen"] for engine_is, _, on in [seen.partition(" ")]
             for word in (engine_is, on.partition("/")[0], on)}
    absent = [what for what, word in (
        (engine, engine), (arch or d.gpu.name, arch),
        (f"{bits}-bit weights on {arch or d.gpu.name}", f"{arch}/{bits}")) if word not in known]
    absent = absent[:1] + unmeasured_layout(d)
    wider = WIDER if absent else 1.0
    basis = (f"measured on {sum(row['seen'].values())} points of {kind} models, {near} of them "
             f"{engine} on {arch or 'it'}; groups left out: median error {row['median']:.0%}")
    if d.kv.bytes < KV["bf16"].bytes:
        basis += "; the KV precision of the points is not known"
    if absent:
        basis = f"{' and '.join(absent)} not measured, so a wider band; {basis}"
    return {"low": row["low"] ** wider, "high": row["high"] ** wider, "basis": basis}


def unmeasured_layout(d: Deployment) -> List[str]:
    """What of a layout no measured point states: they are of TP alone."""
    return [name for name, ranks in (("PP", d.pp), ("EP", d.ep), ("DP attention", d.attention_dp),
                                     ("context parallelism", max(d.dcp, d.pcp))) if ranks > 1]


ENDLESS = 1e9  # makes a term vanish: so many tokens, or times the GPU's rate
WIDER = 1.5  # a band is so much wider, in the logarithm, where the like was not measured


def expected_terms(d: Deployment, batch: float, cal: Calibration, held: RankWeights
                   ) -> ExpectedStep:
    """The terms of one decode step of a replica with so many in flight, no prefill in it.

    max(compute, weights + KV) at the efficiencies, a fixed time for each layer, collective and
    sequence. held: rank_weights(d). Experts touched: as if fewer tokens routed independently.
    Source: the step-time equation of the bound; constants as calibration_of.
    """
    m, bandwidth = d.model, d.gpu.bandwidth_bytes_s
    everywhere = max(1.0, batch / d.pp)
    seqs = max(1.0, everywhere / d.attention_dp)
    touched = expected_touched(d, everywhere, cal)
    weights = ((held.dense_bytes - held.unread_bytes) / cal.mbu
               + held.expert_bytes * touched / cal.expert_mbu) * d.pp / bandwidth
    kv = seqs * read_bytes(d, d.history_tokens) * d.pp / (bandwidth * cal.kv_mbu)
    flop = 2 * (seqs * dense_params(m) / d.tp + everywhere * expert_params(m) / d.expert_ranks)
    layers = (m.layers * cal.layer_s + m.expert_layers * cal.moe_layer_s
              + latent_layers(m) * cal.mla_layer_s)
    sent = collectives(d, seqs) + context_collectives(d, seqs)
    comm = ((collective_seconds(d, sent) or 0.0) / cal.link_share + cal.all_reduce_s
            * sum(c.times * math.sqrt(math.log2(max(2, c.ranks))) for c in sent))
    bound = decode_step(d, math.ceil(batch)).step_s
    return ExpectedStep(weights, kv, flop / (peak_flop_s(d) * cal.mfu), layers, comm,
                        batch * cal.sequence_s, bound)


def expected_touched(d: Deployment, tokens: float, cal: Calibration) -> float:
    """Share of the experts that a step reads: so many tokens touch as many as fewer independent."""
    return touched_share(d.model, max(1.0, cal.routing * tokens**cal.routing_power))


def expert_params(model: Model) -> float:
    """Parameters of routed experts that a token multiplies by."""
    share = model.top_k / model.experts if model.experts else 0.0
    return expert_param_share(model) * model.params * share if share else 0.0


def dense_params(model: Model) -> float:
    """The other parameters that a token multiplies by: no look-up of embeddings."""
    return model.active_params - expert_params(model)


def latent_layers(model: Model) -> int:
    """Layers with an MLA latent."""
    return sum(cache.layers for cache in model.caches if cache.kind == "mla")


def expected_step_s(d: Deployment, batch: float, cal: Calibration) -> float:
    """One decode step of a replica with so many in flight, no prefill in it [s]."""
    return expected_terms(d, batch, cal, rank_weights(d)).step_s


def expected_prefill_s(d: Deployment, tokens: float, cal: Calibration) -> float:
    """What one prompt of so many uncached tokens takes of its replica's time [s].

    Linear layers, experts, causal attention and collectives, each at its efficiency.
    """
    m = d.model
    head = m.hidden * m.vocab  # one token of the prompt goes through it
    linear = ((dense_params(m) - head) / d.tp / cal.prefill_mfu
              + expert_params(m) / d.expert_ranks / cal.expert_prefill_mfu)
    return (2 * tokens * linear / d.pcp / peak_flop_s(d)
            + attention_flop(d, tokens) / (d.tp * d.pcp * d.gpu.flop_s["bf16"] * cal.attention_mfu)
            + (collective_seconds(d, prefill_collectives(d, tokens)) or 0.0)
            / cal.prefill_link_share)


GRID = 64  # lengths, equally likely, that stand for a distribution


@lru_cache(maxsize=64)
def past_prefix(input_len: Lengths, shared: int) -> Tuple[float, float]:
    """Mean tokens of a prompt past the shared prefix, and their standard deviation.

    At least one of each prompt: loadgen and real clients send the whole prefix, so a prompt drawn
    shorter becomes the prefix and one token.
    """
    lengths = [input_len.quantile((i + 0.5) / GRID) for i in range(GRID)]
    short = math.fsum(max(0.0, shared + 1 - length) for length in lengths) / GRID
    fresh = [max(1.0, length - shared) for length in lengths]
    middle = math.fsum(fresh) / GRID
    spread = math.sqrt(math.fsum((tokens - middle)**2 for tokens in fresh) / GRID)
    return input_len.mean - shared + short, spread


def uncached_prefill_s(d: Deployment, tokens: float, shared: int, cal: Calibration) -> float:
    """GPU time of so many tokens of a prompt that follow a shared prefix, itself cached [s]."""
    cached = expected_prefill_s(d, shared, cal) if shared else 0.0
    return expected_prefill_s(d, shared + tokens, cal) - cached


def prompt_prefill_s(d: Deployment, cal: Calibration) -> float:
    """GPU time of the mean prompt, past its shared prefix [s]."""
    return uncached_prefill_s(d, d.fresh_tokens, d.shared_tokens, cal)


CHUNK_TOKENS = 8192  # of a step: vLLM's and SGLang's own on GPUs of 80 GB


def chunk_s(d: Deployment, cal: Calibration) -> float:
    """The prefill that one step takes on at most [s]."""
    return prompt_prefill_s(d, cal) * CHUNK_TOKENS / d.fresh_tokens


def sequences_held(d: Deployment, tokens: float) -> float:
    """Sequences of so many tokens each that the KV pool of a replica holds."""
    return max(0.0, memory_of(d).pool_bytes) / sequence_bytes(d, tokens) * d.attention_dp


def most_running(d: Deployment) -> int:
    """Sequences that the KV pool of a replica holds at once: of their mean length where lengths are
    given, since blocks fill as tokens come, else of ctx."""
    return int(sequences_held(d, d.history_tokens if d.output_tokens else d.ctx_tokens))


def running_batch(d: Deployment, asked: int) -> int:
    """Of so many in flight, those that the KV pool of a replica holds.

    The rest wait. Where the weights leave no pool at all, all of them: as if it did fit.
    """
    return min(asked, max(1, most_running(d))) if memory_of(d).pool_bytes > 0 else asked


def band_s(d: Deployment, batch: float, tpot_s: float, cal: Calibration) -> Tuple[float, float]:
    """The 80% band of an expected TPOT [s]; its low end no faster than the bound of the batch."""
    bound = decode_step(d, max(1, int(batch))).step_s
    return min(tpot_s, max(tpot_s * cal.low, bound)), tpot_s * cal.high


TTFT_ALONE = 1.5  # TTFT over prefill and one step with nobody else there: median of 15 points


def expected_of(d: Deployment, batch: int, cal: Calibration,
                held: Optional[RankWeights] = None) -> Expected:
    """TPOT and throughput with so many in flight, closed loop, prefill shared into the steps.

    A request decodes for D = output * step + (batch - 1) * prefill * D / (D + TTFT): the others'
    prompts that fall into its decode, each once in its time in the system; a step takes a chunk of
    them at most, and the rest of them makes the TTFT longer. Of the batch, D / (D + TTFT) decode at
    a time. Without an output length: decode alone.
    held: rank_weights(d), where it is at hand.
    """
    held = held or rank_weights(d)
    prefill, then = prompt_prefill_s(d, cal), float(batch)
    gaps = max(1.0, d.output_tokens - 1) if d.output_tokens else ENDLESS
    chunk = chunk_s(d, cal)
    for _ in range(8):
        decoding, step = then, expected_terms(d, then, cal, held).step_s
        waits = min(cal.ttft_waits, TTFT_ALONE * batch) + cal.ttft_burst * batch
        ttft = waits * (prefill + step)
        own, others = gaps * step, (batch - 1) * prefill
        less = own + others - ttft
        decode_s = min((less + math.sqrt(less * less + 4 * own * ttft)) / 2, own + gaps * chunk)
        ttft = max(ttft, others * (1 + step / chunk) - decode_s)
        then = max(1.0, (decoding + batch * decode_s / (decode_s + ttft)) / 2)
    tpot = decode_s / gaps
    return Expected(batch, tpot, *band_s(d, batch, tpot, cal), ttft,
                    batch * (gaps + 1) / (ttft + decode_s), cal.basis, decoding, step, tpot - step)


# ---- 8c. The plan ------------------------------------------------------------------------------
# How a load with SLOs becomes replicas: one replica's sustainable rate is the fixed point of the
# step-time equation, the fleet is the load over it, and every margin is a constant with a name.

TTFT_ALLOWANCE_S = 0.3  # of a request's time in the system, before anything is measured
TPOT_MARGIN = 0.8  # share of the TPOT (or E2E) SLO that is planned for: expectation against p99
HEADROOM = 0.7  # share of its sustainable rate that a replica is given
KV_MARGIN = 1.5  # KV tokens held, over those that Little's law asks for
SEQS_MARGIN = 1.3  # batch slots over the mean in flight
SEQS_MOST = 1024  # batch slots when nothing says otherwise: the engines' largest default
CHUNKS = ((0.025, 2048), (0.060, 4096), (math.inf, 8192))  # TPOT SLO up to [s], tokens a step
PLAN_SOURCE = "fixed point of the step-time equation: batch = rate * output * step"
LITTLE = "Little's law, L = rate * W (Little 1961)"


class Load(NamedTuple):
    """What is asked of a fleet: arrivals, lengths, service-level objectives."""

    rate_rps: Optional[float]  # at peak; None: how much would it bear?
    mean_rate_rps: Optional[float]
    input_len: Lengths
    output_len: Lengths
    shared_tokens: int  # of every prompt, cached
    slo_ttft_s: float  # p99; infinite where not asked, as the next two
    slo_tpot_s: float
    slo_e2e_s: float
    given_seqs: Optional[int]  # --max-num-seqs
    given_chunk: Optional[int]  # --max-num-batched-tokens

    @property
    def slos(self) -> Dict[str, float]:
        """Those SLOs that were asked for, by name [s]."""
        every = {name: getattr(self, f"slo_{name}_s") for name in SLOS}
        return {name: slo_s for name, slo_s in every.items() if slo_s < math.inf}

    @property
    def context_tokens(self) -> float:
        """Mean tokens of a finished request, the shared prefix counted."""
        return self.input_len.mean + self.output_len.mean

    @property
    def chunk_tokens(self) -> int:
        """Tokens a step: fewer, the stricter the inter-token latency."""
        return self.given_chunk or next(n for most_s, n in CHUNKS if self.slo_tpot_s <= most_s)


SLOS = ("ttft", "tpot", "e2e")


class Steady(NamedTuple):
    """One replica in steady state with so many in flight."""

    batch: float
    rate_rps: float
    tpot_s: float
    ttft_p99_s: float
    prefill_share: float  # of the replica's busy time
    e2e_s: float  # mean


class Replica:
    """One replica under a load: its step and prefill times, found once for many batches."""

    def __init__(self, d: Deployment, load: Load, cal: Calibration) -> None:
        """Hold the deployment, the load and the constants."""
        self.d, self.load, self.cal, self.held = d, load, cal, rank_weights(d)
        self.output, self.slots = load.output_len.mean, load.given_seqs or SEQS_MOST
        shared, long = load.shared_tokens, load.input_len.quantile(0.99)
        self.fresh, spread = past_prefix(load.input_len, shared)
        self.prefill_s, self.p99_prefill_s = (uncached_prefill_s(
            d, tokens, shared, cal) for tokens in (self.fresh, max(1.0, long - shared)))
        self.fresh_cv = spread / self.fresh  # of the service time, which M/G/1 wants
        self.kv_seqs = int(sequences_held(d, load.context_tokens))

    def at(self, batch: float) -> Steady:
        """The steady state with so many decoding: batch = rate * output * tpot, solved for rate.

        A step takes the decode step D(B) and its share of the prefills: tpot = D + B * P / output,
        so rate = B / (output * D + B * P). A prompt waits as in M/G/1 for those before it, then for
        a step to end, then takes its own; the p99 adds the deviations of wait (exponential tail)
        and prompt length as independent. Source: Kleinrock, Queueing Systems I.
        """
        load = self.load
        decode_s = expected_terms(self.d, batch, self.cal, self.held).step_s
        rate = batch / (self.output * decode_s + batch * self.prefill_s)
        tpot = decode_s + batch * self.prefill_s / self.output
        steps = self.fresh / load.chunk_tokens
        wait, tail = self.wait(rate, self.prefill_s + decode_s * steps)
        own = decode_s * (1 + max(1.0, steps)) + self.prefill_s
        e2e = wait + own + tpot * max(0.0, self.output - 1)
        decode_each_s = self.output * decode_s / max(1.0, batch)
        share = self.prefill_s / (self.prefill_s + decode_each_s)
        return Steady(batch, rate, tpot, wait + own + tail, share, e2e)

    def wait(self, rate: float, service_s: float) -> Tuple[float, float]:
        """Mean wait before a prefill [s], and what the p99 of wait and prompt adds to the means."""
        busy = min(0.999, rate * service_s)
        mean = busy * service_s * (1 + self.fresh_cv**2) / 2 / (1 - busy)
        p99 = max(mean, mean / busy * math.log(100 * busy) if busy > 0.01 else 0.0)
        return mean, math.hypot(p99 - mean, self.p99_prefill_s - self.prefill_s)

    def broken(self, batch: float, margin: float) -> str:
        """The limit that so many in flight break, or '': kv, max_num_seqs, tpot, e2e, ttft."""
        load, steady = self.load, self.at(batch)
        limits = (("kv", batch, self.kv_seqs), ("max_num_seqs", batch, self.slots),
                  ("tpot", steady.tpot_s, load.slo_tpot_s * margin),
                  ("e2e", steady.e2e_s, load.slo_e2e_s * margin),
                  ("ttft", steady.ttft_p99_s, load.slo_ttft_s))
        return next((name for name, value, most in limits if value > most), "")

    def sustained(self, margin: float = TPOT_MARGIN) -> Tuple[Optional[Steady], str]:
        """The most that keeps every limit, and the limit that one more in flight would break."""
        low, high = halved(0.0, min(self.kv_seqs, self.slots) + 1.0, 14,
                           lambda batch: not self.broken(batch, margin))
        return (self.at(low) if low else None), self.broken(high, margin)

    def at_rate(self, rate_rps: float) -> Steady:
        """The steady state at a rate, which must be below the sustained one."""
        return self.at(halved(0.0, float(max(1, self.kv_seqs)), 24,
                              lambda batch: self.at(batch).rate_rps < rate_rps)[1])


def halved(low: float, high: float, times: int, holds: Callable[[float], bool]
           ) -> Tuple[float, float]:
    """What is left of low..high, halved so many times where `holds` turns false."""
    for _ in range(times):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def longest_request(input_len: Lengths, output_len: Lengths) -> int:
    """The p99.9 context, up to a multiple of 1,024 [tokens]."""
    return rounded_up(input_len.quantile(0.999) + output_len.quantile(0.999), KIB)


class Plan(NamedTuple):
    """How many replicas a load needs, and how each is started."""

    engine: str
    load: Load
    rate_rps: float  # as asked, else HEADROOM of what the replicas that the flags name sustain
    sustained: Optional[Steady]  # one replica, at most; None when one request is too much
    binding: str
    planned_tpot_s: float
    in_flight: float  # Little's L at the peak rate, whole fleet
    kv_tokens_per_replica: float
    replicas: int  # 0 when no number of replicas helps
    gpus: int  # of all of these
    fleet: int  # replicas that the flags name (--dp), else those needed
    steady: Optional[Steady]  # one of these replicas at its share of the peak rate
    max_model_len: int
    seated: float  # in flight in one replica of the fleet, that batch slots are for
    max_num_seqs: int
    max_num_batched_tokens: int
    borne_rps: float  # what a replica sustains with SEQS_MARGIN in its batch slots

    @property
    def spares(self) -> int:
        """Replicas for N+1."""
        return 1 if self.replicas else 0

    @property
    def rate_per_replica_rps(self) -> float:
        """Requests a second that one replica sustains."""
        return self.sustained.rate_rps if self.sustained else 0.0

    @property
    def slots_text(self) -> str:
        """Where max_num_seqs comes from."""
        where = "a replica" if self.fleet in (0, self.replicas) else (
            f"in each of the {self.fleet} replicas named (--dp)")
        if self.load.given_seqs and self.steady and self.seated > self.max_num_seqs:
            expected = ("" if self.fleet != self.replicas else
                        f"{figure(self.steady.batch)} in flight a replica expected, ")
            return (f"as given; {expected}{count(self.seated)} {where} planned for, which would "
                    "not all run at once")
        if self.load.given_seqs:
            return f"as given; {mean_count(self.seated)} in flight {where}"
        most = f", at most {SEQS_MOST:,}" if self.seated * SEQS_MARGIN > SEQS_MOST else ""
        return f"{mean_count(self.seated)} in flight {where} x {SEQS_MARGIN:g}{most}"


def rounded_up(value: float, step: int) -> int:
    """The next multiple of a step."""
    return math.ceil(value / step - 1e-9) * step


LOOSE = 4.0  # an SLO over so many times what is sustained says nothing of the time in the system


def plan_of(d: Deployment, load: Load, cal: Calibration, engine: str) -> Plan:
    """The plan of one deployment for a load.

    in_flight: Little's L over the fleet, with TTFT_ALLOWANCE_S and TPOT_MARGIN of the TPOT SLO (the
    expected TPOT where there is none, or a loose one). replicas: ceil(rate / sustained / HEADROOM).
    Source: the runbook of the README; Little 1961.
    """
    replica, memory = Replica(d, load, cal), memory_of(d)
    best, binding = replica.sustained()
    longest = longest_request(load.input_len, load.output_len)
    if d.model.max_len:
        longest = min(longest, d.model.max_len)
    if memory.pool_bytes <= 0:
        binding = "weights"
    elif sequence_bytes(d, longest) > memory.pool_bytes:
        best, binding = None, "max_model_len"
    rate = load.rate_rps or (best.rate_rps if best else 0.0) * HEADROOM * d.replicas
    replicas = (0 if not best else d.replicas if load.rate_rps is None
                else max(1, replicas_for(rate, best.rate_rps)))
    fleet = d.replicas if d.replicas > 1 else replicas
    steady = replica.at_rate(rate / replicas) if best and replicas else None
    tpot = load.slo_tpot_s * TPOT_MARGIN
    if tpot == math.inf or (best and tpot > LOOSE * best.tpot_s):
        tpot = steady.tpot_s if steady else 0.0
    in_flight = rate * (TTFT_ALLOWANCE_S + load.output_len.mean * tpot)
    busiest = steady if load.rate_rps else best
    seated = max(in_flight / max(1, fleet), busiest.batch if busiest else 0.0)
    slots = load.given_seqs or min(max(8, rounded_up(seated * SEQS_MARGIN, 8)), SEQS_MOST)
    borne = replica.at(min(best.batch, slots / SEQS_MARGIN)).rate_rps if best else 0.0
    return Plan(engine, load, rate, best, binding, tpot, in_flight, memory.max_seqs * d.ctx_tokens,
                replicas, replicas * d.replica_gpus, fleet, steady, longest, seated, slots,
                load.chunk_tokens, borne)


def replicas_for(rate_rps: float, each_rps: float) -> int:
    """Replicas that bear a rate at HEADROOM of what each sustains."""
    return math.ceil(rate_rps / each_rps / HEADROOM - 1e-9)


class Candidate(NamedTuple):
    """One deployment of a search, and what it would cost."""

    d: Deployment
    plan: Plan
    per_hour: Optional[float]

    @property
    def work(self) -> float:
        """What candidates are compared for: the rate where each has its own, else all the same."""
        return 1.0 if self.plan.load.rate_rps else self.plan.rate_rps


RUNS_ON = {"vllm": ("nvidia", "amd"), "sglang": ("nvidia", "amd"), "trtllm": ("nvidia",)}  # vendors


def candidates(d: Deployment, args: Any, tables: Mapping[str, Any]) -> List[Deployment]:
    """The deployments a search tries: GPU x layout x weights x KV, those that were given kept.

    TP within one link domain; DP attention for latent caches.
    """
    given, priced = args.given, set(args.prices or ()) - {""}
    fixed = {"gpu", "gpu_bandwidth", "gpu_memory_gib"} & given or (args.prices and not priced)
    runs = RUNS_ON[args.engine or "vllm"]
    gpus = [d.gpu] if fixed else [
        gpu_of(row, tables["links"]) for row in tables.get("gpus", ())
        if (row["name"] in priced if priced else row["vendor"] in runs)]
    changes: List[Dict[str, Any]] = [{}]
    if not {"weights", "weight_bytes"} & given:
        changes += [weights_stored(d, name) for name in narrower_weights(d)]
    kvs = [d.kv] if {"kv", "kv_bytes"} & given else [KV["bf16"], KV["fp8"]]
    found = []
    for gpu in gpus:
        sizes = [n for n in (1, 2, 4, 8) if n <= max(1, min(gpu.domain, SERVER_GPUS))
                 and not tp_problem(d.model, n)]
        layouts = [(n, 1, 1) for n in sizes] + [
            (1, n, n) for n in sizes if n > 1 and d.model.experts and d.model.latent]
        if {"tp", "dp", "ep", "pp", "pcp", "dcp"} & given:
            layouts = [(d.tp, d.dp, d.ep)]
        for (tp, dp, ep), change in [(layout, change) for layout in layouts for change in changes]:
            other = d._replace(gpu=gpu, tp=tp, dp=dp, ep=ep, **change)
            name = other.weights.name
            if (name == "fp8" and "fp8" not in gpu.flop_s) or (
                    name == "nvfp4" and not gpu.arch.startswith("Blackwell")):
                continue  # the memory alone is int4's to save
            found += [other._replace(compute=compute_on(gpu, other.weights), kv=kv) for kv in kvs]
    return found


def search(d: Deployment, args: Any, load: Load, tables: Mapping[str, Any]) -> List[Candidate]:
    """Every candidate that meets the load, the cheapest first (fewest GPUs where no price is).

    Without a rate each is planned at one of its own, so the cheapest is by output token. Left out
    are those before the best of each GPU that the engine would refuse.
    """
    found, engine = [], args.engine or "vllm"
    for other in candidates(d, args, tables):
        plan = plan_of(other, load, calibration_of(other, engine, tables), engine)
        if plan.replicas:
            price = price_of(args, other.gpu.name)
            found.append(Candidate(other, plan, price and price * plan.gpus))
    found.sort(key=lambda c: ((c.per_hour or 0.0) / c.work, c.plan.gpus / c.work,
                              c.d.gpu.memory_bytes, -c.d.weight_bytes, -c.d.kv.bytes))
    kept: List[Candidate] = []
    for c in found:
        if any(c.d.gpu.name == other.d.gpu.name for other in kept) or not reckon(
                c.d, settings_of(c.d, args, c.plan), Logged()).refusals:
            kept.append(c)
    return kept


# ---- 9. The sections of the answer -------------------------------------------------------------
# Each takes the case and the answer, and adds its steps and lines to it. SECTIONS, at the end, is
# their order and when each is asked for: a new one is entered there.

BUDGET = "KV pool = util * memory - weights - reserve: PagedAttention (2309.06180), vLLM"
ROOFLINE = "roofline: Williams et al. 2009; How To Scale Your Model, inference"
DATASHEET = "presets.json (vendor datasheet, dense)"
DECODE = "bytes of a step / bandwidth: Pope et al. (2211.05102), section 2"
MEGATRON = "Megatron-LM (1909.08053); ring all-reduce moves 2(N-1)/N"


class Case(NamedTuple):
    """A deployment with what every section needs of it, found once."""

    d: Deployment
    args: Any
    memory: Memory
    limit: int  # sequences of ctx tokens that one replica holds
    holds: int  # sequences that its KV pool lets run at once, by the lengths where given
    slots: int  # and that --max-num-seqs does
    batch: int  # that run at once: as asked, else the limit, but never more than these
    cal: Calibration = UNFITTED
    plan: Optional[Plan] = None  # where a load or SLO is asked about
    searched: bool = False
    ranked: Sequence[Candidate] = ()  # what a search found, the cheapest first
    tables: Mapping[str, Any] = {}  # of presets.json

    def fleet_tok_s(self, tok_s: Callable[[int], float], batch: int = 0) -> Tuple[int, float]:
        """Replicas that run the batch, and the tok/s of the others, given the tok/s of a batch.

        --concurrency is shared out over the replicas, so some may run one fewer, or none.
        """
        batch, replicas = batch or self.batch, self.d.replicas
        asked = self.args.concurrency or 0
        fewer = min(batch, asked // replicas)
        if not asked or fewer == batch:
            return replicas, 0.0
        busiest = asked % replicas
        return busiest, (replicas - busiest) * tok_s(fewer) if fewer else 0.0

    def bound_tok_s(self, batch: int, mbu: Optional[float] = None) -> float:
        """The bound on the tok/s of one replica that runs so many."""
        return batch / decode_step(self.d, batch, mbu=mbu).step_s

    @property
    def step(self) -> StepTime:
        """The bound on the decode step of that batch."""
        return decode_step(self.d, self.batch)

    @property
    def average_seqs(self) -> float:
        """Sequences of the average history that one replica holds."""
        return sequences_held(self.d, self.d.history_tokens)

    @property
    def facts(self) -> Dict[str, float]:
        """What the formulas of the steps call by name, where no step before them does."""
        d, m, memory = self.d, self.d.model, self.memory
        names = ("tp", "pp", "pcp", "mbu", "mfu", "util", "stage_share", "attention_dp", "replicas",
                 "expert_ranks", "weight_bytes", "expert_bytes", "adapter_bytes")
        return {**{name: getattr(d, name) for name in names},
                "bandwidth": d.gpu.bandwidth_bytes_s, "peak": peak_flop_s(d),
                "peak_bf16": d.gpu.flop_s["bf16"], "memory": d.gpu.memory_bytes,
                "weights": memory.weights_bytes, "adapters": memory.adapter_bytes,
                "reserve": d.reserve_bytes, "sequence_bytes": memory.sequence_bytes,
                "expert_share": fullest_expert_share(d), "ctx": d.ctx_tokens,
                "experts": m.experts, "top_k": m.top_k, "kv_bytes": d.kv.bytes, "touched": 1.0}


def case_of(d: Deployment, args: Any) -> Case:
    """The case of a deployment."""
    memory = memory_of(d)
    limit = int(memory.max_seqs)
    holds, slots = most_running(d) if memory.fits else 0, sys.maxsize
    if args and args.max_num_seqs:
        slots = args.max_num_seqs * (1 if args.engine == "sglang" else d.attention_dp)
    return Case(d, args, memory, limit, holds, slots, min(d.asked or limit, holds, slots))


def say_model(case: Case, answer: Answer) -> None:
    """What is sized and what was assumed; the steps that are inputs."""
    d, m = case.d, case.d.model
    answer.inputs(
        "model.", name=m.name, arch=m.arch, estimated=m.estimated, layers=m.layers,
        hidden=m.hidden, heads=m.heads, kv_heads=m.kv_heads, head_dim=m.head_dim, vocab=m.vocab,
        max_context_tokens=m.max_len, experts=m.experts, experts_per_token=m.top_k,
        notes=list(m.notes), kv_layers=[cache._asdict() for cache in m.caches])
    answer.add("model.params", m.params, "parameters", source="sum over the tensors of its shape; "
               "presets.json may round it as model cards do")
    answer.add("model.active_params", m.active_params, "parameters", source="what a token "
               "multiplies by: top-k experts, no input embedding look-up")
    answer.add("deployment.gpu_memory_bytes", d.gpu.memory_bytes, "B", source=DATASHEET)
    answer.add("deployment.gpu_bandwidth_bytes_s", d.gpu.bandwidth_bytes_s, "B/s", source=DATASHEET)
    answer.add("deployment.peak_flop_s", peak_flop_s(d), "FLOP/s", source=DATASHEET)
    answer.inputs(
        "deployment.", gpu=d.gpu.name, weights=d.weights.name, kv=d.kv.name, compute=d.compute,
        weight_source=d.weight_source, replicas=d.replicas, gpus=d.gpus, tp=d.tp, pp=d.pp, dp=d.dp,
        ep=d.ep, dcp=d.dcp, pcp=d.pcp, util=d.util, mbu=d.mbu, mfu=d.mfu)
    answer.add("deployment.weight_bytes_per_param", d.weight_bytes / m.params, "B")
    answer.add("deployment.kv_bytes_per_element", d.kv.bytes, "B")
    answer.add("deployment.history_tokens", d.history_tokens, "tokens", source=d.history_source)

    kind = "dense" if not m.experts else (f"MoE, {figure(m.active_params / GIGA)}B active, top "
                                          f"{m.top_k} of {m.experts} experts")
    heads = (f"one MLA latent of {m.latent} for all heads" if m.latent else
             f"{m.kv_heads} KV heads x {m.head_dim}")
    answer.heading(
        f"{m.name}  {figure(m.params / GIGA)}B {kind}, {m.layers} layers, {heads}",
        f"on {d.gpus}x {d.gpu.title} ({figure(d.gpu.memory_bytes / GIB, 4)} GiB, "
        f"{figure(d.gpu.bandwidth_bytes_s / TERA)} TB/s), {layout_text(d)}"
        + (f", {d.replicas} replicas" if d.replicas > 1 else ""),
        f"{d.weight_source}, KV {figure(d.kv.bytes)} B, {d.compute.upper()} "
        f"compute; util {d.util:.2f}, reserve {figure(d.reserve_bytes / GIB)} GiB",
        f"average history {count(d.history_tokens)} ({d.history_source})")
    for note in notes_on(d):
        answer.say("note", note)
    answer.lines.append("")


def notes_on(d: Deployment) -> List[str]:
    """What a reader should know before trusting the figures."""
    m, far = d.model, d.far_link
    crossing = d.replica_gpus > max(d.gpu.domain, SERVER_GPUS) and not d.link
    notes = (
        (m.estimated, f"ESTIMATE: {m.arch or 'this architecture'} is not fully known here"),
        (d.weights.compute != d.compute, f"{d.gpu.name} has no {d.weights.compute.upper()} units: "
         f"weights are expanded to {d.compute.upper()}, memory saved, no FLOP gained"),
        (d.weights.bytes < 1 and d.weight_bytes == d.weights.bytes * m.params, "nominal width: "
         "scales and what is left unquantised come on top; every figure here is that much too "
         "good"),
        (m.kv_native and d.kv.bytes != KV[m.kv_native].bytes, f"the checkpoint asks for "
         f"{m.kv_native.upper()} KV; counted as {figure(d.kv.bytes)} B unless --kv says so"),
        (0 < m.max_len < d.ctx_tokens, f"ctx {count(d.ctx_tokens)} is past the model's own "
         f"{count(m.max_len)} tokens"),
        (crossing and far, f"{d.replica_gpus} GPUs are more than one server's: "
         + (f"{far.name} ({scaled(far.bytes_s, 'B/s')})" if far else "")
         + " assumed between, --link to change"),
        (d.replicas > 1 and d.asked, f"--concurrency is for all {d.replicas} replicas: at most "
         f"{d.asked} in each"),
        (d.gpu.note, f"{d.gpu.name}: {d.gpu.note}"))
    return [*m.notes, *(note for holds, note in notes if holds)]


def say_memory(case: Case, answer: Answer) -> None:
    """The memory budget of one GPU, and how many sequences its KV pool holds."""
    d, memory = case.d, case.memory
    weights = answer.add(
        "memory.weights_bytes_per_gpu", memory.weights_bytes, "B",
        "((weight_bytes - expert_bytes) / tp + expert_bytes * expert_share) * stage_share",
        d.weight_source + "; split as in Megatron-LM (1909.08053)")
    answer.add("memory.adapter_bytes_per_gpu", memory.adapter_bytes, "B",
               "adapter_bytes / tp * stage_share", "--lora-rank, --lora-count")
    answer.add("memory.reserve_bytes_per_gpu", d.reserve_bytes, "B",
               source="--reserve-gib: activations, CUDA graphs, NCCL buffers; 1-4 GiB is usual")
    pool = answer.add("memory.kv_pool_bytes_per_gpu", max(0.0, memory.pool_bytes), "B",
                      "max(0, util * memory - weights - adapters - reserve)", BUDGET)
    for cache in d.model.caches:
        explain_cache(d, cache, answer)
    per_token = answer.work("memory.kv_bytes_per_token_per_gpu", "B", "sequence_bytes / ctx",
                            "the sum over kinds of layer at ctx tokens, as above")
    answer.add("memory.ctx_tokens", d.ctx_tokens, "tokens", source="--ctx")
    seqs = answer.work("memory.max_seqs", "sequences", "pool / sequence_bytes * attention_dp",
                       BUDGET, pool=pool)
    tokens = answer.work("memory.max_kv_tokens", "tokens", "round(max_seqs * ctx)", BUDGET)
    answer.add("memory.fits", memory.fits)

    short = not memory.fits or (d.asked or 1) > case.holds
    fits = "FITS" + f" ({case.holds} of {d.asked} sequences)" * short
    lora = f" + LoRA {memory.adapter_bytes / GIB:.2f}" if memory.adapter_bytes else ""
    total = (weights + memory.adapter_bytes + d.reserve_bytes + pool) / GIB
    answer.say("MEMORY/GPU", f"weights {weights / GIB:.2f}{lora} + reserve "
               f"{d.reserve_bytes / GIB:.2f} + KV pool {pool / GIB:.2f} = {total:.2f} GiB "
               f"({d.util:.2f} x {figure(d.gpu.memory_bytes / GIB, 4)} = "
               f"{d.util * d.gpu.memory_bytes / GIB:.2f}) "
               + (fits if memory.fits else "DOES NOT FIT"))
    each = " a replica" if d.replicas > 1 or d.attention_dp > 1 else ""
    answer.say("KV", f"{scaled(per_token, 'B')}/token/GPU -> {count(tokens)} tokens{each} = "
               f"{sequences_text(seqs)} sequences at {count(d.ctx_tokens)} "
               f"({sequences_text(case.average_seqs)} at the average {count(d.history_tokens)})")
    if len(d.model.caches) > 1 or any(c.window or c.state_bytes for c in d.model.caches):
        for c in d.model.caches:
            size = scaled(cache_bytes(c._replace(window=0), d, 0 if c.state_bytes else 1), "B")
            limit = f", at most {count(c.window)} tokens" if c.window else ""
            answer.say("", f"{c.layers} {c.kind} layers: {size}/" + (
                "sequence/GPU, whatever its length" if c.state_bytes else f"token/GPU{limit}"))
    for note in engine_against_budget(case, tokens) if memory.fits and case.args.engine else ():
        answer.say("note", note)
    if short:
        say_short(case, d.asked or 1, answer)


def engine_against_budget(case: Case, tokens: int) -> List[str]:
    """Where the prediction of an engine's start and this budget part; tokens: the budget's."""
    d, s, _, found = predicted(case)
    name = s.engine + own_defaults(case, s)
    if found.refusals:
        return [f"the budget fits with its {figure(case.d.reserve_bytes / GIB)} GiB reserve; "
                f"{name} would refuse to start, see REFUSES"]
    theirs = found.tokens * d.attention_dp  # each rank logs its own
    if abs(theirs - tokens) <= NEAR_TOKENS * tokens:
        return []
    return [f"{name} would hold {count(theirs)} KV tokens (ENGINE); everything else here counts "
            f"with the budget's {count(tokens)}"]


NEAR_TOKENS = 0.03  # a prediction this near to the budget is the same


def sequences_text(seqs: float) -> str:
    """Whole sequences, or one decimal where a fraction matters: 59, 3.4."""
    return f"{seqs:.1f}" if seqs < 10 else count(int(seqs))


def explain_cache(d: Deployment, cache: Cache, answer: Answer) -> None:
    """The steps from one kind of layer to its share of a sequence; and MHA against GQA."""
    alike = [c for c in d.model.caches if c.kind == cache.kind]
    kind = cache.kind + (f"_{alike.index(cache) + 1}" if cache != alike[0] else "")
    answer.add(f"kv.{kind}_bytes_per_sequence_per_gpu", cache_bytes(cache, d, d.ctx_tokens),
               "B", CACHE_FORMULA, "K and V a token: 2 * layers * kv_heads * head_dim * bytes; MLA "
               "latent: DeepSeek-V2 (2405.04434)", **cache_terms(cache, d, d.ctx_tokens))
    if cache.kind == "mla":
        answer.work("kv.mla_bytes_per_token", "B", "layers * latent_and_rope * kv_bytes",
                    "DeepSeek-V2 (2405.04434), one latent for all heads", layers=cache.layers,
                    latent_and_rope=cache.elements)
    if kind == "full" and d.model.heads > cache.heads > 0:
        for name, heads in (("mha", d.model.heads), ("gqa", cache.heads)):
            answer.work(f"kv.{name}_bytes_per_token", "B", "layers * heads * elements * kv_bytes",
                        "GQA (2305.13245): query heads share K and V", layers=cache.layers,
                        heads=heads, elements=cache.elements)


def say_short(case: Case, wanted: int, answer: Answer) -> None:
    """By how much the deployment is too small for what was asked, and what would do."""
    d, memory = case.d, case.memory
    if memory.fits and d.output_tokens:  # each takes what it has filled, not ctx
        d = d._replace(ctx_tokens=math.ceil(d.history_tokens))
    each = sequence_bytes(d, d.ctx_tokens)
    short = answer.add("memory.short_bytes_per_gpu", wanted / d.attention_dp * each
                       - memory.pool_bytes, "B", "seqs * each - (util * memory - weights "
                       "- adapters - reserve)", BUDGET, seqs=wanted / d.attention_dp, each=each)
    need = f"{count(wanted)} sequences" if wanted > 1 else "one sequence"
    text = f"{short / GIB:.2f} GiB/GPU for {need} of {count(d.ctx_tokens)} tokens"
    if memory.pool_bytes <= 0:
        text += f" ({-memory.pool_bytes / GIB:.2f} GiB of it before any KV cache)"
    elif not memory.fits:
        text += f"; --ctx up to {count(int(memory.max_seqs * d.ctx_tokens))} would fit"
    options = answer.add("memory.would_fit", what_would_do(d, wanted, case.tables))
    answer.say("SHORT", text)
    answer.say("WOULD DO", f"{'; '.join(options)}; in brackets, the sequences that each holds"
               if options else "nothing nearby: more GPUs and fewer bytes a weight together, or a "
               "smaller model")


def what_would_do(d: Deployment, wanted: int, tables: Mapping[str, Any]) -> List[str]:
    """The least TP, for each precision of weights and KV, that holds so many sequences; and the
    smallest GPU of the same vendor that does as it is."""
    best: Dict[int, Tuple[int, str]] = {}  # a TP size's option with the fewest changes
    for weights in ("", "fp8", "int4"):
        for kv in ("", "fp8"):
            size = WEIGHTS[weights].bytes * d.model.params if weights else d.weight_bytes
            if (weights and size >= d.weight_bytes) or (kv and d.kv.bytes <= KV[kv].bytes):
                continue
            other = d._replace(weight_bytes=size, kv=KV[kv] if kv else d.kv,
                               ep=1 if d.ep <= d.tp else d.ep)
            for tp in [n for n in fitting_tp(d.model) if n >= d.tp and not n % d.dcp]:
                seqs = memory_of(other._replace(tp=tp)).max_seqs
                if seqs >= wanted:
                    flags = [f"TP={tp}", *[f"--weights {weights}"] * bool(weights),
                             *[f"--kv {kv}"] * bool(kv)]
                    option = len(flags), f"{' '.join(flags)} ({sequences_text(seqs)})"
                    best[tp] = min(best.get(tp, option), option)
                    break
    gpus = [gpu_of(row, tables["links"]) for row in tables.get("gpus", ())]
    vendor = next((gpu.vendor for gpu in gpus if gpu.name == d.gpu.name), "nvidia")
    held = {gpu.name: memory_of(d._replace(gpu=gpu)).max_seqs for gpu in gpus}
    larger = sorted((gpu.memory_bytes, f"--gpu {gpu.name} ({sequences_text(held[gpu.name])})")
                    for gpu in gpus if gpu.vendor == vendor and held[gpu.name] >= wanted)
    return [text for _, (_, text) in sorted(best.items())[:4]] + [text for _, text in larger[:1]]


def say_roofline(case: Case, answer: Answer) -> None:
    """The ridge point, and on which side of it this deployment decodes."""
    d = case.d
    ridge = answer.work("decode.ridge_flop_per_byte", "FLOP/B", "peak / bandwidth", ROOFLINE)
    if not case.batch:
        return
    step = case.step
    done = answer.work(
        "decode.intensity_flop_per_byte", "FLOP/B", "flop / bytes_moved", ROOFLINE,
        flop=step.compute_s * peak_flop_s(d) * d.mfu,
        bytes_moved=(step.weights_s + step.kv_s) * d.gpu.bandwidth_bytes_s * d.mbu)
    answer.say("ROOFLINE", f"ridge {ridge:.0f} FLOP/B; batch {case.batch} runs at "
               f"{figure(done)}: {'memory' if done < ridge else 'compute'}-bound")


def say_stream(case: Case, answer: Answer) -> None:
    """One sequence alone: the fastest any user can be served."""
    d = case.d
    if not case.memory.fits:
        answer.add("decode.single_stream_tok_s", None)
        return
    step = decode_step(d, 1)
    weights = step.weights_s * d.gpu.bandwidth_bytes_s * d.mbu
    alone = answer.add("decode.single_stream_weights_only_tok_s", 1 / step.weights_s, "tok/s",
                       "bandwidth * mbu / weights_read", DECODE, weights_read=weights)
    bound = answer.add("decode.single_stream_tok_s", 1 / step.step_s, "tok/s",
                       "1 / max(compute_s, (weights_read + kv_read) / (bandwidth * mbu))", DECODE,
                       compute_s=step.compute_s, weights_read=weights,
                       kv_read=read_bytes(d, d.history_tokens) * d.pp)
    line = f"{figure(bound)} tok/s bound ({figure(step.step_s / MS)} ms)"
    if d.mbu == 1:
        real = decode_step(d, 1, mbu=TYPICAL_MBU).step_s
        line += f"; {figure(1 / real)} tok/s ({figure(real / MS)} ms) at {TYPICAL_MBU:.0%} MBU"
    answer.say("STREAM", f"{line}; {figure(alone)} tok/s from weights alone")


def say_prefill(case: Case, answer: Answer) -> None:
    """The time to prefill one prompt, alone on the GPUs; and one of ctx tokens."""
    d = case.d
    tokens = answer.add("prefill.tokens", d.prompt_tokens, "tokens")
    formula, numbers = prefill_formula(d, tokens)
    seconds = answer.add("prefill.seconds", prefill_seconds(d, tokens), "s", formula,
                         "2 FLOP a parameter and token: Kaplan et al. (2001.08361), section 2.1",
                         **numbers)
    attention = answer.work("prefill.attention_seconds", "s",
                            "attention_flop / (tp * pcp * peak_bf16 * mfu)", "causal attention, "
                            "2 n (d_qk + d_v) FLOP a pair of tokens; not in the bound",
                            attention_flop=attention_flop(d, tokens))
    sent = collective_seconds(d, prefill_collectives(d, tokens))
    answer.add("prefill.comm_seconds", sent, "s", source="as the collectives of a step over the "
               "prompt, and PCP's ring of KV; not in the bound")
    line = f"{count(tokens)} tokens: {figure(seconds / MS)} ms bound"
    if d.mfu == 1:
        half = prefill_seconds(d, tokens, TYPICAL_MFU)
        line += f"; {figure(half / MS)} ms at {TYPICAL_MFU:.0%} MFU"
    line += (f"; attention adds {figure(attention / MS)} ms" if d.model.heads
             else "; attention not known")
    if sent:
        line += f", traffic {figure(sent / MS)} ms"
    if d.ctx_tokens > 2 * tokens:
        whole_ctx = prefill_seconds(d, d.ctx_tokens) + attention_seconds(d, d.ctx_tokens)
        answer.add("prefill.ctx_seconds", whole_ctx, "s", source="a prompt of ctx tokens, with "
                   "attention")
        line += f". All {count(d.ctx_tokens)} of ctx: {scaled(whole_ctx, 's')} with" + (
            "" if d.model.heads else "out") + " attention"
    answer.say("PREFILL", line)
    answer.lines.append("")


def prefill_formula(d: Deployment, tokens: float) -> Tuple[str, Dict[str, float]]:
    """How prefill_seconds comes about, for --explain: (formula, numbers)."""
    numbers = {"tokens": tokens, "tp": d.tp, "pcp": d.pcp, "peak": peak_flop_s(d), "mfu": d.mfu}
    if not d.model.experts:
        return ("2 * params * tokens / (tp * pcp * peak * mfu)",
                dict(numbers, params=d.model.params))
    expert = flop_per_gpu(d, 0, 1) * d.expert_ranks / 2
    return ("2 * tokens * ((active - active_expert) / tp + active_expert / expert_ranks) / "
            "(pcp * peak * mfu)", dict(numbers, active=d.model.active_params,
                                       active_expert=expert, expert_ranks=d.expert_ranks))


def say_decode(case: Case, answer: Answer) -> None:
    """The decode table: batch 1, 2, 4 ... to the KV limit, each term and which one binds; and the
    steps behind one row of it, this deployment's own batch."""
    d, limit, step, rows = case.d, case.limit, case.step, []
    if not case.memory.fits:
        answer.add("decode.table", [])
        return
    most = min(case.holds, case.slots)
    for batch in ladder(limit, d.asked or 0, case.batch):
        at, typical = decode_step(d, batch), decode_step(d, batch, mbu=TYPICAL_MBU).step_s
        terms = {"weights_s": at.weights_s, "kv_s": at.kv_s, "compute_s": at.compute_s}
        rows.append({"batch": batch, "step_s": at.step_s, **terms, "tok_s_per_seq": 1 / at.step_s,
                     "tok_s": batch / at.step_s, "bound_by": at.bound_by,
                     "share": terms[f"{at.bound_by}_s"] / at.step_s, "fits": batch <= most,
                     "typical_step_s": typical, "typical_tok_s": batch / typical})
    answer.add("decode.table", rows)
    seqs, all_seqs = microbatch(d, case.batch)
    key = "decode.at_batch."
    answer.add(key + "batch", case.batch, "sequences", source="--concurrency, at most what the KV "
               "pool and --max-num-seqs let run")
    touched = 1.0
    if d.model.experts:
        touched = answer.work(key + "touched_share", "", "1 - (1 - top_k / experts) ** tokens",
                              "distinct experts under uniform routing", tokens=all_seqs)
    answer.add(key + "weights_s", step.weights_s, "s",
               "((weight_bytes - expert_bytes) / tp + expert_bytes * expert_share * touched) "
               "* stage_share * pp / (bandwidth * mbu)", DECODE, touched=touched)
    answer.add(key + "kv_s", step.kv_s, "s", "seqs_per_gpu * pp * kv_read_per_seq / (bandwidth "
               "* mbu)", DECODE, seqs_per_gpu=seqs, kv_read_per_seq=read_bytes(d, d.history_tokens))
    answer.work(key + "compute_s", "s", "flop_per_gpu / (peak * mfu)", "2 FLOP a parameter and "
                "token", flop_per_gpu=flop_per_gpu(d, seqs, all_seqs) * d.pp * d.stage_share)
    answer.work(key + "step_s", "s", "max(compute_s, weights_s + kv_s)", DECODE)
    answer.work(key + "tok_s", "tok/s", "batch / step_s", DECODE)
    answer.say("DECODE", f"bound ({d.mbu:.0%} MBU, {d.mfu:.0%} MFU), history "
               f"{count(d.history_tokens)}; * KV limit at ctx {count(d.ctx_tokens)}"
               + ("; ! would wait" if (d.asked or 0) > most else ""))
    answer.table(DECODED[:None if d.mbu == 1 else -2], (dict(row, batch_text=(
        f"{row['batch']}{'*' if row['batch'] == limit else ' ' if row['fits'] else '!'}"))
        for row in rows))


def in_ms(seconds: float) -> str:
    """Seconds as milliseconds with one decimal, two where small."""
    return f"{seconds / MS:.1f}" if seconds >= 0.1 * MS else f"{seconds / MS:.2f}"


DECODED = (
    Column("batch_text", "batch", str), Column("step_s", "step ms", in_ms),
    Column("weights_s", "weights", in_ms), Column("kv_s", "KV", in_ms),
    Column("compute_s", "compute", in_ms), Column("tok_s_per_seq", "tok/s/seq", count),
    Column("tok_s", "tok/s", count), Column("bound_by", "binds", str),
    Column("share", "share", "{:.0%}".format), Column("typical_step_s", "| 70% MBU ms", in_ms),
    Column("typical_tok_s", "tok/s", count))


def say_comm(case: Case, answer: Answer) -> None:
    """What the GPUs send each other in a step, as a share of it; the bound leaves it out."""
    d = case.d
    batch = d.asked or case.batch
    if not batch:
        return
    runs = f" as asked ({case.batch} run)" if case.batch < batch else ""
    step_s = decode_step(d, batch).step_s
    lines, rows = [], []
    for c in decode_collectives(d, batch):
        seconds, link = collective_seconds(d, [c]), d.link_for(c.ranks)
        rows.append({"name": c.name, "times": c.times, "message_bytes": c.bytes, "ranks": c.ranks,
                     "bytes_per_step": c.times * c.bytes * c.wire, "seconds": seconds,
                     "share_of_step": seconds / step_s if seconds is not None else None})
        answer.work(f"comm.{c.name.replace(' ', '_').replace('-', '_')}_bytes_per_step", "MB",
                    "times * message * wire", "times a step, bytes on each GPU, share that crosses "
                    "the link", times=c.times, message=c.bytes, wire=c.wire)
        if c.name == "all-reduce":
            explain_all_reduce(d, batch, c, step_s, answer)
        lines.append(f"{c.times:.0f} x {c.name}: no link known, give --link"
                     if seconds is None or link is None else
                     f"{c.times:.0f} x {c.name} of {figure(c.bytes / MEGA)} MB over {link.name}: "
                     f"+{figure(seconds / MS)} ms at batch {batch}{runs}, {seconds / step_s:.1%} "
                     "of the step")
    answer.add("collectives", rows)
    if lines:
        answer.say("COMM", "not in the bound, and the latency of each comes on top:", *lines)


def explain_all_reduce(d: Deployment, batch: int, c: Collective, step_s: float,
                       answer: Answer) -> None:
    """Tensor parallelism's traffic, step by step."""
    answer.add("tp_comm.batch", batch, "sequences")
    size = answer.work("tp_comm.all_reduce_bytes", "MB", "tokens * hidden * activation_bytes",
                       MEGATRON, hidden=d.model.hidden, tokens=microbatch(d, batch)[0],
                       activation_bytes=ACTIVATION_BYTES)
    ring = answer.work("tp_comm.ring_bytes_per_gpu", "MB", "2 * (tp - 1) / tp * all_reduce_bytes",
                       MEGATRON, all_reduce_bytes=size)
    answer.work("tp_comm.layer_bytes", "MB", "per_layer * ring_bytes", MEGATRON,
                per_layer=c.times / d.model.layers, ring_bytes=ring)
    answer.work("tp_comm.step_bytes", "MB", "all_reduces * ring_bytes", MEGATRON,
                all_reduces=c.times, ring_bytes=ring)
    link = d.link_for(c.ranks)
    if link is None:
        answer.add("tp_comm.seconds", None)
        return
    answer.work("tp_comm.seconds", "s", "step_bytes / link",
                f"{link.name}, one direction, presets.json or --link", link=link.bytes_s)
    answer.work("tp_comm.share_of_step", "", "seconds / step_s", "against the bound on the step",
                step_s=step_s)
    answer.add("tp_comm.link", link.name)
    answer.add("tp_comm.link_bytes_s", link.bytes_s, "B/s")
    answer.add("tp_comm.all_reduces", c.times)


def say_layout(case: Case, answer: Answer) -> None:
    """What each kind of parallelism in use does for this deployment, in figures."""
    d, m = case.d, case.d.model
    if not case.batch:
        return
    lines = []
    if d.pp > 1:
        layers = answer.add("pipeline.layers_on_fullest_stage", -(-m.layers // d.pp))
        idle = answer.work("pipeline.imbalance", "", "1 - layers / (pp * fullest)",
                           "GPipe (1811.06965)", layers=m.layers, fullest=layers)
        bubble = answer.work("pipeline.batch_1_bubble", "", "1 - 1 / pp",
                             "GPipe (1811.06965): (p-1)/(m+p-1) with one microbatch")
        lines.append(f"PP={d.pp}: {layers} layers on the fullest stage ({idle:.0%} idle "
                     f"elsewhere), no latency gain; {bubble:.0%} of the stages idle at batch 1, "
                     f"none from batch {d.pp}")
    if d.replicas > 1:
        busiest, others = case.fleet_tok_s(case.bound_tok_s)
        tok_s = answer.work("fleet.tok_s", "tok/s", "busiest * tok_s + others_tok_s", "replicas "
                            "share nothing; some may run one fewer, or none", busiest=busiest,
                            tok_s=case.bound_tok_s(case.batch), others_tok_s=others)
        seqs = answer.work("fleet.max_seqs", "sequences", "replicas * max_seqs",
                           "replicas share nothing", max_seqs=case.memory.max_seqs)
        lines.append(f"DP={d.replicas}: {sequences_text(seqs)} sequences, "
                     f"{count(tok_s)} tok/s together; latency unchanged, no traffic")
    if d.attention_dp > 1:
        lines.append(f"DP attention: {d.attention_dp} ranks hold their own sequences and a whole "
                     "copy of what is not expert; the experts are shared, by all-to-all")
    elif d.ep > 1:
        lines.append(f"EP={d.ep} within TP: whole experts instead of slices of each; bytes and "
                     "all-reduces as with TP")
    if d.dcp > 1:
        lines.append(f"DCP={d.dcp}: each sequence's KV over {d.dcp} ranks")
    if d.pcp > 1:
        lines.append(f"PCP={d.pcp}: prefill over {d.pcp} times the GPUs; decode gains nothing")
    if d.tp > 1:
        lines += replicas_text(case, answer)
    if m.experts:
        full = answer.work("moe.experts_touched", "experts",
                           "experts * (1 - (1 - top_k / experts) ** tokens)", "uniform routing, a "
                           "layer; real routing is uneven, and all wait for the busiest GPU",
                           tokens=microbatch(d, case.batch)[1])
        lines.append(f"MoE: batch 1 reads {figure(touched_share(m, 1) * m.experts)} of {m.experts} "
                     f"experts a layer, batch {case.batch} reads {figure(full)} (uniform routing): "
                     "bytes tend to all parameters")
    if lines:
        answer.say("LAYOUT", *lines)


def replicas_text(case: Case, answer: Answer) -> List[str]:
    """TP=N against N replicas of TP=1 on the same GPUs, at the same load, traffic included."""
    d = case.d
    single = d._replace(tp=1, dcp=1, ep=1, dp=1, asked=None)
    limit = most_running(single) if memory_of(single).fits else 0
    if d.ep > 1 or not limit:
        return [] if d.ep > 1 else [f"TP=1 would not fit, so {d.tp} replicas are no choice"]
    each = min(limit, case.batch // d.tp)
    if not each:
        return []
    load = answer.add("tp_against_replicas.sequences", each * d.tp)
    here = answer.work("tp_against_replicas.tok_s_per_gpu", "tok/s", "load / (step_s + comm_s) / "
                       "gpus", "traffic included, not its latency", load=load,
                       gpus=d.replica_gpus, step_s=decode_step(d, load).step_s,
                       comm_s=collective_seconds(d, decode_collectives(d, load)) or 0.0)
    there = answer.work("tp_against_replicas.tp1_tok_s_per_gpu", "tok/s", "load / step_s / gpus",
                        "no traffic", load=each, step_s=decode_step(single, each).step_s,
                        gpus=single.replica_gpus)
    return [f"{load} sequences on TP={d.tp}: {count(here)} tok/s per GPU with its traffic; on "
            f"{d.tp} replicas of TP=1: {count(there)}. The bound leaves out fixed time a layer and "
            "an all-reduce, which TP does not divide: where both are close, replicas win"]


def say_binds(case: Case, answer: Answer) -> None:
    """The last line in plain words: which term binds, which knob moves it."""
    d, step = case.d, case.step
    if not case.memory.fits:
        answer.add("decode.bound_by", None)
        answer.say("BINDS", "memory: it does not start; see WOULD DO.")
        return
    sent = collective_seconds(d, decode_collectives(d, case.batch)) or 0.0
    answer.add("decode.bound_by", "comm" if sent > step.step_s else step.bound_by)
    if d.asked and d.asked > case.batch:
        limit, cure = (("KV pool", "see WOULD DO") if case.holds <= case.slots else
                       ("--max-num-seqs", "raise it"))
        text = f"{limit}: {case.batch} of {d.asked} run, {d.asked - case.batch} wait; {cure}."
    elif sent > step.step_s:
        text = (f"traffic between GPUs, {figure(sent / MS)} ms beside a step of "
                f"{figure(step.step_s / MS)} ms. Faster: fewer GPUs a replica, a faster --link.")
    elif step.bound_by == "compute":
        text = (f"arithmetic, {step.compute_s / step.step_s:.0%} of the step at batch "
                f"{case.batch}. Faster: {', '.join(compute_knobs(d))}.")
    else:
        share = max(step.weights_s, step.kv_s) / (step.weights_s + step.kv_s)
        what = "weights" if step.bound_by == "weights" else "KV history"
        room = narrower_kv(d) + (["--util 0.95"] if d.util < 0.93 else [])
        if not d.model.latent:
            room += next_tp(d)
        elif d.tp > 1 and d.model.experts:
            room += [f"--dp {d.tp} --ep all instead of TP"]
        text = (f"HBM reads at batch {case.batch}, {share:.0%} {what}. Faster: "
                f"{', '.join(speed_knobs(d, step.bound_by))}. More users: "
                f"{', '.join([*room, 'replicas (--dp)'])}.")
    answer.say("BINDS", text)


def next_tp(d: Deployment) -> List[str]:
    """The next TP size within one link domain and the split of the KV heads, as a knob."""
    most = max(kv_heads_of(d.model), default=d.model.heads)
    sizes = [n for n in fitting_tp(d.model) if d.tp < n <= min(d.gpu.domain, most)]
    return [f"TP={sizes[0]}"] if sizes else []


def compute_knobs(d: Deployment) -> List[str]:
    """What shortens a compute-bound step, of what has not been done."""
    fp8 = ["--weights fp8"] if d.compute == "bf16" and "fp8" in d.gpu.flop_s else []
    return next_tp(d) + fp8 + ["a smaller batch (more replicas)"]


def speed_knobs(d: Deployment, bound_by: str) -> List[str]:
    """What shortens a step bound by reads, of what has not been done."""
    if bound_by == "kv":
        return [*narrower_kv(d), "shorter contexts", *next_tp(d), "more bandwidth"]
    narrower = [f"--weights {n}" for n in ("fp8", "int4")
                if WEIGHTS[n].bytes * d.model.params < d.weight_bytes]
    return next_tp(d) + narrower[:1] + ["more bandwidth"]


def narrower_kv(d: Deployment) -> List[str]:
    """A KV cache of fewer bytes as a knob, where it is not that already."""
    return ["--kv fp8"] if d.kv.bytes > 1 else []


EXPECTATION = "constants of presets.json, fitted by tests/fit_expected.py"


def say_expected(case: Case, answer: Answer) -> None:
    """What this batch will really do: TPOT with its band, output tokens a second, and the terms."""
    d, engine = case.d, case.args.engine or "vllm"
    steady = case.plan.steady if case.plan and not d.asked else None
    asked = max(1, round(steady.batch)) if steady else d.asked or case.batch
    if not asked:
        answer.add("expected", None)
        return
    held = running_batch(d, asked)
    batch = min(held, case.slots)
    e = expected_of(d, batch, case.cal)
    answer.inputs("expected.", kv_limited=batch == held < asked, engine=engine, basis=e.basis)
    answer.add("expected.batch", batch, "sequences", source="--concurrency, at most what the KV "
               "pool and --max-num-seqs let run")
    explain_expected(d, e, case.cal, answer)
    busiest, others = (d.replicas, 0.0) if steady else case.fleet_tok_s(
        lambda batch: expected_of(d, batch, case.cal).output_tok_s, batch)
    tok_s = answer.add("expected.output_tok_s", busiest * e.output_tok_s + others, "tok/s",
                       "busiest * batch * output / (ttft_s + (output - 1) * tpot_s) + others_tok_s",
                       "Little's law, closed loop; the replicas that run the batch, and the others",
                       output=max(2.0, d.output_tokens or ENDLESS), busiest=busiest,
                       others_tok_s=others)
    if steady:
        return  # the plan says it
    what = (f"TTFT about {figure(e.ttft_s / MS, 2)} ms (rough, no band)" if d.output_tokens
            else "prefill not counted without --output-len")
    if case.args.spec_accept is not None or case.args.spec_accept_len is not None:
        what += ", without the drafter of --spec-accept"
    if d.shared_tokens:
        what += f", {count(d.fresh_tokens)} of a prompt past the shared prefix to prefill"
    waits = (f"; KV pool holds {batch} of {asked}, the rest wait" if batch == held < asked else
             f"; --max-num-seqs lets {batch} of {asked} run, the rest wait" if batch < asked else
             "; the weights do NOT fit: as if they did" if case.memory.pool_bytes <= 0 else "")
    terms = expected_terms(d, e.decoding, case.cal, rank_weights(d))
    held_at = ("; no faster than the bound, where it would come out"
               if terms.step_s == terms.bound_s else "")
    answer.say("EXPECT", f"{engine}, batch {batch}: TPOT {in_ms(e.tpot_s)} ms "
               f"(80% band {in_ms(e.tpot_low_s)} to {in_ms(e.tpot_high_s)}{held_at}), "
               f"{count(tok_s)} tok/s, "
               f"{what}{waits}; {e.basis}")


EXPECTED_TERMS = (  # each term of the expected step, its formula or where it comes from
    ("weights_s", "(dense_read / mbu + expert_bytes * touched / expert_mbu) * pp / bandwidth", ""),
    ("kv_s", "seqs_per_gpu * kv_read_per_seq * pp / (bandwidth * kv_mbu)", ""),
    ("compute_s", "2 * (seqs_per_gpu * dense_params / tp + seqs * expert_params / expert_ranks) / "
     "(peak * mfu)", ""),
    ("layers_s", "layers * layer_s + expert_layers * moe_layer_s + latent_layers * mla_layer_s",
     ""),
    ("comm_s", "", "collectives of the step: latency each, transfer at a share of the link's rate; "
     ),
    ("sequences_s", "decoding * sequence_s", ""),
    ("step_s", "max(bound_s, max(compute_s, weights_s + kv_s) + layers_s + comm_s + sequences_s)",
     ""))


def explain_expected(d: Deployment, e: Expected, cal: Calibration, answer: Answer) -> None:
    """The steps from the constants to the expected TPOT."""
    key, m, held = "expected.", d.model, rank_weights(d)
    terms = expected_terms(d, e.decoding, cal, held)
    everywhere = max(1.0, e.decoding / d.pp)
    numbers = dict(
        cal._asdict(), bound_s=terms.bound_s, dense_read=held.dense_bytes - held.unread_bytes,
        expert_bytes=held.expert_bytes, touched=expected_touched(d, everywhere, cal),
        seqs_per_gpu=max(1.0, everywhere / d.attention_dp), seqs=everywhere,
        kv_read_per_seq=read_bytes(d, d.history_tokens), dense_params=dense_params(m),
        expert_params=expert_params(m), layers=m.layers, expert_layers=m.expert_layers,
        latent_layers=latent_layers(m))
    answer.add(key + "decoding", e.decoding, "sequences", source="of the batch; the others are in "
               "prefill, or wait for it")
    for name, formula, source in EXPECTED_TERMS:
        answer.add(key + name, getattr(terms, name), "s", formula, source + EXPECTATION, **numbers)
    gaps = max(1.0, d.output_tokens - 1) if d.output_tokens else ENDLESS
    answer.add(key + "ttft_s", e.ttft_s, "s", "max((min(ttft_waits, alone * batch) + ttft_burst * "
               "batch) * (prefill_s + step_s), (batch - 1) * prefill_s * (1 + step_s / chunk_s) - "
               "decode_s)", "prompts wait for each other, as measured; within a factor of two",
               **dict(numbers, prefill_s=prompt_prefill_s(d, cal), chunk_s=chunk_s(d, cal),
                      decode_s=gaps * e.tpot_s, alone=TTFT_ALONE))
    answer.add(key + "prefill_s", e.prefill_s, "s", source="of the TPOT: each of the others' "
               "prompts is prefilled once in a request's time in the system, "
               f"{count(CHUNK_TOKENS)} tokens a step at most; {EXPECTATION}")
    answer.add(key + "tpot_s", e.tpot_s, "s", "step_s + prefill_s", EXPECTATION)
    answer.work(key + "tpot_low_s", "s", "min(tpot_s, max(tpot_s * share, bound_of_batch_s))",
                "80% band, no faster than the bound: " + e.basis, share=cal.low,
                bound_of_batch_s=decode_step(d, e.batch).step_s)
    answer.work(key + "tpot_high_s", "s", "tpot_s * share", "80% band: " + e.basis, share=cal.high)


# The questions: each adds its section when its flag is given.

LEVIATHAN = "Leviathan et al., speculative decoding (2211.17192)"


def tokens_a_step(alpha: float, gamma: int) -> float:
    """Expected tokens of one verification: (1 - alpha^(gamma+1)) / (1 - alpha).

    alpha is the per-token acceptance rate, taken as independent. Source: LEVIATHAN, eq. 1.
    """
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speculative_speedup(d: Deployment, batch: int, alpha: float, gamma: int, cost: float) -> float:
    """Speed-up of a step with gamma drafts at this batch, verification priced by the step time.

    E * t(B) / (t_verify(B) + gamma * c * t(B)); verification multiplies the FLOP by gamma + 1 and
    leaves the reads, save for the further experts that an MoE's extra tokens touch.
    """
    plain = decode_step(d, batch).step_s
    verify = decode_step(d, batch, tokens_per_seq=gamma + 1).step_s
    return tokens_a_step(alpha, gamma) * plain / (verify + gamma * cost * plain)


def losing_batches(d: Deployment, alpha: float, gamma: int, cost: float
                   ) -> List[Tuple[int, Optional[int]]]:
    """Ranges of batches at which speculation loses: (first, last), last None = no end found.

    An MoE may lose at small batch, where the extra tokens touch further experts, win between, and
    lose again once compute-bound. The batches tried rise by a tenth; the edges are then bisected.
    """
    def loses(batch: int) -> bool:
        return speculative_speedup(d, batch, alpha, gamma, cost) < 1

    ranges: List[Tuple[int, Optional[int]]] = []
    before, losing, batch = 0, False, 1
    while batch <= 2**14:
        if loses(batch) != losing:
            low, at = (before, batch) if before else (0, 1)
            while at - low > 1:
                middle = (low + at) // 2
                low, at = (middle, at) if loses(middle) == losing else (low, middle)
            if losing:
                ranges[-1] = (ranges[-1][0], at - 1)
            else:
                ranges.append((at, None))
            losing = not losing
        before, batch = batch, max(batch + 1, batch * 11 // 10)
    return ranges


def ranges_text(ranges: Sequence[Tuple[int, Optional[int]]]) -> str:
    """Losing batches in words."""
    if not ranges:
        return "wins at every batch"
    return "loses " + " and ".join(
        f"from batch {count(first)} up" if last is None else
        f"at batch {count(first)}" if first == last else f"at batches {count(first)}-{count(last)}"
        for first, last in ranges)


def acceptance_of(args: Any) -> Tuple[float, int, bool]:
    """Acceptance and drafted tokens of speculation, and whether they are assumed. UserError where
    no acceptance gives --spec-accept-len."""
    gamma, length = args.spec_tokens, args.spec_accept_len
    if length is None:
        return (0.8, 3, True) if args.spec_accept is None else (args.spec_accept, gamma, False)
    if not 1 <= length <= gamma + 1:
        raise UserError(f"--spec-accept-len {length:g} is outside 1 to {gamma + 1}: one token plus "
                        f"at most --spec-tokens {gamma}")
    return halved(0.0, 1.0, 60, lambda alpha: tokens_a_step(alpha, gamma) < length)[1], gamma, False


def say_speculative(case: Case, answer: Answer) -> None:
    """Speculative decoding at this deployment's own batch."""
    d, args, key = case.d, case.args, "speculative."
    (alpha, gamma, _), cost, batch = acceptance_of(args), args.spec_cost, case.batch or 1
    answer.add(key + "alpha", alpha, "", source="--spec-accept, or solved from --spec-accept-len")
    answer.add(key + "gamma", gamma)
    answer.add(key + "draft_cost", cost, "", source="a draft step over a target step")
    gained = answer.add(key + "expected_tokens", tokens_a_step(alpha, gamma), "tokens",
                        "(1 - alpha ** (gamma + 1)) / (1 - alpha)" if alpha < 1 else "gamma + 1",
                        LEVIATHAN)
    free = answer.work(key + "speedup_memory_bound", "x", "expected_tokens / (1 + gamma * cost)",
                       LEVIATHAN, cost=cost)
    full = answer.work(key + "speedup_compute_bound", "x", "expected_tokens / (gamma + 1)",
                       "verification multiplies the FLOP; the drafter left out")
    here = answer.work(key + "speedup", "x",
                       "expected_tokens * step_s / (verify_s + gamma * cost * step_s)",
                       "the step-time equation at this batch", cost=cost,
                       step_s=decode_step(d, batch).step_s,
                       verify_s=decode_step(d, batch, tokens_per_seq=gamma + 1).step_s)
    answer.add(key + "batch", batch, "sequences")
    ranges = answer.add(key + "losing_batches", losing_batches(d, alpha, gamma, cost))
    answer.add(key + "turning_batch", next((first for first, _ in ranges if first > 1), None))
    rows = answer.add(key + "table", [
        {"gamma": g, "expected_tokens": tokens_a_step(alpha, g),
         "speedup": speculative_speedup(d, batch, alpha, g, cost)} for g in range(1, 9)])
    text = ranges_text(ranges)
    if not ranges and full < 1:
        text += (f": at a history of {count(d.history_tokens)} reads outweigh arithmetic in all of "
                 f"them, so the {full:.2f}x is not met")
    if ranges and ranges[0][0] > case.limit:
        text += f", past the KV limit of {case.limit}"
    answer.say("SPECULATION", f"gamma {gamma}, alpha {figure(alpha)}: {gained:.2f} tokens a step; "
               f"{free:.1f}x while memory-bound, {full:.2f}x once compute-bound (drafter free)",
               f"at batch {batch}: {here:.2f}x, {'a win' if here >= 1 else 'a LOSS'}; {text}",
               "gamma " + ", ".join(f"{r['gamma']}: {r['speedup']:.2f}x" for r in rows))


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
                "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def lora_params(model: Model, rank: int) -> int:
    """Parameters of one adapter on q k v o gate up down, routed experts left alone.

    r (d_in + d_out) for each matrix. Source: Hu et al., LoRA (2106.09685). UserError where the
    shapes are not known.
    """
    targets = [t for t in model.tensors if t.layers and t.d_in and t.copies == 1
               and t.name.rpartition(".")[2] in LORA_TARGETS]
    if not targets:
        raise UserError("--lora-rank needs the layer shapes, which a model by hand does not have; "
                        "use a preset or a config.json")
    return rank * sum((t.d_in + t.d_out) * len(t.layers) for t in targets)


def say_lora(case: Case, answer: Answer) -> None:
    """Adapters against this deployment's KV pool, and their extra FLOP."""
    d, rank, number = case.d, case.args.lora_rank, case.args.lora_count
    params = answer.work("lora.params", "parameters", "rank * widths",
                         "r (d_in + d_out) a matrix: LoRA (2106.09685); q k v o gate up down",
                         rank=rank, widths=lora_params(d.model, 1))
    size = answer.work("lora.bytes", "MB", "params * bytes_each", "adapters stay in BF16",
                       bytes_each=ACTIVATION_BYTES)
    held = answer.work("lora.bytes_per_gpu", "B", "count * size / tp * stage_share",
                       "S-LoRA (2311.03285): adapters share memory with the KV pool", count=number,
                       size=size)
    lost = answer.work("lora.kv_tokens_lost", "tokens", "held / kv_bytes_per_token * attention_dp",
                       BUDGET, held=held,
                       kv_bytes_per_token=case.memory.sequence_bytes / d.ctx_tokens)
    extra = answer.work("lora.extra_flop_share", "", "params / active_params",
                        "2 FLOP a parameter, a token", active_params=(
                            d.model.active_params if d.model.experts else d.model.params))
    answer.inputs("lora.", rank=rank, count=number)
    answer.add("lora.max_seqs", case.memory.max_seqs, "sequences")
    without = memory_of(d._replace(adapter_bytes=0.0)).max_seqs
    experts = "; routed experts carry no adapter here" if d.model.experts else ""
    answer.say("LORA", f"rank {rank}: {figure(params / MEGA)}M parameters, "
               f"{figure(size / MEGA)} MB each{experts}",
               f"{number} resident: {scaled(held, 'B')}/GPU, {count(lost)} KV tokens fewer, "
               f"{sequences_text(case.memory.max_seqs)} sequences left of "
               f"{sequences_text(without)}; +{extra:.1%} FLOP a token")


def say_cost(case: Case, answer: Answer) -> None:
    """Price of a million tokens: the bound, a usual share of it, or as measured."""
    d, args, batch = case.d, case.args, case.batch
    hourly = answer.work("cost.deployment_per_hour", "$", "gpu_price * gpus", "--gpu-price",
                         gpu_price=args.gpu_price)
    tok_s, typical, basis = args.tok_s, None, "as measured (--tok-s)"
    if tok_s is None and batch:
        busiest, others = case.fleet_tok_s(case.bound_tok_s)
        tok_s = busiest * case.bound_tok_s(batch) + others
        basis = f"bound at batch {batch}, a ceiling no real run reaches"
        if d.mbu == 1:
            usual = partial(case.bound_tok_s, mbu=TYPICAL_MBU)
            busiest, others = case.fleet_tok_s(usual)
            typical = busiest * usual(batch) + others
    if not tok_s:
        answer.say("COST", f"${hourly:.2f}/h; no throughput to divide it by")
        return
    per_million = answer.work("cost.per_1m_output", "$", PER_1M, "price over throughput",
                              per_hour=hourly, tok_s=tok_s)
    answer.add("cost.tok_s", tok_s, "tok/s", source=basis)
    line = f"${hourly:.2f}/h; {count(tok_s)} tok/s {basis}: ${per_million:.3f} per 1M output tokens"
    if typical:
        line += f"; ${per_1m(hourly, typical):.3f} at {TYPICAL_MBU:.0%} MBU"
    rate = prefill_tok_s(d, d.prompt_tokens, TYPICAL_MFU)
    given = answer.work("cost.per_1m_input", "$", PER_1M, f"GPUs that do nothing but prefill, "
                        f"{TYPICAL_MFU:.0%} MFU, attention included", per_hour=hourly, tok_s=rate)
    lines = [line, f"${given:.3f} per 1M input tokens, prefill alone at {TYPICAL_MFU:.0%} MFU"]
    if d.output_tokens and typical:
        busy_s = d.fresh_tokens / rate + d.output_tokens / typical
        both = answer.add("cost.per_request", hourly * busy_s / HOUR_S, "$",
                          "per_hour / 3600 * (input / prefill_tok_s + output / decode_tok_s)",
                          "prefill and decode take turns on the same GPUs, at the usual shares",
                          per_hour=hourly, input=d.fresh_tokens, prefill_tok_s=rate,
                          output=d.output_tokens, decode_tok_s=typical)
        cached = f" ({count(d.fresh_tokens)} past the shared prefix)" if d.shared_tokens else ""
        lines.append(f"a request of {count(d.prompt_tokens)} in{cached}, "
                     f"{count(d.output_tokens)} out: ${both:.5f}, or "
                     f"${both / d.output_tokens * MEGA:.3f} per 1M output tokens "
                     "with the input in it")
    label = "COST" if not case.plan else "COST/REPLICA" if d.replicas == 1 else "COST (--dp)"
    answer.say(label, *lines)  # the plan's own COST is of the fleet
    if args.serverless_price is not None:
        expected = next((step.value for step in answer.steps
                         if step.key == "expected.output_tok_s"), None)
        planned = case.plan and not d.asked  # EXPECT is then of the plan's batch, not the most
        say_break_even(case, answer, hourly, *(
            (args.tok_s, "measured (--tok-s)") if args.tok_s else
            (expected, "that EXPECT has") if expected and not planned else
            (typical or tok_s, f"of {TYPICAL_MBU:.0%} MBU" if typical else "of the bound")))


PER_1M = "per_hour / (tok_s * 3600) * 1e6"


def per_1m(per_hour: float, tok_s: float) -> float:
    """Price of a million tokens [$] at this price an hour and this throughput."""
    return per_hour / (tok_s * HOUR_S) * MEGA


def say_break_even(case: Case, answer: Answer, hourly: float, tok_s: float, basis: str) -> None:
    """Tokens an hour from which dedicated GPUs are cheaper than a price per token; tok_s: what this
    deployment does, by its basis."""
    price, gpus, key = case.args.serverless_price, case.d.gpus, "break_even."
    per_gpu = answer.work(key + "tokens_per_hour_per_gpu", "tokens/h",
                          "gpu_price * 1e6 / price_per_1m", "GPU $/h over $/token",
                          gpu_price=case.args.gpu_price, price_per_1m=price)
    each = answer.work(key + "tok_s_per_gpu", "tok/s", "tokens_per_hour / 3600", "sustained",
                       tokens_per_hour=per_gpu)
    answer.work(key + "tokens_per_hour", "tokens/h", "per_hour * 1e6 / price_per_1m",
                "deployment $/h over $/token", per_hour=hourly, price_per_1m=price)
    rate = answer.work(key + "tok_s", "tok/s", "tokens_per_hour / 3600", "sustained")
    share = answer.work(key + "share_of_tok_s", "", "break_even / tok_s",
                        f"against the tok/s {basis}", break_even=rate, tok_s=tok_s)
    reach = (f"{share:.0%} of the {count(tok_s)} tok/s {basis}" if share <= 1 else f"more than the "
             f"{count(tok_s)} tok/s {basis}: serverless is cheaper at any load")
    all_gpus = f" ({count(rate)} for all {gpus})" if gpus > 1 else ""
    answer.say("BREAK-EVEN", f"${price:g} per 1M serverless: dedicated is cheaper above "
               f"{figure(per_gpu / MEGA)}M tokens/h per GPU, {count(each)} tok/s "
               f"sustained{all_gpus}: {reach}")


def say_cold_start(case: Case, answer: Answer) -> None:
    """From nothing to serving: image pull, weights from storage, engine start."""
    d, args = case.d, case.args
    load = answer.work("cold_start.load_s", "s", "weight_bytes / storage",
                       "weights over storage bandwidth", storage=args.storage.bytes_s)
    total = answer.work("cold_start.total_s", "s", "pull_s + load_s + init_s",
                        "--pull-s, --init-s", pull_s=args.pull_s, init_s=args.init_s)
    answer.add("cold_start.weight_bytes", d.weight_bytes, "B")
    answer.add("cold_start.storage_bytes_s", args.storage.bytes_s, "B/s")
    absent = [what for what, value in (("image pull (--pull-s)", args.pull_s),
                                       ("engine start (--init-s)", args.init_s)) if not value]
    without = f"; {' and '.join(absent)} not counted" if absent else ""
    answer.say("COLD START", f"{figure(d.weight_bytes / GIGA, 4)} GB at {args.storage.name}: "
               f"{figure(load, 4)} s; {figure(total, 4)} s in all{without}")


def say_kv_transfer(case: Case, answer: Answer) -> None:
    """Shipping a prompt's KV cache to a decode pool, against the stall that it removes."""
    d, link = case.d, case.args.kv_link
    tokens = d.ctx_tokens if case.args.input_len is None else d.prompt_tokens
    once = shipped_bytes(d, tokens)
    size = answer.add("kv_transfer.bytes", once, "MB", "bytes_per_token * tokens",
                      "KV cache of the prompt, replicated copies sent once",
                      bytes_per_token=once / tokens, tokens=tokens)
    seconds = answer.work("kv_transfer.seconds", "s", "kv_bytes / link", "--kv-link",
                          kv_bytes=size, link=link.bytes_s)
    formula, numbers = prefill_formula(d, tokens)
    stall = answer.add("kv_transfer.interference_s", prefill_seconds(d, tokens), "s", formula,
                       "DistServe (2401.09670): a prefill stalls each stream of the batch; at the "
                       "bound", **numbers)
    needed = answer.work("kv_transfer.break_even_bytes_s", "B/s", "kv_bytes / stall_s",
                         "where both are equal", kv_bytes=size, stall_s=stall)
    pays = answer.add("kv_transfer.pays", seconds < stall)
    answer.add("kv_transfer.tokens", tokens, "tokens")
    streams = f"each of {case.batch} streams" if case.batch else "each stream"
    answer.say("P/D TRANSFER", f"{count(tokens)} tokens: {figure(size / GIGA)} GB in "
               f"{figure(seconds / MS)} ms over {link.name}; the prefill would stall {streams} for "
               f"{figure(stall / MS)} ms (bound)",
               f"{'pays' if pays else 'does NOT pay'}: from {scaled(needed, 'B/s')} the transfer "
               "is the shorter; real links reach less than their rate")


def shipped_bytes(d: Deployment, tokens: float) -> float:
    """KV cache of so many tokens, whole model, replicated copies counted once [B]."""
    return sequence_bytes(d._replace(tp=1, dcp=1, pp=1), tokens)


def say_queueing(case: Case, answer: Answer) -> None:
    """How long a request waits at a given utilisation, in service times."""
    rho = case.args.rho
    wait = answer.work("queueing.wait_over_service", "x", "rho / (1 - rho)",
                       "M/M/1 mean wait: Kleinrock, Queueing Systems I", rho=rho)
    answer.add("queueing.rho", rho)
    answer.say("QUEUEING", f"at {rho:.0%} utilisation the mean wait is {figure(wait)}x the "
               "service time (M/M/1); size for 60-75% of measured saturation")


ENGINE_SOURCE = "the engine's own accounting at start-up: vLLM v1/worker/gpu_worker.py"
BLOCKS = "vLLM v1/core/kv_cache_utils.py"


def predicted(case: Case) -> Tuple[Deployment, Settings, Logged, EngineAnswer]:
    """The engine's start-up, with what a log says put over it."""
    d, s = case.d, started_with(case)
    log = case.args.startup_log or {}
    if log:
        d, s = as_logged(d, s, log)
    logged = logged_of(d, s, log)
    return d, s, logged, engine_answer(d, s, logged)


def own_defaults(case: Case, s: Settings) -> str:
    """What to add to the engine's name where nothing sets its limits."""
    return "" if case.plan or s.asked.max_num_seqs else " with its own defaults"


def say_engine(case: Case, answer: Answer) -> None:
    """What the engine will log at start-up, and what it would refuse."""
    log = case.args.startup_log or {}
    d, s, logged, found = predicted(case)
    record_engine(d, s, found, answer)
    m = found.memory
    parts = [f"{name} {size / GIB:.2f}" for name, size in (
        ("weights", m.weights_bytes), ("activations", m.activation_bytes),
        ("not torch's" if logged.reserve_bytes is None else "reserve (logged)", m.other_bytes),
        ("CUDA graphs", m.graphs_bytes)) if size >= GIB / 200 or name == "weights"]
    basis = ("from --startup-log" if log else profile_of(d, s).basis if s.engine == "vllm" else
             "the share is of what loading leaves" if s.engine == "trtllm" else
             "the share is of what is free before loading")
    room = f"Available KV cache memory: {room_text(found)}"
    if s.engine == "vllm" and not s.version and not log:
        newest = reckon(d, s._replace(version=NEWEST_VLLM), Logged()).memory.available_bytes
        room += (f"; {f'{newest / GIB:.2f}' if newest > 0 else 'none'} from "
                 f"version {dotted(NEWEST_VLLM)} on")
    elif s.engine == "vllm" and profile_of(d, s).optional and not log:
        without = without_option(d, s)
        room += (f"; {f'{without / GIB:.2f}' if without > 0 else 'none'} where FlashInfer is not "
                 "installed, which pip leaves out")
    blocks = f" in {count(found.pool.blocks)} blocks" if found.pool else ""
    size = (f"max_total_num_tokens={found.tokens}" if s.engine == "sglang" else
            f"GPU KV cache size: {count(found.tokens)} tokens{blocks}")
    answer.say(
        "ENGINE", f"{s.engine} {dotted(s.version) or '(version not given)'}"
        f"{own_defaults(case, s)}: {m.requested_bytes / GIB:.2f} GiB of "
        f"{m.total_bytes / GIB:.2f} at {s.util:.4g} = "
        f"{' + '.join(parts)} + KV" + (f" ({basis})" if basis else ""),
        room,
        f"{size}; maximum concurrency for {count(s.max_model_len)} tokens per request: "
        f"{found.concurrency:.2f}x",
        f"max_num_seqs {count(s.max_num_seqs)}, max_num_batched_tokens "
        f"{count(s.max_num_batched_tokens)}",
        *([draft_text(d, s, "weights_bytes" in log)] if s.draft.method else []))
    for refusal in found.refusals:
        answer.say("REFUSES", f"{refusal.what}: {refusal.cure}")


def room_text(found: EngineAnswer) -> str:
    """The memory for KV and its band; "none" for what is not there."""
    low, high, left = (size / GIB for size in (
        found.low_bytes, found.high_bytes, found.memory.available_bytes))
    if left <= 0:
        best = f"; at best {high:.2f}" if high > 0 else ""
        return f"none ({max(0.0, -left):.2f} GiB short{best})"
    return f"{left:.2f} GiB ({f'{low:.2f}' if low > 0 else 'none'} to {high:.2f})"


def draft_text(d: Deployment, s: Settings, logged: bool) -> str:
    """What the accounting takes a drafter to cost."""
    layers, size = draft_layers(d.model, s.draft), draft_bytes(d, s)
    which = f"speculation by {s.draft.method}" + (" (assumed)" if s.draft.assumed else "")
    if not layers:
        free = s.draft.method in ("ngram", "suffix")
        return which + (": no weights and no KV of its own" if free else
                        ": the drafter's weights and KV are NOT counted, its shapes are not known")
    weights = "weights as logged" if logged else f"about {size / GIB:.2f} GiB of weights a GPU"
    return (f"{which}: {weights}, KV of {count(layers)} more "
            f"layer{'s' if layers > 1 else ''} (x {1 + layers / d.model.layers:.3f})")


def record_engine(d: Deployment, s: Settings, found: EngineAnswer, answer: Answer) -> None:
    """The steps of the engine's accounting."""
    m, pool, key = found.memory, found.pool, "engine."
    answer.inputs(key, name=s.engine, max_model_len=s.max_model_len, max_num_seqs=s.max_num_seqs,
                  max_num_batched_tokens=s.max_num_batched_tokens, util=s.util,
                  version=dotted(s.version) or None, draft_method=s.draft.method or None)
    answer.add(key + "draft_bytes", draft_bytes(d, s), "B", source="the drafter's weights, of "
               "weights_bytes: about a layer of the model")
    answer.add(key + "draft_layers", draft_layers(d.model, s.draft), "layers",
               source="with a KV cache of their own")
    for name, size, source in (
            ("total", m.total_bytes, "presets.json torch_gib"),
            ("requested", m.requested_bytes, "utilisation of it"),
            ("weights", m.weights_bytes, "weights as stored on a rank; rotary tables, padding and "
             "allocator with them"),
            ("activation", m.activation_bytes, ENGINE_SOURCE),
            ("other", m.other_bytes, ENGINE_SOURCE), ("graphs", m.graphs_bytes, ENGINE_SOURCE)):
        answer.add(f"{key}{name}_bytes", size, "B", source=source)
    answer.add(key + "available_kv_bytes", m.available_bytes, "B",
               "requested - weights - activation - other - graphs", ENGINE_SOURCE,
               requested=m.requested_bytes, weights=m.weights_bytes, graphs=m.graphs_bytes,
               activation=m.activation_bytes, other=m.other_bytes)
    answer.add(key + "available_kv_low_bytes", found.low_bytes, "B", source="tests/bench_logs.py")
    answer.add(key + "available_kv_high_bytes", found.high_bytes, "B", source="tests/bench_logs.py")
    answer.add(key + "num_gpu_blocks", pool.blocks if pool else None, "blocks", source=BLOCKS)
    answer.add(key + "block_tokens", max(g.block_tokens for g in pool.groups) if pool
               else s.block_tokens, "tokens")
    answer.add(key + "kv_groups", [g._asdict() for g in pool.groups] if pool else None)
    answer.add(key + "kv_cache_tokens", found.tokens, "tokens", source=BLOCKS)
    answer.add(key + "max_concurrency", found.concurrency, "x", source=BLOCKS)
    answer.add(key + "refusals", [{"what": r.what, "cure": r.cure} for r in found.refusals])


def as_logged(d: Deployment, s: Settings, log: Mapping[str, Any]) -> Tuple[Deployment, Settings]:
    """The deployment with the memory and version of a log; its limits are the flags' by now."""
    if log.get("tp", d.tp) != d.tp:
        raise UserError(f"--startup-log is of TP={log['tp']:.0f}, the deployment of TP={d.tp}; "
                        f"add --tp {log['tp']:.0f}")
    check_logged_model(d, log.get("model", ""))
    gpu = d.gpu._replace(torch_bytes=log.get("total_bytes", d.gpu.torch_bytes))
    asked, d = s.asked, d._replace(gpu=gpu)
    return d, engine_settings(d, asked._replace(version=asked.version or log.get("version", ())))


def check_logged_model(d: Deployment, name: str) -> None:
    """Raise UserError where a log names a model that is known here and has another shape."""
    known = known_as(name)[0] if name else ""
    row = next((r for r in presets().get("models", ()) if r["name"] == known), {})
    if any(key in row and getattr(d.model, key) not in (0, row[key])
           for key in ("layers", "hidden", "vocab")):
        raise UserError(f"--startup-log is of {name}, the deployment of {d.model.name}; name that "
                        "model, or paste this one's log")


def logged_precisions(log: Mapping[str, Any]) -> Tuple[str, str]:
    """(weights, KV cache) of a start-up log by our names; '' where it is the checkpoint's own."""
    method, dtype = (str(log.get(key, "")).lower() for key in ("quantization", "kv_cache_dtype"))
    weights = {**QUANTISATIONS, **SPELLINGS}.get(method, method)
    dtype = dtype.replace("float8", "fp8").replace("fp8_e4m3fn", "fp8")
    kv = KV_READ.get(dtype, SPELLINGS.get(dtype, dtype))
    return weights if weights in WEIGHTS else "", kv if kv in KV else ""


def other_weights(d: Deployment, log: Mapping[str, Any]) -> str:
    """How a log's weights are stored, where not as the deployment's; '' where alike or unknown."""
    logged = "bf16" if log.get("quantization") == "None" else logged_precisions(log)[0]
    return logged if logged and WEIGHTS[logged].bytes != WEIGHTS.get(
        d.weights.name, WEIGHTS[logged]).bytes else ""


def gross_difference(log: Mapping[str, Any], found: EngineAnswer) -> str:
    """What of a log no error of the prediction explains, in words; '' where nothing is.

    The KV tokens only past the band of the memory too: a small pool is a remainder of large parts.
    """
    room = max(1.0, found.memory.available_bytes)
    odd = []
    for what, key, predicted, low, high in (
            ("weights", "weights_bytes", found.memory.weights_bytes, 1.0, 1.0),
            ("KV tokens", "kv_cache_tokens", found.tokens, found.low_bytes / room,
             found.high_bytes / room)):
        share = log.get(key, predicted) / predicted if predicted > 0 else 1.0
        if abs(share - 1) > GROSS and not low <= share <= high:
            odd.append(f"{what} {share - 1:+.0%}")
    return ", ".join(odd)


def log_warnings(d: Deployment, s: Settings, log: Mapping[str, Any],
                 reserve: Optional[float], found: EngineAnswer) -> Iterator[str]:
    """Where a log and the deployment it is put beside contradict each other."""
    weights, kv, expected = other_weights(d, log), logged_precisions(log)[1], d.gpu.torch_bytes
    total = log.get("total_bytes", expected)
    other_kv = (kv or log.get("kv_cache_dtype") == "auto") and (
        d.kv.bytes != KV[kv or "bf16"].bytes)
    if "asked_engine" in log:
        yield f"the log is {s.engine}'s: --engine {log['asked_engine']} is not used"
    if weights:
        yield f"the log's weights are {weights}, the deployment's {d.weights.name} (--weights)"
    if other_kv:
        yield f"the log's KV cache is {kv or 'auto'}, the deployment's {d.kv.name} (--kv)"
    other_gpu = abs(total / expected - 1) > SAME_GPU
    if other_gpu:
        yield (f"the log's GPU has {total / GIB:.2f} GiB, {d.gpu.name} {expected / GIB:.2f}; name "
               f"it with --gpu, or give --gpu-memory-gib {total / GIB:.2f}")
    gross = gross_difference(log, found)
    if gross and not (weights or other_kv or other_gpu):  # which say why
        yield (f"the log is of another deployment than described: {gross} against what it would "
               "log; check the model, --weights and --kv")
    if reserve is not None and reserve > LARGE_RESERVE * s.util * total:
        yield (f"a reserve of {reserve / GIB:.2f} GiB is more than engines take: is the log of "
               f"this GPU (--gpu {d.gpu.name}) and utilisation (--util {s.util:g})?")


GROSS = 0.25  # as far off is no error of the prediction
SAME_GPU = 0.04  # how far the totals of one kind of GPU are apart
LARGE_RESERVE, SMALL_RESERVE = 0.4, -0.02  # of the memory asked for, of all


def logged_of(d: Deployment, s: Settings, log: Mapping[str, Any]) -> Logged:
    """What a log says of weights, and leaves for neither weights nor KV [B].

    total * utilisation - weights - KV, the KV cache as stated, else its blocks or tokens at this
    model's bytes; None where the log does not say enough. The utilisation is the log's own.
    """
    weights, left = log.get("weights_bytes"), log.get("available_kv_bytes")
    if left is None and {"num_gpu_blocks", "kv_cache_tokens"} & set(log):
        groups, block = kv_groups(d, s)
        blocks = log.get("num_gpu_blocks")
        if blocks is None and len(groups) == 1:
            blocks = log["kv_cache_tokens"] / groups[0].block_tokens
        left = None if blocks is None else blocks * block * d.stage_share
    own = None if other_weights(d, log) else weights
    if left is None:
        return Logged(None, own)
    base = engine_stages(d, s._replace(util=log.get("util", s.util)), Logged(0.0, weights))
    return Logged(min(m.requested_bytes - m.weights_bytes for m in base) - left, own)


LOGGED = (("weights_bytes", "weights"), ("activation_bytes", "activations"),
          ("other_bytes", "not torch's"), ("consumed_bytes", "weights and not torch's"),
          ("graphs_bytes", "CUDA graphs"),
          ("available_kv_bytes", "KV memory"), ("num_gpu_blocks", "blocks"),
          ("kv_cache_tokens", "KV tokens"), ("max_concurrency", "concurrency"))


def say_startup_log(case: Case, answer: Answer) -> None:
    """A pasted log beside the prediction, line by line, and the budget with the log's reserve."""
    log = case.args.startup_log
    d, s = as_logged(case.d, settings_of(case.d, case.args), log)
    s = s._replace(util=log.get("util", s.util))
    found = engine_answer(d, s)
    predicted = {"num_gpu_blocks": found.pool.blocks if found.pool else None,
                 "kv_cache_tokens": found.tokens, "max_concurrency": found.concurrency,
                 "available_kv_bytes": found.memory.available_bytes,
                 "consumed_bytes": found.memory.weights_bytes + found.memory.other_bytes}
    reserve = logged_of(d, s, log).reserve_bytes
    if reserve is not None and reserve < SMALL_RESERVE * d.gpu.torch_bytes:
        raise UserError(f"--startup-log has more weights and KV cache than {s.util:g} of "
                        f"{d.gpu.torch_bytes / GIB:.2f} GiB; is it of this GPU (--gpu "
                        f"{d.gpu.name}), utilisation (--util) and model?")
    warnings = answer.add("startup_log.warnings", list(log_warnings(
        case.d, s, log, reserve, found)))
    lines = [f"WARNING: {text}" for text in warnings]
    taken = [f"--{name} {log[f'taken_{name}']}" for name in ("weights", "kv")
             if f"taken_{name}" in log]
    taken += log.get("taken_limits", [])
    lines += [f"read from it: {', '.join(taken)}"] if taken else []
    if "starts" in log:
        lines.append(f"{log['starts']} starts in the file: the last is read")
    for name, label in LOGGED:
        if name not in log:
            continue
        unit = "B" if name.endswith("_bytes") else ""
        answer.add(f"startup_log.{name}", log[name], unit)
        value = answer.add(f"startup_log.predicted_{name}",
                           predicted.get(name, getattr(found.memory, name, None)), unit)
        if value is not None:
            off = f", {value / log[name] - 1:+.1%}" if min(value, log[name]) > 0 else ""
            logged, mine = ("none" if size <= 0 and name == "available_kv_bytes" else
                            scaled(size, unit) for size in (log[name], value))
            lines.append(f"{label}: logged {logged}, predicted {mine}{off}")
    answer.add("startup_log.reserve_bytes", reserve, "B",
               source="total * utilisation - weights - KV cache of the log")
    if reserve is not None:
        reserve = max(0.0, reserve)  # SGLang has none: under 0 is rounding
        seqs = memory_of(case.d._replace(reserve_bytes=reserve)).max_seqs
        answer.add("startup_log.budget_max_seqs", seqs, "sequences")
        answer.add("startup_log.budget_max_kv_tokens", round(seqs * d.ctx_tokens), "tokens")
        lines.append(f"reserve {scaled(reserve, 'B')} (--reserve-gib {reserve / GIB:.2f}): the "
                     f"budget above becomes {count(seqs * d.ctx_tokens)} tokens, "
                     f"{sequences_text(seqs)} sequences of {count(d.ctx_tokens)}")
    answer.say("STARTUP LOG", *lines)


# The plan: the runbook's nine steps, then five lines for a customer.


def say_plan(case: Case, answer: Answer) -> None:
    """From SLO to deployment: nine steps with their work, then what a customer is sent."""
    plan = case.plan
    if plan is None:
        return
    answer.lines.append("")
    steps = (plan_collect, plan_fit, plan_tpot_floor, plan_ttft_floor, plan_configure,
             plan_measure, plan_scale_out, plan_watch, plan_report)
    shown = {plan_collect, plan_fit, plan_scale_out} if plan.binding == "weights" else {
        plan_collect, plan_fit, plan_tpot_floor, plan_ttft_floor, plan_scale_out}
    for say in steps:
        kept = len(answer.lines)
        say(case, plan, answer)
        if plan.sustained is None and say not in shown:
            del answer.lines[kept:]  # the JSON keeps its keys
    answer.lines.append("")


def slo_text(load: Load) -> str:
    """The SLOs in words."""
    return ", ".join(f"{name.upper()} p99 < {scaled(slo_s, 's')}"
                     for name, slo_s in load.slos.items()) or "none: throughput alone"


def plan_collect(case: Case, plan: Plan, answer: Answer) -> None:
    """Step 1: what was asked."""
    load = plan.load
    answer.add("plan.engine", plan.engine)
    answer.add("plan.rate_rps", load.rate_rps, "req/s", source="--rate, at peak")
    answer.add("plan.mean_rate_rps", load.mean_rate_rps, "req/s", source="--mean-rate")
    for name in SLOS:
        answer.add(f"plan.slo_{name}_s", load.slos.get(name), "s", source=f"--slo-{name}-ms, p99")
    answer.inputs("plan.", input_len=load.input_len.text, output_len=load.output_len.text)
    answer.add("plan.shared_prefix_tokens", load.shared_tokens, "tokens",
               source="--shared-prefix-len")
    fresh = answer.add("plan.uncached_input_tokens", past_prefix(
        load.input_len, load.shared_tokens)[0], "tokens", source="mean past the shared prefix; a "
        "shorter prompt is the prefix and one token")
    rate = f"peak {figure(load.rate_rps)} req/s" if load.rate_rps else (
        f"no rate: {HEADROOM:.0%} of what it sustains")
    shared = (f", {count(load.shared_tokens)} of it shared, {count(fresh)} past that on average"
              if load.shared_tokens else "")
    gone = ("; answers of one token have no TPOT: its SLO does not apply"
            if case.args.slo_tpot_ms and load.slo_tpot_s == math.inf else "")
    answer.say("1 COLLECT", f"{rate}; input {load.input_len.text}{shared}; output "
               f"{load.output_len.text}; {slo_text(load)}{gone}")


def plan_fit(case: Case, plan: Plan, answer: Answer) -> None:
    """Step 2: Little's law against the KV pool."""
    load, each = plan.load, plan.kv_tokens_per_replica
    answer.add("plan.in_flight", plan.in_flight, "requests", "rate * (ttft_allowance + output * "
               "tpot)", f"{LITTLE}; TPOT at {TPOT_MARGIN:.0%} of its SLO", rate=plan.rate_rps,
               ttft_allowance=TTFT_ALLOWANCE_S, output=load.output_len.mean,
               tpot=plan.planned_tpot_s)
    needed = answer.work("plan.kv_tokens_needed", "tokens", "in_flight * (input + output)",
                         "shared prefix not deducted", input=load.input_len.mean,
                         output=load.output_len.mean)
    wanted = answer.work("plan.kv_tokens_wanted", "tokens", "needed * margin",
                         "the runbook's 1.5", needed=needed, margin=KV_MARGIN)
    held = answer.work("plan.kv_tokens_held", "tokens", "per_replica * replicas", BUDGET,
                       per_replica=each, replicas=plan.replicas)
    answer.add("plan.kv_holds", held >= wanted)
    least = answer.add("plan.replicas_for_kv", math.ceil(wanted / each) if each else None)
    if not plan.replicas:
        answer.say("2 FIT", f"one replica holds {count(each)} KV tokens; a "
                   f"request takes {count(load.context_tokens)} on average")
        return
    verb = "hold" + "s" * (plan.replicas == 1)
    if held < wanted:
        verb = ("does" if plan.replicas == 1 else "do") + " NOT hold"
    answer.say("2 FIT", f"Little: {figure(plan.rate_rps)} x ({TTFT_ALLOWANCE_S:g} s + "
               f"{count(load.output_len.mean)} x {scaled(plan.planned_tpot_s, 's')}) = "
               f"{mean_count(plan.in_flight)} in flight; x {count(load.context_tokens)} tokens = "
               f"{count(needed)} KV tokens, x {KV_MARGIN:g} = {count(wanted)}: at least "
               f"{counted(least or 1, 'replica')} of {count(each)}; the {plan.replicas} "
               f"planned {verb} them"
               + ("" if held >= wanted else " by this rule"))


def plan_tpot_floor(case: Case, plan: Plan, answer: Answer) -> None:
    """Step 3: can one stream be fast enough at all, and what is expected at this load."""
    load = plan.load
    floor = answer.add("plan.tpot_floor_s", decode_step(case.d, 1, mbu=TYPICAL_MBU).step_s, "s",
                       source=f"one stream at {TYPICAL_MBU:.0%} MBU")
    line = f"one stream {scaled(floor, 's')} at {TYPICAL_MBU:.0%} MBU"
    if plan.steady:
        tpot = answer.add("plan.tpot_s", plan.steady.tpot_s, "s", source=PLAN_SOURCE)
        low, high = (answer.add(f"plan.tpot_{name}_s", value, "s", source=case.cal.basis)
                     for name, value in zip(("low", "high"), band_s(
                         case.d, plan.steady.batch, tpot, case.cal)))
        line += (f"; expected {scaled(tpot, 's')} ({figure(low / MS)} to {scaled(high, 's')}) with "
                 f"{figure(plan.steady.batch)} in flight a replica, prefills included")
    if load.slo_tpot_s < math.inf:
        verdict = "met with margin" if floor < load.slo_tpot_s * TPOT_MARGIN else \
            "NOT met with margin: raise TP, quantise, speculate, or more bandwidth"
        line += f"; SLO {scaled(load.slo_tpot_s, 's')}: floor {verdict}"
    answer.say("3 TPOT FLOOR", line)


def plan_ttft_floor(case: Case, plan: Plan, answer: Answer) -> None:
    """Step 4: the prefill of the p99 prompt, cold and with its prefix cached."""
    d, load = case.d, plan.load
    long = answer.add("plan.input_p99_tokens", load.input_len.quantile(0.99), "tokens",
                      source="p99 of --input-len")
    cold, warm = (answer.add(
        key, prefill_seconds(d, tokens, TYPICAL_MFU), "s", formula, source,
        **dict(numbers, mfu=TYPICAL_MFU)) for key, tokens, source in (
            ("plan.ttft_floor_s", long, f"p99 prompt at {TYPICAL_MFU:.0%} of the peak"),
            ("plan.ttft_floor_cached_s", max(1.0, long - load.shared_tokens),
             "the same with the shared prefix cached"))
        for formula, numbers in (prefill_formula(d, tokens),))
    line = f"p99 prompt of {count(long)}: {scaled(cold, 's')} cold"
    if load.shared_tokens:
        line += f", {scaled(warm, 's')} with the prefix cached"
    if plan.steady:
        ttft = answer.add("plan.ttft_p99_s", plan.steady.ttft_p99_s, "s",
                          source="wait (M/G/1), steps, prefill; deviations of "
                          "wait and prompt length as independent")
        line += f"; about {figure(ttft / MS, 2)} ms p99 with queueing at the planned load (rough)"
    if load.slo_ttft_s < math.inf:
        room = ("does NOT fit: TP, CP, caching, or P/D" if warm > load.slo_ttft_s else
                "fits only with the prefix cached" if cold > load.slo_ttft_s else
                "fits, with little room to queue" if cold > load.slo_ttft_s / 2 else "fits")
        line += f"; SLO {scaled(load.slo_ttft_s, 's')}: floor {room}"
    answer.say("4 TTFT FLOOR", line)


def plan_configure(case: Case, plan: Plan, answer: Answer) -> None:
    """Step 5: the flags that follow."""
    d, load, most = case.d, plan.load, (case.d.model.max_len or math.inf) - (
        plan.load.output_len.mean)
    rejected = answer.add("plan.rejected_share", sum(
        load.input_len.quantile((i + 0.5) / 1000) > most for i in range(1000)) / 1000)
    answer.add("plan.max_model_len", plan.max_model_len, "tokens",
               source="p99.9 input + p99.9 output, up to a multiple of 1,024")
    answer.add("plan.max_num_seqs", plan.max_num_seqs, "sequences", source="in flight a replica x "
               f"{SEQS_MARGIN:g}, up to a multiple of 8")
    answer.add("plan.max_num_batched_tokens", plan.max_num_batched_tokens, "tokens",
               source="2k to 8k: 2,048 for a TPOT SLO up to 25 ms, 4,096 up to 60 ms")
    length, why = plan.max_model_len, "p99.9 context"
    if "ctx" in case.args.given:
        length, why = d.ctx_tokens, f"as given; p99.9 context {plan.max_model_len}"
    answer.add("plan.flags", {name: value for name, value, wanted in (
        ("tensor-parallel-size", d.tp, True), ("gpu-memory-utilization", d.util, True),
        ("max-model-len", length, True), ("max-num-seqs", plan.max_num_seqs, True),
        ("max-num-batched-tokens", plan.max_num_batched_tokens, True),
        ("enable-prefix-caching", True, True), ("kv-cache-dtype", d.kv.name, d.kv.bytes <= 1),
        ("quantization", d.weights.name,
         d.weights.bytes < 2 and d.model.native != d.weights.name),
        ("data-parallel-size", d.dp, d.attention_dp > 1),
        ("enable-expert-parallel", True, d.ep > 1)) if wanted})
    stall = answer.add("plan.chunk_stall_s", expected_prefill_s(
        d, plan.max_num_batched_tokens, case.cal), "s", source="a step filled with prefill, "
        "expected")
    lines = [f"max-model-len {length} ({why}); max-num-seqs "
             f"{plan.max_num_seqs} ({plan.slots_text}); max-num-batched-tokens "
             f"{plan.max_num_batched_tokens} (a full chunk holds every stream up "
             f"{scaled(stall, 's')})"]
    if rejected:
        lines.append(f"{rejected:.1%} of the requests are longer than the model's own "
                     f"{count(d.model.max_len)} tokens: the engine rejects them")
    if load.shared_tokens:
        lines.append("prefix caching on, behind a prefix-aware router: the shared part is "
                     "prefilled once a replica")
    if plan.binding == "kv" and d.kv.bytes > 1:
        lines.append("KV-bound: --kv fp8 would hold twice the tokens, after an accuracy check")
    answer.say("5 CONFIGURE", *lines)


def plan_measure(case: Case, plan: Plan, answer: Answer) -> None:
    """Step 6: the load test that settles it."""
    load = plan.load
    words = ["loadgen.py URL --find-goodput", f"--input-len {load.input_len.text}",
             f"--output-len {load.output_len.text}"]
    words += [f"--shared-prefix-len {load.shared_tokens}"] * bool(load.shared_tokens)
    words += [f"--slo-{name}-ms {figure(slo_s / MS, 6)}" for name, slo_s in load.slos.items()]
    answer.say("6 MEASURE", "one replica: " + answer.add("plan.measure_command", " ".join(words)))


def plan_scale_out(case: Case, plan: Plan, answer: Answer) -> None:
    """Step 7: replicas, the margins in them, and whether P/D or speculation would pay."""
    load, best = plan.load, plan.sustained
    rate = answer.add("plan.rate_per_replica_rps", plan.rate_per_replica_rps, "req/s",
                      source=PLAN_SOURCE)
    answer.add("plan.binding", plan.binding)
    answer.add("plan.batch_per_replica", plan.steady and plan.steady.batch, "requests",
               source=PLAN_SOURCE)
    if best is None:
        answer.inputs("plan.", replicas=0, spares=0)
        answer.say("7 SCALE OUT", "not even one request at a time meets this: "
                   f"{LIMIT_NAMES[plan.binding]} gives way first; {LIMIT_KNOBS[plan.binding]}")
        return
    answer.add("plan.batch_sustained", best.batch, "requests", source=PLAN_SOURCE)
    if load.rate_rps:
        answer.add("plan.replicas", plan.replicas, "", "ceil(rate / rate_per_replica / headroom)",
                   "the runbook", rate=load.rate_rps, rate_per_replica=rate, headroom=HEADROOM)
    else:
        answer.add("plan.replicas", plan.replicas)
    answer.add("plan.spares", plan.spares, source="N+1")
    answer.add("plan.gpus", plan.gpus, "GPUs")
    answer.add("plan.planned_rate_rps", plan.rate_rps, "req/s", source="--rate, else "
               f"{HEADROOM:.0%} of what the replicas that the flags name sustain")
    lines = [f"one replica sustains {figure(rate)} req/s ({figure(best.batch)} in flight, TPOT "
             f"{scaled(best.tpot_s, 's')}, TTFT p99 {scaled(best.ttft_p99_s, 's')}, "
             f"{best.prefill_share:.0%} of it prefill); one more breaks "
             f"{LIMIT_NAMES[plan.binding]}"]
    if load.rate_rps:
        lines.append(f"ceil({figure(load.rate_rps)} / {figure(rate)} / {HEADROOM:g}) = "
                     f"{counted(plan.replicas, 'replica')} = {counted(plan.gpus, 'GPU')}, and "
                     f"{plan.spares} spare for N+1")
        if plan.fleet != plan.replicas:
            lines.append(f"the {plan.fleet} replicas named (--dp) would run at "
                         f"{load.rate_rps / plan.fleet / rate:.0%} of what they sustain")
        lines.append(margins_text(case, plan, load.rate_rps, answer))
    else:
        lines.append(f"planned at {HEADROOM:.0%} of that: {figure(plan.rate_rps)} req/s on "
                     f"{counted(plan.replicas, 'replica')} = {counted(plan.gpus, 'GPU')}")
    answer.add("plan.rate_within_slots_rps", plan.borne_rps, "req/s", source=f"the same with "
               f"{SEQS_MARGIN:g}x the mean in flight in max-num-seqs")
    if plan.borne_rps < rate:
        lines.append(f"its {plan.max_num_seqs} slots, {SEQS_MARGIN:g}x the mean in flight, are for "
                     f"{figure(plan.borne_rps)} req/s: enough for the plan, to be raised where a "
                     "replica must carry more")
    if plan.replicas > 1 and load.rate_rps:
        left = load.rate_rps / (plan.replicas - 1) / plan.borne_rps
        lines.append(f"with one replica down the others run at {left:.0%} of what they bear")
    lines += [disaggregation_text(case, plan, answer), speculation_text(case, plan, answer)]
    answer.say("7 SCALE OUT", *lines)


LIMIT_NAMES = {"max_model_len": "the KV pool, by one longest request (p99.9) alone,",
               "weights": "the GPU's memory, by the weights alone,", "kv": "the KV pool",
               "max_num_seqs": "max-num-seqs", "ttft": "the TTFT SLO",
               "tpot": f"{TPOT_MARGIN:.0%} of the TPOT SLO", "e2e": f"{TPOT_MARGIN:.0%} of the E2E "
               "SLO"}
LIMIT_KNOBS = {"max_model_len": "more TP, --kv fp8, fewer weight bytes, shorter requests",
               "weights": "more TP, fewer weight bytes, a larger GPU (WOULD DO, above)",
               "kv": "--kv fp8, more TP, fewer weight bytes",
               "max_num_seqs": "raise --max-num-seqs",
               "ttft": "TP or CP, FP8 weights, prefix caching, P/D disaggregation",
               "tpot": "more TP, fewer weight bytes, speculative decoding, more bandwidth",
               "e2e": "more TP, fewer weight bytes, shorter outputs"}


def margins_text(case: Case, plan: Plan, rate_rps: float, answer: Answer) -> str:
    """Each stacked margin by name, and their product."""
    full, _ = Replica(case.d, plan.load, case.cal).sustained(1.0)
    exact = rate_rps / plan.rate_per_replica_rps / HEADROOM
    margins = {"tpot_margin": full.rate_rps / plan.rate_per_replica_rps if full else 1.0,
               "headroom": 1 / HEADROOM, "rounding_up": plan.replicas / exact}
    product = answer.work("plan.margin_product", "x", " * ".join(margins),
                          "each margin that is in the replica count", **margins)
    answer.add("plan.margins", {**margins, "kv_tokens": KV_MARGIN, "batch_slots": SEQS_MARGIN,
                                "ttft_allowance_s": TTFT_ALLOWANCE_S})
    return (f"margins in the replicas: rate at the whole SLO {figure(margins['tpot_margin'])}x, "
            f"headroom {figure(1 / HEADROOM)}x, rounding up {figure(margins['rounding_up'])}x = "
            f"{figure(product)}x the least that could do; apart: KV x {KV_MARGIN:g}, slots x "
            f"{SEQS_MARGIN:g}, the spare")


def disaggregation_text(case: Case, plan: Plan, answer: Answer) -> str:
    """Whether prefill and decode on GPUs of their own would take fewer of them."""
    replica, link = Replica(case.d, plan.load, case.cal), case.args.kv_link or case.d.far_link
    seconds = shipped_bytes(case.d, plan.load.input_len.mean) / link.bytes_s if link else None
    prefill_s = replica.prefill_s
    prefill_rps, _ = halved(0.0, 1 / prefill_s, 20, lambda rate: sum(replica.wait(
        rate, prefill_s)) + prefill_s + (seconds or 0.0) <= plan.load.slo_ttft_s)
    replica.prefill_s = replica.p99_prefill_s = 0.0
    decode, _ = replica.sustained()
    pools = [replicas_for(plan.rate_rps, each) if each else None
             for each in (prefill_rps, decode.rate_rps if decode else 0.0)]
    pays = answer.add("plan.disaggregation.pays",
                      bool(all(pools)) and sum(filter(None, pools)) < plan.replicas)
    answer.inputs("plan.disaggregation.", prefill_replicas=pools[0], decode_replicas=pools[1])
    answer.add("plan.disaggregation.kv_transfer_s", seconds, "s", source="--kv-link, or RDMA NDR")
    shown = [counted(n, "replica") if n else "no number of replicas" for n in pools]
    why = f"{shown[0]} to prefill + {shown[1]} to decode against {plan.replicas} mixed"
    if link and seconds:
        why += f"; {scaled(seconds, 's')} a request to ship KV over {link.name}"
    return f"P/D disaggregation {'would pay' if pays else 'would not pay'}: {why}"


def speculation_text(case: Case, plan: Plan, answer: Answer) -> str:
    """Whether drafting would pay at the planned batch, by the step-time equation."""
    alpha, gamma, assumed = acceptance_of(case.args)
    batch = max(1, round(plan.steady.batch if plan.steady else 1))
    gain = answer.add("plan.speculation.speedup", speculative_speedup(
        case.d, batch, alpha, gamma, case.args.spec_cost), "x", source=f"{LEVIATHAN} at this batch")
    answer.add("plan.speculation.pays", gain > 1)
    return (f"speculative decoding {'would pay' if gain > 1 else 'would not pay'}: "
            f"{gain:.2f}x at batch {batch} with gamma {gamma}, acceptance {figure(alpha)}"
            f"{' (assumed: measure it)' if assumed else ''}; "
            "the bound, which a real drafter does not reach")


def plan_watch(case: Case, plan: Plan, answer: Answer) -> None:
    """Step 8: what to scale and alert on."""
    answer.say("8 AUTOSCALE", "scale on queue depth and KV utilisation, never on GPU utilisation; "
               "alert on TTFT and TPOT p99 against the SLO and on preemptions; "
               f"{plan.max_num_seqs} slots a replica: a queue that stays above zero is the signal "
               "(--autoscale)")


def plan_report(case: Case, plan: Plan, answer: Answer) -> None:
    """Step 9: what it costs, and five lines that a customer could be sent."""
    d, load, steady, cal = case.d, plan.load, plan.steady, case.cal
    cost = plan_cost(case, plan, answer)
    answer.say("9 REPORT", *cost, *plan_inverse(case, plan, answer))
    if not plan.replicas or not steady:
        return
    answer.lines.append("")
    answer.say("PLAN", f"{counted(plan.replicas, 'replica')} of {d.model.name} on "
               f"{d.replica_gpus}x {d.gpu.title} each ({layout_text(one_replica(case))}, weights "
               f"{d.weights.name}, KV {d.kv.name}), {counted(plan.gpus, 'GPU')}; "
               f"{plan.spares} more replica for N+1")
    expected = steady.rate_rps * steady.e2e_s * plan.replicas
    low_s, high_s = band_s(d, steady.batch, steady.tpot_s, cal)
    of = "" if load.rate_rps else " (no rate was given)"
    seats = plan.replicas * plan.max_num_seqs
    room = (f", room for {mean_count(plan.in_flight)} planned" if seats >= plan.in_flight else
            f", {mean_count(plan.in_flight)} planned, room for {count(seats)} in all slots")
    answer.say("LOAD", f"up to {figure(plan.rate_rps)} requests/s{of} of "
               f"{count(load.input_len.mean)} tokens in, {count(load.output_len.mean)} out: about "
               f"{mean_count(expected)} at once expected" + (room if load.rate_rps else ""))
    answer.say("SLO", f"{slo_text(load)}; expected TPOT {scaled(steady.tpot_s, 's')} (80% "
               f"band {figure(low_s / MS)} to {scaled(high_s, 's')}) on average, TTFT p99 about "
               f"{figure(steady.ttft_p99_s / MS, 2)} ms (rough): estimates until measured")
    capped = (f" ({figure(plan.borne_rps)} within its {plan.max_num_seqs} slots)"
              if plan.borne_rps < plan.rate_per_replica_rps else "")
    answer.say("LIMIT", f"{figure(plan.rate_per_replica_rps)} requests/s a replica{capped}, where "
               f"{LIMIT_NAMES[plan.binding]} gives way; planned at {HEADROOM:.0%} of it at most")
    price = case.args.gpu_price
    spare = f"; ${price * d.replica_gpus:.2f}/h more for the spare" if price else ""
    answer.say("COST", (cost[0] if cost else "no price given: --gpu-price") + spare)


def plan_cost(case: Case, plan: Plan, answer: Answer) -> List[str]:
    """The bill over the tokens, at the peak and at the mean rate; input and output apart."""
    load, price = plan.load, case.args.gpu_price
    peak = "at peak" if load.rate_rps else "at the planned rate"
    hourly = answer.add("plan.cost_per_hour", price and price * plan.gpus, "$")
    if not price or not plan.steady or not plan.replicas:
        answer.inputs("plan.cost_per_1m_", output=None, input=None, output_apart=None)
        if not plan.replicas:
            return []
        hours = per_1m(plan.gpus, plan.rate_rps * load.output_len.mean)
        why = f"no price of {case.d.gpu.name}" if case.args.prices else "--gpu-price for money"
        return [f"{figure(hours)} GPU-hours per 1M output tokens {peak}; {why}"]
    share = plan.steady.prefill_share  # the rest of a busy replica's time is decode
    lines = []
    for name, when, at in (("", peak, plan.rate_rps),
                           ("_at_mean_rate", "at the mean rate", load.mean_rate_rps)):
        if not at:
            answer.add(f"plan.cost_per_1m_output{name}", None)
            continue
        whole = answer.work(f"plan.cost_per_1m_output{name}", "$", PER_1M,
                            "the whole bill over the output tokens", per_hour=hourly,
                            tok_s=at * load.output_len.mean)
        given = answer.work(f"plan.cost_per_1m_input{name}", "$",
                            "per_hour * share / (tok_s * 3600) * 1e6",
                            "prefill's share of the GPU time, over the input tokens",
                            per_hour=hourly, share=share, tok_s=at * load.input_len.mean)
        apart = answer.work(f"plan.cost_per_1m_output_apart{name}", "$", "whole * (1 - share)",
                            "decode's share", whole=whole, share=share)
        lines.append(f"${hourly:.2f}/h; {when} ${whole:.3f} per 1M output tokens with the whole "
                     f"bill on them, or ${given:.3f} per 1M input + ${apart:.3f} per 1M output")
    return lines


def plan_inverse(case: Case, plan: Plan, answer: Answer) -> List[str]:
    """The same fixed point asked backwards: users, longest context, cheapest GPU."""
    d, best, load, one = case.d, plan.sustained, plan.load, plan.load.input_len
    users = answer.add("plan.inverse.max_in_flight", best and int(d.replicas * min(
        best.rate_rps * best.e2e_s, plan.max_num_seqs)), "requests", source=f"{LITTLE}, at the "
        "sustained rate; at most one in each batch slot")
    asked = min(d.asked or (round(plan.steady.batch) if plan.steady else 1) or 1,
                load.given_seqs or SEQS_MOST)  # more would not run at once

    def held(times: float) -> bool:
        prompts = Lengths(one.text, one.mean * times, lambda q: one.quantile(q) * times)
        shared = min(load.shared_tokens, int(max(0.0, prompts.mean - 1)))
        other = load._replace(input_len=prompts, shared_tokens=shared)
        return not Replica(d, other, case.cal).broken(asked, TPOT_MARGIN)

    low, _ = halved(0.0, (d.model.max_len or 2**20) / one.mean, 20, held)
    longest = answer.add("plan.inverse.longest_context_tokens", int(
        low * one.mean + load.output_len.mean) if low > 1e-4 else 0, "tokens",
        source="every limit of the fixed point, prompts scaled, by bisection")
    most = f"at most {counted(users, 'user')}" if users else "under one user, on average,"
    lines = [f"{most} in flight on "
             f"{counted(d.replicas, 'replica')}; longest mean request with {asked} in flight"
             f"{' a replica' if d.replicas > 1 else ''}: "
             + (f"{count(longest)} tokens" if longest else "none, of any length")]
    if case.ranked:
        top = answer.add("plan.inverse.cheapest_gpu", case.ranked[0].d.gpu.name)
        least = "fewest GPUs" if load.rate_rps else "fewest GPU-hours a token"
        lines.append(f"{'cheapest GPU' if case.ranked[0].per_hour else least}: {top}")
        answer.add("plan.ranked", [candidate_row(c) for c in case.ranked[:20]])
    return lines


def candidate_row(c: Candidate) -> Dict[str, Any]:
    """One line of the search's table."""
    d, plan = c.d, c.plan
    return {"gpu": d.gpu.name, "layout": layout_text(d), "weights": d.weights.name,
            "kv": d.kv.name, "replicas": plan.replicas, "gpus": plan.gpus,
            "rate_per_replica_rps": plan.rate_per_replica_rps, "per_hour": c.per_hour,
            "cost_per_1m_output": c.per_hour and per_1m(
                c.per_hour, plan.rate_rps * plan.load.output_len.mean),
            "tpot_s": plan.steady.tpot_s if plan.steady else None, "binding": plan.binding}


SEARCH = (
    Column("gpu", "GPU", str), Column("layout", "layout", str), Column("weights", "weights", str),
    Column("kv", "KV", str), Column("replicas", "replicas", str), Column("gpus", "GPUs", str),
    Column("rate_per_replica_rps", "req/s each", figure), Column("tpot_s", "TPOT ms", in_ms),
    Column("per_hour", "$/h", "{:,.2f}".format),
    Column("cost_per_1m_output", "$/1M out", "{:.3f}".format), Column("binding", "binds", str))


def say_search(case: Case, answer: Answer) -> None:
    """The cheapest deployments that meet the load, best of each GPU first."""
    if not case.ranked:
        if case.searched:
            answer.say("SEARCH", "none of the deployments tried can do this; one is answered below "
                       "to show what breaks")
        return
    best: Dict[str, Candidate] = {}
    for found in case.ranked:
        best.setdefault(found.d.gpu.name, found)
    first = case.ranked[0]
    basis = "cost" if first.per_hour else "GPUs (no --gpu-price)"
    met = "meet the load"
    if not first.plan.load.rate_rps:
        basis = ("cost" if first.per_hour else "GPU-hours (no --gpu-price)") + " per output token"
        met = "meet the SLOs" if first.plan.load.slos else "hold a request"
        met += f", each planned at {HEADROOM:.0%} of its own rate as none is given"
    answer.say("SEARCH", f"{len(case.ranked)} deployments {met}; the best of each GPU by {basis}, "
               "the first is answered below")
    answer.table(SEARCH, [candidate_row(c) for c in list(best.values())[:8]])
    widest = [max(c.d.weight_bytes for c in case.ranked), max(c.d.kv.bytes for c in case.ranked)]
    if [case.d.weight_bytes, case.d.kv.bytes] != widest:
        kept = "none of those tried can do this"
        for c in case.ranked:
            if [c.d.weight_bytes, c.d.kv.bytes] == widest:
                price = f", ${c.per_hour:.2f}/h" if c.per_hour else ""
                if price and not c.plan.load.rate_rps:
                    price += f", ${candidate_row(c)['cost_per_1m_output']:.3f} per 1M output tokens"
                kept = (f"{c.plan.replicas} x {c.d.gpu.name} {layout_text(c.d)}, weights "
                        f"{c.d.weights.name}, KV {c.d.kv.name}: "
                        f"{counted(c.plan.gpus, 'GPU')}{price}")
                break
        answer.say("", f"fewer bits need an accuracy check; without: {kept}")
    answer.lines.append("")


# ---- 9b. Save, measured, autoscale, defend -----------------------------------------------------
# What leaves for other tools (--save, --autoscale), and what comes back and is explained
# (--measured, --defend).

NOT_SAVED = ("save", "measured", "compare", "json", "explain", "list", "flags", "autoscale",
             "defend", "from", "startup-log")


def step_profile(d: Deployment, batch: int, cal: Calibration) -> Dict[str, float]:
    """The expected step as the constants of DESIGN's one equation, for loadgen's engine [s].

    t = max(decode_tokens * flop_s_per_token, weights_s + kv_s_per_token * sum(context))
        + prefill_tokens * prefill_s_per_token + sequences * sequence_s + overhead_s

    Each term is what the expectation loses when the GPU's arithmetic, its memory, or both are
    made endlessly fast; so they add up to expected_step_s at this batch. What is not linear (an
    MoE's touched experts, windows, recurrent states) is as at this batch and history.
    """
    def step(seqs: int, reads: bool, sums: bool, history: float = d.history_tokens) -> float:
        fast = d.gpu._replace(
            bandwidth_bytes_s=d.gpu.bandwidth_bytes_s * (1 if reads else ENDLESS),
            flop_s={kind: rate * (1 if sums else ENDLESS) for kind, rate in d.gpu.flop_s.items()})
        return expected_step_s(d._replace(gpu=fast, history_tokens=history), seqs, cal)

    fixed, one, more = (step(seqs, False, False) for seqs in (batch, 1, max(2, batch)))
    each = min(one, max(0.0, more - one) / (max(2, batch) - 1))
    nothing_read, all_read = step(batch, True, False, 0.0), step(batch, True, False)
    return {
        "weights_s": nothing_read - fixed,
        "kv_s_per_token": (all_read - nothing_read) / (batch * d.history_tokens),
        "flop_s_per_token": (step(batch, False, True) - fixed) / batch,
        "prefill_s_per_token": prompt_prefill_s(d, cal) / d.fresh_tokens,
        "sequence_s": each, "overhead_s": one - each}


def operating_batch(case: Case) -> int:
    """Sequences that one replica runs at once: as asked or planned, at most what it holds."""
    planned = case.plan.steady if case.plan and not case.d.asked else None
    return max(1, round(planned.batch) if planned else case.batch)


def flag_text(name: str, value: Any) -> Any:
    """A parsed flag's value as the command line writes it; no absolute path survives."""
    if name == "ep" and value == 0:
        return "all"
    if isinstance(value, Lengths):
        kind, _, path = value.text.partition(":")
        return f"hist:{portable(path)}" if kind == "hist" else value.text
    if isinstance(value, Link):
        return value.name
    if isinstance(value, tuple):  # a version
        return dotted(value)
    return portable(value) if name in ("config", "spec-model") else value


def portable(path: str) -> str:
    """The path without what belongs to this machine: a relative one whole, else its last name."""
    return os.path.basename(path.rstrip("/")) if os.path.isabs(path) else path


def saved_flags(case: Case) -> Dict[str, Any]:
    """The flags that describe the deployment and its work, by long name, as they were given."""
    d, args = case.d, case.args
    found = {flag.name: flag_text(flag.name, getattr(args, flag.field)) for flag in EVERY_FLAG
             if flag.field in args.given and flag.name not in NOT_SAVED}
    if args.model:
        found["model"] = portable(args.model)
    if args.gpu_price:
        found["gpu-price"] = args.gpu_price
    if case.ranked:  # what the search chose
        found.update(tp=d.tp, dp=d.dp, ep=d.ep)
        for name, other, value in (("weights", "weight-bytes", d.weights.name),
                                   ("kv", "kv-bytes", d.kv.name),
                                   ("gpu", "gpu-bandwidth", d.gpu.name)):
            found.update({} if other in found else {name: value})
    return found


def say_save(case: Case, answer: Answer) -> None:
    """The deployment as data, for loadgen's engine and for --measured; run() writes it.

    step_time is loadgen's Profile of one replica: its step at the operating batch, the engine's
    limits.
    """
    d, args, plan, m = case.d, case.args, case.plan, case.d.model
    s, batch = settings_of(d, args, plan), operating_batch(case)
    if not case.memory.fits:
        raise UserError(f"--save: {m.name} does not fit here, so there is nothing to serve; "
                        "without --save the answer says what would do")
    found = engine_answer(d, s) if args.engine else None
    if found and found.refusals:
        raise UserError(f"--save: {s.engine} would not start: {found.refusals[0].what}; "
                        f"{found.refusals[0].cure}")
    tokens = found.tokens if found else int(case.memory.max_seqs * d.ctx_tokens)
    block = max(BLOCK_TOKENS["vllm"], s.block_tokens)  # a token each is as right, and slow to serve
    answer.add("saved", {
        "model": {"name": m.name, "params": m.params, "active_params": m.active_params,
                  "id": hf_id(m, case.tables)},
        "hardware": {"gpu": d.gpu.name, "count": d.gpus, "replica_gpus": d.replica_gpus,
                     **{n: getattr(d, n) for n in ("tp", "pp", "dp", "ep", "dcp", "pcp", "util")}},
        "precision": {"weights": d.weights.name, "kv": d.kv.name, "compute": d.compute},
        "engine": args.engine, "flags": saved_flags(case),
        "lengths": {"input": args.input_len and flag_text("input-len", args.input_len),
                    "output": args.output_len and flag_text("output-len", args.output_len),
                    "shared_prefix": args.shared_prefix_len},
        "slo": {f"{name}_s": value and value * MS for name in SLOS
                for value in (getattr(args, f"slo_{name}_ms"),)},
        "price": {"gpu_per_hour": args.gpu_price},
        "plan": plan and {"replicas": plan.replicas, "spares": plan.spares,
                          "rate_per_replica_rps": plan.rate_per_replica_rps,
                          "rate_rps": plan.load.rate_rps},
        "expected": expected_of(d, batch, case.cal)._asdict(),
        "step_time_at": {"batch": batch, "history_tokens": d.history_tokens,
                         "basis": case.cal.basis},
        "step_time": {**step_profile(d, batch, case.cal), "max_num_seqs": s.max_num_seqs,
                      "max_num_batched_tokens": max(s.max_num_batched_tokens, s.max_num_seqs),
                      "max_model_len": s.max_model_len, "block_tokens": block,
                      "num_blocks": max(1, tokens // block), "prefix_caching": True}})
    moe = (f"; its expert reads are those of batch {batch}: too many below it, too few above"
           if m.experts else "")
    answer.say("SAVED", f"{os.path.basename(args.save)}: loadgen.py --mock {args.save} serves as "
               f"one replica is expected to, {scaled(expected_step_s(d, batch, case.cal), 's')} a "
               f"step at batch {batch} ({case.cal.basis}){moe}")


def write_json(path: str, value: Any) -> None:
    """Write a JSON file whole or not at all, over what is there; UserError where it cannot be."""
    import tempfile
    path, part = os.path.realpath(path), ""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(0, "it is a folder or a device")
        handle, part = tempfile.mkstemp(dir=os.path.dirname(path) or ".", suffix=".part")
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, allow_nan=False)
            file.write("\n")
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(part, 0o666 & ~umask)  # mkstemp's own is for the owner alone
        os.replace(part, path)
    except OSError as error:
        if part:
            os.unlink(part)
        raise UserError(f"{path} cannot be written: {error.strerror}; name a file in a folder "
                        "that is there") from None


# --measured: a loadgen run folder beside the bound and the expectation.

NOT_TRUSTED = {  # verdicts whose figures are no operating point
    "UNSTABLE": "the queue grew, so its latencies are of the run's length",
    "CLIENT-LIMITED": "the client was the limit",
    "INTERRUPTED": "it holds less than was planned"}
POSSIBLE = 1.2  # a share of the datasheet past which this was not the deployment measured
TOLD = ("rate_rps", "concurrency", "offered_rate_rps", "completed", "in_flight_mean",
        "output_tok_s", "goodput_rps", "attainment", "tpot_s.p50", "tpot_s.p99", "ttft_s.p50",
        "ttft_s.p99")


def read_run(folder: str) -> Tuple[Dict[str, Any], Optional[Dict[str, Any]]]:
    """summary.json of a loadgen run folder, and its deploy.json where there is one."""
    path = os.path.join(folder, "summary.json")
    if not os.path.isfile(path):
        raise UserError(f"--measured {folder}: no summary.json there; give a folder that "
                        "loadgen.py --out wrote")
    summary = read_json(path)
    runs = summary.get("runs")
    if not isinstance(runs, list) or not runs or not all(isinstance(r, dict) for r in runs):
        raise UserError(f"{path} holds no runs; was loadgen.py stopped before the first ended?")
    deploy = os.path.join(folder, "deploy.json")
    return summary, (read_json(deploy) if os.path.isfile(deploy) else None)


def deployed_argv(folder: str) -> List[str]:
    """The command line of the deployment that a run folder's deploy.json describes."""
    deploy = read_run(folder)[1]
    flags = deploy.get("flags") if deploy else None
    if not isinstance(flags, dict) or not {"model", "preset", "config", "params"} & set(flags):
        raise UserError(f"--measured {folder}: no model is named, and no deploy.json in the folder "
                        "names one; name the model and its flags beside --measured")
    known = {name[2:] for name in FLAG_NAMES} - set(NOT_SAVED) | {"model"}
    odd = [name for name, value in flags.items()
           if name not in known or not isinstance(value, str if name == "model" else (
               str, int, float))]
    if odd:
        raise UserError(f"{folder}/deploy.json: flag {_shown(odd[0])} is not known here; was it "
                        "written by another version?")
    return [value if name == "model" else f"--{name}" if value is True else f"--{name}={value}"
            for name, value in flags.items()]


def told_number(run: Mapping[str, Any], name: str) -> Optional[float]:
    """A number of summary.json by its dotted name: None where absent or null; a latency is inf
    where failures reach it. UserError where it is no number."""
    value: Any = run
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        return None
    if value == "inf" and "_s." in name:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < ABSURD:
        raise UserError(f"summary.json: {name} is {_shown(value)}; expected a number, not negative")
    return float(value)


def run_shape(d: Deployment, run: Mapping[str, Any]) -> Deployment:
    """The deployment at 100% of the datasheet, with the lengths that a run really had.

    The prompt is what no prefix cache held.
    """
    given = (told_number(run, "input_tokens_mean") or told_number(run, "input_tokens_planned_mean")
             or d.prompt_tokens)
    made = told_number(run, "output_tokens_mean") or d.output_tokens or 1.0
    fresh = max(1.0, given - (told_number(run, "cached_tokens_mean") or 0.0))
    return d._replace(mbu=1.0, mfu=1.0, prompt_tokens=fresh, fresh_tokens=fresh, shared_tokens=0,
                      output_tokens=made, history_tokens=given + made / 2)


def measured_row(case: Case, run: Mapping[str, Any], target: float) -> Dict[str, Any]:
    """One run beside the bound and the expectation at its batch, SI units.

    The batch is what decodes at once in one replica: output tok/s x TPOT, by Little's law on the
    decode stage, at most what was in flight. Those that queue or prefill are not in it.
    """
    d, replicas = run_shape(case.d, run), case.d.replicas
    tok_s, tpot = told_number(run, "output_tok_s"), told_number(run, "tpot_s.mean")
    flight = told_number(run, "in_flight_mean")
    most = min(tok_s * tpot if tok_s and tpot else math.inf, math.inf if flight is None else flight)
    batch = max(1.0, most / replicas) if most < math.inf else 1.0
    step, expected = decode_step(d, round(batch)), expected_of(d, round(batch), case.cal)
    row: Dict[str, Any] = {
        "verdict": str(run.get("verdict")), "batch": batch,
        **{name.replace("_s.p50", "_p50_s").replace("_s.p99", "_p99_s"): told_number(run, name)
           for name in TOLD},
        "bound_tpot_s": step.step_s, "bound_output_tok_s": batch * replicas / step.step_s,
        "expected_tpot_s": expected.tpot_s, "expected_tpot_low_s": expected.tpot_low_s,
        "expected_tpot_high_s": expected.tpot_high_s, "expected_ttft_s": expected.ttft_s,
        "expected_output_tok_s": batch * replicas / expected.tpot_s,
        "implied_mbu": None, "implied_mfu": None}
    tpot, attained = row["tpot_p50_s"], row["attainment"]
    if tpot and tpot < math.inf:
        row["implied_mbu"] = (step.weights_s + step.kv_s) / tpot
        row["implied_mfu"] = (step.compute_s + prefill_share_s(d, round(batch))) / tpot
    client = run.get("client")
    row["simulated"] = bool(run.get("simulated"))
    row["interrupted"] = isinstance(client, dict) and client.get("interrupted") is True
    row["meets_slo"] = None if attained is None else attained >= target
    row["trusted"] = bool(row["completed"] and 0 < (row["implied_mbu"] or 0) <= POSSIBLE
                          and row["implied_mfu"] <= POSSIBLE and not untrusted(row))
    return {key: "inf" if value == math.inf else value for key, value in row.items()}


def verdicts(row: Mapping[str, Any]) -> List[str]:
    """What a run is: loadgen's verdict, after SIMULATED or INTERRUPTED where it was so."""
    return ["SIMULATED"] * row["simulated"] + ["INTERRUPTED"] * row["interrupted"] + [
        row["verdict"]]


def untrusted(row: Mapping[str, Any]) -> List[str]:
    """Those of them whose figures are no operating point."""
    return [verdict for verdict in verdicts(row) if verdict in NOT_TRUSTED]


def operating_row(summary: Mapping[str, Any], rows: Sequence[Dict[str, Any]],
                  knee: Optional[float]) -> Tuple[Optional[Dict[str, Any]], str]:
    """(the run to operate at, what to know of it): loadgen's own, where the summary names one.

    Else the trusted run that meets the SLO, not past the knee, with the most goodput.
    """
    good = [row for row in rows if row["trusted"] and row["meets_slo"] is not False]
    told = summary.get("operating_point")
    where, note = (told.get("run"), told.get("note")) if isinstance(told, dict) else (None, None)
    note = note if isinstance(note, str) else ""
    if isinstance(where, int) and not isinstance(where, bool) and 0 <= where < len(rows) and (
            rows[where] in good):
        return rows[where], note
    if isinstance(told, dict) and where is None and "run" in told and any(
            row["meets_slo"] is not None for row in rows):
        return None, note
    return max((row for row in good if (row["rate_rps"] or 0.0) <= (knee or math.inf)),
               key=lambda r: (r["goodput_rps"] or 0.0, r["output_tok_s"] or 0.0), default=None), ""


def prefill_share_s(d: Deployment, batch: float) -> float:
    """The bound on the prefill mixed into one step [s]: each stream brings a prompt an output."""
    return batch * prefill_seconds(d, d.prompt_tokens) / max(1.0, d.output_tokens)


def other_model(case: Case, summary: Mapping[str, Any], deploy: Optional[Mapping[str, Any]]) -> str:
    """The model that a run names, by its deployment else its target; '' where it is the one asked.

    A fine-tune, a quantised copy or a path of the same name is the same.
    """
    told: Any = (deploy or {}).get("model"), summary.get("target")
    names = [value.get(key) for value, key in zip(told, ("name", "model"))
             if isinstance(value, dict)]
    name = next((name for name in names if name and isinstance(name, str)), "")

    def plain(*names: str) -> Set[str]:
        return {bare_name(text.rstrip("/")) for one in names for text in (one, known_as(one)[0])}

    own = plain(case.d.model.name, checkpoint_of(case.args, case.d)[0])
    return "" if not name or plain(name) & own else name


TERM_NAMES = {"weights": "reading the weights", "kv": "reading the KV history",
              "compute": "arithmetic", "prefill": "prefill mixed into the steps",
              "comm": "traffic between GPUs"}


def say_measured(case: Case, answer: Answer) -> None:
    """A loadgen run: bound, expectation and measurement side by side, and what follows."""
    folder, key = case.args.measured, "measured."
    summary, deploy = read_run(folder)
    slo = summary.get("slo")
    target = told_number(slo if isinstance(slo, dict) else {}, "attainment") or 0.99
    told = summary["runs"]
    rows = answer.add(key + "runs", [measured_row(case, run, target) for run in told])
    answer.say("MEASURED", f"{counted(len(rows), 'run')} of "
               f"{os.path.basename(os.path.abspath(folder))}; ms; bound and expectation at the "
               "batch that decoded (output tok/s x TPOT, a replica); expectation: "
               f"{case.cal.basis}")
    other = other_model(case, summary, deploy)
    if other:
        answer.say("", f"note: the run says model {other}; judged as {case.d.model.name}")
    answer.table(MEASURED, (dict(row, name=run_name(row), verdict=", ".join(verdicts(row)))
                            for row in rows))
    if any(row["simulated"] for row in rows):
        answer.say("", "SIMULATED: nothing was measured; such a run is of loadgen's engine, and "
                   "what follows holds for that")
    for row in rows:
        for verdict in untrusted(row):
            answer.say("", f"{run_name(row)} is {verdict}: {NOT_TRUSTED[verdict]}; not an "
                       "operating point")
    knee = Knee(*(told_number(summary, f"goodput_search.{name}") for name in Knee._fields))
    point, note = operating_row(summary, rows, knee.rate_rps)
    answer.add(key + "operating_point", point)
    seen = point or max((row for row in rows if row["trusted"]), default=None,
                        key=lambda r: float(r["output_tok_s"] or 0.0))
    if seen is None:
        answer.inputs(key, implied_mbu=None, implied_mfu=None, cost_per_1m_output=None,
                      replicas=None, binding=None)
        answer.say("", "no run can be trusted: nothing follows; measure again at a lower rate")
        return
    d = run_shape(case.d, told[next(i for i, row in enumerate(rows) if row is seen)])
    seqs, tpot, mbu, mfu = (round(seen["batch"]), seen["tpot_p50_s"], seen["implied_mbu"],
                            seen["implied_mfu"])
    step = decode_step(d, seqs)
    answer.add(key + "implied_mbu", mbu, "", "bytes_per_step / bandwidth / tpot_s",
               "what a step must read over what it could have read in the measured TPOT",
               bytes_per_step=(step.weights_s + step.kv_s) * d.gpu.bandwidth_bytes_s, tpot_s=tpot)
    answer.add(key + "implied_mfu", mfu, "", "flop_per_step / peak / tpot_s",
               "of decode, and of the prefill mixed into the step", tpot_s=tpot,
               flop_per_step=(step.compute_s + prefill_share_s(d, seqs)) * peak_flop_s(d))
    answer.say("IMPLIED", f"at {run_name(seen)}: MBU {mbu:.0%}, MFU {mfu:.0%} (prefill in it), "
               f"from TPOT p50 {scaled(tpot, 's')} at batch {seqs}")
    say_operating(case, point, knee, rows, deploy, answer)
    if note:
        answer.say("", f"loadgen.py: {note}")
    say_measured_binding(case, d, seen, answer)


class Knee(NamedTuple):
    """What a search of loadgen.py found, with its 95% interval [1/s]; None: no search, no end."""

    rate_rps: Optional[float]
    low_rps: Optional[float]
    high_rps: Optional[float]


def say_operating(case: Case, point: Optional[Mapping[str, Any]], knee: Knee,
                  rows: Sequence[Mapping[str, Any]], deploy: Optional[Mapping[str, Any]],
                  answer: Answer) -> None:
    """Price at the operating point; replicas by the knee, or by the point's goodput without one."""
    d, args, key = case.d, case.args, "measured."
    saved: Any = (deploy or {}).get("price")
    price = args.gpu_price or told_number({"price": saved}, "price.gpu_per_hour")
    if point is None:
        answer.inputs(key, cost_per_1m_output=None, replicas=None)
        answer.say("OPERATING", "no run that can be trusted meets the SLO: no operating point, so "
                   "no cost and no replicas; measure at a lower rate")
        return
    goodput, tok_s = point["goodput_rps"], point["output_tok_s"]
    lines = [f"{run_name(point)}: {figure(tok_s or 0.0)} tok/s"
             + (f", goodput {figure(goodput)} req/s" if goodput else ", no SLO was judged")]
    if price and tok_s:
        cost = answer.work(key + "cost_per_1m_output", "$",
                           "gpu_price * gpus / (tok_s * 3600) * 1e6", "the whole bill over the "
                           "output tokens measured", gpu_price=price, gpus=d.gpus, tok_s=tok_s)
        lines[0] += f"; ${cost:.3f} per 1M output tokens at ${price * d.gpus:.2f}/h"
    else:
        answer.add(key + "cost_per_1m_output", None)
    if knee.rate_rps:
        goodput = knee.rate_rps
    if args.rate and goodput:
        number = answer.add(
            key + "replicas", replicas_for(args.rate, goodput / d.replicas),
            "replicas", "-(-(rate / (goodput / measured_replicas) / headroom - 1e-9) // 1)",
            "replicas = ceil(peak rate / goodput per replica / 0.7)", rate=args.rate,
            goodput=goodput, measured_replicas=d.replicas, headroom=HEADROOM)
        lines.append(f"{figure(args.rate)} req/s / {figure(goodput / d.replicas)} a replica / "
                     f"{HEADROOM} = {counted(number, 'replica')}")
    else:
        answer.add(key + "replicas", None)
    if point["rate_rps"] is None:
        lines.append("no rate was offered: such a run slows its own arrivals and never queues; "
                     "size from an open-loop one")
    elif knee.rate_rps:
        lines.append(f"the knee is at {figure(knee.rate_rps)} req/s, "
                     + (f"95%: {figure(knee.low_rps)} to {figure(knee.high_rps)}"
                        if knee.low_rps and knee.high_rps else "or higher: a lower bound")
                     + " (loadgen.py --find-goodput); cost is of the run named")
    elif goodput:
        failed = min((row["rate_rps"] for row in rows if (row["rate_rps"] or 0) > point["rate_rps"]
                      and (row["verdict"] == "UNSTABLE" or row["meets_slo"] is False)),
                     default=math.inf)
        where = (f"between this rate and {figure(failed)}" if failed < math.inf
                 else "further up: no higher rate failed")
        lines.append(f"the knee is {where}; until loadgen.py --find-goodput has it, goodput is a "
                     "lower limit, cost and replicas are upper ones")
    answer.say("OPERATING", *lines)


def say_measured_binding(case: Case, d: Deployment, row: Mapping[str, Any],
                         answer: Answer) -> None:
    """The one line that says which term of the step the measured TPOT is made of."""
    batch = round(row["batch"])
    step = decode_step(d, batch)
    reads = {"weights": step.weights_s, "kv": step.kv_s}
    terms = {**({"compute": step.compute_s} if step.bound_by == "compute" else reads),
             "prefill": prefill_share_s(d, batch),
             "comm": collective_seconds(d, decode_collectives(d, batch)) or 0.0}
    term = answer.add("measured.binding", max(terms, key=lambda name: terms[name]))
    knobs = {"prefill": ["prefix caching", *compute_knobs(case.d)[:-1], "P/D disaggregation"],
             "comm": ["fewer GPUs a replica", "a faster --link"],
             "compute": compute_knobs(case.d)}
    tpot, low, high = (row[key] for key in ("tpot_p50_s", "expected_tpot_low_s",
                                            "expected_tpot_high_s"))
    rest = tpot - sum(terms.values())  # of the bound: no efficiency, no fixed time
    where = ("inside the expected band" if low <= tpot <= high else
             f"{tpot / row['expected_tpot_s'] - 1:+.0%} against the expectation, outside its band")
    lost = (f"; {scaled(rest, 's')} is in no term at 100%: efficiency, fixed time a layer, "
            "scheduling" if rest > terms[term] else "")
    answer.say("RUN BINDS", f"{TERM_NAMES[term]}: {scaled(terms[term], 's')} at the bound of "
               f"{scaled(tpot, 's')} {'simulated' if row['simulated'] else 'measured'}, "
               f"{where}{lost}. Better: "
               f"{', '.join(knobs.get(term) or speed_knobs(case.d, term))}.")


def run_name(row: Mapping[str, Any]) -> str:
    """How a run is called: by its rate, or by its users where it was a closed loop."""
    rate, users = row["rate_rps"], row["concurrency"]
    return (f"rate {figure(rate)}" if rate else f"concurrency {figure(users)}" if users else
            "all at once")


def told_ms(value: Any) -> str:
    """Seconds of a measured table in ms; 'inf' where failures reach it."""
    return value if isinstance(value, str) else in_ms(value)


MEASURED = (
    Column("name", "run", str), Column("in_flight_mean", "flight", figure),
    Column("batch", "batch", figure), Column("bound_tpot_s", "TPOT bound", in_ms),
    Column("expected_tpot_s", "exp.", in_ms), Column("tpot_p50_s", "p50", told_ms),
    Column("expected_ttft_s", "TTFT exp.", in_ms), Column("ttft_p50_s", "p50", told_ms),
    Column("ttft_p99_s", "p99", told_ms), Column("bound_output_tok_s", "tok/s bound", count),
    Column("expected_output_tok_s", "exp.", count), Column("output_tok_s", "got", count),
    Column("implied_mbu", "MBU", "{:.0%}".format), Column("implied_mfu", "MFU", "{:.0%}".format),
    Column("verdict", "", str))


# --autoscale: signals and thresholds from the plan, as a KEDA ScaledObject and Prometheus rules.


class Metrics(NamedTuple):
    """An engine's names for what autoscaling and alerting look at."""

    waiting: str
    running: str
    kv: str  # share of the KV pool in use
    ttft: str  # histograms [s]
    tpot: str
    tpot_text: str
    preempted: str  # an expression that is above zero while sequences lose their KV
    switch: str  # what has to be on for it
    e2e: str


# Source: the engines' pages on production metrics; tensorrt_llm/metrics/collector.py.
METRICS = {
    "vllm": Metrics("vllm:num_requests_waiting", "vllm:num_requests_running",
                    "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds",
                    "vllm:request_time_per_output_token_seconds", "TPOT",
                    "sum(increase(vllm:num_preemptions_total{of}[5m]))", "nothing: on by default",
                    "vllm:e2e_request_latency_seconds"),
    "sglang": Metrics("sglang:num_queue_reqs", "sglang:num_running_reqs", "sglang:token_usage",
                      "sglang:time_to_first_token_seconds", "sglang:inter_token_latency_seconds",
                      "inter-token latency (SGLang has no TPOT of requests)",
                      "sum(increase(sglang:num_retracted_requests_total{of}[5m]))",
                      "--enable-metrics", "sglang:e2e_request_latency_seconds"),
    "trtllm": Metrics("trtllm_num_requests_waiting", "trtllm_num_requests_running",
                      "trtllm_kv_cache_utilization", "trtllm_time_to_first_token_seconds",
                      "trtllm_time_per_output_token_seconds", "TPOT",
                      "sum(trtllm_num_paused_requests{of})",
                      "return_perf_metrics and enable_iter_perf_stats: true in its YAML; scrape "
                      "/prometheus/metrics", "trtllm_e2e_request_latency_seconds")}
STORAGE_ASSUMED_BYTES_S = GIGA  # object storage
PULL_ASSUMED_S = 60.0  # an engine's image is about 10 GB
INIT_ASSUMED_S = (100.0, 200.0)  # TP=1, wider: measured 94 s (8B, L40S), 205 s (70B FP8, TP=8)
DETECT_S = 60.0  # scrape and polling intervals of 15 s, a rule's window of 30 s
KV_MOST = 0.8  # of the pool: past it a burst preempts
KV_LEAST = 0.3  # under it a trigger would fire on next to nothing
KV_ALERT = 0.95


class Scaling(NamedTuple):
    """When a fleet grows and shrinks, per replica."""

    cold_s: float
    lead_s: float
    least: int
    most: int
    in_flight: float
    queue: int
    kv: float


def cold_start(case: Case, answer: Answer) -> Tuple[float, List[str]]:
    """From nothing to serving [s], and which of its parts are assumed rather than given."""
    d, args = case.d, case.args
    link = args.storage or Link("object storage", STORAGE_ASSUMED_BYTES_S)
    pull = args.pull_s if "pull_s" in args.given else PULL_ASSUMED_S
    init = args.init_s if "init_s" in args.given else INIT_ASSUMED_S[d.tp > 1]
    assumed = answer.add("autoscale.assumed", [text for name, text in (
        ("pull_s", f"image pull {figure(pull)} s (--pull-s)"),
        ("storage", f"weights at {figure(link.bytes_s / GIGA)} GB/s (--storage)"),
        ("init_s", f"engine start {figure(init)} s (--init-s; measured 94 s for 8B on L40S, 205 s "
                   "for 70B FP8 at TP=8)")) if name not in args.given])
    return answer.work("autoscale.cold_start_s", "s", "pull_s + weight_bytes / storage + init_s",
                       "image pull, weights over storage bandwidth, engine start", pull_s=pull,
                       storage=link.bytes_s, init_s=init), assumed


def scaling_of(case: Case, plan: Plan, best: Steady, cold_s: float, answer: Answer) -> Scaling:
    """The thresholds of a plan: each replica at HEADROOM of what it sustains."""
    load, rate, slots, key = plan.load, best.rate_rps, plan.max_num_seqs, "autoscale."
    calm = Replica(case.d, load, case.cal).at_rate(rate * HEADROOM)
    lead = answer.work(key + "lead_s", "s", "-(-(cold_s + detect_s) // 30) * 30", "cold start and "
                       "the time to notice, up to half a minute", cold_s=cold_s, detect_s=DETECT_S)
    least = answer.add(
        key + "min_replicas", max(1, replicas_for(load.mean_rate_rps or 0.0, rate)), "replicas",
        "max(1, -(-(mean_rate / rate / headroom - 1e-9) // 1))", "--mean-rate over what a replica "
        "is given; 1 where no mean rate is", mean_rate=load.mean_rate_rps or 0.0, rate=rate,
        headroom=HEADROOM)
    most = answer.work(key + "max_replicas", "replicas", "max(least, replicas + spares)",
                       "the plan, with its spare", least=least, replicas=plan.replicas,
                       spares=plan.spares)
    in_flight = answer.work(
        key + "in_flight_per_replica", "requests", "min(rate * e2e_s, slots * headroom)",
        f"{LITTLE}, at most its share of the batch slots", rate=calm.rate_rps, e2e_s=calm.e2e_s,
        slots=slots, headroom=HEADROOM)
    spare_s = max(0.0, min(load.slo_ttft_s - calm.ttft_p99_s, load.slo_e2e_s - calm.e2e_s, lead))
    queue = answer.add(key + "queue_per_replica", max(1, min(slots, math.floor(spare_s * rate))),
                       "requests", "max(1, min(slots, spare_s * rate // 1))", "the queue that "
                       "takes what the SLOs leave, at most as many as there are slots",
                       spare_s=spare_s, rate=rate, slots=slots)
    kv = answer.work(key + "kv_share", "", "max(least, min(most, batch * history / kv_tokens))",
                     "KV held at that load, within sense", least=KV_LEAST, most=KV_MOST,
                     batch=calm.batch, history=case.d.history_tokens,
                     kv_tokens=plan.kv_tokens_per_replica)
    return Scaling(cold_s, lead, least, most, in_flight, queue, kv)


def say_autoscale(case: Case, answer: Answer) -> None:
    """Signals and thresholds, the ScaledObject, the alert rules, and scaling to zero."""
    plan = case.plan
    if plan is None or plan.sustained is None or not plan.replicas:
        answer.add("autoscale", None)
        answer.say("AUTOSCALE", "no plan holds the load, so there is nothing to scale" if plan else
                   "needs a load: --rate, --workload or an SLO")
        return
    load, best = plan.load, plan.sustained
    cold, assumed = cold_start(case, answer)
    scale = scaling_of(case, plan, best, cold, answer)
    slack = answer.work("autoscale.ramp_rps", "req/s", "least * rate * (1 - headroom)",
                        "what the headroom takes up while a replica starts", least=scale.least,
                        rate=best.rate_rps, headroom=HEADROOM)
    answer.say("AUTOSCALE", f"{scale.least} to {scale.most} replicas; cold start "
               f"{count(scale.cold_s)} s, so scale {count(scale.lead_s)} s ahead: on the forecast "
               "of what is in flight, and never on GPU utilisation (near 100% at batch 1 and at "
               "batch 200 alike)",
               *(["assumed: " + "; ".join(assumed)] if assumed else []),
               f"in flight: {figure(scale.in_flight)} a replica, at {HEADROOM:.0%} of what it "
               f"sustains; queue: {scale.queue} a replica; KV: {scale.kv:.0%} of the pool; "
               f"{slo_text(load)}; preemptions: none",
               f"at the least, the headroom takes up {figure(slack)} req/s more within the lead "
               "time; traffic that rises faster needs a higher minimum"
               + ("" if load.mean_rate_rps else " (--mean-rate sets it)"),
               f"metrics of {plan.engine}: {METRICS[plan.engine].switch}")
    say_scale_to_zero(case, plan, scale, answer)
    scaled_object = keda_object(case, plan, scale)
    answer.add("autoscale.signals", [
        {"name": one["name"], "query": one["metadata"]["query"],
         "threshold": float(one["metadata"]["threshold"]),
         "per_replica": one["metricType"] == "AverageValue"}
        for one in scaled_object["spec"]["triggers"]])
    for key, title, tree in (
            ("keda", "ScaledObject: set serverAddress and the Deployment's name", scaled_object),
            ("alerts", "Prometheus rules", alert_rules(case, plan, scale))):
        text = answer.add(f"autoscale.{key}", "\n".join(yaml_lines(tree)) + "\n")
        answer.lines += ["", f"{key.upper():<12} {title}", *text.splitlines()]


def say_scale_to_zero(case: Case, plan: Plan, scale: Scaling, answer: Answer) -> None:
    """What an idle replica costs, against a first request that waits for a cold start."""
    d, args, slo = case.d, case.args, min(plan.load.slo_ttft_s, plan.load.slo_e2e_s)
    hourly, key = args.gpu_price and args.gpu_price * d.replica_gpus, "autoscale.scale_to_zero."
    pays = answer.add(key + "pays", scale.cold_s <= slo)
    answer.add(key + "idle_per_hour", hourly, "$", source="a replica that waits")
    answer.add(key + "break_even_gap_s", scale.cold_s, "s", source="a start holds the GPUs that "
               "long without serving: a shorter gap saves nothing")
    idle = f"${hourly:.2f} an hour" if hourly else f"{d.replica_gpus} GPU-hours an hour"
    why = (f"{count(scale.cold_s / slo)} times the SLO of {scaled(slo, 's')}" if not pays else
           "inside the SLO" if slo < math.inf else "and no SLO on waiting forbids it")
    lines = [f"the last replica costs {idle} idle; without it the first request waits "
             f"{count(scale.cold_s)} s, {why}: " + (
                 f"to zero pays for gaps longer than {count(scale.cold_s)} s" if pays else
                 "keep 1 while anyone may call, go to zero only in hours that are agreed")]
    if hourly and args.serverless_price:
        rate = answer.work(key + "serverless_below_tok_s", "tok/s",
                           "per_hour * 1e6 / price_per_1m / 3600", "where the last replica costs "
                           "what serverless would", per_hour=hourly,
                           price_per_1m=args.serverless_price)
        lines.append(f"below {count(rate)} tok/s serverless at ${args.serverless_price:g} per 1M "
                     "is cheaper than the last replica, and it can take the first requests")
    answer.say("TO ZERO", *lines, "to wake from zero takes a signal from the gateway: the engine's "
               "metrics are gone with it")


def selector(case: Case) -> str:
    """The label selector of this model's series, as PromQL: the name that LAUNCH serves it by."""
    return "{model_name=" + json.dumps(checkpoint_of(case.args, case.d)[0]) + "}"


def hf_id(model: Model, tables: Mapping[str, Any]) -> Optional[str]:
    """The Hugging Face id of a model, where it is known."""
    row: Mapping[str, Any] = next((r for r in tables.get("models", ())
                                   if r["name"] == model.name), {})
    return row.get("id") or (model.name if model.name.count("/") == 1 else None)


def quantile_99(histogram: str, of: str) -> str:
    """PromQL for the p99 of a histogram over five minutes."""
    return f"histogram_quantile(0.99, sum by (le) (rate({histogram}_bucket{of}[5m])))"


def forecast(query: str, scale: Scaling) -> str:
    """PromQL for what a query will be a lead time ahead, by the trend of at least as long."""
    minutes = max(10, math.ceil(scale.lead_s / MINUTE_S))
    return f"predict_linear(({query})[{minutes}m:30s], {scale.lead_s:.0f})"


def keda_object(case: Case, plan: Plan, scale: Scaling) -> Dict[str, Any]:
    """The ScaledObject: four Prometheus triggers, of which the one that wants most replicas counts.

    Source: KEDA's ScaledObject specification and Prometheus scaler.
    """
    import re
    names, of, load = METRICS[plan.engine], selector(case), plan.load
    name = re.sub(r"[^a-z0-9]+", "-", case.d.model.name.lower()).strip("-")[:40] or "model"
    flight = f"sum({names.running}{of}) + sum({names.waiting}{of})"
    asked = [("in-flight-ahead", "AverageValue", f"clamp_min({forecast(flight, scale)}, 0)",
              scale.in_flight),
             ("in-flight", "AverageValue", flight, scale.in_flight),
             ("queue", "AverageValue", f"sum({names.waiting}{of})", scale.queue),
             ("kv", "Value", f"avg({names.kv}{of})", scale.kv)]
    if load.slo_ttft_s < math.inf:  # without traffic the quantile is NaN, which no scaler takes
        asked.append(("ttft-p99", "Value", f"({quantile_99(names.ttft, of)} >= 0) or vector(0)",
                      load.slo_ttft_s))
    triggers = [{"type": "prometheus", "name": called, "metricType": kind, "metadata": {
        "serverAddress": "http://prometheus.monitoring.svc:9090", "query": query,
        "threshold": f"{most:.3f}".rstrip("0").rstrip(".")}} for called, kind, query, most in asked]
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [
            {"type": "Percent", "value": 100, "periodSeconds": 60}]},
        "scaleDown": {"stabilizationWindowSeconds": max(300, round(2 * scale.lead_s)), "policies": [
            {"type": "Pods", "value": 1, "periodSeconds": round(scale.lead_s)}]}}
    return {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": name},
            "spec": {"scaleTargetRef": {"kind": "Deployment", "name": name},
                     "pollingInterval": 15, "minReplicaCount": scale.least,
                     "maxReplicaCount": scale.most,
                     "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
                     "triggers": triggers}}


def alert_rules(case: Case, plan: Plan, scale: Scaling) -> Dict[str, Any]:
    """Prometheus alert rules: SLOs, queue, KV, preemptions, the fleet's limit, silence."""
    names, of, load = METRICS[plan.engine], selector(case), plan.load
    flight = f"sum({names.running}{of}) + sum({names.waiting}{of})"
    best = plan.sustained.rate_rps * plan.sustained.e2e_s if plan.sustained else 0.0
    best = min(best, float(plan.max_num_seqs))
    rows = [(f"{name.capitalize()}P99AboveSlo",
             f"{quantile_99(getattr(names, name), of)} > {slo_s:.4g}", "5m", "page",
             f"{names.tpot_text if name == 'tpot' else name.upper()} p99 is above the SLO of "
             f"{scaled(slo_s, 's')}") for name, slo_s in load.slos.items()]
    rows += [
        ("QueueDoesNotDrain", f"avg({names.waiting}{of}) > "
         f"{scale.queue / case.d.attention_dp:.4g}", "2m", "page",
         f"more than {scale.queue} wait on each replica: the SLO has no room for it"),
        ("KvCacheNearlyFull", f"max({names.kv}{of}) > {KV_ALERT}", "5m", "ticket",
         "a replica's KV pool is nearly full: it will preempt"),
        ("Preemptions", f"{names.preempted.replace('{of}', of)} > 0", "5m", "ticket",
         "sequences lose their KV cache and are computed again: more replicas, or a lower "
         "max-num-seqs"),
        ("CapacityRunsOutWithinLeadTime", f"{forecast(flight, scale)} > {best * scale.most:.4g}",
         "2m", "page",
         f"in {scale.lead_s:.0f} s more will be in flight than {scale.most} replicas sustain"),
        ("NoMetrics", f"absent({names.running}{of})", "5m", "page",
         "no replica reports its metrics")]
    return {"groups": [{"name": "llm-serving", "rules": [
        {"alert": name, "expr": expr, "for": held, "labels": {"severity": severity},
         "annotations": {"summary": summary}} for name, expr, held, severity, summary in rows]}]}


def yaml_lines(value: Any, indent: str = "") -> List[str]:
    """Nested dicts and lists as YAML; scalars as JSON, which YAML reads alike."""
    lines: List[str] = []
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, (dict, list)):
                lines += [f"{indent}{key}:", *yaml_lines(inner, indent + "  ")]
            else:
                lines.append(f"{indent}{key}: {json.dumps(inner)}")
    else:
        for inner in value:
            first, *rest = yaml_lines(inner, indent + "  ")
            lines += [f"{indent}- {first.lstrip()}", *rest]
    return lines


# --defend: each hard question answered twice, from this deployment's own figures.

READING_TOK_S = 238 / MINUTE_S / 0.75  # 238 words a minute (Brysbaert 2019), 0.75 words a token
EVAL = "accuracy: to be measured on your eval set"
SHORT_OF = {"kv": "there is no memory for another conversation and requests wait",
            "max_num_seqs": "requests wait, by the limit that was set",
            "ttft": "the first word comes later than your target",
            "tpot": "the words come slower than your target",
            "e2e": "answers take longer than your target"}


class Stand(NamedTuple):
    """Where a deployment is defended: its batch and times, with or without a load."""

    case: Case
    batch: int
    step_s: float  # expected
    tpot_s: float  # expected, with the prefill mixed in


Answered = Tuple[str, str, str]  # a hard question, its answers to a researcher and to a customer


def why_tpot(at: Stand) -> Answered:
    """Which bytes and FLOP make the TPOT."""
    d, cal = at.case.d._replace(mbu=1.0, mfu=1.0), at.case.cal
    step, bandwidth = decode_step(d, at.batch), d.gpu.bandwidth_bytes_s
    reads = step.weights_s + step.kv_s
    side = ("compute" if step.bound_by == "compute" else
            "memory" if reads > at.step_s / 2 else "memory, though fixed time a layer and traffic "
            "between GPUs take more")
    prefill = at.tpot_s - at.step_s
    mixed = (f", and {scaled(prefill, 's')} of prefill mixed in: TPOT {scaled(at.tpot_s, 's')}"
             if prefill > 0.01 * at.tpot_s else "")
    pace = 1 / at.tpot_s / READING_TOK_S
    reader = (f"{figure(pace, 2)} times as fast as people read" if pace > 1 else
              f"slower than people read ({figure(READING_TOK_S, 2)})")
    low_s, high_s = band_s(d, at.batch, at.tpot_s, cal)
    weights, kv = (seconds * bandwidth / d.pp for seconds in (step.weights_s, step.kv_s))
    return (f"Why is TPOT {scaled(at.tpot_s, 's')}?",
            f"bound by {side}: batch {at.batch} runs at {intensity(d, at.batch):.0f} FLOP/B "
            f"against a ridge of {peak_flop_s(d) / bandwidth:.0f}. {scaled(weights, 'B')} of "
            f"weights and {scaled(kv, 'B')} of KV a step and GPU at {figure(bandwidth / TERA)} "
            f"TB/s take {scaled(reads, 's')} at 100%; expected step {scaled(at.step_s, 's')}, "
            f"{reads / at.step_s:.0%} MBU{mixed} (80% band {scaled(low_s, 's')} to "
            f"{scaled(high_s, 's')}; {cal.basis})",
            f"about {figure(1 / at.tpot_s, 2)} tokens a second for each of "
            f"{counted(at.batch, 'user')} at once, {reader}; an estimate until measured, from "
            f"{figure(1 / high_s, 2)} to {figure(1 / low_s, 2)}")


def counted(number: int, what: str) -> str:
    """A number of things, in the plural where they are several."""
    return f"{count(number)} {what}{'s' * (number != 1)}"


def intensity(d: Deployment, batch: int) -> float:
    """FLOP a byte of a decode step. Source: Williams et al. 2009, roofline."""
    step = decode_step(d, batch, mbu=1.0)
    return (step.compute_s * peak_flop_s(d) * d.mfu
            / ((step.weights_s + step.kv_s) * d.gpu.bandwidth_bytes_s))


def why_not_more(at: Stand) -> Answered:
    """The limit that one more in flight would break."""
    question, case, d, plan = "Why not more throughput?", at.case, at.case.d, at.case.plan
    if plan is None:
        most, each, length = (
            (case.holds, f"their mean {count(d.history_tokens)}", "that") if d.output_tokens else
            (case.limit, count(d.ctx_tokens), "full"))
        step_s = expected_step_s(d, min(most, case.slots), case.cal)
        if case.slots < most:
            return (question, f"--max-num-seqs lets {case.slots} run at once, "
                    f"{count(case.slots / step_s)} tok/s expected there; the KV pool would hold "
                    f"{most} sequences of {each}", f"a replica is set to serve {case.slots} at "
                    "once; beyond, requests wait, so we allow more or add a replica")
        return (question, f"the KV pool is full at {most} sequences of {each} "
                f"({count(case.memory.max_seqs * d.ctx_tokens)} tokens), "
                f"{count(most / step_s)} tok/s expected there; past it the engine queues, or "
                "preempts and computes again",
                f"a replica holds about {most} conversations of {length} length at once; beyond, "
                f"{SHORT_OF['kv']}, so we add a replica")
    best = plan.sustained
    if best is None:
        return (question, f"not even one request at a time meets the SLO: {plan.binding} "
                f"breaks first; {LIMIT_KNOBS[plan.binding]}", "this setup cannot meet your "
                f"target at any load: {SHORT_OF[plan.binding]}")
    full = best.batch / Replica(d, plan.load, case.cal).kv_seqs
    tok_s = best.rate_rps * plan.load.output_len.mean
    return (question, f"past {figure(best.batch)} in flight a replica {LIMIT_NAMES[plan.binding]} "
            f"gives way: {figure(best.rate_rps)} req/s, {count(tok_s)} tok/s, TPOT "
            f"{scaled(best.tpot_s, 's')}, TTFT p99 {scaled(best.ttft_p99_s, 's')}, KV pool "
            f"{full:.0%} full, {best.prefill_share:.0%} of the time prefill",
            f"beyond about {counted(max(1, int(best.batch)), 'request')} at once on a replica "
            f"{SHORT_OF[plan.binding]}, so we add a replica")


class Change(NamedTuple):
    """One thing done differently: what it replaces, and what it costs beside money."""

    label: str
    axis: str  # two changes of one axis do not go together
    d: Mapping[str, Any]
    load: Mapping[str, Any]
    price: str


def changed(case: Case, *changes: Change) -> Tuple[Deployment, Optional[Load]]:
    """The deployment and load after some changes."""
    d, load = case.d, case.plan and case.plan.load
    for change in changes:
        d = d._replace(**change.d)
        load = load and load._replace(**change.load)
    return d._replace(compute=compute_on(d.gpu, d.weights)), load


def bill(case: Case, *changes: Change) -> Optional[float]:
    """Price of 1M output tokens after some changes [$, GPU-hours where no price is known].

    At the load, in whole replicas; without one, of a replica with as many in flight as are asked
    about, else with its KV pool full. None where it does not work, or has no price.
    """
    (d, load), args = changed(case, *changes), case.args
    price = price_of(args, d.gpu.name) if args.prices else 1.0
    if tp_problem(d.model, d.tp) or price is None:
        return None
    engine = args.engine or "vllm"
    cal = calibration_of(d, engine, case.tables)
    if load is None:
        batch = min(most_running(d) if memory_of(d).fits else 0, d.asked or sys.maxsize)
        return per_1m(price * d.replica_gpus, batch / expected_step_s(d, batch, cal)
                      ) if batch else None
    plan = plan_of(d, load, cal, engine)
    if not plan.replicas:
        return None
    return per_1m(price * plan.gpus, plan.rate_rps * load.output_len.mean)


def tp_choices(d: Deployment) -> List[int]:
    """The TP sizes of one link domain that the model and the rest of the layout take."""
    return [n for n in (1, 2, 4, 8) if d.ep == 1 and not n % d.dcp and n <= d.gpu.domain
            and not tp_problem(d.model, n)]


def weights_stored(d: Deployment, name: str) -> Dict[str, Any]:
    """What changes when the weights are stored at a precision by its nominal width."""
    p = WEIGHTS[name]
    return {"weights": p, "weight_bytes": p.bytes * d.model.params,
            "weight_source": f"weights {figure(p.bytes)} B ({name})",
            "expert_share": expert_param_share(d.model)}


def narrower_weights(d: Deployment) -> List[str]:
    """The precisions to try that take fewer bytes than the weights do now."""
    return [name for name in ("fp8", "int4", "nvfp4")
            if WEIGHTS[name].bytes * d.model.params < 0.99 * d.weight_bytes]


def compute_on(gpu: Gpu, weights: Precision) -> str:
    """The tensor-core type that multiplies: that of the weights, where the GPU has it."""
    return weights.compute if weights.compute in gpu.flop_s else "bf16"


def single_changes(case: Case, tables: Mapping[str, Any]) -> List[Change]:
    """What can be done differently, one at a time: precision, GPU, TP, KV, slots, prefix, SLOs.
    """
    d, load = case.d, case.plan and case.plan.load
    found = [Change(f"--weights {name}", "weights", weights_stored(d, name), {}, EVAL)
             for name in narrower_weights(d)
             if name == "int4" or WEIGHTS[name].compute in d.gpu.flop_s]
    if d.kv.bytes > 1:
        found.append(Change("--kv fp8", "kv", {"kv": KV["fp8"]}, {}, EVAL))
    found += [Change(f"TP={n}", "tp", {"tp": n}, {}, "") for n in tp_choices(d) if n != d.tp]
    found += [Change(f"--gpu {row['name']}", "gpu", {"gpu": gpu_of(row, tables["links"])}, {},
                     "other GPUs") for row in tables.get("gpus", ())
              if row["name"] in (case.args.prices or {}) and row["name"] != d.gpu.name]
    if not load:
        return found
    if load.given_seqs:
        found.append(Change(f"slots by the plan instead of {load.given_seqs}", "slots", {},
                            {"given_seqs": None}, ""))
    if not load.shared_tokens:
        found.append(Change("half of every prompt shared and cached", "prefix", {},
                            {"shared_tokens": int(load.input_len.mean / 2)}, "prompts must begin "
                            "alike, and the router must know where"))
    for name in ("tpot", "ttft", "e2e"):
        slo_s = load.slos.get(name)
        if slo_s:
            found.append(Change(f"{name.upper()} SLO {scaled(2 * slo_s, 's')} instead of "
                                f"{scaled(slo_s, 's')}", "slo", {}, {f"slo_{name}_s": 2 * slo_s},
                                "twice the wait allowed"))
    if load.slos:
        found.append(Change("no SLO at all", "slo", {}, dict.fromkeys(
            ("slo_tpot_s", "slo_ttft_s", "slo_e2e_s"), math.inf), "batch work only"))
    return found


def why_precision(at: Stand) -> Answered:
    """What 16 bit would take, or what FP8 would save: each at its cheapest TP, for as many."""
    d = at.case.d
    case = at.case._replace(d=d._replace(asked=at.batch))
    base = bill(case)
    bf16_bytes = 2.0 * d.model.params

    def cheapest(stored: Mapping[str, Any]) -> Tuple[float, int]:
        """The least price that any TP has with weights and KV stored so, and that TP."""
        bills = ((bill(case, Change("", "", {**stored, "tp": n}, {}, "")), n)
                 for n in tp_choices(d) or [d.tp])
        return min(((cost, n) for cost, n in bills if cost), default=(0.0, d.tp))

    if d.weight_bytes >= 0.99 * bf16_bytes and d.kv.bytes >= 2:
        fp8, at_tp = cheapest({**weights_stored(d, "fp8"), "kv": KV["fp8"]})
        saves = "FP8 for weights and KV would " + (
            f"cost {fp8 / base:.2f}x{f', at TP={at_tp}' * (at_tp != d.tp)}" if base and fp8 else
            "halve both")
        return ("Why 16 bit?", f"{figure(d.weight_bytes / GIGA)} GB of weights, no accuracy "
                f"question; {saves}; {EVAL}", f"the answers of the original model; {saves}, once "
                "your test set shows the same answers")
    wide, at_tp = cheapest({**weights_stored(d, "bf16"), "kv": KV["bf16"]})
    if wide and base:
        more = (f"16 bit, at its cheapest on this GPU (TP={at_tp}), costs {wide / base:.2f}x as "
                "much")
        told = f"without it, {wide / base:.2g} times the price"
    else:
        more = ("as it is the load is not held, so there is no price to compare" if wide else
                "in 16 bit it does not do on this GPU, at any TP")
        told = "without it this kind of GPU would not do"
    parts: List[str] = []
    if d.weight_bytes < 0.99 * bf16_bytes:
        parts.append(f"{figure(d.weight_bytes / GIGA)} GB of weights to hold and to read instead "
                     f"of {figure(bf16_bytes / GIGA)}, {d.compute.upper()} arithmetic")
    if d.kv.bytes < 2:
        each, plain = (sequence_bytes(d._replace(kv=kv), d.ctx_tokens) / d.ctx_tokens
                       for kv in (d.kv, KV["bf16"]))
        parts.append(f"{scaled(each, 'B')} of KV a token and GPU instead of {scaled(plain, 'B')}")
    native = d.weight_bytes == d.model.weight_bytes or d.weights.name == d.model.native
    same = ("the model as its makers publish it" if native and d.kv.bytes == 2 else
            "the same answers, which your own test set has to show before launch")
    return (f"Why {d.weights.name.upper()} weights and {d.kv.name.upper()} KV?",
            f"{'; '.join(parts)}; {more}. " + (
                "The weights are the checkpoint's own" if native else "The accuracy delta is to be "
                "measured on your eval set: no figure here knows it"), f"{same}; {told}")


def why_speculation(at: Stand) -> Answered:
    """Whether drafting pays at this batch, by the step-time equation."""
    d, cost, (alpha, gamma, assumed) = at.case.d, at.case.args.spec_cost, acceptance_of(
        at.case.args)
    gain = speculative_speedup(d, at.batch, alpha, gamma, cost)
    ranges = losing_batches(d, alpha, gamma, cost)
    longer = (decode_step(d, at.batch, tokens_per_seq=gamma + 1).step_s
              / decode_step(d, at.batch).step_s)
    users = at.tpot_s / (at.step_s / gain + at.tpot_s - at.step_s)  # prefill is no faster
    above = next((first for first, _ in ranges if first > at.batch), None)
    until = f", up to about {count(above)} at once" if above else ""
    return (
        "Why speculative decoding?" if gain > 1 else "Why not speculative decoding?",
        f"batch {at.batch} runs at {intensity(d, at.batch):.0f} FLOP/B, the ridge is "
        f"{peak_flop_s(d) / d.gpu.bandwidth_bytes_s:.0f}: checking {gamma + 1} positions takes "
        f"{longer:.2f}x the step for {tokens_a_step(alpha, gamma):.2f} tokens, {gain:.2f}x with "
        f"the drafter (acceptance {figure(alpha)}{' assumed' * assumed}), {users:.2f}x on the "
        f"TPOT, prefill in it; {ranges_text(ranges)}. A bound: no fixed time, and the drafter's "
        "memory comes on top",
        f"it would make each answer up to {figure(users, 2)} times as fast at this load without "
        f"changing it{until}; to be promised after a measurement on your traffic" if gain > 1 else
        "at this load checking the guesses costs more than they save; it helps in quiet hours, and "
        "is kept to them")


def why_replicas(at: Stand) -> Answered:
    """The division behind the number of replicas, with its margins."""
    plan, d = at.case.plan, at.case.d
    if plan and plan.sustained is None:
        return ("Why no number of replicas?", "one request alone breaks "
                f"{LIMIT_NAMES[plan.binding]}, and replicas share nothing; "
                f"{LIMIT_KNOBS[plan.binding]}",
                "more of the same does not answer any single request sooner")
    if plan is None or plan.load.rate_rps is None:
        held = f"; one sustains {figure(plan.rate_per_replica_rps)} req/s" if plan else ""
        least = "it is the least that can be bought" if d.replicas == 1 else "as you asked"
        return (f"Why {counted(d.replicas, 'replica')}?",
                f"as the flags say{held}; --rate and an SLO make a plan",
                f"{least}{held}; your traffic decides how many")
    rate, each = figure(plan.load.rate_rps), figure(plan.rate_per_replica_rps)
    return (f"Why {counted(plan.replicas, 'replica')}?",
            f"ceil({rate} / {each} / {HEADROOM:g}) = {plan.replicas}, + {plan.spares} spare. "
            f"{each} req/s is where {LIMIT_NAMES[plan.binding]} gives way; at {HEADROOM:.0%} of it "
            f"a burst of {1 / HEADROOM - 1:.0%} still fits. Little: {count(plan.in_flight)} in "
            f"flight, {count(plan.in_flight * plan.load.context_tokens)} KV tokens of "
            f"{count(plan.replicas * plan.kv_tokens_per_replica)} held",
            f"one replica serves {each} requests a second within your targets; we load it to "
            f"{HEADROOM:.0%} so that bursts do not break them, so {rate} a second take "
            f"{plan.replicas}, and {plan.spares} more so that a failure is not noticed")


def why_not_half(at: Stand) -> Answered:
    """Every single change, then pairs, against half the price."""
    case, base = at.case, bill(at.case)
    question = "What would halve the cost?"
    changes = single_changes(case, case.tables)
    ones = billed(case, [(change,) for change in changes], base)
    if base is None:
        works = ", ".join(way_text(way) for _, way in ones[:4])
        none = (f"--gpu-price has none for {case.d.gpu.name}, so there is no cost to halve"
                if case.args.prices and not case.args.gpu_price else
                "nothing to halve: as it is, no number of replicas holds the load; with one change "
                + (f"it would: {works}" if works else "neither"))
        return question, none, none
    halves = [row for row in ones if row[0] <= 0.5]
    twos = [] if halves else billed(case, [(a, b) for i, a in enumerate(changes)
                                           for b in changes[i + 1:] if a.axis != b.axis], base)
    shown = halves[:4] or [row for row in ones[:2] + twos[:1] if row[0] < 0.99]
    if not shown:
        none = f"nothing that was tried makes it cheaper ({len(ones)} single changes, and pairs)"
        return question, none, none
    texts = []
    for share, way in shown:  # with what it costs beside money: words, the TPOT it ends at
        (d, load), words = changed(case, *way), [change.price for change in way if change.price]
        plan = load and plan_of(d, load, calibration_of(d, case.args.engine or "vllm",
                                                        case.tables), "")
        if plan and plan.steady:
            words.append(f"TPOT {scaled(plan.steady.tpot_s, 's')}")
        texts.append(f"{way_text(way)} {share:.2f}x"
                     + (f" ({'; '.join(dict.fromkeys(words))})" if words else ""))
    share, way = min(shown, key=lambda row: row[0])
    said = f"{way_text(way)} would bring it to {share:.0%}"
    told = (said if halves else f"no single step does, but {said}" if share <= 0.5 else
            f"no single step does, nor do two; {said}")
    asks = "; ".join(dict.fromkeys(change.price for change in way if change.price))
    return (question, ("" if halves else "no single change does. The nearest, and the best pair: ")
            + f"{'; '.join(texts)}. {len(ones)} single changes tried, in "
            f"{'dollars' if case.args.prices else 'GPU-hours'} per 1M output tokens",
            told + (f". What it asks: {asks}" if asks else ""))


def billed(case: Case, ways: Sequence[Tuple[Change, ...]], base: Optional[float]
           ) -> List[Tuple[float, Tuple[Change, ...]]]:
    """Those of the ways that work, with their price over the base's, the cheapest first."""
    found = [(cost / (base or 1.0), way) for way in ways for cost in (bill(case, *way),) if cost]
    return sorted(found, key=lambda row: row[0])


def way_text(way: Sequence[Change]) -> str:
    """Some changes by name."""
    return " with ".join(change.label for change in way)


DEFENCES = (why_tpot, why_not_more, why_precision, why_speculation, why_replicas, why_not_half)


def say_defend(case: Case, answer: Answer) -> None:
    """The hard questions, answered for a researcher and for a customer."""
    if not case.memory.fits:
        answer.add("defend", [])
        answer.say("DEFEND", "it does not start, so there is nothing to defend; see WOULD DO")
        return
    batch, plan, d = operating_batch(case), case.plan, case.d
    steady = plan.steady if plan and not d.asked else None
    step_s = expected_step_s(d, steady.batch if steady else batch, case.cal)
    tpot_s = (steady.tpot_s if steady else Replica(d, plan.load, case.cal).at(batch).tpot_s if plan
              else expected_of(d, batch, case.cal).tpot_s if d.output_tokens else step_s)
    found = [why(Stand(case, batch, step_s, tpot_s)) for why in DEFENCES]
    answer.add("defend", [dict(zip(("question", "researcher", "customer"), one)) for one in found])
    answer.lines += ["", "DEFEND       expected figures are estimates until measured"]
    for question, researcher, customer in found:
        answer.lines.append(question)
        answer.say("  researcher", researcher)
        answer.say("  customer", customer)


# ---- 9c. Launch commands -----------------------------------------------------------------------
# One table of engine settings. From it come the tables of --flags, the launch command and its
# reasons, and the reading of a pasted command.


class Setting(NamedTuple):
    """One setting: the term of the step time or memory budget it changes, each engine's spelling.

    A row whose term is '' continues the line of --flags above it. Where a `key` is a flag of ours
    (`--tp`), a pasted command sets that. A TensorRT-LLM spelling with a dot, or without dashes, is
    a key of its YAML options. The first spelling is the one written, the others are read too.
    """

    key: str
    term: str
    vllm: str
    sglang: str = ""
    trtllm: str = ""
    note: str = ""
    sglang_note: str = ""


# Sources: the flag tables of the serving spec; vLLM 0.32, SGLang 0.5.23 and TensorRT-LLM 1.2
# parsers (tests/data/engine_flags.json lists the first two).
SETTINGS = (
    Setting("tp", "N in W/N, KV/N", "--tensor-parallel-size -tp",
            "--tp-size --tp --tensor-parallel-size", "--tp_size --tp --tensor_parallel_size",
            "Within NVLink domain"),
    Setting("pp", "Layers per GPU", "--pipeline-parallel-size -pp",
            "--pp-size --pp --pipeline-parallel-size", "--pp_size --pp --pipeline_parallel_size",
            "Across nodes"),
    Setting("dp", "Replicas", "--data-parallel-size -dp", "--dp-size --dp --data-parallel-size",
            "", "Also used for DP attention with EP", "Router across replicas built in"),
    Setting("ep", "MoE layout", "--enable-expert-parallel -ep",
            "--ep-size --ep --expert-parallel-size", "--ep_size --ep --moe_expert_parallel_size",
            "EP instead of TP for MoE layers", "Standard DeepSeek recipe"),
    Setting("attention_dp", "", "", "--enable-dp-attention", "enable_attention_dp"),
    Setting("dcp", "KV per rank", "--decode-context-parallel-size -dcp",
            "--dcp-size --decode-context-parallel-size", "",
            "Shares a sequence's KV out over TP ranks"),
    Setting("pcp", "Prefill tokens per GPU", "--prefill-context-parallel-size -pcp",
            "--attn-cp-size --attention-context-parallel-size",
            "--cp_size --context_parallel_size", "Splits a long prompt over GPUs"),
    Setting("pcp_on", "", "", "--enable-prefill-cp"),
    Setting("ctx", "Max context", "--max-model-len", "--context-length", "--max_seq_len",
            "Must fit one sequence in the KV pool; lower it to start on small GPUs"),
    Setting("util", "util", "--gpu-memory-utilization --device-memory-utilization",
            "--mem-fraction-static", "kv_cache_config.free_gpu_memory_fraction "
            "--kv_cache_free_gpu_memory_fraction --kv_cache_free_gpu_mem_fraction "
            "--free_gpu_memory_fraction",
            "Fraction of GPU memory for the engine; the KV pool is what is left after weights and "
            "profiling", "Weights + KV pool fraction; lower it if you see OOM during CUDA graph "
            "capture"),
    Setting("max_num_seqs", "Max batch B", "--max-num-seqs", "--max-running-requests",
            "--max_batch_size", "Upper bound on concurrency per step"),
    Setting("max_num_batched_tokens", "Tokens per step", "--max-num-batched-tokens",
            "--chunked-prefill-size", "--max_num_tokens",
            "The chunked-prefill budget; defaults vary by version and GPU, read it from the "
            "startup log", "-1 disables chunking"),
    Setting("chunked_prefill", "Prefill mixing", "--enable-chunked-prefill", "",
            "enable_chunked_prefill --enable_chunked_prefill", "On by default in the V1 engine"),
    Setting("no_chunked_prefill", "", "--no-enable-chunked-prefill"),
    Setting("prefix_caching", "Prefix reuse", "--enable-prefix-caching", "",
            "kv_cache_config.enable_block_reuse",
            "On by default in V1; --no-enable-prefix-caching for clean benchmarks",
            "RadixAttention is on by default"),
    Setting("no_prefix_caching", "", "--no-enable-prefix-caching", "--disable-radix-cache",
            "--disable_kv_cache_reuse"),
    Setting("schedule_policy", "Queue order", "", "--schedule-policy", "", "",
            "fcfs default; lpm for prefix-heavy traffic; also dfs-weight, lof, priority, random"),
    Setting("schedule_conservativeness", "KV kept for running requests", "",
            "--schedule-conservativeness", "", "",
            "Higher reserves more KV for running requests, fewer preemptions"),
    Setting("kv", "b_kv", "--kv-cache-dtype", "--kv-cache-dtype", "kv_cache_config.dtype",
            "auto, fp8 (and fp8_e4m3 / fp8_e5m2 variants)",
            "auto, fp8_e4m3, fp8_e5m2, bf16, plus FP4 variants on Blackwell"),
    Setting("weights", "b for weights", "--quantization -q", "--quantization", "",
            "fp8, awq, gptq, compressed-tensors checkpoints auto-detected"),
    Setting("dtype", "b of what is not quantised", "--dtype", "--dtype", "dtype"),
    Setting("speculative", "Tokens per step", "--speculative-config -sc",
            "--speculative-algorithm --speculative-algo", "speculative_config",
            'JSON: {"method": "eagle3", "model": ..., "num_speculative_tokens": 3}; methods '
            "include draft_model, ngram, eagle, eagle3, mtp, suffix",
            "The method: EAGLE, EAGLE3, NEXTN (MTP), STANDALONE (draft model), NGRAM"),
    Setting("spec_model", "", "--spec-model",
            "--speculative-draft-model-path --speculative-draft-model"),
    Setting("spec_steps", "", "--spec-tokens", "--speculative-num-steps"),
    Setting("spec_method", "", "--spec-method"),
    Setting("spec_topk", "", "", "--speculative-eagle-topk"),
    Setting("spec_draft_tokens", "", "", "--speculative-num-draft-tokens"),
    Setting("lora", "Adapter slots", "--enable-lora", "--enable-lora", "enable_lora",
            "--max-loras adapters per batch (default 1), rank options up to 512",
            "--max-loras-per-batch default 8"),
    Setting("lora_paths", "", "--lora-modules", "--lora-paths"),
    Setting("lora_count", "", "--max-loras", "--max-loras-per-batch", "lora_config.max_loras"),
    Setting("lora_rank", "", "--max-lora-rank", "--max-lora-rank", "lora_config.max_lora_rank"),
    Setting("lora_modules", "", "", "--lora-target-modules"),
    Setting("kv_transfer", "P/D disaggregation", "--kv-transfer-config", "--disaggregation-mode",
            "cache_transceiver_config.backend", "JSON naming a KV connector",
            "Separate prefill and decode servers"),
    Setting("kv_transfer_backend", "", "", "--disaggregation-transfer-backend"),
    Setting("async_scheduling", "CPU overhead", "--async-scheduling", "", "",
            "Overlaps scheduling with GPU execution"),
    Setting("no_async_scheduling", "", "--no-async-scheduling", "--disable-overlap-schedule",
            "disable_overlap_scheduler", "", "Overlap is on by default"),
    Setting("eager", "Kernel launches per layer", "--enforce-eager", "--disable-cuda-graph", "",
            "No CUDA graphs: for debugging"),
    Setting("load_format", "Cold start", "--load-format", "--load-format", "",
            "runai_streamer streams weights from storage"),
    Setting("metrics", "Nothing: what autoscaling and alerts read", "", "--enable-metrics",
            "return_perf_metrics", "", "vLLM always serves /metrics"),
    Setting("iteration_metrics", "", "", "", "enable_iter_perf_stats"),
    Setting("trust", "Nothing: the tokenizer is the checkpoint's own code",
            "--trust-remote-code", "--trust-remote-code", "--trust_remote_code"),
)
SWITCHES = {  # settings that take no value, where an engine spells them as a flag
    "attention_dp", "pcp_on", "chunked_prefill", "no_chunked_prefill", "prefix_caching",
    "no_prefix_caching", "lora", "async_scheduling", "no_async_scheduling", "eager", "metrics",
    "trust"}
YAML_FILE = "trtllm.yaml"


def spelling(engine: str, key: str) -> str:
    """How an engine writes one setting: a flag, a key of trtllm's YAML, or '' if it has none."""
    names = next(getattr(row, engine) for row in SETTINGS if row.key == key)
    return str(names).split(" ")[0]


def is_switch(engine: str, key: str) -> bool:
    """Whether an engine's flag for a setting takes no value."""
    return key in SWITCHES or (engine, key) == ("vllm", "ep")


ENGINE_TITLES = {"vllm": "vLLM (vllm serve)", "sglang": "SGLang (python -m sglang.launch_server)",
                 "trtllm": "TensorRT-LLM (trtllm-serve; names without dashes are keys of its YAML)"}


def print_flags(as_json: bool) -> None:
    """The flag tables: vLLM's flag, term and notes; the others' flag, vLLM analogue and notes."""
    import itertools
    import textwrap
    lines: List[List[Setting]] = []
    for row in SETTINGS:
        if row.term:
            lines.append([])
        lines[-1].append(row)
    tables: Dict[str, List[Dict[str, str]]] = {engine: [] for engine in ENGINES}
    for engine, line in itertools.product(ENGINES, lines):
        mine = [row for row in line if getattr(row, engine)]
        notes = [{"vllm": row.note, "sglang": row.sglang_note}.get(engine) for row in line]
        if mine:
            tables[engine].append({
                "flag": ", ".join(getattr(row, engine).replace(" ", " / ") for row in mine),
                "term": line[0].term,
                "vllm": ", ".join(row.vllm.split(" ")[0] for row in mine if row.vllm) or "(none)",
                "notes": "; ".join(filter(None, notes))})
    if as_json:
        print(json.dumps({"flags": tables}, indent=1))
        return
    heads = {"flag": "flag", "term": "term it changes", "vllm": "vLLM analogue", "notes": "notes"}
    for engine, rows in tables.items():
        print(f"{ENGINE_TITLES[engine]}")
        columns = ("flag", "term" if engine == "vllm" else "vllm", "notes")
        for cells in (heads, *rows):
            parts = [textwrap.wrap(cells[c], width, break_on_hyphens=False, break_long_words=False)
                     for c, width in zip(columns, (38, 28, 40))]
            for flag, term, note in itertools.zip_longest(*parts, fillvalue=""):
                print(f"  {flag:<39} {term:<29} {note}".rstrip())
        print()


class Launch(NamedTuple):
    """How one replica's engine is to be started."""

    engine: str
    model_id: str
    stored: str  # precision of that checkpoint, by our name
    d: Deployment
    args: Any
    own: Settings  # what is not said below
    max_num_seqs: int  # as the engine counts: SGLang over all DP-attention ranks, else of one
    max_num_batched_tokens: int  # likewise
    draft: Draft
    async_scheduling: bool
    why: Mapping[str, str]  # reasons that take the place of the usual ones, by setting

    @property
    def online_quantised(self) -> bool:
        """Whether the engine is to make FP8 weights of a 16-bit checkpoint while it loads."""
        return self.d.weights.name == "fp8" and self.stored in SIXTEEN_BIT


class LaunchFlag(NamedTuple):
    """One flag of a launch command, its value ('' for a switch), the term it changes and why."""

    flag: str
    value: str
    reason: str


KV_NAMES = {  # how the engines name a KV precision that is not the checkpoint's own
    "vllm": {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8", "int8": "int8_per_token_head",
             "nvfp4": "nvfp4"},
    "sglang": {"bf16": "bfloat16", "fp16": "auto", "fp8": "fp8_e4m3", "nvfp4": "nvfp4"},
    "trtllm": {"bf16": "auto", "fp16": "auto", "fp8": "fp8", "nvfp4": "nvfp4"}}
SIXTEEN_BIT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SPEC_NAMES = {  # vLLM's method -> SGLang's algorithm, TensorRT-LLM's decoding type
    "eagle3": ("EAGLE3", "Eagle3"), "eagle": ("EAGLE", ""), "mtp": ("NEXTN", "MTP"),
    "draft_model": ("STANDALONE", "DraftTarget"), "ngram": ("NGRAM", "NGram"), "suffix": ("", "")}
DRAFTERS = ("eagle3", "eagle", "draft_model")  # methods that want a model of their own
DRAFTER = "DRAFTER"  # stands where --spec-model was not given
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the choices of vLLM's --max-lora-rank
CPU_BOUND_STEP_S = 0.010  # a step so short that scheduling it on the CPU shows


def launch_flags(launch: Launch) -> List[LaunchFlag]:
    """The flags of a launch command in the table's order, each with the term it changes.

    A setting that the engine has no flag for is left out; launch_notes says so.
    """
    engine, d, own = launch.engine, launch.d, launch.own
    of = {"sglang": "memory for weights and KV pool",
          "trtllm": f"what loading leaves free; util {d.util:g} of all memory"}.get(
              engine, "memory for the engine; the KV pool is what is left of it")
    kv = f"{figure(sequence_bytes(d, own.max_model_len) / GIB)} GiB/GPU of KV each"
    values: Values = {
        "ctx": (str(own.max_model_len), f"longest request, {kv}; one must fit the pool"),
        "util": (f"{own.util:.4g}", f"share of {of}"),
        "max_num_seqs": (str(launch.max_num_seqs), "most that run in a step; the rest queue"),
        "max_num_batched_tokens": (
            str(launch.max_num_batched_tokens),
            "prefill that a step takes on beside the decodes: fewer for ITL, more for TTFT"),
        **layout_values(engine, d), **option_values(launch),
        **spec_values(engine, launch.draft, launch.args.spec_model)}
    found, term = [], ""
    for row in SETTINGS:
        term = row.term or term
        if row.key in values and spelling(engine, row.key):
            value, why = values[row.key]
            found.append(LaunchFlag(spelling(engine, row.key), value,
                                    f"{term}: {launch.why.get(row.key, why)}"))
    return found


Values = Dict[str, Tuple[str, str]]  # setting -> value as written, why


def layout_values(engine: str, d: Deployment) -> Values:
    """Parallelism. SGLang and TensorRT-LLM count DP attention and context ranks in their TP."""
    vllm = engine == "vllm"
    tp = d.tp if vllm else d.tp * d.attention_dp * (d.pcp if engine == "sglang" else 1)
    inside = "" if tp == d.tp else f", attention TP={d.tp}"
    values: Values = {}
    if tp > 1:
        values["tp"] = (str(tp), f"weights {weights_bytes_per_gpu(d) / GIB:.2f} GiB a GPU{inside}")
    if d.pp > 1:
        values["pp"] = (str(d.pp), f"{-(-d.model.layers // d.pp)} of {d.model.layers} layers")
    if d.dp > 1 and engine != "trtllm":
        values["dp"] = (str(d.dp), "attention data-parallel, its KV in one rank only"
                        if d.attention_dp > 1 else f"{d.replicas} copies of the model")
    if d.ep > 1:
        values["ep"] = ("" if vllm else str(d.ep), f"{-(-d.model.experts // d.ep)} of "
                        f"{d.model.experts} experts, whole, on a GPU")
    if d.attention_dp > 1:
        values["attention_dp"] = (switched_on(engine), "a sequence's KV is on one rank, not on all")
    if d.dcp > 1:
        values["dcp"] = (str(d.dcp), f"1/{d.dcp} of each sequence's KV on a rank")
    if d.pcp > 1:
        values["pcp"] = (str(d.pcp), f"a prompt over {d.pcp} GPUs")
        values["pcp_on"] = ("", "the prefill is split")
    return values


def switched_on(engine: str) -> str:
    """A switch that is on: bare as a flag, true in YAML."""
    return "true" if engine == "trtllm" else ""


def option_values(launch: Launch) -> Values:
    """What the question involves: precision, caching, adapters, transfer, loading.

    vLLM takes set LoRA ranks only, SGLang wants to know the modules beforehand; of P/D
    disaggregation SGLang's command is the decode server's.
    """
    d, args, engine, on = launch.d, launch.args, launch.engine, switched_on(launch.engine)
    values: Values = {
        "metrics": (on, "queue depth, token usage"), "iteration_metrics": (on, "the same"),
        "prefix_caching": (on, "a shared prefix is prefilled once")}
    if engine == "trtllm":
        values["chunked_prefill"] = (on, "long prompts in pieces beside the decodes")
    if args.shared_prefix_len:
        values["schedule_policy"] = ("lpm", "longest cached prefix first")
    sparse = any(cache.kind == "indexer" for cache in d.model.caches)
    name = KV_NAMES[engine].get(d.kv.name)
    if name and (d.kv.bytes < 2 or d.model.kv_native or sparse):
        values["kv"] = (name, f"{figure(d.kv.bytes)} B an element")
    if launch.online_quantised:
        values["weights"] = (d.weights.name, f"{figure(d.weights.bytes)} B a parameter, made at "
                             "load from the 16-bit checkpoint")
    elif d.weights.name != launch.stored and {d.weights.name, launch.stored} <= set(SIXTEEN_BIT):
        values["dtype"] = (SIXTEEN_BIT[d.weights.name], f"the checkpoint is {launch.stored}")
    if launch.async_scheduling:
        values["async_scheduling"] = ("", "the next step is scheduled while this one runs")
    if args.storage:
        values["load_format"] = ("runai_streamer", "weights stream from storage, many readers")
    if launch.model_id.startswith("moonshotai/"):
        values["trust"] = ("", "as its card says")
    if args.lora_rank:
        rank = args.lora_rank
        if engine == "vllm":
            rank = next((r for r in LORA_RANKS if r >= rank), LORA_RANKS[-1])
        values.update(lora=(on, "adapters over one base"),
                      lora_count=(str(args.lora_count), "adapters of one batch, resident"),
                      lora_rank=(str(rank), f"slots sized for rank {rank}"),
                      lora_modules=("all", "adapters may touch any matrix"))
    if args.kv_link:
        connector = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
        values.update(kv_transfer=({"vllm": connector, "sglang": "decode",
                                    "trtllm": "DEFAULT"}[engine],
                                   "prompts are prefilled elsewhere, their KV shipped here"),
                      kv_transfer_backend=("nixl", "RDMA between the pools"))
    return values


def spec_values(engine: str, draft: Draft, drafter: Optional[str]) -> Values:
    """Speculative decoding: JSON for vLLM and TensorRT-LLM, five flags for SGLang."""
    method, gamma = draft.method, draft.tokens
    if not method:
        return {}
    model = drafter or (DRAFTER if method in DRAFTERS else "")
    algorithm, decoding = SPEC_NAMES[method]
    why = f"{gamma} drafted tokens verified in one step"
    if engine == "vllm":
        config: Dict[str, Any] = {"method": method, "num_speculative_tokens": gamma}
        config.update({"model": model} if model else {})
        config.update({"prompt_lookup_max": 4} if method == "ngram" else {})
        return {"speculative": (json.dumps(config), why)}
    if engine == "trtllm":
        length = "num_nextn_predict_layers" if method == "mtp" else "max_draft_len"
        config = {"decoding_type": decoding, length: gamma}
        config.update({"speculative_model_dir": model} if model else {})
        return {"speculative": (json.dumps(config), why)} if decoding else {}
    if not algorithm:
        return {}
    values = {"speculative": (algorithm, why),
              "spec_draft_tokens": (str(gamma + 1), "tokens of a sequence in a verification")}
    if model:
        values["spec_model"] = (model, "the drafter's weights, beside the target's")
    if method != "ngram":
        values["spec_steps"] = (str(gamma), "draft steps before a verification")
        values["spec_topk"] = ("1", "a chain, no tree")
    return values


def native_of(d: Deployment) -> str:
    """The precision of the checkpoint by our name."""
    return SPELLINGS.get(d.model.native, d.model.native)


def launch_notes(launch: Launch) -> List[str]:
    """What a launch command cannot say, or leaves to be filled in."""
    d, engine, args, method = launch.d, launch.engine, launch.args, launch.draft.method
    wanted, stored = d.weights.name, launch.stored
    trtllm, drawn = engine == "trtllm", {wanted, stored} <= set(SIXTEEN_BIT) or wanted == stored
    missing = [name for name, on in (
        ("dcp", d.dcp > 1), ("load_format", args.storage)) if on and not spelling(engine, name)]
    if method and not spec_values(engine, launch.draft, args.spec_model):
        missing.append(f"speculation by {method}")
    notes = (
        (launch.online_quantised and trtllm, "TensorRT-LLM loads FP8, it does not make it: name an "
         f"FP8 checkpoint in place of {launch.model_id}"),
        (not launch.online_quantised and not drawn, f"weights {wanted}: {launch.model_id} is "
         f"{stored}; name a checkpoint in {wanted} in its place, its quantisation is then found by "
         "itself"),
        (d.kv.bytes < 2 and d.kv.name not in KV_NAMES[engine],
         f"{engine} has no {d.kv.name} KV cache"),
        (engine == "vllm" and d.ep > 1 and d.ep != d.tp * d.pcp * d.dp,
         f"vLLM's EP is all of TP x DP, not {d.ep}: more experts apart, fewer slices"),
        (trtllm and d.attention_dp > 1 and d.tp > 1,
         "TensorRT-LLM's attention DP takes every rank: attention TP is 1 there"),
        (trtllm and d.replicas > 1,
         f"one of {d.replicas} replicas: start each, with a router before them"),
        (missing, f"{engine} has no flag for {', '.join(missing)}"),
        (method in DRAFTERS and not args.spec_model,
         f"{DRAFTER} stands for the {method} drafter: --spec-model"),
        (engine == "vllm" and (args.lora_rank or 0) > LORA_RANKS[-1],
         f"vLLM's adapters go up to rank {LORA_RANKS[-1]}"),
        (args.kv_link, {
            "vllm": "the same for the prefill and the decode pool, a router before both",
            "sglang": "this is a decode server; a prefill server takes --disaggregation-mode "
            "prefill, a router joins them",
            "trtllm": "trtllm-serve disaggregated -c FILE joins the servers"}[engine]),
        (d.replica_gpus > SERVER_GPUS, f"{d.replica_gpus} GPUs are more than one server: each node "
         "runs this with its --nnodes, --node-rank and the first node's address"))
    return [note for holds, note in notes if holds]


def launch_command(launch: Launch, flags: Sequence[LaunchFlag]) -> List[str]:
    """The command as lines of a shell script; TensorRT-LLM's YAML options go before it."""
    import shlex
    model = shlex.quote(launch.model_id)
    start = {"vllm": f"vllm serve {model}", "trtllm": f"trtllm-serve {model}",
             "sglang": f"python3 -m sglang.launch_server --model-path {model}"}[launch.engine]
    yaml: Dict[str, Any] = {}
    words = []
    for flag, value, _ in flags:
        if flag.startswith("-"):
            words.append(f"{flag} {shlex.quote(value)}" if value else flag)
            continue
        *outer, leaf = flag.split(".")
        place = yaml
        for name in outer:
            place = place.setdefault(name, {})
        try:
            place[leaf] = json.loads(value)
        except ValueError:
            place[leaf] = value
    head = []
    if yaml:
        head = [f"cat > {YAML_FILE} <<'END'",
                *(f"{key}: {json.dumps(value)}" for key, value in yaml.items()), "END"]
        words.append(f"--extra_llm_api_options {YAML_FILE}")
    return [*head, " \\\n".join([start, *(f"    {word}" for word in words)])]


def one_replica(case: Case) -> Deployment:
    """The deployment that a command starts: a planned fleet is so many commands of one replica."""
    fleet = case.plan and case.plan.load.rate_rps and case.d.attention_dp == 1
    return case.d._replace(dp=1) if fleet else case.d


def launch_of(case: Case) -> Launch:
    """The launch that a question asks for: what was given, else the plan's, else what KV holds."""
    args, plan = case.args, case.plan
    d = one_replica(case)
    own, draft = settings_of(d, args, plan), draft_of(d, args)
    slots, chunk = own.max_num_seqs, own.max_num_batched_tokens
    why = {}
    if plan:
        why = {"max_num_seqs": f"Little's L: {plan.slots_text}",
               "ctx": "p99.9 of input + output"}
    elif not args.max_num_seqs:
        held = int(case.average_seqs)
        slots = min(SEQS_MOST, held - held % 8 or held or 1)
        guess = "" if d.output_tokens else ", assumed: give --input-len and --output-len"
        why = {"max_num_seqs": f"the KV pool holds {count(held)} of the average "
               f"{count(d.history_tokens)} tokens{guess}"}
    if args.engine != "sglang":
        slots = slots if args.max_num_seqs else -(-slots // d.attention_dp)
    elif not args.max_num_batched_tokens:
        chunk *= d.attention_dp
    step_s = case.step.step_s if case.batch else math.inf
    return Launch(
        args.engine, *checkpoint_of(args, d), d, args, own, slots,
        chunk if args.max_num_batched_tokens else max(chunk, slots), draft,
        step_s < CPU_BOUND_STEP_S and d.pp == 1 and not args.kv_link
        and draft.method not in ("ngram", "suffix"),
        {key: text for key, text in why.items() if key not in args.given})


def checkpoint_of(args: Any, d: Deployment) -> Tuple[str, str]:
    """What the engine is told to load, and its precision: a preset's id, else the name as given."""
    pasted = getattr(args, "from")
    if pasted and (args.params or args.model == pasted.resolved):
        return pasted.model, pasted.stored or native_of(d)
    name = args.preset or args.config or args.model
    row = next((r for r in presets().get("models", ()) if name and name.lower() in (
        r["name"], *r.get("aliases", ()))), None)
    if row and (args.preset or not os.path.lexists(name)):
        name = row["id"]
    elif name and name.endswith(".json"):
        name = os.path.dirname(name) or "."
    return name or "MODEL", native_of(d)


def say_launch(case: Case, answer: Answer) -> None:
    """The command that starts the engine, and for each flag the term it changes."""
    import textwrap
    launch, own = launch_of(case), started_with(case)
    flags = launch_flags(launch)
    command = answer.add("engine.command", "\n".join(launch_command(launch, flags)))
    answer.add("engine.flags", [flag._asdict() for flag in flags])
    notes = answer.add("engine.launch_notes", launch_notes(launch))
    answer.lines.append("")
    width = max(len(f"{flag.flag} {flag.value}") for flag in flags if len(flag.value) < 30)
    asked = case.plan.replicas if case.plan else 0
    copies = f", one of {counted(asked, 'replica')}" if asked else ""
    pasted = (": the pasted deployment, what it set NOT changed as CHANGE says; limits that it "
              "left out are set by the figures above" if getattr(case.args, "from") else "")
    answer.say("LAUNCH", f"{launch.engine}{copies}{pasted}: each flag and the term it changes")
    for flag in flags:
        shown = f"{flag.flag} {flag.value}".strip()
        if len(shown) > width:
            answer.lines.append(f"  {shown}")
            shown = ""
        answer.lines += [f"  {'' if i else shown:<{width}}  {part}" for i, part in enumerate(
            textwrap.wrap(flag.reason, SCREEN - width - 4, break_on_hyphens=False))]
    differing = [f"{spelling(launch.engine, key)} {mine}" for key, mine, theirs in (
        ("ctx", launch.own.max_model_len, own.max_model_len),
        ("max_num_seqs", launch.max_num_seqs, own.max_num_seqs),
        ("max_num_batched_tokens", launch.max_num_batched_tokens, own.max_num_batched_tokens))
        if mine != theirs]
    if differing:
        notes = [*notes, (
            f"the log does not name {' '.join(differing)}, which this command has beside it"
            if case.args.startup_log else "ENGINE reckons with the engine's own defaults; for the "
            f"log of this command give {' '.join(differing)} too")]
    refused = engine_answer(case.d, written_out(launch, case.d)).refusals
    if differing and not refused and engine_answer(case.d, own).refusals:
        notes = [*notes, "with the limits of this command the engine is not expected to refuse"]
    if refused:
        notes = [*notes, f"the engine would refuse to start: {refused[0].what}; {refused[0].cure}"]
    for note in notes:
        answer.say("note", note)
    answer.lines += ["", *command.split("\n")]


def written_out(launch: Launch, d: Deployment) -> Settings:
    """What the engine has once the command's limits are given to it."""
    if launch.engine == "sglang":  # its limits are of all ranks
        return launch.own
    return engine_settings(d, launch.own.asked._replace(
        max_num_seqs=launch.max_num_seqs, max_num_batched_tokens=launch.max_num_batched_tokens))


# Reading a pasted command.


class Pasted(NamedTuple):
    """A launch command as read: which engine, which model, what it sets, what was not understood.

    `words` are the same settings as flags of ours; `settings` holds every setting found by its key.
    """

    engine: str
    version: str
    model: str
    resolved: str  # the preset that the model's name stands for, or the name itself
    stored: str  # the precision that its name or its flags say the checkpoint has, or ''
    words: Tuple[str, ...]
    settings: Mapping[str, str]
    unknown: Tuple[str, ...]
    gone: Tuple[str, ...]  # flags that the engine no longer has


OURS = {"tp": "--tp", "pp": "--pp", "dp": "--dp", "ep": "--ep", "dcp": "--dcp", "pcp": "--pcp",
        "ctx": "--ctx", "util": "--util", "max_num_seqs": "--max-num-seqs",
        "max_num_batched_tokens": "--max-num-batched-tokens", "weights": "--weights",
        "kv": "--kv", "spec_method": "--spec-method", "spec_model": "--spec-model",
        "spec_steps": "--spec-tokens", "lora_rank": "--lora-rank", "lora_count": "--lora-count"}
QUANTISATIONS = {  # engines' names -> ours; '' = whatever the checkpoint is
    "modelopt": "", "modelopt_fp8": "fp8", "modelopt_mixed": "", "compressed-tensors": "",
    "quark": "", "inc": "", "torchao": "", "humming": "", "unquant": "bf16", "online": "",
    "w8a8_fp8": "fp8", "fbgemm_fp8": "fp8", "ptpc_fp8": "fp8", "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8", "fp8_per_channel": "fp8", "mxfp8": "fp8", "deepseek_v4_fp8": "",
    "w8a8_int8": "int8", "experts_int8": "int8", "int8_per_channel_weight_only": "int8",
    "bitsandbytes": "int4", "moe_wna16": "int4", "w4afp8": "int4", "auto-round": "int4",
    "auto_awq": "awq", "auto_gptq": "gptq", "gpt_oss_mxfp4": "mxfp4", "petit_nvfp4": "nvfp4",
    "nvfp4_per_token": "nvfp4", "nvfp4_online": "nvfp4"}
KV_READ = {"fp8_inc": "fp8", "fp8_ds_mla": "fp8", "fp8_per_token_head": "fp8", "mxfp8": "fp8",
           "int8_per_token_head": "int8", "nvfp4_4over6": "nvfp4", "nvfp4_ds_mla": "nvfp4",
           "fp4_e2m1": "nvfp4"}
GONE = {  # flags of older vLLM and SGLang that their parsers no longer have -> why not to miss them
    "--swap-space": "preemption recomputes now, nothing is swapped",
    "--num-scheduler-steps": "--async-scheduling hides the CPU instead",
    "--multi-step-stream-outputs": "--async-scheduling hides the CPU instead",
    "--use-v2-block-manager": "the only block manager there is",
    "--preemption-mode": "preemption recomputes now",
    "--max-seq-len-to-capture": "CUDA graphs are captured by batch size",
    "--disable-log-requests": "request logging is off unless --enable-log-requests",
    "--num-lookahead-slots": "--speculative-config reserves them",
    "--speculative-model": "now in --speculative-config",
    "--num-speculative-tokens": "now in --speculative-config",
    "--guided-decoding-backend": "now in --structured-outputs-config",
    "--enable-reasoning": "--reasoning-parser is enough",
    "--scheduler-delay-factor": "chunked prefill mixes prompts in at once",
    "--disable-frontend-multiprocessing": "the front end is always a process of its own",
    "--worker-use-ray": "--distributed-executor-backend ray"}
NEUTRAL = set(  # flags with no bearing on capacity
    "--host --port --api-key --served-model-name --chat-template --tokenizer --tokenizer-path "
    "--tokenizer-mode --download-dir --revision --seed --random-seed --uvicorn-log-level "
    "--log-level --log-requests --disable-log-stats --enable-log-requests --disable-access-log "
    "--enable-auto-tool-choice --tool-call-parser --reasoning-parser --backend --nnodes "
    "--node-rank --dist-init-addr --master-addr --master-port --distributed-executor-backend "
    "--generation-config --override-generation-config --allowed-origins --root-path "
    "--allow-credentials --allowed-local-media-path --show-time-cost --log-requests-level "
    "--watchdog-timeout --hf-token --config-format --disable-uvicorn-access-log "
    "--enable-request-id-headers --trust-request-chat-template --enable-cache-report "
    "--enable-prompt-tokens-details --headless --data-parallel-address --gpus-per-node "
    "--data-parallel-rpc-port --data-parallel-size-local --data-parallel-start-rank "
    "--api-server-count --num-postprocess-workers --log-level-http --file-storage-path "
    "--middleware --ssl-keyfile --ssl-certfile --max-log-len --response-role".split())
BARE = {"--enable-auto-tool-choice", "--headless", "--disable-log-stats", "--enable-cache-report"}
STARTS = (  # engine, what begins its arguments: a program, a module, then container images
    ("vllm", r"(?:.*/)?vllm serve"), ("sglang", r"(?:.*/)?sglang serve"),
    ("trtllm", r"(?:.*/)?trtllm-serve(?: serve)?"),
    ("vllm", r"(?:-m )?(?:vllm\.entrypoints\.\S+|dynamo\.vllm)|\S*/api_server\.py"),
    ("sglang", r"(?:-m )?(?:sglang\.launch_server|dynamo\.sglang)|\S*/launch_server\.py"),
    ("vllm", r"\S*vllm-openai\S*|\S*/vllm:[\w.-]+"), ("sglang", r"\S*/sglang(?::[\w.-]+)?"))


def pasted_command(text: str) -> Pasted:
    """A launch command of vLLM, SGLang or TensorRT-LLM as it stands in a script or a README.

    Environment prefixes, docker run, launchers, line continuations, quotes and redirections are
    seen through. Raises UserError when it is no such command, or names no model.
    """
    import re
    tokens = shell_words(text)
    found = engine_start(tokens)
    if not found:
        raise UserError("is no launch command that is known here; paste a vllm serve, python -m "
                        "sglang.launch_server or trtllm-serve line")
    engine, start = found
    tag = re.search(r"(?:vllm-openai|vllm|sglang|release):v?(\d+\.\d+(?:\.\d+)?)",
                    " ".join(tokens[:start]))  # of a container image
    settings, unknown, stray = read_flags(engine, tokens[start:])
    model = settings.pop("model", "") or (stray[0] if stray else "")
    unknown += [word for word in stray if word != model]
    if not model:
        raise UserError("names no model; put it after the command, as vllm serve MODEL does")
    if "$" in model:
        raise UserError(f"names the model by a shell variable, {model}; put its value there")
    gone = tuple(flag for flag in unknown if flag in GONE)
    unknown = [flag for flag in unknown if flag not in GONE]
    own_settings(engine, settings, unknown)
    resolved, native, stored = known_as(model)
    if settings.get("weights") == native:
        settings["weights"] = ""  # the checkpoint's own, whose bytes are known
    if stored and not settings.get("weights"):
        settings["weights"] = stored
    words = [word for key, flag in OURS.items() if settings.get(key)
             for word in (flag, settings[key])]
    if settings.get("weights") != "fp8":  # which alone may be made at load
        stored = stored or settings.get("weights", "")
    return Pasted(engine, tag[1] if tag else "", model, resolved, stored, tuple(words), settings,
                  tuple(dict.fromkeys(unknown)), gone)


def shell_words(text: str) -> List[str]:
    """The words of a shell command, up to its first redirection, pipe or next command."""
    import re
    import shlex
    text = text.strip()
    if text.startswith("["):  # the args of a Dockerfile or a pod
        try:
            words = json.loads(text)
        except ValueError:
            words = None
        if not isinstance(words, list):
            raise UserError("begins with [ and is no JSON list of words")
        return [str(word) for word in words]
    text = re.sub(r"(?<=\s)\d(?=>)", "", re.sub(r"\\\s*\n", " ", text))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise UserError(f"cannot be split into words: {str(error).lower()}") from None
    marker = next((i for i, word in enumerate(words) if set(word) <= set(";|&<>") and word
                   and engine_start(words[:i])), len(words))
    return words[:marker]


def engine_start(tokens: Sequence[str]) -> Optional[Tuple[str, int]]:
    """Which engine a command starts, and where its arguments begin; None if it starts none."""
    import re
    for engine, pattern in STARTS:
        for i in range(len(tokens)):
            for span in (3, 2, 1):
                if i + span <= len(tokens) and re.fullmatch(pattern, " ".join(tokens[i:i + span])):
                    return engine, i + span
    return None


def setting_names(engine: str) -> Dict[str, str]:
    """Every flag of an engine in the table -> its setting, dashes for underscores."""
    return {name.replace("_", "-"): row.key for row in SETTINGS
            for name in getattr(row, engine).split() if name.startswith("-")}


def read_flags(engine: str, tokens: Sequence[str]) -> Tuple[Dict[str, str], List[str], List[str]]:
    """(settings, flags not understood, words that belong to no flag) of an engine's arguments."""
    names = {**setting_names(engine), "--model": "model", "--model-path": "model",
             "--model-tag": "model"}
    settings: Dict[str, str] = {}
    unknown: List[str] = []
    stray: List[str] = []
    spare: List[str] = []  # behind a flag that may be a switch: the model, if there is no other
    i = 0
    while i < len(tokens):
        flag, equals, value = tokens[i].partition("=")
        at, i = i, i + 1
        if not flag.startswith("-") or number_like(flag):
            stray.append(tokens[at])
            continue
        flag, _, part = (flag.replace("_", "-") if flag.startswith("--") else flag).partition(".")
        key = names.get(flag)
        values = [value] if equals else []
        if not equals and flag not in BARE and not (key and is_switch(engine, key)):
            while i < len(tokens) and (not tokens[i].startswith("-") or number_like(tokens[i])):
                values.append(tokens[i])
                i += 1
                if key not in (None, "lora_paths", "lora_modules"):
                    break
        if part and key == "speculative":
            settings.update(spec_settings({part: values[0] if values else ""}))
        elif key:
            if not values and not is_switch(engine, key):
                raise UserError(f"has no value after {flag}")
            settings[key] = " ".join(values) or "true"
        elif flag not in NEUTRAL:
            unknown.append(flag if flag in GONE else tokens[at].partition("=")[0])
            spare += [value for value in values[-1:] if "/" in value]
    if not stray and "model" not in settings:
        stray = spare[-1:]
    return settings, unknown, stray


def number_like(text: str) -> bool:
    """Whether a word that begins with a dash is a negative number."""
    return text[1:].replace(".", "", 1).isdigit()


def own_settings(engine: str, settings: Dict[str, str], unknown: List[str]) -> None:
    """Turn an engine's values into ours, in place; what has none joins the unknown."""
    def translate(key: str, table: Mapping[str, str], known: Iterable[str]) -> None:
        value = settings.get(key, "").lower()
        ours = table.get(value, SPELLINGS.get(value, value))
        if ours and ours not in ("auto", "none", *known):
            unknown.append(f"{spelling(engine, key)} {value}")
            ours = ""
        if value:
            settings[key] = "" if ours in ("auto", "none") else ours

    translate("weights", QUANTISATIONS, WEIGHTS)
    translate("kv", KV_READ, KV)
    if settings.get("dtype") in ("float", "float32") and not settings.get("weights"):
        settings["weights"] = "fp32"
    if settings.get("ctx", "").lower() in ("auto", "-1"):
        settings["ctx"] = ""
    if settings.get("max_num_batched_tokens", "").startswith("-"):  # SGLang: no chunking
        settings.update(max_num_batched_tokens="", no_chunked_prefill="true")
    if engine == "trtllm" and settings.pop("util", ""):
        unknown.append("--kv_cache_free_gpu_memory_fraction (of free memory: give --util)")
    if engine == "vllm" and settings.get("ep"):
        settings["ep"] = "all"
    if engine == "sglang":  # whose TP counts the ranks of DP attention and of context too
        ranks = named("--dp-size", whole)(settings.get("dp", "1"))
        ranks = ranks if settings.get("attention_dp") else 1
        tp = named("--tp-size", whole)(settings.get("tp", "1"))
        inside = ranks * named("--attn-cp-size", whole)(settings.get("pcp", "1"))
        if tp % inside:
            raise UserError(f"has --tp-size {tp}, no multiple of its {inside} DP-attention and "
                            "context ranks")
        settings.update(tp=str(tp // inside), **({"ep": "all"} if ranks > 1 else {}))
    if settings.get("speculative"):
        settings.update(pasted_speculation(engine, settings))
    if settings.get("spec_steps") or settings.get("spec_method") or settings.get("spec_model"):
        method = settings.get("spec_method") or next(
            (m for m in DRAFTERS if m in settings.get("spec_model", "").lower()), "draft_model")
        if method not in SPEC_NAMES:
            unknown.append(f"{spelling(engine, 'speculative')} {method}")
            method = ""
        settings["spec_method"] = method
        for key in () if method else ("spec_model", "spec_steps"):
            settings.pop(key, None)
    if settings.get("lora"):
        settings.setdefault("lora_rank", "16")
        settings.setdefault("lora_count", "8" if engine == "sglang" else "1")
    elif engine == "vllm":
        for key in ("lora_rank", "lora_count"):
            settings.pop(key, None)


def pasted_speculation(engine: str, settings: Mapping[str, str]) -> Dict[str, str]:
    """Method, drafter and drafted tokens of a pasted command, by our settings."""
    if engine == "vllm":
        try:
            config = json.loads(settings["speculative"])
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise UserError("has a --speculative-config that is no JSON object")
        return spec_settings(config)
    names = {algorithm.lower(): method for method, (algorithm, _) in SPEC_NAMES.items()}
    method = names.get(settings["speculative"].lower(), settings["speculative"].lower())
    if method == "eagle" and not settings.get("spec_model"):
        method = "mtp"  # the model's own layers draft
    drafted = settings.get("spec_draft_tokens")
    tokens = settings.get("spec_steps") or (
        str(max(1, named("--speculative-num-draft-tokens", whole)(drafted) - 1)) if drafted
        else "3")
    return {"spec_method": method, "spec_steps": tokens}


def spec_settings(config: Mapping[str, Any]) -> Dict[str, str]:
    """The same of a vLLM speculative config, or of one of its fields."""
    named_as = {"method": "spec_method", "model": "spec_model",
                "num_speculative_tokens": "spec_steps", "num-speculative-tokens": "spec_steps"}
    found = {named_as[name]: str(value) for name, value in config.items() if name in named_as}
    if found.get("spec_method", "").endswith("_mtp"):
        found["spec_method"] = "mtp"
    return found


VARIANT = (  # words of a checkpoint's name that leave its shapes as they are -> precision, if any
    {**dict.fromkeys("instruct chat it hf meta base thinking dynamic static quantized marlin kv "
                     "cache bf16 preview g128 sym channel block".split(), ""),
     "fp8": "fp8", "awq": "awq", "gptq": "gptq", "nvfp4": "nvfp4", "fp4": "nvfp4",
     "mxfp4": "mxfp4", "int4": "int4", "w4a16": "int4", "4bit": "int4", "int8": "int8",
     "w8a8": "int8", "8bit": "int8"})


def known_as(model: str) -> Tuple[str, str, str]:
    """(preset that a model's name stands for, its precision, another that the name tells).

    A fine-tune or a quantised copy has its base's shapes: meta-llama/Llama-3.1-70B-Instruct-FP8 is
    llama-3.1-70b in fp8. The name itself where no preset, or more than one, answers to it, or where
    it is a path that is there.
    """
    import re
    def plain(name: str, dated: bool) -> Tuple[str, ...]:
        base = name.rstrip("/").rpartition("/")[2].lower()
        words = re.split(r"[-_ ]|(?<=[a-z])\.(?=[a-z])", base)
        return tuple(w for w in words if w not in VARIANT
                     and (dated or not re.fullmatch(r"\d{4}", w)))

    rows = presets().get("models", [])
    if os.path.lexists(model):
        return model, "", ""
    exact = [r for r in rows if model.lower() in (r["name"], r["id"].lower(),
                                                  *r.get("aliases", ()))]
    if exact:
        return exact[0]["name"], exact[0].get("native", "bf16"), ""
    same = next(filter(None, ([r for r in rows if plain(model, dated) in (
        plain(r["id"], dated), plain(r["name"], dated))] for dated in (True, False))), [])
    if len(same) != 1:
        return model, "", ""
    words = re.split(r"[-_.]", model.lower())
    stored = next((VARIANT[w] for w in words if VARIANT.get(w)), "")
    native = same[0].get("native", "bf16")
    return same[0]["name"], native, "" if stored == native else stored


class Advice(NamedTuple):
    """One thing an inherited deployment would do better without: flag, what it is, what it was."""

    flag: str
    given: Optional[str]
    suggested: Optional[str]  # None: leave the flag out
    reason: str


UNSET_UTIL = {"vllm": "the default moved between versions (0.90, then 0.92)",
              "sglang": "the default is derived from the GPU, TP and chunk"}


def memory_changes(case: Case, pasted: Pasted) -> Iterable[Advice]:
    """Of the memory budget: util, context, KV width, batch slots."""
    d, args, had, flag = case.d, case.args, pasted.settings, partial(spelling, pasted.engine)
    if not had.get("util") and pasted.engine in UNSET_UTIL:
        util = f"{settings_of(d, args, case.plan).util:.4g}"
        yield Advice(flag("util"), None, util, f"util: not set, and {UNSET_UTIL[pasted.engine]}; "
                     f"this launch takes {util}, write it out")
    need = (longest_request(args.input_len, args.output_len)
            if args.input_len and args.output_len else None)
    most = int(case.memory.max_seqs * d.ctx_tokens / d.attention_dp)
    if not case.memory.fits and most:
        yield Advice(flag("ctx"), had.get("ctx"), str(min(need or most, most)), "max context: one "
                     f"request of {count(d.ctx_tokens)} does not fit the KV pool, the engine "
                     "refuses to start")
    elif not had.get("ctx"):
        own = f"the model's own {count(d.model.max_len)}" if d.model.max_len else "the model's own"
        yield Advice(flag("ctx"), None, str(need or d.ctx_tokens), f"max context: not set, so {own}"
                     " tokens must fit the pool; state the p99.9 request (this answer takes "
                     f"{count(d.ctx_tokens)})")
    elif need and d.ctx_tokens > 1.5 * need:
        yield Advice(flag("ctx"), had["ctx"], str(need), "max context: the p99.9 of input + output "
                     f"is {count(need)}; a longer one lets a stray request take the KV of "
                     f"{figure(d.ctx_tokens / need, 2)} such")
    held, wanted = int(case.average_seqs), wanted_in_flight(case)
    ranks = 1 if pasted.engine == "sglang" else d.attention_dp
    slots = args.max_num_seqs * ranks if "max_num_seqs" in args.given else None
    if slots and held and slots > held * 1.1:
        fewer = max(1, (held - held % 8 or held) // ranks)
        yield Advice(flag("max_num_seqs"), had.get("max_num_seqs"), str(fewer), "max batch B: "
                     f"the KV pool holds {count(held)} of the average {count(d.history_tokens)} "
                     f"tokens ({d.history_source}); past that the engine preempts and recomputes")
    elif slots and wanted > slots:
        yield Advice(flag("max_num_seqs"), had.get("max_num_seqs"),
                     str(rounded_up(wanted * SEQS_MARGIN / ranks, 8)), f"max batch B: "
                     f"{count(wanted)} in flight queue for {slots} slots, TTFT grows")
    short = held < max(wanted, min(slots or 0, SEQS_MOST)) or case.memory.max_seqs < 8
    bound = case.plan.binding == "kv" or held < wanted if case.plan else short
    if held and bound and d.kv.bytes > 1 and "fp8" in d.gpu.flop_s:
        yield Advice(flag("kv"), d.kv.name, KV_NAMES[pasted.engine]["fp8"], "b_kv: KV-bound; 1 B "
                     f"an element holds {count(held * d.kv.bytes)} sequences in place of "
                     f"{count(held)}, after an accuracy check")


def wanted_in_flight(case: Case) -> int:
    """Requests in flight in one replica, as asked or planned; 0 where neither was."""
    planned = case.plan.steady if case.plan else None
    return case.d.asked or (math.ceil(planned.batch) if planned else 0)


def layout_changes(case: Case, pasted: Pasted) -> Iterable[Advice]:
    """Of parallelism and weights: less TP and more replicas, narrower weights, DP attention."""
    d, plan, engine, flag = case.d, case.plan, pasted.engine, partial(spelling, pasted.engine)
    wanted = wanted_in_flight(case)
    fewer = [d._replace(tp=n) for n in fitting_tp(d.model) if n < d.tp and not n % d.dcp]
    for other in fewer if wanted and d.ep <= 1 else ():
        needed = sequence_bytes(other, d.history_tokens) * wanted * SEQS_MARGIN
        if memory_of(other).pool_bytes < needed or (plan and plan_of(
                other, plan.load, case.cal, engine).replicas != plan.replicas):
            continue
        now, then = (expected_step_s(x, wanted, case.cal) for x in (d, other))
        yield Advice(flag("tp"), str(d.tp), str(other.tp), f"N in W/N: {wanted} in "
                     f"flight fit {other.replica_gpus} GPU{'s' * (other.replica_gpus > 1)} a "
                     f"replica in place of {d.replica_gpus}; a decode step takes "
                     f"{in_ms(then)} ms in place of {in_ms(now)} (expected)")
        break
    if d.weights.bytes >= 2 and "fp8" in d.gpu.flop_s and native_of(d) in SIXTEEN_BIT:
        fp8 = d._replace(weight_bytes=d.weight_bytes / 2)
        yield Advice(flag("weights") or "an FP8 checkpoint", d.weights.name, "fp8",
                     f"b for weights: a step reads half of {figure(weights_bytes_per_gpu(d) / GIB)}"
                     f" GiB, and {sequences_text(memory_of(fp8).max_seqs)} sequences fit in place "
                     f"of {sequences_text(case.memory.max_seqs)}, after an accuracy check")
    wide = d._replace(tp=1, dp=d.tp * d.dp, ep=d.tp * d.dp)
    if d.tp > 1 and d.ep <= d.tp and d.model.experts and d.model.latent and memory_of(
            wide).max_seqs > max(1.0, case.memory.max_seqs):
        flags = " ".join(f"{flag(key)} {value}".strip()
                         for key, (value, _) in layout_values(engine, wide).items() if flag(key))
        yield Advice(flag("tp"), str(d.tp), flags, "KV/N, in one move: the MLA latent "
                     "is whole on each TP rank, DP attention keeps each once: "
                     f"{sequences_text(memory_of(wide).max_seqs)} sequences of "
                     f"{count(d.ctx_tokens)} in place of {sequences_text(case.memory.max_seqs)}")


def step_changes(case: Case, pasted: Pasted) -> Iterable[Advice]:
    """Of the step: prefix caching, CUDA graphs, chunking, a budget too large, metrics."""
    d, had, flag = case.d, pasted.settings, partial(spelling, pasted.engine)
    budget = case.args.max_num_batched_tokens or 0

    def stall(tokens: int) -> str:
        return figure(prefill_seconds(d, tokens, TYPICAL_MFU) / MS)

    switches = (
        ("no_prefix_caching", "prefix reuse: every shared prefix is prefilled again, "
         f"{figure(prefill_seconds(d, 1000) / MS)} ms per 1,000 tokens at the bound; right for "
         "clean benchmarks alone"),
        ("eager", f"t_overhead: without CUDA graphs each kernel of {d.model.layers} layers is "
         "launched from the CPU in every step"),
        ("no_async_scheduling", "CPU overhead: the GPU waits while the next step is scheduled"))
    for key, reason in switches:
        if key in had:
            yield Advice(flag(key), "on", None, reason)
    if "no_chunked_prefill" in had:
        yield Advice(flag("no_chunked_prefill") or flag("max_num_batched_tokens"), "off", "8192",
                     "prefill mixing: a prompt in one piece holds every stream up for "
                     f"{stall(d.ctx_tokens)} ms at ctx {count(d.ctx_tokens)}")
    if budget > 8192 and "max_num_batched_tokens" in had:
        yield Advice(flag("max_num_batched_tokens"), str(budget), "8192", "tokens per step: a "
                     f"step full of prefill holds every stream up for {stall(budget)} ms at 50% "
                     "MFU; right for offline batches alone")
    if pasted.engine == "sglang" and "metrics" not in had:
        yield Advice(flag("metrics"), None, "on", "nothing of the step: autoscaling and alerts "
                     "have nothing to read without it")
    for name in pasted.gone:
        yield Advice(name, "set", None, f"the engine no longer has it and refuses it: {GONE[name]}")


def say_inherited(case: Case, answer: Answer) -> None:
    """What was read from the pasted command, and what it would change and why."""
    pasted = getattr(case.args, "from")
    changes = [*memory_changes(case, pasted), *layout_changes(case, pasted),
               *step_changes(case, pasted)]
    answer.inputs("inherited.", engine=pasted.engine, model=pasted.model, read_as=pasted.resolved,
                  flags=" ".join(pasted.words), not_understood=list(pasted.unknown),
                  changes=[change._asdict() for change in changes])
    answer.lines.append("")
    same = "" if pasted.model == pasted.resolved else f", sized as {pasted.resolved}"
    answer.say("INHERITED", f"{pasted.engine} {pasted.model}{same}: "
               f"{' '.join(pasted.words) or 'no flags'}")
    if not {"gpu", "gpu_memory_gib"} & case.args.given:
        answer.say("", f"a command does not say on which GPU: {case.d.gpu.name} assumed (--gpu)")
    if pasted.unknown:
        answer.say("", f"not understood, so not counted: {', '.join(pasted.unknown)}")
    if not changes:
        answer.say("CHANGE", "nothing: each flag does what the figures above want")
    for i, (flag, was, now, reason) in enumerate(changes):
        move = f"{was or 'not set'} -> {now}" if now else "drop it"
        answer.say("" if i else "CHANGE", f"{flag}: {move}; {reason}")


SECTIONS: Tuple[Tuple[str, Callable[[Case, Answer], None]], ...] = (  # '' = always there
    ("", say_search), ("", say_model), ("", say_memory), ("", say_roofline), ("", say_stream),
    ("", say_prefill), ("", say_decode), ("", say_comm), ("", say_layout), ("", say_expected),
    ("spec_accept spec_accept_len", say_speculative), ("lora_rank", say_lora),
    ("gpu_price", say_cost), ("storage", say_cold_start), ("kv_link", say_kv_transfer),
    ("rho", say_queueing), ("save", say_save), ("startup_log", say_startup_log),
    ("engine startup_log", say_engine), ("", say_binds), ("", say_plan), ("from", say_inherited),
    ("measured", say_measured), ("autoscale", say_autoscale), ("defend", say_defend),
    ("engine", say_launch))


def answer_for(d: Deployment, args: Any, tables: Mapping[str, Any]) -> Answer:
    """The whole answer about one deployment; about the cheapest one where a search is asked."""
    engine, load = args.engine or "vllm", load_of(args)
    ranked: List[Candidate] = []
    if load and d.model.max_len and load.context_tokens > d.model.max_len:
        raise UserError(f"requests of {count(load.context_tokens)} tokens on average are past the "
                        f"{count(d.model.max_len)} that {d.model.name} takes; shorter lengths, or "
                        "another model")
    searched = load is not None and "tp" not in args.given and not (
        args.measured or args.startup_log)  # which are of one deployment
    if load and searched:
        ranked = search(d, args, load, tables)
        d = ranked[0].d if ranked else d
    args.gpu_price = price_of(args, d.gpu.name)
    cal = calibration_of(d, engine, tables)
    case = case_of(d, args)._replace(cal=cal, ranked=ranked, tables=tables, searched=searched,
                                     plan=load and plan_of(d, load, cal, engine))
    answer = Answer(case.facts)
    for flags, say in SECTIONS:
        asked = [getattr(args, name) for name in flags.split()]
        if not asked or any(value is not None and value is not False for value in asked):
            say(case, answer)
    return answer


# ---- 10. Comparing -----------------------------------------------------------------------------

COMPARE = (
    Column("gpus", "GPUs", str),
    Column("weights_bytes_per_gpu", "weights/GPU", lambda v: scaled(v, "B")),
    Column("kv_pool_bytes_per_gpu", "KV pool/GPU", lambda v: scaled(v, "B")),
    Column("kv_bytes_per_token_per_gpu", "KV/token/GPU", lambda v: scaled(v, "B")),
    Column("max_kv_tokens", "max KV tokens", count), Column("max_seqs", "seqs", sequences_text),
    Column("single_stream_tok_s", "1 stream tok/s", count),
    Column("tok_s_per_gpu", "tok/s/GPU at limit", count))
ROWS_MAX = 10_000

# The worked table of the README: what `--compare` prints when no model is named.
WORKED = tuple(f"--preset llama-3.1-{rest}" for rest in (
    "8b --weights bf16", "8b --weights fp8 --kv fp8", "70b --weights bf16",
    "70b --weights bf16 --tp 2", "70b --weights bf16 --tp 4", "70b --weights fp8 --kv fp8",
    "70b --weights fp8 --kv fp8 --tp 2"))
PRECISIONS = ("--weights bf16 --kv bf16", "--weights fp8 --kv fp8")


def variants(args: Any, argv: Sequence[str]) -> List[Tuple[str, List[str]]]:
    """The configurations that --compare asks for: each a label and a command line.

    Every axis is a flag by its long name; the table is their product. Alone it compares the usual
    ones, or without a model the worked table.
    """
    import itertools
    if args.compare:
        axes = [axis_of(text) for text in args.compare]
        names = [axis[0][1][0] for axis in axes]
        if len(set(names)) < len(names):
            raise UserError("--compare names an axis twice; put its values together, tp=1,2,4")
        if math.prod(map(len, axes)) > ROWS_MAX:
            raise UserError(f"--compare would print more than {ROWS_MAX} rows; take fewer values")
        return [(" ".join(label for label, _ in pick), [*argv, *(w for _, ws in pick for w in ws)])
                for pick in itertools.product(*axes)]
    given = args.weights or args.weight_bytes or args.kv or args.kv_bytes
    rows = WORKED if not model_named(args) else tuple(
        f"{precision} --tp {tp}" for precision in ([""] if given else PRECISIONS)
        for tp in (1, 2, 4, 8))
    return [(row.replace("--preset ", "").replace("--", "").strip(), [*argv, *row.split()])
            for row in rows]


def axis_of(text: str) -> List[Tuple[str, List[str]]]:
    """The values of one axis, tp=1,2: a label and the words of the command line for each."""
    import re
    axis, _, values = text.partition("=")
    flag = "--" + axis.replace("_", "-").lstrip("-")
    taking = {n for flag in EVERY_FLAG if flag.kind for n in flag.names.split()}
    if not values or flag not in taking or flag == "--compare":
        raise UserError(f"--compare {text!r}: write AXIS=v,v with the name of a flag that takes a "
                        f"value, such as tp=1,2,4 or gpu=h100,h200{near(flag, taking)}")
    return [(f"{axis} {value}", [flag, value])
            for value in re.split(r",(?![a-z]+=)", values)]  # lognormal:mean=2000,cv=0.5 is one


def compare_row(label: str, argv: Sequence[str], tables: Any) -> Dict[str, Any]:
    """One line of the comparison; a configuration that is refused says why."""
    row: Dict[str, Any] = {"name": label, "refused": False}
    try:
        case = case_of(deployment_of(parse_args(argv), tables), None)
    except UserError as error:
        return dict(row, fits=False, refused=True, why=str(error))
    d, memory = case.d, case.memory
    row.update(gpus=d.gpus, weights_bytes_per_gpu=memory.weights_bytes, fits=memory.fits)
    if not memory.fits:
        short = memory.sequence_bytes - memory.pool_bytes
        return dict(row, why=f"does not fit: {short / GIB:.2f} GiB/GPU short for one sequence of "
                    f"{count(d.ctx_tokens)}")
    step = decode_step(d, case.limit)
    tok_s = case.limit / step.step_s
    return dict(row, kv_pool_bytes_per_gpu=memory.pool_bytes, max_seqs=memory.max_seqs,
                kv_bytes_per_token_per_gpu=memory.sequence_bytes / d.ctx_tokens,
                max_kv_tokens=round(memory.max_seqs * d.ctx_tokens),
                single_stream_tok_s=1 / decode_step(d, 1).step_s, step_s=step.step_s, tok_s=tok_s,
                bound_by=step.bound_by, tok_s_per_gpu=tok_s / d.replica_gpus)


def print_comparison(args: Any, argv: Sequence[str], tables: Any) -> None:
    """The table that --compare asks for. UserError where every configuration is refused."""
    rows = [compare_row(label, line, tables) for label, line in variants(args, argv)]
    if all(row["refused"] for row in rows):
        raise UserError(rows[0]["why"])
    if args.json:
        print(json.dumps({"compare": rows}, indent=1, allow_nan=False))
        return
    width = max(len(row["name"]) for row in rows)
    print(f"bound; seqs of {count(args.ctx)} tokens, average history half of it or as the lengths "
          "say")
    names = [""] + [row["name"] for row in rows]
    for name, line in zip(names, render_table(COMPARE, rows)):
        print(f"{name:<{width}}  {line}".rstrip())
    for row in rows:
        if "why" in row:
            print(f"{row['name']}: {row['why']}")


# ---- 11. The command line ----------------------------------------------------------------------


def busy(text: str) -> float:
    """A utilisation: 0 up to, not including, 1."""
    value = not_negative(text)
    if value >= 1:
        raise UserError(f"{text!r} must be under 1: at 1 the queue grows without end")
    return value


def acceptance(text: str) -> float:
    """An acceptance rate: 0 to 1."""
    value = not_negative(text)
    if value > 1:
        raise UserError(f"{text!r} must be a rate from 0 to 1")
    return value


def word(text: str) -> str:
    """Any text but an empty one, which is an unset variable more often than not."""
    if not text.strip():
        raise UserError("is empty")
    return text


def lengths(text: str) -> Lengths:
    """A distribution of lengths, or one length."""
    return parse_lengths(word(text))


def prices(text: str) -> Dict[str, float]:
    """Price of a GPU-hour by GPU name; under '' for whichever GPU is sized."""
    found: Dict[str, float] = {}
    for part in text.split(","):
        name, _, price = part.rpartition("=")
        found[name.strip().lower()] = positive(price)
    return found


def spec_method(text: str) -> str:
    """A way to draft, by vLLM's name."""
    if text not in SPEC_NAMES:
        raise UserError(f"{text!r} is not known; write {', '.join(SPEC_NAMES)}")
    return text


def engine_name(text: str) -> str:
    """One of the engines that are known."""
    if text.lower() not in ENGINES:
        raise UserError(f"{text!r} is not known; write {', '.join(ENGINES)}")
    return text.lower()


ENGINES = ("vllm", "sglang", "trtllm")


class Flag(NamedTuple):
    """One command-line flag: its spellings (ours first, then the engines'), value and meaning."""

    names: str
    kind: Optional[Callable[[str], Any]]  # None: a switch
    metavar: str
    help: str
    default: Any = None
    needs: str = ""  # flags of which one must be given too

    @property
    def name(self) -> str:
        """Its long name without dashes in front."""
        return self.names.split()[0][2:]

    @property
    def field(self) -> str:
        """Where the parsed flags keep it."""
        return self.name.replace("-", "_")


FLAGS: Dict[str, Tuple[Flag, ...]] = {
    "model": (
        Flag("--preset", word, "NAME", "a model of presets.json (--list)"),
        Flag("--config", word, "PATH", "a config.json, or a folder that holds it"),
        Flag("--params", positive, "N", "parameters, to describe a model by hand"),
        Flag("--layers", whole, "N", "transformer layers", needs="--params"),
        Flag("--hidden", whole, "N", "hidden size", needs="--params"),
        Flag("--heads", whole, "N", "query heads", needs="--params"),
        Flag("--kv-heads", whole, "N", "KV heads", needs="--params"),
        Flag("--head-dim", whole, "N", "dimension of a head", needs="--params"),
    ),
    "hardware": (
        Flag("--gpu", word, "NAME", "accelerator of presets.json; short names mean SXM "
             "(default: h100)"),
        Flag("--gpu-memory-gib", positive, "GiB", "memory of a GPU, by hand"),
        Flag("--gpu-bandwidth", word, "RATE", "HBM bandwidth, by hand, such as 3350GB/s"),
        Flag("--gpu-tflops", positive, "TFLOP/s", "dense peak at the compute type, by hand"),
        Flag("--tp -tp --tensor-parallel-size --tp-size --tp_size", whole, "N",
             "tensor parallel GPUs", 1),
        Flag("--pp -pp --pipeline-parallel-size --pp-size --pp_size", whole, "N",
             "pipeline stages", 1),
        Flag("--dp -dp --data-parallel-size --dp-size", whole, "N", "data parallel replicas; with "
             "an --ep of all GPUs, attention data-parallel", 1),
        Flag("--ep --ep-size", lambda text: 0 if text == "all" else whole(text), "N",
             "expert parallel GPUs, or 'all'", 1),  # 0: every GPU of TP x PCP x DP
        Flag("--dcp -dcp --decode-context-parallel-size", whole, "N", "TP ranks that share out "
             "each sequence's KV", 1),
        Flag("--pcp -pcp --prefill-context-parallel-size", whole, "N", "GPUs that share out a "
             "prompt", 1),
        Flag("--util --gpu-memory-utilization --mem-fraction-static", fraction, "SHARE",
             "share of GPU memory for the engine", 0.90),
        Flag("--reserve-gib", not_negative, "GiB", "activations, CUDA graphs, NCCL, a GPU", 2.0),
        Flag("--mbu", fraction, "SHARE", "share of HBM bandwidth reached", 1.0),
        Flag("--mfu", fraction, "SHARE", "share of peak FLOP/s reached", 1.0),
        Flag("--link", word, "RATE", "link between GPUs: a name of presets.json, 450GB/s, 400Gb/s"),
    ),
    "precision": (
        Flag("--weights -q --quantization", word, "NAME", "bf16 fp8 int8 int4 awq gptq mxfp4 "
             "nvfp4; default: what the checkpoint is"),
        Flag("--weight-bytes", positive, "B", "bytes a parameter: 2, 1, 0.5"),
        Flag("--kv --kv-cache-dtype", word, "NAME", "bf16 fp8 nvfp4 (default: bf16)"),
        Flag("--kv-bytes", positive, "B", "bytes a KV element: 2, 1"),
    ),
    "shape of the work": (
        Flag("--ctx --max-model-len --context-length --max_seq_len", whole, "TOKENS",
             "longest sequence; the model's own limit where that is less", 8192),
        Flag("--input-len", lengths, "LENGTHS", "prompt tokens: 2000, lognormal:mean=2000,cv=0.5, "
             "uniform:100..4000, hist:FILE"),
        Flag("--output-len", lengths, "LENGTHS", "output tokens, same grammar"),
        Flag("--shared-prefix-len", lambda text: 0 if text == "0" else whole(text), "TOKENS",
             "part of every prompt that is the same",
             needs="--input-len --workload"),
        Flag("--concurrency --batch", whole, "N", "ask about so many in flight, all replicas "
             "together"),
    ),
    "the plan": (
        Flag("--rate --request-rate", positive, "REQ/S", "requests a second at peak, all replicas"),
        Flag("--mean-rate", positive, "REQ/S", "on average, for the cost", needs="--rate"),
        Flag("--slo-ttft-ms", positive, "MS", "p99 of the time to first token"),
        Flag("--slo-tpot-ms", positive, "MS", "p99 of the time per output token"),
        Flag("--slo-e2e-ms", positive, "MS", "p99 of the whole request"),
        Flag("--workload", word, "NAME", "lengths and SLOs of presets.json: chat code rag agent "
             "batch"),
        Flag("--engine", engine_name, "NAME", "vllm, sglang or trtllm: the expectation, what it "
             "will log, its launch command"),
        Flag("--max-num-seqs --max-running-requests --max_batch_size", whole, "N",
             "most sequences in a step"),
    ),
    "questions": (
        Flag("--from", pasted_command, "CMD", "read the deployment from a pasted launch command of "
             "vLLM, SGLang or TensorRT-LLM; flags beside it win"),
        Flag("--compare", word, "AXIS=V,V", "a table instead: any flags as axes (tp=1,2 "
             "gpu=h100,h200); alone, the usual ones"),
        Flag("--spec-accept", acceptance, "ALPHA", "speculative decoding: acceptance of a token"),
        Flag("--spec-accept-len", positive, "TOKENS", "or the engine's mean accepted length"),
        Flag("--spec-tokens", whole, "GAMMA", "tokens drafted a step", 4,
             "--spec-accept --spec-accept-len --spec-method"),
        Flag("--spec-method", spec_method, "NAME", "for the launch command: eagle3 eagle mtp "
             "draft_model ngram suffix (default: mtp where the model has it, else eagle3)"),
        Flag("--spec-model", word, "ID", "the drafter that it loads"),
        Flag("--spec-cost", not_negative, "SHARE", "a draft step over a target step", 0.05,
             "--spec-accept --spec-accept-len"),
        Flag("--lora-rank", whole, "R", "LoRA adapters of this rank"),
        Flag("--lora-count", whole, "N", "adapters resident", 1, "--lora-rank"),
        Flag("--gpu-price", prices, "$/H", "cost per 1M tokens at this price of a GPU-hour; for "
             "several GPUs h100=2.50,h200=3.20"),
        Flag("--tok-s", positive, "TOK/S", "throughput of all replicas to price (default: the "
             "bound)", needs="--gpu-price"),
        Flag("--serverless-price", positive, "$/1M", "break-even with a per-token price",
             needs="--gpu-price"),
        Flag("--storage", word, "RATE", "cold start from storage at this rate (7GB/s, nvme)"),
        Flag("--pull-s", not_negative, "S", "image pull", 0.0, "--storage"),
        Flag("--init-s", not_negative, "S", "engine start: profiling, compilation, graphs", 0.0,
             "--storage"),
        Flag("--kv-link", word, "RATE", "P/D disaggregation: link that carries the KV cache"),
        Flag("--rho", busy, "SHARE", "queueing at this utilisation"),
        Flag("--defend", None, "", "the hard questions answered twice, for a researcher and for a "
             "customer"),
        Flag("--autoscale", None, "", "signals, thresholds, a KEDA ScaledObject and Prometheus "
             "alert rules for the plan"),
        Flag("--measured", word, "DIR", "a loadgen run folder beside bound and expectation; "
             "without a model, the deployment of its deploy.json"),
        Flag("--engine-version", engine_version, "VERSION", "of the engine, such as 0.10.2 "
             "(default: the largest reserve of any)", needs="--engine --startup-log"),
        Flag("--max-num-batched-tokens --chunked-prefill-size", whole, "TOKENS", "of one step "
             "(default: the engine's own)"),
        Flag("--startup-log", read_startup_log, "FILE", "a pasted vLLM or SGLang log, beside the "
             "prediction"),
    ),
    "output": (
        Flag("--save", word, "FILE", "the deployment as JSON: for loadgen.py --mock, and for "
             "--measured"),
        Flag("--json", None, "", "everything, SI units, stable keys"),
        Flag("--explain", None, "", "each number: formula, numbers put in, source"),
        Flag("--list", None, "", "the models, GPUs and links known"),
        Flag("--flags", None, "", "the engines' flags and the term that each changes"),
    ),
}
EVERY_FLAG = tuple(flag for flags in FLAGS.values() for flag in flags)
FLAG_NAMES = {name for flag in EVERY_FLAG for name in flag.names.split()}

EXAMPLES = """examples:
  capacity.py llama-3.1-70b -tp 2 --weights fp8 --kv fp8
  capacity.py ./my-model --gpu h200 --ctx 32768 --concurrency 32 --explain
  capacity.py llama-3.1-8b --weights fp8 --kv fp8 --gpu-price 2.50 --tok-s 4000"""


def parse_args(argv: Sequence[str]) -> Any:
    """The flags as a namespace; UserError on anything that is not understood."""
    import argparse
    class Parser(argparse.ArgumentParser):
        """argparse, with its complaints raised as UserError."""

        def error(self, message: str) -> Any:
            raise UserError(f"{message}; --help lists the flags")

    parser = Parser(prog="capacity.py", allow_abbrev=False, epilog=EXAMPLES,
                    description="How many GPUs, how many users, how fast at best.",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL",
                        help="a preset's name, a path, or a Hugging Face id")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            names = flag.names.split()
            shown = flag.help + (f" (default: {flag.default})" if flag.default is not None else "")
            if flag.kind is None:
                group.add_argument(*names, action="store_true", help=shown)
            else:
                group.add_argument(*names, type=named(names[0], flag.kind), metavar=flag.metavar,
                                   help=shown, nargs="*" if names[0] == "--compare" else None)
    parser.add_argument("--enable-expert-parallel", "-ep", dest="ep", action="store_const",
                        const=0, help="same as --ep all")
    args = parser.parse_args(list(argv))
    pasted = getattr(args, "from")
    if pasted:
        args = beside(args, parser.parse_args([*pasted.words, *argv]), pasted)
    args.given = {name for name, value in vars(args).items() if value is not None
                  and value is not False}
    settle(args)
    return args


# Whose FP8 copies of their 16-bit models have blocks of 128 x 128, as in DeepSeek-V3
BLOCK_FP8_MAKERS = ("Qwen/", "deepseek-ai/", "zai-org/", "MiniMaxAI/", "moonshotai/")
# Meta's own FP8 copy of its 405B: attention, the first layer and the last stay in 16 bit (its
# config.json, modules_to_not_convert). vllm#6746 logged 57.75 GiB of it on each of 8 GPUs.
META_405B_FP8 = Quant("fp8", ((None, USUAL["fp8"]),),
                      ("re:.*self_attn.*", "re:.*layers\\.(0|125)\\.mlp.*"))


def find_pasted_model(args: Any, tables: Mapping[str, Any]) -> Model:
    """The model; where a pasted command named it and it is not known, the error says what to do."""
    pasted = getattr(args, "from")
    try:
        model = find_model(args, tables)
        own = pasted and args.model == pasted.resolved and pasted.stored == "fp8"
        if own and pasted.resolved == "llama-3.1-405b" and pasted.model.startswith("meta-llama/"):
            return model._replace(native="fp8", quant=META_405B_FP8)
        return model._replace(native="fp8") if own and pasted.model.startswith(
            BLOCK_FP8_MAKERS) else model
    except UserError as error:
        if not pasted or args.model != pasted.resolved:
            raise
        raise UserError(f"--from names {pasted.model}: {error}; or size it as another, with "
                        "--preset NAME or --config FOLDER beside it") from None


def beside(alone: Any, args: Any, pasted: Pasted) -> Any:
    """The flags of a pasted command and those given beside it, which win."""
    if not model_named(alone):
        args.model = pasted.resolved
    args.engine, args.tp = alone.engine or pasted.engine, args.tp or 1  # no TP named: one GPU
    if pasted.version and args.engine == pasted.engine and args.engine_version is None:
        args.engine_version = engine_version(pasted.version)
    for name, width in (("weights", "weight_bytes"), ("kv", "kv_bytes")):
        if getattr(alone, width):
            setattr(args, name, alone.__dict__[name])
    return args


def settle(args: Any) -> None:
    """Put the defaults in; UserError where a flag was given that nothing would use."""
    if args.compare and args.model is None and "=" not in args.compare[-1]:
        args.model = args.compare.pop()  # capacity.py --compare tp=1,2 MODEL
    if args.spec_accept is not None and args.spec_accept_len is not None:
        raise UserError("--spec-accept and --spec-accept-len say the same thing; give one")
    if args.compare is not None and args.save:
        raise UserError("--save writes one deployment, --compare has several; drop one")
    if args.params is not None and (args.model or args.preset or args.config):
        raise UserError("--params describes a model by hand; drop it, or the model's name")
    for flag in EVERY_FLAG:
        given = getattr(args, flag.field) not in (None, False)
        if given and flag.needs and all(getattr(args, n[2:].replace("-", "_")) is None
                                        for n in flag.needs.split()):
            raise UserError(f"--{flag.name} says nothing without "
                            f"{flag.needs.replace(' ', ' or ')}; add it, or drop this")
        if getattr(args, flag.field) is None:
            setattr(args, flag.field, flag.default)
    args.prices = args.gpu_price
    if args.startup_log:
        asked, args.engine = args.engine, args.startup_log.get("engine", args.engine or "vllm")
        if asked not in (None, args.engine):
            args.startup_log["asked_engine"], args.engine_version = asked, None


def use_workload(args: Any, tables: Mapping[str, Any]) -> None:
    """Put a named workload's lengths and SLOs where none were given, and a ctx that holds them."""
    if args.workload is not None:
        row = find_row("workloads", args.workload, "workload", tables.get("workloads", []))
        for name in ("input_len", "output_len"):
            if getattr(args, name) is None:
                setattr(args, name, parse_lengths(row[name]))
        fields = [f"slo_{name}_ms" for name in SLOS]
        if not any(getattr(args, field) for field in fields):
            for field in fields:
                setattr(args, field, row.get(field))
    if "ctx" not in args.given and args.input_len and args.output_len:
        args.ctx = max(args.ctx, longest_request(args.input_len, args.output_len))


def load_of(args: Any) -> Optional[Load]:
    """The load that the flags ask about; None where they ask about none. Raises UserError."""
    asked = {"rate", "slo_ttft_ms", "slo_tpot_ms", "slo_e2e_ms", "workload"} & args.given
    if not asked:
        return None
    if args.input_len is None or args.output_len is None:
        raise UserError(f"--{sorted(asked)[0].replace('_', '-')} plans a fleet, which needs "
                        "--input-len and --output-len too, or --workload")
    if args.mean_rate and args.mean_rate > args.rate:
        raise UserError(f"--mean-rate {args.mean_rate:g} is more than the peak --rate "
                        f"{args.rate:g}")
    ttft, tpot, e2e = (value * MS if value else math.inf
                       for value in (args.slo_ttft_ms, args.slo_tpot_ms, args.slo_e2e_ms))
    if args.output_len.quantile(0.999) < 1.5:
        tpot = math.inf  # one token has no time between tokens
    return Load(args.rate, args.mean_rate, args.input_len, args.output_len,
                args.shared_prefix_len or 0, ttft, tpot, e2e, args.max_num_seqs,
                args.max_num_batched_tokens)


def price_of(args: Any, gpu: str) -> Optional[float]:
    """Price of an hour of this GPU [$], or None where none was given."""
    return (args.prices or {}).get(gpu, (args.prices or {}).get(""))


def deployment_of(args: Any, tables: Mapping[str, Any]) -> Deployment:
    """The deployment that the flags describe. Raises UserError where they cannot be."""
    gpu = find_gpu(args, tables)
    model = find_pasted_model(args, tables)
    take_limits(args)
    if "ctx" not in args.given:
        args.ctx = min(args.ctx, model.max_len or args.ctx)
    use_workload(args, tables)
    for name in set(args.prices or ()) - {"", args.gpu}:
        known = find_row("gpus", name, "--gpu-price: GPU", tables.get("gpus", []))["name"]
        args.prices[known] = args.prices[name]
    take_precisions(args, model)
    links = tables.get("links", [])
    weights, weight_bytes, source = weights_of(args, model)
    kv = precision_of("--kv", args.kv, args.kv_bytes, KV) or KV["bf16"]
    history, history_source, prompt, output = lengths_of(args)
    shared = args.shared_prefix_len or 0
    if shared >= prompt:
        raise UserError(f"--shared-prefix-len {shared} is not less than the mean --input-len "
                        f"{count(prompt)}: the prefix is part of every prompt")
    adapters = (lora_params(model, args.lora_rank) * args.lora_count * ACTIVATION_BYTES
                if args.lora_rank else 0)
    d = Deployment(
        model, gpu, args.tp, args.pp, args.dp, args.ep or args.tp * args.pcp * args.dp, args.dcp,
        args.pcp, args.util, args.reserve_gib * GIB, args.mbu, args.mfu,
        args.link and named("--link", lambda text: parse_rate(text, links))(args.link),
        parse_rate("ndr", links) if links else None, weights, weight_bytes, source,
        model.expert_byte_share if weight_bytes == model.weight_bytes
        else expert_param_share(model), kv, compute_on(gpu, weights), args.ctx, history,
        history_source, prompt, output, shared,
        past_prefix(args.input_len, shared)[0] if shared else prompt, None, adapters)
    check_layout(d)
    return d._replace(asked=args.concurrency and -(-args.concurrency // d.replicas))


# What a start-up log says, the field of the flag that would, and its kind of number
LIMITS = (("max_num_seqs", "max_num_seqs", int),
          ("max_num_batched_tokens", "max_num_batched_tokens", int), ("util", "util", float),
          ("max_model_len", "ctx", int))


def take_limits(args: Any) -> None:
    """Put the batch limits, utilisation and context of a start-up log where no flag gives them.

    They count as given from here on, so that the whole answer is of the deployment logged.
    """
    log = args.startup_log or {}
    for name, field, kind in LIMITS:
        if name in log and field not in args.given:
            setattr(args, field, kind(log[name]))
            args.given.add(field)
            log.setdefault("taken_limits", []).append(f"{name} {log[name]:.10g}")


def take_precisions(args: Any, model: Model) -> None:
    """Put the precisions of a start-up log where no flag gives them."""
    log = args.startup_log or {}
    weights, kv = logged_precisions(log)
    if weights and not args.weights and args.weight_bytes is None and (
            weights != SPELLINGS.get(model.native, model.native)):
        args.weights = log["taken_weights"] = weights
        args.given.add("weights")
    if kv and not args.kv and args.kv_bytes is None:
        args.kv = log["taken_kv"] = kv
        args.given.add("kv")


def precision_of(flag: str, name: Optional[str], width: Optional[float],
                 known: Mapping[str, Precision]) -> Optional[Precision]:
    """The precision named, or of so many bytes; None when neither was given."""
    if width is not None:
        if name:
            raise UserError(f"{flag} and {flag.replace('weights', 'weight')}-bytes say the same "
                            "thing; give one")
        if width > 8:
            raise UserError(f"{width:g} bytes an element is past 8; {flag} takes a name")
        same = next((p for p in known.values() if p.bytes == width), None)
        return same or Precision(f"{width:g} B", width, "bf16")
    name = SPELLINGS.get((name or "auto").lower(), (name or "auto").lower())
    if name == "auto":
        return None
    if name not in known:
        raise UserError(f"unknown {flag} {name!r}{near(name, known)} known: {', '.join(known)}")
    return known[name]


def weights_of(args: Any, model: Model) -> Tuple[Precision, float, str]:
    """How the weights are stored, their total [B], and where that figure comes from."""
    asked = precision_of("--weights", args.weights, args.weight_bytes, WEIGHTS)
    if asked:
        return asked, asked.bytes * model.params, f"weights {figure(asked.bytes)} B"
    name = SPELLINGS.get(model.native, model.native)
    native = WEIGHTS.get(name) or Precision(name, (model.weight_bytes or 0) / model.params, "bf16")
    if model.weight_bytes is not None:
        each = model.weight_bytes / model.params
        return native, model.weight_bytes, (f"weights {figure(model.weight_bytes / GIGA, 4)} GB, "
                                            f"{figure(each, 4)} B each "
                                            f"({model.weight_bytes_source})")
    return native, native.bytes * model.params, (f"weights {figure(native.bytes)} B "
                                                 f"({native.name}, as the checkpoint)")


def lengths_of(args: Any) -> Tuple[float, str, float, float]:
    """Average history of a decode step, how it was found, prompt and output tokens."""
    if args.input_len is None and args.output_len is None:
        return args.ctx / 2, f"half of ctx {count(args.ctx)}", min(2048.0, float(args.ctx)), 0.0
    given = args.input_len.mean if args.input_len else 2048.0
    made = args.output_len.mean if args.output_len else 256.0
    if given + made > args.ctx:
        raise UserError(f"--input-len plus --output-len average {count(given + made)} tokens, past "
                        f"--ctx {count(args.ctx)}; raise --ctx")
    assumed = [text for text, value in (("input 2,048 assumed", args.input_len),
                                        ("output 256 assumed", args.output_len)) if not value]
    return given + made / 2, ", ".join(["input + output / 2", *assumed]), given, made


def model_named(args: Any) -> bool:
    """Whether the flags name a model at all."""
    return any((args.model, args.preset, args.config, args.params))


def find_model(args: Any, tables: Mapping[str, Any]) -> Model:
    """The model that the flags name: by hand, a preset, a path, or a Hugging Face id.

    UserError where it is not found, or where a row of presets.json is broken.
    """
    rows = tables.get("models", [])
    name = args.preset or args.config or args.model
    if sum(x is not None for x in (args.preset, args.config, args.model)) > 1:
        raise UserError("the model is named more than once; give one of MODEL, --preset, --config")
    if name is None:
        if args.params is None:
            raise UserError("no model given; name a preset (--list), a config.json, a Hugging Face "
                            "id, or describe it by hand with --params")
        return model_by_hand(args)
    meant_as_path = (os.path.lexists(name) or name.startswith((".", "/", "~"))
                     or name.endswith(".json") or name.count("/") > 1)
    if args.preset is None and (args.config or meant_as_path):
        path = os.path.abspath(name)
        folder = os.path.dirname(path) if os.path.basename(path) == "config.json" else path
        return model_from_checkpoint(os.path.basename(folder), *read_checkpoint(name))
    row = next((r for r in rows if str(r.get("id")).lower() == name.lower()), None)
    if row is None and "/" in name:
        row = next((r for r in rows if bare_name(name) in map(bare_name, (
            r["name"], str(r.get("id")), *r.get("aliases", ())))), None)
    if not row and "/" in name and not args.preset:
        return model_from_checkpoint(name, *fetch_checkpoint(name))
    row = row or find_row("models", name, "model", rows)
    try:
        return build_model(row)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"presets.json: the row {_shown(row.get('name'))} is not a model's "
                        f"({type(error).__name__} {error}); mend it") from None


def bare_name(name: str) -> str:
    """A Hugging Face id without its organisation and what changes no shape: -Instruct, -hf."""
    import re
    name = name.rpartition("/")[2].lower().removeprefix("meta-")
    return re.sub(r"(-(instruct|it|chat|hf|base))+(?=-v?\d|$)", "", name)


def model_by_hand(args: Any) -> Model:
    """A dense model from --params and its KV shape; what was not given is not guessed."""
    needed = {"--layers": args.layers, "--kv-heads": args.kv_heads, "--head-dim": args.head_dim}
    absent = [flag for flag, value in needed.items() if value is None]
    if absent:
        raise UserError(f"--params describes a model by hand, which needs {', '.join(absent)} too")
    heads = args.heads or 0
    if heads % args.kv_heads:
        raise UserError(f"--heads {heads} is not a multiple of --kv-heads {args.kv_heads}")
    if args.params < args.layers * args.kv_heads * args.head_dim:
        raise UserError(f"--params {args.params:g} is too few for the layers and heads given")
    work = 4 * heads * args.head_dim
    cache = Cache("full", args.layers, args.kv_heads, 2 * args.head_dim, flops=work,
                  decode_flops=work)
    absent = [f"{flag} not given: {what} left out" for flag, value, what in (
        ("--heads", heads, "attention FLOP"), ("--hidden", args.hidden, "traffic between GPUs"))
        if not value]
    return Model(
        name="by hand", arch="", params=args.params, params_exact=round(args.params),
        active_params=round(args.params), layers=args.layers, hidden=args.hidden or 0, heads=heads,
        kv_heads=args.kv_heads, head_dim=args.head_dim, vocab=0, max_len=0, tied=False, tensors=(),
        caches=(cache,), experts=0, top_k=0, expert_layers=0, native="bf16", weight_bytes=None,
        weight_bytes_source="", kv_native="", mtp_layers=0, mtp_params=0, vision_params=0,
        estimated=False, notes=tuple(absent), expert_byte_share=0.0)


def model_from_checkpoint(name: str, config: Mapping[str, Any], quant: Optional[Mapping[str, Any]],
                          size: Optional[int], source: str) -> Model:
    """The model of a config.json, with the true byte total where the files state it."""
    model = build_model(normalise(config, quant, name))
    if size is None:
        word_of = ("fp8", "nvfp4", "awq", "gptq", "int4", "int8", "mxfp4", "w4a16", "w8a8")
        hint = next((w for w in word_of if w in name.lower()), None)
        if hint and model.native in ("bf16", "fp16", "fp32"):
            model = model._replace(notes=(*model.notes, f"the name says {hint}, the files declare "
                                          "no quantisation: counted unquantised"))
        return model
    if not 0.25 <= size / model.params <= 8:
        raise UserError(f"{source} of {name} says {size / GIGA:g} GB for {model.params / GIGA:g}B "
                        "parameters, which cannot be; take the file away to count from the shapes")
    return model._replace(weight_bytes=size, weight_bytes_source=f"true total, {source}")


def read_rates(args: Any, links: Sequence[Mapping[str, Any]]) -> None:
    """Turn the flags that name a rate into links, in place."""
    for name in ("storage", "kv_link"):
        text = getattr(args, name)
        if text is not None:
            flag = "--" + name.replace("_", "-")
            setattr(args, name, named(flag, lambda given: parse_rate(given, links))(text))


def print_list(tables: Mapping[str, Any]) -> None:
    """What presets.json knows, by name."""
    if not tables:
        raise UserError("--list needs presets.json beside capacity.py")
    texts: Dict[str, Callable[[Mapping[str, Any]], str]] = {
        "models": lambda row: f"{figure(row['params'] / GIGA):>6}B  "
        f"{row.get('native', 'bf16'):<6} {row['id']}",
        "gpus": lambda row: f"{row['memory_mib'] / KIB:>6.1f} GiB  {row['hbm_tb_s']:>6} TB/s  "
        f"{row['tflops']['bf16']:>6} TFLOP/s BF16  {row['title']}",
        "links": lambda row: f"{row['gb_s']:>6} GB/s  {row['note']}"}
    for table, text in texts.items():
        print(f"{table}:")
        print("\n".join(f"  {row['name']:<28} {text(row)}" for row in tables[table]))


def completed(args: Any, argv: Sequence[str], tables: Mapping[str, Any]) -> Any:
    """The flags, completed by what they name: rates, and a run's deployment and lengths."""
    if args.measured and not model_named(args):
        args = parse_args([*deployed_argv(args.measured), *argv])
    if args.measured and args.workload is None:  # the lengths that the run was planned with
        plan: Any = read_run(args.measured)[0].get("plan")
        told: Any = plan.get("lengths") if isinstance(plan, dict) else None
        for name in ("input", "output") if isinstance(told, dict) else ():
            text, field = told.get(name), f"{name}_len"
            if getattr(args, field) is None and isinstance(text, str) and text[:5] != "hist:":
                setattr(args, field, parse_lengths(text))
    read_rates(args, tables.get("links", []))
    return args


def run(argv: Sequence[str]) -> None:
    """Answer one command line on stdout."""
    args = parse_args(argv)
    tables = presets()
    args = completed(args, argv, tables)
    if args.flags:
        print_flags(args.json)
    elif args.list:
        print_list(tables)
    elif args.compare is not None:
        print_comparison(args, argv, tables)
    else:
        answer = answer_for(deployment_of(args, tables), args, tables)
        if args.save:
            write_json(args.save, answer.json()["saved"])
        if args.json:
            print(json.dumps(answer.json(), indent=1, allow_nan=False))
        else:
            print("\n".join([*answer.lines, "", answer.explain()] if args.explain
                            else answer.lines))


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit code: 0 answered (not fitting is an answer), 2 bad usage or input, 130 interrupted."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        run(sys.argv[1:] if argv is None else argv)
        if sys.stdout:
            sys.stdout.flush()
    except UserError as error:
        line = "".join(c if c.isprintable() else " " for c in str(error))
        print(f"capacity: error: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk behind stdout
        print(f"capacity: error: cannot write the answer: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except KeyboardInterrupt:
        print("capacity: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
