"""Train the tiny pipelines that ship with the package, and the classifier that judges their digits.

python tools/make_tiny.py wan --output outputs/tiny-wan
python tools/make_tiny.py classifier

Everything comes from the seed: the autoencoder and the text encoder first, then the transformer, through the
project's own training loop with the loss that its family is trained with. Run again, the command goes on where it was
interrupted. ``--install`` copies the result to where the package keeps it. wan-long, which does not ship, is
for ``studies/carry``.
"""

import argparse
import itertools
import json
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import nn

from mhla_diffusers.families import Sample
from mhla_diffusers.tiny import load_tiny, pipeline_folder
from mhla_diffusers.training import InMemoryData, ObjectiveWeights, TrainingConfig, ValidationConfig, train
from studies.adaptation.adaptation import digit_latents
from studies.adaptation.digits import (
    LONG,
    MOTIONS,
    NAMES,
    TINY,
    DigitPipeline,
    Digits,
    Scene,
    crop,
    load_digits,
    to_rgb,
)
from studies.adaptation.judging import CLASSIFIER_FILE, DigitClassifier

HELD_OUT = 32
LATENT_CHANNELS = 4
STRIDE = 4
"""Pixels per latent along height and width."""
TEXT_CHANNELS = 64


@dataclass(frozen=True)
class Phase:
    """One run of the training loop in which a transformer was made."""

    name: str
    steps: int
    batch_size: int
    learning_rate: float
    frames: int | None = None
    """Length of the clips; single frames teach the shapes of the digits at a fraction of the cost. None: all."""


class Recipe(ABC):
    """How one tiny pipeline is built and trained."""

    tiny: ClassVar[DigitPipeline]
    text_marks: ClassVar[dict[str, str]] = {}
    """Special token that the tokenizer puts before ("bos_token") or after ("eos_token") a text; empty without text."""
    autoencoder_steps: ClassVar[int] = 400
    training_scenes: ClassVar[int] = 6000
    training_settings: ClassVar[dict[str, Any]] = {}
    """Settings of the training loop that replace those of :func:`training_config`."""
    phases: ClassVar[tuple[Phase, ...]]
    """How its transformer is trained."""

    @abstractmethod
    def build_transformer(self) -> Any:
        """An untrained transformer."""

    @abstractmethod
    def build_autoencoder(self) -> Any:
        """An untrained autoencoder."""

    def decode(self, autoencoder: Any, latents: torch.Tensor) -> torch.Tensor:
        """Pictures of latents, as the autoencoder's training compares them."""
        pictures: torch.Tensor = autoencoder.decode(latents, return_dict=False)[0]
        return pictures

    def record_scale(self, autoencoder: Any, latents: torch.Tensor, spread: float) -> None:
        """Write into the autoencoder's configuration what brings its latents to a standard deviation.

        Args:
            autoencoder: trained.
            latents: of many pictures, (n, 4, ...).
            spread: the standard deviation.
        """
        autoencoder.register_to_config(scaling_factor=round(spread / latents.std().item(), 4))

    def build_scheduler(self) -> Any:
        """Flow matching with shift 3."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(shift=3.0)

    def build_text_encoder(self, tokenizer: Any) -> Any | None:
        """An untrained text encoder for a tokenizer's vocabulary; None for a model without one."""
        return None

    @abstractmethod
    def assemble(self, parts: dict[str, Any]) -> Any:
        """The pipeline of its parts, by the names of its components."""

    def begin(self, output: Path, seed: int) -> Any:
        """The pipeline whose transformer is trained: untrained, all else trained, or taken from ``output``."""
        return build_pipeline(self, _autoencoder(self, output / "autoencoder", seed), seed)


