"""Where a step goes: `layerzero.ledger`. See docs/howto/ledger.md."""

from layerzero.step_ledger.figures import RankRow, UnitRow
from layerzero.step_ledger.ledger import Ledger, ledger

__all__ = ["Ledger", "RankRow", "UnitRow", "ledger"]
