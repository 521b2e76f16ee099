"""`glmv doctor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from glmv.doctor.fact import Fact

COLOURS = {"ok": "green", "absent": "yellow", "broken": "red", "fatal": "bold red"}


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what this machine has, what will run on what, and why not on more.

    Exit code 0: everything for the CPU is there. 1: something that nothing here runs without is missing.
    """
    from glmv.doctor.fact import State
    from glmv.doctor.run import examine

    facts = examine()
    if as_json:
        print(json.dumps([fact.as_dict() for fact in facts], indent=1))
    else:
        print_table(facts)
    raise typer.Exit(int(any(fact.state is State.fatal for fact in facts)))


def print_table(facts: list[Fact]) -> None:
    """A section a part; as wide as the terminal, and without colours where there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "found", "", "why, or what to do", title="glmv doctor", title_justify="left", box=None)
    part = ""
    for fact in facts:
        if fact.part != part:
            table.add_row(Text(fact.part, style="bold"))
            part = fact.part
        state = Text(fact.state.value, style=COLOURS[fact.state.value])
        table.add_row(Text(f"  {fact.name}"), Text(fact.value), state, Text(fact.note))
    Console().print(table)
