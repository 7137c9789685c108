"""The rule by which hops are counted."""

import sys
import types

from tools.walk import Walk

_OUTER = """
def outer(inner):
    inner()
    inner()
    helper()

def helper():
    pass
"""
_INNER = "def inner(): pass"


def _module(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    return module


def test_a_call_between_modules_is_one_hop_however_often_it_is_made():
    first, second = _module("joma.first", _OUTER), _module("joma.second", _INNER)
    recorder = Walk()
    sys.setprofile(recorder)
    try:
        first.outer(second.inner)
    finally:
        sys.setprofile(None)
    assert list(recorder.hops) == [(("joma.first", "outer"), ("joma.second", "inner"))]


def test_calls_while_a_module_is_imported_do_not_count():
    second = _module("joma.second", _INNER)
    recorder = Walk()
    importing = types.ModuleType("joma.third")
    importing.__dict__["inner"] = second.inner
    sys.setprofile(recorder)
    try:
        exec("def begin():\n    inner()\nbegin()", importing.__dict__)
    finally:
        sys.setprofile(None)
    assert not recorder.hops
