"""Arguments of the wrong kind are refused with their value, what is allowed, and the way out; nothing is changed."""

import logging
from pathlib import Path

import pytest
import torch
from diffusers import ChromaTransformer2DModel
from transformers import ViTConfig, ViTForImageClassification

import mhla_diffusers as mhla
from mhla_diffusers.attention import MHLAState
from mhla_diffusers.families import find_family, get_family
from mhla_diffusers.families.wan import WanFamily
from mhla_diffusers.models import VLTConfig, VLTForImageClassification
from mhla_diffusers.patching.finding import find_transformers
from mhla_diffusers.tiny import pipeline_folder

from ..models import FAMILIES, inputs, patched
from ..pipelines import PIPELINES, dit_pipeline, wan22_pipeline, wan_pipeline

CAUSAL = {"blocks": (9, 2, 1), "causal": "block", "block_length": 1, "sparse": "none"}
_RUN = r"must be a function without arguments that runs the model"


class LacksAxes(mhla.Family):
    name = "lacking"
    transformers = ("SomeTransformer2DModel",)
    block_lists = ("blocks",)

    def self_attention_processor(self):
        return None


class OneName(WanFamily):
    name = "one name"
    transformers = "SomeTransformer2DModel"


def vit():
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=4,
        num_labels=3,
    )
    return ViTForImageClassification(config).eval()


def vlt():
    with torch.device("meta"):
        return VLTForImageClassification(VLTConfig.vlt_t())


def stream():
    return mhla.VideoStream(mhla.apply_mhla(FAMILIES["wan"].build(), **CAUSAL))


