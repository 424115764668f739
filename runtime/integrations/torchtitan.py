"""TorchtitanDispatcher: TokenDispatcher as a token dispatcher of torchtitan.

Where torchtitan is installed, the class is a subclass of torchtitan's, so that `traverse` and overrides find its
config. Without torchtitan it has the same methods.

Set it on torchtitan's command line, in the config of a layer, or on a built layer before `parallelize` wires meshes:

    --override.imports shardweave.integrations.torchtitan.token_dispatcher
    moe_config.routed_experts.token_dispatcher = TorchtitanDispatcher.Config(num_experts=64, top_k=4)
    moe.routed_experts.token_dispatcher = TorchtitanDispatcher(config)
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, shown
from ...kernels import PAYLOADS
from ..convert_specs import name_of
from ..executor.call import binding
from ..moe.dispatcher import TokenDispatcher
from ..moe.expert_placement import experts_of_shards
from ..moe.options import DEFAULT_OPTIONS, OF_ROWS, DispatchOptions, refuse_options
from ..moe.routed import RoutedTokens
from ..moe.simulate import VirtualTokenDispatcher
from ..transports.choose_transport import TransportName

DTYPES = {name_of(dtype): dtype for dtype in PAYLOADS}


class _Unregistered:
    """What TorchtitanDispatcher needs of its base class where torchtitan is absent."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self) -> TorchtitanDispatcher:
            """Return the dispatcher, whose meshes are wired later."""
            return TorchtitanDispatcher(replace(self))  # type: ignore[arg-type]


if TYPE_CHECKING:
    _Base = _Unregistered
    override: Any
    LocalTokenDispatcher: Any
else:
    try:
        from torchtitan.config import override
        from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher as _Base
        from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
    except ModuleNotFoundError as error:
        # Absent, or a version without these modules. A torchtitan that fails to import is the caller's to repair.
        if (error.name or "").partition(".")[0] != "torchtitan":
            raise
        _Base = _Unregistered