class DiT(Recipe):
    """``DiTPipeline``: one digit, given by its class."""

    tiny = TINY["dit"]
    phases = (Phase("whole", 6000, 32, 1.5e-3),)

    def build_transformer(self) -> Any:
        """Four layers of 3 heads of 32."""
        from diffusers import DiTTransformer2DModel

        transformer = DiTTransformer2DModel(
            num_attention_heads=3,
            attention_head_dim=32,
            in_channels=LATENT_CHANNELS,
            out_channels=2 * LATENT_CHANNELS,
            num_layers=4,
            sample_size=self.tiny.picture_size // STRIDE,
            patch_size=2,
            num_embeds_ada_norm=1000,
        )
        for block in transformer.transformer_blocks:
            # the usual 0.02 takes many thousand steps until the label is heard beside the timestep
            nn.init.normal_(block.norm1.emb.class_embedder.embedding_table.weight, std=0.5)
        return transformer

    def build_autoencoder(self) -> Any:
        """``AutoencoderKL``."""
        from diffusers import AutoencoderKL

        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(16, 32, 32),
            layers_per_block=1,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=8,
            sample_size=self.tiny.picture_size,
            mid_block_add_attention=False,
        )

    def build_scheduler(self) -> Any:
        """First-order DPM-Solver on DiT's linear schedule."""
        from diffusers import DPMSolverMultistepScheduler

        # the second order extrapolates predictions made of nearly pure noise, which a small model gets wrong
        return DPMSolverMultistepScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", solver_order=1)

    def assemble(self, parts: dict[str, Any]) -> Any:
        """``DiTPipeline`` with the names of the digits as labels."""
        from diffusers import DiTPipeline

        pipe = DiTPipeline(**parts, id2label=dict(enumerate(NAMES)))
        # DiTPipeline reads the class names from its configuration, but does not write them
        pipe.register_to_config(id2label=dict(enumerate(NAMES)))
        return pipe


class Sana(Recipe):
    """``SanaPipeline``: one or two digits, given by a caption."""

    tiny = TINY["sana"]
    text_marks: ClassVar[dict[str, str]] = {"bos_token": "<bos>"}
    phases = (Phase("whole", 2500, 32, 1e-3), Phase("longer", 3000, 32, 1e-3))

    def build_transformer(self) -> Any:
        """Four layers of 3 heads of 32."""
        from diffusers import SanaTransformer2DModel

        return SanaTransformer2DModel(
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_attention_heads=3,
            attention_head_dim=32,
            num_layers=4,
            num_cross_attention_heads=3,
            cross_attention_head_dim=32,
            cross_attention_dim=96,
            caption_channels=TEXT_CHANNELS,
            sample_size=self.tiny.picture_size // STRIDE,
            patch_size=2,
        )

    def build_autoencoder(self) -> Any:
        """``AutoencoderDC``."""
        from diffusers import AutoencoderDC

        return AutoencoderDC(
            latent_channels=LATENT_CHANNELS,
            attention_head_dim=8,
            encoder_block_types=("ResBlock",) * 3,
            decoder_block_types=("ResBlock",) * 3,
            encoder_block_out_channels=(16, 32, 32),
            decoder_block_out_channels=(16, 32, 32),
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            encoder_qkv_multiscales=((), (), ()),
            decoder_qkv_multiscales=((), (), ()),
        )

    def build_text_encoder(self, tokenizer: Any) -> Any:
        """``Gemma2Model``."""
        from transformers import Gemma2Config, Gemma2Model

        return Gemma2Model(
            Gemma2Config(
                vocab_size=len(tokenizer),
                hidden_size=TEXT_CHANNELS,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                query_pre_attn_scalar=16,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=None,
            )
        )

    def assemble(self, parts: dict[str, Any]) -> Any:
        """``SanaPipeline``."""
        from diffusers import SanaPipeline

        return SanaPipeline(**parts)


