from pathlib import Path

import pytest

from mhla_diffusers.families import Clip
from mhla_diffusers.training.latents.media import UnreadableMediaError, read_clip

from ..pipelines import write_image, write_video

CLIP = Clip(frames=5, fps=8.0, sizes=((32, 32),))


def test_frames_are_taken_at_the_asked_rate(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", frames=12, fps=8)
    levels = read_clip(tmp_path / "a.mp4", CLIP).float().mean(dim=(0, 2, 3))
    assert levels.tolist() == pytest.approx([0, 10, 20, 30, 40], abs=3)
    half_rate = Clip(frames=5, fps=4.0, sizes=((32, 32),))
    levels = read_clip(tmp_path / "a.mp4", half_rate).float().mean(dim=(0, 2, 3))
    assert levels.tolist() == pytest.approx([0, 20, 40, 60, 80], abs=3)


@pytest.mark.parametrize("size", [(40, 48), (50, 34), (64, 128), (18, 22)])
def test_any_size_is_resized_and_cropped(tmp_path: Path, size: tuple[int, int]) -> None:
    write_video(tmp_path / "a.mp4", size=size)
    assert read_clip(tmp_path / "a.mp4", CLIP).shape == (3, 5, 32, 32)
    write_image(tmp_path / "a.png", (size[0] + 1, size[1] - 1), level=77)
    image = read_clip(tmp_path / "a.png", Clip(1, 1.0, ((16, 32),)))
    assert image.shape == (3, 1, 16, 32)
    assert image.min() == image.max() == 77


def test_nearest_bucket() -> None:
    clip = Clip(1, 1.0, ((480, 832), (832, 480), (640, 640)))
    assert clip.size_for(720, 1280) == (480, 832)
    assert clip.size_for(1920, 1080) == (832, 480)
    assert clip.size_for(500, 512) == (640, 640)


def test_unreadable_files_say_why(tmp_path: Path) -> None:
    write_video(tmp_path / "whole.mp4", frames=12)
    content = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "truncated.mp4").write_bytes(content[: len(content) // 3])
    (tmp_path / "text.mp4").write_text("no video at all")
    (tmp_path / "broken.png").write_text("no image at all")
    write_video(tmp_path / "short.mp4", frames=3)
    for name, reason in {
        "empty.mp4": "the file is empty",
        "truncated.mp4": "no readable video",
        "text.mp4": "no readable video",
        "short.mp4": "too short: 0.25 s of video, but 5 frames at 8 fps span 0.50 s",
    }.items():
        with pytest.raises(UnreadableMediaError, match=reason):
            read_clip(tmp_path / name, CLIP)
    with pytest.raises(UnreadableMediaError, match="no readable image"):
        read_clip(tmp_path / "broken.png", Clip(1, 1.0, ((32, 32),)))
    with pytest.raises(UnreadableMediaError, match="an image has no 5 frames"):
        read_clip(_image(tmp_path), CLIP)


def _image(folder: Path) -> Path:
    write_image(folder / "image.png")
    return folder / "image.png"
