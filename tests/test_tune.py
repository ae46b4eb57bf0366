"""``mhla tune`` on tiny-wan: what is tried, what is written, and how a run goes on."""

import json
import re
from itertools import count

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.config import NOTHING_DENSE, PROFILES, SparseConfig, load_patch
from mhla_diffusers.tiny import load_tiny
from mhla_diffusers.tuning.candidates import Candidate, Search, Target, Trial
from mhla_diffusers.tuning.run import tune

from .evaluation.pictures import mhla as command
from .refusals import refused

PROMPTS = ["a seven moving left", "a three moving up"]
STEPS = 4
CALL = ("--set", f"num_inference_steps={STEPS}", "--set", "num_frames=2", "--device", "cpu")


@pytest.fixture(scope="module")
def pipe():
    return load_tiny("wan")


def call(pipe, calls=None, last=None):
    """Run of a clip; raises what Ctrl-C raises after so many calls."""

    def run(prompt):
        if calls is not None and next(calls) == last:
            raise KeyboardInterrupt
        generator = torch.Generator().manual_seed(0)
        return pipe(prompt, num_inference_steps=STEPS, num_frames=2, generator=generator, output_type="np").frames[0]

    return run


def written(folder):
    return [json.loads(line) for line in (folder / "candidates.jsonl").read_text().splitlines()]


def without_times(folder):
    return [
        (line["name"], [{key: x for key, x in clip.items() if key != "seconds"} for clip in line["clips"]])
        for line in written(folder)
    ]


def test_a_patch_is_found_and_written_for_every_way_to_patch(tmp_path, pipe):
    file, folder = tmp_path / "prompts.txt", tmp_path / "run"
    file.write_text("\n".join(PROMPTS))
    options = (*CALL, "--psnr", 5, "--output", folder)
    result = command("tune", "wan", "--prompts", file, *options)
    assert result.exit_code == 0, result.output
    last = result.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+\.\d dB \(worst clip \d+\.\d\) at \d+\.\dx: .*best\.yaml", last), last
    best = folder / "best.yaml"
    patch = load_patch(best)
    assert (patch.family, patch.base_model) == ("wan", "tiny-wan") and last.split(":")[0] in patch.description
    mhla.apply_mhla(pipe, best)
    assert mhla.is_patched(pipe)
    mhla.remove_mhla(pipe)
    unpatched, *tried = written(folder)
    assert (unpatched["name"], tried[0]["name"]) == ("unpatched", "fast")
    assert sorted(len(one["clips"]) for one in tried)[-3:] == [2, 2, 2], "all prompts judge the three best"
    page = (folder / "tune.html").read_text()
    assert page.count("<img") == len(tried) + 1 and last.split(":")[0] in page
    again = command("tune", "wan", "--prompts", file, *options)
    assert again.stdout.splitlines()[-1] == last, "nothing is left to do"
    other = command("tune", "wan", "--prompts", file, *options, "--seed", 1)
    assert "seed=0, now 1" in str(other.exception)


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, pipe):
    whole = count()
    expected = tune(pipe, call(pipe, whole), PROMPTS, tmp_path / "whole", psnr=20, steps=STEPS)
    parts = count()
    for last in (1, 5):
        with pytest.raises(KeyboardInterrupt):
            tune(pipe, call(pipe, parts, last), PROMPTS, tmp_path / "parts", psnr=20, steps=STEPS)
        assert not mhla.is_patched(pipe)
    assert (tmp_path / "parts" / "tune.html").is_file()
    found = tune(pipe, call(pipe, parts), PROMPTS, tmp_path / "parts", psnr=20, steps=STEPS)
    own, other = (dict(without_times(tmp_path / name)) for name in ("whole", "parts"))
    assert list(own) == list(other)
    for name, clips in own.items():  # times decide which are verified, nothing else
        assert clips[0] == other[name][0], name
    assert found.is_met and expected.is_met


