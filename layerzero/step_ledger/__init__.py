"""Where a step goes: `layerzero.ledger`. See docs/howto/ledger.md."""

from layerzero.step_ledger.figures import GroupRow, RankRow, UnitRow
from layerzero.step_ledger.ledger import Ledger, ledger
from layerzero.step_ledger.path import PathRow

__all__ = ["GroupRow", "Ledger", "PathRow", "RankRow", "UnitRow", "ledger"]
