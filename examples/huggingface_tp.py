"""A Hugging Face model with `tp_plan="auto"`: loss, logits and gradients with shardweave installed, and without.

    torchrun --standalone --nproc-per-node 2 examples/huggingface_tp.py

Needs `pip install transformers accelerate`, transformers 5.23 or newer. Nothing is downloaded: rank 0 makes the model
from a config, with random weights, and saves it to a temporary folder. Its own plan says how layers are sharded.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import shardweave

try:
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]
    from transformers.distributed import DistributedConfig  # type: ignore[import-not-found]
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'transformers>=5.23' accelerate") from None

CONFIG = LlamaConfig(
    vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
ROUNDED = 2e-6
"""Float32 sums of more than two ranks: torch adds in the order of its ring, shardweave in order of ranks."""

Results = dict[str, torch.Tensor]


def load(folder: str) -> LlamaForCausalLM:
    """Return the model, sharded by its plan over all ranks."""
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))


def train(model: LlamaForCausalLM, tokens: torch.Tensor) -> Results:
    """Return the loss, the logits and this rank's shards of the gradients of a training step."""
    output = model(tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    results = {"loss": output.loss.detach(), "logits": output.logits.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        results[name] = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    return results


@torch.no_grad()
def infer(model: LlamaForCausalLM, tokens: torch.Tensor) -> Results:
    """Return the logits; with `no_grad`, transformers calls torch.distributed.all_reduce in place of DTensor."""
    return {"logits": model(tokens, use_cache=False).logits}


def compare(step: Callable[[LlamaForCausalLM, torch.Tensor], Results], folder: str, tokens: torch.Tensor) -> str:
    """Run a step with and without shardweave; return what it carried out."""
    stock, model = step(load(folder), tokens), load(folder)
    shardweave.stats().reset()
    with shardweave.installed():
        ours = step(model, tokens)
    assert ours.keys() == stock.keys()
    for name, wanted in stock.items():
        if dist.get_world_size() == 2:  # two terms have one sum, whatever their order
            assert torch.equal(ours[name], wanted), name
        else:
            torch.testing.assert_close(ours[name], wanted, rtol=ROUNDED, atol=ROUNDED)
    lines = [f"{step.__name__}: {len(ours)} results as without shardweave"]
    carried = shardweave.stats().redistributions.items()
    lines += [
        f"  {of.calls} x {text}, {of.bytes_received} bytes each, {transport}" for (text, transport), of in carried
    ]
    lines += [f"  left to torch: {count} x {why}" for why, count in shardweave.stats().delegations.items()]
    return "\n".join(lines)


def beside_dtensor(folder: str, tokens: torch.Tensor) -> str:
    """Count the collectives of inference that transformers calls itself, so that no redistribution takes place."""
    model = load(folder)
    with warnings.catch_warnings(), CommDebugMode() as watched:
        warnings.filterwarnings("ignore", "For backward hooks to be called")  # of the mode's hooks on modules
        infer(model, tokens)
    return f"  beside DTensor: {watched.get_comm_counts()[torch.ops.c10d.allreduce_]} x torch.distributed.all_reduce"


def main() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    tokens = torch.randint(CONFIG.vocab_size, (3, 33), generator=torch.Generator().manual_seed(1))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(folder[0])
    dist.barrier()
    plan = load(folder[0]).tp_plan
    reports = [f"{name}: {style}" for name, style in plan.items()]
    reports += [compare(train, folder[0], tokens), compare(infer, folder[0], tokens), beside_dtensor(folder[0], tokens)]
    if dist.get_rank() == 0:
        print("\n".join(reports))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