def test_what_no_candidate_reaches_ends_with_the_best(tmp_path, pipe):
    file = tmp_path / "prompts.txt"
    file.write_text(PROMPTS[0])
    options = (*CALL, "--speedup", 1000, "--minutes", 0.1)
    result = command("tune", "tiny-wan", "--prompts", file, *options, "--output", tmp_path / "run")
    assert result.exit_code == 3
    assert "No candidate reaches 1000x; the best: " in result.stdout and "best.yaml" in result.stdout


@pytest.fixture(scope="module")
def stored(tmp_path_factory, pipe):
    """The folder of a run that was interrupted."""
    folder = tmp_path_factory.mktemp("stored") / "run"
    with pytest.raises(KeyboardInterrupt):
        tune(pipe, call(pipe, count(), 3), PROMPTS[:1], folder, psnr=5, steps=STEPS, settings={"model": "tiny"})
    return folder


@pytest.mark.parametrize(
    ("changes", "offending"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": "a seven"}, "prompts='a seven'"),
        ({"prompts": ["a two moving left"]}, "prompts"),
        ({"psnr": 30.0, "speedup": 2.0}, "psnr=30.0...speedup=2.0"),
        ({"psnr": -1.0}, "psnr"),
        ({"steps": 0}, "steps"),
        ({"settings": {"model": "another"}}, "model='tiny'...'another'"),
        ({"pipe": load_tiny("sana")}, "sana...linear"),
        ({"pipe": mhla.apply_mhla(load_tiny("wan"))}, "is patched"),
        ({"run": lambda prompt: None, "output": "other"}, "NoneType"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, stored, pipe, changes, offending):
    before = written(stored)
    given = {"pipe": pipe, "run": call(pipe, count(), 0), "prompts": PROMPTS[:1], "output": stored, "steps": STEPS}
    given |= {"settings": {"model": "tiny"}, **changes}
    with refused(offending):
        tune(**given | {"output": tmp_path / given["output"]})
    assert written(stored) == before


def search(target, judge, steps=50):
    """What is tried where a function of the candidate says what is measured: pairs of dB and speedup."""
    trials, chosen = [], Search(target, steps, depth=30)
    while (candidate := chosen.next_candidate(trials)) is not None:
        psnr, speedup = judge(chosen.cost(candidate))
        clip = {"psnr": psnr, "seconds": 1.0}
        trials.append(Trial(candidate, [clip], speedup=speedup))
        assert len(trials) < 60
    return trials


def law(cost):
    """Decibels that grow with the pairs that are computed."""
    return 20 + 40 * cost, 1 / cost


@pytest.mark.parametrize(
    "target",
    [*(Target(psnr=x) for x in (22.0, 27.0, 32.0, 37.0)), *(Target(speedup=x) for x in (1.5, 2.0, 3.0))],
    ids=str,
)
def test_the_cheapest_settings_of_a_psnr_and_the_most_faithful_of_a_speedup_are_found(target):
    trials = search(target, law)
    assert [trial.candidate.config for trial in trials[:3]] == [*PROFILES.values()][::-1]
    assert len({trial.candidate for trial in trials}) == len(trials)
    best = min(trials, key=target.rank)
    if target.speedup is None:
        assert target.psnr <= best.psnr < target.psnr + 2.5
    else:
        assert target.speedup <= best.speedup < 1.25 * target.speedup


@pytest.mark.parametrize("steps", [2, 4])
def test_settings_that_do_the_same_in_few_steps_are_tried_once_and_never_dense_ones(steps):
    configs = [trial.candidate.config for trial in search(Target(psnr=99), law, steps)]
    effects = [(one.density, one.dense_steps(steps), one.dense_layers) for one in configs]
    assert effects and len(set(effects)) == len(effects)
    assert all(len(one.dense_steps(steps)) < steps for one in configs)


def test_the_cost_is_the_share_of_pairs_that_are_computed():
    one = Candidate(SparseConfig(**{**NOTHING_DENSE, "density": 0.05, "dense_first": 1, "dense_layers": 1}))
    # 1 of 10 steps and 1 of 5 layers are dense
    assert Search(Target(), steps=10, depth=5).cost(one) == pytest.approx(1 - 0.9 * 0.8 * 0.95)
