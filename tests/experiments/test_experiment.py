"""What may be asked of an experiment, and what it may answer."""

import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.experiments import EXPERIMENTS, Experiment, Option, Outcome, Request, Scale

RATE = Option("learning-rate", 1e-5, "step size", published=(1e-5, 1e-4))
HIDDEN = Option("hidden", 4096, "hidden nodes", int, published=(4096, 400))
PLAIN = Experiment("plain", "title", "published.", lambda *_: Outcome(True, "f."))
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


def test_hidden_nodes_are_whole():
    with pytest.raises(ValueError, match=r"hidden must be a positive whole number, got 2\.5"):
        HIDDEN.checked(2.5)
    assert isinstance(HIDDEN.checked(2.0), int)
    assert RATE.checked(3e-5) == 3e-5  # not published, and allowed


@pytest.mark.parametrize("fields", [{"default_scale": "huge"}, {"scales": {}}])
def test_the_default_is_one_of_the_scales(fields):
    with pytest.raises(ValueError, match="default_scale must be"):
        dataclasses.replace(TRAINED, **fields)


def test_a_table_has_equal_keys():
    rows = [{"C": 20, "ours": 0.9}, {"C": 30, "ours": None}]
    assert Outcome(True, "f.", rows).table == rows
    with pytest.raises(ValueError, match=r"table must have rows of equal keys, got \['C', 'ours'"):
        Outcome(True, "f.", [*rows, {"C": 50}])


def test_a_request_reaches_another_process():
    for experiment in EXPERIMENTS.values():
        request = experiment.request(seed=1)
        assert pickle.loads(pickle.dumps(request)) == request
