"""Every field of every class of settings refuses what it may not hold, by its name and value."""

import copy
import pickle
import re
from typing import Annotated, Literal

import pytest
from pydantic import Field, StrictInt

from mhla_diffusers import CausalConfig, MHLAConfig, SparseConfig
from mhla_diffusers.engines.settings import EngineSettings
from mhla_diffusers.errors import check_choice
from mhla_diffusers.families import Clip
from mhla_diffusers.settings import Positive, PositiveInteger, Settings, check_value, read_yaml
from mhla_diffusers.training import ObjectiveWeights, TrainingConfig, ValidationConfig

from .refusals import refused

RUN = {"output": "out", "steps": 1, "learning_rate": 1.0, "trainable": "all", "objectives": {"diffusion": 1}}
CLASSES = [
    # class, fields without a default
    (SparseConfig, {}),
    (MHLAConfig, {"blocks": (2, 2)}),
    (CausalConfig, {"blocks": (2, 2), "block_length": 2}),
    (ObjectiveWeights, {"diffusion": 1.0}),
    (ValidationConfig, {}),
    (TrainingConfig, RUN),
    (Clip, {"frames": 1, "fps": 1.0, "sizes": [(8, 8)]}),
    (EngineSettings, {}),
]
EVERY = [(cls, needed, name) for cls, needed in CLASSES for name in cls.model_fields if name != "config"]


@pytest.mark.parametrize(("cls", "needed", "name"), EVERY, ids=[f"{cls.__name__}.{name}" for cls, _, name in EVERY])
def test_every_field_names_itself_and_the_value(cls, needed, name):
    cls(**needed)
    default = cls.model_fields[name].default
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    for value in [object(), *([float("nan"), float("inf"), True, -1] if is_number else [])]:
        with pytest.raises(ValueError, match=f"^{name}[^ ]*[=:] ?{re.escape(repr(value))}") as caught:
            cls(**needed | {name: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("cls", "needed"), CLASSES, ids=str)
def test_settings_are_values(cls, needed):
    one = cls(**needed)
    for same in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), one.replace(), cls.read(one.to_dict())):  # noqa: S301
        assert same == one and hash(same) == hash(one) and repr(same) == repr(one)
    with pytest.raises(ValueError, match="frozen"):
        setattr(one, next(iter(cls.model_fields)), None)


class Inner(Settings):
    rate: Positive
    kind: Literal["fast", "slow"] = "fast"


class Outer(Settings):
    parts: tuple[Inner, ...]
    pair: tuple[StrictInt, StrictInt] | None = None
    named: dict[str, str | StrictInt] = {}
    code: Annotated[str, Field(pattern="^a+$")] = "a"


TEXT = "parts:\n  - rate: 1e-4\n  - rate: 2\n    kind: slow\npair: [1, 2]\n"


def test_a_file_is_read_with_overrides_and_a_round_trip_keeps_it():
    found = read_yaml(Outer, TEXT, "a.yaml", ["pair=[3, 4]", "named.x=y"])
    assert found == Outer(parts=(Inner(rate=1e-4), Inner(rate=2.0, kind="slow")), pair=(3, 4), named={"x": "y"})
    assert Outer.read(found.to_dict()) == found


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (TEXT, ["code=b"], "a.yaml with code=b: code='b' must match pattern '^a+$'."),
        (TEXT.replace("rate: 2", "rate: 0"), [], "a.yaml: parts.1: rate=0 must be greater than 0."),
        (TEXT.replace("rate: 1e-4", "{}"), [], "a.yaml: parts.0: rate must be given."),
        (TEXT.replace("slow", "slwo"), [], "parts.1: kind='slwo' must be 'fast' or 'slow'."),
        (TEXT.replace("rate: 2", "rat: 2"), [], "parts.1: Unknown setting 'rat'; did you mean 'rate'? "),
        (TEXT, ["parts.1.rate=1"], "parts.1.rate: parts.1 has no keys; set it as a whole."),
        (TEXT, ["parts"], "'parts' must look like key=value"),
        (TEXT, ["pair=[1"], "'pair=[1' is not valid YAML"),
        (TEXT.replace("[1, 2]", "[1, 2, 3]"), [], "pair=[1, 2, 3] must have at most 2 items after validation, not 3."),
        (TEXT.replace("[1, 2]", "[1, x]"), [], "pair=[1, 'x']: 'x' must be a valid integer."),
        (TEXT + "named: {a: 1.5}\n", [], "named={'a': 1.5}: 1.5 must be a valid string or be a valid integer."),
        (TEXT + "code: xyz\n", [], "code='xyz' must match pattern '^a+$'."),
        (TEXT + "pair: 3\n", [], "a.yaml...line 1...'pair' is given twice"),
        ("- 1\n", [], "a.yaml: [1] must be a mapping of settings."),
    ],
)
def test_errors_say_where_and_what(text, overrides, message):
    with refused(message):
        read_yaml(Outer, text, "a.yaml", overrides)


def test_arguments_of_functions_are_checked_alike():
    assert check_value("count", 3, PositiveInteger) == 3
    with refused("count=0 must be greater than 0."):
        check_value("count", 0, PositiveInteger)
    with refused("'content' or 'curve'; did you mean 'curve'?"):
        check_choice("order", "curv", ("content", "curve"))
