"""What the harness asks for, asked by stand-ins; the harness itself need not be installed."""

import sys
from types import SimpleNamespace

import pytest

from jhpt.core.errors import InputError, NotHere
from jhpt.interop.lm_eval import Answers, harness_model


def asked(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.fixture(scope="module")
def answers(loaded) -> Answers:
    return Answers(loaded, batch=2)


def test_log_likelihoods(answers, loaded):
    pairs = [("the mesh", " maps"), ("", "each"), ("to a ", "device")]
    expected = [(one.logprob, one.greedy) for one in loaded.log_likelihoods(pairs)]
    assert [text for _, text in expected] == [False] * 3
    for found, one in zip(answers.loglikelihood(asked(*pairs)), expected, strict=True):
        assert found == pytest.approx(one, abs=1e-4)
    (rolling,) = answers.loglikelihood_rolling(asked(("the mesh maps",)))
    assert rolling == pytest.approx(loaded.log_likelihoods(["the mesh maps"])[0].logprob, abs=1e-4)


def test_text_until_a_stop(answers, loaded):
    (whole,) = loaded.generate(["the mesh"], tokens=6, temperature=0)
    tasks = [
        ("the mesh", {"until": [], "max_gen_toks": 6}),
        ("to", {"max_gen_toks": 3, "do_sample": False, "temperature": 0.0}),
        ("the mesh", {"until": ["", whole.text[2]], "max_gen_toks": 6}),
    ]
    found = answers.generate_until(asked(*tasks))
    expected = loaded.generate(["to"], tokens=3, temperature=0)[0].text
    assert found == [whole.text, expected, whole.text[: whole.text.index(whole.text[2])]]


def test_of_a_long_context_the_end_is_read(answers, loaded):
    (found,) = answers.generate_until(asked(("x" * 50 + "the mesh", {"max_gen_toks": 8})))
    assert found == loaded.generate(["x" * 16 + "the mesh"], tokens=8, temperature=0)[0].text
    assert len(answers.generate_until(asked(("the mesh", {})))) == 1, "tasks may ask for more than the model has"


def test_sampling_of_a_task(answers, loaded):
    task = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_gen_toks": 6}
    (found,) = answers.generate_until(asked(("the", task)))
    assert found == loaded.generate(["the"], tokens=6, temperature=0.5, top_p=0.9)[0].text
    with pytest.raises(InputError, match="the task sets num_beams"):
        answers.generate_until(asked(("the", {"num_beams": 4})))


def test_without_the_harness_it_says_what_to_install(loaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(NotHere, match="jhpt\\[lm-eval\\]"):
        harness_model(loaded)
