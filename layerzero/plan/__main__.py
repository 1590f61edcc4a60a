"""python -m layerzero.plan: see layerzero/memory_plan/command.py."""

import sys

from layerzero.memory_plan.command import main

if __name__ == "__main__":
    sys.exit(main())