REFUSED = {
    "size as text": (
        lambda: mhla.describe(dit_pipeline(), height="64", width=64),
        r"height='64' must be a whole number of pixels, at least 1",
    ),
    "size as a float": (
        lambda: mhla.describe(dit_pipeline(), height=64, width=64.0),
        r"width=64.0 must be a whole number of pixels",
    ),
    "truth as a size": (lambda: mhla.describe(dit_pipeline(), height=True, width=True), "height=True must be a whole"),
    "negative size": (lambda: mhla.suggest_blocks(wan_pipeline(), -480, 832), "height=-480 must be a whole"),
    "half a frame": (
        lambda: mhla.suggest_blocks(wan_pipeline(), 480, 832, 8.5),
        r"num_frames=8.5 must be a whole number of frames",
    ),
    "blocks of a transformer": (
        lambda: mhla.suggest_blocks(FAMILIES["wan"].build(), 480, 832),
        r"needs the pipeline.*describe\(\) takes the token grid",
    ),
    "grid as text": (lambda: mhla.describe(FAMILIES["dit"].build(), grid="88"), "grid='88' must be a list of counts"),
    "grid of a number": (lambda: mhla.describe(FAMILIES["dit"].build(), grid=8), "grid=8 must be a list of counts"),
    "grid of other axes": (
        lambda: mhla.describe(FAMILIES["dit"].build(), grid=(8,)),
        r"grid=\(8,\) has 1 axes, but the token grid of DiTTransformer2DModel has 2",
    ),
    "calibration that is no function": (
        lambda: mhla.apply_mhla(FAMILIES["dit"].build(), calibration=3),
        f"calibration=3 {_RUN}",
    ),
    "sensitivity without a run": (lambda: mhla.layer_sensitivity(patched("dit"), 3), f"run=3 {_RUN}"),
    "sparse branch without a run": (
        lambda: mhla.calibrate_sparse(patched("dit", sparse="content", block_size=4), 3),
        f"run=3 {_RUN}",
    ),
    "output norm without a run": (
        lambda: mhla.calibrate_output_norm(patched("dit", output_norm=True), None),
        f"run=None {_RUN}",
    ),
    "audit without a run": (lambda: mhla.audit(patched("dit"), "wan"), f"run='wan' {_RUN}"),
    "a layer twice": (
        lambda: mhla.apply_mhla(FAMILIES["dit"].build(), layers=[1, 1]),
        r"layers=\(1, 1\) names layer 1 more than once",
    ),
    "a layer by two names": (
        lambda: mhla.apply_mhla(FAMILIES["dit"].build(), layers=[0, -4]),
        r"layers=\(0, -4\) names layer 0 more than once",
    ),
    "no density": (lambda: mhla.set_density(patched("dit", sparse="content"), None), r"density=None must be a part"),
    "density as text": (lambda: mhla.set_density(patched("dit", sparse="content"), "0.1"), r"density='0.1' must be"),
    "configuration of a processor": (lambda: mhla.MHLAProcessor(3), "config=3 must be a MHLAConfig"),
    "processors of a pipeline": (lambda: mhla.attn_processors(wan_pipeline()), "WanPipeline is a pipeline; give its"),
    "stream of what has MHLA built in": (lambda: mhla.VideoStream(vlt()), "has MHLA built in"),
    "share of what has MHLA built in": (lambda: mhla.set_density(vlt(), 0.1), "has MHLA built in"),
    "tiny pipeline": (lambda: pipeline_folder("flux"), "family='flux' has no tiny pipeline; allowed: dit, sana, wan"),
    "name of a feature map": (lambda: mhla.register_feature_map(3, torch.relu), "name=3 of a feature map must be text"),
    "no feature map": (lambda: mhla.register_feature_map("foo", 3), "feature_map=3 cannot be called"),
    "class of a family": (lambda: mhla.register_family(WanFamily), r"register an instance of it, WanFamily\(\)"),
    "no family": (lambda: mhla.register_family(None), "family=None must be an instance of a subclass"),
    "family that lacks something": (
        lambda: mhla.register_family(LacksAxes()),
        "LacksAxes lacks axes, default_config; docs/add-a-model.md",
    ),
    "family of one name": (lambda: mhla.register_family(OneName()), "OneName.transformers='Some.* must be a tuple"),
    "family of a pipeline": (lambda: get_family(wan_pipeline()), "WanPipeline is a pipeline; give its transformer"),
    "family of no name": (lambda: get_family("wam"), "^'wam' is not supported; the page"),
    "stream of nothing": (lambda: mhla.VideoStream(None), "NoneType has no transformer that MHLA supports"),
    "stream of two transformers": (
        lambda: mhla.VideoStream(mhla.apply_mhla(wan22_pipeline(), **CAUSAL)),
        r"WanPipeline has several transformers.*VideoStream\(pipe.transformer\)",
    ),
    "stream without arguments": (lambda: stream()(), "WanTransformer3DModel was called without hidden_states"),
    "stream without latents": (lambda: stream()(None), "WanTransformer3DModel was called without hidden_states"),
    "layers of no pipeline": (
        lambda: mhla.apply_mhla(vit(), layers="auto:1/2"),
        r"apply_mhla\(model, layers='auto:1/2', calibration=run\), with run\(\) a function",
    ),
    "order of images": (
        lambda: mhla.apply_mhla(vit(), causal="token"),
        "causal='token' orders the tokens of the grid, and ViTForImageClassification attends to extra tokens",
    ),
    "run of nothing": (
        lambda: mhla.layer_sensitivity(mhla.apply_mhla(vit(), blocks=(2, 2)), lambda: None),
        "must call the pipeline or the model that was given",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_named(case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        call()


def test_a_base_is_for_changed_weights_alone(tmp_path):
    model, base = patched("dit"), FAMILIES["dit"].build()
    for weights in ("mhla", "all"):
        with pytest.raises(ValueError, match=f"base is what weights='changed' compares with, and weights='{weights}'"):
            mhla.save_mhla(model, tmp_path / "patch", base=base, weights=weights)
    assert not list(tmp_path.iterdir())


def test_a_model_is_unchanged_where_its_calibration_is_refused():
    model = FAMILIES["dit"].build()
    with pytest.raises(ValueError, match="calibration"):
        mhla.apply_mhla(model, calibration=3)
    assert not mhla.is_patched(model)


def test_sizes_may_be_numpys():
    import numpy as np

    pipe = dit_pipeline()
    assert mhla.suggest_blocks(pipe, np.int64(256), np.int32(256)) == mhla.suggest_blocks(pipe, 256, 256)


@pytest.mark.parametrize("find", [find_family, get_family])
def test_a_family_is_found_by_model_class_and_name(find):
    model = FAMILIES["wan"].build()
    for given in (model, type(model), "WanTransformer3DModel", "wan"):
        assert find(given).name == "wan"
    assert find_family("wam") is None and find_family(None) is None


def test_the_nearest_family_is_that_of_the_bases():
    """Chroma derives from Flux, and no name but its bases' says so; where nothing is near, none is named."""
    for given in (ChromaTransformer2DModel, "ChromaTransformer2DModel"):
        with pytest.raises(ValueError, match=r"nearest family is 'flux' \(FluxTransformer2DModel\).*docs/models.md"):
            get_family(given)
    with pytest.raises(ValueError, match="is not supported; the page") as error:
        get_family("MochiTransformer3DModel")
    assert "nearest" not in str(error.value) and len(str(error.value)) < 300


def test_a_stream_takes_a_pipeline():
    pipe = mhla.apply_mhla(wan_pipeline(), **CAUSAL)
    arguments = inputs("wan")
    with torch.no_grad():
        of_pipe, of_transformer = mhla.VideoStream(pipe), mhla.VideoStream(pipe.transformer)
        for _ in range(2):
            assert torch.equal(of_pipe(**arguments)[0], of_transformer(**arguments)[0])
    assert of_pipe.frames == of_transformer.frames == 2 * inputs("wan")["hidden_states"].shape[2]


def test_samples_are_reordered_by_a_list():
    def run():
        state = MHLAState(torch.rand(4, 4), (12,), (4,), causal="token")
        generator = torch.Generator().manual_seed(0)
        state.step(*(torch.randn(2, 5, 2, 8, generator=generator) for _ in range(3)))
        return state, [torch.randn(2, 1, 2, 8, generator=generator) for _ in range(3)]

    torch.manual_seed(0)
    by_list, step = run()
    torch.manual_seed(0)
    by_tensor, _ = run()
    by_list.reorder([1, 0])
    by_tensor.reorder(torch.tensor([1, 0]))
    assert torch.equal(by_list.step(*step), by_tensor.step(*step))
    stream_of_two = stream()
    with torch.no_grad():
        stream_of_two(**inputs("wan"))
    stream_of_two.reorder([1, 0])


@pytest.mark.parametrize(("side", "says"), [(16, True), (256, False)])
def test_a_size_too_small_for_blocks_is_told(caplog, side, says):
    with caplog.at_level(logging.WARNING, "mhla_diffusers"):
        blocks = mhla.suggest_blocks(PIPELINES["dit"].build(), side, side)
    assert (blocks == (1, 1)) == says
    assert ("MHLA is plain linear attention there" in caplog.text) == says


def test_a_relative_path_asks_no_hub(tmp_path, monkeypatch):
    """Where its folder is there; a revision says that the Hub is meant."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or "runs")
    with pytest.raises(FileNotFoundError, match="The folder runs that is here has no first.*revision='main'"):
        mhla.load_mhla(FAMILIES["dit"].build(), "runs/first")
    assert not asked
    with pytest.raises(FileNotFoundError, match="holds no MHLA patch"):
        mhla.load_mhla(FAMILIES["dit"].build(), "runs/first", revision="main")
    assert asked == ["runs/first"]


def test_no_supported_model_is_told_in_a_few_words():
    with pytest.raises(ValueError, match="docs/models.md") as error:
        find_transformers("wan")
    assert len(str(error.value)) < 250
