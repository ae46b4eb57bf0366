"""Files of prompts, and arguments of a pipeline's call, as users write them."""

import math

import pytest
from diffusers import DiTPipeline, SanaPipeline, WanPipeline

from mhla_diffusers import SparseConfig
from mhla_diffusers.generation.names import (
    check_settings,
    parse_dense_steps,
    parse_settings,
    read_prompt_table,
    read_prompts,
)
from mhla_diffusers.tiny import call_settings


def test_settings_are_typed():
    found = parse_settings(["height=480", "guidance_scale=2.5", "x=a"])
    assert found == {"height": 480, "guidance_scale": 2.5, "x": "a"}
    for texts, message in (
        (["height"], "'height' must look like"),
        (["x=[1"], r"'x=\[1' is not valid YAML"),
        (["x=2", "y=2", "x=3"], "The setting 'x' is given twice; keep one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_settings(texts)


def test_steps_are_a_number_or_a_part():
    texts = ("0", "3", "1", "0.2", "20%", "1.0", "100%", "auto", "none")
    found = {text: parse_dense_steps(None, text)["refresh"] for text in texts}
    assert found == dict(zip(texts, (0, 3, 1, 0.2, 0.2, 1.0, 1.0, "auto", None), strict=True))
    assert type(found["1"]) is int and type(found["1.0"]) is type(found["100%"]) is float
    for text in ("many", "", "%", "3 steps"):
        with pytest.raises(ValueError, match=f"softmax_steps='{text}'"):
            SparseConfig(**parse_dense_steps(text, None))


@pytest.mark.parametrize(
    ("pipeline", "settings"),
    [
        (SanaPipeline, {"negative_prompt": "blurred", "sigmas": [1.0, 0.5], "timesteps": None, "clean_caption": True}),
        (WanPipeline, {"guidance_scale_2": 3.5, "negative_prompt": ["dark", "blurred"]}),
        (WanPipeline, call_settings("wan")),
    ],
)
def test_settings_of_the_call_pass(pipeline, settings):
    check_settings(pipeline, settings)


@pytest.mark.parametrize(
    ("pipeline", "settings", "message"),
    [
        (DiTPipeline, {"num_inference_step": 2}, "'num_inference_step'; did you mean 'num_inference_steps'"),
        (DiTPipeline, {"num_frames": 9}, "DiTPipeline 'num_frames'; allowed: guidance_scale, num_inference_steps"),
        (WanPipeline, {"prompt": "a cat"}, "'prompt'"),
        (WanPipeline, {"latents": 3}, "'latents'"),
        (DiTPipeline, {"num_inference_steps": 2.5}, "num_inference_steps=2.5 must be an integer"),
        (DiTPipeline, {"num_inference_steps": True}, "num_inference_steps=True must be an integer"),
        (WanPipeline, {"height": None}, "height=None must be an integer"),
        (DiTPipeline, {"guidance_scale": "high"}, "guidance_scale='high'"),
        (DiTPipeline, {"guidance_scale": math.inf}, "guidance_scale=inf"),
        (WanPipeline, {"num_frames": 0}, "num_frames=0"),
    ],
)
def test_settings_that_the_call_does_not_take_are_refused(pipeline, settings, message):
    with pytest.raises(ValueError, match=message):
        check_settings(pipeline, settings)


def test_prompts_come_from_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a seven\n\n a four \n")
    assert read_prompts(file) == ("a seven", "a four")
    file.write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(file)
    with pytest.raises(FileNotFoundError, match=r"no .*none.txt"):
        read_prompts(tmp_path / "none.txt")
    file.write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"prompts.txt is not UTF-8 text"):
        read_prompts(file)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_prompts(tmp_path)


@pytest.mark.parametrize("read", [read_prompts, lambda path: tuple(text for text, _ in read_prompt_table(path))])
def test_every_command_reads_prompts_alike(read, tmp_path):
    """Columns of a table, and lines, which end where an editor ends them."""
    for name, content in (
        ("a.txt", "a\u2028seven\r\na\x0bfour\n"),
        ("a.csv", "number,text\n1,a\u2028seven\n2,a\x0bfour\n"),
        ("a.jsonl", '{"text": "a\u2028seven"}\n{"text": "a\\u000bfour"}\n'),
    ):
        (tmp_path / name).write_text(content, newline="")
        assert read(tmp_path / name) == ("a\u2028seven", "a\x0bfour")


def test_pictures_of_prompts_are_refused_where_nothing_takes_them(tmp_path):
    (tmp_path / "a.csv").write_text("text,image\na seven,a.png\n")
    with pytest.raises(ValueError, match=r"a\.csv gives pictures, such as .*a\.png, but only its prompts"):
        read_prompts(tmp_path / "a.csv")


def test_prompts_and_pictures_come_from_columns(tmp_path):
    rows, lines, text = (tmp_path / f"prompts.{kind}" for kind in ("csv", "jsonl", "txt"))
    rows.write_text("image,text\na.png,a seven\n,a four\n")
    assert read_prompt_table(rows) == (("a seven", tmp_path / "a.png"), ("a four", None))
    lines.write_text('{"text": "a seven"}\n{"text": "a four", "image": "b/c.png"}\n')
    assert read_prompt_table(lines) == (("a seven", None), ("a four", tmp_path / "b" / "c.png"))
    text.write_text("a seven\n")
    assert read_prompt_table(text) == (("a seven", None),)
    loud = tmp_path / "PROMPTS.CSV"
    loud.write_text('text,image\n"a seven, moving", a.png \na four, \n')
    assert read_prompt_table(loud) == (("a seven, moving", tmp_path / "a.png"), ("a four", None))
    for file, content, message in (
        (rows, "image\na.png\n", "Row 1 of .* has no prompt"),
        (rows, "prompt\na seven\n", "Row 1 of .* has no prompt in its column 'text', but prompt"),
        (rows, "text,image\n", "holds no prompts"),
        (rows, "text\na four\na seven, moving left\n", "Row 2 of .* has 2 values for 1 columns.*quotation marks"),
        (rows, "text,image\na seven, left,a.png\n", "Row 1 of .* has 3 values for 2 columns.*quotation marks"),
        (lines, "[1]\n", "Row 1 of .* has no prompt"),
        (lines, '{"text": "a seven", "image": 5}\n', "Row 1 of .*: image=5 must be the path of a picture"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_prompt_table(file)
