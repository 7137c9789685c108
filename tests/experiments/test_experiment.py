"""What may be asked of an experiment, and what it may answer."""

import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.experiments import (
    EXPERIMENTS,
    ChoiceOption,
    Experiment,
    Option,
    Outcome,
    Request,
    Scale,
    Verdict,
)

RATE = Option("learning-rate", 1e-5, "step size", published=(1e-5, 1e-4))
HIDDEN = Option("hidden", 4096, "hidden nodes", int, published=(4096, 400))
PLAIN = Experiment("plain", "title", "published.", lambda *_: Outcome(Verdict.AGREES, "f."))
TRAINED = dataclasses.replace(
    PLAIN,
    name="trained",
    scales={"tiny": Scale(1, "2 CPU cores", "1 GB"), "small": Scale(60, "2 CPU cores", "2 GB")},
    default_scale="small",
    options=(RATE, HIDDEN),
    groups=("one", "two"),
)


def test_a_request_is_complete_with_the_defaults():
    assert TRAINED.request(seed=3) == Request(
        3, "small", options={"learning-rate": 1e-5, "hidden": 4096}
    )
    request = TRAINED.request(
        scale="tiny", device="cuda", options={"hidden": 400}, groups=["two", "one", "two"]
    )
    assert request.options == {"learning-rate": 1e-5, "hidden": 400}
    assert (request.scale, request.device, request.groups) == ("tiny", "cuda", ("one", "two"))
    assert PLAIN.request() == Request()


def test_device_and_groups_do_not_decide_the_numbers():
    config = TRAINED.request(device="cuda", groups=["one"], progress=print).config
    assert config == TRAINED.request().config
    assert config == {
        "seed": 0,
        "scale": "small",
        "options": {"learning-rate": 1e-5, "hidden": 4096},
    }
    assert PLAIN.request(seed=2).config == {"seed": 2}


@pytest.mark.parametrize(
    ("experiment", "asked", "sentence"),
    [
        (TRAINED, {"scale": "huge"}, "scale must be one of tiny, small for trained, got 'huge'"),
        (PLAIN, {"scale": "tiny"}, "scale must not be given for plain, .* got 'tiny'"),
        (TRAINED, {"groups": ["three"]}, "group must be one of one, two for trained, got 'three'"),
        (PLAIN, {"groups": ["one"]}, "group must not be given for plain, .* got 'one'"),
        (TRAINED, {"options": {"depth": 2}}, "depth must not be given .* learning-rate, hidden, "),
        (PLAIN, {"options": {"hidden": 2}}, "hidden must not be given for plain, .* got 2"),
        (TRAINED, {"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        (PLAIN, {"device": "cuda"}, "device must be cpu for plain, .* got 'cuda'"),
    ],
)
def test_what_cannot_be_met_is_refused(experiment: Experiment, asked, sentence: str):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        experiment.request(**asked)


@settings(max_examples=30, deadline=None)
@given(
    value=st.one_of(
        st.floats(max_value=0, allow_infinity=True),
        st.just(float("nan")),
        st.just(float("inf")),
        st.booleans(),
        st.none(),
        st.text(max_size=3),
        st.integers(max_value=0),
    )
)
def test_an_option_is_a_positive_number(value):
    for option in (RATE, HIDDEN):
        with pytest.raises(ValueError, match=f"{option.name} must be a positive"):
            TRAINED.request(options={option.name: value})


class TestChoice:
    @staticmethod
    def longer(given: str) -> str:
        if len(given) < 3:
            raise ValueError(f"color must be a longer word, got {given!r}")
        return given.lower()

    COLOR = ChoiceOption("color", {"tiny": "red", "small": "blue"}, "its color", ("red", "blue"))
    PAINTED = dataclasses.replace(TRAINED, options=(COLOR,))
    MIXED = dataclasses.replace(TRAINED, options=(dataclasses.replace(COLOR, other=longer),))

    @pytest.mark.parametrize("given", ["green", "", 3, None, True])
    def test_another_word_is_refused(self, given):
        with pytest.raises(ValueError, match=r"^color must be one of red, blue, got "):
            self.PAINTED.request(options={"color": given})

    def test_or_made_into_what_is_kept(self):
        assert self.MIXED.request(options={"color": "Green"}).options == {"color": "green"}
        with pytest.raises(ValueError, match=r"^color must be a longer word, got 'x'"):
            self.MIXED.request(options={"color": "x"})
        with pytest.raises(ValueError, match=r"^color must be one of red, blue, got 3"):
            self.MIXED.request(options={"color": 3})


def test_options_may_change_what_it_takes():
    assert TRAINED.takes(TRAINED.request()) == TRAINED.scales
    slow = dataclasses.replace(
        TRAINED, estimate=lambda options: {"tiny": Scale(options["hidden"], "2 CPU cores", "1 GB")}
    )
    assert slow.takes(slow.request(options={"hidden": 7}))["tiny"].seconds == 7


def test_a_request_reaches_another_process():
    for experiment in EXPERIMENTS.values():
        request = experiment.request(seed=1)
        assert pickle.loads(pickle.dumps(request)) == request