class TorchtitanDispatcher(_Base):
    """Dispatch and combine with the methods, argument names and results of torchtitan 0.3.0's token dispatchers.

    Where torchtitan is installed, a subclass of its BaseEPTokenDispatcher, and Config of that one's Config. Experts are
    sharded over the mesh as DTensor shards parameters, `Shard(0)`. `combine` applies the scores.

    Attributes:
        dispatcher: the TokenDispatcher, for `check`, `explain` and `config`; None until meshes are wired, or until the
            first dispatch if the config leaves sizes to it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):
        """The settings; torchtitan's layers call `build`.

        Attributes:
            num_experts, top_k: E, K.
            hidden_dim: D. Default: that of the first dispatch.
            num_max_tokens_per_rank: the largest T of any rank; T may differ between ranks and dispatches. Default: T of
                the first dispatch, which must be equal on all ranks; torchtitan's inputs of fixed length are. Set it
                for longer inputs later, such as those of a validation.
            dtype: of tokens: "float32", "bfloat16" or "float16"; a torch.dtype is stored by name, since torchtitan
                prints and writes configs of plain values. Default: that of the first dispatch.
            device: such as "cuda:0"; a torch.device is stored by name. Default: that of the first dispatch; if all
                sizes are set, the current device of the mesh's type, or the CPU without a mesh.
            pad_multiple: the alignment of each expert's group, in rows: 16 for fp8, 32 for mxfp8.
            options: as for TokenDispatcher, or a dict of its fields, without `align`, which is `pad_multiple`,
                `expert_map`, `layout`, `payloads`, `quantize`, `scale_layout` and save="redispatch".
            transport: as for TokenDispatcher; ignored without a mesh.
        """

        num_experts: int
        top_k: int
        hidden_dim: int | None = None
        num_max_tokens_per_rank: int | None = None
        dtype: torch.dtype | str | None = None
        device: torch.device | str | None = None
        pad_multiple: int = 1
        options: DispatchOptions = DEFAULT_OPTIONS
        transport: TransportName | None = None

        def __post_init__(self) -> None:
            if isinstance(self.dtype, torch.dtype):
                self.dtype = name_of(self.dtype)
            if isinstance(self.device, torch.device):
                self.device = str(self.device)
            if isinstance(self.options, dict):  # of a command line
                self.options = DispatchOptions(**self.options)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.ep_mesh: DeviceMesh | None = None
        self.dispatcher: TokenDispatcher | VirtualTokenDispatcher | None = None
        self._wired = False
        self._expert_map: list[list[int]] | None = None

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Use the ranks of a 1-D mesh, which all call this; None: this rank has all experts.

        Raises:
            ArgumentError, UnsupportedError: as for TokenDispatcher.
            UnsupportedError: a number of experts that does not divide, on a mesh whose ranks do not ascend.
        """
        if ep_mesh is not None and not isinstance(ep_mesh, DeviceMesh):
            raise ArgumentError(f"ep_mesh: {shown(ep_mesh)}; allowed: a 1-D DeviceMesh, or None")
        self.ep_mesh, self._wired = ep_mesh, True
        self.init_buffer()

    def init_buffer(self) -> None:
        """Make the TokenDispatcher, if the config has all sizes; else the first dispatch does. Called by `wire_meshes`.

        The first dispatch allocates the buffers.

        Raises:
            ArgumentError, UnsupportedError: as for TokenDispatcher.
        """
        config, mesh = self.config, self.ep_mesh
        self.dispatcher = None
        self._check(config)
        self._expert_map = None if mesh is None else experts_of_shards(config.num_experts, mesh)
        if None not in (config.hidden_dim, config.num_max_tokens_per_rank, config.dtype):
            kind = "cpu" if mesh is None else mesh.device_type
            device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
            self.dispatcher = self._make(config, device)

    def _check(self, config: Config) -> None:
        """Check what TokenDispatcher does not."""
        if config.dtype not in (None, *DTYPES):
            raise ArgumentError(f"dtype: {shown(config.dtype)}; allowed: {', '.join(DTYPES)}, or None")
        try:
            torch.device("cpu" if config.device is None else config.device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"device: {shown(config.device)}; allowed: a device such as 'cuda:0', or None"
            ) from error
        refuse_options(
            config.options, "align", "expert_map", "layout", *OF_ROWS,
            why="since torchtitan's layers take rows of each expert as they are, aligned to pad_multiple",
        )  # fmt: skip
        if config.options.save == "redispatch":
            raise ArgumentError(
                'save: "redispatch"; allowed here: "buffer", "copy": torchtitan has no hook for `routed.kept()`'
            )

    def _make(self, config: Config, device: torch.device) -> TokenDispatcher | VirtualTokenDispatcher:
        """Return the dispatcher of a config with all sizes; `device` is the default."""
        settings: dict[str, Any] = {
            "num_experts": config.num_experts,
            "top_k": config.top_k,
            "hidden": config.hidden_dim,
            "max_tokens": config.num_max_tokens_per_rank,
            "dtype": DTYPES[str(config.dtype)],
            "options": replace(config.options, align=config.pad_multiple, expert_map=self._expert_map),
            "device": device if config.device is None else config.device,
        }
        if self.ep_mesh is None:
            return VirtualTokenDispatcher(1, **settings)
        return TokenDispatcher(self.ep_mesh, **settings, transport=config.transport)

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
        dispatcher = self.dispatcher or self._of_first_dispatch(x_TD)
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
        dispatcher = self.dispatcher
        if dispatcher is None:
            raise ArgumentError("metadata: nothing has been dispatched; allowed: that of a dispatch")
        if isinstance(dispatcher, TokenDispatcher):
            return dispatcher.combine(routed_output_RD, metadata)
        return dispatcher.combine([routed_output_RD], [metadata])[0]

    def _of_first_dispatch(self, x_TD: torch.Tensor) -> TokenDispatcher | VirtualTokenDispatcher:
        """Make and return the dispatcher, with the sizes that the config leaves to the first dispatch."""
        if not self._wired:
            raise ArgumentError("ep_mesh: not set; allowed: dispatch and combine after wire_meshes(ep_mesh=...)")
        if not isinstance(x_TD, torch.Tensor) or x_TD.dim() != 2:
            raise ArgumentError(f"x_TD: {shown(x_TD)}; allowed: a tensor [T, D]")
        T, D = x_TD.shape
        sizes: dict[str, Any] = {"hidden_dim": D, "num_max_tokens_per_rank": T, "dtype": x_TD.dtype}
        sizes = {name: size for name, size in sizes.items() if getattr(self.config, name) is None}
        if torch.compiler.is_compiling():
            raise ArgumentError(f"{', '.join(sizes)}: None; allowed under torch.compile: values, set in the config")
        config = replace(self.config, **sizes)
        self._check(config)
        with nullcontext() if self.ep_mesh is None else binding():  # not on two threads
            self.dispatcher = self.dispatcher or self._make(config, x_TD.device)
            return self.dispatcher


def token_dispatcher(config: Any, **settings: Any) -> TorchtitanDispatcher.Config:
    """Return the config that replaces that of any of torchtitan's token dispatchers: the factory of the override.

    Args:
        config: a torchtitan config; its settings that have the same name here and are not None are taken.
        settings: these come first; such as `options`.

    Raises:
        TypeError: a setting that TorchtitanDispatcher.Config does not have.
    """
    names = (f.name for f in fields(TorchtitanDispatcher.Config))
    own = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    return TorchtitanDispatcher.Config(**{**own, **settings})


if _Base is not _Unregistered:
    # torchtitan names an override by the module of its function: by the public one.
    token_dispatcher.__module__ = "shardweave.integrations.torchtitan"
    override(target=LocalTokenDispatcher.Config, description="Expert-parallel dispatch and combine by shardweave.")(
        token_dispatcher
    )
