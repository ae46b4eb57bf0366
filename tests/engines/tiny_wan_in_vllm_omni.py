"""A two-layer Wan of vLLM-Omni on a CPU, for which the engine has no platform."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

GRID, HEADS, HEAD_DIM, TEXT = (5, 8, 12), 2, 24, 7
ODD_GRID = (5, 7, 11)
"""Its tokens are no multiple of two processes, so that the engine appends padding."""

# vLLM-Omni's Wan imports torchvision, which looks for these when it is imported; PyPI's has them for CUDA's torch only.
operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def load_plugins() -> None:
    """Let the engine find this package's entry point, and as its platform the one below, as if it were installed."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    folder = Path(tempfile.mkdtemp(prefix="vllm-omni-on-cpu-"))
    package = folder / "vllm_omni_on_cpu-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni-on-cpu\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[vllm_omni.platform_plugins]\ncpu = {__name__}:platform\n")
    sys.path.append(str(folder))
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()


def platform() -> str:
    return f"{__name__}.make_platform"


def make_platform():
    from vllm.platforms.cpu import CpuPlatform
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
    from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

    class Cpu(OmniPlatform, CpuPlatform):
        _omni_enum = OmniPlatformEnum.OOT
        dist_backend = "gloo"

        @classmethod
        def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=True):
            return DiffusionAttentionBackendEnum[selected_backend or "TORCH_SDPA"].get_path()

        @classmethod
        def get_torch_device(cls, local_rank=None):
            return torch.device("cpu")

        @classmethod
        def get_device_count(cls):
            return 1

        @classmethod
        def set_device(cls, device):
            pass

        @classmethod
        def supports_torch_inductor(cls):
            return True

    return Cpu()


@contextmanager
def engine(backend: str | None, rank: int = 0, count: int = 1) -> Iterator:
    """The engine as one of its workers sets it up, and its configuration; None: the environment says the backend."""
    from vllm.config import set_current_vllm_config
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import AttentionConfig, DiffusionParallelConfig, OmniDiffusionConfig
    from vllm_omni.diffusion.distributed import parallel_state
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.vllm_config import create_base_diffusion_vllm_config

    config = OmniDiffusionConfig(
        model_class_name="WanPipeline",
        num_gpus=count,
        dtype=torch.float32,
        parallel_config=DiffusionParallelConfig(ulysses_degree=count),
        diffusion_attention_config=AttentionConfig(default=backend),
    )
    vllm_config = create_base_diffusion_vllm_config(torch.device("cpu"), config)
    method = "env://" if count > 1 else f"file://{tempfile.mktemp()}"
    with (
        set_forward_context(vllm_config=vllm_config, omni_diffusion_config=config),
        set_current_vllm_config(vllm_config),
        set_current_diffusion_config(config),
    ):
        parallel_state.init_distributed_environment(count, rank, method, rank, "gloo")
        parallel_state.initialize_model_parallel(
            data_parallel_size=1, sequence_parallel_size=count, ulysses_degree=count, backend="gloo"
        )
        try:
            yield config
        finally:
            parallel_state.destroy_model_parallel()


def make_wan(config, layers: int = 2):
    """Wan with the same random weights in every process, and the hooks of Ulysses if there are several."""
    from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl
    from vllm_omni.diffusion.distributed.sp_plan import SequenceParallelConfig, get_sp_plan_from_model
    from vllm_omni.diffusion.forward_context import get_forward_context
    from vllm_omni.diffusion.hooks.sequence_parallel import apply_sequence_parallel
    from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel

    SDPAImpl.forward = SDPAImpl.forward_cuda
    wan = WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=layers,
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in wan.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter[0].numel() ** -0.5)
    for module in wan.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
    degree = config.parallel_config.ulysses_degree
    if degree > 1:
        apply_sequence_parallel(wan, SequenceParallelConfig(ulysses_degree=degree), get_sp_plan_from_model(wan))
        get_forward_context().sp_plan_hooks_applied = True
    return wan


def denoise(wan, grid=GRID, step: int | None = 3, total: int | None = None) -> torch.Tensor:
    """The model's output for latents with a token grid, at a step of those that a pipeline would run."""
    from vllm_omni.diffusion.forward_context import DenoiseProgressMixin

    generator = torch.Generator().manual_seed(1)
    frames, height, width = grid
    DenoiseProgressMixin().record_denoise_step(step, total_steps=total)
    with torch.no_grad():
        return wan(
            torch.randn(1, 4, frames, 2 * height, 2 * width, generator=generator),
            torch.tensor([500]),
            torch.randn(1, TEXT, 16, generator=generator),
            return_dict=False,
        )[0]


def run_in_process(folder: str) -> None:
    """What one of several processes does that share the heads with Ulysses."""
    load_plugins()
    rank = int(os.environ["RANK"])
    with engine("MHLA", rank, int(os.environ["WORLD_SIZE"])) as config:
        wan = make_wan(config)
        # the last step of two is not reached, so that the call is over when the process ends
        torch.save([denoise(wan, grid, step=0, total=2) for grid in (GRID, ODD_GRID)], f"{folder}/{rank}.pt")
