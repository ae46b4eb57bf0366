"""One process of SGLang: its start, then attentions with the real layers, whose outputs it writes; not a test."""

import logging
import os
import sys
from types import SimpleNamespace

import torch

GRID, HEADS, HEAD_DIM, TEXT = (4, 8, 8), 2, 32, 9
TOKENS = 256
STEPS = 3


def tensors(tokens: int, seed: int = 0, keys: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (tokens, keys or tokens, keys or tokens)
    return [torch.randn(1, length, HEADS, HEAD_DIM, generator=generator) for length in lengths]


def start(rank: int, world: int) -> None:
    """Do what SGLang's scheduler process does before it loads a model."""
    from sglang.multimodal_gen.runtime.platforms import initialize_current_platform

    initialize_current_platform()
    from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks, load_plugins

    load_plugins()
    apply_plugin_hooks()
    from sglang.multimodal_gen.configs.pipeline_configs.wan import WanT2V480PConfig
    from sglang.multimodal_gen.runtime.distributed import parallel_state
    from sglang.multimodal_gen.runtime.server_args import set_global_server_args

    set_global_server_args(
        SimpleNamespace(
            attention_backend=None,
            kv_gather_degree=1,
            enable_attention_backend_autotune=False,
            pipeline_config=WanT2V480PConfig(),
        )
    )
    parallel_state.init_distributed_environment(world, rank, "env://", rank)
    parallel_state.initialize_model_parallel(sequence_parallel_degree=world, ulysses_degree=world)


def request():
    """Return a request whose latents make the grid GRID with Wan's patches of (1, 2, 2)."""
    from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

    batch = Req(sampling_params=SamplingParams(num_inference_steps=STEPS))
    batch.raw_latent_shape = torch.Size((1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2]))
    return batch


def attend(rank: int, world: int) -> dict[str, torch.Tensor]:
    from sglang.multimodal_gen.runtime.layers.attention import USPAttention
    from sglang.multimodal_gen.runtime.layers.attention.selector import get_attn_backend
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    def layer(prefix: str, **settings: object) -> torch.nn.Module:
        return USPAttention(HEADS, HEAD_DIM, prefix=prefix, **settings)

    def shard(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(world, dim=1)[rank]

    def in_step(step: int):
        return set_forward_context(current_timestep=step, attn_metadata=None, forward_batch=batch)

    batch, results = request(), {}
    blocks = [layer(f"blocks.{number}.attn1") for number in range(2)]
    cross = layer("blocks.0.attn2", is_cross_attention=True, skip_sequence_parallel=True)
    for step in range(STEPS):
        with in_step(step):
            for number, block in enumerate(blocks):
                results[f"step {step} layer {number}"] = block(*map(shard, tensors(TOKENS, seed=number)))
            query, key, value = tensors(TOKENS, keys=TEXT)
            results["cross"] = cross(shard(query), key, value)

    with in_step(1):
        query, key, value = tensors(TOKENS + TEXT)
        whole = [torch.cat((x[:, :TEXT], shard(x[:, TEXT:])), dim=1) for x in (query, key, value)]
        results["text before"] = blocks[0](*whole, num_replicated_prefix=TEXT)
        whole = [torch.cat((shard(x[:, :TOKENS]), x[:, TOKENS:]), dim=1) for x in (query, key, value)]
        results["text after"] = blocks[0](*whole, num_replicated_suffix=TEXT)
        local = list(map(shard, tensors(TOKENS)))
        mask = torch.ones(local[0].shape[:2], dtype=torch.bool)
        mask[:, -3:] = rank != world - 1
        results["mask"] = blocks[0](*local, attn_mask=mask)
        results["causal"] = layer("blocks.0.attn1", causal=True)(*local)
        results["no number"] = layer("middle.attn1")(*local)
        batch.raw_latent_shape = torch.Size((1, 256, 64))
        results["no grid"] = blocks[0](*local)
    batch = request()
    if world == 1:
        packed = get_attn_backend(HEAD_DIM, torch.float32).get_impl_cls()(
            num_heads=HEADS,
            head_size=HEAD_DIM,
            causal=False,
            softmax_scale=HEAD_DIM**-0.5,
            num_kv_heads=HEADS,
            prefix="blocks.0.attn",
        )
        with in_step(1):
            flat, ends = [x[0] for x in tensors(TOKENS)], (0, 100, TOKENS)
            bounds = {"cu_seqlens": torch.tensor(ends), "cu_seqlens_host": ends, "max_seqlen": 156}
            results["packed"] = packed.forward_varlen(*flat, **bounds)
            compiled = torch.compile(layer("blocks.0.attn1"), backend="eager")
            results["compiled"] = compiled(*tensors(TOKENS))
            results["compiled"] = compiled(*tensors(TOKENS))
    return results


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    this_rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start(this_rank, ranks)
    torch.save(attend(this_rank, ranks), f"{sys.argv[1]}/{this_rank}.pt")
