"""Patch a small Wan pipeline and generate with and without MHLA. Run: python pipelines/demo.py [folder].

The pipeline is made here of diffusers' and transformers' real classes with random weights, so that nothing is
downloaded: it shows the patch at work, and its clips are noise. For a real model, replace ``build_pipeline`` by
``WanPipeline.from_pretrained``.
"""

import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.utils import export_to_video
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from mhla_diffusers import apply_mhla, describe, remove_mhla

PROMPT = "a cat surfing"
CALL = {"num_frames": 21, "height": 80, "width": 112, "num_inference_steps": 6, "guidance_scale": 3.0}


def build_pipeline() -> WanPipeline:
    """A Wan pipeline with a transformer of six layers."""
    torch.manual_seed(0)
    words = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "cat": 4, "surfing": 5}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    text = UMT5Config(vocab_size=8, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    return WanPipeline(
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=16
        ),
        text_encoder=UMT5EncoderModel(text).eval(),
        vae=AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval(),
        transformer=WanTransformer3DModel(
            num_attention_heads=4, attention_head_dim=24, text_dim=32, freq_dim=32, ffn_dim=192, num_layers=6
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def generate(pipe: WanPipeline, file: Path) -> torch.Tensor:
    """One clip from a fixed seed: (frames, height, width, 3) in [0, 1]; written to ``file`` too."""
    frames = pipe(PROMPT, generator=torch.Generator().manual_seed(0), output_type="pt", **CALL).frames[0]
    export_to_video(list(frames.movedim(1, -1).float().numpy()), str(file), fps=16)
    return frames


def main(folder: Path) -> None:
    """Generate before, with and after the patch, and say what was replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    pipe = build_pipeline()
    softmax = generate(pipe, folder / "softmax.mp4")
    apply_mhla(pipe, blocks=(3, 2, 2), layers="2/3")
    patched = generate(pipe, folder / "mhla.mp4")
    sys.stdout.write(f"\n{describe(pipe)}\n\n")
    remove_mhla(pipe)
    restored = generate(pipe, folder / "removed.mp4")
    sys.stdout.write(
        f"mean change of a pixel with the patch: {(patched - softmax).abs().mean():.4f}\n"
        f"outputs bit for bit as before after removal: {torch.equal(restored, softmax)}\n"
        f"clips: {folder}/softmax.mp4, {folder}/mhla.mp4\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/demo"))
