"""The command ``gatelab``. Commands import what they need when they run, so that ``--help`` answers at once."""

from __future__ import annotations

import sys

import typer

from gatelab.cli import catalogue, long_context, machine, models, studies, training

COMMANDS = {
    "demo": training.demo,
    "train": training.train,
    "sft": training.sft,
    "make-chats": training.make_chats,
    "diagnose": models.diagnose,
    "quantise": models.quantise,
    "eval": models.evaluate,
    "convert": models.convert,
    "add-gate": models.add_gate,
    "study": studies.study,
    "extend": long_context.extend,
    "stream": long_context.stream,
    "prune": long_context.prune,
    "variants": catalogue.variants,
    "recipes": catalogue.recipes,
    "settings": catalogue.settings,
    "params": catalogue.params,
    "plan": machine.plan,
    "doctor": machine.doctor,
}

app = typer.Typer(
    name="gatelab",
    help="A workbench for gated attention: design a gate, train with it, compare it, look inside.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _command in COMMANDS.items():
    app.command(name=_name)(_command)
app.add_typer(long_context.ruler_commands, name="ruler")


def main() -> None:
    """Run the command; a mistake of the user or the system is one sentence and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        sys.exit(_fail(str(error), 2))
    except ArithmeticError as error:
        sys.exit(_fail(str(error), 1))
    except KeyboardInterrupt:
        sys.exit(_fail("stopped; the same command goes on from what is saved", 130))


def _fail(message: str, code: int) -> int:
    print(f"gatelab: {message}", file=sys.stderr)
    return code
