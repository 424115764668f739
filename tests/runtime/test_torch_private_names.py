"""The private names of torch that shardweave uses: each is listed here with what breaks without it, and exists.

When a new release of torch fails this test, the entry says what to look at.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardweave.runtime.dtensor.in_graph import remember

pytestmark = pytest.mark.plan

ROOT = Path(__file__).parents[2]
FOLDERS = ("runtime", "kernels", "cli")

NAMES = {
    "torch._C._cuda_getCurrentRawStream": "the current stream, in each call on a GPU",
    "torch._C._cuda_getDevice": "launches of kernels on the current device",
    "torch._C._current_autograd_node": "a trace's column of what is backward",
    "torch._C._current_graph_task_id": "selective activation checkpointing before torch 2.13",
    "torch._C._distributed_c10d._SymmetricMemory.rendezvous": "symmetric memory on GPUs: the rendezvous of a buffer",
    "torch._C._distributed_c10d._register_process_group": "symmetric memory on GPUs: the groups of its windows",
    "torch._C._len_torch_dispatch_stack": "calls under dispatch modes (activation checkpointing, tracing)",
    "torch._guards.CompileContext.try_get": "stats(): what torch.compile traces is counted once",
    "torch._guards.detect_fake_mode": "the refusal of fake tensors, and of others beside them",
    "torch._library.fake_class_registry.FakeScriptObject": "meshes and process groups that Dynamo passes on",
    "torch._is_functional_tensor": "the redistribution of traced tensors",
    "torch._subclasses.functional_tensor.FunctionalTensor": "the redistribution of traced tensors",
    "torch.distributed.distributed_c10d._world.pg_group_ranks": "the process groups of collectives in graphs",
    "torch.autograd.profiler._is_profiler_enabled": "ranges in the profiler",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "results of async_op=True",
    "torch.distributed._functional_collectives._is_view_op": "views of them, which do not wait",
    "torch.distributed._symmetric_memory.empty": "symmetric memory on GPUs: the buffers",
    "torch.distributed.checkpoint.planner_helpers._iterate_state_dict": "checkpoints of shard orders",
    "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather": "adapt_fsdp: the protocol of FSDP2's all-gather",
    "torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter": "adapt_fsdp: that of its reduce-scatter",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.lazy_init": "record --adapt-fsdp; and its "
    "module, traces of FSDP2's collectives",
    "torch.distributed.tensor._collective_utils.redistribute_cost": "install(costs=True)",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": "everything on DTensors",
    "torch.distributed.tensor._dtensor_spec.ShardOrderEntry": "shard orders of DTensors",
    "torch.distributed.tensor._dtensor_spec.TensorMeta": "everything on DTensors",
    "torch.distributed.tensor._ops._mask_buffer.MaskBuffer": "embeddings sharded over the vocabulary",
    "torch.distributed.tensor._ops._math_ops._NormPartial": "norms of DTensors, as in gradient clipping",
    "torch.distributed.tensor._redistribute._gen_transform_infos": "dispatch modes that count torch's collectives",
    "torch.distributed.tensor._redistribute.assert_no_mixed_partial_types": "the same errors as torch's",
    "torch.distributed.tensor._redistribute.redistribute_local_tensor": "install(): all redistributions",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "install(costs=True)",
    "torch.distributed.tensor.placement_types._MaskPartial": "embeddings sharded over the vocabulary",
    "torch.distributed.tensor.placement_types._StridedShard": "strided shards: FSDP2 with tensor parallelism",
    "torch.ops._c10d_functional": "redistributions in graphs, and dispatch modes that count torch's collectives",
    "torch.ops._dtensor.shard_dim_alltoall.default": "dispatch modes that count torch's collectives",
    "torch._subclasses.fake_tensor.FakeTensor": "traced tensors, and token dispatch under FakeTensorMode",
    "torch.utils._python_dispatch._disable_current_modes": "calls under dispatch modes, and meshes read there",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "calls under dispatch modes",
    "torch.utils._pytree.register_pytree_node": "RoutedTokens in torch.compile and activation checkpointing",
    "torch.utils._pytree.tree_leaves": "dispatches in two phases on GPUs: results of a side stream",
    "torch.utils.checkpoint._CachedTorchDispatchMode": "selective activation checkpointing",
    "torch.utils.checkpoint._CachingTorchDispatchMode": "selective activation checkpointing",
}
NEWER = {
    "torch.distributed._token_switch.Routing": "TokenSwitch, from torch 2.15 on",
    "torch.distributed._token_switch.TokenSwitch": "TokenSwitch, from torch 2.15 on",
}
REPLACED = {
    "torch.distributed.tensor._redistribute.Redistribute": "install(): explicit redistributions and their gradients",
    "torch.distributed.tensor._dispatch.redistribute_local_tensor": "install(): implicit redistributions",
    "torch.distributed.tensor._api.Redistribute": "install(): DTensor.redistribute and full_tensor",
    "torch.distributed.distributed_c10d._world": "caches that end with the process group; groups made after a failure",
    "torch.distributed.distributed_c10d._get_default_store": "everything: the store in which ranks first meet",
    "torch.distributed.ProcessGroup._get_backend": "everything: which backend a device has",
}
"""Names that are found by text, or as attributes of objects that the scan does not follow."""


def private_names(path: Path) -> set[str]:
    """The dotted names below `torch` with a private part that a file imports or reads."""
    tree, names, modules = ast.parse(path.read_text(encoding="utf-8")), set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    modules[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    names.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                names.add(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in modules:
            names.add(".".join([modules[node.id], *parts]))
    return {name for name in names if any(p[0] == "_" and p[:2] != "__" for p in name.split("."))}


def resolved(name: str) -> Any:
    """The object of a dotted name.

    Raises:
        ImportError, AttributeError: this torch does not have it.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def test_every_private_name_is_listed() -> None:
    used: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            used |= private_names(path)
    # A prefix of a listed name is only the way to it.
    ends = {name for name in used if not any(longer.startswith(f"{name}.") for longer in used)}
    assert ends == set(NAMES) | set(NEWER)


