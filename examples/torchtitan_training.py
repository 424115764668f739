"""An unmodified torchtitan 0.3.0 trains one of its debug models twice: on torch's collectives, and on shardweave.

    torchrun --standalone --nproc-per-node 4 examples/torchtitan_training.py

Prints the losses of both runs, whether they are equal, and which collectives were carried out by whom. Arguments are
torchtitan's own, such as `--module deepseek_v3 --config deepseek_v3_debugmodel`; settings that are not given are those
of torchtitan's configuration. docs/integrations.md says what to install.

torchtitan expects a GPU. For CPUs three things are replaced: the device that it asks torch for, the memory statistics
of that device, and FlexAttention, which torch cannot differentiate there.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import socket
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

import shardweave

DEFAULTS = ["--module", "llama3", "--config", "llama3_debugmodel", "--parallelism.tensor_parallel_degree", "2"]
SIZES = ["--training.steps", "2", "--training.seq_len", "64", "--training.local_batch_size", "2"]
"""A batch that four processes of a small machine can train on."""
ITEMSIZES = {"float": 4, "c10::BFloat16": 2, "unsigned char": 1, "long int": 8, "long": 8, "double": 8}
"""Bytes of an element, by the profiler's names of dtypes."""
FIXED = ["--debug.seed", "1", "--metrics.log_freq", "1"]


def use_cpu() -> None:
    """Make torchtitan use CPUs. Called before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    functions = {
        "current_device": lambda: 0,  # torch's own returns "cpu", which barrier(device_ids=) does not take
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, function in functions.items():
        setattr(torch.cpu, name, function)
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = dense_attention


def dense_attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """FlexAttention's result for q, k, v of [B, N, L, H], without its other outputs."""
    from torch.nn.attention.flex_attention import create_mask

    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


def write_assets(folder: Path) -> None:
    """A tokenizer of bytes and a data set of random words, where torchtitan's configuration looks for them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    for name in ("tokenizer", "c4_test"):
        (folder / "tests/assets" / name).mkdir(parents=True)
    tokenizer.save(str(folder / "tests/assets/tokenizer/tokenizer.json"))
    special = json.dumps({"bos_token": "<begin>", "eos_token": "<end>"})
    (folder / "tests/assets/tokenizer/tokenizer_config.json").write_text(special, encoding="utf-8")
    source = random.Random(0)
    words = ["".join(source.choices("abcdefghij", k=source.randint(1, 8))) for _ in range(300)]
    texts = (json.dumps({"text": " ".join(source.choices(words, k=200))}) for _ in range(200))
    (folder / "tests/assets/c4_test/data.json").write_text("\n".join(texts), encoding="utf-8")


def free_port(rank: int, name: str) -> str:
    """A port for the process group of a run: torchrun's own store has the keys of the first one."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        with socket.create_server(("", 0)) as free:
            store.set(f"port of {name}", str(free.getsockname()[1]))
    return store.get(f"port of {name}").decode()


class Run(NamedTuple):
    """The loss of each step; torch's collectives by operator, and the bytes that the functional ones receive, which
    are those of graphs and of DTensors; shardweave's counters."""

    losses: list[float]
    collectives: Counter[str]
    received: Counter[str]
    carried: Counter[str]
    traced: Counter[str]
    left: Counter[str]


def count_collectives(profiled: profile) -> tuple[Counter[str], Counter[str]]:
    """Collectives by operator, those of functional operators by these, and the bytes that these receive."""
    collectives: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for event in profiled.events():
        if event.name.startswith("c10d::"):
            caller = event.cpu_parent
            if caller is not None and caller.name.startswith("_c10d_functional::"):
                event = caller
                received[event.name] += bytes_received(event)
            collectives[event.name] += 1
    return collectives, received


def bytes_received(event: Any) -> int:
    """What this rank has to receive in one of three functional collectives; 0 for others, such as those with `out`."""
    shape, numbers = event.input_shapes[0], event.concrete_inputs
    held = math.prod(shape) * ITEMSIZES[event.input_dtypes[0]]
    if event.name.endswith("all_gather_into_tensor"):
        return held * (numbers[1] - 1)
    if event.name.endswith("reduce_scatter_tensor"):
        return held * (numbers[2] - 1) // numbers[2]
    if event.name.endswith("all_to_all_single"):  # of shardweave: a rank sends itself nothing
        return sum(numbers[1]) * held // shape[0] if held else 0
    return 0


def train(arguments: list[str], on_shardweave: bool, port: str) -> tuple[Any, ...]:
    """Train once, in a process of its own, and return the fields of a `Run`; the counts are those of this rank."""
    os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    use_cpu()
    from torchtitan.config import ConfigManager

    if on_shardweave:
        shardweave.install(spmd_types=True)
    shardweave.stats().reset()
    trainer = ConfigManager().parse_args(arguments).build()
    for part in trainer.model_parts:
        sharded = [module for module in part.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        if on_shardweave and sharded:
            shardweave.fsdp.adapt_fsdp(part)
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, *args: Any, **options: Any) -> None:
        losses.append(loss)
        log(step, loss, *args, **options)

    trainer.metrics_processor.log = record
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        trainer.train()
    trainer.close()
    counters = shardweave.stats()
    counts = counters.calls.copy(), counters.traced.copy(), counters.delegations.copy()
    run = losses, *count_collectives(profiled), *counts
    dist.destroy_process_group()
    return run


def report(runs: dict[str, Run]) -> None:
    print("step", *(f"{name:>24}" for name in runs))
    for step, losses in enumerate(zip(*(run.losses for run in runs.values()), strict=True), 1):
        print(f"{step:4}", *(f"{loss!r:>24}" for loss in losses))
    largest = max(abs(a - b) for a, b in zip(*(run.losses for run in runs.values()), strict=True))
    print("losses are equal to the bit" if largest == 0 else f"losses differ by up to {largest:g}")
    for name, run in runs.items():
        print(f"{name}:")
        for transport, count in run.carried.items():
            print(f"  {count:5} carried out by shardweave on {transport}")
        for request, count in run.traced.items():
            print(f"  {count:5} in graphs: {request}")
        for reason, count in run.left.items():
            print(f"  {count:5} left to torch: {reason}")
        for operator, count in sorted(run.collectives.items()):
            print(f"  {count:5} {operator}" + f", {run.received[operator]:,} B received" * (run.received[operator] > 0))


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit(f"start it with torchrun: torchrun --standalone --nproc-per-node 4 {sys.argv[0]}")
    rank = int(os.environ["RANK"])
    if importlib.util.find_spec("torchtitan") is None:
        if rank == 0:
            print("torchtitan is not installed; docs/integrations.md says how to install it")
        return
    arguments = [*DEFAULTS, *SIZES, *FIXED, *sys.argv[1:]]
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder
        os.chdir(folder)
        write_assets(Path(folder))
        for name in ("torch", "shardweave"):
            with ProcessPoolExecutor(1, get_context("spawn")) as process:  # torchtitan trains once in a process
                runs[name] = Run(
                    *process.submit(train, arguments, name == "shardweave", free_port(rank, name)).result()
                )
        os.chdir("/")
    if rank > 0:
        return
    report(runs)


if __name__ == "__main__":
    main()
