"""Find settings for a model by whole calls of its pipeline, compared with unpatched ones.

A run folder records itself in ``settings.json`` and ``candidates.jsonl``, a line per candidate, and goes on from there.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from pydantic import Field
from safetensors.torch import load_file

from ..benchmark.measure import gather_conditions, timed
from ..benchmark.operator import SOFTMAX
from ..benchmark.pipeline import frames_of, patched
from ..config import USUAL_STEPS, Patch, SparseConfig
from ..errors import check
from ..families import get_family
from ..files import folder_for_results, read_json, read_json_lines, write_json, write_tensors, write_text
from ..generation.similarity import Similarity, load_similarities
from ..patching import find_transformers, is_patched
from ..reporting import progress
from ..settings import PositiveInteger, check_value, differences
from .candidates import Candidate, Search, Target, Trial, Tuned
from .page import write_page, write_strip

VERIFIED = 3
"""How many of the best candidates are judged by all prompts."""


def tune(
    pipe: Any,
    run: Callable[[str], Any],
    prompts: Sequence[str],
    output: str | Path,
    *,
    psnr: float | None = None,
    speedup: float | None = None,
    minutes: float = 30,
    steps: int = USUAL_STEPS,
    settings: Mapping[str, Any] | None = None,
) -> Tuned:
    """Find the settings of sparse attention that suit a pipeline, by calling it.

    The first prompt decides what is tried next; the three best are judged by all. Writes ``tune.html``
    and ``best.yaml``, and goes on where an earlier run with the same ``settings`` stopped.

    Args:
        pipe: unpatched pipeline, whose self-attention is softmax.
        run: calls it for a prompt, always from the same noise, and returns an image or frames, as PIL's or (F, H, W, 3)
            in [0, 1].
        prompts: at least one.
        output: folder of the run.
        psnr: target in dB; 30 if neither target is given.
        speedup: target as a multiple of the unpatched pipeline's speed, in place of ``psnr``.
        minutes: after which no further call is begun.
        steps: denoising steps of ``run``, which say what a candidate costs.
        settings: of the call, recorded so that runs do not mix.

    Raises:
        ValueError: both targets, a patched pipeline, a model without softmax attention, a folder of another run, or no
            candidate could run.
    """
    target, folder = Target(psnr, speedup), Path(output)
    check_value("prompts", prompts, Annotated[Sequence[str], Field(min_length=1)])
    check_value("steps", steps, PositiveInteger)
    transformer = next(iter(find_transformers(pipe).values()))
    family, device = get_family(transformer), next(transformer.parameters()).device
    check(
        family.computes == SOFTMAX,
        f"The attention of {family.name!r} is {family.computes}, not softmax, so tune does not apply; adapt MHLA "
        "with mhla finetune instead.",
    )
    check(
        not is_patched(pipe),
        "The pipeline is patched, but tune() compares with the unpatched one; call remove_mhla(pipe) first.",
    )
    model = str((settings or {}).get("model") or getattr(pipe, "name_or_path", ""))
    record = {"model": model, **(settings or {}), "prompts": list(prompts), "steps": steps}
    record |= {"device": gather_conditions(device)["device"], "transformer": type(transformer).__name__}
    search = Search(target, steps, len(family.self_attentions(transformer)))
    measures, remarks = load_similarities(str(device))
    ends = time.monotonic() + 60 * minutes
    with folder_for_results(folder):
        tuned = Tuned(target, prompts, _read_run(folder, record), remarks, folder / "best.yaml")
        try:
            with progress(total=round(60 * minutes), unit="s", leave=False) as bar:
                for trial in _work(tuned, ends, search):
                    index = len(trial.clips)
                    bar.set_description(f"{trial.candidate.name}, prompt {index + 1} of {len(prompts)}")
                    _judge(trial, tuned, pipe, partial(run, prompts[index]), device, folder, measures)
                    said = ({"name": one.candidate.name, **asdict(one)} for one in tuned.trials)
                    lines = [json.dumps(one, default=SparseConfig.to_dict) for one in said]
                    write_text("\n".join(lines) + "\n", folder / "candidates.jsonl")
                    if trial.clips:
                        bar.set_description(f"{trial.candidate.name}: {trial.psnr:.1f} dB at {trial.speedup:.2f}x")
                    bar.update(round(60 * minutes - max(0.0, ends - time.monotonic())) - bar.n)
        finally:  # interrupted as well
            if any(trial.clips for trial in tuned.trials[1:]):
                _write_best(tuned, family.name, model)
                write_page(tuned, record, folder / "tune.html")
        _ = tuned.best  # raises without one
    return tuned


def _read_run(folder: Path, record: Mapping[str, Any]) -> list[Trial]:
    """Read the trials of a run folder, at first the unpatched pipeline's alone; ValueError for another run's."""
    file, lines = folder / "settings.json", folder / "candidates.jsonl"
    if not lines.is_file():  # nothing was measured before
        write_json(record, file)
        return [Trial(Candidate())]
    before, now = read_json(file), json.loads(json.dumps(record))
    changed = [f"{name}={old!r}, now {new!r}" for name, old, new in differences(before, now)]
    check(not changed, f"{folder} holds another run ({'; '.join(changed)}); choose another folder.")
    trials = []
    for line in read_json_lines(lines):
        config = line["candidate"]["config"]
        candidate = Candidate(config and SparseConfig(**config))
        trials.append(Trial(candidate, line["clips"], line["failed"], line["speedup"]))
    return trials


def _work(tuned: Tuned, ends: float, search: Search) -> Iterator[Trial]:
    """Yield the trial to judge by its next prompt, until all are judged or time is up.

    Time for judging the best by the other prompts is kept back.
    """
    trials, count = tuned.trials, len(tuned.prompts)
    while time.monotonic() < ends and len(trials[0].clips) < count:
        yield trials[0]
    kept_back = VERIFIED * (count - 1) * trials[0].mean("seconds") if trials[0].clips else 0.0
    while time.monotonic() < ends:
        able = [trial for trial in trials[1:] if trial.clips]
        candidate = search.next_candidate(trials[1:]) if not able or time.monotonic() < ends - kept_back else None
        if candidate is not None:
            trials.append(Trial(candidate))
            yield trials[-1]
            continue
        best = sorted(able, key=search.rank)[:VERIFIED]
        unfinished = next((trial for trial in best if len(trial.clips) < count), None)
        if unfinished is None:
            return
        yield unfinished


def _judge(
    trial: Trial,
    tuned: Tuned,
    pipe: Any,
    run: Callable[[], Any],
    device: torch.device,
    folder: Path,
    measures: Mapping[str, Similarity],
) -> None:
    """Call the pipeline for the next prompt of a trial, and add what is measured."""
    unpatched, index = tuned.trials[0], len(trial.clips)
    try:
        with patched(pipe, trial.candidate.config, {}):
            if not index and device.type != "cpu" and trial in tuned.trials[:2]:
                run()  # compiles and loads what later calls find ready
            seconds, _, sample = timed(run, device)
    except (RuntimeError, ValueError) as error:  # out of memory, or settings that this call does not have
        if trial is unpatched:
            raise
        trial.failed, trial.clips = str(error).partition("\n")[0], []
        return
    frames, file = frames_of(sample), folder / "unpatched" / f"{index}.safetensors"
    if trial is unpatched:
        write_tensors({"frames": frames.contiguous()}, file)
    reference = load_file(file)["frames"]
    values = {name: measure(frames, reference) for name, measure in measures.items()}
    found = {"seconds": seconds, **{name: value.mean().item() for name, value in values.items()}}
    if not index:
        write_strip(frames, folder / "strips" / f"{tuned.trials.index(trial)}.png")
    trial.clips.append(found)
    sums = [sum(clip["seconds"] for clip in one.clips[: index + 1]) for one in (unpatched, trial)]
    trial.speedup = sums[0] / sums[1]


def _write_best(tuned: Tuned, family: str, model: str) -> None:
    """Write the best candidate's patch file."""
    best = tuned.best.candidate
    assert best.config is not None
    said = f"mhla tune: {best.name}; {tuned.measured}"
    patch = Patch(family=family, base_model=model, description=said, patch=best.config)
    write_text(yaml.safe_dump(patch.to_dict(), sort_keys=False, allow_unicode=True), tuned.file)
