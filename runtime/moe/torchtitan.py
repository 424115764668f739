"""TorchtitanDispatcher: TokenDispatcher with the interface of torchtitan's token dispatchers.

Does not import torchtitan.

Set it in the config of a layer, or on a built layer before `parallelize` wires the meshes:

    moe_config.routed_experts.token_dispatcher = TorchtitanDispatcher.Config(num_experts=64, top_k=4, hidden_dim=1024,
                                                                             num_max_tokens_per_rank=4096)
    moe.routed_experts.token_dispatcher = TorchtitanDispatcher(config)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, shown
from ...kernels import PAYLOADS
from ..convert_specs import name_of
from .config import DispatchConfig
from .dispatcher import TokenDispatcher
from .expert_placement import experts_of_shards
from .routed import RoutedTokens
from .simulate import VirtualTokenDispatcher


class TorchtitanDispatcher:
    """Dispatch and combine with the methods, argument names and results of torchtitan 0.3.0's token dispatchers.

    Experts are sharded over the mesh as DTensor shards parameters, `Shard(0)`. `combine` applies the scores.

    Attributes:
        dispatcher: the TokenDispatcher, once meshes are wired, for `check`, `explain` and `config`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The settings; torchtitan's layers call `build`.

        Attributes:
            num_experts, top_k, hidden_dim: E, K, D.
            num_max_tokens_per_rank: the largest T of any rank; T may differ between ranks and dispatches.
            dtype: of tokens: "float32", "bfloat16" or "float16"; a torch.dtype is stored by name, since torchtitan
                prints and writes configs of plain values.
            device: such as "cuda:0"; a torch.device is stored by name. Default: the current device of the mesh's type;
                without a mesh the CPU.
            capacity, expert_capacity, overflow, pooled_buffers, chunk_capacity, splits, zero_rows: as for
                TokenDispatcher.
            save: "buffer" or "copy", as for TokenDispatcher.
            transport: as for TokenDispatcher; ignored without a mesh.
            pad_multiple: the alignment of each expert's group, in rows: 16 for fp8, 32 for mxfp8.
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
        save: str = "buffer"
        pooled_buffers: int = 1
        chunk_capacity: int | float | None = None
        splits: str | None = None
        zero_rows: bool | None = None
        transport: str | None = None

        def __post_init__(self) -> None:
            if isinstance(self.dtype, torch.dtype):
                self.dtype = name_of(self.dtype)
            if isinstance(self.device, torch.device):
                self.device = str(self.device)

        def build(self) -> TorchtitanDispatcher:
            """Return the dispatcher, whose meshes are wired later."""
            return TorchtitanDispatcher(self)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.ep_mesh: DeviceMesh | None = None
        self.dispatcher: TokenDispatcher | VirtualTokenDispatcher | None = None

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Use the ranks of a 1-D mesh, which all call this; None: this rank has all experts.

        Raises:
            ArgumentError, UnsupportedError: as for TokenDispatcher.
            UnsupportedError: a number of experts that does not divide, on a mesh whose ranks do not ascend.
        """
        if ep_mesh is not None and not isinstance(ep_mesh, DeviceMesh):
            raise ArgumentError(f"ep_mesh: {shown(ep_mesh)}; allowed: a 1-D DeviceMesh, or None")
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        """Make the TokenDispatcher; called by `wire_meshes`. Buffers are allocated by the first dispatch.

        Raises:
            ArgumentError, UnsupportedError: as for TokenDispatcher.
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
                'save: "redispatch"; allowed here: "buffer", "copy": torchtitan has no hook for `routed.kept()`'
            )
        # The settings that have the same name in both configs, then the others.
        settings: Any = {f.name: getattr(config, f.name) for f in fields(DispatchConfig) if hasattr(config, f.name)}
        settings |= {"dtype": dtypes[config.dtype], "hidden": config.hidden_dim, "align": config.pad_multiple}
        settings["max_tokens"] = config.num_max_tokens_per_rank
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
        """Send tokens to the ranks of their experts.

        Args:
            x_TD: [T, D].
            topk_scores_TK: floats [T, K].
            topk_expert_ids_TK: int32 or int64 [T, K]; -1 is none.
            num_local_tokens_per_expert_E: ignored; counts follow from the ids.

        Returns:
            The rows, [R, D], grouped by expert, with R equal at every dispatch; rows from the sum of the counts on are
            zero with `zero_rows` and otherwise not initialised, since grouped GEMMs never read them. The rows of each
            group, padding included, int64 [E_local]. The metadata for `combine`.

        Raises:
            ArgumentError: meshes are not wired, or a shape or dtype is not allowed.
            CapacityError, TransportError: as for TokenDispatcher.
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
        """Return the sum of each token's rows, weighted by its scores: [T, D].

        Args:
            routed_output_RD: [R, D], of the shape and dtype of the dispatched rows.
            metadata: from `dispatch`.
            x_TD: ignored.

        Raises:
            ArgumentError, TransportError: as for TokenDispatcher.
        """
        del x_TD
        dispatcher = self._wired()
        if isinstance(dispatcher, TokenDispatcher):
            return dispatcher.combine(routed_output_RD, metadata)
        return dispatcher.combine([routed_output_RD], [metadata])[0]

    def _wired(self) -> TokenDispatcher | VirtualTokenDispatcher:
        if self.dispatcher is None:
            raise ArgumentError("ep_mesh: not set; allowed: dispatch and combine after wire_meshes(ep_mesh=...)")
        return self.dispatcher