class Wan(Recipe):
    """``WanPipeline``: one or two digits in motion, given by a caption."""

    tiny = TINY["wan"]
    text_marks: ClassVar[dict[str, str]] = {"eos_token": "</s>"}
    autoencoder_steps = 250
    training_scenes = 1500
    phases = (
        Phase("single", 2500, 48, 2e-3, frames=1),
        Phase("longer", 2000, 48, 2e-3, frames=1),
        Phase("whole", 700, 8, 1e-3),
        Phase("longest", 1500, 8, 1e-3),
        Phase("last", 2500, 8, 1e-3),
    )

    def build_transformer(self) -> Any:
        """Four layers of 3 heads of 32."""
        from diffusers import WanTransformer3DModel

        return WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=3,
            attention_head_dim=32,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_CHANNELS,
            ffn_dim=384,
            num_layers=4,
            rope_max_seq_len=64,
        )

    def build_autoencoder(self) -> Any:
        """``AutoencoderKLWan`` with temporal stride 1, whose convolutions do not look at earlier frames.

        It is trained on single frames, which give those weights no gradient, so it treats all frames of a clip alike.
        """
        from diffusers import AutoencoderKLWan

        autoencoder = AutoencoderKLWan(
            base_dim=16,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.0] * LATENT_CHANNELS,
            latents_std=[1.0] * LATENT_CHANNELS,
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_temporal=1,
            scale_factor_spatial=STRIDE,
        )
        with torch.no_grad():
            for module in autoencoder.modules():
                if isinstance(module, nn.Conv3d):
                    # of a causal kernel the last is the current frame
                    module.weight[:, :, :-1] = 0
        return autoencoder

    def decode(self, autoencoder: Any, latents: torch.Tensor) -> torch.Tensor:
        """Frames without the final clamp, behind which a dark pixel gets no gradient."""
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        frames = autoencoder.decoder(autoencoder.post_quant_conv(latents), first_chunk=True)
        pictures: torch.Tensor = unpatchify(frames, autoencoder.config.patch_size)
        return pictures

    def record_scale(self, autoencoder: Any, latents: torch.Tensor, spread: float) -> None:
        """Mean and standard deviation of every channel."""
        channels = latents.movedim(1, 0).flatten(1)
        autoencoder.register_to_config(
            latents_mean=[round(x, 4) for x in channels.mean(dim=1).tolist()],
            latents_std=[round(x / spread, 4) for x in channels.std(dim=1).tolist()],
        )

    def build_text_encoder(self, tokenizer: Any) -> Any:
        """``UMT5EncoderModel``."""
        from transformers import UMT5Config, UMT5EncoderModel

        return UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer),
                d_model=TEXT_CHANNELS,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )

    def assemble(self, parts: dict[str, Any]) -> Any:
        """``WanPipeline``."""
        from diffusers import WanPipeline

        return WanPipeline(**parts)


class WanLong(Wan):
    """tiny-wan, trained on for longer clips: pieces of them first, then whole ones; half an hour of a core."""

    tiny = LONG
    training_scenes = 600
    # what many frames show is seen through more noise
    training_settings: ClassVar[dict[str, Any]] = {
        "flow_shift": 5.0,
        "precision": "bf16",
        "ema_decay": 0.98,
        "checkpoint_every": 100,
    }
    phases = (Phase("pieces", 200, 6, 1e-3, frames=25), Phase("whole", 360, 2, 6e-4))

    def build_transformer(self) -> Any:
        """That of tiny-wan, for more positions."""
        from diffusers import WanTransformer3DModel

        return WanTransformer3DModel.from_config({**super().build_transformer().config, "rope_max_seq_len": 128})

    def build_scheduler(self) -> Any:
        """Flow matching with shift 5."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(shift=5.0)

    def begin(self, output: Path, seed: int) -> Any:
        """tiny-wan with another scheduler, and its weights in the longer transformer."""
        from diffusers import WanPipeline

        transformer = self.build_transformer()
        transformer.load_state_dict(load_tiny("wan").transformer.state_dict())
        return WanPipeline.from_pretrained(
            pipeline_folder("wan"), transformer=transformer, scheduler=self.build_scheduler()
        )


RECIPES: dict[str, Recipe] = {"dit": DiT(), "sana": Sana(), "wan": Wan(), "wan-long": WanLong()}


_PICTURES = 8
_KL_WEIGHT = 1e-4
_LATENT_NOISE = 0.1
_LATENT_SPREAD = 0.5
"""Standard deviation that latents are scaled to.

