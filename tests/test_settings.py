"""Every field of every class of settings refuses what it may not hold, by its name and value."""

from dataclasses import dataclass, field, fields
from typing import Literal

import pytest

from mhla_diffusers import CausalConfig, MHLAConfig, SparseConfig
from mhla_diffusers.demo.run import DemoConfig
from mhla_diffusers.engines.settings import EngineSettings
from mhla_diffusers.families import Clip
from mhla_diffusers.settings import Settings, allow, check_choice, check_value, read_yaml
from mhla_diffusers.training import ObjectiveWeights, StageConfig, TrainingConfig, ValidationConfig

STAGE = {"steps": 1, "learning_rate": 1.0, "trainable": "all", "objectives": {"diffusion": 1}}
CLASSES = [
    # class, fields without a default
    (SparseConfig, {}),
    (MHLAConfig, {"blocks": (2, 2)}),
    (CausalConfig, {"blocks": (2, 2), "block_length": 2}),
    (ObjectiveWeights, {"diffusion": 1.0}),
    (StageConfig, STAGE),
    (ValidationConfig, {}),
    (TrainingConfig, {"output": "out", "stages": [STAGE]}),
    (Clip, {"frames": 1, "fps": 1.0, "sizes": [(8, 8)]}),
    (EngineSettings, {}),
    (DemoConfig, {}),
]
EVERY = [(cls, needed, item) for cls, needed in CLASSES for item in fields(cls) if item.name != "config"]


@pytest.mark.parametrize(("cls", "needed", "item"), EVERY, ids=[f"{cls.__name__}.{x.name}" for cls, _, x in EVERY])
def test_every_field_names_itself_and_the_value(cls, needed, item):
    cls(**needed)
    bad = [
        object(),
        *([float("nan"), float("inf"), True] if item.type in (float, int, int | None, float | None) else []),
    ]
    ends = item.metadata.get("allowed")
    if ends is not None:
        bad += [end - 1 for end in (ends.above, ends.at_least) if end is not None and item.type is not tuple]
        bad += [end + 1 for end in (ends.below, ends.at_most) if end is not None]
        bad += [""] * ends.is_filled
    for value in bad:
        with pytest.raises(ValueError, match=f"^{item.name}[^ ]*=") as refused:
            cls(**needed | {item.name: value})
        assert repr(value) in str(refused.value)


@dataclass(frozen=True)
class Inner(Settings):
    rate: float = field(metadata=allow(above=0, example="1e-3"))
    kind: Literal["fast", "slow"] = "fast"


@dataclass(frozen=True)
class Outer(Settings):
    parts: tuple[Inner, ...]
    pair: tuple[int, int] | None = None
    named: dict[str, str | int] = field(default_factory=dict)


TEXT = "parts:\n  - rate: 1e-4\n  - rate: 2\n    kind: slow\npair: [1, 2]\n"


def test_a_file_is_read_with_overrides_and_a_round_trip_keeps_it():
    found = read_yaml(Outer, TEXT, "a.yaml", ["parts.1.rate=3", "named.x=y"])
    assert found == Outer((Inner(1e-4), Inner(3.0, "slow")), (1, 2), {"x": "y"})
    assert Outer.read(found.to_dict()) == found


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            TEXT,
            ["parts.1.rate=0"],
            "a.yaml with parts.1.rate=0: parts.1.rate=0 must be a number above 0",
        ),
        (TEXT, ["parts.0={}"], "a.yaml with parts.0={}: parts.0 lacks rate."),
        (TEXT, ["parts.0.kind=slwo"], "parts.0.kind='slwo' must be 'fast' or 'slow'; did you mean 'slow'?"),
        (TEXT, ["parts.0.rat=1"], "Unknown setting 'parts.0.rat'; did you mean 'rate'? Allowed: rate, kind."),
        (TEXT, ["parts.2.rate=1"], "Override 'parts.2.rate=1': there is no '2' to set; the list has 2 entries"),
        (TEXT, ["parts"], "Override 'parts' must look like key=value"),
        (TEXT, ["pair=[1"], "Override 'pair=[1' is not valid YAML"),
        (
            TEXT.replace("[1, 2]", "[1, 2, 3]"),
            [],
            "line 5: pair=[1, 2, 3] must be a list of 2 times an integer",
        ),
        (TEXT.replace("[1, 2]", "[1, x]"), [], "line 5: pair.1='x' must be an integer."),
        (TEXT + "named: {a: 1.5}\n", [], "line 6: named.a=1.5 must be text, or an integer."),
        (TEXT + "pair: 3\n", [], "'pair' is given twice"),
        ("- 1\n", [], "a.yaml: The configuration must hold named settings, got [1]."),
    ],
)
def test_errors_say_where_and_what(text, overrides, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        read_yaml(Outer, text, "a.yaml", overrides)
    assert message in str(refused.value)


def test_numbers_of_yaml_and_arguments_of_functions():
    assert check_value("rate", "1e-4", float, above=0) == 1e-4
    assert check_value("count", 3, int, above=0) == 3
    for check, message in (
        (lambda: check_value("count", 0, int, above=0), "count=0 must be an integer above 0."),
        (lambda: check_choice("order", "curv", ("content", "curve")), "'content' or 'curve'; did you mean 'curve'?"),
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            check()
        assert message in str(refused.value)
