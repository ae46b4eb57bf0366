"""CLIP scores with a tiny CLIP of random weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

from mhla_diffusers.evaluation.clip import ClipScorer
from mhla_diffusers.evaluation.compare import score_samples
from mhla_diffusers.evaluation.images import read_sample, require_samples

from ..refusals import refused
from .pictures import mhla, write_pictures, write_set

WORDS = ["<start>", "<end>", "<pad>", "<unknown>", "a", "cat", "dog", "red"]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    common = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**common, "vocab_size": len(WORDS), "max_position_embeddings": 8, "eos_token_id": 1},
        vision_config={**common, "image_size": 16, "patch_size": 8},
        projection_dim=12,
    )
    CLIPModel(config).save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 0), ("<end>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", bos_token="<start>", model_max_length=8
    )
    size = {"height": 16, "width": 16}
    images = CLIPImageProcessor(size=size, crop_size=size)
    CLIPProcessor(images, fast).save_pretrained(folder)
    return folder


def expected_score(folder, image, text):
    model, processor = CLIPModel.from_pretrained(folder), CLIPProcessor.from_pretrained(folder)
    pixels = processor.image_processor(image, return_tensors="pt")["pixel_values"]
    tokens = processor.tokenizer(text, return_tensors="pt")
    vision = model.visual_projection(model.vision_model(pixels).pooler_output)
    words = model.text_projection(model.text_model(tokens["input_ids"]).pooler_output)
    return 100 * torch.nn.functional.cosine_similarity(vision, words).item()


def test_scores_are_cosines_of_image_and_prompt(clip_folder, tmp_path):
    folder = write_set(write_pictures(tmp_path / "set", 5, size=16), ["a cat", "a red dog", "a", "dog", "a cat"])
    samples = require_samples(folder).samples
    scores = score_samples(folder, samples, "clip_score", ClipScorer(str(clip_folder)), batch_size=2)
    with torch.no_grad():
        expected = [expected_score(clip_folder, read_sample(folder / one.file), one.text) for one in samples]
    assert scores.tolist() == pytest.approx(expected, abs=1e-3)
    assert len({round(score, 2) for score in expected}) > 2
    shown = mhla("eval", "compare", folder, "--clip-model", clip_folder, "--output", tmp_path / "clip.json")
    assert shown.exit_code == 0, shown.output
    written = json.loads((tmp_path / "clip.json").read_text())["variants"]["set"]["scores"]
    assert written["clip_score"]["value"] == pytest.approx(float(scores.mean()), abs=1e-3)


def test_sets_are_looked_at_before_a_model_and_one_that_is_not_here_is_said_at_once(tmp_path, monkeypatch):
    """The Hub's client would try for most of a minute."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = ("eval", "compare", tmp_path, "--clip-model", "no/model")
    assert "has no samples.json" in str(mhla(*asked).exception)
    write_set(write_pictures(tmp_path, 1, size=16), ["a"])
    assert "HF_HUB_OFFLINE" in str(mhla(*asked).exception)


def test_weights_that_lack_tensors_are_refused(clip_folder, tmp_path):
    shutil.copytree(clip_folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("visual_projection.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with refused(tmp_path, "visual_projection.weight"):
        ClipScorer(str(tmp_path))


def test_long_prompts_are_cut_and_videos_refused(clip_folder):
    scorer = ClipScorer(str(clip_folder))
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    first, second = scorer([image, image], ["a " * 50, "a " * 6])
    assert first == pytest.approx(second.item(), abs=1e-3)
    with refused("images"):
        scorer([image[None]], ["a"])
