"""Zero-shot scores by lm-eval, the extra ``language``: its wrapper around a patched model."""

import pytest
import torch

from mhla_diffusers import MHLACache

from .models import logits, patched, words

pytest.importorskip("lm_eval", reason="lm-eval is the extra 'language', which dev does not need")


def test_log_likelihoods_are_those_of_the_model_for_texts_of_unlike_lengths_in_one_batch():
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = patched()
    judge = HFLM(pretrained=model, tokenizer=words(), batch_size=3, max_length=48)
    asked = [("w5 w9 w7", " w8 w3"), ("w4", " w6"), (" ".join(f"w{n}" for n in range(2, 30)), " w11 w12 w13")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(asked)]
    found = judge.loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (value, _) in zip(asked, found, strict=True):
        ids = torch.tensor([[int(word[1:]) for word in (context + continuation).split()]])
        count = len(continuation.split())
        scores = logits(model, ids).log_softmax(dim=-1)[0, -count - 1 : -1]
        expected = scores.gather(1, ids[0, -count:, None]).sum()
        assert value == pytest.approx(float(expected), rel=1e-4)


def test_texts_are_generated_one_by_one():
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = patched()
    judge = HFLM(pretrained=model, tokenizer=words(), batch_size=1, max_length=48)
    settings = {"until": ["w63"], "max_gen_toks": 6, "do_sample": False}
    requests = [Instance("generate_until", {}, ("w5 w9 w7", settings), 0)]
    (found,) = judge.generate_until(requests, disable_tqdm=True)
    ids = torch.tensor([[5, 9, 7]])
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False, past_key_values=MHLACache(model))[0, 3:]
    expected = " ".join(f"w{token}" for token in tokens.tolist())
    assert found.split() == expected.split("w63")[0].split()


def test_the_script_wraps_what_training_has_saved(tmp_path):
    import runpy
    from pathlib import Path

    from mhla_diffusers import save_mhla

    model = patched()
    model.config.save_pretrained(tmp_path)
    save_mhla(model, tmp_path, weights="all")
    words().save_pretrained(tmp_path / "tokenizer")
    script = Path(__file__).parents[2] / "studies/language/zero_shot.py"
    judge = runpy.run_path(str(script))["judge_of"](tmp_path, str(tmp_path / "tokenizer"))
    ids = torch.tensor([[5, 9, 7]])
    assert torch.equal(logits(judge.model, ids), logits(model, ids))