On pictures as smooth as these the shape shows through much noise; of unit variance, nearly every training step would
fall where the digit is plain to see already and the caption has nothing to add.
"""


def train_autoencoder(recipe: Recipe, report: Callable[[int, float], None], seed: int = 0) -> Any:
    """Train an autoencoder on the training digits and fit its latent scale.

    Args:
        recipe: whose autoencoder.
        report: called after every step with how many were done and the squared reconstruction error.
        seed: the same seed gives the same weights.

    Returns:
        The autoencoder, in evaluation mode.
    """
    torch.manual_seed(seed)
    chance = random.Random(seed)
    digits = load_digits("train")
    autoencoder = recipe.build_autoencoder()
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=2e-3, weight_decay=0.0)
    steps = recipe.autoencoder_steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pictures = _random_pictures(recipe.tiny, digits, chance)
        latents, penalty = _encode(autoencoder, pictures)
        error = nn.functional.mse_loss(recipe.decode(autoencoder, latents), pictures)
        (error + _KL_WEIGHT * penalty).backward()
        nn.utils.clip_grad_norm_(autoencoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        report(step + 1, error.item())
    autoencoder.eval()
    with torch.no_grad():
        encoded = [autoencoder.encode(_random_pictures(recipe.tiny, digits, chance)) for _ in range(16)]
    latents = torch.cat([e.latent_dist.mean if hasattr(e, "latent_dist") else e.latent for e in encoded])
    recipe.record_scale(autoencoder, latents, _LATENT_SPREAD)
    return autoencoder


def _random_pictures(tiny: DigitPipeline, digits: Digits, chance: random.Random) -> torch.Tensor:
    """Random pictures (8, 3, H, W), or single frames of clips (8, 3, 1, H, W), in [-1, 1]."""
    pictures = []
    for _ in range(_PICTURES):
        picture = tiny.draw(tiny.random_scene(chance), digits, chance.randrange(2**32))
        pictures.append(to_rgb(picture[chance.randrange(len(picture))][None] if tiny.is_video else picture))
    frames = torch.stack(pictures)
    return frames if tiny.is_video else frames[:, :, 0]


def _encode(autoencoder: Any, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents, and how far they are from unit normal ones."""
    encoded = autoencoder.encode(pictures)
    if hasattr(encoded, "latent_dist"):
        distribution = encoded.latent_dist
        divergence = distribution.mean.square() + distribution.var - 1 - distribution.logvar
        return distribution.sample(), 0.5 * divergence.mean()
    return encoded.latent + _LATENT_NOISE * torch.randn_like(encoded.latent), 0.5 * encoded.latent.square().mean()


_TEXT_STEPS = 300
_NOTHING = 10


def all_scenes(tiny: DigitPipeline) -> list[Scene]:
    """Every scene that a caption can ask of a pipeline: one or two digits with each motion."""
    pairs = [(first,) for first in range(10)] + list(itertools.product(range(10), repeat=2))
    return [Scene(labels, motion) for labels in pairs for motion in tiny.motions]


