"""How the tiny pipelines were made, with a few steps in place of thousands."""

import random

import pytest
import torch

from mhla_diffusers.demo import making
from mhla_diffusers.demo.autoencoders import train_autoencoder
from mhla_diffusers.demo.judging import generate_scenes
from mhla_diffusers.demo.latents import cut_clips, digit_latents
from mhla_diffusers.demo.text import all_scenes, build_tokenizer
from mhla_diffusers.tiny import TINY, load_tiny, loading
from mhla_diffusers.tiny.base import MAX_TOKENS, Phase
from mhla_diffusers.tiny.pipelines import TinyDiT, TinyWan


class QuickDiT(TinyDiT):
    autoencoder_steps = 2
    training_scenes = 8
    phases = (Phase("whole", 50, 4, 1e-3),)


class QuickWan(TinyWan):
    autoencoder_steps = 2
    training_scenes = 2
    phases = (Phase("single", 50, 2, 1e-3, frames=1), Phase("whole", 50, 1, 1e-3))


@pytest.fixture(autouse=True)
def _few_held_out(monkeypatch):
    monkeypatch.setattr(making, "HELD_OUT", 2)


def test_pipeline_is_made_kept_and_installed(tmp_path, monkeypatch):
    made = making.train_pipeline(QuickDiT(), tmp_path / "run")
    for part in ("autoencoder", "whole/result", "pipeline"):
        assert (tmp_path / "run" / part).is_dir()
    # what is finished is taken from the folder, so that nothing of it changes
    monkeypatch.setattr(making, "train_autoencoder", None)
    monkeypatch.setattr(making, "train_or_go_on", None)
    again = making.train_pipeline(QuickDiT(), tmp_path / "run")
    for name in ("transformer", "vae"):
        for key, value in getattr(made, name).state_dict().items():
            assert torch.equal(value, getattr(again, name).state_dict()[key])

    assets = tmp_path / "assets"
    monkeypatch.setattr(loading, "ASSET_FOLDER", assets)
    monkeypatch.setattr(loading, "CHECKSUM_FILE", assets / "checksums.json")
    making.install_pipeline("dit", tmp_path / "run")
    assert not [file for file in assets.glob("*/*/config.json") if "_name_or_path" in file.read_text()]
    pipe, tiny = load_tiny("dit"), TINY["dit"]
    (picture,) = generate_scenes(pipe, tiny, [tiny.random_scene(random.Random(0))], seed=0, num_inference_steps=2)
    assert picture.shape == (1, 64, 64)


@pytest.mark.slow
def test_clips_are_learnt_after_single_frames(tmp_path):
    pipe = making.train_pipeline(QuickWan(), tmp_path)
    (clip,) = generate_scenes(pipe, QuickWan(), [QuickWan().random_scene(random.Random(0))], 0, num_inference_steps=1)
    assert clip.shape == (9, 64, 64)


@pytest.mark.parametrize("family", [name for name, tiny in TINY.items() if tiny.text_marks])
def test_tokenizer_knows_every_caption(family):
    tiny = TINY[family]
    tokenizer = build_tokenizer(tiny)
    captions = [scene.caption for scene in all_scenes(tiny)]
    assert max(map(len, tokenizer(captions).input_ids)) <= MAX_TOKENS
    assert tokenizer(captions).input_ids == load_tiny(family).tokenizer(captions).input_ids
    assert tokenizer.decode(tokenizer("zwölf 🙂").input_ids, skip_special_tokens=True).strip() == "zwölf 🙂"


def test_autoencoder_of_videos_treats_every_frame_alike():
    autoencoder = train_autoencoder(QuickWan(), lambda step, error: None)
    clip = torch.rand(1, 3, 9, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        whole = autoencoder.encode(clip).latent_dist.mode()
        single = autoencoder.encode(clip[:, :, 4:5]).latent_dist.mode()
    torch.testing.assert_close(whole[:, :, 4:5], single, rtol=1e-4, atol=1e-5)


def test_clips_are_cut_side_by_side():
    tiny = TINY["wan"]
    data = digit_latents(load_tiny("wan"), tiny, samples=1, held_out=1)
    pieces = cut_clips(data, frames=4, held_out=1)
    assert len(pieces) == 3
    assert torch.equal(pieces[1]["latents"], data[0]["latents"][:, 4:8])
    assert torch.equal(pieces[2]["latents"], data[1]["latents"][:, :4])
