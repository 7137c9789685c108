"""float32 products in the precision asked for, whichever switches of torch were used before."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from joma.common.float32 import float32_is_coarse, float32_products

BACKENDS: Any = torch.backends


def _set(path: str, value: str) -> Callable[[], None]:
    def switch() -> None:
        place: Any = torch.backends
        for name in path.split(".")[:-1]:
            place = getattr(place, name)
        setattr(place, path.split(".")[-1], value)

    return switch


def _legacy(value: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(value)


def _allowed() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


SWITCHES: dict[str, tuple[Callable[[], None], ...]] = {
    "nothing": (),
    "legacy medium": (_legacy("medium"),),
    "legacy high": (_legacy("high"),),
    "legacy highest": (_legacy("highest"),),
    "allow_tf32": (_allowed,),
    "cuda": (_set("cuda.matmul.fp32_precision", "tf32"),),
    "mkldnn bf16": (_set("mkldnn.matmul.fp32_precision", "bf16"),),
    "mkldnn tf32": (_set("mkldnn.matmul.fp32_precision", "tf32"),),
    "all of torch": (_set("fp32_precision", "tf32"),),
    "all of torch, but for one": (
        _set("fp32_precision", "tf32"),
        _set("cuda.matmul.fp32_precision", "ieee"),
    ),
    "all of torch and one the same": (
        _set("fp32_precision", "tf32"),
        _set("cuda.matmul.fp32_precision", "tf32"),
    ),
    "cudnn": (_set("cudnn.fp32_precision", "tf32"),),
    "cudnn fine": (_set("cudnn.fp32_precision", "ieee"),),
    "cudnn and cuda the same": (
        _set("cudnn.fp32_precision", "tf32"),
        _set("cuda.matmul.fp32_precision", "tf32"),
    ),
    "all of torch, but for cudnn": (
        _set("fp32_precision", "tf32"),
        _set("cudnn.fp32_precision", "ieee"),
    ),
    "all of torch and cudnn the same": (
        _set("fp32_precision", "tf32"),
        _set("cudnn.fp32_precision", "tf32"),
    ),
    "legacy, then cuda": (_legacy("high"), _set("cuda.matmul.fp32_precision", "ieee")),
    "cuda, then legacy": (_set("cuda.matmul.fp32_precision", "tf32"), _legacy("medium")),
    "legacy, then mkldnn": (_legacy("medium"), _set("mkldnn.matmul.fp32_precision", "tf32")),
}


def set_in_torch() -> tuple[str, ...]:
    """All that is set, of torch, of backends, and of the older switch, even where these differ."""
    everywhere, cudnn = BACKENDS.fp32_precision, BACKENDS.cudnn
    seen = [everywhere, *_read()]
    for above in ("ieee", "tf32"):  # who follows what is set for all
        BACKENDS.fp32_precision = above
        seen += [cudnn.fp32_precision, *_read()]
    own = seen[-3] if seen[-3] == seen[-6] else "none"
    for above in ("ieee", "tf32"):  # who follows what is set in between
        cudnn.fp32_precision = above
        seen += _read()
    cudnn.fp32_precision, BACKENDS.fp32_precision = own, everywhere
    try:
        seen.append(torch.get_float32_matmul_precision())
    except RuntimeError as error:
        seen.append(str(error))
    return tuple(seen)


def _read() -> list[str]:
    return [place.fp32_precision for place in (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul)]


@contextmanager
def as_torch_begins() -> Iterator[None]:
    def reset() -> None:
        torch.set_float32_matmul_precision("highest")
        places = (BACKENDS, BACKENDS.cudnn, BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul)
        for place in places:
            place.fp32_precision = "none"

    reset()
    try:
        yield
    finally:
        reset()


@pytest.fixture(params=SWITCHES)
def switched(request: pytest.FixtureRequest) -> Iterator[None]:
    with as_torch_begins():
        for switch in SWITCHES[request.param]:
            switch()
        yield


@pytest.mark.usefixtures("switched")
@pytest.mark.parametrize(("precision", "older"), [("ieee", "highest"), ("tf32", "high")])
def test_what_was_set_comes_back(precision: Any, older: str) -> None:
    before = set_in_torch()
    with float32_products(precision):
        assert _read() == [precision] * 2
        assert torch.get_float32_matmul_precision() == older
        assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")
        assert float32_is_coarse() is (precision == "tf32")
        with float32_products("ieee"):
            assert not float32_is_coarse()
        assert _read() == [precision] * 2
    assert set_in_torch() == before
    with pytest.raises(KeyError), float32_products(precision):
        raise KeyError
    assert set_in_torch() == before


def test_a_backend_that_follows_all_of_torch_still_does() -> None:
    with as_torch_begins():
        BACKENDS.fp32_precision = "tf32"
        with float32_products("ieee"):
            pass
        assert float32_is_coarse()
        BACKENDS.fp32_precision = "ieee"
        assert not float32_is_coarse()


class TestOverlap:
    """Blocks that do not end in the reverse order of their beginning."""

    @pytest.mark.usefixtures("switched")
    @pytest.mark.parametrize("pair", [("ieee", "ieee"), ("tf32", "ieee"), ("ieee", "tf32")])
    def test_what_was_set_comes_back_once_all_have_ended(self, pair: Any) -> None:
        before = set_in_torch()
        one, two = (float32_products(precision) for precision in pair)
        one.__enter__()
        two.__enter__()
        assert _read() == [pair[1]] * 2  # the later one decides in one thread
        one.__exit__(None, None, None)
        assert _read() == [pair[1]] * 2
        two.__exit__(None, None, None)
        assert set_in_torch() == before

    def test_threads(self) -> None:
        began, left = threading.Event(), threading.Event()

        def other() -> list[str]:
            with float32_products("tf32"):
                began.set()
                left.wait()
                return _read()

        with as_torch_begins(), ThreadPoolExecutor(1) as pool:
            torch.set_float32_matmul_precision("medium")
            before = set_in_torch()
            with float32_products("ieee"):
                found = pool.submit(other)
                began.wait()
                together = _read()
            alone = _read()
            left.set()
            assert found.result() == ["tf32"] * 2
            assert set_in_torch() == before
        assert together == ["ieee"] * 2  # nobody computes more coarsely than they asked
        assert alone == ["tf32"] * 2
