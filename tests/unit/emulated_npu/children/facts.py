"""A child process finds out facts about the emulated device and prints them as one line of JSON."""

import json
from collections.abc import Callable

FACTS: dict[str, Callable[[], object]] = {}


def fact(function):
    """Its name and its answer, or its error's text, will be in the report."""
    FACTS[function.__name__] = function
    return function


def answer(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def report():
    print(json.dumps({name: answer(function) for name, function in FACTS.items()}, default=str))