def build_tokenizer(recipe: Recipe) -> Any:
    """A byte-level BPE tokenizer that knows the words of the captions and spells every other word in bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    ((kind, mark),) = recipe.text_marks.items()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", mark],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([scene.caption for scene in all_scenes(recipe.tiny)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{mark} $A" if kind == "bos_token" else f"$A {mark}",
        special_tokens=[(mark, tokenizer.token_to_id(mark))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", padding_side="right", model_max_length=512, **{kind: mark}
    )


def train_text_encoder(recipe: Recipe, tokenizer: Any, seed: int = 0) -> Any:
    """A text encoder that tells all captions of its pipeline apart; a few seconds."""
    torch.manual_seed(seed)
    encoder: Any = recipe.build_text_encoder(tokenizer)
    # random heads that stay as they are: the encoder itself has to bring what a caption says far apart
    heads = nn.functional.normalize(torch.randn(10 + 11 + len(MOTIONS) + 1, TEXT_CHANNELS), dim=1)
    scenes = all_scenes(recipe.tiny)
    targets = torch.tensor([_target(scene) for scene in scenes])
    tokens = tokenizer([scene.caption for scene in scenes], padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(_TEXT_STEPS):
        chosen = torch.randint(len(scenes), (64,))
        mask = tokens.attention_mask[chosen]
        states = encoder(input_ids=tokens.input_ids[chosen], attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        parts = (mean @ heads.T).split([10, 11, len(MOTIONS) + 1], dim=-1)
        wanted = targets[chosen].unbind(dim=-1)
        loss = torch.stack([nn.functional.cross_entropy(p, w) for p, w in zip(parts, wanted, strict=True)]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return encoder.eval().requires_grad_(False)


def _target(scene: Scene) -> tuple[int, int, int]:
    second = scene.labels[1] if len(scene.labels) == 2 else _NOTHING
    motion = MOTIONS.index(scene.motion) if scene.motion is not None else len(MOTIONS)
    return scene.labels[0], second, motion


_CLASSIFIER_STEPS = 800


def train_classifier(seed: int = 0) -> DigitClassifier:
    """Train on the training digits, drawn at the sizes of all tiny pipelines; half a minute on one core."""
    torch.manual_seed(seed)
    crops, labels = real_crops(load_digits("train"), seed)
    classifier = DigitClassifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _CLASSIFIER_STEPS)
    for _ in range(_CLASSIFIER_STEPS):
        chosen = torch.randint(len(crops), (128,))
        loss = nn.functional.cross_entropy(classifier(_augment(crops[chosen])), labels[chosen], label_smoothing=0.05)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return classifier.eval()


def real_crops(digits: Digits, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Crops (3 n, 16, 16) and labels (3 n,) of real digits, drawn once at the size of each tiny pipeline."""
    chance = random.Random(seed)
    crops, labels = [], []
    for tiny in TINY.values():
        whole = (0, tiny.picture_size, 0, tiny.picture_size)
        for image, label in zip(digits.images, digits.labels.tolist(), strict=True):
            one = Digits(image[None], torch.tensor([label]))
            picture = tiny.draw(Scene((label,)), one, chance.randrange(2**32))
            crops.append(crop(picture, whole, tiny.digit_size))
            labels.append(label)
    return torch.cat(crops), torch.tensor(labels)


def _augment(crops: torch.Tensor) -> torch.Tensor:
    """Slightly turned, scaled, shifted and noisy crops."""
    count = len(crops)
    angle = 0.15 * torch.randn(count)
    scale = 1 + 0.08 * torch.randn(count)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = angle.cos() * scale
    theta[:, 0, 1], theta[:, 1, 0] = -angle.sin() * scale, angle.sin() * scale
    theta[:, :, 2] = 0.05 * torch.randn(count, 2)
    grid = nn.functional.affine_grid(theta, [count, 1, *crops.shape[1:]], align_corners=False)
    turned = nn.functional.grid_sample(crops[:, None], grid, align_corners=False).squeeze(1)
    return (turned + 0.05 * torch.randn_like(turned)).clamp(0, 1)


def cut_clips(data: InMemoryData, frames: int, held_out: int) -> InMemoryData:
    """Short pieces of clips, as many as fit side by side; of each of the last ``held_out`` clips the first piece.

    That a piece is what the autoencoder would make of it alone is particular to the tiny one, which sees single frames.
    """
    pieces: list[Sample] = []
    for index in range(len(data)):
        sample = data[index]
        length = sample["latents"].shape[1]
        starts = range(0, length - frames + 1, frames) if index < len(data) - held_out else (0,)
        pieces += [{**sample, "latents": sample["latents"][:, start : start + frames].clone()} for start in starts]
    return InMemoryData(pieces, empty=data.empty)


