"""``python -m gatelab`` is the command ``gatelab``."""

from gatelab.cli import main

main()
