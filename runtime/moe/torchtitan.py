"""TokenDispatcher behind the seam that torchtitan's MoE has for token dispatchers; torchtitan is not imported.

A layer takes it by its config, or, once built, by assignment before `parallelize` wires the meshes:

    moe_config.routed_experts.token_dispatcher = TorchtitanDispatcher.Config(num_experts=64, top_k=4, hidden_dim=1024,
                                                                             num_max_tokens_per_rank=4096)
    moe.routed_experts.token_dispatcher = TorchtitanDispatcher(config)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, shown
from ...kernels import PAYLOADS
from ..convert_specs import name_of
from .config import DispatchSettings
from .dispatcher import TokenDispatcher
from .expert_placement import experts_of_shards
from .routed import RoutedTokens
from .simulate import VirtualTokenDispatcher


class TorchtitanDispatcher:
    """Dispatch and combine with the methods, argument names and results of torchtitan 0.3.0's token dispatchers.

    Experts are sharded over the mesh as DTensor shards parameters, `Shard(0)`. Scores are applied by `combine`.

    Attributes:
        dispatcher: what carries it out, once meshes are wired: its `check`, `explain` and `layout`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The settings; `build` makes the dispatcher, as torchtitan's layers do.

        Attributes:
            num_experts, top_k, hidden_dim: E, K, D.
            num_max_tokens_per_rank: the largest T of any rank; each rank's may differ at every dispatch.
            dtype: of tokens: "float32", "bfloat16" or "float16"; of a torch.dtype its name is kept, so that the config
                is plain values, as torchtitan prints and writes it.
            device: such as "cuda:0"; of a torch.device its name is kept. Default: that of the mesh's type, and the
                current one of it; without a mesh the CPU.
            capacity, expert_capacity, overflow, leases, slab_capacity, splits, zero_rows: as of TokenDispatcher.
            save: "lease" or "copy", as of TokenDispatcher.
            transport: as of TokenDispatcher; without a mesh there is none.
            pad_multiple: rows that each expert's group is padded to a multiple of: 16 for fp8, 32 for mxfp8.
        """

        num_experts: int
        top_k: int
        hidden_dim: int
        num_max_tokens_per_rank: int
        dtype: torch.dtype | str = "bfloat16"
        device: torch.device | str | None = None
        capacity: int | float | None = None
        expert_capacity: int | None = None
        overflow: str = "raise"
        pad_multiple: int = 1
        save: str = "lease"
        leases: int = 1
        slab_capacity: int | float | None = None
        splits: str | None = None
        zero_rows: bool | None = None
        transport: str | None = None

        def __post_init__(self) -> None:
            if isinstance(self.dtype, torch.dtype):
                self.dtype = name_of(self.dtype)
            if isinstance(self.device, torch.device):
                self.device = str(self.device)

        def build(self) -> TorchtitanDispatcher:
            """The dispatcher, whose meshes are wired later."""
            return TorchtitanDispatcher(self)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.ep_mesh: DeviceMesh | None = None
        self.dispatcher: TokenDispatcher | VirtualTokenDispatcher | None = None

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Take the ranks of a 1-D mesh, which all call this; None: this rank has all experts.

        Raises:
            ArgumentError, UnsupportedError: as of TokenDispatcher.
            UnsupportedError: a number of experts that does not divide, on a mesh whose ranks do not ascend.
        """
        if ep_mesh is not None and not isinstance(ep_mesh, DeviceMesh):
            raise ArgumentError(f"ep_mesh: {shown(ep_mesh)}; allowed: a 1-D DeviceMesh, or None")
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        """Agree on sizes; called by `wire_meshes`. Buffers are made by the first dispatch.

        Raises:
            ArgumentError, UnsupportedError: as of TokenDispatcher.
        """
        config, mesh = self.config, self.ep_mesh
        dtypes = {name_of(dtype): dtype for dtype in PAYLOADS}
        if config.dtype not in dtypes:
            raise ArgumentError(f"dtype: {shown(config.dtype)}; allowed: {', '.join(dtypes)}")
        device = config.device
        if device is None:
            kind = "cpu" if mesh is None else mesh.device_type
            device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device: {shown(device)}; allowed: a device such as 'cuda:0', or None") from error
        if config.save == "redispatch":
            raise ArgumentError(
                'save: "redispatch"; allowed here: "lease", "copy": experts run where nothing can be kept'
            )
        settings: DispatchSettings = {
            "num_experts": config.num_experts, "top_k": config.top_k, "hidden": config.hidden_dim,
            "max_tokens": config.num_max_tokens_per_rank, "dtype": dtypes[config.dtype], "capacity": config.capacity,
            "expert_capacity": config.expert_capacity, "overflow": config.overflow, "align": config.pad_multiple,
            "save": config.save, "leases": config.leases, "slab_capacity": config.slab_capacity,
            "splits": config.splits, "zero_rows": config.zero_rows,
        }  # fmt: skip
        if mesh is None:
            self.dispatcher = VirtualTokenDispatcher(1, **settings, device=device)
        else:
            settings["expert_map"] = experts_of_shards(config.num_experts, mesh)
            self.dispatcher = TokenDispatcher(mesh, **settings, device=device, transport=config.transport)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, RoutedTokens]:
        """Send tokens to the ranks that have their experts.

        Args:
            x_TD: [T, D].
            topk_scores_TK: floats [T, K].
            topk_expert_ids_TK: int32 or int64 [T, K]; -1 is none.
            num_local_tokens_per_expert_E: not read: counts follow from the ids.

        Returns:
            [R, D], grouped by expert, R being the same at every dispatch: rows from the sum of the counts on are not
            initialised, as grouped GEMMs by offsets never read them, or zero with `zero_rows`; int64 [E_local], the
            rows of each group, padding included; what `combine` takes.

        Raises:
            ArgumentError: meshes are not wired, or a shape or dtype is not allowed.
            CapacityError, TransportError: as of TokenDispatcher.
        """
        del num_local_tokens_per_expert_E
        dispatcher = self._wired()
        if isinstance(dispatcher, TokenDispatcher):
            routed = dispatcher.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK)
        else:
            (routed,) = dispatcher.dispatch([x_TD], [topk_expert_ids_TK], [topk_scores_TK])
        return routed.x, routed.padded_counts, routed

    def combine(
        self,
        routed_output_RD: torch.Tensor,
        metadata: RoutedTokens,
        x_TD: torch.Tensor,
    ) -> torch.Tensor:
        """[T, D], the sum of each token's rows by its scores.

        Args:
            routed_output_RD: [R, D], of `dispatch`'s shape and dtype.
            metadata: what `dispatch` returned last.
            x_TD: not read.

        Raises:
            ArgumentError, TransportError: as of TokenDispatcher.
        """
        del x_TD
        dispatcher = self._wired()
        if isinstance(dispatcher, TokenDispatcher):
            return dispatcher.combine(routed_output_RD, metadata)
        return dispatcher.combine([routed_output_RD], [metadata])[0]

    def _wired(self) -> TokenDispatcher | VirtualTokenDispatcher:
        if self.dispatcher is None:
            raise ArgumentError("ep_mesh: none yet; allowed: dispatch and combine after wire_meshes(ep_mesh=)")
        return self.dispatcher