def training_config(recipe: Recipe, phase: Phase, output: Path, seed: int) -> TrainingConfig:
    """Settings of the training loop for one phase."""
    usual = TrainingConfig(
        output=str(output),
        steps=phase.steps,
        learning_rate=phase.learning_rate,
        trainable="all",
        objectives=ObjectiveWeights(diffusion=1.0),
        scheduler="cosine",
        warmup_steps=min(50, phase.steps // 2),
        seed=seed,
        batch_size=phase.batch_size,
        ema_decay=0.99,
        prompt_dropout=0.1,
        checkpoint_every=250,
        validation=ValidationConfig(samples=HELD_OUT, every=500),
    )
    return usual.replace(**recipe.training_settings)


def build_pipeline(recipe: Recipe, autoencoder: Any, seed: int = 0) -> Any:
    """A pipeline with a trained autoencoder, a trained text encoder and an untrained transformer."""
    torch.manual_seed(seed)
    parts = {"transformer": recipe.build_transformer(), "vae": autoencoder, "scheduler": recipe.build_scheduler()}
    if recipe.text_marks:
        tokenizer = build_tokenizer(recipe)
        parts |= {"tokenizer": tokenizer, "text_encoder": train_text_encoder(recipe, tokenizer, seed)}
    return recipe.assemble(parts)


def train_pipeline(recipe: Recipe, output: Path, seed: int = 0) -> Any:
    """Train all parts of one tiny pipeline; parts that are in the output folder already are taken from there.

    Args:
        recipe: of which one.
        output: folder for the autoencoder, the runs of the training loop and the finished ``pipeline``.
        seed: the same seed gives the same pipeline.

    Returns:
        The pipeline, saved to ``output / "pipeline"`` as well.
    """
    pipe = recipe.begin(output, seed)
    data = digit_latents(pipe, recipe.tiny, recipe.training_scenes, HELD_OUT, seed)
    for phase in recipe.phases:
        folder = output / phase.name
        if not (folder / "result").is_dir():
            _train_phase(recipe, pipe, data, phase, folder, seed)
        pipe.transformer = type(pipe.transformer).from_pretrained(folder / "result")
    pipe.save_pretrained(output / "pipeline")
    return pipe


def _train_phase(recipe: Recipe, pipe: Any, data: InMemoryData, phase: Phase, folder: Path, seed: int) -> None:
    if phase.frames is not None:
        data = cut_clips(data, phase.frames, HELD_OUT)
    result = train(pipe.transformer, data, training_config(recipe, phase, folder, seed), resume="latest")
    if result.result is None:
        raise SystemExit(f"Stopped after step {result.step}; the same command goes on.")


def _autoencoder(recipe: Recipe, folder: Path, seed: int) -> Any:
    if folder.is_dir():
        return type(recipe.build_autoencoder()).from_pretrained(folder).eval()
    from tqdm.auto import tqdm

    with tqdm(total=recipe.autoencoder_steps, desc="autoencoder", unit="step") as progress:

        def report(step: int, error: float) -> None:
            progress.update(step - progress.n)
            progress.set_postfix(error=f"{error:.4g}")

        autoencoder = train_autoencoder(recipe, report, seed)
    autoencoder.save_pretrained(folder)
    return autoencoder


def install_pipeline(family: str, output: Path) -> None:
    """Copy a trained pipeline to where the package keeps it."""
    shutil.rmtree(pipeline_folder(family), ignore_errors=True)
    shutil.copytree(output / "pipeline", pipeline_folder(family))
    for file in pipeline_folder(family).glob("*/config.json"):
        settings = json.loads(file.read_text())
        settings.pop("_name_or_path", None)  # the folder it was trained in
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*RECIPES, "classifier"])
    parser.add_argument("--output", type=Path, help="folder for everything; outputs/tiny-<name> if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--install", action="store_true", help="make it the one that the package ships")
    arguments = parser.parse_args()
    if arguments.what == "classifier":
        save_file(train_classifier(arguments.seed).state_dict(), CLASSIFIER_FILE)
        return
    if arguments.install:
        pipeline_folder(arguments.what)  # raises for one that does not ship, before it is trained
    output = arguments.output or Path("outputs") / f"tiny-{arguments.what}"
    train_pipeline(RECIPES[arguments.what], output, arguments.seed)
    if arguments.install:
        install_pipeline(arguments.what, output)


if __name__ == "__main__":
    main()
