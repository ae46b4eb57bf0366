"""Files of prompts, as users write them."""

import pytest

from mhla_diffusers.generation.names import read_prompts


@pytest.mark.parametrize(
    ("name", "content", "pictures"),
    [
        ("a.txt", "a\u2028seven\r\na\x0bfour\n", (None, None)),
        ("a.csv", "number,text\n1,a\u2028seven\n2,a\x0bfour\n", (None, None)),
        ("A.CSV", 'image,text\na.png ,"a\u2028seven"\n,a\x0bfour \n', ("a.png", None)),
        ("a.jsonl", '{"text": "a\u2028seven"}\n{"text": "a\\u000bfour", "image": "b/c.png"}\n', (None, "b/c.png")),
    ],
)
def test_prompts_are_lines_or_a_column_and_pictures_another(name, content, pictures, tmp_path):
    """Lines end where an editor ends them."""
    (tmp_path / name).write_text(content, newline="")
    first, second = (None if one is None else tmp_path / one for one in pictures)
    assert read_prompts(tmp_path / name) == (("a\u2028seven", first), ("a\x0bfour", second))


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.txt", b"\n", r"a\.txt .*no prompts"),
        ("a.txt", bytes(range(256)), r"a\.txt .*UTF-8"),
        ("a.csv", b"prompt\na seven\n", "Row 1 .*'text'.*'prompt'"),
        ("a.csv", b"text,text\na four,a seven\n", "'text' is given twice"),
        ("a.csv", b"text\na four\na seven, moving left\n", "line 3.*1 columns.*quotation marks"),
        ("a.jsonl", b"[1]\n", "Row 1 .*no prompt"),
        ("a.jsonl", b'{"text": ["a seven"]}\n', "Row 1 .*no prompt"),
    ],
)
def test_files_that_hold_no_prompts_are_refused(name, content, named, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=named):
        read_prompts(tmp_path / name)