@pytest.mark.parametrize(("name", "breaks"), [*NAMES.items(), *NEWER.items(), *REPLACED.items()])
def test_private_name_exists(name: str, breaks: str) -> None:
    if name in NEWER and torch.__version__ < "2.15":
        pytest.skip("torch is older than 2.15")
    try:
        resolved(name)
    except (ImportError, AttributeError) as error:
        if "_cuda_" in name and not torch.cuda.is_available():
            pytest.skip("torch is built without CUDA")
        pytest.fail(f"torch {torch.__version__} has no {name}; without it fails: {breaks}; {error}")


def test_marks_a_function_as_torch_does() -> None:
    def other() -> None: ...

    assert vars(remember) == vars(torch.compiler.assume_constant_result(other)) != {}


def test_import_is_of_torch_itself_and_of_dtensor() -> None:
    """What takes long to import is imported by what uses it."""
    script = """if True:
        import sys
        import torch.distributed.fsdp, torch.distributed.tensor, torch.utils.checkpoint
        before = set(sys.modules)
        import shardweave
        print(*sorted(set(sys.modules) - before), sep=chr(10))
        """
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    imported = result.stdout.split()
    assert "shardweave.runtime.moe.dispatcher" in imported
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.elastic", "sympy")
    assert not [name for name in imported if name.startswith(heavy)]


def test_private_attributes_of_dtensor(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        assert isinstance(x, DTensor)
        for name in ("placements", "mesh", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order"):
            assert hasattr(x._spec, name), f"torch {torch.__version__}: DTensorSpec has no {name}"
        assert x._local_tensor.shape == (4,)
    finally:
        torch.distributed.destroy_process_group()
