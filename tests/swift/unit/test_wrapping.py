"""`wrapping`: all functions of a class are replaced, or none."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from lazyshard_swift.wrapping import wrap


def make_owner() -> Any:
    class Base:
        def inherited(self) -> str:
            return "inherited"

    class Owner(Base):
        value = 3

        def first(self, number: int) -> int:
            """Doc of the first."""
            return number

        def second(self) -> str:
            return "second"

    return Owner


def adding(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*arguments: Any) -> str:
            return f"{original(*arguments)} {text}"

        return replacement

    return make


def failing(original: Callable[..., Any]) -> Callable[..., Any]:
    raise RuntimeError(f"cannot wrap {original.__name__}")


def test_functions_are_replaced_and_pass_for_the_originals() -> None:
    owner = make_owner()
    original = owner.first
    wrap(owner, {"first": adding("a"), "second": adding("b")})
    assert (owner().first(1), owner().second()) == ("1 a", "second b")
    assert (owner.first.__name__, owner.first.__doc__, owner.first.__wrapped__) == (
        "first",
        "Doc of the first.",
        original,
    )


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["first", "third"], "no third"),
        (["third", "first", "fourth"], "no third, no fourth"),
        (["first", "value"], "no value"),
        # One of its base's would be replaced for all of its other classes too, or hidden for this one.
        (["first", "inherited"], "no inherited"),
    ],
)
def test_nothing_is_replaced_if_one_is_missing(names: list[str], missing: str) -> None:
    owner = make_owner()
    before = dict(vars(owner))
    with pytest.raises(AttributeError, match=f"^Owner has {missing}$"):
        wrap(owner, dict.fromkeys(names, adding("a")))
    assert dict(vars(owner)) == before


def test_nothing_is_replaced_if_one_cannot_be_made() -> None:
    owner = make_owner()
    before = dict(vars(owner))
    with pytest.raises(RuntimeError, match="cannot wrap second"):
        wrap(owner, {"first": adding("a"), "second": failing})
    assert dict(vars(owner)) == before


def test_functions_of_a_module_are_replaced_too() -> None:
    module = ModuleType("some.module")
    vars(module)["first"] = lambda: "first"
    wrap(module, {"first": adding("a")})
    assert module.first() == "first a"
    with pytest.raises(AttributeError, match=r"^some\.module has no second$"):
        wrap(module, {"second": adding("a")})


def test_wrapped_twice_both_count() -> None:
    owner = make_owner()
    wrap(owner, {"second": adding("a")})
    wrap(owner, {"second": adding("b")})
    assert owner().second() == "second a b"


def test_nothing_to_wrap_is_no_error() -> None:
    owner = make_owner()
    before = dict(vars(owner))
    wrap(owner, {})
    assert dict(vars(owner)) == before
